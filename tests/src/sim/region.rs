//! Allocations in the clients' view, and the possible contents of their pages.

use bluebridge_protocol::Timestamp;
use bluebridge_wire::{Pointer, address::PAGE_BYTES};

use super::model::{AddCell, PrivatePage, Register, SwapCell};

/// Counters and swapped words of a region of cells.
pub(super) const ADD_CELLS: usize = 3;
pub(super) const SWAP_CELLS: usize = 2;

/// Bytes between two cells.
pub(super) const CELL_STRIDE: u64 = 328;

/// What a region is used for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Purpose {
    /// One client reads and writes any bytes.
    Private,
    /// All clients read and overwrite whole pages.
    Shared,
    /// All clients add to and swap words.
    Cells,
}

/// The possible contents of a region's pages.
pub(super) enum Contents {
    Private(Vec<PrivatePage>),
    Shared(Vec<Register>),
    Cells { adds: Vec<AddCell>, swaps: Vec<SwapCell>, seen: [u64; SWAP_CELLS] },
}

/// Whether a region exists.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum State {
    Live,
    /// A DELETE is outstanding, or ended with an unknown outcome.
    Doubtful,
    Deleted,
}

/// An allocation whose pointer a client received.
pub(super) struct Region {
    pub(super) pointer: Pointer,
    pub(super) pages: u32,
    pub(super) server: usize,
    /// The client that made it.
    pub(super) owner: usize,
    pub(super) contents: Contents,
    pub(super) state: State,
    /// An operation of the owner is outstanding (private regions, deletion).
    pub(super) busy: bool,
    /// A line of it was moved to another server once.
    pub(super) was_moved: bool,
    /// Too much about it is unknown to check it any further.
    pub(super) retired: bool,
    /// When the last operation with an unknown outcome ended.
    pub(super) unknown_at: Option<Timestamp>,
    /// DELETEs that began.
    pub(super) delete_count: u32,
    /// When the first DELETE began.
    pub(super) deleting_from: Option<Timestamp>,
    /// When the DELETE was acknowledged.
    pub(super) deleted_at: Option<Timestamp>,
    /// When the server lost the contents.
    pub(super) lost_at: Option<Timestamp>,
}

impl Region {
    pub(super) fn new(
        purpose: Purpose,
        (pointer, pages): (Pointer, u32),
        server: usize,
        owner: usize,
    ) -> Self {
        let count = pages as usize;
        let contents = match purpose {
            Purpose::Private => Contents::Private(vec![PrivatePage::zeroed(); count]),
            Purpose::Shared => Contents::Shared(vec![Register::default(); count]),
            Purpose::Cells => Contents::Cells {
                adds: vec![AddCell::default(); ADD_CELLS],
                swaps: vec![SwapCell::default(); SWAP_CELLS],
                seen: [0; SWAP_CELLS],
            },
        };
        Self {
            pointer,
            pages,
            server,
            owner,
            contents,
            state: State::Live,
            busy: false,
            was_moved: false,
            retired: false,
            unknown_at: None,
            delete_count: 0,
            deleting_from: None,
            deleted_at: None,
            lost_at: None,
        }
    }

    pub(super) const fn purpose(&self) -> Purpose {
        match self.contents {
            Contents::Private(_) => Purpose::Private,
            Contents::Shared(_) => Purpose::Shared,
            Contents::Cells { .. } => Purpose::Cells,
        }
    }

    /// Whether operations on it must succeed.
    pub(super) fn is_usable(&self) -> bool {
        self.state == State::Live && self.lost_at.is_none() && !self.retired
    }

    pub(super) fn bytes(&self) -> u64 {
        u64::from(self.pages) * PAGE_BYTES as u64
    }

    /// The pointer to byte `offset`.
    pub(super) fn at(&self, offset: u64) -> Pointer {
        self.pointer.checked_add(offset).expect("inside of the region")
    }

    /// The pages that the allocation covers.
    pub(super) fn page_range(&self) -> core::ops::Range<u64> {
        let first = self.pointer.location.page();
        first..first + u64::from(self.pages)
    }

    /// The first whole line of pages in it.
    pub(super) fn line(&self) -> Option<core::ops::Range<u64>> {
        let pages = self.page_range();
        let first = pages.start.next_multiple_of(8);
        (first + 8 <= pages.end).then_some(first..first + 8)
    }

    pub(super) fn settle(&mut self) {
        if let Contents::Private(pages) = &mut self.contents {
            pages.iter_mut().for_each(PrivatePage::settle);
        }
    }
}

/// A part of one page: the page in the region, the first byte in the page, and the position in the
/// operation.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) page: usize,
    pub(super) start: usize,
    pub(super) data: core::ops::Range<usize>,
}

/// A byte range of a region, cut into pages.
pub(super) fn parts(offset: u64, length: usize) -> impl Iterator<Item = Part> {
    let page_bytes = PAGE_BYTES as u64;
    let mut done = 0;
    core::iter::from_fn(move || {
        if done == length {
            return None;
        }
        let at = offset + done as u64;
        let start = usize::try_from(at % page_bytes).expect("below a page");
        let bytes = (PAGE_BYTES - start).min(length - done);
        let page = usize::try_from(at / page_bytes).expect("few pages");
        done += bytes;
        Some(Part { page, start, data: done - bytes..done })
    })
}

/// The contents of a shared page that was written as `value`: every word depends on the value and
/// its position.
pub(super) fn stamp(value: u64) -> impl Iterator<Item = u8> {
    (0..PAGE_BYTES as u64 / 8).flat_map(move |index| {
        if value == 0 { [0; 8] } else { (value << 12 | index).to_be_bytes() }
    })
}

/// The value of a part of a shared page; `None` if the part is too short to determine it.
///
/// # Errors
/// If the bytes are not those of one value, or not in their place.
pub(super) fn read_stamp(start: usize, data: &[u8]) -> Result<Option<u64>, String> {
    let skip = start.next_multiple_of(8) - start;
    let Some(word) = data.get(skip..).and_then(|rest| rest.first_chunk::<8>()) else {
        return Ok(None);
    };
    let value = u64::from_be_bytes(*word) >> 12;
    let torn = data.iter().zip(stamp(value).skip(start)).position(|(byte, stamp)| *byte != stamp);
    match torn {
        None => Ok(Some(value)),
        Some(at) => Err(format!("torn page: value {value:#x}, but not at byte {}", start + at)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_a_stamped_page_has_its_value() {
        let mut page: Vec<_> = stamp(0x1234_5678).collect();
        assert_eq!(read_stamp(0, &page), Ok(Some(0x1234_5678)));
        assert_eq!(read_stamp(1001, &page[1001..1017]), Ok(Some(0x1234_5678)));
        assert_eq!(read_stamp(1001, &page[1001..1010]), Ok(None));
        assert!(read_stamp(8, &page[..16]).is_err(), "in another place");
        page[4000] ^= 1;
        assert!(read_stamp(0, &page).is_err(), "torn");
        assert_eq!(read_stamp(3, &[0; 50]), Ok(Some(0)));
    }

    #[test]
    fn ranges_are_cut_at_pages() {
        let parts: Vec<_> = parts(4090, 4110).map(|p| (p.page, p.start, p.data)).collect();
        assert_eq!(parts, [(0, 4090, 0..6), (1, 0, 6..4102), (2, 0, 4102..4110)]);
    }
}
