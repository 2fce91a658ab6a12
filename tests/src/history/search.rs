//! The search for an order.

use std::collections::HashSet;

use super::{Operation, Refusal};

/// Steps after which the search is stopped.
const STEPS_MAX: usize = 5_000_000;

/// The executed operations: all before `first`, and from there on those in `bits`.
#[derive(Clone, Debug, Default, Eq, Hash, PartialEq)]
struct Done {
    first: usize,
    bits: Vec<u64>,
}

impl Done {
    fn contains(&self, index: usize) -> bool {
        index
            .checked_sub(self.first)
            .is_none_or(|at| self.bits.get(at / 64).is_some_and(|bits| bits >> (at % 64) & 1 == 1))
    }

    /// The set with one more operation. The base moves by whole words, so that equal sets have
    /// equal representations.
    fn with(&self, index: usize) -> Self {
        let mut done = self.clone();
        let at = index - done.first;
        if done.bits.len() <= at / 64 {
            done.bits.resize(at / 64 + 1, 0);
        }
        done.bits[at / 64] |= 1 << (at % 64);
        let full = done.bits.iter().take_while(|bits| **bits == u64::MAX).count();
        done.bits.drain(..full);
        done.first += full * 64;
        done
    }
}

/// A state of the search: the executed operations, the value, and the next candidates.
struct Place {
    done: Done,
    held: u64,
    /// The operation that led to this state.
    by: Option<usize>,
    next: Vec<usize>,
}

/// Searches for an order of `operations`, which are sorted by their beginnings.
pub(super) fn search(initial: u64, operations: &[Operation]) -> Result<(), Refusal> {
    let place = |done: Done, held, by| {
        let next = candidates(operations, &done);
        Place { done, held, by, next }
    };
    let mut visited = HashSet::new();
    let mut places = vec![place(Done::default(), initial, None)];
    let mut longest = (Vec::new(), initial, Vec::new());
    let mut steps = 0;
    loop {
        let depth = places.len();
        let Some(last) = places.last_mut() else {
            let (done, held, stuck) = longest;
            let all = |of: Vec<usize>| of.into_iter().map(|index| operations[index]).collect();
            return Err(Refusal::Impossible { done: all(done), held, stuck: all(stuck) });
        };
        if last.next.iter().all(|index| operations[*index].end.is_none())
            && is_complete(operations, &last.done)
        {
            return Ok(());
        }
        let Some(index) = last.next.pop() else {
            if depth > longest.0.len() + 1 || longest.2.is_empty() {
                let stuck = candidates(operations, &last.done);
                let held = last.held;
                let done = places.iter().filter_map(|place| place.by).collect();
                longest = (done, held, stuck);
            }
            places.pop();
            continue;
        };
        steps += 1;
        if steps > STEPS_MAX {
            return Err(Refusal::Undecided);
        }
        let Some(held) = operations[index].action.apply(last.held) else { continue };
        let done = last.done.with(index);
        if visited.insert((done.clone(), held)) {
            places.push(place(done, held, Some(index)));
        }
    }
}

/// Operations that may come next: those that started before each other remaining one had ended. The
/// most likely one, which ends first, is the last.
fn candidates(operations: &[Operation], done: &Done) -> Vec<usize> {
    let mut next = Vec::new();
    let mut first_end = u64::MAX;
    for (index, operation) in operations.iter().enumerate().skip(done.first) {
        if operation.start > first_end {
            break;
        }
        if !done.contains(index) {
            first_end = first_end.min(operation.end.unwrap_or(u64::MAX));
            next.push(index);
        }
    }
    next.sort_by_key(|index| core::cmp::Reverse(operations[*index].end.unwrap_or(u64::MAX)));
    next
}

fn is_complete(operations: &[Operation], done: &Done) -> bool {
    let mut left = operations.iter().enumerate().skip(done.first);
    left.all(|(index, operation)| operation.end.is_none() || done.contains(index))
}
