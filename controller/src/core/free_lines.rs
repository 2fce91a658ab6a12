//! Moves lines home of which no page is allocated any more (`docs/migration.md`, "Free lines").

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bluebridge_wire::address::LINE_PAGES;
use bluebridge_wire::{ArenaGeneration, NodeId};

use super::Core;
use crate::migration::{End, Wanted};

/// The most open migrations of this kind to one home.
const OPEN_MAX: usize = 16;

/// The most rows of a home that are tried in vain at once.
const FAILURES_MAX: usize = 8;

/// The most pages of one: 256 MiB.
const PAGES_MAX: u64 = 1 << 16;

/// How long one may take. Its home may wait for another server that is away.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long a home of which one ended early gets no other; doubled each time, up to the second value.
const PAUSE: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(600));

/// Why they are begun, for people.
const REASON: &str =
    "none of these pages is allocated any more, so their addresses can be used again at home";

/// What the core has of it. Nothing of this must outlive the process.
#[derive(Debug, Default)]
pub(super) struct Returning {
    /// Migrations that were begun, and are open as far as is known: their homes, and since when.
    open: BTreeMap<u64, (NodeId, Instant)>,
    /// Homes that get no other one until then, and how long the next pause will be.
    paused: BTreeMap<NodeId, (Instant, Duration)>,
}

impl Core {
    /// Begins to move free lines home that a server has reported. Returns what it began, for people.
    pub fn return_free_lines(&mut self, now: Instant, from: NodeId) -> Vec<String> {
        self.note_returned(now);
        let mut began = Vec::new();
        let mut failures: BTreeMap<NodeId, usize> = BTreeMap::new();
        for (home, pages) in self.migrations.homeless(from) {
            let failed = failures.get(&home.id()).copied().unwrap_or(0);
            if failed >= FAILURES_MAX || !self.may_return(now, home.id()) {
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
            match self.migrate_quietly(&wanted, REASON) {
                Ok(ids) => {
                    let (first, last) = (pages.start, end - 1);
                    let name = |id| self.migrations.name(id);
                    let (home_name, from) = (name(home.id()), name(from));
                    began.push(format!(
                        "migrations {ids:?}: pages {first} to {last} of {home_name} go home from {from}; {REASON}"
                    ));
                    let open = ids.into_iter().map(|id| (id, (home.id(), now)));
                    self.returning.open.extend(open);
                }
                // The server reports them again.
                Err(_) => *failures.entry(home.id()).or_default() += 1,
            }
        }
        began
    }

    /// Whether another one may begin to a home. Lines need memory of their home while they are on their way.
    fn may_return(&self, now: Instant, home: NodeId) -> bool {
        let Returning { open, paused } = &self.returning;
        let has_room = || {
            let free = self.nodes.get(&home).and_then(|node| node.free_pages);
            free.is_none_or(|free| free >= LINE_PAGES as u64)
        };
        paused.get(&home).is_none_or(|(until, _)| *until <= now)
            && open.values().filter(|(of, _)| *of == home).count() < OPEN_MAX
            && has_room()
    }

    /// Notes which of these migrations have ended, and how; ends those that take too long.
    fn note_returned(&mut self, now: Instant) {
        for (id, (home, since)) in std::mem::take(&mut self.returning.open) {
            let (is_open, is_early) = match self.migrations.record_of(id) {
                // One that lost its memory has something to say again when it is back.
                Some(record) => {
                    let is_lost = matches!(
                        record.end,
                        Some(End::TakerLost | End::GiverLost | End::TakerAway)
                    );
                    (record.is_open(), record.end.is_some() && !is_lost)
                }
                // It is forgotten among others that ended.
                None => (false, false),
            };
            if is_early {
                let (_, pause) =
                    self.returning.paused.get(&home).copied().unwrap_or((now, PAUSE.0));
                self.returning.paused.insert(home, (now + pause, (pause * 2).min(PAUSE.1)));
            } else if !is_open {
                self.returning.paused.remove(&home);
            }
            if is_open && !is_early {
                if now.saturating_duration_since(since) > PATIENCE {
                    self.migrations.cancel_because(id, "it takes too long");
                }
                self.returning.open.insert(id, (home, since));
            }
        }
    }

    /// Whether a migration is one of these, so that another one may begin when it ends.
    #[must_use]
    pub fn is_returning(&self, migration: u64) -> bool {
        self.returning.open.contains_key(&migration)
    }
}
