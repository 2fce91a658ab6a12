//! Errors of racks.

use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

use crate::bmv2::Bmv2Error;
use crate::control::ControlError;
use crate::namespace::{NamespaceError, UserNamespaceError};
use crate::network::NetworkError;
use crate::spec::{Node, RackName, SpecError};
use crate::state::{STATE_VARIABLE, StateError};

/// Why a rack could not be built, used or taken down.
#[derive(Debug, thiserror::Error)]
pub enum RackError {
    /// The caller cancelled the operation.
    #[error("interrupted")]
    Cancelled,
    /// A controller or a switch does not respond, or refuses.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// A daemon did not start; the error contains the end of its log.
    #[error("{name} {reason}; the end of its log:\n{log_tail}")]
    Daemon {
        /// The daemon.
        name: String,
        /// The reason.
        reason: DaemonFailure,
        /// The end of its log.
        log_tail: String,
    },
    /// A memory server did not start, and has said why and what to do.
    #[error("{name} did not start: {words}")]
    NotStarted {
        /// The daemon.
        name: String,
        /// The cause and the remedy.
        words: String,
        /// How it ended.
        status: ExitStatus,
    },
    /// The eBPF data plane cannot be loaded in a user namespace.
    #[error("the ebpf switch needs root; use --switch soft without root")]
    EbpfNeedsRoot,
    /// clang was missing when this program was built.
    #[error(
        "this build has no eBPF data plane: install clang and build again, or use --switch soft"
    )]
    EbpfNotBuilt,
    /// A switch that is not the embedded one needs root.
    #[error("{0} needs root; use --switch soft")]
    NeedsRoot(&'static str),
    /// Open vSwitch is not installed.
    #[error(
        "Open vSwitch is not installed; install the package openvswitch-switch, or use another --switch"
    )]
    OvsNotInstalled,
    /// BMv2 cannot be started.
    #[error(transparent)]
    Bmv2(#[from] Bmv2Error),
    /// A part of the servers' memory could not be removed.
    #[error("cannot {doing} {}: {source}; {remedy}, then `bluebridge rack down` again", path.display())]
    LeftMemory {
        /// The failed action.
        doing: &'static str,
        /// The file, or the pin of its memory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
        /// What the user can do.
        remedy: String,
    },
    /// A file, mount or process operation failed.
    #[error("cannot {action}: {source}")]
    Io {
        /// The failed action.
        action: String,
        /// The system's error.
        source: io::Error,
    },
    /// A namespace cannot be created or entered.
    #[error(transparent)]
    Namespace(#[from] NamespaceError),
    /// A file with a name that the rack needs belongs to another program.
    #[error("{} exists already and does not belong to this rack; remove it or choose another --rack", .0.display())]
    NamespaceTaken(PathBuf),
    /// Links or routes cannot be created.
    #[error("in {node}: {source}")]
    Network {
        /// The node.
        node: Node,
        /// The reason.
        source: NetworkError,
    },
    /// The rack with this name is recorded in another directory.
    #[error(
        "the rack {name} is recorded in {}: set {STATE_VARIABLE}={} to use it", root.display(), root.display()
    )]
    Elsewhere {
        /// The rack.
        name: RackName,
        /// The directory.
        root: PathBuf,
    },
    /// The rack has no such daemon.
    #[error("the rack has no daemon {0}; `bluebridge rack status` lists its daemons")]
    NoDaemon(String),
    /// The rack has no such node.
    #[error("the rack {name} has no node {node}; `bluebridge rack status` lists its nodes")]
    NoNode {
        /// The rack.
        name: RackName,
        /// The requested node.
        node: Node,
    },
    /// The builder of the rack died, or the record was removed.
    #[error("the rack {0} has no record; `bluebridge rack down --rack {0}` removes the rest of it")]
    NotBuilt(RackName),
    /// The process that holds a rack without root is gone.
    #[error(
        "the rack {0} lost the process that holds its namespaces; take it down and build it again"
    )]
    NotHeld(RackName),
    /// The specification is wrong.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The record cannot be used.
    #[error(transparent)]
    State(#[from] StateError),
    /// No user namespace.
    #[error(transparent)]
    UserNamespace(#[from] UserNamespaceError),
}

/// How a daemon failed to start.
#[derive(Debug)]
pub enum DaemonFailure {
    /// It ended.
    Exited(ExitStatus),
    /// It did not report ready in time.
    Late {
        /// The time it was waited for.
        waited: Duration,
        /// Its last reported action.
        doing: Option<String>,
    },
}

impl std::fmt::Display for DaemonFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Exited(status) => write!(f, "ended before it was ready ({status})"),
            Self::Late { waited, doing: None } => write!(f, "was not ready after {waited:.1?}"),
            Self::Late { waited, doing: Some(doing) } => {
                write!(f, "was not ready after {waited:.1?}, but still {doing}")
            }
        }
    }
}

/// Names the failed action, for `map_err`.
pub(crate) fn failed(action: impl Into<String>) -> impl FnOnce(io::Error) -> RackError {
    |source| RackError::Io { action: action.into(), source }
}
