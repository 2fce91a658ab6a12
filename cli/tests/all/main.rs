//! The binary, as its users run it.

mod controller;
mod demo;
mod root;
mod usage;
