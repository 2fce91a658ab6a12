use std::time::{Duration, Instant};

use bluebridge_p4::pipeline::{
    Action, DropReason, Entry, Forward, Impairment, Key, MacAddr, SwitchPort,
};

use super::{Egress, Link, Offload, Pipeline, impair::HELD_MAX};
use crate::dataplane::DataPlane;

const ONE: SwitchPort = SwitchPort(1);
const TWO: SwitchPort = SwitchPort(2);
const MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 2]);
/// A `virtio_net_hdr` of a UDP train in pieces of 100 bytes behind 54 bytes of headers.
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
    let mut train = frame(0x60);
    train.resize(54, 0);
    train.extend([0xfd, 0xbb, 0xfd, 0xbb]);
    train.extend((8u16 + 250).to_be_bytes());
    train.extend([0x12, 0x34]);
    train.extend(0..250u8);
    let mut out = Vec::new();
    pipeline.process(now, ONE, &mut train.clone(), train_offload(), &mut out);
    assert_eq!(out, [(TWO, train.clone())]);
    out.clear();
    // So rarely that it will not happen here.
    let rare = Impairment { seed: 1, corrupt: 1e-9, ..Impairment::default() };
    pipeline.set_impairment(TWO, rare).unwrap();
    pipeline.process(now, ONE, &mut train.clone(), train_offload(), &mut out);
    let lengths: Vec<_> = out.iter().map(|(_, piece)| piece.len() - 62).collect();
    assert_eq!(lengths, [100, 100, 50]);
    let data: Vec<u8> = out.iter().flat_map(|(_, piece)| piece[62..].to_vec()).collect();
    assert_eq!(data, train[62..]);
    for (_, piece) in &out {
        let length = u16::try_from(piece.len() - 54).unwrap();
        let at = |at: usize| u16::from_be_bytes([piece[at], piece[at + 1]]);
        assert_eq!((at(18), at(58)), (length, length));
        // The pseudo header's sum, less the length of the train, plus that of the piece.
        assert_eq!(at(60), 0x1234 - 258 + length);
    }
    // With loss, each datagram has a fate of its own.
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
