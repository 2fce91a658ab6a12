//! The carrier over a kernel UDP socket.
//!
//! The socket is unconnected, because a server has as many addresses as pages: the destination of a datagram is read
//! from ancillary data and its source is set there, without being assigned to an interface. Trains are sent with
//! UDP_SEGMENT and received with UDP_GRO; nothing is ever fragmented.
//!
//! The kernel removes IPv6 extension headers and joins fragments before a UDP socket sees the datagram. A socket that
//! receives for many addresses, like those that serve requests, makes the kernel report this and drops such datagrams:
//! in the fabric, UDP directly follows the IPv6 header.
//!
//! The host must have one rule that delivers the fabric's prefix locally when it arrives from the link, and one
//! route to the prefix through the link (`docs/architecture.md`).

mod frames;
mod joining;
mod many;
mod next_hop;
mod open;
pub(crate) mod sys;
#[cfg(test)]
mod tests;
mod train;

use core::time::Duration;
use std::io;
use std::net::Ipv6Addr;
use std::os::fd::{AsFd, BorrowedFd};

use ipnet::Ipv6Net;
use socket2::Socket;

use crate::polling::Polling;
use crate::wake::Event;
use crate::{
    Capabilities, Counters, Incoming, Outgoing, Polled, ReceiveError, Timestamp, TransmitError,
    Transport, Wait, Wakeable, Waker, monotonic_now,
};
use frames::FrameCarrier;
pub use frames::{Frames, NoFrames};
pub use joining::JoinTrains;
use joining::{Joining, Reception};
use many::Many;
use sys::{Receiver, Sender, Woken};
use train::{Ancillary, Train, TrainLimits};

/// Bytes of the IPv6 and UDP headers in front of a payload.
pub const HEADER_BYTES: usize = 48;
/// Largest possible UDP payload (RFC 768: 16-bit length, header included).
pub const LARGEST_PAYLOAD_BYTES: usize = 65_527;
/// Most payload bytes of a sent train. UDP_SEGMENT takes 65,480, but a packet that with its Ethernet header reaches the
/// usual 65,536 of a device's gso_max_size is split in software (measured).
const TRAIN_BYTES: usize = 65_473;
/// Most datagrams of a sent train; kernels before 6.9 refuse more.
const TRAIN_SEGMENT_COUNT: usize = 64;
/// Most datagrams that are read from one reception: UDP_MAX_SEGMENTS of the newest kernels.
const RECEIVED_SEGMENT_COUNT: usize = 128;
/// Polls of the socket between two clock readings; they take about a microsecond.
const POLLS_PER_CLOCK_READING: usize = 4;
/// Times a send is repeated if the socket reports an earlier datagram's error instead of sending.
const PENDING_ERROR_LIMIT: usize = 8;

/// How to open a [`UdpTransport`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UdpConfig {
    /// Port to receive on and send from; 0 lets the system choose.
    pub port: u16,
    /// Receive only for this address, and send from it; it need not be assigned to an interface. The address is then not
    /// passed as ancillary data with each datagram, which saves 0.12 us for a datagram and its response. Such a carrier
    /// also accepts datagrams that arrived in fragments or with extension headers, because the system does not report
    /// them: serve requests with carriers without an address.
    pub address: Option<Ipv6Addr>,
    /// Receive from and send to this interface only.
    pub device: Option<String>,
    /// Send through the interface with this index, independent of the routes.
    pub interface_index: Option<u32>,
    /// Drop and count datagrams for a destination outside this prefix.
    pub filter: Option<Ipv6Net>,
    /// Whether datagrams to `filter` are sent past the host's routes, as frames through `device`; not with
    /// `interface_index`.
    pub frames: Frames,
    /// Send trains at once if the system can.
    pub trains: bool,
    /// Receive trains at once.
    pub join_trains: JoinTrains,
    /// Requested room for received datagrams that wait; the system may give less, see [`Capabilities`].
    pub receive_buffer_bytes: usize,
    /// Requested room for datagrams that wait to be sent.
    pub send_buffer_bytes: usize,
    /// Datagrams sent by one system call, 1 to 512.
    pub send_batch_count: usize,
    /// Receptions (each a datagram or a train, 64 KiB of memory) read by one system call, 1 to 512.
    pub receive_batch_count: usize,
    /// Let the system poll the NIC for this time if the socket is empty; useless on virtual links.
    pub busy_poll: Option<Duration>,
}

impl Default for UdpConfig {
    fn default() -> Self {
        Self {
            port: 0,
            address: None,
            device: None,
            interface_index: None,
            filter: None,
            frames: Frames::default(),
            trains: true,
            join_trains: JoinTrains::Adaptive,
            receive_buffer_bytes: 8 << 20,
            send_buffer_bytes: 4 << 20,
            send_batch_count: 64,
            receive_batch_count: 32,
            busy_poll: None,
        }
    }
}

/// Position of a received datagram.
#[derive(Clone, Copy)]
struct Arrival {
    destination: Ipv6Addr,
    source: Ipv6Addr,
    source_port: u16,
    slot: u16,
    offset: u16,
    bytes: u16,
}

const _: () = assert!(size_of::<Arrival>() == 40);

/// A carrier over a kernel UDP socket.
pub struct UdpTransport {
    socket: Socket,
    local_port: u16,
    /// The only own address, if the socket is bound to one.
    address: Option<Ipv6Addr>,
    device: Option<String>,
    filter: Option<Ipv6Net>,
    capabilities: Capabilities,
    counters: Counters,
    sender: Sender,
    /// Sends before `sender` does, or why it does not.
    frames: Result<FrameCarrier, NoFrames>,
    trains: Vec<Train>,
    receiver: Receiver,
    arrivals: Vec<Arrival>,
    joining: Joining,
    /// Ends a sleep; created on the first use of [`Wakeable::waker`].
    wake: Option<Event>,
    /// The last clock reading while waiting; zero if there was none since the socket was empty.
    received_at: Timestamp,
    polling: Polling,
    /// The socket was seen empty since the last reception.
    was_empty: bool,
    /// More than one reception is probably waiting.
    expect_many: bool,
    many: Many,
}

impl AsFd for UdpTransport {
    /// The socket, to wait on it beside others; it is non-blocking.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Transport for UdpTransport {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn counters(&self) -> Counters {
        let dropped_count = sys::dropped_count(self.socket.as_fd()).unwrap_or(0);
        Counters { overflow_drop_count: dropped_count.into(), ..self.counters }
    }

    fn local_port(&self) -> u16 {
        self.local_port
    }

    fn now(&self) -> Timestamp {
        monotonic_now()
    }

    fn received_at(&self) -> Timestamp {
        if self.received_at == Timestamp::ZERO { self.now() } else { self.received_at }
    }

    fn polled(&self) -> Polled {
        self.polling.outcome()
    }

    fn transmit(&mut self, batch: &[Outgoing<'_>]) -> Result<usize, TransmitError> {
        let mut sent_count = 0;
        let mut segment_count = self.capabilities.train_segment_count;
        let mut pending_error_count = 0;
        while sent_count < batch.len() {
            let end = batch.len().min(sent_count + self.capabilities.batch_count);
            let chunk = &batch[sent_count..end];
            match self.send(chunk, segment_count) {
                Ok(count) => {
                    if segment_count < self.capabilities.train_segment_count {
                        self.give_up_trains();
                    }
                    sent_count += count;
                }
                Err(error) => match error.raw_os_error() {
                    Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) => {
                        self.counters.send_blocked_count += 1;
                        return Ok(sent_count);
                    }
                    Some(libc::EINTR) => {}
                    Some(libc::ECONNREFUSED | libc::EPROTO)
                        if pending_error_count < PENDING_ERROR_LIMIT =>
                    {
                        self.counters.network_error_count += 1;
                        pending_error_count += 1;
                    }
                    // Either the train or the datagram is refused: sending it alone shows which.
                    Some(libc::EIO | libc::EINVAL)
                        if segment_count > 1
                            && self.trains.first().is_some_and(|train| train.count > 1) =>
                    {
                        segment_count = 1;
                    }
                    _ if sent_count > 0 => return Ok(sent_count),
                    _ => return Err(self.transmit_error(&chunk[0], error)),
                },
            }
        }
        Ok(sent_count)
    }

    fn receive(&mut self, wait: Wait) -> Result<usize, ReceiveError> {
        self.arrivals.clear();
        self.received_at = Timestamp::ZERO;
        let has_found = self.take()?;
        self.polling.at_once(has_found);
        if has_found || wait.deadline == Timestamp::ZERO {
            return Ok(self.arrivals.len());
        }
        self.polling.begin(wait, self.now());
        while self.polling.goes_on() {
            for _ in 0..POLLS_PER_CLOCK_READING {
                if self.take()? {
                    self.received_at = self.polling.now();
                    self.polling.found();
                    return Ok(self.arrivals.len());
                }
            }
            if self.polling.polled_until(monotonic_now()) {
                std::thread::yield_now();
                self.polling.yielded_until(monotonic_now());
            }
        }
        let mut now = self.polling.now();
        while wait.sleeps && now < wait.deadline {
            let waker = self.wake.as_ref().map(AsFd::as_fd);
            let left = wait.deadline.saturating_since(now);
            match sys::sleep(self.socket.as_fd(), waker, left) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(0),
                Err(error) => return Err(ReceiveError::Socket(error)),
                Ok(Woken::Timeout) => {}
                Ok(Woken::Waker) => {
                    if let Some(event) = &self.wake {
                        event.take();
                    }
                    return Ok(0);
                }
                Ok(Woken::Socket) => {
                    if self.take()? {
                        return Ok(self.arrivals.len());
                    }
                }
            }
            now = self.now();
        }
        Ok(0)
    }

    fn incoming(&self, index: usize) -> Incoming<'_> {
        let arrival = &self.arrivals[index];
        Incoming {
            source: arrival.source,
            source_port: arrival.source_port,
            destination: arrival.destination,
            payload: self.receiver.payload(
                arrival.slot.into(),
                arrival.offset.into(),
                arrival.bytes.into(),
            ),
        }
    }
}

impl Wakeable for UdpTransport {
    fn waker(&mut self) -> io::Result<Waker> {
        let event = match &self.wake {
            Some(event) => event.clone(),
            None => self.wake.insert(Event::new()?).clone(),
        };
        Ok(Waker::of_event(event))
    }
}

impl UdpTransport {
    /// Sends a prefix of `chunk` with one system call, in trains of at most `segment_count`.
    fn send(&mut self, chunk: &[Outgoing<'_>], segment_count: usize) -> io::Result<usize> {
        if chunk[0].payload_bytes() > LARGEST_PAYLOAD_BYTES {
            return Err(io::Error::from_raw_os_error(libc::EMSGSIZE));
        }
        let limits = TrainLimits { segment_count, bytes: self.capabilities.train_bytes };
        train::cut(chunk, limits, &mut self.trains);
        let as_frames = match &mut self.frames {
            Ok(frames) => frames.send(chunk, &self.trains)?,
            Err(_) => None,
        };
        let train_count = match as_frames {
            Some(count) => count,
            None => self.sender.send(self.socket.as_fd(), chunk, &self.trains)?,
        };
        let mut sent_count = 0;
        for train in self.trains.iter().take(train_count) {
            sent_count += train.count;
            self.counters.sent_train_count += u64::from(train.count > 1);
        }
        self.counters.sent_count += sent_count as u64;
        if as_frames.is_some() {
            self.counters.sent_frame_count += sent_count as u64;
        }
        let bytes: usize = chunk.iter().take(sent_count).map(Outgoing::payload_bytes).sum();
        self.counters.sent_bytes += bytes as u64;
        Ok(sent_count)
    }

    /// Stops sending trains, because the system accepts the datagrams alone but not as a train.
    fn give_up_trains(&mut self) {
        self.counters.train_refused_count += 1;
        self.capabilities.train_segment_count = 1;
    }

    fn transmit_error(&self, datagram: &Outgoing<'_>, error: io::Error) -> TransmitError {
        let destination = datagram.destination;
        match error.raw_os_error() {
            Some(libc::EMSGSIZE) => TransmitError::TooLarge {
                payload_bytes: datagram.payload_bytes(),
                limit_bytes: open::path_payload_bytes(destination, self.device.as_deref()),
            },
            Some(libc::ENETUNREACH | libc::EHOSTUNREACH | libc::ENETDOWN | libc::ENODEV) => {
                TransmitError::Unreachable { destination, error }
            }
            Some(libc::EINVAL | libc::EACCES | libc::EPERM | libc::EADDRNOTAVAIL) => {
                TransmitError::Refused { source_address: datagram.source, destination, error }
            }
            _ => TransmitError::Socket(error),
        }
    }

    /// Reads the socket without waiting; true if the caller got at least one datagram.
    fn take(&mut self) -> Result<bool, ReceiveError> {
        let socket = self.socket.as_fd();
        let result = match self.address {
            _ if self.expect_many => self.receiver.receive_many(socket),
            // Only the sender's address is needed.
            Some(_) if !self.joining.is_on() => self.receiver.receive_plain(socket),
            _ => self.receiver.receive_one(socket),
        };
        match result {
            Ok(count) => {
                self.expect_many = if self.expect_many {
                    self.many.found(count)
                } else {
                    // A datagram that was already there may not be the only one.
                    !self.was_empty && self.many.is_due()
                };
                self.was_empty = false;
                let train_count = self.counters.received_train_count;
                for slot in 0..count {
                    self.accept(slot);
                }
                self.adapt_joining(Reception {
                    count: u32::try_from(count).unwrap_or(u32::MAX),
                    has_train: self.counters.received_train_count > train_count,
                    looks_cut: self.looks_cut(),
                });
                Ok(!self.arrivals.is_empty())
            }
            Err(error) => match error.raw_os_error() {
                Some(libc::EAGAIN) => {
                    self.was_empty = true;
                    self.expect_many = false;
                    Ok(false)
                }
                Some(libc::EINTR) => Ok(false),
                Some(
                    libc::ECONNREFUSED
                    | libc::EHOSTUNREACH
                    | libc::ENETUNREACH
                    | libc::ENETDOWN
                    | libc::EACCES
                    | libc::EPROTO
                    | libc::EMSGSIZE,
                ) => {
                    self.counters.network_error_count += 1;
                    Ok(false)
                }
                _ => Err(ReceiveError::Socket(error)),
            },
        }
    }

    /// Whether the first two arrivals could be pieces of one train.
    fn looks_cut(&self) -> bool {
        let [first, second, ..] = self.arrivals.as_slice() else { return false };
        first.bytes >= second.bytes
            && first.destination == second.destination
            && first.source == second.source
            && first.source_port == second.source_port
    }

    fn adapt_joining(&mut self, reception: Reception) {
        let Some(is_on) = self.joining.observe(reception) else { return };
        self.switch_joining(is_on);
        // A train that was joined before the change would be received whole and without the size of its pieces. Joining
        // therefore ends only when the socket is empty.
        if !is_on && self.has_pending() {
            self.switch_joining(true);
            self.joining.resume();
        }
    }

    fn switch_joining(&self, is_on: bool) {
        // Joining is only an optimization: if the system refuses the change, nothing else changes.
        let _ = sys::set_option(&self.socket, libc::SOL_UDP, libc::UDP_GRO, is_on.into());
    }

    /// Whether the socket has data that was not read yet. A pending error also counts.
    fn has_pending(&self) -> bool {
        let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
        let peeked = self.socket.recv_with_flags(&mut [], flags);
        peeked.map_or_else(|error| error.kind() != io::ErrorKind::WouldBlock, |_| true)
    }

    /// Records the datagrams of the reception in `slot`.
    fn accept(&mut self, slot: usize) {
        let message = self.receiver.message(slot);
        let ancillary = Ancillary::parse(message.control);
        let destination = self.address.or(ancillary.destination);
        let is_refused = message.truncated || ancillary.is_extended;
        let Some(destination) = destination.filter(|_| !is_refused) else {
            self.counters.malformed_drop_count += 1;
            return;
        };
        let total_bytes = message.payload_bytes;
        let segment_bytes = ancillary.segment_bytes.unwrap_or(total_bytes).max(1);
        let segment_count = total_bytes.div_ceil(segment_bytes).max(1);
        if self.filter.is_some_and(|filter| !filter.contains(&destination)) {
            self.counters.foreign_drop_count += segment_count as u64;
            return;
        }
        let kept_count = segment_count.min(RECEIVED_SEGMENT_COUNT);
        self.counters.received_train_count += u64::from(segment_count > 1);
        self.counters.malformed_drop_count += (segment_count - kept_count) as u64;
        for index in 0..kept_count {
            let offset = index * segment_bytes;
            let bytes = segment_bytes.min(total_bytes - offset);
            self.arrivals.push(Arrival {
                destination,
                source: message.source,
                source_port: message.source_port,
                slot: narrow(slot),
                offset: narrow(offset),
                bytes: narrow(bytes),
            });
            self.counters.received_bytes += bytes as u64;
        }
        self.counters.received_count += kept_count as u64;
    }
}

/// Slots, offsets and lengths are below 65,536 because of the size of the buffers.
fn narrow(value: usize) -> u16 {
    u16::try_from(value).unwrap_or(u16::MAX)
}
