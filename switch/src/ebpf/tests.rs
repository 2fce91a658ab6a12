//! What only shows in the maps themselves: states that an agent leaves behind when it is killed, and
//! elements that the kernel reuses while a program reads them.

use std::process;

use bluebridge_p4::pipeline::{
    Action, DropReason, Entry, Forward, Key, MacAddr, PACKET_IN_BYTES, SwitchPort, Ternary,
};
use bluebridge_testkit::{ip, namespace::in_thread, require_ebpf};

use super::EbpfSwitch;
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
    let mut frame = [2, 0, 0, 0, 0, 0xfe, 2, 0, 0, 0, 0, 1, 0x86, 0xdd].to_vec();
    frame.extend([0x60, 0, 0, 0, 0, 40, 17, 64]);
    frame.extend([0xfd, 0xbb, 0, 1, 0, 1, 0, 0, 0x80, 0, 0, 0, 0, 0, 0, 1]);
    frame.extend([0xfd, 0xbb, 0, 1, 0, 2, 6, 7]);
    frame.extend((PAGE << 12).to_be_bytes());
    frame.resize(94, 0xa5);
    frame
}

/// A pinned switch with [`PORTS`] that is removed with this.
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

    /// Writes an entry as far as an agent does that is killed before it has written what is derived
    /// from the table, and opens the switch again.
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

    /// The port that a frame, sent in by port 1, is forwarded to.
    fn port_of(&mut self, frame: &[u8]) -> Option<u16> {
        let run = self.switch.test_run(SwitchPort(1), frame, 1).expect("the program runs");
        PORTS.into_iter().find(|&port| run.frame.starts_with(&mac(port).0))
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

mod root {
    use super::*;

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
            pinned.die_while_inserting(&entry(key, Action::Notify));
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
