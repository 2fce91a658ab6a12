//! Whether a page that is read will be written.
//!
//! A protected page costs another fault (4.5 us) when it is written first; a writable page must be written back (about
//! 5 us) even if it was not changed. So pages are protected unless most are written.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::kernel::paged::Protection;

/// Protected pages that are counted before older ones count half.
const WINDOW: u32 = 512;
/// Protected pages before the first decision.
const SAMPLE: u32 = 64;
/// While pages are installed writable, each with a number divisible by this is protected, to keep counting.
const PROBE_PERIOD: u32 = 8;

/// Counts which protected pages were written. The numbers need not be exact.
#[derive(Debug, Default)]
pub(crate) struct WriteLikelihood {
    protected: AtomicU32,
    written: AtomicU32,
    installs: AtomicU32,
}

impl WriteLikelihood {
    /// How the next pages are installed whose first access is a read.
    pub(crate) fn protection(&self) -> Protection {
        let protected = self.protected.load(Ordering::Relaxed);
        let written = self.written.load(Ordering::Relaxed);
        let is_usual = protected >= SAMPLE && written > protected / 2 + protected / 16;
        let number = self.installs.fetch_add(1, Ordering::Relaxed);
        if is_usual && !number.is_multiple_of(PROBE_PERIOD) {
            Protection::Writable
        } else {
            Protection::Protected
        }
    }

    /// A page was installed protected.
    pub(crate) fn protected(&self) {
        if self.protected.fetch_add(1, Ordering::Relaxed) >= WINDOW {
            self.protected.fetch_sub(WINDOW / 2, Ordering::Relaxed);
            let halve = |written: u32| Some(written / 2);
            let _ = self.written.fetch_update(Ordering::Relaxed, Ordering::Relaxed, halve);
        }
    }

    /// A protected page was written.
    pub(crate) fn written(&self) {
        self.written.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Installs pages of which every `period`-th is written (0: none); returns the share that was protected.
    fn protected_of(likelihood: &WriteLikelihood, count: u32, period: u32) -> u32 {
        let mut protected = 0;
        for page in 0..count {
            if likelihood.protection() == Protection::Protected {
                protected += 1;
                likelihood.protected();
                if period > 0 && page % period == 0 {
                    likelihood.written();
                }
            }
        }
        protected
    }

    #[test]
    fn pages_are_writable_while_most_are_written() {
        let likelihood = WriteLikelihood::default();
        assert_eq!(protected_of(&likelihood, 1000, 0), 1000, "none is written");
        let writing = protected_of(&likelihood, 10_000, 1);
        assert!(writing < 3000, "all are written, but {writing} of 10000 were protected");
        protected_of(&likelihood, 10_000, 0);
        assert_eq!(protected_of(&likelihood, 1000, 0), 1000, "none is written any more");
        protected_of(&likelihood, 10_000, 3);
        assert_eq!(protected_of(&likelihood, 1000, 3), 1000, "a third is written");
    }
}
