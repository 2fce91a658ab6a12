//! RDMA verbs in one narrow safe layer: devices, regions, reliable connected queue pairs.
//!
//! The library libibverbs is loaded when the first function is called, so programs are built and run on machines
//! without it; [`OpenError`] says what is missing. The layer does what BlueBridge needs and no more: READs of a peer's
//! memory in short chains, messages in registered buffers, and completions that a thread polls for or sleeps for until
//! its deadline. Nothing is allocated for an operation.
//!
//! What a function promises is what the specification (InfiniBand Architecture Specification, volume 1, with the annex
//! for RoCE version 2) and the manual pages of the verbs promise.
//!
//! * `device`: devices, ports and their addresses, events; `memory`: domains, regions, pools of buffers.
//! * `queue_pair`: requests and their ends, and how it is connected; `completions`: the device's queue of these, and
//!   waiting for it; `slots`: who has which buffer meanwhile.
//! * `messages`: messages over a queue pair; `credits`: when one may be sent.
//! * `library`: the functions of libibverbs; `sys`: its structures; `error`: how all of it fails.
//!
//! # Soundness
//!
//! A device writes to memory without the compiler's knowledge, so a safe program must not be able to look at bytes that
//! a device may write, nor give the memory back. Three rules ensure that:
//!
//! * A posted request takes its [`Buffer`], and its completion returns it. Of a request that failed, the buffer stays
//!   with the queue pair until that is destroyed, because other requests of its chain may still be executed.
//! * Each object keeps what it was made of: a queue pair its pool and its completion queue, these their domain, and that
//!   its device. They are destroyed in this order.
//! * What the device refuses to destroy, or the system still connects, keeps its memory until the process ends.
//!
//! Memory of another owner is registered by an unsafe function, [`MemoryRegion::register`], and only for READs of peers.

#[cfg(not(all(target_os = "linux", target_env = "gnu", target_pointer_width = "64")))]
compile_error!(
    "bluebridge-rdma declares the structures of libibverbs as they are on 64-bit Linux with glibc: build it for such a \
     target, or leave it out"
);

mod completions;
mod credits;
mod device;
mod error;
mod library;
mod memory;
mod messages;
mod queue_pair;
#[cfg(test)]
mod simulated;
mod slots;
mod sys;

pub use credits::{Credits, TooManyCredits};
pub use device::{Device, DeviceEvent, Limits, PathMtu, Port, device_names};
pub use error::{ConnectError, Failure, OpenError, PoolError, PostError, VerbError};
pub use memory::{
    Access, BUFFER_BYTES_MAX, Buffer, BufferPool, MemoryRegion, ProtectionDomain, RemotePlace,
};
pub use messages::{Arrival, Message, MessageError, Messages, Sent};
pub use queue_pair::{
    CHAIN_MAX, Completed, Done, QueuePair, QueuePairAddress, QueuePairOptions, Read, Work,
};
