//! The records of a migration: the pages of a line in the reply to TAKE, and the fences in the reply to
//! KEEP (docs/migration.md).

use core::fmt;

use crate::{ArenaGeneration, NodeId, Space, Tag, address::LINE_PAGES};

/// Bytes of the record of one page.
pub const PAGE_RECORD_BYTES: usize = 32;

/// Bytes of the record of a line: one page after the other.
pub const LINE_RECORD_BYTES: usize = LINE_PAGES * PAGE_RECORD_BYTES;

/// Bytes of a fence.
pub const FENCE_BYTES: usize = 8;

/// The most fences in a reply: they have the room of a line's record.
pub const FENCES_MAX: usize = LINE_RECORD_BYTES / FENCE_BYTES;

/// The part of an allocation that a page is.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Part {
    /// In no allocation.
    #[default]
    Free,
    /// The first page of an allocation.
    First {
        /// Pages of the allocation, at least 1.
        pages: u32,
    },
    /// A further page of an allocation.
    Further {
        /// Pages between the first page of the allocation and this one, at least 1.
        distance: u32,
    },
}

/// What a page reads as, or what the bytes of a free page are.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum PageContents {
    /// Zeros; its memory is zeros, too.
    #[default]
    Zeros,
    /// Zeros; its memory holds bytes of an earlier allocation.
    Leftover,
    /// Bytes that its allocation wrote.
    Written,
}

/// One page of a line, without its bytes.
///
/// ```text
///   0 | page version, 64 bits                                         |
///   8 | pages of the allocation, or distance to its first page        |
///  12 | arena generation              | space                         |
///  16 | tag           | part          | contents      | 0             |
///  20 | creator's node                | 0                             |
///  24 | creator's incarnation                                         |
///  28 | 0                                                             |
/// ```
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct LinePage {
    /// Counts the changes of the page.
    pub version: u64,
    /// Its place in an allocation.
    pub part: Part,
    /// The generation and the tag, which is not 0, of its allocation; of a free page, those of the last
    /// one that it was in, `None` if there was none.
    pub colour: Option<(ArenaGeneration, Tag)>,
    /// The space of that allocation.
    pub space: Space,
    /// What it reads as.
    pub contents: PageContents,
    /// The endpoint for which the allocation was made; 0 except in the first page.
    pub creator: NodeId,
    /// The incarnation of the creator.
    pub creator_incarnation: u32,
}

/// All pages of a line, in order.
pub type LineRecord = [LinePage; LINE_PAGES];

/// Why bytes are not the record of a line.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum LineError {
    /// Another number of bytes than [`LINE_RECORD_BYTES`].
    Length(usize),
    /// A page whose record has codes or numbers that version 1 does not define.
    Page(usize),
    /// A page that contradicts the pages before it: two allocations overlap, or one has a hole.
    Contradiction(usize),
}

impl fmt::Display for LineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length(bytes) => write!(f, "{bytes} bytes, not {LINE_RECORD_BYTES}"),
            Self::Page(page) => write!(f, "the record of page {page} is damaged"),
            Self::Contradiction(page) => {
                write!(f, "page {page} contradicts the pages before it")
            }
        }
    }
}

impl core::error::Error for LineError {}

mod part {
    pub(super) const FREE: u8 = 0;
    pub(super) const FIRST: u8 = 1;
    pub(super) const FURTHER: u8 = 2;
}

mod contents {
    pub(super) const ZEROS: u8 = 0;
    pub(super) const LEFTOVER: u8 = 1;
    pub(super) const WRITTEN: u8 = 2;
}

impl LinePage {
    fn emit(&self) -> [u8; PAGE_RECORD_BYTES] {
        let (part, link) = match self.part {
            Part::Free => (part::FREE, 0),
            Part::First { pages } => (part::FIRST, pages),
            Part::Further { distance } => (part::FURTHER, distance),
        };
        let contents = match self.contents {
            PageContents::Zeros => contents::ZEROS,
            PageContents::Leftover => contents::LEFTOVER,
            PageContents::Written => contents::WRITTEN,
        };
        let (generation, tag) =
            self.colour.map_or((0, 0), |(generation, tag)| (generation.number(), tag.0));
        let mut bytes = [0; PAGE_RECORD_BYTES];
        bytes[..8].copy_from_slice(&self.version.to_be_bytes());
        bytes[8..12].copy_from_slice(&link.to_be_bytes());
        bytes[12..14].copy_from_slice(&generation.to_be_bytes());
        bytes[14..16].copy_from_slice(&self.space.0.to_be_bytes());
        bytes[16..19].copy_from_slice(&[tag, part, contents]);
        bytes[20..22].copy_from_slice(&self.creator.0.to_be_bytes());
        bytes[24..28].copy_from_slice(&self.creator_incarnation.to_be_bytes());
        bytes
    }

    /// `None` if a code or a number is undefined.
    fn parse(bytes: &[u8; PAGE_RECORD_BYTES]) -> Option<Self> {
        let [v0, v1, v2, v3, v4, v5, v6, v7, l0, l1, l2, l3, g0, g1, s0, s1, rest @ ..] = *bytes;
        let [tag, part, contents, _, n0, n1, _, _, i0, i1, i2, i3, _, _, _, _] = rest;
        let link = u32::from_be_bytes([l0, l1, l2, l3]);
        let part = match (part, link) {
            (part::FREE, _) => Part::Free,
            (part::FIRST, 1..) => Part::First { pages: link },
            (part::FURTHER, 1..) => Part::Further { distance: link },
            _ => return None,
        };
        let contents = match contents {
            contents::ZEROS => PageContents::Zeros,
            contents::LEFTOVER => PageContents::Leftover,
            contents::WRITTEN => PageContents::Written,
            _ => return None,
        };
        let generation = ArenaGeneration::new(u16::from_be_bytes([g0, g1]))?;
        let colour = (tag != 0).then_some((generation, Tag(tag)));
        if part != Part::Free && colour.is_none() {
            return None;
        }
        Some(Self {
            version: u64::from_be_bytes([v0, v1, v2, v3, v4, v5, v6, v7]),
            part,
            colour,
            space: Space(u16::from_be_bytes([s0, s1])),
            contents,
            creator: NodeId(u16::from_be_bytes([n0, n1])),
            creator_incarnation: u32::from_be_bytes([i0, i1, i2, i3]),
        })
    }

    /// Whether `next` may be the page after this one, as far as `next` belongs to an earlier page.
    fn may_precede(&self, next: &Self) -> bool {
        let Part::Further { distance } = next.part else { return true };
        let before = match self.part {
            Part::Free => return false,
            Part::First { .. } => 0,
            Part::Further { distance } => distance,
        };
        distance - 1 == before && (self.colour, self.space) == (next.colour, next.space)
    }
}

/// The record of a line on the wire.
#[must_use]
pub fn emit_line(line: &LineRecord) -> [u8; LINE_RECORD_BYTES] {
    let mut bytes = [0; LINE_RECORD_BYTES];
    let (records, _) = bytes.as_chunks_mut::<PAGE_RECORD_BYTES>();
    for (out, page) in records.iter_mut().zip(line) {
        *out = page.emit();
    }
    bytes
}

/// The pages of a line whose record `bytes` are.
///
/// # Errors
/// [`LineError`] if they are none, or if the allocations contradict each other. Whether they agree with
/// the lines beside it is not checked.
pub fn parse_line(bytes: &[u8]) -> Result<LineRecord, LineError> {
    let whole: &[u8; LINE_RECORD_BYTES] =
        bytes.try_into().map_err(|_| LineError::Length(bytes.len()))?;
    let (records, _) = whole.as_chunks::<PAGE_RECORD_BYTES>();
    let mut line = LineRecord::default();
    for (number, (page, record)) in line.iter_mut().zip(records).enumerate() {
        *page = LinePage::parse(record).ok_or(LineError::Page(number))?;
    }
    // The allocation that began last in this line, if it has not ended for sure.
    let mut first: Option<(usize, u32)> = None;
    for (number, page) in line.iter().enumerate() {
        let is_next = number == 0 || line[number - 1].may_precede(page);
        let is_whole = first.is_none_or(|(start, pages)| {
            let distance = u32::try_from(number - start).unwrap_or(u32::MAX);
            (distance < pages) == (page.part == Part::Further { distance })
        });
        if !is_next || !is_whole {
            return Err(LineError::Contradiction(number));
        }
        first = match page.part {
            Part::First { pages } => Some((number, pages)),
            Part::Further { .. } => first,
            Part::Free => None,
        };
    }
    Ok(line)
}

/// The highest incarnation of a node that a server has seen in a space: lower ones are refused.
///
/// ```text
///   0 | node                          | 0                             |
///   4 | incarnation                                                   |
/// ```
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Fence {
    /// The node.
    pub node: NodeId,
    /// Its highest incarnation.
    pub incarnation: u32,
}

impl Fence {
    /// The fence on the wire.
    #[must_use]
    pub fn emit(self) -> [u8; FENCE_BYTES] {
        let [n0, n1] = self.node.0.to_be_bytes();
        let [i0, i1, i2, i3] = self.incarnation.to_be_bytes();
        [n0, n1, 0, 0, i0, i1, i2, i3]
    }

    /// The fences in the data of a reply to KEEP; bytes behind the last whole one are skipped.
    pub fn parse_all(data: &[u8]) -> impl Iterator<Item = Self> + '_ {
        data.as_chunks::<FENCE_BYTES>().0.iter().map(|&[n0, n1, _, _, i0, i1, i2, i3]| Self {
            node: NodeId(u16::from_be_bytes([n0, n1])),
            incarnation: u32::from_be_bytes([i0, i1, i2, i3]),
        })
    }
}
