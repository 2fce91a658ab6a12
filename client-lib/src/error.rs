//! Errors: what failed, who is at fault, and what to do.

use std::{error, fmt, sync::Arc};

use bluebridge_protocol::requester::{Failure, StartError};
use bluebridge_transport::{ReceiveError, TransmitError};
use bluebridge_wire::{self as wire, LeaseEnd, NodeId, Pointer, PointerError, Status};

/// What another library reported; shared, so that an [`Error`] can be cloned.
pub(crate) type Cause = Arc<dyn error::Error + Send + Sync>;

/// A cause of which only a text is known.
pub(crate) fn cause(text: &str) -> Cause {
    Cause::from(Box::<dyn error::Error + Send + Sync>::from(text))
}

/// Who is at fault for an [`Error`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Fault {
    /// The controller, or the tables that it makes.
    Controller,
    /// The network between client and server, or this host's part of it.
    Network,
    /// The memory server.
    Server,
    /// The caller.
    You,
}

/// Why a call failed. If the call was about a long range, other parts of it may be done.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A lease of another node did not end before the deadline; nothing was done.
    #[error(
        "the page at {pointer} is leased to node {owner} for {remaining_ms} ms more; \
         try again later"
    )]
    Busy {
        /// The first requested byte.
        pointer: Pointer,
        /// The lease's owner.
        owner: NodeId,
        /// Milliseconds that were left at the home's last response.
        remaining_ms: u16,
    },
    /// The carrier failed for good, or this host's network is not set up.
    #[error("{}", of_carrier(.cause))]
    Carrier {
        /// What the carrier reported.
        #[source]
        cause: Arc<dyn error::Error + Send + Sync>,
    },
    /// The memory server allocates nothing, because an operator drained it; nothing was done.
    #[error(
        "node {node} is drained by an operator and allocates nothing; allocate on another node"
    )]
    Drained {
        /// The server.
        node: NodeId,
    },
    /// The controller does not count this endpoint as a member any more, so no node responds to it: another
    /// process joined under its name, or it sent no heartbeat for too long.
    #[error(
        "this endpoint is no longer a member of the rack ({reason}){}; join again",
        perhaps_done(*.outcome_unknown)
    )]
    Expelled {
        /// The controller's reason.
        reason: Arc<str>,
        /// Whether the operation may have been done, once; if false, it was not done.
        outcome_unknown: bool,
    },
    /// The lease ended before its COMMIT, ABORT or RENEW, which did nothing.
    #[error(
        "the update of the page at {pointer} came too late, and nothing of it was written ({how}{}); \
         update again with the present contents",
        now_of(*.owner)
    )]
    LeaseLost {
        /// The first byte of the part whose lease it was.
        pointer: Pointer,
        /// How it ended.
        how: LeaseEnd,
        /// The present owner of the page, if the home reported it.
        owner: Option<NodeId>,
    },
    /// A length is zero, or more than can be addressed.
    #[error("the length is zero, or larger than a node's memory can be; correct it")]
    Length,
    /// No memory node is known to place pages on.
    #[error("no memory node is known; check that a memory server has joined the space")]
    NoMemoryNode,
    /// The request was sent, and its result is not known: it was done once, or not at all.
    #[error(
        "{} {}, and the operation may have been applied; check before repeating it",
        whom(*.node),
        if *.responding { "responded, but not to this operation" } else { "did not respond in time" }
    )]
    OutcomeUnknown {
        /// The node that got the last request.
        node: NodeId,
        /// The first requested byte, if the request was about memory.
        pointer: Option<Pointer>,
        /// Whether the node sent any response meanwhile.
        responding: bool,
    },
    /// The first lines of an update over several lines are written, and the others are not.
    #[error(
        "the first {} of the update, in address order, written, \
         and nothing from {pointer} on ({cause})", bytes_are(*.committed_bytes)
    )]
    PartlyCommitted {
        /// The first byte of the line that failed; what [`Error::OutcomeUnknown`] says of a failure is true of
        /// that line too.
        pointer: Pointer,
        /// How many bytes are written, in the order of addresses.
        committed_bytes: u64,
        /// Why that line failed.
        #[source]
        cause: Box<Self>,
    },
    /// The range begins in an allocation and goes past its end. (Or the allocation was freed while the
    /// call ran.)
    #[error(
        "the range goes past the end of the allocation in which it begins: {pointer} is not part of \
         it; correct the length"
    )]
    PastEnd {
        /// The first byte of the range that is not the allocation's.
        pointer: Pointer,
    },
    /// Pointer arithmetic left the region or the arena.
    #[error(transparent)]
    Pointer(#[from] PointerError),
    /// The server refused. Nothing was done to the page that `pointer` names; if the call was about several
    /// pages, the others may be written, zeroed or read. After [`Status::StaleGeneration`], such writes were
    /// lost together with the server's contents.
    #[error("node {node} refused: {status}{}; {}", at(*.pointer), advice(*.status))]
    Refused {
        /// The reason.
        status: Status,
        /// The node that refused.
        node: NodeId,
        /// The first byte that it refused, if the request was about memory.
        pointer: Option<Pointer>,
    },
    /// Two ranges of one update have a page in common.
    #[error("two ranges of the update share the page {pointer}; make them one range")]
    SharedPage {
        /// The page's first byte.
        pointer: Pointer,
    },
    /// The node responds, but did not complete this request in time; nothing was changed.
    #[error("{} is too slow; allow more time, or request less at once", whom(*.node))]
    TimedOut {
        /// The node that got the last request.
        node: NodeId,
    },
    /// The range moved too often during the call.
    #[error("the range moved too often, last to node {node}; check the controller")]
    TooManyHops {
        /// The node that was last reported to serve it.
        node: NodeId,
    },
    /// More lines are leased at once than configured.
    #[error("too many leases at once; end updates first, or raise `lease_count`")]
    TooManyLeases,
    /// More operations than configured are needed at once.
    #[error("too many operations at once; raise `operation_count`")]
    TooManyOperations,
    /// More servers than configured are needed at once.
    #[error("too many servers at once; raise `server_count`")]
    TooManyServers,
    /// The node did not respond, and nothing was changed. Node 0 stands for all memory
    /// nodes.
    #[error("{} does not respond; check that it is running and that the switch has its entries", whom(*.node))]
    Unreachable {
        /// The node that got the request.
        node: NodeId,
    },
    /// The server broke the protocol.
    #[error("node {node} broke the protocol; compare the versions")]
    Violation {
        /// The server.
        node: NodeId,
    },
    /// The pointer names no single node.
    #[error("{node} cannot be a memory node")]
    WrongNode {
        /// The pointer's node.
        node: NodeId,
    },
    /// The pointer is of another space than the client.
    #[error("the pointer belongs to another space")]
    WrongSpace,
}

impl Error {
    /// Who is at fault.
    #[must_use]
    pub fn fault(&self) -> Fault {
        match self {
            Self::Busy { .. }
            | Self::Expelled { .. }
            | Self::LeaseLost { .. }
            | Self::Length
            | Self::PastEnd { .. }
            | Self::Pointer(_)
            | Self::SharedPage { .. }
            | Self::TooManyLeases
            | Self::TooManyOperations
            | Self::TooManyServers
            | Self::WrongNode { .. }
            | Self::WrongSpace => Fault::You,
            Self::PartlyCommitted { cause, .. } => cause.fault(),
            Self::Carrier { .. } | Self::Unreachable { .. } => Fault::Network,
            Self::NoMemoryNode | Self::TooManyHops { .. } => Fault::Controller,
            Self::Drained { .. }
            | Self::OutcomeUnknown { responding: true, .. }
            | Self::TimedOut { .. }
            | Self::Violation { .. } => Fault::Server,
            Self::OutcomeUnknown { responding: false, .. } => Fault::Network,
            Self::Refused { status, .. } => match status {
                Status::NoAuthority | Status::StaleRangeEpoch => Fault::Controller,
                Status::WrongNode => Fault::Network,
                _ => match status.fault() {
                    wire::Fault::Requester => Fault::You,
                    wire::Fault::Responder | wire::Fault::Protocol => Fault::Server,
                },
            },
        }
    }

    /// A number for callers that cannot use Rust's enums: 256 plus the status of a refusal, else below 256.
    #[must_use]
    pub const fn code(&self) -> u16 {
        match self {
            Self::Busy { .. } => 1,
            Self::Carrier { .. } => 2,
            Self::Length => 3,
            Self::NoMemoryNode => 4,
            Self::OutcomeUnknown { .. } => 5,
            Self::TimedOut { .. } => 6,
            Self::TooManyHops { .. } => 7,
            Self::TooManyServers => 8,
            Self::Unreachable { .. } => 9,
            Self::Violation { .. } => 10,
            Self::WrongNode { .. } => 11,
            Self::WrongSpace => 12,
            Self::LeaseLost { .. } => 13,
            Self::PartlyCommitted { .. } => 14,
            Self::SharedPage { .. } => 15,
            Self::TooManyLeases => 16,
            Self::Pointer(_) => 17,
            Self::TooManyOperations => 18,
            Self::PastEnd { .. } => 19,
            Self::Expelled { .. } => 20,
            Self::Drained { .. } => 21,
            Self::Refused { status, .. } => 256 + *status as u16,
        }
    }

    /// Whether the operation may have been done despite the error, once.
    #[must_use]
    pub fn is_outcome_unknown(&self) -> bool {
        match self {
            Self::OutcomeUnknown { .. } => true,
            Self::Expelled { outcome_unknown, .. } => *outcome_unknown,
            Self::PartlyCommitted { cause, .. } => cause.is_outcome_unknown(),
            _ => false,
        }
    }

    pub(crate) fn of_start(error: StartError) -> Self {
        match error {
            StartError::Length => Self::Length,
            StartError::Node(node) => Self::WrongNode { node },
            StartError::Space => Self::WrongSpace,
            // The driver waits for a free place while an operation is in flight.
            StartError::Full => Self::TooManyOperations,
            StartError::Servers => Self::TooManyServers,
        }
    }

    pub(crate) fn of_failure(
        failure: Failure,
        pointer: Option<Pointer>,
        carrier: Option<&Cause>,
    ) -> Self {
        match failure {
            Failure::Buffer => Self::Length,
            Failure::Busy { owner, remaining_ms, .. } => match pointer {
                Some(pointer) => Self::Busy { pointer, owner, remaining_ms },
                None => Self::TimedOut { node: owner },
            },
            Failure::Drained { node } => Self::Drained { node },
            Failure::LeaseLost { node, how, owner } => match pointer {
                Some(pointer) => {
                    Self::LeaseLost { pointer, how, owner: owner.map(|(node, _)| node) }
                }
                None => Self::Violation { node },
            },
            Failure::NotSent { .. } => {
                Self::Carrier { cause: carrier.map_or_else(|| cause("not sent"), Arc::clone) }
            }
            Failure::OutcomeUnknown { node, responding } => {
                Self::OutcomeUnknown { node, pointer, responding }
            }
            Failure::Partial(statuses) => Self::of_pages(statuses.as_slice(), pointer),
            Failure::Refused { status, node } => Self::Refused { status, node, pointer },
            Failure::TimedOut { node } => Self::TimedOut { node },
            Failure::TooManyHops { node } => Self::TooManyHops { node },
            Failure::TooManyServers { .. } => Self::TooManyServers,
            Failure::Unreachable { node } => Self::Unreachable { node },
            Failure::Violation { node } => Self::Violation { node },
        }
    }

    /// The error of an operation of an endpoint that was expelled.
    pub(crate) fn of_expelled(
        failure: Failure,
        pointer: Option<Pointer>,
        reason: &Arc<str>,
    ) -> Self {
        let expelled =
            |outcome_unknown| Self::Expelled { reason: Arc::clone(reason), outcome_unknown };
        match failure {
            Failure::OutcomeUnknown { .. } => expelled(true),
            Failure::Busy { .. }
            | Failure::NotSent { .. }
            | Failure::TimedOut { .. }
            | Failure::Unreachable { .. } => expelled(false),
            failure => Self::of_failure(failure, pointer, None),
        }
    }

    /// The error of a call about a part of a range whose preceding part exists: memory that is missing is
    /// then past the end of the allocation. For callers that transfer a long range in several calls.
    #[must_use]
    pub fn after_found_memory(self) -> Self {
        match self.missing_memory() {
            Some(pointer) => Self::PastEnd { pointer },
            None => self,
        }
    }

    /// Whether a server has no memory for an allocation, so that another one may have some.
    pub(crate) const fn is_of_full_server(&self) -> bool {
        matches!(self, Self::Drained { .. } | Self::Refused { status: Status::OutOfMemory, .. })
    }

    /// The pointer at which nothing is allocated that the caller may use, if that is the error.
    pub(crate) fn missing_memory(&self) -> Option<Pointer> {
        match self {
            Self::PastEnd { pointer } => Some(*pointer),
            Self::Refused { status, pointer, .. } if is_missing(*status) => *pointer,
            _ => None,
        }
    }

    /// The refusal of the first page that was refused.
    fn of_pages(statuses: &[Status], pointer: Option<Pointer>) -> Self {
        let refused = statuses.iter().enumerate().find(|(_, status)| !status.is_ok());
        let (page, status) =
            refused.map_or((0, Status::Internal), |(page, status)| (page, *status));
        let node = pointer.map_or(NodeId::ANY, |pointer| pointer.node);
        let first_byte = pointer.map(|pointer| {
            let offset = (page * wire::address::PAGE_BYTES) as u64;
            let start = if page == 0 { pointer } else { pointer.page_start() };
            start.checked_add(offset).unwrap_or(pointer)
        });
        match first_byte {
            // All pages belong to one allocation, and its first page exists.
            Some(pointer) if page > 0 && is_missing(status) && starts_well(statuses) => {
                Self::PastEnd { pointer }
            }
            pointer => Self::Refused { status, node, pointer },
        }
    }
}

/// Whether a page does not belong to the allocation that the pointer was made for.
const fn is_missing(status: Status) -> bool {
    matches!(status, Status::NotAllocated | Status::OutOfRange | Status::StaleTag)
}

fn starts_well(statuses: &[Status]) -> bool {
    statuses.first().is_some_and(|status| status.is_ok())
}

/// Node 0 stands for the memory node that the switch chooses.
fn whom(node: NodeId) -> String {
    match node {
        NodeId::ANY => "the memory node that the switch chose".to_owned(),
        node => format!("node {node}"),
    }
}

const fn perhaps_done(outcome_unknown: bool) -> &'static str {
    if outcome_unknown { ", and the operation was done once or not at all" } else { "" }
}

/// What the transport reports of a datagram that it did not send has its own advice.
fn of_carrier(cause: &Cause) -> String {
    match cause.downcast_ref::<TransmitError>() {
        Some(TransmitError::TooLarge { .. } | TransmitError::Unreachable { .. }) => {
            format!("cannot send: {cause}")
        }
        Some(TransmitError::Socket(error)) => carrier_failed(error),
        Some(TransmitError::Refused { .. }) => carrier_failed(cause),
        None => match cause.downcast_ref::<ReceiveError>() {
            Some(ReceiveError::Socket(error)) => carrier_failed(error),
            None => carrier_failed(cause),
        },
    }
}

fn carrier_failed(cause: &dyn fmt::Display) -> String {
    format!("the carrier failed: {cause}; check the interface and the fabric's routes")
}

fn bytes_are(count: u64) -> String {
    if count == 1 { "byte is".to_owned() } else { format!("{count} bytes are") }
}

fn now_of(owner: Option<NodeId>) -> String {
    owner.map_or_else(String::new, |owner| format!(", to node {owner}"))
}

fn at(pointer: Option<Pointer>) -> String {
    // A pointer may end in colons, so the text has no colon after it.
    pointer.map_or_else(String::new, |pointer| format!(" (at {pointer})"))
}

const fn advice(status: Status) -> &'static str {
    match status {
        // A pointer alone does not say where its allocation ends.
        Status::StaleTag | Status::NotAllocated => {
            "the memory was freed, or the pointer is past the end of its allocation; \
             correct it, or forget the pointer"
        }
        Status::StaleGeneration => "what it pointed to is lost; forget the pointer",
        Status::OutOfRange | Status::BadLength | Status::Unaligned => {
            "correct the pointer or the length"
        }
        // Retired pages have no tags left, so freeing others does not bring them back.
        Status::OutOfMemory => {
            "allocate less at once or on another node, or free memory; `bluebridge stat` shows \
             what is free, and what is retired and cannot be freed"
        }
        Status::QuotaExceeded => {
            "free memory, or ask for a larger quota; only the latter helps if the space's pages are retired"
        }
        Status::StaleIncarnation => "this endpoint was joined again elsewhere; join again",
        Status::WrongNode => {
            "the switch delivered the request to a node that the pointer does not name; \
             compare its table `directory` with the controller's"
        }
        Status::NoAuthority | Status::StaleRangeEpoch => "wait for the controller",
        Status::Forbidden => {
            "only the endpoint that allocated the memory may confirm it, and only a server has a part of it freed"
        }
        Status::ShuttingDown => "use another node",
        Status::Overloaded => "send less at once, or allow more time",
        Status::UnsupportedFeature | Status::UnsupportedVersion | Status::UnknownCommand => {
            "update the server"
        }
        _ => "see the status",
    }
}

#[cfg(test)]
mod tests;
