//! What the program of the switch costs for a packet, measured by the kernel (`BPF_PROG_TEST_RUN`): without links,
//! queues and wake-ups.
//!
//! As root: `cargo run --release -p bluebridge-switch --example packet_cost`. It works in a network namespace of its own.

use std::{net::Ipv6Addr, process, time::Duration};

use bluebridge_p4::pipeline::{Action, Entry, Forward, Key, MacAddr, SwitchPort};
use bluebridge_switch::{
    dataplane::DataPlane as _,
    ebpf::{ACTION_REDIRECT, EbpfSwitch},
};
use bluebridge_testkit::{UdpFrame, ip, namespace::in_thread};
use bluebridge_wire::UDP_PORT;

const SCOPE: u32 = 0xfdbb_0001;
const NODE: u16 = 2;

/// Each run decrements the hop limit of the frame.
const HOP_LIMIT: u8 = 255;
const RUNS: u32 = 250;
const BATCHES: usize = 2000;

/// Where the hop limit is in a frame.
const AT_HOP_LIMIT: usize = 21;

fn main() {
    in_thread(|| {
        let name = format!("packet-cost-{}", process::id());
        let mut switch = EbpfSwitch::open(&name).expect("the eBPF switch needs root");
        measure(&mut switch);
        drop(switch);
        EbpfSwitch::remove(&name).expect("it is removed");
    });
}

fn mac(port: u16) -> MacAddr {
    let [_, low] = port.to_be_bytes();
    MacAddr([2, 0, 0, 0, 0, low])
}

fn insert(switch: &mut EbpfSwitch, key: Key, port: u16) {
    let action = match key {
        Key::IngressGuard { .. } => Action::Allow,
        _ => Action::Forward(Forward { port: SwitchPort(port), dst_mac: mac(port) }),
    };
    let entry = Entry { key, action, idle_timeout: None, metadata: Vec::new() };
    switch.insert(&entry).expect("the table has room");
}

fn measure(switch: &mut EbpfSwitch) {
    for port in 1..=2 {
        ip(&format!("link add s{port} type veth peer name h{port}"));
        ip(&format!("link set s{port} up"));
        ip(&format!("link set h{port} up"));
        switch.add_port(SwitchPort(port), &format!("s{port}")).expect("it attaches");
    }
    for node in 1..=4 {
        let key = Key::IngressGuard { port: SwitchPort(1), src_scope: SCOPE, src_node: node };
        insert(switch, key, 1);
        let prefix = u128::from(SCOPE) << 80 | u128::from(node) << 64;
        insert(switch, Key::Directory { prefix, prefix_len: 48 }, 2);
    }
    print(switch, "4 nodes");
    for moved in 0..500_u128 {
        // Every second block of 1 MiB.
        let prefix = u128::from(SCOPE) << 80 | u128::from(NODE) << 64 | moved << 21;
        insert(switch, Key::Directory { prefix, prefix_len: 92 }, 2);
    }
    print(switch, "and 500 blocks that moved");
    for page in 0..1000 {
        insert(switch, Key::Redirect { dst_scope: SCOPE, dst_node: NODE, page: 1 << 20 | page }, 2);
    }
    print(switch, "and 1,000 redirects of other pages");
}

fn print(switch: &mut EbpfSwitch, what: &str) {
    let node = u128::from(SCOPE) << 96 | u128::from(NODE) << 80;
    let mut frame = UdpFrame {
        source_mac: mac(1).0,
        destination_mac: [2, 0, 0, 0, 0, 0xfe],
        source: Ipv6Addr::new(0xfdbb, 1, 1, 0, 0x8000, 0, 0, 1),
        destination: Ipv6Addr::from_bits(node | 0x0207 << 64 | 5 << 12),
        source_port: 0x8000,
        destination_port: UDP_PORT,
        payload: &[0xa5; 100],
    }
    .bytes();
    frame[AT_HOP_LIMIT] = HOP_LIMIT;
    let mut times: Vec<Duration> = (0..BATCHES)
        .map(|_| {
            let run = switch.test_run(SwitchPort(1), &frame, RUNS).expect("the program runs");
            assert_eq!(run.action, ACTION_REDIRECT, "it is forwarded");
            run.duration
        })
        .collect();
    times.sort_unstable();
    println!("{what}: {} ns (fastest {} ns)", times[BATCHES / 2].as_nanos(), times[0].as_nanos());
}
