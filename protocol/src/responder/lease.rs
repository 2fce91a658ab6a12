//! UPDATE, ABORT and RENEW, and what a leased page means for other requests
//! (`docs/protocol.md`, section 10). The table is in [`super::lease_table`], COMMIT in
//! [`super::lease_commit`], waiting in [`super::lease_wait`].

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
    replies::Way,
};
use crate::{Timestamp, store::PageStore};

pub(super) const fn line_of(page: u64) -> u64 {
    page / LINE_PAGES as u64
}

/// The pages of the store that an operation covers, which begins at `local`.
pub(super) fn pages_of(local: Location, cut: Pieces) -> Range<u64> {
    local.page()..local.page() + cut.page_count() as u64
}

/// The same pages as bits of their line.
pub(super) fn line_bits(pages: &Range<u64>) -> u8 {
    pages.clone().fold(0, |bits, page| bits | 1 << (page % LINE_PAGES as u64))
}

impl Responder {
    /// UPDATE that is not answered yet.
    pub(super) fn update<S: PageStore + ?Sized>(&mut self, execution: &Execution<'_>, store: &S) {
        let Execution { request, before, .. } = *execution;
        let cut = match self.cut_of_update(execution) {
            Ok((cut, _)) => cut,
            Err(status) => return self.conclude_refused(execution, status.into(), store),
        };
        let place = (before.progress == Progress::Waits).then_some(before.waiter);
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
            return self.answer_busy(request, true, store);
        }
        let is_left = refusal.status == Status::Busy;
        let event = if is_left { Event::WaiterLeft } else { Event::WaiterAnswered };
        self.stop_waiting(execution, event);
        self.conclude_refused(&execution.afresh(), refusal, store);
    }

    fn cut_of_update(&mut self, execution: &Execution<'_>) -> Result<(Pieces, u32), Status> {
        no_data(execution.request)?;
        let cut = self.cut(execution)?;
        Ok((cut, wanted(execution.request, cut).ok_or(Status::Malformed)?))
    }

    /// Leases all pages of an UPDATE, or none; `place` is the request's in the queue.
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
        let is_patient = request.header().flags.contains(Flags::QUEUED);
        let wanted =
            if is_patient { self.queue.wanted(now, line_of(pages.start), place) } else { 0 };
        let is_leased = self.leases.holder_in(now, pages.clone()).is_some();
        if is_leased || wanted & line_bits(&pages) != 0 {
            return Err(Status::Busy.into());
        }
        for page in pages.clone() {
            self.end_if_expired(now, page);
        }
        let expires_at = now + self.lease_time(request);
        let owner = request.asker();
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
        Ok(lease_record(request, Command::Update, epoch))
    }

    /// For how long an UPDATE or RENEW gets what it asks for.
    fn lease_time(&self, request: &Request<'_>) -> Duration {
        match request.header().lease_remaining_ms {
            0 => self.timers.lease_default,
            millis => Duration::from_millis(u64::from(millis)).min(self.timers.lease_max),
        }
    }

    /// Gives what an UPDATE got, as long as the lease holds: the contents are those of now, and as
    /// nobody else changes them they are those of the grant.
    pub(super) fn answer_grant<S: PageStore + ?Sized>(
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
        let way = self.way(request, Status::Ok);
        for part in cut.parts() {
            let header = Header { target: target_at(request, part.offset), ..header };
            let access = part_access(request, local, part);
            self.push_part(way, &header, &cut, part.bits & bits, access, store);
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

    /// Ends leases that are held, and gives the answer to COMMIT or ABORT.
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
        record.node = request.asker().node.0;
        self.queue.make_ready(line_of(pages.start));
        for page in pages {
            record.contended |= self.leases.end(page, how);
            self.counters.count(event);
        }
        record
    }

    /// RENEW: sets the deadline anew.
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
        for page in pages_of(local, cut) {
            self.leases.renew(page, expires_at);
            self.counters.count(Event::LeaseRenewed);
        }
        if !self.queue.is_empty() {
            self.wake_by(expires_at);
        }
        Ok(lease_record(request, Command::Renew, epoch))
    }

    /// Tells what is left of a renewed lease, also when the RENEW came again since: its sender
    /// counts from when it sent this copy.
    pub(super) fn answer_renewal<S: PageStore + ?Sized>(
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
                self.push_told(request, Status::Ok, &header, contended);
            }
            Err(refusal) => self.refuse(request, refusal),
        }
    }

    /// For a repetition of UPDATE or RENEW: whether it is the same, and its lease still holds.
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

    /// Where the pages of an operation are, if the asker holds all of them under `epoch`.
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
        let asker = request.asker();
        let lost = pages_of(local, cut)
            .find_map(|page| self.leases.held(request.now, page, &asker, epoch).err());
        let Some(lost) = lost else { return Ok(local) };
        self.counters.count(Event::LeaseNotHeld);
        let (node, epoch) = lost.to.map_or((0, 0), |(node, epoch)| (node.0, epoch));
        Err(Refusal { status: Status::LeaseLost, detail: lost.end.code(), node, epoch })
    }

    /// The header of an answer about a page that is leased.
    fn lease_header(&self, request: &Request<'_>, page: u64) -> Header {
        let mut header = self.reply_header(request);
        if let Some(lease) = self.leases.holder(request.now, page) {
            (header.node, header.lease_epoch) = (lease.owner.node.0, lease.epoch);
            header.lease_remaining_ms = lease.remaining_ms(request.now);
        }
        header
    }

    /// Answers BUSY for a whole operation, by the first of its pages that is leased now. Also a
    /// recorded BUSY tells of now: what it told before may long be over.
    pub(super) fn answer_busy<S: PageStore + ?Sized>(
        &mut self,
        request: &Request<'_>,
        waits: bool,
        store: &S,
    ) {
        let blocking = self.blocking(request, store);
        let header = self.reply_header(request);
        self.push_busy(request, &header, blocking, waits);
    }

    /// Answers BUSY because of the page that the operation reaches after so many bytes.
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
        self.push_told(request, Status::Busy, &header, contended);
    }

    /// The first leased page of an operation, and after how many bytes it reaches it.
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
        // The pages may be another's since, who leases them is not for this asker to know.
        cut.parts()
            .map(|part| (part_access(request, local, part), part.offset))
            .filter(|&(access, _)| store.check(access).is_ok())
            .map(|(access, offset)| (access.location.page(), offset))
            .find(|&(page, _)| self.leases.holder(request.now, page).is_some())
    }

    /// Queues an answer that may tell the switch that a lease is fought over.
    pub(super) fn push_told(
        &mut self,
        request: &Request<'_>,
        status: Status,
        header: &Header,
        contended: bool,
    ) {
        let way = self.way(request, status);
        let way = if contended { way.contended() } else { way };
        if contended {
            self.counters.count(Event::LeaseContended);
        }
        self.counters.count_answer(status);
        self.replies.push(way, header, &[], &[]);
    }

    /// Ends a page's lease if it ran out.
    pub(super) fn end_if_expired(&mut self, now: Timestamp, page: u64) {
        if self.leases.end_if_expired(now, page) {
            self.counters.count(Event::LeaseExpired);
            self.queue.make_ready(line_of(page));
        }
    }

    /// Ends all leases that ran out.
    pub(super) fn end_all_expired(&mut self, now: Timestamp) {
        let Self { leases, queue, counters, .. } = self;
        leases.end_expired(now, |page| {
            counters.count(Event::LeaseExpired);
            queue.make_ready(line_of(page));
        });
    }

    /// Ends some of the leases that ran out: what an UPDATE without room may cost.
    fn end_some_expired(&mut self, now: Timestamp) {
        let Self { leases, queue, counters, .. } = self;
        leases.end_some_expired(now, |page| {
            counters.count(Event::LeaseExpired);
            queue.make_ready(line_of(page));
        });
    }

    /// Ends the leases of older incarnations of the asker's node.
    pub(super) fn end_superseded_leases(&mut self, request: &Request<'_>) {
        let Self { leases, queue, counters, .. } = self;
        leases.end_superseded(request.now, &request.asker(), |page, how| {
            counters.count(match how {
                LeaseEnd::Superseded => Event::LeaseSuperseded,
                _ => Event::LeaseExpired,
            });
            queue.make_ready(line_of(page));
        });
    }

    /// Forgets the leases of pages of the store that are not what they were.
    pub(super) fn forget_leases(&mut self, pages: Range<u64>) {
        let Self { leases, queue, counters, .. } = self;
        leases.forget(pages, |page| {
            counters.count(Event::LeaseForgotten);
            queue.make_ready(line_of(page));
        });
    }
}

impl Way {
    /// The same way, telling the switch that a lease is fought over.
    fn contended(self) -> Self {
        let contended = u128::from(bluebridge_wire::WireCommand::CONTENDED) << COMMAND_SHIFT;
        Self { source: (self.source.to_bits() | contended).into(), ..self }
    }
}

/// Where the command byte is in an address: behind it are the tag and the location.
const COMMAND_SHIFT: u32 = 8 + 64;

fn lease_record(request: &Request<'_>, command: Command, epoch: u64) -> Record {
    let target = request.datagram.target;
    Record {
        value: epoch,
        location: target.location,
        tag: target.tag,
        ..Record::answer(command, Status::Ok, request.header().length)
    }
}

/// The first byte of a page that an operation covers, `offset` bytes into it.
pub(super) fn target_at(request: &Request<'_>, offset: usize) -> std::net::Ipv6Addr {
    let target = request.datagram.target;
    Fields { location: target.location + offset as u64, ..target }.to_ipv6()
}
