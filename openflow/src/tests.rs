//! The codec against the specification, against itself, and against broken input.

mod golden;
mod rules;
