//! CREATE and ALLOC_WRITE to node 0: provisional pages.

use super::{leases::Client, *};

fn pointer_of(reply: &Reply) -> Pointer {
    assert_eq!(reply.status, Status::Ok, "{reply:?}");
    assert!(reply.header.flags.contains(Flags::PROVISIONAL));
    Pointer::from_ipv6(reply.header.target).unwrap()
}

fn confirm(at: Pointer, pages: u32) -> TestRequest {
    TestRequest::new(Command::Confirm, at.to_ipv6()).with(|header| header.length = pages)
}

#[test]
pub(super) fn repetitions_get_the_same_pages_and_time_runs_on() {
    let mut world = World::unopened(&config(), 16);
    let request = TestRequest::anywhere(Command::Create, 77, 3);
    let first = world.one(&request);
    let at = pointer_of(&first);
    assert_eq!((at.node, at.space, first.header.detail), (SERVER, SPACE, 2000));
    assert_eq!((first.header.sequence, first.header.session), (77, 0));
    assert_eq!(first.from.location, request.to.location);
    world.pass(Duration::from_millis(500));
    let again = world.one(&request.clone().attempt(1));
    assert_eq!((pointer_of(&again), again.header.detail), (at, 1500));
    assert_eq!(world.store.used_pages(), 3);
    let other = world.one(&TestRequest::anywhere(Command::Create, 78, 3));
    assert_ne!(pointer_of(&other), at);
    assert_eq!(world.responder.provisional_pages(), 6);
    assert_eq!(world.status(&request.with(|header| header.length = 4)), Status::Malformed);
}

#[test]
pub(super) fn unconfirmed_pages_are_freed_by_the_servers_clock() {
    let mut world = World::new();
    let request = TestRequest::anywhere(Command::Create, 77, 3);
    let at = pointer_of(&world.one(&request));
    world.pass(Duration::from_millis(1999));
    assert_eq!(world.store.used_pages(), 3);
    assert!(world.responder.poll_timeout().unwrap() <= world.now + Duration::from_millis(1));
    world.pass(Duration::from_millis(1));
    assert_eq!((world.store.used_pages(), world.responder.provisional_pages()), (0, 0));
    let late = world.next(confirm(at, 3));
    assert_eq!(world.status(&late), Status::NotAllocated);
    assert_eq!(world.event(Event::ProvisionalFreed), 1);
}

#[test]
pub(super) fn confirm_keeps_the_pages() {
    let mut world = World::new();
    let at = pointer_of(&world.one(&TestRequest::anywhere(Command::Create, 77, 3)));
    let request = world.next(confirm(at, 3));
    assert_eq!(world.status(&request), Status::Ok);
    world.pass(Duration::from_secs(5));
    assert_eq!(world.store.used_pages(), 3);
    assert_eq!(world.event(Event::ProvisionalConfirmed), 1);
    let again = world.next(confirm(at, 3));
    assert_eq!(world.status(&again), Status::Ok);
    let more = world.next(confirm(at, 4));
    assert_eq!(world.status(&more), Status::NotAllocated);
}

#[test]
pub(super) fn a_refused_confirm_confirms_nothing() {
    let mut world = World::new();
    let at = pointer_of(&world.one(&TestRequest::anywhere(Command::Create, 77, 3)));
    let mut refused = |request: TestRequest, status| {
        let request = world.next(request);
        assert_eq!(world.status(&request), status);
        assert_eq!(world.responder.provisional_pages(), 3, "{status:?}");
    };
    refused(confirm(at, 0), Status::BadLength);
    refused(confirm(moved_by(at, 8), 3), Status::Unaligned);
    refused(confirm(at, 4), Status::NotAllocated);
    refused(confirm(at, 3).with(|header| header.page_shift = 9), Status::Malformed);
    refused(confirm(at, 3).with(|header| header.range_epoch = 9), Status::StaleRangeEpoch);
    let mut refused_with = |authority, moved: bool, status| {
        world.responder.set_authority(authority);
        if moved {
            world.responder.add_moved(0..8, NodeId(2)).unwrap();
        }
        let delete = TestRequest::new(Command::Delete, at.to_ipv6());
        // The home frees what is elsewhere, too.
        let requests = [Some(confirm(at, 3)), (!moved).then_some(delete)];
        for request in requests.into_iter().flatten() {
            let request = world.next(request);
            assert_eq!(world.status(&request), status);
            assert_eq!(world.responder.provisional_pages(), 3, "{status:?}");
        }
    };
    refused_with(None, false, Status::NoAuthority);
    refused_with(config().authority, true, Status::Moved);
    world.pass(Duration::from_secs(2));
    assert_eq!(world.store.used_pages(), 0);
}

#[test]
pub(super) fn any_request_of_the_same_endpoint_on_the_pointer_keeps_them() {
    let mut world = World::new();
    let at = pointer_of(&world.one(&TestRequest::anywhere(Command::Create, 77, 3)));
    let request = world.read_request(page_of(at, 2), 8);
    assert_eq!(world.status(&request), Status::Ok);
    assert_eq!(world.event(Event::ProvisionalKept), 1);
    world.pass(Duration::from_secs(5));
    assert_eq!(world.store.used_pages(), 3);
}

#[test]
pub(super) fn another_endpoint_or_colour_does_not_keep_them() {
    let mut world = World::new();
    let mut request = TestRequest::anywhere(Command::Create, 77, 3);
    request.from = endpoint(NodeId(33));
    let at = pointer_of(&world.one(&request));
    let request = world.read_request(at, 8);
    assert_eq!(world.status(&request), Status::Ok);
    let own = pointer_of(&world.one(&TestRequest::anywhere(Command::Create, 78, 1)));
    let request = world.read_request(Pointer { tag: Tag(own.tag.0 + 1), ..own }, 8);
    assert_eq!(world.status(&request), Status::StaleTag);
    world.pass(Duration::from_secs(2));
    assert_eq!(world.store.used_pages(), 0);
}

#[test]
pub(super) fn deleting_provisional_pages_ends_them_once() {
    let mut world = World::new();
    let at = pointer_of(&world.one(&TestRequest::anywhere(Command::Create, 77, 3)));
    assert_eq!(world.delete(at, 3), Status::Ok);
    let next = world.create(3);
    world.pass(Duration::from_secs(5));
    assert_eq!(world.store.used_pages(), 3, "the timer freed a page of anothers");
    assert_eq!(next.location, at.location);
    assert_eq!(world.event(Event::FreeRefused), 0);
}

#[test]
pub(super) fn pages_freed_by_another_endpoint_can_be_confirmed_by_their_next_requester() {
    let mut world = World::new();
    let at = pointer_of(&world.one(&TestRequest::anywhere(Command::Create, 77, 1)));
    let other = world.one(&open(NodeId(21), 1, 3, 4096)).header.session;
    let mut delete = TestRequest::new(Command::Delete, at.to_ipv6());
    delete.from = endpoint(NodeId(21));
    let delete = delete.with(|header| (header.session, header.sequence) = (other, 1));
    assert_eq!(world.status(&delete), Status::Ok);
    assert_eq!(world.responder.provisional_pages(), 0);
    let next = pointer_of(&world.one(&TestRequest::anywhere(Command::Create, 78, 1)));
    assert_eq!(next.location, at.location);
    let request = world.next(confirm(next, 1));
    assert_eq!(world.status(&request), Status::Ok);
    world.pass(Duration::from_secs(5));
    assert_eq!(world.store.used_pages(), 1, "confirmed pages stay");
}

#[test]
pub(super) fn an_anywhere_alloc_write_states_its_piece_size() {
    let mut world = World::new();
    let data = stamp(5000, 9);
    let request =
        TestRequest::anywhere(Command::AllocWrite, 99, 0).with(|header| header.detail = 1368);
    let mut train = pieces(request, 0, &data, 1368);
    assert_eq!(train.len(), 4);
    assert_eq!(world.status(&train[0].clone().with(|h| h.detail = 0)), Status::Malformed);
    assert_eq!(world.status(&train[0].clone().with(|h| h.detail = 70000)), Status::Malformed);
    assert_eq!(world.send(&train[2]), []);
    assert_eq!(world.status(&train[0].clone().with(|h| h.detail = 2048)), Status::Malformed);
    let reply = world.one(&train[0].clone().attempt(1));
    assert_eq!((reply.status, reply.header.detail), (Status::Incomplete, 0b101));
    assert_eq!(world.send(&train[3]), []);
    let reply = world.one(&train[1]);
    let at = pointer_of(&reply);
    assert_eq!(reply.header.length, 5000);
    train.reverse();
    assert_eq!(pointer_of(&world.one(&train[0])), at);
    assert!(world.read(at, 5000) == data);
    world.pass(Duration::from_secs(5));
    assert_eq!(world.store.used_pages(), 2);
}

#[test]
pub(super) fn an_unfinished_alloc_write_is_freed_with_its_time() {
    let mut world = World::unopened(&config(), 16);
    let request =
        TestRequest::anywhere(Command::AllocWrite, 99, 0).with(|header| header.detail = 1024);
    let train = pieces(request, 0, &stamp(5000, 9), 1024);
    assert_eq!(world.send(&train[0]), []);
    assert_eq!(world.store.used_pages(), 2);
    world.pass(Duration::from_secs(2));
    assert_eq!(world.store.used_pages(), 0);
}

#[test]
pub(super) fn pages_that_were_guessed_and_freed_are_filled_no_further() {
    let data = stamp(3000, 9);
    for is_anywhere in [true, false] {
        let mut world = World::with(&config(), 16, 1024);
        let train = if is_anywhere {
            let request = TestRequest::anywhere(Command::AllocWrite, 99, 0)
                .with(|header| header.detail = 1024);
            pieces(request, 0, &data, 1024)
        } else {
            world.sequence = 1;
            let train = pieces(TestRequest::server(Command::AllocWrite), 0, &data, 1024);
            train.into_iter().map(|request| world.numbered(request, 1)).collect()
        };
        assert_eq!(world.send(&train[0]), []);
        let other = world.one(&open(NodeId(21), 1, 3, 4096)).header.session;
        let guess = pointer(0, 1);
        let mut delete = TestRequest::new(Command::Delete, guess.to_ipv6());
        delete.from = endpoint(NodeId(21));
        let delete = delete.with(|header| (header.session, header.sequence) = (other, 1));
        assert_eq!(world.status(&delete), Status::Ok);
        if !is_anywhere {
            assert_eq!(world.status(&train[1]), Status::NotAllocated);
        }
        let grant = world.store.create(Space(77), 1).unwrap();
        assert_eq!(grant.location, guess.location, "the same page for another space");
        let replies = world.send(&train[1]);
        // In a session the number still refers to those pages; without one it starts again.
        assert!(replies.iter().all(|reply| reply.status == Status::StaleTag));
        assert_eq!(replies.is_empty(), is_anywhere);
        assert!((0..4096).all(|place| world.store.byte(0, place) == 0), "it is not written");
        world.pass(Duration::from_secs(5));
        assert_eq!(world.store.used_pages(), 1, "the timer freed a page of another");
    }
}

#[test]
pub(super) fn guessed_pages_that_are_leased_are_not_filled_meanwhile() {
    for is_anywhere in [true, false] {
        let data = stamp(3000, 9);
        let mut world = World::with(&config(), 16, 1024);
        let train = if is_anywhere {
            let request = TestRequest::anywhere(Command::AllocWrite, 99, 0)
                .with(|header| header.detail = 1024);
            pieces(request, 0, &data, 1024)
        } else {
            world.sequence = 1;
            let train = pieces(TestRequest::server(Command::AllocWrite), 0, &data, 1024);
            train.into_iter().map(|request| world.numbered(request, 1)).collect()
        };
        assert_eq!(world.send(&train[0]), []);
        let mut other = Client::open(&mut world, NodeId(21), 1);
        let epoch = other.lease(&mut world, pointer(0, 1), 1);
        for piece in &train[1..] {
            assert_eq!(world.status(piece), Status::Busy);
        }
        assert!(
            (1024..4096).all(|place| world.store.byte(0, place) == 0),
            "only the owner may write"
        );
        let abort = other.under(Command::Abort, pointer(0, 1), 1, epoch);
        assert_eq!(world.status(&abort), Status::Ok);
        assert_eq!(world.send(&train[1]), []);
        assert_eq!(world.status(&train[2]), Status::Ok);
        assert!((0..3000).all(|place| world.store.byte(0, place) == data[place]));
    }
}

#[test]
pub(super) fn entries_and_pages_are_bounded() {
    let limits = Limits { provisional_count: 3, provisional_pages: 8, ..Limits::default() };
    let config = Config { limits, ..config() };
    let mut world = World::unopened(&config, 64);
    let request = |nonce, pages| TestRequest::anywhere(Command::Create, nonce, pages);
    assert_eq!(world.status(&request(1, 9)), Status::QuotaExceeded);
    assert_eq!(world.status(&request(1, u32::MAX)), Status::QuotaExceeded);
    for nonce in 1..=3 {
        assert_eq!(world.status(&request(nonce, 2)), Status::Ok);
    }
    assert_eq!(world.status(&request(4, 1)), Status::Overloaded);
    assert_eq!(world.status(&request(2, 2)), Status::Ok);
    world.pass(Duration::from_secs(2));
    assert_eq!(world.status(&request(4, 1)), Status::Ok);
}

#[test]
pub(super) fn refusals_leave_nothing_behind() {
    let mut world = World::with(&config(), 4, 4096);
    assert_eq!(world.status(&TestRequest::anywhere(Command::Create, 1, 5)), Status::OutOfMemory);
    assert_eq!(world.status(&TestRequest::anywhere(Command::Create, 1, 0)), Status::BadLength);
    let in_session = TestRequest::anywhere(Command::Create, 1, 1).with(|header| header.session = 4);
    assert_eq!(world.status(&in_session), Status::Malformed);
    let stale = TestRequest::anywhere(Command::Create, 1, 1).with(|header| header.incarnation = 0);
    assert_eq!(world.status(&stale), Status::StaleIncarnation);
    let stale = TestRequest::anywhere(Command::Create, 1, 1).with(|header| header.range_epoch = 9);
    assert_eq!(world.status(&stale), Status::StaleRangeEpoch);
    assert_eq!((world.store.used_pages(), world.responder.provisional_pages()), (0, 0));
    assert_eq!(world.status(&TestRequest::anywhere(Command::Create, 1, 4)), Status::Ok);
}

#[test]
pub(super) fn a_store_that_keeps_its_pages_is_counted() {
    let mut world = World::unopened(&config(), 4);
    assert_eq!(world.status(&TestRequest::anywhere(Command::Create, 1, 4)), Status::Ok);
    world.store.keeps = true;
    world.pass(Duration::from_secs(2));
    assert_eq!((world.event(Event::FreeRefused), world.responder.provisional_pages()), (1, 0));
}

#[test]
pub(super) fn another_endpoint_cannot_confirm() {
    let mut world = World::new();
    let mut request = TestRequest::anywhere(Command::Create, 77, 3);
    request.from = endpoint(NodeId(33));
    let at = pointer_of(&world.one(&request));
    let foreign = world.next(confirm(at, 3));
    assert_eq!(world.status(&foreign), Status::Forbidden);
    assert_eq!(world.responder.provisional_pages(), 3);
    // The requester of the pages can, and confirmed pages may be confirmed by all.
    let session = world.one(&open(NodeId(33), 1, 3, 4096)).header.session;
    let mut own = confirm(at, 3).with(|h| (h.session, h.sequence) = (session, 1));
    own.from = endpoint(NodeId(33));
    assert_eq!(world.status(&own), Status::Ok);
    let again = world.next(confirm(at, 3));
    assert_eq!(world.status(&again), Status::Ok);
    world.pass(Duration::from_secs(5));
    assert_eq!(world.store.used_pages(), 3);
}

#[test]
pub(super) fn a_node_has_at_most_its_share() {
    let limits = Limits {
        provisional_count: 10,
        provisional_pages: 20,
        node_provisional_count: 3,
        node_provisional_pages: 8,
        ..Limits::default()
    };
    let mut world = World::with(&Config { limits, ..config() }, 64, 4096);
    let request = |node, nonce, pages| {
        let mut request = TestRequest::anywhere(Command::Create, nonce, pages);
        request.from = endpoint(NodeId(node));
        request
    };
    assert_eq!(world.status(&request(50, 1, 9)), Status::QuotaExceeded, "never");
    assert_eq!(world.status(&request(50, 1, 6)), Status::Ok);
    assert_eq!(world.status(&request(50, 2, 3)), Status::Overloaded, "not now");
    assert_eq!(world.event(Event::ProvisionalBeyondShare), 2);
    for (node, nonce) in [(50, 3), (50, 4), (51, 1), (51, 2), (51, 3)] {
        assert_eq!(world.status(&request(node, nonce, 1)), Status::Ok);
    }
    assert_eq!(world.status(&request(50, 5, 1)), Status::Overloaded);
    assert_eq!(world.status(&request(51, 4, 1)), Status::Overloaded);
    assert_eq!(world.event(Event::ProvisionalBeyondShare), 4);
    assert_eq!(world.status(&request(52, 1, 8)), Status::Ok, "other nodes have their own shares");
    // A share is free again when its pages are freed or confirmed.
    world.pass(Duration::from_secs(2));
    for (node, nonce) in [(50, 6), (50, 7), (50, 8)] {
        assert_eq!(world.status(&request(node, nonce, 1)), Status::Ok);
    }
    let mut at = None;
    for nonce in 1..=3 {
        let request = TestRequest::anywhere(Command::Create, nonce, 2);
        at = Some(pointer_of(&world.one(&request)));
    }
    let own = TestRequest::anywhere(Command::Create, 4, 2);
    assert_eq!(world.status(&own), Status::Overloaded);
    let keep = world.next(confirm(at.unwrap(), 2));
    assert_eq!(world.status(&keep), Status::Ok);
    assert_eq!(world.status(&own), Status::Ok);
}

#[test]
fn pages_of_all_nodes_together_are_bounded() {
    let limits = Limits { provisional_pages: 8, ..Limits::default() };
    let mut world = World::unopened(&Config { limits, ..config() }, 64);
    let request = |node, pages| {
        let mut request = TestRequest::anywhere(Command::Create, 1, pages);
        request.from = endpoint(NodeId(node));
        request
    };
    assert_eq!(world.status(&request(50, 6)), Status::Ok);
    assert_eq!(world.status(&request(51, 4)), Status::Overloaded);
    assert_eq!(world.status(&request(51, 3)), Status::Overloaded);
    assert_eq!(world.status(&request(52, 2)), Status::Ok, "exactly the remaining pages");
    assert_eq!(world.responder.provisional_pages(), 8);
}
