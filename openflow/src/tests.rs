//! The codec against the specification, against itself, and against broken input.

mod arbitrary;
mod golden;
mod properties;
mod rules;
