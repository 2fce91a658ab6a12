//! Direct readers (`crate::direct`): what the responder shows them, and what it learns from them.
//!
//! A reader raises the low water of a session and records that the session was seen. The responder takes both over
//! before it relies on its own values: low water before it executes a request of the session, the last time before it
//! ends the session for being idle. Without readers nothing here has an effect.

use super::{
    Event, Responder,
    admit::Request,
    sessions::{Full, Place},
};
use crate::{
    Timestamp,
    direct::{SessionFacts, ShardFacts, SharedSession},
    store::PageStore,
};

/// How often the sessions that may be evicted are searched again because readers saw some of them.
const EVICTION_ROUNDS: usize = 8;

/// What direct readers see of the shard.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Readers {
    /// Whether there may be any.
    is_shared: bool,
    /// Whether all leased pages were marked once; not before [`Responder::begin`].
    is_marked: bool,
    published: ShardFacts,
}

fn shared_session<S: PageStore + ?Sized>(store: &S, slot: u16) -> Option<&SharedSession> {
    store.shared().sessions.get(usize::from(slot))
}

impl Responder {
    /// Shows direct readers how the shard serves now; no effect if the store has none.
    ///
    /// [`Self::begin`], [`Self::handle_datagram`], [`Self::handle_timeout`] and [`Self::purge`] do it if something
    /// changed. Call it yourself after [`Self::set_authority`], [`Self::begin_shutdown`], [`Self::add_moved`] and
    /// [`Self::remove_moved`], before anything relies on the change: until then readers answer as before.
    pub fn publish<S: PageStore + ?Sized>(&mut self, store: &S) {
        self.readers.published = self.shard_facts();
        if let Some(shard) = store.shared().shard {
            shard.publish(&self.readers.published);
        }
    }

    fn shard_facts(&self) -> ShardFacts {
        // The store marks the pages of lines that it gave away; of other ranges readers know nothing.
        let is_marked = self.readers.is_marked && !self.ranges.has_unmarked();
        let is_open = is_marked && !self.is_shutting_down;
        let authority = self.authority.filter(|_| is_open);
        let open_until = authority
            .map_or(Timestamp::ZERO, |authority| authority.expires_at.unwrap_or(Timestamp::MAX));
        let range_epoch = self.authority.map_or(0, |authority| authority.range_epoch);
        ShardFacts { open_until, range_epoch, credit_pages: self.credit_pages }
    }

    /// Whether leased pages are marked for direct readers.
    pub(super) const fn marks_leases(&self) -> bool {
        self.readers.is_shared
    }

    /// Readers may answer from now on.
    pub(super) fn begin_sharing<S: PageStore + ?Sized>(&mut self, store: &S) {
        let shared = store.shared();
        // An earlier responder of the same store may have left some.
        for (slot, session) in (0..).zip(shared.sessions) {
            if !self.sessions.is_occupied(slot) {
                session.withdraw();
            }
        }
        let is_shared = shared.shard.is_some();
        self.leases.track_changes(is_shared.then_some(self.limits.lease_count));
        // Only the next call with a mutable store can mark pages that are leased already.
        let is_marked = is_shared && !self.leases.has_changes();
        self.readers = Readers { is_shared, is_marked, ..self.readers };
        self.publish(store);
    }

    /// Ends every call that may change what readers see, before its replies can be sent.
    pub(super) fn update_readers<S: PageStore + ?Sized>(&mut self, store: &mut S) {
        if !self.readers.is_shared {
            return;
        }
        while let Some((page, is_leased)) = self.leases.take_change() {
            store.set_leased(page, is_leased);
        }
        self.readers.is_marked = true;
        if self.shard_facts() != self.readers.published {
            self.publish(store);
        }
    }

    /// Shows readers a new session.
    pub(super) fn share_session<S: PageStore + ?Sized>(&mut self, slot: u16, store: &S) {
        let Some(shared) = shared_session(store, slot) else { return };
        let session = self.sessions.at(slot);
        shared.publish(&SessionFacts {
            id: session.id(),
            space: session.requester.space,
            node: session.requester.node,
            incarnation: session.requester.incarnation,
            piece_bytes: session.piece_bytes,
            takes_pages: session.takes_pages,
        });
    }

    /// Hides a session that ends from readers, and takes over when they last saw it.
    pub(super) fn hide_session<S: PageStore + ?Sized>(&mut self, slot: u16, store: &S) {
        if let Some(shared) = shared_session(store, slot) {
            shared.withdraw();
            self.sessions.see(slot, shared.last_seen());
        }
    }

    /// Readers pass the requests of an open session on from now until [`Self::leave`]. Takes over the low water to
    /// which they raised it; returns whether that ended requests.
    pub(super) fn enter<S: PageStore + ?Sized>(&mut self, slot: u16, store: &mut S) -> bool {
        let low_water = shared_session(store, slot).map(SharedSession::enter);
        low_water.is_some_and(|low_water| self.raise_low_water(slot, low_water, store))
    }

    /// Ends [`Self::enter`] for the session with this id.
    pub(super) fn leave<S: PageStore + ?Sized>(&mut self, slot: u16, id: u64, store: &S) {
        let Some(shared) = shared_session(store, slot) else { return };
        let session = self.sessions.at(slot);
        // A session that was closed is hidden, and its slot may be another's by now.
        if session.id() == id {
            shared.leave(session.low_water);
        }
    }

    /// Raises a session's low water, if that is lower; returns whether it was.
    pub(super) fn raise_low_water<S: PageStore + ?Sized>(
        &mut self,
        slot: u16,
        to: u64,
        store: &mut S,
    ) -> bool {
        let is_raised = to > self.sessions.at(slot).low_water;
        if is_raised {
            self.counters.count(Event::LowWaterRaised);
            self.forget_below(slot, to, store);
        }
        is_raised
    }

    /// Takes over the low water of an open session, to end requests that its requester gave up. It is no permission to
    /// execute others: that needs [`Self::enter`].
    pub(super) fn take_low_water<S: PageStore + ?Sized>(
        &mut self,
        slot: u16,
        store: &mut S,
    ) -> bool {
        let low_water = shared_session(store, slot).map(SharedSession::low_water);
        low_water.is_some_and(|low_water| self.raise_low_water(slot, low_water, store))
    }

    /// Takes over all that readers know of an open session; returns whether it was news.
    fn catch_up<S: PageStore + ?Sized>(&mut self, slot: u16, store: &mut S) -> bool {
        let last_seen = shared_session(store, slot).map(SharedSession::last_seen);
        let is_seen = last_seen.is_some_and(|last_seen| self.sessions.see(slot, last_seen));
        self.take_low_water(slot, store) || is_seen
    }

    /// Takes over what readers know of the sessions that seem to be idle.
    pub(super) fn catch_up_idle<S: PageStore + ?Sized>(&mut self, now: Timestamp, store: &mut S) {
        let shared_count = u16::try_from(store.shared().sessions.len()).unwrap_or(u16::MAX);
        for slot in 0..shared_count.min(self.limits.session_count) {
            if self.sessions.is_idle_at(slot, now, self.timers.session_idle) {
                self.catch_up(slot, store);
            }
        }
    }

    /// The slot for a new session, by what readers know too if a session must be evicted for it.
    pub(super) fn place_session<S: PageStore + ?Sized>(
        &mut self,
        request: &Request<'_>,
        store: &mut S,
    ) -> Result<Place, Full> {
        let requester = request.requester();
        let place = self.sessions.place(request.now, &requester);
        if matches!(place, Ok(Place::Vacant)) || store.shared().sessions.is_empty() {
            return place;
        }
        for _ in 0..EVICTION_ROUNDS {
            let mut is_changed = false;
            for slot in self.sessions.candidates(&requester) {
                is_changed |= self.catch_up(slot, store);
            }
            if !is_changed {
                break;
            }
        }
        self.sessions.place(request.now, &requester)
    }
}
