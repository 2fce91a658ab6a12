//! Cutting ranges of any length into the operations of one line each.

use core::ops::Range;

use bluebridge_wire::{Pointer, address::LINE_BYTES};

use crate::error::Error;

const LINE: u64 = LINE_BYTES as u64;

/// The longest range, so that its lines can be numbered.
const RANGE_BYTES_MAX: u64 = LINE * (u32::MAX as u64);

/// How many lines a range touches.
///
/// # Errors
/// [`Error::Length`] if the range is empty or too long.
pub(crate) fn count(pointer: Pointer, length: u64) -> Result<u32, Error> {
    if length == 0 || length > RANGE_BYTES_MAX {
        return Err(Error::Length);
    }
    let lines = (pointer.location.offset() % LINE + length).div_ceil(LINE);
    u32::try_from(lines).map_err(|_| Error::Length)
}

/// The part of a range that lies in its line number `line`, in bytes from the range's start.
pub(crate) fn part(pointer: Pointer, length: u64, line: u32) -> Range<u64> {
    let in_line = pointer.location.offset() % LINE;
    let line_start = LINE * u64::from(line);
    let start = line_start.saturating_sub(in_line);
    start..(line_start + LINE - in_line).min(length)
}

/// The pointer and the length of one line's part of a range.
///
/// # Errors
/// [`Error::Length`] if the part is outside of what a pointer can name.
pub(crate) fn piece(pointer: Pointer, length: u64, line: u32) -> Result<(Pointer, u32), Error> {
    let part = part(pointer, length, line);
    let start = pointer.checked_add(part.start).map_err(|_| Error::Length)?;
    let length = u32::try_from(part.end.saturating_sub(part.start)).map_err(|_| Error::Length)?;
    Ok((start, length))
}

/// The position of one line's part of a range in the caller's memory.
pub(crate) fn bytes(pointer: Pointer, length: u64, line: u32) -> Range<usize> {
    let part = part(pointer, length, line);
    let at = |offset: u64| usize::try_from(offset.min(length)).unwrap_or(usize::MAX);
    at(part.start)..at(part.end)
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
            for line in 0..count(pointer, length).expect("few") {
                let part = part(pointer, length, line);
                prop_assert_eq!(part.start, end);
                prop_assert!(part.end > part.start);
                prop_assert_eq!((offset + part.start) / LINE, (offset + part.end - 1) / LINE);
                end = part.end;
            }
            prop_assert_eq!(end, length);
        }
    }

    #[test]
    fn a_range_that_has_no_lines_or_too_many_is_refused() {
        for length in [0, RANGE_BYTES_MAX + 1, u64::MAX] {
            assert!(matches!(count(pointer(0), length), Err(Error::Length)), "{length}");
        }
        assert_eq!(count(pointer(0), RANGE_BYTES_MAX).expect("as many as can be"), u32::MAX);
        // One more line is touched, so its number does not fit.
        assert!(matches!(count(pointer(1), RANGE_BYTES_MAX), Err(Error::Length)));
    }
}
