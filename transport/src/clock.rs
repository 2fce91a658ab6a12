//! The time of a carrier: real, or moved by hand.

use core::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use bluebridge_time::Timestamp;
use rustix::time::{ClockId, clock_gettime};

/// The current time of the system's monotonic clock, which every carrier in real time uses.
pub fn monotonic_now() -> Timestamp {
    let time = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(time.tv_nsec).unwrap_or(0);
    Timestamp::from_nanos(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
}

/// A clock that moves only by hand, for carriers in virtual time; clones share it.
#[derive(Clone, Debug, Default)]
pub struct ManualClock(Arc<AtomicU64>);

impl ManualClock {
    /// The present time.
    pub fn now(&self) -> Timestamp {
        Timestamp::from_nanos(self.0.load(Ordering::Acquire))
    }

    /// Advances it to `moment`; a moment in the past changes nothing.
    pub fn advance_to(&self, moment: Timestamp) {
        self.0.fetch_max(moment.as_nanos(), Ordering::AcqRel);
    }
}

/// Which clock a carrier reads.
#[derive(Clone, Debug)]
pub(crate) enum Clock {
    Manual(ManualClock),
    Monotonic,
}

impl Clock {
    pub(crate) fn now(&self) -> Timestamp {
        match self {
            Self::Manual(clock) => clock.now(),
            Self::Monotonic => monotonic_now(),
        }
    }
}
