//! The results, as tables or as JSON.

use bluebridge_rack::controller_report::DirectReadsReport;
use bluebridge_rack::spec::DataPlane;
use serde::Serialize;

use super::machine::Machine;
use super::measure::Report;
use crate::output;

#[derive(Serialize)]
struct Document<'a> {
    machine: Machine,
    switch: DataPlane,
    reports: &'a [Report],
}

/// Prints all reports. A single report is one flat JSON object, so that a program finds `ratio`
/// at the top level.
pub(super) fn print(reports: &[Report], switch: DataPlane, json: bool) -> anyhow::Result<()> {
    let machine = Machine::look();
    if json {
        return match reports {
            [report] => output::json(&Flat { machine, switch, report }),
            _ => output::json(&Document { machine, switch, reports }),
        };
    }
    output::prose(&format!("{machine}; switch: {}; both ends spin\n", switch.as_str()))?;
    for report in reports {
        latency(report)?;
        if !report.pipelined.is_empty() {
            pipelined(report)?;
        }
        if !report.readers.is_empty() {
            readers(report)?;
        }
    }
    Ok(())
}

#[derive(Serialize)]
struct Flat<'a> {
    machine: Machine,
    switch: DataPlane,
    #[serde(flatten)]
    report: &'a Report,
}

fn latency(report: &Report) -> anyhow::Result<()> {
    let rows = report.latency.scores.iter().map(|score| {
        let summary = &score.summary;
        let times = [summary.p50_us, summary.p95_us, summary.p99_us, summary.p999_us];
        let times = times.iter().map(|time| format!("{time:.2}"));
        std::iter::once(score.name.clone()).chain(times).collect()
    });
    let title = format!("{} {} B", report.operation.name(), report.bytes);
    output::table(&[&title, "p50 us", "p95 us", "p99 us", "p99.9 us"], rows.collect())?;
    let placement = &report.latency.placement_us;
    let nearest = placement.iter().copied().fold(f64::INFINITY, f64::min);
    let farthest = placement.iter().copied().fold(0.0, f64::max);
    output::prose(&format!(
        "ratio {:.3} to the echo (p99: {:.3}), {:.3} to a connected one; hand-over between cores {nearest:.2} to {farthest:.2} us\n",
        report.ratio, report.ratio_p99, report.ratio_connected
    ))?;
    let how = match &report.frames_refusal {
        Some(refusal) => format!("requests were sent by the UDP socket: {refusal}"),
        None => "requests were sent as frames".to_owned(),
    };
    let ratio = report.ratio_by_routes;
    output::prose(&format!("{how}; ratio {ratio:.3} to requests through the UDP socket\n"))?;
    if let Some(ratio) = report.ratio_by_server {
        let how = match &report.direct_reads {
            Some(DirectReadsReport { refusal: Some(refusal), .. }) => {
                format!("the server's process answered all READs: {refusal}")
            }
            Some(DirectReadsReport { refusal: None, answered_count: 0, .. }) => {
                "the kernel passed all READs on".to_owned()
            }
            _ => "the kernel answered READs".to_owned(),
        };
        output::prose(&format!("{how}; ratio {ratio:.3} to READs that the process answers\n"))?;
    }
    if let Some(ratio) = report.ratio_sleeping {
        output::prose(&format!(
            "ratio {ratio:.3} of READs of a server that never polls to these\n"
        ))?;
    }
    Ok(())
}

fn pipelined(report: &Report) -> anyhow::Result<()> {
    let rows = report.pipelined.iter().map(|row| {
        vec![
            row.outstanding.to_string(),
            format!("{:.0}", row.ours_per_second),
            format!("{:.0}", row.bare_per_second),
            format!("{:.2}", row.ratio),
        ]
    });
    output::table(&["outstanding", "ours/s", "bare mmsg/s", "ratio"], rows.collect())?;
    output::text("")
}

fn readers(report: &Report) -> anyhow::Result<()> {
    let rows = report.readers.iter().map(|row| {
        vec![
            row.outstanding.to_string(),
            format!("{:.0}", row.ours_per_second),
            format!("{:.0}", row.bare_per_second),
            format!("{:.2}", row.ratio),
            format!("{:.3}", row.server_cores),
        ]
    });
    let heads =
        ["outstanding", "two clients, READs/s", "echo/s", "ratio", "cores of the server's process"];
    output::table(&heads, rows.collect())?;
    output::text("")
}
