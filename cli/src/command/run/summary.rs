//! What the program's pagers did, on standard error: standard output is the program's.

use std::io::{self, Write};
use std::time::Duration;

use bluebridge_run::{Reaper, Report, Summary};
use serde_json::{Value, json};

/// Prints a paragraph for each program that had remote memory, or one JSON document.
pub(super) fn print(
    reaper: &Reaper,
    time: Duration,
    left: usize,
    is_json: bool,
) -> anyhow::Result<()> {
    let mut out = io::stderr().lock();
    let reports: Vec<_> = reaper.reports().collect();
    if is_json {
        let programs: Vec<_> = reports.iter().map(|report| as_json(report)).collect();
        let document =
            json!({ "seconds": time.as_secs_f64(), "programs": programs, "not_freed": left });
        writeln!(out, "{document}")?;
        return Ok(());
    }
    let (remote, local): (Vec<_>, Vec<_>) = reports
        .into_iter()
        .partition(|report| report.summary.read_bytes + report.summary.written_bytes > 0);
    for report in &remote {
        write!(out, "{}", paragraph(report))?;
    }
    if !local.is_empty() {
        let names: Vec<_> = local.iter().map(|report| report.name.as_str()).collect();
        writeln!(out, "bluebridge: all memory stayed local: {}", names.join(", "))?;
    }
    if left > 0 {
        writeln!(
            out,
            "bluebridge: {left} allocations could not be freed, because their servers do not respond; \
             `bluebridge list` shows them, and `bluebridge purge --left-by` frees them"
        )?;
    }
    Ok(())
}

fn as_json(report: &Report) -> Value {
    let Report { name, process_count, summary } = report;
    json!({
        "name": name,
        "processes": process_count,
        "faults": {
            "remote": summary.remote_faults,
            "zero": summary.zero_faults,
            "first_write": summary.write_faults,
            "local": summary.late_faults,
        },
        "pages_read_ahead": summary.prefetched_pages,
        "prefetch_accuracy": share(summary.confirmed_pages, summary.requested_pages),
        "hit_rate": hit_rate(summary),
        "background_pages": summary.background_pages,
        "background_pages_used": summary.background_used_pages,
        "bytes_read": summary.read_bytes,
        "bytes_written": summary.written_bytes,
        "read_wait_seconds": seconds(summary.read_wait_ns),
        "room_wait_seconds": seconds(summary.room_wait_ns),
        "local_bytes_max": summary.local_bytes_max,
        "pages_lost": summary.lost_pages,
    })
}

fn paragraph(report: &Report) -> String {
    let Report { name, process_count, summary } = report;
    let processes = match process_count {
        1 => String::new(),
        count => format!(" ({count} processes)"),
    };
    let lost = match summary.lost_pages {
        0 => String::new(),
        count => format!("  {} pages were lost\n", grouped(count)),
    };
    format!(
        "bluebridge: remote memory of {name}{processes}: read {}, written {}; at most {} local\n  \
         {} faults: {} remote, {} first uses, {} first writes, {} local already\n  \
         {}\n  \
         waited {:.2} s for reads and {:.2} s for room\n{lost}",
        bytes(summary.read_bytes),
        bytes(summary.written_bytes),
        bytes(summary.local_bytes_max),
        grouped(faults(summary)),
        grouped(summary.remote_faults),
        grouped(summary.zero_faults),
        grouped(summary.write_faults),
        grouped(summary.late_faults),
        read_ahead(summary),
        seconds(summary.read_wait_ns),
        seconds(summary.room_wait_ns),
    )
}

fn read_ahead(summary: &Summary) -> String {
    let count = grouped(summary.prefetched_pages);
    let used = share(summary.confirmed_pages, summary.requested_pages);
    match used.zip(hit_rate(summary)) {
        _ if summary.prefetched_pages == 0 => "no pages read ahead".to_owned(),
        None => {
            format!("{count} pages read ahead; how many were used is not known of killed processes")
        }
        Some((used, hits)) => format!(
            "{count} pages read ahead, {:.0} % of those requested were used; {:.0} % of the remote pages were there when \
             they were needed",
            used * 100.0,
            hits * 100.0
        ),
    }
}

const fn faults(summary: &Summary) -> u64 {
    summary.remote_faults + summary.zero_faults + summary.write_faults + summary.late_faults
}

/// Of the pages that were needed from a server, the share that had been read ahead; a lower bound, because the use of a
/// local page is not seen.
fn hit_rate(summary: &Summary) -> Option<f64> {
    if summary.requested_pages == 0 && summary.prefetched_pages > 0 {
        return None;
    }
    share(summary.confirmed_pages, summary.confirmed_pages + summary.remote_faults)
}

#[allow(clippy::cast_precision_loss, reason = "a share needs few digits")]
fn share(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

#[allow(clippy::cast_precision_loss, reason = "it is printed with few digits")]
fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// Bytes in the unit that suits them.
#[allow(clippy::cast_precision_loss, reason = "it is printed with few digits")]
fn bytes(count: u64) -> String {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match units.iter().find(|(_, shift)| count >> shift > 0) {
        Some((unit, shift)) => format!("{:.1} {unit}", count as f64 / f64::from(1_u32 << shift)),
        None => format!("{count} B"),
    }
}

/// A number with a comma between thousands.
fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped_and_bytes_have_units() {
        let numbers = [(0, "0"), (999, "999"), (1000, "1,000"), (1_234_567, "1,234,567")];
        for (number, text) in numbers {
            assert_eq!(grouped(number), text);
        }
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(3 << 30), "3.0 GiB");
    }

    #[test]
    fn a_summary_says_how_much_was_read_ahead() {
        let summary = Summary {
            remote_faults: 25,
            prefetched_pages: 100,
            requested_pages: 100,
            confirmed_pages: 75,
            read_bytes: 125 << 12,
            ..Summary::default()
        };
        let report = Report { name: "sort".to_owned(), process_count: 2, summary };
        let text = paragraph(&report);
        assert!(text.contains("sort (2 processes): read 500.0 KiB"), "{text}");
        assert!(text.contains("75 % of those requested were used; 75 % of the remote"), "{text}");
        assert!(text.lines().all(|line| line.len() <= 120), "{text}");
        assert_eq!(as_json(&report)["hit_rate"], 0.75);
    }
}
