//! The UDP carrier where the whole fabric prefix is local: every pointer is an address.

mod frames;

use core::time::Duration;
use std::net::{Ipv6Addr, SocketAddrV6};

use bluebridge_testkit::{ip, namespace::in_local_fabric};
use bluebridge_transport::udp::{
    HEADER_BYTES, JoinTrains, LARGEST_PAYLOAD_BYTES, UdpConfig, UdpTransport,
};
use bluebridge_transport::{Incoming, Outgoing, TransmitError, Transport, Wait};
use etherparse::{IpNumber, Ipv6Header, UdpHeader};
use socket2::{Domain, Protocol, Socket, Type};

const SECOND: Duration = Duration::from_secs(1);

fn open(config: &UdpConfig) -> UdpTransport {
    UdpTransport::open(config).expect("an IPv6 UDP socket")
}

/// A pointer of space 1 whose node, command, tag and offset all depend on `number`.
fn pointer(node: u16, number: u64) -> Ipv6Addr {
    let high = 0xfdbb_0001_u64 << 32 | u64::from(node) << 16 | (number & 0xffff);
    Ipv6Addr::from(u128::from(high) << 64 | u128::from(number.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
}

fn bytes(count: usize) -> Vec<u8> {
    (0..count as u64).map(|n| (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

/// Receives until `count` datagrams have arrived or ten seconds have passed, and passes each to `look`.
fn collect(receiver: &mut UdpTransport, count: usize, mut look: impl FnMut(usize, Incoming<'_>)) {
    let deadline = receiver.now() + 10 * SECOND;
    let mut arrived_count = 0;
    while arrived_count < count && receiver.now() < deadline {
        for index in 0..receiver.receive(Wait::until(deadline)).expect("received") {
            look(arrived_count, receiver.incoming(index));
            arrived_count += 1;
        }
    }
    assert_eq!(arrived_count, count);
}

#[test]
fn every_pointer_arrives_as_sent() {
    in_local_fabric(9000, || {
        let (mut sender, mut receiver) = (open(&UdpConfig::default()), open(&UdpConfig::default()));
        let destination_port = receiver.local_port();
        for first in (0..20_000_u64).step_by(100) {
            let numbers: Vec<_> = (first..first + 100).map(u64::to_be_bytes).collect();
            let batch: Vec<_> = (first..)
                .zip(&numbers)
                .map(|(number, data)| Outgoing {
                    source: pointer(1, number + 1),
                    destination: pointer(2, number),
                    destination_port,
                    header: b"",
                    data,
                })
                .collect();
            assert_eq!(sender.transmit(&batch).expect("sent"), 100);
            collect(&mut receiver, 100, |index, incoming| {
                let number = first + index as u64;
                assert_eq!(incoming.payload, number.to_be_bytes());
                assert_eq!(incoming.destination, pointer(2, number));
                assert_eq!(incoming.source, pointer(1, number + 1));
                assert_eq!(incoming.source_port, sender.local_port());
            });
        }
    });
}

/// Sends `line` in pieces of `piece_bytes` and checks that exactly these arrive.
fn exchange(
    sender: &mut UdpTransport,
    receiver: &mut UdpTransport,
    line: &[u8],
    piece_bytes: usize,
) {
    let one = Outgoing {
        source: pointer(1, 0),
        destination: pointer(2, 4096),
        destination_port: receiver.local_port(),
        header: b"",
        data: b"",
    };
    let batch: Vec<_> = line
        .chunks(piece_bytes)
        .map(|piece| {
            let (header, data) = piece.split_at(piece.len().min(80));
            Outgoing { header, data, ..one }
        })
        .collect();
    assert_eq!(sender.transmit(&batch).expect("sent"), batch.len());
    collect(receiver, batch.len(), |index, incoming| {
        let piece = line.chunks(piece_bytes).nth(index).expect("a piece");
        assert!(incoming.payload == piece, "piece {index} of {piece_bytes} bytes");
        assert_eq!(incoming.destination, one.destination);
    });
}

fn trains_at_every_mtu(trains: bool) -> (UdpTransport, UdpTransport) {
    let mut sender = open(&UdpConfig { trains, ..UdpConfig::default() });
    let mut receiver = open(&UdpConfig { join_trains: JoinTrains::Always, ..UdpConfig::default() });
    let line = bytes(32_768);
    for mtu in (1280..9000).step_by(97).chain([1500, 4096, 9000]) {
        ip(&format!("link set lo mtu {mtu}"));
        let piece_bytes = mtu - HEADER_BYTES;
        exchange(&mut sender, &mut receiver, &line, piece_bytes);
        exchange(&mut sender, &mut receiver, &line[..2 * piece_bytes], piece_bytes);
        exchange(&mut sender, &mut receiver, &line[..piece_bytes + 1], piece_bytes);
    }
    (sender, receiver)
}

#[test]
fn a_train_is_joined_at_every_mtu() {
    in_local_fabric(9000, || {
        let (sender, receiver) = trains_at_every_mtu(true);
        let (sent, received) = (sender.counters(), receiver.counters());
        assert_eq!(sent.train_refused_count, 0);
        assert!(sent.sent_train_count >= 3 * 83);
        assert_eq!(received.received_train_count, sent.sent_train_count);
        assert_eq!(received.received_bytes, sent.sent_bytes);
    });
}

#[test]
fn a_train_that_the_link_splits_arrives_in_pieces() {
    in_local_fabric(9000, || {
        ip("link set lo gso_max_segs 1");
        let (sender, receiver) = trains_at_every_mtu(true);
        assert!(sender.counters().sent_train_count >= 3 * 83);
        assert_eq!(receiver.counters().received_train_count, 0);
    });
}

#[test]
fn pieces_without_trains_pass_at_every_mtu() {
    in_local_fabric(9000, || {
        let (sender, receiver) = trains_at_every_mtu(false);
        assert_eq!(sender.counters().sent_train_count, 0);
        assert_eq!(receiver.counters().received_count, sender.counters().sent_count);
    });
}

#[test]
fn the_largest_train_and_the_longest_pass() {
    in_local_fabric(9000, || {
        ip("link set lo mtu 9000");
        let join_trains = JoinTrains::Always;
        let config = UdpConfig { send_batch_count: 256, join_trains, ..UdpConfig::default() };
        let (mut sender, mut receiver) = (open(&config), open(&config));
        // 65,473 bytes make one train of 8 pieces; of 65,474 the last piece goes alone.
        exchange(&mut sender, &mut receiver, &bytes(65_473), 8_185);
        assert_eq!(sender.counters().sent_train_count, 1);
        exchange(&mut sender, &mut receiver, &bytes(65_474), 8_185);
        assert_eq!(sender.counters().sent_train_count, 2);
        // 64 segments make one train, 66 two.
        exchange(&mut sender, &mut receiver, &bytes(64 * 90), 90);
        assert_eq!(sender.counters().sent_train_count, 3);
        exchange(&mut sender, &mut receiver, &bytes(66 * 90), 90);
        assert_eq!(sender.counters().sent_train_count, 5);
        assert_eq!(sender.counters().train_refused_count, 0);
        assert_eq!(receiver.counters().received_train_count, 5);
    });
}

#[test]
fn nothing_is_fragmented() {
    in_local_fabric(9000, || {
        let (mut sender, mut receiver) = (open(&UdpConfig::default()), open(&UdpConfig::default()));
        let line = bytes(70_000);
        for mtu in [1280, 1500, 4000, 9000] {
            ip(&format!("link set lo mtu {mtu}"));
            let limit = mtu - HEADER_BYTES;
            let one = Outgoing {
                source: pointer(1, 0),
                destination: pointer(2, 0),
                destination_port: receiver.local_port(),
                header: &line[..limit],
                data: &line[..1],
            };
            for batch in [&[one; 1][..], &[one; 4]] {
                let error = sender.transmit(batch).expect_err("one byte too large");
                assert!(
                    matches!(error, TransmitError::TooLarge { payload_bytes, limit_bytes: Some(known) }
                        if payload_bytes == limit + 1 && known == limit),
                    "{error:?}"
                );
            }
            exchange(&mut sender, &mut receiver, &line[..limit], limit);
        }
        assert!(sender.capabilities().train_segment_count > 1, "too large is no refusal of trains");
        ip("link set lo mtu 65575");
        let largest = LARGEST_PAYLOAD_BYTES;
        exchange(&mut sender, &mut receiver, &line[..largest], largest);
    });
}

#[test]
fn what_has_no_route_is_unreachable_and_what_is_foreign_is_dropped() {
    in_local_fabric(9000, || {
        let filter = Some("fdbb::/16".parse().expect("a prefix"));
        let mut receiver = open(&UdpConfig { filter, ..UdpConfig::default() });
        let mut sender = open(&UdpConfig::default());
        let foreign = "fdcc::1".parse().expect("an address");
        let out = Outgoing {
            source: pointer(1, 0),
            destination: foreign,
            destination_port: receiver.local_port(),
            header: b"",
            data: b"foreign",
        };
        let error = sender.transmit(&[out; 3]).expect_err("no route");
        assert!(
            matches!(error, TransmitError::Unreachable { destination, .. } if destination == foreign),
            "{error:?}"
        );
        ip("-6 route add local fdcc::/16 dev lo");
        assert_eq!(sender.transmit(&[out; 3]).expect("sent"), 3);
        let native = Outgoing { destination: pointer(2, 7), data: b"native", ..out };
        assert_eq!(sender.transmit(&[native]).expect("sent"), 1);
        collect(&mut receiver, 1, |_, incoming| assert_eq!(incoming.payload, b"native"));
        assert_eq!(receiver.counters().foreign_drop_count, 3);
    });
}

#[test]
fn a_carrier_stays_on_its_device() {
    in_local_fabric(9000, || {
        ip("link add bbtransport0 type veth peer name bbtransport1");
        ip("link set bbtransport0 mtu 4000 up");
        ip("link set bbtransport1 mtu 4000 up");
        let elsewhere = Some("bbtransport0".to_owned());
        let mut elsewhere = open(&UdpConfig { device: elsewhere, ..UdpConfig::default() });
        assert_eq!(elsewhere.capabilities().largest_payload_bytes, 4000 - HEADER_BYTES);
        let here = UdpConfig { device: Some("lo".to_owned()), ..UdpConfig::default() };
        let by_index = UdpConfig { interface_index: Some(1), ..UdpConfig::default() };
        for config in [&here, &by_index] {
            let (mut sender, mut receiver) = (open(config), open(&here));
            assert_eq!(sender.capabilities().largest_payload_bytes, 9000 - HEADER_BYTES);
            exchange(&mut sender, &mut receiver, &bytes(20_000), 8_000);
            let out = Outgoing {
                source: pointer(1, 0),
                destination: pointer(2, 0),
                destination_port: elsewhere.local_port(),
                header: b"x",
                data: b"",
            };
            assert_eq!(sender.transmit(&[out]).expect("sent"), 1);
        }
        assert_eq!(elsewhere.receive(Wait::NONE).expect("received"), 0);
    });
}

const UDP: u8 = 17;
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const DESTINATION_OPTIONS: u8 = 60;

/// Sends IPv6 packets unchanged.
struct RawSender {
    socket: Socket,
    source: Ipv6Addr,
    destination: Ipv6Addr,
    port: u16,
}

impl RawSender {
    fn to(destination: Ipv6Addr, port: u16) -> Self {
        let raw = Protocol::from(libc::IPPROTO_RAW);
        let socket =
            Socket::new(Domain::IPV6, Type::RAW, Some(raw)).expect("the namespace is ours");
        Self { socket, source: pointer(1, 7), destination, port }
    }

    /// An IPv6 header of no payload.
    fn header(&self) -> Ipv6Header {
        Ipv6Header {
            hop_limit: 64,
            source: self.source.octets(),
            destination: self.destination.octets(),
            ..Ipv6Header::default()
        }
    }

    fn udp(&self, payload: &[u8]) -> Vec<u8> {
        let header = UdpHeader::with_ipv6_checksum(4000, self.port, &self.header(), payload);
        [&header.expect("it is short").to_bytes(), payload].concat()
    }

    /// Sends the bytes after an IPv6 header; `next_header` is the kind of their first header.
    fn send(&self, next_header: u8, parts: &[&[u8]]) {
        let payload = parts.concat();
        let payload_length = u16::try_from(payload.len()).expect("it is short");
        let header =
            Ipv6Header { payload_length, next_header: IpNumber(next_header), ..self.header() };
        let packet = [&header.to_bytes()[..], &payload].concat();
        let to = SocketAddrV6::new(self.destination, 0, 0, 0).into();
        assert_eq!(self.socket.send_to(&packet, &to).expect("sent"), packet.len());
    }
}

#[test]
fn what_comes_in_fragments_or_behind_extension_headers_is_dropped() {
    in_local_fabric(9000, || {
        let mut receiver = open(&UdpConfig::default());
        let sender = RawSender::to(pointer(2, 7), receiver.local_port());
        let whole = sender.udp(&[9; 32]);
        // Padding of 4 bytes, and experimental options that are longer than a carrier's buffer.
        let options = [UDP, 0, 1, 4, 0, 0, 0, 0];
        let mut long = vec![0; 512];
        long[..4].copy_from_slice(&[UDP, 63, 0x1e, 253]);
        long[257..259].copy_from_slice(&[0x1e, 253]);
        // A routing header without remaining segments is skipped, for every type.
        let routing = [UDP, 0, 200, 0, 0, 0, 0, 0];
        let fragment = |offset: u16, more: u16, identification| {
            let place = (offset | more).to_be_bytes();
            [UDP, 0, place[0], place[1], 0, 0, 0, identification]
        };
        let packets: [(&str, u8, &[&[u8]]); 6] = [
            ("hop-by-hop options", HOP_BY_HOP, &[&options, &whole]),
            ("destination options", DESTINATION_OPTIONS, &[&options, &whole]),
            ("long destination options", DESTINATION_OPTIONS, &[&long, &whole]),
            ("a routing header", ROUTING, &[&routing, &whole]),
            ("an atomic fragment", FRAGMENT, &[&fragment(0, 0, 1), &whole]),
            ("the first of two fragments", FRAGMENT, &[&fragment(0, 1, 2), &whole[..24]]),
        ];
        for (count, (what, next_header, parts)) in (1..).zip(packets) {
            sender.send(next_header, parts);
            if what == "the first of two fragments" {
                sender.send(FRAGMENT, &[&fragment(24, 0, 2), &whole[24..]]);
            }
            let marker = sender.udp(what.as_bytes());
            sender.send(UDP, &[&marker]);
            collect(&mut receiver, 1, |_, incoming| {
                assert_eq!(incoming.payload, what.as_bytes(), "{what} was not dropped");
            });
            assert_eq!(receiver.counters().malformed_drop_count, count, "{what}");
        }
    });
}
