//! The time of a carrier: real, or moved by hand.

use core::ops::Add;
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::sync::Arc;

use rustix::time::{ClockId, clock_gettime};

/// A moment on a carrier's clock: nanoseconds since an arbitrary start.
///
/// Carriers in real time share the system's monotonic clock, so their timestamps compare with each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The start of the clock; as a deadline it is always over.
    pub const ZERO: Self = Self(0);
    /// The last moment that can be expressed, 584 years after the start.
    pub const MAX: Self = Self(u64::MAX);

    /// The moment `nanos` nanoseconds after the start.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Nanoseconds since the start.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// The time from `earlier` to this moment, zero if `earlier` is later.
    pub const fn saturating_since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// The system's monotonic clock, which every carrier in real time uses.
    pub fn monotonic() -> Self {
        let time = clock_gettime(ClockId::Monotonic);
        let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
        let nanos = u64::try_from(time.tv_nsec).unwrap_or(0);
        Self(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
    }
}

impl Add<Duration> for Timestamp {
    type Output = Self;

    /// The moment `duration` later, at most [`Timestamp::MAX`].
    fn add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)))
    }
}

/// A clock that moves only by hand, for carriers in virtual time; clones share it.
#[derive(Clone, Debug, Default)]
pub struct ManualClock(Arc<AtomicU64>);

impl ManualClock {
    /// The present time.
    pub fn now(&self) -> Timestamp {
        Timestamp(self.0.load(Ordering::Acquire))
    }

    /// Advances it to `moment`; a moment in the past changes nothing.
    pub fn advance_to(&self, moment: Timestamp) {
        self.0.fetch_max(moment.0, Ordering::AcqRel);
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
            Self::Monotonic => Timestamp::monotonic(),
        }
    }
}
