//! Commands of an operator, outside of any session: freeing the allocations that a space or a
//! client left.

use core::ops::Range;

use bluebridge_wire::{Space, Status};

use super::{DrainFirst, Event, Responder, config::Limits};
use crate::{
    Timestamp,
    store::{Access, Grant, PageStore},
};

impl Responder {
    /// Whether a page of the store is of this server's own range, and served here.
    #[cfg(test)]
    pub(crate) fn is_own_page(&self, page: u64) -> bool {
        !self.has_given(&(page..page + 1)) && !self.ranges.is_adopted(page)
    }

    /// Whether any of the pages is leased.
    #[must_use]
    pub fn are_leased(&self, now: Timestamp, pages: Range<u64>) -> bool {
        self.leases.holder_in(now, pages).is_some()
    }

    /// Whether a page belongs to an unconfirmed anywhere-CREATE.
    #[must_use]
    pub fn is_provisional(&self, page: u64) -> bool {
        self.provisional.holding(page).is_some()
    }

    /// Frees an allocation of this server's own range as a DELETE by its space would; returns its
    /// pages, or why it was not freed: [`Status::Busy`] if it is leased or waits for its CONFIRM. If
    /// parts of it are at other servers, it is being freed from then on.
    ///
    /// # Errors
    /// [`DrainFirst`] if replies must be sent before; then nothing was done.
    pub fn purge<S: PageStore + ?Sized>(
        &mut self,
        now: Timestamp,
        space: Space,
        grant: Grant,
        store: &mut S,
    ) -> Result<Result<u32, Status>, DrainFirst> {
        if self.has_page_replies() || self.replies.room() < Limits::REPLIES_PER_REQUEST {
            return Err(DrainFirst);
        }
        let purged = self.try_purge(now, space, grant, store);
        if purged.is_ok() && !self.queue.is_empty() {
            self.serve_waiters(now, store);
        }
        self.update_readers(store);
        Ok(purged)
    }

    fn try_purge<S: PageStore + ?Sized>(
        &mut self,
        now: Timestamp,
        space: Space,
        grant: Grant,
        store: &mut S,
    ) -> Result<u32, Status> {
        let Grant { location, tag } = grant;
        let access = Access { location, length_bytes: 1, tag, space };
        if !self.has_authority(now) {
            return Err(Status::NoAuthority);
        }
        if self.ranges.is_adopted(location.page()) {
            return Err(Status::Moved);
        }
        if self.has_given_any() || self.is_freeing_at(location.page()) {
            let pages = store.lines().pages_of_allocation(access, 0)?;
            let is_scattered =
                self.has_given(&(location.page()..location.page() + u64::from(pages)));
            if is_scattered || self.is_freeing_at(location.page()) {
                let is_known = self.is_freeing_at(location.page());
                let purged = self.purge_scattered(now, (space, grant), store);
                if purged.is_ok() && !is_known {
                    self.counters.count(Event::AllocationPurged);
                }
                return purged;
            }
        }
        let pages = store.allocation(access, 0)?;
        if self.leases.holder_in(now, pages.clone()).is_some() || self.is_provisional(pages.start) {
            return Err(Status::Busy);
        }
        let freed = store.delete(access, 0)?;
        self.forget_leases(pages);
        self.notify_purged(space, grant, u64::from(freed));
        self.counters.count(Event::AllocationPurged);
        Ok(freed)
    }
}
