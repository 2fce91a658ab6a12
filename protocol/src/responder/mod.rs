//! The end that serves one shard of memory.
//!
//! Methods: [`Responder::handle_datagram`] takes a request, [`Responder::transmits`] or
//! [`Responder::poll_transmit`] return the replies, [`Responder::poll_timeout`] and
//! [`Responder::handle_timeout`] drive the timers. The data of a READ stays in the store's pages
//! until its replies are sent. A request that could change such a page, or has no room in the reply
//! queue, is not taken: [`DrainFirst`] requests that the caller sends the queued replies and
//! retries.
//!
//! Memory is bounded by [`Limits`] and allocated at the start, at the first use of a session's slot
//! and at the first OPEN in a space; never by a request alone.
//!
//! * `admit`: the checks before a command is executed, and their results (`Execution`); `execute`:
//!   the small commands, READ and atomics; `write`, `create`: the commands with pieces.
//! * `lease`, `lease_commit`, `lease_wait`: UPDATE, COMMIT, ABORT, RENEW and waiting; `lease_table`
//!   and `lease_queue` hold the leases and the waiters.
//! * `sessions`, `session_ids` and `session_index`: the sessions; `record`: the state of one request.
//! * `trains`: pieces of incomplete pages; `provisional`: unconfirmed pages; `shares`: how much of
//!   either a node may use.
//! * `giver` and `givings`: lines that other servers take; `adopted`: lines of others, and what an
//!   earlier process left of migrations; `ranges`: where pages are that moved; `freeing`: DELETE of
//!   allocations of which parts are elsewhere; `free_lines`: lines of others of which no page is allocated.
//! * `notice`: multicast notices; `replies`: the reply queue.
//! * `readers`: what is shared with readers that answer READs without the responder.

mod admit;
mod adopted;
mod config;
mod counters;
mod create;
mod cut;
mod execute;
mod free_lines;
mod freeing;
mod giver;
mod givings;
mod lease;
mod lease_commit;
mod lease_queue;
mod lease_table;
mod lease_wait;
mod notice;
mod operator;
mod provisional;
mod ranges;
mod readers;
mod record;
mod replies;
mod session_ids;
mod session_index;
mod sessions;
mod shares;
#[cfg(test)]
pub(crate) mod tests;
mod trains;
mod write;

use core::{ops::Range, time::Duration};

use bluebridge_wire::{
    Command, Datagram, DatagramError, Location, NodeId, Space, Status, address::Fields,
};

pub use crate::store::Allowance;
use crate::{
    Timestamp,
    store::{Access, PageStore},
};
pub use config::{Authority, Config, ConfigError, Limits, Timers};
pub use counters::{Counters, Event};
pub use free_lines::FreeLines;
pub use freeing::{Freeing, PartPlace};
pub use givings::AllowError;
pub use ranges::{Adopted, RangeError};
pub use replies::SealedReply;

use freeing::Freeings;
use givings::Givings;
use lease_queue::WaitQueue;
use lease_table::LeaseTable;
use provisional::ProvisionalTable;
use ranges::Ranges;
use readers::Readers;
use record::{NO_TRAIN, Progress, Record};
use replies::ReplyQueue;
use sessions::{Incarnations, RequesterId, SessionTable};
use trains::TrainPool;

/// Queued replies must be sent before the request can be taken; nothing was done.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("send the queued replies, then retry")]
pub struct DrainFirst;

/// Serves one shard of memory; see the module's documentation.
pub struct Responder {
    node: NodeId,
    incarnation: u32,
    home_space: Space,
    shard: u8,
    shard_count: u16,
    authority: Option<Authority>,
    piece_bytes: u16,
    limits: Limits,
    timers: Timers,
    incarnations: Incarnations,
    sessions: SessionTable,
    trains: TrainPool,
    provisional: ProvisionalTable,
    ranges: Ranges,
    givings: Givings,
    freeings: Freeings,
    leases: LeaseTable,
    queue: WaitQueue,
    /// Spaces in which notices are sent.
    notices: Vec<Space>,
    replies: ReplyQueue,
    counters: Counters,
    credit_pages: u16,
    /// No timer expires before this.
    wake_at: Option<Timestamp>,
    is_shutting_down: bool,
    /// Nothing is allocated.
    is_sealed: bool,
    /// Since when this process serves; `None` if that is not known.
    begun_at: Option<Timestamp>,
    /// The time before that in which no other process can have executed anything either.
    idle_before: Duration,
    readers: Readers,
}

impl Responder {
    /// A responder without sessions.
    ///
    /// # Errors
    /// [`ConfigError`] names the invalid setting.
    pub fn new(config: &Config) -> Result<Self, ConfigError> {
        config.check()?;
        let limits = config.limits;
        let seed = config.seed ^ (u64::from(config.incarnation) << 32);
        let home_space = config.spaces.first().copied().ok_or(ConfigError::Spaces)?;
        let mut responder = Self {
            node: config.node,
            incarnation: config.incarnation,
            home_space,
            shard: config.shard,
            shard_count: config.shard_count,
            authority: config.authority,
            piece_bytes: config.piece_bytes,
            limits,
            timers: config.timers,
            incarnations: Incarnations::new(&config.spaces),
            sessions: SessionTable::new(
                limits.session_count,
                limits.node_session_count,
                config.timers.session_idle,
                seed,
            ),
            trains: TrainPool::new(&limits, &config.spaces),
            provisional: ProvisionalTable::new(&limits),
            ranges: Ranges::new(limits.range_count),
            givings: Givings::new(limits.migration_count),
            freeings: Freeings::default(),
            leases: LeaseTable::new(&limits, &config.spaces, config.incarnation),
            queue: WaitQueue::new(&limits, config.spaces.len()),
            notices: Vec::with_capacity(config.spaces.len()),
            replies: ReplyQueue::new(usize::from(limits.reply_count)),
            counters: Counters::default(),
            credit_pages: 1,
            wake_at: None,
            is_shutting_down: false,
            is_sealed: false,
            begun_at: None,
            idle_before: Duration::ZERO,
            readers: Readers::default(),
        };
        responder.share_credit();
        Ok(responder)
    }

    /// This process serves from now on, and no other one does: with the incarnations in force that
    /// the store kept of an earlier process. Without it, requesters cannot know which of their
    /// requests no earlier process can have executed.
    ///
    /// If the store has direct readers, they may answer from now on.
    /// Lines that an earlier process gave away, or has of others, stay so; see [`PageStore::lines`] for those whose
    /// end is in doubt.
    pub fn begin<S: PageStore + ?Sized>(&mut self, now: Timestamp, store: &mut S) {
        self.begun_at = Some(now);
        self.ranges.begin(store.generation());
        store.fences(&mut |space, node, incarnation| {
            let requester = RequesterId { space, node, incarnation };
            self.incarnations.raise(&requester);
            self.incarnations.note(&requester, now);
        });
        self.resume_migrations(store);
        self.resume_freeings(store);
        self.begin_sharing(store);
    }

    /// Handles a received datagram from UDP port `source_port`.
    ///
    /// # Errors
    /// [`DrainFirst`] if replies must be sent before; then the datagram had no effect (requests
    /// that waited for its pages may have been served).
    pub fn handle_datagram<S: PageStore + ?Sized>(
        &mut self,
        now: Timestamp,
        source_port: u16,
        datagram: &Datagram<'_>,
        store: &mut S,
    ) -> Result<(), DrainFirst> {
        let taken = self.take_datagram(now, source_port, datagram, store);
        // Also without it: requests that waited may have got leases.
        self.update_readers(store);
        taken
    }

    fn take_datagram<S: PageStore + ?Sized>(
        &mut self,
        now: Timestamp,
        source_port: u16,
        datagram: &Datagram<'_>,
        store: &mut S,
    ) -> Result<(), DrainFirst> {
        let is_settled = self.queue.is_empty() || self.serve_waiters_before(now, datagram, store);
        let has_room =
            self.replies.room() >= Limits::REPLIES_PER_REQUEST && self.replies.has_record_room();
        if !is_settled || !has_room || self.may_tear(datagram) {
            self.counters.count(Event::DrainFirst);
            return Err(DrainFirst);
        }
        self.counters.count(Event::Received);
        self.admit(now, source_port, datagram, store);
        if !self.queue.is_empty() {
            self.serve_waiters(now, store);
        }
        Ok(())
    }

    /// Counts a datagram that [`Datagram::parse`] refused; it gets no reply.
    pub const fn count_malformed(&mut self, error: DatagramError) {
        self.counters.count_drop(error);
    }

    /// Removes the next reply from the queue: a reply that is not sent then counts as lost.
    pub fn poll_transmit<'a, S: PageStore + ?Sized>(
        &'a mut self,
        store: &'a S,
    ) -> Option<SealedReply<'a>> {
        self.replies.pop(store)
    }

    /// All queued replies, in order; [`Self::release`] those that were sent.
    pub fn transmits<'a, S: PageStore + ?Sized>(
        &'a self,
        store: &'a S,
    ) -> impl Iterator<Item = SealedReply<'a>> {
        self.replies.iter(store)
    }

    /// Removes the first `count` queued replies, because they were sent.
    pub fn release(&mut self, count: usize) {
        self.replies.release(count);
    }

    /// Queued replies.
    #[must_use]
    pub fn reply_count(&self) -> usize {
        self.replies.len()
    }

    /// Whether queued replies refer to pages of the store. Until they are sent the store must not
    /// be changed from outside; the responder itself returns [`DrainFirst`] before it would.
    #[must_use]
    pub const fn has_page_replies(&self) -> bool {
        self.replies.has_page_replies()
    }

    /// When [`Self::handle_timeout`] should be called; never too late, sometimes early.
    #[must_use]
    pub const fn poll_timeout(&self) -> Option<Timestamp> {
        self.wake_at
    }

    /// Ends idle sessions, trains without new pieces, unconfirmed pages, and expired leases that
    /// requests wait for. These requests are served, so there may be replies to send afterwards; if
    /// there was no room for all, [`Self::poll_timeout`] is due again at once.
    ///
    /// # Errors
    /// [`DrainFirst`] if replies must be sent before; then nothing was done.
    pub fn handle_timeout<S: PageStore + ?Sized>(
        &mut self,
        now: Timestamp,
        store: &mut S,
    ) -> Result<(), DrainFirst> {
        if self.wake_at.is_none_or(|wake_at| now < wake_at) {
            return Ok(());
        }
        if self.has_page_replies() {
            return Err(DrainFirst);
        }
        while let Some(entry) = self.provisional.take_expired(now) {
            self.free(entry.requester.space, entry.grant.location, entry.grant.tag, store);
            self.counters.count(Event::ProvisionalFreed);
        }
        while let Some(oldest) = self.trains.oldest() {
            if now - oldest.stored_at < self.timers.train {
                break;
            }
            self.drop_train(oldest);
            self.counters.count(Event::TrainTimedOut);
        }
        self.catch_up_idle(now, store);
        while let Some(slot) = self.sessions.idle_at(now, self.timers.session_idle) {
            self.end_session(slot, Event::SessionIdle, store);
        }
        self.wake_at = None;
        if self.queue.is_empty() {
            self.end_all_expired(now);
        } else {
            self.end_awaited(now);
            self.serve_waiters(now, store);
        }
        self.wake_at = [
            self.next_release(now),
            self.provisional.next_expiry(),
            self.trains.oldest().map(|oldest| oldest.stored_at + self.timers.train),
            self.sessions.oldest_last_seen().map(|last_seen| last_seen + self.timers.session_idle),
        ]
        .into_iter()
        .flatten()
        .min();
        self.update_readers(store);
        Ok(())
    }

    /// Grants or revokes the authority to serve; call [`Self::publish`] afterwards.
    pub const fn set_authority(&mut self, authority: Option<Authority>) {
        self.authority = authority;
    }

    /// Records that another node serves some own pages from now on: requests on them get MOVED. The store does not know
    /// of it, so direct readers answer nothing until [`Self::remove_moved`]. Call [`Self::publish`] afterwards, before the
    /// other node serves them.
    ///
    /// # Errors
    /// [`RangeError`]; nothing changed.
    pub fn add_moved(&mut self, pages: Range<u64>, to: NodeId) -> Result<(), RangeError> {
        self.ranges.order_moved(pages.clone(), to)?;
        self.forget_leases(pages);
        self.wake_at = Some(Timestamp::default());
        Ok(())
    }

    /// Removes a range that was recorded as moved; returns whether there was one.
    pub fn remove_moved(&mut self, pages: &Range<u64>) -> bool {
        self.ranges.remove_moved(pages)
    }

    /// Records that pages of another node are served here from now on.
    ///
    /// # Errors
    /// [`RangeError`]; nothing changed.
    pub fn add_adopted(&mut self, adopted: Adopted) -> Result<(), RangeError> {
        self.ranges.add_adopted(adopted)
    }

    /// Removes a range of another node; returns whether it was served here.
    pub fn remove_adopted(&mut self, adopted: &Adopted) -> bool {
        let is_removed = self.ranges.remove_adopted(adopted);
        if is_removed {
            let first = adopted.local_page;
            self.forget_leases(first..first.saturating_add(adopted.page_count));
            self.wake_at = Some(Timestamp::default());
        }
        is_removed
    }

    /// Turns notices of allocations and deletions in a space on or off; no effect for a space that
    /// is not served.
    pub fn set_notices(&mut self, space: Space, is_on: bool) {
        self.notices.retain(|&other| other != space);
        if is_on && self.incarnations.serves(space) {
            self.notices.push(space);
        }
    }

    /// Refuses all new requests with SHUTTING_DOWN from now on; call [`Self::publish`] afterwards.
    pub const fn begin_shutdown(&mut self) {
        self.is_shutting_down = true;
    }

    /// Allocates nothing from now on, or allocates again. New allocations are refused with OUT_OF_MEMORY; what was begun is
    /// finished.
    pub const fn set_sealed(&mut self, is_sealed: bool) {
        self.is_sealed = is_sealed;
    }

    /// No earlier process of the node can have executed any request that was sent in this time before this one began:
    /// requesters repeat such requests. For a deputy, whose node had no pages left and allocated none.
    pub const fn set_idle_before(&mut self, time: Duration) {
        self.idle_before = time;
    }

    /// Events so far.
    #[must_use]
    pub const fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Whether an id is an open session of a node: a serving loop uses it to decide what to serve
    /// first.
    #[must_use]
    pub fn has_session(&self, session: u64, space: Space, node: NodeId) -> bool {
        self.sessions.is_open(session, (space, node))
    }

    /// Shards of the server.
    #[must_use]
    pub const fn shard_count(&self) -> u16 {
        self.shard_count
    }

    /// Open sessions.
    #[must_use]
    pub fn session_count(&self) -> usize {
        self.sessions.count()
    }

    /// Pages that are leased; some may have expired and not be ended yet.
    #[must_use]
    pub const fn leased_pages(&self) -> usize {
        self.leases.running_count()
    }

    /// Requests that wait for leased pages.
    #[must_use]
    pub fn waiting_count(&self) -> usize {
        self.queue.count()
    }

    /// Unconfirmed pages of anywhere-CREATEs.
    #[must_use]
    pub const fn provisional_pages(&self) -> u64 {
        self.provisional.pages()
    }

    /// Whether taking the request now could change a page that a queued reply refers to.
    fn may_tear(&self, datagram: &Datagram<'_>) -> bool {
        if !self.replies.has_page_replies() {
            return false;
        }
        let zeroes = datagram.header.flags.contains(bluebridge_wire::Flags::ZERO);
        let may_hold = || self.replies.may_hold_line(self.place(&datagram.target));
        match datagram.command().command() {
            // What the taker does with the memory of a line that it keeps is not known here.
            Some(
                Command::Write
                | Command::Commit
                | Command::CompareSwap
                | Command::FetchAdd
                | Command::Keep,
            ) => may_hold(),
            Some(Command::Delete) if zeroes => may_hold(),
            // These may free pages, or fill pages whose pointer was guessed and read before the
            // reply.
            Some(
                Command::AllocWrite
                | Command::Close
                | Command::Create
                | Command::Delete
                | Command::Open,
            ) => true,
            _ => false,
        }
    }

    /// The location in the store: a page may have two addresses, an own and an adopted one.
    fn place(&self, target: &Fields) -> u64 {
        let adopted = Location::from_bits(target.location)
            .filter(|_| !self.is_own_node(target.node))
            .and_then(|location| self.ranges.local(target.node, location));
        adopted.map_or(target.location, Location::bits)
    }

    fn wake_by(&mut self, moment: Timestamp) {
        self.wake_at = Some(self.wake_at.map_or(moment, |wake_at| wake_at.min(moment)));
    }

    /// Whoever waits for a line is to be served, or to learn where it is.
    fn wake_waiters(&mut self, now: Timestamp) {
        if !self.queue.is_empty() {
            self.wake_by(now);
        }
    }

    fn share_credit(&mut self) {
        let sessions = u32::try_from(self.sessions.count()).unwrap_or(u32::MAX).max(1);
        let share = (self.limits.credit_pages / sessions).clamp(1, Limits::SESSION_CREDIT_PAGES);
        self.credit_pages = u16::try_from(share).unwrap_or(u16::MAX);
    }

    fn end_session<S: PageStore + ?Sized>(&mut self, slot: u16, event: Event, store: &mut S) {
        self.hide_session(slot, store);
        self.forget_below(slot, u64::MAX, store);
        let session = self.sessions.at(slot);
        self.incarnations.note(&session.requester, session.last_seen);
        self.sessions.close(slot);
        self.share_credit();
        self.counters.count(event);
    }

    /// Raises a session's low water, and ends all unfinished requests below it.
    fn forget_below<S: PageStore + ?Sized>(&mut self, slot: u16, to: u64, store: &mut S) {
        let space = self.sessions.at(slot).requester.space;
        while let Some(record) = self.sessions.at(slot).forget_below(to) {
            if record.progress == Progress::Waiting && self.queue.remove(record.waiter).is_some() {
                self.counters.count(Event::WaiterForgotten);
            }
            if record.progress != Progress::Pieces {
                continue;
            }
            if record.train != NO_TRAIN {
                self.trains.end(record.train);
                self.counters.count(Event::TrainForgotten);
            }
            if record.command == Command::AllocWrite {
                self.abandon(space, &record, store);
            }
        }
    }

    fn abandon<S: PageStore + ?Sized>(&mut self, space: Space, record: &Record, store: &mut S) {
        if let Some(grant) = record.grant() {
            self.free(space, grant.location, grant.tag, store);
            self.counters.count(Event::AllocationAbandoned);
        }
    }

    fn free<S: PageStore + ?Sized>(
        &mut self,
        space: Space,
        location: Location,
        tag: bluebridge_wire::Tag,
        store: &mut S,
    ) {
        let access = Access { location, length_bytes: 1, tag, space };
        match store.delete(access, 0) {
            Ok(pages) => {
                let first = location.page();
                self.forget_leases(first..first + u64::from(pages));
            }
            Err(_) => self.counters.count(Event::FreeRefused),
        }
    }

    fn is_own_node(&self, node: NodeId) -> bool {
        node == self.node
    }
}

/// A refusal, as the requester receives it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Refusal {
    status: Status,
    detail: u32,
    node: u16,
    /// Of a lease, if the refusal is about one.
    epoch: u64,
}

impl From<Status> for Refusal {
    fn from(status: Status) -> Self {
        Self { status, detail: 0, node: 0, epoch: 0 }
    }
}
