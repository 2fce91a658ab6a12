//! The controller's persistent state, in redb.

use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use redb::backends::InMemoryBackend;
use redb::{
    Builder, Database, DatabaseError, ReadableDatabase, ReadableTable, StorageError,
    TableDefinition,
};

use crate::core::{Change, NodeRecord, SpaceRecord, Stored};
use crate::migration::{ContentsRecord, StoredMigrations};
use crate::secret;

/// Node id -> [`NodeRecord`] as JSON, so that a person can read it if necessary.
const NODES: TableDefinition<'_, u16, &[u8]> = TableDefinition::new("nodes");

/// Space -> multicast group.
const SPACES: TableDefinition<'_, u16, u16> = TableDefinition::new("spaces");

/// Migration -> [`crate::migration::MigrationRecord`] as JSON.
const MIGRATIONS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("migrations");

/// Contents of a home -> [`crate::migration::ElsewhereRecord`] as JSON.
const ELSEWHERE: TableDefinition<'_, u32, &[u8]> = TableDefinition::new("elsewhere");

/// Node -> [`crate::migration::LossRecord`] as JSON.
const LOSSES: TableDefinition<'_, u16, &[u8]> = TableDefinition::new("losses");

/// Node -> [`crate::migration::DrainRecord`] as JSON. An older controller leaves it alone, and drains nothing.
const DRAINS: TableDefinition<'_, u16, &[u8]> = TableDefinition::new("drains");

/// Node that is gone -> [`crate::migration::DeputyRecord`] as JSON.
const DEPUTIES: TableDefinition<'_, u16, &[u8]> = TableDefinition::new("deputies");

/// Without a key -> [`crate::migration::rebalance::RebalanceRecord`] as JSON, if memory moves by itself. An older
/// controller leaves it alone, and moves nothing.
const REBALANCE: TableDefinition<'_, (), &[u8]> = TableDefinition::new("rebalance");

/// Single numbers by name.
const NUMBERS: TableDefinition<'_, &str, u64> = TableDefinition::new("numbers");

/// The version of this format; increased when an older controller could not read it, or would do harm.
const FORMAT: u64 = 4;

/// The versions before. The first did not contain the last arena generation of a node: a controller that does
/// not know it would give the next incarnation of a node generations that are in use. The second did not contain
/// migrations: a controller that does not know them would not tell anyone that a server lost what it had taken. The
/// third did not contain deputies: a controller that does not know them would let a server join for which another one
/// still answers.
const FORMATS_BEFORE: std::ops::RangeInclusive<u64> = 1..=3;

/// Bits of an election id's lower half that count the connections of one start.
const CONNECTION_BITS: u32 = 32;

/// First generations are below this, so that half of all generations remains for a node's restarts.
const FIRST_GENERATIONS: u64 = 1 << 14;

/// Nanoseconds of a store's creation time that count as one tick, as a power of two: an eighth of a second.
const BIRTH_TICK_BITS: u32 = 27;

/// Odd, so that stores of 2^14 consecutive ticks begin at 2^14 different generations; and near the golden
/// ratio, so that stores created soon after each other begin far from each other.
const BIRTH_STRIDE: u64 = 10_125;

/// Why the store cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The directory of the configured file does not exist. It may be forgotten, or a
    /// disk may not be mounted; a new store elsewhere would lose the rack's records, so the operator decides.
    #[error(
        "the controller's store {path}: there is no directory {folder}; create it, or mount the \
         disk that contains it"
    )]
    NoFolder {
        /// The file.
        path: String,
        /// The directory.
        folder: String,
    },
    /// Another process has the file open, probably a controller.
    #[error(
        "the controller's store {path} is in use by another process; end that controller, or give this \
         one a --store of its own"
    )]
    InUse {
        /// The file.
        path: String,
    },
    /// This user may not open the file, or the system cannot read it.
    #[error("cannot open the controller's store {path}: {source}")]
    Open {
        /// The file.
        path: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file is not a store, according to its first bytes.
    #[error("{path} is not a controller's store; use the correct --store")]
    NotAStore {
        /// The file.
        path: String,
    },
    /// The file was a store and was truncated or changed.
    #[error(
        "the controller's store {path} is damaged ({reason}); move it away \
         and start once with --force: the switch is emptied, and every endpoint must join again. Do not use \
         an older copy: pointers from after the copy could then read other data"
    )]
    Damaged {
        /// The file.
        path: String,
        /// The reason.
        reason: String,
    },
    /// Others can read the file, which contains every endpoint's token, and this user may not change
    /// that: the file belongs to another user.
    #[error(
        "the controller's store {path} is open to others (mode {mode:03o}), and its mode cannot be \
         changed: {source}; make this user its owner"
    )]
    OpenToOthers {
        /// The file.
        path: String,
        /// Its mode.
        mode: u32,
        /// The system's error.
        source: std::io::Error,
    },
    /// Reading or writing failed: the disk is full or broken.
    #[error("the controller's store failed: {0}")]
    Io(String),
    /// A record cannot be read: the file was written by another version or is damaged.
    #[error("the controller's store holds {0}, which this version cannot read")]
    Unreadable(String),
}

fn io(error: impl Into<redb::Error>) -> StoreError {
    StoreError::Io(error.into().to_string())
}

/// Why the database rejects a file: it is in use, is not a store, or is damaged.
fn unusable(file: &File, path: String, error: DatabaseError) -> StoreError {
    match error {
        DatabaseError::DatabaseAlreadyOpen => StoreError::InUse { path },
        DatabaseError::Storage(StorageError::Io(source)) if source.raw_os_error().is_some() => {
            StoreError::Open { path, source }
        }
        _ if !begins_as_store(file) => StoreError::NotAStore { path },
        error => StoreError::Damaged { path, reason: error.to_string() },
    }
}

/// The first bytes of every file of redb, by its file format.
const MAGIC: &[u8] = b"redb";

fn begins_as_store(file: &File) -> bool {
    let mut begin = [0; MAGIC.len()];
    file.read_exact_at(&mut begin, 0).is_ok() && begin == MAGIC
}

/// The number by which a switch decides who may write: the greatest wins.
///
/// The upper half is the creation time of the store in nanoseconds since 1970, or one more than that of
/// another controller that an operator overruled. The lower half counts the controller's starts and, in its
/// last 32 bits, the connections that a start tried. A later start therefore wins, and no two connections
/// share an id.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct ElectionId {
    /// The upper half.
    pub high: u64,
    /// The lower half.
    pub low: u64,
}

impl ElectionId {
    /// The id of a connection of this start; those after the 2^32nd share the last id.
    #[must_use]
    pub fn connection(self, number: u64) -> Self {
        let last = (1 << CONNECTION_BITS) - 1;
        Self { high: self.high, low: self.low | number.min(last) }
    }
}

impl std::fmt::Display for ElectionId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.high, self.low)
    }
}

/// The names of the upper half of this store's election ids, and of both halves of the id with which
/// another controller took the switch.
const ELECTION: &str = "election";
const FENCED_HIGH: &str = "fenced_high";
const FENCED_LOW: &str = "fenced_low";

/// The open store. Only one process at a time can open it.
#[derive(Debug)]
pub struct Store {
    database: Database,
    start_count: u64,
    created: u64,
    /// The upper half of this store's election ids: its creation time, or more.
    election: AtomicU64,
    fenced_by: Option<ElectionId>,
}

impl Store {
    /// Opens the store, or creates it in an existing directory, and counts this start.
    ///
    /// The file contains every endpoint's token, so only its owner may read it. Earlier versions created
    /// it with the default mode: the mode of such a file is restricted, and this is logged. It is not
    /// refused, because that would leave a rack without a controller, and each token becomes invalid with the
    /// next join of its endpoint.
    ///
    /// # Errors
    /// [`StoreError`]: the file cannot be opened, read or written.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let shown = || path.display().to_string();
        let open = |source| StoreError::Open { path: shown(), source };
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty())
            && let Err(error) = std::fs::metadata(folder)
        {
            if error.kind() != std::io::ErrorKind::NotFound {
                return Err(open(error));
            }
            return Err(StoreError::NoFolder {
                path: shown(),
                folder: folder.display().to_string(),
            });
        }
        let file = secret::open_or_create(path).map_err(open)?;
        let own = file.try_clone().map_err(open)?;
        if !own.metadata().map_err(open)?.is_file() {
            return Err(StoreError::NotAStore { path: shown() });
        }
        let database =
            Builder::new().create_file(file).map_err(|error| unusable(&own, shown(), error))?;
        // Only after it is known to be a store: other files do not change.
        match secret::close_to_others(&own) {
            Ok(None) => {}
            Ok(Some(mode)) => tracing::warn!(
                path = %path.display(),
                "others could read the store with the endpoints' tokens (mode {mode:03o}); its mode is \
                 600 now"
            ),
            Err(source) => {
                let mode = own.metadata().map_or(0, |found| found.mode() & 0o777);
                return Err(StoreError::OpenToOthers { path: shown(), mode, source });
            }
        }
        Self::start(database)
    }

    /// A store that lasts as long as the process, for tests: a rack whose memory nodes may outlive
    /// its controller needs a file.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn in_memory() -> Result<Self, StoreError> {
        let database = Builder::new()
            .create_with_backend(InMemoryBackend::new())
            .map_err(|error| StoreError::Io(error.to_string()))?;
        Self::start(database)
    }

    fn start(database: Database) -> Result<Self, StoreError> {
        let write = database.begin_write().map_err(io)?;
        let (start_count, created, election, fenced_by) = {
            write.open_table(NODES).map_err(io)?;
            write.open_table(SPACES).map_err(io)?;
            write.open_table(MIGRATIONS).map_err(io)?;
            write.open_table(ELSEWHERE).map_err(io)?;
            write.open_table(LOSSES).map_err(io)?;
            write.open_table(DRAINS).map_err(io)?;
            write.open_table(DEPUTIES).map_err(io)?;
            write.open_table(REBALANCE).map_err(io)?;
            let mut numbers = write.open_table(NUMBERS).map_err(io)?;
            let read = |numbers: &redb::Table<'_, &str, u64>, name| {
                Ok::<_, StoreError>(numbers.get(name).map_err(io)?.map(|value| value.value()))
            };
            match read(&numbers, "format")? {
                Some(FORMAT) => {}
                before if before.is_none_or(|it| FORMATS_BEFORE.contains(&it)) => {
                    numbers.insert("format", FORMAT).map_err(io).map(drop)?;
                }
                other => {
                    let other = other.unwrap_or_default();
                    return Err(StoreError::Unreadable(format!("format {other}")));
                }
            }
            let age = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let now = u64::try_from(age.as_nanos()).unwrap_or(u64::MAX);
            let created = read(&numbers, "created")?.unwrap_or(now);
            let start_count = read(&numbers, "starts")?.unwrap_or(0) + 1;
            numbers.insert("created", created).map_err(io)?;
            numbers.insert("starts", start_count).map_err(io)?;
            let election = read(&numbers, ELECTION)?.unwrap_or(created);
            let fenced_by = read(&numbers, FENCED_HIGH)?.zip(read(&numbers, FENCED_LOW)?);
            let fenced_by = fenced_by.map(|(high, low)| ElectionId { high, low });
            (start_count, created, election, fenced_by)
        };
        write.commit().map_err(io)?;
        let election = AtomicU64::new(election);
        Ok(Self { database, start_count, created, election, fenced_by })
    }

    /// The first election id of this start.
    #[must_use]
    pub fn election_id(&self) -> ElectionId {
        self.id_below(self.election.load(Ordering::Relaxed))
    }

    const fn id_below(&self, high: u64) -> ElectionId {
        ElectionId { high, low: self.start_count << CONNECTION_BITS }
    }

    /// The id with which another controller took the switch from one with this store, unless an
    /// operator has decided since ([`Self::outbid`]).
    ///
    /// It is stored because a switch forgets it: after a restart of its agent any controller could
    /// become the primary again, even one with outdated state.
    #[must_use]
    pub const fn fenced_by(&self) -> Option<ElectionId> {
        self.fenced_by
    }

    /// Records that another controller took the switch.
    ///
    /// # Errors
    /// [`StoreError`]: it is not recorded.
    pub fn note_fenced(&self, by: ElectionId) -> Result<(), StoreError> {
        let write = self.database.begin_write().map_err(io)?;
        {
            let mut numbers = write.open_table(NUMBERS).map_err(io)?;
            numbers.insert(FENCED_HIGH, by.high).map_err(io)?;
            numbers.insert(FENCED_LOW, by.low).map_err(io)?;
        }
        write.commit().map_err(io)
    }

    /// Uses ids above another controller's from now on, also in every later start, and removes the record
    /// that this store was fenced. An operator has decided that this is the right controller.
    ///
    /// # Errors
    /// [`StoreError`]: nothing changed, or there is no greater id.
    pub fn outbid(&self, other: ElectionId) -> Result<ElectionId, StoreError> {
        let own = self.election.load(Ordering::Relaxed);
        let high = match other.high.checked_add(1) {
            _ if self.id_below(own) > other => own,
            Some(above) => above.max(own),
            None => return Err(StoreError::Io(format!("no election id is greater than {other}"))),
        };
        let write = self.database.begin_write().map_err(io)?;
        {
            let mut numbers = write.open_table(NUMBERS).map_err(io)?;
            numbers.insert(ELECTION, high).map_err(io)?;
            numbers.remove(FENCED_HIGH).map_err(io)?;
            numbers.remove(FENCED_LOW).map_err(io)?;
        }
        write.commit().map_err(io)?;
        self.election.store(high, Ordering::Relaxed);
        Ok(self.id_below(high))
    }

    /// How often the store was opened, this time included.
    #[must_use]
    pub const fn start_count(&self) -> u64 {
        self.start_count
    }

    /// The first arena generation of this store's new memory nodes, derived from its creation time.
    ///
    /// A deleted store and its successor assign the same node ids; with the same generations,
    /// old pointers would match new pages.
    #[must_use]
    pub const fn first_generation(&self) -> u16 {
        first_generation(self.created)
    }

    /// Everything stored.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn load(&self) -> Result<Stored, StoreError> {
        let read = self.database.begin_read().map_err(io)?;
        let mut stored = Stored { first_generation: self.first_generation(), ..Stored::default() };
        for item in read.open_table(NODES).map_err(io)?.iter().map_err(io)? {
            let (node, bytes) = item.map_err(io)?;
            let record: NodeRecord = serde_json::from_slice(bytes.value()).map_err(|error| {
                StoreError::Unreadable(format!("a record of node {}: {error}", node.value()))
            })?;
            stored.nodes.push(record);
        }
        for item in read.open_table(SPACES).map_err(io)?.iter().map_err(io)? {
            let (space, group) = item.map_err(io)?;
            stored.spaces.push(SpaceRecord { space: space.value(), group: group.value() });
        }
        stored.migrations = StoredMigrations {
            records: records(&read, MIGRATIONS, "a migration")?,
            elsewhere: records(&read, ELSEWHERE, "where pages of a server are")?,
            losses: records(&read, LOSSES, "a loss of memory")?,
            drains: records(&read, DRAINS, "a drained server")?,
            deputies: records(&read, DEPUTIES, "a deputy")?,
        };
        stored.rebalance = records(&read, REBALANCE, "rebalancing")?.pop();
        Ok(stored)
    }

    /// Stores changes, all or none; they are on disk when this returns.
    ///
    /// # Errors
    /// [`StoreError`]: no change is stored.
    pub fn commit(&self, changes: &[Change]) -> Result<(), StoreError> {
        if changes.is_empty() {
            return Ok(());
        }
        let write = self.database.begin_write().map_err(io)?;
        {
            let mut nodes = write.open_table(NODES).map_err(io)?;
            let mut spaces = write.open_table(SPACES).map_err(io)?;
            let mut migrations = write.open_table(MIGRATIONS).map_err(io)?;
            let mut elsewhere = write.open_table(ELSEWHERE).map_err(io)?;
            let mut losses = write.open_table(LOSSES).map_err(io)?;
            let mut drains = write.open_table(DRAINS).map_err(io)?;
            let mut deputies = write.open_table(DEPUTIES).map_err(io)?;
            let mut rebalance = write.open_table(REBALANCE).map_err(io)?;
            for change in changes {
                match change {
                    Change::Deputy(record) => {
                        deputies.insert(record.node, json(record)?.as_slice()).map_err(io)?;
                    }
                    Change::DeputyGone(node) => {
                        deputies.remove(node).map_err(io)?;
                    }
                    Change::Drain(record) => {
                        drains.insert(record.node, json(record)?.as_slice()).map_err(io)?;
                    }
                    Change::DrainGone(node) => {
                        drains.remove(node).map_err(io)?;
                    }
                    Change::Elsewhere(record) => {
                        let key = contents_key(record.home);
                        elsewhere.insert(key, json(record)?.as_slice()).map_err(io)?;
                    }
                    Change::Loss(record) => {
                        losses.insert(record.node, json(record)?.as_slice()).map_err(io)?;
                    }
                    Change::LossGone(node) => {
                        losses.remove(node).map_err(io)?;
                    }
                    Change::Migration(record) => {
                        migrations.insert(record.id, json(record)?.as_slice()).map_err(io)?;
                    }
                    Change::MigrationGone(id) => {
                        migrations.remove(id).map_err(io)?;
                    }
                    Change::Node(record) => {
                        nodes.insert(record.node, json(record)?.as_slice()).map_err(io)?;
                    }
                    Change::Rebalance(Some(record)) => {
                        rebalance.insert((), json(record)?.as_slice()).map_err(io)?;
                    }
                    Change::Rebalance(None) => {
                        rebalance.remove(()).map_err(io)?;
                    }
                    Change::Space(record) => {
                        spaces.insert(record.space, record.group).map_err(io)?;
                    }
                    Change::SpaceGone(space) => {
                        spaces.remove(space).map_err(io)?;
                    }
                }
            }
        }
        write.commit().map_err(io)
    }
}

/// A record as it is stored.
fn json(record: &impl serde::Serialize) -> Result<Vec<u8>, StoreError> {
    serde_json::to_vec(record).map_err(|error| StoreError::Io(error.to_string()))
}

/// All records of a table.
fn records<K: redb::Key + 'static, R: serde::de::DeserializeOwned>(
    read: &redb::ReadTransaction,
    table: TableDefinition<'_, K, &'static [u8]>,
    what: &str,
) -> Result<Vec<R>, StoreError> {
    let table = read.open_table(table).map_err(io)?;
    let parse = |item: Result<(_, redb::AccessGuard<'_, &'static [u8]>), StorageError>| {
        let (_, bytes) = item.map_err(io)?;
        let record = serde_json::from_slice(bytes.value());
        record.map_err(|error| StoreError::Unreadable(format!("a record of {what}: {error}")))
    };
    table.iter().map_err(io)?.map(parse).collect()
}

fn contents_key(ContentsRecord { node, generation }: ContentsRecord) -> u32 {
    u32::from(node) << 16 | u32::from(generation)
}

const fn first_generation(created: u64) -> u16 {
    ((created >> BIRTH_TICK_BITS).wrapping_mul(BIRTH_STRIDE) % FIRST_GENERATIONS) as u16
}

#[cfg(test)]
mod failing;
#[cfg(test)]
mod tests;
