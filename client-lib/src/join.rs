//! Joining a rack: the controller tells who the client is, and which memory nodes there are.

use std::io;

use bluebridge_northbound::{
    Attachment, Carrier, Connection, Membership, MembershipError, Options, Registration, Role,
    Snapshot,
};
use bluebridge_transport::{
    OpenError,
    interface::Interface,
    udp::{UdpConfig, UdpTransport},
};
use bluebridge_wire::{NodeId, Space, address::FABRIC_PREFIX, address::FABRIC_PREFIX_LEN};

use crate::{Client, EndpointConfig, MemoryNode, Placement};

/// How a client joins.
#[derive(Clone, Debug)]
pub struct JoinOptions {
    /// The endpoint's name; the same name is the same node again.
    pub name: String,
    /// The tenant.
    pub space: Space,
    /// The local interface that leads to the switch.
    pub interface: String,
    /// Where that interface is connected to the switch.
    pub attachment: Attachment,
    /// Deadlines and secrecy of the membership.
    pub membership: Options,
    /// The UDP socket; its device is the interface unless it names one.
    pub carrier: UdpConfig,
    /// Everything else about the client; who it is and what there is comes from the controller.
    pub behaviour: EndpointConfig,
}

impl JoinOptions {
    /// The usual behaviour for an endpoint whose interface is connected to the switch's interface
    /// `switch_interface`.
    #[must_use]
    pub fn new(name: &str, space: Space, interface: &str, switch_interface: &str) -> Self {
        Self {
            name: name.to_owned(),
            space,
            interface: interface.to_owned(),
            attachment: Attachment::Interface(switch_interface.to_owned()),
            membership: Options::default(),
            carrier: UdpConfig::default(),
            behaviour: EndpointConfig {
                placement: Placement::TwoChoices,
                ..EndpointConfig::new(space, NodeId::ANY, 0)
            },
        }
    }
}

/// A client could not join.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// The controller refused, or is not there.
    #[error(transparent)]
    Membership(#[from] MembershipError),
    /// The socket could not be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The interface does not exist in this network namespace.
    #[error("cannot use interface {interface}: {error}; is its name right?")]
    Interface {
        /// Its name, as configured.
        interface: String,
        /// What the system said.
        #[source]
        error: io::Error,
    },
}

/// A membership, and what of its news the client has taken in.
pub(crate) struct Joined {
    membership: Membership,
    version: u64,
}

impl Client<UdpTransport> {
    /// Joins the rack whose controller is at `controller` (`http://host:port`), and opens a UDP
    /// socket on the interface. The host's routes to the fabric must be set up.
    ///
    /// The membership lasts as long as the client.
    ///
    /// # Errors
    /// [`JoinError`]; nothing keeps running.
    pub fn join(controller: &str, options: JoinOptions) -> Result<Self, JoinError> {
        let JoinOptions { name, space, interface, attachment, membership, carrier, behaviour } =
            options;
        let link = self::interface(&interface)?;
        let registration = Registration {
            name,
            role: Role::Client,
            space,
            mac: link.mac,
            attachment,
            carrier: Carrier::Socket,
            mtu: link.mtu,
            previous: None,
        };
        let filter = ipnet_of_fabric();
        let carrier = UdpConfig {
            device: carrier.device.or(Some(interface)),
            filter: carrier.filter.or(filter),
            ..carrier
        };
        let transport = UdpTransport::open(&carrier)?;
        let membership = Membership::join_with(controller, registration, membership)?;
        let assignment = membership.assignment();
        let snapshot = membership.snapshot();
        let config = EndpointConfig {
            space: assignment.space,
            node: assignment.node,
            incarnation: assignment.incarnation,
            piece_bytes: u16::try_from(snapshot.piece_bytes).ok(),
            memory_nodes: memory_nodes(&snapshot),
            ..behaviour
        };
        let mut client = Self::open(config, transport);
        client.membership = Some(Joined { membership, version: snapshot.version });
        Ok(client)
    }
}

impl<T> Client<T> {
    /// What the endpoint knows of the rack; `None` if it was opened without a controller.
    #[must_use]
    pub fn rack(&self) -> Option<Snapshot> {
        self.membership.as_ref().map(|joined| joined.membership.snapshot())
    }

    /// Whether the controller is heard; `None` if the client was opened without one.
    #[must_use]
    pub fn connection(&self) -> Option<Connection> {
        self.rack().map(|rack| rack.connection)
    }

    /// Takes in the newest list of memory nodes, and the piece size that all their links carry.
    pub(crate) fn refresh_places(&mut self) {
        let Some(joined) = &mut self.membership else { return };
        let snapshot = joined.membership.snapshot();
        if snapshot.version != joined.version {
            joined.version = snapshot.version;
            self.places.replace(&memory_nodes(&snapshot));
            if let Ok(piece_bytes) = u16::try_from(snapshot.piece_bytes) {
                // What the carrier can take was settled when the client was opened.
                let piece_bytes = piece_bytes.min(self.largest_piece_bytes);
                self.driver.requester.set_piece_bytes(piece_bytes);
            }
        }
    }
}

fn memory_nodes(snapshot: &Snapshot) -> Vec<MemoryNode> {
    let live = snapshot.memory_nodes.iter().filter(|node| node.live);
    live.map(|node| MemoryNode { node: node.node, shard_count: node.shard_count.max(1) }).collect()
}

fn ipnet_of_fabric() -> Option<ipnet::Ipv6Net> {
    let address = std::net::Ipv6Addr::new(FABRIC_PREFIX, 0, 0, 0, 0, 0, 0, 0);
    ipnet::Ipv6Net::new(address, FABRIC_PREFIX_LEN).ok()
}

fn interface(name: &str) -> Result<Interface, JoinError> {
    Interface::by_name(name)
        .map_err(|error| JoinError::Interface { interface: name.to_owned(), error })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_that_is_not_there_is_named() {
        let error = interface("no-such-if").expect_err("it does not exist");
        assert!(error.to_string().contains("no-such-if"));
    }

    #[test]
    fn a_controller_that_is_not_there_is_told() {
        let mut options = JoinOptions::new("lonely", Space(1), "lo", "nowhere");
        options.membership.join_deadline = core::time::Duration::from_millis(200);
        let error =
            Client::join("http://[::1]:1", options).map(|_| ()).expect_err("nobody listens");
        assert!(matches!(error, JoinError::Membership(_) | JoinError::Open(_)), "{error}");
    }
}
