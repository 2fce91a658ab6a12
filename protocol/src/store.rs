//! The interface between the responder and the memory that it serves.

mod lines;
mod none;

use core::ops::Range;

use bluebridge_wire::{ArenaGeneration, Location, NodeId, Space, Status, Tag, address::PAGE_BYTES};

use crate::direct::Shared;

pub use lines::{
    ADOPTED_PAGES_FROM, Allowance, HomeLine, Line, LineStore, PageCrcs, Placed, SHARD_PAGES_MAX,
    StageError, Taken,
};
pub use none::NoPages;

/// The result of an allocation: where it begins, and its colour, which is the location's generation
/// and the tag.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Grant {
    /// The first byte; page aligned.
    pub location: Location,
    /// The tag that pointers to it carry.
    pub tag: Tag,
}

/// The endpoint that an allocation was made for.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Creator {
    /// Its node.
    pub node: NodeId,
    /// Its incarnation, which changes when the node joins again.
    pub incarnation: u32,
}

/// The location, tag and space that an access is checked for (protocol, section 7, step 7).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Access {
    /// The first byte.
    pub location: Location,
    /// Bytes; at least 1.
    pub length_bytes: u64,
    /// The tag in the pointer.
    pub tag: Tag,
    /// The space of the requester.
    pub space: Space,
}

/// Bytes for one page, as [`PageStore::write_together`] takes them.
#[derive(Clone, Copy, Debug)]
pub struct PageWrite<'a> {
    /// The page; it and the range passed [`PageStore::check`].
    pub page: u64,
    /// The first byte in it.
    pub start: usize,
    /// The bytes.
    pub data: &'a [u8],
}

/// Pages that outlive requests: one shard of a server's arena, owned by one serving core.
///
/// Every error is the [`Status`] that the requester receives, and leaves everything unchanged.
/// Page numbers are those of [`Location::page`].
///
/// A store may outlive its process. Then each change of a page, an allocation and a deletion happen
/// completely or not at all, whenever the process is killed.
pub trait PageStore {
    /// The first generation of the contents: pointers of older generations refer to contents that
    /// were lost. Pages may have later ones.
    fn generation(&self) -> ArenaGeneration;

    /// Allocates `pages` contiguous pages, zeroed, with version 0 or greater. No page is allocated
    /// twice with the same generation and tag.
    ///
    /// The allocation is incomplete until [`Self::complete`]: a store that outlives its process frees
    /// it when the next process takes over, because nobody can know of it.
    ///
    /// # Errors
    /// [`Status::BadLength`] for 0 pages, [`Status::QuotaExceeded`], [`Status::OutOfMemory`],
    /// [`Status::Overloaded`] if pages will soon be available.
    fn create(&mut self, space: Space, pages: u32) -> Result<Grant, Status>;

    /// Records the endpoint for which the allocation that begins at `location` was made. A store
    /// that lists its allocations to operators keeps it.
    fn note_creator(&mut self, location: Location, creator: Creator) {
        let _ = (location, creator);
    }

    /// The allocation that begins at `location` is complete: its requester may learn of it.
    fn complete(&mut self, location: Location) {
        let _ = location;
    }

    /// Frees the allocation that begins at `access.location`; `pages` is its length, or 0 for any
    /// length. Returns the number of freed pages.
    ///
    /// # Errors
    /// The errors of [`Self::check`], [`Status::Unaligned`] inside of a page or of an allocation,
    /// [`Status::BadLength`] if the allocation has another length.
    fn delete(&mut self, access: Access, pages: u32) -> Result<u32, Status>;

    /// The pages that [`Self::delete`] with the same arguments would free.
    ///
    /// # Errors
    /// The errors of [`Self::delete`].
    fn allocation(&self, access: Access, pages: u32) -> Result<Range<u64>, Status>;

    /// Whether the range may be accessed: the generation is current, and all pages are within
    /// bounds, allocated, of this generation and tag, and in this space.
    ///
    /// # Errors
    /// The status of the first page that may not be accessed.
    fn check(&self, access: Access) -> Result<(), Status>;

    /// A part of an allocated page; `page` and `range` passed [`Self::check`].
    fn read(&self, page: u64, range: Range<usize>) -> &[u8];

    /// Overwrites a part of an allocated page and increments its version; `page` and the range that
    /// begins at `start` passed [`Self::check`].
    fn write(&mut self, page: u64, start: usize, data: &[u8]);

    /// As [`Self::write`] of a whole page, of which the CRC32C is known.
    fn write_page(&mut self, page: u64, data: &[u8; PAGE_BYTES], crc: u32) {
        let _ = crc;
        self.write(page, 0, data);
    }

    /// The CRC32C of what [`Self::read`] returns of a whole page, if it is known.
    fn page_crc(&self, page: u64) -> Option<u32> {
        let _ = page;
        None
    }

    /// As [`Self::write`] for several different pages, all of them or none: at most the pages of a
    /// line.
    fn write_together(&mut self, writes: &[PageWrite<'_>]) {
        for PageWrite { page, start, data } in writes {
            self.write(*page, *start, data);
        }
    }

    /// Zeroes a part of an allocated page and increments its version.
    fn zero(&mut self, page: u64, range: Range<usize>);

    /// Counts the changes of an allocated page; never the same for different contents since
    /// [`Self::generation`] began.
    fn version(&self, page: u64) -> u64;

    /// Records the highest incarnation of a client's node in a space: a store that outlives its
    /// process keeps it, because requests of lower incarnations must stay refused. 0 if they no
    /// longer need to be.
    fn keep_fence(&mut self, space: Space, node: NodeId, incarnation: u32) {
        let _ = (space, node, incarnation);
    }

    /// Calls `each` with all recorded incarnations that are not 0.
    fn fences(&self, each: &mut dyn FnMut(Space, NodeId, u32)) {
        let _ = each;
    }

    /// What it shares with readers that answer READs of its pages without the responder; nothing if it has none.
    fn shared(&self) -> Shared<'_> {
        Shared::default()
    }

    /// Records whether a page is leased: direct readers do not answer READs of leased pages.
    fn set_leased(&mut self, page: u64, is_leased: bool) {
        let _ = (page, is_leased);
    }

    /// Its lines, as migrations move them.
    fn lines(&self) -> &dyn LineStore;

    /// Its lines, to change them.
    fn lines_mut(&mut self) -> &mut dyn LineStore;

    /// Capacity, free pages, and the use and quota of `space`.
    fn usage(&self, space: Space) -> StoreUsage;
}

/// The use of a store, in pages.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct StoreUsage {
    /// All pages.
    pub capacity_pages: u64,
    /// Pages that can be allocated: neither in an allocation nor unusable. A large allocation also
    /// needs them to be contiguous.
    pub free_pages: u64,
    /// The largest number of pages that the space may allocate; `u64::MAX` without a quota.
    pub quota_pages: u64,
    /// Pages that the space has allocated.
    pub used_pages: u64,
    /// Pages that cannot be allocated because all their colours were used.
    pub retired_pages: u64,
}
