//! How far apart two cores are: a cache line handed to and fro.
//!
//! On a virtual machine the host moves the cores about. The time of one hand-over was seen to
//! flip between two values, with all other results following it, so every round carries it.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
};

use rustix::time::{ClockId, clock_gettime};

const HANDOVERS: u64 = 2000;

/// A cache line of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Line(AtomicU64);

/// What the two threads share.
#[derive(Debug, Default)]
pub struct Probe {
    line: Line,
}

impl Probe {
    /// Answers hand-overs until told to stop, on the one core.
    pub fn answer(&self, stop: &AtomicBool) {
        while !stop.load(Ordering::Relaxed) {
            let seen = self.line.0.load(Ordering::Acquire);
            if seen % 2 == 1 {
                self.line.0.store(seen.wrapping_add(1), Ordering::Release);
            }
            std::hint::spin_loop();
        }
    }

    /// The mean time of a hand-over to the other core and back, in microseconds; `None` if the
    /// other thread did not answer within the deadline.
    #[must_use]
    pub fn measure(&self, deadline: Duration) -> Option<f64> {
        let start = now();
        let mut begun = start;
        for handover in 0..HANDOVERS {
            // The first hand-overs wait until the other thread has come to its turn.
            if handover == HANDOVERS / 4 {
                begun = now();
            }
            let asked = self.line.0.load(Ordering::Acquire) | 1;
            self.line.0.store(asked, Ordering::Release);
            let mut spins = 0_u32;
            while self.line.0.load(Ordering::Acquire) == asked {
                spins = spins.wrapping_add(1);
                // The clock is read seldom: it takes as long as a fifth of a hand-over.
                if spins.is_multiple_of(4096) && now() - start > deadline {
                    self.line.0.store(asked.wrapping_add(1), Ordering::Release);
                    return None;
                }
                std::hint::spin_loop();
            }
        }
        let timed = HANDOVERS - HANDOVERS / 4;
        #[allow(clippy::cast_precision_loss, reason = "a small count")]
        Some((now() - begun).as_secs_f64() * 1e6 / timed as f64)
    }
}

/// The monotonic clock, as every sample is taken.
#[must_use]
pub fn now() -> Duration {
    let time = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
    Duration::from_secs(seconds) + Duration::from_nanos(u64::try_from(time.tv_nsec).unwrap_or(0))
}
