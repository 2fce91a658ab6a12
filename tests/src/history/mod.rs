//! Checks whether the operations that clients observed on one page or word are linearizable.
//!
//! A history has the arguments, the result, the start and the end of each operation. It is
//! *linearizable* if one moment between start and end can be chosen for every operation such that the
//! operations, executed at these moments, have the observed results. An operation with an unknown
//! outcome may have been executed at any moment after its start, or not at all.
//!
//! The search is the algorithm of Wing and Gong with the cache of Lowe: it appends operations that may
//! come next until none fits, then backtracks, and never visits the same set of operations with the
//! same contents twice. It is complete: a history that it refuses has no order.

mod search;

use core::fmt;

/// What an operation did to the word, or the page whose contents stand for a word.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Action {
    /// FETCH_ADD.
    Add {
        /// The number added.
        addend: u64,
        /// The value before; `None` if the outcome is unknown.
        previous: Option<u64>,
    },
    /// READ, or an UPDATE that ended without a change.
    Read {
        /// The value read.
        value: u64,
    },
    /// CAS.
    Swap {
        /// The expected value.
        expected: u64,
        /// The new value.
        new: u64,
        /// The value before; `None` if the outcome is unknown.
        previous: Option<u64>,
    },
    /// UPDATE and COMMIT: no operation comes between what was read and what was written.
    Update {
        /// The value that UPDATE returned.
        before: u64,
        /// The value that COMMIT wrote.
        after: u64,
    },
    /// WRITE.
    Write {
        /// The value written.
        value: u64,
    },
}

impl Action {
    /// The value of the word afterwards; `None` if the result does not fit the value before.
    fn apply(self, held: u64) -> Option<u64> {
        let fits = |previous: Option<u64>| previous.is_none_or(|previous| previous == held);
        match self {
            Self::Add { addend, previous } => fits(previous).then(|| held.wrapping_add(addend)),
            Self::Read { value } => (value == held).then_some(held),
            Self::Swap { expected, new, previous } => {
                fits(previous).then_some(if held == expected { new } else { held })
            }
            Self::Update { before, after } => (before == held).then_some(after),
            Self::Write { value } => Some(value),
        }
    }

    /// The values whose observation proves that another operation was executed before this one.
    const fn observes(self) -> [Option<u64>; 2] {
        match self {
            Self::Add { previous, .. } => [previous, None],
            Self::Read { value } => [Some(value), None],
            Self::Swap { expected, previous, .. } => [Some(expected), previous],
            Self::Update { before, .. } => [Some(before), None],
            Self::Write { .. } => [None, None],
        }
    }

    /// The value that it leaves, if that does not depend on the value before.
    const fn leaves(self) -> Option<u64> {
        match self {
            Self::Swap { new, .. } => Some(new),
            Self::Update { after, .. } => Some(after),
            Self::Write { value } => Some(value),
            Self::Add { .. } | Self::Read { .. } => None,
        }
    }
}

/// An operation of a history. Times are of one clock that all clients share.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Operation {
    /// The start.
    pub start: u64,
    /// When it ended; `None` if its outcome is unknown.
    pub end: Option<u64>,
    /// What it did and returned.
    pub action: Action,
}

/// Why a history is refused.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Refusal {
    /// No order of the operations explains the results.
    Impossible {
        /// The longest order that was found.
        done: Vec<Operation>,
        /// The value of the word after it.
        held: u64,
        /// Operations that must come next, none of which fits.
        stuck: Vec<Operation>,
    },
    /// The search was stopped: too many operations overlap.
    Undecided,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Impossible { done, held, stuck } => {
                write!(f, "no order explains the results: after {} operations", done.len())?;
                let last = done.iter().rev().take(3).rev();
                last.clone().try_for_each(|operation| write!(f, ", {operation:?}"))?;
                write!(f, " it holds {held:#x}; none fits of {stuck:?}")
            }
            Self::Undecided => f.write_str("too many operations overlap to decide"),
        }
    }
}

/// All operations of all clients on one word or page.
#[derive(Clone, Debug, Default)]
pub struct History {
    initial: u64,
    operations: Vec<Operation>,
}

impl History {
    /// A history of a word that held `initial`.
    #[must_use]
    pub const fn new(initial: u64) -> Self {
        Self { initial, operations: Vec::new() }
    }

    /// Adds an operation, in any order; `end` is `None` if its outcome is unknown.
    ///
    /// A READ with an unknown outcome proves nothing and need not be recorded.
    pub fn record(&mut self, start: u64, end: Option<u64>, action: Action) {
        self.operations.push(Operation { start, end, action });
    }

    /// The number of recorded operations.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.operations.len()
    }

    /// Whether no operation was recorded.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }

    /// Whether the history is linearizable.
    ///
    /// # Errors
    /// The longest order that was found, or that the search was stopped.
    pub fn check(&self) -> Result<(), Refusal> {
        search::search(self.initial, &self.relevant())
    }

    /// The operations in the order of their starts, without those with an unknown outcome whose
    /// effect was never observed: they explain no result.
    fn relevant(&self) -> Vec<Operation> {
        let is_sum = |operation: &Operation| matches!(operation.action, Action::Add { .. });
        let has_sums = self.operations.iter().any(is_sum);
        let mut seen: Vec<u64> = Vec::new();
        seen.extend(self.operations.iter().flat_map(|o| o.action.observes()).flatten());
        seen.sort_unstable();
        let matters = |operation: &&Operation| {
            let left = operation.action.leaves();
            let is_seen = left.is_none_or(|left| seen.binary_search(&left).is_ok());
            operation.end.is_some() || has_sums || is_seen
        };
        let mut relevant: Vec<_> = self.operations.iter().filter(matters).copied().collect();
        relevant.sort_by_key(|operation| operation.start);
        relevant
    }
}

#[cfg(test)]
mod tests;
