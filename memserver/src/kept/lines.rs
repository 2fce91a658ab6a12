//! What a shard keeps of its lines: the memory that each has, where it belongs, and the permissions to give lines away.

use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::stores;
use crate::{memory::Table, sizes::Sizes};

/// A line's frame as it is kept: 0 if it was never changed, [`NO_FRAME`], or the frame's number and 1.
pub(crate) const DEFAULT_FRAME: u32 = 0;

/// The line has no memory.
pub(crate) const NO_FRAME: u32 = u32::MAX;

/// The most allowances that are kept.
pub(crate) const ALLOWANCES: usize = 64;

/// The state of a line, besides its pages.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct LineEntry {
    /// The migration with which it was staged.
    pub(crate) migration: u64,
    /// The lease epoch under which it was taken.
    pub(crate) epoch: u64,
    /// Its first page at home.
    pub(crate) first_page: u64,
    /// Its home.
    pub(crate) node: u16,
    /// The first generation of the home's contents.
    pub(crate) generation: u16,
    /// One of the constants; stored last.
    pub(crate) state: u32,
}

impl LineEntry {
    /// An own line that is here, or a place for another server's line that is not used.
    pub(crate) const DEFAULT: u32 = 0;
    /// It is complete, and the giver was or will be asked for it.
    pub(crate) const STAGED: u32 = 1;
    /// A line of another server that is served here.
    pub(crate) const ADOPTED: u32 = 2;
    /// It is another server's.
    pub(crate) const GIVEN: u32 = 3;
}

/// An allowance as it is kept.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct AllowanceRecord {
    pub(crate) migration: u64,
    pub(crate) first_page: u64,
    pub(crate) pages: u64,
    pub(crate) range_epoch: u32,
    pub(crate) taker_incarnation: u32,
    pub(crate) taker: u16,
    pub(crate) space: u16,
    /// One of the constants; stored last.
    pub(crate) state: u32,
}

impl AllowanceRecord {
    pub(crate) const NONE: u32 = 0;
    pub(crate) const OPEN: u32 = 1;
    pub(crate) const WITHDRAWN: u32 = 2;
}

/// Numbers that only grow. Each is stored before its copy, so a copy that is greater shows that the number is damaged; it
/// is 0 if only an earlier program, which made no copies, stored the number.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct Floors {
    /// Lease epochs are above it.
    pub(crate) lease: u64,
    /// The highest id of a migration that was ever allowed.
    pub(crate) migration: u64,
    pub(crate) lease_copy: u64,
    pub(crate) migration_copy: u64,
}

impl Floors {
    pub(crate) fn raise_lease(&mut self, to: u64) {
        raise((&mut self.lease, &mut self.lease_copy), to);
    }

    pub(crate) fn raise_migration(&mut self, to: u64) {
        raise((&mut self.migration, &mut self.migration_copy), to);
    }

    /// The first number, with its name, that is lower than it was.
    pub(crate) fn lowered(&self) -> Option<&'static str> {
        let Self { lease, migration, lease_copy, migration_copy } = *self;
        match (lease < lease_copy, migration < migration_copy) {
            (true, _) => Some("floor of lease epochs"),
            (_, true) => Some("last migration"),
            (false, false) => None,
        }
    }
}

fn raise((number, copy): (&mut u64, &mut u64), to: u64) {
    if *number < to {
        stores::set(number, to);
    }
    if *copy < *number {
        stores::set(copy, *number);
    }
}

/// The tables of one shard.
#[derive(Debug)]
pub(crate) struct LineTables {
    /// By line: own ones, then places for others.
    pub(crate) frames: Table<u32>,
    /// As `frames`. They are apart because each access needs a frame.
    pub(crate) entries: Table<LineEntry>,
    pub(crate) floors: Table<Floors>,
    pub(crate) allowances: Table<AllowanceRecord>,
}

impl LineTables {
    /// Tables that end with the process.
    pub(crate) fn heap(sizes: &Sizes) -> Self {
        Self {
            frames: Table::heap(sizes.lines()),
            entries: Table::heap(sizes.lines()),
            floors: Table::heap(1),
            allowances: Table::heap(ALLOWANCES),
        }
    }
}
