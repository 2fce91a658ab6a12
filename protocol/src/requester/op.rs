//! One operation in progress, in parts by their lifetimes.

use bluebridge_wire::{Command, Pointer, Status, address::LINE_PAGES};

use super::operation::{Lease, Operation};
use crate::{Timestamp, pieces::Cut};

/// No page.
pub(super) const NO_PAGE: u8 = u8::MAX;

/// The list or state that an operation is in.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Place {
    /// All is sent; the timer runs.
    Flight,
    /// The slot is free.
    Free,
    /// Its session is lost; it keeps its number until a new session decides how it continues.
    Held,
    /// It waits out a back-off; the timer runs.
    Pause,
    /// In the list of operations with datagrams to send.
    Ready,
    /// In its peer's list, without a number: for the session, the window, or credit.
    Waiting,
}

/// The purpose of an operation's current request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Stage {
    /// The operation itself, in no session, to any memory node; `entropy` varies the choice of the
    /// node.
    Anywhere { entropy: u64 },
    /// CONFIRM of the pointer that an anywhere-CREATE returned.
    Confirm(Pointer),
    /// The operation itself, in a session.
    Direct,
}

/// Where a request waits for a lease to end.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Queue {
    /// At the home: it is repeated, to keep its place, until the final reply.
    Home,
    /// Nowhere.
    No,
    /// At the owner that a redirect led to, for a limited time; then the home is contacted.
    Owner,
}

/// The lease in the last BUSY.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Holder {
    pub(super) epoch: u64,
    pub(super) owner: u16,
    pub(super) remaining_ms: u16,
}

/// One operation.
///
/// Its range is requested in *runs* of consecutive pages: one run of all pages, unless some pages
/// have to be requested again elsewhere or later. Each run is sent under a number, and under
/// another one if it has to be sent again in full; state with the same lifetime is in a part of its
/// own.
#[derive(Debug)]
pub(super) struct Op {
    pub(super) operation: Operation,
    pub(super) stage: Stage,
    pub(super) token: u64,
    pub(super) started: Timestamp,
    pub(super) deadline: Timestamp,
    pub(super) timer: Timestamp,
    pub(super) pages: Pages,
    pub(super) route: Route,
    pub(super) run: Run,
    pub(super) request: Request,
    pub(super) arrived: Arrived,
    pub(super) grant: Grant,
    pub(super) link: Link,
    /// An earlier number may have had an effect.
    pub(super) may_be_applied: bool,
    /// An ABORT under an earlier number may have been applied.
    pub(super) sent_before: bool,
    /// It may have been executed by a process of the home that lost its memory. It is sent only to learn whether its
    /// line lives elsewhere: the home no longer executes it.
    pub(super) is_question: bool,
}

/// How the pages of the operation ended so far.
#[derive(Debug)]
pub(super) struct Pages {
    /// One status per page.
    pub(super) statuses: [Status; LINE_PAGES],
    /// Those that have no final status yet.
    pub(super) pending: u8,
    /// Those with pieces of the last committed contents of a leased page.
    pub(super) stale: u8,
    /// They are requested one by one.
    pub(super) one_by_one: bool,
}

/// The addressed node, and information from earlier replies about it.
#[derive(Debug)]
pub(super) struct Route {
    pub(super) peer: u16,
    /// The request bypasses redirects.
    pub(super) home: bool,
    /// The current request, of memory of another node than the server, does not go to the pointer.
    pub(super) avoids_pointer: bool,
    /// Nodes that were contacted because of another node's reply.
    pub(super) hops: u8,
    /// Back-offs in a row.
    pub(super) pauses: u8,
    /// The home said that it has lost the memory.
    pub(super) is_orphan: bool,
    /// The MOVED reply under the current number: the node, and the first page that it is about.
    pub(super) moved_node: u16,
    pub(super) moved_page: u8,
    /// How many pages of the block around that page are there, too; 0 if that is not known.
    pub(super) moved_block_pages: u32,
    pub(super) holder: Holder,
}

/// The pages that are requested together.
#[derive(Debug)]
pub(super) struct Run {
    /// Their division into pieces.
    pub(super) cut: Cut,
    /// Their distance from the operation's start in bytes.
    pub(super) start: u16,
    /// The first of them, counted from the operation's first.
    pub(super) first_page: u8,
}

/// What was sent under the current number.
#[derive(Debug)]
pub(super) struct Request {
    /// The number in the session, or the nonce; 0 without one.
    pub(super) sequence: u64,
    pub(super) first_sent: Timestamp,
    pub(super) last_sent: Timestamp,
    /// The number of datagrams sent.
    pub(super) sent_count: u32,
    /// Datagrams that are to be sent now, one bit each.
    pub(super) to_send: u32,
    pub(super) attempt: u8,
    /// Timer expiries in a row.
    pub(super) expired: u8,
    /// Pages of credit that it costs.
    pub(super) cost: u8,
    /// A datagram that requests the state of the train is outstanding.
    pub(super) probing: bool,
    /// The last reply was OVERLOADED.
    pub(super) overloaded: bool,
    /// Where it waits for a lease to end.
    pub(super) queue: Queue,
}

/// What arrived under the current number: bits of the run's pieces and pages.
#[derive(Debug)]
pub(super) struct Arrived {
    /// Versions of the run's pages (READ).
    pub(super) versions: [u64; LINE_PAGES],
    /// Pieces that arrived: here (READ), or at the server as far as is known (trains).
    pub(super) done: u32,
    /// Pages that have their final reply under this number.
    pub(super) settled: u8,
    /// Pages that lost pieces to a newer version.
    pub(super) restarted: u8,
    /// The pieces that arrived came from a lease's owner.
    pub(super) from_owner: bool,
}

/// The grant of an UPDATE or a RENEW.
#[derive(Debug)]
pub(super) struct Grant {
    /// Epoch 0 without a grant.
    pub(super) lease: Lease,
    /// When the last request was sent that is known to have a reply from before the grant.
    pub(super) sent_after: Timestamp,
}

/// The operation's place in the slab and its lists.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) place: Place,
    pub(super) generation: u32,
    pub(super) prev: u16,
    pub(super) next: u16,
}

const _: () = assert!(size_of::<Op>() <= 320, "one operation stays within five cache lines");

impl Op {
    /// Starts a request under a new number; nothing was sent or arrived yet.
    pub(super) const fn begin_request(&mut self, sequence: u64) {
        let to_send = if self.is_train() { self.run.cut.all() } else { 1 };
        let Request { sent_count, attempt, expired, probing, overloaded, queue, .. } =
            &mut self.request;
        (*sent_count, *attempt, *expired) = (0, 0, 0);
        (*probing, *overloaded, *queue) = (false, false, Queue::No);
        self.request.sequence = sequence;
        self.request.to_send = to_send;
        let Arrived { done, settled, restarted, from_owner, .. } = &mut self.arrived;
        (*done, *settled, *restarted, *from_owner) = (0, 0, 0, false);
        self.route.moved_page = NO_PAGE;
        self.grant.lease.epoch = 0;
    }

    /// The command of the current request.
    pub(super) const fn command(&self) -> Command {
        match self.stage {
            Stage::Confirm(_) => Command::Confirm,
            Stage::Anywhere { .. } | Stage::Direct => self.operation.command(),
        }
    }

    /// Whether the current request may have had a permanent effect.
    pub(super) const fn may_have_changed(&self) -> bool {
        let lasting = match self.stage {
            // Unconfirmed pages are freed by the server.
            Stage::Anywhere { .. } => false,
            Stage::Confirm(_) => true,
            Stage::Direct => self.operation.changes_memory(),
        };
        self.may_be_applied || (lasting && self.request.sent_count > 0)
    }

    /// The byte range of memory inside of one line, if the operation has one.
    pub(super) const fn range(&self) -> Option<(Pointer, u32)> {
        self.operation.range()
    }

    /// The memory that the operation is about.
    pub(super) const fn pointer(&self) -> Option<Pointer> {
        match self.stage {
            Stage::Confirm(pointer) => Some(pointer),
            Stage::Anywhere { .. } | Stage::Direct => self.operation.pointer(),
        }
    }

    /// Whether the request is a train of pieces.
    pub(super) const fn is_train(&self) -> bool {
        self.command().carries_pages()
    }

    /// Whether the reply is a train of pieces.
    pub(super) const fn is_read(&self) -> bool {
        self.operation.is_read()
    }

    /// Pages in the run; 1 for an operation without a range.
    pub(super) const fn run_page_count(&self) -> usize {
        match self.operation {
            Operation::AllocWrite { .. } if !matches!(self.stage, Stage::Confirm(_)) => {
                self.run.cut.page_count()
            }
            _ if self.range().is_some() => self.run.cut.page_count(),
            _ => 1,
        }
    }
}
