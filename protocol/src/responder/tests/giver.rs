//! The giver of a migration (`docs/migration.md`): TAKE, KEEP, and the controller's orders.

use std::collections::BTreeMap;

use bluebridge_wire::{
    Fence, LeaseEnd,
    address::{LINE_BYTES, LINE_PAGES},
    line::{FENCES_MAX, PageContents, Part, parse_line},
};

use super::{
    leases::{Client, OTHER, millis},
    *,
};

pub(super) const TAKER: NodeId = NodeId(30);
pub(super) const TAKER_INCARNATION: u32 = 7;
pub(super) const MIGRATION: u64 = 5;
pub(super) const EPOCH: u32 = 12;
pub(super) const LINE: u64 = LINE_PAGES as u64;

pub(super) fn allowance(pages: Range<u64>) -> Allowance {
    Allowance {
        migration: MIGRATION,
        range_epoch: EPOCH,
        pages,
        space: SPACE,
        taker: TAKER,
        taker_incarnation: TAKER_INCARNATION,
    }
}

impl World {
    pub(super) fn allow(&mut self, allowance: &Allowance) -> Result<(), AllowError> {
        self.responder.allow(allowance, &mut self.store)
    }

    pub(super) fn withdraw(&mut self, migration: u64) -> Result<(), AllowError> {
        self.responder.withdraw(self.now, migration, &mut self.store)
    }

    pub(super) fn close(&mut self, migration: u64) -> Result<(), AllowError> {
        self.responder.close_migration(migration, &mut self.store)
    }

    /// The pages that are the taker's, by their rows' beginnings and ends.
    pub(super) fn given(&self, migration: u64) -> Vec<(u64, u64)> {
        self.responder.given(migration).unwrap().map(|row| (row.start, row.end)).collect()
    }

    /// The status of a READ by the first client, the node in the reply, and its detail.
    pub(super) fn look(&mut self, at: Pointer) -> (Status, u16, u32) {
        let request = self.read_request(at, 64);
        let reply = self.one(&request);
        (reply.status, reply.header.node, reply.header.detail)
    }
}

/// A client that takes lines.
pub(super) struct Taker(pub(super) Client);

impl Taker {
    pub(super) fn open(world: &mut World) -> Self {
        Self(Client::open(world, TAKER, TAKER_INCARNATION))
    }

    pub(super) fn request(&mut self, command: Command, line: Pointer) -> TestRequest {
        let request = self.0.request(command, Pointer { tag: Tag(0), ..line }, LINE_BYTES);
        let request = request.at_endpoint().with(|header| {
            (header.range_epoch, header.page_version) = (EPOCH, MIGRATION);
        });
        TestRequest { from: endpoint(self.0.node), ..request }
    }

    pub(super) fn keep_request(&mut self, line: Pointer, epoch: u64) -> TestRequest {
        self.request(Command::Keep, line).with(|header| header.lease_epoch = epoch)
    }

    /// Takes a line and returns the epoch.
    pub(super) fn take(&mut self, world: &mut World, line: Pointer) -> u64 {
        let reply = world.one(&self.request(Command::Take, line));
        assert_eq!(reply.status, Status::Ok);
        reply.header.lease_epoch
    }

    pub(super) fn keep(&mut self, world: &mut World, line: Pointer, epoch: u64) -> Reply {
        world.one(&self.keep_request(line, epoch))
    }

    /// Takes and keeps a line.
    pub(super) fn move_line(&mut self, world: &mut World, line: Pointer) {
        let epoch = self.take(world, line);
        assert_eq!(self.keep(world, line, epoch).status, Status::Ok);
    }
}

pub(super) fn lost(reply: &Reply) -> (Status, Option<LeaseEnd>) {
    (reply.status, LeaseEnd::from_code(reply.header.detail))
}

/// An allocation of two lines and half of a third, with a migration of all three; the pointers to the lines.
pub(super) fn given() -> (World, [Pointer; 3], Taker) {
    let mut world = World::new();
    let at = world.create(20);
    assert_eq!(world.write(at, &stamp(LINE_BYTES, 1)), Status::Ok);
    world.allow(&allowance(0..3 * LINE)).unwrap();
    let taker = Taker::open(&mut world);
    (world, [0, 8, 16].map(|page| page_of(at, page)), taker)
}

#[test]
pub(super) fn a_line_is_taken_read_and_kept() {
    let (mut world, [first, second, third], mut taker) = given();
    let reply = world.one(&taker.request(Command::Take, first));
    let epoch = reply.header.lease_epoch;
    let lease = (reply.status, reply.header.node, reply.header.lease_remaining_ms);
    assert_eq!((lease, reply.header.length), ((Status::Ok, TAKER.0, 1000), LINE_BYTES as u32));
    let pages = parse_line(&reply.data).unwrap();
    assert_eq!(pages[0].part, Part::First { pages: 20 });
    assert_eq!(pages[7].part, Part::Further { distance: 7 });
    for (number, page) in (0..).zip(pages) {
        assert_eq!(page.version, world.store.version(number), "the giver's versions");
        let colour = (page.colour, page.space, page.contents);
        assert_eq!(colour, (Some((store::GENERATION, first.tag)), SPACE, PageContents::Written));
    }
    // All others wait; the taker reads under its lease, and only if it names it.
    assert_eq!(world.look(first).0, Status::Busy);
    assert_eq!(world.look(second).0, Status::Ok);
    let read = taker.0.under(Command::Read, first, LINE_BYTES, epoch);
    let replies = world.send(&read);
    let bytes: Vec<u8> = replies.iter().flat_map(|reply| reply.data.clone()).collect();
    assert_eq!(bytes, stamp(LINE_BYTES, 1));
    let mut other = Client::open(&mut world, OTHER, 1);
    let not_its = other.under(Command::Read, first, 64, epoch);
    assert_eq!(world.status(&not_its), Status::Busy);
    for unnamed in [0, epoch - 1, epoch + 1] {
        assert_eq!(world.status(&taker.0.under(Command::Read, first, 64, unnamed)), Status::Busy);
    }
    assert_eq!(taker.keep(&mut world, first, epoch).status, Status::Ok);
    assert_eq!(world.look(first), (Status::Moved, TAKER.0, LINE_PAGES as u32));
    assert_eq!(world.look(second).0, Status::Ok);
    assert_eq!(world.responder.leased_pages(), 0);
    assert_eq!(world.given(MIGRATION), [(0, 8)]);
    // A line with free pages, too.
    let reply = world.one(&taker.request(Command::Take, third));
    let parts = parse_line(&reply.data).unwrap().map(|page| page.part);
    assert_eq!(parts[3..5], [Part::Further { distance: 19 }, Part::Free]);
    let again = world.one(&taker.request(Command::Take, first));
    assert_eq!((again.status, again.header.node), (Status::Moved, TAKER.0));
    assert_eq!((world.event(Event::LineTaken), world.event(Event::LineKept)), (2, 1));
}

#[test]
pub(super) fn the_mark_answers_keep_in_any_session() {
    let (mut world, [first, second, _], mut taker) = given();
    let epoch = taker.take(&mut world, first);
    assert_eq!(taker.keep(&mut world, first, epoch).status, Status::Ok);
    let mut again = Taker::open(&mut world);
    assert_ne!(again.0.session, taker.0.session);
    assert_eq!(again.keep(&mut world, first, epoch).status, Status::Ok);
    world.pass(millis(60_000));
    let mut late = Taker::open(&mut world);
    assert_eq!(late.keep(&mut world, first, epoch).status, Status::Ok);
    assert_eq!(world.event(Event::KeepRepeated), 2);
    // It is not recorded, so a refusal is not the answer for ever.
    let epoch = late.take(&mut world, second);
    let early = late.keep_request(second, epoch + 1);
    assert_eq!(world.status(&early), Status::LeaseLost);
    let same_number = early.with(|header| header.lease_epoch = epoch);
    assert_eq!(world.status(&same_number), Status::Ok);
}

#[test]
pub(super) fn keep_needs_the_lease_of_every_page() {
    let (mut world, [first, second, _], mut taker) = given();
    let unleased = taker.keep(&mut world, first, 1);
    assert_eq!(lost(&unleased), (Status::LeaseLost, Some(LeaseEnd::Unknown)));
    let epoch = taker.take(&mut world, first);
    let other_epoch = taker.keep(&mut world, first, epoch + 1);
    assert_eq!(lost(&other_epoch), (Status::LeaseLost, Some(LeaseEnd::Unknown)));
    // The last page alone is aborted, and leased again.
    let last = page_of(first, 7);
    let abort = taker.0.under(Command::Abort, last, 4096, epoch);
    assert_eq!(world.status(&abort), Status::Ok);
    let missing = taker.keep(&mut world, first, epoch);
    assert_eq!(lost(&missing), (Status::LeaseLost, Some(LeaseEnd::Aborted)));
    Client::open(&mut world, OTHER, 1).lease(&mut world, last, 64);
    let missing = taker.keep(&mut world, first, epoch);
    assert_eq!(lost(&missing), (Status::LeaseLost, Some(LeaseEnd::LeasedAgain)));
    let take = taker.request(Command::Take, second);
    let epoch = world.one(&take).header.lease_epoch;
    world.pass(millis(999));
    assert_eq!(world.one(&take).header.lease_epoch, epoch, "as long as it holds");
    world.pass(millis(1));
    assert_eq!(lost(&world.one(&take)), (Status::LeaseLost, Some(LeaseEnd::Expired)));
    let late = taker.keep(&mut world, second, epoch);
    assert_eq!(lost(&late), (Status::LeaseLost, Some(LeaseEnd::Expired)));
    assert_eq!(world.look(second).0, Status::Ok);
    assert_eq!(world.given(MIGRATION), []);
}

#[test]
pub(super) fn only_the_taker_takes_and_keeps_by_its_migrations_terms() {
    let (mut world, [first, ..], mut taker) = given();
    let epoch = taker.take(&mut world, first);
    world.pass(millis(1000));
    let mut outside = Taker(Client::open(&mut world, OTHER, TAKER_INCARNATION));
    for command in [Command::Take, Command::Keep] {
        let mut refused = |change: &dyn Fn(&mut Header)| {
            let request = taker.request(command, first).with(change);
            world.status(&request.with(|header| header.lease_epoch = epoch))
        };
        assert_eq!(refused(&|header| header.range_epoch = 0), Status::StaleRangeEpoch);
        assert_eq!(refused(&|header| header.range_epoch += 1), Status::StaleRangeEpoch);
        assert_eq!(refused(&|header| header.page_version += 1), Status::StaleRangeEpoch);
        assert_eq!(refused(&|header| header.length -= 1), Status::BadLength);
        assert_eq!(refused(&|header| header.offset = 1), Status::Malformed);
        let data = taker.request(command, first).carrying(b"data");
        assert_eq!(world.status(&data), Status::Malformed);
        assert_eq!(world.status(&outside.request(command, first)), Status::StaleRangeEpoch);
        let inside = taker.request(command, page_of(first, 1));
        assert_eq!(world.status(&inside), Status::Unaligned);
        let beyond = taker.request(command, page_of(first, 24));
        assert_eq!(world.status(&beyond), Status::OutOfRange);
        // The switch's entries for memory may lead anywhere.
        let mut at_pointer = taker.request(command, first);
        at_pointer.to =
            Fields { command: command.code(), ..Fields::unpack(at_pointer.header.target).unwrap() };
        // Some runs send all requests to the endpoint address.
        if world.routed(&at_pointer).to == at_pointer.to {
            assert_eq!(world.status(&at_pointer), Status::Malformed);
        }
        let generation = bluebridge_wire::ArenaGeneration::new(1).unwrap();
        let location = Location::new(generation, 0).unwrap();
        let earlier = taker.request(command, Pointer { location, ..first });
        assert_eq!(world.status(&earlier), Status::StaleGeneration);
    }
    // An incarnation that lost what it took.
    let mut next = Taker(Client::open(&mut world, TAKER, TAKER_INCARNATION + 1));
    assert_eq!(world.status(&next.request(Command::Take, first)), Status::StaleRangeEpoch);
    assert_eq!(world.responder.leased_pages(), 0);
    assert_eq!(world.given(MIGRATION), []);
}

#[test]
pub(super) fn a_mark_is_not_the_answer_to_the_next_incarnation() {
    let (mut world, [first, ..], mut taker) = given();
    let epoch = taker.take(&mut world, first);
    assert_eq!(taker.keep(&mut world, first, epoch).status, Status::Ok);
    let mut next = Taker(Client::open(&mut world, TAKER, TAKER_INCARNATION + 1));
    assert_eq!(next.keep(&mut world, first, epoch).status, Status::StaleRangeEpoch);
}

#[test]
pub(super) fn a_line_with_unfinished_or_unconfirmed_pages_is_busy() {
    let mut world = World::new();
    let data = stamp(5000, 2);
    let whole = TestRequest::server(Command::AllocWrite);
    let whole = world.next(whole);
    let train = pieces(whole, 0, &data, 4096);
    assert_eq!(world.send(&train[0]), [], "the second piece is missing");
    world.allow(&allowance(0..2 * LINE)).unwrap();
    let mut taker = Taker::open(&mut world);
    let (first, second) = (pointer(0, 0), pointer(LINE_BYTES as u64, 0));
    let busy = world.one(&taker.request(Command::Take, first).with(queued));
    assert_eq!((busy.status, busy.header.lease_epoch), (Status::Busy, 0));
    assert!(!busy.header.flags.contains(Flags::QUEUED), "it does not wait for that");
    assert_eq!(world.status(&train[1]), Status::Ok);
    taker.take(&mut world, first);
    // The range is withheld, so this one lies behind it.
    world.withdraw(MIGRATION).unwrap();
    world.close(MIGRATION).unwrap();
    let anywhere = TestRequest::anywhere(Command::Create, 77, 14);
    let provisional = world.one(&anywhere);
    assert_eq!(provisional.target.location & 0xffff_ffff, 2 * 4096, "behind the two pages");
    world.allow(&Allowance { migration: MIGRATION + 1, ..allowance(0..2 * LINE) }).unwrap();
    let of_next = |header: &mut Header| header.page_version += 1;
    let take = taker.request(Command::Take, second).with(of_next);
    assert_eq!(world.status(&take), Status::Busy);
    world.pass(millis(2000));
    let take = taker.request(Command::Take, second).with(of_next);
    assert_eq!(world.status(&take), Status::Ok, "they are freed");
}

fn queued(header: &mut Header) {
    header.flags = header.flags.with(Flags::QUEUED);
}

#[test]
pub(super) fn no_page_of_an_allowed_range_is_allocated() {
    let mut world = World::new();
    assert_eq!(world.create(8).location.page(), 0);
    assert_eq!(world.create(1).location.page(), LINE);
    world.allow(&allowance(LINE..2 * LINE)).unwrap();
    let behind = world.create(1);
    assert_eq!(behind.location.page(), 2 * LINE);
    // What is freed in it stays free.
    let mut taker = Taker::open(&mut world);
    taker.move_line(&mut world, pointer(LINE_BYTES as u64, 0));
    world.withdraw(MIGRATION).unwrap();
    assert_eq!(world.create(1).location.page(), 2 * LINE + 1, "the line is the taker's");
    let other = Allowance { migration: 9, ..allowance(3 * LINE..4 * LINE) };
    world.allow(&other).unwrap();
    world.withdraw(9).unwrap();
    assert_eq!(world.create(16).location.page(), 2 * LINE + 2, "it may be allocated again");
}

#[test]
pub(super) fn orders_are_executed_once_and_in_order() {
    let (mut world, [first, second, _], mut taker) = given();
    taker.move_line(&mut world, first);
    let epoch = taker.take(&mut world, second);
    // Repeated, it changes nothing.
    world.allow(&allowance(0..3 * LINE)).unwrap();
    assert_eq!(world.look(first).0, Status::Moved);
    let other_terms = Allowance { range_epoch: 13, ..allowance(0..3 * LINE) };
    assert_eq!(world.allow(&other_terms), Err(AllowError::Contradiction));
    let next = |pages| Allowance { migration: MIGRATION + 1, ..allowance(pages) };
    assert_eq!(world.allow(&next(LINE..4 * LINE)), Err(AllowError::Overlap));
    assert_eq!(world.allow(&next(25..4 * LINE)), Err(AllowError::Unaligned));
    assert_eq!(world.allow(&next(4 * LINE..4 * LINE)), Err(AllowError::Unaligned));
    let foreign = Allowance { space: Space(77), ..next(3 * LINE..4 * LINE) };
    assert_eq!(world.allow(&foreign), Err(AllowError::Space));
    assert_eq!(world.withdraw(MIGRATION + 1), Err(AllowError::Unknown));
    assert_eq!(world.close(MIGRATION), Err(AllowError::Open));
    // The lease ends at once, and the line is the giver's again.
    world.withdraw(MIGRATION).unwrap();
    world.withdraw(MIGRATION).unwrap();
    let kept = taker.keep(&mut world, second, epoch);
    assert_eq!(lost(&kept), (Status::LeaseLost, Some(LeaseEnd::Withdrawn)));
    assert_eq!(world.look(second).0, Status::Ok);
    assert_eq!(world.status(&taker.request(Command::Take, second)), Status::StaleRangeEpoch);
    // A lease by UPDATE is none of the migration.
    let epoch = taker.0.lease(&mut world, second, LINE_BYTES);
    let kept = taker.keep(&mut world, second, epoch);
    assert_eq!(lost(&kept), (Status::LeaseLost, Some(LeaseEnd::Withdrawn)));
    assert_eq!(world.status(&taker.0.under(Command::Abort, second, LINE_BYTES, epoch)), Status::Ok);
    // What is the taker's stays the taker's.
    assert_eq!(world.look(first).0, Status::Moved);
    assert_eq!(taker.keep(&mut world, first, epoch).status, Status::Ok);
    assert_eq!(world.allow(&allowance(0..3 * LINE)), Err(AllowError::Late));
    world.close(MIGRATION).unwrap();
    assert_eq!(world.look(first), (Status::Moved, TAKER.0, LINE_PAGES as u32));
    assert_eq!(world.allow(&allowance(LINE..3 * LINE)), Err(AllowError::Late));
    assert_eq!(world.close(MIGRATION), Err(AllowError::Unknown));
    let moved = next(0..LINE);
    assert_eq!(world.allow(&moved), Err(AllowError::Overlap));
    assert_eq!(taker.keep(&mut world, first, epoch).status, Status::StaleRangeEpoch);
    let events = [Event::MigrationAllowed, Event::MigrationWithdrawn, Event::MigrationClosed];
    assert_eq!(events.map(|event| world.event(event)), [1, 1, 1]);
    assert_eq!(world.event(Event::LeaseWithdrawn), LINE);
}

#[test]
pub(super) fn a_full_table_refuses_and_changes_nothing() {
    let mut config = config();
    (config.limits.migration_count, config.limits.range_count) = (2, 1);
    let mut world = World::with(&config, 64, 4096);
    world.create(4 * LINE_PAGES as u32);
    for (migration, pages) in [(1, 0..2 * LINE), (2, 2 * LINE..4 * LINE)] {
        world.allow(&Allowance { migration, ..allowance(pages) }).unwrap();
    }
    let third = Allowance { migration: 3, ..allowance(4 * LINE..5 * LINE) };
    assert_eq!(world.allow(&third), Err(AllowError::Full));
    let mut taker = Taker::open(&mut world);
    let of = |migration| move |header: &mut Header| header.page_version = migration;
    for (migration, line) in [(1, 0), (2, 2), (2, 3)] {
        let at = pointer(line * LINE_BYTES as u64, 0);
        let epoch = {
            let reply = world.one(&taker.request(Command::Take, at).with(of(migration)));
            reply.header.lease_epoch
        };
        let keep = taker.keep_request(at, epoch).with(of(migration));
        assert_eq!(world.status(&keep), Status::Ok);
        world.withdraw(migration).unwrap();
        if line == 2 {
            // Only the other one has room.
            world.close(1).unwrap();
            assert_eq!(world.close(2), Err(AllowError::Full));
            assert_eq!(world.given(2), [(16, 24)]);
            break;
        }
    }
    assert_eq!(world.look(pointer(2 * LINE_BYTES as u64, 1)).0, Status::Moved);
}

#[test]
pub(super) fn a_take_waits_its_turn_and_is_next_after_the_longest_lease() {
    let (mut world, [first, ..], mut taker) = given();
    let mut owner = Client::open(&mut world, OTHER, 1);
    let epoch = owner.lease(&mut world, first, 64);
    let unqueued = world.one(&taker.request(Command::Take, first));
    assert_eq!((unqueued.status, unqueued.header.node), (Status::Busy, OTHER.0));
    let take = taker.request(Command::Take, first).with(queued);
    assert_eq!(world.status(&take), Status::Busy);
    assert_eq!(world.responder.waiting_count(), 1);
    // It repeats its request, the owner renews, and others lease what is free, for the longest time of a lease.
    let mut third = Client::open(&mut world, NodeId(23), 1);
    for _ in 0..99 {
        world.pass(millis(100));
        assert_eq!(world.status(&take), Status::Busy);
        let renew = owner.under(Command::Renew, first, 64, epoch);
        assert_eq!(world.status(&renew), Status::Ok);
        let free = page_of(first, 3);
        let lease = third.lease(&mut world, free, 64);
        assert_eq!(world.status(&third.under(Command::Abort, free, 64, lease)), Status::Ok);
    }
    world.pass(millis(100));
    let renewed = world.one(&owner.under(Command::Renew, first, 64, epoch));
    assert_eq!((renewed.status, renewed.header.lease_remaining_ms), (Status::Ok, 900));
    let overtaking = third.request(Command::Update, page_of(first, 3), 64);
    assert_eq!(world.status(&overtaking), Status::Busy);
    for _ in 0..8 {
        world.pass(millis(100));
        assert_eq!(world.status(&take), Status::Busy);
    }
    world.pass(millis(100));
    let replies = world.drain();
    assert_eq!(replies.len(), 1, "{replies:?}");
    assert_eq!(replies[0].status, Status::Ok);
    assert!(parse_line(&replies[0].data).is_ok());
    // The recorded reply, also for a copy: the same lease.
    let again = world.one(&take);
    assert_eq!(again.header.lease_epoch, replies[0].header.lease_epoch);
}

#[test]
pub(super) fn who_waits_for_a_line_learns_that_it_moved() {
    let (mut world, [first, ..], mut taker) = given();
    let epoch = taker.take(&mut world, first);
    let mut reader = Client::open(&mut world, OTHER, 1);
    let read = reader.request(Command::Read, first, 64).with(queued);
    assert_eq!(world.status(&read), Status::Busy);
    let mut owner = Client::open(&mut world, NodeId(23), 1);
    let update = owner.request(Command::Update, page_of(first, 2), 64).with(queued);
    assert_eq!(world.status(&update), Status::Busy);
    let replies = world.send(&taker.keep_request(first, epoch));
    let outcomes: Vec<_> = replies.iter().map(|reply| (reply.status, reply.header.node)).collect();
    assert_eq!(outcomes, [(Status::Ok, 0), (Status::Moved, TAKER.0), (Status::Moved, TAKER.0)]);
    assert_eq!(world.responder.waiting_count(), 0);
}

#[test]
pub(super) fn moved_raises_low_water_and_nothing_below_it_is_executed() {
    let (mut world, [first, second, _], mut taker) = given();
    let late = world.write_train(first, b"late").remove(0);
    taker.move_line(&mut world, first);
    let request = world.read_request(first, 4);
    assert_eq!(world.status(&request), Status::Moved);
    assert_eq!(world.status(&late), Status::Expired);
    // Each line for itself.
    assert_eq!(world.write(second, b"here"), Status::Ok);
    let atomic = TestRequest::new(Command::FetchAdd, first.to_ipv6());
    let atomic = atomic.carrying(&1_u64.to_be_bytes()).with(|header| header.length = 8);
    let atomic = world.next(atomic);
    assert_eq!(world.status(&atomic), Status::Moved);
}

#[test]
pub(super) fn a_kept_line_brings_all_fences_in_parts() {
    let (mut world, [first, ..], mut taker) = given();
    for node in 100..140 {
        Client::open(&mut world, NodeId(node), 3);
    }
    let epoch = taker.take(&mut world, first);
    // Between the TAKE and the KEEP.
    Client::open(&mut world, NodeId(101), 4);
    let mut known = 0;
    let mut fences = BTreeMap::new();
    let mut replies = 0;
    loop {
        let keep = taker.keep_request(first, epoch).with(|header| header.detail = known);
        let reply = world.one(&keep);
        assert_eq!((reply.status, reply.header.lease_epoch), (Status::Ok, epoch));
        let part: Vec<_> = Fence::parse_all(&reply.data).collect();
        assert_eq!(reply.data.len(), part.len() * 8);
        fences.extend(part.iter().map(|fence| (fence.node, fence.incarnation)));
        (known, replies) = (reply.header.detail, replies + 1);
        if u64::from(known) == reply.header.page_version {
            break;
        }
        assert_eq!(part.len(), FENCES_MAX);
    }
    assert_eq!(replies, 2);
    let expected = (100..140).map(|node| (NodeId(node), if node == 101 { 4 } else { 3 }));
    let expected = expected.chain([(CLIENT, 1), (TAKER, TAKER_INCARNATION)]);
    assert_eq!(fences, expected.collect());
    // Later ones only.
    Client::open(&mut world, NodeId(139), 9);
    let keep = taker.keep_request(first, epoch).with(|header| header.detail = known);
    let reply = world.one(&keep);
    let news: Vec<_> = Fence::parse_all(&reply.data).collect();
    assert_eq!(news, [Fence { node: NodeId(139), incarnation: 9 }]);
    // A number that it was never told is none.
    let keep = taker.keep_request(first, epoch).with(|header| header.detail = known + 100);
    assert_eq!(Fence::parse_all(&world.one(&keep).data).count(), FENCES_MAX);
}

#[test]
pub(super) fn outdated_fences_are_removed_and_none_is_missed() {
    let (mut world, [first, ..], mut taker) = given();
    taker.move_line(&mut world, first);
    // Reads on from a number to the end; returns the number of the replies.
    let mut read_on = |world: &mut World, known: &mut u32, fences: &mut BTreeMap<u16, u32>| {
        for replies in 1.. {
            let keep = taker.keep_request(first, 0).with(|header| header.detail = *known);
            let reply = world.one(&keep);
            for Fence { node, incarnation } in Fence::parse_all(&reply.data) {
                let highest = fences.entry(node.0).or_default();
                *highest = incarnation.max(*highest);
            }
            *known = reply.header.detail;
            if u64::from(*known) == reply.header.page_version {
                return replies;
            }
        }
        0
    };
    let (mut known, mut fences) = (0, BTreeMap::new());
    for incarnation in 1..=400 {
        Client::open(&mut world, NodeId(101), incarnation);
        Client::open(&mut world, NodeId(102 + incarnation as u16 / 200), incarnation);
        if incarnation % 70 == 0 {
            read_on(&mut world, &mut known, &mut fences);
        }
    }
    read_on(&mut world, &mut known, &mut fences);
    let expected = [(CLIENT.0, 1), (TAKER.0, TAKER_INCARNATION), (101, 400)];
    let expected = expected.into_iter().chain([(102, 199), (103, 399), (104, 400)]).collect();
    assert_eq!(fences, expected, "read in parts, between others");
    let mut fences = BTreeMap::new();
    let replies = read_on(&mut world, &mut 0, &mut fences);
    assert_eq!(fences, expected, "read at once");
    assert!(replies <= 4, "{replies} replies for 800 fences of 6 nodes");
}

#[test]
pub(super) fn moved_names_the_aligned_block() {
    let mut world = World::with(&config(), 128, 4096);
    let at = world.create(128);
    world.allow(&allowance(LINE..16 * LINE)).unwrap();
    let mut taker = Taker::open(&mut world);
    let block = |world: &mut World, line: usize| world.look(page_of(at, 8 * line)).2;
    for (line, blocks) in [
        (1, vec![(1, 8)]),
        (2, vec![(1, 8), (2, 8)]),
        (3, vec![(1, 8), (2, 16), (3, 16)]),
        (5, vec![(5, 8)]),
        (4, vec![(3, 16), (4, 16), (5, 16)]),
        (7, vec![(7, 8)]),
        (6, vec![(4, 32), (7, 32), (1, 8)]),
    ] {
        taker.move_line(&mut world, page_of(at, 8 * line));
        for (line, pages) in blocks {
            assert_eq!(block(&mut world, line), pages, "line {line}");
        }
    }
    for line in 8..16 {
        taker.move_line(&mut world, page_of(at, 8 * line));
    }
    assert_eq!(block(&mut world, 15), 64);
    assert_eq!(world.look(at).0, Status::Ok);
}

#[test]
pub(super) fn adopted_lines_move_on() {
    let mut world = World::new();
    let (own, adopted, other_name) = world.create_adopted();
    world.allow(&allowance(LINE..2 * LINE)).unwrap();
    let mut taker = Taker::open(&mut world);
    let by_home = world.read_request(other_name, 64);
    assert_eq!(world.status(&by_home), Status::Ok);
    taker.move_line(&mut world, other_name);
    assert_eq!(world.look(other_name), (Status::Moved, TAKER.0, LINE_PAGES as u32));
    world.withdraw(MIGRATION).unwrap();
    world.close(MIGRATION).unwrap();
    assert!(!world.responder.remove_adopted(&adopted), "it is no longer served");
    assert_eq!(world.look(other_name).0, Status::WrongNode);
    assert_eq!(world.look(own).0, Status::Ok);
}

#[test]
pub(super) fn a_giver_without_authority_marks_nothing() {
    let (mut world, [first, second, _], mut taker) = given();
    let epoch = taker.take(&mut world, first);
    world.responder.set_authority(None);
    assert_eq!(taker.keep(&mut world, first, epoch).status, Status::NoAuthority);
    assert_eq!(world.status(&taker.request(Command::Take, second)), Status::NoAuthority);
    world.responder.set_authority(Some(Authority { range_epoch: 4, expires_at: None }));
    assert_eq!(taker.keep(&mut world, first, epoch).status, Status::Ok);
    world.responder.set_authority(None);
    assert_eq!(taker.keep(&mut world, first, epoch).status, Status::Ok, "the mark is there");
}

/// Otherwise the kernel could answer for a page that the taker changes already.
#[test]
fn direct_readers_answer_nothing_for_a_line_from_take_on_and_all_for_others() {
    let (mut world, [first, second, _], mut taker) = direct::shared(given);
    let is_answered = |world: &mut World, at| {
        let read = world.read_request(at, 8);
        direct::read_directly(world, &read).is_some()
    };
    assert!(is_answered(&mut world, first));
    let epoch = taker.take(&mut world, first);
    assert!(!is_answered(&mut world, first), "it is leased");
    world.offer(&taker.keep_request(first, epoch)).unwrap();
    assert!(!is_answered(&mut world, first), "before the answer is sent");
    assert_eq!(world.drain().len(), 1);
    assert!(is_answered(&mut world, second));
    world.withdraw(MIGRATION).unwrap();
    world.close(MIGRATION).unwrap();
    world.responder.publish(&world.store);
    assert!(!is_answered(&mut world, first) && is_answered(&mut world, second));
}

#[test]
pub(super) fn queued_replies_of_a_line_are_sent_before_it_is_kept() {
    let (mut world, [first, ..], mut taker) = given();
    let epoch = taker.take(&mut world, first);
    world.offer(&taker.0.under(Command::Read, first, 64, epoch)).unwrap();
    assert_eq!(world.offer(&taker.keep_request(first, epoch)), Err(DrainFirst));
    assert_eq!(world.drain().len(), 1);
    assert_eq!(world.offer(&taker.keep_request(first, epoch)), Ok(()));
    // Room for records is bounded.
    for _ in 0..7 {
        assert_eq!(world.offer(&taker.keep_request(first, epoch)), Ok(()));
    }
    assert_eq!(world.offer(&taker.keep_request(first, epoch)), Err(DrainFirst));
    let replies = world.drain();
    assert!(replies.iter().all(|reply| reply.status == Status::Ok && reply.data.len() == 16));
    assert_eq!(replies.len(), 8);
}

#[test]
pub(super) fn a_line_that_is_free_as_a_whole_is_not_leased() {
    let mut world = World::new();
    let at = world.create(4);
    world.allow(&allowance(0..3 * LINE)).unwrap();
    let mut taker = Taker::open(&mut world);
    let free = page_of(at, 8);
    let request = taker.request(Command::Take, free);
    for _ in 0..2 {
        let reply = world.one(&request);
        let lease = (reply.header.lease_epoch, reply.header.node, reply.header.lease_remaining_ms);
        assert_eq!((reply.status, lease), (Status::Ok, (0, 0, 0)));
        assert!(parse_line(&reply.data).unwrap().iter().all(|page| page.part == Part::Free));
    }
    let counts = (world.event(Event::FreeLineStays), world.event(Event::LineTaken));
    assert_eq!((world.responder.leased_pages(), counts), (0, (1, 0)));
    assert_eq!(taker.keep(&mut world, free, 0).status, Status::LeaseLost, "it was not taken");
    assert!(taker.take(&mut world, at) > 0, "one with a page is");
    assert!(world.create(8).location.page() >= 3 * LINE, "it stays out of use meanwhile");
    world.withdraw(MIGRATION).unwrap();
    assert_eq!(world.create(8).location.page(), 4, "its pages are the giver's to give");
}
