//! Which addresses of a range are in use.

use std::collections::BTreeMap;

/// The free parts of a range of bytes: start and length, never adjacent.
#[derive(Debug)]
pub(crate) struct Ranges {
    free: BTreeMap<usize, usize>,
}

/// The least room that is left, in bytes.
const GAP: usize = 16 << 20;

impl Ranges {
    /// All of `start..start + bytes` is free.
    pub(crate) fn new(start: usize, bytes: usize) -> Self {
        Self { free: BTreeMap::from([(start, bytes)]) }
    }

    /// Takes a part of the first free one that is large enough. If there is much room, some is left in front of it, so that
    /// what lies there can grow in place.
    pub(crate) fn take(&mut self, bytes: usize) -> Option<usize> {
        let (start, length) = self.free.iter().find(|(_, length)| **length >= bytes)?;
        let (start, length) = (*start, *length);
        let gap = bytes.max(GAP);
        let gap = if length / 4 > gap { gap } else { 0 };
        self.free.remove(&start);
        if gap > 0 {
            self.free.insert(start, gap);
        }
        if length > gap + bytes {
            self.free.insert(start + gap + bytes, length - gap - bytes);
        }
        Some(start + gap)
    }

    /// Takes the part behind `start..end` if it is free.
    pub(crate) fn extend(&mut self, end: usize, bytes: usize) -> bool {
        let Some(length) = self.free.get(&end).copied().filter(|length| *length >= bytes) else {
            return false;
        };
        self.free.remove(&end);
        if length > bytes {
            self.free.insert(end + bytes, length - bytes);
        }
        true
    }

    /// Takes a certain part, of which some may be taken already.
    pub(crate) fn claim(&mut self, start: usize, bytes: usize) {
        let end = start.saturating_add(bytes);
        let overlapping = self.free.range(..end).rev();
        let overlapping: Vec<_> = overlapping
            .map(|(first, length)| (*first, first + length))
            .take_while(|(_, after)| *after > start)
            .collect();
        for (first, after) in overlapping {
            self.free.remove(&first);
            if first < start {
                self.free.insert(first, start - first);
            }
            if after > end {
                self.free.insert(end, after - end);
            }
        }
    }

    /// Gives a part back, of which some may be free already.
    pub(crate) fn give(&mut self, start: usize, bytes: usize) {
        self.claim(start, bytes);
        let (mut start, mut bytes) = (start, bytes);
        if let Some((before, length)) = self.free.range(..start).next_back()
            && before + length == start
        {
            (start, bytes) = (*before, length + bytes);
        }
        if let Some(length) = self.free.remove(&(start + bytes)) {
            bytes += length;
        }
        self.free.insert(start, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_that_is_given_back_twice_or_taken_in_a_hole_is_not_handed_out_twice() {
        let mut ranges = Ranges::new(0, 100);
        assert_eq!(ranges.take(100), Some(0));
        for (start, bytes) in [(10, 10), (10, 10), (15, 20), (0, 5), (50, 50), (60, 10)] {
            ranges.give(start, bytes);
        }
        assert_eq!(ranges.free, BTreeMap::from([(0, 5), (10, 25), (50, 50)]));
        ranges.claim(20, 5);
        ranges.claim(40, 20);
        ranges.claim(40, 20);
        assert_eq!(ranges.free, BTreeMap::from([(0, 5), (10, 10), (25, 10), (60, 40)]));
        ranges.claim(0, 100);
        assert_eq!(ranges.take(1), None);
    }

    #[test]
    fn a_part_can_grow_if_there_is_much_room() {
        let mut ranges = Ranges::new(0, 1 << 30);
        let first = ranges.take(1 << 20).expect("there is room");
        let second = ranges.take(32 << 20).expect("there is room");
        assert!(ranges.extend(first + (1 << 20), 15 << 20));
        assert!(ranges.extend(second + (32 << 20), 15 << 20));
        let whole = [(first, 16 << 20), (second, 47 << 20)];
        whole.into_iter().for_each(|(start, bytes)| ranges.give(start, bytes));
        assert_eq!(ranges.free, BTreeMap::from([(0, 1 << 30)]));
    }

    #[test]
    fn parts_that_come_back_are_joined() {
        let mut ranges = Ranges::new(100, 100);
        let parts: Vec<_> = (0..10).map(|_| ranges.take(10).expect("there is room")).collect();
        assert_eq!(ranges.take(1), None);
        for part in [5, 3, 4, 9, 0, 1, 2, 8, 6, 7] {
            ranges.give(parts[part], 10);
        }
        assert_eq!(ranges.free, BTreeMap::from([(100, 100)]));
        assert_eq!(ranges.take(60), Some(100));
        assert!(ranges.extend(160, 20) && !ranges.extend(180, 30));
        assert_eq!(ranges.take(20), Some(180));
    }
}
