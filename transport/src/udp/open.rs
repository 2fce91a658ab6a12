//! Opens the socket and configures it.

use core::ffi::c_int;
use std::io;
use std::net::{Ipv6Addr, SocketAddrV6};

use ipnet::Ipv6Net;
use socket2::{Domain, Protocol, Socket, Type};

use super::{
    Capabilities, Counters, FrameCarrier, Frames, HEADER_BYTES, Joining, LARGEST_PAYLOAD_BYTES,
    Many, NoFrames, RECEIVED_SEGMENT_COUNT, Receiver, Sender, TRAIN_BYTES, TRAIN_SEGMENT_COUNT,
    UdpConfig, UdpTransport, sys,
};
use crate::polling::Polling;
use crate::{OpenError, Timestamp};

/// Most datagrams or receptions per system call.
const BATCH_LIMIT: usize = 512;

impl UdpTransport {
    /// Opens a carrier on the configured address, or `[::]`, and port.
    ///
    /// # Errors
    ///
    /// [`OpenError`]: the port is taken, the interface does not exist, or the system lacks a required option.
    pub fn open(config: &UdpConfig) -> Result<Self, OpenError> {
        Self::open_shared(config, false)
    }

    /// Opens `count` carriers, 1 to 256, that share a port: carrier `b % count` receives the datagrams
    /// whose destination address has the byte `b` at position `destination_byte`, 0 to 15.
    ///
    /// The kernel selects the carrier, so a datagram reaches its thread directly.
    ///
    /// # Errors
    ///
    /// As for [`Self::open`].
    pub fn open_steered(
        config: &UdpConfig,
        count: u16,
        destination_byte: u8,
    ) -> Result<Vec<Self>, OpenError> {
        let first = Self::open_shared(config, true)?;
        // A port that the system chose is known now; the others use the same.
        let config = UdpConfig { port: first.local_port, ..config.clone() };
        let mut carriers = vec![first];
        for _ in 1..count {
            carriers.push(Self::open_shared(&config, true)?);
        }
        if let Some(first) = carriers.first() {
            sys::steer_by_destination(&first.socket, destination_byte.into(), count.max(1).into())
                .map_err(|error| option("SO_ATTACH_REUSEPORT_CBPF", error))?;
        }
        Ok(carriers)
    }

    fn open_shared(config: &UdpConfig, is_shared: bool) -> Result<Self, OpenError> {
        let socket = Socket::new(Domain::IPV6, Type::DGRAM.nonblocking(), Some(Protocol::UDP))
            .map_err(OpenError::Socket)?;
        set_options(&socket)?;
        let joining = Joining::new(config.join_trains);
        if joining.is_on() {
            sys::set_option(&socket, libc::SOL_UDP, libc::UDP_GRO, 1)
                .map_err(|error| option("UDP_GRO", error))?;
        }
        let train_segment_count =
            if config.trains && supports_trains(&socket) { TRAIN_SEGMENT_COUNT } else { 1 };
        set_sizes(&socket, config)?;
        if let Some(device) = &config.device {
            socket
                .bind_device(Some(device.as_bytes()))
                .map_err(|error| interface(device, error))?;
        }
        let largest_payload_bytes = largest_payload_bytes(&socket, config)?;
        if is_shared {
            socket.set_reuse_port(true).map_err(|error| option("SO_REUSEPORT", error))?;
        }
        if config.address.is_none() {
            report_headers(&socket)?;
        }
        let local_port = bind(&socket, config.address, config.port)?;
        let receive_buffer_bytes =
            socket.recv_buffer_size().map_err(|error| option("SO_RCVBUF", error))?;

        let frames = match frames(config, local_port) {
            Err(refusal) if config.frames == Frames::Required => {
                return Err(OpenError::Frames(refusal));
            }
            frames => frames,
        };
        let send_batch_count = config.send_batch_count.clamp(1, BATCH_LIMIT);
        let receive_batch_count = config.receive_batch_count.clamp(1, BATCH_LIMIT);
        Ok(Self {
            socket,
            local_port,
            address: config.address,
            device: config.device.clone(),
            filter: config.filter.map(|prefix| prefix.trunc()),
            capabilities: Capabilities {
                name: "udp",
                largest_payload_bytes,
                batch_count: send_batch_count,
                train_segment_count,
                train_bytes: TRAIN_BYTES,
                receive_buffer_bytes,
            },
            counters: Counters::default(),
            sender: Sender::new(
                send_batch_count,
                config.interface_index.unwrap_or(0),
                config.address,
            ),
            frames,
            trains: Vec::with_capacity(send_batch_count),
            receiver: Receiver::new(receive_batch_count),
            arrivals: Vec::with_capacity(receive_batch_count * RECEIVED_SEGMENT_COUNT),
            joining,
            wake: None,
            received_at: Timestamp::ZERO,
            polling: Polling::new(),
            was_empty: true,
            expect_many: false,
            many: Many::default(),
        })
    }

    /// Why datagrams are not sent as frames at present; `None` if they are.
    pub fn frames_refusal(&self) -> Option<&NoFrames> {
        match &self.frames {
            Ok(frames) => frames.refusal(),
            Err(refusal) => Some(refusal),
        }
    }

    /// The prefix outside which datagrams are dropped, with its host bits cleared.
    pub fn filter(&self) -> Option<Ipv6Net> {
        self.filter
    }
}

fn option(option: &'static str, error: io::Error) -> OpenError {
    OpenError::SocketOption { option, error }
}

fn interface(name: &str, error: io::Error) -> OpenError {
    OpenError::Interface { name: name.to_owned(), error }
}

/// The options that the carrier needs.
fn set_options(socket: &Socket) -> Result<(), OpenError> {
    const OPTIONS: [(&str, c_int, c_int, c_int); 4] = [
        ("IPV6_V6ONLY", libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 1),
        ("IPV6_FREEBIND", libc::IPPROTO_IPV6, libc::IPV6_FREEBIND, 1),
        ("IPV6_DONTFRAG", libc::IPPROTO_IPV6, libc::IPV6_DONTFRAG, 1),
        // The link's MTU decides; a forged "packet too big" must not reduce it.
        (
            "IPV6_MTU_DISCOVER",
            libc::IPPROTO_IPV6,
            libc::IPV6_MTU_DISCOVER,
            libc::IPV6_PMTUDISC_PROBE,
        ),
    ];
    for (name, level, number, value) in OPTIONS {
        sys::set_option(socket, level, number, value).map_err(|error| option(name, error))?;
    }
    Ok(())
}

/// Makes the system report a datagram's destination, and the fragment and extension headers that it removed. For a
/// datagram without such headers, the latter costs nothing.
fn report_headers(socket: &Socket) -> Result<(), OpenError> {
    const OPTIONS: [(&str, c_int); 5] = [
        ("IPV6_RECVPKTINFO", libc::IPV6_RECVPKTINFO),
        ("IPV6_RECVFRAGSIZE", libc::IPV6_RECVFRAGSIZE),
        ("IPV6_RECVHOPOPTS", libc::IPV6_RECVHOPOPTS),
        ("IPV6_RECVDSTOPTS", libc::IPV6_RECVDSTOPTS),
        ("IPV6_RECVRTHDR", libc::IPV6_RECVRTHDR),
    ];
    for (name, number) in OPTIONS {
        sys::set_option(socket, libc::IPPROTO_IPV6, number, 1)
            .map_err(|error| option(name, error))?;
    }
    Ok(())
}

/// Whether the system supports UDP_SEGMENT; 0 leaves the socket's default, which each train overrides.
fn supports_trains(socket: &Socket) -> bool {
    sys::set_option(socket, libc::SOL_UDP, libc::UDP_SEGMENT, 0).is_ok()
}

fn set_sizes(socket: &Socket, config: &UdpConfig) -> Result<(), OpenError> {
    let size = |bytes: usize| c_int::try_from(bytes).unwrap_or(c_int::MAX);
    let receive = size(config.receive_buffer_bytes);
    // Without the privilege for FORCE the system gives as much as its limit allows.
    if sys::set_option(socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, receive).is_err() {
        sys::set_option(socket, libc::SOL_SOCKET, libc::SO_RCVBUF, receive)
            .map_err(|error| option("SO_RCVBUF", error))?;
    }
    set_send_buffer(socket, config.send_buffer_bytes)
        .map_err(|error| option("SO_SNDBUF", error))?;
    if let Some(time) = config.busy_poll {
        let micros = c_int::try_from(time.as_micros()).unwrap_or(c_int::MAX);
        sys::set_option(socket, libc::SOL_SOCKET, libc::SO_BUSY_POLL, micros)
            .map_err(|error| option("SO_BUSY_POLL", error))?;
    }
    Ok(())
}

pub(super) fn set_send_buffer(socket: &Socket, bytes: usize) -> io::Result<()> {
    let bytes = c_int::try_from(bytes).unwrap_or(c_int::MAX);
    // Without the privilege for FORCE the system gives as much as its limit allows.
    sys::set_option(socket, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, bytes)
        .or_else(|_| sys::set_option(socket, libc::SOL_SOCKET, libc::SO_SNDBUF, bytes))
}

/// The carrier of frames, if one is wanted and possible.
fn frames(config: &UdpConfig, port: u16) -> Result<FrameCarrier, NoFrames> {
    if config.frames == Frames::Off {
        return Err(NoFrames::Off);
    }
    let (Some(device), Some(prefix), None) =
        (&config.device, config.filter, config.interface_index)
    else {
        return Err(NoFrames::NoPrefix);
    };
    let batch_count = config.send_batch_count.clamp(1, BATCH_LIMIT);
    let prefix = prefix.trunc();
    let carrier = FrameCarrier::open(device, prefix, port, batch_count, config.send_buffer_bytes)?;
    if config.frames == Frames::Required { carrier.ready() } else { Ok(carrier) }
}

fn largest_payload_bytes(socket: &Socket, config: &UdpConfig) -> Result<usize, OpenError> {
    let name = match (&config.device, config.interface_index) {
        (Some(device), _) => device.clone(),
        (None, Some(index)) => rustix::net::netdevice::index_to_name(socket, index)
            .map_err(|error| interface(&format!("with index {index}"), error.into()))?,
        (None, None) => return Ok(LARGEST_PAYLOAD_BYTES),
    };
    let mtu = sys::interface_mtu(socket, &name).map_err(|error| interface(&name, error))?;
    Ok(mtu.saturating_sub(HEADER_BYTES).min(LARGEST_PAYLOAD_BYTES))
}

fn bind(socket: &Socket, address: Option<Ipv6Addr>, port: u16) -> Result<u16, OpenError> {
    let failed = |error| OpenError::Bind { port, error };
    let address = address.unwrap_or(Ipv6Addr::UNSPECIFIED);
    socket.bind(&SocketAddrV6::new(address, port, 0, 0).into()).map_err(failed)?;
    let address = socket.local_addr().map_err(failed)?;
    Ok(address.as_socket_ipv6().map_or(port, |address| address.port()))
}

/// The largest payload that fits the path to `destination`, read from a socket connected to it; only for error reports.
pub(super) fn path_payload_bytes(destination: Ipv6Addr, device: Option<&str>) -> Option<usize> {
    let socket = Socket::new(Domain::IPV6, Type::DGRAM, Some(Protocol::UDP)).ok()?;
    if let Some(device) = device {
        socket.bind_device(Some(device.as_bytes())).ok()?;
    }
    // Connecting a UDP socket sends nothing; any port works.
    socket.connect(&SocketAddrV6::new(destination, 9, 0, 0).into()).ok()?;
    let mtu = sys::path_mtu(&socket).ok()?;
    Some(mtu.saturating_sub(HEADER_BYTES).min(LARGEST_PAYLOAD_BYTES))
}
