//! Responses about the state of the core and the switch.

use std::collections::BTreeSet;
use std::time::Instant;

use bluebridge_northbound::proto;
use bluebridge_p4::declaration::table_of;
use bluebridge_p4::pipeline::{Action, Key, SwitchPort};
use bluebridge_p4::words::{Match, Port, PortNames, act_of, match_of};
use bluebridge_wire::{NodeId, Space};

use crate::core::{
    Body, Carrier, Core, DirectReads, HEARTBEATS_MISSED, Node, NodeRecord, Ports, Role, SwitchId,
    Tables,
};
use crate::driver::Installed;
use crate::reconcile::{Desired, SwitchState, SwitchView};
use crate::redirect::{RedirectPolicy, Refusal};

/// The most entries in a response.
const ENTRIES_MAX: usize = 65_536;

fn piece_bytes(core: &Core, space: Space) -> u32 {
    u32::try_from(core.piece_bytes(space)).unwrap_or(u32::MAX)
}

fn interval_ms(core: &Core) -> u32 {
    u32::try_from(core.config().heartbeat_interval.as_millis()).unwrap_or(u32::MAX).max(1)
}

pub(super) fn joined(core: &Core, record: &NodeRecord, installed: bool) -> proto::JoinResponse {
    proto::JoinResponse {
        node: record.node.into(),
        space: record.space.into(),
        incarnation: record.incarnation,
        arena_generation: record.generation.into(),
        range_epoch: record.range_epoch,
        piece_bytes: piece_bytes(core, record.space()),
        heartbeat_interval_ms: interval_ms(core),
        token: record.token.to_vec(),
        installed,
        memory_nodes: Some(memory_nodes(core, record.space())),
        notices_wanted: core.notices_wanted(record.space()),
        last_arena_generation: (*record.generations().end()).into(),
        earlier: core.migrations().earlier(record.id()).map(Into::into).collect(),
    }
}

pub(super) fn heartbeat(
    core: &Core,
    id: NodeId,
    version: u64,
    installed: bool,
) -> proto::HeartbeatResponse {
    let record = core.node(id).map(|node| &node.record);
    let space = record.map_or(Space(0), NodeRecord::space);
    proto::HeartbeatResponse {
        memory_nodes: (version != core.nodes_version()).then(|| memory_nodes(core, space)),
        range_epoch: record.map_or(0, |record| record.range_epoch),
        piece_bytes: piece_bytes(core, space),
        heartbeat_interval_ms: interval_ms(core),
        installed,
        notices_wanted: core.notices_wanted(space),
        last_arena_generation: record.map_or(0, |record| *record.generations().end()).into(),
    }
}

fn memory_nodes(core: &Core, space: Space) -> proto::MemoryNodes {
    let nodes = core.memory_nodes(space).map(|node| proto::MemoryNode {
        node: node.record.node.into(),
        name: node.record.name.clone(),
        state: state(node).into(),
        arena_generation: node.record.generation.into(),
        shard_count: node.record.shard_count.into(),
        capacity_pages: node.record.capacity_pages,
        // New allocations go to others.
        free_pages: match core.migrations().is_draining(node.record.id()) {
            true => 0,
            false => node.free_pages.unwrap_or(0),
        },
    });
    proto::MemoryNodes { version: core.nodes_version(), nodes: nodes.collect() }
}

const fn state(node: &Node) -> proto::NodeState {
    match (node.record.attached, node.live) {
        (true, true) => proto::NodeState::Live,
        (true, false) => proto::NodeState::Silent,
        (false, _) => proto::NodeState::Gone,
    }
}

pub(super) fn nodes(core: &Core) -> Vec<proto::Node> {
    core.nodes().map(|node| describe(core, node)).collect()
}

pub(super) fn node(core: &Core, id: NodeId) -> Option<proto::Node> {
    core.node(id).map(|node| describe(core, node))
}

fn describe(core: &Core, node: &Node) -> proto::Node {
    let record = &node.record;
    let role = match record.role {
        Role::Client => proto::Role::Client,
        Role::Memory => proto::Role::Memory,
    };
    let carrier = match record.carrier {
        Carrier::PacketRing => proto::Carrier::PacketRing,
        Carrier::Socket => proto::Carrier::Socket,
        Carrier::Xdp => proto::Carrier::Xdp,
    };
    let silent = Instant::now().saturating_duration_since(node.last_seen);
    let drain = core.migrations().drain_of(record.id());
    let (deputy, unanswered) = super::drains::answers_for(core, record.id());
    proto::Node {
        is_draining: drain.is_some(),
        is_drained: drain.is_some_and(|drain| drain.is_done),
        deputy,
        unanswered,
        node: record.node.into(),
        name: record.name.clone(),
        role: role.into(),
        state: state(node).into(),
        space: record.space.into(),
        incarnation: record.incarnation,
        arena_generation: record.generation.into(),
        range_epoch: record.range_epoch,
        mac: record.mac.to_vec(),
        switch: record.switch.clone(),
        switch_port: record.port.into(),
        carrier: carrier.into(),
        mtu: record.mtu,
        shard_count: record.shard_count.into(),
        capacity_pages: record.capacity_pages,
        free_pages: node.free_pages.unwrap_or(0),
        anycast_weight: core.anycast_weight(node).into(),
        notices: record.notices,
        last_arena_generation: (*record.generations().end()).into(),
        silent_ms: u64::try_from(silent.as_millis()).unwrap_or(u64::MAX),
        direct_reads: node.direct_reads.clone().map(|reads| proto::DirectReads {
            refusal: reads.refusal,
            answered_count: reads.answered_count,
            passed_count: reads.passed_count,
        }),
    }
}

pub(super) fn switch(
    name: &str,
    view: &SwitchView,
    desired: &Desired,
    policy: RedirectPolicy,
) -> proto::SwitchStatus {
    let state = match view.state {
        SwitchState::Disconnected => proto::SwitchState::Disconnected,
        SwitchState::InSync => proto::SwitchState::InSync,
        SwitchState::Syncing => proto::SwitchState::Syncing,
    };
    let ports = match &view.ports {
        Ports::Listed(ports) => ports
            .iter()
            .map(|(port, name)| proto::SwitchPort { number: port.0.into(), name: name.clone() })
            .collect(),
        Ports::Unknown | Ports::Unlisted => Vec::new(),
    };
    let there = &view.installed.tables;
    proto::SwitchStatus {
        name: name.to_owned(),
        desired_entry_count: count(desired.tables.count() + there.redirect_count()),
        installed_entry_count: count(there.count()),
        leases: Some(leases(view, policy)),
        uri: view.uri.clone(),
        state: state.into(),
        election_id_high: view.election_id.high,
        election_id_low: view.election_id.low,
        problem: view.problem.clone().unwrap_or_default(),
        ports,
        connect_count: view.counts.connects,
        pipeline_push_count: view.counts.pushes,
        full_sync_count: view.counts.readings,
        update_count: view.counts.updates,
        refused_update_count: view.counts.refused,
        repaired_count: view.counts.repaired,
        packet_in_count: view.counts.packet_ins,
        port_change_count: view.counts.port_changes,
        last_port_change: view.port_change.clone().unwrap_or_default(),
        differing_check_count: view.counts.differing_readings,
        last_difference: view.difference.clone().unwrap_or_default(),
        moved_needed_count: count(desired.moved.needed),
        moved_entry_count: count(desired.moved.there),
        moved_entry_budget: count(desired.moved.budget),
    }
}

fn leases(view: &SwitchView, policy: RedirectPolicy) -> proto::LeaseStatus {
    let counts = &view.leases.counts;
    let refused = Refusal::ALL.map(|reason| proto::RefusedCopies {
        reason: reason.name().to_owned(),
        count: counts.refused_for(reason),
    });
    proto::LeaseStatus {
        policy: policy.name().to_owned(),
        known_count: count(view.leases.known),
        redirect_count: count(view.installed.tables.redirect_count()),
        redirect_budget: count(view.leases.budget),
        budget_full_count: counts.refused_for(Refusal::BudgetFull),
        accepted_count: counts.accepted,
        refused: refused.into_iter().filter(|refused| refused.count != 0).collect(),
        lost_count: view.counts.packet_ins_lost,
        installed_count: counts.installed,
        removed_count: counts.removed,
        switch_refused_count: counts.switch_refused,
    }
}

/// Desired entries of a switch, installed entries, or both. Redirects follow copies at once, so those with an
/// expiry count as desired; others are deleted as soon as they are found.
pub(super) fn entries(
    switch: &str,
    desired: &Tables,
    installed: &Installed,
    names: &PortNames,
) -> Vec<proto::TableEntry> {
    let there = &installed.tables;
    let ports_of = there.group_ports(desired);
    let keys: BTreeSet<&Key> = desired.entries.keys().chain(there.entries.keys()).collect();
    let entries = keys.into_iter().map(|key| {
        let found = there.entries.get(key);
        let ends = |body: &&Body| matches!(body.action, Some(Action::RedirectUntil { .. }));
        let wanted = desired.entries.get(key).or_else(|| found.filter(ends));
        let counter = installed.counters.get(key).copied().unwrap_or_default();
        proto::TableEntry {
            packets: counter.packets,
            bytes: counter.bytes,
            ..line(
                table_of(key).alias,
                match_of(key, names).to_string(),
                found.or(wanted).map_or_else(String::new, |body| body.words(&ports_of, names)),
                wanted.is_some(),
                found.is_some() && (wanted.is_none() || wanted == found),
            )
        }
    });
    let ids: BTreeSet<&u16> = desired.groups.keys().chain(there.groups.keys()).collect();
    let groups = ids.into_iter().map(|id| {
        let (wanted, found) = (desired.groups.get(id), there.groups.get(id));
        line(
            "group",
            id.to_string(),
            found.or(wanted).map_or_else(String::new, |ports| ports_text(ports, names)),
            wanted.is_some(),
            found.is_some() && (wanted.is_none() || wanted == found),
        )
    });
    let flood = desired.flood_group.or(there.flood_group).map(|group| {
        let (wanted, found) = (desired.flood_group, there.flood_group);
        let action = Action::SetMulticastGroup { group };
        let (match_text, action) =
            (Match::Default.to_string(), act_of(&action, &ports_of, names).to_string());
        line("l2", match_text, action, wanted.is_some(), found == Some(group))
    });
    let (wanted, found) = (desired.notify_session, there.notify_session);
    let session = (wanted || found).then(|| {
        let (match_text, action) = ("all copies".to_owned(), "to the controller".to_owned());
        line("clone session", match_text, action, wanted, found)
    });
    let all = entries.chain(groups).chain(flood).chain(session).take(ENTRIES_MAX);
    all.map(|entry| proto::TableEntry { switch: switch.to_owned(), ..entry }).collect()
}

fn line(
    table: &str,
    match_text: String,
    action: String,
    desired: bool,
    installed: bool,
) -> proto::TableEntry {
    proto::TableEntry {
        table: table.to_owned(),
        r#match: match_text,
        action,
        desired,
        installed,
        ..proto::TableEntry::default()
    }
}

fn count(number: usize) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

fn ports_text(ports: &BTreeSet<SwitchPort>, names: &PortNames) -> String {
    let ports: Vec<String> = ports.iter().map(|port| Port::of(*port, names).to_string()).collect();
    ports.join(" ")
}

/// What is at the ports of a switch: endpoints by their names, and the controller.
pub(super) fn port_names(core: &Core, switch: SwitchId) -> PortNames {
    let name = core.config().topology.name(switch);
    let here = core.nodes().map(|node| &node.record);
    let here = here.filter(|record| record.attached && record.switch == name);
    let own = core.config().own_port.filter(|own| own.place.switch == switch);
    let own = own.map(|own| (own.place.port.0, "controller".to_owned()));
    here.map(|record| (record.port, record.name.clone())).chain(own).collect()
}

const _: () =
    assert!(HEARTBEATS_MISSED == 3, "the API's description of NODE_STATE_SILENT says three");

/// The longest reason that is kept, in characters.
const REFUSAL_CHARS: usize = 300;

impl From<proto::DirectReads> for DirectReads {
    fn from(reads: proto::DirectReads) -> Self {
        let proto::DirectReads { refusal, answered_count, passed_count } = reads;
        let refusal = refusal.chars().filter(|c| !c.is_control()).take(REFUSAL_CHARS).collect();
        Self { refusal, answered_count, passed_count }
    }
}

#[cfg(test)]
mod tests {
    use bluebridge_p4::pipeline::{Forward, MacAddr};

    use super::*;

    /// The same words as those of `switch show`, which come from the same code.
    #[test]
    fn entries_read_as_those_of_the_switch() {
        let names = PortNames::from([(1, "s1".to_owned())]);
        let forward = Forward { port: SwitchPort(1), dst_mac: MacAddr([2, 0, 0, 0, 0, 1]) };
        let prefix = 0xfdbb_0001_0002_u128 << 64;
        let directory = Key::Directory { prefix, prefix_len: 48 };
        let multicast = Key::Multicast { dst_scope: 0xfdbb_0001 };
        let entries = [
            (directory, Body::new(Action::Forward(forward))),
            (multicast, Body::new(Action::SetMulticastGroup { group: 7 })),
        ];
        let desired = Tables {
            entries: entries.into(),
            groups: [(7, BTreeSet::from([SwitchPort(1), SwitchPort(2)]))].into(),
            flood_group: Some(7),
            notify_session: false,
        };
        let found = super::entries("", &desired, &Installed::default(), &names);
        let found: Vec<_> =
            found.iter().map(|it| [it.table.as_str(), it.r#match.as_str(), &it.action]).collect();
        assert_eq!(
            found,
            [
                ["directory", "fdbb:1:2::/48", "to s1 as 02:00:00:00:00:01"],
                ["multicast", "fdbb:1:ffff::/48 (notices)", "copy to s1 port 2"],
                ["group", "7", "s1 port 2"],
                ["l2", "anything else", "copy to s1 port 2"],
            ]
        );
    }
}
