//! The seam: what every carrier can do.

use core::time::Duration;
use std::net::Ipv6Addr;

use crate::{ReceiveError, Timestamp, TransmitError};

/// One datagram that arrived, in the carrier's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Incoming<'a> {
    /// Source address.
    pub source: Ipv6Addr,
    /// UDP source port.
    pub source_port: u16,
    /// Destination address: the pointer the sender used.
    pub destination: Ipv6Addr,
    /// UDP payload.
    pub payload: &'a [u8],
}

/// One datagram to send; `header` and `data` follow each other in its payload and need not do so in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outgoing<'a> {
    /// Source address; it need not be assigned to an interface.
    pub source: Ipv6Addr,
    /// Destination address.
    pub destination: Ipv6Addr,
    /// UDP destination port; the source port is the carrier's own.
    pub destination_port: u16,
    /// First part of the UDP payload.
    pub header: &'a [u8],
    /// Second part of the UDP payload.
    pub data: &'a [u8],
}

impl Outgoing<'_> {
    /// Length of the UDP payload in bytes.
    pub const fn payload_bytes(&self) -> usize {
        self.header.len() + self.data.len()
    }
}

/// How long [`Transport::receive`] may wait for a first datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    /// Time to poll without sleeping; ends at the deadline too.
    pub spin: Duration,
    /// Moment on the carrier's clock until which to sleep after that.
    pub deadline: Timestamp,
}

impl Wait {
    /// No wait at all: take what is there.
    pub const NONE: Self = Self { spin: Duration::ZERO, deadline: Timestamp::ZERO };

    /// Sleep until `deadline`, without spinning.
    pub const fn until(deadline: Timestamp) -> Self {
        Self { spin: Duration::ZERO, deadline }
    }

    /// Spin for `spin`, then sleep until `deadline`.
    pub const fn spinning(spin: Duration, deadline: Timestamp) -> Self {
        Self { spin, deadline }
    }
}

/// What a carrier offers; constant but for trains, which a carrier gives up when the system refuses them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Its name, as configurations and reports call it.
    pub name: &'static str,
    /// Largest UDP payload it takes; on a link with a known MTU what that leaves. The path may allow less.
    pub largest_payload_bytes: usize,
    /// Datagrams it hands on in one step; longer batches work and take several.
    pub batch_count: usize,
    /// Most datagrams that travel as one train (UDP segmentation offload); 1 where there is no offload.
    pub train_segment_count: usize,
    /// Most payload bytes of one train.
    pub train_bytes: usize,
    /// Room for datagrams that wait to be received, as the system accounts for it (its own overhead included).
    pub receive_buffer_bytes: usize,
}

/// What a carrier has done since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Datagrams sent.
    pub sent_count: u64,
    /// UDP payload bytes sent.
    pub sent_bytes: u64,
    /// Trains of two or more datagrams sent in one piece.
    pub sent_train_count: u64,
    /// Times the carrier was too busy to take the whole batch.
    pub send_blocked_count: u64,
    /// Trains that the system refused to take in one piece.
    pub train_refused_count: u64,
    /// Datagrams received and handed to the caller.
    pub received_count: u64,
    /// UDP payload bytes received and handed to the caller.
    pub received_bytes: u64,
    /// Trains of two or more datagrams received in one piece.
    pub received_train_count: u64,
    /// Datagrams dropped on reception because no room was left for them; kernel sockets count damaged ones too, modulo
    /// 2^32.
    pub overflow_drop_count: u64,
    /// Datagrams dropped because their destination is outside of the fabric, or because nobody has it.
    pub foreign_drop_count: u64,
    /// Receptions dropped because the system did not deliver them whole or without their destination, or because they
    /// came in fragments or behind IPv6 extension headers.
    pub malformed_drop_count: u64,
    /// Errors that the network reported (ICMPv6: port unreachable, and the like).
    pub network_error_count: u64,
}

/// A carrier of datagrams, driven by the thread that owns it.
///
/// A step is: `receive`, read each `incoming`, `transmit` the answers.
///
/// ```
/// use bluebridge_transport::{Outgoing, Transport, Wait, memory::Hub};
///
/// let hub = Hub::new(16);
/// let mut here = hub.attach(1000, &["fdbb:1:1::/48".parse()?])?;
/// let mut there = hub.attach(1000, &["fdbb:1:2::/48".parse()?])?;
/// let ping = Outgoing {
///     source: "fdbb:1:1::".parse()?,
///     destination: "fdbb:1:2::4:2000".parse()?,
///     destination_port: 1000,
///     header: b"he",
///     data: b"llo",
/// };
/// assert_eq!(here.transmit(&[ping])?, 1);
/// assert_eq!(there.receive(Wait::NONE)?, 1);
/// assert_eq!(there.incoming(0).destination, ping.destination);
/// assert_eq!(there.incoming(0).payload, b"hello");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Transport {
    /// What the carrier offers.
    fn capabilities(&self) -> &Capabilities;

    /// What the carrier has done so far; may cost a system call, so it is not for the data path.
    fn counters(&self) -> Counters;

    /// The UDP port it receives on and sends from.
    fn local_port(&self) -> u16;

    /// The time on the carrier's clock, which a simulation may move by hand.
    fn now(&self) -> Timestamp;

    /// About when what the last [`receive`](Self::receive) gave was heard: at most the time of some polls before it came,
    /// and not before that call. A carrier that looked at the clock while it waited need not look again.
    fn heard_at(&self) -> Timestamp {
        self.now()
    }

    /// Sends a prefix of `batch` without blocking and says how long it is: short, or 0, when the carrier is busy; try
    /// the rest again later.
    ///
    /// Consecutive datagrams with equal addresses, port and length, of which the last may be shorter, leave as one train
    /// where the carrier can do that.
    ///
    /// # Errors
    ///
    /// A [`TransmitError`] concerns the first datagram, and nothing was sent. An error further on ends the prefix and
    /// shows when the rest is tried.
    fn transmit(&mut self, batch: &[Outgoing<'_>]) -> Result<usize, TransmitError>;

    /// Releases what the last call gave, waits for datagrams as told, and says how many there are.
    ///
    /// It may return 0 before the deadline when a signal arrives, or when the clock is moved by hand.
    ///
    /// # Errors
    ///
    /// [`ReceiveError`] when the carrier failed for good.
    fn receive(&mut self, wait: Wait) -> Result<usize, ReceiveError>;

    /// A datagram of the last [`receive`](Self::receive).
    ///
    /// # Panics
    ///
    /// When `index` is not below the count that call returned.
    fn incoming(&self, index: usize) -> Incoming<'_>;
}

macro_rules! forward {
    () => {
        fn capabilities(&self) -> &Capabilities {
            (**self).capabilities()
        }
        fn counters(&self) -> Counters {
            (**self).counters()
        }
        fn local_port(&self) -> u16 {
            (**self).local_port()
        }
        fn now(&self) -> Timestamp {
            (**self).now()
        }
        fn heard_at(&self) -> Timestamp {
            (**self).heard_at()
        }
        fn transmit(&mut self, batch: &[Outgoing<'_>]) -> Result<usize, TransmitError> {
            (**self).transmit(batch)
        }
        fn receive(&mut self, wait: Wait) -> Result<usize, ReceiveError> {
            (**self).receive(wait)
        }
        fn incoming(&self, index: usize) -> Incoming<'_> {
            (**self).incoming(index)
        }
    };
}

impl<T: Transport + ?Sized> Transport for Box<T> {
    forward!();
}

impl<T: Transport + ?Sized> Transport for &mut T {
    forward!();
}
