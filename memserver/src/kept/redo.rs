//! The redo record: the change under way, complete before the first of its stores.
//!
//! Its kind is stored last and cleared first. A process that takes over and finds a kind repeats the
//! change, which must therefore contain final values only: a new sequence, not an increment.
//!
//! Beside the kind, in the same word, is a check of the whole record, the new bytes included. A record without one is
//! that of an earlier program. A record that is complete loses a number without which it is none, so that a kind which
//! appears by damage is refused, too.

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

/// The kind is in the lower bits of its word, and the check of the record in the others.
const KIND_BITS: u32 = 8;

const KIND: u32 = (1 << KIND_BITS) - 1;

/// As many parts as no change has.
const NO_PARTS: u32 = u32::MAX;

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
    /// One of the constants, and the check.
    kind: u32,
    part_count: u32,
}

impl Head {
    /// What stands in `kind` for a record that is complete.
    fn sealed(&self, kind: u32, data: &[u8]) -> u32 {
        let mut hash = mixed(u64::from(kind), self.part_count.into());
        if kind == PAGES {
            let count = usize::try_from(self.part_count).unwrap_or(usize::MAX);
            let parts = self.parts.get(..count).unwrap_or_default();
            hash = hash_of(hash, parts.as_bytes());
            let bytes = parts.iter().map(PagePart::data_bytes).sum();
            hash = mixed(hash, sum_of(data.get(..bytes).unwrap_or_default()));
        } else {
            hash = hash_of(hash, self.extent.as_bytes());
        }
        let check = u32::try_from(hash >> (32 + KIND_BITS)).unwrap_or(0).max(1);
        check << KIND_BITS | kind
    }
}

/// Mixes a word into a hash: each bit of both has an effect on the upper bits.
const fn mixed(hash: u64, word: u64) -> u64 {
    // Odd, so that no two words become the same.
    let product = (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    product ^ product >> 32
}

fn hash_of(hash: u64, bytes: &[u8]) -> u64 {
    words_of(bytes).fold(hash, mixed)
}

/// The sums of the words at each of eight places of a block, mixed. Sums are fast enough for the new bytes of every
/// change, and every damage of a single word shows; words that changed places with others eight further on do not.
fn sum_of(bytes: &[u8]) -> u64 {
    let (blocks, rest) = bytes.as_chunks::<64>();
    let mut sums = [0_u64; 8];
    for block in blocks {
        let (words, _) = block.as_chunks::<8>();
        for (sum, word) in sums.iter_mut().zip(words) {
            *sum = sum.wrapping_add(u64::from_ne_bytes(*word));
        }
    }
    let sum = sums.into_iter().fold(0, mixed);
    hash_of(sum, rest)
}

/// The words of these bytes; zeros fill the last one up.
fn words_of(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.chunks(8).map(|chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_ne_bytes(word)
    })
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
        stores::set(&mut head.part_count, u32::try_from(parts.len()).unwrap_or(NO_PARTS));
        let sealed = head.sealed(PAGES, &self.data);
        stores::set_in_order(&mut head.kind, sealed);
    }

    /// Records an allocation or a deletion.
    pub(crate) fn begin_extent(&mut self, kind: u32, extent: Extent) {
        let [head] = self.head.as_mut() else { return };
        stores::set(&mut head.extent, extent);
        let sealed = head.sealed(kind, &[]);
        stores::set_in_order(&mut head.kind, sealed);
    }

    /// The change is complete.
    pub(crate) fn end(&mut self) {
        let [head] = self.head.as_mut() else { return };
        let was_of_pages = head.kind & KIND == PAGES;
        stores::set_in_order(&mut head.kind, NONE);
        match was_of_pages {
            true => stores::set(&mut head.part_count, NO_PARTS),
            false => stores::set(&mut head.extent.pages, 0),
        }
    }

    /// The change that was under way; `Err` if the record is none that this program writes.
    pub(crate) fn pending(&self) -> Result<Option<Pending<'_>>, ()> {
        let [head] = &*self.head else { return Err(()) };
        if head.kind > KIND && head.kind != head.sealed(head.kind & KIND, &self.data) {
            return Err(());
        }
        match head.kind & KIND {
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
