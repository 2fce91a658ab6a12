//! The latency of a page fault: remote, resolved from memory, and what the system offers beside it.

use std::path::PathBuf;
use std::process;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, anyhow};
use bluebridge::{Client, JoinOptions};
use bluebridge_bench::contest::{self, Contestant, Length, Outcome, PROBE_TURN};
use bluebridge_bench::paging::{Disk, Faults, Nearby, PageCache, Parts, Reads, Source};
use bluebridge_bench::pin;
use bluebridge_bench::placement::Probe;
use bluebridge_bench::summary::median;
use bluebridge_bench::swap::Kind;
use bluebridge_bench::swap::area::Area;
use bluebridge_bench::swap::cgroup::Cgroup;
use bluebridge_bench::swap::pages::{PagesJob, Swapped};
use bluebridge_bench::turns::Turns;
use bluebridge_pager::{FaultMode, RegionOptions};
use bluebridge_rack::daemon::READY_DEADLINE;
use bluebridge_rack::layout::ENDPOINT_INTERFACE;
use bluebridge_rack::spec::{ByteSize, DataPlane, LinkMtus, Node, RackName, RackSpec, Redirects};
use bluebridge_rack::{Rack, Site};
use bluebridge_transport::udp::UdpTransport;
use clap::Args;
use serde::Serialize;

use super::super::bench::machine::{self, Machine};
use super::super::steps::Steps;
use super::super::{Global, interrupt};
use super::Folder;
use super::comparison::{Comparison, Held, Swap};
use crate::exit::Exit;
use crate::output;

pub(in crate::command) const CLIENT: Node = Node::Client(1);
pub(in crate::command) const CLIENT_CORE: usize = 0;
pub(in crate::command) const SERVER_CORE: usize = 1;

/// Bytes of each region and file.
const REGION_BYTES: u64 = 64 << 20;
/// Bytes of a region that are local: a quarter.
const LOCAL_BYTES: u64 = 16 << 20;
/// How long a client polls: longer than any response takes.
pub(super) const SPIN: Duration = Duration::from_secs(1);

/// The options of the experiment.
#[derive(Debug, Args)]
pub(in crate::command) struct PagingLatency {
    /// Rounds: in each, every contestant has one turn
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u16).range(1..=1000))]
    rounds: u16,
    /// Timed faults of each turn; the paper has 1500 in all
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u32).range(10..=100_000))]
    faults: u32,
    /// The directory of the CSV file, and of files that are read from the disk meanwhile
    #[arg(long, default_value = "paging-latency")]
    output: PathBuf,
    /// The switch's data plane; the default is ebpf with root if this build has it, otherwise soft
    #[arg(long)]
    switch: Option<DataPlane>,
    #[command(flatten)]
    comparison: Comparison,
}

/// Pages in swap.
#[derive(Clone, Debug, Serialize)]
struct SwapFinding {
    kind: Kind,
    page_count: usize,
    /// Pages that were out when the contest began.
    out_count: usize,
    /// zram's.
    algorithm: Option<String>,
    /// The size of zram's contents after compression, as a share.
    compressed_share: Option<f64>,
}

/// What a way to resolve faults showed.
#[derive(Clone, Debug, Serialize)]
struct Mode {
    mode: &'static str,
    mechanisms: String,
    /// Median over the rounds: a remote fault, less a fault resolved from memory, less a READ of 4096 bytes.
    excess_us: f64,
    parts: Parts,
}

/// All results.
#[derive(Clone, Debug, Serialize)]
struct Findings {
    machine: Machine,
    outcome: Outcome,
    modes: Vec<Mode>,
    swap: Vec<SwapFinding>,
    /// What could not be measured, and why.
    missing: Vec<String>,
    files: Vec<String>,
}

pub(super) fn run(asked: PagingLatency, global: Global) -> anyhow::Result<Exit> {
    let held = asked.comparison.prepare(REGION_BYTES)?;
    let folder = Folder::make(&asked.output)?;
    let site = Site::prepare()?;
    if thread::available_parallelism().context("cannot count the cores")?.get() < 2 {
        return Err(anyhow!(
            "a client and a spinning server need two cores, but this machine has one"
        ));
    }
    let cancel = interrupt::watch().context("cannot watch for signals")?;
    let steps = Steps::new(2, global);
    steps.begin("a rack of one server and one client");
    let spec = RackSpec {
        name: format!("page{}", process::id()).parse::<RackName>()?,
        servers: 1,
        clients: 1,
        mtu: LinkMtus::default(),
        switch: asked.switch.unwrap_or(site.data_plane()),
        memory: ByteSize(1 << 30),
        redirects: Redirects::default(),
        direct_reads: true,
    };
    let program = std::env::current_exe().context("cannot find this program's own path")?;
    let mut rack = Rack::build(&site, spec, cancel.clone())?;
    rack.start_daemons(&program, READY_DEADLINE)?;
    machine::pin_daemons(&rack, Node::Server(1), SERVER_CORE)?;
    let rack = Arc::new(rack);
    let count = u32::from(asked.rounds) * asked.faults;
    steps.begin(&format!("{count} faults of each kind"));
    let length = Length {
        round_count: asked.rounds.into(),
        warm_up_count: 20,
        operation_count: asked.faults as usize,
    };
    let place = folder.file("");
    let swap = held.as_ref().map(Held::share);
    let work = move |rack: &Rack| in_turns(rack, length, &place, swap.as_deref());
    let mut findings = interrupt::measure(&rack, &cancel, work)?;
    interrupt::take_down(rack)?;
    if let Some(held) = held {
        held.end()?;
    }
    steps.end();
    let path = folder.csv("latency.csv", &COLUMNS, &rows(&findings))?;
    findings.files.push(path.display().to_string());
    print(&findings, global.json)?;
    Ok(Exit::Ok)
}

/// Measures with a thread on the server's core that only answers the placement probe.
fn in_turns(
    rack: &Rack,
    length: Length,
    place: &std::path::Path,
    swap: Option<&Swap>,
) -> anyhow::Result<Findings> {
    let turns = Turns::new();
    let probe = Probe::default();
    thread::scope(|scope| {
        let (turns, probe) = (&turns, &probe);
        let serving = scope.spawn(move || -> std::io::Result<()> {
            pin(SERVER_CORE)?;
            turns.serve(|turn, stop| match turn {
                PROBE_TURN => probe.answer(stop),
                _ => turns.sleep(stop),
            });
            Ok(())
        });
        let measured = rack.enter(CLIENT, || measure(rack, length, place, swap, (turns, probe)));
        turns.end();
        serving.join().map_err(|_| anyhow!("the probing thread panicked"))??;
        measured?
    })
}

fn measure(
    rack: &Rack,
    length: Length,
    place: &std::path::Path,
    swap: Option<&Swap>,
    (turns, probe): (&Turns, &Probe),
) -> anyhow::Result<Findings> {
    pin(CLIENT_CORE).context("cannot pin the client")?;
    let client = join(rack, SPIN)?;
    let mut reads = Reads::new(client.try_clone()?, REGION_BYTES >> 12)?;
    let options =
        |mode| RegionOptions::new(REGION_BYTES, LOCAL_BYTES).mode(mode).prefetch_pages(0).lanes(1);
    let modes = [FaultMode::InThread, FaultMode::Threads { count: 1 }];
    let mut faults = Vec::new();
    for mode in modes {
        let name = mode_name(mode);
        faults.push(Faults::new(format!("remote fault, {name}"), &options(mode), || {
            Ok(another(&client)?.into())
        })?);
        let memory = Nearby::default();
        faults.push(Faults::new(
            format!("fault resolved from memory, {name}"),
            &options(mode),
            || Ok(Source::from(memory.clone())),
        )?);
    }
    let bytes = usize::try_from(REGION_BYTES).context("the region is too large")?;
    let cached = place.join("page-cache.bin");
    let mut page_cache = PageCache::new(&cached, bytes)
        .with_context(|| format!("cannot use {}", cached.display()))?;
    let stored = place.join("disk.bin");
    let mut missing = Vec::new();
    let mut disk = Disk::new(&stored, bytes)
        .map_err(|error| {
            missing.push(format!("reads from the disk: {}: {error}", stored.display()))
        })
        .ok();
    let mut swapped = swap.map(swap_all).transpose()?.unwrap_or_default();
    let mut contestants: Vec<&mut dyn Contestant> = vec![&mut reads];
    contestants.extend(faults.iter_mut().map(|faults| faults as &mut dyn Contestant));
    contestants.push(&mut page_cache);
    contestants.extend(disk.iter_mut().map(|disk| disk as &mut dyn Contestant));
    contestants.extend(swapped.iter_mut().map(|one| &mut one.contestant as &mut dyn Contestant));
    let outcome = contest::run(&mut contestants, length, turns, probe);
    for file in [&cached, &stored] {
        // They are large, and of no use any more.
        let _ = std::fs::remove_file(file);
    }
    let swap = match swap {
        Some(swap) => swap_off(swap, swapped)?,
        None => Vec::new(),
    };
    let outcome = outcome.map_err(|error| anyhow!(error))?;
    let findings = modes.iter().enumerate().map(|(at, mode)| Mode {
        mode: mode_name(*mode),
        mechanisms: faults[2 * at].mechanisms().to_string(),
        excess_us: excess(&outcome, 1 + 2 * at),
        parts: faults[2 * at].parts(0.5),
    });
    Ok(Findings {
        machine: Machine::look(),
        modes: findings.collect(),
        outcome,
        swap,
        missing,
        files: Vec::new(),
    })
}

/// Pages in swap, with what has to be removed afterwards.
struct InSwap {
    contestant: Swapped,
    area: Area,
    group: Cgroup,
}

/// Memory of a process in a cgroup besides its pages and what it accesses between two times of pressing out.
const SWAPPED_SPARE_BYTES: u64 = 16 << 20;

/// Turns on all kinds of swap, and fills pages that go there. The kernel uses the area of the highest priority, which is
/// the one that was turned on last; pages that were written before stay where they are.
fn swap_all(swap: &Swap) -> anyhow::Result<Vec<InSwap>> {
    let start = |kind: &Kind| {
        let area = swap.on(*kind)?;
        let group = swap.group()?;
        let job = PagesJob {
            count: usize::try_from(REGION_BYTES >> 12).context("the region is too large")?,
            core: CLIENT_CORE,
            group: group.clone(),
            limit_bytes: LOCAL_BYTES + SWAPPED_SPARE_BYTES,
            area: area.clone(),
        };
        let name = match kind {
            Kind::SwapFile => "fault on a page in a swap file",
            Kind::Zram => "fault on a page in zram",
        };
        Ok(InSwap { contestant: Swapped::new(name, swap.worker(), &job)?, area, group })
    };
    swap.kinds.iter().map(start).collect()
}

fn swap_off(swap: &Swap, all: Vec<InSwap>) -> anyhow::Result<Vec<SwapFinding>> {
    let end = |InSwap { contestant, area, group }: InSwap| {
        let filled = contestant.filled();
        let finding = SwapFinding {
            kind: area.kind,
            page_count: usize::try_from(REGION_BYTES >> 12).context("the region is too large")?,
            out_count: filled.out_count,
            algorithm: area.algorithm(),
            compressed_share: filled.compressed_share,
        };
        // The pages are free when the process has ended, so that they need not return from swap.
        drop(contestant);
        swap.remove_group(&group)?;
        swap.off(&area)?;
        Ok(finding)
    };
    all.into_iter().map(end).collect()
}

/// A remote fault, less the same fault resolved from memory, less a READ: median over the rounds.
fn excess(outcome: &Outcome, remote: usize) -> f64 {
    let rounds = |contestant: usize| {
        outcome.scores.get(contestant).map_or(&[][..], |score| &score.round_p50_us).iter()
    };
    let values = rounds(remote).zip(rounds(remote + 1)).zip(rounds(0));
    median(&values.map(|((remote, local), read)| remote - local - read).collect::<Vec<_>>())
}

const fn mode_name(mode: FaultMode) -> &'static str {
    match mode {
        FaultMode::InThread => "in the faulting thread",
        _ => "by a handler thread",
    }
}

pub(in crate::command) fn another(
    client: &Client<UdpTransport>,
) -> Result<Client<UdpTransport>, bluebridge_pager::Error> {
    client.try_clone().map_err(|error| bluebridge_pager::Error::System {
        what: "open another client of the endpoint",
        error: std::io::Error::other(error),
    })
}

/// A client of the rack; called in its namespace.
pub(in crate::command) fn join(
    rack: &Rack,
    spin: Duration,
) -> anyhow::Result<Client<UdpTransport>> {
    let port = rack.layout().port_of(CLIENT).context("the rack has no client")?.number;
    let controller = format!("http://{}", rack.layout().controller());
    let mut options =
        JoinOptions::named(CLIENT.to_string()).interface(ENDPOINT_INTERFACE).switch_port(port);
    options.behaviour.spin = Some(spin);
    Ok(Client::join(&controller, options)?)
}

const COLUMNS: [&str; 6] = ["access", "samples", "p50_us", "p95_us", "p99_us", "p999_us"];

fn rows(findings: &Findings) -> Vec<Vec<String>> {
    let row = |score: &contest::Score| {
        let summary = &score.summary;
        let times = [summary.p50_us, summary.p95_us, summary.p99_us, summary.p999_us];
        let mut row = vec![score.name.clone(), summary.sample_count.to_string()];
        row.extend(times.map(|time| format!("{time:.2}")));
        row
    };
    findings.outcome.scores.iter().map(row).collect()
}

fn print(findings: &Findings, json: bool) -> anyhow::Result<()> {
    if json {
        return output::json(findings);
    }
    output::prose(&format!(
        "{}; client and server on cores of their own, spinning\n",
        findings.machine
    ))?;
    output::table(&COLUMNS, rows(findings))?;
    for mode in &findings.modes {
        let Parts { enter_us, data_us, exit_us, other_us, .. } = mode.parts;
        output::prose(&format!(
            "{}: remote fault - fault from memory - READ = {:.2} us; enter {enter_us:.2} us, get data \
             {data_us:.2} us, exit {exit_us:.2} us, other {other_us:.2} us ({})",
            mode.mode, mode.excess_us, mode.mechanisms
        ))?;
    }
    for SwapFinding { kind, page_count, out_count, algorithm, compressed_share } in &findings.swap {
        let compressed = algorithm.as_ref().zip(*compressed_share).map_or_else(String::new, |it| {
            format!("; {} compressed them to {:.0} %", it.0, it.1 * 100.0)
        });
        output::prose(&format!("{kind}: {out_count} of {page_count} pages were out{compressed}"))?;
    }
    for missing in &findings.missing {
        output::prose(&format!("not measured: {missing}"))?;
    }
    output::prose(&format!("written: {}", findings.files.join(", ")))
}
