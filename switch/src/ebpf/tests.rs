//! States that are visible only in the maps themselves: those that a killed agent leaves, and elements
//! that the kernel reuses while a program reads them.

use std::{net::Ipv6Addr, process};

use bluebridge_p4::pipeline::{
    Action, DropReason, Entry, Forward, Key, MacAddr, PACKET_IN_BYTES, SwitchPort, Ternary,
    WeightedForward,
};
use bluebridge_testkit::{UdpFrame, ip, namespace::in_thread, require_ebpf};
use bluebridge_wire::UDP_PORT;
use zerocopy::IntoBytes as _;

use super::{
    EbpfSwitch,
    layout::encode_key,
    structs::{Group, from_bytes},
};
use crate::dataplane::{CloneSession, DataPlane as _, Table};

const SCOPE: u32 = 0xfdbb_0001;
const NODE: u16 = 2;
const PAGE: u64 = 5;

const GUARD: Key = Key::IngressGuard { port: SwitchPort(1), src_scope: SCOPE, src_node: 1 };
const REDIRECT: Key = Key::Redirect { dst_scope: SCOPE, dst_node: NODE, page: PAGE };

/// The ports, each with a link whose other end is `hN`.
const PORTS: [u16; 3] = [1, 2, 3];

/// The MAC address behind a port.
fn mac(port: u16) -> MacAddr {
    let [_, low] = port.to_be_bytes();
    MacAddr([2, 0, 0, 0, 0, low])
}

fn forward(port: u16) -> Action {
    Action::Forward(Forward { port: SwitchPort(port), dst_mac: mac(port) })
}

fn entry(key: Key, action: Action) -> Entry {
    Entry { key, action, idle_timeout: None, metadata: Vec::new() }
}

/// A READ from node 1 of the page [`PAGE`] of the node [`NODE`].
fn read() -> Vec<u8> {
    UdpFrame {
        source_mac: mac(1).0,
        destination_mac: [2, 0, 0, 0, 0, 0xfe],
        source: Ipv6Addr::new(0xfdbb, 1, 1, 0, 0x8000, 0, 0, 1),
        destination: Ipv6Addr::from_bits(0xfdbb_0001_0002_0607 << 64 | u128::from(PAGE << 12)),
        source_port: 0x8000,
        destination_port: UDP_PORT,
        payload: &[0xa5; 32],
    }
    .bytes()
}

/// A pinned switch with [`PORTS`] that is removed when this is dropped.
struct Pinned {
    name: String,
    switch: EbpfSwitch,
}

impl Pinned {
    fn open(name: &str) -> Self {
        require_ebpf(EbpfSwitch::is_built());
        for port in PORTS {
            ip(&format!("link add s{port} type veth peer name h{port}"));
            ip(&format!("link set s{port} up"));
            ip(&format!("link set h{port} up"));
        }
        let name = format!("{name}-{}", process::id());
        let mut switch = EbpfSwitch::open(&name).expect("the eBPF switch opens");
        for port in PORTS {
            switch.add_port(SwitchPort(port), &format!("s{port}")).expect("it attaches");
        }
        Self { name, switch }
    }

    /// Writes an entry as an agent does that is killed before it has written the derived state,
    /// and opens the switch again.
    fn die_while_inserting(&mut self, entry: &Entry) {
        let table = Table::of(&entry.key);
        let index = *self.switch.free[table as usize].last().expect("the table has room");
        self.switch.write(entry, index).expect("the maps can be written");
        self.switch = EbpfSwitch::open(&self.name).expect("the pinned switch opens");
        assert_eq!(self.switch.entry(&entry.key).expect("it was written").entry, *entry);
    }

    fn insert(&mut self, key: Key, action: Action) {
        self.switch.insert(&entry(key, action)).expect("the entry is valid");
    }

    /// The port to which a frame from port 1 is forwarded.
    fn port_of(&mut self, frame: &[u8]) -> Option<u16> {
        let run = self.switch.test_run(SwitchPort(1), frame, 1).expect("the program runs");
        PORTS.into_iter().find(|&port| run.frame.starts_with(&mac(port).0))
    }

    /// The value of a key in its table's map.
    fn value(&self, key: &Key) -> Vec<u8> {
        let store = &self.switch.stores[Table::of(key) as usize];
        let all = store.all().expect("the map can be read");
        let wanted = encode_key(key);
        all.into_iter().find(|(key, _)| *key == wanted).expect("the key is there").1
    }

    /// Writes a value into its table's map without the agent.
    fn put(&mut self, key: &Key, value: &[u8]) {
        let store = &mut self.switch.stores[Table::of(key) as usize];
        store.put(&encode_key(key), value).expect("the map can be written");
    }

    fn drops(&mut self, reason: DropReason) -> u64 {
        self.switch.drops().expect("the maps can be read").of(reason)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Err(error) = EbpfSwitch::remove(&self.name) {
            eprintln!("{} was not removed: {error}", self.name);
        }
    }
}

/// The values that the kernel may hold for a key while it gives the element to another: the value of the
/// other entry, and all mixtures of the two values, word by word.
fn foreign_values(own: &[u8], other: &[u8]) -> Vec<Vec<u8>> {
    assert_eq!((own.len(), own.len() % 8), (other.len(), 0));
    let differing: Vec<_> =
        (0..own.len()).step_by(8).filter(|&at| own[at..at + 8] != other[at..at + 8]).collect();
    assert!((2..16).contains(&differing.len()), "{differing:?}");
    let mixed = |taken: u32| {
        let mut value = own.to_vec();
        for (bit, &at) in differing.iter().enumerate() {
            if taken >> bit & 1 == 1 {
                value[at..at + 8].copy_from_slice(&other[at..at + 8]);
            }
        }
        value
    };
    (1..1 << differing.len()).map(mixed).collect()
}

#[test]
fn the_c_header_is_made_from_the_declaration() {
    let committed = include_str!("../../bpf/declaration.h");
    let wanted = bluebridge_p4::c_header::c_header();
    let command = "cargo run -p bluebridge-p4 --example c_header > switch/bpf/declaration.h";
    assert!(committed == wanted, "switch/bpf/declaration.h is old: run `{command}`");
}

mod root {
    use super::*;

    /// Whoever removes a switch's pins also removes the directory of all switches if that is empty.
    #[test]
    fn a_directory_is_made_although_others_remove_its_parent() {
        let is_over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                    super::super::bpffs::remove("never-there").expect("nothing is there");
                }
            });
            for _ in 0..20_000 {
                let made = super::super::bpffs::open("made-again");
                if made.is_err() {
                    is_over.store(true, std::sync::atomic::Ordering::Relaxed);
                }
                let _ = std::fs::remove_dir(made.expect("it is made"));
            }
            is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        });
    }

    /// Fills a switch with two spaces. Checks for each sealed table: if a packet finds the value of the other
    /// space's entry in the element of its key, the result is the same as if the entry
    /// were missing.
    #[test]
    fn a_reused_element_is_treated_as_missing() {
        in_thread(|| {
            const OTHER: u32 = 0xfdbb_0002;
            let mut pinned = Pinned::open("reused");
            pinned.switch.set_group(1, &[SwitchPort(2)]).expect("the port is there");
            pinned.switch.set_group(2, &[SwitchPort(3)]).expect("the port is there");
            let prefix = (u128::from(SCOPE) << 80) | (u128::from(NODE) << 64);
            pinned.insert(Key::Directory { prefix, prefix_len: 48 }, forward(1));
            let select = |port| {
                let member = Forward { port: SwitchPort(port), dst_mac: mac(port) };
                Action::Select(vec![WeightedForward { forward: member, weight: 1 }])
            };
            let l2 = |low| Key::L2 { dst_mac: MacAddr([2, 0, 0, 0, 9, low]) };
            let mut to_all = read();
            to_all[42..45].copy_from_slice(&[0xff, 0xff, 25]);
            let mut to_any = read();
            to_any[42..45].copy_from_slice(&[0, 0, 3]);
            let mut alien = vec![2, 0, 0, 0, 9, 1, 2, 0, 0, 0, 0, 1, 8, 0];
            alien.resize(60, 0);
            let other_redirect = Key::Redirect { dst_scope: OTHER, dst_node: NODE, page: 6 };
            let other_guard =
                Key::IngressGuard { port: SwitchPort(3), src_scope: OTHER, src_node: 1 };
            // Own and other entry, a packet that matches the own one, and the action on a miss.
            let cases = [
                (REDIRECT, forward(2), other_redirect, forward(3), read(), None),
                (l2(1), forward(2), l2(2), forward(3), alien, Some(DropReason::NoRoute)),
                (
                    Key::Anycast { dst_scope: SCOPE },
                    select(2),
                    Key::Anycast { dst_scope: OTHER },
                    select(3),
                    to_any,
                    Some(DropReason::Anycast),
                ),
                (
                    Key::Multicast { dst_scope: SCOPE },
                    Action::SetMulticastGroup { group: 1 },
                    Key::Multicast { dst_scope: OTHER },
                    Action::SetMulticastGroup { group: 2 },
                    to_all.clone(),
                    Some(DropReason::Multicast),
                ),
                // The last, because all the others need it.
                (GUARD, Action::Allow, other_guard, Action::Allow, read(), Some(DropReason::Guard)),
            ];
            pinned.insert(GUARD, Action::Allow);
            for (own, own_action, other, other_action, frame, reason) in cases {
                if own != GUARD {
                    pinned.insert(own, own_action);
                }
                pinned.insert(other, other_action);
                let (mine, its) = (pinned.value(&own), pinned.value(&other));
                let hits = |pinned: &mut Pinned| {
                    [own, other].map(|key| pinned.switch.entry(&key).unwrap().counter.packets)
                };
                let sent = |pinned: &mut Pinned| {
                    let ports = pinned.switch.ports().expect("the maps can be read");
                    ports.into_iter().map(|port| port.tx.packets).collect::<Vec<_>>()
                };
                let before = hits(&mut pinned);
                pinned.port_of(&frame);
                assert_eq!(hits(&mut pinned), [before[0] + 1, before[1]], "{own:?} is met");
                for foreign in foreign_values(&mine, &its) {
                    pinned.put(&own, &foreign);
                    let before = (hits(&mut pinned), sent(&mut pinned));
                    let dropped = reason.map(|reason| pinned.drops(reason));
                    let port = pinned.port_of(&frame);
                    let after = (hits(&mut pinned), sent(&mut pinned));
                    assert_eq!(after.0, before.0, "{own:?}: {foreign:02x?}");
                    match reason {
                        None => assert_eq!(port, Some(1), "the directory's"),
                        Some(reason) => {
                            assert_eq!(pinned.drops(reason), dropped.unwrap_or(0) + 1);
                            assert_eq!(after.1, before.1, "{own:?}: {foreign:02x?}");
                        }
                    }
                }
                pinned.put(&own, &mine);
            }
            // The same for groups, which are not a table.
            let dropped = pinned.drops(DropReason::Multicast);
            let [mine, its] = [1_u16, 2].map(|group| {
                let group = pinned.switch.group_map.get(&group, 0).expect("it is there");
                group.as_bytes().to_vec()
            });
            let foreign = foreign_values(&mine, &its);
            for value in &foreign {
                pinned.switch.group_map.insert(1, from_bytes::<Group>(value), 0).expect("it fits");
                pinned.port_of(&to_all);
            }
            assert_eq!(pinned.drops(DropReason::Multicast), dropped + foreign.len() as u64);
        });
    }

    #[test]
    fn a_redirect_holds_though_the_agent_was_killed_while_it_inserted_it() {
        in_thread(|| {
            let mut pinned = Pinned::open("killed-redirect");
            pinned.insert(GUARD, Action::Allow);
            let prefix = (u128::from(SCOPE) << 80) | (u128::from(NODE) << 64);
            pinned.insert(Key::Directory { prefix, prefix_len: 48 }, forward(2));
            assert_eq!(pinned.port_of(&read()), Some(2));
            pinned.die_while_inserting(&entry(REDIRECT, forward(3)));
            assert_eq!(pinned.port_of(&read()), Some(3));
            pinned.switch.delete(&REDIRECT).expect("it is there");
            assert_eq!(pinned.port_of(&read()), Some(2));
        });
    }

    #[test]
    fn a_notify_holds_though_the_agent_was_killed_while_it_inserted_it() {
        in_thread(|| {
            let mut pinned = Pinned::open("killed-notify");
            pinned.insert(GUARD, Action::Allow);
            let session = CloneSession { packet_bytes: PACKET_IN_BYTES };
            pinned.switch.set_clone_session(Some(session)).expect("it can be set");
            let any = Ternary::default();
            let key =
                Key::Notify { src_command: any, dst_command: any, src_status: any, priority: 1 };
            pinned.die_while_inserting(&entry(key, Action::CopyToController));
            pinned.port_of(&read());
            let mut events = Vec::new();
            pinned.switch.poll(8, &mut events).expect("the ring can be read");
            assert_eq!(events.len(), 1);
            assert_eq!(pinned.drops(DropReason::NoRoute), 1);
            let counted = pinned.switch.entry(&key).expect("it is there").counter.packets;
            assert_eq!(counted, 1);
        });
    }
}
