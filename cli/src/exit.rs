//! The exit codes of the binary, with which scripts can distinguish failures.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::process::ExitCode;

use bluebridge::{Error, JoinError};
use bluebridge_bench::swap::SwapError;
use bluebridge_blockdev::device::{DiskError, MapError};
use bluebridge_blockdev::server::LockError;
use bluebridge_controller::ControllerError;
use bluebridge_controller::driver::DriverError;
use bluebridge_controller::store::StoreError;
use bluebridge_memserver::kept::Foreign;
use bluebridge_memserver::{ArenaFileError, ReserveError, StartError};
use bluebridge_northbound::MembershipError;
use bluebridge_northbound::tls::TlsFileError;
use bluebridge_rack::RackError;
use bluebridge_rack::control::ControlError;
use bluebridge_rack::namespace::UserNamespaceError;
use bluebridge_rack::network::NetworkError;
use bluebridge_switch::agent::AgentError;
use bluebridge_switch::dataplane::{PlaneError, PortError};
use bluebridge_switch::offload::OffloadError;
use bluebridge_transport::OpenError;
use bluebridge_transport::udp::NoFrames;
use serde::Serialize;

/// The exit codes of every subcommand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Exit {
    /// Success.
    Ok = 0,
    /// A failure for another reason.
    Failure = 1,
    /// The command line is invalid.
    Usage = 2,
    /// A server, switch or controller refused.
    Refused = 3,
    /// There was no response in time.
    Unreachable = 4,
    /// This user lacks the permission.
    NotPermitted = 5,
    /// `rack exec`: the program exists but cannot be executed, as in a shell.
    NotExecutable = 126,
    /// `rack exec`: the program was not found.
    NoProgram = 127,
}

/// The command line is invalid in a way that only the command itself can detect.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct UsageError(pub(crate) String);

/// This user lacks the permission for the command line's request.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct NotPermittedError(pub(crate) &'static str);

/// A file that the command line names cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {}: {source}; correct the path", path.display())]
pub(crate) struct InputError {
    pub(crate) path: PathBuf,
    pub(crate) source: std::io::Error,
}

/// A program could not be run in a node of a rack.
#[derive(Debug, thiserror::Error)]
#[error("cannot run {program}: {source}")]
pub(crate) struct ExecError {
    pub(crate) program: String,
    pub(crate) source: std::io::Error,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

impl Exit {
    /// The code for a failed command, from the first cause that has one.
    pub(crate) fn of(error: &anyhow::Error) -> Self {
        let mut causes = error.chain().filter_map(|cause| {
            if let Some(error) = cause.downcast_ref::<RackError>() {
                Some(of_rack(error))
            } else if let Some(error) = cause.downcast_ref::<Error>() {
                Some(of_operation(error))
            } else if let Some(error) = cause.downcast_ref::<JoinError>() {
                Some(of_join(error))
            } else if let Some(error) = cause.downcast_ref::<MembershipError>() {
                Some(of_membership(error))
            } else if let Some(error) = cause.downcast_ref::<ControlError>() {
                Some(of_control(error))
            } else if let Some(error) = cause.downcast_ref::<ExecError>() {
                Some(of_exec(error))
            } else if let Some(error) = cause.downcast_ref::<NetworkError>() {
                Some(of_network(error))
            } else if let Some(error) = cause.downcast_ref::<TlsFileError>() {
                Some(of_tls_file(error))
            } else if let Some(error) = cause.downcast_ref::<InputError>() {
                Some(of_input(&error.source))
            } else if let Some(error) = cause.downcast_ref::<SwapError>() {
                Some(of_swap(error))
            } else if let Some(error) = cause.downcast_ref::<DiskError>() {
                Some(of_disk(error))
            } else if cause.is::<LockError>() {
                Some(Self::NotPermitted)
            } else if cause.is::<UsageError>() {
                Some(Self::Usage)
            } else if cause.is::<NotPermittedError>() {
                Some(Self::NotPermitted)
            } else if let Some(error) = cause.downcast_ref::<std::io::Error>() {
                Some(of_io(error))
            } else {
                of_daemon(cause)
            }
        });
        causes.next().unwrap_or(Self::Failure)
    }
}

/// The code for the errors of the daemons in this binary; `None` for other errors.
fn of_daemon(cause: &(dyn std::error::Error + 'static)) -> Option<Exit> {
    if let Some(error) = cause.downcast_ref::<OpenError>() {
        Some(of_open(error))
    } else if let Some(error) = cause.downcast_ref::<ReserveError>() {
        Some(of_reserve(error))
    } else if let Some(StartError::Memory(error)) = cause.downcast_ref::<StartError>() {
        Some(of_reserve(error))
    } else if let Some(StartError::Damaged(_)) = cause.downcast_ref::<StartError>() {
        // As of a file that is found to be damaged earlier.
        Some(Exit::Usage)
    } else if let Some(error) = cause.downcast_ref::<ArenaFileError>() {
        Some(of_arena_file(error))
    } else if let Some(error) = cause.downcast_ref::<PortError>() {
        Some(of_port(error))
    } else if let Some(error) = cause.downcast_ref::<PlaneError>() {
        Some(of_plane(error))
    } else if let Some(error) = cause.downcast_ref::<AgentError>() {
        Some(match error {
            AgentError::DeviceId => Exit::Usage,
            AgentError::Listen { source, .. } => of_listen(source),
            _ => Exit::Failure,
        })
    } else if let Some(error) = cause.downcast_ref::<DriverError>() {
        Some(of_driver(error))
    } else {
        cause.downcast_ref::<ControllerError>().map(of_controller)
    }
}

fn of_swap(error: &SwapError) -> Exit {
    match error {
        SwapError::NotRoot => Exit::NotPermitted,
        SwapError::FileSystem { .. } => Exit::Usage,
        SwapError::System { source, .. } => of_io(source),
        _ => Exit::Failure,
    }
}

fn of_disk(error: &DiskError) -> Exit {
    match error {
        DiskError::InUse { .. } | DiskError::TakenOver => Exit::Refused,
        DiskError::Map(MapError::NoDisk) | DiskError::Options(_) => Exit::Usage,
        DiskError::Memory(error) | DiskError::SlabsLeft { first: error, .. } => of_operation(error),
        DiskError::NotKept => Exit::Unreachable,
        _ => Exit::Failure,
    }
}

fn of_driver(error: &DriverError) -> Exit {
    match error {
        DriverError::InUse { .. } | DriverError::Fenced { .. } | DriverError::Refused { .. } => {
            Exit::Refused
        }
        DriverError::Lost(_) | DriverError::Timeout(_) => Exit::Unreachable,
        DriverError::Listen { kind, .. } => of_listen(&(*kind).into()),
        DriverError::OtherSwitch { .. } => Exit::Refused,
        DriverError::WrongProtocol { .. } => Exit::Usage,
        _ => Exit::Failure,
    }
}

fn of_open(error: &OpenError) -> Exit {
    match error {
        OpenError::Interface { .. } => Exit::Usage,
        OpenError::Frames(NoFrames::Permission) => Exit::NotPermitted,
        OpenError::SocketOption { error, .. } | OpenError::Bind { error, .. } => of_io(error),
        _ => Exit::Failure,
    }
}

fn of_reserve(error: &ReserveError) -> Exit {
    match error {
        ReserveError::Size { .. } => Exit::Usage,
        ReserveError::Lock { .. } => Exit::NotPermitted,
        _ => Exit::Failure,
    }
}

fn of_arena_file(error: &ArenaFileError) -> Exit {
    match error {
        ArenaFileError::Foreign { what: Foreign::Directory, .. } => Exit::Usage,
        ArenaFileError::Foreign { .. } | ArenaFileError::ReadOnly { .. } => Exit::NotPermitted,
        ArenaFileError::Io { error, .. } => of_input(error),
        ArenaFileError::Copy { .. }
        | ArenaFileError::Damaged { .. }
        | ArenaFileError::Missing { .. }
        | ArenaFileError::NoArena { .. }
        | ArenaFileError::NoDirectory { .. }
        | ArenaFileError::OnDisk { .. }
        | ArenaFileError::OfFile { .. }
        | ArenaFileError::OtherShape { .. }
        | ArenaFileError::OtherVersion { .. }
        | ArenaFileError::Size(_)
        | ArenaFileError::UnknownId { .. } => Exit::Usage,
        _ => Exit::Failure,
    }
}

fn of_port(error: &PortError) -> Exit {
    match error {
        PortError::Invalid { .. } | PortError::NoInterface(_) | PortError::Unknown(_) => {
            Exit::Usage
        }
        PortError::Plane(error) => of_plane(error),
        _ => Exit::Failure,
    }
}

fn of_plane(error: &PlaneError) -> Exit {
    match error {
        PlaneError::NeedsRoot(_) => Exit::NotPermitted,
        PlaneError::Io { source, .. } => of_io(source),
        _ => Exit::Failure,
    }
}

fn of_io(error: &std::io::Error) -> Exit {
    match error.kind() {
        ErrorKind::PermissionDenied => Exit::NotPermitted,
        _ => Exit::Failure,
    }
}

fn of_controller(error: &ControllerError) -> Exit {
    match error {
        ControllerError::Listen { source, .. } => of_listen(source),
        ControllerError::Store(error) => match &**error {
            StoreError::NoFolder { .. } => Exit::Usage,
            StoreError::Open { source, .. } => of_file(source),
            StoreError::OpenToOthers { .. } => Exit::NotPermitted,
            _ => Exit::Failure,
        },
        ControllerError::Tls(error) => of_tls_file(error),
        ControllerError::WasFenced { .. } => Exit::Refused,
        ControllerError::Switch(error) => of_driver(error),
        _ => Exit::Failure,
    }
}

/// A file that this user, or no user, may read or write.
fn of_file(error: &std::io::Error) -> Exit {
    match error.kind() {
        ErrorKind::ReadOnlyFilesystem => Exit::NotPermitted,
        _ => of_io(error),
    }
}

/// A file that the command line names and that the command reads.
fn of_input(error: &std::io::Error) -> Exit {
    match error.kind() {
        ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::IsADirectory => Exit::Usage,
        _ => of_io(error),
    }
}

fn of_tls_file(error: &TlsFileError) -> Exit {
    match error {
        TlsFileError::Read { source, .. } => of_input(source),
        _ => Exit::Usage,
    }
}

/// An address that is not local is invalid usage; one that is in use or forbidden is not.
fn of_listen(error: &std::io::Error) -> Exit {
    match error.kind() {
        ErrorKind::AddrNotAvailable => Exit::Usage,
        _ => of_io(error),
    }
}

/// The same codes as in a shell.
fn of_exec(error: &ExecError) -> Exit {
    match error.source.kind() {
        ErrorKind::NotFound => Exit::NoProgram,
        _ => Exit::NotExecutable,
    }
}

fn of_operation(error: &Error) -> Exit {
    match error {
        Error::Busy { .. }
        | Error::Drained { .. }
        | Error::Expelled { .. }
        | Error::PastEnd { .. }
        | Error::Refused { .. } => Exit::Refused,
        Error::NoMemoryNode
        | Error::OutcomeUnknown { .. }
        | Error::TimedOut { .. }
        | Error::TooManyHops { .. }
        | Error::Unreachable { .. } => Exit::Unreachable,
        Error::Length | Error::Pointer(_) | Error::WrongNode { .. } | Error::WrongSpace => {
            Exit::Usage
        }
        _ => Exit::Failure,
    }
}

fn of_join(error: &JoinError) -> Exit {
    match error {
        JoinError::Membership(error) => of_membership(error),
        JoinError::Interface { .. } | JoinError::Options(_) => Exit::Usage,
        JoinError::Open(error) => of_open(error),
        _ => Exit::Failure,
    }
}

fn of_membership(error: &MembershipError) -> Exit {
    match error {
        MembershipError::InvalidUri { .. } => Exit::Usage,
        MembershipError::Unreachable { .. } => Exit::Unreachable,
        MembershipError::Taken(_)
        | MembershipError::Invalid(_)
        | MembershipError::NotPrevious(_)
        | MembershipError::Exhausted(_)
        | MembershipError::Closed { .. }
        | MembershipError::Expelled(_)
        | MembershipError::Unknown(_)
        | MembershipError::Untrusted { .. } => Exit::Refused,
        _ => Exit::Failure,
    }
}

fn of_control(error: &ControlError) -> Exit {
    match error {
        ControlError::Connection(error) => of_membership(error),
        ControlError::NotEmbedded | ControlError::NotFound { .. } => Exit::Usage,
        ControlError::Refused { .. } => Exit::Refused,
        ControlError::Silent(_) | ControlError::Unreachable { .. } => Exit::Unreachable,
        ControlError::BadResponse { .. } | ControlError::Runtime(_) => Exit::Failure,
    }
}

fn of_rack(error: &RackError) -> Exit {
    use bluebridge_rack::DaemonFailure;
    use bluebridge_rack::state::StateError;
    match error {
        RackError::Spec(_) | RackError::NoDaemon(_) | RackError::NoNode { .. } => Exit::Usage,
        RackError::State(
            StateError::Choice(_)
            | StateError::None
            | StateError::Several(_)
            | StateError::TooLong { .. }
            | StateError::Unknown(_),
        )
        | RackError::Elsewhere { .. } => Exit::Usage,
        RackError::Control(error) => of_control(error),
        RackError::State(StateError::Io { source, .. }) | RackError::Io { source, .. } => {
            of_io(source)
        }
        RackError::EbpfNeedsRoot
        | RackError::State(StateError::NotPrivate(_))
        | RackError::UserNamespace(UserNamespaceError::Forbidden { .. }) => Exit::NotPermitted,
        RackError::Daemon { reason: DaemonFailure::Late { .. }, .. } => Exit::Unreachable,
        // Its own code is that of its error.
        RackError::NotStarted { status, .. } => match status.code() {
            Some(2) => Exit::Usage,
            Some(3) => Exit::Refused,
            Some(4) => Exit::Unreachable,
            Some(5) => Exit::NotPermitted,
            _ => Exit::Failure,
        },
        RackError::Namespace(error) if error.is_permission() => Exit::NotPermitted,
        RackError::Network { source, .. } => of_network(source),
        _ => Exit::Failure,
    }
}

fn of_network(error: &NetworkError) -> Exit {
    match error {
        NetworkError::NoInterface { .. }
        | NetworkError::NotAnInterfaceName { .. }
        | NetworkError::Offload(OffloadError::NotAnInterfaceName { .. }) => Exit::Usage,
        NetworkError::Deadline { .. } => Exit::Unreachable,
        error if error.is_permission() => Exit::NotPermitted,
        _ => Exit::Failure,
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use anyhow::Context;

    use super::*;

    #[test]
    fn what_the_system_forbids_has_its_own_code() {
        let io = |kind: ErrorKind| io::Error::from(kind);
        let file = |kind| Err::<(), _>(io(kind)).context("cannot make x").expect_err("failed");
        assert_eq!(Exit::of(&file(ErrorKind::PermissionDenied)), Exit::NotPermitted);
        assert_eq!(Exit::of(&file(ErrorKind::StorageFull)), Exit::Failure);
        let socket = |kind| {
            let doing = "open a packet socket on lo".to_owned();
            PortError::from(PlaneError::Io { doing, source: io(kind) }).into()
        };
        assert_eq!(Exit::of(&socket(ErrorKind::PermissionDenied)), Exit::NotPermitted);
        assert_eq!(Exit::of(&socket(ErrorKind::NotFound)), Exit::Failure);
    }
}
