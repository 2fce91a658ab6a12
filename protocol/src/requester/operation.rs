//! Operations, their results, and their failures.

use bluebridge_wire::{
    Command, LeaseEnd, NodeId, Pointer, Status, Usage,
    address::{LINE_BYTES, LINE_PAGES},
};

use crate::Timestamp;

#[allow(clippy::cast_possible_truncation, reason = "32,768")]
const LINE_LENGTH: u32 = LINE_BYTES as u32;

/// One serving core of a server: the other end of a session.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Server {
    /// The node.
    pub node: NodeId,
    /// The shard; a server takes it modulo the shards that it has.
    pub shard: u8,
}

impl Server {
    /// The home of a pointer.
    #[must_use]
    pub const fn of(pointer: Pointer) -> Self {
        Self { node: pointer.node, shard: pointer.location.shard() }
    }
}

/// A migration, as its requests name it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Migration {
    /// Its id.
    pub id: u64,
    /// Its range epoch.
    pub range_epoch: u32,
    /// The server that gives lines away.
    pub giver: Server,
}

/// One operation; a byte range lies inside of one aligned line.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Operation {
    /// Release a lease without writing.
    Abort {
        /// The first byte of what the UPDATE covered, or of a part of it.
        pointer: Pointer,
        /// Bytes; all pages that they touch are released.
        length: u32,
        /// The lease's epoch.
        epoch: u64,
    },
    /// Allocate and write `length` bytes; the rest of the last page is zero.
    AllocWrite {
        /// The server; any memory node if `None`.
        server: Option<Server>,
        /// Bytes, 1 to 32768; the data is the caller's outgoing buffer.
        length: u32,
    },
    /// End the session, once all operations that were started before are done.
    Close {
        /// The server.
        server: Server,
    },
    /// Write the caller's outgoing buffer under a lease, as a whole or not at all, and release it.
    Commit {
        /// The first byte of what the UPDATE covered, or of a part of it.
        pointer: Pointer,
        /// Bytes; all pages that they touch are released.
        length: u32,
        /// The lease's epoch.
        epoch: u64,
    },
    /// Replace 8 bytes if they are as expected (little endian in memory).
    CompareSwap {
        /// The bytes; 8-aligned.
        pointer: Pointer,
        /// The expected value.
        expected: u64,
        /// The new value.
        new: u64,
    },
    /// Allocate contiguous zeroed pages.
    Create {
        /// The server; any memory node if `None`.
        server: Option<Server>,
        /// Pages, 1 or more.
        pages: u32,
    },
    /// Free an allocation.
    Delete {
        /// Its first byte.
        pointer: Pointer,
        /// Its pages, or 0 for any length.
        pages: u32,
    },
    /// Free the part of an allocation that ends with a page, as far as its server has it; for the server that frees the
    /// allocation. Asking again changes nothing.
    FreePart {
        /// The server of the page, whose answer is final; if `None` the home is asked, and leads to it.
        at: Option<Server>,
        /// The page's first byte.
        pointer: Pointer,
        /// Pages of the allocation from its first one to this one.
        pages: u32,
    },
    /// Add to 8 bytes, wrapping (little endian in memory).
    FetchAdd {
        /// The bytes; 8-aligned.
        pointer: Pointer,
        /// The addend.
        addend: u64,
    },
    /// Make a line that was taken one's own, or learn that it is. The reply's fences, at most 256 bytes, are copied
    /// into the caller's incoming buffer.
    Keep {
        /// The migration.
        migration: Migration,
        /// The first byte of the line; tag 0, and the first generation of the contents.
        pointer: Pointer,
        /// The epoch of the TAKE's lease.
        epoch: u64,
        /// The number of the last fence that is known; 0: none.
        known: u32,
    },
    /// Check that the server replies.
    Ping {
        /// The server.
        server: Server,
        /// Bytes that it returns, up to 64; the data is the caller's outgoing buffer.
        length: u32,
    },
    /// Read bytes into the caller's incoming buffer; each page atomic.
    Read {
        /// The first byte.
        pointer: Pointer,
        /// Bytes.
        length: u32,
    },
    /// Read bytes into the caller's incoming buffer; of a leased page the last committed contents.
    ReadStale {
        /// The first byte.
        pointer: Pointer,
        /// Bytes.
        length: u32,
    },
    /// Read bytes of a line that was taken, at the giver, into the caller's incoming buffer.
    ReadTaken {
        /// The giver.
        giver: Server,
        /// The first byte, with the colour of its allocation.
        pointer: Pointer,
        /// Bytes.
        length: u32,
        /// The epoch of the TAKE's lease.
        epoch: u64,
    },
    /// Set a new end of a lease; until the reply arrives the earlier end counts.
    Renew {
        /// The first byte of what the UPDATE covered, or of a part of it.
        pointer: Pointer,
        /// Bytes; the lease of all pages that they touch is extended.
        length: u32,
        /// The lease's epoch.
        epoch: u64,
        /// Milliseconds from now on; 0: the server's default.
        lease_ms: u16,
    },
    /// Request the use of the server's memory.
    Stat {
        /// The server.
        server: Server,
    },
    /// Lease a whole line, free pages included, from its giver. The line's record, 256 bytes, is copied into the
    /// caller's incoming buffer.
    Take {
        /// The migration.
        migration: Migration,
        /// The first byte of the line; tag 0, and the first generation of the contents.
        pointer: Pointer,
        /// Milliseconds; 0: the server's default.
        lease_ms: u16,
        /// Whether to wait, until the deadline, for leases that other endpoints have.
        wait: bool,
    },
    /// Lease all pages that a range touches, or none, and read it into the caller's incoming
    /// buffer.
    Update {
        /// The first byte.
        pointer: Pointer,
        /// Bytes.
        length: u32,
        /// Milliseconds; 0: the server's default.
        lease_ms: u16,
        /// Whether to wait, until the deadline, for a lease that another endpoint has.
        wait: bool,
    },
    /// Write the caller's outgoing buffer; each page atomic.
    Write {
        /// The first byte.
        pointer: Pointer,
        /// Bytes.
        length: u32,
    },
    /// Zero bytes in place; each page atomic.
    Zero {
        /// The first byte.
        pointer: Pointer,
        /// Bytes.
        length: u32,
    },
}

impl Operation {
    /// The command on the wire.
    #[must_use]
    pub const fn command(&self) -> Command {
        match self {
            Self::Abort { .. } => Command::Abort,
            Self::AllocWrite { .. } => Command::AllocWrite,
            Self::Close { .. } => Command::Close,
            Self::Commit { .. } => Command::Commit,
            Self::CompareSwap { .. } => Command::CompareSwap,
            Self::Create { .. } => Command::Create,
            Self::Delete { .. } | Self::FreePart { .. } | Self::Zero { .. } => Command::Delete,
            Self::FetchAdd { .. } => Command::FetchAdd,
            Self::Ping { .. } => Command::Ping,
            Self::Keep { .. } => Command::Keep,
            Self::Read { .. } | Self::ReadStale { .. } | Self::ReadTaken { .. } => Command::Read,
            Self::Renew { .. } => Command::Renew,
            Self::Stat { .. } => Command::Stat,
            Self::Take { .. } => Command::Take,
            Self::Update { .. } => Command::Update,
            Self::Write { .. } => Command::Write,
        }
    }

    /// The byte range of memory inside of one line, if the operation has one.
    #[must_use]
    pub const fn range(&self) -> Option<(Pointer, u32)> {
        match *self {
            Self::Abort { pointer, length, .. }
            | Self::Commit { pointer, length, .. }
            | Self::Read { pointer, length }
            | Self::ReadStale { pointer, length }
            | Self::ReadTaken { pointer, length, .. }
            | Self::Renew { pointer, length, .. }
            | Self::Update { pointer, length, .. }
            | Self::Write { pointer, length }
            | Self::Zero { pointer, length } => Some((pointer, length)),
            Self::Keep { pointer, .. } | Self::Take { pointer, .. } => Some((pointer, LINE_LENGTH)),
            _ => None,
        }
    }

    /// The server that gives the line away, if the operation is about such a line: that server's answer is final,
    /// whatever it is.
    pub(super) const fn giver(&self) -> Option<Server> {
        match *self {
            Self::Keep { migration, .. } | Self::Take { migration, .. } => Some(migration.giver),
            Self::ReadTaken { giver, .. } => Some(giver),
            Self::FreePart { at, .. } => at,
            _ => None,
        }
    }

    /// The memory that it is about.
    #[must_use]
    pub const fn pointer(&self) -> Option<Pointer> {
        match *self {
            Self::CompareSwap { pointer, .. }
            | Self::Delete { pointer, .. }
            | Self::FreePart { pointer, .. }
            | Self::FetchAdd { pointer, .. } => Some(pointer),
            _ => match self.range() {
                Some((pointer, _)) => Some(pointer),
                None => None,
            },
        }
    }

    /// Whether it may change the contents of memory, or who serves it; taking, extending or ending a lease does not.
    pub(super) const fn changes_memory(&self) -> bool {
        let is_of_lease = matches!(
            self,
            Self::Abort { .. } | Self::Renew { .. } | Self::Take { .. } | Self::Update { .. }
        );
        matches!(self, Self::Keep { .. }) || self.command().is_mutating() && !is_of_lease
    }

    /// Whether the reply is a train of pieces.
    pub(super) const fn is_read(&self) -> bool {
        matches!(
            self,
            Self::Read { .. }
                | Self::ReadStale { .. }
                | Self::ReadTaken { .. }
                | Self::Update { .. }
        )
    }

    /// Whether it may wait at the home, or at an owner, for a lease to end.
    pub(super) const fn may_queue(&self) -> bool {
        matches!(
            self,
            Self::Read { .. } | Self::Take { wait: true, .. } | Self::Update { wait: true, .. }
        )
    }
}

/// The caller's memory, found by the token that an operation was started with.
///
/// Data is copied directly between this memory and the carrier's buffers; a piece of a READ is
/// written only while its operation is in progress.
pub trait Buffers {
    /// The data that the operation sends: all bytes of a WRITE, a COMMIT, an ALLOC_WRITE or a PING.
    fn outgoing(&self, token: u64) -> &[u8];

    /// The destination of a READ's or an UPDATE's bytes, as long as the operation; of a TAKE's or KEEP's records, 256
    /// bytes ([`LINE_RECORD_BYTES`](bluebridge_wire::line::LINE_RECORD_BYTES)).
    fn incoming(&mut self, token: u64) -> &mut [u8];

    /// Bytes of a page of a READ or an UPDATE were copied to [`Self::incoming`], `at` bytes behind its start. If they
    /// are a whole page, `crc` is its CRC32C; otherwise what was known about the page is over.
    fn copied(&mut self, _token: u64, _at: usize, _crc: Option<u32>) {}
}

/// Identifies an operation in progress; never reused for another.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct OperationId {
    pub(super) index: u16,
    pub(super) generation: u32,
}

/// The end of an operation.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Completion {
    /// The token that the caller passed to `start`.
    pub token: u64,
    /// How it ended.
    pub result: Result<Output, Failure>,
}

/// The result of a successful operation.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Output {
    /// Success without a value.
    Done,
    /// The pages that a DELETE freed; of a part that was asked for, those that are free now.
    Freed(u32),
    /// The line that was to be taken is free as a whole, and stays with its home.
    Free,
    /// The line is the requester's.
    Kept {
        /// Bytes of fences that the reply brought.
        bytes: u16,
        /// The number of the last of them, or the number that the requester named.
        known: u32,
        /// Whether these were all. Otherwise repeat [`Operation::Keep`] with `known`, and serve the line only then.
        is_all: bool,
    },
    /// The lease that an UPDATE or TAKE got or a RENEW extended.
    Leased(Lease),
    /// The pointer that a CREATE or ALLOC_WRITE returned.
    Pointer(Pointer),
    /// The earlier contents of the 8 bytes of an atomic.
    Previous(u64),
    /// The end of a READ that accepts the last committed contents.
    Read {
        /// Whether a page was leased, so that its owner may already have newer contents.
        stale: bool,
    },
    /// The record that a STAT requested.
    Usage(Usage),
}

/// The right of this endpoint to commit to pages, for a time.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Lease {
    /// Its fencing token.
    pub epoch: u64,
    /// When it ends, by this endpoint's clock: counted from when the request was sent, less a
    /// margin for clocks that run at different rates (protocol, section 10), so that the home does
    /// not end it earlier.
    pub expires_at: Timestamp,
    /// Milliseconds that were left when the home replied.
    pub granted_ms: u16,
}

/// The status of every page of an operation.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PageStatuses {
    pub(super) count: u8,
    pub(super) statuses: [Status; LINE_PAGES],
}

impl PageStatuses {
    /// The statuses in address order, one per page that the operation covers.
    #[must_use]
    pub fn as_slice(&self) -> &[Status] {
        self.statuses.get(..usize::from(self.count)).unwrap_or_default()
    }
}

/// Why an operation was not started; the caller is at fault.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum StartError {
    /// As many operations are in progress, or done and not polled, as the configuration allows.
    #[error("too many operations at once; poll completions first, or raise `operation_count`")]
    Full,
    /// The length is 0, or the range crosses a line boundary.
    #[error("the length is zero, or the range crosses a line boundary; split it")]
    Length,
    /// The node is not a single endpoint.
    #[error("{0} cannot be a memory node")]
    Node(NodeId),
    /// All server slots are used by servers with operations in progress.
    #[error("too many servers at once; finish operations first, or raise `server_count`")]
    Servers,
    /// The pointer is of another space than the requester.
    #[error("the pointer belongs to another space")]
    Space,
}

/// Why an operation failed, and whose fault that is.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Failure {
    /// The caller's buffer is shorter than the operation.
    #[error("the caller's buffer is shorter than the operation")]
    Buffer,
    /// A lease on the page did not end before the deadline; nothing was done. Try again later.
    #[error("the page is leased to node {owner} for {remaining_ms} ms more")]
    Busy {
        /// The lease's owner.
        owner: NodeId,
        /// The lease's epoch.
        epoch: u64,
        /// Milliseconds that were left at the home's last reply.
        remaining_ms: u16,
    },
    /// The server allocates nothing, because an operator drained it; nothing was done. Use another one.
    #[error("node {node} is drained and allocates nothing")]
    Drained {
        /// The server.
        node: NodeId,
    },
    /// The lease is no longer held; the operation did nothing. Start again with an UPDATE.
    #[error("node {node} refused, because {how}; start again with an update")]
    LeaseLost {
        /// The home.
        node: NodeId,
        /// How it ended.
        how: LeaseEnd,
        /// The current owner of the page and its epoch, if the home reported them.
        owner: Option<(NodeId, u64)>,
    },
    /// The carrier refused the datagram before anything was sent; the local network configuration
    /// is at fault.
    #[error("the carrier refused to send to node {node}")]
    NotSent {
        /// The destination.
        node: NodeId,
    },
    /// A mutating operation was sent and its outcome is not known: it was applied once or not at
    /// all. Check the memory before you repeat it.
    #[error("no response from node {node} in time: the operation was applied once, or not at all")]
    OutcomeUnknown {
        /// The last node contacted.
        node: NodeId,
        /// Whether the node replied to anything since the operation started.
        responding: bool,
    },
    /// The pages ended differently.
    #[error("the pages of the operation ended differently")]
    Partial(PageStatuses),
    /// The server refused, and nothing was done.
    #[error("node {node} refused: {status}")]
    Refused {
        /// Why; [`Status::fault`] says who is at fault.
        status: Status,
        /// The server that refused.
        node: NodeId,
    },
    /// The node replies, but this operation did not end before its deadline; nothing was changed.
    #[error("node {node} responds, but the operation did not end in time")]
    TimedOut {
        /// The last node contacted.
        node: NodeId,
    },
    /// The range moved from node to node too often; the controller or its tables are at fault.
    #[error("the range moved too often, last to node {node}")]
    TooManyHops {
        /// The node that it moved to last.
        node: NodeId,
    },
    /// All server slots are used, and the operation has to continue at another server.
    #[error("too many servers at once to follow the operation to node {node}")]
    TooManyServers {
        /// That server.
        node: NodeId,
    },
    /// No reply came from the node since the operation started, and nothing was changed: it is
    /// down, or the network does not reach it.
    #[error("node {node} does not respond")]
    Unreachable {
        /// The node.
        node: NodeId,
    },
    /// The server violated the protocol.
    #[error("node {node} violated the protocol")]
    Violation {
        /// The server.
        node: NodeId,
    },
}
