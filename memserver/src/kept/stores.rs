//! Stores to memory that may outlive the process.
//!
//! Everything that is kept is changed by these functions only, so that a test can log every store,
//! and show what the next process makes of each prefix of them.

use zerocopy::{Immutable, IntoBytes};

use crate::memory;

/// Copies bytes.
pub(crate) fn copy(to: &mut [u8], from: &[u8]) {
    #[cfg(test)]
    log::bytes(to.as_ptr() as usize, from);
    to.copy_from_slice(from);
}

/// Fills with zeros.
pub(crate) fn clear(to: &mut [u8]) {
    #[cfg(test)]
    log::bytes(to.as_ptr() as usize, &vec![0; to.len()]);
    to.fill(0);
}

/// Stores a value; a process that is killed may have stored a part of it.
pub(crate) fn set<T: IntoBytes + Immutable>(to: &mut T, value: T) {
    #[cfg(test)]
    log::bytes(core::ptr::from_ref(to) as usize, value.as_bytes());
    *to = value;
}

/// Stores a word after all earlier stores and before all later ones.
pub(crate) fn set_in_order(to: &mut u32, value: u32) {
    #[cfg(test)]
    log::bytes(core::ptr::from_ref(to) as usize, value.as_bytes());
    memory::store_in_order(to, value);
}

/// Begins a change of what a sequence lock protects: `sequence` becomes odd before all later stores.
pub(crate) fn begin_change(sequence: &mut u64) {
    let odd = *sequence | 1;
    #[cfg(test)]
    log::bytes(core::ptr::from_ref(sequence) as usize, odd.as_bytes());
    memory::store_before(sequence, odd);
}

/// Ends a change: `sequence` gets an even value after all earlier stores.
pub(crate) fn end_change(sequence: &mut u64, even: u64) {
    #[cfg(test)]
    log::bytes(core::ptr::from_ref(sequence) as usize, even.as_bytes());
    memory::store_after(sequence, even);
}

#[cfg(test)]
pub(crate) mod log {
    //! The stores of this thread, if it logs them.

    use std::cell::RefCell;

    /// A store: its address, and the bytes.
    pub(crate) type Store = (usize, Vec<u8>);

    /// Longer stores are several: a process can be killed in the middle of one.
    const STORE_BYTES: usize = 512;
    const WORD_BYTES: usize = 8;

    thread_local! {
        static LOG: RefCell<Option<Vec<Store>>> = const { RefCell::new(None) };
    }

    /// Begins an empty log.
    pub(crate) fn begin() {
        LOG.with_borrow_mut(|log| *log = Some(Vec::new()));
    }

    /// Ends the log and returns it.
    pub(crate) fn end() -> Vec<Store> {
        LOG.with_borrow_mut(Option::take).unwrap_or_default()
    }

    pub(super) fn bytes(address: usize, bytes: &[u8]) {
        LOG.with_borrow_mut(|log| {
            let Some(log) = log else { return };
            let unit = if bytes.len() > 64 { STORE_BYTES } else { WORD_BYTES };
            for (number, chunk) in bytes.chunks(unit).enumerate() {
                log.push((address + number * unit, chunk.to_vec()));
            }
        });
    }
}
