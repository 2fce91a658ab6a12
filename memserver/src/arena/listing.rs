//! The allocations of a shard, as operators see them.

use bluebridge_wire::{
    ArenaGeneration, Location, NodeId,
    address::{LINE_PAGES, PAGE_SHIFT},
};

use super::{Arena, Use};
use crate::{
    kept::lines::LineEntry,
    survey::{Allocation, Lost},
};

impl Arena {
    /// Calls `each` for the allocations from a page on, by their first pages, until it returns
    /// false or `budget` pages were visited (an allocation counts as one). Returns the page to
    /// continue from, `None` at the end. Allocations that other servers have lost follow, if their first pages are here.
    pub(crate) fn survey(
        &self,
        from: u64,
        budget: u32,
        lost: &Lost,
        each: &mut dyn FnMut(Allocation) -> bool,
    ) -> Option<u64> {
        let (own, all) = (self.pages.own().len(), self.pages.states().len());
        // Between the own pages and the places for others' there is nothing.
        let mut number = self.index(from.max(self.first_page)).unwrap_or(own);
        for _ in 0..budget {
            if number >= all || number >= own && lost.is_empty() {
                return None;
            }
            let line = number / LINE_PAGES;
            let is_skipped = match number < own {
                true => self.pages.is_untouched(line),
                false => !self.is_lost(line, lost),
            };
            if is_skipped {
                number += LINE_PAGES - number % LINE_PAGES;
                continue;
            }
            let page = self.pages.state(number);
            let (allocation, visited) = match page.role() {
                Use::None => (None, 1),
                // The remaining pages of an allocation that began before.
                Use::Body if number < own => {
                    (None, self.length_of(number).saturating_sub(page.link as usize).max(1))
                }
                Use::Body => (None, 1),
                Use::Head if number < own => (self.own_allocation(number), page.link as usize),
                Use::Head => (self.lost_allocation(number), 1),
            };
            if allocation.is_some_and(|allocation| !each(allocation)) {
                return Some(self.page_at(number));
            }
            number += visited.max(1);
        }
        (number < all).then(|| self.page_at(number))
    }

    fn own_allocation(&self, number: usize) -> Option<Allocation> {
        let page = self.pages.state(number);
        Some(Allocation {
            space: page.space(),
            grant: self.grant_of(number)?,
            home: None,
            first_page: self.page_at(number),
            pages: page.link,
            creator: self.pages.creator(number),
        })
    }

    fn lost_allocation(&self, number: usize) -> Option<Allocation> {
        let LineEntry { node, first_page, .. } = *self.pages.entry(number / LINE_PAGES);
        let page = self.pages.state(number);
        let (generation, tag) = page.colour().generation_and_tag()?;
        let at_home = first_page + (number % LINE_PAGES) as u64;
        let location = Location::new(generation, at_home << PAGE_SHIFT)?;
        Some(Allocation {
            space: page.space(),
            grant: bluebridge_protocol::store::Grant { location, tag },
            home: Some(NodeId(node)),
            first_page: self.page_at(number),
            pages: page.link,
            creator: self.pages.creator(number),
        })
    }

    /// Whether a line is of contents that another server has lost.
    fn is_lost(&self, line: usize, lost: &Lost) -> bool {
        let LineEntry { node, generation, state, .. } = *self.pages.entry(line);
        let generation = ArenaGeneration::new(generation).unwrap_or_default();
        state == LineEntry::ADOPTED && lost.contains(&(NodeId(node), generation))
    }
}
