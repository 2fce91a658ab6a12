//! What the controller remembers, in redb.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use redb::backends::InMemoryBackend;
use redb::{Builder, Database, ReadableDatabase, ReadableTable, TableDefinition};

use crate::core::{Change, NodeRecord, SpaceRecord, Stored};
use crate::secret;

/// Node id -> [`NodeRecord`] as JSON, so that a person can read it in need.
const NODES: TableDefinition<'_, u16, &[u8]> = TableDefinition::new("nodes");

/// Space -> multicast group.
const SPACES: TableDefinition<'_, u16, u16> = TableDefinition::new("spaces");

/// Single numbers by name.
const NUMBERS: TableDefinition<'_, &str, u64> = TableDefinition::new("numbers");

/// The format of all this; raised when an older controller could not read it, or would do harm.
const FORMAT: u64 = 2;

/// The format before: it did not hold the last arena generation of a node. A controller that does
/// not know of it would give a node's next life generations that are in use.
const FORMAT_BEFORE: u64 = 1;

/// Bits of an election id's lower half that count the connections of one start.
const CONNECTION_BITS: u32 = 32;

/// First generations lie below this, so that half of all generations is left for a node's restarts.
const FIRST_GENERATIONS: u64 = 1 << 14;

/// Nanoseconds of a store's birth that count as one tick, as a power of two: an eighth of a second.
const BIRTH_TICK_BITS: u32 = 27;

/// Odd, so that the stores of 2^14 ticks in a row begin at 2^14 generations; and by the golden
/// ratio, so that those made soon after each other begin far from each other.
const BIRTH_STRIDE: u64 = 10_125;

/// Why the store cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The folder that the configured file would be in is not there. Whether it is forgotten or a
    /// disk is not mounted, a store begun elsewhere would forget the rack: the operator decides.
    #[error(
        "the controller's store {path}: there is no directory {folder}; make it, or mount what \
         holds it"
    )]
    NoFolder {
        /// The file.
        path: String,
        /// The directory.
        folder: String,
    },
    /// The file is not there, not ours, damaged, or another controller has it open.
    #[error("the controller's store {path}: {reason}")]
    Open {
        /// The file.
        path: String,
        /// What is wrong.
        reason: String,
    },
    /// Others can read the file, which holds every endpoint's token, and this user may not change
    /// that: the file is somebody else's.
    #[error(
        "the controller's store {path} is open to others (mode {mode:03o}), and that cannot be \
         changed: {source}; make this user its owner"
    )]
    OpenToOthers {
        /// The file.
        path: String,
        /// Its mode.
        mode: u32,
        /// What the system said.
        source: std::io::Error,
    },
    /// Reading or writing failed: the disk is full or broken.
    #[error("the controller's store failed: {0}")]
    Io(String),
    /// A record is not readable: the file was written by another version or is damaged.
    #[error("the controller's store holds {0}, which this version cannot read")]
    Unreadable(String),
}

fn io(error: impl Into<redb::Error>) -> StoreError {
    StoreError::Io(error.into().to_string())
}

/// A number by which a switch knows who may write: the greatest wins.
///
/// The upper half is the time at which the store was made, in nanoseconds since 1970, or one more than
/// that of another controller which an operator decided against; the lower counts the controller's starts and, in its last 32 bits, the connections that a start tried. So
/// whoever started later wins, and no two connections share an id.
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

/// The names of the upper half of this store's election ids, and of both halves of the id by which
/// another controller took the switch.
const ELECTION: &str = "election";
const FENCED_HIGH: &str = "fenced_high";
const FENCED_LOW: &str = "fenced_low";

/// The open store. One process at a time has it.
#[derive(Debug)]
pub struct Store {
    database: Database,
    start_count: u64,
    created: u64,
    /// The upper half of this store's election ids: when it was made, or more.
    election: AtomicU64,
    fenced_by: Option<ElectionId>,
}

impl Store {
    /// Opens the store, or makes it in a folder that is there, and counts this start.
    ///
    /// The file holds every endpoint's token, so only its owner may read it. Earlier versions made
    /// it with the default mode: such a file is closed to others, and that is logged. It is not
    /// refused, because that would leave a rack without controller, and each token ends with the
    /// next join of its endpoint.
    ///
    /// # Errors
    /// [`StoreError`]: the file cannot be opened, read or written.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let open = |reason: String| StoreError::Open { path: path.display().to_string(), reason };
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            let found = std::fs::metadata(folder);
            if found.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound) {
                let (path, folder) = (path.display().to_string(), folder.display().to_string());
                return Err(StoreError::NoFolder { path, folder });
            }
            found.map_err(|error| open(format!("{}: {error}", folder.display())))?;
        }
        let file = secret::open_or_create(path).map_err(|error| open(error.to_string()))?;
        let own = file.try_clone().map_err(|error| open(error.to_string()))?;
        let database = Builder::new().create_file(file).map_err(|error| open(error.to_string()))?;
        // Not before it is known to be a store: the file of something else stays as it is.
        match secret::close_to_others(&own) {
            Ok(None) => {}
            Ok(Some(mode)) => tracing::warn!(
                path = %path.display(),
                "others could read the store with the endpoints' tokens (mode {mode:03o}); its mode is \
                 600 now"
            ),
            Err(source) => {
                let mode = own.metadata().map_or(0, |found| found.mode() & 0o777);
                return Err(StoreError::OpenToOthers {
                    path: path.display().to_string(),
                    mode,
                    source,
                });
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
        let database =
            Builder::new().create_with_backend(InMemoryBackend::new()).map_err(|error| {
                StoreError::Open { path: "in memory".to_owned(), reason: error.to_string() }
            })?;
        Self::start(database)
    }

    fn start(database: Database) -> Result<Self, StoreError> {
        let write = database.begin_write().map_err(io)?;
        let (start_count, created, election, fenced_by) = {
            write.open_table(NODES).map_err(io)?;
            write.open_table(SPACES).map_err(io)?;
            let mut numbers = write.open_table(NUMBERS).map_err(io)?;
            let read = |numbers: &redb::Table<'_, &str, u64>, name| {
                Ok::<_, StoreError>(numbers.get(name).map_err(io)?.map(|value| value.value()))
            };
            match read(&numbers, "format")? {
                None | Some(FORMAT_BEFORE) => {
                    numbers.insert("format", FORMAT).map_err(io).map(drop)?;
                }
                Some(FORMAT) => {}
                Some(other) => return Err(StoreError::Unreadable(format!("format {other}"))),
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

    /// The id by which another controller took the switch from one with this store, unless an
    /// operator has decided since ([`Self::outbid`]).
    ///
    /// It is remembered because a switch forgets: after a restart of its agent any controller could
    /// become the primary again, also one whose state is of yesterday.
    #[must_use]
    pub const fn fenced_by(&self) -> Option<ElectionId> {
        self.fenced_by
    }

    /// Remembers that another controller took the switch.
    ///
    /// # Errors
    /// [`StoreError`]: it is not remembered.
    pub fn note_fenced(&self, by: ElectionId) -> Result<(), StoreError> {
        let write = self.database.begin_write().map_err(io)?;
        {
            let mut numbers = write.open_table(NUMBERS).map_err(io)?;
            numbers.insert(FENCED_HIGH, by.high).map_err(io)?;
            numbers.insert(FENCED_LOW, by.low).map_err(io)?;
        }
        write.commit().map_err(io)
    }

    /// Takes ids above another controller's from now on, in every later start as well, and forgets
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

    /// The arena generation that new memory nodes of this store begin with, drawn from its birth.
    ///
    /// A store that was deleted gave the same node ids as the one after it; were their generations
    /// the same as well, pointers of then would fit pages of now.
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
        Ok(stored)
    }

    /// Stores changes, all or none; they are on disk when this returns.
    ///
    /// # Errors
    /// [`StoreError`]: none is stored.
    pub fn commit(&self, changes: &[Change]) -> Result<(), StoreError> {
        if changes.is_empty() {
            return Ok(());
        }
        let write = self.database.begin_write().map_err(io)?;
        {
            let mut nodes = write.open_table(NODES).map_err(io)?;
            let mut spaces = write.open_table(SPACES).map_err(io)?;
            for change in changes {
                match change {
                    Change::Node(record) => {
                        let bytes = serde_json::to_vec(record)
                            .map_err(|error| StoreError::Io(error.to_string()))?;
                        nodes.insert(record.node, bytes.as_slice()).map_err(io)?;
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

const fn first_generation(created: u64) -> u16 {
    ((created >> BIRTH_TICK_BITS).wrapping_mul(BIRTH_STRIDE) % FIRST_GENERATIONS) as u16
}

#[cfg(test)]
mod failing;
#[cfg(test)]
mod tests;
