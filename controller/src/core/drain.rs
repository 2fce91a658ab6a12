//! Decides which pages of a drained server move where.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Instant;

use bluebridge_wire::address::{LINE_PAGES, PAGE_BYTES};
use bluebridge_wire::{ArenaGeneration, NodeId};

use super::{Core, OperatorError};
use crate::migration::{Left, Wanted};

const LINE: u64 = LINE_PAGES as u64;

/// Ranges of a server that are tried in vain at the same moment; others are tried the next time.
const FAILURES_MAX: usize = 8;

/// What a step of draining a server did.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct DrainStep {
    /// Whether the server still serves any of the pages, or any of other homes.
    pub serves: bool,
    /// Whether none of them can move now, so that others should be looked at.
    pub is_stuck: bool,
    /// What begins to move where, and why, for people.
    pub began: Vec<String>,
    /// Why it does not go on, if that is new.
    pub problem: Option<String>,
}

impl Core {
    /// Begins to drain a memory server: it gets no new allocations by anycast, and everything that it serves moves away.
    /// Returns whether that is new; `None` if there is no such server.
    pub fn drain(&mut self, node: NodeId) -> Option<bool> {
        let is_new = self.migrations.drain(node)?;
        if is_new {
            self.cancel_balancing(node);
        }
        self.note(node);
        Some(is_new)
    }

    /// Whether the draining of a server may end.
    ///
    /// # Errors
    /// [`OperatorError::Gone`] if the server is gone and serves nothing: no deputy would be chosen any more if the present
    /// one ends, or if the server begins to come back and dies.
    pub fn check_undrain(&self, node: NodeId) -> Result<(), OperatorError> {
        let is_gone = self.nodes.get(&node).filter(|it| !it.live && self.migrations.is_empty(node));
        is_gone.map_or(Ok(()), |it| Err(OperatorError::Gone(it.record.name.clone())))
    }

    /// Stops draining a server; returns whether it was drained. What has moved stays, and open migrations go on.
    pub fn undrain(&mut self, node: NodeId) -> bool {
        let was_drained = self.migrations.undrain(node);
        self.note(node);
        was_drained
    }

    /// Moves some of what a drained server serves, given some of its own pages that are allocated.
    pub fn drain_step(&mut self, now: Instant, node: NodeId, own: &[Range<u64>]) -> DrainStep {
        // It may have ended meanwhile.
        if !self.migrations.is_draining(node) {
            return DrainStep { serves: true, ..DrainStep::default() };
        }
        self.migrations.consider_ends(now, node);
        let mut began = Vec::new();
        let mut left: VecDeque<Left> = self.migrations.left_in_turn(node, own).into();
        let mut failures = 0;
        while failures < FAILURES_MAX && self.migrations.drain_room(node) > 0 {
            let Some(next) = left.pop_front() else { break };
            let rest = left.iter().chain([&next]);
            let missing = rest.map(|it| it.pages.end - it.pages.start).sum();
            match self.drain_part(node, &next, missing) {
                Ok((moving, words)) => {
                    self.migrations.note_begun(node, &next);
                    began.push(words);
                    if moving.end < next.pages.end {
                        left.push_front(Left { pages: moving.end..next.pages.end, ..next });
                    }
                }
                Err(problem) => {
                    self.migrations.note_failed(node, &next, problem);
                    failures += 1;
                }
            }
        }
        let (left, serves) = self.migrations.left(node, own);
        let before = self.migrations.drain_of(node).and_then(|drain| drain.problem);
        self.migrations.note_turn(node, own, &left);
        if serves {
            self.migrations.note_drained(node, false);
        }
        let problem = self.migrations.drain_problem(node);
        let problem = problem.filter(|words| before.as_ref() != Some(words));
        let is_stuck = self.migrations.is_stuck(node, &left);
        DrainStep { serves, is_stuck, began, problem }
    }

    /// Begins to move the first pages of a range away; returns which, with words for people. Otherwise why not; `missing`
    /// is how many pages are left at all.
    fn drain_part(
        &mut self,
        node: NodeId,
        range: &Left,
        missing: u64,
    ) -> Result<(Range<u64>, String), String> {
        let Some((taker, free)) = self.best_taker(node, range) else {
            return Err(self.no_room(node, range, missing));
        };
        let name = |id: NodeId| {
            self.node(id).map_or_else(|| format!("node {id}"), |it| it.record.name.clone())
        };
        let (home, taker_name) = (name(range.home.id()), name(taker));
        let most = self.migrations.part_pages(node).min(free / LINE * LINE).max(LINE);
        let length = range.pages.end - range.pages.start;
        let pages = range.pages.start..range.pages.start + length.min(most);
        let Some(record) = self.nodes.get(&node).map(|node| &node.record) else {
            return Err(format!("node {node} is no member any more"));
        };
        let wanted = Wanted {
            home: range.home.id(),
            space: record.space(),
            generation: ArenaGeneration::new(range.home.generation),
            pages: Some(pages.clone()),
            taker,
        };
        let reason = format!(
            "{} is drained, and {taker_name} has the most free memory: {free} pages",
            record.name
        );
        let (first, last) = (pages.start, pages.end - 1);
        match self.migrate_because(&wanted, &reason) {
            Ok(ids) => {
                let words = format!(
                    "migrations {ids:?}: pages {first} to {last} of {home} move to {taker_name}; {reason}"
                );
                Ok((pages, words))
            }
            Err(error) => Err(format!(
                "pages {first} to {last} of {home} do not move to {taker_name}: {error}"
            )),
        }
    }

    /// Notes that a drained server was asked for all its pages, and serves none of them.
    pub fn drained(&mut self, now: Instant, node: NodeId) {
        let (_, serves) = self.migrations.left(node, &[]);
        // What is on its way to it arrives later.
        let is_idle = self.migrations.drain_of(node).is_some_and(|drain| drain.open_count == 0);
        if is_idle && !serves {
            self.migrations.note_clean_pass(now, node);
        } else {
            self.migrations.note_drained(node, false);
        }
    }

    /// The server with the most free memory that may take a range of another one, and how many pages that are.
    fn best_taker(&self, giver: NodeId, range: &Left) -> Option<(NodeId, u64)> {
        let takers = self.migrations.takers_for(giver, range).into_iter();
        let free = takers.filter(|id| !self.migrations.is_paused(giver, *id)).filter_map(|id| {
            let node = self.nodes.get(&id).filter(|node| node.live && node.record.attached)?;
            let free = node.free_pages?.saturating_sub(self.migrations.promised_to(id));
            (free >= LINE).then_some((free, id))
        });
        free.max_by_key(|(free, id)| (*free, std::cmp::Reverse(*id))).map(|(free, id)| (id, free))
    }

    /// Why no server takes a range, and what to do.
    fn no_room(&self, giver: NodeId, range: &Left, missing: u64) -> String {
        let takers = self.migrations.takers_for(giver, range);
        // The server is asked for some of its allocations at a time.
        let bytes = missing.saturating_mul(PAGE_BYTES as u64);
        if takers.is_empty() && self.migrations.can_take(giver, range.home.id()) {
            let home = self.migrations.name(range.home.id());
            return format!(
                "{home} lost the memory that some of these pages were part of, so it does not take them back: start \
                 another memory server"
            );
        }
        if takers.is_empty() {
            return format!(
                "no other memory server of the space can take what is left here, at least {bytes} bytes: start one, or end the \
                 draining of another"
            );
        }
        if takers.iter().any(|id| self.migrations.is_paused(giver, *id)) {
            return format!(
                "servers refused what is left, at least {bytes} bytes, and are asked again soon; `bluebridge migrations` shows \
                 why"
            );
        }
        format!(
            "no memory server has room for what is left here, at least {bytes} bytes: start another one, or free memory"
        )
    }
}
