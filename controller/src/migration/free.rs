//! Lines of homes at other servers of which no page is allocated (`docs/migration.md`, "Free lines").
//!
//! Only a home allocates pages, and only of lines that it has, so such a line stays free while it is elsewhere. It goes
//! home, where its addresses are of use. If the home has lost these contents, nobody can allocate the pages any more:
//! first it is recorded that nobody has the line, and the home learns that; then the server forgets it. If the server lost
//! the line, the home reports it: it is recorded that the line is lost no more, and then the home goes on with it.

use std::collections::BTreeMap;
use std::ops::Range;

use bluebridge_northbound::migration::Order;
use bluebridge_wire::NodeId;

use super::report::{ReportError, check_free_rows};
use super::{ContentsRecord, Migrations, PageMap};

/// The most homes of which a server's free lines are remembered at once.
const HOMES_MAX: usize = 256;

/// The most rows in one order to forget lines: a server follows it without a pause.
const DISCARDS_MAX: usize = 256;

/// Free lines of a home at one server, by its last report.
#[derive(Clone, Debug)]
pub(super) struct FreeLines {
    rows: PageMap<()>,
    /// Counts the reports.
    round: u64,
}

/// The free lines at one server, by their homes.
pub(super) type OfServer = BTreeMap<ContentsRecord, FreeLines>;

impl Migrations {
    /// Notes which lines of a home are free at a server. Those of lost contents are at nobody from now on.
    pub(super) fn note_free(
        &mut self,
        from: NodeId,
        home: ContentsRecord,
        rows: &[Range<u64>],
    ) -> Result<(), ReportError> {
        check_free_rows(rows)?;
        let mut free: PageMap<()> = rows.iter().map(|row| (row.clone(), ())).collect();
        // What moves is not looked at: it may be elsewhere before long.
        for record in self.open().map(|of| &of.record).filter(|it| it.home == home) {
            free.remove(&record.pages);
        }
        if !self.is_present(home) {
            self.strike(from, home, &free);
        } else if home.id() == from {
            self.find(home, &free);
        }
        let round = self.version;
        let at = self.free.entry(from).or_default();
        if free.is_empty() || at.len() >= HOMES_MAX && !at.contains_key(&home) {
            // Others are reported again.
            at.remove(&home);
        } else {
            at.insert(home, FreeLines { rows: free, round });
        }
        Ok(())
    }

    /// Records that nobody has these lines, of contents that their home has lost.
    fn strike(&mut self, from: NodeId, home: ContentsRecord, free: &PageMap<()>) {
        let Some(of) = self.elsewhere.get(&home).filter(|of| !of.record.is_pending) else { return };
        let rows = free.iter().flat_map(|(pages, ())| of.record.rows.within(pages));
        let its = rows.filter(|(_, placed)| placed.at.id() == from && self.is_present(placed.at));
        let struck: Vec<_> = its.map(|(part, _)| part).collect();
        if struck.is_empty() {
            return;
        }
        let space = of.record.space;
        self.edit_elsewhere(home, space, |record| {
            struck.iter().for_each(|part| record.rows.remove(part));
        });
    }

    /// Records that lines are lost no more that were lost with another server's memory, and that are free at home.
    fn find(&mut self, home: ContentsRecord, free: &PageMap<()>) {
        let Some(of) = self.elsewhere.get(&home).filter(|of| !of.record.is_pending) else { return };
        let lost = free.iter().flat_map(|(pages, ())| of.record.lost.within(pages));
        let found: Vec<_> = lost.map(|(part, ())| part).collect();
        if found.is_empty() {
            return;
        }
        let space = of.record.space;
        self.edit_elsewhere(home, space, |record| {
            found.iter().for_each(|part| record.lost.remove(part));
        });
    }

    /// The orders to forget lines that nobody is led to any more, and to a home to go on with those that nobody has.
    pub(super) fn discards(&self, to: NodeId) -> Vec<Order> {
        let Some(free) = self.free.get(&to) else { return Vec::new() };
        let can = |home: &ContentsRecord| {
            (!self.is_present(*home) || home.id() == to) && self.home_knows(*home)
        };
        let lost = free.iter().filter(|(home, _)| can(home));
        let orders = lost.filter_map(|(home, FreeLines { rows, round })| {
            let mut useless = rows.clone();
            if let Some(of) = self.elsewhere.get(home) {
                of.record.rows.iter().for_each(|(pages, _)| useless.remove(pages));
                of.record.lost.iter().for_each(|(pages, ())| useless.remove(pages));
            }
            for record in self.open().map(|of| &of.record).filter(|it| it.home == *home) {
                useless.remove(&record.pages);
            }
            let pages = useless.iter().map(|(pages, ())| pages.clone());
            let pages: Vec<_> = pages.take(DISCARDS_MAX).collect();
            let (home, round) = (home.contents(), *round);
            (!pages.is_empty()).then_some(Order::Discard { home, round, pages })
        });
        orders.collect()
    }

    /// Lines at a server that are free and can go home, by their homes: the longest rows first.
    pub(crate) fn homeless(&self, at: NodeId) -> Vec<(ContentsRecord, Range<u64>)> {
        let free = self.free.get(&at).into_iter().flatten();
        let can = |home: &ContentsRecord| {
            let is_away = home.id() != at && self.is_present(*home);
            is_away && !self.has_deputy(home.id()) && !self.is_draining(home.id())
        };
        let mut rows = Vec::new();
        for (home, of) in free.filter(|(home, _)| can(home)) {
            let Some(known) = self.elsewhere.get(home) else { continue };
            // Some of them may be at home, or on their way, since the report.
            let mut left = PageMap::default();
            for (pages, ()) in of.rows.iter() {
                let there = known.record.rows.within(pages);
                for (part, _) in there.filter(|(_, placed)| placed.at.id() == at) {
                    left.insert(part, ());
                }
            }
            for record in self.open().map(|of| &of.record).filter(|it| it.home == *home) {
                left.remove(&record.pages);
            }
            rows.extend(left.iter().map(|(pages, ())| (*home, pages.clone())));
        }
        rows.sort_by_key(|(_, pages)| std::cmp::Reverse(pages.end - pages.start));
        rows
    }
}
