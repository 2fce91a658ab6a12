//! What is decided, and the loads that would follow.

use std::collections::BTreeMap;
use std::ops::Range;

use bluebridge_wire::NodeId;

use super::{Block, Pages, Reading, Server, WARM};
use crate::migration::ContentsRecord;

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
    pub(super) fn divided(&self, row_count: usize) -> (Self, Option<Self>) {
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
    pub(super) splits: Vec<(Tree, Block)>,
    /// Servers whose pages are to be counted from the beginning.
    pub(super) recounts: Vec<NodeId>,
}

/// Whose places a tree of blocks divides.
pub(super) type Tree = (NodeId, ContentsRecord);

/// The loads that would follow from the moves so far.
pub(super) struct Loads<'a> {
    pub(super) reading: &'a Reading,
    rates: BTreeMap<NodeId, f64>,
    free: BTreeMap<NodeId, u64>,
}

impl<'a> Loads<'a> {
    pub(super) fn new(reading: &'a Reading) -> Self {
        let servers = || reading.servers.iter();
        let rates = servers().map(|it| (it.id, it.rate.per_second)).collect();
        Self { reading, rates, free: servers().map(|it| (it.id, it.free_pages)).collect() }
    }

    pub(super) fn rate(&self, id: NodeId) -> f64 {
        self.rates.get(&id).copied().unwrap_or_default()
    }

    pub(super) fn free(&self, id: NodeId) -> u64 {
        self.free.get(&id).copied().unwrap_or_default()
    }

    /// The servers of a space that take part. Others have traffic that no move can change.
    pub(super) fn of_space(&self, space: u16) -> impl Iterator<Item = &'a Server> {
        let takes_part = |server: &&Server| server.may_give || server.may_take;
        self.reading.servers.iter().filter(takes_part).filter(move |server| server.space == space)
    }

    pub(super) fn total(&self, space: u16) -> f64 {
        self.of_space(space).map(|server| self.rate(server.id)).sum()
    }

    pub(super) fn mean(&self, space: u16) -> f64 {
        self.total(space) / self.of_space(space).count().max(1) as f64
    }

    /// The hottest server's share, if there is traffic.
    pub(super) fn share(&self, space: u16) -> Option<f64> {
        let total = self.total(space);
        let most = self.of_space(space).map(|server| self.rate(server.id)).fold(0.0, f64::max);
        (total > 0.0).then(|| most / total)
    }

    /// Whether the taker is then not too hot.
    pub(super) fn stays_warm(&self, taker: &Server, rate: f64) -> bool {
        self.rate(taker.id) + rate <= WARM * self.mean(taker.space)
    }

    /// Whether the taker is then not hotter than the giver, or not too hot.
    pub(super) fn stays_cool(&self, giver: &Server, taker: NodeId, rate: f64) -> bool {
        let most = (self.rate(giver.id) - rate).max(WARM * self.mean(giver.space));
        self.rate(taker) + rate <= most
    }

    pub(super) fn apply(&mut self, made: &Move) {
        let pages = made.page_count();
        *self.rates.entry(made.giver).or_default() -= made.rate;
        *self.rates.entry(made.taker).or_default() += made.rate;
        let free = self.free.entry(made.giver).or_default();
        *free = free.saturating_add(pages);
        let free = self.free.entry(made.taker).or_default();
        *free = free.saturating_sub(pages);
    }
}

/// A share, for people.
pub(super) fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}
