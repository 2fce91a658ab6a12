//! The demo without root and user namespaces: servers and clients are threads of
//! this process, connected by queues, and the controller's core computes the routes of the queues.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use bluebridge::{Client, EndpointConfig, Error, MemoryNode, NodeId, Placement, Space};
use bluebridge_controller::core::{
    Attachment, Carrier, Core, CoreConfig, Join, NodeRecord, Ports, Role, Stored, SwitchId, Tables,
};
use bluebridge_memserver::{Claim, Server, ServerConfig, run as serve};
use bluebridge_p4::pipeline::{Action, Key, MacAddr, SwitchPort};
use bluebridge_rack::Cancel;
use bluebridge_rack::control::tables::{self, PortNames, TableLine};
use bluebridge_transport::memory::{EndpointId, Hub, MemoryTransport};
use bluebridge_wire::UDP_PORT;
use bluebridge_wire::address::{Fields, NODE_PREFIX_LEN, PAGE_BYTES};
use ipnet::Ipv6Net;

use super::acts::Cast;
use super::screen::Screen;
use super::{Mode, Summary, latency};
use crate::command::switch_control::{TABLE_COLUMNS, table_rows};

const SPACE: Space = Space(1);

/// The memory of each server.
const MEMORY_BYTES: u64 = 32 << 20;

/// Datagrams that may wait for each endpoint.
const QUEUE_LIMIT: usize = 4096;

/// Time limit of each operation, including calls to a server that is gone.
const DEADLINE: Duration = Duration::from_secs(3);
const PATIENCE: Duration = Duration::from_secs(1);

/// The nodes, in the order of their ports.
const NODES: [(&str, Role); 5] = [
    ("s1", Role::Memory),
    ("s2", Role::Memory),
    ("s3", Role::Memory),
    ("c1", Role::Client),
    ("c2", Role::Client),
];

/// A rack of threads.
struct ThreadRack {
    servers: Vec<Server>,
    cast: Cast<MemoryTransport>,
    tables: Tables,
    names: PortNames,
}

pub(super) fn show(screen: &mut Screen, cancel: &Cancel) -> anyhow::Result<Summary> {
    screen.say(
        "Real in this mode: the protocol, the client library, the memory servers, the controller's decisions.\n\
         Missing: the network, the switch's pipeline and its counters, and the daemons; queues connect \
         the threads, and the controller's directory entries determine their routes.",
    )?;
    screen.step("A rack of threads: three servers, two clients")?;
    let start = Instant::now();
    let mut rack = ThreadRack::build()?;
    screen.say(&format!("   Ready after {:.2} s.", start.elapsed().as_secs_f64()))?;

    screen.step("A pointer is an address")?;
    let pointer = rack.cast.pointer(screen)?;

    screen.step("The switch is the directory")?;
    let lines = rack.lines();
    screen.say("   What the controller's core would install in a switch:")?;
    screen.table(&TABLE_COLUMNS, table_rows(&lines))?;
    cancel.check()?;

    screen.step("Two clients, three servers: the clients share only a pointer")?;
    rack.cast.share(screen)?;
    cancel.check()?;

    screen.step("Any size, across pages")?;
    let transferred_bytes = rack.cast.sizes(screen)?;
    cancel.check()?;

    screen.step("Atomics")?;
    rack.cast.atomics(screen)?;
    cancel.check()?;

    screen.step("A freed pointer is refused")?;
    let stale_pointer = rack.cast.stale(screen)?;
    cancel.check()?;

    screen.step("Latency, without a network")?;
    let node = rack.cast.node(0)?;
    let latency = latency::measure(
        &mut rack.cast.first,
        node,
        "threads and queues, no network",
        screen,
        cancel,
    )?;

    screen.step("A server is stopped")?;
    let stopped_server = rack.stop_server(screen)?;

    screen.step("Clean-up")?;
    for server in rack.servers {
        server.stop()?;
    }
    screen.say("   The threads have ended; nothing was created outside this process.")?;
    Ok(Summary {
        mode: Mode::Process,
        switch: "none",
        seconds: 0.0,
        pointer: pointer.to_string(),
        entry_count: lines.len(),
        transferred_bytes,
        hand_over: None,
        stale_pointer,
        latency,
        directory_packets: None,
        controller_restart: None,
        stopped_server,
        kept_memory: None,
        left_over: Vec::new(),
    })
}

impl ThreadRack {
    fn build() -> anyhow::Result<Self> {
        let mut core = Core::new(CoreConfig::default(), Stored::default(), 1, Instant::now());
        let names: PortNames =
            (1..).zip(NODES).map(|(port, (name, _))| (port, name.to_owned())).collect();
        let listed = names.iter().map(|(port, name)| (SwitchPort(*port), name.clone()));
        core.learn_ports(SwitchId::default(), Ports::Listed(listed.collect()));
        let records =
            (1..).zip(NODES).map(|(port, (name, role))| admit(&mut core, port, name, role));
        let records = records.collect::<anyhow::Result<Vec<_>>>()?;
        let tables = core.desired(SwitchId::default());

        let hub = Hub::new(QUEUE_LIMIT);
        let mut carriers = Vec::new();
        for record in &records {
            let port = if record.role == Role::Memory { UDP_PORT } else { 40_000 + record.port };
            carriers.push(hub.attach(port, &[]).context("cannot attach to the queues")?);
        }
        let ends: Vec<EndpointId> = carriers.iter().map(MemoryTransport::id).collect();
        connect(&hub, &tables, &ends)?;

        let mut servers = Vec::new();
        let mut clients = Vec::new();
        let nodes: Vec<_> = records.iter().filter(|record| record.role == Role::Memory).collect();
        let memory_nodes: Vec<_> =
            nodes.iter().map(|record| MemoryNode { node: record.id(), shard_count: 1 }).collect();
        for (record, carrier) in records.iter().zip(carriers) {
            if record.role == Role::Memory {
                let seed = u64::from(record.node);
                let mut config =
                    ServerConfig::new(SPACE, record.id(), record.incarnation, MEMORY_BYTES, seed);
                config.claim = Claim::OnDemand;
                servers.push(serve(&config, vec![carrier])?);
            } else {
                let mut config = EndpointConfig::new(SPACE, record.id(), record.incarnation);
                config.memory_nodes.clone_from(&memory_nodes);
                config.deadline = DEADLINE;
                clients.push(Client::open(config, carrier));
            }
        }
        let (second, first) = (clients.pop(), clients.pop());
        let nodes = nodes.iter().map(|record| (record.name.clone(), record.id())).collect();
        let (Some(first), Some(second)) = (first, second) else {
            return Err(anyhow!("there are fewer than two clients"));
        };
        Ok(Self { servers, cast: Cast { first, second, nodes }, tables, names })
    }

    fn lines(&self) -> Vec<TableLine> {
        let groups: BTreeMap<u32, Vec<u16>> = self
            .tables
            .groups
            .iter()
            .map(|(group, ports)| (u32::from(*group), ports.iter().map(|port| port.0).collect()))
            .collect();
        let entries = self.tables.entries.iter();
        let lines = entries.filter_map(|(key, body)| {
            Some(tables::describe(key, body.action.as_ref()?, &groups, &self.names))
        });
        lines.collect()
    }

    fn stop_server(&mut self, screen: &Screen) -> anyhow::Result<String> {
        let victim = self.cast.node(2)?;
        let lost = self.cast.first.alloc_write_at(b"gone soon", Placement::Node(victim))?;
        self.servers.pop().context("there are three servers")?.stop()?;
        self.cast.second.set_deadline(PATIENCE);
        let error = match self.cast.second.read(lost.base(), &mut [0; 9]) {
            Err(error @ (Error::Unreachable { .. } | Error::Refused { .. })) => error,
            Err(error) => return Err(error).context("a stopped server must be unreachable"),
            Ok(()) => return Err(anyhow!("a stopped server responded")),
        };
        screen.say(&format!(
            "   s3 (node {victim}) was stopped. c2 reads {}:\n\n      {error}\n",
            lost.base()
        ))?;
        Ok(error.to_string())
    }
}

/// Admits a thread as an endpoint, by the controller's own rules.
fn admit(core: &mut Core, port: u16, name: &str, role: Role) -> anyhow::Result<NodeRecord> {
    let is_memory = role == Role::Memory;
    let [high, low] = port.to_be_bytes();
    let join = Join {
        name: name.to_owned(),
        role,
        space: SPACE,
        mac: MacAddr([0x02, 0xdd, 0, 0, high, low]),
        switch: String::new(),
        attachment: Attachment::Port(SwitchPort(port)),
        capacity_pages: if is_memory { MEMORY_BYTES / PAGE_BYTES as u64 } else { 0 },
        shard_count: u16::from(is_memory),
        carrier: Carrier::Socket,
        mtu: 9000,
        nonce: u64::from(port),
        previous: None,
        notices: true,
    };
    let assigned = core.join(Instant::now(), &join, [0; 16])?;
    Ok(assigned.0)
}

/// Connects the queues as the directory says.
fn connect(hub: &Hub, tables: &Tables, ends: &[EndpointId]) -> anyhow::Result<()> {
    let end = |port: SwitchPort| ends.get(usize::from(port.0) - 1).copied();
    let mut connected = 0;
    for (key, body) in &tables.entries {
        match (key, &body.action) {
            (Key::Directory { prefix, prefix_len: NODE_PREFIX_LEN }, Some(Action::Forward(to))) => {
                let address = std::net::Ipv6Addr::from((prefix >> 64) << 80);
                let end = end(to.port).context("an entry leads to no port")?;
                hub.route(Ipv6Net::new(address, NODE_PREFIX_LEN)?, &[end])?;
                connected += 1;
            }
            (Key::Anycast { .. }, Some(Action::Select(members))) => {
                // Queues do not choose by weight: the first member gets all requests.
                let member = members.first().context("no server for CREATE")?;
                let end = end(member.forward.port).context("an entry leads to no port")?;
                let any =
                    Fields { space: SPACE, node: NodeId::ANY, command: 0, tag: 0, location: 0 };
                hub.route(Ipv6Net::new(any.to_ipv6(), NODE_PREFIX_LEN)?, &[end])?;
            }
            _ => {}
        }
    }
    ensure!(connected == ends.len(), "{connected} of {} nodes have a directory entry", ends.len());
    Ok(())
}
