//! `bluebridge workload faults` and `page demo`: the latency of page faults on remote pages and on a local file, and its
//! parts.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use bluebridge::Client;
use bluebridge_bench::directory::DirectoryClient;
use bluebridge_bench::paging::{
    Caching, FaultError, Faults, Limits, LocalFile, Parts, Source, take_turns,
};
use bluebridge_bench::plot::{Bar, Labels, bars};
use bluebridge_bench::summary::Summary;
use bluebridge_pager::FaultMode;
use bluebridge_transport::udp::UdpTransport;
use clap::Args;
use serde::Serialize;

use super::Waiting;
use crate::command::Global;
use crate::command::bench::machine::Machine;
use crate::command::experiment::Folder;
use crate::command::experiment::paging_latency::another;
use crate::command::member::Member;
use crate::exit::Exit;
use crate::output;

/// Access pages that are not local, each once in random order, check their bytes, and measure the page faults and
/// their parts: pages of memory servers, with and without a directory service, and of a local file.
#[derive(Debug, Args)]
pub(in crate::command) struct Options {
    #[command(flatten)]
    plan: Plan,
    /// Also use a directory service (`workload directory`): the handler asks it for a page's node before each READ
    #[arg(long, value_name = "ADDRESS")]
    directory: Option<SocketAddr>,
    #[command(flatten)]
    waiting: Waiting,
    #[command(flatten)]
    member: Member,
}

/// What is measured.
#[derive(Clone, Debug, Args)]
pub(in crate::command) struct Plan {
    /// Pages of each way
    #[arg(long, value_name = "N", default_value_t = 1500, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pages: u32,
    /// Threads that resolve faults; 0: the faulting thread does it. Several numbers are measured in turns
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "0", value_parser = clap::value_parser!(u16).range(0..=16))]
    handlers: Vec<u16>,
    /// A place for the file of the local pages, which must not exist; it is removed at once [default: in the
    /// directory of the results]
    #[arg(long, value_name = "PATH")]
    file: Option<PathBuf>,
    /// The directory of the CSV files and plots
    #[arg(long, value_name = "DIR", default_value = "faults")]
    output: PathBuf,
}

/// The faults, and what could not be measured and why.
pub(in crate::command) type Measured = (Vec<Row>, Vec<String>);

/// Where the pages are.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Way {
    /// On a memory server; the pointer is enough.
    Remote,
    /// On a memory server, whose directory service is asked first.
    RemoteWithDirectory,
    /// In a file that the kernel has in memory.
    PageCache,
    /// In a file that is read from the disk each time.
    Disk,
}

impl Way {
    const fn name(self) -> &'static str {
        match self {
            Self::Remote => "remote",
            Self::RemoteWithDirectory => "with directory",
            Self::PageCache => "page cache",
            Self::Disk => "disk",
        }
    }
}

/// The faults of one way.
#[derive(Clone, Debug, Serialize)]
pub(in crate::command) struct Row {
    way: Way,
    handler_count: u16,
    #[serde(flatten)]
    summary: Summary,
    /// Medians.
    parts: Parts,
    parts_p95: Parts,
}

#[derive(Clone, Debug, Serialize)]
struct Document {
    machine: Machine,
    page_count: u32,
    spin_us: u64,
    rows: Vec<Row>,
    /// What could not be measured, and why.
    missing: Vec<String>,
    files: Vec<String>,
}

pub(super) fn run(asked: &Options, global: Global) -> anyhow::Result<Exit> {
    let folder = Folder::make(asked.plan.output())?;
    let spin = asked.waiting.spin();
    let session = asked.member.join_as_owner(Some(spin))?;
    let deadline = asked.member.deadline();
    // The regions free their memory before the session ends.
    let measured = asked.plan.measure(&session.client, asked.directory, spin, deadline, &folder);
    session.leave();
    report(&asked.plan, spin, measured?, &folder, global)
}

/// Writes the files, and prints the results.
pub(in crate::command) fn report(
    plan: &Plan,
    spin: Duration,
    (rows, missing): Measured,
    folder: &Folder,
    global: Global,
) -> anyhow::Result<Exit> {
    let mut document = Document {
        machine: Machine::look(),
        page_count: plan.pages,
        spin_us: u64::try_from(spin.as_micros()).unwrap_or(u64::MAX),
        rows,
        missing,
        files: Vec::new(),
    };
    // The results are printed even if the disk is full.
    let written = write(&document.rows, folder);
    document.files = written.as_deref().unwrap_or_default().to_vec();
    print(&document, global)?;
    written.map(|_| Exit::Ok)
}

impl Plan {
    pub(in crate::command) fn output(&self) -> &Path {
        &self.output
    }

    pub(in crate::command) const fn page_count(&self) -> u32 {
        self.pages
    }

    /// Bytes of the pages of one way, for all numbers of handlers.
    pub(in crate::command) fn bytes(&self) -> u64 {
        u64::from(self.pages).saturating_mul(4096).saturating_mul(self.handlers.len() as u64)
    }

    /// The most pages that a directory service gets.
    pub(in crate::command) fn directory_pages(&self) -> usize {
        (self.pages as usize).saturating_mul(self.handlers.len())
    }

    /// Accesses all pages as an endpoint, with a directory service if there is one.
    pub(in crate::command) fn measure(
        &self,
        client: &Client<UdpTransport>,
        directory: Option<SocketAddr>,
        spin: Duration,
        deadline: Duration,
        folder: &Folder,
    ) -> anyhow::Result<Measured> {
        let default = folder.file("faults.bin");
        let path = self.file.as_deref().unwrap_or(&default);
        let cached = LocalFile::create(path, Caching::PageCache).with_context(|| {
            format!("cannot create {}; name another place with --file", path.display())
        })?;
        let mut missing = Vec::new();
        let disk = on_disk(path, &mut missing);
        let mut ways = Vec::new();
        let mut regions = Vec::new();
        for &handler_count in &self.handlers {
            let mut add = |way: Way, faults: Faults| {
                ways.push((way, handler_count));
                regions.push(faults);
            };
            let limits = Limits { mode: mode(handler_count), deadline };
            let faults = |way: Way, open: &mut dyn FnMut() -> Result<Source, FaultError>| {
                Faults::once_each(way.name(), self.pages, limits, open).with_context(|| {
                    let directory = directory.filter(|_| way == Way::RemoteWithDirectory);
                    let of = directory.map_or_else(String::new, |address| format!(" {address}"));
                    format!("cannot prepare the pages ({}{of})", way.name())
                })
            };
            add(Way::Remote, faults(Way::Remote, &mut || Ok(another(client)?.into()))?);
            if let Some(address) = directory {
                let mut open = || {
                    let directory = DirectoryClient::open(address, spin, deadline)
                        .map_err(|error| FaultError::Directory(error.into()))?;
                    Ok(Source::from(another(client)?).with_directory(directory))
                };
                add(Way::RemoteWithDirectory, faults(Way::RemoteWithDirectory, &mut open)?);
            }
            add(Way::PageCache, faults(Way::PageCache, &mut || Ok(cached.another().into()))?);
            if let Some(disk) = &disk {
                add(Way::Disk, faults(Way::Disk, &mut || Ok(disk.another().into()))?);
            }
        }
        for file in [Some(&cached), disk.as_ref()].into_iter().flatten() {
            file.sync().with_context(|| format!("cannot write {}", path.display()))?;
        }
        take_turns(&mut regions, self.pages).context("a page fault failed")?;
        let rows = ways.into_iter().zip(&regions).map(|((way, handler_count), faults)| Row {
            way,
            handler_count,
            summary: faults.summary(),
            parts: faults.parts(0.5),
            parts_p95: faults.parts(0.95),
        });
        Ok((rows.collect(), missing))
    }
}

/// A file that is not cached, if the file system allows that.
fn on_disk(path: &Path, missing: &mut Vec<String>) -> Option<LocalFile> {
    LocalFile::create(path, Caching::Direct)
        .map_err(|error| {
            let remedy = "name a place on another file system with --file";
            missing.push(format!("reads from the disk: {}: {error}; {remedy}", path.display()));
        })
        .ok()
}

fn mode(handler_count: u16) -> FaultMode {
    match handler_count {
        0 => FaultMode::InThread,
        count => FaultMode::Threads { count: count.into() },
    }
}

/// Who resolves the faults, in few words.
fn resolver(handler_count: u16) -> String {
    match handler_count {
        0 => "in thread".to_owned(),
        count => output::counted(count.into(), "handler"),
    }
}

const LATENCY: [&str; 6] = ["way", "handlers", "faults", "p50_us", "p95_us", "p99_us"];
const BREAKDOWN: [&str; 8] = [
    "way",
    "handlers",
    "quantile",
    "enter_handler_us",
    "directory_us",
    "get_data_us",
    "exit_handler_us",
    "other_us",
];
/// The paper's names of the parts.
const PARTS: [&str; 5] = ["enter handler", "access directory", "get data", "exit handler", "other"];

const fn values(parts: &Parts) -> [f64; 5] {
    [parts.enter_us, parts.directory_us, parts.data_us, parts.exit_us, parts.other_us]
}

fn latency(row: &Row) -> Vec<String> {
    let Row { way, handler_count, summary, .. } = row;
    let times = [summary.p50_us, summary.p95_us, summary.p99_us];
    [way.name().to_owned(), handler_count.to_string(), summary.sample_count.to_string()]
        .into_iter()
        .chain(times.map(|time| format!("{time:.2}")))
        .collect()
}

fn breakdown(row: &Row) -> [Vec<String>; 2] {
    [("p50", &row.parts), ("p95", &row.parts_p95)].map(|(quantile, parts)| {
        [row.way.name().to_owned(), row.handler_count.to_string(), quantile.to_owned()]
            .into_iter()
            .chain(values(parts).map(|time| format!("{time:.2}")))
            .collect()
    })
}

/// Writes the CSV files and the plots; returns their paths.
fn write(rows: &[Row], folder: &Folder) -> anyhow::Result<Vec<String>> {
    let latencies: Vec<_> = rows.iter().map(latency).collect();
    let breakdowns: Vec<_> = rows.iter().flat_map(breakdown).collect();
    let mut files = vec![
        folder.csv("faults-latency.csv", &LATENCY, &latencies)?,
        folder.csv("faults-breakdown.csv", &BREAKDOWN, &breakdowns)?,
    ];
    let name = |row: &Row| format!("{}, {}", row.way.name(), resolver(row.handler_count));
    let totals: Vec<_> = rows
        .iter()
        .map(|row| Bar {
            name: name(row),
            parts: vec![row.summary.p50_us],
            error_end: Some(row.summary.p95_us),
        })
        .collect();
    let stacks: Vec<_> = rows
        .iter()
        .map(|row| Bar { name: name(row), parts: values(&row.parts).into(), error_end: None })
        .collect();
    let title = "Page faults: median, and 95th percentile as error bar";
    let labels =
        Labels { title, x: "where the pages are, and who resolves faults", y: "time (us)" };
    let path = folder.file("faults-latency.svg");
    bars(&path, labels, &["fault"], &totals)?;
    files.push(path);
    let path = folder.file("faults-breakdown.svg");
    bars(
        &path,
        Labels { title: "Page faults: medians of their parts", ..labels },
        &PARTS,
        &stacks,
    )?;
    files.push(path);
    Ok(files.iter().map(|path| path.display().to_string()).collect())
}

fn print(document: &Document, global: Global) -> anyhow::Result<()> {
    if global.json {
        return output::json(document);
    }
    let Document { machine, spin_us, rows, missing, files, .. } = document;
    output::prose(&format!("{machine}; polls for {spin_us} us\n"))?;
    output::table(&LATENCY, rows.iter().map(latency).collect())?;
    output::text("")?;
    output::table(&BREAKDOWN, rows.iter().flat_map(breakdown).collect())?;
    for missing in missing {
        output::prose(&format!("not measured: {missing}"))?;
    }
    if !files.is_empty() {
        output::prose(&format!("written: {}", files.join(", ")))?;
    }
    Ok(())
}
