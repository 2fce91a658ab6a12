//! Tests of the replacement: single rules, a model, and simulated programs.

mod model;
mod prefetched;
mod rules;
mod simulation;
mod traces;
