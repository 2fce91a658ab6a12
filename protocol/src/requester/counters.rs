//! Counters of a requester's events.

use bluebridge_wire::Status;

use crate::events::events;

events! {
    "Events that a requester counts.";

    /// An operation began.
    Start = "started",
    /// An operation succeeded.
    Success = "succeeded",
    /// An operation failed.
    Failure = "failed",
    /// An operation was cancelled.
    Cancel = "cancelled",
    /// A datagram was handed out to be sent.
    Transmit = "transmitted",
    /// The carrier refused a datagram permanently.
    TransmitRefused = "transmit_refused",
    /// A retransmission timer expired and the request was sent again.
    Retransmit = "retransmitted",
    /// An operation's deadline passed.
    Deadline = "deadline_passed",
    /// A session was opened.
    SessionOpen = "session_opened",
    /// An OPEN was sent again.
    OpenRetransmit = "open_retransmitted",
    /// OPEN was repeated, because its reply may have been delayed.
    OpenInDoubt = "open_in_doubt",
    /// A session was lost.
    SessionLost = "session_lost",
    /// A session was abandoned, and its server notified once.
    SessionLeave = "session_left",
    /// A session was closed.
    SessionClose = "session_closed",
    /// An operation continued in a new session.
    Resumed = "resumed_in_new_session",
    /// An operation could not continue in a new session.
    ResumeUnsafe = "not_resumed_in_new_session",
    /// A server's slot was given to another server.
    ServerEvict = "server_evicted",
    /// An operation waited for credit or for the window.
    Throttle = "throttled",
    /// A piece of a READ was copied.
    PieceJoin = "piece_joined",
    /// A duplicate piece of a READ, or one after its page was complete.
    PieceDuplicate = "piece_duplicate",
    /// A piece of an older version of its page than earlier pieces.
    PieceOutdated = "piece_outdated",
    /// Pieces were dropped because a newer version of their page arrived.
    PageRestart = "page_restarted",
    /// A server had not received all pieces of a train and got the missing ones.
    TrainRepair = "train_repaired",
    /// An operation was sent again after BUSY.
    BusyRetry = "busy_retried",
    /// An operation was sent again after OVERLOADED.
    OverloadedRetry = "overloaded_retried",
    /// The target of a redirect referred the operation to the home, or did not reply in the time
    /// that it stated.
    RedirectReturn = "redirect_returned",
    /// Another node refused a first try that a switch led to it; the operation was sent to the
    /// session's server.
    AstrayReturn = "astray_returned",
    /// The owner that a redirect led to let the operation wait.
    OwnerWait = "owner_waited",
    /// The home lets an operation wait for a lease to end.
    Queue = "queued",
    /// A request that waits at the home was repeated to keep its place.
    QueueRepeat = "queue_repeated",
    /// A waiting request kept the session's window from moving, and gave its place up.
    QueueLeave = "queue_left",
    /// An UPDATE was granted a lease.
    Grant = "granted",
    /// A grant ended before the requester received it, and the UPDATE was started again.
    GrantLost = "grant_lost",
    /// A lease was extended.
    Renewal = "renewed",
    /// A lease to be committed, aborted or extended was no longer held.
    LeaseLost = "lease_lost",
    /// A piece of the last committed contents of a leased page was copied.
    StaleJoin = "stale_piece_joined",
    /// An operation followed its range to another node.
    MovedFollow = "moved_followed",
    /// A cached move was wrong, and the home was contacted again.
    MovedForget = "moved_forgotten",
    /// An anywhere-CREATE was confirmed.
    Confirm = "confirmed",
    /// The pages of an anywhere-CREATE were freed before they were confirmed, and it was started
    /// again.
    ConfirmLate = "confirmed_too_late",
    /// A reply to no outstanding request (completed, abandoned, or a duplicate).
    ReplyStale = "reply_stale",
    /// A datagram that is not a reply to this requester, or a reply that contradicts the request.
    ReplyUntrusted = "reply_untrusted",
    /// A reply of a trusted server that violates the protocol.
    ReplyViolation = "reply_violation",
}

/// How often each [`Event`] happened and each [`Status`] was received.
#[derive(Clone, Debug)]
pub struct Counters {
    events: [u64; Event::ALL.len()],
    statuses: [u64; STATUS_CODES],
}

const STATUS_CODES: usize = 64;
const _: () = assert!((Status::Forbidden as usize) < STATUS_CODES);

impl Default for Counters {
    fn default() -> Self {
        Self { events: [0; Event::ALL.len()], statuses: [0; STATUS_CODES] }
    }
}

impl Counters {
    /// How often an event happened.
    #[must_use]
    pub const fn of(&self, event: Event) -> u64 {
        self.events[event as usize]
    }

    /// The number of trusted replies with a status (of a PARTIAL reply: PARTIAL).
    #[must_use]
    pub const fn of_status(&self, status: Status) -> u64 {
        self.statuses[status as usize]
    }

    /// All events with their counts.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Event::ALL.iter().map(|event| (event.name(), self.of(*event)))
    }

    /// All statuses with their counts.
    pub fn statuses(&self) -> impl Iterator<Item = (Status, u64)> {
        Status::ALL.iter().map(|status| (*status, self.of_status(*status)))
    }

    pub(super) const fn count(&mut self, event: Event) {
        self.events[event as usize] += 1;
    }

    pub(super) const fn count_status(&mut self, status: Status) {
        self.statuses[status as usize] += 1;
    }
}
