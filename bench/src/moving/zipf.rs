//! Lines that are used more often than others: Zipf-distributed, and the hottest ones lie apart.

use std::ops::Range;

use bluebridge_wire::address::LINE_PAGES;
use rand::{Rng, SeedableRng, rngs::SmallRng};

/// The order of the lines is the same in every run.
const SEED: u64 = 11;

/// How often lines are used.
#[derive(Clone, Debug)]
pub(super) struct Zipf {
    page_total: usize,
    /// For each rank, the share of it and of those before; the last one is 1.
    sums: Vec<f64>,
    /// The line of each rank.
    lines: Vec<usize>,
}

impl Zipf {
    /// The line of rank n is used `n.powf(-exponent)` times as often as the first one. Without pages there are no lines.
    pub(super) fn new(page_total: usize, exponent: f64) -> Self {
        let mut lines: Vec<usize> = (0..page_total.div_ceil(LINE_PAGES)).collect();
        let mut random = SmallRng::seed_from_u64(SEED);
        for last in (1..lines.len()).rev() {
            lines.swap(last, random.random_range(0..=last));
        }
        #[allow(clippy::cast_precision_loss, reason = "far below 2^53 lines")]
        let weights = (1..=lines.len()).map(|rank| (rank as f64).powf(-exponent));
        let sums = weights.scan(0.0, |sum, weight| {
            *sum += weight;
            Some(*sum)
        });
        let sums: Vec<f64> = sums.collect();
        let all = sums.last().copied().unwrap_or(1.0);
        Self { page_total, sums: sums.into_iter().map(|sum| sum / all).collect(), lines }
    }

    /// The pages of a random line.
    pub(super) fn line(&self, random: &mut SmallRng) -> Range<usize> {
        let at = random.random_range(0.0..1.0);
        let rank = self.sums.partition_point(|sum| *sum <= at);
        let line = self.lines.get(rank).or_else(|| self.lines.last()).copied().unwrap_or_default();
        let first = line * LINE_PAGES;
        first..(first + LINE_PAGES).min(self.page_total)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hottest_line_has_its_share_and_every_line_a_rank() {
        // The last line has three pages.
        let zipf = Zipf::new(8 * 40 + 3, 1.0);
        let mut lines = zipf.lines.clone();
        lines.sort_unstable();
        assert_eq!(lines, (0..41).collect::<Vec<_>>());
        let mut random = SmallRng::seed_from_u64(1);
        let mut counts = [0_u32; 41];
        for _ in 0..100_000 {
            let pages = zipf.line(&mut random);
            assert!(!pages.is_empty() && pages.end <= 323, "{pages:?}");
            counts[pages.start / 8] += 1;
        }
        // 1 of 1 + 1/2 + .. + 1/41, which is 4.3.
        let share = |rank: usize| f64::from(counts[zipf.lines[rank]]) / 100_000.0;
        assert!((0.225..0.240).contains(&share(0)), "{}", share(0));
        assert!((0.112..0.120).contains(&share(1)), "{}", share(1));
        assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
        // With 0 all are alike.
        assert!(
            Zipf::new(80, 0.0)
                .sums
                .iter()
                .zip(1..)
                .all(|(sum, rank)| { (sum - f64::from(rank) / 10.0).abs() < 1e-9 })
        );
    }
}
