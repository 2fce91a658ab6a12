//! Memory that outlives its process: a file in the system's memory that the next process takes over.
//!
//! * [`file`]: takes the file over, or makes it. [`access`]: opens, locks and reads it. [`listed`]: the
//!   files that there are. [`error`]: why one cannot be used; [`remedy`]: what its reader can do.
//! * [`layout`]: where in the file each part of each shard is; [`lines`]: what is kept of lines.
//! * [`redo`]: the record of the change under way, so that each change happens completely or not at
//!   all.
//! * [`stores`]: the stores to kept memory; tests log them and cut after each.
//!
//! A process that is killed loses none of its stores, and they were done in the order of the program:
//! only a change that needs several stores can be cut. Such a change is described in the redo record
//! first. A machine that loses power loses everything, as without a file.

mod access;
mod error;
pub(crate) mod file;
pub(crate) mod layout;
pub(crate) mod lines;
mod listed;
pub(crate) mod redo;
mod remedy;
pub(crate) mod stores;
#[cfg(test)]
mod tests;

use crate::{
    direct::{SharedPart, hints::Hints},
    memory::{Memory, Table},
};
use layout::Places;
use lines::LineTables;
use redo::RedoRecord;

pub use error::{ArenaFileError, Foreign, Lack};
pub use file::{ArenaFile, Holder, Kept};
pub use listed::{Listed, Place, list, place_named};
pub use remedy::Reader;

/// A page's state as it is kept. Every bit pattern is valid for the type; the arena checks what it
/// takes over.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    Eq,
    PartialEq,
    zerocopy::FromBytes,
    zerocopy::IntoBytes,
    zerocopy::Immutable,
)]
#[repr(C)]
pub(crate) struct PageRecord {
    /// Odd while the page changes; its half is the page's version. Everything about the page changes
    /// inside of this sequence lock, except `marks` and `is_complete`.
    pub(crate) sequence: u64,
    /// The CRC32C of the whole page in the lower half, if the upper half is the lower half of
    /// `sequence`. WRITEs of whole pages store it, and direct readers where it is missing.
    pub(crate) checksum: u64,
    /// Pages of the allocation (head), or pages back to the head (body).
    pub(crate) link: u32,
    /// Its colour, or the last colour that it had: a generation and a tag.
    pub(crate) colour: u32,
    pub(crate) space: u16,
    /// Its role in an allocation.
    pub(crate) part: u8,
    /// What its memory contains.
    pub(crate) contents: u8,
    /// In a head, whether the requester may know the allocation: [`PageRecord::COMPLETE`], or
    /// [`PageRecord::FREEING`]; 0 if not.
    pub(crate) is_complete: u8,
    /// Why direct readers must not answer for the page: [`PageRecord::LEASED`], [`PageRecord::ELSEWHERE`].
    pub(crate) marks: u8,
    pub(crate) unused: [u8; 2],
}

const _: () = assert!(size_of::<PageRecord>() == 32);

impl PageRecord {
    /// The requester may know the allocation.
    pub(crate) const COMPLETE: u8 = 1;

    /// The allocation is being freed, of which parts are at other servers. The next process goes on with it.
    pub(crate) const FREEING: u8 = 2;

    /// The page is leased.
    pub(crate) const LEASED: u8 = 1;

    /// The page's bytes are not where its number says, because its line has another frame.
    pub(crate) const ELSEWHERE: u8 = 2;

    /// A checksum that is not known: no even sequence has this half.
    pub(crate) const NO_CHECKSUM: u64 = !0;

    /// Counts the changes of the page.
    pub(crate) const fn version(&self) -> u64 {
        self.sequence / 2
    }
}

/// For whom an allocation was made, as it is kept.
#[derive(
    Clone, Copy, Debug, Default, zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable,
)]
#[repr(C)]
pub(crate) struct CreatorRecord {
    pub(crate) incarnation: u32,
    pub(crate) node: u16,
    pub(crate) unused: u16,
}

/// The kept memory of one shard, except the bytes of its pages.
#[derive(Debug)]
pub(crate) struct KeptShard {
    pub(crate) states: Table<PageRecord>,
    pub(crate) creators: Table<CreatorRecord>,
    pub(crate) lines: LineTables,
    pub(crate) redo: RedoRecord,
    /// Colours that each space's allocations used.
    pub(crate) worn: Table<u64>,
    /// The highest incarnation by space and node; 0 if the node was never seen.
    pub(crate) fences: Table<u32>,
    /// What it shares with direct readers; `None` if it has none.
    pub(crate) shared: Option<SharedPart>,
    /// Where direct readers look for lines of other servers; `None` if it has none.
    pub(crate) hints: Option<Hints>,
    /// The places in `worn` and `fences`.
    pub(crate) places: Places,
    /// Whether it holds the contents of an earlier process.
    pub(crate) has_contents: bool,
}

/// The memory of one shard.
#[derive(Debug)]
pub struct ShardMemory {
    pub(crate) pages: Memory,
    /// `None` if the memory ends with the process.
    pub(crate) kept: Option<KeptShard>,
}

impl ShardMemory {
    /// Whether it holds the contents of an earlier process.
    pub(crate) fn has_contents(&self) -> bool {
        self.kept.as_ref().is_some_and(|kept| kept.has_contents)
    }

    /// Bytes of its pages.
    #[must_use]
    pub fn page_bytes(&self) -> usize {
        self.pages.len()
    }
}

impl From<Memory> for ShardMemory {
    fn from(pages: Memory) -> Self {
        Self { pages, kept: None }
    }
}
