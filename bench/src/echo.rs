//! The baseline: a plain UDP echo with one request outstanding, both ends spinning.

use std::{
    io,
    net::{Ipv6Addr, SocketAddr, SocketAddrV6, UdpSocket},
    os::fd::AsRawFd,
    ptr,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use libc::c_int;
use socket2::{Domain, Protocol, Socket, Type};

use crate::{contest::Contestant, placement::now};

/// How long an echo may take before the contest ends in an error.
const DEADLINE: Duration = Duration::from_secs(2);

/// Iterations of the serving loop between two checks of the flag.
const LOOK_EVERY: u32 = 64;

/// Lengths of requests and responses, in bytes of UDP payload.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// The length of a request.
    pub request_bytes: usize,
    /// The length of a response.
    pub answer_bytes: usize,
    /// The length of a datagram, at least 1. Longer requests and responses are trains: datagrams that one system call
    /// sends (UDP_SEGMENT), all of this length except for the last one.
    pub datagram_bytes: usize,
}

impl Sizes {
    /// The datagrams of a request.
    #[must_use]
    pub fn request_datagrams(self) -> usize {
        self.request_bytes.div_ceil(self.datagram_bytes)
    }

    /// The datagrams of a response.
    #[must_use]
    pub fn answer_datagrams(self) -> usize {
        self.answer_bytes.div_ceil(self.datagram_bytes)
    }

    /// Makes a socket send longer payloads as trains.
    pub(crate) fn apply(self, socket: &UdpSocket) -> io::Result<()> {
        if self.request_bytes.max(self.answer_bytes) <= self.datagram_bytes {
            return Ok(());
        }
        let bytes = c_int::try_from(self.datagram_bytes).map_err(io::Error::other)?;
        // SAFETY: the option is read from a live number of the length that is passed.
        let result = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_UDP,
                libc::UDP_SEGMENT,
                ptr::from_ref(&bytes).cast(),
                u32::try_from(size_of::<c_int>()).unwrap_or(0),
            )
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

/// A socket on one address, which need not be assigned to an interface.
///
/// # Errors
/// The system's error.
pub fn bind(address: Ipv6Addr, port: u16) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::IPV6, Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_freebind_v6(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&SocketAddr::V6(SocketAddrV6::new(address, port, 0, 0)).into())?;
    Ok(socket.into())
}

/// Responds to requests with `answer_bytes` bytes until the flag is set.
///
/// # Errors
/// The system's error.
pub fn serve(socket: &UdpSocket, sizes: Sizes, stop: &AtomicBool) -> io::Result<()> {
    sizes.apply(socket)?;
    let mut buffer = vec![0; sizes.request_bytes.max(sizes.answer_bytes)];
    let (mut quiet, mut arrived) = (0_u32, 0);
    loop {
        match socket.recv_from(&mut buffer) {
            Ok((bytes, from)) => {
                arrived += bytes;
                if arrived == sizes.request_bytes {
                    socket.send_to(&buffer[..sizes.answer_bytes], from)?;
                }
                // A short datagram is the last of its train, of which others may have been lost.
                if arrived >= sizes.request_bytes || bytes < sizes.datagram_bytes {
                    arrived = 0;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => quiet += 1,
            Err(error) => return Err(error),
        }
        if quiet >= LOOK_EVERY {
            quiet = 0;
            if stop.load(Ordering::Acquire) {
                return Ok(());
            }
        }
    }
}

/// The client's end.
#[derive(Debug)]
pub struct Echo {
    name: &'static str,
    socket: UdpSocket,
    /// The destination; a connected socket has none.
    to: Option<SocketAddr>,
    sizes: Sizes,
    buffer: Vec<u8>,
    sleeps: bool,
}

impl Echo {
    /// Like a program with many peers: `sendto` and `recvfrom`.
    ///
    /// # Errors
    /// The system's error if it cannot send trains.
    pub fn unconnected(socket: UdpSocket, to: SocketAddrV6, sizes: Sizes) -> io::Result<Self> {
        Self::new("udp echo", socket, Some(SocketAddr::V6(to)), sizes)
    }

    /// Like a program with one peer: the route is looked up once.
    ///
    /// # Errors
    /// The system's error when connecting, or if it cannot send trains.
    pub fn connected(socket: UdpSocket, to: SocketAddrV6, sizes: Sizes) -> io::Result<Self> {
        socket.connect(to)?;
        Self::new("udp echo, connected", socket, None, sizes)
    }

    fn new(
        name: &'static str,
        socket: UdpSocket,
        to: Option<SocketAddr>,
        sizes: Sizes,
    ) -> io::Result<Self> {
        sizes.apply(&socket)?;
        let buffer = vec![0; sizes.request_bytes.max(sizes.answer_bytes)];
        Ok(Self { name, socket, to, sizes, buffer, sleeps: false })
    }

    /// Sleeps in the kernel until the response is there, instead of spinning.
    ///
    /// # Errors
    /// The system's error.
    pub fn sleeping(self) -> io::Result<Self> {
        self.socket.set_nonblocking(false)?;
        self.socket.set_read_timeout(Some(DEADLINE))?;
        Ok(Self { name: "udp echo, sleeping", sleeps: true, ..self })
    }

    fn round_trip(&mut self) -> io::Result<()> {
        let request = &self.buffer[..self.sizes.request_bytes];
        match self.to {
            Some(to) => self.socket.send_to(request, to)?,
            None => self.socket.send(request)?,
        };
        let deadline = now() + DEADLINE;
        let (mut spins, mut arrived) = (0_u32, 0);
        loop {
            let received = match self.to {
                Some(_) => self.socket.recv_from(&mut self.buffer).map(|(bytes, _)| bytes),
                None => self.socket.recv(&mut self.buffer),
            };
            match received {
                Ok(bytes) => {
                    arrived += bytes;
                    if arrived == self.sizes.answer_bytes {
                        return Ok(());
                    }
                    if arrived > self.sizes.answer_bytes || bytes != self.sizes.datagram_bytes {
                        return Err(io::Error::other(format!("a response of {arrived} bytes")));
                    }
                }
                // A sleeping one has waited for as long as it may.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && !self.sleeps => {
                    spins += 1
                }
                Err(error) => return Err(error),
            }
            // The clock is read rarely, so that it does not add to the measured time.
            if spins.is_multiple_of(4096) && now() > deadline {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }
}

impl Contestant for Echo {
    fn name(&self) -> &str {
        self.name
    }

    fn operate(&mut self) -> Result<(), String> {
        self.round_trip().map_err(|error| error.to_string())
    }
}
