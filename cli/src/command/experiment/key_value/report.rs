//! The results as a table and CSV.

use bluebridge_bench::summary::median;

use super::super::Folder;
use super::redis::Rate;
use super::{Findings, Row};
use crate::output;

const COLUMNS: [&str; 13] = [
    "memory",
    "local",
    "GET/s",
    "ratio",
    "p50_ms",
    "p99_ms",
    "SET/s",
    "ratio",
    "p50_ms",
    "p99_ms",
    "faults",
    "read_MB",
    "written_MB",
];

/// Writes the file, and names it in the findings.
pub(super) fn write(findings: &mut Findings, folder: &Folder) -> anyhow::Result<()> {
    let columns = COLUMNS.map(str::to_owned);
    let mut names = columns.each_ref().map(String::as_str);
    // A table has each name once.
    (names[3], names[4], names[5]) = ("GET_ratio", "GET_p50_ms", "GET_p99_ms");
    (names[7], names[8], names[9]) = ("SET_ratio", "SET_p50_ms", "SET_p99_ms");
    let path = folder.csv("key-value.csv", &names, &rows(findings))?;
    findings.files.push(path.display().to_string());
    Ok(())
}

fn rows(findings: &Findings) -> Vec<Vec<String>> {
    findings.rows.iter().map(row).collect()
}

fn row(row: &Row) -> Vec<String> {
    let of = |rates: &[Rate], ratio: f64| {
        let median = |of: fn(&Rate) -> f64| median(&rates.iter().map(of).collect::<Vec<_>>());
        [
            format!("{:.0}", median(|rate| rate.per_second)),
            format!("{ratio:.2}"),
            format!("{:.2}", median(|rate| rate.p50_ms)),
            format!("{:.2}", median(|rate| rate.p99_ms)),
        ]
    };
    let mut fields = vec![row.way.words().to_owned(), format!("{} %", row.local_percent)];
    fields.extend(of(&row.get, row.get_ratio));
    fields.extend(of(&row.set, row.set_ratio));
    fields.push(row.faults.map_or_else(String::new, |count| count.to_string()));
    fields.push((row.read_bytes / 1_000_000).to_string());
    fields.push((row.written_bytes / 1_000_000).to_string());
    fields
}

pub(super) fn print(findings: &Findings, json: bool) -> anyhow::Result<()> {
    if json {
        return output::json(findings);
    }
    output::prose(&format!(
        "{}; redis {}, {} keys of {} bytes, {}; {:.0} MiB of data\n",
        findings.machine,
        findings.redis,
        findings.keys,
        findings.value_bytes,
        output::counted(findings.connections.into(), "connection"),
        mebibytes(findings.data_bytes)
    ))?;
    output::table(&COLUMNS, rows(findings))?;
    for row in &findings.rows {
        let Some(local) = row.local_bytes else { continue };
        let limit = row.limit_bytes.map_or_else(String::new, |bytes| {
            format!(" (limit of the cgroup {:.1} MiB)", mebibytes(bytes))
        });
        let compressed = row
            .compressed_share
            .map_or_else(String::new, |share| format!("; compressed to {:.0} %", share * 100.0));
        let relief = match row.relief_count {
            0 => String::new(),
            count => {
                format!("; exceeded {count} times, because the kernel found nothing to press out")
            }
        };
        output::prose(&format!(
            "{}, {} % local: {:.1} MiB{limit}{compressed}{relief}",
            row.way.words(),
            row.local_percent,
            mebibytes(local)
        ))?;
    }
    let checked = findings.rows.iter().map(|row| row.checked_count).sum::<u64>();
    output::prose(&format!("{checked} values were read back, and all were right"))?;
    output::prose(&format!("written: {}", findings.files.join(", ")))
}

#[allow(clippy::cast_precision_loss, reason = "it is printed with few digits")]
fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
