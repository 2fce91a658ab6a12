//! A plain store: first fit, a new colour for each allocation.

use core::ops::Range;
use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
};

use bluebridge_wire::{
    ArenaGeneration, LinePage, Location, NodeId, Space, Status, Tag,
    address::{LINE_BYTES, LINE_PAGES, PAGE_BYTES},
    line::{LineRecord, PageContents, Part},
    page_crc,
};

use crate::{
    direct::{DirectRead, Shared, SharedSession, SharedShard},
    store::{
        Access, Allowance, Creator, Grant, HomeLine, Line, LineStore, PageCrcs, PageStore, Placed,
        StageError, StoreUsage, Taken,
    },
};

pub(crate) const GENERATION: ArenaGeneration = match ArenaGeneration::new(2) {
    Some(generation) => generation,
    None => ArenaGeneration::MAX,
};

#[derive(Clone)]
struct Page {
    bytes: Vec<u8>,
    /// First page, pages, colour and space of its allocation.
    held: Option<(usize, usize, u8, Space)>,
    last_tag: u8,
    version: u64,
    is_withheld: bool,
}

/// What a store shares with direct readers, and what it notes for tests.
#[derive(Default)]
pub(crate) struct SharedParts {
    pub(crate) sessions: Vec<SharedSession>,
    pub(crate) shard: SharedShard,
    pub(crate) leased: BTreeSet<u64>,
    /// The version of a page when it was last marked or unmarked.
    pub(crate) marked_at: BTreeMap<u64, u64>,
    /// What a reader tries at every check of an access, and how often it was admitted and was not.
    pub(crate) probe: Option<DirectRead>,
    pub(crate) probed: RefCell<[u32; 2]>,
}

impl SharedParts {
    pub(crate) fn new(session_count: usize) -> Self {
        let sessions = (0..session_count).map(|_| SharedSession::default()).collect();
        Self { sessions, ..Self::default() }
    }

    fn probe(&self) {
        let Some(read) = self.probe else { return };
        let [.., high, low] = read.session.to_be_bytes();
        let shared = &self.sessions[usize::from(u16::from_be_bytes([high, low]))];
        self.probed.borrow_mut()[usize::from(shared.admit_read(&read).is_none())] += 1;
    }
}

pub(crate) struct PlainStore {
    pages: Vec<Page>,
    pub(crate) quota_pages: u64,
    /// Every allocation is refused with this.
    pub(crate) refuses: Option<Status>,
    /// Deallocation fails.
    pub(crate) keeps: bool,
    /// The creator of each allocation, in order.
    pub(crate) creators: Vec<(Location, Creator)>,
    /// The incarnations that a store that outlives its process keeps.
    pub(crate) fences: BTreeMap<(Space, NodeId), u32>,
    /// Allocations whose requesters may know them.
    completed: BTreeSet<u64>,
    /// `None` without direct readers.
    pub(crate) readers: Option<SharedParts>,
    /// Lines that are another server's, and those of them whose memory may be used for others.
    pub(crate) given: BTreeSet<u64>,
    pub(crate) cleared: BTreeSet<u64>,
    allowances: BTreeMap<u64, (Allowance, bool)>,
    /// The most allowances that are kept.
    pub(crate) allowance_limit: usize,
    last_migration: u64,
    lease_floor: u64,
    reserved: BTreeSet<u64>,
    /// The bytes of reserved lines.
    memory: BTreeMap<u64, Vec<u8>>,
    staged: BTreeMap<u64, (HomeLine, Taken)>,
    /// Pages that were staged with their CRC.
    pub(crate) known_crcs: u32,
    pub(crate) adopted: BTreeMap<u64, HomeLine>,
    /// The first pages of allocations that are being freed.
    freeing: BTreeSet<u64>,
    /// What it was told of lines that come, in order.
    pub(crate) told: Vec<&'static str>,
}

impl PlainStore {
    pub(crate) fn new(pages: u32) -> Self {
        let page = Page {
            bytes: vec![0; PAGE_BYTES],
            held: None,
            last_tag: 0,
            version: 0,
            is_withheld: false,
        };
        let pages = vec![page; pages as usize];
        Self {
            pages,
            quota_pages: u64::MAX,
            refuses: None,
            keeps: false,
            creators: Vec::new(),
            fences: BTreeMap::new(),
            completed: BTreeSet::new(),
            readers: None,
            given: BTreeSet::new(),
            cleared: BTreeSet::new(),
            allowances: BTreeMap::new(),
            allowance_limit: usize::MAX,
            last_migration: 0,
            lease_floor: 0,
            reserved: BTreeSet::new(),
            memory: BTreeMap::new(),
            staged: BTreeMap::new(),
            known_crcs: 0,
            adopted: BTreeMap::new(),
            freeing: BTreeSet::new(),
            told: Vec::new(),
        }
    }

    /// The process ends; what it did not keep is gone.
    pub(crate) fn restart(&mut self) {
        self.pages.iter_mut().for_each(|page| page.is_withheld = false);
        self.reserved = self.staged.keys().copied().collect();
        for page in self.reserved.clone() {
            self.set_withheld(page, true);
        }
        // Nobody needs their memory.
        self.cleared.extend(&self.given);
        let session_count = self.readers.as_ref().map(|readers| readers.sessions.len());
        self.readers = session_count.map(SharedParts::new);
    }

    fn set_withheld(&mut self, first_page: u64, is_withheld: bool) {
        let first = first_page as usize;
        let pages = self.pages[first..first + LINE_PAGES].iter_mut();
        pages.for_each(|page| page.is_withheld = is_withheld);
    }

    pub(crate) fn used_pages(&self) -> usize {
        self.pages.iter().filter(|page| page.held.is_some()).count()
    }

    pub(crate) fn byte(&self, page: u64, place: usize) -> u8 {
        self.pages[page as usize].bytes[place]
    }
}

impl PageStore for PlainStore {
    fn generation(&self) -> ArenaGeneration {
        GENERATION
    }

    fn create(&mut self, space: Space, pages: u32) -> Result<Grant, Status> {
        let pages = pages as usize;
        if let Some(status) = self.refuses {
            return Err(status);
        }
        if (self.used_pages() + pages) as u64 > self.quota_pages {
            return Err(Status::QuotaExceeded);
        }
        let start = (0..self.pages.len())
            .find(|&start| {
                let extent = self.pages.get(start..start + pages);
                extent.is_some_and(|extent| {
                    extent.iter().all(|page| page.held.is_none() && !page.is_withheld)
                })
            })
            .ok_or(Status::OutOfMemory)?;
        let extent = &mut self.pages[start..start + pages];
        let tag = extent.iter().map(|page| page.last_tag).max().unwrap() + 1;
        for page in extent {
            page.bytes.fill(0);
            (page.held, page.last_tag) = (Some((start, pages, tag, space)), tag);
            page.version += 1;
        }
        let location = Location::new(GENERATION, (start * PAGE_BYTES) as u64).unwrap();
        Ok(Grant { location, tag: Tag(tag) })
    }

    fn keep_fence(&mut self, space: Space, node: NodeId, incarnation: u32) {
        self.fences.insert((space, node), incarnation);
    }

    fn fences(&self, each: &mut dyn FnMut(Space, NodeId, u32)) {
        for (&(space, node), &incarnation) in self.fences.iter().filter(|(_, fence)| **fence != 0) {
            each(space, node, incarnation);
        }
    }

    fn note_creator(&mut self, location: Location, creator: Creator) {
        self.creators.push((location, creator));
    }

    fn complete(&mut self, location: Location) {
        self.completed.insert(location.page());
    }

    fn lines(&self) -> &dyn LineStore {
        self
    }

    fn lines_mut(&mut self) -> &mut dyn LineStore {
        self
    }

    fn delete(&mut self, access: Access, pages: u32) -> Result<u32, Status> {
        if self.keeps {
            return Err(Status::Internal);
        }
        let range = self.allocation(access, pages)?;
        self.completed.remove(&range.start);
        for page in &mut self.pages[range.start as usize..range.end as usize] {
            page.held = None;
        }
        Ok((range.end - range.start) as u32)
    }

    fn allocation(&self, access: Access, pages: u32) -> Result<Range<u64>, Status> {
        self.check(access)?;
        let first = access.location.page() as usize;
        let (start, length, ..) = self.pages[first].held.unwrap();
        if start != first || !access.location.is_page_aligned() {
            return Err(Status::Unaligned);
        }
        if pages != 0 && pages as usize != length {
            return Err(Status::BadLength);
        }
        Ok(first as u64..(first + length) as u64)
    }

    fn shared(&self) -> Shared<'_> {
        self.readers.as_ref().map_or(Shared::default(), |readers| Shared {
            sessions: &readers.sessions,
            shard: Some(&readers.shard),
        })
    }

    fn set_leased(&mut self, page: u64, is_leased: bool) {
        let version = self.version(page);
        let readers = self.readers.as_mut().expect("only for readers");
        readers.marked_at.insert(page, version);
        if is_leased {
            readers.leased.insert(page);
        } else {
            readers.leased.remove(&page);
        }
    }

    fn check(&self, access: Access) -> Result<(), Status> {
        if let Some(readers) = &self.readers {
            readers.probe();
        }
        if access.location.generation() != GENERATION {
            return Err(Status::StaleGeneration);
        }
        let last = (access.location.offset() + access.length_bytes.max(1) - 1) / PAGE_BYTES as u64;
        if last >= self.pages.len() as u64 {
            return Err(Status::OutOfRange);
        }
        for page in &self.pages[access.location.page() as usize..=last as usize] {
            let Some((_, _, tag, space)) = page.held else { return Err(Status::NotAllocated) };
            if tag != access.tag.0 {
                return Err(Status::StaleTag);
            }
            if space != access.space {
                return Err(Status::WrongSpace);
            }
        }
        Ok(())
    }

    fn read(&self, page: u64, range: Range<usize>) -> &[u8] {
        &self.pages[page as usize].bytes[range]
    }

    fn write(&mut self, page: u64, start: usize, data: &[u8]) {
        let page = &mut self.pages[page as usize];
        page.bytes[start..start + data.len()].copy_from_slice(data);
        page.version += 1;
    }

    fn zero(&mut self, page: u64, range: Range<usize>) {
        let page = &mut self.pages[page as usize];
        page.bytes[range].fill(0);
        page.version += 1;
    }

    fn version(&self, page: u64) -> u64 {
        self.pages[page as usize].version
    }

    fn usage(&self, _space: Space) -> StoreUsage {
        let used_pages = self.used_pages() as u64;
        let capacity_pages = self.pages.len() as u64;
        let free_pages = capacity_pages - used_pages;
        StoreUsage {
            capacity_pages,
            free_pages,
            quota_pages: self.quota_pages,
            used_pages,
            retired_pages: 3,
        }
    }
}

/// Places for the lines of others are those of own lines that are not used.
impl LineStore for PlainStore {
    fn line(&self, first_page: u64) -> Option<Line> {
        let first = first_page as usize;
        let pages = self.pages.get(first..first + LINE_PAGES)?.iter().zip(first..);
        // Its allocations are complete at home.
        let is_adopted = self.adopted.contains_key(&first_page);
        let mut is_settled = true;
        let mut line = [LinePage::default(); LINE_PAGES];
        for (out, (page, number)) in line.iter_mut().zip(pages) {
            let part = match page.held {
                None => Part::Free,
                Some((start, pages, ..)) if start == number => Part::First { pages: pages as u32 },
                Some((start, ..)) => Part::Further { distance: number.wrapping_sub(start) as u32 },
            };
            is_settled &= is_adopted
                || page.held.is_none_or(|held| self.completed.contains(&(held.0 as u64)));
            *out = LinePage {
                version: page.version,
                part,
                colour: (page.last_tag != 0).then_some((GENERATION, Tag(page.last_tag))),
                space: page.held.map_or(Space(0), |held| held.3),
                contents: PageContents::Written,
                ..LinePage::default()
            };
        }
        Some(Line { pages: line, is_settled })
    }

    fn withhold(&mut self, pages: Range<u64>, is_withheld: bool) {
        for page in &mut self.pages[pages.start as usize..pages.end as usize] {
            assert_ne!(page.is_withheld, is_withheld, "once at most");
            page.is_withheld = is_withheld;
        }
    }

    fn give(&mut self, first_page: u64) {
        self.given.insert(first_page);
        // Direct readers see `given`, too.
    }

    fn clear_given(&mut self, pages: Range<u64>) {
        for page in pages.step_by(LINE_PAGES) {
            assert!(self.given.contains(&page), "it was given");
            self.cleared.insert(page);
        }
    }

    fn reserve(&mut self, lines: u32) -> Option<Vec<Range<u64>>> {
        let is_idle = |line: &usize| {
            let pages = &self.pages[line * LINE_PAGES..(line + 1) * LINE_PAGES];
            pages.iter().all(|page| page.held.is_none() && !page.is_withheld)
        };
        let idle = (0..self.pages.len() / LINE_PAGES).filter(is_idle).take(lines as usize);
        let places: Vec<u64> = idle.map(|line| (line * LINE_PAGES) as u64).collect();
        if places.len() < lines as usize {
            return None;
        }
        for page in &places {
            self.reserved.insert(*page);
            self.set_withheld(*page, true);
        }
        Some(places.into_iter().map(|page| page..page + LINE_PAGES as u64).collect())
    }

    fn reserve_own(&mut self, pages: Range<u64>) -> bool {
        let lines: Vec<u64> = pages.step_by(LINE_PAGES).collect();
        let is_good = |page: &u64| self.cleared.contains(page) && !self.reserved.contains(page);
        let are_good = lines.iter().all(is_good);
        self.reserved.extend(lines.iter().filter(|_| are_good));
        are_good
    }

    fn release(&mut self, pages: Range<u64>) {
        for page in pages.step_by(LINE_PAGES) {
            if !self.staged.contains_key(&page) && self.reserved.remove(&page) {
                self.memory.remove(&page);
                self.told.push("release");
                self.set_withheld(page, false);
            }
        }
    }

    fn memory(&mut self, first_page: u64) -> Option<&mut [u8]> {
        if !self.reserved.contains(&first_page) || self.staged.contains_key(&first_page) {
            return None;
        }
        Some(self.memory.entry(first_page).or_insert_with(|| vec![0; LINE_BYTES]))
    }

    fn stage(
        &mut self,
        first_page: u64,
        name: (HomeLine, Taken),
        pages: &LineRecord,
        crcs: &PageCrcs,
    ) -> Result<(), StageError> {
        if !self.reserved.contains(&first_page) {
            return Err(StageError::NoPlace);
        }
        if self.staged.contains_key(&first_page) {
            return Err(StageError::InDoubt);
        }
        let to = self.pages[first_page as usize..].iter_mut().zip(first_page as usize..);
        let memory = self.memory.remove(&first_page).unwrap_or_else(|| vec![0; LINE_BYTES]);
        for ((page, bytes), (to, number)) in pages.iter().zip(memory.chunks(PAGE_BYTES)).zip(to) {
            let tag = page.colour.map_or(0, |(_, tag)| tag.0);
            to.held = match page.part {
                Part::Free => None,
                Part::First { pages } => Some((number, pages as usize, tag, page.space)),
                // The first page may be elsewhere.
                Part::Further { distance } => {
                    Some((number.wrapping_sub(distance as usize), 0, tag, page.space))
                }
            };
            let is_written = page.contents == PageContents::Written;
            if let Some(crc) = crcs[number % LINE_PAGES].filter(|_| is_written) {
                assert_eq!(bytes.first_chunk().map(page_crc), Some(crc), "page {number}");
                self.known_crcs += 1;
            }
            to.bytes = if is_written { bytes.to_vec() } else { vec![0; PAGE_BYTES] };
            (to.last_tag, to.version) = (tag, to.version.max(page.version));
        }
        self.staged.insert(first_page, name);
        self.told.push("stage");
        Ok(())
    }

    fn adopt(&mut self, first_page: u64) {
        let Some((home, _)) = self.staged.remove(&first_page) else { return };
        self.told.push("adopt");
        self.reserved.remove(&first_page);
        self.cleared.remove(&first_page);
        self.set_withheld(first_page, false);
        if !self.given.remove(&first_page) {
            self.adopted.insert(first_page, home);
        }
    }

    fn drop_staged(&mut self, first_page: u64) {
        if self.staged.remove(&first_page).is_some() {
            self.told.push("drop");
        }
    }

    fn pages_of_allocation(&self, access: Access, pages: u32) -> Result<u32, Status> {
        let range = self.allocation(access, pages)?;
        // The first page is here, and the others may be elsewhere.
        Ok((range.end - range.start) as u32)
    }

    fn begin_freeing(&mut self, first_page: u64) {
        self.told.push("freeing");
        self.freeing.insert(first_page);
    }

    fn freeings(&self, each: &mut dyn FnMut(u64, Access, u32)) {
        for &first in &self.freeing {
            let (_, pages, tag, space) = self.pages[first as usize].held.expect("it is allocated");
            let location = Location::new(GENERATION, first * PAGE_BYTES as u64).unwrap();
            let access = Access { location, length_bytes: 1, tag: Tag(tag), space };
            each(first, access, pages as u32);
        }
    }

    fn end_freeing(&mut self, first_page: u64) {
        assert!(self.freeing.remove(&first_page), "it is being freed");
        let (first, pages, ..) = self.pages[first_page as usize].held.expect("it is allocated");
        for page in &mut self.pages[first..first + pages] {
            page.held = None;
        }
    }

    fn free_part(&mut self, pages: Range<u64>) {
        for page in pages {
            self.freeing.remove(&page);
            self.pages[page as usize].held = None;
        }
    }

    fn is_free(&self, first_page: u64) -> bool {
        let first = first_page as usize;
        let is_free = self.pages[first..first + LINE_PAGES].iter().all(|page| page.held.is_none());
        let is_adopted =
            self.adopted.contains_key(&first_page) && !self.given.contains(&first_page);
        let is_away = self.cleared.contains(&first_page)
            && !self.staged.contains_key(&first_page)
            && !self.adopted.contains_key(&first_page);
        (is_adopted || is_away) && is_free
    }

    fn discard(&mut self, first_page: u64) {
        if self.is_free(first_page) && self.adopted.remove(&first_page).is_none() {
            self.given.remove(&first_page);
            self.cleared.remove(&first_page);
            self.set_withheld(first_page, false);
        }
    }

    fn placed(&self, each: &mut dyn FnMut(u64, Placed)) {
        let given = self.given.iter().filter(|page| !self.staged.contains_key(page));
        given.for_each(|page| match self.adopted.get(page) {
            None => each(*page, Placed::Given),
            Some(home) => each(*page, Placed::GivenOn(*home)),
        });
        let staged = self.staged.iter();
        staged.for_each(|(page, (home, taken))| each(*page, Placed::Staged(*home, *taken)));
        let adopted = self.adopted.iter().filter(|(page, _)| !self.given.contains(page));
        adopted.for_each(|(page, home)| each(*page, Placed::Adopted(*home)));
    }

    fn keep_allowance(&mut self, allowance: &Allowance, is_open: bool) -> bool {
        let id = allowance.migration;
        if self.allowances.len() == self.allowance_limit && !self.allowances.contains_key(&id) {
            return false;
        }
        self.allowances.insert(id, (allowance.clone(), is_open));
        self.last_migration = self.last_migration.max(id);
        true
    }

    fn forget_allowance(&mut self, migration: u64) {
        self.allowances.remove(&migration);
    }

    fn allowances(&self, each: &mut dyn FnMut(&Allowance, bool)) {
        self.allowances.values().for_each(|(allowance, is_open)| each(allowance, *is_open));
    }

    fn last_migration(&self) -> u64 {
        self.last_migration
    }

    fn lease_floor(&self) -> u64 {
        self.lease_floor
    }

    fn raise_lease_floor(&mut self, epoch: u64) {
        self.told.push("floor");
        self.lease_floor = self.lease_floor.max(epoch);
    }
}
