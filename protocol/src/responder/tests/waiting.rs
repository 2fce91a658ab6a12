//! Section 10 of the contract: which requests wait for a leased page, in which order, and how long.

use super::{
    leases::{Client, OTHER, millis, two},
    *,
};

fn patient(header: &mut Header) {
    header.flags = header.flags.with(Flags::QUEUED);
}

fn repeat_within(reply: &Reply) -> Option<u32> {
    assert_eq!(reply.status, Status::Busy);
    reply.header.flags.contains(Flags::QUEUED).then_some(reply.header.detail)
}

/// Sends a request that has to wait, and checks that it does.
fn waits(world: &mut World, request: &TestRequest) {
    let reply = world.one(request);
    assert_eq!(repeat_within(&reply), Some(200), "{reply:?}");
}

fn numbers(replies: &[Reply]) -> Vec<(u64, u64)> {
    replies.iter().map(|reply| (reply.header.session, reply.header.sequence)).collect()
}

fn name(request: &TestRequest) -> (u64, u64) {
    (request.header.session, request.header.sequence)
}

/// An UPDATE of two pages that waits for the second of them: the first is free, but kept for it.
struct HalfFree {
    world: World,
    at: Pointer,
    owner: Client,
    other: Client,
    third: Client,
    /// The epoch of the owner's lease on the second page.
    second: u64,
    /// The waiting UPDATE of `other`.
    both: TestRequest,
}

impl HalfFree {
    fn new() -> Self {
        let (mut world, at, mut owner, mut other) = two();
        let third = Client::open(&mut world, NodeId(23), 1);
        let first = owner.lease(&mut world, at, 1);
        let second = owner.lease(&mut world, page_of(at, 1), 1);
        let both = other.request(Command::Update, at, 8192).with(patient);
        waits(&mut world, &both);
        assert_eq!(world.send(&owner.under(Command::Abort, at, 1, first)).len(), 1);
        Self { world, at, owner, other, third, second, both }
    }
}

#[test]
pub(super) fn waiters_are_served_in_order() {
    let (mut world, at, mut owner, mut other) = two();
    let mut third = Client::open(&mut world, NodeId(23), 1);
    (other.low_water, third.low_water) = (Some(1), Some(1));
    let epoch = owner.lease(&mut world, at, 4096);
    let requests = [
        other.request(Command::Read, at, 10).with(patient),
        third.request(Command::Read, at, 20).with(patient),
        other.request(Command::Update, at, 30).with(patient),
        third.request(Command::Read, at, 40).with(patient),
        third.request(Command::Update, at, 50).with(patient),
    ];
    for request in &requests {
        waits(&mut world, request);
    }
    assert_eq!(world.responder.waiting_count(), 5);
    let commit = owner.commit(at, b"new", epoch);
    let replies = world.send(&commit[0]);
    // The reply to the COMMIT, the READs in front of the first UPDATE, and that UPDATE.
    assert_eq!(
        numbers(&replies)[1..],
        [name(&requests[0]), name(&requests[1]), name(&requests[2])]
    );
    assert!(replies.iter().all(|reply| reply.status == Status::Ok));
    assert!(replies[1..].iter().all(|reply| &reply.data[..3] == b"new"));
    assert_eq!(replies[3].header.node, OTHER.0);
    let granted = replies[3].header.lease_epoch;
    assert!(granted > epoch);
    let replies = world.send(&other.under(Command::Abort, at, 30, granted));
    assert_eq!(numbers(&replies)[1..], [name(&requests[3]), name(&requests[4])]);
    assert_eq!(replies[2].header.node, 23);
    assert_eq!((world.responder.waiting_count(), world.event(Event::WaiterAnswered)), (0, 5));
    // A repeated READ that got its reply is a new one, a repeated grant is the recorded one.
    assert_eq!(world.status(&requests[3]), Status::Busy);
    assert_eq!(world.one(&requests[4]).header.lease_epoch, granted + 1);
}

#[test]
pub(super) fn a_waiter_that_is_not_repeated_gets_no_lease() {
    let (mut world, at, mut owner, mut other) = two();
    let mut third = Client::open(&mut world, NodeId(23), 1);
    let epoch = owner.lease(&mut world, at, 4096);
    let gone = other.request(Command::Update, at, 1).with(patient);
    let repeated = third.request(Command::Update, at, 2).with(patient);
    waits(&mut world, &gone);
    waits(&mut world, &repeated);
    world.now = world.now + millis(150);
    waits(&mut world, &repeated.clone().attempt(1));
    world.now = world.now + millis(51);
    let replies = world.send(&owner.under(Command::Abort, at, 1, epoch));
    assert_eq!(numbers(&replies)[1..], [name(&repeated)]);
    assert_eq!((replies[1].status, replies[1].header.flags.attempt()), (Status::Ok, 1));
    assert_eq!((world.event(Event::WaiterGone), world.event(Event::WaiterRepeated)), (1, 1));
    // It may return, as the last in the queue.
    waits(&mut world, &gone);
    assert_eq!(world.event(Event::WaiterJoined), 3);
}

#[test]
pub(super) fn waiting_ends_when_the_lease_expires() {
    let (mut world, at, mut owner, mut other) = two();
    let short =
        owner.request(Command::Update, at, 1).with(|header| header.lease_remaining_ms = 100);
    assert_eq!(world.status(&short), Status::Ok);
    let update = other.request(Command::Update, at, 1).with(patient);
    waits(&mut world, &update);
    let due = world.responder.poll_timeout().unwrap();
    assert_eq!(due - world.now, millis(100));
    world.pass(millis(99));
    assert_eq!(world.drain(), []);
    world.pass(millis(1));
    let replies = world.drain();
    assert_eq!((numbers(&replies), replies[0].status), (vec![name(&update)], Status::Ok));
    assert_eq!(world.event(Event::LeaseExpired), 1);
}

#[test]
pub(super) fn a_new_request_does_not_overtake_waiters_of_an_expired_lease() {
    let (mut world, at, mut owner, mut other) = two();
    let short =
        owner.request(Command::Update, at, 1).with(|header| header.lease_remaining_ms = 100);
    assert_eq!(world.status(&short), Status::Ok);
    let update = other.request(Command::Update, at, 1).with(patient);
    waits(&mut world, &update);
    world.now = world.now + millis(100);
    // No timer has fired, and the first owner sends another request.
    let replies = world.send(&owner.request(Command::Update, at, 1));
    assert_eq!(numbers(&replies)[0], name(&update));
    assert_eq!((replies[0].status, replies[1].status), (Status::Ok, Status::Busy));
    assert_eq!(replies[1].header.node, OTHER.0);
}

#[test]
pub(super) fn a_read_gets_the_free_pages_at_once_and_the_others_later() {
    let (mut world, at, mut owner, mut other) = two();
    let first = owner.lease(&mut world, page_of(at, 1), 1);
    let second = owner.lease(&mut world, page_of(at, 2), 1);
    let read = other.request(Command::Read, at, 4 * 4096).with(patient);
    let replies = world.send(&read);
    let statuses: Vec<_> = replies.iter().map(|reply| reply.status).collect();
    assert_eq!(statuses, [Status::Ok, Status::Busy, Status::Busy, Status::Ok]);
    assert_eq!(repeat_within(&replies[2]), Some(200));
    assert_eq!(replies[2].header.lease_epoch, second);
    let replies = world.send(&owner.under(Command::Abort, page_of(at, 1), 1, first));
    assert_eq!((replies.len(), replies[1].header.offset), (2, 4096));
    assert!(replies[1].data == stamp(32768, 1)[4096..8192]);
    // Its other pieces were lost: it requests the missing ones and keeps its place.
    let again = read.attempt(1).with(|header| {
        header.flags = header.flags.with(Flags::SELECTIVE);
        header.detail = 0b1101;
    });
    let statuses: Vec<_> = world.send(&again).iter().map(|reply| reply.status).collect();
    assert_eq!(statuses, [Status::Ok, Status::Busy, Status::Ok]);
    let replies = world.send(&owner.under(Command::Abort, page_of(at, 2), 1, second));
    assert_eq!((replies.len(), replies[1].header.offset), (2, 8192));
    assert_eq!(world.responder.waiting_count(), 0);
}

#[test]
pub(super) fn an_update_of_several_pages_is_not_starved() {
    let HalfFree { mut world, at, mut owner, mut other, mut third, second, both } = HalfFree::new();
    // The first page is free, but a request waits for it: a waiting one is queued behind.
    let late = third.request(Command::Update, at, 1).with(patient);
    let reply = world.one(&late);
    assert_eq!((repeat_within(&reply), reply.header.lease_epoch), (Some(200), 0));
    let replies = world.send(&owner.under(Command::Abort, page_of(at, 1), 1, second));
    assert_eq!(numbers(&replies)[1..], [name(&both); 2]);
    let epoch = replies[1].header.lease_epoch;
    let replies = world.send(&other.under(Command::Abort, at, 8192, epoch));
    assert_eq!(numbers(&replies)[1..], [name(&late)]);
}

#[test]
pub(super) fn abandoned_requests_stop_waiting() {
    let (mut world, at, mut owner, mut other) = two();
    let epoch = owner.lease(&mut world, at, 4096);
    // A repetition without the flag ends the waiting: the refusal is final.
    let update = other.request(Command::Update, at, 1).with(patient);
    waits(&mut world, &update);
    let plain = update.clone().attempt(1).with(|header| header.flags = Flags::default());
    assert_eq!(repeat_within(&world.one(&plain)), None);
    assert_eq!((world.responder.waiting_count(), world.event(Event::WaiterLeft)), (0, 1));
    assert_eq!(repeat_within(&world.one(&update)), None, "recorded");
    // A READ is never recorded, so it may start to wait again.
    let read = other.request(Command::Read, at, 1).with(patient);
    waits(&mut world, &read);
    let plain = read.clone().with(|header| header.flags = Flags::default());
    assert_eq!(repeat_within(&world.one(&plain)), None);
    waits(&mut world, &read);
    // Low water passes it, and the session ends.
    let next = other.request(Command::Update, at, 1).with(patient);
    waits(&mut world, &next);
    assert_eq!(world.responder.waiting_count(), 1);
    let close = other.number(TestRequest::server(Command::Close)).with(|header| {
        header.answered_distance = 1;
    });
    assert_eq!(world.status(&close), Status::Ok);
    assert_eq!((world.responder.waiting_count(), world.event(Event::WaiterForgotten)), (0, 2));
    assert_eq!(world.send(&owner.under(Command::Abort, at, 1, epoch)).len(), 1);
}

#[test]
pub(super) fn the_queue_is_bounded_in_all_and_per_node() {
    let limits = Limits { wait_count: 3, node_wait_count: 2, ..Limits::default() };
    let mut world = World::with(&Config { limits, ..config() }, 64, 4096);
    let at = world.create(8);
    let mut owner = Client::open(&mut world, NodeId(22), 1);
    let mut other = Client::open(&mut world, OTHER, 1);
    let mut third = Client::open(&mut world, NodeId(23), 1);
    (other.low_water, third.low_water) = (Some(1), Some(1));
    let epoch = owner.lease(&mut world, at, 4096);
    waits(&mut world, &other.request(Command::Read, at, 1).with(patient));
    waits(&mut world, &other.request(Command::Read, at, 1).with(patient));
    assert_eq!(repeat_within(&world.one(&other.request(Command::Read, at, 1).with(patient))), None);
    waits(&mut world, &third.request(Command::Read, at, 1).with(patient));
    let refused = third.request(Command::Update, at, 1).with(patient);
    assert_eq!(repeat_within(&world.one(&refused)), None);
    assert_eq!(world.event(Event::WaiterRefused), 2);
    // A waiter that was not repeated is replaced.
    world.now = world.now + millis(201);
    waits(&mut world, &third.request(Command::Update, at, 1).with(patient));
    assert_eq!(world.event(Event::WaiterGone), 3);
    assert_eq!(world.send(&owner.under(Command::Abort, at, 1, epoch)).len(), 2);
}

#[test]
pub(super) fn waiters_are_refused_when_their_pages_change() {
    let (mut world, at, mut owner, mut other) = two();
    (other.low_water, owner.low_water) = (Some(1), Some(1));
    let requests = |other: &mut Client| {
        [
            other.request(Command::Read, at, 8192).with(patient),
            other.request(Command::Update, at, 8192).with(patient),
        ]
    };
    owner.lease(&mut world, at, 8192);
    for request in requests(&mut other) {
        world.send(&request);
    }
    assert_eq!(world.responder.waiting_count(), 2);
    world.responder.add_moved(0..8, NodeId(44)).unwrap();
    world.pass(Duration::ZERO);
    let replies = world.drain();
    let statuses: Vec<_> = replies.iter().map(|reply| (reply.status, reply.header.node)).collect();
    assert_eq!(statuses, [(Status::Moved, 44); 3], "a READ page by page, an UPDATE as a whole");
    assert!(world.responder.remove_moved(&(0..8)));
    // The owner's node returns with a new incarnation: its lease is over, and the waiters get the
    // page.
    owner.lease(&mut world, at, 8192);
    for request in requests(&mut other) {
        world.send(&request);
    }
    let replies = world.send(&open(NodeId(22), 2, 4711, 4096));
    assert_eq!(replies.len(), 5);
    assert!(replies.iter().all(|reply| reply.status == Status::Ok));
}

#[test]
pub(super) fn more_waiters_than_reply_slots_are_served_in_steps() {
    let limits = Limits { reply_count: 64, ..Limits::default() };
    let mut world = World::with(&Config { limits, ..config() }, 64, 4096);
    let at = world.create(8);
    let mut owner = Client::open(&mut world, NodeId(22), 1);
    let epoch = owner.lease(&mut world, at, 32768);
    let mut readers = Vec::new();
    for number in 0..20 {
        let mut reader = Client::with(&mut world, NodeId(30 + number), 1, 1024);
        let request = reader.request(Command::Read, at, 32768).with(patient);
        assert_eq!(world.send(&request).len(), 8);
        readers.push(request);
    }
    world.offer(&owner.under(Command::Abort, at, 32768, epoch)).unwrap();
    assert_eq!(world.responder.poll_timeout(), Some(world.now));
    let mut replies = Vec::new();
    // Neither a timer nor another request loses a waiter.
    let ping = owner.number(TestRequest::server(Command::Ping));
    while world.responder.waiting_count() > 0 {
        let more = world.drain();
        assert!(!more.is_empty() && more.len() <= 64);
        replies.extend(more);
        if world.responder.waiting_count() > 10 {
            world.pass(Duration::ZERO);
        } else if world.offer(&ping) == Ok(()) {
            break;
        }
    }
    replies.extend(world.drain());
    let data_replies = replies.iter().filter(|reply| reply.from.command & 0x3f == 6);
    assert_eq!(data_replies.count(), 20 * 32);
    assert_eq!(world.responder.waiting_count(), 0);
}

#[test]
pub(super) fn a_waiting_number_for_another_request_is_malformed() {
    for command in [Command::Update, Command::Read] {
        let (mut world, at, mut owner, mut other) = two();
        let far = page_of(at, 8);
        let epochs = [owner.lease(&mut world, at, 1), owner.lease(&mut world, far, 1)];
        let request = other.request(command, at, 1).with(patient);
        waits(&mut world, &request);
        // In another line, elsewhere in the same page, and longer.
        for (target, length) in [(far, 1), (moved_by(at, 1), 1), (at, 2)] {
            let changed = request.clone().with(|header| {
                header.target = target.to_ipv6();
                header.length = length;
            });
            let (location, tag) = (target.location.bits(), target.tag.0);
            let changed = TestRequest { to: Fields { location, tag, ..changed.to }, ..changed };
            assert_eq!(world.status(&changed), Status::Malformed);
        }
        assert_eq!(world.responder.waiting_count(), 1, "it waits for its first request");
        waits(&mut world, &request.clone().attempt(1));
        assert_eq!(world.event(Event::WaiterRepeated), 1);
        let close = other.number(TestRequest::server(Command::Close));
        assert_eq!(world.status(&close), Status::Ok);
        assert_eq!(world.responder.waiting_count(), 0);
        // The next client in the slot gets none of the replies.
        let mut third = Client::open(&mut world, NodeId(23), 1);
        assert_eq!(third.session & 0xffff, other.session & 0xffff);
        for (page, epoch) in [at, far].into_iter().zip(epochs) {
            assert_eq!(world.send(&owner.under(Command::Abort, page, 1, epoch)).len(), 1);
        }
        let close = third.number(TestRequest::server(Command::Close));
        assert_eq!(world.status(&close), Status::Ok);
    }
}

#[test]
pub(super) fn a_waiter_without_its_session_gets_no_reply() {
    let (mut world, at, mut owner, mut other) = two();
    let epoch = owner.lease(&mut world, at, 1);
    waits(&mut world, &other.request(Command::Update, at, 1).with(patient));
    waits(&mut world, &other.request(Command::Read, at, 1).with(patient));
    // As if a bug had left them in the queue, with their slot given to another session.
    let slot = world.responder.sessions.slot(other.session).unwrap();
    while world.responder.sessions.at(slot).forget_below(u64::MAX).is_some() {}
    world.responder.sessions.close(slot);
    let mut third = Client::open(&mut world, NodeId(23), 1);
    assert_eq!(third.session & 0xffff, other.session & 0xffff);
    let own = third.request(Command::Update, page_of(at, 1), 1);
    assert_eq!(world.status(&own), Status::Ok);
    assert_eq!(world.send(&owner.under(Command::Abort, at, 1, epoch)).len(), 1);
    assert_eq!((world.responder.waiting_count(), world.event(Event::WaiterForgotten)), (0, 2));
    assert_eq!(world.status(&own), Status::Ok, "its record is unchanged");
    assert_eq!(world.responder.leased_pages(), 1);
    let close = third.number(TestRequest::server(Command::Close));
    assert_eq!(world.status(&close), Status::Ok);
}

#[test]
pub(super) fn no_timer_is_due_after_the_last_waiter_of_a_ready_line_leaves() {
    let limits = Limits { reply_count: 64, ..Limits::default() };
    let mut world = World::with(&Config { limits, ..config() }, 64, 4096);
    let at = world.create(8);
    let mut owner = Client::open(&mut world, NodeId(22), 1);
    let epoch = owner.lease(&mut world, at, 32768);
    let mut readers = Vec::new();
    for number in 0..3 {
        let mut reader = Client::with(&mut world, NodeId(30 + number), 1, 1024);
        assert_eq!(world.send(&reader.request(Command::Read, at, 32768).with(patient)).len(), 8);
        readers.push(reader);
    }
    // There is room for the replies to one of them; the others crash while these are queued.
    world.offer(&owner.under(Command::Abort, at, 32768, epoch)).unwrap();
    assert_eq!(world.responder.waiting_count(), 2);
    assert_eq!(world.responder.poll_timeout(), Some(world.now));
    for reader in &readers[1..] {
        let slot = world.responder.sessions.slot(reader.session).unwrap();
        world.responder.end_session(slot, Event::SessionSuperseded, &mut world.store);
    }
    assert_eq!(world.responder.waiting_count(), 0);
    world.drain();
    world.pass(Duration::ZERO);
    let due = world.responder.poll_timeout().expect("sessions idle out");
    assert!(due > world.now, "no timer is due now");
}

#[test]
pub(super) fn an_overdue_waiter_does_not_block_others() {
    for is_requested in [true, false] {
        let (mut world, at, mut owner, mut other) = two();
        let mut third = Client::open(&mut world, NodeId(23), 1);
        let mut fourth = Client::open(&mut world, NodeId(24), 1);
        let both = other.request(Command::Update, at, 8192).with(patient);
        let late = third.request(Command::Update, page_of(at, 1), 1).with(patient);
        owner.lease(&mut world, at, 1);
        waits(&mut world, &both);
        world.now = world.now + millis(100);
        // Its page is free, but another waiter waits for both pages.
        waits(&mut world, &late);
        let due = world.responder.poll_timeout().unwrap();
        assert_eq!(due - world.now, millis(100));
        let replies = if is_requested {
            world.now = world.now + millis(100);
            world.send(&fourth.request(Command::Update, page_of(at, 1), 1).with(patient))
        } else {
            world.pass(millis(100));
            world.drain()
        };
        assert_eq!((replies[0].status, numbers(&replies)[0]), (Status::Ok, name(&late)));
        assert_eq!(world.event(Event::WaiterGone), 1);
        assert_eq!(world.responder.waiting_count(), usize::from(is_requested));
        // No timer is due at once, at any time.
        world.pass(Duration::ZERO);
        assert!(world.responder.poll_timeout().is_some_and(|due| due > world.now));
    }
}

/// The same request in another space.
fn in_space(request: TestRequest, space: Space) -> TestRequest {
    let moved = |address| Fields { space, ..Fields::unpack(address).unwrap() }.to_ipv6();
    let (from, to) = (moved(request.from), Fields { space, ..request.to });
    TestRequest { from, to, ..request }.with(|header| header.target = moved(header.target))
}

#[test]
pub(super) fn the_waiters_of_a_space_leave_room_for_those_of_others() {
    let limits = Limits { wait_count: 4, node_wait_count: 3, ..Limits::default() };
    let spaces = vec![SPACE, Space(4)];
    let mut world = World::unopened(&Config { limits, spaces: spaces.clone(), ..config() }, 64);
    for space in spaces {
        let session = |world: &mut World, node| {
            let opened = world.one(&in_space(open(NodeId(node), 1, 7, 4096), space));
            assert_eq!(opened.status, Status::Ok);
            let (node, session) = (NodeId(node), opened.header.session);
            let low_water = Some(1);
            Client { node, incarnation: 1, session, sequence: 0, low_water, piece_bytes: 4096 }
        };
        let mut owner = session(&mut world, 22);
        let create =
            owner.number(TestRequest::server(Command::Create)).with(|header| header.length = 1);
        let created = world.one(&in_space(create, space));
        let at = Pointer::from_ipv6(created.header.target).unwrap();
        let lease = owner.request(Command::Update, at, 1);
        assert_eq!(world.status(&in_space(lease, space)), Status::Ok);
        let reader = |world: &mut World, node| {
            let request = session(world, node).request(Command::Read, at, 1).with(patient);
            repeat_within(&world.one(&in_space(request, space)))
        };
        assert_eq!(reader(&mut world, 30), Some(200));
        assert_eq!(reader(&mut world, 31), Some(200));
        assert_eq!(reader(&mut world, 32), None, "half of the queue is the other space's");
    }
    assert_eq!((world.responder.waiting_count(), world.event(Event::WaiterRefused)), (4, 2));
}

#[test]
fn only_an_update_that_still_waits_keeps_a_free_page_from_others() {
    let HalfFree { mut world, at, mut owner, mut third, second, .. } = HalfFree::new();
    let late = third.request(Command::Update, at, 1).with(patient);
    waits(&mut world, &late);
    // It was not repeated in time, and no timer has fired yet.
    world.now = world.now + millis(201);
    let fresh = third.request(Command::Update, at, 1).with(patient);
    assert_eq!(world.send(&fresh).last().map(|reply| reply.status), Some(Status::Ok));
    assert_eq!(world.send(&owner.under(Command::Abort, page_of(at, 1), 1, second)).len(), 1);
}
