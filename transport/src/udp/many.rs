//! When to read several datagrams with one system call.
//!
//! `recvmmsg` looks for a second datagram after the first, which costs 0.3 us if there is none. A datagram that was
//! there before anybody looked may be one of many. Or the only one: the answer of a kernel that responds within the
//! caller's own send. So after each vain attempt the next ones are rarer.

/// The most datagrams that are read alone between two attempts.
const PAUSE_MAX: u32 = 63;

/// The state.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Many {
    /// Datagrams to read alone after the next vain attempt.
    pause: u32,
    /// Datagrams to read alone before the next attempt.
    left: u32,
}

impl Many {
    /// A datagram was there before anybody looked: whether the next ones are to be read together.
    pub(super) const fn is_due(&mut self) -> bool {
        let is_due = self.left == 0;
        self.left = self.left.saturating_sub(1);
        is_due
    }

    /// An attempt found so many datagrams: whether the next ones are to be read together.
    pub(super) fn found(&mut self, count: usize) -> bool {
        let is_worth = count > 1;
        self.pause = if is_worth { 0 } else { (2 * self.pause + 1).min(PAUSE_MAX) };
        self.left = self.pause;
        is_worth
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vain_attempts_become_rare_and_one_that_is_not_starts_again() {
        let mut many = Many::default();
        let mut attempts = 0;
        for _ in 0..10_000 {
            if many.is_due() {
                attempts += 1;
                assert!(!many.found(1));
            }
        }
        assert!((150..200).contains(&attempts), "{attempts} attempts");
        while !many.is_due() {}
        assert!(many.found(2));
        assert!(many.is_due(), "the next one may be one of many");
    }
}
