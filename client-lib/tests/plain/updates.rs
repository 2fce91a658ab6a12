//! Updates against real memory nodes, over the carrier between threads.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use core::time::Duration;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use bluebridge::{
    Barrier, Client, EndpointConfig, Error, Event, Fault, LeaseEnd, Lock, LockError, MemoryNode,
    NodeId, OwnerPolicy, Placement, Pointer, Service, ServiceCounters, ServiceState, UpdateOptions,
    UpdateRequest,
};
use bluebridge_transport::impaired::{Impaired, Impairment, Probability};
use bluebridge_transport::memory::MemoryTransport;
use bluebridge_transport::{
    Capabilities, Counters, Incoming, Outgoing, ReceiveError, Timestamp, TransmitError, Transport,
    Wait, Wakeable, Waker,
};
use bluebridge_wire::Command;

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
        let mut update = client.update(pointer, &mut buffer).expect("nobody has it");
        assert!(*update == *data, "{length} bytes at {offset}");
        assert_eq!((update.pointer(), update.len()), (pointer, length));
        assert!(update.time_left() > Duration::from_millis(100));
        let epoch = update.epoch();
        for byte in &mut *update {
            *byte ^= 0xff;
        }
        update.commit().expect("nobody else may");
        let data: Vec<u8> = data.iter().map(|byte| byte ^ 0xff).collect();
        assert!(read(&mut client, pointer, length) == data, "{length} bytes at {offset}");

        let mut update = client.update(pointer, &mut buffer).expect("it is free again");
        assert!(update.epoch() > epoch && *update == *data);
        update.fill(0);
        update.abort().expect("it is ours");
        let mut update = client.try_update(pointer, &mut buffer).expect("it is free again");
        update.fill(0);
        drop(update);
        assert!(client.try_update(pointer, &mut buffer).is_ok(), "dropping gave it free");
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
fn others_wait_or_are_told_who_has_it() {
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
            let update = second.update(base, &mut others).expect("it gets free");
            (bytes, update.to_vec())
        });
        thread::sleep(Duration::from_millis(50));
        let before = Instant::now();
        update.commit().expect("the lease holds");
        let (bytes, updated) = waiting.join().expect("it waits");
        assert!(bytes == [9; 100] && updated == [9; 100]);
        assert!(before.elapsed() < Duration::from_secs(5), "the commit ended the waiting");
    });
    assert!(!first.read_stale(base, &mut mine).expect("it is allocated"), "nobody has it");
}

#[test]
fn a_late_commit_changes_nothing_and_says_what_happened() {
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
    update.abort().expect("what ran out needs no ABORT");
}

#[test]
fn the_service_renews_while_the_application_computes() {
    let rack = LocalRack::start(&NODES, 1 << 20);
    let (mut first, service) = served(&rack, 1000);
    let mut second = client(&rack, 1001);
    assert_eq!(first.service_state(), ServiceState::Serving);
    let base = first.alloc_write(&[7; 100]).expect("there is room").base();
    let (mut mine, mut others) = ([0; 100], [0; 100]);
    let mut update = first.update_with(base, &mut mine, lasting(100)).expect("it is free");
    let until = Instant::now() + Duration::from_millis(600);
    while Instant::now() < until {
        core::hint::spin_loop();
    }
    assert!(update.time_left() > Duration::ZERO, "it was renewed");
    assert!(matches!(second.try_update(base, &mut others), Err(Error::Busy { .. })));
    update.fill(1);
    update.commit().expect("the lease was renewed");
    let counters = service.counters();
    assert!(counters.renewed_count >= 5, "{counters:?}");
    assert_eq!(counters.lost_count, 0);
    assert_eq!(read(&mut second, base, 100), [1; 100]);

    // Renewing has its limit.
    let options = UpdateOptions { renew_limit: Duration::from_millis(200), ..lasting(100) };
    let update = first.update_with(base, &mut mine, options).expect("it is free");
    thread::sleep(Duration::from_millis(500));
    assert_eq!(end_of(&update.commit().expect_err("too late")), LeaseEnd::Expired);
}

#[test]
fn updates_need_no_wake_up_each() {
    let rack = LocalRack::start(&NODES, 1 << 20);
    let (mut client, service) = served(&rack, 1000);
    let base = client.create(4096).expect("there is room").base();
    let mut buffer = [0; 8];
    for _ in 0..2000 {
        let mut update = client.update(base, &mut buffer).expect("nobody has it");
        update[0] = update[0].wrapping_add(1);
        update.commit().expect("nobody has it");
    }
    assert_eq!(u64::from_le_bytes(buffer) % 256, 2000 % 256);
    let counters = service.counters();
    assert!(counters.wake_count < 100, "{counters:?}");
    assert_eq!(counters.renewed_count, 0, "none lasted long");
}

#[test]
fn clients_of_one_endpoint_share_its_service() {
    let rack = LocalRack::start(&NODES, 1 << 20);
    let (carriers, port) = rack.attach_endpoint(NodeId(1000), 3);
    let service = Service::start(&config(1000), port).expect("a thread");
    let base = client(&rack, 1001).create(3 * 4096).expect("there is room");
    thread::scope(|scope| {
        for (at, carrier) in (0..).zip(carriers) {
            let config = EndpointConfig { service: Some(service.clone()), ..config(1000) };
            scope.spawn(move || {
                let mut client = Client::open(config, carrier);
                let mut buffer = [0; 4096];
                let page = base.at(at * 4096).expect("inside");
                let mut update = client.update_with(page, &mut buffer, lasting(60)).expect("free");
                thread::sleep(Duration::from_millis(300));
                update.fill(3);
                update.commit().expect("it was renewed");
            });
        }
    });
    assert!(service.counters().renewed_count >= 9, "{:?}", service.counters());
}

/// A carrier that sends nothing while it is mute, and hears nothing while it is deaf.
struct Mute {
    inner: MemoryTransport,
    is_mute: Arc<AtomicBool>,
    is_deaf: Arc<AtomicBool>,
}

impl Mute {
    fn new(inner: MemoryTransport, is_mute: &Arc<AtomicBool>) -> Self {
        Self { inner, is_mute: Arc::clone(is_mute), is_deaf: Arc::default() }
    }
}

impl Transport for Mute {
    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }
    fn counters(&self) -> Counters {
        self.inner.counters()
    }
    fn local_port(&self) -> u16 {
        self.inner.local_port()
    }
    fn now(&self) -> Timestamp {
        self.inner.now()
    }
    fn transmit(&mut self, batch: &[Outgoing<'_>]) -> Result<usize, TransmitError> {
        match self.is_mute.load(Ordering::Relaxed) {
            true => Ok(batch.len()),
            false => self.inner.transmit(batch),
        }
    }
    fn receive(&mut self, wait: Wait) -> Result<usize, ReceiveError> {
        let received = self.inner.receive(wait)?;
        Ok(if self.is_deaf.load(Ordering::Relaxed) { 0 } else { received })
    }
    fn incoming(&self, index: usize) -> Incoming<'_> {
        self.inner.incoming(index)
    }
}

impl Wakeable for Mute {
    fn waker(&mut self) -> std::io::Result<Waker> {
        self.inner.waker()
    }
}

/// Longer than this nothing of these tests takes.
const PATIENCE: Duration = Duration::from_secs(20);

/// A clock that can be stopped: carriers under it send nothing again and give nothing up by time.
/// Stopped for longer than [`PATIENCE`] it is past every deadline, so that calls end with an error.
#[derive(Clone, Default)]
struct StopClock {
    /// In nanoseconds; 0 while the clock runs.
    stopped_at: Arc<AtomicU64>,
}

impl StopClock {
    fn stop(&self) {
        self.stopped_at.store(Timestamp::monotonic().as_nanos(), Ordering::SeqCst);
    }

    fn run(&self) {
        self.stopped_at.store(0, Ordering::SeqCst);
    }

    /// What it shows at a moment of real time.
    fn shown(&self, now: Timestamp) -> Timestamp {
        let at = Timestamp::from_nanos(self.stopped_at.load(Ordering::SeqCst));
        match now.saturating_since(at) > PATIENCE {
            _ if at == Timestamp::ZERO => now,
            true => now + PATIENCE,
            false => at,
        }
    }
}

/// A carrier under a [`StopClock`].
struct Stoppable {
    inner: MemoryTransport,
    clock: StopClock,
}

impl Transport for Stoppable {
    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }
    fn counters(&self) -> Counters {
        self.inner.counters()
    }
    fn local_port(&self) -> u16 {
        self.inner.local_port()
    }
    fn now(&self) -> Timestamp {
        self.clock.shown(self.inner.now())
    }
    fn transmit(&mut self, batch: &[Outgoing<'_>]) -> Result<usize, TransmitError> {
        self.inner.transmit(batch)
    }
    fn receive(&mut self, wait: Wait) -> Result<usize, ReceiveError> {
        let now = self.inner.now();
        // A stopped clock comes to no deadline. Nobody looks meanwhile whether it runs again: what does
        // not come by a datagram or the waker is not to be found by chance.
        let wait = match self.clock.shown(now) {
            shown if shown == now || wait.deadline <= shown => wait,
            shown => Wait::until(shown + PATIENCE + Duration::from_millis(1)),
        };
        self.inner.receive(wait)
    }
    fn incoming(&self, index: usize) -> Incoming<'_> {
        self.inner.incoming(index)
    }
}

impl Wakeable for Stoppable {
    fn waker(&mut self) -> std::io::Result<Waker> {
        self.inner.waker()
    }
}

/// Waits until the service's counters are as told.
fn until_counted(service: &Service, what: &str, holds: impl Fn(&ServiceCounters) -> bool) {
    let began = Instant::now();
    while !holds(&service.counters()) {
        assert!(began.elapsed() < PATIENCE, "{what}: {:?}", service.counters());
        thread::sleep(Duration::from_millis(1));
    }
}

/// What an owner did with the requests that were led to it.
#[derive(Debug, Default, Eq, PartialEq)]
struct Answered {
    served: u64,
    waited: u64,
    wait_ended: u64,
    rejected: u64,
    not_owner: u64,
}

impl Answered {
    /// Requests that came, and answers that went; what is served here is one piece.
    fn totals(&self) -> [u64; 2] {
        let requests = self.served + self.waited + self.rejected + self.not_owner;
        [requests, requests + self.wait_ended]
    }
}

/// What an owner did until now, once its carrier has taken as many answers as told.
fn answered(service: &Service, answered_count: u64) -> Answered {
    let what = format!("the carrier takes {answered_count} answers of the owner");
    until_counted(service, &what, |counters| counters.answered_count >= answered_count);
    let counters = service.counters();
    assert_eq!(counters.answered_count, answered_count, "{counters:?}");
    assert_eq!(counters.wait_over_count, 0, "{counters:?}");
    Answered {
        served: counters.served_count,
        waited: counters.waited_count,
        wait_ended: counters.wait_ended_count,
        rejected: counters.rejected_count,
        not_owner: counters.not_owner_count,
    }
}

/// How often the answer of an owner sent a client's request home, was a page's last committed contents,
/// or let it wait; and how often the client sent a request again because of the time.
fn taken<T: Transport>(client: &Client<T>) -> [u64; 4] {
    [Event::RedirectReturn, Event::StaleJoin, Event::OwnerWait, Event::Retransmit]
        .map(|event| client.counters().of(event))
}

#[test]
fn an_abort_that_was_not_answered_is_the_services() {
    let rack = LocalRack::start(&NODES, 1 << 20);
    let (mut carriers, port) = rack.attach_endpoint(NodeId(1000), 1);
    let is_service_mute = Arc::<AtomicBool>::default();
    let port = Mute::new(port, &is_service_mute);
    let service = Service::start(&config(1000), port).expect("a thread");
    let is_mute = Arc::<AtomicBool>::default();
    let carrier = Mute::new(carriers.pop().expect("one"), &is_mute);
    let settings =
        EndpointConfig { service: Some(service.clone()), lease_count: 1, ..config(1000) };
    let mut first = Client::open(settings, carrier);
    let mut second = client(&rack, 1001);
    let base = second.create(4096).expect("there is room").base();
    let (mut mine, mut others) = ([0; 100], [0; 100]);
    for _ in 0..3 {
        let update = first.update_with(base, &mut mine, lasting(10_000)).expect("it is free");
        is_mute.store(true, Ordering::Relaxed);
        let before = Instant::now();
        drop(update);
        drop(second.update(base, &mut others).expect("the service gave it free"));
        assert!(before.elapsed() < Duration::from_secs(5), "before the lease ended");
        is_mute.store(false, Ordering::Relaxed);
        // The slot comes back with the service's next look.
        thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(service.counters().aborted_count, 3);

    // What ran out before it was given up needs no ABORT, and its slot comes back all the same.
    for _ in 0..3 {
        let update = first.update_with(base, &mut mine, lasting(100)).expect("it is free");
        is_service_mute.store(true, Ordering::Relaxed);
        is_mute.store(true, Ordering::Relaxed);
        let failed_count = service.counters().renew_failed_count;
        let patience = Instant::now() + Duration::from_secs(10);
        while service.counters().renew_failed_count == failed_count {
            assert!(Instant::now() < patience, "the RENEW that nobody hears ends with the lease");
            thread::sleep(Duration::from_millis(5));
        }
        drop(update);
        is_service_mute.store(false, Ordering::Relaxed);
        is_mute.store(false, Ordering::Relaxed);
        thread::sleep(Duration::from_millis(50));
    }
    first.update(base, &mut mine).expect("there is room").commit().expect("nobody else may");
    assert_eq!(service.counters().aborted_count, 3);
}

#[test]
fn what_comes_of_a_renewal_is_not_booked_on_the_next_client() {
    let rack = LocalRack::start(&NODES, 1 << 20);
    let (mut carriers, port) = rack.attach_endpoint(NodeId(1000), 2);
    let is_mute = Arc::<AtomicBool>::default();
    let port = Mute::new(port, &is_mute);
    let service = Service::start(&config(1000), port).expect("a thread");
    let settings = EndpointConfig { service: Some(service.clone()), ..config(1000) };
    let region = client(&rack, 1001).create(2 * 4096).expect("there is room");
    let at = |page: u64| region.at(page * 4096).expect("inside");
    let (mut one, mut two) = ([0; 100], [0; 100]);
    let mut first = Client::open(settings.clone(), carriers.pop().expect("two"));
    let update = first.update_with(at(0), &mut one, lasting(1600)).expect("it is free");
    thread::sleep(Duration::from_millis(900));
    assert_eq!(service.counters().renewed_count, 1);
    is_mute.store(true, Ordering::Relaxed);
    thread::sleep(Duration::from_millis(750));
    // Its second RENEW is under way, and nobody hears it yet.
    update.abort().expect("it is held");
    drop(first);
    thread::sleep(Duration::from_millis(300));
    let mut second = Client::open(settings, carriers.pop().expect("two"));
    let update = second.update_with(at(1), &mut two, lasting(300)).expect("it is free");
    thread::sleep(Duration::from_millis(20));
    is_mute.store(false, Ordering::Relaxed);
    thread::sleep(Duration::from_millis(900));
    update.commit().expect("it was renewed");
    let counters = service.counters();
    assert!(counters.renewed_count >= 4, "{counters:?}");
}

/// A carrier that fails as soon as it is told to.
struct Failing {
    inner: MemoryTransport,
    fails: Arc<AtomicBool>,
}

impl Transport for Failing {
    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }
    fn counters(&self) -> Counters {
        self.inner.counters()
    }
    fn local_port(&self) -> u16 {
        self.inner.local_port()
    }
    fn now(&self) -> Timestamp {
        self.inner.now()
    }
    fn transmit(&mut self, batch: &[Outgoing<'_>]) -> Result<usize, TransmitError> {
        self.inner.transmit(batch)
    }
    fn receive(&mut self, wait: Wait) -> Result<usize, ReceiveError> {
        let received = self.inner.receive(wait)?;
        match self.fails.load(Ordering::Relaxed) {
            true => Err(ReceiveError::Socket(std::io::ErrorKind::BrokenPipe.into())),
            false => Ok(received),
        }
    }
    fn incoming(&self, index: usize) -> Incoming<'_> {
        self.inner.incoming(index)
    }
}

impl Wakeable for Failing {
    fn waker(&mut self) -> std::io::Result<Waker> {
        self.inner.waker()
    }
}

#[test]
fn a_service_that_failed_takes_no_leases_with_it() {
    let rack = LocalRack::start(&NODES, 1 << 20);
    let (mut carriers, port) = rack.attach_endpoint(NodeId(1000), 1);
    let fails = Arc::<AtomicBool>::default();
    let port = Failing { inner: port, fails: Arc::clone(&fails) };
    let service = Service::start(&config(1000), port).expect("a thread");
    let is_mute = Arc::<AtomicBool>::default();
    let carrier = Mute::new(carriers.pop().expect("one"), &is_mute);
    let settings =
        EndpointConfig { service: Some(service.clone()), lease_count: 1, ..config(1000) };
    let mut client = Client::open(settings, carrier);
    let base = client.create(4096).expect("there is room").base();
    let mut buffer = [0; 100];
    for round in 0..3 {
        let update = client.update_with(base, &mut buffer, lasting(150)).expect("there is room");
        if round == 1 {
            fails.store(true, Ordering::Relaxed);
        }
        is_mute.store(true, Ordering::Relaxed);
        drop(update);
        is_mute.store(false, Ordering::Relaxed);
        let patience = Instant::now() + Duration::from_secs(10);
        while round == 1 && !matches!(service.state(), ServiceState::Failed { .. }) {
            assert!(Instant::now() < patience, "giving the lease up woke it");
            thread::sleep(Duration::from_millis(5));
        }
        thread::sleep(Duration::from_millis(50));
    }
    client.update(base, &mut buffer).expect("there is room").commit().expect("nobody else may");
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
fn what_was_committed_is_told_when_a_later_line_fails() {
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
fn more_leases_than_there_is_room_for_are_refused() {
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
    outer.client().try_update(at(2), &mut three).expect("it was given free").abort().expect("held");
    outer.commit().expect("it is held");
}

#[test]
fn the_owner_answers_while_the_application_computes() {
    for policy in [OwnerPolicy::Reject, OwnerPolicy::Wait, OwnerPolicy::Serve] {
        let (serves, waits) = (policy == OwnerPolicy::Serve, policy == OwnerPolicy::Wait);
        let rack = LocalRack::start(&NODES, 1 << 20);
        let (mut carriers, port) = rack.attach_endpoint(NodeId(1000), 1);
        let to_owner = [port.id()];
        let clock = StopClock::default();
        let port = Stoppable { inner: port, clock: clock.clone() };
        let service = Service::start(&config(1000), port).expect("a thread");
        let settings = EndpointConfig { service: Some(service.clone()), ..config(1000) };
        let inner = carriers.pop().expect("one");
        let mut first = Client::open(settings, Stoppable { inner, clock: clock.clone() });
        let carrier = Stoppable { inner: rack.attach(NodeId(1001)), clock: clock.clone() };
        let mut second = Client::open(config(1001), carrier);
        let base = first.alloc_write(&pattern(4096, 1)).expect("there is room").base();
        assert!(read(&mut second, base, 4096) == pattern(4096, 1));
        for command in [Command::Read, Command::Update, Command::Write] {
            rack.redirect(base, command, &to_owner);
        }
        let mut mine = vec![0; 4096];
        let options = UpdateOptions { owner_policy: policy, ..lasting(10_000) };
        // From here on nothing is sent again because of the time: without the owner's answer no call
        // comes to its end.
        clock.stop();
        let mut update = first.update_with(base, &mut mine, options).expect("a redirect led back");
        update.fill(9);
        let mut expected = Answered { not_owner: 1, ..Answered::default() };
        assert_eq!(answered(&service, 1), expected, "{policy:?}: it had no lease yet");

        let before = taken(&second);
        let mut bytes = [0; 100];
        let stale = second.read_stale(base, &mut bytes).expect("the owner answers");
        assert!(stale && bytes == *pattern(100, 1), "{policy:?}");
        let error = second.try_update(base, &mut [0; 100]).map(|_| ()).expect_err("it is leased");
        assert!(matches!(error, Error::Busy { owner: NodeId(1000), .. }), "{error}");
        (expected.served, expected.rejected) = if serves { (1, 1) } else { (0, 2) };
        assert_eq!(answered(&service, expected.totals()[1]), expected, "{policy:?}");
        let [returned, stale, waited, again] = before;
        let before = [returned + expected.rejected, stale + 1, waited, again];
        assert_eq!(taken(&second), before, "{policy:?}");

        if !waits {
            // The home, where it waits then, wants to hear of it from time to time.
            clock.run();
        }
        thread::scope(|scope| {
            let waiting = scope.spawn(|| read(&mut second, base, 100));
            if waits {
                expected.waited = 1;
            } else {
                expected.rejected += 1;
            }
            assert_eq!(answered(&service, expected.totals()[1]), expected, "{policy:?}");
            assert!(!waiting.is_finished(), "{policy:?}");
            update.commit().expect("the lease holds");
            assert_eq!(waiting.join().expect("it got the bytes"), [9; 100]);
        });
        expected.wait_ended = expected.waited;
        assert_eq!(answered(&service, expected.totals()[1]), expected, "{policy:?}");
        if waits {
            let [returned, stale, waited, again] = before;
            assert_eq!(taken(&second), [returned + 1, stale, waited + 1, again]);
        }
        // The redirect stays behind: one try more, and nothing else.
        second.write(base, &[1]).expect("it is free");
        assert_eq!(read(&mut second, base, 2), [1, 9]);
        expected.not_owner += 2;
        assert_eq!(answered(&service, expected.totals()[1]), expected, "{policy:?}");
        assert_eq!(service.counters().request_count, expected.totals()[0], "{policy:?}");
    }
}

#[test]
fn an_owner_serves_nothing_old_once_the_commit_is_sent() {
    let rack = LocalRack::start(&NODES, 1 << 20);
    let (mut carriers, port) = rack.attach_endpoint(NodeId(1000), 1);
    let to_owner = [port.id()];
    let service = Service::start(&config(1000), port).expect("a thread");
    let settings = EndpointConfig { service: Some(service.clone()), ..config(1000) };
    let is_deaf = Arc::<AtomicBool>::default();
    let carrier = carriers.pop().expect("one");
    let carrier = Mute { inner: carrier, is_mute: Arc::default(), is_deaf: Arc::clone(&is_deaf) };
    let mut first = Client::open(settings, carrier);
    let clock = StopClock::default();
    let carrier = Stoppable { inner: rack.attach(NodeId(1001)), clock: clock.clone() };
    let mut second = Client::open(config(1001), carrier);
    let base = first.alloc_write(&[0; 4096]).expect("there is room").base();
    let mut mine = vec![0; 4096];
    let options = UpdateOptions { owner_policy: OwnerPolicy::Serve, ..lasting(10_000) };
    // A lease before, whose bytes are never to be served again.
    let mut update = first.update_with(base, &mut mine, options).expect("it is free");
    update.fill(1);
    update.commit().expect("the lease holds");
    assert_eq!(read(&mut second, base, 100), [1; 100]);
    rack.redirect(base, Command::Read, &to_owner);
    let mut update = first.update_with(base, &mut mine, options).expect("it is free");
    let mut bytes = [0; 100];
    // The home is not asked: the redirect leads past it, and nothing is sent again.
    clock.stop();
    assert!(second.read_stale(base, &mut bytes).expect("the owner answers") && bytes == [1; 100]);
    clock.run();
    assert_eq!(answered(&service, 1), Answered { served: 1, ..Answered::default() });
    update.fill(9);
    is_deaf.store(true, Ordering::Relaxed);
    thread::scope(|scope| {
        let committing = scope.spawn(|| update.commit());
        assert_eq!(read(&mut second, base, 100), [9; 100]);
        clock.stop();
        let stale = second.read_stale(base, &mut bytes).expect("the owner answers, then the home");
        assert!(!stale && bytes == [9; 100], "what another has seen replaced");
        clock.run();
        // The READ came before the COMMIT, or after it.
        let seen = answered(&service, 3);
        assert!(seen.served == 1 && seen.totals() == [3, 3] && seen.not_owner >= 1, "{seen:?}");
        assert!(!committing.is_finished(), "nobody has told it that it is done");
        is_deaf.store(false, Ordering::Relaxed);
        committing.join().expect("no panic").expect("the lease holds");
    });
}

#[test]
fn without_the_fabrics_port_the_service_renews() {
    let rack = LocalRack::start(&NODES, 1 << 20);
    let (mut carriers, _port) = rack.attach_endpoint(NodeId(1000), 2);
    let other = carriers.pop().expect("two");
    let service = Some(Service::start(&config(1000), other).expect("a thread"));
    let settings = EndpointConfig { service, ..config(1000) };
    let mut client = Client::open(settings, carriers.pop().expect("two"));
    assert_eq!(client.service_state(), ServiceState::RenewalsOnly);
    let base = client.create(1).expect("there is room").base();
    let mut buffer = [0; 8];
    let update = client.update_with(base, &mut buffer, lasting(60)).expect("it is free");
    thread::sleep(Duration::from_millis(200));
    update.commit().expect("it was renewed");
}

/// Increments a counter on a page with UPDATE, another with FETCH_ADD.
fn increment<T: Transport>(client: &mut Client<T>, base: Pointer, count: u64) {
    let atomic = base.checked_add(4096).expect("inside");
    let mut word = [0; 8];
    for _ in 0..count {
        let mut update = client.update(base, &mut word).expect("its turn comes");
        let next = u64::from_le_bytes(update[..].try_into().expect("8 bytes")) + 1;
        update.copy_from_slice(&next.to_le_bytes());
        update.commit().expect("the lease holds");
        client.fetch_add(atomic, 1).expect("it is allocated");
    }
}

fn counted<T: Transport>(client: &mut Client<T>, base: Pointer) -> [u64; 2] {
    [0, 4096].map(|offset| {
        let word = read(client, base.checked_add(offset).expect("inside"), 8);
        u64::from_le_bytes(word.try_into().expect("8 bytes"))
    })
}

#[test]
fn two_clients_that_contend_lose_no_increment() {
    let rack = LocalRack::start(&NODES, 1 << 20);
    let mut observer = client(&rack, 1999);
    let base = observer.create(8192).expect("there is room").base();
    thread::scope(|scope| {
        for node in [1000, 1001] {
            let (mut client, _) = served(&rack, node);
            scope.spawn(move || increment(&mut client, base, 300));
        }
    });
    assert_eq!(counted(&mut observer, base), [600, 600]);
}

#[test]
fn sixteen_threads_on_four_endpoints_lose_no_increment_though_datagrams_are_lost() {
    let loss = Impairment { loss: Probability::from_percent(2), ..Impairment::default() };
    let rack = LocalRack::start_behind(&NODES, 1 << 20, |carrier| Impaired::new(carrier, loss, 1));
    let mut observer = client(&rack, 1999);
    let base = observer.create(8192).expect("there is room").base();
    let lost_count = AtomicU64::new(0);
    thread::scope(|scope| {
        for node in 1000..1004 {
            let (carriers, port) = rack.attach_endpoint(NodeId(node), 4);
            let port = Impaired::new(port, loss, node.into());
            let service = Service::start(&config(node), port).expect("a thread");
            for (at, carrier) in (0..).zip(carriers) {
                let carrier = Impaired::new(carrier, loss, u64::from(node) * 10 + at);
                let settings = EndpointConfig { service: Some(service.clone()), ..config(node) };
                let settings = EndpointConfig { deadline: Duration::from_secs(60), ..settings };
                let lost_count = &lost_count;
                scope.spawn(move || {
                    let mut client = Client::open(settings, carrier);
                    increment(&mut client, base, 40);
                    let lost = client.transport().impairment_counters().lost_count;
                    lost_count.fetch_add(lost, Ordering::Relaxed);
                });
            }
        }
    });
    assert!(lost_count.into_inner() > 0, "nothing was lost");
    assert_eq!(counted(&mut observer, base), [640, 640]);
}

#[test]
fn a_lock_is_held_by_one_and_passed_over_when_its_holder_is_gone() {
    let rack = LocalRack::start(&NODES, 1 << 20);
    let region = client(&rack, 1999).create(4096).expect("there is room");
    let counter = region.at(64).expect("inside");
    let lock = Lock::at(region.base(), Duration::from_secs(60)).expect("it is aligned");
    let wait = Duration::from_secs(60);
    thread::scope(|scope| {
        for node in 1000..1004 {
            let mut client = client(&rack, node);
            scope.spawn(move || {
                for _ in 0..50 {
                    let mut held = lock.lock(&mut client, wait).expect("its turn comes");
                    // Not atomic, so a second holder would be seen.
                    let word = read(held.client(), counter, 8);
                    let next = u64::from_le_bytes(word.try_into().expect("8 bytes")) + 1;
                    held.client().write(counter, &next.to_le_bytes()).expect("it is allocated");
                    held.unlock().expect("nobody is impatient");
                }
            });
        }
    });
    let (mut client, mut other) = (client(&rack, 1004), client(&rack, 1005));
    assert_eq!(read(&mut client, counter, 8), 200_u64.to_le_bytes());

    let soon = Duration::from_millis(50);
    let gone = lock.lock(&mut client, wait).expect("it is free");
    assert!(matches!(lock.lock(&mut other, soon), Err(LockError::TimedOut)));
    let impatient = Lock::at(region.base(), soon).expect("it is aligned");
    let held = impatient.lock(&mut other, wait).expect("it loses its patience");
    assert!(matches!(gone.unlock(), Err(LockError::Lost)));
    held.unlock().expect("nobody is impatient");
    // Dropping the guard unlocks too; the ticket that was given up is not waited for.
    drop(lock.lock(&mut client, soon).expect("it is free"));
    let held = lock.lock(&mut other, soon).expect("it was dropped");
    held.unlock().expect("nobody is impatient");
    let unaligned = Lock::at(region.at(8).expect("inside"), soon);
    assert!(matches!(unaligned, Err(LockError::Unaligned(_))));
}

#[test]
fn waiting_for_a_lock_ends_in_time_though_its_tickets_are_far_behind() {
    let rack = LocalRack::start(&NODES, 1 << 20);
    let mut client = client(&rack, 1000);
    let region = client.create(4096).expect("there is room");
    let soon = Duration::from_millis(50);
    let lock = Lock::at(region.base(), Duration::from_secs(60)).expect("it is aligned");
    // No number of tickets that can be drawn catches up with this, or with what is to be passed over.
    for (served, patience) in [(1 << 62, Duration::from_secs(60)), (1 << 63, Duration::ZERO)] {
        let serving = region.at(8).expect("inside");
        client.write(serving, &u64::to_le_bytes(served)).expect("it is allocated");
        let lock = Lock::at(region.base(), patience).expect("it is aligned");
        let error = lock.lock(&mut client, soon).map(|_| ()).expect_err("it is never served");
        assert!(matches!(error, LockError::TimedOut), "{error}");
    }
    client.zero(region.base(), 16).expect("it is allocated");
    let held = lock.lock(&mut client, soon).expect("it is a new lock");
    held.unlock().expect("nobody is impatient");
}

#[test]
fn a_barrier_lets_nobody_through_before_all_are_there() {
    let rack = LocalRack::start(&NODES, 1 << 20);
    let region = client(&rack, 1999).create(4096).expect("there is room");
    let (barrier, arrived) =
        (Barrier::at(region.base(), 3).expect("it is aligned"), region.at(64).expect("inside"));
    thread::scope(|scope| {
        for node in 1000..1003 {
            let mut client = client(&rack, node);
            scope.spawn(move || {
                for meeting in 0..20 {
                    client.fetch_add(arrived, 1).expect("it is allocated");
                    let which = barrier.wait(&mut client, Duration::from_secs(60));
                    assert_eq!(which.expect("all come"), meeting);
                    let count = client.fetch_add(arrived, 0).expect("it is allocated");
                    assert!(count >= 3 * (meeting + 1), "{count} in meeting {meeting}");
                }
            });
        }
    });
    let alone = barrier.wait(&mut client(&rack, 1003), Duration::from_millis(30));
    assert!(matches!(alone, Err(LockError::TimedOut)));
}
