//! The traffic counters and tables of a namespace's kernel.

use std::fs;

use bluebridge_rack::network::Netlink;
use bluebridge_rack::network::host::GATEWAY;
use bluebridge_rack::spec::Node;
use bluebridge_wire::address::FABRIC_PREFIX;

use super::TestRack;

/// The size of a client's neighbour table.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Neighbours {
    /// Entries that fabric traffic could use: the gateway, and any address of the fabric.
    pub fabric: usize,
    /// All entries.
    pub all: usize,
}

impl TestRack {
    /// The current neighbour table of a node.
    ///
    /// # Panics
    /// If it cannot be read, or the gateway's entry is not a permanent one.
    pub fn neighbours(&self, node: Node) -> Neighbours {
        let table = self.enter(node, || Netlink::open()?.neighbours()).expect("readable");
        let gateway = table.iter().find(|entry| entry.address == GATEWAY).expect("an entry");
        assert!(gateway.permanent, "{gateway:?}");
        let of_fabric = |address: &std::net::Ipv6Addr| {
            *address == GATEWAY || address.segments()[0] == FABRIC_PREFIX
        };
        let fabric = table.iter().filter(|entry| of_fabric(&entry.address)).count();
        Neighbours { fabric, all: table.len() }
    }

    /// Fragments sent or received by any node, by the kernel's counters.
    ///
    /// # Panics
    /// If a counter cannot be read.
    pub fn fragment_count(&self) -> u64 {
        let nodes: Vec<Node> = self.rack().spec().nodes().collect();
        let count = |node| {
            let text = self.enter(node, || fs::read_to_string("/proc/thread-self/net/snmp6"));
            let text = text.expect("readable");
            ["Ip6FragCreates", "Ip6FragOKs", "Ip6ReasmReqds"].map(|name| number(&text, name))
        };
        nodes.into_iter().flat_map(count).sum()
    }
}

fn number(text: &str, name: &str) -> u64 {
    let line = text.lines().find(|line| line.split_whitespace().next() == Some(name));
    let value = line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok());
    value.unwrap_or_else(|| panic!("the kernel counts {name}"))
}
