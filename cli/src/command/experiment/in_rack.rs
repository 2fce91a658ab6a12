//! What experiments share that work in a rack of their own: its clients, and its operator.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context;
use bluebridge::{Client, JoinOptions, NodeId};
use bluebridge_rack::Rack;
use bluebridge_rack::control::{Contact, ControlError};
use bluebridge_rack::layout::ENDPOINT_INTERFACE;
use bluebridge_rack::spec::Node;
use bluebridge_transport::udp::UdpTransport;

/// The host of all clients.
pub(super) const CLIENT: Node = Node::Client(1);

/// How long the controller may take to answer.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// A client of a rack, its copies, and the rack's memory servers.
pub(super) struct Joined {
    pub(super) owner: Client<UdpTransport>,
    pub(super) workers: Vec<Client<UdpTransport>>,
    pub(super) servers: Vec<NodeId>,
}

impl Joined {
    /// Joins with `count` copies.
    pub(super) fn to(rack: &Rack, count: u16) -> anyhow::Result<Self> {
        let port = rack.layout().port_of(CLIENT).context("the rack has no client")?.number;
        let controller = format!("http://{}", rack.layout().controller());
        let options =
            JoinOptions::named(CLIENT.to_string()).interface(ENDPOINT_INTERFACE).switch_port(port);
        let (owner, workers) = rack.enter(CLIENT, || -> anyhow::Result<_> {
            let owner = Client::join(&controller, options)?;
            let workers: Result<Vec<_>, _> = (0..count).map(|_| owner.try_clone()).collect();
            Ok((owner, workers?))
        })??;
        let nodes = owner.rack().context("the client did not join")?.memory_nodes;
        let servers = nodes.iter().map(|node| node.node).collect();
        Ok(Self { owner, workers, servers })
    }
}

/// One more copy of a client; its socket is made in the client's namespace.
pub(super) fn another(
    rack: &Rack,
    client: Client<UdpTransport>,
) -> anyhow::Result<[Client<UdpTransport>; 2]> {
    let (client, copy) = rack.enter(CLIENT, move || {
        let copy = client.try_clone();
        (client, copy)
    })?;
    Ok([client, copy?])
}

/// Asks the rack's controller as an operator does.
#[derive(Debug)]
pub(super) struct Operator<'a> {
    rack: &'a Rack,
    contact: Contact,
}

impl<'a> Operator<'a> {
    pub(super) fn of(rack: &'a Rack) -> Self {
        let address: SocketAddr = rack.layout().controller().into();
        Self { rack, contact: address.into() }
    }

    pub(super) fn ask<T: Send>(
        &self,
        question: impl FnOnce(&Contact) -> Result<T, ControlError> + Send,
    ) -> anyhow::Result<T> {
        Ok(self.rack.enter(Node::Switch, || question(&self.contact))??)
    }
}
