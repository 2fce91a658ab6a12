//! The soft data plane: the pipeline in plain Rust.
//!
//! [`Pipeline`] is a state machine without I/O: its inputs are frames and the time, its outputs frames and the
//! next deadline, so simulations run it in virtual time. [`Switch`] runs one in its own thread over
//! `AF_PACKET` sockets, also without root in a user namespace, or over Unix sockets.
//!
//! * `pipeline`: the state machine; `tables`: its tables; `control`: it as a data plane.
//! * `frame`, `train`: what is parsed and rewritten; `impair`: loss, delay and reordering at egress.
//! * `switch`: the thread; `wires`: its sockets.

mod control;
mod frame;
mod impair;
mod pipeline;
mod switch;
mod tables;
mod train;
mod wires;

pub use pipeline::Pipeline;
pub use switch::Switch;

use bluebridge_p4::pipeline::{MacAddr, SwitchPort};

/// The offload state of a frame: a `virtio_net_hdr` as `PACKET_VNET_HDR` supplies it.
///
/// It says whether the checksum must still be filled in and whether the frame is a train to be
/// segmented; in the default neither is the case.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Offload(pub [u8; 10]);

impl Offload {
    /// Whether the frame is a train that a link must split into frames of its MTU.
    #[must_use]
    pub const fn is_segmented(self) -> bool {
        self.0[1] != 0
    }
}

/// The output of a pipeline.
pub trait Egress {
    /// Sends a frame through a port; false if it cannot (its queue is full); the pipeline then
    /// counts a drop.
    fn transmit(&mut self, port: SwitchPort, frame: &[u8], offload: Offload) -> bool;
}

impl Egress for Vec<(SwitchPort, Vec<u8>)> {
    fn transmit(&mut self, port: SwitchPort, frame: &[u8], _offload: Offload) -> bool {
        self.push((port, frame.to_vec()));
        true
    }
}

/// The properties of the link at a port.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Link {
    /// The interface's name.
    pub name: String,
    /// The interface's MAC address.
    pub mac: MacAddr,
    /// The interface's MTU in bytes; a longer frame is dropped, and so is a train of longer segments.
    pub mtu: u32,
}

#[cfg(test)]
mod tests;
