//! The client against a real memory server over real sockets on the loopback interface, in a
//! network namespace of its own.

include!("support/rack.rs");

use std::time::Duration;

use bluebridge::{
    Client, EndpointConfig, Error, Event, MemoryNode, NodeId, Placement, WriteRequest,
};
use bluebridge_testkit::ip;
use bluebridge_testkit::namespace::in_local_fabric;
use bluebridge_transport::impaired::{Impaired, Impairment, Probability};
use bluebridge_transport::udp::{UdpConfig, UdpTransport};
use rack::SPACE;

fn socket(port: u16) -> UdpTransport {
    let config = UdpConfig {
        port,
        filter: Some("fdbb::/16".parse().expect("a prefix")),
        ..UdpConfig::default()
    };
    UdpTransport::open(&config).expect("a socket")
}

fn config(node: u16, piece_bytes: u16) -> EndpointConfig {
    let mut config = EndpointConfig::new(SPACE, NodeId(node), 1);
    config.memory_nodes = vec![MemoryNode { node: NodeId(1), shard_count: 1 }];
    config.placement = Placement::Node(NodeId(1));
    config.piece_bytes = Some(piece_bytes);
    config
}

fn pattern(length: usize, seed: usize) -> Vec<u8> {
    (0..length).map(|at| u8::try_from((at * 31 + at / 251 + seed) % 256).expect("a byte")).collect()
}

fn round_trips(mtu: u32, piece_bytes: u16) {
    let server = rack::serve(NodeId(1), 96 << 20, socket(bluebridge_wire::UDP_PORT));
    let mut client = Client::open(config(1000, piece_bytes), socket(0));
    for length in [1, 8, 1000, 4096, 5000, 32_768, 100_000, 3 << 20] {
        let data = pattern(length, length + mtu as usize);
        let region = client.alloc_write(&data).expect("there is room");
        let mut back = vec![0; length];
        client.read(region.base(), &mut back).expect("it is ours");
        assert!(back == data, "{length} bytes");
        client.delete(region).expect("it is ours");
    }
    assert_eq!(client.stat(NodeId(1)).expect("it answers").used_pages, 0);
    assert_eq!(client.malformed_count(), 0);
    client.close().expect("the carrier works");
    let served = server.stop().expect("it served");
    assert_eq!(served.len(), 1);
}

#[test]
fn bytes_come_back_at_mtu_1500() {
    in_local_fabric(1500, || round_trips(1500, 1368));
}

#[test]
fn bytes_come_back_at_mtu_9000() {
    in_local_fabric(9000, || round_trips(9000, 4096));
}

#[test]
fn a_bad_network_loses_nothing() {
    in_local_fabric(1500, || {
        let often = Probability::from_percent(5);
        let impairment = Impairment {
            loss: often,
            duplicate: often,
            corrupt: Probability::from_percent(1),
            reorder: often,
            reorder_distance: 5,
            reorder_hold: Duration::from_millis(1),
            ..Impairment::default()
        };
        let impaired = |port, seed| Impaired::new(socket(port), impairment, seed);
        let port = bluebridge_wire::UDP_PORT;
        let _server = rack::serve(NodeId(1), 16 << 20, impaired(port, 1));
        let mut behaviour = config(1000, 1368);
        behaviour.deadline = Duration::from_secs(30);
        let mut client = Client::open(behaviour, impaired(0, 2));
        let region = client.create(1 << 20).expect("there is room");
        let counter = region.at((1 << 20) - 8).expect("inside");
        for round in 0..20 {
            let data = pattern((1 << 20) - 4096, round);
            let chunks = data.chunks(300_000).enumerate().map(|(at, chunk)| {
                let at = region.at(at as u64 * 300_000).expect("inside");
                WriteRequest::new(at, chunk)
            });
            let mut writes: Vec<_> = chunks.collect();
            client.write_many(&mut writes).expect("the carrier works");
            assert!(writes.iter().all(|write| write.result.is_ok()));
            let mut back = vec![0; data.len()];
            client.read(region.base(), &mut back).expect("it is ours");
            assert!(back == data, "round {round}");
            for _ in 0..10 {
                client.fetch_add(counter, 1).expect("it is ours");
            }
        }
        assert_eq!(client.fetch_add(counter, 0).expect("it is ours"), 200, "each add once");
        for event in [Event::Retransmit, Event::PieceDuplicate, Event::TrainRepair] {
            assert!(client.counters().of(event) > 0, "{event:?} never happened");
        }
    });
}

#[test]
fn a_host_without_a_route_gets_an_error_at_once() {
    in_local_fabric(1500, || {
        ip("-6 route del local fdbb::/16 dev lo");
        let mut client = Client::open(config(1000, 1368), socket(0));
        let error = client.create(1).expect_err("there is no route");
        assert!(matches!(error, Error::Carrier { .. }), "{error}");
        assert!(error.to_string().contains("route"), "{error}");
    });
}
