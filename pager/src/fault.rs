//! Who resolves faults.
//!
//! * `in_thread`: the faulting thread, in the handler of SIGBUS.
//! * `threads`: handler threads, which read events.

pub(crate) mod in_thread;
pub(crate) mod threads;
