//! What a host with kernel sockets needs in order to send to pointers and receive for them (docs/operations.md).

use std::fmt;
use std::net::Ipv6Addr;
use std::path::Path;

use bluebridge_p4::pipeline::MacAddr;
use bluebridge_wire::address::{FABRIC_PREFIX, FABRIC_PREFIX_LEN, Fields};
use bluebridge_wire::{NodeId, Space};
use ipnet::Ipv6Net;
use serde::Serialize;

pub use super::rule::{ARRIVAL_PRIORITY, ARRIVAL_TABLE};
use super::{Netlink, NetworkError, sysctl};

/// The fabric's prefix: every pointer of every space.
pub const FABRIC: Ipv6Net =
    Ipv6Net::new_assert(Ipv6Addr::new(FABRIC_PREFIX, 0, 0, 0, 0, 0, 0, 0), FABRIC_PREFIX_LEN);

/// The only neighbour of a host on the fabric, whatever pointers it uses.
pub const GATEWAY: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);

/// The gateway's Ethernet address; the switch accepts frames for it.
pub const GATEWAY_MAC: MacAddr = MacAddr([0x02, 0xbb, 0x00, 0x00, 0x00, 0x01]);

/// Limit of socket buffers without privileges, for a full window of 32 KiB trains.
pub const SOCKET_BUFFER_BYTES: u32 = 16 << 20;

/// A host's connection to the fabric.
#[derive(Clone, Debug)]
pub struct HostFabric {
    /// The interface that is connected to the switch.
    pub interface: String,
    /// The gateway's Ethernet address; [`GATEWAY_MAC`] behind a BlueBridge switch.
    pub gateway_mac: MacAddr,
    /// Whether RDMA packets are dropped that arrive for addresses which the host does not have: they would end the kernel
    /// of a host with the device `rxe`. The kernel then looks at ports of each packet that arrives.
    pub guards_rdma: bool,
}

/// The result of [`HostFabric::up`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HostReport {
    /// The interface.
    pub interface: String,
    /// Whether the arrival rule is new (otherwise it existed).
    pub rule_added: bool,
    /// The largest receive buffer of a socket, in bytes; `None` if it cannot be read here.
    pub receive_buffer_bytes: Option<u32>,
    /// The largest send buffer of a socket, in bytes; `None` if it cannot be read here.
    pub send_buffer_bytes: Option<u32>,
}

/// The result of [`HostFabric::down`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HostRemoval {
    /// The interface.
    pub interface: String,
    /// Whether there was anything to remove.
    pub was_up: bool,
}

/// The size of an interface's neighbour table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct NeighbourCounts {
    /// Entries that fabric traffic could use: the gateway, and any address of the fabric.
    pub fabric: usize,
    /// All entries.
    pub all: usize,
}

impl NeighbourCounts {
    /// The larger of each count.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self { fabric: self.fabric.max(other.fabric), all: self.all.max(other.all) }
    }
}

/// A part of a host's connection to the fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HostPart {
    /// The rule that directs arriving fabric traffic to [`ARRIVAL_TABLE`].
    ArrivalRule,
    /// The route of that table, which delivers to this host.
    LocalRoute,
    /// The gateway's permanent neighbour entry.
    Neighbour,
    /// The rules before the arrival rule, which drop RDMA packets for addresses that the host does not have.
    RdmaGuard,
    /// The route to every pointer.
    Route,
}

impl HostPart {
    /// All of them, in the order of creation.
    const ALL: [Self; 5] =
        [Self::Neighbour, Self::Route, Self::RdmaGuard, Self::LocalRoute, Self::ArrivalRule];
}

impl fmt::Display for HostPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ArrivalRule => "arrival rule",
            Self::LocalRoute => "local route",
            Self::Neighbour => "neighbour entry of the gateway",
            Self::RdmaGuard => "rules that guard RDMA",
            Self::Route => "route to the fabric",
        })
    }
}

/// How one step of [`HostFabric::up`] is undone.
#[derive(Debug)]
enum Undo {
    /// A part was created.
    Remove(HostPart),
    /// The gateway had another Ethernet address.
    RestoreNeighbour(MacAddr),
    /// An interface was set up.
    SetDown(String),
}

impl HostFabric {
    /// The default: the interface is connected to a BlueBridge switch.
    pub fn new(interface: impl Into<String>) -> Self {
        Self { interface: interface.into(), gateway_mac: GATEWAY_MAC, guards_rdma: false }
    }

    /// With rules that guard RDMA.
    #[must_use]
    pub fn guarding_rdma(self, guards_rdma: bool) -> Self {
        Self { guards_rdma, ..self }
    }

    /// Sets the host up; has no effect if it already is.
    ///
    /// Socket buffer limits are raised if that is permitted, and never lowered.
    ///
    /// # Errors
    /// The first step that the kernel refused; the steps before it are undone.
    pub fn up(&self, netlink: &Netlink) -> Result<HostReport, NetworkError> {
        let mut steps = Vec::new();
        match self.bring_up(netlink, &mut steps) {
            Ok(made) => Ok(HostReport {
                interface: self.interface.clone(),
                rule_added: made.contains(&HostPart::ArrivalRule),
                receive_buffer_bytes: raise(Path::new("/proc/sys/net/core/rmem_max")),
                send_buffer_bytes: raise(Path::new("/proc/sys/net/core/wmem_max")),
            }),
            Err(error) => {
                self.undo(netlink, steps);
                Err(error)
            }
        }
    }

    fn bring_up(
        &self,
        netlink: &Netlink,
        steps: &mut Vec<Undo>,
    ) -> Result<Vec<HostPart>, NetworkError> {
        for interface in [self.interface.as_str(), "lo"] {
            if !netlink.link(interface)?.enabled {
                netlink.set_up(interface)?;
                steps.push(Undo::SetDown(interface.to_owned()));
            }
        }
        let missing = self.missing(netlink)?;
        for part in &missing {
            let replaced = match part {
                HostPart::Neighbour => self.neighbour(netlink)?,
                _ => None,
            };
            let step = replaced.map_or(Undo::Remove(*part), Undo::RestoreNeighbour);
            if *part == HostPart::RdmaGuard {
                // Several rules, of which the first one drops all: those that were made are undone, too.
                steps.push(step);
                self.make(netlink, *part)?;
            } else {
                self.make(netlink, *part)?;
                steps.push(step);
            }
        }
        Ok(missing)
    }

    /// The last step first. Failures are only logged: the caller already has the main error.
    fn undo(&self, netlink: &Netlink, steps: Vec<Undo>) {
        for step in steps.into_iter().rev() {
            let undone = match &step {
                Undo::Remove(part) => self.remove(netlink, *part).map(drop),
                Undo::RestoreNeighbour(mac) => {
                    netlink.add_permanent_neighbour(&self.interface, GATEWAY, *mac)
                }
                Undo::SetDown(interface) => netlink.set_down(interface),
            };
            if let Err(error) = undone {
                tracing::warn!(?step, %error, "cannot undo a step of setting up the host");
            }
        }
    }

    /// The missing parts of what [`Self::up`] creates.
    ///
    /// # Errors
    /// The interface does not exist, or the kernel does not respond.
    pub fn missing(&self, netlink: &Netlink) -> Result<Vec<HostPart>, NetworkError> {
        let mut missing = Vec::new();
        for part in HostPart::ALL {
            let there = match part {
                HostPart::ArrivalRule => netlink.arrival_interfaces()?.contains(&self.interface),
                HostPart::LocalRoute => netlink.has_local_route(FABRIC, ARRIVAL_TABLE)?,
                HostPart::Neighbour => self.neighbour(netlink)? == Some(self.gateway_mac),
                HostPart::RdmaGuard => {
                    !self.guards_rdma || netlink.has_rdma_guard(&self.interface)?
                }
                HostPart::Route => netlink.has_gateway_route(FABRIC, GATEWAY, &self.interface)?,
            };
            if !there {
                missing.push(part);
            }
        }
        Ok(missing)
    }

    /// Creates the missing parts of what [`Self::up`] creates, on an interface that is up; returns them.
    ///
    /// # Errors
    /// The kernel refused; parts that were restored before stay.
    pub fn restore(&self, netlink: &Netlink) -> Result<Vec<HostPart>, NetworkError> {
        let missing = self.missing(netlink)?;
        missing.iter().try_for_each(|part| self.make(netlink, *part))?;
        Ok(missing)
    }

    /// Checks in the kernel whether pointers of a space can be sent and received through the interface,
    /// whichever program set that up. Needs no privileges.
    ///
    /// # Errors
    /// [`NetworkError::NotInFabric`] if they cannot; other errors if the kernel cannot be queried.
    pub fn check(&self, netlink: &Netlink, space: Space) -> Result<(), NetworkError> {
        let fields = Fields { space, node: NodeId(1), command: 0, tag: 0, location: 0 };
        let pointer = fields.to_ipv6();
        let lacks = |lacks| NetworkError::NotInFabric { interface: self.interface.clone(), lacks };
        // A default route would send to another network.
        let sends = netlink.sends_by(pointer, &self.interface)?;
        if sends.is_none_or(|length| length < FABRIC.prefix_len()) {
            return Err(lacks("pointers have no route through it"));
        }
        if !netlink.delivers(pointer, &self.interface)? {
            return Err(lacks("packets that arrive there for pointers are not delivered"));
        }
        Ok(())
    }

    /// The present size of the interface's neighbour table.
    ///
    /// # Errors
    /// The interface does not exist, or the kernel does not respond.
    pub fn count_neighbours(&self, netlink: &Netlink) -> Result<NeighbourCounts, NetworkError> {
        let index = netlink.link(&self.interface)?.index;
        let mut counts = NeighbourCounts::default();
        for entry in netlink.neighbours()?.iter().filter(|entry| entry.interface == index) {
            counts.all += 1;
            if entry.address == GATEWAY || FABRIC.contains(&entry.address) {
                counts.fabric += 1;
            }
        }
        Ok(counts)
    }

    /// The Ethernet address of the gateway's permanent entry.
    fn neighbour(&self, netlink: &Netlink) -> Result<Option<MacAddr>, NetworkError> {
        let index = netlink.link(&self.interface)?.index;
        let mut neighbours = netlink.neighbours()?.into_iter();
        let gateway =
            neighbours.find(|it| it.interface == index && it.address == GATEWAY && it.permanent);
        Ok(gateway.and_then(|it| it.mac))
    }

    fn make(&self, netlink: &Netlink, part: HostPart) -> Result<(), NetworkError> {
        let interface = self.interface.as_str();
        match part {
            HostPart::ArrivalRule => netlink.add_arrival_rule(interface).map(drop),
            HostPart::LocalRoute => netlink.add_local_route(FABRIC, ARRIVAL_TABLE),
            HostPart::Neighbour => {
                netlink.add_permanent_neighbour(interface, GATEWAY, self.gateway_mac)
            }
            HostPart::RdmaGuard => netlink.add_rdma_guard(interface),
            HostPart::Route => netlink.add_gateway_route(FABRIC, GATEWAY, interface),
        }
    }

    /// Removes a part; returns whether it existed.
    fn remove(&self, netlink: &Netlink, part: HostPart) -> Result<bool, NetworkError> {
        let interface = self.interface.as_str();
        match part {
            HostPart::ArrivalRule => netlink.delete_arrival_rule(interface),
            HostPart::LocalRoute => netlink.delete_local_route(FABRIC, ARRIVAL_TABLE),
            HostPart::Neighbour => netlink.delete_neighbour(interface, GATEWAY),
            HostPart::RdmaGuard => netlink.delete_rdma_guard(interface),
            HostPart::Route => netlink.delete_gateway_route(FABRIC, GATEWAY, interface),
        }
    }

    /// Undoes [`Self::up`], except the socket buffer limits, which other programs may use by now.
    pub fn down(&self, netlink: &Netlink) -> Result<HostRemoval, NetworkError> {
        let mut was_up = false;
        for part in
            [HostPart::ArrivalRule, HostPart::RdmaGuard, HostPart::Route, HostPart::Neighbour]
        {
            was_up |= self.remove(netlink, part)?;
        }
        // The local route serves all interfaces of the host that are connected to the fabric.
        if netlink.arrival_interfaces()?.is_empty() {
            self.remove(netlink, HostPart::LocalRoute)?;
        }
        Ok(HostRemoval { interface: self.interface.clone(), was_up })
    }
}

/// Raises a limit if it is too low and may be changed; returns the new value.
fn raise(limit: &Path) -> Option<u32> {
    let before = sysctl::read(limit).ok()?;
    if before >= SOCKET_BUFFER_BYTES {
        return Some(before);
    }
    match sysctl::write(limit, SOCKET_BUFFER_BYTES) {
        Ok(()) => sysctl::read(limit).ok(),
        Err(error) => {
            tracing::debug!(%error, "socket buffer limit not raised");
            Some(before)
        }
    }
}
