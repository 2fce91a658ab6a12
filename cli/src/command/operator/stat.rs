//! `bluebridge stat`: the usage of memory servers, and their refusals.

use bluebridge_northbound::proto::{StatisticsRequest, StatisticsResponse};
use bluebridge_rack::control::ControlError;
use bluebridge_rack::control::operations::statistics;
use bluebridge_rack::controller_report::DirectReadsReport;
use bluebridge_wire::address::PAGE_BYTES;
use clap::Args;
use serde_json::{Value, json};

use super::{Failures, Server, Servers};
use crate::command::Global;
use crate::exit::Exit;
use crate::output;

/// Show the usage of memory servers, as reported through the controller.
#[derive(Debug, Args)]
pub(in crate::command) struct Stat {
    /// One memory server, by name or id
    #[arg(conflicts_with = "all")]
    node: Option<String>,
    /// Every memory server of the space (the default)
    #[arg(long)]
    all: bool,
    /// Also show what they refused and dropped since they started, with counts
    #[arg(long)]
    refusals: bool,
    #[command(flatten)]
    servers: Servers,
}

type Response = Result<StatisticsResponse, ControlError>;

/// The columns of the table of servers.
pub(crate) const COLUMNS: [&str; 12] = [
    "node",
    "id",
    "shards",
    "capacity",
    "free",
    "yours",
    "quota",
    "retired",
    "provisional",
    "sessions",
    "responses",
    "direct reads",
];

pub(in crate::command) fn run(options: Stat, global: Global) -> anyhow::Result<Exit> {
    let Stat { node, all: _, refusals, servers } = options;
    let chosen = servers.choose(node.as_deref())?;
    let ask = |server: &Server| {
        let request = StatisticsRequest { server: server.id.into(), space: servers.space.into() };
        statistics(&chosen.controller, request, servers.deadline.0)
    };
    let responses: Vec<(&Server, Response)> =
        chosen.servers.iter().map(|server| (server, ask(server))).collect();
    if global.json {
        let documents =
            responses.iter().map(|(server, response)| document(server, response, refusals));
        output::json(&documents.collect::<Vec<_>>())?;
    } else {
        output::table(&COLUMNS, responses.iter().map(|(server, it)| row(server, it)).collect())?;
        for (server, drain) in chosen.servers.iter().filter_map(|it| Some((it, it.drain?))) {
            output::prose(&format!(
                "{} is {drain}: no new allocations are led to it.",
                server.name
            ))?;
        }
        if refusals {
            let rows =
                responses.iter().flat_map(|(server, response)| refusal_rows(server, response));
            output::text("")?;
            output::table(&["node", "refused or dropped", "times"], rows.collect())?;
            let rows =
                responses.iter().flat_map(|(server, response)| passed_rows(server, response));
            output::text("")?;
            output::table(&["node", "READs that the kernel passed on", "times"], rows.collect())?;
        }
    }
    let mut failures = Failures::default();
    responses
        .into_iter()
        .filter_map(|(_, response)| response.err())
        .for_each(|it| failures.add(it));
    failures.end(Exit::Ok)
}

fn refusal_rows(server: &Server, response: &Response) -> Vec<Vec<String>> {
    let refusals = response.as_ref().map_or(&[][..], |response| &response.refusals);
    let row = |(reason, count): (&str, u64)| {
        vec![server.name.clone(), reason.to_owned(), count.to_string()]
    };
    match (response, refusals) {
        (Err(_), _) => vec![vec![server.name.clone(), "no response".to_owned(), String::new()]],
        (Ok(_), []) => vec![row(("nothing", 0))],
        (Ok(_), refusals) => refusals.iter().map(|it| row((&it.reason, it.count))).collect(),
    }
}

/// Why READs were passed on to the server's process.
fn passed_rows(server: &Server, response: &Response) -> Vec<Vec<String>> {
    let row =
        |reason: &str, count: u64| vec![server.name.clone(), reason.to_owned(), count.to_string()];
    let Ok(response) = response else { return Vec::new() };
    match &response.direct_reads {
        Some(reads) if reads.refusal.is_empty() && response.passed_reads.is_empty() => {
            vec![row("none", 0)]
        }
        Some(reads) if reads.refusal.is_empty() => {
            response.passed_reads.iter().map(|it| row(&it.reason, it.count)).collect()
        }
        Some(reads) => {
            vec![vec![server.name.clone(), format!("all: {}", reads.refusal), String::new()]]
        }
        None => Vec::new(),
    }
}

fn document(server: &Server, response: &Response, refusals: bool) -> Value {
    let response = match response {
        Ok(response) => response,
        Err(error) => {
            return json!({ "node": server.name, "node_id": server.id, "error": error.to_string() });
        }
    };
    let mut document = json!({
        "node": server.name,
        "node_id": server.id,
        "shard_count": response.shard_count,
        "page_bytes": PAGE_BYTES,
        "capacity_pages": response.capacity_pages,
        "free_pages": response.free_pages,
        "retired_pages": response.retired_pages,
        "used_pages": response.used_pages,
        "quota_pages": (response.quota_pages != u64::MAX).then_some(response.quota_pages),
        "provisional_pages": response.provisional_pages,
        "session_count": response.session_count,
        "response_count": response.answered_count,
        "direct_reads": response.direct_reads.as_ref().map(DirectReadsReport::from),
        "drain": server.drain,
    });
    if let (true, Some(fields)) = (refusals, document.as_object_mut()) {
        let listed = response.refusals.iter();
        let listed = listed.map(|it| json!({ "reason": it.reason, "count": it.count }));
        fields.insert("refusals".to_owned(), listed.collect());
        let listed = response.passed_reads.iter();
        let listed = listed.map(|it| json!({ "reason": it.reason, "count": it.count }));
        fields.insert("passed_reads".to_owned(), listed.collect());
    }
    document
}

fn row(server: &Server, response: &Response) -> Vec<String> {
    let mut row = vec![server.name.clone(), server.id.to_string()];
    match response {
        Ok(response) => row.extend([
            response.shard_count.to_string(),
            size(response.capacity_pages),
            size(response.free_pages),
            size(response.used_pages),
            match response.quota_pages {
                u64::MAX => "none".to_owned(),
                pages => size(pages),
            },
            size(response.retired_pages),
            size(response.provisional_pages),
            response.session_count.to_string(),
            response.answered_count.to_string(),
            match &response.direct_reads {
                Some(reads) if reads.refusal.is_empty() => reads.answered_count.to_string(),
                _ => "off".to_owned(),
            },
        ]),
        Err(_) => row.push("no response".to_owned()),
    }
    row
}

/// Pages in the largest unit that gives at least 1.
pub(super) fn size(pages: u64) -> String {
    let bytes = pages as f64 * PAGE_BYTES as f64;
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB")];
    let fitting = units.iter().find(|(shift, _)| bytes >= (1_u64 << shift) as f64);
    let (shift, unit) = fitting.unwrap_or(&(10, "KiB"));
    let number = bytes / (1_u64 << shift) as f64;
    if number.fract() == 0.0 { format!("{number} {unit}") } else { format!("{number:.2} {unit}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_a_readable_unit() {
        assert_eq!(size(0), "0 KiB");
        assert_eq!(size(1), "4 KiB");
        assert_eq!(size(256), "1 MiB");
        assert_eq!(size(65_535), "256.00 MiB");
        assert_eq!(size(1 << 18), "1 GiB");
    }
}
