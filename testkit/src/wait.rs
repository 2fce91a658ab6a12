//! Waiting for events.

use std::{
    thread,
    time::{Duration, Instant},
};

/// Longer than any awaited event takes, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(5);

/// Waits until a condition holds, and returns how long that took; panics with its name if it does not.
///
/// # Panics
/// If it does not hold in time.
#[track_caller]
pub fn until(what: &str, mut holds: impl FnMut() -> bool) -> Duration {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < PATIENCE, "{what}: not after {:?}", began.elapsed());
        thread::sleep(PAUSE);
    }
    began.elapsed()
}
