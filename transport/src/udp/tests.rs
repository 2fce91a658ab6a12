use core::time::Duration;
use std::net::Ipv6Addr;
use std::os::fd::AsFd;
use std::thread;

use rustix::time::{ClockId, clock_gettime};

use super::joining::{Joining, Reception};
use super::train::{Ancillary, Train, TrainLimits, cut};
use super::{JoinTrains, LARGEST_PAYLOAD_BYTES, UdpConfig, UdpTransport, sys};
use crate::{OpenError, Outgoing, Timestamp, TransmitError, Transport, Wait};

const HERE: Ipv6Addr = Ipv6Addr::LOCALHOST;
const SECOND: Duration = Duration::from_secs(1);

fn open() -> UdpTransport {
    UdpTransport::open(&UdpConfig::default()).expect("an IPv6 UDP socket")
}

fn datagram<'a>(port: u16, header: &'a [u8], data: &'a [u8]) -> Outgoing<'a> {
    Outgoing { source: HERE, destination: HERE, destination_port: port, header, data }
}

/// Receives until `count` payloads have arrived or ten seconds have passed.
fn collect(receiver: &mut UdpTransport, count: usize) -> Vec<Vec<u8>> {
    let deadline = receiver.now() + 10 * SECOND;
    let mut arrived = Vec::new();
    while arrived.len() < count && receiver.now() < deadline {
        let count = receiver.receive(Wait::until(deadline)).expect("received");
        arrived.extend((0..count).map(|index| receiver.incoming(index).payload.to_vec()));
    }
    arrived
}

fn cut_lengths(lengths: &[usize], limits: TrainLimits) -> Vec<usize> {
    let bytes = vec![0; 70_000];
    let batch: Vec<_> = lengths.iter().map(|length| datagram(1, &bytes[..*length], b"")).collect();
    let mut trains = Vec::new();
    cut(&batch, limits, &mut trains);
    trains.iter().map(|train| train.count).collect()
}

#[test]
fn a_train_is_of_equal_lengths_and_one_shorter_end() {
    let limits = TrainLimits { segment_count: 4, bytes: 1000 };
    assert_eq!(cut_lengths(&[], limits), [0; 0]);
    assert_eq!(cut_lengths(&[10, 10, 10], limits), [3]);
    assert_eq!(cut_lengths(&[10, 10, 5, 5, 10], limits), [3, 1, 1]);
    assert_eq!(cut_lengths(&[5, 10, 10], limits), [1, 2]);
    assert_eq!(cut_lengths(&[10, 0, 0, 10], limits), [1, 1, 1, 1]);
    assert_eq!(cut_lengths(&[10; 9], limits), [4, 4, 1]);
    assert_eq!(cut_lengths(&[400; 5], limits), [2, 2, 1]);
    assert_eq!(cut_lengths(&[70_000, 70_000], limits), [1, 1]);
    assert_eq!(cut_lengths(&[10; 3], TrainLimits { segment_count: 1, bytes: 1000 }), [1, 1, 1]);
}

#[test]
fn a_train_has_one_way() {
    let one = datagram(1, b"ab", b"");
    let batch = [
        one,
        Outgoing { destination_port: 2, ..one },
        Outgoing { destination: Ipv6Addr::UNSPECIFIED, ..one },
        Outgoing { source: Ipv6Addr::UNSPECIFIED, ..one },
        one,
        Outgoing { header: b"a", data: b"b", ..one },
    ];
    let mut trains = Vec::new();
    cut(&batch, TrainLimits { segment_count: 64, bytes: 65_480 }, &mut trains);
    let counts: Vec<_> = trains.iter().map(|train| train.count).collect();
    assert_eq!(counts, [1, 1, 1, 1, 2]);
    assert_eq!(trains[4], Train { count: 2, segment_bytes: 2 });
}

#[test]
fn malformed_ancillary_data_is_ignored() {
    assert_eq!(Ancillary::parse(&[]), Ancillary::default());
    assert_eq!(Ancillary::parse(&[0; 128]), Ancillary::default());
    assert_eq!(Ancillary::parse(&[0xff; 128]), Ancillary::default());
    let mut control = Vec::new();
    control.extend(20_usize.to_ne_bytes());
    control.extend(libc::SOL_UDP.to_ne_bytes());
    control.extend(libc::UDP_GRO.to_ne_bytes());
    control.extend(1200_i32.to_ne_bytes());
    assert_eq!(Ancillary::parse(&control).segment_bytes, Some(1200));
    assert_eq!(Ancillary::parse(&control[..19]), Ancillary::default());
}

#[test]
fn a_datagram_arrives_with_its_addresses_and_both_parts() {
    let (mut sender, mut receiver) = (open(), open());
    let out = datagram(receiver.local_port(), b"head", b"er and data");
    assert_eq!(sender.transmit(&[out]).expect("sent"), 1);
    let wait = Wait::until(receiver.now() + 10 * SECOND);
    assert_eq!(receiver.receive(wait).expect("received"), 1);
    let incoming = receiver.incoming(0);
    assert_eq!(incoming.payload, b"header and data");
    assert_eq!((incoming.source, incoming.source_port), (HERE, sender.local_port()));
    assert_eq!(incoming.destination, HERE);
}

#[test]
fn empty_and_maximal_datagrams_pass() {
    let (mut sender, mut receiver) = (open(), open());
    let port = receiver.local_port();
    // Loopback's MTU of 65,536 leaves 65,488 bytes.
    let bytes: Vec<u8> = (0..65_488_u32).map(|n| n.to_le_bytes()[0]).collect();
    let batch = [
        datagram(port, b"", b""),
        datagram(port, &bytes, b""),
        datagram(port, b"", b"1"),
        datagram(port, b"", b""),
    ];
    assert_eq!(sender.transmit(&batch).expect("sent"), 4);
    let arrived = collect(&mut receiver, 4);
    assert_eq!(arrived, [&[], &bytes[..], b"1", b""]);
}

#[test]
fn a_train_arrives_as_the_datagrams_it_was() {
    let join_trains = JoinTrains::Always;
    let config = UdpConfig { join_trains, ..UdpConfig::default() };
    let (mut sender, mut receiver) = (open(), UdpTransport::open(&config).expect("a socket"));
    let bytes: Vec<u8> = (0..32_768_u32).map(|n| n.to_le_bytes()[0] ^ n.to_le_bytes()[1]).collect();
    let batch: Vec<_> = bytes
        .chunks(4_000)
        .map(|piece| datagram(receiver.local_port(), &piece[..100], &piece[100..]))
        .collect();
    assert_eq!(sender.transmit(&batch).expect("sent"), batch.len());
    let arrived = collect(&mut receiver, batch.len());
    assert_eq!(arrived, bytes.chunks(4_000).map(<[u8]>::to_vec).collect::<Vec<_>>());
    assert_eq!(sender.counters().sent_train_count, 1);
    assert_eq!(receiver.counters().received_train_count, 1);
    assert_eq!(receiver.counters().received_bytes, 32_768);
}

#[test]
fn a_batch_longer_than_the_carrier_takes_at_once_passes_in_order() {
    let config = UdpConfig { trains: false, ..UdpConfig::default() };
    let mut sender = UdpTransport::open(&config).expect("a socket");
    let mut receiver = open();
    let payloads: Vec<_> = (0..300_u16).map(u16::to_be_bytes).collect();
    let batch: Vec<_> =
        payloads.iter().map(|bytes| datagram(receiver.local_port(), bytes, b"")).collect();
    assert_eq!(sender.transmit(&batch).expect("sent"), 300);
    assert_eq!(sender.counters().sent_train_count, 0);
    assert_eq!(collect(&mut receiver, 300), payloads);
}

#[test]
fn an_error_ends_the_prefix_and_then_names_the_size() {
    let (mut sender, mut receiver) = (open(), open());
    let port = receiver.local_port();
    let large = vec![0; LARGEST_PAYLOAD_BYTES];
    let larger = vec![0; LARGEST_PAYLOAD_BYTES + 1];
    let batch = [datagram(port, b"1", b""), datagram(port, &large, b""), datagram(port, b"2", b"")];
    assert_eq!(sender.transmit(&batch).expect("a prefix"), 1);
    let error = sender.transmit(&batch[1..]).expect_err("larger than the MTU");
    assert!(
        matches!(
            error,
            TransmitError::TooLarge { payload_bytes: 65_527, limit_bytes: Some(65_488) }
        ),
        "{error:?}"
    );
    let error = sender.transmit(&[datagram(port, &larger, b"")]).expect_err("larger than UDP");
    assert!(matches!(error, TransmitError::TooLarge { payload_bytes: 65_528, .. }), "{error:?}");
    assert_eq!(sender.transmit(&batch[2..]).expect("sent"), 1);
    assert_eq!(collect(&mut receiver, 2), [b"1", b"2"]);
}

#[test]
fn a_refused_train_leaves_as_datagrams_and_is_remembered() {
    let (mut sender, mut receiver) = (open(), open());
    // The kernel refuses UDP_SEGMENT with EINVAL on a socket that sends no checksums.
    sys::set_option(sender.as_fd(), libc::SOL_UDP, libc::UDP_NO_CHECK6_TX, 1).expect("permitted");
    sys::set_option(receiver.as_fd(), libc::SOL_UDP, libc::UDP_NO_CHECK6_RX, 1).expect("permitted");
    let batch = [datagram(receiver.local_port(), &[7; 100], &[8; 900]); 6];
    assert!(sender.capabilities().train_segment_count > 1);
    assert_eq!(sender.transmit(&batch).expect("sent"), 6);
    assert_eq!(collect(&mut receiver, 6).len(), 6);
    assert_eq!(sender.capabilities().train_segment_count, 1);
    assert_eq!(sender.counters().train_refused_count, 1);
    assert_eq!(sender.transmit(&batch).expect("sent"), 6);
    assert_eq!(collect(&mut receiver, 6).len(), 6);
    assert_eq!(sender.counters().train_refused_count, 1);
}

#[test]
fn refused_addresses_do_not_end_the_use_of_trains() {
    let mut sender = open();
    let source = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
    let batch = [Outgoing { source, ..datagram(9, b"x", b"") }; 2];
    let error = sender.transmit(&batch).expect_err("a multicast source");
    assert!(matches!(error, TransmitError::Refused { .. }), "{error:?}");
    assert!(sender.capabilities().train_segment_count > 1);
}

#[test]
fn an_unreachable_port_is_no_error() {
    let (mut sender, gone) = (open(), open());
    let port = gone.local_port();
    drop(gone);
    for _ in 0..20 {
        assert_eq!(sender.transmit(&[datagram(port, b"x", b"")]).expect("sent"), 1);
        assert_eq!(sender.receive(Wait::NONE).expect("received"), 0);
    }
}

#[test]
fn a_datagram_outside_of_the_filter_is_dropped_and_counted() {
    let filter = Some("fdbb::/16".parse().expect("a prefix"));
    let mut receiver =
        UdpTransport::open(&UdpConfig { filter, ..UdpConfig::default() }).expect("ok");
    let out = datagram(receiver.local_port(), b"xyz", b"");
    assert_eq!(open().transmit(&[out; 5]).expect("sent"), 5);
    let wait = Wait::until(receiver.now() + Duration::from_millis(50));
    assert_eq!(receiver.receive(wait).expect("received"), 0);
    assert_eq!(receiver.counters().foreign_drop_count, 5);
    assert_eq!(receiver.counters().received_count, 0);
}

#[test]
fn an_overflowing_receive_buffer_is_counted() {
    let config = UdpConfig { receive_buffer_bytes: 4096, trains: false, ..UdpConfig::default() };
    let mut receiver = UdpTransport::open(&config).expect("a socket");
    assert!((4096..100_000).contains(&receiver.capabilities().receive_buffer_bytes));
    let mut sender = UdpTransport::open(&config).expect("a socket");
    let bytes = vec![0; 1000];
    let batch = vec![datagram(receiver.local_port(), &bytes, b""); 500];
    assert_eq!(sender.transmit(&batch).expect("sent"), 500);
    let mut received_count = 0;
    loop {
        let count = receiver.receive(Wait::NONE).expect("received");
        if count == 0 {
            break;
        }
        received_count += count as u64;
    }
    assert!(received_count < 500);
    assert_eq!(receiver.counters().overflow_drop_count, 500 - received_count);
}

#[test]
fn an_idle_receiver_sleeps_and_returns_at_the_deadline() {
    let mut receiver = open();
    let used = || {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        Duration::new(u64::try_from(time.tv_sec).expect("positive"), 0)
            + Duration::from_nanos(u64::try_from(time.tv_nsec).expect("positive"))
    };
    let (start, used_before) = (receiver.now(), used());
    let deadline = start + Duration::from_millis(300);
    let wait = Wait::spinning(Duration::from_millis(1), deadline);
    assert_eq!(receiver.receive(wait).expect("received"), 0);
    let late = receiver.now().saturating_since(deadline);
    assert!(receiver.now() >= deadline && late < 10 * SECOND, "{late:?}");
    let used = used() - used_before;
    assert!(used < Duration::from_millis(20), "{used:?}");
}

#[test]
fn no_wait_returns_at_once_and_a_spin_ends_at_the_deadline() {
    let mut receiver = open();
    let start = receiver.now();
    for _ in 0..100 {
        assert_eq!(receiver.receive(Wait::NONE).expect("received"), 0);
        assert_eq!(receiver.receive(Wait::until(Timestamp::from_nanos(1))).expect("received"), 0);
    }
    let deadline = receiver.now() + Duration::from_millis(5);
    assert_eq!(receiver.receive(Wait::spinning(100 * SECOND, deadline)).expect("received"), 0);
    assert!(receiver.now().saturating_since(start) < 10 * SECOND);
}

#[test]
fn a_sleeping_receiver_wakes_for_a_datagram() {
    let (mut sender, mut receiver) = (open(), open());
    let port = receiver.local_port();
    let waiter = thread::spawn(move || {
        let deadline = receiver.now() + 60 * SECOND;
        receiver.receive(Wait::until(deadline)).expect("received")
    });
    thread::sleep(Duration::from_millis(30));
    let start = sender.now();
    sender.transmit(&[datagram(port, b"x", b"")]).expect("sent");
    assert_eq!(waiter.join().expect("no panic"), 1);
    assert!(sender.now().saturating_since(start) < 10 * SECOND);
}

#[test]
fn a_port_has_one_owner_and_a_device_must_exist() {
    let owner = open();
    let port = owner.local_port();
    let error = UdpTransport::open(&UdpConfig { port, ..UdpConfig::default() }).err();
    assert!(matches!(error, Some(OpenError::Bind { port: taken, .. }) if taken == port));
    let device = Some("no-such-device0".to_owned());
    let error = UdpTransport::open(&UdpConfig { device, ..UdpConfig::default() }).err();
    assert!(matches!(error, Some(OpenError::Interface { .. })), "{error:?}");
    let interface_index = Some(u32::MAX >> 1);
    let error = UdpTransport::open(&UdpConfig { interface_index, ..UdpConfig::default() }).err();
    assert!(matches!(error, Some(OpenError::Interface { .. })), "{error:?}");
}

#[test]
fn a_carrier_on_a_device_knows_its_payload_limit() {
    let device = Some("lo".to_owned());
    let carrier = UdpTransport::open(&UdpConfig { device, ..UdpConfig::default() }).expect("ok");
    assert!(carrier.capabilities().largest_payload_bytes <= LARGEST_PAYLOAD_BYTES);
    assert!(carrier.capabilities().largest_payload_bytes >= 1280 - 48);
}

#[test]
fn trains_are_joined_while_they_come() {
    let (mut sender, mut receiver) = (open(), open());
    let port = receiver.local_port();
    let bytes = vec![7; 1000];
    for _ in 0..50 {
        assert_eq!(sender.transmit(&[datagram(port, &bytes, b""); 16]).expect("sent"), 16);
        assert_eq!(collect(&mut receiver, 16).len(), 16);
    }
    let joined = receiver.counters().received_train_count;
    assert!(joined > 40, "{joined}");
    for _ in 0..400 {
        assert_eq!(sender.transmit(&[datagram(port, &bytes, b"")]).expect("sent"), 1);
        assert_eq!(collect(&mut receiver, 1).len(), 1);
    }
    assert!(!receiver.joining.is_on());
}

#[test]
fn a_train_that_waits_in_the_socket_while_joining_ends_is_cut_as_sent() {
    let (mut sender, mut receiver) = (open(), open());
    let port = receiver.local_port();
    let bytes = vec![7; 1000];
    let train = [datagram(port, &bytes, b""); 16];
    while !receiver.joining.is_on() {
        assert_eq!(sender.transmit(&train).expect("sent"), 16);
        assert_eq!(collect(&mut receiver, 16).len(), 16);
    }
    // More than enough to end joining, and then a train.
    for _ in 0..300 {
        assert_eq!(sender.transmit(&[datagram(port, b"alone", b"")]).expect("sent"), 1);
    }
    assert_eq!(sender.transmit(&train).expect("sent"), 16);
    let arrived = collect(&mut receiver, 316);
    let lengths: Vec<_> = arrived.iter().map(Vec::len).collect();
    assert_eq!(lengths, [[5].repeat(300), [1000].repeat(16)].concat());
    // With an empty socket it ends.
    for _ in 0..600 {
        assert_eq!(sender.transmit(&[datagram(port, b"alone", b"")]).expect("sent"), 1);
        assert_eq!(collect(&mut receiver, 1).len(), 1);
    }
    assert!(!receiver.joining.is_on());
}

#[test]
fn joining_is_not_tried_again_at_once() {
    let reception = |has_train, looks_cut| Reception { count: 8, has_train, looks_cut };
    let mut joining = Joining::new(JoinTrains::Adaptive);
    assert!(!joining.is_on());
    assert_eq!(joining.observe(reception(false, false)), None);
    assert_eq!(joining.observe(reception(false, true)), Some(true));
    let looks_until_off =
        (0..1000).find(|_| joining.observe(reception(false, true)) == Some(false));
    assert_eq!(looks_until_off, Some(32));
    let looks_until_on = (0..1000).find(|_| joining.observe(reception(false, true)) == Some(true));
    assert_eq!(looks_until_on, Some(127));
    assert!((0..1000).all(|_| joining.observe(reception(true, false)).is_none()));
    for policy in [JoinTrains::Always, JoinTrains::Never] {
        let mut joining = Joining::new(policy);
        assert!((0..1000).all(|_| joining.observe(reception(false, true)).is_none()));
        assert_eq!(joining.is_on(), policy == JoinTrains::Always);
    }
}

#[test]
fn a_carrier_that_is_bound_to_an_address_sends_from_it_and_receives_for_it() {
    let config = UdpConfig { address: Some(HERE), ..UdpConfig::default() };
    let mut bound = UdpTransport::open(&config).expect("a socket");
    let mut other = open();
    let bytes = vec![7; 3000];
    let port = other.local_port();
    // Short in one part and in two, long, and a train: each uses another call.
    let batches = [
        vec![datagram(port, b"head", b"")],
        vec![datagram(port, b"head", b"data")],
        vec![datagram(port, b"head", &bytes)],
        vec![datagram(port, b"head", &bytes), datagram(port, b"head", &bytes)],
    ];
    for batch in batches {
        assert_eq!(bound.transmit(&batch).expect("sent"), batch.len());
        for arrived in collect(&mut other, batch.len()) {
            assert_eq!(arrived, [batch[0].header, batch[0].data].concat());
        }
        assert_eq!(other.incoming(0).source, HERE);
        assert_eq!(other.incoming(0).source_port, bound.local_port());
    }
    let port = bound.local_port();
    other.transmit(&[datagram(port, b"", &bytes), datagram(port, b"x", b"")]).expect("sent");
    assert_eq!(collect(&mut bound, 2), [bytes, b"x".to_vec()]);
    assert_eq!(bound.incoming(0).destination, HERE);
    assert_eq!(bound.incoming(0).source_port, other.local_port());
}

#[test]
fn a_carrier_that_is_bound_to_an_address_receives_trains() {
    let join_trains = JoinTrains::Always;
    let config = UdpConfig { address: Some(HERE), join_trains, ..UdpConfig::default() };
    let (mut sender, mut receiver) = (open(), UdpTransport::open(&config).expect("a socket"));
    let bytes = vec![3; 1000];
    let batch = vec![datagram(receiver.local_port(), b"head", &bytes); 5];
    assert_eq!(sender.transmit(&batch).expect("sent"), 5);
    assert_eq!(collect(&mut receiver, 5).len(), 5);
    assert_eq!(receiver.counters().received_train_count, 1);
}

#[test]
fn reception_time_is_between_the_call_and_now() {
    let (mut sender, mut receiver) = (open(), open());
    let port = receiver.local_port();
    for spin in [Duration::ZERO, SECOND] {
        let before = receiver.now();
        sender.transmit(&[datagram(port, b"x", b"")]).expect("sent");
        let count = receiver.receive(Wait::spinning(spin, before + 10 * SECOND));
        assert_eq!(count.expect("received"), 1);
        let received_at = receiver.received_at();
        assert!(before <= received_at && received_at <= receiver.now());
    }
}
