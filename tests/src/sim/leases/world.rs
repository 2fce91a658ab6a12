//! The world: one queue of events in virtual time.

use core::{cmp::Reverse, time::Duration};
use std::collections::{BTreeMap, BinaryHeap, HashMap, HashSet, VecDeque};

use bluebridge_protocol::{
    Instant,
    owner::{Committed, Policy},
    requester::{Answer, Failure, Operation},
    store::PageStore,
};
use bluebridge_wire::{
    Command, Datagram, Header, NodeId, Pointer, ReplyCopy, ReplySource, Status,
    header::HEADER_BYTES, seal,
};
use rand::{Rng, SeedableRng, rngs::SmallRng, seq::IndexedRandom};

use super::{
    Bug, Plan,
    client::Client,
    controller::{Controller, Redirect},
    job::{Holding, Job, Kind, Place, Stage},
};
use crate::{
    history::{Action, History},
    sim::{
        SPACE, bugs, client_node,
        clock::Clock,
        network::{self, Flight, Network, Way},
        plan::Plan as RackPlan,
        region,
        report::Report,
        server::Server,
        server_node,
    },
};

/// Jobs of a run.
const JOBS: usize = 150;

/// Events of a run: more are a loop.
const EVENTS_MAX: u64 = 5_000_000;

/// No lease lasts longer than this after its grant or its last RENEW.
const LEASE_MAX: Duration = Duration::from_millis(41);

/// How long a host takes to look at a timer again that is due at once.
const SPIN: Duration = Duration::from_nanos(1);

enum Event {
    Act { client: usize, life: u32, token: u64 },
    AtEnd { endpoint: usize, frame: Vec<u8> },
    AtSwitch { endpoint: usize, frame: Vec<u8> },
    Crash { client: usize },
    Freeze { client: usize },
    ForgetRedirects,
    Redirect(Redirect),
    Return,
    StopServer,
    SwitchTimer,
    Thaw { endpoint: usize },
    Think { client: usize },
    Timer { endpoint: usize },
    WipeSwitch,
}

struct World {
    plan: Plan,
    rack: RackPlan,
    rng: SmallRng,
    now: Instant,
    /// By time and order; the events lie apart, because they have no order of their own.
    queue: BinaryHeap<Reverse<(Instant, u64)>>,
    events: HashMap<u64, Event>,
    order: u64,
    network: Network,
    switch_timer: Option<Instant>,
    clients: Vec<Client>,
    lives: Vec<u32>,
    server: Server,
    /// When the server stopped and began anew, each time.
    restarts: Vec<(Instant, Instant)>,
    clocks: Vec<Clock>,
    frozen: Vec<Option<VecDeque<Vec<u8>>>>,
    /// When each endpoint's timer fires.
    timers: Vec<Option<Instant>>,
    controller: Controller,
    always: bool,
    pages: [Pointer; 2],
    histories: [History; 2],
    next_value: u64,
    started: usize,
    depth: usize,
    is_final: bool,
    /// Changes that may be asked for once more in the end.
    final_retries: u8,
    seen: HashSet<(u64, u64)>,
    /// The last lease of each page, for [`Bug::AnyEpoch`].
    leased: HashMap<u64, (u64, u16)>,
    outcomes: BTreeMap<(&'static str, String), u64>,
    report: Report,
}

/// Runs a plan to its end.
///
/// # Errors
/// What happened that no correct rack does.
pub fn run(plan: &Plan) -> Result<Report, String> {
    World::new(plan.clone()).run()
}

impl World {
    fn new(plan: Plan) -> Self {
        let mut rng = SmallRng::seed_from_u64(plan.seed ^ 0x1ea5e);
        let mut rack = RackPlan::new(plan.seed);
        let clients = rng.random_range(2..=4);
        rack.client_piece_bytes = vec![1368; clients];
        (rack.server_piece_bytes, rack.arena_pages) = (vec![1368], vec![64]);
        (rack.quota_pages, rack.tight_limits) = (None, false);
        rack.session_idle = Duration::from_secs(60);
        rack.bug = (plan.bug == Some(Bug::LoseWrites)).then_some(bugs::Bug::LoseWrites);
        let link = *rack.links.first().expect("a rack has links");
        let mut server = Server::new(&rack, 0);
        let grant = server.store.create(SPACE, 2).expect("an empty arena");
        let (node, tag, location) = (server_node(0), grant.tag, grant.location);
        let register = Pointer { space: SPACE, node, tag, location };
        let counter = register.checked_add(4096).expect("the second page");
        let policy = [Policy::Reject, Policy::Serve, Policy::Wait];
        let policy = *policy.choose(&mut rng).expect("some");
        let client = |index| Client::new(plan.seed, index, policy, 1);
        let mut clock = || Clock::new(rng.random_range(-5_000..=5_000));
        let clocks = (0..=clients).map(|_| clock()).collect();
        Self {
            now: Instant::default() + Duration::from_millis(1),
            queue: BinaryHeap::new(),
            events: HashMap::new(),
            order: 0,
            network: Network::new(vec![link; clients + 1]),
            switch_timer: None,
            clients: (0..clients).map(client).collect(),
            lives: vec![1; clients],
            server,
            restarts: Vec::new(),
            clocks,
            frozen: (0..=clients).map(|_| None).collect(),
            timers: vec![None; clients + 1],
            controller: Controller::default(),
            always: rng.random_bool(0.5),
            pages: [register, counter],
            histories: [History::new(0), History::new(0)],
            next_value: 0,
            started: 0,
            depth: rng.random_range(1..=3),
            is_final: false,
            final_retries: 2,
            seen: HashSet::new(),
            leased: HashMap::new(),
            outcomes: BTreeMap::new(),
            report: Report::default(),
            rng,
            rack,
            plan,
        }
    }

    fn run(mut self) -> Result<Report, String> {
        self.program();
        for client in 0..self.clients.len() {
            self.push(self.now, Event::Think { client });
        }
        self.plan_faults();
        while let Some(Reverse((at, order))) = self.queue.pop() {
            let Some(event) = self.events.remove(&order) else { continue };
            self.now = self.now.max(at);
            self.report.events += 1;
            if self.report.events > EVENTS_MAX {
                let jobs: Vec<_> = self.clients.iter().map(|client| client.jobs.count()).collect();
                let due: Vec<_> = self.clients.iter().map(Client::poll_timeout).collect();
                return Err(format!(
                    "the run does not end: {} ns, jobs {jobs:?}, due {due:?}, timers {:?}",
                    self.now.as_nanos(),
                    self.timers
                ));
            }
            let (nanos, turn) = (self.now.as_nanos(), self.report.digest);
            self.report.digest = (turn ^ nanos).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23);
            self.happen(event).map_err(|error| format!("at {nanos} ns: {error}"))?;
            if self.is_over()? {
                return self.finish();
            }
        }
        Err("nothing happens any more, but jobs are left".to_owned())
    }

    fn push(&mut self, at: Instant, event: Event) {
        self.order += 1;
        self.queue.push(Reverse((at, self.order)));
        self.events.insert(self.order, event);
    }

    fn plan_faults(&mut self) {
        let count = *[0, 2, 5, 10].choose(&mut self.rng).expect("some");
        for _ in 0..count {
            let at = self.now + Duration::from_micros(self.rng.random_range(0..400_000));
            let client = self.rng.random_range(0..self.clients.len());
            let event = match self.rng.random_range(0..8) {
                0..3 => Event::Freeze { client },
                3 | 4 => Event::Crash { client },
                5 => Event::StopServer,
                6 => Event::WipeSwitch,
                _ => Event::ForgetRedirects,
            };
            self.push(at, event);
        }
    }

    fn program(&mut self) {
        let clients = self.clients.len();
        let nodes: Vec<NodeId> = (0..clients).map(client_node).chain([server_node(0)]).collect();
        let is_server: Vec<_> = (0..=clients).map(|end| end == clients).collect();
        self.network.program(&nodes, &is_server);
    }

    fn happen(&mut self, event: Event) -> Result<(), String> {
        let server = self.clients.len();
        match event {
            Event::Act { client, life, token } => return self.act(client, life, token),
            Event::AtEnd { endpoint, frame } => match &mut self.frozen[endpoint] {
                Some(waiting) if waiting.len() < 512 => waiting.push_back(frame),
                Some(_) => {}
                None => {
                    self.hear(endpoint, &frame);
                    return self.after(endpoint);
                }
            },
            Event::AtSwitch { endpoint, frame } => {
                if endpoint == server {
                    self.copy(&frame);
                }
                let frames: Vec<_> = self.network.switch(self.now, endpoint, frame).collect();
                self.send_down(frames);
            }
            Event::Crash { client } => {
                self.count("client crashed");
                for job in core::mem::take(&mut self.clients[client].jobs.0).into_iter().flatten() {
                    self.forget(&job);
                }
                self.lives[client] += 1;
                let ended = self.clients[client].next_life(self.plan.seed, client);
                let ended = core::mem::replace(&mut self.clients[client], ended);
                self.keep_counters(&ended);
                return self.think(client);
            }
            Event::Freeze { client } => {
                if self.frozen[client].is_none() && !self.is_final {
                    self.count("client frozen");
                    self.frozen[client] = Some(VecDeque::new());
                    let length = Duration::from_micros(self.rng.random_range(500..100_000));
                    self.push(self.now + length, Event::Thaw { endpoint: client });
                }
            }
            Event::ForgetRedirects => {
                self.count("controller restarted");
                self.controller.forget();
            }
            Event::Redirect(Redirect::Begin { page, client, lease_ms }) => {
                self.count("redirect installed");
                self.network.redirect(&page, client, lease_ms);
            }
            Event::Redirect(Redirect::End { page }) => {
                if self.network.end_redirect(&page) {
                    self.count("redirect removed");
                }
            }
            Event::Return => {
                self.report.add_responder(&self.server.responder);
                self.server.restart(&self.rack, 0, true);
                self.server.is_away = false;
                self.timers[server] = None;
            }
            Event::StopServer if !self.server.is_away => {
                self.count("server restarted");
                self.server.is_away = true;
                let away = Duration::from_micros(self.rng.random_range(100..10_000));
                self.restarts.push((self.now, self.now + away));
                self.push(self.now + away, Event::Return);
            }
            Event::StopServer => {}
            Event::SwitchTimer => {
                self.switch_timer = None;
                let frames: Vec<_> = self.network.switch_timeout(self.now).collect();
                self.send_down(frames);
            }
            Event::Thaw { endpoint } => {
                for frame in self.frozen[endpoint].take().into_iter().flatten() {
                    self.hear(endpoint, &frame);
                }
                self.timeout(endpoint);
                self.after(endpoint)?;
                return self.think(endpoint);
            }
            Event::Think { client } => return self.think(client),
            Event::Timer { endpoint } => {
                if self.timers[endpoint].take_if(|timer| *timer == self.now).is_some()
                    && self.frozen[endpoint].is_none()
                {
                    self.timeout(endpoint);
                    return self.after(endpoint);
                }
            }
            Event::WipeSwitch => {
                self.count("switch wiped");
                self.network.wipe_switch();
                self.program();
            }
        }
        Ok(())
    }

    fn count(&mut self, name: &str) {
        self.report.count("lease world", name, 1);
    }

    fn local(&self, endpoint: usize) -> Instant {
        self.clocks[endpoint].local(self.now)
    }

    /// The controller's copy of a reply; some are lost, all are late.
    fn copy(&mut self, frame: &[u8]) {
        let (clients, always) = (self.clients.len(), self.always);
        if let Some(heard) = network::hear(frame, network::PORT)
            && let Ok(copy) = ReplyCopy::parse(heard.source, heard.destination, heard.payload)
            && (copy.command, copy.status) == (Command::Update, Status::Ok)
        {
            self.leased.insert(copy.target.location >> 12, (copy.lease_epoch, copy.node));
        }
        let node = server_node(0).0;
        if let Some(redirect) = self.controller.see(frame, node, clients, always)
            && self.rng.random_bool(0.8)
        {
            let late = Duration::from_micros(self.rng.random_range(10..3000));
            self.push(self.now + late, Event::Redirect(redirect));
        }
    }

    fn send_up(&mut self, endpoint: usize, frame: Vec<u8>) {
        let flights = self.network.travel(self.now, endpoint, Way::Up, frame, &mut self.rng);
        for Flight { at, frame } in flights.into_iter().flatten() {
            self.push(at, Event::AtSwitch { endpoint, frame });
        }
    }

    fn send_down(&mut self, frames: Vec<(usize, Vec<u8>)>) {
        for (endpoint, frame) in frames {
            let flights = self.network.travel(self.now, endpoint, Way::Down, frame, &mut self.rng);
            for Flight { at, frame } in flights.into_iter().flatten() {
                self.push(at, Event::AtEnd { endpoint, frame });
            }
        }
        if let Some(due) = self.network.poll_timeout()
            && self.switch_timer.is_none_or(|timer| due < timer)
        {
            self.switch_timer = Some(due);
            self.push(due.max(self.now), Event::SwitchTimer);
        }
    }

    fn hear(&mut self, endpoint: usize, frame: &[u8]) {
        let Some(heard) = network::hear(frame, network::PORT) else { return };
        let now = self.local(endpoint);
        let rewritten = self.mistake(endpoint, &heard);
        let payload = rewritten.as_deref().unwrap_or(heard.payload);
        if endpoint < self.clients.len() {
            self.clients[endpoint].hear(now, &heard, payload);
        } else if !self.server.is_away {
            let mut frames = Vec::new();
            self.server.hear(now, &heard, payload, &mut frames);
            for frame in frames {
                self.send_up(endpoint, frame);
            }
        }
    }

    fn mistake(&mut self, endpoint: usize, heard: &network::Heard<'_>) -> Option<Vec<u8>> {
        let bug = self.plan.bug?;
        let datagram = Datagram::parse(heard.source, heard.destination, heard.payload).ok()?;
        let (command, header) = (datagram.command().command()?, datagram.header);
        let is_request = !datagram.is_reply();
        match bug {
            Bug::AnyEpoch if is_request && command == Command::Commit => {
                let (epoch, node) = *self.leased.get(&(datagram.to.location >> 12))?;
                let header = Header { lease_epoch: epoch, ..header };
                let is_owner = node == datagram.from.node.0;
                is_owner.then(|| bugs::rewritten(&datagram, heard.destination, &header))
            }
            Bug::ForgetWindow if endpoint >= self.clients.len() => {
                bugs::forget_window(&mut self.seen, &datagram)
            }
            Bug::OwnerExecutes
                if is_request && command == Command::FetchAdd && endpoint < self.clients.len() =>
            {
                let source = ReplySource {
                    space: SPACE,
                    node: server_node(0),
                    command,
                    contended: false,
                    status: Status::Ok,
                    location_bits: datagram.to.location,
                };
                let to = datagram.from.node;
                let answer = Header { incarnation: self.server.incarnation, ..header };
                let mut head = vec![0; HEADER_BYTES];
                answer.emit(&mut head, 0);
                let source = source.to_ipv6();
                seal(source, heard.source, &mut head, &[9; 8]);
                let ports = (network::PORT, network::PORT);
                let frame = network::frame(source, heard.source, ports, [&head, &[9; 8]]);
                let asker = (0..self.clients.len()).find(|index| client_node(*index) == to)?;
                self.push(self.now, Event::AtEnd { endpoint: asker, frame });
                None
            }
            _ => None,
        }
    }

    fn timeout(&mut self, endpoint: usize) {
        let now = self.local(endpoint);
        if endpoint < self.clients.len() {
            self.clients[endpoint].handle_timeout(now);
        } else if !self.server.is_away {
            let mut frames = Vec::new();
            self.server.handle_timeout(now, &mut frames);
            for frame in frames {
                self.send_up(endpoint, frame);
            }
        }
    }

    /// Sends what an endpoint has to send, and takes what ended there.
    fn after(&mut self, endpoint: usize) -> Result<(), String> {
        let due = if endpoint < self.clients.len() {
            loop {
                let now = self.local(endpoint);
                for frame in self.clients[endpoint].frames(now) {
                    self.send_up(endpoint, frame);
                }
                let Some(ended) = self.clients[endpoint].requester.poll_completion() else { break };
                self.end(endpoint, ended.token, ended.result)?;
            }
            self.clients[endpoint].poll_timeout()
        } else {
            let mut frames = Vec::new();
            if !self.server.is_away {
                self.server.drain(&mut frames);
            }
            for frame in frames {
                self.send_up(endpoint, frame);
            }
            // Its timers end with it.
            self.server.responder.poll_timeout().filter(|_| !self.server.is_away)
        };
        if let Some(due) = due {
            // A timer that is due again at once makes a host spin, not stop: time goes on.
            let soon = self.now + SPIN;
            let at = self.clocks[endpoint].world(due).max(soon);
            if self.timers[endpoint].is_none_or(|timer| at < timer) {
                self.timers[endpoint] = Some(at);
                self.push(at, Event::Timer { endpoint });
            }
        }
        Ok(())
    }

    /// A client begins jobs until it has enough.
    fn think(&mut self, client: usize) -> Result<(), String> {
        if client >= self.clients.len() || self.frozen[client].is_some() {
            return Ok(());
        }
        while !self.is_final
            && self.started < JOBS
            && self.clients[client].jobs.count() < self.depth
        {
            self.started += 1;
            let (place, kind) = Job::draw(&mut self.rng, &mut self.next_value);
            let patience = Duration::from_micros(self.rng.random_range(5_000..300_000));
            self.begin(client, place, kind, patience)?;
        }
        self.after(client)
    }

    fn begin(
        &mut self,
        client: usize,
        place: Place,
        kind: Kind,
        patience: Duration,
    ) -> Result<(), String> {
        let outgoing = match kind {
            Kind::Write { value } => region::stamp(value).collect(),
            _ => Vec::new(),
        };
        let incoming = vec![0xee; place.bytes()];
        let (stage, start) = (Stage::Asking, self.now);
        let job = Job { place, kind, stage, start, outgoing, incoming };
        let token = self.clients[client].jobs.insert(job);
        let operation = Job::operation(place, kind, self.pages[place as usize]);
        self.ask(client, token, operation, patience)
    }

    fn ask(
        &mut self,
        client: usize,
        token: u64,
        operation: Operation,
        patience: Duration,
    ) -> Result<(), String> {
        let now = self.local(client);
        let requester = &mut self.clients[client].requester;
        let began = requester.start_until(now, operation, token, now + patience);
        began.map(|_| ()).map_err(|error| format!("{operation:?} was not begun: {error}"))
    }

    /// A client goes on with what it holds: COMMIT, seldom RENEW or ABORT.
    fn act(&mut self, client: usize, life: u32, token: u64) -> Result<(), String> {
        if self.lives[client] != life {
            return Ok(());
        }
        if self.frozen[client].is_some() {
            let later = self.now + Duration::from_millis(1);
            self.push(later, Event::Act { client, life, token });
            return Ok(());
        }
        let now = self.now;
        let drawn = self.rng.random_range(0..10);
        self.next_value += 1;
        let new = self.next_value;
        let Some(job) = self.clients[client].jobs.get(token) else { return Ok(()) };
        let Stage::Holding(holding) = job.stage else { return Ok(()) };
        let place = job.place;
        job.start = now;
        let pointer = self.pages[place as usize];
        let length = u32::try_from(place.bytes()).expect("a page");
        let epoch = holding.epoch;
        let operation = match drawn {
            0 => {
                job.stage = Stage::Aborting;
                Operation::Abort { pointer, length, epoch }
            }
            1 => {
                job.stage = Stage::Renewing(holding);
                Operation::Renew { pointer, length, epoch, lease_ms: 20 }
            }
            _ => {
                let after = match place {
                    Place::Register => new,
                    Place::Counter => holding.before.wrapping_add(1),
                };
                job.outgoing = match place {
                    Place::Register => region::stamp(after).collect(),
                    Place::Counter => after.to_le_bytes().to_vec(),
                };
                job.stage = Stage::Committing { holding, after };
                Operation::Commit { pointer, length, epoch }
            }
        };
        if !matches!(operation, Operation::Renew { .. }) {
            self.release(client, place, epoch);
        }
        let patience = Duration::from_micros(self.rng.random_range(5_000..200_000));
        self.ask(client, token, operation, patience)?;
        self.after(client)
    }

    /// The client's owner is told that a lease is over: before the home can know, so that nothing
    /// is served that another has seen replaced.
    fn release(&mut self, client: usize, place: Place, epoch: u64) {
        if self.plan.bug != Some(Bug::ServeReleased) {
            self.clients[client].owner.release(self.pages[place as usize], epoch);
        }
    }

    fn end(
        &mut self,
        client: usize,
        token: u64,
        result: Result<Answer, Failure>,
    ) -> Result<(), String> {
        let Some(mut job) = self.clients[client].jobs.take(token) else { return Ok(()) };
        self.report.operations += 1;
        let outcome = match &result {
            Ok(Answer::Read { stale }) => format!("ok, stale {stale}"),
            Ok(_) => "ok".to_owned(),
            Err(Failure::LeaseLost { how, .. }) => format!("lease lost: {how:?}"),
            Err(failure) => {
                let text = format!("{failure:?}");
                text.split([' ', '(']).next().unwrap_or_default().to_owned()
            }
        };
        *self.outcomes.entry((job.name(), outcome)).or_default() += 1;
        if self.is_final
            && matches!(result, Err(Failure::OutcomeUnknown { .. }))
            && let Some(left) = self.final_retries.checked_sub(1)
        {
            // The server restarted just before: its old session cannot tell.
            self.final_retries = left;
            self.forget(&job);
            self.next_value += 1;
            let kind = match job.kind {
                Kind::Write { .. } => Kind::Write { value: self.next_value },
                kind => kind,
            };
            return self.begin(client, job.place, kind, Duration::from_secs(15));
        }
        if self.is_final && result.is_err() {
            return Err(format!("{job:?} ended with {result:?} though all is well again"));
        }
        match (job.stage, job.kind, result) {
            (_, _, Err(Failure::OutcomeUnknown { .. })) => self.forget(&job),
            (_, _, Err(Failure::Buffer | Failure::Violation { .. } | Failure::Partial(_))) => {
                return Err(format!("{job:?} ended with {result:?}"));
            }
            (Stage::Asking, Kind::Read, Ok(_))
            | (Stage::Asking, Kind::ReadStale, Ok(Answer::Read { stale: false })) => {
                let value = seen(&job)?;
                self.record(&job, Action::Read { value }, true);
            }
            (Stage::Asking, Kind::ReadStale, Ok(_)) => {
                let value = seen(&job)?;
                let was_current = Job { start: self.stale_since(job.start), ..job.clone() };
                self.record(&was_current, Action::Read { value }, true);
            }
            (Stage::Asking, Kind::Write { value }, Ok(_)) => {
                self.record(&job, Action::Write { value }, true);
            }
            (Stage::Asking, Kind::Add { addend }, Ok(Answer::Previous(previous))) => {
                self.record(&job, Action::Add { addend, previous: Some(previous) }, true);
            }
            (Stage::Asking, Kind::Update { .. }, Ok(Answer::Leased(lease))) => {
                let before = seen(&job)?;
                self.record(&job, Action::Read { value: before }, true);
                let expires_at = lease.expires_at;
                let holding = Holding { epoch: lease.epoch, before, expires_at };
                return self.hold(client, job, holding);
            }
            (Stage::Renewing(holding), _, Ok(Answer::Leased(lease))) => {
                let holding = Holding { expires_at: lease.expires_at, ..holding };
                return self.hold(client, job, holding);
            }
            (Stage::Committing { holding, after }, _, Ok(_)) => {
                self.record(&job, Action::Update { before: holding.before, after }, true);
            }
            _ => {}
        }
        if let Stage::Renewing(holding) = job.stage {
            self.release(client, job.place, holding.epoch);
        }
        job.incoming.clear();
        let pause = Duration::from_micros(self.rng.random_range(0..2_000));
        self.push(self.now + pause, Event::Think { client });
        Ok(())
    }

    /// The client has the lease, tells its owner so, and goes on after a while: too late at times.
    fn hold(&mut self, client: usize, mut job: Job, holding: Holding) -> Result<(), String> {
        let now = self.local(client);
        let pointer = self.pages[job.place as usize];
        let committed = Some(Committed { start: 0, bytes: &job.incoming });
        let owner = &mut self.clients[client].owner;
        let held = owner.hold(now, pointer, holding.epoch, holding.expires_at, None, committed);
        // A grant that was overtaken by a later one of the same client is over.
        if held.is_err() {
            self.report.count("lease world", "grant was overtaken", 1);
        }
        let left = holding.expires_at.saturating_since(now);
        let wait = left.mul_f64(*[0.0, 0.2, 0.6, 1.5].choose(&mut self.rng).expect("some"));
        job.stage = Stage::Holding(holding);
        let token = self.clients[client].jobs.insert(job);
        let life = self.lives[client];
        let wait = wait + Duration::from_micros(self.rng.random_range(0..500));
        self.push(self.now + wait, Event::Act { client, life, token });
        Ok(())
    }

    /// Since when the contents may have been replaced that a READ of the last committed ones shows
    /// which begins at a moment. Not at all, because an owner lets go before its COMMIT; but a home
    /// that begins anew has forgotten the leases that their owners still believe in.
    fn stale_since(&self, start: Instant) -> Instant {
        let believed = self.restarts.iter().filter(|(_, back)| *back + LEASE_MAX > start);
        believed.map(|(stopped, _)| *stopped).fold(start, Instant::min)
    }

    fn record(&mut self, job: &Job, action: Action, is_known: bool) {
        let end = is_known.then(|| self.now.as_nanos());
        self.histories[job.place as usize].record(job.start.as_nanos(), end, action);
    }

    /// A job whose outcome nobody will know.
    fn forget(&mut self, job: &Job) {
        let action = match (job.stage, job.kind) {
            (Stage::Asking, Kind::Write { value }) => Action::Write { value },
            (Stage::Asking, Kind::Add { addend }) => Action::Add { addend, previous: None },
            (Stage::Committing { holding, after }, _) => {
                Action::Update { before: holding.before, after }
            }
            _ => return,
        };
        self.record(job, action, false);
    }

    /// After all jobs each page is written and read once more: no lease lasts for ever.
    fn is_over(&mut self) -> Result<bool, String> {
        let idle = self.clients.iter().all(|client| client.jobs.count() == 0);
        let is_thawed = self.frozen.iter().all(Option::is_none);
        if !idle || !is_thawed || self.started < JOBS || self.server.is_away {
            return Ok(false);
        }
        if self.is_final {
            return Ok(true);
        }
        self.is_final = true;
        self.network.heal();
        // Faults that are still to come would be none of a rack that is well again.
        self.events.retain(|_, event| {
            !matches!(
                event,
                Event::Crash { .. } | Event::StopServer | Event::WipeSwitch | Event::Freeze { .. }
            )
        });
        let patience = Duration::from_secs(15);
        self.next_value += 1;
        let last = Kind::Write { value: self.next_value };
        self.begin(0, Place::Register, last, patience)?;
        self.begin(0, Place::Counter, Kind::Add { addend: 1 }, patience)?;
        self.begin(1, Place::Register, Kind::Read, patience)?;
        self.begin(1, Place::Counter, Kind::Read, patience)?;
        self.after(0)?;
        self.after(1)?;
        Ok(false)
    }

    fn keep_counters(&mut self, client: &Client) {
        self.report.add_requester(&client.requester);
        for (name, count) in client.owner.counters().iter() {
            self.report.count("owner", name, count);
        }
    }

    fn finish(mut self) -> Result<Report, String> {
        for (name, history) in ["register", "counter"].into_iter().zip(&self.histories) {
            history.check().map_err(|refusal| format!("the {name}: {refusal}"))?;
            self.report.count("history", name, history.len() as u64);
        }
        for client in core::mem::take(&mut self.clients) {
            self.keep_counters(&client);
        }
        self.report.add_responder(&self.server.responder);
        self.report.outcomes = core::mem::take(&mut self.outcomes);
        self.report.virtual_time = Duration::from_nanos(self.now.as_nanos());
        Ok(self.report)
    }
}

/// What a job's read saw.
fn seen(job: &Job) -> Result<u64, String> {
    match job.place {
        Place::Register => region::read_stamp(0, &job.incoming)?.ok_or("a short read".to_owned()),
        Place::Counter => {
            let word = job.incoming.first_chunk::<8>().ok_or("a short read")?;
            Ok(u64::from_le_bytes(*word))
        }
    }
}
