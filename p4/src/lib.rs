//! The switch pipeline and the P4Runtime vocabulary shared by switch agent and controller.
//!
//! * [`pipeline`]: the typed table entries, what a table can match and do.
//! * [`proto`]: the messages and services of P4Runtime and of the switch's own service.

pub mod pipeline;
pub mod proto;
