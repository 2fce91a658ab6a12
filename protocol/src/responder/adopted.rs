//! Lines that this server has of others, and what an earlier process left of migrations (`docs/migration.md`).

use core::ops::Range;

use bluebridge_wire::{ArenaGeneration, Fence, NodeId, Space, address::LINE_PAGES};

use super::{Event, Responder, ranges::Adopted, sessions::RequesterId};
use crate::{
    Timestamp,
    store::{HomeLine, PageStore, Placed, Taken},
};

const LINE: u64 = LINE_PAGES as u64;

const fn line(first_page: u64) -> Range<u64> {
    first_page..first_page + LINE
}

impl Responder {
    /// Records incarnations that the giver of a line has seen, before the line is served here: requests of lower ones
    /// are refused, and their sessions and leases end.
    pub fn heed_fences<S: PageStore + ?Sized>(
        &mut self,
        now: Timestamp,
        space: Space,
        fences: impl IntoIterator<Item = Fence>,
        store: &mut S,
    ) {
        for Fence { node, incarnation } in fences {
            self.raise_incarnation(now, &RequesterId { space, node, incarnation }, store);
        }
        self.update_readers(store);
    }

    /// A line is staged here, and its giver is asked whose it is. Until that is known ([`Self::adopt`] or
    /// [`Self::end_doubt`]) requests for it get BUSY if it is an own one, and NO_AUTHORITY otherwise.
    pub fn doubt(&mut self, home: HomeLine) {
        self.ranges.doubt(home);
    }

    /// A line that was in doubt is not this server's.
    pub fn end_doubt(&mut self, home: &HomeLine) {
        self.ranges.end_doubt(home);
    }

    /// The giver of a staged line said that it is this server's: serves it from now on, under lease epochs above that
    /// under which it was taken. [`Self::heed_fences`] was called with all that came with the answer.
    pub fn adopt<S: PageStore + ?Sized>(
        &mut self,
        now: Timestamp,
        first_page: u64,
        home: HomeLine,
        taken: Taken,
        store: &mut S,
    ) {
        self.leases.raise_epoch(taken.epoch);
        let lines = store.lines_mut();
        // Before it is served: the next process goes on above it.
        lines.raise_lease_floor(taken.epoch);
        lines.adopt(first_page);
        self.ranges.end_doubt(&home);
        if self.is_own_node(home.node) {
            self.ranges.return_moved(&line(first_page));
        } else {
            self.ranges.adopt_line(adopted(first_page, home));
        }
        self.counters.count(Event::LineAdopted);
        self.wake_waiters(now);
        self.publish(store);
    }

    /// Learns from the controller where own pages are that others serve, and which of them are lost.
    pub fn learn<S: PageStore + ?Sized>(
        &mut self,
        now: Timestamp,
        rows: &[(Range<u64>, NodeId)],
        lost: &[Range<u64>],
        store: &S,
    ) {
        self.ranges.learn(rows, lost);
        self.wake_waiters(now);
        self.publish(store);
    }

    /// Learns from the controller what other servers have, or may have, of contents that this node lost, and that began
    /// with a generation. Of rows without a node that is not known yet, and requests for them get BUSY. Pointers to all
    /// else of these contents are stale.
    pub fn learn_earlier(
        &mut self,
        generation: ArenaGeneration,
        rows: &[(Range<u64>, Option<NodeId>)],
    ) {
        self.ranges.learn_earlier(generation, rows);
    }

    /// Where the pages of a range are in the store; `None` if some are not here. The range is of this node, or of one
    /// whose contents began with the generation. If lines of another node are not one after the other here, there are
    /// other lines in between.
    pub fn place_of<S: PageStore + ?Sized>(
        &self,
        node: NodeId,
        generation: ArenaGeneration,
        pages: &Range<u64>,
        store: &S,
    ) -> Option<Range<u64>> {
        if !self.is_own_node(node) {
            return self.ranges.place_of(node, generation, pages);
        }
        let is_here = generation == store.generation() && !self.ranges.has_moved_in(pages);
        is_here.then(|| pages.clone())
    }

    /// The pages of a migration that are the taker's, by the names that they have at home; `None` if the migration is
    /// not known.
    pub fn given_names<S: PageStore + ?Sized>(
        &self,
        migration: u64,
        store: &S,
    ) -> Option<Vec<Adopted>> {
        let mut names = Vec::new();
        for row in self.given(migration)? {
            let mut left = row;
            while !left.is_empty() {
                let name = self.ranges.name_of(&left).unwrap_or(Adopted {
                    node: self.node,
                    generation: store.generation(),
                    first_page: left.start,
                    page_count: left.end - left.start,
                    local_page: left.start,
                });
                left.start += name.page_count;
                names.push(name);
            }
        }
        Some(names)
    }

    /// The ranges of other nodes that are served here.
    #[must_use]
    pub fn adopted(&self) -> &[Adopted] {
        self.ranges.adopted()
    }

    /// Goes on with what an earlier process left of migrations.
    pub(super) fn resume_migrations<S: PageStore + ?Sized>(&mut self, store: &mut S) {
        let lines = store.lines_mut();
        let floor = lines.lease_floor();
        if floor > 0 {
            // The earlier process may have granted further ones.
            self.leases.begin_above(floor);
            lines.raise_lease_floor(self.leases.last_epoch());
        }
        self.givings.resume(lines.last_migration(), self.leases.process());
        let (mut given, mut given_on) = (Vec::new(), Vec::new());
        let ranges = &mut self.ranges;
        lines.placed(&mut |page, placed| match placed {
            Placed::Given => given.push(page),
            Placed::GivenOn(home) => {
                given.push(page);
                given_on.push((page, home));
            }
            Placed::Adopted(home) => ranges.adopt_line(adopted(page, home)),
            Placed::Staged(home, _) => {
                ranges.doubt(home);
                if self.node == home.node {
                    ranges.add_moved_somewhere(line(page));
                }
            }
        });
        let mut allowances = Vec::new();
        lines.allowances(&mut |allowance, is_open| allowances.push((allowance.clone(), is_open)));
        for (allowance, is_open) in &allowances {
            let fences = self.incarnations.fences(allowance.space);
            self.givings.restore(allowance, *is_open, &given, fences);
            let Some(giving) = self.givings.find(allowance.migration) else { continue };
            if *is_open {
                lines.withhold(allowance.pages.clone(), true);
            } else {
                giving.rows(true).for_each(|pages| lines.withhold(pages, true));
            }
            for row in giving.rows(true) {
                given.retain(|page| !row.contains(page));
                // The taker asks for its lines by the names that they have at home.
                for (page, home) in given_on.iter().filter(|(page, _)| row.contains(page)) {
                    self.ranges.adopt_line(adopted(*page, *home));
                }
            }
        }
        for page in given {
            if given_on.iter().any(|(place, _)| *place == page) {
                // The earlier process was about to clear it.
                lines.clear_given(line(page));
            } else {
                self.ranges.add_moved_somewhere(line(page));
            }
        }
    }
}

const fn adopted(local_page: u64, home: HomeLine) -> Adopted {
    let HomeLine { node, generation, first_page } = home;
    Adopted { node, generation, first_page, page_count: LINE, local_page }
}
