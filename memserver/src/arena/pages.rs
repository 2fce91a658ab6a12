//! The pages of an arena: their bytes and states, and the changes of them.
//!
//! If the memory is kept, each change is in the redo record before the first of its stores, and what a
//! process left is repeated by the same code: [`Pages::take_over`].

use core::ops::Range;

use arrayvec::ArrayVec;
use bluebridge_protocol::{direct::Shared, store::Creator};
use bluebridge_wire::{
    ArenaGeneration, NodeId, Space,
    address::{LINE_BYTES, LINE_PAGES, PAGE_BYTES},
};

use super::{ZEROS, colour::Colour, frames::pages_of};
use crate::{
    direct::{SharedPart, hints::Hints},
    kept::{
        CreatorRecord, KeptShard, PageRecord, ShardMemory,
        layout::Places,
        lines::{LineEntry, LineTables},
        redo::{self, Extent, PagePart, Pending, RedoRecord},
        stores,
    },
    memory::{self, Memory, Table},
    sizes::Sizes,
};

/// The role of a page.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Use {
    /// In no allocation: free, in quarantine or retired.
    None,
    /// The first page of an allocation.
    Head,
    /// A further page of an allocation.
    Body,
}

impl Use {
    pub(super) const NONE: u8 = 0;
    pub(super) const HEAD: u8 = 1;
    pub(super) const BODY: u8 = 2;
}

/// What the memory of a page contains.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Contents {
    /// Zeros.
    Zeros,
    /// The bytes of an earlier allocation. An allocated page with leftover reads as zeros, and is
    /// zeroed by its first write: a CREATE that zeroed all its pages would delay other clients.
    Leftover,
    /// Bytes that its current or last allocation wrote.
    Written,
}

impl Contents {
    pub(super) const ZEROS: u8 = 0;
    pub(super) const LEFTOVER: u8 = 1;
    pub(super) const WRITTEN: u8 = 2;
}

impl PageRecord {
    pub(super) const fn role(&self) -> Use {
        match self.part {
            Use::HEAD => Use::Head,
            Use::BODY => Use::Body,
            _ => Use::None,
        }
    }

    pub(super) const fn holds(&self) -> Contents {
        contents_of(self.contents)
    }

    pub(super) const fn colour(&self) -> Colour {
        Colour::from_bits(self.colour)
    }

    pub(super) const fn space(&self) -> Space {
        Space(self.space)
    }
}

/// The CRC32C of a page of this sequence, as its record has it.
const fn checksum(sequence: u64, crc: u32) -> u64 {
    sequence << 32 | crc as u64
}

const fn contents_of(byte: u8) -> Contents {
    match byte {
        Contents::ZEROS => Contents::Zeros,
        Contents::WRITTEN => Contents::Written,
        _ => Contents::Leftover,
    }
}

/// More than the changes that a page can have; a greater sequence is damaged.
const SEQUENCE_MAX: u64 = u64::MAX / 2;

/// Why kept memory cannot be taken over.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Damaged {
    /// The record of the change under way is none that this program writes.
    #[error("the record of its last change is damaged")]
    Redo,
    /// Its pages had colours that are not reserved.
    #[error(
        "it has arena generations that the controller has not reserved: the controller's store is \
         older than this memory"
    )]
    Generations,
    /// A page has, or had, a colour that no allocation of the contents can have.
    #[error("the colour of page {page} is damaged")]
    Colour {
        /// The page's number in the shard.
        page: u32,
    },
    /// The states of its pages contradict each other.
    #[error("the state of page {page} is damaged")]
    Page {
        /// The page's number in the shard.
        page: u32,
    },
    /// A line has a state that no line has, or memory that another line has, too.
    #[error("the state of line {line} is damaged")]
    Line {
        /// The line's number in the shard.
        line: u32,
    },
    /// The floor of lease epochs is greater than every epoch.
    #[error("its floor of lease epochs, {epoch}, is damaged")]
    LeaseFloor {
        /// The floor.
        epoch: u64,
    },
    /// A number that only grows is lower than it was.
    #[error("its {what} is damaged: it is lower than it was")]
    Lowered {
        /// Its name.
        what: &'static str,
    },
    /// A permission to give lines away that nobody can have given.
    #[error("the record of migration {migration} is damaged")]
    Allowance {
        /// The migration's id.
        migration: u64,
    },
}

/// New bytes of a page.
#[derive(Clone, Copy)]
pub(super) struct NewBytes<'a> {
    pub(super) number: usize,
    pub(super) start: usize,
    pub(super) data: &'a [u8],
    /// The CRC32C of the data, if it is known and they are the whole page.
    pub(super) page_crc: Option<u32>,
}

/// A page of a line that another server gives.
pub(super) struct StagedPage {
    pub(super) version: u64,
    pub(super) part: u8,
    pub(super) link: u32,
    pub(super) colour: Colour,
    pub(super) space: Space,
    /// Its bytes are in the line's memory; otherwise it reads as zeros, or is free.
    pub(super) is_written: bool,
    /// The CRC32C of its bytes, if it is known.
    pub(super) crc: Option<u32>,
}

/// The pages of one shard.
#[derive(Debug)]
pub(super) struct Pages {
    sizes: Sizes,
    memory: Memory,
    /// Of own pages, then of the places for other servers' lines.
    states: Table<PageRecord>,
    /// The creator of the allocation whose first page this is. It is stored apart from the pages'
    /// states, which every access reads.
    creators: Table<CreatorRecord>,
    pub(super) lines: LineTables,
    kept: Option<Journal>,
}

/// What kept memory has in addition.
#[derive(Debug)]
struct Journal {
    redo: RedoRecord,
    worn: Table<u64>,
    fences: Table<u32>,
    shared: Option<SharedPart>,
    hints: Option<Hints>,
    places: Places,
}

impl Pages {
    /// The pages of `memory`, which are not allocated unless it holds contents.
    pub(super) fn new(memory: ShardMemory) -> Self {
        let ShardMemory { pages, kept } = memory;
        let sizes = Sizes::of(pages.len());
        match kept {
            None => Self {
                sizes,
                memory: pages,
                states: Table::heap(sizes.pages()),
                creators: Table::heap(sizes.pages()),
                lines: LineTables::heap(&sizes),
                kept: None,
            },
            Some(kept) => {
                let KeptShard {
                    states,
                    creators,
                    lines,
                    redo,
                    worn,
                    fences,
                    shared,
                    hints,
                    places,
                    ..
                } = kept;
                let journal = Journal { redo, worn, fences, shared, hints, places };
                Self { sizes, memory: pages, states, creators, lines, kept: Some(journal) }
            }
        }
    }

    pub(super) const fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    /// The memory of which [`Self::new`] made it, with its contents.
    pub(super) fn into_memory(self) -> ShardMemory {
        let Self { memory: pages, states, creators, lines, kept, .. } = self;
        let kept = kept.map(|Journal { redo, worn, fences, shared, hints, places }| KeptShard {
            states,
            creators,
            lines,
            redo,
            worn,
            fences,
            shared,
            hints,
            places,
            has_contents: true,
        });
        ShardMemory { pages, kept }
    }

    /// The states of all own pages.
    pub(super) fn own(&self) -> &[PageRecord] {
        &self.states[..self.sizes.own_pages()]
    }

    /// The states of all pages: own ones, then the places for others'.
    pub(super) fn states(&self) -> &[PageRecord] {
        &self.states
    }

    pub(super) fn states_mut(&mut self) -> &mut [PageRecord] {
        self.states.as_mut()
    }

    pub(super) fn state(&self, number: usize) -> &PageRecord {
        &self.states[number]
    }

    /// The bytes of a page; zeros if it has no memory.
    pub(super) fn bytes(&self, number: usize, range: &Range<usize>) -> &[u8] {
        match self.place(number) {
            Some(start) => self.memory.get(start + range.start..start + range.end),
            None => &ZEROS[range.clone()],
        }
    }

    /// The CRC32C of all bytes of a page, if it is known.
    pub(super) fn page_crc(&self, number: usize) -> Option<u32> {
        let state = &self.states[number];
        let known = memory::load(&state.checksum);
        #[allow(clippy::cast_possible_truncation, reason = "the halves of the word")]
        let (sequence, crc) = ((known >> 32) as u32, known as u32);
        #[allow(clippy::cast_possible_truncation, reason = "the lower half of the sequence")]
        let is_of_these = sequence == state.sequence as u32;
        (state.holds() == Contents::Written && is_of_these).then_some(crc)
    }

    pub(super) fn creator(&self, number: usize) -> Creator {
        let CreatorRecord { node, incarnation, .. } = self.creators[number];
        Creator { node: NodeId(node), incarnation }
    }

    pub(super) fn note_creator(&mut self, number: usize, creator: Creator) {
        let Creator { node, incarnation } = creator;
        let record = CreatorRecord { node: node.0, incarnation, unused: 0 };
        stores::set(&mut self.creators.as_mut()[number], record);
    }

    /// Overwrites parts of different pages, all of them or none; at most the pages of a line.
    pub(super) fn write(&mut self, writes: &[NewBytes<'_>]) {
        let parts: ArrayVec<PagePart, LINE_PAGES> = writes
            .iter()
            .take(LINE_PAGES)
            .map(|new| self.part(new.number, new.start, new.data.len(), false))
            .collect();
        if let Some(journal) = &mut self.kept {
            journal.redo.begin_pages(&parts, writes.iter().map(|new| new.data));
        }
        for (part, new) in parts.iter().zip(writes) {
            self.apply(part, new.data, new.page_crc);
        }
        self.end();
    }

    /// Zeroes a part of a page.
    pub(super) fn zero(&mut self, number: usize, range: &Range<usize>) {
        let part = self.part(number, range.start, range.len(), true);
        if let Some(journal) = &mut self.kept {
            journal.redo.begin_pages(&[part], core::iter::empty());
        }
        self.apply(&part, &[], None);
        self.end();
    }

    /// Allocates an extent of free pages; it is incomplete. `worn` are the colours that its space has
    /// used then.
    pub(super) fn create(&mut self, pages: Range<usize>, colour: Colour, space: Space, worn: u64) {
        let before = &self.states[pages.clone()];
        let sequence = next_sequence(before);
        let place = self.kept.as_ref().and_then(|journal| journal.places.space(space));
        let extent = Extent {
            sequence,
            worn,
            start: narrow(pages.start),
            pages: narrow(pages.len()),
            colour: colour.bits(),
            place: place.and_then(|place| u16::try_from(place).ok()).unwrap_or(u16::MAX),
            space: space.0,
        };
        if let Some(journal) = &mut self.kept {
            journal.redo.begin_extent(redo::CREATE, extent);
        }
        self.apply_create(&extent);
        self.end();
    }

    /// The requester of the allocation that begins here may know it from now on.
    pub(super) fn complete(&mut self, number: usize) {
        self.set_complete(number, PageRecord::COMPLETE);
    }

    pub(super) fn set_complete(&mut self, number: usize, value: u8) {
        stores::set(&mut self.states.as_mut()[number].is_complete, value);
    }

    /// Records whether a page is leased: then direct readers must not answer for it.
    pub(super) fn set_leased(&mut self, number: usize, is_leased: bool) {
        let leased = if is_leased { PageRecord::LEASED } else { 0 };
        let marks = self.marks_of_line(number) | leased;
        stores::set(&mut self.states.as_mut()[number].marks, marks);
    }

    /// Frees an extent.
    pub(super) fn delete(&mut self, pages: &Range<usize>) {
        let sequence = next_sequence(&self.states[pages.clone()]);
        let (start, pages) = (narrow(pages.start), narrow(pages.len()));
        let extent = Extent { sequence, start, pages, ..Extent::default() };
        if let Some(journal) = &mut self.kept {
            journal.redo.begin_extent(redo::DELETE, extent);
        }
        self.apply_delete(&extent);
        self.end();
    }

    /// No version of a page is greater.
    pub(super) const VERSION_MAX: u64 = SEQUENCE_MAX / 2;

    /// Whether allocations of a space may be here.
    pub(super) fn serves(&self, space: Space) -> bool {
        let places = self.kept.as_ref().map(|journal| &journal.places);
        places.is_none_or(|places| places.space(space).is_some())
    }

    /// The memory of a line.
    pub(super) fn line_bytes(&mut self, line: usize) -> Option<&mut [u8]> {
        let start = self.place(line * LINE_PAGES)?;
        // The last frame may be not whole.
        self.place(line * LINE_PAGES + LINE_PAGES - 1)?;
        Some(self.memory.get_mut(start..start + LINE_BYTES))
    }

    /// Stores what a page of a line on its way has. Nobody is served from it, so there is no redo record, and no
    /// sequence lock. Memory of pages that are not written has the bytes of other pages.
    pub(super) fn stage(&mut self, number: usize, page: &StagedPage) {
        let contents = if page.is_written { Contents::WRITTEN } else { Contents::LEFTOVER };
        let state = &mut self.states.as_mut()[number];
        // Versions go on from the greater one, so that none ever names two contents.
        let sequence = state.sequence.max(page.version * 2);
        stores::set(&mut state.link, page.link);
        stores::set(&mut state.colour, page.colour.bits());
        stores::set(&mut state.space, page.space.0);
        stores::set(&mut state.part, page.part);
        stores::set(&mut state.contents, contents);
        stores::set(&mut state.is_complete, PageRecord::COMPLETE);
        let checksum = page.crc.map_or(PageRecord::NO_CHECKSUM, |crc| checksum(sequence, crc));
        stores::set(&mut state.checksum, checksum);
        stores::set(&mut state.sequence, sequence);
    }

    /// Zeroes the bytes of free pages that are not zeros, adjacent ones together.
    pub(super) fn clear(&mut self, pages: Range<usize>) {
        let mut number = pages.start;
        while number < pages.end {
            let from = number;
            while number < pages.end
                && self.states[number].holds() != Contents::Zeros
                && self.is_behind(from, number)
            {
                number += 1;
            }
            if let Some(start) = self.place(from) {
                let bytes = (number - from) * PAGE_BYTES;
                stores::clear(self.memory.get_mut(start..start + bytes));
            }
            for state in &mut self.states.as_mut()[from..number] {
                stores::set(&mut state.contents, Contents::ZEROS);
            }
            number += usize::from(from == number);
        }
    }

    /// What direct readers share.
    pub(super) fn shared(&self) -> Shared<'_> {
        let shared = self.kept.as_ref().and_then(|journal| journal.shared.as_ref());
        shared.map_or_else(Shared::default, SharedPart::all)
    }

    /// Where direct readers look for lines of other servers.
    pub(super) fn hints(&mut self) -> Option<&mut Hints> {
        self.kept.as_mut()?.hints.as_mut()
    }

    /// The spaces whose worn colours are kept.
    pub(super) fn spaces(&self) -> Vec<Space> {
        self.kept.as_ref().map_or_else(Vec::new, |journal| journal.places.spaces().to_vec())
    }

    /// Colours that a space's allocations used, as far as they are kept.
    pub(super) fn worn(&self, space: Space) -> u64 {
        let journal = self.kept.as_ref();
        let worn = journal.and_then(|journal| journal.worn.get(journal.places.space(space)?));
        worn.copied().unwrap_or(0)
    }

    pub(super) fn keep_fence(&mut self, space: Space, node: NodeId, incarnation: u32) {
        let Some(journal) = &mut self.kept else { return };
        let place = journal.places.fence(space, node);
        if let Some(fence) = place.and_then(|place| journal.fences.as_mut().get_mut(place)) {
            stores::set(fence, incarnation);
        }
    }

    pub(super) fn fences(&self, each: &mut dyn FnMut(Space, NodeId, u32)) {
        let Some(journal) = &self.kept else { return };
        journal.places.each_fence(&journal.fences, each);
    }

    fn end(&mut self) {
        if let Some(journal) = &mut self.kept {
            journal.redo.end();
        }
    }

    fn part(&self, number: usize, start: usize, bytes: usize, is_zero: bool) -> PagePart {
        let state = &self.states[number];
        PagePart {
            sequence: state.sequence + 2,
            number: narrow(number),
            start: u16::try_from(start).unwrap_or(u16::MAX),
            bytes: u16::try_from(bytes).unwrap_or(u16::MAX),
            contents: state.contents,
            is_zero: u8::from(is_zero),
            unused: [0; 6],
        }
    }

    /// Does a part of a change; again, if a process did some of it.
    fn apply(&mut self, part: &PagePart, data: &[u8], page_crc: Option<u32>) {
        let number = part.number as usize;
        let (start, end) =
            (usize::from(part.start), usize::from(part.start) + usize::from(part.bytes));
        let place = self.place(number);
        let bytes = place.map(|place| self.memory.get_mut(place..place + PAGE_BYTES));
        // A page that has no memory is never written; a damaged record could say so.
        let Some(bytes) = bytes else { return };
        let state = &mut self.states.as_mut()[number];
        let before = contents_of(part.contents);
        stores::begin_change(&mut state.sequence);
        if part.is_zero == 0 {
            if before == Contents::Leftover {
                stores::clear(&mut bytes[..start]);
                stores::clear(&mut bytes[end..]);
            }
            stores::copy(&mut bytes[start..end], data);
            stores::set(&mut state.contents, Contents::WRITTEN);
        } else if before == Contents::Written {
            stores::clear(&mut bytes[start..end]);
        }
        let checksum = page_crc.map_or(PageRecord::NO_CHECKSUM, |crc| checksum(part.sequence, crc));
        stores::set(&mut state.checksum, checksum);
        stores::end_change(&mut state.sequence, part.sequence);
    }

    fn apply_create(&mut self, extent: &Extent) {
        let Extent { sequence, worn, start, pages, colour, place, space } = *extent;
        let range = start as usize..start as usize + pages as usize;
        for (back, number) in (0..).zip(range) {
            let marks = self.marks_of_line(number);
            let page = &mut self.states.as_mut()[number];
            let (part, link) = place_of(back, pages);
            let contents = match page.contents {
                Contents::ZEROS => Contents::ZEROS,
                _ => Contents::LEFTOVER,
            };
            stores::begin_change(&mut page.sequence);
            stores::set(&mut page.link, link);
            stores::set(&mut page.colour, colour);
            stores::set(&mut page.space, space);
            stores::set(&mut page.part, part);
            stores::set(&mut page.contents, contents);
            stores::set(&mut page.is_complete, 0);
            stores::set(&mut page.marks, marks);
            stores::set(&mut page.checksum, PageRecord::NO_CHECKSUM);
            stores::end_change(&mut page.sequence, sequence);
        }
        if let Some(journal) = &mut self.kept
            && let Some(known) = journal.worn.as_mut().get_mut(usize::from(place))
        {
            stores::set(known, worn);
        }
    }

    fn apply_delete(&mut self, extent: &Extent) {
        let range = extent.start as usize..extent.start as usize + extent.pages as usize;
        for page in &mut self.states.as_mut()[range] {
            stores::begin_change(&mut page.sequence);
            stores::set(&mut page.part, Use::NONE);
            stores::end_change(&mut page.sequence, extent.sequence);
        }
    }

    /// Checks what all changes together left, also the one that was under way when the last process
    /// ended, as if it were complete. `first` is the first generation of the contents.
    ///
    /// # Errors
    /// [`Damaged`].
    pub(super) fn check(&self, first: ArenaGeneration) -> Result<(), Damaged> {
        let pending = self.pending()?;
        self.check_lines()?;
        self.check_floors()?;
        self.check_allowances()?;
        self.check_extents(pending.as_ref())?;
        self.check_colours(first, pending.as_ref())
    }

    /// Completes what the last process left, after [`Self::check`]: repeats the change that was under
    /// way, frees allocations that nobody can know of, and takes no free page for zeros. Returns how
    /// many allocations it freed, and the first pages of those that are still to be freed.
    ///
    /// # Errors
    /// [`Damaged::Redo`], not after [`Self::check`].
    pub(super) fn take_over(&mut self) -> Result<(u32, Vec<usize>), Damaged> {
        self.repeat()?;
        self.take_over_lines();
        for line in 0..self.sizes.lines() {
            if self.is_untouched(line) {
                continue;
            }
            for number in pages_of(line) {
                // Leases end with the process.
                let marks = self.marks_of_line(number);
                if self.states[number].marks != marks {
                    stores::set(&mut self.states.as_mut()[number].marks, marks);
                }
            }
            if !self.is_own(line) && self.entry(line).state == LineEntry::ADOPTED {
                self.hint(line);
            }
        }
        let is_freeing = |state: &PageRecord| {
            state.role() == Use::Head && state.is_complete == PageRecord::FREEING
        };
        let adopted = (self.sizes.own_lines..self.sizes.lines())
            .filter(|line| self.entry(*line).state == LineEntry::ADOPTED);
        let of_adopted = adopted.flat_map(pages_of).filter(|it| is_freeing(&self.states[*it]));
        let mut freeing: Vec<_> = of_adopted.collect();
        let mut freed = 0;
        let mut number = 0;
        while number < self.sizes.own_pages() {
            if self.is_untouched(number / LINE_PAGES) {
                number = pages_of(number / LINE_PAGES).end;
                continue;
            }
            let state = self.states[number];
            match state.role() {
                Use::None => {
                    if state.contents != Contents::WRITTEN {
                        stores::set(&mut self.states.as_mut()[number].contents, Contents::WRITTEN);
                    }
                    number += 1;
                }
                Use::Head | Use::Body => {
                    let end = number + state.link as usize;
                    if is_freeing(&state) {
                        freeing.push(number);
                    }
                    if state.is_complete == 0 {
                        self.delete(&(number..end));
                        freed += 1;
                        // Its pages are free now.
                        continue;
                    }
                    number = end;
                }
            }
        }
        Ok((freed, freeing))
    }

    /// The change that was under way when the last process ended, if it can be repeated.
    fn pending(&self) -> Result<Option<Pending<'_>>, Damaged> {
        let Some(journal) = &self.kept else { return Ok(None) };
        let (page_count, own_count) = (self.states.len(), self.sizes.own_pages());
        let pending = journal.redo.pending().map_err(|()| Damaged::Redo)?;
        let is_good = match &pending {
            None => true,
            Some(Pending::Pages(parts, data)) => {
                let fits = |part: &PagePart| {
                    let is_page = (part.number as usize) < page_count
                        && self.place(part.number as usize).is_some();
                    is_page
                        && usize::from(part.start) + usize::from(part.bytes) <= PAGE_BYTES
                        && part.sequence.is_multiple_of(2)
                        && part.sequence <= SEQUENCE_MAX
                        && part.contents <= Contents::WRITTEN
                        && part.is_zero <= 1
                };
                parts.iter().all(fits)
                    && parts.iter().map(PagePart::data_bytes).sum::<usize>() <= data.len()
            }
            Some(Pending::Create(extent) | Pending::Delete(extent)) => {
                let end = (extent.start as usize).checked_add(extent.pages as usize);
                // A part of a line of another server can be freed.
                let line = extent.start as usize / LINE_PAGES;
                let is_adopted = !self.is_own(line) && line < self.sizes.lines();
                let is_create = matches!(pending, Some(Pending::Create(_)));
                let last = match is_adopted && !is_create {
                    true => pages_of(line).end,
                    false => own_count,
                };
                let fits = extent.pages > 0 && end.is_some_and(|end| end <= last);
                let is_good = extent.sequence.is_multiple_of(2) && extent.sequence <= SEQUENCE_MAX;
                let place = journal.places.space(Space(extent.space)).map(u16::try_from);
                fits && is_good && (!is_create || place == Some(Ok(extent.place)))
            }
        };
        is_good.then_some(pending).ok_or(Damaged::Redo)
    }

    fn repeat(&mut self) -> Result<(), Damaged> {
        match self.pending()? {
            None => return Ok(()),
            Some(Pending::Pages(parts, data)) => {
                let mut rest = data;
                let copies: ArrayVec<(PagePart, Vec<u8>), LINE_PAGES> = parts
                    .iter()
                    .map(|part| {
                        let (new, after) = rest.split_at(part.data_bytes());
                        rest = after;
                        (*part, new.to_vec())
                    })
                    .collect();
                copies.iter().for_each(|(part, data)| self.apply(part, data, None));
            }
            Some(Pending::Create(extent)) => self.apply_create(&extent),
            Some(Pending::Delete(extent)) => self.apply_delete(&extent),
        }
        self.end();
        Ok(())
    }

    /// Whether every page that was ever allocated has a colour. Its last generation is only known to
    /// the controller.
    fn check_colours(
        &self,
        first: ArenaGeneration,
        pending: Option<&Pending<'_>>,
    ) -> Result<(), Damaged> {
        let is_good = |page: PageRecord| {
            let is_unused = page.role() == Use::None && page.colour() == Colour::default();
            let colour = page.colour().generation_and_tag();
            is_unused || colour.is_some_and(|(generation, tag)| generation >= first && tag.0 != 0)
        };
        let lines = (0..self.sizes.own_lines).filter(|line| !self.is_untouched(*line));
        let bad = lines.flat_map(pages_of).find(|number| {
            let page = self.state_after(*number, pending);
            !page.is_some_and(is_good)
        });
        bad.map_or(Ok(()), |number| Err(Damaged::Colour { page: narrow(number) }))
    }

    /// The state of a page, as far as it is checked, when the change under way is complete.
    fn state_after(&self, number: usize, pending: Option<&Pending<'_>>) -> Option<PageRecord> {
        let now = *self.states.get(number)?;
        // How far the page is behind the extent's first.
        let place_in = |extent: &Extent| {
            let back = narrow(number).checked_sub(extent.start);
            back.filter(|back| *back < extent.pages)
        };
        Some(match pending {
            None => now,
            Some(Pending::Pages(parts, _)) => {
                let part = parts.iter().rfind(|part| part.number as usize == number);
                part.map_or(now, |part| PageRecord { sequence: part.sequence, ..now })
            }
            Some(Pending::Create(extent)) => place_in(extent).map_or(now, |back| {
                let Extent { sequence, colour, space, .. } = *extent;
                let (part, link) = place_of(back, extent.pages);
                PageRecord { sequence, link, colour, space, part, ..now }
            }),
            Some(Pending::Delete(extent)) => place_in(extent).map_or(now, |_| PageRecord {
                sequence: extent.sequence,
                part: Use::NONE,
                ..now
            }),
        })
    }

    /// Whether all pages of every allocation belong to it, and it to a space that is served.
    fn check_extents(&self, pending: Option<&Pending<'_>>) -> Result<(), Damaged> {
        let state = |number| self.state_after(number, pending);
        let is_served = |space| self.serves(space);
        // What another server has needs no memory here.
        let has_memory = |number: usize| {
            let is_given = self.entry(number / LINE_PAGES).state == LineEntry::GIVEN;
            is_given || self.place(number).is_some()
        };
        let own_count = self.sizes.own_pages();
        let damaged = |number| Damaged::Page { page: narrow(number) };
        let adopted = self.sizes.own_lines..self.sizes.lines();
        let used = adopted.filter(|line| self.entry(*line).state != LineEntry::DEFAULT);
        for number in used.flat_map(pages_of) {
            let Some(page) = state(number) else { continue };
            let is_changing = !page.sequence.is_multiple_of(2);
            let is_known = page.part <= Use::BODY && page.contents <= Contents::WRITTEN;
            let is_served =
                page.role() == Use::None || is_served(page.space()) && has_memory(number);
            if !is_known || !is_served || page.sequence > SEQUENCE_MAX || is_changing {
                return Err(damaged(number));
            }
        }
        let mut number = 0;
        while number < own_count {
            if self.is_untouched(number / LINE_PAGES) {
                number = pages_of(number / LINE_PAGES).end;
                continue;
            }
            let Some(head) = state(number) else { break };
            let is_changing = !head.sequence.is_multiple_of(2);
            let is_known = head.part <= Use::BODY && head.contents <= Contents::WRITTEN;
            if !is_known || head.sequence > SEQUENCE_MAX || is_changing {
                return Err(damaged(number));
            }
            number += match head.role() {
                Use::None => 1,
                Use::Body => return Err(damaged(number)),
                Use::Head => {
                    let length = head.link as usize;
                    let end = number.checked_add(length);
                    let end = end.filter(|_| length > 0 && is_served(head.space()));
                    let end = end.filter(|_| has_memory(number));
                    let end = end.filter(|end| *end <= own_count).ok_or(damaged(number))?;
                    for (back, body) in (1..).zip(number + 1..end) {
                        let is_its = |of: PageRecord| {
                            let is_good = of.sequence.is_multiple_of(2)
                                && of.sequence <= SEQUENCE_MAX
                                && of.contents <= Contents::WRITTEN
                                && has_memory(body);
                            is_good
                                && of.part == Use::BODY
                                && of.link == back
                                && (of.colour, of.space) == (head.colour, head.space)
                        };
                        if !state(body).is_some_and(is_its) {
                            return Err(damaged(body));
                        }
                    }
                    length
                }
            };
        }
        Ok(())
    }
}

/// The part and the link of a page that is `back` pages behind the first of an allocation.
const fn place_of(back: u32, pages: u32) -> (u8, u32) {
    if back == 0 { (Use::HEAD, pages) } else { (Use::BODY, back) }
}

/// A sequence that none of the pages had.
fn next_sequence(pages: &[PageRecord]) -> u64 {
    pages.iter().map(|page| page.sequence).max().unwrap_or(0) + 2
}

/// A page's number or a number of pages; a shard has less than 2^32.
fn narrow(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

#[cfg(test)]
impl Pages {
    /// A page stays in the middle of a change.
    pub(super) fn stop_in_change(&mut self, number: usize) {
        stores::begin_change(&mut self.states.as_mut()[number].sequence);
    }

    pub(super) fn set_record(&mut self, number: usize, record: PageRecord) {
        self.states.as_mut()[number] = record;
    }

    pub(super) fn all_bytes(&self) -> &[u8] {
        self.memory.get(0..self.memory.len())
    }

    pub(super) fn byte_of(&self, page: usize, place: usize) -> u8 {
        self.bytes(page, &(place..place + 1))[0]
    }
}
