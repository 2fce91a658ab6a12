//! Counters of a responder's events.

use bluebridge_wire::{DatagramError, Status};

use crate::events::events;

events! {
    "Events that a responder counts, besides its replies by status.";

    /// An allocation that an operator freed.
    AllocationPurged = "allocation_purged",
    /// An ALLOC_WRITE that was abandoned before its last piece arrived; its pages were freed.
    AllocationAbandoned = "allocation_abandoned",
    /// The reply to a mutating request was recorded.
    ReplyRecorded = "reply_recorded",
    /// A recorded reply was sent again.
    ReplyRepeated = "reply_repeated",
    /// A request that had to wait until queued replies were sent.
    DrainFirst = "drain_first",
    /// Dropped: the CRC32C does not match.
    DropCrc = "drop_crc",
    /// Dropped: neither a request nor a reply.
    DropDirection = "drop_direction",
    /// Dropped: the requester's address is not an endpoint's own.
    DropEndpoint = "drop_endpoint",
    /// Dropped: the destination is not in the fabric.
    DropForeignDestination = "drop_foreign_destination",
    /// Dropped: the source is not in the fabric.
    DropForeignSource = "drop_foreign_source",
    /// Dropped: not a header of version 1.
    DropHeader = "drop_header",
    /// Dropped: a multicast request, which gets no reply.
    DropMulticast = "drop_multicast",
    /// Dropped: a notice, which memory servers do not use.
    DropNotice = "drop_notice",
    /// Dropped: an option does not fit into the header.
    DropOptions = "drop_options",
    /// Dropped: a reply; a responder sends no requests.
    DropReply = "drop_reply",
    /// Dropped: the source is not a single node.
    DropSource = "drop_source",
    /// Dropped: the target is not a fabric address, or has a command.
    DropTarget = "drop_target",
    /// Dropped: the trailer is longer than the datagram.
    DropTrailer = "drop_trailer",
    /// Dropped: for another shard of this server.
    DropWrongShard = "drop_wrong_shard",
    /// An allocation of which parts are at other servers is being freed.
    FreeingBegun = "freeing_begun",
    /// It was freed.
    FreeingEnded = "freeing_ended",
    /// The DELETE of an allocation that is being freed was repeated.
    FreeingRepeated = "freeing_repeated",
    /// An earlier process was freeing an allocation, and this one goes on.
    FreeingResumed = "freeing_resumed",
    /// Pages of an allocation were freed for the server that frees all of it.
    PartFreed = "part_freed",
    /// The store refused to free pages that it had allocated; the store is at fault.
    FreeRefused = "free_refused",
    /// A node's incarnation was dropped, because the node had no session for long.
    IncarnationForgotten = "incarnation_forgotten",
    /// A node used a higher incarnation than before.
    IncarnationRaised = "incarnation_raised",
    /// A KEEP of a line that was the taker's already.
    KeepRepeated = "keep_repeated",
    /// A READ of a leased page got its last committed contents.
    LastCommittedRead = "last_committed_read",
    /// A page's lease ended by ABORT.
    LeaseAborted = "lease_aborted",
    /// An UPDATE was refused because its node or space has used its share of leases.
    LeaseBeyondShare = "lease_beyond_share",
    /// A page's lease ended by COMMIT.
    LeaseCommitted = "lease_committed",
    /// A reply reported a lease as contended.
    LeaseContended = "lease_contended",
    /// A page's lease expired.
    LeaseExpired = "lease_expired",
    /// A page's lease was removed, because the page was freed or moved.
    LeaseForgotten = "lease_forgotten",
    /// A page was leased.
    LeaseGranted = "lease_granted",
    /// A COMMIT, ABORT or RENEW of a lease that was not held.
    LeaseNotHeld = "lease_not_held",
    /// A page's lease was renewed.
    LeaseRenewed = "lease_renewed",
    /// A repeated UPDATE or RENEW whose reply was recorded.
    LeaseRepeated = "lease_repeated",
    /// A page's lease ended because its owner's node used a higher incarnation.
    LeaseSuperseded = "lease_superseded",
    /// An UPDATE was refused because the table of leases is full.
    LeaseTableFull = "lease_table_full",
    /// A page's lease ended because the migration for which it was granted was withdrawn.
    LeaseWithdrawn = "lease_withdrawn",
    /// A free line of contents that their home has lost was forgotten.
    LineDiscarded = "line_discarded",
    /// A line became the taker's by KEEP.
    LineKept = "line_kept",
    /// An own line that was lost elsewhere, and is free, is here again.
    LineReclaimed = "line_reclaimed",
    /// A line was leased by TAKE.
    LineTaken = "line_taken",
    /// A TAKE was about a line that is free as a whole, and that stays.
    FreeLineStays = "free_line_stays",
    /// A session's low-water mark moved up.
    LowWaterRaised = "low_water_raised",
    /// The controller allowed a migration.
    MigrationAllowed = "migration_allowed",
    /// A migration was closed, and its marks forgotten.
    MigrationClosed = "migration_closed",
    /// The permission for a migration was withdrawn.
    MigrationWithdrawn = "migration_withdrawn",
    /// A notice was sent.
    NoticeSent = "notice_sent",
    /// An OPEN was repeated.
    OpenRepeated = "open_repeated",
    /// A piece that was not kept because its node or space has used its share of train buffers.
    PieceBeyondShare = "piece_beyond_share",
    /// A duplicate piece.
    PieceDuplicate = "piece_duplicate",
    /// A piece that was not kept because no train buffer was left.
    PiecePressed = "piece_pressed",
    /// A page of an operation over several pages was refused.
    PageRefused = "page_refused",
    /// A page was written from the buffered pieces of a train.
    PageWrittenJoined = "page_written_joined",
    /// A page was written directly from its datagram.
    PageWrittenStraight = "page_written_straight",
    /// An anywhere-CREATE was refused because its node has used its share of unconfirmed ones.
    ProvisionalBeyondShare = "provisional_beyond_share",
    /// An anywhere-CREATE was confirmed by CONFIRM.
    ProvisionalConfirmed = "provisional_confirmed",
    /// An anywhere-CREATE allocated pages.
    ProvisionalCreated = "provisional_created",
    /// Unconfirmed pages were freed.
    ProvisionalFreed = "provisional_freed",
    /// An anywhere-CREATE was confirmed by another request on its pointer.
    ProvisionalKept = "provisional_kept",
    /// An anywhere-CREATE was repeated.
    ProvisionalRepeated = "provisional_repeated",
    /// A well-formed datagram with a valid CRC.
    Received = "received",
    /// A migration brought a line here.
    LineAdopted = "line_adopted",
    /// A request on an adopted range.
    ServedAdopted = "served_adopted",
    /// A session ended by CLOSE.
    SessionClosed = "session_closed",
    /// A session was evicted for another node's session.
    SessionEvicted = "session_evicted",
    /// A session ended because it was idle.
    SessionIdle = "session_idle",
    /// A session began.
    SessionOpened = "session_opened",
    /// A session ended because its node used a higher incarnation.
    SessionSuperseded = "session_superseded",
    /// The first piece of a train was buffered.
    TrainBegun = "train_begun",
    /// A train lost its buffers because its request is no longer outstanding.
    TrainForgotten = "train_forgotten",
    /// A train lost its buffers to another.
    TrainPressed = "train_pressed",
    /// A train lost its buffers because it timed out.
    TrainTimedOut = "train_timed_out",
    /// A request that waited got its reply.
    WaiterAnswered = "waiter_answered",
    /// A request that waits was given up by its requester, or its session ended.
    WaiterForgotten = "waiter_forgotten",
    /// A request that waited was removed, because it was not repeated in time.
    WaiterGone = "waiter_gone",
    /// A request began to wait for leased pages.
    WaiterJoined = "waiter_joined",
    /// A repeated request stopped waiting.
    WaiterLeft = "waiter_left",
    /// A request could not wait, because no room is left or its node has used its share.
    WaiterRefused = "waiter_refused",
    /// A request that waits was repeated.
    WaiterRepeated = "waiter_repeated",
}

/// Counts since the start.
#[derive(Clone, Debug)]
pub struct Counters {
    events: [u64; Event::ALL.len()],
    replies: [u64; 256],
}

impl Default for Counters {
    fn default() -> Self {
        Self { events: [0; Event::ALL.len()], replies: [0; 256] }
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
    pub const fn replies(&self, status: Status) -> u64 {
        self.replies[status as usize]
    }

    /// Every event with its count.
    pub fn events(&self) -> impl Iterator<Item = (Event, u64)> {
        Event::ALL.iter().map(|&event| (event, self.event(event)))
    }

    /// Every status with the number of its replies; all except OK are refusals.
    pub fn statuses(&self) -> impl Iterator<Item = (Status, u64)> {
        Status::ALL.iter().map(|&status| (status, self.replies(status)))
    }

    /// Replies of every status.
    #[must_use]
    pub fn reply_total(&self) -> u64 {
        self.replies.iter().sum()
    }

    pub(super) const fn count(&mut self, event: Event) {
        self.events[event as usize] += 1;
    }

    pub(super) const fn count_reply(&mut self, status: Status) {
        self.replies[status as usize] += 1;
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
            // Errors that later versions may add are counted as header errors.
            _ => Event::DropHeader,
        });
    }
}
