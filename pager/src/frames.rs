//! The limit of local pages.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::kernel::memory;

/// Permissions to make a page local; there are as many as the limit of local pages.
#[derive(Debug)]
pub(crate) struct Frames {
    total: u32,
    free: AtomicU32,
    /// Threads that wait for one.
    waiters: AtomicU32,
}

impl Frames {
    pub(crate) fn new(total: u32) -> Self {
        Self::with_taken(total, 0)
    }

    /// As many, of which some are taken already.
    pub(crate) fn with_taken(total: u32, taken: u32) -> Self {
        Self {
            total,
            free: AtomicU32::new(total.saturating_sub(taken)),
            waiters: AtomicU32::new(0),
        }
    }

    pub(crate) fn total(&self) -> u32 {
        self.total
    }

    pub(crate) fn free(&self) -> u32 {
        self.free.load(Ordering::Relaxed)
    }

    /// Takes one if more than `reserve` are left.
    pub(crate) fn take_above(&self, reserve: u32) -> bool {
        let take = |free: u32| (free > reserve).then(|| free.saturating_sub(1));
        self.free.fetch_update(Ordering::AcqRel, Ordering::Relaxed, take).is_ok()
    }

    /// Returns some; wakes threads that wait for one.
    pub(crate) fn release(&self, count: u32) {
        if count == 0 {
            return;
        }
        let before = self.free.fetch_add(count, Ordering::SeqCst);
        debug_assert!(before + count <= self.total, "more frames than there are");
        if self.waiters.load(Ordering::SeqCst) > 0 {
            memory::wake_all(&self.free);
        }
    }

    /// Waits until more than `reserve` are free, at most for `limit`; may return early.
    pub(crate) fn wait_above(&self, reserve: u32, limit: Duration) {
        self.waiters.fetch_add(1, Ordering::SeqCst);
        let free = self.free.load(Ordering::SeqCst);
        if free <= reserve {
            memory::wait(&self.free, free, limit);
        }
        self.waiters.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_never_more_than_the_limit() {
        let frames = Frames::new(3);
        assert!(frames.take_above(2));
        assert!(!frames.take_above(2), "the reserve stays");
        assert!(frames.take_above(0) && frames.take_above(0));
        assert!(!frames.take_above(0));
        frames.release(2);
        assert_eq!((frames.free(), frames.total()), (2, 3));
    }

    #[test]
    fn many_threads_share_few() {
        let frames = Frames::new(2);
        let in_use = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        while !frames.take_above(0) {
                            frames.wait_above(0, Duration::from_secs(20));
                        }
                        assert!(in_use.fetch_add(1, Ordering::SeqCst) < 2);
                        in_use.fetch_sub(1, Ordering::SeqCst);
                        frames.release(1);
                    }
                });
            }
        });
        assert_eq!(frames.free(), 2);
    }
}
