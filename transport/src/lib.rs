//! Datagram carriers behind one small polled trait.
//!
//! A carrier moves UDP datagrams whose addresses are fabric pointers; it does not interpret them. The interface is
//! [`Transport`]: it sends and receives batches, the carrier owns the buffers, there is no allocation per datagram, and
//! the calling thread drives it. [`udp`] uses a kernel socket, and [`memory`] connects threads of one process;
//! [`impaired`] and `capture` (a cargo feature) wrap any carrier to impair or record its traffic.
//!
//! All system calls are in `udp/sys.rs` and `udp/sys/`, the only files with `unsafe`.
//!
//! * `transport`: the trait; `error`: how it fails; `wake`: waking a thread that waits in it; `spin`: how long to poll
//!   before sleeping; `polling`: giving way to other threads meanwhile.
//! * `clock`: real and virtual time; [`interface`]: the system's data about an interface.

#![deny(unsafe_code)]

#[cfg(feature = "capture")]
pub mod capture;
mod clock;
mod error;
pub mod impaired;
pub mod interface;
pub mod memory;
mod polling;
mod spin;
mod transport;
pub mod udp;
mod wake;

pub use bluebridge_time::Timestamp;
pub use clock::{ManualClock, monotonic_now};
pub use error::{OpenError, ReceiveError, TransmitError};
pub use spin::Spin;
pub use transport::{Capabilities, Counters, Incoming, Outgoing, Polled, Transport, Wait};
pub use wake::{Wakeable, Waker};
