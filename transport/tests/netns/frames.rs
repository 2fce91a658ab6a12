//! Datagrams that are sent as frames, from one end of a link to the other.

use core::time::Duration;
use std::thread;

use bluebridge_testkit::{ip, namespace::in_child};
use bluebridge_transport::udp::{
    Frames, HEADER_BYTES, JoinTrains, NoFrames, UdpConfig, UdpTransport,
};
use bluebridge_transport::{OpenError, Outgoing, TransmitError, Transport, Wait};

use super::{SECOND, bytes, collect, exchange, open, pointer};

/// The interval in which a carrier looks the next hop up, and a bit.
const LOOK_UP: Duration = Duration::from_millis(1100);

/// Waits until the carrier looks the next hop up before it sends, because it sends often enough.
fn let_look_up(sender: &mut UdpTransport, receiver: &mut UdpTransport) {
    for _ in 0..2 {
        thread::sleep(LOOK_UP / 2);
        // It may be lost meanwhile.
        let _ = sender.transmit(&[datagram(receiver, b"filler")]);
    }
    let drain = |receiver: &mut UdpTransport| {
        let wait = Wait::until(receiver.now() + SECOND / 10);
        receiver.receive(wait).expect("received")
    };
    while drain(receiver) > 0 {}
}

const PREFIX: &str = "fdbb::/16";

/// A host's end of a link, and the other end, where everything arrives.
fn on_a_link(body: impl FnOnce()) {
    in_child(|| {
        ip("link set lo up");
        ip("link add host type veth peer name there");
        ip("link set there address 02:bb:00:00:00:01");
        for name in ["host", "there"] {
            ip(&format!("link set {name} mtu 9000 up"));
        }
        ip("-6 neigh add fe80::1 lladdr 02:bb:00:00:00:01 nud permanent dev host");
        ip("-6 route add fdbb::/16 via fe80::1 dev host");
        ip("-6 route add local fdbb::/16 dev lo table 187");
        ip("-6 rule add to fdbb::/16 iif there lookup 187");
        body();
    });
}

fn config(frames: Frames) -> UdpConfig {
    UdpConfig {
        device: Some("host".to_owned()),
        filter: Some(PREFIX.parse().expect("a prefix")),
        frames,
        ..UdpConfig::default()
    }
}

fn sender() -> UdpTransport {
    open(&config(Frames::Required))
}

fn receiver() -> UdpTransport {
    open(&UdpConfig {
        device: Some("there".to_owned()),
        join_trains: JoinTrains::Always,
        ..UdpConfig::default()
    })
}

fn datagram<'a>(receiver: &UdpTransport, data: &'a [u8]) -> Outgoing<'a> {
    Outgoing {
        source: pointer(1, 3),
        destination: pointer(2, 4),
        destination_port: receiver.local_port(),
        header: b"",
        data,
    }
}

/// Sends a datagram, and checks that it arrives.
#[track_caller]
fn check_arrival(sender: &mut UdpTransport, receiver: &mut UdpTransport, data: &[u8]) {
    assert_eq!(sender.transmit(&[datagram(receiver, data)]).expect("sent"), 1);
    collect(receiver, 1, |_, incoming| assert_eq!(incoming.payload, data));
}

/// Sends a datagram, and checks that it arrives and how it was sent.
#[track_caller]
fn check_way(sender: &mut UdpTransport, receiver: &mut UdpTransport, data: &[u8], frames: u64) {
    let before = sender.counters().sent_frame_count;
    check_arrival(sender, receiver, data);
    assert_eq!(sender.counters().sent_frame_count - before, frames);
}

#[test]
fn frames_arrive_as_the_datagrams_that_were_sent() {
    on_a_link(|| {
        let (mut sender, mut receiver) = (sender(), receiver());
        let destination_port = receiver.local_port();
        let line = bytes(9000 - HEADER_BYTES);
        let mut count = 0;
        for length in (0..700).chain((700..line.len()).step_by(301)).chain([line.len()]) {
            let (header, data) = line[..length].split_at(length.min(80));
            let number = length as u64;
            let (source, destination) = (pointer(1, number), pointer(2, number + 1));
            let out = Outgoing { source, destination, destination_port, header, data };
            assert_eq!(sender.transmit(&[out]).expect("sent"), 1);
            collect(&mut receiver, 1, |_, incoming| {
                assert!(incoming.payload == &line[..length], "{length} bytes");
                assert_eq!((incoming.source, incoming.destination), (source, destination));
                assert_eq!(incoming.source_port, sender.local_port());
            });
            count += 1;
        }
        assert_eq!(sender.counters().sent_frame_count, count);
        assert_eq!(receiver.counters().overflow_drop_count, 0, "no checksum was wrong");
    });
}

#[test]
fn frames_of_one_batch_go_to_different_places() {
    on_a_link(|| {
        let (mut sender, mut receiver) = (sender(), receiver());
        let destination_port = receiver.local_port();
        let line = bytes(3000);
        for first in (0..2000).step_by(50) {
            let batch: Vec<_> = (first..first + 50)
                .map(|number: u64| {
                    let (header, data) = line[..(number * 7 % 3000) as usize].split_at(0);
                    let (source, destination) = (pointer(1, number), pointer(2, number));
                    Outgoing { source, destination, destination_port, header, data }
                })
                .collect();
            assert_eq!(sender.transmit(&batch).expect("sent"), batch.len());
            collect(&mut receiver, batch.len(), |index, incoming| {
                assert!(incoming.payload == batch[index].data, "datagram {index} from {first}");
                assert_eq!(incoming.destination, batch[index].destination);
            });
        }
        assert_eq!(sender.counters().sent_frame_count, 2000);
    });
}

#[test]
fn trains_of_frames_arrive_at_every_mtu() {
    on_a_link(|| {
        let line = bytes(32_768);
        let mut receiver = receiver();
        for mtu in (1280..9000).step_by(613).chain([1500, 4096, 9000]) {
            ip(&format!("link set host mtu {mtu}"));
            let mut sender = sender();
            let piece_bytes = mtu - HEADER_BYTES;
            exchange(&mut sender, &mut receiver, &line, piece_bytes);
            exchange(&mut sender, &mut receiver, &line[..2 * piece_bytes], piece_bytes);
            exchange(&mut sender, &mut receiver, &line[..piece_bytes + 1], piece_bytes);
            let counters = sender.counters();
            assert_eq!(counters.sent_frame_count, counters.sent_count, "MTU {mtu}");
            assert_eq!(counters.sent_train_count, 3, "MTU {mtu}");
        }
        assert_eq!(receiver.counters().overflow_drop_count, 0, "no checksum was wrong");
    });
}

#[test]
fn what_does_not_fit_or_is_foreign_is_the_sockets_business() {
    on_a_link(|| {
        let (mut sender, mut receiver) = (sender(), receiver());
        let line = bytes(9000);
        let error = sender.transmit(&[datagram(&receiver, &line)]).expect_err("too large");
        let TransmitError::TooLarge { payload_bytes: 9000, limit_bytes: Some(limit) } = error
        else {
            panic!("{error}");
        };
        assert_eq!(limit, 9000 - HEADER_BYTES);
        let foreign = "fdcc::1".parse().expect("an address");
        let out = Outgoing { destination: foreign, ..datagram(&receiver, b"foreign") };
        let error = sender.transmit(&[out]).expect_err("no route");
        assert!(matches!(error, TransmitError::Unreachable { .. }), "{error}");
        assert_eq!(sender.counters().sent_frame_count, 0);
        check_arrival(&mut sender, &mut receiver, b"native");
        assert_eq!(sender.counters().sent_frame_count, 1);
    });
}

#[test]
fn frames_follow_the_gateway() {
    on_a_link(|| {
        let (mut sender, mut receiver) = (sender(), receiver());
        check_way(&mut sender, &mut receiver, b"first", 1);
        ip("link set there address 02:bb:00:00:00:02");
        ip("-6 neigh replace fe80::1 lladdr 02:bb:00:00:00:02 nud permanent dev host");
        let_look_up(&mut sender, &mut receiver);
        check_way(&mut sender, &mut receiver, b"second", 1);
        // The interface's own address, and its MTU.
        ip("link set host address 02:bb:00:00:00:03");
        // The kernel forgot it with the address.
        ip("-6 neigh replace fe80::1 lladdr 02:bb:00:00:00:02 nud permanent dev host");
        ip("link set host mtu 1500");
        let_look_up(&mut sender, &mut receiver);
        check_way(&mut sender, &mut receiver, &bytes(1500 - HEADER_BYTES), 1);
        let line = bytes(1501 - HEADER_BYTES);
        let error = sender.transmit(&[datagram(&receiver, &line)]).expect_err("too large now");
        assert!(matches!(error, TransmitError::TooLarge { .. }), "{error}");
    });
}

#[test]
fn the_socket_sends_while_the_next_hop_is_not_known() {
    on_a_link(|| {
        let (mut sender, mut receiver) = (sender(), receiver());
        check_way(&mut sender, &mut receiver, b"a frame", 1);
        // Stale: the kernel must confirm it, and does so only for what is sent by routes.
        ip("-6 neigh replace fe80::1 lladdr 02:bb:00:00:00:01 nud stale dev host");
        let_look_up(&mut sender, &mut receiver);
        check_way(&mut sender, &mut receiver, b"by the route", 0);
        assert!(matches!(sender.frames_refusal(), Some(NoFrames::NoNeighbour)));
        // One that begins now finds out later, too.
        let mut late = open(&config(Frames::IfPossible));
        assert!(matches!(late.frames_refusal(), Some(NoFrames::NoNeighbour)));
        ip("-6 neigh replace fe80::1 lladdr 02:bb:00:00:00:01 nud permanent dev host");
        for sender in [&mut sender, &mut late] {
            let_look_up(sender, &mut receiver);
            check_way(sender, &mut receiver, b"a frame again", 1);
            assert!(sender.frames_refusal().is_none());
        }
    });
}

#[test]
fn who_sends_rarely_sends_by_the_socket() {
    on_a_link(|| {
        let (mut sender, mut receiver) = (sender(), receiver());
        check_way(&mut sender, &mut receiver, b"at once", 1);
        thread::sleep(LOOK_UP);
        check_way(&mut sender, &mut receiver, b"after a pause", 0);
        check_way(&mut sender, &mut receiver, b"soon after", 1);
    });
}

#[test]
fn a_route_with_more_than_a_gateway_is_the_sockets_business() {
    on_a_link(|| {
        for special in ["mtu 1400", "hoplimit 3"] {
            ip(&format!("-6 route replace fdbb::/16 via fe80::1 dev host {special}"));
            let refused = UdpTransport::open(&config(Frames::Required)).err();
            let Some(OpenError::Frames(NoFrames::SpecialRoute)) = refused else {
                panic!("{special}: {refused:?}");
            };
        }
    });
}

#[test]
fn a_link_that_is_down_is_an_error_until_it_is_up() {
    on_a_link(|| {
        let (mut sender, mut receiver) = (sender(), receiver());
        check_way(&mut sender, &mut receiver, b"before", 1);
        ip("link set host down");
        let error = sender.transmit(&[datagram(&receiver, b"lost")]).expect_err("no link");
        assert!(matches!(error, TransmitError::Unreachable { .. }), "{error}");
        ip("link set host up");
        ip("-6 neigh replace fe80::1 lladdr 02:bb:00:00:00:01 nud permanent dev host");
        ip("-6 route replace fdbb::/16 via fe80::1 dev host");
        let_look_up(&mut sender, &mut receiver);
        check_way(&mut sender, &mut receiver, b"after", 1);
    });
}

#[test]
fn a_far_end_that_is_down_loses_frames_as_it_loses_datagrams() {
    on_a_link(|| {
        let receiver = receiver();
        let mut both = [Frames::Required, Frames::Off].map(|frames| open(&config(frames)));
        ip("link set there down");
        // The link has no carrier; the kernel may withdraw the route, and then both say so.
        let sent = both.each_mut().map(|sender| sender.transmit(&[datagram(&receiver, b"lost")]));
        for sent in &sent {
            let is_lost = matches!(sent, Ok(1) | Err(TransmitError::Unreachable { .. }));
            assert!(is_lost, "{sent:?}");
        }
        assert_eq!(sent[0].is_ok(), sent[1].is_ok(), "{sent:?}");
    });
}

#[test]
fn why_no_frames_are_sent_is_said() {
    on_a_link(|| {
        let refused = |config: &UdpConfig| match UdpTransport::open(config) {
            Err(OpenError::Frames(reason)) => reason,
            Err(error) => panic!("{error}"),
            Ok(_) => panic!("it sends frames"),
        };
        let required = config(Frames::Required);
        let without_device = UdpConfig { device: None, ..required.clone() };
        assert!(matches!(refused(&without_device), NoFrames::NoPrefix));
        let without_prefix = UdpConfig { filter: None, ..required.clone() };
        assert!(matches!(refused(&without_prefix), NoFrames::NoPrefix));
        let other_interface = UdpConfig { interface_index: Some(1), ..required.clone() };
        assert!(matches!(refused(&other_interface), NoFrames::NoPrefix));
        let loopback = UdpConfig { device: Some("lo".to_owned()), ..required.clone() };
        assert!(matches!(refused(&loopback), NoFrames::NoEthernet));
        ip("-6 neigh del fe80::1 dev host");
        assert!(matches!(refused(&required), NoFrames::NoNeighbour));
        ip("-6 route del fdbb::/16 dev host");
        assert!(matches!(refused(&required), NoFrames::NoGateway));
        // Each pointer would be a neighbour of its own.
        ip("-6 route add fdbb::/16 dev host");
        assert!(matches!(refused(&required), NoFrames::NoGateway));
        let if_possible = open(&config(Frames::IfPossible));
        assert!(matches!(if_possible.frames_refusal(), Some(NoFrames::NoGateway)));
        let off = open(&config(Frames::Off));
        assert!(matches!(off.frames_refusal(), Some(NoFrames::Off)));
    });
}

#[test]
fn without_the_right_the_socket_sends() {
    on_a_link(|| {
        // Of this thread only.
        let sets = rustix::thread::capabilities(None).expect("they can be read");
        let raw = rustix::thread::CapabilitySet::NET_RAW;
        let without = rustix::thread::CapabilitySets { effective: sets.effective - raw, ..sets };
        rustix::thread::set_capabilities(None, without).expect("they can be given up");
        let error = UdpTransport::open(&config(Frames::Required)).err().expect("no right");
        assert!(matches!(error, OpenError::Frames(NoFrames::Permission)), "{error}");
        let mut receiver = receiver();
        let mut sender = open(&config(Frames::IfPossible));
        check_arrival(&mut sender, &mut receiver, b"by the route");
        assert_eq!(sender.counters().sent_frame_count, 0);
        assert_eq!(receiver.receive(Wait::until(receiver.now() + SECOND / 10)).expect("none"), 0);
    });
}
