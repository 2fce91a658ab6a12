//! The reference model: the possible contents of memory, given the clients' results.

pub mod cells;
pub mod pages;
pub mod registers;

pub use cells::{AddCell, SwapCell};
pub use pages::PrivatePage;
pub use registers::Register;

use std::collections::BTreeSet;

/// Every sum that some of `parts` can have, beside `base`.
///
/// An operation with an unknown outcome was executed once or not at all, so any subset is possible.
#[must_use]
pub fn subset_sums(base: u64, parts: &[u64]) -> BTreeSet<u64> {
    let mut sums = BTreeSet::from([base]);
    for part in parts {
        let with: Vec<_> = sums.iter().map(|sum| sum.wrapping_add(*part)).collect();
        sums.extend(with);
    }
    sums
}
