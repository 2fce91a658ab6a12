//! The pages that left recently.
//!
//! As in S3-FIFO (Yang et al., SOSP 2023), only fingerprints are stored: a page that never left is
//! taken for one that did with a probability of about 2^-28, which only costs a worse choice.

/// Entries that are searched for one page.
const BUCKET_LEN: usize = 4;

/// Bits of an entry's key that hold the number of returns.
const RETURNS_BITS: u32 = 2;

/// The highest number of returns that an entry can hold.
const RETURNS_MAX: u8 = (1 << RETURNS_BITS) - 1;

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    /// The fingerprint, and in the lowest bits the number of returns; 0 if the entry is free.
    key: u32,
    /// The time at which the page left.
    left: u32,
}

/// A page that came back.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ghost {
    /// How many pages left between the page's leaving and its return.
    pub(super) distance: u32,
    /// How often the page had returned before it left.
    pub(super) returns: u8,
}

/// Fingerprints of pages that left; 16 to 32 bytes for each page of the capacity.
#[derive(Debug)]
pub(super) struct Ghosts {
    /// The number of buckets is a power of two.
    buckets: Vec<[Entry; BUCKET_LEN]>,
    /// The number of pages that left; wraps.
    now: u32,
}

impl Ghosts {
    /// Remembers about the last `page_count` pages that left: there are twice as many entries, so
    /// that few buckets overflow.
    pub(super) fn new(page_count: usize) -> Self {
        let bucket_count = (page_count.saturating_mul(2) / BUCKET_LEN).max(4).next_power_of_two();
        Self { buckets: vec![[Entry::default(); BUCKET_LEN]; bucket_count], now: 0 }
    }

    /// Remembers a page that leaves, by the hash of its number.
    pub(super) fn insert(&mut self, hash: u64, returns: u8) {
        self.now = self.now.wrapping_add(1);
        let now = self.now;
        let fingerprint = fingerprint(hash);
        let Some(bucket) = self.bucket(hash) else { return };
        let same = bucket.iter().position(|entry| entry.key >> RETURNS_BITS == fingerprint);
        let oldest = |bucket: &[Entry]| {
            let age = |entry: &Entry| match entry.key {
                0 => u32::MAX,
                _ => now.wrapping_sub(entry.left),
            };
            (0..bucket.len()).max_by_key(|&place| bucket.get(place).map_or(0, age))
        };
        let Some(place) = same.or_else(|| oldest(bucket)) else { return };
        if let Some(entry) = bucket.get_mut(place) {
            let key = fingerprint << RETURNS_BITS | u32::from(returns.min(RETURNS_MAX));
            *entry = Entry { key, left: now };
        }
    }

    /// Takes the memory of a page.
    pub(super) fn take(&mut self, hash: u64) -> Option<Ghost> {
        let now = self.now;
        let fingerprint = fingerprint(hash);
        let bucket = self.bucket(hash)?;
        let entry = bucket.iter_mut().find(|entry| entry.key >> RETURNS_BITS == fingerprint)?;
        let Entry { key, left } = core::mem::take(entry);
        let returns = u8::try_from(key & u32::from(RETURNS_MAX)).unwrap_or(0);
        Some(Ghost { distance: now.wrapping_sub(left), returns })
    }

    fn bucket(&mut self, hash: u64) -> Option<&mut [Entry; BUCKET_LEN]> {
        let mask = self.buckets.len() - 1;
        let place = usize::try_from(hash & mask as u64).ok()?;
        self.buckets.get_mut(place)
    }
}

/// The highest 30 bits, which the choice of the bucket does not use; never 0.
fn fingerprint(hash: u64) -> u32 {
    u32::try_from(hash >> (32 + RETURNS_BITS)).map_or(1, |bits| bits.max(1))
}
