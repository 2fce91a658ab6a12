//! The simulation: one queue of events in virtual time.

mod jobs;
mod traffic;

use core::{cmp::Reverse, time::Duration};
use std::collections::{BTreeMap, BinaryHeap, HashMap, HashSet, VecDeque};

use bluebridge_protocol::{Timestamp, owner::Policy, store::PageStore};
use bluebridge_wire::{NodeId, Pointer};
use rand::{Rng, SeedableRng, rngs::SmallRng, seq::IndexedRandom};

use super::{
    Bug, Plan,
    client::{Client, ClientConfig},
    controller::{Controller, Redirect},
    job::{Kind, Place},
};
use crate::{
    history::History,
    sim::{
        SPACE, bugs, client_node, clock::Clock, network::Network, plan::Plan as RackPlan,
        report::Report, server::Server, server_node,
    },
};

/// Jobs of a run.
const JOBS: usize = 150;

/// The most events of a run: more indicate a loop.
const EVENTS_MAX: u64 = 5_000_000;

/// The delay before a host checks a timer again that is due at once.
const SPIN: Duration = Duration::from_nanos(1);

/// The largest deviation of a clock: any two differ by less than one part in 64, as leases require.
const SKEW_PPM: i64 = 7_000;

enum Event {
    Act { client: usize, life: u32, token: u64 },
    Astray { client: usize },
    AtEnd { endpoint: usize, frame: Vec<u8> },
    AtSwitch { endpoint: usize, frame: Vec<u8> },
    Crash { client: usize },
    EndAstray,
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
    now: Timestamp,
    /// By time and order; the events are stored apart, because they have no order.
    queue: BinaryHeap<Reverse<(Timestamp, u64)>>,
    events: HashMap<u64, Event>,
    order: u64,
    network: Network,
    switch_timer: Option<Timestamp>,
    clients: Vec<Client>,
    lives: Vec<u32>,
    server: Server,
    /// The times at which the server stopped and restarted.
    restarts: Vec<(Timestamp, Timestamp)>,
    clocks: Vec<Clock>,
    frozen: Vec<Option<VecDeque<Vec<u8>>>>,
    /// When each endpoint's timer fires.
    timers: Vec<Option<Timestamp>>,
    controller: Controller,
    always: bool,
    pages: [Pointer; 2],
    histories: [History; 2],
    next_value: u64,
    started: usize,
    depth: usize,
    is_final: bool,
    /// Remaining retries of changes at the end of the run.
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
/// A description of a result that no correct rack can produce.
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
        // Mostly far longer than a run; otherwise sessions end between two requests, and their
        // recorded replies with them.
        let is_forgetful = rng.random_bool(0.25);
        let idle_ms = if is_forgetful { rng.random_range(5..50) } else { 60_000 };
        rack.session_idle = Duration::from_millis(idle_ms);
        rack.bug = (plan.bug == Some(Bug::LoseWrites)).then_some(bugs::Bug::LoseWrites);
        let link = *rack.links.first().expect("a rack has links");
        let mut server = Server::new(&rack, 0);
        let grant = server.store.create(SPACE, 2).expect("an empty arena");
        let (node, tag, location) = (server_node(0), grant.tag, grant.location);
        let register = Pointer { space: SPACE, node, tag, location };
        let counter = register.checked_add(4096).expect("the second page");
        let policy = [Policy::Reject, Policy::Serve, Policy::Wait];
        let policy = *policy.choose(&mut rng).expect("some");
        let config = ClientConfig {
            seed: plan.seed,
            policy,
            owner_wait: Duration::from_millis(*[3, 100].choose(&mut rng).expect("some")),
            session_idle: rack.session_idle,
        };
        let client = |index| Client::new(config, index, 1);
        let mut clock = || Clock::new(rng.random_range(-SKEW_PPM..=SKEW_PPM));
        let clocks = (0..=clients).map(|_| clock()).collect();
        Self {
            now: Timestamp::default() + Duration::from_millis(1),
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
        Err("no events are left, but jobs are left".to_owned())
    }

    fn push(&mut self, at: Timestamp, event: Event) {
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
        // Random numbers of their own, so that the rest of a seed's run does not depend on them.
        let mut rng = SmallRng::seed_from_u64(self.plan.seed ^ 0xa57a);
        for _ in 0..*[0, 0, 1, 3].choose(&mut rng).expect("some") {
            let at = self.now + Duration::from_micros(rng.random_range(0..300_000));
            let end = at + Duration::from_micros(rng.random_range(1_000..100_000));
            let client = rng.random_range(0..self.clients.len());
            self.push(at, Event::Astray { client });
            self.push(end, Event::EndAstray);
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
                    self.receive(endpoint, &frame);
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
            Event::Astray { client } => {
                self.count("requests led astray");
                self.network.lead_astray(server_node(0), client);
            }
            Event::EndAstray => {
                self.network.end_astray(server_node(0));
            }
            Event::Crash { client } => {
                self.count("client crashed");
                for job in core::mem::take(&mut self.clients[client].jobs.0).into_iter().flatten() {
                    self.forget(&job);
                }
                self.lives[client] += 1;
                let ended = self.clients[client].next_life(client);
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
                let now = self.local(server);
                self.server.restart(now, &self.rack, 0, true);
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
                    self.receive(endpoint, &frame);
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

    fn local(&self, endpoint: usize) -> Timestamp {
        self.clocks[endpoint].local(self.now)
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

    /// Sends the frames of an endpoint, and handles operations that ended there.
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
            // Its timers end with the process.
            self.server.responder.poll_timeout().filter(|_| !self.server.is_away)
        };
        if let Some(due) = due {
            // A timer that is due again at once makes a host spin, but time continues.
            let soon = self.now + SPIN;
            let at = self.clocks[endpoint].world(due).max(soon);
            if self.timers[endpoint].is_none_or(|timer| at < timer) {
                self.timers[endpoint] = Some(at);
                self.push(at, Event::Timer { endpoint });
            }
        }
        Ok(())
    }

    /// After all jobs each page is written and read once more: every lease must have ended.
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
        // Later faults would disturb the final check.
        self.events.retain(|_, event| {
            !matches!(
                event,
                Event::Astray { .. }
                    | Event::Crash { .. }
                    | Event::StopServer
                    | Event::WipeSwitch
                    | Event::Freeze { .. }
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
