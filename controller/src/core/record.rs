//! Stored records of the controller.

use std::ops::RangeInclusive;

use bluebridge_p4::pipeline::{MacAddr, SwitchPort};
use bluebridge_wire::{NodeId, Space};
use serde::{Deserialize, Serialize};

use crate::migration::rebalance::RebalanceRecord;
use crate::migration::{
    DeputyRecord, DrainRecord, ElsewhereRecord, LossRecord, MigrationRecord, StoredMigrations,
};

/// The role of an endpoint.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum Role {
    /// Uses pages of memory nodes.
    Client,
    /// Provides pages.
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

/// An endpoint, present or past. There is one permanent record per node id.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct NodeRecord {
    /// The node id.
    pub node: u16,
    /// The endpoint's name.
    pub name: String,
    /// Its role.
    pub role: Role,
    /// The space that it belongs to.
    pub space: u16,
    /// Increased by every join.
    pub incarnation: u32,
    /// The first incarnation under this name: a client's node id may have had another before. 0 if that
    /// was not recorded yet.
    #[serde(default)]
    pub first_incarnation: u32,
    /// The first generation of its arena.
    pub generation: u16,
    /// The last generation that is reserved for its arena; a later incarnation starts after it. 0 in
    /// records of a controller that did not store it: then it is [`Self::generation`].
    #[serde(default)]
    pub last_generation: u16,
    /// Increased by every join; a memory node serves its own range under it.
    pub range_epoch: u32,
    /// The token that proves its identity.
    pub token: [u8; 16],
    /// The nonce of the join that created the incarnation.
    pub nonce: u64,
    /// Its MAC address.
    pub mac: [u8; 6],
    /// The name of the switch to which it is connected; empty if that is the only one and has none.
    #[serde(default)]
    pub switch: String,
    /// The switch's port to which it is connected.
    pub port: u16,
    /// How it sends and receives.
    pub carrier: Carrier,
    /// Its MTU in bytes.
    pub mtu: u32,
    /// Its serving cores, 0 for a client.
    pub shard_count: u16,
    /// Pages that it can hold, 0 for a client.
    pub capacity_pages: u64,
    /// The coarse level of its free memory that determines anycast weights, stored so that a
    /// restart of the controller changes no weight.
    pub level: Option<u8>,
    /// Whether it is attached: it joined, and neither left nor was removed.
    pub attached: bool,
    /// Whether its generations are used up: its name is free, its id is not.
    pub retired: bool,
    /// Whether it requests the space's notices.
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

/// A change that must be stored before its effect is visible.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Change {
    /// A server answers for another one, which is drained and gone.
    Deputy(DeputyRecord),
    /// No server answers for a node any more.
    DeputyGone(u16),
    /// An operator drains a server.
    Drain(DrainRecord),
    /// A server is not drained any more.
    DrainGone(u16),
    /// Pages of a home are at other servers than before.
    Elsewhere(ElsewhereRecord),
    /// A node lost its memory, or more servers know it.
    Loss(LossRecord),
    /// All servers know that a node lost its memory.
    LossGone(u16),
    /// A migration is new or different.
    Migration(MigrationRecord),
    /// A closed migration is forgotten.
    MigrationGone(u64),
    /// A node is new or different.
    Node(NodeRecord),
    /// An operator lets the controller move memory by itself, or no more.
    Rebalance(Option<RebalanceRecord>),
    /// A space is new or has another group.
    Space(SpaceRecord),
    /// A space released its group.
    SpaceGone(u16),
}

/// The stored state.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Stored {
    /// Every node.
    pub nodes: Vec<NodeRecord>,
    /// Every space with a group.
    pub spaces: Vec<SpaceRecord>,
    /// The first arena generation of new memory nodes: an earlier, deleted store assigned
    /// the same node ids, and pointers to their pages may still exist.
    pub first_generation: u16,
    /// Migrations.
    pub migrations: StoredMigrations,
    /// Set if memory moves by itself.
    pub rebalance: Option<RebalanceRecord>,
}
