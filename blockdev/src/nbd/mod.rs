//! The server's side of the NBD protocol, without I/O: bytes in, bytes out.
//!
//! By the specification of the NetworkBlockDevice project (`doc/proto.md`), fixed newstyle only. [`Negotiation`] takes the
//! client's bytes until an export is chosen; then [`Transmission`] reads requests, and writes the heads of replies. Data is
//! never copied here: it follows the heads.
//!
//! A client's mistake that leaves the stream readable gets an error reply; any other is a [`Violation`], after which the
//! connection must be closed.

mod negotiation;
mod transmission;
mod values;

pub use negotiation::{Negotiation, OPTION_BYTES_MAX, OPTIONS_MAX, Progress, SKIPPED_BYTES_MAX};
pub use transmission::{
    Command, Errno, Parsed, REFUSED_PAYLOAD_MAX, REPLY_HEAD_MAX, REQUEST_BYTES, ReplyHead, Request,
    Transmission,
};

/// The longest name of an export, in bytes.
pub const NAME_BYTES_MAX: usize = 255;

/// What clients can attach to.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Export {
    /// Its name; clients may also ask for the empty name. At most [`NAME_BYTES_MAX`] bytes.
    pub name: Box<str>,
    /// For people.
    pub description: Box<str>,
    /// Its length in bytes.
    pub size_bytes: u64,
    /// Whether writes are refused.
    pub is_read_only: bool,
    /// The most data bytes of a READ or WRITE, at least 64 KiB.
    pub payload_bytes_max: u32,
}

/// A client broke the protocol in a way that leaves no common understanding of the stream; the connection must be closed.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// The client's flags are not among those that were offered.
    #[error("the client set the unknown flags {0:#x}; use a client of the fixed newstyle protocol")]
    ClientFlags(u32),
    /// An option does not begin with its magic number.
    #[error("an option of the client begins with {0:#018x}; use a client of the newstyle protocol")]
    OptionMagic(u64),
    /// An option is longer than any that this server reads over.
    #[error("the client's option {option} has {length} bytes; {} are the most", SKIPPED_BYTES_MAX)]
    OptionTooLong {
        /// Its number.
        option: u32,
        /// Its bytes.
        length: u32,
    },
    /// A request announces more data than this server reads over.
    #[error("a WRITE of the client has {0} bytes; {max} are the most", max = REFUSED_PAYLOAD_MAX)]
    PayloadTooLong(u32),
    /// A request does not begin with its magic number.
    #[error("a request of the client begins with {0:#010x}; the client is out of step")]
    RequestMagic(u32),
    /// The client goes on with options for longer than any client needs.
    #[error("the client sent {} options and chose no export", OPTIONS_MAX)]
    TooManyOptions,
    /// The client asked for an unknown export in the way that permits no reply.
    #[error(
        "the client asked for an export that does not exist; list them, for example with `nbdinfo --list`"
    )]
    UnknownExport,
}

/// Reads big-endian numbers from the beginning of bytes; `None` if they are too short.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*head)
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }
}
