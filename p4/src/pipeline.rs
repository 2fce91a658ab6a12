//! The tables of the pipeline as types: the interface between controller, agent and data planes.
//!
//! Fabric traffic (source *or* destination in `fdbb::/16`) passes these checks and tables in order:
//!
//! 1. tagged frame -> drop;
//! 2. destination outside the fabric -> drop;
//! 3. next header of the IPv6 header not UDP, TCP or ICMPv6 (an extension header, a fragment, a tunnel) -> drop;
//! 4. hop limit <= 1 -> drop, otherwise decremented;
//! 5. `ingress_guard` (miss -> drop);
//! 6. scopes of source and destination differ -> drop, with the guard's reason;
//! 7. by destination node: `0` -> `anycast` (CREATE and ALLOC_WRITE requests only); `0xffff` -> `multicast`
//!    (notices only); otherwise `redirect`, then `directory` (miss -> drop). `redirect` is skipped if the command byte
//!    has a bit of 0xC0, the location has bit 63 set or the entry has expired;
//! 8. `notify`, for all packets that the guard allowed.
//!
//! All other traffic is switched by `l2`. Multicast copies pass `port_mac` at egress, and the ingress port gets no
//! copy. Otherwise, output to the ingress port is allowed.

use core::time::Duration;

use serde::{Deserialize, Serialize};

/// A switch port by its number in P4: 1..=[`PORT_MAX`](crate::declaration::PORT_MAX), or [`CPU_PORT`], the
/// controller's.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct SwitchPort(pub u16);

/// The port of packet-in and packet-out (9 bits in v1model, as on BMv2 here).
pub const CPU_PORT: SwitchPort = SwitchPort(510);

/// The clone session for copies to the controller.
pub const NOTIFY_SESSION: u32 = 99;

/// Bytes of a frame that a packet-in keeps: Ethernet, IPv6, UDP and the first 32 header bytes.
pub const PACKET_IN_BYTES: usize = 14 + 40 + 8 + 32;

/// An Ethernet address; as text `02:bb:00:00:00:01`.
#[derive(
    Clone, Copy, Debug, Default, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize,
)]
#[serde(into = "String", try_from = "String")]
pub struct MacAddr(pub [u8; 6]);

impl core::fmt::Display for MacAddr {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// A text is not an Ethernet address.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{0:?} is not an Ethernet address")]
pub struct MacAddrError(String);

impl From<MacAddr> for String {
    fn from(mac: MacAddr) -> Self {
        mac.to_string()
    }
}

impl TryFrom<String> for MacAddr {
    type Error = MacAddrError;

    fn try_from(text: String) -> Result<Self, MacAddrError> {
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().filter(|part| part.len() == 2);
            let Some(parsed) = part.and_then(|part| u8::from_str_radix(part, 16).ok()) else {
                return Err(MacAddrError(text));
            };
            *byte = parsed;
        }
        match parts.next() {
            None => Ok(Self(bytes)),
            Some(_) => Err(MacAddrError(text)),
        }
    }
}

/// Sends to a port with a new destination MAC address.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Forward {
    /// The egress port.
    pub port: SwitchPort,
    /// The new destination MAC address of the frame.
    pub dst_mac: MacAddr,
}

/// One member of an anycast choice.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct WeightedForward {
    /// The destination of the request.
    pub forward: Forward,
    /// Its share of the requests, at least 1.
    pub weight: u16,
}

/// A value and a mask of the same width; bits outside the mask must be 0 and match anything.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Ternary {
    /// The bits to match.
    pub value: u8,
    /// Which bits count.
    pub mask: u8,
}

/// The key of an entry, one variant per table, in the order of the table ids.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Key {
    /// `ingress_guard` (exact): which source addresses a port may use.
    IngressGuard {
        /// The ingress port.
        port: SwitchPort,
        /// The source's 32-bit scope.
        src_scope: u32,
        /// The source's node.
        src_node: u16,
    },
    /// `redirect` (exact): a leased page whose requests go to the owner.
    Redirect {
        /// The destination's scope.
        dst_scope: u32,
        /// The destination's node.
        dst_node: u16,
        /// The upper 52 bits of the destination's location (generation and page).
        page: u64,
    },
    /// `directory` (LPM over scope ++ node ++ location, 112 bits).
    Directory {
        /// The location as a 112-bit number, bits after the prefix 0.
        prefix: u128,
        /// 0 (matches everything) to 112; 48 for a node.
        prefix_len: u8,
    },
    /// `anycast` (exact): requests to any memory node of a space.
    Anycast {
        /// The destination's scope.
        dst_scope: u32,
    },
    /// `notify` (ternary): packets that the controller wants copies of.
    Notify {
        /// The source's command byte (replies).
        src_command: Ternary,
        /// The destination's command byte (requests).
        dst_command: Ternary,
        /// The source's tag byte (the status of a reply).
        src_status: Ternary,
        /// The greater priority wins; at least 1.
        priority: i32,
    },
    /// `l2` (exact): traffic outside the fabric.
    L2 {
        /// The destination MAC address.
        dst_mac: MacAddr,
    },
    /// `port_mac` (exact, egress): the destination MAC address of multicast copies.
    PortMac {
        /// The egress port.
        port: SwitchPort,
    },
    /// `multicast` (exact): notices to every node of a space.
    Multicast {
        /// The destination's scope.
        dst_scope: u32,
    },
}

/// The action of an entry.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub enum Action {
    /// Let it pass (`ingress_guard`).
    Allow,
    /// Drop it (`ingress_guard`, `directory`).
    Drop,
    /// Send it to a port (`redirect`, `directory`, `l2`).
    Forward(Forward),
    /// Send it to a port for a limited time (`redirect`).
    RedirectUntil {
        /// The destination.
        forward: Forward,
        /// Milliseconds from the writing of the entry until it is ignored; when it is read back, the remaining whole
        /// milliseconds.
        lease_ms: u16,
    },
    /// Send a copy to every port of a group except the ingress port (`multicast`, `l2`).
    SetMulticastGroup {
        /// A multicast group id, at least 1.
        group: u16,
    },
    /// Copy it to the controller (`notify`).
    CopyToController,
    /// Choose a member by a hash of the source's node and location (`anycast`).
    Select(Vec<WeightedForward>),
    /// Rewrite the destination MAC address (`port_mac`).
    SetDstMac(MacAddr),
}

/// One table entry.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Entry {
    /// Its key.
    pub key: Key,
    /// Its action.
    pub action: Action,
    /// The controller is notified if no packet hit the entry for this time (`redirect` only).
    pub idle_timeout: Option<Duration>,
    /// Opaque to the switch; returned when the entry is read.
    pub metadata: Vec<u8>,
}

/// Packets and bytes (whole frames) that hit an entry.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Counter {
    /// Packets.
    pub packets: u64,
    /// Bytes of whole frames.
    pub bytes: u64,
}

/// Why the pipeline dropped a frame; the index of the `drops` counter.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[repr(u8)]
pub enum DropReason {
    /// The frame carried an 802.1Q or 802.1ad tag.
    Tagged = 0,
    /// A fabric source with a destination outside the fabric.
    ForeignDestination = 1,
    /// The hop limit was 0 or 1.
    HopLimit = 2,
    /// The ingress guard has no entry for this port and source, or source and destination are in
    /// different spaces: their 32-bit scopes differ.
    Guard = 3,
    /// Node 0 with a command that is not CREATE or ALLOC_WRITE, or a space without memory nodes.
    Anycast = 4,
    /// Node 0xffff with a command that is not a notice, or a space without a group.
    Multicast = 5,
    /// No directory entry matches.
    NoRoute = 6,
    /// An `Action::Drop` entry.
    Entry = 7,
    /// The frame is shorter than its headers say.
    Malformed = 8,
    /// A configured impairment dropped it.
    Impairment = 9,
    /// The egress port is missing or its queue is full.
    Egress = 10,
    /// The IPv6 header is not followed by UDP, TCP or ICMPv6, but by an extension header, a
    /// fragment (RFC 8200, sections 4.1 and 4.5) or a tunnel, which could hide a datagram from the
    /// switch that an endpoint's kernel would accept.
    NextHeader = 11,
}

impl DropReason {
    /// Every reason, in the order of the counter's index.
    pub const ALL: [Self; 12] = [
        Self::Tagged,
        Self::ForeignDestination,
        Self::HopLimit,
        Self::Guard,
        Self::Anycast,
        Self::Multicast,
        Self::NoRoute,
        Self::Entry,
        Self::Malformed,
        Self::Impairment,
        Self::Egress,
        Self::NextHeader,
    ];

    /// The counter's name in metrics and tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tagged => "tagged",
            Self::ForeignDestination => "foreign_destination",
            Self::HopLimit => "hop_limit",
            Self::Guard => "guard",
            Self::Anycast => "anycast",
            Self::Multicast => "multicast",
            Self::NoRoute => "no_route",
            Self::Entry => "entry",
            Self::Malformed => "malformed",
            Self::Impairment => "impairment",
            Self::Egress => "egress",
            Self::NextHeader => "next_header",
        }
    }
}

/// What a port does to the frames sent through it, for tests and experiments.
///
/// All random values are drawn from a generator seeded by `seed` and the port, so a run can be repeated.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Impairment {
    /// The seed of this port's generator.
    pub seed: u64,
    /// Share of frames lost, 0.0 to 1.0.
    pub loss: f64,
    /// Share of frames sent twice, 0.0 to 1.0.
    pub duplicate: f64,
    /// Share of frames held back so that later ones overtake them, 0.0 to 1.0.
    pub reorder: f64,
    /// Share of frames with one bit flipped, 0.0 to 1.0.
    pub corrupt: f64,
    /// The delay of every frame.
    pub delay: Duration,
}
