//! The system calls of the UDP carrier: all of its `unsafe`.
//!
//! [`Receiver`] and [`Sender`] own every header, slice and control buffer that a batch needs. Their pointers are
//! derived again from live borrows for each call, and nothing reads them between calls.
#![allow(unsafe_code, reason = "the system calls that safe crates do not cover are here only")]

pub(super) mod frames;

use core::ffi::c_int;
use core::mem::{offset_of, size_of, take, zeroed};
use core::ptr::{from_mut, null_mut};
use core::time::Duration;
use std::io;
use std::net::Ipv6Addr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use libc::{
    CMSG_LEN, CMSG_SPACE, cmsghdr, in6_addr, in6_pktinfo, iovec, mmsghdr, sockaddr_in6, socklen_t,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::train::Train;
use crate::Outgoing;

/// Room for one reception: the largest UDP payload, rounded up, plus a cache line so that slots do not share sets.
const SLOT_BYTES: usize = 65_536 + 64;
/// Room for the ancillary data of one reception; the requested data takes 64 bytes.
const CONTROL_BYTES: usize = 128;

/// Messages that are requested at least if more than one may have arrived.
const FEW: usize = 4;
/// Datagrams up to this size are copied into one buffer instead of being described part by part.
const SHORT_BYTES: usize = 512;

const INT_BYTES: socklen_t = 4;
const NAME_BYTES: socklen_t = 28;
const PACKET_INFO_BYTES: u32 = 20;
const SEGMENT_BYTES: u32 = 2;

const FAMILY: libc::sa_family_t = 10;

const _: () = assert!(FAMILY as c_int == libc::AF_INET6);
const _: () = assert!(size_of::<c_int>() == INT_BYTES as usize);
const _: () = assert!(size_of::<sockaddr_in6>() == NAME_BYTES as usize);
const _: () = assert!(size_of::<in6_pktinfo>() == PACKET_INFO_BYTES as usize);

// SAFETY: the macro is pure arithmetic.
const PACKET_INFO_SPACE: usize = unsafe { CMSG_SPACE(PACKET_INFO_BYTES) } as usize;
// SAFETY: the macro is pure arithmetic.
const PACKET_INFO_LENGTH: usize = unsafe { CMSG_LEN(PACKET_INFO_BYTES) } as usize;
// SAFETY: the macro is pure arithmetic.
const SEGMENT_LENGTH: usize = unsafe { CMSG_LEN(SEGMENT_BYTES) } as usize;

/// Ancillary data of one send: the source address, and the segment size of a train.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct SendControl {
    packet_info_header: cmsghdr,
    packet_info: in6_pktinfo,
    gap: [u8; 4],
    segment_header: cmsghdr,
    segment_bytes: u16,
    tail: [u8; 6],
}

const _: () = assert!(offset_of!(SendControl, packet_info) == size_of::<cmsghdr>());
const _: () = assert!(offset_of!(SendControl, segment_header) == PACKET_INFO_SPACE);
const _: () = assert!(size_of::<SendControl>() == 64);

#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct ReceiveControl([u8; CONTROL_BYTES]);

fn empty_header() -> mmsghdr {
    // SAFETY: an all-zero mmsghdr is valid: null pointers and zero lengths.
    unsafe { zeroed() }
}

fn empty_name() -> sockaddr_in6 {
    sockaddr_in6 {
        sin6_family: FAMILY,
        sin6_port: 0,
        sin6_flowinfo: 0,
        sin6_addr: in6_addr { s6_addr: [0; 16] },
        sin6_scope_id: 0,
    }
}

/// The count of messages that the system returned, or its error.
fn checked_count(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// One reception, as described by the system.
pub(super) struct Message<'a> {
    pub(super) source: Ipv6Addr,
    pub(super) source_port: u16,
    pub(super) payload_bytes: usize,
    pub(super) control: &'a [u8],
    /// The payload or the ancillary data was truncated.
    pub(super) truncated: bool,
}

/// Buffers of a batch of receptions.
pub(super) struct Receiver {
    headers: Box<[mmsghdr]>,
    slices: Box<[iovec]>,
    names: Box<[sockaddr_in6]>,
    controls: Box<[ReceiveControl]>,
    buffer: Box<[u8]>,
    /// Messages that the next call requests: twice what the last one found.
    wanted_count: usize,
}

// SAFETY: the raw pointers in headers and slices are written before each system call and read by nothing else.
unsafe impl Send for Receiver {}

impl Receiver {
    pub(super) fn new(count: usize) -> Self {
        Self {
            headers: vec![empty_header(); count].into(),
            slices: vec![iovec { iov_base: null_mut(), iov_len: 0 }; count].into(),
            names: vec![empty_name(); count].into(),
            controls: vec![ReceiveControl([0; CONTROL_BYTES]); count].into(),
            buffer: vec![0; count * SLOT_BYTES].into(),
            wanted_count: count.min(FEW),
        }
    }

    /// Points the first `count` headers to their buffers again, because the last call changed them.
    fn prepare(&mut self, count: usize) {
        let slots = self.buffer.chunks_exact_mut(SLOT_BYTES);
        let parts = self.slices.iter_mut().zip(&mut self.names).zip(&mut self.controls).zip(slots);
        for (header, (((slice, name), control), slot)) in
            self.headers.iter_mut().zip(parts).take(count)
        {
            slice.iov_base = slot.as_mut_ptr().cast();
            slice.iov_len = slot.len();
            let header = &mut header.msg_hdr;
            header.msg_name = from_mut(name).cast();
            header.msg_namelen = NAME_BYTES;
            header.msg_iov = from_mut(slice);
            header.msg_iovlen = 1;
            header.msg_control = from_mut(control).cast();
            header.msg_controllen = CONTROL_BYTES;
            header.msg_flags = 0;
        }
    }

    /// Receives one message into slot 0; the socket must be non-blocking.
    pub(super) fn receive_one(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        self.prepare(1);
        let header = &mut self.headers[0];
        // SAFETY: `prepare` has pointed the header at live buffers of this object, with their true lengths.
        let result = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header.msg_hdr, 0) };
        let bytes = checked_count(result)?;
        header.msg_len = u32::try_from(bytes).unwrap_or(u32::MAX);
        Ok(1)
    }

    /// Receives one message without ancillary data into slot 0; the socket must be non-blocking, and must not join trains.
    ///
    /// The call is cheaper than `recvmsg`, even if nothing has arrived, so it also finds a datagram earlier.
    pub(super) fn receive_plain(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        let name = &mut self.names[0];
        let slot = &mut self.buffer[..SLOT_BYTES];
        let mut name_bytes = NAME_BYTES;
        // SAFETY: buffer and name are live and belong to this object; their true lengths are passed.
        let result = unsafe {
            libc::recvfrom(
                socket.as_raw_fd(),
                slot.as_mut_ptr().cast(),
                slot.len(),
                0,
                from_mut(name).cast(),
                &raw mut name_bytes,
            )
        };
        let bytes = checked_count(result)?;
        let header = &mut self.headers[0];
        header.msg_len = u32::try_from(bytes).unwrap_or(u32::MAX);
        header.msg_hdr.msg_controllen = 0;
        header.msg_hdr.msg_flags = 0;
        Ok(1)
    }

    /// Receives as many messages as have arrived and fit; the socket must be non-blocking.
    pub(super) fn receive_many(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        let count = self.wanted_count;
        self.prepare(count);
        let headers = self.headers.as_mut_ptr();
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        // SAFETY: `prepare` has pointed `count` headers at live buffers of this object, with their true lengths.
        let result = unsafe { libc::recvmmsg(socket.as_raw_fd(), headers, count, 0, null_mut()) };
        let received = checked_count(result as isize)?;
        // Preparing all headers for two messages would cost as much as a message.
        self.wanted_count = (2 * received).max(FEW).min(self.headers.len());
        Ok(received)
    }

    /// The message in slot `index`, which the last receive must have filled.
    pub(super) fn message(&self, index: usize) -> Message<'_> {
        let header = &self.headers[index];
        let name = &self.names[index];
        let control_bytes = header.msg_hdr.msg_controllen.min(CONTROL_BYTES);
        Message {
            source: Ipv6Addr::from(name.sin6_addr.s6_addr),
            source_port: u16::from_be(name.sin6_port),
            payload_bytes: header.msg_len as usize,
            control: &self.controls[index].0[..control_bytes],
            truncated: header.msg_hdr.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0,
        }
    }

    /// Bytes of the payload in slot `index`.
    pub(super) fn payload(&self, index: usize, offset: usize, bytes: usize) -> &[u8] {
        &self.buffer[index * SLOT_BYTES + offset..][..bytes]
    }
}

/// Headers, addresses and ancillary data of a batch of sends.
pub(super) struct Sender {
    headers: Box<[mmsghdr]>,
    slices: Box<[iovec]>,
    names: Box<[sockaddr_in6]>,
    controls: Box<[SendControl]>,
    /// The address that the socket is bound to, which it uses as source by default.
    own: Option<Ipv6Addr>,
    short: Box<[u8; SHORT_BYTES]>,
}

// SAFETY: the raw pointers in headers and slices are written before each system call and read by nothing else.
unsafe impl Send for Sender {}

impl Sender {
    /// Room for `count` datagrams per call; `interface` is the index of the interface to send from, 0 for that of the
    /// route; `own` is the address that the socket is bound to.
    pub(super) fn new(count: usize, interface: u32, own: Option<Ipv6Addr>) -> Self {
        let control = SendControl {
            packet_info_header: cmsghdr {
                cmsg_len: PACKET_INFO_LENGTH,
                cmsg_level: libc::IPPROTO_IPV6,
                cmsg_type: libc::IPV6_PKTINFO,
            },
            packet_info: in6_pktinfo {
                ipi6_addr: in6_addr { s6_addr: [0; 16] },
                ipi6_ifindex: interface,
            },
            gap: [0; 4],
            segment_header: cmsghdr {
                cmsg_len: SEGMENT_LENGTH,
                cmsg_level: libc::SOL_UDP,
                cmsg_type: libc::UDP_SEGMENT,
            },
            segment_bytes: 0,
            tail: [0; 6],
        };
        Self {
            headers: vec![empty_header(); count].into(),
            slices: vec![iovec { iov_base: null_mut(), iov_len: 0 }; 2 * count].into(),
            names: vec![empty_name(); count].into(),
            controls: vec![control; count].into(),
            // An interface must be passed with each datagram, and the address with it.
            own: own.filter(|_| interface == 0),
            short: Box::new([0; SHORT_BYTES]),
        }
    }

    /// Sends `batch`, cut into `trains`, and returns the number of sent trains; neither may exceed the capacity.
    pub(super) fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        batch: &[Outgoing<'_>],
        trains: &[Train],
    ) -> io::Result<usize> {
        if let ([datagram], Some(own)) = (batch, self.own)
            && datagram.source == own
            && datagram.payload_bytes() <= SHORT_BYTES
        {
            return self.send_short(socket, datagram).map(|_| 1);
        }
        self.fill(batch, trains);
        let headers = self.headers.as_mut_ptr();
        if trains.len() == 1 {
            // SAFETY: `fill` has pointed the first header at live buffers of this object and of `batch`.
            let result =
                unsafe { libc::sendmsg(socket.as_raw_fd(), headers.cast(), libc::MSG_NOSIGNAL) };
            return checked_count(result).map(|_| 1);
        }
        let count = u32::try_from(trains.len().min(self.headers.len())).unwrap_or(0);
        // SAFETY: `fill` has pointed `count` headers at live buffers of this object and of `batch`.
        let result =
            unsafe { libc::sendmmsg(socket.as_raw_fd(), headers, count, libc::MSG_NOSIGNAL) };
        checked_count(result as isize)
    }

    /// Sends one short datagram from the socket's own address with the cheapest call.
    fn send_short(&mut self, socket: BorrowedFd<'_>, datagram: &Outgoing<'_>) -> io::Result<usize> {
        let name = &mut self.names[0];
        name.sin6_addr.s6_addr = datagram.destination.octets();
        name.sin6_port = datagram.destination_port.to_be();
        let payload = if datagram.data.is_empty() {
            datagram.header
        } else {
            let (header, rest) = self.short.split_at_mut(datagram.header.len());
            header.copy_from_slice(datagram.header);
            rest[..datagram.data.len()].copy_from_slice(datagram.data);
            &self.short[..datagram.payload_bytes()]
        };
        // SAFETY: payload and name are live, and their true lengths are passed.
        let result = unsafe {
            libc::sendto(
                socket.as_raw_fd(),
                payload.as_ptr().cast(),
                payload.len(),
                libc::MSG_NOSIGNAL,
                from_mut(name).cast(),
                NAME_BYTES,
            )
        };
        checked_count(result)
    }

    fn fill(&mut self, batch: &[Outgoing<'_>], trains: &[Train]) {
        let mut datagrams = batch;
        let mut free = &mut self.slices[..];
        let parts = self.headers.iter_mut().zip(&mut self.names).zip(&mut self.controls);
        for (train, ((header, name), control)) in trains.iter().zip(parts) {
            let (members, rest) = datagrams.split_at(train.count);
            datagrams = rest;
            let mut used = 0;
            for part in members.iter().flat_map(|datagram| [datagram.header, datagram.data]) {
                if !part.is_empty() {
                    free[used] =
                        iovec { iov_base: part.as_ptr().cast_mut().cast(), iov_len: part.len() };
                    used += 1;
                }
            }
            let (slices, rest) = take(&mut free).split_at_mut(used);
            free = rest;

            name.sin6_addr.s6_addr = members[0].destination.octets();
            name.sin6_port = members[0].destination_port.to_be();
            control.packet_info.ipi6_addr.s6_addr = members[0].source.octets();
            control.segment_bytes = train.segment_bytes;
            let header = &mut header.msg_hdr;
            header.msg_name = from_mut(name).cast();
            header.msg_namelen = NAME_BYTES;
            header.msg_iov = slices.as_mut_ptr();
            header.msg_iovlen = used;
            header.msg_control = from_mut(control).cast();
            header.msg_controllen = if train.count > 1 {
                size_of::<SendControl>()
            } else if self.own == Some(members[0].source) {
                0
            } else {
                // Linux keeps 36 bytes without an allocation: exactly this size, without padding.
                PACKET_INFO_LENGTH
            };
        }
    }
}

/// Why a sleep ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Woken {
    /// The socket is readable, or has a pending error.
    Socket,
    /// The timeout has passed.
    Timeout,
    /// The other descriptor is readable.
    Waker,
}

/// Sleeps until the socket or `waker` is readable or `timeout` has passed.
pub(super) fn sleep(
    socket: BorrowedFd<'_>,
    waker: Option<BorrowedFd<'_>>,
    timeout: Duration,
) -> io::Result<Woken> {
    let timeout = Timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    };
    // Without a waker the socket is in the list twice, and only the first is polled.
    let other = waker.unwrap_or(socket);
    let mut descriptors = [socket, other].map(|it| PollFd::from_borrowed_fd(it, PollFlags::IN));
    let count = if waker.is_some() { 2 } else { 1 };
    if poll(&mut descriptors[..count], Some(&timeout))? == 0 {
        return Ok(Woken::Timeout);
    }
    let is_readable = !descriptors[0].revents().is_empty();
    Ok(if is_readable { Woken::Socket } else { Woken::Waker })
}

/// Sets an integer socket option.
pub(super) fn set_option(
    socket: impl AsFd,
    level: c_int,
    option: c_int,
    value: c_int,
) -> io::Result<()> {
    let descriptor = socket.as_fd().as_raw_fd();
    // SAFETY: the value is a live integer and its length is passed.
    let result = unsafe {
        libc::setsockopt(descriptor, level, option, (&raw const value).cast(), INT_BYTES)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Reads an integer socket option.
fn option(socket: BorrowedFd<'_>, level: c_int, option: c_int) -> io::Result<c_int> {
    let mut value: c_int = 0;
    let mut bytes = INT_BYTES;
    // SAFETY: the value is a live integer and its length is passed.
    let result = unsafe {
        libc::getsockopt(socket.as_raw_fd(), level, option, (&raw mut value).cast(), &raw mut bytes)
    };
    if result == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
}

/// Datagrams that the socket has dropped, modulo 2^32: because there was no room, or because they were damaged.
///
/// SO_RXQ_OVFL would report them with the datagrams, but costs each of them 0.15 us on another core than its sender's.
pub(super) fn dropped_count(socket: BorrowedFd<'_>) -> io::Result<u32> {
    /// SK_MEMINFO_VARS and SK_MEMINFO_DROPS of linux/sock_diag.h.
    const VALUE_COUNT: usize = 9;
    const DROPS: usize = 8;
    let mut values = [0_u32; VALUE_COUNT];
    let mut bytes = INT_BYTES * 9;
    // SAFETY: the values are a live array of integers and its length is passed.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_MEMINFO,
            values.as_mut_ptr().cast(),
            &raw mut bytes,
        )
    };
    if result == 0 { Ok(values[DROPS]) } else { Err(io::Error::last_os_error()) }
}

/// The MTU of the path of the connected `socket`.
pub(super) fn path_mtu(socket: impl AsFd) -> io::Result<usize> {
    let mtu = option(socket.as_fd(), libc::IPPROTO_IPV6, libc::IPV6_MTU)?;
    Ok(usize::try_from(mtu).unwrap_or(0))
}

/// The MTU of the interface called `name`.
pub(crate) fn interface_mtu(socket: impl AsFd, name: &str) -> io::Result<usize> {
    let request = ask_interface(socket, name, libc::SIOCGIFMTU as _)?;
    // SAFETY: SIOCGIFMTU has set this member of the union, and any bytes are a valid integer.
    let mtu = unsafe { request.ifr_ifru.ifru_mtu };
    Ok(usize::try_from(mtu).unwrap_or(0))
}

/// The MAC address of the interface called `name`.
pub(crate) fn interface_mac(socket: impl AsFd, name: &str) -> io::Result<[u8; 6]> {
    let request = ask_interface(socket, name, libc::SIOCGIFHWADDR as _)?;
    // SAFETY: SIOCGIFHWADDR has set this member of the union, and any bytes are a valid sockaddr.
    let address = unsafe { request.ifr_ifru.ifru_hwaddr };
    let mut mac = [0; 6];
    for (byte, character) in mac.iter_mut().zip(address.sa_data) {
        *byte = character.cast_unsigned();
    }
    Ok(mac)
}

/// Whether the interface called `name` is an Ethernet.
pub(super) fn is_ethernet(socket: impl AsFd, name: &str) -> io::Result<bool> {
    let request = ask_interface(socket, name, libc::SIOCGIFHWADDR as _)?;
    // SAFETY: SIOCGIFHWADDR has set this member of the union, and any bytes are a valid sockaddr.
    let address = unsafe { request.ifr_ifru.ifru_hwaddr };
    Ok(address.sa_family == libc::ARPHRD_ETHER)
}

fn ask_interface(socket: impl AsFd, name: &str, what: libc::Ioctl) -> io::Result<libc::ifreq> {
    // SAFETY: an all-zero ifreq is valid: an empty name and zero values.
    let mut request: libc::ifreq = unsafe { zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(io::Error::from_raw_os_error(libc::ENODEV));
    }
    for (target, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *target = byte.cast_signed() as libc::c_char;
    }
    let descriptor = socket.as_fd().as_raw_fd();
    // SAFETY: the request is a live ifreq with a terminated name, which both requests read and write.
    let result = unsafe { libc::ioctl(descriptor, what, &raw mut request) };
    if result == 0 { Ok(request) } else { Err(io::Error::last_os_error()) }
}

/// Distributes the datagrams of a port over the `count` sockets that share it, in the order of their
/// binding: socket `b % count` gets those whose destination address has the byte `b` at `byte`.
pub(super) fn steer_by_destination(socket: impl AsFd, byte: u32, count: u32) -> io::Result<()> {
    /// Where the destination address begins in an IPv6 header (RFC 8200, section 3).
    const DESTINATION: u32 = 24;
    let network = libc::SKF_NET_OFF.cast_unsigned();
    let load = network.wrapping_add(DESTINATION + byte);
    let instruction = |code: u32, k| libc::sock_filter {
        code: u16::try_from(code).unwrap_or_default(),
        jt: 0,
        jf: 0,
        k,
    };
    let mut program = [
        instruction(libc::BPF_LD | libc::BPF_B | libc::BPF_ABS, load),
        instruction(libc::BPF_ALU | libc::BPF_MOD | libc::BPF_K, count),
        instruction(libc::BPF_RET | libc::BPF_A, 0),
    ];
    let filter = libc::sock_fprog { len: 3, filter: program.as_mut_ptr() };
    // SAFETY: the kernel reads the three live instructions that `filter` points to, and copies them.
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_REUSEPORT_CBPF,
            (&raw const filter).cast(),
            socklen_t::try_from(size_of::<libc::sock_fprog>()).unwrap_or_default(),
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
