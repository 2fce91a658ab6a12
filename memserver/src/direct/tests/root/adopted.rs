//! READs of lines of other servers that are served here.

use std::{
    hint,
    net::Ipv6Addr,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Instant,
};

use aya::programs::{TestRun as _, TestRunOptions};
use bluebridge_protocol::store::{HomeLine, LineStore, PageStore, Taken};
use bluebridge_testkit::namespace::in_thread;
use bluebridge_wire::{
    ArenaGeneration, Command, Datagram, EndpointAddress, Header, LinePage, NodeId, Pointer, Space,
    Tag,
    address::{Fields, LINE_PAGES, PAGE_BYTES, PAGE_SHIFT, SHARD_SHIFT},
    line::{LineRecord, PageContents, Part},
};
use rand::{Rng, SeedableRng, rngs::StdRng};

use super::{
    frames::{HOME, frame, frame_of, frame_to, parts},
    lines::Clones,
    rig::{CLIENT, NEXT, OTHER, REDIRECT, Rig, SERVER, SHARD, SPACE, now},
    writers::{Stop, is_worth_it},
};
use crate::direct::{ReadCounts, hints::ForeignLine, program::classifier};

const HOME_NODE: NodeId = NodeId(30);
const TAG: Tag = Tag(4);
const TAKEN: Taken = Taken { migration: 4, epoch: 77 };

/// A line of the home, of a shard that this one serves the lines of.
const fn home_line(number: u64) -> u64 {
    ((SHARD as u64 + 2) << (SHARD_SHIFT - PAGE_SHIFT)) + number * LINE_PAGES as u64
}

fn generation() -> ArenaGeneration {
    ArenaGeneration::new(9).expect("small")
}

/// A line of pages that each begin with their number and are otherwise one byte; the first is free, the second zeros.
fn line_of(byte: u8, space: Space) -> (LineRecord, Vec<u8>) {
    let mut pages = [LinePage::default(); LINE_PAGES];
    let mut bytes = vec![byte; LINE_PAGES * PAGE_BYTES];
    for (at, page) in (0_u8..).zip(&mut pages).skip(1) {
        *page = LinePage {
            version: 5,
            // Of an allocation that began in an earlier line.
            part: Part::Further { distance: 8 + u32::from(at) },
            colour: Some((generation(), TAG)),
            space,
            contents: if at == 1 { PageContents::Leftover } else { PageContents::Written },
            ..LinePage::default()
        };
        bytes[usize::from(at) * PAGE_BYTES] = at;
    }
    pages[2].part = Part::First { pages: 6 };
    (pages, bytes)
}

fn home(first_page: u64) -> HomeLine {
    HomeLine { node: HOME_NODE, generation: ArenaGeneration::default(), first_page }
}

impl Rig {
    /// A line of the home comes here. Returns its first page here.
    fn adopt(&mut self, first_page: u64, byte: u8) -> u64 {
        let place = self.arena.lines_mut().reserve(1).expect("there is room").remove(0).start;
        let (pages, bytes) = line_of(byte, SPACE);
        self.arena
            .stage_with(place, (home(first_page), TAKEN), &pages, &bytes)
            .expect("it is good");
        self.responder.adopt(now(), place, home(first_page), TAKEN, &mut self.arena);
        place
    }

    /// A READ at the home's pointer.
    fn read_foreign(&mut self, page: u64, start: u64, length: u32) -> (Ipv6Addr, Header) {
        self.sequence += 1;
        let header =
            Header { session: self.session, sequence: self.sequence, length, ..Header::default() };
        (pointer(HOME_NODE, page, start), header)
    }

    fn foreign_page(&mut self, page: u64) -> Vec<u8> {
        let (target, header) = self.read_foreign(page, 0, 4096);
        frame(Command::Read, target, &header, &[])
    }
}

fn pointer(node: NodeId, page: u64, start: u64) -> Ipv6Addr {
    let location = (u64::from(generation().number()) << 48) | ((page << PAGE_SHIFT) + start);
    Fields { space: SPACE, node, command: 0, tag: TAG.0, location }.to_ipv6()
}

fn endpoint(target: Ipv6Addr) -> Ipv6Addr {
    let pointer = Pointer::from_ipv6(target).expect("a pointer");
    EndpointAddress::for_memory(SERVER, pointer).to_ipv6()
}

const PAGE_REASON: fn(&ReadCounts) -> u64 = |counts| counts.passed_page;

#[test]
fn pages_of_other_servers_are_answered_as_the_responder_answers() {
    in_thread(|| {
        let (mut rig, clones) = (Rig::new("direct-adopted"), Clones::new());
        let mut random = StdRng::seed_from_u64(3);
        let places: Vec<u64> = (0..4).map(|line| rig.adopt(home_line(line), 50)).collect();
        for round in 0..300 {
            let line = random.random_range(0..4_usize);
            let page = random.random_range(2..8_u64);
            let length = if round % 3 == 0 { 4096 } else { random.random_range(1..=4096_u32) };
            let start = random.random_range(0..=4096 - u64::from(length));
            let (target, header) = rig.read_foreign(home_line(line as u64) + page, start, length);
            let code = Command::Read.code();
            if round % 2 == 0 {
                rig.assert_answered(&frame(Command::Read, target, &header, &[]));
            } else {
                // As long as no entry leads the pointer here.
                let endpoint = endpoint(target);
                rig.assert_answered(&frame_to(code | HOME, endpoint, target, &header, &[]));
            }
            if round % 7 == 0 {
                rig.arena.write(places[line] + page, random.random_range(0..4000), &[8, 7, 6]);
            }
        }
        for pages in 2..=6 {
            let (target, header) = rig.read_foreign(home_line(1) + 2, 0, pages << PAGE_SHIFT);
            let code = Command::Read.code() | HOME;
            let to = if pages % 2 == 0 { target } else { endpoint(target) };
            let read = frame_to(code, to, target, &header, &[]);
            let (action, last) = rig.run(&read);
            assert_eq!(action, REDIRECT, "{:?}", rig.memory.counters.counts());
            let mut answers = clones.collect(pages as usize - 1);
            answers.push(last);
            assert!(answers == rig.respond_all(&read), "{pages} pages");
        }
        assert_eq!(clones.take(), None, "nothing else was sent");
    });
}

#[test]
fn pages_of_other_servers_that_may_not_be_read_are_for_the_server() {
    let mut rig = Rig::new("direct-adopted-passed");
    let line = home_line(2);
    let place = rig.adopt(line, 60);
    for (page, what) in [(0, "free"), (1, "zeros over leftover"), (8, "of no line that is here")] {
        let read = rig.foreign_page(line + page);
        let (action, after) = rig.run(&read);
        assert!((action, after) == (NEXT, read), "{what}");
    }
    let counts = rig.memory.counters.counts();
    assert_eq!((counts.passed_page, counts.passed_count()), (2, 2), "not of others");
    // At another home, at another shard; of another colour, in another space.
    let (target, header) = rig.read_foreign(line + 3, 0, 64);
    let at = |change: fn(&mut Fields)| {
        let mut fields = Fields::unpack(target).expect("in the fabric");
        change(&mut fields);
        fields.to_ipv6()
    };
    for other in [
        at(|fields| fields.node.0 += 1),
        at(|fields| fields.location += 1 << SHARD_SHIFT),
        at(|fields| fields.location += 2 << SHARD_SHIFT),
    ] {
        let read = frame(Command::Read, other, &header, &[]);
        let (action, after) = rig.run(&read);
        assert!((action, after) == (NEXT, read), "{other}");
    }
    // The endpoint address of another shard, of another space, of another server, and with a tag.
    let of = |change: fn(&mut Fields)| {
        let mut fields = Fields::unpack(endpoint(target)).expect("in the fabric");
        change(&mut fields);
        fields.to_ipv6()
    };
    let code = Command::Read.code() | HOME;
    for to in [
        of(|fields| fields.location += 1 << SHARD_SHIFT),
        of(|fields| fields.space = OTHER),
        of(|fields| fields.tag = 1),
    ] {
        let form = |counts: &ReadCounts| counts.passed_form;
        rig.assert_passed(&frame_to(code, to, target, &header, &[]), form);
    }
    let to = of(|fields| fields.node.0 += 1);
    let read = frame_to(code, to, target, &header, &[]);
    let (action, after) = rig.run(&read);
    assert!((action, after) == (NEXT, read), "another server's");
    for other in [at(|fields| fields.tag += 1), at(|fields| fields.location += 1 << 48)] {
        rig.assert_passed(&frame(Command::Read, other, &header, &[]), PAGE_REASON);
    }
    let session = rig.open_as(OTHER, 4096);
    let in_other = Header { session, ..header };
    let other = at(|fields| fields.space = OTHER);
    let code = Command::Read.code();
    let read = frame_of(OTHER, CLIENT, code, (other, other), &in_other, &[]);
    rig.assert_passed(&read, PAGE_REASON);
    // A lease.
    let read = rig.foreign_page(line + 3);
    rig.arena.set_leased(place + 3, true);
    rig.assert_passed(&read, PAGE_REASON);
    rig.arena.set_leased(place + 3, false);
    rig.assert_answered(&read);
    // Freed.
    let read = rig.foreign_page(line + 4);
    rig.arena.free_part(place + 4..place + 5);
    rig.assert_passed(&read, PAGE_REASON);
}

#[test]
fn a_place_is_read_only_by_the_name_of_the_line_that_has_it() {
    let mut rig = Rig::new("direct-adopted-name");
    let [first, second] = [home_line(0), home_line(1)];
    let place = rig.adopt(first, 70);
    let read = rig.foreign_page(first + 3);
    rig.assert_answered(&read);
    // It goes to another server: the hint stays, but the mark is there.
    let number = u32::try_from(rig.arena.place_number(place)).expect("few");
    let stale = ForeignLine { home: HOME_NODE, first_page: first };
    rig.arena.give(place);
    let read = rig.foreign_page(first + 3);
    rig.assert_passed(&read, PAGE_REASON);
    // Its place is that of another line, whose pages have the same colour.
    rig.arena.clear_given(place..place + LINE_PAGES as u64);
    assert_eq!(rig.adopt(second, 80), place);
    let read = rig.foreign_page(first + 3);
    let (action, after) = rig.run(&read);
    assert!((action, after) == (NEXT, read), "the hint is away");
    rig.memory.hints.set(stale, number);
    let read = rig.foreign_page(first + 3);
    rig.assert_passed(&read, PAGE_REASON);
    let read = rig.foreign_page(second + 3);
    rig.assert_answered(&read);
    // A hint to a place that there is not.
    for nowhere in [number + 1, 1 << 20, u32::MAX] {
        rig.memory.hints.set(stale, nowhere);
        let read = rig.foreign_page(first + 3);
        let (action, after) = rig.run(&read);
        assert!((action, after.as_slice()) == (NEXT, &read), "{nowhere}");
    }
}

/// A line leaves, another one gets its place, and it comes back, all the time: its READs never return the other's bytes, nor
/// of two times.
#[test]
fn lines_that_change_places_all_the_time_are_never_mixed_up() {
    let mut rig = Rig::new("direct-adopted-torn");
    let line = home_line(0);
    let place = rig.adopt(line, 2);
    let number = u32::try_from(rig.arena.place_number(place)).expect("few");
    let read = rig.foreign_page(line + 3);
    let Rig { mut arena, mut program, mut memory, .. } = rig;
    let stop = AtomicBool::new(false);
    let (mut answered, mut passed) = (0_u32, 0_u32);
    let moves = thread::scope(|scope| {
        let mover = scope.spawn(|| {
            let mut moves = 0_u64;
            while !stop.load(Ordering::Relaxed) {
                moves += 1;
                arena.give(place);
                arena.clear_given(place..place + LINE_PAGES as u64);
                // Bytes of the line are even, those of the other one odd.
                let is_other = !moves.is_multiple_of(2);
                let byte = moves.to_le_bytes()[0];
                let name = home(if is_other { home_line(1) } else { line });
                let (mut pages, bytes) = line_of(byte, SPACE);
                pages.iter_mut().for_each(|page| page.version = 10 + moves);
                assert_eq!(arena.lines_mut().reserve(1).expect("room")[0].start, place);
                arena.stage_with(place, (name, TAKEN), &pages, &bytes).expect("it is good");
                arena.adopt(place);
                (0..moves % 2000).for_each(|_| hint::spin_loop());
            }
            moves
        });
        // Also if an assertion fails: the scope waits for the mover.
        let end = Stop(&stop);
        let began = Instant::now();
        let mut out = vec![0; 10_000];
        while is_worth_it(began, answered > 100 && passed > 100) {
            memory.hints.set(ForeignLine { home: HOME_NODE, first_page: line }, number);
            let options = TestRunOptions {
                data_in: Some(&read),
                data_out: Some(&mut out),
                ..TestRunOptions::new()
            };
            let program = classifier(&mut program).expect("it is there");
            let result = program.test_run(options).expect("it runs");
            let after = &out[..result.data_size_out as usize];
            if result.return_value == NEXT {
                passed += 1;
                continue;
            }
            answered += 1;
            let (source, destination, payload) = parts(after);
            let data = Datagram::parse(source, destination, payload).map(|it| it.data.to_vec());
            let is_good = data.as_ref().is_ok_and(|data| {
                data[0] == 3
                    && data[1].is_multiple_of(2)
                    && data[1..].iter().all(|it| *it == data[1])
            });
            assert!(is_good, "{data:?}");
        }
        drop(end);
        mover.join().expect("it moves")
    });
    println!("{moves} moves, {answered} answered, {passed} passed on");
    assert!(answered > 100 && passed > 100, "the mover was beside the reader");
}
