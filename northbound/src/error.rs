//! Errors of a membership.

use std::error::Error;
use std::fmt;
use std::io;
use std::sync::Arc;

use tonic::metadata::MetadataValue;
use tonic::{Code, Status, TimeoutExpired};

/// Errors of the system about its own or this process's open files (`ENFILE`, `EMFILE`).
const NO_FILES: [i32; 2] = [23, 24];

/// The field of a refusal's metadata with its reason, where its code is not enough.
const REASON: &str = "bluebridge-reason";
const NOT_PREVIOUS: &str = "not-previous";

/// A controller's refusal of contents, which [`MembershipError::NotPrevious`] reports.
#[must_use]
pub fn not_previous(words: String) -> Status {
    let mut status = Status::permission_denied(words);
    status.metadata_mut().insert(REASON, MetadataValue::from_static(NOT_PREVIOUS));
    status
}

/// Why joining or leaving failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MembershipError {
    /// The caller's controller address is not a URI of the form `http://host:port`.
    #[error("{uri} is not an address of a controller: {reason}; write http://host:port")]
    InvalidUri {
        /// The given address.
        uri: String,
        /// The reason.
        reason: String,
    },
    /// The controller was not reached, or was not ready, before the deadline; check that it is running.
    #[error("the controller at {uri} does not respond: {reason}")]
    Unreachable {
        /// Its address.
        uri: String,
        /// The last failure.
        reason: String,
        /// The connection's own error, if it was that.
        #[source]
        source: Option<ConnectionError>,
    },
    /// This process, or this machine, has no room for another open file, so no connection was tried.
    #[error(
        "cannot connect to the controller at {uri}: {reason} on this side; close files, or raise the limit \
         (`ulimit -n`)"
    )]
    OpenFiles {
        /// Its address.
        uri: String,
        /// The system's error.
        reason: String,
        /// The connection's own error.
        #[source]
        source: Option<ConnectionError>,
    },
    /// The controller accepted the connection and closed it without a response: it has just ended, or it
    /// does not accept this endpoint, and its alert with the reason was lost.
    #[error("the controller at {uri} closed the connection ({reason}); {}", closed_hint(uri))]
    Closed {
        /// Its address.
        uri: String,
        /// The connection's error.
        reason: String,
        /// The connection's own error.
        #[source]
        source: Option<ConnectionError>,
    },
    /// The two were connected, but one does not trust the other or uses another protocol. The
    /// certificates and options of TLS are wrong, and a retry is useless.
    #[error("the controller at {uri} was reached, but {reason}")]
    Untrusted {
        /// Its address.
        uri: String,
        /// The reason, and what to compare.
        reason: String,
        /// The connection's own error.
        #[source]
        source: Option<ConnectionError>,
    },
    /// A live endpoint has the name, the port or the MAC address; end it or choose another.
    #[error("{0}")]
    Taken(String),
    /// The caller's registration is wrong.
    #[error("the controller refused the registration: {0}")]
    Invalid(String),
    /// The caller showed contents of an earlier membership that are not those that the controller recorded last: its
    /// arena must begin empty, or its name is that of another endpoint.
    #[error("the controller refused the registration: {0}")]
    NotPrevious(String),
    /// The rack has no room for another endpoint.
    #[error("the controller has no room: {0}")]
    Exhausted(String),
    /// Another incarnation has taken over, or this one left or was removed; join again.
    #[error("this endpoint is no longer a member: {0}")]
    Expelled(String),
    /// The controller has no record of this endpoint: a client was silent for a long time, or the
    /// controller runs with another store.
    #[error("the controller has no record of this endpoint: {0}")]
    Unknown(String),
    /// The caller stopped joining while no controller responded.
    #[error("joining was stopped")]
    GivenUp,
    /// The controller's response breaks the protocol: the two have different versions.
    #[error("the controller's response is invalid ({0}); check that both have the same version")]
    BadResponse(&'static str),
    /// The controller itself failed.
    #[error("the controller failed: {0}")]
    Controller(String),
    /// The thread of the heartbeats ended by itself, which is a defect of this library.
    #[error("the heartbeats ended: {0}")]
    Ended(String),
    /// The system could not create a thread or runtime for the heartbeats.
    #[error(
        "cannot start the heartbeats: {0}; raise the limits of open files and threads \
         (`ulimit -n`, `ulimit -u`)"
    )]
    Runtime(#[source] Arc<io::Error>),
}

/// Why a connection to the controller broke or could not be made. Its source is the innermost
/// cause, often an [`std::io::Error`].
#[derive(Clone, Debug)]
pub struct ConnectionError(Status);

impl ConnectionError {
    fn innermost(&self) -> Option<&(dyn Error + 'static)> {
        let mut cause = self.0.source()?;
        while let Some(inner) = cause.source() {
            cause = inner;
        }
        Some(cause)
    }
}

impl fmt::Display for ConnectionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.innermost() {
            Some(cause) => fmt::Display::fmt(cause, f),
            None => f.write_str(self.0.message()),
        }
    }
}

impl Error for ConnectionError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.innermost()
    }
}

impl MembershipError {
    /// Why the endpoint is no longer a member, in the controller's words if it gave a reason.
    pub(crate) fn reason(&self) -> String {
        match self {
            Self::Expelled(reason) | Self::Unknown(reason) => reason.clone(),
            error => error.to_string(),
        }
    }

    /// The error of a call to a controller that is about no membership, if its connection could not be made or broke:
    /// which certificate or option does not fit. `None` if the controller itself responded.
    #[must_use]
    pub fn of_broken_call(uri: &str, status: &Status) -> Option<Self> {
        status.source().map(|_| Self::of(uri, status))
    }

    /// The error of a connection that could not be made, as [`Self::of_broken_call`].
    #[must_use]
    pub fn of_failed_connection(uri: &str, error: &tonic::transport::Error) -> Self {
        Self::of_connection(uri, error, false, None)
    }

    /// Classifies a refused call by who can resolve it.
    pub(crate) fn of(uri: &str, status: &Status) -> Self {
        let text = status.message().to_owned();
        // A status with a cause was not sent by the controller but made from a broken connection.
        if let Some(cause) = status.source() {
            // Without a connection the code is always this one.
            let was_made = status.code() != Code::Unavailable;
            let source = Some(ConnectionError(status.clone()));
            return Self::of_connection(uri, cause, was_made, source);
        }
        match status.code() {
            Code::PermissionDenied
                if status.metadata().get(REASON).is_some_and(|reason| reason == NOT_PREVIOUS) =>
            {
                Self::NotPrevious(text)
            }
            Code::InvalidArgument
            | Code::OutOfRange
            | Code::PermissionDenied
            | Code::Unimplemented => Self::Invalid(text),
            Code::AlreadyExists => Self::Taken(text),
            Code::ResourceExhausted => Self::Exhausted(text),
            Code::NotFound => Self::Unknown(text),
            Code::FailedPrecondition => Self::Expelled(text),
            Code::Internal | Code::DataLoss => Self::Controller(text),
            _ => Self::unanswered(uri, text),
        }
    }

    /// No response arrived, and no connection reported a reason.
    pub(crate) fn unanswered(uri: &str, reason: String) -> Self {
        Self::Unreachable { uri: uri.to_owned(), reason, source: None }
    }

    /// Classifies a connection that failed or broke, by its innermost cause.
    fn of_connection(
        uri: &str,
        cause: &(dyn Error + 'static),
        was_made: bool,
        source: Option<ConnectionError>,
    ) -> Self {
        let mut innermost = cause;
        let (mut is_tls, mut is_full) = (false, false);
        loop {
            let broken = innermost.downcast_ref::<io::Error>();
            // The TLS library wraps its own errors in this kind.
            is_tls |= broken.is_some_and(|error| error.kind() == io::ErrorKind::InvalidData);
            let number = broken.and_then(io::Error::raw_os_error);
            is_full |= number.is_some_and(|number| NO_FILES.contains(&number));
            match innermost.source() {
                Some(inner) => innermost = inner,
                None => break,
            }
        }
        let text = innermost.to_string();
        let uri = uri.to_owned();
        if is_full {
            return Self::OpenFiles { uri, reason: text, source };
        }
        if innermost.is::<TimeoutExpired>() {
            return Self::Unreachable { uri, reason: "no response in time".to_owned(), source };
        }
        if is_tls {
            let reason = tls_reason(&text);
            return Self::Untrusted { uri, reason, source };
        }
        // The alert of a TLS server is not an HTTP/2 frame.
        if uri.starts_with("http:") && text.contains("frame with invalid size") {
            let reason = "it does not speak plain gRPC; if it has a certificate, join with TLS and \
                          specify its root";
            return Self::Untrusted { uri, reason: reason.to_owned(), source };
        }
        if was_made {
            Self::Closed { uri, reason: text, source }
        } else {
            Self::Unreachable { uri, reason: text, source }
        }
    }

    /// Whether it says nothing about the endpoint's membership: the controller is unreachable, fails, or is
    /// another one than before, or this side cannot connect. Data traffic continues meanwhile.
    pub(crate) const fn is_of_the_controller(&self) -> bool {
        matches!(
            self,
            Self::Closed { .. }
                | Self::Controller(_)
                | Self::OpenFiles { .. }
                | Self::Unreachable { .. }
                | Self::Untrusted { .. }
        )
    }

    /// Whether the controller's store does not fit this endpoint.
    pub(crate) const fn is_of_the_store(&self) -> bool {
        matches!(self, Self::Controller(_) | Self::Unknown(_))
    }

    /// Whether no controller responds, or it is not ready. A controller that accepted the connection and
    /// closed it may refuse this endpoint, so that case is not included.
    pub(crate) const fn is_absence(&self) -> bool {
        matches!(self, Self::Unreachable { .. })
    }

    /// Whether the same call may succeed a little later.
    pub(crate) const fn is_temporary(&self) -> bool {
        matches!(
            self,
            Self::Closed { .. }
                | Self::OpenFiles { .. }
                | Self::Unreachable { .. }
                | Self::Taken(_)
        )
    }
}

fn closed_hint(uri: &str) -> &'static str {
    if uri.starts_with("https:") {
        "it may require a certificate of this endpoint under another root"
    } else {
        "it may require TLS"
    }
}

/// Translates an error of the TLS library. Its own words stay, for who knows TLS.
fn tls_reason(text: &str) -> String {
    if let Some(what) = text.strip_prefix("invalid peer certificate:") {
        let remedy = if what.contains("expired") || what.contains("not valid yet") {
            "renew the controller's certificate and start the controller again, or correct the clock of this \
             machine"
        } else if what.contains("not valid for name") {
            "specify a name of that certificate as the TLS name"
        } else if what.contains("CaUsedAsEndEntity") {
            "it is that of an authority (CA:TRUE); issue one under it for the controller"
        } else {
            "it was not issued under the given root; specify the root of the controller's certificate"
        };
        format!("its certificate is not trusted ({text}): {remedy}")
    } else if let Some(alert) = text.strip_prefix("received fatal alert:") {
        let remedy = match alert.trim_start() {
            "CertificateRequired" => {
                "it requires a certificate of this endpoint; specify one, and its key"
            }
            // It has no alert of its own for a certificate that is not valid yet.
            "CertificateExpired" => {
                "the certificate of this endpoint has expired, or is not valid yet; renew it, or correct the \
                 clocks of the two machines"
            }
            _ => {
                "it does not accept the certificate of this endpoint; use one that was issued under the \
                 controller's root for clients"
            }
        };
        format!("it refused this endpoint ({text}): {remedy}")
    } else if text.starts_with("received corrupt message") {
        "it does not speak TLS; join without a root, or configure a certificate for the controller"
            .to_owned()
    } else {
        format!("TLS failed: {text}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_many_open_files_are_not_the_controllers_fault() {
        let failed = |number| {
            let error = io::Error::from_raw_os_error(number);
            MembershipError::of_connection("http://[::1]:7700", &error, false, None)
        };
        for number in NO_FILES {
            let error = failed(number);
            assert!(matches!(error, MembershipError::OpenFiles { .. }), "{error:?}");
            assert!(error.is_of_the_controller() && error.is_temporary() && !error.is_absence());
            let words = error.to_string();
            assert!(words.contains("on this side") && words.contains("ulimit -n"), "{words}");
        }
        let refused = failed(111);
        assert!(matches!(refused, MembershipError::Unreachable { .. }), "{refused:?}");
    }
}
