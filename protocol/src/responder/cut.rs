//! The pieces of an operation, by page.

use bluebridge_wire::{
    Location,
    address::{LINE_BYTES, LINE_PAGES},
};

use crate::pieces::Cut;

/// The pieces of one operation inside of a line.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Pieces {
    cut: Cut,
    in_page: usize,
}

/// The part of one page that an operation covers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct PagePart {
    /// Bytes between the operation's first byte and the part's.
    pub(super) offset: usize,
    /// Bytes between the page's first byte and the part's.
    pub(super) start: usize,
    /// Bytes of the part.
    pub(super) bytes: usize,
    /// The bits of its pieces in a bitmap of the operation's.
    pub(super) bits: u32,
}

/// A piece, and the part of its page that it belongs to.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlacedPiece {
    pub(super) part: PagePart,
    pub(super) piece: Piece,
}

/// One piece.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Piece {
    /// The page that it belongs to, counted from the operation's first.
    pub(super) page: usize,
    /// Its bit in a bitmap of the operation's pieces.
    pub(super) bit: u32,
    /// Bytes between the operation's first byte and the piece's.
    pub(super) offset: usize,
    /// Bytes between the page's first byte and the piece's.
    pub(super) start: usize,
    /// Bytes of the piece.
    pub(super) bytes: usize,
}

impl Pieces {
    /// The pieces of `length` bytes at `location`; `None` if the range is empty or crosses a line,
    /// or the piece size is invalid.
    pub(super) fn new(location: Location, length: u32, piece_bytes: u16) -> Option<Self> {
        let in_line = usize::try_from(location.offset() % LINE_BYTES as u64).ok()?;
        let length = usize::try_from(length).ok().filter(|&length| length <= LINE_BYTES)?;
        if in_line + length > LINE_BYTES {
            return None;
        }
        let in_page = location.in_page();
        Cut::new(in_page, length, usize::from(piece_bytes)).map(|cut| Self { cut, in_page })
    }

    pub(super) const fn page_count(&self) -> usize {
        self.cut.page_count()
    }

    /// The bits of all pieces.
    pub(super) const fn bits(&self) -> u32 {
        self.cut.all()
    }

    /// The part of a page, counted from the operation's first; `None` after the last.
    pub(super) fn part(&self, page: usize) -> Option<PagePart> {
        let range = self.cut.page_range(page);
        let start = if page == 0 { self.in_page } else { 0 };
        let bits = self.cut.page_pieces(page);
        let part = PagePart { offset: range.start, start, bytes: range.len(), bits };
        (!range.is_empty()).then_some(part)
    }

    pub(super) fn parts(&self) -> impl Iterator<Item = PagePart> {
        (0..LINE_PAGES).map_while(|page| self.part(page))
    }

    /// The piece with this number; `None` after the last.
    pub(super) fn piece(&self, number: u32) -> Option<Piece> {
        let piece = self.cut.piece(number)?;
        let part = self.part(piece.page)?;
        let offset = piece.range.start;
        let start = part.start + (offset - part.offset);
        Some(Piece { page: piece.page, bit: 1 << number, offset, start, bytes: piece.range.len() })
    }

    /// The piece that begins `offset` bytes into the operation; `None` if none does.
    pub(super) fn at(&self, offset: u16) -> Option<Piece> {
        self.piece(self.cut.index_at(usize::from(offset))?)
    }
}

impl PagePart {
    pub(super) const fn is_one_piece(&self) -> bool {
        self.bits.count_ones() == 1
    }
}
