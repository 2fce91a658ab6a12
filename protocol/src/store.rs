//! The seam between the responder and the memory it serves.

use core::ops::Range;

use bluebridge_wire::{ArenaGeneration, Location, NodeId, Space, Status, Tag};

/// What an allocation got: where it begins, and its colour, which is the location's generation and
/// the tag.
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
    /// Its incarnation; with the node it names one life of one endpoint.
    pub incarnation: u32,
}

/// What a location, a tag and a space must match for an access (protocol, section 7, step 7).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Access {
    /// The first byte.
    pub location: Location,
    /// Bytes; at least 1.
    pub length_bytes: u64,
    /// The tag in the pointer.
    pub tag: Tag,
    /// The space that asks.
    pub space: Space,
}

/// Pages that outlive requests: one shard of a server's arena, owned by one serving core.
///
/// Every refusal is the [`Status`] that the requester is told, and leaves everything unchanged.
/// Page numbers are those of [`Location::page`].
pub trait PageStore {
    /// The first generation of the contents: pointers of older ones are to contents that were lost.
    /// Pages may have later ones.
    fn generation(&self) -> ArenaGeneration;

    /// Allocates `pages` contiguous pages, zeroed, with version 0 or greater. No page is given twice
    /// with the same generation and tag.
    ///
    /// # Errors
    /// [`Status::BadLength`] for 0 pages, [`Status::QuotaExceeded`], [`Status::OutOfMemory`],
    /// [`Status::Overloaded`] if pages can be had in a moment.
    fn create(&mut self, space: Space, pages: u32) -> Result<Grant, Status>;

    /// Notes for whom the allocation that begins at `location` was made. A store that lists its
    /// allocations to operators keeps it.
    fn note_creator(&mut self, location: Location, creator: Creator) {
        let _ = (location, creator);
    }

    /// Frees the allocation that begins at `access.location`; `pages` is its length, or 0 for
    /// whatever it has. Answers how many pages were freed.
    ///
    /// # Errors
    /// What [`Self::check`] refuses, [`Status::Unaligned`] inside of a page or of an allocation,
    /// [`Status::BadLength`] if the allocation has another length.
    fn delete(&mut self, access: Access, pages: u32) -> Result<u32, Status>;

    /// The pages that [`Self::delete`] of the same would free.
    ///
    /// # Errors
    /// What [`Self::delete`] would refuse.
    fn allocation(&self, access: Access, pages: u32) -> Result<Range<u64>, Status>;

    /// Whether the range may be accessed: by a pointer of these contents, within bounds, allocated,
    /// with the generation and tag of each page, in its space.
    ///
    /// # Errors
    /// The status of the first page that may not.
    fn check(&self, access: Access) -> Result<(), Status>;

    /// The bytes of an allocated page's part; `page` and `range` passed [`Self::check`].
    fn read(&self, page: u64, range: Range<usize>) -> &[u8];

    /// Overwrites a part of an allocated page and raises its version; `page` and the range that
    /// begins at `start` passed [`Self::check`].
    fn write(&mut self, page: u64, start: usize, data: &[u8]);

    /// Zeroes a part of an allocated page and raises its version.
    fn zero(&mut self, page: u64, range: Range<usize>);

    /// Counts the changes of an allocated page; never the same twice for different contents
    /// since [`Self::generation`] began.
    fn version(&self, page: u64) -> u64;

    /// Capacity, free pages, and what `space` uses of its quota.
    fn usage(&self, space: Space) -> StoreUsage;
}

/// How full a store is, in pages.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct StoreUsage {
    /// Pages in all.
    pub capacity_pages: u64,
    /// Pages that can be allocated: neither in an allocation nor unusable. Those of a large
    /// allocation must also lie together.
    pub free_pages: u64,
    /// Pages that the space may have; `u64::MAX` without a quota.
    pub quota_pages: u64,
    /// Pages that the space has.
    pub used_pages: u64,
    /// Pages that cannot be allocated because their colours are used up.
    pub retired_pages: u64,
}
