//! Datagrams that are sent as whole frames, past the host's routes.
//!
//! An unconnected UDP socket looks up a route for each datagram, because each pointer is another address: with that,
//! sending costs twice as much (`docs/experiments.md`, "What a datagram costs"). But all pointers have the same next
//! hop. So a packet socket sends the frames, with a front that is known but for addresses and lengths, and the kernel
//! is asked once a second whether the next hop is still right. When it is not known, or the packet socket refuses a
//! frame, the UDP socket sends; its errors say what is wrong.
//!
//! What the host does to packets on their way through its routing does not happen to these frames: firewall rules for
//! what it sends, IPsec policies, egress programs of control groups. Queueing disciplines and tc programs see them.

use core::fmt;
use core::str::FromStr;
use core::time::Duration;
use std::io;
use std::net::Ipv6Addr;
use std::os::fd::AsFd;

use ipnet::Ipv6Net;
use rustix::time::{ClockId, clock_gettime};
use socket2::{Domain, Socket, Type};

use super::next_hop::{NextHop, Tables};
use super::sys::frames::{FRONT_BYTES, FrameSender, Front};
use super::train::Train;
use super::{HEADER_BYTES, sys};
use crate::Outgoing;

/// How often the next hop is looked up. Who sends less often sends by the UDP socket: the look-up costs more than that.
const LOOK_UP_INTERVAL: Duration = Duration::from_secs(1);

const ETHERNET_BYTES: usize = 14;
const IPV6_BYTES: usize = 40;
const UDP_BYTES: usize = 8;
/// A `virtio_net_hdr` of linux/virtio_net.h.
const OFFLOAD_BYTES: usize = FRONT_BYTES - ETHERNET_BYTES - IPV6_BYTES - UDP_BYTES;

/// The checksum must be completed (`VIRTIO_NET_HDR_F_NEEDS_CSUM`).
const NEEDS_CHECKSUM: u8 = 1;
/// A train of UDP datagrams (`VIRTIO_NET_HDR_GSO_UDP_L4`).
const UDP_TRAIN: u8 = 5;
/// Bytes of a train that lie together, for programs that look at them: all headers, and those of the fabric. A single
/// datagram lies together as a whole, as that of a UDP socket.
const TOGETHER_BYTES: usize = 256;

const HOP_LIMIT: u8 = 64;

/// Whether datagrams are sent as frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Frames {
    /// By the UDP socket only.
    Off,
    /// As frames if the system allows it, otherwise by the UDP socket.
    #[default]
    IfPossible,
    /// As frames; a carrier that cannot be opened so is not opened. Later it also uses the UDP socket where needed.
    Required,
}

impl fmt::Display for Frames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Off => "off",
            Self::IfPossible => "auto",
            Self::Required => "on",
        })
    }
}

impl FromStr for Frames {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        [Self::IfPossible, Self::Required, Self::Off]
            .into_iter()
            .find(|choice| choice.to_string() == text)
            .ok_or_else(|| format!("{text:?} is not auto, on or off"))
    }
}

/// Why datagrams are not sent as frames. The UDP socket sends them then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NoFrames {
    /// It was not wanted.
    #[error("it is turned off")]
    Off,
    /// The carrier knows no interface or no prefix.
    #[error("the carrier is not configured for one interface, by name, and a prefix")]
    NoPrefix,
    /// The interface is no Ethernet.
    #[error("the interface is no Ethernet")]
    NoEthernet,
    /// The prefix is not reached by way of a gateway at the interface.
    #[error(
        "the interface has no route to the prefix by way of a gateway; see `bluebridge host up`"
    )]
    NoGateway,
    /// The gateway's Ethernet address is not known, or not confirmed.
    #[error("the gateway's Ethernet address is not known; see `bluebridge host up`")]
    NoNeighbour,
    /// The route to the prefix has an encapsulation, an MTU or a hop limit of its own.
    #[error("the route to the prefix has an encapsulation, an MTU or a hop limit of its own")]
    SpecialRoute,
    /// The process may not open packet sockets.
    #[error("packet sockets need CAP_NET_RAW")]
    Permission,
    /// The system refused something else.
    #[error("the system refused: {0}")]
    Socket(#[source] io::Error),
}

/// Sends frames through one interface.
pub(super) struct FrameCarrier {
    socket: Socket,
    tables: Tables,
    interface: String,
    prefix: Ipv6Net,
    source_port: u16,
    /// The next hop, or why there is none now.
    hop: Result<Hop, NoFrames>,
    look_up_at: Duration,
    sent_at: Duration,
    takes_trains: bool,
    sender: FrameSender,
}

/// A next hop, and what follows from it.
struct Hop {
    next: NextHop,
    template: Front,
    largest_payload_bytes: usize,
}

impl FrameCarrier {
    /// A carrier of at most `batch_count` datagrams at a time to `prefix`.
    pub(super) fn open(
        interface: &str,
        prefix: Ipv6Net,
        source_port: u16,
        batch_count: usize,
        buffer_bytes: usize,
    ) -> Result<Self, NoFrames> {
        let socket = Socket::new(Domain::from(libc::AF_PACKET), Type::RAW.nonblocking(), None)
            .map_err(|error| match error.raw_os_error() {
                Some(libc::EPERM | libc::EACCES) => NoFrames::Permission,
                _ => NoFrames::Socket(error),
            })?;
        sys::set_option(&socket, libc::SOL_PACKET, libc::PACKET_VNET_HDR, 1)
            .map_err(NoFrames::Socket)?;
        super::open::set_send_buffer(&socket, buffer_bytes).map_err(NoFrames::Socket)?;
        let mut carrier = Self {
            socket,
            tables: Tables::open().map_err(NoFrames::Socket)?,
            interface: interface.to_owned(),
            prefix,
            source_port,
            hop: Err(NoFrames::Off),
            look_up_at: coarse_now() + LOOK_UP_INTERVAL,
            sent_at: coarse_now(),
            takes_trains: true,
            sender: FrameSender::new(batch_count),
        };
        carrier.hop = carrier.look_up();
        Ok(carrier)
    }

    /// The carrier, if it can send frames now.
    pub(super) fn ready(mut self) -> Result<Self, NoFrames> {
        let hop = self.hop?;
        self.hop = Ok(hop);
        Ok(self)
    }

    /// Why no frames are sent at present.
    pub(super) fn refusal(&self) -> Option<&NoFrames> {
        self.hop.as_ref().err()
    }

    /// Sends a prefix of a batch that was cut into trains, and returns the number of sent trains; `None` if the UDP
    /// socket must send it.
    ///
    /// # Errors
    /// `EAGAIN` and `EINTR`, as of the UDP socket.
    pub(super) fn send(
        &mut self,
        batch: &[Outgoing<'_>],
        trains: &[Train],
    ) -> io::Result<Option<usize>> {
        let now = coarse_now();
        let pause = now.saturating_sub(self.sent_at);
        self.sent_at = now;
        if now >= self.look_up_at {
            if pause >= LOOK_UP_INTERVAL {
                return Ok(None);
            }
            self.look_up_at = now + LOOK_UP_INTERVAL;
            self.hop = self.look_up();
        }
        let Ok(hop) = &self.hop else { return Ok(None) };
        let fits = |datagram: &Outgoing<'_>| {
            datagram.payload_bytes() <= hop.largest_payload_bytes
                && self.prefix.contains(&datagram.destination)
        };
        let has_train = trains.iter().any(|train| train.count > 1);
        if !batch.iter().all(fits) || (has_train && !self.takes_trains) {
            return Ok(None);
        }
        let write = |front: &mut Front, first: &Outgoing<'_>, train: &Train, bytes: usize| {
            *front = hop.template;
            complete(front, first, train, bytes);
        };
        let error = match self.sender.send(self.socket.as_fd(), batch, trains, write) {
            Ok(count) => return Ok(Some(count)),
            Err(error) => error,
        };
        match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EINTR) => Err(error),
            // The first frame found no room behind the socket, in a queue or in memory. The UDP socket would not report
            // the former, and a datagram may be lost anywhere.
            Some(libc::ENOBUFS) => Ok(Some(1)),
            // Kernels before 6.2 take no trains from packet sockets.
            Some(libc::EINVAL) if has_train => {
                self.takes_trains = false;
                Ok(None)
            }
            _ => {
                self.hop = Err(NoFrames::Socket(error));
                Ok(None)
            }
        }
    }

    fn look_up(&mut self) -> Result<Hop, NoFrames> {
        let next = self.tables.next_hop(&self.interface, self.prefix.network())?;
        let is_bound = self.hop.as_ref().is_ok_and(|hop| hop.next.interface == next.interface);
        if !is_bound {
            sys::frames::bind_to_interface(self.socket.as_fd(), next.interface)
                .map_err(NoFrames::Socket)?;
        }
        let mtu = usize::try_from(next.mtu).unwrap_or(usize::MAX);
        Ok(Hop {
            template: template(&next, self.source_port),
            largest_payload_bytes: mtu.saturating_sub(HEADER_BYTES),
            next,
        })
    }
}

/// A clock that is cheap to read, and advances every few milliseconds.
fn coarse_now() -> Duration {
    let now = clock_gettime(ClockId::MonotonicCoarse);
    let seconds = Duration::from_secs(u64::try_from(now.tv_sec).unwrap_or_default());
    seconds + Duration::from_nanos(u64::try_from(now.tv_nsec).unwrap_or_default())
}

/// What all frames have in front of their payload.
fn template(hop: &NextHop, source_port: u16) -> Front {
    let mut front = [0; FRONT_BYTES];
    let (offload, frame) = front.split_at_mut(OFFLOAD_BYTES);
    offload[0] = NEEDS_CHECKSUM;
    let checksum_start = ETHERNET_BYTES + IPV6_BYTES;
    put_native(offload, 6, checksum_start);
    // Where in a UDP header the checksum is (RFC 768).
    put_native(offload, 8, 6);
    let (ethernet, rest) = frame.split_at_mut(ETHERNET_BYTES);
    ethernet[..6].copy_from_slice(&hop.gateway);
    ethernet[6..12].copy_from_slice(&hop.own);
    ethernet[12..].copy_from_slice(&[0x86, 0xdd]);
    // RFC 8200, section 3: version, traffic class and flow label, length, next header, hop limit, addresses.
    let (ip, udp) = rest.split_at_mut(IPV6_BYTES);
    ip[0] = 6 << 4;
    ip[6] = 17;
    ip[7] = HOP_LIMIT;
    udp[..2].copy_from_slice(&source_port.to_be_bytes());
    front
}

/// Adds what belongs to one datagram or train, of which the payloads are so many bytes.
fn complete(front: &mut Front, first: &Outgoing<'_>, train: &Train, payload_bytes: usize) {
    let (offload, frame) = front.split_at_mut(OFFLOAD_BYTES);
    let frame_bytes = ETHERNET_BYTES + HEADER_BYTES + payload_bytes;
    let together = if train.count > 1 { TOGETHER_BYTES } else { frame_bytes };
    put_native(offload, 2, frame_bytes.min(together));
    if train.count > 1 {
        offload[1] = UDP_TRAIN;
        put_native(offload, 4, train.segment_bytes.into());
    }
    // A train is no longer than TRAIN_BYTES, and a datagram than LARGEST_PAYLOAD_BYTES.
    let length = u16::try_from(UDP_BYTES + payload_bytes).unwrap_or(u16::MAX);
    let (source, destination) = (first.source, first.destination);
    let (ip, udp) = frame[ETHERNET_BYTES..].split_at_mut(IPV6_BYTES);
    ip[4..6].copy_from_slice(&length.to_be_bytes());
    ip[8..24].copy_from_slice(&source.octets());
    ip[24..40].copy_from_slice(&destination.octets());
    udp[2..4].copy_from_slice(&first.destination_port.to_be_bytes());
    udp[4..6].copy_from_slice(&length.to_be_bytes());
    udp[6..8].copy_from_slice(&pseudo_header_sum(source, destination, length).to_be_bytes());
}

/// The sum of the pseudo-header (RFC 8200, section 8.1), to which the kernel or the NIC adds the rest.
fn pseudo_header_sum(source: Ipv6Addr, destination: Ipv6Addr, length: u16) -> u16 {
    let words = source.segments().into_iter().chain(destination.segments());
    let mut sum = words.map(u32::from).sum::<u32>() + u32::from(length) + 17;
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    u16::try_from(sum).unwrap_or_default()
}

fn put_native(bytes: &mut [u8], at: usize, value: usize) {
    let value = u16::try_from(value).unwrap_or(u16::MAX);
    bytes[at..at + 2].copy_from_slice(&value.to_ne_bytes());
}

#[cfg(test)]
mod tests {
    use etherparse::{IpNumber, PacketBuilder, SlicedPacket, TransportSlice};

    use super::*;

    const HOP: NextHop = NextHop { interface: 7, own: [1; 6], gateway: [2; 6], mtu: 9000 };

    fn datagram<'a>(number: u16, data: &'a [u8]) -> Outgoing<'a> {
        let at = |node| Ipv6Addr::new(0xfdbb, 1, node, number, 0xffff, number, 0, number ^ 0xffff);
        Outgoing {
            source: at(1),
            destination: at(2),
            destination_port: 7000 + number % 100,
            header: b"",
            data,
        }
    }

    fn front(first: &Outgoing<'_>, train: Train, payload_bytes: usize) -> Front {
        let mut front = template(&HOP, 4444);
        complete(&mut front, first, &train, payload_bytes);
        front
    }

    /// Adds a frame's bytes to the checksum, as the kernel or the NIC does: from where, and into where, the offload says.
    fn finish(front: &Front, payload: &[u8]) -> Vec<u8> {
        let native = |at: usize| usize::from(u16::from_ne_bytes([front[at], front[at + 1]]));
        let (start, offset) = (native(6), native(8));
        let mut frame = [&front[OFFLOAD_BYTES..], payload].concat();
        let mut sum: u32 = frame[start..]
            .chunks(2)
            .map(|pair| u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0)))
            .sum();
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        let checksum = match !u16::try_from(sum).expect("folded") {
            0 => 0xffff,
            checksum => checksum,
        };
        frame[start + offset..start + offset + 2].copy_from_slice(&checksum.to_be_bytes());
        frame
    }

    #[test]
    fn a_frame_is_what_another_library_builds() {
        for number in 0..3000_u16 {
            let payload: Vec<u8> =
                (0..number).map(|byte| byte.wrapping_mul(7919).to_be_bytes()[0]).collect();
            let sent = datagram(number, &payload);
            let front = front(&sent, Train { count: 1, segment_bytes: number }, payload.len());
            assert_eq!((front[0], front[1]), (NEEDS_CHECKSUM, 0), "no train");
            let mut expected = Vec::new();
            PacketBuilder::ethernet2(HOP.own, HOP.gateway)
                .ipv6(sent.source.octets(), sent.destination.octets(), HOP_LIMIT)
                .udp(4444, sent.destination_port)
                .write(&mut expected, &payload)
                .expect("it is short");
            assert_eq!(finish(&front, &payload), expected, "{number} bytes");
        }
    }

    #[test]
    fn a_train_is_described_for_the_kernel() {
        let pieces = vec![5; 1000];
        let first = datagram(3, &pieces[..400]);
        let front = front(&first, Train { count: 3, segment_bytes: 400 }, 1000);
        let native = |at: usize| u16::from_ne_bytes([front[at], front[at + 1]]);
        assert_eq!((front[1], native(4)), (UDP_TRAIN, 400));
        assert_eq!(usize::from(native(2)), TOGETHER_BYTES);
        let frame = finish(&front, &pieces);
        let packet = SlicedPacket::from_ethernet(&frame).expect("well-formed");
        let Some(TransportSlice::Udp(udp)) = packet.transport else { panic!("{packet:?}") };
        assert_eq!((udp.length(), udp.destination_port()), (1008, 7003));
        assert_eq!(udp.payload(), pieces);
        assert_eq!(frame[ETHERNET_BYTES + 6], IpNumber::UDP.0);
    }

    #[test]
    fn what_lies_together_is_not_more_than_the_frame() {
        let empty = front(&datagram(1, b""), Train { count: 1, segment_bytes: 0 }, 0);
        assert_eq!(u16::from_ne_bytes([empty[2], empty[3]]), 62);
    }

    #[test]
    fn choices_are_read_as_they_are_written() {
        for choice in [Frames::Off, Frames::IfPossible, Frames::Required] {
            assert_eq!(choice.to_string().parse(), Ok(choice));
        }
        assert!("maybe".parse::<Frames>().is_err());
    }
}
