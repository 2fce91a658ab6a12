//! BlueBridge on the wire: addresses, header and commands; parse and emit, nothing else.
//!
//! A datagram is IPv6, UDP, then a [`Header`], optional [`tlv`]s, data, and an optional trailer.
//! The layers, from the outside in:
//!
//! * [`address`]: what the IPv6 addresses mean. The destination of a request is the pointer it is
//!   about and the [`Command`]; the source of a reply is the replier and the [`Status`].
//! * [`header`]: the fixed 84 bytes behind UDP, as a view ([`HeaderView`]) and as a
//!   representation ([`Header`]).
//! * [`datagram`]: a whole received datagram, checked ([`Datagram::parse`]), and the sealing of
//!   one to be sent ([`seal`]).
//! * [`copy`]: the beginning of a reply, as the controller's copies have it ([`ReplyCopy`]).
//!
//! Nothing here panics on input: a `parse` returns an error, and the accessors of a view that
//! passed its check are total. The `emit` functions panic if the buffer is shorter than the
//! `EMIT`ted length that their documentation names; that length never depends on input.
//!
//! No allocation, no I/O, no time, no state: every node, the soft switch and the fuzzers share
//! this one decoder. The format of version 1 is frozen by the golden vectors in `vectors/`.

#![no_std]
#![forbid(unsafe_code)]

pub mod address;
pub mod command;
pub mod copy;
pub mod datagram;
pub mod header;
pub mod tlv;
pub mod usage;

pub use address::{
    ArenaGeneration, Destination, EndpointAddress, Location, NodeId, Pointer, PointerError, Region,
    ReplySource, Space, Tag,
};
pub use command::{Command, Fault, LeaseEnd, Status, WireCommand};
pub use copy::{CopyError, ReplyCopy};
pub use datagram::{Datagram, DatagramError, seal};
pub use header::{Features, Flags, Header, HeaderError, HeaderView};
pub use usage::Usage;

/// The UDP port of every endpoint.
///
/// Chosen by the project out of the dynamic range (RFC 6335, section 6), above the ports that
/// Linux hands out by itself; a fabric is closed, so it needs no registration.
pub const UDP_PORT: u16 = 0xfdbb;

/// Bytes of an IPv6 header and a UDP header: what an MTU loses before our header.
pub const IP_UDP_BYTES: usize = 40 + 8;

/// The smallest MTU of any IPv6 link (RFC 8200, section 5).
pub const MTU_MIN: usize = 1280;

/// The largest MTU that a fabric uses.
pub const MTU_MAX: usize = 9000;

/// Sequence numbers above the low-water mark that every server accepts and remembers the answers
/// of.
pub const SESSION_WINDOW: u64 = 512;

/// Pieces in a train at most: [`address::LINE_PAGES`] pages in at most four pieces each.
pub const TRAIN_PIECES_MAX: usize = 32;

/// The largest trailer behind the data (see [`Flags::trailer_bytes`]).
pub const TRAILER_BYTES_MAX: usize = 48;

/// Data bytes in the largest piece of a space whose smallest link has this MTU, if neither TLVs
/// nor a trailer are used: a multiple of 8, at least a quarter of a page and at most a page.
///
/// `None` if the MTU is below [`MTU_MIN`]. Above [`MTU_MAX`] the answer stays that of a page.
#[must_use]
pub const fn piece_bytes(mtu: usize) -> Option<usize> {
    if mtu < MTU_MIN {
        return None;
    }
    let room = (mtu - IP_UDP_BYTES - header::HEADER_BYTES) & !7;
    Some(if room > address::PAGE_BYTES { address::PAGE_BYTES } else { room })
}
