//! The pages of one shard: who has them, their colours and versions.

#[cfg(test)]
mod tests;

use core::ops::Range;
use std::collections::VecDeque;

use bluebridge_protocol::store::{Access, Creator, Grant, PageStore, StoreUsage};
use bluebridge_wire::{
    ArenaGeneration, Location, Space, Status, Tag,
    address::{PAGE_BYTES, PAGE_SHIFT, SHARD_SHIFT},
};

use crate::{extent_tree::ExtentTree, memory::Memory, survey};

/// The last colour; an offset that had it is not used again in this generation.
const LAST_TAG: u8 = u8::MAX;

/// What is read of pages that nobody wrote since they were allocated.
static ZEROS: [u8; PAGE_BYTES] = [0; PAGE_BYTES];

/// The most pages of a shard: its share of the offset range.
pub(crate) const PAGES_MAX: u64 = 1 << (SHARD_SHIFT - PAGE_SHIFT);

/// How an [`Arena`] is made, beside its memory.
#[derive(Clone, Debug)]
pub struct ArenaConfig {
    /// The generation of the contents, which begin empty.
    pub generation: ArenaGeneration,
    /// The shard whose locations these pages are.
    pub shard: u8,
    /// How many pages a space may have; spaces without an entry have `default_quota_pages`. As
    /// many pages' colours are kept for it, so that no other space uses them up.
    pub quotas: Vec<(Space, u64)>,
    /// The quota of all other spaces, in pages.
    pub default_quota_pages: u64,
    /// Freed pages rest in the order of their freeing until more than this share of the arena,
    /// one in so many pages, rests. It spreads the use of colours, and gives time to zero them.
    pub rest_divisor: u32,
}

impl Default for ArenaConfig {
    fn default() -> Self {
        Self {
            generation: ArenaGeneration::default(),
            shard: 0,
            quotas: Vec::new(),
            default_quota_pages: u64::MAX,
            rest_divisor: 16,
        }
    }
}

/// What a page is.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
enum Use {
    /// In no allocation: free, resting or retired.
    #[default]
    None,
    /// The first page of an allocation.
    Head,
    /// A further page of an allocation.
    Body,
}

/// What is in a page's memory.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
enum Contents {
    /// Zeros.
    #[default]
    Zeros,
    /// What an earlier allocation left. An allocation's page reads as zeros, and is zeroed by its
    /// first write: to zero all pages of a CREATE would keep other clients waiting.
    Leftover,
    /// What its allocation wrote, which may be over since.
    Written,
}

/// What is known of a page.
#[derive(Clone, Copy, Debug, Default)]
struct PageState {
    version: u64,
    /// Pages of the allocation (head), or pages back to the head (body).
    link: u32,
    space: Space,
    /// The colour it has, or had last; 0 if none yet.
    tag: u8,
    part: Use,
    contents: Contents,
}

const _: () = assert!(size_of::<PageState>() <= 24);

/// A freed extent that is not given out again yet.
#[derive(Clone, Copy, Debug)]
struct Resting {
    start: u32,
    pages: u32,
}

/// Counts of an [`Arena`], in pages.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ArenaUsage {
    /// Pages in all.
    pub capacity_pages: u64,
    /// Pages that can be allocated: capacity less what is used and what is retired.
    pub free_pages: u64,
    /// Those among the free ones that rest, and are given out again when others run short.
    pub resting_pages: u64,
    /// Pages whose colours are used up in this generation.
    pub retired_pages: u64,
    /// Pages in allocations.
    pub used_pages: u64,
}

/// One shard's pages: a [`PageStore`] in memory.
///
/// An allocation's colour is one more than the highest that any of its pages had, so no pointer of
/// the generation ever fits twice. A page with the last colour retires when it is freed.
#[derive(Debug)]
pub struct Arena {
    generation: ArenaGeneration,
    first_page: u64,
    memory: Memory,
    pages: Vec<PageState>,
    /// For whom the allocation was made whose first page this is; apart from the pages' states, which
    /// every access looks at.
    creators: Vec<Creator>,
    free: ExtentTree,
    resting: VecDeque<Resting>,
    /// How many of `resting`, from its front, were zeroed.
    cleared_count: usize,
    /// How many pages of the one behind those were.
    cleared_of_next: u32,
    resting_pages: u32,
    rest_limit_pages: u32,
    retired_pages: u64,
    /// Colours that all pages together have used up.
    worn_colours: u64,
    quotas: Vec<Quota>,
    default_quota_pages: u64,
}

#[derive(Clone, Copy, Debug)]
struct Quota {
    space: Space,
    limit_pages: u64,
    used_pages: u64,
    /// Colours that its allocations used up.
    worn_colours: u64,
}

impl Quota {
    const fn new(space: Space, limit_pages: u64) -> Self {
        Self { space, limit_pages, used_pages: 0, worn_colours: 0 }
    }

    /// Colours that are kept for the space; without a quota, none.
    const fn kept_colours(&self) -> u64 {
        match self.limit_pages {
            u64::MAX => 0,
            pages => pages.saturating_mul(COLOURS_PER_PAGE).saturating_sub(self.worn_colours),
        }
    }
}

/// Allocations that an offset is good for in a generation, if each is a page.
const COLOURS_PER_PAGE: u64 = LAST_TAG as u64;

impl Arena {
    /// An arena over zeroed `memory`, which is cut into whole pages; what no shard can address is
    /// left out.
    #[must_use]
    pub fn new(config: &ArenaConfig, memory: Memory) -> Self {
        let page_count = (memory.len() / PAGE_BYTES).min(index_of(PAGES_MAX));
        let capacity = u32::try_from(page_count).unwrap_or(u32::MAX);
        let rest_limit_pages = capacity / config.rest_divisor.max(1);
        let quota = |&(space, limit_pages): &(Space, u64)| Quota::new(space, limit_pages);
        Self {
            generation: config.generation,
            first_page: u64::from(config.shard) << (SHARD_SHIFT - PAGE_SHIFT),
            memory,
            pages: vec![PageState::default(); page_count],
            creators: vec![Creator::default(); page_count],
            free: ExtentTree::new(capacity),
            // An extent has a page at least, and one more than the limit is there for a moment.
            resting: VecDeque::with_capacity(rest_limit_pages as usize + 1),
            cleared_count: 0,
            cleared_of_next: 0,
            resting_pages: 0,
            rest_limit_pages,
            retired_pages: 0,
            worn_colours: 0,
            quotas: config.quotas.iter().map(quota).collect(),
            default_quota_pages: config.default_quota_pages,
        }
    }

    /// An arena of `pages` pages in plain process memory, for simulations and tests.
    #[must_use]
    pub fn on_heap(config: &ArenaConfig, pages: u32) -> Self {
        Self::new(config, Memory::heap(pages as usize * PAGE_BYTES))
    }

    /// How full it is.
    #[must_use]
    pub fn arena_usage(&self) -> ArenaUsage {
        let capacity_pages = self.pages.len() as u64;
        let resting_pages = u64::from(self.resting_pages);
        let free_pages = u64::from(self.free.free_pages()) + resting_pages;
        let retired_pages = self.retired_pages;
        let used_pages = capacity_pages - free_pages - retired_pages;
        ArenaUsage { capacity_pages, free_pages, resting_pages, retired_pages, used_pages }
    }

    /// Zeroes up to `budget` resting pages, so that later writes need not and nothing stays in
    /// memory that was freed; says how many. For the serving loop when it is idle.
    pub fn tidy(&mut self, budget: u32) -> u32 {
        let mut left = budget;
        while left > 0 {
            let Some(&Resting { start, pages }) = self.resting.get(self.cleared_count) else {
                break;
            };
            let now = left.min(pages - self.cleared_of_next);
            self.clear_extent(start + self.cleared_of_next, now);
            self.cleared_of_next += now;
            left -= now;
            if self.cleared_of_next == pages {
                (self.cleared_count, self.cleared_of_next) = (self.cleared_count + 1, 0);
            }
        }
        budget - left
    }

    /// Shows the allocations from a page on, by their first pages, until `each` returns false or
    /// `budget` pages were looked at (an allocation counts as one); the page to go on from, `None` at
    /// the end.
    pub(crate) fn survey(
        &self,
        from: u64,
        budget: u32,
        each: &mut dyn FnMut(survey::Allocation) -> bool,
    ) -> Option<u64> {
        let mut number = index_of(from.saturating_sub(self.first_page));
        for _ in 0..budget {
            let page = self.pages.get(number)?;
            match page.part {
                Use::None => number += 1,
                // The rest of an allocation that began before.
                Use::Body => number = number - page.link as usize + self.length_of(number),
                Use::Head => {
                    if let Some(location) = self.location_of(number) {
                        let go_on = each(survey::Allocation {
                            space: page.space,
                            grant: Grant { location, tag: Tag(page.tag) },
                            pages: page.link,
                            creator: self.creators[number],
                        });
                        if !go_on {
                            return Some(self.first_page + number as u64);
                        }
                    }
                    number += page.link as usize;
                }
            }
        }
        (number < self.pages.len()).then(|| self.first_page + number as u64)
    }

    /// Pages of the allocation that a page belongs to.
    fn length_of(&self, number: usize) -> usize {
        let page = &self.pages[number];
        match page.part {
            Use::None => 0,
            Use::Head => page.link as usize,
            Use::Body => self.pages[number - page.link as usize].link as usize,
        }
    }

    /// The location of a page's first byte.
    fn location_of(&self, number: usize) -> Option<Location> {
        Location::new(self.generation, (self.first_page + number as u64) << PAGE_SHIFT)
    }

    /// Where the allocation at a location begins here, and its pages, if it has so many.
    fn extent_of(&self, access: Access, pages: u32) -> Result<(usize, u32), Status> {
        self.check(access)?;
        let start = self.index(access.location.page()).ok_or(Status::OutOfRange)?;
        let PageState { link: length, part, .. } = self.pages[start];
        if part != Use::Head || !access.location.is_page_aligned() {
            return Err(Status::Unaligned);
        }
        if pages != 0 && pages != length {
            return Err(Status::BadLength);
        }
        Ok((start, length))
    }

    /// The page's number here; `None` if the location leads elsewhere.
    fn index(&self, page: u64) -> Option<usize> {
        let number = index_of(page.checked_sub(self.first_page)?);
        (number < self.pages.len()).then_some(number)
    }

    fn bytes_of(&self, page: u64, range: &Range<usize>) -> Range<usize> {
        let start = index_of(page - self.first_page) * PAGE_BYTES;
        start + range.start..start + range.end
    }

    fn page(&mut self, page: u64) -> &mut PageState {
        &mut self.pages[index_of(page - self.first_page)]
    }

    fn quota(&mut self, space: Space) -> &mut Quota {
        let place = self.quotas.iter().position(|quota| quota.space == space);
        let place = place.unwrap_or_else(|| {
            let limit_pages = self.default_quota_pages;
            self.quotas.push(Quota::new(space, limit_pages));
            self.quotas.len() - 1
        });
        &mut self.quotas[place]
    }

    /// Takes an extent; resting ones are given up for it, the longest at rest first.
    fn take(&mut self, pages: u32) -> Option<u32> {
        if u64::from(self.free.free_pages()) + u64::from(self.resting_pages) < u64::from(pages) {
            return None;
        }
        loop {
            if let Some(start) = self.free.take(pages) {
                return Some(start);
            }
            self.end_rest()?;
        }
    }

    /// Ends the rest of the extent that rests longest.
    fn end_rest(&mut self) -> Option<()> {
        let Resting { start, pages } = self.resting.pop_front()?;
        match self.cleared_count {
            0 => self.cleared_of_next = 0,
            count => self.cleared_count = count - 1,
        }
        self.resting_pages -= pages;
        self.free.release(start, pages);
        Some(())
    }

    /// Whether a space may use up so many colours: its own, or those that are kept for nobody.
    fn may_wear(&mut self, space: Space, colours: u64) -> bool {
        if self.quota(space).kept_colours() >= colours {
            return true;
        }
        let others = self.quotas.iter().filter(|quota| quota.space != space);
        let kept = others.fold(0_u64, |sum, quota| sum.saturating_add(quota.kept_colours()));
        let all = self.pages.len() as u64 * COLOURS_PER_PAGE;
        all.saturating_sub(self.worn_colours).saturating_sub(colours) >= kept
    }

    /// Zeroes what is not zero in an extent, in as few stretches as there are.
    fn clear_extent(&mut self, start: u32, pages: u32) {
        let end = start as usize + pages as usize;
        let mut number = start as usize;
        while number < end {
            let from = number;
            while number < end && self.pages[number].contents != Contents::Zeros {
                self.pages[number].contents = Contents::Zeros;
                number += 1;
            }
            self.memory[from * PAGE_BYTES..number * PAGE_BYTES].fill(0);
            number += usize::from(from == number);
        }
    }

    /// Lets freed pages rest; those with the last colour retire.
    fn lay_to_rest(&mut self, start: u32, pages: u32) {
        // All pages of an allocation had its colour.
        if self.pages[start as usize].tag == LAST_TAG {
            self.retired_pages += u64::from(pages);
            return;
        }
        self.resting.push_back(Resting { start, pages });
        self.resting_pages += pages;
        while self.resting_pages > self.rest_limit_pages {
            if self.end_rest().is_none() {
                break;
            }
        }
    }
}

/// A number of pages that are in memory, so it fits.
fn index_of(pages: u64) -> usize {
    usize::try_from(pages).unwrap_or(usize::MAX)
}

impl Arena {
    /// A colour that the pages of a free extent never had, and that differs from the allocations
    /// on both sides, so that who runs over an end is refused and not served the neighbour's bytes;
    /// and how many colours of its pages that uses up.
    fn colour(&self, extent: Range<usize>) -> (u8, u64) {
        let before = extent.start.checked_sub(1).and_then(|page| self.pages.get(page));
        let after = self.pages.get(extent.end);
        let beside = [before, after].map(|page| page.filter(|page| page.part != Use::None));
        let is_beside = |tag: u8| beside.iter().flatten().any(|page| page.tag == tag);
        let pages = &self.pages[extent];
        let (highest, sum) = pages.iter().fold((0, 0), |(highest, sum): (u8, u64), page| {
            (highest.max(page.tag), sum + u64::from(page.tag))
        });
        // Pages that rest or are free never had the last colour.
        let first = highest + 1;
        // Of three colours one is on neither side. Where they are used up, the first must do.
        let tag = (first..=u8::MAX).take(3).find(|tag| !is_beside(*tag)).unwrap_or(first);
        (tag, pages.len() as u64 * u64::from(tag) - sum)
    }
}

impl PageStore for Arena {
    fn generation(&self) -> ArenaGeneration {
        self.generation
    }

    fn create(&mut self, space: Space, pages: u32) -> Result<Grant, Status> {
        if pages == 0 {
            return Err(Status::BadLength);
        }
        let quota = self.quota(space);
        if quota.used_pages.saturating_add(u64::from(pages)) > quota.limit_pages {
            return Err(Status::QuotaExceeded);
        }
        let start = self.take(pages).ok_or(Status::OutOfMemory)?;
        let offset = (self.first_page + u64::from(start)) << PAGE_SHIFT;
        let location = Location::new(self.generation, offset).ok_or(Status::OutOfMemory)?;
        let extent = start as usize..start as usize + pages as usize;
        let (tag, colours) = self.colour(extent.clone());
        if !self.may_wear(space, colours) {
            self.free.release(start, pages);
            return Err(Status::QuotaExceeded);
        }
        let quota = self.quota(space);
        quota.used_pages += u64::from(pages);
        quota.worn_colours += colours;
        self.worn_colours += colours;
        for (back, page) in (0..).zip(&mut self.pages[extent]) {
            let (part, link) = if back == 0 { (Use::Head, pages) } else { (Use::Body, back) };
            let version = page.version + 1;
            let contents = match page.contents {
                Contents::Zeros => Contents::Zeros,
                Contents::Leftover | Contents::Written => Contents::Leftover,
            };
            *page = PageState { version, link, space, tag, part, contents };
        }
        Ok(Grant { location, tag: Tag(tag) })
    }

    fn note_creator(&mut self, location: Location, creator: Creator) {
        if let Some(start) = self.index(location.page()) {
            self.creators[start] = creator;
        }
    }

    fn delete(&mut self, access: Access, pages: u32) -> Result<u32, Status> {
        let (start, length) = self.extent_of(access, pages)?;
        let space = self.pages[start].space;
        for page in &mut self.pages[start..start + length as usize] {
            page.part = Use::None;
        }
        self.quota(space).used_pages -= u64::from(length);
        self.lay_to_rest(u32::try_from(start).unwrap_or(u32::MAX), length);
        Ok(length)
    }

    fn allocation(&self, access: Access, pages: u32) -> Result<Range<u64>, Status> {
        let (_, length) = self.extent_of(access, pages)?;
        let first = access.location.page();
        Ok(first..first + u64::from(length))
    }

    fn check(&self, access: Access) -> Result<(), Status> {
        if access.location.generation() != self.generation {
            return Err(Status::StaleGeneration);
        }
        let bytes = access.length_bytes.max(1);
        let last = access.location.offset().checked_add(bytes - 1).ok_or(Status::OutOfRange)?;
        let first = self.index(access.location.page()).ok_or(Status::OutOfRange)?;
        let last = self.index(last >> PAGE_SHIFT).ok_or(Status::OutOfRange)?;
        let mut number = first;
        while number <= last {
            let page = &self.pages[number];
            let length = match page.part {
                Use::None => return Err(Status::NotAllocated),
                Use::Head => page.link,
                Use::Body => self.pages[number - page.link as usize].link - page.link,
            };
            if page.tag != access.tag.0 {
                return Err(Status::StaleTag);
            }
            if page.space != access.space {
                return Err(Status::WrongSpace);
            }
            // The rest of the allocation is the same.
            number += length as usize;
        }
        Ok(())
    }

    fn read(&self, page: u64, range: Range<usize>) -> &[u8] {
        match self.pages[index_of(page - self.first_page)].contents {
            Contents::Leftover => &ZEROS[range],
            Contents::Written | Contents::Zeros => &self.memory[self.bytes_of(page, &range)],
        }
    }

    fn write(&mut self, page: u64, start: usize, data: &[u8]) {
        let bytes = self.bytes_of(page, &(0..PAGE_BYTES));
        let state = self.page(page);
        state.version += 1;
        let before = core::mem::replace(&mut state.contents, Contents::Written);
        let bytes = &mut self.memory[bytes];
        let end = start + data.len();
        if before == Contents::Leftover {
            bytes[..start].fill(0);
            bytes[end..].fill(0);
        }
        bytes[start..end].copy_from_slice(data);
    }

    fn zero(&mut self, page: u64, range: Range<usize>) {
        let bytes = self.bytes_of(page, &range);
        let state = self.page(page);
        state.version += 1;
        if state.contents == Contents::Written {
            self.memory[bytes].fill(0);
        }
    }

    fn version(&self, page: u64) -> u64 {
        self.index(page).map_or(0, |number| self.pages[number].version)
    }

    fn usage(&self, space: Space) -> StoreUsage {
        let quota = self.quotas.iter().find(|quota| quota.space == space);
        let (quota_pages, used_pages) = quota
            .map_or((self.default_quota_pages, 0), |quota| (quota.limit_pages, quota.used_pages));
        StoreUsage {
            capacity_pages: self.pages.len() as u64,
            free_pages: self.arena_usage().free_pages,
            quota_pages,
            used_pages,
        }
    }
}
