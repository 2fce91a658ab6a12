//! What the flows and groups of a switch mean.
//!
//! Each entry is recognized by its main flow. It counts as installed only if everything that it is compiled
//! to is there; otherwise it is reported without an action, and is written again. Flows and groups that
//! belong to nothing are foreign.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bluebridge_openflow::{FlowStats, GroupDescription, GroupKind};
use bluebridge_p4::pipeline::{
    Action, Counter, DropReason, Forward, Key, SwitchPort, Ternary, WeightedForward,
};

use super::compile::{SESSION_RECORD, compile, has_flow, prefix_of};
use super::flow::{Flow, FlowKey, Group, Ipv6, Match, Steps, Value};
use super::layout::{
    ANYCAST, COMMAND_SHIFT, DIRECTORY, EGRESS, FLOOD_PRIORITY, INGRESS_GUARD, L2, MULTICAST,
    NODE_SHIFT, NOTIFY, PORT_MAC, RECORDS, REDIRECT, SCOPE_SHIFT, TAG_SHIFT, base_flows,
    drop_reason, multicast_group, record, rewriting_group,
};
use crate::core::{Body, Tables};
use crate::driver::Installed;
use crate::plan::Object;

/// Everything in a switch.
#[derive(Debug, Default)]
pub(super) struct Contents {
    pub(super) installed: Installed,
    /// Every known flow.
    pub(super) flows: BTreeMap<FlowKey, Flow>,
    /// Every known group.
    pub(super) groups: BTreeMap<u32, Group>,
    /// Ports with flows in `EGRESS`.
    pub(super) egress: BTreeSet<SwitchPort>,
    /// Flows that belong to nothing.
    pub(super) foreign_flows: Vec<FlowStats>,
    /// Groups that belong to nothing.
    pub(super) foreign_groups: Vec<u32>,
    /// Flows of `EGRESS` for ports to which no entry leads any more.
    pub(super) unused_egress: Vec<FlowKey>,
}

/// Interprets a reading.
pub(super) fn interpret(flows: Vec<FlowStats>, groups: &[GroupDescription]) -> Contents {
    let mut contents = Contents::default();
    let mut stats = BTreeMap::new();
    for found in flows {
        match Flow::read(&found) {
            Some(flow) => {
                contents.flows.insert(flow.key(), flow);
                stats.insert(flow.key(), found);
            }
            None => contents.foreign_flows.push(found),
        }
    }
    let mut claimed = Claimed::default();
    for found in groups {
        match Group::read(found) {
            Some(group) => drop(contents.groups.insert(found.group, group)),
            None => contents.foreign_groups.push(found.group),
        }
    }
    claimed.flows.extend(base_flows().iter().map(Flow::key));
    find_objects(&mut contents, &stats, &mut claimed);
    contents.installed.drops = drops(&contents, &stats);
    find_egress(&mut contents, &mut claimed);
    contents.flows.keys().filter(|key| !claimed.flows.contains(*key)).for_each(|key| {
        contents.foreign_flows.extend(stats.remove(key));
    });
    let foreign = contents.groups.keys().filter(|id| !claimed.groups.contains(id));
    contents.foreign_groups.extend(foreign);
    contents
}

/// The flows and groups that belong to something.
#[derive(Default)]
struct Claimed {
    flows: BTreeSet<FlowKey>,
    /// Ports to which entries lead.
    egress: BTreeSet<SwitchPort>,
    groups: BTreeSet<u32>,
}

fn find_objects(
    contents: &mut Contents,
    stats: &BTreeMap<FlowKey, FlowStats>,
    claimed: &mut Claimed,
) {
    let flows: Vec<Flow> = contents.flows.values().copied().collect();
    let mut tables = Tables::default();
    // Groups are compiled with the MAC addresses of ports, so these come first.
    let (macs, others): (Vec<_>, Vec<_>) =
        flows.into_iter().partition(|flow| flow.table == PORT_MAC);
    for flow in macs.into_iter().chain(others) {
        match (flow.table, flow.steps) {
            (RECORDS, _) => {
                tables.notify_session |= flow.key() == record(SESSION_RECORD, 0, 0).key();
                claimed.flows.insert(flow.key());
                continue;
            }
            (L2, Steps::Group(group)) if flow.priority == FLOOD_PRIORITY => {
                tables.flood_group = multicast_group(group);
                claimed.flows.insert(flow.key());
                continue;
            }
            _ => {}
        }
        let Some(key) = key_of(&flow) else { continue };
        let action = action_of(&key, &flow, &contents.groups, stats.get(&flow.key()));
        // A flow of the same meaning that this driver would not write, such as one of another priority, is foreign;
        // so is a second main flow of an entry. What they hide is written again.
        if !has_flow(key, action.as_ref(), &flow) || tables.entries.contains_key(&key) {
            continue;
        }
        let idle = Some(flow.idle_seconds).filter(|idle| *idle != 0);
        let body = Body {
            action,
            idle_timeout: idle.map(|idle| Duration::from_secs(idle.into())),
            metadata: Vec::new(),
        };
        let body = check(contents, claimed, key, body, &tables);
        claimed.flows.insert(flow.key());
        contents.installed.counters.insert(key, counter(&flow, key, &body, &tables, stats));
        tables.entries.insert(key, body);
    }
    find_groups(contents, claimed, &mut tables);
    contents.installed.tables = tables;
}

/// What hit an entry: packets hit one of its flows in the table of its main flow.
fn counter(
    main: &Flow,
    key: Key,
    body: &Body,
    tables: &Tables,
    stats: &BTreeMap<FlowKey, FlowStats>,
) -> Counter {
    let compiled = compile(&Object::Entry(key, body.clone()), tables).unwrap_or_default();
    let mut keys: BTreeSet<FlowKey> = compiled.flows.iter().map(Flow::key).collect();
    keys.insert(main.key());
    let found = keys.iter().filter_map(|key| stats.get(key));
    found.fold(Counter::default(), |sum, flow| Counter {
        packets: sum.packets + flow.packet_count,
        bytes: sum.bytes + flow.byte_count,
    })
}

/// The frames dropped for each reason that has flows: those that are always there, and entries that drop.
fn drops(contents: &Contents, stats: &BTreeMap<FlowKey, FlowStats>) -> BTreeMap<DropReason, u64> {
    let packets = |key: &FlowKey| stats.get(key).map_or(0, |stats| stats.packet_count);
    let mut drops = BTreeMap::from([(DropReason::Entry, 0)]);
    for flow in contents.flows.values() {
        if let Some(reason) = drop_reason(flow) {
            *drops.entry(reason).or_default() += packets(&flow.key());
        }
    }
    for (_, action, counter) in contents.installed.entries() {
        if *action == Action::Drop {
            *drops.entry(DropReason::Entry).or_default() += counter.packets;
        }
    }
    drops
}

/// Checks that everything that an entry needs is there, and claims it.
fn check(
    contents: &mut Contents,
    claimed: &mut Claimed,
    key: Key,
    body: Body,
    tables: &Tables,
) -> Body {
    let Ok(compiled) = compile(&Object::Entry(key, body.clone()), tables) else {
        return Body { action: None, ..body };
    };
    let mut whole = true;
    for flow in compiled.all_flows() {
        let found = contents.flows.get(&flow.key());
        // A lease's time limit is not compared: it was rounded when it was written.
        whole &= found.is_some_and(|found| found.steps == flow.steps);
        if flow.table != EGRESS {
            claimed.flows.insert(flow.key());
        }
    }
    claimed.egress.extend(&compiled.egress);
    for (id, group) in &compiled.groups {
        whole &= contents.groups.get(id) == Some(group);
        claimed.groups.insert(*id);
    }
    if whole { body } else { Body { action: None, ..body } }
}

/// Multicast groups, each stored as a plain and a rewriting group.
fn find_groups(contents: &Contents, claimed: &mut Claimed, tables: &mut Tables) {
    for (id, found) in &contents.groups {
        let Some(group) = multicast_group(*id) else { continue };
        let ports: BTreeSet<SwitchPort> = found.outputs.iter().filter_map(|out| out.port).collect();
        let Ok(compiled) = compile(&Object::Group(group, ports.clone()), tables) else { continue };
        claimed.groups.extend([*id, rewriting_group(group)]);
        let whole =
            compiled.groups.iter().all(|(id, group)| contents.groups.get(id) == Some(group));
        // An incomplete group is reported without ports, so that it is written again.
        tables.groups.insert(group, if whole { ports } else { BTreeSet::new() });
    }
}

/// Both flows of a port must be there; otherwise the port is written again when an entry needs it. Those of a port
/// that none needs stay behind when its endpoint leaves.
fn find_egress(contents: &mut Contents, claimed: &mut Claimed) {
    let flows = contents.flows.values().filter(|flow| flow.table == EGRESS);
    let ports: BTreeSet<SwitchPort> = flows
        .filter_map(|flow| {
            let port = flow.matching.metadata?;
            u16::try_from(port.value).ok().map(SwitchPort)
        })
        .collect();
    for port in ports {
        let expected = super::layout::egress(port);
        claimed.flows.extend(expected.iter().map(Flow::key));
        if !claimed.egress.contains(&port) {
            let keys = expected.iter().map(Flow::key);
            contents.unused_egress.extend(keys.filter(|key| contents.flows.contains_key(key)));
            continue;
        }
        if expected.iter().all(|flow| contents.flows.get(&flow.key()) == Some(flow)) {
            contents.egress.insert(port);
        }
    }
}

/// The entry whose main flow this is.
fn key_of(flow: &Flow) -> Option<Key> {
    let Match { in_port, metadata: None, tagged: false, dst_mac, ipv6 } = flow.matching else {
        return None;
    };
    let dst = ipv6.map_or(Value::default(), |ipv6| ipv6.dst);
    let key = match (flow.table, in_port, dst_mac, ipv6) {
        (INGRESS_GUARD, Some(port), None, Some(Ipv6 { src, .. })) => {
            Key::IngressGuard { port, src_scope: scope(src), src_node: node(src) }
        }
        (NOTIFY, None, None, Some(Ipv6 { src, dst, .. })) => Key::Notify {
            src_command: ternary(src, COMMAND_SHIFT),
            dst_command: ternary(dst, COMMAND_SHIFT),
            src_status: ternary(src, TAG_SHIFT),
            priority: i32::from(flow.priority),
        },
        (ANYCAST, None, None, Some(_)) => Key::Anycast { dst_scope: scope(dst) },
        (MULTICAST, None, None, Some(_)) => Key::Multicast { dst_scope: scope(dst) },
        (REDIRECT, None, None, Some(_)) => Key::Redirect {
            dst_scope: scope(dst),
            dst_node: node(dst),
            page: u64::try_from(dst.value & u128::from(u64::MAX)).ok()? >> 12,
        },
        (DIRECTORY, None, None, Some(_)) => {
            let (prefix, prefix_len) = prefix_of(dst)?;
            Key::Directory { prefix, prefix_len }
        }
        (L2, None, Some(dst_mac), None) => Key::L2 { dst_mac },
        (PORT_MAC, Some(port), None, None) => Key::PortMac { port },
        _ => return None,
    };
    Some(key)
}

fn action_of(
    key: &Key,
    flow: &Flow,
    groups: &BTreeMap<u32, Group>,
    stats: Option<&FlowStats>,
) -> Option<Action> {
    Some(match (key, flow.steps) {
        (Key::IngressGuard { .. }, Steps::Goto(_)) => Action::Allow,
        (Key::IngressGuard { .. } | Key::Directory { .. }, Steps::Drop) => Action::Drop,
        (Key::Redirect { .. }, Steps::Forward(port, dst_mac)) if flow.hard_seconds != 0 => {
            let lived = stats.map_or(0, |stats| stats.duration_seconds);
            let left = u32::from(flow.hard_seconds).saturating_sub(lived).saturating_mul(1000);
            let lease_ms = u16::try_from(left).unwrap_or(u16::MAX);
            Action::RedirectUntil { forward: Forward { port, dst_mac }, lease_ms }
        }
        (_, Steps::Forward(port, dst_mac)) => Action::Forward(Forward { port, dst_mac }),
        (Key::Notify { .. }, Steps::CopyAndGoto(_)) => Action::CopyToController,
        (Key::PortMac { .. }, Steps::SetDstMac(mac)) => Action::SetDstMac(mac),
        (Key::L2 { .. }, Steps::Group(group)) => {
            Action::SetMulticastGroup { group: multicast_group(group)? }
        }
        (Key::Multicast { .. }, Steps::Group(group)) => {
            let group = group.checked_sub(rewriting_group(0)).and_then(multicast_group)?;
            Action::SetMulticastGroup { group }
        }
        (Key::Anycast { .. }, Steps::Group(group)) => choice(groups.get(&group)?)?,
        _ => return None,
    })
}

fn choice(group: &Group) -> Option<Action> {
    let member = |output: &super::flow::Output| {
        let forward = Forward { port: output.port?, dst_mac: output.dst_mac? };
        Some(WeightedForward { forward, weight: output.weight })
    };
    let members = group.outputs.iter().map(member).collect::<Option<Vec<_>>>()?;
    (group.kind == GroupKind::Select).then_some(Action::Select(members))
}

/// The scope in an address.
fn scope(address: Value<u128>) -> u32 {
    u32::try_from(address.value >> SCOPE_SHIFT).unwrap_or(0)
}

/// The node in an address.
fn node(address: Value<u128>) -> u16 {
    u16::try_from((address.value >> NODE_SHIFT) & 0xffff).unwrap_or(0)
}

fn ternary(address: Value<u128>, shift: u32) -> Ternary {
    let byte = |bits: u128| u8::try_from((bits >> shift) & 0xff).unwrap_or(0);
    Ternary { value: byte(address.value), mask: byte(address.mask) }
}
