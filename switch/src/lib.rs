//! The embedded switch: soft and eBPF data planes behind a P4Runtime server.

pub mod agent;
pub mod dataplane;
mod draw;
pub mod ebpf;
mod interface;
pub mod offload;
mod packet_socket;
pub mod soft;

#[cfg(test)]
mod conformance;
