//! The binary, as its users call it.

mod demo;
mod root;
mod usage;
