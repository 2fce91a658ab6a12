//! Every endpoint has its own clock, which runs a little fast or slow.

use bluebridge_protocol::Timestamp;

const MILLION: i128 = 1_000_000;

/// A clock that runs `skew_ppm` parts per million fast.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    skew_ppm: i64,
}

impl Clock {
    pub(super) const fn new(skew_ppm: i64) -> Self {
        Self { skew_ppm }
    }

    /// The time of the clock at a moment of the simulation.
    pub(super) fn local(self, world: Timestamp) -> Timestamp {
        let rate = MILLION + i128::from(self.skew_ppm);
        Timestamp::from_nanos(scaled(world, rate, MILLION))
    }

    /// The first moment of the simulation at which the clock shows at least `local`.
    pub(super) fn world(self, local: Timestamp) -> Timestamp {
        let rate = MILLION + i128::from(self.skew_ppm);
        Timestamp::from_nanos(scaled(local, MILLION, rate).saturating_add(1))
    }
}

fn scaled(instant: Timestamp, by: i128, over: i128) -> u64 {
    u64::try_from(i128::from(instant.as_nanos()) * by / over).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timer_is_not_early() {
        for skew in [-10_000, -1, 0, 1, 10_000] {
            let clock = Clock::new(skew);
            for nanos in [0, 1, 999, 1_000_003, 5_000_000_000] {
                let local = Timestamp::from_nanos(nanos);
                assert!(clock.local(clock.world(local)) >= local, "{skew} {nanos}");
            }
        }
    }
}
