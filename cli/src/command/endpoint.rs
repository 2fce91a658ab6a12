//! The options by which a process becomes an endpoint.

use std::net::{Ipv6Addr, SocketAddr};

use bluebridge_rack::access::{
    CONTROLLER_VARIABLE, INTERFACE_VARIABLE, NAME_VARIABLE, SWITCH_PORT_VARIABLE,
};
use bluebridge_wire::address::{FABRIC_PREFIX, FABRIC_PREFIX_LEN};
use clap::Args;
use ipnet::Ipv6Net;

use super::trust::Trust;

/// Who the process is in the fabric. Inside of a rack everything is in the environment.
#[derive(Clone, Debug, Args)]
pub(super) struct Endpoint {
    /// The endpoint's name; the same name is the same node again
    #[arg(long, env = NAME_VARIABLE)]
    pub(super) name: String,
    /// The interface that leads to the switch; see `bluebridge host up`
    #[arg(long, env = INTERFACE_VARIABLE, value_name = "NAME")]
    pub(super) interface: String,
    /// The switch's port that this interface is connected to
    #[arg(long, env = SWITCH_PORT_VARIABLE, value_name = "N")]
    pub(super) switch_port: u16,
    /// Where the controller listens
    #[arg(long, env = CONTROLLER_VARIABLE, value_name = "ADDRESS")]
    pub(super) controller: SocketAddr,
    /// The space (tenant) to be in
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(super) space: u16,
    #[command(flatten)]
    pub(super) trust: Trust,
}

/// The prefix of every pointer.
pub(super) fn fabric() -> Ipv6Net {
    Ipv6Net::new_assert(Ipv6Addr::new(FABRIC_PREFIX, 0, 0, 0, 0, 0, 0, 0), FABRIC_PREFIX_LEN)
}
