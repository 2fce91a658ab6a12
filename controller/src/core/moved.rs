//! Entries for pages that are at other servers than their home, as few aligned prefixes as possible.
//!
//! They are hints: the home answers requests for pages that moved with the server that has them. So what has only begun
//! to move gets entries if there is room, but nothing begins to move whose entries would not fit in the end.

use std::collections::BTreeMap;
use std::net::Ipv6Addr;
use std::ops::Range;

use bluebridge_p4::declaration::Table;
use bluebridge_p4::pipeline::{Action, Forward, Key};
use bluebridge_wire::address::{OFFSET_BITS, PAGE_SHIFT};
use bluebridge_wire::{NodeId, Space};
use ipnet::{Ipv6Net, Ipv6Subnets};

use super::desired::Route;
use super::tables::{Body, Tables};
use super::{Core, GATEWAY_MAC, SwitchId};
use crate::migration::{GenerationRange, MigrateError, MigrationRecord, Moves, Wanted};

/// The entries of `directory` that a switch can hold, as the pipeline declares.
pub(super) const DIRECTORY_SIZE: u32 = Table::Directory.declaration().size;

/// The endpoints that a switch can let in, and therefore the most entries of their own.
const ENDPOINTS_MAX: usize = Table::IngressGuard.declaration().size as usize;

/// The bits of an address after the directory's key, in which both are compared.
const KEY_SHIFT: u32 = 16;

/// The fewest prefixes that cover pages of a home, in pointers of these generations.
pub(super) fn prefixes(
    space: Space,
    home: NodeId,
    generations: GenerationRange,
    pages: &Range<u64>,
) -> impl Iterator<Item = Ipv6Net> + use<> {
    let node = (space.scope() as u128) << 80 | u128::from(home.0) << 64;
    let first = u128::from(pages.start) << PAGE_SHIFT;
    let end = u128::from(pages.end) << PAGE_SHIFT;
    (generations.first..=generations.last).flat_map(move |generation| {
        let of = node | u128::from(generation) << OFFSET_BITS;
        let address = |location: u128| Ipv6Addr::from((of | location) << KEY_SHIFT);
        // The last address is the one before that of the next page.
        let last = u128::from(address(end - 1)) | ((1 << KEY_SHIFT) - 1);
        Ipv6Subnets::new(address(first), last.into(), 0)
    })
}

/// The key of an entry.
fn key(prefix: Ipv6Net) -> Key {
    Key::Directory {
        prefix: u128::from(prefix.network()) >> KEY_SHIFT,
        prefix_len: prefix.prefix_len(),
    }
}

/// The entries of a switch for pages that moved.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct MovedUse {
    /// The fewest entries for all pages that moved.
    pub needed: usize,
    /// The entries that the switch gets. If they are not all, the home leads clients to the other pages.
    pub there: usize,
    /// The most entries that it may get.
    pub budget: usize,
}

impl MovedUse {
    /// Whether all pages that moved have entries.
    #[must_use]
    pub const fn is_complete(&self) -> bool {
        self.needed <= self.budget
    }
}

impl Core {
    /// Plans and records what an operator wants to move, in one change.
    ///
    /// # Errors
    /// [`MigrateError`]; nothing changed.
    pub fn migrate(&mut self, wanted: &Wanted) -> Result<Vec<u64>, MigrateError> {
        self.migrate_because(wanted, "")
    }

    /// As [`Self::migrate`], with a reason for people.
    pub(super) fn migrate_because(
        &mut self,
        wanted: &Wanted,
        reason: &str,
    ) -> Result<Vec<u64>, MigrateError> {
        let mut planned = self.migrations.plan(wanted)?;
        self.check_room_for(&planned)?;
        planned.iter_mut().for_each(|record| reason.clone_into(&mut record.reason));
        Ok(self.migrations.record(planned))
    }

    /// As [`Self::migrate_because`], for what nobody asked for: half of the entries stay for others, unless it needs fewer
    /// than before.
    pub(super) fn migrate_quietly(
        &mut self,
        wanted: &Wanted,
        reason: &str,
    ) -> Result<Vec<u64>, MigrateError> {
        let mut planned = self.migrations.plan(wanted)?;
        let switches: Vec<_> = self.config.topology.switches().collect();
        for switch in switches {
            let entries = |planned| self.moved(switch, Moves::All(planned)).len();
            let (before, budget) = (entries(&[]), self.moved_budget() / 2);
            self.check_entries(switch, entries(&planned), budget.max(before))?;
        }
        planned.iter_mut().for_each(|record| reason.clone_into(&mut record.reason));
        Ok(self.migrations.record(planned))
    }

    fn check_entries(
        &self,
        switch: SwitchId,
        needed: usize,
        budget: usize,
    ) -> Result<(), MigrateError> {
        if needed <= budget {
            return Ok(());
        }
        let switch = match self.config.topology.name(switch) {
            "" => "1".to_owned(),
            name => name.to_owned(),
        };
        Err(MigrateError::TableFull { switch, needed, budget })
    }

    /// Checks that every switch has room for all entries, when all that is moving and planned has moved.
    fn check_room_for(&self, planned: &[MigrationRecord]) -> Result<(), MigrateError> {
        let budget = self.moved_budget();
        for switch in self.config.topology.switches() {
            let needed = self.moved(switch, Moves::All(planned)).len();
            self.check_entries(switch, needed, budget)?;
        }
        Ok(())
    }

    /// The most entries of a switch for pages that moved: the endpoints' own ones must always have room.
    pub(super) fn moved_budget(&self) -> usize {
        let size = self.config.directory_size;
        size - ENDPOINTS_MAX.min(size / 2)
    }

    /// Adds the entries for pages that moved, after those of endpoints.
    pub(super) fn add_moved(&self, tables: &mut Tables, switch: SwitchId) -> MovedUse {
        let there =
            tables.entries.keys().filter(|key| matches!(key, Key::Directory { .. })).count();
        let budget = self.moved_budget().min(self.config.directory_size.saturating_sub(there));
        let mut entries = self.moved(switch, Moves::Kept);
        let needed = entries.len();
        // Lines of a range arrive one by one, and then there are more prefixes than in the end.
        if entries.len() > budget {
            entries = self.moved(switch, Moves::Settled);
        }
        // A range may have stayed in pieces. The largest blocks count most.
        entries.sort_by_key(|(prefix, _)| (prefix.prefix_len(), *prefix));
        entries.truncate(budget);
        let there = entries.len();
        for (prefix, forward) in entries {
            tables.entries.insert(key(prefix), Body::new(Action::Forward(forward)));
        }
        MovedUse { needed, there, budget }
    }

    /// The prefixes of pages that moved, and where a switch forwards to.
    pub(super) fn moved(&self, switch: SwitchId, moves: Moves<'_>) -> Vec<(Ipv6Net, Forward)> {
        let forward_to = |id: NodeId| {
            let node = self.nodes.get(&id)?;
            let Route { port, is_local } = self.route(switch, node)?;
            let dst_mac = if is_local { node.record.mac() } else { GATEWAY_MAC };
            Some(Forward { port, dst_mac })
        };
        let mut by_forward: BTreeMap<Forward, Vec<Ipv6Net>> = BTreeMap::new();
        for (home, space, rows) in self.migrations.places(moves) {
            let to_deputy = || self.deputy_forward(switch, home.id()).map(|(forward, _)| forward);
            let to_home = forward_to(home.id()).or_else(to_deputy);
            for (pages, placed) in rows.iter().filter(|(_, at)| self.migrations.is_present(at.at)) {
                // The home's own entry may lead the same way.
                let forward = forward_to(placed.at.id()).filter(|it| Some(*it) != to_home);
                if let Some(forward) = forward {
                    let found = prefixes(Space(space), home.id(), placed.generations, pages);
                    by_forward.entry(forward).or_default().extend(found);
                }
            }
        }
        let aggregate = |(forward, nets): (_, Vec<Ipv6Net>)| {
            Ipv6Net::aggregate(&nets).into_iter().map(move |net| (net, forward))
        };
        by_forward.into_iter().flat_map(aggregate).collect()
    }
}
