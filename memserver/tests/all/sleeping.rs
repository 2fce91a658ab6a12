//! A server that sleeps without a bound: whatever it must see wakes it. A missing wake-up would never end here.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::{
    io,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use bluebridge_memserver::{
    Claim, Member, MemberError, Server, ServerConfig, run,
    serve::{Idle, Order},
};
use bluebridge_northbound::{
    Caller, migration,
    proto::{
        StatisticsQuery, attend_request::Body as ReplyBody, attend_response::Body as QueryBody,
    },
};
use bluebridge_protocol::responder::Authority;
use bluebridge_transport::{
    Capabilities, Counters, Incoming, Outgoing, Polled, ReceiveError, Timestamp, TransmitError,
    Transport, Wait, Wakeable, Waker,
    memory::{Hub, MemoryTransport},
};
use bluebridge_wire::{NodeId, Status, UDP_PORT};

use crate::{
    controller::{FakeController, GENERATION, Script},
    eventually, member,
    peer::{Peer, SERVER, SPACE},
};

const HOUR: Duration = Duration::from_secs(3600);

/// How long a test waits for an order to be followed.
const PATIENCE: Duration = Duration::from_secs(20);

/// A carrier that counts how often it was asked to sleep, and that can break.
struct Counting {
    inner: MemoryTransport,
    sleeps: Arc<AtomicU64>,
    is_broken: Arc<AtomicBool>,
}

impl Wakeable for Counting {
    fn waker(&mut self) -> io::Result<Waker> {
        self.inner.waker()
    }
}

impl Transport for Counting {
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
        if self.is_broken.load(Ordering::Relaxed) {
            return Err(ReceiveError::Socket(io::Error::other("unplugged")));
        }
        if wait.spin.is_zero() && wait.deadline > self.now() {
            self.sleeps.fetch_add(1, Ordering::Relaxed);
        }
        self.inner.receive(wait)
    }
    fn polled(&self) -> Polled {
        self.inner.polled()
    }
    fn incoming(&self, index: usize) -> Incoming<'_> {
        self.inner.incoming(index)
    }
}

/// The carriers of a server and its client.
struct Carriers {
    served: Counting,
    client: MemoryTransport,
    sleeps: Arc<AtomicU64>,
    is_broken: Arc<AtomicBool>,
}

fn carriers() -> Carriers {
    let hub = Hub::new(4096);
    let inner = hub.attach(UDP_PORT, &["fdbb:7:9::/48".parse().unwrap()]).unwrap();
    let client = hub.attach(1000, &["fdbb:7:14::/48".parse().unwrap()]).unwrap();
    let (sleeps, is_broken) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
    let served = Counting { inner, sleeps: Arc::clone(&sleeps), is_broken: Arc::clone(&is_broken) };
    Carriers { served, client, sleeps, is_broken }
}

/// Without any bound of a sleep.
fn unbounded() -> Idle {
    Idle { sleep: HOUR, grace: Duration::from_millis(20), ..Idle::default() }
}

fn start() -> (Server, MemoryTransport, Arc<AtomicU64>) {
    let config = ServerConfig::new(SPACE, SERVER, 3, 8 << 20, 0x5eed);
    let config = ServerConfig { claim: Claim::OnDemand, idle: unbounded(), ..config };
    let Carriers { served, client, sleeps, .. } = carriers();
    (run(&config, vec![served]).unwrap(), client, sleeps)
}

/// Waits for the end of a thread, at most as long as for anything else.
fn ended<T>(thread: thread::JoinHandle<T>) -> T {
    eventually("the end", || thread.is_finished());
    thread.join().expect("it does not panic")
}

#[test]
fn a_shard_is_woken_by_every_order_and_by_its_stop() {
    const ORDERS: u64 = 2000;
    let (server, client, sleeps) = start();
    let mut peer = Peer::open(client, 4096);
    let at = peer.create(1).unwrap();
    let before = sleeps.load(Ordering::Relaxed);
    for done in 1..=ORDERS {
        let authority = (done % 2 == 0).then_some(Authority { range_epoch: 2, expires_at: None });
        server.set_authority(authority).unwrap();
        // The next order follows at once, so that it comes at any moment of the shard's way to its sleep.
        let deadline = Instant::now() + PATIENCE;
        while server.statistics()[0].orders.0 < done {
            assert!(Instant::now() < deadline, "order {done} did not wake the shard");
            thread::yield_now();
        }
    }
    assert_eq!(peer.write(at, b"x"), Status::Ok);
    let orders = sleeps.load(Ordering::Relaxed) - before;
    // One for each, and one that a wake-up ends whose order was seen before.
    assert!(orders <= 2 * ORDERS + 4, "{orders}");
    ended(thread::spawn(move || server.stop())).unwrap();
}

#[test]
fn a_shard_without_work_does_not_wake() {
    let (server, client, sleeps) = start();
    let mut peer = Peer::open(client, 4096);
    assert_eq!(peer.ping(), Status::Ok);
    // What a client may still have in flight is over: the shard sleeps.
    let mut before = 0;
    eventually("the sleep", || {
        thread::sleep(Duration::from_millis(20));
        std::mem::replace(&mut before, sleeps.load(Ordering::Relaxed)) == before
    });
    before = sleeps.load(Ordering::Relaxed);
    thread::sleep(Duration::from_millis(300));
    assert_eq!(sleeps.load(Ordering::Relaxed), before);
    assert_eq!(server.statistics()[0].replies(Status::Ok), 2, "the last reply is published");
}

#[test]
fn an_order_for_a_survey_is_followed_to_its_end() {
    let (server, client, _) = start();
    let mut peer = Peer::open(client, 4096);
    peer.create(7).unwrap();
    for _ in 0..100 {
        let query = bluebridge_memserver::survey::Query::usage(SPACE);
        let findings = server.survey(0, query, PATIENCE).unwrap();
        assert_eq!(findings.usage.used_pages, 7);
    }
    server.order(0, Order::Move(0..8, NodeId(11))).unwrap();
    eventually("the move", || server.statistics()[0].orders.0 == 101);
}

/// A member that serves in its own thread, and is never asked to stop without being called.
struct Serving {
    thread: thread::JoinHandle<(Member, Result<(), MemberError>)>,
    stop: Arc<AtomicBool>,
    caller: Caller,
    /// How often it woke.
    looks: Arc<AtomicU64>,
}

impl Serving {
    fn start(controller: &FakeController, served: Counting) -> Self {
        let membership = member::join(controller);
        let config = ServerConfig { idle: unbounded(), ..member::config(&membership) };
        let reserved = config.reservation(1).reserve().expect("8 MiB");
        let mut member = Member::start(membership, &config, reserved, vec![served]).unwrap();
        let caller = member.caller();
        let (stop, looks) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let (is_stopped, count) = (Arc::clone(&stop), Arc::clone(&looks));
        let thread = thread::spawn(move || {
            let result = member.serve_until(HOUR, || {
                count.fetch_add(1, Ordering::Relaxed);
                is_stopped.load(Ordering::Relaxed)
            });
            (member, result)
        });
        Self { thread, stop, caller, looks }
    }

    fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.caller.call();
        let (member, result) = ended(self.thread);
        result.expect("it served");
        ended(thread::spawn(move || member.stop())).expect("no shard failed");
    }
}

#[test]
fn a_member_is_woken_by_its_controller_and_by_its_caller() {
    let controller = FakeController::start(Script { range_epoch: 1, ..Script::default() });
    let Carriers { served, client, .. } = carriers();
    let serving = Serving::start(&controller, served);
    let mut peer = Peer::open(client, 4096);
    let at = peer.create(1).unwrap();
    for epoch in [0, 2, 0, 3] {
        controller.script().range_epoch = epoch;
        let expected = if epoch == 0 { Status::NoAuthority } else { Status::Ok };
        eventually("the change", || peer.write(at, b"x") == expected);
    }
    let usage = QueryBody::Statistics(StatisticsQuery { space: SPACE.0.into() });
    for id in 1..=50 {
        eventually("the call of the server", || controller.query(id, usage.clone()));
        eventually("the reply", || controller.reply(id).is_some());
    }
    for (count, is_sealed) in (1..).zip([true, false, true]) {
        let order = migration::Order::Seal(is_sealed);
        assert!(controller.query(0, QueryBody::Migration(order.into())));
        eventually("the report", || {
            let script = controller.script();
            let bodies = script.messages.iter().map(|message| &message.body);
            bodies.filter(|body| matches!(body, Some(ReplyBody::Migration(_)))).count() == count
        });
    }
    let reported = || controller.script().free_pages.last().copied();
    eventually("the report of free pages", || reported() == Some(member::PAGE_COUNT - 1));
    serving.stop();
}

#[test]
fn a_member_without_work_does_not_wake() {
    let controller = FakeController::start(Script { range_epoch: 1, ..Script::default() });
    let Carriers { served, client, .. } = carriers();
    let serving = Serving::start(&controller, served);
    let mut peer = Peer::open(client, 4096);
    peer.create(9).unwrap();
    let reported = || controller.script().free_pages.last().copied();
    eventually("the report of free pages", || reported() == Some(member::PAGE_COUNT - 9));
    let before = serving.looks.load(Ordering::Relaxed);
    let heartbeats = controller.script().free_pages.len();
    eventually("heartbeats", || controller.script().free_pages.len() > heartbeats + 20);
    assert_eq!(serving.looks.load(Ordering::Relaxed), before, "they wake nobody");
    serving.stop();
}

#[test]
fn a_member_learns_that_generations_run_out_and_that_none_come() {
    let controller = FakeController::start(Script { range_epoch: 1, ..Script::default() });
    let Carriers { served, client, .. } = carriers();
    let serving = Serving::start(&controller, served);
    let mut peer = Peer::open(client, 4096);
    let all = usize::try_from(member::PAGE_COUNT).expect("few pages");
    let mut churn = || {
        let at = peer.create(all)?;
        assert_eq!(peer.delete(at), Status::Ok);
        Ok::<_, Status>(at.location.generation().number())
    };
    while churn().is_ok() {}
    let wanted = || controller.script().wanted_generations.last().copied();
    eventually("the request", || wanted() == Some(u32::from(GENERATION + 2)));
    eventually("the end of waiting", || churn() == Err(Status::OutOfMemory));
    controller.script().reserves = true;
    eventually("the next generation", || churn().is_ok_and(|generation| generation > GENERATION));
    serving.stop();
}

#[test]
fn a_member_learns_that_its_shard_has_ended() {
    let controller = FakeController::start(Script { range_epoch: 1, ..Script::default() });
    let Carriers { mut served, client, is_broken, .. } = carriers();
    let waker = served.waker().expect("a queue has one");
    let serving = Serving::start(&controller, served);
    assert_eq!(Peer::open(client, 4096).ping(), Status::Ok);
    is_broken.store(true, Ordering::Relaxed);
    // Its next look at the carrier is the last one.
    waker.wake();
    let (member, result) = ended(serving.thread);
    assert!(matches!(result, Err(MemberError::ShardEnded)), "{result:?}");
    assert!(member.stop().is_err());
}
