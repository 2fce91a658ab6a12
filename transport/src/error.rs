//! Errors of a carrier, and who can resolve them.

use std::io;
use std::net::Ipv6Addr;

use crate::udp::NoFrames;

/// A carrier could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The port is taken, or binding is not permitted: choose another port or stop its owner.
    #[error("cannot bind UDP port {port}: {error}")]
    Bind {
        /// The requested port.
        port: u16,
        /// The system's error.
        #[source]
        error: io::Error,
    },
    /// Datagrams cannot be sent as frames, and the configuration requires it.
    #[error(
        "cannot send datagrams as frames: {0}; or let the UDP socket send them (--frames auto)"
    )]
    Frames(#[source] NoFrames),
    /// The configured interface does not exist or may not be used: correct the configuration.
    #[error("cannot use network interface {name}: {error}")]
    Interface {
        /// Its name, as configured.
        name: String,
        /// The system's error.
        #[source]
        error: io::Error,
    },
    /// The system lacks or forbids a socket option that the carrier needs.
    #[error("the system refused socket option {option}: {error}")]
    SocketOption {
        /// The option's name in the system's headers.
        option: &'static str,
        /// The system's error.
        #[source]
        error: io::Error,
    },
    /// No IPv6 UDP socket could be created: the system has no IPv6, or no descriptors are left.
    #[error("cannot open an IPv6 UDP socket: {0}")]
    Socket(#[source] io::Error),
}

/// The first datagram of a batch could not be sent; no datagram of the batch was sent.
///
/// A busy carrier is not an error: it sends a shorter prefix.
#[derive(Debug, thiserror::Error)]
pub enum TransmitError {
    /// The system refused the addresses (not a unicast source, a filter, no permission): the configuration is at fault.
    #[error("the system refused to send from {source_address} to {destination}: {error}")]
    Refused {
        /// Source address of the datagram.
        source_address: Ipv6Addr,
        /// Destination address of the datagram.
        destination: Ipv6Addr,
        /// The system's error.
        #[source]
        error: io::Error,
    },
    /// The carrier itself failed and cannot recover: open another.
    #[error("the carrier failed: {0}")]
    Socket(#[source] io::Error),
    /// The caller's datagram does not fit the link; nothing is ever fragmented.
    #[error("a datagram of {payload_bytes} bytes does not fit{}; use smaller pieces or a larger MTU", limit(*.limit_bytes))]
    TooLarge {
        /// UDP payload bytes of the datagram.
        payload_bytes: usize,
        /// Most UDP payload bytes that fit the path to the destination, if the carrier could determine it.
        limit_bytes: Option<usize>,
    },
    /// There is no route to the destination: the host's routes to the fabric are missing or its link is down.
    #[error(
        "no route to {destination}: {error}; check that the link is up and that the route to the fabric is set up"
    )]
    Unreachable {
        /// Destination address of the datagram.
        destination: Ipv6Addr,
        /// The system's error.
        #[source]
        error: io::Error,
    },
}

fn limit(limit_bytes: Option<usize>) -> String {
    limit_bytes.map_or_else(String::new, |bytes| {
        format!(" the {bytes} bytes that the MTU of {} leaves", bytes + crate::udp::HEADER_BYTES)
    })
}

/// Receiving failed permanently; errors that the network reports are only counted.
#[derive(Debug, thiserror::Error)]
pub enum ReceiveError {
    /// The carrier itself failed and cannot recover: open another.
    #[error("the carrier failed: {0}")]
    Socket(#[source] io::Error),
}
