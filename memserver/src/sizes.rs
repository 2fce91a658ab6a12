//! How many pages, lines and frames a shard has.
//!
//! A *frame* is the memory of a line. A shard has more lines than frames, because lines move between servers and their
//! memory does not: own lines that another server serves now need none, and lines of others need one.

use bluebridge_protocol::store::ADOPTED_PAGES_FROM;
use bluebridge_wire::address::{LINE_PAGES, PAGE_BYTES};

/// The most pages of a shard's memory, and the most own pages of a shard: half of its addresses, without the last line.
/// The other half is the places of other servers' lines.
const PAGES_MAX: u64 = ADOPTED_PAGES_FROM - LINE_PAGES as u64;

/// The most bytes of a shard's memory; a line of it is not used.
pub(crate) const SHARD_BYTES_MAX: u64 = ADOPTED_PAGES_FROM * PAGE_BYTES as u64;

/// What a shard has; everything follows from the size of its memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Sizes {
    /// Pages of memory.
    pub(crate) memory_pages: usize,
    /// Lines that the shard's own addresses have: those of the memory, and as many again to allocate when others
    /// serve the first ones.
    pub(crate) own_lines: usize,
    /// Lines of other servers that the shard may have. Their states come after those of the own lines.
    pub(crate) adopted_lines: usize,
}

impl Sizes {
    /// The sizes for so many bytes of memory. A part of a page at the end is not used.
    pub(crate) fn of(memory_bytes: usize) -> Self {
        let pages_max = usize::try_from(PAGES_MAX).unwrap_or(usize::MAX);
        let memory_pages = (memory_bytes / PAGE_BYTES).min(pages_max);
        // A line at the end that is not whole has own addresses only, and always the same memory.
        let (lines, whole) = (memory_pages.div_ceil(LINE_PAGES), memory_pages / LINE_PAGES);
        let own_lines = (lines + whole).min(pages_max / LINE_PAGES);
        Self { memory_pages, own_lines, adopted_lines: whole }
    }

    /// Frames: whole lines of memory.
    pub(crate) const fn frames(&self) -> usize {
        self.memory_pages / LINE_PAGES
    }

    pub(crate) const fn own_pages(&self) -> usize {
        self.own_lines * LINE_PAGES
    }

    /// All lines, own ones and places for those of others.
    pub(crate) const fn lines(&self) -> usize {
        self.own_lines + self.adopted_lines
    }

    /// All pages.
    pub(crate) const fn pages(&self) -> usize {
        self.lines() * LINE_PAGES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_addresses_are_twice_the_memory() {
        let sizes = Sizes::of(64 * PAGE_BYTES + 1);
        assert_eq!((sizes.memory_pages, sizes.frames()), (64, 8));
        assert_eq!((sizes.own_lines, sizes.adopted_lines), (16, 8));
        assert_eq!((sizes.own_pages(), sizes.pages()), (128, 192));
    }

    #[test]
    fn a_part_of_a_line_is_no_frame() {
        let sizes = Sizes::of(13 * PAGE_BYTES);
        assert_eq!((sizes.memory_pages, sizes.frames(), sizes.own_lines), (13, 1, 3));
        let least = Sizes::of(PAGE_BYTES);
        assert_eq!((least.frames(), least.own_lines, least.adopted_lines), (0, 1, 0));
    }

    #[test]
    fn own_addresses_end_where_the_places_of_others_begin() {
        let most = usize::try_from(PAGES_MAX).unwrap();
        let sizes = Sizes::of(most.saturating_mul(PAGE_BYTES));
        assert_eq!((sizes.memory_pages, sizes.own_pages()), (most, most));
    }
}
