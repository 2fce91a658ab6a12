//! Lines that are not at home and of which no page is allocated (`docs/migration.md`, "Free lines").
//!
//! Only the home allocates pages, and only of lines that are at home, so such a line stays free for as long as it is
//! elsewhere. It is of use at home only. If the home has lost the contents, it is of no use at all, and its server forgets
//! it. If its server lost it, the home, which knows the last colours, goes on with it.

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
    /// Whether own lines are not here of which it is not known that another server has them.
    #[must_use]
    pub const fn misses_lines(&self) -> bool {
        self.ranges.has_nowhere()
    }

    /// The free lines of other servers that are here, and own ones of which it is not known that another server has them; in
    /// the order of homes, contents and pages. Those in a migration are among them.
    pub fn free_lines<S: PageStore + ?Sized>(&self, store: &S) -> Vec<FreeLines> {
        let own = self.ranges.nowhere().map(|pages| Adopted {
            node: self.node,
            generation: store.generation(),
            first_page: pages.start,
            page_count: pages.end - pages.start,
            local_page: pages.start,
        });
        let mut found: Vec<FreeLines> = Vec::new();
        for of in self.ranges.adopted().iter().copied().chain(own) {
            let Adopted { node: home, generation, first_page, page_count, local_page } = of;
            for at in (0..page_count).step_by(LINE_PAGES) {
                if !store.lines().is_free(local_page + at) {
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

    /// Forgets free lines of contents that their home has lost, after nobody is led here for them any more; or goes on with
    /// own ones that nobody has. Those that are not here, not free or in a migration stay as they are.
    pub fn discard<S: PageStore + ?Sized>(&mut self, of: &FreeLines, store: &mut S) {
        if (of.home, of.generation) == (self.node, store.generation()) {
            return self.reclaim(&of.pages, store);
        }
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

    /// Own lines that no other server has are here again: without memory, and with the colours that they had last.
    fn reclaim<S: PageStore + ?Sized>(&mut self, pages: &Range<u64>, store: &mut S) {
        let rows =
            self.ranges.nowhere().map(|row| row.start.max(pages.start)..row.end.min(pages.end));
        let rows: Vec<_> = rows.collect();
        let mut is_any = false;
        for line in rows.into_iter().flat_map(|row| row.step_by(LINE_PAGES)) {
            if store.lines().is_free(line) && !self.givings.allows(line) {
                store.lines_mut().discard(line);
                self.ranges.return_moved(&(line..line + LINE));
                self.counters.count(Event::LineReclaimed);
                is_any = true;
            }
        }
        if is_any {
            self.publish(store);
        }
    }
}
