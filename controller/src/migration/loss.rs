//! Servers that lost their memory, and rounds of reports about where the pages of a home are.
//!
//! Lines that a server had are lost only if no server has them: they may have moved on. So all that may have pages of
//! the home report, and reports of different moments do not count together: with every change a new round begins.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use bluebridge_wire::NodeId;

use super::{
    Change, ContentsRecord, End, GenerationRange, LossRecord, MigrationRecord, Migrations, PageMap,
    Placed, Stage,
};

/// What a server reported in a round.
#[derive(Clone, Debug)]
pub(super) struct Claims {
    pub(super) served: PageMap<GenerationRange>,
    /// What it gave to the takers of migrations that are not closed.
    pub(super) given: PageMap<()>,
    /// What a home had given to servers that lost their memory.
    pub(super) lost: PageMap<()>,
}

impl Migrations {
    /// Whether all servers know what a server lost. Those that left learn it first when they are back.
    pub(super) fn is_known(&self, node: NodeId) -> bool {
        let is_here =
            |node: &u16| self.servers.get(&NodeId(*node)).is_some_and(|it| it.is_attached);
        self.losses.get(&node).is_none_or(|loss| !loss.unaware.iter().any(is_here))
    }

    /// The servers that have, or may have, anything to do with each other because of migrations.
    fn concerned(&self) -> BTreeSet<u16> {
        let parties = |record: &MigrationRecord| [record.home, record.giver, record.taker];
        let of_open = self.open().flat_map(|of| parties(&of.record));
        let records = || self.elsewhere.values().map(|of| &of.record);
        let homes = records().map(|of| of.home);
        let at = records().flat_map(|of| of.rows.iter().map(|(_, placed)| placed.at));
        of_open.chain(homes).chain(at).map(|contents| contents.node).collect()
    }

    /// A node lost the contents that it had; its present ones began with a generation.
    pub(super) fn lose(&mut self, node: NodeId, began: u16) {
        let mut unaware = self.concerned();
        if unaware.remove(&node.0) && !unaware.is_empty() {
            if let Some(before) = self.losses.get(&node) {
                unaware.extend(&before.unaware);
            }
            let loss = LossRecord { node: node.0, began, unaware };
            self.changes.push(Change::Loss(loss.clone()));
            self.losses.insert(node, loss);
        }
        // It has nothing that it would have to forget because of others.
        let others: Vec<NodeId> = self.losses.keys().copied().filter(|it| *it != node).collect();
        for other in others {
            self.note_aware(node, other, u16::MAX);
        }
        let ids: Vec<u64> = self.open().map(|of| of.record.id).collect();
        for id in ids {
            self.lose_in(id, node);
        }
        let open: Vec<MigrationRecord> = self.open().map(|of| of.record.clone()).collect();
        let is_part = |it: &MigrationRecord| it.giver.id() == node || it.taker.id() == node;
        let mut homes: BTreeMap<_, _> =
            open.iter().filter(|it| is_part(it)).map(|it| (it.home, it.space)).collect();
        for of in self.elsewhere.values().map(|of| &of.record) {
            let had_any = || of.rows.iter().any(|(_, placed)| placed.at.id() == node);
            if of.home.id() == node || had_any() {
                homes.insert(of.home, of.space);
            }
        }
        for (home, space) in homes {
            self.edit_elsewhere(home, space, |of| {
                of.is_pending = true;
                if home.id() == node {
                    of.lost = PageMap::default();
                }
            });
        }
    }

    /// What the loss of a server's memory means for a migration.
    fn lose_in(&mut self, id: u64, node: NodeId) {
        let Some(of) = self.all.get_mut(&id) else { return };
        let MigrationRecord { home, giver, taker, stage, .. } = of.record;
        let is_early = stage < Stage::Withdrawn;
        if giver.id() == node && is_early {
            of.fences = None;
            // Its permission is lost as well.
            let next = if stage == Stage::Recorded { Stage::Forgotten } else { Stage::Withdrawn };
            self.end(id, next, End::GiverLost);
        } else if taker.id() == node {
            let next = match stage {
                Stage::Recorded => Stage::Forgotten,
                Stage::Reserved | Stage::Allowed => Stage::Ending,
                stage => stage,
            };
            self.edit(id, |record| {
                record.stage = next;
                record.kept = PageMap::default();
                if stage <= Stage::Withdrawn {
                    record.end.get_or_insert(End::TakerLost);
                }
            });
        }
        // What the home has learned is lost with its memory, and the giver has not forgotten yet.
        if home.id() == node && stage == Stage::Learned {
            self.enter(id, Stage::Settled);
        }
    }

    /// A server knows that a node lost its memory.
    pub(super) fn note_aware(&mut self, server: NodeId, node: NodeId, began: u16) {
        let Some(loss) = self.losses.get_mut(&node).filter(|loss| loss.began <= began) else {
            return;
        };
        if !loss.unaware.remove(&server.0) {
            return;
        }
        if loss.unaware.is_empty() {
            self.losses.remove(&node);
            self.changes.push(Change::LossGone(node.0));
        } else {
            self.changes.push(Change::Loss(loss.clone()));
        }
    }

    /// The servers that know something of a home's pages: those that may have some, and the home, if they still have their
    /// memory.
    pub(super) fn participants(&self, home: ContentsRecord) -> BTreeSet<NodeId> {
        let of_home = self.open().map(|of| &of.record).filter(|record| record.home == home);
        let parties = of_home.flat_map(|record| [record.giver, record.taker]);
        let rows = self.elsewhere.get(&home).into_iter().flat_map(|of| of.record.rows.iter());
        let all = parties.chain(rows.map(|(_, placed)| placed.at)).chain([home]);
        // A home that is gone has none of its pages, and gave none to migrations that are open.
        let is_gone = self.deputies.contains_key(&home.id());
        let is_it = |at: &ContentsRecord| {
            (at.node != home.node || *at == home && !is_gone) && self.is_present(*at)
        };
        all.filter(is_it).map(ContentsRecord::id).collect()
    }

    /// Ends the rounds in which all have reported.
    pub(super) fn conclude_rounds(&mut self) {
        let is_complete = |home: ContentsRecord, claims: &BTreeMap<NodeId, Claims>| {
            self.participants(home).iter().all(|node| claims.contains_key(node))
        };
        let complete: Vec<ContentsRecord> = self
            .elsewhere
            .iter()
            .filter(|(home, of)| of.record.is_pending && is_complete(**home, &of.claims))
            .map(|(home, _)| *home)
            .collect();
        for home in complete {
            self.conclude_round(home);
        }
    }

    /// The ranges of a home that a server gives to takers that have lost their memory since.
    fn given_in_vain(&self, home: ContentsRecord, giver: NodeId) -> Vec<Range<u64>> {
        let open = self.open().map(|of| &of.record);
        let of_giver = open.filter(|it| it.home == home && it.giver.id() == giver);
        of_giver.filter(|it| !self.is_present(it.taker)).map(|it| it.pages.clone()).collect()
    }

    fn conclude_round(&mut self, home: ContentsRecord) {
        let Some(of) = self.elsewhere.get(&home) else { return };
        let (space, before) = (of.record.space, &of.record.rows);
        let mut rows = PageMap::default();
        let placed_at = |node: NodeId, pages: &Range<u64>| -> Vec<_> {
            let parts = before.within(pages).map(|(part, placed)| (part, *placed));
            parts.filter(|(_, it)| it.at.id() == node && self.is_present(it.at)).collect()
        };
        // What was given leads to the taker. It may have left, or may be with the taker already. What was given to one that
        // lost its memory is lost.
        let mut lost = of.record.lost.clone();
        for (node, claims) in &of.claims {
            let mut given = claims.given.clone();
            for pages in self.given_in_vain(home, *node) {
                for (part, ()) in claims.given.within(&pages) {
                    given.remove(&part);
                    if *node == home.id() {
                        lost.insert(part, ());
                    }
                }
            }
            for (pages, ()) in given.iter() {
                for (part, placed) in placed_at(*node, pages) {
                    rows.insert(part, placed);
                }
            }
        }
        for (node, claims) in &of.claims {
            for (pages, generations) in claims.served.iter() {
                for (part, placed) in placed_at(*node, pages) {
                    rows.insert(part, Placed { generations: *generations, ..placed });
                }
            }
        }
        // A taker's report counts more than its giver's, which may be of the moment before.
        let of_home = self.open().map(|of| &of.record).filter(|record| record.home == home);
        let is_there = |it: &MigrationRecord| it.taker != home && self.is_present(it.taker);
        for record in of_home.filter(|record| is_there(record)) {
            let Some(claims) = of.claims.get(&record.taker.id()) else { continue };
            for (part, generations) in claims.served.within(&record.pages) {
                rows.insert(part, Placed { at: record.taker, generations: *generations });
            }
        }
        for (pages, ()) in of.claims.get(&home.id()).into_iter().flat_map(|it| it.lost.iter()) {
            lost.insert(pages.clone(), ());
        }
        for (pages, _) in before.iter().filter(|_| self.is_present(home)) {
            for gap in rows.gaps(pages) {
                lost.insert(gap, ());
            }
        }
        for (pages, _) in rows.iter() {
            lost.remove(pages);
        }
        self.edit_elsewhere(home, space, |record| {
            record.is_pending = false;
            record.rows = rows;
            record.lost = lost;
        });
    }
}
