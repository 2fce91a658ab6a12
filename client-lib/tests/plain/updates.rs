//! Updates against real memory nodes, over the carrier between threads: here the guards themselves.

mod carriers;
mod contention;
mod owner;
mod service;

use core::time::Duration;
use std::thread;
use std::time::Instant;

use bluebridge::{
    Client, EndpointConfig, Error, Fault, LeaseEnd, MemoryNode, NodeId, Placement, Pointer,
    Service, ServiceCounters, ServiceState, UpdateOptions, UpdateRequest,
};
use bluebridge_transport::Transport;
use bluebridge_transport::memory::MemoryTransport;

use crate::rack::{LocalRack, SPACE};

const NODES: [NodeId; 2] = [NodeId(1), NodeId(2)];

fn config(node: u16) -> EndpointConfig {
    let mut config = EndpointConfig::new(SPACE, NodeId(node), 1);
    config.memory_nodes = NODES.map(|node| MemoryNode { node, shard_count: 1 }).to_vec();
    config.placement = Placement::Node(NODES[0]);
    config.piece_bytes = Some(1400);
    config.deadline = Duration::from_secs(20);
    config
}

/// A client without a service.
fn client(rack: &LocalRack, node: u16) -> Client<MemoryTransport> {
    Client::open(config(node), rack.attach(NodeId(node)))
}

/// A client with a service of its own.
fn served(rack: &LocalRack, node: u16) -> (Client<MemoryTransport>, Service) {
    let (mut carriers, port) = rack.attach_endpoint(NodeId(node), 1);
    let service = Service::start(&config(node), port).expect("a thread");
    let config = EndpointConfig { service: Some(service.clone()), ..config(node) };
    (Client::open(config, carriers.pop().expect("one")), service)
}

fn lasting(milliseconds: u64) -> UpdateOptions {
    UpdateOptions { lease: Some(Duration::from_millis(milliseconds)), ..UpdateOptions::default() }
}

fn pattern(length: usize, seed: usize) -> Vec<u8> {
    (0..length).map(|at| u8::try_from((at * 31 + at / 251 + seed) % 256).expect("a byte")).collect()
}

fn read<T: Transport>(client: &mut Client<T>, pointer: Pointer, length: usize) -> Vec<u8> {
    let mut bytes = vec![0xee; length];
    client.read(pointer, &mut bytes).expect("it is allocated");
    bytes
}

fn end_of(error: &Error) -> LeaseEnd {
    match error {
        Error::LeaseLost { how, .. } => *how,
        error => panic!("{error}"),
    }
}

#[test]
fn an_update_changes_ranges_of_any_length_and_alignment() {
    let rack = LocalRack::start(&NODES, 8 << 20);
    let mut client = client(&rack, 1000);
    assert_eq!(client.service_state(), ServiceState::Absent);
    for (offset, length) in
        [(0, 1), (0, 4096), (4095, 2), (1, 4096), (32_767, 2), (100, 32_768), (5, 200_000)]
    {
        let region = client.create(offset + length as u64).expect("there is room");
        let pointer = region.at(offset).expect("inside");
        let data = pattern(length, length);
        client.write(pointer, &data).expect("it is ours");
        let mut buffer = vec![0; length];
        let mut update = client.update(pointer, &mut buffer).expect("no client has it");
        assert!(*update == *data, "{length} bytes at {offset}");
        assert_eq!((update.pointer(), update.len()), (pointer, length));
        assert!(update.time_left() > Duration::from_millis(100));
        let epoch = update.epoch();
        for byte in &mut *update {
            *byte ^= 0xff;
        }
        update.commit().expect("no other client may");
        let data: Vec<u8> = data.iter().map(|byte| byte ^ 0xff).collect();
        assert!(read(&mut client, pointer, length) == data, "{length} bytes at {offset}");

        let mut update = client.update(pointer, &mut buffer).expect("it is free again");
        assert!(update.epoch() > epoch && *update == *data);
        update.fill(0);
        update.abort().expect("it is ours");
        let mut update = client.try_update(pointer, &mut buffer).expect("it is free again");
        update.fill(0);
        drop(update);
        assert!(client.try_update(pointer, &mut buffer).is_ok(), "dropping released it");
        assert!(read(&mut client, pointer, length) == data, "nothing of it was written");
        client.delete(region).expect("it is ours");
    }
    assert!(matches!(
        client.update(
            Pointer::from_ipv6("fdbb:1:1:1::".parse().expect("an address")).expect("a pointer"),
            &mut []
        ),
        Err(Error::Length)
    ));
}

#[test]
fn others_wait_or_learn_who_has_it() {
    let rack = LocalRack::start(&NODES, 1 << 20);
    let (mut first, mut second) = (client(&rack, 1000), client(&rack, 1001));
    let region = first.alloc_write(&[7; 4096]).expect("there is room");
    let (base, free) = (region.base(), first.alloc_write(&[8; 10]).expect("there is room"));
    let (mut mine, mut others) = ([0; 100], [0; 100]);
    let mut update = first.update_with(base, &mut mine, lasting(10_000)).expect("it is free");
    let error = second.try_update(base, &mut others).map(|_| ()).expect_err("it is leased");
    assert!(matches!(error, Error::Busy { owner: NodeId(1000), .. }), "{error}");
    assert_eq!(error.fault(), Fault::You);
    assert!(second.read_stale(base, &mut others).expect("it is allocated"), "it is leased");
    assert_eq!(others, [7; 100], "the last committed contents");
    second.set_deadline(Duration::from_millis(100));
    for error in [
        second.read(base, &mut others).expect_err("it is leased"),
        second.write(base, &[1]).expect_err("it is leased"),
        second.fetch_add(base, 1).expect_err("it is leased"),
        second.delete(region).expect_err("it is leased"),
        second.update(base, &mut others).map(|_| ()).expect_err("it is leased"),
    ] {
        assert!(matches!(error, Error::Busy { owner: NodeId(1000), .. }), "{error}");
    }
    assert_eq!(read(update.client(), free.base(), 10), [8; 10], "other memory is there");
    update.copy_from_slice(&[9; 100]);
    second.set_deadline(Duration::from_secs(20));
    thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let bytes = read(&mut second, base, 100);
            let update = second.update(base, &mut others).expect("its lease ends");
            (bytes, update.to_vec())
        });
        thread::sleep(Duration::from_millis(50));
        let before = Instant::now();
        update.commit().expect("the lease holds");
        let (bytes, updated) = waiting.join().expect("it waits");
        assert!(bytes == [9; 100] && updated == [9; 100]);
        assert!(before.elapsed() < Duration::from_secs(5), "the commit ended the waiting");
    });
    assert!(!first.read_stale(base, &mut mine).expect("it is allocated"), "no client has it");
}

#[test]
fn a_late_commit_changes_nothing_and_reports_the_lost_lease() {
    let rack = LocalRack::start(&NODES, 1 << 20);
    let (mut first, mut second) = (client(&rack, 1000), client(&rack, 1001));
    let base = first.alloc_write(&[7; 8192]).expect("there is room").base();
    let (mut mine, mut others) = (vec![0; 8192], vec![0; 8192]);

    let mut update = first.update_with(base, &mut mine, lasting(50)).expect("it is free");
    update.fill(1);
    thread::sleep(Duration::from_millis(80));
    assert_eq!(update.time_left(), Duration::ZERO);
    let error = update.commit().expect_err("it ran out");
    assert_eq!(end_of(&error), LeaseEnd::Expired);
    assert_eq!((error.fault(), error.code()), (Fault::You, 13));

    let mut update = first.update_with(base, &mut mine, lasting(50)).expect("it is free");
    update.fill(2);
    let theirs = second.update_with(base, &mut others, lasting(10_000)).expect("it runs out");
    let error = update.commit().expect_err("another has it");
    assert!(
        matches!(
            error,
            Error::LeaseLost { owner: Some(NodeId(1001)), how: LeaseEnd::LeasedAgain, .. }
        ),
        "{error}"
    );
    theirs.abort().expect("the lease holds");
    assert_eq!(read(&mut first, base, 8192), [7; 8192]);

    let update = first.update_with(base, &mut mine, lasting(50)).expect("it is free");
    thread::sleep(Duration::from_millis(80));
    update.abort().expect("an expired lease needs no ABORT");
}

/// No step of these tests takes longer than this.
const PATIENCE: Duration = Duration::from_secs(20);

/// Waits until the service's counters satisfy the condition.
fn until_counted(service: &Service, what: &str, holds: impl Fn(&ServiceCounters) -> bool) {
    let began = Instant::now();
    while !holds(&service.counters()) {
        assert!(began.elapsed() < PATIENCE, "{what}: {:?}", service.counters());
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn several_ranges_are_held_together_or_not_at_all() {
    let rack = LocalRack::start(&NODES, 4 << 20);
    let (mut first, mut second) = (client(&rack, 1000), client(&rack, 1001));
    let near = first.create_at(100_000, Placement::Node(NODES[0])).expect("there is room");
    let far = first.create_at(4096, Placement::Node(NODES[1])).expect("there is room");
    let (mut a, mut b, mut other) = (vec![1; 70_000], vec![1; 100], [0; 1]);
    let blocked = near.at(69_999).expect("inside");
    let held = second.update_with(blocked, &mut other, lasting(10_000)).expect("it is free");
    let try_now = UpdateOptions { wait: false, ..UpdateOptions::default() };
    let mut ranges =
        [UpdateRequest::new(far.base(), &mut b), UpdateRequest::new(near.base(), &mut a)];
    let error = first.update_many(&mut ranges, try_now).map(|_| ()).expect_err("one is leased");
    assert!(matches!(error, Error::Busy { .. }), "{error}");
    held.abort().expect("the lease holds");
    for pointer in [near.base(), near.at(33_000).expect("inside"), far.base()] {
        drop(second.try_update(pointer, &mut other).expect("none of it stayed leased"));
    }
    let mut update =
        first.update_many(&mut ranges, UpdateOptions::default()).expect("all are free");
    assert!(matches!(second.try_update(far.base(), &mut other), Err(Error::Busy { .. })));
    update.bytes(0).fill(2);
    update.bytes(1).fill(3);
    assert!(update.time_left() > Duration::ZERO);
    update.commit().expect("all are held");
    assert_eq!(read(&mut second, far.base(), 101)[98..], [2, 2, 0]);
    assert_eq!(read(&mut second, near.base(), 70_001)[69_998..], [3, 3, 0]);

    let mut shared = [0; 10];
    let mut ranges = [
        UpdateRequest::new(near.base(), &mut a),
        UpdateRequest::new(near.at(70_100).expect("inside"), &mut shared),
    ];
    let error = first.update_many(&mut ranges, try_now).map(|_| ()).expect_err("a page twice");
    assert!(matches!(error, Error::SharedPage { .. }), "{error}");
    assert!(matches!(first.update_many(&mut [], try_now), Err(Error::Length)));
}

#[test]
fn the_committed_part_is_reported_when_a_later_line_fails() {
    let mut rack = LocalRack::start(&NODES, 1 << 20);
    let mut client = client(&rack, 1000);
    let near = client.create_at(4096, Placement::Node(NODES[0])).expect("there is room").base();
    let far = client.create_at(4096, Placement::Node(NODES[1])).expect("there is room").base();
    let (mut a, mut b) = ([0; 1000], [0; 1000]);
    let mut ranges = [UpdateRequest::new(near, &mut a), UpdateRequest::new(far, &mut b)];
    let mut update = client.update_many(&mut ranges, lasting(10_000)).expect("all are free");
    update.bytes(0).fill(5);
    update.bytes(1).fill(5);
    update.client().set_deadline(Duration::from_millis(300));
    rack.stop(NODES[1]);
    let error = update.commit().expect_err("its node is gone");
    match &error {
        Error::PartlyCommitted { pointer, committed_bytes: 1000, .. } => assert_eq!(*pointer, far),
        error => panic!("{error}"),
    }
    assert!(error.is_outcome_unknown(), "{error}");
    assert_eq!(read(&mut client, near, 1000), [5; 1000]);
}

#[test]
fn more_leases_than_configured_are_refused() {
    let rack = LocalRack::start(&NODES, 1 << 20);
    let (mut carriers, port) = rack.attach_endpoint(NodeId(1000), 1);
    let service = Some(Service::start(&config(1000), port).expect("a thread"));
    let settings = EndpointConfig { service, lease_count: 2, ..config(1000) };
    let mut client = Client::open(settings, carriers.pop().expect("one"));
    let region = client.create(4 * 32_768).expect("there is room");
    let mut buffer = vec![0; 3 * 32_768];
    let error = client.update(region.base(), &mut buffer).map(|_| ()).expect_err("three lines");
    assert!(matches!(error, Error::TooManyLeases), "{error}");
    let (mut one, mut two, mut three) = ([0; 1], [0; 1], [0; 1]);
    let at = |page: u64| region.at(page * 4096).expect("inside");
    let mut outer = client.update(at(0), &mut one).expect("it is free");
    let mut inner = outer.client().update(at(1), &mut two).expect("it is free");
    let error = inner.client().update(at(2), &mut three).map(|_| ()).expect_err("the third");
    assert!(matches!(error, Error::TooManyLeases), "{error}");
    inner.commit().expect("it is held");
    outer
        .client()
        .try_update(at(2), &mut three)
        .expect("its lease was released")
        .abort()
        .expect("held");
    outer.commit().expect("it is held");
}
