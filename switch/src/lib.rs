//! The embedded switch: soft and eBPF data planes behind a P4Runtime server.

pub mod dataplane;
mod draw;
pub mod soft;
