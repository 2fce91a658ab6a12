//! A server takes lines from another one while clients use them: requesters, the responder and a real arena, over a
//! network that loses, doubles and delays datagrams (`docs/migration.md`).
//!
//! The taker here takes and keeps lines, and does not serve them: what it would serve is compared with what the clients
//! know, at the end.

#![allow(clippy::cast_possible_truncation, reason = "the numbers of this test are small")]

use core::{cmp::Reverse, time::Duration};
use std::{
    collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap},
    net::Ipv6Addr,
};

use bluebridge_memserver::{Arena, ArenaConfig};
use bluebridge_protocol::{
    Timestamp,
    requester::{
        self, Buffers, Completion, Failure, Migration, Operation, Output, Requester, Server,
    },
    responder::{self, Allowance, Responder},
    store::PageStore as _,
};
use bluebridge_wire::{
    Datagram, Fence, LeaseEnd, LinePage, Location, NodeId, Pointer, Space, Status, Tag,
    address::{Fields, LINE_BYTES, LINE_PAGES, PAGE_BYTES},
    line::{LINE_RECORD_BYTES, PageContents, Part, parse_line},
};
use rand::{Rng, SeedableRng, rngs::SmallRng};

const SPACE: Space = Space(3);
const GIVER: NodeId = NodeId(9);
const TAKER: NodeId = NodeId(30);
/// Clients have the node ids from this one on.
const CLIENT: u16 = 100;
const CLIENTS: u16 = 5;
const LINES: usize = 16;
const PAGES: usize = LINES * LINE_PAGES;
const SEEDS: u64 = 300;

const MIGRATION: Migration =
    Migration { id: 4, range_epoch: 8, giver: Server { node: GIVER, shard: 0 } };

/// Requests of clients end after this time: when their line has moved, nobody answers them.
const PATIENCE: Duration = Duration::from_millis(60);

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

struct Endpoint {
    requester: Requester,
    memory: Memory,
}

impl Endpoint {
    fn new(node: NodeId, seed: u64) -> Self {
        let config = requester::Config::new(SPACE, node, 1, seed);
        Self { requester: Requester::new(config), memory: Memory::default() }
    }
}

/// A datagram on its way: to the giver, or to an endpoint.
struct Packet {
    to: Option<usize>,
    from: usize,
    source: Ipv6Addr,
    destination: Ipv6Addr,
    bytes: Vec<u8>,
}

/// What the clients know of a page, by the numbers of their changes.
#[derive(Default)]
struct Known {
    /// The last change that was acknowledged.
    done: u64,
    /// Later ones whose outcome is unknown.
    doubtful: BTreeSet<u64>,
}

/// How far the taker is with a line.
#[derive(Clone, Debug, Default)]
struct Staged {
    epoch: u64,
    pages: Vec<LinePage>,
    /// Pages that are being read.
    reading: usize,
    has_failed: bool,
    /// Clients that the giver had seen when KEEP was sent first.
    seen: Vec<NodeId>,
}

/// What happened in all runs together.
#[derive(Debug, Default)]
struct Totals {
    take_failed: u32,
    read_failed: u32,
    lease_lost: u32,
    doubts: u32,
    keep_parts: u32,
    unknown: u32,
    busy: u32,
}

#[derive(Clone, Debug, Default, PartialEq)]
enum Line {
    #[default]
    Idle,
    Busy,
    /// With its bytes.
    Kept(Vec<u8>),
    /// It stays the giver's.
    Given,
}

struct World {
    rng: SmallRng,
    now: Timestamp,
    giver: Responder,
    arena: Arena,
    endpoints: Vec<Endpoint>,
    packets: HashMap<u64, Packet>,
    arrivals: BinaryHeap<Reverse<(Timestamp, u64)>>,
    packet_count: u64,
    first: Pointer,
    known: BTreeMap<usize, Known>,
    /// What each client does: page, number of the change, lease.
    jobs: Vec<Option<(usize, u64)>>,
    changes: u64,
    lines: Vec<(Line, Staged)>,
    /// The number of the last fence that the taker knows, and all of them.
    fences: (u32, BTreeMap<NodeId, u32>),
    is_withdrawn: bool,
    totals: Totals,
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
        let mut giver =
            Responder::new(&responder::Config::new(SPACE, GIVER, 2, seed)).expect("it is good");
        let mut arena = Arena::on_heap(&ArenaConfig::default(), 2 * PAGES as u32);
        giver.begin(now, &mut arena);
        // Two allocations, so that a line has pages of both; a page after each is free or not used yet.
        let grant = arena.create(SPACE, PAGES as u32 - 5).expect("it has room");
        arena.complete(grant.location);
        for page in 0..PAGES - 5 {
            arena.write(page as u64, 0, &stamp(page, 0));
        }
        let first = Pointer { space: SPACE, node: GIVER, tag: grant.tag, location: grant.location };
        let nodes = [TAKER].into_iter().chain((0..CLIENTS).map(|client| NodeId(CLIENT + client)));
        Self {
            rng: SmallRng::seed_from_u64(seed),
            now,
            giver,
            arena,
            endpoints: nodes
                .zip(seed * 100..)
                .map(|(node, seed)| Endpoint::new(node, seed))
                .collect(),
            packets: HashMap::new(),
            arrivals: BinaryHeap::new(),
            packet_count: 0,
            first,
            known: (0..PAGES - 5).map(|page| (page, Known::default())).collect(),
            jobs: vec![None; usize::from(CLIENTS) + 1],
            changes: 0,
            lines: vec![Default::default(); LINES],
            fences: Default::default(),
            is_withdrawn: false,
            totals: Totals::default(),
        }
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

    /// Sends what the endpoints have to send.
    fn pump(&mut self) {
        for from in 0..self.endpoints.len() {
            let mut packets = Vec::new();
            let Endpoint { requester, memory } = &mut self.endpoints[from];
            while let Some(request) = requester.poll_transmit(self.now, memory) {
                let bytes = [request.head(), request.data].concat();
                let (source, destination) = (request.source, request.destination);
                packets.push(Packet { to: None, from, source, destination, bytes });
            }
            for packet in packets {
                let node = Fields::unpack(packet.destination).map(|fields| fields.node);
                // Others serve nothing.
                if node == Some(GIVER) {
                    self.send(packet);
                }
            }
        }
    }

    fn drain(&mut self) {
        let mut packets = Vec::new();
        while let Some(reply) = self.giver.poll_transmit(&self.arena) {
            let to = Some(usize::from(reply.destination_port));
            let bytes = [reply.head, reply.data].concat();
            let (source, destination) = (reply.source, reply.destination);
            packets.push(Packet { to, from: 0, source, destination, bytes });
        }
        packets.into_iter().for_each(|packet| self.send(packet));
    }

    /// Goes on to the next moment at which something happens.
    fn step(&mut self) {
        self.pump();
        let arrival = self.arrivals.peek().map(|Reverse((at, _))| *at);
        let timers = self.endpoints.iter().filter_map(|endpoint| endpoint.requester.poll_timeout());
        let next = timers.chain(arrival).chain(self.giver.poll_timeout()).min();
        self.now = next.map_or(self.now, |next| next.max(self.now));
        while let Some(&Reverse((at, number))) = self.arrivals.peek()
            && at <= self.now
        {
            self.arrivals.pop();
            let packet = self.packets.remove(&number).expect("it was sent once");
            self.arrive(&packet);
        }
        while self.giver.handle_timeout(self.now, &mut self.arena).is_err() {
            self.drain();
        }
        self.drain();
        for endpoint in &mut self.endpoints {
            endpoint.requester.handle_timeout(self.now);
        }
        for endpoint in 0..self.endpoints.len() {
            while let Some(completion) = self.endpoints[endpoint].requester.poll_completion() {
                match endpoint {
                    0 => self.taker_hears(&completion),
                    _ => self.client_hears(endpoint, &completion),
                }
            }
        }
    }

    fn arrive(&mut self, packet: &Packet) {
        let datagram = Datagram::parse(packet.source, packet.destination, &packet.bytes);
        let datagram = datagram.expect("what was sent is well formed");
        match packet.to {
            Some(endpoint) => {
                let Endpoint { requester, memory } = &mut self.endpoints[endpoint];
                requester.handle_datagram(self.now, &datagram, memory);
            }
            None => {
                let port = packet.from as u16;
                while self
                    .giver
                    .handle_datagram(self.now, port, &datagram, &mut self.arena)
                    .is_err()
                {
                    self.drain();
                }
                self.drain();
            }
        }
    }

    /// A client without a job gets one: it changes a page of its own, by WRITE, or by UPDATE and COMMIT.
    fn keep_clients_busy(&mut self) {
        for client in 1..self.endpoints.len() {
            if self.jobs[client].is_some() {
                continue;
            }
            let pages = self.known.keys().filter(|page| *page % usize::from(CLIENTS) == client - 1);
            let pages: Vec<_> = pages.copied().collect();
            let page = pages[self.rng.random_range(0..pages.len())];
            self.changes += 1;
            let change = self.changes;
            self.jobs[client] = Some((page, change));
            let (pointer, length) = (self.pointer(page), PAGE_BYTES as u32);
            let operation = if self.rng.random_bool(0.3) {
                Operation::Update { pointer, length, lease_ms: 30, wait: true }
            } else {
                self.known.get_mut(&page).expect("it is known").doubtful.insert(change);
                Operation::Write { pointer, length }
            };
            let bytes = stamp(page, change);
            self.start(client, operation, bytes, 1, PATIENCE);
        }
    }

    fn start(
        &mut self,
        endpoint: usize,
        operation: Operation,
        bytes: Vec<u8>,
        token: u64,
        patience: Duration,
    ) {
        let Endpoint { requester, memory } = &mut self.endpoints[endpoint];
        memory.0.insert(token, bytes);
        let deadline = self.now + patience;
        requester.start_until(self.now, operation, token, deadline).expect("there is room");
    }

    fn client_hears(&mut self, client: usize, completion: &Completion) {
        let (page, change) = self.jobs[client].take().expect("it had a job");
        let pointer = self.pointer(page);
        match completion.result {
            Ok(Output::Leased(lease)) => {
                // Some owners are slow, or forget their lease.
                if self.rng.random_bool(0.2) {
                    return;
                }
                self.known.get_mut(&page).expect("it is known").doubtful.insert(change);
                self.jobs[client] = Some((page, change));
                let length = PAGE_BYTES as u32;
                let commit = Operation::Commit { pointer, length, epoch: lease.epoch };
                self.start(client, commit, stamp(page, change), 1, PATIENCE);
            }
            Ok(_) => {
                let known = self.known.get_mut(&page).expect("it is known");
                known.done = change;
                // What was asked before is executed no more.
                known.doubtful.retain(|doubtful| *doubtful > change);
            }
            Err(Failure::OutcomeUnknown { .. }) => self.totals.unknown += 1,
            Err(failure) => {
                self.totals.busy += u32::from(matches!(failure, Failure::Busy { .. }));
                self.known.get_mut(&page).expect("it is known").doubtful.remove(&change);
            }
        }
    }

    fn line_pointer(&self, line: usize) -> Pointer {
        let location = Location::new(self.arena.generation(), (line * LINE_BYTES) as u64);
        Pointer { tag: Tag(0), location: location.expect("inside"), ..self.first }
    }

    /// The taker takes the next line, four at once.
    fn keep_taker_busy(&mut self) {
        let busy = self.lines.iter().filter(|(line, _)| *line == Line::Busy).count();
        let idle = self.lines.iter().position(|(line, _)| *line == Line::Idle);
        if let Some(line) = idle.filter(|_| busy < 4) {
            self.lines[line] = (Line::Busy, Staged::default());
            let take = Operation::Take {
                migration: MIGRATION,
                pointer: self.line_pointer(line),
                lease_ms: 60,
                wait: true,
            };
            let patience = Duration::from_millis(100);
            self.start(0, take, vec![0; LINE_RECORD_BYTES], token(line, 0), patience);
        }
    }

    fn taker_hears(&mut self, completion: &Completion) {
        let (line, what) = ((completion.token / 16) as usize, completion.token % 16);
        let bytes = self.endpoints[0].memory.0.remove(&completion.token).unwrap_or_default();
        match (what, completion.result) {
            (0, Ok(Output::Leased(lease))) => self.taken(line, lease.epoch, &bytes),
            (0, Err(Failure::Refused { status: Status::StaleRangeEpoch, .. }))
                if self.is_withdrawn =>
            {
                self.lines[line].0 = Line::Given;
            }
            (0, Err(failure)) => {
                let is_late =
                    !matches!(failure, Failure::Refused { .. } | Failure::Violation { .. });
                assert!(
                    is_late || matches!(failure, Failure::Refused { status: Status::Busy, .. })
                );
                self.totals.take_failed += 1;
                self.lines[line].0 = Line::Idle;
            }
            (1, result) => self.heard_of_keep(line, result, &bytes),
            (page, result) => {
                let staged = &mut self.lines[line].1;
                staged.reading -= 1;
                staged.has_failed |= result.is_err();
                self.endpoints[0].memory.0.insert(token(line, page), bytes);
                if self.lines[line].1.reading == 0 {
                    self.read(line);
                }
            }
        }
    }

    fn taken(&mut self, line: usize, epoch: u64, record: &[u8]) {
        let pages = parse_line(record).expect("the giver's record is good");
        let written: Vec<_> = (0..LINE_PAGES)
            .filter(|page| {
                let LinePage { part, contents, .. } = pages[*page];
                part != Part::Free && contents == PageContents::Written
            })
            .collect();
        self.lines[line].1 =
            Staged { epoch, pages: pages.to_vec(), reading: written.len(), ..Staged::default() };
        for page in &written {
            let (generation, tag) = pages[*page].colour.expect("it was allocated");
            let offset = ((line * LINE_PAGES + page) * PAGE_BYTES) as u64;
            let location = Location::new(generation, offset).expect("inside");
            let read = Operation::ReadTaken {
                giver: MIGRATION.giver,
                pointer: Pointer { tag, location, ..self.first },
                length: PAGE_BYTES as u32,
                epoch,
            };
            let token = token(line, *page as u64 + 2);
            self.start(0, read, vec![0; PAGE_BYTES], token, Duration::from_millis(80));
        }
        if written.is_empty() {
            self.read(line);
        }
    }

    /// All pages were read, or not.
    fn read(&mut self, line: usize) {
        if self.lines[line].1.has_failed {
            // Nothing was asked yet, so the line is the giver's for sure.
            self.totals.read_failed += 1;
            self.lines[line].0 = Line::Idle;
            return;
        }
        let seen = self.known.iter().filter(|(_, known)| known.done > 0);
        let seen = seen.map(|(page, _)| NodeId(CLIENT + (page % usize::from(CLIENTS)) as u16));
        self.lines[line].1.seen = seen.collect();
        self.ask_to_keep(line);
    }

    fn ask_to_keep(&mut self, line: usize) {
        let epoch = self.lines[line].1.epoch;
        let pointer = self.line_pointer(line);
        let known = self.fences.0;
        let keep = Operation::Keep { migration: MIGRATION, pointer, epoch, known };
        self.start(0, keep, vec![0; LINE_RECORD_BYTES], token(line, 1), Duration::from_millis(40));
    }

    fn heard_of_keep(&mut self, line: usize, result: Result<Output, Failure>, bytes: &[u8]) {
        match result {
            Ok(Output::Kept { bytes: count, known, is_all }) => {
                let fences = Fence::parse_all(&bytes[..usize::from(count)]);
                for Fence { node, incarnation } in fences {
                    let fence = self.fences.1.entry(node).or_default();
                    *fence = incarnation.max(*fence);
                }
                self.fences.0 = self.fences.0.max(known);
                self.totals.keep_parts += u32::from(!is_all);
                if is_all { self.adopt(line) } else { self.ask_to_keep(line) }
            }
            Err(Failure::LeaseLost { how, .. }) => {
                self.totals.lease_lost += 1;
                let is_over = how == LeaseEnd::Withdrawn;
                assert!(!is_over || self.is_withdrawn);
                self.lines[line].0 = if is_over { Line::Given } else { Line::Idle };
            }
            // It is in doubt.
            Err(_) => {
                self.totals.doubts += 1;
                self.ask_to_keep(line);
            }
            Ok(other) => panic!("{other:?} is no answer to KEEP"),
        }
    }

    /// The line is the taker's: what it would serve.
    fn adopt(&mut self, line: usize) {
        let staged = self.lines[line].1.clone();
        let mut bytes = vec![0; LINE_BYTES];
        for (page, place) in (0..).zip(bytes.chunks_mut(PAGE_BYTES)) {
            let read = self.endpoints[0].memory.0.remove(&token(line, page + 2));
            if let Some(read) = read {
                place.copy_from_slice(&read);
            }
        }
        // The giver changes nothing of it any more.
        let now = self.arena.line((line * LINE_PAGES) as u64).expect("it is there").pages;
        assert_eq!(staged.pages, now, "line {line}");
        for client in staged.seen {
            assert_eq!(self.fences.1.get(&client), Some(&1), "its old incarnations are refused");
        }
        self.lines[line].0 = Line::Kept(bytes);
    }

    /// Whether the taker knows of each line whose it is.
    fn is_over(&self) -> bool {
        self.lines.iter().all(|(line, _)| matches!(line, Line::Kept(_) | Line::Given))
    }

    fn run(&mut self, steps: u64, mut each: impl FnMut(&mut Self, u64)) {
        for step in 0..steps {
            if self.is_over() {
                return;
            }
            self.keep_clients_busy();
            self.keep_taker_busy();
            self.step();
            each(self, step);
        }
        panic!("after {steps} steps some lines are on their way: {:?}", self.lines);
    }

    fn withdraw(&mut self) {
        self.giver.withdraw(self.now, MIGRATION.id, &mut self.arena).expect("it is known");
        self.drain();
        self.is_withdrawn = true;
    }

    /// Compares what each server would serve with what the clients know.
    fn check(&mut self) {
        let marked: BTreeSet<_> = self
            .giver
            .given(MIGRATION.id)
            .expect("it is known")
            .flatten()
            .map(|page| page as usize / LINE_PAGES)
            .collect();
        for (line, (state, _)) in self.lines.iter().enumerate() {
            let is_kept = matches!(state, Line::Kept(_));
            assert_eq!(is_kept, marked.contains(&line), "line {line} has one server");
        }
        for (page, known) in &self.known {
            let (line, in_line) = (page / LINE_PAGES, page % LINE_PAGES * PAGE_BYTES);
            let bytes = match &self.lines[line].0 {
                Line::Kept(bytes) => &bytes[in_line..in_line + PAGE_BYTES],
                _ => self.arena.read(*page as u64, 0..PAGE_BYTES),
            };
            let (of, change) = read_stamp(bytes).expect("it is one change");
            let is_known = change == known.done || known.doubtful.contains(&change);
            assert!(of == *page && is_known, "page {page}: {change}, {}", known.done);
        }
    }
}

fn token(line: usize, what: u64) -> u64 {
    line as u64 * 16 + what
}

fn allow(world: &mut World) {
    let allowance = Allowance {
        migration: MIGRATION.id,
        range_epoch: MIGRATION.range_epoch,
        pages: 0..PAGES as u64,
        space: SPACE,
        taker: TAKER,
        taker_incarnation: 1,
    };
    world.giver.allow(&allowance, &mut world.arena).expect("good terms");
}

#[test]
fn lines_move_while_clients_change_them() {
    let mut totals = Vec::new();
    for seed in 0..SEEDS {
        println!("seed {seed}");
        let mut world = World::new(seed);
        allow(&mut world);
        world.run(200_000, |_, _| {});
        assert!(world.lines.iter().all(|(line, _)| matches!(line, Line::Kept(_))));
        world.check();
        totals.push(world.totals);
    }
    let sum = |of: fn(&Totals) -> u32| totals.iter().map(of).sum::<u32>();
    let sums = [
        sum(|totals| totals.take_failed),
        sum(|totals| totals.read_failed),
        sum(|totals| totals.lease_lost),
        sum(|totals| totals.doubts),
        sum(|totals| totals.unknown),
    ];
    println!(
        "{sums:?}, {} busy, {} parts",
        sum(|totals| totals.busy),
        sum(|totals| totals.keep_parts)
    );
    assert!(sums.iter().all(|sum| *sum > 0), "all of it happens: {sums:?}");
}

#[test]
fn a_migration_that_is_withdrawn_leaves_each_line_at_one_server() {
    let (mut kept, mut given) = (0, 0);
    for seed in 0..SEEDS {
        println!("seed {seed}");
        let mut world = World::new(seed);
        allow(&mut world);
        let at = world.rng.random_range(0..1500);
        world.run(200_000, |world, step| {
            if step == at {
                world.withdraw();
            }
        });
        if !world.is_withdrawn {
            world.withdraw();
        }
        world.check();
        kept += world.lines.iter().filter(|(line, _)| matches!(line, Line::Kept(_))).count();
        given += world.lines.iter().filter(|(line, _)| *line == Line::Given).count();
    }
    println!("{kept} lines were kept, {given} stayed");
    assert!(kept > 20 && given > 20, "both ends are reached");
}
