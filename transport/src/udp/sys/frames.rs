//! The system calls that send whole frames (packet(7)).

use core::mem::{size_of, take, zeroed};
use core::ptr::{from_mut, null_mut};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use libc::{iovec, mmsghdr, sockaddr_ll, socklen_t};

use super::{SHORT_BYTES, checked_count, empty_header};
use crate::Outgoing;
use crate::udp::train::Train;

/// Bytes in front of a payload: a `virtio_net_hdr`, and the headers of Ethernet, IPv6 and UDP.
pub(in crate::udp) const FRONT_BYTES: usize = 72;

/// Everything in front of the payload of a frame.
pub(in crate::udp) type Front = [u8; FRONT_BYTES];

/// Binds a packet socket to an interface, to send only.
pub(in crate::udp) fn bind_to_interface(socket: BorrowedFd<'_>, interface: u32) -> io::Result<()> {
    // SAFETY: an all-zero sockaddr_ll is valid.
    let mut address: sockaddr_ll = unsafe { zeroed() };
    address.sll_family = u16::try_from(libc::AF_PACKET).unwrap_or_default();
    address.sll_ifindex = i32::try_from(interface).unwrap_or(-1);
    let bytes = socklen_t::try_from(size_of::<sockaddr_ll>()).unwrap_or_default();
    // SAFETY: the address is live, and its true length is passed.
    let result = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), bytes) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Headers and slices of a batch of frames.
pub(in crate::udp) struct FrameSender {
    headers: Box<[mmsghdr]>,
    /// Three for each datagram: in the worst case each is a frame of its own.
    slices: Box<[iovec]>,
    fronts: Box<[Front]>,
    short: Box<[u8; FRONT_BYTES + SHORT_BYTES]>,
}

// SAFETY: the raw pointers in headers and slices are written before each system call and read by nothing else.
unsafe impl Send for FrameSender {}

impl FrameSender {
    /// Room for `count` datagrams per call.
    pub(in crate::udp) fn new(count: usize) -> Self {
        Self {
            headers: vec![empty_header(); count].into(),
            slices: vec![iovec { iov_base: null_mut(), iov_len: 0 }; 3 * count].into(),
            fronts: vec![[0; FRONT_BYTES]; count].into(),
            short: Box::new([0; FRONT_BYTES + SHORT_BYTES]),
        }
    }

    /// Sends `batch`, cut into `trains`, and returns the number of sent trains; neither may exceed the capacity. `write`
    /// writes what is in front of a train's payload: it gets the train's first datagram, the train, and the bytes of all
    /// its payloads.
    pub(in crate::udp) fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        batch: &[Outgoing<'_>],
        trains: &[Train],
        write: impl Fn(&mut Front, &Outgoing<'_>, &Train, usize),
    ) -> io::Result<usize> {
        if let ([datagram], [train]) = (batch, trains)
            && datagram.payload_bytes() <= SHORT_BYTES
        {
            return self.send_short(socket, datagram, train, write).map(|()| 1);
        }
        self.fill(batch, trains, write);
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

    /// Sends one short datagram with the cheapest call.
    fn send_short(
        &mut self,
        socket: BorrowedFd<'_>,
        datagram: &Outgoing<'_>,
        train: &Train,
        write: impl Fn(&mut Front, &Outgoing<'_>, &Train, usize),
    ) -> io::Result<()> {
        let bytes = datagram.payload_bytes();
        let Some((front, payload)) = self.short.split_first_chunk_mut() else { return Ok(()) };
        write(front, datagram, train, bytes);
        let (header, data) = payload.split_at_mut(datagram.header.len());
        header.copy_from_slice(datagram.header);
        data[..datagram.data.len()].copy_from_slice(datagram.data);
        let frame = &self.short[..FRONT_BYTES + bytes];
        // SAFETY: the frame is live, and its true length is passed.
        let result = unsafe {
            libc::send(socket.as_raw_fd(), frame.as_ptr().cast(), frame.len(), libc::MSG_NOSIGNAL)
        };
        checked_count(result).map(drop)
    }

    fn fill(
        &mut self,
        batch: &[Outgoing<'_>],
        trains: &[Train],
        write: impl Fn(&mut Front, &Outgoing<'_>, &Train, usize),
    ) {
        let mut datagrams = batch;
        let mut free = &mut self.slices[..];
        for (train, (header, front)) in
            trains.iter().zip(self.headers.iter_mut().zip(&mut self.fronts))
        {
            let (members, rest) = datagrams.split_at(train.count);
            datagrams = rest;
            write(front, &members[0], train, members.iter().map(Outgoing::payload_bytes).sum());
            free[0] = iovec { iov_base: from_mut(front).cast(), iov_len: FRONT_BYTES };
            let mut used = 1;
            for part in members.iter().flat_map(|datagram| [datagram.header, datagram.data]) {
                if !part.is_empty() {
                    free[used] =
                        iovec { iov_base: part.as_ptr().cast_mut().cast(), iov_len: part.len() };
                    used += 1;
                }
            }
            let (slices, rest) = take(&mut free).split_at_mut(used);
            free = rest;
            let header = &mut header.msg_hdr;
            header.msg_iov = slices.as_mut_ptr();
            header.msg_iovlen = used;
        }
    }
}
