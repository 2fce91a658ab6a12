//! A table for people, JSON for programs, a CSV file and plots for both.

use bluebridge_bench::moving::{Detours, Interval};
use bluebridge_bench::plot::{Labels, Series, lines};
use bluebridge_bench::summary::median;
use serde::Serialize;

use super::{Alone, Findings};
use crate::command::bench::machine::Machine;
use crate::command::experiment::Folder;
use crate::output;

#[derive(Serialize)]
struct Document<'a> {
    machine: Machine,
    #[serde(flatten)]
    findings: &'a Findings,
    files: &'a [String],
}

pub(super) fn print(findings: &Findings, folder: &Folder, json: bool) -> anyhow::Result<()> {
    // The results of minutes of measuring are printed even if the disk is full.
    let written = write(findings, folder);
    let machine = Machine::look();
    if json {
        let files = written.as_deref().unwrap_or_default();
        output::json(&Document { machine, findings, files })?;
        return written.map(drop);
    }
    output::prose(&format!(
        "{machine}; switch: {}; {} MiB move while {} clients use them\n",
        findings.switch.as_str(),
        findings.size_bytes >> 20,
        findings.client_count,
    ))?;
    let [before, during, after] = findings.detours;
    let rows = [
        ("before", &findings.before, before),
        ("during", &findings.during, during),
        ("after", &findings.after, after),
    ];
    output::table(&COLUMNS, rows.map(|(name, load, detours)| row(name, load, detours)).into())?;
    let mega = |rate: f64| rate / 1e6;
    let middle = |value: &dyn Fn(&Alone) -> f64| {
        median(&findings.alone.iter().map(value).collect::<Vec<_>>())
    };
    let ratios: Vec<_> = findings.alone.iter().map(|it| format!("{:.2}", it.ratio)).collect();
    output::prose(&format!(
        "\nduring the move: {:.2} times the operations of before, and {:.2} times the p99\n\
         the move took {:.1} s under load ({:.0} MB/s)\n\
         without load, {} moves had {:.0} MB/s in the middle, and reading all of it before each {:.0} MB/s: {:.2} times as \
         much ({})\n\
         a line is out of reach for {:.0} us in the middle, and for {:.0} us one of 100 times ({} lines)\n\
         a client that copies it to the other server takes {:.1} s, during which nobody may change it\n\
         the switch leads to it by {} {}; of 10,000 READs of a client that joined afterwards, {} were refused by another \
         node, and {} were told that the page has moved",
        findings.throughput_ratio,
        findings.p99_ratio,
        findings.moved_under_load.seconds,
        mega(findings.moved_under_load.bytes_per_second),
        findings.alone.len(),
        mega(middle(&|alone| alone.moved.bytes_per_second)),
        mega(middle(&|alone| alone.bulk_read_bytes_per_second)),
        findings.alone_to_bulk_read_ratio,
        ratios.join(", "),
        findings.out_of_reach.p50_us,
        findings.out_of_reach.p99_us,
        findings.out_of_reach.sample_count,
        findings.stop_and_copy_seconds,
        findings.directory_entry_count,
        if findings.directory_entry_count == 1 { "entry" } else { "entries" },
        findings.detours_of_late_client.astray,
        findings.detours_of_late_client.moved,
    ))?;
    output::prose(&format!(
        "{} operations failed; {} reads had wrong bytes",
        findings.failures, findings.wrong_reads
    ))?;
    if let Some(failure) = &findings.first_failure {
        output::prose(&format!("the first failure: {failure}"))?;
    }
    output::prose(&format!("written: {}", written?.join(", ")))
}

const COLUMNS: [&str; 9] = [
    "the move",
    "operations/s",
    "p50 us",
    "p99 us",
    "p99.9 us",
    "astray",
    "told of a move",
    "busy",
    "retransmitted",
];

fn row(name: &str, load: &Interval, detours: Detours) -> Vec<String> {
    vec![
        name.to_owned(),
        format!("{:.0}", load.operations_per_second),
        format!("{:.1}", load.latency.p50_us),
        format!("{:.1}", load.latency.p99_us),
        format!("{:.1}", load.latency.p999_us),
        detours.astray.to_string(),
        detours.moved.to_string(),
        detours.busy.to_string(),
        detours.retransmitted.to_string(),
    ]
}

/// Writes the CSV file and the plots; returns their paths.
fn write(findings: &Findings, folder: &Folder) -> anyhow::Result<Vec<String>> {
    let moved_at = |at: f64| {
        let known = findings.progress.iter().take_while(|progress| progress.at <= at).last();
        known.map_or(0, |progress| progress.moved_bytes)
    };
    let row = |bucket: &bluebridge_bench::moving::Bucket| {
        vec![
            format!("{:.2}", bucket.at),
            format!("{:.0}", bucket.operations_per_second),
            format!("{:.1}", bucket.p50_us),
            format!("{:.1}", bucket.p99_us),
            moved_at(bucket.at).to_string(),
        ]
    };
    let columns = ["seconds", "operations_per_second", "p50_us", "p99_us", "moved_bytes"];
    let rows: Vec<_> = findings.series.iter().map(row).collect();
    let mut files = vec![folder.csv("migration.csv", &columns, &rows)?];
    type Value = fn(&bluebridge_bench::moving::Bucket) -> f64;
    let plots: [(&str, &str, Value); 2] = [
        ("throughput.svg", "operations per second", |bucket| bucket.operations_per_second),
        ("latency.svg", "p99 of operations (us)", |bucket| bucket.p99_us),
    ];
    let (from, to) = findings.moving;
    for (name, y, value) in plots {
        let part = |name: &str, is_in: &dyn Fn(f64) -> bool| Series {
            name: name.to_owned(),
            points: findings
                .series
                .iter()
                .filter(|bucket| is_in(bucket.at))
                .map(|bucket| (bucket.at, value(bucket)))
                .collect(),
        };
        let series = [
            part("before the move", &|at| at < from),
            part("during the move", &|at| (from..to).contains(&at)),
            part("after the move", &|at| at >= to),
        ];
        let path = folder.file(name);
        let title = "Operations on memory that moves to another server";
        lines(&path, Labels { title, x: "seconds", y }, &series)?;
        files.push(path);
    }
    Ok(files.iter().map(|path| path.display().to_string()).collect())
}
