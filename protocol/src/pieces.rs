//! How an operation is divided: pages, and pieces inside of each page (protocol, section 4).

use core::ops::Range;

use bluebridge_wire::{
    TRAIN_PIECES_MAX,
    address::{LINE_BYTES, LINE_PAGES, PAGE_BYTES},
};

/// The smallest piece size: four pieces fill a page, so that a line has at most
/// [`TRAIN_PIECES_MAX`].
pub const PIECE_BYTES_MIN: usize = PAGE_BYTES * LINE_PAGES / TRAIN_PIECES_MAX;

/// An operation's range, divided into the pieces that datagrams carry.
///
/// Pieces are numbered over the operation in address order; a bitmap's bit 0 is the first.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Cut {
    in_page: u16,
    length: u16,
    piece_bytes: u16,
}

/// One piece: a byte range of the operation that lies inside of one page.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Piece {
    /// The page, counted from the operation's first.
    pub page: usize,
    /// The bytes, counted from the operation's start.
    pub range: Range<usize>,
}

impl Cut {
    /// One page, one piece, one byte: used for an operation without a range.
    pub const ONE: Self = Self { in_page: 0, length: 1, piece_bytes: 4096 };

    /// The same range with another piece size; `None` for an invalid piece size.
    #[must_use]
    pub fn with_piece_bytes(self, piece_bytes: usize) -> Option<Self> {
        Self::new(usize::from(self.in_page), self.length(), piece_bytes)
    }

    /// The pieces of `length` bytes that begin `in_page` bytes into a page.
    ///
    /// `None` if the range is empty, covers more than [`LINE_PAGES`] pages, or the piece size is
    /// not between [`PIECE_BYTES_MIN`] and a page. (The caller checks that the range lies inside of
    /// one aligned line.)
    #[must_use]
    pub fn new(in_page: usize, length: usize, piece_bytes: usize) -> Option<Self> {
        let fits = in_page < PAGE_BYTES && length > 0 && in_page + length <= LINE_BYTES;
        if !fits || !(PIECE_BYTES_MIN..=PAGE_BYTES).contains(&piece_bytes) {
            return None;
        }
        Some(Self {
            in_page: u16::try_from(in_page).ok()?,
            length: u16::try_from(length).ok()?,
            piece_bytes: u16::try_from(piece_bytes).ok()?,
        })
    }

    /// Bytes of the operation.
    #[must_use]
    pub const fn length(&self) -> usize {
        self.length as usize
    }

    /// The largest size of a piece.
    #[must_use]
    pub const fn piece_bytes(&self) -> u32 {
        self.piece_bytes as u32
    }

    /// Pages that the operation covers, 1 to [`LINE_PAGES`].
    #[must_use]
    pub const fn page_count(&self) -> usize {
        (self.in_page as usize + self.length()).div_ceil(PAGE_BYTES)
    }

    /// Pieces of the operation, 1 to [`TRAIN_PIECES_MAX`].
    #[must_use]
    pub const fn piece_count(&self) -> u32 {
        let first = self.first_bytes();
        let rest = self.length() - first;
        let full = (rest / PAGE_BYTES) * self.per_page();
        let count = self.pieces_in(first) + full + self.pieces_in(rest % PAGE_BYTES);
        #[allow(clippy::cast_possible_truncation, reason = "at most 32")]
        let count = count as u32;
        count
    }

    /// The bitmap of all pieces.
    #[must_use]
    pub const fn all(&self) -> u32 {
        mask(0, self.piece_count())
    }

    /// The byte range of a page's part, counted from the operation's start; empty beyond the last
    /// page.
    #[must_use]
    pub const fn page_range(&self, page: usize) -> Range<usize> {
        let length = self.length();
        if page == 0 {
            return 0..self.first_bytes();
        }
        let start = self.first_bytes() + (page - 1) * PAGE_BYTES;
        if start >= length {
            return length..length;
        }
        let end = start + PAGE_BYTES;
        start..if end < length { end } else { length }
    }

    /// The bitmap of a page's pieces; 0 beyond the last page.
    #[must_use]
    pub const fn page_pieces(&self, page: usize) -> u32 {
        let range = self.page_range(page);
        #[allow(clippy::cast_possible_truncation, reason = "at most 4")]
        let count = self.pieces_in(range.end - range.start) as u32;
        if count == 0 {
            return 0;
        }
        mask(self.first_piece(page), count)
    }

    /// The piece with this number.
    #[must_use]
    pub const fn piece(&self, index: u32) -> Option<Piece> {
        let index = index as usize;
        let first_pieces = self.pieces_in(self.first_bytes());
        let (page, in_part) = if index < first_pieces {
            (0, index)
        } else {
            let behind = index - first_pieces;
            (1 + behind / self.per_page(), behind % self.per_page())
        };
        let part = self.page_range(page);
        let start = part.start + in_part * self.piece_bytes as usize;
        if start >= part.end {
            return None;
        }
        let end = start + self.piece_bytes as usize;
        Some(Piece { page, range: start..if end < part.end { end } else { part.end } })
    }

    /// The number of the piece that begins `offset` bytes into the operation.
    #[must_use]
    pub fn index_at(&self, offset: usize) -> Option<u32> {
        let page = (usize::from(self.in_page) + offset) / PAGE_BYTES;
        let part = self.page_range(page);
        let in_part = offset.checked_sub(part.start)?;
        if in_part == 0 && offset < part.end {
            return Some(self.first_piece(page));
        }
        if offset >= part.end || !in_part.is_multiple_of(usize::from(self.piece_bytes)) {
            return None;
        }
        let in_page = u32::try_from(in_part / usize::from(self.piece_bytes)).ok()?;
        Some(self.first_piece(page) + in_page)
    }

    const fn first_bytes(&self) -> usize {
        let room = PAGE_BYTES - self.in_page as usize;
        if self.length() < room { self.length() } else { room }
    }

    const fn per_page(&self) -> usize {
        self.pieces_in(PAGE_BYTES)
    }

    const fn pieces_in(&self, bytes: usize) -> usize {
        // The usual case, one piece, needs no division.
        if bytes <= self.piece_bytes as usize {
            return (bytes > 0) as usize;
        }
        bytes.div_ceil(self.piece_bytes as usize)
    }

    const fn first_piece(&self, page: usize) -> u32 {
        if page == 0 {
            return 0;
        }
        #[allow(clippy::cast_possible_truncation, reason = "at most 32")]
        let first = (self.pieces_in(self.first_bytes()) + (page - 1) * self.per_page()) as u32;
        first
    }
}

const fn mask(first: u32, count: u32) -> u32 {
    (u32::MAX >> (u32::BITS - count)) << first
}

#[cfg(test)]
mod tests {
    use bluebridge_wire::address::{LINE_BYTES, PAGE_BYTES};
    use proptest::prelude::*;

    use super::Cut;

    fn cuts() -> impl Strategy<Value = Cut> {
        (0..PAGE_BYTES, 1..=LINE_BYTES, 1024..=PAGE_BYTES)
            .prop_filter_map("the range fits eight pages", |(in_page, length, piece)| {
                Cut::new(in_page, length, piece)
            })
    }

    proptest! {
        #[test]
        fn pieces_cover_the_range_once_and_stay_in_their_pages(cut in cuts()) {
            let in_page = usize::from(cut.in_page);
            prop_assert!((1..=32).contains(&cut.piece_count()));
            prop_assert!((1..=8).contains(&cut.page_count()));
            let mut end = 0;
            let mut seen = 0_u32;
            for index in 0..cut.piece_count() {
                let piece = cut.piece(index).expect("counted");
                prop_assert_eq!(piece.range.start, end);
                prop_assert!(piece.range.end > piece.range.start);
                prop_assert!(piece.range.len() <= usize::from(cut.piece_bytes));
                prop_assert_eq!((in_page + piece.range.start) / PAGE_BYTES, piece.page);
                prop_assert_eq!((in_page + piece.range.end - 1) / PAGE_BYTES, piece.page);
                prop_assert_eq!(cut.index_at(piece.range.start), Some(index));
                prop_assert_ne!(cut.page_pieces(piece.page) & (1 << index), 0);
                seen |= 1 << index;
                end = piece.range.end;
            }
            prop_assert_eq!(end, cut.length());
            prop_assert_eq!(seen, cut.all());
            prop_assert_eq!(cut.piece(cut.piece_count()), None);
            let pages = (0..8).map(|page| cut.page_pieces(page));
            prop_assert_eq!(pages.clone().fold(0, |all, page| all ^ page), cut.all());
            prop_assert_eq!(pages.filter(|page| *page != 0).count(), cut.page_count());
        }

        #[test]
        fn only_the_start_of_a_piece_has_its_index(cut in cuts(), offset in 0..=LINE_BYTES) {
            let starts = (0..cut.piece_count()).find(|index| {
                cut.piece(*index).is_some_and(|piece| piece.range.start == offset)
            });
            prop_assert_eq!(cut.index_at(offset), starts);
        }
    }

    #[test]
    fn invalid_ranges_and_piece_sizes_have_no_cut() {
        assert_eq!(Cut::new(0, 0, 4096), None);
        assert_eq!(Cut::new(PAGE_BYTES, 1, 4096), None);
        assert_eq!(Cut::new(1, LINE_BYTES, 4096), None);
        assert_eq!(Cut::new(0, 1, 1023), None);
        assert_eq!(Cut::new(0, 1, 4097), None);
    }
}
