//! The command byte and the status byte of the addresses.

use core::fmt;

/// The operation of a request: 6 bits of the destination address (docs/protocol.md, section 6).
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[repr(u8)]
pub enum Command {
    /// Begin a session with the server and core that serve a location.
    Open = 1,
    /// End a session.
    Close = 2,
    /// Allocate pages, zeroed.
    Create = 3,
    /// Allocate pages and write them in one round trip.
    AllocWrite = 4,
    /// Keep the pages of an anywhere-CREATE.
    Confirm = 5,
    /// Read a byte range; each page atomic.
    Read = 6,
    /// Write a byte range without reading it; each page atomic.
    Write = 7,
    /// Acquire ownership of pages and their contents, under a lease.
    Update = 8,
    /// Write back and release.
    Commit = 9,
    /// Release without writing.
    Abort = 10,
    /// Extend a lease.
    Renew = 11,
    /// Compare and swap 8 bytes.
    CompareSwap = 12,
    /// Add to 8 bytes; returns the previous value.
    FetchAdd = 13,
    /// Free an allocation, or zero a byte range in place (flag `ZERO`).
    Delete = 14,
    /// Request the server's usage.
    Stat = 15,
    /// Check that the server responds.
    Ping = 16,
    /// Migration: lease a whole line, free pages included, to the server that will serve it.
    Take = 17,
    /// Migration: the line that was taken is the requester's from now on.
    Keep = 18,
    /// Notice: a page was freed or changed, cached copies are invalid.
    Invalidate = 24,
    /// Notice: pages were allocated.
    Notice = 25,
}

impl Command {
    /// Every command, in the order of their codes.
    pub const ALL: [Self; 20] = [
        Self::Open,
        Self::Close,
        Self::Create,
        Self::AllocWrite,
        Self::Confirm,
        Self::Read,
        Self::Write,
        Self::Update,
        Self::Commit,
        Self::Abort,
        Self::Renew,
        Self::CompareSwap,
        Self::FetchAdd,
        Self::Delete,
        Self::Stat,
        Self::Ping,
        Self::Take,
        Self::Keep,
        Self::Invalidate,
        Self::Notice,
    ];

    /// The command with this 6-bit code; `None` if version 1 has none.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            1 => Self::Open,
            2 => Self::Close,
            3 => Self::Create,
            4 => Self::AllocWrite,
            5 => Self::Confirm,
            6 => Self::Read,
            7 => Self::Write,
            8 => Self::Update,
            9 => Self::Commit,
            10 => Self::Abort,
            11 => Self::Renew,
            12 => Self::CompareSwap,
            13 => Self::FetchAdd,
            14 => Self::Delete,
            15 => Self::Stat,
            16 => Self::Ping,
            17 => Self::Take,
            18 => Self::Keep,
            24 => Self::Invalidate,
            25 => Self::Notice,
            _ => return None,
        })
    }

    /// The 6-bit code.
    #[must_use]
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// Whether executing it twice could differ from executing it once. The mark that KEEP sets is its answer, also
    /// for a later KEEP.
    #[must_use]
    pub const fn is_mutating(self) -> bool {
        matches!(
            self,
            Self::Create
                | Self::AllocWrite
                | Self::Confirm
                | Self::Write
                | Self::Update
                | Self::Commit
                | Self::Abort
                | Self::Renew
                | Self::CompareSwap
                | Self::FetchAdd
                | Self::Delete
                | Self::Take
        )
    }

    /// Whether it is a notice: it belongs to no session and has no reply.
    #[must_use]
    pub const fn is_notice(self) -> bool {
        matches!(self, Self::Invalidate | Self::Notice)
    }

    /// Whether it may be sent to node 0 (any memory node).
    #[must_use]
    pub const fn is_anycast(self) -> bool {
        matches!(self, Self::Create | Self::AllocWrite)
    }

    /// Whether it always bypasses the switch's `redirect` table.
    #[must_use]
    pub const fn is_always_home(self) -> bool {
        matches!(self, Self::Commit | Self::Abort | Self::Renew | Self::Take | Self::Keep)
    }

    /// Whether a request carries data that the server writes.
    #[must_use]
    pub const fn carries_pages(self) -> bool {
        matches!(self, Self::AllocWrite | Self::Write | Self::Commit)
    }
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Open => "OPEN",
            Self::Close => "CLOSE",
            Self::Create => "CREATE",
            Self::AllocWrite => "ALLOC_WRITE",
            Self::Confirm => "CONFIRM",
            Self::Read => "READ",
            Self::Write => "WRITE",
            Self::Update => "UPDATE",
            Self::Commit => "COMMIT",
            Self::Abort => "ABORT",
            Self::Renew => "RENEW",
            Self::CompareSwap => "CAS",
            Self::FetchAdd => "FETCH_ADD",
            Self::Delete => "DELETE",
            Self::Stat => "STAT",
            Self::Ping => "PING",
            Self::Take => "TAKE",
            Self::Keep => "KEEP",
            Self::Invalidate => "INVALIDATE",
            Self::Notice => "NOTICE",
        })
    }
}

/// The command byte of an address: bit 7 reply, bit 6 home (of a reply: contended), the low 6 bits
/// the command.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct WireCommand(u8);

impl WireCommand {
    /// Bit 7: the address is the source of a reply.
    pub const REPLY: u8 = 0x80;
    /// Bit 6: the request bypasses the switch's `redirect` table.
    pub const HOME: u8 = 0x40;
    /// Bit 6 of a reply: the lease that the reply is about is contended; the switch may copy the reply.
    pub const CONTENDED: u8 = 0x40;
    const CODE: u8 = 0x3f;

    /// The byte of a request.
    #[must_use]
    pub const fn request(command: Command, home: bool) -> Self {
        Self(command.code() | if home { Self::HOME } else { 0 })
    }

    /// The byte of a reply.
    #[must_use]
    pub const fn reply(command: Command) -> Self {
        Self(command.code() | Self::REPLY)
    }

    /// The byte of a reply with or without the contended bit.
    #[must_use]
    pub const fn reply_of(command: Command, contended: bool) -> Self {
        Self(command.code() | Self::REPLY | if contended { Self::CONTENDED } else { 0 })
    }

    /// The byte as received.
    #[must_use]
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits)
    }

    /// The byte on the wire.
    #[must_use]
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// The command; `None` if version 1 does not define it.
    #[must_use]
    pub const fn command(self) -> Option<Command> {
        Command::from_code(self.code())
    }

    /// The 6-bit code, known or not.
    #[must_use]
    pub const fn code(self) -> u8 {
        self.0 & Self::CODE
    }

    /// Whether the reply bit is set.
    #[must_use]
    pub const fn is_reply(self) -> bool {
        self.0 & Self::REPLY != 0
    }

    /// Whether it is a request with the home bit.
    #[must_use]
    pub const fn is_home(self) -> bool {
        !self.is_reply() && self.0 & Self::HOME != 0
    }

    /// Whether it is a reply with the contended bit.
    #[must_use]
    pub const fn is_contended(self) -> bool {
        self.is_reply() && self.0 & Self::CONTENDED != 0
    }
}

/// Which side is at fault for a status that is not OK.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Fault {
    /// The request was wrong; a repetition cannot succeed.
    Requester,
    /// The server cannot serve it now; another server, or a later try, may succeed. Or it lost the contents.
    Responder,
    /// Neither: the protocol continues (another node, a new session, more pieces, a later try).
    Protocol,
}

macro_rules! statuses {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $fault:ident, $text:literal;)*) => {
        /// The result of a request: the tag byte of a reply's source address.
        #[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
        #[repr(u8)]
        pub enum Status { $($(#[$doc])* $name = $code,)* }

        impl Status {
            /// Every status, in the order of their codes.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// The status with this code; `None` if version 1 has none.
            #[must_use]
            pub const fn from_code(code: u8) -> Option<Self> {
                match code { $($code => Some(Self::$name),)* _ => None }
            }

            /// The side at fault.
            #[must_use]
            pub const fn fault(self) -> Fault {
                match self { $(Self::$name => Fault::$fault,)* }
            }

            /// A description for people.
            #[must_use]
            pub const fn text(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
        }
    };
}

statuses! {
    /// Done.
    Ok = 0, Protocol, "done";
    /// The page is leased; owner, epoch and remaining milliseconds are in the header.
    Busy = 1, Protocol, "the page is leased to another node";
    /// The range is served elsewhere; the node is in the header.
    Moved = 2, Protocol, "the range is served by another node";
    /// The addressed node is no longer the page's owner; ask the home node.
    NotOwner = 3, Protocol, "the addressed node does not own the page";
    /// The session is unknown (never opened, closed, idle too long, or the server restarted).
    NoSession = 4, Protocol, "the session is unknown to the server";
    /// The sequence number is below the low-water mark; it is never executed.
    Expired = 5, Protocol, "the request is below the session's low-water mark";
    /// The sequence number is beyond the window.
    BeyondWindow = 6, Requester, "the request is beyond the session's window";
    /// Pieces are missing; `detail` is the bitmap of those that arrived.
    Incomplete = 7, Protocol, "pieces of the request are missing";
    /// The pages of a request have different results; a TLV contains the status of each.
    Partial = 8, Protocol, "the pages of the request have different results";
    /// The endpoint has joined again since; this incarnation is refused.
    StaleIncarnation = 9, Requester, "the requester's incarnation is outdated";
    /// The request names a range epoch that is not the server's.
    StaleRangeEpoch = 10, Protocol, "the range epoch is not current";
    /// The server has no authority over the range now, and does not know which node has it.
    NoAuthority = 11, Responder, "the server has no authority over the range";
    /// The lease expired or was released; nothing was written.
    LeaseLost = 12, Requester, "the lease is no longer held";

    /// The range leaves the arena.
    OutOfRange = 16, Requester, "the range leaves the arena";
    /// The pages were freed, and possibly allocated again.
    StaleTag = 17, Requester, "the page has another tag or generation than the pointer";
    /// The pointer is from an earlier incarnation of the arena, whose contents are lost.
    StaleGeneration = 18, Responder, "the pointer is from before the server lost its contents";
    /// The pages are not allocated.
    NotAllocated = 19, Requester, "the page is not allocated";
    /// The pointer's space is not the requester's or not the allocation's.
    WrongSpace = 20, Requester, "the pointer belongs to another space";
    /// The node is not the pointer's home and does not serve its range.
    WrongNode = 21, Requester, "the node does not serve the pointer's range";
    /// The operation needs an aligned location.
    Unaligned = 22, Requester, "the pointer is not aligned for this operation";
    /// The length is zero, too large, or crosses a line.
    BadLength = 23, Requester, "the length is zero, too large, or crosses a line";
    /// The arena has no room, or gives none ([`NoMemory`] in `detail`).
    OutOfMemory = 24, Responder, "the server is out of memory";
    /// The space's share of the arena is used up.
    QuotaExceeded = 25, Requester, "the space's quota is used up";
    /// The command is unknown to this server.
    UnknownCommand = 26, Requester, "the command is unknown to the server";
    /// The request needs a feature that the server does not have (`detail`: which bits).
    UnsupportedFeature = 27, Requester, "the server lacks a required feature";
    /// The request has another version (`detail`: the version of the server).
    UnsupportedVersion = 28, Requester, "the server speaks another version";
    /// The addresses and the header contradict each other.
    Malformed = 29, Requester, "the addresses and the header contradict each other";
    /// The key id is unknown or the trailer does not authenticate the request.
    Unauthenticated = 30, Requester, "the request is not authenticated";
    /// A bounded resource of the server is used up (sessions, train buffers); try later.
    Overloaded = 31, Responder, "the server is overloaded";
    /// The server is shutting down.
    ShuttingDown = 32, Responder, "the server is shutting down";
    /// The server failed in a way it should not have.
    Internal = 33, Responder, "the server failed";
    /// The requester has no permission for this operation on the pages.
    Forbidden = 34, Requester, "the operation is not permitted on these pages";
}

impl Status {
    /// The code on the wire.
    #[must_use]
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// Whether the request was executed.
    #[must_use]
    pub const fn is_ok(self) -> bool {
        matches!(self, Self::Ok)
    }
}

/// Why a server has no memory for an allocation: `detail` of OUT_OF_MEMORY (docs/protocol.md, section 6).
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[repr(u8)]
pub enum NoMemory {
    /// It is full, or does not say why.
    #[default]
    Full = 0,
    /// An operator drained it, so it allocates nothing, whatever is free or freed.
    Drained = 1,
}

impl NoMemory {
    /// The reason with this code. One that version 1 does not have says no more than the status.
    #[must_use]
    pub const fn from_code(code: u32) -> Self {
        match code {
            1 => Self::Drained,
            _ => Self::Full,
        }
    }

    /// The code on the wire.
    #[must_use]
    pub const fn code(self) -> u32 {
        self as u32
    }
}

/// How a lease ended: `detail` of LEASE_LOST (docs/protocol.md, section 10).
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[repr(u8)]
pub enum LeaseEnd {
    /// It expired by the home's clock.
    Expired = 1,
    /// Its contents were written back.
    Committed = 2,
    /// It was aborted.
    Aborted = 3,
    /// The page was leased again since; node and epoch of the reply name that lease, if it still runs.
    LeasedAgain = 4,
    /// Unknown to the home: it was never granted, or long ago.
    Unknown = 5,
    /// A newer incarnation of the owner's node ended it.
    Superseded = 6,
    /// The migration for which it was granted was withdrawn.
    Withdrawn = 7,
}

impl LeaseEnd {
    /// Every end, in the order of their codes.
    pub const ALL: [Self; 7] = [
        Self::Expired,
        Self::Committed,
        Self::Aborted,
        Self::LeasedAgain,
        Self::Unknown,
        Self::Superseded,
        Self::Withdrawn,
    ];

    /// The end with this code; `None` if version 1 has none.
    #[must_use]
    pub const fn from_code(code: u32) -> Option<Self> {
        Some(match code {
            1 => Self::Expired,
            2 => Self::Committed,
            3 => Self::Aborted,
            4 => Self::LeasedAgain,
            5 => Self::Unknown,
            6 => Self::Superseded,
            7 => Self::Withdrawn,
            _ => return None,
        })
    }

    /// The code on the wire.
    #[must_use]
    pub const fn code(self) -> u32 {
        self as u32
    }
}

impl fmt::Display for LeaseEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Expired => "the lease expired",
            Self::Committed => "the lease was committed",
            Self::Aborted => "the lease was aborted",
            Self::LeasedAgain => "the page was leased again since",
            Self::Unknown => "the server has no record of this lease",
            Self::Superseded => "a newer incarnation of the owner ended the lease",
            Self::Withdrawn => "the migration for which the line was leased was withdrawn",
        })
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.text())
    }
}
