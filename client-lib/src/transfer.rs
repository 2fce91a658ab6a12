//! Cutting ranges of any length into the operations of one line each.

use core::ops::Range;

use bluebridge_wire::{Pointer, address::LINE_BYTES};

const LINE: u64 = LINE_BYTES as u64;

/// The longest range, so that its lines can be numbered.
pub(crate) const RANGE_BYTES_MAX: u64 = LINE * (u32::MAX as u64);

/// How many lines a range touches.
pub(crate) const fn line_count(pointer: Pointer, length: u64) -> u64 {
    (pointer.location.offset() % LINE + length).div_ceil(LINE)
}

/// The part of a range that lies in its line number `line`, counted from the range's start.
pub(crate) fn part(pointer: Pointer, length: u64, line: u32) -> Range<u64> {
    let in_line = pointer.location.offset() % LINE;
    let line_start = LINE * u64::from(line);
    let start = line_start.saturating_sub(in_line);
    start..(line_start + LINE - in_line).min(length)
}

/// A transfer and a line of it, in the word that goes with an operation.
pub(crate) fn token(index: usize, line: u32) -> u64 {
    ((index as u64) << 32) | u64::from(line)
}

/// What [`token`] was made from.
pub(crate) fn untoken(token: u64) -> (usize, u32) {
    let line = u32::try_from(token & u64::from(u32::MAX)).unwrap_or(0);
    (usize::try_from(token >> 32).unwrap_or(usize::MAX), line)
}

#[cfg(test)]
mod tests {
    use bluebridge_wire::{ArenaGeneration, Location, NodeId, Space, Tag};
    use proptest::prelude::*;

    use super::*;

    fn pointer(offset: u64) -> Pointer {
        let location = Location::new(ArenaGeneration::default(), offset).expect("48 bits");
        Pointer { space: Space(1), node: NodeId(1), tag: Tag(1), location }
    }

    proptest! {
        #[test]
        fn parts_follow_each_other_and_stay_in_their_lines(
            offset in 0_u64..1 << 40,
            length in 1_u64..300_000,
        ) {
            let pointer = pointer(offset);
            let mut end = 0;
            for line in 0..u32::try_from(line_count(pointer, length)).expect("few") {
                let part = part(pointer, length, line);
                prop_assert_eq!(part.start, end);
                prop_assert!(part.end > part.start);
                prop_assert_eq!((offset + part.start) / LINE, (offset + part.end - 1) / LINE);
                end = part.end;
            }
            prop_assert_eq!(end, length);
        }

        #[test]
        fn a_token_leads_back(index in 0..1_usize << 32, line: u32) {
            prop_assert_eq!(untoken(token(index, line)), (index, line));
        }
    }
}
