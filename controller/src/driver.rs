//! The interface between the controller and a switch.

mod openflow;
mod p4runtime;
mod protocol;

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::SocketAddr;

use bluebridge_p4::pipeline::{Action, Counter, DropReason, Key};

use crate::core::{Ports, Tables};
use crate::plan::TableUpdate;
use crate::redirect::PacketIn;
use crate::store::ElectionId;

pub use openflow::{OpenFlowAddress, OpenFlowConnector, OpenFlowDriver, OpenFlowSwitch};
pub use p4runtime::{P4RuntimeConnector, P4RuntimeDriver};

/// Why the controller cannot work with a switch.
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
    /// The store has no endpoints, but the switch serves some: they belong to another controller, or
    /// the store is the wrong one. The tables were only read, and the other controller continues.
    #[error(
        "the store is empty, but the switch has entries of {endpoints} endpoints, which belong to another controller. \
         Use the correct --store; --force empties the switch, and every endpoint must join again"
    )]
    InUse {
        /// The number of endpoints with entries in the switch.
        endpoints: usize,
    },
    /// The controller cannot listen on the address to which the switch connects. An operator must act.
    #[error("cannot listen on {address} for the switch: {reason}; {}", listen_advice(*kind))]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The kind of the system's error.
        kind: ErrorKind,
        /// The system's error.
        reason: String,
    },
    /// The connection was lost, or a call failed as a whole. Temporary.
    #[error("the connection to the switch was lost: {0}")]
    Lost(String),
    /// It is another switch than the one whose datapath id was given. It is tried again, because the right one
    /// may come.
    #[error(
        "the switch has the datapath id {found:016x}, but {wanted:016x} was given; correct the address of the \
         switch, or the switch"
    )]
    OtherSwitch {
        /// Its datapath id.
        found: u64,
        /// The required one.
        wanted: u64,
    },
    /// The switch refuses something that the controller needs.
    #[error("the switch refused {what}: {reason}")]
    Refused {
        /// The refused request.
        what: &'static str,
        /// The switch's reason.
        reason: String,
    },
    /// The switch did not respond in time. Temporary.
    #[error("the switch did not respond in time: {0}")]
    Timeout(&'static str),
    /// Traffic outside the fabric is flooded through one group, which could never be installed. The
    /// operator configured too many ports.
    #[error("the switch has {count} ports, but can flood to {most} at most; start it with fewer")]
    TooManyPorts {
        /// The number of its ports.
        count: usize,
        /// The most ports that the controller can use.
        most: usize,
    },
    /// The switch speaks another protocol than its address says. It is tried again, because another switch may
    /// get the address.
    #[error(
        "{address} looks like {found}, not like {expected}; write {scheme}://{address} as the address of the switch"
    )]
    WrongProtocol {
        /// The address, without a protocol.
        address: String,
        /// What seems to be there.
        found: &'static str,
        /// What the address says.
        expected: &'static str,
        /// The name of its protocol in an address.
        scheme: &'static str,
    },
}

impl DriverError {
    /// Explains why a P4Runtime server at an address does not respond, if an OpenFlow switch is there.
    pub async fn of_openflow_at(address: SocketAddr) -> Option<Self> {
        let failed = Self::Lost(String::new());
        let explained = protocol::explain_p4runtime(failed, &address.to_string()).await;
        matches!(explained, Self::WrongProtocol { .. }).then_some(explained)
    }

    /// Whether a retry is useless until an operator acts.
    pub(crate) const fn is_final(&self) -> bool {
        matches!(
            self,
            Self::Fenced { .. }
                | Self::InUse { .. }
                | Self::Listen { .. }
                | Self::TooManyPorts { .. }
        )
    }
}

/// What to do about an address on which the controller cannot listen.
const fn listen_advice(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::AddrInUse => "end the program that uses it, or choose another address",
        ErrorKind::AddrNotAvailable => "use an address of this machine",
        ErrorKind::PermissionDenied => "choose a port above 1023, or start the controller as root",
        _ => "choose another address",
    }
}

/// Why a single update failed.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum UpdateError {
    /// An entry with this key exists already.
    #[error("it exists already: {0}")]
    Exists(String),
    /// There is no such entry.
    #[error("it does not exist: {0}")]
    NotFound(String),
    /// The switch refuses it; the table may be full.
    #[error("{0}")]
    Refused(String),
}

/// The capabilities of a driver.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Capabilities {
    /// The kind of driver, for people.
    pub driver: &'static str,
    /// The most updates of a batch.
    pub batch_max: usize,
    /// Whether the switch itself ends expired entries and reports their remaining time.
    pub keeps_time: bool,
    /// Whether [`SwitchEvent::TablesChanged`] follows each change of its pipeline and its tables by any client.
    pub announces_changes: bool,
}

/// Whether a switch kept its tables.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Pipeline {
    /// It had the pipeline; its tables did not change.
    Kept,
    /// The pipeline was pushed; its tables are empty.
    Pushed,
}

/// The contents of a switch.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Installed {
    /// Entries, groups and settings.
    pub tables: Tables,
    /// The packets and bytes that hit the entries.
    pub counters: BTreeMap<Key, Counter>,
    /// The frames dropped, by reason. A reason is missing if the switch does not count it.
    pub drops: BTreeMap<DropReason, u64>,
}

impl Installed {
    /// The entries whose actions are known, with their counters.
    pub fn entries(&self) -> impl Iterator<Item = (&Key, &Action, Counter)> {
        self.tables.entries.iter().filter_map(|(key, body)| {
            let counter = self.counters.get(key).copied().unwrap_or_default();
            Some((key, body.action.as_ref()?, counter))
        })
    }
}

/// The most copies of frames in one event.
pub const PACKET_INS_AT_ONCE: usize = 256;

/// Events that a switch sends without a request.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum SwitchEvent {
    /// The driver cannot be used any more.
    Broken(DriverError),
    /// Copies of frames, by rules of `notify`.
    PacketIns {
        /// The copies, [`PACKET_INS_AT_ONCE`] at most.
        packets: Vec<PacketIn>,
        /// How many were lost since the last event because they were not read in time.
        lost: u64,
    },
    /// Ports were added, removed or changed; [`SwitchDriver::ports`] lists them.
    PortsChanged,
    /// The pipeline or the tables may have changed, also by this controller, or changes are announced no more.
    TablesChanged,
}

/// A connection to a switch, on which this controller is the primary.
///
/// After an error of a whole call, or [`SwitchEvent::Broken`], the driver must be dropped; a new
/// connection starts with a full reading.
#[tonic::async_trait]
pub trait SwitchDriver: Send {
    /// Its capabilities.
    fn capabilities(&self) -> Capabilities;

    /// Makes sure that the switch has the pipeline. A push empties the tables, so it is done
    /// only if the switch has another pipeline.
    ///
    /// # Errors
    /// [`DriverError`].
    async fn ensure_pipeline(&mut self) -> Result<Pipeline, DriverError>;

    /// The switch's ports, if it lists them.
    ///
    /// # Errors
    /// [`DriverError`].
    async fn ports(&mut self) -> Result<Ports, DriverError>;

    /// Executes updates (at most [`Capabilities::batch_max`]), in any order, independently; one
    /// result per update.
    ///
    /// # Errors
    /// [`DriverError`]: any of them may have been applied.
    async fn apply(
        &mut self,
        batch: &[TableUpdate],
    ) -> Result<Vec<Result<(), UpdateError>>, DriverError>;

    /// Reads everything that can be programmed.
    ///
    /// # Errors
    /// [`DriverError`].
    async fn read(&mut self) -> Result<Installed, DriverError>;

    /// The next event. Can be dropped without losing one.
    async fn next_event(&mut self) -> SwitchEvent;
}

#[tonic::async_trait]
impl SwitchConnector for Box<dyn SwitchConnector> {
    fn uri(&self) -> String {
        (**self).uri()
    }

    async fn look(&mut self) -> Result<Installed, DriverError> {
        (**self).look().await
    }

    async fn connect(
        &mut self,
        election_id: ElectionId,
    ) -> Result<Box<dyn SwitchDriver>, DriverError> {
        (**self).connect(election_id).await
    }
}

/// Makes connections to a switch.
#[tonic::async_trait]
pub trait SwitchConnector: Send {
    /// The address of the switch, for people.
    fn uri(&self) -> String;

    /// Reads the tables without becoming the primary, so that the present primary continues.
    ///
    /// # Errors
    /// [`DriverError`].
    async fn look(&mut self) -> Result<Installed, DriverError>;

    /// Connects and becomes the primary.
    ///
    /// # Errors
    /// [`DriverError`].
    async fn connect(
        &mut self,
        election_id: ElectionId,
    ) -> Result<Box<dyn SwitchDriver>, DriverError>;
}
