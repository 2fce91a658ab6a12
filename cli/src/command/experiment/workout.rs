//! Programs that use more memory than they may keep, beside the same programs in plain memory.

use std::path::PathBuf;
use std::process;
use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Context, anyhow};
use bluebridge_bench::pin;
use bluebridge_bench::summary::median;
use bluebridge_bench::workout::Workout;
use bluebridge_pager::{FaultMode, RegionOptions, RemoteRegion, Statistics};
use bluebridge_rack::daemon::READY_DEADLINE;
use bluebridge_rack::spec::{ByteSize, DataPlane, LinkMtus, Node, RackName, RackSpec, Redirects};
use bluebridge_rack::{Rack, Site};
use clap::Args;
use serde::Serialize;

use super::super::bench::machine::{self, Machine};
use super::super::steps::Steps;
use super::super::{Global, interrupt};
use super::Folder;
use super::paging_latency::{CLIENT, CLIENT_CORE, SERVER_CORE, join};
use crate::exit::{Exit, UsageError};
use crate::output;

/// The options of an experiment with a program.
#[derive(Debug, Args)]
pub(in crate::command) struct Options {
    /// How much memory the program uses
    #[arg(long, default_value = "256M")]
    size: ByteSize,
    /// Shares of it that may be local; one run for each
    #[arg(long, value_delimiter = ',', default_value = "100%,50%,25%")]
    local: Vec<Share>,
    /// Memory servers
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=8))]
    servers: u16,
    /// Rounds: in each, the program runs once in plain memory and once for each share
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=100))]
    rounds: u16,
    /// Threads that resolve faults; 0: the faulting thread does it
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=16))]
    handlers: u16,
    /// The directory of the CSV file
    #[arg(long, default_value = "workout")]
    output: PathBuf,
    /// The switch's data plane; the default is ebpf with root if this build has it, otherwise soft
    #[arg(long)]
    switch: Option<DataPlane>,
}

/// A share in percent, 1 to 100.
#[derive(Clone, Copy, Debug, Serialize)]
struct Share(u8);

impl FromStr for Share {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let percent = text.strip_suffix('%').unwrap_or(text).parse().ok();
        let percent = percent.filter(|percent| (1..=100).contains(percent));
        percent
            .map(Self)
            .ok_or_else(|| format!("`{text}` is not a share such as 50%, from 1% to 100%"))
    }
}

impl Share {
    /// This share of a size, in bytes.
    const fn of(self, size: ByteSize) -> u64 {
        size.0.saturating_mul(self.0 as u64).div_ceil(100)
    }
}

/// The least memory that a region keeps local, in bytes.
const LOCAL_BYTES_MIN: u64 = 64 << 10;

/// The runs with one share.
#[derive(Clone, Debug, Serialize)]
struct Run {
    local_percent: u8,
    /// The time of each round, in seconds.
    seconds: Vec<f64>,
    /// Median over the rounds: the time divided by that in plain memory.
    ratio: f64,
    /// Of the last round.
    remote_faults: u64,
    write_faults: u64,
    prefetched_pages: u64,
    prefetch_accuracy: Option<f64>,
    read_bytes: u64,
    written_bytes: u64,
    /// The share of the time that the program waited for reads.
    read_wait: f64,
    /// The share of the time that it waited for room.
    room_wait: f64,
}

/// All results.
#[derive(Clone, Debug, Serialize)]
struct Findings {
    machine: Machine,
    workout: Workout,
    size_bytes: u64,
    servers: u16,
    mechanisms: String,
    /// The time in plain memory of each round, in seconds.
    plain_seconds: Vec<f64>,
    runs: Vec<Run>,
    files: Vec<String>,
}

pub(super) fn run(workout: Workout, asked: Options, global: Global) -> anyhow::Result<Exit> {
    for share in &asked.local {
        if share.of(asked.size) < LOCAL_BYTES_MIN {
            let least = "a region keeps at least 64K local";
            let text = format!("{}% of {} bytes is too little: {least}", share.0, asked.size.0);
            return Err(UsageError(text).into());
        }
    }
    let folder = Folder::make(&asked.output)?;
    let site = Site::prepare()?;
    let cancel = interrupt::watch().context("cannot watch for signals")?;
    let steps = Steps::new(2, global);
    steps.begin(&format!("a rack of {} servers and one client", asked.servers));
    let spec = RackSpec {
        name: format!("work{}", process::id()).parse::<RackName>()?,
        servers: asked.servers,
        clients: 1,
        mtu: LinkMtus::default(),
        switch: asked.switch.unwrap_or(site.data_plane()),
        // An extent more than the program uses, on each server.
        memory: ByteSize(asked.size.0.saturating_add(64 << 20)),
        redirects: Redirects::default(),
    };
    let program = std::env::current_exe().context("cannot find this program's own path")?;
    let mut rack = Rack::build(&site, spec, cancel.clone())?;
    rack.start_daemons(&program, READY_DEADLINE)?;
    for number in 1..=asked.servers {
        machine::pin_daemons(&rack, Node::Server(number), SERVER_CORE)?;
    }
    let rack = Arc::new(rack);
    steps.begin(&format!("{} rounds", asked.rounds));
    let work = move |rack: &Rack| rack.enter(CLIENT, || measure(rack, workout, &asked))?;
    let mut findings = interrupt::measure(&rack, &cancel, work)?;
    interrupt::take_down(rack)?;
    steps.end();
    let path = folder.csv(file_name(workout), &COLUMNS, &rows(&findings))?;
    findings.files.push(path.display().to_string());
    print(&findings, global.json)?;
    Ok(Exit::Ok)
}

fn measure(rack: &Rack, workout: Workout, asked: &Options) -> anyhow::Result<Findings> {
    pin(CLIENT_CORE).context("cannot pin the client")?;
    let client = join(rack)?;
    let words = usize::try_from(asked.size.0 / 4).context("the size is too large")?;
    let mode = match asked.handlers {
        0 => FaultMode::InThread,
        count => FaultMode::Threads { count: count.into() },
    };
    let mut plain_seconds = Vec::new();
    let mut mechanisms = String::new();
    let mut seconds = vec![Vec::new(); asked.local.len()];
    let mut last = vec![Statistics::default(); asked.local.len()];
    for round in 0..asked.rounds {
        let mut plain = vec![0_u32; words];
        let time = workout.run(&mut plain, round.into()).context("plain memory")?;
        drop(plain);
        plain_seconds.push(time.as_secs_f64());
        for (at, share) in asked.local.iter().enumerate() {
            let local_bytes = share.of(asked.size);
            let options = RegionOptions::new(asked.size.0, local_bytes).mode(mode);
            let mut region = RemoteRegion::new(&client, &options)?;
            mechanisms = region.mechanisms().to_string();
            let memory = region.as_mut_words();
            let time = workout.run(memory, round.into())?;
            seconds[at].push(time.as_secs_f64());
            last[at] = region.statistics();
            if region.statistics().local_pages_max > local_bytes.div_ceil(4096) {
                return Err(anyhow!("more pages were local than allowed: a defect of the pager"));
            }
        }
    }
    let runs = asked.local.iter().zip(seconds).zip(last).map(|((share, seconds), last)| {
        let ratios = seconds.iter().zip(&plain_seconds).map(|(ours, plain)| ours / plain);
        let wait = |nanos: u64| as_seconds(nanos) / seconds.last().copied().unwrap_or(f64::NAN);
        Run {
            local_percent: share.0,
            ratio: median(&ratios.collect::<Vec<_>>()),
            remote_faults: last.remote_faults,
            write_faults: last.write_faults,
            prefetched_pages: last.prefetched_pages,
            prefetch_accuracy: last.prefetch_accuracy(),
            read_bytes: last.read_bytes,
            written_bytes: last.written_bytes,
            read_wait: wait(last.read_wait_ns),
            room_wait: wait(last.room_wait_ns),
            seconds,
        }
    });
    Ok(Findings {
        machine: Machine::look(),
        workout,
        size_bytes: asked.size.0,
        servers: asked.servers,
        mechanisms,
        runs: runs.collect(),
        plain_seconds,
        files: Vec::new(),
    })
}

#[allow(clippy::cast_precision_loss, reason = "a share needs few digits")]
fn as_seconds(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}

const fn file_name(workout: Workout) -> &'static str {
    match workout {
        Workout::Testswap => "testswap.csv",
        Workout::Quicksort => "quicksort.csv",
    }
}

const COLUMNS: [&str; 9] = [
    "local",
    "seconds",
    "ratio",
    "remote_faults",
    "write_faults",
    "prefetched",
    "accuracy",
    "read_MB",
    "written_MB",
];

fn rows(findings: &Findings) -> Vec<Vec<String>> {
    let plain = vec![
        "plain memory".to_owned(),
        format!("{:.2}", median(&findings.plain_seconds)),
        "1.00".to_owned(),
    ];
    let empty = COLUMNS.len() - plain.len();
    let mut rows = vec![plain.into_iter().chain(vec![String::new(); empty]).collect::<Vec<_>>()];
    rows.extend(findings.runs.iter().map(|run| {
        vec![
            format!("{} %", run.local_percent),
            format!("{:.2}", median(&run.seconds)),
            format!("{:.2}", run.ratio),
            run.remote_faults.to_string(),
            run.write_faults.to_string(),
            run.prefetched_pages.to_string(),
            run.prefetch_accuracy.map_or_else(String::new, |share| format!("{share:.2}")),
            (run.read_bytes / 1_000_000).to_string(),
            (run.written_bytes / 1_000_000).to_string(),
        ]
    }));
    rows
}

fn print(findings: &Findings, json: bool) -> anyhow::Result<()> {
    if json {
        return output::json(findings);
    }
    output::prose(&format!(
        "{}; {} bytes on {} servers; {}\n",
        findings.machine, findings.size_bytes, findings.servers, findings.mechanisms
    ))?;
    output::table(&COLUMNS, rows(findings))?;
    for run in &findings.runs {
        output::prose(&format!(
            "{} % local: {:.0} % of the time waiting for reads, {:.0} % waiting for room",
            run.local_percent,
            run.read_wait * 100.0,
            run.room_wait * 100.0
        ))?;
    }
    output::prose(&format!("written: {}", findings.files.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_of_the_whole_and_never_less() {
        let share = |text: &str| text.parse::<Share>().map(|share| share.of(ByteSize(4097)));
        assert_eq!(share("100%"), Ok(4097));
        assert_eq!(share("50"), Ok(2049));
        assert_eq!(share("1%"), Ok(41));
        for wrong in ["0%", "101%", "half", "", "-1%", "50%%"] {
            assert!(share(wrong).is_err(), "{wrong}");
        }
    }
}
