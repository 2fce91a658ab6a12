//! Whether what clients saw of one page or one word can have happened one after the other.
//!
//! A history is what each operation asked and was told, and when it began and ended. It is
//! *linearizable* if every operation can be given one moment between its beginning and its end, so
//! that the operations, done at these moments, answer what was answered. An operation whose outcome
//! is unknown may have happened at any moment after its beginning, or not at all.
//!
//! The search is that of Wing and Gong with the memory of Lowe: it takes operations that may come
//! next until it is stuck, goes back, and never visits the same set of operations with the same
//! contents twice. It is complete: what it refuses has no order.

mod search;

use core::fmt;

/// What an operation did to the word, or the page whose contents stand for a word.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Action {
    /// FETCH_ADD.
    Add {
        /// What was added.
        addend: u64,
        /// What was answered; `None` if the outcome is unknown.
        previous: Option<u64>,
    },
    /// READ, or an UPDATE that ended without a change.
    Read {
        /// What was answered.
        value: u64,
    },
    /// CAS.
    Swap {
        /// What had to be there.
        expected: u64,
        /// What was to come in its place.
        new: u64,
        /// What was answered; `None` if the outcome is unknown.
        previous: Option<u64>,
    },
    /// UPDATE and COMMIT: nothing comes between what was seen and what was written.
    Update {
        /// What UPDATE answered.
        before: u64,
        /// What COMMIT wrote.
        after: u64,
    },
    /// WRITE.
    Write {
        /// What was written.
        value: u64,
    },
}

impl Action {
    /// What the word holds afterwards; `None` if the answer does not fit what it held.
    fn apply(self, held: u64) -> Option<u64> {
        let told = |previous: Option<u64>| previous.is_none_or(|previous| previous == held);
        match self {
            Self::Add { addend, previous } => told(previous).then(|| held.wrapping_add(addend)),
            Self::Read { value } => (value == held).then_some(held),
            Self::Swap { expected, new, previous } => {
                told(previous).then_some(if held == expected { new } else { held })
            }
            Self::Update { before, after } => (before == held).then_some(after),
            Self::Write { value } => Some(value),
        }
    }

    /// The contents that show that another operation happened before this one.
    const fn observes(self) -> [Option<u64>; 2] {
        match self {
            Self::Add { previous, .. } => [previous, None],
            Self::Read { value } => [Some(value), None],
            Self::Swap { expected, previous, .. } => [Some(expected), previous],
            Self::Update { before, .. } => [Some(before), None],
            Self::Write { .. } => [None, None],
        }
    }

    /// What it alone puts there, if that does not depend on what was there.
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
    /// When it began.
    pub start: u64,
    /// When it ended; `None` if its outcome is unknown.
    pub end: Option<u64>,
    /// What it did.
    pub action: Action,
}

/// Why a history is not accepted.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Refusal {
    /// No order of the operations explains the answers.
    Impossible {
        /// The longest order that was found.
        done: Vec<Operation>,
        /// What the word held after it.
        held: u64,
        /// Operations that had to come next, none of which fits.
        stuck: Vec<Operation>,
    },
    /// The search was given up: too many operations overlap.
    Undecided,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Impossible { done, held, stuck } => {
                write!(f, "no order explains the answers: after {} operations", done.len())?;
                let last = done.iter().rev().take(3).rev();
                last.clone().try_for_each(|operation| write!(f, ", {operation:?}"))?;
                write!(f, " it holds {held:#x}; none fits of {stuck:?}")
            }
            Self::Undecided => f.write_str("too many operations overlap to decide"),
        }
    }
}

/// What all clients together did to one word or page.
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
    /// A READ with an unknown outcome says nothing and needs not be told.
    pub fn record(&mut self, start: u64, end: Option<u64>, action: Action) {
        self.operations.push(Operation { start, end, action });
    }

    /// How many operations were recorded.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.operations.len()
    }

    /// Whether none was recorded.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }

    /// Whether the history is linearizable.
    ///
    /// # Errors
    /// Where the longest order ends, or that the search was given up.
    pub fn check(&self) -> Result<(), Refusal> {
        search::search(self.initial, &self.relevant())
    }

    /// The operations by their beginnings, without those with an unknown outcome that nobody saw:
    /// where these come, if at all, explains no answer.
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
