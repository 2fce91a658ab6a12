//! Rebalancing of a Zipf-distributed load over several servers. The rack is computed; the decisions are the controller's.

use std::time::{Duration, Instant};

use bluebridge_controller::migration::rebalance::simulation::{Outcome, Settings, run as simulate};
use clap::Args;
use serde_json::{Value, json};

use crate::command::Global;
use crate::exit::Exit;
use crate::output;

/// The loads: one that stays, and two that go to the next server again and again.
const SHIFTS: [Option<Duration>; 3] =
    [None, Some(Duration::from_secs(10)), Some(Duration::from_secs(60))];

/// The options of the experiment.
#[derive(Debug, Args)]
pub(in crate::command) struct Rebalance {
    /// Memory servers
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=64))]
    servers: u16,
    /// Lines of 32 KiB of each server that are used
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u16).range(1..=16_384))]
    lines: u16,
    /// Simulated seconds
    #[arg(long, default_value_t = 1800, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    seconds: u32,
    /// Seconds over which rates are learned
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=3600))]
    window: u32,
    /// What is random follows from it
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

pub(in crate::command) fn run(options: &Rebalance, global: Global) -> anyhow::Result<Exit> {
    let settings = Settings {
        servers: options.servers,
        lines: options.lines.into(),
        window: Duration::from_secs(options.window.into()),
        time: Duration::from_secs(options.seconds.into()),
        seed: options.seed,
        ..Settings::default()
    };
    let began = Instant::now();
    let outcomes = SHIFTS.map(|shifts| (shifts, simulate(Settings { shifts, ..settings })));
    if global.json {
        output::json(&json!({
            "servers": options.servers,
            "lines": options.lines,
            "seconds": options.seconds,
            "window_seconds": options.window,
            "seed": options.seed,
            "rows": outcomes.iter().map(|(shifts, of)| document(*shifts, of)).collect::<Vec<_>>(),
        }))?;
        return Ok(Exit::Ok);
    }
    output::prose(&format!(
        "{} servers with {} lines each for {} s, computed in {:.1} s with seed {}",
        options.servers,
        options.lines,
        options.seconds,
        began.elapsed().as_secs_f64(),
        options.seed
    ))?;
    output::table(&COLUMNS, outcomes.iter().map(|(shifts, of)| row(*shifts, of)).collect())?;
    Ok(Exit::Ok)
}

const COLUMNS: [&str; 8] = [
    "load shifts",
    "hottest before",
    "after",
    "hottest line",
    "moves",
    "pages",
    "lines that came back",
    "last move",
];

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

fn row(shifts: Option<Duration>, of: &Outcome) -> Vec<String> {
    vec![
        shifts.map_or_else(|| "never".to_owned(), |every| format!("every {} s", every.as_secs())),
        percent(of.before),
        of.after.map_or_else(String::new, percent),
        percent(of.hottest_line),
        of.move_count.to_string(),
        of.page_count.to_string(),
        of.return_count.to_string(),
        of.last_move.map_or_else(String::new, |at| format!("{} s", at.as_secs())),
    ]
}

fn document(shifts: Option<Duration>, of: &Outcome) -> Value {
    json!({
        "shift_seconds": shifts.map(|every| every.as_secs()),
        "hottest_before": of.before,
        "hottest_after": of.after,
        "hottest_line": of.hottest_line,
        "moves": of.move_count,
        "pages": of.page_count,
        "returned_lines": of.return_count,
        "last_move_seconds": of.last_move.map(|at| at.as_secs()),
        "counting_entries": of.entries_most,
        "open_moves": of.open_most,
    })
}
