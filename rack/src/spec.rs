//! The specification of a rack: its name, nodes, link sizes and switch.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use bluebridge_wire::address::{PAGE_BYTES, SHARD_SHIFT};
use serde::{Deserialize, Serialize};

/// Most endpoints of a rack: their ports and the controller's are one group of the switch, which
/// can have 64.
pub const MAX_ENDPOINTS: u16 = 127;

/// The smallest link: the minimum of IPv6.
pub const MIN_MTU: u32 = 1280;

/// The largest link that the protocol supports.
pub const MAX_MTU: u32 = 9000;

/// Why a text is not a valid specification.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// A size is not a number with an optional unit.
    #[error("{0:?} is not a size: a size is a number and K, M, G or T, such as 256M")]
    ByteSize(String),
    /// More endpoints than a rack can have.
    #[error("{0} endpoints are too many: a rack can have {MAX_ENDPOINTS} servers and clients")]
    Endpoints(u32),
    /// A memory size that no server can offer.
    #[error("{0} is not a valid memory size of a server: 4K to 1T, the limit of one shard")]
    Memory(ByteSize),
    /// An MTU that the protocol cannot use.
    #[error("{0:?} is not an MTU: use {MIN_MTU} to {MAX_MTU}, alone or as s1=1500,c2=1280")]
    Mtu(String),
    /// An MTU for a node that the rack does not have, or that has no link of its own.
    #[error("there is no endpoint {0} in this rack to set an MTU for")]
    MtuOfUnknownNode(Node),
    /// A rack name that cannot be part of a file name.
    #[error(
        "{0:?} is not a rack name: 1 to 32 lower-case letters, digits and dashes, no dash first"
    )]
    Name(String),
    /// An invalid node name.
    #[error("{0:?} is not a node: switch, s1, s2, .. or c1, c2, ..")]
    Node(String),
}

/// A rack's name, valid as a part of a file name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct RackName(String);

impl RackName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for RackName {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        let good =
            (1..=32).contains(&text.len()) && text.chars().all(fits) && !text.starts_with('-');
        if good { Ok(Self(text.to_owned())) } else { Err(SpecError::Name(text.to_owned())) }
    }
}

/// A namespace of the rack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Node {
    /// The switch, with the controller in the same namespace.
    Switch,
    /// A memory server, from 1.
    Server(u16),
    /// A client, from 1.
    Client(u16),
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Switch => f.pad("switch"),
            Self::Server(number) => f.pad(&format!("s{number}")),
            Self::Client(number) => f.pad(&format!("c{number}")),
        }
    }
}

impl FromStr for Node {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        let number = |digits: &str| {
            let number = digits.parse().ok().filter(|number| *number > 0);
            number.filter(|number: &u16| number.to_string() == digits)
        };
        let node = match (text.get(..1), text.get(1..)) {
            _ if text == "switch" => Some(Self::Switch),
            (Some("s"), Some(digits)) => number(digits).map(Self::Server),
            (Some("c"), Some(digits)) => number(digits).map(Self::Client),
            _ => None,
        };
        node.ok_or_else(|| SpecError::Node(text.to_owned()))
    }
}

/// The MTU of every endpoint's link, in bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct LinkMtus {
    default: u32,
    special: BTreeMap<Node, u32>,
}

impl LinkMtus {
    /// The MTU of one endpoint's link.
    pub fn of(&self, node: Node) -> u32 {
        self.special.get(&node).copied().unwrap_or(self.default)
    }
}

impl Default for LinkMtus {
    fn default() -> Self {
        Self { default: MAX_MTU, special: BTreeMap::new() }
    }
}

impl FromStr for LinkMtus {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        let bad = || SpecError::Mtu(text.to_owned());
        let mtu = |digits: &str| {
            let mtu = digits.parse().ok().filter(|mtu| (MIN_MTU..=MAX_MTU).contains(mtu));
            mtu.ok_or_else(bad)
        };
        let mut mtus = Self::default();
        for part in text.split(',') {
            match part.split_once('=') {
                Some((node, digits)) => mtus.special.insert(node.parse()?, mtu(digits)?),
                None => Some(std::mem::replace(&mut mtus.default, mtu(part)?)),
            };
        }
        Ok(mtus)
    }
}

impl fmt::Display for LinkMtus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.default)?;
        self.special.iter().try_for_each(|(node, mtu)| write!(f, ",{node}={mtu}"))
    }
}

/// A number of bytes, written with a binary unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ByteSize(pub u64);

const UNITS: [(char, u32); 4] = [('T', 40), ('G', 30), ('M', 20), ('K', 10)];

impl FromStr for ByteSize {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        let unit = UNITS.iter().find_map(|(letter, shift)| {
            let digits = text.strip_suffix(|c: char| c.to_ascii_uppercase() == *letter)?;
            Some((digits, *shift))
        });
        let (digits, shift) = unit.unwrap_or((text, 0));
        let plain = !digits.starts_with('+');
        let bytes = digits.parse::<u64>().ok().and_then(|count| count.checked_mul(1 << shift));
        bytes.filter(|_| plain).map(Self).ok_or_else(|| SpecError::ByteSize(text.to_owned()))
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact = |shift: u32| self.0 != 0 && self.0.trailing_zeros() >= shift;
        match UNITS.iter().find(|(_, shift)| exact(*shift)) {
            Some((letter, shift)) => write!(f, "{}{letter}", self.0 >> shift),
            None => write!(f, "{}", self.0),
        }
    }
}

/// The data plane of the rack's switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
pub enum DataPlane {
    /// BMv2 with the P4 program, which the environment names.
    Bmv2,
    /// In the kernel; needs root.
    Ebpf,
    /// Open vSwitch, driven by OpenFlow; needs root and the package `openvswitch-switch`.
    Ovs,
    /// In a separate process; needs no privileges.
    Soft,
}

impl DataPlane {
    /// Its name on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Bmv2 => "bmv2",
            Self::Ebpf => "ebpf",
            Self::Ovs => "ovs",
            Self::Soft => "soft",
        }
    }

    /// Whether it is the embedded switch, whose agent lists ports and drops, and impairs ports.
    pub fn is_embedded(self) -> bool {
        matches!(self, Self::Ebpf | Self::Soft)
    }
}

/// Which leased pages the switch redirects to their owners.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
pub enum Redirects {
    /// Every page that is leased
    Always,
    /// Contended pages: leased pages that several clients request
    #[default]
    Contended,
    /// None
    Off,
}

impl Redirects {
    /// Its name on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Always => "always",
            Self::Contended => "contended",
            Self::Off => "off",
        }
    }
}

/// The specification of a rack.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RackSpec {
    /// Its name, unique on this machine for root, and for each user.
    pub name: RackName,
    /// The number of memory servers.
    pub servers: u16,
    /// The number of clients.
    pub clients: u16,
    /// The links' MTUs.
    pub mtu: LinkMtus,
    /// The switch.
    pub switch: DataPlane,
    /// The memory of each server.
    pub memory: ByteSize,
    /// Which leased pages are redirected.
    #[serde(default)]
    pub redirects: Redirects,
    /// Whether the kernel answers READs where it can.
    #[serde(default = "yes")]
    pub direct_reads: bool,
}

const fn yes() -> bool {
    true
}

impl RackSpec {
    /// Checks rules between the parts.
    pub fn check(&self) -> Result<(), SpecError> {
        let count = u32::from(self.servers) + u32::from(self.clients);
        if count > u32::from(MAX_ENDPOINTS) {
            return Err(SpecError::Endpoints(count));
        }
        if !(PAGE_BYTES as u64..=1 << SHARD_SHIFT).contains(&self.memory.0) {
            return Err(SpecError::Memory(self.memory));
        }
        let mut unknown =
            self.mtu.special.keys().filter(|node| !self.endpoints().any(|it| it == **node));
        unknown.next().map_or(Ok(()), |node| Err(SpecError::MtuOfUnknownNode(*node)))
    }

    /// The servers, then the clients.
    pub fn endpoints(&self) -> impl Iterator<Item = Node> + use<> {
        let servers = (1..=self.servers).map(Node::Server);
        servers.chain((1..=self.clients).map(Node::Client))
    }

    /// Every namespace of the rack.
    pub fn nodes(&self) -> impl Iterator<Item = Node> + use<> {
        std::iter::once(Node::Switch).chain(self.endpoints())
    }
}

macro_rules! through_text {
    ($($name:ident),*) => {$(
        impl From<$name> for String {
            fn from(value: $name) -> Self {
                value.to_string()
            }
        }

        impl TryFrom<String> for $name {
            type Error = SpecError;

            fn try_from(text: String) -> Result<Self, SpecError> {
                text.parse()
            }
        }
    )*};
}

through_text!(RackName, Node, LinkMtus);

impl fmt::Display for RackName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}
