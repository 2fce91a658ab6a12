use std::collections::BTreeMap;

use bluebridge_p4::pipeline::{Action, Forward, MacAddr, WeightedForward};
use proptest::prelude::*;
use rand::SeedableRng;
use rand::seq::SliceRandom;

use super::*;

fn forward(port: u16) -> Forward {
    let [_, low] = port.to_be_bytes();
    Forward { port: SwitchPort(port), dst_mac: MacAddr([2, 0, 0, 0, 0, low]) }
}

fn way(node: u16) -> Key {
    Key::Directory { prefix: u128::from(node) << 64, prefix_len: 48 }
}

/// The tables of a rack whose nodes have these ports, in one space with this group.
fn rack(nodes: &BTreeMap<u16, u16>, group: u16, session: bool) -> Tables {
    let mut tables = Tables { notify_session: session, ..Tables::default() };
    for (node, port) in nodes {
        let guard = Key::IngressGuard { port: SwitchPort(*port), src_scope: 1, src_node: *node };
        tables.entries.insert(guard, Body::new(Action::Allow));
        tables.entries.insert(way(*node), Body::new(Action::Forward(forward(*port))));
        let mac = Key::PortMac { port: SwitchPort(*port) };
        tables.entries.insert(mac, Body::new(Action::SetDstMac(forward(*port).dst_mac)));
        tables.groups.entry(group).or_default().insert(SwitchPort(*port));
    }
    if !nodes.is_empty() {
        let members = nodes
            .values()
            .map(|port| WeightedForward { forward: forward(*port), weight: 1 })
            .collect();
        tables.entries.insert(Key::Anycast { dst_scope: 1 }, Body::new(Action::Select(members)));
        tables.entries.insert(
            Key::Multicast { dst_scope: 1 },
            Body::new(Action::SetMulticastGroup { group }),
        );
        tables.flood_group = Some(group);
    }
    tables
}

fn racks() -> impl Strategy<Value = Tables> {
    let nodes = prop::collection::btree_map(1..8_u16, 1..8_u16, 0..6);
    (nodes, 1..4_u16, any::<bool>())
        .prop_map(|(nodes, group, session)| rack(&nodes, group, session))
}

/// Entries of another program.
fn add_foreign(tables: &mut Tables, pages: &[u64]) {
    for page in pages {
        let Ok(scope) = u32::try_from(*page) else { continue };
        let key = Key::Anycast { dst_scope: 100 + scope };
        let body = Body { action: None, idle_timeout: None, metadata: vec![1] };
        tables.entries.insert(key, body);
    }
}

/// Invariants at every moment, given that they hold before and after the plan.
fn check(tables: &Tables) {
    for (key, body) in &tables.entries {
        match key {
            Key::IngressGuard { src_node, .. } => {
                assert!(
                    tables.entries.contains_key(&way(*src_node)),
                    "a sender without a way back"
                );
            }
            Key::Multicast { .. } => {
                let Some(Action::SetMulticastGroup { group }) = body.action else {
                    panic!("{body:?}")
                };
                let ports =
                    tables.groups.get(&group).expect("a notice to a group that is not there");
                for port in ports {
                    assert!(tables.entries.contains_key(&Key::PortMac { port: *port }));
                }
            }
            _ => {}
        }
    }
    assert!(tables.flood_group.is_none_or(|group| tables.groups.contains_key(&group)));
}

#[test]
fn redirects_are_left_to_their_own_way() {
    let key = Key::Redirect { dst_scope: 1, dst_node: 1, page: 7 };
    let mut there = Tables::default();
    there.entries.insert(key, Body::new(Action::Forward(forward(3))));
    assert!(Plan::new(&Tables::default(), &there).is_empty());
    assert!(Plan::new(&there, &Tables::default()).is_empty());
    assert_eq!((there.difference_count(&Tables::default()), there.redirect_count()), (0, 1));
}

#[test]
fn old_entries_of_pages_go_first_if_there_is_no_room_for_new_ones() {
    const SIZE: usize = 512;
    let tables = |nodes: std::ops::Range<u16>, pages: std::ops::Range<u16>| {
        let mut tables = rack(&nodes.map(|node| (node, node)).collect(), 1, false);
        for page in pages {
            let key = Key::Directory { prefix: 1 << 64 | u128::from(page) << 15, prefix_len: 97 };
            tables.entries.insert(key, Body::new(Action::Forward(forward(1))));
        }
        tables
    };
    let count = |tables: &Tables| {
        tables.entries.keys().filter(|key| matches!(key, Key::Directory { .. })).count()
    };
    for (pages, goes_first) in [(300..600, true), (300..512, false), (1..301, false)] {
        let mut now = tables(1..200, 0..300);
        let desired = tables(100..200, pages.clone());
        let plan = Plan::within(&desired, &now, SIZE + 199);
        let first = &plan.stages()[0][0];
        let is_of_pages =
            matches!(first, TableUpdate::Delete(Object::Entry(key, _)) if is_of_pages(key));
        assert_eq!(is_of_pages, goes_first, "{pages:?}: {first}");
        for update in plan.stages().iter().flatten() {
            update.apply_to(&mut now);
            assert!(count(&now) <= SIZE + 199, "{pages:?}: {update}");
            check(&now);
        }
        assert_eq!(now, desired);
    }
}

proptest! {
    #[test]
    fn every_order_within_the_stages_is_safe_and_ends_right(
        desired in racks(), actual in racks(), foreign in prop::collection::vec(0..9_u64, 0..4),
        seed in any::<u64>(),
    ) {
        let mut actual = actual;
        add_foreign(&mut actual, &foreign);
        let kept: BTreeSet<Key> =
            actual.entries.keys().filter(|key| desired.entries.contains_key(key)).copied().collect();
        let plan = Plan::new(&desired, &actual);
        prop_assert_eq!(plan.is_empty(), desired == actual);
        let mut rng = rand::rngs::SmallRng::seed_from_u64(seed);
        let mut now = actual;
        for stage in plan.stages() {
            let mut stage = stage.clone();
            stage.shuffle(&mut rng);
            for update in &stage {
                let there = match update.object() {
                    Object::Entry(key, _) => now.entries.contains_key(key),
                    Object::FloodGroup(_) => now.flood_group.is_some(),
                    Object::Group(group, _) => now.groups.contains_key(group),
                    Object::NotifySession => now.notify_session,
                };
                match update {
                    TableUpdate::Insert(_) => prop_assert!(!there, "{:?}", update),
                    // The default action of a table always exists.
                    TableUpdate::Modify(Object::FloodGroup(_)) => {}
                    TableUpdate::Modify(_) | TableUpdate::Delete(_) => prop_assert!(there, "{:?}", update),
                }
                update.apply_to(&mut now);
                prop_assert!(kept.iter().all(|key| now.entries.contains_key(key)));
                check(&now);
            }
        }
        prop_assert_eq!(now, desired);
    }
}
