//! The switch pipeline and the P4Runtime vocabulary shared by switch agent and controller.
//!
//! [`pipeline`] holds the typed table entries: what a table can match and do. Everything else in
//! this crate turns them into P4Runtime messages and back.

pub mod pipeline;
