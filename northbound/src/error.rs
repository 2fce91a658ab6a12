//! Why an endpoint is none.

use tonic::{Code, Status};

/// Why joining or leaving failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MembershipError {
    /// The caller's controller address is no URI of the form `http://host:port`.
    #[error("{uri} is no address of a controller: {reason}; write http://host:port")]
    InvalidUri {
        /// What was given.
        uri: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The controller was not reached, or was not ready, before the deadline. Is it running?
    #[error("the controller at {uri} did not answer in time: {reason}")]
    Unreachable {
        /// Its address.
        uri: String,
        /// What went wrong last.
        reason: String,
    },
    /// A live endpoint has the name, the port or the MAC address; end it or choose another.
    #[error("{0}")]
    Taken(String),
    /// The caller's registration is wrong.
    #[error("the controller refused the registration: {0}")]
    Invalid(String),
    /// The rack has no room left for another endpoint.
    #[error("the controller has no room: {0}")]
    Exhausted(String),
    /// Another incarnation has taken over, or the controller does not know this one; join again.
    #[error("this endpoint is no longer a member: {0}")]
    Expelled(String),
    /// The controller's answer breaks the protocol: the two are of different versions.
    #[error("the controller's answer makes no sense ({0}); do its version and this one agree?")]
    BadAnswer(&'static str),
    /// The controller failed at its own work.
    #[error("the controller failed: {0}")]
    Controller(String),
    /// The system gave no thread or runtime for the heartbeats.
    #[error("cannot start the heartbeats: {0}")]
    Runtime(String),
}

impl MembershipError {
    /// Sorts a refused call by who can do something about it.
    pub(crate) fn of(uri: &str, status: &Status) -> Self {
        let text = status.message().to_owned();
        // A status with a cause was not sent by the controller but made of a broken connection.
        if std::error::Error::source(status).is_some() {
            return Self::Unreachable { uri: uri.to_owned(), reason: text };
        }
        match status.code() {
            Code::InvalidArgument
            | Code::OutOfRange
            | Code::PermissionDenied
            | Code::Unimplemented => Self::Invalid(text),
            Code::AlreadyExists => Self::Taken(text),
            Code::ResourceExhausted => Self::Exhausted(text),
            Code::NotFound | Code::FailedPrecondition => Self::Expelled(text),
            Code::Internal | Code::DataLoss => Self::Controller(text),
            _ => Self::Unreachable { uri: uri.to_owned(), reason: text },
        }
    }

    /// Whether the same call may succeed a little later.
    pub(crate) const fn is_passing(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Taken(_))
    }
}
