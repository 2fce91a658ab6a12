//! `bluebridge switch tables|ports|impair`: queries and impairs a running switch.

use std::net::SocketAddr;
use std::time::Duration;

use bluebridge_controller::driver::OpenFlowAddress;
use bluebridge_northbound::environment::{EnvironmentError, SwitchPort};
use bluebridge_p4::proto::bluebridge::switch::v1 as proto;
use bluebridge_rack::control::tables::{self, PortNames};
use bluebridge_rack::control::{impair, switch_ports};
use bluebridge_rack::daemon::DEVICE_ID;
use bluebridge_rack::layout::{Layout, OPENFLOW, P4RUNTIME};
use bluebridge_rack::spec::{DataPlane, Node, RackName};
use bluebridge_rack::state::RackState;
use bluebridge_rack::{RackError, access};
use clap::{Args, Subcommand};
use serde_json::json;

use super::Global;
use super::member::find_rack;
use super::switch::openflow::{explain, read_tables};
use super::switch_address::SwitchAddress;
use crate::exit::{Exit, UsageError};
use crate::output;

#[derive(Debug, Subcommand)]
pub(super) enum Query {
    /// Make a port lose, duplicate, reorder, delay or damage frames that leave through it; without options, end
    /// the impairment
    Impair(Impair),
    /// Show ports and drops with their counters
    Ports(Agent),
    /// Show the tables with their counters, and what was dropped
    #[command(visible_alias = "show")]
    Tables(Agent),
}

/// The remedy if there is no rack.
const OTHERWISE: &str = "set the address of the switch's agent with --agent";

/// Selects the switch.
#[derive(Debug, Args)]
pub(super) struct Agent {
    /// The switch of this rack; the default, without --agent, is that of the rack in BLUEBRIDGE_RACK, or of the
    /// only rack that is up
    #[arg(long, value_name = "NAME", conflicts_with = "agent")]
    rack: Option<RackName>,
    /// The address of the switch agent's P4Runtime server, or openflow://ADDRESS
    #[arg(long, value_name = "ADDRESS")]
    agent: Option<SwitchAddress>,
    /// P4Runtime's number for the switch
    #[arg(long, value_name = "N", default_value_t = DEVICE_ID, value_parser = clap::value_parser!(u64).range(1..))]
    device_id: u64,
}

#[derive(Debug, Args)]
pub(super) struct Impair {
    /// The port, such as 3 or p3
    #[arg(long, value_name = "N", required_unless_present = "node", value_parser = parse_port)]
    port: Option<u16>,
    /// The port, by the rack's node at its other end
    #[arg(long, value_name = "NODE", conflicts_with_all = ["port", "agent"])]
    node: Option<Node>,
    /// The share of frames that are lost, 0 to 1
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    loss: f64,
    /// The share of frames that are sent twice
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    duplicate: f64,
    /// The share of frames that later ones overtake
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    reorder: f64,
    /// The share of frames with a flipped bit
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    corrupt: f64,
    /// Delay of every frame in microseconds
    #[arg(long, value_name = "US", default_value_t = 0)]
    delay: u32,
    /// The seed of the port's random generator, so that a run can be repeated
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    agent: Agent,
}

/// A switch that can be queried: the calling thread is in the namespace of its agent.
struct Reached {
    address: SwitchAddress,
    device_id: u64,
    names: PortNames,
    layout: Option<Layout>,
}

impl Reached {
    /// The agent of an embedded switch.
    fn agent(&self) -> Result<SocketAddr, UsageError> {
        match self.address {
            SwitchAddress::P4Runtime(address) => Ok(address),
            SwitchAddress::OpenFlow(_) => Err(UsageError(
                "only the embedded switch can do this; use ovs-ofctl for Open vSwitch".to_owned(),
            )),
        }
    }
}

impl Agent {
    fn reach(&self) -> anyhow::Result<Reached> {
        match self.agent {
            Some(address) => Ok(Reached {
                address,
                device_id: self.device_id,
                names: PortNames::new(),
                layout: None,
            }),
            None => enter(&find_rack(self.rack.as_ref(), OTHERWISE)?),
        }
    }
}

/// Moves to the namespace of a rack's switch.
fn enter(state: &RackState) -> anyhow::Result<Reached> {
    access::join(state)?;
    access::namespace(state, Node::Switch)?.move_caller_in().map_err(RackError::from)?;
    let layout = Layout::of(&state.spec);
    Ok(Reached {
        address: match state.spec.switch {
            DataPlane::Bmv2 | DataPlane::Ebpf | DataPlane::Soft => {
                SwitchAddress::P4Runtime(P4RUNTIME.into())
            }
            DataPlane::Ovs => {
                SwitchAddress::OpenFlow(OpenFlowAddress::Connect(OPENFLOW.into()).into())
            }
        },
        device_id: DEVICE_ID,
        names: port_names(&layout),
        layout: Some(layout),
    })
}

/// The nodes at a rack's ports.
pub(super) fn port_names(layout: &Layout) -> PortNames {
    let name = |peer: Node| match peer {
        Node::Switch => "controller".to_owned(),
        node => node.to_string(),
    };
    layout.ports().iter().map(|port| (port.number, name(port.peer))).collect()
}

pub(super) fn run(query: Query, global: Global) -> anyhow::Result<Exit> {
    match query {
        Query::Impair(options) => set_impairment(&options, global),
        Query::Ports(agent) => ports(&agent.reach()?, global),
        Query::Tables(agent) => show_tables(&agent.reach()?, global),
    }
}

pub(super) fn tables_of_rack(name: &RackName, global: Global) -> anyhow::Result<Exit> {
    show_tables(&enter(&find_rack(Some(name), OTHERWISE)?)?, global)
}

fn show_tables(switch: &Reached, global: Global) -> anyhow::Result<Exit> {
    let reading = match switch.address {
        SwitchAddress::P4Runtime(address) => tables::read(address, switch.device_id, &switch.names)
            .map_err(|error| explain(address, error))?,
        SwitchAddress::OpenFlow(openflow) => read_tables(openflow, &switch.names)?,
    };
    if global.json {
        let entries = reading.lines.iter().map(serde_json::to_value);
        let drops = reading.drops.iter().map(|(reason, frames)| {
            Ok(json!({
                "table": "drops",
                "match": { "kind": "drop_reason", "reason": reason.name() },
                "action": { "kind": "drop" },
                "packets": frames,
                "bytes": null,
            }))
        });
        output::json(&entries.chain(drops).collect::<Result<Vec<_>, _>>()?)?;
    } else {
        output::table_by(TABLE_KEYS, &TABLE_COLUMNS, table_rows(&reading.lines))?;
        let drops = reading.drops.iter().map(|(reason, frames)| (reason.name(), *frames));
        output::prose(&dropped(drops))?;
    }
    Ok(Exit::Ok)
}

/// What a switch dropped, by reason.
fn dropped<'a>(drops: impl IntoIterator<Item = (&'a str, u64)>) -> String {
    let counted = drops.into_iter().filter(|(_, frames)| *frames != 0);
    let counted: Vec<_> = counted.map(|(reason, frames)| format!("{frames} {reason}")).collect();
    let counted = if counted.is_empty() { "none".to_owned() } else { counted.join(", ") };
    format!("frames dropped: {counted}")
}

/// The columns of [`table_rows`].
pub(crate) const TABLE_COLUMNS: [&str; 5] = ["table", "match", "action", "packets", "bytes"];

/// Table and match together identify an entry.
pub(crate) const TABLE_KEYS: usize = 2;

/// Entries as rows; a table's name is printed once.
pub(super) fn table_rows(lines: &[tables::TableLine]) -> Vec<Vec<String>> {
    let mut last = "";
    let rows = lines.iter().map(|line| {
        let table = if line.table == last { "" } else { line.table };
        last = line.table;
        vec![
            table.to_owned(),
            line.matches.to_string(),
            line.action.to_string(),
            line.packets.to_string(),
            line.bytes.to_string(),
        ]
    });
    rows.collect()
}

/// The columns of [`port_row`].
pub(crate) const PORT_COLUMNS: [&str; 13] = [
    "port",
    "interface",
    "node",
    "mtu",
    "rx packets",
    "rx bytes",
    "tx packets",
    "tx bytes",
    "lost",
    "doubled",
    "reordered",
    "damaged",
    "delayed",
];

fn ports(switch: &Reached, global: Global) -> anyhow::Result<Exit> {
    let answer = switch_ports(switch.agent()?)?;
    let node = |number: u32| {
        let number = u16::try_from(number).ok()?;
        switch.names.get(&number).cloned()
    };
    if global.json {
        let ports: Vec<_> =
            answer.ports.iter().map(|port| port_document(port, node(port.number))).collect();
        let drops: Vec<_> = answer
            .drops
            .iter()
            .map(|drop| json!({ "reason": drop.reason, "frames": drop.frames }))
            .collect();
        output::json(&json!({
            "data_plane": answer.data_plane,
            "ports": ports,
            "drops": drops,
            "packet_ins_lost": answer.packet_ins_lost,
        }))?;
        return Ok(Exit::Ok);
    }
    let rows = answer.ports.iter().map(|port| port_row(port, node(port.number))).collect();
    output::text(&format!("data plane: {}", answer.data_plane))?;
    output::table(&PORT_COLUMNS, rows)?;
    let drops = answer.drops.iter().map(|drop| (drop.reason.as_str(), drop.frames));
    output::prose(&dropped(drops))?;
    Ok(Exit::Ok)
}

fn port_document(port: &proto::Port, node: Option<String>) -> serde_json::Value {
    let rx = port.rx.unwrap_or_default();
    let tx = port.tx.unwrap_or_default();
    let impaired = port.impaired.unwrap_or_default();
    json!({
        "number": port.number,
        "interface": port.name,
        "node": node,
        "mtu": port.mtu,
        "rx": { "packets": rx.packets, "bytes": rx.bytes },
        "tx": { "packets": tx.packets, "bytes": tx.bytes },
        "impaired": {
            "lost": impaired.lost,
            "duplicated": impaired.duplicated,
            "reordered": impaired.reordered,
            "corrupted": impaired.corrupted,
            "delayed": impaired.delayed,
        },
    })
}

fn port_row(port: &proto::Port, node: Option<String>) -> Vec<String> {
    let rx = port.rx.unwrap_or_default();
    let tx = port.tx.unwrap_or_default();
    let impaired = port.impaired.unwrap_or_default();
    let counts = [
        u64::from(port.mtu),
        rx.packets,
        rx.bytes,
        tx.packets,
        tx.bytes,
        impaired.lost,
        impaired.duplicated,
        impaired.reordered,
        impaired.corrupted,
        impaired.delayed,
    ];
    let mut row = vec![port.number.to_string(), port.name.clone(), node.unwrap_or_default()];
    row.extend(counts.map(|count| count.to_string()));
    row
}

/// The number of a port of the one switch that a command is about.
fn parse_port(text: &str) -> Result<u16, EnvironmentError> {
    let port: SwitchPort = text.parse()?;
    if port.switch.is_empty() {
        return Ok(port.number);
    }
    Err(EnvironmentError::SwitchPort(text.to_owned()))
}

fn set_impairment(options: &Impair, global: Global) -> anyhow::Result<Exit> {
    let shares = [
        ("--loss", options.loss),
        ("--duplicate", options.duplicate),
        ("--reorder", options.reorder),
        ("--corrupt", options.corrupt),
    ];
    if let Some((option, share)) = shares.iter().find(|(_, share)| !(0.0..=1.0).contains(share)) {
        return Err(UsageError(format!("{option} {share} is not a share from 0 to 1")).into());
    }
    let switch = options.agent.reach()?;
    let port = match (options.port, options.node, &switch.layout) {
        (Some(port), _, _) => port,
        (None, Some(node), Some(layout)) => match layout.port_of(node) {
            Some(port) => port.number,
            None => return Err(UsageError(format!("no port leads to {node}")).into()),
        },
        _ => return Err(UsageError("the port is missing: use --port N".to_owned()).into()),
    };
    let delay = Duration::from_micros(options.delay.into());
    // Frames must be kept for both, which a program in the kernel cannot do.
    let kept = [("delay", !delay.is_zero()), ("reorder", options.reorder > 0.0)];
    if let Some((verb, _)) = kept.iter().find(|(_, wanted)| *wanted) {
        let data_plane = switch_ports(switch.agent()?)?.data_plane;
        if data_plane == DataPlane::Ebpf.as_str() {
            let words = format!(
                "the data plane ebpf cannot {verb} frames, but soft can: `bluebridge rack up --switch soft`"
            );
            return Err(UsageError(words).into());
        }
    }
    let impairment = proto::Impairment {
        seed: options.seed,
        loss: options.loss,
        duplicate: options.duplicate,
        reorder: options.reorder,
        corrupt: options.corrupt,
        delay: (!delay.is_zero()).then(|| delay.try_into().unwrap_or_default()),
    };
    impair(switch.agent()?, port, impairment)?;
    if global.json {
        output::json(
            &json!({ "port": port, "impaired": shares.iter().any(|it| it.1 > 0.0) || options.delay > 0 }),
        )?;
    }
    Ok(Exit::Ok)
}
