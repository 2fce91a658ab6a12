//! Configuration of a controller.

use std::net::SocketAddr;
use std::path::PathBuf;

use crate::core::CoreConfig;
use crate::driver::{OpenFlowConnector, OpenFlowSwitch, P4RuntimeConnector, SwitchConnector};
use crate::reconcile::Timing;

/// The files that TLS needs for the northbound API, as PEM.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct TlsPaths {
    /// The controller's certificate, with the chain to its root.
    pub certificate: PathBuf,
    /// The certificate's private key.
    pub key: PathBuf,
    /// The root of the endpoints' certificates; each endpoint then joins only under a name in its
    /// certificate. Without it every endpoint may call.
    pub client_root: Option<PathBuf>,
}

/// Which switch a controller programs, and how.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum SwitchAddress {
    /// By OpenFlow.
    OpenFlow(OpenFlowSwitch),
    /// By P4Runtime.
    P4Runtime {
        /// The server: `http://host:port`.
        uri: String,
        /// The device at this server.
        device_id: u64,
        /// The device configuration; `None` for the embedded switch.
        device_config: Option<Vec<u8>>,
    },
}

impl SwitchAddress {
    /// The embedded switch at `http://host:port`.
    #[must_use]
    pub fn embedded(uri: &str) -> Self {
        Self::P4Runtime { uri: uri.to_owned(), device_id: 1, device_config: None }
    }

    /// Makes connections to it.
    pub(crate) fn connector(&self) -> Box<dyn SwitchConnector> {
        match self {
            Self::OpenFlow(switch) => Box::new(OpenFlowConnector::new(*switch)),
            Self::P4Runtime { uri, device_id, device_config: Some(bytes) } => {
                Box::new(P4RuntimeConnector::with_device_config(uri, *device_id, bytes.clone()))
            }
            Self::P4Runtime { uri, device_id, device_config: None } => {
                Box::new(P4RuntimeConnector::new(uri, *device_id))
            }
        }
    }
}

impl std::fmt::Display for SwitchAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::OpenFlow(switch) => switch.fmt(f),
            Self::P4Runtime { uri, .. } => f.write_str(uri),
        }
    }
}

/// Configuration of a controller.
#[derive(Clone, Debug)]
pub struct Config {
    /// The address on which the northbound API listens; port 0 selects any.
    pub listen: SocketAddr,
    /// The switches, in the order of [`CoreConfig::topology`].
    pub switches: Vec<SwitchAddress>,
    /// The store's file; `None` keeps the state in memory, only for tests: after a restart the
    /// same node ids are assigned again.
    pub store: Option<PathBuf>,
    /// Takes the switches from another controller: with a store that was fenced, or with a store without
    /// endpoints although the switch has entries of endpoints. Only an operator may decide this, and
    /// only for one start: two controllers that both do this take the switch from each other in turns.
    pub force: bool,
    /// TLS for the northbound API; `None` for plain connections.
    pub tls: Option<TlsPaths>,
    /// DNS names of operators' certificates; operators may inspect memory servers and free memory there.
    /// Every caller may do so if [`TlsPaths::client_root`] is not set.
    pub operators: Vec<String>,
    /// The rules for endpoints.
    pub core: CoreConfig,
    /// Timing of the loop over each switch.
    pub timing: Timing,
}

impl Config {
    /// A controller for these switches with default settings; several need a topology.
    #[must_use]
    pub fn new(listen: SocketAddr, switches: Vec<SwitchAddress>) -> Self {
        Self {
            listen,
            switches,
            store: None,
            force: false,
            tls: None,
            operators: Vec::new(),
            core: CoreConfig::default(),
            timing: Timing::default(),
        }
    }

    /// The switches with their addresses, for people.
    pub(crate) fn switch_words(&self) -> String {
        let topology = &self.core.topology;
        let words = topology.switches().zip(&self.switches).map(|(switch, address)| match topology
            .name(switch)
        {
            "" => address.to_string(),
            name => format!("{name}={address}"),
        });
        words.collect::<Vec<_>>().join(", ")
    }
}
