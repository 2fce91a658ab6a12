//! Entries to flows and back, without a switch.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bluebridge_openflow::{Field, FlowStats, GroupCommand, GroupDescription};
use bluebridge_p4::pipeline::{
    Action, DropReason, Forward, Key, MacAddr, SwitchPort, Ternary, WeightedForward,
};
use proptest::prelude::*;

use super::compile::{compile, location_prefix, prefix_of};
use super::flow::Value;
use super::layout;
use super::read::{Contents, interpret};
use crate::core::{Body, Tables};
use crate::plan::Object;

fn forward() -> impl Strategy<Value = Forward> {
    (1..512u16, any::<[u8; 6]>())
        .prop_map(|(port, mac)| Forward { port: SwitchPort(port), dst_mac: MacAddr(mac) })
}

fn ternary() -> impl Strategy<Value = Ternary> {
    any::<(u8, u8)>().prop_map(|(value, mask)| Ternary { value: value & mask, mask })
}

fn scope() -> impl Strategy<Value = u32> {
    any::<u16>().prop_map(|space| 0xfdbb_0000 | u32::from(space))
}

fn group() -> impl Strategy<Value = Action> {
    (1..1024u16).prop_map(|group| Action::SetMulticastGroup { group })
}

fn entry() -> impl Strategy<Value = (Key, Action)> {
    let guard = (1..512u16, scope(), any::<u16>(), any::<bool>()).prop_map(
        |(port, src_scope, src_node, allow)| {
            let key = Key::IngressGuard { port: SwitchPort(port), src_scope, src_node };
            (key, if allow { Action::Allow } else { Action::Drop })
        },
    );
    let redirect = (scope(), any::<u16>(), 0..1u64 << 52, forward(), any::<Option<u16>>())
        .prop_map(|(dst_scope, dst_node, page, forward, lease_ms)| {
            let key = Key::Redirect { dst_scope, dst_node, page };
            let until = lease_ms.map(|lease_ms| Action::RedirectUntil { forward, lease_ms });
            (key, until.unwrap_or(Action::Forward(forward)))
        });
    let directory = (any::<u128>(), 0..=112u8, prop::option::of(forward())).prop_map(
        |(bits, prefix_len, to)| {
            let mask = if prefix_len == 0 { 0 } else { u128::MAX << (128 - prefix_len) };
            let key = Key::Directory { prefix: (bits & mask) >> 16, prefix_len };
            (key, to.map_or(Action::Drop, Action::Forward))
        },
    );
    let member =
        (forward(), 1..=u16::MAX).prop_map(|(forward, weight)| WeightedForward { forward, weight });
    let anycast = (scope(), prop::collection::vec(member, 1..8))
        .prop_map(|(dst_scope, members)| (Key::Anycast { dst_scope }, Action::Select(members)));
    let notify = (ternary(), ternary(), ternary(), 1..=65_535i32).prop_map(
        |(src_command, dst_command, src_status, priority)| {
            let key = Key::Notify { src_command, dst_command, src_status, priority };
            (key, Action::CopyToController)
        },
    );
    let l2 = (any::<[u8; 6]>(), prop_oneof![forward().prop_map(Action::Forward), group()])
        .prop_map(|(mac, action)| (Key::L2 { dst_mac: MacAddr(mac) }, action));
    let port_mac = (1..512u16, any::<[u8; 6]>()).prop_map(|(port, mac)| {
        (Key::PortMac { port: SwitchPort(port) }, Action::SetDstMac(MacAddr(mac)))
    });
    let multicast =
        (scope(), group()).prop_map(|(dst_scope, action)| (Key::Multicast { dst_scope }, action));
    prop_oneof![guard, redirect, directory, anycast, notify, l2, port_mac, multicast]
}

fn tables() -> impl Strategy<Value = Tables> {
    let ports = prop::collection::btree_set((1..512u16).prop_map(SwitchPort), 0..6);
    (
        prop::collection::vec(entry(), 0..24),
        prop::collection::btree_map(1..1024u16, ports, 0..4),
        prop::option::of(1..1024u16),
        any::<bool>(),
    )
        .prop_map(|(entries, groups, flood_group, notify_session)| Tables {
            entries: entries.into_iter().map(|(key, it)| (key, Body::new(it))).collect(),
            groups,
            flood_group,
            notify_session,
        })
}

/// What a switch reports that has these tables.
fn switch_with(tables: &Tables) -> (Vec<FlowStats>, Vec<GroupDescription>) {
    let entries = tables.entries.iter().map(|(key, body)| Object::Entry(*key, body.clone()));
    let groups = tables.groups.iter().map(|(id, ports)| Object::Group(*id, ports.clone()));
    let flood = tables.flood_group.map(Object::FloodGroup);
    let session = tables.notify_session.then_some(Object::NotifySession);
    let mut flows = BTreeMap::new();
    let mut found = Vec::new();
    for object in entries.chain(groups).chain(flood).chain(session) {
        let compiled = compile(&object, tables).expect("OpenFlow has it");
        flows.extend(compiled.all_flows().map(|flow| (flow.key(), flow)));
        found.extend(compiled.groups.iter().map(|(id, group)| {
            let message = group.message(GroupCommand::Add, *id);
            GroupDescription { kind: message.kind, group: *id, buckets: message.buckets }
        }));
    }
    flows.extend(layout::base_flows().into_iter().map(|flow| (flow.key(), flow)));
    let stats = flows.values().map(|flow| {
        let message = flow.add();
        FlowStats {
            table: message.table,
            priority: message.priority,
            idle_timeout: message.idle_timeout,
            hard_timeout: message.hard_timeout,
            cookie: message.cookie,
            fields: message.fields,
            instructions: message.instructions,
            ..FlowStats::default()
        }
    });
    (stats.collect(), found)
}

/// The tables of a reading; a lease's time is rounded up to what a switch counts.
fn rounded(tables: &Tables) -> Tables {
    let mut tables = tables.clone();
    for body in tables.entries.values_mut() {
        if let Some(Action::RedirectUntil { lease_ms, .. }) = &mut body.action {
            *lease_ms = (lease_ms.div_ceil(1000).saturating_add(1)).saturating_mul(1000);
        }
    }
    tables
}

fn read(tables: &Tables) -> Contents {
    let (flows, groups) = switch_with(tables);
    interpret(flows, &groups)
}

proptest! {
    #[test]
    fn what_is_written_is_read_back(tables in tables()) {
        let contents = read(&tables);
        prop_assert_eq!(contents.installed.tables, rounded(&tables));
        prop_assert_eq!((contents.foreign_flows, contents.foreign_groups), (vec![], vec![]));
    }

    #[test]
    fn an_entry_that_lacks_a_part_is_written_again(
        tables in tables().prop_filter("entries", |tables| !tables.entries.is_empty()),
        lost in any::<prop::sample::Index>(),
    ) {
        let (mut flows, groups) = switch_with(&tables);
        let base: BTreeSet<_> = layout::base_flows().iter().map(|flow| flow.key()).collect();
        let is_entry = |stats: &FlowStats| {
            super::flow::Flow::read(stats).is_some_and(|flow| !base.contains(&flow.key()))
        };
        let own: Vec<usize> = (0..flows.len()).filter(|at| is_entry(&flows[*at])).collect();
        flows.remove(own[lost.index(own.len())]);
        let contents = interpret(flows, &groups);
        prop_assert_ne!(contents.installed.tables, rounded(&tables));
    }

    #[test]
    fn a_location_is_spread_around_command_and_tag(bits: u128, prefix_len in 0..=112u8) {
        let mask = if prefix_len == 0 { 0 } else { u128::MAX << (128 - prefix_len) };
        let prefix = (bits & mask) >> 16;
        let value = location_prefix(prefix, prefix_len);
        prop_assert_eq!(value.mask & (0xffff << layout::TAG_SHIFT), 0);
        prop_assert_eq!(prefix_of(value), Some((prefix, prefix_len)));
    }

    #[test]
    fn flows_and_groups_of_others_are_foreign(
        value in any::<u128>(),
        mask in any::<u128>(),
        priority in 1000..2000u16,
    ) {
        let value = Value::new(value, mask);
        prop_assume!(prefix_of(value).is_none());
        let ipv6 = super::flow::Ipv6 { dst: value, ..super::flow::Ipv6::default() };
        let matching = super::flow::Match { ipv6: Some(ipv6), ..super::flow::Match::default() };
        let foreign = super::flow::Flow::new(layout::DIRECTORY, priority, matching, super::flow::Steps::Drop);
        let message = foreign.add();
        let stats = FlowStats {
            table: message.table,
            priority,
            fields: message.fields,
            ..FlowStats::default()
        };
        let (mut flows, groups) = switch_with(&Tables::default());
        flows.push(stats.clone());
        let contents = interpret(flows, &groups);
        prop_assert_eq!(contents.foreign_flows, vec![stats]);
        prop_assert_eq!(contents.installed.tables, Tables::default());
    }
}

#[test]
fn a_flow_of_an_entrys_meaning_with_another_priority_is_foreign() {
    let forward = Forward { port: SwitchPort(1), dst_mac: MacAddr::default() };
    let scope = 0xfdbb_0001_u32;
    let prefix = u128::from(scope) << 80 | 1 << 64;
    let entries = [
        (Key::IngressGuard { port: SwitchPort(2), src_scope: scope, src_node: 1 }, Action::Allow),
        (Key::Redirect { dst_scope: scope, dst_node: 1, page: 7 }, Action::Forward(forward)),
        (Key::Directory { prefix, prefix_len: 48 }, Action::Forward(forward)),
        (Key::L2 { dst_mac: MacAddr([2; 6]) }, Action::Forward(forward)),
        (Key::PortMac { port: SwitchPort(2) }, Action::SetDstMac(MacAddr([2; 6]))),
    ];
    let entries = entries.map(|(key, action)| (key, Body::new(action))).into();
    let tables = Tables { entries, ..Tables::default() };
    let (flows, groups) = switch_with(&tables);
    let (bare, _) = switch_with(&Tables::default());
    let own: Vec<_> = flows.iter().filter(|flow| !bare.contains(flow)).cloned().collect();
    let mains = own.iter().filter(|flow| flow.table != layout::EGRESS);
    let mut count = 0;
    for main in mains {
        let greater = FlowStats { priority: main.priority + 1, ..main.clone() };
        let contents = interpret([&flows[..], std::slice::from_ref(&greater)].concat(), &groups);
        assert_eq!(contents.foreign_flows, [greater]);
        assert_eq!(contents.installed.tables, tables);
        count += 1;
    }
    assert_eq!(count, 5);
    // The same condition on the source, but not on the destination's space: it lets everything pass.
    let guard = own.iter().find(|flow| flow.table == layout::INGRESS_GUARD).unwrap();
    let mut open = guard.clone();
    open.fields.retain(|field| !matches!(field, Field::Ipv6Dst(..)));
    assert_ne!(open, *guard);
    let contents = interpret([&flows[..], std::slice::from_ref(&open)].concat(), &groups);
    assert_eq!(contents.foreign_flows, [open]);
    assert_eq!(contents.installed.tables, tables);
}

#[test]
fn every_flow_that_drops_counts_for_its_reason() {
    let forward = Forward { port: SwitchPort(1), dst_mac: MacAddr::default() };
    let node = |node: u16| u128::from(0xfdbb_0001_u32) << 80 | u128::from(node) << 64;
    let key = |number| Key::Directory { prefix: node(number), prefix_len: 48 };
    let entries = [(key(1), Action::Forward(forward)), (key(2), Action::Drop)];
    let entries = entries.map(|(key, action)| (key, Body::new(action))).into();
    let (mut flows, groups) = switch_with(&Tables { entries, ..Tables::default() });
    flows.iter_mut().for_each(|flow| flow.packet_count = 1);
    let drops = interpret(flows, &groups).installed.drops;
    let expected = BTreeMap::from([
        (DropReason::Tagged, 1),
        (DropReason::ForeignDestination, 1),
        // Two hop limits for each of three next headers.
        (DropReason::HopLimit, 6),
        (DropReason::Guard, 1),
        // The wrong command, and a space without an entry.
        (DropReason::Anycast, 2),
        (DropReason::Multicast, 2),
        // `directory` and `l2`.
        (DropReason::NoRoute, 2),
        (DropReason::Entry, 1),
        (DropReason::Malformed, 1),
        (DropReason::Egress, 1),
        // Fragments, and others.
        (DropReason::NextHeader, 2),
    ]);
    assert_eq!(drops, expected);
}

#[test]
fn what_openflow_lacks_is_refused() {
    let forward = Forward { port: SwitchPort(1), dst_mac: MacAddr::default() };
    let l2 = Key::L2 { dst_mac: MacAddr::default() };
    let with_metadata = Body { metadata: vec![1], ..Body::new(Action::Forward(forward)) };
    let any = Ternary::default();
    let notify =
        Key::Notify { src_command: any, dst_command: any, src_status: any, priority: 65_536 };
    for (object, text) in [
        (Object::Entry(l2, with_metadata), "no metadata"),
        (Object::Entry(l2, Body::new(Action::Allow)), "does not have this action"),
        (Object::Entry(notify, Body::new(Action::CopyToController)), "no priority 65536"),
    ] {
        let error = compile(&object, &Tables::default()).unwrap_err();
        assert!(error.contains(text), "{error}");
    }
}

#[test]
fn time_limits_are_whole_seconds_and_never_too_short() {
    let forward = Forward { port: SwitchPort(1), dst_mac: MacAddr::default() };
    let key = Key::Redirect { dst_scope: 0xfdbb_0001, dst_node: 2, page: 5 };
    for (lease_ms, seconds) in [(0, 1), (1, 2), (1000, 2), (1001, 3), (u16::MAX, 67)] {
        let body = Body::new(Action::RedirectUntil { forward, lease_ms });
        let compiled = compile(&Object::Entry(key, body), &Tables::default()).unwrap();
        assert_eq!(compiled.flows[0].hard_seconds, seconds, "{lease_ms} ms");
    }
    let idle = Some(Duration::from_millis(1500));
    let body = Body { idle_timeout: idle, ..Body::new(Action::Forward(forward)) };
    let compiled = compile(&Object::Entry(key, body), &Tables::default()).unwrap();
    assert_eq!((compiled.flows[0].idle_seconds, compiled.flows[0].hard_seconds), (2, 0));
}

#[test]
fn groups_of_spaces_and_of_multicast_never_share_a_number() {
    let greatest_multicast = layout::rewriting_group(u16::MAX);
    assert!(layout::anycast_group(0xfdbb_0000, 0) > greatest_multicast);
    let greatest = layout::anycast_group(u32::MAX, bluebridge_p4::declaration::PORT_MAX);
    // Numbers above 0xffffff00 are reserved.
    assert!(greatest < 0xffff_ff00, "{greatest:#x}");
    assert_ne!(layout::anycast_group(0xfdbb_0001, 0), layout::anycast_group(0xfdbb_0000, 1023));
}
