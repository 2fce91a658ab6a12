//! Stored migrations, for tests.

use std::collections::BTreeMap;
use std::time::Instant;

use bluebridge_northbound::migration::{Elsewhere, Order, Report, ServedRow};
use bluebridge_wire::NodeId;

use super::{
    ContentsRecord, DeputyRecord, DrainRecord, ElsewhereRecord, LossRecord, MigrationRecord,
    Migrations, Stage, StoredMigrations,
};
use crate::core::Change;

/// The part of a store that migrations have.
#[derive(Clone, Debug, Default)]
pub(crate) struct Disk {
    records: BTreeMap<u64, MigrationRecord>,
    elsewhere: BTreeMap<ContentsRecord, ElsewhereRecord>,
    losses: BTreeMap<u16, LossRecord>,
    drains: BTreeMap<u16, DrainRecord>,
    deputies: BTreeMap<u16, DeputyRecord>,
}

impl Disk {
    pub(crate) fn write(&mut self, change: &Change) {
        match change.clone() {
            Change::Deputy(record) => drop(self.deputies.insert(record.node, record)),
            Change::DeputyGone(node) => drop(self.deputies.remove(&node)),
            Change::Drain(record) => drop(self.drains.insert(record.node, record)),
            Change::DrainGone(node) => drop(self.drains.remove(&node)),
            Change::Elsewhere(record) => drop(self.elsewhere.insert(record.home, record)),
            Change::Loss(record) => drop(self.losses.insert(record.node, record)),
            Change::LossGone(node) => drop(self.losses.remove(&node)),
            Change::Migration(record) => drop(self.records.insert(record.id, record)),
            Change::MigrationGone(id) => drop(self.records.remove(&id)),
            Change::Node(_) | Change::Rebalance(_) | Change::Space(_) | Change::SpaceGone(_) => {}
        }
    }

    pub(crate) fn load(&self) -> StoredMigrations {
        StoredMigrations {
            records: self.records.values().cloned().collect(),
            elsewhere: self.elsewhere.values().cloned().collect(),
            losses: self.losses.values().cloned().collect(),
            drains: self.drains.values().copied().collect(),
            deputies: self.deputies.values().copied().collect(),
        }
    }
}

/// The record of a migration, without what is shown of it.
pub(crate) fn record_of(core: &Migrations, id: u64) -> &MigrationRecord {
    &core.all[&id].record
}

/// Everything that the servers of a migration report until it is closed, if their connections have the numbers of their
/// nodes.
pub(crate) fn finish(core: &mut Migrations, id: u64, kept: &[ServedRow]) {
    let record = core.iter().find(|of| of.record.id == id).unwrap().record.clone();
    let mut hear = |from: NodeId, report| {
        core.handle(Instant::now(), from, u64::from(from.0), report).unwrap();
        (
            core.iter().find(|of| of.record.id == id).unwrap().record.stage,
            core.orders(record.home.id()),
        )
    };
    let (giver, taker) = (record.giver.id(), record.taker.id());
    hear(taker, Report::Reserved(id));
    hear(giver, Report::Allowed { migration: id, fences: Vec::new() });
    hear(taker, progress(id, kept, true));
    hear(giver, Report::Withdrawn(id));
    let (stage, due) = hear(taker, Report::Settled { migration: id, kept: kept.to_vec() });
    assert_eq!(stage, Stage::Settled, "the home does not know it yet");
    let learn = due.into_iter().find_map(|order| match order {
        Order::Learn(elsewhere) => Some(elsewhere),
        _ => None,
    });
    let Elsewhere { home, version, .. } = learn.unwrap();
    hear(home.node, Report::Learned { home, version });
    hear(giver, Report::Forgotten(id));
    let (stage, _) = hear(taker, Report::Released(id));
    assert_eq!(stage, Stage::Closed);
}

/// The progress of a taker.
pub(crate) fn progress(migration: u64, kept: &[ServedRow], is_done: bool) -> Report {
    let kept = kept.to_vec();
    Report::Progress {
        migration,
        kept,
        on_the_way_count: 0,
        in_doubt_count: 0,
        free_count: 0,
        is_done,
    }
}
