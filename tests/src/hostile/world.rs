//! A switch and three memory servers in one process, under attack.

use core::{mem, time::Duration};
use std::{collections::BTreeMap, net::Ipv6Addr, time::Instant as Clock};

use bluebridge_memserver::{Arena, ArenaConfig};
use bluebridge_p4::pipeline::SwitchPort;
use bluebridge_protocol::{
    Timestamp,
    responder::{Adopted, Allowance, Authority, Config, Event, Limits, Responder, Timers},
};
use bluebridge_switch::soft::{Offload, Pipeline};
use bluebridge_wire::{ArenaGeneration, Command, Datagram, NodeId, Space, Status, address::Fields};
use rand::{Rng, SeedableRng, rngs::SmallRng};

use super::{
    attack::{self, Class, Route, Shot},
    draw::Draw,
    host::{self, HostDrop},
    shadow::{Counted, LeaseTimes, Seen, Session, Shadow},
    vectors::{Vector, golden_vectors},
    watched::Watched,
};

mod honest;
mod led;
mod tables;

pub(super) use tables::SERVER_PORTS;

/// The client that no attack may affect.
pub const VICTIM: (Space, NodeId) = (Space(3), NodeId(1000));

/// A node that no longer serves its pages; the second server serves them.
pub(super) const ADOPTED: Adopted = Adopted {
    node: NodeId(4),
    generation: GENERATION,
    first_page: 64,
    page_count: 128,
    local_page: 128,
};

/// Generations that are reserved for a server's contents.
const GENERATION_COUNT: u16 = 16;

/// The first generation of the servers' first contents.
pub const GENERATION: ArenaGeneration = match ArenaGeneration::new(3) {
    Some(generation) => generation,
    None => panic!("a small number"),
};

/// Pages of the second server that moved to the first.
const MOVED: core::ops::Range<u64> = 256..320;

/// Pages that the odd server allows another server to take, by this migration.
pub(super) const GIVEN: core::ops::Range<u64> = 1024..1088;
pub(super) const MIGRATION: u64 = 3;
pub(super) const MIGRATION_EPOCH: u32 = 70;

const PAGES: u32 = 2048;

/// A server forgets a node's incarnation when it was not seen for this time.
const INCARNATION_REST: Duration = Duration::from_secs(5);

const LEASE_TIMES: LeaseTimes =
    LeaseTimes { usual: Duration::from_millis(20), longest: Duration::from_millis(80) };

/// A waiting client repeats its request within this time.
const LEASE_WAIT: Duration = Duration::from_millis(10);

/// The spaces with notices; not the victim's.
const NOTIFIED: [Space; 2] = [Space(1), Space(2)];

/// How often a request may be refused until replies are sent.
const DRAINS_MAX: usize = 64;

/// Packets between comparisons of all memory.
const AUDIT_INTERVAL: u64 = 16_384;

/// A memory server whose changes are checked.
pub(super) struct Server {
    pub(super) node: NodeId,
    /// The first generation of its contents.
    pub(super) generation: u16,
    pub(super) pages: u64,
    pub(super) adopts: bool,
    pub(super) shadow: Shadow,
    port: SwitchPort,
    responder: Responder,
    store: Watched,
    /// Waiting replies that were judged.
    judged_count: usize,
}

impl Server {
    /// The new replies that wait to be sent, as their receivers will see them.
    fn look(&mut self) -> Vec<Seen> {
        let Self { responder, store, node, judged_count, .. } = self;
        let new = responder.transmits(store).skip(*judged_count);
        let new: Vec<_> = new.map(|reply| seen(&reply, *node)).collect();
        *judged_count += new.len();
        new
    }

    /// Sends the waiting replies; every datagram must still be intact.
    fn send_all(&mut self) {
        assert_eq!(self.judged_count, self.responder.reply_count(), "all of them were judged");
        for reply in self.responder.transmits(&self.store) {
            let payload = [reply.head, reply.data].concat();
            let parsed = Datagram::parse(reply.source, reply.destination, &payload);
            assert!(parsed.is_ok(), "a waiting reply was damaged: {parsed:?}");
        }
        self.responder.release(self.judged_count);
        self.judged_count = 0;
    }
}

/// A client that the guard admits, with the sessions that it opened.
#[derive(Clone, Debug)]
pub struct Attacker {
    pub(super) space: Space,
    pub(super) node: NodeId,
    pub(super) port: SwitchPort,
    pub(super) incarnation: u32,
    /// By server; 0 without one.
    pub(super) sessions: [u64; 3],
    opened: u64,
}

/// A frame that was injected at a port of the switch.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// The port.
    pub port: SwitchPort,
    /// The frame.
    pub frame: Vec<u8>,
    /// The session that it opened, if any.
    pub opened: Option<u64>,
}

/// What was injected, and the results.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Hostile packets by class.
    pub fired: BTreeMap<Class, u64>,
    /// Valid packets, which complete trains.
    pub plain: u64,
    /// Hostile packets with right checksums, an open session, the right incarnation and a number in
    /// the window, that the guard accepted.
    pub valid: u64,
    /// Hostile packets that a server refused.
    pub refused: u64,
    /// Hostile packets that a server executed.
    pub done: u64,
    /// Frames that a host's kernel dropped.
    pub host_drops: BTreeMap<HostDrop, u64>,
    /// Datagrams that the parser refused, by reason.
    pub malformed: BTreeMap<String, u64>,
    /// Replies of all servers by status.
    pub replies: BTreeMap<Status, u64>,
    /// Events of all servers.
    pub events: BTreeMap<Event, u64>,
    /// The most sessions that a server had.
    pub sessions_max: usize,
    /// The most pages that waited for a CONFIRM.
    pub provisional_max: u64,
}

impl Tally {
    /// All hostile packets.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.fired.values().sum()
    }

    fn add(&mut self, responder: &Responder) {
        for (event, count) in responder.counters().events() {
            *self.events.entry(event).or_default() += count;
        }
        for (status, count) in responder.counters().statuses() {
            *self.replies.entry(status).or_default() += count;
        }
    }
}

/// The system under attack.
pub struct World {
    pub(super) rng: SmallRng,
    pub(super) servers: Vec<Server>,
    pub(super) attackers: Vec<Attacker>,
    pub(super) vectors: Vec<Vector>,
    /// Recently sent valid frames.
    pub(super) recorded: Vec<Vec<u8>>,
    seed: u64,
    started: Clock,
    now: Timestamp,
    pipeline: Pipeline,
    victim: Attacker,
    treasures: Vec<(Fields, Vec<u8>)>,
    tally: Tally,
    lives: u32,
    recording: Option<Vec<Recorded>>,
}

impl World {
    /// A world before the first attack.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let started = Clock::now();
        let client = |space, node, port| Attacker {
            space: Space(space),
            node: NodeId(node),
            port: SwitchPort(port),
            incarnation: 5,
            sessions: [0; 3],
            opened: 1_000_000,
        };
        let mut world = Self {
            rng: SmallRng::seed_from_u64(seed),
            servers: (0..3).map(|index| server(index, 1)).collect(),
            attackers: vec![client(1, 1001, 2), client(1, 1004, 3), client(2, 1002, 4)],
            vectors: golden_vectors(),
            recorded: Vec::new(),
            seed,
            started,
            now: Timestamp::from_nanos(1),
            pipeline: tables::pipeline(started),
            victim: Attacker { port: SwitchPort(1), ..client(VICTIM.0.0, VICTIM.1.0, 1) },
            treasures: Vec::new(),
            tally: Tally::default(),
            lives: 1,
            recording: None,
        };
        world.place_canaries();
        world
    }

    /// Injects packets until `count` hostile ones were sent.
    ///
    /// # Panics
    /// If a rule is violated; the message names the seed.
    pub fn fire(&mut self, count: u64) {
        // A recording must not contain the directed attacks: their waiting times would not pass
        // elsewhere.
        if self.recording.is_none() && self.tally.total() == 0 && count > 0 {
            self.lead();
        }
        while self.tally.total() < count {
            let before = self.tally.total();
            self.open_sessions();
            let mut rng = mem::replace(&mut self.rng, SmallRng::seed_from_u64(0));
            let shots = attack::shots(self, &mut rng);
            self.rng = rng;
            for shot in shots {
                self.shoot(&shot);
            }
            let after = self.tally.total();
            if before / AUDIT_INTERVAL != after / AUDIT_INTERVAL {
                self.audit();
                self.check_canaries();
            }
            self.pass_time(before, after);
        }
        self.audit();
    }

    /// The frames of an attack of `count` hostile packets, to be repeated elsewhere. The victim's
    /// frames are not included.
    #[must_use]
    pub fn rehearse(seed: u64, count: u64) -> Vec<Recorded> {
        let mut world = Self::new(seed);
        world.recording = Some(Vec::new());
        world.fire(count);
        let victim = world.victim.port;
        let mut recording = world.recording.take().unwrap_or_default();
        recording.retain(|recorded| recorded.port != victim);
        recording
    }

    /// The counts so far, with the counters of all servers.
    #[must_use]
    pub fn tally(&self) -> Tally {
        let mut tally = self.tally.clone();
        self.servers.iter().for_each(|server| tally.add(&server.responder));
        tally
    }

    /// The switch's counts of dropped frames.
    pub fn drops(&mut self) -> bluebridge_switch::dataplane::Drops {
        use bluebridge_switch::dataplane::DataPlane as _;
        self.pipeline.drops().expect("a pipeline without I/O does not fail")
    }

    fn open_sessions(&mut self) {
        for attacker in 0..self.attackers.len() {
            for server in 0..self.servers.len() {
                let Attacker { sessions, incarnation, .. } = &self.attackers[attacker];
                let known = self.servers[server].shadow.sessions.get(&sessions[server]);
                let is_good = |open: &Session| {
                    open.requester.incarnation == *incarnation && open.low < u64::MAX / 2
                };
                if known.is_some_and(is_good) {
                    continue;
                }
                self.attackers[attacker].opened += 1;
                let requester = self.attackers[attacker].clone();
                let id = self.open(&requester, server);
                self.attackers[attacker].sessions[server] = id.unwrap_or(0);
            }
        }
    }

    /// Opens a session like a well-behaved client; `None` if the server has no room or is stopping.
    fn open(&mut self, requester: &Attacker, server: usize) -> Option<u64> {
        let target = &self.servers[server];
        let mut draw = Draw { rng: &mut self.rng, attacker: requester, server: target, session: 0 };
        let mut open = draw.open();
        open.header.sequence = requester.opened;
        let replies = self.send(requester.port, &mut open.frame(), None);
        let reply = replies.into_iter().next()?;
        reply.status.is_ok().then_some(reply.header.session)
    }

    fn shoot(&mut self, shot: &Shot) -> Vec<Seen> {
        let replies = match shot.route {
            Route::Switch(port) => self.send(port, &mut shot.frame.clone(), shot.class),
            Route::Direct(server) => {
                // A host's kernel would refuse some of these; the parser must refuse them as well.
                let (source, destination, payload) = shot.parts();
                self.deliver(server, (source, 4000, destination, payload), shot.class)
            }
        };
        match shot.class {
            Some(class) => *self.tally.fired.entry(class).or_default() += 1,
            None => self.tally.plain += 1,
        }
        if shot.class.is_some() && !replies.is_empty() {
            let is_done = replies.iter().all(|reply| reply.status.is_ok());
            *(if is_done { &mut self.tally.done } else { &mut self.tally.refused }) += 1;
        }
        if shot.class == Some(Class::Spoofed) {
            let done = replies.iter().find(|reply| reply.status.is_ok());
            assert!(done.is_none(), "seed {}: a spoofed packet was served: {done:?}", self.seed);
        }
        replies
    }

    /// Sends a frame through the switch; returns the replies of its receivers.
    fn send(&mut self, port: SwitchPort, frame: &mut [u8], class: Option<Class>) -> Vec<Seen> {
        let clock = self.started + Duration::from_nanos(self.now.as_nanos());
        let whole = self.recording.is_some().then(|| frame.to_vec());
        let mut out: Vec<(SwitchPort, Vec<u8>)> = Vec::new();
        self.pipeline.process(clock, port, frame, Offload::default(), &mut out);
        let mut replies = Vec::new();
        for (egress, frame) in out {
            let Some(server) = self.servers.iter().position(|server| server.port == egress) else {
                continue;
            };
            match host::receive(&frame) {
                Ok(received) => {
                    let spoofed = class == Some(Class::Spoofed);
                    assert!(!spoofed, "seed {}: the switch let {received:?} pass", self.seed);
                    let host::Received { source, source_port, destination, payload } = received;
                    let parts = (source, source_port, destination, payload);
                    replies.extend(self.deliver(server, parts, class));
                }
                Err(reason) => *self.tally.host_drops.entry(reason).or_default() += 1,
            }
        }
        if let (Some(recording), Some(frame)) = (&mut self.recording, whole) {
            let opens = replies
                .iter()
                .find(|reply| reply.status.is_ok() && reply.command == Some(Command::Open));
            let opened = opens.map(|reply| reply.header.session);
            recording.push(Recorded { port, frame, opened });
        }
        replies
    }

    fn deliver(
        &mut self,
        server: usize,
        (source, port, destination, payload): (Ipv6Addr, u16, Ipv6Addr, &[u8]),
        class: Option<Class>,
    ) -> Vec<Seen> {
        self.now = self.now + Duration::from_nanos(self.rng.random_range(0..160_000));
        let flush = self.rng.random_bool(0.06);
        let now = self.now;
        let server = &mut self.servers[server];
        let datagram = match Datagram::parse(source, destination, payload) {
            Ok(datagram) => datagram,
            Err(error) => {
                server.responder.count_malformed(error);
                *self.tally.malformed.entry(attack::reason(error)).or_default() += 1;
                return Vec::new();
            }
        };
        let is_valid = class.is_some() && server.shadow.is_in_session(&datagram);
        self.tally.valid += u64::from(is_valid);
        let at = format!("seed {}, packet {}, {}", self.seed, self.tally.total(), server.node);
        let before = counted(&server.responder);
        let mut tries = 0;
        while server.responder.handle_datagram(now, port, &datagram, &mut server.store).is_err() {
            let waited = server.look();
            tries += 1;
            assert!(tries < DRAINS_MAX, "{at}: replies are never sent");
            let judged = server.shadow.judge_waiters(now, &waited);
            judged.unwrap_or_else(|wrong| panic!("{at}: {wrong}\n{datagram:?}\n{waited:?}"));
            server.send_all();
        }
        let mut replies = server.look();
        let after = counted(&server.responder);
        let [is_raised, is_newer] = [0, 1].map(|event| after[event] > before[event]);
        let counted = Counted { is_raised, is_newer, superseded: after[2] - before[2] };
        let journal = mem::take(&mut server.store.journal);
        let own: Vec<_> =
            replies.iter().map(|reply| server.shadow.is_answer(&datagram, reply)).collect();
        if let Err(wrong) = server.shadow.judge(now, &datagram, counted, &replies, &journal) {
            panic!("{at}: {wrong}\n{datagram:?}\n{replies:?}");
        }
        if flush {
            server.send_all();
        }
        let mut own = own.into_iter();
        replies.retain(|_| own.next() == Some(true));
        replies
    }

    /// Runs timers, and the changes of a rack over time.
    fn pass_time(&mut self, before: u64, after: u64) {
        let passed = |interval: u64, at: u64| {
            (before + interval - at) / interval != (after + interval - at) / interval
        };
        for server in &mut self.servers {
            self.tally.sessions_max = self.tally.sessions_max.max(server.responder.session_count());
            let provisional = server.responder.provisional_pages();
            self.tally.provisional_max = self.tally.provisional_max.max(provisional);
            if server.responder.poll_timeout().is_none_or(|due| due > self.now) {
                continue;
            }
            server.send_all();
            let timed = server.responder.handle_timeout(self.now, &mut server.store);
            timed.expect("no reply waits");
            let replies = server.look();
            let journal = mem::take(&mut server.store.journal);
            let judged = server.shadow.judge_timeout(self.now, &replies, &journal);
            judged.unwrap_or_else(|wrong| panic!("seed {}: {wrong}", self.seed));
        }
        let authority = Authority { range_epoch: 7, expires_at: None };
        if passed(20_000, 18_000) {
            self.servers[1].responder.set_authority(None);
        }
        if passed(20_000, 0) {
            self.servers[1].responder.set_authority(Some(authority));
        }
        if passed(60_000, 54_000) {
            self.servers[2].responder.begin_shutdown();
        }
        if passed(60_000, 0) {
            self.lives += 1;
            let old = mem::replace(&mut self.servers[2], server(2, self.lives));
            self.tally.add(&old.responder);
        }
        if passed(30_000, 15_000) {
            self.attackers.iter_mut().for_each(|attacker| attacker.incarnation += 1);
        }
    }

    fn audit(&self) {
        for Server { node, shadow, store, responder, .. } in &self.servers {
            let seed = self.seed;
            shadow.audit(store).unwrap_or_else(|wrong| panic!("seed {seed}, {node}: {wrong}"));
            let limits = limits(node.0);
            assert!(responder.session_count() <= usize::from(limits.session_count));
            assert!(responder.provisional_pages() <= limits.provisional_pages);
        }
    }
}

/// Counts of raised low waters, raised incarnations, and leases that ended because of the latter.
fn counted(responder: &Responder) -> [u64; 3] {
    [Event::LowWaterRaised, Event::IncarnationRaised, Event::LeaseSuperseded]
        .map(|event| responder.counters().event(event))
}

fn seen(reply: &bluebridge_protocol::responder::SealedReply<'_>, node: NodeId) -> Seen {
    let payload = [reply.head, reply.data].concat();
    let parsed = Datagram::parse(reply.source, reply.destination, &payload);
    let datagram = parsed.expect("a server's replies are well formed");
    let command = datagram.command().command();
    let is_notice = !datagram.is_reply();
    assert_eq!(datagram.from.node, node, "{datagram:?}");
    let is_to_all = datagram.to.node == NodeId::ALL && command.is_some_and(Command::is_notice);
    assert_eq!(is_notice, is_to_all, "{datagram:?}");
    let code = if is_notice { 0 } else { datagram.from.tag };
    Seen {
        status: Status::from_code(code).expect("a known status"),
        command,
        is_notice,
        to: reply.destination,
        header: datagram.header,
        data: datagram.data.to_vec(),
    }
}

fn limits(node: u16) -> Limits {
    Limits {
        session_count: if node == 3 { 6 } else { 64 },
        node_session_count: 16,
        buffer_pages: if node == 3 { 512 } else { 12 },
        node_buffer_pages: 8,
        provisional_count: 24,
        provisional_pages: 48,
        node_provisional_count: 10,
        node_provisional_pages: 20,
        range_count: 8,
        migration_count: 2,
        reply_count: 96,
        credit_pages: 512,
        lease_count: 16,
        node_lease_count: 8,
        wait_count: 15,
        node_wait_count: 5,
    }
}

/// The limits of the servers, for a server elsewhere that must behave like the first.
#[must_use]
pub fn usual_limits() -> Limits {
    limits(1)
}

fn server(index: u16, life: u32) -> Server {
    let node = NodeId(index + 1);
    let is_odd = index == 1;
    let lives = u16::try_from(life).expect("few restarts") - 1;
    let generation = GENERATION.saturating_add(lives * GENERATION_COUNT);
    let mut config = Config::new(Space(1), node, life, 0x5eed + u64::from(index));
    config.spaces = vec![Space(1), Space(2), VICTIM.0];
    config.shard_count = if is_odd { 2 } else { 1 };
    config.piece_bytes = if is_odd { 1352 } else { 4096 };
    config.limits = limits(node.0);
    config.timers = Timers {
        session_idle: Duration::from_secs(3),
        incarnation_quarantine: INCARNATION_REST,
        provisional: Duration::from_millis(200),
        train: Duration::from_millis(if index == 2 { 40 } else { 300 }),
        train_pressed: Duration::from_millis(2),
        lease_default: LEASE_TIMES.usual,
        lease_max: LEASE_TIMES.longest,
        lease_wait: LEASE_WAIT,
    };
    let mut responder = Responder::new(&config).expect("a good configuration");
    NOTIFIED.into_iter().for_each(|space| responder.set_notices(space, true));
    if is_odd {
        responder.set_authority(Some(Authority { range_epoch: 7, expires_at: None }));
        responder.add_moved(MOVED, NodeId(1)).expect("whole lines");
        responder.add_adopted(ADOPTED).expect("whole lines");
    }
    let quotas = if index == 0 { vec![(Space(1), 900), (Space(2), 64)] } else { Vec::new() };
    let arena = ArenaConfig {
        generation,
        last_generation: generation.saturating_add(GENERATION_COUNT - 1),
        quotas,
        ..ArenaConfig::default()
    };
    let pages = if index == 2 { 512 } else { PAGES };
    let mut store = Watched { arena: Arena::on_heap(&arena, pages), journal: Vec::new() };
    if is_odd {
        let allowance = Allowance {
            migration: MIGRATION,
            range_epoch: MIGRATION_EPOCH,
            pages: GIVEN,
            space: Space(1),
            taker: NodeId(3),
            taker_incarnation: 1,
        };
        responder.allow(&allowance, &mut store).expect("good terms");
    }
    let shadow =
        Shadow::new(node, pages, is_odd.then_some(ADOPTED), LEASE_TIMES, NOTIFIED.to_vec());
    let port = SERVER_PORTS[usize::from(index)];
    let adopts = is_odd;
    Server {
        node,
        generation: generation.number(),
        pages: pages.into(),
        adopts,
        shadow,
        port,
        responder,
        store,
        judged_count: 0,
    }
}
