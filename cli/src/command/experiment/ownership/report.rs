//! Tables for people, JSON for programs, CSV and plots for both.

use bluebridge_bench::plot::{Labels, Series, lines};
use serde::Serialize;

use super::Findings;
use super::contention::Contended;
use crate::command::bench::machine::Machine;
use crate::command::experiment::Folder;
use crate::output;

#[derive(Serialize)]
struct Document<'a> {
    machine: Machine,
    findings: &'a [Findings],
    files: &'a [String],
}

pub(super) fn print(findings: &[Findings], folder: &Folder, json: bool) -> anyhow::Result<()> {
    // The results of minutes of measuring are printed even if the disk is full.
    let written = write(findings, folder);
    let machine = Machine::look();
    if json {
        let files = written.as_deref().unwrap_or_default();
        output::json(&Document { machine, findings, files })?;
        return written.map(drop);
    }
    output::prose(&format!("{machine}; clients sleep while they wait\n"))?;
    for finding in findings {
        let policy = finding.policy.as_str();
        let redirect = &finding.redirect;
        output::prose(&format!(
            "policy {policy}: from a grant to the first request at the owner p50 {:.0} us, \
             p99 {:.0} us; from the COMMIT to the first one at the home again p50 {:.0} us, \
             p99 {:.0} us; {} requests at the home meanwhile, {} at the owner, {} leases without a \
             redirect in time",
            redirect.installed.p50_us,
            redirect.installed.p99_us,
            redirect.removed.p50_us,
            redirect.removed.p99_us,
            redirect.home_count,
            redirect.owner_count,
            redirect.missed_count
        ))?;
        output::table(&COLUMNS, finding.contention.iter().map(row).collect())?;
        output::text("")?;
    }
    output::prose(&format!("written: {}", written?.join(", ")))
}

const COLUMNS: [&str; 11] = [
    "clients",
    "turns",
    "turns_per_second",
    "hand_over_p50_us",
    "hand_over_p99_us",
    "acquire_p50_us",
    "acquire_p99_us",
    "fairness",
    "busy_per_turn",
    "redirected_per_turn",
    "timeouts",
];

fn row(contended: &Contended) -> Vec<String> {
    let contention = &contended.contention;
    vec![
        contention.client_count.to_string(),
        contention.turn_count.to_string(),
        format!("{:.0}", contention.turns_per_second),
        format!("{:.1}", contention.hand_over.p50_us),
        format!("{:.1}", contention.hand_over.p99_us),
        format!("{:.1}", contention.acquire.p50_us),
        format!("{:.1}", contention.acquire.p99_us),
        format!("{:.4}", contention.fairness),
        format!("{:.3}", contention.busy_per_turn),
        format!("{:.3}", contention.redirected_per_turn),
        contention.timeout_count.to_string(),
    ]
}

type Value = fn(&Contended) -> f64;

const PLOTS: [(&str, &str, Value); 3] = [
    ("hand-over.svg", "hand-over, p50 (us)", |it| it.contention.hand_over.p50_us),
    ("turns.svg", "turns per second", |it| it.contention.turns_per_second),
    ("fairness.svg", "Jain's index", |it| it.contention.fairness),
];

/// Writes the CSV files and the plots; returns their paths.
fn write(findings: &[Findings], folder: &Folder) -> anyhow::Result<Vec<String>> {
    let mut rows = Vec::new();
    for finding in findings {
        let policy = || std::iter::once(finding.policy.as_str().to_owned());
        rows.extend(finding.contention.iter().map(|it| policy().chain(row(it)).collect()));
    }
    let columns: Vec<&str> = std::iter::once("policy").chain(COLUMNS).collect();
    let mut files = vec![folder.csv("contention.csv", &columns, &rows)?];
    let rows: Vec<Vec<String>> = findings.iter().map(redirect_row).collect();
    files.push(folder.csv("redirect.csv", &REDIRECT_COLUMNS, &rows)?);
    for (name, y, value) in PLOTS {
        let path = folder.file(name);
        let title = "UPDATE and COMMIT of one page by contending clients";
        lines(&path, Labels { title, x: "clients", y }, &series(findings, value))?;
        files.push(path);
    }
    Ok(files.iter().map(|path| path.display().to_string()).collect())
}

fn series(findings: &[Findings], value: Value) -> Vec<Series> {
    let line = |finding: &Findings| Series {
        name: finding.policy.as_str().to_owned(),
        points: finding.contention.iter().map(|it| (clients(it), value(it))).collect(),
    };
    findings.iter().map(line).collect()
}

fn clients(contended: &Contended) -> f64 {
    u32::try_from(contended.contention.client_count).map_or(f64::NAN, f64::from)
}

const REDIRECT_COLUMNS: [&str; 8] = [
    "policy",
    "installed_p50_us",
    "installed_p99_us",
    "removed_p50_us",
    "removed_p99_us",
    "at_home",
    "at_owner",
    "missed",
];

fn redirect_row(finding: &Findings) -> Vec<String> {
    let redirect = &finding.redirect;
    vec![
        finding.policy.as_str().to_owned(),
        format!("{:.1}", redirect.installed.p50_us),
        format!("{:.1}", redirect.installed.p99_us),
        format!("{:.1}", redirect.removed.p50_us),
        format!("{:.1}", redirect.removed.p99_us),
        redirect.home_count.to_string(),
        redirect.owner_count.to_string(),
        redirect.missed_count.to_string(),
    ]
}
