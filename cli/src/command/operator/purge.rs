//! `bluebridge purge`: frees memory that no client will free.

use bluebridge_northbound::proto;
use bluebridge_rack::control::operations::purge;
use clap::Args;
use serde_json::json;

use super::{ClientName, Failures, Server, Servers};
use crate::command::Global;
use crate::exit::Exit;
use crate::output;

/// Free all memory of a space, or the memory of a client that has ended; only for operators of the controller.
///
/// Pointers to it are refused from then on. Leased allocations and provisional ones stay;
/// the command then says so and ends with 1. An allocation of which parts are at other servers counts as freed
/// when that is decided: each server frees its part as soon as it can, and leases there end first.
#[derive(Debug, Args)]
pub(in crate::command) struct Purge {
    #[command(flatten)]
    what: What,
    /// Only on this memory server, by name or id
    #[arg(long, value_name = "NODE")]
    on: Option<String>,
    #[command(flatten)]
    servers: Servers,
}

/// What to free.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct What {
    /// All memory of the space, even if it is in use
    #[arg(long)]
    all: bool,
    /// The allocations of this client's ended incarnations: its name, or a node id and an incarnation as
    /// `list` shows them. A client without heartbeats counts as ended
    #[arg(long, value_name = "CLIENT")]
    left_by: Option<ClientName>,
}

/// The result on one server.
#[derive(Debug, Default)]
struct Outcome {
    freed_count: u64,
    freed_pages: u64,
    busy_count: u64,
    refused_count: u64,
    refusal: String,
}

impl Outcome {
    fn add(&mut self, answer: &proto::PurgeResponse) {
        self.freed_count += answer.freed_count;
        self.freed_pages += answer.freed_pages;
        self.busy_count += answer.busy_count;
        self.refused_count += answer.refused_count;
        if !answer.refusal.is_empty() {
            self.refusal.clone_from(&answer.refusal);
        }
    }

    const fn is_whole(&self) -> bool {
        self.busy_count + self.refused_count == 0
    }

    fn line(&self, server: &Server) -> String {
        let Self { freed_count, freed_pages, busy_count, refused_count, refusal } = self;
        let mut line = format!(
            "{}: freed {}, {}",
            server.name,
            output::counted(*freed_count, "allocation"),
            output::counted(*freed_pages, "page")
        );
        if *busy_count > 0 {
            line += &format!(
                "; {busy_count} stay because they are leased or not confirmed; try again later"
            );
        }
        if *refused_count > 0 {
            line += &format!("; {refused_count} stay: {refusal}");
        }
        line
    }
}

pub(in crate::command) fn run(options: Purge, global: Global) -> anyhow::Result<Exit> {
    let Purge { what, on, servers } = options;
    let chosen = servers.choose(on.as_deref())?;
    let mut failures = Failures::default();
    let mut outcomes = Vec::new();
    for server in &chosen.servers {
        let mut outcome = None;
        let mut next = Some(0);
        while let Some(from_page) = next {
            let request = proto::PurgeRequest {
                server: server.id.into(),
                space: servers.space.into(),
                from_page,
                client: what.left_by.clone().map(|client| client.0),
            };
            match purge(&chosen.controller, request, servers.deadline.0) {
                Ok(answer) => {
                    outcome.get_or_insert_with(Outcome::default).add(&answer);
                    // A position that moves backwards would cause an endless loop.
                    next = answer.next_page.filter(|next| *next > from_page);
                }
                Err(error) => {
                    failures.add(error);
                    next = None;
                }
            }
        }
        // Without any response, what was freed is unknown; the error says so.
        let Some(outcome) = outcome else { continue };
        if !global.json {
            output::text(&outcome.line(server))?;
        }
        outcomes.push((server, outcome));
    }
    if global.json {
        let documents: Vec<_> = outcomes.iter().map(|(server, it)| document(server, it)).collect();
        output::json(&documents)?;
    }
    let is_whole = outcomes.iter().all(|(_, outcome)| outcome.is_whole());
    failures.end(())?;
    anyhow::ensure!(is_whole, "some allocations were not freed; `bluebridge list` shows them");
    Ok(Exit::Ok)
}

fn document(server: &Server, outcome: &Outcome) -> serde_json::Value {
    json!({
        "node": server.name,
        "node_id": server.id,
        "freed_count": outcome.freed_count,
        "freed_pages": outcome.freed_pages,
        "busy_count": outcome.busy_count,
        "refused_count": outcome.refused_count,
    })
}
