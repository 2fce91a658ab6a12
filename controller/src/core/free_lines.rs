//! Moves lines home of which no page is allocated any more (`docs/migration.md`, "Free lines").

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use bluebridge_wire::{ArenaGeneration, NodeId};

use super::Core;
use crate::migration::Wanted;

/// The most open migrations of this kind to one home.
const OPEN_MAX: usize = 8;

/// The most pages of one: 256 MiB.
const PAGES_MAX: u64 = 1 << 16;

/// How long a home that refused one, or did not end it, gets no other.
const PAUSE: Duration = Duration::from_secs(30);

/// Why they are begun, for people.
const REASON: &str =
    "none of these pages is allocated any more, so their addresses can be used again at home";

/// What the core has of it. Nothing of this must outlive the process.
#[derive(Debug, Default)]
pub(super) struct Returning {
    /// Migrations that were begun, and are open as far as is known.
    open: BTreeMap<u64, NodeId>,
    paused: BTreeMap<NodeId, Instant>,
}

impl Core {
    /// Begins to move free lines home that a server has reported. Returns what it began, for people.
    pub fn return_free_lines(&mut self, now: Instant, from: NodeId) -> Vec<String> {
        self.note_returned(now);
        let mut began = Vec::new();
        let mut done = BTreeSet::new();
        for (home, pages) in self.migrations.homeless(from) {
            let open = self.returning.open.values().filter(|of| **of == home.id()).count();
            let is_paused = self.returning.paused.contains_key(&home.id());
            if open >= OPEN_MAX || is_paused || done.contains(&home.id()) {
                continue;
            }
            let Some(space) = self.nodes.get(&home.id()).map(|node| node.record.space()) else {
                continue;
            };
            let end = pages.end.min(pages.start + PAGES_MAX);
            let wanted = Wanted {
                home: home.id(),
                space,
                generation: ArenaGeneration::new(home.generation),
                pages: Some(pages.start..end),
                taker: home.id(),
            };
            match self.migrate_because(&wanted, REASON) {
                Ok(ids) => {
                    let (first, last) = (pages.start, end - 1);
                    let (home_name, from) =
                        (self.migrations.name(home.id()), self.migrations.name(from));
                    began.push(format!(
                        "migrations {ids:?}: pages {first} to {last} of {home_name} go home from {from}; {REASON}"
                    ));
                    self.returning.open.extend(ids.into_iter().map(|id| (id, home.id())));
                }
                // The server reports them again.
                Err(_) => drop(done.insert(home.id())),
            }
        }
        began
    }

    /// Notes which of these migrations have ended, and how.
    fn note_returned(&mut self, now: Instant) {
        let Returning { open, paused } = &mut self.returning;
        paused.retain(|_, until| *until > now);
        let before = std::mem::take(open);
        for (id, home) in before {
            let record = self.migrations.record_of(id);
            match record {
                Some(record) if record.is_open() => drop(open.insert(id, home)),
                Some(record) if record.end.is_none() => {}
                _ => drop(paused.insert(home, now + PAUSE)),
            }
        }
    }
}
