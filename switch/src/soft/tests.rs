use std::{
    os::unix::net::UnixDatagram,
    path::PathBuf,
    time::{Duration, Instant},
};

use bluebridge_p4::pipeline::{
    Action, DropReason, Entry, Forward, Impairment, Key, MacAddr, SwitchPort,
};
use bluebridge_testkit::{Scratch, UdpFrame};
use bluebridge_wire::UDP_PORT;
use etherparse::{Ipv6Header, UdpHeader, checksum::Sum16BitWords};

use super::{Egress, Link, Offload, Pipeline, Switch, impair::HELD_MAX, train::complete_checksum};
use crate::{
    dataplane::{DataPlane, PortError},
    socket_link::SocketLink,
};

const ONE: SwitchPort = SwitchPort(1);
const TWO: SwitchPort = SwitchPort(2);
const MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 2]);
/// A `virtio_net_hdr` of a UDP train in pieces of 100 bytes after 54 bytes of headers.
fn train_offload() -> Offload {
    let mut header = [1, 5, 0, 0, 0, 0, 0, 0, 0, 0];
    for (at, value) in [(2, 62u16), (4, 100), (6, 54), (8, 6)] {
        header[at..at + 2].copy_from_slice(&value.to_ne_bytes());
    }
    Offload(header)
}

fn pipeline(now: Instant, mtu: u32) -> Pipeline {
    let mut pipeline = Pipeline::new(now);
    for port in [ONE, TWO] {
        let link = Link { name: format!("s{}", port.0), mac: MAC, mtu };
        pipeline.add_link(port, link).unwrap();
    }
    let forward = Forward { port: TWO, dst_mac: MAC };
    let key = Key::L2 { dst_mac: MAC };
    let action = Action::Forward(forward);
    pipeline.insert(&Entry { key, action, idle_timeout: None, metadata: vec![] }).unwrap();
    pipeline
}

fn frame(number: u8) -> Vec<u8> {
    let mut frame = MAC.0.to_vec();
    frame.extend([2, 0, 0, 0, 0, 1, 0x90, 0, number, 0, 0, 0]);
    frame
}

#[derive(Default)]
struct Left(Vec<(u8, Offload)>);

impl Egress for Left {
    fn transmit(&mut self, port: SwitchPort, frame: &[u8], offload: Offload) -> bool {
        assert_eq!(port, TWO);
        self.0.push((frame[14], offload));
        true
    }
}

/// A port whose queue is full.
struct Full;

impl Egress for Full {
    fn transmit(&mut self, _: SwitchPort, _: &[u8], _: Offload) -> bool {
        false
    }
}

fn process(pipeline: &mut Pipeline, now: Instant, number: u8, out: &mut impl Egress) {
    pipeline.process(now, ONE, &mut frame(number), Offload::default(), out);
}

#[test]
fn a_delayed_frame_leaves_when_it_is_due_and_not_before() {
    let now = Instant::now();
    let mut pipeline = pipeline(now, 1500);
    let delay = Duration::from_millis(10);
    pipeline.set_impairment(TWO, Impairment { delay, ..Impairment::default() }).unwrap();
    let mut left = Left::default();
    process(&mut pipeline, now, 1, &mut left);
    process(&mut pipeline, now + delay / 2, 2, &mut left);
    assert_eq!(pipeline.poll_timeout(), Some(now + delay));
    pipeline.handle_timeout(now + delay - Duration::from_nanos(1), &mut left);
    assert_eq!(left.0, []);
    pipeline.handle_timeout(now + delay, &mut left);
    assert_eq!(left.0, [(1, Offload::default())]);
    assert_eq!(pipeline.poll_timeout(), Some(now + delay + delay / 2));
    pipeline.handle_timeout(now + 2 * delay, &mut left);
    assert_eq!(left.0.len(), 2);
    assert_eq!(pipeline.poll_timeout(), None);
    assert_eq!(pipeline.ports().unwrap()[1].impaired.delayed, 2);
}

#[test]
fn reordering_keeps_every_frame_and_repeats_with_its_seed() {
    let run = |seed| {
        let start = Instant::now();
        let mut pipeline = pipeline(start, 1500);
        let impairment = Impairment { seed, reorder: 0.3, ..Impairment::default() };
        pipeline.set_impairment(TWO, impairment).unwrap();
        let mut left = Left::default();
        for number in 0..200 {
            let now = start + Duration::from_micros(100) * u32::from(number);
            pipeline.handle_timeout(now, &mut left);
            process(&mut pipeline, now, number, &mut left);
        }
        pipeline.handle_timeout(start + Duration::from_secs(1), &mut left);
        let order: Vec<u8> = left.0.iter().map(|(number, _)| *number).collect();
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..200).collect::<Vec<u8>>(), "none is lost, none comes twice");
        assert_ne!(sorted, order, "some overtook others");
        let reordered = pipeline.ports().unwrap()[1].impaired.reordered;
        assert!((30..=90).contains(&reordered), "{reordered} of 200 at 30 %");
        order
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
}

#[test]
fn what_is_held_is_bounded_and_what_is_beyond_is_counted() {
    let now = Instant::now();
    let mut pipeline = pipeline(now, 1500);
    let delay = Duration::from_secs(1);
    pipeline.set_impairment(TWO, Impairment { delay, ..Impairment::default() }).unwrap();
    let mut left = Left::default();
    for _ in 0..HELD_MAX + 5 {
        process(&mut pipeline, now, 1, &mut left);
    }
    assert_eq!(pipeline.drops().unwrap().of(DropReason::Egress), 5);
    pipeline.handle_timeout(now + delay, &mut left);
    assert_eq!(left.0.len(), HELD_MAX);
}

#[test]
fn a_full_or_vanished_port_and_a_frame_that_is_too_long_are_egress_drops() {
    let now = Instant::now();
    let mut pipeline = pipeline(now, 1280);
    process(&mut pipeline, now, 1, &mut Full);
    let mut long = frame(1);
    long.resize(1280 + 15, 0);
    let mut left = Left::default();
    pipeline.process(now, ONE, &mut long, Offload::default(), &mut left);
    long.truncate(1280 + 14);
    pipeline.process(now, ONE, &mut long, Offload::default(), &mut left);
    assert_eq!(left.0.len(), 1, "the longest frame that fits passes");
    pipeline.remove_port(TWO).unwrap();
    process(&mut pipeline, now, 1, &mut left);
    assert_eq!(pipeline.drops().unwrap().of(DropReason::Egress), 3);
    assert_eq!(left.0.len(), 1);
}

#[test]
fn a_train_passes_whole_unless_the_port_is_impaired() {
    let now = Instant::now();
    let mut pipeline = pipeline(now, 1280);
    let payload: Vec<u8> = (0..250).collect();
    let mut train = UdpFrame {
        source_mac: [2, 0, 0, 0, 0, 1],
        destination_mac: MAC.0,
        source: "2001:db8::1".parse().unwrap(),
        destination: "2001:db8::2".parse().unwrap(),
        source_port: UDP_PORT,
        destination_port: UDP_PORT,
        payload: &payload,
    }
    .bytes();
    // What a kernel leaves in a train: the sum of the pseudo header, to be completed by the interface.
    let sum = Sum16BitWords::new().add_slice(&train[22..54]).add_2bytes([0, 17]);
    let sum = !sum.add_2bytes([train[58], train[59]]).ones_complement().to_be();
    train[60..62].copy_from_slice(&sum.to_be_bytes());
    let mut out = Vec::new();
    pipeline.process(now, ONE, &mut train.clone(), train_offload(), &mut out);
    assert_eq!(out, [(TWO, train.clone())]);
    out.clear();
    // So rare that it does not happen here.
    let rare = Impairment { seed: 1, corrupt: 1e-9, ..Impairment::default() };
    pipeline.set_impairment(TWO, rare).unwrap();
    pipeline.process(now, ONE, &mut train.clone(), train_offload(), &mut out);
    let lengths: Vec<_> = out.iter().map(|(_, piece)| piece.len() - 62).collect();
    assert_eq!(lengths, [100, 100, 50]);
    let data: Vec<u8> = out.iter().flat_map(|(_, piece)| piece[62..].to_vec()).collect();
    assert_eq!(data, train[62..]);
    for (_, piece) in &out {
        let (ip, datagram) = Ipv6Header::from_slice(&piece[14..]).unwrap();
        let (mut udp, data) = UdpHeader::from_slice(datagram).unwrap();
        let length = u16::try_from(datagram.len()).unwrap();
        assert_eq!((ip.payload_length, udp.length), (length, length));
        // What the interface fills in for a checksum that starts with UDP.
        let filled_in = Sum16BitWords::new().add_slice(datagram).ones_complement().to_be();
        udp.checksum = 0;
        assert_eq!(Ok(filled_in), udp.calc_checksum_ipv6(&ip, data));
    }
    // A link without offloads gets the same data, with complete checksums.
    let complete: Vec<_> = out
        .iter()
        .map(|(_, piece)| {
            let mut piece = piece.clone();
            let mut offload = train_offload();
            offload.0[1] = 0;
            assert!(complete_checksum(&mut piece, offload));
            let (ip, datagram) = Ipv6Header::from_slice(&piece[14..]).unwrap();
            let (mut udp, data) = UdpHeader::from_slice(datagram).unwrap();
            let is = std::mem::take(&mut udp.checksum);
            assert_eq!(Ok(is), udp.calc_checksum_ipv6(&ip, data));
            piece
        })
        .collect();
    let mut short = complete[0][..61].to_vec();
    assert!(!complete_checksum(&mut short, train_offload()), "its place is not in the frame");
    // With loss, each datagram is impaired separately.
    let loss = Impairment { seed: 1, loss: 0.5, ..Impairment::default() };
    pipeline.set_impairment(TWO, loss).unwrap();
    out.clear();
    for _ in 0..100 {
        pipeline.process(now, ONE, &mut train.clone(), train_offload(), &mut out);
    }
    assert!((100..200).contains(&out.len()), "{} of 300 left", out.len());
    let lost = pipeline.drops().unwrap().of(DropReason::Impairment);
    assert_eq!(lost + out.len() as u64, 300);
}

#[test]
fn a_train_leaves_only_if_its_segments_fit_the_port() {
    let now = Instant::now();
    let mut pipeline = pipeline(now, 1280);
    let mut pass = |kind: u8, ethertype: u16, segment: u16, bytes: usize| {
        let mut header = [1, kind, 0, 0, 0, 0, 0, 0, 0, 0];
        header[4..6].copy_from_slice(&segment.to_ne_bytes());
        let mut train = frame(0);
        train.resize(bytes, 0);
        train[12..14].copy_from_slice(&ethertype.to_be_bytes());
        train[14] = 0x60;
        let mut left = Vec::new();
        pipeline.process(now, ONE, &mut train, Offload(header), &mut left);
        left.len() == 1
    };
    const UDP: u8 = 5;
    for (kind, ethertype, largest) in [
        (UDP, 0x86dd, 1280 - 40 - 8),
        (UDP, 0x0800, 1280 - 20 - 8),
        (4, 0x86dd, 1280 - 40 - 20),
        (1, 0x0800, 1280 - 20 - 20),
        (0x81, 0x0800, 1280 - 20 - 20),
    ] {
        assert!(pass(kind, ethertype, largest, 20_000), "{kind} {ethertype:#x}");
        assert!(!pass(kind, ethertype, largest + 1, 20_000), "{kind} {ethertype:#x}");
        assert!(pass(kind, ethertype, 9000, 1280 + 14), "shorter than a segment");
    }
    assert!(!pass(UDP, 0x86dd, 0, 1280 + 15), "without a segment's size it is one frame");
    assert_eq!(pipeline.drops().unwrap().of(DropReason::Egress), 6);
}

#[test]
fn any_offload_header_is_survived() {
    let now = Instant::now();
    let mut pipeline = pipeline(now, 1280);
    let all = Impairment { loss: 0.1, duplicate: 0.1, corrupt: 0.5, ..Impairment::default() };
    pipeline.set_impairment(TWO, all).unwrap();
    let mut draw = crate::draw::Draw::new(7, ONE);
    let mut out = Vec::new();
    for _ in 0..20_000 {
        let mut header = [0; 10];
        header[..8].copy_from_slice(&draw.next().to_ne_bytes());
        if draw.chance(1 << 31) {
            header[0] = 1;
            header[1] = 5;
            header[6..8].copy_from_slice(&54u16.to_ne_bytes());
        }
        let length = usize::try_from(draw.next() % 200).unwrap();
        let mut bytes = frame(1);
        bytes.resize(length, 0xff);
        pipeline.process(now, ONE, &mut bytes, Offload(header), &mut out);
    }
    assert!(!out.is_empty());
}

#[test]
fn frames_cross_between_links_of_sockets_without_privileges() {
    let scratch = Scratch::new("socket-ports");
    let path = |name: &str| scratch.file(name);
    let name = |path: PathBuf| format!("unix:{}", path.display());
    let mut switch = Switch::start(Duration::ZERO).unwrap();
    for (port, file) in [(ONE, "one"), (TWO, "two")] {
        switch.add_port(port, &name(path(file))).unwrap();
        switch.add_port(port, &name(path(file))).expect("it is the same link");
    }
    let other = switch.add_port(TWO, &name(path("three"))).unwrap_err();
    assert!(matches!(other, PortError::Invalid { .. }), "{other}");
    let forward = Action::Forward(Forward { port: TWO, dst_mac: MAC });
    let key = Key::L2 { dst_mac: MAC };
    switch.insert(&Entry { key, action: forward, idle_timeout: None, metadata: vec![] }).unwrap();
    let peer = |file| UnixDatagram::bind(SocketLink::peer_of(&path(file))).unwrap();
    let (one, two) = (peer("one"), peer("two"));
    two.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut longest = frame(1);
    longest.resize(9014, 7);
    let mut longer = longest.clone();
    longer.push(7);
    for sent in [&longer, &longest, &frame(2)] {
        one.send_to(sent, path("one")).unwrap();
    }
    let mut bytes = vec![0; 10_000];
    for expected in [longest, frame(2)] {
        let count = two.recv(&mut bytes).unwrap();
        assert!(bytes[..count] == expected, "{count} bytes");
    }
    let ports = switch.ports().unwrap();
    assert_eq!(ports.iter().map(|port| port.mtu).collect::<Vec<_>>(), [9000, 9000]);
    assert_eq!((ports[0].rx.packets, ports[1].tx.packets), (3, 2));
    assert_eq!(switch.drops().unwrap().of(DropReason::Egress), 1, "the frame that is too long");
    drop(two);
    one.send_to(&frame(3), path("one")).unwrap();
    bluebridge_testkit::until("the frame to nobody is dropped", || {
        switch.drops().unwrap().of(DropReason::Egress) == 2
    });
    switch.remove_port(ONE).unwrap();
    assert!(!path("one").exists(), "the socket goes with its port");
}
