//! Memory that moves by itself: makes readings from the switches' counters, and carries decisions out
//! ([`crate::migration::rebalance`]).
//!
//! A packet to a server is counted by the switch to which the server is connected, by the longest entry of `directory`. A
//! block that is to be counted by itself gets an entry there that leads where the packets of the block go without it. So
//! such entries, which may be there or not, change the way of no packet.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::{Duration, Instant};

use bluebridge_p4::pipeline::{Action, Forward, Key};
use bluebridge_wire::address::{NODE_PREFIX_LEN, PAGE_SHIFT};
use bluebridge_wire::{ArenaGeneration, NodeId, Space};

use super::desired::Route;
use super::{Body, Change, Core, Node, Role, SwitchId, Tables};
use crate::migration::rebalance::{
    Block, Count, ENTRIES_MAX, Move, Pages, Plan, Rate, Rates, Reading, RebalanceRecord,
    Rebalancer, Server,
};
use crate::migration::{End, GenerationRange, MigrateError, MigrationRecord, Moves, Stage, Wanted};

/// How the reasons of own migrations begin, by which they are known again after a restart.
const REASON: &str = "rebalancing: ";

/// How long counting goes on after somebody asked for a plan.
const ASKED: Duration = Duration::from_secs(10);

/// Bits of the directory's key.
const KEY_BITS: u8 = 112;

/// The bit of the key that is set in addresses of endpoints: they are no pages.
const ENDPOINT_BIT: u128 = 1 << 63;

/// Bits of the key after the number of a place: the offset in a page, without those that the key has not.
const PLACE_SHIFT: u32 = PAGE_SHIFT;

/// The counters of a switch at some time.
#[derive(Clone, Debug)]
pub struct SwitchCounters {
    /// The switch.
    pub switch: SwitchId,
    /// When they were read.
    pub at: Instant,
    /// Entries of `directory`: where they lead, and their packets.
    pub entries: Vec<(Key, Forward, u64)>,
}

/// What a step did.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct RebalanceStep {
    /// What begins to move where, and why, for people.
    pub began: Vec<String>,
    /// What does not move, and why, for people.
    pub refused: Vec<String>,
}

/// A memory server in the view of operators.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerView {
    /// Its node.
    pub id: NodeId,
    /// Its name.
    pub name: String,
    /// Its space.
    pub space: u16,
    /// Packets per second to it, if they were counted for a window.
    pub rate: Option<f64>,
    /// Its free pages.
    pub free_pages: u64,
    /// All its pages.
    pub total_pages: u64,
    /// Whether it has too much of the traffic, for a window already.
    pub is_hot: bool,
    /// Whether it has too little free memory.
    pub is_full: bool,
}

/// The state in the view of operators.
#[derive(Clone, Debug, PartialEq)]
pub struct RebalanceView {
    /// Whether memory moves by itself.
    pub is_on: bool,
    /// The time over which rates are learned.
    pub window: Duration,
    /// Whether counters are read.
    pub is_active: bool,
    /// Whether too little is known yet to decide anything.
    pub is_learning: bool,
    /// Entries that only count.
    pub entry_count: usize,
    /// Every memory server.
    pub servers: Vec<ServerView>,
    /// What was last decided, or would be.
    pub plan: Plan,
    /// Own migrations that are open.
    pub open_count: usize,
}

/// The rates at one switch.
#[derive(Debug, Default)]
struct Counters {
    entries: Rates<Key>,
    /// Where each entry leads.
    leads: BTreeMap<Key, NodeId>,
    servers: Rates<NodeId>,
    /// What was counted for each server.
    sums: BTreeMap<NodeId, u64>,
}

/// What the core has of it.
#[derive(Debug)]
pub(super) struct Rebalancing {
    record: Option<RebalanceRecord>,
    /// Until when counting goes on because somebody asked, and over which time.
    asked: Option<(Instant, Duration)>,
    rebalancer: Rebalancer,
    switches: BTreeMap<SwitchId, Counters>,
    /// Own migrations that were open at the last step, and the last of all.
    own: BTreeSet<u64>,
    last_id: Option<u64>,
    servers: Vec<ServerView>,
    is_learning: bool,
}

impl Rebalancing {
    pub(super) fn new(record: Option<RebalanceRecord>) -> Self {
        Self {
            record,
            asked: None,
            rebalancer: Rebalancer::default(),
            switches: BTreeMap::new(),
            own: BTreeSet::new(),
            last_id: None,
            servers: Vec::new(),
            is_learning: true,
        }
    }

    /// The time over which rates are learned now; `None` if nothing is to be counted.
    fn window(&self, now: Instant) -> Option<Duration> {
        let asked = self.asked.filter(|(until, _)| *until > now).map(|(_, window)| window);
        self.record.map(RebalanceRecord::window).or(asked)
    }

    /// Forgets rates, so that they are learned anew.
    fn restart(&mut self) {
        self.rebalancer.rest();
        self.switches.clear();
        self.servers.clear();
        self.is_learning = true;
    }
}

/// Whether a migration is open that was decided here.
fn is_own(record: &MigrationRecord) -> bool {
    record.is_open() && record.reason.starts_with(REASON)
}

/// Whether a migration ended early, and its giver did not refuse it: then another taker would have the same end.
fn is_takers_fault(record: &MigrationRecord) -> bool {
    match record.end {
        None | Some(End::GiverLost) => false,
        Some(End::Refused { node, .. }) => node != record.giver.node,
        Some(End::Cancelled | End::TakerAway | End::TakerLost) => true,
    }
}

/// The key of a block.
pub(super) fn block_key(space: Space, block: &Block) -> Key {
    let node = (space.scope() as u128) << 80 | u128::from(block.home.0) << 64;
    let order = u8::try_from(block.order).unwrap_or(u8::MAX);
    let shift = u8::try_from(PLACE_SHIFT).unwrap_or(u8::MAX);
    Key::Directory {
        prefix: node | u128::from(block.first) << PLACE_SHIFT,
        prefix_len: KEY_BITS.saturating_sub(order.saturating_add(shift)),
    }
}

/// The block of a key; `None` for one of endpoints or several nodes.
pub(super) fn key_block(key: &Key) -> Option<Block> {
    let Key::Directory { prefix, prefix_len } = *key else { return None };
    let order = u32::from(KEY_BITS.checked_sub(prefix_len)?).checked_sub(PLACE_SHIFT)?;
    let is_of_pages = prefix_len > NODE_PREFIX_LEN && prefix & ENDPOINT_BIT == 0;
    let home = NodeId(u16::try_from(prefix >> 64 & 0xffff).ok()?);
    let places = u64::try_from(prefix & (ENDPOINT_BIT - 1)).ok()? >> PLACE_SHIFT;
    is_of_pages.then_some(Block { home, first: places, order })
}

/// Where the longest shorter entry leads.
fn shorter(tables: &Tables, prefix: u128, prefix_len: u8) -> Option<&Body> {
    (0..prefix_len).rev().find_map(|prefix_len| {
        let mask = u128::MAX.checked_shl(u32::from(KEY_BITS - prefix_len)).unwrap_or(0);
        tables.entries.get(&Key::Directory { prefix: prefix & mask, prefix_len })
    })
}

impl Core {
    /// Lets memory move by itself, and learns rates over a window; returns whether it did not before.
    pub fn rebalance_on(&mut self, window: Duration) -> bool {
        let record =
            RebalanceRecord { window_ms: u64::try_from(window.as_millis()).unwrap_or(u64::MAX) };
        let before = self.rebalancing.record.replace(record);
        if before != Some(record) {
            self.changes.push(Change::Rebalance(Some(record)));
            self.rebalancing.restart();
            self.dirty = true;
        }
        before.is_none()
    }

    /// Lets no more memory move by itself, and counts for no plan any more; returns whether it did before. Migrations that are open go on.
    pub fn rebalance_off(&mut self) -> bool {
        let before = self.rebalancing.record.take();
        if before.is_some() {
            self.changes.push(Change::Rebalance(None));
        }
        if self.rebalancing.asked.take().is_some() || before.is_some() {
            self.rebalancing.restart();
            self.dirty = true;
        }
        before.is_some()
    }

    /// Counts for some time, so that a plan can be made. While memory moves by itself, its window counts.
    pub fn rebalance_asked(&mut self, now: Instant, window: Duration) {
        // Also if the time for the plan before is over: what was learned may still be there.
        let before = self.rebalancing.asked.replace((now + ASKED, window));
        let is_other = before.is_some_and(|(_, before)| before != window);
        if is_other && self.rebalancing.record.is_none() {
            self.rebalancing.restart();
            self.dirty = true;
        }
    }

    /// Whether counters are of interest.
    #[must_use]
    pub fn rebalances(&self, now: Instant) -> bool {
        self.rebalancing.window(now).is_some()
    }

    /// Servers whose allocations are of interest: they have too little free memory.
    #[must_use]
    pub fn rebalance_full(&self) -> Vec<NodeId> {
        self.rebalancing.rebalancer.full().collect()
    }

    /// The state in the view of operators.
    #[must_use]
    pub fn rebalance_view(&self, now: Instant) -> RebalanceView {
        let of = &self.rebalancing;
        let window = of.window(now);
        RebalanceView {
            is_on: of.record.is_some(),
            window: window.unwrap_or(crate::migration::rebalance::WINDOW),
            is_active: window.is_some(),
            is_learning: window.is_some() && of.is_learning,
            entry_count: of.rebalancer.counted().count(),
            servers: of.servers.clone(),
            plan: of.rebalancer.plan().clone(),
            open_count: self.migrations.iter().filter(|shown| is_own(shown.record)).count(),
        }
    }

    /// Learns from counters and known allocations, and begins to move what should move.
    pub fn rebalance_step(
        &mut self,
        now: Instant,
        counters: &[SwitchCounters],
        allocated: &BTreeMap<NodeId, Vec<Range<u64>>>,
    ) -> RebalanceStep {
        let Some(window) = self.rebalancing.window(now) else {
            if self.rebalancing.rebalancer.counted().next().is_some() {
                self.dirty = true;
            }
            self.rebalancing.restart();
            return RebalanceStep::default();
        };
        for of in counters {
            self.note_counters(window, of);
        }
        self.note_moves(now, window);
        let reading = self.reading(now, window, allocated);
        let counted = |core: &Self| core.rebalancing.rebalancer.counted_at().collect::<Vec<_>>();
        let before = counted(self);
        let may_move = self.rebalancing.record.is_some();
        let moves = self.rebalancing.rebalancer.step(&reading, may_move);
        if counted(self) != before {
            self.dirty = true;
        }
        let rebalancer = &self.rebalancing.rebalancer;
        let (hot, full): (BTreeSet<_>, BTreeSet<_>) =
            (rebalancer.hot().collect(), rebalancer.full().collect());
        let view = |server: &Server| ServerView {
            id: server.id,
            name: server.name.clone(),
            space: server.space,
            rate: server.rate.is_learned.then_some(server.rate.per_second),
            free_pages: server.free_pages,
            total_pages: server.total_pages,
            is_hot: hot.contains(&server.id),
            is_full: full.contains(&server.id),
        };
        let servers = reading.servers.iter().map(view).collect();
        self.rebalancing.is_learning = rebalancer.is_learning(&reading);
        self.rebalancing.servers = servers;
        let mut step = RebalanceStep::default();
        for made in moves {
            self.begin_move(now, window, made, &mut step);
        }
        step
    }

    /// Records the migrations of a move.
    fn begin_move(&mut self, now: Instant, window: Duration, made: Move, step: &mut RebalanceStep) {
        let name = |core: &Self, id: NodeId| {
            core.node(id).map_or_else(|| format!("node {id}"), |it| it.record.name.clone())
        };
        let (home, taker) = (name(self, made.home.id()), name(self, made.taker));
        let Some(space) = self.node(made.taker).map(|node| node.record.space()) else { return };
        for pages in made.rows {
            let (first, last) = (pages.start, pages.end.saturating_sub(1));
            let wanted = Wanted {
                home: made.home.id(),
                space,
                generation: ArenaGeneration::new(made.home.generation),
                pages: Some(pages),
                taker: made.taker,
            };
            match self.migrate_because(&wanted, &format!("{REASON}{}", made.reason)) {
                Ok(ids) => {
                    let pages = Pages { home: made.home, pages: first..last.saturating_add(1) };
                    self.rebalancing.rebalancer.note_moved(now, pages, Some(made.giver));
                    step.began.push(format!(
                        "migrations {ids:?}: pages {first} to {last} of {home} move to {taker}; {}",
                        made.reason
                    ));
                    self.rebalancing.last_id = self.rebalancing.last_id.max(ids.last().copied());
                    self.rebalancing.own.extend(ids);
                }
                Err(error) => {
                    // What is wrong elsewhere would be so with any taker.
                    if self.is_of_taker(&error, made.taker) {
                        self.rebalancing.rebalancer.note_failed(now + window, made.taker);
                    }
                    step.refused.push(format!(
                        "pages {first} to {last} of {home} do not move to {taker}: {error}"
                    ));
                }
            }
        }
    }

    /// Ends own migrations to a server that is drained: what still arrived would have to leave again. Those away from it
    /// go on.
    pub(super) fn cancel_balancing(&mut self, drained: NodeId) {
        let open = self.migrations.iter().map(|shown| shown.record);
        let to_it = open.filter(|record| {
            is_own(record) && record.taker.id() == drained && record.stage < Stage::Ending
        });
        let ids: Vec<u64> = to_it.map(|record| record.id).collect();
        let name = self.migrations.name(drained);
        for id in ids {
            self.migrations.cancel_because(id, &format!("{name} is drained"));
        }
    }

    /// Whether a migration was refused because of the server that would take the pages.
    fn is_of_taker(&self, error: &MigrateError, taker: NodeId) -> bool {
        let named = |name: &str| self.node(taker).is_some_and(|it| it.record.name == name);
        match error {
            MigrateError::NoServer(node) => *node == taker.0,
            MigrateError::OtherSpace { server, .. }
            | MigrateError::Already { server }
            | MigrateError::LostHome { server }
            | MigrateError::Unsupported(server)
            | MigrateError::NotConnected(server) => named(server),
            _ => false,
        }
    }

    /// Notes which pages moved since the last step, and how own migrations ended.
    fn note_moves(&mut self, now: Instant, window: Duration) {
        let of = &mut self.rebalancing;
        if of.last_id.is_none() {
            // After a start it is not known when pages moved.
            for record in self.migrations.elsewhere() {
                for (pages, _) in record.rows.iter() {
                    let pages = Pages { home: record.home, pages: pages.clone() };
                    of.rebalancer.note_moved(now, pages, None);
                }
            }
        }
        let own = self.migrations.iter().map(|shown| shown.record).filter(|it| is_own(it));
        of.own.extend(own.map(|record| record.id));
        let mut last_id = of.last_id.unwrap_or_default();
        for shown in self.migrations.iter() {
            let record = shown.record;
            if of.last_id.map_or(record.is_open(), |last| record.id > last) {
                let pages = Pages { home: record.home, pages: record.pages.clone() };
                let giver = Some(record.giver.id()).filter(|_| is_own(record));
                of.rebalancer.note_moved(now, pages, giver);
            }
            last_id = last_id.max(record.id);
            if !record.is_open() && of.own.contains(&record.id) && is_takers_fault(record) {
                of.rebalancer.note_failed(now + window * 2, record.taker.id());
            }
        }
        of.last_id = Some(last_id);
        let open: BTreeSet<u64> = self
            .migrations
            .iter()
            .filter(|shown| shown.record.is_open())
            .map(|shown| shown.record.id)
            .collect();
        of.own.retain(|id| open.contains(id));
    }

    /// The memory servers that are connected to a switch, by how it forwards to them.
    fn local_servers(&self, switch: SwitchId) -> BTreeMap<Forward, NodeId> {
        let memory = self.nodes.values().filter(|node| node.record.role == Role::Memory);
        let local = memory.filter_map(|node| {
            let route = self.route(switch, node).filter(|route| route.is_local)?;
            let forward = Forward { port: route.port, dst_mac: node.record.mac() };
            Some((forward, node.record.id()))
        });
        local.collect()
    }

    fn note_counters(&mut self, window: Duration, counters: &SwitchCounters) {
        let servers = self.local_servers(counters.switch);
        let of = self.rebalancing.switches.entry(counters.switch).or_default();
        let led = counters.entries.iter().filter_map(|(key, forward, packets)| {
            let server = servers.get(forward)?;
            Some((*key, *server, *packets))
        });
        let led: Vec<(Key, NodeId, u64)> = led.collect();
        let counts = led.iter().map(|(key, _, packets)| (*key, *packets));
        let added = of.entries.note(window, counters.at, counts);
        of.leads = led.into_iter().map(|(key, server, _)| (key, server)).collect();
        for (key, more) in added {
            if let Some(server) = of.leads.get(&key) {
                let sum = of.sums.entry(*server).or_default();
                *sum = sum.saturating_add(more);
            }
        }
        // A server to which nothing was sent has a rate as well.
        of.sums.retain(|server, _| servers.values().any(|it| it == server));
        for server in servers.values() {
            of.sums.entry(*server).or_default();
        }
        of.servers.note(window, counters.at, of.sums.clone());
    }

    /// What is known now.
    pub(super) fn reading(
        &self,
        now: Instant,
        window: Duration,
        allocated: &BTreeMap<NodeId, Vec<Range<u64>>>,
    ) -> Reading {
        let of = &self.rebalancing;
        // What a switch counted for a server that has gone to another one since is that of before.
        let local = of.switches.iter().map(|(switch, it)| {
            let servers: BTreeSet<NodeId> = self.local_servers(*switch).into_values().collect();
            (it, servers)
        });
        let local: Vec<_> = local.collect();
        let rates: BTreeMap<NodeId, Rate> = local
            .iter()
            .flat_map(|(it, servers)| {
                it.servers.iter(window).filter(|(server, _)| servers.contains(*server))
            })
            .map(|(server, rate)| (*server, rate))
            .collect();
        let counts = local.iter().flat_map(|(it, servers)| {
            it.entries.iter(window).filter_map(|(key, rate)| {
                let at = it.leads.get(key).copied().filter(|at| servers.contains(at))?;
                Some(Count { block: key_block(key)?, at, rate })
            })
        });
        let memory = self.nodes.values().filter(|node| node.record.role == Role::Memory);
        let servers = memory.filter(|node| node.record.attached).map(|node| {
            let own = allocated.get(&node.record.id()).map_or(&[][..], Vec::as_slice);
            self.server_reading(node, rates.get(&node.record.id()), own)
        });
        let switches = self.config.topology.switches();
        Reading {
            now,
            window,
            servers: servers.collect(),
            counts: counts.collect(),
            moving: self.migrations.moving(),
            open_count: of.own.len(),
            entries_max: switches.map(|it| self.counting_room(it)).min().unwrap_or(0),
        }
    }

    fn server_reading(&self, node: &Node, rate: Option<&Rate>, own: &[Range<u64>]) -> Server {
        let record = &node.record;
        let id = record.id();
        let generations = record.generations();
        let generations = GenerationRange { first: *generations.start(), last: *generations.end() };
        let can = node.live
            && node.has_reported
            && self.migrations.can_migrate(id)
            && !self.migrations.is_draining(id);
        let free_pages = node.free_pages.unwrap_or_default();
        let (left, _) = self.migrations.left(id, own);
        Server {
            id,
            name: record.name.clone(),
            space: record.space,
            free_pages: free_pages.saturating_sub(self.migrations.promised_to(id)),
            total_pages: record.capacity_pages,
            rate: rate.copied().unwrap_or(Rate { per_second: 0.0, is_learned: false }),
            may_give: can,
            may_take: can,
            contents: self.migrations.contents(id),
            held: self.migrations.held(id, generations),
            allocated: left
                .into_iter()
                .map(|it| Pages { home: it.home, pages: it.pages })
                .collect(),
        }
    }

    /// The most entries of a switch that may only count: half of the room that is left when all that moves has moved.
    fn counting_room(&self, switch: SwitchId) -> usize {
        let needed = self.moved(switch, Moves::All(&[])).len();
        (self.moved_budget().saturating_sub(needed) / 2).min(ENTRIES_MAX)
    }

    /// Adds the entries that only count; after all other entries of `directory`.
    pub(super) fn add_counting(&self, tables: &mut Tables, switch: SwitchId) {
        if self.rebalancing.rebalancer.counted().next().is_none() {
            return;
        }
        let room = self.counting_room(switch);
        let mut counting = Vec::new();
        for (server, block) in self.rebalancing.rebalancer.counted_at() {
            let Some(node) = self.nodes.get(&server) else { continue };
            let Some(Route { port, is_local: true }) = self.route(switch, node) else { continue };
            let key = block_key(node.record.space(), &block);
            let Key::Directory { prefix, prefix_len } = key else { continue };
            if tables.entries.contains_key(&key) || counting.len() >= room {
                continue;
            }
            let body = shorter(tables, prefix, prefix_len);
            // A block with pages that moved there may have others around them. Those have entries of their own.
            let to_server = Action::Forward(Forward { port, dst_mac: node.record.mac() });
            let body = body.filter(|body| body.action.as_ref() == Some(&to_server));
            counting.extend(body.map(|body| (key, body.clone())));
        }
        tables.entries.extend(counting);
    }
}

/// The entries of a reading of a switch that lead somewhere, of `directory` alone.
pub(crate) fn directory_counters<'a>(
    entries: impl Iterator<Item = (&'a Key, &'a Action, bluebridge_p4::pipeline::Counter)>,
) -> Vec<(Key, Forward, u64)> {
    let of = entries.filter_map(|(key, action, counter)| match (key, action) {
        (Key::Directory { .. }, Action::Forward(forward)) => {
            Some((*key, *forward, counter.packets))
        }
        _ => None,
    });
    of.collect()
}
