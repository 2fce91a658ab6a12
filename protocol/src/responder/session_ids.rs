//! Session ids that cannot be computed from other ids.

use std::hash::Hasher as _;

use siphasher::sip::SipHasher24;

/// Draws session ids: a counter under SipHash-2-4 (Aumasson and Bernstein, 2012). Without the key, ids say nothing
/// about each other, so a client with some sessions cannot compute the ids of others.
#[derive(Clone, Debug)]
pub(super) struct SessionIds {
    key: [u64; 2],
    drawn_count: u64,
}

impl SessionIds {
    /// The secret part of the key is the seed; the same seed gives the same ids.
    pub(super) const fn new(seed: u64) -> Self {
        Self { key: [seed, !seed.rotate_left(32)], drawn_count: 0 }
    }

    /// An id that was not used before, with overwhelming probability also not by a server that ran earlier: 48 bits
    /// of the hash above the slot.
    pub(super) fn draw(&mut self, slot: u16) -> u64 {
        loop {
            self.drawn_count = self.drawn_count.wrapping_add(1);
            let hash = keyed_hash(self.key, self.drawn_count);
            if hash >> 16 != 0 {
                return (hash & !0xffff) | u64::from(slot);
            }
        }
    }
}

/// SipHash-2-4 of a number as eight bytes, little-endian.
fn keyed_hash([low, high]: [u64; 2], number: u64) -> u64 {
    let mut hasher = SipHasher24::new_with_keys(low, high);
    hasher.write(&number.to_le_bytes());
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use std::hash::Hasher;

    use super::*;

    #[test]
    #[expect(deprecated, reason = "the standard library's SipHash-2-4 with keys")]
    fn ids_are_a_counter_under_a_keyed_hash() {
        let mut ids = SessionIds::new(0x0123_4567_89ab_cdef);
        let [low, high] = ids.key;
        for count in 1..1000_u64 {
            let mut hasher = std::hash::SipHasher::new_with_keys(low, high);
            hasher.write(&count.to_le_bytes());
            assert_eq!(ids.draw(7), (hasher.finish() & !0xffff) | 7, "{count}");
        }
    }

    /// The reference vector of the paper's authors for the key 00 01 .. 0f and the message 00 01 .. 07.
    #[test]
    fn the_hash_is_that_of_the_reference() {
        let key = [0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908];
        assert_eq!(keyed_hash(key, 0x0706_0504_0302_0100), 0x93f5_f579_9a93_2462);
    }

    #[test]
    fn a_seed_determines_the_ids_and_another_one_gives_others() {
        let draw = |seed| {
            let mut ids = SessionIds::new(seed);
            [(); 100].map(|()| ids.draw(0))
        };
        assert_eq!(draw(1), draw(1));
        let mut all: Vec<_> = [0, 1, 2, u64::MAX].into_iter().flat_map(draw).collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 400);
    }
}
