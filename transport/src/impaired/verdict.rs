//! What happens to one datagram, drawn from the seed.

use core::time::Duration;

use rand::Rng;
use rand::rngs::SmallRng;

use super::Impairment;

/// A probability in millionths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Probability(u32);

impl Probability {
    /// Never.
    pub const ZERO: Self = Self(0);
    /// Always.
    pub const ONE: Self = Self(1_000_000);

    /// `millionths` in a million, at most always.
    pub const fn from_millionths(millionths: u32) -> Self {
        if millionths > Self::ONE.0 { Self::ONE } else { Self(millionths) }
    }

    /// `percent` in a hundred, at most always.
    pub const fn from_percent(percent: u32) -> Self {
        Self::from_millionths(percent.saturating_mul(10_000))
    }

    /// The probability in millionths.
    pub const fn millionths(self) -> u32 {
        self.0
    }

    fn draw(self, random: &mut SmallRng) -> bool {
        random.random_range(0..Self::ONE.0) < self.0
    }
}

/// What happens to one datagram; the default is that it passes unchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Verdict {
    pub(super) lost: bool,
    pub(super) duplicated: bool,
    /// Which bit is flipped, modulo the number of bits.
    pub(super) flipped_bit: Option<u32>,
    /// How many datagrams pass it.
    pub(super) passed_by: Option<u32>,
    pub(super) delay: Duration,
}

impl Verdict {
    /// Draws the same number of values for every `impairment`, so that a change of one does not shift the others.
    pub(super) fn draw(impairment: &Impairment, random: &mut SmallRng) -> Self {
        let lost = impairment.loss.draw(random);
        let duplicated = impairment.duplicate.draw(random);
        let corrupted = impairment.corrupt.draw(random);
        let reordered = impairment.reorder.draw(random);
        let [bit, distance, jitter]: [u32; 3] = random.random();
        let jitter = impairment.jitter.mul_f64(f64::from(jitter) / (f64::from(u32::MAX) + 1.0));
        Self {
            lost,
            duplicated,
            flipped_bit: corrupted.then_some(bit),
            passed_by: reordered.then_some(1 + distance % impairment.reorder_distance.max(1)),
            delay: impairment.delay.saturating_add(jitter),
        }
    }
}
