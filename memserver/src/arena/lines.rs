//! The lines that this server gives to others, and those that it takes from them.

use core::ops::Range;
use std::collections::BTreeSet;

use bluebridge_protocol::store::{
    Access, Allowance, Creator, HomeLine, Line, LineStore, PageCrcs, Placed, StageError, Taken,
};
use bluebridge_wire::{
    ArenaGeneration, LinePage, NodeId, Space, Status,
    address::{LINE_PAGES, PAGE_BYTES},
    header::LEASE_EPOCH_MAX,
    line::{LineRecord, PageContents, Part},
    page_crc,
};

use super::{
    Arena, Contents, FreedExtent, Use,
    colour::Colour,
    frames::pages_of,
    narrow,
    pages::{Pages, StagedPage},
};
use crate::{
    extent_tree::ExtentTree,
    kept::{
        lines::{AllowanceRecord, LineEntry},
        stores,
    },
    sizes::Sizes,
};

#[expect(clippy::cast_possible_truncation, reason = "8")]
const LINE: u32 = LINE_PAGES as u32;

/// Frames that no line has. Direct readers answer only for lines in the frame of their number, so each line gets that one
/// if it can, and the frames of own lines that are elsewhere, and may come back, are taken last.
#[derive(Debug, Default)]
struct Spare {
    /// By number: those of lines that are here, or of no own line.
    here: BTreeSet<u32>,
    /// Those of own lines that are elsewhere.
    elsewhere: BTreeSet<u32>,
}

impl Spare {
    fn count(&self) -> u32 {
        narrow(self.here.len() + self.elsewhere.len())
    }

    fn insert(&mut self, frame: u32, pages: &Pages) {
        let is_here = pages.is_here(frame as usize);
        let frames = if is_here { &mut self.here } else { &mut self.elsewhere };
        frames.insert(frame);
    }

    /// Takes a frame for a line.
    fn take(&mut self, line: usize) -> Option<usize> {
        let own = narrow(line);
        let frame = if self.here.remove(&own) || self.elsewhere.remove(&own) {
            own
        } else {
            // Lines are lent from the last one on, and used from the first one on.
            self.here.pop_last().or_else(|| self.elsewhere.pop_first())?
        };
        Some(frame as usize)
    }
}

/// Which lines may get memory, and which memory is nobody's.
#[derive(Debug)]
pub(super) struct Places {
    /// Own lines that are here and have no memory, unless they are withheld.
    unbacked: ExtentTree,
    /// Places for lines of others that are not used, nor reserved. The first has number 0.
    free: ExtentTree,
    spare: Spare,
    /// How many of them are reserved for lines on their way here.
    promised: u32,
    /// By line: whether it is reserved for a line on its way.
    is_reserved: Vec<bool>,
}

impl Places {
    /// Those of an arena that is empty.
    pub(super) fn new(sizes: &Sizes) -> Self {
        let own_lines = narrow(sizes.own_lines);
        let mut unbacked = ExtentTree::new(own_lines);
        let _ = unbacked.take_free(0..narrow(sizes.memory_pages.div_ceil(LINE_PAGES)));
        Self {
            unbacked,
            free: ExtentTree::new(narrow(sizes.adopted_lines)),
            spare: Spare::default(),
            promised: 0,
            is_reserved: vec![false; sizes.lines()],
        }
    }

    /// Whether a line is reserved for one on its way.
    pub(super) fn is_reserved(&self, line: usize) -> bool {
        self.is_reserved[line]
    }

    /// Those of an arena that was taken over.
    pub(super) fn of(pages: &Pages) -> Self {
        let sizes = pages.sizes();
        let mut places = Self::new(sizes);
        for frame in pages.spare_frames() {
            places.spare.insert(frame, pages);
        }
        let own = 0..narrow(sizes.own_lines);
        let _ = places.unbacked.take_free(own.clone());
        for line in own {
            let is_here = pages.entry(line as usize).state == LineEntry::DEFAULT;
            if is_here && pages.frame(line as usize).is_none() {
                places.unbacked.release(line, 1);
            }
        }
        for place in 0..narrow(sizes.adopted_lines) {
            let line = sizes.own_lines + place as usize;
            let state = pages.entry(line).state;
            if state != LineEntry::DEFAULT {
                let _ = places.free.take_free(place..place + 1);
            }
        }
        // A line in doubt stays reserved until its end is known.
        for line in 0..sizes.lines() {
            places.is_reserved[line] = pages.entry(line).state == LineEntry::STAGED;
        }
        places
    }

    /// Frames that any line may have.
    pub(super) fn spare_frames(&self) -> u32 {
        self.spare.count().saturating_sub(self.promised)
    }

    /// Places for lines of others that are used or reserved.
    pub(super) const fn used(&self, sizes: &Sizes) -> u64 {
        (sizes.adopted_lines as u64).saturating_sub(self.free.free_pages() as u64)
    }

    /// Own lines that are here, and could get memory.
    pub(super) const fn unbacked_lines(&self) -> u32 {
        self.unbacked.free_pages()
    }
}

#[cfg(test)]
impl Places {
    /// Places that are not used, nor reserved.
    pub(super) const fn free_places(&self) -> u32 {
        self.free.free_pages()
    }

    pub(super) const fn promised(&self) -> u32 {
        self.promised
    }
}

impl Arena {
    /// Gives memory that is nobody's to own lines that have none, so that an extent of `pages` pages may be found; at
    /// least to one line.
    pub(super) fn back_for(&mut self, pages: u32) -> Option<()> {
        let spare = self.places.spare_frames();
        let wanted = pages.div_ceil(LINE).min(spare);
        let first = match self.places.unbacked.take(wanted.max(1)) {
            Some(first) if spare > 0 => first..first + wanted,
            Some(first) => {
                self.places.unbacked.release(first, 1);
                return None;
            }
            None if spare > 0 => {
                let first = self.places.unbacked.take(1)?;
                first..first + 1
            }
            None => return None,
        };
        for line in first {
            self.back(line);
        }
        Some(())
    }

    /// Gives memory to an own line, whose pages may be allocated from then on.
    fn back(&mut self, line: u32) {
        let Some(frame) = self.places.spare.take(line as usize) else { return };
        self.pages.set_frame(line as usize, Some(frame));
        self.release_line(line as usize);
    }

    /// Lets the free pages of an own line be allocated that are in no queue.
    fn release_line(&mut self, line: usize) {
        let Range { start, end } = pages_of(line);
        let mut number = start;
        while number < end {
            let is_free = self.pages.state(number).role() == Use::None;
            number = if is_free { self.release_run(number, end) } else { number + 1 };
        }
    }

    /// Takes the memory of own lines of which no page is in use, until so many frames are spare; the last ones first.
    /// Pages leave the quarantine if that helps.
    fn free_frames(&mut self, wanted: u32) -> bool {
        loop {
            self.lend_until(|places| places.spare_frames() >= wanted);
            if self.places.spare_frames() >= wanted {
                return true;
            }
            let more = self.end_retirement().or_else(|| self.end_quarantine());
            if more.is_none() {
                return false;
            }
            // All at once: a look at every line for each extent would take too long.
            while self.end_quarantine().is_some() {}
        }
    }

    /// Takes the memory of own lines of which all pages may be allocated, the last ones first, until there is enough.
    fn lend_until(&mut self, is_enough: impl Fn(&Places) -> bool) {
        let mut line = self.pages.sizes().own_lines;
        while !is_enough(&self.places) && line > 0 {
            line -= 1;
            self.lend(narrow(line));
        }
    }

    /// Takes the memory of an own line if all its pages may be allocated.
    fn lend(&mut self, line: u32) {
        let pages = line * LINE..(line + 1) * LINE;
        if !self.free.are_free(pages.clone()) {
            return;
        }
        let frame = self.pages.frame(line as usize).map(narrow);
        let Some(frame) = frame.filter(|frame| (*frame as usize) < self.pages.sizes().frames())
        else {
            return;
        };
        let _ = self.free.take_free(pages);
        self.pages.set_frame(line as usize, None);
        self.places.unbacked.release(line, 1);
        self.places.spare.insert(frame, &self.pages);
    }

    /// The number of the line that begins at a page.
    fn line_at(&self, first_page: u64) -> Option<usize> {
        let number = self.index(first_page)?;
        number.is_multiple_of(LINE_PAGES).then_some(number / LINE_PAGES)
    }

    /// The numbers of the lines of a range that this arena has.
    fn lines_in(&self, pages: &Range<u64>) -> impl Iterator<Item = usize> + use<> {
        let first = self.line_at(pages.start);
        let count = pages.end.saturating_sub(pages.start) / LINE_PAGES as u64;
        let end = self.pages.sizes().lines();
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        first.into_iter().flat_map(move |first| first..first.saturating_add(count).min(end))
    }

    /// Takes pages out of the queues of freed ones.
    fn unqueue(&mut self, line: usize) {
        let pages = pages_of(line);
        let pages = narrow(pages.start)..narrow(pages.end);
        let is_in = |extent: &FreedExtent| {
            extent.start < pages.end && pages.start < extent.start + extent.pages
        };
        let cut = |extent: FreedExtent| {
            let end = extent.start + extent.pages;
            let parts = [extent.start..pages.start.min(end), pages.end.max(extent.start)..end];
            let parts = parts.into_iter().filter(|part| !part.is_empty());
            parts.map(|part| FreedExtent { start: part.start, pages: part.end - part.start })
        };
        if self.quarantined.iter().any(is_in) {
            let queue = core::mem::take(&mut self.quarantined);
            self.quarantined = queue.into_iter().flat_map(cut).collect();
            self.quarantined_pages = self.quarantined.iter().map(|extent| extent.pages).sum();
            // Pages that are zeros already are not zeroed again.
            (self.cleared_count, self.cleared_of_next) = (0, 0);
        }
        if self.retired.iter().any(is_in) {
            let mut retired = core::mem::take(&mut self.retired);
            let rest = retired.split_off(self.renewed_count);
            let renewed: Vec<_> = retired.into_iter().flat_map(cut).collect();
            self.renewed_count = renewed.len();
            self.renewed_pages = renewed.iter().map(|extent| extent.pages).sum();
            let rest: Vec<_> = rest.into_iter().flat_map(cut).collect();
            self.retired_pages = rest.iter().map(|extent| extent.pages).sum();
            self.retired = renewed.into_iter().chain(rest).collect();
        }
    }

    /// The own pages of a range that are in no allocation and in no queue, but have memory: those that are withheld, if
    /// the range is.
    fn resting(&self, pages: Range<u32>) -> Vec<Range<u32>> {
        let mut is_queued = vec![false; pages.len()];
        for extent in self.quarantined.iter().chain(&self.retired) {
            let within =
                extent.start.max(pages.start)..(extent.start + extent.pages).min(pages.end);
            for page in within {
                is_queued[(page - pages.start) as usize] = true;
            }
        }
        let is_resting = |page: u32| {
            let is_unused = self.pages.state(page as usize).role() == Use::None;
            let has_memory = self.pages.place(page as usize).is_some();
            is_unused && has_memory && !is_queued[(page - pages.start) as usize]
        };
        let mut found = Vec::new();
        let mut next = pages.start;
        while let Some(start) = (next..pages.end).find(|page| is_resting(*page)) {
            next = (start..pages.end).find(|page| !is_resting(*page)).unwrap_or(pages.end);
            found.push(start..next);
        }
        found
    }

    /// Lets the free pages of withheld lines be allocated, which are here.
    fn let_go(&mut self, lines: Range<u32>) {
        let pages = lines.start * LINE..lines.end * LINE;
        self.remove_withheld(&pages);
        for resting in self.resting(pages) {
            self.free.release(resting.start, resting.end - resting.start);
            self.withheld_pages -= resting.end - resting.start;
        }
        for line in lines {
            if self.pages.frame(line as usize).is_none() {
                self.places.unbacked.release(line, 1);
            }
        }
    }

    /// Removes pages from the withheld ranges.
    fn remove_withheld(&mut self, pages: &Range<u32>) {
        let withheld = core::mem::take(&mut self.withheld).into_iter().flat_map(|range| {
            let before = range.start..range.end.min(pages.start).max(range.start);
            let after = range.start.max(pages.end).min(range.end)..range.end;
            [before, after].into_iter().filter(|part| !part.is_empty())
        });
        self.withheld = withheld.collect();
    }

    /// Gives a line for which memory is reserved its frame, if it has none yet. Returns whether it has one.
    fn fill_frame(&mut self, line: usize) -> bool {
        if self.pages.frame(line).is_some() {
            return true;
        }
        let Some(frame) = self.places.spare.take(line) else { return false };
        self.places.promised -= 1;
        self.pages.set_frame(line, Some(frame));
        true
    }

    /// The frame of a line becomes nobody's.
    pub(super) fn take_frame(&mut self, line: usize) {
        if let Some(frame) = self.pages.frame(line) {
            self.pages.set_frame(line, None);
            self.places.spare.insert(narrow(frame), &self.pages);
        }
    }

    /// Whether the CRC of a page is its bytes', if it is known.
    fn has_its_crc(&self, number: usize) -> bool {
        let page = self.pages.bytes(number, &(0..PAGE_BYTES)).first_chunk();
        self.pages.page_crc(number).is_none_or(|known| page.map(page_crc) == Some(known))
    }

    /// Whether a line that was taken can be one: what its giver says is not trusted.
    fn check_staged(&self, line: usize, record: &LineRecord) -> Result<(), StageError> {
        let mut result = Ok(());
        for (at, (page, number)) in record.iter().zip(pages_of(line)).enumerate() {
            let is_served = page.part == Part::Free || self.pages.serves(page.space);
            if page.version > Pages::VERSION_MAX || !is_served {
                return Err(StageError::Page(at));
            }
            if !self.pages.is_own(line) {
                continue;
            }
            // Its former server may have freed its part, and this one has not.
            if self.is_being_freed(number) {
                // Others of the line may have to be freed, too.
                result = result.and(Err(StageError::BeingFreed(at)));
                continue;
            }
            let own = self.pages.state(number);
            let (role, link) = role_of(page.part);
            let is_same = (own.part, own.colour()) == (role, colour_of(page))
                && (page.part == Part::Free || (own.link, own.space()) == (link, page.space));
            if !is_same && self.is_freed_elsewhere(number, page) {
                return Err(StageError::FreedElsewhere(at));
            }
            if !is_same {
                return Err(StageError::Contradiction(at));
            }
        }
        result
    }
}

const fn role_of(part: Part) -> (u8, u32) {
    match part {
        Part::Free => (Use::NONE, 0),
        Part::First { pages } => (Use::HEAD, pages),
        Part::Further { distance } => (Use::BODY, distance),
    }
}

fn colour_of(page: &LinePage) -> Colour {
    page.colour.map_or_else(Colour::default, |(generation, tag)| Colour::new(generation, tag))
}

impl LineStore for Arena {
    fn line(&self, first_page: u64) -> Option<Line> {
        let first = self.line_at(first_page)? * LINE_PAGES;
        // The line at the end of the memory that is not whole cannot move.
        let is_whole = self.pages.frame(first / LINE_PAGES) != Some(self.pages.sizes().frames());
        let states = self.pages.states().get(first..first + LINE_PAGES).filter(|_| is_whole)?;
        let mut pages = [LinePage::default(); LINE_PAGES];
        for ((out, page), number) in pages.iter_mut().zip(states).zip(first..) {
            let part = match page.role() {
                Use::None => Part::Free,
                Use::Head => Part::First { pages: page.link },
                Use::Body => Part::Further { distance: page.link },
            };
            let contents = match page.holds() {
                Contents::Zeros => PageContents::Zeros,
                Contents::Leftover => PageContents::Leftover,
                Contents::Written => PageContents::Written,
            };
            let creator = match part {
                Part::First { .. } => self.pages.creator(number),
                Part::Free | Part::Further { .. } => Creator::default(),
            };
            *out = LinePage {
                version: page.version(),
                part,
                colour: page.colour().generation_and_tag().filter(|(_, tag)| tag.0 != 0),
                space: page.space(),
                contents,
                creator: creator.node,
                creator_incarnation: creator.incarnation,
            };
        }
        let is_own = self.pages.is_own(first / LINE_PAGES);
        // Only complete allocations get away from home.
        let is_settled =
            !is_own || (first..first + LINE_PAGES).all(|number| self.is_settled(number));
        Some(Line { pages, is_settled })
    }

    fn withhold(&mut self, pages: Range<u64>, is_withheld: bool) {
        let pages = self.own_pages(&pages);
        if pages.is_empty() {
            // No page of a place is ever allocated.
            return;
        }
        let lines = pages.start / LINE..pages.end / LINE;
        if is_withheld {
            let is_apart =
                |range: &Range<u32>| range.end <= pages.start || pages.end <= range.start;
            debug_assert!(self.withheld.iter().all(is_apart), "pages would be counted twice");
            self.withheld_pages += self.free.take_free(pages.clone());
            let _ = self.places.unbacked.take_free(lines);
            self.withheld.push(pages);
            return;
        }
        // The pages of lines that were given stay withheld until those are cleared.
        let is_here = |arena: &Self, line: u32| arena.pages.is_here(line as usize);
        let mut next = lines.start;
        while let Some(first) = (next..lines.end).find(|line| is_here(self, *line)) {
            next = (first..lines.end).find(|line| !is_here(self, *line)).unwrap_or(lines.end);
            self.let_go(first..next);
        }
    }

    fn give(&mut self, first_page: u64) {
        if let Some(line) = self.line_at(first_page) {
            self.pages.set_line_state(line, LineEntry::GIVEN);
        }
    }

    fn clear_given(&mut self, pages: Range<u64>) {
        for line in self.lines_in(&pages) {
            // Memory that is reserved already is for the line on its way back.
            if self.pages.entry(line).state != LineEntry::GIVEN || self.places.is_reserved[line] {
                continue;
            }
            if self.pages.is_own(line) {
                let range = pages_of(line);
                let range = narrow(range.start)..narrow(range.end);
                let resting = self.resting(range.clone());
                self.withheld_pages -=
                    resting.iter().map(|part| part.end - part.start).sum::<u32>();
                self.remove_withheld(&range);
                self.unqueue(line);
            } else {
                self.pages.set_line_state(line, LineEntry::DEFAULT);
                self.places.free.release(narrow(line - self.pages.sizes().own_lines), 1);
            }
            self.take_frame(line);
        }
    }

    fn reserve(&mut self, lines: u32) -> Option<Vec<Range<u64>>> {
        if self.places.free.free_pages() < lines {
            return None;
        }
        // The memory of own lines that are elsewhere would be spare, too, but is used last.
        self.lend_until(|places| places.spare.here.len() >= (places.promised + lines) as usize);
        if !self.free_frames(lines) {
            return None;
        }
        let own_lines = narrow(self.pages.sizes().own_lines);
        let mut ranges = Vec::new();
        let mut left = lines;
        while left > 0 {
            let count = self.places.free.longest().min(left);
            let first = self.places.free.take(count)?;
            left -= count;
            for place in first..first + count {
                self.places.is_reserved[(own_lines + place) as usize] = true;
            }
            let page = self.page_at(((own_lines + first) * LINE) as usize);
            ranges.push(page..page + u64::from(count * LINE));
        }
        self.places.promised += lines;
        Some(ranges)
    }

    fn reserve_own(&mut self, pages: Range<u64>) -> bool {
        let lines: Vec<_> = self.lines_in(&pages).collect();
        let is_good = |line: &usize| {
            let is_given = self.pages.entry(*line).state == LineEntry::GIVEN;
            let is_cleared = self.pages.frame(*line).is_none();
            let is_reserved = self.places.is_reserved[*line];
            is_given && is_cleared && self.pages.is_own(*line) && !is_reserved
        };
        let count = pages.end.saturating_sub(pages.start) / LINE_PAGES as u64;
        let is_possible = lines.len() as u64 == count && lines.iter().all(is_good);
        if !is_possible || !self.free_frames(narrow(lines.len())) {
            return false;
        }
        self.places.promised += narrow(lines.len());
        for line in lines {
            self.places.is_reserved[line] = true;
        }
        true
    }

    fn release(&mut self, pages: Range<u64>) {
        for line in self.lines_in(&pages) {
            let state = self.pages.entry(line).state;
            let is_on_its_way = state == LineEntry::STAGED;
            if is_on_its_way || !core::mem::take(&mut self.places.is_reserved[line]) {
                continue;
            }
            if self.pages.frame(line).is_some() {
                self.take_frame(line);
            } else {
                self.places.promised -= 1;
            }
            if !self.pages.is_own(line) {
                self.places.free.release(narrow(line - self.pages.sizes().own_lines), 1);
            }
        }
    }

    fn memory(&mut self, first_page: u64) -> Option<&mut [u8]> {
        let line = self.line_at(first_page)?;
        let is_staged = self.pages.entry(line).state == LineEntry::STAGED;
        if is_staged || !self.places.is_reserved[line] || !self.fill_frame(line) {
            return None;
        }
        self.pages.line_bytes(line)
    }

    fn stage(
        &mut self,
        first_page: u64,
        (home, taken): (HomeLine, Taken),
        pages: &LineRecord,
        crcs: &PageCrcs,
    ) -> Result<(), StageError> {
        // The floor of lease epochs is raised to it, and the next process refuses a greater one.
        if taken.epoch > LEASE_EPOCH_MAX {
            return Err(StageError::Epoch);
        }
        let line = self.line_at(first_page).ok_or(StageError::NoPlace)?;
        if !self.places.is_reserved[line] {
            return Err(StageError::NoPlace);
        }
        // Its states and bytes would be those of two lines if this process ended meanwhile.
        if self.pages.entry(line).state == LineEntry::STAGED {
            return Err(StageError::InDoubt);
        }
        self.check_staged(line, pages)?;
        if !self.fill_frame(line) {
            return Err(StageError::NoPlace);
        }
        for ((page, crc), number) in pages.iter().zip(crcs).zip(pages_of(line)) {
            let is_written = page.part != Part::Free && page.contents == PageContents::Written;
            let (part, link) = role_of(page.part);
            self.pages.stage(
                number,
                &StagedPage {
                    version: page.version,
                    part,
                    link,
                    colour: colour_of(page),
                    space: page.space,
                    is_written,
                    crc: *crc,
                },
            );
            debug_assert!(self.has_its_crc(number), "the CRC of page {number}");
            if part == Use::HEAD && !self.pages.is_own(line) {
                let creator = Creator { node: page.creator, incarnation: page.creator_incarnation };
                self.pages.note_creator(number, creator);
            }
        }
        let entry = LineEntry {
            migration: taken.migration,
            epoch: taken.epoch,
            first_page: home.first_page,
            node: home.node.0,
            generation: home.generation.number(),
            state: LineEntry::STAGED,
        };
        self.pages.set_line_name(line, entry);
        self.pages.set_line_state(line, LineEntry::STAGED);
        Ok(())
    }

    fn adopt(&mut self, first_page: u64) {
        let Some(line) = self.line_at(first_page) else { return };
        if self.pages.entry(line).state != LineEntry::STAGED {
            return;
        }
        self.places.is_reserved[line] = false;
        if !self.pages.is_own(line) {
            self.pages.set_line_state(line, LineEntry::ADOPTED);
            return self.lend_adopted(line);
        }
        self.pages.set_line_state(line, LineEntry::DEFAULT);
        self.release_line(line);
    }

    fn drop_staged(&mut self, first_page: u64) {
        let Some(line) = self.line_at(first_page) else { return };
        if self.pages.entry(line).state == LineEntry::STAGED {
            let is_own = self.pages.is_own(line);
            let state = if is_own { LineEntry::GIVEN } else { LineEntry::DEFAULT };
            self.pages.set_line_state(line, state);
        }
    }

    fn pages_of_allocation(&self, access: Access, pages: u32) -> Result<u32, Status> {
        self.length_anywhere(access, pages).map_err(|status| self.or_stale(access, status))
    }

    fn begin_freeing(&mut self, first_page: u64) {
        self.note_freeing(first_page);
    }

    fn freeings(&self, each: &mut dyn FnMut(u64, Access, u32)) {
        self.each_freeing(each);
    }

    fn end_freeing(&mut self, first_page: u64) {
        self.free_scattered(first_page);
    }

    fn free_part(&mut self, pages: Range<u64>) {
        self.free_adopted(&pages);
    }

    fn is_free(&self, first_page: u64) -> bool {
        let is_elsewhere = |line: usize| match self.pages.entry(line).state {
            LineEntry::ADOPTED => !self.pages.is_own(line),
            LineEntry::GIVEN => {
                let is_cleared = self.pages.frame(line).is_none() && !self.places.is_reserved[line];
                self.pages.is_own(line) && is_cleared
            }
            _ => false,
        };
        self.line_at(first_page).is_some_and(|line| is_elsewhere(line) && self.pages.is_free(line))
    }

    fn discard(&mut self, first_page: u64) {
        if !self.is_free(first_page) {
            return;
        }
        let Some(line) = self.line_at(first_page) else { return };
        self.pages.set_line_state(line, LineEntry::DEFAULT);
        if self.pages.is_own(line) {
            self.places.unbacked.release(narrow(line), 1);
        } else {
            self.places.free.release(narrow(line - self.pages.sizes().own_lines), 1);
            self.take_frame(line);
        }
    }

    fn placed(&self, each: &mut dyn FnMut(u64, Placed)) {
        for line in 0..self.pages.sizes().lines() {
            let LineEntry { migration, epoch, first_page, node, generation, state } =
                *self.pages.entry(line);
            let name = || {
                let generation = ArenaGeneration::new(generation).unwrap_or_default();
                HomeLine { node: NodeId(node), generation, first_page }
            };
            let placed = match state {
                LineEntry::STAGED => Placed::Staged(name(), Taken { migration, epoch }),
                LineEntry::ADOPTED => Placed::Adopted(name()),
                LineEntry::GIVEN if self.pages.is_own(line) => Placed::Given,
                LineEntry::GIVEN => Placed::GivenOn(name()),
                _ => continue,
            };
            each(self.page_at(line * LINE_PAGES), placed);
        }
    }

    fn keep_allowance(&mut self, allowance: &Allowance, is_open: bool) -> bool {
        let state = if is_open { AllowanceRecord::OPEN } else { AllowanceRecord::WITHDRAWN };
        let kept = &self.pages.lines.allowances;
        let is_it = |record: &AllowanceRecord| {
            record.state != AllowanceRecord::NONE && record.migration == allowance.migration
        };
        let known = kept.iter().position(is_it);
        let free = || kept.iter().position(|record| record.state == AllowanceRecord::NONE);
        let Some(place) = known.or_else(free) else { return false };
        self.pages.lines.floors.as_mut()[0].raise_migration(allowance.migration);
        let record = &mut self.pages.lines.allowances.as_mut()[place];
        if known.is_none() {
            let Allowance { pages, space, taker, .. } = allowance;
            stores::set(&mut record.migration, allowance.migration);
            stores::set(&mut record.first_page, pages.start);
            stores::set(&mut record.pages, pages.end.saturating_sub(pages.start));
            stores::set(&mut record.range_epoch, allowance.range_epoch);
            stores::set(&mut record.taker, taker.0);
            stores::set(&mut record.space, space.0);
            stores::set(&mut record.taker_incarnation, allowance.taker_incarnation);
        }
        stores::set_in_order(&mut record.state, state);
        true
    }

    fn forget_allowance(&mut self, migration: u64) {
        for record in self.pages.lines.allowances.as_mut() {
            if record.state != AllowanceRecord::NONE && record.migration == migration {
                stores::set_in_order(&mut record.state, AllowanceRecord::NONE);
            }
        }
    }

    fn allowances(&self, each: &mut dyn FnMut(&Allowance, bool)) {
        for record in self.pages.lines.allowances.iter() {
            if record.state == AllowanceRecord::NONE {
                continue;
            }
            let allowance = Allowance {
                migration: record.migration,
                range_epoch: record.range_epoch,
                pages: record.first_page..record.first_page.saturating_add(record.pages),
                space: Space(record.space),
                taker: NodeId(record.taker),
                taker_incarnation: record.taker_incarnation,
            };
            each(&allowance, record.state == AllowanceRecord::OPEN);
        }
    }

    fn last_migration(&self) -> u64 {
        self.pages.lines.floors[0].migration
    }

    fn lease_floor(&self) -> u64 {
        self.pages.lines.floors[0].lease
    }

    fn raise_lease_floor(&mut self, epoch: u64) {
        self.pages.lines.floors.as_mut()[0].raise_lease(epoch);
    }
}
