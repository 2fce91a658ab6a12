//! Errors, and who can resolve them.

use std::io;
use std::net::Ipv6Addr;
use std::time::Duration;

/// RDMA cannot be used on this machine, or not with this device.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The library is not installed.
    #[error(
        "no libibverbs: {reason}; install it (Debian: apt-get install libibverbs1 ibverbs-providers), \
         or go on without RDMA"
    )]
    NoLibrary {
        /// What the system says.
        reason: String,
    },
    /// The library is too old.
    #[error("libibverbs has no {symbol} of version {version}: install rdma-core 32 or newer")]
    OldLibrary {
        /// The symbol.
        symbol: String,
        /// Its version.
        version: String,
    },
    /// The library found no device.
    #[error(
        "no RDMA device: load the driver of the adapter, check `rdma link`, and install the library's drivers \
         (Debian: apt-get install ibverbs-providers); \
         over an ordinary interface: `modprobe rdma_rxe` and `rdma link add rxe0 type rxe netdev INTERFACE`"
    )]
    NoDevice,
    /// There are other devices.
    #[error("there is no RDMA device {name}; there are: {found}")]
    UnknownDevice {
        /// The name.
        name: String,
        /// The names of the devices that are there.
        found: String,
    },
    /// The system refused to open a device, or to list them.
    #[error(
        "cannot {action}: {reason}; RDMA needs access to /dev/infiniband and the module ib_uverbs"
    )]
    Refused {
        /// What was refused.
        action: String,
        /// The system's error.
        reason: String,
    },
    /// The device has no such address.
    #[error(
        "RDMA device {device} has no RoCE version 2 address {address}; \
         only addresses of its own network interface are (`ip -6 addr`), and the first 256 of them{}",
        skipped.iter().map(|error| format!("; not looked at: {error}")).collect::<String>()
    )]
    NoAddress {
        /// The device, or those that were looked at.
        device: String,
        /// The address.
        address: Ipv6Addr,
        /// Why other devices could not be looked at.
        skipped: Vec<Self>,
    },
}

/// A verb that the device or the system refused.
#[derive(Debug, thiserror::Error)]
#[error("{verb} failed: {source}")]
pub struct VerbError {
    /// Its name in the manual.
    pub verb: &'static str,
    /// The system's error.
    #[source]
    pub source: io::Error,
}

impl VerbError {
    /// Of a verb that sets `errno`.
    pub(crate) fn last(verb: &'static str) -> Self {
        Self { verb, source: io::Error::last_os_error() }
    }

    /// Of a verb that returns zero or the error's number.
    pub(crate) fn check(verb: &'static str, code: i32) -> Result<(), Self> {
        match code {
            0 => Ok(()),
            // Some drivers return the negative number, or -1 and set `errno`.
            -1 => Err(Self::last(verb)),
            code => Err(Self { verb, source: io::Error::from_raw_os_error(code.saturating_abs()) }),
        }
    }
}

/// A pool of buffers could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// The buffers are too long for a request: the caller is at fault.
    #[error(
        "a buffer of {bytes} bytes is too long for a request: make them at most {most} bytes long"
    )]
    TooLong {
        /// What was asked for.
        bytes: usize,
        /// The most.
        most: usize,
    },
    /// All buffers together are longer than the memory of any machine.
    #[error("{count} buffers of {bytes} bytes are too many: ask for fewer")]
    TooMany {
        /// How many were asked for.
        count: u32,
        /// The length of each.
        bytes: usize,
    },
    /// The system or the device refused.
    #[error(transparent)]
    Verb(#[from] VerbError),
}

/// A queue pair could not be made or connected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// It has failed or was connected before: make another.
    #[error("the queue pair was already connected: make another")]
    AlreadyConnected,
    /// The system did not answer in time, such as while it looked for the way to the peer: make another queue pair.
    #[error(
        "the system did not connect the queue pair within {waited:?}: make another, and check the way to the peer"
    )]
    Deadline {
        /// The time that it had.
        waited: Duration,
    },
    /// The device has less than was asked for.
    #[error("the device allows {most} {what}, and {wanted} were asked for: ask for fewer")]
    TooMany {
        /// What there is too little of.
        what: &'static str,
        /// What was asked for.
        wanted: u32,
        /// What the device allows.
        most: u32,
    },
    /// The device refused.
    #[error(transparent)]
    Verb(#[from] VerbError),
}

/// A work request was not posted; nothing of it is executed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PostError {
    /// The buffer is of a pool that was not given to this queue pair: the caller is at fault.
    #[error("the buffer belongs to another pool than the queue pair's")]
    ForeignBuffer,
    /// As many requests as were agreed are outstanding: take completions first.
    #[error("the queue is full: take completions first")]
    Full,
    /// A chain of no requests, or of more than the most.
    #[error("a chain has 1 to {} requests, not {count}", crate::CHAIN_MAX)]
    Length {
        /// How many it has.
        count: usize,
    },
    /// A READ or a message of no bytes: the caller is at fault. Some devices take the length 0 for 2 GiB.
    #[error("a READ or a message has at least one byte")]
    NoBytes,
    /// The queue pair is not connected, or has failed: make another.
    #[error("the queue pair is not connected, or has failed: make another")]
    NotConnected,
    /// A part of the buffer that is outside of it: the caller is at fault.
    #[error("bytes {offset} to {offset} + {length} are outside of a buffer of {bytes} bytes")]
    Outside {
        /// Where the part begins.
        offset: usize,
        /// Its length.
        length: usize,
        /// The buffer's length.
        bytes: usize,
    },
    /// The device refused.
    #[error(transparent)]
    Verb(#[from] VerbError),
}

/// Why a posted request failed. The queue pair has failed with it: later requests complete as [`Self::Flushed`].
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// It was not executed, or not completely, because the queue pair failed before.
    #[error("not executed: the queue pair had failed before")]
    Flushed,
    /// The message is longer than the buffer that was posted for it: the peer is at fault.
    #[error("the message is longer than the buffer that was posted for it")]
    Length,
    /// The device took only a part of the chain, such as for lack of room: its bytes may be there or not.
    #[error("the device took only a part of the chain")]
    PartlyPosted,
    /// The peer's device refused the access: a wrong or revoked key, an address outside of the region, or a right that
    /// the region does not give.
    #[error("the peer's device refused the access: wrong or revoked key, or outside of the region")]
    RemoteAccess,
    /// The peer's device cannot execute such a request, such as a message longer than its buffer.
    #[error("the peer's device refused the request as invalid")]
    RemoteInvalid,
    /// The peer's device failed to execute it.
    #[error("the peer's device could not execute the request")]
    RemoteOperation,
    /// The peer had no buffer for the message, for as long as was agreed.
    #[error("the peer had no buffer for the message")]
    ReceiverNotReady,
    /// The peer's device did not acknowledge it: it, its process or the way to it is gone.
    #[error("no acknowledgement from the peer's device: it, its process or the way to it is gone")]
    Unreachable,
    /// Anything else, by its number in `enum ibv_wc_status`.
    #[error("status {status} of the device (vendor error {vendor_error:#x})")]
    Other {
        /// The status.
        status: u32,
        /// What the device's maker says of it.
        vendor_error: u32,
    },
}
