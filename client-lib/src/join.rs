//! Joining a rack: the controller tells who the client is, and which memory nodes there are.

use std::{
    hash::{BuildHasher, RandomState},
    io,
    sync::{Arc, OnceLock},
};

use bluebridge_northbound::{
    Attachment, Carrier, Connection, Membership, MembershipError, Options, Registration, Role,
    Snapshot,
};
use bluebridge_transport::{
    OpenError, Transport,
    interface::Interface,
    udp::{UdpConfig, UdpTransport},
};
use bluebridge_wire::{
    NodeId, Space, UDP_PORT, address::FABRIC_PREFIX, address::FABRIC_PREFIX_LEN,
};

use crate::{Client, EndpointConfig, MemoryNode, Service, ServiceState};

/// When an endpoint's service thread starts.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum ServiceStart {
    /// Before the client joins, which fails if another process has the fabric's port on the
    /// interface: then that one is the endpoint.
    AtOnce,
    /// With the first update or subscription.
    #[default]
    OnNeed,
}

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
    /// When the endpoint's service thread starts.
    pub service: ServiceStart,
    /// Whether servers are to tell of memory that is given, freed or zeroed ([`Client::notices`]);
    /// they do once they heard of it, a heartbeat later.
    pub notices: bool,
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
            service: ServiceStart::OnNeed,
            notices: false,
            behaviour: EndpointConfig::new(space, NodeId::ANY, 0),
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
    endpoint: Arc<Endpoint>,
    version: u64,
}

/// What the clients of one endpoint share.
struct Endpoint {
    /// First, so that it ends while the membership lasts.
    service: OnceLock<Result<Service, Arc<str>>>,
    membership: Membership,
    carrier: UdpConfig,
    behaviour: EndpointConfig,
}

impl Endpoint {
    /// Who the endpoint is, and what the rack is like now.
    fn config(&self, snapshot: &Snapshot) -> EndpointConfig {
        let assignment = self.membership.assignment();
        EndpointConfig {
            space: assignment.space,
            node: assignment.node,
            incarnation: assignment.incarnation,
            piece_bytes: u16::try_from(snapshot.piece_bytes).ok(),
            memory_nodes: memory_nodes(snapshot),
            ..self.behaviour.clone()
        }
    }

    fn start_service(&self, carrier: UdpTransport) -> Result<Service, Arc<str>> {
        let config = self.config(&self.membership.snapshot());
        Service::start(&config, carrier).map_err(|error| Arc::from(error.to_string()))
    }
}

impl Joined {
    /// The endpoint's service, started if it was not; `None` if that is impossible.
    pub(crate) fn service(&self) -> Option<&Service> {
        let endpoint = &*self.endpoint;
        let started = endpoint.service.get_or_init(|| {
            let carrier = service_carrier(&endpoint.carrier, UDP_PORT)
                .or_else(|_| service_carrier(&endpoint.carrier, 0));
            let carrier = carrier.map_err(|error| Arc::from(error.to_string()))?;
            endpoint.start_service(carrier)
        });
        started.as_ref().ok()
    }

    pub(crate) fn service_state(&self) -> ServiceState {
        match self.endpoint.service.get() {
            None => ServiceState::NotStarted,
            Some(Ok(service)) => service.state(),
            Some(Err(reason)) => ServiceState::Failed { reason: Arc::clone(reason) },
        }
    }
}

/// The socket of a service thread: few datagrams come, and rarely.
fn service_carrier(carrier: &UdpConfig, port: u16) -> Result<UdpTransport, OpenError> {
    UdpTransport::open(&UdpConfig {
        port,
        // What the switch redirects here has other nodes' addresses.
        address: None,
        receive_batch_count: 4,
        send_batch_count: 8,
        receive_buffer_bytes: 1 << 20,
        send_buffer_bytes: 1 << 20,
        ..carrier.clone()
    })
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
        let JoinOptions {
            name,
            space,
            interface,
            attachment,
            membership,
            carrier,
            behaviour,
            service,
            notices,
        } = options;
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
            notices,
        };
        let filter = ipnet_of_fabric();
        let carrier = UdpConfig {
            device: carrier.device.or(Some(interface)),
            filter: carrier.filter.or(filter),
            ..carrier
        };
        // A port of its own may be there to keep others out, so it is taken first; without one the socket waits for the
        // client's address.
        let transport = match carrier.port {
            0 => None,
            _ => Some(UdpTransport::open(&carrier)?),
        };
        // Whoever has the port is the endpoint, so it is taken before another could be told of.
        let service_socket = match service {
            ServiceStart::AtOnce => Some(service_carrier(&carrier, UDP_PORT)?),
            ServiceStart::OnNeed => None,
        };
        let membership = Membership::join_with(controller, registration, membership)?;
        let service = OnceLock::new();
        let endpoint = Arc::new(Endpoint { service, membership, carrier, behaviour });
        if let Some(socket) = service_socket {
            let _ = endpoint.service.set(endpoint.start_service(socket));
        }
        Ok(Self::of_endpoint(endpoint, transport)?)
    }

    /// Another client of the same endpoint, for another thread; it must be in the network namespace
    /// in which the endpoint joined. The membership lasts as long as one of them.
    ///
    /// # Errors
    /// [`OpenError`] if no socket can be opened; `None` if the client was opened without a controller.
    pub fn open_another(&self) -> Option<Result<Self, OpenError>> {
        let endpoint = Arc::clone(&self.membership.as_ref()?.endpoint);
        Some(Self::of_endpoint(endpoint, None))
    }

    /// A client over `transport`, or else over a socket that is bound to the client's one address.
    fn of_endpoint(
        endpoint: Arc<Endpoint>,
        transport: Option<UdpTransport>,
    ) -> Result<Self, OpenError> {
        let snapshot = endpoint.membership.snapshot();
        let seed = RandomState::new().hash_one(snapshot.version);
        let config = EndpointConfig { seed, ..endpoint.config(&snapshot) };
        let transport = match transport {
            Some(transport) => transport,
            None => UdpTransport::open(&UdpConfig {
                port: 0,
                address: Some(config.address()),
                ..endpoint.carrier.clone()
            })?,
        };
        let mut client = Self::open(config, transport);
        client.membership = Some(Joined { endpoint, version: snapshot.version });
        Ok(client)
    }
}

impl<T: Transport> Client<T> {
    /// What the endpoint knows of the rack; `None` if it was opened without a controller.
    #[must_use]
    pub fn rack(&self) -> Option<Snapshot> {
        self.membership.as_ref().map(|joined| joined.endpoint.membership.snapshot())
    }

    /// Whether the controller is heard; `None` if the client was opened without one.
    #[must_use]
    pub fn connection(&self) -> Option<Connection> {
        self.rack().map(|rack| rack.connection)
    }

    /// Whether the controller told this client of no memory node.
    pub(crate) fn knows_that_none_is_there(&self) -> bool {
        self.rack().is_some_and(|rack| rack.memory_nodes.is_empty())
    }

    /// Takes in the newest list of memory nodes, and the piece size that all their links carry.
    pub(crate) fn refresh_places(&mut self) {
        let Some(joined) = &mut self.membership else { return };
        let snapshot = joined.endpoint.membership.snapshot();
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
