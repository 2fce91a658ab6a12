//! `bluebridge list`: lists allocations.

use std::net::Ipv6Addr;

use bluebridge_northbound::proto;
use bluebridge_rack::control::operations::allocations;
use bluebridge_wire::address::PAGE_BYTES;
use clap::Args;
use serde::Serialize;

use super::{ALLOCATIONS_MAX, ClientName, Failures, Server, Servers};
use crate::command::Global;
use crate::exit::Exit;
use crate::output;

/// List a space's allocations, server by server; only for operators of the controller.
#[derive(Debug, Args)]
pub(in crate::command) struct List {
    /// One memory server, by name or id
    node: Option<String>,
    /// Only allocations of this client: its name, or a node id and an incarnation as listed
    #[arg(long, value_name = "CLIENT")]
    client: Option<ClientName>,
    #[command(flatten)]
    servers: Servers,
}

/// An allocation, as printed.
#[derive(Debug, Serialize)]
struct Listed {
    node: String,
    node_id: u16,
    pointer: String,
    bytes: u64,
    /// The client that allocated it; null if the controller has no record of its name.
    client: Option<String>,
    client_id: u32,
    client_incarnation: u32,
    client_live: bool,
    leased: bool,
    provisional: bool,
}

impl Listed {
    fn of(server: &Server, allocation: &proto::Allocation) -> Self {
        let octets: [u8; 16] = allocation.pointer.as_slice().try_into().unwrap_or_default();
        let name = Some(allocation.client_name.clone()).filter(|name| !name.is_empty());
        Self {
            node: server.name.clone(),
            node_id: server.id,
            pointer: Ipv6Addr::from(octets).to_string(),
            bytes: u64::from(allocation.pages) * PAGE_BYTES as u64,
            client: name,
            client_id: allocation.client_node,
            client_incarnation: allocation.client_incarnation,
            client_live: allocation.client_live,
            leased: allocation.leased,
            provisional: allocation.provisional,
        }
    }

    fn line(&self) -> String {
        let Self { node, pointer, bytes, client_id, client_incarnation, .. } = self;
        let name = self.client.as_deref().unwrap_or("unknown");
        let mut state = vec![if self.client_live { "live" } else { "gone" }];
        state.extend(self.leased.then_some("leased"));
        state.extend(self.provisional.then_some("provisional"));
        let client = format!("{name} ({client_id}:{client_incarnation})");
        row(node, pointer, &bytes.to_string(), &client, &state.join(", "))
    }
}

/// The column names of [`Listed::line`].
fn heading() -> String {
    row("node", "pointer", "bytes", "client", "state")
}

/// Rows are printed as they arrive, so the columns are as wide as most values need; 80 columns in all.
fn row(node: &str, pointer: &str, bytes: &str, client: &str, state: &str) -> String {
    format!("{node:<6}  {pointer:<24}  {bytes:>9}  {client:<16}  {state}")
}

/// Prints a list of any length while it arrives.
struct Printer {
    json: bool,
    is_first: bool,
}

impl Printer {
    fn begin(json: bool) -> anyhow::Result<Self> {
        output::text(if json { "[".to_owned() } else { heading() }.as_str())?;
        Ok(Self { json, is_first: true })
    }

    fn print(&mut self, listed: &Listed) -> anyhow::Result<()> {
        if !self.json {
            return output::prose(&listed.line());
        }
        let comma = if std::mem::take(&mut self.is_first) { "  " } else { ", " };
        output::text(&format!("{comma}{}", serde_json::to_string(listed)?))
    }

    fn end(self) -> anyhow::Result<()> {
        if self.json { output::text("]") } else { Ok(()) }
    }
}

pub(in crate::command) fn run(options: List, global: Global) -> anyhow::Result<Exit> {
    let List { node, client, servers } = options;
    let chosen = servers.choose(node.as_deref())?;
    let mut printer = Printer::begin(global.json)?;
    let mut failures = Failures::default();
    for server in &chosen.servers {
        let mut next = Some(0);
        while let Some(from_page) = next {
            let request = proto::AllocationsRequest {
                server: server.id.into(),
                space: servers.space.into(),
                from_page,
                limit: ALLOCATIONS_MAX,
                client: client.clone().map(|client| client.0),
            };
            match allocations(&chosen.controller, request, servers.deadline.0) {
                Ok(answer) => {
                    for allocation in &answer.allocations {
                        printer.print(&Listed::of(server, allocation))?;
                    }
                    // A position that moves backwards would cause an endless loop.
                    next = answer.next_page.filter(|next| *next > from_page);
                }
                Err(error) => {
                    failures.add(error);
                    next = None;
                }
            }
        }
    }
    printer.end()?;
    failures.end(Exit::Ok)
}
