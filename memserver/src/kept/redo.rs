//! The redo record: the change under way, complete before the first of its stores.
//!
//! Its kind is stored last and cleared first. A process that takes over and finds a kind repeats the
//! change, which must therefore contain final values only: a new sequence, not an increment.

use bluebridge_wire::address::{LINE_BYTES, LINE_PAGES};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::stores;
use crate::memory::Table;

/// Nothing is under way.
pub(crate) const NONE: u32 = 0;
/// Pages are written or zeroed.
pub(crate) const PAGES: u32 = 1;
/// An extent is allocated.
pub(crate) const CREATE: u32 = 2;
/// An extent is freed.
pub(crate) const DELETE: u32 = 3;

/// One page's part of a change.
#[derive(
    Clone, Copy, Debug, Default, Eq, PartialEq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub(crate) struct PagePart {
    /// The sequence afterwards.
    pub(crate) sequence: u64,
    /// The page's number in the shard.
    pub(crate) number: u32,
    /// The first byte in the page.
    pub(crate) start: u16,
    /// Bytes, at most a page's.
    pub(crate) bytes: u16,
    /// What the page contains before the change.
    pub(crate) contents: u8,
    /// Whether the bytes become zeros instead of those in the record.
    pub(crate) is_zero: u8,
    pub(crate) unused: [u8; 6],
}

impl PagePart {
    /// Its bytes in the record.
    pub(crate) const fn data_bytes(&self) -> usize {
        if self.is_zero == 0 { self.bytes as usize } else { 0 }
    }
}

/// An extent that is allocated or freed.
#[derive(
    Clone, Copy, Debug, Default, Eq, PartialEq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub(crate) struct Extent {
    /// The sequence of all its pages afterwards.
    pub(crate) sequence: u64,
    /// Colours that its space has used afterwards.
    pub(crate) worn: u64,
    /// The first page's number in the shard.
    pub(crate) start: u32,
    /// Pages.
    pub(crate) pages: u32,
    /// The colour of all its pages.
    pub(crate) colour: u32,
    /// The space's place in the table of worn colours; beyond it if the space has none.
    pub(crate) place: u16,
    /// The space.
    pub(crate) space: u16,
}

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Head {
    extent: Extent,
    parts: [PagePart; LINE_PAGES],
    kind: u32,
    part_count: u32,
}

/// Bytes of a record in kept memory.
pub(crate) const RECORD_BYTES: usize = size_of::<Head>() + LINE_BYTES;

/// The record of one shard.
#[derive(Debug)]
pub(crate) struct RedoRecord {
    pub(crate) head: Table<Head>,
    /// The new bytes of the parts, one after the other.
    pub(crate) data: Table<u8>,
}

/// A change that a process did not complete.
#[derive(Debug)]
pub(crate) enum Pending<'a> {
    /// Pages, each with its new bytes; none for zeros.
    Pages(&'a [PagePart], &'a [u8]),
    /// An allocation.
    Create(Extent),
    /// A deletion.
    Delete(Extent),
}

impl RedoRecord {
    /// Records a change of pages. `data` has the new bytes of those that do not become zeros.
    pub(crate) fn begin_pages<'a>(
        &mut self,
        parts: &[PagePart],
        data: impl Iterator<Item = &'a [u8]>,
    ) {
        let [head] = self.head.as_mut() else { return };
        let mut rest = self.data.as_mut();
        for data in data {
            let Some((to, after)) = rest.split_at_mut_checked(data.len()) else { return };
            stores::copy(to, data);
            rest = after;
        }
        for (to, part) in head.parts.iter_mut().zip(parts) {
            stores::set(to, *part);
        }
        stores::set(&mut head.part_count, u32::try_from(parts.len()).unwrap_or(u32::MAX));
        stores::set_in_order(&mut head.kind, PAGES);
    }

    /// Records an allocation or a deletion.
    pub(crate) fn begin_extent(&mut self, kind: u32, extent: Extent) {
        let [head] = self.head.as_mut() else { return };
        stores::set(&mut head.extent, extent);
        stores::set_in_order(&mut head.kind, kind);
    }

    /// The change is complete.
    pub(crate) fn end(&mut self) {
        let [head] = self.head.as_mut() else { return };
        stores::set_in_order(&mut head.kind, NONE);
    }

    /// The change that was under way; `Err` if the record is none that this program writes.
    pub(crate) fn pending(&self) -> Result<Option<Pending<'_>>, ()> {
        let [head] = &*self.head else { return Err(()) };
        match head.kind {
            NONE => Ok(None),
            PAGES => {
                let count = usize::try_from(head.part_count).unwrap_or(usize::MAX);
                let parts = head.parts.get(..count).ok_or(())?;
                Ok(Some(Pending::Pages(parts, &self.data)))
            }
            CREATE => Ok(Some(Pending::Create(head.extent))),
            DELETE => Ok(Some(Pending::Delete(head.extent))),
            _ => Err(()),
        }
    }
}
