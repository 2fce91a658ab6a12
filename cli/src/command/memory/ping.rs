//! `bluebridge ping`: round trips to a memory node.

use clap::Args;
use serde_json::json;

use crate::command::Global;
use crate::command::member::Member;
use crate::exit::Exit;
use crate::output;

/// Measure round trips to a memory node.
#[derive(Debug, Args)]
pub(in crate::command) struct Ping {
    /// The memory node, by name or id
    node: String,
    /// Number of round trips
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    count: u32,
    #[command(flatten)]
    member: Member,
}

pub(in crate::command) fn run(options: Ping, global: Global) -> anyhow::Result<Exit> {
    let mut session = options.member.join()?;
    let node = session.node(&options.node)?;
    let name = session.name_of(node);
    let mut times = Vec::new();
    let mut failure = None;
    for _ in 0..options.count {
        match session.client.ping(node) {
            Ok(time) => times.push(time.as_nanos() as f64 / 1000.0),
            Err(error) => {
                failure = Some(error);
                break;
            }
        }
    }
    session.leave();
    if global.json {
        output::json(&json!({ "node": name, "node_id": node.0, "round_trips_us": times }))?;
    } else {
        for time in times {
            output::text(&format!("{name} (node {node}) responded in {time:.1} us"))?;
        }
    }
    failure.map_or(Ok(Exit::Ok), |error| Err(error.into()))
}
