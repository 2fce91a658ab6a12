//! UPDATE, ABORT and RENEW, and the effect of leases on other requests (`docs/protocol.md`, section
//! 10). The table is in [`super::lease_table`], COMMIT in [`super::lease_commit`], waiting in
//! [`super::lease_wait`].

use core::{ops::Range, time::Duration};

use bluebridge_wire::{
    Command, Flags, Header, LeaseEnd, Location, Status,
    address::{Fields, LINE_PAGES, PAGE_SHIFT},
};

use super::{
    Event, Refusal, Responder,
    admit::{Execution, Request},
    config::PIECE_BYTES_MAX,
    cut::Pieces,
    execute::{Wanted, access, memory, no_data, part_access, wanted},
    lease_table::NoRoom,
    record::{Progress, Record},
    replies::ReplyPath,
    sessions::RequesterId,
};
use crate::{Timestamp, store::PageStore};

pub(super) const fn line_of(page: u64) -> u64 {
    page / LINE_PAGES as u64
}

/// The pages of the store that an operation at `local` covers.
pub(super) fn pages_of(local: Location, cut: Pieces) -> Range<u64> {
    local.page()..local.page() + cut.page_count() as u64
}

/// The same pages as bits in their line.
pub(super) fn line_bits(pages: &Range<u64>) -> u8 {
    pages.clone().fold(0, |bits, page| bits | 1 << (page % LINE_PAGES as u64))
}

impl Responder {
    /// An UPDATE without a recorded reply.
    pub(super) fn update<S: PageStore + ?Sized>(&mut self, execution: &Execution<'_>, store: &S) {
        let Execution { request, before, .. } = *execution;
        let cut = match self.cut_of_update(execution) {
            Ok((cut, _)) => cut,
            Err(status) => return self.conclude_refused(execution, status.into(), store),
        };
        let place = (before.progress == Progress::Waiting).then_some(before.waiter);
        let refusal = match self.grant(request, cut, place, store) {
            Ok(record) => {
                self.stop_waiting(execution, Event::WaiterAnswered);
                return self.conclude(execution, record, store);
            }
            Err(refusal) => refusal,
        };
        if refusal.status == Status::Busy
            && let Ok(local) = self.resolve(request)
            && self.wait(execution, &pages_of(local, cut))
        {
            return self.reply_busy(request, true, store);
        }
        let is_left = refusal.status == Status::Busy;
        let event = if is_left { Event::WaiterLeft } else { Event::WaiterAnswered };
        self.stop_waiting(execution, event);
        self.conclude_refused(&execution.without_record(), refusal, store);
    }

    fn cut_of_update(&mut self, execution: &Execution<'_>) -> Result<(Pieces, u32), Status> {
        no_data(execution.request)?;
        let cut = self.cut(execution)?;
        Ok((cut, wanted(execution.request, cut).ok_or(Status::Malformed)?))
    }

    /// Leases all pages of an UPDATE, or none; `place` is the request's place in the queue.
    pub(super) fn grant<S: PageStore + ?Sized>(
        &mut self,
        request: &Request<'_>,
        cut: Pieces,
        place: Option<u16>,
        store: &S,
    ) -> Result<Record, Refusal> {
        let now = request.now;
        let local = self.resolve(request)?;
        for part in cut.parts() {
            store.check(part_access(request, local, part))?;
        }
        let pages = pages_of(local, cut);
        let line = line_of(pages.start);
        let is_patient = request.header().flags.contains(Flags::QUEUED);
        // Nothing overtakes a TAKE that waited for long: leases that overlap could keep it waiting for ever.
        let is_in_order = is_patient || self.is_take_due(now, line);
        let wanted = if is_in_order { self.queue.wanted(now, line, place) } else { 0 };
        let is_leased = self.leases.holder_in(now, pages.clone()).is_some();
        if is_leased || wanted & line_bits(&pages) != 0 || self.is_to_be_freed(now, &pages) {
            return Err(Status::Busy.into());
        }
        for page in pages.clone() {
            self.end_if_expired(now, page);
        }
        let expires_at = now + self.lease_time(request);
        let epoch = self.grant_lease(now, request.requester(), pages, expires_at)?;
        Ok(lease_record(request, Command::Update, epoch))
    }

    /// Leases pages that are not leased, and returns the epoch.
    pub(super) fn grant_lease(
        &mut self,
        now: Timestamp,
        owner: RequesterId,
        pages: Range<u64>,
        expires_at: Timestamp,
    ) -> Result<u64, Refusal> {
        let granted = self.leases.grant(now, owner, pages.clone(), expires_at).or_else(|_| {
            self.end_some_expired(now);
            self.leases.grant(now, owner, pages.clone(), expires_at)
        });
        let epoch = granted.map_err(|no_room| {
            self.counters.count(match no_room {
                NoRoom::Node | NoRoom::Space => Event::LeaseBeyondShare,
                NoRoom::Table => Event::LeaseTableFull,
            });
            Status::Overloaded
        })?;
        pages.for_each(|_| self.counters.count(Event::LeaseGranted));
        Ok(epoch)
    }

    /// Whether a TAKE has waited for a line as long as a lease may last, so that it is next.
    fn is_take_due(&self, now: Timestamp, line: u64) -> bool {
        self.queue.has_take_waiting_for(now, line, self.timers.lease_max)
    }

    /// The time of the lease that an UPDATE, RENEW or TAKE gets.
    pub(super) fn lease_time(&self, request: &Request<'_>) -> Duration {
        match request.header().lease_remaining_ms {
            0 => self.timers.lease_default,
            millis => Duration::from_millis(u64::from(millis)).min(self.timers.lease_max),
        }
    }

    /// Sends the grant of an UPDATE, as long as the lease holds. The current contents are those of
    /// the grant, because no other endpoint changes them.
    pub(super) fn reply_grant<S: PageStore + ?Sized>(
        &mut self,
        execution: &Execution<'_>,
        record: &Record,
        store: &S,
    ) {
        let request = execution.request;
        let found = self.cut_of_update(execution).map_err(Refusal::from).and_then(|(cut, bits)| {
            let local = self.same_and_held(request, cut, record, store)?;
            Ok(Wanted { cut, bits, local })
        });
        let Wanted { cut, bits, local } = match found {
            Ok(found) => found,
            Err(refusal) => return self.refuse(request, refusal),
        };
        let header = self.lease_header(request, local.page());
        let reply_path = self.reply_path(request, Status::Ok);
        for part in cut.parts() {
            let header = Header { target: target_at(request, part.offset), ..header };
            let access = part_access(request, local, part);
            self.push_part(reply_path, &header, &cut, part.bits & bits, access, store);
        }
    }

    /// ABORT: releases without writing.
    pub(super) fn abort<S: PageStore + ?Sized>(
        &mut self,
        execution: &Execution<'_>,
        store: &S,
    ) -> Result<Record, Refusal> {
        let request = execution.request;
        no_data(request)?;
        let cut = self.cut(execution)?;
        let epoch = request.header().lease_epoch;
        let local = self.held(request, cut, epoch, store)?;
        Ok(self.release_lease(request, pages_of(local, cut), Command::Abort))
    }

    /// Ends leases that are held, and returns the reply to COMMIT or ABORT.
    pub(super) fn release_lease(
        &mut self,
        request: &Request<'_>,
        pages: Range<u64>,
        command: Command,
    ) -> Record {
        let (how, event) = match command {
            Command::Commit => (LeaseEnd::Committed, Event::LeaseCommitted),
            _ => (LeaseEnd::Aborted, Event::LeaseAborted),
        };
        let mut record = lease_record(request, command, request.header().lease_epoch);
        record.node = request.requester().node.0;
        self.queue.make_ready(line_of(pages.start));
        for page in pages {
            record.contended |= self.leases.end(page, how);
            self.counters.count(event);
        }
        record
    }

    /// RENEW: sets a new deadline.
    pub(super) fn renew<S: PageStore + ?Sized>(
        &mut self,
        execution: &Execution<'_>,
        store: &S,
    ) -> Result<Record, Refusal> {
        let request = execution.request;
        no_data(request)?;
        let cut = self.cut(execution)?;
        let epoch = request.header().lease_epoch;
        let local = self.held(request, cut, epoch, store)?;
        let expires_at = request.now + self.lease_time(request);
        // Otherwise a TAKE could wait for ever. The reply says how much time is left.
        let is_extended = !self.is_take_due(request.now, line_of(local.page()))
            && !self.is_to_be_freed(request.now, &pages_of(local, cut));
        for page in pages_of(local, cut).filter(|_| is_extended) {
            self.leases.renew(page, expires_at);
            self.counters.count(Event::LeaseRenewed);
        }
        if !self.queue.is_empty() {
            self.wake_by(expires_at);
        }
        Ok(lease_record(request, Command::Renew, epoch))
    }

    /// Sends the remaining time of a renewed lease, also for a repeated RENEW: its sender counts
    /// from when it sent this copy.
    pub(super) fn reply_renewal<S: PageStore + ?Sized>(
        &mut self,
        execution: &Execution<'_>,
        record: &Record,
        store: &S,
    ) {
        let request = execution.request;
        let held = self
            .cut(execution)
            .map_err(Refusal::from)
            .and_then(|cut| self.same_and_held(request, cut, record, store));
        match held {
            Ok(local) => {
                let header = self.lease_header(request, local.page());
                let lease = self.leases.holder(request.now, local.page());
                let contended = lease.is_some_and(|lease| lease.contended_at.is_some());
                self.push_lease_reply(request, Status::Ok, &header, contended);
            }
            Err(refusal) => self.refuse(request, refusal),
        }
    }

    /// For a repeated UPDATE or RENEW: whether it is the same request, and its lease still holds.
    fn same_and_held<S: PageStore + ?Sized>(
        &mut self,
        request: &Request<'_>,
        cut: Pieces,
        record: &Record,
        store: &S,
    ) -> Result<Location, Refusal> {
        let target = request.datagram.target;
        let says = (target.location, target.tag, request.header().length);
        if (record.location, record.tag, record.length) != says {
            return Err(Status::Malformed.into());
        }
        self.held(request, cut, record.value, store)
    }

    /// Where the pages of an operation are, if the requester holds all of them under `epoch`.
    pub(super) fn held<S: PageStore + ?Sized>(
        &mut self,
        request: &Request<'_>,
        cut: Pieces,
        epoch: u64,
        store: &S,
    ) -> Result<Location, Refusal> {
        let local = self.resolve(request)?;
        for part in cut.parts() {
            store.check(part_access(request, local, part))?;
        }
        self.all_held(request, pages_of(local, cut), epoch).map(|()| local)
    }

    /// Whether the requester holds all pages under `epoch`.
    pub(super) fn all_held(
        &mut self,
        request: &Request<'_>,
        pages: Range<u64>,
        epoch: u64,
    ) -> Result<(), Refusal> {
        let requester = request.requester();
        let mut pages = pages;
        let lost =
            pages.find_map(|page| self.leases.held(request.now, page, &requester, epoch).err());
        let Some(lost) = lost else { return Ok(()) };
        self.counters.count(Event::LeaseNotHeld);
        let (node, epoch) = lost.to.map_or((0, 0), |(node, epoch)| (node.0, epoch));
        Err(Refusal { status: Status::LeaseLost, detail: lost.end.code(), node, epoch })
    }

    /// The header of a reply about a leased page.
    pub(super) fn lease_header(&self, request: &Request<'_>, page: u64) -> Header {
        let mut header = self.reply_header(request);
        if let Some(lease) = self.leases.holder(request.now, page) {
            (header.node, header.lease_epoch) = (lease.owner.node.0, lease.epoch);
            header.lease_remaining_ms = lease.remaining_ms(request.now);
        }
        header
    }

    /// Sends BUSY for a whole operation, about the first of its pages that is leased now. A
    /// repeated BUSY also reports the current lease: the recorded one may be over.
    pub(super) fn reply_busy<S: PageStore + ?Sized>(
        &mut self,
        request: &Request<'_>,
        waits: bool,
        store: &S,
    ) {
        let blocking = self.blocking(request, store);
        let header = self.reply_header(request);
        self.push_busy(request, &header, blocking, waits);
    }

    /// Sends BUSY about the page at `offset` bytes from the operation's start.
    pub(super) fn push_busy(
        &mut self,
        request: &Request<'_>,
        header: &Header,
        blocking: Option<(u64, usize)>,
        waits: bool,
    ) {
        let mut header = Header { length: request.header().length, ..*header };
        let mut contended = false;
        if let Some((page, offset)) = blocking {
            let leased = self.lease_header(request, page);
            (header.node, header.lease_epoch) = (leased.node, leased.lease_epoch);
            header.lease_remaining_ms = leased.lease_remaining_ms;
            header.target = target_at(request, offset);
            contended = self.leases.contend(request.now, page);
        }
        if waits {
            header.flags = header.flags.with(Flags::QUEUED);
            let millis = self.timers.lease_wait.as_millis();
            header.detail = u32::try_from(millis).unwrap_or(u32::MAX);
        }
        self.push_lease_reply(request, Status::Busy, &header, contended);
    }

    /// The first leased page of an operation, and its offset in bytes from the operation's start.
    fn blocking<S: PageStore + ?Sized>(
        &self,
        request: &Request<'_>,
        store: &S,
    ) -> Option<(u64, usize)> {
        let local = self.resolve(request).ok()?;
        let header = request.header();
        let is_freeing = request.datagram.command().command() == Some(Command::Delete)
            && !header.flags.contains(Flags::ZERO);
        if is_freeing {
            let pages = store.allocation(access(request, local, 1), header.length).ok()?;
            let page = self.leases.holder_in(request.now, pages)?.page;
            let offset = (page - local.page()) << PAGE_SHIFT;
            return Some((page, usize::try_from(offset).ok()?));
        }
        let cut = Pieces::new(memory(request).ok()?, header.length, PIECE_BYTES_MAX)?;
        // A TAKE is about free pages, too.
        let is_take = request.datagram.command().command() == Some(Command::Take);
        // The pages may belong to another space by now, whose leases this requester must not see.
        cut.parts()
            .map(|part| (part_access(request, local, part), part.offset))
            .filter(|&(access, _)| is_take || store.check(access).is_ok())
            .map(|(access, offset)| (access.location.page(), offset))
            .find(|&(page, _)| self.leases.holder(request.now, page).is_some())
    }

    /// Queues a reply that may report to the switch that a lease is contended.
    pub(super) fn push_lease_reply(
        &mut self,
        request: &Request<'_>,
        status: Status,
        header: &Header,
        contended: bool,
    ) {
        let reply_path = self.reply_path(request, status);
        let reply_path = if contended { reply_path.contended() } else { reply_path };
        if contended {
            self.counters.count(Event::LeaseContended);
        }
        self.counters.count_reply(status);
        self.replies.push(reply_path, header, &[], &[]);
    }

    /// Ends a page's lease if it expired.
    pub(super) fn end_if_expired(&mut self, now: Timestamp, page: u64) {
        if self.leases.end_if_expired(now, page) {
            self.counters.count(Event::LeaseExpired);
            self.queue.make_ready(line_of(page));
        }
    }

    /// Ends all expired leases.
    pub(super) fn end_all_expired(&mut self, now: Timestamp) {
        let Self { leases, queue, counters, .. } = self;
        leases.end_expired(now, |page| {
            counters.count(Event::LeaseExpired);
            queue.make_ready(line_of(page));
        });
    }

    /// Ends some of the expired leases: bounded work for an UPDATE without room.
    fn end_some_expired(&mut self, now: Timestamp) {
        let Self { leases, queue, counters, .. } = self;
        leases.end_some_expired(now, |page| {
            counters.count(Event::LeaseExpired);
            queue.make_ready(line_of(page));
        });
    }

    /// Ends the leases of older incarnations of the requester's node.
    pub(super) fn end_superseded_leases(&mut self, now: Timestamp, requester: &RequesterId) {
        let Self { leases, queue, counters, .. } = self;
        leases.end_superseded(now, requester, |page, how| {
            counters.count(match how {
                LeaseEnd::Superseded => Event::LeaseSuperseded,
                _ => Event::LeaseExpired,
            });
            queue.make_ready(line_of(page));
        });
    }

    /// Removes the leases of pages of the store that were freed, zeroed or moved.
    pub(super) fn forget_leases(&mut self, pages: Range<u64>) {
        let Self { leases, queue, counters, .. } = self;
        leases.forget(pages, |page| {
            counters.count(Event::LeaseForgotten);
            queue.make_ready(line_of(page));
        });
    }
}

impl ReplyPath {
    /// The same addresses with the contended flag for the switch.
    fn contended(self) -> Self {
        let contended = u128::from(bluebridge_wire::WireCommand::CONTENDED) << COMMAND_SHIFT;
        Self { source: (self.source.to_bits() | contended).into(), ..self }
    }
}

/// The position of the command byte in an address: the tag and the location follow it.
const COMMAND_SHIFT: u32 = 8 + 64;

pub(super) fn lease_record(request: &Request<'_>, command: Command, epoch: u64) -> Record {
    let target = request.datagram.target;
    Record {
        value: epoch,
        location: target.location,
        tag: target.tag,
        ..Record::reply(command, Status::Ok, request.header().length)
    }
}

/// The first covered byte of the page at `offset` bytes from the operation's start.
pub(super) fn target_at(request: &Request<'_>, offset: usize) -> std::net::Ipv6Addr {
    let target = request.datagram.target;
    Fields { location: target.location + offset as u64, ..target }.to_ipv6()
}
