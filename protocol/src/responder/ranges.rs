//! Ranges that moved away, and adopted ranges of other nodes (`docs/protocol.md`, section 8).

use core::ops::Range;

use bluebridge_wire::{ArenaGeneration, Location, NodeId, address::LINE_PAGES};

const LINE: u64 = LINE_PAGES as u64;

/// A range of another node's pages that this server serves, and its place in the store.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Adopted {
    /// The home node, which stays in the pointers.
    pub node: NodeId,
    /// The generation in the pointers.
    pub generation: ArenaGeneration,
    /// The first page by the home node's numbers; the start of a line.
    pub first_page: u64,
    /// Pages, whole lines.
    pub page_count: u64,
    /// Where the first page is in this server's store; the start of a line.
    pub local_page: u64,
    /// The generation that its pages have in this server's store.
    pub local_generation: ArenaGeneration,
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

/// Both tables, each sorted and without overlaps.
pub(super) struct Ranges {
    moved: Vec<(Range<u64>, NodeId)>,
    adopted: Vec<Adopted>,
    limit: usize,
}

impl Ranges {
    pub(super) fn new(limit: u16) -> Self {
        let limit = usize::from(limit);
        Self { moved: Vec::with_capacity(limit), adopted: Vec::with_capacity(limit), limit }
    }

    pub(super) fn add_moved(&mut self, pages: Range<u64>, to: NodeId) -> Result<(), RangeError> {
        check(&pages)?;
        if self.moved.len() == self.limit {
            return Err(RangeError::Full);
        }
        let index = self.moved.partition_point(|(range, _)| range.end <= pages.start);
        if self.moved.get(index).is_some_and(|(range, _)| range.start < pages.end) {
            return Err(RangeError::Overlap);
        }
        self.moved.insert(index, (pages, to));
        Ok(())
    }

    pub(super) fn remove_moved(&mut self, pages: &Range<u64>) -> bool {
        let index = self.moved.iter().position(|(range, _)| range == pages);
        index.map(|index| self.moved.remove(index)).is_some()
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
        let index = self.adopted.iter().position(|other| other == adopted);
        index.map(|index| self.adopted.remove(index)).is_some()
    }

    /// Whether any range of `node` is served here.
    pub(super) fn adopts_from(&self, node: NodeId) -> bool {
        self.adopted.iter().any(|range| range.node == node)
    }

    /// Whether any own range moved away.
    pub(super) const fn has_moved(&self) -> bool {
        !self.moved.is_empty()
    }

    /// The node that serves an own page now, if that is another.
    pub(super) fn moved_to(&self, page: u64) -> Option<NodeId> {
        let index = self.moved.partition_point(|(range, _)| range.end <= page);
        let (range, node) = self.moved.get(index)?;
        range.contains(&page).then_some(*node)
    }

    /// Whether a page of this server's store holds a page of another node.
    pub(super) fn is_adopted(&self, page: u64) -> bool {
        let offset = |range: &Adopted| page.checked_sub(range.local_page);
        self.adopted.iter().any(|range| offset(range).is_some_and(|it| it < range.page_count))
    }

    /// Where a page of another node is in this server's store.
    pub(super) fn local(&self, node: NodeId, location: Location) -> Option<Location> {
        let wanted = (node, location.generation(), location.page());
        let index = self.adopted.partition_point(|other| key(other) <= wanted).checked_sub(1)?;
        let range = &self.adopted[index];
        if (range.node, range.generation) != (node, location.generation()) {
            return None;
        }
        let within = location.page() - range.first_page;
        if within >= range.page_count {
            return None;
        }
        let in_page = u64::try_from(location.in_page()).ok()?;
        let page = range.local_page.checked_add(within)?;
        let offset = page.checked_mul(1 << bluebridge_wire::address::PAGE_SHIFT)?;
        Location::new(range.local_generation, offset + in_page)
    }
}

const fn key(range: &Adopted) -> (NodeId, ArenaGeneration, u64) {
    (range.node, range.generation, range.first_page)
}

fn check(pages: &Range<u64>) -> Result<(), RangeError> {
    let whole = pages.start.is_multiple_of(LINE) && pages.end.is_multiple_of(LINE);
    if whole && !pages.is_empty() { Ok(()) } else { Err(RangeError::Unaligned) }
}
