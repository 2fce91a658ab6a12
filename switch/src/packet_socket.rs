//! Packet sockets on one interface, with the offload state of frames.
//!
//! All of the crate's unsafe socket code is here.

use std::{
    io,
    mem::{size_of, zeroed},
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    ptr,
};

use socket2::{Domain, Socket, Type};

/// Bytes of a `virtio_net_hdr`, which precedes every frame.
pub const OFFLOAD_BYTES: usize = 10;

/// The longest frame: the largest train that a UDP or TCP socket sends, with its headers.
pub const FRAME_BYTES_MAX: usize = 65_536 + 128;

/// Frames received with one system call.
pub const BATCH: usize = 32;

/// The size of a socket's receive buffer, as far as the system allows.
const RECEIVE_BUFFER_BYTES: usize = 16 << 20;

/// Room for one control message of the size of `tpacket_auxdata`, aligned for its header.
type Control = [u64; 8];

/// A packet socket on one interface; it never blocks.
#[derive(Debug)]
pub struct PacketSocket {
    socket: Socket,
}

impl PacketSocket {
    /// A socket that sends through an interface and, if `receives`, receives everything that arrives there.
    ///
    /// # Errors
    /// If the system refuses it, for example without `CAP_NET_RAW`.
    pub fn open(ifindex: u32, receives: bool) -> io::Result<Self> {
        let socket = Socket::new(Domain::PACKET, Type::RAW.nonblocking().cloexec(), None)?;
        let this = Self { socket };
        this.set(libc::PACKET_VNET_HDR, 1)?;
        this.set(libc::PACKET_QDISC_BYPASS, 1)?;
        if receives {
            this.set(libc::PACKET_IGNORE_OUTGOING, 1)?;
            this.set(libc::PACKET_AUXDATA, 1)?;
            this.enlarge();
        }
        this.bind(ifindex, receives)?;
        if receives {
            this.receive_foreign(ifindex)?;
        }
        Ok(this)
    }

    /// Sends one frame.
    ///
    /// # Errors
    /// `WouldBlock` or `ENOBUFS` if the interface is full, `EMSGSIZE` if the frame is too long.
    pub fn send(&self, offload: [u8; OFFLOAD_BYTES], frame: &[u8]) -> io::Result<()> {
        let slices = [io::IoSlice::new(&offload), io::IoSlice::new(frame)];
        self.socket.send_vectored(&slices).map(drop)
    }

    fn set(&self, option: i32, value: i32) -> io::Result<()> {
        self.set_raw(libc::SOL_PACKET, option, &value)
    }

    fn set_raw<T>(&self, level: i32, option: i32, value: &T) -> io::Result<()> {
        let length = u32::try_from(size_of::<T>()).unwrap_or(0);
        // SAFETY: the pointer and the length describe `value`, which outlives the call; the
        // options used here take plain integers or `packet_mreq`.
        let result = unsafe {
            libc::setsockopt(
                self.socket.as_raw_fd(),
                level,
                option,
                ptr::from_ref(value).cast(),
                length,
            )
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Requests a large buffer; without privileges the system gives less.
    fn enlarge(&self) {
        let bytes = i32::try_from(RECEIVE_BUFFER_BYTES).unwrap_or(i32::MAX);
        if self.set_raw(libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, &bytes).is_err() {
            let _ = self.socket.set_recv_buffer_size(RECEIVE_BUFFER_BYTES);
        }
    }

    fn bind(&self, ifindex: u32, receives: bool) -> io::Result<()> {
        let all = u16::try_from(libc::ETH_P_ALL).unwrap_or(0);
        let address = libc::sockaddr_ll {
            sll_family: u16::try_from(libc::AF_PACKET).unwrap_or(0),
            sll_protocol: if receives { all.to_be() } else { 0 },
            sll_ifindex: i32::try_from(ifindex).unwrap_or(0),
            sll_hatype: 0,
            sll_pkttype: 0,
            sll_halen: 0,
            sll_addr: [0; 8],
        };
        let length = u32::try_from(size_of::<libc::sockaddr_ll>()).unwrap_or(0);
        // SAFETY: the pointer and the length describe `address`, which outlives the call.
        let result =
            unsafe { libc::bind(self.socket.as_raw_fd(), ptr::from_ref(&address).cast(), length) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Receives frames with any destination MAC address, as a switch must.
    fn receive_foreign(&self, ifindex: u32) -> io::Result<()> {
        let membership = libc::packet_mreq {
            mr_ifindex: i32::try_from(ifindex).unwrap_or(0),
            mr_type: u16::try_from(libc::PACKET_MR_PROMISC).unwrap_or(0),
            mr_alen: 0,
            mr_address: [0; 8],
        };
        self.set_raw(libc::SOL_PACKET, libc::PACKET_ADD_MEMBERSHIP, &membership)
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// A received frame.
#[derive(Debug)]
pub struct Received<'a> {
    /// Its `virtio_net_hdr`.
    pub offload: [u8; OFFLOAD_BYTES],
    /// Its bytes, without an 802.1Q tag that the kernel removed.
    pub frame: &'a mut [u8],
    /// The frame was longer than [`FRAME_BYTES_MAX`].
    pub is_cut: bool,
    /// The kernel removed an 802.1Q tag from the frame.
    pub is_tagged: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    offload: [u8; OFFLOAD_BYTES],
    control: Control,
    bytes: usize,
    is_cut: bool,
    is_tagged: bool,
}

/// Buffers for a batch of frames; reused for every batch.
#[derive(Debug)]
pub struct Batch {
    slots: Vec<Slot>,
    frames: Vec<u8>,
    count: usize,
}

impl Batch {
    /// Empty buffers, [`BATCH`] times [`FRAME_BYTES_MAX`] bytes.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "it allocates 2 MB")]
    pub fn new() -> Self {
        let frames = vec![0; BATCH * FRAME_BYTES_MAX];
        Self { slots: vec![Slot::default(); BATCH], frames, count: 0 }
    }

    /// Receives the frames that have arrived, and returns their number.
    ///
    /// # Errors
    /// If the socket failed; an empty socket is no error.
    pub fn receive(&mut self, from: &PacketSocket) -> io::Result<usize> {
        self.receive_with(from.as_fd(), OFFLOAD_BYTES)
    }

    /// Like [`Self::receive`], from a socket whose datagrams are frames without a `virtio_net_hdr`.
    ///
    /// # Errors
    /// Like [`Self::receive`].
    pub fn receive_plain(&mut self, from: &impl AsFd) -> io::Result<usize> {
        self.receive_with(from.as_fd(), 0)
    }

    fn receive_with(&mut self, from: BorrowedFd<'_>, offload_bytes: usize) -> io::Result<usize> {
        self.count = 0;
        // SAFETY: an `iovec` of zeros is a valid one, of no bytes.
        let mut vectors: [[libc::iovec; 2]; BATCH] = unsafe { zeroed() };
        // SAFETY: an `mmsghdr` of zeros is a valid one, without buffers.
        let mut messages: [libc::mmsghdr; BATCH] = unsafe { zeroed() };
        let parts = self.slots.iter_mut().zip(self.frames.chunks_exact_mut(FRAME_BYTES_MAX));
        for ((message, vector), (slot, frame)) in messages.iter_mut().zip(&mut vectors).zip(parts) {
            slot.offload = [0; OFFLOAD_BYTES];
            let offload = slot.offload.get_mut(..offload_bytes).unwrap_or_default();
            *vector = [offload, frame].map(|part| libc::iovec {
                iov_base: part.as_mut_ptr().cast(),
                iov_len: part.len(),
            });
            message.msg_hdr.msg_iov = vector.as_mut_ptr();
            message.msg_hdr.msg_iovlen = vector.len();
            message.msg_hdr.msg_control = slot.control.as_mut_ptr().cast();
            message.msg_hdr.msg_controllen = size_of::<Control>();
        }
        let wanted = u32::try_from(BATCH).unwrap_or(0);
        // SAFETY: every message points to buffers of `self` and of this frame, which outlive the
        // call and are not otherwise used during it.
        let received = unsafe {
            libc::recvmmsg(
                from.as_raw_fd(),
                messages.as_mut_ptr(),
                wanted,
                libc::MSG_DONTWAIT,
                ptr::null_mut(),
            )
        };
        let Ok(count) = usize::try_from(received) else {
            let error = io::Error::last_os_error();
            let is_quiet =
                matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted);
            return if is_quiet { Ok(0) } else { Err(error) };
        };
        for (slot, message) in self.slots.iter_mut().zip(&messages).take(count) {
            let bytes = message.msg_len as usize;
            slot.bytes = bytes.saturating_sub(offload_bytes).min(FRAME_BYTES_MAX);
            slot.is_cut = bytes < offload_bytes || message.msg_hdr.msg_flags & libc::MSG_TRUNC != 0;
            slot.is_tagged = has_tag(&message.msg_hdr);
        }
        self.count = count;
        Ok(count)
    }

    /// The frames of the last batch.
    pub fn frames(&mut self) -> impl Iterator<Item = Received<'_>> {
        let buffers = self.frames.chunks_exact_mut(FRAME_BYTES_MAX);
        self.slots.iter().zip(buffers).take(self.count).map(|(slot, buffer)| Received {
            offload: slot.offload,
            frame: buffer.get_mut(..slot.bytes).unwrap_or_default(),
            is_cut: slot.is_cut,
            is_tagged: slot.is_tagged,
        })
    }
}

/// Whether the auxiliary data of a message says that a tag was removed.
fn has_tag(message: &libc::msghdr) -> bool {
    // SAFETY: the kernel filled in the message, so control pointer and length are consistent.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(message) };
    // SAFETY: the pointer is null or points into the control buffer, at a whole header.
    while let Some(found) = unsafe { header.as_ref() } {
        if found.cmsg_level == libc::SOL_PACKET && found.cmsg_type == libc::PACKET_AUXDATA {
            // SAFETY: the header is one in the buffer, so its data lies behind it.
            let data = unsafe { libc::CMSG_DATA(header) };
            // SAFETY: this kind carries a `tpacket_auxdata`; a read of it needs no alignment.
            let auxiliary: libc::tpacket_auxdata = unsafe { ptr::read_unaligned(data.cast()) };
            return auxiliary.tp_status & libc::TP_STATUS_VLAN_VALID != 0;
        }
        // SAFETY: both pointers are of the message that the kernel filled in.
        header = unsafe { libc::CMSG_NXTHDR(message, header) };
    }
    false
}
