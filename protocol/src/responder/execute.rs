//! The commands, once session and number are right: shape, range, resources, effect.

use bluebridge_wire::{
    Command, Flags, Header, Location, Status, Tag, Usage,
    address::{Fields, PAGE_SHIFT},
};

use super::{
    Event, Refusal, Responder,
    admit::Request,
    cut::{PagePart, Pieces},
    lease::{line_bits, line_of},
    record::{Progress, Record},
    replies::{INLINE_BYTES, Way},
};
use crate::store::{Access, Grant, PageStore};

/// The page shift that every header states.
pub(super) const HEADER_PAGE_SHIFT: u8 = 12;

const _: () = assert!(HEADER_PAGE_SHIFT as u32 == PAGE_SHIFT);

impl Record {
    /// The pages that a CREATE or ALLOC_WRITE got.
    pub(super) fn grant(&self) -> Option<Grant> {
        let location = Location::from_bits(self.location)?;
        Some(Grant { location, tag: Tag(self.tag) })
    }
}

impl Responder {
    pub(super) fn execute<S: PageStore + ?Sized>(
        &mut self,
        request: &Request<'_>,
        command: Command,
        slot: u16,
        record: &Record,
        store: &mut S,
    ) {
        let header = request.header();
        if self.serves_for_another(request) {
            self.counters.count(Event::ServedAdopted);
        }
        if header.page_shift != HEADER_PAGE_SHIFT {
            let refusal = Status::Malformed.into();
            return self.conclude_refused(request, command, slot, record, refusal, store);
        }
        let outcome = match command {
            Command::Close => return self.close(request, slot, store),
            Command::Ping => return self.ping(request),
            Command::Read => return self.read(request, slot, record, store),
            Command::Stat => return self.stat(request, store),
            Command::Write => return self.write(request, slot, record, store),
            Command::Update => return self.update(request, slot, record, store),
            Command::Commit => return self.commit(request, slot, record, store),
            Command::AllocWrite => return self.alloc_write(request, slot, record, store),
            Command::Abort => self.abort(request, slot, store),
            Command::CompareSwap => self.compare_swap(request, store),
            Command::Confirm => self.confirm(request, store),
            Command::Create => self.create(request, store),
            Command::Delete if header.flags.contains(Flags::ZERO) => {
                self.zero(request, slot, store)
            }
            Command::Delete => self.delete(request, store),
            Command::FetchAdd => self.fetch_add(request, store),
            Command::Renew => self.renew(request, slot, store),
            // Refused or taken out before; an answer all the same if that should ever change.
            _ => Err(Status::UnknownCommand.into()),
        };
        match outcome {
            Ok(record) => self.conclude(request, slot, record, store),
            Err(refusal) => self.conclude_refused(request, command, slot, record, refusal, store),
        }
    }

    /// Records the answer of a mutating request and gives it.
    pub(super) fn conclude<S: PageStore + ?Sized>(
        &mut self,
        request: &Request<'_>,
        slot: u16,
        record: Record,
        store: &S,
    ) {
        if is_recorded(record.command, record.status) {
            self.sessions.at(slot).keep(request.header().sequence, record);
            self.counters.count(Event::AnswerRecorded);
        }
        self.answer(request, slot, &record, store);
    }

    /// Refuses a request; the refusal is recorded unless a train of the same number is under way,
    /// which a contradicting piece must not end.
    pub(super) fn conclude_refused<S: PageStore + ?Sized>(
        &mut self,
        request: &Request<'_>,
        command: Command,
        slot: u16,
        before: &Record,
        refusal: Refusal,
        store: &S,
    ) {
        if before.progress != Progress::Fresh {
            return self.refuse(request, refusal);
        }
        let Refusal { status, detail, node, epoch } = refusal;
        let answer = Record::answer(command, status, request.header().length);
        self.conclude(request, slot, Record { detail, node, value: epoch, ..answer }, store);
    }

    /// Gives the answer that `record` describes.
    pub(super) fn answer<S: PageStore + ?Sized>(
        &mut self,
        request: &Request<'_>,
        slot: u16,
        record: &Record,
        store: &S,
    ) {
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
            Command::Update if is_done => self.answer_grant(request, slot, record, store),
            Command::Renew if is_done => self.answer_renewal(request, slot, record, store),
            _ if record.status == Status::Busy => self.answer_busy(request, false, store),
            Command::Update | Command::Commit | Command::Abort | Command::Renew => {
                header.lease_epoch = record.value;
                self.push_told(request, record.status, &header, record.contended);
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

    /// The new pointer that a reply to a CREATE names.
    pub(super) fn granted(
        &self,
        request: &Request<'_>,
        location: u64,
        tag: u8,
    ) -> std::net::Ipv6Addr {
        let space = request.datagram.target.space;
        Fields { space, node: self.node, command: 0, tag, location }.to_ipv6()
    }

    fn close<S: PageStore + ?Sized>(&mut self, request: &Request<'_>, slot: u16, store: &mut S) {
        self.end_session(slot, Event::SessionClosed, store);
        self.refuse(request, Status::Ok.into());
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
            free_pages: usage.free_pages,
            quota_pages: usage.quota_pages,
            used_pages: usage.used_pages,
            provisional_pages: self.provisional.pages(),
            session_count: self.sessions.count() as u64,
            answered_count: self.counters.answered(),
            shard_count: u64::from(self.shard_count),
            retired_pages: usage.retired_pages,
        };
        let header = self.reply_header(request);
        self.push(request, Status::Ok, &header, &[], &record.emit());
    }

    fn read<S: PageStore + ?Sized>(
        &mut self,
        request: &Request<'_>,
        slot: u16,
        before: &Record,
        store: &S,
    ) {
        let cut = no_data(request).map_err(Refusal::from).and_then(|()| {
            let cut = self.cut(request, slot)?;
            let wanted = wanted(request, cut).ok_or(Status::Malformed)?;
            Ok((cut, wanted, self.resolve(request)?))
        });
        match cut {
            Ok((cut, wanted, local)) => {
                let is_plain = self.leases.is_idle() && before.progress == Progress::Fresh;
                let pages = if is_plain {
                    ReadPages::ALL
                } else {
                    self.look_at_leases(request, slot, before, (cut, wanted, local), store)
                };
                self.read_pages(request, cut, wanted, local, pages, store);
            }
            Err(refusal) => self.refuse(request, refusal),
        }
    }

    /// Which pages of a READ are leased, and whether it waits for them.
    fn look_at_leases<S: PageStore + ?Sized>(
        &mut self,
        request: &Request<'_>,
        slot: u16,
        before: &Record,
        (cut, wanted, local): (Pieces, u32, Location),
        store: &S,
    ) -> ReadPages {
        let mut leased = 0_u8;
        let mut of_line = 0_u8;
        for (number, part) in cut.parts().enumerate() {
            let access = part_access(request, local, part);
            let page = access.location.page();
            let is_leased = self.leases.holder(request.now, page).is_some();
            if wanted & part.bits != 0 && is_leased && store.check(access).is_ok() {
                leased |= 1 << number;
                of_line |= line_bits(&(page..page + 1));
            }
        }
        if request.header().flags.contains(Flags::MAY_BE_STALE) {
            self.stop_waiting(request, slot, before, Event::WaiterLeft);
            return ReadPages { stale: leased, ..ReadPages::ALL };
        }
        let line = line_of(local.page());
        let waits = leased != 0 && self.wait_for(request, slot, before, (line, of_line));
        if !waits {
            let is_over = leased == 0;
            let event = if is_over { Event::WaiterAnswered } else { Event::WaiterLeft };
            self.stop_waiting(request, slot, before, event);
        }
        ReadPages { busy: leased, waits, ..ReadPages::ALL }
    }

    pub(super) fn read_pages<S: PageStore + ?Sized>(
        &mut self,
        request: &Request<'_>,
        cut: Pieces,
        wanted: u32,
        local: Location,
        pages: ReadPages,
        store: &S,
    ) {
        let header = self.reply_header(request);
        let way = self.way(request, Status::Ok);
        for (number, part) in cut.parts().enumerate() {
            if wanted & part.bits == 0 {
                continue;
            }
            let access = part_access(request, local, part);
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
            self.push_part(way, &header, (cut, wanted & part.bits, access), store);
        }
    }

    /// Queues the pieces of one page; the data stays in the store until it is sent.
    pub(super) fn push_part<S: PageStore + ?Sized>(
        &mut self,
        way: Way,
        header: &Header,
        (cut, bits, access): (Pieces, u32, Access),
        store: &S,
    ) {
        let page = access.location.page();
        let place = access.location.bits();
        let header = Header { page_version: store.version(page), ..*header };
        for piece in numbers(bits).filter_map(|number| cut.piece(number)) {
            let header = Header { offset: small(piece.offset), ..header };
            let range = small(piece.start)..small(piece.start + piece.bytes);
            self.counters.count_answer(Status::Ok);
            self.replies.push_page(way, &header, (place, page, range), store);
        }
    }

    /// Answers for one page of a READ that it cannot be read.
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

    fn delete<S: PageStore + ?Sized>(
        &mut self,
        request: &Request<'_>,
        store: &mut S,
    ) -> Result<Record, Refusal> {
        no_data(request)?;
        memory(request)?.is_page_aligned().then_some(()).ok_or(Status::Unaligned)?;
        let local = self.resolve(request)?;
        let (access, length) = (access(request, local, 1), request.header().length);
        if !self.leases.is_idle() {
            let pages = store.allocation(access, length)?;
            if self.leases.holder_in(request.now, pages).is_some() {
                return Err(Status::Busy.into());
            }
        }
        let freed = store.delete(access, length)?;
        self.forget_leases(local.page()..local.page() + u64::from(freed));
        self.tell_invalid(request, u64::from(freed));
        // An entry that outlived its pages would stand in the way of whoever gets them next.
        self.provisional.forget(local.page());
        Ok(Record::answer(Command::Delete, Status::Ok, freed))
    }

    fn zero<S: PageStore + ?Sized>(
        &mut self,
        request: &Request<'_>,
        slot: u16,
        store: &mut S,
    ) -> Result<Record, Refusal> {
        no_data(request)?;
        let cut = self.cut(request, slot)?;
        let local = self.resolve(request)?;
        let mut record = Record::answer(Command::Delete, Status::Ok, request.header().length);
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
            self.tell_invalid(request, cut.page_count() as u64);
        }
        Ok(record)
    }

    /// Step 7 for a part of a page that is about to change.
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
        let answer = Record::answer(Command::CompareSwap, Status::Ok, request.header().length);
        Ok(Record { value: previous, ..answer })
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
        let answer = Record::answer(Command::FetchAdd, Status::Ok, request.header().length);
        Ok(Record { value: previous, ..answer })
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

    /// The cut of an operation on bytes inside of a line, by the session's piece size.
    pub(super) fn cut(&mut self, request: &Request<'_>, slot: u16) -> Result<Pieces, Status> {
        let location = memory(request)?;
        let piece_bytes = self.sessions.at(slot).piece_bytes;
        Pieces::new(location, request.header().length, piece_bytes).ok_or(Status::BadLength)
    }

    /// Step 7 as far as it is about ranges: where the target is in the store.
    pub(super) fn resolve(&self, request: &Request<'_>) -> Result<Location, Refusal> {
        let location = memory(request)?;
        self.check_epoch(request)?;
        let node = request.datagram.target.node;
        let local = if self.is_own_node(node) {
            if let Some(to) = self.ranges.moved_to(location.page()) {
                return Err(Refusal { node: to.0, ..Status::Moved.into() });
            }
            location
        } else {
            let local = self.ranges.local(node, location);
            local.ok_or(Status::WrongNode)?
        };
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

    /// A request may name the range epoch that it counts on.
    pub(super) fn check_epoch(&self, request: &Request<'_>) -> Result<(), Status> {
        let named = request.header().range_epoch;
        match self.authority {
            Some(authority) if named != 0 && named != authority.range_epoch => {
                Err(Status::StaleRangeEpoch)
            }
            _ => Ok(()),
        }
    }

    pub(super) fn check_authority(&self, request: &Request<'_>) -> Result<(), Status> {
        let holds = self.authority.is_some_and(|authority| {
            authority.expires_at.is_none_or(|expires_at| request.now < expires_at)
        });
        if holds { Ok(()) } else { Err(Status::NoAuthority) }
    }
}

/// What leases mean for the pages of a READ, one bit per page.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReadPages {
    /// Answered BUSY.
    busy: u8,
    /// Answered with their last committed contents.
    stale: u8,
    /// Whether the READ waits for those that are busy.
    waits: bool,
}

impl ReadPages {
    /// No page is leased.
    pub(super) const ALL: Self = Self { busy: 0, stale: 0, waits: false };
}

/// Which answers are kept for a repetition (section 3).
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

/// The pieces that a READ asks for; `None` if it asks for none.
pub(super) fn wanted(request: &Request<'_>, cut: Pieces) -> Option<u32> {
    let header = request.header();
    let asked = if header.flags.contains(Flags::SELECTIVE) { header.detail } else { u32::MAX };
    Some(asked & cut.bits()).filter(|&bits| bits != 0)
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
    Location::from_bits(request.datagram.target.location).ok_or(Status::Malformed)
}

/// For requests that carry nothing.
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
    // A part never leaves its line, so it cannot leave the 48 bits.
    let location = Location::new(local.generation(), offset).unwrap_or(local);
    access(request, location, part.bytes as u64)
}

/// The operands of an atomic, of which memory holds `length` 8 bytes, aligned.
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

/// A number inside of a line.
pub(super) fn small(number: usize) -> u16 {
    u16::try_from(number).unwrap_or(u16::MAX)
}
