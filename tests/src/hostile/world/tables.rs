//! The switch's tables: every action and every reason to drop.

use std::time::Instant;

use bluebridge_p4::pipeline::{
    Action, Entry, Forward, Impairment, Key, MacAddr, SwitchPort, WeightedForward,
};
use bluebridge_switch::{
    dataplane::DataPlane as _,
    soft::{Link, Pipeline},
};

/// The ports of the three servers.
pub(crate) const SERVER_PORTS: [SwitchPort; 3] = [SwitchPort(5), SwitchPort(6), SwitchPort(7)];

/// A port that loses all frames, and one that was removed.
const LOSSY: SwitchPort = SwitchPort(8);
const GONE: SwitchPort = SwitchPort(9);

fn forward(port: SwitchPort) -> Forward {
    let [_, low] = port.0.to_be_bytes();
    Forward { port, dst_mac: MacAddr([2, 0xbb, 0, 0, 1, low]) }
}

fn entry(key: Key, action: Action) -> Entry {
    Entry { key, action, idle_timeout: None, metadata: Vec::new() }
}

fn guard(port: u16, space: u16, node: u16, action: Action) -> Entry {
    let src_scope = 0xfdbb_0000 | u32::from(space);
    entry(Key::IngressGuard { port: SwitchPort(port), src_scope, src_node: node }, action)
}

fn node(space: u16, node: u16, action: Action) -> Entry {
    let scope = 0xfdbb_0000 | u32::from(space);
    let prefix = (u128::from(scope) << 80) | (u128::from(node) << 64);
    entry(Key::Directory { prefix, prefix_len: 48 }, action)
}

/// A pipeline with three servers, four clients, and entries that drop.
pub(super) fn pipeline(now: Instant) -> Pipeline {
    let mut pipeline = Pipeline::new(now);
    for port in 1..=9 {
        // The second server is behind a smaller link.
        let mtu = if port == 6 { 1500 } else { 9000 };
        let link = Link { name: format!("p{port}"), mac: MacAddr::default(), mtu };
        pipeline.add_link(SwitchPort(port), link).expect("a new port");
    }
    pipeline.set_group(1, &SERVER_PORTS).expect("ports that are there");
    pipeline.set_flood_group(Some(1)).expect("a group that is there");
    for entry in entries() {
        pipeline.insert(&entry).unwrap_or_else(|error| panic!("{entry:?}: {error}"));
    }
    pipeline.remove_port(GONE).expect("it was there");
    let lossy = Impairment { loss: 1.0, ..Impairment::default() };
    pipeline.set_impairment(LOSSY, lossy).expect("a share of 1");
    pipeline
}

fn entries() -> Vec<Entry> {
    let mut entries = vec![
        guard(1, super::VICTIM.0.0, super::VICTIM.1.0, Action::Allow),
        guard(2, 1, 1001, Action::Allow),
        guard(3, 1, 1004, Action::Allow),
        guard(3, 1, 1009, Action::Allow),
        guard(4, 2, 1002, Action::Allow),
        guard(2, 1, 1003, Action::Drop),
        entry(
            Key::L2 { dst_mac: MacAddr([2, 0xbb, 0, 0, 0, 0]) },
            Action::Forward(forward(SERVER_PORTS[0])),
        ),
    ];
    for space in [1, 2, 3] {
        for (number, port) in (1..).zip(SERVER_PORTS) {
            entries.push(guard(port.0, space, number, Action::Allow));
            entries.push(node(space, number, Action::Forward(forward(port))));
        }
        entries.push(node(space, 4, Action::Forward(forward(SERVER_PORTS[1]))));
        entries.push(node(space, 1010, Action::Forward(forward(LOSSY))));
        entries.push(node(space, 1011, Action::Drop));
        entries.push(node(space, 1012, Action::Forward(forward(GONE))));
        entries.push(node(space, 1001, Action::Forward(forward(SwitchPort(2)))));
        let dst_scope = 0xfdbb_0000 | u32::from(space);
        let members =
            SERVER_PORTS.map(|port| WeightedForward { forward: forward(port), weight: 1 });
        // The third space has no memory nodes to choose from, and no group.
        if space != 3 {
            entries.push(entry(Key::Anycast { dst_scope }, Action::Select(members.to_vec())));
            entries
                .push(entry(Key::Multicast { dst_scope }, Action::SetMulticastGroup { group: 1 }));
        }
    }
    entries
}
