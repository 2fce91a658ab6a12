//! How the binary ends, so that scripts can tell one failure from another.

use std::process::ExitCode;

use bluebridge::{Error, JoinError};
use bluebridge_northbound::MembershipError;
use bluebridge_transport::OpenError;

use crate::control::ControlError;
use crate::namespace::UserNamespaceError;
use crate::network::NetworkError;
use crate::rack::RackError;

/// The exit codes of every subcommand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Done.
    Ok = 0,
    /// It did not work, for a reason that is none of the others.
    Failure = 1,
    /// The command line asks for something that cannot be.
    Usage = 2,
    /// A server, switch or controller refused.
    Refused = 3,
    /// Nobody answered in time.
    Unreachable = 4,
    /// The system does not permit it to this user.
    NotPermitted = 5,
}

/// The command line asks for something that cannot be, which only the command itself could see.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct UsageError(pub(crate) String);

/// The system does not permit to this user what the command line asks for.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct NotPermittedError(pub(crate) &'static str);

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
            } else if cause.is::<UsageError>() {
                Some(Self::Usage)
            } else if cause.is::<NotPermittedError>() {
                Some(Self::NotPermitted)
            } else {
                cause.downcast_ref::<NetworkError>().map(of_network)
            }
        });
        causes.next().unwrap_or(Self::Failure)
    }
}

fn of_operation(error: &Error) -> Exit {
    match error {
        Error::Busy { .. } | Error::Refused { .. } => Exit::Refused,
        Error::NoMemoryNode
        | Error::OutcomeUnknown { .. }
        | Error::TimedOut { .. }
        | Error::TooManyHops { .. }
        | Error::Unreachable { .. } => Exit::Unreachable,
        Error::Length | Error::WrongNode { .. } | Error::WrongSpace => Exit::Usage,
        _ => Exit::Failure,
    }
}

fn of_join(error: &JoinError) -> Exit {
    match error {
        JoinError::Membership(error) => of_membership(error),
        JoinError::Interface { .. } | JoinError::Open(OpenError::Interface { .. }) => Exit::Usage,
        JoinError::Open(OpenError::SocketOption { error, .. } | OpenError::Bind { error, .. })
            if error.kind() == std::io::ErrorKind::PermissionDenied =>
        {
            Exit::NotPermitted
        }
        _ => Exit::Failure,
    }
}

fn of_membership(error: &MembershipError) -> Exit {
    match error {
        MembershipError::InvalidUri { .. } => Exit::Usage,
        MembershipError::Unreachable { .. } => Exit::Unreachable,
        MembershipError::Taken(_)
        | MembershipError::Invalid(_)
        | MembershipError::Exhausted(_)
        | MembershipError::Expelled(_) => Exit::Refused,
        _ => Exit::Failure,
    }
}

fn of_control(error: &ControlError) -> Exit {
    match error {
        ControlError::Refused { .. } => Exit::Refused,
        ControlError::Unreachable { .. } => Exit::Unreachable,
        ControlError::BadAnswer { .. } | ControlError::Runtime(_) => Exit::Failure,
    }
}

fn of_rack(error: &RackError) -> Exit {
    use crate::rack::DaemonFailure;
    use crate::rack::state::StateError;
    let io_permission = |source: &std::io::Error| match source.kind() {
        std::io::ErrorKind::PermissionDenied => Exit::NotPermitted,
        _ => Exit::Failure,
    };
    match error {
        RackError::Spec(_) | RackError::NoNode { .. } => Exit::Usage,
        RackError::State(StateError::Unknown(_)) => Exit::Usage,
        RackError::State(StateError::Io { source, .. }) | RackError::Io { source, .. } => {
            io_permission(source)
        }
        RackError::EbpfNeedsRoot
        | RackError::State(StateError::NotPrivate(_))
        | RackError::UserNamespace(UserNamespaceError::Forbidden { .. }) => Exit::NotPermitted,
        RackError::Daemon { reason: DaemonFailure::Late(_), .. } => Exit::Unreachable,
        RackError::Namespace(error) if error.is_permission() => Exit::NotPermitted,
        RackError::Network { source, .. } => of_network(source),
        _ => Exit::Failure,
    }
}

fn of_network(error: &NetworkError) -> Exit {
    match error {
        NetworkError::NoInterface { .. } | NetworkError::NotAnInterfaceName { .. } => Exit::Usage,
        NetworkError::Deadline { .. } => Exit::Unreachable,
        error if error.is_permission() => Exit::NotPermitted,
        _ => Exit::Failure,
    }
}
