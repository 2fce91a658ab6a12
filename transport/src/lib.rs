//! Datagram carriers behind one small polled trait.
//!
//! A carrier moves UDP datagrams whose addresses are fabric pointers; it knows nothing of what they mean. The
//! seam is [`Transport`]: batches go in and out, buffers belong to the carrier, nothing is allocated per datagram, and
//! the calling thread drives it. [`udp`] carries over a kernel socket and [`memory`] between threads of one process;
//! [`impaired`] and `capture` (a cargo feature) wrap any carrier to mistreat or to record its traffic.
//!
//! System calls live in `udp/sys.rs` and nowhere else; it is the only file with `unsafe`.

#![deny(unsafe_code)]

#[cfg(feature = "capture")]
pub mod capture;
mod clock;
mod error;
pub mod impaired;
pub mod interface;
pub mod memory;
mod transport;
pub mod udp;
mod wake;

pub use clock::{ManualClock, Timestamp};
pub use error::{OpenError, ReceiveError, TransmitError};
pub use transport::{Capabilities, Counters, Incoming, Outgoing, Transport, Wait};
pub use wake::{Wakeable, Waker};
