//! Time as an argument.
//!
//! The protocol's state machines have no clock: the caller passes the current time to each call. Carriers read a
//! clock, real or simulated, and return the same type, so nothing is converted between the two. It is not
//! [`std::time::Instant`], because that cannot be made from a number: a simulation could not set it, and it could not
//! be stored in an atomic.

#![no_std]
#![forbid(unsafe_code)]

use core::{
    ops::{Add, Sub},
    time::Duration,
};

/// A point in time: nanoseconds since the arbitrary start of the clock it was read from.
///
/// Two timestamps can be compared if they are from the same clock. Carriers that use real time all read the system's
/// monotonic clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The start of the clock; as a deadline it has always passed.
    pub const ZERO: Self = Self(0);
    /// The latest timestamp, 584 years after the start; as a deadline it never passes.
    pub const MAX: Self = Self(u64::MAX);

    /// The timestamp `nanos` nanoseconds after the start.
    #[must_use]
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Nanoseconds since the start.
    #[must_use]
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// The time from `earlier` to this timestamp; zero if `earlier` is later.
    #[must_use]
    pub const fn saturating_since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Timestamp {
    type Output = Self;

    /// The timestamp `duration` later, at most [`Timestamp::MAX`].
    fn add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)))
    }
}

impl Sub for Timestamp {
    type Output = Duration;

    /// The same as [`Timestamp::saturating_since`].
    fn sub(self, earlier: Self) -> Duration {
        self.saturating_since(earlier)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_saturates_at_both_ends() {
        let late = Timestamp::from_nanos(5);
        assert_eq!(late - Timestamp::from_nanos(2), Duration::from_nanos(3));
        assert_eq!(Timestamp::from_nanos(2) - late, Duration::ZERO);
        assert_eq!(late + Duration::from_nanos(7), Timestamp::from_nanos(12));
        assert_eq!(late + Duration::MAX, Timestamp::MAX);
        assert_eq!(Timestamp::MAX + Duration::from_nanos(1), Timestamp::MAX);
    }
}
