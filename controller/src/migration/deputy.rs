//! Deputies: servers that answer for others that are drained and gone (`docs/migration.md`, "Deputies"). `core/deputy.rs`
//! decides when one is chosen, and which.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use bluebridge_northbound::migration::{Deputyship, EarlierRow, Order};
use bluebridge_wire::{ArenaGeneration, NodeId, Space};
use serde::{Deserialize, Serialize};

use super::{Change, ContentsRecord, ElsewhereRecord, Migrations, PageMap};
use crate::core::NodeRecord;

/// How long a server that is drained, or a deputy, may be without a connection before another one answers for it.
pub(crate) const AWAY: Duration = Duration::from_secs(2);

/// How long a server that came back waits for its deputy to end before it counts as gone again.
const RETURNS_FOR: Duration = Duration::from_secs(10);

/// That a server answers for another one, which is drained and gone.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct DeputyRecord {
    /// The server that is gone.
    pub node: u16,
    /// The incarnation under which the deputy answers. It is of no process of the server itself.
    pub incarnation: u32,
    /// The last generation that the server may have used.
    pub last_generation: u16,
    /// Its range epoch from then on.
    pub range_epoch: u32,
    /// The deputy.
    pub at: u16,
    /// The deputy's own incarnation: its next process does not know of it.
    pub at_incarnation: u32,
    /// How long the server had served nothing when the deputy was chosen.
    pub idle_ms: u64,
}

impl DeputyRecord {
    /// The server that is gone.
    #[must_use]
    pub const fn home(&self) -> NodeId {
        NodeId(self.node)
    }

    /// The deputy.
    #[must_use]
    pub const fn deputy(&self) -> NodeId {
        NodeId(self.at)
    }
}

/// Who answers for a server that is drained and gone.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Answers {
    /// This server, its deputy.
    Deputy(NodeId),
    /// Nobody: why, and what to do.
    Nobody(String),
}

/// A deputy with what is not stored of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deputy {
    pub(super) record: DeputyRecord,
    /// When it was chosen, or the controller started.
    since: Option<Instant>,
    /// Whether it has said that it answers.
    is_confirmed: bool,
}

impl Deputy {
    pub(super) const fn new(record: DeputyRecord) -> Self {
        Self { record, since: None, is_confirmed: false }
    }
}

impl Migrations {
    /// The deputy of a server.
    #[must_use]
    pub fn deputy_of(&self, home: NodeId) -> Option<DeputyRecord> {
        self.deputies.get(&home).map(|deputy| deputy.record)
    }

    /// Who answers for a server; `None` if that is the server itself.
    #[must_use]
    pub fn answers_for(&self, now: Instant, home: NodeId) -> Option<Answers> {
        let name = self.name(home);
        let Some(record) = self.deputy_of(home) else {
            self.servers.get(&home)?;
            // One without a connection, for a moment, opens the next: the controller may have been restarted.
            return (self.is_empty(home) && self.is_away(now, home)).then(|| {
                let why = match self.returning.contains_key(&home) {
                    true => format!("{name} began to join again"),
                    false => format!("{name} is gone"),
                };
                Answers::Nobody(format!("{why}; {}", self.successor_words(home)))
            });
        };
        let deputy = self.name(record.deputy());
        let why = match self.why_over(&record) {
            Some(why) => format!("its deputy {deputy} {why}; {}", self.successor_words(home)),
            None if self.answers(&record) => return Some(Answers::Deputy(record.deputy())),
            None => format!("{deputy} was chosen, and has not confirmed yet that it answers"),
        };
        Some(Answers::Nobody(why))
    }

    /// Why a deputy that was chosen does not answer; `None` if it is there.
    fn why_over(&self, record: &DeputyRecord) -> Option<&'static str> {
        let Some(at) = self.servers.get(&record.deputy()) else { return Some("is unknown") };
        match () {
            () if !at.is_attached => Some("left"),
            () if at.incarnation != record.at_incarnation => {
                Some("was started again, and its present process does not know of this")
            }
            () if at.link.is_none() => Some("has no connection to the controller"),
            () if self.hung.contains(&record.deputy()) => Some("sends no heartbeats"),
            () => None,
        }
    }

    /// Whether a deputy has said that it answers.
    fn answers(&self, record: &DeputyRecord) -> bool {
        let link = self.servers.get(&record.deputy()).and_then(|at| at.link.as_ref());
        let known = link.and_then(|link| link.deputized.get(&record.home()));
        known.is_some_and(|(incarnation, _)| *incarnation == record.incarnation)
    }

    /// What happens, or what to do, if nobody answers for a server.
    fn successor_words(&self, home: NodeId) -> String {
        if !self.deputy_candidates(home).is_empty() {
            return "another memory server is chosen within seconds".to_owned();
        }
        let name = self.name(home);
        let deputy = self.deputy_of(home).map(|of| format!(", {}", self.name(of.deputy())));
        let deputy = deputy.unwrap_or_default();
        format!(
            "no other memory server of its space can take over: start {name}{deputy} or another one, or end the draining \
             of one that runs with `bluebridge undrain`"
        )
    }

    /// Whether a server has a deputy that is there.
    pub(super) fn has_deputy(&self, home: NodeId) -> bool {
        self.deputy_of(home).is_some_and(|record| self.why_over(&record).is_none())
    }

    /// Every deputy.
    pub fn deputies(&self) -> impl Iterator<Item = DeputyRecord> {
        self.deputies.values().map(|deputy| deputy.record)
    }

    /// Records a deputy, in place of an earlier one.
    pub(crate) fn appoint(&mut self, now: Instant, record: DeputyRecord) {
        self.version += 1;
        self.is_moved = true;
        self.returning.remove(&record.home());
        let deputy = Deputy { since: Some(now), ..Deputy::new(record) };
        self.deputies.insert(record.home(), deputy);
        self.changes.push(Change::Deputy(record));
    }

    /// Servers that may answer for another one, those first that do so for the fewest.
    pub(crate) fn deputy_candidates(&self, home: NodeId) -> Vec<NodeId> {
        let Some(gone) = self.servers.get(&home) else { return Vec::new() };
        let count = |id: NodeId| self.deputies().filter(|of| of.deputy() == id).count();
        let can = |id: &NodeId| {
            let server = &self.servers[id];
            *id != home
                && server.space == gone.space
                && server.is_attached
                && server.contents.is_some()
                && server.link.as_ref().is_some_and(|link| link.deputizes)
                && !self.hung.contains(id)
                && !self.is_draining(*id)
        };
        let mut found: Vec<_> = self.servers.keys().copied().filter(can).collect();
        found.sort_by_key(|id| (count(*id), *id));
        found
    }

    /// Whether a server has no connection any more, or sends no heartbeats although it has one.
    ///
    /// Only a server that has no page is replaced because of this: a deputy, or one that is drained and empty. Of all
    /// others the lines are lost only when they come back without them, or an operator says so.
    fn is_away(&self, now: Instant, id: NodeId) -> bool {
        self.servers.get(&id).is_none_or(|server| {
            let since = server.away_since.map(|since| now.saturating_duration_since(since));
            let is_cut_off = server.link.is_none() && since.is_some_and(|it| it >= AWAY);
            !server.is_attached || is_cut_off || self.hung.contains(&id)
        })
    }

    /// Whether the process of a deputy that was chosen has ended, or can not be reached.
    fn is_over(&self, now: Instant, record: &DeputyRecord) -> bool {
        let at = self.servers.get(&record.deputy());
        at.is_none_or(|at| at.incarnation != record.at_incarnation)
            || self.is_away(now, record.deputy())
    }

    /// Notes all servers from which no heartbeat has come for long.
    pub(crate) fn note_hung(&mut self, hung: BTreeSet<NodeId>) {
        self.hung = hung;
    }

    /// A server sent a heartbeat or a report, or opened a connection.
    pub(crate) fn note_heard(&mut self, id: NodeId) {
        self.hung.remove(&id);
    }

    /// Servers that need a deputy, or another one, with the time for which each has served nothing.
    pub(crate) fn without_deputy(&mut self, now: Instant) -> Vec<(NodeId, Duration)> {
        self.returning.retain(|_, at| now.saturating_duration_since(*at) < RETURNS_FOR);
        for deputy in self.deputies.values_mut() {
            deputy.since.get_or_insert(now);
        }
        let mut found = Vec::new();
        for (home, drain) in &mut self.drains {
            if drain.record.empty {
                drain.empty_since.get_or_insert(now);
            }
            let idle = drain.empty_since.map(|since| now.saturating_duration_since(since));
            if let Some(idle) = idle.filter(|_| !self.deputies.contains_key(home)) {
                found.push((*home, idle));
            }
        }
        let is_gone = |this: &Self, home: NodeId| {
            this.drain_of(home).is_some_and(|drain| drain.is_done) && this.is_away(now, home)
        };
        found.retain(|(home, _)| is_gone(self, *home) && !self.returning.contains_key(home));
        for Deputy { record, since, .. } in self.deputies.values() {
            let leaves = self.is_draining(record.deputy());
            if (self.is_over(now, record) || leaves) && !self.returning.contains_key(&record.home())
            {
                let passed = since.map_or(Duration::ZERO, |it| now.saturating_duration_since(it));
                found.push((record.home(), Duration::from_millis(record.idle_ms) + passed));
            }
        }
        found
    }

    /// A server wants to join again. Returns the server that still answers for it, and that must end that first.
    pub(crate) fn returns(&mut self, now: Instant, home: NodeId) -> Option<NodeId> {
        if let Some(record) = self.deputy_of(home) {
            if self.is_over(now, &record) {
                self.dismiss(home);
            } else {
                self.version += 1;
                self.returning.insert(home, now);
            }
        }
        // An earlier one may have been away when the present one was chosen. The switches keep clients away from one that
        // hangs, and it is dismissed as soon as it goes on.
        let answers = |(id, server): (&NodeId, &super::Server)| {
            let link = server.link.as_ref().filter(|_| !self.hung.contains(id))?;
            link.deputized.contains_key(&home).then_some(*id)
        };
        self.deputy_of(home)
            .map(|record| record.deputy())
            .or_else(|| self.servers.iter().find_map(answers))
    }

    /// A server is back, or its deputy has ended.
    pub(super) fn dismiss(&mut self, home: NodeId) {
        if self.deputies.remove(&home).is_some() {
            self.version += 1;
            self.is_moved = true;
            self.changes.push(Change::DeputyGone(home.0));
        }
    }

    /// Notes what a server can do besides migrations, and does because of earlier orders.
    pub fn note_abilities(
        &mut self,
        server: NodeId,
        number: u64,
        is_sealed: bool,
        deputized: BTreeMap<NodeId, u32>,
    ) {
        self.version += 1;
        let link = self.servers.get_mut(&server).and_then(|server| server.link.as_mut());
        if let Some(link) = link.filter(|link| link.number == number) {
            (link.deputizes, link.is_sealed) = (true, is_sealed);
            link.deputized = deputized.into_iter().map(|(home, of)| (home, (of, 0))).collect();
        }
        self.confirm_deputies();
    }

    /// Notes which deputies have said that they answer.
    fn confirm_deputies(&mut self) {
        let records = self.deputies().filter(|record| self.answers(record));
        for home in records.map(|record| record.home()).collect::<Vec<_>>() {
            if let Some(deputy) = self.deputies.get_mut(&home) {
                deputy.is_confirmed = true;
            }
        }
    }

    /// What must happen before a drained server may be taken away, although it has nothing: others must answer for the
    /// servers for which it did.
    pub(super) fn handover(&self, node: NodeId) -> Option<String> {
        let space = self.servers.get(&node)?.space;
        let is_of_space = |home| self.servers.get(&home).is_some_and(|it| it.space == space);
        let others = self
            .deputies
            .values()
            .filter(|of| of.record.home() != node && is_of_space(of.record.home()));
        others.into_iter().find_map(|of| {
            let home = self.name(of.record.home());
            if of.record.deputy() == node {
                let has_next = !self.deputy_candidates(of.record.home()).is_empty();
                return has_next.then(|| format!("another server must answer for {home} first"));
            }
            // One that has ended is replaced itself, or no other server can do it.
            let is_awaited = !of.is_confirmed && self.why_over(&of.record).is_none();
            let deputy = self.name(of.record.deputy());
            is_awaited.then(|| format!("{deputy} must confirm first that it answers for {home}"))
        })
    }

    /// The orders to a server that are about allocations and deputies.
    pub(super) fn deputy_orders(&self, to: NodeId) -> Vec<Order> {
        let link = self.servers.get(&to).and_then(|server| server.link.as_ref());
        let Some(link) = link.filter(|link| link.deputizes) else { return Vec::new() };
        let must_seal = self.drains.get(&to).is_some_and(|drain| drain.wants_seal);
        let seal = (link.is_sealed != must_seal).then_some(Order::Seal(must_seal));
        let is_current = |home: &NodeId, incarnation: u32| {
            let record = self.deputy_of(*home);
            record.is_some_and(|of| of.deputy() == to && of.incarnation == incarnation)
                && !self.returning.contains_key(home)
        };
        let mut over: BTreeMap<NodeId, u32> =
            link.deputized.iter().map(|(home, (of, _))| (*home, *of)).collect();
        // The order to answer may be on its way.
        let returning = self.deputies().filter(|of| self.returning.contains_key(&of.home()));
        over.extend(returning.filter(|of| of.deputy() == to).map(|of| (of.home(), of.incarnation)));
        over.retain(|home, incarnation| !is_current(home, *incarnation));
        let dismissals =
            over.into_iter().map(|(home, incarnation)| Order::Dismiss { home, incarnation });
        let due = self.deputies().filter(|of| {
            let is_its = of.deputy() == to && is_current(&of.home(), of.incarnation);
            let known = Some(&(of.incarnation, self.places_version(of.home())));
            is_its && link.deputized.get(&of.home()) != known
        });
        let appointments = due.filter_map(|of| self.deputyship(&of)).map(Order::Deputize);
        seal.into_iter().chain(dismissals).chain(appointments).collect()
    }

    /// The version of where a server's pages are, of all its contents.
    fn places_version(&self, home: NodeId) -> u64 {
        let of_home =
            self.elsewhere.values().map(|of| &of.record).filter(|of| of.home.id() == home);
        of_home.map(|of| of.version + 1).sum()
    }

    /// What a deputy must know.
    fn deputyship(&self, record: &DeputyRecord) -> Option<Deputyship> {
        let home = record.home();
        let server = self.servers.get(&home)?;
        let of_home =
            || self.elsewhere.values().map(|of| &of.record).filter(|of| of.home.id() == home);
        // Of contents of which nothing is elsewhere, all is lost or freed.
        let mut contents: Vec<ArenaGeneration> = of_home()
            .map(|of| of.home)
            .chain(server.contents)
            .map(|of| of.contents().generation)
            .collect();
        contents.sort_unstable();
        contents.dedup();
        Some(Deputyship {
            home,
            incarnation: record.incarnation,
            space: Space(server.space),
            range_epoch: record.range_epoch,
            last_generation: ArenaGeneration::new(record.last_generation)?,
            idle: Duration::from_millis(record.idle_ms),
            version: self.places_version(home),
            contents,
            rows: of_home().flat_map(|of| self.rows_elsewhere(of)).collect(),
        })
    }

    /// What other servers have, or may have, of contents.
    pub(super) fn rows_elsewhere(&self, of: &ElsewhereRecord) -> Vec<EarlierRow> {
        let mut places: PageMap<Option<ContentsRecord>> = PageMap::default();
        if of.is_pending {
            // What was about to move may be at its taker.
            let open = self.open().map(|of| &of.record);
            for record in open.filter(|record| record.home == of.home) {
                places.insert(record.pages.clone(), None);
            }
        }
        for (pages, placed) in of.rows.iter() {
            places.insert(pages.clone(), (!of.is_pending).then_some(placed.at));
        }
        let row = |(pages, at): (&std::ops::Range<u64>, &Option<ContentsRecord>)| EarlierRow {
            generation: of.home.contents().generation,
            pages: pages.clone(),
            at: at.map(ContentsRecord::id),
        };
        places.iter().map(row).collect()
    }

    /// Whether the deputy of a server, if it has one, knows where its pages are now; `None` if it has none.
    pub(super) fn deputy_knows(&self, home: NodeId) -> Option<bool> {
        let record = self.deputy_of(home)?;
        let link = self.servers.get(&record.deputy()).and_then(|at| at.link.as_ref());
        let known = link.and_then(|link| link.deputized.get(&home));
        Some(known == Some(&(record.incarnation, self.places_version(home))))
    }

    pub(super) fn note_deputized(
        &mut self,
        from: NodeId,
        home: NodeId,
        (incarnation, version): (u32, u64),
    ) {
        let link = self.servers.get_mut(&from).and_then(|server| server.link.as_mut());
        if let Some(link) = link {
            link.deputized.insert(home, (incarnation, version));
        }
        self.confirm_deputies();
    }

    pub(super) fn note_dismissed(&mut self, from: NodeId, home: NodeId, incarnation: u32) {
        let link = self.servers.get_mut(&from).and_then(|server| server.link.as_mut());
        if let Some(link) = link
            && link.deputized.get(&home).is_none_or(|(of, _)| *of <= incarnation)
        {
            link.deputized.remove(&home);
        }
        let record = self.deputy_of(home);
        let is_its = record.is_some_and(|of| (of.deputy(), of.incarnation) == (from, incarnation));
        if is_its && self.returning.contains_key(&home) {
            self.dismiss(home);
        }
    }

    pub(super) fn note_sealed(&mut self, from: NodeId, is_sealed: bool) {
        let link = self.servers.get_mut(&from).and_then(|server| server.link.as_mut());
        if let Some(link) = link {
            link.is_sealed = is_sealed;
        }
    }

    /// Notes that one pass over all that a drained server has found nothing. If the server can stop allocating it must
    /// do so first, and the next pass counts.
    pub(crate) fn note_clean_pass(&mut self, now: Instant, node: NodeId) {
        let link = self.servers.get(&node).and_then(|server| server.link.as_ref());
        let (can_seal, is_sealed) =
            link.map_or((false, false), |link| (link.deputizes, link.is_sealed));
        let Some(drain) = self.drains.get_mut(&node) else { return };
        if !can_seal {
            return self.note_drained(node, true);
        }
        if !(drain.wants_seal && is_sealed) {
            self.version += u64::from(!drain.wants_seal);
            drain.wants_seal = true;
            return;
        }
        // This pass may have begun before it was sealed. If the next one finds nothing, nothing was there before it.
        let Some(sealed_pass) = drain.sealed_pass else {
            drain.sealed_pass = Some(now);
            return;
        };
        if !drain.record.empty {
            drain.record.empty = true;
            drain.empty_since = Some(sealed_pass);
            self.changes.push(Change::Drain(drain.record));
        }
        self.note_drained(node, true);
    }

    /// A server that is drained joined again: its new process allocates until it is told not to.
    pub(super) fn note_rejoined(&mut self, record: &NodeRecord) {
        if let Some(drain) = self.drains.get_mut(&record.id()) {
            drain.begin_again();
        }
        self.note_drained(record.id(), false);
        self.returning.remove(&record.id());
        self.dismiss(record.id());
    }
}
