//! The map of a disk as it is kept in remote memory: a page of the disk's properties, then pages of the table of slabs.
//!
//! Numbers are big-endian. Each page ends with a CRC32C of its other bytes, and is written as a whole.
//!
//! ```text
//! properties                      a page of the table
//! 0    "bbdisk\0\1"               0    "bbtable\1"
//! 8    id of the disk             8    id of the disk
//! 16   owner's number             16   owner's number
//! 24   size in bytes              24   number of the page, from 0
//! 32   bytes of a slab            32   a slab that is to be freed, or zeroes
//! 40   placement                  48   252 pointers to slabs, or zeroes
//! 41   1: the disk is deleted
//! 42   1: the owner has ended, and nothing of it is in flight
//! 43   length of the name
//! 44   for how long an owner may go on, in milliseconds
//! 48   name
//! 304  the owner's node, or 0
//! 4092 CRC32C                     4092 CRC32C
//! ```

use std::net::Ipv6Addr;
use std::time::Duration;

use bluebridge::Pointer;

use super::{Placement, SLAB_BYTES_MAX, SLAB_BYTES_MIN};
use crate::nbd::NAME_BYTES_MAX;

/// Bytes of a page.
pub(crate) const PAGE_BYTES: usize = 4096;
/// Pointers in a page of the table.
pub(crate) const ENTRIES: usize = 252;

const DISK_MAGIC: [u8; 8] = *b"bbdisk\0\x01";
const TABLE_MAGIC: [u8; 8] = *b"bbtable\x01";
const CRC_AT: usize = PAGE_BYTES - 4;
const FREEING_AT: usize = 32;
const ENTRIES_AT: usize = 48;
const POINTER_BYTES: usize = 16;
const NAME_AT: usize = 48;
const NODE_AT: usize = NAME_AT + 256;
/// A lease has at most as many milliseconds as UPDATE can say.
pub(crate) const LEASE_MAX: Duration = Duration::from_millis(u16::MAX as u64);

pub(crate) type Page = [u8; PAGE_BYTES];

/// What memory at a pointer is, if it is no map of a disk that this version understands.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MapError {
    /// A page's check fails.
    #[error("the page {page} of the disk's map is damaged (its CRC does not match)")]
    Damaged {
        /// Its number; 0 is that of the properties.
        page: u64,
    },
    /// The disk is half deleted.
    #[error("the disk is being deleted; finish with `bluebridge disk delete`")]
    Deleted,
    /// There is something else.
    #[error("no disk is there; use the pointer that `bluebridge disk` printed")]
    NoDisk,
    /// A number of the properties is impossible.
    #[error("the disk's map has impossible properties; it may be of a newer version")]
    Properties,
    /// A page belongs to another disk or place.
    #[error("the page {page} of the disk's map belongs to another place")]
    Misplaced {
        /// Its number.
        page: u64,
    },
}

/// The properties of a disk.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Properties {
    /// Distinguishes disks whose maps were at the same place.
    pub(crate) id: u64,
    /// The number of the process that serves it: each attaching counts one up.
    pub(crate) owner: u64,
    pub(crate) size_bytes: u64,
    pub(crate) slab_bytes: u64,
    pub(crate) placement: Placement,
    pub(crate) is_deleted: bool,
    /// The last owner has ended, and none of its requests is in flight.
    pub(crate) has_ended: bool,
    /// For how long an owner whose end is unknown may trust its lease, counted from the next owner's COMMIT.
    pub(crate) lease: Duration,
    pub(crate) name: Box<str>,
    /// The node of the owner. A newer process of it is certainly the only one.
    pub(crate) node: u16,
}

impl Properties {
    pub(crate) fn slab_count(&self) -> u64 {
        self.size_bytes.div_ceil(self.slab_bytes)
    }

    pub(crate) fn table_pages(&self) -> u64 {
        self.slab_count().div_ceil(ENTRIES as u64)
    }

    /// Bytes of the whole map.
    pub(crate) fn map_bytes(&self) -> u64 {
        (1 + self.table_pages()) * PAGE_BYTES as u64
    }

    pub(crate) fn encode(&self) -> Page {
        let mut page = [0; PAGE_BYTES];
        page[..8].copy_from_slice(&DISK_MAGIC);
        put_u64(&mut page, 8, self.id);
        put_u64(&mut page, 16, self.owner);
        put_u64(&mut page, 24, self.size_bytes);
        put_u64(&mut page, 32, self.slab_bytes);
        page[40] = self.placement.code();
        page[41] = self.is_deleted.into();
        page[42] = self.has_ended.into();
        let name = self.name.as_bytes();
        let length = name.len().min(NAME_BYTES_MAX);
        page[43] = u8::try_from(length).unwrap_or(0);
        let lease = self.lease.min(LEASE_MAX).as_nanos().div_ceil(1_000_000);
        page[44..48].copy_from_slice(&u32::try_from(lease).unwrap_or(u32::MAX).to_be_bytes());
        page[NAME_AT..NAME_AT + length].copy_from_slice(&name[..length]);
        page[NODE_AT..NODE_AT + 2].copy_from_slice(&self.node.to_be_bytes());
        seal(&mut page);
        page
    }

    /// # Errors
    /// [`MapError`].
    pub(crate) fn decode(page: &Page) -> Result<Self, MapError> {
        if page[..8] != DISK_MAGIC {
            return Err(MapError::NoDisk);
        }
        if !is_sealed(page) {
            return Err(MapError::Damaged { page: 0 });
        }
        let length = usize::from(page[43]);
        let mut lease = [0; 4];
        lease.copy_from_slice(&page[44..48]);
        let name = std::str::from_utf8(&page[NAME_AT..NAME_AT + length]);
        let properties = Self {
            id: get_u64(page, 8),
            owner: get_u64(page, 16),
            size_bytes: get_u64(page, 24),
            slab_bytes: get_u64(page, 32),
            placement: Placement::of_code(page[40]).ok_or(MapError::Properties)?,
            is_deleted: page[41] != 0,
            has_ended: page[42] != 0,
            lease: Duration::from_millis(u32::from_be_bytes(lease).into()),
            name: name.map_err(|_| MapError::Properties)?.into(),
            node: u16::from_be_bytes([page[NODE_AT], page[NODE_AT + 1]]),
        };
        let is_possible = properties.size_bytes > 0
            && properties.slab_bytes.is_power_of_two()
            && (SLAB_BYTES_MIN..=SLAB_BYTES_MAX).contains(&properties.slab_bytes)
            && properties.slab_count() <= super::SLABS_MAX
            && properties.lease <= LEASE_MAX;
        if is_possible { Ok(properties) } else { Err(MapError::Properties) }
    }
}

/// A page of the table.
#[derive(Clone, Debug)]
pub(crate) struct TablePage(Page);

impl TablePage {
    /// A page without slabs.
    pub(crate) fn empty(id: u64, owner: u64, number: u64) -> Self {
        let mut page = [0; PAGE_BYTES];
        page[..8].copy_from_slice(&TABLE_MAGIC);
        put_u64(&mut page, 8, id);
        put_u64(&mut page, 16, owner);
        put_u64(&mut page, 24, number);
        seal(&mut page);
        Self(page)
    }

    /// # Errors
    /// [`MapError`], if it is not the page with this number of the disk.
    pub(crate) fn decode(page: Page, id: u64, number: u64) -> Result<Self, MapError> {
        if page[..8] != TABLE_MAGIC || !is_sealed(&page) {
            return Err(MapError::Damaged { page: number + 1 });
        }
        if (get_u64(&page, 8), get_u64(&page, 24)) != (id, number) {
            return Err(MapError::Misplaced { page: number + 1 });
        }
        Ok(Self(page))
    }

    pub(crate) fn owner(&self) -> u64 {
        get_u64(&self.0, 16)
    }

    pub(crate) fn set_owner(&mut self, owner: u64) {
        put_u64(&mut self.0, 16, owner);
    }

    /// The slab with this number in the page.
    pub(crate) fn slab(&self, entry: usize) -> Option<Pointer> {
        get_pointer(&self.0, ENTRIES_AT + entry * POINTER_BYTES)
    }

    pub(crate) fn set_slab(&mut self, entry: usize, slab: Option<Pointer>) {
        put_pointer(&mut self.0, ENTRIES_AT + entry * POINTER_BYTES, slab);
    }

    /// The slab that is to be freed, or was freed last.
    pub(crate) fn freeing(&self) -> Option<Pointer> {
        get_pointer(&self.0, FREEING_AT)
    }

    pub(crate) fn set_freeing(&mut self, slab: Option<Pointer>) {
        put_pointer(&mut self.0, FREEING_AT, slab);
    }

    /// The bytes, with their check.
    pub(crate) fn sealed(mut self) -> Page {
        seal(&mut self.0);
        self.0
    }
}

fn get_u64(page: &Page, at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&page[at..at + 8]);
    u64::from_be_bytes(bytes)
}

fn put_u64(page: &mut Page, at: usize, number: u64) {
    page[at..at + 8].copy_from_slice(&number.to_be_bytes());
}

fn get_pointer(page: &Page, at: usize) -> Option<Pointer> {
    let mut octets = [0; POINTER_BYTES];
    octets.copy_from_slice(&page[at..at + POINTER_BYTES]);
    Pointer::from_ipv6(Ipv6Addr::from(octets)).ok()
}

fn put_pointer(page: &mut Page, at: usize, pointer: Option<Pointer>) {
    let octets = pointer.map_or([0; POINTER_BYTES], |pointer| pointer.to_ipv6().octets());
    page[at..at + POINTER_BYTES].copy_from_slice(&octets);
}

fn crc(page: &Page) -> [u8; 4] {
    crc_fast::crc32_iscsi(&page[..CRC_AT]).to_be_bytes()
}

fn seal(page: &mut Page) {
    let crc = crc(page);
    page[CRC_AT..].copy_from_slice(&crc);
}

fn is_sealed(page: &Page) -> bool {
    page[CRC_AT..] == crc(page)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn properties() -> Properties {
        Properties {
            id: 7,
            owner: 3,
            size_bytes: (1 << 40) + 1,
            slab_bytes: 16 << 20,
            placement: Placement::Striped,
            is_deleted: false,
            has_ended: true,
            lease: Duration::from_millis(4321),
            name: "swap of worker-7".into(),
            node: 513,
        }
    }

    fn pointer(text: &str) -> Pointer {
        text.parse().expect("a pointer")
    }

    #[test]
    fn properties_are_read_as_they_were_written() {
        let properties = properties();
        assert_eq!(properties.slab_count(), 65_537);
        assert_eq!(properties.table_pages(), 261);
        assert_eq!(Properties::decode(&properties.encode()), Ok(properties.clone()));
        let longest = Properties { name: "x".repeat(NAME_BYTES_MAX).into(), ..properties.clone() };
        assert_eq!(Properties::decode(&longest.encode()), Ok(longest));
        for wrong in [
            Properties { size_bytes: 0, ..properties.clone() },
            Properties { slab_bytes: 0, ..properties.clone() },
            Properties { slab_bytes: 3 << 20, ..properties.clone() },
            Properties { slab_bytes: 1 << 40, ..properties.clone() },
            Properties { size_bytes: u64::MAX, ..properties },
        ] {
            assert_eq!(Properties::decode(&wrong.encode()), Err(MapError::Properties));
        }
        assert_eq!(Properties::decode(&[0; PAGE_BYTES]), Err(MapError::NoDisk));
        let rounded = Properties { lease: Duration::from_micros(1500), ..self::properties() };
        let decoded = Properties::decode(&rounded.encode()).expect("it is possible");
        assert_eq!(decoded.lease, Duration::from_millis(2), "never shorter");
    }

    #[test]
    fn a_page_of_the_table_is_that_of_its_disk_and_place() {
        let slabs = [pointer("fdbb:1:2:1:1ebb::"), pointer("fdbb:1:3:7f:1ebb::7000")];
        let mut page = TablePage::empty(7, 3, 5);
        assert_eq!((page.slab(0), page.slab(ENTRIES - 1), page.freeing()), (None, None, None));
        page.set_slab(0, Some(slabs[0]));
        page.set_slab(ENTRIES - 1, Some(slabs[1]));
        page.set_freeing(Some(slabs[1]));
        page.set_owner(4);
        let bytes = page.sealed();
        let page = TablePage::decode(bytes, 7, 5).expect("it is whole");
        assert_eq!((page.slab(0), page.slab(1)), (Some(slabs[0]), None));
        assert_eq!((page.slab(ENTRIES - 1), page.freeing()), (Some(slabs[1]), Some(slabs[1])));
        assert_eq!(page.owner(), 4);
        for (id, number) in [(8, 5), (7, 6)] {
            let error = TablePage::decode(bytes, id, number).expect_err("it is another one");
            assert_eq!(error, MapError::Misplaced { page: number + 1 });
        }
    }

    proptest! {
        #[test]
        fn any_damage_is_seen(at in 0..PAGE_BYTES, change in 1_u8..) {
            let mut page = properties().encode();
            page[at] ^= change;
            prop_assert!(Properties::decode(&page).is_err());
            let mut page = TablePage::empty(1, 2, 3).sealed();
            page[at] ^= change;
            prop_assert!(TablePage::decode(page, 1, 3).is_err());
        }

        /// Only possible properties are accepted, and they are read as they are there.
        #[test]
        fn only_possible_properties_are_read(
            size_bytes in prop_oneof![0..1_u64 << 36, any::<u64>()],
            slab_exponent in 18..29_u32,
            placement in 0..4_u8,
            lease in prop_oneof![0..70_000_u32, any::<u32>()],
        ) {
            let mut page = properties().encode();
            put_u64(&mut page, 24, size_bytes);
            put_u64(&mut page, 32, 1 << slab_exponent);
            page[40] = placement;
            page[44..48].copy_from_slice(&lease.to_be_bytes());
            // The check is that of the other properties.
            prop_assert_eq!(Properties::decode(&page), Err(MapError::Damaged { page: 0 }));
            seal(&mut page);
            let is_possible = size_bytes > 0
                && (20..=26).contains(&slab_exponent)
                && size_bytes.div_ceil(1 << slab_exponent) <= crate::device::SLABS_MAX
                && placement < 3
                && lease <= 65_535;
            match Properties::decode(&page) {
                Ok(found) => {
                    prop_assert!(is_possible);
                    prop_assert_eq!(found.encode(), page);
                }
                Err(error) => prop_assert!(!is_possible && error == MapError::Properties),
            }
        }
    }
}
