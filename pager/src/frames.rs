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
        Self { total, free: AtomicU32::new(total), waiters: AtomicU32::new(0) }
    }

    pub(crate) fn total(&self) -> u32 {
        self.total
    }

    pub(crate) fn free(&self) -> u32 {
        self.free.load(Ordering::Relaxed)
    }

    /// Takes one if there is one.
    pub(crate) fn take(&self) -> bool {
        self.take_above(0)
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

    /// Waits until some are free, at most for `limit`; may return early.
    pub(crate) fn wait(&self, limit: Duration) {
        self.waiters.fetch_add(1, Ordering::SeqCst);
        if self.free.load(Ordering::SeqCst) == 0 {
            memory::wait(&self.free, 0, limit);
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
        assert!(frames.take() && frames.take());
        assert!(!frames.take());
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
                        while !frames.take() {
                            frames.wait(Duration::from_secs(20));
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
