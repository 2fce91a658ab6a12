//! Turns: the measuring thread selects which contestant the serving thread serves.

use std::sync::{
    Condvar, Mutex, PoisonError,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

/// No contestant is served; the serving thread may end.
const OVER: usize = usize::MAX;

/// Shared by the thread that measures and the thread that serves.
#[derive(Debug, Default)]
pub struct Turns {
    current: AtomicUsize,
    /// Set when the turn changes, for loops that check a flag.
    stop: AtomicBool,
    /// For sleeping through the turn of a contestant with its own server.
    sleeper: Mutex<()>,
    changed: Condvar,
}

impl Turns {
    /// The first turn is contestant 0's.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            current: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            sleeper: Mutex::new(()),
            changed: Condvar::new(),
        }
    }

    /// Gives the turn to a contestant. The former one is still served until its loop checks the flag.
    pub fn give(&self, contestant: usize) {
        if self.current.swap(contestant, Ordering::AcqRel) != contestant {
            self.stop.store(true, Ordering::Release);
            // With the lock held, no sleeper is between its check and its sleep.
            drop(self.sleeper.lock().unwrap_or_else(PoisonError::into_inner));
            self.changed.notify_all();
        }
    }

    /// Sleeps until `stop` is set: the turn's contestant has its own server.
    pub fn sleep(&self, stop: &AtomicBool) {
        let guard = self.sleeper.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_while(guard, |()| !stop.load(Ordering::Acquire));
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Ends the serving thread.
    pub fn end(&self) {
        self.give(OVER);
    }

    /// Serves in turns until the end: calls `serve` with the contestant and a flag that says
    /// when to return.
    pub fn serve(&self, mut serve: impl FnMut(usize, &AtomicBool)) {
        loop {
            self.stop.store(false, Ordering::Release);
            let contestant = self.current.load(Ordering::Acquire);
            if contestant == OVER {
                return;
            }
            serve(contestant, &self.stop);
        }
    }
}
