//! Decides which pages move so that no server is full or has most of the traffic while others are not.
//!
//! Pure: its input are readings ([`Reading`]) with the time, its output are blocks that should be counted and moves, each
//! with a reason. `core/rebalance.rs` makes the readings and carries the decisions out.
//!
//! * `reading`: what is known; `plan`: what is decided, and the loads that would follow.
//! * `rates`: rates from counters; `block`: what is counted together, and how it is split; `held`: what servers serve.
//! * `relieve`: servers with too much of the traffic; `room`: servers that are nearly full; `stay`: what moved stays.
//! * `simulation`: a rack that is only computed, for tests and `bluebridge experiment rebalance`.
//!
//! Work is done in rounds. If a server has too much of the traffic for a whole window, its pages are counted in up to 16
//! blocks. The hottest blocks are split again until they are worth moving. Then some moves are decided at once, and the
//! next round begins when they are over and the rates were learned anew.

mod block;
mod held;
mod plan;
mod rates;
mod reading;
mod relieve;
mod room;
pub mod simulation;
mod stay;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use bluebridge_wire::NodeId;
use serde::{Deserialize, Serialize};

use super::ContentsRecord;
pub use block::{Block, Pages, Places, places};
use plan::{Loads, Tree};
pub use plan::{Move, Plan, Shares};
pub use rates::{Rate, Rates};
pub use reading::{Count, Held, Reading, Server};
use stay::Stay;

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

/// How a part of what a server has is counted.
#[derive(Clone, Debug)]
struct Counting {
    blocks: Vec<Block>,
    /// Since when it is these blocks.
    since: Instant,
}

/// The decisions, and what they are based on.
#[derive(Clone, Debug, Default)]
pub struct Rebalancer {
    /// Since when servers are above [`HOT`].
    above: BTreeMap<NodeId, Instant>,
    hot: BTreeSet<NodeId>,
    full: BTreeSet<NodeId>,
    /// What is counted: it divides what the server has of the home.
    trees: BTreeMap<Tree, Counting>,
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
        self.trees.values().flat_map(|counting| counting.blocks.iter().copied())
    }

    /// Every block that should be counted, with the server whose packets are of interest.
    pub fn counted_at(&self) -> impl Iterator<Item = (NodeId, Block)> + '_ {
        let of = |((server, _), counting): (&Tree, &Counting)| {
            let server = *server;
            counting.blocks.clone().into_iter().map(move |block| (server, block))
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
        self.trees.retain(|(server, home), Counting { blocks, .. }| {
            let Some(held) = reading.server(*server).and_then(|it| it.held_of(*home)) else {
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
        // What was decided with a server that takes no part any more is decided anew without it.
        let takes_part = |made: &Move| {
            reading.server(made.giver).is_some_and(|it| it.may_give)
                && reading.server(made.taker).is_some_and(|it| it.may_take)
        };
        if !self.waiting.iter().all(takes_part) {
            self.waiting.clear();
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

    /// Counts the parts of a block instead of it. Pages that moved have entries that count them, so all of a home are one
    /// block at first.
    fn split(&mut self, reading: &Reading, tree: Tree, block: Block) {
        let (server, home) = tree;
        let Some(held) = reading.server(server).and_then(|it| it.held_of(home)) else { return };
        let is_first = !self.trees.contains_key(&tree) && home.id() != server;
        let parts = if is_first { vec![block] } else { block.split(&held.rows) };
        if self.counted().count() + parts.len() <= reading.entries_max.min(ENTRIES_MAX) {
            let fresh = || Counting { blocks: Vec::new(), since: reading.now };
            let counting = self.trees.entry(tree).or_insert_with(fresh);
            counting.blocks.retain(|it| *it != block);
            counting.blocks.extend(parts);
            counting.since = reading.now;
        }
    }
    /// Servers that may get pages of a home from another one.
    fn takers<'a>(
        &'a self,
        reading: &'a Reading,
        giver: &'a Server,
        home: ContentsRecord,
    ) -> impl Iterator<Item = &'a Server> {
        reading.servers.iter().filter(move |server| {
            server.may_take
                && server.space == giver.space
                && server.id != giver.id
                && (server.id != home.id() || server.contents == Some(home))
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
            let can = !self.paused.contains_key(&next.taker)
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

#[cfg(test)]
mod tests;
