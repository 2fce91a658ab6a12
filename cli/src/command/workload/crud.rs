//! `bluebridge workload crud`: the latency of each operation on pages.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Context;
use bluebridge_bench::crud::{self, Operation, Plan, Report, Row, Way};
use bluebridge_bench::directory::DirectoryClient;
use clap::Args;
use serde::Serialize;

use super::Waiting;
use crate::command::Global;
use crate::command::bench::machine::Machine;
use crate::command::member::Member;
use crate::exit::Exit;
use crate::output;

/// Create, write, read, update and delete pages one after the other, check their bytes, and measure each operation.
///
/// Ends with 1 if an operation failed or returned wrong bytes.
#[derive(Debug, Args)]
pub(in crate::command) struct Crud {
    /// Timed runs; each executes every operation once
    #[arg(long, value_name = "N", default_value_t = 1500, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    runs: u32,
    /// Runs before them
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(..=10_000_000))]
    warm_up: u32,
    /// Bytes of the memory that a run creates and uses
    #[arg(long, value_name = "BYTES", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    size: u32,
    /// Also use a directory service (`workload directory`), in every second run: ask it before each access, and
    /// tell it about new pages
    #[arg(long, value_name = "ADDRESS")]
    directory: Option<SocketAddr>,
    /// Also write the table to a file
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    #[command(flatten)]
    waiting: Waiting,
    #[command(flatten)]
    member: Member,
}

#[derive(Serialize)]
struct Document<'a> {
    machine: Machine,
    bytes: u32,
    spin_us: u64,
    #[serde(flatten)]
    report: &'a Report,
}

pub(super) fn run(asked: Crud, global: Global) -> anyhow::Result<Exit> {
    let spin = asked.waiting.spin();
    let mut session = asked.member.join_as_owner(Some(spin))?;
    // After the join, which may have moved this process to a rack's namespace.
    let directory = match asked.directory {
        Some(address) => Some(
            DirectoryClient::open(address, spin, asked.member.deadline())
                .with_context(|| format!("cannot use the directory at {address}"))?,
        ),
        None => None,
    };
    let plan = Plan {
        run_count: asked.runs as usize,
        warm_up_count: asked.warm_up as usize,
        bytes: asked.size as usize,
    };
    let report = crud::run(&mut session.client, directory, plan);
    session.leave();
    print(&report, &asked, global)?;
    Ok(if report.failure_count == 0 { Exit::Ok } else { Exit::Failure })
}

const COLUMNS: [&str; 7] = ["way", "operation", "runs", "p50_us", "p95_us", "p99_us", "failed"];

fn print(report: &Report, asked: &Crud, global: Global) -> anyhow::Result<()> {
    let machine = Machine::look();
    let rows: Vec<_> = report.rows.iter().map(row).collect();
    if global.json {
        let (bytes, spin_us) = (asked.size, asked.waiting.spin);
        output::json(&Document { machine, bytes, spin_us, report })?;
    } else {
        let bytes = output::counted(asked.size.into(), "byte");
        output::prose(&format!("{machine}; {bytes}; polls for {} us\n", asked.waiting.spin))?;
        output::table(&COLUMNS, rows.clone())?;
    }
    if let Some(failure) = &report.first_failure {
        let failed = output::counted(report.failure_count, "operation");
        let skipped = output::counted(report.skipped_run_count as u64, "run");
        output::complain(&format!("{failed} failed, {skipped} left out; the first: {failure}"));
    }
    asked.csv.as_deref().map_or(Ok(()), |path| output::csv(path, &COLUMNS, &rows))
}

fn row(row: &Row) -> Vec<String> {
    let way = match row.way {
        Way::Direct => "direct",
        Way::Directory => "directory",
    };
    let operation = match row.operation {
        Operation::Create => "CREATE",
        Operation::Write => "WRITE",
        Operation::Read => "READ",
        Operation::Update => "UPDATE",
        Operation::Delete => "DELETE",
        Operation::LookUp => "DIRECTORY",
    };
    let summary = &row.summary;
    let times = [summary.p50_us, summary.p95_us, summary.p99_us];
    [way.to_owned(), operation.to_owned(), summary.sample_count.to_string()]
        .into_iter()
        .chain(times.map(|time| format!("{time:.2}")))
        .chain([row.failure_count.to_string()])
        .collect()
}
