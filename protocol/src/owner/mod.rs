//! The owner's end of redirects and notices: a state machine beside the requester, for an
//! endpoint's service thread (protocol, section 10).
//!
//! The switch may redirect requests for a page that this endpoint has a lease on to the endpoint.
//! An [`Owner`] knows the leases that its endpoint reported ([`Owner::hold`], [`Owner::release`])
//! and replies with: whether the page is leased, how long a request may wait, or, if the caller
//! supplied them, the last committed contents. It executes no request; for unknown pages it refers
//! the requester to the home.
//!
//! A step is: pass received datagrams to [`Owner::handle_datagram`] and the time to
//! [`Owner::handle_timeout`]; send the datagrams of [`Owner::poll_transmit`] until it returns
//! `None`; wait until [`Owner::poll_timeout`]. All memory is allocated when the owner is made.
//!
//! * `table`: the pages that are held; `request`: how requests are handled; `replies`: queued
//!   replies and waiting requests.
//! * `notice`: multicast notices of memory nodes.

mod config;
mod counters;
mod notice;
mod replies;
mod request;
mod table;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use bluebridge_wire::{
    Command, Datagram, Header, NodeId, Pointer, Status,
    address::PAGE_BYTES,
    header::{HEADER_BYTES, LEASE_EPOCH_MAX},
};

pub use crate::responder::SealedReply;
pub use config::{OwnerConfig, Policy};
pub use counters::{Counters, Event};
pub use notice::{Notice, NoticeKind};

use crate::Timestamp;
use replies::{Reply, Waiter};
use table::{Page, Table};

/// The contents of a page when it was leased: a part of it, or all.
#[derive(Clone, Copy, Debug)]
pub struct Committed<'a> {
    /// Where in the page the bytes begin.
    pub start: usize,
    /// The bytes; they end inside of the page.
    pub bytes: &'a [u8],
}

/// Why a lease was not recorded; requests for its page are referred to the home.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum HoldError {
    /// Too many leases are held; raise `lease_count`, or release leases earlier.
    #[error("too many leases are held at once; raise `lease_count`")]
    Full,
    /// A later lease on the page is recorded.
    #[error("the page is held under a later epoch")]
    Older,
    /// The pointer is of another space, or the epoch is not valid for a lease.
    #[error("not a lease in this space")]
    Space,
}

/// The owner's state machine; see the module's documentation.
#[derive(Debug)]
pub struct Owner {
    config: OwnerConfig,
    table: Table,
    /// In order of arrival.
    waiters: VecDeque<Waiter>,
    replies: VecDeque<Reply>,
    counters: Counters,
    /// Not after the end of any request's waiting time.
    next_timeout: Option<Timestamp>,
    /// The head of the reply that was last returned.
    head: [u8; HEADER_BYTES],
}

impl Owner {
    /// An owner that holds no lease; all memory is allocated now.
    #[must_use]
    pub fn new(config: OwnerConfig) -> Self {
        let reply_limit = usize::from(config.reply_count) + usize::from(config.wait_count);
        Self {
            table: Table::new(config.lease_count, config.contents_count),
            waiters: VecDeque::with_capacity(usize::from(config.wait_count)),
            replies: VecDeque::with_capacity(reply_limit),
            counters: Counters::default(),
            next_timeout: None,
            head: [0; HEADER_BYTES],
            config,
        }
    }

    /// Records a lease on the page of a pointer, or its extension under the same epoch.
    ///
    /// `policy` is the configured one if `None`. `committed` is the page's contents when it was
    /// leased; it is copied, and served under [`Policy::Serve`] alone. If there is no room for it,
    /// the lease is recorded without it.
    ///
    /// # Errors
    /// If the lease is not recorded; nothing was changed.
    pub fn hold(
        &mut self,
        now: Timestamp,
        page: Pointer,
        epoch: u64,
        expires_at: Timestamp,
        policy: Option<Policy>,
        committed: Option<Committed<'_>>,
    ) -> Result<(), HoldError> {
        if page.space != self.config.space || epoch == 0 || epoch > LEASE_EPOCH_MAX {
            return Err(HoldError::Space);
        }
        let page = Page::of(page);
        let known = self.table.find(page).map(|held| held.epoch);
        if known.is_some_and(|known| known > epoch) {
            return Err(HoldError::Older);
        }
        if self.table.is_full() && known.is_none() {
            self.sweep(now);
        }
        let policy = policy.unwrap_or(self.config.policy);
        if !self.table.hold(page, epoch, expires_at, policy) {
            self.counters.count(Event::HoldFull);
            return Err(HoldError::Full);
        }
        self.counters.count(Event::Hold);
        if known.is_some_and(|known| known < epoch) {
            self.end_waiting(page, epoch);
        }
        if policy == Policy::Serve
            && let Some(Committed { start, bytes }) = committed
            && !(start < PAGE_BYTES && self.table.keep(page, start, bytes))
        {
            self.counters.count(Event::ContentsFull);
        }
        Ok(())
    }

    /// Removes a lease that ended, by COMMIT or ABORT: requests that wait for it are referred to
    /// the home. False if it is not held.
    pub fn release(&mut self, page: Pointer, epoch: u64) -> bool {
        let page = Page::of(page);
        let held = self.table.find(page).is_some_and(|held| held.epoch == epoch);
        if held {
            self.counters.count(Event::Release);
            self.table.remove(page);
            self.end_waiting(page, u64::MAX);
        }
        held
    }

    /// Handles a datagram that was received on the well-known port, from a UDP port.
    ///
    /// Anything else than a redirected request or a notice is dropped and counted. `is_server` says whether a node is a
    /// memory server of the space: pages may have moved to it, so it sends notices about them.
    pub fn handle_datagram(
        &mut self,
        now: Timestamp,
        source_port: u16,
        datagram: &Datagram<'_>,
        is_server: impl FnOnce(NodeId) -> bool,
    ) -> Option<Notice> {
        if datagram.is_reply() {
            self.counters.count(Event::DropReply);
            return None;
        }
        let space = self.config.space;
        if [datagram.from.space, datagram.to.space, datagram.target.space] != [space; 3] {
            self.counters.count(Event::DropSpace);
            return None;
        }
        match datagram.command().command() {
            Some(Command::Invalidate | Command::Notice) => return self.notice(datagram, is_server),
            // A request that bypasses redirects was not redirected.
            _ if datagram.command().is_home() => self.counters.count(Event::DropCommand),
            Some(
                Command::CompareSwap
                | Command::Delete
                | Command::FetchAdd
                | Command::Read
                | Command::Update
                | Command::Write,
            ) => self.request(now, source_port, datagram),
            _ => self.counters.count(Event::DropCommand),
        }
        None
    }

    /// The latest time to call [`Self::handle_timeout`]; `None` if no request waits.
    #[must_use]
    pub const fn poll_timeout(&self) -> Option<Timestamp> {
        self.next_timeout
    }

    /// Ends the waiting of requests whose time passed by `now`.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        if self.next_timeout.is_none_or(|timeout| now < timeout) {
            return;
        }
        self.next_timeout = None;
        for _ in 0..self.waiters.len() {
            let Some(waiter) = self.waiters.pop_front() else { break };
            let held = self.table.find(waiter.page).copied();
            if held.is_some_and(|held| held.expires_at <= now) {
                self.counters.count(Event::Expire);
                self.table.remove(waiter.page);
            }
            let runs = held.is_some_and(|held| held.expires_at > now);
            if !runs {
                self.notify_end(&waiter);
            } else if waiter.until <= now {
                // The requester contacts the home on its own timer.
                self.counters.count(Event::WaitOver);
            } else {
                self.arm(waiter.until);
                self.waiters.push_back(waiter);
            }
        }
    }

    /// Leases that are held, some of which may have expired.
    #[must_use]
    pub const fn held_count(&self) -> usize {
        self.table.count()
    }

    /// Requests that wait.
    #[must_use]
    pub fn waiting_count(&self) -> usize {
        self.waiters.len()
    }

    /// Events so far.
    #[must_use]
    pub const fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The configuration.
    #[must_use]
    pub const fn config(&self) -> &OwnerConfig {
        &self.config
    }

    /// Removes expired leases.
    fn sweep(&mut self, now: Timestamp) {
        let mut from = 0;
        while let Some((place, page)) = self.table.expired(now, from) {
            // Removing an entry may move a later one into its place, but none before it.
            from = place;
            self.counters.count(Event::Expire);
            self.table.remove(page);
            self.end_waiting(page, u64::MAX);
        }
    }

    /// Refers requests that wait for a page under an epoch below `below` to the home.
    fn end_waiting(&mut self, page: Page, below: u64) {
        for _ in 0..self.waiters.len() {
            let Some(waiter) = self.waiters.pop_front() else { break };
            if waiter.page == page && waiter.epoch < below {
                self.notify_end(&waiter);
            } else {
                self.waiters.push_back(waiter);
            }
        }
    }

    fn notify_end(&mut self, waiter: &Waiter) {
        self.counters.count(Event::WaitEnd);
        self.reply(waiter.reply_to, Status::NotOwner, Header::default());
    }

    /// Records a waiting time that ends at `when`.
    fn arm(&mut self, when: Timestamp) {
        self.next_timeout = Some(self.next_timeout.map_or(when, |timeout| timeout.min(when)));
    }
}
