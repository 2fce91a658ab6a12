//! DELETE of allocations of which parts are at other servers (`docs/migration.md`, "DELETE").
//!
//! The home of an allocation frees it, as long as it has not lost it; after that the server of its first page does. That it
//! is being freed is stored first. Then the other servers free their parts, from the end on, and at last this one frees
//! its own and responds. [`Freer`](crate::freer::Freer) sends the requests.

use core::{ops::Range, time::Duration};

use bluebridge_wire::{
    ArenaGeneration, Command, Flags, LinePage, Location, NodeId, Space, Status,
    address::{Fields, LINE_PAGES, PAGE_SHIFT},
    line::{LineRecord, Part},
};

use super::{
    DrainFirst, Event, Refusal, Responder,
    admit::{Execution, Request},
    config::Limits,
    execute::{access, memory, no_data},
    lease::line_of,
    lease_queue::Waiter,
    ranges::Moved,
    record::{Progress, Record},
};
use crate::{
    Timestamp,
    store::{Access, Grant, PageStore},
};

const LINE: u64 = LINE_PAGES as u64;

/// The most allocations that DELETEs may be freeing at once, of all spaces and of one.
const FREEINGS_MAX: (usize, usize) = (1024, 256);

/// The most pages of a part that one request frees: so many delay no other request for long.
const PART_PAGES_MAX: u32 = 1024;

/// How long no lease is granted on leased pages that are to be freed, after they were asked for.
const CLOSED_TIME: Duration = Duration::from_secs(1);

/// The most runs of such pages.
const CLOSED_MAX: usize = 64;

/// An allocation that is being freed, of which parts are at other servers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Freeing {
    /// Distinguishes it from others of the same responder.
    pub id: u32,
    /// Its home.
    pub home: NodeId,
    /// Its location at home, and its tag.
    pub grant: Grant,
    /// Its space.
    pub space: Space,
    /// Its pages.
    pub pages: u32,
}

/// Where a page of such an allocation is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum PartPlace {
    /// Here, like so many pages up to it.
    Here(u32),
    /// At this server.
    At(NodeId),
    /// Lost with the memory of a server, like so many pages up to it.
    Lost(u32),
    /// It will be known.
    Unknown,
    /// The home knows it.
    AskHome,
}

/// One of them, and the request that waits for it.
struct Entry {
    freeing: Freeing,
    /// Its first page in the store.
    local: u64,
    /// The first generation of the home's contents.
    contents: ArenaGeneration,
    waiter: Option<Waiter>,
}

impl Entry {
    /// Behind its last page, by the numbers at home.
    fn end(&self) -> u64 {
        self.freeing.grant.location.page() + u64::from(self.freeing.pages)
    }
}

/// Pages of the store on which no lease is granted for a time, because another server asked for them to be freed.
struct Closed {
    pages: Range<u64>,
    until: Timestamp,
}

/// Allocations that this server frees, and parts of others that it is to free.
#[derive(Default)]
pub(super) struct Freeings {
    all: Vec<Entry>,
    closed: Vec<Closed>,
    last_id: u32,
}

impl Freeings {
    fn find(&self, id: u32) -> Option<&Entry> {
        self.all.iter().find(|entry| entry.freeing.id == id)
    }

    /// The one whose first page in the store this is.
    fn at(&self, local: u64) -> Option<&Entry> {
        self.all.iter().find(|entry| entry.local == local)
    }

    fn insert(&mut self, entry: Entry) {
        self.last_id = self.last_id.wrapping_add(1);
        let freeing = Freeing { id: self.last_id, ..entry.freeing };
        self.all.push(Entry { freeing, ..entry });
    }

    const fn is_idle(&self) -> bool {
        self.all.is_empty() && self.closed.is_empty()
    }

    fn close(&mut self, now: Timestamp, pages: Range<u64>) {
        self.closed.retain(|it| now < it.until && it.pages != pages);
        if self.closed.len() == CLOSED_MAX {
            self.closed.remove(0);
        }
        self.closed.push(Closed { pages, until: now + CLOSED_TIME });
    }
}

/// The result of a DELETE that frees.
pub(super) enum Deletion {
    /// It ended.
    Ended(Result<Record, Refusal>),
    /// The response follows.
    Follows,
}

impl From<Result<Record, Refusal>> for Deletion {
    fn from(result: Result<Record, Refusal>) -> Self {
        Self::Ended(result)
    }
}

/// Which way a DELETE frees.
enum Way {
    /// All of it is here: its first page in the store.
    Here(Location),
    /// Parts may be elsewhere: its first page in the store, and its pages.
    Scattered(Location, u32),
}

impl Responder {
    /// The allocations that are being freed.
    pub fn freeings(&self) -> impl Iterator<Item = Freeing> {
        self.freeings.all.iter().map(|entry| entry.freeing)
    }

    /// Whether an allocation is being freed.
    #[must_use]
    pub const fn has_freeings(&self) -> bool {
        !self.freeings.all.is_empty()
    }

    /// Where the last of the first `count` pages of such an allocation is, 1 or more; `None` if it is not being freed.
    #[must_use]
    pub fn place_of_part(&self, id: u32, count: u32) -> Option<PartPlace> {
        let entry = self.freeings.find(id)?;
        let freeing = entry.freeing;
        let first = freeing.grant.location.page();
        let page = first + u64::from(count.checked_sub(1)?);
        let in_line = page - (page - page % LINE).max(first) + 1;
        let in_line = u32::try_from(in_line).unwrap_or(1);
        let location = location_of(&freeing, page)?;
        let taker = |local| self.givings.marked(local).map(|giving| giving.allowance.taker);
        if !self.is_own_node(freeing.home) {
            let local = self.ranges.local_of(freeing.home, entry.contents, page);
            let here = |local| taker(local).map_or(PartPlace::Here(in_line), PartPlace::At);
            return Some(local.map_or(PartPlace::AskHome, here));
        }
        Some(match self.ranges.moved_to(location) {
            Some((Moved::To(node), _)) => PartPlace::At(node),
            Some((Moved::Somewhere, _)) => PartPlace::Unknown,
            Some((Moved::Nowhere, _)) => PartPlace::Lost(in_line),
            None if taker(page).is_some() && self.ranges.is_lost(page) => PartPlace::Lost(in_line),
            None => taker(page).map_or(PartPlace::Here(in_line), PartPlace::At),
        })
    }

    /// Where a page of contents is that this node has lost, by the location in pointers to it: never here.
    #[must_use]
    pub fn earlier_place(&self, location: Location) -> PartPlace {
        match self.ranges.moved_to(location) {
            Some((Moved::To(node), _)) => PartPlace::At(node),
            Some((Moved::Somewhere, _)) => PartPlace::Unknown,
            Some((Moved::Nowhere, _)) | None => PartPlace::Lost(1),
        }
    }

    /// All other parts of an allocation are free: frees what is here, and responds to who asked for it. Returns false if
    /// a lease on a page must end first.
    ///
    /// # Errors
    /// [`DrainFirst`] if replies must be sent before; then nothing was done.
    pub fn finish_freeing<S: PageStore + ?Sized>(
        &mut self,
        now: Timestamp,
        id: u32,
        store: &mut S,
    ) -> Result<bool, DrainFirst> {
        if self.has_page_replies() || self.replies.room() < Limits::REPLIES_PER_REQUEST {
            return Err(DrainFirst);
        }
        let index = self.freeings.all.iter().position(|entry| entry.freeing.id == id);
        let Some(index) = index else { return Ok(true) };
        let (runs, distances) = self.runs_here(&self.freeings.all[index]);
        if runs.iter().any(|run| self.leases.holder_in(now, run.clone()).is_some()) {
            return Ok(false);
        }
        let Entry { freeing, local, waiter, .. } = self.freeings.all.swap_remove(index);
        if self.is_own_node(freeing.home) {
            store.lines_mut().end_freeing(local);
            self.provisional.forget(local);
        } else {
            // The first page last: as long as it is there, the next process goes on with the others.
            let Freeing { grant: Grant { location, tag }, space, .. } = freeing;
            let wanted = Access { location, length_bytes: 1, tag, space };
            for (run, distance) in runs.iter().zip(&distances).rev() {
                if let Some(own) = allocated_in_line(run, *distance, wanted, store) {
                    store.lines_mut().free_part(own);
                }
            }
        }
        runs.into_iter().for_each(|run| self.forget_leases(run));
        self.notify_freed(&freeing);
        self.counters.count(Event::FreeingEnded);
        if let Some(waiter) = waiter {
            self.respond_freed(now, &waiter, freeing.pages, store);
        }
        self.wake_by(now);
        self.update_readers(store);
        Ok(true)
    }

    /// Responds to a DELETE, unless its session ended or its requester gave it up.
    fn respond_freed<S: PageStore + ?Sized>(
        &mut self,
        now: Timestamp,
        waiter: &Waiter,
        pages: u32,
        store: &S,
    ) {
        let session = self.sessions.at(waiter.session);
        let sequence = waiter.header.sequence;
        if session.id() != waiter.header.session || sequence < session.low_water {
            return;
        }
        let before = session.record(sequence);
        if before.progress == Progress::Replied {
            return;
        }
        let datagram = waiter.datagram();
        let request = waiter.request(now, &datagram);
        let execution = waiter.execution(&request, &before);
        self.conclude(&execution, Record::reply(Command::Delete, Status::Ok, pages), store);
    }

    /// Goes on with what an earlier process was freeing. After [`Self::resume_migrations`].
    pub(super) fn resume_freeings<S: PageStore + ?Sized>(&mut self, store: &S) {
        store.lines().freeings(&mut |local, access, pages| {
            let Access { location, tag, space, .. } = access;
            let name = self.ranges.name_of(&(local..local + 1));
            let own = (self.node, location.page(), store.generation());
            let (home, page, contents) =
                name.map_or(own, |name| (name.node, name.first_page, name.generation));
            let Some(location) = Location::new(location.generation(), page << PAGE_SHIFT) else {
                return;
            };
            let grant = Grant { location, tag };
            let freeing = Freeing { id: 0, home, grant, space, pages };
            self.freeings.insert(Entry { freeing, local, contents, waiter: None });
            self.counters.count(Event::FreeingResumed);
        });
    }

    /// DELETE without ZERO.
    pub(super) fn delete<S: PageStore + ?Sized>(
        &mut self,
        execution: &Execution<'_>,
        store: &mut S,
    ) -> Deletion {
        let request = execution.request;
        if request.header().flags.contains(Flags::PART) {
            return self.free_part(request, store).into();
        }
        match self.way_to_free(request, store) {
            Ok(Way::Here(local)) if self.freeings.at(local.page()).is_some() => {
                // Its lines came home meanwhile.
                self.begin_freeing(execution, (local, 0), store)
            }
            Ok(Way::Here(local)) => self.delete_here(request, local, store).into(),
            Ok(Way::Scattered(local, pages)) => {
                self.begin_freeing(execution, (local, pages), store)
            }
            Err(refusal) => Err(refusal).into(),
        }
    }

    fn way_to_free<S: PageStore + ?Sized>(
        &self,
        request: &Request<'_>,
        store: &S,
    ) -> Result<Way, Refusal> {
        no_data(request)?;
        let location = memory(request)?;
        location.is_page_aligned().then_some(()).ok_or(Status::Unaligned)?;
        let length = request.header().length;
        let is_own = self.is_own_node(request.datagram.target.node);
        if is_own && self.has_given_any() && !self.ranges.is_earlier(location) {
            // Wherever the pages are: this server knows of the allocation.
            self.check_epoch(request)?;
            self.check_authority(request)?;
            let pages = store.lines().pages_of_allocation(access(request, location, 1), length)?;
            if self.has_given(&(location.page()..location.page() + u64::from(pages))) {
                return Ok(Way::Scattered(location, pages));
            }
        }
        let local = self.resolve(request)?;
        if is_own {
            return Ok(Way::Here(local));
        }
        let access = access(request, local, 1);
        store.check(access)?;
        if !request.header().flags.contains(Flags::ORPHAN) {
            // The home frees it.
            return Err(Status::NoAuthority.into());
        }
        Ok(Way::Scattered(local, store.lines().pages_of_allocation(access, length)?))
    }

    fn delete_here<S: PageStore + ?Sized>(
        &mut self,
        request: &Request<'_>,
        local: Location,
        store: &mut S,
    ) -> Result<Record, Refusal> {
        let (access, length) = (access(request, local, 1), request.header().length);
        if !self.leases.is_idle() {
            let pages = store.allocation(access, length)?;
            if self.leases.holder_in(request.now, pages).is_some() {
                return Err(Status::Busy.into());
            }
        }
        let freed = store.delete(access, length)?;
        self.forget_leases(local.page()..local.page() + u64::from(freed));
        self.notify_invalid(request, u64::from(freed));
        // Otherwise the entry would remain for the next owner of the pages.
        self.provisional.forget(local.page());
        Ok(Record::reply(Command::Delete, Status::Ok, freed))
    }

    /// Stores that an allocation is being freed, and lets the request wait for that.
    fn begin_freeing<S: PageStore + ?Sized>(
        &mut self,
        execution: &Execution<'_>,
        (local, pages): (Location, u32),
        store: &mut S,
    ) -> Deletion {
        let Execution { request, slot, .. } = *execution;
        let target = request.datagram.target;
        let Some(location) = Location::from_bits(target.location) else {
            return Err(Status::Malformed.into()).into();
        };
        let grant = Grant { location, tag: bluebridge_wire::Tag(target.tag) };
        let freeing = Freeing { id: 0, home: target.node, grant, space: target.space, pages };
        if let Some(known) = self.freeings.at(local.page()) {
            let waits = known.waiter.is_some_and(|waiter| waiter.is_repeated_by(request));
            if waits {
                self.counters.count(Event::FreeingRepeated);
                return Deletion::Follows;
            }
            return Err(Status::Busy.into()).into();
        }
        let waiter = Waiter::of(request, slot, Command::Delete);
        let contents = self.contents_at(local.page(), store);
        let entry = Entry { freeing, local: local.page(), contents, waiter: Some(waiter) };
        match self.decide(request.now, entry, store) {
            Ok(()) => Deletion::Follows,
            Err(status) => Err(status.into()).into(),
        }
    }

    /// Decides that an allocation is freed, for good.
    fn decide<S: PageStore + ?Sized>(
        &mut self,
        now: Timestamp,
        entry: Entry,
        store: &mut S,
    ) -> Result<(), Status> {
        let is_leased = |run: Range<u64>| self.leases.holder_in(now, run).is_some();
        if self.runs_here(&entry).0.into_iter().any(is_leased) {
            return Err(Status::Busy);
        }
        let of_space =
            self.freeings.all.iter().filter(|of| of.freeing.space == entry.freeing.space);
        if self.freeings.all.len() >= FREEINGS_MAX.0 || of_space.count() >= FREEINGS_MAX.1 {
            return Err(Status::Overloaded);
        }
        store.lines_mut().begin_freeing(entry.local);
        self.freeings.insert(entry);
        self.counters.count(Event::FreeingBegun);
        Ok(())
    }

    /// A page of an own allocation was freed elsewhere while this server was away: frees the rest of the allocation, too.
    pub(crate) fn free_rest<S: PageStore + ?Sized>(
        &mut self,
        now: Timestamp,
        page: u64,
        store: &mut S,
    ) {
        let first_of_line = line_of(page) * LINE;
        let at = usize::try_from(page - first_of_line).unwrap_or(0);
        let line = store.lines().line(first_of_line).and_then(|line| line.pages.get(at).copied());
        let Some(LinePage { part, colour: Some((generation, tag)), space, .. }) = line else {
            return;
        };
        let distance = match part {
            Part::Free => return,
            Part::First { .. } => 0,
            Part::Further { distance } => u64::from(distance),
        };
        let first = page.checked_sub(distance);
        let location = first.and_then(|first| Location::new(generation, first << PAGE_SHIFT));
        if let Some(location) = location {
            // What is leased here is freed when the line is tried again.
            let _ = self.purge_scattered(now, (space, Grant { location, tag }), store);
        }
    }

    /// An operator frees an allocation that its home has lost, and of which the first page is here; returns its pages. It is
    /// being freed from then on.
    ///
    /// # Errors
    /// Why it is not: [`Status::Busy`] if a page of it is leased here.
    pub fn purge_orphan<S: PageStore + ?Sized>(
        &mut self,
        now: Timestamp,
        (home, local): (NodeId, u64),
        (space, grant): (Space, Grant),
        store: &mut S,
    ) -> Result<u32, Status> {
        if !self.has_authority(now) {
            return Err(Status::NoAuthority);
        }
        let here = self.ranges.local(home, grant.location).filter(|at| at.page() == local);
        let location = here.ok_or(Status::Moved)?;
        if self.givings.marked(local).is_some() {
            return Err(Status::Moved);
        }
        let access = Access { location, length_bytes: 1, tag: grant.tag, space };
        let pages = store.lines().pages_of_allocation(access, 0)?;
        if self.freeings.at(local).is_none() {
            let freeing = Freeing { id: 0, home, grant, space, pages };
            let contents = self.contents_at(local, store);
            self.decide(now, Entry { freeing, local, contents, waiter: None }, store)?;
            self.counters.count(Event::AllocationPurged);
        }
        Ok(pages)
    }

    /// Frees an allocation of this server's own of which parts are elsewhere; nobody waits for it.
    pub(super) fn purge_scattered<S: PageStore + ?Sized>(
        &mut self,
        now: Timestamp,
        (space, grant): (Space, Grant),
        store: &mut S,
    ) -> Result<u32, Status> {
        let access = Access { location: grant.location, length_bytes: 1, tag: grant.tag, space };
        let pages = store.lines().pages_of_allocation(access, 0)?;
        let local = grant.location.page();
        if self.freeings.at(local).is_none() {
            let freeing = Freeing { id: 0, home: self.node, grant, space, pages };
            let contents = store.generation();
            self.decide(now, Entry { freeing, local, contents, waiter: None }, store)?;
        }
        Ok(pages)
    }

    /// Whether the allocation whose first page in the store this is is being freed.
    pub(super) fn is_freeing_at(&self, local: u64) -> bool {
        self.freeings.at(local).is_some()
    }

    /// The first generation of the contents of which a page of the store is.
    fn contents_at<S: PageStore + ?Sized>(&self, local: u64, store: &S) -> ArenaGeneration {
        let name = self.ranges.name_of(&(local..local + 1));
        name.map_or_else(|| store.generation(), |name| name.generation)
    }

    /// The pages of an allocation that are here, by their numbers in the store, in the order of the allocation, and how far
    /// each run is behind the first page. A run is in one line if it is of another server.
    fn runs_here(&self, entry: &Entry) -> (Vec<Range<u64>>, Vec<u64>) {
        let first = entry.freeing.grant.location.page();
        if self.is_own_node(entry.freeing.home) {
            // No page of a line that is elsewhere is leased here.
            return (core::iter::once(first..entry.end()).collect(), vec![0]);
        }
        let (mut runs, mut distances) = (Vec::new(), Vec::new());
        let mut page = first;
        while page < entry.end() {
            let end = (page - page % LINE + LINE).min(entry.end());
            let local = self.ranges.local_of(entry.freeing.home, entry.contents, page);
            if let Some(local) = local.filter(|local| self.givings.marked(*local).is_none()) {
                runs.push(local..local + (end - page));
                distances.push(page - first);
            }
            page = end;
        }
        (runs, distances)
    }

    /// DELETE of a part, by the server that frees the allocation: frees the pages that are here, from the target's page
    /// backwards.
    fn free_part<S: PageStore + ?Sized>(
        &mut self,
        request: &Request<'_>,
        store: &mut S,
    ) -> Result<Record, Refusal> {
        no_data(request)?;
        let location = memory(request)?;
        location.is_page_aligned().then_some(()).ok_or(Status::Unaligned)?;
        let (target, length) = (request.datagram.target, request.header().length);
        let before = u64::from(length.checked_sub(1).ok_or(Status::BadLength)?);
        let last = location.page();
        let first = last.checked_sub(before).ok_or(Status::BadLength)?;
        let mut local = self.resolve(request)?;
        if self.is_own_node(target.node) {
            // Only this server frees its own.
            return Err(Status::Forbidden.into());
        }
        let wanted = access(request, local, 1);
        let mut freed = 0;
        let mut end = last + 1;
        loop {
            let start = ((end - 1) - (end - 1) % LINE).max(first);
            let (count, last_here) = (end - start, local.page());
            let pages = last_here + 1 - count..last_here + 1;
            // Pages of other contents of the node may be at the same place: those of this allocation are elsewhere.
            if !has_colour(&pages, wanted, store) {
                if freed == 0 {
                    return Err(Status::NoAuthority.into());
                }
                break;
            }
            // Whoever takes the line leases also what is free.
            let own = allocated_in_line(&pages, start - first, wanted, store);
            if own.is_some() && self.leases.holder_in(request.now, pages.clone()).is_some() {
                if freed == 0 {
                    self.freeings.close(request.now, pages);
                    return Err(Status::Busy.into());
                }
                break;
            }
            if let Some(own) = own {
                store.lines_mut().free_part(own);
            }
            if start == first {
                self.end_freeing_of(request.now, pages.start, store);
            }
            freed += u32::try_from(count).unwrap_or(0);
            end = start;
            if end == first || freed >= PART_PAGES_MAX {
                break;
            }
            let next = Location::new(location.generation(), (end - 1) << PAGE_SHIFT);
            let next = next.and_then(|next| self.ranges.local(target.node, next));
            match next.filter(|next| self.givings.marked(next.page()).is_none()) {
                Some(next) => local = next,
                None => break,
            }
        }
        self.counters.count(Event::PartFreed);
        Ok(Record::reply(Command::Delete, Status::Ok, freed))
    }

    /// Another server has freed an allocation that this one was freeing, too: the home that is back.
    fn end_freeing_of<S: PageStore + ?Sized>(&mut self, now: Timestamp, local: u64, store: &S) {
        let Some(index) = self.freeings.all.iter().position(|entry| entry.local == local) else {
            return;
        };
        let Entry { freeing, waiter, .. } = self.freeings.all.swap_remove(index);
        self.counters.count(Event::FreeingEnded);
        if let Some(waiter) = waiter {
            self.respond_freed(now, &waiter, freeing.pages, store);
        }
    }

    /// The home is back with the allocation, and has freed all of it, also what is here.
    pub fn hand_over<S: PageStore + ?Sized>(&mut self, now: Timestamp, id: u32, store: &S) {
        if let Some(local) = self.freeings.find(id).map(|entry| entry.local) {
            self.end_freeing_of(now, local, store);
        }
    }

    /// Whether no lease is granted on a page, because it is to be freed.
    pub(super) fn is_to_be_freed(&self, now: Timestamp, pages: &Range<u64>) -> bool {
        if self.freeings.is_idle() {
            return false;
        }
        let overlaps = |other: &Range<u64>| other.start < pages.end && pages.start < other.end;
        let is_closed = |of: &Closed| now < of.until && overlaps(&of.pages);
        let is_of = |entry: &Entry| self.has_page_of(entry, pages);
        self.freeings.closed.iter().any(is_closed) || self.freeings.all.iter().any(is_of)
    }

    /// Whether one of the pages of the store is of an allocation that is being freed.
    fn has_page_of(&self, entry: &Entry, pages: &Range<u64>) -> bool {
        let of = entry.freeing.grant.location.page()..entry.end();
        if self.is_own_node(entry.freeing.home) {
            return of.start < pages.end && pages.start < of.end;
        }
        pages.clone().any(|page| {
            self.ranges.name_of(&(page..page + 1)).is_some_and(|name| {
                (name.node, name.generation) == (entry.freeing.home, entry.contents)
                    && of.contains(&name.first_page)
            })
        })
    }

    fn notify_freed(&mut self, freeing: &Freeing) {
        let Freeing { home, grant, space, pages, .. } = *freeing;
        let location = grant.location.bits();
        let target = Fields { space, node: home, command: 0, tag: grant.tag.0, location };
        self.send_notice(Command::Invalidate, target, u64::from(pages));
    }
}

/// Whether all pages of a line have a colour, or had it last.
fn has_colour<S: PageStore + ?Sized>(pages: &Range<u64>, wanted: Access, store: &S) -> bool {
    let first_of_line = line_of(pages.start) * LINE;
    let colour = Some((wanted.location.generation(), wanted.tag));
    let has = |line: &LineRecord, page: u64| {
        let at = usize::try_from(page - first_of_line).ok();
        at.and_then(|at| line.get(at)).is_some_and(|of| of.colour == colour)
    };
    let line = store.lines().line(first_of_line);
    line.is_some_and(|line| pages.clone().all(|page| has(&line.pages, page)))
}

/// Those of the pages of a line that are of the allocation; `distance` is that of the first one from the allocation's first
/// page. The others were freed before.
fn allocated_in_line<S: PageStore + ?Sized>(
    pages: &Range<u64>,
    distance: u64,
    wanted: Access,
    store: &S,
) -> Option<Range<u64>> {
    let first_of_line = line_of(pages.start) * LINE;
    let line = store.lines().line(first_of_line)?;
    let colour = Some((wanted.location.generation(), wanted.tag));
    let is_of = |page: &u64| {
        let at = usize::try_from(page - first_of_line).ok();
        let Some(of) = at.and_then(|at| line.pages.get(at)) else { return false };
        let distance = distance + (page - pages.start);
        let is_part = match of.part {
            Part::Free => false,
            Part::First { .. } => distance == 0,
            Part::Further { distance: of } => u64::from(of) == distance,
        };
        is_part && of.colour == colour && of.space == wanted.space
    };
    // They are neighbours: all of them were freed before, or none.
    let mut own = pages.clone().filter(is_of);
    let start = own.next()?;
    Some(start..own.next_back().unwrap_or(start) + 1)
}

/// The location of a page of an allocation at home.
fn location_of(freeing: &Freeing, page: u64) -> Option<Location> {
    Location::new(freeing.grant.location.generation(), page << PAGE_SHIFT)
}
