//! Lines move between two arenas: compared with a model, and one fact after the other.

#![allow(clippy::cast_possible_truncation, reason = "the numbers of these tests are small")]
#![allow(clippy::single_range_in_vec_init, reason = "a list of one range is meant")]

use std::collections::{HashMap, HashSet};

use bluebridge_protocol::store::{
    Allowance, HomeLine, Line, LineStore as _, Placed, StageError, Taken,
};
use bluebridge_wire::{
    LinePage, NodeId, Tag,
    address::LINE_BYTES,
    header::LEASE_EPOCH_MAX,
    line::{LineRecord, PageContents, Part},
    page_crc,
};
use proptest::prelude::*;

use super::*;
use crate::kept::{
    PageRecord,
    lines::{LineEntry, NO_FRAME},
};

const SPACE: Space = Space(7);
const NODES: [NodeId; 2] = [NodeId(9), NodeId(30)];
const LINE: u64 = LINE_PAGES as u64;
const TAKEN: Taken = Taken { migration: 4, epoch: 77 };

fn line_of(first_page: u64) -> Range<u64> {
    first_page..first_page + LINE
}

fn home_line(home: usize, first_page: u64) -> HomeLine {
    HomeLine { node: NODES[home], generation: ArenaGeneration::default(), first_page }
}

fn access(grant: Grant, page: u64) -> Access {
    let offset = page << PAGE_SHIFT;
    let location = Location::new(grant.location.generation(), offset).unwrap();
    Access { location, length_bytes: PAGE_BYTES as u64, tag: grant.tag, space: SPACE }
}

/// What a page reads as: its first bytes, and the others.
const HEAD_BYTES: usize = 100;

fn page_bytes([head, rest]: [u8; 2]) -> Vec<u8> {
    let mut bytes = vec![rest; PAGE_BYTES];
    bytes[..HEAD_BYTES].fill(head);
    bytes
}

/// The record and the bytes of a line, as a taker gets them.
fn taken_from(arena: &Arena, first_page: u64) -> (LineRecord, Vec<u8>) {
    let Line { pages, .. } = arena.line(first_page).expect("it is whole");
    let mut bytes = vec![0xee; LINE_BYTES];
    for (at, page) in (0..).zip(&pages) {
        // What is not written is not read.
        if page.part != Part::Free && page.contents == PageContents::Written {
            let number = first_page + at as u64;
            let place = at * PAGE_BYTES..(at + 1) * PAGE_BYTES;
            bytes[place].copy_from_slice(arena.read(number, 0..PAGE_BYTES));
        }
    }
    (pages, bytes)
}

impl Arena {
    fn frames(&self) -> Vec<Option<usize>> {
        (0..self.pages.sizes().lines()).map(|line| self.pages.frame(line)).collect()
    }

    /// The first page of the place with a number.
    fn place_page(&self, number: u64) -> u64 {
        self.first_page + ADOPTED_PAGES_FROM + number * LINE
    }

    /// Lines that could be lent: no page of them is in use, in any way.
    fn idle_lines(&self) -> usize {
        let is_idle = |line: &usize| {
            let pages = frames::pages_of(*line);
            let range = narrow(pages.start)..narrow(pages.end);
            let is_withheld = |page: u32| self.withheld.iter().any(|range| range.contains(&page));
            let is_retired = |page: u32| {
                let retired = self.retired.iter().skip(self.renewed_count);
                retired.into_iter().any(|it| (it.start..it.start + it.pages).contains(&page))
            };
            let is_whole =
                self.pages.frame(*line).is_some_and(|at| at < self.pages.sizes().frames());
            is_whole
                && pages.clone().all(|page| self.may_be_free(page))
                && range.clone().all(|page| !is_withheld(page) && !is_retired(page))
        };
        (0..self.pages.sizes().own_lines).filter(is_idle).count()
    }
}

struct Allocation {
    home: usize,
    grant: Grant,
    pages: u32,
    contents: Vec<[u8; 2]>,
}

impl Allocation {
    fn range(&self) -> Range<u64> {
        let first = self.grant.location.page();
        first..first + u64::from(self.pages)
    }
}

/// A line on its way.
struct Way {
    home: usize,
    line: u64,
    to: usize,
    place: u64,
    is_staged: bool,
}

/// A line that was given, and not cleared.
struct Given {
    from: usize,
    place: u64,
}

/// Two servers, and what they must have.
struct World {
    arenas: [Arena; 2],
    allocations: Vec<Allocation>,
    /// Who serves a home's line, and where it is there; absent: the home.
    away: HashMap<(usize, u64), (usize, u64)>,
    ways: Vec<Way>,
    given: Vec<Given>,
    /// The greatest version of a page, whoever served it.
    versions: HashMap<(usize, u64), u64>,
    colours: HashSet<(usize, u64, u16, u8)>,
    moves: usize,
}

impl World {
    fn new(pages: [u32; 2], last_tag: u8) -> Self {
        let config = ArenaConfig {
            last_generation: ArenaGeneration::new(2).unwrap(),
            last_tag,
            ..ArenaConfig::default()
        };
        let arenas = pages.map(|pages| {
            let mut arena = Arena::on_heap(&config, pages);
            arena.set_reserving(false);
            arena
        });
        Self {
            arenas,
            allocations: Vec::new(),
            away: HashMap::new(),
            ways: Vec::new(),
            given: Vec::new(),
            versions: HashMap::new(),
            colours: HashSet::new(),
            moves: 0,
        }
    }

    /// Who serves a page, and its number there.
    fn server(&self, home: usize, page: u64) -> (usize, u64) {
        let line = page - page % LINE;
        let (server, place) = self.away.get(&(home, line)).copied().unwrap_or((home, line));
        (server, place + page % LINE)
    }

    fn is_on_its_way(&self, home: usize, line: u64) -> bool {
        self.ways.iter().any(|way| (way.home, way.line) == (home, line))
    }

    fn is_still(&self, allocation: &Allocation) -> bool {
        let home = allocation.home;
        let lines = allocation.range().map(|page| page - page % LINE);
        lines.into_iter().all(|line| !self.is_on_its_way(home, line))
    }

    fn is_at_home(&self, allocation: &Allocation) -> bool {
        allocation.range().all(|page| self.server(allocation.home, page).0 == allocation.home)
    }

    fn create(&mut self, home: usize, pages: u32) -> bool {
        let free = self.arenas[home].arena_usage().free_pages;
        let Ok(grant) = self.arenas[home].create(SPACE, pages) else {
            // A page that is counted as free, and that no migration withholds, can be allocated.
            assert!(
                free == 0 || pages > 1 || !self.arenas[home].withheld.is_empty(),
                "{free} free"
            );
            return false;
        };
        self.arenas[home].complete(grant.location);
        let creator = Creator { node: NodeId(50), incarnation: pages };
        self.arenas[home].note_creator(grant.location, creator);
        let allocation = Allocation { home, grant, pages, contents: vec![[0; 2]; pages as usize] };
        for page in allocation.range() {
            let colour = (home, page, grant.location.generation().number(), grant.tag.0);
            assert!(self.colours.insert(colour), "{colour:?} was given out twice");
            let other = self
                .allocations
                .iter()
                .find(|other| other.home == home && other.range().contains(&page));
            assert!(other.is_none(), "page {page} was given out twice");
            assert_eq!(self.server(home, page), (home, page), "it is not here");
            assert!(!self.is_on_its_way(home, page - page % LINE), "it is on its way");
        }
        self.allocations.push(allocation);
        true
    }

    fn delete(&mut self, which: usize) {
        let allocation = &self.allocations[which];
        if !self.is_still(allocation) || !self.is_at_home(allocation) {
            return;
        }
        let Allocation { home, grant, pages, .. } = self.allocations.swap_remove(which);
        let access = access(grant, grant.location.page());
        let access = Access { length_bytes: 1, ..access };
        assert_eq!(self.arenas[home].delete(access, pages), Ok(pages));
        assert!(self.arenas[home].check(access).is_err());
    }

    fn write(&mut self, which: usize, page: usize, stamp: u8) {
        let allocation = &self.allocations[which];
        if !self.is_still(allocation) {
            return;
        }
        let page = page % allocation.pages as usize;
        let home = allocation.home;
        let number = allocation.range().start + page as u64;
        let (server, local) = self.server(home, number);
        let arena = &mut self.arenas[server];
        let before = arena.version(local);
        let contents = &mut self.allocations[which].contents[page];
        match stamp % 4 {
            0 => {
                arena.write(local, 0, &[stamp; HEAD_BYTES]);
                contents[0] = stamp;
            }
            1 => {
                arena.zero(local, HEAD_BYTES..PAGE_BYTES);
                contents[1] = 0;
            }
            2 => {
                arena.write_together(&[PageWrite {
                    page: local,
                    start: 0,
                    data: &[stamp; PAGE_BYTES],
                }]);
                *contents = [stamp; 2];
            }
            _ => {
                arena.write(local, HEAD_BYTES, &[stamp; PAGE_BYTES - HEAD_BYTES]);
                contents[1] = stamp;
            }
        }
        assert!(arena.version(local) > before);
        assert!(arena.read(local, 0..PAGE_BYTES) == page_bytes(*contents), "page {number}");
    }

    /// Takes a line on its way to the other server; false if there is no room.
    fn begin(&mut self, home: usize, line: u64) -> bool {
        let (from, local) = self.server(home, line);
        let to = 1 - from;
        // The next migration begins when the last one is closed, and its memory free.
        let is_uncleared = self.given.iter().any(|given| {
            (given.from, given.place) == (from, local)
                || (given.from == home && given.place == line)
        });
        let is_whole = self.arenas[from].line(local).is_some();
        if !is_whole || self.is_on_its_way(home, line) || is_uncleared {
            return true;
        }
        self.arenas[from].withhold(line_of(local), true);
        let arena = &mut self.arenas[to];
        let frames = arena.frames();
        let (usage, withheld) = (arena.arena_usage(), u64::from(arena.withheld_pages));
        let spare = arena.places.spare_frames() as usize;
        let has_memory = spare + arena.idle_lines() > 0;
        let has_place = arena.places.free_places() > 0;
        let place = if to == home {
            arena.reserve_own(line_of(line)).then_some(line)
        } else {
            let ranges = arena.lines_mut().reserve(1);
            assert_eq!(ranges.is_some(), has_memory && has_place);
            ranges.map(|ranges| {
                assert_eq!(ranges.len(), 1);
                assert_eq!(ranges[0].end - ranges[0].start, LINE);
                ranges[0].start
            })
        };
        // Lines of others without any allocated page have places, and no memory.
        let is_possible = has_memory && (to == home || has_place);
        assert_eq!(place.is_some(), is_possible, "{spare} frames are spare");
        let Some(place) = place else {
            assert_eq!(arena.frames(), frames, "nothing was reserved");
            let after = arena.arena_usage();
            assert_eq!(after.used_pages, usage.used_pages);
            // Pages that leave the quarantine may be withheld.
            let unused = after.free_pages + u64::from(arena.withheld_pages);
            assert_eq!(unused, usage.free_pages + withheld);
            self.arenas[from].withhold(line_of(local), false);
            return false;
        };
        let is_used = self.away.values().any(|at| *at == (to, place))
            || self.ways.iter().any(|way| (way.to, way.place) == (to, place))
            || self.given.iter().any(|given| (given.from, given.place) == (to, place));
        assert!(!is_used, "the place is used");
        self.ways.push(Way { home, line, to, place, is_staged: false });
        true
    }

    fn stage(&mut self, which: usize) {
        let Way { home, line, to, place, .. } = self.ways[which];
        let (from, local) = self.server(home, line);
        let (pages, bytes) = taken_from(&self.arenas[from], local);
        let name = (home_line(home, line), TAKEN);
        let staged = self.arenas[to].stage_with(place, name, &pages, &bytes);
        assert_eq!(staged, Ok(()));
        self.ways[which].is_staged = true;
    }

    fn drop_staged(&mut self, which: usize) {
        let Way { to, place, .. } = self.ways[which];
        self.arenas[to].drop_staged(place);
        self.ways[which].is_staged = false;
    }

    /// The giver sets the mark, and the taker serves the line.
    fn adopt(&mut self, which: usize) {
        let Way { home, line, to, place, .. } = self.ways.swap_remove(which);
        let (from, local) = self.server(home, line);
        self.arenas[from].give(local);
        self.arenas[to].adopt(place);
        // It is adopted, so this changes nothing.
        self.arenas[to].release(line_of(place));
        self.given.push(Given { from, place: local });
        if to == home {
            self.away.remove(&(home, line));
        } else {
            self.away.insert((home, line), (to, place));
        }
        self.moves += 1;
    }

    fn cancel(&mut self, which: usize) {
        let Way { home, line, to, place, is_staged } = self.ways.swap_remove(which);
        let (from, local) = self.server(home, line);
        if is_staged {
            // Not while it is in doubt.
            let frames = self.arenas[to].frames();
            self.arenas[to].release(line_of(place));
            assert_eq!(self.arenas[to].frames(), frames);
            self.arenas[to].drop_staged(place);
        }
        self.arenas[to].release(line_of(place));
        self.arenas[from].withhold(line_of(local), false);
    }

    fn clear(&mut self, which: usize) {
        let Given { from, place } = self.given.swap_remove(which);
        self.arenas[from].clear_given(line_of(place));
    }

    /// Pages of memory that a server uses.
    fn used(&self, server: usize) -> u64 {
        let allocated_at = |home: usize, line: u64| {
            let pages = self.allocations.iter().filter(|it| it.home == home);
            pages.flat_map(Allocation::range).filter(|page| page - page % LINE == line).count()
        };
        let allocated = |line: u64| allocated_at(server, line);
        let arena = &self.arenas[server];
        let own_lines = arena.pages.sizes().own_lines as u64;
        let own: usize = (0..own_lines)
            .map(|line| line * LINE)
            .filter(|line| {
                let is_uncleared =
                    self.given.iter().any(|given| (given.from, given.place) == (server, *line));
                self.server(server, *line).0 == server || is_uncleared
            })
            .map(allocated)
            .sum();
        let ways = self.ways.iter().filter(|way| way.to == server).count();
        // Those of which no page is allocated have given their memory back.
        let has_pages = |(home, line): &(usize, u64)| allocated_at(*home, *line) > 0;
        let here = self.away.iter().filter(|(_, (at, _))| *at == server);
        let adopted = here.filter(|(name, _)| has_pages(name)).count();
        let has_memory = |place: u64| {
            let number = arena.index(place).expect("it is its place");
            arena.pages.frame(number / LINE_PAGES).is_some()
        };
        let uncleared = self.given.iter().filter(|given| {
            given.from == server && given.place >= ADOPTED_PAGES_FROM && has_memory(given.place)
        });
        (own + (ways + adopted + uncleared.count()) * LINE_PAGES) as u64
    }

    fn check(&mut self, is_thorough: bool) {
        for (server, arena) in self.arenas.iter().enumerate() {
            let frames: Vec<_> = arena.frames().into_iter().flatten().collect();
            let different: HashSet<_> = frames.iter().collect();
            assert_eq!(different.len(), frames.len(), "a frame has two lines");
            assert_eq!(arena.pages.check_lines(), Ok(()));
            let usage = arena.arena_usage();
            let sum = usage.used_pages + usage.free_pages + usage.retired_pages;
            let sum = sum + u64::from(arena.withheld_pages) + arena.unreachable_pages();
            assert_eq!(sum, usage.capacity_pages);
            assert_eq!(usage.used_pages, self.used(server), "server {server}");
        }
        for allocation in &self.allocations {
            let home = allocation.home;
            for (page, contents) in allocation.range().zip(&allocation.contents) {
                let (server, local) = self.server(home, page);
                let arena = &self.arenas[server];
                assert_eq!(arena.check(access(allocation.grant, local)), Ok(()), "page {page}");
                let bytes = arena.read(local, 0..PAGE_BYTES);
                let some = [0, HEAD_BYTES - 1, HEAD_BYTES, PAGE_BYTES - 1].map(|at| bytes[at]);
                let [head, rest] = *contents;
                assert_eq!(some, [head, head, rest, rest], "page {page} of {home} at {server}");
                assert!(!is_thorough || bytes == page_bytes(*contents), "page {page}");
            }
        }
        // Also of free pages: the versions of what is allocated there next go on.
        for home in 0..2 {
            for page in 0..self.arenas[home].pages.own().len() as u64 {
                let (server, local) = self.server(home, page);
                let version = self.arenas[server].version(local);
                let known = self.versions.entry((home, page)).or_default();
                assert!(version >= *known, "page {page} of {home}: {version} after {known}");
                *known = version;
            }
        }
    }

    fn step(&mut self, (choice, first, second): (u8, u32, u8)) {
        let which = |count: usize| first as usize % count.max(1);
        let home = usize::from(second % 2);
        match choice {
            0..6 => {
                self.create(home, 1 + first % 12);
            }
            6..11 if !self.allocations.is_empty() => self.delete(which(self.allocations.len())),
            11..18 if !self.allocations.is_empty() => {
                let count = self.allocations.len();
                self.write(which(count), first as usize / count, second);
            }
            18..22 => {
                let lines = self.arenas[home].pages.sizes().own_lines;
                self.begin(home, which(lines) as u64 * LINE);
            }
            22..25 => {
                // One that is away comes back.
                let mut away: Vec<_> = self.away.keys().copied().collect();
                away.sort_unstable();
                if let Some(&(home, line)) = away.get(which(away.len())) {
                    self.begin(home, line);
                }
            }
            25..31 if !self.ways.is_empty() => {
                let way = which(self.ways.len());
                if self.ways[way].is_staged { self.adopt(way) } else { self.stage(way) }
            }
            31 if !self.ways.is_empty() => {
                let way = which(self.ways.len());
                self.drop_staged(way);
            }
            32 if !self.ways.is_empty() => self.cancel(which(self.ways.len())),
            33..36 if !self.given.is_empty() => self.clear(which(self.given.len())),
            36 => {
                self.arenas[home].tidy(first % 20);
            }
            _ => {}
        }
    }

    /// Ends all migrations.
    fn settle(&mut self) {
        (0..self.ways.len()).rev().for_each(|way| self.cancel(way));
        (0..self.given.len()).rev().for_each(|given| self.clear(given));
        for arena in &self.arenas {
            assert_eq!((arena.withheld_pages, arena.places.promised()), (0, 0));
            assert!(arena.withheld.is_empty());
        }
    }

    /// Everything that is counted as free can be allocated, page by page.
    fn check_free(&mut self) {
        for home in 0..2 {
            let free = self.arenas[home].arena_usage().free_pages;
            let before = self.allocations.len();
            while self.create(home, 1) {}
            assert_eq!((self.allocations.len() - before) as u64, free);
            (before..self.allocations.len()).rev().for_each(|which| self.delete(which));
        }
    }

    /// Lines go home as long as there is memory for any; returns whether all are there.
    fn go_home(&mut self) -> bool {
        let mut away: Vec<_> = self.away.keys().copied().collect();
        away.sort_unstable();
        let mut is_going = true;
        while is_going {
            is_going = false;
            away.retain(|(home, line)| {
                if !self.begin(*home, *line) {
                    return true;
                }
                is_going = true;
                self.stage(0);
                self.adopt(0);
                self.clear(0);
                self.check(true);
                false
            });
        }
        away.is_empty()
    }
}

fn run(pages: [u32; 2], last_tag: u8, steps: &[(u8, u32, u8)]) {
    let mut world = World::new(pages, last_tag);
    for step in steps {
        world.step(*step);
        world.check(false);
    }
    world.settle();
    world.check(true);
    world.check_free();
    let is_all = world.go_home();
    (0..world.allocations.len()).rev().for_each(|which| world.delete(which));
    world.check(true);
    if is_all {
        for arena in &world.arenas {
            let ArenaUsage { used_pages, free_pages, retired_pages, capacity_pages, .. } =
                arena.arena_usage();
            assert_eq!((used_pages, free_pages + retired_pages), (0, capacity_pages));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn two_arenas_agree_with_a_model(
        pages in [8_u32..60, 8_u32..60],
        last_tag in prop_oneof![Just(4_u8), Just(9), Just(255)],
        steps in prop::collection::vec((0_u8..37, any::<u32>(), any::<u8>()), 300),
    ) {
        run(pages, last_tag, &steps);
    }
}

impl World {
    /// Moves a line to the other server.
    fn move_line(&mut self, home: usize, line: u64) {
        assert!(self.begin(home, line), "there is room");
        self.stage(self.ways.len() - 1);
        self.adopt(self.ways.len() - 1);
        self.clear(self.given.len() - 1);
        self.check(true);
    }
}

#[test]
fn own_lines_beyond_the_memory_are_used_when_others_moved_away() {
    let mut world = World::new([16, 16], 255);
    assert!(world.create(0, 16));
    (0..16).for_each(|page| world.write(0, page, 2));
    assert!(!world.create(0, 1));
    world.move_line(0, 0);
    world.move_line(0, 8);
    assert_eq!(world.arenas[1].arena_usage().used_pages, 16);
    assert!(!world.create(1, 1), "its memory is lent");
    // As one extent, although its memory is that of two lines.
    assert!(world.create(0, 16));
    assert_eq!(world.allocations[1].range(), 16..32);
    (0..16).for_each(|page| world.write(1, page, 6));
    world.check(true);
    assert!(!world.begin(0, 0), "there is no memory for it");
    world.delete(1);
    world.move_line(0, 0);
    world.move_line(0, 8);
    assert_eq!(world.arenas[1].arena_usage().free_pages, 16);
    assert!(world.create(1, 16), "it has its memory back");
    world.delete(0);
    world.check_free();
}

#[test]
fn memory_for_which_no_own_address_is_left_is_not_free() {
    let mut world = World::new([16, 64], 255);
    for lines in [[0, 8], [16, 24]] {
        assert!(world.create(0, 16));
        lines.into_iter().for_each(|line| world.move_line(0, line));
    }
    let usage = world.arenas[0].arena_usage();
    assert_eq!((usage.free_pages, usage.used_pages), (0, 0));
    assert_eq!(world.arenas[0].usage(SPACE).free_pages, 0);
    assert_eq!(world.arenas[0].create(SPACE, 1), Err(Status::OutOfMemory));
    // Lines of others can have it.
    assert!(world.create(1, 16));
    world.move_line(1, 0);
    world.move_line(1, 8);
    assert_eq!(world.arenas[0].arena_usage().used_pages, 16);
    assert!(!world.begin(0, 24));
    world.move_line(1, 0);
    world.move_line(0, 24);
    world.move_line(1, 8);
    world.move_line(0, 8);
    assert!(!world.begin(0, 0), "its memory is used");
}

#[test]
fn places_are_no_own_addresses() {
    let mut world = World::new([16, 16], 255);
    assert!(world.create(1, 8));
    let grant = world.allocations[0].grant;
    let arena = &world.arenas[0];
    let own_pages = arena.pages.sizes().own_pages() as u64;
    assert_eq!(own_pages, 32);
    for page in [16, 31, 32, 47, ADOPTED_PAGES_FROM - 1, arena.place_page(0), arena.place_page(2)] {
        assert_eq!(arena.check(access(grant, page)), Err(Status::OutOfRange), "page {page}");
    }
    world.move_line(1, 0);
    let arena = &world.arenas[0];
    assert_eq!(arena.check(access(grant, arena.place_page(0))), Ok(()));
    let other = Grant { tag: Tag(grant.tag.0 + 1), ..grant };
    assert_eq!(arena.check(access(other, arena.place_page(0))), Err(Status::StaleTag));
    for page in [32, 33, ADOPTED_PAGES_FROM - 1, arena.place_page(1), arena.place_page(2)] {
        assert_eq!(arena.check(access(grant, page)), Err(Status::OutOfRange), "page {page}");
    }
    // The home has no memory for it any more.
    assert_eq!(world.arenas[1].check(access(grant, 0)), Err(Status::OutOfRange));
}

/// Its other pages are at the home, or anywhere.
#[test]
fn an_allocation_of_another_server_is_not_freed_at_its_place() {
    let mut world = World::new([16, 16], 255);
    assert!(world.create(1, 16));
    let grant = world.allocations[0].grant;
    world.move_line(1, 0);
    let at = Access { length_bytes: 1, ..access(grant, world.arenas[0].place_page(0)) };
    for pages in [0, 16] {
        assert_eq!(world.arenas[0].allocation(at, pages), Err(Status::NoAuthority));
        assert_eq!(world.arenas[0].delete(at, pages), Err(Status::NoAuthority));
    }
    world.check(true);
}

#[test]
fn direct_readers_do_not_answer_for_pages_in_other_frames() {
    let mut world = World::new([16, 16], 255);
    assert!(world.create(0, 8));
    let arena = &mut world.arenas[0];
    let marks = |arena: &Arena, page| arena.record(page).marks;
    assert_eq!(marks(arena, 0), 0);
    arena.set_leased(0, true);
    assert_eq!(marks(arena, 0), PageRecord::LEASED);
    arena.set_leased(0, false);
    let before = arena.record(0);
    world.move_line(0, 0);
    let after = world.arenas[0].record(0);
    assert!(after.sequence > before.sequence && after.sequence.is_multiple_of(2));
    assert_eq!(after.marks, PageRecord::ELSEWHERE);
    // Line 1 has its own frame, line 2 that of line 0.
    assert!(world.create(0, 16));
    let arena = &mut world.arenas[0];
    assert_eq!(arena.pages.frame(2), Some(0));
    assert_eq!([8, 15].map(|page| marks(arena, page)), [0; 2]);
    assert_eq!([16, 23].map(|page| marks(arena, page)), [PageRecord::ELSEWHERE; 2]);
    arena.set_leased(16, true);
    assert_eq!(marks(arena, 16), PageRecord::LEASED | PageRecord::ELSEWHERE);
    arena.set_leased(16, false);
    assert_eq!(marks(arena, 16), PageRecord::ELSEWHERE);
    // Those of another server's line say themselves where they are.
    let place = world.arenas[1].place_page(0);
    let arena = &mut world.arenas[1];
    assert_eq!(marks(arena, place), 0);
    arena.set_leased(place, true);
    assert_eq!(marks(arena, place), PageRecord::LEASED);
    arena.set_leased(place, false);
    assert_eq!(marks(arena, place), 0);
    // At home again, in its own frame, which is not the one that became spare last.
    world.delete(1);
    world.move_line(0, 0);
    let arena = &world.arenas[0];
    assert_eq!((arena.pages.frame(0), marks(arena, 0)), (Some(0), 0));
    assert!(arena.version(0) > before.version());
}

/// Not even while the memory of the line's number is the line's: the giver has it until the migration is closed, and gets
/// it back before it serves the line again.
#[test]
fn direct_readers_answer_nothing_for_a_line_that_is_elsewhere() {
    let mut world = World::new([24, 8], 255);
    assert!(world.create(0, 24));
    let arena = &mut world.arenas[0];
    let marks = |arena: &Arena| [0, 8, 15, 16].map(|page| arena.record(page).marks);
    let elsewhere = [0, PageRecord::ELSEWHERE, PageRecord::ELSEWHERE, 0];
    for page in 8..16 {
        arena.set_leased(page, true);
    }
    arena.lines_mut().withhold(8..16, true);
    arena.give(8);
    assert_eq!(marks(arena), elsewhere, "before its lease ends");
    for page in 8..16 {
        arena.set_leased(page, false);
    }
    assert_eq!((arena.pages.frame(1), marks(arena)), (Some(1), elsewhere));
    let (line, bytes) = taken_from(arena, 8);
    arena.clear_given(8..16);
    assert_eq!((arena.pages.frame(1), marks(arena)), (None, elsewhere));
    for is_adopted in [false, true] {
        assert!(arena.reserve_own(8..16));
        arena.stage_with(8, (home_line(0, 8), TAKEN), &line, &bytes).unwrap();
        assert_eq!((arena.pages.frame(1), marks(arena)), (Some(1), elsewhere), "staged");
        if is_adopted {
            arena.adopt(8);
            assert_eq!((arena.pages.frame(1), marks(arena)), (Some(1), [0; 4]));
        } else {
            arena.drop_staged(8);
            arena.release(8..16);
            assert_eq!((arena.pages.frame(1), marks(arena)), (None, elsewhere));
        }
    }
}

/// Otherwise the lines that come back would displace each other.
#[test]
fn the_memory_of_lines_that_are_elsewhere_is_used_last() {
    let mut world = World::new([32, 32], 255);
    assert!(world.create(0, 16) && world.create(1, 16));
    world.move_line(0, 0);
    let place = |world: &World, page: u64| world.away[&(1, page)].1;
    let frame = |world: &World, page: u64| {
        let arena = &world.arenas[0];
        arena.pages.frame(arena.index(page).unwrap() / LINE_PAGES)
    };
    // Lines 2 and 3 have memory that they do not need, and so has line 0.
    for (page, expected) in [(0, 3), (8, 2)] {
        world.move_line(1, page);
        assert_eq!(frame(&world, place(&world, page)), Some(expected));
    }
    world.move_line(0, 0);
    assert_eq!(frame(&world, 0), Some(0));
}

#[test]
fn a_line_that_is_not_whole_stays() {
    let mut world = World::new([13, 24], 255);
    assert!(world.create(0, 13));
    (0..13).for_each(|page| world.write(0, page, 2));
    assert_eq!(world.arenas[0].line(8), None);
    world.move_line(0, 0);
    let arena = &world.arenas[0];
    assert_eq!(arena.frames()[..3], [None, Some(1), None]);
    assert_eq!(arena.line(8), None);
    assert!(!world.create(0, 9));
    assert!(world.create(0, 8));
    world.delete(1);
    // A part of a line is no memory for another line.
    assert!(world.create(1, 16));
    world.move_line(1, 8);
    assert!(!world.begin(1, 0));
    world.check(true);
}

#[test]
fn lines_that_cannot_be_are_not_staged() {
    let mut world = World::new([32, 32], 255);
    assert!(world.create(0, 11));
    world.write(0, 0, 2);
    let (pages, bytes) = taken_from(&world.arenas[0], 0);
    let name = (home_line(0, 0), TAKEN);
    let arena = &mut world.arenas[1];
    let places = arena.lines_mut().reserve(2).unwrap();
    let place = places[0].start;
    let stage =
        |arena: &mut Arena, page, pages: &LineRecord| arena.stage_with(page, name, pages, &bytes);
    for page in [0, 8, 64, place + 1, place + 2 * LINE, ADOPTED_PAGES_FROM + 32, u64::MAX] {
        assert_eq!(stage(arena, page, &pages), Err(StageError::NoPlace), "{page}");
    }
    let mut bad = pages;
    bad[5].version = Pages::VERSION_MAX + 1;
    assert_eq!(stage(arena, place, &bad), Err(StageError::Page(5)));
    let of_no_lease = Taken { epoch: LEASE_EPOCH_MAX + 1, ..TAKEN };
    let staged = arena.stage_with(place, (name.0, of_no_lease), &pages, &bytes);
    assert_eq!(staged, Err(StageError::Epoch));
    let spare = arena.places.spare_frames();
    assert_eq!((arena.places.promised(), arena.pages.frame(8).is_some()), (1, true), "its memory");
    bad[5].version = Pages::VERSION_MAX;
    let other = place + LINE;
    assert_eq!(stage(arena, other, &bad), Ok(()));
    assert_eq!(arena.version(other + 5), Pages::VERSION_MAX);
    assert_eq!(arena.memory(other), None, "what is staged is not written to");
    arena.drop_staged(other);
    assert!(arena.memory(other).is_some());
    arena.release(place..place + 2 * LINE);
    assert_eq!(arena.memory(place), None);
    assert_eq!(arena.places.spare_frames(), spare + 2);
    // An own line, with what it had: a head, bodies, and free pages.
    world.move_line(0, 8);
    let (pages, bytes) = taken_from(&world.arenas[1], world.away[&(0, 8)].1);
    let arena = &mut world.arenas[0];
    assert!(arena.reserve_own(8..16));
    let name = (home_line(0, 8), TAKEN);
    type Change = (usize, fn(&mut LinePage));
    let changes: [Change; 6] = [
        (0, |page| page.colour = Some((ArenaGeneration::default(), Tag(200)))),
        (1, |page| page.space = Space(8)),
        (2, |page| page.part = Part::Further { distance: 11 }),
        (0, |page| page.part = Part::First { pages: 3 }),
        (4, |page| page.part = Part::First { pages: 1 }),
        (7, |page| page.colour = Some((ArenaGeneration::default(), Tag(1)))),
    ];
    for (at, change) in changes {
        let mut bad = pages;
        change(&mut bad[at]);
        let staged = arena.stage_with(8, name, &bad, &bytes);
        assert_eq!(staged, Err(StageError::Contradiction(at)));
        assert_eq!(arena.pages.entry(1).state, LineEntry::GIVEN);
    }
    // Who frees a page frees all of its allocation.
    let mut freed = pages;
    freed[2].part = Part::Free;
    let staged = arena.stage_with(8, name, &freed, &bytes);
    assert_eq!(staged, Err(StageError::FreedElsewhere(2)));
    assert_eq!(arena.stage_with(8, name, &pages, &bytes), Ok(()));
}

#[test]
fn what_cannot_be_reserved_as_a_whole_is_not_reserved() {
    let mut world = World::new([32, 64], 255);
    assert!(world.create(0, 32));
    let arena = &mut world.arenas[0];
    for (pages, why) in [
        (0..8, "it is here"),
        (32..40, "it is here without memory"),
        (1..9, "it is no line"),
        (56..72, "there is no second line"),
    ] {
        assert!(!arena.reserve_own(pages), "{why}");
    }
    arena.withhold(0..32, true);
    arena.give(0);
    assert!(!arena.reserve_own(0..8), "it is not cleared");
    assert!(!arena.reserve_own(0..16), "only one is given");
    arena.give(8);
    arena.clear_given(0..16);
    assert_eq!(arena.arena_usage().free_pages, 16);
    assert!(!arena.reserve_own(0..24), "one is here");
    assert!(arena.reserve_own(0..8));
    assert!(!arena.reserve_own(0..16), "one is reserved");
    assert_eq!(arena.arena_usage().free_pages, 8);
    assert!(arena.reserve_own(8..16));
    assert_eq!(arena.arena_usage().free_pages, 0);
    assert_eq!(arena.lines_mut().reserve(1), None);
    arena.release(0..16);
    arena.release(0..16);
    assert_eq!((arena.places.promised(), arena.arena_usage().free_pages), (0, 16));
    assert_eq!(arena.lines_mut().reserve(3), None);
    assert_eq!(arena.places.promised(), 0);
    let ranges = arena.lines_mut().reserve(2).unwrap();
    assert_eq!(ranges, [ADOPTED_PAGES_FROM..ADOPTED_PAGES_FROM + 16]);
    assert!(!arena.reserve_own(0..8), "the memory is promised");
    // Places are free again.
    arena.release(ranges[0].start..ranges[0].start + 8);
    let again = arena.lines_mut().reserve(1).unwrap();
    assert_eq!(again, [ADOPTED_PAGES_FROM..ADOPTED_PAGES_FROM + 8]);
}

#[test]
fn the_states_of_lines_are_told() {
    let mut world = World::new([32, 32], 255);
    assert!(world.create(0, 32));
    for line in [0, 8] {
        world.move_line(0, line);
    }
    assert!(world.begin(0, 16) && world.begin(0, 0));
    world.stage(0);
    world.stage(1);
    let placed = |arena: &Arena| {
        let mut found = Vec::new();
        arena.placed(&mut |page, placed| found.push((page, placed)));
        found
    };
    let at = |number| ADOPTED_PAGES_FROM + number * LINE;
    assert_eq!(
        placed(&world.arenas[0]),
        [(0, Placed::Staged(home_line(0, 0), TAKEN)), (8, Placed::Given)]
    );
    assert_eq!(
        placed(&world.arenas[1]),
        [
            (at(0), Placed::Adopted(home_line(0, 0))),
            (at(1), Placed::Adopted(home_line(0, 8))),
            (at(2), Placed::Staged(home_line(0, 16), TAKEN)),
        ]
    );
    world.drop_staged(0);
    world.adopt(1);
    assert_eq!(placed(&world.arenas[0]), [(8, Placed::Given)]);
    let placed = placed(&world.arenas[1]);
    assert_eq!(placed[0], (at(0), Placed::GivenOn(home_line(0, 0))), "it went home");
    assert_eq!(placed.len(), 2);
}

#[test]
fn allowances_are_kept_as_they_were_given_first() {
    let mut arena = Arena::on_heap(&ArenaConfig::default(), 32);
    let allowance = |migration| Allowance {
        migration,
        range_epoch: 12,
        pages: 8..24,
        space: SPACE,
        taker: NODES[1],
        taker_incarnation: 3,
    };
    let kept = |arena: &Arena| {
        let mut found = Vec::new();
        arena.allowances(&mut |allowance, is_open| found.push((allowance.clone(), is_open)));
        found
    };
    for migration in 1..=64 {
        assert!(arena.keep_allowance(&allowance(migration), true));
    }
    assert!(!arena.keep_allowance(&allowance(65), true), "there is no room");
    assert_eq!(arena.last_migration(), 64);
    let other = Allowance { taker_incarnation: 4, ..allowance(2) };
    assert!(arena.keep_allowance(&other, false));
    assert_eq!(kept(&arena)[..2], [(allowance(1), true), (allowance(2), false)]);
    arena.forget_allowance(1);
    arena.forget_allowance(77);
    assert_eq!(kept(&arena).len(), 63);
    assert!(arena.keep_allowance(&allowance(70), false));
    assert_eq!(kept(&arena)[0], (allowance(70), false));
    arena.forget_allowance(70);
    assert_eq!(arena.last_migration(), 70);
    arena.raise_lease_floor(9);
    arena.raise_lease_floor(8);
    assert_eq!(arena.lease_floor(), 9);
}

#[test]
fn lines_that_contradict_each_other_are_damage() {
    let damage = |frames: &[(usize, u32)], states: &[(usize, u32)]| {
        let mut arena = Arena::on_heap(&ArenaConfig::default(), 21);
        for (line, frame) in frames {
            arena.pages.lines.frames.as_mut()[*line] = *frame;
        }
        for (line, state) in states {
            arena.pages.lines.entries.as_mut()[*line].state = *state;
        }
        arena.pages.check_lines()
    };
    let line = |line| Err(Damaged::Line { line });
    // Frames 0 and 1, own lines 0 to 4, of which line 2 is not whole, and the places 5 and 6.
    let sizes = *Arena::on_heap(&ArenaConfig::default(), 21).pages.sizes();
    assert_eq!((sizes.frames(), sizes.own_lines, sizes.lines()), (2, 5, 7));
    let adopted = [(5, LineEntry::ADOPTED)];
    assert_eq!(damage(&[], &[]), Ok(()));
    assert_eq!(damage(&[(0, NO_FRAME), (3, 1)], &[]), Ok(()));
    assert_eq!(damage(&[(3, 1)], &[]), line(3), "line 0 has it");
    assert_eq!(damage(&[(0, 2)], &[]), line(1), "line 1 has it");
    assert_eq!(damage(&[(3, 3)], &[]), line(3), "it is the line at the end");
    assert_eq!(damage(&[(2, NO_FRAME), (3, 3)], &[]), line(3), "it is not whole");
    assert_eq!(damage(&[(3, 4)], &[]), line(3), "there is no such memory");
    assert_eq!(damage(&[(3, NO_FRAME - 1)], &[]), line(3));
    assert_eq!(damage(&[], &[(1, 4)]), line(1), "there is no such state");
    assert_eq!(damage(&[], &[(4, u32::MAX)]), line(4));
    assert_eq!(damage(&[], &[(1, LineEntry::ADOPTED)]), line(1), "it is an own line");
    assert_eq!(damage(&[], &adopted), line(5), "it has no memory");
    assert_eq!(damage(&[(0, NO_FRAME), (5, 1)], &adopted), Ok(()));
    assert_eq!(damage(&[(5, NO_FRAME)], &adopted), Ok(()), "it gave it back");
    let staged = [(5, LineEntry::STAGED)];
    assert_eq!(damage(&[], &staged), line(5), "it has no memory");
    assert_eq!(damage(&[(0, NO_FRAME), (5, 1)], &staged), Ok(()));
    assert_eq!(damage(&[], &[(0, LineEntry::GIVEN), (1, LineEntry::STAGED)]), Ok(()));
}

#[test]
fn a_line_that_is_not_cleared_cannot_come_back() {
    let mut arena = Arena::on_heap(&ArenaConfig::default(), 16);
    let grant = arena.create(SPACE, 8).unwrap();
    arena.complete(grant.location);
    arena.withhold(0..8, true);
    arena.give(0);
    assert_eq!(arena.arena_usage().free_pages, 8);
    assert!(!arena.reserve_own(0..8), "its bytes may be needed");
    arena.clear_given(0..8);
    assert!(arena.reserve_own(0..8));
}

#[test]
fn pages_of_lines_that_were_given_stay_withheld_until_they_are_cleared() {
    let mut arena = Arena::on_heap(&ArenaConfig::default(), 24);
    let grant = arena.create(SPACE, 4).unwrap();
    arena.complete(grant.location);
    arena.withhold(0..24, true);
    assert_eq!(arena.arena_usage().free_pages, 0);
    // The middle one is given.
    arena.give(8);
    arena.withhold(0..24, false);
    let usage = arena.arena_usage();
    assert_eq!((usage.free_pages, usage.used_pages), (4 + 8, 4), "lines 0 and 2");
    for _ in 0..3 {
        let own = arena.create(SPACE, 4).unwrap().location.page();
        assert!(!line_of(8).contains(&own), "page {own} is another server's");
    }
    assert_eq!(arena.create(SPACE, 1), Err(Status::OutOfMemory));
    arena.clear_given(line_of(8));
    let usage = arena.arena_usage();
    assert_eq!((usage.free_pages, usage.used_pages), (8, 16), "its memory is for another line");
    // A line on its way home has memory, but nobody may allocate its pages yet.
    assert!(arena.reserve_own(line_of(8)));
    let record = [LinePage::default(); LINE_PAGES];
    let bytes = vec![0; LINE_BYTES];
    arena.stage_with(8, (home_line(0, 8), TAKEN), &record, &bytes).unwrap();
    arena.withhold(line_of(8), true);
    arena.withhold(line_of(8), false);
    assert_eq!(arena.arena_usage().free_pages, 0);
    arena.adopt(8);
    assert_eq!(arena.arena_usage().free_pages, 8);
}

/// Direct readers, and the next taker, need not compute it again.
#[test]
fn the_crcs_of_a_line_that_was_read_are_known() {
    let mut arena = Arena::on_heap(&ArenaConfig::default(), 16);
    let place = arena.lines_mut().reserve(1).unwrap()[0].start;
    let page = LinePage {
        version: 5,
        part: Part::First { pages: 1 },
        colour: Some((ArenaGeneration::default(), Tag(1))),
        space: SPACE,
        contents: PageContents::Written,
        ..LinePage::default()
    };
    let mut record = [page; LINE_PAGES];
    record[6].contents = PageContents::Leftover;
    let bytes: Vec<u8> = (0..LINE_BYTES).map(|at| (at / 3) as u8).collect();
    arena.stage_with(place, (home_line(1, 8), TAKEN), &record, &bytes).unwrap();
    arena.adopt(place);
    let pages = bytes.chunks(PAGE_BYTES).zip(place..).zip(0..);
    for ((bytes, number), at) in pages {
        // The third one is as if it had come in pieces, and the sixth one reads as zeros.
        let crc = bytes.first_chunk().map(page_crc).filter(|_| ![3, 6].contains(&at));
        assert_eq!(arena.page_crc(number), crc, "page {at}");
    }
    arena.write(place, 9, &[1]);
    assert_eq!(arena.page_crc(place), None);
}

/// It would be in doubt whose of the two lines it is, and the states and bytes of both would be mixed.
#[test]
fn a_line_in_doubt_is_not_staged_over() {
    let mut arena = Arena::on_heap(&ArenaConfig::default(), 16);
    let place = arena.lines_mut().reserve(1).unwrap()[0].start;
    let written = |version, stamp| {
        let page = LinePage {
            version,
            part: Part::First { pages: 1 },
            colour: Some((ArenaGeneration::default(), Tag(1))),
            space: SPACE,
            contents: PageContents::Written,
            ..LinePage::default()
        };
        ([page; LINE_PAGES], vec![stamp; LINE_BYTES])
    };
    let (record, bytes) = written(5, 1);
    arena.stage_with(place, (home_line(1, 8), TAKEN), &record, &bytes).unwrap();
    let name = (home_line(1, 16), Taken { migration: 5, epoch: 78 });
    let (other, other_bytes) = written(9, 2);
    assert_eq!(arena.stage_with(place, name, &other, &other_bytes), Err(StageError::InDoubt));
    let placed = |arena: &Arena| {
        let mut found = Vec::new();
        arena.placed(&mut |page, placed| found.push((page, placed)));
        found
    };
    assert_eq!(placed(&arena), [(place, Placed::Staged(home_line(1, 8), TAKEN))]);
    let number = arena.index(place).unwrap();
    assert_eq!((arena.pages.state(number).version(), arena.pages.byte_of(number, 0)), (5, 1));
    // Its place stays reserved when it is known that the line is the giver's.
    arena.drop_staged(place);
    arena.stage_with(place, name, &other, &other_bytes).unwrap();
    assert_eq!(placed(&arena), [(place, Placed::Staged(name.0, name.1))]);
    assert_eq!((arena.pages.state(number).version(), arena.pages.byte_of(number, 0)), (9, 2));
}

#[test]
fn floors_and_epochs_that_no_process_stores_are_damage() {
    let first = ArenaGeneration::default();
    let check = |change: &dyn Fn(&mut Arena)| {
        let mut arena = Arena::on_heap(&ArenaConfig::default(), 16);
        let allowance = Allowance {
            migration: 70,
            range_epoch: 3,
            pages: 0..8,
            space: SPACE,
            taker: NODES[1],
            taker_incarnation: 4,
        };
        arena.keep_allowance(&allowance, true);
        change(&mut arena);
        arena.pages.check(first)
    };
    let floor = |epoch: u64| check(&|arena| arena.pages.lines.floors.as_mut()[0].lease = epoch);
    assert_eq!(floor(0), Ok(()));
    // The counter of a process may have come that far, and then begins anew.
    assert_eq!(floor(LEASE_EPOCH_MAX), Ok(()));
    for epoch in [LEASE_EPOCH_MAX + 1, u64::MAX] {
        assert_eq!(floor(epoch), Err(Damaged::LeaseFloor { epoch }));
    }
    let last =
        |migration: u64| check(&|arena| arena.pages.lines.floors.as_mut()[0].migration = migration);
    assert_eq!((last(70), last(71)), (Ok(()), Ok(())));
    assert_eq!(last(69), Err(Damaged::Lowered { what: "last migration" }));
    let of_earlier_program = check(&|arena| {
        let floors = &mut arena.pages.lines.floors.as_mut()[0];
        (floors.migration, floors.migration_copy) = (69, 0);
    });
    let damaged = Err(Damaged::Allowance { migration: 70 });
    assert_eq!(of_earlier_program, damaged, "it was raised before");
    let lease = |raised: u64, lease: u64| {
        check(&|arena| {
            arena.raise_lease_floor(raised);
            arena.pages.lines.floors.as_mut()[0].lease = lease;
        })
    };
    assert_eq!((lease(9, 9), lease(9, 10)), (Ok(()), Ok(())));
    assert_eq!(lease(9, 8), Err(Damaged::Lowered { what: "floor of lease epochs" }));
    let staged = |epoch: u64| {
        check(&|arena| {
            let entry = &mut arena.pages.lines.entries.as_mut()[0];
            (entry.state, entry.epoch) = (LineEntry::STAGED, epoch);
        })
    };
    assert_eq!(staged(LEASE_EPOCH_MAX), Ok(()));
    assert_eq!(staged(LEASE_EPOCH_MAX + 1), Err(Damaged::Line { line: 0 }));
}
