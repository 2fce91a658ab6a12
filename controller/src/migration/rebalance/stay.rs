//! Pages that moved stay for some time, so that none go back and forth.

use std::collections::BTreeSet;
use std::ops::Range;
use std::time::Instant;

use bluebridge_wire::NodeId;

use super::block::LINE;
use super::{Move, Pages, Reading, Rebalancer};

/// Pages that moved.
#[derive(Clone, Debug)]
pub(super) struct Stay {
    pub(super) pages: Pages,
    pub(super) moves: u32,
    /// Servers from which they were moved because of traffic or room: they do not take them back while this is remembered.
    pub(super) left: BTreeSet<NodeId>,
    pub(super) since: Instant,
}

impl Stay {
    /// Whether they may not move yet.
    fn holds(&self, reading: &Reading) -> bool {
        reading.now.saturating_duration_since(self.since) < reading.stay(self.moves)
    }
}

impl Rebalancer {
    /// Notes that pages moved, whoever decided it: they stay for some time. If it was decided here, the giver does not get
    /// them back for twice that time.
    pub fn note_moved(&mut self, now: Instant, pages: Pages, giver: Option<NodeId>) {
        let (same, others): (Vec<_>, Vec<_>) =
            self.stays.drain(..).partition(|of| of.pages.overlaps(&pages));
        let moves = same.iter().map(|of| of.moves).max().unwrap_or(0).saturating_add(1);
        let left = same.iter().flat_map(|of| of.left.iter().copied()).chain(giver).collect();
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
        self.stays.push(Stay { pages, moves, left, since: now });
    }

    /// Forgets what is over.
    pub(super) fn forget(&mut self, reading: &Reading) {
        let now = reading.now;
        self.paused.retain(|_, until| *until > now);
        // Longer than they stay, so that pages that move again and again stay longer each time.
        let is_remembered =
            |of: &Stay| now.saturating_duration_since(of.since) < reading.stay(of.moves) * 2;
        self.stays.retain(is_remembered);
    }

    /// Whether a server gave pages away a short time ago.
    pub(super) fn has_left(&self, pages: &Pages, server: NodeId) -> bool {
        self.stays.iter().any(|of| of.left.contains(&server) && of.pages.overlaps(pages))
    }

    /// Whether pages may not move now.
    pub(super) fn is_bound(&self, reading: &Reading, decided: &[Move], pages: &Pages) -> bool {
        let stays = |of: &Stay| of.holds(reading) && of.pages.overlaps(pages);
        self.stays.iter().any(stays)
            || reading.moving.iter().any(|moving| moving.overlaps(pages))
            || decided.iter().flat_map(Move::pages).any(|moving| moving.overlaps(pages))
    }

    /// The first of these pages that may move now, in whole lines.
    pub(super) fn movable(
        &self,
        reading: &Reading,
        decided: &[Move],
        pages: &Pages,
    ) -> Option<Pages> {
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
}
