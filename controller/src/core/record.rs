//! What the controller must not forget.

use std::ops::RangeInclusive;

use bluebridge_p4::pipeline::{MacAddr, SwitchPort};
use bluebridge_wire::{NodeId, Space};
use serde::{Deserialize, Serialize};

/// What an endpoint is there for.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum Role {
    /// Uses pages of others.
    Client,
    /// Holds pages for others.
    Memory,
}

/// How an endpoint sends and receives.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum Carrier {
    /// AF_PACKET rings.
    PacketRing,
    /// UDP sockets of the kernel.
    Socket,
    /// AF_XDP sockets.
    Xdp,
}

/// An endpoint, present or past. There is one record per node id, for good.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct NodeRecord {
    /// The node id.
    pub node: u16,
    /// The endpoint's name.
    pub name: String,
    /// What it is there for.
    pub role: Role,
    /// The space that it belongs to.
    pub space: u16,
    /// Raised by every join.
    pub incarnation: u32,
    /// The first generation of its arena.
    pub generation: u16,
    /// The last generation that is reserved for its arena; a later life begins behind it. 0, of a
    /// controller that did not store it, stands for [`Self::generation`].
    #[serde(default)]
    pub last_generation: u16,
    /// Raised by every join: under which it serves its own range.
    pub range_epoch: u32,
    /// The proof of its identity.
    pub token: [u8; 16],
    /// The nonce of the join that the incarnation came from.
    pub nonce: u64,
    /// Its MAC address.
    pub mac: [u8; 6],
    /// The switch's port that it is connected to.
    pub port: u16,
    /// How it sends and receives.
    pub carrier: Carrier,
    /// Its MTU in bytes.
    pub mtu: u32,
    /// Its serving cores, 0 for a client.
    pub shard_count: u16,
    /// Pages that it can hold, 0 for a client.
    pub capacity_pages: u64,
    /// The coarse form of its free memory that anycast weights are made of, stored so that a
    /// restart of the controller changes no weight.
    pub level: Option<u8>,
    /// Whether it is an endpoint now: it joined and neither left nor was given up.
    pub attached: bool,
    /// Whether its generations are used up: its name is free, its id is not.
    pub retired: bool,
    /// Whether it wants the space's notices.
    #[serde(default)]
    pub notices: bool,
}

impl NodeRecord {
    /// The node id.
    #[must_use]
    pub const fn id(&self) -> NodeId {
        NodeId(self.node)
    }

    /// The space.
    #[must_use]
    pub const fn space(&self) -> Space {
        Space(self.space)
    }

    /// The generations that are reserved for its arena.
    #[must_use]
    pub fn generations(&self) -> RangeInclusive<u16> {
        self.generation..=self.last_generation.max(self.generation)
    }

    /// The switch's port.
    #[must_use]
    pub const fn port(&self) -> SwitchPort {
        SwitchPort(self.port)
    }

    /// The MAC address.
    #[must_use]
    pub const fn mac(&self) -> MacAddr {
        MacAddr(self.mac)
    }
}

/// A space and the multicast group of its notices.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub struct SpaceRecord {
    /// The space.
    pub space: u16,
    /// Its group, unique among the spaces.
    pub group: u16,
}

/// A change that must be stored before anybody hears of its consequence.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Change {
    /// A node is new or different.
    Node(NodeRecord),
    /// A space is new or has another group.
    Space(SpaceRecord),
    /// A space gave its group back.
    SpaceGone(u16),
}

/// Everything stored.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Stored {
    /// Every node.
    pub nodes: Vec<NodeRecord>,
    /// Every space with a group.
    pub spaces: Vec<SpaceRecord>,
    /// Where the arena generations of new memory nodes begin: a store that another replaced gave
    /// the same node ids, and pointers to their pages may still be about.
    pub first_generation: u16,
}
