//! Section 10 of the contract: UPDATE, COMMIT, ABORT, RENEW, and their effect on other requests.

use bluebridge_wire::LeaseEnd;

use super::*;

pub(super) const OTHER: NodeId = NodeId(21);

/// A client with a session of its own.
pub(super) struct Client {
    pub(super) node: NodeId,
    pub(super) incarnation: u32,
    pub(super) session: u64,
    pub(super) sequence: u64,
    pub(super) low_water: Option<u64>,
    pub(super) piece_bytes: u16,
}

impl Client {
    pub(super) fn open(world: &mut World, node: NodeId, incarnation: u32) -> Self {
        Self::with(world, node, incarnation, 4096)
    }

    pub(super) fn with(world: &mut World, node: NodeId, incarnation: u32, piece: u16) -> Self {
        let nonce = 1000 + world.responder.counters().reply_total();
        let reply = world.one(&open(node, incarnation, nonce, piece));
        assert_eq!(reply.status, Status::Ok);
        let (session, piece_bytes) = (reply.header.session, piece);
        Self { node, incarnation, session, sequence: 0, low_water: None, piece_bytes }
    }

    pub(super) fn number(&mut self, mut request: TestRequest) -> TestRequest {
        self.sequence += 1;
        request.from = endpoint(self.node);
        request.with(|header| {
            (header.session, header.sequence) = (self.session, self.sequence);
            header.incarnation = self.incarnation;
            let low_water = self.low_water.unwrap_or(self.sequence);
            header.answered_distance = (self.sequence - low_water) as u16;
        })
    }

    pub(super) fn request(&mut self, command: Command, at: Pointer, length: usize) -> TestRequest {
        let request =
            TestRequest::new(command, at.to_ipv6()).with(|header| header.length = length as u32);
        self.number(request)
    }

    pub(super) fn under(
        &mut self,
        command: Command,
        at: Pointer,
        length: usize,
        epoch: u64,
    ) -> TestRequest {
        self.request(command, at, length).with(|header| header.lease_epoch = epoch)
    }

    /// The datagrams of a COMMIT.
    pub(super) fn commit(&mut self, at: Pointer, data: &[u8], epoch: u64) -> Vec<TestRequest> {
        let request = self.under(Command::Commit, at, data.len(), epoch);
        pieces(request, at.location.in_page(), data, usize::from(self.piece_bytes))
    }

    /// Leases pages and returns the epoch.
    pub(super) fn lease(&mut self, world: &mut World, at: Pointer, length: usize) -> u64 {
        let request = self.request(Command::Update, at, length);
        let replies = world.send(&request);
        assert!(!replies.is_empty());
        assert!(replies.iter().all(|reply| reply.status == Status::Ok), "{replies:?}");
        replies[0].header.lease_epoch
    }
}

pub(super) fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

pub(super) fn is_contended(reply: &Reply) -> bool {
    WireCommand::from_bits(reply.from.command).is_contended()
}

fn lost(reply: &Reply) -> (Status, Option<LeaseEnd>) {
    (reply.status, LeaseEnd::from_code(reply.header.detail))
}

/// A world with eight pages and two clients.
pub(super) fn two() -> (World, Pointer, Client, Client) {
    let mut world = World::new();
    let at = world.create(16);
    assert_eq!(world.write(at, &stamp(32768, 1)), Status::Ok);
    let owner = Client::open(&mut world, NodeId(22), 1);
    let other = Client::open(&mut world, OTHER, 1);
    (world, at, owner, other)
}

#[test]
pub(super) fn a_grant_brings_contents_owner_epoch_and_time() {
    let (mut world, at, mut owner, _) = two();
    let place = moved_by(at, 4000);
    let replies = world.send(&owner.request(Command::Update, place, 5000));
    let mut bytes = Vec::new();
    for reply in &replies {
        assert_eq!((reply.status, reply.header.node), (Status::Ok, 22));
        assert_eq!(reply.header.lease_epoch, replies[0].header.lease_epoch);
        assert_eq!((reply.header.lease_remaining_ms, reply.header.length), (1000, 5000));
        assert_eq!(reply.target.location, place.location.bits() + u64::from(reply.header.offset));
        assert!(reply.header.page_version > 0 && !is_contended(reply));
        bytes.extend_from_slice(&reply.data);
    }
    assert_eq!(replies.len(), 3);
    assert!(bytes == stamp(32768, 1)[4000..9000]);
    // The incarnation is in the upper bits; the next grant has the next number.
    assert_eq!(replies[0].header.lease_epoch, (5 << 40) + 1);
    assert_eq!(owner.lease(&mut world, page_of(at, 4), 1), (5 << 40) + 2);
    assert_eq!(world.responder.leased_pages(), 4);
}

#[test]
pub(super) fn a_leased_page_is_busy_for_all_others_and_unchanged() {
    let (mut world, at, mut owner, mut other) = two();
    let epoch = owner.lease(&mut world, page_of(at, 1), 4096);
    for requester in [&mut owner, &mut other] {
        let second = page_of(at, 1);
        let mut requests = vec![
            requester.request(Command::Update, second, 64),
            requester.request(Command::Update, at, 8192),
            requester.request(Command::Delete, at, 0),
            requester.request(Command::Delete, at, 16),
            requester.request(Command::Delete, second, 4096).with(zeroing),
            requester.request(Command::CompareSwap, second, 8).carrying(&[0; 16]),
            requester.request(Command::FetchAdd, second, 8).carrying(&[1; 8]),
            requester.request(Command::Write, second, 3).carrying(b"new"),
            requester.request(Command::Read, second, 100),
        ];
        requests[6].header.attempt_is(3);
        for request in requests {
            let reply = world.one(&request);
            let header = reply.header;
            assert_eq!((reply.status, header.node), (Status::Busy, 22), "{request:?}");
            assert_eq!((header.lease_epoch, header.lease_remaining_ms), (epoch, 1000));
            assert_eq!(
                reply.target.location,
                second.location.bits(),
                "the leased page: {request:?}"
            );
            assert!(!header.flags.contains(Flags::QUEUED) && !is_contended(&reply));
        }
    }
    // Page by page: READ, WRITE and the zeroing DELETE.
    let replies = world.send(&other.request(Command::Read, at, 3 * 4096));
    let statuses: Vec<_> = replies.iter().map(|reply| reply.status).collect();
    assert_eq!(statuses, [Status::Ok, Status::Busy, Status::Ok]);
    assert_eq!((replies[1].header.offset, replies[1].header.node), (4096, 22));
    let write = other.request(Command::Write, at, 8192);
    let train = pieces(write, 0, &[9; 8192], 4096);
    let replies: Vec<_> = train.iter().flat_map(|request| world.send(request)).collect();
    assert_eq!(replies[0].pages, [Status::Ok, Status::Busy]);
    let zero = world.one(&other.request(Command::Delete, at, 8192).with(zeroing));
    assert_eq!((zero.status, zero.pages), (Status::Partial, vec![Status::Ok, Status::Busy]));
    assert!((0..4096).all(|place| world.store.byte(0, place) == 0));
    let expected = stamp(32768, 1);
    assert!((0..4096).all(|place| world.store.byte(1, place) == expected[4096 + place]));
    // A request that does not access the contents is not refused.
    assert_eq!(world.status(&other.request(Command::Confirm, at, 16)), Status::Ok);
    assert_eq!(world.status(&other.request(Command::Stat, page_of(at, 1), 0)), Status::Ok);
}

trait Attempt {
    fn attempt_is(&mut self, attempt: u8);
}

impl Attempt for Header {
    fn attempt_is(&mut self, attempt: u8) {
        self.flags = self.flags.with_attempt(attempt);
    }
}

#[test]
pub(super) fn stale_reads_get_the_last_committed_contents() {
    let (mut world, at, mut owner, mut other) = two();
    let stale = |header: &mut Header| header.flags = header.flags.with(Flags::MAY_BE_STALE);
    let reply = world.one(&other.request(Command::Read, at, 64).with(stale));
    assert!(!reply.header.flags.contains(Flags::LAST_COMMITTED));
    owner.lease(&mut world, at, 4096);
    let replies = world.send(&other.request(Command::Read, at, 8192).with(stale));
    let marks: Vec<_> =
        replies.iter().map(|r| r.header.flags.contains(Flags::LAST_COMMITTED)).collect();
    assert_eq!(marks, [true, false]);
    assert!(replies[0].data == stamp(32768, 1)[..4096]);
    assert_eq!(world.event(Event::LastCommittedRead), 1);
}

#[test]
pub(super) fn a_commit_is_applied_as_a_whole_and_once() {
    for piece_bytes in [4096, 1024] {
        let mut world = World::with(&config(), 64, 4096);
        let at = world.create(8);
        let mut owner = Client::with(&mut world, NodeId(22), 1, piece_bytes);
        let place = moved_by(at, 100);
        let epoch = owner.lease(&mut world, place, 9000);
        let mut train = owner.commit(place, &[7; 9000], epoch);
        train.reverse();
        let last = train.pop().unwrap();
        for request in &train {
            assert_eq!(world.send(request), []);
        }
        assert!(
            (0..3).all(|page| world.store.byte(page, 200) == 0),
            "nothing is written before the last piece"
        );
        assert_eq!(world.send(&train[0]), [], "a duplicate");
        let reply = world.one(&last);
        assert_eq!((reply.status, reply.header.node), (Status::Ok, 22));
        assert_eq!((reply.header.lease_epoch, reply.header.lease_remaining_ms), (epoch, 0));
        assert!(world.read(place, 9000) == [7; 9000]);
        assert_eq!((world.store.byte(0, 99), world.store.byte(2, 908)), (0, 0));
        assert_eq!(world.responder.trains.free_buffer_count(), 1024);
        assert!(world.responder.leases.is_idle());
        // A repetition gets the recorded reply; a second COMMIT finds the lease committed.
        assert_eq!(world.write(at, &[1; 8192]), Status::Ok);
        assert_eq!(world.one(&last.clone().attempt(1)).status, Status::Ok);
        assert_eq!(world.store.byte(0, 200), 1);
        let again = owner.commit(place, &[8; 9000], epoch);
        let reply = world.one(&again[0]);
        assert_eq!(lost(&reply), (Status::LeaseLost, Some(LeaseEnd::Committed)));
        assert_eq!(world.one(&again[1]).status, Status::LeaseLost, "every piece is refused");
        assert_eq!(world.store.byte(0, 200), 1);
    }
}

#[test]
pub(super) fn late_requests_change_nothing() {
    let (mut world, at, mut owner, mut other) = two();
    let epoch = owner.lease(&mut world, at, 8192);
    let train = owner.commit(at, &[7; 8192], epoch);
    assert_eq!(world.send(&train[0]), []);
    world.now = world.now + millis(1000);
    let reply = world.one(&train[1]);
    assert_eq!(lost(&reply), (Status::LeaseLost, Some(LeaseEnd::Expired)));
    assert_eq!(world.responder.trains.free_buffer_count(), 1024);
    for command in [Command::Renew, Command::Abort] {
        let reply = world.one(&owner.under(command, at, 8192, epoch));
        assert_eq!(lost(&reply), (Status::LeaseLost, Some(LeaseEnd::Expired)));
    }
    let read = world.send(&other.request(Command::Read, at, 8192));
    assert!(read.iter().flat_map(|r| r.data.clone()).eq(stamp(32768, 1)[..8192].iter().copied()));
    // Leased again: a request under the old epoch learns the new owner.
    let newer = other.lease(&mut world, page_of(at, 1), 1);
    let reply = world.one(&owner.commit(page_of(at, 1), &[7; 1], epoch)[0]);
    assert_eq!(lost(&reply), (Status::LeaseLost, Some(LeaseEnd::LeasedAgain)));
    assert_eq!((reply.header.node, reply.header.lease_epoch), (OTHER.0, newer));
    let again = world.one(&owner.commit(page_of(at, 1), &[7; 1], epoch)[0].clone().attempt(1));
    assert_eq!((again.header.node, again.header.lease_epoch), (OTHER.0, newer));
    // All or none: the first page is expired, the second belongs to another.
    let reply = world.one(&other.under(Command::Renew, at, 8192, newer));
    assert_eq!(lost(&reply).0, Status::LeaseLost);
    assert_eq!(world.status(&other.under(Command::Abort, page_of(at, 1), 1, newer)), Status::Ok);
    let reply = world.one(&owner.commit(page_of(at, 1), &[7; 1], epoch)[0]);
    assert_eq!((lost(&reply).1, reply.header.node), (Some(LeaseEnd::LeasedAgain), 0));
    assert!(world.read(at, 8192) == stamp(32768, 1)[..8192]);
}

#[test]
pub(super) fn only_the_owner_commits() {
    let (mut world, at, mut owner, mut other) = two();
    let epoch = owner.lease(&mut world, at, 4096);
    let unknown = (Status::LeaseLost, Some(LeaseEnd::Unknown));
    assert_eq!(lost(&world.one(&other.commit(at, b"x", epoch)[0])), unknown);
    for (place, epoch) in [(at, 0), (at, epoch + 1), (page_of(at, 3), epoch)] {
        assert_eq!(lost(&world.one(&owner.commit(place, b"x", epoch)[0])), unknown);
    }
    // Another session of the same endpoint is equivalent.
    let mut second = Client::open(&mut world, NodeId(22), 1);
    assert_eq!(world.status(&second.commit(at, b"x", epoch)[0]), Status::Ok);
    assert_eq!(world.read(at, 1), b"x");
}

#[test]
pub(super) fn a_newer_incarnation_ends_the_leases_of_the_older() {
    let (mut world, at, mut owner, mut other) = two();
    let epoch = owner.lease(&mut world, at, 8192);
    let kept = other.lease(&mut world, page_of(at, 2), 1);
    let mut newer = Client::open(&mut world, NodeId(22), 2);
    assert_eq!(world.event(Event::LeaseSuperseded), 2);
    assert_eq!(world.status(&owner.commit(at, b"x", epoch)[0]), Status::StaleIncarnation);
    let reply = world.one(&newer.commit(at, b"x", epoch)[0]);
    assert_eq!(lost(&reply), (Status::LeaseLost, Some(LeaseEnd::Superseded)));
    assert_eq!(world.write(at, b"y"), Status::Ok);
    assert_eq!(world.status(&other.under(Command::Renew, page_of(at, 2), 1, kept)), Status::Ok);
}

#[test]
pub(super) fn abort_and_commit_release_what_they_cover() {
    let (mut world, at, mut owner, mut other) = two();
    let epoch = owner.lease(&mut world, at, 4 * 4096);
    let reply = world.one(&owner.under(Command::Abort, page_of(at, 1), 4096, epoch));
    assert_eq!((reply.status, reply.header.lease_epoch), (Status::Ok, epoch));
    assert_eq!(world.status(&owner.commit(page_of(at, 2), b"two", epoch)[0]), Status::Ok);
    let replies = world.send(&other.request(Command::Read, at, 4 * 4096));
    let statuses: Vec<_> = replies.iter().map(|reply| reply.status).collect();
    assert_eq!(statuses, [Status::Busy, Status::Ok, Status::Ok, Status::Busy]);
    assert_eq!(&replies[2].data[..3], b"two");
    let reply = world.one(&owner.under(Command::Abort, page_of(at, 1), 4096, epoch));
    assert_eq!(lost(&reply), (Status::LeaseLost, Some(LeaseEnd::Aborted)));
    // If one page is not held, the others are not released.
    let reply = world.one(&owner.under(Command::Abort, at, 8192, epoch));
    assert_eq!(lost(&reply), (Status::LeaseLost, Some(LeaseEnd::Aborted)));
    assert_eq!(world.responder.leased_pages(), 2);
}

#[test]
pub(super) fn a_renewal_sets_a_new_deadline() {
    let (mut world, at, mut owner, mut other) = two();
    let epoch = owner.lease(&mut world, at, 4096);
    world.now = world.now + millis(900);
    let long = owner
        .under(Command::Renew, at, 4096, epoch)
        .with(|header| header.lease_remaining_ms = u16::MAX);
    let reply = world.one(&long);
    assert_eq!((reply.status, reply.header.node), (Status::Ok, 22));
    assert_eq!((reply.header.lease_epoch, reply.header.lease_remaining_ms), (epoch, 10_000));
    // A repetition returns the remaining time, because its sender counts from when it sent it.
    world.now = world.now + millis(9000);
    let reply = world.one(&long.clone().attempt(1));
    assert_eq!((reply.status, reply.header.lease_remaining_ms), (Status::Ok, 1000));
    let short =
        owner.under(Command::Renew, at, 4096, epoch).with(|header| header.lease_remaining_ms = 20);
    assert_eq!(world.one(&short).header.lease_remaining_ms, 20);
    world.now = world.now + millis(20);
    assert_eq!(world.status(&other.request(Command::Read, at, 1)), Status::Ok);
    let reply = world.one(&short.clone().attempt(1));
    assert_eq!(lost(&reply), (Status::LeaseLost, Some(LeaseEnd::Expired)));
    let short = other.request(Command::Update, at, 1).with(|header| header.lease_remaining_ms = 77);
    assert_eq!(world.one(&short).header.lease_remaining_ms, 77);
}

#[test]
pub(super) fn a_repeated_update_gets_the_same_grant_while_it_lasts() {
    let (mut world, at, mut owner, mut other) = two();
    let request = owner.request(Command::Update, at, 3 * 4096);
    let first = world.send(&request);
    world.now = world.now + millis(300);
    let some = request.clone().attempt(1).with(|header| {
        header.flags = header.flags.with(Flags::SELECTIVE);
        header.detail = 0b110;
    });
    let again = world.send(&some);
    assert_eq!(again.len(), 2);
    for (reply, before) in again.iter().zip(&first[1..]) {
        assert_eq!(reply.data, before.data);
        assert_eq!(reply.header.lease_epoch, before.header.lease_epoch);
        assert_eq!((reply.header.lease_remaining_ms, reply.header.node), (700, 22));
    }
    assert_eq!(world.event(Event::LeaseGranted), 3);
    let other_range = request.clone().with(|header| header.length = 4096);
    assert_eq!(world.status(&other_range), Status::Malformed);
    assert_eq!(
        world.status(&some.clone().with(|header| header.detail = 1 << 9)),
        Status::Malformed
    );
    let epoch = first[0].header.lease_epoch;
    assert_eq!(world.status(&other.commit(at, b"x", epoch)[0]), Status::LeaseLost);
    // One page of it ends: the grant as a whole is over.
    let abort = owner.under(Command::Abort, page_of(at, 1), 1, epoch).with(|header| {
        header.answered_distance = 1;
    });
    assert_eq!(world.status(&abort), Status::Ok);
    assert_eq!(lost(&world.one(&some)), (Status::LeaseLost, Some(LeaseEnd::Aborted)));
    world.now = world.now + millis(700);
    assert_eq!(lost(&world.one(&request)), (Status::LeaseLost, Some(LeaseEnd::Expired)));
    assert!(world.event(Event::LeaseRepeated) >= 3);
}

#[test]
pub(super) fn an_update_gets_all_its_pages_or_none() {
    let (mut world, at, mut owner, mut other) = two();
    owner.lease(&mut world, page_of(at, 2), 1);
    let reply = world.one(&other.request(Command::Update, at, 4 * 4096));
    assert_eq!((reply.status, reply.header.offset), (Status::Busy, 0));
    assert_eq!(reply.target.location, page_of(at, 2).location.bits());
    assert_eq!(world.responder.leased_pages(), 1);
    // Refusals of step 7 take precedence over the lease, and apply to the whole.
    let beyond = page_of(at, 8);
    assert_eq!(
        world.status(&other.request(Command::Update, page_of(beyond, 7), 4097)),
        Status::BadLength
    );
    let end = world.create(1);
    owner.lease(&mut world, end, 1);
    let stale = Pointer { tag: Tag(end.tag.0 ^ 1), ..end };
    assert_eq!(world.status(&other.request(Command::Update, stale, 1)), Status::StaleTag);
    assert_eq!(world.status(&other.request(Command::Update, end, 4097)), Status::NotAllocated);
    let carrying = other.request(Command::Update, at, 8).carrying(b"data");
    assert_eq!(world.status(&carrying), Status::Malformed);
    for command in [Command::Renew, Command::Abort] {
        let carrying = other.request(command, at, 8).carrying(b"data");
        assert_eq!(world.status(&carrying), Status::Malformed);
    }
}

fn narrow(lease_count: u16, node_lease_count: u16) -> Config {
    let limits = Limits { lease_count, node_lease_count, ..Limits::default() };
    Config { limits, ..config() }
}

#[test]
pub(super) fn the_table_is_bounded_and_replaces_the_oldest_ended_leases() {
    let mut world = World::with(&narrow(10, 9), 64, 4096);
    let at = world.create(32);
    let mut owner = Client::open(&mut world, NodeId(22), 1);
    let mut other = Client::open(&mut world, OTHER, 1);
    let first = owner.lease(&mut world, at, 32768);
    let more = owner.request(Command::Update, page_of(at, 8), 8192);
    assert_eq!(world.status(&more), Status::Overloaded);
    assert_eq!(world.event(Event::LeaseBeyondShare), 1);
    let three = other.request(Command::Update, page_of(at, 8), 3 * 4096);
    assert_eq!(world.status(&three), Status::Overloaded);
    assert_eq!((world.event(Event::LeaseTableFull), world.responder.leased_pages()), (1, 8));
    // The same number is executed when there is room; expiry frees some.
    world.now = world.now + millis(1000);
    assert!(world.send(&three).iter().all(|reply| reply.status == Status::Ok));
    assert_eq!(world.responder.leased_pages(), 3);
    // Seven ended leases are kept, of the pages that ended last.
    let ends: Vec<_> = (0..8)
        .map(|page| lost(&world.one(&owner.commit(page_of(at, page), b"x", first)[0])).1)
        .collect();
    assert_eq!(ends.iter().filter(|&&fate| fate == Some(LeaseEnd::Unknown)).count(), 1);
    assert_eq!(ends.iter().filter(|&&fate| fate == Some(LeaseEnd::Expired)).count(), 7);
}

#[test]
pub(super) fn freed_and_moved_pages_lose_their_leases() {
    let (mut world, at, mut owner, mut other) = two();
    let epoch = owner.lease(&mut world, at, 8192);
    world.responder.add_moved(0..8, NodeId(44)).unwrap();
    assert_eq!(world.event(Event::LeaseForgotten), 2);
    let reply = world.one(&owner.commit(at, b"x", epoch)[0]);
    assert_eq!((reply.status, reply.header.node), (Status::Moved, 44));
    assert!(world.responder.remove_moved(&(0..8)));
    let reply = world.one(&owner.commit(at, b"x", epoch)[0]);
    assert_eq!(lost(&reply), (Status::LeaseLost, Some(LeaseEnd::Unknown)));
    // Another endpoint leases unconfirmed pages; they are freed all the same.
    let mut create = TestRequest::anywhere(Command::Create, 99, 2);
    create.from = endpoint(NodeId(22));
    let given = Pointer::from_ipv6(world.one(&create).header.target).unwrap();
    let held = other.request(Command::Update, given, 4096).with(|h| h.lease_remaining_ms = 9000);
    assert_eq!(world.status(&held), Status::Ok);
    world.pass(millis(2000));
    assert_eq!(world.event(Event::ProvisionalFreed), 1);
    assert!(world.responder.leases.is_idle());
    assert_eq!(world.delete(at, 0), Status::Ok);
    assert!(world.responder.leases.is_empty());
}

#[test]
pub(super) fn a_page_with_two_addresses_has_one_lease() {
    let mut world = World::new();
    let (own, adopted, foreign) = world.create_adopted();
    let mut owner = Client::open(&mut world, NodeId(22), 1);
    let epoch = owner.lease(&mut world, page_of(foreign, 1), 4096);
    assert_eq!(world.write(page_of(own, 9), b"x"), Status::Busy);
    assert_eq!(world.write(page_of(own, 1), b"x"), Status::Ok);
    let commit = owner.commit(page_of(own, 9), b"by the own name", epoch);
    assert_eq!(world.status(&commit[0]), Status::Ok);
    let epoch = owner.lease(&mut world, page_of(foreign, 1), 4096);
    assert!(world.responder.remove_adopted(&adopted));
    assert_eq!(world.event(Event::LeaseForgotten), 1);
    let reply = world.one(&owner.commit(page_of(own, 9), b"x", epoch)[0]);
    assert_eq!(lost(&reply), (Status::LeaseLost, Some(LeaseEnd::Unknown)));
}

#[test]
pub(super) fn a_contended_lease_is_reported_rarely() {
    let (mut world, at, mut owner, mut other) = two();
    let epoch = owner.lease(&mut world, at, 8192);
    let mut try_at = |world: &mut World, passed: u64| {
        world.now = world.now + millis(passed);
        is_contended(&world.one(&other.request(Command::Read, at, 1)))
    };
    assert!(!try_at(&mut world, 1), "it has just begun");
    assert!(try_at(&mut world, 1));
    assert!(!try_at(&mut world, 49));
    assert!(try_at(&mut world, 1));
    assert!(!try_at(&mut world, 945), "it is nearly over");
    let renew = owner.under(Command::Renew, at, 8192, epoch);
    assert!(is_contended(&world.one(&renew)) && is_contended(&world.one(&renew.attempt(1))));
    let commit = owner.commit(at, b"x", epoch);
    let reply = world.one(&commit[0]);
    assert!(is_contended(&reply) && is_contended(&world.one(&commit[0].clone().attempt(1))));
    // The other page was never contended.
    let abort = world.one(&owner.under(Command::Abort, page_of(at, 1), 1, epoch));
    assert!(abort.status.is_ok() && !is_contended(&abort));
    assert_eq!(world.event(Event::LeaseContended), 6);
}

#[test]
pub(super) fn a_recorded_busy_reports_the_current_lease() {
    let (mut world, at, mut owner, mut other) = two();
    let epoch = owner.lease(&mut world, at, 4096);
    let write = other.request(Command::Write, at, 1).carrying(b"x");
    assert_eq!(world.one(&write).header.lease_epoch, epoch);
    world.now = world.now + millis(400);
    let reply = world.one(&write.clone().attempt(1));
    assert_eq!((reply.status, reply.header.lease_remaining_ms), (Status::Busy, 600));
    assert_eq!(world.status(&owner.under(Command::Abort, at, 1, epoch)), Status::Ok);
    let reply = world.one(&write.attempt(2));
    assert_eq!((reply.status, reply.header.lease_epoch, reply.header.node), (Status::Busy, 0, 0));
}

#[test]
pub(super) fn a_recorded_busy_hides_leases_of_another_space() {
    let (mut world, at, mut owner, mut other) = two();
    let epoch = owner.lease(&mut world, at, 1);
    let refused = other.request(Command::Write, at, 3).carrying(b"new");
    assert_eq!(world.one(&refused).header.lease_epoch, epoch);
    assert_eq!(world.status(&owner.under(Command::Abort, at, 1, epoch)), Status::Ok);
    assert_eq!(world.delete(at, 16), Status::Ok);
    let anew = world.create(16);
    assert_eq!(anew.location, at.location);
    owner.lease(&mut world, anew, 1);
    let again = world.one(&refused.attempt(1));
    assert_eq!((again.status, again.header.node, again.header.lease_epoch), (Status::Busy, 0, 0));
}

#[test]
pub(super) fn a_queued_read_is_sent_before_a_commit_changes_its_page() {
    let (mut world, at, mut owner, mut other) = two();
    let epoch = owner.lease(&mut world, at, 4096);
    let stale = other.request(Command::Read, at, 4096);
    let stale = stale.with(|header| header.flags = header.flags.with(Flags::MAY_BE_STALE));
    world.offer(&stale).unwrap();
    let commit = owner.commit(at, &[7; 4096], epoch);
    assert_eq!(world.offer(&commit[0]), Err(DrainFirst));
    assert!(world.drain()[0].data == stamp(32768, 1)[..4096]);
    assert_eq!(world.status(&commit[0]), Status::Ok);
}

#[test]
pub(super) fn commits_obey_the_rules_of_trains() {
    let mut world = World::with(&config(), 64, 4096);
    let at = world.create(8);
    let mut owner = Client::with(&mut world, NodeId(22), 1, 2048);
    let epoch = owner.lease(&mut world, at, 8192);
    let train = owner.commit(at, &[7; 8192], epoch);
    assert_eq!(world.send(&train[1]), []);
    let other_epoch = train[0].clone().with(|header| header.lease_epoch += 1);
    assert_eq!(world.status(&other_epoch), Status::Malformed);
    let reply = world.one(&train[2].clone().attempt(1));
    assert_eq!((reply.status, reply.header.detail), (Status::Incomplete, 0b110));
    // Its buffers may be reclaimed at any time, and then all its pieces are missing again.
    world.pass(millis(2000));
    assert_eq!(world.event(Event::TrainTimedOut), 1);
    let reply = world.one(&train[2].clone().attempt(1));
    assert_eq!(reply.status, Status::LeaseLost, "the lease ran out meanwhile");
    assert_eq!(world.responder.trains.free_buffer_count(), 1024);
    let epoch = owner.lease(&mut world, at, 8192);
    let train = owner.commit(at, &[8; 8192], epoch);
    assert_eq!(world.send(&train[1]), []);
    let next = owner.number(TestRequest::server(Command::Ping));
    assert_eq!(world.status(&next), Status::Ok);
    assert_eq!(world.responder.trains.free_buffer_count(), 1024, "below low water");
    assert_eq!(world.status(&train[0]), Status::Expired);
    assert_eq!(world.responder.leased_pages(), 2, "the lease is still held");
}

#[test]
pub(super) fn invalid_times_are_refused() {
    let with = |change: fn(&mut Timers)| {
        let mut timers = Timers::default();
        change(&mut timers);
        Responder::new(&Config { timers, ..config() }).err()
    };
    let wrong = |name, value, most| Some(ConfigError::Timer { name, value, most });
    assert_eq!(with(|_| {}), None);
    let long = with(|timers| timers.lease_max = Duration::from_secs(66));
    assert_eq!(long, wrong("lease_max", 66_000, 65_535));
    let default = with(|timers| timers.lease_default = Duration::from_secs(11));
    assert_eq!(default, wrong("lease_default", 11_000, 10_000));
    let wait = with(|timers| timers.lease_wait = Duration::ZERO);
    assert_eq!(wait, wrong("lease_wait", 0, u64::from(u32::MAX)));
}

fn notices(world: &mut World) -> Vec<(Command, Fields, Fields, u32)> {
    let mut found = Vec::new();
    while let Some(transmit) = world.responder.poll_transmit(&world.store) {
        let bytes = [transmit.head, transmit.data].concat();
        let datagram = Datagram::parse(transmit.source, transmit.destination, &bytes).unwrap();
        if datagram.is_reply() {
            continue;
        }
        assert_eq!(transmit.destination_port, bluebridge_wire::UDP_PORT);
        assert_eq!((datagram.from.node, datagram.to.node), (SERVER, NodeId::ALL));
        let command = datagram.command().command().unwrap();
        found.push((command, datagram.to, datagram.target, datagram.header.length));
    }
    found
}

#[test]
pub(super) fn notices_are_sent_only_where_enabled() {
    let mut world = World::new();
    let before = world.create(1);
    assert_eq!(world.event(Event::NoticeSent), 0);
    world.responder.set_notices(SPACE, true);
    world.responder.set_notices(Space(77), true);
    let create = world.next(TestRequest::server(Command::Create).with(|header| header.length = 3));
    world.offer(&create).unwrap();
    world.offer(&create).unwrap();
    let received = notices(&mut world);
    let [(Command::Notice, to, target, 3)] = received[..] else { panic!("{received:?}") };
    let at = Pointer::from_ipv6(target.to_ipv6()).unwrap();
    assert_eq!((to.location, to.tag), (target.location, target.tag));
    let zero = TestRequest::new(Command::Delete, at.to_ipv6()).with(zeroing);
    let zero = world.next(zero.with(|header| header.length = 5000));
    let free = world.numbered(TestRequest::new(Command::Delete, at.to_ipv6()), world.sequence + 1);
    let refused =
        world.numbered(TestRequest::new(Command::Delete, at.to_ipv6()), world.sequence + 2);
    for request in [&zero, &free, &free, &refused] {
        world.offer(request).unwrap();
    }
    let received: Vec<_> = notices(&mut world)
        .into_iter()
        .map(|(command, _, target, n)| (command, target, n))
        .collect();
    assert_eq!(received, [(Command::Invalidate, target, 2), (Command::Invalidate, target, 3)]);
    // Pages that may be freed again are reported when they are confirmed.
    let anywhere = TestRequest::anywhere(Command::Create, 5, 2);
    world.offer(&anywhere).unwrap();
    assert_eq!(notices(&mut world), []);
    let read = TestRequest::new(Command::Read, Pointer { tag: Tag(at.tag.0 + 1), ..at }.to_ipv6());
    let read = world.numbered(read.with(|header| header.length = 1), world.sequence + 3);
    world.offer(&read).unwrap();
    assert_eq!(notices(&mut world).len(), 1);
    world.responder.set_notices(SPACE, false);
    assert_eq!(world.delete(before, 1), Status::Ok);
    assert_eq!(world.event(Event::NoticeSent), 4);
}
