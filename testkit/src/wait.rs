//! Waiting for events.

use std::{
    panic::resume_unwind,
    sync::mpsc::{self, RecvTimeoutError},
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

/// Runs `work` in a thread of its own, and panics if it does not end in time: a call that must return may be what the
/// test is about, and a loop that never ends cannot be interrupted. The thread then lasts as long as the process.
///
/// # Panics
/// If it does not end in time, or panics itself.
#[track_caller]
pub fn within<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, result) = mpsc::sync_channel(1);
    let worker = thread::spawn(move || {
        let _ = done.send(work());
    });
    match result.recv_timeout(PATIENCE) {
        Ok(result) => result,
        Err(RecvTimeoutError::Timeout) => panic!("{what}: not after {PATIENCE:?}"),
        Err(RecvTimeoutError::Disconnected) => match worker.join() {
            Err(panic) => resume_unwind(panic),
            Ok(()) => unreachable!("it sends its result"),
        },
    }
}
