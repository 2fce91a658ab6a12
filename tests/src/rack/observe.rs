//! The traffic counters and tables of a namespace's kernel.

use std::fs;

use bluebridge_rack::layout::ENDPOINT_INTERFACE;
use bluebridge_rack::network::host::{HostFabric, NeighbourCounts};
use bluebridge_rack::network::{Netlink, NetworkError};
use bluebridge_rack::spec::Node;

use super::TestRack;

impl TestRack {
    /// The present size of a node's neighbour table.
    ///
    /// # Panics
    /// If it cannot be read, or the gateway's entry is not a permanent one.
    pub fn neighbours(&self, node: Node) -> NeighbourCounts {
        let fabric = HostFabric::new(ENDPOINT_INTERFACE);
        let look = || {
            let netlink = Netlink::open()?;
            Ok::<_, NetworkError>((fabric.missing(&netlink)?, fabric.count_neighbours(&netlink)?))
        };
        let (missing, counts) = self.enter(node, look).expect("readable");
        assert_eq!(missing, [], "the gateway's entry is a permanent one");
        counts
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
