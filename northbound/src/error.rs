//! Why an endpoint is none.

use std::error::Error;

use tonic::{Code, Status, TimeoutExpired};

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
    #[error("the controller at {uri} does not answer: {reason}")]
    Unreachable {
        /// Its address.
        uri: String,
        /// What went wrong last.
        reason: String,
    },
    /// The controller took the connection and closed it without an answer: it ended just then, or does
    /// not want this endpoint, and the alert that told why was lost.
    #[error("the controller at {uri} closed the connection ({reason}); {}", closed_question(uri))]
    Closed {
        /// Its address.
        uri: String,
        /// What the connection said.
        reason: String,
    },
    /// The two met, and one of them does not trust the other or does not speak its language; the
    /// certificates and options of TLS are at fault, and trying again is of no use.
    #[error("the controller at {uri} was reached, but {reason}")]
    Untrusted {
        /// Its address.
        uri: String,
        /// Who does not trust whom, and what to compare.
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
    /// The caller gave up joining while no controller answered.
    #[error("joining was given up")]
    GivenUp,
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
    /// Why the endpoint is no member any more, in the controller's words if it said so.
    pub(crate) fn reason(&self) -> String {
        match self {
            Self::Expelled(reason) => reason.clone(),
            error => error.to_string(),
        }
    }

    /// Sorts a refused call by who can do something about it.
    pub(crate) fn of(uri: &str, status: &Status) -> Self {
        let text = status.message().to_owned();
        // A status with a cause was not sent by the controller but made of a broken connection.
        if let Some(cause) = status.source() {
            // Without a connection it is always that code.
            return Self::of_connection(uri, cause, status.code() != Code::Unavailable);
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

    /// Sorts a connection that was not made, or was made and broke, by its innermost cause.
    fn of_connection(uri: &str, cause: &(dyn Error + 'static), was_made: bool) -> Self {
        let mut innermost = cause;
        let mut is_tls = false;
        loop {
            let broken = innermost.downcast_ref::<std::io::Error>();
            // So the TLS library wraps its own errors.
            is_tls |= broken.is_some_and(|error| error.kind() == std::io::ErrorKind::InvalidData);
            match innermost.source() {
                Some(inner) => innermost = inner,
                None => break,
            }
        }
        let text = innermost.to_string();
        let uri = uri.to_owned();
        if innermost.is::<TimeoutExpired>() {
            return Self::Unreachable { uri, reason: "no answer in time".to_owned() };
        }
        if is_tls {
            let reason = tls_reason(&text);
            return Self::Untrusted { uri, reason };
        }
        // The alert of a TLS server is no frame of HTTP/2.
        if uri.starts_with("http:") && text.contains("frame with invalid size") {
            let reason = "it does not speak plain gRPC; if it has a certificate, join by TLS and \
                          say which root to trust";
            return Self::Untrusted { uri, reason: reason.to_owned() };
        }
        if was_made {
            Self::Closed { uri, reason: text }
        } else {
            Self::Unreachable { uri, reason: text }
        }
    }

    /// Whether it says nothing about the endpoint's place: the controller is away, fails, or is
    /// another one than it was. Data traffic goes on meanwhile.
    pub(crate) const fn is_of_the_controller(&self) -> bool {
        matches!(
            self,
            Self::Closed { .. }
                | Self::Controller(_)
                | Self::Unreachable { .. }
                | Self::Untrusted { .. }
        )
    }

    /// Whether no controller is there, or it is not ready. One that took the connection and closed it
    /// may not want this endpoint, so that is none of these.
    pub(crate) const fn is_absence(&self) -> bool {
        matches!(self, Self::Unreachable { .. })
    }

    /// Whether the same call may succeed a little later.
    pub(crate) const fn is_passing(&self) -> bool {
        matches!(self, Self::Closed { .. } | Self::Unreachable { .. } | Self::Taken(_))
    }
}

fn closed_question(uri: &str) -> &'static str {
    if uri.starts_with("https:") {
        "does it ask for a certificate of this endpoint that leads to another root?"
    } else {
        "does it ask for TLS?"
    }
}

/// What an error of the TLS library means here.
fn tls_reason(text: &str) -> String {
    let of = |prefix: &str| text.strip_prefix(prefix).map(str::trim_start);
    if let Some(what) = of("invalid peer certificate:") {
        format!(
            "its certificate is not to be trusted ({what}): it must be for the name by which it is \
             joined, and lead to the given root"
        )
    } else if let Some(what) = of("received fatal alert:") {
        format!(
            "it does not accept the certificate of this endpoint, or that it shows none ({what}): \
             it must lead to the root that the controller was given for its clients"
        )
    } else if text.starts_with("received corrupt message") {
        "it does not speak TLS; join without a root, or give the controller a certificate"
            .to_owned()
    } else {
        format!("TLS failed: {text}")
    }
}
