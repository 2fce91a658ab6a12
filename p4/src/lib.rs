//! The switch pipeline and the P4Runtime vocabulary, shared by switch agent and controller.
//!
//! * [`pipeline`]: the typed table entries: what a table can match and do.
//! * [`declaration`]: declares every table once, with ids, names and widths.
//! * [`p4info`]: generates P4Info from the declaration; [`c_header`]: the header of the eBPF programs.
//! * [`entry`]: converts typed entries to P4Runtime messages and back; [`bytestring`]: their values.
//! * [`program`]: the P4 program, compiled for BMv2.
//! * [`proto`]: the messages and services of P4Runtime and of the switch's own service.

pub mod bytestring;
pub mod c_header;
pub mod declaration;
pub mod entry;
pub mod p4info;
pub mod pipeline;
pub mod program;
pub mod proto;
pub mod words;
