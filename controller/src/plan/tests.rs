use std::collections::BTreeSet;

use bluebridge_p4::pipeline::{Action, Forward, MacAddr, SwitchPort, WeightedForward};
use proptest::prelude::*;

use super::*;
use crate::core::FLOOD_GROUP;

fn forward(port: u16) -> Forward {
    Forward { port: SwitchPort(port), dst_mac: MacAddr([2, 0, 0, 0, 0, 1]) }
}

fn way(node: u16) -> Key {
    Key::Directory { prefix: u128::from(node) << 64, prefix_len: 48 }
}

fn guard(node: u16, port: u16) -> Key {
    Key::IngressGuard { port: SwitchPort(port), src_scope: 1, src_node: node }
}

fn tables() -> impl Strategy<Value = Tables> {
    let entry = prop_oneof![
        (0..6_u16, 1..4_u16)
            .prop_map(|(node, port)| (way(node), Body::new(Action::Forward(forward(port))))),
        (0..6_u16, 1..4_u16).prop_map(|(node, port)| (guard(node, port), Body::new(Action::Allow))),
        (0..3_u32, 1..5_u16).prop_map(|(dst_scope, weight)| {
            let members = vec![WeightedForward { forward: forward(1), weight }];
            (Key::Anycast { dst_scope }, Body::new(Action::Select(members)))
        }),
        (0..3_u32, 1..5_u16).prop_map(|(dst_scope, group)| {
            (Key::Multicast { dst_scope }, Body::new(Action::Multicast { group }))
        }),
        (1..4_u16, any::<u8>()).prop_map(|(port, last)| {
            let mac = MacAddr([2, 0, 0, 0, 0, last]);
            (Key::PortMac { port: SwitchPort(port) }, Body::new(Action::SetDstMac(mac)))
        }),
        (0..3_u64).prop_map(|page| {
            let key = Key::Redirect { dst_scope: 1, dst_node: 1, page };
            (key, Body { action: None, idle_timeout: None, metadata: vec![1] })
        }),
    ];
    let group = (1..5_u16, prop::collection::btree_set((1..6_u16).prop_map(SwitchPort), 1..4));
    (
        prop::collection::btree_map(
            entry.clone().prop_map(|(key, _)| key),
            entry.prop_map(|(_, body)| body),
            0..1,
        ),
        prop::collection::vec(entry_again(), 0..20),
        prop::collection::btree_map(group.clone().prop_map(|(id, _)| id), group.prop_map(|(_, p)| p), 0..4),
        prop::option::of(1..5_u16),
        any::<bool>(),
    )
        .prop_map(|(_, entries, groups, flood_group, notify_session)| Tables {
            entries: entries.into_iter().collect(),
            groups,
            flood_group,
            notify_session,
        })
}
