//! An endpoint's registration, and the controller's assignment.

use std::fmt;
use std::time::Duration;

use bluebridge_wire::{ArenaGeneration, NodeId, Space};

use crate::error::MembershipError;
use crate::proto;

/// The role of an endpoint.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Role {
    /// Uses pages of memory nodes.
    Client,
    /// Provides pages.
    Memory {
        /// The number of pages.
        capacity_pages: u64,
        /// The number of serving cores, 1 to 256.
        shard_count: u16,
    },
}

/// How an endpoint sends and receives.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Carrier {
    /// AF_PACKET rings.
    PacketRing,
    /// UDP sockets of the kernel.
    Socket,
    /// AF_XDP sockets with a native XDP program.
    Xdp,
}

/// The switch's port to which an endpoint's interface is connected.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Attachment {
    /// That of the switch's interface of this name, which the controller looks up.
    Interface(String),
    /// The port with this number.
    Port(u16),
}

/// The token that proves an endpoint's identity; a secret between it and the controller.
#[derive(Clone, Copy, Eq, PartialEq)]
pub struct Token(pub [u8; 16]);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// The result of an earlier join under the same name.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Previous {
    /// The node id.
    pub node: NodeId,
    /// The token.
    pub token: Token,
    /// The first generation of the contents if the arena still holds everything that was
    /// acknowledged. If not, the node gets arena generations that no earlier incarnation had.
    pub contents: Option<ArenaGeneration>,
}

/// The registration with which an endpoint joins.
#[derive(Clone, Debug)]
pub struct Registration {
    /// Its name (see [`crate::is_name`]); the same name is the same node again, unless it joined in another space
    /// meanwhile.
    pub name: String,
    /// Its role.
    pub role: Role,
    /// The tenant that it belongs to.
    pub space: Space,
    /// The MAC address of its interface towards the switch.
    pub mac: [u8; 6],
    /// The name of the switch to which that interface is connected; may be empty if there is only one.
    pub switch: String,
    /// The switch's port.
    pub attachment: Attachment,
    /// How it sends and receives.
    pub carrier: Carrier,
    /// The interface's MTU in bytes.
    pub mtu: u32,
    /// The result of an earlier join under the same name, if known.
    pub previous: Option<Previous>,
    /// Whether it requests the space's notices of allocations and deletions.
    pub notices: bool,
}

impl Registration {
    pub(crate) fn request(&self, nonce: u64) -> proto::JoinRequest {
        use proto::join_request::Attachment as Wire;
        let (role, capacity_pages, shard_count) = match self.role {
            Role::Client => (proto::Role::Client, 0, 0),
            Role::Memory { capacity_pages, shard_count } => {
                (proto::Role::Memory, capacity_pages, shard_count.into())
            }
        };
        let carrier = match self.carrier {
            Carrier::PacketRing => proto::Carrier::PacketRing,
            Carrier::Socket => proto::Carrier::Socket,
            Carrier::Xdp => proto::Carrier::Xdp,
        };
        proto::JoinRequest {
            name: self.name.clone(),
            role: role.into(),
            space: self.space.0.into(),
            mac: self.mac.to_vec(),
            capacity_pages,
            shard_count,
            carrier: carrier.into(),
            mtu: self.mtu,
            nonce,
            switch: self.switch.clone(),
            notices: self.notices,
            previous: self.previous.map(|previous| proto::Previous {
                node: previous.node.0.into(),
                token: previous.token.0.to_vec(),
                contents_generation: previous.contents.map(|first| first.number().into()),
            }),
            attachment: Some(match &self.attachment {
                Attachment::Interface(name) => Wire::SwitchInterface(name.clone()),
                Attachment::Port(port) => Wire::SwitchPort(u32::from(*port)),
            }),
        }
    }
}

/// The assignment of an endpoint; it stays the same until it joins again.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Assignment {
    /// Its node id.
    pub node: NodeId,
    /// Its space.
    pub space: Space,
    /// Greater than that of any earlier endpoint with this node id.
    pub incarnation: u32,
    /// The first generation of its arena.
    pub generation: ArenaGeneration,
    /// The last generation that is reserved for its arena.
    pub last_generation: ArenaGeneration,
    /// The epoch under which a memory node serves its own range.
    pub range_epoch: u32,
    /// The most data bytes in a datagram at the time of the join.
    pub piece_bytes: usize,
    /// The interval of heartbeats that the controller requests.
    pub heartbeat_interval: Duration,
    /// The token that proves its identity; keep it beside an arena that outlives the process.
    pub token: Token,
    /// Whether the switch had its entries when the response was sent. If not, they follow; until
    /// then its packets are lost and retransmitted.
    pub installed: bool,
    /// Whether any endpoint in the space had requested notices at the time of the join.
    pub notices_wanted: bool,
}

impl Assignment {
    pub(crate) fn parse(response: &proto::JoinResponse) -> Result<Self, MembershipError> {
        let bad = MembershipError::BadResponse;
        let node = node_id(response.node)?;
        let space = u16::try_from(response.space).map_err(|_| bad("space"))?;
        let generation =
            u16::try_from(response.arena_generation).ok().and_then(ArenaGeneration::new);
        let piece_bytes = usize::try_from(response.piece_bytes).ok().filter(|bytes| *bytes >= 1024);
        let generation = generation.ok_or(bad("arena generation"))?;
        let last =
            u16::try_from(response.last_arena_generation).ok().and_then(ArenaGeneration::new);
        if response.incarnation == 0 || response.heartbeat_interval_ms == 0 {
            return Err(bad("incarnation or interval"));
        }
        Ok(Self {
            node,
            space: Space(space),
            incarnation: response.incarnation,
            generation,
            last_generation: last.ok_or(bad("last arena generation"))?.max(generation),
            range_epoch: response.range_epoch,
            piece_bytes: piece_bytes.ok_or(bad("piece size"))?,
            heartbeat_interval: Duration::from_millis(response.heartbeat_interval_ms.into()),
            token: Token(response.token.as_slice().try_into().map_err(|_| bad("token"))?),
            installed: response.installed,
            notices_wanted: response.notices_wanted,
        })
    }
}

fn node_id(number: u32) -> Result<NodeId, MembershipError> {
    let node = u16::try_from(number).map(NodeId).ok().filter(|node| node.is_unicast());
    node.ok_or(MembershipError::BadResponse("node id"))
}

/// The controller's state of a memory node of the space.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct MemoryNodeStatus {
    /// Its id.
    pub node: NodeId,
    /// Its name.
    pub name: String,
    /// Whether its heartbeats arrive.
    pub live: bool,
    /// The first generation of its arena.
    pub generation: ArenaGeneration,
    /// Its serving cores.
    pub shard_count: u16,
    /// Pages that it can hold.
    pub capacity_pages: u64,
    /// Its free pages as last reported.
    pub free_pages: u64,
}

impl MemoryNodeStatus {
    pub(crate) fn parse(node: &proto::MemoryNode) -> Result<Self, MembershipError> {
        let bad = MembershipError::BadResponse;
        let generation = u16::try_from(node.arena_generation).ok().and_then(ArenaGeneration::new);
        Ok(Self {
            node: node_id(node.node)?,
            name: node.name.clone(),
            live: node.state() == proto::NodeState::Live,
            generation: generation.ok_or(bad("arena generation"))?,
            shard_count: u16::try_from(node.shard_count).map_err(|_| bad("shard count"))?,
            capacity_pages: node.capacity_pages,
            free_pages: node.free_pages,
        })
    }
}
