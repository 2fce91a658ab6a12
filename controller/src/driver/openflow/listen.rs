//! The address to which a switch connects.
//!
//! Others may connect, too: programs that say nothing, and other switches. Handshakes therefore run at the same
//! time, each with a short deadline, and the first one that ends well is the switch.

use std::collections::BTreeSet;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep_until, timeout};

use super::channel::Channel;
use super::check_datapath;
use crate::driver::DriverError;

/// How long to wait for a switch that makes the connection.
const ACCEPT_DEADLINE: Duration = Duration::from_secs(5);

/// Time limit of the handshake of one connection. Its place is free afterwards.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(2);

/// The most handshakes at a time; further connections wait in the system's queue.
const HANDSHAKES_MAX: usize = 32;

/// The most refused switches that are remembered, so that each is logged once.
const REFUSED_MAX: usize = 64;

/// Errors of the system that end by themselves: it has too few files or too little memory at the moment (`ENOMEM`,
/// `ENFILE`, `EMFILE`, `ENOBUFS`).
const SHORTAGES: [i32; 4] = [12, 23, 24, 105];

/// The listening socket, and what was logged about others than the switch.
#[derive(Debug, Default)]
pub(super) struct Listener {
    socket: Option<TcpListener>,
    /// The datapath ids of refused switches.
    refused: BTreeSet<u64>,
    /// Whether it was logged that a connection did not complete its handshake.
    is_stranger_logged: bool,
}

impl Listener {
    /// The connection of the switch.
    pub(super) async fn accept(
        &mut self,
        address: SocketAddr,
        datapath_id: Option<u64>,
    ) -> Result<Channel, DriverError> {
        let socket = match self.socket.take() {
            Some(socket) => socket,
            None => TcpListener::bind(address).await.map_err(|error| unusable(address, &error))?,
        };
        let socket = &*self.socket.insert(socket);
        let deadline = Instant::now() + ACCEPT_DEADLINE;
        let mut handshakes = FuturesUnordered::new();
        let mut last_refusal = None;
        loop {
            tokio::select! {
                biased;
                Some((peer, opened)) = handshakes.next(), if !handshakes.is_empty() => {
                    let checked: Result<Channel, DriverError> = opened;
                    let checked = checked.and_then(|channel| {
                        check_datapath(&channel, datapath_id).map(|()| channel)
                    });
                    match checked {
                        Ok(channel) => return Ok(channel),
                        Err(error) => {
                            log_refusal(
                                &mut self.refused, &mut self.is_stranger_logged, peer, &error,
                            );
                            last_refusal = Some((peer, error));
                        }
                    }
                }
                accepted = socket.accept(), if handshakes.len() < HANDSHAKES_MAX => {
                    let (stream, peer) = accepted.map_err(|error| unusable(address, &error))?;
                    handshakes.push(async move {
                        let opened = timeout(HANDSHAKE_DEADLINE, Channel::open(stream)).await;
                        (peer, opened.unwrap_or(Err(DriverError::Timeout("the handshake"))))
                    });
                }
                () = sleep_until(deadline) => return Err(nobody(address, last_refusal)),
            }
        }
    }
}

/// Logs a refused connection: each switch once, and the first connection of something else.
fn log_refusal(
    refused: &mut BTreeSet<u64>,
    is_stranger_logged: &mut bool,
    peer: SocketAddr,
    error: &DriverError,
) {
    let is_new = match error {
        DriverError::OtherSwitch { found, .. } => {
            refused.len() < REFUSED_MAX && refused.insert(*found)
        }
        _ => !std::mem::replace(is_stranger_logged, true),
    };
    if is_new {
        tracing::warn!(%peer, %error, "a connection to the address of the switch was refused");
    } else {
        tracing::debug!(%peer, %error, "a connection to the address of the switch was refused again");
    }
}

/// The switch did not connect.
fn nobody(address: SocketAddr, last_refusal: Option<(SocketAddr, DriverError)>) -> DriverError {
    let refused = last_refusal.map_or_else(String::new, |(peer, error)| {
        format!("; the last connection, from {peer}, was refused: {error}")
    });
    let seconds = ACCEPT_DEADLINE.as_secs();
    DriverError::Lost(format!(
        "the switch did not connect to {address} within {seconds} s{refused}"
    ))
}

/// Why the address cannot be used: for the moment, or until an operator acts.
fn unusable(address: SocketAddr, error: &io::Error) -> DriverError {
    if error.raw_os_error().is_some_and(|number| SHORTAGES.contains(&number)) {
        return DriverError::Lost(format!(
            "cannot listen on {address}: {error}; this machine or the limits of this process (`ulimit -n`) are too small"
        ));
    }
    match error.kind() {
        // A connection that ended before it was accepted, or a signal.
        io::ErrorKind::ConnectionAborted
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::Interrupted => DriverError::Lost(error.to_string()),
        kind => DriverError::Listen { address, kind, reason: error.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use bluebridge_testkit::Log;

    use super::*;

    const ADDRESS: ([u8; 4], u16) = ([127, 0, 0, 1], 6653);

    #[test]
    fn a_shortage_is_tried_again_and_other_errors_are_not() {
        for (number, is_final) in [(23, false), (24, false), (105, false), (98, true), (13, true)] {
            let error = unusable(ADDRESS.into(), &io::Error::from_raw_os_error(number));
            assert_eq!(error.is_final(), is_final, "{error}");
            let words = error.to_string();
            assert!(words.contains("cannot listen on 127.0.0.1:6653"), "{words}");
            assert_eq!(words.contains("ulimit -n"), !is_final, "{words}");
        }
        let aborted = unusable(ADDRESS.into(), &io::Error::from_raw_os_error(103));
        assert!(!aborted.is_final(), "{aborted}");
    }

    #[test]
    fn each_other_switch_is_logged_once_and_strangers_once() {
        let log = Log::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::INFO)
            .with_ansi(false)
            .with_writer(move || writer.clone());
        let _guard = tracing::subscriber::set_default(subscriber.finish());
        let mut listener = Listener::default();
        let other = |found| DriverError::OtherSwitch { found, wanted: 1 };
        let silent = || DriverError::Timeout("the handshake");
        for error in [other(0xaa), silent(), other(0xaa), other(0xbb), silent(), other(0xbb)] {
            let Listener { refused, is_stranger_logged, .. } = &mut listener;
            log_refusal(refused, is_stranger_logged, ADDRESS.into(), &error);
        }
        assert_eq!(log.count("was refused"), 3);
        for part in
            ["datapath id 00000000000000aa", "datapath id 00000000000000bb", "the handshake"]
        {
            assert_eq!(log.count(part), 1, "{part}");
        }
    }
}
