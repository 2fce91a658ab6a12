//! Requests and replies after the choice of an export.

use arrayvec::ArrayVec;

use super::values::*;
use super::{Reader, Violation};

/// Bytes of a request without its data.
pub const REQUEST_BYTES: usize = 28;
/// The most bytes of a reply without its data.
pub const REPLY_HEAD_MAX: usize = 128;
/// The most data of a WRITE that is refused and read over; more is a [`Violation`].
pub const REFUSED_PAYLOAD_MAX: u32 = 32 << 20;

/// What a reply has before its data.
pub type ReplyHead = ArrayVec<u8, REPLY_HEAD_MAX>;

/// What a client asks for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Command {
    /// All acknowledged writes are to be permanent.
    Flush,
    /// Data is to be sent.
    Read,
    /// Data is not needed any more.
    Trim,
    /// The data that follows the request is to be stored.
    Write,
    /// Zeroes are to be stored.
    WriteZeroes {
        /// Memory is to be there for later writes.
        no_hole: bool,
    },
}

/// A request that can be done.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Request {
    /// The client's name for it, which the reply repeats.
    pub cookie: u64,
    /// What is asked for.
    pub command: Command,
    /// The first byte; the range lies within the export.
    pub offset: u64,
    /// The bytes.
    pub length: u32,
}

/// The errors of the protocol.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u32)]
pub enum Errno {
    /// Not permitted.
    Perm = 1,
    /// The memory cannot be reached, or is lost.
    Io = 5,
    /// The request is invalid.
    Invalid = 22,
    /// There is no memory for it.
    NoSpace = 28,
    /// The request is too large.
    Overflow = 75,
    /// The disk is being shut down.
    Shutdown = 108,
}

impl Errno {
    /// What a person at the client may read.
    const fn message(self) -> &'static str {
        match self {
            Self::Perm => "the disk is read-only",
            Self::Io => "the memory cannot be reached, or is lost; the disk's log says which",
            Self::Invalid => "the request is invalid, or not within the disk",
            Self::NoSpace => "no memory server has room, or the request is not within the disk",
            Self::Overflow => "the request is larger than the largest payload",
            Self::Shutdown => "the disk is being shut down",
        }
    }
}

/// The beginning of a client's bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Parsed {
    /// The client is done; close the connection when all replies are sent.
    Disconnect,
    /// More bytes are needed to know the request.
    Incomplete,
    /// An error is to be replied, and so many bytes of data after the request are to be read over.
    Refused {
        /// The request's.
        cookie: u64,
        /// The error.
        errno: Errno,
        /// Bytes to read over, after [`REQUEST_BYTES`].
        payload_bytes: u32,
    },
    /// A request; the data of a WRITE follows its [`REQUEST_BYTES`].
    Request(Request),
}

/// The rules of a connection whose client chose the export.
#[derive(Clone, Copy, Debug)]
pub struct Transmission {
    size_bytes: u64,
    payload_bytes_max: u32,
    is_read_only: bool,
    structured: bool,
}

impl Transmission {
    pub(super) const fn new(
        size_bytes: u64,
        payload_bytes_max: u32,
        is_read_only: bool,
        structured: bool,
    ) -> Self {
        Self { size_bytes, payload_bytes_max, is_read_only, structured }
    }

    /// Reads the request at the beginning of the client's bytes.
    ///
    /// # Errors
    /// [`Violation`]: close the connection.
    pub fn parse(&self, input: &[u8]) -> Result<Parsed, Violation> {
        let mut reader = Reader(input);
        // A stranger is recognized by the first bytes already.
        let Some(magic) = reader.u32() else { return Ok(Parsed::Incomplete) };
        if magic != REQUEST_MAGIC {
            return Err(Violation::RequestMagic(magic));
        }
        let head =
            (|| Some((reader.u16()?, reader.u16()?, reader.u64()?, reader.u64()?, reader.u32()?)))(
            );
        let Some((flags, kind, cookie, offset, length)) = head else {
            return Ok(Parsed::Incomplete);
        };
        if kind == CMD_DISC {
            return Ok(Parsed::Disconnect);
        }
        let payload_bytes = if kind == CMD_WRITE { length } else { 0 };
        if payload_bytes > REFUSED_PAYLOAD_MAX.max(self.payload_bytes_max) {
            return Err(Violation::PayloadTooLong(payload_bytes));
        }
        Ok(match self.check(flags, kind, offset, length) {
            Ok(command) => Parsed::Request(Request { cookie, command, offset, length }),
            Err(errno) => Parsed::Refused { cookie, errno, payload_bytes },
        })
    }

    fn check(&self, flags: u16, kind: u16, offset: u64, length: u32) -> Result<Command, Errno> {
        let (command, allowed) = match kind {
            CMD_READ => (Command::Read, if self.structured { CMD_FLAG_DF } else { 0 }),
            CMD_WRITE => (Command::Write, 0),
            CMD_FLUSH => (Command::Flush, 0),
            CMD_TRIM => (Command::Trim, 0),
            CMD_WRITE_ZEROES => {
                let no_hole = flags & CMD_FLAG_NO_HOLE != 0;
                // Zeroes are always faster than data: they do not travel.
                (Command::WriteZeroes { no_hole }, CMD_FLAG_NO_HOLE | CMD_FLAG_FAST_ZERO)
            }
            _ => return Err(Errno::Invalid),
        };
        // FUA may be set for any command.
        if flags & !(allowed | CMD_FLAG_FUA) != 0 {
            return Err(Errno::Invalid);
        }
        let is_writing =
            matches!(command, Command::Write | Command::Trim | Command::WriteZeroes { .. });
        if is_writing && self.is_read_only {
            return Err(Errno::Perm);
        }
        if command == Command::Flush {
            return if offset == 0 && length == 0 { Ok(command) } else { Err(Errno::Invalid) };
        }
        if length == 0 {
            return Err(Errno::Invalid);
        }
        let is_within = offset.checked_add(length.into()).is_some_and(|end| end <= self.size_bytes);
        match command {
            Command::Write | Command::WriteZeroes { .. } if !is_within => Err(Errno::NoSpace),
            _ if !is_within => Err(Errno::Invalid),
            Command::Read if length > self.payload_bytes_max && self.structured => {
                Err(Errno::Overflow)
            }
            Command::Read | Command::Write if length > self.payload_bytes_max => {
                Err(Errno::Invalid)
            }
            _ => Ok(command),
        }
    }

    /// The reply to a request that was done, other than a READ.
    #[must_use]
    pub fn done(&self, cookie: u64) -> ReplyHead {
        simple(cookie, 0)
    }

    /// The head of the reply to a READ; its `length` bytes follow.
    #[must_use]
    pub fn data(&self, cookie: u64, offset: u64, length: u32) -> ReplyHead {
        if !self.structured {
            return simple(cookie, 0);
        }
        // A READ is at most as long as a payload, so this does not overflow.
        let mut head = chunk(cookie, REPLY_TYPE_OFFSET_DATA, length.saturating_add(8));
        head.extend(offset.to_be_bytes());
        head
    }

    /// The reply to a READ of nothing but zeroes, without data; `None` if the client does not understand that.
    #[must_use]
    pub fn hole(&self, cookie: u64, offset: u64, length: u32) -> Option<ReplyHead> {
        if !self.structured {
            return None;
        }
        let mut head = chunk(cookie, REPLY_TYPE_OFFSET_HOLE, 12);
        head.extend(offset.to_be_bytes());
        head.extend(length.to_be_bytes());
        Some(head)
    }

    /// The reply to a request that failed.
    #[must_use]
    pub fn failed(&self, cookie: u64, errno: Errno) -> ReplyHead {
        if !self.structured {
            return simple(cookie, errno as u32);
        }
        let message = errno.message();
        let length = u16::try_from(message.len()).unwrap_or(0);
        let mut head = chunk(cookie, REPLY_TYPE_ERROR, 6 + u32::from(length));
        head.extend((errno as u32).to_be_bytes());
        head.extend(length.to_be_bytes());
        head.extend(message.bytes());
        head
    }
}

fn simple(cookie: u64, errno: u32) -> ReplyHead {
    let mut head = ReplyHead::new();
    head.extend(SIMPLE_REPLY_MAGIC.to_be_bytes());
    head.extend(errno.to_be_bytes());
    head.extend(cookie.to_be_bytes());
    head
}

/// The head of the only chunk of a structured reply.
fn chunk(cookie: u64, kind: u16, length: u32) -> ReplyHead {
    let mut head = ReplyHead::new();
    head.extend(STRUCTURED_REPLY_MAGIC.to_be_bytes());
    head.extend(REPLY_FLAG_DONE.to_be_bytes());
    head.extend(kind.to_be_bytes());
    head.extend(cookie.to_be_bytes());
    head.extend(length.to_be_bytes());
    head
}

#[cfg(test)]
mod tests;
