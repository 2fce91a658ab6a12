//! The binary, as its users call it.

mod controller;
mod demo;
mod root;
mod usage;
