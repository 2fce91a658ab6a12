//! Lines of other servers, own lines that come back, and what a process leaves of migrations to the next one
//! (`docs/migration.md`).

use bluebridge_wire::{
    ArenaGeneration, Fence, LeaseEnd, LinePage,
    address::{LINE_BYTES, LINE_PAGES},
    line::{LineRecord, PageContents, Part},
};

use super::{
    giver::{LINE, MIGRATION, TAKER, TAKER_INCARNATION, Taker, allowance, given, lost},
    leases::{Client, OTHER},
    *,
};
use crate::store::{ADOPTED_PAGES_FROM, HomeLine, LineStore as _, PageCrcs, Taken};

pub(super) const HOME: NodeId = NodeId(4);
const TAG: u8 = 7;

/// Above all that the server grants by itself.
const FOREIGN_EPOCH: u64 = 9 << 40 | 7;

fn generation(number: u16) -> ArenaGeneration {
    ArenaGeneration::new(number).unwrap()
}

pub(super) fn home_line(first_page: u64) -> HomeLine {
    HomeLine { node: HOME, generation: store::GENERATION, first_page }
}

/// The pointer to a page of the other server.
pub(super) fn foreign(page: u64) -> Pointer {
    Pointer { node: HOME, ..pointer(page * PAGE_BYTES as u64, TAG) }
}

fn record() -> LineRecord {
    let mut record = LineRecord::default();
    for (page, distance) in record.iter_mut().zip(40..) {
        *page = LinePage {
            version: 40,
            part: Part::Further { distance },
            colour: Some((store::GENERATION, Tag(TAG))),
            space: SPACE,
            contents: PageContents::Written,
            ..LinePage::default()
        };
    }
    record
}

impl World {
    fn stage(&mut self, place: u64, home: HomeLine, record: &LineRecord, epoch: u64, seed: u8) {
        let taken = Taken { migration: MIGRATION, epoch };
        self.store.memory(place).unwrap().copy_from_slice(&stamp(LINE_BYTES, seed));
        let staged = self.store.stage(place, (home, taken), record, &PageCrcs::default());
        assert_eq!(staged, Ok(()));
    }

    fn adopt_staged(&mut self, place: u64, home: HomeLine, epoch: u64) {
        let taken = Taken { migration: MIGRATION, epoch };
        self.responder.adopt(self.now, place, home, taken, &mut self.store);
    }

    /// Takes a line of the other server over; returns its place.
    pub(super) fn adopt_line(&mut self, home: HomeLine, epoch: u64, seed: u8) -> u64 {
        let place = self.store.reserve(1).expect("there is room")[0].start;
        self.stage(place, home, &record(), epoch, seed);
        self.adopt_staged(place, home, epoch);
        place
    }

    /// The next process of the server goes on with the same memory.
    pub(super) fn restart(&mut self) {
        let incarnation = self.responder.incarnation + 1;
        self.store.restart();
        let config = Config { incarnation, ..config() };
        self.responder = Responder::new(&config).unwrap();
        self.responder.begin(self.now, &mut self.store);
        self.reopen(4096);
    }
}

#[test]
pub(super) fn a_line_is_served_when_it_is_adopted_and_moves_on() {
    let mut world = World::new();
    world.create(8);
    assert_eq!(world.look(foreign(512)).0, Status::WrongNode);
    let place = world.store.reserve(1).expect("there is room")[0].start;
    world.stage(place, home_line(512), &record(), 3, 5);
    world.responder.doubt(home_line(512));
    for at in [512, 519] {
        assert_eq!(world.look(foreign(at)).0, Status::NoAuthority, "it is in doubt");
    }
    let other_home = Pointer { node: NodeId(5), ..foreign(512) };
    assert_eq!([foreign(520), other_home].map(|at| world.look(at).0), [Status::WrongNode; 2]);
    world.responder.end_doubt(&home_line(512));
    assert_eq!(world.look(foreign(512)).0, Status::WrongNode, "it is the giver's");
    world.responder.doubt(home_line(512));
    world.adopt_staged(place, home_line(512), 3);
    assert_eq!(world.event(Event::LineAdopted), 1);
    assert_eq!(world.read(foreign(512), LINE_BYTES), stamp(LINE_BYTES, 5));
    assert_eq!(world.write(foreign(513), b"new"), Status::Ok);
    assert_eq!(world.look(foreign(520)).0, Status::WrongNode, "the next line is not here");
    let stale = Pointer { tag: Tag(TAG + 1), ..foreign(512) };
    assert_eq!(world.look(stale).0, Status::StaleTag);
    // The rest of the allocation is elsewhere.
    let used = world.store.used_pages();
    for pages in [0, 8] {
        assert_eq!(world.delete(foreign(512), pages), Status::NoAuthority);
    }
    assert_eq!(world.store.used_pages(), used);
    assert!(!world.responder.is_own_page(place));
    // Its neighbour comes, and they are one range.
    world.adopt_line(home_line(520), 3, 6);
    let adopted = world.responder.adopted();
    assert_eq!((adopted.len(), adopted[0].page_count), (1, 2 * LINE));
    world.allow(&allowance(place..place + LINE)).unwrap();
    let mut taker = Taker::open(&mut world);
    let line = foreign(512);
    taker.move_line(&mut world, line);
    assert_eq!(world.look(line), (Status::Moved, TAKER.0, LINE_PAGES as u32));
    assert_eq!(world.look(foreign(520)).0, Status::Ok);
    world.restart();
    assert_eq!(world.look(line), (Status::Moved, TAKER.0, LINE_PAGES as u32));
    assert_eq!(world.look(foreign(520)).0, Status::Ok);
    let mut taker = Taker::open(&mut world);
    assert_eq!(taker.keep(&mut world, line, 1).status, Status::Ok, "the mark is its");
    world.withdraw(MIGRATION).unwrap();
    world.close(MIGRATION).unwrap();
    assert_eq!(world.look(line).0, Status::WrongNode);
    assert_eq!(world.read(foreign(520), LINE_BYTES), stamp(LINE_BYTES, 6));
}

#[test]
pub(super) fn a_line_in_doubt_is_that_of_its_contents_only() {
    let mut world = World::new();
    let line = |number| HomeLine { generation: generation(number), ..home_line(512) };
    let is_in_doubt = |world: &World, number: u16| {
        let location = Location::new(generation(number), 513 * PAGE_BYTES as u64).unwrap();
        world.responder.ranges.is_in_doubt(HOME, location)
    };
    let in_doubt = |world: &World| [1, 2, 4, 5, 9].map(|number| is_in_doubt(world, number));
    // Contents that began with 5 are served here, and an earlier process's line of 2 comes.
    world.adopt_line(line(5), 3, 6);
    world.responder.doubt(line(2));
    assert_eq!(in_doubt(&world), [false, true, true, false, false]);
    world.responder.end_doubt(&line(2));
    assert_eq!(in_doubt(&world), [false; 5]);
    // The other way round.
    world.responder.doubt(line(9));
    assert_eq!(in_doubt(&world), [false, false, false, false, true]);
}

#[test]
pub(super) fn pointers_find_the_line_of_their_generation() {
    let mut world = World::new();
    let line =
        |number, first_page| HomeLine { generation: generation(number), ..home_line(first_page) };
    world.adopt_line(line(2, 512), 3, 5);
    world.adopt_line(line(5, 520), 3, 6);
    world.adopt_line(line(5, 512), 3, 7);
    let local = |world: &World, number: u16, page: u64| {
        let location = Location::new(generation(number), page * PAGE_BYTES as u64 + 9).unwrap();
        let local = world.responder.ranges.local(HOME, location)?;
        assert_eq!((local.generation(), local.in_page()), (generation(number), 9));
        Some(local.page())
    };
    // Pointers have the first generation of the contents, or a later one before the next contents began.
    for (number, page, expected) in [
        (2, 512, Some(0)),
        (4, 519, Some(7)),
        (5, 512, Some(16)),
        (6, 513, Some(17)),
        (9, 520, Some(8)),
        (2, 520, None),
        (4, 520, None),
        (1, 512, None),
        (7, 528, None),
        (7, 511, None),
    ] {
        assert_eq!(local(&world, number, page), expected, "{number} {page}");
    }
    let other = Location::new(generation(5), 512 * PAGE_BYTES as u64).unwrap();
    for node in [HOME.0 - 1, HOME.0 + 1] {
        assert_eq!(world.responder.ranges.local(NodeId(node), other), None);
    }
    // Between the contents, there may be lines of others.
    world.adopt_line(line(3, 4096), 3, 8);
    assert_eq!(local(&world, 4, 512), Some(0));
    assert_eq!(local(&world, 9, 4096), Some(24));
}

#[test]
pub(super) fn lease_epochs_go_on_above_those_of_the_giver_and_of_earlier_processes() {
    let mut world = World::new();
    let at = world.create(8);
    let mut owner = Client::open(&mut world, OTHER, 1);
    let first = owner.lease(&mut world, at, 64);
    assert!(first < FOREIGN_EPOCH);
    world.adopt_line(home_line(512), FOREIGN_EPOCH, 5);
    // The floor is stored before the line is served.
    assert_eq!(world.store.told, ["stage", "floor", "adopt"]);
    assert_eq!(world.store.lease_floor(), FOREIGN_EPOCH);
    let mut last = owner.lease(&mut world, foreign(512), 64);
    assert!(last > FOREIGN_EPOCH);
    // For all lines of the core.
    last = last.max(owner.lease(&mut world, page_of(at, 1), 64));
    assert!(last > FOREIGN_EPOCH + 1);
    // A lower one lowers nothing.
    world.adopt_line(home_line(520), 3, 5);
    let next = owner.lease(&mut world, foreign(520), 64);
    assert!(next > last);
    last = next;
    for _ in 0..3 {
        world.restart();
        assert!(world.store.lease_floor() >= last, "the next process begins above it, too");
        let mut owner = Client::open(&mut world, OTHER, 1);
        let epoch = owner.lease(&mut world, foreign(512), 64);
        assert!(epoch > last && epoch >> 40 > last >> 40, "{epoch:#x} after {last:#x}");
        last = owner.lease(&mut world, page_of(at, 2), 64);
    }
}

/// The upper part of an epoch has 8 bits, and every process has its own.
#[test]
pub(super) fn processes_differ_when_epochs_begin_again() {
    let mut world = World::new();
    world.adopt_line(home_line(512), 0xff << 40 | 7, 5);
    let mut parts = Vec::new();
    for _ in 0..3 {
        world.restart();
        let mut owner = Client::open(&mut world, OTHER, 1);
        parts.push(owner.lease(&mut world, foreign(512), 64) >> 40);
    }
    let different: std::collections::BTreeSet<_> = parts.iter().collect();
    assert_eq!(different.len(), 3, "{parts:?}");
}

#[test]
pub(super) fn fences_of_a_kept_line_end_old_sessions_and_leases() {
    let mut world = World::new();
    let at = world.create(8);
    let mut old = Client::open(&mut world, OTHER, 1);
    old.lease(&mut world, at, 64);
    assert_eq!(world.look(at).0, Status::Busy);
    let sessions = world.responder.session_count();
    let fences = [(OTHER, 2), (NodeId(77), 5), (CLIENT, 1)];
    let fences = fences.map(|(node, incarnation)| Fence { node, incarnation });
    world.responder.heed_fences(world.now, SPACE, fences, &mut world.store);
    assert_eq!(world.responder.session_count(), sessions - 1);
    assert_eq!(world.status(&old.request(Command::Read, at, 64)), Status::StaleIncarnation);
    assert_eq!(world.look(at).0, Status::Ok, "its lease is over");
    assert_eq!(world.status(&open(NodeId(77), 4, 5, 4096)), Status::StaleIncarnation);
    assert_eq!(world.status(&open(NodeId(77), 5, 6, 4096)), Status::Ok);
    assert_eq!(world.store.fences[&(SPACE, NodeId(77))], 5);
    assert_eq!(world.store.fences[&(SPACE, OTHER)], 2);
}

#[test]
pub(super) fn what_an_earlier_process_gave_away_is_busy_until_it_is_known_where_it_is() {
    let (mut world, [first, second, third], mut taker) = given();
    for line in [first, second] {
        taker.move_line(&mut world, line);
    }
    world.withdraw(MIGRATION).unwrap();
    world.close(MIGRATION).unwrap();
    assert_eq!(world.look(first).0, Status::Moved);
    world.restart();
    assert_eq!(
        [first, second, third].map(|at| world.look(at).0),
        [Status::Busy, Status::Busy, Status::Ok]
    );
    assert!(!world.responder.is_own_page(LINE));
    assert_eq!(world.delete(third, 0), Status::Unaligned);
    let late = allowance(2 * LINE..3 * LINE);
    assert_eq!(world.allow(&late), Err(AllowError::Late), "the order is of an earlier process");
    let again = Allowance { migration: MIGRATION + 1, ..allowance(LINE..2 * LINE) };
    assert_eq!(world.allow(&again), Err(AllowError::Overlap), "it is elsewhere");
    world.responder.add_moved(LINE..2 * LINE, OTHER).unwrap();
    assert_eq!(world.look(first).0, Status::Busy);
    assert_eq!(world.look(second), (Status::Moved, OTHER.0, LINE_PAGES as u32));
    assert_eq!(world.responder.add_moved(0..2 * LINE, TAKER), Err(RangeError::Overlap));
    world.responder.add_moved(0..LINE, OTHER).unwrap();
    assert_eq!(world.look(first).0, Status::Moved);
    // One comes home.
    assert!(world.store.reserve_own(0..LINE));
    let own = HomeLine { node: SERVER, generation: store::GENERATION, first_page: 0 };
    let record = world.store.line(0).expect("it is whole").pages;
    world.stage(0, own, &record, 3, 9);
    assert_eq!(world.look(first).0, Status::Moved);
    world.adopt_staged(0, own, 3);
    assert_eq!(world.read(first, LINE_BYTES), stamp(LINE_BYTES, 9));
    assert_eq!(world.look(second).0, Status::Moved);
    world.restart();
    assert_eq!([first, second].map(|at| world.look(at).0), [Status::Ok, Status::Busy]);
}

#[test]
pub(super) fn an_own_line_in_doubt_is_busy_for_the_next_process_too() {
    let (mut world, [first, second, _], mut taker) = given();
    taker.move_line(&mut world, first);
    world.withdraw(MIGRATION).unwrap();
    world.close(MIGRATION).unwrap();
    assert!(world.store.reserve_own(0..LINE));
    let own = HomeLine { node: SERVER, generation: store::GENERATION, first_page: 0 };
    let record = world.store.line(0).expect("it is whole").pages;
    world.stage(0, own, &record, 3, 9);
    assert_eq!(world.look(first).0, Status::Moved);
    world.responder.doubt(own);
    // Its giver may have marked it, and would lead requests back here.
    assert_eq!([first, second].map(|at| world.look(at).0), [Status::Busy, Status::Ok]);
    world.responder.end_doubt(&own);
    assert_eq!(world.look(first).0, Status::Moved);
    world.restart();
    assert_eq!([first, second].map(|at| world.look(at).0), [Status::Busy, Status::Ok]);
    world.adopt_staged(0, own, 3);
    assert_eq!(world.read(first, LINE_BYTES), stamp(LINE_BYTES, 9));
}

#[test]
pub(super) fn the_next_process_answers_keep_from_its_marks() {
    let (mut world, [first, second, third], mut taker) = given();
    let epoch = taker.take(&mut world, first);
    assert_eq!(taker.keep(&mut world, first, epoch).status, Status::Ok);
    let unkept = taker.take(&mut world, second);
    world.restart();
    assert_eq!(world.given(MIGRATION), [(0, LINE)]);
    let mut taker = Taker::open(&mut world);
    assert_eq!(taker.keep(&mut world, first, epoch).status, Status::Ok);
    assert_eq!(world.event(Event::KeepRepeated), 1);
    assert_eq!(world.look(first), (Status::Moved, TAKER.0, LINE_PAGES as u32));
    let reply = taker.keep(&mut world, second, unkept);
    assert_eq!(lost(&reply), (Status::LeaseLost, Some(LeaseEnd::Unknown)));
    assert_eq!(world.look(second).0, Status::Ok);
    // The permission holds, and no page of the range is allocated.
    assert_eq!(world.allow(&allowance(0..3 * LINE)), Ok(()));
    assert_eq!(world.event(Event::MigrationAllowed), 0);
    assert!(world.create(1).location.page() >= 3 * LINE);
    taker.move_line(&mut world, second);
    world.withdraw(MIGRATION).unwrap();
    world.restart();
    assert_eq!(world.given(MIGRATION), [(0, 2 * LINE)]);
    let mut taker = Taker::open(&mut world);
    assert_eq!(world.status(&taker.request(Command::Take, third)), Status::StaleRangeEpoch);
    let kept = taker.keep(&mut world, third, 1);
    assert_eq!(lost(&kept), (Status::LeaseLost, Some(LeaseEnd::Withdrawn)));
    assert_eq!(taker.keep(&mut world, second, 1).status, Status::Ok);
    assert_eq!(world.allow(&allowance(0..3 * LINE)), Err(AllowError::Late));
    // What was not taken may be allocated again: behind the half of the third line.
    assert_eq!(world.create(4).location.page(), 20);
    world.close(MIGRATION).unwrap();
    assert_eq!(world.look(first), (Status::Moved, TAKER.0, 2 * LINE_PAGES as u32));
}

#[test]
pub(super) fn a_taker_reads_all_fences_of_the_givers_next_process() {
    let (mut world, [first, ..], mut taker) = given();
    for node in 100..110 {
        Client::open(&mut world, NodeId(node), 3);
    }
    let epoch = taker.take(&mut world, first);
    let reply = taker.keep(&mut world, first, epoch);
    let (all, known) = (Fence::parse_all(&reply.data).count(), reply.header.detail);
    assert_eq!((all, u64::from(known)), (12, reply.header.page_version));
    let keep = |world: &mut World, taker: &mut Taker, known| {
        let keep = taker.keep_request(first, epoch).with(|header| header.detail = known);
        let reply = world.one(&keep);
        (Fence::parse_all(&reply.data).count(), reply.header.detail)
    };
    assert_eq!(keep(&mut world, &mut taker, known), (0, known));
    let mut before = known;
    for _ in 0..2 {
        world.restart();
        let mut taker = Taker::open(&mut world);
        let (count, known) = keep(&mut world, &mut taker, before);
        assert_eq!(count, all, "all that the earlier process had seen");
        assert_ne!(known, before);
        assert_eq!(keep(&mut world, &mut taker, known), (0, known));
        before = known;
    }
}

#[test]
pub(super) fn a_takers_next_process_asks_for_its_lines() {
    let (mut world, [first, second, _], mut taker) = given();
    let epoch = taker.take(&mut world, first);
    assert_eq!(taker.keep(&mut world, first, epoch).status, Status::Ok);
    // It goes on under the same incarnation, whatever that of the server is then.
    let mut next = Taker::open(&mut world);
    assert_eq!(next.keep(&mut world, first, epoch).status, Status::Ok);
    next.move_line(&mut world, second);
    world.withdraw(MIGRATION).unwrap();
    world.restart();
    let mut next = Taker::open(&mut world);
    assert_eq!(next.keep(&mut world, first, epoch).status, Status::Ok);
    let take = next.request(Command::Take, page_of(first, 16));
    assert_eq!(world.status(&take), Status::StaleRangeEpoch, "it stays withdrawn");
    // A server that lost its memory has another one.
    let mut empty = Taker(Client::open(&mut world, TAKER, TAKER_INCARNATION + 1));
    assert_eq!(empty.keep(&mut world, first, epoch).status, Status::StaleRangeEpoch);
}

#[test]
pub(super) fn places_of_lines_that_moved_on_are_cleared_by_the_next_process() {
    let mut world = World::new();
    // The earlier process closed the migration, and ended.
    let places = [ADOPTED_PAGES_FROM, ADOPTED_PAGES_FROM + 3 * LINE];
    world.store.given.extend([0, places[0], places[1]]);
    world.store.adopted.extend(places.map(|place| (place, home_line(place))));
    world.store.restart();
    world.store.cleared.clear();
    world.responder = Responder::new(&Config { incarnation: 6, ..config() }).unwrap();
    world.responder.begin(world.now, &mut world.store);
    world.reopen(4096);
    let cleared: Vec<_> = world.store.cleared.iter().copied().collect();
    assert_eq!(cleared, places);
    assert!(world.responder.adopted().is_empty());
    assert!(!world.responder.is_own_page(0));
    assert!(world.responder.is_own_page(ADOPTED_PAGES_FROM));
}

#[test]
pub(super) fn lines_of_lost_contents_are_found_where_they_are_and_all_else_is_stale() {
    let mut world = World::new();
    world.responder.begin(world.now, &mut world.store);
    let at = world.create(24);
    let lost = |number: u16, page: u64| {
        let offset = (at.location.page() + page) * PAGE_BYTES as u64;
        Pointer { location: Location::new(generation(number), offset).unwrap(), ..at }
    };
    let row = |line: u64, lines: u64| {
        let page = at.location.page() + line * LINE;
        page..page + lines * LINE
    };
    let places = |world: &mut World, number: u16| {
        [0, 8, 16].map(|page| {
            let (status, node, block) = world.look(lost(number, page));
            if status == Status::Moved { (status, node, block) } else { (status, 0, 0) }
        })
    };
    let [stale, busy] = [Status::StaleGeneration, Status::Busy].map(|status| (status, 0, 0));
    let moved = |node: NodeId, lines: u32| (Status::Moved, node.0, lines * LINE_PAGES as u32);
    assert_eq!(places(&mut world, 1), [stale; 3], "nobody has any");
    // The lost contents had two generations.
    world.responder.learn_earlier(generation(0), &[(row(0, 2), None)]);
    for number in [0, 1] {
        assert_eq!(places(&mut world, number), [busy, busy, stale], "it is not known yet");
        assert_eq!(world.write(lost(number, 0), b"lost"), Status::Busy);
        assert_eq!(world.write(lost(number, 16), b"lost"), Status::StaleGeneration);
        // Otherwise the requester would wait for the other pages.
        for (page, status) in [(0, Status::Busy), (16, Status::StaleGeneration)] {
            let request = world.read_request(lost(number, page), 3 * 4096);
            let replies = world.send(&request);
            let refused: Vec<_> = replies.iter().map(|it| (it.status, it.header.offset)).collect();
            assert_eq!(refused, [(status, 0), (status, 4096), (status, 8192)], "each page");
        }
    }
    assert_eq!(places(&mut world, 2).map(|it| it.0), [Status::Ok; 3], "the present contents");
    // All have reported.
    let rows = [(row(1, 1), Some(TAKER)), (row(0, 1), Some(TAKER))];
    world.responder.learn_earlier(generation(0), &rows);
    for number in [0, 1] {
        assert_eq!(places(&mut world, number), [moved(TAKER, 2), moved(TAKER, 2), stale]);
        assert_eq!(world.write(lost(number, 0), b"lost"), Status::Moved);
    }
    // There were other contents in between.
    world.responder.learn_earlier(generation(1), &[(row(2, 1), Some(OTHER))]);
    assert_eq!(places(&mut world, 0), [moved(TAKER, 2), moved(TAKER, 2), stale]);
    assert_eq!(places(&mut world, 1), [stale, stale, moved(OTHER, 1)]);
    world.responder.learn_earlier(generation(0), &[]);
    assert_eq!(places(&mut world, 0), [stale; 3], "they were lost as well");
    // A line of the present contents moves, and pointers to earlier ones do not follow it.
    world.allow(&allowance(row(0, 1))).unwrap();
    let mut taker = Taker::open(&mut world);
    taker.move_line(&mut world, at);
    let known = [stale, stale, moved(OTHER, 1)];
    assert_eq!((world.look(at), places(&mut world, 1)), (moved(TAKER, 1), known));
    world.withdraw(MIGRATION).unwrap();
    world.close(MIGRATION).unwrap();
    assert_eq!((world.look(at), places(&mut world, 1)), (moved(TAKER, 1), known));
    world.restart();
    assert_eq!(places(&mut world, 1), [stale; 3], "the controller tells each process");
    assert_eq!(world.look(at).0, Status::Busy);
}

#[test]
pub(super) fn lines_that_are_scattered_here_move_on_together() {
    let mut world = World::new();
    let line = |first_page| HomeLine { node: HOME, ..home_line(first_page) };
    let first = world.adopt_line(line(512), 3, 5);
    world.adopt_line(line(4096), 3, 6);
    let last = world.adopt_line(line(520), 3, 7);
    let place = |world: &World, pages: Range<u64>| {
        world.responder.place_of(HOME, store::GENERATION, &pages, &world.store)
    };
    assert_eq!(place(&world, 512..520), Some(first..first + LINE));
    let all = first..last + LINE;
    assert_eq!((all.end - all.start, place(&world, 512..528)), (3 * LINE, Some(all.clone())));
    for missing in [504..520, 512..536, 504..536, 528..536] {
        assert_eq!(place(&world, missing.clone()), None, "{missing:?}");
    }
    world.allow(&allowance(all)).unwrap();
    let mut taker = Taker::open(&mut world);
    for page in [512, 520] {
        taker.move_line(&mut world, foreign(page));
    }
    let moved = (Status::Moved, TAKER.0, LINE_PAGES as u32);
    let looks = |world: &mut World| [512, 520, 4096].map(|page| world.look(foreign(page)));
    let [of_first, of_last, other] = looks(&mut world);
    assert_eq!((of_first, of_last, other.0), (moved, moved, Status::Ok));
    world.restart();
    let [of_first, of_last, other] = looks(&mut world);
    assert_eq!((of_first, of_last, other.0), (moved, moved, Status::Ok));
    world.withdraw(MIGRATION).unwrap();
    world.close(MIGRATION).unwrap();
    let statuses = looks(&mut world).map(|(status, ..)| status);
    assert_eq!(statuses, [Status::WrongNode, Status::WrongNode, Status::Ok]);
}
