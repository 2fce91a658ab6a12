//! Live migration: which server should have which pages, and how far each migration is (`docs/migration.md`).
//!
//! A pure state machine: its inputs are servers that join and connect, their reports, and operators' requests; its
//! outputs are the orders that are due ([`Migrations::orders`]) and what must be stored before they are sent. There is no
//! I/O and no clock. An order stays due until its report arrives, so it is sent again through every new connection.
//!
//! * `record`: what is stored; `pages`: maps of pages.
//! * `request`: what an operator may ask for, and cancel.
//! * `order`: the orders that are due; `report`: what servers report.
//! * `deputy`: servers that answer for others that are drained and gone.
//! * `drain`: servers that are drained; [`rebalance`]: what moves by itself.
//! * `free`: lines of which no page is allocated any more.
//! * `loss`: servers that lost their memory, and where the pages of their homes are then.

mod deputy;
mod drain;
mod free;
mod loss;
mod order;
mod pages;
pub mod rebalance;
mod record;
mod report;
mod request;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use bluebridge_northbound::migration::ServedRow;
use bluebridge_wire::{Fence, NodeId};

use crate::core::{Change, NodeRecord, Role};
use deputy::Deputy;
pub use deputy::{Answers, DeputyRecord};
use drain::Drain;
pub(crate) use drain::Left;
pub use drain::{DrainRecord, ShownDrain};
use loss::Claims;
pub use order::Sent;
pub use pages::PageMap;
pub use record::{
    ContentsRecord, ElsewhereRecord, End, GenerationRange, LossRecord, MigrationRecord, Placed,
    RefusalRecord, Stage,
};
pub use report::ReportError;
pub use request::{CancelError, MigrateError, Wanted};

/// The most open migrations.
pub const MIGRATIONS_MAX: usize = 1024;

/// How long a taker may be away before migrations that wait for one of its do so no more.
const ABSENCE: Duration = Duration::from_secs(10);

/// Closed migrations that are remembered, for operators.
const CLOSED_MAX: usize = 100;

/// What is stored of migrations.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct StoredMigrations {
    /// Every open migration and the last closed ones.
    pub records: Vec<MigrationRecord>,
    /// Where the pages of homes are.
    pub elsewhere: Vec<ElsewhereRecord>,
    /// Losses that are not known to all.
    pub losses: Vec<LossRecord>,
    /// Servers that are drained.
    pub drains: Vec<DrainRecord>,
    /// Servers that answer for others that are gone.
    pub deputies: Vec<DeputyRecord>,
}

/// A memory server, as far as migrations are concerned.
#[derive(Clone, Debug)]
struct Server {
    name: String,
    /// `None` if the node is retired: what it had is lost.
    contents: Option<ContentsRecord>,
    incarnation: u32,
    range_epoch: u32,
    space: u16,
    shard_count: u16,
    capacity_pages: u64,
    is_attached: bool,
    link: Option<Link>,
    /// Since when it was seen without a connection.
    away_since: Option<Instant>,
}

/// The connection of a server.
#[derive(Clone, Debug)]
struct Link {
    number: u64,
    /// Whether the server knows migrations.
    migrates: bool,
    /// What it has learned through this connection: versions, by contents.
    learned: BTreeMap<ContentsRecord, u64>,
    /// Whether it can stop allocating, and answer for others.
    deputizes: bool,
    /// Whether it allocates nothing.
    is_sealed: bool,
    /// The nodes for which it answers: under which incarnation, and from which version of the places.
    deputized: BTreeMap<NodeId, (u32, u64)>,
}

impl Server {
    fn of(record: &NodeRecord) -> Self {
        let NodeRecord { node, generation, .. } = *record;
        Self {
            name: record.name.clone(),
            contents: (!record.retired).then_some(ContentsRecord { node, generation }),
            incarnation: record.incarnation,
            range_epoch: record.range_epoch,
            space: record.space,
            shard_count: record.shard_count,
            capacity_pages: record.capacity_pages,
            is_attached: record.attached,
            link: None,
            away_since: None,
        }
    }
}

/// What a taker last reported, besides what it keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Progress {
    /// Lines that it took and has not kept or dropped.
    pub on_the_way_count: u64,
    /// Those of them for which KEEP was sent and not answered.
    pub in_doubt_count: u64,
    /// Lines that are free as a whole, and stay at home.
    pub free_count: u64,
    /// Pages per second, over the last reports.
    pub pages_per_second: Option<f64>,
    last: Option<(Instant, u64)>,
}

/// A migration with what is not stored of it.
#[derive(Clone, Debug)]
struct Migration {
    record: MigrationRecord,
    /// What the giver answered when it allowed the migration.
    fences: Option<Vec<Fence>>,
    progress: Progress,
    /// Why the order that is due is put off: a server refused it.
    put_off: Option<String>,
    /// Why the last report of what the taker has is ignored.
    complaint: Option<String>,
}

impl Migration {
    fn new(record: MigrationRecord) -> Self {
        Self { record, fences: None, progress: Progress::default(), put_off: None, complaint: None }
    }
}

/// A home's pages at other servers, and what these claim.
#[derive(Clone, Debug)]
struct Elsewhere {
    record: ElsewhereRecord,
    /// Of the round that has the number of the version.
    claims: BTreeMap<NodeId, Claims>,
    /// Why the last report of this round is ignored.
    complaint: Option<String>,
}

impl Elsewhere {
    const fn new(record: ElsewhereRecord) -> Self {
        Self { record, claims: BTreeMap::new(), complaint: None }
    }
}

/// A migration in the view of operators.
#[derive(Clone, Debug, PartialEq)]
pub struct Shown<'a> {
    /// The record.
    pub record: &'a MigrationRecord,
    /// What the taker last reported.
    pub progress: Progress,
    /// What it waits for, if not only for lines to move.
    pub waits: Option<String>,
}

/// Which moves of pages count.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Moves<'a> {
    /// Those that are over, of all open migrations, and of these planned ones.
    All(&'a [MigrationRecord]),
    /// Those of lines that takers have.
    Kept,
    /// Those that are over, without ranges that move on: a part of these may be at their takers, which have no entries
    /// then, and no entry may lead to a server that had pages before.
    Settled,
}

/// The state machine of all migrations.
#[derive(Debug, Default)]
pub struct Migrations {
    servers: BTreeMap<NodeId, Server>,
    all: BTreeMap<u64, Migration>,
    elsewhere: BTreeMap<ContentsRecord, Elsewhere>,
    losses: BTreeMap<NodeId, LossRecord>,
    drains: BTreeMap<NodeId, Drain>,
    deputies: BTreeMap<NodeId, Deputy>,
    /// Servers that came back and wait for their deputies to end, and since when.
    returning: BTreeMap<NodeId, Instant>,
    /// Servers from which no heartbeat has come for so long that another one answers in place of a deputy among them.
    hung: BTreeSet<NodeId>,
    /// Free lines of others, by the servers that have them.
    free: BTreeMap<NodeId, free::OfServer>,
    changes: Vec<Change>,
    /// Whether where pages are may have changed.
    is_moved: bool,
    /// Counts the calls after which other orders may be due.
    version: u64,
}

impl Migrations {
    /// Continues from the stored state.
    #[must_use]
    pub fn new<'a>(
        stored: StoredMigrations,
        nodes: impl IntoIterator<Item = &'a NodeRecord>,
    ) -> Self {
        let memory = nodes.into_iter().filter(|record| record.role == Role::Memory);
        let with_id = |record: MigrationRecord| (record.id, Migration::new(record));
        let of_home = |record: ElsewhereRecord| (record.home, Elsewhere::new(record));
        let mut this = Self {
            servers: memory.map(|record| (record.id(), Server::of(record))).collect(),
            all: stored.records.into_iter().map(with_id).collect(),
            elsewhere: stored.elsewhere.into_iter().map(of_home).collect(),
            losses: stored.losses.into_iter().map(|loss| (NodeId(loss.node), loss)).collect(),
            drains: stored
                .drains
                .into_iter()
                .map(|drain| (NodeId(drain.node), Drain::new(drain)))
                .collect(),
            deputies: stored
                .deputies
                .into_iter()
                .map(|record| (record.home(), Deputy::new(record)))
                .collect(),
            ..Self::default()
        };
        this.advance();
        this
    }

    /// Notes the present state of a memory server. If it has other contents than before, those are lost.
    pub fn note_server(&mut self, record: &NodeRecord) {
        self.version += 1;
        if record.role != Role::Memory {
            return;
        }
        let id = record.id();
        let mut now = Server::of(record);
        let before = self.servers.get(&id);
        if let Some(before) = before.filter(|before| before.incarnation == now.incarnation) {
            now.link.clone_from(&before.link);
        }
        now.away_since = before.and_then(|before| before.away_since);
        let began = match (before.and_then(|before| before.contents), now.contents) {
            (Some(before), Some(now)) if before != now => Some(now.generation),
            (Some(before), None) => Some(before.generation.saturating_add(1)),
            _ => None,
        };
        let incarnation = now.incarnation;
        let is_another = before.is_some_and(|before| before.incarnation != incarnation);
        self.servers.insert(id, now);
        if is_another {
            self.free.remove(&id);
            self.note_heard(id);
        }
        if is_another && record.attached {
            self.note_rejoined(record);
        }
        if let Some(began) = began {
            self.lose(id, began);
        }
        self.renew_terms(id, incarnation);
        self.advance();
    }

    /// A taker that joined again asks for lines as its new incarnation, if the giver cannot know of the old one yet.
    fn renew_terms(&mut self, taker: NodeId, incarnation: u32) {
        let is_new = |of: &Migration| {
            of.record.stage == Stage::Recorded
                && of.record.taker.id() == taker
                && of.record.taker_incarnation != incarnation
        };
        let ids: Vec<u64> =
            self.all.iter().filter(|(_, of)| is_new(of)).map(|(id, _)| *id).collect();
        for id in ids {
            self.edit(id, |record| record.taker_incarnation = incarnation);
        }
    }

    /// A server opened a connection; what an earlier one still brings is ignored.
    pub fn connect(&mut self, server: NodeId, number: u64, migrates: bool) {
        self.version += 1;
        // It reports anew what is free.
        self.free.remove(&server);
        self.note_heard(server);
        if let Some(server) = self.servers.get_mut(&server) {
            server.link = Some(Link {
                number,
                migrates,
                learned: BTreeMap::new(),
                deputizes: false,
                is_sealed: false,
                deputized: BTreeMap::new(),
            });
            server.away_since = None;
        }
        let concerned = |of: &&mut Migration| {
            [of.record.giver, of.record.taker].iter().any(|party| party.id() == server)
        };
        for of in self.all.values_mut().filter(concerned) {
            of.put_off = None;
        }
        self.advance();
    }

    /// A connection ended.
    pub fn disconnect(&mut self, server: NodeId, number: u64) {
        if let Some(server) = self.servers.get_mut(&server) {
            server.link = server.link.take().filter(|link| link.number != number);
        }
    }

    /// Ends migrations that their givers know nothing of, and for which others wait, if the taker has been away for long.
    pub fn handle_timeout(&mut self, now: Instant) {
        for server in self.servers.values_mut() {
            let since = server.away_since.unwrap_or(now);
            server.away_since = server.link.is_none().then_some(since);
        }
        let is_away = |id: NodeId| {
            let since = self.servers.get(&id).and_then(|server| server.away_since);
            since.is_some_and(|since| now.saturating_duration_since(since) >= ABSENCE)
        };
        if !self.servers.keys().any(|id| is_away(*id)) {
            return;
        }
        let waiting = self.open().filter(|of| of.record.stage == Stage::Reserved);
        let before = waiting.filter_map(|of| self.hindrance(&of.record));
        let is_unknown = |id: &u64| {
            let record = self.all.get(id).map(|of| &of.record);
            record.is_some_and(|it| it.stage == Stage::Recorded && is_away(it.taker.id()))
        };
        let late: BTreeSet<u64> = before.filter(is_unknown).collect();
        if late.is_empty() {
            return;
        }
        self.version += 1;
        for id in late {
            self.end(id, Stage::Forgotten, End::TakerAway);
        }
        self.advance();
    }

    /// Gives the orders again that a server refused and that must be executed some time.
    pub fn retry(&mut self) {
        self.version += 1;
        for of in self.all.values_mut() {
            of.put_off = None;
        }
    }

    /// Counts the calls after which other orders may be due.
    #[must_use]
    pub const fn version(&self) -> u64 {
        self.version
    }

    /// What must be stored before the orders that are due are sent.
    #[must_use]
    pub fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    /// Whether pages may be at other servers than at the last call.
    #[must_use]
    pub fn take_moved(&mut self) -> bool {
        std::mem::take(&mut self.is_moved)
    }

    /// Every open migration and the last closed ones, in the order of their ids.
    pub fn iter(&self) -> impl Iterator<Item = Shown<'_>> {
        self.all.values().map(|of| Shown {
            record: &of.record,
            progress: of.progress,
            waits: self.waits(of),
        })
    }

    /// Where the pages of homes are that are not at home.
    pub fn elsewhere(&self) -> impl Iterator<Item = &ElsewhereRecord> {
        self.elsewhere.values().map(|of| &of.record)
    }

    /// Whether a server has these contents now.
    #[must_use]
    pub fn is_present(&self, contents: ContentsRecord) -> bool {
        self.servers.get(&contents.id()).is_some_and(|it| it.contents == Some(contents))
    }

    /// Where the pages of homes are, with their spaces.
    pub(crate) fn places(
        &self,
        moves: Moves<'_>,
    ) -> Vec<(ContentsRecord, u16, Cow<'_, PageMap<Placed>>)> {
        let records = self.elsewhere.values().map(|of| &of.record);
        let mut places: BTreeMap<ContentsRecord, (u16, Cow<'_, PageMap<Placed>>)> =
            records.map(|of| (of.home, (of.space, Cow::Borrowed(&of.rows)))).collect();
        let planned = match moves {
            Moves::All(planned) => planned,
            Moves::Kept | Moves::Settled => &[],
        };
        let open = self.open().map(|of| &of.record).filter(|of| match moves {
            Moves::All(_) => of.stage < Stage::Settled,
            Moves::Kept | Moves::Settled => of.stage < Stage::Settled && !of.kept.is_empty(),
        });
        for record in open.chain(planned) {
            let (home, at) = (record.home, record.taker);
            let (_, rows) = places.entry(home).or_insert_with(|| (record.space, Cow::default()));
            let rows = rows.to_mut();
            if matches!(moves, Moves::Settled) {
                rows.remove(&record.pages);
            } else if matches!(moves, Moves::All(_)) {
                // Those that moved before keep their generations; of the others only the first is known.
                let first = GenerationRange { first: home.generation, last: home.generation };
                let parts = rows.within(&record.pages).map(|(part, it)| (part, it.generations));
                let mut moving: PageMap<_> = [(record.pages.clone(), first)].into_iter().collect();
                parts
                    .collect::<Vec<_>>()
                    .into_iter()
                    .for_each(|(part, it)| moving.insert(part, it));
                place(rows, home, at, &moving);
            } else {
                place(rows, home, at, &record.kept);
            }
        }
        places.into_iter().map(|(home, (space, rows))| (home, space, rows)).collect()
    }

    /// A migration that is open, or one of the last closed ones.
    pub(crate) fn record_of(&self, id: u64) -> Option<&MigrationRecord> {
        self.all.get(&id).map(|of| &of.record)
    }

    /// Whether time alone changes nothing here: no migration is open, and every server is there and undisturbed.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        let Self { losses, drains, deputies, returning, hung, .. } = self;
        let is_undisturbed = losses.is_empty() && drains.is_empty() && deputies.is_empty();
        let is_there = |server: &Server| server.link.is_some() && server.away_since.is_none();
        is_undisturbed
            && returning.is_empty()
            && hung.is_empty()
            && self.open().next().is_none()
            && self.servers.values().all(is_there)
    }

    fn open(&self) -> impl Iterator<Item = &Migration> {
        self.all.values().filter(|of| of.record.is_open())
    }

    pub(crate) fn name(&self, id: NodeId) -> String {
        self.servers.get(&id).map_or_else(|| format!("node {id}"), |server| server.name.clone())
    }

    /// Changes a record.
    fn edit(&mut self, id: u64, change: impl FnOnce(&mut MigrationRecord)) {
        if let Some(of) = self.all.get_mut(&id) {
            let before = of.record.clone();
            change(&mut of.record);
            if of.record != before {
                of.put_off = None;
                self.is_moved = true;
                self.changes.push(Change::Migration(of.record.clone()));
            }
        }
    }

    fn enter(&mut self, id: u64, stage: Stage) {
        self.edit(id, |record| record.stage = stage);
    }

    fn end(&mut self, id: u64, stage: Stage, end: End) {
        self.edit(id, |record| {
            record.stage = stage;
            record.end.get_or_insert(end);
        });
    }

    /// Changes where pages of a home are; the home, and those that are asked in a round, learn that.
    fn edit_elsewhere(
        &mut self,
        home: ContentsRecord,
        space: u16,
        change: impl FnOnce(&mut ElsewhereRecord),
    ) {
        let fresh = || ElsewhereRecord {
            home,
            space,
            version: 0,
            is_pending: false,
            rows: PageMap::default(),
            lost: PageMap::default(),
        };
        let of = self.elsewhere.entry(home).or_insert_with(|| Elsewhere::new(fresh()));
        change(&mut of.record);
        of.record.version += 1;
        // Reports of different moments do not fit together.
        of.claims.clear();
        of.complaint = None;
        self.is_moved = true;
        self.changes.push(Change::Elsewhere(of.record.clone()));
    }

    /// Takes every step that needs no report.
    fn advance(&mut self) {
        loop {
            self.conclude_rounds();
            let steps: Vec<(u64, Stage)> =
                self.open().filter_map(|of| Some((of.record.id, self.next_stage(of)?))).collect();
            if steps.is_empty() {
                break;
            }
            for (id, stage) in steps {
                match stage {
                    Stage::Settled => self.settle(id, &[]),
                    stage => self.enter(id, stage),
                }
            }
        }
        self.forget_closed();
    }

    /// The stage that follows without a report, because the server that would send one lost its memory, or has said
    /// enough.
    fn next_stage(&self, of: &Migration) -> Option<Stage> {
        let record = &of.record;
        let is_present = |contents| self.is_present(contents);
        match record.stage {
            Stage::Ending if !is_present(record.giver) => Some(Stage::Withdrawn),
            // What is on its way to a server that lost its memory can still be marked for it, until all know that.
            Stage::Withdrawn if !is_present(record.taker) && self.is_known(record.taker.id()) => {
                Some(Stage::Settled)
            }
            Stage::Settled if self.home_knows(record.home) => Some(Stage::Learned),
            Stage::Learned if !is_present(record.giver) => Some(Stage::Forgotten),
            Stage::Forgotten if !is_present(record.taker) => Some(Stage::Closed),
            _ => None,
        }
    }

    /// Whether the home has learned where its pages are now.
    fn home_knows(&self, home: ContentsRecord) -> bool {
        if let Some(is_known) = self.deputy_knows(home.id()) {
            let of = self.elsewhere.get(&home);
            return is_known && of.is_none_or(|of| !of.record.is_pending);
        }
        let Some(server) = self.servers.get(&home.id()) else { return true };
        let Some(of) = self.elsewhere.get(&home) else { return true };
        let learned = server.link.as_ref().and_then(|link| link.learned.get(&home));
        let is_over = server.contents.is_none();
        !of.record.is_pending && (is_over || learned == Some(&of.record.version))
    }

    /// Nothing is on its way any more: what the taker has is its own, and the home is to learn it.
    fn settle(&mut self, id: u64, kept: &[ServedRow]) {
        let kept = record::kept_pages(kept);
        self.edit(id, |record| {
            record.stage = Stage::Settled;
            record.kept = kept;
        });
        let Some(record) = self.all.get(&id).map(|of| of.record.clone()) else { return };
        self.edit_elsewhere(record.home, record.space, |elsewhere| {
            for (pages, _) in record.kept.iter() {
                // Its giver may have lost its memory afterwards.
                elsewhere.lost.remove(pages);
            }
            place(&mut elsewhere.rows, record.home, record.taker, &record.kept);
        });
    }

    /// Forgets the oldest closed migrations, never the last of all: ids and range epochs go on from it.
    fn forget_closed(&mut self) {
        let closed = || self.all.values().filter(|of| !of.record.is_open()).map(|of| of.record.id);
        let excess = closed().count().saturating_sub(CLOSED_MAX);
        let ids: Vec<u64> = closed().take(excess).collect();
        for id in ids {
            self.all.remove(&id);
            self.changes.push(Change::MigrationGone(id));
        }
    }
}

/// Notes that a server has pages of a home; what is at home is not noted.
fn place(
    rows: &mut PageMap<Placed>,
    home: ContentsRecord,
    at: ContentsRecord,
    pages: &PageMap<GenerationRange>,
) {
    for (pages, generations) in pages.iter() {
        if at == home {
            rows.remove(pages);
        } else {
            rows.insert(pages.clone(), Placed { at, generations: *generations });
        }
    }
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
