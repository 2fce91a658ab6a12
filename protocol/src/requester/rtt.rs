//! The measured round trip and the timer that follows it (RFC 6298).

use core::time::Duration;

use super::config::Timing;

/// Smoothed round trip and its variation, in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RoundTrip {
    smoothed: u64,
    variation: u64,
}

impl RoundTrip {
    /// Adds a sample: a request that was sent once and has its reply.
    pub(super) fn sample(&mut self, round_trip: Duration) {
        let sample = u64::try_from(round_trip.as_nanos()).unwrap_or(u64::MAX >> 8).max(1);
        if self.smoothed == 0 {
            self.smoothed = sample;
            self.variation = sample / 2;
            return;
        }
        let error = self.smoothed.abs_diff(sample);
        self.variation = self.variation - self.variation / 4 + error / 4;
        self.smoothed = (self.smoothed - self.smoothed / 8 + sample / 8).max(1);
    }

    /// The smoothed round trip; `None` before the first sample.
    pub(super) fn smoothed(&self) -> Option<Duration> {
        (self.smoothed > 0).then(|| Duration::from_nanos(self.smoothed))
    }

    /// The retransmission timer after `expired` expiries in a row, for the oldest request of a session or another one.
    pub(super) fn timer(&self, timing: &Timing, expired: u8, is_oldest: bool) -> Duration {
        let base = if self.smoothed == 0 {
            timing.retransmit_initial
        } else {
            let timer = self.smoothed.saturating_add(self.variation.saturating_mul(4));
            Duration::from_nanos(timer).max(timing.retransmit_min)
        };
        // On a slow network, a shorter timer than the first one would only repeat what is on its way, and before the
        // first sample it is not known how slow it is.
        let longest = match is_oldest && self.smoothed != 0 {
            true => timing.retransmit_oldest_max.max(base),
            false => timing.retransmit_max,
        };
        base.saturating_mul(1 << expired.min(16)).min(longest.min(timing.retransmit_max))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_timer_follows_the_measured_round_trip_within_its_bounds() {
        let timing = Timing::DEFAULT;
        let mut trip = RoundTrip::default();
        assert_eq!(trip.timer(&timing, 0, false), timing.retransmit_initial);
        assert_eq!(trip.timer(&timing, 200, true), timing.retransmit_max, "nothing is known yet");
        trip.sample(Duration::from_micros(10));
        assert_eq!(trip.timer(&timing, 0, false), timing.retransmit_min);
        for _ in 0..100 {
            trip.sample(Duration::from_millis(8));
        }
        let smoothed = trip.smoothed().expect("measured");
        assert!(smoothed.abs_diff(Duration::from_millis(8)) < Duration::from_micros(100));
        let timer = trip.timer(&timing, 0, false);
        assert!(timer >= smoothed && timer < Duration::from_millis(12), "{timer:?}");
        assert_eq!(trip.timer(&timing, 1, false), timer * 2);
        assert_eq!(trip.timer(&timing, 200, false), timing.retransmit_max);
        assert_eq!(trip.timer(&timing, 1, true), timer * 2);
        assert_eq!(trip.timer(&timing, 200, true), timing.retransmit_oldest_max);
        for _ in 0..100 {
            trip.sample(Duration::from_millis(100));
        }
        let timer = trip.timer(&timing, 0, true);
        assert!(timer > timing.retransmit_oldest_max, "{timer:?}");
        assert_eq!(trip.timer(&timing, 7, true), timer);
    }
}
