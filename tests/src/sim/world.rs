//! The simulation: one queue of events in virtual time, and their effects.

use core::{cmp::Ordering, time::Duration};
use std::collections::{BinaryHeap, HashSet, VecDeque};

use bluebridge_protocol::{Timestamp, requester::OperationId, store::PageStore};
use bluebridge_wire::{ArenaGeneration, Datagram, NodeId};
use rand::{Rng, SeedableRng, rngs::SmallRng};

use super::{
    Report,
    bugs::{self, Bug},
    client::Client,
    clock::Clock,
    ledger::{Ledger, ServerFacts},
    migration::Move,
    network::{self, Direction, Flight, Network},
    plan::Plan,
    prober::{self, Probe, Prober},
    server::Server,
    task::Task,
    workload::{self, Workload},
};

/// The most frames that wait for a paused endpoint.
const WAITING_MAX: usize = 512;

/// A run that needs more events than this is in a loop.
const EVENTS_MAX: u64 = 20_000_000;

enum Event {
    AtSwitch { endpoint: usize, frame: Vec<u8> },
    AtEnd { endpoint: usize, frame: Vec<u8> },
    SwitchTimer,
    Timer { endpoint: usize },
    Think { client: usize },
    Thaw { endpoint: usize },
    Program,
    Return { server: usize, contents: bool },
    Authority { server: usize },
    EndAstray { server: usize },
    Cancel { client: usize, id: OperationId, token: u64 },
    Probe,
    Finale,
}

struct Queued {
    at: Timestamp,
    order: u64,
    event: Event,
}

impl PartialEq for Queued {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}

impl Eq for Queued {}

impl PartialOrd for Queued {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Queued {
    /// Reversed: the earliest is the greatest.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.order).cmp(&(self.at, self.order))
    }
}

/// The common state of every endpoint.
struct End {
    clock: Clock,
    /// When its timer fires, in virtual time.
    timer: Option<Timestamp>,
    frozen_until: Option<Timestamp>,
    waiting: VecDeque<Vec<u8>>,
}

/// The phases of a run.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Phase {
    Working,
    /// All operations ended; provisional pages expire.
    Quiet,
    /// All contents are read once more.
    Reading,
}

pub(super) struct World {
    plan: Plan,
    rng: SmallRng,
    /// Separate, because the numbers are drawn while a client sends.
    refusals: SmallRng,
    now: Timestamp,
    queue: BinaryHeap<Queued>,
    order: u64,
    event_count: u64,
    network: Network,
    switch_timer: Option<Timestamp>,
    ends: Vec<End>,
    clients: Vec<Client>,
    servers: Vec<Server>,
    ledger: Ledger,
    workload: Workload,
    prober: Prober,
    moves: Vec<Move>,
    started: usize,
    next_fault: usize,
    phase: Phase,
    final_tasks: VecDeque<(usize, Task)>,
    frames: Vec<Vec<u8>>,
    seen: HashSet<(u64, u64)>,
    report: Report,
    digest: u64,
    trace: bool,
}

macro_rules! trace {
    ($world:expr, $($arg:tt)*) => {
        if $world.trace {
            let nanos = $world.now.as_nanos();
            eprintln!("{:>6}.{:06} ms  {}", nanos / 1_000_000, nanos % 1_000_000, format!($($arg)*));
        }
    };
}

mod clients;
mod faults;

impl World {
    pub(super) fn new(plan: Plan, trace: bool) -> Self {
        let clients: Vec<_> =
            (0..plan.clients()).map(|index| Client::new(&plan, index, 1)).collect();
        let servers: Vec<_> = (0..plan.servers()).map(|index| Server::new(&plan, index)).collect();
        let ends = plan.skew_ppm.iter().map(|&skew| End {
            clock: Clock::new(skew),
            timer: None,
            frozen_until: None,
            waiting: VecDeque::new(),
        });
        let facts = |index: usize| ServerFacts {
            node: super::server_node(index),
            generation: ArenaGeneration::default(),
            arena_pages: plan.arena_pages[index],
            orphans: Vec::new(),
            zombies: Vec::new(),
            troubled_until: Timestamp::default(),
        };
        let ledger = Ledger::new(
            (0..plan.servers()).map(facts).collect(),
            usize::from(plan.requester_servers) < plan.servers(),
            plan.session_idle,
        );
        Self {
            rng: SmallRng::seed_from_u64(plan.seed ^ 0x5eed),
            refusals: SmallRng::seed_from_u64(plan.seed ^ 0x0dd),
            now: Timestamp::default() + Duration::from_millis(1),
            queue: BinaryHeap::new(),
            order: 0,
            event_count: 0,
            network: Network::new(plan.links.clone()),
            switch_timer: None,
            ends: ends.collect(),
            clients,
            servers,
            ledger,
            workload: Workload::new(),
            prober: Prober::new(plan.servers()),
            moves: Vec::new(),
            started: 0,
            next_fault: 0,
            phase: Phase::Working,
            final_tasks: VecDeque::new(),
            frames: Vec::new(),
            seen: HashSet::new(),
            report: Report::default(),
            digest: 0,
            trace,
            plan,
        }
    }

    /// Runs to the end.
    ///
    /// # Errors
    /// The first result that is impossible with correct servers.
    pub(super) fn run(mut self) -> Result<Report, String> {
        self.program();
        for client in 0..self.clients.len() {
            self.push(self.now, Event::Think { client });
        }
        self.push(self.now, Event::Probe);
        while let Some(Queued { at, event, .. }) = self.queue.pop() {
            self.now = self.now.max(at);
            self.event_count += 1;
            if self.event_count > EVENTS_MAX {
                return Err("the run does not end".to_owned());
            }
            let at = self.now.as_nanos();
            self.digest = (self.digest ^ at).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23);
            self.happen(event).map_err(|error| {
                let nanos = self.now.as_nanos();
                format!("at {}.{:06} ms: {error}", nanos / 1_000_000, nanos % 1_000_000)
            })?;
        }
        self.finish()
    }

    fn push(&mut self, at: Timestamp, event: Event) {
        self.order += 1;
        self.queue.push(Queued { at, order: self.order, event });
    }

    fn happen(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::AtSwitch { endpoint, frame } => {
                let frames: Vec<_> = self.network.switch(self.now, endpoint, frame).collect();
                self.send_down(frames);
            }
            Event::SwitchTimer => {
                self.switch_timer = None;
                let frames: Vec<_> = self.network.switch_timeout(self.now).collect();
                self.send_down(frames);
            }
            Event::AtEnd { endpoint, frame } => return self.arrive(endpoint, frame),
            Event::Timer { endpoint } => {
                if self.ends[endpoint].timer == Some(self.now) {
                    self.ends[endpoint].timer = None;
                    return self.timeout(endpoint);
                }
            }
            Event::Think { client } => return self.pump(client),
            Event::Thaw { endpoint } => return self.thaw(endpoint),
            Event::Program => self.program(),
            Event::Return { server, contents } => self.return_server(server, contents),
            Event::Authority { server } => {
                trace!(self, "server {server} has authority again");
                self.servers[server].set_authority(true);
            }
            Event::EndAstray { server } => {
                let was_there = self.network.end_astray(super::server_node(server));
                trace!(self, "requests for server {server} arrive again ({was_there})");
            }
            Event::Cancel { client, id, token } => return self.cancel(client, id, token),
            Event::Probe => self.probe(),
            Event::Finale => return self.finale(),
        }
        Ok(())
    }

    fn program(&mut self) {
        let (clients, servers) = (self.clients.len(), self.servers.len());
        let nodes: Vec<NodeId> = (0..clients)
            .map(super::client_node)
            .chain((0..servers).map(super::server_node))
            .chain([prober::NODE])
            .collect();
        let is_server: Vec<_> = (0..=clients + servers)
            .map(|end| (clients..clients + servers).contains(&end))
            .collect();
        self.network.program(&nodes, &is_server);
    }

    fn send_up(&mut self, endpoint: usize, frame: Vec<u8>) {
        let flights = self.network.travel(self.now, endpoint, Direction::Up, frame, &mut self.rng);
        for Flight { at, frame } in flights.into_iter().flatten() {
            self.push(at, Event::AtSwitch { endpoint, frame });
        }
    }

    fn send_down(&mut self, frames: Vec<(usize, Vec<u8>)>) {
        for (endpoint, frame) in frames {
            let flights =
                self.network.travel(self.now, endpoint, Direction::Down, frame, &mut self.rng);
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

    fn is_frozen(&self, endpoint: usize) -> bool {
        self.ends[endpoint].frozen_until.is_some()
    }

    fn arrive(&mut self, endpoint: usize, frame: Vec<u8>) -> Result<(), String> {
        if self.is_frozen(endpoint) {
            let waiting = &mut self.ends[endpoint].waiting;
            if waiting.len() < WAITING_MAX {
                waiting.push_back(frame);
            }
            return Ok(());
        }
        self.receive(endpoint, &frame)?;
        self.after(endpoint)
    }

    /// Lets the prober send a request that must be refused.
    fn probe(&mut self) {
        if self.phase != Phase::Working {
            return;
        }
        let (clients, servers) = (self.clients.len(), self.servers.len());
        let server = self.rng.random_range(0..servers);
        let about = self.ledger.regions.iter().rev().find(|region| region.server == server);
        if let Some(pointer) = about.map(|region| region.pointer) {
            let node = super::server_node(server);
            let Probe { frame, past_switch } =
                self.prober.probe(server, node, pointer, &mut self.rng);
            if past_switch {
                self.push(self.now, Event::AtEnd { endpoint: clients + server, frame });
            } else {
                self.send_up(clients + servers, frame);
            }
        }
        let pause = Duration::from_micros(self.rng.random_range(100..3000));
        self.push(self.now + pause, Event::Probe);
    }

    fn local(&self, endpoint: usize) -> Timestamp {
        self.ends[endpoint].clock.local(self.now)
    }

    fn receive(&mut self, endpoint: usize, frame: &[u8]) -> Result<(), String> {
        let Some(received) = network::receive(frame, network::PORT) else { return Ok(()) };
        let now = self.local(endpoint);
        let rewritten = self.apply_bug(endpoint, &received);
        let payload = rewritten.as_deref().unwrap_or(received.payload);
        if self.trace
            && let Ok(datagram) = Datagram::parse(received.source, received.destination, payload)
        {
            let header = datagram.header;
            trace!(
                self,
                "endpoint {endpoint} receives {}{} {} -> {} target {} session {:x} sequence {} low water {} \
                 attempt {} offset {} length {} detail {:x} version {}",
                datagram.command().command().map_or_else(String::new, |c| c.to_string()),
                if datagram.is_reply() {
                    format!(" reply {}", datagram.from.tag)
                } else {
                    String::new()
                },
                received.source,
                received.destination,
                header.target,
                header.session,
                header.sequence,
                header.low_water(),
                header.flags.attempt(),
                header.offset,
                header.length,
                header.detail,
                header.page_version,
            );
        }
        match endpoint.checked_sub(self.clients.len()) {
            None => {
                self.clients[endpoint].receive(now, received.source, received.destination, payload);
            }
            Some(server) if server < self.servers.len() => {
                if !self.servers[server].is_away {
                    let frames = &mut self.frames;
                    self.servers[server].receive(now, &received, payload, frames);
                }
            }
            Some(_) => {
                if let Ok(datagram) =
                    Datagram::parse(received.source, received.destination, payload)
                {
                    let node = datagram.from.node;
                    let server = self.ledger.servers.iter().position(|facts| facts.node == node);
                    let server =
                        server.ok_or("the prober received a datagram that is not from a server")?;
                    return self.prober.receive(&datagram, server);
                }
            }
        }
        Ok(())
    }

    fn apply_bug(&mut self, endpoint: usize, received: &network::Received<'_>) -> Option<Vec<u8>> {
        let bug = self.plan.bug?;
        if bug == Bug::NoCrc {
            return bugs::sealed_again(received);
        }
        let datagram =
            Datagram::parse(received.source, received.destination, received.payload).ok()?;
        match bug {
            Bug::ForgetWindow if endpoint >= self.clients.len() => {
                bugs::forget_window(&mut self.seen, &datagram)
            }
            Bug::SameVersion if endpoint < self.clients.len() => bugs::same_version(&datagram),
            Bug::ServesLonger if endpoint < self.clients.len() => bugs::serves_longer(&datagram),
            _ => None,
        }
    }

    /// Sends the frames of an endpoint and sets its timer.
    fn after(&mut self, endpoint: usize) -> Result<(), String> {
        match endpoint.checked_sub(self.clients.len()) {
            None => self.pump(endpoint),
            Some(server) if self.servers.get(server).is_some_and(|server| server.is_away) => Ok(()),
            Some(server) if server < self.servers.len() => {
                self.servers[server].drain(&mut self.frames);
                for frame in core::mem::take(&mut self.frames) {
                    self.send_up(endpoint, frame);
                }
                let due = self.servers[server].responder.poll_timeout();
                self.set_timer(endpoint, due);
                Ok(())
            }
            Some(_) => Ok(()),
        }
    }

    fn set_timer(&mut self, endpoint: usize, due: Option<Timestamp>) {
        let Some(due) = due else { return };
        let at = self.ends[endpoint].clock.world(due).max(self.now);
        if self.ends[endpoint].timer.is_none_or(|timer| at < timer) {
            self.ends[endpoint].timer = Some(at);
            self.push(at, Event::Timer { endpoint });
        }
    }

    fn timeout(&mut self, endpoint: usize) -> Result<(), String> {
        if self.is_frozen(endpoint) {
            return Ok(());
        }
        let now = self.local(endpoint);
        match endpoint.checked_sub(self.clients.len()) {
            None => self.clients[endpoint].handle_timeout(now),
            Some(server) if server < self.servers.len() && !self.servers[server].is_away => {
                self.servers[server].handle_timeout(now, &mut self.frames);
            }
            Some(_) => {}
        }
        self.after(endpoint)
    }

    /// Enters the next phase when this one is over.
    fn move_on(&mut self) {
        let idle = self.clients.iter().all(|client| client.slots.count() == 0);
        match self.phase {
            Phase::Working if idle && self.started >= self.plan.operation_count => {
                self.phase = Phase::Quiet;
                // Faults and provisional pages end within this time.
                let quiet = Duration::from_secs(1) + self.plan.provisional.mul_f64(1.1);
                self.push(self.now + quiet, Event::Finale);
            }
            _ => {}
        }
    }

    fn finale(&mut self) -> Result<(), String> {
        trace!(self, "the final phase begins");
        self.network.heal();
        self.program();
        self.phase = Phase::Reading;
        for (index, server) in self.servers.iter().enumerate() {
            let usage = server.store.usage(super::SPACE);
            self.ledger.check_usage(index, usage.used_pages)?;
            if server.responder.provisional_pages() != 0 {
                return Err(format!("server {index} still has provisional pages"));
            }
        }
        self.final_tasks = workload::final_tasks(&self.ledger).into();
        (0..self.clients.len()).try_for_each(|client| self.pump(client))
    }

    fn finish(mut self) -> Result<Report, String> {
        let left: usize = self.clients.iter().map(|client| client.slots.count()).sum();
        if self.phase != Phase::Reading || left > 0 || !self.final_tasks.is_empty() {
            return Err(format!("no events are left, with {left} outstanding operations"));
        }
        self.ledger.check_histories()?;
        for client in &self.clients {
            client.requesters().for_each(|requester| self.report.add_requester(requester));
            self.report.malformed += client.malformed;
        }
        for server in &self.servers {
            self.report.add_responder(&server.responder);
        }
        self.report.outcomes = core::mem::take(&mut self.ledger.outcomes);
        self.report.outcomes.append(&mut self.prober.outcomes);
        self.report.add_network(self.network.finish());
        self.report.events = self.event_count;
        self.report.virtual_time = Duration::from_nanos(self.now.as_nanos());
        self.report.digest = self.digest;
        Ok(self.report)
    }
}
