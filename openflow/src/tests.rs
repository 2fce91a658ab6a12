//! The codec against the specification, against itself, and against broken input.

mod arbitrary;
mod faults;
mod golden;
mod lengths;
mod properties;
mod rules;
