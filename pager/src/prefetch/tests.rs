//! Tests of the prefetcher: single rules, any faults, and simulated programs.

mod rules;
mod simulation;
