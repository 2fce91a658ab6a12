//! The embedded switch: soft and eBPF data planes behind a P4Runtime server.
//!
//! * [`dataplane`]: the trait that both data planes have, and its types.
//! * [`soft`]: the pipeline in plain Rust; [`ebpf`]: the pipeline in the kernel (`bpf/` is its C part).
//! * [`agent`]: the P4Runtime server in front of either.
//! * `draw`: random draws and the anycast choice, the same in both; [`offload`], `interface` and `packet_socket`: the system calls.
//! * `conformance`: the tests that hold both data planes to the same packet vectors.

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
