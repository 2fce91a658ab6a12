//! Queries to a running controller and a running switch.
//!
//! Every call blocks, uses the network namespace of the calling thread, and ends by its deadline.
//!
//! * `tables`: what a switch really has, with counters.

pub mod operations;
pub mod tables;

use std::error::Error as _;
use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

use bluebridge_northbound::{MembershipError, proto};
use bluebridge_p4::proto::bluebridge::switch::v1 as switch;
use proto::controller_client::ControllerClient;
use switch::switch_client::SwitchClient;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

/// Time limit of a call.
const CALL_DEADLINE: Duration = Duration::from_secs(5);

/// Time limit of a connection attempt.
const CONNECT_DEADLINE: Duration = Duration::from_secs(1);

/// The largest response: 65,536 entries with counters.
const RESPONSE_BYTES_MAX: usize = 64 << 20;

/// Why a query of a controller or switch failed.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The response cannot be understood: the versions differ.
    #[error("the response of {peer} is invalid: {reason}; compare the versions")]
    BadResponse {
        /// The other side.
        peer: Peer,
        /// The reason.
        reason: String,
    },
    /// Another P4Runtime switch than the embedded one.
    #[error("only the embedded switch can do this; others have programs of their own for it")]
    NotEmbedded,
    /// The controller was reached, but one side does not trust the other, or one uses TLS and the other does not.
    #[error("{0}")]
    Connection(#[source] Box<MembershipError>),
    /// A server that it queried did not respond.
    #[error("{0}")]
    Silent(String),
    /// It does not know the server or client that the caller named.
    #[error("{reason}")]
    NotFound {
        /// The other side.
        peer: Peer,
        /// Its reason.
        reason: String,
    },
    /// It refused; the reason says what to change.
    #[error("{peer} refused: {reason}")]
    Refused {
        /// The other side.
        peer: Peer,
        /// The reason.
        reason: String,
    },
    /// The system could not create a thread or runtime.
    #[error(
        "cannot start a runtime: {0}; raise the limits of open files and threads (`ulimit -n`, `ulimit -u`)"
    )]
    Runtime(#[source] std::io::Error),
    /// There is no response; check that it runs.
    #[error("{peer} at {address} does not respond: {reason}")]
    Unreachable {
        /// The other side.
        peer: Peer,
        /// Its address.
        address: SocketAddr,
        /// The reason.
        reason: String,
    },
}

/// The other side of a query.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Peer {
    /// The controller's northbound API.
    Controller,
    /// The switch's agent.
    Switch,
}

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Controller => "the controller",
            Self::Switch => "the switch",
        })
    }
}

/// The address of a query, plain or with a TLS endpoint.
#[derive(Clone, Debug)]
pub struct Contact {
    address: SocketAddr,
    endpoint: Option<Endpoint>,
}

impl From<SocketAddr> for Contact {
    fn from(address: SocketAddr) -> Self {
        Self { address, endpoint: None }
    }
}

impl Contact {
    /// Uses the caller's endpoint, for example one with TLS, which connects to `address`.
    pub const fn with(address: SocketAddr, endpoint: Endpoint) -> Self {
        Self { address, endpoint: Some(endpoint) }
    }

    fn uri(&self) -> String {
        let address = self.address;
        self.endpoint
            .as_ref()
            .map_or_else(|| format!("http://{address}"), |it| it.uri().to_string())
    }

    async fn connect(&self, peer: Peer) -> Result<Channel, ControlError> {
        let address = self.address;
        let unreachable = |reason| ControlError::Unreachable { peer, address, reason };
        let refused = |error: tonic::transport::Error| match peer {
            Peer::Controller => match MembershipError::of_failed_connection(&self.uri(), &error) {
                MembershipError::Unreachable { .. } => unreachable(in_words(&error)),
                reached => ControlError::Connection(Box::new(reached)),
            },
            Peer::Switch => unreachable(in_words(&error)),
        };
        let endpoint = match &self.endpoint {
            Some(endpoint) => Ok(endpoint.clone()),
            None => Endpoint::from_shared(self.uri()),
        };
        let connecting = async {
            let endpoint = endpoint.map_err(|error| unreachable(in_words(&error)))?;
            let endpoint = endpoint.connect_timeout(CONNECT_DEADLINE);
            endpoint.connect().await.map_err(refused)
        };
        // A TLS handshake has no time limit of its own.
        let late = || unreachable(format!("no connection within {CALL_DEADLINE:?}"));
        tokio::time::timeout(CALL_DEADLINE, connecting).await.unwrap_or_else(|_| Err(late()))
    }
}

/// The controller's state without entries.
///
/// # Errors
/// [`ControlError`].
pub fn controller_status(address: SocketAddr) -> Result<proto::StatusResponse, ControlError> {
    controller_state(&address.into(), false)
}

/// The controller's state, with every table entry if `with_entries`.
///
/// # Errors
/// [`ControlError`].
pub fn controller_state(
    controller: &Contact,
    entries: bool,
) -> Result<proto::StatusResponse, ControlError> {
    let request = proto::StatusRequest { entries };
    call(Peer::Controller, controller, async |channel| {
        let mut client =
            ControllerClient::new(channel).max_decoding_message_size(RESPONSE_BYTES_MAX);
        client.status(request).await.map(tonic::Response::into_inner)
    })
}

/// Passes every endpoint and then each change to `show`, until it returns false or an error.
///
/// # Errors
/// The error of `show`; [`ControlError`] if the controller refuses, ends, or is lost.
pub fn controller_watch<E: From<ControlError>>(
    controller: &Contact,
    request: proto::WatchRequest,
    mut show: impl FnMut(proto::watch_response::Event) -> Result<bool, E>,
) -> Result<(), E> {
    let peer = Peer::Controller;
    let failed = |status: Status| E::from(failure(peer, controller, &status));
    // Once it has begun, the two trust each other: the controller has ended.
    let broken = |status: Status| match status.source() {
        Some(cause) => {
            let (address, reason) = (controller.address, in_words(cause));
            E::from(ControlError::Unreachable { peer, address, reason })
        }
        None => failed(status),
    };
    runtime()?.block_on(async {
        let mut client = ControllerClient::new(controller.connect(peer).await?)
            .max_decoding_message_size(RESPONSE_BYTES_MAX);
        let mut events = client.watch(request).await.map_err(failed)?.into_inner();
        while let Some(message) = events.message().await.map_err(broken)? {
            if let Some(event) = message.event
                && !show(event)?
            {
                return Ok(());
            }
        }
        let address = controller.address;
        let reason = "it ended the watch".to_owned();
        Err(ControlError::Unreachable { peer, address, reason }.into())
    })
}

/// The ports of the switch with their counters, and its drops.
///
/// # Errors
/// [`ControlError`].
pub fn switch_ports(address: SocketAddr) -> Result<switch::ListPortsResponse, ControlError> {
    call(Peer::Switch, &address.into(), async |channel| {
        let request = switch::ListPortsRequest {};
        SwitchClient::new(channel).list_ports(request).await.map(tonic::Response::into_inner)
    })
}

/// Sets a port's impairment: frames that leave through it are lost, duplicated, delayed, reordered or damaged.
///
/// # Errors
/// [`ControlError`].
pub fn impair(
    address: SocketAddr,
    port: u16,
    impairment: switch::Impairment,
) -> Result<(), ControlError> {
    let request = switch::SetImpairmentRequest { port: port.into(), impairment: Some(impairment) };
    call(Peer::Switch, &address.into(), async |channel| {
        SwitchClient::new(channel).set_impairment(request).await.map(drop)
    })
}

/// Connects and sends a request, on a runtime of the calling thread.
fn call<T, A>(
    peer: Peer,
    contact: &Contact,
    request: impl FnOnce(Channel) -> A,
) -> Result<T, ControlError>
where
    A: Future<Output = Result<T, Status>>,
{
    call_within(CALL_DEADLINE, peer, contact, request)
}

fn call_within<T, A>(
    patience: Duration,
    peer: Peer,
    contact: &Contact,
    request: impl FnOnce(Channel) -> A,
) -> Result<T, ControlError>
where
    A: Future<Output = Result<T, Status>>,
{
    let address = contact.address;
    runtime()?.block_on(async {
        let response = tokio::time::timeout(patience, async {
            let channel = contact.connect(peer).await?;
            request(channel).await.map_err(|status| failure(peer, contact, &status))
        });
        let reason = format!("no response within {patience:?}");
        response.await.unwrap_or(Err(ControlError::Unreachable { peer, address, reason }))
    })
}

fn runtime() -> Result<tokio::runtime::Runtime, ControlError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build();
    runtime.map_err(ControlError::Runtime)
}

fn failure(peer: Peer, contact: &Contact, status: &Status) -> ControlError {
    let (address, reason) = (contact.address, status.message().to_owned());
    let broken = (peer == Peer::Controller)
        .then(|| MembershipError::of_broken_call(&contact.uri(), status))
        .flatten();
    if let Some(reached) =
        broken.filter(|error| !matches!(error, MembershipError::Unreachable { .. }))
    {
        return ControlError::Connection(Box::new(reached));
    }
    match status.code() {
        Code::DeadlineExceeded if peer == Peer::Controller => ControlError::Silent(reason),
        Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled => {
            ControlError::Unreachable { peer, address, reason }
        }
        Code::Unimplemented if peer == Peer::Switch => ControlError::NotEmbedded,
        Code::DataLoss | Code::Internal | Code::Unimplemented => {
            ControlError::BadResponse { peer, reason }
        }
        Code::NotFound => ControlError::NotFound { peer, reason },
        _ => ControlError::Refused { peer, reason },
    }
}

/// The innermost cause: the outer ones only say that something failed.
fn in_words(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_controller_is_an_error_at_once() {
        let address = "[::1]:1".parse().expect("an address");
        let error = controller_status(address).expect_err("no process listens");
        assert!(matches!(error, ControlError::Unreachable { peer: Peer::Controller, .. }));
        assert!(error.to_string().contains("[::1]:1"), "{error}");
    }
}
