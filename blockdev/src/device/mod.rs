//! The disk: a map from offsets to slabs of remote memory.
//!
//! A slab is one allocation. It is allocated when a part of it is first written; what was never written reads as zeroes
//! without a request. The map itself is kept in remote memory (`descriptor`), at the pointer that names the disk, and
//! is changed before the WRITE that needs the change is acknowledged. So nothing of the disk is in its process alone.
//!
//! * `descriptor`: the map as bytes; `slabs`: the map and the use of each slab, in local memory.
//! * `open`: making, attaching, deleting disks; `keeper`: who is the one process that serves a disk.
//! * `execute`: requests; `allocate`: slabs; `call`: their time; `health`: servers that do not respond.

mod allocate;
mod call;
mod descriptor;
mod execute;
mod health;
mod keeper;
mod open;
mod slabs;

use std::fmt;
use std::str::FromStr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bluebridge::{Error, NodeId, Pointer, Status};
use crossbeam_utils::atomic::AtomicCell;

pub use descriptor::MapError;
pub use execute::{Operation, PIECES, Task};
pub use keeper::Keeper;
pub use open::{Deleted, DiskOptions, LEASE_MIN, OpenOptions};

use call::Turn;
use descriptor::Properties;
use health::Health;
use keeper::Ownership;
use slabs::Slabs;

/// The smallest and the largest slab.
pub const SLAB_BYTES_MIN: u64 = 1 << 20;
/// See [`SLAB_BYTES_MIN`].
pub const SLAB_BYTES_MAX: u64 = 64 << 20;
/// The most slabs of a disk.
pub const SLABS_MAX: u64 = 1 << 18;

/// How slabs are distributed over the memory servers. A server that is full or does not respond is passed over.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Placement {
    /// The first part of the disk on the first server, the next one on the second, and so on.
    Linear,
    /// Neighbouring slabs on different servers, in turn.
    Striped,
    /// Each slab on the one of two randomly chosen servers that has more free memory.
    #[default]
    TwoChoices,
}

impl Placement {
    const ALL: [(Self, &'static str); 3] =
        [(Self::Linear, "linear"), (Self::Striped, "striped"), (Self::TwoChoices, "two-choices")];

    const fn code(self) -> u8 {
        match self {
            Self::Linear => 0,
            Self::Striped => 1,
            Self::TwoChoices => 2,
        }
    }

    fn of_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().map(|(placement, _)| placement).find(|it| it.code() == code)
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::ALL.into_iter().find(|(it, _)| it == self).map_or("", |(_, name)| name);
        f.write_str(name)
    }
}

impl FromStr for Placement {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let found = Self::ALL.into_iter().find(|(_, name)| *name == text);
        found.map(|(placement, _)| placement).ok_or_else(|| {
            format!("{text:?} is no placement; write linear, striped or two-choices")
        })
    }
}

/// A disk could not be made, attached or deleted.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    /// Another process serves the disk.
    #[error(
        "node {owner} serves this disk, for {remaining_ms} ms at least; stop that process, or, if it is gone, try \
         again after that time"
    )]
    InUse {
        /// The process's endpoint.
        owner: NodeId,
        /// For how long it certainly has the disk without renewal.
        remaining_ms: u16,
    },
    /// The map is not that of a disk.
    #[error(transparent)]
    Map(#[from] MapError),
    /// The memory of the map cannot be used.
    #[error("the disk's map: {0}")]
    Memory(#[from] Error),
    /// The lease on the disk was not granted.
    #[error(
        "the server of the disk's map did not grant this process the lease on it in time; try again"
    )]
    NotKept,
    /// A property of a new disk is impossible.
    #[error("{0}")]
    Options(String),
    /// Some slabs of a disk that is being deleted could not be freed.
    #[error(
        "{count} slabs could not be freed ({first}); delete the disk again when their servers respond, or with --force \
         if they are gone for good"
    )]
    SlabsLeft {
        /// How many.
        count: u64,
        /// The first one's error.
        #[source]
        first: Error,
    },
    /// Another process attached the disk while this one was paused or cut off.
    #[error("another process has attached this disk meanwhile")]
    TakenOver,
    /// The system cannot start a thread.
    #[error("cannot start a thread: {0}")]
    Thread(std::io::ErrorKind),
}

/// Why a request failed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Failure {
    /// The memory of the range is lost, or refused.
    Lost,
    /// No memory server has room.
    NoSpace,
    /// The server did not respond to earlier requests.
    Silent,
    /// This process does not serve the disk any more.
    Stopped,
    /// The server did not respond in time.
    Unanswered,
}

impl Failure {
    fn of(error: &Error) -> Self {
        match error {
            Error::Busy { .. }
            | Error::Carrier { .. }
            | Error::OutcomeUnknown { .. }
            | Error::TimedOut { .. }
            | Error::TooManyHops { .. }
            | Error::Unreachable { .. }
            // Of a change of the map: nothing was written, so it can be done again.
            | Error::LeaseLost { .. } => Self::Unanswered,
            Error::Refused { status, .. } if is_passing(*status) => Self::Unanswered,
            Error::Expelled { .. } => Self::Stopped,
            error if is_of_full_server(error) => Self::NoSpace,
            _ => Self::Lost,
        }
    }
}

/// Whether a server, or another one, may accept the same request soon.
const fn is_passing(status: Status) -> bool {
    matches!(
        status,
        Status::Busy
            | Status::Moved
            | Status::NotOwner
            | Status::NoSession
            | Status::Expired
            | Status::BeyondWindow
            | Status::Incomplete
            | Status::StaleRangeEpoch
            | Status::NoAuthority
            | Status::LeaseLost
            | Status::Overloaded
            | Status::ShuttingDown
    )
}

/// Whether a server has no room for a slab, so that another one may have some.
fn is_of_full_server(error: &Error) -> bool {
    match error {
        Error::Drained { .. } | Error::NoMemoryNode => true,
        Error::Refused { status, .. } => {
            matches!(status, Status::OutOfMemory | Status::QuotaExceeded)
        }
        _ => false,
    }
}

/// Whether the memory at a pointer does not exist any more.
fn is_of_missing_memory(error: &Error) -> bool {
    match error {
        Error::PastEnd { .. } => true,
        Error::Refused { status, .. } => matches!(
            status,
            Status::NotAllocated | Status::OutOfRange | Status::StaleGeneration | Status::StaleTag
        ),
        _ => false,
    }
}

/// A disk that this process serves. Any number of threads execute requests, each with a client of its own.
#[derive(Debug)]
pub struct Disk {
    properties: Properties,
    pointer: Pointer,
    slabs: Slabs,
    ownership: Ownership,
    /// Servers whose requests fail at once.
    health: Health,
    /// Servers that allocate and free no slabs for a while. They were given less time.
    passed_over: Health,
    /// Changes of the map, one at a time.
    turn: Turn,
    /// The live memory servers, in a fixed order.
    nodes: Mutex<Vec<NodeId>>,
    /// How long a request may go without progress.
    deadline: Duration,
    /// The most time of a call in a request's first round, and of a call that allocates a slab.
    patience: Duration,
    /// For how long a server must have been silent in a request's calls until it is suspected.
    enough: Duration,
    /// For how long a server must have been silent in one call until it is passed over.
    pass_time: Duration,
    /// The least time for a change of the map, or for freeing a slab.
    change_time: Duration,
    /// By page of the table.
    freeing: Box<[Freeing]>,
    reported: Reported,
}

/// Slabs of a page of the table that are to be freed.
#[derive(Debug)]
struct Freeing {
    /// What the page names as to be freed, or may name, unless that is free.
    slab: AtomicCell<Option<Pointer>>,
    /// Held while a slab of the page is being freed.
    turn: Turn,
    /// The keeper is to free what is left of the page.
    is_owed: AtomicBool,
}

impl Disk {
    /// The pointer that names the disk.
    #[must_use]
    pub const fn pointer(&self) -> Pointer {
        self.pointer
    }

    /// The length in bytes.
    #[must_use]
    pub const fn size_bytes(&self) -> u64 {
        self.properties.size_bytes
    }

    /// The bytes of a slab.
    #[must_use]
    pub const fn slab_bytes(&self) -> u64 {
        self.properties.slab_bytes
    }

    /// How slabs are distributed.
    #[must_use]
    pub const fn placement(&self) -> Placement {
        self.properties.placement
    }

    /// The name that the disk was given.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.properties.name
    }

    /// How many slabs are allocated.
    #[must_use]
    pub fn allocated_slabs(&self) -> u64 {
        self.slabs.allocated()
    }

    /// Takes the present list of live memory servers.
    pub fn set_nodes(&self, nodes: impl Iterator<Item = NodeId>) {
        let mut known = lock(&self.nodes);
        known.clear();
        known.extend(nodes);
        known.sort_unstable();
    }

    /// Why this process does not serve the disk any more; `None` as long as it does.
    #[must_use]
    pub fn end(&self) -> Option<DiskError> {
        self.ownership.end()
    }
}

/// A lock whose holder panicked is still usable: each change is one assignment.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Failures in the log: one line a second, with the number of those that were left out.
#[derive(Debug)]
struct Reported {
    began: Instant,
    /// Nanoseconds after `began` of the next line.
    next: AtomicU64,
    left_out: AtomicU64,
}

impl Reported {
    fn new() -> Self {
        Self { began: Instant::now(), next: AtomicU64::new(0), left_out: AtomicU64::new(0) }
    }

    fn failure(&self, slab: u64, error: &Error) {
        let now = u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let next = self.next.load(Ordering::Relaxed);
        let pause = u64::try_from(Duration::from_secs(1).as_nanos()).unwrap_or(u64::MAX);
        let is_mine = now >= next
            && self
                .next
                .compare_exchange(
                    next,
                    now.saturating_add(pause),
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                )
                .is_ok();
        if is_mine {
            let left_out = self.left_out.swap(0, Ordering::Relaxed);
            tracing::warn!(slab, %error, left_out, "a request failed");
        } else {
            self.left_out.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a test of one server's refusals would not see: each of them.
    #[test]
    fn passing_refusals_are_repeated() {
        let of = |status| Failure::of(&Error::Refused { status, node: NodeId(1), pointer: None });
        for status in [Status::ShuttingDown, Status::NoAuthority, Status::Overloaded] {
            assert_eq!(of(status), Failure::Unanswered, "{status:?}");
        }
        for status in [Status::StaleGeneration, Status::NotAllocated, Status::Forbidden] {
            assert_eq!(of(status), Failure::Lost, "{status:?}");
        }
        assert_eq!(of(Status::OutOfMemory), Failure::NoSpace);
    }

    #[test]
    fn placements_have_names_and_codes() {
        for (placement, name) in Placement::ALL {
            assert_eq!(name.parse(), Ok(placement));
            assert_eq!(placement.to_string(), name);
            assert_eq!(Placement::of_code(placement.code()), Some(placement));
        }
        assert_eq!(Placement::of_code(3), None);
        assert!("random".parse::<Placement>().is_err());
    }
}
