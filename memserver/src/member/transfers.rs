//! The controller's orders for migrations, shard by shard, and what is reported of them (`docs/migration.md`).
//!
//! Nothing is kept here that an order does not bring again: the shards keep what must outlive the process. A report that
//! was lost is sent again, because the controller repeats the order.

use core::{ops::Range, time::Duration};
use std::{
    collections::{BTreeMap, VecDeque},
    time::Instant,
};

use bluebridge_northbound::migration::{
    Contents, Deputyship, EarlierRow, Elsewhere, Generations, Order, OrderKind, Refusal, Report,
    ServedRow, Terms,
};
use bluebridge_protocol::{
    requester,
    responder::{Adopted, AllowError, FreeLines},
    taker::{self, Row},
};
use bluebridge_wire::{
    NodeId,
    address::{PAGE_SHIFT, SHARD_SHIFT},
};

use super::free_lines::FreeLineReports;
use crate::{
    Server, deputies,
    migration::{self, MigrationError, MigrationOrder, MigrationState},
    server::MigrateError,
};

/// How long a shard may take to follow an order. A shard that does not is asked again.
pub(super) const PATIENCE: Duration = Duration::from_secs(1);

/// How often the progress of a migration is reported. Its end is reported at once.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

/// Pages that a shard's offsets span.
const SHARD_PAGES: u64 = 1 << (SHARD_SHIFT - PAGE_SHIFT);

/// What is to be reported when it is known.
#[derive(Clone, Debug)]
enum Due {
    /// How far a taker is.
    Progress(Terms),
    /// That no line is on its way any more.
    Settled(Terms),
    /// What the server has of a home.
    Claims { home: Contents, round: u64 },
    /// An order that a shard had no time for, or could not follow yet.
    Again(Order),
}

/// The orders that the server got, as far as their reports are due.
#[derive(Debug)]
pub(super) struct Transfers {
    own: Contents,
    dues: Vec<Due>,
    /// When the progress of each migration was reported, and what.
    reported: BTreeMap<u64, (Instant, Report)>,
    /// Migrations that had come to their end when all progress was looked at for the last time.
    over: u64,
    free_lines: FreeLineReports,
    /// Reports for which the connection had no room.
    unsent: VecDeque<Report>,
}

/// Reports that wait at most: later ones of the same orders come again.
const UNSENT_MAX: usize = 256;

impl Due {
    /// Whether both are about the same, so that one of them is enough.
    fn is_like(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Progress(of), Self::Progress(other) | Self::Settled(other))
            | (Self::Settled(of), Self::Settled(other)) => of.migration == other.migration,
            (Self::Claims { home, .. }, Self::Claims { home: other, .. }) => home == other,
            (Self::Again(order), Self::Again(other)) => order == other,
            _ => false,
        }
    }
}

/// An order was not followed, now or for good.
enum Hindered {
    /// It is to be repeated.
    Later,
    Refused(Refusal),
}

impl From<MigrateError> for Hindered {
    fn from(error: MigrateError) -> Self {
        let error = match error {
            MigrateError::Order(_) | MigrateError::TimedOut(_) => return Self::Later,
            MigrateError::Refused(error) => error,
        };
        Self::Refused(match error {
            MigrationError::Allow(AllowError::Replies) | MigrationError::OnTheirWay => {
                return Self::Later;
            }
            MigrationError::Allow(AllowError::Contradiction) => Refusal::Contradiction,
            MigrationError::Allow(AllowError::Full) | MigrationError::Full => Refusal::Full,
            MigrationError::Allow(AllowError::Late) => Refusal::Late,
            MigrationError::Allow(AllowError::Overlap) => Refusal::Overlap,
            MigrationError::Allow(AllowError::Space) => Refusal::Space,
            MigrationError::Take(taker::OrderError::NoRoom(_)) => Refusal::NoRoom,
            MigrationError::Allow(AllowError::Unknown) | MigrationError::Unknown => {
                Refusal::Unknown
            }
            error => Refusal::Other(error.to_string()),
        })
    }
}

impl Transfers {
    /// The orders of a new connection to a server with these contents.
    pub(super) fn new(own: Contents) -> Self {
        Self {
            own,
            dues: Vec::new(),
            reported: BTreeMap::new(),
            over: 0,
            free_lines: FreeLineReports::default(),
            unsent: VecDeque::new(),
        }
    }

    /// Whether nothing is to be done until an order arrives, or [`Self::due`].
    pub(super) fn is_idle(&self) -> bool {
        self.dues.is_empty() && self.unsent.is_empty()
    }

    /// When free lines are to be looked for.
    pub(super) fn due(&self, server: &Server) -> Option<Instant> {
        self.free_lines.due(server)
    }

    /// Follows the orders that arrived, and reports what is known. `send` returns whether a report was sent.
    pub(super) fn drive(
        &mut self,
        server: &Server,
        mut next: impl FnMut() -> Option<Order>,
        mut send: impl FnMut(Report) -> bool,
    ) {
        while let Some(order) = next() {
            self.free_lines.note_order();
            let report = self.follow(order, server);
            self.unsent.extend(report);
        }
        let now = Instant::now();
        let reports = self.poll(now, server);
        self.unsent.extend(reports);
        let reports = self.free_lines.poll(now, server);
        self.unsent.extend(reports);
        while let Some(report) = self.unsent.pop_front() {
            if !send(report.clone()) {
                self.unsent.push_front(report);
                break;
            }
        }
        // Without a connection they are of no use: the orders come again through the next one.
        self.unsent.truncate(UNSENT_MAX);
    }

    /// Reports something when it is known, in place of what it replaces.
    fn expect(&mut self, due: Due) {
        self.dues.retain(|other| !other.is_like(&due));
        self.dues.push(due);
    }

    /// Follows an order. Returns what is to be reported now; the rest is reported by [`Self::poll`].
    pub(super) fn follow(&mut self, order: Order, server: &Server) -> Option<Report> {
        let (migration, kind) = subject(&order);
        if kind.is_some() {
            // An earlier order must not be followed after the one that ends what it asked for.
            let is_earlier =
                |due: &Due| matches!(due, Due::Again(order) if subject(order).0 == migration);
            self.dues.retain(|due| !is_earlier(due));
        }
        match self.try_follow(&order, server) {
            Ok(report) => report,
            Err(Hindered::Later) => {
                self.expect(Due::Again(order));
                None
            }
            Err(Hindered::Refused(why)) => Some(Report::Refused { migration, order: kind?, why }),
        }
    }

    fn try_follow(&mut self, order: &Order, server: &Server) -> Result<Option<Report>, Hindered> {
        let of_shard =
            |pages: &Range<u64>, order| server.migrate(shard_of(pages, server), order, PATIENCE);
        Ok(match order {
            Order::Reserve(terms) => {
                of_shard(&terms.pages, MigrationOrder::Reserve(taken(terms)))?;
                Some(Report::Reserved(terms.migration))
            }
            Order::Allow(terms) => {
                of_shard(&terms.pages, MigrationOrder::Allow(allowed(terms)))?;
                // The taker reads fences with the answers to its KEEPs, which bring also those that come later.
                Some(Report::Allowed { migration: terms.migration, fences: Vec::new() })
            }
            Order::Take { terms, .. } => {
                of_shard(&terms.pages, MigrationOrder::Begin(taken(terms)))?;
                self.reported.remove(&terms.migration);
                self.expect(Due::Progress(terms.clone()));
                None
            }
            Order::Withdraw(id) => {
                // A migration that is not known gives nothing.
                in_one(server, &MigrationOrder::Withdraw(*id))?;
                Some(Report::Withdrawn(*id))
            }
            Order::Settle(terms) => {
                of_shard(&terms.pages, MigrationOrder::Stop(taken(terms)))?;
                self.expect(Due::Settled(terms.clone()));
                None
            }
            Order::Forget(id) => {
                in_one(server, &MigrationOrder::Close(*id))?;
                Some(Report::Forgotten(*id))
            }
            Order::Release(id) => {
                // Nothing is reserved for a migration that is not known.
                in_one(server, &MigrationOrder::Finish(*id))?;
                self.reported.remove(id);
                self.dues.retain(|due| !matches!(due, Due::Progress(of) | Due::Settled(of) if of.migration == *id));
                Some(Report::Released(*id))
            }
            Order::Learn(elsewhere) => {
                // In place of an earlier version.
                let is_earlier = |due: &Due| matches!(due, Due::Again(Order::Learn(of)) if of.home == elsewhere.home);
                self.dues.retain(|due| !is_earlier(due));
                self.learn(elsewhere, server)?;
                let Elsewhere { home, version, .. } = *elsewhere;
                Some(Report::Learned { home, version })
            }
            Order::Seal(is_sealed) => {
                in_all(server, &MigrationOrder::Seal(*is_sealed))?;
                Some(Report::Sealed(*is_sealed))
            }
            Order::Deputize(of) => {
                // In place of what an earlier one said.
                self.forget_deputy(of.home);
                deputize(of, server)?;
                let Deputyship { home, incarnation, version, .. } = *of;
                Some(Report::Deputized { home, incarnation, version })
            }
            Order::Discard { home, pages, .. } => {
                discard(*home, pages, server)?;
                // The next report shows what is left.
                self.free_lines.hurry();
                None
            }
            Order::Dismiss { home, incarnation } => {
                let (home, incarnation) = (*home, *incarnation);
                self.forget_deputy(home);
                in_all(server, &MigrationOrder::Dismiss { home, incarnation })?;
                Some(Report::Dismissed { home, incarnation })
            }
            Order::Report { home, round } => {
                self.expect(Due::Claims { home: *home, round: *round });
                None
            }
            Order::Lose { node, began } => {
                in_all(server, &MigrationOrder::Lose(*node))?;
                Some(Report::Lost { node: *node, began: *began })
            }
        })
    }

    /// What could not be followed of earlier orders about a deputy is not followed later.
    fn forget_deputy(&mut self, node: NodeId) {
        let is_its = |due: &Due| match due {
            Due::Again(Order::Deputize(Deputyship { home, .. }) | Order::Dismiss { home, .. }) => {
                *home == node
            }
            _ => false,
        };
        self.dues.retain(|due| !is_its(due));
    }

    /// The home learns where its pages are, of its present contents or of earlier ones.
    fn learn(&self, elsewhere: &Elsewhere, server: &Server) -> Result<(), Hindered> {
        let Contents { node, generation } = elsewhere.home;
        if node != self.own.node || generation > self.own.generation {
            return Ok(());
        }
        for shard in 0..server.shard_count() {
            let is_of = |pages: &Range<u64>| shard_of(pages, server) == shard;
            let rows = elsewhere.rows.iter().filter(|(pages, _)| is_of(pages)).cloned().collect();
            let order = if generation == self.own.generation {
                let lost = elsewhere.lost.iter().filter(|pages| is_of(pages)).cloned().collect();
                MigrationOrder::Learn { rows, lost }
            } else {
                MigrationOrder::LearnEarlier { generation, rows }
            };
            server.migrate(shard, order, PATIENCE)?;
        }
        Ok(())
    }

    /// What has become known since the last call.
    pub(super) fn poll(&mut self, now: Instant, server: &Server) -> Vec<Report> {
        let mut reports = Vec::new();
        let over = server.takings_over();
        let is_news = self.over != over;
        let mut has_heard = true;
        for due in core::mem::take(&mut self.dues) {
            let done = match &due {
                Due::Again(order) => {
                    reports.extend(self.follow(order.clone(), server));
                    true
                }
                Due::Progress(terms) => {
                    match self.progress(now, terms, server, is_news) {
                        Ok(report) => reports.extend(report),
                        // A migration that is not known has no end.
                        Err(MigrateError::Refused(_)) => {}
                        // The shard had no time, so the next look is as early.
                        Err(_) => has_heard = false,
                    }
                    false
                }
                Due::Settled(terms) => {
                    let settled = self.settled(terms, server);
                    let is_settled = settled.is_some();
                    reports.extend(settled);
                    is_settled
                }
                Due::Claims { home, round } => match claims(*home, *round, server) {
                    Ok(report) => {
                        reports.push(report);
                        true
                    }
                    Err(_) => false,
                },
            };
            if !done {
                self.dues.push(due);
            }
        }
        if has_heard {
            self.over = over;
        }
        reports
    }

    /// How far a taker is, if that is news and not reported too often. `may_be_over`: a migration has come to its end.
    fn progress(
        &mut self,
        now: Instant,
        terms: &Terms,
        server: &Server,
        may_be_over: bool,
    ) -> Result<Option<Report>, MigrateError> {
        let last = self.reported.get(&terms.migration);
        let is_early =
            last.is_some_and(|(at, _)| now.saturating_duration_since(*at) < PROGRESS_INTERVAL);
        if is_early && !may_be_over {
            return Ok(None);
        }
        let report = MigrationOrder::Report(terms.migration);
        let state = server.migrate(shard_of(&terms.pages, server), report, PATIENCE)?;
        let MigrationState { progress, rows, .. } = state;
        let migration = terms.migration;
        let report = if progress.is_full {
            Report::Refused { migration, order: OrderKind::Take, why: Refusal::NoRoom }
        } else {
            Report::Progress {
                migration,
                kept: served(rows),
                on_the_way_count: progress.on_their_way.into(),
                in_doubt_count: progress.in_doubt.into(),
                free_count: progress.free.into(),
                is_done: progress.here + progress.free == progress.all,
            }
        };
        if last.is_some_and(|(_, before)| *before == report) {
            return Ok(None);
        }
        self.reported.insert(terms.migration, (now, report.clone()));
        Ok(Some(report))
    }

    fn settled(&self, terms: &Terms, server: &Server) -> Option<Report> {
        let report = MigrationOrder::Report(terms.migration);
        let state = server.migrate(shard_of(&terms.pages, server), report, PATIENCE).ok()?;
        let MigrationState { progress, rows, .. } = state;
        let is_over = progress.here + progress.free + progress.stay == progress.all;
        is_over.then(|| Report::Settled { migration: terms.migration, kept: served(rows) })
    }
}

/// What the server has of a home's contents, in all shards.
fn claims(home: Contents, round: u64, server: &Server) -> Result<Report, MigrateError> {
    let (mut rows, mut given) = (Vec::new(), Vec::new());
    for shard in 0..server.shard_count() {
        let Contents { node, generation } = home;
        let state = server.migrate(shard, MigrationOrder::Claim { node, generation }, PATIENCE)?;
        rows.extend(state.rows);
        given.extend(state.given);
    }
    rows.sort_by_key(|row| row.pages.start);
    given.sort_by_key(|of| of.first_page);
    let pages = |of: Adopted| of.first_page..of.first_page + of.page_count;
    let given = given.into_iter().map(pages).collect();
    Ok(Report::Claims { home, round, served: served(rows), given, lost: Vec::new() })
}

/// Forgets free lines of contents that a home has lost.
fn discard(home: Contents, rows: &[Range<u64>], server: &Server) -> Result<(), MigrateError> {
    let Contents { node, generation } = home;
    for pages in rows {
        let lines = FreeLines { home: node, generation, pages: pages.clone() };
        server.migrate(shard_of(pages, server), MigrationOrder::Discard(lines), PATIENCE)?;
    }
    Ok(())
}

/// Answers for a node that is gone: each shard for the shards of the node that clients lead to it.
fn deputize(of: &Deputyship, server: &Server) -> Result<(), Hindered> {
    for shard in 0..server.shard_count() {
        let is_of = |row: &&EarlierRow| shard_of(&row.pages, server) == shard;
        let rows = |generation| {
            let its = of.rows.iter().filter(|row| row.generation == generation).filter(is_of);
            its.map(|row| (row.pages.clone(), row.at)).collect()
        };
        let order = deputies::Deputyship {
            home: of.home,
            incarnation: of.incarnation,
            space: of.space,
            range_epoch: of.range_epoch,
            last_generation: of.last_generation,
            idle: of.idle,
            places: of.contents.iter().map(|first| (*first, rows(*first))).collect(),
        };
        match server.migrate(shard, MigrationOrder::Deputize(Box::new(order)), PATIENCE) {
            Ok(_) => {}
            // It is the deputy of too many others for now, or the order is late.
            Err(MigrateError::Refused(MigrationError::NotDeputy)) => return Err(Hindered::Later),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Follows an order in all shards.
fn in_all(server: &Server, order: &MigrationOrder) -> Result<(), MigrateError> {
    let mut shards = 0..server.shard_count();
    shards.try_for_each(|shard| server.migrate(shard, order.clone(), PATIENCE).map(drop))
}

/// Follows an order about a migration that one shard knows, or none.
fn in_one(server: &Server, order: &MigrationOrder) -> Result<(), MigrateError> {
    for shard in 0..server.shard_count() {
        match server.migrate(shard, order.clone(), PATIENCE) {
            Err(MigrateError::Refused(
                MigrationError::Unknown | MigrationError::Allow(AllowError::Unknown),
            )) => {}
            result => return result.map(|_| ()),
        }
    }
    Ok(())
}

/// The shard of this server that serves the pages of a home's shard.
fn shard_of(pages: &Range<u64>, server: &Server) -> u16 {
    migration::shard_of(pages, server.shard_count())
}

fn taken(terms: &Terms) -> taker::Order {
    let shard = u8::try_from(terms.pages.start / SHARD_PAGES).unwrap_or(u8::MAX);
    let giver = requester::Server { node: terms.giver.node, shard };
    taker::Order {
        migration: requester::Migration {
            id: terms.migration,
            range_epoch: terms.range_epoch,
            giver,
        },
        space: terms.space,
        home: terms.home.node,
        generation: terms.home.generation,
        pages: terms.pages.clone(),
        incarnation: terms.taker_incarnation,
    }
}

fn allowed(terms: &Terms) -> migration::Terms {
    migration::Terms {
        migration: terms.migration,
        range_epoch: terms.range_epoch,
        space: terms.space,
        home: terms.home.node,
        generation: terms.home.generation,
        pages: terms.pages.clone(),
        taker: terms.taker.node,
        taker_incarnation: terms.taker_incarnation,
    }
}

fn served(rows: Vec<Row>) -> Vec<ServedRow> {
    let row = |Row { pages, generations: (first, last) }| ServedRow {
        pages,
        generations: Generations { first, last },
    };
    rows.into_iter().map(row).collect()
}

/// The migration that an order is about, and the kind of the order, if it can be refused.
fn subject(order: &Order) -> (u64, Option<OrderKind>) {
    match order {
        Order::Take { terms, .. } => (terms.migration, Some(OrderKind::Take)),
        Order::Allow(terms) => (terms.migration, Some(OrderKind::Allow)),
        Order::Reserve(terms) => (terms.migration, Some(OrderKind::Reserve)),
        Order::Settle(terms) => (terms.migration, Some(OrderKind::Settle)),
        Order::Forget(id) => (*id, Some(OrderKind::Forget)),
        Order::Release(id) => (*id, Some(OrderKind::Release)),
        Order::Withdraw(id) => (*id, Some(OrderKind::Withdraw)),
        Order::Deputize(_)
        | Order::Discard { .. }
        | Order::Dismiss { .. }
        | Order::Learn(_)
        | Order::Lose { .. }
        | Order::Report { .. }
        | Order::Seal(_) => (0, None),
    }
}

#[cfg(test)]
mod tests {
    use bluebridge_transport::memory::Hub;
    use bluebridge_wire::{
        Space, UDP_PORT,
        address::{Fields, NODE_PREFIX_LEN},
    };
    use ipnet::Ipv6Net;

    use super::*;
    use crate::{ServerConfig, run};

    const SPACE: Space = Space(7);

    fn server(hub: &Hub, node: NodeId) -> Server {
        let first = Fields { space: SPACE, node, command: 0, tag: 0, location: 0 };
        let prefix = Ipv6Net::new(first.to_ipv6(), NODE_PREFIX_LEN).expect("a prefix");
        let carrier = hub.attach(UDP_PORT, &[prefix]).expect("it is free");
        let config = ServerConfig::new(SPACE, node, 1, 1 << 20, node.0.into());
        run(&config, vec![carrier]).expect("it starts")
    }

    /// A giver, a taker, and the terms of a migration from one to the other.
    fn both(hub: &Hub) -> ([Server; 2], Terms) {
        let contents = [1, 2].map(|node| Contents { node: NodeId(node), ..Contents::default() });
        let terms = Terms {
            migration: 1,
            range_epoch: 1,
            home: contents[0],
            space: SPACE,
            pages: 0..64,
            giver: contents[0],
            taker: contents[1],
            taker_incarnation: 1,
        };
        (contents.map(|of| server(hub, of.node)), terms)
    }

    /// The report about an order that is followed on a machine where a shard may have no time for a second.
    fn followed(transfers: &mut Transfers, order: &Order, server: &Server) -> Report {
        let mut report = transfers.follow(order.clone(), server);
        bluebridge_testkit::until("the order is followed", || {
            report = report.take().or_else(|| transfers.poll(Instant::now(), server).pop());
            report.is_some()
        });
        report.expect("it was waited for")
    }

    #[test]
    fn what_was_reserved_is_released_although_nothing_was_ever_taken() {
        let hub = Hub::new(256);
        let ([_giver, taker], terms) = both(&hub);
        let mut transfers = Transfers::new(terms.taker);
        let reserve = Order::Reserve(terms.clone());
        assert_eq!(followed(&mut transfers, &reserve, &taker), Report::Reserved(1));
        assert_eq!(followed(&mut transfers, &Order::Release(1), &taker), Report::Released(1));
        assert!(transfers.dues.is_empty());
        bluebridge_testkit::until("the shard says that it does not know it", || {
            let of = taker.migrate(0, MigrationOrder::Report(1), PATIENCE);
            matches!(of, Err(MigrateError::Refused(MigrationError::Unknown)))
        });
    }

    /// A giver must not allow what was withdrawn, and a taker must not reserve what was released.
    #[test]
    fn an_order_that_is_to_be_repeated_is_forgotten_when_a_later_one_arrives() {
        let hub = Hub::new(256);
        let ([giver, taker], terms) = both(&hub);
        let others = Terms { migration: 2, ..terms.clone() };
        for (server, earlier, later) in [
            (&taker, Order::Reserve(terms.clone()), Order::Release(1)),
            (&giver, Order::Allow(terms.clone()), Order::Withdraw(1)),
        ] {
            let mut transfers = Transfers::new(terms.taker);
            // As if the shard had had no time for it.
            transfers.expect(Due::Again(earlier));
            transfers.expect(Due::Again(Order::Reserve(others.clone())));
            let _report = transfers.follow(later, server);
            let is_of = |due: &&Due| matches!(due, Due::Again(Order::Reserve(_) | Order::Allow(_)));
            let left: Vec<_> = transfers.dues.iter().filter(is_of).collect();
            let [Due::Again(Order::Reserve(left))] = left[..] else { panic!("{}", left.len()) };
            assert_eq!(left.migration, 2, "that of another migration stays");
        }
    }

    #[test]
    fn the_end_of_a_migration_is_reported_at_once() {
        let hub = Hub::new(256);
        let ([giver, taker], terms) = both(&hub);
        let allow = MigrationOrder::Allow(allowed(&terms));
        let mut transfers = Transfers::new(terms.taker);
        // A shard on a busy machine may have no time for a second.
        let deadline = Instant::now() + Duration::from_secs(30);
        let is_late = || Instant::now() > deadline;
        while transfers.follow(Order::Reserve(terms.clone()), &taker).is_none() {
            assert!(!is_late(), "nothing is reserved");
        }
        while giver.migrate(0, allow.clone(), PATIENCE).is_err() {
            assert!(!is_late(), "nothing is allowed");
        }
        transfers.expect(Due::Progress(terms.clone()));
        // Whatever was reported a moment ago.
        let now = Instant::now();
        transfers.reported.insert(1, (now, Report::Reserved(1)));
        while taker.migrate(0, MigrationOrder::Begin(taken(&terms)), PATIENCE).is_err() {
            assert!(!is_late(), "nothing is begun");
        }
        while taker.takings_over() == 0 {
            assert!(!is_late(), "8 free lines are not over");
            std::thread::sleep(Duration::from_millis(1));
        }
        let is_end = |report: &Report| matches!(report, Report::Progress { is_done: true, .. });
        while !transfers.poll(now, &taker).iter().any(is_end) {
            assert!(!is_late(), "the end is not reported");
        }
        assert_eq!(transfers.over, 1, "it is no news any more");
        assert_eq!(transfers.poll(now, &taker), []);
    }
}
