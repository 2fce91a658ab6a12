//! Allocations that are freed while some of their lines are at other servers (`docs/migration.md`, "DELETE").
//!
//! An own page keeps its state while its line is elsewhere, so the home of an allocation knows all of it. A server that has
//! lines of others knows an allocation by its first page.

use core::ops::Range;

use bluebridge_protocol::store::Access;
use bluebridge_wire::{LinePage, Location, Status, address::LINE_PAGES, line::Part};

use super::{Arena, Use, frames::pages_of, index_of, narrow};
use crate::kept::{PageRecord, lines::LineEntry};

impl Arena {
    /// The pages of the allocation that begins at a location, of whichever server it is; `pages` other than 0 must be its
    /// length.
    pub(super) fn length_anywhere(&self, access: Access, pages: u32) -> Result<u32, Status> {
        let number = self.index(access.location.page()).ok_or(Status::OutOfRange)?;
        if self.pages.is_untouched(number / LINE_PAGES) {
            return Err(Status::OutOfRange);
        }
        let page = self.pages.state(number);
        if page.role() == Use::None {
            return Err(Status::NotAllocated);
        }
        if page.colour().generation_and_tag() != Some((access.location.generation(), access.tag)) {
            return Err(Status::StaleTag);
        }
        if page.space() != access.space {
            return Err(Status::WrongSpace);
        }
        if page.role() != Use::Head || !access.location.is_page_aligned() {
            return Err(Status::Unaligned);
        }
        if pages != 0 && pages != page.link {
            return Err(Status::BadLength);
        }
        Ok(page.link)
    }

    pub(super) fn note_freeing(&mut self, first_page: u64) {
        let Some(number) = self.index(first_page) else { return };
        if self.pages.state(number).role() == Use::Head && !self.freeing.contains(&number) {
            self.pages.set_complete(number, PageRecord::FREEING);
            self.freeing.push(number);
        }
    }

    pub(super) fn each_freeing(&self, each: &mut dyn FnMut(u64, Access, u32)) {
        for &number in &self.freeing {
            let page = self.pages.state(number);
            let first_page = self.page_at(number);
            let Some((generation, tag)) = page.colour().generation_and_tag() else { continue };
            let offset = first_page << bluebridge_wire::address::PAGE_SHIFT;
            let Some(location) = Location::new(generation, offset) else { continue };
            let access = Access { location, length_bytes: 1, tag, space: page.space() };
            each(first_page, access, page.link);
        }
    }

    /// Whether a page is of an own allocation that is being freed.
    pub(super) fn is_being_freed(&self, number: usize) -> bool {
        self.pages.is_own(number / LINE_PAGES)
            && self.head_of(number).is_some_and(|head| self.freeing.contains(&head))
    }

    /// The first page of the allocation that an own page belongs to.
    fn head_of(&self, number: usize) -> Option<usize> {
        let page = self.pages.state(number);
        match page.role() {
            Use::None => None,
            Use::Head => Some(number),
            Use::Body => number.checked_sub(page.link as usize),
        }
    }

    /// Whether a page of an own allocation comes back as free. It is all of the allocation that is freed then: nobody frees a
    /// part of one, except a client that misuses DELETE.
    pub(super) fn is_freed_elsewhere(&self, number: usize, page: &LinePage) -> bool {
        let own = self.pages.state(number);
        let is_freed = page.part == Part::Free && page.colour == own.colour().generation_and_tag();
        is_freed && self.head_of(number).is_some()
    }

    /// Frees the own pages of an own allocation. Those that are here are allocated again when others are; the others when
    /// their line is back.
    pub(super) fn free_scattered(&mut self, first_page: u64) {
        let Some(start) = self.index(first_page).filter(|it| self.freeing.contains(it)) else {
            return;
        };
        let page = self.pages.state(start);
        let (space, length) = (page.space(), page.link as usize);
        self.pages.delete(&(start..start + length));
        self.freeing.retain(|number| *number != start);
        self.quota(space).used_pages -= length as u64;
        let mut next = start;
        while let Some(first) = (next..start + length).find(|number| self.may_be_queued(*number)) {
            let end = (first..start + length).find(|number| !self.may_be_queued(*number));
            next = end.unwrap_or(start + length);
            self.quarantine(narrow(first), narrow(next - first));
        }
    }

    /// Whether a free own page may be in a queue: it has memory, and its line is not on its way home. A line that comes
    /// home brings its free pages with it.
    fn may_be_queued(&self, number: usize) -> bool {
        let is_on_its_way = self.places.is_reserved(number / LINE_PAGES);
        self.pages.place(number).is_some() && !is_on_its_way
    }

    /// Frees pages of a line of another server.
    pub(super) fn free_adopted(&mut self, pages: &Range<u64>) {
        let Some(first) = self.index(pages.start) else { return };
        let numbers = first..first + index_of(pages.end.saturating_sub(pages.start));
        let line = first / LINE_PAGES;
        let is_in_line = !numbers.is_empty() && numbers.end <= pages_of(line).end;
        if !is_in_line || self.pages.entry(line).state != LineEntry::ADOPTED {
            return;
        }
        self.pages.delete(&numbers);
        self.freeing.retain(|number| !numbers.contains(number));
        self.lend_adopted(line);
    }

    /// The memory of a line of another server of which no page is allocated may be used for others.
    pub(super) fn lend_adopted(&mut self, line: usize) {
        if self.pages.is_free(line) {
            self.take_frame(line);
        }
    }
}
