//! The distance between two cores: a cache line passed back and forth.
//!
//! On a virtual machine the host moves the cores. The time of one pass was seen to
//! switch between two values, and all other results changed with it, so every round records it.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
};

use rustix::time::{ClockId, clock_gettime};

const HANDOVERS: u64 = 2000;

/// A separate cache line.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Line(AtomicU64);

/// The state shared by the two threads.
#[derive(Debug, Default)]
pub struct Probe {
    line: Line,
}

impl Probe {
    /// Responds to hand-overs until `stop` is set, on one core.
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
    /// other thread did not respond within the deadline.
    #[must_use]
    pub fn measure(&self, deadline: Duration) -> Option<f64> {
        let start = now();
        let mut begun = start;
        for handover in 0..HANDOVERS {
            // The first hand-overs wait until the other thread has started its turn.
            if handover == HANDOVERS / 4 {
                begun = now();
            }
            let asked = self.line.0.load(Ordering::Acquire) | 1;
            self.line.0.store(asked, Ordering::Release);
            let mut spins = 0_u32;
            while self.line.0.load(Ordering::Acquire) == asked {
                spins = spins.wrapping_add(1);
                // The clock is read rarely: a reading takes a fifth of a hand-over.
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

/// The monotonic clock that all samples use.
#[must_use]
pub fn now() -> Duration {
    let time = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
    Duration::from_secs(seconds) + Duration::from_nanos(u64::try_from(time.tv_nsec).unwrap_or(0))
}
