//! The soft data plane: the pipeline in plain Rust.
//!
//! [`Pipeline`] is a state machine without I/O: frames and the time go in, frames and the next
//! deadline come out, so simulations run it in virtual time. [`Switch`] runs one in a thread of
//! its own over `AF_PACKET` sockets, also without root in a user namespace.

mod control;
mod frame;
mod impair;
mod pipeline;
mod switch;
mod tables;
mod train;

pub use pipeline::Pipeline;
pub use switch::Switch;

use bluebridge_p4::pipeline::{MacAddr, SwitchPort};

/// The offload state that a frame travels with: a `virtio_net_hdr` as `PACKET_VNET_HDR` gives it.
///
/// It says whether the checksum is yet to be filled in and whether the frame is a train to be
/// segmented; the default says neither.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Offload(pub [u8; 10]);

impl Offload {
    /// Whether the frame is a train that some link is to cut into frames of its MTU.
    #[must_use]
    pub const fn is_segmented(self) -> bool {
        self.0[1] != 0
    }
}

/// Where a pipeline's frames go.
pub trait Egress {
    /// Takes a frame that leaves by a port; false if it cannot (its queue is full), in which case
    /// the pipeline counts a drop.
    fn transmit(&mut self, port: SwitchPort, frame: &[u8], offload: Offload) -> bool;
}

impl Egress for Vec<(SwitchPort, Vec<u8>)> {
    fn transmit(&mut self, port: SwitchPort, frame: &[u8], _offload: Offload) -> bool {
        self.push((port, frame.to_vec()));
        true
    }
}

/// What a pipeline knows of the link behind a port.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Link {
    /// The interface's name.
    pub name: String,
    /// The interface's MAC address.
    pub mac: MacAddr,
    /// The interface's MTU in bytes; a longer frame is dropped, and a train of longer segments.
    pub mtu: u32,
}

#[cfg(test)]
mod tests;
