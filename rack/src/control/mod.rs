//! What operators ask of a running controller and a running switch.
//!
//! Every call blocks, from the network namespace of the calling thread, and ends by its deadline.

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

/// What the controller knows; its entries are left out.
///
/// # Errors
/// [`ControlError`].
pub fn controller_status(address: SocketAddr) -> Result<proto::StatusResponse, ControlError> {
    let request = proto::StatusRequest { entries: false };
    ask(Whom::Controller, address, async |channel| {
        ControllerClient::new(channel).status(request).await.map(tonic::Response::into_inner)
    })
}

/// The ports of the switch with their counters, and its drops.
///
/// # Errors
/// [`ControlError`].
pub fn switch_ports(address: SocketAddr) -> Result<switch::ListPortsResponse, ControlError> {
    ask(Whom::Switch, address, async |channel| {
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
    ask(Whom::Switch, address, async |channel| {
        SwitchClient::new(channel).set_impairment(request).await.map(drop)
    })
}

/// Connects and asks, on a runtime of the calling thread.
fn ask<T, A>(
    whom: Whom,
    address: SocketAddr,
    question: impl FnOnce(Channel) -> A,
) -> Result<T, ControlError>
where
    A: Future<Output = Result<T, Status>>,
{
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(ControlError::Runtime)?;
    let unreachable = |reason| ControlError::Unreachable { whom, address, reason };
    runtime.block_on(async {
        let endpoint = Endpoint::from_shared(format!("http://{address}"))
            .map_err(|error| unreachable(in_words(&error)))?
            .connect_timeout(CONNECT_DEADLINE);
        let answer = tokio::time::timeout(CALL_DEADLINE, async {
            let channel =
                endpoint.connect().await.map_err(|error| unreachable(in_words(&error)))?;
            question(channel).await.map_err(|status| failure(whom, address, &status))
        });
        let late = || unreachable(format!("no answer within {CALL_DEADLINE:?}"));
        answer.await.unwrap_or_else(|_| Err(late()))
    })
}

fn failure(whom: Whom, address: SocketAddr, status: &Status) -> ControlError {
    let reason = status.message().to_owned();
    match status.code() {
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
