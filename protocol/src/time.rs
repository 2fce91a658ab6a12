//! Time as an argument: the machines of this crate have no clock of their own.

use core::{
    ops::{Add, Sub},
    time::Duration,
};

/// A moment on the caller's monotonic clock; only differences mean something.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Instant(u64);

impl Instant {
    /// The moment `nanos` nanoseconds after the clock's arbitrary start.
    #[must_use]
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Nanoseconds since the clock's arbitrary start.
    #[must_use]
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// The time since `earlier`; zero if that is later.
    #[must_use]
    pub const fn saturating_since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)))
    }
}

impl Sub<Self> for Instant {
    type Output = Duration;

    fn sub(self, earlier: Self) -> Duration {
        self.saturating_since(earlier)
    }
}
