//! Sessions of clients that leave are closed at once.

use std::time::{Duration, Instant};

use bluebridge::{Client, EndpointConfig, MemoryNode, NodeId, Placement, Service, UpdateOptions};
use bluebridge_transport::memory::MemoryTransport;

use crate::rack::{LocalRack, SPACE};

const NODES: [NodeId; 3] = [NodeId(1), NodeId(2), NodeId(3)];

fn client(rack: &LocalRack, node: u16, server_count: u16) -> Client<MemoryTransport> {
    let mut config = EndpointConfig::new(SPACE, NodeId(node), 1);
    config.memory_nodes = NODES.map(|node| MemoryNode { node, shard_count: 1 }).to_vec();
    config.server_count = server_count;
    Client::open(config, rack.attach(NodeId(node)))
}

/// Opens a session with every node, and leaves in each a response that was not acknowledged.
fn visit(client: &mut Client<MemoryTransport>) {
    for node in NODES {
        client.create_at(1, Placement::Node(node)).expect("there is room");
    }
}

/// Waits until the nodes have as many sessions, one of which is the watcher's.
fn await_sessions(watcher: &mut Client<MemoryTransport>, counts: [u64; 3]) {
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        let now = NODES.map(|node| watcher.stat(node).expect("it responds").session_count);
        if now == counts {
            return;
        }
        assert!(Instant::now() < until, "{now:?} sessions are open, {counts:?} should be");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_dropped_client_leaves_no_session_behind() {
    let rack = LocalRack::start(&NODES, 1 << 20);
    let mut watcher = client(&rack, 1000, 8);
    for node in 1001..1004 {
        let mut short = client(&rack, node, 8);
        visit(&mut short);
        await_sessions(&mut watcher, [2; 3]);
        drop(short);
        await_sessions(&mut watcher, [1; 3]);
    }
}

#[test]
fn a_closed_client_is_gone_when_the_call_returns() {
    let rack = LocalRack::start(&NODES, 1 << 20);
    let mut watcher = client(&rack, 1000, 8);
    let mut short = client(&rack, 1001, 8);
    visit(&mut short);
    short.close().expect("the carrier works");
    let counts = NODES.map(|node| watcher.stat(node).expect("it responds").session_count);
    assert_eq!(counts, [1; 3]);
}

#[test]
fn a_session_whose_place_is_reused_is_closed() {
    let rack = LocalRack::start(&NODES, 1 << 20);
    let mut watcher = client(&rack, 1000, 8);
    let mut narrow = client(&rack, 1001, 1);
    visit(&mut narrow);
    await_sessions(&mut watcher, [1, 1, 2]);
}

#[test]
fn a_service_that_ends_leaves_no_session_behind() {
    let rack = LocalRack::start(&NODES, 1 << 20);
    let mut watcher = client(&rack, 1000, 8);
    await_sessions(&mut watcher, [1; 3]);
    let (mut carriers, port) = rack.attach_endpoint(NodeId(1001), 1);
    let config = EndpointConfig::new(SPACE, NodeId(1001), 1);
    let service = Service::start(&config, port).expect("a thread");
    let config = EndpointConfig { service: Some(service.clone()), ..config };
    let mut short = Client::open(config, carriers.pop().expect("one"));
    let region = short.create_at(1, Placement::Node(NODES[1])).expect("there is room");
    let options =
        UpdateOptions { lease: Some(Duration::from_millis(200)), ..UpdateOptions::default() };
    let mut byte = [0];
    let update = short.update_with(region.base(), &mut byte, options).expect("no client has it");
    let until = Instant::now() + Duration::from_secs(5);
    while service.counters().renewed_count == 0 {
        assert!(Instant::now() < until, "the service renews: {:?}", service.counters());
        std::thread::sleep(Duration::from_millis(5));
    }
    await_sessions(&mut watcher, [1, 3, 1]);
    update.abort().expect("it is held");
    drop(short);
    await_sessions(&mut watcher, [1, 2, 1]);
    drop(service);
    await_sessions(&mut watcher, [1; 3]);
}
