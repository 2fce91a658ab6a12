//! The results, as tables, as JSON, and as plots.

use std::path::{Path, PathBuf};

use anyhow::Context;
use bluebridge_bench::contest::Outcome;
use bluebridge_bench::plot::{self, Bar, Labels};
use bluebridge_rack::spec::DataPlane;
use serde::Serialize;

use super::super::machine::Machine;
use super::crowd::Crowd;
use super::many::Depth;
use super::{Findings, Race};
use crate::output;

#[derive(Serialize)]
struct Document<'a> {
    machine: Machine,
    switch: DataPlane,
    #[serde(flatten)]
    findings: &'a Findings,
}

pub(super) fn print(findings: &Findings, switch: DataPlane, json: bool) -> anyhow::Result<()> {
    let machine = Machine::look();
    if json {
        return output::json(&Document { machine, switch, findings });
    }
    output::prose(&format!("{machine}; switch: {}", switch.as_str()))?;
    for shown in &findings.systems {
        output::prose(&format!("{}: {}", shown.system.words(), shown.version))?;
    }
    for missing in &findings.missing {
        output::prose(&format!("without {}: {}", missing.system.words(), missing.reason))?;
    }
    output::text("")?;
    for race in &findings.races {
        if let Some(outcome) = &race.latency {
            latency(race, outcome)?;
        }
        race.many.iter().try_for_each(|depth| many(race, depth))?;
        if !race.paced.is_empty() {
            paced(race)?;
        }
        race.crowds.iter().try_for_each(|crowd| self::crowd(race, crowd))?;
    }
    for file in &findings.files {
        output::prose(&format!("wrote {}", file.display()))?;
    }
    Ok(())
}

fn title(race: &Race) -> String {
    format!("{} {} B", race.operation.name(), race.bytes)
}

fn latency(race: &Race, outcome: &Outcome) -> anyhow::Result<()> {
    let rows = outcome.scores.iter().zip(&race.ratios).map(|(score, ratio)| {
        let of = &score.summary;
        let times = [of.p50_us, of.p95_us, of.p99_us, of.p999_us].map(|us| format!("{us:.2}"));
        std::iter::once(score.name.clone()).chain(times).chain([format!("{ratio:.2}")]).collect()
    });
    let heads = [&title(race), "p50 us", "p95 us", "p99 us", "p99.9 us", "p50 to BlueBridge's"];
    output::table(&heads, rows.collect())?;
    let placement = &outcome.placement_us;
    let nearest = placement.iter().copied().fold(f64::INFINITY, f64::min);
    let farthest = placement.iter().copied().fold(0.0, f64::max);
    output::prose(&format!("hand-over between cores {nearest:.2} to {farthest:.2} us\n"))
}

fn many(race: &Race, depth: &Depth) -> anyhow::Result<()> {
    let rows = depth.rows.iter().map(|row| {
        vec![
            row.name.clone(),
            format!("{:.0}", row.per_second),
            format!("{:.0}", row.megabytes_per_second),
            format!("{:.2}", row.client_us),
            row.server_us.map_or_else(String::new, |us| format!("{us:.2}")),
        ]
    });
    let head = format!("{}, {} outstanding", title(race), depth.outstanding);
    let heads = [&head, "per s", "MB/s", "client us", "server us"];
    output::table(&heads, rows.collect())?;
    output::text("")
}

fn paced(race: &Race) -> anyhow::Result<()> {
    let rows = race.paced.iter().map(|row| {
        vec![
            row.name.clone(),
            format!("{:.2}", row.summary.p50_us),
            format!("{:.2}", row.summary.p99_us),
            format!("{:.2}", row.client_cores * 100.0),
            format!("{:.2}", row.server_cores * 100.0),
        ]
    });
    let head = format!("{}, 1,000 per s", title(race));
    let heads = [&head, "p50 us", "p99 us", "client's % of a core", "server's %"];
    output::table(&heads, rows.collect())?;
    output::text("")
}

fn crowd(race: &Race, crowd: &Crowd) -> anyhow::Result<()> {
    let rows = crowd.rows.iter().map(|row| {
        vec![
            row.name.clone(),
            format!("{:.0}", row.per_second),
            format!("{:.2}", row.summary.p50_us),
            format!("{:.2}", row.summary.p99_us),
            format!("{:.2}", row.least_share),
        ]
    });
    let head = format!("{}, {} clients", title(race), crowd.clients);
    let heads = [&head, "per s", "p50 us", "p99 us", "fastest to slowest"];
    output::table(&heads, rows.collect())?;
    output::text("")
}

/// Writes the plots of all races.
pub(super) fn plot(directory: &Path, races: &[Race]) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for race in races {
        let name = |what: &str| {
            let operation = race.operation.name().to_lowercase();
            directory.join(format!("compare-{operation}-{}-{what}.svg", race.bytes))
        };
        let scores = race.latency.iter().flat_map(|outcome| &outcome.scores);
        let of_score = scores.map(|score| Bar {
            name: score.name.clone(),
            parts: vec![score.summary.p50_us],
            error_end: Some(score.summary.p99_us),
        });
        let labels = Labels {
            title: &format!("{}: p50, and p99", title(race)),
            x: "one operation outstanding",
            y: "us",
        };
        if race.latency.is_some() {
            let path = name("latency");
            plot::bars(&path, labels, &["p50"], &of_score.collect::<Vec<_>>())
                .context("cannot plot the latencies")?;
            files.push(path);
        }
        for depth in &race.many {
            let bars = depth.rows.iter().map(|row| Bar {
                name: row.name.clone(),
                parts: vec![row.per_second / 1000.0],
                error_end: None,
            });
            let labels = Labels {
                title: &format!("{}, {} outstanding", title(race), depth.outstanding),
                x: "one client",
                y: "thousands per s",
            };
            let path = name(&format!("depth-{}", depth.outstanding));
            plot::bars(&path, labels, &["rate"], &bars.collect::<Vec<_>>())
                .context("cannot plot the rates")?;
            files.push(path);
        }
    }
    Ok(files)
}
