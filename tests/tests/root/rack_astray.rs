//! A switch that leads requests for a server's memory to another node: the session's server answers them at its
//! endpoint address.

use bluebridge::Placement;
use bluebridge_protocol::requester::Event;
use bluebridge_rack::spec::{DataPlane, Node};
use bluebridge_testkit::until;
use bluebridge_tests::rack::daemon::freeze;
use bluebridge_tests::rack::endpoint::{Endpoint, UdpClient};
use bluebridge_tests::rack::{RackOptions, TestRack};
use rustix::process::{Pid, Signal, kill_process};

const ROUNDS: u64 = 50;

fn range_count(rack: &TestRack) -> usize {
    let tables = rack.tables().unwrap_or_else(|error| panic!("{error}"));
    tables.iter().filter(|line| line.table == "directory").count()
}

fn returned(client: &UdpClient) -> u64 {
    client.counters().of(Event::AstrayReturn)
}

fn an_astray_request_is_answered(name: &str, switch: DataPlane) {
    let options = RackOptions { servers: 2, clients: 1, ..RackOptions::new(switch, "1500") };
    let rack = TestRack::up(name, &options);
    let endpoint = Endpoint::join(&rack, 1);
    let mut client = endpoint.client(&rack, 1);
    let (first, second) = (endpoint.server(1), endpoint.server(2));
    let region = client.create_at(3 * 4096, Placement::Node(first)).expect("there is memory");
    let (counter, lines) = (region.at(8192).expect("inside"), region.base());
    // Sessions with both: the second server knows the client, but not this session.
    let other = client.create_at(4096, Placement::Node(second)).expect("there is memory").base();
    client.write(other, &[9; 4096]).expect("its server answers");
    assert_eq!(returned(&client), 0);
    let ranges = range_count(&rack);

    // The controller would remove the entry.
    let controller = rack.process("controller").pid;
    let election = rack.switch_status();
    freeze(controller);
    rack.lead_astray(&election, first, Node::Server(2));
    assert_eq!(range_count(&rack), ranges + 1);
    let mut bytes = [0; 8192];
    for round in 0..ROUNDS {
        let fill = u8::try_from(round + 1).expect("few rounds");
        client.write(lines, &[fill; 8192]).expect("its server answers");
        assert_eq!(client.fetch_add(counter, 1).expect("its server answers"), round);
        client.read(lines, &mut bytes).expect("its server answers");
        assert_eq!(bytes, [fill; 8192]);
    }
    let mut update = client.update(lines, &mut bytes).expect("no client has it");
    update.fill(7);
    update.commit().expect("it is held");
    let count = |event| client.counters().of(event);
    assert!(count(Event::AstrayReturn) >= ROUNDS, "{:?}", client.counters());
    // A refusal may also arrive after the request was repeated, or answered at the endpoint.
    let refusals = [Event::AstrayReturn, Event::ReplyUntrusted, Event::ReplyStale].map(count);
    let seen: u64 = refusals.iter().sum();
    assert!(seen >= 3 * ROUNDS, "{refusals:?}: the second server refused each first try");
    client.read(other, &mut bytes[..4096]).expect("its server answers");
    assert_eq!(bytes[..4096], [9; 4096], "nothing reached the second server's memory");

    let target = i32::try_from(controller).ok().and_then(Pid::from_raw).expect("a pid");
    kill_process(target, Signal::CONT).expect("may go on");
    until("the controller removes the entry", || range_count(&rack) == ranges);
    client.read(lines, &mut bytes).expect("its server answers");
    assert_eq!(bytes, [7; 8192]);
    // What is in flight when the entry goes may still be led astray.
    let seen = returned(&client);
    for round in ROUNDS..2 * ROUNDS {
        assert_eq!(client.fetch_add(counter, 1).expect("its server answers"), round);
    }
    assert_eq!(returned(&client), seen, "requests arrive at the pointer again");
}

#[test]
fn an_astray_request_is_answered_on_the_ebpf_switch() {
    an_astray_request_is_answered("astray-ebpf", DataPlane::Ebpf);
}

#[test]
fn an_astray_request_is_answered_on_the_soft_switch() {
    an_astray_request_is_answered("astray-soft", DataPlane::Soft);
}
