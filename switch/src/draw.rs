//! Seeded draws and the anycast choice: arithmetic that is bit-identical in both data planes.
//!
//! `switch/bpf/pipeline.h` has the same functions in C; the packet vectors test them.

use bluebridge_p4::pipeline::{SwitchPort, WeightedForward};

use crate::dataplane::ANYCAST_SLOTS;

pub(crate) const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The finalizer of `SplitMix64`: every input bit reaches every output bit.
const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A `SplitMix64` generator: one addition per draw, so that kernel programs on several cores can share
/// the state with an atomic addition.
#[derive(Clone, Debug)]
pub(crate) struct Draw {
    state: u64,
}

impl Draw {
    /// The generator of a port.
    pub(crate) const fn new(seed: u64, port: SwitchPort) -> Self {
        Self { state: mix(seed ^ ((port.0 as u64) << 48)) }
    }

    /// The state before the next draw.
    pub(crate) const fn state(&self) -> u64 {
        self.state
    }

    /// The next 64 bits.
    pub(crate) const fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(GOLDEN);
        mix(self.state)
    }

    /// True with a probability of `threshold` in 2^32.
    pub(crate) const fn chance(&mut self, threshold: u64) -> bool {
        threshold != 0 && (self.next() >> 32) < threshold
    }
}

/// A share (0.0 to 1.0) as a threshold of 2^32 for [`Draw::chance`].
#[expect(clippy::cast_possible_truncation, reason = "the product is at most 2^32")]
#[expect(clippy::cast_sign_loss, reason = "shares are checked to be at least 0")]
pub(crate) fn threshold(share: f64) -> u64 {
    (share * 4_294_967_296.0) as u64
}

/// The slot of an anycast choice: a hash of the source's node and location.
///
/// `mix(location + node * 0x9e3779b97f4a7c15)`, its low 8 bits.
#[must_use]
pub(crate) const fn anycast_slot(src_node: u16, src_location: u64) -> u8 {
    let hash = mix(src_location.wrapping_add((src_node as u64).wrapping_mul(GOLDEN)));
    hash.to_be_bytes()[7]
}

/// The member of each slot: shares by weight, at least one slot each, members in order.
///
/// The largest remainders get the remaining slots; on a tie the earlier member wins.
#[must_use]
pub(crate) fn anycast_slots(members: &[WeightedForward]) -> [u8; ANYCAST_SLOTS] {
    let total: usize = members.iter().map(|m| usize::from(m.weight)).sum::<usize>().max(1);
    let spare = ANYCAST_SLOTS.saturating_sub(members.len());
    let share = |m: &WeightedForward| usize::from(m.weight) * spare;
    let mut counts: Vec<usize> = members.iter().map(|m| 1 + share(m) / total).collect();
    let mut order: Vec<usize> = (0..members.len()).collect();
    order.sort_by_key(|&i| core::cmp::Reverse(share(&members[i]) % total));
    let left = ANYCAST_SLOTS.saturating_sub(counts.iter().sum());
    for &member in order.iter().take(left) {
        counts[member] += 1;
    }
    let mut slots = [0; ANYCAST_SLOTS];
    let lead = (0u8..=255).zip(counts).flat_map(|(i, n)| core::iter::repeat_n(i, n));
    for (slot, member) in slots.iter_mut().zip(lead) {
        *slot = member;
    }
    slots
}

#[cfg(test)]
mod tests {
    use bluebridge_p4::pipeline::{Forward, MacAddr};

    use super::*;

    fn members(weights: &[u16]) -> Vec<WeightedForward> {
        let forward = Forward { port: SwitchPort(1), dst_mac: MacAddr::default() };
        weights.iter().map(|&weight| WeightedForward { forward, weight }).collect()
    }

    fn counts(weights: &[u16]) -> Vec<usize> {
        let slots = anycast_slots(&members(weights));
        (0..weights.len()).map(|i| slots.iter().filter(|&&s| usize::from(s) == i).count()).collect()
    }

    #[test]
    fn slots_follow_the_weights() {
        assert_eq!(counts(&[1]), [256]);
        assert_eq!(counts(&[1, 1]), [128, 128]);
        assert_eq!(counts(&[1, 3]), [65, 191]);
        assert_eq!(counts(&[1, u16::MAX]), [1, 255]);
        let many = counts(&[1; 256]);
        assert!(many.iter().all(|&n| n == 1));
    }

    #[test]
    fn the_slot_of_neighbouring_sources_spreads() {
        let mut hit = [false; 256];
        for selector in 0..4096u64 {
            hit[usize::from(anycast_slot(7, (1 << 63) | selector))] = true;
        }
        assert!(hit.iter().all(|&h| h));
    }

    #[test]
    fn draws_repeat_and_follow_the_share() {
        let mut a = Draw::new(1, SwitchPort(2));
        let mut b = Draw::new(1, SwitchPort(2));
        let hits = (0..100_000).filter(|_| a.chance(threshold(0.05))).count();
        assert_eq!(hits, (0..100_000).filter(|_| b.chance(threshold(0.05))).count());
        assert!((4_700..5_300).contains(&hits), "{hits}");
        assert!((0..1000).all(|_| a.chance(threshold(1.0))));
        assert!((0..1000).all(|_| !a.chance(threshold(0.0))));
    }
}
