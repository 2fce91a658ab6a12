//! The pages of one shard: their allocation, their colours and versions.
//!
//! * `pages`: bytes and states of pages, and their changes; `frames`: the memory that a line has.
//! * `colour`: which colours follow each other.
//! * `lines`: the lines that this server gives to others, and those that it takes from them; `freeing`: allocations of which
//!   some lines are elsewhere.

mod colour;
#[cfg(test)]
mod crash_tests;
mod frames;
mod freeing;
#[cfg(test)]
mod freeing_tests;
mod lines;
#[cfg(test)]
mod lines_tests;
mod listing;
mod pages;
#[cfg(test)]
mod tests;

use core::ops::Range;
use std::collections::VecDeque;

use arrayvec::ArrayVec;
use bluebridge_protocol::{
    direct::Shared,
    store::{
        ADOPTED_PAGES_FROM, Access, Creator, Grant, LineStore, PageStore, PageWrite, StoreUsage,
    },
};
use bluebridge_wire::{
    ArenaGeneration, Location, NodeId, Space, Status,
    address::{LINE_PAGES, PAGE_BYTES, PAGE_SHIFT, SHARD_SHIFT},
};

use self::{
    colour::{CHOICE, Colour, Palette},
    lines::Places,
    pages::{Contents, NewBytes, Pages, Use},
};
use crate::{
    extent_tree::ExtentTree,
    kept::{PageRecord, ShardMemory},
    memory::Memory,
};

pub use self::pages::Damaged;

/// The bytes of a page that was not written since it was allocated.
static ZEROS: [u8; PAGE_BYTES] = [0; PAGE_BYTES];

/// Bounds on the number of generations that an arena requests at once; between them it requests as
/// many as it has. A small number wastes little when the server restarts soon; a large number makes
/// requests rare for an arena that uses many.
const GENERATIONS_REQUESTED: (u16, u16) = (2, 64);

/// More generations are requested when one part in this many of the unallocated pages cannot be
/// allocated without them.
const RETIRED_DIVISOR: u32 = 4;

/// The configuration of an [`Arena`], except its memory.
#[derive(Clone, Debug)]
pub struct ArenaConfig {
    /// The first generation of the contents, which begin empty.
    pub generation: ArenaGeneration,
    /// The last generation that is reserved for it; [`Arena::reserve`] adds more.
    pub last_generation: ArenaGeneration,
    /// The tags of a generation are 1 to this, at least 3. Only tests that use up generations set
    /// it below 255.
    pub last_tag: u8,
    /// The shard whose locations these pages are.
    pub shard: u8,
    /// How many pages a space may have; spaces without an entry have `default_quota_pages`. The
    /// colours of as many pages are reserved for the space, so that no other space uses them up.
    pub quotas: Vec<(Space, u64)>,
    /// The quota of all other spaces, in pages.
    pub default_quota_pages: u64,
    /// Freed pages are in quarantine, in the order in which they were freed, until they are more
    /// than one part in this many of the arena. This spreads the use of colours, and gives time to
    /// zero the pages.
    pub quarantine_divisor: u32,
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
            quarantine_divisor: 16,
        }
    }
}

/// A freed extent that is not allocated again yet: the pages of one allocation, all of one colour.
#[derive(Clone, Copy, Debug)]
struct FreedExtent {
    start: u32,
    pages: u32,
}

/// Counts of an [`Arena`], in pages unless they say otherwise.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ArenaUsage {
    /// Pages in all.
    pub capacity_pages: u64,
    /// Pages that can be allocated: capacity less used and retired pages, and less those for which no own address is
    /// left because lines moved away.
    pub free_pages: u64,
    /// Free pages in quarantine; they are allocated again when the others run short.
    pub quarantined_pages: u64,
    /// Pages whose colours are used up. They can be allocated again when more generations are
    /// reserved, and never if `last_generation` is [`ArenaGeneration::MAX`].
    pub retired_pages: u64,
    /// Pages in allocations.
    pub used_pages: u64,
    /// Lines of other servers that are here or on their way.
    pub adopted_lines: u64,
    /// The last generation that is reserved.
    pub last_generation: ArenaGeneration,
    /// The last generation that should be reserved; greater than `last_generation` if the arena
    /// needs more generations, or will soon.
    pub wanted_generation: ArenaGeneration,
}

/// One shard's pages: a [`PageStore`] in memory.
///
/// The colour of an allocation, a generation and a tag, comes after all colours that its pages had
/// before, so no pointer ever refers to two allocations. A page whose colours are used up retires
/// when it is freed, until [`Arena::reserve`] adds generations.
#[derive(Debug)]
pub struct Arena {
    palette: Palette,
    first_page: u64,
    pages: Pages,
    free: ExtentTree,
    quarantined: VecDeque<FreedExtent>,
    /// How many extents at the front of `quarantined` are zeroed.
    cleared_count: usize,
    /// How many pages of the next extent are zeroed.
    cleared_of_next: u32,
    quarantined_pages: u32,
    quarantine_limit_pages: u32,
    /// Extents whose colours were used up when they were freed, in the order of their freeing.
    retired: VecDeque<FreedExtent>,
    /// How many extents at the front of `retired` have colours again, and their pages.
    renewed_count: usize,
    renewed_pages: u32,
    /// Pages of the other retired extents.
    retired_pages: u32,
    /// Ranges of which no page is allocated, apart from each other. What is freed in them stays in quarantine or
    /// retired until it would be free.
    withheld: Vec<Range<u32>>,
    /// Pages of these ranges that would be free.
    withheld_pages: u32,
    /// Which lines may get memory, and which memory is nobody's.
    places: Places,
    /// The first pages of allocations that are being freed, of which some lines are elsewhere.
    freeing: Vec<usize>,
    /// Whether an allocation failed that further generations would have allowed.
    is_short_of_generations: bool,
    /// Whether requested generations are expected soon.
    is_reserving: bool,
    /// Colours that all pages together have used.
    used_colours: u64,
    quotas: Vec<Quota>,
    default_quota_pages: u64,
}

#[derive(Clone, Copy, Debug)]
struct Quota {
    space: Space,
    limit_pages: u64,
    used_pages: u64,
    /// Colours that its allocations used.
    used_colours: u64,
}

impl Quota {
    const fn new(space: Space, limit_pages: u64) -> Self {
        Self { space, limit_pages, used_pages: 0, used_colours: 0 }
    }

    /// Colours that are reserved for the space if each page has `of_page`; without a quota, none.
    const fn reserved_colours(&self, of_page: u64) -> u64 {
        match self.limit_pages {
            u64::MAX => 0,
            pages => pages.saturating_mul(of_page).saturating_sub(self.used_colours),
        }
    }
}

impl Arena {
    /// An arena over zeroed `memory`, which is cut into whole pages. Memory beyond 512 GiB is not used.
    #[must_use]
    pub fn new(config: &ArenaConfig, memory: Memory) -> Self {
        Self::empty(config, memory.into())
    }

    /// Checks the contents that a shard's memory holds, as far as that is possible before the controller
    /// has said which generations are reserved, and changes nothing: the controller may still refuse
    /// them. `first` is their first generation.
    ///
    /// # Errors
    /// [`Damaged`] if they cannot be taken over.
    pub(crate) fn check(
        memory: ShardMemory,
        first: ArenaGeneration,
    ) -> Result<ShardMemory, Damaged> {
        let pages = Pages::new(memory);
        pages.check(first)?;
        Ok(pages.into_memory())
    }

    /// An arena over the memory of a shard, with the contents that it holds, if any; they passed
    /// [`Self::check`].
    ///
    /// # Errors
    /// [`Damaged`], after that check only [`Damaged::Generations`] if they have generations that are not reserved.
    pub fn open(config: &ArenaConfig, memory: ShardMemory) -> Result<Self, Damaged> {
        let has_contents = memory.has_contents();
        let mut arena = Self::empty(config, memory);
        if has_contents {
            arena.take_over()?;
        }
        Ok(arena)
    }

    fn empty(config: &ArenaConfig, memory: ShardMemory) -> Self {
        let pages = Pages::new(memory);
        let capacity = narrow(pages.sizes().memory_pages);
        let own_pages = narrow(pages.sizes().own_pages());
        let places = Places::new(pages.sizes());
        let mut free = ExtentTree::new(own_pages);
        // The other own pages have no memory yet.
        let _ = free.take_free(capacity..own_pages);
        let quarantine_limit_pages = capacity / config.quarantine_divisor.max(1);
        let quota = |&(space, limit_pages): &(Space, u64)| Quota::new(space, limit_pages);
        Self {
            palette: Palette::new(config.generation, config.last_generation, config.last_tag),
            first_page: u64::from(config.shard) << (SHARD_SHIFT - PAGE_SHIFT),
            pages,
            free,
            // An extent has at least one page, and the limit is exceeded by one extent for a
            // moment.
            quarantined: VecDeque::with_capacity(quarantine_limit_pages as usize + 1),
            cleared_count: 0,
            cleared_of_next: 0,
            quarantined_pages: 0,
            quarantine_limit_pages,
            // Grows when colours are used up, to at most 8 bytes a page.
            retired: VecDeque::new(),
            renewed_count: 0,
            renewed_pages: 0,
            retired_pages: 0,
            withheld: Vec::new(),
            withheld_pages: 0,
            places,
            freeing: Vec::new(),
            is_short_of_generations: false,
            is_reserving: true,
            used_colours: 0,
            quotas: config.quotas.iter().map(quota).collect(),
            default_quota_pages: config.default_quota_pages,
        }
    }

    /// Takes over what an earlier process left, and finds out what is free.
    fn take_over(&mut self) -> Result<(), Damaged> {
        let (freed, freeing) = self.pages.take_over()?;
        self.freeing = freeing;
        self.places = Places::of(&self.pages);
        let count = self.pages.own().len();
        // All pages with memory were free; now only those that are in no allocation, and here.
        let _ = self.free.take_free(0..narrow(count));
        let (mut number, mut allocations) = (0, 0_u64);
        while number < count {
            if self.pages.is_untouched(number / LINE_PAGES) {
                number += LINE_PAGES - number % LINE_PAGES;
                continue;
            }
            let page = *self.pages.state(number);
            let was_used = page.role() != Use::None || page.colour() != Colour::default();
            if was_used && !self.palette.holds_colour(page.colour()) {
                return Err(Damaged::Generations);
            }
            if page.role() != Use::None {
                self.quota(page.space()).used_pages += u64::from(page.link);
                allocations += 1;
                number += page.link as usize;
                continue;
            }
            if !self.may_be_free(number) {
                number += 1;
                continue;
            }
            number = self.release_run(number, count);
        }
        let touched = (0..count).filter(|number| !self.pages.is_untouched(number / LINE_PAGES));
        let colours = touched.map(|number| self.palette.number(self.pages.state(number).colour()));
        self.used_colours = colours.map(u64::from).sum();
        let mut spaces: Vec<_> = self.quotas.iter().map(|quota| quota.space).collect();
        spaces.extend(self.pages.spaces());
        for space in spaces {
            let worn = self.pages.worn(space).min(self.used_colours);
            self.quota(space).used_colours = worn;
        }
        tracing::info!(allocations, freed, "took over the contents of an earlier process");
        Ok(())
    }

    /// Lets free pages with memory be allocated that are in no queue, from one on and before `end`, as long as they
    /// have the same fate: those whose colours are used up retire. Returns where it stopped.
    fn release_run(&mut self, first: usize, end: usize) -> usize {
        let is_usable = self.palette.is_usable(self.pages.state(first).colour());
        let is_same = |number: usize| {
            let colour = self.pages.state(number).colour();
            self.may_be_free(number) && self.palette.is_usable(colour) == is_usable
        };
        let end = (first..end).find(|number| !is_same(*number)).unwrap_or(end);
        let (start, pages) = (narrow(first), narrow(end - first));
        if is_usable {
            self.free.release(start, pages);
        } else if pages > 0 {
            self.retired.push_back(FreedExtent { start, pages });
            self.retired_pages += pages;
        }
        end
    }

    /// Whether an own page is in no allocation, has memory, and its line is here: of a line that is on its way home, the
    /// giver may still be the server.
    fn may_be_free(&self, number: usize) -> bool {
        self.pages.state(number).role() == Use::None
            && self.pages.place(number).is_some()
            && self.pages.is_here(number / LINE_PAGES)
    }

    /// Own pages that have memory, or had it.
    fn opened_pages(&self) -> u64 {
        let unopened = u64::from(self.places.unbacked_lines()) * LINE_PAGES as u64;
        (self.pages.own().len() as u64).saturating_sub(unopened)
    }

    /// An arena of `pages` pages in plain process memory, for simulations and tests.
    #[must_use]
    pub fn on_heap(config: &ArenaConfig, pages: u32) -> Self {
        Self::new(config, Memory::heap(pages as usize * PAGE_BYTES))
    }

    /// Its current usage.
    #[must_use]
    pub fn arena_usage(&self) -> ArenaUsage {
        let capacity_pages = self.pages.sizes().memory_pages as u64;
        let quarantined_pages = u64::from(self.quarantined_pages);
        let free_pages = u64::from(self.free_pages());
        let retired_pages = u64::from(self.retired_pages);
        let withheld_pages = u64::from(self.withheld_pages);
        let unused = free_pages + retired_pages + withheld_pages + self.unreachable_pages();
        let used_pages = capacity_pages.saturating_sub(unused);
        ArenaUsage {
            capacity_pages,
            free_pages,
            quarantined_pages,
            retired_pages,
            used_pages,
            adopted_lines: self.places.used(self.pages.sizes()),
            last_generation: self.palette.last(),
            wanted_generation: self.wanted_generation(),
        }
    }

    /// Adds the generations up to `last`, which the controller reserved for this server alone. A
    /// smaller `last` changes nothing.
    pub fn reserve(&mut self, last: ArenaGeneration) {
        if self.palette.extend(last) {
            self.renewed_count = self.retired.len();
            self.renewed_pages += self.retired_pages;
            self.retired_pages = 0;
            self.is_short_of_generations = false;
            self.is_reserving = true;
        }
    }

    /// Sets whether requested generations are expected soon; true at first and after each
    /// [`Self::reserve`]. If not, an allocation that needs them fails with OUT_OF_MEMORY at once.
    pub const fn set_reserving(&mut self, is_reserving: bool) {
        self.is_reserving = is_reserving;
    }

    /// More generations are wanted in advance: when a page has on average less than half of the
    /// colours of a generation left, when many free pages have none left, or when a CREATE failed
    /// because of them. Not when only a few pages are used up: then others are used, which balances
    /// the use.
    fn wanted_generation(&self) -> ArenaGeneration {
        let last = self.palette.last();
        let pages = self.opened_pages();
        let colours = pages * u64::from(self.palette.count());
        let reserve = pages * u64::from(self.palette.of_generation()) / 2;
        let is_worn = colours.saturating_sub(self.used_colours) < reserve;
        let unallocated = self.free_pages() + self.retired_pages;
        let is_short = self.retired_pages > unallocated / RETIRED_DIVISOR;
        if !(is_worn || is_short || self.is_short_of_generations) {
            return last;
        }
        let (least, most) = GENERATIONS_REQUESTED;
        last.saturating_add(self.palette.generation_count().clamp(least, most))
    }

    /// Pages that can be allocated.
    fn free_pages(&self) -> u32 {
        let backed = self.free.free_pages() + self.quarantined_pages + self.renewed_pages;
        let lines = self.places.spare_frames().min(self.places.unbacked_lines());
        backed + lines * narrow(LINE_PAGES)
    }

    /// Pages of memory that is nobody's, and for which there is no own line: all addresses are used, by lines that are
    /// elsewhere. Only lines of other servers can have it.
    fn unreachable_pages(&self) -> u64 {
        let lines = self.places.spare_frames().saturating_sub(self.places.unbacked_lines());
        u64::from(lines) * LINE_PAGES as u64
    }

    /// Zeroes up to `budget` pages in quarantine and returns how many. Later writes then need not
    /// zero them, and freed bytes do not stay in memory. The serving loop calls it when it is idle.
    pub fn tidy(&mut self, budget: u32) -> u32 {
        let mut left = budget;
        while left > 0 {
            let Some(&FreedExtent { start, pages }) = self.quarantined.get(self.cleared_count)
            else {
                break;
            };
            let now = left.min(pages - self.cleared_of_next);
            let from = (start + self.cleared_of_next) as usize;
            self.pages.clear(from..from + now as usize);
            self.cleared_of_next += now;
            left -= now;
            if self.cleared_of_next == pages {
                (self.cleared_count, self.cleared_of_next) = (self.cleared_count + 1, 0);
            }
        }
        budget - left
    }

    /// Pages of the allocation that a page belongs to.
    fn length_of(&self, number: usize) -> usize {
        let page = self.pages.state(number);
        match page.role() {
            Use::None => 0,
            Use::Head => page.link as usize,
            Use::Body => self.pages.state(number - page.link as usize).link as usize,
        }
    }

    /// Whether the allocation that a page belongs to is complete; that of a free page is.
    fn is_settled(&self, number: usize) -> bool {
        let page = self.pages.state(number);
        match page.role() {
            Use::None => true,
            Use::Head => page.is_complete == PageRecord::COMPLETE,
            Use::Body => {
                let head = self.pages.state(number - page.link as usize);
                head.is_complete == PageRecord::COMPLETE
            }
        }
    }

    /// The location and tag for pointers to an allocated page.
    fn grant_of(&self, number: usize) -> Option<Grant> {
        let (generation, tag) = self.pages.state(number).colour().generation_and_tag()?;
        let offset = (self.first_page + number as u64) << PAGE_SHIFT;
        Some(Grant { location: Location::new(generation, offset)?, tag })
    }

    /// The first page and the length of the allocation that begins at a location. `pages` other
    /// than 0 must be its length.
    fn extent_of(&self, access: Access, pages: u32) -> Result<(usize, u32), Status> {
        self.check(access)?;
        let start = self.index(access.location.page()).ok_or(Status::OutOfRange)?;
        if start >= self.pages.own().len() {
            // The allocation is another server's; the rest of it may be anywhere.
            return Err(Status::NoAuthority);
        }
        let page = self.pages.state(start);
        let length = page.link;
        if page.role() != Use::Head || !access.location.is_page_aligned() {
            return Err(Status::Unaligned);
        }
        if pages != 0 && pages != length {
            return Err(Status::BadLength);
        }
        Ok((start, length))
    }

    /// The index of a page in this arena; `None` if the page belongs to another shard. The places of others' pages
    /// follow the own pages.
    fn index(&self, page: u64) -> Option<usize> {
        let number = page.checked_sub(self.first_page)?;
        let own = self.pages.own().len();
        match number.checked_sub(ADOPTED_PAGES_FROM) {
            None => Some(index_of(number)).filter(|number| *number < own),
            Some(number) => {
                Some(own + index_of(number)).filter(|number| *number < self.pages.states().len())
            }
        }
    }

    /// The page with an index.
    fn page_at(&self, number: usize) -> u64 {
        let own = self.pages.own().len();
        let behind = number.checked_sub(own).map(|number| ADOPTED_PAGES_FROM + number as u64);
        self.first_page + behind.unwrap_or(number as u64)
    }

    /// The number of a page that passed [`PageStore::check`].
    fn number(&self, page: u64) -> usize {
        debug_assert!(self.index(page).is_some(), "it passed the check");
        self.index(page).unwrap_or(0)
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

    /// Takes an extent. Renewed extents and those in quarantine are made free for it, the oldest
    /// first.
    ///
    /// # Errors
    /// [`Status::Overloaded`] if retired pages would suffice and more generations are expected
    /// soon; else [`Status::OutOfMemory`].
    fn take(&mut self, pages: u32) -> Result<u32, Status> {
        if let Some(start) = self.free.take(pages) {
            return Ok(start);
        }
        // The withheld pages of the queues do not become free when they leave them.
        let queued = || self.quarantined.iter().chain(self.retired.iter().take(self.renewed_count));
        let within = |extent: &FreedExtent, range: &Range<u32>| {
            let end = range.end.min(extent.start + extent.pages);
            end.saturating_sub(range.start.max(extent.start))
        };
        let withheld_of = |range| queued().map(|extent| within(extent, range)).sum::<u32>();
        let withheld: u32 = self.withheld.iter().map(withheld_of).sum();
        let available = self.free_pages() - withheld;
        if available >= pages {
            while self
                .back_for(pages)
                .or_else(|| self.end_retirement())
                .or_else(|| self.end_quarantine())
                .is_some()
            {
                if let Some(start) = self.free.take(pages) {
                    return Ok(start);
                }
            }
        }
        let unallocated = available + self.retired_pages;
        let may_fit = self.retired_pages > 0 && unallocated >= pages;
        self.is_short_of_generations |= may_fit;
        if may_fit && self.is_reserving && self.palette.generations_left() > 0 {
            return Err(Status::Overloaded);
        }
        Err(Status::OutOfMemory)
    }

    /// Frees the extent that retired first, if it has colours again.
    fn end_retirement(&mut self) -> Option<()> {
        self.renewed_count = self.renewed_count.checked_sub(1)?;
        let FreedExtent { start, pages } = self.retired.pop_front()?;
        self.renewed_pages -= pages;
        self.make_free(start..start + pages);
        Some(())
    }

    /// Frees the extent that was longest in quarantine.
    fn end_quarantine(&mut self) -> Option<()> {
        let FreedExtent { start, pages } = self.quarantined.pop_front()?;
        match self.cleared_count {
            0 => self.cleared_of_next = 0,
            count => self.cleared_count = count - 1,
        }
        self.quarantined_pages -= pages;
        self.make_free(start..start + pages);
        Some(())
    }

    /// Lets pages be allocated that are in no allocation and have memory, unless they are withheld.
    fn make_free(&mut self, pages: Range<u32>) {
        self.free.release(pages.start, pages.end - pages.start);
        for withheld in &self.withheld {
            let within = pages.start.max(withheld.start)..pages.end.min(withheld.end);
            self.withheld_pages += self.free.take_free(within);
        }
    }

    /// The pages of this arena among these.
    fn own_pages(&self, pages: &Range<u64>) -> Range<u32> {
        let count = narrow(self.pages.own().len());
        let of = |page: u64| {
            let number = page.saturating_sub(self.first_page);
            u32::try_from(number).unwrap_or(u32::MAX).min(count)
        };
        of(pages.start)..of(pages.end)
    }

    /// Whether a space may use so many colours: those reserved for it, or those reserved for no
    /// space.
    fn may_use_colours(&mut self, space: Space, colours: u64) -> bool {
        let of_page = self.palette.allocations_of_page();
        if self.quota(space).reserved_colours(of_page) >= colours {
            return true;
        }
        let others = self.quotas.iter().filter(|quota| quota.space != space);
        let kept =
            others.fold(0_u64, |sum, quota| sum.saturating_add(quota.reserved_colours(of_page)));
        let all = self.opened_pages() * of_page;
        all.saturating_sub(self.used_colours).saturating_sub(colours) >= kept
    }

    /// Puts freed pages into quarantine; those whose colours are used up retire.
    fn quarantine(&mut self, start: u32, pages: u32) {
        // All pages of an allocation have its colour.
        if !self.palette.is_usable(self.pages.state(start as usize).colour()) {
            self.retired.push_back(FreedExtent { start, pages });
            self.retired_pages += pages;
            return;
        }
        self.quarantined.push_back(FreedExtent { start, pages });
        self.quarantined_pages += pages;
        while self.quarantined_pages > self.quarantine_limit_pages {
            if self.end_quarantine().is_none() {
                break;
            }
        }
    }
}

#[cfg(test)]
impl Arena {
    /// A page stays in the middle of a change.
    pub(crate) fn stop_in_change(&mut self, page: u64) {
        let number = self.number(page);
        self.pages.stop_in_change(number);
    }

    /// The number of the line that begins at a page.
    pub(crate) fn place_number(&self, first_page: u64) -> usize {
        self.number(first_page) / LINE_PAGES
    }

    /// What readers see of a page.
    pub(crate) fn record(&self, page: u64) -> PageRecord {
        *self.pages.state(self.number(page))
    }

    /// Puts back what [`Self::record`] returned.
    pub(crate) fn set_record(&mut self, page: u64, record: PageRecord) {
        let number = self.number(page);
        self.pages.set_record(number, record);
    }
}

/// A number of pages or lines of a shard, which is below 2^32.
fn narrow(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// A number of pages of this memory, which therefore fits.
fn index_of(pages: u64) -> usize {
    usize::try_from(pages).unwrap_or(usize::MAX)
}

impl Arena {
    /// The number of a colour that the pages of a free extent never had, and that differs from the
    /// allocations on both sides, so that an access beyond an end is refused and never reaches the
    /// neighbour's bytes; and how many colours of the extent's pages that uses.
    fn next_colour(&self, extent: Range<usize>) -> (u32, u64) {
        let states = self.pages.own();
        let before = extent.start.checked_sub(1).and_then(|page| states.get(page));
        let after = states.get(extent.end);
        let beside = [before, after]
            .map(|page| page.filter(|page| page.role() != Use::None))
            .map(|page| page.map(|page| self.palette.number(page.colour())));
        let pages = &states[extent];
        let (highest, sum) = pages.iter().fold((0, 0), |(highest, sum): (u32, u64), page| {
            let number = self.palette.number(page.colour());
            (highest.max(number), sum + u64::from(number))
        });
        // Free pages have at least three colours left, and the neighbours have at most two of them.
        let choice = highest + 1..=highest + CHOICE;
        let number = choice.into_iter().find(|number| !beside.contains(&Some(*number)));
        let number = number.unwrap_or(highest + 1);
        (number, pages.len() as u64 * u64::from(number) - sum)
    }

    /// Why an access is refused. Own pages only have colours of this arena's generations, so only a refusal must distinguish
    /// whether the generation or the tag is stale. A page of another server has colours of that one.
    fn or_stale(&self, access: Access, status: Status) -> Status {
        let first = self.first_page + ADOPTED_PAGES_FROM;
        let is_adopted = (first..first + ADOPTED_PAGES_FROM).contains(&access.location.page());
        match is_adopted || self.palette.holds(access.location.generation()) {
            true => status,
            false => Status::StaleGeneration,
        }
    }

    /// Checks that a range is in one allocation with the pointer's colour and space.
    fn check_extent(&self, access: Access) -> Result<(), Status> {
        let bytes = access.length_bytes.max(1);
        let last = access.location.offset().checked_add(bytes - 1).ok_or(Status::OutOfRange)?;
        let reach = |page: u64| self.index(page).filter(|number| self.pages.exists(*number));
        let first = reach(access.location.page()).ok_or(Status::OutOfRange)?;
        let last = reach(last >> PAGE_SHIFT).ok_or(Status::OutOfRange)?;
        let own = self.pages.own().len();
        let colour = Colour::new(access.location.generation(), access.tag);
        let mut number = first;
        while number <= last {
            let page = self.pages.state(number);
            let length = match page.role() {
                Use::None => return Err(Status::NotAllocated),
                // The rest of the allocation may be elsewhere.
                _ if number >= own => 1,
                Use::Head => page.link,
                Use::Body => self.pages.state(number - page.link as usize).link - page.link,
            };
            if page.colour() != colour {
                return Err(Status::StaleTag);
            }
            if page.space() != access.space {
                return Err(Status::WrongSpace);
            }
            // The remaining pages of the allocation are the same.
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
        let capacity_pages = self.pages.sizes().memory_pages as u64;
        let quota = self.quota(space);
        // A space that may have all memory gets OUT_OF_MEMORY instead, because another server may
        // have free memory.
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
        if !self.may_use_colours(space, colours) {
            self.free.release(start, pages);
            return Err(Status::QuotaExceeded);
        }
        let quota = self.quota(space);
        quota.used_pages += u64::from(pages);
        quota.used_colours += colours;
        let worn = quota.used_colours;
        self.used_colours += colours;
        self.pages.create(extent, colour, space, worn);
        Ok(Grant { location, tag })
    }

    fn note_creator(&mut self, location: Location, creator: Creator) {
        if let Some(start) = self.index(location.page()) {
            self.pages.note_creator(start, creator);
        }
    }

    fn complete(&mut self, location: Location) {
        if let Some(start) = self.index(location.page()) {
            self.pages.complete(start);
        }
    }

    fn delete(&mut self, access: Access, pages: u32) -> Result<u32, Status> {
        let (start, length) = self.extent_of(access, pages)?;
        let space = self.pages.state(start).space();
        self.pages.delete(&(start..start + length as usize));
        self.quota(space).used_pages -= u64::from(length);
        self.quarantine(narrow(start), length);
        Ok(length)
    }

    fn allocation(&self, access: Access, pages: u32) -> Result<Range<u64>, Status> {
        let (_, length) = self.extent_of(access, pages)?;
        let first = access.location.page();
        Ok(first..first + u64::from(length))
    }

    fn check(&self, access: Access) -> Result<(), Status> {
        self.check_extent(access).map_err(|status| self.or_stale(access, status))
    }

    fn read(&self, page: u64, range: Range<usize>) -> &[u8] {
        let number = self.number(page);
        match self.pages.state(number).holds() {
            Contents::Leftover => &ZEROS[range],
            Contents::Written | Contents::Zeros => self.pages.bytes(number, &range),
        }
    }

    fn write(&mut self, page: u64, start: usize, data: &[u8]) {
        let number = self.number(page);
        self.pages.write(&[NewBytes { number, start, data, page_crc: None }]);
    }

    fn write_page(&mut self, page: u64, data: &[u8; PAGE_BYTES], crc: u32) {
        let number = self.number(page);
        self.pages.write(&[NewBytes { number, start: 0, data, page_crc: Some(crc) }]);
    }

    fn page_crc(&self, page: u64) -> Option<u32> {
        self.pages.page_crc(self.number(page))
    }

    fn write_together(&mut self, writes: &[PageWrite<'_>]) {
        let writes: ArrayVec<NewBytes<'_>, LINE_PAGES> = writes
            .iter()
            .map(|&PageWrite { page, start, data }| NewBytes {
                number: self.number(page),
                start,
                data,
                page_crc: None,
            })
            .collect();
        self.pages.write(&writes);
    }

    fn zero(&mut self, page: u64, range: Range<usize>) {
        let number = self.number(page);
        self.pages.zero(number, &range);
    }

    fn version(&self, page: u64) -> u64 {
        self.index(page).map_or(0, |number| self.pages.state(number).version())
    }

    fn shared(&self) -> Shared<'_> {
        self.pages.shared()
    }

    fn set_leased(&mut self, page: u64, is_leased: bool) {
        if let Some(number) = self.index(page) {
            self.pages.set_leased(number, is_leased);
        }
    }

    fn keep_fence(&mut self, space: Space, node: NodeId, incarnation: u32) {
        self.pages.keep_fence(space, node, incarnation);
    }

    fn fences(&self, each: &mut dyn FnMut(Space, NodeId, u32)) {
        self.pages.fences(each);
    }

    fn lines(&self) -> &dyn LineStore {
        self
    }

    fn lines_mut(&mut self) -> &mut dyn LineStore {
        self
    }

    fn usage(&self, space: Space) -> StoreUsage {
        let quota = self.quotas.iter().find(|quota| quota.space == space);
        let (quota_pages, used_pages) = quota
            .map_or((self.default_quota_pages, 0), |quota| (quota.limit_pages, quota.used_pages));
        StoreUsage {
            capacity_pages: self.pages.sizes().memory_pages as u64,
            free_pages: self.arena_usage().free_pages,
            quota_pages,
            used_pages,
            retired_pages: u64::from(self.retired_pages),
        }
    }
}
