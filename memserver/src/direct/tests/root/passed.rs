//! What is not a plain READ, and what is damaged.

use std::net::Ipv6Addr;

use bluebridge_wire::{
    Command, EndpointAddress, Header, NodeId, Pointer, Status,
    address::{Fields, PAGE_BYTES},
    header::HEADER_BYTES,
};
use rand::{Rng, SeedableRng, rngs::StdRng};

use super::{
    frames::{ETHERNET_BYTES, HOME, UDP_END, frame, frame_to, head, parts, resealed, udp_frame},
    rig::{NEXT, Rig, SERVER},
};
use crate::direct::ReadCounts;

#[test]
fn what_is_not_plain_is_for_the_server() {
    let mut rig = Rig::new("direct-passes");
    let grant = rig.create(2);
    rig.write(grant, &[5; PAGE_BYTES]);
    let (target, header) = rig.read(grant, 0, 4096);
    let plain = frame(Command::Read, target, &header, &[]);
    rig.assert_answered(&plain);
    let reseal = |change: &dyn Fn(&mut [u8])| resealed(&plain, change);
    let form = |counts: &ReadCounts| counts.passed_form;
    // The places of wire/src/header.rs.
    for (what, at, value) in [
        ("a further version", 0, 2),
        ("a flag that nobody knows", 2, 0x40),
        ("a repetition", 2, 0x10),
        ("stale data is acceptable", 3, 1),
        ("some pieces", 3, 0x10),
        ("a required feature", 5, 1),
        ("another target", 20, 1),
        ("a longer length", 57, 1),
        ("an offset", 61, 1),
        ("pages of another size", 62, 13),
        ("a key", 63, 1),
    ] {
        let before = form(&rig.memory.counters.counts());
        let changed = reseal(&|payload| payload[at] = value);
        rig.assert_passed(&changed, form);
        assert_eq!(form(&rig.memory.counters.counts()), before + 1, "{what}");
    }
    for (start, length) in [(1, 4096), (4095, 2), (0, 0), (0, 8192), (0, u32::MAX)] {
        let (target, header) = rig.read(grant, start, length);
        rig.assert_passed(&frame(Command::Read, target, &header, &[]), form);
    }
    // READs of several pages, and repetitions, bypass redirects.
    let (target, header) = rig.read(grant, 0, 64);
    rig.assert_passed(&frame_to(Command::Read.code() | 0x40, target, target, &header, &[]), form);
    // At the endpoint address, where repetitions and requests for other nodes' pages arrive.
    let pointed = Pointer::from_ipv6(target).expect("a pointer");
    for at in [pointed, Pointer { node: NodeId(21), ..pointed }] {
        let endpoint = EndpointAddress::for_memory(SERVER, at).to_ipv6();
        for (bits, attempt) in [(0, 0), (HOME, 0), (HOME, 1)] {
            let (_, header) = rig.read(grant, 0, 64);
            let header = Header { flags: header.flags.with_attempt(attempt), ..header };
            let code = Command::Read.code() | bits;
            let read = frame_to(code, endpoint, at.to_ipv6(), &header, &[]);
            if at != pointed {
                // Not here, so not even counted.
                let (action, after) = rig.run(&read);
                assert!((action, &after) == (NEXT, &read));
            } else if attempt == 0 {
                rig.assert_answered(&read);
                continue;
            } else {
                rig.assert_passed(&read, form);
            }
            let reply = rig.respond(&read).expect("the responder answers");
            let status = Fields::unpack(parts(&reply).0).expect("of the fabric").tag;
            let own = if at == pointed { Status::Ok } else { Status::WrongNode };
            assert_eq!(status, own.code());
        }
    }
    // Not of this server, or no READ at all: not even counted.
    let counts = rig.memory.counters.counts();
    let (target, header) = rig.read(grant, 0, 64);
    let mut others = Vec::new();
    for command in Command::ALL.into_iter().filter(|command| *command != Command::Read) {
        others.push(frame(command, target, &header, &[]));
    }
    others.push(frame_to(Command::Read.code() | 0x80, target, target, &header, &[]));
    others.push(frame(Command::Read, target, &header, &[0; 8]));
    let read = frame(Command::Read, target, &header, &[]);
    let (source, destination, payload) = parts(&read);
    let mut fields = Fields::unpack(destination).expect("in the fabric");
    fields.node = NodeId(10);
    others.push(udp_frame(source, fields.to_ipv6(), payload));
    others.push(udp_frame(source, Ipv6Addr::LOCALHOST, payload));
    for (at, value) in [(12, 0x81), (14, 0x50), (19, 93), (20, 43), (56, 1), (59, 91)] {
        let mut other = read.clone();
        other[at] = value;
        others.push(other);
    }
    // To another host: mirrored by a switch, or flooded.
    others.push([&[2, 0, 0, 0, 0, 9], &read[6..]].concat());
    // The kernel runs no program on shorter ones.
    for length in UDP_END..read.len() {
        others.push(read[..length].to_vec());
    }
    others.push([&read[..], &[0]].concat());
    for other in &others {
        let (action, after) = rig.run(other);
        assert_eq!(action, NEXT, "{:02x?}", head(other));
        assert!(after == *other, "unchanged");
    }
    assert_eq!(rig.memory.counters.counts(), counts);
}

#[test]
fn damaged_requests_are_for_the_server() {
    let mut rig = Rig::new("direct-damage");
    let grant = rig.create(1);
    rig.write(grant, &[5; PAGE_BYTES]);
    let (target, header) = rig.read(grant, 0, 4096);
    let plain = frame(Command::Read, target, &header, &[]);
    let mut random = StdRng::seed_from_u64(2);
    for _ in 0..2000 {
        let mut damaged = plain.clone();
        let at = random.random_range(ETHERNET_BYTES + 8..damaged.len());
        damaged[at] ^= 1 << random.random_range(0..8);
        let (action, after) = rig.run(&damaged);
        assert_eq!(action, NEXT, "byte {at}");
        assert!(after == damaged, "unchanged");
    }
    // The CRC of the datagram is checked even where the UDP checksum fits.
    for at in 64..HEADER_BYTES {
        let (source, destination, payload) = parts(&plain);
        let mut payload = payload.to_vec();
        payload[at] ^= 1;
        rig.assert_passed(&udp_frame(source, destination, &payload), |it| it.passed_checksum);
    }
    rig.assert_answered(&plain);
}
