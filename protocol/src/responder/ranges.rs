//! Ranges that moved away, and adopted ranges of other nodes (`docs/protocol.md`, section 8).

use core::ops::Range;

use bluebridge_wire::{ArenaGeneration, Location, NodeId, address::LINE_PAGES};

use crate::store::HomeLine;

const LINE: u64 = LINE_PAGES as u64;

/// The most pages of a block that MOVED names: 1 GiB.
const BLOCK_PAGES_MAX: u64 = 1 << 18;

/// A range of another node's pages that this server serves, and its place in the store.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Adopted {
    /// The home node, which stays in the pointers.
    pub node: NodeId,
    /// The first generation of the home's contents. Pointers have this one or a later one, until the home begins
    /// anew with a later one yet.
    pub generation: ArenaGeneration,
    /// The first page by the home node's numbers; the start of a line.
    pub first_page: u64,
    /// Pages, whole lines.
    pub page_count: u64,
    /// Where the first page is in this server's store; the start of a line.
    pub local_page: u64,
}

/// Where a page is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Moved {
    /// At this node.
    To(NodeId),
    /// Elsewhere; the process does not know where, because an earlier one gave it away.
    Somewhere,
    /// Nowhere: it was at a server that lost its memory.
    Nowhere,
}

/// Why a range cannot be recorded.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RangeError {
    /// The table of ranges is full; aggregate ranges or raise the limit.
    #[error("the table of ranges is full; aggregate ranges or raise the limit")]
    Full,
    /// The range overlaps a recorded one; remove that one first.
    #[error("the range overlaps a recorded one; remove that one first")]
    Overlap,
    /// The range is empty or does not consist of whole lines of 8 pages.
    #[error("a range consists of one or more whole lines of 8 pages")]
    Unaligned,
}

/// Pages and where they are; sorted and without overlaps.
type Places = Vec<(Range<u64>, Moved)>;

/// Both tables, each sorted and without overlaps.
pub(super) struct Ranges {
    moved: Places,
    /// Ranges of these that the store did not give away line by line.
    unmarked: Vec<Range<u64>>,
    /// What others have, or may have, of contents that this node lost, by the first generation of these contents; sorted.
    earlier: Vec<(ArenaGeneration, Places)>,
    /// The first generation of the present contents.
    began: ArenaGeneration,
    adopted: Vec<Adopted>,
    /// Lines that may be this server's: their giver was asked, and no answer was heard. A few at once.
    in_doubt: Vec<HomeLine>,
    /// Own pages that were lost with the memory of another server; as the controller said last.
    lost: Vec<Range<u64>>,
    /// Whether own pages are not here of which it is not known that another server has them.
    is_any_nowhere: bool,
    limit: usize,
}

impl Ranges {
    pub(super) fn new(limit: u16) -> Self {
        let limit = usize::from(limit);
        let (moved, adopted) = (Vec::with_capacity(limit), Vec::with_capacity(limit));
        let (earlier, began) = (Vec::new(), ArenaGeneration::default());
        let (unmarked, lost, in_doubt) = (Vec::new(), Vec::new(), Vec::new());
        let is_any_nowhere = false;
        Self { moved, unmarked, earlier, began, adopted, in_doubt, lost, is_any_nowhere, limit }
    }

    /// Pointers with a generation before this one are to contents that this node lost.
    pub(super) const fn begin(&mut self, began: ArenaGeneration) {
        self.began = began;
    }

    /// Whether a pointer to this node is to contents that it lost.
    pub(super) fn is_earlier(&self, location: Location) -> bool {
        location.generation() < self.began
    }

    /// Learns what others have of contents that this node lost, in place of what was known of these; all else of them
    /// is lost. Of rows without a node it is not known yet who has them, or whether anybody does.
    pub(super) fn learn_earlier(
        &mut self,
        generation: ArenaGeneration,
        rows: &[(Range<u64>, Option<NodeId>)],
    ) {
        self.earlier.retain(|(of, _)| *of != generation);
        let place = |(pages, to): &(Range<u64>, Option<NodeId>)| {
            (pages.clone(), to.map_or(Moved::Somewhere, Moved::To))
        };
        let mut places: Places = rows.iter().map(place).collect();
        places.sort_by_key(|(range, _)| range.start);
        join_neighbours(&mut places);
        let index = self.earlier.partition_point(|(of, _)| *of < generation);
        self.earlier.insert(index, (generation, places));
    }

    /// Whether an own page that was given away is lost.
    pub(super) fn is_lost(&self, page: u64) -> bool {
        self.lost.iter().any(|lost| lost.contains(&page))
    }

    /// Records that pages moved of which the store has no record.
    pub(super) fn order_moved(&mut self, pages: Range<u64>, to: NodeId) -> Result<(), RangeError> {
        self.add_moved(pages.clone(), to)?;
        self.unmarked.push(pages);
        Ok(())
    }

    fn add_moved(&mut self, pages: Range<u64>, to: NodeId) -> Result<(), RangeError> {
        check(&pages)?;
        let overlaps = |(range, place): &(Range<u64>, Moved)| {
            *place != Moved::Somewhere && range.start < pages.end && pages.start < range.end
        };
        if self.moved.iter().any(overlaps) {
            return Err(RangeError::Overlap);
        }
        let mut after = self.moved_without(&pages, |place| place == Moved::Somewhere);
        if after.len() >= self.limit {
            return Err(RangeError::Full);
        }
        let index = after.partition_point(|(range, _)| range.end <= pages.start);
        after.insert(index, (pages, Moved::To(to)));
        self.moved = after;
        Ok(())
    }

    /// Records that an earlier process gave a line away. Its limit is that of the earlier process, so it has no other.
    pub(super) fn add_moved_somewhere(&mut self, pages: Range<u64>) {
        self.is_any_nowhere = true;
        let index = self.moved.partition_point(|(range, _)| range.end <= pages.start);
        if let Some((before, Moved::Somewhere)) = self.moved[..index].last_mut()
            && before.end == pages.start
        {
            before.end = pages.end;
        } else {
            self.moved.insert(index, (pages, Moved::Somewhere));
        }
    }

    /// Learns where own pages are that are not here. Pages that are here stay so, and the place of pages that are in no
    /// row stays as it was.
    pub(super) fn learn(&mut self, rows: &[(Range<u64>, NodeId)], lost: &[Range<u64>]) {
        self.lost = lost.to_vec();
        let known = rows.iter().map(|(pages, to)| (pages, Moved::To(*to)));
        for (pages, place) in known.chain(lost.iter().map(|pages| (pages, Moved::Nowhere))) {
            let within = self.moved.iter().filter_map(|(range, _)| {
                let part = range.start.max(pages.start)..range.end.min(pages.end);
                (!part.is_empty()).then_some((part, place))
            });
            let within: Vec<_> = within.collect();
            let mut after = self.moved_without(pages, |_| true);
            after.extend(within);
            after.sort_by_key(|(range, _)| range.start);
            join_neighbours(&mut after);
            self.moved = after;
        }
        self.note_nowhere();
    }

    /// Where all of a range of another node is; `None` if some is not here. If its lines are not one after the other, the
    /// range of the store has other lines in between.
    pub(super) fn place_of(
        &self,
        node: NodeId,
        generation: ArenaGeneration,
        pages: &Range<u64>,
    ) -> Option<Range<u64>> {
        let (mut next, mut low, mut high) = (pages.start, u64::MAX, 0);
        for range in self.adopted.iter().filter(|it| (it.node, it.generation) == (node, generation))
        {
            let end = pages.end.min(range.first_page + range.page_count);
            if end <= next || range.first_page >= pages.end {
                continue;
            }
            let place = |page: u64| Some(range.local_page + page.checked_sub(range.first_page)?);
            (low, high) = (low.min(place(next)?), high.max(place(end)?));
            next = end;
        }
        (next == pages.end && low < high).then_some(low..high)
    }

    /// The pages at home of the row around a line of another node that is here.
    pub(super) fn row_around(&self, local_page: u64) -> Option<Range<u64>> {
        let range = self.adopted.iter().find(|range| range.local_pages().contains(&local_page))?;
        Some(range.first_page..range.first_page + range.page_count)
    }

    /// The name of pages of the store that are another node's; a part of them, if they are not all of one range.
    pub(super) fn name_of(&self, local: &Range<u64>) -> Option<Adopted> {
        let range = self.adopted.iter().find(|range| range.local_pages().contains(&local.start))?;
        let end = local.end.min(range.local_pages().end);
        Some(range.part(&(local.start..end)))
    }

    /// Own pages are here again.
    pub(super) fn return_moved(&mut self, pages: &Range<u64>) {
        self.moved = self.moved_without(pages, |_| true);
        self.note_nowhere();
    }

    fn note_nowhere(&mut self) {
        let is_any = self.nowhere().next().is_some();
        self.is_any_nowhere = is_any;
    }

    fn moved_without(
        &self,
        pages: &Range<u64>,
        is_cut: impl Fn(Moved) -> bool,
    ) -> Vec<(Range<u64>, Moved)> {
        let cut = self.moved.iter().flat_map(|(range, place)| {
            let left =
                if is_cut(*place) { without(range, pages).collect() } else { vec![range.clone()] };
            left.into_iter().map(|range| (range, *place))
        });
        cut.collect()
    }

    /// Records that a line of another node is served here from now on. Neighbours are one range. There is no limit:
    /// the line is here already.
    pub(super) fn adopt_line(&mut self, line: Adopted) {
        let index = self.adopted.partition_point(|other| key(other) < key(&line));
        let is_next = |first: &Adopted, second: &Adopted| {
            (first.node, first.generation) == (second.node, second.generation)
                && first.first_page + first.page_count == second.first_page
                && first.local_page + first.page_count == second.local_page
        };
        let after = self.adopted.get(index).copied().filter(|after| is_next(&line, after));
        let mut line = line;
        if let Some(after) = after {
            line.page_count += after.page_count;
            self.adopted.remove(index);
        }
        match index.checked_sub(1).map(|before| &mut self.adopted[before]) {
            Some(before) if is_next(before, &line) => before.page_count += line.page_count,
            _ => self.adopted.insert(index, line),
        }
    }

    /// Records that a line is in doubt.
    pub(super) fn doubt(&mut self, line: HomeLine) {
        if !self.in_doubt.contains(&line) {
            self.in_doubt.push(line);
        }
    }

    /// It is known whose the line is.
    pub(super) fn end_doubt(&mut self, line: &HomeLine) {
        self.in_doubt.retain(|other| other != line);
    }

    /// Whether the line of a pointer is in doubt, and not one of earlier contents than those that are served here.
    pub(super) fn is_in_doubt(&self, node: NodeId, location: Location) -> bool {
        let (page, generation) = (location.page(), location.generation());
        let is_its = |line: &&HomeLine| {
            let pages = line.first_page..line.first_page + LINE;
            line.node == node && line.generation <= generation && pages.contains(&page)
        };
        self.in_doubt.iter().filter(is_its).any(|line| {
            let is_later = |range: &Adopted| {
                let pages = range.first_page..range.first_page + range.page_count;
                range.node == node
                    && line.generation < range.generation
                    && range.generation <= generation
                    && pages.contains(&page)
            };
            !self.adopted.iter().any(is_later)
        })
    }

    /// The ranges of other nodes that are served here.
    pub(super) fn adopted(&self) -> &[Adopted] {
        &self.adopted
    }

    pub(super) fn remove_moved(&mut self, pages: &Range<u64>) -> bool {
        self.unmarked.retain(|range| range != pages);
        let index = self.moved.iter().position(|(range, _)| range == pages);
        index.map(|index| self.moved.remove(index)).is_some()
    }

    /// Records that another node serves pages of the store from now on, in rows of whole lines: own pages are recorded
    /// as moved, and adopted ones are no longer served.
    ///
    /// # Errors
    /// [`RangeError`]; nothing changed.
    pub(super) fn give_away(&mut self, rows: &[Range<u64>], to: NodeId) -> Result<(), RangeError> {
        let (moved, lost) = (self.moved.clone(), self.lost.clone());
        let (earlier, began) = (self.earlier.clone(), self.began);
        let adopted = Vec::new();
        let (unmarked, in_doubt) = (self.unmarked.clone(), self.in_doubt.clone());
        let (is_any_nowhere, limit) = (self.is_any_nowhere, self.limit);
        let mut after = Self {
            moved,
            unmarked,
            earlier,
            began,
            adopted,
            in_doubt,
            lost,
            is_any_nowhere,
            limit,
        };
        for range in &self.adopted {
            let left = without_all(range.local_pages(), rows.iter().cloned());
            after.adopted.extend(left.iter().map(|pages| range.part(pages)));
        }
        after.adopted.sort_by_key(key);
        for row in rows {
            for own in without_all(row.clone(), self.adopted.iter().map(Adopted::local_pages)) {
                after.add_moved(own, to)?;
            }
        }
        if after.adopted.len() > self.limit {
            return Err(RangeError::Full);
        }
        // The home may have learned it before.
        after.learn(&[], &self.lost);
        *self = after;
        Ok(())
    }

    /// Own pages that are not here, and of which it is not known that another server has them.
    pub(super) fn nowhere(&self) -> impl Iterator<Item = &Range<u64>> {
        let is_nowhere = |place: &Moved| matches!(place, Moved::Nowhere | Moved::Somewhere);
        self.moved.iter().filter(move |(_, place)| is_nowhere(place)).map(|(pages, _)| pages)
    }

    /// Whether there are any of them.
    pub(super) const fn has_nowhere(&self) -> bool {
        self.is_any_nowhere
    }

    /// Lines of other nodes are not here any more, in rows of the store.
    pub(super) fn remove_lines(&mut self, rows: &[Range<u64>]) {
        let left = self.adopted.iter().flat_map(|range| {
            let left = without_all(range.local_pages(), rows.iter().cloned());
            left.into_iter().map(|pages| range.part(&pages))
        });
        let mut left: Vec<_> = left.collect();
        left.sort_by_key(key);
        self.adopted = left;
    }

    /// Whether an own page of a range moved away.
    pub(super) fn has_moved_in(&self, pages: &Range<u64>) -> bool {
        let index = self.moved.partition_point(|(moved, _)| moved.end <= pages.start);
        self.moved.get(index).is_some_and(|(moved, _)| moved.start < pages.end)
    }

    pub(super) fn add_adopted(&mut self, adopted: Adopted) -> Result<(), RangeError> {
        let end = adopted.first_page.saturating_add(adopted.page_count);
        check(&(adopted.first_page..end))?;
        if !adopted.local_page.is_multiple_of(LINE) {
            return Err(RangeError::Unaligned);
        }
        if self.adopted.len() == self.limit {
            return Err(RangeError::Full);
        }
        let overlaps = self.adopted.iter().any(|other| {
            other.node == adopted.node
                && other.generation == adopted.generation
                && other.first_page < end
                && adopted.first_page < other.first_page + other.page_count
        });
        if overlaps {
            return Err(RangeError::Overlap);
        }
        let index = self.adopted.partition_point(|other| key(other) < key(&adopted));
        self.adopted.insert(index, adopted);
        Ok(())
    }

    pub(super) fn remove_adopted(&mut self, adopted: &Adopted) -> bool {
        let local = adopted.local_pages();
        let is_its = |other: &Adopted| {
            let all = other.local_pages();
            all.start <= local.start && local.end <= all.end && other.part(&local) == *adopted
        };
        let Some(index) = self.adopted.iter().position(is_its) else { return false };
        let whole = self.adopted.remove(index);
        let rest = without(&whole.local_pages(), &local).map(|pages| whole.part(&pages));
        self.adopted.splice(index..index, rest.collect::<Vec<_>>());
        true
    }

    /// Whether any range of `node` is served here.
    pub(super) fn adopts_from(&self, node: NodeId) -> bool {
        self.adopted.iter().any(|range| range.node == node)
            || self.in_doubt.iter().any(|line| line.node == node)
    }

    /// Whether any own range moved away of which the store has no record.
    pub(super) const fn has_unmarked(&self) -> bool {
        !self.unmarked.is_empty()
    }

    /// Whether any own range moved away.
    pub(super) const fn has_moved(&self) -> bool {
        !self.moved.is_empty()
    }

    /// Where the page of a pointer to this node is now, if it is not here, and how many pages of the aligned block around
    /// it are there, too.
    pub(super) fn moved_to(&self, location: Location) -> Option<(Moved, u32)> {
        let places = if self.is_earlier(location) {
            let of = self.earlier.partition_point(|(first, _)| *first <= location.generation());
            &self.earlier[of.checked_sub(1)?].1
        } else {
            &self.moved
        };
        let page = location.page();
        let index = places.partition_point(|(range, _)| range.end <= page);
        let (range, place) = places.get(index).filter(|(range, _)| range.contains(&page))?;
        let is_there = |block: Range<u64>| range.start <= block.start && block.end <= range.end;
        Some((*place, block_pages(page, is_there)))
    }

    /// Whether a page of this server's store holds a page of another node.
    pub(super) fn is_adopted(&self, page: u64) -> bool {
        let offset = |range: &Adopted| page.checked_sub(range.local_page);
        self.adopted.iter().any(|range| offset(range).is_some_and(|it| it < range.page_count))
    }

    /// Where a page of another node is in this server's store.
    pub(super) fn local(&self, node: NodeId, location: Location) -> Option<Location> {
        let mut generation = location.generation();
        loop {
            let wanted = (node, generation, location.page());
            let index =
                self.adopted.partition_point(|other| key(other) <= wanted).checked_sub(1)?;
            let range = &self.adopted[index];
            if range.node != node {
                return None;
            }
            if range.generation < generation {
                // The contents to which the pointer belongs began with an earlier generation.
                generation = range.generation;
                continue;
            }
            let within = location.page() - range.first_page;
            if within >= range.page_count {
                // Contents before those may have been at the same place.
                generation = self.generation_before(node, generation)?;
                continue;
            }
            let in_page = u64::try_from(location.in_page()).ok()?;
            let page = range.local_page.checked_add(within)?;
            let offset = page.checked_mul(1 << bluebridge_wire::address::PAGE_SHIFT)?;
            // Pages of other nodes keep their colours, and with them their generations.
            return Location::new(location.generation(), offset + in_page);
        }
    }

    /// Where a page of contents of another node is in this server's store, and of no other contents.
    pub(super) fn local_of(
        &self,
        node: NodeId,
        contents: ArenaGeneration,
        page: u64,
    ) -> Option<u64> {
        let last = (node, contents, page);
        let index = self.adopted.partition_point(|other| key(other) <= last).checked_sub(1)?;
        let range = &self.adopted[index];
        let within = page.checked_sub(range.first_page)?;
        let is_of = (range.node, range.generation) == (node, contents) && within < range.page_count;
        is_of.then_some(range.local_page + within)
    }

    /// The last generation before one of which pages of a node are here.
    fn generation_before(
        &self,
        node: NodeId,
        generation: ArenaGeneration,
    ) -> Option<ArenaGeneration> {
        let first = (node, generation, 0);
        let index = self.adopted.partition_point(|other| key(other) < first).checked_sub(1)?;
        let range = &self.adopted[index];
        (range.node == node).then_some(range.generation)
    }
}

/// The pages of the largest block around a page that is at another node as a whole. Blocks are powers of two, and
/// aligned, as prefixes in the switch are.
pub(super) fn block_pages(page: u64, is_there: impl Fn(Range<u64>) -> bool) -> u32 {
    let mut pages = LINE;
    loop {
        let wider = 2 * pages;
        let start = page - page % wider;
        if wider > BLOCK_PAGES_MAX || !is_there(start..start + wider) {
            return u32::try_from(pages).unwrap_or(u32::MAX);
        }
        pages = wider;
    }
}

impl Adopted {
    const fn local_pages(&self) -> Range<u64> {
        self.local_page..self.local_page + self.page_count
    }

    /// The part of it at `pages` of the store, which are pages of it.
    const fn part(&self, pages: &Range<u64>) -> Self {
        let first_page = self.first_page + (pages.start - self.local_page);
        let page_count = pages.end - pages.start;
        Self { first_page, page_count, local_page: pages.start, ..*self }
    }
}

/// Neighbours at the same place become one range.
fn join_neighbours(places: &mut Places) {
    places.dedup_by(|next, before| {
        let is_one = before.0.end == next.0.start && before.1 == next.1;
        if is_one {
            before.0.end = next.0.end;
        }
        is_one
    });
}

/// What is left of `pages` without those of `other`.
fn without(pages: &Range<u64>, other: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
    let before = pages.start..pages.end.min(other.start);
    let after = pages.start.max(other.end)..pages.end;
    let is_apart = other.end <= pages.start || pages.end <= other.start;
    let parts = if is_apart { [pages.clone(), 0..0] } else { [before, after] };
    parts.into_iter().filter(|part| part.start < part.end)
}

/// What is left of `pages` without those of all others.
fn without_all(pages: Range<u64>, others: impl IntoIterator<Item = Range<u64>>) -> Vec<Range<u64>> {
    others.into_iter().fold(Vec::from([pages]), |left, other| {
        left.iter().flat_map(|pages| without(pages, &other)).collect()
    })
}

const fn key(range: &Adopted) -> (NodeId, ArenaGeneration, u64) {
    (range.node, range.generation, range.first_page)
}

fn check(pages: &Range<u64>) -> Result<(), RangeError> {
    let whole = pages.start.is_multiple_of(LINE) && pages.end.is_multiple_of(LINE);
    if whole && !pages.is_empty() { Ok(()) } else { Err(RangeError::Unaligned) }
}
