//! `bluebridge ping`: round trips to a memory node.

use clap::Args;
use serde_json::json;

use crate::command::Global;
use crate::command::member::Member;
use crate::exit::Exit;
use crate::output;

/// Measure round trips to a memory node; several end with a summary.
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
        for time in &times {
            output::text(&format!("{name} (node {node}) responded in {time:.1} us"))?;
        }
        if options.count > 1 {
            let sent = times.len() + usize::from(failure.is_some());
            output::text(&summary(sent, times))?;
        }
    }
    failure.map_or(Ok(Exit::Ok), |error| Err(error.into()))
}

fn summary(sent: usize, mut times: Vec<f64>) -> String {
    times.sort_by(f64::total_cmp);
    let counts = format!("{sent} sent, {} received", times.len());
    let middle = times.len() / 2;
    let median = match (times.get(middle.wrapping_sub(1)), times.get(middle)) {
        (Some(below), Some(above)) if times.len().is_multiple_of(2) => below.midpoint(*above),
        (_, Some(median)) => *median,
        (_, None) => return counts,
    };
    let (min, max) = (times.first().unwrap_or(&median), times.last().unwrap_or(&median));
    format!("{counts}; min/median/max {min:.1}/{median:.1}/{max:.1} us")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_has_counts_and_the_spread_of_times() {
        let of = |sent, times: &[f64]| summary(sent, times.to_vec());
        assert_eq!(of(1, &[]), "1 sent, 0 received");
        assert_eq!(of(2, &[7.0]), "2 sent, 1 received; min/median/max 7.0/7.0/7.0 us");
        assert_eq!(of(3, &[9.0, 1.0, 2.0]), "3 sent, 3 received; min/median/max 1.0/2.0/9.0 us");
        assert_eq!(of(2, &[9.0, 1.0]), "2 sent, 2 received; min/median/max 1.0/5.0/9.0 us");
    }
}
