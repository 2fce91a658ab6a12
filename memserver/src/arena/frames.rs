//! Which memory a line has.
//!
//! A frame is the memory of a line, and has a number. Own lines begin with the frame of their number; only those are
//! read by direct readers. A line is never in two frames, and no frame is two lines': a frame changes hands by two stores,
//! first the line that had it lets it go, and between the two it is nobody's.

use bluebridge_protocol::store::SHARD_PAGES_MAX;
use bluebridge_wire::{
    ArenaGeneration, NodeId,
    address::{LINE_PAGES, PAGE_BYTES},
    header::LEASE_EPOCH_MAX,
};

use super::pages::{Contents, Damaged, Pages, Use};
use crate::{
    direct::hints::ForeignLine,
    kept::{
        PageRecord,
        lines::{AllowanceRecord, DEFAULT_FRAME, LineEntry, NO_FRAME},
        stores,
    },
};

/// Pages that locations name.
const LOCATION_PAGES: u64 = 1 << 36;

/// The numbers of a line's pages.
pub(super) const fn pages_of(line: usize) -> core::ops::Range<usize> {
    line * LINE_PAGES..(line + 1) * LINE_PAGES
}

impl Pages {
    /// The frame of a line.
    pub(super) fn frame(&self, line: usize) -> Option<usize> {
        match self.lines.frames[line] {
            // The line at the end that is not whole has the frame of its number, too.
            DEFAULT_FRAME => (line * LINE_PAGES < self.sizes().memory_pages).then_some(line),
            NO_FRAME => None,
            frame => Some(frame as usize - 1),
        }
    }

    /// Gives a line a frame that no line has, or takes its frame away. The bytes of its pages are those of other pages
    /// then: leftover.
    pub(super) fn set_frame(&mut self, line: usize, frame: Option<usize>) {
        let value = match frame {
            None => NO_FRAME,
            // Zeros as at the beginning, if possible, so that an arena that was never changed is all zeros.
            Some(frame) if frame == line => DEFAULT_FRAME,
            Some(frame) => u32::try_from(frame + 1).unwrap_or(NO_FRAME),
        };
        let is_own_frame = frame == Some(line) && self.is_here(line);
        let marks = if is_own_frame { 0 } else { PageRecord::ELSEWHERE };
        for number in pages_of(line) {
            let state = &mut self.states_mut()[number];
            stores::set(&mut state.contents, Contents::LEFTOVER);
            stores::set(&mut state.marks, marks);
            // A direct reader that is copying the page finds that it changed. One store, so that a process that is
            // killed leaves no change under way.
            let next = state.sequence + 2;
            stores::end_change(&mut state.sequence, next);
        }
        stores::set_in_order(&mut self.lines.frames.as_mut()[line], value);
    }

    /// Whether a line never had memory. Then its pages are as at the beginning, and nothing should read their states:
    /// the system would provide memory for them.
    pub(super) fn is_untouched(&self, line: usize) -> bool {
        self.lines.frames[line] == DEFAULT_FRAME && line * LINE_PAGES >= self.sizes().memory_pages
    }

    /// Where a page's bytes begin in the memory; `None` if it has none.
    pub(super) fn place(&self, number: usize) -> Option<usize> {
        let page = self.frame(number / LINE_PAGES)? * LINE_PAGES + number % LINE_PAGES;
        (page < self.sizes().memory_pages).then_some(page * PAGE_BYTES)
    }

    /// Whether there is a page with this number here. One of a line that never had memory is beyond the end; an own one
    /// whose memory is lent is only free, and so is another server's without memory that is served here.
    pub(super) fn exists(&self, number: usize) -> bool {
        let line = number / LINE_PAGES;
        let served = if self.is_own(line) { LineEntry::DEFAULT } else { LineEntry::ADOPTED };
        let is_lent = self.frame(line).is_none()
            && !self.is_untouched(line)
            && self.entry(line).state == served;
        is_lent || self.place(number).is_some()
    }

    /// Whether a later page's bytes are as far behind a page's as its number is.
    pub(super) fn is_behind(&self, page: usize, later: usize) -> bool {
        let distance = (later - page) * PAGE_BYTES;
        self.place(page).map(|place| place + distance) == self.place(later)
    }

    /// Why direct readers must not answer for a page, leased or not. They look for the bytes of an own one in the frame of
    /// its line's number; those of another server's line have any frame.
    pub(super) fn marks_of_line(&self, number: usize) -> u8 {
        let line = number / LINE_PAGES;
        let is_readable = if self.is_own(line) {
            self.lines.frames[line] == DEFAULT_FRAME && self.is_here(line)
        } else {
            self.entry(line).state == LineEntry::ADOPTED && self.frame(line).is_some()
        };
        if is_readable { 0 } else { PageRecord::ELSEWHERE }
    }

    /// Marks the pages of a line for direct readers.
    fn mark_line(&mut self, line: usize) {
        for number in pages_of(line) {
            let marks = self.marks_of_line(number);
            stores::set(&mut self.states_mut()[number].marks, marks);
        }
    }

    pub(super) fn entry(&self, line: usize) -> &LineEntry {
        &self.lines.entries[line]
    }

    /// Whether a line is an own one that is here, or a place that is not used.
    pub(super) fn is_here(&self, line: usize) -> bool {
        self.entry(line).state == LineEntry::DEFAULT
    }

    /// Whether no page of a line is allocated.
    pub(super) fn is_free(&self, line: usize) -> bool {
        pages_of(line).all(|number| self.state(number).role() == Use::None)
    }

    /// Records what a line is, after everything else about it. No page of it is leased from then on.
    pub(super) fn set_line_state(&mut self, line: usize, state: u32) {
        stores::set_in_order(&mut self.lines.entries.as_mut()[line].state, state);
        self.mark_line(line);
        if !self.is_own(line) && state == LineEntry::ADOPTED {
            self.hint(line);
        }
    }

    /// Tells direct readers which line of another server has a place.
    pub(super) fn hint(&mut self, line: usize) {
        let LineEntry { first_page, node, .. } = *self.entry(line);
        let foreign = ForeignLine { home: NodeId(node), first_page };
        let place = u32::try_from(line).unwrap_or(u32::MAX);
        if let Some(hints) = self.hints() {
            hints.set(foreign, place);
        }
    }

    /// Records where a line comes from; its state is recorded afterwards.
    pub(super) fn set_line_name(&mut self, line: usize, name: LineEntry) {
        let entry = &mut self.lines.entries.as_mut()[line];
        let LineEntry { migration, epoch, first_page, node, generation, .. } = name;
        stores::set(&mut entry.migration, migration);
        stores::set(&mut entry.epoch, epoch);
        stores::set(&mut entry.first_page, first_page);
        stores::set(&mut entry.node, node);
        stores::set(&mut entry.generation, generation);
    }

    /// Whether a line is one of this server's addresses.
    pub(super) const fn is_own(&self, line: usize) -> bool {
        line < self.sizes().own_lines
    }

    /// Checks that no two lines have the same memory, and that each has a state that there is.
    pub(super) fn check_lines(&self) -> Result<(), Damaged> {
        let mut is_taken = vec![false; self.sizes().frames()];
        for line in 0..self.sizes().lines() {
            let damaged = Damaged::Line { line: u32::try_from(line).unwrap_or(u32::MAX) };
            if let Some(frame) = self.frame(line) {
                // The frame of the line at the end is not whole, and stays there.
                let is_last = frame == self.sizes().frames() && frame == line;
                let taken = is_taken.get_mut(frame).map(|taken| core::mem::replace(taken, true));
                if !is_last && taken != Some(false) {
                    return Err(damaged);
                }
            }
            let is_good = match self.entry(line).state {
                LineEntry::DEFAULT => true,
                LineEntry::GIVEN => self.is_own(line) || self.has_name(line),
                LineEntry::STAGED => {
                    // Whoever adopts the line raises the floor of lease epochs to it.
                    let is_epoch = self.entry(line).epoch <= LEASE_EPOCH_MAX;
                    self.frame(line).is_some() && self.has_name(line) && is_epoch
                }
                LineEntry::ADOPTED => {
                    // It gave it back when none of its pages was allocated, which is checked with the pages.
                    let is_lent = self.lines.frames[line] == NO_FRAME;
                    let has_memory = self.frame(line).is_some() || is_lent;
                    !self.is_own(line) && has_memory && self.has_name(line)
                }
                _ => false,
            };
            if !is_good {
                return Err(damaged);
            }
        }
        Ok(())
    }

    /// Whether a line is named as a whole line of another server.
    fn has_name(&self, line: usize) -> bool {
        let LineEntry { first_page, generation, .. } = *self.entry(line);
        first_page.is_multiple_of(LINE_PAGES as u64)
            && first_page < LOCATION_PAGES
            && ArenaGeneration::new(generation).is_some()
    }

    /// Checks that the floor of lease epochs is one: the next process could not grant any above a greater number. And
    /// that no floor became lower: what was refused would be accepted again.
    pub(super) fn check_floors(&self) -> Result<(), Damaged> {
        let floors = self.lines.floors[0];
        if floors.lease > LEASE_EPOCH_MAX {
            return Err(Damaged::LeaseFloor { epoch: floors.lease });
        }
        floors.lowered().map_or(Ok(()), |what| Err(Damaged::Lowered { what }))
    }

    /// Checks that the ranges of allowances are ranges of a shard, and that their migrations are known as such.
    pub(super) fn check_allowances(&self) -> Result<(), Damaged> {
        let last = self.lines.floors[0].migration;
        let is_good = |record: &AllowanceRecord| {
            let AllowanceRecord { migration, first_page, pages, state, .. } = *record;
            let is_whole = (first_page | pages).is_multiple_of(LINE_PAGES as u64) && pages > 0;
            let is_short = first_page < LOCATION_PAGES && pages <= SHARD_PAGES_MAX;
            state == AllowanceRecord::NONE
                || state <= AllowanceRecord::WITHDRAWN && is_whole && is_short && migration <= last
        };
        let bad = self.lines.allowances.iter().find(|record| !is_good(record));
        bad.map_or(Ok(()), |bad| Err(Damaged::Allowance { migration: bad.migration }))
    }

    /// Completes what the last process did with lines: lines that are another server's, and places that are not used,
    /// need no memory.
    pub(super) fn take_over_lines(&mut self) {
        for line in 0..self.sizes().lines() {
            let needs_none = match self.entry(line).state {
                LineEntry::GIVEN => true,
                LineEntry::DEFAULT => !self.is_own(line),
                LineEntry::ADOPTED => self.is_free(line),
                _ => false,
            };
            if needs_none && self.frame(line).is_some() {
                // Also for a direct reader of the last process that still runs: another line may get the memory.
                self.set_frame(line, None);
            }
        }
    }

    /// The frames that no line has.
    pub(super) fn spare_frames(&self) -> Vec<u32> {
        let mut is_taken = vec![false; self.sizes().frames()];
        for line in 0..self.sizes().lines() {
            if let Some(taken) = self.frame(line).and_then(|frame| is_taken.get_mut(frame)) {
                *taken = true;
            }
        }
        (0..).zip(is_taken).filter(|(_, is_taken)| !is_taken).map(|(frame, _)| frame).collect()
    }
}
