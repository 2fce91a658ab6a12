//! What an endpoint says of itself, and what the controller makes of it.

use std::fmt;
use std::time::Duration;

use bluebridge_wire::{ArenaGeneration, NodeId, Space};

use crate::error::MembershipError;
use crate::proto;

/// What an endpoint is there for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Role {
    /// Uses pages of others.
    Client,
    /// Holds pages for others.
    Memory {
        /// How many.
        capacity_pages: u64,
        /// By how many serving cores, 1 to 256.
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

/// Where an endpoint's interface is connected to the switch.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Attachment {
    /// To the switch's interface of this name, which the controller looks up.
    Interface(String),
    /// To the port with this number.
    Port(u16),
}

/// The proof of an endpoint's identity; a secret between it and the controller.
#[derive(Clone, Copy, Eq, PartialEq)]
pub struct Token(pub [u8; 16]);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// What an earlier join of the same name was given.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Previous {
    /// The node id.
    pub node: NodeId,
    /// The proof.
    pub token: Token,
    /// Whether the arena still holds everything that was acknowledged. If not, the node gets the
    /// arena generations that no earlier life had.
    pub contents_kept: bool,
}

/// What an endpoint says of itself when it joins.
#[derive(Clone, Debug)]
pub struct Registration {
    /// Its name (see [`crate::is_name`]); the same name is the same node again.
    pub name: String,
    /// What it is there for.
    pub role: Role,
    /// The tenant that it belongs to.
    pub space: Space,
    /// The MAC address of its interface towards the switch.
    pub mac: [u8; 6],
    /// Where that interface is connected.
    pub attachment: Attachment,
    /// How it sends and receives.
    pub carrier: Carrier,
    /// The interface's MTU in bytes.
    pub mtu: u32,
    /// What an earlier join of the same name was given, if it is known.
    pub previous: Option<Previous>,
    /// Whether it wants the space's notices of what is created and deleted.
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
            notices: self.notices,
            previous: self.previous.map(|previous| proto::Previous {
                node: previous.node.0.into(),
                token: previous.token.0.to_vec(),
                contents_kept: previous.contents_kept,
            }),
            attachment: Some(match &self.attachment {
                Attachment::Interface(name) => Wire::SwitchInterface(name.clone()),
                Attachment::Port(port) => Wire::SwitchPort(u32::from(*port)),
            }),
        }
    }
}

/// What an endpoint is from its join on; stays the same until it joins again.
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
    /// How often the controller wants to hear of it.
    pub heartbeat_interval: Duration,
    /// The proof of its identity, to be kept beside an arena that outlives the process.
    pub token: Token,
    /// Whether the switch had its entries when the join was answered. If not they follow; until
    /// then its packets are lost and sent again.
    pub installed: bool,
    /// Whether anybody in the space wanted notices at the time of the join.
    pub notices_wanted: bool,
}

impl Assignment {
    pub(crate) fn parse(answer: &proto::JoinResponse) -> Result<Self, MembershipError> {
        let bad = MembershipError::BadAnswer;
        let node = node_id(answer.node)?;
        let space = u16::try_from(answer.space).map_err(|_| bad("space"))?;
        let generation = u16::try_from(answer.arena_generation).ok().and_then(ArenaGeneration::new);
        let piece_bytes = usize::try_from(answer.piece_bytes).ok().filter(|bytes| *bytes >= 1024);
        let generation = generation.ok_or(bad("arena generation"))?;
        let last = u16::try_from(answer.last_arena_generation).ok().and_then(ArenaGeneration::new);
        if answer.incarnation == 0 || answer.heartbeat_interval_ms == 0 {
            return Err(bad("incarnation or interval"));
        }
        Ok(Self {
            node,
            space: Space(space),
            incarnation: answer.incarnation,
            generation,
            last_generation: last.ok_or(bad("last arena generation"))?.max(generation),
            range_epoch: answer.range_epoch,
            piece_bytes: piece_bytes.ok_or(bad("piece size"))?,
            heartbeat_interval: Duration::from_millis(answer.heartbeat_interval_ms.into()),
            token: Token(answer.token.as_slice().try_into().map_err(|_| bad("token"))?),
            installed: answer.installed,
            notices_wanted: answer.notices_wanted,
        })
    }
}

fn node_id(number: u32) -> Result<NodeId, MembershipError> {
    let node = u16::try_from(number).map(NodeId).ok().filter(|node| node.is_unicast());
    node.ok_or(MembershipError::BadAnswer("node id"))
}

/// A memory node of the space.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct MemoryNode {
    /// Its id.
    pub node: NodeId,
    /// Its name.
    pub name: String,
    /// Whether the controller hears of it.
    pub live: bool,
    /// The first generation of its arena.
    pub generation: ArenaGeneration,
    /// Its serving cores.
    pub shard_count: u16,
    /// Pages that it can hold.
    pub capacity_pages: u64,
    /// Pages that it had left when it last said so.
    pub free_pages: u64,
}

impl MemoryNode {
    pub(crate) fn parse(node: &proto::MemoryNode) -> Result<Self, MembershipError> {
        let bad = MembershipError::BadAnswer;
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

/// Directed placement: of two live memory nodes with free pages, drawn by `random`, the one with
/// more of them left. `None` if there is no such node.
///
/// Two choices spread the load almost as well as knowing everybody's (Mitzenmacher, 2001), and do
/// not make every client run to the same node when the numbers are old.
#[must_use]
pub fn place(nodes: &[MemoryNode], random: u64) -> Option<&MemoryNode> {
    let fitting: Vec<&MemoryNode> =
        nodes.iter().filter(|node| node.live && node.free_pages != 0).collect();
    let draw = |half: u64, count: usize| usize::try_from(half).unwrap_or(0) % count.max(1);
    let first = draw(random >> 32, fitting.len());
    let others = fitting.len().saturating_sub(1);
    let second = (first + 1 + draw(random & 0xffff_ffff, others)) % fitting.len().max(1);
    let (first, second) = (fitting.get(first)?, fitting.get(second)?);
    Some(if second.free_pages > first.free_pages { second } else { first })
}
