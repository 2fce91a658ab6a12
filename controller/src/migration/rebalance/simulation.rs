//! A rack that is only computed: servers, lines with rates, a switch that counts, and the decisions of [`super`].
//!
//! Time passes in steps of a second, and every run with the same seed is the same.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bluebridge_wire::NodeId;
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};

use super::block::LINE;
use super::{
    Block, Count, Held, Move, PART_MAX, Places, Rate, Rates, Reading, Rebalancer, Server, places,
};
use crate::migration::{ContentsRecord, GenerationRange, PageMap};

/// What is simulated.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The servers.
    pub servers: u16,
    /// Lines of each server that are allocated; as many are free.
    pub lines: u64,
    /// Packets per second to all servers.
    pub rate: f64,
    /// The exponent of the Zipf distribution of the traffic over all lines: the first server has the hottest ones.
    pub exponent: f64,
    /// After which time the traffic of each server is that of the next one; never without any.
    pub shifts: Option<Duration>,
    /// The time over which rates are learned.
    pub window: Duration,
    /// How long it is simulated.
    pub time: Duration,
    /// What is random follows from it.
    pub seed: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            servers: 8,
            lines: 4096,
            rate: 100_000.0,
            exponent: 0.99,
            shifts: None,
            window: super::WINDOW,
            time: Duration::from_secs(3600),
            seed: 1,
        }
    }
}

/// What happened.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The hottest server's share of the packets of a second, over the first window.
    pub before: f64,
    /// As before, over the last quarter of the time; `None` if that is less than a step.
    pub after: Option<f64>,
    /// The share of the hottest line: no server that has it can have less.
    pub hottest_line: f64,
    /// Moves, and their pages.
    pub move_count: usize,
    /// See [`Self::move_count`].
    pub page_count: u64,
    /// Lines that moved to a server that had given them away before.
    pub return_count: usize,
    /// When the last move began.
    pub last_move: Option<Duration>,
    /// The most entries that counted at the same time.
    pub entries_most: usize,
    /// The most moves that were open at the same time.
    pub open_most: usize,
    /// Every move, with the time at which it began.
    pub moves: Vec<(Duration, Move)>,
}

/// A second.
const STEP: Duration = Duration::from_secs(1);

/// Pages per second of a move.
const SPEED: u64 = 16_384;

/// The generation of all contents.
const GENERATION: u16 = 7;

/// Places of a generation of a home, as a power of two.
const HOME_ORDER: u32 = 36;

/// The first place of all contents.
const FIRST: u64 = (GENERATION as u64) << HOME_ORDER;

/// Where a line was first, its present server, and the ones before.
struct Line {
    home: u16,
    first_page: u64,
    at: u16,
    before: Vec<u16>,
}

/// The entries of the switch: prefixes of pointers, and the servers to which they lead.
#[derive(Debug, Default)]
struct Directory(BTreeMap<Block, u16>);

impl Directory {
    /// The longest entry for a place that is at most so long: of a block of so many places at least.
    fn lookup(&self, home: u16, place: u64, order: u32) -> Option<(Block, u16)> {
        (order..=HOME_ORDER).find_map(|order| {
            let block = Block { home: NodeId(home), first: place >> order << order, order };
            self.0.get(&block).map(|at| (block, *at))
        })
    }
}

/// The aligned blocks of lines that are one after the other.
fn aligned(home: u16, places: Places) -> Vec<Block> {
    let (mut blocks, mut first) = (Vec::new(), places.start);
    while first < places.end {
        let most = (places.end - first).ilog2();
        let order = first.trailing_zeros().min(most);
        blocks.push(Block { home: NodeId(home), first, order });
        first += 1 << order;
    }
    blocks
}

struct World {
    settings: Settings,
    rng: SmallRng,
    lines: Vec<Line>,
    shares: Vec<f64>,
    /// The blocks that are to be counted, and at which servers.
    counted: Vec<(NodeId, Block)>,
    /// What the switch counted, and the counter of each line.
    directory: Directory,
    counters: Vec<(Block, u64)>,
    counter_of: Vec<usize>,
    totals: BTreeMap<u16, u64>,
    rates: Rates<Block>,
    server_rates: Rates<u16>,
    /// What servers have, and their free pages.
    held: BTreeMap<u16, (Vec<Held>, u64)>,
    open: Vec<(Duration, Move)>,
}

const fn contents(node: u16) -> ContentsRecord {
    ContentsRecord { node, generation: GENERATION }
}

const GENERATIONS: GenerationRange = GenerationRange { first: GENERATION, last: GENERATION };

impl World {
    fn new(settings: Settings) -> Self {
        let lines: Vec<Line> = (1..=settings.servers)
            .flat_map(|home| {
                let of = move |line| Line {
                    home,
                    first_page: line * LINE,
                    at: home,
                    before: Vec::new(),
                };
                (0..settings.lines).map(of)
            })
            .collect();
        let weights: Vec<f64> =
            (1..=lines.len()).map(|rank| (rank as f64).powf(-settings.exponent)).collect();
        let all: f64 = weights.iter().sum();
        let mut world = Self {
            settings,
            rng: SmallRng::seed_from_u64(settings.seed),
            lines,
            shares: weights.into_iter().map(|weight| weight / all).collect(),
            counted: Vec::new(),
            directory: Directory::default(),
            counters: Vec::new(),
            counter_of: Vec::new(),
            totals: BTreeMap::new(),
            rates: Rates::default(),
            server_rates: Rates::default(),
            held: BTreeMap::new(),
            open: Vec::new(),
        };
        world.hold();
        world.install(Vec::new());
        world
    }

    /// Notes what servers have.
    fn hold(&mut self) {
        self.held = (1..=self.settings.servers).map(|node| (node, self.held_by(node))).collect();
    }

    fn held_by(&self, node: u16) -> (Vec<Held>, u64) {
        let mut of_homes: BTreeMap<u16, PageMap<()>> = BTreeMap::new();
        let mut used = 0;
        for line in self.lines.iter().filter(|line| line.at == node) {
            let pages = line.first_page..line.first_page + LINE;
            of_homes.entry(line.home).or_default().insert(pages, ());
            used += LINE;
        }
        let held = of_homes.into_iter().map(|(home, own)| {
            let rows = own.iter().flat_map(|(pages, ())| places(GENERATIONS, pages));
            Held { home: contents(home), rows: rows.collect() }
        });
        (held.collect(), self.total_pages().saturating_sub(used))
    }

    const fn total_pages(&self) -> u64 {
        2 * self.settings.lines * LINE
    }

    /// Gives homes, what moved, and blocks that are to be counted their entries: the longest prefix of a line counts it.
    /// What is counted anew begins with nothing.
    fn install(&mut self, counted: Vec<(NodeId, Block)>) {
        let before: BTreeMap<Block, u64> = self.counters.drain(..).collect();
        let home_of = |home| Block { home: NodeId(home), first: FIRST, order: HOME_ORDER };
        let mut directory =
            Directory((1..=self.settings.servers).map(|home| (home_of(home), home)).collect());
        let mut moved: BTreeMap<u16, PageMap<u16>> = BTreeMap::new();
        for line in self.lines.iter().filter(|line| line.at != line.home) {
            let places = FIRST + line.first_page..FIRST + line.first_page + LINE;
            moved.entry(line.home).or_default().insert(places, line.at);
        }
        for (home, rows) in &moved {
            for (places, at) in rows.iter() {
                let blocks = aligned(*home, places.clone()).into_iter();
                directory.0.extend(blocks.map(|block| (block, *at)));
            }
        }
        // An entry that only counts leads where the next shorter one does, and has to lead to the server.
        let counting = counted.iter().filter_map(|(server, block)| {
            let (_, at) = directory.lookup(block.home.0, block.first, block.order)?;
            (at == server.0).then_some((*block, at))
        });
        directory.0.extend(counting.collect::<Vec<_>>());
        let numbers: BTreeMap<Block, usize> = directory.0.keys().copied().zip(0..).collect();
        let counter_of = self.lines.iter().map(|line| {
            let found = directory.lookup(line.home, FIRST + line.first_page, LINE.ilog2());
            let (block, at) = found.unwrap_or((home_of(line.home), line.home));
            debug_assert_eq!(at, line.at, "{block:?}");
            numbers.get(&block).copied().unwrap_or_default()
        });
        self.counter_of = counter_of.collect();
        let counter = |block: &Block| (*block, before.get(block).copied().unwrap_or_default());
        self.counters = directory.0.keys().map(counter).collect();
        (self.directory, self.counted) = (directory, counted);
    }

    /// The share of a line at some time.
    fn share(&self, line: usize, now: Duration) -> f64 {
        let count = self.shares.len();
        let shifts = self.settings.shifts.map_or(0, |every| now.as_secs() / every.as_secs().max(1));
        let by = shifts % u64::from(self.settings.servers.max(1)) * self.settings.lines;
        let by = usize::try_from(by).unwrap_or_default();
        self.shares[(line + count - by) % count]
    }

    /// The packets of a second; returns those of each server.
    fn count(&mut self, now: Duration) -> BTreeMap<u16, u64> {
        let mut sums: BTreeMap<u16, u64> = (1..=self.settings.servers).map(|it| (it, 0)).collect();
        for index in 0..self.lines.len() {
            let packets = self.settings.rate * self.share(index, now);
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "packets of a line and a second"
            )]
            let packets = (packets * self.rng.random_range(0.9..1.1)
                + self.rng.random_range(0.0..1.0)) as u64;
            let (_, count) = &mut self.counters[self.counter_of[index]];
            *count += packets;
            *sums.entry(self.lines[index].at).or_default() += packets;
        }
        sums.iter().for_each(|(node, sum)| *self.totals.entry(*node).or_default() += sum);
        sums
    }

    fn reading(&self, start: Instant, now: Duration, entries_max: usize) -> Reading {
        let window = self.settings.window;
        let unknown = Rate { per_second: 0.0, is_learned: false };
        let server_rates: BTreeMap<_, _> = self.server_rates.iter(window).collect();
        let servers = self.held.iter().map(|(node, (held, free_pages))| Server {
            id: NodeId(*node),
            name: format!("s{node}"),
            space: 1,
            free_pages: *free_pages,
            total_pages: self.total_pages(),
            rate: server_rates.get(node).copied().unwrap_or(unknown),
            may_give: true,
            may_take: true,
            contents: Some(contents(*node)),
            held: held.clone(),
            allocated: Vec::new(),
        });
        let counts = self.rates.iter(window).filter_map(|(block, rate)| {
            let at = self.directory.0.get(block).filter(|_| block.order < HOME_ORDER)?;
            Some(Count { block: *block, at: NodeId(*at), rate })
        });
        Reading {
            now: start + now,
            window,
            servers: servers.collect(),
            counts: counts.collect(),
            moving: self.open.iter().flat_map(|(_, of)| of.pages().collect::<Vec<_>>()).collect(),
            open_count: self.open.len(),
            entries_max,
        }
    }

    /// Completes moves that are over; returns how many lines came back to a server that had given them away.
    fn complete(&mut self, now: Duration) -> usize {
        let (over, open) =
            std::mem::take(&mut self.open).into_iter().partition(|(until, _)| *until <= now);
        self.open = open;
        let over: Vec<(Duration, Move)> = over;
        let (mut returns, has_moved) = (0, !over.is_empty());
        for (_, of) in over {
            let taker = of.taker.0;
            for line in self.lines.iter_mut().filter(|line| line.home == of.home.node) {
                let is_part = of.rows.iter().any(|row| row.contains(&line.first_page));
                if is_part && line.at == of.giver.0 {
                    returns += usize::from(line.before.contains(&taker));
                    line.before.push(line.at);
                    line.at = taker;
                }
            }
        }
        if has_moved {
            self.hold();
            self.install(self.counted.clone());
        }
        returns
    }
}

/// Runs a simulation.
#[must_use]
pub fn run(settings: Settings) -> Outcome {
    let mut world = World::new(settings);
    let mut rebalancer = Rebalancer::default();
    let start = Instant::now();
    let (mut now, entries_max) = (Duration::ZERO, super::ENTRIES_MAX);
    let (mut first, mut last) = (Vec::new(), Vec::new());
    let mut outcome = Outcome {
        before: 0.0,
        after: None,
        hottest_line: world.shares.first().copied().unwrap_or_default(),
        move_count: 0,
        page_count: 0,
        return_count: 0,
        last_move: None,
        entries_most: 0,
        open_most: 0,
        moves: Vec::new(),
    };
    while now < settings.time {
        let sums = world.count(now);
        let (share, span) = (hottest(&sums), settings.window);
        if now < span {
            first.push(share);
        }
        if now + settings.time / 4 >= settings.time {
            last.push(share);
        }
        now += STEP;
        outcome.return_count += world.complete(now);
        world.rates.note(settings.window, start + now, world.counters.iter().copied());
        world.server_rates.note(settings.window, start + now, world.totals.clone());
        for made in rebalancer.step(&world.reading(start, now, entries_max), true) {
            debug_assert!(made.page_count() <= PART_MAX, "{made:?}");
            let giver = Some(made.giver);
            made.pages().for_each(|pages| rebalancer.note_moved(start + now, pages, giver));
            outcome.move_count += 1;
            outcome.page_count += made.page_count();
            outcome.last_move = Some(now);
            let until =
                now + STEP + STEP * u32::try_from(made.page_count() / SPEED).unwrap_or(u32::MAX);
            outcome.moves.push((now, made.clone()));
            world.open.push((until, made));
        }
        outcome.open_most = outcome.open_most.max(world.open.len());
        let counted: Vec<_> = rebalancer.counted_at().collect();
        outcome.entries_most = outcome.entries_most.max(counted.len());
        if counted != world.counted {
            world.install(counted);
        }
    }
    outcome.before = mean(&first);
    outcome.after = (!last.is_empty()).then(|| mean(&last));
    outcome
}

fn mean(shares: &[f64]) -> f64 {
    shares.iter().sum::<f64>() / shares.len().max(1) as f64
}

/// The share of the hottest server.
fn hottest(packets: &BTreeMap<u16, u64>) -> f64 {
    let all: u64 = packets.values().sum();
    packets.values().copied().max().unwrap_or_default() as f64 / all.max(1) as f64
}
