//! The embedded switch: soft and eBPF data planes behind a P4Runtime server.
//!
//! * [`dataplane`]: the trait that both data planes have, and its types.
//! * [`soft`]: the pipeline in plain Rust; [`ebpf`]: the pipeline in the kernel (`bpf/` is its C part).
//! * [`agent`]: the P4Runtime server in front of either.
//! * `draw`: random draws and the anycast choice, the same in both; [`offload`], [`interface`],
//!   [`packet_socket`] and [`socket_link`]: the system calls.
//!
//! The crate `conformance` holds both data planes, and other switches, to the same packet vectors.

pub mod agent;
pub mod dataplane;
mod draw;
pub mod ebpf;
pub mod interface;
pub mod offload;
pub mod packet_socket;
pub mod socket_link;
pub mod soft;
