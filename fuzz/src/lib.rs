//! Properties that must hold for any input; one function per fuzz target.
//!
//! The tests named `smoke` of the fuzzed crates run the same functions over mutated valid input on every test run.

pub mod openflow;
pub mod wire;
