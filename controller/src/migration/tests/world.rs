//! Memory servers that crash, lose their memory and their connections, around the real state machine. Pages are lines of
//! one home; what servers do with them is what `docs/migration.md` says, without leases' times and contents.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::time::Instant;

use bluebridge_northbound::migration::{
    Contents, Elsewhere, Generations, Order, OrderKind, Refusal, Report, ServedRow, Terms,
};
use bluebridge_wire::{ArenaGeneration, NodeId, Space};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};

use super::super::testing::Disk;
use super::super::*;
use crate::core::Carrier;

pub(super) const LINE: u64 = 8;
pub(super) const LINES: u64 = 4;
pub(super) const HOME: NodeId = NodeId(1);
const SERVERS: u16 = 4;

pub(super) fn server_record(node: u16, generation: u16, incarnation: u32) -> NodeRecord {
    NodeRecord {
        node,
        name: format!("s{node}"),
        role: Role::Memory,
        space: 1,
        incarnation,
        first_incarnation: 1,
        generation,
        last_generation: generation + 1,
        range_epoch: incarnation,
        token: [0; 16],
        nonce: 1,
        mac: [2, 0, 0, 0, 0, 1],
        switch: String::new(),
        port: node,
        carrier: Carrier::Socket,
        mtu: 1500,
        shard_count: 1,
        capacity_pages: LINE * LINES,
        level: None,
        attached: true,
        retired: false,
        notices: false,
    }
}

pub(super) fn lines(range: Range<u64>) -> Range<u64> {
    range.start * LINE..range.end * LINE
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Staged {
    migration: u64,
    epoch: u64,
    giver: Contents,
    giver_process: u32,
    is_asked: bool,
}

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct Slot {
    serves: bool,
    /// The migration, and the contents of the taker.
    mark: Option<(u64, Contents)>,
    lease: Option<(u64, Contents, u64)>,
    staged: Option<Staged>,
}

/// What a home knows of a line that it does not have.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
enum Forward {
    #[default]
    Pending,
    At(NodeId),
    Gone,
}

#[derive(Clone, Debug)]
struct Node {
    id: NodeId,
    generation: u16,
    incarnation: u32,
    is_up: bool,
    slots: BTreeMap<u64, Slot>,
    forwards: BTreeMap<u64, Forward>,
    allowed: BTreeMap<u64, (Terms, bool)>,
    last_allowed: u64,
    /// Terms, whether it may take lines, and whether it must not any more.
    reserved: BTreeMap<u64, (Terms, bool, bool)>,
    /// The highest incarnation that asked for lines, by node.
    fences: BTreeMap<NodeId, u32>,
    /// Reports that wait until nothing is in doubt.
    owed: Vec<Order>,
    link: Option<u64>,
    sent: Sent,
    inbox: VecDeque<Order>,
    outbox: VecDeque<Report>,
}

impl Node {
    fn contents(&self) -> Contents {
        let generation = ArenaGeneration::new(self.generation).unwrap();
        Contents { node: self.id, generation }
    }

    fn empty(id: NodeId, generation: u16, incarnation: u32) -> Self {
        Self {
            id,
            generation,
            incarnation,
            is_up: true,
            slots: (0..LINES).map(|line| (line, Slot::default())).collect(),
            forwards: (0..LINES).map(|line| (line, Forward::Pending)).collect(),
            allowed: BTreeMap::new(),
            last_allowed: 0,
            reserved: BTreeMap::new(),
            fences: BTreeMap::new(),
            owed: Vec::new(),
            link: None,
            sent: Sent::default(),
            inbox: VecDeque::new(),
            outbox: VecDeque::new(),
        }
    }

    fn has(&self, line: u64) -> bool {
        let slot = self.slots[&line];
        slot.serves && slot.mark.is_none()
    }

    fn served(&self, within: &Range<u64>) -> Vec<ServedRow> {
        let first = ArenaGeneration::new(4).unwrap();
        let generations = Generations { first, last: first };
        let lines = self.slots.keys().filter(|line| self.has(**line));
        lines
            .map(|line| ServedRow { pages: self::lines(*line..line + 1), generations })
            .filter(|row| within.contains(&row.pages.start))
            .collect()
    }

    fn has_staged(&self, migration: Option<u64>) -> bool {
        let is_it = |staged: Staged| migration.is_none_or(|of| of == staged.migration);
        self.slots.values().filter_map(|slot| slot.staged).any(is_it)
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Keep {
    migration: u64,
    line: u64,
    epoch: u64,
    taker: Contents,
    taker_incarnation: u32,
    giver: NodeId,
    giver_process: u32,
}

#[derive(Clone, Copy, Debug)]
enum Message {
    Keep(Keep),
    Kept { keep: Keep, giver: Contents, is_ok: bool },
}

pub(super) struct World {
    pub(super) core: Migrations,
    disk: Disk,
    nodes: BTreeMap<NodeId, Node>,
    network: Vec<Message>,
    /// Reports of connections that ended, which may be read while the next one is open.
    late: Vec<(NodeId, u64, Report)>,
    rng: SmallRng,
    links: u64,
    epochs: u64,
    now: Instant,
    /// Lines of which no server has the memory any more.
    gone: BTreeSet<u64>,
    /// Lines of which no page is allocated. If the home has lost them, their servers forget them.
    free: BTreeSet<u64>,
    pub(super) discarded: u64,
    pub(super) reclaimed: u64,
    pub(super) requests: u64,
    pub(super) granted: u64,
    pub(super) moved: u64,
    pub(super) wipes: u64,
}

impl World {
    pub(super) fn new(seed: u64) -> Self {
        let mut nodes: BTreeMap<_, _> =
            (1..=SERVERS).map(|id| (NodeId(id), Node::empty(NodeId(id), 4, 1))).collect();
        for slot in nodes.get_mut(&HOME).unwrap().slots.values_mut() {
            slot.serves = true;
        }
        let mut this = Self {
            core: Migrations::default(),
            disk: Disk::default(),
            nodes,
            network: Vec::new(),
            late: Vec::new(),
            rng: SmallRng::seed_from_u64(seed),
            links: 0,
            epochs: 0,
            now: Instant::now(),
            gone: BTreeSet::new(),
            free: BTreeSet::new(),
            discarded: 0,
            reclaimed: 0,
            requests: 0,
            granted: 0,
            moved: 0,
            wipes: 0,
        };
        for id in 1..=SERVERS {
            this.core.note_server(&server_record(id, 4, 1));
            this.connect(NodeId(id));
        }
        this
    }

    fn any(&mut self, count: u64) -> u64 {
        self.rng.random_range(0..count)
    }

    fn any_node(&mut self) -> NodeId {
        NodeId(self.rng.random_range(1..=SERVERS))
    }

    fn node(&mut self, id: NodeId) -> &mut Node {
        self.nodes.get_mut(&id).unwrap()
    }

    /// Stores what must be stored, and sends the orders that are due.
    fn commit(&mut self) {
        for change in self.core.take_changes() {
            self.disk.write(&change);
        }
        for of in self.core.iter() {
            let late = RefusalRecord::Late;
            let is_late = |end: &End| matches!(end, End::Refused { why, .. } if *why == late);
            assert!(!of.record.end.as_ref().is_some_and(is_late), "too late: {:?}", of.record);
        }
        for (id, node) in self.nodes.iter_mut().filter(|(_, node)| node.link.is_some()) {
            let fresh = node.sent.fresh(self.core.orders(*id));
            node.inbox.extend(fresh);
        }
    }

    fn connect(&mut self, id: NodeId) {
        self.links += 1;
        let number = self.links;
        let node = self.node(id);
        if !node.is_up {
            return;
        }
        node.link = Some(number);
        node.sent = Sent::default();
        node.inbox.clear();
        node.outbox.clear();
        node.owed.clear();
        self.core.connect(id, number, true);
        self.commit();
    }

    fn disconnect(&mut self, id: NodeId) {
        let node = self.node(id);
        if let Some(number) = node.link.take() {
            let late = std::mem::take(&mut node.outbox);
            node.inbox.clear();
            self.late.extend(late.into_iter().map(|report| (id, number, report)));
            self.core.disconnect(id, number);
            self.commit();
        }
    }

    fn crash(&mut self, id: NodeId) {
        self.disconnect(id);
        self.node(id).is_up = false;
    }

    fn rejoin(&mut self, id: NodeId, is_kept: bool) {
        let node = self.node(id);
        if node.is_up {
            return;
        }
        if is_kept {
            node.is_up = true;
            node.incarnation += 1;
            for slot in node.slots.values_mut() {
                slot.lease = None;
                // What it asked for, it had stored before.
                slot.staged = slot.staged.filter(|staged| staged.is_asked);
            }
        } else {
            *node = Node::empty(id, node.generation + 2, node.incarnation + 1);
            self.wipes += 1;
            self.note_gone();
        }
        let node = self.node(id);
        let record = server_record(id.0, node.generation, node.incarnation);
        self.core.note_server(&record);
        self.commit();
    }

    fn restart_controller(&mut self) {
        let records: Vec<_> = self
            .nodes
            .values()
            .map(|node| server_record(node.id.0, node.generation, node.incarnation))
            .collect();
        // A server that is down was there under its last incarnation.
        self.core = Migrations::new(self.disk.load(), &records);
        for node in self.nodes.values_mut() {
            node.link = None;
            node.inbox.clear();
            node.outbox.clear();
        }
        self.commit();
    }

    /// Lines of which no memory is left.
    fn note_gone(&mut self) {
        for line in 0..LINES {
            let is_served = self.nodes.values().any(|node| node.has(line));
            let is_staged = |taker: Contents, migration: u64| {
                let node = &self.nodes[&taker.node];
                let staged = node.slots[&line].staged;
                node.contents() == taker && staged.is_some_and(|it| it.migration == migration)
            };
            let mut marks = self.nodes.values().filter_map(|node| node.slots[&line].mark);
            let is_marked = marks.any(|(migration, taker)| is_staged(taker, migration));
            // A giver may lose its memory after it answered.
            let is_arriving = is_marked
                || self.network.iter().any(|message| match message {
                    Message::Kept { keep, is_ok: true, .. } if keep.line == line => {
                        is_staged(keep.taker, keep.migration)
                    }
                    _ => false,
                });
            if !is_served && !is_arriving {
                self.gone.insert(line);
            }
        }
    }

    /// A server executes the next order.
    fn execute(&mut self, id: NodeId) -> bool {
        let Some(order) = self.nodes.get_mut(&id).and_then(|node| node.inbox.pop_front()) else {
            return false;
        };
        let is_full = self.any(20) == 0;
        let times = 1 + u8::from(self.any(5) == 0);
        for _ in 0..times {
            let report = self.obey(id, &order, is_full);
            self.node(id).outbox.extend(report);
        }
        self.note_gone();
        true
    }

    fn obey(&mut self, id: NodeId, order: &Order, is_full: bool) -> Option<Report> {
        if let Order::Discard { pages, .. } = order {
            self.discard(id, pages);
            return None;
        }
        let node = self.nodes.get_mut(&id).unwrap();
        let refused = |migration, order, why| Some(Report::Refused { migration, order, why });
        match order {
            Order::Lose { node: lost, began } => {
                let is_lost = |of: Contents| of.node == *lost && of.generation < *began;
                // Marks stay until the migration is closed.
                for slot in node.slots.values_mut() {
                    slot.lease = slot.lease.filter(|(_, taker, _)| !is_lost(*taker));
                    slot.staged = slot.staged.filter(|staged| !is_lost(staged.giver));
                }
                for (terms, is_open) in node.allowed.values_mut() {
                    *is_open &= !is_lost(terms.taker);
                }
                for forward in node.forwards.values_mut() {
                    if *forward == Forward::At(*lost) {
                        *forward = Forward::Pending;
                    }
                }
                Some(Report::Lost { node: *lost, began: *began })
            }
            Order::Discard { .. } => unreachable!("it was followed above"),
            // No server of this world has said that it knows them.
            Order::Deputize(_) | Order::Dismiss { .. } | Order::Seal(_) => unreachable!(),
            Order::Reserve(terms) => {
                if is_full && !node.reserved.contains_key(&terms.migration) {
                    return refused(terms.migration, OrderKind::Reserve, Refusal::NoRoom);
                }
                let fresh = || (terms.clone(), false, false);
                let of = node.reserved.entry(terms.migration).or_insert_with(fresh);
                of.0 = terms.clone();
                Some(Report::Reserved(terms.migration))
            }
            Order::Allow(terms) => {
                let migration = terms.migration;
                let refuse = |why| refused(migration, OrderKind::Allow, why);
                match node.allowed.get(&migration) {
                    Some((known, true)) if known == terms => {}
                    Some((_, true)) => return refuse(Refusal::Contradiction),
                    Some((_, false)) => return refuse(Refusal::Late),
                    None if migration <= node.last_allowed => return refuse(Refusal::Late),
                    None if is_full => return refuse(Refusal::Full),
                    None => {
                        node.last_allowed = migration;
                        node.allowed.insert(migration, (terms.clone(), true));
                    }
                }
                Some(Report::Allowed { migration, fences: Vec::new() })
            }
            Order::Take { terms, .. } => {
                match node.reserved.get_mut(&terms.migration) {
                    Some((_, may_take, is_over)) => *may_take = !*is_over,
                    None => return refused(terms.migration, OrderKind::Take, Refusal::Unknown),
                }
                None
            }
            Order::Withdraw(migration) => {
                let Some((_, is_open)) = node.allowed.get_mut(migration) else {
                    return refused(*migration, OrderKind::Withdraw, Refusal::Unknown);
                };
                *is_open = false;
                for slot in node.slots.values_mut() {
                    slot.lease = slot.lease.filter(|(of, ..)| of != migration);
                }
                Some(Report::Withdrawn(*migration))
            }
            Order::Settle(Terms { migration, .. }) => {
                if let Some((_, may_take, is_over)) = node.reserved.get_mut(migration) {
                    (*may_take, *is_over) = (false, true);
                }
                for slot in node.slots.values_mut() {
                    let is_asked = |it: &Staged| it.migration != *migration || it.is_asked;
                    slot.staged = slot.staged.filter(is_asked);
                }
                node.owed.push(order.clone());
                None
            }
            Order::Forget(migration) => {
                let is_open = node.allowed.get(migration).is_some_and(|(_, is_open)| *is_open);
                assert!(!is_open, "migration {migration} is closed while it is allowed");
                for slot in node.slots.values_mut() {
                    if slot.mark.is_some_and(|(of, _)| of == *migration) {
                        (slot.mark, slot.serves) = (None, false);
                    }
                }
                node.allowed.remove(migration);
                Some(Report::Forgotten(*migration))
            }
            Order::Release(migration) => {
                assert!(!node.has_staged(Some(*migration)), "frames of a line in doubt are freed");
                node.reserved.remove(migration);
                Some(Report::Released(*migration))
            }
            Order::Learn(elsewhere) => {
                Self::learn(node, elsewhere);
                let Elsewhere { home, version, .. } = *elsewhere;
                Some(Report::Learned { home, version })
            }
            Order::Report { .. } => {
                node.owed.push(order.clone());
                None
            }
        }
    }

    /// A server forgets free lines.
    fn discard(&mut self, id: NodeId, rows: &[Range<u64>]) {
        let of_home = self.nodes[&HOME].generation;
        if id == HOME && of_home == 4 {
            return self.reclaim(rows);
        }
        assert!(of_home > 4, "lines are discarded of contents that the home has");
        let node = self.nodes.get_mut(&id).unwrap();
        for line in 0..LINES {
            let is_ordered = rows.iter().any(|row| row.contains(&(line * LINE)));
            let mut allowed = node.allowed.values();
            let is_in = |terms: &Terms| terms.pages.contains(&(line * LINE));
            let is_moving = allowed.any(|(terms, _)| is_in(terms));
            if is_ordered && node.has(line) && self.free.contains(&line) && !is_moving {
                *node.slots.get_mut(&line).unwrap() = Slot::default();
                self.gone.insert(line);
                self.discarded += 1;
            }
        }
    }

    /// The home goes on with free lines that nobody has.
    fn reclaim(&mut self, rows: &[Range<u64>]) {
        let node = self.nodes.get_mut(&HOME).unwrap();
        for line in 0..LINES {
            let is_ordered = rows.iter().any(|row| row.contains(&(line * LINE)));
            let mut allowed = node.allowed.values();
            let is_moving = allowed.any(|(terms, _)| terms.pages.contains(&(line * LINE)));
            let slot = node.slots[&line];
            let is_away = !slot.serves && slot.mark.is_none() && slot.staged.is_none();
            if is_ordered && is_away && !is_moving && self.free.contains(&line) {
                assert!(self.gone.remove(&line), "line {line} is at another server");
                *node.slots.get_mut(&line).unwrap() = Slot { serves: true, ..Slot::default() };
                self.reclaimed += 1;
            }
        }
    }

    /// A server reports which of its lines are free.
    fn tell_free(&mut self, id: NodeId) {
        let home = Contents { node: HOME, generation: ArenaGeneration::new(4).unwrap() };
        let node = &self.nodes[&id];
        if node.link.is_none() || id == HOME && node.generation > 4 {
            return;
        }
        let is_lost = |line: &u64| {
            let slot = node.slots[line];
            !slot.serves && slot.mark.is_none() && !matches!(node.forwards[line], Forward::At(_))
        };
        let free = self.free.iter().filter(|line| match id {
            HOME => is_lost(line),
            _ => node.has(**line),
        });
        let pages = free.map(|line| lines(*line..line + 1)).collect();
        self.node(id).outbox.push_back(Report::Free { home, pages });
    }

    /// All pages of a line are freed, or one is allocated at home.
    fn free_or_allocate(&mut self, line: u64) {
        let home = &self.nodes[&HOME];
        let may_allocate = home.has(line) && home.slots[&line].lease.is_none();
        if !self.free.contains(&line) {
            self.free.insert(line);
        } else if home.generation == 4 && may_allocate {
            self.free.remove(&line);
        }
    }

    /// The home learns where its lines of generation 4 are.
    fn learn(node: &mut Node, elsewhere: &Elsewhere) {
        let is_lost = elsewhere.home != node.contents();
        for line in 0..LINES {
            if node.has(line) {
                continue;
            }
            let is_in = |pages: &Range<u64>| pages.contains(&(line * LINE));
            let at = elsewhere.rows.iter().find(|(pages, _)| is_in(pages)).map(|(_, at)| *at);
            let forward = match at {
                Some(at) => Forward::At(at),
                None if is_lost || elsewhere.lost.iter().any(is_in) => Forward::Gone,
                None => continue,
            };
            node.forwards.insert(line, forward);
        }
    }

    /// A server sends what it owed, if nothing is in doubt, or tells how far it is.
    fn pay(&mut self, id: NodeId) -> bool {
        let node = self.node(id);
        if !node.is_up || node.link.is_none() {
            return false;
        }
        let owed = std::mem::take(&mut node.owed);
        let mut was_paid = false;
        for order in owed {
            let report = match &order {
                Order::Settle(Terms { migration, .. }) if !node.has_staged(Some(*migration)) => {
                    let of = node.reserved.get(migration);
                    let kept = of.map_or(Vec::new(), |(terms, ..)| node.served(&terms.pages));
                    Some(Report::Settled { migration: *migration, kept })
                }
                Order::Report { home, round } if !node.has_staged(None) => {
                    let marked = node.slots.iter().filter(|(_, slot)| slot.mark.is_some());
                    Some(Report::Claims {
                        home: *home,
                        round: *round,
                        served: node.served(&lines(0..LINES)),
                        given: marked.map(|(line, _)| lines(*line..line + 1)).collect(),
                        lost: Vec::new(),
                    })
                }
                _ => None,
            };
            was_paid |= report.is_some();
            match report {
                Some(report) => node.outbox.push_back(report),
                None => node.owed.push(order),
            }
        }
        was_paid
    }

    fn tell_progress(&mut self, id: NodeId) {
        let node = &self.nodes[&id];
        if node.link.is_none() {
            return;
        }
        let reports: Vec<_> = node
            .reserved
            .iter()
            .filter(|(_, (_, may_take, _))| *may_take)
            .map(|(migration, (terms, ..))| {
                let giver = &self.nodes[&terms.giver.node];
                let is_left = |line: &u64| terms.pages.contains(&(line * LINE)) && giver.has(*line);
                Report::Progress {
                    migration: *migration,
                    kept: node.served(&terms.pages),
                    on_the_way_count: 0,
                    in_doubt_count: 0,
                    free_count: 0,
                    is_done: !(0..LINES).any(|line| is_left(&line)),
                }
            })
            .collect();
        self.node(id).outbox.extend(reports);
    }

    /// The controller reads the next report of a server.
    fn hear(&mut self, id: NodeId) -> bool {
        let times = 1 + u8::from(self.any(5) == 0);
        let now = self.now;
        let node = self.nodes.get_mut(&id).unwrap();
        let (Some(report), Some(link)) = (node.outbox.pop_front(), node.link) else {
            return false;
        };
        for _ in 0..times {
            self.core.handle(now, id, link, report.clone()).unwrap();
            self.commit();
        }
        true
    }

    /// A taker takes a line.
    fn take(&mut self, id: NodeId, line: u64) -> bool {
        let node = &self.nodes[&id];
        let (contents, slot) = (node.contents(), node.slots[&line]);
        if !node.is_up || slot.staged.is_some() || node.has(line) || slot.mark.is_some() {
            return false;
        }
        let of = node.reserved.values().find(|(terms, may_take, _)| {
            *may_take && terms.pages.contains(&(line * LINE)) && terms.taker == contents
        });
        let Some((terms, ..)) = of.cloned() else { return false };
        self.epochs += 1;
        let epoch = self.epochs;
        let giver = self.nodes.get_mut(&terms.giver.node).unwrap();
        let is_open = giver.allowed.get(&terms.migration).is_some_and(|(known, is_open)| {
            *is_open && known.taker_incarnation == terms.taker_incarnation
        });
        let fence = giver.fences.get(&id).copied().unwrap_or(0);
        if !giver.is_up || !is_open || !giver.has(line) || terms.taker_incarnation < fence {
            return false;
        }
        giver.fences.insert(id, terms.taker_incarnation);
        let (of_giver, giver_process) = (giver.contents(), giver.incarnation);
        let slot = giver.slots.get_mut(&line).unwrap();
        if slot.lease.is_some() {
            return false;
        }
        slot.lease = Some((terms.migration, contents, epoch));
        self.node(id).slots.get_mut(&line).unwrap().staged = Some(Staged {
            migration: terms.migration,
            epoch,
            giver: of_giver,
            giver_process,
            is_asked: false,
        });
        true
    }

    /// A taker sends KEEP, or sends it again, in a session with the giver's present process.
    fn ask(&mut self, id: NodeId, line: u64) -> bool {
        let node = &self.nodes[&id];
        let Some(staged) = node.slots[&line].staged.filter(|_| node.is_up) else { return false };
        let giver = &self.nodes[&staged.giver.node];
        if !giver.is_up {
            return false;
        }
        let Some((terms, ..)) = node.reserved.get(&staged.migration) else { return false };
        let keep = Keep {
            migration: staged.migration,
            line,
            epoch: staged.epoch,
            taker: node.contents(),
            taker_incarnation: terms.taker_incarnation,
            giver: giver.id,
            giver_process: giver.incarnation,
        };
        let slot = self.node(id).slots.get_mut(&line).unwrap();
        if let Some(staged) = &mut slot.staged {
            staged.is_asked = true;
        }
        self.network.push(Message::Keep(keep));
        true
    }

    /// A message arrives, or is lost, or arrives and is there once more.
    fn deliver(&mut self, is_calm: bool) -> bool {
        if self.network.is_empty() {
            return false;
        }
        let index = usize::try_from(self.any(self.network.len() as u64)).unwrap();
        let fate = if is_calm { 9 } else { self.any(10) };
        let message = match fate {
            0 => {
                self.network.swap_remove(index);
                return true;
            }
            1 => self.network[index],
            _ => self.network.swap_remove(index),
        };
        match message {
            Message::Keep(keep) => {
                let giver = self.nodes.get_mut(&keep.giver).unwrap();
                // The session was one with that process.
                let fence = giver.fences.get(&keep.taker.node).copied().unwrap_or(0);
                let has_session = giver.incarnation == keep.giver_process;
                if !giver.is_up || !has_session || keep.taker_incarnation < fence {
                    return true;
                }
                giver.fences.insert(keep.taker.node, keep.taker_incarnation);
                let of_giver = giver.contents();
                let is_open =
                    giver.allowed.get(&keep.migration).is_some_and(|(_, is_open)| *is_open);
                let slot = giver.slots.get_mut(&keep.line).unwrap();
                let is_marked = slot.mark == Some((keep.migration, keep.taker));
                let holds = slot.lease == Some((keep.migration, keep.taker, keep.epoch));
                let is_ok = is_marked || holds && is_open && slot.serves && slot.mark.is_none();
                if is_ok {
                    slot.mark = Some((keep.migration, keep.taker));
                    slot.lease = None;
                }
                self.network.push(Message::Kept { keep, giver: of_giver, is_ok });
            }
            Message::Kept { keep, giver, is_ok } => {
                let taker = self.nodes.get_mut(&keep.taker.node).unwrap();
                if !taker.is_up || taker.contents() != keep.taker {
                    return true;
                }
                let slot = taker.slots.get_mut(&keep.line).unwrap();
                let is_asked = slot.staged.is_some_and(|staged| {
                    (staged.migration, staged.epoch) == (keep.migration, keep.epoch)
                });
                if is_asked && is_ok {
                    *slot = Slot { serves: true, ..Slot::default() };
                    self.moved += 1;
                } else if is_asked && slot.staged.is_some_and(|staged| staged.giver == giver) {
                    slot.staged = None;
                }
            }
        }
        self.note_gone();
        true
    }

    fn request(&mut self) {
        let first = self.any(LINES);
        let last = first + 1 + self.any(LINES - first);
        let taker = self.any_node();
        let wanted = Wanted {
            home: HOME,
            space: Space(1),
            generation: ArenaGeneration::new(4),
            pages: Some(lines(first..last)),
            taker,
        };
        self.requests += 1;
        if let Ok(records) = self.core.plan(&wanted) {
            self.core.record(records);
            self.granted += 1;
        }
        self.commit();
    }

    /// Does the next possible thing of this kind, beginning with any server and line.
    fn some(&mut self, act: impl Fn(&mut Self, NodeId, u64) -> bool) -> bool {
        let count = u64::from(SERVERS) * LINES;
        let first = self.any(count);
        (first..first + count).any(|number| {
            let id = NodeId(u16::try_from(number / LINES % u64::from(SERVERS)).unwrap() + 1);
            act(self, id, number % LINES)
        })
    }

    pub(super) fn step(&mut self) {
        let (id, line) = (self.any_node(), self.any(LINES));
        match self.any(1000) {
            0..20 => self.request(),
            20..24 => {
                let ids: Vec<u64> = self.core.iter().map(|of| of.record.id).collect();
                if !ids.is_empty() {
                    let index = usize::try_from(self.any(ids.len() as u64)).unwrap();
                    let _ = self.core.cancel(ids[index]);
                    self.commit();
                }
            }
            24..200 => drop(self.some(|world, id, _| world.execute(id))),
            200..400 => drop(self.some(|world, id, _| world.hear(id))),
            400..450 => drop(self.some(|world, id, _| world.pay(id))),
            450..472 => self.tell_progress(id),
            472..476 => self.tell_free(id),
            476..480 => self.free_or_allocate(line),
            480..580 => drop(self.some(Self::take)),
            580..690 => drop(self.some(Self::ask)),
            690..900 => drop(self.deliver(false)),
            // A lease ends.
            900..910 => self.node(id).slots.get_mut(&line).unwrap().lease = None,
            910..918 => self.disconnect(id),
            918..958 => drop(self.some(|world, id, _| {
                let is_away = world.nodes[&id].is_up && world.nodes[&id].link.is_none();
                if is_away {
                    world.connect(id);
                }
                is_away
            })),
            958..964 => self.crash(id),
            964..984 => {
                let is_kept = self.any(6) > 0;
                self.some(|world, id, _| {
                    let is_down = !world.nodes[&id].is_up;
                    world.rejoin(id, is_kept);
                    is_down
                });
            }
            984..987 => self.restart_controller(),
            987..994 => {
                if let Some((from, link, report)) = self.late.pop() {
                    self.core.handle(self.now, from, link, report).unwrap();
                    self.commit();
                }
            }
            994..997 => self.core.retry(),
            _ => {
                self.core.handle_timeout(self.now);
                self.now += ABSENCE;
                self.core.handle_timeout(self.now);
                self.commit();
            }
        }
        self.check();
    }

    /// What must hold at every moment.
    fn check(&self) {
        for line in 0..LINES {
            let servers: Vec<_> = self.nodes.values().filter(|node| node.has(line)).collect();
            assert!(servers.len() <= 1, "line {line} has two servers: {servers:?}");
            let home = &self.nodes[&HOME];
            let is_gone = self.gone.contains(&line);
            if home.forwards[&line] == Forward::Gone && !home.has(line) {
                let is_useless = home.generation > 4 && self.free.contains(&line);
                let is_right = is_gone || is_useless || home.slots[&line].mark.is_some();
                assert!(is_right, "line {line} is not lost");
            }
            assert!(!is_gone || servers.is_empty(), "line {line} came back");
        }
    }

    /// Ends all trouble and waits until nothing happens; then everything must be in order.
    pub(super) fn come_to_rest(&mut self) {
        let ids: Vec<NodeId> = self.nodes.keys().copied().collect();
        for id in &ids {
            self.rejoin(*id, true);
            if self.nodes[id].link.is_none() {
                self.connect(*id);
            }
        }
        for _ in 0..300 {
            for id in &ids {
                self.tell_progress(*id);
                self.tell_free(*id);
                for line in 0..LINES {
                    self.node(*id).slots.get_mut(&line).unwrap().lease = None;
                    self.take(*id, line);
                    self.ask(*id, line);
                }
                while self.deliver(true) {}
                self.pay(*id);
                while self.execute(*id) {}
                self.pay(*id);
                while self.hear(*id) {}
            }
            self.core.retry();
            self.commit();
            self.check();
        }
        self.check_rest();
    }

    fn check_rest(&self) {
        for of in self.core.iter() {
            assert!(!of.record.is_open(), "not closed: {:?}, waits: {:?}", of.record, of.waits);
        }
        assert!(self.core.losses.is_empty(), "{:?}", self.core.losses);
        for node in self.nodes.values() {
            assert!(node.allowed.is_empty() && node.reserved.is_empty(), "{node:?}");
            let is_clean = |slot: &Slot| slot.mark.is_none() && slot.staged.is_none();
            assert!(node.slots.values().all(is_clean), "{node:?}");
        }
        let home = &self.nodes[&HOME];
        let at = ContentsRecord { node: HOME.0, generation: 4 };
        for line in 0..LINES {
            let server = self.nodes.values().find(|node| node.has(line)).map(|node| node.id);
            let is_useless = home.generation > 4 && self.free.contains(&line);
            assert!(!is_useless || server.is_none(), "line {line} is of no use to {server:?}");
            let is_usable = home.generation == 4 && self.free.contains(&line);
            assert!(!is_usable || server.is_some(), "line {line} could be used at home");
            assert_eq!(server.is_none(), self.gone.contains(&line), "line {line}");
            let parts = self.core.givers(at, &lines(line..line + 1));
            let known = parts[0].1.map(ContentsRecord::id);
            assert_eq!((parts.len(), known), (1, server), "the controller, of line {line}");
            let is_asked = self.core.elsewhere().any(|of| of.home == at && of.version > 0);
            if !home.has(line) && is_asked {
                let expected = server.map_or(Forward::Gone, Forward::At);
                assert_eq!(home.forwards[&line], expected, "the home, of line {line}");
            }
        }
    }
}
