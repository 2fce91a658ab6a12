//! Trains: one frame that carries several datagrams (UDP segmentation offload).
//!
//! A train passes the switch as one frame, but an impaired port splits it first: a wire loses datagrams.

use super::{
    Offload,
    frame::{ETHERNET_BYTES, HEADERS_BYTES},
};

/// `VIRTIO_NET_HDR_F_NEEDS_CSUM` of linux/virtio_net.h: the checksum must still be filled in.
const NEEDS_CHECKSUM: u8 = 1;
/// `VIRTIO_NET_HDR_GSO_UDP_L4`.
const UDP_TRAIN: u8 = 5;
const UDP_HEADER_BYTES: usize = 8;
/// Offsets of the IPv6 and UDP lengths and the UDP checksum in a frame.
const IPV6_LENGTH: usize = 18;
const UDP_LENGTH: usize = HEADERS_BYTES + 4;
const UDP_CHECKSUM: usize = HEADERS_BYTES + 6;

/// `VIRTIO_NET_HDR_GSO_TCPV4` and `_TCPV6`, and the bit that may be set in addition (ECN).
const TCP_TRAINS: [u8; 2] = [1, 4];
const ECN: u8 = 0x80;
const TCP_HEADER_BYTES: usize = 20;
const IPV4_HEADER_BYTES: usize = 20;
const ETHERTYPE_IPV6: [u8; 2] = [0x86, 0xdd];

/// Bytes of the longest frame that a link gets: for a train its first segment. Options
/// are not counted; TCP leaves room for its own.
pub(super) fn longest_frame(frame: &[u8], offload: Offload) -> usize {
    let [_, kind, _, _, size0, size1, ..] = offload.0;
    let segment_bytes = usize::from(u16::from_ne_bytes([size0, size1]));
    if !offload.is_segmented() || segment_bytes == 0 {
        return frame.len();
    }
    let is_ipv6 = frame.get(12..14) == Some(&ETHERTYPE_IPV6);
    let below = if is_ipv6 { HEADERS_BYTES } else { ETHERNET_BYTES + IPV4_HEADER_BYTES };
    let is_tcp = TCP_TRAINS.contains(&(kind & !ECN));
    let header = if is_tcp { TCP_HEADER_BYTES } else { UDP_HEADER_BYTES };
    frame.len().min(below + header + segment_bytes)
}

/// A frame of several UDP datagrams after plain Ethernet and IPv6 headers.
#[derive(Debug)]
pub(super) struct Train<'a> {
    headers: &'a [u8],
    payload: &'a [u8],
    piece_bytes: usize,
    offload: Offload,
}

impl<'a> Train<'a> {
    /// The train in a frame; `None` if it is not a train, or one that cannot be split here.
    pub(super) fn parse(frame: &'a [u8], offload: Offload) -> Option<Self> {
        let [flags, kind, _, _, size0, size1, start0, start1, _, _] = offload.0;
        let piece_bytes = usize::from(u16::from_ne_bytes([size0, size1]));
        let checksum_start = usize::from(u16::from_ne_bytes([start0, start1]));
        let is_plain = checksum_start == HEADERS_BYTES && flags & NEEDS_CHECKSUM != 0;
        if kind != UDP_TRAIN || piece_bytes == 0 || !is_plain {
            return None;
        }
        let (headers, payload) = frame.split_at_checked(HEADERS_BYTES + UDP_HEADER_BYTES)?;
        let mut single = offload;
        single.0[1] = 0;
        single.0[4..6].copy_from_slice(&[0; 2]);
        Some(Self { headers, payload, piece_bytes, offload: single })
    }

    /// The offload state of every piece: its checksum must still be filled in.
    pub(super) const fn piece_offload(&self) -> Offload {
        self.offload
    }

    /// The datagrams as separate frames.
    pub(super) fn pieces(&self) -> impl Iterator<Item = Vec<u8>> {
        self.payload.chunks(self.piece_bytes).map(|data| self.piece(data))
    }

    fn piece(&self, data: &[u8]) -> Vec<u8> {
        let mut frame = Vec::with_capacity(self.headers.len() + data.len());
        frame.extend_from_slice(self.headers);
        frame.extend_from_slice(data);
        let length = u16::try_from(UDP_HEADER_BYTES + data.len()).unwrap_or(u16::MAX);
        let whole = read(&frame, UDP_LENGTH);
        // A partial checksum is the sum of the pseudo header, of which only the length changes.
        let sum = add(add(read(&frame, UDP_CHECKSUM), !whole), length);
        write(&mut frame, UDP_CHECKSUM, sum);
        write(&mut frame, UDP_LENGTH, length);
        write(&mut frame, IPV6_LENGTH, length);
        frame
    }
}

/// Fills in the checksum that a frame still lacks; false if its place is not in the frame.
pub(super) fn complete_checksum(frame: &mut [u8], offload: Offload) -> bool {
    let [flags, _, _, _, _, _, start0, start1, offset0, offset1] = offload.0;
    if flags & NEEDS_CHECKSUM == 0 {
        return true;
    }
    let start = usize::from(u16::from_ne_bytes([start0, start1]));
    let at = start + usize::from(u16::from_ne_bytes([offset0, offset1]));
    if at + 2 > frame.len() {
        return false;
    }
    // The field contains the sum of the pseudo header, so it is summed like the data.
    let words = frame.get(start..).unwrap_or_default().chunks(2);
    let sum = words.fold(0, |sum, word| {
        let [high, low] = [word.first(), word.get(1)].map(|byte| byte.copied().unwrap_or(0));
        add(sum, u16::from_be_bytes([high, low]))
    });
    // UDP over IPv6 sends a sum of zero as ones (RFC 8200, 8.1), and to TCP both are the same.
    write(frame, at, if sum == u16::MAX { sum } else { !sum });
    true
}

/// The sum in ones' complement (RFC 1071).
const fn add(a: u16, b: u16) -> u16 {
    let (sum, carry) = a.overflowing_add(b);
    sum + carry as u16
}

fn read(frame: &[u8], at: usize) -> u16 {
    frame.get(at..).and_then(|f| f.first_chunk()).map_or(0, |bytes| u16::from_be_bytes(*bytes))
}

fn write(frame: &mut [u8], at: usize, value: u16) {
    if let Some(bytes) = frame.get_mut(at..).and_then(|frame| frame.first_chunk_mut()) {
        *bytes = value.to_be_bytes();
    }
}
