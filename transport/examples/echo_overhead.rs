//! Overhead of the UDP carrier: round trips through it and through bare recvmsg and sendmsg, interleaved on loopback.
//!
//! Both ends spin; the server sends its own buffer of the same size as response. Run it in release, on an idle
//! machine: `cargo run --release -p bluebridge-transport --example echo_overhead`.

use core::ffi::c_int;
use core::time::Duration;
use std::io;
use std::net::{Ipv6Addr, UdpSocket};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;
use std::time::Instant;

use bluebridge_transport::udp::{UdpConfig, UdpTransport};
use bluebridge_transport::{Outgoing, Transport, Wait};
use rustix::thread::{CpuSet, sched_setaffinity};

const ROUND_COUNT: usize = 30;
const EXCHANGE_COUNT: usize = 2_000;
const SIZES: [usize; 2] = [64, 4180];
/// Timeout of a round at both ends.
const PATIENCE: Duration = Duration::from_secs(5);

/// What the server serves now: the index of a carrier and a size, or [`STOP`].
const STOP: u8 = u8::MAX;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// One end of a round trip.
trait End: Send {
    fn port(&self) -> u16;
    fn send(&mut self, port: u16, bytes: &[u8]) -> Result<(), Failure>;
    /// Polls once; returns the port from which a datagram came.
    fn poll(&mut self) -> Result<Option<u16>, Failure>;
}

struct Carrier(UdpTransport);

impl End for Carrier {
    fn port(&self) -> u16 {
        self.0.local_port()
    }

    fn send(&mut self, port: u16, bytes: &[u8]) -> Result<(), Failure> {
        let (header, data) = bytes.split_at(bytes.len().min(48));
        let address = Ipv6Addr::LOCALHOST;
        let out = Outgoing {
            source: address,
            destination: address,
            destination_port: port,
            header,
            data,
        };
        match self.0.transmit(&[out])? {
            1 => Ok(()),
            _ => Err("busy".into()),
        }
    }

    fn poll(&mut self) -> Result<Option<u16>, Failure> {
        let wait =
            Wait::spinning(Duration::from_millis(1), self.0.now() + Duration::from_millis(1));
        let count = self.0.receive(wait)?;
        Ok((count > 0).then(|| self.0.incoming(0).source_port))
    }
}

/// The cheapest calls that do the same, without its own addresses and without trains.
struct Bare {
    socket: UdpSocket,
    buffer: Vec<u8>,
}

impl Bare {
    fn open() -> io::Result<Self> {
        let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0))?;
        socket.set_nonblocking(true)?;
        Ok(Self { socket, buffer: vec![0; 65_536] })
    }
}

impl End for Bare {
    fn port(&self) -> u16 {
        self.socket.local_addr().map_or(0, |address| address.port())
    }

    fn send(&mut self, port: u16, bytes: &[u8]) -> Result<(), Failure> {
        let name = libc::sockaddr_in6 {
            sin6_family: 10,
            sin6_port: port.to_be(),
            sin6_flowinfo: 0,
            sin6_addr: libc::in6_addr { s6_addr: Ipv6Addr::LOCALHOST.octets() },
            sin6_scope_id: 0,
        };
        let mut slice =
            libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        // SAFETY: an all-zero msghdr is valid.
        let mut header: libc::msghdr = unsafe { core::mem::zeroed() };
        header.msg_name = (&raw const name).cast_mut().cast();
        header.msg_namelen = 28;
        header.msg_iov = &raw mut slice;
        header.msg_iovlen = 1;
        // SAFETY: the header points at live values of this function and its caller.
        let result = unsafe { libc::sendmsg(self.socket.as_raw_fd(), &raw const header, 0) };
        if result < 0 { Err(io::Error::last_os_error().into()) } else { Ok(()) }
    }

    fn poll(&mut self) -> Result<Option<u16>, Failure> {
        for _ in 0..4096 {
            let (result, port) = self.receive();
            if result >= 0 {
                return Ok(Some(port));
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::WouldBlock {
                return Err(error.into());
            }
        }
        Ok(None)
    }
}

impl Bare {
    fn receive(&mut self) -> (isize, u16) {
        // SAFETY: an all-zero sockaddr_in6 is valid.
        let mut name: libc::sockaddr_in6 = unsafe { core::mem::zeroed() };
        let mut slice =
            libc::iovec { iov_base: self.buffer.as_mut_ptr().cast(), iov_len: self.buffer.len() };
        // SAFETY: an all-zero msghdr is valid.
        let mut header: libc::msghdr = unsafe { core::mem::zeroed() };
        header.msg_name = (&raw mut name).cast();
        header.msg_namelen = 28;
        header.msg_iov = &raw mut slice;
        header.msg_iovlen = 1;
        let flags: c_int = libc::MSG_DONTWAIT;
        // SAFETY: the header points at live values of this function and at the buffer.
        let result = unsafe { libc::recvmsg(self.socket.as_raw_fd(), &raw mut header, flags) };
        (result, u16::from_be(name.sin6_port))
    }
}

fn ends() -> Result<[Box<dyn End>; 2], Failure> {
    Ok([Box::new(Bare::open()?), Box::new(Carrier(UdpTransport::open(&UdpConfig::default())?))])
}

fn pin(core: usize) {
    let mut cores = CpuSet::new();
    cores.set(core);
    if let Err(error) = sched_setaffinity(None, &cores) {
        eprintln!("not pinned to core {core}: {error}");
    }
}

/// Waits for one datagram.
fn await_one(end: &mut dyn End) -> Result<u16, Failure> {
    let start = Instant::now();
    loop {
        if let Some(port) = end.poll()? {
            return Ok(port);
        }
        if start.elapsed() > PATIENCE {
            return Err("no datagram came".into());
        }
    }
}

/// Responds with the carrier and size that `turn` names, until it is [`STOP`].
fn serve(mut ends: [Box<dyn End>; 2], turn: &AtomicU8) -> Result<(), Failure> {
    pin(1);
    let bytes = [0x5a; 4180];
    loop {
        let now = turn.load(Ordering::Acquire);
        if now == STOP {
            return Ok(());
        }
        let end = &mut ends[usize::from(now & 1)];
        if let Some(port) = end.poll()? {
            end.send(port, &bytes[..SIZES[usize::from(now >> 1)]])?;
        }
    }
}

/// Median round trip of one round, in nanoseconds.
fn round(end: &mut dyn End, server: u16, bytes: usize) -> Result<u64, Failure> {
    let request = vec![0xa5; bytes];
    let mut times = Vec::with_capacity(EXCHANGE_COUNT);
    for _ in 0..EXCHANGE_COUNT {
        let start = Instant::now();
        end.send(server, &request)?;
        await_one(end)?;
        times.push(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
    }
    Ok(median(&mut times))
}

fn median(times: &mut [u64]) -> u64 {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or(0)
}

fn main() -> Result<(), Failure> {
    let mut clients = ends()?;
    let servers = ends()?;
    let ports = servers.each_ref().map(|end| end.port());
    let turn = Arc::new(AtomicU8::new(0));
    let seen = Arc::clone(&turn);
    let server = thread::spawn(move || serve(servers, &seen));
    pin(0);

    let mut medians = [const { [const { Vec::new() }; 2] }; SIZES.len()];
    for _ in 0..ROUND_COUNT {
        for (size, bytes) in SIZES.into_iter().enumerate() {
            for way in 0..2 {
                turn.store(u8::try_from(size << 1 | way)?, Ordering::Release);
                medians[size][way].push(round(&mut *clients[way], ports[way], bytes)?);
            }
        }
    }
    turn.store(STOP, Ordering::Release);
    server.join().map_err(|_| "the server panicked")??;

    println!(
        "payload  bare p50 [least-most]        carrier p50 [least-most]     overhead per side"
    );
    for (bytes, ways) in SIZES.iter().zip(&mut medians) {
        let [bare, carrier] = ways.each_mut().map(|times| {
            let middle = median(times);
            (middle, times[0], times[times.len() - 1])
        });
        let overhead = (carrier.0 as f64 - bare.0 as f64) / 2e3;
        let text = |(middle, least, most): (u64, u64, u64)| {
            let micros = |nanos| nanos as f64 / 1e3;
            format!("{:.2} [{:.2}-{:.2}] us", micros(middle), micros(least), micros(most))
        };
        println!("{bytes:>5} B  {:<28} {:<28} {overhead:+.3} us", text(bare), text(carrier));
    }
    Ok(())
}
