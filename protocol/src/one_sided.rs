//! READs of a server's memory by RDMA, of which its processor knows nothing: what a reader must see to use the bytes.
//!
//! A server has a record for each of its pages in memory that readers may READ ([`PageRecord`]). A reader fetches the
//! record, the page, and the record again. [`judge`] says whether the bytes are those that the page had at a moment
//! of this time; if there is any doubt, the reader sends a READ to the server instead.
//!
//! The specification of RDMA promises little about READs beside stores of the processor: not in which order the bytes of
//! a READ are fetched, and a device may fetch the bytes of several READs at the same time. A record has a check of its own
//! bytes, so one that was fetched in parts from two moments is not taken for a record; and it has the CRC of its page, to
//! tell bytes of another moment from those of the record. A record that passes was there, as a whole, while it was
//! fetched: its sequence has no value twice, and the check covers the sequence and the marks together.
//!
//! On devices that keep the order of READs, the two records differ if the page changed, and the CRC has nothing to find.
//! On others it does not find all, because it is linear: contents that end with their own CRC can be exchanged unseen.
//! `docs/rdma.md` says what is to be done about that before a server keeps records, and has the rules of the server.

use bluebridge_wire::{NodeId, Space};
use core::hash::Hasher;
use siphasher::sip::SipHasher13;

/// The bytes of a record. It does not cross a cache line if it is aligned to as many.
pub const RECORD_BYTES: usize = 32;

/// Bits of a page's number at its home: of the location without the offset and the generation.
const PAGE_BITS: u32 = 48;

/// The marks of a page. A page may be read if it has [`Marks::READABLE`] and no others.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Marks(u8);

impl Marks {
    /// Its memory has bytes of its own; without it, it reads as zeros.
    pub const WRITTEN: Self = Self(1);
    /// Its allocation is complete: others than its creator may know it.
    pub const COMPLETE: Self = Self(2);
    /// A client has a lease on it, or may have.
    pub const LEASED: Self = Self(4);
    /// Another server serves it, or may serve it.
    pub const ELSEWHERE: Self = Self(8);
    /// The marks of a page that may be read.
    pub const READABLE: Self = Self::WRITTEN.with(Self::COMPLETE);

    /// These and those.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// These without those.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether all of those are among these.
    #[must_use]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// Which page a pointer means, wherever it is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PageName {
    /// The space of the allocation.
    pub space: Space,
    /// The home node in the pointer.
    pub home: NodeId,
    /// The page's number at its home, of 48 bits.
    pub page: u64,
    /// The colour of the allocation: generation and tag.
    pub colour: u32,
}

/// The state of a page, as its server shows it to readers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PageRecord {
    /// Twice the page's version; odd while the page changes.
    pub sequence: u64,
    /// The CRC32C of the page's bytes.
    pub page_crc: u32,
    /// Which page it is.
    pub name: PageName,
    /// Its marks.
    pub marks: Marks,
}

impl PageRecord {
    /// The bytes, in four words that the server stores one by one: the sequence; CRC and check; home and number; colour,
    /// space and marks. In memory they are little-endian, whatever the order of the machine is.
    #[must_use]
    pub fn words(&self) -> [u64; RECORD_BYTES / 8] {
        let PageName { space, home, page, colour } = self.name;
        let place = u64::from(home.0) << PAGE_BITS | page & ((1 << PAGE_BITS) - 1);
        let rest = u64::from(colour) | u64::from(space.0) << 32 | u64::from(self.marks.0) << 48;
        let check = check(self.sequence, self.page_crc, place, rest);
        let checks = u64::from(self.page_crc) | u64::from(check) << 32;
        [self.sequence, checks, place, rest].map(u64::to_le)
    }

    /// The record that these bytes are; `None` if they are none, such as parts of two.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; RECORD_BYTES]) -> Option<Self> {
        let (words, _) = bytes.as_chunks();
        let [sequence, checks, place, rest] = *words else { return None };
        let [sequence, checks, place, rest] =
            [sequence, checks, place, rest].map(u64::from_le_bytes);
        #[expect(clippy::cast_possible_truncation, reason = "the parts of the words")]
        let (page_crc, colour, space, marks, home, unused) = (
            checks as u32,
            rest as u32,
            (rest >> 32) as u16,
            (rest >> 48) as u8,
            (place >> PAGE_BITS) as u16,
            (rest >> 56) as u8,
        );
        if unused != 0 || checks >> 32 != u64::from(check(sequence, page_crc, place, rest)) {
            return None;
        }
        let page = place & ((1 << PAGE_BITS) - 1);
        let name = PageName { space: Space(space), home: NodeId(home), page, colour };
        Some(Self { sequence, page_crc, name, marks: Marks(marks) })
    }
}

/// No CRC: the sum of two records and their difference would have the right one, and a CRC of the page is among the bytes.
fn check(sequence: u64, page_crc: u32, place: u64, rest: u64) -> u32 {
    let mut hasher = SipHasher13::new();
    for word in [sequence, u64::from(page_crc), place, rest] {
        hasher.write_u64(word);
    }
    #[expect(clippy::cast_possible_truncation, reason = "half of it is the check")]
    let check = hasher.finish() as u32;
    check
}

/// Why the server must be asked.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Doubt {
    /// The page changed, or its record has not the CRC of these bytes.
    #[error("the page changed meanwhile")]
    Changed,
    /// Another page is there: the allocation was freed, or the line is elsewhere.
    #[error("another page, or none, is there")]
    Name,
    /// It is leased, not complete, elsewhere, or reads as zeros.
    #[error("the page may not be read this way")]
    Marks,
    /// The first or second record is none.
    #[error("its record changed meanwhile, or has no CRC yet")]
    Record,
}

/// Says whether the bytes of a page may be used, and their version.
///
/// `before` and `after` are the record as it was fetched with the page, and `page_crc` computes the CRC32C of the page's
/// bytes, if that is still needed.
///
/// # Errors
/// With the reason why the server must be asked.
pub fn judge(
    wanted: &PageName,
    before: &[u8; RECORD_BYTES],
    after: &[u8; RECORD_BYTES],
    page_crc: impl FnOnce() -> u32,
) -> Result<u64, Doubt> {
    let record = PageRecord::from_bytes(before).ok_or(Doubt::Record)?;
    if record.sequence % 2 != 0 || before != after {
        return Err(Doubt::Changed);
    }
    if record.name != *wanted {
        return Err(Doubt::Name);
    }
    if record.marks != Marks::READABLE {
        return Err(Doubt::Marks);
    }
    if record.page_crc != page_crc() {
        return Err(Doubt::Changed);
    }
    Ok(record.sequence / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORD: PageRecord = PageRecord {
        sequence: 84,
        page_crc: 0x1234_5678,
        name: PageName {
            space: Space(7),
            home: NodeId(9),
            page: 0xabc_def0_1234,
            colour: 0x55aa_0102,
        },
        marks: Marks::READABLE,
    };

    fn bytes(record: &PageRecord) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        for (to, word) in bytes.chunks_exact_mut(8).zip(record.words()) {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    #[test]
    fn a_record_is_read_as_it_was_stored_and_no_changed_byte_passes() {
        let stored = bytes(&RECORD);
        assert_eq!(PageRecord::from_bytes(&stored), Some(RECORD));
        for at in 0..RECORD_BYTES * 8 {
            let mut changed = stored;
            changed[at / 8] ^= 1 << (at % 8);
            assert_eq!(PageRecord::from_bytes(&changed), None, "bit {at}");
        }
        assert_eq!(PageRecord::from_bytes(&[0; RECORD_BYTES]), None, "memory that is zero");
    }

    #[test]
    fn every_doubt_leads_to_the_server() {
        let crc = || RECORD.page_crc;
        let judged = |change: fn(&mut PageRecord)| {
            let mut record = RECORD;
            change(&mut record);
            let bytes = bytes(&record);
            judge(&RECORD.name, &bytes, &bytes, crc)
        };
        assert_eq!(judged(|_| {}), Ok(42));
        assert_eq!(judged(|it| it.sequence += 1), Err(Doubt::Changed));
        assert_eq!(judged(|it| it.page_crc += 1), Err(Doubt::Changed));
        assert_eq!(judged(|it| it.name.colour += 1), Err(Doubt::Name));
        assert_eq!(judged(|it| it.name.space.0 += 1), Err(Doubt::Name));
        assert_eq!(judged(|it| it.name.home.0 += 1), Err(Doubt::Name));
        assert_eq!(judged(|it| it.name.page += 1), Err(Doubt::Name));
        for without in [Marks::WRITTEN, Marks::COMPLETE] {
            let bytes = bytes(&PageRecord { marks: RECORD.marks.without(without), ..RECORD });
            assert_eq!(judge(&RECORD.name, &bytes, &bytes, crc), Err(Doubt::Marks));
        }
        assert_eq!(judged(|it| it.marks = it.marks.with(Marks::LEASED)), Err(Doubt::Marks));
        assert_eq!(judged(|it| it.marks = it.marks.with(Marks::ELSEWHERE)), Err(Doubt::Marks));
        let (one, two) = (bytes(&RECORD), bytes(&PageRecord { sequence: 86, ..RECORD }));
        assert_eq!(judge(&RECORD.name, &one, &two, crc), Err(Doubt::Changed));
        assert_eq!(judge(&RECORD.name, &[0; RECORD_BYTES], &one, crc), Err(Doubt::Record));
    }
}
