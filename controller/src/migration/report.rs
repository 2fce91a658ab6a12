//! What servers report.

use std::ops::Range;
use std::time::Instant;

use bluebridge_northbound::migration::{Contents, OrderKind, Refusal, Report, ServedRow};
use bluebridge_wire::NodeId;
use bluebridge_wire::address::{LINE_PAGES, OFFSET_BITS, PAGE_SHIFT};

use super::loss::Claims;
use super::{ContentsRecord, End, MigrationRecord, Migrations, Progress, Stage, record};

/// The most rows that a taker reports of a migration. [`MIGRATION_PAGES_MAX`] sees to it that there are no more.
const ROWS_MAX: usize = 1 << 16;

/// The most pages of a migration: of every second line, each would be a row.
pub(super) const MIGRATION_PAGES_MAX: u64 = 2 * ROWS_MAX as u64 * LINE_PAGES as u64;

/// The most rows in what a server reports of a home, and of the pages of a home that are elsewhere.
pub(super) const HOME_ROWS_MAX: usize = 1 << 18;
const _: () = assert!(HOME_ROWS_MAX <= bluebridge_northbound::ATTEND_ROWS_MAX);

/// The most rows of free lines in a report.
const FREE_ROWS_MAX: usize = 1 << 12;

/// Pages of all shards of a node.
const PAGES_END: u64 = 1 << (OFFSET_BITS - PAGE_SHIFT);

/// The share of the last report in a rate.
const RATE_SHARE: f64 = 0.3;

/// Why a report is ignored: the server is at fault.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ReportError {
    /// Rows are empty, not whole lines, out of order, outside of the migration's range, or of impossible generations.
    #[error("its rows are not in order, whole lines or part of the range")]
    BadRows,
    /// The server has another role in this migration.
    #[error("it has another role in this migration")]
    OtherRole,
    /// There are more rows than can be handled.
    #[error("it has {count} rows of pages, and at most {most} are possible")]
    TooManyRows {
        /// Its rows.
        count: usize,
        /// The most.
        most: usize,
    },
}

/// Checks the number of rows.
const fn check_count(count: usize, most: usize) -> Result<(), ReportError> {
    if count > most { Err(ReportError::TooManyRows { count, most }) } else { Ok(()) }
}

/// Checks rows of whole lines in ascending order within a range.
fn check_rows<'a>(
    rows: impl Iterator<Item = &'a Range<u64>>,
    within: &Range<u64>,
) -> Result<(), ReportError> {
    const LINE: u64 = LINE_PAGES as u64;
    let mut next = within.start;
    for row in rows {
        let is_whole = row.start.is_multiple_of(LINE) && row.end.is_multiple_of(LINE);
        if row.start < next || row.start >= row.end || row.end > within.end || !is_whole {
            return Err(ReportError::BadRows);
        }
        next = row.end;
    }
    Ok(())
}

fn check_served(
    rows: &[ServedRow],
    within: &Range<u64>,
    home: ContentsRecord,
) -> Result<(), ReportError> {
    check_rows(rows.iter().map(|row| &row.pages), within)?;
    let is_right = |row: &ServedRow| {
        let (first, last) = (row.generations.first.number(), row.generations.last.number());
        home.generation <= first && first <= last
    };
    if rows.iter().all(is_right) { Ok(()) } else { Err(ReportError::BadRows) }
}

/// Checks free lines.
pub(super) fn check_free_rows(rows: &[Range<u64>]) -> Result<(), ReportError> {
    check_count(rows.len(), FREE_ROWS_MAX)?;
    check_rows(rows.iter(), &(0..PAGES_END))
}

/// Checks what a server has of a home.
fn check_claims(
    home: ContentsRecord,
    served: &[ServedRow],
    given: &[Range<u64>],
    lost: &[Range<u64>],
) -> Result<(), ReportError> {
    check_count(served.len() + given.len() + lost.len(), HOME_ROWS_MAX)?;
    check_served(served, &(0..PAGES_END), home)?;
    check_rows(given.iter(), &(0..PAGES_END))?;
    check_rows(lost.iter(), &(0..PAGES_END))
}

impl Migrations {
    /// Handles a report that came through a connection. Late ones are ignored.
    ///
    /// # Errors
    /// [`ReportError`]; nothing changed.
    pub fn handle(
        &mut self,
        now: Instant,
        from: NodeId,
        link: u64,
        report: Report,
    ) -> Result<(), ReportError> {
        let server = self.servers.get(&from);
        if server.and_then(|server| server.link.as_ref()).is_none_or(|it| it.number != link) {
            return Ok(());
        }
        self.version += 1;
        self.note_heard(from);
        if let Report::Lost { node, began } = report {
            self.note_aware(from, node, began.number());
            self.advance();
            return Ok(());
        }
        let is_unaware = self.losses.values().any(|loss| loss.unaware.contains(&from.0));
        // It reports again when it gets its orders.
        if is_unaware || !self.is_known(from) {
            return Ok(());
        }
        match report {
            Report::Lost { .. } => {}
            Report::Sealed(is_sealed) => self.note_sealed(from, is_sealed),
            Report::Deputized { home, incarnation, version } => {
                self.note_deputized(from, home, (incarnation, version));
            }
            Report::Dismissed { home, incarnation } => {
                self.note_dismissed(from, home, incarnation);
            }
            Report::Free { home, pages } => self.note_free(from, home.into(), &pages)?,
            Report::Learned { home, version } => self.note_learned(from, home, version),
            Report::Claims { home, round, served, given, lost } => {
                let checked = check_claims(home.into(), &served, &given, &lost);
                let rows = |rows: Vec<Range<u64>>| rows.into_iter().map(|row| (row, ())).collect();
                let claims = checked.map(|()| {
                    let served = record::kept_pages(&served);
                    Claims { served, given: rows(given), lost: rows(lost) }
                });
                self.note_claims(from, home.into(), round, claims)?;
            }
            Report::Reserved(id) => self.follow(id, Stage::Recorded, Stage::Reserved, from)?,
            Report::Allowed { migration, fences } => {
                self.follow(migration, Stage::Reserved, Stage::Allowed, from)?;
                let of = self.all.get_mut(&migration);
                if let Some(of) = of.filter(|of| of.record.stage == Stage::Allowed) {
                    of.fences = Some(fences);
                }
            }
            Report::Progress {
                migration,
                kept,
                on_the_way_count,
                in_doubt_count,
                free_count,
                is_done,
            } => {
                self.note_kept(now, migration, from, &kept)?;
                if let Some(of) = self.all.get_mut(&migration) {
                    of.progress.on_the_way_count = on_the_way_count;
                    of.progress.in_doubt_count = in_doubt_count;
                    of.progress.free_count = free_count;
                }
                if is_done {
                    self.follow(migration, Stage::Allowed, Stage::Ending, from)?;
                }
            }
            Report::Withdrawn(id) => self.follow(id, Stage::Ending, Stage::Withdrawn, from)?,
            Report::Settled { migration, kept } => {
                self.note_kept(now, migration, from, &kept)?;
                let is_due = |it: &MigrationRecord| it.stage == Stage::Withdrawn;
                if self.all.get(&migration).is_some_and(|of| is_due(&of.record)) {
                    self.settle(migration, &kept);
                }
            }
            Report::Forgotten(id) => self.follow(id, Stage::Learned, Stage::Forgotten, from)?,
            Report::Released(id) => self.follow(id, Stage::Forgotten, Stage::Closed, from)?,
            Report::Refused { migration, order, why } => {
                self.note_refusal(migration, from, order, why)?;
            }
        }
        self.advance();
        Ok(())
    }

    /// Enters the next stage, if the report is about the present one and comes from who is to execute its order.
    fn follow(
        &mut self,
        id: u64,
        from: Stage,
        to: Stage,
        server: NodeId,
    ) -> Result<(), ReportError> {
        let Some(of) = self.all.get(&id) else { return Ok(()) };
        let record = &of.record;
        let party = match from {
            Stage::Reserved | Stage::Ending | Stage::Learned => record.giver,
            _ => record.taker,
        };
        if party.id() != server {
            return Err(ReportError::OtherRole);
        }
        if record.stage == from && self.is_present(party) {
            self.enter(id, to);
        }
        Ok(())
    }

    /// Notes what a taker has of the range.
    fn note_kept(
        &mut self,
        now: Instant,
        id: u64,
        taker: NodeId,
        kept: &[ServedRow],
    ) -> Result<(), ReportError> {
        let Some(of) = self.all.get(&id) else { return Ok(()) };
        let MigrationRecord { pages, home, taker: at, .. } = &of.record;
        if at.id() != taker {
            return Err(ReportError::OtherRole);
        }
        let checked =
            check_count(kept.len(), ROWS_MAX).and_then(|()| check_served(kept, pages, *home));
        let complaint = checked.err().map(|error| self.complaint(taker, error));
        if let Some(of) = self.all.get_mut(&id) {
            of.complaint = complaint;
        }
        checked?;
        let Some(of) = self.all.get(&id) else { return Ok(()) };
        let MigrationRecord { stage, taker: at, .. } = &of.record;
        if !(Stage::Allowed..=Stage::Withdrawn).contains(stage) || !self.is_present(*at) {
            return Ok(());
        }
        let kept = record::kept_pages(kept);
        let page_count = kept.page_count();
        self.edit(id, |record| record.kept = kept);
        if let Some(of) = self.all.get_mut(&id) {
            of.progress.note(now, page_count);
        }
        Ok(())
    }

    fn note_learned(&mut self, server: NodeId, home: Contents, version: u64) {
        let link = self.servers.get_mut(&server).and_then(|server| server.link.as_mut());
        if let Some(link) = link.filter(|_| home.node == server) {
            link.learned.insert(home.into(), version);
        }
    }

    /// Notes what a server has of a home, if it was asked for it.
    fn note_claims(
        &mut self,
        server: NodeId,
        home: ContentsRecord,
        round: u64,
        claims: Result<Claims, ReportError>,
    ) -> Result<(), ReportError> {
        let is_asked = self.participants(home).contains(&server);
        let complaint = claims.as_ref().err().map(|error| self.complaint(server, *error));
        let of = self
            .elsewhere
            .get_mut(&home)
            .filter(|of| is_asked && of.record.is_pending && of.record.version == round);
        if let Some(of) = of {
            of.complaint = complaint;
            of.claims.insert(server, claims?);
        }
        Ok(())
    }

    /// That a report is ignored, for people.
    fn complaint(&self, server: NodeId, error: ReportError) -> String {
        format!("a report of {} is ignored: {error}", self.name(server))
    }

    /// A server refused the order that is due: the migration ends, or what ends it is put off.
    fn note_refusal(
        &mut self,
        id: u64,
        server: NodeId,
        order: OrderKind,
        why: Refusal,
    ) -> Result<(), ReportError> {
        let Some(of) = self.all.get_mut(&id) else { return Ok(()) };
        let (party, is_due) = match (order, of.record.stage) {
            (OrderKind::Reserve, stage) => (of.record.taker, stage == Stage::Recorded),
            (OrderKind::Allow, stage) => {
                (of.record.giver, matches!(stage, Stage::Reserved | Stage::Allowed))
            }
            (OrderKind::Take, stage) => (of.record.taker, stage == Stage::Allowed),
            (OrderKind::Withdraw, stage) => (of.record.giver, stage == Stage::Ending),
            (OrderKind::Settle, stage) => (of.record.taker, stage == Stage::Withdrawn),
            (OrderKind::Forget, stage) => (of.record.giver, stage == Stage::Learned),
            (OrderKind::Release, stage) => (of.record.taker, stage == Stage::Forgotten),
        };
        if party.id() != server {
            return Err(ReportError::OtherRole);
        }
        if !is_due {
            return Ok(());
        }
        let is_unknown = why == Refusal::Unknown;
        let end = End::Refused { node: server.0, why: why.clone().into() };
        match order {
            // The giver does not know it yet.
            OrderKind::Reserve => self.end(id, Stage::Forgotten, end),
            // An order that was repeated may have been obeyed before.
            OrderKind::Allow | OrderKind::Take => self.end(id, Stage::Ending, end),
            OrderKind::Withdraw if is_unknown => self.enter(id, Stage::Withdrawn),
            OrderKind::Forget if is_unknown => self.enter(id, Stage::Forgotten),
            OrderKind::Release if is_unknown => self.enter(id, Stage::Closed),
            // It has no line on its way, and may have none at all.
            OrderKind::Settle | OrderKind::Withdraw | OrderKind::Forget | OrderKind::Release => {
                let words = format!("{} refused the last order: {why}", self.name(server));
                if let Some(of) = self.all.get_mut(&id) {
                    of.put_off = Some(words);
                }
            }
        }
        Ok(())
    }
}

impl Progress {
    #[expect(clippy::cast_precision_loss, reason = "a rate of pages has far fewer than 52 bits")]
    fn note(&mut self, now: Instant, pages: u64) {
        if let Some((before, count)) = self.last {
            let seconds = now.saturating_duration_since(before).as_secs_f64();
            if seconds <= 0.0 {
                return;
            }
            let rate = pages.saturating_sub(count) as f64 / seconds;
            let smooth = |old: f64| old + RATE_SHARE * (rate - old);
            self.pages_per_second = Some(self.pages_per_second.map_or(rate, smooth));
        }
        self.last = Some((now, pages));
    }
}
