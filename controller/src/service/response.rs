//! Responses about the state of the core and the switch.

use std::collections::BTreeSet;
use std::net::Ipv6Addr;
use std::time::Instant;

use bluebridge_northbound::proto;
use bluebridge_p4::declaration::table_of;
use bluebridge_p4::pipeline::{Action, Forward, Key, SwitchPort, Ternary};
use bluebridge_wire::address::NODE_PREFIX_LEN;
use bluebridge_wire::{NodeId, Space};

use crate::core::{Body, Carrier, Core, HEARTBEATS_MISSED, Node, NodeRecord, Ports, Role, Tables};
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
        free_pages: node.free_pages.unwrap_or(0),
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
    core.nodes().map(|node| describe(node, core.anycast_weight(node))).collect()
}

pub(super) fn node(core: &Core, id: NodeId) -> Option<proto::Node> {
    core.node(id).map(|node| describe(node, core.anycast_weight(node)))
}

fn describe(node: &Node, anycast_weight: u16) -> proto::Node {
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
    proto::Node {
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
        anycast_weight: anycast_weight.into(),
        notices: record.notices,
        last_arena_generation: (*record.generations().end()).into(),
        silent_ms: u64::try_from(silent.as_millis()).unwrap_or(u64::MAX),
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
) -> Vec<proto::TableEntry> {
    let there = &installed.tables;
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
                key_text(key),
                found.or(wanted).map_or_else(String::new, body_text),
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
            found.or(wanted).map_or_else(String::new, ports_text),
            wanted.is_some(),
            found.is_some() && (wanted.is_none() || wanted == found),
        )
    });
    let flood = desired.flood_group.or(there.flood_group).map(|group| {
        let (wanted, found) = (desired.flood_group, there.flood_group);
        let (match_text, action) = ("anything else".to_owned(), format!("flood group {group}"));
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

fn ports_text(ports: &BTreeSet<SwitchPort>) -> String {
    let ports: Vec<String> = ports.iter().map(|port| port.0.to_string()).collect();
    format!("ports {}", ports.join(" "))
}

/// A scope and a node as an IPv6 prefix of 48 bits.
fn node_text(scope: u32, node: u16) -> String {
    prefix_text(scope, node, NODE_PREFIX_LEN)
}

fn prefix_text(scope: u32, node: u16, prefix_len: u8) -> String {
    let first = Ipv6Addr::from(u128::from(scope) << 96 | u128::from(node) << 80);
    format!("{first}/{prefix_len}")
}

fn scope_text(scope: u32) -> String {
    format!("{}/32", Ipv6Addr::from(u128::from(scope) << 96))
}

#[expect(clippy::cast_possible_truncation, reason = "a part of the prefix is wanted")]
fn key_text(key: &Key) -> String {
    match *key {
        Key::IngressGuard { port, src_scope, src_node } => {
            format!("port {} from {}", port.0, node_text(src_scope, src_node))
        }
        Key::Redirect { dst_scope, dst_node, page } => {
            format!("{} page {page:#x}", node_text(dst_scope, dst_node))
        }
        Key::Directory { prefix, prefix_len } if prefix_len <= NODE_PREFIX_LEN => {
            prefix_text((prefix >> 80) as u32, (prefix >> 64) as u16, prefix_len)
        }
        Key::Directory { prefix, prefix_len } => {
            let node = node_text((prefix >> 80) as u32, (prefix >> 64) as u16);
            format!("{node} location {:#018x}, prefix {prefix_len} of 112", prefix as u64)
        }
        Key::Anycast { dst_scope } => format!("any memory node of {}", scope_text(dst_scope)),
        Key::Multicast { dst_scope } => format!("every node of {}", scope_text(dst_scope)),
        Key::Notify { src_command, dst_command, src_status, priority } => {
            let text = |Ternary { value, mask }: Ternary| format!("{value:#04x}/{mask:#04x}");
            format!(
                "source command {}, command {}, status {}, priority {priority}",
                text(src_command),
                text(dst_command),
                text(src_status)
            )
        }
        Key::L2 { dst_mac } => dst_mac.to_string(),
        Key::PortMac { port } => format!("port {}", port.0),
    }
}

fn body_text(body: &Body) -> String {
    let to = |forward: &Forward| format!("port {} as {}", forward.port.0, forward.dst_mac);
    match &body.action {
        None => "an action of another controller".to_owned(),
        Some(Action::Allow) => "allow".to_owned(),
        Some(Action::Drop) => "drop".to_owned(),
        Some(Action::Forward(forward)) => format!("to {}", to(forward)),
        Some(Action::RedirectUntil { forward, lease_ms }) => {
            format!("to {} for {lease_ms} ms more", to(forward))
        }
        Some(Action::SetMulticastGroup { group }) => format!("to group {group}"),
        Some(Action::CopyToController) => "copy to the controller".to_owned(),
        Some(Action::SetDstMac(mac)) => format!("copies leave as {mac}"),
        Some(Action::Select(members)) => {
            let members: Vec<String> = members
                .iter()
                .map(|member| format!("{} x {}", member.weight, to(&member.forward)))
                .collect();
            format!("one of {}", members.join(", "))
        }
    }
}

const _: () =
    assert!(HEARTBEATS_MISSED == 3, "the API's description of NODE_STATE_SILENT says three");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_are_written_as_addresses_are() {
        let guard =
            |src_node| Key::IngressGuard { port: SwitchPort(3), src_scope: 0xfdbb_0001, src_node };
        assert_eq!(key_text(&guard(0x20)), "port 3 from fdbb:1:20::/48");
        assert_eq!(key_text(&guard(0)), "port 3 from fdbb:1::/48");
        let any = Key::Anycast { dst_scope: 0xfdbb_0000 };
        assert_eq!(key_text(&any), "any memory node of fdbb::/32");
        let prefix = 0xfdbb_0001_0002_u128 << 64;
        let directory = |prefix_len| key_text(&Key::Directory { prefix, prefix_len });
        assert_eq!(directory(48), "fdbb:1:2::/48");
        let prefix = 0xfdbb_0001_3000_u128 << 64;
        let block = key_text(&Key::Directory { prefix, prefix_len: 36 });
        assert_eq!(block, "fdbb:1:3000::/36", "the nodes of another switch");
        assert_eq!(directory(64), "fdbb:1:2::/48 location 0x0000000000000000, prefix 64 of 112");
    }
}
