//! What a controller is told when it starts.

use std::net::SocketAddr;
use std::path::PathBuf;

use crate::core::CoreConfig;
use crate::reconcile::Timing;

/// Where the northbound API finds what TLS needs, as PEM files.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct TlsPaths {
    /// The controller's certificate, with those that lead to its root.
    pub certificate: PathBuf,
    /// The certificate's private key.
    pub key: PathBuf,
    /// The root that endpoints' certificates must lead to, and then each joins only under a name
    /// that its certificate has; without it every endpoint may call.
    pub client_root: Option<PathBuf>,
}

/// What a controller is told when it starts.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where the northbound API listens; port 0 for any.
    pub listen: SocketAddr,
    /// The P4Runtime server of the switch: `http://host:port`.
    pub switch_uri: String,
    /// The switch's device id.
    pub device_id: u64,
    /// What the switch runs; `None` for the embedded switch.
    pub device_config: Option<Vec<u8>>,
    /// The store's file; `None` keeps the state in memory, for tests only: after a restart the
    /// same node ids are given anew.
    pub store: Option<PathBuf>,
    /// Takes the switch from another controller: with a store that was fenced, or with one that knows
    /// no endpoint although the switch has entries of endpoints. Only by an operator's decision, and
    /// for one start: two controllers that both do this take the switch from each other in turns.
    pub force: bool,
    /// TLS for the northbound API; `None` for plain connections.
    pub tls: Option<TlsPaths>,
    /// DNS names of certificates whose holders may look into the memory servers and free what is there;
    /// whoever may call may do so if [`TlsPaths::client_root`] is not given.
    pub operators: Vec<String>,
    /// The rules for endpoints.
    pub core: CoreConfig,
    /// How patient the loop over the switch is.
    pub timing: Timing,
}

impl Config {
    /// A controller with the usual rules for a switch.
    #[must_use]
    pub fn new(listen: SocketAddr, switch_uri: &str) -> Self {
        Self {
            listen,
            switch_uri: switch_uri.to_owned(),
            device_id: 1,
            device_config: None,
            store: None,
            force: false,
            tls: None,
            operators: Vec::new(),
            core: CoreConfig::default(),
            timing: Timing::default(),
        }
    }
}
