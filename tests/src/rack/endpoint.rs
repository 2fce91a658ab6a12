//! Client endpoints: one membership each, and any number of clients.

use std::time::Duration;

use bluebridge::{Client, EndpointConfig, MemoryNode, NodeId, Space, Usage};
use bluebridge_northbound::{Attachment, Carrier, Membership, Registration, Role};
use bluebridge_rack::layout::ENDPOINT_INTERFACE;
use bluebridge_rack::network::host::FABRIC;
use bluebridge_rack::spec::Node;
use bluebridge_transport::interface::Interface;
use bluebridge_transport::udp::{UdpConfig, UdpTransport};

use super::TestRack;

/// The space of a rack's servers.
pub const SPACE: Space = Space(1);

/// The client type of the tests.
pub type UdpClient = Client<UdpTransport>;

/// A client endpoint that has joined.
#[derive(Debug)]
pub struct Endpoint {
    node: Node,
    membership: Membership,
}

impl Endpoint {
    /// Joins as the client with this number.
    ///
    /// # Panics
    /// If the controller refuses; the message has the reason.
    pub fn join(rack: &TestRack, number: u16) -> Self {
        Self::join_space(rack, number, SPACE, &Node::Client(number).to_string())
    }

    /// Joins another space, under another name.
    ///
    /// # Panics
    /// If the controller refuses; the message has the reason.
    pub fn join_space(rack: &TestRack, number: u16, space: Space, name: &str) -> Self {
        let node = Node::Client(number);
        let uri = format!("http://{}", rack.rack().layout().controller());
        let port = rack.port(node);
        let membership = rack.enter(node, || {
            let interface = Interface::by_name(ENDPOINT_INTERFACE).expect("the link is there");
            let registration = Registration {
                name: name.to_owned(),
                role: Role::Client,
                space,
                mac: interface.mac,
                switch: String::new(),
                attachment: Attachment::Port(port),
                carrier: Carrier::Socket,
                mtu: interface.mtu,
                previous: None,
                notices: false,
            };
            Membership::join(&uri, registration).unwrap_or_else(|error| panic!("{error}"))
        });
        Self { node, membership }
    }

    /// The membership: what the controller reports of the rack.
    pub const fn membership(&self) -> &Membership {
        &self.membership
    }

    /// The memory nodes that are alive.
    pub fn memory_nodes(&self) -> Vec<MemoryNode> {
        let nodes = self.membership.snapshot().memory_nodes;
        let live = nodes.iter().filter(|node| node.live);
        live.map(|node| MemoryNode { node: node.node, shard_count: node.shard_count }).collect()
    }

    /// The node id of one of the rack's servers.
    ///
    /// # Panics
    /// If the controller does not know it.
    pub fn server(&self, number: u16) -> NodeId {
        let name = Node::Server(number).to_string();
        let nodes = self.membership.snapshot().memory_nodes;
        nodes.iter().find(|node| node.name == name).expect("a server that joined").node
    }

    /// The configuration of a client of this endpoint; each client needs another `seed`.
    pub fn config(&self, seed: u64) -> EndpointConfig {
        let assignment = self.membership.assignment();
        let mut config =
            EndpointConfig::new(assignment.space, assignment.node, assignment.incarnation);
        config.piece_bytes = u16::try_from(self.membership.snapshot().piece_bytes).ok();
        config.memory_nodes = self.memory_nodes();
        config.deadline = Duration::from_secs(10);
        config.seed = spread(seed);
        config
    }

    /// A client with its own socket; each client needs another `seed`.
    pub fn client(&self, rack: &TestRack, seed: u64) -> UdpClient {
        self.open(rack, self.config(seed))
    }

    /// A client with another configuration.
    ///
    /// # Panics
    /// If the socket cannot be opened.
    pub fn open(&self, rack: &TestRack, config: EndpointConfig) -> UdpClient {
        let carrier = UdpConfig {
            address: Some(config.address()),
            device: Some(ENDPOINT_INTERFACE.to_owned()),
            filter: Some(FABRIC),
            ..UdpConfig::default()
        };
        let transport = rack.enter(self.node, || UdpTransport::open(&carrier));
        Client::open(config, transport.unwrap_or_else(|error| panic!("{error}")))
    }
}

/// Spreads small numbers (the finalizer of splitmix64), because a client takes its address from the
/// upper half of its seed.
const fn spread(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Pages in use, confirmed or not, on all of the servers.
///
/// # Panics
/// If a server does not respond.
pub fn usage(client: &mut UdpClient, nodes: &[MemoryNode]) -> Usage {
    let mut total = Usage::default();
    for node in nodes {
        let usage = client.stat(node.node).unwrap_or_else(|error| panic!("{error}"));
        total.capacity_pages += usage.capacity_pages;
        total.free_pages += usage.free_pages;
        total.used_pages += usage.used_pages;
        total.provisional_pages += usage.provisional_pages;
    }
    total
}

/// Waits until the servers hold exactly `pages`, longer than provisional pages may live.
///
/// # Panics
/// If they do not reach this number in time.
pub fn await_used(client: &mut UdpClient, nodes: &[MemoryNode], pages: u64) {
    let until = std::time::Instant::now() + Duration::from_secs(10);
    loop {
        let now = usage(client, nodes);
        if (now.used_pages, now.provisional_pages) == (pages, 0) {
            return;
        }
        assert!(
            std::time::Instant::now() < until,
            "{pages} pages are held, the servers say {now:?}"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}
