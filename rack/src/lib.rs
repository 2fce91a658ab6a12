//! Racks: a switch, a controller, memory servers and clients on one machine, each in a network
//! namespace of its own, joined by veth pairs.
//!
//! [`Rack::build`] makes one in this process and its drop takes it down; [`Rack::detach`] leaves it to
//! other commands, which find it by its record ([`state`]).
//!
//! | Files | Content |
//! | --- | --- |
//! | [`spec`], [`layout`], `links` | What to build, every name and address that follows from it, the links |
//! | `rack`, `site`, [`daemon`], [`teardown`] | Building it, with root or without; starting and ending what runs in it |
//! | [`state`], [`access`], [`status`], [`controller_report`], [`logs`] | Its record; entering it and looking at it from other commands |
//! | [`hosts`] | The daemon that keeps the interfaces of its nodes set up |
//! | [`namespace`], [`network`], [`process`], [`readiness`] | What it stands on: namespaces, netlink, processes, readiness of daemons |
//! | [`control`] | What an operator asks of a running controller or switch |

pub mod access;
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

/// Where namespaces with names live, as `ip netns` knows them.
const NAMED_NAMESPACES: &str = "/run/netns";

/// How long daemons may take to end when they are asked to.
pub const GRACE: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests;
