//! No generation, tag and offset is given to two allocations, whatever is ended and started: the real
//! arena and the real controller core, with a store that a crash may leave behind.
//!
//! Planted bugs must be found.

use std::collections::{BTreeMap, HashSet};
use std::time::Instant;

use bluebridge_controller::core::{
    Assigned, Attachment, Carrier, Change, Core, CoreConfig, Join, Member, NodeRecord, Ports, Role,
    Stored, SwitchId,
};
use bluebridge_memserver::{Arena, ArenaConfig};
use bluebridge_p4::pipeline::{MacAddr, SwitchPort};
use bluebridge_protocol::store::{Access, Grant, PageStore};
use bluebridge_wire::{ArenaGeneration, Location, Space, Status, address::PAGE_BYTES};
use rand::{Rng, SeedableRng, rngs::SmallRng};

const SPACE: Space = Space(7);

/// Pages of the arena: few, so that they are used up soon.
const PAGES: u32 = 6;

/// Tags of a generation.
const LAST_TAG: u8 = 4;

const STEPS: usize = 600;

/// A planted bug in how generations are reserved or used.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Bug {
    /// The controller responds to a heartbeat before it has stored what it reserved.
    AnswersUnstored,
    /// The controller forgets what it reserved beyond the first generation of a life.
    ForgetsExtensions,
    /// The server accepts a pointer by its tag alone.
    IgnoresGenerations,
    /// The server uses the generation that it requested before the controller reserved it.
    TakesUnasked,
    /// A server that lost its contents begins with its previous generation.
    RepeatsGeneration,
}

const BUGS: [Bug; 5] = [
    Bug::AnswersUnstored,
    Bug::ForgetsExtensions,
    Bug::IgnoresGenerations,
    Bug::TakesUnasked,
    Bug::RepeatsGeneration,
];

/// The events of a history, to show that it tested something.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    created: u32,
    refused_for_a_moment: u32,
    refused_stale: u32,
    restarts: u32,
    reservations: u32,
}

/// A server process and its assigned record.
struct Server {
    record: NodeRecord,
    arena: Arena,
    live: Vec<(Grant, u32)>,
}

struct World {
    rng: SmallRng,
    bug: Option<Bug>,
    now: Instant,
    core: Core,
    /// What remains after a crash of the controller.
    disk: BTreeMap<u16, NodeRecord>,
    nonce: u64,
    version: u64,
    server: Server,
    /// Every generation, tag and page that was allocated, of each node.
    given: HashSet<(u16, u16, u8, u64)>,
    /// Pointers that must never be accepted again, with their node.
    dead: Vec<(u16, Grant, u32)>,
    tally: Tally,
}

fn ports() -> Ports {
    Ports::Listed([(SwitchPort(1), "sw1".to_owned())].into())
}

fn request(nonce: u64) -> Join {
    Join {
        name: "s1".to_owned(),
        role: Role::Memory,
        space: SPACE,
        mac: MacAddr([2, 0, 0, 0, 0, 1]),
        switch: String::new(),
        attachment: Attachment::Port(SwitchPort(1)),
        capacity_pages: PAGES.into(),
        shard_count: 1,
        carrier: Carrier::Socket,
        mtu: 9000,
        nonce,
        previous: None,
        notices: false,
    }
}

fn generation(number: u16) -> ArenaGeneration {
    ArenaGeneration::new(number).expect("the controller gives no others")
}

fn start(record: NodeRecord) -> Server {
    let (first, last) = record.generations().into_inner();
    let config = ArenaConfig {
        generation: generation(first),
        last_generation: generation(last),
        last_tag: LAST_TAG,
        quarantine_divisor: 3,
        ..ArenaConfig::default()
    };
    Server { record, arena: Arena::on_heap(&config, PAGES), live: Vec::new() }
}

fn access(grant: Grant, page: u64) -> Access {
    let offset = grant.location.offset() + page * PAGE_BYTES as u64;
    let location = Location::new(grant.location.generation(), offset).expect("in the arena");
    Access { location, length_bytes: 1, tag: grant.tag, space: SPACE }
}

impl World {
    fn new(seed: u64, bug: Option<Bug>) -> Self {
        let now = Instant::now();
        let mut core = Core::new(CoreConfig::default(), Stored::default(), 1, now);
        core.learn_ports(SwitchId::default(), ports());
        let Assigned(record) =
            core.join(now, &request(1), [7; 16]).expect("there is no other node");
        let disk = BTreeMap::from([(record.node, record.clone())]);
        drop(core.take_changes());
        Self {
            rng: SmallRng::seed_from_u64(seed),
            bug,
            now,
            core,
            disk,
            nonce: 1,
            version: 1,
            server: start(record),
            given: HashSet::new(),
            dead: Vec::new(),
            tally: Tally::default(),
        }
    }

    fn run(mut self) -> Result<Tally, String> {
        for _ in 0..STEPS {
            match self.rng.random_range(0..100) {
                0..45 => self.create()?,
                45..75 => self.delete()?,
                75..90 => self.heartbeat(),
                90..93 => self.restart_controller(),
                93..95 => self.restart_server(),
                _ => self.try_stale()?,
            }
        }
        self.try_all_stale()?;
        Ok(self.tally)
    }

    fn create(&mut self) -> Result<(), String> {
        let pages = self.rng.random_range(1..=3);
        match self.server.arena.create(SPACE, pages) {
            Ok(grant) => {
                let node = self.server.record.node;
                let first = grant.location.page();
                for page in first..first + u64::from(pages) {
                    let name = (node, grant.location.generation().number(), grant.tag.0, page);
                    if !self.given.insert(name) {
                        return Err(format!("{name:?} was given twice"));
                    }
                }
                self.server.live.push((grant, pages));
                self.tally.created += 1;
                Ok(())
            }
            Err(Status::Overloaded) => {
                self.tally.refused_for_a_moment += 1;
                let usage = self.server.arena.arena_usage();
                let is_asked = usage.wanted_generation > usage.last_generation;
                is_asked
                    .then_some(())
                    .ok_or_else(|| "it waits for a generation that it did not request".to_owned())
            }
            Err(Status::OutOfMemory) => Ok(()),
            Err(status) => Err(format!("a CREATE was refused: {status}")),
        }
    }

    fn delete(&mut self) -> Result<(), String> {
        if self.server.live.is_empty() {
            return Ok(());
        }
        let which = self.rng.random_range(0..self.server.live.len());
        let (grant, pages) = self.server.live.swap_remove(which);
        self.dead.push((self.server.record.node, grant, pages));
        let freed = self.server.arena.delete(access(grant, 0), pages);
        (freed == Ok(pages)).then_some(()).ok_or_else(|| format!("a DELETE ended with {freed:?}"))
    }

    /// A heartbeat; the controller may crash during it, and the response may be lost.
    fn heartbeat(&mut self) {
        let usage = self.server.arena.arena_usage();
        if self.bug == Some(Bug::TakesUnasked) {
            self.server.arena.reserve(usage.wanted_generation);
        }
        let NodeRecord { incarnation, token, .. } = self.server.record;
        let who = Member { node: self.server.record.id(), incarnation, token };
        let wanted = usage.wanted_generation.number();
        self.core.reserve(who, wanted).expect("the only server's only life");
        let last = *self.core.node(who.node).expect("it joined").record.generations().end();
        let is_crash = self.rng.random_ratio(1, 8);
        if is_crash && self.rng.random_bool(0.5) {
            // Before it has stored anything.
            drop(self.core.take_changes());
            if self.bug == Some(Bug::AnswersUnstored) {
                self.server.arena.reserve(generation(last));
            }
            return self.restart_controller();
        }
        self.store();
        if is_crash {
            return self.restart_controller();
        }
        if self.rng.random_ratio(7, 8) {
            self.tally.reservations += u32::from(last > usage.last_generation.number());
            self.server.arena.reserve(generation(last));
        }
    }

    fn store(&mut self) {
        for change in self.core.take_changes() {
            if let Change::Node(mut record) = change {
                if self.bug == Some(Bug::ForgetsExtensions) {
                    record.last_generation = record.generation;
                }
                self.disk.insert(record.node, record);
            }
        }
    }

    fn restart_controller(&mut self) {
        let nodes = self.disk.values().cloned().collect();
        let stored = Stored { nodes, ..Stored::default() };
        self.version += 1;
        self.core = Core::new(CoreConfig::default(), stored, self.version, self.now);
        self.core.learn_ports(SwitchId::default(), ports());
    }

    /// The contents are lost, and every pointer to them is dead.
    fn restart_server(&mut self) {
        self.nonce += 1;
        let joined = self.core.join(self.now, &request(self.nonce), [7; 16]);
        let Assigned(mut record) = joined.expect("from the same interface");
        self.store();
        let node = self.server.record.node;
        let lost = self.server.live.drain(..).map(|(grant, pages)| (node, grant, pages));
        self.dead.extend(lost);
        if self.bug == Some(Bug::RepeatsGeneration) {
            record.generation = self.server.record.generation;
        }
        self.server = start(record);
        self.tally.restarts += 1;
    }

    fn try_stale(&mut self) -> Result<(), String> {
        if self.dead.is_empty() {
            return Ok(());
        }
        let which = self.rng.random_range(0..self.dead.len());
        self.refuse(which)
    }

    fn try_all_stale(&mut self) -> Result<(), String> {
        (0..self.dead.len()).try_for_each(|which| self.refuse(which))
    }

    fn refuse(&mut self, which: usize) -> Result<(), String> {
        let (node, grant, pages) = self.dead[which];
        if node != self.server.record.node {
            return Ok(());
        }
        let is_of_now = grant.location.generation() >= self.server.arena.generation();
        for page in 0..u64::from(pages) {
            let status = self.check(access(grant, page));
            let is_right = match status {
                Err(Status::StaleTag | Status::NotAllocated) => is_of_now,
                Err(Status::StaleGeneration) => !is_of_now,
                _ => false,
            };
            if !is_right {
                return Err(format!("a dead pointer to {grant:?} got {status:?}"));
            }
            self.tally.refused_stale += 1;
        }
        Ok(())
    }

    fn check(&self, access: Access) -> Result<(), Status> {
        let arena = &self.server.arena;
        let outcome = arena.check(access);
        let is_late = access.location.generation() >= arena.generation();
        if self.bug != Some(Bug::IgnoresGenerations) || outcome != Err(Status::StaleTag) || !is_late
        {
            return outcome;
        }
        let (first, last) = (arena.generation(), arena.arena_usage().last_generation);
        let accepted = (first.number()..=last.number()).any(|number| {
            let offset = access.location.offset();
            let location = Location::new(generation(number), offset).expect("in the arena");
            arena.check(Access { location, ..access }).is_ok()
        });
        if accepted { Ok(()) } else { outcome }
    }
}

#[test]
fn no_pointer_ever_fits_two_allocations() {
    let mut sum = Tally::default();
    for seed in 0..400 {
        let tally = World::new(seed, None).run().unwrap_or_else(|what| panic!("{seed}: {what}"));
        sum.created += tally.created;
        sum.refused_for_a_moment += tally.refused_for_a_moment;
        sum.refused_stale += tally.refused_stale;
        sum.restarts += tally.restarts;
        sum.reservations += tally.reservations;
    }
    // Else nothing was tried.
    let Tally { created, refused_for_a_moment, refused_stale, restarts, reservations } = sum;
    assert!(created > 10_000 && refused_stale > 10_000, "{sum:?}");
    assert!(refused_for_a_moment > 100 && restarts > 1_000 && reservations > 1_000, "{sum:?}");
}

#[test]
fn planted_bugs_with_generations_are_found() {
    for bug in BUGS {
        let found = (0..400).find_map(|seed| World::new(seed, Some(bug)).run().err());
        assert!(found.is_some(), "{bug:?} was not found");
    }
}
