//! The commands, once session and number are valid: form, range, resources, effect.

use bluebridge_wire::{
    Command, Flags, Header, Location, Status, Tag, Usage,
    address::{Fields, PAGE_SHIFT, SHARD_SHIFT},
};

use super::{
    Event, Refusal, Responder,
    admit::{Execution, Request},
    cut::{PagePart, Pieces},
    freeing::Deletion,
    lease::{line_bits, line_of},
    ranges::Moved,
    record::Record,
    replies::{INLINE_BYTES, ReplyPath},
};
use crate::{
    Timestamp,
    store::{ADOPTED_PAGES_FROM, Access, Grant, PageStore},
};

/// The page shift in every header.
pub(super) const HEADER_PAGE_SHIFT: u8 = 12;

const _: () = assert!(HEADER_PAGE_SHIFT as u32 == PAGE_SHIFT);

impl Record {
    /// The pages that a CREATE or ALLOC_WRITE allocated.
    pub(super) fn grant(&self) -> Option<Grant> {
        let location = Location::from_bits(self.location)?;
        Some(Grant { location, tag: Tag(self.tag) })
    }
}

impl Responder {
    pub(super) fn execute<S: PageStore + ?Sized>(
        &mut self,
        execution: &Execution<'_>,
        store: &mut S,
    ) {
        let request = execution.request;
        let header = request.header();
        if self.serves_for_another(request) {
            self.counters.count(Event::ServedAdopted);
        }
        if header.page_shift != HEADER_PAGE_SHIFT {
            let refusal = Status::Malformed.into();
            return self.conclude_refused(execution, refusal, store);
        }
        let outcome = match execution.command {
            Command::Close => return self.close(execution, store),
            Command::Ping => return self.ping(request),
            Command::Read => return self.read(execution, store),
            Command::Stat => return self.stat(request, store),
            Command::Write => return self.write(execution, store),
            Command::Update => return self.update(execution, store),
            Command::Take => return self.take(execution, store),
            Command::Keep => return self.keep_line(execution, store),
            Command::Commit => return self.commit(execution, store),
            Command::AllocWrite => return self.alloc_write(execution, store),
            Command::Abort => self.abort(execution, store),
            Command::CompareSwap => self.compare_swap(request, store),
            Command::Confirm => self.confirm(request, store),
            Command::Create => self.create(request, store),
            Command::Delete if header.flags.contains(Flags::ZERO) => self.zero(execution, store),
            Command::Delete => match self.delete(execution, store) {
                Deletion::Ended(outcome) => outcome,
                Deletion::Follows => return,
            },
            Command::FetchAdd => self.fetch_add(request, store),
            Command::Renew => self.renew(execution, store),
            // Refused or removed before; the requester would get a reply if that should ever
            // change.
            _ => Err(Status::UnknownCommand.into()),
        };
        match outcome {
            Ok(record) => self.conclude(execution, record, store),
            Err(refusal) => self.conclude_refused(execution, refusal, store),
        }
    }

    /// Records the reply to a mutating request and sends it.
    pub(super) fn conclude<S: PageStore + ?Sized>(
        &mut self,
        execution: &Execution<'_>,
        record: Record,
        store: &S,
    ) {
        if is_recorded(record.command, record.status) {
            self.keep(execution, record);
            self.counters.count(Event::ReplyRecorded);
        }
        self.reply(execution, &record, store);
    }

    /// Records under the request's number how far it is.
    pub(super) fn keep(&mut self, execution: &Execution<'_>, record: Record) {
        let Execution { request, slot, .. } = execution;
        self.sessions.at(*slot).keep(request.header().sequence, record);
    }

    /// Refuses a request; the refusal is recorded unless a train with the same number is in
    /// progress, which a contradictory piece must not end.
    pub(super) fn conclude_refused<S: PageStore + ?Sized>(
        &mut self,
        execution: &Execution<'_>,
        refusal: Refusal,
        store: &S,
    ) {
        let request = execution.request;
        if !execution.is_fresh() {
            return self.refuse(request, refusal);
        }
        let Refusal { status, detail, node, epoch } = refusal;
        let reply = Record::reply(execution.command, status, request.header().length);
        self.conclude(execution, Record { detail, node, value: epoch, ..reply }, store);
    }

    /// Sends the reply that `record` describes.
    pub(super) fn reply<S: PageStore + ?Sized>(
        &mut self,
        execution: &Execution<'_>,
        record: &Record,
        store: &S,
    ) {
        let request = execution.request;
        let mut header = self.reply_header(request);
        header.length = record.length;
        (header.detail, header.node) = (record.detail, record.node);
        let is_done = record.status.is_ok();
        let value = record.value.to_be_bytes();
        match record.command {
            Command::AllocWrite | Command::Create if is_done => {
                header.target = self.granted(request, record.location, record.tag);
                self.push(request, record.status, &header, &[], &[]);
            }
            Command::Update if is_done => self.reply_grant(execution, record, store),
            Command::Renew if is_done => self.reply_renewal(execution, record, store),
            Command::Take if is_done => self.reply_taken(execution, record, store),
            _ if record.status == Status::Busy => self.reply_busy(request, false, store),
            Command::Update | Command::Commit | Command::Abort | Command::Renew | Command::Take => {
                header.lease_epoch = record.value;
                self.push_lease_reply(request, record.status, &header, record.contended);
            }
            Command::CompareSwap | Command::FetchAdd if is_done => {
                self.push(request, record.status, &header, &[], &value);
            }
            _ if record.status == Status::Partial => {
                let (statuses, count) = record.page_statuses();
                self.push(request, record.status, &header, &statuses[..count], &[]);
            }
            _ => self.push(request, record.status, &header, &[], &[]),
        }
    }

    /// The new pointer in a reply to a CREATE.
    pub(super) fn granted(
        &self,
        request: &Request<'_>,
        location: u64,
        tag: u8,
    ) -> std::net::Ipv6Addr {
        let space = request.datagram.target.space;
        Fields { space, node: self.node, command: 0, tag, location }.to_ipv6()
    }

    fn close<S: PageStore + ?Sized>(&mut self, execution: &Execution<'_>, store: &mut S) {
        self.end_session(execution.slot, Event::SessionClosed, store);
        self.refuse(execution.request, Status::Ok.into());
    }

    fn ping(&mut self, request: &Request<'_>) {
        let data = request.datagram.data;
        if data.len() > INLINE_BYTES {
            return self.refuse(request, Status::BadLength.into());
        }
        let header = self.reply_header(request);
        self.push(request, Status::Ok, &header, &[], data);
    }

    fn stat<S: PageStore + ?Sized>(&mut self, request: &Request<'_>, store: &S) {
        let form = if request.datagram.target.is_memory() {
            self.resolve(request).map(|_| ())
        } else {
            Ok(())
        };
        if let Err(refusal) = no_data(request).map_err(Into::into).and(form) {
            return self.refuse(request, refusal);
        }
        let usage = store.usage(request.datagram.target.space);
        let record = Usage {
            capacity_pages: usage.capacity_pages,
            // Who chooses the server with more free memory chooses another one.
            free_pages: if self.is_sealed { 0 } else { usage.free_pages },
            quota_pages: usage.quota_pages,
            used_pages: usage.used_pages,
            provisional_pages: self.provisional.pages(),
            session_count: self.sessions.count() as u64,
            answered_count: self.counters.reply_total(),
            shard_count: u64::from(self.shard_count),
            retired_pages: usage.retired_pages,
        };
        let header = self.reply_header(request);
        self.push(request, Status::Ok, &header, &[], &record.emit());
    }

    fn read<S: PageStore + ?Sized>(&mut self, execution: &Execution<'_>, store: &S) {
        let request = execution.request;
        let wanted = no_data(request).map_err(Refusal::from).and_then(|()| {
            let cut = self.cut(execution)?;
            let bits = wanted(request, cut).ok_or(Status::Malformed)?;
            Ok(Wanted { cut, bits, local: self.resolve(request)? })
        });
        match wanted {
            Ok(wanted) => {
                let is_plain = self.leases.is_idle() && execution.is_fresh();
                let pages = if is_plain {
                    ReadPages::ALL
                } else {
                    self.check_leases(execution, &wanted, store)
                };
                self.read_pages(request, &wanted, pages, store);
            }
            Err(refusal) => self.refuse(request, refusal),
        }
    }

    /// Which pages of a READ are leased, and whether it waits for them.
    fn check_leases<S: PageStore + ?Sized>(
        &mut self,
        execution: &Execution<'_>,
        wanted: &Wanted,
        store: &S,
    ) -> ReadPages {
        let request = execution.request;
        let mut leased = 0_u8;
        let mut of_line = 0_u8;
        for (number, part) in wanted.cut.parts().enumerate() {
            let access = part_access(request, wanted.local, part);
            let page = access.location.page();
            if self.marks_leases() {
                // Readers pass READs of the page on until it is unmarked.
                self.end_if_expired(request.now, page);
            }
            let lease = self.leases.holder(request.now, page);
            // The owner may read what it holds if it names the lease.
            let is_leased = lease.is_some_and(|lease| {
                let named = request.header().lease_epoch;
                (lease.owner, lease.epoch) != (request.requester(), named)
            });
            if wanted.bits & part.bits != 0 && is_leased && store.check(access).is_ok() {
                leased |= 1 << number;
                of_line |= line_bits(&(page..page + 1));
            }
        }
        if request.header().flags.contains(Flags::MAY_BE_STALE) {
            self.stop_waiting(execution, Event::WaiterLeft);
            return ReadPages { stale: leased, ..ReadPages::ALL };
        }
        let line = line_of(wanted.local.page());
        let waits = leased != 0 && self.wait_for(execution, line, of_line);
        if !waits {
            let is_over = leased == 0;
            let event = if is_over { Event::WaiterAnswered } else { Event::WaiterLeft };
            self.stop_waiting(execution, event);
        }
        ReadPages { busy: leased, waits, ..ReadPages::ALL }
    }

    pub(super) fn read_pages<S: PageStore + ?Sized>(
        &mut self,
        request: &Request<'_>,
        wanted: &Wanted,
        pages: ReadPages,
        store: &S,
    ) {
        let header = self.reply_header(request);
        let reply_path = self.reply_path(request, Status::Ok);
        for (number, part) in wanted.cut.parts().enumerate() {
            let bits = wanted.bits & part.bits;
            if bits == 0 {
                continue;
            }
            let access = part_access(request, wanted.local, part);
            if let Err(status) = store.check(access) {
                self.refuse_page(request, &header, part, status);
                continue;
            }
            let mut header = header;
            if pages.busy & (1 << number) != 0 {
                header.offset = small(part.offset);
                let page = access.location.page();
                self.counters.count(Event::PageRefused);
                self.push_busy(request, &header, Some((page, part.offset)), pages.waits);
                continue;
            }
            if pages.stale & (1 << number) != 0 {
                header.flags = header.flags.with(Flags::LAST_COMMITTED);
                self.counters.count(Event::LastCommittedRead);
            }
            self.push_part(reply_path, &header, &wanted.cut, bits, access, store);
        }
    }

    /// Queues the pieces of one page; the data stays in the store until it is sent.
    pub(super) fn push_part<S: PageStore + ?Sized>(
        &mut self,
        reply_path: ReplyPath,
        header: &Header,
        cut: &Pieces,
        bits: u32,
        access: Access,
        store: &S,
    ) {
        let version = store.version(access.location.page());
        let header = Header { page_version: version, ..*header };
        for piece in numbers(bits).filter_map(|number| cut.piece(number)) {
            let header = Header { offset: small(piece.offset), ..header };
            let range = small(piece.start)..small(piece.start + piece.bytes);
            self.counters.count_reply(Status::Ok);
            self.replies.push_page(reply_path, &header, access.location, range, store);
        }
    }

    /// Sends the refusal of one page of a READ.
    pub(super) fn refuse_page(
        &mut self,
        request: &Request<'_>,
        header: &Header,
        part: PagePart,
        status: Status,
    ) {
        let target = request.datagram.target;
        let location = target.location + part.offset as u64;
        let target = Fields { location, ..target }.to_ipv6();
        let header = Header { target, offset: small(part.offset), ..*header };
        self.counters.count(Event::PageRefused);
        self.push(request, status, &header, &[], &[]);
    }

    fn zero<S: PageStore + ?Sized>(
        &mut self,
        execution: &Execution<'_>,
        store: &mut S,
    ) -> Result<Record, Refusal> {
        let request = execution.request;
        no_data(request)?;
        let cut = self.cut(execution)?;
        let local = self.resolve(request)?;
        let mut record = Record::reply(Command::Delete, Status::Ok, request.header().length);
        let mut zeroed_count = 0;
        for (number, part) in cut.parts().enumerate() {
            let access = part_access(request, local, part);
            let may_change = self.check_to_change(request, access, store);
            let status = may_change.err().unwrap_or(Status::Ok);
            if status.is_ok() {
                zeroed_count += 1;
                store.zero(access.location.page(), part.start..part.start + part.bytes);
            } else {
                self.counters.count(Event::PageRefused);
            }
            record.finish_page(number, status);
        }
        record.conclude_pages();
        if zeroed_count > 0 {
            self.notify_invalid(request, cut.page_count() as u64);
        }
        Ok(record)
    }

    /// Step 7 for a part of a page that is to be changed.
    pub(super) fn check_to_change<S: PageStore + ?Sized>(
        &self,
        request: &Request<'_>,
        access: Access,
        store: &S,
    ) -> Result<(), Status> {
        store.check(access)?;
        if self.leases.holder(request.now, access.location.page()).is_some() {
            return Err(Status::Busy);
        }
        Ok(())
    }

    fn compare_swap<S: PageStore + ?Sized>(
        &self,
        request: &Request<'_>,
        store: &mut S,
    ) -> Result<Record, Refusal> {
        let [expected, new] = words(request)?;
        let access = self.word(request, store)?;
        let previous = load(access, store);
        if previous == expected {
            save(access, new, store);
        }
        let reply = Record::reply(Command::CompareSwap, Status::Ok, request.header().length);
        Ok(Record { value: previous, ..reply })
    }

    fn fetch_add<S: PageStore + ?Sized>(
        &self,
        request: &Request<'_>,
        store: &mut S,
    ) -> Result<Record, Refusal> {
        let [addend] = words(request)?;
        let access = self.word(request, store)?;
        let previous = load(access, store);
        save(access, previous.wrapping_add(addend), store);
        let reply = Record::reply(Command::FetchAdd, Status::Ok, request.header().length);
        Ok(Record { value: previous, ..reply })
    }

    /// The 8 bytes that an atomic is about.
    fn word<S: PageStore + ?Sized>(
        &self,
        request: &Request<'_>,
        store: &S,
    ) -> Result<Access, Refusal> {
        let local = self.resolve(request)?;
        let access = access(request, local, 8);
        self.check_to_change(request, access, store)?;
        Ok(access)
    }

    /// The division of an operation inside of a line into pieces of the session's size.
    pub(super) fn cut(&mut self, execution: &Execution<'_>) -> Result<Pieces, Status> {
        let location = memory(execution.request)?;
        let length = execution.request.header().length;
        let piece_bytes = self.sessions.at(execution.slot).piece_bytes;
        Pieces::new(location, length, piece_bytes).ok_or(Status::BadLength)
    }

    /// Step 7 for ranges: where the target is in the store.
    pub(super) fn resolve(&self, request: &Request<'_>) -> Result<Location, Refusal> {
        let location = memory(request)?;
        self.check_epoch(request)?;
        let node = request.datagram.target.node;
        let is_own = self.is_own_node(node);
        // The giver may say already that it is here. Its answer is on its way, so the requester is to wait: led from one to
        // the other, it would soon have gone too often.
        if self.ranges.is_in_doubt(node, location) {
            return Err(if is_own { Status::Busy } else { Status::NoAuthority }.into());
        }
        let local = if is_own {
            match self.ranges.moved_to(location) {
                Some((Moved::To(to), detail)) => {
                    return Err(Refusal { node: to.0, detail, ..Status::Moved.into() });
                }
                // The controller will say where.
                Some((Moved::Somewhere, _)) => return Err(Status::Busy.into()),
                // As after a loss of the whole memory.
                Some((Moved::Nowhere, _)) => return Err(Status::StaleGeneration.into()),
                None if self.ranges.is_earlier(location) => {
                    return Err(Status::StaleGeneration.into());
                }
                None => location,
            }
        } else {
            let local = self.ranges.local(node, location);
            local.ok_or(Status::WrongNode)?
        };
        if let Some(giving) = self.givings.marked(local.page()) {
            if is_own && self.ranges.is_lost(local.page()) {
                return Err(Status::StaleGeneration.into());
            }
            let node = giving.allowance.taker.0;
            // Lines of the migration that are neighbours at home need not be neighbours here.
            let row = if is_own { None } else { self.ranges.row_around(local.page()) };
            let detail = self.givings.block_pages(local.page(), location.page(), row);
            return Err(Refusal { node, detail, ..Status::Moved.into() });
        }
        self.check_authority(request)?;
        Ok(local)
    }

    /// Whether the target is another node's page that is served here.
    fn serves_for_another(&self, request: &Request<'_>) -> bool {
        let target = request.datagram.target;
        !self.is_own_node(target.node)
            && Location::from_bits(target.location)
                .is_some_and(|location| self.ranges.local(target.node, location).is_some())
    }

    /// A request may state the range epoch that it expects. TAKE and KEEP name that of their migration.
    pub(super) fn check_epoch(&self, request: &Request<'_>) -> Result<(), Status> {
        let is_for_giver =
            matches!(request.datagram.command().command(), Some(Command::Take | Command::Keep));
        let named = if is_for_giver { 0 } else { request.header().range_epoch };
        match self.authority {
            Some(authority) if named != 0 && named != authority.range_epoch => {
                Err(Status::StaleRangeEpoch)
            }
            _ => Ok(()),
        }
    }

    pub(super) fn check_authority(&self, request: &Request<'_>) -> Result<(), Status> {
        if self.has_authority(request.now) { Ok(()) } else { Err(Status::NoAuthority) }
    }

    pub(super) fn has_authority(&self, now: Timestamp) -> bool {
        self.authority
            .is_some_and(|authority| authority.expires_at.is_none_or(|expires_at| now < expires_at))
    }
}

/// The requested bytes of a READ or an UPDATE.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    /// The pieces of the whole range.
    pub(super) cut: Pieces,
    /// The requested pieces, one bit each.
    pub(super) bits: u32,
    /// Where the range begins in the store.
    pub(super) local: Location,
}

/// The effect of leases on the pages of a READ, one bit per page.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReadPages {
    /// The reply for these is BUSY.
    busy: u8,
    /// The reply for these is their last committed contents.
    stale: u8,
    /// Whether the READ waits for the busy pages.
    waits: bool,
}

impl ReadPages {
    /// No page is leased.
    pub(super) const ALL: Self = Self { busy: 0, stale: 0, waits: false };
}

/// Which replies are kept for a repetition (section 3).
const fn is_recorded(command: Command, status: Status) -> bool {
    command.is_mutating()
        && !matches!(
            status,
            Status::NoSession
                | Status::Expired
                | Status::BeyondWindow
                | Status::Overloaded
                | Status::Incomplete
                | Status::ShuttingDown
        )
}

/// The pieces that a READ requests; `None` if it requests none.
pub(super) fn wanted(request: &Request<'_>, cut: Pieces) -> Option<u32> {
    let header = request.header();
    let requested = if header.flags.contains(Flags::SELECTIVE) { header.detail } else { u32::MAX };
    Some(requested & cut.bits()).filter(|&bits| bits != 0)
}

/// The numbers of the bits that are set, from the lowest.
fn numbers(mut bits: u32) -> impl Iterator<Item = u32> {
    core::iter::from_fn(move || {
        let lowest = bits.checked_ilog2().map(|_| bits.trailing_zeros());
        bits &= bits.wrapping_sub(1);
        lowest
    })
}

pub(super) fn memory(request: &Request<'_>) -> Result<Location, Status> {
    let bits = request.datagram.target.location;
    let location = Location::from_bits(bits).ok_or(Status::Malformed)?;
    if location.page() % SHARD_PAGES < ADOPTED_PAGES_FROM {
        return Ok(location);
    }
    // No pointer names the places of other nodes' lines. It is as far out of range as the last own page, which no
    // store has; the generation is checked first, as for others.
    let back = (location.page() % SHARD_PAGES - (ADOPTED_PAGES_FROM - 1)) << PAGE_SHIFT;
    Location::new(location.generation(), location.offset() - back).ok_or(Status::OutOfRange)
}

/// Pages of the addresses of a shard.
const SHARD_PAGES: u64 = 1 << (SHARD_SHIFT - PAGE_SHIFT);

/// For requests without data.
pub(super) fn no_data(request: &Request<'_>) -> Result<(), Status> {
    let is_bare = request.datagram.data.is_empty() && request.header().offset == 0;
    if is_bare { Ok(()) } else { Err(Status::Malformed) }
}

pub(super) const fn access(request: &Request<'_>, location: Location, bytes: u64) -> Access {
    let target = &request.datagram.target;
    Access { location, length_bytes: bytes, tag: Tag(target.tag), space: target.space }
}

/// The access to the part of one page; `local` is where the operation begins.
pub(super) fn part_access(request: &Request<'_>, local: Location, part: PagePart) -> Access {
    let offset = local.offset() + part.offset as u64;
    // A part never leaves its line, so it fits into the 48 bits.
    let location = Location::new(local.generation(), offset).unwrap_or(local);
    access(request, location, part.bytes as u64)
}

/// The operands of an atomic operation on 8 aligned bytes.
fn words<const N: usize>(request: &Request<'_>) -> Result<[u64; N], Status> {
    if !memory(request)?.offset().is_multiple_of(8) {
        return Err(Status::Unaligned);
    }
    if request.header().length != 8 {
        return Err(Status::BadLength);
    }
    let (chunks, rest) = request.datagram.data.as_chunks::<8>();
    let words: &[[u8; 8]; N] = chunks.try_into().map_err(|_| Status::Malformed)?;
    if !rest.is_empty() || request.header().offset != 0 {
        return Err(Status::Malformed);
    }
    Ok(words.map(u64::from_be_bytes))
}

fn load<S: PageStore + ?Sized>(access: Access, store: &S) -> u64 {
    let start = access.location.in_page();
    let bytes = store.read(access.location.page(), start..start + 8);
    bytes.first_chunk().map_or(0, |chunk| u64::from_le_bytes(*chunk))
}

fn save<S: PageStore + ?Sized>(access: Access, value: u64, store: &mut S) {
    store.write(access.location.page(), access.location.in_page(), &value.to_le_bytes());
}

/// A number that is valid inside of a line.
pub(super) fn small(number: usize) -> u16 {
    u16::try_from(number).unwrap_or(u16::MAX)
}
