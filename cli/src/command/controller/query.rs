//! `bluebridge controller status|members|tables|watch`: queries a running controller.

use std::net::{Ipv6Addr, SocketAddr};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use bluebridge_northbound::CONTROLLER_PORT;
use bluebridge_northbound::environment::{CONTROLLER_VARIABLE, parse_controller};
use bluebridge_northbound::proto::{self, watch_response};
use bluebridge_rack::control::{Contact, controller_state, controller_watch};
use bluebridge_rack::controller_report::{ControllerReport, EntryReport, NodeReport};
use bluebridge_rack::layout::Layout;
use bluebridge_rack::spec::{Node, RackName};
use bluebridge_rack::state::StateRoot;
use bluebridge_rack::{RackError, access};
use clap::{Args, Subcommand};
use serde_json::json;
use tonic::transport::Endpoint;

use crate::command::Global;
use crate::command::member::find_rack;
use crate::command::switch_control::TABLE_KEYS;
use crate::command::trust::{Trust, controller_uri};
use crate::exit::Exit;
use crate::output;

/// How long the switch may be behind before that is a problem: it is behind for a moment after every join
/// and leave.
const SYNC_DEADLINE: Duration = Duration::from_secs(1);

/// How often the controller is queried meanwhile.
const LOOK: Duration = Duration::from_millis(20);

#[derive(Debug, Subcommand)]
pub(in crate::command) enum Query {
    /// Show the endpoints: state, port and free memory
    Members(Target),
    /// Show the state of the controller and the switches; exits with 1 and says why if something is wrong
    Status(Target),
    /// Show the desired and the installed entries of the switches
    Tables(Target),
    /// Show the endpoints, then each change as it happens
    Watch(Watch),
}

/// Selects the controller.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Controller")]
pub(in crate::command) struct Target {
    /// The controller of this rack
    #[arg(long, value_name = "NAME", conflicts_with = "controller")]
    rack: Option<RackName>,
    /// The address of the controller, with or without http://; by default that of the only
    /// rack that is up, otherwise that of this machine
    #[arg(long, env = CONTROLLER_VARIABLE, value_name = "ADDRESS", value_parser = parse_controller)]
    controller: Option<SocketAddr>,
    #[command(flatten)]
    trust: Trust,
}

#[derive(Debug, Args)]
pub(in crate::command) struct Watch {
    /// End after this many changes; the default is to run until interrupted
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    count: Option<u32>,
    #[command(flatten)]
    target: Target,
}

pub(in crate::command) fn run(query: Query, global: Global) -> anyhow::Result<Exit> {
    match query {
        Query::Members(target) => target.ask(|controller| members(controller, global)),
        Query::Status(target) => target.ask(|controller| status(controller, global)),
        Query::Tables(target) => target.ask(|controller| tables(controller, global)),
        Query::Watch(Watch { count, target }) => {
            target.ask(|controller| watch(controller, count, global))
        }
    }
}

impl Target {
    /// Connects; an error of TLS names the files.
    pub(in crate::command) fn ask<T>(
        &self,
        ask: impl FnOnce(&Contact) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        ask(&self.reach()?).map_err(|error| self.trust.explain(error))
    }

    /// The controller; the process moves to its namespace.
    fn reach(&self) -> anyhow::Result<Contact> {
        let address = match (self.controller, &self.rack) {
            (Some(address), _) => address,
            (None, Some(name)) => enter_rack(Some(name))?,
            (None, None) if has_racks()? => enter_rack(None)?,
            (None, None) => (Ipv6Addr::LOCALHOST, CONTROLLER_PORT).into(),
        };
        let Some(tls) = self.trust.config(address)? else { return Ok(address.into()) };
        let endpoint = Endpoint::from_shared(controller_uri(address, Some(&tls)))
            .and_then(|endpoint| endpoint.tls_config(tls))
            .context("cannot use the TLS options")?;
        Ok(Contact::with(address, endpoint))
    }
}

fn has_racks() -> anyhow::Result<bool> {
    Ok(!StateRoot::locate().names().map_err(RackError::from)?.is_empty())
}

fn enter_rack(name: Option<&RackName>) -> anyhow::Result<SocketAddr> {
    let state = find_rack(name, "select the controller with --controller")?;
    access::join(&state)?;
    access::namespace(&state, Node::Switch)?.move_caller_in().map_err(RackError::from)?;
    Ok(Layout::of(&state.spec).controller().into())
}

fn status(controller: &Contact, global: Global) -> anyhow::Result<Exit> {
    let deadline = Instant::now() + SYNC_DEADLINE;
    let report = loop {
        let report = ControllerReport::of(&controller_state(controller, false)?);
        if !report.is_syncing() || Instant::now() >= deadline {
            break report;
        }
        thread::sleep(LOOK);
    };
    let faults = report.faults();
    if global.json {
        output::json(
            &json!({ "healthy": faults.is_empty(), "faults": faults, "controller": report }),
        )?;
    } else {
        output::text(if faults.is_empty() { "healthy" } else { "not healthy" })?;
        for fault in &faults {
            output::prose(&format!("  {fault}"))?;
        }
        output::prose(&report.summary())?;
    }
    Ok(if faults.is_empty() { Exit::Ok } else { Exit::Failure })
}

fn members(controller: &Contact, global: Global) -> anyhow::Result<Exit> {
    let report = ControllerReport::of(&controller_state(controller, false)?);
    if global.json {
        output::json(&report.nodes)?;
    } else {
        output::table(&MEMBER_COLUMNS, report.nodes.iter().map(member_row).collect())?;
    }
    Ok(Exit::Ok)
}

const MEMBER_COLUMNS: [&str; 9] =
    ["member", "id", "role", "state", "space", "port", "incarnation", "free pages", "of"];

fn member_row(node: &NodeReport) -> Vec<String> {
    let pages = |pages: u64| if node.role == "memory" { pages.to_string() } else { String::new() };
    vec![
        node.name.clone(),
        node.id.to_string(),
        node.role.to_owned(),
        node.state_words(),
        node.space.to_string(),
        node.port(),
        node.incarnation.to_string(),
        pages(node.free_pages),
        pages(node.capacity_pages),
    ]
}

fn tables(controller: &Contact, global: Global) -> anyhow::Result<Exit> {
    let state = controller_state(controller, true)?;
    let entries: Vec<EntryReport> = state.entries.iter().map(EntryReport::of).collect();
    if global.json {
        output::json(&entries)?;
        return Ok(Exit::Ok);
    }
    let mut last = ("", "");
    let rows = entries.iter().map(|entry| {
        let (switch, table) = (entry.switch.as_str(), entry.table.as_str());
        let is_first = last != (switch, table);
        last = (switch, table);
        let table = match (is_first, switch) {
            (false, _) => String::new(),
            (true, "") => table.to_owned(),
            (true, switch) => format!("{switch}: {table}"),
        };
        vec![
            table,
            entry.matches.clone(),
            entry.action.clone(),
            entry.state.to_owned(),
            entry.packets.to_string(),
        ]
    });
    let columns = ["table", "match", "action", "state", "packets"];
    output::table_by(TABLE_KEYS, &columns, rows.collect())?;
    Ok(Exit::Ok)
}

fn watch(controller: &Contact, count: Option<u32>, global: Global) -> anyhow::Result<Exit> {
    let mut left = count;
    let show = |event: watch_response::Event| -> anyhow::Result<bool> {
        match event {
            watch_response::Event::Snapshot(list) => {
                let nodes: Vec<_> = list.nodes.iter().map(NodeReport::of).collect();
                show_event("snapshot", &nodes, global)?;
            }
            watch_response::Event::Node(node) => {
                show_event("change", &[NodeReport::of(&node)], global)?;
                left = left.map(|left| left - 1);
            }
        }
        Ok(left != Some(0))
    };
    controller_watch(controller, proto::WatchRequest {}, show)?;
    Ok(Exit::Ok)
}

/// One event: a line of JSON, or a line per endpoint.
fn show_event(event: &str, nodes: &[NodeReport], global: Global) -> anyhow::Result<()> {
    if global.json {
        let line = json!({ "event": event, "nodes": nodes });
        return output::text(&line.to_string());
    }
    nodes.iter().try_for_each(|node| {
        let NodeReport { name, id, role, state, space, incarnation, .. } = node;
        let port = node.port();
        let free = match node.role {
            "memory" => format!(", {} of {} pages free", node.free_pages, node.capacity_pages),
            _ => String::new(),
        };
        output::prose(&format!(
            "{name} (node {id}, {role}, space {space}, port {port}, incarnation {incarnation}): \
             {state}{free}"
        ))
    })
}
