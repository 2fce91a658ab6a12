//! Lines move from one server to another and back while clients use them, and the servers restart: real requesters,
//! responders, takers and arenas, over a network that loses, doubles and delays datagrams, and leads first tries astray
//! (`docs/migration.md`).
//!
//! A server that restarts takes over the memory of the process before, and has nothing else of it. What is kept when a
//! process is killed in the middle of a store is tested where the arena is. `points` kills each of those that take part
//! at each step; in `freed` the allocation is freed while its lines move.

#![allow(clippy::cast_possible_truncation, reason = "the numbers of this test are small")]

mod freed;
mod points;

use core::{cmp::Reverse, ops::ControlFlow, time::Duration};
use std::{
    collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap},
    fs,
    net::Ipv6Addr,
    path::PathBuf,
};

use bluebridge_memserver::{Arena, ArenaConfig, ArenaFile, Claim, kept::Holder};
use bluebridge_protocol::{
    Timestamp,
    freer::Freer,
    requester::{
        self, Buffers, Completion, Failure, Migration, Operation, Output, Requester, Server,
    },
    responder::{self, Allowance, Responder},
    store::PageStore as _,
    taker::{Order, Taker},
};
use bluebridge_wire::{
    Datagram, Location, NodeId, Pointer, Space,
    address::{Fields, LINE_PAGES, PAGE_BYTES},
};
use freed::Freed;
use points::{Point, Points};
use rand::{Rng, SeedableRng, rngs::SmallRng};

const SPACE: Space = Space(3);
/// The home of all pages, and the server that takes them.
const HOME: usize = 0;
const OTHER: usize = 1;
const NODES: [NodeId; 2] = [NodeId(9), NodeId(30)];
/// Clients have the node ids from this one on.
const CLIENT: u16 = 100;
const CLIENTS: u16 = 5;
/// The first processes' incarnation, under which lines are taken by the next ones, too.
const INCARNATION: u32 = 2;
const LINES: usize = 16;
const PAGES: usize = LINES * LINE_PAGES;
/// Pages that are written at first; the last ones are free.
const USED: usize = PAGES - 5;
const SEEDS: u64 = 200;

/// Of the test in which servers restart often, each of which takes over a file.
const RESTART_SEEDS: u64 = 80;

/// Requests of clients end after this time.
const PATIENCE: Duration = Duration::from_millis(60);

/// The steps after which a run counts as stuck.
const STEPS: u64 = 300_000;

#[derive(Default)]
struct Memory(HashMap<u64, Vec<u8>>);

impl Buffers for Memory {
    fn outgoing(&self, token: u64) -> &[u8] {
        self.0.get(&token).map_or(&[], Vec::as_slice)
    }

    fn incoming(&mut self, token: u64) -> &mut [u8] {
        self.0.entry(token).or_default()
    }
}

struct Client {
    incarnation: u32,
    requester: Requester,
    memory: Memory,
    /// The page that it changes, and the number of the change.
    job: Option<(usize, u64)>,
    /// What it does in the end: the page that it reads.
    reads: Option<usize>,
}

/// A file in memory that is removed at the end.
struct File(PathBuf);

impl File {
    fn new(index: usize, seed: u64) -> Self {
        let process = std::process::id();
        let thread = std::thread::current().id();
        let name = format!("bluebridge-test-{process}-handover-{thread:?}-{index}-{seed}");
        Self(PathBuf::from("/dev/shm").join(name))
    }

    /// The arena of the next process.
    fn open(&self, index: usize) -> Arena {
        let file = ArenaFile {
            path: self.0.clone(),
            bytes: (2 * PAGES * PAGE_BYTES) as u64,
            shard_count: 1,
            spaces: vec![SPACE],
            claim: Claim::OnDemand,
            is_fresh: false,
            is_direct: false,
        };
        let config = ArenaConfig::default();
        let generation = config.generation;
        let kept = file.open(|_, _| ControlFlow::Continue(())).expect("there is room");
        let holder = Holder { node: NODES[index], generation, token: [7; 16] };
        let mut reserved = kept.assign(holder).expect("it is its own");
        Arena::open(&config, reserved.parts.remove(0)).expect("it is not damaged")
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

struct Host {
    incarnation: u32,
    responder: Responder,
    arena: Arena,
    requester: Requester,
    taker: Option<Taker>,
    freer: Freer,
    /// The requester of `freer`.
    freeing: Requester,
}

impl Host {
    fn new(index: usize, incarnation: u32, file: &File, now: Timestamp, seed: u64) -> Self {
        Self::with(index, incarnation, file.open(index), now, seed)
    }

    fn with(index: usize, incarnation: u32, arena: Arena, now: Timestamp, seed: u64) -> Self {
        let mut arena = arena;
        let seed = seed * 1000 + u64::from(incarnation) * 10 + index as u64;
        let config = responder::Config::new(SPACE, NODES[index], incarnation, seed);
        let mut responder = Responder::new(&config).expect("it is good");
        responder.begin(now, &mut arena);
        let config = requester::Config::new(SPACE, NODES[index], INCARNATION, seed + 5);
        let of_freer = requester::Config::new(SPACE, NODES[index], incarnation, seed + 6);
        Self {
            incarnation,
            responder,
            arena,
            requester: Requester::new(config),
            taker: None,
            freer: Freer::new(SPACE),
            freeing: Requester::new(requester::Config { selector: 1, ..of_freer }),
        }
    }
}

/// A datagram on its way.
struct Packet {
    to: To,
    /// The port of who sent a request.
    from: u16,
    source: Ipv6Addr,
    destination: Ipv6Addr,
    bytes: Vec<u8>,
}

#[derive(Clone, Copy)]
enum To {
    Host(usize),
    Client(usize),
}

/// What the clients know of a page, by the numbers of their changes.
#[derive(Default)]
struct Known {
    /// The last change that was acknowledged.
    done: u64,
    /// Later ones whose outcome is unknown.
    doubtful: BTreeSet<u64>,
}

/// The controller's knowledge of the migration.
#[derive(Clone)]
struct Record {
    migration: Migration,
    giver: usize,
    taker: usize,
    pages: core::ops::Range<u64>,
    is_withdrawn: bool,
}

struct World {
    seed: u64,
    rng: SmallRng,
    now: Timestamp,
    files: [File; 2],
    hosts: [Host; 2],
    clients: Vec<Client>,
    packets: HashMap<u64, Packet>,
    arrivals: BinaryHeap<Reverse<(Timestamp, u64)>>,
    packet_count: u64,
    first: Pointer,
    known: BTreeMap<usize, Known>,
    changes: u64,
    record: Record,
    are_clients_done: bool,
    events: BTreeMap<&'static str, u32>,
    points: Points,
    freed: Freed,
    /// What the home was told of where its lines are.
    told: Option<Vec<(core::ops::Range<u64>, NodeId)>>,
}

fn stamp(page: usize, change: u64) -> Vec<u8> {
    let words = [page as u64, change];
    (0..PAGE_BYTES / 16).flat_map(|_| words.iter().flat_map(|word| word.to_le_bytes())).collect()
}

/// The page and change of a stamp; `None` if the bytes are of none, or of several.
fn read_stamp(bytes: &[u8]) -> Option<(usize, u64)> {
    let word = |at: usize| {
        let word = bytes.get(at..at + 8)?.first_chunk()?;
        Some(u64::from_le_bytes(*word))
    };
    let (page, change) = (usize::try_from(word(0)?).ok()?, word(8)?);
    (bytes == stamp(page, change)).then_some((page, change))
}

impl World {
    fn new(seed: u64) -> Self {
        let now = Timestamp::from_nanos(1_000_000_000);
        let files = [HOME, OTHER].map(|index| File::new(index, seed));
        let mut hosts =
            [HOME, OTHER].map(|index| Host::new(index, INCARNATION, &files[index], now, seed));
        // Two allocations, so that a line has pages of both; the last pages are free.
        let arena = &mut hosts[HOME].arena;
        let grant = arena.create(SPACE, USED as u32).expect("it has room");
        arena.complete(grant.location);
        (0..USED).for_each(|page| arena.write(page as u64, 0, &stamp(page, 0)));
        let (tag, location) = (grant.tag, grant.location);
        let first = Pointer { space: SPACE, node: NODES[HOME], tag, location };
        let clients = (CLIENT..CLIENT + CLIENTS).zip(seed * 100..).map(|(node, seed)| Client {
            incarnation: 1,
            requester: Requester::new(requester::Config::new(SPACE, NodeId(node), 1, seed)),
            memory: Memory::default(),
            job: None,
            reads: None,
        });
        let giver = Server { node: NODES[HOME], shard: 0 };
        Self {
            seed,
            rng: SmallRng::seed_from_u64(seed),
            now,
            files,
            hosts,
            clients: clients.collect(),
            packets: HashMap::new(),
            arrivals: BinaryHeap::new(),
            packet_count: 0,
            first,
            known: (0..USED).map(|page| (page, Known::default())).collect(),
            changes: 0,
            record: Record {
                migration: Migration { id: 4, range_epoch: 8, giver },
                giver: HOME,
                taker: OTHER,
                pages: 0..PAGES as u64,
                is_withdrawn: false,
            },
            are_clients_done: false,
            events: BTreeMap::new(),
            points: Points::default(),
            freed: Freed::default(),
            told: None,
        }
    }

    fn count(&mut self, event: &'static str) {
        *self.events.entry(event).or_default() += 1;
    }

    fn pointer(&self, page: usize) -> Pointer {
        let offset = (page * PAGE_BYTES) as u64;
        let location = Location::new(self.first.location.generation(), offset).expect("inside");
        Pointer { location, ..self.first }
    }

    /// Puts a datagram on its way, none or several times.
    fn send(&mut self, packet: Packet) {
        let copies = match self.rng.random_range(0..20) {
            0..3 => 0,
            3..5 => 2,
            _ => 1,
        };
        for _ in 0..copies {
            let micros = if self.rng.random_bool(0.15) { 40_000 } else { 300 };
            let delay = Duration::from_micros(self.rng.random_range(5..micros));
            self.packet_count += 1;
            self.arrivals.push(Reverse((self.now + delay, self.packet_count)));
            let Packet { to, from, source, destination, ref bytes } = packet;
            let copy = Packet { to, from, source, destination, bytes: bytes.clone() };
            self.packets.insert(self.packet_count, copy);
        }
    }

    /// Where the switch forwards a datagram: one at a pointer anywhere, most of the time to its home; in a third of the
    /// runs, to the other server, as entries for pages that moved do.
    fn route(&mut self, destination: Ipv6Addr) -> To {
        let fields = Fields::unpack(destination).expect("it was packed");
        if fields.node.0 >= CLIENT {
            return To::Client(usize::from(fields.node.0 - CLIENT));
        }
        let host = NODES.iter().position(|node| *node == fields.node).expect("one of the two");
        let share = if self.seed.is_multiple_of(3) { 0.9 } else { 0.1 };
        let is_astray = fields.is_memory() && self.rng.random_bool(share);
        To::Host(if is_astray { 1 - host } else { host })
    }

    /// Sends what requesters have to send.
    fn pump(&mut self) {
        let mut all = Vec::new();
        for client in 0..self.clients.len() {
            let Client { requester, memory, .. } = &mut self.clients[client];
            while let Some(request) = requester.poll_transmit(self.now, memory) {
                let bytes = [request.head(), request.data].concat();
                all.push((client as u16, request.source, request.destination, bytes));
            }
        }
        for host in 0..self.hosts.len() {
            let Host { requester, taker, arena, freer, freeing, .. } = &mut self.hosts[host];
            while let Some(request) = freeing.poll_transmit(self.now, freer) {
                let bytes = [request.head(), request.data].concat();
                all.push((1000, request.source, request.destination, bytes));
            }
            let Some(taker) = taker else { continue };
            while let Some(request) = requester.poll_transmit(self.now, &taker.in_store(arena)) {
                let bytes = [request.head(), request.data].concat();
                all.push((1000, request.source, request.destination, bytes));
            }
        }
        for (from, source, destination, bytes) in all {
            let to = self.route(destination);
            if self.reach_with(source, destination, &bytes) {
                self.send(Packet { to, from, source, destination, bytes });
            }
        }
        self.kill_due();
    }

    /// Sends a server's replies.
    fn drain(&mut self, host: usize) {
        let mut replies = Vec::new();
        let Host { responder, arena, .. } = &mut self.hosts[host];
        while let Some(reply) = responder.poll_transmit(arena) {
            let bytes = [reply.head, reply.data].concat();
            replies.push((reply.source, reply.destination, bytes));
        }
        for (source, destination, bytes) in replies {
            let to = self.route(destination);
            if self.reach_with(source, destination, &bytes) {
                self.send(Packet { to, from: 0, source, destination, bytes });
            }
        }
    }

    /// Goes on to the next moment at which something happens.
    fn step(&mut self) {
        let now = self.now;
        for Host { taker, requester, responder, arena, .. } in &mut self.hosts {
            for taker in taker.iter_mut() {
                taker.poll(now, (&mut *requester, &mut *responder), arena);
            }
        }
        for host in 0..self.hosts.len() {
            self.drain(host);
            let Host { responder, arena, freer, freeing, .. } = &mut self.hosts[host];
            freer.poll(now, (freeing, responder), &|_, _| None, arena);
            self.drain(host);
        }
        self.pump();
        let arrival = self.arrivals.peek().map(|Reverse((at, _))| *at);
        let timers = self.clients.iter().filter_map(|client| client.requester.poll_timeout());
        let hosts = self.hosts.iter().flat_map(|host| {
            let taker = host.taker.as_ref().and_then(Taker::poll_timeout);
            let freer = [host.freeing.poll_timeout(), host.freer.poll_timeout()];
            let others = [host.responder.poll_timeout(), host.requester.poll_timeout(), taker];
            others.into_iter().chain(freer)
        });
        let next = timers.chain(arrival).chain(hosts.flatten()).min();
        self.now = next.map_or(self.now, |next| next.max(self.now));
        while let Some(&Reverse((at, number))) = self.arrivals.peek()
            && at <= self.now
        {
            self.arrivals.pop();
            let packet = self.packets.remove(&number).expect("it was sent once");
            self.arrive(&packet);
            self.kill_due();
        }
        for host in 0..self.hosts.len() {
            while let Host { responder, arena, .. } = &mut self.hosts[host]
                && responder.handle_timeout(self.now, arena).is_err()
            {
                self.drain(host);
            }
            self.drain(host);
            let Host { requester, responder, arena, taker, freer, freeing, .. } =
                &mut self.hosts[host];
            freeing.handle_timeout(self.now);
            while let Some(completion) = freeing.poll_completion() {
                freer.heard(self.now, &completion);
            }
            requester.handle_timeout(self.now);
            let mut is_served = false;
            while let Some(completion) = requester.poll_completion() {
                if let Some(taker) = taker {
                    let before = taker.progress().here;
                    taker.heard(self.now, &completion, (&mut *requester, &mut *responder), arena);
                    is_served |= taker.progress().here > before;
                }
            }
            if is_served {
                self.reach(Point::Served);
            }
            self.kill_due();
        }
        for client in 0..self.clients.len() {
            self.clients[client].requester.handle_timeout(self.now);
            while let Some(completion) = self.clients[client].requester.poll_completion() {
                self.client_hears(client, &completion);
            }
        }
    }

    fn arrive(&mut self, packet: &Packet) {
        let datagram = Datagram::parse(packet.source, packet.destination, &packet.bytes);
        let datagram = datagram.expect("what was sent is well formed");
        match packet.to {
            To::Client(client) => {
                let Client { requester, memory, .. } = &mut self.clients[client];
                requester.handle_datagram(self.now, &datagram, memory);
            }
            To::Host(host) if datagram.is_reply() => {
                let Host { requester, taker, arena, freer, freeing, .. } = &mut self.hosts[host];
                freeing.handle_datagram(self.now, &datagram, freer);
                if let Some(taker) = taker {
                    requester.handle_datagram(self.now, &datagram, &mut taker.in_store(arena));
                }
            }
            To::Host(host) => {
                while let Host { responder, arena, .. } = &mut self.hosts[host]
                    && responder.handle_datagram(self.now, packet.from, &datagram, arena).is_err()
                {
                    self.drain(host);
                }
                self.drain(host);
            }
        }
    }

    /// A client without a job gets one: it changes a page of its own, by WRITE, or by UPDATE and COMMIT.
    fn keep_clients_busy(&mut self) {
        for client in 0..self.clients.len() {
            if self.clients[client].job.is_some() || self.are_clients_done {
                continue;
            }
            let pages: Vec<_> = (client..USED).step_by(self.clients.len()).collect();
            let page = pages[self.rng.random_range(0..pages.len())];
            self.changes += 1;
            let change = self.changes;
            self.clients[client].job = Some((page, change));
            let (pointer, length) = (self.pointer(page), PAGE_BYTES as u32);
            let operation = if self.rng.random_bool(0.3) {
                Operation::Update { pointer, length, lease_ms: 30, wait: true }
            } else {
                self.known.get_mut(&page).expect("it is known").doubtful.insert(change);
                Operation::Write { pointer, length }
            };
            self.start(client, operation, stamp(page, change));
        }
    }

    fn start(&mut self, client: usize, operation: Operation, bytes: Vec<u8>) {
        let Client { requester, memory, .. } = &mut self.clients[client];
        memory.0.insert(1, bytes);
        let deadline = self.now + PATIENCE;
        requester.start_until(self.now, operation, 1, deadline).expect("there is room");
    }

    fn client_hears(&mut self, client: usize, completion: &Completion) {
        if self.freed.is_of(client) {
            return self.freed.hear(completion);
        }
        if let Some(page) = self.clients[client].reads {
            return self.was_read(client, page, completion.result);
        }
        let (page, change) = self.clients[client].job.take().expect("it had a job");
        let pointer = self.pointer(page);
        match completion.result {
            Ok(Output::Leased(lease)) => {
                // Some owners are slow, or forget their lease.
                if self.rng.random_bool(0.2) {
                    return;
                }
                self.known.get_mut(&page).expect("it is known").doubtful.insert(change);
                self.clients[client].job = Some((page, change));
                let length = PAGE_BYTES as u32;
                let commit = Operation::Commit { pointer, length, epoch: lease.epoch };
                self.start(client, commit, stamp(page, change));
            }
            Ok(_) => {
                let known = self.known.get_mut(&page).expect("it is known");
                known.done = change;
                // What was asked before is executed no more.
                known.doubtful.retain(|doubtful| *doubtful > change);
                self.count("changed");
            }
            Err(Failure::OutcomeUnknown { .. }) => self.count("unknown"),
            Err(failure) => {
                let is_fair = matches!(
                    failure,
                    Failure::Busy { .. }
                        | Failure::TimedOut { .. }
                        | Failure::Unreachable { .. }
                        | Failure::LeaseLost { .. }
                        | Failure::Refused { .. }
                        | Failure::TooManyHops { .. }
                );
                assert!(is_fair, "seed {}: {failure:?}", self.seed);
                self.count("failed");
                self.known.get_mut(&page).expect("it is known").doubtful.remove(&change);
            }
        }
    }

    /// Allows the migration, as the controller does, and orders it.
    fn allow(&mut self) {
        self.allow_at_giver();
        self.order();
    }

    fn allow_at_giver(&mut self) {
        let allowances = self.allowances();
        let giver = &mut self.hosts[self.record.giver];
        for allowance in allowances {
            giver.responder.allow(&allowance, &mut giver.arena).expect("good terms");
        }
    }

    /// What the giver is to allow: the places of the range in its store.
    fn allowances(&self) -> Vec<Allowance> {
        let Record { migration, giver, taker, ref pages, .. } = self.record;
        let allowance = |pages| Allowance {
            migration: migration.id,
            range_epoch: migration.range_epoch,
            pages,
            space: SPACE,
            taker: NODES[taker],
            taker_incarnation: INCARNATION,
        };
        rows(&self.hosts[giver], pages).into_iter().map(allowance).collect()
    }

    /// Orders the migration, or goes on with it after a restart of the taker.
    fn order(&mut self) {
        let Record { migration, taker, ref pages, is_withdrawn, .. } = self.record;
        let order = Order {
            migration,
            space: SPACE,
            home: NODES[HOME],
            generation: self.hosts[HOME].arena.generation(),
            pages: pages.clone(),
            incarnation: INCARNATION,
        };
        let Host { arena, taker: place, .. } = &mut self.hosts[taker];
        let mut taker = Taker::new(order, NODES[taker], 7, arena).expect("there is room");
        taker.begin();
        if is_withdrawn {
            taker.stop();
        }
        *place = Some(taker);
    }

    /// A server ends, and goes on as another process with the same memory.
    fn restart(&mut self, host: usize) {
        let incarnation = self.hosts[host].incarnation + 1;
        // Two processes never have the same file.
        self.hosts[host].arena = Arena::on_heap(&ArenaConfig::default(), 8);
        let file = &self.files[host];
        self.hosts[host] = Host::new(host, incarnation, file, self.now, self.seed);
        self.count(if host == self.record.giver { "giver restarts" } else { "taker restarts" });
        if host == self.record.taker {
            self.order();
        }
    }

    fn withdraw(&mut self) {
        let Record { migration, giver, taker, .. } = self.record;
        let Host { responder, arena, .. } = &mut self.hosts[giver];
        responder.withdraw(self.now, migration.id, arena).expect("it is known");
        self.drain(giver);
        self.record.is_withdrawn = true;
        self.hosts[taker].taker.as_mut().expect("it takes").stop();
    }

    fn is_over(&self) -> bool {
        self.hosts[self.record.taker].taker.as_ref().is_some_and(Taker::is_over)
    }

    fn run(&mut self, restarts: f64, mut each: impl FnMut(&mut Self, u64)) {
        for step in 0..STEPS {
            if self.is_over() {
                return;
            }
            if self.rng.random_bool(restarts) {
                let host = self.rng.random_range(0..2);
                self.restart(host);
            }
            self.keep_clients_busy();
            self.step();
            each(self, step);
        }
        let taker = self.hosts[self.record.taker].taker.as_ref();
        panic!("seed {}: some lines are on their way: {:?}", self.seed, taker.map(Taker::progress));
    }

    /// Closes the migration; returns the lines that moved.
    fn close(&mut self) -> BTreeSet<usize> {
        if !self.record.is_withdrawn {
            self.withdraw();
        }
        let Record { migration, giver, taker, .. } = self.record;
        let line = |page: u64| page as usize / LINE_PAGES;
        let of_taker = self.hosts[taker].taker.as_ref().expect("it takes");
        let here: BTreeSet<_> =
            of_taker.rows().flat_map(|row| line(row.pages.start)..line(row.pages.end)).collect();
        let marked = self.hosts[giver].responder.given(migration.id).expect("it is known");
        let marked = marked.map(|row| (row.end - row.start) as usize / LINE_PAGES).sum::<usize>();
        assert_eq!(here.len(), marked, "seed {}: each line has one server", self.seed);
        let taker = self.hosts[taker].taker.take().expect("it takes");
        taker.finish(&mut self.hosts[self.record.taker].arena);
        self.drain(giver);
        let Host { responder, arena, .. } = &mut self.hosts[giver];
        assert_eq!(responder.close_migration(migration.id, arena), Ok(()));
        here
    }

    /// Every page is what the clients know, whoever serves it.
    fn check(&mut self) {
        self.are_clients_done = true;
        for page in 0..USED {
            let reader = (page + 1) % self.clients.len();
            for _ in 0..STEPS {
                if self.clients.iter().all(|client| client.job.is_none()) {
                    break;
                }
                self.step();
            }
            self.clients[reader].reads = Some(page);
            self.read(reader, page);
            for step in 0.. {
                if self.clients[reader].reads.is_none() {
                    break;
                }
                assert!(step < STEPS, "seed {}: page {page} is not read", self.seed);
                self.step();
            }
        }
        self.are_clients_done = false;
    }

    fn read(&mut self, client: usize, page: usize) {
        let read = Operation::Read { pointer: self.pointer(page), length: PAGE_BYTES as u32 };
        self.start(client, read, vec![0; PAGE_BYTES]);
    }

    fn was_read(&mut self, client: usize, page: usize, result: Result<Output, Failure>) {
        if let Err(failure) = result {
            // The network loses a lot, and servers may have restarted.
            let is_fair = matches!(
                failure,
                Failure::TimedOut { .. } | Failure::Unreachable { .. } | Failure::Busy { .. }
            );
            assert!(is_fair, "seed {}: page {page}: {failure:?}", self.seed);
            return self.read(client, page);
        }
        self.clients[client].reads = None;
        let bytes = &self.clients[client].memory.0[&1];
        let (of, change) = read_stamp(bytes).expect("it is one change");
        let known = &self.known[&page];
        let is_known = change == known.done || known.doubtful.contains(&change);
        let seed = self.seed;
        assert!(of == page && is_known, "seed {seed}, page {page}: {change}, {}", known.done);
    }

    /// What moved goes home again, in another migration.
    fn send_back(&mut self, lines: &BTreeSet<usize>) {
        let (Some(first), Some(last)) = (lines.first(), lines.last()) else { return };
        let giver = Server { node: NODES[OTHER], shard: 0 };
        let id = self.record.migration.id + 1;
        self.record = Record {
            migration: Migration { id, range_epoch: 9, giver },
            giver: OTHER,
            taker: HOME,
            pages: (first * LINE_PAGES) as u64..((last + 1) * LINE_PAGES) as u64,
            is_withdrawn: false,
        };
    }
}

/// Where the pages of a range are in a server's store.
fn rows(host: &Host, pages: &core::ops::Range<u64>) -> Vec<core::ops::Range<u64>> {
    let adopted = host.responder.adopted();
    if adopted.is_empty() {
        return vec![pages.clone()];
    }
    let of_range = adopted.iter().filter(|range| pages.contains(&range.first_page));
    of_range.map(|range| range.local_page..range.local_page + range.page_count).collect()
}

fn sums(worlds: &[BTreeMap<&'static str, u32>]) -> BTreeMap<&'static str, u32> {
    let mut sums = BTreeMap::new();
    for (event, count) in worlds.iter().flatten() {
        *sums.entry(*event).or_default() += count;
    }
    sums
}

#[test]
fn lines_move_and_return_while_clients_change_them() {
    let mut events = Vec::new();
    for seed in 0..SEEDS {
        println!("seed {seed}");
        let mut world = World::new(seed);
        world.allow();
        world.run(0.0, |_, _| {});
        let moved = world.close();
        assert_eq!(moved.len(), LINES);
        world.check();
        let usage = world.hosts[HOME].arena.arena_usage();
        assert_eq!(usage.used_pages, 0, "the home's memory is free");
        world.send_back(&moved);
        world.allow();
        world.run(0.0, |_, _| {});
        assert_eq!(world.close().len(), LINES);
        world.check();
        assert_eq!(world.hosts[OTHER].arena.arena_usage().used_pages, 0, "nothing is left there");
        events.push(world.events);
    }
    let sums = sums(&events);
    println!("{sums:?}");
    assert!(sums["changed"] > 1000, "they were busy: {sums:?}");
}

#[test]
fn servers_that_restart_with_their_memory_lose_no_line() {
    let mut events = Vec::new();
    for seed in 0..RESTART_SEEDS {
        println!("seed {seed}");
        let mut world = World::new(seed);
        world.allow();
        world.run(0.01, |_, _| {});
        let moved = world.close();
        assert_eq!(moved.len(), LINES);
        world.check();
        // What is not together in the store of its server is in migrations of its own.
        let mut returned = 0;
        for range in world.hosts[OTHER].responder.adopted().to_vec() {
            let first = range.first_page as usize / LINE_PAGES;
            let end = first + range.page_count as usize / LINE_PAGES;
            world.send_back(&(first..end).collect());
            world.allow();
            world.run(0.01, |_, _| {});
            returned += world.close().len();
        }
        assert_eq!(returned, LINES);
        world.check();
        assert_eq!(world.hosts[OTHER].arena.arena_usage().used_pages, 0, "nothing is left there");
        events.push(world.events);
    }
    let sums = sums(&events);
    println!("{sums:?}");
    assert!(sums["giver restarts"] > 100 && sums["taker restarts"] > 100, "{sums:?}");
}

#[test]
fn a_migration_that_is_withdrawn_leaves_each_line_at_one_server() {
    let (mut moved, mut stayed) = (0, 0);
    for seed in 0..SEEDS {
        println!("seed {seed}");
        let mut world = World::new(seed);
        world.allow();
        let at = world.rng.random_range(0..1500);
        world.run(0.002, |world, step| {
            if step == at {
                world.withdraw();
            }
        });
        let lines = world.close();
        moved += lines.len();
        stayed += LINES - lines.len();
        world.check();
        // Its reserved places are free again.
        let used = world.hosts[OTHER].arena.arena_usage().used_pages;
        assert_eq!(used, (lines.len() * LINE_PAGES) as u64);
    }
    println!("{moved} lines moved, {stayed} stayed");
    assert!(moved > 20 && stayed > 20, "both ends are reached");
}

#[test]
fn an_order_is_refused_if_there_is_no_room_for_its_first_line() {
    let mut arena = Arena::on_heap(&ArenaConfig::default(), 4 * LINE_PAGES as u32);
    let order = |lines: u64| Order {
        migration: Migration {
            id: 1,
            range_epoch: 1,
            giver: Server { node: NODES[HOME], shard: 0 },
        },
        space: SPACE,
        home: NODES[HOME],
        generation: arena.generation(),
        pages: 0..lines * LINE_PAGES as u64,
        incarnation: INCARNATION,
    };
    let (small, large) = (order(4), order(5));
    // Lines that are free stay at home, so a range may be larger than the room.
    let mut other = Arena::on_heap(&ArenaConfig::default(), 4 * LINE_PAGES as u32);
    let taker = Taker::new(large.clone(), NODES[OTHER], 1, &mut other).expect("one line fits");
    assert_eq!(taker.progress().all, 5);
    let taker = Taker::new(small.clone(), NODES[OTHER], 1, &mut arena).expect("all lines fit");
    assert_eq!(taker.progress().all, 4);
    for (number, order) in [(2, small), (3, large)] {
        assert!(Taker::new(order, NODES[OTHER], number, &mut arena).is_err(), "all is reserved");
    }
}
