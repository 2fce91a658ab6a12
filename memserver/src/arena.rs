//! The pages of one shard: who has them, their colours and versions.

mod colour;
#[cfg(test)]
mod tests;

use core::ops::Range;
use std::collections::VecDeque;

use bluebridge_protocol::store::{Access, Creator, Grant, PageStore, StoreUsage};
use bluebridge_wire::{
    ArenaGeneration, Location, Space, Status,
    address::{PAGE_BYTES, PAGE_SHIFT, SHARD_SHIFT},
};

use self::colour::{CHOICE, Colour, Palette};
use crate::{extent_tree::ExtentTree, memory::Memory, survey};

/// What is read of pages that nobody wrote since they were allocated.
static ZEROS: [u8; PAGE_BYTES] = [0; PAGE_BYTES];

/// Generations that an arena asks for at once: as many as it has, within these bounds. Few are lost
/// when the server is restarted soon, and one that uses many asks seldom.
const GENERATIONS_ASKED: (u16, u16) = (2, 64);

/// More generations are asked for when as large a part of the unallocated pages, one in so many,
/// cannot be allocated without.
const RETIRED_DIVISOR: u32 = 4;

/// The most pages of a shard: its share of the offset range.
pub(crate) const PAGES_MAX: u64 = 1 << (SHARD_SHIFT - PAGE_SHIFT);

/// How an [`Arena`] is made, beside its memory.
#[derive(Clone, Debug)]
pub struct ArenaConfig {
    /// The first generation of the contents, which begin empty.
    pub generation: ArenaGeneration,
    /// The last generation that is reserved for it; [`Arena::reserve`] adds more.
    pub last_generation: ArenaGeneration,
    /// The tags of a generation are 1 to this, at least 3. Fewer than 255 are for tests that use
    /// generations up.
    pub last_tag: u8,
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
            last_generation: ArenaGeneration::default(),
            last_tag: u8::MAX,
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
    /// The colour it has, or had last.
    colour: Colour,
    space: Space,
    part: Use,
    contents: Contents,
}

const _: () = assert!(size_of::<PageState>() <= 24);

/// A freed extent that is not given out again yet: one allocation's pages, of one colour.
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
    /// Pages whose colours are used up: until more generations are reserved, or for good if
    /// `last_generation` is [`ArenaGeneration::MAX`].
    pub retired_pages: u64,
    /// Pages in allocations.
    pub used_pages: u64,
    /// The last generation that is reserved.
    pub last_generation: ArenaGeneration,
    /// The last generation that should be reserved; greater than `last_generation` if the arena
    /// needs more, or will before long.
    pub wanted_generation: ArenaGeneration,
}

/// One shard's pages: a [`PageStore`] in memory.
///
/// An allocation's colour, a generation and a tag, comes after the colours that any of its pages had,
/// so no pointer ever fits twice. A page whose colours are used up retires when it is freed, until
/// [`Arena::reserve`] adds generations.
#[derive(Debug)]
pub struct Arena {
    palette: Palette,
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
    /// Extents whose colours were used up when they were freed, in the order of their freeing.
    retired: VecDeque<Resting>,
    /// How many of `retired`, from its front, have colours again, and their pages.
    renewed_count: usize,
    renewed_pages: u32,
    /// Pages of the others.
    retired_pages: u32,
    /// Whether pages could not be allocated that have colours if more generations are reserved.
    is_held_up: bool,
    /// Whether generations that are asked for come soon.
    is_reserving: bool,
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

    /// Colours that are kept for the space, if a page has so many; without a quota, none.
    const fn kept_colours(&self, of_page: u64) -> u64 {
        match self.limit_pages {
            u64::MAX => 0,
            pages => pages.saturating_mul(of_page).saturating_sub(self.worn_colours),
        }
    }
}

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
            palette: Palette::new(config.generation, config.last_generation, config.last_tag),
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
            // Grows when colours are used up, to 8 bytes a page at most.
            retired: VecDeque::new(),
            renewed_count: 0,
            renewed_pages: 0,
            retired_pages: 0,
            is_held_up: false,
            is_reserving: true,
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
        let free_pages = u64::from(self.free_pages());
        let retired_pages = u64::from(self.retired_pages);
        let used_pages = capacity_pages - free_pages - retired_pages;
        ArenaUsage {
            capacity_pages,
            free_pages,
            resting_pages,
            retired_pages,
            used_pages,
            last_generation: self.palette.last(),
            wanted_generation: self.wanted_generation(),
        }
    }

    /// Adds the generations up to `last`, which the controller reserved for this server alone; a
    /// smaller one changes nothing.
    pub fn reserve(&mut self, last: ArenaGeneration) {
        if self.palette.extend(last) {
            self.renewed_count = self.retired.len();
            self.renewed_pages += self.retired_pages;
            self.retired_pages = 0;
            self.is_held_up = false;
            self.is_reserving = true;
        }
    }

    /// Whether generations that are asked for can be expected soon, as is taken for granted at first
    /// and after each [`Self::reserve`]. If not, whoever needs them runs out of memory at once.
    pub const fn set_reserving(&mut self, is_reserving: bool) {
        self.is_reserving = is_reserving;
    }

    /// More are wanted ahead of need: when a page has less than half of the colours of a generation
    /// left on average, when many that could be allocated have none left, or when a CREATE failed
    /// for want of them. Not when a few pages are used up: others are used then, which evens out the
    /// wear.
    fn wanted_generation(&self) -> ArenaGeneration {
        let last = self.palette.last();
        let pages = self.pages.len() as u64;
        let colours = pages * u64::from(self.palette.count());
        let reserve = pages * u64::from(self.palette.of_generation()) / 2;
        let is_worn = colours.saturating_sub(self.worn_colours) < reserve;
        let unallocated = self.free_pages() + self.retired_pages;
        let is_short = self.retired_pages > unallocated / RETIRED_DIVISOR;
        if !(is_worn || is_short || self.is_held_up) {
            return last;
        }
        let (least, most) = GENERATIONS_ASKED;
        last.saturating_add(self.palette.generation_count().clamp(least, most))
    }

    /// Pages that can be allocated.
    fn free_pages(&self) -> u32 {
        self.free.free_pages() + self.resting_pages + self.renewed_pages
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
                    if let Some(grant) = self.grant_of(number) {
                        let go_on = each(survey::Allocation {
                            space: page.space,
                            grant,
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

    /// The location and tag with which pointers to an allocated page are made.
    fn grant_of(&self, number: usize) -> Option<Grant> {
        let (generation, tag) = self.pages[number].colour.generation_and_tag()?;
        let offset = (self.first_page + number as u64) << PAGE_SHIFT;
        Some(Grant { location: Location::new(generation, offset)?, tag })
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

    /// Takes an extent; renewed and resting ones are given up for it, the longest unused first.
    ///
    /// # Errors
    /// [`Status::Overloaded`] if retired pages are in the way and more generations can be expected in a
    /// moment; else [`Status::OutOfMemory`].
    fn take(&mut self, pages: u32) -> Result<u32, Status> {
        while self.free_pages() >= pages {
            if let Some(start) = self.free.take(pages) {
                return Ok(start);
            }
            if self.end_retirement().or_else(|| self.end_rest()).is_none() {
                break;
            }
        }
        let unallocated = self.free_pages() + self.retired_pages;
        let may_fit = self.retired_pages > 0 && unallocated >= pages;
        self.is_held_up |= may_fit;
        if may_fit && self.is_reserving && self.palette.generations_left() > 0 {
            return Err(Status::Overloaded);
        }
        Err(Status::OutOfMemory)
    }

    /// Gives the extent back that retired first, if it has colours again.
    fn end_retirement(&mut self) -> Option<()> {
        self.renewed_count = self.renewed_count.checked_sub(1)?;
        let Resting { start, pages } = self.retired.pop_front()?;
        self.renewed_pages -= pages;
        self.free.release(start, pages);
        Some(())
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
        let of_page = self.palette.allocations_of_page();
        if self.quota(space).kept_colours(of_page) >= colours {
            return true;
        }
        let others = self.quotas.iter().filter(|quota| quota.space != space);
        let kept = others.fold(0_u64, |sum, quota| sum.saturating_add(quota.kept_colours(of_page)));
        let all = self.pages.len() as u64 * of_page;
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

    /// Lets freed pages rest; those whose colours are used up retire.
    fn lay_to_rest(&mut self, start: u32, pages: u32) {
        // All pages of an allocation had its colour.
        if !self.palette.is_usable(self.pages[start as usize].colour) {
            self.retired.push_back(Resting { start, pages });
            self.retired_pages += pages;
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
    /// The number of a colour that the pages of a free extent never had, and that differs from the
    /// allocations on both sides, so that who runs over an end is refused and not served the
    /// neighbour's bytes; and how many colours of its pages that uses up.
    fn next_colour(&self, extent: Range<usize>) -> (u32, u64) {
        let before = extent.start.checked_sub(1).and_then(|page| self.pages.get(page));
        let after = self.pages.get(extent.end);
        let beside = [before, after]
            .map(|page| page.filter(|page| page.part != Use::None))
            .map(|page| page.map(|page| self.palette.number(page.colour)));
        let pages = &self.pages[extent];
        let (highest, sum) = pages.iter().fold((0, 0), |(highest, sum): (u32, u64), page| {
            let number = self.palette.number(page.colour);
            (highest.max(number), sum + u64::from(number))
        });
        // Pages that can be allocated have so many colours left, and of three one is on neither side.
        let choice = highest + 1..=highest + CHOICE;
        let number = choice.into_iter().find(|number| !beside.contains(&Some(*number)));
        let number = number.unwrap_or(highest + 1);
        (number, pages.len() as u64 * u64::from(number) - sum)
    }

    /// Whether a range is all of one allocation with the pointer's colour and space.
    fn look(&self, access: Access) -> Result<(), Status> {
        let bytes = access.length_bytes.max(1);
        let last = access.location.offset().checked_add(bytes - 1).ok_or(Status::OutOfRange)?;
        let first = self.index(access.location.page()).ok_or(Status::OutOfRange)?;
        let last = self.index(last >> PAGE_SHIFT).ok_or(Status::OutOfRange)?;
        let colour = Colour::new(access.location.generation(), access.tag);
        let mut number = first;
        while number <= last {
            let page = &self.pages[number];
            let length = match page.part {
                Use::None => return Err(Status::NotAllocated),
                Use::Head => page.link,
                Use::Body => self.pages[number - page.link as usize].link - page.link,
            };
            if page.colour != colour {
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
}

impl PageStore for Arena {
    fn generation(&self) -> ArenaGeneration {
        self.palette.first()
    }

    fn create(&mut self, space: Space, pages: u32) -> Result<Grant, Status> {
        if pages == 0 {
            return Err(Status::BadLength);
        }
        let capacity_pages = self.pages.len() as u64;
        let quota = self.quota(space);
        // Who may have all of the memory does not run into a quota but out of memory, and may find
        // some on another server.
        let is_bound = quota.limit_pages < capacity_pages;
        if is_bound && quota.used_pages.saturating_add(u64::from(pages)) > quota.limit_pages {
            return Err(Status::QuotaExceeded);
        }
        let start = self.take(pages)?;
        let extent = start as usize..start as usize + pages as usize;
        let (number, colours) = self.next_colour(extent.clone());
        let (generation, tag) = self.palette.colour(number);
        let colour = Colour::new(generation, tag);
        let offset = (self.first_page + u64::from(start)) << PAGE_SHIFT;
        let location = Location::new(generation, offset).ok_or(Status::OutOfMemory)?;
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
            *page = PageState { version, link, colour, space, part, contents };
        }
        Ok(Grant { location, tag })
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
        // A page's colour is never of another life, so only a refusal has to tell that apart.
        self.look(access).map_err(|status| match self.palette.holds(access.location.generation()) {
            true => status,
            false => Status::StaleGeneration,
        })
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
            retired_pages: u64::from(self.retired_pages),
        }
    }
}
