//! Reports the lines of other homes that the server has, and own ones that nobody may have, of which no page is allocated
//! (`docs/migration.md`, "Free lines"). The controller moves them home, has them forgotten, or gives them back.

use core::{cmp::Reverse, ops::Range, time::Duration};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use bluebridge_northbound::migration::{Contents, Report};
use bluebridge_protocol::responder::FreeLines;

use super::transfers::PATIENCE;
use crate::{Server, migration::MigrationOrder};

/// How often such lines are reported, as long as there are any. Reports may be lost.
const INTERVAL: Duration = Duration::from_secs(2);

/// How often they are looked for, if there were none the last time: the shards look at all lines of others.
const LOOK: Duration = Duration::from_secs(5);

/// The most rows of a home that are reported at once. The others follow when these are gone.
const ROWS_MAX: usize = 4096;

/// Looks after an order, which a shard may have followed after the first one.
const LOOKS: u8 = 2;

/// What was reported, and when.
#[derive(Debug)]
pub(super) struct FreeLineReports {
    at: Option<Instant>,
    homes: BTreeSet<Contents>,
    /// Looks that are due although no shard has shown that there may be such lines.
    looks: u8,
}

impl Default for FreeLineReports {
    fn default() -> Self {
        Self { at: None, homes: BTreeSet::new(), looks: LOOKS }
    }
}

impl FreeLineReports {
    /// Lets the next report be soon: there may be fewer lines.
    pub(super) const fn hurry(&mut self) {
        self.at = None;
    }

    /// An order was followed: there may be other lines.
    pub(super) const fn note_order(&mut self) {
        self.looks = LOOKS;
    }

    /// When [`Self::poll`] is to be called again; `None` if only an order makes a difference.
    pub(super) fn due(&self, server: &Server) -> Option<Instant> {
        let may_have = || {
            let shards = server.statistics();
            shards.iter().any(|of| of.arena.adopted_lines > 0 || of.misses_lines)
        };
        let is_due = self.looks > 0 || !self.homes.is_empty() || may_have();
        let at = self.at.map(|at| at + self.interval());
        is_due.then(|| at.unwrap_or_else(Instant::now))
    }

    fn interval(&self) -> Duration {
        if self.homes.is_empty() { LOOK } else { INTERVAL }
    }

    /// The reports that are due.
    pub(super) fn poll(&mut self, now: Instant, server: &Server) -> Vec<Report> {
        if self.at.is_some_and(|at| now.saturating_duration_since(at) < self.interval()) {
            return Vec::new();
        }
        self.at = Some(now);
        self.looks = self.looks.saturating_sub(1);
        let mut rows: BTreeMap<Contents, Vec<Range<u64>>> = BTreeMap::new();
        for (shard, of) in (0..).zip(server.statistics()) {
            if of.arena.adopted_lines == 0 && !of.misses_lines {
                continue;
            }
            // A shard that has no time now is asked again later.
            let Ok(state) = server.migrate(shard, MigrationOrder::Free, PATIENCE) else {
                return Vec::new();
            };
            for FreeLines { home: node, generation, pages } in state.free {
                rows.entry(Contents { node, generation }).or_default().push(pages);
            }
        }
        let before = core::mem::replace(&mut self.homes, rows.keys().copied().collect());
        for gone in before.difference(&self.homes) {
            rows.insert(*gone, Vec::new());
        }
        rows.into_iter().map(|(home, pages)| Report::Free { home, pages: longest(pages) }).collect()
    }
}

/// As many rows as are reported at once, in order.
fn longest(mut rows: Vec<Range<u64>>) -> Vec<Range<u64>> {
    if rows.len() > ROWS_MAX {
        rows.sort_by_key(|row| Reverse(row.end - row.start));
        rows.truncate(ROWS_MAX);
    }
    rows.sort_by_key(|row| row.start);
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_rows_are_reported_in_their_order() {
        let rows = |count: u64| (0..count).map(|at| at * 100..at * 100 + 8 + 8 * (at % 2));
        assert_eq!(longest(rows(4).rev().collect()), rows(4).collect::<Vec<_>>());
        let long = rows(2 * ROWS_MAX as u64).filter(|row| row.end - row.start == 16);
        assert_eq!(longest(rows(2 * ROWS_MAX as u64).collect()), long.collect::<Vec<_>>());
    }
}
