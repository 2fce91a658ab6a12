//! The giver of a migration: TAKE and KEEP, and the controller's orders (`docs/migration.md`).
//!
//! A TAKE leases a whole line to the taker, free pages included. KEEP sets the line's mark, and from then on the line
//! is the taker's: requests for it get MOVED. The mark is the answer to KEEP, so the same KEEP is answered in any
//! session, and nothing is recorded for it.

use core::ops::Range;

use bluebridge_wire::{
    Command, Header, LeaseEnd, Status,
    address::{LINE_BYTES, LINE_PAGES},
    line::{FENCES_MAX, LINE_RECORD_BYTES, LineRecord, Part, emit_line},
};

use super::{
    Event, Refusal, Responder,
    admit::{Execution, Request},
    execute::{memory, no_data},
    givings::AllowError,
    lease::{lease_record, line_of},
    ranges::RangeError,
    record::Record,
};
use crate::{
    Timestamp,
    store::{Allowance, PageStore},
};

/// The lease epoch in the reply to a TAKE of a line that is free as a whole: there is no lease.
const FREE: u64 = 0;

/// A line of a migration, by its first page in the store.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct GivenLine {
    migration: u64,
    first_page: u64,
}

impl GivenLine {
    const fn pages(self) -> Range<u64> {
        self.first_page..self.first_page + LINE_PAGES as u64
    }
}

impl Responder {
    /// Allows a migration: its taker may take the lines of the range, and no page of it is allocated from now on.
    /// Repeating the order changes nothing.
    ///
    /// # Errors
    /// [`AllowError`]; nothing changed.
    pub fn allow<S: PageStore + ?Sized>(
        &mut self,
        allowance: &Allowance,
        store: &mut S,
    ) -> Result<(), AllowError> {
        if !self.incarnations.serves(allowance.space) {
            return Err(AllowError::Space);
        }
        if self.ranges.has_moved_in(&allowance.pages) {
            return Err(AllowError::Overlap);
        }
        let lines = store.lines_mut();
        let fences = self.incarnations.fences(allowance.space);
        if self.givings.allow(allowance, fences, || lines.keep_allowance(allowance, true))? {
            lines.withhold(allowance.pages.clone(), true);
            self.counters.count(Event::MigrationAllowed);
        }
        Ok(())
    }

    /// Ends the permission: no further line becomes the taker's, and leases of lines that it took end. Pages that are
    /// not the taker's may be allocated again. Repeating the order changes nothing.
    ///
    /// # Errors
    /// [`AllowError::Unknown`]; nothing changed.
    pub fn withdraw<S: PageStore + ?Sized>(
        &mut self,
        now: Timestamp,
        migration: u64,
        store: &mut S,
    ) -> Result<(), AllowError> {
        let giving = self.givings.find_mut(migration).ok_or(AllowError::Unknown)?;
        if !core::mem::replace(&mut giving.is_open, false) {
            return Ok(());
        }
        let lines = store.lines_mut();
        // It is known, so there is room for it.
        let _ = lines.keep_allowance(&giving.allowance, false);
        for pages in giving.rows(false) {
            lines.withhold(pages, false);
        }
        let Allowance { pages, space, taker, .. } = giving.allowance.clone();
        let Self { leases, queue, counters, .. } = self;
        leases.end_withdrawn(now, (space, taker), &pages, |page| {
            counters.count(Event::LeaseWithdrawn);
            queue.make_ready(line_of(page));
        });
        self.wake_by(now);
        self.counters.count(Event::MigrationWithdrawn);
        self.update_readers(store);
        Ok(())
    }

    /// The rows of neighbouring pages of the store that are the taker's; `None` if the migration is not known.
    pub fn given(&self, migration: u64) -> Option<impl Iterator<Item = Range<u64>>> {
        self.givings.find(migration).map(|giving| giving.rows(true))
    }

    /// Forgets a migration that was withdrawn, after the home has learned who serves its lines: of own pages, this
    /// server remembers that they moved; it no longer serves those of others. Their memory may be used for others.
    ///
    /// # Errors
    /// [`AllowError::Open`], [`AllowError::Unknown`], [`AllowError::Replies`] as long as there are any, or
    /// [`AllowError::Full`] if there is no room for the ranges; nothing changed.
    pub fn close_migration<S: PageStore + ?Sized>(
        &mut self,
        migration: u64,
        store: &mut S,
    ) -> Result<(), AllowError> {
        let giving = self.givings.find(migration).ok_or(AllowError::Unknown)?;
        if giving.is_open {
            return Err(AllowError::Open);
        }
        // A reply refers to the bytes of its page until it is sent.
        if self.replies.len() > 0 {
            return Err(AllowError::Replies);
        }
        let (rows, to): (Vec<_>, _) = (giving.rows(true).collect(), giving.allowance.taker);
        self.ranges.give_away(&rows, to).map_err(|error| match error {
            RangeError::Full => AllowError::Full,
            RangeError::Overlap => AllowError::Overlap,
            RangeError::Unaligned => AllowError::Unaligned,
        })?;
        self.givings.remove(migration);
        let lines = store.lines_mut();
        lines.forget_allowance(migration);
        rows.into_iter().for_each(|pages| lines.clear_given(pages));
        self.counters.count(Event::MigrationClosed);
        self.publish(store);
        Ok(())
    }

    /// Whether any pages are another server's.
    pub(super) const fn has_given_any(&self) -> bool {
        self.ranges.has_moved() || !self.givings.is_empty()
    }

    /// Whether any of these pages are.
    pub(super) fn has_given(&self, pages: &Range<u64>) -> bool {
        self.ranges.has_moved_in(pages) || self.givings.marked_in(pages.clone()).is_some()
    }

    /// A TAKE without a recorded reply.
    pub(super) fn take<S: PageStore + ?Sized>(&mut self, execution: &Execution<'_>, store: &S) {
        let request = execution.request;
        let line = match self.line_to_give(request, store) {
            Ok(line) => line,
            Err(refusal) => {
                self.stop_waiting(execution, Event::WaiterAnswered);
                return self.conclude_refused(&execution.without_record(), refusal, store);
            }
        };
        let pages = line.pages();
        // Who waits for one of its pages waits for a lease on it, so a TAKE overtakes nobody.
        if self.leases.holder_in(request.now, pages.clone()).is_some() {
            if self.wait(execution, &pages) {
                return self.reply_busy(request, true, store);
            }
            self.stop_waiting(execution, Event::WaiterLeft);
            let refusal = Status::Busy.into();
            return self.conclude_refused(&execution.without_record(), refusal, store);
        }
        if self.is_free_at_home(request, line, store) {
            self.stop_waiting(execution, Event::WaiterAnswered);
            self.counters.count(Event::FreeLineStays);
            return self.conclude(execution, lease_record(request, Command::Take, FREE), store);
        }
        for page in pages.clone() {
            self.end_if_expired(request.now, page);
        }
        let expires_at = request.now + self.lease_time(request);
        let granted = self.grant_lease(request.now, request.requester(), pages, expires_at);
        self.stop_waiting(execution, Event::WaiterAnswered);
        match granted {
            Ok(epoch) => {
                self.counters.count(Event::LineTaken);
                self.conclude(execution, lease_record(request, Command::Take, epoch), store);
            }
            Err(refusal) => {
                self.conclude_refused(&execution.without_record(), refusal, store);
            }
        }
    }

    /// Whether a line is this server's own, and no page of it is allocated: there is nothing to take.
    fn is_free_at_home<S: PageStore + ?Sized>(
        &self,
        request: &Request<'_>,
        line: GivenLine,
        store: &S,
    ) -> bool {
        let is_free = |pages: &LineRecord| pages.iter().all(|page| page.part == Part::Free);
        self.is_own_node(request.datagram.target.node)
            && store.lines().line(line.first_page).is_some_and(|line| is_free(&line.pages))
    }

    /// The line that a TAKE may lease, apart from the leases of others.
    fn line_to_give<S: PageStore + ?Sized>(
        &self,
        request: &Request<'_>,
        store: &S,
    ) -> Result<GivenLine, Refusal> {
        let line = self.line_of_migration(request, store)?;
        let giving = self.givings.find(line.migration).ok_or(Status::StaleRangeEpoch)?;
        if giving.is_marked(line_of(line.first_page)) {
            let node = giving.allowance.taker.0;
            return Err(Refusal { node, ..Status::Moved.into() });
        }
        self.check_authority(request)?;
        if !giving.is_open {
            return Err(Status::StaleRangeEpoch.into());
        }
        if self.is_to_be_freed(request.now, &line.pages()) {
            return Err(Status::Busy.into());
        }
        // Pages of an incomplete ALLOC_WRITE still get bytes that the taker would not have, and those that wait for a
        // CONFIRM may still be freed.
        if !store.lines().line(line.first_page).ok_or(Status::OutOfRange)?.is_settled {
            return Err(Status::Busy.into());
        }
        Ok(line)
    }

    /// The line that a TAKE or KEEP is about, and the migration that it names.
    fn line_of_migration<S: PageStore + ?Sized>(
        &self,
        request: &Request<'_>,
        store: &S,
    ) -> Result<GivenLine, Refusal> {
        no_data(request)?;
        let location = memory(request)?;
        if !location.offset().is_multiple_of(LINE_BYTES as u64) {
            return Err(Status::Unaligned.into());
        }
        let header = request.header();
        if header.length as usize != LINE_BYTES {
            return Err(Status::BadLength.into());
        }
        let node = request.datagram.target.node;
        let is_own = self.is_own_node(node);
        let local = if is_own { Some(location) } else { self.ranges.local(node, location) };
        let local = local.ok_or(Status::WrongNode)?;
        if is_own && location.generation() != store.generation() {
            return Err(Status::StaleGeneration.into());
        }
        let giving = self.givings.find(header.page_version);
        let giving = giving.filter(|of| of.is_with(&request.requester(), header.range_epoch));
        let giving = giving.ok_or(Status::StaleRangeEpoch)?;
        if !giving.allowance.pages.contains(&local.page()) {
            return Err(Status::OutOfRange.into());
        }
        Ok(GivenLine { migration: giving.allowance.migration, first_page: local.page() })
    }

    /// Sends the lease and the pages of a line, as long as the lease holds.
    pub(super) fn reply_taken<S: PageStore + ?Sized>(
        &mut self,
        execution: &Execution<'_>,
        record: &Record,
        store: &S,
    ) {
        let request = execution.request;
        let found = self.line_of_migration(request, store).and_then(|line| {
            if request.datagram.target.location != record.location {
                return Err(Status::Malformed.into());
            }
            if let Some(giving) = self.givings.marked(line.first_page) {
                let node = giving.allowance.taker.0;
                return Err(Refusal { node, ..Status::Moved.into() });
            }
            if record.value != FREE {
                self.all_held(request, line.pages(), record.value)?;
            }
            let pages = store.lines().line(line.first_page).ok_or(Status::OutOfRange)?.pages;
            Ok((line, pages))
        });
        match found {
            Ok((line, pages)) => {
                let header = match record.value {
                    FREE => self.reply_header(request),
                    _ => self.lease_header(request, line.first_page),
                };
                self.push_record(request, &header, &emit_line(&pages));
            }
            Err(refusal) => self.refuse(request, refusal),
        }
    }

    /// KEEP: sets the mark of a line that is leased, or finds it set.
    pub(super) fn keep_line<S: PageStore + ?Sized>(
        &mut self,
        execution: &Execution<'_>,
        store: &mut S,
    ) {
        let request = execution.request;
        let kept = self.line_of_migration(request, store).and_then(|line| {
            self.mark(request, line, store)?;
            Ok(line)
        });
        match kept {
            Ok(_) => self.reply_kept(request),
            Err(refusal) => self.refuse(request, refusal),
        }
    }

    fn mark<S: PageStore + ?Sized>(
        &mut self,
        request: &Request<'_>,
        line: GivenLine,
        store: &mut S,
    ) -> Result<(), Refusal> {
        let number = line_of(line.first_page);
        let giving = self.givings.find(line.migration).ok_or(Status::StaleRangeEpoch)?;
        if giving.is_marked(number) {
            self.counters.count(Event::KeepRepeated);
            return Ok(());
        }
        self.check_authority(request)?;
        if !giving.is_open {
            let detail = LeaseEnd::Withdrawn.code();
            return Err(Refusal { detail, ..Status::LeaseLost.into() });
        }
        // All pages: each could have been lost alone.
        self.all_held(request, line.pages(), request.header().lease_epoch)?;
        if let Some(giving) = self.givings.find_mut(line.migration) {
            store.lines_mut().give(line.first_page);
            giving.mark(number);
        }
        self.forget_leases(line.pages());
        self.wake_waiters(request.now);
        self.counters.count(Event::LineKept);
        Ok(())
    }

    /// Answers a KEEP from the mark, with the fences that the taker must know before it serves the line.
    fn reply_kept(&mut self, request: &Request<'_>) {
        let received = *request.header();
        let space = request.datagram.target.space;
        let (fences, until, last) = self.givings.fences_since(space, received.detail);
        let mut data = [0; LINE_RECORD_BYTES];
        let count = fences.len().min(FENCES_MAX);
        let (places, _) = data.as_chunks_mut();
        for (place, fence) in places.iter_mut().zip(fences) {
            *place = fence.emit();
        }
        let bytes = count * bluebridge_wire::line::FENCE_BYTES;
        let header = Header {
            lease_epoch: received.lease_epoch,
            page_version: u64::from(last),
            detail: until,
            ..self.reply_header(request)
        };
        self.push_record(request, &header, &data[..bytes]);
    }

    fn push_record(&mut self, request: &Request<'_>, header: &Header, data: &[u8]) {
        let reply_path = self.reply_path(request, Status::Ok);
        self.counters.count_reply(Status::Ok);
        self.replies.push_record(reply_path, header, data);
    }
}
