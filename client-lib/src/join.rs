//! Joining a rack: the controller assigns the client's identity and lists the memory nodes.

mod options;

use std::{
    hash::{BuildHasher, RandomState},
    io,
    sync::{Arc, OnceLock},
};

use bluebridge_northbound::{
    Carrier, Connection, Membership, MembershipError, MemoryNodeStatus, Registration, Role,
    Snapshot,
};
use bluebridge_transport::{
    OpenError, Transport,
    interface::Interface,
    udp::{UdpConfig, UdpTransport},
};
use bluebridge_wire::{UDP_PORT, address::FABRIC_PREFIX, address::FABRIC_PREFIX_LEN};

pub use options::{JoinOptions, OptionsError, ServiceStart};

use crate::{Client, EndpointConfig, MemoryNode, Service, ServiceState};

/// A client could not join.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// The controller refused, or cannot be reached.
    #[error(transparent)]
    Membership(#[from] MembershipError),
    /// The client was opened without a controller, so its endpoint cannot have another one.
    #[error(
        "the client was opened without a controller; open another one over a carrier of its own"
    )]
    NotJoined,
    /// The socket could not be opened. If the fabric's port is taken, another process is the endpoint
    /// on that interface.
    #[error("{}", of_opening(.0))]
    Open(#[from] OpenError),
    /// The options do not say which endpoint joins which rack.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// The interface does not exist in this network namespace.
    #[error("cannot use interface {interface}: {error}; check its name")]
    Interface {
        /// Its name, as configured.
        interface: String,
        /// The system's error.
        #[source]
        error: io::Error,
    },
}

fn of_opening(error: &OpenError) -> String {
    match error {
        OpenError::Bind { port: UDP_PORT, .. } => format!(
            "{error} and be the endpoint on this interface, such as a memory server: join through another \
             interface, or on another host"
        ),
        error => error.to_string(),
    }
}

/// A membership, and up to where the client has processed its news.
pub(crate) struct Joined {
    endpoint: Arc<Endpoint>,
    version: u64,
}

/// What the clients of one endpoint share.
struct Endpoint {
    /// The first field, so that the service ends while the membership still lasts.
    service: OnceLock<Result<Service, Arc<str>>>,
    membership: Membership,
    carrier: UdpConfig,
    behaviour: EndpointConfig,
}

impl Endpoint {
    /// The endpoint's identity, and the present state of the rack.
    fn config(&self, snapshot: &Snapshot) -> EndpointConfig {
        let assignment = self.membership.assignment();
        EndpointConfig {
            space: assignment.space,
            node: assignment.node,
            incarnation: assignment.incarnation,
            piece_bytes: u16::try_from(snapshot.piece_bytes).ok(),
            memory_nodes: memory_nodes(&snapshot.memory_nodes),
            ..self.behaviour.clone()
        }
    }

    fn start_service(&self, carrier: UdpTransport) -> Result<Service, Arc<str>> {
        let config = self.config(&self.membership.snapshot());
        let roster = self.membership.roster();
        let is_server = Box::new(move |node| roster.is_memory_node(node));
        Service::start_beside(&config, carrier, is_server)
            .map_err(|error| Arc::from(error.to_string()))
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
        // Requests that the switch redirects here have the addresses of other nodes.
        address: None,
        receive_batch_count: 4,
        send_batch_count: 8,
        receive_buffer_bytes: 1 << 20,
        send_buffer_bytes: 1 << 20,
        ..carrier.clone()
    })
}

impl Client<UdpTransport> {
    /// Joins the rack whose controller is at `controller` (`[address]:port`, with or without
    /// `http://`), and opens a UDP socket on the interface. The host's routes to the fabric must be set
    /// up.
    ///
    /// From then on the process is the endpoint, and another process that joins as the same endpoint is
    /// refused, unless [`JoinOptions::service`] says otherwise. The membership lasts as long as the client.
    ///
    /// # Errors
    /// [`JoinError`]; nothing keeps running.
    pub fn join(controller: &str, options: JoinOptions) -> Result<Self, JoinError> {
        options.check()?;
        let uri = options.uri(controller);
        let JoinOptions {
            name,
            space,
            controller: _,
            interface,
            switch,
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
            switch,
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
        // A configured port may serve to keep other processes out, so it is bound first; without one the socket is
        // bound later, to the client's address.
        let transport = match carrier.port {
            0 => None,
            _ => Some(UdpTransport::open(&carrier)?),
        };
        // The process that has the port is the endpoint, so the port is bound before the controller learns of this
        // process. A client that has the port itself keeps others out as well.
        let service_socket = match service {
            ServiceStart::AtOnce if carrier.port != UDP_PORT => {
                Some(service_carrier(&carrier, UDP_PORT)?)
            }
            ServiceStart::AtOnce | ServiceStart::OnNeed => None,
        };
        let membership = Membership::join_with(&uri, registration, membership)?;
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
    /// [`JoinError::NotJoined`]; [`JoinError::Open`].
    pub fn try_clone(&self) -> Result<Self, JoinError> {
        let joined = self.membership.as_ref().ok_or(JoinError::NotJoined)?;
        Ok(Self::of_endpoint(Arc::clone(&joined.endpoint), None)?)
    }

    /// The identity and the carrier for a further client of the same endpoint, also in a process that this one
    /// starts; `None` if this client did not join by itself.
    ///
    /// The endpoint stays a member as long as this process has a client of it. Each client needs a seed of its own.
    #[must_use]
    pub fn further_client(&self) -> Option<(EndpointConfig, UdpConfig)> {
        let endpoint = &self.membership.as_ref()?.endpoint;
        let config = endpoint.config(&endpoint.membership.snapshot());
        Some((config, UdpConfig { port: 0, ..endpoint.carrier.clone() }))
    }

    /// A client over `transport`, or else over a socket that is bound to the client's one address.
    fn of_endpoint(
        endpoint: Arc<Endpoint>,
        transport: Option<UdpTransport>,
    ) -> Result<Self, OpenError> {
        let snapshot = endpoint.membership.snapshot();
        let seed = RandomState::new().hash_one((snapshot.version, std::process::id()));
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
        client.driver.expulsion = Some(endpoint.membership.expulsion());
        client.membership = Some(Joined { endpoint, version: snapshot.version });
        Ok(client)
    }
}

impl<T: Transport> Client<T> {
    /// What the endpoint knows about the rack; `None` if it was opened without a controller.
    #[must_use]
    pub fn rack(&self) -> Option<Snapshot> {
        self.membership.as_ref().map(|joined| joined.endpoint.membership.snapshot())
    }

    /// Whether the controller responds; `None` if the client was opened without one.
    #[must_use]
    pub fn connection(&self) -> Option<Connection> {
        self.rack().map(|rack| rack.connection)
    }

    /// Whether the controller listed no memory node for this client.
    pub(crate) fn knows_that_none_is_there(&self) -> bool {
        self.rack().is_some_and(|rack| rack.memory_nodes.is_empty())
    }

    /// Applies the newest list of memory nodes, and the piece size that all their links carry.
    pub(crate) fn refresh_places(&mut self) {
        let Some(joined) = &mut self.membership else { return };
        let snapshot = joined.endpoint.membership.snapshot();
        if snapshot.version != joined.version {
            joined.version = snapshot.version;
            self.places.replace(&memory_nodes(&snapshot.memory_nodes));
            if let Ok(piece_bytes) = u16::try_from(snapshot.piece_bytes) {
                // The carrier's largest payload was determined when the client was opened.
                let piece_bytes = piece_bytes.min(self.largest_piece_bytes);
                self.driver.requester.set_piece_bytes(piece_bytes);
            }
        }
    }
}

/// Where new pages may go: to the nodes that are live. If none is, then to the silent ones: a busy machine may have delayed
/// their heartbeats, and one that does not respond is named in the error.
fn memory_nodes(known: &[MemoryNodeStatus]) -> Vec<MemoryNode> {
    let is_any_live = known.iter().any(|node| node.live);
    let chosen = known.iter().filter(|node| node.live || !is_any_live);
    let place = |node: &MemoryNodeStatus| MemoryNode {
        node: node.node,
        shard_count: node.shard_count.max(1),
    };
    chosen.map(place).collect()
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
    use core::time::Duration;

    use super::*;

    #[test]
    fn silent_nodes_are_places_if_none_is_live() {
        let status = |node, live| MemoryNodeStatus {
            node: bluebridge_wire::NodeId(node),
            name: format!("s{node}"),
            live,
            generation: bluebridge_wire::ArenaGeneration::new(1).expect("it is not 0"),
            shard_count: 0,
            capacity_pages: 8,
            free_pages: 8,
        };
        let chosen = |known: &[MemoryNodeStatus]| -> Vec<_> {
            memory_nodes(known).iter().map(|place| (place.node.0, place.shard_count)).collect()
        };
        assert_eq!(chosen(&[status(1, false), status(2, true)]), [(2, 1)]);
        assert_eq!(chosen(&[status(1, false), status(2, false)]), [(1, 1), (2, 1)]);
        assert_eq!(chosen(&[]), []);
    }

    #[test]
    fn an_interface_that_is_not_there_is_named() {
        let error = interface("no-such-if").expect_err("it does not exist");
        assert!(error.to_string().contains("no-such-if"));
    }

    #[test]
    fn a_controller_that_is_not_there_is_told() {
        for controller in ["http://[::1]:1", "[::1]:1"] {
            let mut options = JoinOptions::named("lonely").interface("lo").switch_port(1);
            options.service = ServiceStart::OnNeed;
            options.membership.join_deadline = Duration::from_millis(200);
            let error =
                Client::join(controller, options).map(|_| ()).expect_err("no process listens");
            assert!(
                matches!(&error, JoinError::Membership(MembershipError::Unreachable { .. })),
                "{error}"
            );
            let mut cause: &(dyn std::error::Error + 'static) = &error;
            while let Some(inner) = cause.source() {
                cause = inner;
            }
            let refused = cause.downcast_ref::<io::Error>().map(io::Error::kind);
            assert_eq!(
                refused,
                Some(io::ErrorKind::ConnectionRefused),
                "the system's error: {cause:?}"
            );
        }
    }

    #[test]
    fn a_client_can_wait_for_its_controller() {
        let listener = std::net::TcpListener::bind("[::1]:0").expect("a port of loopback");
        let address = listener.local_addr().expect("it is bound");
        drop(listener);
        let mut options = JoinOptions::named("patient").interface("lo").switch_port(1);
        options = options.wait_for_controller();
        options.service = ServiceStart::OnNeed;
        options.membership.join_deadline = Duration::from_millis(100);
        let joining = std::thread::spawn(move || {
            Client::join(&address.to_string(), options).map(|_| ()).expect_err("no gRPC is there")
        });
        std::thread::sleep(Duration::from_secs(1));
        assert!(!joining.is_finished(), "it waits for longer than its deadline");
        // A process that listens and closes each connection at once is not an absent controller.
        let listener = std::net::TcpListener::bind(address).expect("the port is still free");
        listener.set_nonblocking(true).expect("a socket");
        let until = std::time::Instant::now() + Duration::from_secs(20);
        while !joining.is_finished() {
            assert!(std::time::Instant::now() < until, "it waits without end");
            drop(listener.accept());
            std::thread::sleep(Duration::from_millis(1));
        }
        let error = joining.join().expect("it did not panic");
        assert!(matches!(error, JoinError::Membership(_)), "{error}");
    }

    #[test]
    fn the_readme_names_the_controllers_port() {
        let port = format!("]:{}\"", bluebridge_northbound::CONTROLLER_PORT);
        assert!(include_str!("../README.md").contains(&port));
    }
}
