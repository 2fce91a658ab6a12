//! Frames, as the program gets and makes them.

use std::net::Ipv6Addr;

use bluebridge_protocol::store::Grant;
use bluebridge_testkit::UdpFrame;
use bluebridge_wire::{
    Command, Datagram, EndpointAddress, Header, HeaderView, NodeId, Space, UDP_PORT,
    address::{Fields, PAGE_BYTES},
    header::HEADER_BYTES,
    seal,
};

use super::rig::{CLIENT, PORT, SERVER, SPACE};

pub(super) const ETHERNET_BYTES: usize = 14;
pub(super) const UDP_END: usize = ETHERNET_BYTES + 40 + 8;

pub(super) fn head(frame: &[u8]) -> &[u8] {
    &frame[..frame.len().min(180)]
}

/// The client's; that of the server is the test interface's, zero.
pub(super) const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

pub(super) fn pointer(grant: Grant, start: u64) -> Ipv6Addr {
    let location = grant.location.bits() + start;
    Fields { space: SPACE, node: SERVER, command: 0, tag: grant.tag.0, location }.to_ipv6()
}

pub(super) fn frame(command: Command, target: Ipv6Addr, header: &Header, data: &[u8]) -> Vec<u8> {
    frame_to(command.code(), target, target, header, data)
}

pub(super) fn frame_to(
    code: u8,
    to: Ipv6Addr,
    target: Ipv6Addr,
    header: &Header,
    data: &[u8],
) -> Vec<u8> {
    frame_of(SPACE, CLIENT, code, (to, target), header, data)
}

/// A frame of a node in a space; `places` are its destination and its target.
pub(super) fn frame_of(
    space: Space,
    node: NodeId,
    code: u8,
    (to, target): (Ipv6Addr, Ipv6Addr),
    header: &Header,
    data: &[u8],
) -> Vec<u8> {
    let mut to = Fields::unpack(to).expect("in the fabric");
    to.command = code;
    let (source, destination) = (EndpointAddress::new(space, node, 1).to_ipv6(), to.to_ipv6());
    let mut bytes = vec![0; HEADER_BYTES];
    Header { target, incarnation: 1, ..*header }.emit(&mut bytes, 0);
    seal(source, destination, &mut bytes, data);
    bytes.extend_from_slice(data);
    udp_frame(source, destination, &bytes)
}

pub(super) fn udp_frame(source: Ipv6Addr, destination: Ipv6Addr, payload: &[u8]) -> Vec<u8> {
    UdpFrame {
        source_mac: MAC,
        destination_mac: [0; 6],
        source,
        destination,
        source_port: PORT,
        destination_port: UDP_PORT,
        payload,
    }
    .bytes()
}

pub(super) fn parts(frame: &[u8]) -> (Ipv6Addr, Ipv6Addr, &[u8]) {
    let address = |from: usize| {
        Ipv6Addr::from(<[u8; 16]>::try_from(&frame[from..from + 16]).expect("16 bytes"))
    };
    (address(ETHERNET_BYTES + 8), address(ETHERNET_BYTES + 24), &frame[UDP_END..])
}

pub(super) fn header_of(frame: &[u8]) -> Header {
    HeaderView::new(&frame[UDP_END..]).expect("a header").header()
}

/// No redirect is to catch the request (`read.bpf.c`).
pub(super) const HOME: u8 = 0x40;

/// A piece of a page whose bytes are all the same.
#[track_caller]
pub(super) fn check_piece(frame: &[u8]) {
    let (source, destination, payload) = parts(frame);
    let datagram = Datagram::parse(source, destination, payload).expect("the CRC fits");
    assert_eq!(datagram.data.len(), PAGE_BYTES);
    let first = datagram.data[0];
    assert!(datagram.data.iter().all(|byte| *byte == first), "torn");
}

/// A frame whose payload's header was changed after it was sealed, with checksums that fit.
pub(super) fn resealed(frame: &[u8], change: impl FnOnce(&mut [u8])) -> Vec<u8> {
    let (source, destination, payload) = parts(frame);
    let mut payload = payload.to_vec();
    change(&mut payload);
    let (head, data) = payload.split_at_mut(HEADER_BYTES);
    seal(source, destination, head, data);
    udp_frame(source, destination, &payload)
}

/// The one's complement sum of 16-bit words in network order.
pub(super) fn sum_of(bytes: &[u8]) -> u16 {
    let words =
        bytes.chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(*word.get(1).unwrap_or(&0)));
    let sum = words.sum::<u32>();
    let folded = (sum & 0xffff) + (sum >> 16);
    u16::try_from((folded & 0xffff) + (folded >> 16)).expect("folded twice")
}

/// The sum of the pseudo-header of a frame, which a sender leaves for its device to complete.
pub(super) fn pseudo_sum_of(frame: &[u8]) -> [u8; 2] {
    let udp_bytes = [&[0, 0], &frame[58..60]].concat();
    sum_of(&[&frame[ETHERNET_BYTES + 8..54], &udp_bytes, &[0, 0, 0, 17]].concat()).to_be_bytes()
}
