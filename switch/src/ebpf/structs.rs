//! The structs of `switch/bpf/tables.h`, as stored in the maps.
//!
//! Every struct has the same name, fields and field order as in C, with explicit padding.
//! Addresses in keys are big endian as in a packet; other numbers have the host's byte order.
//! Deriving the traits of `zerocopy` checks that no struct has hidden padding and that any bytes are
//! a valid value. `aya` checks key and value sizes when it opens a map.

use bluebridge_p4::{
    declaration::{METADATA_BYTES_MAX, PORT_BITS},
    pipeline::PACKET_IN_BYTES,
};
use zerocopy::{
    FromBytes, Immutable, IntoBytes,
    big_endian::{U16, U32, U64},
};

use crate::dataplane::ANYCAST_SLOTS;

/// Key of `ingress_guard`.
#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct GuardKey {
    pub(super) scope: U32,
    pub(super) node: U16,
    pub(super) port: u16,
}

/// Key of `redirect`; `page` is the address of the page's first byte.
#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct RedirectKey {
    pub(super) scope: U32,
    pub(super) node: U16,
    pub(super) unused: u16,
    pub(super) page: U64,
}

/// Key of `directory`. In C it ends with the padding that the compiler adds, which the map does not
/// have.
#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes)]
#[repr(C, packed)]
pub(super) struct DirectoryKey {
    pub(super) prefix_len: u32,
    pub(super) bits: DirectoryBits,
}

/// The 112 bits of location in a [`DirectoryKey`].
pub(super) type DirectoryBits = [u8; 14];

/// Key of `l2`.
#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct MacKey {
    pub(super) mac: [u8; 6],
    pub(super) unused: u16,
}

/// Key of `anycast` and `multicast`, padded to a word for seals; the key in the maps is
/// `scope` alone.
#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct ScopeKey {
    pub(super) scope: U32,
    pub(super) unused: u32,
}

/// Key of `notify`: value and mask of each byte that is matched.
#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct NotifyKey {
    pub(super) ternaries: [[u8; 2]; 3],
    pub(super) unused: u16,
    pub(super) priority: i32,
}

/// The action of an entry: a value of `directory` and `port_mac`, and a part of sealed values.
#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct Route {
    pub(super) index: u32,
    pub(super) action: u16,
    /// A port or a group.
    pub(super) to: u16,
    pub(super) mac: [u8; 6],
    pub(super) unused: u16,
}

/// Value of `ingress_guard`, `l2` and `multicast`.
#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct SealedRoute {
    pub(super) key: [u8; 8],
    pub(super) route: Route,
    pub(super) seal: u64,
}

/// Value of `redirect`.
#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct Redirect {
    pub(super) key: RedirectKey,
    pub(super) route: Route,
    /// When the entry expires by `CLOCK_MONOTONIC`; 0 for one without an end.
    pub(super) dead_at_ns: u64,
    pub(super) seal: u64,
}

/// One member of a [`Choice`].
#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct Member {
    pub(super) port: u16,
    pub(super) mac: [u8; 6],
}

/// Value of `anycast`.
#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct Choice {
    pub(super) index: u32,
    pub(super) count: u32,
    pub(super) slots: [u8; ANYCAST_SLOTS],
    pub(super) members: [Member; ANYCAST_SLOTS],
    /// The seal of each member, over a [`SealedMember`].
    pub(super) seals: [u64; ANYCAST_SLOTS],
    pub(super) weights: [u16; ANYCAST_SLOTS],
}

/// The data that the seal of a [`Member`] covers. It is not stored in a map.
#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct SealedMember {
    pub(super) key: ScopeKey,
    pub(super) index: u64,
    pub(super) member: Member,
}

/// Value of `notify_match`: the entries that a byte matches.
#[derive(Clone, Copy, Default, FromBytes, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct NotifyMatch {
    pub(super) src_command: u64,
    pub(super) dst_command: u64,
    pub(super) src_status: u64,
}

/// Value of `counters`, one for each CPU.
#[derive(Clone, Copy, Default, FromBytes, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct Counter {
    pub(super) packets: u64,
    pub(super) bytes: u64,
    pub(super) last_hit_ns: u64,
}

impl Counter {
    /// The counter of two CPUs.
    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            packets: self.packets.wrapping_add(other.packets),
            bytes: self.bytes.wrapping_add(other.bytes),
            last_hit_ns: self.last_hit_ns.max(other.last_hit_ns),
        }
    }
}

/// Value of `ports`.
#[derive(Clone, Copy, Default, FromBytes, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct Port {
    pub(super) ifindex: u32,
    pub(super) flags: u32,
    pub(super) frame_bytes_max: u32,
    pub(super) unused: u32,
}

/// Value of `port_of`.
#[derive(Clone, Copy, Default, FromBytes, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct PortOf {
    pub(super) ifindex: u32,
    pub(super) port: u32,
}

/// Value of `port_counters`, one for each CPU.
#[derive(Clone, Copy, Default, FromBytes, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct PortCounter {
    pub(super) rx_packets: u64,
    pub(super) rx_bytes: u64,
    pub(super) tx_packets: u64,
    pub(super) tx_bytes: u64,
}

impl PortCounter {
    /// The counter of two CPUs.
    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            rx_packets: self.rx_packets.wrapping_add(other.rx_packets),
            rx_bytes: self.rx_bytes.wrapping_add(other.rx_bytes),
            tx_packets: self.tx_packets.wrapping_add(other.tx_packets),
            tx_bytes: self.tx_bytes.wrapping_add(other.tx_bytes),
        }
    }
}

/// The words of a set of ports.
pub(super) const PORT_WORDS: usize = (1 << PORT_BITS) / 64;

/// Value of `groups`.
#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct Group {
    pub(super) number: u16,
    pub(super) unused: [u16; 3],
    /// Bit N: a copy goes to port N.
    pub(super) ports: [u64; PORT_WORDS],
    pub(super) seal: u64,
}

/// Value of `impairments`; `loss`, `duplicate` and `corrupt` are shares of 2^32.
#[derive(Clone, Copy, Default, FromBytes, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct Impairment {
    pub(super) state: u64,
    pub(super) loss: u64,
    pub(super) duplicate: u64,
    pub(super) corrupt: u64,
    pub(super) lost: u64,
    pub(super) duplicated: u64,
    pub(super) corrupted: u64,
}

/// Value of `config`, which the programs read first.
#[derive(Clone, Copy, Debug, Default, FromBytes, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct Config {
    /// The version of these structs.
    pub(super) layout: u32,
    /// Number of entries in `redirect`; if it is 0, programs skip the look-up.
    pub(super) redirects: u32,
    pub(super) notifies: u32,
    /// 0: no clone session.
    pub(super) clone_bytes: u32,
    /// 0: none.
    pub(super) flood_group: u32,
    pub(super) has_cookie: u32,
    pub(super) cookie: u64,
}

impl Config {
    /// The cookie of the pipeline, if it has one.
    pub(super) fn cookie(&self) -> Option<u64> {
        (self.has_cookie != 0).then_some(self.cookie)
    }

    pub(super) fn set_cookie(&mut self, cookie: Option<u64>) {
        self.has_cookie = cookie.is_some().into();
        self.cookie = cookie.unwrap_or(0);
    }
}

/// A record of the ring `packet_ins`.
#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct PacketIn {
    pub(super) port: u16,
    pub(super) bytes: u16,
    pub(super) frame: [u8; PACKET_IN_BYTES + 2],
}

/// Key of `notes`: a table, and a key of it padded with zeros.
#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct NoteKey {
    pub(super) table: u8,
    pub(super) key: [u8; 19],
}

/// Value of `notes`: the agent's data of an entry.
#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct Note {
    /// 0: none.
    pub(super) idle_timeout_ns: u64,
    pub(super) bytes: u32,
    pub(super) metadata: [u8; METADATA_BYTES_MAX],
    pub(super) unused: u32,
}

/// Declares that a struct may be a key or a value of a map, after the compiler has checked it.
macro_rules! in_maps {
    ($($name:ident),+ $(,)?) => {$(
        const _: () = plain::<$name>();

        // SAFETY: the line above compiles only for a type without padding, of which any bytes are
        // a valid value, so the kernel may read and write all of its bytes.
        unsafe impl aya::Pod for $name {}
    )+};
}

const fn plain<T: FromBytes + Immutable + IntoBytes>() {}

in_maps!(
    Choice,
    Config,
    Counter,
    Group,
    GuardKey,
    Impairment,
    MacKey,
    Note,
    NoteKey,
    NotifyKey,
    NotifyMatch,
    Port,
    PortCounter,
    PortOf,
    Redirect,
    RedirectKey,
    Route,
    SealedRoute,
);

/// The struct at the front of some bytes, padded with 0.
pub(super) fn from_bytes<T: FromBytes + IntoBytes>(bytes: &[u8]) -> T {
    let mut value = T::new_zeroed();
    for (to, from) in value.as_mut_bytes().iter_mut().zip(bytes) {
        *to = *from;
    }
    value
}
