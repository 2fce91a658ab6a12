//! A client's identity and its view of the rack.

use core::time::Duration;
use std::{
    hash::{BuildHasher, RandomState},
    net::Ipv6Addr,
};

use bluebridge_protocol::requester::{self, Timing};
use bluebridge_transport::Capabilities;
use bluebridge_wire::{EndpointAddress, IP_UDP_BYTES, NodeId, Space, piece_bytes};

use crate::{placement::Placement, service::Service};

/// A memory node as the controller names it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct MemoryNode {
    /// Its node id.
    pub node: NodeId,
    /// Its serving cores, 1 or more.
    pub shard_count: u16,
}

/// The identity that the controller assigned to the client at its join, and its settings.
#[derive(Clone, Debug)]
pub struct EndpointConfig {
    /// The tenant.
    pub space: Space,
    /// The endpoint's node.
    pub node: NodeId,
    /// The endpoint's incarnation.
    pub incarnation: u32,
    /// The space's largest piece in bytes; `None`: what the carrier's largest payload allows.
    pub piece_bytes: Option<u16>,
    /// The memory nodes, for placement; [`Placement::TwoChoices`], the usual one, needs them.
    pub memory_nodes: Vec<MemoryNode>,
    /// Where [`crate::Client::create`] and [`crate::Client::alloc_write`] allocate.
    pub placement: Placement,
    /// How long a call may take.
    pub deadline: Duration,
    /// How long a call polls before it sleeps; `None`: as long as is worth it, up to 50 us, learned from the waits.
    pub spin: Option<Duration>,
    /// Operations (of up to 32 KiB each) that can be in flight at once, 1 to 65534.
    pub operation_count: u16,
    /// Servers with which the client has sessions at once, 1 to 65534.
    pub server_count: u16,
    /// Pages that may be in flight at once; `None`: what the carrier's receive buffer holds.
    pub credit_pages: Option<u16>,
    /// Lines of 32 KiB that this client can hold leases on at once, if its leases are renewed.
    pub lease_count: u16,
    /// The endpoint's service thread; [`crate::Client::join`] starts one of its own.
    pub service: Option<Service>,
    /// The seed of random choices; use a different one for each client.
    pub seed: u64,
}

impl EndpointConfig {
    /// The default settings, with a random seed.
    #[must_use]
    pub fn new(space: Space, node: NodeId, incarnation: u32) -> Self {
        Self {
            space,
            node,
            incarnation,
            piece_bytes: None,
            memory_nodes: Vec::new(),
            placement: Placement::default(),
            deadline: Duration::from_secs(5),
            spin: None,
            operation_count: 512,
            server_count: 256,
            credit_pages: None,
            lease_count: 256,
            service: None,
            // The standard library seeds its hash maps from the system's entropy, once in a thread; a child process has
            // its parent's seed.
            seed: RandomState::new().hash_one((node.0, std::process::id())),
        }
    }

    /// The one address that the client sends from, for a carrier that is bound to it.
    #[must_use]
    pub fn address(&self) -> Ipv6Addr {
        EndpointAddress::new(self.space, self.node, u64::from(self.selector()) << 16).to_ipv6()
    }

    /// Two clients of one endpoint never take each other's replies.
    fn selector(&self) -> u32 {
        u32::try_from(self.seed >> 32).unwrap_or(0)
    }

    pub(crate) fn requester(&self, carrier: &Capabilities) -> requester::Config {
        let fitting = fitting_piece(carrier);
        let mut config = requester::Config::new(self.space, self.node, self.incarnation, self.seed);
        config.piece_bytes = match (self.piece_bytes, fitting) {
            (Some(assigned), Some(fitting)) => assigned.min(fitting),
            (assigned, fitting) => assigned.or(fitting).unwrap_or(config.piece_bytes),
        };
        let held = u16::try_from(carrier.received_pages().clamp(8, 4096)).unwrap_or(8);
        config.credit_pages = self.credit_pages.unwrap_or(held);
        config.operation_count = self.operation_count;
        config.server_count = self.server_count;
        config.selector = self.selector();
        config.timing = Timing { deadline: self.deadline, ..Timing::DEFAULT };
        config
    }
}

/// The largest piece that the carrier can send; `None` if it can send less than any link.
pub(crate) fn fitting_piece(carrier: &Capabilities) -> Option<u16> {
    let fitting = piece_bytes(carrier.largest_payload_bytes + IP_UDP_BYTES);
    fitting.and_then(|bytes| u16::try_from(bytes).ok())
}
