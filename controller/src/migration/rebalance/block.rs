//! Blocks of pages that are counted together, and how they are split.

use std::cmp::Reverse;
use std::ops::Range;

use bluebridge_wire::NodeId;
use bluebridge_wire::address::{LINE_PAGES, OFFSET_BITS, PAGE_SHIFT, SHARD_SHIFT};

use crate::migration::{ContentsRecord, GenerationRange};

/// Bits of a page's number.
const PAGE_BITS: u32 = OFFSET_BITS - PAGE_SHIFT;

/// Pages of a shard.
const SHARD: u64 = 1 << (SHARD_SHIFT - PAGE_SHIFT);

/// Pages of a line.
pub(super) const LINE: u64 = LINE_PAGES as u64;

/// The most parts into which a block is split.
pub(super) const PARTS_MAX: usize = 16;

/// What a prefix of pointers covers: an aligned block of places. A *place* is a page with the generation in the pointers
/// to it, in the order of the pointers.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Block {
    /// The node in the pointers.
    pub home: NodeId,
    /// The first place; a multiple of their number.
    pub first: u64,
    /// Base-2 logarithm of the number of places.
    pub order: u32,
}

/// Places in a row.
pub type Places = Range<u64>;

/// The places of pages, one row for each generation.
pub fn places(
    generations: GenerationRange,
    pages: &Range<u64>,
) -> impl Iterator<Item = Places> + use<> {
    let pages = pages.start.min(1 << PAGE_BITS)..pages.end.min(1 << PAGE_BITS);
    let of = move |generation: u16| {
        let base = u64::from(generation) << PAGE_BITS;
        base + pages.start..base + pages.end
    };
    (generations.first..=generations.last).map(of).filter(|places| !places.is_empty())
}

impl Block {
    /// The smallest block with these places.
    fn around(home: NodeId, places: &Places) -> Self {
        let last = places.end.saturating_sub(1).max(places.start);
        let order = u64::BITS - (places.start ^ last).leading_zeros();
        let order = order.max(LINE.trailing_zeros());
        Self { home, first: places.start >> order << order, order }
    }

    /// The places.
    #[must_use]
    pub const fn places(&self) -> Places {
        self.first..self.first + (1 << self.order)
    }

    /// Whether it has all places of another one.
    #[must_use]
    pub const fn contains(&self, other: &Self) -> bool {
        self.home.0 == other.home.0
            && self.order >= other.order
            && other.first >> self.order == self.first >> self.order
    }

    /// The pages, if they are of one generation and one shard: such a block can move.
    #[must_use]
    pub fn pages(&self) -> Option<Range<u64>> {
        let count = 1 << self.order;
        let first = self.first & ((1 << PAGE_BITS) - 1);
        (count <= SHARD).then_some(first..first + count)
    }

    /// The generation in the pointers to its pages, of the first if there are several.
    #[must_use]
    pub fn generation(&self) -> u16 {
        u16::try_from(self.first >> PAGE_BITS).unwrap_or(u16::MAX)
    }

    /// The part of rows that is in it.
    fn part<'a>(&self, rows: &'a [Places]) -> impl Iterator<Item = Places> + use<'a> {
        let own = self.places();
        let both = move |row: &Places| row.start.max(own.start)..row.end.min(own.end);
        rows.iter().map(both).filter(|row| row.start < row.end)
    }

    /// How many of its places are in rows.
    #[must_use]
    pub fn place_count(&self, rows: &[Places]) -> u64 {
        self.part(rows).map(|row| row.end - row.start).sum()
    }

    /// Whether prefixes of pointers cover all of its places that are in rows.
    pub(super) fn is_covered<'a>(
        &self,
        rows: &[Places],
        blocks: impl Iterator<Item = &'a Self>,
    ) -> bool {
        let mut blocks: Vec<Places> = blocks.map(Self::places).collect();
        let mut parts: Vec<Places> = self.part(rows).collect();
        // One of two blocks may contain the other; then the larger one is first.
        blocks.sort_by_key(|block| (block.start, Reverse(block.end)));
        parts.sort_by_key(|part| part.start);
        let mut blocks = blocks.into_iter().peekable();
        parts.into_iter().all(|Places { mut start, end }| {
            while start < end {
                while blocks.next_if(|block| block.end <= start).is_some() {}
                match blocks.peek() {
                    Some(block) if block.start <= start => start = block.end,
                    _ => return false,
                }
            }
            true
        })
    }

    /// The smallest block that has all places of it that are in rows; `None` if there are none.
    #[must_use]
    pub fn narrowed(&self, rows: &[Places]) -> Option<Self> {
        let all =
            self.part(rows).reduce(|one, other| one.start.min(other.start)..one.end.max(other.end));
        all.map(|all| Self::around(self.home, &all))
    }

    /// The smallest block that has all places of some rows.
    #[must_use]
    pub fn root(home: NodeId, rows: &[Places]) -> Option<Self> {
        Self { home, first: 0, order: OFFSET_BITS - PAGE_SHIFT + 15 }.narrowed(rows)
    }

    /// Up to 16 blocks, as equal as possible, that have all of its places that are in rows; one if it cannot be split.
    #[must_use]
    pub fn split(&self, rows: &[Places]) -> Vec<Self> {
        let mut parts: Vec<Self> = self.narrowed(rows).into_iter().collect();
        while parts.len() < PARTS_MAX {
            let largest = parts.iter().enumerate().max_by_key(|(_, part)| part.order);
            let Some((index, part)) = largest.filter(|(_, part)| 1 << part.order > LINE) else {
                break;
            };
            let order = part.order - 1;
            let halves = [part.first, part.first + (1 << order)]
                .map(|first| Self { home: part.home, first, order }.narrowed(rows));
            parts.splice(index..=index, halves.into_iter().flatten());
        }
        parts
    }
}

/// Pages of a home.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Pages {
    /// The home.
    pub home: ContentsRecord,
    /// The pages, as the home numbers them.
    pub pages: Range<u64>,
}

impl Pages {
    /// The number of pages.
    #[must_use]
    pub const fn count(&self) -> u64 {
        self.pages.end.saturating_sub(self.pages.start)
    }

    /// How many pages both have.
    #[must_use]
    pub fn common(&self, other: &Self) -> u64 {
        let (start, end) =
            (self.pages.start.max(other.pages.start), self.pages.end.min(other.pages.end));
        if self.home == other.home { end.saturating_sub(start) } else { 0 }
    }

    /// Whether both have a page.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        self.home == other.home
            && self.pages.start < other.pages.end
            && other.pages.start < self.pages.end
    }
}
