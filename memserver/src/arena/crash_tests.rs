//! A process that keeps its memory is killed after each of its stores; the next one takes over.

use std::{
    collections::{BTreeMap, HashSet},
    fs,
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use rand::{Rng, SeedableRng, rngs::StdRng};

use super::*;
use crate::{
    ArenaFile, Claim,
    kept::{Holder, Kept, PageRecord, redo, stores::log},
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

fn state(arena: &Arena, incomplete: &HashSet<u64>) -> State {
    let mut known = Known::new();
    arena.survey(0, PAGES, &mut |allocation| {
        let Grant { location, tag } = allocation.grant;
        if incomplete.contains(&location.bits()) {
            return true;
        }
        let pages = location.page()..location.page() + u64::from(allocation.pages);
        let versions = pages.clone().map(|page| arena.version(page)).collect();
        let bytes = pages.flat_map(|page| arena.read(page, 0..PAGE_BYTES).to_vec()).collect();
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
            62..68 => arena.write(page, 0, &data),
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
    drop(arena);
    let whole = fs::read(&file.0).expect("it is there");
    let (redo, states) = file.options().layout().expect("it fits").places_of(0);
    let (mut refused, mut used) = (0, 0);
    for _ in 0..4000 {
        let mut image = whole.clone();
        for _ in 0..player.random.random_range(1..4) {
            let at = match player.random.random_range(0..3) {
                0 => player.random.random_range(0..256),
                1 => redo + player.random.random_range(0..512),
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
        (0..30).for_each(|_| more.step(&mut arena));
    }
    println!("{refused} refused, {used} used");
    assert!(refused > 500 && used > 500, "{refused} refused, {used} used");
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
