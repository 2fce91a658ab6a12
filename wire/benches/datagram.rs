//! Sealing and parsing a datagram: `cargo bench -p bluebridge-wire`.

use std::{hint::black_box, net::Ipv6Addr};

use bluebridge_wire::{
    Datagram, EndpointAddress, Header, NodeId, Space,
    address::{Fields, PAGE_BYTES},
    header::HEADER_BYTES,
    seal,
};
use divan::{Bencher, counter::BytesCount};

/// Data bytes behind the header.
const SIZES: [usize; 3] = [0, 64, PAGE_BYTES];

const SPACE: Space = Space(1);

fn main() {
    divan::main();
}

fn source() -> Ipv6Addr {
    EndpointAddress::new(SPACE, NodeId(0x101), 0).to_ipv6()
}

fn destination() -> Ipv6Addr {
    let target = Fields::unpack(target()).expect("a fabric address");
    Fields { command: 6, ..target }.to_ipv6()
}

fn target() -> Ipv6Addr {
    Ipv6Addr::new(0xfdbb, 1, 7, 0x2a, 3, 0, 0, 0x5000)
}

fn sealed(data_bytes: usize) -> Vec<u8> {
    let mut bytes = vec![0x5a; HEADER_BYTES + data_bytes];
    let (head, data) = bytes.split_at_mut(HEADER_BYTES);
    Header { target: target(), ..Header::default() }.emit(head, 0);
    seal(source(), destination(), head, data);
    bytes
}

#[divan::bench(args = SIZES)]
fn emit_and_seal(bencher: Bencher<'_, '_>, data_bytes: usize) {
    let (source, destination) = (source(), destination());
    let header = Header { target: target(), ..Header::default() };
    let mut bytes = vec![0x5a; HEADER_BYTES + data_bytes];
    bencher.counter(BytesCount::new(bytes.len())).bench_local(|| {
        let (head, data) = black_box(&mut bytes[..]).split_at_mut(HEADER_BYTES);
        black_box(&header).emit(head, 0);
        seal(source, destination, head, data);
    });
}

#[divan::bench(args = SIZES)]
fn parse(bencher: Bencher<'_, '_>, data_bytes: usize) {
    let (source, destination) = (source(), destination());
    let bytes = sealed(data_bytes);
    assert!(Datagram::parse(source, destination, &bytes).is_ok());
    bencher
        .counter(BytesCount::new(bytes.len()))
        .bench_local(|| Datagram::parse(source, destination, black_box(&bytes)).is_ok());
}
