//! The order of service, the estimated cost, and what is dropped; no test depends on time.

#![allow(clippy::cast_possible_truncation, reason = "the numbers of these tests are small")]

use bluebridge_wire::{EndpointAddress, Header, header::HEADER_BYTES};

use super::*;

const SPACE: Space = Space(7);

const fn sender(node: u16, has_session: bool) -> Sender {
    Sender { space: SPACE, node: NodeId(node), has_session }
}

/// Requests in the order of service, until time or requests run out.
fn round(backlog: &mut Backlog) -> Vec<Place> {
    backlog.begin_round();
    core::iter::from_fn(|| backlog.next()).collect()
}

/// How many of the numbers below `bound` are among the places, and how many of the others.
fn split(places: &[Place], bound: usize) -> (usize, usize) {
    let is_below = |place: &&Place| matches!(**place, Place::Carrier(n) if n < bound);
    let below = places.iter().filter(is_below).count();
    (below, places.len() - below)
}

fn is_vacant(backlog: &Backlog) -> bool {
    backlog.is_empty()
        && backlog.by_sender.is_empty()
        && backlog.vacant_flows.len() == backlog.flows.len()
        && backlog.with_session.first == NONE
        && backlog.sessionless.first == NONE
}

#[test]
fn the_requests_of_one_sender_are_served_in_order() {
    let mut backlog = Backlog::new();
    for number in 0..20 {
        assert!(backlog.add(sender(1, true), REQUEST_NANOS, number));
    }
    let served = round(&mut backlog);
    assert_eq!(served, (0..20).map(Place::Carrier).collect::<Vec<_>>());
    assert!(is_vacant(&backlog));
}

#[test]
fn a_sender_behind_a_flood_is_served_within_two_turns() {
    let mut backlog = Backlog::new();
    for number in 0..1000 {
        assert!(backlog.add(sender(1, true), REQUEST_NANOS, number));
    }
    assert!(backlog.add(sender(2, true), REQUEST_NANOS, 1000));
    let served = round(&mut backlog);
    let place = served.iter().position(|place| *place == Place::Carrier(1000));
    assert!(place.is_some_and(|place| place <= 2), "{place:?}");
}

#[test]
fn a_round_takes_the_estimated_time_and_no_more() {
    let mut backlog = Backlog::new();
    for number in 0..1000 {
        assert!(backlog.add(sender(1, true), REQUEST_NANOS, number));
    }
    let most = ROUND_NANOS.div_ceil(REQUEST_NANOS) as usize;
    assert_eq!(round(&mut backlog).len(), most);
    assert_eq!(round(&mut backlog)[0], Place::Carrier(most), "the next one continues there");
}

#[test]
fn senders_get_the_same_time_not_the_same_number() {
    let mut backlog = Backlog::new();
    let (short, long) = (REQUEST_NANOS, 4 * REQUEST_NANOS);
    for number in 0..500 {
        assert!(backlog.add(sender(1, true), long, number));
        assert!(backlog.add(sender(2, true), short, 500 + number));
    }
    let (mut heavy, mut light) = (0, 0);
    for _ in 0..8 {
        let (some_heavy, some_light) = split(&round(&mut backlog), 500);
        (heavy, light) = (heavy + some_heavy, light + some_light);
    }
    let (heavy_nanos, light_nanos) = (heavy * long as usize, light * short as usize);
    let difference = heavy_nanos.abs_diff(light_nanos);
    assert!(difference <= 2 * long as usize, "{heavy_nanos} and {light_nanos}");
}

#[test]
fn open_sessions_come_first_and_leave_others_a_share() {
    let mut backlog = Backlog::new();
    for number in 0..1000 {
        assert!(backlog.add(sender(1, false), REQUEST_NANOS, number));
    }
    for number in 1000..1005 {
        assert!(backlog.add(sender(2, true), REQUEST_NANOS, number));
    }
    let served = round(&mut backlog);
    assert_eq!(split(&served[..5], 1000), (0, 5), "they arrived last and are served first");
    assert_eq!(split(&served[5..], 1000).1, 0);
    // Busy sessions do not starve requests that open one.
    for number in 1000..1900 {
        assert!(backlog.add(sender(2, true), REQUEST_NANOS, number));
    }
    let (sessionless, with_session) = split(&round(&mut backlog), 1000);
    let kept = (SESSIONLESS_NANOS / REQUEST_NANOS) as usize;
    assert!((kept..=kept + 2).contains(&sessionless), "{sessionless} and {with_session}");
    assert!(with_session > 5 * sessionless);
}

#[test]
fn a_flood_leaves_room_for_others() {
    let mut backlog = Backlog::new();
    let half = usize::from(LIMIT) / 2;
    let taken = (0..10_000).filter(|&n| backlog.add(sender(1, true), REQUEST_NANOS, n)).count();
    assert_eq!(taken, half);
    // The same node without a session counts as another sender, but the limit still holds.
    let taken = (0..10_000).filter(|&n| backlog.add(sender(1, false), REQUEST_NANOS, n)).count();
    assert_eq!(taken, half / 2);
    for node in 2..50 {
        assert!(backlog.add(sender(node, true), REQUEST_NANOS, 0), "node {node} has room");
    }
}

#[test]
fn all_entries_become_vacant_after_any_requests() {
    let mut backlog = Backlog::new();
    for round_number in 0..200_usize {
        for number in 0..64 {
            let node = (number * round_number % 37) as u16;
            backlog.add(sender(node, number % 3 == 0), 500 + 100 * node as u32, number);
        }
        round(&mut backlog);
        let (address, payload) = (Ipv6Addr::LOCALHOST, [7; 9]);
        backlog.hold(|_| Incoming {
            source: address,
            source_port: 1,
            destination: address,
            payload: &payload,
        });
    }
    while !round(&mut backlog).is_empty() {}
    assert!(is_vacant(&backlog));
}

#[test]
fn waiting_requests_are_kept_when_the_carrier_reuses_its_buffers() {
    let mut backlog = Backlog::new();
    let many = ROUND_NANOS.div_ceil(REQUEST_NANOS) as usize + 3;
    let payload: Vec<Vec<u8>> = (0..many).map(|n| vec![n as u8; 10 + n]).collect();
    let address = |n: usize| EndpointAddress::new(SPACE, NodeId(1), n as u64).to_ipv6();
    let incoming = |n: usize| Incoming {
        source: address(n),
        source_port: n as u16,
        destination: address(n + 1),
        payload: &payload[n],
    };
    for number in 0..many {
        assert!(backlog.add(sender(1, true), REQUEST_NANOS, number));
    }
    assert_eq!(round(&mut backlog).len(), many - 3);
    assert_eq!(backlog.hold(incoming), 0);
    backlog.begin_round();
    for number in many - 3..many {
        let Some(Place::Held(slot)) = backlog.next() else { panic!("it was copied") };
        assert_eq!(backlog.held(slot), incoming(number));
    }
    assert_eq!(backlog.next(), None);
    // A datagram longer than any request is lost.
    assert!(backlog.add(sender(1, true), REQUEST_NANOS, 0));
    let long = vec![0; SLOT_BYTES + 1];
    assert_eq!(backlog.hold(|_| Incoming { payload: &long, ..incoming(0) }), 1);
    backlog.begin_round();
    let Some(Place::Held(slot)) = backlog.next() else { panic!("its place is served") };
    assert!(backlog.held(slot).payload.is_empty());
}

#[test]
fn the_cost_depends_on_command_and_data() {
    let source = EndpointAddress::new(SPACE, NodeId(20), 1).to_ipv6();
    let server = EndpointAddress::of_shard(SPACE, NodeId(9), 0, 0).to_ipv6();
    let preview = |command, length, data_bytes: usize| {
        let bits = WireCommand::request(command, false).bits();
        let to =
            Fields::unpack(server).map(|to| Fields { command: bits, ..to }).expect("it is one");
        let mut payload = vec![0; HEADER_BYTES + data_bytes];
        let header = Header { target: server, session: 5, length, ..Header::default() };
        header.emit(&mut payload, 0);
        let destination = to.to_ipv6();
        Preview::new(&Incoming { source, source_port: 1, destination, payload: &payload })
    };
    let open = preview(Command::Open, 4096, 0);
    assert_eq!((open.space, open.node, open.session), (SPACE, NodeId(20), 5));
    let ping = preview(Command::Ping, 0, 0);
    assert_eq!(open.cost, ping.cost);
    assert!(ping.cost >= REQUEST_NANOS);
    assert!(preview(Command::Write, 4096, 4096).cost > ping.cost);
    assert!(preview(Command::Read, 32768, 0).cost > preview(Command::Read, 4096, 0).cost);
    assert!(preview(Command::Create, 1 << 16, 0).cost > 10 * ping.cost);
    // An impossible length does not count fully.
    assert!(preview(Command::Create, u32::MAX, 0).cost < 100 * ROUND_NANOS);
    let foreign =
        Incoming { source: Ipv6Addr::LOCALHOST, source_port: 1, destination: server, payload: &[] };
    let foreign = Preview::new(&foreign);
    assert_eq!((foreign.node, foreign.session), (NodeId::ANY, 0));
}
