//! Where moved blocks are served now, as MOVED replies said, and whether the pointer leads there: a bounded cache that
//! may lose any entry.

#![allow(clippy::cast_possible_truncation, reason = "sizes are below 16, and places are masked")]

use bluebridge_wire::{
    NodeId, Pointer,
    address::{LINE_BYTES, LINE_PAGES},
};

use crate::Timestamp;

/// Sizes of a block: 1, 2, 4 ... 32,768 lines.
const SIZES: usize = 16;

/// One moved block.
#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    /// Home node and first line, 0 in an empty entry.
    key: u64,
    /// Until then requests do not go to the pointer: no entry of a switch led from there to the node.
    avoids_pointer_until: Timestamp,
    node: u16,
    size: Size,
}

/// The base-2 logarithm of a block's lines.
type Size = u8;

/// A direct-mapped cache: a newer block replaces an older one in the same place.
#[derive(Debug)]
pub(super) struct MovedTable {
    entries: Box<[Entry]>,
    /// The number of entries of each size.
    counts: [u16; SIZES],
    /// One bit per size that has entries.
    sizes: u16,
}

impl MovedTable {
    pub(super) fn new(size: u16) -> Self {
        let size = usize::from(size.clamp(1, 1 << 15)).next_power_of_two();
        let entries = vec![Entry::default(); size].into_boxed_slice();
        Self { entries, counts: [0; SIZES], sizes: 0 }
    }

    /// The node that serves the pointer's line, if it is known to have moved. Of several blocks around
    /// it the smallest counts: it left the larger one later.
    pub(super) fn find(&self, pointer: Pointer) -> Option<NodeId> {
        let entry = self.entries.get(self.smallest(pointer)?)?;
        Some(NodeId(entry.node))
    }

    /// Whether requests for the pointer's line go to the endpoint address of the node that serves it.
    pub(super) fn avoids_pointer(&self, now: Timestamp, pointer: Pointer) -> bool {
        let entry = self.smallest(pointer).and_then(|place| self.entries.get(place));
        // What is not known any more was replaced by what is used more.
        entry.is_none_or(|entry| now < entry.avoids_pointer_until)
    }

    /// Notes that the pointer did not lead to the node that serves the line.
    pub(super) fn avoid_pointer(&mut self, pointer: Pointer, node: NodeId, until: Timestamp) {
        let entry = self.smallest(pointer).and_then(|place| self.entries.get_mut(place));
        if let Some(entry) = entry.filter(|entry| entry.node == node.0) {
            entry.avoids_pointer_until = entry.avoids_pointer_until.max(until);
        }
    }

    /// The place of the smallest block around a pointer.
    fn smallest(&self, pointer: Pointer) -> Option<usize> {
        let mut sizes = self.sizes;
        while sizes != 0 {
            let size = lowest_bit(sizes);
            sizes &= sizes - 1;
            let found = self.place_of(pointer, size);
            if found.is_some() {
                return found;
            }
        }
        None
    }

    /// Remembers that `node` serves the line, and the aligned block of so many pages around it. If that
    /// is no block's size, only the line counts. Requests go to the pointer again after a time.
    pub(super) fn remember(
        &mut self,
        pointer: Pointer,
        block_pages: u32,
        node: NodeId,
        avoids_pointer_until: Timestamp,
    ) {
        let lines = block_pages / LINE_PAGES as u32;
        let is_size = lines.is_power_of_two() && lines.ilog2() < SIZES as u32;
        let size = if is_size { lines.trailing_zeros() as Size } else { 0 };
        // What was known of smaller blocks around the line is older.
        for smaller in 0..size {
            self.remove(pointer, smaller);
        }
        let new = Entry { key: key(pointer, size), avoids_pointer_until, node: node.0, size };
        let place = self.place(new.key, size);
        if let Some(entry) = self.entries.get_mut(place) {
            let replaced = core::mem::replace(entry, new);
            self.count(replaced, -1);
            self.count(new, 1);
        }
    }

    /// Forgets all blocks around a pointer.
    pub(super) fn forget(&mut self, pointer: Pointer) {
        for size in 0..SIZES as Size {
            self.remove(pointer, size);
        }
    }

    fn remove(&mut self, pointer: Pointer, size: Size) {
        let place = self.place_of(pointer, size);
        if let Some(entry) = place.and_then(|place| self.entries.get_mut(place)) {
            let removed = core::mem::take(entry);
            self.count(removed, -1);
        }
    }

    /// Where the block of this size around a pointer is.
    fn place_of(&self, pointer: Pointer, size: Size) -> Option<usize> {
        let key = key(pointer, size);
        let place = self.place(key, size);
        let entry = self.entries.get(place)?;
        ((entry.key, entry.size) == (key, size)).then_some(place)
    }

    fn count(&mut self, entry: Entry, change: i16) {
        if entry.key == 0 {
            return;
        }
        if let Some(count) = self.counts.get_mut(usize::from(entry.size)) {
            *count = count.saturating_add_signed(change);
            let bit = 1 << entry.size;
            self.sizes = if *count == 0 { self.sizes & !bit } else { self.sizes | bit };
        }
    }

    const fn place(&self, key: u64, size: Size) -> usize {
        let mixed = key.wrapping_add(size as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> 32) as usize & (self.entries.len() - 1)
    }
}

const fn lowest_bit(sizes: u16) -> Size {
    sizes.trailing_zeros() as Size
}

/// Home node and first line of the block of this size around a pointer, never 0: the location's 63 bits
/// lose the 15 below a line.
fn key(pointer: Pointer, size: Size) -> u64 {
    let line = pointer.location.bits() / LINE_BYTES as u64;
    (line >> size << size << 16) | u64::from(pointer.node.0)
}

#[cfg(test)]
mod tests {
    use bluebridge_wire::{ArenaGeneration, Location, Space, Tag};

    use super::*;

    const LINE: u32 = LINE_PAGES as u32;
    const NOW: Timestamp = Timestamp::from_nanos(5);

    fn pointer(node: u16, offset: u64) -> Pointer {
        let generation = ArenaGeneration::new(3).expect("small");
        let location = Location::new(generation, offset).expect("48 bits");
        Pointer { space: Space(1), node: NodeId(node), tag: Tag(9), location }
    }

    fn line(number: u64) -> Pointer {
        pointer(1, number * LINE_BYTES as u64)
    }

    #[test]
    fn a_line_is_found_until_it_is_removed_or_overwritten() {
        let mut table = MovedTable::new(1);
        assert_eq!(table.find(pointer(1, 0)), None);
        table.remember(pointer(1, 0x8000), 0, NodeId(7), NOW);
        assert_eq!(table.find(pointer(1, 0xffff)), Some(NodeId(7)));
        assert_eq!(table.find(pointer(1, 0x7fff)), None);
        assert_eq!(table.find(pointer(2, 0x8000)), None);
        table.remember(pointer(2, 0x8000), LINE, NodeId(8), NOW);
        assert_eq!(table.find(pointer(1, 0x8000)), None);
        table.forget(pointer(1, 0x8000));
        assert_eq!(table.find(pointer(2, 0x8000)), Some(NodeId(8)));
        table.forget(pointer(2, 0x9000));
        assert_eq!((table.find(pointer(2, 0x8000)), table.sizes), (None, 0));
    }

    #[test]
    fn one_entry_is_enough_for_a_block() {
        let mut table = MovedTable::new(256);
        table.remember(line(1025), 1 << 18, NodeId(7), NOW);
        for number in [0, 1024, (1 << 15) - 1] {
            assert_eq!(table.find(line(number)), Some(NodeId(7)));
        }
        assert_eq!(table.find(line(1 << 15)), None);
        assert_eq!(table.find(pointer(2, 0)), None);
        table.forget(line(77));
        assert_eq!((table.find(line(1025)), table.sizes), (None, 0));
    }

    #[test]
    fn the_smallest_block_counts_until_a_larger_one_is_newer() {
        let mut table = MovedTable::new(256);
        table.remember(line(5), 16 * LINE, NodeId(7), NOW);
        table.remember(line(5), LINE, NodeId(8), NOW);
        table.remember(line(6), 2 * LINE, NodeId(9), NOW);
        let nodes =
            |table: &MovedTable| [4, 5, 6, 7].map(|number| table.find(line(number)).unwrap().0);
        assert_eq!(nodes(&table), [7, 8, 9, 9]);
        table.remember(line(4), 4 * LINE, NodeId(10), NOW);
        assert_eq!(nodes(&table), [10, 8, 9, 9], "of other lines nothing newer is known");
        table.remember(line(5), 4 * LINE, NodeId(11), NOW);
        assert_eq!(nodes(&table), [11, 11, 9, 9]);
        table.forget(line(6));
        assert_eq!([4, 5, 6, 7].map(|number| table.find(line(number))), [None; 4]);
        assert_eq!(table.sizes, 0);
    }

    #[test]
    fn the_pointer_is_avoided_for_a_time() {
        let mut table = MovedTable::new(256);
        let at = Timestamp::from_nanos;
        let avoids = |table: &MovedTable, now| {
            [4, 5].map(|number| table.avoids_pointer(at(now), line(number)))
        };
        assert_eq!(avoids(&table, 0), [true, true], "it is not known who serves the lines");
        table.remember(line(5), 16 * LINE, NodeId(7), at(10));
        assert_eq!((avoids(&table, 9), avoids(&table, 10)), ([true, true], [false, false]));
        table.remember(line(5), LINE, NodeId(8), at(0));
        assert_eq!(avoids(&table, 9), [true, false], "the smallest block counts");
        table.avoid_pointer(line(5), NodeId(8), at(20));
        table.avoid_pointer(line(5), NodeId(8), at(15));
        table.avoid_pointer(line(4), NodeId(8), at(30));
        assert_eq!(avoids(&table, 19), [false, true], "another node has line 4 by now");
        assert_eq!(avoids(&table, 20), [false, false]);
    }

    #[test]
    fn what_is_no_size_of_a_block_is_a_line() {
        for pages in [0, 1, 7, 3 * LINE, 1 << 19, u32::MAX] {
            let mut table = MovedTable::new(4);
            table.remember(line(0), pages, NodeId(7), NOW);
            assert_eq!(table.find(line(0)), Some(NodeId(7)), "{pages}");
            assert_eq!(table.find(line(1)), None, "{pages}");
        }
    }
}
