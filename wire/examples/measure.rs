//! Nanoseconds for sealing and for parsing a datagram of 84 + 4096 bytes.
//! `cargo run --release -p bluebridge-wire --example measure`

use std::{hint::black_box, net::Ipv6Addr, time::Instant};

use bluebridge_wire::{Datagram, Header, address::PAGE_BYTES, header::HEADER_BYTES, seal};

const ROUNDS: u32 = 200_000;
const BATCHES: u32 = 9;

/// The median of the batches: a neighbour's burst moves the mean.
fn measure(name: &str, mut work: impl FnMut()) {
    let mut nanos: Vec<_> = (0..BATCHES)
        .map(|_| {
            let start = Instant::now();
            (0..ROUNDS).for_each(|_| work());
            start.elapsed().as_nanos() / u128::from(ROUNDS)
        })
        .collect();
    nanos.sort_unstable();
    println!("{name:<24} {:>5} ns", nanos[nanos.len() / 2]);
}

fn main() {
    let source = Ipv6Addr::new(0xfdbb, 1, 0x101, 0, 0x8000, 0, 0, 0);
    let destination = Ipv6Addr::new(0xfdbb, 1, 7, 0x062a, 3, 0, 0, 0x5000);
    let target = Ipv6Addr::new(0xfdbb, 1, 7, 0x2a, 3, 0, 0, 0x5000);
    let header = Header { target, length: 4096, ..Header::default() };
    for data_bytes in [0, 64, PAGE_BYTES] {
        let mut bytes = vec![0x5a; HEADER_BYTES + data_bytes];
        measure(&format!("emit and seal 84 + {data_bytes}"), || {
            let (head, data) = black_box(&mut bytes[..]).split_at_mut(HEADER_BYTES);
            black_box(&header).emit(head, 0);
            seal(source, destination, head, data);
        });
        measure(&format!("parse 84 + {data_bytes}"), || {
            let parsed = Datagram::parse(source, destination, black_box(&bytes));
            black_box(parsed).expect("well formed");
        });
    }
}
