//! DELETE of allocations of which parts are at other servers (`docs/migration.md`, "DELETE").

use super::{
    giver::{LINE, MIGRATION, TAKER, given},
    leases::{Client, OTHER, millis},
    *,
};
use crate::{
    responder::{Freeing, PartPlace},
    store::Grant,
};

fn delete(at: Pointer, pages: u32) -> TestRequest {
    TestRequest::new(Command::Delete, at.to_ipv6()).with(|header| header.length = pages)
}

impl World {
    fn freeing(&self) -> Freeing {
        let mut all = self.responder.freeings();
        let one = all.next().expect("one is being freed");
        assert!(all.next().is_none());
        one
    }

    fn part(&self, count: u32) -> PartPlace {
        let id = self.freeing().id;
        self.responder.place_of_part(id, count).expect("it is being freed")
    }

    fn finish(&mut self) -> bool {
        let id = self.freeing().id;
        self.responder.finish_freeing(self.now, id, &mut self.store).expect("all was sent")
    }
}

#[test]
pub(super) fn the_home_frees_what_others_have() {
    for is_closed in [false, true] {
        let (mut world, [first, second, _], mut taker) = given();
        taker.move_line(&mut world, second);
        if is_closed {
            world.withdraw(MIGRATION).unwrap();
            world.close(MIGRATION).unwrap();
        }
        world.responder.set_notices(SPACE, true);
        for (wrong, status) in [
            (delete(second, 0), Status::Unaligned),
            (delete(first, 19), Status::BadLength),
            (delete(Pointer { tag: Tag(first.tag.0 + 1), ..first }, 0), Status::StaleTag),
        ] {
            let wrong = world.next(wrong);
            assert_eq!(world.status(&wrong), status);
        }
        let request = world.next(delete(first, 20));
        assert_eq!(world.send(&request), [], "the response follows");
        assert_eq!(world.send(&request), []);
        let events = [Event::FreeingBegun, Event::FreeingRepeated].map(|event| world.event(event));
        assert_eq!(events, [1, 1]);
        assert_eq!(world.store.told, ["freeing"]);
        let Freeing { home, grant, space, pages, .. } = world.freeing();
        let whole = Grant { location: first.location, tag: first.tag };
        assert_eq!((home, grant, space, pages), (SERVER, whole, SPACE, 20));
        assert_eq!(world.part(20), PartPlace::Here(4));
        assert_eq!(world.part(16), PartPlace::At(TAKER));
        assert_eq!(world.part(8), PartPlace::Here(8));
        assert!(world.finish());
        // The notice.
        world.responder.release(1);
        assert_eq!(world.drain()[0].header.length, 20);
        assert_eq!((world.event(Event::NoticeSent), world.event(Event::FreeingEnded)), (1, 1));
        assert_eq!(world.one(&request).header.length, 20, "a repetition");
        assert_eq!(world.store.used_pages(), 0);
        assert!(!world.responder.has_freeings());
        let again = world.next(delete(first, 0));
        assert_eq!(world.status(&again), Status::NotAllocated);
    }
}

#[test]
pub(super) fn it_is_there_until_the_others_have_freed_their_parts() {
    let (mut world, [first, second, third], mut taker) = given();
    taker.move_line(&mut world, second);
    let request = world.next(delete(first, 0));
    assert_eq!(world.send(&request), []);
    let other = world.next(delete(first, 0));
    assert_eq!(world.status(&other), Status::Busy, "it is being freed");
    let whole = Grant { location: first.location, tag: first.tag };
    let purged = world.responder.purge(world.now, SPACE, whole, &mut world.store);
    assert_eq!(purged, Ok(Ok(20)), "it will be free");
    assert_eq!(world.look(first).0, Status::Ok);
    // None of it is given away, and no lease on it is granted.
    let take = taker.request(Command::Take, first);
    assert_eq!(world.status(&take), Status::Busy);
    let update = TestRequest::new(Command::Update, third.to_ipv6());
    let update = world.next(update.with(|header| header.length = 8));
    assert_eq!(world.status(&update), Status::Busy);
    // The line comes home, and it is being freed nevertheless.
    world.withdraw(MIGRATION).unwrap();
    world.close(MIGRATION).unwrap();
    assert!(world.responder.remove_moved(&(LINE..2 * LINE)));
    assert_eq!(world.part(16), PartPlace::Here(8));
    let other = world.next(delete(first, 0));
    assert_eq!(world.status(&other), Status::Busy);
    let purged = world.responder.purge(world.now, SPACE, whole, &mut world.store);
    assert_eq!(purged, Ok(Ok(20)));
    assert!(world.finish());
    assert_eq!(world.drain(), [], "who asked for it has asked for something else since then");
    assert_eq!(world.store.used_pages(), 0);
}

#[test]
pub(super) fn a_lease_on_a_page_is_waited_for() {
    let (mut world, [first, second, third], mut taker) = given();
    taker.move_line(&mut world, second);
    let mut owner = Client::open(&mut world, OTHER, 1);
    owner.lease(&mut world, third, 8);
    let request = world.next(delete(first, 0));
    assert_eq!(world.status(&request), Status::Busy, "nothing was decided");
    assert!(!world.responder.has_freeings());
    world.pass(millis(1500));
    let request = world.next(delete(first, 0));
    assert_eq!(world.send(&request), []);
    // What is lost with the memory of another server need not be freed.
    let rows: [(Range<u64>, NodeId); 0] = [];
    world.responder.learn(world.now, &rows, core::slice::from_ref(&(LINE..2 * LINE)), &world.store);
    assert_eq!(world.part(16), PartPlace::Lost(8));
    // Who gave it up hears nothing.
    world.low_water = world.sequence + 1;
    assert_eq!(world.write(first, &[1; 8]), Status::Ok);
    assert!(world.finish());
    assert_eq!(world.drain(), []);
    assert_eq!(world.store.used_pages(), 0);
}

#[test]
pub(super) fn the_next_process_goes_on() {
    let (mut world, [first, second, _], mut taker) = given();
    taker.move_line(&mut world, second);
    world.withdraw(MIGRATION).unwrap();
    world.close(MIGRATION).unwrap();
    let request = world.next(delete(first, 0));
    assert_eq!(world.send(&request), []);
    world.restart();
    assert_eq!(world.event(Event::FreeingResumed), 1);
    assert_eq!(world.part(16), PartPlace::Unknown, "the controller will say it");
    let other = world.next(delete(first, 0));
    assert_eq!(world.status(&other), Status::Busy);
    world.responder.learn(world.now, &[(LINE..2 * LINE, OTHER)], &[], &world.store);
    assert_eq!(world.part(16), PartPlace::At(OTHER));
    assert!(world.finish());
    assert_eq!(world.drain(), [], "who asked for it has no session with this process");
    assert_eq!(world.store.used_pages(), 0);
}

#[test]
pub(super) fn a_part_is_freed_backwards_from_its_last_page() {
    let mut world = World::new();
    // The second half of an allocation, as if it was another node's.
    let (own, _, name) = world.create_adopted();
    let part = |at: Pointer, pages: u32| {
        let flag = |header: &mut Header| header.flags = header.flags.with(Flags::PART);
        delete(at, pages).with(flag)
    };
    let last = page_of(name, 7);
    for (wrong, status) in [
        (part(last, 0), Status::BadLength),
        (part(last, 600), Status::BadLength),
        (part(moved_by(last, 8), 16), Status::Unaligned),
        (part(own, 1), Status::Forbidden),
        (part(page_of(name, 8), 17), Status::WrongNode),
    ] {
        let wrong = world.next(wrong);
        assert_eq!(world.status(&wrong), status);
    }
    // Those of another allocation are elsewhere: these are of other contents of the node.
    let other = Pointer { tag: Tag(name.tag.0 + 1), ..last };
    let wrong = world.next(part(other, 16));
    assert_eq!(world.status(&wrong), Status::NoAuthority);
    // At another place of this one, pages are free as far as it goes.
    let wrong = world.next(part(last, 15));
    assert_eq!(world.one(&wrong).header.length, 8);
    assert_eq!(world.store.used_pages(), 16);
    let mut owner = Client::open(&mut world, OTHER, 1);
    owner.lease(&mut world, page_of(name, 3), 8);
    let request = world.next(part(last, 16));
    assert_eq!(world.status(&request), Status::Busy);
    // No lease follows, for a time.
    world.pass(millis(1100));
    let request = world.next(part(last, 16));
    assert_eq!(world.one(&request).header.length, 8);
    assert_eq!((world.store.used_pages(), world.event(Event::PartFreed)), (8, 2));
    let again = world.next(part(last, 16));
    assert_eq!(world.one(&again).header.length, 8, "it is free");
    assert_eq!(world.look(name).0, Status::NotAllocated);
    assert_eq!(world.look(own).0, Status::Ok);
}

#[test]
fn no_lease_is_granted_on_a_part_that_is_to_be_freed() {
    let mut world = World::new();
    let (_, _, name) = world.create_adopted();
    let mut owner = Client::open(&mut world, OTHER, 1);
    let epoch = owner.lease(&mut world, name, 8);
    let flag = |header: &mut Header| header.flags = header.flags.with(Flags::PART);
    let request = world.next(delete(page_of(name, 7), 16).with(flag));
    assert_eq!(world.status(&request), Status::Busy);
    let abort = owner.under(Command::Abort, name, 8, epoch);
    assert_eq!(world.status(&abort), Status::Ok);
    let update = |world: &mut World, owner: &mut Client| {
        let update = owner.request(Command::Update, name, 8);
        world.send(&update)[0].status
    };
    assert_eq!(update(&mut world, &mut owner), Status::Busy);
    world.pass(millis(1100));
    assert_eq!(update(&mut world, &mut owner), Status::Ok, "it was not asked for again");
}

#[test]
pub(super) fn who_has_the_first_page_frees_what_the_home_has_lost() {
    let mut world = World::new();
    let own = world.create(16);
    let adopted = Adopted {
        node: NodeId(4),
        generation: store::GENERATION,
        first_page: 512,
        page_count: 8,
        local_page: 0,
    };
    world.responder.add_adopted(adopted).unwrap();
    let name = Pointer { node: NodeId(4), ..pointer(512 * 4096, own.tag.0) };
    let request = world.next(delete(name, 16));
    assert_eq!(world.status(&request), Status::NoAuthority, "the home frees it");
    let flag = |header: &mut Header| header.flags = header.flags.with(Flags::ORPHAN);
    let wrong = world.next(delete(name, 15).with(flag));
    assert_eq!(world.status(&wrong), Status::BadLength);
    let request = world.next(delete(name, 16).with(flag));
    assert_eq!(world.send(&request), []);
    let Freeing { home, grant, .. } = world.freeing();
    assert_eq!((home, grant.location), (NodeId(4), name.location));
    assert_eq!(world.part(16), PartPlace::AskHome);
    assert_eq!(world.part(8), PartPlace::Here(8));
    assert!(world.finish());
    assert_eq!(world.drain()[0].header.length, 16);
    assert_eq!(world.look(name).0, Status::NotAllocated);
    assert_eq!(world.store.used_pages(), 8, "the others are not here");
}
