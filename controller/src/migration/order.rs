//! The orders that are due.

use bluebridge_northbound::migration::{Contents, EarlierRow, Elsewhere, Order};
use bluebridge_wire::NodeId;
use bluebridge_wire::address::{PAGE_SHIFT, SHARD_SHIFT};

use super::{ContentsRecord, End, Migration, MigrationRecord, Migrations, Stage};

/// The shard of the pages of a migration.
const fn shard(record: &MigrationRecord) -> u64 {
    record.pages.start >> (SHARD_SHIFT - PAGE_SHIFT)
}

impl Migrations {
    /// The orders that are due to a server: those that it has not got through its connection must be sent, in this order.
    #[must_use]
    pub fn orders(&self, to: NodeId) -> Vec<Order> {
        let server = self.servers.get(&to);
        let Some(link) = server.and_then(|server| server.link.as_ref()).filter(|it| it.migrates)
        else {
            return Vec::new();
        };
        // Who does not know of a loss learns nothing else.
        let unaware = self.losses.values().filter(|loss| loss.unaware.contains(&to.0));
        let losses: Vec<Order> = unaware
            .map(|loss| {
                let of = ContentsRecord { node: loss.node, generation: loss.began };
                let Contents { node, generation: began } = of.contents();
                Order::Lose { node, began }
            })
            .collect();
        if !losses.is_empty() {
            return losses;
        }
        // Nor does a server that lost its memory, before all know that.
        if !self.is_known(to) {
            return Vec::new();
        }
        let of_home = self.elsewhere.values().map(|of| &of.record).filter(|of| {
            of.home.id() == to && !of.is_pending && link.learned.get(&of.home) != Some(&of.version)
        });
        let of_deputies = self.deputy_orders(to);
        let learn = of_home.map(|of| {
            Order::Learn(Elsewhere {
                home: of.home.contents(),
                version: of.version,
                rows: of.rows.iter().map(|(pages, at)| (pages.clone(), at.at.id())).collect(),
                lost: of.lost.iter().map(|(pages, ())| pages.clone()).collect(),
            })
        });
        let rounds = self.elsewhere.values().filter(|of| {
            let is_asked = || self.participants(of.record.home).contains(&to);
            of.record.is_pending && !of.claims.contains_key(&to) && is_asked()
        });
        let report = rounds
            .map(|of| Order::Report { home: of.record.home.contents(), round: of.record.version });
        let next = self.open().filter_map(|of| self.next_order(of));
        let next = next.filter(|(server, _)| *server == to).map(|(_, order)| order);
        let discards = self.discards(to);
        of_deputies.into_iter().chain(learn).chain(report).chain(next).chain(discards).collect()
    }

    /// What other servers have, or may have, of contents that a node lost. It learns of changes by [`Order::Learn`].
    pub fn earlier(&self, node: NodeId) -> impl Iterator<Item = EarlierRow> {
        let of_node = self.elsewhere.values().map(|of| &of.record);
        let lost = of_node.filter(move |of| of.home.id() == node && !self.is_present(of.home));
        lost.flat_map(|of| self.rows_elsewhere(of))
    }

    /// Contents of which others have pages, and that their server has lost, or for which a deputy answers.
    pub fn lost_contents(&self) -> impl Iterator<Item = Contents> {
        let homes = self.elsewhere.values().map(|of| of.record.home);
        let is_lost = |home: &ContentsRecord| !self.is_present(*home) || self.has_deputy(home.id());
        homes.filter(is_lost).map(ContentsRecord::contents)
    }

    /// The order of a migration that is due, and to whom.
    fn next_order(&self, of: &Migration) -> Option<(NodeId, Order)> {
        let record = &of.record;
        let (giver, taker, id) = (record.giver.id(), record.taker.id(), record.id);
        if of.put_off.is_some() {
            return None;
        }
        match (record.stage, &of.fences) {
            (Stage::Recorded, _) => Some((taker, Order::Reserve(record.terms()))),
            (Stage::Reserved, _) => {
                self.hindrance(record).is_none().then(|| (giver, Order::Allow(record.terms())))
            }
            // The fences were forgotten with the last process; the giver names them again.
            (Stage::Allowed, None) => Some((giver, Order::Allow(record.terms()))),
            (Stage::Allowed, Some(fences)) => {
                Some((taker, Order::Take { terms: record.terms(), fences: fences.clone() }))
            }
            (Stage::Ending, _) => Some((giver, Order::Withdraw(id))),
            (Stage::Withdrawn, _) => {
                self.is_present(record.taker).then(|| (taker, Order::Settle(record.terms())))
            }
            (Stage::Learned, _) => Some((giver, Order::Forget(id))),
            (Stage::Forgotten, _) => Some((taker, Order::Release(id))),
            (Stage::Settled | Stage::Closed, _) => None,
        }
    }

    /// An earlier migration before which this one must not be allowed.
    ///
    /// A giver takes a lower id than one that it has allowed in the shard for late. And it refuses a taker's
    /// earlier incarnation once it has seen the next one, so this must not begin before the old one's lines have arrived.
    pub(super) fn hindrance(&self, record: &MigrationRecord) -> Option<u64> {
        let earlier = self.all.range(..record.id).map(|(_, of)| &of.record);
        let mut of_giver = earlier.filter(|other| other.giver == record.giver);
        let found = of_giver.find(|other| {
            let is_first = other.stage <= Stage::Reserved && shard(other) == shard(record);
            let is_older = other.taker == record.taker
                && other.taker_incarnation < record.taker_incarnation
                && other.stage < Stage::Settled;
            is_first || is_older
        });
        found.map(|other| other.id)
    }

    /// What a migration waits for, for people.
    pub(super) fn waits(&self, of: &Migration) -> Option<String> {
        let record = &of.record;
        if !record.is_open() {
            return None;
        }
        if let Some(words) = &of.put_off {
            return Some(words.clone());
        }
        if let Some(words) = &of.complaint {
            return Some(words.clone());
        }
        for party in [record.giver.id(), record.taker.id(), record.home.id()] {
            let unaware = self.losses.get(&party).into_iter().flat_map(|loss| &loss.unaware);
            let names: Vec<String> = unaware.map(|node| self.name(NodeId(*node))).collect();
            if !names.is_empty() {
                let (lost, names) = (self.name(party), names.join(", "));
                return Some(format!("{names} must learn that {lost} lost its memory"));
            }
        }
        let (whose, what) = match record.stage {
            Stage::Reserved if let Some(other) = self.hindrance(record) => {
                return Some(format!("migration {other} is before it"));
            }
            Stage::Settled => {
                let elsewhere = self.elsewhere.get(&record.home);
                if let Some(of) = elsewhere.filter(|of| of.record.is_pending) {
                    let must = || "servers must report what they have".to_owned();
                    return Some(of.complaint.clone().unwrap_or_else(must));
                }
                match self.deputy_of(record.home.id()) {
                    Some(of) => {
                        (of.deputy(), "must learn where the pages are for which it answers")
                    }
                    None => (record.home.id(), "must learn where its pages are"),
                }
            }
            Stage::Recorded => (record.taker.id(), "must reserve frames"),
            Stage::Allowed if of.fences.is_some() => (record.taker.id(), ""),
            Stage::Reserved | Stage::Allowed => (record.giver.id(), "must allow it"),
            Stage::Ending => (record.giver.id(), "must withdraw its permission"),
            Stage::Withdrawn => (record.taker.id(), "has lines on their way"),
            Stage::Learned => (record.giver.id(), "must forget what it gave"),
            Stage::Forgotten => (record.taker.id(), "must free what is still reserved"),
            Stage::Closed => return None,
        };
        let server = self.servers.get(&whose)?;
        let name = &server.name;
        match &server.link {
            None => Some(format!("{name} has no connection to the controller")),
            Some(link) if !link.migrates => {
                Some(format!("memory server {name} does not support migration"))
            }
            Some(_) if what.is_empty() => None,
            Some(_) => Some(format!("{name} {what}")),
        }
    }
}

/// The orders that were sent through a connection and are still due.
#[derive(Clone, Debug, Default)]
pub struct Sent(Vec<Order>);

impl Sent {
    /// The orders that must be sent now, given all that are due. One that was sent and is no longer due is sent again
    /// when it is due again.
    pub fn fresh(&mut self, due: Vec<Order>) -> Vec<Order> {
        let fresh = due.iter().filter(|order| !self.0.contains(order)).cloned().collect();
        self.0 = due;
        fresh
    }
}

impl MigrationRecord {
    /// Why it ended before all lines had moved, for people; `name` names servers.
    #[must_use]
    pub fn why(&self, name: impl Fn(NodeId) -> String) -> Option<String> {
        Some(match self.end.as_ref()? {
            End::Cancelled => "it was cancelled".to_owned(),
            End::GiverLost => format!("{} lost its memory", name(self.giver.id())),
            End::TakerLost => format!("{} lost its memory", name(self.taker.id())),
            End::TakerAway => format!(
                "{} had no connection to the controller, and another migration waited for this one",
                name(self.taker.id())
            ),
            End::Refused { node, why } => {
                format!("{} refused it: {}", name(NodeId(*node)), why.refusal())
            }
        })
    }
}
