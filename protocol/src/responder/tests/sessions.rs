//! Section 2 of the contract: opening, closing, idling, incarnations, and the table's bounds.

use super::*;

fn ping_in(session: u64, node: NodeId, sequence: u64) -> TestRequest {
    let mut request = TestRequest::server(Command::Ping);
    request.from = endpoint(node);
    request.with(|header| (header.session, header.sequence) = (session, sequence))
}

fn opened(world: &mut World, node: NodeId, nonce: u64) -> Result<u64, Status> {
    let reply = world.one(&open(node, 1, nonce, 4096));
    if reply.status.is_ok() { Ok(reply.header.session) } else { Err(reply.status) }
}

#[test]
pub(super) fn the_reply_to_open_describes_the_session() {
    let config = Config { piece_bytes: 1368, ..config() };
    let mut world = World::unopened(&config, 8);
    let request = open(CLIENT, 1, 12345, 4096);
    let reply = world.one(&request);
    let header = reply.header;
    assert_eq!((reply.status, header.sequence, header.incarnation), (Status::Ok, 12345, 5));
    assert_eq!((header.length, header.credit, header.detail), (1368, 512, 2));
    assert_eq!(header.range_epoch, 1);
    assert_eq!(header.flags, Flags::AT_ENDPOINT);
    assert_ne!(header.session, 0);
    let again = world.one(&request.clone().attempt(1));
    assert_eq!(again.header.session, header.session);
    assert_eq!(again.header.flags, Flags::AT_ENDPOINT.with_attempt(1));
    assert_eq!(world.event(Event::OpenRepeated), 1);
    let other = world.one(&open(CLIENT, 1, 12346, 1024)).header;
    assert_ne!(other.session, header.session);
    assert_eq!(other.length, 1024);
    assert_eq!(world.responder.session_count(), 2);
    for (changed, status) in [
        (open(CLIENT, 1, 1, 1023), Status::BadLength),
        (open(CLIENT, 1, 1, 4096).with(|header| header.session = 1), Status::Malformed),
        (open(CLIENT, 1, 1, 4096).carrying(b"x"), Status::Malformed),
        (open(CLIENT, 0, 1, 4096), Status::StaleIncarnation),
    ] {
        assert_eq!(world.status(&changed), status);
    }
    assert_eq!(world.responder.session_count(), 2);
}

#[test]
pub(super) fn credit_is_limited_by_both_sides() {
    let limits = Limits { credit_pages: 100, ..Limits::default() };
    let mut world = World::unopened(&Config { limits, ..config() }, 8);
    assert_eq!(world.one(&open(CLIENT, 1, 1, 4096)).header.credit, 100);
    let mut narrow = open(CLIENT, 1, 2, 4096);
    narrow.header.credit = 7;
    assert_eq!(world.one(&narrow).header.credit, 7);
    narrow.header.sequence = 3;
    narrow.header.credit = 0;
    assert_eq!(world.one(&narrow).header.credit, 1);
    let session = world.one(&open(CLIENT, 1, 1, 4096)).header.session;
    assert_eq!(world.one(&ping_in(session, CLIENT, 1)).header.credit, 33);
}

#[test]
pub(super) fn session_ids_are_not_reused() {
    let mut world = World::unopened(&config(), 8);
    let mut seen = std::collections::HashSet::new();
    for nonce in 0..500 {
        let session = opened(&mut world, CLIENT, nonce).unwrap();
        assert!(seen.insert(session) && session != 0);
        assert_eq!(world.status(&ping_in(session, CLIENT, 1)), Status::Ok);
        let close = TestRequest::server(Command::Close);
        let close = close.with(|header| (header.session, header.sequence) = (session, 2));
        assert_eq!(world.status(&close), Status::Ok);
        assert_eq!(world.status(&close), Status::NoSession);
    }
    assert_eq!(world.responder.session_count(), 0);
    // A restarted server does not know them, and draws others.
    let mut restarted = World::unopened(&Config { incarnation: 6, ..config() }, 8);
    for nonce in 0..500 {
        assert!(seen.insert(opened(&mut restarted, CLIENT, nonce).unwrap()));
    }
}

#[test]
pub(super) fn idle_sessions_end_and_others_stay() {
    let mut world = World::unopened(&config(), 8);
    let idle = opened(&mut world, CLIENT, 1).unwrap();
    let busy = opened(&mut world, CLIENT, 2).unwrap();
    world.pass(Duration::from_secs(30));
    assert_eq!(world.status(&ping_in(busy, CLIENT, 1)), Status::Ok);
    assert_eq!(world.responder.poll_timeout(), Some(world.now + Duration::from_secs(30)));
    world.pass(Duration::from_secs(30));
    assert_eq!(world.status(&ping_in(idle, CLIENT, 1)), Status::NoSession);
    assert_eq!(world.status(&ping_in(busy, CLIENT, 2)), Status::Ok);
    assert_eq!(world.event(Event::SessionIdle), 1);
    world.pass(Duration::from_secs(60));
    assert_eq!((world.responder.session_count(), world.responder.poll_timeout()), (0, None));
}

#[test]
pub(super) fn a_higher_incarnation_ends_the_older_ones_sessions() {
    let mut world = World::with(&config(), 16, 1024);
    let at = world.create(2);
    let server = EndpointAddress::of_shard(SPACE, SERVER, 0, 0).to_ipv6();
    let alloc = pieces(TestRequest::new(Command::AllocWrite, server), 0, &[1; 8000], 1024);
    let write = world.write_train(at, &[1; 8000]);
    world.low_water = world.sequence;
    let alloc = world.numbered(alloc[0].clone(), world.sequence + 1);
    assert_eq!((world.send(&write[0]), world.send(&alloc)), (vec![], vec![]));
    assert_eq!(world.store.used_pages(), 4);
    let other = opened(&mut world, NodeId(50), 1).unwrap();

    assert_eq!(world.status(&open(CLIENT, 2, 1, 4096)), Status::Ok);
    assert_eq!(world.event(Event::SessionSuperseded), 1);
    assert_eq!(world.event(Event::IncarnationRaised), 1);
    assert_eq!(world.event(Event::AllocationAbandoned), 1);
    assert_eq!(world.store.used_pages(), 2, "unfinished pages are freed");
    assert_eq!(world.responder.trains.free_buffer_count(), 1024);
    assert_eq!(world.status(&write[1]), Status::StaleIncarnation);
    assert_eq!(world.status(&open(CLIENT, 1, 2, 4096)), Status::StaleIncarnation);
    assert_eq!(world.status(&ping_in(other, NodeId(50), 1)), Status::Ok);
    // An anywhere-CREATE of a newer incarnation counts as well.
    let request =
        TestRequest::anywhere(Command::Create, 1, 1).with(|header| header.incarnation = 3);
    assert_eq!(world.status(&request), Status::Ok);
    assert_eq!(world.responder.session_count(), 1);
}

#[test]
pub(super) fn a_full_table_evicts_from_the_node_with_most_sessions() {
    let limits = Limits { session_count: 4, node_session_count: 4, ..Limits::default() };
    let mut world = World::unopened(&Config { limits, ..config() }, 8);
    let (large, small) = (NodeId(50), NodeId(51));
    let mut sessions = Vec::new();
    let create = |session| {
        let mut request = TestRequest::server(Command::Create);
        request.from = endpoint(large);
        request.with(|header| (header.session, header.sequence, header.length) = (session, 1, 1))
    };
    for nonce in 0..3 {
        world.now = world.now + Duration::from_secs(1);
        sessions.push(opened(&mut world, large, nonce).unwrap());
        if nonce == 0 {
            // The oldest has a reply that its requester may still request.
            assert_eq!(world.status(&create(sessions[0])), Status::Ok);
        }
    }
    opened(&mut world, small, 0).unwrap();
    // The node without sessions gets a slot: the second session of the node with most is evicted.
    opened(&mut world, small, 1).unwrap();
    assert_eq!(world.event(Event::SessionEvicted), 1);
    assert_eq!(world.status(&ping_in(sessions[1], large, 1)), Status::NoSession);
    assert_eq!(world.status(&ping_in(sessions[2], large, 1)), Status::Ok);
    assert_eq!(world.status(&create(sessions[0])), Status::Ok);
    // With equal shares no session is evicted.
    assert_eq!(opened(&mut world, small, 2), Err(Status::Overloaded));
    assert_eq!(opened(&mut world, large, 9), Err(Status::Overloaded));
    // A third node may get one.
    assert_eq!(world.status(&create(sessions[2])), Status::Ok);
    opened(&mut world, NodeId(52), 0).unwrap();
    assert_eq!(world.status(&create(sessions[0])), Status::Ok);
    assert_eq!(world.status(&create(sessions[2])), Status::Ok);
    assert_eq!(world.responder.session_count(), 4);
}

#[test]
pub(super) fn a_node_at_its_limit_evicts_its_own_sessions() {
    let limits = Limits { session_count: 10, node_session_count: 2, ..Limits::default() };
    let mut world = World::unopened(&Config { limits, ..config() }, 8);
    let first = opened(&mut world, CLIENT, 1).unwrap();
    world.now = world.now + Duration::from_secs(1);
    let second = opened(&mut world, CLIENT, 2).unwrap();
    opened(&mut world, NodeId(51), 1).unwrap();
    opened(&mut world, CLIENT, 3).unwrap();
    assert_eq!(world.status(&ping_in(first, CLIENT, 1)), Status::NoSession);
    assert_eq!(world.status(&ping_in(second, CLIENT, 1)), Status::Ok);
    assert_eq!(world.responder.session_count(), 3);
}

#[test]
pub(super) fn a_reused_slot_has_no_old_records() {
    let limits = Limits { session_count: 1, ..Limits::default() };
    let mut world = World::with(&Config { limits, ..config() }, 8, 4096);
    let at = world.create(1);
    let add = TestRequest::new(Command::FetchAdd, at.to_ipv6())
        .carrying(&1_u64.to_be_bytes())
        .with(|header| header.length = 8);
    for round in 0..3_u64 {
        let request = world.next(add.clone());
        assert_eq!(world.one(&request).data, round.to_be_bytes());
        let close = world.next(TestRequest::server(Command::Close));
        assert_eq!(world.status(&close), Status::Ok);
        world.now = world.now + Duration::from_secs(1);
        world.reopen(4096);
    }
}

#[test]
pub(super) fn an_incarnation_fences_only_until_its_quarantine_ends() {
    let mut world = World::unopened(&config(), 8);
    // A client with the id uses the last incarnation, and leaves.
    assert_eq!(world.status(&open(CLIENT, u32::MAX, 1, 4096)), Status::Ok);
    let fenced = open(CLIENT, 2, 2, 4096);
    assert_eq!(world.status(&fenced), Status::StaleIncarnation);
    world.pass(Duration::from_secs(89));
    assert_eq!(world.responder.session_count(), 0);
    assert_eq!(world.status(&fenced), Status::StaleIncarnation);
    let anywhere =
        TestRequest::anywhere(Command::Create, 1, 1).with(|header| header.incarnation = 2);
    assert_eq!(world.status(&anywhere), Status::StaleIncarnation);
    // The time is stored in seconds.
    world.pass(Duration::from_secs(3));
    assert_eq!(world.status(&fenced), Status::Ok);
    assert_eq!(world.event(Event::IncarnationForgotten), 1);
    assert_eq!(world.status(&open(CLIENT, 1, 3, 4096)), Status::StaleIncarnation);
    assert_eq!(world.status(&anywhere), Status::Ok);
}

/// The next process of a server with kept memory would refuse the node again.
#[test]
fn a_fence_that_was_forgotten_is_not_kept() {
    let mut world = World::unopened(&config(), 8);
    assert_eq!(world.status(&open(CLIENT, u32::MAX, 1, 4096)), Status::Ok);
    assert_eq!(world.store.fences.get(&(SPACE, CLIENT)), Some(&u32::MAX));
    world.pass(Duration::from_secs(92));
    // Its incarnation is not refused any more, but it gets no session, for another reason.
    let too_small = open(CLIENT, 2, 2, 1);
    assert_eq!(world.status(&too_small), Status::BadLength);
    world.responder = Responder::new(&config()).unwrap();
    world.responder.begin(world.now, &mut world.store);
    assert_eq!(world.status(&open(CLIENT, 2, 3, 4096)), Status::Ok);
}

#[test]
pub(super) fn a_node_with_a_session_keeps_its_incarnation() {
    let mut world = World::unopened(&config(), 8);
    let session = opened(&mut world, CLIENT, 1).unwrap();
    for sequence in 1..5 {
        world.pass(Duration::from_secs(50));
        assert_eq!(world.status(&ping_in(session, CLIENT, sequence)), Status::Ok);
        assert_eq!(world.status(&open(CLIENT, 0, 2, 4096)), Status::StaleIncarnation);
    }
    // The time counts from when the node was last seen, not from its first OPEN.
    world.pass(Duration::from_secs(85));
    assert_eq!(world.status(&open(CLIENT, 0, 2, 4096)), Status::StaleIncarnation);
    assert_eq!(world.event(Event::IncarnationForgotten), 0);
}

fn add_in(session: u64, node: NodeId, at: Pointer) -> TestRequest {
    let mut request =
        TestRequest::new(Command::FetchAdd, at.to_ipv6()).carrying(&1_u64.to_be_bytes());
    request.from = endpoint(node);
    request.with(|header| (header.session, header.sequence, header.length) = (session, 1, 8))
}

#[test]
pub(super) fn a_recorded_reply_prevents_eviction_while_it_may_be_requested() {
    let limits = Limits { session_count: 2, ..Limits::default() };
    let mut world = World::unopened(&Config { limits, ..config() }, 8);
    let grant = world.store.create(SPACE, 1).unwrap();
    let at = Pointer { space: SPACE, node: SERVER, tag: grant.tag, location: grant.location };
    let (gone, live, third) = (NodeId(50), NodeId(51), NodeId(52));
    let mut sessions = Vec::new();
    for node in [gone, live] {
        let session = opened(&mut world, node, 1).unwrap();
        assert_eq!(world.status(&add_in(session, node, at)), Status::Ok);
        sessions.push(session);
    }
    // A requester repeats in a new session operations that it started in the last 45 s, so until
    // then its old session must exist, or have ended before.
    world.pass(Duration::from_secs(47));
    let ping = ping_in(sessions[1], live, 2).with(|header| header.answered_distance = 1);
    assert_eq!(world.status(&ping), Status::Ok);
    assert_eq!(opened(&mut world, third, 1), Err(Status::Overloaded));
    world.pass(Duration::from_secs(1));
    opened(&mut world, third, 1).expect("an idle session of 48 s is evicted");
    assert_eq!(world.status(&ping_in(sessions[0], gone, 2)), Status::NoSession);
    let again = world.one(&add_in(sessions[1], live, at));
    assert_eq!((again.status, again.data), (Status::Ok, 1_u64.to_be_bytes().to_vec()));
    assert_eq!(world.event(Event::ReplyRepeated), 1, "it was not applied twice");
}

#[test]
pub(super) fn the_last_quarter_of_the_table_is_for_nodes_with_few_sessions() {
    let limits = Limits { session_count: 40, node_session_count: 40, ..Limits::default() };
    let mut world = World::with(&Config { limits, ..config() }, 64, 4096);
    let at = world.create(1);
    let large = NodeId(50);
    let mut count = 0;
    while let Ok(session) = opened(&mut world, large, count) {
        assert_eq!(world.status(&add_in(session, large, at)), Status::Ok);
        count += 1;
    }
    assert_eq!(count, 29, "with the other one, three quarters of 40");
    for node in 60..70 {
        opened(&mut world, NodeId(node), 1).expect("a slot is free");
    }
}
