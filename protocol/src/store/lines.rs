//! The lines of a store, as migrations move them (`docs/migration.md`).

use core::ops::Range;

use bluebridge_wire::{
    ArenaGeneration, NodeId, Space, Status, address::LINE_PAGES, line::LineRecord,
};

use super::Access;

/// Pages of a shard from this one on, half of its addresses, are the places of other servers' lines. No pointer names
/// them; the [responder](crate::responder) finds them by the names that the lines have at home. A store does not have
/// the last page before them.
pub const ADOPTED_PAGES_FROM: u64 = 1 << 27;

/// Pages of the addresses of a shard. No range of a migration is longer.
pub const SHARD_PAGES_MAX: u64 = 2 * ADOPTED_PAGES_FROM;

/// The pages of a line without their bytes, as a migration takes them along.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Line {
    /// All pages, free ones too.
    pub pages: LineRecord,
    /// All allocations of it are complete ([`PageStore::complete`](super::PageStore::complete)).
    pub is_settled: bool,
}

/// The name of a line, for ever: where it was allocated.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct HomeLine {
    /// The home node.
    pub node: NodeId,
    /// The first generation of the home's contents; pointers may have later ones.
    pub generation: ArenaGeneration,
    /// Its first page there.
    pub first_page: u64,
}

/// The lease under which a line was taken from its giver.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Taken {
    /// The migration's id.
    pub migration: u64,
    /// The lease epoch that the giver granted.
    pub epoch: u64,
}

/// What a store holds of a line that is, or was, on its way.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Placed {
    /// It is complete here, and the giver was or will be asked whether it is this server's.
    Staged(HomeLine, Taken),
    /// A line of another server, which this one serves.
    Adopted(HomeLine),
    /// An own line that is another server's now.
    Given,
    /// A line of another server that this one served, and that is a third one's now.
    GivenOn(HomeLine),
}

/// The permission to take lines away, as the controller recorded the migration.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Allowance {
    /// The migration's id. A later migration has a higher one.
    pub migration: u64,
    /// The range epoch that the migration's requests name.
    pub range_epoch: u32,
    /// The pages of this server's store; whole lines.
    pub pages: Range<u64>,
    /// The space of their allocations.
    pub space: Space,
    /// The server that will serve them.
    pub taker: NodeId,
    /// The incarnation under which it asks for lines, also after a restart with its memory.
    pub taker_incarnation: u32,
}

/// The CRC32C of each page of a line, where it is known.
pub type PageCrcs = [Option<u32>; LINE_PAGES];

/// Why a line cannot be staged. The giver is at fault, or what it says belongs to other contents.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum StageError {
    /// The lease under which the line was taken has an epoch that no lease has.
    #[error("the line was taken under a lease epoch that no lease has")]
    Epoch,
    /// A line is staged there already. Until its giver has said whose it is, nothing else can be.
    #[error("a line is staged there already, and it is not known whose it is")]
    InDoubt,
    /// The place is not reserved, or has no memory.
    #[error("no memory is reserved for the line")]
    NoPlace,
    /// A page has a version, a space or a colour that it cannot have.
    #[error("page {0} of the line has a version, a space or a colour that it cannot have")]
    Page(usize),
    /// An own line comes back with other allocations than it had when it was given away.
    #[error("page {0} of the line belongs to another allocation than when it was given away")]
    Contradiction(usize),
    /// An own line comes back of which a page is free that was allocated when it was given away: the allocation was freed
    /// while this server was away, and the rest of it is to be freed here ([`LineStore::begin_freeing`]).
    #[error("page {0} of the line is of an allocation that was freed elsewhere")]
    FreedElsewhere(usize),
    /// An own line comes back that has a page of an allocation that is being freed. Try again when it is freed.
    #[error("page {0} of the line is of an allocation that is being freed")]
    BeingFreed(usize),
}

/// The part of a [`PageStore`](super::PageStore) that migrations use. Nothing here is on the path of a request,
/// except TAKE and KEEP.
///
/// A line is named by its first page in the store. If the store outlives its process, so do the states of lines, the
/// allowances and the lease floor, and each method here happens completely or not at all.
pub trait LineStore {
    /// The line that begins at a page; `None` if the store does not have all of it.
    fn line(&self, first_page: u64) -> Option<Line>;

    /// Allocates no page of the range from now on (`is_withheld`), because its lines are given to another server; or
    /// lets the free ones of them be allocated again, except those of lines that were given. The range consists of whole
    /// lines, and is withheld once at most.
    fn withhold(&mut self, pages: Range<u64>, is_withheld: bool);

    /// Records that a line is another server's from now on: the mark. Its bytes stay until [`Self::clear_given`]. Direct
    /// readers answer nothing for it until it is [adopted](Self::adopt) again, whatever becomes of leases on its pages.
    fn give(&mut self, first_page: u64);

    /// The memory of lines that were given may be used for others, because no reply needs it any more. Own lines stay
    /// given; the places of others' lines are free again.
    fn clear_given(&mut self, pages: Range<u64>);

    /// Reserves places and memory for lines of other servers; `None`, and nothing, if there is not enough of either.
    /// The places need not be adjacent.
    fn reserve(&mut self, lines: u32) -> Option<Vec<Range<u64>>>;

    /// Reserves memory for own lines that come back; returns false, and reserves nothing, if there is not enough, or
    /// if one of the lines was not given away and [cleared](Self::clear_given).
    fn reserve_own(&mut self, pages: Range<u64>) -> bool;

    /// Gives back what is reserved for these lines, except for those that are staged or adopted.
    fn release(&mut self, pages: Range<u64>);

    /// The memory of a line for which it is reserved, a page's bytes after the other's: what is read from the giver is
    /// written here. `None` if none is reserved, or if a line is staged there.
    fn memory(&mut self, first_page: u64) -> Option<&mut [u8]>;

    /// Stores the states of a line's pages; the bytes of the written ones are in its [memory](Self::memory), and `crcs`
    /// are theirs. Nobody is served from it yet. A line that is staged already is [adopted](Self::adopt) or
    /// [dropped](Self::drop_staged) first.
    ///
    /// # Errors
    /// [`StageError`]; the line is not staged.
    fn stage(
        &mut self,
        first_page: u64,
        name: (HomeLine, Taken),
        pages: &LineRecord,
        crcs: &PageCrcs,
    ) -> Result<(), StageError>;

    /// The giver said that a staged line is this server's, which serves it from now on.
    fn adopt(&mut self, first_page: u64);

    /// The giver said that a staged line is not this server's. Its place stays reserved.
    fn drop_staged(&mut self, first_page: u64);

    /// The pages of the allocation that begins at `access.location`, wherever they are: one of this server's own pages,
    /// or one of another server of which the first page is here. `pages` is its length, or 0 for any length.
    ///
    /// # Errors
    /// Those of [`PageStore::delete`](super::PageStore::delete).
    fn pages_of_allocation(&self, access: Access, pages: u32) -> Result<u32, Status>;

    /// Records that the allocation that begins at a page is being freed, of which parts are at other servers. It goes on
    /// until [`Self::end_freeing`], or until its first page is [freed](Self::free_part) if that is of another server.
    fn begin_freeing(&mut self, first_page: u64);

    /// Calls `each` for the allocations that are being freed, by their first pages here, with their lengths. The access
    /// has the generation, the tag and the space, and the place in this store.
    fn freeings(&self, each: &mut dyn FnMut(u64, Access, u32));

    /// Frees all own pages of an own allocation, also those that are elsewhere: there they were freed before, or lost.
    fn end_freeing(&mut self, first_page: u64);

    /// Frees pages of one line of another server, which are of one allocation. The memory of a line of which no page is
    /// allocated may be used for others; it stays this server's.
    fn free_part(&mut self, pages: Range<u64>);

    /// Whether no page of a line is allocated that is another server's, or an own one that was given away and
    /// [cleared](Self::clear_given).
    fn is_free(&self, first_page: u64) -> bool;

    /// Forgets such a line of another server, so that its place is free again; or goes on with such an own one.
    fn discard(&mut self, first_page: u64);

    /// Calls `each` for all lines that are, or were, on their way.
    fn placed(&self, each: &mut dyn FnMut(u64, Placed));

    /// Keeps an allowance, and whether it is open; of a kept one, only that changes. Returns false, and changes nothing,
    /// if there is no room for it.
    fn keep_allowance(&mut self, allowance: &Allowance, is_open: bool) -> bool;

    /// Forgets an allowance.
    fn forget_allowance(&mut self, migration: u64);

    /// Calls `each` for the kept allowances, with whether they are open.
    fn allowances(&self, each: &mut dyn FnMut(&Allowance, bool));

    /// The highest id of a migration whose allowance was ever kept.
    fn last_migration(&self) -> u64;

    /// All lease epochs that are granted from now on are above this one; 0 at first.
    fn lease_floor(&self) -> u64;

    /// Raises the floor of lease epochs; a lower value changes nothing.
    fn raise_lease_floor(&mut self, epoch: u64);
}
