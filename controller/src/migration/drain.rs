//! Servers that are drained: which of their pages are left, and how far they are. `core/drain.rs` decides what moves where.
//!
//! That a server is drained is stored; the rest is found out again after a restart of the controller.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::{Duration, Instant};

use bluebridge_wire::NodeId;
use bluebridge_wire::address::{LINE_PAGES, PAGE_SHIFT, SHARD_SHIFT};
use serde::{Deserialize, Serialize};

use super::{Change, ContentsRecord, End, MigrationRecord, Migrations, RefusalRecord, Stage};

/// Open migrations away from a server at the same time, to servers that are connected.
pub(crate) const DRAIN_OPEN_MAX: usize = 4;

/// All open migrations away from a server at the same time: a taker that is away does not hold up the others.
const DRAIN_OPEN_ALL: usize = 4 * DRAIN_OPEN_MAX;

/// The pages of a migration: few enough that the choice of the next taker knows what the last ones took.
const PART_MAX: u64 = 4096;

/// How long a server that refused a range, or lost it, gets no other one of the same giver.
const PAUSE: Duration = Duration::from_secs(10);

const LINE: u64 = LINE_PAGES as u64;
const SHARD: u64 = 1 << (SHARD_SHIFT - PAGE_SHIFT);

/// That an operator drains a server.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct DrainRecord {
    /// The server.
    pub node: u16,
    /// The last migration that was recorded before.
    pub after: u64,
    /// Its present process allocates nothing any more, and was found to serve nothing: so it may be taken away.
    #[serde(default)]
    pub empty: bool,
}

/// A server that is drained, with what is not stored of it.
#[derive(Clone, Debug)]
pub(super) struct Drain {
    pub(super) record: DrainRecord,
    /// Nothing that the server reported is left.
    is_done: bool,
    /// The server is to allocate nothing any more.
    pub(super) wants_seal: bool,
    /// When the first pass ended while it allocated nothing.
    pub(super) sealed_pass: Option<Instant>,
    /// Since when it is known to serve nothing, and to allocate nothing.
    pub(super) empty_since: Option<Instant>,
    /// Why the server could not be asked for what it has.
    problem: Option<String>,
    /// Counts the moments at which ranges were tried.
    turn: u64,
    /// The first pages of ranges that could not begin to move, with the turn in which they were tried last, and why.
    failed: BTreeMap<(ContentsRecord, u64), (u64, String)>,
    /// Servers that get nothing for some time.
    paused: BTreeMap<NodeId, Instant>,
    part_pages: u64,
    /// The migrations whose ends were considered.
    considered: BTreeSet<u64>,
}

impl Drain {
    pub(super) const fn new(record: DrainRecord) -> Self {
        Self {
            record,
            is_done: record.empty,
            wants_seal: record.empty,
            sealed_pass: None,
            empty_since: None,
            problem: None,
            turn: 0,
            failed: BTreeMap::new(),
            paused: BTreeMap::new(),
            part_pages: PART_MAX,
            considered: BTreeSet::new(),
        }
    }
}

impl Drain {
    /// The server has another process, which allocates until it is told not to. What kept the last one from going on may
    /// be over.
    pub(super) fn begin_again(&mut self) {
        (self.wants_seal, self.sealed_pass) = (false, None);
        self.problem = None;
        self.failed.clear();
    }
}

/// A server that is drained, in the view of operators.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ShownDrain {
    /// The server.
    pub node: NodeId,
    /// Whether it serves nothing any more.
    pub is_done: bool,
    /// Migrations away from it, or to it, that are open.
    pub open_count: usize,
    /// Why it does not go on, if it does not, or what must happen before it may be taken away.
    pub problem: Option<String>,
    /// Whether it may be taken away: another server answers for it then.
    pub may_leave: bool,
}

/// Pages that a server serves.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Left {
    pub(crate) home: ContentsRecord,
    pub(crate) pages: Range<u64>,
}

impl Left {
    const fn first(&self) -> (ContentsRecord, u64) {
        (self.home, self.pages.start)
    }
}

impl Migrations {
    /// Begins to drain a memory server; returns whether that is new. `None` if there is no such server.
    pub(crate) fn drain(&mut self, node: NodeId) -> Option<bool> {
        if !self.servers.contains_key(&node) {
            return None;
        }
        if self.drains.contains_key(&node) {
            return Some(false);
        }
        let after = self.all.last_key_value().map_or(0, |(id, _)| *id);
        let record = DrainRecord { node: node.0, after, empty: false };
        self.drains.insert(node, Drain::new(record));
        self.changes.push(Change::Drain(record));
        Some(true)
    }

    /// Ends it; returns whether the server was drained. Migrations that are open go on.
    pub(crate) fn undrain(&mut self, node: NodeId) -> bool {
        let is_known = self.drains.remove(&node).is_some();
        if is_known {
            // It may allocate again.
            self.version += 1;
            self.changes.push(Change::DrainGone(node.0));
        }
        is_known
    }

    /// Whether a server is drained, and had nothing when it was last looked at.
    pub(crate) fn is_empty(&self, node: NodeId) -> bool {
        self.drains.get(&node).is_some_and(|drain| drain.record.empty)
    }

    /// Whether an operator drains a server.
    #[must_use]
    pub fn is_draining(&self, node: NodeId) -> bool {
        self.drains.contains_key(&node)
    }

    /// A server that is drained.
    #[must_use]
    pub fn drain_of(&self, node: NodeId) -> Option<ShownDrain> {
        let drain = self.drains.get(&node)?;
        let open_count = self.open_at(node);
        let is_connected = self.servers.get(&node).is_some_and(|server| server.link.is_some());
        let away = || format!("{} has no connection to the controller", self.name(node));
        let problem = if is_connected { self.drain_problem(node) } else { Some(away()) };
        let is_done = drain.is_done && open_count == 0;
        let has_deputy = self.has_deputy(node) || !self.deputy_candidates(node).is_empty();
        let handover = self.handover(node);
        let may_leave = is_done && drain.record.empty && has_deputy && handover.is_none();
        let problem = if is_done { handover } else { problem };
        Some(ShownDrain { node, is_done, open_count, problem, may_leave })
    }

    /// Every server that is drained.
    pub fn drains(&self) -> impl Iterator<Item = ShownDrain> {
        self.drains.keys().filter_map(|node| self.drain_of(*node))
    }

    /// Open migrations of which a server is the giver or the taker, and has something left to do.
    fn open_at(&self, node: NodeId) -> usize {
        let is_giver = |it: &MigrationRecord| it.giver.id() == node && it.stage < Stage::Forgotten;
        let open = self.open().map(|of| &of.record);
        open.filter(|it| is_giver(it) || it.taker.id() == node).count()
    }

    /// How many more migrations away from a server may begin.
    pub(crate) fn drain_room(&self, node: NodeId) -> usize {
        let open = || self.open().filter(|of| of.record.giver.id() == node);
        let is_connected = |id| self.servers.get(&id).is_some_and(|server| server.link.is_some());
        let going_on = open().filter(|of| is_connected(of.record.taker.id())).count();
        let room = DRAIN_OPEN_MAX.saturating_sub(going_on);
        room.min(DRAIN_OPEN_ALL.saturating_sub(open().count()))
    }

    /// Notes whether a server serves nothing any more.
    pub(crate) fn note_drained(&mut self, node: NodeId, is_done: bool) {
        if let Some(drain) = self.drains.get_mut(&node) {
            drain.is_done = is_done;
            if is_done {
                drain.failed.clear();
                return;
            }
            drain.sealed_pass = None;
            if drain.record.empty {
                drain.record.empty = false;
                drain.empty_since = None;
                self.changes.push(Change::Drain(drain.record));
            }
        }
    }

    /// Notes why a server cannot be asked for what it has.
    pub(crate) fn note_drain_problem(&mut self, node: NodeId, problem: Option<String>) {
        if let Some(drain) = self.drains.get_mut(&node) {
            drain.problem = problem;
        }
    }

    /// Notes that a range could not begin to move.
    pub(crate) fn note_failed(&mut self, node: NodeId, range: &Left, problem: String) {
        if let Some(drain) = self.drains.get_mut(&node) {
            drain.failed.insert(range.first(), (drain.turn, problem));
        }
    }

    /// Notes that a range, or its first part, began to move.
    pub(crate) fn note_begun(&mut self, node: NodeId, range: &Left) {
        if let Some(drain) = self.drains.get_mut(&node) {
            drain.failed.remove(&range.first());
        }
    }

    /// Notes that what is left of these own pages, and of other homes, was tried.
    pub(crate) fn note_turn(&mut self, node: NodeId, own: &[Range<u64>], left: &[Left]) {
        let contents = self.servers.get(&node).and_then(|server| server.contents);
        let Some(drain) = self.drains.get_mut(&node) else { return };
        drain.turn += 1;
        drain.problem = None;
        let is_left: BTreeSet<_> = left.iter().map(Left::first).collect();
        // Of own pages that were not named, nothing is known.
        let is_named = |(home, page): (ContentsRecord, u64)| {
            Some(home) != contents || own.iter().any(|it| it.contains(&page))
        };
        drain.failed.retain(|first, _| is_left.contains(first) || !is_named(*first));
    }

    /// Why draining a server does not go on, or not with everything.
    pub(crate) fn drain_problem(&self, node: NodeId) -> Option<String> {
        let drain = self.drains.get(&node)?;
        let failed = || drain.failed.values().next().map(|(_, problem)| problem.clone());
        drain.problem.clone().or_else(failed)
    }

    /// Whether nothing moves away from a server, and none of what is left can begin to.
    pub(crate) fn is_stuck(&self, node: NodeId, left: &[Left]) -> bool {
        let has_failed =
            |drain: &Drain| left.iter().all(|it| drain.failed.contains_key(&it.first()));
        let is_still = || self.open().all(|of| of.record.giver.id() != node);
        !left.is_empty() && self.drains.get(&node).is_some_and(has_failed) && is_still()
    }

    /// Notes how the latest migrations away from a server ended: who refused, or lost its memory, gets nothing for some
    /// time, and the next parts are smaller after a refusal that a smaller one may not meet.
    pub(crate) fn consider_ends(&mut self, now: Instant, node: NodeId) {
        let Some(drain) = self.drains.get_mut(&node) else { return };
        drain.paused.retain(|_, until| *until > now);
        drain.considered.retain(|id| self.all.contains_key(id));
        for (id, of) in self.all.range(drain.record.after + 1..) {
            let record = &of.record;
            if record.giver.id() != node || record.is_open() || !drain.considered.insert(*id) {
                continue;
            }
            match &record.end {
                None => drain.part_pages = (drain.part_pages * 2).min(PART_MAX),
                Some(End::Cancelled | End::GiverLost | End::TakerAway) => {}
                Some(End::TakerLost) => {
                    drain.paused.insert(record.taker.id(), now + PAUSE);
                }
                Some(End::Refused { node: by, why }) => {
                    let is_givers = *by == node.0;
                    // A giver refuses a range whose lines are not one after the other in its memory.
                    if !is_givers || drain.part_pages == LINE {
                        drain.paused.insert(record.taker.id(), now + PAUSE);
                    }
                    if is_givers || *why == RefusalRecord::NoRoom {
                        drain.part_pages = (drain.part_pages / 2 / LINE * LINE).max(LINE);
                    }
                }
            }
        }
    }

    /// Whether a server gets nothing of another one for some time.
    pub(crate) fn is_paused(&self, giver: NodeId, taker: NodeId) -> bool {
        self.drains.get(&giver).is_some_and(|drain| drain.paused.contains_key(&taker))
    }

    /// The pages of the next migration away from a server.
    pub(crate) fn part_pages(&self, node: NodeId) -> u64 {
        self.drains.get(&node).map_or(PART_MAX, |drain| drain.part_pages)
    }

    /// Pages that are promised to a server, and of which it may not have told yet that they are not free any more.
    pub(crate) fn promised_to(&self, node: NodeId) -> u64 {
        let open = self.open().map(|of| &of.record);
        let promised = open.filter(|it| it.taker.id() == node && it.stage < Stage::Allowed);
        promised.map(|it| it.pages.end.saturating_sub(it.pages.start)).sum()
    }

    /// The memory servers that can take a range of a server.
    pub(crate) fn takers_for(&self, node: NodeId, range: &Left) -> Vec<NodeId> {
        // A home that lost its memory does not take pages of it back.
        let can = |id: &NodeId| {
            self.can_take(node, *id) && (*id != range.home.id() || self.is_present(range.home))
        };
        self.servers.keys().copied().filter(can).collect()
    }

    /// Whether a server can take pages of another one: of the same space, connected, able, and not drained itself.
    pub(crate) fn can_take(&self, giver: NodeId, taker: NodeId) -> bool {
        let (Some(from), Some(to)) = (self.servers.get(&giver), self.servers.get(&taker)) else {
            return false;
        };
        taker != giver
            && to.space == from.space
            && to.contents.is_some()
            && to.link.as_ref().is_some_and(|link| link.migrates)
            && !self.is_draining(taker)
    }

    /// What is left of these own pages of a server and of other homes, with what was tried in vain at the end, the latest
    /// last.
    pub(crate) fn left_in_turn(&self, node: NodeId, own: &[Range<u64>]) -> Vec<Left> {
        let (mut left, _) = self.left(node, own);
        if let Some(drain) = self.drains.get(&node) {
            // Zero for one that never failed: turns of failures are counted from one.
            left.sort_by_key(|it| drain.failed.get(&it.first()).map_or(0, |(turn, _)| turn + 1));
        }
        left
    }

    /// The whole lines that a server serves of these own pages, and of other homes, without those that are in an open
    /// migration. Whether it serves anything of them at all is the second.
    pub(crate) fn left(&self, node: NodeId, own: &[Range<u64>]) -> (Vec<Left>, bool) {
        let Some(contents) = self.servers.get(&node).and_then(|server| server.contents) else {
            return (Vec::new(), false);
        };
        let mut served = super::PageMap::default();
        for pages in own {
            let lines = pages.start / LINE * LINE..pages.end.next_multiple_of(LINE);
            for (part, giver) in self.givers(contents, &lines) {
                if giver == Some(contents) {
                    served.insert(part, ());
                }
            }
        }
        let of_own = served.iter().map(|(pages, ())| (contents, pages.clone()));
        let adopted = self.elsewhere.iter().flat_map(|(home, of)| {
            let rows = of.record.rows.iter().filter(move |(_, placed)| placed.at == contents);
            rows.map(move |(pages, _)| (*home, pages.clone()))
        });
        let all: Vec<_> = of_own.chain(adopted).collect();
        let mut left = Vec::new();
        for (home, pages) in &all {
            let mut moving = super::PageMap::default();
            let open = self.open().map(|of| &of.record);
            for record in open.filter(|it| it.home == *home && it.holds_range()) {
                moving.insert(record.pages.clone(), ());
            }
            for mut gap in moving.gaps(pages) {
                // A migration is of one shard.
                while gap.start < gap.end {
                    let end = gap.end.min((gap.start / SHARD + 1) * SHARD);
                    left.push(Left { home: *home, pages: gap.start..end });
                    gap.start = end;
                }
            }
        }
        (left, !all.is_empty())
    }
}
