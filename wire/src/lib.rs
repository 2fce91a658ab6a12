//! BlueBridge on the wire: parses and emits addresses, header and commands.
//!
//! A datagram is IPv6, UDP, then a [`Header`], optional [`tlv`]s, data, and an optional trailer.
//! The layers, from outer to inner:
//!
//! * [`address`]: the meaning of the IPv6 addresses. The destination of a request is the pointer
//!   and the [`Command`]; the source of a reply is the replier and the [`Status`].
//! * [`header`]: the fixed 84 bytes after UDP, as a view ([`HeaderView`]) and as a
//!   representation ([`Header`]).
//! * [`datagram`]: checks a received datagram ([`Datagram::parse`]) and seals one to be
//!   sent ([`seal`]).
//! * [`line`](crate::line): the records of a line and of fences, in the replies to TAKE and KEEP.
//! * [`copy`]: the beginning of a reply, as in the controller's copies ([`ReplyCopy`]).
//!
//! Nothing here panics on input: `parse` returns an error, and the accessors of a checked view
//! never fail. The `emit` functions panic if the buffer is shorter than the length that their
//! documentation states; that length never depends on input.
//!
//! There is no allocation, no I/O, no time and no state: every node, the soft switch and the fuzzers
//! share this decoder. The golden vectors in `vectors/` freeze the format of version 1.

#![no_std]
#![forbid(unsafe_code)]

pub mod address;
pub mod command;
pub mod copy;
pub mod datagram;
pub mod header;
pub mod line;
pub mod tlv;
pub mod usage;

pub use address::{
    ArenaGeneration, Destination, EndpointAddress, Location, NodeId, Pointer, PointerError, Region,
    ReplySource, Space, Tag,
};
pub use command::{Command, Fault, LeaseEnd, NoMemory, Status, WireCommand};
pub use copy::{CopyError, ReplyCopy};
pub use datagram::{Datagram, DatagramError, page_crc, seal, seal_page};
pub use header::{Features, Flags, Header, HeaderError, HeaderView};
pub use line::{Fence, LinePage};
pub use usage::Usage;

/// The UDP port of every endpoint.
///
/// Chosen from the dynamic range (RFC 6335, section 6), above the ports that Linux assigns
/// automatically; a fabric is a closed network, so it needs no registration.
pub const UDP_PORT: u16 = 0xfdbb;

/// Bytes of an IPv6 header and a UDP header, which reduce the MTU for our header.
pub const IP_UDP_BYTES: usize = 40 + 8;

/// The smallest MTU of any IPv6 link (RFC 8200, section 5).
pub const MTU_MIN: usize = 1280;

/// The largest MTU that a fabric uses.
pub const MTU_MAX: usize = 9000;

/// Number of sequence numbers from the low-water mark on that every server accepts and whose replies it
/// records.
pub const SESSION_WINDOW: u64 = 512;

/// Most pieces in a train: [`address::LINE_PAGES`] pages in at most four pieces each.
pub const TRAIN_PIECES_MAX: usize = 32;

/// The largest trailer after the data (see [`Flags::trailer_bytes`]).
pub const TRAILER_BYTES_MAX: usize = 48;

/// Data bytes in the largest piece of a space whose smallest link has this MTU, without TLVs and trailer: a page, a half
/// or a quarter of one. So all pieces of whole pages have the same length, as the datagrams of a train (UDP_SEGMENT) must.
///
/// `None` if the MTU is below [`MTU_MIN`]. Above [`MTU_MAX`] the result stays one page.
#[must_use]
pub const fn piece_bytes(mtu: usize) -> Option<usize> {
    if mtu < MTU_MIN {
        return None;
    }
    let room = mtu - IP_UDP_BYTES - header::HEADER_BYTES;
    let mut bytes = address::PAGE_BYTES;
    while bytes > room {
        bytes /= 2;
    }
    Some(bytes)
}
