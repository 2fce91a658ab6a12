//! A process that keeps its memory is killed after each of its stores; the next one takes over.

#![allow(clippy::cast_possible_truncation, reason = "the numbers of these tests are small")]

use std::{
    collections::{BTreeMap, HashSet},
    fs,
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use bluebridge_protocol::store::{Allowance, HomeLine, Placed, StageError, Taken};
use bluebridge_wire::{
    LinePage, Tag,
    address::LINE_BYTES,
    line::{LineRecord, PageContents, Part},
    page_crc,
};
use rand::{Rng, SeedableRng, rngs::StdRng};

use super::*;
use crate::{
    ArenaFile, Claim,
    kept::{
        Holder, Kept, PageRecord,
        lines::{ALLOWANCES, AllowanceRecord, Floors, LineEntry},
        redo,
        stores::{self, log},
    },
};

const SPACE: Space = Space(7);
const OTHER: Space = Space(9);
const PAGES: u32 = 24;

/// One in this many takeovers is cut, after each of its stores.
const TAKEOVER_EVERY: usize = 37;

/// A file in memory that is removed at the end.
struct File(PathBuf);

impl File {
    fn new(name: &str) -> Self {
        let process = std::process::id();
        Self(PathBuf::from(format!("/dev/shm/bluebridge-test-{process}-{name}")))
    }

    fn open(&self) -> Kept {
        self.try_open().expect("it can be opened")
    }

    fn try_open(&self) -> Result<Kept, crate::ArenaFileError> {
        self.options().open(|_, _| ControlFlow::Continue(()))
    }

    fn options(&self) -> ArenaFile {
        ArenaFile {
            path: self.0.clone(),
            bytes: u64::from(PAGES) * PAGE_BYTES as u64,
            shard_count: 1,
            spaces: vec![SPACE, OTHER],
            claim: Claim::Prefault,
            is_fresh: false,
            is_direct: false,
        }
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn holder() -> Holder {
    Holder { node: NodeId(3), generation: generation(5), token: [7; 16] }
}

fn generation(number: u16) -> ArenaGeneration {
    ArenaGeneration::new(number).expect("small")
}

fn config() -> ArenaConfig {
    ArenaConfig {
        generation: generation(5),
        last_generation: generation(6),
        // So that pages retire.
        last_tag: 6,
        ..ArenaConfig::default()
    }
}

/// The next process has all generations that were reserved meanwhile.
fn next_config() -> ArenaConfig {
    ArenaConfig { last_generation: generation(7), ..config() }
}

/// What clients can know: the complete allocations, by location and tag, with the contents and the
/// versions of their pages.
type Known = BTreeMap<(u64, u8), (Space, Vec<u8>, Vec<u64>)>;

/// All that is kept.
#[derive(Clone, Debug, Eq, PartialEq)]
struct State {
    known: Known,
    fences: Vec<(u16, u16, u32)>,
    /// The colours that each space used.
    worn: BTreeMap<u16, u64>,
}

/// What is known of the bytes of a page is right.
fn assert_crc_fits(arena: &Arena, page: u64) {
    let bytes = arena.read(page, 0..PAGE_BYTES).first_chunk().expect("a page");
    let known = arena.page_crc(page);
    assert!(known.is_none_or(|crc| crc == page_crc(bytes)), "page {page}: {known:?}");
}

fn state(arena: &Arena, incomplete: &HashSet<u64>) -> State {
    let mut known = Known::new();
    arena.survey(0, PAGES, &[], &mut |allocation| {
        let Grant { location, tag } = allocation.grant;
        if incomplete.contains(&location.bits()) {
            return true;
        }
        let pages = location.page()..location.page() + u64::from(allocation.pages);
        let versions = pages.clone().map(|page| arena.version(page)).collect();
        pages.clone().for_each(|page| assert_crc_fits(arena, page));
        // Not byte by byte: it is done for every cut.
        let bytes = pages.map(|page| arena.read(page, 0..PAGE_BYTES)).collect::<Vec<_>>().concat();
        known.insert((location.bits(), tag.0), (allocation.space, bytes, versions));
        true
    });
    let mut fences = Vec::new();
    arena.fences(&mut |space, node, incarnation| fences.push((space.0, node.0, incarnation)));
    let used = arena.quotas.iter().map(|quota| (quota.space.0, quota.used_colours));
    let worn = used.filter(|(_, colours)| *colours > 0).collect();
    State { known, fences, worn }
}

/// Something that a client or the server does.
struct Player {
    random: StdRng,
    /// The allocations that exist, and whether they are complete.
    live: Vec<(Access, u32, bool)>,
    /// Every pair of a page and a colour that was given out.
    given: HashSet<(u64, u16, u8)>,
    fences: BTreeMap<u16, u32>,
}

impl Player {
    fn incomplete(&self) -> HashSet<u64> {
        let incomplete = self.live.iter().filter(|(_, _, is_complete)| !is_complete);
        incomplete.map(|(access, _, _)| access.location.bits()).collect()
    }

    fn give(&mut self, grant: Grant, pages: u32) {
        let Grant { location, tag } = grant;
        for page in location.page()..location.page() + u64::from(pages) {
            let colour = (page, location.generation().number(), tag.0);
            assert!(self.given.insert(colour), "{colour:?} was given out twice");
        }
    }

    fn step(&mut self, arena: &mut Arena) {
        let choice = self.random.random_range(0..100);
        if self.live.is_empty() || choice < 15 {
            let pages = self.random.random_range(1..=10);
            let space = if self.random.random_bool(0.8) { SPACE } else { OTHER };
            if let Ok(grant) = arena.create(space, pages) {
                self.give(grant, pages);
                let Grant { location, tag } = grant;
                let access = Access { location, length_bytes: 1, tag, space };
                self.live.push((access, pages, false));
                arena.note_creator(location, Creator { node: NodeId(4), incarnation: 2 });
            }
            return;
        }
        let at = self.random.random_range(0..self.live.len());
        let (access, pages, is_complete) = self.live[at];
        let first = access.location.page();
        let page = first + u64::from(self.random.random_range(0..pages));
        let start = self.random.random_range(0..PAGE_BYTES);
        let bytes = match self.random.random_range(0..4) {
            0 => 8.min(PAGE_BYTES - start),
            1 => PAGE_BYTES - start,
            _ => self.random.random_range(0..=PAGE_BYTES - start),
        };
        let data = vec![self.random.random::<u8>() | 1; PAGE_BYTES];
        match choice {
            15..30 => {
                arena.complete(access.location);
                self.live[at].2 = true;
            }
            30..42 => {
                let freed = arena.delete(access, pages).expect("it exists");
                assert_eq!(freed, pages);
                self.live.swap_remove(at);
            }
            42..62 => arena.write(page, start, &data[..bytes]),
            62..68 => {
                let data = data.first_chunk().expect("a page");
                arena.write_page(page, data, page_crc(data));
                assert_eq!(arena.page_crc(page), Some(page_crc(data)));
            }
            68..80 => {
                let count = u64::from(pages).min(LINE_PAGES as u64);
                let writes: Vec<_> = (first..first + count)
                    .map(|page| PageWrite { page, start, data: &data[..bytes] })
                    .collect();
                arena.write_together(&writes);
            }
            80..90 => arena.zero(page, start..start + bytes),
            90..94 => {
                let (node, incarnation) =
                    (self.random.random_range(1..5), self.random.random_range(0..9));
                arena.keep_fence(SPACE, NodeId(node), incarnation);
                match incarnation {
                    0 => self.fences.remove(&node),
                    _ => self.fences.insert(node, incarnation),
                };
            }
            94..97 => {
                arena.tidy(self.random.random_range(1..PAGES));
            }
            _ => arena.reserve(generation(5 + u16::from(is_complete) * 2)),
        }
    }
}

/// What the next process makes of an image of the file, and the stores with which it takes it over.
fn recovered(file: &File, image: &[u8]) -> (Arena, Vec<log::Store>) {
    fs::write(&file.0, image).expect("there is room");
    set_private(&file.0);
    log::begin();
    let kept = file.open();
    let base = kept.start();
    let mut reserved = kept.assign(holder()).expect("it is of this node");
    let arena = Arena::open(&next_config(), reserved.parts.remove(0)).expect("it is not damaged");
    let stores = log::end().into_iter().map(|(address, bytes)| (address - base, bytes));
    (arena, stores.collect())
}

fn set_private(path: &Path) {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).expect("it is our own");
}

/// Each bit of the record of a change that is under way counts, and so do the new bytes. `seed` selects which are tried.
fn assert_damage_of_redo_is_refused(file: &File, image: &[u8], seed: usize) {
    let (redo, _) = file.options().layout().expect("it fits").places_of(0);
    let (extent, part) = (size_of::<redo::Extent>(), size_of::<redo::PagePart>());
    let kind = redo + extent + LINE_PAGES * part;
    let first_part = redo + extent..redo + extent + part;
    let is_zero = image[redo + extent + 17] != 0;
    let (described, new_bytes) = match u32::from(image[kind]) {
        redo::NONE => return,
        redo::PAGES if is_zero => (first_part, 0..0),
        redo::PAGES => (first_part, redo + PAGE_BYTES..redo + PAGE_BYTES + 1),
        _ => (redo..redo + extent, 0..0),
    };
    // Behind the kind is the number of parts.
    let bytes: Vec<_> = described.chain(new_bytes).chain(kind..kind + 8).collect();
    for at in bytes.into_iter().skip(seed % 5).step_by(5) {
        let mut image = image.to_vec();
        image[at] ^= 1 << (seed % 8);
        fs::write(&file.0, &image).expect("there is room");
        set_private(&file.0);
        let error = file.try_open().map(|_| ()).expect_err("it is damaged").to_string();
        assert!(error.contains("the record of its last change is damaged"), "{at}: {error}");
    }
}

/// A server that opens a file may not get it from the controller: until then nothing of the contents changes. Returns
/// whether a change was under way in the image.
fn assert_opening_changes_nothing(file: &File, image: &[u8]) -> bool {
    fs::write(&file.0, image).expect("there is room");
    set_private(&file.0);
    drop(file.open());
    let after = fs::read(&file.0).expect("it is there");
    let (redo, states) = file.options().layout().expect("it fits").places_of(0);
    let pages = image.len() - PAGES as usize * PAGE_BYTES;
    for range in [redo..states + PAGES as usize * size_of::<PageRecord>(), pages..image.len()] {
        assert!(after[range.clone()] == image[range], "it was opened only");
    }
    let kind = redo + size_of::<redo::Extent>() + LINE_PAGES * size_of::<redo::PagePart>();
    image[kind..kind + 4] != redo::NONE.to_ne_bytes()
}

/// Plays `step_count` steps, and looks at what is left after each store.
fn play(seed: u64, step_count: usize) -> (usize, usize) {
    let (file, copy) = (File::new(&format!("crash-{seed}")), File::new(&format!("image-{seed}")));
    let mut kept = file.open();
    assert_eq!(kept.holder(), None);
    let base = kept.start();
    let mut reserved = kept.assign(holder()).expect("it is empty");
    let mut arena = Arena::open(&config(), reserved.parts.remove(0)).expect("it is empty");
    kept = copy.open();
    drop(kept.assign(holder()).expect("it is empty"));
    let random = StdRng::seed_from_u64(seed);
    let mut player =
        Player { random, live: Vec::new(), given: HashSet::new(), fences: BTreeMap::new() };
    let mut image = fs::read(&file.0).expect("it is there");
    let (mut cuts, mut takeover_cuts, mut under_way) = (0, 0, 0);
    for step in 0..step_count {
        let before = state(&arena, &player.incomplete());
        // Of what the step gives out, nobody knows before it ends.
        let given = player.given.clone();
        log::begin();
        player.step(&mut arena);
        let stores = log::end();
        let after = state(&arena, &player.incomplete());
        let fences = player.fences.iter().map(|(node, incarnation)| (SPACE.0, *node, *incarnation));
        assert!(after.fences.iter().copied().eq(fences), "seed {seed}: step {step}");
        for (number, (address, bytes)) in stores.iter().enumerate() {
            let offset = address - base;
            image[offset..offset + bytes.len()].copy_from_slice(bytes);
            cuts += 1;
            let (next, stores_of_next) = recovered(&copy, &image);
            let found = state(&next, &HashSet::new());
            assert!(
                found == before || found == after,
                "seed {seed}: step {step} was cut after store {number} of {}, and the next process \
                 has neither what was before nor what came after",
                stores.len()
            );
            check(next, &given, seed);
            if cuts % TAKEOVER_EVERY == 0 {
                under_way += usize::from(assert_opening_changes_nothing(&copy, &image));
                assert_damage_of_redo_is_refused(&copy, &image, cuts / TAKEOVER_EVERY);
                let mut image = image.clone();
                for (offset, bytes) in &stores_of_next {
                    image[*offset..*offset + bytes.len()].copy_from_slice(bytes);
                    let (after_next, _) = recovered(&copy, &image);
                    assert_eq!(
                        state(&after_next, &HashSet::new()),
                        found,
                        "seed {seed}: step {step}"
                    );
                    takeover_cuts += 1;
                }
            }
        }
        assert!(image == fs::read(&file.0).expect("it is there"), "a store was not logged");
    }
    assert!(under_way > 10, "only {under_way} changes were under way");
    (cuts, takeover_cuts)
}

/// What was taken over can be used on: nothing is lost, and no colour comes again.
fn check(mut arena: Arena, given: &HashSet<(u64, u16, u8)>, seed: u64) {
    let usage = arena.arena_usage();
    let known = state(&arena, &HashSet::new()).known;
    let used: u64 = known.values().map(|(_, _, versions)| versions.len() as u64).sum();
    assert_eq!(usage.used_pages, used, "seed {seed}");
    while let Ok(Grant { location, tag }) = arena.create(SPACE, 1) {
        let colour = (location.page(), location.generation().number(), tag.0);
        assert!(!given.contains(&colour), "seed {seed}: {colour:?} was given out before");
        assert!(location.generation() <= usage.last_generation, "seed {seed}: {colour:?}");
        assert!(arena.read(location.page(), 0..PAGE_BYTES).iter().all(|byte| *byte == 0));
    }
}

/// Whatever is in the file, it is refused or used without a panic.
#[test]
fn a_damaged_file_is_refused_or_harmless() {
    let (file, copy) = (File::new("whole"), File::new("damaged"));
    let mut reserved = file.open().assign(holder()).expect("it is empty");
    let mut arena = Arena::open(&config(), reserved.parts.remove(0)).expect("it is empty");
    let random = StdRng::seed_from_u64(7);
    let mut player =
        Player { random, live: Vec::new(), given: HashSet::new(), fences: BTreeMap::new() };
    log::begin();
    (0..200).for_each(|_| player.step(&mut arena));
    let mut lines_player = LinesPlayer::new(7);
    (0..200).for_each(|_| lines_player.step(&mut arena));
    drop(arena);
    let whole = fs::read(&file.0).expect("it is there");
    let (redo, states) = file.options().layout().expect("it fits").places_of(0);
    // Floors, allowances, frames and lines come before the states, each in a page.
    let lines = [
        (4, size_of::<Floors>()),
        (3, 4 * size_of::<AllowanceRecord>()),
        (2, 9 * size_of::<u32>()),
        (1, 9 * size_of::<LineEntry>()),
    ];
    assert!(ALLOWANCES * size_of::<AllowanceRecord>() <= PAGE_BYTES);
    let (mut refused, mut used) = (0, 0);
    for _ in 0..4000 {
        let mut image = whole.clone();
        for _ in 0..player.random.random_range(1..4) {
            let at = match player.random.random_range(0..4) {
                0 => player.random.random_range(0..256),
                1 => redo + player.random.random_range(0..512),
                2 => {
                    let (back, bytes) = lines[player.random.random_range(0..lines.len())];
                    states - back * PAGE_BYTES + player.random.random_range(0..bytes)
                }
                _ => {
                    states + player.random.random_range(0..PAGES as usize * size_of::<PageRecord>())
                }
            };
            image[at] = match player.random.random_range(0..3) {
                0 => 0xff,
                1 => image[at].wrapping_add(1),
                _ => player.random.random(),
            };
        }
        fs::write(&copy.0, &image).expect("there is room");
        set_private(&copy.0);
        let opened = copy.try_open().and_then(|kept| kept.assign(holder()));
        let arena = opened
            .ok()
            .and_then(|mut reserved| Arena::open(&next_config(), reserved.parts.remove(0)).ok());
        let Some(mut arena) = arena else {
            refused += 1;
            continue;
        };
        used += 1;
        let _ = state(&arena, &HashSet::new());
        let mut more = Player {
            random: StdRng::seed_from_u64(used),
            live: Vec::new(),
            given: HashSet::new(),
            fences: BTreeMap::new(),
        };
        let _ = lines_state(&arena);
        (0..30).for_each(|_| more.step(&mut arena));
    }
    println!("{refused} refused, {used} used");
    assert!(refused > 500 && used > 500, "{refused} refused, {used} used");
}

/// A change that was complete is not repeated because of its kind alone, and one of an earlier program, without a check, is.
#[test]
fn a_kind_without_a_check_is_that_of_an_earlier_program() {
    let (file, copy) = (File::new("kind"), File::new("kind-copy"));
    let mut reserved = file.open().assign(holder()).expect("it is empty");
    let mut arena = Arena::open(&config(), reserved.parts.remove(0)).expect("it is empty");
    let (redo, _) = file.options().layout().expect("it fits").places_of(0);
    let kind = redo + size_of::<redo::Extent>() + LINE_PAGES * size_of::<redo::PagePart>();
    let read = || fs::read(&file.0).expect("it is there");
    let opened = |image: &[u8]| {
        fs::write(&copy.0, image).expect("there is room");
        set_private(&copy.0);
        copy.try_open().map(|_| ())
    };
    let grant = arena.create(SPACE, 1).expect("there is room");
    let extent = read();
    arena.write(grant.location.page(), 0, b"new");
    let pages = read();
    let with_kind = |image: &[u8], of: u32| {
        let mut image = image.to_vec();
        image[kind..kind + 4].copy_from_slice(&of.to_ne_bytes());
        image
    };
    for (image, of) in [(&extent, redo::CREATE), (&extent, redo::DELETE), (&pages, redo::PAGES)] {
        assert!(opened(image).is_ok());
        assert!(opened(&with_kind(image, of)).is_err(), "it was complete");
    }
    // As an earlier program has it while the write is under way.
    let mut earlier = with_kind(&pages, redo::PAGES);
    earlier[kind + 4..kind + 8].copy_from_slice(&1_u32.to_ne_bytes());
    assert!(opened(&earlier).is_ok());
    earlier[redo + size_of::<redo::Extent>()] |= 1;
    assert!(opened(&earlier).is_err(), "no page has an odd sequence afterwards");
}

#[test]
fn a_process_may_be_killed_after_any_store_and_the_next_one_too() {
    let (mut cuts, mut takeover_cuts) = (0, 0);
    for seed in 0..6 {
        let (more, takeover_more) = play(seed, 120);
        (cuts, takeover_cuts) = (cuts + more, takeover_cuts + takeover_more);
    }
    println!("{cuts} cuts, {takeover_cuts} of them in a process that takes over");
    assert!(cuts > 5_000 && takeover_cuts > 5_000, "only {cuts} and {takeover_cuts} cuts");
}

/// The home of the lines that come from elsewhere.
const ELSEWHERE: NodeId = NodeId(30);
const LINE: u64 = LINE_PAGES as u64;

/// What a server has of lines, and what it knows of migrations.
#[derive(Clone, Debug, PartialEq)]
struct LinesState {
    placed: Vec<(u64, Placed)>,
    /// By page: the part, link, colour and space of used pages, and the contents and the version if it is the server's to
    /// know them.
    pages: BTreeMap<u64, PageState>,
    allowances: Vec<(Allowance, bool)>,
    /// The first pages of allocations that are being freed, and their lengths.
    freeing: BTreeMap<u64, u32>,
}

type PageState = (u8, u32, u32, u16, Option<(Vec<u8>, u64)>);

fn lines_state(arena: &Arena) -> LinesState {
    let (mut placed, mut allowances, mut pages) = (Vec::new(), Vec::new(), BTreeMap::new());
    arena.placed(&mut |page, line| placed.push((page, line)));
    arena.allowances(&mut |allowance, is_open| allowances.push((allowance.clone(), is_open)));
    for number in 0..arena.pages.states().len() {
        let line = number / LINE_PAGES;
        let state = arena.pages.entry(line).state;
        let is_place = !arena.pages.is_own(line);
        let is_here = state != LineEntry::GIVEN && !(is_place && state == LineEntry::DEFAULT);
        let page = *arena.pages.state(number);
        if page.role() == Use::None || is_place && !is_here {
            continue;
        }
        let at = arena.page_at(number);
        if is_here {
            assert_crc_fits(arena, at);
        }
        let contents = is_here.then(|| (arena.read(at, 0..PAGE_BYTES).to_vec(), page.version()));
        pages.insert(at, (page.part, page.link, page.colour, page.space, contents));
    }
    let mut freeing = BTreeMap::new();
    arena.each_freeing(&mut |first_page, _, pages| {
        freeing.insert(first_page, pages);
    });
    LinesState { placed, pages, allowances, freeing }
}

/// Pages of memory that are used.
fn used_pages(arena: &Arena) -> u64 {
    let sizes = *arena.pages.sizes();
    let used = |line: usize| {
        let state = arena.pages.entry(line).state;
        let pages = arena.pages.states()[frames::pages_of(line)].iter();
        match state {
            LineEntry::ADOPTED if arena.pages.frame(line).is_none() => 0,
            LineEntry::STAGED | LineEntry::ADOPTED => LINE_PAGES,
            LineEntry::DEFAULT if arena.pages.is_own(line) => {
                pages.filter(|page| page.role() != Use::None).count()
            }
            _ => 0,
        }
    };
    (0..sizes.lines()).map(used).sum::<usize>() as u64
}

/// Something that a server does with lines, and with their pages.
struct LinesPlayer {
    random: StdRng,
    live: Vec<(Access, u32)>,
    given: HashSet<(u64, u16, u8)>,
    /// What own lines had when they were given away.
    records: BTreeMap<u64, LineRecord>,
    /// Places and own lines that are reserved, and the name of the line that comes.
    reserved: Vec<(u64, HomeLine)>,
    migrations: u64,
    epochs: u64,
    counts: BTreeMap<&'static str, usize>,
}

impl LinesPlayer {
    fn new(seed: u64) -> Self {
        Self {
            random: StdRng::seed_from_u64(seed),
            live: Vec::new(),
            given: HashSet::new(),
            records: BTreeMap::new(),
            reserved: Vec::new(),
            migrations: 0,
            epochs: 0,
            counts: BTreeMap::new(),
        }
    }

    fn pick<T: Clone>(&mut self, from: &[T]) -> Option<T> {
        let at = self.random.random_range(0..from.len().max(1));
        from.get(at).cloned()
    }

    fn bytes(&mut self) -> Vec<u8> {
        vec![self.random.random::<u8>() | 1; LINE_BYTES]
    }

    /// A line of the other server, with new contents.
    fn foreign(&mut self) -> LineRecord {
        let mut record = LineRecord::default();
        let version = self.random.random_range(5..50);
        for (at, page) in record.iter_mut().enumerate().take(6) {
            let part = if at == 0 {
                Part::First { pages: 6 }
            } else {
                Part::Further { distance: at as u32 }
            };
            let contents = if at == 3 { PageContents::Zeros } else { PageContents::Written };
            let colour = Some((generation(40), Tag(9)));
            *page =
                LinePage { version, part, colour, space: OTHER, contents, ..LinePage::default() };
        }
        record
    }

    fn lines(arena: &Arena, is_it: impl Fn(usize) -> bool) -> Vec<u64> {
        let lines = 0..arena.pages.sizes().lines();
        lines.filter(|line| is_it(*line)).map(|line| arena.page_at(line * LINE_PAGES)).collect()
    }

    fn step(&mut self, arena: &mut Arena) {
        let state = |arena: &Arena, line: usize| arena.pages.entry(line).state;
        let name = match self.random.random_range(0..100) {
            0..12 => {
                let pages = self.random.random_range(1..=9);
                if let Ok(grant) = arena.create(SPACE, pages) {
                    let Grant { location, tag } = grant;
                    for page in location.page()..location.page() + u64::from(pages) {
                        let colour = (page, location.generation().number(), tag.0);
                        assert!(self.given.insert(colour), "{colour:?} was given out twice");
                    }
                    arena.complete(location);
                    self.live
                        .push((Access { location, length_bytes: 1, tag, space: SPACE }, pages));
                }
                "create"
            }
            12..20 => {
                let is_here = |page: u64| arena.pages.is_here(page as usize / LINE_PAGES);
                let freeing = lines_state(arena).freeing;
                let here: Vec<_> = (0..self.live.len())
                    .filter(|at| {
                        let (access, pages) = self.live[*at];
                        let first = access.location.page();
                        let are_here = (first..first + u64::from(pages)).all(is_here);
                        are_here && !freeing.contains_key(&first)
                    })
                    .collect();
                if let Some(at) = self.pick(&here) {
                    let (access, pages) = self.live.swap_remove(at);
                    assert_eq!(arena.delete(access, pages), Ok(pages));
                }
                "delete"
            }
            20..32 => {
                let here = lines_state(arena);
                let is_staged = |page: u64| {
                    let line = arena.index(page).expect("it is its page") / LINE_PAGES;
                    state(arena, line) == LineEntry::STAGED
                };
                let pages = here
                    .pages
                    .iter()
                    .filter(|(page, (.., contents))| contents.is_some() && !is_staged(**page));
                let pages: Vec<_> = pages.map(|(page, _)| *page).collect();
                if let Some(page) = self.pick(&pages) {
                    let start = self.random.random_range(0..PAGE_BYTES);
                    let data = [self.random.random::<u8>() | 1; PAGE_BYTES];
                    arena.write(page, start, &data[start..]);
                }
                "write"
            }
            32..42 => {
                let here = Self::lines(arena, |line| {
                    // A line without memory has no allocated page, and stays at home.
                    let is_used = state(arena, line) == LineEntry::DEFAULT
                        && arena.pages.is_own(line)
                        && arena.pages.frame(line).is_some();
                    let is_whole = arena.line(arena.page_at(line * LINE_PAGES)).is_some();
                    (is_used || state(arena, line) == LineEntry::ADOPTED) && is_whole
                });
                if let Some(page) = self.pick(&here) {
                    self.records.insert(page, arena.line(page).expect("it is whole").pages);
                    arena.withhold(page..page + LINE, true);
                    arena.give(page);
                }
                "give"
            }
            42..52 => {
                let given = Self::lines(arena, |line| state(arena, line) == LineEntry::GIVEN);
                let reserved = |page: &u64| self.reserved.iter().any(|(at, _)| at == page);
                let given: Vec<_> = given.into_iter().filter(|page| !reserved(page)).collect();
                if let Some(page) = self.pick(&given) {
                    arena.clear_given(page..page + LINE);
                }
                "clear"
            }
            52..60 => {
                let first_page = self.random.random_range(0..1000) * LINE;
                let name = HomeLine { node: ELSEWHERE, generation: generation(40), first_page };
                if let Some(ranges) = arena.lines_mut().reserve(1) {
                    self.reserved.push((ranges[0].start, name));
                }
                "reserve"
            }
            60..68 => {
                let given = Self::lines(arena, |line| {
                    state(arena, line) == LineEntry::GIVEN && arena.pages.is_own(line)
                });
                if let Some(page) = self.pick(&given)
                    && arena.reserve_own(page..page + LINE)
                {
                    let name =
                        HomeLine { node: NodeId(3), generation: generation(5), first_page: page };
                    self.reserved.push((page, name));
                }
                "reserve own"
            }
            68..78 => {
                let reserved = self.reserved.clone();
                if let Some((page, name)) = self.pick(&reserved) {
                    let line = arena.index(page).expect("it is its place") / LINE_PAGES;
                    if state(arena, line) != LineEntry::STAGED && self.random.random_bool(0.2) {
                        // Not all was read.
                        let bytes = self.bytes();
                        let memory = arena.memory(page).expect("it is reserved");
                        stores::copy(&mut memory[PAGE_BYTES..], &bytes[PAGE_BYTES..]);
                    } else if state(arena, line) != LineEntry::STAGED {
                        let mut record = match self.records.get(&page).copied() {
                            Some(record) if page < ADOPTED_PAGES_FROM => record,
                            _ => self.foreign(),
                        };
                        record.iter_mut().for_each(|page| page.version += 3);
                        let (taken, bytes) =
                            (Taken { migration: 8, epoch: self.epochs }, self.bytes());
                        let staged = arena.stage_with(page, (name, taken), &record, &bytes);
                        let mut numbers = frames::pages_of(line);
                        let is_freeing = numbers.any(|number| arena.is_being_freed(number));
                        let is_refused = matches!(staged, Err(StageError::BeingFreed(_)));
                        assert!(is_refused == is_freeing && (is_refused || staged == Ok(())));
                    }
                }
                "stage"
            }
            78..86 => {
                let staged = Self::lines(arena, |line| state(arena, line) == LineEntry::STAGED);
                if let Some(page) = self.pick(&staged) {
                    if self.random.random_bool(0.7) {
                        arena.adopt(page);
                        self.reserved.retain(|(reserved, _)| *reserved != page);
                    } else {
                        arena.drop_staged(page);
                    }
                }
                "adopt or drop"
            }
            86..89 => {
                let reserved = self.reserved.clone();
                if let Some((page, _)) = self.pick(&reserved) {
                    let line = arena.index(page).expect("it is its place") / LINE_PAGES;
                    if state(arena, line) != LineEntry::STAGED {
                        arena.release(page..page + LINE);
                        self.reserved.retain(|(reserved, _)| *reserved != page);
                    }
                }
                "release"
            }
            89..95 => {
                self.migrations += 1;
                let old = self.migrations - self.random.random_range(0..3).min(self.migrations - 1);
                if self.random.random_bool(0.3) {
                    arena.forget_allowance(old);
                } else {
                    let allowance = Allowance {
                        migration: old,
                        range_epoch: 4,
                        pages: 0..LINE * old,
                        space: OTHER,
                        taker: ELSEWHERE,
                        taker_incarnation: 6,
                    };
                    arena.keep_allowance(&allowance, self.random.random_bool(0.6));
                }
                "allowance"
            }
            95..97 => {
                self.epochs += self.random.random_range(0..1 << 20);
                arena.raise_lease_floor(self.epochs);
                "floor"
            }
            97 => self.free_scattered(arena),
            98 => {
                let adopted = Self::lines(arena, |line| state(arena, line) == LineEntry::ADOPTED);
                if let Some(page) = self.pick(&adopted) {
                    let pages = arena.line(page).expect("it is whole").pages;
                    let used = pages.iter().filter(|page| page.part != Part::Free).count() as u64;
                    let from = self.random.random_range(0..=used);
                    arena.free_part(page + from..page + used);
                }
                "free part"
            }
            _ => {
                arena.tidy(self.random.random_range(1..PAGES));
                "tidy"
            }
        };
        *self.counts.entry(name).or_default() += 1;
    }
}

impl LinesPlayer {
    /// An allocation is being freed, of this server or of another one; or one of this server is free at last.
    fn free_scattered(&mut self, arena: &mut Arena) -> &'static str {
        let freeing: Vec<_> = lines_state(arena).freeing.into_keys().collect();
        let own: Vec<_> =
            freeing.iter().copied().filter(|page| *page < ADOPTED_PAGES_FROM).collect();
        let is_end = self.random.random_bool(0.6);
        let Some(first) = self.pick(&own).filter(|_| is_end) else {
            let adopted = Self::lines(arena, |line| {
                arena.pages.entry(line).state == LineEntry::ADOPTED
                    && arena.pages.state(line * LINE_PAGES).role() == Use::Head
            });
            let live = self.live.iter().map(|(access, _)| access.location.page());
            let all: Vec<_> = live.chain(adopted).filter(|page| !freeing.contains(page)).collect();
            if let Some(page) = self.pick(&all) {
                arena.begin_freeing(page);
            }
            return "begin freeing";
        };
        let at = self.live.iter().position(|(access, _)| access.location.page() == first);
        let (_, length) = self.live[at.expect("it is live")];
        let pages = first..first + u64::from(length);
        let mut lines = pages.start / LINE..pages.end.div_ceil(LINE);
        // The responder waits for what is on its way.
        if lines.any(|line| arena.pages.entry(line as usize).state == LineEntry::STAGED) {
            return "end freeing, not yet";
        }
        arena.end_freeing(first);
        self.live.swap_remove(at.expect("it is live"));
        // The others have freed their parts.
        for (line, record) in &mut self.records {
            for (page, record) in (*line..).zip(record.iter_mut()) {
                if pages.contains(&page) {
                    record.part = Part::Free;
                }
            }
        }
        "end freeing"
    }
}

fn floors(arena: &Arena) -> [u64; 2] {
    [arena.lease_floor(), arena.last_migration()]
}

/// What was taken over can be used on: nothing of it changes, and no page of a line that is elsewhere is allocated.
fn check_lines(mut arena: Arena, given: &HashSet<(u64, u16, u8)>) {
    assert_eq!(arena.pages.check_lines(), Ok(()));
    let usage = arena.arena_usage();
    assert_eq!(usage.used_pages, used_pages(&arena));
    let found = lines_state(&arena);
    let mut places = Vec::new();
    while let Some(ranges) = arena.lines_mut().reserve(1) {
        let place = ranges[0].start;
        assert!(found.placed.iter().all(|(page, _)| *page != place), "place {place} is used");
        places.push(ranges[0].clone());
    }
    places.into_iter().for_each(|place| arena.release(place));
    let mut pages = 0;
    while let Ok(Grant { location, tag }) = arena.create(SPACE, 1) {
        let colour = (location.page(), location.generation().number(), tag.0);
        assert!(!given.contains(&colour), "{colour:?} was given out before");
        assert!(arena.read(location.page(), 0..PAGE_BYTES).iter().all(|byte| *byte == 0));
        arena.write(location.page(), 0, &[0xaa; PAGE_BYTES]);
        pages += 1;
        let line = location.page() as usize / LINE_PAGES;
        assert!(arena.pages.is_here(line), "line {line} is elsewhere");
    }
    assert_eq!(pages, usage.free_pages, "no memory is lost");
    let after = lines_state(&arena);
    for (page, state) in &found.pages {
        assert!(after.pages.get(page) == Some(state), "page {page} changed");
    }
    for (page, placed) in found.placed {
        if let Placed::Staged(home, _) = placed {
            arena.adopt(page);
            let adopted = (home.node == ELSEWHERE).then_some(Placed::Adopted(home));
            let mut now = None;
            arena.placed(&mut |at, placed| now = if at == page { Some(placed) } else { now });
            assert_eq!(now, adopted);
        }
    }
    let adopted = lines_state(&arena);
    for (page, state) in &found.pages {
        assert!(adopted.pages.get(page) == Some(state), "page {page} changed");
    }
}

/// One in this many takeovers is cut, after each of its stores.
const LINES_TAKEOVER_EVERY: usize = 61;

fn play_lines(seed: u64, step_count: usize) -> (usize, usize, BTreeMap<&'static str, usize>) {
    let (file, copy) = (File::new(&format!("lines-{seed}")), File::new(&format!("l-image-{seed}")));
    let kept = file.open();
    let base = kept.start();
    let mut reserved = kept.assign(holder()).expect("it is empty");
    let mut arena = Arena::open(&config(), reserved.parts.remove(0)).expect("it is empty");
    drop(copy.open().assign(holder()).expect("it is empty"));
    let mut player = LinesPlayer::new(seed);
    let mut image = fs::read(&file.0).expect("it is there");
    let (mut cuts, mut takeover_cuts) = (0, 0);
    for step in 0..step_count {
        let (before, floors_before) = (lines_state(&arena), floors(&arena));
        let given = player.given.clone();
        log::begin();
        player.step(&mut arena);
        let stores = log::end();
        let (after, floors_after) = (lines_state(&arena), floors(&arena));
        for (number, (address, bytes)) in stores.iter().enumerate() {
            let offset = address - base;
            image[offset..offset + bytes.len()].copy_from_slice(bytes);
            cuts += 1;
            let (next, stores_of_next) = recovered(&copy, &image);
            let (found, floors_found) = (lines_state(&next), floors(&next));
            assert!(
                found == before || found == after,
                "seed {seed}: step {step} was cut after store {number} of {}, and the next process \
                 has neither what was before nor what came after",
                stores.len()
            );
            let never_fall = floors_before.iter().zip(&floors_found).all(|(low, now)| low <= now)
                && floors_found.iter().zip(&floors_after).all(|(now, high)| now <= high);
            assert!(never_fall, "seed {seed}: step {step}: {floors_found:?}");
            // An allowance is never there without its migration's id.
            let highest = found.allowances.iter().map(|(allowance, _)| allowance.migration).max();
            assert!(highest <= Some(floors_found[1]), "seed {seed}: step {step}");
            check_lines(next, &given);
            if cuts % LINES_TAKEOVER_EVERY == 0 {
                let mut image = image.clone();
                for (offset, bytes) in &stores_of_next {
                    image[*offset..*offset + bytes.len()].copy_from_slice(bytes);
                    let (after_next, _) = recovered(&copy, &image);
                    assert!(lines_state(&after_next) == found, "seed {seed}: step {step}");
                    check_lines(after_next, &given);
                    takeover_cuts += 1;
                }
            }
        }
        assert!(image == fs::read(&file.0).expect("it is there"), "a store was not logged");
    }
    (cuts, takeover_cuts, player.counts)
}

#[test]
fn lines_are_at_one_server_whenever_a_process_is_killed() {
    let (mut cuts, mut takeover_cuts, mut counts) = (0, 0, BTreeMap::<_, usize>::new());
    for seed in 0..8 {
        let (more, takeover_more, of_seed) = play_lines(seed, 150);
        (cuts, takeover_cuts) = (cuts + more, takeover_cuts + takeover_more);
        of_seed.into_iter().for_each(|(name, count)| *counts.entry(name).or_default() += count);
    }
    println!("{cuts} cuts, {takeover_cuts} of them in a process that takes over: {counts:?}");
    assert!(cuts > 8_000 && takeover_cuts > 6_000, "only {cuts} and {takeover_cuts} cuts");
}

/// An own line comes back, is complete, and nobody knows whose it is: then the process ends.
#[test]
fn free_pages_of_a_line_in_doubt_are_not_allocated() {
    let file = File::new("doubt");
    let mut reserved = file.open().assign(holder()).expect("it is empty");
    let mut arena = Arena::open(&config(), reserved.parts.remove(0)).expect("it is empty");
    let grant = arena.create(SPACE, 3).expect("it is empty");
    arena.complete(grant.location);
    let record = arena.line(0).expect("it is whole").pages;
    let name = HomeLine { node: NodeId(3), generation: generation(5), first_page: 0 };
    let taken = Taken { migration: 8, epoch: 3 };
    arena.withhold(0..LINE, true);
    arena.give(0);
    arena.clear_given(0..LINE);
    assert!(arena.reserve_own(0..LINE));
    let unserved = record.map(|page| LinePage { space: Space(77), ..page });
    let bytes = vec![5; LINE_BYTES];
    assert_eq!(arena.stage_with(0, (name, taken), &unserved, &bytes), Err(StageError::Page(0)));
    assert_eq!(arena.stage_with(0, (name, taken), &record, &bytes), Ok(()));
    drop(arena);
    let mut reserved = file.open().assign(holder()).expect("it is its own");
    let mut arena = Arena::open(&config(), reserved.parts.remove(0)).expect("it is not damaged");
    assert_eq!(arena.arena_usage().used_pages, LINE);
    let mut count = 0;
    while let Ok(grant) = arena.create(SPACE, 1) {
        assert!(grant.location.page() >= LINE, "the line may be another server's");
        count += 1;
    }
    assert_eq!(count, u64::from(PAGES) - LINE);
    arena.drop_staged(0);
    arena.release(0..LINE);
    assert_eq!(arena.arena_usage().free_pages, LINE);
}
