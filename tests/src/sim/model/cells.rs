//! 8-byte words that several clients change by FETCH_ADD or CAS.

use bluebridge_protocol::Timestamp;

use super::subset_sums;

/// With more unknown outcomes their sums are too many to check.
const UNKNOWN_MAX: usize = 14;

/// One acknowledged addition.
#[derive(Clone, Copy, Debug)]
struct Added {
    previous: u64,
    addend: u64,
    start: Timestamp,
    end: Timestamp,
}

/// A counter: every addend is positive and the sum stays far from wrapping.
#[derive(Clone, Debug, Default)]
pub struct AddCell {
    added: Vec<Added>,
    unknown: Vec<u64>,
}

impl AddCell {
    /// Records an acknowledged addition.
    pub fn add(&mut self, previous: u64, addend: u64, start: Timestamp, end: Timestamp) {
        self.added.push(Added { previous, addend, start, end });
    }

    /// Records an addition with an unknown outcome.
    pub fn add_unknown(&mut self, addend: u64) {
        self.unknown.push(addend);
    }

    /// Checks that each acknowledged addition was executed exactly once, in an order that fits real
    /// time, and each unknown one at most once; `last` is the final value of the cell.
    ///
    /// # Errors
    /// A description of the contradiction.
    pub fn check(&self, last: Option<u64>) -> Result<(), String> {
        let mut added = self.added.clone();
        added.sort_by_key(|add| add.previous);
        let mut at = 0;
        let mut gap = 0;
        let mut latest_start = Timestamp::default();
        for add in &added {
            if add.previous < at {
                return Err(format!("an addition to {:#x} was lost or undone", add.previous));
            }
            gap += add.previous - at;
            at = add.previous + add.addend;
            if add.end < latest_start {
                return Err(format!("the addition to {:#x} came out of order", add.previous));
            }
            latest_start = latest_start.max(add.start);
        }
        if let Some(last) = last {
            if last < at {
                return Err(format!("the counter is {last:#x}, but was {at:#x}"));
            }
            gap += last - at;
        }
        if self.unknown.len() > UNKNOWN_MAX {
            return Ok(());
        }
        if subset_sums(0, &self.unknown).contains(&gap) {
            Ok(())
        } else {
            Err(format!("{gap:#x} more was added than requested"))
        }
    }

    /// Whether the check must ignore the sum.
    #[must_use]
    pub const fn is_doubtful(&self) -> bool {
        self.unknown.len() > UNKNOWN_MAX
    }
}

/// A swap that was acknowledged, or whose outcome is unknown.
#[derive(Clone, Copy, Debug)]
struct Swap {
    expected: u64,
    new: u64,
    start: Timestamp,
    end: Timestamp,
}

/// A word that is changed only by CAS, always to a new value.
#[derive(Clone, Debug, Default)]
pub struct SwapCell {
    done: Vec<Swap>,
    unknown: Vec<Swap>,
}

impl SwapCell {
    /// Records the result of a swap.
    ///
    /// # Errors
    /// If the result is a value that was never written.
    pub fn swap(
        &mut self,
        (expected, new): (u64, u64),
        previous: u64,
        start: Timestamp,
        end: Timestamp,
    ) -> Result<(), String> {
        if previous == expected {
            self.done.push(Swap { expected, new, start, end });
        }
        Ok(())
    }

    /// Records a swap with an unknown outcome.
    pub fn swap_unknown(&mut self, expected: u64, new: u64, start: Timestamp) {
        let end = Timestamp::MAX;
        self.unknown.push(Swap { expected, new, start, end });
    }

    /// Checks that the executed swaps form one chain from 0 to `last`.
    ///
    /// # Errors
    /// A description of where the chain breaks.
    pub fn check(&self, last: Option<u64>) -> Result<(), String> {
        let mut at = 0;
        let mut latest_start = Timestamp::default();
        let mut done = 0;
        loop {
            let mut next = self.done.iter().filter(|swap| swap.expected == at);
            if let Some(swap) = next.next() {
                if next.next().is_some() {
                    return Err(format!("{at:#x} was swapped twice"));
                }
                if swap.end < latest_start {
                    return Err(format!("the swap of {at:#x} came out of order"));
                }
                latest_start = latest_start.max(swap.start);
                (at, done) = (swap.new, done + 1);
                continue;
            }
            if done == self.done.len() && last.is_none_or(|last| last == at) {
                return Ok(());
            }
            // Only an unknown swap can continue the chain; the following swaps determine which one.
            match self
                .unknown
                .iter()
                .find(|swap| swap.expected == at && self.has_successor(swap.new, last))
            {
                Some(swap) => {
                    latest_start = latest_start.max(swap.start);
                    at = swap.new;
                }
                None => return Err(format!("no swap continues from {at:#x}")),
            }
        }
    }

    /// Whether a value has a successor: a swap that expects it, or the end.
    fn has_successor(&self, value: u64, last: Option<u64>) -> bool {
        last == Some(value)
            || self.done.iter().chain(&self.unknown).any(|swap| swap.expected == value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(nanos: u64) -> Timestamp {
        Timestamp::from_nanos(nanos)
    }

    #[test]
    fn additions_are_done_once() {
        let mut cell = AddCell::default();
        cell.add(0, 5, at(1), at(2));
        cell.add(5, 3, at(3), at(4));
        assert_eq!(cell.check(Some(8)), Ok(()));
        assert!(cell.check(Some(11)).is_err(), "3 twice");
        assert!(cell.check(Some(5)).is_err(), "3 lost");
        cell.add_unknown(100);
        assert_eq!(cell.check(Some(108)), Ok(()));
        assert_eq!(cell.check(Some(8)), Ok(()));
        assert!(cell.check(Some(208)).is_err(), "100 twice");
        cell.add(5, 1, at(5), at(6));
        assert!(cell.check(None).is_err(), "two returned 5");
    }

    #[test]
    fn additions_keep_real_time() {
        let mut cell = AddCell::default();
        cell.add(5, 3, at(1), at(2));
        cell.add(0, 5, at(3), at(4));
        assert!(cell.check(None).is_err());
    }

    #[test]
    fn swaps_form_a_chain() {
        let mut cell = SwapCell::default();
        cell.swap((0, 7), 0, at(1), at(2)).expect("a response");
        cell.swap((7, 8), 7, at(3), at(4)).expect("a response");
        cell.swap((0, 9), 8, at(3), at(5)).expect("a response");
        assert_eq!(cell.check(Some(8)), Ok(()));
        assert!(cell.check(Some(7)).is_err());
        cell.swap_unknown(8, 11, at(6));
        assert_eq!(cell.check(Some(11)), Ok(()));
        assert_eq!(cell.check(Some(8)), Ok(()));
        cell.swap((7, 12), 7, at(5), at(6)).expect("a response");
        assert!(cell.check(None).is_err(), "7 was swapped twice");
    }
}
