//! The reference model: what memory may hold, given what the clients were told.

pub mod cells;
pub mod pages;
pub mod registers;

pub use cells::{AddCell, SwapCell};
pub use pages::PrivatePage;
pub use registers::Register;

use std::collections::BTreeSet;

/// Every sum that some of `parts` can have, beside `base`.
///
/// What ended with an unknown outcome was done once or not at all, so any subset may have been.
#[must_use]
pub fn subset_sums(base: u64, parts: &[u64]) -> BTreeSet<u64> {
    let mut sums = BTreeSet::from([base]);
    for part in parts {
        let with: Vec<_> = sums.iter().map(|sum| sum.wrapping_add(*part)).collect();
        sums.extend(with);
    }
    sums
}
