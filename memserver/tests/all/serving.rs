//! A whole memory server behind real carriers.

use core::time::Duration;
use std::{slice, thread};

use bluebridge_memserver::{
    Claim, Server, ServerConfig, StartError, run,
    serve::{Idle, Order},
    server::OrderError,
    statistics::refusals,
};
use bluebridge_protocol::responder::{Authority, Event, Timers};
use bluebridge_transport::{
    Transport,
    memory::{Hub, MemoryTransport},
};
use bluebridge_wire::{NodeId, Status, UDP_PORT};

use crate::{
    eventually,
    peer::{Peer, SERVER, SPACE, exercise},
};

fn config() -> ServerConfig {
    let config = ServerConfig::new(SPACE, SERVER, 3, 8 << 20, 0x5eed);
    // Whatever a shard must see wakes it.
    let idle = Idle { sleep: Duration::from_secs(3600), ..Idle::default() };
    ServerConfig { claim: Claim::OnDemand, idle, ..config }
}

fn on_hub(config: &ServerConfig) -> (Server, MemoryTransport) {
    let hub = Hub::new(4096);
    let served = hub.attach(UDP_PORT, &["fdbb:7:9::/48".parse().unwrap()]).unwrap();
    let client = hub.attach(1000, &["fdbb:7:14::/48".parse().unwrap()]).unwrap();
    (run(config, vec![served]).unwrap(), client)
}

#[test]
fn serves_over_the_memory_carrier() {
    for piece_bytes in [4096, 1368] {
        let (server, client) = on_hub(&config());
        let mut peer = Peer::open(client, piece_bytes);
        exercise(&mut peer, 200);
        let at = peer.create(5).unwrap();
        eventually("the statistics", || server.statistics()[0].arena.used_pages == 5);
        assert_eq!(peer.delete(at), Status::Ok);
        let totals = server.stop().unwrap().remove(0);
        assert_eq!((totals.arena.used_pages, totals.arena.capacity_pages), (0, 2048));
        assert_eq!((totals.session_count, totals.unsent_count), (1, 0));
        assert_eq!(totals.replies(Status::NotAllocated), 200);
        let refused = refusals(slice::from_ref(&totals));
        assert_eq!(refused, [("the page is not allocated", 200)].into());
        assert_eq!(totals.event(Event::Received), totals.transport.received_count);
        assert!(totals.event(Event::PageWrittenStraight) > 0);
    }
}

#[test]
fn a_stopping_server_responds_shutting_down_for_the_grace_time() {
    let idle = Idle { grace: Duration::from_secs(3), ..config().idle };
    let (server, client) = on_hub(&ServerConfig { idle, ..config() });
    let mut peer = Peer::open(client, 4096);
    assert_eq!(peer.ping(), Status::Ok);
    let stopping = thread::spawn(move || server.stop());
    eventually("the shutdown", || peer.ping() == Status::ShuttingDown);
    let totals = stopping.join().unwrap().unwrap().remove(0);
    assert!(totals.replies(Status::ShuttingDown) > 0);
}

#[test]
fn orders_reach_the_shard() {
    let (server, client) = on_hub(&config());
    let mut peer = Peer::open(client, 4096);
    let at = peer.create(8).unwrap();
    server.order(0, Order::Move(0..8, NodeId(11))).unwrap();
    eventually("the move", || peer.write(at, b"x") == Status::Moved);
    server.order(0, Order::Move(0..8, NodeId(12))).unwrap();
    eventually("the refusal", || server.statistics()[0].orders == (1, 1));
    server.order(0, Order::Return(0..8)).unwrap();
    eventually("the return", || peer.write(at, b"x") == Status::Ok);
    server.set_authority(None).unwrap();
    eventually("the end of authority", || peer.write(at, b"x") == Status::NoAuthority);
    server.set_authority(Some(Authority { range_epoch: 2, expires_at: None })).unwrap();
    eventually("the new authority", || peer.write(at, b"x") == Status::Ok);
    assert_eq!(server.order(1, Order::Return(0..8)), Err(OrderError::Gone(1)));
}

#[test]
fn a_waiting_request_is_served_when_the_lease_expires_without_other_requests() {
    // The waiting client need not retransmit before the lease expires.
    let timers = Timers { lease_wait: Duration::from_secs(60), ..config().timers };
    let (server, client) = on_hub(&ServerConfig { timers, ..config() });
    let mut peer = Peer::open(client, 4096);
    let at = peer.create(1).unwrap();
    assert_eq!(peer.write(at, b"contents"), Status::Ok);
    // Long enough that the READ arrives before its end.
    let grant = peer.lease(at, 2000);
    assert_eq!((grant.status, grant.header.node), (Status::Ok, 20));
    let busy = peer.wait_to_read(at);
    assert_eq!(busy.status, Status::Busy);
    assert_eq!(busy.header.lease_epoch, grant.header.lease_epoch);
    let answer = peer.replies(1).remove(0);
    assert_eq!((answer.status, &answer.data[..]), (Status::Ok, &b"contents"[..]));
    let totals = server.stop().unwrap().remove(0);
    assert_eq!((totals.leased_pages, totals.waiting_count), (0, 0));
    assert_eq!((totals.event(Event::LeaseExpired), totals.event(Event::WaiterAnswered)), (1, 1));
}

#[test]
fn notices_are_sent_when_ordered() {
    let (server, client) = on_hub(&config());
    let mut peer = Peer::open(client, 4096);
    server.order(0, Order::Notices(SPACE, true)).unwrap();
    eventually("the order", || server.statistics()[0].orders == (1, 0));
    let at = peer.create(2).unwrap();
    assert_eq!(peer.delete(at), Status::Ok);
    assert_eq!(server.stop().unwrap().remove(0).event(Event::NoticeSent), 2);
}

#[test]
fn invalid_configurations_are_refused_at_the_start() {
    let none: Vec<MemoryTransport> = Vec::new();
    assert!(matches!(run(&config(), none), Err(StartError::Carriers(0))));
    let attach = || {
        let hub = Hub::new(16);
        vec![hub.attach(UDP_PORT, &["fdbb:7:9::/48".parse().unwrap()]).unwrap()]
    };
    let greedy = ServerConfig { memory_bytes: 1 << 40, ..config() };
    let error = run(&greedy, attach()).err().expect("a tebibyte is too much here");
    assert!(matches!(error, StartError::Memory(_)), "{error}");
    let wrong = ServerConfig { node: NodeId::ANY, ..config() };
    assert!(matches!(run(&wrong, attach()), Err(StartError::Config(_))));
}

#[test]
fn the_memory_limit_and_the_quota_hold() {
    let quota = ServerConfig { quotas: vec![(SPACE, 1000)], ..config() };
    for (config, expected, limit) in
        [(config(), Status::OutOfMemory, 2048), (quota, Status::QuotaExceeded, 1000)]
    {
        let (_server, client) = on_hub(&config);
        let mut peer = Peer::open(client, 4096);
        let mut created = 0;
        let refused = loop {
            match peer.create(8) {
                Ok(_) => created += 8,
                Err(status) => break status,
            }
        };
        assert_eq!((refused, created), (expected, limit));
        assert_eq!(peer.stat().used_pages, limit);
    }
}

/// The same over sockets, where the whole fabric is local to a namespace.
mod netns {
    use bluebridge_testkit::namespace::in_local_fabric;
    use bluebridge_transport::udp::{UdpConfig, UdpTransport};
    use bluebridge_wire::address::SHARD_ADDRESS_BYTE;
    use rustix::time::{ClockId, clock_gettime};

    use super::*;

    fn udp(port: u16) -> UdpTransport {
        UdpTransport::open(&UdpConfig { port, ..UdpConfig::default() }).unwrap()
    }

    #[test]
    fn serves_over_udp() {
        in_local_fabric(9000, || {
            let server = run(&config(), vec![udp(UDP_PORT)]).unwrap();
            for piece_bytes in [4096, 1368, 1144] {
                exercise(&mut Peer::open(udp(0), piece_bytes), 100);
            }
            let totals = server.stop().unwrap().remove(0);
            assert_eq!((totals.arena.used_pages, totals.unsent_count), (0, 0));
            assert!(totals.transport.sent_train_count > 0, "READ replies leave as trains");
        });
    }

    #[test]
    fn shards_serve_their_own_pointers() {
        in_local_fabric(9000, || {
            let config = UdpConfig { port: UDP_PORT, ..UdpConfig::default() };
            let carriers = UdpTransport::open_steered(&config, 3, SHARD_ADDRESS_BYTE).unwrap();
            let server = run(&super::config(), carriers).unwrap();
            for shard in [0, 1, 2] {
                let mut peer = Peer::open_shard(udp(0), 4096, shard);
                exercise(&mut peer, 30);
                assert_eq!(peer.create(1).unwrap().location.shard(), shard);
                assert_eq!(peer.stat().shard_count, 3);
            }
            // An endpoint address of a shard that does not exist leads to the shard of its
            // remainder.
            let mut peer = Peer::open_shard(udp(0), 4096, 5);
            assert_eq!(peer.create(1).unwrap().location.shard(), 2);
            let totals = server.stop().unwrap();
            let used: Vec<_> = totals.iter().map(|total| total.arena.used_pages).collect();
            assert_eq!(used, [1, 1, 2]);
            assert!(totals.iter().all(|total| total.event(Event::DropWrongShard) == 0));
        });
    }

    #[test]
    fn an_idle_server_sleeps() {
        in_local_fabric(9000, || {
            let server = run(&config(), vec![udp(UDP_PORT)]).unwrap();
            let mut peer = Peer::open(udp(0), 4096);
            assert_eq!(peer.ping(), Status::Ok);
            let used = || {
                let time = clock_gettime(ClockId::ProcessCPUTime);
                Duration::new(time.tv_sec.try_into().unwrap(), time.tv_nsec.try_into().unwrap())
            };
            let before = used();
            thread::sleep(Duration::from_secs(1));
            let spent = used() - before;
            assert!(spent < Duration::from_millis(50), "{spent:?} of CPU time in a second");
            assert_eq!(peer.ping(), Status::Ok);
            drop(server);
            assert_eq!(peer.transport.counters().network_error_count, 0);
        });
    }
}
