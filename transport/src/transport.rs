//! The interface of every carrier.

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
    /// Destination address: the pointer that the sender used.
    pub destination: Ipv6Addr,
    /// UDP payload.
    pub payload: &'a [u8],
}

/// One datagram to send; `header` and `data` are consecutive in its payload but need not be in memory.
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
    /// Time to poll without sleeping; it also ends at the deadline. Time in which other threads had the core does not count.
    pub spin: Duration,
    /// Moment on the carrier's clock until which it sleeps afterwards.
    pub deadline: Timestamp,
    /// Whether it sleeps.
    pub sleeps: bool,
}

impl Wait {
    /// No wait at all: take what has arrived.
    pub const NONE: Self = Self { spin: Duration::ZERO, deadline: Timestamp::ZERO, sleeps: false };

    /// Sleep until `deadline`, without spinning.
    pub const fn until(deadline: Timestamp) -> Self {
        Self { spin: Duration::ZERO, deadline, sleeps: true }
    }

    /// Spin for `spin`, then sleep until `deadline`.
    pub const fn spinning(spin: Duration, deadline: Timestamp) -> Self {
        Self { spin, deadline, sleeps: true }
    }

    /// Spin for `spin`, and do not sleep.
    pub const fn polling(spin: Duration) -> Self {
        if spin.is_zero() {
            return Self::NONE;
        }
        Self { spin, deadline: Timestamp::MAX, sleeps: false }
    }
}

/// How the polling of a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polled {
    /// With a datagram, after polling for this time. Time in which other threads had the core does not count.
    Found(Duration),
    /// Without one, after the time for which it should poll; or it did not poll.
    Nothing,
    /// Without one, because other threads kept the core.
    Displaced,
}

/// Properties of a carrier; constant except for trains, which a carrier gives up if the system refuses them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Its name in configurations and reports.
    pub name: &'static str,
    /// Largest UDP payload; on a link with a known MTU, the room that the MTU leaves. The path may allow less.
    pub largest_payload_bytes: usize,
    /// Datagrams per step; longer batches work and take several steps.
    pub batch_count: usize,
    /// Most datagrams in one train (UDP segmentation offload); 1 without offload.
    pub train_segment_count: usize,
    /// Most payload bytes of one train.
    pub train_bytes: usize,
    /// Room for received datagrams that wait, as the system counts it (its own overhead included).
    pub receive_buffer_bytes: usize,
}

/// What a page occupies of a socket's receive buffer, in bytes: its pieces, rounded up to what the
/// kernel accounts for each.
const RECEIVED_PAGE_BYTES: usize = 12 * 1024;

impl Capabilities {
    /// Pages whose datagrams can wait to be received, whatever their pieces.
    #[must_use]
    pub const fn received_pages(&self) -> usize {
        self.receive_buffer_bytes / RECEIVED_PAGE_BYTES
    }
}

/// Counts since the carrier was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Datagrams sent.
    pub sent_count: u64,
    /// UDP payload bytes sent.
    pub sent_bytes: u64,
    /// Datagrams sent past the host's routes, as frames.
    pub sent_frame_count: u64,
    /// Trains of two or more datagrams sent at once.
    pub sent_train_count: u64,
    /// Times the carrier was too busy to accept the whole batch.
    pub send_blocked_count: u64,
    /// Trains that the system refused to send at once.
    pub train_refused_count: u64,
    /// Datagrams received and passed to the caller.
    pub received_count: u64,
    /// UDP payload bytes received and passed to the caller.
    pub received_bytes: u64,
    /// Trains of two or more datagrams received at once.
    pub received_train_count: u64,
    /// Datagrams dropped on reception because there was no room; kernel sockets also count damaged ones, modulo
    /// 2^32.
    pub overflow_drop_count: u64,
    /// Datagrams dropped because their destination is outside the fabric, or because no endpoint has it.
    pub foreign_drop_count: u64,
    /// Receptions dropped because the system delivered them incomplete or without their destination, or because they
    /// arrived in fragments or with IPv6 extension headers.
    pub malformed_drop_count: u64,
    /// Errors that the network reported (ICMPv6 port unreachable and similar).
    pub network_error_count: u64,
}

/// A carrier of datagrams, driven by the thread that owns it.
///
/// One step is: `receive`, read each `incoming`, `transmit` the responses.
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
    /// The carrier's properties.
    fn capabilities(&self) -> &Capabilities;

    /// Counts so far; may cost a system call, so do not call it on the data path.
    fn counters(&self) -> Counters;

    /// The UDP port on which it receives and from which it sends.
    fn local_port(&self) -> u16;

    /// The time on the carrier's clock, which a simulation may move by hand.
    fn now(&self) -> Timestamp;

    /// Approximate arrival time of the datagrams of the last [`receive`](Self::receive): at most the time of a few polls
    /// before they arrived, and not before that call. It saves a clock reading if the carrier has read the clock while waiting.
    fn received_at(&self) -> Timestamp {
        self.now()
    }

    /// How the polling of the last [`receive`](Self::receive) ended. A carrier that does not tell found nothing by polling.
    fn polled(&self) -> Polled {
        Polled::Nothing
    }

    /// Sends a prefix of `batch` without blocking and returns its length: short, or 0, if the carrier is busy; try
    /// the rest again later.
    ///
    /// Consecutive datagrams with equal addresses, port and length (the last may be shorter) are sent as one train
    /// if the carrier supports it.
    ///
    /// # Errors
    ///
    /// A [`TransmitError`] is about the first datagram, and nothing was sent. An error at a later datagram ends the
    /// prefix and is returned when the rest is tried.
    fn transmit(&mut self, batch: &[Outgoing<'_>]) -> Result<usize, TransmitError>;

    /// Releases the datagrams of the last call, waits as `wait` says, and returns the number of new ones.
    ///
    /// It may return 0 before the deadline when a signal arrives, when another thread [wakes](crate::Waker) it, or when the
    /// clock is moved by hand.
    ///
    /// # Errors
    ///
    /// [`ReceiveError`] if the carrier failed permanently.
    fn receive(&mut self, wait: Wait) -> Result<usize, ReceiveError>;

    /// A datagram of the last [`receive`](Self::receive).
    ///
    /// # Panics
    ///
    /// If `index` is not below the count that call returned.
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
        fn received_at(&self) -> Timestamp {
            (**self).received_at()
        }
        fn polled(&self) -> Polled {
            (**self).polled()
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
