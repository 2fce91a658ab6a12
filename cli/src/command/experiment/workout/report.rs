//! The results as a table, CSV and a plot.

use anyhow::Context;
use bluebridge_bench::plot::{Labels, Series, lines_and_marks};
use bluebridge_bench::summary::median;
use bluebridge_rack::spec::ByteSize;

use super::super::Folder;
use super::swapped::SwapRun;
use super::{Findings, Run};
use crate::output;

const COLUMNS: [&str; 13] = [
    "servers",
    "copies",
    "local",
    "rest",
    "seconds",
    "ratio",
    "published",
    "remote_faults",
    "write_faults",
    "prefetched",
    "accuracy",
    "read_MB",
    "written_MB",
];

/// Writes the files, and names them in the findings.
pub(super) fn write(findings: &mut Findings, folder: &Folder) -> anyhow::Result<()> {
    let name = findings.workout.name();
    let path = folder.csv(&format!("{name}.csv"), &COLUMNS, &rows(findings))?;
    findings.files.push(path.display().to_string());
    let path = folder.file(&format!("{name}.svg"));
    let size = ByteSize(findings.size_bytes);
    let title = match findings.copies {
        1 => format!("{name} with {size}"),
        copies => format!("{copies} times {name} with {size} each"),
    };
    let labels =
        Labels { title: &title, x: "local memory (%)", y: "time, divided by that in plain memory" };
    lines_and_marks(&path, labels, &measured(findings), &published(findings))
        .context("cannot draw the plot")?;
    findings.files.push(path.display().to_string());
    Ok(())
}

/// A line for each number of servers, and for each kind of swap.
fn measured(findings: &Findings) -> Vec<Series> {
    let lines = by_servers(findings).into_iter().map(|runs| {
        let mut points: Vec<_> =
            runs.iter().map(|run| (f64::from(run.local_percent), run.ratio)).collect();
        points.sort_by(|one, other| one.0.total_cmp(&other.0));
        let servers = runs.first().map_or(0, |run| run.servers);
        Series { name: output::counted(servers.into(), "server"), points }
    });
    let kinds = findings.swap_runs.chunk_by(|one, other| one.kind == other.kind);
    let swap = kinds.filter_map(|runs| {
        let points = runs.iter().map(|run| (f64::from(run.local_percent), run.ratio));
        let mut points: Vec<_> = points.collect();
        points.sort_by(|one, other| one.0.total_cmp(&other.0));
        Some(Series { name: runs.first()?.kind.to_string(), points })
    });
    lines.chain(swap).collect()
}

/// The published points, a series for each system.
fn published(findings: &Findings) -> Vec<Series> {
    let mut series: Vec<Series> = Vec::new();
    for run in &findings.runs {
        for figure in &run.published {
            let point = (f64::from(run.local_percent), figure.ratio);
            match series.iter_mut().find(|series| series.name == figure.system) {
                Some(series) if series.points.contains(&point) => {}
                Some(series) => series.points.push(point),
                None => series.push(Series { name: figure.system.to_owned(), points: vec![point] }),
            }
        }
    }
    series
}

/// The runs in one rack after the other.
fn by_servers(findings: &Findings) -> Vec<&[Run]> {
    findings.runs.chunk_by(|one, other| one.servers == other.servers).collect()
}

fn rows(findings: &Findings) -> Vec<Vec<String>> {
    let mut rows = Vec::new();
    let copies = findings.copies.to_string();
    for runs in by_servers(findings) {
        let Some(first) = runs.first() else { continue };
        let mut plain = vec![
            first.servers.to_string(),
            copies.clone(),
            "plain memory".to_owned(),
            String::new(),
            format!("{:.2}", median(&first.plain_seconds)),
            "1.00".to_owned(),
        ];
        plain.resize(COLUMNS.len(), String::new());
        rows.push(plain);
        rows.extend(runs.iter().map(|run| row(run, &copies)));
    }
    rows.extend(findings.swap_runs.iter().map(|run| swap_row(run, &copies)));
    rows
}

/// `remote_faults` are here those that had to wait for a page.
fn swap_row(run: &SwapRun, copies: &str) -> Vec<String> {
    let none = String::new;
    vec![
        none(),
        copies.to_owned(),
        format!("{} %", run.local_percent),
        run.kind.name().to_owned(),
        format!("{:.2}", median(&run.seconds)),
        format!("{:.2}", run.ratio),
        none(),
        run.major_faults.to_string(),
        none(),
        none(),
        none(),
        (run.read_bytes / 1_000_000).to_string(),
        (run.written_bytes / 1_000_000).to_string(),
    ]
}

fn row(run: &Run, copies: &str) -> Vec<String> {
    let published =
        run.published.iter().map(|figure| format!("{} ({})", figure.ratio, figure.system));
    vec![
        run.servers.to_string(),
        copies.to_owned(),
        format!("{} %", run.local_percent),
        "servers".to_owned(),
        format!("{:.2}", median(&run.seconds)),
        format!("{:.2}", run.ratio),
        published.collect::<Vec<_>>().join("; "),
        run.remote_faults.to_string(),
        run.write_faults.to_string(),
        run.prefetched_pages.to_string(),
        run.prefetch_accuracy.map_or_else(String::new, |share| format!("{share:.2}")),
        (run.read_bytes / 1_000_000).to_string(),
        (run.written_bytes / 1_000_000).to_string(),
    ]
}

pub(super) fn print(findings: &Findings, json: bool) -> anyhow::Result<()> {
    if json {
        return output::json(findings);
    }
    let copies = match findings.copies {
        1 => String::new(),
        copies => format!("{copies} copies of "),
    };
    output::prose(&format!(
        "{}; {copies}{} with {} bytes{}; {}\n",
        findings.machine,
        findings.workout.name(),
        findings.size_bytes,
        if findings.copies == 1 { "" } else { " each" },
        findings.mechanisms
    ))?;
    output::table(&COLUMNS, rows(findings))?;
    for run in &findings.runs {
        output::prose(&format!(
            "{}, {} % local: {:.0} % of the time waiting for reads, {:.0} % waiting for room",
            output::counted(run.servers.into(), "server"),
            run.local_percent,
            run.read_wait * 100.0,
            run.room_wait * 100.0
        ))?;
    }
    for run in &findings.swap_runs {
        let compressed = run
            .compressed_share
            .map_or_else(String::new, |share| format!("; compressed to {:.0} %", share * 100.0));
        let relief = match run.relief_count {
            0 => String::new(),
            count => {
                format!("; exceeded {count} times, because the kernel found nothing to press out")
            }
        };
        output::prose(&format!(
            "{}, {} % local: limit {:.1} MiB, of which the process needs {:.1} MiB besides its memory{compressed}{relief}",
            run.kind,
            run.local_percent,
            mebibytes(run.limit_bytes),
            mebibytes(run.own_bytes),
        ))?;
    }
    output::prose(&format!("written: {}", findings.files.join(", ")))
}

#[allow(clippy::cast_precision_loss, reason = "it is printed with few digits")]
fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
