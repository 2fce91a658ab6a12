//! What decisions are based on.

use std::time::{Duration, Instant};

use bluebridge_wire::NodeId;

use super::{Block, PACKETS_PER_PAGE, Pages, Places, Rate, STAY_DOUBLINGS, STAY_WINDOWS, WORTH};
use crate::migration::ContentsRecord;

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
    /// What it has itself. A home that lost its memory takes none of its earlier pages back.
    pub contents: Option<ContentsRecord>,
    /// What it serves: of its own, and of other homes.
    pub held: Vec<Held>,
    /// Pages there that are known to be allocated. Needed only if it is full.
    pub allocated: Vec<Pages>,
}

impl Server {
    /// What it serves of a home.
    pub(super) fn held_of(&self, home: ContentsRecord) -> Option<&Held> {
        self.held.iter().find(|held| held.home == home)
    }

    pub(super) fn is_below(&self, free_pages: u64, share: f64) -> bool {
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
    pub(super) fn server(&self, id: NodeId) -> Option<&Server> {
        self.servers.iter().find(|server| server.id == id)
    }

    /// How long pages stay that moved so many times.
    pub(super) fn stay(&self, moves: u32) -> Duration {
        let doublings = moves.saturating_sub(1).min(STAY_DOUBLINGS);
        self.window * (STAY_WINDOWS << doublings)
    }

    /// Whether moving pages costs little beside the traffic that moves with them.
    pub(super) fn is_worth(&self, pages: u64, rate: f64) -> bool {
        rate * self.stay(1).as_secs_f64() >= WORTH * PACKETS_PER_PAGE * pages as f64
    }
}
