//! One measurement: the contestants, their servers, and the turns between them.

use std::net::{Ipv6Addr, SocketAddrV6, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use bluebridge::{Client, EndpointConfig, NodeId, Placement};
use bluebridge_bench::contest::{self, Contestant, Length, Outcome, PROBE_TURN};
use bluebridge_bench::echo::{self, Echo, Sizes};
use bluebridge_bench::ours::{Operation, Ours, pipeline};
use bluebridge_bench::peers::Waiting;
use bluebridge_bench::placement::Probe;
use bluebridge_bench::summary::median;
use bluebridge_bench::turns::Turns;
use bluebridge_bench::{flood, pin};
use bluebridge_northbound::environment::FRAMES_VARIABLE;
use bluebridge_northbound::{Attachment, Carrier, Membership, Registration, Role};
use bluebridge_rack::controller_report::DirectReadsReport;
use bluebridge_rack::layout::ENDPOINT_INTERFACE;
use bluebridge_rack::network::host::FABRIC;
use bluebridge_rack::spec::Node;
use bluebridge_rack::{Rack, status};
use bluebridge_transport::interface::Interface;
use bluebridge_transport::udp::{Frames, UdpConfig, UdpTransport};
use bluebridge_wire::{EndpointAddress, Space, address::PAGE_BYTES};
use serde::Serialize;

use super::readers::{self, Readers};
use super::{CLIENT, CLIENT_CORE, SECOND, SERVER, serving};
use crate::exit::UsageError;

/// The port of the echo servers, on the same machine as the memory server.
const ECHO_PORT: u16 = 7777;

/// How long the client polls: longer than any response takes, like the clients of the echoes.
const SPIN: Duration = Duration::from_secs(1);

/// Requests outstanding in the pipelined measurements.
const DEPTHS: [u16; 7] = [1, 2, 4, 8, 16, 32, 64];

/// Rounds of each pipelined measurement.
pub(super) const PIPELINED_ROUNDS: usize = 5;

/// Pages used by the pipelined operations: as many as a core's cache can hold.
pub(super) const PIPELINED_PAGES: usize = 64;

/// Turns of the serving thread, in addition to [`PROBE_TURN`].
pub(super) const OURS: usize = 0;
const UNCONNECTED: usize = 1;
const CONNECTED: usize = 2;
/// Sent by the UDP socket, by the host's routes.
const BY_ROUTES: usize = 3;
/// Only if READs are measured, like the following.
const BY_SERVER: usize = 4;
/// Memory of a server that never polls.
const SLEEPING: usize = 5;
// The process of that server answers READs in turn 6.
pub(super) const FLOOD: usize = 7;

/// The subject of a measurement.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) operation: Operation,
    pub(super) bytes: usize,
    pub(super) length: Length,
    pub(super) pipelined: bool,
}

/// The results of a measurement.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    pub(super) operation: Operation,
    pub(super) bytes: usize,
    /// Our p50 divided by that of an unconnected echo of the same sizes.
    pub(super) ratio: f64,
    /// The same of the p99.
    pub(super) ratio_p99: f64,
    /// Our p50 divided by that of a connected one.
    pub(super) ratio_connected: f64,
    /// Our p50 divided by that of the same operation whose requests the UDP socket sends.
    pub(super) ratio_by_routes: f64,
    /// Why our requests are not sent as frames, but by the UDP socket; null if they are.
    pub(super) frames_refusal: Option<String>,
    /// Our p50 divided by that of READs that only the server's process answers.
    pub(super) ratio_by_server: Option<f64>,
    /// The p50 of READs of a server that never polls, divided by ours.
    pub(super) ratio_sleeping: Option<f64>,
    /// READs that the kernel answered, and that it passed on, since the rack was built; or why it answers none. `None` if
    /// none are measured.
    pub(super) direct_reads: Option<DirectReadsReport>,
    pub(super) latency: Outcome,
    pub(super) pipelined: Vec<Pipelined>,
    /// Two clients at once, if READs are measured.
    pub(super) readers: Vec<Readers>,
}

/// Operations per second with several outstanding requests.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Pipelined {
    pub(super) outstanding: u16,
    pub(super) ours_per_second: f64,
    pub(super) bare_per_second: f64,
    pub(super) ratio: f64,
}

/// The two ends of the measurement in the fabric.
pub(super) struct Endpoints {
    membership: Membership,
    pub(super) server: NodeId,
    /// The second server, if there is one; it never polls if READs of a page are measured.
    pub(super) second: Option<NodeId>,
}

impl Endpoints {
    /// Joins as the client, in its namespace.
    pub(super) fn join(controller: &str, switch_port: u16) -> anyhow::Result<Self> {
        let interface = Interface::by_name(ENDPOINT_INTERFACE).context("cannot use the link")?;
        let registration = Registration {
            name: CLIENT.to_string(),
            role: Role::Client,
            space: Space(1),
            mac: interface.mac,
            switch: String::new(),
            attachment: Attachment::Port(switch_port),
            carrier: Carrier::Socket,
            mtu: interface.mtu,
            previous: None,
            notices: false,
        };
        let membership = Membership::join(controller, registration)?;
        let nodes = membership.snapshot().memory_nodes;
        let named =
            |name: Node| nodes.iter().find(|it| it.name == name.to_string()).map(|it| it.node);
        let server = named(SERVER).context("the rack has no memory server")?;
        Ok(Self { membership, server, second: named(SECOND) })
    }

    /// A client with at most `outstanding` operations in flight, which spins.
    pub(super) fn client(
        &self,
        outstanding: u16,
        frames: Frames,
    ) -> anyhow::Result<Client<UdpTransport>> {
        self.waiting_client(outstanding, frames, Waiting::Spinning)
    }

    /// One that waits in a certain way.
    pub(super) fn waiting_client(
        &self,
        outstanding: u16,
        frames: Frames,
        waiting: Waiting,
    ) -> anyhow::Result<Client<UdpTransport>> {
        let spin = match waiting {
            Waiting::Spinning => SPIN,
            Waiting::Sleeping => Duration::ZERO,
        };
        self.open(outstanding, frames, Some(spin))
    }

    /// One that spins for as long as it has learned, as a user's does, with one operation at a time.
    pub(super) fn usual_client(&self, frames: Frames) -> anyhow::Result<Client<UdpTransport>> {
        self.open(1, frames, None)
    }

    fn open(
        &self,
        outstanding: u16,
        frames: Frames,
        spin: Option<Duration>,
    ) -> anyhow::Result<Client<UdpTransport>> {
        let assignment = self.membership.assignment();
        let mut config =
            EndpointConfig::new(assignment.space, assignment.node, assignment.incarnation);
        config.piece_bytes = u16::try_from(assignment.piece_bytes).ok();
        config.spin = spin;
        config.operation_count = outstanding;
        let carrier = UdpConfig {
            address: Some(config.address()),
            device: Some(ENDPOINT_INTERFACE.to_owned()),
            filter: Some(FABRIC),
            frames,
            ..UdpConfig::default()
        };
        Ok(Client::open(config, UdpTransport::open(&carrier)?))
    }

    /// What an operation sends and receives, in pieces that fit the links.
    pub(super) fn sizes(&self, plan: Plan) -> Sizes {
        plan.operation.sizes(plan.bytes, self.piece_bytes())
    }

    /// Bytes of memory in a datagram, at least 1.
    pub(super) fn piece_bytes(&self) -> usize {
        self.membership.assignment().piece_bytes.max(1)
    }

    fn address(&self, node: NodeId) -> Ipv6Addr {
        EndpointAddress::new(self.membership.assignment().space, node, 0).to_ipv6()
    }

    /// A socket with the client's address for an echo.
    pub(super) fn echo_socket(&self) -> anyhow::Result<UdpSocket> {
        Ok(echo::bind(self.address(self.membership.assignment().node), 0)?)
    }

    /// The socket of the echoes' server, in its namespace.
    pub(super) fn echo_socket_of_server(&self) -> std::io::Result<UdpSocket> {
        echo::bind(self.address(self.server), ECHO_PORT)
    }

    pub(super) fn echo_server(&self) -> SocketAddrV6 {
        SocketAddrV6::new(self.address(self.server), ECHO_PORT, 0, 0)
    }
}

/// Measures in the rack, with a serving thread at the server's end.
pub(super) fn run(rack: &Rack, endpoints: &Arc<Endpoints>, plan: Plan) -> anyhow::Result<Report> {
    let turns = Turns::new();
    let probe = Probe::default();
    let sizes = endpoints.sizes(plan);
    let socket = rack
        .enter(SERVER, || endpoints.echo_socket_of_server())?
        .context("cannot open the echo's socket")?;
    let serve = |turn: usize, stop: &AtomicBool| serve(turn, stop, &turns, &probe, &socket, sizes);
    let measure = || measure(rack, endpoints, plan, &turns, &probe);
    let mut report = serving::beside(rack, &turns, serve, measure)?;
    if plan.operation == Operation::Read {
        // Those of three contestants.
        let Length { round_count, warm_up_count, operation_count } = plan.length;
        let read_count = 3 * round_count * (warm_up_count + operation_count);
        report.direct_reads = direct_reads(rack, read_count as u64);
    }
    Ok(report)
}

/// How long a report of all READs may take: some heartbeats.
const REPORT_DEADLINE: Duration = Duration::from_secs(5);

/// What the server reported once it had heard of all these READs.
fn direct_reads(rack: &Rack, read_count: u64) -> Option<DirectReadsReport> {
    let start = Instant::now();
    loop {
        let controller = status::look(rack.state()).controller?;
        let mut nodes = controller.nodes.into_iter();
        let report = nodes.find(|node| node.name == SERVER.to_string())?.direct_reads?;
        let is_complete = report.answered_count + report.passed_count >= read_count;
        if report.refusal.is_some() || is_complete || start.elapsed() > REPORT_DEADLINE {
            return Some(report);
        }
        thread::sleep(Duration::from_millis(100));
    }
}

fn serve(
    turn: usize,
    stop: &AtomicBool,
    turns: &Turns,
    probe: &Probe,
    socket: &UdpSocket,
    sizes: Sizes,
) -> std::io::Result<()> {
    match turn {
        UNCONNECTED | CONNECTED => echo::serve(socket, sizes, stop),
        FLOOD => flood::serve(socket, sizes, stop),
        PROBE_TURN => {
            probe.answer(stop);
            Ok(())
        }
        // The memory server is a separate process.
        _ => {
            turns.sleep(stop);
            Ok(())
        }
    }
}

fn measure(
    rack: &Rack,
    endpoints: &Endpoints,
    plan: Plan,
    turns: &Turns,
    probe: &Probe,
) -> anyhow::Result<Report> {
    pin(CLIENT_CORE).context("cannot pin the client")?;
    let sizes = endpoints.sizes(plan);
    let to = endpoints.echo_server();
    let contestant = |frames, server| -> anyhow::Result<_> {
        let client = endpoints.client(64, frames)?;
        let refusal = client.transport().frames_refusal().map(ToString::to_string);
        let ours = Ours::new(client, plan.operation, server, plan.bytes);
        Ok((ours.map_err(|error| anyhow!(error))?, refusal))
    };
    let frames = frames_of_environment()?;
    let (mut ours, frames_refusal) = contestant(frames, endpoints.server)?;
    let mut by_routes = contestant(Frames::Off, endpoints.server)?.0.called("by routes");
    let mut unconnected = Echo::unconnected(endpoints.echo_socket()?, to, sizes)?;
    let mut connected = Echo::connected(endpoints.echo_socket()?, to, sizes)?;
    // In the order of their turns.
    let mut readers = Vec::new();
    if plan.operation == Operation::Read {
        let sleeper = endpoints.second.context("the rack has no second memory server")?;
        readers.push(contestant(frames, endpoints.server)?.0.by_server());
        readers.push(contestant(frames, sleeper)?.0.called("sleeping server"));
        readers.push(contestant(frames, sleeper)?.0.by_server().called("by the sleeping server"));
    }
    let mut contestants: Vec<&mut dyn Contestant> =
        vec![&mut ours, &mut unconnected, &mut connected, &mut by_routes];
    contestants.extend(readers.iter_mut().map(|ours| -> &mut dyn Contestant { ours }));
    let latency = contest::run(&mut contestants, plan.length, turns, probe)
        .map_err(|error| anyhow!(error))?;
    turns.give(OURS);
    for ours in [ours, by_routes].into_iter().chain(readers) {
        let closed = ours.finish().map_err(|error| anyhow!(error))?.close();
        closed.context("cannot close the sessions")?;
    }
    let pipelines = matches!(plan.operation, Operation::Read | Operation::Write);
    let pipelined =
        if plan.pipelined && pipelines { depths(endpoints, plan, turns)? } else { Vec::new() };
    let is_read = plan.operation == Operation::Read;
    let readers = if plan.pipelined && is_read {
        readers::run(rack, endpoints, plan, turns)?
    } else {
        Vec::new()
    };
    Ok(Report {
        operation: plan.operation,
        bytes: plan.bytes,
        ratio: latency.ratio(OURS, UNCONNECTED),
        ratio_p99: latency.ratio_p99(OURS, UNCONNECTED),
        ratio_connected: latency.ratio(OURS, CONNECTED),
        ratio_by_routes: latency.ratio(OURS, BY_ROUTES),
        frames_refusal,
        ratio_by_server: is_read.then(|| latency.ratio(OURS, BY_SERVER)),
        ratio_sleeping: is_read.then(|| latency.ratio(SLEEPING, OURS)),
        direct_reads: None,
        latency,
        pipelined,
        readers,
    })
}

/// What the servers, whom this process started, do too.
pub(super) fn frames_of_environment() -> anyhow::Result<Frames> {
    let chosen = std::env::var(FRAMES_VARIABLE).unwrap_or_default();
    match chosen.as_str() {
        "" => Ok(Frames::default()),
        chosen => chosen
            .parse()
            .map_err(|reason| UsageError(format!("{FRAMES_VARIABLE}: {reason}")).into()),
    }
}

fn depths(endpoints: &Endpoints, plan: Plan, turns: &Turns) -> anyhow::Result<Vec<Pipelined>> {
    DEPTHS.iter().map(|outstanding| depth(endpoints, plan, turns, *outstanding)).collect()
}

/// One depth: our operations and the bare calls in turn.
fn depth(
    endpoints: &Endpoints,
    plan: Plan,
    turns: &Turns,
    outstanding: u16,
) -> anyhow::Result<Pipelined> {
    let failure = |error: String| anyhow!(error);
    let count = plan.length.operation_count * 4;
    let sizes = endpoints.sizes(plan);
    let bare_socket = endpoints.echo_socket()?;
    turns.give(OURS);
    let mut client = endpoints.client(outstanding, frames_of_environment()?)?;
    let bytes = (PIPELINED_PAGES * PAGE_BYTES) as u64;
    let region = client.create_at(bytes, Placement::Node(endpoints.server))?;
    let (mut ours, mut bare, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..PIPELINED_ROUNDS {
        turns.give(OURS);
        pipeline(&mut client, plan.operation, region, plan.bytes, count / 10).map_err(failure)?;
        let time =
            pipeline(&mut client, plan.operation, region, plan.bytes, count).map_err(failure)?;
        let ours_rate = per_second(count, time);
        turns.give(FLOOD);
        let to = endpoints.echo_server();
        flood::run(&bare_socket, to, sizes, outstanding.into(), count / 10)?;
        let time = flood::run(&bare_socket, to, sizes, outstanding.into(), count)?;
        let bare_rate = per_second(count, time);
        ours.push(ours_rate);
        bare.push(bare_rate);
        ratios.push(ours_rate / bare_rate);
    }
    turns.give(OURS);
    client.delete(region)?;
    client.close()?;
    Ok(Pipelined {
        outstanding,
        ours_per_second: median(&ours),
        bare_per_second: median(&bare),
        ratio: median(&ratios),
    })
}

#[allow(clippy::cast_precision_loss, reason = "operation counts are far below 2^53")]
pub(super) fn per_second(count: usize, time: Duration) -> f64 {
    count as f64 / time.as_secs_f64()
}
