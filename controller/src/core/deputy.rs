//! Decides which server answers for another one that is drained and gone, and leads the switches there.

use std::time::{Duration, Instant};

use bluebridge_p4::pipeline::{Action, Forward, Key};
use bluebridge_wire::NodeId;

use super::desired::{Route, node_prefix};
use super::tables::{Body, Tables};
use super::{Core, GATEWAY_MAC, MemberChange, SwitchId};
use crate::migration::DeputyRecord;

impl Core {
    /// Chooses deputies for servers that need one, or another one.
    pub(super) fn tend_deputies(&mut self, now: Instant) {
        for (home, idle) in self.migrations.without_deputy(now) {
            self.appoint(now, home, idle);
        }
    }

    /// Chooses a deputy for a server, if there is any that can be it. From then on the server's process, if there is one,
    /// is no member any more: the deputy has the next incarnation.
    fn appoint(&mut self, now: Instant, home: NodeId, idle: Duration) {
        let is_live = |id: &NodeId| self.nodes.get(id).is_some_and(|node| node.live);
        let found = self.migrations.deputy_candidates(home).into_iter().find(is_live);
        let Some((at, at_incarnation)) =
            found.and_then(|id| Some((id, self.nodes.get(&id)?.record.incarnation)))
        else {
            return;
        };
        let record = self.nodes.get(&home).map(|node| node.record.clone());
        let Some(mut record) = record.filter(|record| !record.retired) else { return };
        let (Some(incarnation), Some(range_epoch)) =
            (record.incarnation.checked_add(1), record.range_epoch.checked_add(1))
        else {
            return;
        };
        (record.incarnation, record.range_epoch) = (incarnation, range_epoch);
        if let Some(node) = self.nodes.get_mut(&home) {
            node.record = record;
        }
        // This stores the record, and removes what leads to the server.
        self.detach(now, home, MemberChange::Deputized(at));
        let last_generation =
            self.nodes.get(&home).map_or(0, |node| *node.record.generations().end());
        self.migrations.appoint(
            now,
            DeputyRecord {
                node: home.0,
                incarnation,
                last_generation,
                range_epoch,
                at: at.0,
                at_incarnation,
                idle_ms: u64::try_from(idle.as_millis()).unwrap_or(u64::MAX),
            },
        );
    }

    /// How a switch forwards to the deputy of a server.
    pub(super) fn deputy_forward(
        &self,
        switch: SwitchId,
        home: NodeId,
    ) -> Option<(Forward, Route)> {
        let record = self.migrations.deputy_of(home)?;
        let deputy = self.nodes.get(&record.deputy())?;
        // Its next process does not know of it.
        if deputy.record.incarnation != record.at_incarnation {
            return None;
        }
        let route = self.route(switch, deputy)?;
        let dst_mac = if route.is_local { deputy.record.mac() } else { GATEWAY_MAC };
        Some((Forward { port: route.port, dst_mac }, route))
    }

    /// The entries for servers that are gone: their addresses lead to the deputies, which may send from them. They take the
    /// places of the entries that the servers themselves had.
    pub(super) fn add_deputies(&self, tables: &mut Tables, switch: SwitchId) {
        for record in self.migrations.deputies() {
            let Some(space) = self.nodes.get(&record.home()).map(|home| home.record.space()) else {
                continue;
            };
            let Some((forward, route)) = self.deputy_forward(switch, record.home()) else {
                continue;
            };
            let (port, src_scope, src_node) = (route.port, space.scope(), record.node);
            let guard = Key::IngressGuard { port, src_scope, src_node };
            tables.entries.insert(guard, Body::new(Action::Allow));
            let forward = Body::new(Action::Forward(forward));
            tables.entries.insert(node_prefix(space, record.home()), forward);
        }
    }
}
