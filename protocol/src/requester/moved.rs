//! Where moved lines are served now, as MOVED replies said: a bounded cache that may lose any
//! entry.

use bluebridge_wire::{NodeId, Pointer, address::LINE_BYTES};

/// One moved line; `key` 0 marks an empty entry.
#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    key: u64,
    node: u16,
}

/// A direct-mapped cache: a newer line replaces an older one in the same place.
#[derive(Debug)]
pub(super) struct MovedTable {
    entries: Box<[Entry]>,
    count: usize,
}

impl MovedTable {
    pub(super) fn new(size: u16) -> Self {
        let size = usize::from(size.max(1)).next_power_of_two();
        Self { entries: vec![Entry::default(); size].into_boxed_slice(), count: 0 }
    }

    /// The node that serves the pointer's line, if it is known to have moved.
    pub(super) fn find(&self, pointer: Pointer) -> Option<NodeId> {
        if self.count == 0 {
            return None;
        }
        let key = key(pointer);
        let entry = self.entries.get(self.place(key))?;
        (entry.key == key).then_some(NodeId(entry.node))
    }

    pub(super) fn remember(&mut self, pointer: Pointer, node: NodeId) {
        let key = key(pointer);
        let place = self.place(key);
        if let Some(entry) = self.entries.get_mut(place) {
            self.count += usize::from(entry.key == 0);
            *entry = Entry { key, node: node.0 };
        }
    }

    pub(super) fn forget(&mut self, pointer: Pointer) {
        let key = key(pointer);
        let place = self.place(key);
        if let Some(entry) = self.entries.get_mut(place)
            && entry.key == key
        {
            *entry = Entry::default();
            self.count -= 1;
        }
    }

    #[allow(clippy::cast_possible_truncation, reason = "the product's upper bits are the place")]
    const fn place(&self, key: u64) -> usize {
        (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize & (self.entries.len() - 1)
    }
}

/// Home node and line in one word, never 0: the location's 63 bits lose the 15 below a line.
fn key(pointer: Pointer) -> u64 {
    let line = pointer.location.bits() / LINE_BYTES as u64;
    (line << 16) | u64::from(pointer.node.0)
}

#[cfg(test)]
mod tests {
    use bluebridge_wire::{ArenaGeneration, Location, Space, Tag};

    use super::*;

    fn pointer(node: u16, offset: u64) -> Pointer {
        let generation = ArenaGeneration::new(3).expect("small");
        let location = Location::new(generation, offset).expect("48 bits");
        Pointer { space: Space(1), node: NodeId(node), tag: Tag(9), location }
    }

    #[test]
    fn a_line_is_found_until_it_is_removed_or_overwritten() {
        let mut table = MovedTable::new(1);
        assert_eq!(table.find(pointer(1, 0)), None);
        table.remember(pointer(1, 0x8000), NodeId(7));
        assert_eq!(table.find(pointer(1, 0xffff)), Some(NodeId(7)));
        assert_eq!(table.find(pointer(1, 0x7fff)), None);
        assert_eq!(table.find(pointer(2, 0x8000)), None);
        table.remember(pointer(2, 0x8000), NodeId(8));
        assert_eq!(table.find(pointer(1, 0x8000)), None);
        table.forget(pointer(1, 0x8000));
        assert_eq!(table.find(pointer(2, 0x8000)), Some(NodeId(8)));
        table.forget(pointer(2, 0x9000));
        assert_eq!((table.find(pointer(2, 0x8000)), table.count), (None, 0));
    }
}
