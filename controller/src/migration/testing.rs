//! Stored migrations, for tests.

use std::collections::BTreeMap;

use super::{ContentsRecord, ElsewhereRecord, LossRecord, MigrationRecord, StoredMigrations};
use crate::core::Change;

/// The part of a store that migrations have.
#[derive(Clone, Debug, Default)]
pub(crate) struct Disk {
    records: BTreeMap<u64, MigrationRecord>,
    elsewhere: BTreeMap<ContentsRecord, ElsewhereRecord>,
    losses: BTreeMap<u16, LossRecord>,
}

impl Disk {
    pub(crate) fn write(&mut self, change: &Change) {
        match change.clone() {
            Change::Elsewhere(record) => drop(self.elsewhere.insert(record.home, record)),
            Change::Loss(record) => drop(self.losses.insert(record.node, record)),
            Change::LossGone(node) => drop(self.losses.remove(&node)),
            Change::Migration(record) => drop(self.records.insert(record.id, record)),
            Change::MigrationGone(id) => drop(self.records.remove(&id)),
            Change::Node(_) | Change::Space(_) | Change::SpaceGone(_) => {}
        }
    }

    pub(crate) fn load(&self) -> StoredMigrations {
        StoredMigrations {
            records: self.records.values().cloned().collect(),
            elsewhere: self.elsewhere.values().cloned().collect(),
            losses: self.losses.values().cloned().collect(),
        }
    }
}
