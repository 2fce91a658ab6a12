//! READs by RDMA beside a server that changes its pages, simulated.
//!
//! The server is one thread, and each of its stores of up to eight bytes is a step. A device fetches the bytes of a
//! chain of READs - record, page, record - in pieces, each at a moment of its own, while the server goes on ([`fabric`]).
//! Before the first piece and after the last the reader's time begins and ends. What it accepts must be what the page
//! had at a moment of that time.
//!
//! Pages are of 32 bytes, and a sum of 32 bits stands for their CRC.

pub(crate) mod fabric;
pub(crate) mod reader;
pub(crate) mod world;

/// A deliberate mistake. The comment says whose.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Mutant {
    /// Reader: the record is not checked against its check.
    CheckIgnored,
    /// Reader: the page is not checked against its CRC.
    CrcIgnored,
    /// Reader: the second record is not compared.
    RecordOnce,
    /// Reader: of the second record, only that it is a valid one counts.
    VersionIgnored,
    /// Reader: both records are fetched after the page.
    PageFirst,
    /// Reader: a page that is just being changed is taken.
    OddIgnored,
    /// Reader: the colour is not compared.
    ColourIgnored,
    /// Reader: the space is not compared.
    SpaceIgnored,
    /// Reader: the home and the page's number are not compared.
    PlaceIgnored,
    /// Reader: the mark of a lease is ignored.
    LeaseIgnored,
    /// Reader: the mark that the page is elsewhere is ignored.
    ElsewhereIgnored,
    /// Reader: allocations that are not complete are read.
    IncompleteIgnored,
    /// Reader: the bytes of a page that reads as zeros are taken.
    UnwrittenIgnored,
    /// Server: the owner of a lease is told before the mark is stored.
    MarkAfterGrant,
    /// Server: another server gets the page before the mark is stored.
    MarkAfterGive,
    /// Server: the sequence is even again before all bytes are stored.
    EvenBeforeBytes,
    /// Server: the memory of a page that is elsewhere is used again under the same sequence.
    ReusedWithoutSequence,
    /// Server: a page that comes back loses its mark before its bytes are stored.
    ClearedBeforeStored,
}

impl Mutant {
    pub(crate) const ALL: [Self; 18] = [
        Self::CheckIgnored,
        Self::CrcIgnored,
        Self::RecordOnce,
        Self::VersionIgnored,
        Self::PageFirst,
        Self::OddIgnored,
        Self::ColourIgnored,
        Self::SpaceIgnored,
        Self::PlaceIgnored,
        Self::LeaseIgnored,
        Self::ElsewhereIgnored,
        Self::IncompleteIgnored,
        Self::UnwrittenIgnored,
        Self::MarkAfterGrant,
        Self::MarkAfterGive,
        Self::EvenBeforeBytes,
        Self::ReusedWithoutSequence,
        Self::ClearedBeforeStored,
    ];
}

/// What a reader relies on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Rule {
    /// The check and the CRC, and the records as a precaution: the rule of `bluebridge_protocol::one_sided`.
    Checked,
    /// The records alone, as a sequence lock.
    SequenceLock,
}

/// A simulation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scenario {
    pub(crate) rule: Rule,
    pub(crate) order: fabric::Order,
    pub(crate) mutant: Option<Mutant>,
    pub(crate) seed: u64,
}

impl Scenario {
    pub(crate) fn has(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }
}

/// What was seen.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) reads: u64,
    pub(crate) accepted: u64,
    /// READs during which the page's bytes were changed.
    pub(crate) torn: u64,
    /// READs whose record was put together from two moments.
    pub(crate) torn_records: u64,
    /// READs that only the CRC refused.
    pub(crate) refused_by_crc: u64,
}

/// Does so many READs, or fewer if one is wrong: then with what was accepted.
pub(crate) fn run(scenario: Scenario, reads: u64) -> Result<Seen, String> {
    let mut world = world::World::new(scenario);
    let mut seen = Seen::default();
    for _ in 0..reads {
        reader::read(&scenario, &mut world, &mut seen)?;
    }
    Ok(seen)
}

/// Numbers that look random (SplitMix64).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `end`, which is small.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        ((self.next() >> 32) * end) >> 32
    }

    pub(crate) fn one_of(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }

    pub(crate) fn shuffle<T>(&mut self, all: &mut [T]) {
        for at in (1..all.len()).rev() {
            all.swap(at, usize::try_from(self.below(at as u64 + 1)).expect("small"));
        }
    }
}

pub(crate) fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}
