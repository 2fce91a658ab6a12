//! Servers that are drained, with servers that do what they are ordered.
#![allow(clippy::single_range_in_vec_init, reason = "a list of one range is meant")]

use std::ops::Range;
use std::time::Duration;

use bluebridge_northbound::migration::{
    Contents, Generations, Order, OrderKind, Refusal, Report, ServedRow, Terms,
};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};

use super::*;
use crate::migration::{GenerationRange, Stage, Wanted};

const LINE: u64 = 8;
pub(super) const CAPACITY: u64 = 1024;

/// Servers that lose their memory only when nothing of it is left, and a controller that may be killed.
pub(super) struct Rack {
    pub(super) core: Core,
    pub(super) disk: Disk,
    pub(super) now: Instant,
    pub(super) members: Vec<NodeRecord>,
    /// Servers that refuse to reserve, servers that allow nothing longer than a line, and servers that do nothing.
    full: BTreeSet<NodeId>,
    scattered: BTreeSet<NodeId>,
    pub(super) away: BTreeSet<NodeId>,
    /// The allocated pages of each home.
    pub(super) own: BTreeMap<NodeId, Vec<Range<u64>>>,
}

impl Rack {
    pub(super) fn new(free: &[u64]) -> Self {
        Self::with(CoreConfig::default(), free)
    }

    pub(super) fn with(config: CoreConfig, free: &[u64]) -> Self {
        let now = Instant::now();
        let mut core = Core::new(config, Stored::default(), 1, now);
        core.learn_ports(SWITCH, ports(16));
        let (disk, members, own) = (Disk::default(), Vec::new(), BTreeMap::new());
        let (full, scattered, away) = <(BTreeSet<_>, BTreeSet<_>, BTreeSet<_>)>::default();
        let mut this = Self { core, disk, now, members, full, scattered, away, own };
        for (port, free) in (1..).zip(free) {
            let name = format!("s{port}");
            let record = join(&mut this.core, now, &memory(&name, port, CAPACITY));
            this.core.migrations_mut().connect(record.id(), record.node.into(), true);
            this.core.heartbeat(now, member(&record), *free).unwrap();
            this.members.push(record);
        }
        this.store();
        this
    }

    pub(super) fn store(&mut self) {
        let changes = self.core.take_changes();
        self.disk.write(changes);
    }

    /// The controller is killed, and starts again.
    pub(super) fn restart(&mut self) {
        let free: Vec<_> = self.core.nodes().map(|node| node.free_pages.unwrap_or(0)).collect();
        self.core = Core::new(CoreConfig::default(), self.disk.load(), 2, self.now);
        self.core.learn_ports(SWITCH, ports(16));
        for (record, free) in self.members.clone().iter().zip(free) {
            // A deputy may answer for it since.
            if !self.core.is_live(record.id(), record.incarnation) {
                continue;
            }
            if !self.away.contains(&record.id()) {
                self.core.migrations_mut().connect(record.id(), record.node.into(), true);
            }
            self.core.heartbeat(self.now, member(record), free).unwrap();
        }
    }

    pub(super) fn hear(&mut self, from: NodeId, report: Report) {
        let link = u64::from(from.0);
        self.core.migrations_mut().handle(self.now, from, link, report).unwrap();
        self.store();
    }

    /// A server does what it is ordered.
    pub(super) fn obey(&mut self, id: NodeId) {
        if self.away.contains(&id) || self.core.node(id).is_none_or(|it| !it.record.attached) {
            return;
        }
        for order in self.core.migrations().orders(id) {
            let report = self.report(id, order);
            self.hear(id, report);
        }
    }

    /// What a server reports when it has done what it is ordered.
    pub(super) fn report(&self, id: NodeId, order: Order) -> Report {
        let rows = |Terms { home, pages, .. }: &Terms| {
            let Contents { generation: first, .. } = *home;
            let generations = Generations { first, last: first };
            vec![ServedRow { pages: pages.clone(), generations }]
        };
        match order {
            Order::Reserve(terms) if self.full.contains(&id) => {
                let (migration, order) = (terms.migration, OrderKind::Reserve);
                Report::Refused { migration, order, why: Refusal::NoRoom }
            }
            Order::Reserve(terms) => Report::Reserved(terms.migration),
            Order::Allow(Terms { migration, pages, .. })
                if self.scattered.contains(&id) && pages.end - pages.start > LINE =>
            {
                Report::Refused { migration, order: OrderKind::Allow, why: Refusal::Overlap }
            }
            Order::Allow(terms) => {
                Report::Allowed { migration: terms.migration, fences: Vec::new() }
            }
            Order::Take { terms, .. } => Report::Progress {
                migration: terms.migration,
                kept: rows(&terms),
                on_the_way_count: 0,
                in_doubt_count: 0,
                free_count: 0,
                is_done: true,
            },
            Order::Withdraw(migration) => Report::Withdrawn(migration),
            Order::Settle(terms) => {
                Report::Settled { migration: terms.migration, kept: rows(&terms) }
            }
            Order::Seal(is_sealed) => Report::Sealed(is_sealed),
            Order::Deputize(of) => Report::Deputized {
                home: of.home,
                incarnation: of.incarnation,
                version: of.version,
            },
            Order::Dismiss { home, incarnation } => Report::Dismissed { home, incarnation },
            Order::Learn(of) => Report::Learned { home: of.home, version: of.version },
            Order::Forget(migration) => Report::Forgotten(migration),
            Order::Release(migration) => Report::Released(migration),
            Order::Lose { node, began } => Report::Lost { node, began },
            Order::Discard { home, .. } => Report::Free { home, pages: Vec::new() },
            Order::Report { home, round } => {
                let known = self.core.migrations().elsewhere();
                let rows = known.filter(|of| of.home == home.into()).flat_map(|of| of.rows.iter());
                let its = rows.filter(|(_, placed)| placed.at.id() == id);
                let served = its.map(|(pages, placed)| {
                    let GenerationRange { first, last } = placed.generations;
                    let [first, last] = [first, last].map(|it| ArenaGeneration::new(it).unwrap());
                    ServedRow { pages: pages.clone(), generations: Generations { first, last } }
                });
                let (served, given, lost) = (served.collect(), Vec::new(), Vec::new());
                Report::Claims { home, round, served, given, lost }
            }
        }
    }

    /// One step of draining a server, as the service does it. Returns whether the server is drained.
    pub(super) fn step(&mut self, id: NodeId) -> bool {
        let own = self.own.get(&id).cloned().unwrap_or_default();
        if self.core.migrations().is_draining(id)
            && !self.away.contains(&id)
            && !self.core.drain_step(self.now, id, &own).serves
        {
            self.core.drained(self.now, id);
        }
        self.store();
        self.is_drained(id)
    }

    pub(super) fn is_drained(&self, id: NodeId) -> bool {
        self.core.migrations().drain_of(id).is_some_and(|drain| drain.is_done)
    }

    pub(super) fn problem(&self, id: NodeId) -> Option<String> {
        self.core.migrations().drain_of(id).and_then(|drain| drain.problem)
    }

    /// Steps of all until these servers are drained.
    pub(super) fn run(&mut self, drained: &[NodeId]) {
        for _ in 0..1000 {
            self.now += Duration::from_secs(1);
            for id in self.members.iter().map(NodeRecord::id).collect::<Vec<_>>() {
                self.step(id);
                self.obey(id);
            }
            if drained.iter().all(|id| self.is_drained(*id)) {
                return;
            }
        }
        let shown: Vec<_> = self.core.migrations().drains().collect();
        panic!("not drained: {shown:?}");
    }

    /// A server comes back with empty memory, and all know it.
    pub(super) fn lose(&mut self, id: NodeId) {
        let at = self.members.iter().position(|record| record.id() == id).unwrap();
        let port = u16::try_from(at + 1).unwrap();
        self.core.migrations_mut().disconnect(id, id.0.into());
        let before = memory(&self.members[at].name, port, CAPACITY);
        let record = join(&mut self.core, self.now, &again(&before));
        self.core.migrations_mut().connect(id, id.0.into(), true);
        self.core.heartbeat(self.now, member(&record), CAPACITY).unwrap();
        self.members[at] = record;
        self.own.remove(&id);
        self.store();
        // They learn of the loss, then report, and the home learns the result.
        for _ in 0..3 {
            for id in self.members.iter().map(NodeRecord::id).collect::<Vec<_>>() {
                self.obey(id);
            }
        }
    }

    /// The server of a page.
    pub(super) fn at(&self, home: NodeId, page: u64) -> NodeId {
        let of_home = self.core.migrations().elsewhere().find(|of| of.home.id() == home);
        let row = of_home.and_then(|of| of.rows.within(&(page..page + 1)).next().map(|it| it.1.at));
        row.map_or(home, |at| at.id())
    }

    fn takers(&self) -> Vec<NodeId> {
        self.core.migrations().iter().map(|of| of.record.taker.id()).collect()
    }
}

pub(super) const S1: NodeId = NodeId(1);
pub(super) const S2: NodeId = NodeId(2);
pub(super) const S3: NodeId = NodeId(3);

#[test]
fn what_a_drained_server_has_moves_to_the_most_free_memory_and_nothing_is_led_to_it() {
    let mut rack = Rack::new(&[900, 400, 700]);
    rack.own.insert(S1, vec![3..4, 40..45, 100..101]);
    let members = |rack: &Rack| -> Vec<_> {
        rack.core.anycast_members(SWITCH, SPACE).into_iter().map(|(id, _)| id).collect()
    };
    assert_eq!(members(&rack), [S1, S2, S3]);
    assert_eq!(rack.core.drain(NodeId(9)), None, "there is none");
    assert_eq!(rack.core.drain(S1), Some(true));
    assert_eq!(rack.core.drain(S1), Some(false), "it is drained already");
    assert_eq!(members(&rack), [S2, S3]);
    assert!(!rack.step(S1), "it serves pages");
    let shown: Vec<_> = rack
        .core
        .migrations()
        .iter()
        .map(|of| (of.record.pages.clone(), of.record.taker.id(), of.record.reason.clone()))
        .collect();
    let reason = |free| format!("s1 is drained, and s3 has the most free memory: {free} pages");
    assert_eq!(
        shown,
        [(0..8, S3, reason(700)), (40..48, S3, reason(692)), (96..104, S3, reason(684))],
        "whole lines"
    );
    rack.run(&[S1]);
    assert_eq!([3, 40, 100].map(|page| rack.at(S1, page)), [S3; 3]);
    assert_eq!(rack.at(S1, 50), S1, "nothing was allocated there");
    assert!(rack.core.undrain(S1) && !rack.core.undrain(S1));
    assert_eq!(members(&rack), [S1, S2, S3]);
}

#[test]
fn adopted_pages_move_on_and_may_go_home() {
    let mut rack = Rack::new(&[900, 400, 100]);
    rack.own.insert(S1, vec![0..64]);
    let wanted = Wanted { home: S1, space: SPACE, generation: None, pages: Some(0..64), taker: S2 };
    rack.core.migrate(&wanted).unwrap();
    rack.core.drain(S2);
    rack.run(&[S2]);
    assert_eq!(rack.at(S1, 0), S1, "home has the most free memory");
}

#[test]
fn a_drain_goes_on_after_kills_of_the_controller_and_absences_of_servers() {
    for seed in 0..60 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut rack = Rack::new(&[900, 900, 900, 900]);
        rack.own.insert(S1, (0..12).map(|number| number * 40..number * 40 + 9).collect());
        rack.own.insert(S2, vec![0..300]);
        rack.core.drain(S1);
        rack.core.drain(S2);
        rack.store();
        for _ in 0..60 {
            rack.now += Duration::from_secs(1);
            let id = NodeId(rng.random_range(1..=4));
            match rng.random_range(0..10) {
                0 => rack.restart(),
                1 => {
                    rack.away.insert(id);
                    rack.core.migrations_mut().disconnect(id, id.0.into());
                }
                2 if rack.away.remove(&id) => {
                    rack.core.migrations_mut().connect(id, id.0.into(), true);
                }
                3 => drop(rack.full.insert(id)),
                4 => drop(rack.full.remove(&id)),
                5 => {
                    let open = rack.core.migrations().iter().find(|of| of.record.is_open());
                    let id = open.map(|of| of.record.id);
                    if let Some(id) = id {
                        rack.core.migrations_mut().cancel(id).unwrap();
                    }
                }
                _ => {}
            }
            rack.store();
            for id in 1..=4 {
                rack.step(NodeId(id));
            }
            rack.obey(id);
        }
        rack.full.clear();
        for id in std::mem::take(&mut rack.away) {
            rack.core.migrations_mut().connect(id, id.0.into(), true);
        }
        rack.run(&[S1, S2]);
        for (home, own) in rack.own.clone() {
            for page in own.into_iter().flatten() {
                let at = rack.at(home, page);
                assert!(
                    at == S3 || at == NodeId(4),
                    "seed {seed}: page {page} of {home} is at {at}"
                );
            }
        }
        let open = rack.core.migrations().iter().filter(|of| of.record.is_open()).count();
        assert_eq!(open, 0, "seed {seed}");
    }
}

#[test]
fn a_refused_range_goes_to_another_server_and_too_little_room_is_named() {
    let mut rack = Rack::new(&[900, 400, 700]);
    rack.own.insert(S1, vec![0..64]);
    rack.full.insert(S3);
    rack.core.drain(S1);
    rack.run(&[S1]);
    assert_eq!((rack.takers().first(), rack.at(S1, 0)), (Some(&S3), S2));

    let mut rack = Rack::new(&[900, 4, 7]);
    rack.own.insert(S1, vec![0..64]);
    rack.core.drain(S1);
    assert!(!rack.step(S1));
    let problem = rack.problem(S1).unwrap();
    assert!(
        problem.contains("no memory server has room") && problem.contains("262144 bytes"),
        "{problem}"
    );
    let record = rack.members[1].clone();
    rack.core.heartbeat(rack.now, member(&record), 500).unwrap();
    rack.run(&[S1]);
    assert_eq!(rack.at(S1, 63), S2);

    let mut rack = Rack::new(&[900, 900]);
    rack.own.insert(S1, vec![0..8]);
    rack.core.drain(S1);
    rack.core.drain(S2);
    assert!(!rack.step(S1));
    let problem = rack.problem(S1).unwrap();
    assert!(problem.contains("no other memory server of the space"), "{problem}");
    assert!(rack.step(S2), "it has nothing");
    // What is allocated there afterwards moves as well.
    rack.core.undrain(S1);
    rack.own.insert(S2, vec![8..16]);
    assert!(!rack.step(S2));
    rack.run(&[S2]);
    assert_eq!(rack.at(S2, 8), S1);
}

#[test]
fn what_cannot_move_does_not_hold_up_the_rest() {
    let mut rack = Rack::new(&[900, 900, 900]);
    // More ranges that cannot move than are tried at once: their home lost the memory, and is the only other server.
    let lost: Vec<_> = (0..30).map(|number| number * 16..number * 16 + 8).collect();
    rack.own.insert(S1, lost.clone());
    rack.core.drain(S1);
    rack.core.drain(S3);
    rack.run(&[S1, S3]);
    assert!(lost.iter().all(|pages| rack.at(S1, pages.start) == S2));
    rack.core.undrain(S1);
    rack.lose(S1);
    rack.own.insert(S2, vec![500..508, 600..608]);
    rack.core.drain(S2);
    for _ in 0..40 {
        rack.now += Duration::from_secs(1);
        for id in [S1, S2] {
            rack.step(id);
            rack.obey(id);
        }
    }
    assert_eq!([500, 600].map(|page| rack.at(S2, page)), [S1; 2]);
    assert!(!rack.is_drained(S2));
    let problem = rack.problem(S2).unwrap();
    assert!(
        problem.starts_with("s1 lost the memory that some of these pages were part of"),
        "{problem}"
    );
    rack.core.undrain(S3);
    rack.run(&[S2]);
    assert!(rack.problem(S2).is_none());
    let moved: Vec<_> = rack.core.migrations().iter().map(|of| of.record.clone()).collect();
    let on = moved.iter().filter(|it| (it.home.id(), it.giver.id(), it.taker.id()) == (S1, S2, S3));
    assert_eq!(on.count(), 30);
}

#[test]
fn takers_that_are_away_do_not_hold_up_a_drain() {
    let mut rack = Rack::new(&[900, 900, 800]);
    rack.own.insert(S1, (0..8).map(|number| number * 16..number * 16 + 8).collect());
    rack.core.drain(S1);
    rack.step(S1);
    assert_eq!(rack.takers(), [S2, S2, S2, S2]);
    rack.away.insert(S2);
    rack.core.migrations_mut().disconnect(S2, S2.0.into());
    for _ in 0..30 {
        rack.now += Duration::from_secs(1);
        rack.core.migrations_mut().handle_timeout(rack.now);
        for id in [S1, S3] {
            rack.step(id);
            rack.obey(id);
        }
    }
    assert!((0..8).all(|number| rack.at(S1, number * 16) == S3), "{:?}", rack.takers());
    assert!(rack.is_drained(S1));
}

#[test]
fn a_range_that_its_giver_refuses_moves_in_parts() {
    let mut rack = Rack::new(&[900, 900]);
    rack.own.insert(S1, vec![0..64]);
    rack.scattered.insert(S1);
    rack.core.drain(S1);
    rack.run(&[S1]);
    assert!((0..64).all(|page| rack.at(S1, page) == S2));
}

#[test]
fn only_a_few_ranges_move_at_a_time_and_undrain_lets_them_finish() {
    let mut rack = Rack::new(&[900, 900]);
    rack.own.insert(S1, (0..20).map(|number| number * 16..number * 16 + 8).collect());
    rack.core.drain(S1);
    rack.step(S1);
    rack.step(S1);
    assert_eq!(rack.core.migrations().iter().count(), 4);
    rack.core.undrain(S1);
    for _ in 0..20 {
        rack.step(S1);
        rack.obey(S1);
        rack.obey(S2);
    }
    let stages: Vec<_> = rack.core.migrations().iter().map(|of| of.record.stage).collect();
    assert_eq!(stages, [Stage::Closed; 4]);
}
