//! Lines of other servers of which no page is allocated (`docs/migration.md`, "Free lines").
//!
//! Only the home allocates pages, and only of lines that are at home, so such a line stays free for as long as it is here.
//! It is of use at home only. If the home has lost the contents, it is of no use at all, and is discarded.

use core::ops::Range;

use bluebridge_wire::{ArenaGeneration, NodeId, address::LINE_PAGES};

use super::{Adopted, Event, Responder};
use crate::store::PageStore;

const LINE: u64 = LINE_PAGES as u64;

/// Neighbouring free lines of one home's contents.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct FreeLines {
    /// The home.
    pub home: NodeId,
    /// The first generation of its contents.
    pub generation: ArenaGeneration,
    /// The pages by the home's numbers; whole lines.
    pub pages: Range<u64>,
}

impl Responder {
    /// The free lines of other servers that are here, in the order of homes, contents and pages. Those in a migration are
    /// among them.
    pub fn free_lines<S: PageStore + ?Sized>(&self, store: &S) -> Vec<FreeLines> {
        let store = store.lines();
        let mut found: Vec<FreeLines> = Vec::new();
        for of in self.ranges.adopted() {
            let Adopted { node: home, generation, first_page, page_count, local_page } = *of;
            for at in (0..page_count).step_by(LINE_PAGES) {
                if !store.is_free(local_page + at) {
                    continue;
                }
                let pages = first_page + at..first_page + at + LINE;
                match found.last_mut() {
                    Some(last)
                        if (last.home, last.generation, last.pages.end)
                            == (home, generation, pages.start) =>
                    {
                        last.pages.end = pages.end;
                    }
                    _ => found.push(FreeLines { home, generation, pages }),
                }
            }
        }
        found
    }

    /// Forgets free lines of contents that their home has lost, after nobody is led here for them any more. Those that are
    /// not here, not free or in a migration stay as they are.
    pub fn discard<S: PageStore + ?Sized>(&mut self, of: &FreeLines, store: &mut S) {
        let mut rows: Vec<Range<u64>> = Vec::new();
        for page in of.pages.clone().step_by(LINE_PAGES) {
            let local = self.ranges.local_of(of.home, of.generation, page);
            let is_idle =
                |local: &u64| !self.givings.allows(*local) && store.lines().is_free(*local);
            let Some(local) = local.filter(is_idle) else { continue };
            match rows.last_mut() {
                Some(last) if last.end == local => last.end += LINE,
                _ => rows.push(local..local + LINE),
            }
        }
        if rows.is_empty() {
            return;
        }
        self.ranges.remove_lines(&rows);
        for pages in rows {
            for line in pages.step_by(LINE_PAGES) {
                store.lines_mut().discard(line);
                self.counters.count(Event::LineDiscarded);
            }
        }
        self.publish(store);
    }
}
