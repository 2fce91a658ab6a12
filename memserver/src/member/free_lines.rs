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

/// What was reported, and when.
#[derive(Debug, Default)]
pub(super) struct FreeLineReports {
    at: Option<Instant>,
    homes: BTreeSet<Contents>,
}

impl FreeLineReports {
    /// Lets the next report be soon: there may be fewer lines.
    pub(super) const fn hurry(&mut self) {
        self.at = None;
    }

    /// The reports that are due.
    pub(super) fn poll(&mut self, now: Instant, server: &Server) -> Vec<Report> {
        let interval = if self.homes.is_empty() { LOOK } else { INTERVAL };
        if self.at.is_some_and(|at| now.saturating_duration_since(at) < interval) {
            return Vec::new();
        }
        self.at = Some(now);
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
