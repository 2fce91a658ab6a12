//! What every operation is made of: checking a reply, copying a page, looking at the clock:
//! `cargo bench -p bluebridge --bench parts`.

use std::hint::black_box;

use bluebridge_transport::Timestamp;
use bluebridge_wire::{
    Command, Datagram, EndpointAddress, Header, NodeId, ReplySource, Space, Status,
    address::PAGE_BYTES, header::HEADER_BYTES, seal,
};
use divan::{Bencher, counter::BytesCount};

const SPACE: Space = Space(1);

fn main() {
    divan::main();
}

#[divan::bench(sample_size = 1000)]
fn check_and_parse_a_reply_with_a_page(bencher: Bencher<'_, '_>) {
    let reply = ReplySource {
        space: SPACE,
        node: NodeId(1),
        command: Command::Read,
        contended: false,
        status: Status::Ok,
        location_bits: 0,
    };
    let source = reply.to_ipv6();
    let destination = EndpointAddress::new(SPACE, NodeId(1000), 0).to_ipv6();
    let mut payload = vec![7; HEADER_BYTES + PAGE_BYTES];
    let (head, data) = payload.split_at_mut(HEADER_BYTES);
    let target = EndpointAddress::of_shard(SPACE, NodeId(1), 0, 0).to_ipv6();
    Header { target, ..Header::default() }.emit(head, 0);
    seal(source, destination, head, data);
    assert!(Datagram::parse(source, destination, &payload).is_ok());
    bencher
        .counter(BytesCount::new(payload.len()))
        .bench_local(|| Datagram::parse(source, destination, black_box(&payload)).is_ok());
}

#[divan::bench(sample_size = 1000)]
fn copy_a_page(bencher: Bencher<'_, '_>) {
    let (page, mut to) = (vec![7; PAGE_BYTES], vec![1; PAGE_BYTES]);
    bencher
        .counter(BytesCount::new(PAGE_BYTES))
        .bench_local(|| black_box(&mut to).copy_from_slice(black_box(&page)));
}

#[divan::bench(sample_size = 1000)]
fn look_at_the_clock() -> Timestamp {
    Timestamp::monotonic()
}
