//! What happened, by name.

use bluebridge_wire::{DatagramError, Status};

use crate::events::events;

events! {
    "What a responder counts, beside its answers by status.";

    /// An allocation that an operator freed.
    AllocationPurged = "allocation_purged",
    /// An ALLOC_WRITE that was given up before its last piece came; its pages were freed.
    AllocationAbandoned = "allocation_abandoned",
    /// The answer of a mutating request was recorded.
    AnswerRecorded = "answer_recorded",
    /// A recorded answer was given again.
    AnswerRepeated = "answer_repeated",
    /// A request that had to wait until queued replies were sent.
    DrainFirst = "drain_first",
    /// Dropped: the CRC32C does not match.
    DropCrc = "drop_crc",
    /// Dropped: neither a request nor a reply.
    DropDirection = "drop_direction",
    /// Dropped: the asker's address is not an endpoint's own.
    DropEndpoint = "drop_endpoint",
    /// Dropped: the destination is not in the fabric.
    DropForeignDestination = "drop_foreign_destination",
    /// Dropped: the source is not in the fabric.
    DropForeignSource = "drop_foreign_source",
    /// Dropped: not a header of version 1.
    DropHeader = "drop_header",
    /// Dropped: a request sent to every node, which nobody answers.
    DropMulticast = "drop_multicast",
    /// Dropped: a notice, which a memory server has no use for.
    DropNotice = "drop_notice",
    /// Dropped: an option does not fit into the header.
    DropOptions = "drop_options",
    /// Dropped: a reply, though a responder asks nothing.
    DropReply = "drop_reply",
    /// Dropped: the source names no single node.
    DropSource = "drop_source",
    /// Dropped: the target is no fabric address, or carries a command.
    DropTarget = "drop_target",
    /// Dropped: the trailer is longer than the datagram.
    DropTrailer = "drop_trailer",
    /// Dropped: meant for another shard of this server.
    DropWrongShard = "drop_wrong_shard",
    /// The store refused to take pages back that it gave; the store is at fault.
    FreeRefused = "free_refused",
    /// A node's incarnation was forgotten, because it had no session for long.
    IncarnationForgotten = "incarnation_forgotten",
    /// A node came with a higher incarnation than before.
    IncarnationRaised = "incarnation_raised",
    /// A READ of a leased page got its last committed contents.
    LastCommittedRead = "last_committed_read",
    /// A page's lease ended by ABORT.
    LeaseAborted = "lease_aborted",
    /// An UPDATE was refused because its node or space has its share of leases.
    LeaseBeyondShare = "lease_beyond_share",
    /// A page's lease ended by COMMIT.
    LeaseCommitted = "lease_committed",
    /// An answer said that a lease is fought over.
    LeaseContended = "lease_contended",
    /// A page's lease ran out.
    LeaseExpired = "lease_expired",
    /// A page's lease was forgotten, because the page was freed or moved.
    LeaseForgotten = "lease_forgotten",
    /// A page was leased.
    LeaseGranted = "lease_granted",
    /// A COMMIT, ABORT or RENEW came when the lease was not held.
    LeaseNotHeld = "lease_not_held",
    /// A page's lease was renewed.
    LeaseRenewed = "lease_renewed",
    /// An UPDATE or RENEW that was answered came again.
    LeaseRepeated = "lease_repeated",
    /// A page's lease ended because its owner came with a higher incarnation.
    LeaseSuperseded = "lease_superseded",
    /// An UPDATE was refused because the table of leases is full.
    LeaseTableFull = "lease_table_full",
    /// A session's low-water mark moved up.
    LowWaterRaised = "low_water_raised",
    /// A notice was sent.
    NoticeSent = "notice_sent",
    /// An OPEN that came again.
    OpenRepeated = "open_repeated",
    /// A piece that was not kept because its node or space has its share of train buffers.
    PieceBeyondShare = "piece_beyond_share",
    /// A piece that was there already.
    PieceDuplicate = "piece_duplicate",
    /// A piece that was not kept because no train buffer was left.
    PiecePressed = "piece_pressed",
    /// A page of an operation over several was refused.
    PageRefused = "page_refused",
    /// A page that was written from the pieces of a train.
    PageWrittenJoined = "page_written_joined",
    /// A page that was written straight from its datagram.
    PageWrittenStraight = "page_written_straight",
    /// An anywhere-CREATE was refused because its node has its share of those that wait.
    ProvisionalBeyondShare = "provisional_beyond_share",
    /// An anywhere-CREATE was kept by CONFIRM.
    ProvisionalConfirmed = "provisional_confirmed",
    /// An anywhere-CREATE gave pages.
    ProvisionalCreated = "provisional_created",
    /// Pages that nobody confirmed were freed.
    ProvisionalFreed = "provisional_freed",
    /// An anywhere-CREATE was kept by another request on its pointer.
    ProvisionalKept = "provisional_kept",
    /// An anywhere-CREATE that came again.
    ProvisionalRepeated = "provisional_repeated",
    /// A datagram of good form and CRC.
    Received = "received",
    /// A request on a range that came from another node.
    ServedAdopted = "served_adopted",
    /// A session ended by CLOSE.
    SessionClosed = "session_closed",
    /// A session gave way to another node's.
    SessionEvicted = "session_evicted",
    /// A session ended by idleness.
    SessionIdle = "session_idle",
    /// A session began.
    SessionOpened = "session_opened",
    /// A session ended because its node came with a higher incarnation.
    SessionSuperseded = "session_superseded",
    /// A train began to be put together.
    TrainBegun = "train_begun",
    /// A train lost its buffers because its request is no longer wanted.
    TrainForgotten = "train_forgotten",
    /// A train lost its buffers to another.
    TrainPressed = "train_pressed",
    /// A train lost its buffers by time.
    TrainTimedOut = "train_timed_out",
    /// A request that waited was answered.
    WaiterAnswered = "waiter_answered",
    /// A request that waits is not wanted any more, or its session ended.
    WaiterForgotten = "waiter_forgotten",
    /// A request that waited was given up, because it did not come again in time.
    WaiterGone = "waiter_gone",
    /// A request began to wait for leased pages.
    WaiterJoined = "waiter_joined",
    /// A request came again that waits no more.
    WaiterLeft = "waiter_left",
    /// A request could not wait, because there is no room or its node has its share.
    WaiterRefused = "waiter_refused",
    /// A request that waits came again.
    WaiterRepeated = "waiter_repeated",
}

/// Counts since the start.
#[derive(Clone, Debug)]
pub struct Counters {
    events: [u64; Event::ALL.len()],
    answers: [u64; 256],
}

impl Default for Counters {
    fn default() -> Self {
        Self { events: [0; Event::ALL.len()], answers: [0; 256] }
    }
}

impl Counters {
    /// How often `event` happened.
    #[must_use]
    pub const fn event(&self, event: Event) -> u64 {
        self.events[event as usize]
    }

    /// Replies sent with `status`.
    #[must_use]
    pub const fn answers(&self, status: Status) -> u64 {
        self.answers[status as usize]
    }

    /// Every event with its count.
    pub fn events(&self) -> impl Iterator<Item = (Event, u64)> {
        Event::ALL.iter().map(|&event| (event, self.event(event)))
    }

    /// Every status with the number of its replies; all but OK are refusals.
    pub fn statuses(&self) -> impl Iterator<Item = (Status, u64)> {
        Status::ALL.iter().map(|&status| (status, self.answers(status)))
    }

    /// Replies of every status.
    #[must_use]
    pub fn answered(&self) -> u64 {
        self.answers.iter().sum()
    }

    pub(super) const fn count(&mut self, event: Event) {
        self.events[event as usize] += 1;
    }

    pub(super) const fn count_answer(&mut self, status: Status) {
        self.answers[status as usize] += 1;
    }

    pub(super) const fn count_drop(&mut self, error: DatagramError) {
        self.count(match error {
            DatagramError::Crc => Event::DropCrc,
            DatagramError::Direction => Event::DropDirection,
            DatagramError::Endpoint => Event::DropEndpoint,
            DatagramError::ForeignDestination => Event::DropForeignDestination,
            DatagramError::ForeignSource => Event::DropForeignSource,
            DatagramError::Options => Event::DropOptions,
            DatagramError::Target => Event::DropTarget,
            DatagramError::Trailer => Event::DropTrailer,
            // What later versions of the form refuse is about the header too.
            _ => Event::DropHeader,
        });
    }
}
