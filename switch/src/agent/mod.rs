//! The P4Runtime server in front of a data plane.
//!
//! It follows the P4Runtime specification. Where the specification leaves a choice:
//! * The only pipeline is this switch's own ([`bluebridge_p4::p4info`]); a push commits it with
//!   empty tables, or with their present entries (`RECONCILE_AND_COMMIT`). Between `VERIFY_AND_SAVE`
//!   and `COMMIT` writes are refused.
//! * Batches are `CONTINUE_ON_ERROR`. Error details are complete up to the size that clients accept.
//! * A client that does not read its stream loses packet-ins, then its stream; the switch and the
//!   other clients do not wait for it.
//! * Every role has all permissions.
//!
//! The cookie of a pipeline is stored in the data plane, except for a cookie that `RECONCILE_AND_COMMIT`
//! set on a committed pipeline. After a restart the agent reports the cookie of the last commit again, and
//! a controller that compares cookies reconciles once more, which is harmless.
//!
//! The data plane may outlive the agent: [`Agent::bind`] reads its contents back.
//!
//! * `state`: the agent's state, on a thread of its own (`executor`); `arbitration`: who may write it.
//! * `service`: P4Runtime's calls; `switch_service`: the switch's own.
//! * `write`, `read`: entries; `profile`, `replication`: anycast and multicast groups; `forwarding`: the pipeline's configuration.
//! * `packets`: the stream; `refusal`: how a request is refused.

mod arbitration;
mod executor;
mod forwarding;
mod packets;
mod profile;
mod read;
mod refusal;
mod replication;
mod service;
mod state;
mod switch_service;
mod write;

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use bluebridge_p4::proto::bluebridge::switch::v1::switch_server::SwitchServer;
use bluebridge_p4::proto::p4::v1::p4_runtime_server::P4RuntimeServer;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::TcpListener;
use tokio::sync::{Notify, oneshot};
use tonic::Status;
use tonic::transport::server::TcpIncoming;

use self::executor::{Executor, Thread};
use self::service::P4RuntimeService;
use self::state::AgentState;
use self::switch_service::SwitchService;
use crate::dataplane::DataPlane;

/// The largest request: a batch with the complete contents of every table fits.
const REQUEST_BYTES_MAX: usize = 16 * 1024 * 1024;

/// How often to look for idle entries while there are entries with an idle timeout.
const IDLE_SCAN: Duration = Duration::from_millis(100);

/// How often to look for packet-ins if the data plane cannot signal them.
const POLL: Duration = Duration::from_millis(2);

/// How long packet-ins are collected after the ones before. The data plane wakes the agent only for the
/// first of them, so a flood of copies causes at most this many wake-ups.
const GATHER: Duration = Duration::from_millis(1);

/// How often to look for packet-ins if it can, in case a wake-up was missed. None is known to be: the data plane signals
/// the first packet-in after it was found empty.
const POLL_BACKSTOP: Duration = Duration::from_secs(2);

/// How long the data plane is not accessed after a failure.
const FAILURE_PAUSE: Duration = Duration::from_secs(1);

/// How long a connection without traffic is assumed to be alive.
const KEEPALIVE: Duration = Duration::from_secs(10);

/// How long open calls may take to end at shutdown.
const DRAIN: Duration = Duration::from_secs(2);

/// The agent's address and identity.
#[derive(Clone, Debug)]
pub struct AgentConfig {
    /// The TCP address to listen on; port 0 selects a free one.
    pub listen: SocketAddr,
    /// The P4Runtime device id, at least 1.
    pub device_id: u64,
}

/// Why the agent did not start, or ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AgentError {
    /// The configured device id is 0, which P4Runtime does not allow; choose another.
    #[error("the device id is 0; P4Runtime devices are numbered from 1")]
    DeviceId,
    /// The configured address cannot be used; choose another or stop the process that uses it.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The configured address.
        address: SocketAddr,
        /// The system's error.
        source: std::io::Error,
    },
    /// The agent's thread panicked, which is a bug of this program.
    #[error("the agent's thread ended unexpectedly")]
    Panicked,
    /// The data plane could not be read back; restart the switch.
    #[error("cannot read the data plane back: {0}")]
    Restore(String),
    /// The server failed.
    #[error("serving P4Runtime: {0}")]
    Serve(#[from] tonic::transport::Error),
    /// The system refused a thread or a file descriptor.
    #[error("{doing}: {source}")]
    System {
        /// The failed action.
        doing: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
}

/// A P4Runtime server that is already listening.
#[derive(Debug)]
pub struct Agent {
    listener: TcpListener,
    address: SocketAddr,
    executor: Executor,
    thread: Thread,
    events: Option<OwnedFd>,
    timed_added: Arc<Notify>,
}

/// Serves until `shutdown` resolves, then returns the data plane with its tables.
///
/// # Errors
/// As for [`Agent::bind`] and [`Agent::serve`].
pub async fn run(
    config: AgentConfig,
    data_plane: Box<dyn DataPlane>,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<Box<dyn DataPlane>, AgentError> {
    Agent::bind(config, data_plane).await?.serve(shutdown).await
}

impl Agent {
    /// Reads the data plane back and starts listening.
    ///
    /// # Errors
    /// [`AgentError`] if the configuration is wrong, the address in use, or the data plane fails.
    pub async fn bind(
        config: AgentConfig,
        data_plane: Box<dyn DataPlane>,
    ) -> Result<Self, AgentError> {
        if config.device_id == 0 {
            return Err(AgentError::DeviceId);
        }
        let address = config.listen;
        let refused = |source| AgentError::Listen { address, source };
        let listener = TcpListener::bind(address).await.map_err(refused)?;
        let address = listener.local_addr().map_err(refused)?;
        let events = data_plane.event_fd().map(|fd| fd.try_clone_to_owned()).transpose();
        let events = events.map_err(system("duplicating the event descriptor"))?;
        let mut state = AgentState::new(config.device_id, data_plane)
            .map_err(|refusal| AgentError::Restore(refusal.to_string()))?;
        state.log_start(address).map_err(|error| AgentError::Restore(error.to_string()))?;
        let timed_added = Arc::clone(&state.timed_added);
        let (executor, thread) =
            Executor::start(state).map_err(system("starting the agent's thread"))?;
        Ok(Self { listener, address, executor, thread, events, timed_added })
    }

    /// The address on which it listens.
    #[must_use]
    pub const fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `shutdown` resolves, then returns the data plane with its tables.
    ///
    /// # Errors
    /// [`AgentError`] if the server or its thread fails.
    pub async fn serve(
        self,
        shutdown: impl Future<Output = ()> + Send,
    ) -> Result<Box<dyn DataPlane>, AgentError> {
        let Self { listener, executor, thread, events, timed_added, .. } = self;
        let packets = tokio::spawn(deliver_packets(executor.clone(), events));
        let idle = tokio::spawn(notify_idle(executor.clone(), timed_added));
        let served = serve(listener, &executor, shutdown).await;
        packets.abort();
        idle.abort();
        executor.stop().await;
        tracing::info!("the switch's agent ends");
        let plane = tokio::time::timeout(DRAIN, thread.join()).await.ok().flatten();
        served?;
        plane.ok_or(AgentError::Panicked)
    }
}

fn system(doing: &'static str) -> impl FnOnce(std::io::Error) -> AgentError {
    move |source| AgentError::System { doing, source }
}

async fn serve(
    listener: TcpListener,
    executor: &Executor,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), AgentError> {
    let p4runtime = P4RuntimeServer::new(P4RuntimeService { executor: executor.clone() })
        .max_decoding_message_size(REQUEST_BYTES_MAX);
    let switch = SwitchServer::new(SwitchService { executor: executor.clone() });
    let (stop, stopped) = oneshot::channel::<()>();
    // A response must not wait for the acknowledgement of the one before (Nagle): about 40 ms.
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    let server = tonic::transport::Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE))
        .add_service(p4runtime)
        .add_service(switch)
        .serve_with_incoming_shutdown(incoming, async {
            let _ = stopped.await;
        });
    let mut server = std::pin::pin!(server);
    tokio::select! {
        ended = &mut server => return Ok(ended?),
        () = shutdown => {}
    }
    let _ = stop.send(());
    let closed = Status::unavailable("the switch agent is shutting down");
    let _ = executor.run(move |state| state.close_streams(&closed)).await;
    // Connections that do not end in time are closed with the server.
    match tokio::time::timeout(DRAIN, server).await {
        Ok(ended) => Ok(ended?),
        Err(_) => Ok(()),
    }
}

/// Delivers packet-ins as soon as they arrive.
async fn deliver_packets(executor: Executor, events: Option<OwnedFd>) {
    let events = events.and_then(|fd| {
        // SAFETY: the descriptor is owned by the value that is registered, which neither closes
        // nor replaces it before it is dropped and deregistered.
        unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }.ok()
    });
    let mut handed_over = std::time::Instant::now();
    loop {
        if handed_over.elapsed() < GATHER {
            // A single copy is sent at once; copies that follow closely are sent together.
            tokio::time::sleep(GATHER).await;
        }
        match &events {
            Some(events) => {
                // Cleared before the data plane is read, so that a later packet-in wakes again.
                if let Ok(Ok(mut ready)) =
                    tokio::time::timeout(POLL_BACKSTOP, events.readable()).await
                {
                    ready.clear_ready();
                }
            }
            None => tokio::time::sleep(POLL).await,
        }
        handed_over = std::time::Instant::now();
        loop {
            match executor.run(AgentState::deliver_packets).await {
                Ok(Ok(true)) => {}
                Ok(Ok(false)) => break,
                Ok(Err(refusal)) => {
                    tracing::warn!("cannot take packet-ins from the data plane: {refusal}");
                    tokio::time::sleep(FAILURE_PAUSE).await;
                    break;
                }
                Err(_) => return,
            }
        }
    }
}

/// Looks for idle entries as long as there are any that can become idle, then pauses for ten times as long as that took.
async fn notify_idle(executor: Executor, timed_added: Arc<Notify>) {
    let mut pause = IDLE_SCAN;
    loop {
        tokio::time::sleep(pause).await;
        let started = std::time::Instant::now();
        pause = match executor.run(AgentState::notify_idle).await {
            Ok(Ok(true)) => IDLE_SCAN.max(started.elapsed() * 10),
            Ok(Ok(false)) => {
                // An entry that was added meanwhile has left its mark.
                timed_added.notified().await;
                IDLE_SCAN
            }
            Ok(Err(refusal)) => {
                tracing::warn!("cannot look for idle entries: {refusal}");
                FAILURE_PAUSE
            }
            Err(_) => return,
        };
    }
}

#[cfg(test)]
mod mutation_tests;
