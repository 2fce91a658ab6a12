//! Racks: a switch, a controller, memory servers and clients on one machine, each in its own network
//! namespace, connected by veth pairs.
//!
//! [`Rack::build`] creates a rack in this process, and its drop takes it down; [`Rack::detach`] leaves it
//! running for other commands, which find it by its record ([`state`]).
//!
//! | Files | Content |
//! | --- | --- |
//! | [`spec`], [`layout`], `links` | The specification, the names and addresses derived from it, the links |
//! | `rack`, `site`, [`daemon`], [`teardown`] | Building a rack with or without root; starting and stopping its daemons |
//! | [`state`], [`access`], [`status`], [`controller_report`], [`logs`] | Its record; entering and inspecting it from other commands |
//! | [`open_vswitch`], [`bmv2`] | Switches of others as child processes |
//! | [`hosts`] | The daemon that keeps the interfaces of its nodes set up |
//! | [`namespace`], [`network`], [`process`], [`readiness`] | The basis: namespaces, netlink, processes, readiness of daemons |
//! | [`control`] | Queries to a running controller or switch |

pub mod access;
mod arena;
pub mod bmv2;
pub mod control;
pub mod controller_report;
pub mod daemon;
mod error;
pub mod hosts;
pub mod layout;
mod links;
pub mod logs;
pub mod namespace;
pub mod network;
pub mod open_vswitch;
pub mod process;
mod rack;
pub mod readiness;
mod site;
pub mod spec;
pub mod state;
pub mod status;
pub mod teardown;

use std::time::Duration;

pub use error::{DaemonFailure, RackError};
pub use rack::Rack;
pub use site::{Cancel, Site};

/// The directory of named namespaces, as `ip netns` uses it.
const NAMED_NAMESPACES: &str = "/run/netns";

/// How long daemons may take to end after SIGTERM.
pub const GRACE: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests;
