//! Links, addresses, routes and host settings, made with netlink in the calling thread's namespace.
//!
//! * `netlink`: links, addresses and neighbours; `route`: routes and rules; `rule`: the rules of a
//!   host; `sysctl`: settings.
//! * `host`: all that an endpoint's interface needs; `watch`: keeps it so.

pub mod host;
mod netlink;
mod route;
mod rule;
mod sysctl;
pub mod watch;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use bluebridge_switch::offload::OffloadError;
pub use netlink::{LinkEnd, LinkStatus, Neighbour, Netlink};
pub use sysctl::{Ipv6Setting, interface_setting, set_interface_setting};

/// Why the network could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// The kernel did not respond to a netlink request in time.
    #[error("the kernel did not respond within {waited:?}: {action}")]
    Deadline {
        /// The requested action.
        action: String,
        /// The elapsed time.
        waited: Duration,
    },
    /// A rule of another program is where one of BlueBridge's is made or removed, and the kernel takes one for the other.
    #[error(
        "a rule of another program with the priority {priority} has all conditions of BlueBridge's for {interface} \
         and more; give it another priority (`ip -6 rule`)"
    )]
    ForeignRule {
        /// The interface.
        interface: String,
        /// The priority of both rules.
        priority: u32,
    },
    /// The kernel refused a netlink request.
    #[error("the kernel refused to {action}: {source}")]
    Netlink {
        /// The requested action.
        action: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// This namespace has no such interface.
    #[error("no interface named {interface} here; `ip link` lists the interfaces")]
    NoInterface {
        /// The requested name.
        interface: String,
    },
    /// Pointers cannot be sent or received through the interface.
    #[error(
        "{interface} does not lead to the fabric: {lacks}; run `bluebridge host up --interface {interface}` as \
         root (with --watch it is kept up)"
    )]
    NotInFabric {
        /// The interface.
        interface: String,
        /// What is missing.
        lacks: &'static str,
    },
    /// The name is not a valid interface name.
    #[error("{interface:?} is not an interface name: 1 to 15 characters, no space or slash")]
    NotAnInterfaceName {
        /// The given name.
        interface: String,
    },
    /// An offload could not be read or changed.
    #[error(transparent)]
    Offload(#[from] OffloadError),
    /// The netlink socket could not be opened.
    #[error("cannot open a netlink socket: {0}; raise the limit of open files (`ulimit -n`)")]
    Open(#[source] io::Error),
    /// A kernel setting could not be read or written.
    #[error("cannot change the kernel setting {}: {source}", path.display())]
    Sysctl {
        /// The setting's file under `/proc/sys`.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
}

impl NetworkError {
    /// Whether more privileges would help.
    pub fn is_permission(&self) -> bool {
        let source = match self {
            Self::Netlink { source, .. } | Self::Open(source) | Self::Sysctl { source, .. } => {
                source
            }
            Self::Offload(error) => return error.is_permission(),
            _ => return false,
        };
        matches!(source.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem)
    }
}
