//! Decides which pages move so that no server is full or has most of the traffic while others are not.
//!
//! Pure: its input are readings ([`Reading`]) with the time, its output are blocks that should be counted and moves, each
//! with a reason. `core/rebalance.rs` makes the readings and carries the decisions out.
//!
//! * `rates`: rates from counters; `block`: what is counted together, and how it is split; `held`: what servers serve.
//! * `simulation`: a rack that is only computed, for tests and `bluebridge experiment rebalance`.
//!
//! Work is done in rounds. If a server has too much of the traffic for a whole window, its pages are counted in up to 16
//! blocks. The hottest blocks are split again until they are worth moving. Then some moves are decided at once, and the
//! next round begins when they are over and the rates were learned anew.

mod block;
mod held;
mod rates;
pub mod simulation;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::time::{Duration, Instant};

use bluebridge_wire::NodeId;
use serde::{Deserialize, Serialize};

use super::ContentsRecord;
use block::LINE;
pub use block::{Block, Pages, Places, places};
pub use rates::{Rate, Rates};

/// The time over which rates are learned, if an operator does not choose it.
pub const WINDOW: Duration = Duration::from_secs(30);

/// The shortest and the longest window.
pub const WINDOW_MIN: Duration = Duration::from_secs(1);
/// See [`WINDOW_MIN`].
pub const WINDOW_MAX: Duration = Duration::from_secs(3600);

/// The most entries of a switch that only count.
pub const ENTRIES_MAX: usize = 256;

/// The most own migrations that are open at the same time.
pub const OPEN_MAX: usize = 2;

/// The most moves of a round.
pub const MOVES_MAX: usize = 8;

/// The most pages of a move.
pub const PART_MAX: u64 = 4096;

/// How many pages may begin to move per second, and at once.
const PAGES_PER_SECOND: f64 = 1024.0;
const PAGES_AT_ONCE: f64 = 8192.0;

/// A server is too hot above this multiple of the mean, until it is below the second one.
const HOT: f64 = 1.5;
const WARM: f64 = 1.2;

/// A server is too full if less than this share of its memory is free, until more than the second one is.
const FULL: f64 = 0.1;
const SPARE: f64 = 0.2;

/// The share of its memory that must stay free at a server that takes pages of a full one.
const ROOM: f64 = 0.3;

/// Packets per second and server below which it does not matter who has them.
const IDLE: f64 = 20.0;

/// A move must relieve its giver of this share of the mean at least.
const GAIN: f64 = 0.05;

/// Packets that moving a page costs, and how many times as many it must have led elsewhere before it may move again.
const PACKETS_PER_PAGE: f64 = 2.0;
const WORTH: f64 = 16.0;

/// For how many windows pages stay where they moved; doubled with every further move, up to the second.
const STAY_WINDOWS: u32 = 4;
const STAY_DOUBLINGS: u32 = 6;

/// Why nothing moves, if all other servers are drained, not connected, or refused pages a short time ago.
const NO_TAKER: &str = "no other server can take pages now";

/// Windows after which rates no longer contain what was before.
const SETTLE_WINDOWS: u32 = 2;

/// That an operator lets the controller move memory by itself.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct RebalanceRecord {
    /// The time over which rates are learned.
    pub window_ms: u64,
}

impl RebalanceRecord {
    /// The time over which rates are learned.
    #[must_use]
    pub fn window(self) -> Duration {
        Duration::from_millis(self.window_ms).clamp(WINDOW_MIN, WINDOW_MAX)
    }
}

/// Places that a server serves of a home.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Held {
    /// The home.
    pub home: ContentsRecord,
    /// The places, whole lines.
    pub rows: Vec<Places>,
}

/// A memory server.
#[derive(Clone, Debug)]
pub struct Server {
    /// Its node.
    pub id: NodeId,
    /// Its name.
    pub name: String,
    /// Pages move only between servers of a space.
    pub space: u16,
    /// Free pages, without what is promised to it.
    pub free_pages: u64,
    /// All its pages.
    pub total_pages: u64,
    /// Packets to it.
    pub rate: Rate,
    /// Whether pages may leave it.
    pub may_give: bool,
    /// Whether it may get pages.
    pub may_take: bool,
    /// What it serves of its own. Clients that know where pages moved send to the endpoint of their server, and that is
    /// counted for the server only.
    pub held: Option<Held>,
    /// Pages there that are known to be allocated. Needed only if it is full.
    pub allocated: Vec<Pages>,
}

impl Server {
    fn is_below(&self, free_pages: u64, share: f64) -> bool {
        (free_pages as f64) < self.total_pages as f64 * share
    }
}

/// What an entry counted, without what longer ones did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Count {
    /// The places.
    pub block: Block,
    /// The server to which it leads.
    pub at: NodeId,
    /// Packets.
    pub rate: Rate,
}

/// What is known at some time.
#[derive(Clone, Debug)]
pub struct Reading {
    /// The time.
    pub now: Instant,
    /// The time over which rates are learned.
    pub window: Duration,
    /// Every memory server.
    pub servers: Vec<Server>,
    /// What entries counted.
    pub counts: Vec<Count>,
    /// Pages in open migrations.
    pub moving: Vec<Pages>,
    /// Own migrations that are open.
    pub open_count: usize,
    /// The most entries that may count.
    pub entries_max: usize,
}

impl Reading {
    fn server(&self, id: NodeId) -> Option<&Server> {
        self.servers.iter().find(|server| server.id == id)
    }

    /// How long pages stay that moved so many times.
    fn stay(&self, moves: u32) -> Duration {
        let doublings = moves.saturating_sub(1).min(STAY_DOUBLINGS);
        self.window * (STAY_WINDOWS << doublings)
    }

    /// Whether moving pages costs little beside the traffic that moves with them.
    fn is_worth(&self, pages: u64, rate: f64) -> bool {
        rate * self.stay(1).as_secs_f64() >= WORTH * PACKETS_PER_PAGE * pages as f64
    }
}

/// A move of pages.
#[derive(Clone, Debug, PartialEq)]
pub struct Move {
    /// Their home.
    pub home: ContentsRecord,
    /// Rows of pages, as the home numbers them.
    pub rows: Vec<Range<u64>>,
    /// Who serves them.
    pub giver: NodeId,
    /// Who is to.
    pub taker: NodeId,
    /// Packets per second that lead there.
    pub rate: f64,
    /// Why, in a sentence.
    pub reason: String,
}

impl Move {
    /// The number of pages.
    #[must_use]
    pub fn page_count(&self) -> u64 {
        self.rows.iter().map(|row| row.end - row.start).sum()
    }

    /// Its first rows, and the others if there are any.
    fn divided(&self, row_count: usize) -> (Self, Option<Self>) {
        let (first, others) = self.rows.split_at(row_count.min(self.rows.len()));
        let all = self.page_count().max(1) as f64;
        let part = |rows: &[Range<u64>]| {
            let pages: u64 = rows.iter().map(|row| row.end - row.start).sum();
            Self { rows: rows.to_vec(), rate: self.rate * pages as f64 / all, ..self.clone() }
        };
        (part(first), (!others.is_empty()).then(|| part(others)))
    }

    /// The pages that move.
    pub fn pages(&self) -> impl Iterator<Item = Pages> + '_ {
        self.rows.iter().map(|pages| Pages { home: self.home, pages: pages.clone() })
    }
}

/// The hottest server's share of the packets to the servers of a space.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shares {
    /// The space.
    pub space: u16,
    /// Now.
    pub before: f64,
    /// After the moves.
    pub after: f64,
}

/// What would be done.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Moves, in their order.
    pub moves: Vec<Move>,
    /// What is expected of them, for each space with traffic.
    pub shares: Vec<Shares>,
    /// Whether counting goes on before moves from some server are decided.
    pub is_counting: bool,
    /// Why a server that is too hot or too full is not relieved.
    pub problems: Vec<String>,
    /// Blocks to split, and at which server.
    splits: Vec<(Tree, Block)>,
    /// Servers whose pages are to be counted from the beginning.
    recounts: Vec<NodeId>,
}

/// Whose places a tree of blocks divides.
type Tree = (NodeId, ContentsRecord);

/// Pages that moved.
#[derive(Clone, Debug)]
struct Stay {
    pages: Pages,
    moves: u32,
    since: Instant,
}

impl Stay {
    /// Whether they may not move yet.
    fn holds(&self, reading: &Reading) -> bool {
        reading.now.saturating_duration_since(self.since) < reading.stay(self.moves)
    }
}

/// The loads that would follow from the moves so far.
struct Loads<'a> {
    reading: &'a Reading,
    rates: BTreeMap<NodeId, f64>,
    free: BTreeMap<NodeId, u64>,
}

impl<'a> Loads<'a> {
    fn new(reading: &'a Reading) -> Self {
        let servers = || reading.servers.iter();
        let rates = servers().map(|it| (it.id, it.rate.per_second)).collect();
        Self { reading, rates, free: servers().map(|it| (it.id, it.free_pages)).collect() }
    }

    fn rate(&self, id: NodeId) -> f64 {
        self.rates.get(&id).copied().unwrap_or_default()
    }

    fn free(&self, id: NodeId) -> u64 {
        self.free.get(&id).copied().unwrap_or_default()
    }

    /// The servers of a space that take part. Others have traffic that no move can change.
    fn of_space(&self, space: u16) -> impl Iterator<Item = &'a Server> {
        let takes_part = |server: &&Server| server.may_give || server.may_take;
        self.reading.servers.iter().filter(takes_part).filter(move |server| server.space == space)
    }

    fn total(&self, space: u16) -> f64 {
        self.of_space(space).map(|server| self.rate(server.id)).sum()
    }

    fn mean(&self, space: u16) -> f64 {
        self.total(space) / self.of_space(space).count().max(1) as f64
    }

    /// The hottest server's share, if there is traffic.
    fn share(&self, space: u16) -> Option<f64> {
        let total = self.total(space);
        let most = self.of_space(space).map(|server| self.rate(server.id)).fold(0.0, f64::max);
        (total > 0.0).then(|| most / total)
    }

    /// Whether the taker is then not too hot.
    fn stays_warm(&self, taker: &Server, rate: f64) -> bool {
        self.rate(taker.id) + rate <= WARM * self.mean(taker.space)
    }

    /// Whether the taker is then not hotter than the giver, or not too hot.
    fn stays_cool(&self, giver: &Server, taker: NodeId, rate: f64) -> bool {
        let most = (self.rate(giver.id) - rate).max(WARM * self.mean(giver.space));
        self.rate(taker) + rate <= most
    }

    fn apply(&mut self, made: &Move) {
        let pages = made.page_count();
        *self.rates.entry(made.giver).or_default() -= made.rate;
        *self.rates.entry(made.taker).or_default() += made.rate;
        let free = self.free.entry(made.giver).or_default();
        *free = free.saturating_add(pages);
        let free = self.free.entry(made.taker).or_default();
        *free = free.saturating_sub(pages);
    }
}

/// The decisions, and what they are based on.
#[derive(Clone, Debug, Default)]
pub struct Rebalancer {
    /// Since when servers are above [`HOT`].
    above: BTreeMap<NodeId, Instant>,
    hot: BTreeSet<NodeId>,
    full: BTreeSet<NodeId>,
    /// The blocks that are counted: they divide what the server has of the home.
    trees: BTreeMap<Tree, Vec<Block>>,
    stays: Vec<Stay>,
    /// Servers that get nothing for some time.
    paused: BTreeMap<NodeId, Instant>,
    /// Moves that were decided and have not begun.
    waiting: VecDeque<Move>,
    /// The next round begins after this.
    settled_at: Option<Instant>,
    /// Pages that may begin to move.
    allowance: f64,
    allowed_at: Option<Instant>,
    plan: Plan,
}

impl Rebalancer {
    /// Every block that should be counted.
    pub fn counted(&self) -> impl Iterator<Item = Block> + '_ {
        self.trees.values().flatten().copied()
    }

    /// Every block that should be counted, with the server whose packets are of interest.
    pub fn counted_at(&self) -> impl Iterator<Item = (NodeId, Block)> + '_ {
        let of = |((server, _), blocks): (&Tree, &Vec<Block>)| {
            let server = *server;
            blocks.clone().into_iter().map(move |block| (server, block))
        };
        self.trees.iter().flat_map(of)
    }

    /// Servers that have too much of the traffic.
    pub fn hot(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.hot.iter().copied()
    }

    /// Servers that have too little free memory.
    pub fn full(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.full.iter().copied()
    }

    /// Moves that were decided and have not begun.
    pub fn waiting(&self) -> impl Iterator<Item = &Move> {
        self.waiting.iter()
    }

    /// Whether rates are not known well enough yet to decide anything.
    #[must_use]
    pub fn is_learning(&self, reading: &Reading) -> bool {
        let unknown = |server: &Server| server.may_give && !server.rate.is_learned;
        let may_be_hot = self.above.keys().any(|id| !self.hot.contains(id));
        reading.servers.iter().any(unknown) || may_be_hot || self.plan.is_counting
    }

    /// What was last decided, or would be.
    #[must_use]
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Ends counting, and forgets moves that have not begun. Which pages moved is remembered.
    pub fn rest(&mut self) {
        let stays = std::mem::take(&mut self.stays);
        let paused = std::mem::take(&mut self.paused);
        *self = Self { stays, paused, ..Self::default() };
    }

    /// Notes that pages moved, whoever decided it: they stay for some time.
    pub fn note_moved(&mut self, now: Instant, pages: Pages) {
        let (same, others): (Vec<_>, Vec<_>) =
            self.stays.drain(..).partition(|of| of.pages.overlaps(&pages));
        let moves = same.iter().map(|of| of.moves).max().unwrap_or(0).saturating_add(1);
        self.stays = others;
        // What is not part of this move keeps its own time.
        for of in same {
            let Range { start, end } = of.pages.pages;
            let rests = [start..pages.pages.start.min(end), pages.pages.end.max(start)..end];
            for rest in rests.into_iter().filter(|rest| rest.start < rest.end) {
                let pages = Pages { home: of.pages.home, pages: rest };
                self.stays.push(Stay { pages, ..of.clone() });
            }
        }
        self.stays.push(Stay { pages, moves, since: now });
    }

    /// Notes that a server refused pages or lost them: it gets none for some time.
    pub fn note_failed(&mut self, until: Instant, taker: NodeId) {
        self.paused.insert(taker, until);
    }

    /// Decides what to count and to move. Returns the moves that begin now; none if it `may_move` nothing. What cannot
    /// begin is forgotten, and decided anew. The caller notes what really begins ([`Self::note_moved`]).
    pub fn step(&mut self, reading: &Reading, may_move: bool) -> Vec<Move> {
        self.forget(reading);
        self.note_hot(reading);
        self.note_full(reading);
        self.trees.retain(|(server, home), blocks| {
            let Some(held) = reading.server(*server).and_then(|it| held(it, *home)) else {
                return false;
            };
            blocks.retain(|block| block.place_count(&held.rows) > 0);
            // What it has of the home may be more now.
            let counted: u64 = blocks.iter().map(|block| block.place_count(&held.rows)).sum();
            let all: u64 = held.rows.iter().map(|row| row.end - row.start).sum();
            self.hot.contains(server) && counted == all
        });
        if self.counted().count() > reading.entries_max {
            self.trees.clear();
        }
        let now = reading.now;
        if reading.open_count > 0 {
            self.settled_at = Some(now + reading.window * SETTLE_WINDOWS);
        }
        let is_settled = self.settled_at.is_none_or(|at| at <= now);
        if self.waiting.is_empty() && reading.open_count == 0 && is_settled {
            self.plan = self.decide(reading);
            for server in std::mem::take(&mut self.plan.recounts) {
                self.trees.retain(|(of, _), _| *of != server);
            }
            let splits = std::mem::take(&mut self.plan.splits);
            for ((server, home), block) in splits {
                self.split(reading, (server, home), block);
            }
            if may_move {
                self.waiting = self.plan.moves.iter().cloned().collect();
            }
        }
        if may_move { self.begin(reading) } else { Vec::new() }
    }

    /// Forgets what is over.
    fn forget(&mut self, reading: &Reading) {
        let now = reading.now;
        self.paused.retain(|_, until| *until > now);
        // Longer than they stay, so that pages that move again and again stay longer each time.
        let is_remembered =
            |of: &Stay| now.saturating_duration_since(of.since) < reading.stay(of.moves) * 2;
        self.stays.retain(is_remembered);
    }

    fn note_hot(&mut self, reading: &Reading) {
        let loads = Loads::new(reading);
        let mut above = BTreeMap::new();
        let mut hot = BTreeSet::new();
        for server in reading.servers.iter().filter(|server| server.may_give) {
            let (rate, mean) = (server.rate.per_second, loads.mean(server.space));
            let has_others =
                loads.of_space(server.space).any(|it| it.may_take && it.id != server.id);
            let matters = server.rate.is_learned && has_others && mean >= IDLE;
            if matters && self.hot.contains(&server.id) && rate > mean * WARM {
                hot.insert(server.id);
            }
            if matters && rate > mean * HOT {
                let since = self.above.get(&server.id).copied().unwrap_or(reading.now);
                if reading.now.saturating_duration_since(since) >= reading.window {
                    hot.insert(server.id);
                }
                above.insert(server.id, since);
            }
        }
        (self.above, self.hot) = (above, hot);
    }

    fn note_full(&mut self, reading: &Reading) {
        let is_full = |server: &&Server| {
            let least = if self.full.contains(&server.id) { SPARE } else { FULL };
            server.may_give && server.is_below(server.free_pages, least)
        };
        self.full = reading.servers.iter().filter(is_full).map(|server| server.id).collect();
    }

    /// Counts the parts of a block instead of it.
    fn split(&mut self, reading: &Reading, (server, home): Tree, block: Block) {
        let Some(held) = reading.server(server).and_then(|it| held(it, home)) else { return };
        let parts = block.split(&held.rows);
        let all: usize = self.trees.values().map(Vec::len).sum();
        let blocks = self.trees.entry((server, home)).or_default();
        if all + parts.len() <= reading.entries_max.min(ENTRIES_MAX) {
            blocks.retain(|it| *it != block);
            blocks.extend(parts);
        }
    }

    /// The rates of the blocks of a tree, the hottest first; `None` if some are not learned yet.
    fn hottest(
        reading: &Reading,
        (server, _): &Tree,
        blocks: &[Block],
    ) -> Option<Vec<(f64, Block)>> {
        let of_server = || reading.counts.iter().filter(|count| count.at == *server);
        let rate = |block: &Block| {
            let within = || of_server().filter(|count| block.contains(&count.block));
            let own = within().find(|count| count.block == *block)?;
            let sum = within().map(|count| count.rate.per_second).sum();
            own.rate.is_learned.then_some((sum, *block))
        };
        let mut rates: Vec<(f64, Block)> = blocks.iter().map(rate).collect::<Option<_>>()?;
        rates.sort_by(|(one, a), (other, b)| other.total_cmp(one).then(a.cmp(b)));
        Some(rates)
    }

    /// Whether pages may not move now.
    fn is_bound(&self, reading: &Reading, decided: &[Move], pages: &Pages) -> bool {
        let stays = |of: &Stay| of.holds(reading) && of.pages.overlaps(pages);
        self.stays.iter().any(stays)
            || reading.moving.iter().any(|moving| moving.overlaps(pages))
            || decided.iter().flat_map(Move::pages).any(|moving| moving.overlaps(pages))
    }

    /// The first of these pages that may move now, in whole lines.
    fn movable(&self, reading: &Reading, decided: &[Move], pages: &Pages) -> Option<Pages> {
        let decided: Vec<Pages> = decided.iter().flat_map(Move::pages).collect();
        let stays = self.stays.iter().filter(|of| of.holds(reading)).map(|of| &of.pages);
        let bound: Vec<&Range<u64>> = stays
            .chain(&reading.moving)
            .chain(&decided)
            .filter(|of| of.overlaps(pages))
            .map(|of| &of.pages)
            .collect();
        let mut start = pages.pages.start;
        while let Some(of) = bound.iter().find(|of| of.contains(&start)) {
            start = of.end.next_multiple_of(LINE);
        }
        let next = bound.iter().map(|of| of.start).filter(|it| *it > start).min();
        let end = next.map_or(pages.pages.end, |it| (it / LINE * LINE).min(pages.pages.end));
        (start < end).then_some(Pages { home: pages.home, pages: start..end })
    }

    /// Servers that may get pages of another one.
    fn takers<'a>(
        &'a self,
        reading: &'a Reading,
        giver: &'a Server,
    ) -> impl Iterator<Item = &'a Server> {
        reading.servers.iter().filter(move |server| {
            server.may_take
                && server.space == giver.space
                && server.id != giver.id
                && !self.paused.contains_key(&server.id)
        })
    }

    /// Whether its space has no other server.
    fn is_alone(reading: &Reading, server: &Server) -> bool {
        !reading.servers.iter().any(|it| it.space == server.space && it.id != server.id)
    }

    fn decide(&self, reading: &Reading) -> Plan {
        let mut plan = Plan::default();
        let mut loads = Loads::new(reading);
        let mut by_rate: Vec<_> = reading.servers.iter().collect();
        by_rate.sort_by(|one, other| other.rate.per_second.total_cmp(&one.rate.per_second));
        for server in by_rate.iter().filter(|server| self.full.contains(&server.id)) {
            self.make_room(server, &mut loads, &mut plan);
        }
        for server in by_rate.iter().filter(|server| self.hot.contains(&server.id)) {
            self.relieve(server, &mut loads, &mut plan);
        }
        let (before, spaces): (_, BTreeSet<_>) =
            (Loads::new(reading), reading.servers.iter().map(|server| server.space).collect());
        let share = |space: u16| {
            let (before, after) = (before.share(space)?, loads.share(space)?);
            Some(Shares { space, before, after })
        };
        plan.shares = spaces.into_iter().filter_map(share).collect();
        plan
    }

    /// Moves the coldest pages away from a full server.
    fn make_room(&self, giver: &Server, loads: &mut Loads<'_>, plan: &mut Plan) {
        let reading = loads.reading;
        let used = giver.total_pages.saturating_sub(giver.free_pages).max(1) as f64;
        let homes: BTreeSet<_> = giver.allocated.iter().map(|it| it.home).collect();
        // What is counted at it: pages, how many of them are allocated, and their rate.
        let counts: Vec<(Pages, u64, f64)> = reading
            .counts
            .iter()
            .filter(|count| count.at == giver.id)
            .flat_map(|count| {
                let block = count.block.pages().filter(|_| count.rate.is_learned);
                let of_block = homes.iter().filter(|home| home.id() == count.block.home);
                of_block.filter_map(move |home| {
                    let block = Pages { home: *home, pages: block.clone()? };
                    let of = giver.allocated.iter().map(|it| block.common(it)).sum();
                    (of > 0).then_some((block, of, count.rate.per_second))
                })
            })
            .collect();
        // The traffic of a block is that of its allocated pages. Of pages that are not counted, a fair part.
        let rate_of = |pages: &Pages| {
            let (mut covered, mut rate) = (0, 0.0);
            for (block, of, block_rate) in &counts {
                let common = block.common(pages);
                covered += common;
                rate += block_rate * (common as f64 / *of as f64).min(1.0);
            }
            let uncounted = pages.count().saturating_sub(covered) as f64;
            rate + giver.rate.per_second * (uncounted / used).min(1.0)
        };
        if giver.allocated.is_empty() {
            plan.is_counting = true;
            return;
        }
        let mut parts: Vec<(f64, Pages)> = Vec::new();
        for pages in &giver.allocated {
            let Range { start, end } = pages.pages;
            let (mut start, end) = (start / LINE * LINE, end.next_multiple_of(LINE));
            while start < end {
                let next = end.min(start + PART_MAX);
                let part = Pages { home: pages.home, pages: start..next };
                parts.push((rate_of(&part), part));
                start = next;
            }
        }
        parts.sort_by(|(one, _), (other, _)| one.total_cmp(other));
        let mut why = "none of its pages may move now";
        for (_, part) in parts {
            let mut rest = part;
            while let Some(run) = self.movable(reading, &plan.moves, &rest) {
                if !giver.is_below(loads.free(giver.id), SPARE) || plan.moves.len() >= MOVES_MAX {
                    break;
                }
                let most = run.count().min(missing(giver, loads.free(giver.id)));
                // What a taker can get of them, and its free share.
                let offer = |taker: &Server| {
                    let free = loads.free(taker.id);
                    let count = most.min(room(taker, free));
                    let start = run.pages.start;
                    let cut = Pages { home: run.home, pages: start..start + count };
                    let share = free as f64 / taker.total_pages.max(1) as f64;
                    (count > 0).then(|| (share, rate_of(&cut), cut))
                };
                let offers = self
                    .takers(reading, giver)
                    .filter_map(|taker| Some((taker, offer(taker)?)))
                    .filter(|(taker, (_, rate, _))| loads.stays_cool(giver, taker.id, *rate));
                let best = offers.max_by(|(_, (one, ..)), (_, (other, ..))| one.total_cmp(other));
                let Some((taker, (_, rate, cut))) = best else {
                    why = match self.takers(reading, giver).next() {
                        None if Self::is_alone(reading, giver) => "there is no other server",
                        None => NO_TAKER,
                        Some(_) => "no other server has room without being too hot",
                    };
                    break;
                };
                let reason = format!(
                    "{} has {} of its memory free, and {} {}",
                    giver.name,
                    percent(loads.free(giver.id) as f64 / giver.total_pages.max(1) as f64),
                    taker.name,
                    percent(loads.free(taker.id) as f64 / taker.total_pages.max(1) as f64)
                );
                rest.pages.start = cut.pages.end;
                let (home, rows) = (cut.home, vec![cut.pages]);
                let made = Move { home, rows, giver: giver.id, taker: taker.id, rate, reason };
                loads.apply(&made);
                plan.moves.push(made);
            }
        }
        if giver.is_below(loads.free(giver.id), SPARE) && plan.moves.len() < MOVES_MAX {
            plan.problems.push(format!("{} is nearly full: {why}", giver.name));
        }
    }

    /// Moves hot blocks away from a hot server, or has them split.
    fn relieve(&self, giver: &Server, loads: &mut Loads<'_>, plan: &mut Plan) {
        let reading = loads.reading;
        let mut hottest = Vec::new();
        if let Some(of) = &giver.held {
            let tree = (giver.id, of.home);
            let Some(blocks) = self.trees.get(&tree).filter(|blocks| !blocks.is_empty()) else {
                if reading.entries_max < block::PARTS_MAX {
                    plan.problems.push(no_entries(giver));
                    return;
                }
                if let Some(root) = Block::root(of.home.id(), &of.rows) {
                    plan.splits.push((tree, root));
                }
                plan.is_counting = true;
                return;
            };
            let Some(rates) = Self::hottest(reading, &tree, blocks) else {
                plan.is_counting = true;
                return;
            };
            hottest.extend(rates.into_iter().map(|(rate, block)| (rate, block, of)));
        }
        hottest.sort_by(|(one, ..), (other, ..)| other.total_cmp(one));
        let mean = loads.mean(giver.space);
        // What blocks that are to be split will relieve it of.
        let (mut expected, mut splits, mut made) = (0.0, Vec::new(), 0);
        // Of the hottest part that does not move.
        let mut why = None;
        for (rate, block, of) in hottest {
            let has_enough = loads.rate(giver.id) - expected <= WARM * mean;
            if has_enough || rate < GAIN * mean || plan.moves.len() >= MOVES_MAX {
                break;
            }
            let rows = block.pages().map(|_| rows_of(&block, of)).unwrap_or_default();
            let of_home = |pages: &Range<u64>| Pages { home: of.home, pages: pages.clone() };
            let is_bound =
                || rows.iter().any(|row| self.is_bound(reading, &plan.moves, &of_home(row)));
            let count: u64 = rows.iter().map(|row| row.end - row.start).sum();
            let can_split = 1 << block.order > LINE;
            let is_movable = (1..=PART_MAX).contains(&count) && reading.is_worth(count, rate);
            let left = |taker: &Server| loads.free(taker.id).saturating_sub(count);
            let roomy =
                || self.takers(reading, giver).filter(|taker| !taker.is_below(left(taker), SPARE));
            let coolest = roomy()
                .min_by(|one, other| loads.rate(one.id).total_cmp(&loads.rate(other.id)))
                // What moved is counted for its server only, so it cannot be divided there.
                .filter(|taker| match can_split {
                    true => loads.stays_warm(taker, rate),
                    false => loads.stays_cool(giver, taker.id, rate),
                });
            match coolest.filter(|_| is_movable && !is_bound()) {
                Some(taker) => {
                    let total = loads.total(giver.space).max(f64::MIN_POSITIVE);
                    let reason = format!(
                        "{} has {} of the traffic of {} servers, these pages have {}, and {} has {}",
                        giver.name,
                        percent(loads.rate(giver.id) / total),
                        loads.of_space(giver.space).count(),
                        percent(rate / total),
                        taker.name,
                        percent(loads.rate(taker.id) / total)
                    );
                    let (giver, taker) = (giver.id, taker.id);
                    let decided = Move { home: of.home, rows, giver, taker, rate, reason };
                    loads.apply(&decided);
                    plan.moves.push(decided);
                    made += 1;
                }
                None if can_split && (count > PART_MAX || !is_bound()) => {
                    splits.push(((giver.id, of.home), block));
                    expected += rate;
                }
                None => {
                    let of_this = if is_bound() {
                        "pages that moved a short time ago, or are moving, stay"
                    } else if !reading.is_worth(count, rate) {
                        "its pages have too little traffic for this window; use a longer --window"
                    } else if self.takers(reading, giver).next().is_none() {
                        NO_TAKER
                    } else if roomy().next().is_none() {
                        "no other server has room"
                    } else {
                        "single lines of pages are too hot for any other server"
                    };
                    why.get_or_insert(of_this);
                }
            }
        }
        let room = reading.entries_max.min(ENTRIES_MAX);
        let counted: usize = self.trees.values().map(Vec::len).sum();
        let has_room = counted + block::PARTS_MAX * (plan.splits.len() + 1) <= room;
        if !splits.is_empty() && has_room {
            // What was decided would change what the parts have.
            let first = plan.moves.len() - made;
            for undone in plan.moves.drain(first..) {
                let Move { giver, taker, .. } = undone;
                let undone = Move { giver: taker, taker: giver, ..undone };
                loads.apply(&undone);
            }
            plan.splits.extend(splits);
            plan.is_counting = true;
        } else if made == 0 && !splits.is_empty() {
            // The entries are where it was hot before.
            plan.recounts.push(giver.id);
            plan.problems.push(no_entries(giver));
            plan.is_counting = true;
        } else if made == 0 && loads.rate(giver.id) > WARM * mean {
            let why = why.unwrap_or(
                "its traffic is on pages that moved there, or on many that have too little each",
            );
            plan.problems.push(format!("{} has too much of the traffic: {why}", giver.name));
        }
    }

    /// Begins moves that are waiting, as many as may move at once and as fast as they may.
    fn begin(&mut self, reading: &Reading) -> Vec<Move> {
        let now = reading.now;
        let passed = self.allowed_at.map(|at| now.saturating_duration_since(at));
        self.allowance = match passed {
            None => PAGES_AT_ONCE,
            Some(passed) => {
                (self.allowance + passed.as_secs_f64() * PAGES_PER_SECOND).min(PAGES_AT_ONCE)
            }
        };
        self.allowed_at = Some(now);
        let mut begun = Vec::new();
        let mut open_count = reading.open_count;
        while let Some(next) = self.waiting.front() {
            // As many rows as fit; the others go on waiting.
            let rows = next.rows.len().min(OPEN_MAX.saturating_sub(open_count));
            let (next, rest) = next.divided(rows);
            let pages = next.page_count() as f64;
            if rows == 0 || pages > self.allowance {
                break;
            }
            self.waiting.pop_front();
            let can = reading.server(next.giver).is_some_and(|it| it.may_give)
                && reading.server(next.taker).is_some_and(|it| it.may_take)
                && !self.paused.contains_key(&next.taker)
                && !next.pages().any(|pages| self.is_bound(reading, &[], &pages));
            if !can {
                continue;
            }
            if let Some(rest) = rest {
                self.waiting.push_front(rest);
            }
            self.allowance -= pages;
            open_count += rows;
            begun.push(next);
        }
        if !begun.is_empty() {
            self.settled_at = Some(now + reading.window * SETTLE_WINDOWS);
        }
        begun
    }
}

/// How many pages a full server lacks until it has enough free ones, in whole lines.
fn missing(giver: &Server, free_pages: u64) -> u64 {
    pages_of(giver, SPARE).saturating_sub(free_pages).div_ceil(LINE).saturating_mul(LINE)
}

/// How many pages a server can take of a full one, in whole lines.
fn room(taker: &Server, free_pages: u64) -> u64 {
    free_pages.saturating_sub(pages_of(taker, ROOM)) / LINE * LINE
}

/// A share of a server's pages, rounded up.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a share is not negative, and below 1"
)]
fn pages_of(server: &Server, share: f64) -> u64 {
    (server.total_pages as f64 * share).ceil() as u64
}

/// What a server has of a home.
fn held(server: &Server, home: ContentsRecord) -> Option<&Held> {
    server.held.as_ref().filter(|held| held.home == home)
}

/// The pages of a block that are held.
fn rows_of(block: &Block, held: &Held) -> Vec<Range<u64>> {
    let own = block.places();
    let Some(pages) = block.pages() else { return Vec::new() };
    let of = |row: &Places| {
        let (start, end) = (row.start.max(own.start), row.end.min(own.end));
        (start < end).then(|| pages.start + (start - own.start)..pages.start + (end - own.start))
    };
    held.rows.iter().filter_map(of).collect()
}

/// Why a server's pages are not counted well enough, for people.
fn no_entries(server: &Server) -> String {
    format!(
        "{} has too much of the traffic: the switches have no room for more entries that count its pages",
        server.name
    )
}

/// A share, for people.
fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

#[cfg(test)]
mod tests;
