//! What an operator may ask for, and cancel.

use std::ops::Range;

use bluebridge_wire::address::{LINE_PAGES, PAGE_SHIFT, SHARD_SHIFT};
use bluebridge_wire::{ArenaGeneration, NodeId, Space};

use super::report::{HOME_ROWS_MAX, MIGRATION_PAGES_MAX};
use super::{
    Change, ContentsRecord, End, MIGRATIONS_MAX, Migration, MigrationRecord, Migrations, PageMap,
    Server, Stage,
};

/// Pages of a line, and places for pages in a shard.
const LINE: u64 = LINE_PAGES as u64;
const SHARD: u64 = 1 << (SHARD_SHIFT - PAGE_SHIFT);

/// The most migrations into which a request is split.
const PARTS_MAX: usize = 256;

/// What an operator wants to move.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Wanted {
    /// The node in the pointers.
    pub home: NodeId,
    /// The tenant.
    pub space: Space,
    /// The generation in the pointers; the home's present contents without one.
    pub generation: Option<ArenaGeneration>,
    /// The pages, as the home numbers them; all without any. They are extended to whole lines.
    pub pages: Option<Range<u64>>,
    /// The server that is to serve them.
    pub taker: NodeId,
}

/// A range in parts that are small enough for a migration.
fn divided(pages: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let Range { start, end } = pages;
    let count = (end.saturating_sub(start)).div_ceil(MIGRATION_PAGES_MAX);
    (0..count).map(move |number| {
        let first = start + number * MIGRATION_PAGES_MAX;
        first..end.min(first + MIGRATION_PAGES_MAX)
    })
}

/// Why nothing moves. A request is granted as a whole or refused as a whole.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MigrateError {
    /// The node is none.
    #[error("node {0} is not a memory server of this rack")]
    NoServer(u16),
    /// A server that has to take part belongs to another space.
    #[error("{server} serves space {theirs}, not space {requested}")]
    OtherSpace {
        /// The server's name.
        server: String,
        /// Its space.
        theirs: u16,
        /// The requested space.
        requested: u16,
    },
    /// The home never had such contents, or nothing of them is left.
    #[error(
        "{server} has no pages of generation {generation} any more, and no other server has any"
    )]
    NoContents {
        /// The home's name.
        server: String,
        /// The generation.
        generation: u16,
    },
    /// The range is empty or not of this arena.
    #[error("the pages {first} to {last} are not in the arena of {server}")]
    OutOfRange {
        /// The home's name.
        server: String,
        /// The first page.
        first: u64,
        /// The last page.
        last: u64,
    },
    /// The pages were lost with the memory of a server.
    #[error("all of these pages of {server} are lost")]
    Lost {
        /// The home's name.
        server: String,
    },
    /// The home is drained and gone, and no other server has any of the pages.
    #[error("{server} is drained and gone, and no server has any of these pages")]
    NothingElsewhere {
        /// The home's name.
        server: String,
    },
    /// The pages are there already.
    #[error("{server} serves these pages already")]
    Already {
        /// The taker's name.
        server: String,
    },
    /// The taker is drained: what it took would have to move away again.
    #[error(
        "an operator drains {server}; choose another server, or let it serve again with `bluebridge undrain {server}` while it runs"
    )]
    Drained {
        /// The taker's name.
        server: String,
    },
    /// Pages of the range are in an open migration.
    #[error(
        "pages {first} to {last} are in migration {migration}, which is not closed; wait for it or cancel it with \
         `bluebridge migrations cancel {migration}`"
    )]
    Overlap {
        /// The other migration.
        migration: u64,
        /// The first page that both have.
        first: u64,
        /// The last one.
        last: u64,
    },
    /// A server that has to take part does not know the orders.
    #[error("memory server {0} does not support migration")]
    Unsupported(String),
    /// A server that has to take part cannot be reached now.
    #[error("memory server {0} has no connection to the controller now")]
    NotConnected(String),
    /// Servers have to report first.
    #[error(
        "a memory server lost its memory, and servers must report what they have of {server} first; try again"
    )]
    Unsettled {
        /// The home's name.
        server: String,
    },
    /// A server reported what cannot be right, or more than can be handled.
    #[error(
        "where pages of {server} are is not known: {complaint}; restart that server without its memory to give them up"
    )]
    BadReport {
        /// The home's name.
        server: String,
        /// Which server, and why its report is ignored.
        complaint: String,
    },
    /// A server with new contents does not take pages of its lost ones back.
    #[error("{server} lost the memory that these pages are part of, so it cannot take them back")]
    LostHome {
        /// The server's name.
        server: String,
    },
    /// Too many servers or shards have a part of the range.
    #[error(
        "the range has more than {PARTS_MAX} parts at several servers and shards, or of 4 GiB; move less at once"
    )]
    Scattered,
    /// The pages of a home are in too many rows.
    #[error(
        "the pages of {server} that are elsewhere are in {rows} rows, and at most {HOME_ROWS_MAX} are possible; move \
         neighbouring pages to the same server, or back"
    )]
    Fragmented {
        /// The home's name.
        server: String,
        /// The rows.
        rows: usize,
    },
    /// There are too many open migrations.
    #[error(
        "{MIGRATIONS_MAX} migrations are open, which is the maximum; wait until some are closed"
    )]
    TooMany,
    /// A switch could not have an entry for everything that moved.
    #[error(
        "switch {switch} would need {needed} directory entries for pages that moved, and has room for {budget}; \
         move larger aligned ranges"
    )]
    TableFull {
        /// The switch.
        switch: String,
        /// The entries that it would need.
        needed: usize,
        /// The entries that it may have.
        budget: usize,
    },
    /// Range epochs or ids are used up.
    #[error("the rack has no range epochs left")]
    Exhausted,
}

/// Why a migration is not cancelled.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CancelError {
    /// There is none with this id.
    #[error("there is no migration {0}; `bluebridge migrations` lists them")]
    Unknown(u64),
    /// All its lines have moved, or it was cancelled before.
    #[error("migration {0} is closed already")]
    Closed(u64),
}

impl Migrations {
    /// The migrations that a request needs, one for each giver and shard; nothing is recorded.
    ///
    /// # Errors
    /// [`MigrateError`].
    pub fn plan(&self, wanted: &Wanted) -> Result<Vec<MigrationRecord>, MigrateError> {
        let home_server = self.member(wanted.home, wanted.space)?;
        let taker_server = self.member(wanted.taker, wanted.space)?;
        if self.is_draining(wanted.taker) {
            return Err(MigrateError::Drained { server: taker_server.name.clone() });
        }
        let home = self.contents_of(home_server, wanted)?;
        let server = || home_server.name.clone();
        if let Some(of) = self.elsewhere.get(&home).filter(|of| of.record.is_pending) {
            let unsettled = MigrateError::Unsettled { server: server() };
            let bad = |complaint| MigrateError::BadReport { server: server(), complaint };
            return Err(of.complaint.clone().map_or(unsettled, bad));
        }
        let is_here = self.is_present(home);
        // A home that has a deputy is gone and has no page: what is not elsewhere is nowhere. All of its addresses are looked
        // at, because what others have may be at any of them.
        let is_gone = self.deputy_of(wanted.home).is_some();
        if wanted.taker == wanted.home && !is_here {
            return Err(MigrateError::LostHome { server: server() });
        }
        let taker = taker_server.contents.ok_or(MigrateError::NoServer(wanted.taker.0))?;
        let mut parts = Vec::new();
        let (mut is_lost, mut there) = (false, Vec::new());
        for pages in self.rows_of(home_server, wanted, is_here && !is_gone)? {
            for (part, giver) in self.givers(home, &pages) {
                match giver {
                    Some(giver) if giver == home && is_gone => {}
                    None => is_lost = true,
                    Some(giver) if giver == taker => there.push((part, giver)),
                    Some(giver) => parts.extend(divided(part).map(|part| (part, giver))),
                }
            }
        }
        // What is there may be about to leave.
        self.check_free(home, &there)?;
        match (parts.len(), !there.is_empty(), is_lost) {
            (1..=PARTS_MAX, ..) => {}
            (0, true, _) => {
                return Err(MigrateError::Already { server: taker_server.name.clone() });
            }
            (0, false, true) => return Err(MigrateError::Lost { server: server() }),
            (0, false, false) if is_gone => {
                return Err(MigrateError::NothingElsewhere { server: server() });
            }
            (0, ..) => {
                let (first, last) = (0, 0);
                return Err(MigrateError::OutOfRange { server: server(), first, last });
            }
            _ => return Err(MigrateError::Scattered),
        }
        self.check_free(home, &parts)?;
        self.check_rows_of(home, home_server, parts.len())?;
        let givers = parts.iter().map(|(_, giver)| giver.id());
        // In place of a home that is gone its deputy learns where the pages are.
        let learns = Some(wanted.home).filter(|home| self.deputy_of(*home).is_none());
        for id in givers.chain([wanted.taker]).chain(learns) {
            self.check_reachable(id)?;
        }
        if self.open().count() + parts.len() > MIGRATIONS_MAX {
            return Err(MigrateError::TooMany);
        }
        let last_id = self.all.last_key_value().map_or(0, |(id, _)| *id);
        let records = parts.into_iter().zip(last_id + 1..).map(|((pages, giver), id)| {
            Ok(MigrationRecord {
                id,
                home,
                space: wanted.space.0,
                pages,
                giver,
                taker,
                taker_incarnation: taker_server.incarnation,
                range_epoch: self.epoch_above(id - last_id, [home, giver, taker])?,
                stage: Stage::Recorded,
                kept: PageMap::default(),
                end: None,
                reason: String::new(),
            })
        });
        records.collect()
    }

    /// Records planned migrations, in one change.
    pub fn record(&mut self, planned: Vec<MigrationRecord>) -> Vec<u64> {
        self.version += 1;
        let mut ids = Vec::new();
        for record in planned {
            ids.push(record.id);
            // It will serve something again.
            self.note_drained(record.taker.id(), false);
            self.changes.push(Change::Migration(record.clone()));
            self.all.insert(record.id, Migration::new(record));
        }
        ids
    }

    /// Ends a migration as soon as possible. The giver stops first, if it may have allowed it; what it has marked stays the
    /// taker's.
    ///
    /// # Errors
    /// [`CancelError`].
    pub fn cancel(&mut self, id: u64) -> Result<(), CancelError> {
        self.version += 1;
        let of = self.all.get(&id).ok_or(CancelError::Unknown(id))?;
        match of.record.stage {
            // The giver was not told of it.
            Stage::Recorded => self.end(id, Stage::Forgotten, End::Cancelled),
            Stage::Reserved | Stage::Allowed => self.end(id, Stage::Ending, End::Cancelled),
            // It is ending.
            Stage::Ending
            | Stage::Withdrawn
            | Stage::Settled
            | Stage::Learned
            | Stage::Forgotten => {}
            Stage::Closed => return Err(CancelError::Closed(id)),
        }
        self.advance();
        Ok(())
    }

    /// As [`Self::cancel`], by the controller; why is added to the reason of the migration, for people.
    pub(crate) fn cancel_because(&mut self, id: u64, why: &str) {
        if self.cancel(id).is_ok() {
            self.edit(id, |record| {
                record.reason = format!("{}; cancelled, because {why}", record.reason);
            });
        }
    }

    /// A memory server of a space.
    fn member(&self, id: NodeId, space: Space) -> Result<&Server, MigrateError> {
        let server = self.servers.get(&id).ok_or(MigrateError::NoServer(id.0))?;
        if server.space != space.0 {
            return Err(MigrateError::OtherSpace {
                server: server.name.clone(),
                theirs: server.space,
                requested: space.0,
            });
        }
        Ok(server)
    }

    /// Whether a home, or its deputy, can learn now where its pages are.
    pub(super) fn can_learn(&self, home: NodeId) -> bool {
        self.deputy_of(home).is_some() || self.check_reachable(home).is_ok()
    }

    fn check_reachable(&self, id: NodeId) -> Result<(), MigrateError> {
        let server = self.servers.get(&id).ok_or(MigrateError::NoServer(id.0))?;
        match &server.link {
            // The home that lost its memory has to learn where its pages are, but it may be gone for ever.
            None if server.contents.is_none() => Ok(()),
            Some(link) if link.migrates => Ok(()),
            Some(_) => Err(MigrateError::Unsupported(server.name.clone())),
            None => Err(MigrateError::NotConnected(server.name.clone())),
        }
    }

    /// The contents of the home that pointers with a generation lead to.
    fn contents_of(
        &self,
        server: &Server,
        wanted: &Wanted,
    ) -> Result<ContentsRecord, MigrateError> {
        let number = wanted.generation.map(ArenaGeneration::number);
        let present =
            server.contents.filter(|it| number.is_none_or(|it_is| it_is >= it.generation));
        let node = wanted.home.0;
        let up_to = ContentsRecord { node, generation: number.unwrap_or(u16::MAX) };
        let earliest = ContentsRecord { node, generation: 0 };
        let earlier =
            || self.elsewhere.range(earliest..=up_to).next_back().map(|(contents, _)| *contents);
        present.or_else(earlier).ok_or_else(|| MigrateError::NoContents {
            server: server.name.clone(),
            generation: number.unwrap_or_default(),
        })
    }

    /// The wanted rows: whole lines, each in one shard.
    fn rows_of(
        &self,
        server: &Server,
        wanted: &Wanted,
        is_here: bool,
    ) -> Result<Vec<Range<u64>>, MigrateError> {
        let shards = if is_here { u64::from(server.shard_count) } else { u64::from(u8::MAX) + 1 };
        // A shard has addresses for twice its memory: what is allocated after other lines moved away may be there. The arena
        // that lost its contents may have been larger.
        let of_memory = server.capacity_pages / u64::from(server.shard_count.max(1));
        let of_memory = of_memory.min(SHARD);
        let addresses = match is_here {
            true => of_memory.next_multiple_of(LINE) + of_memory / LINE * LINE,
            false => SHARD,
        };
        let all_shards = (0..shards).map(|shard| {
            let first = shard * SHARD;
            first..first + addresses.min(SHARD)
        });
        let Some(Range { start, end }) = wanted.pages.clone() else {
            return Ok(all_shards.collect());
        };
        let error = || MigrateError::OutOfRange {
            server: server.name.clone(),
            first: start,
            last: end.saturating_sub(1),
        };
        if start >= end || end > shards * SHARD {
            return Err(error());
        }
        let lines = start / LINE * LINE..end.next_multiple_of(LINE);
        let rows: Vec<_> = all_shards
            .map(|shard| shard.start.max(lines.start)..shard.end.min(lines.end))
            .filter(|row| row.start < row.end)
            .collect();
        // A part outside of the arena is a mistake of who asks.
        let page_count: u64 = rows.iter().map(|row| row.end - row.start).sum();
        let is_in_one = lines.start / SHARD == (lines.end - 1) / SHARD;
        if rows.is_empty() || is_in_one && page_count != lines.end - lines.start {
            return Err(error());
        }
        Ok(rows)
    }

    /// Who serves the parts of a row; `None` for what is lost.
    pub(super) fn givers(
        &self,
        home: ContentsRecord,
        pages: &Range<u64>,
    ) -> Vec<(Range<u64>, Option<ContentsRecord>)> {
        let mut parts = PageMap::default();
        parts.insert(pages.clone(), self.is_present(home).then_some(home));
        if let Some(of) = self.elsewhere.get(&home) {
            for (part, ()) in of.record.lost.within(pages) {
                parts.insert(part, None);
            }
            for (part, placed) in of.record.rows.within(pages) {
                parts.insert(part, Some(placed.at).filter(|at| self.is_present(*at)));
            }
        }
        parts.iter().map(|(part, giver)| (part.clone(), *giver)).collect()
    }

    /// Checks that no part is in an open migration.
    fn check_free(
        &self,
        home: ContentsRecord,
        parts: &[(Range<u64>, ContentsRecord)],
    ) -> Result<(), MigrateError> {
        let open = self.open().map(|of| &of.record);
        for record in open.filter(|it| it.home == home && it.holds_range()) {
            for (part, _) in parts {
                let both = part.start.max(record.pages.start)..part.end.min(record.pages.end);
                if both.start < both.end {
                    let (first, last) = (both.start, both.end - 1);
                    return Err(MigrateError::Overlap { migration: record.id, first, last });
                }
            }
        }
        Ok(())
    }

    /// Checks that servers can still report where the pages of a home are when parts of it have moved.
    fn check_rows_of(
        &self,
        home: ContentsRecord,
        server: &Server,
        part_count: usize,
    ) -> Result<(), MigrateError> {
        let rows = self.elsewhere.get(&home).map_or(0, |of| of.record.rows.iter().count());
        match rows + part_count {
            rows if rows > HOME_ROWS_MAX => {
                Err(MigrateError::Fragmented { server: server.name.clone(), rows })
            }
            _ => Ok(()),
        }
    }

    /// A range epoch that is greater than any before for the lines of these servers.
    fn epoch_above(&self, by: u64, servers: [ContentsRecord; 3]) -> Result<u32, MigrateError> {
        let earlier = self.all.values().map(|of| of.record.range_epoch);
        let own = servers.iter().filter_map(|at| Some(self.servers.get(&at.id())?.range_epoch));
        let greatest = earlier.chain(own).max().unwrap_or(0);
        let by = u32::try_from(by).map_err(|_| MigrateError::Exhausted)?;
        greatest.checked_add(by).ok_or(MigrateError::Exhausted)
    }
}
