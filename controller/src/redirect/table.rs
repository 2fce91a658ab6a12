//! Redirects in the switch's table: single updates, and the results of a reading.

use super::{Action, BTreeMap, Duration, InstalledRedirect, Instant, Key, Page, Redirects, SLACK};
use crate::core::Body;
use crate::driver::UpdateError;
use crate::plan::{Object, TableUpdate};

/// How much the reported remaining time of an entry may differ from the expected one.
const READING_SLACK: Duration = Duration::from_millis(250);

impl Redirects {
    /// Whether there are updates to write.
    #[must_use]
    pub fn has_updates(&self) -> bool {
        !self.queue.is_empty()
    }

    /// The next updates, at most `most`, each for another page.
    pub fn next_updates(&mut self, now: Instant, most: usize) -> Vec<TableUpdate> {
        let mut updates = Vec::new();
        while updates.len() < most {
            let Some(page) = self.queue.pop_front() else { break };
            let Some(state) = self.pages.get_mut(&page) else { continue };
            state.queued = false;
            let state = *state;
            let object = |action| Object::Entry(page.key(), Body::new(action));
            match (self.wanted(&state), state.installed) {
                (Some((forward, until)), installed) if self.differs(&state) => {
                    let left = until.saturating_duration_since(now).as_millis();
                    let lease_ms = u16::try_from(left).unwrap_or(u16::MAX);
                    let object = object(Action::RedirectUntil { forward, lease_ms });
                    updates.push(match installed {
                        None => TableUpdate::Insert(object),
                        Some(_) => TableUpdate::Modify(object),
                    });
                }
                (None, Some(installed)) => {
                    let forward = installed.forward.map_or(Action::Drop, Action::Forward);
                    updates.push(TableUpdate::Delete(object(forward)));
                }
                _ => self.change(page, |_| {}),
            }
        }
        updates
    }

    /// Handles the result of an update that was created at `written` and whose response arrived at `responded`.
    pub fn handle_result(
        &mut self,
        written: Instant,
        responded: Instant,
        update: &TableUpdate,
        result: &Result<(), UpdateError>,
    ) {
        let Object::Entry(key, body) = update.object() else { return };
        let Some(page) = Page::from_key(key) else { return };
        match (update, result) {
            (TableUpdate::Delete(_), Ok(()) | Err(UpdateError::NotFound(_))) => {
                self.counts.removed += 1;
                self.change(page, |state| state.installed = None);
            }
            (TableUpdate::Insert(_) | TableUpdate::Modify(_), Ok(())) => {
                self.counts.installed += 1;
                let installed = InstalledRedirect::new(body.action.as_ref(), written, responded);
                self.change(page, |state| state.installed = Some(installed));
            }
            (TableUpdate::Insert(_) | TableUpdate::Modify(_), Err(UpdateError::Refused(_))) => {
                // It is retried with the next copy of the lease, so that a full table does not get too many updates.
                self.counts.switch_refused += 1;
                self.change(page, |state| {
                    if let Some(lease) = &mut state.lease {
                        lease.redirected = false;
                    }
                });
            }
            // The next reading shows the state of the switch.
            (_, Err(_)) => self.counts.switch_refused += 1,
        }
    }

    /// Compares a reading, which took from `began` to `now`, with the desired redirects, and queues the
    /// repairs; returns how many entries differed from their last known state. An expired entry
    /// is correct whether the switch still has it or not. `keeps_time` says whether the switch
    /// ends entries itself and reports their remaining time.
    pub fn compare(
        &mut self,
        began: Instant,
        now: Instant,
        read: &BTreeMap<Key, Body>,
        keeps_time: bool,
    ) -> usize {
        let mut differences = 0;
        let first = Key::Redirect { dst_scope: 0, dst_node: 0, page: 0 };
        let found = read.range(first..).map_while(|(key, body)| Some((Page::from_key(key)?, body)));
        for (page, body) in found {
            let mut found = InstalledRedirect::new(body.action.as_ref(), began, now);
            let known = self.pages.get(&page).and_then(|state| state.installed);
            let same = known.is_some_and(|known| is_same(known, found, now, keeps_time));
            if same || !keeps_time {
                found.end = known.filter(|_| same).map_or(found.end, |known| known.end);
            }
            differences += usize::from(!same);
            self.change(page, |state| state.installed = Some(found));
        }
        let may_have_ended = |redirect: InstalledRedirect| {
            keeps_time && redirect.end.is_some_and(|end| end.earliest <= now + SLACK)
        };
        let missing: Vec<(Page, bool)> = self
            .pages
            .iter()
            .filter(|(page, _)| !read.contains_key(&page.key()))
            .filter_map(|(page, state)| Some((*page, may_have_ended(state.installed?))))
            .collect();
        for (page, ended) in missing {
            differences += usize::from(!ended);
            self.change(page, |state| state.installed = None);
        }
        // Also updates whose result was unknown until this reading.
        let open = self.pages.iter().filter(|(_, state)| !state.queued && self.differs(state));
        let open: Vec<Page> = open.map(|(page, _)| *page).collect();
        for page in open {
            self.change(page, |_| {});
        }
        differences
    }
}

/// Whether the read entry equals the known one.
fn is_same(
    known: InstalledRedirect,
    found: InstalledRedirect,
    now: Instant,
    keeps_time: bool,
) -> bool {
    known.forward == found.forward
        && match (known.end, found.end) {
            (Some(known), Some(found)) => !keeps_time || known.overlaps(found, now, READING_SLACK),
            (known, found) => known.is_none() == found.is_none(),
        }
}
