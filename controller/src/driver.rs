//! The seam between the controller and a switch.

mod p4runtime;

use std::collections::BTreeMap;

use bluebridge_p4::pipeline::{Counter, Key};

use crate::core::{Ports, Tables};
use crate::plan::TableUpdate;
use crate::redirect::PacketIn;
use crate::store::ElectionId;

pub use p4runtime::{P4RuntimeConnector, P4RuntimeDriver};

/// Why a switch cannot be worked with.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// A controller with a greater election id has the switch. This one must not write any more.
    #[error(
        "another controller (election id {theirs}) has the switch or had it last, this one ({ours}) is \
         fenced. If this is the right one, stop the other and start this one once with --force"
    )]
    Fenced {
        /// Our election id.
        ours: ElectionId,
        /// That of the primary.
        theirs: ElectionId,
    },
    /// The store knows no endpoint, but the switch serves some: they belong to another controller, or
    /// the store is the wrong one. The tables were only read, and the other controller goes on.
    #[error(
        "the store is empty, but the switch has entries of {endpoints} endpoints: another controller's. \
         Give the right --store; --force empties the switch, and every endpoint must join again"
    )]
    InUse {
        /// Endpoints that the switch lets send.
        endpoints: usize,
    },
    /// The connection was lost, or a call failed as a whole. Passing.
    #[error("the connection to the switch was lost: {0}")]
    Lost(String),
    /// The switch refuses what the controller cannot do without.
    #[error("the switch refused {what}: {reason}")]
    Refused {
        /// What was asked for.
        what: &'static str,
        /// What it said.
        reason: String,
    },
    /// The switch did not answer in time. Passing.
    #[error("the switch did not answer to {0} in time")]
    Timeout(&'static str),
    /// What is not the fabric's is flooded through one group, which could never be installed. The
    /// operator gave the switch too many ports.
    #[error("the switch has {count} ports, but can flood to {most} at most; start it with fewer")]
    TooManyPorts {
        /// Its ports.
        count: usize,
        /// The most that the controller can use.
        most: usize,
    },
}

impl DriverError {
    /// Whether trying again is of no use before an operator did something.
    pub(crate) const fn is_final(&self) -> bool {
        matches!(self, Self::Fenced { .. } | Self::InUse { .. } | Self::TooManyPorts { .. })
    }
}

/// Why a single update was not made.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum UpdateError {
    /// There is an entry with this key already.
    #[error("it is there already: {0}")]
    Exists(String),
    /// There is no such entry.
    #[error("it is not there: {0}")]
    NotFound(String),
    /// The switch cannot or will not; the table may be full.
    #[error("{0}")]
    Refused(String),
}

/// What a driver can do.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Capabilities {
    /// The kind of driver, for people.
    pub driver: &'static str,
    /// The most updates of a batch.
    pub batch_max: usize,
    /// Whether entries that are to end do so in the switch, and say what they have left.
    pub keeps_time: bool,
}

/// Whether a switch kept its tables.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Pipeline {
    /// It had the pipeline, its tables are as they were.
    Kept,
    /// It got the pipeline, its tables are empty.
    Pushed,
}

/// What a switch has.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Installed {
    /// Entries, groups and settings.
    pub tables: Tables,
    /// What hit the entries.
    pub counters: BTreeMap<Key, Counter>,
}

/// The most copies of frames in one event.
pub const PACKET_INS_AT_ONCE: usize = 256;

/// What a switch says of its own accord.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum SwitchEvent {
    /// The driver is of no use any more.
    Broken(DriverError),
    /// Copies of frames, by rules of `notify`.
    PacketIns {
        /// The copies, [`PACKET_INS_AT_ONCE`] at most.
        packets: Vec<PacketIn>,
        /// How many were lost on their way here since the last event, because nobody took them.
        lost: u64,
    },
}

/// A connection to a switch, on which this controller is the primary.
///
/// After an error of a whole call, or [`SwitchEvent::Broken`], a driver is thrown away and a new
/// connection starts from a full reading.
#[tonic::async_trait]
pub trait SwitchDriver: Send {
    /// What it can do.
    fn capabilities(&self) -> Capabilities;

    /// Makes sure that the switch runs the pipeline. Pushing it empties the tables, so it is pushed
    /// only onto a switch that has another.
    ///
    /// # Errors
    /// [`DriverError`].
    async fn ensure_pipeline(&mut self) -> Result<Pipeline, DriverError>;

    /// The switch's ports, if it tells.
    ///
    /// # Errors
    /// [`DriverError`].
    async fn ports(&mut self) -> Result<Ports, DriverError>;

    /// Makes updates (at most [`Capabilities::batch_max`]), in any order, each for itself; one
    /// result per update.
    ///
    /// # Errors
    /// [`DriverError`]: nobody knows which of them were made.
    async fn apply(
        &mut self,
        batch: &[TableUpdate],
    ) -> Result<Vec<Result<(), UpdateError>>, DriverError>;

    /// Reads all that can be programmed.
    ///
    /// # Errors
    /// [`DriverError`].
    async fn read(&mut self) -> Result<Installed, DriverError>;

    /// The next event. Can be dropped without losing one.
    async fn next_event(&mut self) -> SwitchEvent;
}

/// Makes connections to a switch.
#[tonic::async_trait]
pub trait SwitchConnector: Send {
    /// Where the switch is, for people.
    fn uri(&self) -> String;

    /// Reads the tables without becoming the primary, so that whoever is goes on.
    ///
    /// # Errors
    /// [`DriverError`].
    async fn look(&mut self) -> Result<Tables, DriverError>;

    /// Connects and becomes the primary.
    ///
    /// # Errors
    /// [`DriverError`].
    async fn connect(
        &mut self,
        election_id: ElectionId,
    ) -> Result<Box<dyn SwitchDriver>, DriverError>;
}
