//! Commands of an operator, outside of any session.

use super::{
    leases::{Client, OTHER, millis},
    *,
};
use crate::store::{Creator, Grant};

fn grant(at: Pointer) -> Grant {
    Grant { location: at.location, tag: at.tag }
}

fn purge(world: &mut World, at: Pointer) -> Result<Result<u32, Status>, DrainFirst> {
    world.responder.purge(world.now, SPACE, grant(at), &mut world.store)
}

#[test]
pub(super) fn an_operator_frees_unleased_allocations() {
    let mut world = World::new();
    let (kept, at) = (world.create(2), world.create(3));
    world.responder.set_notices(SPACE, true);
    assert_eq!(purge(&mut world, at), Ok(Ok(3)));
    assert_eq!(world.event(Event::AllocationPurged), 1);
    assert_eq!(world.event(Event::NoticeSent), 1, "endpoints with copies are notified");
    world.responder.release(1);
    let read = world.read_request(at, 8);
    assert_eq!(world.status(&read), Status::NotAllocated);
    assert_eq!(purge(&mut world, at), Ok(Err(Status::NotAllocated)), "it is freed");
    let wrong = Pointer { tag: Tag(kept.tag.0 + 1), ..kept };
    assert_eq!(purge(&mut world, wrong), Ok(Err(Status::StaleTag)));
    let other = world.responder.purge(world.now, Space(77), grant(kept), &mut world.store);
    assert_eq!(other, Ok(Err(Status::WrongSpace)));
    assert_eq!(world.store.used_pages(), 2);
}

#[test]
pub(super) fn an_operator_frees_nothing_that_is_leased_or_unconfirmed() {
    let mut world = World::new();
    let at = world.create(2);
    let mut owner = Client::open(&mut world, OTHER, 1);
    owner.lease(&mut world, page_of(at, 1), 8);
    let pages = at.location.page()..at.location.page() + 2;
    assert!(world.responder.are_leased(world.now, pages));
    assert_eq!(purge(&mut world, at), Ok(Err(Status::Busy)));
    let reply = world.one(&TestRequest::anywhere(Command::Create, 5, 1));
    let waiting = Pointer::from_ipv6(reply.header.target).unwrap();
    assert!(world.responder.is_provisional(waiting.location.page()));
    assert_eq!(purge(&mut world, waiting), Ok(Err(Status::Busy)));
    world.pass(millis(1500));
    assert_eq!(purge(&mut world, at), Ok(Ok(2)), "the lease ran out");
}

#[test]
pub(super) fn an_operator_frees_only_what_is_served_here_with_authority() {
    let mut world = World::new();
    let at = world.create(8);
    let pages = at.location.page()..at.location.page() + 8;
    let adopted = Adopted {
        node: NodeId(8),
        generation: store::GENERATION,
        first_page: 0,
        page_count: 8,
        local_page: pages.start,
    };
    world.responder.add_adopted(adopted).unwrap();
    assert_eq!(purge(&mut world, at), Ok(Err(Status::Moved)), "it is another node's");
    assert!(world.responder.remove_adopted(&adopted));
    let authority = world.responder.authority;
    world.responder.set_authority(None);
    assert_eq!(purge(&mut world, at), Ok(Err(Status::NoAuthority)));
    world.responder.set_authority(authority);
    // Its bytes are queued for a client.
    let read = world.read_request(at, 8);
    world.offer(&read).unwrap();
    assert_eq!(purge(&mut world, at), Err(DrainFirst));
    world.drain();
    assert_eq!(purge(&mut world, at), Ok(Ok(8)));
}

#[test]
fn the_store_records_the_creator_of_an_allocation() {
    let mut world = World::new();
    let at = world.create(1);
    let mut other = Client::open(&mut world, OTHER, 3);
    let request =
        other.number(TestRequest::server(Command::AllocWrite).with(|header| header.length = 8));
    let written = world.one(&request.carrying(&[1; 8]));
    assert_eq!(written.status, Status::Ok, "{written:?}");
    let provisional = world.one(&TestRequest::anywhere(Command::Create, 5, 1));
    let location = |reply: &Reply| Pointer::from_ipv6(reply.header.target).unwrap().location;
    let expected = [
        (at.location, Creator { node: CLIENT, incarnation: 1 }),
        (location(&written), Creator { node: OTHER, incarnation: 3 }),
        (location(&provisional), Creator { node: CLIENT, incarnation: 1 }),
    ];
    assert_eq!(world.store.creators, expected);
}
