//! What can be asked, what is answered, and how it can fail.

use bluebridge_wire::{Command, LeaseEnd, NodeId, Pointer, Status, Usage, address::LINE_PAGES};

use crate::Timestamp;

/// One serving core of a server: the other end of a session.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Server {
    /// The node.
    pub node: NodeId,
    /// The shard; a server takes it modulo the shards that it has.
    pub shard: u8,
}

impl Server {
    /// The server at home for a pointer.
    #[must_use]
    pub const fn of(pointer: Pointer) -> Self {
        Self { node: pointer.node, shard: pointer.location.shard() }
    }
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
        /// Where; any memory node if `None`.
        server: Option<Server>,
        /// Bytes, 1 to 32768; the data is the caller's outgoing buffer.
        length: u32,
    },
    /// End the session, once all that was started before is done.
    Close {
        /// With whom.
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
        /// What must be there.
        expected: u64,
        /// What is put there.
        new: u64,
    },
    /// Allocate contiguous zeroed pages.
    Create {
        /// Where; any memory node if `None`.
        server: Option<Server>,
        /// Pages, 1 or more.
        pages: u32,
    },
    /// Free an allocation.
    Delete {
        /// Its first byte.
        pointer: Pointer,
        /// Its pages, or 0 for whatever it has.
        pages: u32,
    },
    /// Add to 8 bytes, wrapping (little endian in memory).
    FetchAdd {
        /// The bytes; 8-aligned.
        pointer: Pointer,
        /// What is added.
        addend: u64,
    },
    /// Ask for a sign of life.
    Ping {
        /// Whom.
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
    /// Set the end of a lease anew; until it is answered the earlier end counts.
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
    /// Ask how full the server is.
    Stat {
        /// Which.
        server: Server,
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
    /// The command that travels.
    #[must_use]
    pub const fn command(&self) -> Command {
        match self {
            Self::Abort { .. } => Command::Abort,
            Self::AllocWrite { .. } => Command::AllocWrite,
            Self::Close { .. } => Command::Close,
            Self::Commit { .. } => Command::Commit,
            Self::CompareSwap { .. } => Command::CompareSwap,
            Self::Create { .. } => Command::Create,
            Self::Delete { .. } | Self::Zero { .. } => Command::Delete,
            Self::FetchAdd { .. } => Command::FetchAdd,
            Self::Ping { .. } => Command::Ping,
            Self::Read { .. } | Self::ReadStale { .. } => Command::Read,
            Self::Renew { .. } => Command::Renew,
            Self::Stat { .. } => Command::Stat,
            Self::Update { .. } => Command::Update,
            Self::Write { .. } => Command::Write,
        }
    }

    /// The byte range of memory inside of one line, of what has one.
    #[must_use]
    pub const fn range(&self) -> Option<(Pointer, u32)> {
        match *self {
            Self::Abort { pointer, length, .. }
            | Self::Commit { pointer, length, .. }
            | Self::Read { pointer, length }
            | Self::ReadStale { pointer, length }
            | Self::Renew { pointer, length, .. }
            | Self::Update { pointer, length, .. }
            | Self::Write { pointer, length }
            | Self::Zero { pointer, length } => Some((pointer, length)),
            _ => None,
        }
    }

    /// The memory that it is about.
    #[must_use]
    pub const fn pointer(&self) -> Option<Pointer> {
        match *self {
            Self::CompareSwap { pointer, .. }
            | Self::Delete { pointer, .. }
            | Self::FetchAdd { pointer, .. } => Some(pointer),
            _ => match self.range() {
                Some((pointer, _)) => Some(pointer),
                None => None,
            },
        }
    }

    /// Whether it may change what memory holds; what only takes, extends or ends a lease does not.
    pub(super) const fn changes_memory(&self) -> bool {
        self.command().is_mutating()
            && !matches!(self, Self::Abort { .. } | Self::Renew { .. } | Self::Update { .. })
    }

    /// Whether the answer is a train of pieces.
    pub(super) const fn is_read(&self) -> bool {
        matches!(self, Self::Read { .. } | Self::ReadStale { .. } | Self::Update { .. })
    }

    /// Whether it may wait at the home, or at an owner, for a lease to end.
    pub(super) const fn may_queue(&self) -> bool {
        matches!(self, Self::Read { .. } | Self::Update { wait: true, .. })
    }
}

/// The caller's memory, found by the token that an operation was started with.
///
/// Data goes between here and the carrier's buffers without a copy in between; a piece of a READ
/// is written only while its operation is under way.
pub trait Buffers {
    /// What the operation sends: all bytes of a WRITE, a COMMIT, an ALLOC_WRITE or a PING.
    fn outgoing(&self, token: u64) -> &[u8];

    /// Where a READ's or an UPDATE's bytes go; as long as the operation.
    fn incoming(&mut self, token: u64) -> &mut [u8];
}

/// Names an operation under way; never reused for another.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct OperationId {
    pub(super) index: u16,
    pub(super) generation: u32,
}

/// The end of an operation.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Completion {
    /// What the caller gave to `start`.
    pub token: u64,
    /// How it ended.
    pub result: Result<Answer, Failure>,
}

/// What a successful operation answers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Answer {
    /// Nothing but success.
    Done,
    /// The pages that a DELETE freed.
    Freed(u32),
    /// The lease that an UPDATE got or a RENEW extended.
    Leased(Lease),
    /// The pointer that a CREATE or ALLOC_WRITE gave.
    Pointer(Pointer),
    /// What the 8 bytes of an atomic held before.
    Previous(u64),
    /// The end of a READ that asked for no more than the last committed contents.
    Read {
        /// Whether a page was leased, so that its owner may have newer contents already.
        stale: bool,
    },
    /// The record that a STAT asked for.
    Usage(Usage),
}

/// The right of this endpoint to commit to pages, for a time.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Lease {
    /// Its fencing number.
    pub epoch: u64,
    /// When it ends, by this endpoint's clock: counted from when the request was sent, less a
    /// margin for clocks that run at different rates (protocol, section 10), so that the home
    /// does not end it earlier.
    pub expires_at: Timestamp,
    /// Milliseconds that were left when the home answered.
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

/// Why an operation was not begun; the caller is at fault.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum StartError {
    /// As many operations are under way, or done and not polled, as the configuration allows.
    #[error("too many operations at once; poll completions first, or configure more")]
    Full,
    /// The length is 0, or the range crosses an aligned line.
    #[error("the length is zero, or the range crosses a line; split it")]
    Length,
    /// The node is no single endpoint.
    #[error("{0} cannot be a memory node")]
    Node(NodeId),
    /// All server slots are taken by servers with operations under way.
    #[error("too many servers at once; finish operations first, or configure more")]
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
        /// Milliseconds that were left when the home last told.
        remaining_ms: u16,
    },
    /// The lease is not held any more; the operation did nothing. Begin anew with an UPDATE.
    #[error("node {node} refused, because {how}; begin anew with an update")]
    LeaseLost {
        /// The home.
        node: NodeId,
        /// How it ended.
        how: LeaseEnd,
        /// To whom the page is leased now, and under which epoch, if the home told.
        owner: Option<(NodeId, u64)>,
    },
    /// The carrier refused the datagram before anything was sent; the local network set-up is at
    /// fault.
    #[error("the carrier refused to send to node {node}")]
    NotSent {
        /// Whom it was for.
        node: NodeId,
    },
    /// A mutating operation was sent and how it ended is not known: it was done once or not at
    /// all. Look before doing it again.
    #[error("no answer from node {node} in time: the operation was done once, or not at all")]
    OutcomeUnknown {
        /// Who was asked last.
        node: NodeId,
        /// Whether the node answered anything since the operation began.
        answering: bool,
    },
    /// The pages ended differently.
    #[error("the pages of the operation ended differently")]
    Partial(PageStatuses),
    /// The server refused, and nothing was done.
    #[error("node {node} refused: {status}")]
    Refused {
        /// Why; [`Status::fault`] says who is at fault.
        status: Status,
        /// Who refused.
        node: NodeId,
    },
    /// The node answers, but this operation did not end before its deadline; nothing was changed.
    #[error("node {node} answers, but not in time")]
    TimedOut {
        /// Who was asked last.
        node: NodeId,
    },
    /// The range moved from node to node too often; the controller or its tables are at fault.
    #[error("the range moved too often, last to node {node}")]
    TooManyHops {
        /// Where it is said to be.
        node: NodeId,
    },
    /// All server slots are taken, and the operation has to go to another server.
    #[error("too many servers at once to follow the operation to node {node}")]
    TooManyServers {
        /// Where it had to go.
        node: NodeId,
    },
    /// Nothing was heard from the node since the operation began, and nothing was changed: it is
    /// down, or the network does not lead to it.
    #[error("node {node} does not answer")]
    Unreachable {
        /// Who was asked.
        node: NodeId,
    },
    /// The server broke the protocol.
    #[error("node {node} broke the protocol")]
    Violation {
        /// Which.
        node: NodeId,
    },
}
