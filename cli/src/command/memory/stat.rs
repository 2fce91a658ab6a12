//! `bluebridge stat`: how full the memory nodes are.

use bluebridge::{Error, NodeId, Usage};
use bluebridge_wire::address::PAGE_BYTES;
use clap::Args;
use serde_json::{Value, json};

use crate::command::Global;
use crate::command::member::{Member, Session};
use crate::exit::Exit;
use crate::output;

/// Ask memory nodes how full they are.
#[derive(Debug, Args)]
pub(in crate::command) struct Stat {
    /// One memory node, by name or id
    #[arg(conflicts_with = "all")]
    node: Option<String>,
    /// Every memory node of the space (the default)
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    member: Member,
}

pub(in crate::command) fn run(options: Stat, global: Global) -> anyhow::Result<Exit> {
    let mut session = options.member.join()?;
    let nodes: Vec<NodeId> = match &options.node {
        Some(node) => vec![session.node(node)?],
        None => session.nodes.iter().map(|node| node.node).collect(),
    };
    let answers: Vec<(NodeId, Result<Usage, Error>)> =
        nodes.into_iter().map(|node| (node, session.client.stat(node))).collect();
    if global.json {
        let documents: Vec<_> =
            answers.iter().map(|(node, usage)| document(&session, *node, usage)).collect();
        output::json(&documents)?;
    } else {
        let rows = answers.iter().map(|(node, usage)| row(&session, *node, usage)).collect();
        let columns = [
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
            "answered",
        ];
        output::table(&columns, rows)?;
    }
    session.leave();
    let failed = answers.into_iter().find_map(|(_, usage)| usage.err());
    failed.map_or(Ok(Exit::Ok), |error| Err(error.into()))
}

fn document(session: &Session, node: NodeId, usage: &Result<Usage, Error>) -> Value {
    let name = session.name_of(node);
    match usage {
        Ok(usage) => json!({
            "node": name,
            "node_id": node.0,
            "shard_count": usage.shard_count,
            "page_bytes": PAGE_BYTES,
            "capacity_pages": usage.capacity_pages,
            "free_pages": usage.free_pages,
            "retired_pages": usage.retired_pages,
            "used_pages": usage.used_pages,
            "quota_pages": (usage.quota_pages != u64::MAX).then_some(usage.quota_pages),
            "provisional_pages": usage.provisional_pages,
            "session_count": usage.session_count,
            "answered_count": usage.answered_count,
        }),
        Err(error) => json!({ "node": name, "node_id": node.0, "error": error.to_string() }),
    }
}

fn row(session: &Session, node: NodeId, usage: &Result<Usage, Error>) -> Vec<String> {
    let mut row = vec![session.name_of(node), node.to_string()];
    match usage {
        Ok(usage) => row.extend([
            usage.shard_count.to_string(),
            size(usage.capacity_pages),
            size(usage.free_pages),
            size(usage.used_pages),
            if usage.quota_pages == u64::MAX { "none".to_owned() } else { size(usage.quota_pages) },
            size(usage.retired_pages),
            size(usage.provisional_pages),
            usage.session_count.to_string(),
            usage.answered_count.to_string(),
        ]),
        Err(_) => row.push("no answer".to_owned()),
    }
    row
}

/// Pages in the largest unit of which there is at least one.
fn size(pages: u64) -> String {
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
    fn sizes_are_told_in_a_unit_that_can_be_read() {
        assert_eq!(size(0), "0 KiB");
        assert_eq!(size(1), "4 KiB");
        assert_eq!(size(256), "1 MiB");
        assert_eq!(size(65_535), "256.00 MiB");
        assert_eq!(size(1 << 18), "1 GiB");
    }
}
