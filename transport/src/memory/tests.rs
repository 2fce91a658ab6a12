use core::time::Duration;
use std::net::Ipv6Addr;
use std::thread;

use super::{AttachError, Hub, MemoryTransport};
use crate::{ManualClock, Outgoing, Timestamp, TransmitError, Transport, Wait};

const PORT: u16 = 1000;

fn address(text: &str) -> Ipv6Addr {
    text.parse().expect("an address")
}

fn attach(hub: &Hub, prefix: &str) -> MemoryTransport {
    hub.attach(PORT, &[prefix.parse().expect("a prefix")]).expect("a free prefix")
}

fn datagram<'a>(destination: &str, header: &'a [u8], data: &'a [u8]) -> Outgoing<'a> {
    let source = address("fdbb:1:1::");
    Outgoing { source, destination: address(destination), destination_port: PORT, header, data }
}

#[test]
fn the_longest_prefix_takes_a_datagram() {
    let hub = Hub::new(8);
    let mut sender = attach(&hub, "fdbb:1:1::/48");
    let mut node = attach(&hub, "fdbb:1:2::/48");
    let mut range = attach(&hub, "fdbb:1:2::7:0/112");
    let batch = [datagram("fdbb:1:2::6:0", b"a", b"b"), datagram("fdbb:1:2::7:0", b"", b"c")];
    assert_eq!(sender.transmit(&batch).expect("sent"), 2);
    assert_eq!(node.receive(Wait::NONE).expect("received"), 1);
    assert_eq!(node.incoming(0).payload, b"ab");
    assert_eq!(node.incoming(0).source, address("fdbb:1:1::"));
    assert_eq!(node.incoming(0).source_port, PORT);
    assert_eq!(range.receive(Wait::NONE).expect("received"), 1);
    assert_eq!(range.incoming(0).destination, address("fdbb:1:2::7:0"));
    assert_eq!(range.receive(Wait::NONE).expect("received"), 0);
}

#[test]
fn a_group_gets_a_copy_each_but_the_sender() {
    let hub = Hub::new(8);
    let mut nodes = ["fdbb:1:1::/48", "fdbb:1:2::/48", "fdbb:1:3::/48"].map(|p| attach(&hub, p));
    let ids = nodes.each_ref().map(MemoryTransport::id);
    hub.route("fdbb:1:ffff::/48".parse().expect("a prefix"), &ids).expect("known endpoints");
    nodes[0].transmit(&[datagram("fdbb:1:ffff::", b"n", b"")]).expect("sent");
    let counts = nodes.each_mut().map(|node| node.receive(Wait::NONE).expect("received"));
    assert_eq!(counts, [0, 1, 1]);
}

#[test]
fn drops_are_counted_where_they_happen() {
    let hub = Hub::new(2);
    let mut sender = attach(&hub, "fdbb:1:1::/48");
    let mut receiver = attach(&hub, "fdbb:1:2::/48");
    let full = [datagram("fdbb:1:2::", b"x", b""); 5];
    assert_eq!(sender.transmit(&full).expect("sent"), 5);
    assert_eq!(receiver.receive(Wait::NONE).expect("received"), 2);
    assert_eq!(receiver.counters().overflow_drop_count, 3);
    let unbound = Outgoing { destination_port: PORT + 1, ..full[0] };
    sender.transmit(&[datagram("fdbb:2::", b"", b""), unbound]).expect("sent");
    assert_eq!(sender.counters().foreign_drop_count, 2);
}

#[test]
fn a_datagram_too_large_ends_the_prefix_and_then_is_an_error() {
    let hub = Hub::new(8).with_largest_payload(10);
    let mut sender = attach(&hub, "fdbb:1:1::/48");
    let batch = [datagram("fdbb:1:1::", &[0; 10], b""), datagram("fdbb:1:1::", &[0; 10], b"x")];
    assert_eq!(sender.transmit(&batch).expect("a prefix"), 1);
    let error = sender.transmit(&batch[1..]).expect_err("too large");
    assert!(matches!(error, TransmitError::TooLarge { payload_bytes: 11, limit_bytes: Some(10) }));
}

#[test]
fn a_prefix_belongs_to_one_endpoint() {
    let hub = Hub::new(8);
    let _first = attach(&hub, "fdbb:1:1::/48");
    let prefix = "fdbb:1:1::/48".parse().expect("a prefix");
    assert_eq!(hub.attach(PORT, &[prefix]).err(), Some(AttachError::Taken(prefix)));
}

#[test]
fn a_parked_receiver_wakes_for_a_datagram_and_at_the_deadline() {
    let hub = Hub::new(8);
    let mut sender = attach(&hub, "fdbb:1:1::/48");
    let mut receiver = attach(&hub, "fdbb:1:2::/48");
    let start = receiver.now();
    assert_eq!(receiver.receive(Wait::until(start + Duration::from_millis(30))).expect("ok"), 0);
    assert!(receiver.now() >= start + Duration::from_millis(30));
    let waiter = thread::spawn(move || {
        let wait =
            Wait::spinning(Duration::from_micros(10), receiver.now() + Duration::from_secs(60));
        receiver.receive(wait).expect("received")
    });
    thread::sleep(Duration::from_millis(20));
    sender.transmit(&[datagram("fdbb:1:2::", b"x", b"")]).expect("sent");
    assert_eq!(waiter.join().expect("no panic"), 1);
    assert!(sender.now().saturating_since(start) < Duration::from_secs(30));
}

#[test]
fn virtual_time_stands_until_it_is_moved() {
    let clock = ManualClock::default();
    let hub = Hub::in_virtual_time(clock.clone(), 8);
    let mut node = attach(&hub, "fdbb:1:1::/48");
    assert_eq!(node.receive(Wait::until(Timestamp::MAX)).expect("received"), 0);
    assert_eq!(node.now(), Timestamp::ZERO);
    clock.advance_to(Timestamp::from_nanos(5));
    clock.advance_to(Timestamp::from_nanos(3));
    assert_eq!(node.now(), Timestamp::from_nanos(5));
}

#[test]
fn two_threads_exchange_every_datagram_in_order() {
    const COUNT: u32 = 50_000;
    let hub = Hub::new(COUNT as usize);
    let mut sender = attach(&hub, "fdbb:1:1::/48");
    let mut receiver = attach(&hub, "fdbb:1:2::/48");
    let reader = thread::spawn(move || {
        let mut next = 0;
        let deadline = receiver.now() + Duration::from_secs(60);
        while next < COUNT && receiver.now() < deadline {
            let wait = Wait::spinning(Duration::from_micros(5), deadline);
            for index in 0..receiver.receive(wait).expect("received") {
                assert_eq!(receiver.incoming(index).payload, next.to_be_bytes());
                next += 1;
            }
        }
        next
    });
    for number in 0..COUNT {
        sender.transmit(&[datagram("fdbb:1:2::", &number.to_be_bytes(), b"")]).expect("sent");
    }
    assert_eq!(reader.join().expect("in order"), COUNT);
}
