//! What a host with kernel sockets needs to send to pointers and to receive them (docs/operations.md).

use std::net::Ipv6Addr;
use std::path::Path;

use serde::Serialize;

use super::{MacAddress, Netlink, NetworkError, sysctl};

/// The fabric's prefix: every pointer of every space.
pub const FABRIC: (Ipv6Addr, u8) = (Ipv6Addr::new(0xfdbb, 0, 0, 0, 0, 0, 0, 0), 16);

/// The one neighbour of a host on the fabric, whatever pointers it uses.
pub const GATEWAY: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);

/// The gateway's Ethernet address, which the switch takes frames for.
pub const GATEWAY_MAC: MacAddress = MacAddress([0x02, 0xbb, 0x00, 0x00, 0x00, 0x01]);

/// The routing table that delivers arriving fabric traffic locally.
pub const ARRIVAL_TABLE: u32 = 187;

/// Where the rule stands among the host's: after `local` (0), before `main` (32766).
pub const ARRIVAL_PRIORITY: u32 = 1870;

/// Bytes that socket buffers may reach without privilege, for a full window of 32 KiB trains.
pub const SOCKET_BUFFER_BYTES: u32 = 16 << 20;

/// A host's way into the fabric.
#[derive(Clone, Debug)]
pub struct HostFabric {
    /// The interface that leads to the switch.
    pub interface: String,
    /// The gateway's Ethernet address; [`GATEWAY_MAC`] behind a BlueBridge switch.
    pub gateway_mac: MacAddress,
}

/// What [`HostFabric::up`] did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HostReport {
    /// The interface.
    pub interface: String,
    /// Whether the arrival rule is new (it was there already otherwise).
    pub rule_added: bool,
    /// The largest receive buffer a socket may ask for, in bytes; `None` when it cannot be read here.
    pub receive_buffer_bytes: Option<u32>,
    /// The largest send buffer a socket may ask for, in bytes; `None` when it cannot be read here.
    pub send_buffer_bytes: Option<u32>,
}

/// What [`HostFabric::down`] removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HostRemoval {
    /// The interface.
    pub interface: String,
    /// Whether anything was there to remove.
    pub was_up: bool,
}

impl HostFabric {
    /// The ordinary case: the interface leads to a BlueBridge switch.
    pub fn new(interface: impl Into<String>) -> Self {
        Self { interface: interface.into(), gateway_mac: GATEWAY_MAC }
    }

    /// Sets the host up; does no harm when it is already.
    ///
    /// Socket buffer limits are raised where that is allowed and never lowered.
    pub fn up(&self, netlink: &Netlink) -> Result<HostReport, NetworkError> {
        let interface = self.interface.as_str();
        netlink.set_up(interface)?;
        netlink.set_up("lo")?;
        netlink.add_permanent_neighbour(interface, GATEWAY, self.gateway_mac)?;
        netlink.add_gateway_route(FABRIC, GATEWAY, interface)?;
        netlink.add_local_route(FABRIC, ARRIVAL_TABLE)?;
        let rule_added =
            netlink.add_arrival_rule(interface, FABRIC, ARRIVAL_TABLE, ARRIVAL_PRIORITY)?;
        Ok(HostReport {
            interface: self.interface.clone(),
            rule_added,
            receive_buffer_bytes: raise(Path::new("/proc/sys/net/core/rmem_max")),
            send_buffer_bytes: raise(Path::new("/proc/sys/net/core/wmem_max")),
        })
    }

    /// Undoes [`Self::up`], except the socket buffer limits, which others may rely on by now.
    pub fn down(&self, netlink: &Netlink) -> Result<HostRemoval, NetworkError> {
        let interface = self.interface.as_str();
        let rule = netlink.delete_arrival_rules(interface, ARRIVAL_TABLE)? > 0;
        let route = netlink.delete_gateway_route(FABRIC, GATEWAY, interface)?;
        let neighbour = netlink.delete_neighbour(interface, GATEWAY)?;
        if netlink.arrival_interfaces(ARRIVAL_TABLE)?.is_empty() {
            netlink.delete_local_route(FABRIC, ARRIVAL_TABLE)?;
        }
        Ok(HostRemoval { interface: self.interface.clone(), was_up: rule || route || neighbour })
    }
}

/// Raises a limit if it is too low and may be changed; answers what it is afterwards.
fn raise(limit: &Path) -> Option<u32> {
    let before = sysctl::read(limit).ok()?;
    if before >= SOCKET_BUFFER_BYTES {
        return Some(before);
    }
    match sysctl::write(limit, SOCKET_BUFFER_BYTES) {
        Ok(()) => sysctl::read(limit).ok(),
        Err(error) => {
            tracing::debug!(%error, "socket buffer limit left as it is");
            Some(before)
        }
    }
}
