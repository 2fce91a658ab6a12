//! The loop with a carrier that is slow, busy or broken, and with a store that refuses.

use core::ops::Range;
use std::{collections::VecDeque, io, sync::mpsc::sync_channel};

use bluebridge_protocol::{
    direct::{Shared, SharedShard},
    responder::{Authority, Config, Event},
    store::{Access, Grant, LineStore, StoreUsage},
};
use bluebridge_transport::{Capabilities, Counters, Incoming, ManualClock};
use bluebridge_wire::{
    ArenaGeneration, Command, EndpointAddress, Flags, Header, HeaderView, Pointer, Space, Status,
    UDP_PORT, address::Fields, header::HEADER_BYTES, seal,
};

use super::*;
use crate::{ArenaConfig, statistics::Snapshot};

const SPACE: Space = Space(7);
const SERVER: NodeId = NodeId(9);

/// Source, destination and payload of a datagram.
type Bytes = (Ipv6Addr, Ipv6Addr, Vec<u8>);

/// How a carrier behaves.
#[derive(Clone, Copy)]
enum Behaviour {
    /// Never accepts a datagram.
    Busy,
    /// Fails permanently.
    Broken,
    /// Refuses every datagram.
    Refusing,
    /// Accepts at most this many at a time, and none every second time.
    Slow(usize),
}

/// A carrier that contains all datagrams to be received; it stops the loop after the last one.
struct Scripted {
    inbox: VecDeque<Bytes>,
    batch: Vec<Bytes>,
    batch_limit: usize,
    sent: Vec<Vec<u8>>,
    sources: Vec<Ipv6Addr>,
    behaviour: Behaviour,
    turn: usize,
    /// How long the host pauses between the reading of the clock and the first batch.
    pause: Duration,
    received_at: Timestamp,
    clock: ManualClock,
    stop: Arc<AtomicBool>,
    capabilities: Capabilities,
}

impl Transport for Scripted {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn counters(&self) -> Counters {
        Counters { sent_count: self.sent.len() as u64, ..Counters::default() }
    }

    fn local_port(&self) -> u16 {
        UDP_PORT
    }

    fn now(&self) -> Timestamp {
        let now = self.clock.now();
        self.clock.advance_to(now + Duration::from_micros(10));
        now
    }

    fn received_at(&self) -> Timestamp {
        self.received_at
    }

    fn transmit(&mut self, batch: &[Outgoing<'_>]) -> Result<usize, TransmitError> {
        let Outgoing { source, destination, .. } = batch[0];
        self.turn += 1;
        let count = match self.behaviour {
            Behaviour::Busy => 0,
            Behaviour::Broken => return Err(TransmitError::Socket(io::Error::other("unplugged"))),
            Behaviour::Refusing => {
                let error = io::Error::other("filtered");
                let source_address = source;
                return Err(TransmitError::Refused { source_address, destination, error });
            }
            Behaviour::Slow(most) => (self.turn % 2) * most.min(batch.len()),
        };
        self.sources.extend(batch[..count].iter().map(|out| out.source));
        let payload = |out: &Outgoing<'_>| [out.header, out.data].concat();
        self.sent.extend(batch[..count].iter().map(payload));
        Ok(count)
    }

    fn receive(&mut self, _wait: Wait) -> Result<usize, ReceiveError> {
        self.received_at = self.now();
        self.clock.advance_to(self.received_at + core::mem::take(&mut self.pause));
        let count = self.inbox.len().min(self.batch_limit);
        self.batch = self.inbox.drain(..count).collect();
        self.stop.store(count == 0, Ordering::Relaxed);
        Ok(count)
    }

    fn incoming(&self, index: usize) -> Incoming<'_> {
        let (source, destination, payload) = &self.batch[index];
        Incoming { source: *source, source_port: 5, destination: *destination, payload }
    }
}

/// A store that refuses every allocation, and has direct readers.
struct Refusing(Arena, SharedShard);

impl PageStore for Refusing {
    fn generation(&self) -> ArenaGeneration {
        self.0.generation()
    }
    fn create(&mut self, _space: Space, _pages: u32) -> Result<Grant, Status> {
        Err(Status::Internal)
    }
    fn delete(&mut self, access: Access, pages: u32) -> Result<u32, Status> {
        self.0.delete(access, pages)
    }
    fn allocation(&self, access: Access, pages: u32) -> Result<Range<u64>, Status> {
        self.0.allocation(access, pages)
    }
    fn check(&self, access: Access) -> Result<(), Status> {
        self.0.check(access)
    }
    fn read(&self, page: u64, range: Range<usize>) -> &[u8] {
        self.0.read(page, range)
    }
    fn write(&mut self, page: u64, start: usize, data: &[u8]) {
        self.0.write(page, start, data);
    }
    fn zero(&mut self, page: u64, range: Range<usize>) {
        self.0.zero(page, range);
    }
    fn version(&self, page: u64) -> u64 {
        self.0.version(page)
    }
    fn lines(&self) -> &dyn LineStore {
        self.0.lines()
    }
    fn lines_mut(&mut self) -> &mut dyn LineStore {
        self.0.lines_mut()
    }
    fn shared(&self) -> Shared<'_> {
        Shared { sessions: &[], shard: Some(&self.1) }
    }
    fn usage(&self, space: Space) -> StoreUsage {
        self.0.usage(space)
    }
}

impl Store for Refusing {
    fn arena_usage(&self) -> ArenaUsage {
        self.0.arena_usage()
    }
    fn tidy(&mut self, budget: u32) -> u32 {
        self.0.tidy(budget)
    }
    fn reserve(&mut self, last: ArenaGeneration) {
        self.0.reserve(last);
    }
    fn set_reserving(&mut self, is_reserving: bool) {
        self.0.set_reserving(is_reserving);
    }
}

fn request(command: Command, target: Ipv6Addr, header: Header) -> Bytes {
    request_from(NodeId(20), command, target, header)
}

fn request_from(node: NodeId, command: Command, target: Ipv6Addr, header: Header) -> Bytes {
    let mut to = Fields::unpack(target).unwrap();
    to.command = command.code();
    let (from, to) = (EndpointAddress::new(SPACE, node, 1).to_ipv6(), to.to_ipv6());
    let mut bytes = vec![0; HEADER_BYTES];
    Header { target, incarnation: 1, ..header }.emit(&mut bytes, 0);
    seal(from, to, &mut bytes, &[]);
    (from, to, bytes)
}

fn server() -> Ipv6Addr {
    EndpointAddress::of_shard(SPACE, SERVER, 0, 0).to_ipv6()
}

fn scripted(behaviour: Behaviour) -> Scripted {
    Scripted {
        inbox: VecDeque::new(),
        batch: Vec::new(),
        batch_limit: 16,
        sent: Vec::new(),
        sources: Vec::new(),
        behaviour,
        turn: 0,
        pause: Duration::ZERO,
        received_at: Timestamp::ZERO,
        clock: ManualClock::default(),
        stop: Arc::default(),
        capabilities: Capabilities {
            name: "scripted",
            largest_payload_bytes: 9000,
            batch_count: 16,
            train_segment_count: 1,
            train_bytes: 9000,
            receive_buffer_bytes: 0,
        },
    }
}

fn config() -> Config {
    Config::new(SPACE, SERVER, 1, 1)
}

/// A shard with an open session and a region of 8 pages; the session and the region.
fn shard(behaviour: Behaviour) -> (Shard<Scripted, Arena>, u64, Pointer) {
    let mut responder = Responder::new(&config()).unwrap();
    let mut store = Arena::on_heap(&ArenaConfig::default(), 64);
    let session = open(&mut responder, &mut store, NodeId(20));
    let Grant { location, tag } = store.create(SPACE, 8).unwrap();
    let at = Pointer { space: SPACE, node: SERVER, tag, location };
    let transport = scripted(behaviour);
    (Shard::new(transport, responder, store, (&config(), Idle::default())), session, at)
}

fn open(responder: &mut Responder, store: &mut Arena, node: NodeId) -> u64 {
    let header = Header { length: 4096, credit: 8, sequence: 1, ..Header::default() };
    let (from, to, bytes) = request_from(node, Command::Open, server(), header);
    let datagram = Datagram::parse(from, to, &bytes).unwrap();
    responder.handle_datagram(Timestamp::default(), 5, &datagram, store).unwrap();
    let head = responder.poll_transmit(store).unwrap().head.to_vec();
    HeaderView::new(&head).unwrap().header().session
}

/// Runs the loop over an inbox.
fn serve<S: Store>(
    shard: &mut Shard<Scripted, S>,
    inbox: Vec<Bytes>,
) -> (Result<(), ServeError>, Snapshot) {
    shard.transport.inbox = inbox.into();
    let (_sender, orders) = sync_channel(1);
    let statistics = Arc::<ShardStatistics>::default();
    let stop = Arc::clone(&shard.transport.stop);
    let control = ShardControl { stop, orders, statistics: Arc::clone(&statistics) };
    let ended = shard.serve(&control);
    (ended, statistics.snapshot())
}

/// Reads of a whole line, each followed by a change of the line.
fn reads_and_changes(session: u64, at: Pointer, rounds: u64) -> Vec<Bytes> {
    let numbered = |sequence| Header { session, sequence, length: 32768, ..Header::default() };
    (0..rounds)
        .flat_map(|round| {
            let zero = Header { flags: Flags::ZERO, ..numbered(2 * round + 2) };
            [
                request(Command::Read, at.to_ipv6(), numbered(2 * round + 1)),
                request(Command::Delete, at.to_ipv6(), zero),
            ]
        })
        .collect()
}

#[test]
fn a_slow_carrier_gets_all_replies_and_none_is_torn() {
    for most in [1, 3, 64] {
        let (mut shard, session, at) = shard(Behaviour::Slow(most));
        let (ended, snapshot) = serve(&mut shard, reads_and_changes(session, at, 40));
        ended.unwrap();
        assert_eq!((shard.transport.sent.len(), snapshot.unsent_count), (40 * 9, 0));
        // Every sent piece has the checksum of the bytes that it carries.
        let to = EndpointAddress::new(SPACE, NodeId(20), 1).to_ipv6();
        for (source, payload) in shard.transport.sources.iter().zip(&shard.transport.sent) {
            Datagram::parse(*source, to, payload).expect("a whole reply");
        }
        assert!(snapshot.event(Event::DrainFirst) >= 39, "{:?}", snapshot.events);
        assert_eq!(snapshot.transport.sent_count, 360);
    }
}

#[test]
fn a_busy_carrier_loses_replies_but_does_not_block_the_loop() {
    let (mut shard, session, at) = shard(Behaviour::Busy);
    let (ended, snapshot) = serve(&mut shard, reads_and_changes(session, at, 10));
    ended.unwrap();
    assert_eq!((shard.transport.sent.len(), snapshot.unsent_count), (0, 90));
    assert_eq!(snapshot.replies(Status::Ok), 91);
}

#[test]
fn a_refused_datagram_does_not_stop_the_others() {
    let (mut shard, session, at) = shard(Behaviour::Refusing);
    let (ended, snapshot) = serve(&mut shard, reads_and_changes(session, at, 10));
    ended.unwrap();
    assert_eq!(snapshot.unsent_count, 90);
}

#[test]
fn a_broken_carrier_ends_the_loop_with_its_error() {
    let (mut shard, session, at) = shard(Behaviour::Broken);
    let (ended, snapshot) = serve(&mut shard, reads_and_changes(session, at, 1));
    let error = ended.unwrap_err();
    assert!(error.to_string().contains("unplugged"), "{error}");
    assert_eq!(snapshot.event(Event::Received), 2, "the last statistics are published");
}

#[test]
fn refusals_of_the_store_are_sent_as_replies() {
    let (Shard { transport, responder, store, idle, .. }, session, at) = shard(Behaviour::Slow(9));
    let mut shard = Shard::new(
        transport,
        responder,
        Refusing(store, SharedShard::default()),
        (&config(), idle),
    );
    let create = Header { session, sequence: 1, length: 1, ..Header::default() };
    let read = Header { session, sequence: 2, length: 8, ..Header::default() };
    let inbox = vec![
        request(Command::Create, server(), create),
        request(Command::Read, at.to_ipv6(), read),
        (server(), server(), b"not a fabric datagram".to_vec()),
    ];
    let (ended, snapshot) = serve(&mut shard, inbox);
    ended.unwrap();
    assert_eq!((snapshot.replies(Status::Internal), snapshot.replies(Status::Ok)), (1, 2));
    assert_eq!((snapshot.event(Event::DropHeader), shard.transport.sent.len()), (1, 2));
}

#[test]
fn readers_pass_on_before_an_order_counts_as_executed() {
    let (Shard { transport, responder, store, idle, .. }, ..) = shard(Behaviour::Slow(9));
    let store = Refusing(store, SharedShard::default());
    let mut shard = Shard::new(transport, responder, store, (&config(), idle));
    shard.responder.begin(Timestamp::ZERO, &mut shard.store);
    let statistics = ShardStatistics::default();
    let authority = Authority { range_epoch: 1, expires_at: None };
    for (order, open_until) in [
        (Order::Authority(Some(authority)), Timestamp::MAX),
        (Order::Move(0..8, NodeId(11)), Timestamp::ZERO),
        (Order::Return(0..8), Timestamp::MAX),
        (Order::Authority(None), Timestamp::ZERO),
    ] {
        shard.execute(order, &statistics);
        assert_eq!(shard.store.1.facts().open_until, open_until);
    }
    assert_eq!(statistics.snapshot().orders, (4, 0));
}

#[test]
fn idle_iterations_zero_quarantined_pages() {
    let (mut shard, _, at) = shard(Behaviour::Slow(9));
    shard.store.write(at.location.page(), 0, b"left over");
    let access = Access { location: at.location, length_bytes: 1, tag: at.tag, space: SPACE };
    for _ in 0..4 {
        let Grant { location, tag } = shard.store.create(SPACE, 1).unwrap();
        shard.store.write(location.page(), 0, b"left over");
        shard.store.delete(Access { location, tag, ..access }, 1).unwrap();
    }
    let (ended, snapshot) = serve(&mut shard, Vec::new());
    ended.unwrap();
    assert_eq!(snapshot.arena.quarantined_pages, 4);
    assert_eq!(shard.store.tidy(100), 0, "all was zeroed");
}

#[test]
fn a_lease_begins_no_earlier_than_its_request_arrived() {
    let (mut shard, session, at) = shard(Behaviour::Slow(9));
    shard.transport.pause = Duration::from_secs(3);
    let numbered = |sequence| Header { session, sequence, length: 1, ..Header::default() };
    // A full batch, and one more request.
    let mut inbox = vec![request(Command::Update, at.to_ipv6(), numbered(1)); 16];
    inbox.push(request(Command::Read, at.to_ipv6(), numbered(2)));
    let (ended, snapshot) = serve(&mut shard, inbox);
    ended.unwrap();
    assert_eq!((snapshot.event(Event::LeaseRepeated), snapshot.replies(Status::Busy)), (15, 1));
}

#[test]
fn a_sender_behind_a_flood_is_served_at_once_and_the_flood_is_limited() {
    const FLOOD: usize = 3000;
    let (flooder, honest, newcomer) = (NodeId(20), NodeId(21), NodeId(22));
    let (mut shard, of_flooder, _) = shard(Behaviour::Slow(64));
    let of_honest = open(&mut shard.responder, &mut shard.store, honest);
    shard.transport.batch_limit = 64;
    let ping = |node, session, number: usize| {
        let header = Header { session, sequence: number as u64, ..Header::default() };
        request_from(node, Command::Ping, server(), header)
    };
    let mut inbox: Vec<_> = (1..=FLOOD).map(|n| ping(flooder, of_flooder, n)).collect();
    inbox.insert(900, ping(honest, of_honest, 1));
    inbox.insert(
        950,
        request_from(
            newcomer,
            Command::Open,
            server(),
            Header { length: 4096, credit: 8, sequence: 1, ..Header::default() },
        ),
    );
    let (ended, snapshot) = serve(&mut shard, inbox);
    ended.unwrap();
    let replies: Vec<_> = shard
        .transport
        .sent
        .iter()
        .map(|payload| HeaderView::new(payload).unwrap().header())
        .collect();
    let place = |session| replies.iter().position(|header| header.session == session);
    assert!(place(of_honest).is_some_and(|place| place <= 4), "{:?}", place(of_honest));
    let others = |header: &Header| ![of_flooder, of_honest].contains(&header.session);
    let opened = replies.iter().position(others);
    assert!(opened.is_some_and(|place| place < 64), "in the first round: {opened:?}");
    // The excess of the flood is dropped before it is parsed; all other requests get a response.
    let dropped = usize::try_from(snapshot.overload_drop_count).unwrap();
    assert!((500..FLOOD).contains(&dropped), "{dropped}");
    assert_eq!(replies.len() + dropped, FLOOD + 2);
}

/// Requests and other servers' lines need the rest. Without any the taker would stand still, and more than a few lines at a
/// time make nothing faster.
#[test]
fn a_taker_asks_for_a_quarter_of_what_its_carrier_holds_within_bounds() {
    let credit_of = |receive_buffer_bytes| {
        let carrier =
            Capabilities { receive_buffer_bytes, ..scripted(Behaviour::Refusing).capabilities };
        (carrier.received_pages(), taker_credit(&carrier))
    };
    assert_eq!(credit_of(0), (0, 16));
    let (pages, credit) = credit_of(4 << 20);
    assert!((64..1024).contains(&pages) && usize::from(credit) == pages / 4, "{pages} {credit}");
    assert_eq!(credit_of(1 << 30).1, 256);
    assert_eq!(credit_of(usize::MAX).1, 256);
}
