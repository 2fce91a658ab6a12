//! CREATE and ALLOC_WRITE, in a session and anywhere, and CONFIRM (`docs/protocol.md`, section 6).

use bluebridge_wire::{
    Command, Flags, Header, Location, NoMemory, Status,
    address::{LINE_BYTES, PAGE_SHIFT},
};

use super::{
    Event, Refusal, Responder,
    admit::{Execution, Request},
    cut::{Piece, Pieces},
    execute::{access, memory, no_data},
    provisional::{Excess, Provisional},
    record::{Progress, Record},
    sessions::RequesterId,
    write::piece_of,
};
use crate::store::{Access, Creator, Grant, PageStore};

impl Responder {
    pub(super) fn create<S: PageStore + ?Sized>(
        &mut self,
        request: &Request<'_>,
        store: &mut S,
    ) -> Result<Record, Refusal> {
        let pages = pages_of_create(request)?;
        let grant = self.allocate(request, pages, store)?;
        store.complete(grant.location);
        self.notify_created(request, grant, u64::from(pages));
        Ok(record_of(Command::Create, request, grant, Progress::Replied))
    }

    /// ALLOC_WRITE in a session. Its pieces go directly into the new pages, whose pointer is not
    /// known to any client before the reply.
    pub(super) fn alloc_write<S: PageStore + ?Sized>(
        &mut self,
        execution: &Execution<'_>,
        store: &mut S,
    ) {
        let request = execution.request;
        let (mut record, cut, piece) = match self.begin_alloc_write(execution, store) {
            Ok(begun) => begun,
            Err(refusal) => return self.conclude_refused(execution, refusal, store),
        };
        let arrived = u32::try_from(record.value).unwrap_or(0);
        let Some(grant) = record.grant() else { return };
        let arrived = match self.fill(request, grant, arrived, piece, store) {
            Ok(arrived) => arrived,
            Err(status) => return self.refuse(request, status.into()),
        };
        if arrived == cut.bits() {
            record = Record { value: 0, progress: Progress::Replied, ..record };
            let pages = pages_of_bytes(request.header().length);
            store.complete(grant.location);
            self.notify_created(request, grant, u64::from(pages));
            return self.conclude(execution, record, store);
        }
        record.value = u64::from(arrived);
        self.keep(execution, record);
        self.incomplete(request, arrived);
    }

    fn begin_alloc_write<S: PageStore + ?Sized>(
        &mut self,
        execution: &Execution<'_>,
        store: &mut S,
    ) -> Result<(Record, Pieces, Piece), Refusal> {
        let Execution { request, slot, before, .. } = *execution;
        let piece_bytes = self.sessions.at(slot).piece_bytes;
        let (cut, piece) = piece_of_alloc_write(request, piece_bytes)?;
        if before.progress == Progress::Pieces {
            if before.length != request.header().length {
                return Err(Status::Malformed.into());
            }
            return Ok((*before, cut, piece));
        }
        let grant = self.allocate(request, pages_of_bytes(request.header().length), store)?;
        let record = record_of(Command::AllocWrite, request, grant, Progress::Pieces);
        Ok((record, cut, piece))
    }

    /// Writes a piece into new pages and returns the pieces that arrived so far. The pages may
    /// belong to another client by now: a client that guessed their pointer could free or lease
    /// them.
    fn fill<S: PageStore + ?Sized>(
        &mut self,
        request: &Request<'_>,
        grant: Grant,
        arrived: u32,
        piece: Piece,
        store: &mut S,
    ) -> Result<u32, Status> {
        if arrived & piece.bit != 0 {
            self.counters.count(Event::PieceDuplicate);
            return Ok(arrived);
        }
        let Grant { location, tag } = grant;
        let offset = location.offset() + piece.offset as u64;
        let location = Location::new(location.generation(), offset).ok_or(Status::OutOfRange)?;
        let space = request.datagram.target.space;
        let access = Access { location, length_bytes: piece.bytes as u64, tag, space };
        self.check_to_change(request, access, store)?;
        store.write(location.page(), piece.start, request.datagram.data);
        Ok(arrived | piece.bit)
    }

    /// CREATE or ALLOC_WRITE to node 0, in no session.
    pub(super) fn create_anywhere<S: PageStore + ?Sized>(
        &mut self,
        request: &Request<'_>,
        command: Command,
        store: &mut S,
    ) {
        let header = request.header();
        let requester = request.requester();
        if self.is_stale(request, store) {
            return self.refuse(request, Status::StaleIncarnation.into());
        }
        if header.session != 0 || header.page_shift != super::execute::HEADER_PAGE_SHIFT {
            return self.refuse(request, Status::Malformed.into());
        }
        let known = self.provisional.find(&requester, header.sequence);
        if known.is_none() && self.is_shutting_down {
            return self.refuse(request, Status::ShuttingDown.into());
        }
        let outcome = match command {
            Command::Create => self.create_provisional(request, known, store).map(|i| (i, true)),
            _ => self.write_provisional(request, known, store),
        };
        match outcome {
            Ok((index, true)) => self.reply_provisional(request, index),
            Ok((index, false)) => {
                let arrived = self.provisional.at(index).arrived;
                self.incomplete(request, arrived);
            }
            Err(refusal) => self.refuse(request, refusal),
        }
    }

    /// The entry of an anywhere-CREATE.
    fn create_provisional<S: PageStore + ?Sized>(
        &mut self,
        request: &Request<'_>,
        known: Option<usize>,
        store: &mut S,
    ) -> Result<usize, Refusal> {
        let pages = pages_of_create(request)?;
        self.find_or_create(request, Command::Create, known, (pages, 0), store)
    }

    /// The entry of an anywhere-ALLOC_WRITE, and whether all its pieces arrived.
    fn write_provisional<S: PageStore + ?Sized>(
        &mut self,
        request: &Request<'_>,
        known: Option<usize>,
        store: &mut S,
    ) -> Result<(usize, bool), Refusal> {
        let header = request.header();
        let piece_bytes = u16::try_from(header.detail).unwrap_or(0);
        let (cut, piece) = piece_of_alloc_write(request, piece_bytes)?;
        let shape = (pages_of_bytes(header.length), piece_bytes);
        let index = self.find_or_create(request, Command::AllocWrite, known, shape, store)?;
        let Provisional { grant, arrived, .. } = *self.provisional.at(index);
        let arrived = self.fill(request, grant, arrived, piece, store)?;
        self.provisional.at(index).arrived = arrived;
        Ok((index, arrived == cut.bits()))
    }

    /// The entry that this request made before, or a new one.
    fn find_or_create<S: PageStore + ?Sized>(
        &mut self,
        request: &Request<'_>,
        command: Command,
        known: Option<usize>,
        (pages, piece_bytes): (u32, u16),
        store: &mut S,
    ) -> Result<usize, Refusal> {
        let (length, nonce) = (request.header().length, request.header().sequence);
        if let Some(index) = known {
            let entry = self.provisional.at(index);
            let stated = (entry.command, entry.length, entry.piece_bytes);
            if stated != (command, length, piece_bytes) {
                return Err(Status::Malformed.into());
            }
            self.counters.count(Event::ProvisionalRepeated);
            return Ok(index);
        }
        self.check_epoch(request)?;
        self.check_authority(request)?;
        self.check_sealed()?;
        let requester = request.requester();
        self.provisional.admit(&requester, pages).map_err(|excess| {
            if excess != Excess::Table {
                self.counters.count(Event::ProvisionalBeyondShare);
            }
            Status::from(excess)
        })?;
        let grant = store.create(requester.space, pages)?;
        store.note_creator(grant.location, creator(request));
        self.raise_incarnation(request.now, &request.requester(), store);
        let expires_at = request.now + self.timers.provisional;
        self.wake_by(expires_at);
        self.counters.count(Event::ProvisionalCreated);
        Ok(self.provisional.insert(Provisional {
            requester,
            nonce,
            command,
            grant,
            pages,
            length,
            piece_bytes,
            arrived: 0,
            expires_at,
        }))
    }

    fn reply_provisional(&mut self, request: &Request<'_>, index: usize) {
        let Provisional { grant, expires_at, .. } = *self.provisional.at(index);
        let header = self.reply_header(request);
        let remaining = (expires_at - request.now).as_millis();
        let header = Header {
            flags: header.flags.with(Flags::PROVISIONAL),
            target: self.granted(request, grant.location.bits(), grant.tag.0),
            detail: u32::try_from(remaining).unwrap_or(u32::MAX),
            ..header
        };
        self.push(request, Status::Ok, &header, &[], &[]);
    }

    /// Confirms provisional pages if their requester sends another request on them. A request that
    /// will be refused changes nothing: its requester may assume that the pages were not allocated.
    pub(super) fn confirm_implicitly<S: PageStore + ?Sized>(
        &mut self,
        request: &Request<'_>,
        store: &mut S,
    ) {
        let is_plain = request.header().page_shift == super::execute::HEADER_PAGE_SHIFT;
        if !self.provisional.is_empty() && is_plain && self.resolve(request).is_ok() {
            self.keep_provisional(request, Event::ProvisionalKept, store);
        }
    }

    fn keep_provisional<S: PageStore + ?Sized>(
        &mut self,
        request: &Request<'_>,
        event: Event,
        store: &mut S,
    ) {
        let target = request.datagram.target;
        let Some(location) = Location::from_bits(target.location) else { return };
        if !self.is_own_node(target.node) {
            return;
        }
        let Some(index) = self.provisional.holding(location.page()) else { return };
        let Provisional { requester, grant, pages, .. } = *self.provisional.at(index);
        let is_same = grant.tag.0 == target.tag
            && grant.location.generation() == location.generation()
            && requester == request.requester();
        if is_same {
            self.provisional.remove(index);
            store.complete(grant.location);
            self.counters.count(event);
            self.notify_created(request, grant, u64::from(pages));
        }
    }

    /// CONFIRM: the pages must still be allocated, and are confirmed if they were not before.
    pub(super) fn confirm<S: PageStore + ?Sized>(
        &mut self,
        request: &Request<'_>,
        store: &mut S,
    ) -> Result<Record, Refusal> {
        no_data(request)?;
        let pages = request.header().length;
        memory(request)?.is_page_aligned().then_some(()).ok_or(Status::Unaligned)?;
        if pages == 0 {
            return Err(Status::BadLength.into());
        }
        let local = self.resolve(request)?;
        store.check(access(request, local, u64::from(pages) << PAGE_SHIFT))?;
        if self.awaits_another(request, local) {
            return Err(Status::Forbidden.into());
        }
        self.keep_provisional(request, Event::ProvisionalConfirmed, store);
        Ok(Record::reply(Command::Confirm, Status::Ok, pages))
    }

    /// Whether the pages wait for the CONFIRM of another endpoint: after an OK the server could
    /// still free them when that CONFIRM does not arrive.
    fn awaits_another(&mut self, request: &Request<'_>, local: Location) -> bool {
        let waiting = self.provisional.holding(local.page());
        waiting.is_some_and(|index| self.provisional.at(index).requester != request.requester())
    }

    fn allocate<S: PageStore + ?Sized>(
        &self,
        request: &Request<'_>,
        pages: u32,
        store: &mut S,
    ) -> Result<Grant, Refusal> {
        self.check_epoch(request)?;
        self.check_authority(request)?;
        self.check_sealed()?;
        let grant = store.create(request.datagram.target.space, pages)?;
        store.note_creator(grant.location, creator(request));
        Ok(grant)
    }

    fn check_sealed(&self) -> Result<(), Refusal> {
        if !self.is_sealed {
            return Ok(());
        }
        Err(Refusal { detail: NoMemory::Drained.code(), ..Status::OutOfMemory.into() })
    }
}

fn creator(request: &Request<'_>) -> Creator {
    let RequesterId { node, incarnation, .. } = request.requester();
    Creator { node, incarnation }
}

fn pages_of_create(request: &Request<'_>) -> Result<u32, Status> {
    no_data(request)?;
    if request.datagram.target.is_memory() {
        return Err(Status::Malformed);
    }
    match request.header().length {
        0 => Err(Status::BadLength),
        pages => Ok(pages),
    }
}

/// The piece of an ALLOC_WRITE; its pages begin with its first byte.
fn piece_of_alloc_write(
    request: &Request<'_>,
    piece_bytes: u16,
) -> Result<(Pieces, Piece), Status> {
    if request.datagram.target.is_memory() {
        return Err(Status::Malformed);
    }
    let length = request.header().length;
    if length == 0 || length as usize > LINE_BYTES {
        return Err(Status::BadLength);
    }
    let start = Location::default();
    let cut = Pieces::new(start, length, piece_bytes).ok_or(Status::Malformed)?;
    Ok((cut, piece_of(request, cut)?))
}

const fn pages_of_bytes(bytes: u32) -> u32 {
    bytes.div_ceil(1 << PAGE_SHIFT)
}

fn record_of(command: Command, request: &Request<'_>, grant: Grant, progress: Progress) -> Record {
    Record {
        location: grant.location.bits(),
        tag: grant.tag.0,
        length: request.header().length,
        command,
        progress,
        ..Record::FRESH
    }
}
