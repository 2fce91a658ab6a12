//! The controller: desired state, reconcile loop, southbound drivers, northbound API.
//!
//! * [`core`]: pure controller state machine: its inputs are events and the time, its output is the desired tables.
//! * [`migration`]: live migration: which server should have which pages; pure as well.
//! * [`plan`]: the difference between desired and installed tables, in a safe order.
//! * [`reconcile`]: installs the desired tables in a switch, through [`driver`]; one loop for each switch.
//! * [`redirect`]: which leased pages lead to their owners; owned by the loop of [`reconcile`].
//! * [`store`]: the state that survives a restart.
//! * [`Controller`] and [`run`]: everything together, with the northbound API (`service`);
//!   `shared` is the state that its tasks share, `secret` a file that only its owner may read.

pub mod config;
pub mod core;
pub mod driver;
pub mod migration;
pub mod plan;
pub mod reconcile;
pub mod redirect;
mod secret;
mod service;
mod shared;
pub mod store;

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
#[cfg(feature = "tls")]
use std::time::SystemTime;

use bluebridge_northbound::ATTEND_BYTES_MAX;
use bluebridge_northbound::proto::{
    controller_server::ControllerServer, operations_server::OperationsServer,
};
#[cfg(feature = "tls")]
use bluebridge_northbound::tls::TlsFileError;
use tokio::net::TcpListener;
use tokio::sync::{oneshot, watch};
use tokio::task::{JoinError, JoinSet};
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;

pub use config::{Config, SwitchAddress, TlsPaths};
use driver::DriverError;
use futures::future::select_all;
use reconcile::{Claim, Desired, Outbid, Reconciler};
use redirect::Redirects;
use service::{Northbound, Operators};
use shared::{SharedState, SwitchEnds};
use store::{Store, StoreError};

/// How long a call of the northbound API may take.
const CALL_DEADLINE: Duration = Duration::from_secs(5);

/// Open calls per connection.
const CALLS_PER_CONNECTION: usize = 64;

/// How long open calls may take to end when the controller ends.
const FAREWELL: Duration = Duration::from_secs(1);

/// How long to wait for the switch before the controller reports that it is ready.
const SWITCH_WAIT: Duration = Duration::from_secs(2);

/// Why the controller ended or did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ControllerError {
    /// Another process has the address, or it is not an address of this host.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        source: std::io::Error,
    },
    /// The configuration does not have one address for each switch.
    #[error("{count} addresses for {switches} switches")]
    Addresses {
        /// The number of addresses.
        count: usize,
        /// The number of switches.
        switches: usize,
    },
    /// The store cannot be used; nothing unstored was acknowledged.
    #[error(transparent)]
    Store(Arc<StoreError>),
    /// Another controller has a switch, or it has more ports than can be flooded to.
    #[error(transparent)]
    Switch(DriverError),
    /// Another controller took the switch from one with this store. An operator must decide which of the
    /// two is the right one.
    #[error(
        "another controller (election id {by}) took the switch from this one. If this is the right one, \
         stop the other and start this one once with --force"
    )]
    WasFenced {
        /// The other's election id.
        by: store::ElectionId,
    },
    /// The certificate, the key or the root cannot be used.
    #[cfg(feature = "tls")]
    #[error(transparent)]
    Tls(#[from] TlsFileError),
    /// TLS was requested.
    #[cfg(not(feature = "tls"))]
    #[error("this build of the controller has no TLS; build with the feature `tls`")]
    NoTls,
    /// The northbound server failed.
    #[error("the northbound API failed: {0}")]
    Serve(String),
}

impl From<StoreError> for ControllerError {
    fn from(error: StoreError) -> Self {
        Self::Store(Arc::new(error))
    }
}

/// Runs a controller until `shutdown`. The switch does not change when it ends.
///
/// # Errors
/// [`ControllerError`]: it could not start, or must not continue.
pub async fn run(
    config: Config,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), ControllerError> {
    Controller::bind(config).await?.run(shutdown).await
}

/// A controller with its store and its address that does not work yet.
#[derive(Debug)]
pub struct Controller {
    config: Config,
    store: Store,
    listener: TcpListener,
    server: Server,
    installed: Option<oneshot::Sender<()>>,
}

impl Controller {
    /// Opens the store and the port.
    ///
    /// # Errors
    /// [`ControllerError`].
    pub async fn bind(config: Config) -> Result<Self, ControllerError> {
        let server = server(&config)?;
        let topology = &config.core.topology;
        let count = config.switches.len();
        if count != topology.switch_count() {
            return Err(ControllerError::Addresses { count, switches: topology.switch_count() });
        }
        for switch in topology.switches() {
            let count = config.core.ports.iter().filter(|place| place.switch == switch).count();
            if count > core::GROUP_PORTS_MAX {
                let most = core::GROUP_PORTS_MAX;
                return Err(ControllerError::Switch(DriverError::TooManyPorts { count, most }));
            }
        }
        let store = match &config.store {
            Some(path) => Store::open(path)?,
            None => Store::in_memory()?,
        };
        if let Some(by) = store.fenced_by() {
            if !config.force {
                return Err(ControllerError::WasFenced { by });
            }
            store.outbid(by)?;
        }
        let address = config.listen;
        let listener = TcpListener::bind(address)
            .await
            .map_err(|source| ControllerError::Listen { address, source })?;
        Ok(Self { config, store, listener, server, installed: None })
    }

    /// The address on which the northbound API listens.
    ///
    /// # Errors
    /// [`ControllerError::Listen`] if the system does not report it.
    pub fn local_addr(&self) -> Result<SocketAddr, ControllerError> {
        let address = self.config.listen;
        self.listener.local_addr().map_err(|source| ControllerError::Listen { address, source })
    }

    /// Resolves once the switches have their first tables, so that endpoints can reach the controller
    /// through them; or after two seconds without a switch.
    pub fn installed(&mut self) -> oneshot::Receiver<()> {
        let (send, installed) = oneshot::channel();
        self.installed = Some(send);
        installed
    }

    /// Runs until `shutdown`.
    ///
    /// # Errors
    /// [`ControllerError`]: it must not continue.
    pub async fn run(
        mut self,
        shutdown: impl Future<Output = ()> + Send,
    ) -> Result<(), ControllerError> {
        let store = Arc::new(self.store);
        let stored = store.load()?;
        let (election_id, is_new) = (store.election_id(), stored.nodes.is_empty());
        tracing::info!(
            listen = %self.config.listen,
            switches = %self.config.switch_words(),
            start = store.start_count(),
            known_nodes = stored.nodes.len(),
            "the controller starts"
        );
        let (mut reconcilers, mut switches) = (Vec::new(), Vec::new());
        for connector in self.config.switches.iter().map(SwitchAddress::connector) {
            let (send, desired) = watch::channel(Desired::default());
            let outbid = self.config.force.then(|| outbid(&store));
            let claim = Claim { election_id, is_new, outbid };
            let redirects =
                Redirects::new(self.config.core.redirects, self.config.core.redirect_budget);
            let (reconciler, view) =
                Reconciler::new(connector, claim, self.config.timing, redirects, desired);
            reconcilers.push(Box::pin(reconciler.run()));
            switches.push(SwitchEnds { desired: send, view });
        }
        let shared = Arc::new(SharedState::new(self.config.core, store, stored, switches));
        let _closing = Closing(Arc::clone(&shared));
        let (stop, stopped) = oneshot::channel::<()>();
        let service = ControllerServer::new(Northbound::new(Arc::clone(&shared)));
        let operators = Operators::new(Arc::clone(&shared), self.config.operators);
        let rebalancing = operators.rebalancing();
        let server = self.server.add_service(service);
        // Reports of memory servers are the largest messages.
        let operations =
            OperationsServer::new(operators).max_decoding_message_size(ATTEND_BYTES_MAX);
        let serving = server.add_service(operations).serve_with_incoming_shutdown(
            TcpIncoming::from(self.listener).with_nodelay(Some(true)),
            async {
                // A dropped sender ends the server as well.
                drop(stopped.await);
            },
        );
        tokio::pin!(serving);
        // Tasks, so that they run where the timers and the connections do: waking another thread would cost more than
        // what they do. They end with this set.
        let mut tending = JoinSet::new();
        tending.spawn(Arc::clone(&shared).run_core());
        tending.spawn(rebalancing);
        let outcome = tokio::select! {
            () = shutdown => Ok(()),
            (error, ..) = select_all(reconcilers) => {
                if let DriverError::Fenced { theirs, .. } = error {
                    shared.note_fenced(theirs);
                }
                Err(ControllerError::Switch(error))
            }
            Some(ended) = tending.join_next() => {
                // A panic of either was one of this function's before.
                Err(ControllerError::Store(ended.unwrap_or_else(resume)))
            }
            error = shared.failed() => Err(ControllerError::Store(error)),
            never = notify_installed(&shared, self.installed) => match never {},
            served = &mut serving => {
                return served.map_err(|error| ControllerError::Serve(error.to_string()));
            }
        };
        if outcome.is_ok() {
            tracing::info!("the controller ends");
        }
        drop(stop);
        // Open watches would keep the server running without limit.
        drop(tokio::time::timeout(FAREWELL, serving).await);
        outcome
    }
}

/// Passes on the panic of a task.
fn resume<T>(error: JoinError) -> T {
    match error.try_into_panic() {
        Ok(panic) => std::panic::resume_unwind(panic),
        Err(error) => unreachable!("nobody cancels it: {error}"),
    }
}

/// Provides greater election ids than other controllers', while the store is open.
fn outbid(store: &Arc<Store>) -> Outbid {
    let store = Arc::downgrade(store);
    Box::new(move |theirs| match store.upgrade() {
        Some(store) => store.outbid(theirs),
        None => Err(StoreError::Io("it is closed".to_owned())),
    })
}

async fn notify_installed(shared: &SharedState, waiter: Option<oneshot::Sender<()>>) -> Infallible {
    if let Some(waiter) = waiter {
        shared.installed(SWITCH_WAIT).await;
        // The receiver may be gone.
        let _ = waiter.send(());
    }
    std::future::pending().await
}

/// Closes the store when the controller ends, even if it is dropped.
struct Closing(Arc<SharedState>);

impl Drop for Closing {
    fn drop(&mut self) {
        self.0.close();
    }
}

fn server(config: &Config) -> Result<Server, ControllerError> {
    let server = Server::builder()
        .timeout(CALL_DEADLINE)
        .concurrency_limit_per_connection(CALLS_PER_CONNECTION)
        .http2_keepalive_interval(Some(Duration::from_secs(10)))
        .http2_keepalive_timeout(Some(Duration::from_secs(10)));
    match &config.tls {
        None => Ok(server),
        Some(paths) => secured(server, paths),
    }
}

#[cfg(feature = "tls")]
fn secured(server: Server, paths: &TlsPaths) -> Result<Server, ControllerError> {
    use bluebridge_northbound::tls::{
        defect_of_certificate, read_certificates, read_key, unusable,
    };
    use tonic::transport::{Certificate, Identity, ServerTlsConfig};
    let certificate = read_certificates(&paths.certificate)?;
    let key = read_key(&paths.key)?;
    if secret::is_open_to_all(&paths.key) {
        // A refusal would stop a rack whose key may be known already; the operator must decide.
        tracing::warn!(
            key = %paths.key.display(),
            "every user of this machine can read the private key; use `chmod 600`"
        );
    }
    // The switch needs a controller also while no endpoint can join, and the clock of this machine may be wrong.
    if let Some(defect) = defect_of_certificate(&paths.certificate, SystemTime::now()) {
        tracing::error!(
            certificate = %paths.certificate.display(),
            "endpoints cannot join, because the controller's certificate {defect}; replace it and start the \
             controller again"
        );
    }
    let mut tls = ServerTlsConfig::new().identity(Identity::from_pem(certificate, key));
    if let Some(root) = &paths.client_root {
        tls = tls.client_ca_root(Certificate::from_pem(read_certificates(root)?));
    }
    let identity = Some((&*paths.certificate, &*paths.key));
    server.tls_config(tls).map_err(|error| unusable(identity, &error).into())
}

#[cfg(not(feature = "tls"))]
fn secured(_: Server, _: &TlsPaths) -> Result<Server, ControllerError> {
    Err(ControllerError::NoTls)
}
