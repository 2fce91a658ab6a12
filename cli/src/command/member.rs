//! How a command becomes an endpoint for its run time: it joins, works, and leaves.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::str::FromStr;
use std::thread;
use std::time::{Duration, Instant};

use bluebridge::{Client, EndpointConfig, JoinError, JoinOptions, NodeId, ServiceStart, Space};
use bluebridge_northbound::MemoryNodeStatus;
use bluebridge_northbound::environment::{
    CONTROLLER_VARIABLE, FRAMES_VARIABLE, INTERFACE_VARIABLE, NAME_VARIABLE, SPACE_VARIABLE,
    SWITCH_PORT_VARIABLE, SwitchPort, parse_controller,
};
use bluebridge_rack::RackError;
use bluebridge_rack::access;
use bluebridge_rack::layout::{ENDPOINT_INTERFACE, Layout};
use bluebridge_rack::network::Netlink;
use bluebridge_rack::network::host::HostFabric;
use bluebridge_rack::process::holder_of_udp_port;
use bluebridge_rack::spec::{Node, RackName};
use bluebridge_rack::state::{RackState, StateError, StateRoot};
use bluebridge_transport::OpenError;
use bluebridge_transport::udp::{Frames, UdpTransport};
use bluebridge_wire::UDP_PORT;
use clap::Args;
use tonic::transport::ClientTlsConfig;

use super::endpoint::parse_name;
use super::trust::{Trust, controller_uri};
use crate::exit::UsageError;

/// How often a command checks whether the endpoint is free.
const LOOK: Duration = Duration::from_millis(20);

/// Selects the endpoint of the command: a node of a rack on this machine, or the endpoint that the options
/// (or the environment, inside a rack) describe.
///
/// An endpoint is one process at a time: a second command waits for the first, up to its deadline.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Endpoint")]
pub(super) struct Member {
    /// Be a client of this rack, whatever the options below are; without any of these options, of
    /// the rack in BLUEBRIDGE_RACK, or of the only one that is up
    #[arg(long, value_name = "NAME")]
    rack: Option<RackName>,
    /// The client of the rack
    #[arg(long = "as", value_name = "NODE")]
    client: Option<Node>,
    /// The endpoint's name; the same name is the same node again, unless it joined in another space meanwhile
    #[arg(long, env = NAME_VARIABLE, value_parser = parse_name)]
    name: Option<String>,
    /// The interface that leads to the switch; see `bluebridge host up`
    #[arg(long, env = INTERFACE_VARIABLE, value_name = "NAME")]
    interface: Option<String>,
    /// The switch's port to which this interface is connected, such as 3 or p3; tor1/3 if there are several switches
    #[arg(long, env = SWITCH_PORT_VARIABLE, value_name = "[SWITCH/]PORT")]
    switch_port: Option<SwitchPort>,
    /// The address of the controller, with or without http://
    #[arg(long, env = CONTROLLER_VARIABLE, value_name = "ADDRESS", value_parser = parse_controller)]
    controller: Option<SocketAddr>,
    /// The space (tenant) to join
    #[arg(long, env = SPACE_VARIABLE, value_name = "N", default_value_t = 1)]
    space: u16,
    /// Send datagrams as frames, past the host's routes: takes half the time, and needs CAP_NET_RAW. With `auto` the
    /// UDP socket sends where that is not possible
    #[arg(long, env = FRAMES_VARIABLE, value_name = "auto|on|off", default_value_t)]
    frames: Frames,
    #[command(flatten)]
    trust: Trust,
    /// Time limit of the join and of each operation, such as 500ms or 5s
    #[arg(long, value_name = "TIME", default_value = "5s")]
    deadline: Deadline,
}

/// A duration on the command line.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline(pub(super) Duration);

impl fmt::Display for Deadline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.0.as_secs(), self.0.subsec_millis()) {
            (seconds, 0) => write!(f, "{seconds}s"),
            _ => write!(f, "{}ms", self.0.as_millis()),
        }
    }
}

impl FromStr for Deadline {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (digits, unit) = match text.strip_suffix("ms") {
            Some(digits) => (digits, 1),
            None => (text.strip_suffix('s').unwrap_or(text), 1000),
        };
        let milliseconds = digits.parse::<u64>().ok().and_then(|count| count.checked_mul(unit));
        milliseconds
            .filter(|count| (1..=3_600_000).contains(count))
            .map(|count| Self(Duration::from_millis(count)))
            .ok_or_else(|| format!("{text:?} is not a time from 1ms to 3600s, such as 500ms or 5s"))
    }
}

/// The data for a join.
#[derive(Clone, Debug)]
pub(super) struct Identity {
    pub(super) name: String,
    pub(super) interface: String,
    pub(super) switch_port: SwitchPort,
    pub(super) controller: SocketAddr,
    pub(super) space: Space,
    pub(super) frames: Frames,
    pub(super) tls: Option<ClientTlsConfig>,
}

/// A joined command.
pub(super) struct Session {
    /// The client; it leaves when dropped.
    pub(super) client: Client<UdpTransport>,
    /// The memory nodes of the space, as of the join.
    pub(super) nodes: Vec<MemoryNodeStatus>,
    /// The interface that leads to the switch.
    pub(super) interface: String,
}

impl Member {
    /// Joins, in the rack's namespace if the command is for a rack; the process moves there.
    pub(super) fn join(&self) -> anyhow::Result<Session> {
        self.join_with(None, join)
    }

    /// Joins as an endpoint that renews leases and responds to redirected requests.
    pub(super) fn join_as_owner(&self, spin: Option<Duration>) -> anyhow::Result<Session> {
        self.join_with(spin, join_as_owner)
    }

    /// Joins as an endpoint that receives the space's notices.
    pub(super) fn join_for_notices(&self) -> anyhow::Result<Session> {
        self.join_with(None, |identity, deadline, spin| {
            join_when_free(identity, deadline, spin, |options| {
                options.service = ServiceStart::AtOnce;
                options.notices = true;
            })
        })
    }

    /// The options that chose a rack's client, each after a space, for commands that are printed.
    pub(super) fn chosen(&self) -> String {
        let rack = self.rack.as_ref().map_or_else(String::new, |rack| format!(" --rack {rack}"));
        let client = self.client.map_or_else(String::new, |client| format!(" --as {client}"));
        rack + &client
    }

    /// The time limit of the join and of each operation.
    pub(super) const fn deadline(&self) -> Duration {
        self.deadline.0
    }

    fn join_with(
        &self,
        spin: Option<Duration>,
        join: impl FnOnce(&Identity, Duration, Option<Duration>) -> Result<Session, JoinError>,
    ) -> anyhow::Result<Session> {
        let identity = self.identity()?;
        let session = join(&identity, self.deadline.0, spin).map_err(|error| {
            let name = &identity.name;
            let words = match (is_in_use(&error), &self.client) {
                (true, _) => {
                    let holder = holder_of_udp_port(UDP_PORT);
                    let holder = holder.map_or_else(String::new, |(pid, name)| format!(" {pid} ({name})"));
                    format!(
                        "cannot join as {name}, because another process{holder} is this endpoint (--as chooses another)"
                    )
                }
                (false, None) => format!("cannot join as {name} (--as chooses another)"),
                (false, Some(_)) => format!("cannot join as {name}"),
            };
            self.trust.explain(anyhow::Error::new(error).context(words))
        })?;
        // Without a route each operation would fail, or wait for its deadline.
        let fabric = HostFabric::new(&identity.interface);
        let checked = Netlink::open().and_then(|netlink| fabric.check(&netlink, identity.space));
        match checked {
            Ok(()) => Ok(session),
            Err(error) => {
                session.leave();
                Err(error.into())
            }
        }
    }

    fn identity(&self) -> anyhow::Result<Identity> {
        let described = [
            ("--name", self.name.is_some()),
            ("--interface", self.interface.is_some()),
            ("--switch-port", self.switch_port.is_some()),
            ("--controller", self.controller.is_some()),
        ];
        let wants_rack = self.rack.is_some() || self.client.is_some();
        if wants_rack || described.iter().all(|(_, given)| !given) {
            return self.enter_rack();
        }
        let (Some(name), Some(interface), Some(switch_port), Some(controller)) =
            (self.name.clone(), self.interface.clone(), self.switch_port.clone(), self.controller)
        else {
            let missing: Vec<_> =
                described.iter().filter(|(_, given)| !given).map(|(name, _)| *name).collect();
            let missing = missing.join(", ");
            return Err(UsageError(format!("an endpoint also needs {missing}")).into());
        };
        let tls = self.trust.config(controller)?;
        let (space, frames) = (Space(self.space), self.frames);
        Ok(Identity { name, interface, switch_port, controller, space, frames, tls })
    }

    fn enter_rack(&self) -> anyhow::Result<Identity> {
        let otherwise =
            "describe the endpoint with --name, --interface, --switch-port and --controller";
        let state = find_rack(self.rack.as_ref(), otherwise)?;
        let node = self.client.unwrap_or(Node::Client(1));
        if !matches!(node, Node::Client(_)) {
            let words = format!("{node} is not a client of the rack; use --as c1, c2, ..");
            return Err(UsageError(words).into());
        }
        let identity = identity_in(&state, node, Space(self.space))?;
        let tls = self.trust.config(identity.controller)?;
        access::join(&state)?;
        access::namespace(&state, node)?.move_caller_in().map_err(RackError::from)?;
        Ok(Identity { frames: self.frames, tls, ..identity })
    }
}

/// The identity of a rack's node.
pub(super) fn identity_in(state: &RackState, node: Node, space: Space) -> anyhow::Result<Identity> {
    let layout = Layout::of(&state.spec);
    let port = layout
        .port_of(node)
        .ok_or_else(|| RackError::NoNode { name: state.spec.name.clone(), node })?;
    Ok(Identity {
        name: node.to_string(),
        interface: ENDPOINT_INTERFACE.to_owned(),
        switch_port: port.number.into(),
        controller: layout.controller().into(),
        space,
        frames: Frames::default(),
        tls: None,
    })
}

/// The rack named by the option or the environment, or the only one; `otherwise` names another remedy.
pub(super) fn find_rack(name: Option<&RackName>, otherwise: &str) -> anyhow::Result<RackState> {
    let root = StateRoot::locate();
    match root.choose(name) {
        Err(error @ StateError::None) => Err(UsageError(format!("{error}; or {otherwise}")).into()),
        name => {
            let name = name.map_err(RackError::from)?;
            Ok(root.read(&name).map_err(RackError::from)?)
        }
    }
}

/// Joins as soon as no other process is this endpoint, which its UDP port shows.
pub(super) fn join(
    identity: &Identity,
    deadline: Duration,
    spin: Option<Duration>,
) -> Result<Session, JoinError> {
    join_when_free(identity, deadline, spin, |options| options.carrier.port = UDP_PORT)
}

/// Like [`join`], but the client's service thread binds the port.
pub(super) fn join_as_owner(
    identity: &Identity,
    deadline: Duration,
    spin: Option<Duration>,
) -> Result<Session, JoinError> {
    join_when_free(identity, deadline, spin, |options| options.service = ServiceStart::AtOnce)
}

fn join_when_free(
    identity: &Identity,
    deadline: Duration,
    spin: Option<Duration>,
    take_port: impl FnOnce(&mut JoinOptions),
) -> Result<Session, JoinError> {
    let until = Instant::now() + deadline;
    let mut options = JoinOptions::named(&identity.name)
        .space(identity.space)
        .interface(&identity.interface)
        .switch(&identity.switch_port.switch)
        .switch_port(identity.switch_port.number);
    options.membership.join_deadline = deadline;
    options.carrier.frames = identity.frames;
    take_port(&mut options);
    options.behaviour =
        EndpointConfig { deadline, spin, ..EndpointConfig::new(identity.space, NodeId::ANY, 0) };
    options.membership.tls.clone_from(&identity.tls);
    let uri = controller_uri(identity.controller, identity.tls.as_ref());
    loop {
        match Client::join(&uri, options.clone()) {
            Err(error) if is_in_use(&error) && Instant::now() < until => thread::sleep(LOOK),
            joined => {
                let client = joined?;
                let nodes = client.rack().map_or_else(Vec::new, |rack| rack.memory_nodes.to_vec());
                return Ok(Session { client, nodes, interface: identity.interface.clone() });
            }
        }
    }
}

/// Whether another process is the endpoint.
fn is_in_use(error: &JoinError) -> bool {
    matches!(error, JoinError::Open(OpenError::Bind { error, .. }) if error.kind() == io::ErrorKind::AddrInUse)
}

/// The error of a memory node that is not one of these.
pub(super) fn no_such_node<'a>(text: &str, names: impl Iterator<Item = &'a str>) -> UsageError {
    let names: Vec<_> = names.collect();
    let others = if names.is_empty() { "and no other".to_owned() } else { names.join(", ") };
    let only = if names.is_empty() { "" } else { "only " };
    UsageError(format!("there is no memory node {text} here, {only}{others}"))
}

impl Session {
    /// The memory node with a name or an id.
    pub(super) fn node(&self, text: &str) -> Result<NodeId, UsageError> {
        if let Some(node) = self.nodes.iter().find(|node| node.name == text) {
            return Ok(node.node);
        }
        let id = text.parse().map(NodeId).ok();
        let known = self.nodes.iter().find(|node| Some(node.node) == id);
        known
            .map(|node| node.node)
            .ok_or_else(|| no_such_node(text, self.nodes.iter().map(|node| node.name.as_str())))
    }

    /// A node's name, or its id if it has none.
    pub(super) fn name_of(&self, id: NodeId) -> String {
        let known = self.nodes.iter().find(|node| node.node == id);
        known.map_or_else(|| format!("node {id}"), |node| node.name.clone())
    }

    /// Leaves; the result of the work does not depend on this.
    pub(super) fn leave(self) {
        if let Err(error) = self.client.close() {
            tracing::debug!(%error, "sessions were not closed");
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        member: Member,
    }

    #[test]
    fn a_port_may_have_its_letter_and_a_controller_its_scheme() {
        for (port, controller) in [("3", "[fd00:bb::1]:7700"), ("p3", "http://[fd00:bb::1]:7700/")]
        {
            let words = ["read", "--switch-port", port, "--controller", controller];
            let member = Line::try_parse_from(words).expect("both are understood").member;
            assert_eq!(member.switch_port, Some(3.into()));
            assert_eq!(member.controller, "[fd00:bb::1]:7700".parse().ok());
        }
        let error = Line::try_parse_from(["read", "--switch-port", "eth3"]).expect_err("no port");
        assert!(error.to_string().contains("write a number such as 3, or p3"), "{error}");
    }

    #[test]
    fn a_deadline_has_a_unit_and_bounds() {
        let parse = |text: &str| text.parse::<Deadline>().map(|it| it.0.as_millis()).ok();
        assert_eq!(parse("250ms"), Some(250));
        assert_eq!((parse("5s"), parse("5")), (Some(5000), Some(5000)));
        for bad in ["", "0", "0ms", "-1s", "5m", "3601s", "18446744073709551615s"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
