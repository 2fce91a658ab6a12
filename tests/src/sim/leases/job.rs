//! What clients do with the two pages.

use bluebridge_protocol::{Timestamp, requester::Operation};
use bluebridge_wire::{Pointer, address::PAGE_BYTES};
use rand::{Rng, rngs::SmallRng};

/// The page of a job, and how it is used.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Place {
    /// A whole page, written as one value.
    Register,
    /// A word.
    Counter,
}

impl Place {
    pub(super) const fn bytes(self) -> usize {
        match self {
            Self::Register => PAGE_BYTES,
            Self::Counter => 8,
        }
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Kind {
    Add { addend: u64 },
    Read,
    ReadStale,
    Update { lease_ms: u16, wait: bool },
    Write { value: u64 },
}

/// A lease that a job holds or is ending, and the value that it read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Holding {
    pub(super) epoch: u64,
    pub(super) before: u64,
    /// By the client's clock.
    pub(super) expires_at: Timestamp,
}

/// The progress of a job.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stage {
    Asking,
    Holding(Holding),
    Renewing(Holding),
    Committing { holding: Holding, after: u64 },
    Aborting,
}

#[derive(Clone, Debug)]
pub(super) struct Job {
    pub(super) place: Place,
    pub(super) kind: Kind,
    pub(super) stage: Stage,
    /// When its current operation began, by the simulation's clock.
    pub(super) start: Timestamp,
    pub(super) outgoing: Vec<u8>,
    pub(super) incoming: Vec<u8>,
}

impl Job {
    pub(super) fn draw(rng: &mut SmallRng, next_value: &mut u64) -> (Place, Kind) {
        let place = if rng.random_bool(0.5) { Place::Register } else { Place::Counter };
        let kind = match (rng.random_range(0..10), place) {
            (0..2, _) => Kind::Read,
            (2, Place::Register) => Kind::ReadStale,
            (2..5, Place::Register) => {
                *next_value += 1;
                Kind::Write { value: *next_value }
            }
            (2..5, Place::Counter) => Kind::Add { addend: rng.random_range(1..1000) },
            _ => Kind::Update { lease_ms: rng.random_range(2..=40), wait: rng.random_bool(0.6) },
        };
        (place, kind)
    }

    /// The first operation of the job.
    pub(super) const fn operation(place: Place, kind: Kind, pointer: Pointer) -> Operation {
        let length = match place {
            Place::Register => 4096,
            Place::Counter => 8,
        };
        match kind {
            Kind::Add { addend } => Operation::FetchAdd { pointer, addend },
            Kind::Read => Operation::Read { pointer, length },
            Kind::ReadStale => Operation::ReadStale { pointer, length },
            Kind::Update { lease_ms, wait } => {
                Operation::Update { pointer, length, lease_ms, wait }
            }
            Kind::Write { .. } => Operation::Write { pointer, length },
        }
    }

    pub(super) const fn name(&self) -> &'static str {
        match (self.stage, self.kind) {
            (Stage::Asking, Kind::Add { .. }) => "fetch_add",
            (Stage::Asking, Kind::Read) => "read",
            (Stage::Asking, Kind::ReadStale) => "read stale",
            (Stage::Asking, Kind::Update { .. }) => "update",
            (Stage::Asking, Kind::Write { .. }) => "write",
            (Stage::Holding(_), _) => "hold",
            (Stage::Renewing(_), _) => "renew",
            (Stage::Committing { .. }, _) => "commit",
            (Stage::Aborting, _) => "abort",
        }
    }
}
