//! Rates from counters that only grow, except when what they count is replaced.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A rate that is being learned.
#[derive(Clone, Copy, Debug)]
struct Learned {
    count: u64,
    since: Instant,
    /// The weighted sum of all rates between two readings; the weights that are missing from 1 are those of the time
    /// before the first reading.
    sum: f64,
}

/// A rate per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// Exponentially weighted; half of a window ago counts about a third.
    pub per_second: f64,
    /// Whether it was learned over a whole window.
    pub is_learned: bool,
}

/// Rates of counters, by key.
///
/// A counter that is seen for the first time, or again, begins with its present count, whatever that is. One that is
/// less than before was set to zero in between, so at least its present count was added. So no rate is negative, and none
/// is larger than what was counted.
#[derive(Clone, Debug)]
pub struct Rates<K> {
    last: Option<Instant>,
    learned: BTreeMap<K, Learned>,
}

impl<K> Default for Rates<K> {
    fn default() -> Self {
        Self { last: None, learned: BTreeMap::new() }
    }
}

impl<K: Clone + Ord> Rates<K> {
    /// Notes a reading of all counters; returns what was added to each since the last one. A reading that is not later
    /// than the last one is ignored.
    pub fn note(
        &mut self,
        window: Duration,
        at: Instant,
        counts: impl IntoIterator<Item = (K, u64)>,
    ) -> BTreeMap<K, u64> {
        let mut added = BTreeMap::new();
        let passed = match self.last {
            Some(last) if at <= last => return added,
            last => last.map_or(Duration::ZERO, |last| at.duration_since(last)),
        };
        self.last = Some(at);
        let keep = decay(window, passed);
        let mut learned = BTreeMap::new();
        for (key, count) in counts {
            let known = self.learned.get(&key).filter(|_| !passed.is_zero());
            let Some(before) = known else {
                learned.insert(key, Learned { count, since: at, sum: 0.0 });
                continue;
            };
            let more = count.checked_sub(before.count).unwrap_or(count);
            let rate = more as f64 / passed.as_secs_f64();
            let sum = before.sum * keep + rate * (1.0 - keep);
            learned.insert(key.clone(), Learned { count, since: before.since, sum });
            added.insert(key, more);
        }
        self.learned = learned;
        added
    }

    /// Every rate over a window, except of counters that were read only once.
    pub fn iter(&self, window: Duration) -> impl Iterator<Item = (&K, Rate)> {
        self.learned.iter().filter_map(move |(key, of)| {
            let over = self.last?.checked_duration_since(of.since).filter(|it| !it.is_zero())?;
            let per_second = of.sum / (1.0 - decay(window, over));
            Some((key, Rate { per_second, is_learned: over >= window }))
        })
    }

    /// The rate of one counter.
    #[must_use]
    pub fn get(&self, window: Duration, key: &K) -> Option<Rate> {
        self.iter(window).find(|(it, _)| *it == key).map(|(_, rate)| rate)
    }
}

/// The weight that older rates keep after some time.
fn decay(window: Duration, passed: Duration) -> f64 {
    (-2.0 * passed.as_secs_f64() / window.as_secs_f64().max(f64::MIN_POSITIVE)).exp()
}
