//! Percentiles of many samples, in microseconds.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

/// Samples of one contestant: round trips in nanoseconds, up to 10 s, three digits.
#[derive(Clone, Debug)]
pub struct Samples(Histogram<u64>);

const LONGEST_NANOS: u64 = 10_000_000_000;

impl Default for Samples {
    fn default() -> Self {
        Self(Histogram::new_with_bounds(1, LONGEST_NANOS, 3).expect("the bounds are in order"))
    }
}

impl Samples {
    /// Adds a sample; a longer one counts as the maximum.
    pub fn add(&mut self, time: Duration) {
        self.0.saturating_record(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Adds all samples of another.
    pub fn merge(&mut self, other: &Self) {
        // Both have the same bounds, so nothing is out of range.
        let _ = self.0.add(&other.0);
    }

    /// The percentiles of the samples.
    #[must_use]
    pub fn summary(&self) -> Summary {
        let at = |quantile| micros(self.0.value_at_quantile(quantile));
        Summary {
            sample_count: self.0.len(),
            p50_us: at(0.5),
            p95_us: at(0.95),
            p99_us: at(0.99),
            p999_us: at(0.999),
        }
    }
}

/// Percentiles of a contestant.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Summary {
    /// The number of samples.
    pub sample_count: u64,
    /// The median, in microseconds.
    pub p50_us: f64,
    /// 95 of 100 were faster.
    pub p95_us: f64,
    /// 99 of 100 were faster.
    pub p99_us: f64,
    /// 999 of 1000 were faster.
    pub p999_us: f64,
}

#[allow(clippy::cast_precision_loss, reason = "nanoseconds up to 10 s fit into 53 bits")]
fn micros(nanos: u64) -> f64 {
    nanos as f64 / 1000.0
}

/// The median of some numbers; 0 for an empty list.
#[must_use]
pub fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

/// The value that a share of some numbers, from 0 to 1, is below; 0 for an empty list.
#[must_use]
pub fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        clippy::cast_sign_loss,
        reason = "lists are short, and a cast of a float saturates"
    )]
    let at = (sorted.len() as f64 * share) as usize;
    let at = at.min(sorted.len().saturating_sub(1));
    sorted.get(at).copied().unwrap_or_default()
}
