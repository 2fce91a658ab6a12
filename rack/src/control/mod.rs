//! What operators ask of a running controller and a running switch.
//!
//! Every call blocks, from the network namespace of the calling thread, and ends by its deadline.

pub mod operations;
pub mod tables;

use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

use bluebridge_northbound::proto;
use bluebridge_p4::proto::bluebridge::switch::v1 as switch;
use proto::controller_client::ControllerClient;
use switch::switch_client::SwitchClient;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

/// How long a call may take.
const CALL_DEADLINE: Duration = Duration::from_secs(5);

/// How long a connection may take.
const CONNECT_DEADLINE: Duration = Duration::from_secs(1);

/// The largest answer: 65,536 entries with counters.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// Why a controller or switch did not tell.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// It answered what this program does not understand: the versions differ.
    #[error("the answer of {whom} makes no sense: {reason}; compare the versions")]
    BadAnswer {
        /// Who answered.
        whom: Whom,
        /// What is wrong with it.
        reason: String,
    },
    /// Somebody that it asked did not answer it.
    #[error("{0}")]
    Silent(String),
    /// It refused; the reason says what to change.
    #[error("{whom} refused: {reason}")]
    Refused {
        /// Who refused.
        whom: Whom,
        /// Why.
        reason: String,
    },
    /// The system gave no thread or runtime.
    #[error("cannot start a runtime: {0}")]
    Runtime(#[source] std::io::Error),
    /// Nobody answered there; is it running?
    #[error("{whom} at {address} does not answer: {reason}")]
    Unreachable {
        /// Who was asked.
        whom: Whom,
        /// Where.
        address: SocketAddr,
        /// What went wrong.
        reason: String,
    },
}

/// Who is asked.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Whom {
    /// The controller's northbound API.
    Controller,
    /// The switch's agent.
    Switch,
}

impl std::fmt::Display for Whom {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Controller => "the controller",
            Self::Switch => "the switch",
        })
    }
}

/// Where somebody is asked, and how: in the clear, unless an endpoint with TLS is given.
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
    /// Asks by an endpoint of the caller's, such as one with TLS, which leads to `address`.
    pub const fn with(address: SocketAddr, endpoint: Endpoint) -> Self {
        Self { address, endpoint: Some(endpoint) }
    }

    async fn connect(&self, whom: Whom) -> Result<Channel, ControlError> {
        let address = self.address;
        let unreachable = |reason| ControlError::Unreachable { whom, address, reason };
        let endpoint = match &self.endpoint {
            Some(endpoint) => Ok(endpoint.clone()),
            None => Endpoint::from_shared(format!("http://{address}")),
        };
        let connecting = async {
            let endpoint = endpoint.map_err(|error| unreachable(in_words(&error)))?;
            let endpoint = endpoint.connect_timeout(CONNECT_DEADLINE);
            endpoint.connect().await.map_err(|error| unreachable(in_words(&error)))
        };
        // A handshake of TLS has no limit of its own.
        let late = || unreachable(format!("no connection within {CALL_DEADLINE:?}"));
        tokio::time::timeout(CALL_DEADLINE, connecting).await.unwrap_or_else(|_| Err(late()))
    }
}

/// What the controller knows; its entries are left out.
///
/// # Errors
/// [`ControlError`].
pub fn controller_status(address: SocketAddr) -> Result<proto::StatusResponse, ControlError> {
    controller_state(&address.into(), false)
}

/// What the controller knows, with every table entry if wanted.
///
/// # Errors
/// [`ControlError`].
pub fn controller_state(
    controller: &Contact,
    entries: bool,
) -> Result<proto::StatusResponse, ControlError> {
    let request = proto::StatusRequest { entries };
    ask(Whom::Controller, controller, async |channel| {
        let mut client = ControllerClient::new(channel).max_decoding_message_size(ANSWER_BYTES_MAX);
        client.status(request).await.map(tonic::Response::into_inner)
    })
}

/// Hears of every endpoint, then of each change, until `show` returns false or fails.
///
/// # Errors
/// What `show` failed with; [`ControlError`] if the controller refuses, ends, or is lost.
pub fn controller_watch<E: From<ControlError>>(
    controller: &Contact,
    request: proto::WatchRequest,
    mut show: impl FnMut(proto::watch_response::Event) -> Result<bool, E>,
) -> Result<(), E> {
    let whom = Whom::Controller;
    let failed = |status: Status| E::from(failure(whom, controller.address, &status));
    runtime()?.block_on(async {
        let mut client = ControllerClient::new(controller.connect(whom).await?)
            .max_decoding_message_size(ANSWER_BYTES_MAX);
        let mut events = client.watch(request).await.map_err(failed)?.into_inner();
        while let Some(message) = events.message().await.map_err(failed)? {
            if let Some(event) = message.event
                && !show(event)?
            {
                return Ok(());
            }
        }
        let address = controller.address;
        let reason = "it ended the watch".to_owned();
        Err(ControlError::Unreachable { whom, address, reason }.into())
    })
}

/// The ports of the switch with their counters, and its drops.
///
/// # Errors
/// [`ControlError`].
pub fn switch_ports(address: SocketAddr) -> Result<switch::ListPortsResponse, ControlError> {
    ask(Whom::Switch, &address.into(), async |channel| {
        let request = switch::ListPortsRequest {};
        SwitchClient::new(channel).list_ports(request).await.map(tonic::Response::into_inner)
    })
}

/// Makes a port lose, double, hold back or damage frames that leave by it.
///
/// # Errors
/// [`ControlError`].
pub fn impair(
    address: SocketAddr,
    port: u16,
    impairment: switch::Impairment,
) -> Result<(), ControlError> {
    let request = switch::SetImpairmentRequest { port: port.into(), impairment: Some(impairment) };
    ask(Whom::Switch, &address.into(), async |channel| {
        SwitchClient::new(channel).set_impairment(request).await.map(drop)
    })
}

/// Connects and asks, on a runtime of the calling thread.
fn ask<T, A>(
    whom: Whom,
    contact: &Contact,
    question: impl FnOnce(Channel) -> A,
) -> Result<T, ControlError>
where
    A: Future<Output = Result<T, Status>>,
{
    ask_within(CALL_DEADLINE, whom, contact, question)
}

fn ask_within<T, A>(
    patience: Duration,
    whom: Whom,
    contact: &Contact,
    question: impl FnOnce(Channel) -> A,
) -> Result<T, ControlError>
where
    A: Future<Output = Result<T, Status>>,
{
    let address = contact.address;
    runtime()?.block_on(async {
        let answer = tokio::time::timeout(patience, async {
            let channel = contact.connect(whom).await?;
            question(channel).await.map_err(|status| failure(whom, address, &status))
        });
        let reason = format!("no answer within {patience:?}");
        answer.await.unwrap_or(Err(ControlError::Unreachable { whom, address, reason }))
    })
}

fn runtime() -> Result<tokio::runtime::Runtime, ControlError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(ControlError::Runtime)
}

fn failure(whom: Whom, address: SocketAddr, status: &Status) -> ControlError {
    let reason = status.message().to_owned();
    match status.code() {
        Code::DeadlineExceeded if whom == Whom::Controller => ControlError::Silent(reason),
        Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled => {
            ControlError::Unreachable { whom, address, reason }
        }
        Code::DataLoss | Code::Internal | Code::Unimplemented => {
            ControlError::BadAnswer { whom, reason }
        }
        _ => ControlError::Refused { whom, reason },
    }
}

/// The innermost cause: the outer ones only say that it failed.
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
    fn nobody_there_is_told_at_once() {
        let address = "[::1]:1".parse().expect("an address");
        let error = controller_status(address).expect_err("nobody listens");
        assert!(matches!(error, ControlError::Unreachable { whom: Whom::Controller, .. }));
        assert!(error.to_string().contains("[::1]:1"), "{error}");
    }
}
