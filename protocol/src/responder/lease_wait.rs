//! Waiting for leased pages (`docs/protocol.md`, section 10).

use core::ops::Range;

use bluebridge_wire::{Command, Datagram, Flags, address::LINE_PAGES};

use super::{
    Event, Refusal, Responder,
    admit::Execution,
    execute::{ReadPages, Wanted, no_data, wanted},
    lease::{line_bits, line_of},
    lease_queue::Waiter,
    record::{Progress, Record},
};
use crate::{Timestamp, store::PageStore};

/// The most replies to one waiter: the pieces of a line.
const WAITER_REPLIES: usize = bluebridge_wire::TRAIN_PIECES_MAX;

impl Responder {
    /// Lets a request wait for pages of one line if it may, or records its repetition; returns
    /// whether it waits.
    pub(super) fn wait(&mut self, execution: &Execution<'_>, pages: &Range<u64>) -> bool {
        self.wait_for(execution, line_of(pages.start), line_bits(pages))
    }

    /// The same for the pages of a line whose bits are set.
    pub(super) fn wait_for(&mut self, execution: &Execution<'_>, line: u64, pages: u8) -> bool {
        let Execution { request, command, slot, before } = *execution;
        let Datagram { from, header, .. } = *request.datagram;
        if !header.flags.contains(Flags::QUEUED) {
            return false;
        }
        let repeat_by = request.now + self.timers.lease_wait;
        let waiter = Waiter { line, pages, repeat_by, ..Waiter::of(request, slot, command) };
        if before.progress == Progress::Waiting
            && let Some(place) = self.queue.at(before.waiter)
            && place.line == line
        {
            *place = Waiter { since: place.since, ..waiter };
            self.counters.count(Event::WaiterRepeated);
        } else {
            // The same request may now map to other pages: one number never waits twice.
            self.stop_waiting(execution, Event::WaiterLeft);
            let of = (from.space, from.node);
            while !self.queue.has_room(of)
                && let Some(overdue) = self.queue.overdue(request.now)
            {
                self.remove_overdue(overdue);
            }
            let place = if self.queue.has_room(of) { self.queue.join(waiter) } else { None };
            let Some(place) = place else {
                self.counters.count(Event::WaiterRefused);
                return false;
            };
            let record =
                Record { command, progress: Progress::Waiting, waiter: place, ..Record::FRESH };
            self.keep(execution, record);
            self.counters.count(Event::WaiterJoined);
        }
        self.wake_by(waiter.repeat_by);
        self.wake_for_line(request.now, line);
        true
    }

    /// Removes a request from the queue, and its record, if it was waiting.
    pub(super) fn stop_waiting(&mut self, execution: &Execution<'_>, event: Event) {
        let Execution { request, slot, before, .. } = *execution;
        if before.progress == Progress::Waiting && self.queue.remove(before.waiter).is_some() {
            self.sessions.at(slot).forget(request.header().sequence);
            self.counters.count(event);
        }
    }

    /// Removes a waiter that was not repeated in time.
    fn remove_overdue(&mut self, place: u16) {
        self.take_out(place, Event::WaiterGone);
    }

    /// Removes a waiter from the queue, and the record of its request.
    fn take_out(&mut self, place: u16, event: Event) {
        let Some(waiter) = self.queue.at(place).copied() else { return };
        if self.is_of_its_session(place, &waiter) {
            self.sessions.at(waiter.session).forget(waiter.header.sequence);
        }
        self.queue.remove(place);
        self.counters.count(event);
    }

    /// Whether a waiter's session still has its record. The slot may belong to another client by
    /// now, whose session this waiter must not affect.
    fn is_of_its_session(&mut self, place: u16, waiter: &Waiter) -> bool {
        let session = self.sessions.at(waiter.session);
        let record = session.record(waiter.header.sequence);
        session.id() == waiter.header.session
            && record.progress == Progress::Waiting
            && record.waiter == place
    }

    /// Before a request is executed: the waiters for pages of its line come first, also when their
    /// leases expired just now. Returns whether all waiters that could be served were.
    pub(super) fn serve_waiters_before<S: PageStore + ?Sized>(
        &mut self,
        now: Timestamp,
        datagram: &Datagram<'_>,
        store: &mut S,
    ) -> bool {
        let place = self.place(&datagram.target);
        if let Some(location) = bluebridge_wire::Location::from_bits(place) {
            let line = line_of(location.page());
            self.remove_overdue_of_line(now, line);
            self.forget_given_up_of_line(line, store);
            self.end_expired_of_line(now, line, u8::MAX);
        }
        self.serve_waiters(now, store)
    }

    fn remove_overdue_of_line(&mut self, now: Timestamp, line: u64) {
        let mut next =
            self.queue.first(line).map(|(place, waiter)| (place, waiter.is_overdue(now)));
        while let Some((place, is_overdue)) = next {
            let behind = self.queue.behind(place, line);
            next = behind.map(|(place, waiter)| (place, waiter.is_overdue(now)));
            if is_overdue {
                self.remove_overdue(place);
            }
        }
    }

    /// Removes the waiters of a line whose requesters gave them up in a READ that a direct reader answered.
    fn forget_given_up_of_line<S: PageStore + ?Sized>(&mut self, line: u64, store: &mut S) {
        if store.shared().sessions.is_empty() {
            return;
        }
        let mut next = self.queue.first(line).map(|(place, waiter)| (place, *waiter));
        while let Some((place, waiter)) = next {
            let is_raised = self.is_of_its_session(place, &waiter)
                && self.take_low_water(waiter.session, store);
            // That may have removed any waiters of the session.
            let following =
                if is_raised { self.queue.first(line) } else { self.queue.behind(place, line) };
            next = following.map(|(place, waiter)| (place, *waiter));
        }
    }

    /// When time passed: removes waiters that were not repeated in time, and ends expired leases
    /// that others wait for.
    pub(super) fn end_awaited(&mut self, now: Timestamp) {
        let mut place = 0;
        while !self.queue.is_empty() && place < self.limits.wait_count {
            if let Some(&mut waiter) = self.queue.at(place) {
                let Waiter { line, pages, .. } = waiter;
                if waiter.is_overdue(now) {
                    self.remove_overdue(place);
                }
                self.end_expired_of_line(now, line, pages);
            }
            place += 1;
        }
    }

    fn end_expired_of_line(&mut self, now: Timestamp, line: u64, bits: u8) {
        for page in pages_of_line(line, bits) {
            self.end_if_expired(now, page);
        }
    }

    /// The first deadline of a waiter, or of a lease that it waits for; `now` if a waiter can be
    /// served.
    pub(super) fn next_release(&self, now: Timestamp) -> Option<Timestamp> {
        if self.queue.is_empty() {
            return None;
        }
        if self.queue.ready().is_some() {
            return Some(now);
        }
        let deadlines = self.queue.iter().map(|waiter| waiter.repeat_by);
        let releases = self
            .queue
            .iter()
            .flat_map(|waiter| pages_of_line(waiter.line, waiter.pages))
            .filter_map(|page| self.leases.holder(now, page))
            .map(|lease| lease.expires_at);
        deadlines.chain(releases).min()
    }

    fn wake_for_line(&mut self, now: Timestamp, line: u64) {
        let leases = pages_of_line(line, u8::MAX).filter_map(|page| self.leases.holder(now, page));
        if let Some(expires_at) = leases.map(|lease| lease.expires_at).min() {
            self.wake_by(expires_at);
        }
    }

    /// Serves waiters whose pages are free, as far as there is room for replies; returns whether
    /// there was enough.
    pub(super) fn serve_waiters<S: PageStore + ?Sized>(
        &mut self,
        now: Timestamp,
        store: &mut S,
    ) -> bool {
        while let Some(line) = self.queue.ready() {
            if !self.serve_line(now, line, store) {
                self.wake_by(now);
                return false;
            }
            self.queue.clear_ready(line);
            if self.queue.first(line).is_some() {
                self.wake_for_line(now, line);
            }
        }
        true
    }

    /// Serves a line's waiters in order: a waiter does not get pages that are leased, or that an
    /// UPDATE in front of it waits for.
    fn serve_line<S: PageStore + ?Sized>(
        &mut self,
        now: Timestamp,
        line: u64,
        store: &mut S,
    ) -> bool {
        let mut blocked = self.leased_bits(now, line);
        let mut next = self.queue.first(line).map(|(place, waiter)| (place, *waiter));
        while let Some((place, waiter)) = next {
            next = self.queue.behind(place, line).map(|(place, waiter)| (place, *waiter));
            if waiter.is_overdue(now) {
                self.remove_overdue(place);
                continue;
            }
            if !self.is_of_its_session(place, &waiter) {
                self.take_out(place, Event::WaiterForgotten);
                continue;
            }
            if self.enter(waiter.session, store) {
                // Its requester gave up this waiter or others, and these are removed: begin again. Low water rises at
                // most once for each number that waits.
                blocked = self.leased_bits(now, line);
                next = self.queue.first(line).map(|(place, waiter)| (place, *waiter));
                self.leave(waiter.session, waiter.header.session, store);
                continue;
            }
            let has_room = self.serve_waiter(now, &waiter, &mut blocked, store);
            self.leave(waiter.session, waiter.header.session, store);
            if !has_room {
                return false;
            }
        }
        true
    }

    /// Serves a waiter if its pages are not blocked, and blocks those that it gets or waits for; returns whether there
    /// was room for its replies.
    fn serve_waiter<S: PageStore + ?Sized>(
        &mut self,
        now: Timestamp,
        waiter: &Waiter,
        blocked: &mut u8,
        store: &S,
    ) -> bool {
        let free = waiter.pages & !*blocked;
        let is_for_lease = waiter.is_for_lease();
        let is_next = if is_for_lease { free == waiter.pages } else { free != 0 };
        let has_room = self.replies.room() >= WAITER_REPLIES && self.replies.has_record_room();
        if is_next && !has_room {
            return false;
        }
        if is_next && is_for_lease {
            self.serve_waiting_lease(now, waiter, store);
            *blocked |= self.leased_bits(now, waiter.line);
        } else if is_next {
            self.serve_waiting_read(now, waiter, free, store);
        } else if is_for_lease {
            *blocked |= waiter.pages;
        }
        true
    }

    fn leased_bits(&self, now: Timestamp, line: u64) -> u8 {
        let leased =
            pages_of_line(line, u8::MAX).filter(|&page| self.leases.holder(now, page).is_some());
        leased.fold(0, |bits, page| bits | 1 << (page % LINE_PAGES as u64))
    }

    /// Executes a waiting UPDATE or TAKE again, from its last copy.
    fn serve_waiting_lease<S: PageStore + ?Sized>(
        &mut self,
        now: Timestamp,
        waiter: &Waiter,
        store: &S,
    ) {
        let datagram = waiter.datagram();
        let request = waiter.request(now, &datagram);
        let before = self.sessions.at(waiter.session).record(waiter.header.sequence);
        let execution = waiter.execution(&request, &before);
        match waiter.command {
            Command::Take => self.take(&execution, store),
            _ => self.update(&execution, store),
        }
    }

    /// Sends the free pages of a READ, and ends its waiting if no others remain.
    fn serve_waiting_read<S: PageStore + ?Sized>(
        &mut self,
        now: Timestamp,
        waiter: &Waiter,
        free: u8,
        store: &S,
    ) {
        let datagram = waiter.datagram();
        let request = &waiter.request(now, &datagram);
        let before = self.sessions.at(waiter.session).record(waiter.header.sequence);
        let execution = &waiter.execution(request, &before);
        let left = waiter.pages & !free;
        match self.queue.at(before.waiter) {
            Some(place) if left != 0 => place.pages = left,
            _ => self.stop_waiting(execution, Event::WaiterAnswered),
        }
        let found = no_data(request).map_err(Refusal::from).and_then(|()| {
            let cut = self.cut(execution)?;
            let bits = wanted(request, cut).unwrap_or(0);
            Ok(Wanted { cut, bits, local: self.resolve(request)? })
        });
        match found {
            Ok(wanted) => {
                let first = wanted.local.page();
                let freed = wanted.cut.parts().enumerate().filter(|&(number, _)| {
                    free & line_bits(&(first + number as u64..first + number as u64 + 1)) != 0
                });
                let bits = wanted.bits & freed.fold(0, |bits, (_, part)| bits | part.bits);
                self.read_pages(request, &Wanted { bits, ..wanted }, ReadPages::ALL, store);
            }
            Err(refusal) => self.refuse(request, refusal),
        }
    }
}

/// The pages of a line whose bits are set.
fn pages_of_line(line: u64, bits: u8) -> impl Iterator<Item = u64> {
    let first = line * LINE_PAGES as u64;
    (0..LINE_PAGES as u64).filter(move |number| bits & (1 << number) != 0).map(move |n| first + n)
}
