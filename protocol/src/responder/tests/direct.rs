//! Direct readers: what they see, and what the responder takes over from them.

use super::{
    leases::{Client, OTHER, millis, two},
    *,
};
use crate::{
    direct::{DirectRead, SharedSession},
    store::Grant,
};

const SECOND: Duration = Duration::from_secs(1);

/// Makes worlds with direct readers.
pub(super) fn shared<T>(make: impl FnOnce() -> T) -> T {
    WITH_READERS.set(true);
    let made = make();
    WITH_READERS.set(false);
    made
}

fn readers(world: &World) -> &SharedParts {
    world.store.readers.as_ref().expect("the world was made with readers")
}

fn shared_session(world: &World, session: u64) -> Option<&SharedSession> {
    readers(world).sessions.get(usize::from(session as u16))
}

fn as_direct(request: &TestRequest, now: Timestamp) -> DirectRead {
    let from = Fields::unpack(request.from).unwrap();
    DirectRead {
        session: request.header.session,
        space: from.space,
        node: from.node,
        incarnation: request.header.incarnation,
        sequence: request.header.sequence,
        low_water: request.header.low_water(),
        now,
    }
}

/// What a program in the kernel does with a READ inside of a page; `None`: it passes the READ on.
pub(super) fn read_directly(world: &World, request: &TestRequest) -> Option<Vec<u8>> {
    let facts = readers(world).shard.facts();
    let epoch = request.header.range_epoch;
    if world.now >= facts.open_until || (epoch != 0 && epoch != facts.range_epoch) {
        return None;
    }
    let read = as_direct(request, world.now);
    shared_session(world, read.session)?.admit_read(&read)?;
    let location = Location::from_bits(request.to.location)?;
    let (tag, length_bytes) = (Tag(request.to.tag), u64::from(request.header.length));
    let access = Access { location, length_bytes, tag, space: request.to.space };
    let is_leased = readers(world).leased.contains(&location.page());
    let is_given = world.store.given.contains(&(location.page() / 8 * 8));
    if is_leased || is_given || world.store.check(access).is_err() {
        return None;
    }
    let start = location.in_page();
    Some(world.store.read(location.page(), start..start + length_bytes as usize).to_vec())
}

/// Whether readers answer in a session now; it changes nothing.
fn is_shown(world: &World, session: u64, node: NodeId) -> bool {
    let Some(shared) = shared_session(world, session) else { return false };
    let (sequence, low_water) = (shared.low_water(), 0);
    let now = Timestamp::ZERO;
    let read = DirectRead { session, space: SPACE, node, incarnation: 1, sequence, low_water, now };
    shared.admit_read(&read).is_some()
}

fn patient(header: &mut Header) {
    header.flags = header.flags.with(Flags::QUEUED);
}

fn waits(world: &mut World, request: &TestRequest) {
    let reply = world.one(request);
    assert!(reply.status == Status::Busy && reply.header.flags.contains(Flags::QUEUED));
}

fn names(replies: &[Reply]) -> Vec<(u64, u64)> {
    replies.iter().map(|reply| (reply.header.session, reply.header.sequence)).collect()
}

fn name(request: &TestRequest) -> (u64, u64) {
    (request.header.session, request.header.sequence)
}

#[test]
fn a_late_write_has_no_effect_after_a_direct_read() {
    let mut world = shared(World::new);
    let at = world.create(1);
    assert_eq!(world.write(at, b"old"), Status::Ok);
    let late = world.write_train(at, b"new");
    let read = world.read_request(at, 3);
    let raised = world.event(Event::LowWaterRaised);
    assert_eq!(read_directly(&world, &read).as_deref(), Some(&b"old"[..]));
    assert_eq!(world.status(&late[0]), Status::Expired);
    assert_eq!(world.event(Event::LowWaterRaised), raised + 1);
    assert_eq!(world.read(at, 3), b"old");
}

#[test]
fn the_window_begins_at_the_low_water_of_readers() {
    let mut world = shared(World::new);
    let at = world.create(1);
    (world.sequence, world.low_water) = (999, 999);
    let read = world.read_request(at, 3);
    // A copy with the low water of an earlier time, and one that is too far ahead.
    world.low_water = 500;
    let ping = |world: &World, n| world.numbered(TestRequest::server(Command::Ping), n);
    let (early, far) = (ping(&world, 1511), ping(&world, 1512));
    assert_eq!(world.status(&early), Status::BeyondWindow);
    assert!(read_directly(&world, &read).is_some());
    assert_eq!(world.status(&early), Status::Ok);
    assert_eq!(world.status(&far), Status::BeyondWindow);
}

#[test]
fn the_late_pieces_of_a_train_have_no_effect_after_a_direct_read() {
    let mut world = shared(|| World::with(&config(), 64, 1024));
    let at = world.create(2);
    let late = world.write_train(at, &[7; 8192]);
    for piece in &late[..3] {
        assert_eq!(world.send(piece), []);
    }
    let read = world.read_request(at, 3);
    assert_eq!(read_directly(&world, &read).as_deref(), Some(&[0; 3][..]));
    for piece in &late[3..] {
        assert_eq!(world.status(piece), Status::Expired);
    }
    assert_eq!(world.event(Event::TrainForgotten), 1);
    assert_eq!(world.responder.trains.free_buffer_count(), 1024);
    assert_eq!(world.read(at, 4096), [0; 4096]);
}

#[test]
fn an_alloc_write_that_was_given_up_in_a_direct_read_is_freed() {
    let mut world = shared(|| World::with(&config(), 64, 1024));
    let at = world.create(1);
    world.sequence += 1;
    world.low_water = world.sequence;
    let server = EndpointAddress::of_shard(SPACE, SERVER, 0, 0).to_ipv6();
    let pieces = pieces(TestRequest::new(Command::AllocWrite, server), 0, &[1; 8000], 1024);
    assert_eq!(world.send(&world.numbered(pieces[0].clone(), world.sequence)), []);
    assert_eq!(world.store.used_pages(), 3);
    let read = world.read_request(at, 3);
    // No request follows: what a session left is looked at when it seems to be idle.
    world.pass(30 * SECOND);
    assert!(read_directly(&world, &read).is_some());
    assert_eq!(world.store.used_pages(), 3);
    world.pass(30 * SECOND);
    assert_eq!(world.event(Event::AllocationAbandoned), 1);
    assert_eq!((world.store.used_pages(), world.responder.session_count()), (1, 1));
}

#[test]
fn a_waiter_that_was_given_up_in_a_direct_read_is_not_served() {
    for command in [Command::Update, Command::Read] {
        for by_timer in [false, true] {
            let (mut world, at, mut owner, mut other) = shared(two);
            let epoch = owner.lease(&mut world, at, 1);
            waits(&mut world, &other.request(command, at, 1).with(patient));
            let read = other.request(Command::Read, page_of(at, 1), 8);
            assert!(read_directly(&world, &read).is_some());
            if by_timer {
                // Repeated in time; the copy is still on its way when the lease expires.
                for place in 0..world.responder.limits.wait_count {
                    if let Some(waiter) = world.responder.queue.at(place) {
                        waiter.repeat_by = world.now + 5 * SECOND;
                    }
                }
                world.pass(SECOND);
                assert_eq!(world.drain(), []);
            } else {
                assert_eq!(world.send(&owner.under(Command::Abort, at, 1, epoch)).len(), 1);
            }
            assert_eq!((world.responder.waiting_count(), world.responder.leased_pages()), (0, 0));
            assert_eq!(world.event(Event::WaiterForgotten), 1);
            assert!(is_shown(&world, other.session, OTHER));
        }
    }
}

/// The reader raises low water when the responder has begun to handle the request that ends the lease.
#[test]
fn a_waiter_is_given_up_until_it_is_served_and_not_later() {
    for command in [Command::Update, Command::Read] {
        let (mut world, at, mut owner, mut other) = shared(two);
        let epoch = owner.lease(&mut world, at, 1);
        waits(&mut world, &other.request(command, at, 1).with(patient));
        let read = as_direct(&other.request(Command::Read, page_of(at, 1), 8), world.now);
        world.store.readers.as_mut().unwrap().probe = Some(read);
        // ABORT checks its page before the waiter is served.
        let replies = world.send(&owner.under(Command::Abort, at, 1, epoch));
        assert_eq!((replies.len(), *readers(&world).probed.borrow()), (1, [1, 0]));
        assert_eq!((world.responder.waiting_count(), world.responder.leased_pages()), (0, 0));

        // Nothing of the owner's is checked if the lease expires, only the waiter's page.
        world.store.readers.as_mut().unwrap().probe = None;
        owner.lease(&mut world, at, 1);
        world.now = world.now + millis(900);
        other.low_water = None;
        let waiting = other.request(command, at, 1).with(patient);
        waits(&mut world, &waiting);
        let read = as_direct(&other.request(Command::Read, page_of(at, 1), 8), world.now);
        let shared = world.store.readers.as_mut().unwrap();
        (shared.probe, *shared.probed.borrow_mut()) = (Some(read), [0, 0]);
        world.pass(millis(100));
        assert_eq!(names(&world.drain()), [name(&waiting)]);
        let [admitted, refused] = *readers(&world).probed.borrow();
        assert!(admitted == 0 && refused > 0, "{admitted} {refused}");
        assert!(is_shown(&world, other.session, OTHER));
    }
}

#[test]
fn the_waiters_behind_those_that_were_given_up_are_served() {
    let (mut world, at, mut owner, mut other) = shared(two);
    let mut third = Client::open(&mut world, NodeId(23), 1);
    owner.lease(&mut world, at, 1);
    world.now = world.now + millis(900);
    (other.low_water, third.low_water) = (Some(1), Some(1));
    let requests = [
        other.request(Command::Read, at, 10).with(patient),
        other.request(Command::Update, at, 20).with(patient),
        third.request(Command::Read, at, 30).with(patient),
        other.request(Command::Read, at, 40).with(patient),
        third.request(Command::Update, at, 50).with(patient),
    ];
    for request in &requests {
        waits(&mut world, request);
    }
    other.low_water = Some(3);
    let read = other.request(Command::Read, page_of(at, 1), 8);
    assert!(read_directly(&world, &read).is_some());
    world.pass(millis(100));
    let replies = world.drain();
    assert_eq!(names(&replies), [2, 3, 4].map(|at: usize| name(&requests[at])));
    assert!(replies.iter().all(|reply| reply.status.is_ok()));
    assert_eq!(world.event(Event::WaiterForgotten), 2);
    assert_eq!(world.responder.waiting_count(), 0);
}

/// The reader raises low water when the responder has passed the waiter that is given up, and serves one behind it.
#[test]
fn the_waiters_are_looked_at_again_if_one_was_given_up_meanwhile() {
    let (mut world, at, mut owner, mut other) = shared(two);
    let mut third = Client::open(&mut world, NodeId(23), 1);
    owner.lease(&mut world, page_of(at, 1), 1);
    world.now = world.now + millis(100);
    let short = owner.request(Command::Update, page_of(at, 2), 8192);
    let short = short.with(|header| header.lease_remaining_ms = 100);
    assert_eq!(world.send(&short).len(), 2);
    (other.low_water, third.low_water) = (Some(1), Some(1));
    let given_up = other.request(Command::Update, at, 8192).with(patient);
    let served = [
        third.request(Command::Read, page_of(at, 2), 8).with(patient),
        other.request(Command::Read, page_of(at, 3), 8).with(patient),
        third.request(Command::Update, at, 8).with(patient),
    ];
    waits(&mut world, &given_up);
    for request in &served {
        waits(&mut world, request);
    }
    other.low_water = Some(2);
    let read = as_direct(&other.request(Command::Read, page_of(at, 8), 8), world.now);
    world.store.readers.as_mut().unwrap().probe = Some(read);
    world.pass(millis(100));
    assert_eq!(names(&world.drain()), [0, 1, 2].map(|at: usize| name(&served[at])));
    assert_eq!(world.responder.waiting_count(), 0);
}

#[test]
fn an_update_that_was_given_up_in_a_direct_read_keeps_no_page_from_others() {
    let (mut world, at, mut owner, mut other) = shared(two);
    let mut third = Client::open(&mut world, NodeId(23), 1);
    owner.lease(&mut world, page_of(at, 1), 1);
    waits(&mut world, &other.request(Command::Update, at, 8192).with(patient));
    let read = other.request(Command::Read, page_of(at, 8), 8);
    assert!(read_directly(&world, &read).is_some());
    let update = third.request(Command::Update, at, 1).with(patient);
    assert_eq!(world.status(&update), Status::Ok);
}

#[test]
fn a_session_is_shown_to_readers_after_every_request() {
    let mut world = shared(World::new);
    let at = world.create(1);
    let repeated = world.next(TestRequest::server(Command::Create));
    let ping = |world: &World, n| world.numbered(TestRequest::server(Command::Ping), n);
    world.low_water = 2;
    let (early, far) = (ping(&world, 1), ping(&world, 600));
    let other = ping(&world, world.sequence);
    let read = world.read_request(at, 8);
    for (request, status) in [
        (&repeated, Status::BadLength),
        (&repeated, Status::BadLength),
        (&other, Status::Malformed),
        (&read, Status::Ok),
        (&early, Status::Expired),
        (&far, Status::BeyondWindow),
    ] {
        assert_eq!(world.status(request), status);
        assert!(is_shown(&world, world.session, CLIENT), "{status}");
    }
    world.responder.begin_shutdown();
    let late = world.read_request(at, 8);
    assert_eq!(world.status(&late), Status::ShuttingDown);
    assert!(is_shown(&world, world.session, CLIENT));
}

#[test]
fn the_sessions_of_waiters_without_room_for_replies_are_shown() {
    let limits = Limits { reply_count: 64, ..Limits::default() };
    let mut world = shared(|| World::with(&Config { limits, ..config() }, 64, 4096));
    let at = world.create(8);
    let mut owner = Client::open(&mut world, NodeId(22), 1);
    let epoch = owner.lease(&mut world, at, 32768);
    let nodes = [30, 31, 32].map(NodeId);
    let sessions = nodes.map(|node| {
        let mut reader = Client::with(&mut world, node, 1, 1024);
        assert_eq!(world.send(&reader.request(Command::Read, at, 32768).with(patient)).len(), 8);
        (reader.session, node)
    });
    world.offer(&owner.under(Command::Abort, at, 32768, epoch)).unwrap();
    assert_eq!(world.responder.waiting_count(), 2);
    assert!(sessions.iter().all(|&(session, node)| is_shown(&world, session, node)));
}

#[test]
fn readers_do_not_answer_while_a_request_is_executed() {
    let mut world = shared(World::new);
    let at = world.create(1);
    let write = world.write_train(at, b"new");
    let read = as_direct(&world.read_request(at, 3), world.now);
    world.store.readers.as_mut().unwrap().probe = Some(read);
    assert_eq!(world.status(&write[0]), Status::Ok);
    assert_eq!(*readers(&world).probed.borrow(), [0, 1]);
}

#[test]
fn a_session_with_the_greatest_numbers_is_served_but_not_shared() {
    let mut world = shared(World::new);
    let at = world.create(1);
    for (sequence, is_shared) in [((1 << 47) - 1, true), (1 << 47, false), (1 << 60, false)] {
        (world.sequence, world.low_water) = (sequence - 1, sequence - 1);
        assert_eq!(world.write(at, b"new"), Status::Ok);
        assert_eq!(is_shown(&world, world.session, CLIENT), is_shared, "{sequence}");
        let read = world.read_request(at, 3);
        assert_eq!(read_directly(&world, &read), None, "its low water does not fit");
    }
    assert_eq!(world.read(at, 3), b"new");
}

#[test]
fn sessions_without_a_shared_slot_are_served_by_the_responder() {
    let mut world = shared(World::new);
    world.store.readers.as_mut().unwrap().sessions.truncate(1);
    let at = world.create(1);
    let mut other = Client::open(&mut world, OTHER, 1);
    let read = other.request(Command::Read, at, 3);
    assert_eq!(read_directly(&world, &read), None);
    assert_eq!(world.status(&read), Status::Ok);
    world.pass(30 * SECOND);
    let read = world.read_request(at, 3);
    assert!(read_directly(&world, &read).is_some());
    world.pass(30 * SECOND);
    assert_eq!(world.status(&other.request(Command::Read, at, 3)), Status::NoSession);
    assert!(is_shown(&world, world.session, CLIENT));
}

#[test]
fn a_session_is_described_when_it_is_opened() {
    let mut world = shared(|| World::unopened(&config(), 8));
    let mut request = open(CLIENT, 1, 9, 1368);
    request.header.credit = 33;
    let opened = world.one(&request).header.session;
    let read = |session, node, incarnation| {
        let now = world.now;
        let read =
            DirectRead { session, space: SPACE, node, incarnation, sequence: 1, low_water: 1, now };
        shared_session(&world, opened).unwrap().admit_read(&read)
    };
    let facts = read(opened, CLIENT, 1).expect("it is shown");
    assert_eq!((facts.piece_bytes, facts.takes_pages), (1368, 33));
    assert_eq!(read(opened, OTHER, 1), None);
    assert_eq!(read(opened, CLIENT, 2), None);
    assert_eq!(read(opened ^ 1 << 63, CLIENT, 1), None);
}

#[test]
fn a_closed_session_is_hidden_before_the_reply_and_its_slot_is_reused() {
    let mut world = shared(World::new);
    let at = world.create(1);
    let (old, read) = (world.session, world.read_request(at, 3));
    assert!(read_directly(&world, &read).is_some());
    let close = world.next(TestRequest::server(Command::Close));
    world.offer(&close).unwrap();
    assert!(!is_shown(&world, old, CLIENT));
    world.drain();
    world.now = world.now + SECOND;
    world.reopen(4096);
    assert_eq!(world.session as u16, old as u16, "the same slot");
    assert_eq!(read_directly(&world, &read), None);
    let read = world.read_request(at, 3);
    assert_eq!(read.header.sequence, 1);
    assert!(read_directly(&world, &read).is_some());
}

#[test]
fn superseded_sessions_are_hidden_before_the_reply() {
    let anywhere = TestRequest::anywhere(Command::Create, 1, 1).with(|header| {
        header.incarnation = 2;
    });
    for newer in [open(CLIENT, 2, 1, 4096), anywhere] {
        let mut world = shared(World::new);
        let first = world.session;
        world.now = world.now + SECOND;
        world.reopen(4096);
        let sessions = [first, world.session];
        assert!(sessions.iter().all(|&session| is_shown(&world, session, CLIENT)));
        world.offer(&newer).unwrap();
        assert!(!sessions.iter().any(|&session| is_shown(&world, session, CLIENT)));
        assert_eq!(world.event(Event::SessionSuperseded), 2);
    }
}

#[test]
fn reading_keeps_a_session_alive_until_it_stops() {
    let mut world = shared(World::new);
    let at = world.create(1);
    let mut other = Client::open(&mut world, OTHER, 1);
    let idle = 60 * SECOND;
    let mut last_read = world.now;
    for _ in 0..8 {
        world.now = world.now + 40 * SECOND;
        let read = world.read_request(at, 3);
        assert!(read_directly(&world, &read).is_some());
        last_read = world.now;
        // The timer may be due early, but not at once again.
        while let Some(due) = world.responder.poll_timeout().filter(|&due| due <= world.now) {
            world.pass(Duration::ZERO);
            assert!(world.responder.poll_timeout() > Some(due));
        }
    }
    assert_eq!(world.responder.session_count(), 1, "the one that read");
    assert_eq!(world.status(&other.request(Command::Read, at, 3)), Status::NoSession);
    let session = world.session;
    while world.responder.session_count() > 0 {
        let due = world.responder.poll_timeout().expect("a session is open");
        assert!(due > world.now && due <= last_read + idle);
        world.now = due;
        world.pass(Duration::ZERO);
        assert_eq!(is_shown(&world, session, CLIENT), world.now < last_read + idle);
    }
    assert_eq!(world.now, last_read + idle);
    assert_eq!(world.event(Event::SessionIdle), 2);
}

#[test]
fn a_node_that_only_reads_keeps_its_incarnation() {
    for is_idle in [true, false] {
        let mut world = shared(|| World::unopened(&config(), 8));
        let session = world.one(&open(CLIENT, 7, 1, 4096)).header.session;
        world.pass(59 * SECOND);
        let mut read = TestRequest::server(Command::Read);
        (read.header.session, read.header.sequence, read.header.incarnation) = (session, 1, 7);
        let read = as_direct(&read, world.now);
        assert!(shared_session(&world, session).unwrap().admit_read(&read).is_some());
        if is_idle {
            world.pass(SECOND);
            world.pass(59 * SECOND);
        } else {
            let slot = world.responder.sessions.slot(session).unwrap();
            world.responder.end_session(slot, Event::SessionEvicted, &mut world.store);
            world.now = world.now + 60 * SECOND;
        }
        assert_eq!(world.responder.session_count(), 0);
        let older = open(CLIENT, 6, 2, 4096);
        world.pass(28 * SECOND);
        assert_eq!(world.status(&older), Status::StaleIncarnation, "seen 88 s ago");
        world.pass(4 * SECOND);
        assert_eq!(world.status(&older), Status::Ok);
    }
}

#[test]
fn the_session_that_readers_saw_least_recently_is_evicted() {
    let limits = Limits { node_session_count: 3, ..Limits::default() };
    let mut world = shared(|| World::unopened(&Config { limits, ..config() }, 8));
    let grant = world.store.create(SPACE, 1).unwrap();
    let at = Pointer { space: SPACE, node: SERVER, tag: grant.tag, location: grant.location };
    let sessions = [1, 2, 3].map(|nonce| {
        world.now = world.now + SECOND;
        world.one(&open(CLIENT, 1, nonce, 4096)).header.session
    });
    // The opposite of the order in which they were opened.
    for session in [sessions[2], sessions[1], sessions[0]] {
        world.now = world.now + SECOND;
        world.session = session;
        let read = world.read_request(at, 3);
        assert!(read_directly(&world, &read).is_some());
    }
    world.now = world.now + SECOND;
    world.offer(&open(CLIENT, 1, 4, 4096)).unwrap();
    let shown = |world: &World| sessions.map(|session| is_shown(world, session, CLIENT));
    assert_eq!(shown(&world), [true, true, false]);
    world.drain();
    world.session = sessions[1];
    let read = world.read_request(at, 3);
    assert!(read_directly(&world, &read).is_some());
    assert_eq!(world.status(&open(CLIENT, 1, 5, 4096)), Status::Ok);
    assert_eq!(shown(&world), [false, true, false]);
}

/// Also if the responder saw many sessions less recently.
#[test]
fn a_session_that_is_read_is_not_evicted_for_one_that_is_not() {
    let limits = Limits { node_session_count: 100, ..Limits::default() };
    let mut world = shared(|| World::unopened(&Config { limits, ..config() }, 8));
    let grant = world.store.create(SPACE, 1).unwrap();
    let at = Pointer { space: SPACE, node: SERVER, tag: grant.tag, location: grant.location };
    let sessions: Vec<_> =
        (0..100).map(|nonce| world.one(&open(CLIENT, 1, nonce, 4096)).header.session).collect();
    world.now = world.now + SECOND;
    for &session in &sessions[..90] {
        world.session = session;
        let read = world.read_request(at, 3);
        assert!(read_directly(&world, &read).is_some());
    }
    assert_eq!(world.status(&open(CLIENT, 1, 100, 4096)), Status::Ok);
    let hidden: Vec<_> =
        (0..100).filter(|&number| !is_shown(&world, sessions[number], CLIENT)).collect();
    assert_eq!(hidden, [90]);
}

#[test]
fn a_session_whose_replies_were_given_up_in_a_direct_read_may_be_evicted() {
    let limits = Limits { node_session_count: 1, ..Limits::default() };
    let mut world = shared(|| World::with(&Config { limits, ..config() }, 8, 4096));
    let at = world.create(1);
    let next = open(CLIENT, 1, 5, 4096);
    assert_eq!(world.status(&next), Status::Overloaded, "its reply may still be requested");
    let read = world.read_request(at, 3);
    assert!(read_directly(&world, &read).is_some());
    assert_eq!(world.status(&next), Status::Ok);
    assert_eq!(world.event(Event::SessionEvicted), 1);
}

/// The pages that readers believe to be leased.
fn marked(world: &World) -> Vec<u64> {
    readers(world).leased.iter().copied().collect()
}

#[test]
fn leased_pages_are_marked_from_before_the_grant_until_they_are_released() {
    let (mut world, at, mut owner, mut other) = shared(two);
    let read = |client: &mut Client, page| client.request(Command::Read, page_of(at, page), 8);
    for command in [Command::Commit, Command::Abort] {
        let update = owner.request(Command::Update, at, 8192);
        world.offer(&update).unwrap();
        assert_eq!(marked(&world), [0, 1], "no reply was sent yet");
        let epoch = world.drain()[0].header.lease_epoch;
        assert_eq!(read_directly(&world, &read(&mut other, 0)), None);
        assert!(read_directly(&world, &read(&mut other, 2)).is_some());
        let requests = match command {
            Command::Commit => owner.commit(at, &[9; 8192], epoch),
            _ => vec![owner.under(Command::Abort, at, 8192, epoch)],
        };
        for request in &requests {
            assert_eq!(marked(&world), [0, 1]);
            world.send(request);
        }
        assert_eq!(marked(&world), []);
        for page in [0, 1] {
            let version = world.store.version(page);
            assert_eq!(readers(&world).marked_at[&page], version, "after the contents");
        }
        assert_eq!(read_directly(&world, &read(&mut other, 0)).as_deref(), Some(&[9; 8][..]));
    }
}

#[test]
fn pages_are_unmarked_when_their_lease_expires() {
    let (mut world, at, mut owner, mut other) = shared(two);
    // Nobody waits: the first READ that is passed on ends the lease.
    owner.lease(&mut world, at, 1);
    world.now = world.now + SECOND;
    let read = other.request(Command::Read, at, 8);
    assert_eq!((marked(&world), read_directly(&world, &read)), (vec![0], None));
    assert_eq!(world.status(&read), Status::Ok);
    assert!(marked(&world).is_empty() && read_directly(&world, &read).is_some());
    // A READ waits.
    owner.lease(&mut world, at, 1);
    world.now = world.now + millis(900);
    waits(&mut world, &other.request(Command::Read, at, 8).with(patient));
    world.pass(millis(100));
    assert_eq!((world.drain().len(), marked(&world)), (1, vec![]));
    // An UPDATE waits: the page stays marked for it.
    owner.lease(&mut world, at, 1);
    world.now = world.now + millis(900);
    waits(&mut world, &other.request(Command::Update, at, 8192).with(patient));
    world.pass(millis(100));
    assert_eq!((world.drain().len(), marked(&world)), (2, vec![0, 1]));
}

#[test]
fn pages_are_unmarked_when_their_lease_ends_otherwise() {
    let (mut world, at, mut owner, _) = shared(two);
    owner.lease(&mut world, at, 8192);
    world.offer(&open(owner.node, 2, 77, 4096)).unwrap();
    assert_eq!(marked(&world), [], "superseded");
    let session = world.drain()[0].header.session;
    (owner.session, owner.incarnation, owner.sequence) = (session, 2, 0);

    owner.lease(&mut world, at, 8192);
    world.responder.add_moved(0..8, OTHER).unwrap();
    assert_eq!(marked(&world), [0, 1], "not without the store");
    world.pass(Duration::ZERO);
    assert_eq!(marked(&world), [], "moved");
    assert!(world.responder.remove_moved(&(0..8)));

    let adopted = Adopted {
        node: NodeId(4),
        generation: store::GENERATION,
        first_page: 512,
        page_count: 8,
        local_page: 8,
    };
    world.responder.add_adopted(adopted).unwrap();
    let foreign = Pointer { node: NodeId(4), ..pointer(512 * 4096, at.tag.0) };
    owner.lease(&mut world, foreign, 8192);
    assert_eq!(marked(&world), [8, 9]);
    assert!(world.responder.remove_adopted(&adopted));
    world.pass(Duration::ZERO);
    assert_eq!(marked(&world), [], "no longer adopted");

    owner.lease(&mut world, page_of(at, 3), 8);
    world.now = world.now + SECOND;
    let grant = Grant { location: at.location, tag: at.tag };
    let purged = world.responder.purge(world.now, SPACE, grant, &mut world.store);
    assert_eq!((purged, marked(&world)), (Ok(Ok(16)), vec![]));
}

/// The grant to a waiter is in the queue when the request that caused it is not taken.
#[test]
fn pages_are_marked_if_the_replies_must_be_sent_first() {
    let (mut world, at, mut owner, mut other) = shared(two);
    owner.lease(&mut world, page_of(at, 1), 1);
    world.now = world.now + millis(900);
    waits(&mut world, &other.request(Command::Update, at, 8192).with(patient));
    assert_eq!(marked(&world), [1]);
    let read = world.read_request(page_of(at, 2), 8);
    world.offer(&read).unwrap();
    world.now = world.now + millis(100);
    let write = world.write_train(page_of(at, 2), b"new");
    assert_eq!(world.offer(&write[0]), Err(DrainFirst));
    assert_eq!(marked(&world), [0, 1]);
    assert_eq!(world.drain().len(), 3);
}

#[test]
fn a_shard_opens_when_it_begins_and_all_leases_are_marked() {
    let (mut world, at, mut owner, mut other) = two();
    owner.lease(&mut world, at, 1);
    world.store.readers = Some(SharedParts::new(100));
    let ping = other.number(TestRequest::server(Command::Ping));
    assert_eq!(world.status(&ping), Status::Ok);
    world.responder.publish(&world.store);
    let open_until = |world: &World| readers(world).shard.facts().open_until;
    assert_eq!(open_until(&world), Timestamp::ZERO);
    world.responder.begin(world.now, &mut world.store);
    world.responder.publish(&world.store);
    assert_eq!((open_until(&world), marked(&world)), (Timestamp::ZERO, vec![]));
    assert_eq!(world.status(&ping), Status::Ok);
    assert_eq!((open_until(&world), marked(&world)), (Timestamp::MAX, vec![0]));
}

#[test]
fn readers_see_nothing_of_an_earlier_responder() {
    let mut world = shared(World::new);
    let (session, at) = (world.session, world.create(1));
    assert!(is_shown(&world, session, CLIENT));
    world.responder = Responder::new(&Config { seed: 1, ..config() }).unwrap();
    // A session that was opened before the responder began stays.
    world.store.readers.as_mut().unwrap().sessions[0].withdraw();
    world.reopen(4096);
    let other = Client::open(&mut world, OTHER, 1).session;
    let close = world.next(TestRequest::server(Command::Close));
    assert_eq!(world.status(&close), Status::Ok);
    let facts = crate::direct::SessionFacts {
        id: session,
        space: SPACE,
        node: CLIENT,
        incarnation: 1,
        piece_bytes: 4096,
        takes_pages: 1,
    };
    shared_session(&world, session).unwrap().publish(&facts);
    world.responder.begin(world.now, &mut world.store);
    assert!(!is_shown(&world, session, CLIENT) && is_shown(&world, other, OTHER));
    assert_eq!(world.store.byte(at.location.page(), 0), 0);
}

#[test]
fn readers_answer_only_under_the_authority_of_the_shard() {
    let mut world = shared(World::new);
    let at = world.create(1);
    let is_open = |world: &mut World| {
        let read = world.read_request(at, 3);
        read_directly(world, &read).is_some()
    };
    let publish = |world: &mut World| world.responder.publish(&world.store);
    let facts = |world: &World| readers(world).shard.facts();
    assert!(is_open(&mut world));
    assert_eq!(facts(&world).open_until, Timestamp::MAX);
    assert_eq!((facts(&world).range_epoch, facts(&world).credit_pages), (1, 512));

    world.responder.set_authority(None);
    publish(&mut world);
    assert!(!is_open(&mut world));
    let expires_at = world.now + SECOND;
    let authority = Authority { range_epoch: 6, expires_at: Some(expires_at) };
    world.responder.set_authority(Some(authority));
    publish(&mut world);
    assert_eq!((facts(&world).range_epoch, facts(&world).open_until), (6, expires_at));
    assert!(is_open(&mut world));
    world.now = expires_at;
    assert!(!is_open(&mut world));
    world.responder.set_authority(Some(Authority { range_epoch: 7, expires_at: None }));
    publish(&mut world);
    assert!(is_open(&mut world));

    world.responder.add_moved(56..64, OTHER).unwrap();
    publish(&mut world);
    assert!(!is_open(&mut world));
    world.responder.remove_moved(&(56..64));
    publish(&mut world);
    assert!(is_open(&mut world));

    world.responder.begin_shutdown();
    publish(&mut world);
    assert!(!is_open(&mut world));
    assert_eq!(facts(&world).range_epoch, 7);
}

/// Without a call of `publish`, readers see every change after the next request or timer.
#[test]
fn changes_of_the_shard_are_published_with_the_next_call() {
    let mut world = shared(World::new);
    let facts = |world: &World| readers(world).shard.facts();
    for number in 1..=40 {
        Client::open(&mut world, NodeId(100 + number), 1);
    }
    assert_eq!(facts(&world).credit_pages, (16384 / 41) as u16);
    assert_eq!(facts(&world).credit_pages, world.responder.credit_pages);
    world.pass(60 * SECOND);
    assert_eq!(world.responder.session_count(), 0);
    assert_eq!(facts(&world).credit_pages, 512);
    world.responder.set_authority(None);
    assert_eq!(world.status(&open(CLIENT, 1, 7, 4096)), Status::Ok);
    assert_eq!(facts(&world).open_until, Timestamp::ZERO);
}
