//! Everything that happened, counted.

use bluebridge_wire::Status;

use crate::events::events;

events! {
    "What a requester counts.";

    /// An operation began.
    Start = "started",
    /// An operation ended well.
    Success = "succeeded",
    /// An operation ended in a failure.
    Failure = "failed",
    /// An operation was cancelled.
    Cancel = "cancelled",
    /// A datagram was handed out to be sent.
    Transmit = "transmitted",
    /// The carrier refused a datagram for good.
    TransmitRefused = "transmit_refused",
    /// A retransmission timer ran out and the request was sent again.
    Retransmit = "retransmitted",
    /// An operation's deadline passed.
    Deadline = "deadline_passed",
    /// A session was opened.
    SessionOpen = "session_opened",
    /// An OPEN was sent again.
    OpenRetransmit = "open_retransmitted",
    /// A session turned out to be gone.
    SessionLost = "session_lost",
    /// A session was given up, and its server told once.
    SessionLeave = "session_left",
    /// A session was closed.
    SessionClose = "session_closed",
    /// An operation went on in a new session.
    Resumed = "resumed_in_new_session",
    /// An operation could not go on in a new session.
    ResumeUnsafe = "not_resumed_in_new_session",
    /// A server's place was given to another server.
    ServerEvict = "server_evicted",
    /// An operation waited for credit or for the window.
    Throttle = "throttled",
    /// A piece of a READ was joined.
    PieceJoin = "piece_joined",
    /// A piece of a READ came twice, or after its page was complete.
    PieceDuplicate = "piece_duplicate",
    /// A piece was of an older version of its page than others are.
    PieceOutdated = "piece_outdated",
    /// Pieces were dropped because a newer version of their page came.
    PageRestart = "page_restarted",
    /// A server had not all pieces of a train and got the missing ones.
    TrainRepair = "train_repaired",
    /// An operation was sent again after BUSY.
    BusyRetry = "busy_retried",
    /// An operation was sent again after OVERLOADED.
    OverloadedRetry = "overloaded_retried",
    /// The node a redirect led to sent the operation home, or did not answer in the time it told.
    RedirectReturn = "redirect_returned",
    /// The owner that a redirect led to let the operation wait.
    OwnerWait = "owner_waited",
    /// The home lets an operation wait for a lease to end.
    Queue = "queued",
    /// What waits at the home was repeated to keep its place.
    QueueRepeat = "queue_repeated",
    /// What waits kept the session's window from moving, and gave its place up.
    QueueLeave = "queue_left",
    /// An UPDATE was granted a lease.
    Grant = "granted",
    /// A grant ended before it was heard, and the UPDATE began anew.
    GrantLost = "grant_lost",
    /// A lease was extended.
    Renewal = "renewed",
    /// A lease to be committed, aborted or extended was not held any more.
    LeaseLost = "lease_lost",
    /// A piece of the last committed contents of a leased page was joined.
    StaleJoin = "stale_piece_joined",
    /// An operation followed its range to another node.
    MovedFollow = "moved_followed",
    /// A remembered move was wrong, and the home was asked again.
    MovedForget = "moved_forgotten",
    /// An anywhere-CREATE was confirmed.
    Confirm = "confirmed",
    /// The pages of an anywhere-CREATE were gone before they were confirmed, and it began anew.
    ConfirmLate = "confirmed_too_late",
    /// A reply to nothing that is outstanding (answered, given up, or a duplicate).
    ReplyStale = "reply_stale",
    /// A datagram that is no reply to this requester, or a reply that contradicts what was asked.
    ReplyUntrusted = "reply_untrusted",
    /// A trusted server's reply that breaks the protocol.
    ReplyViolation = "reply_violation",
}

/// How often each [`Event`] happened and each [`Status`] was heard.
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

    /// How many replies that were trusted carried a status (of a PARTIAL one: PARTIAL).
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
