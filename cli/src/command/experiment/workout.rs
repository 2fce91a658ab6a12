//! Programs that use more memory than they may keep, beside the same programs in plain memory.

mod published;
mod report;
mod swapped;

use std::path::PathBuf;
use std::process;
use std::str::FromStr;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, anyhow};
use bluebridge_bench::pin;
use bluebridge_bench::summary::median;
use bluebridge_bench::workout::{Together, Workout};
use bluebridge_pager::{FaultMode, RegionOptions, RemoteRegion, Statistics};
use bluebridge_rack::daemon::READY_DEADLINE;
use bluebridge_rack::spec::{ByteSize, DataPlane, LinkMtus, Node, RackName, RackSpec, Redirects};
use bluebridge_rack::{Cancel, Rack, Site};
use clap::Args;
use serde::Serialize;

use self::published::Published;
use self::swapped::{MeasuredSwap, SwapRun};
use super::super::bench::machine::{self, Machine};
use super::super::steps::Steps;
use super::super::{Global, interrupt};
use super::Folder;
use super::comparison::{Comparison, Held, Swap};
use super::paging_latency::{CLIENT, CLIENT_CORE, SERVER_CORE, SPIN, join};
use crate::exit::{Exit, UsageError};
use crate::output;

/// The options of an experiment with a program.
#[derive(Clone, Debug, Args)]
pub(in crate::command) struct Options {
    /// How much memory the program uses; with --copies, each of them
    #[arg(long, default_value = "256M")]
    size: ByteSize,
    /// Shares of all this memory that may be local; one run for each
    #[arg(long, value_delimiter = ',', default_value = "100%,50%,25%")]
    local: Vec<Share>,
    /// Copies of the program that run at the same time, and compete for the local memory
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=8))]
    copies: u16,
    /// Numbers of memory servers; all runs are repeated for each, in a rack of its own
    #[arg(long, value_delimiter = ',', default_value = "1",
          value_parser = clap::value_parser!(u16).range(1..=8))]
    servers: Vec<u16>,
    /// Rounds: in each, the program runs once in plain memory and once for each share
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=100))]
    rounds: u16,
    /// Threads that resolve faults; 0: the faulting thread does it
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=16))]
    handlers: u16,
    /// The directory of the CSV file and of the plot
    #[arg(long, default_value = "workout")]
    output: PathBuf,
    /// The switch's data plane; the default is ebpf with root if this build has it, otherwise soft
    #[arg(long)]
    switch: Option<DataPlane>,
    #[command(flatten)]
    comparison: Comparison,
}

/// A share in percent, 1 to 100.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Share(pub(super) u8);

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
        self.of_bytes(size.0)
    }

    pub(super) const fn of_bytes(self, bytes: u64) -> u64 {
        bytes.saturating_mul(self.0 as u64).div_ceil(100)
    }
}

/// The least memory that a region keeps local, in bytes.
const LOCAL_BYTES_MIN: u64 = 64 << 10;

impl Options {
    /// The memory of all copies.
    const fn bytes(&self) -> ByteSize {
        ByteSize(self.size.0.saturating_mul(self.copies as u64))
    }
}

/// The runs with one share and one number of servers.
#[derive(Clone, Debug, Serialize)]
struct Run {
    servers: u16,
    local_percent: u8,
    /// The time of each round, in seconds: until the last copy ended.
    seconds: Vec<f64>,
    /// The time in plain memory of the same rounds, in seconds.
    plain_seconds: Vec<f64>,
    /// Median over the rounds: the time divided by that in plain memory.
    ratio: f64,
    /// Ratios of other systems in this setting.
    published: Vec<Published>,
    /// In the timed part of the last round, as what follows.
    remote_faults: u64,
    write_faults: u64,
    prefetched_pages: u64,
    prefetch_accuracy: Option<f64>,
    read_bytes: u64,
    written_bytes: u64,
    /// The share of the time that the copies waited for reads.
    read_wait: f64,
    /// The share of the time that they waited for room.
    room_wait: f64,
}

/// All results.
#[derive(Clone, Debug, Serialize)]
struct Findings {
    machine: Machine,
    workout: Workout,
    /// Of each copy.
    size_bytes: u64,
    copies: u16,
    /// The most servers of a run.
    servers: u16,
    mechanisms: String,
    /// The time in plain memory of all rounds, in seconds.
    plain_seconds: Vec<f64>,
    runs: Vec<Run>,
    /// The same with swap instead of the pager.
    swap_runs: Vec<SwapRun>,
    files: Vec<String>,
}

pub(super) fn run(workout: Workout, mut asked: Options, global: Global) -> anyhow::Result<Exit> {
    for share in &asked.local {
        if share.of(asked.bytes()) < LOCAL_BYTES_MIN {
            let least = "a region keeps at least 64K local";
            let text = format!("{}% of {} bytes is too little: {least}", share.0, asked.bytes().0);
            return Err(UsageError(text).into());
        }
    }
    asked.servers.dedup();
    let swap = asked.comparison.prepare(asked.bytes().0)?;
    let folder = Folder::make(&asked.output)?;
    let site = Site::prepare()?;
    let cancel = interrupt::watch().context("cannot watch for signals")?;
    let steps = Steps::new(2 * asked.servers.len(), global);
    let mut findings = Findings {
        machine: Machine::look(),
        workout,
        size_bytes: asked.size.0,
        copies: asked.copies,
        servers: asked.servers.iter().copied().max().unwrap_or_default(),
        mechanisms: String::new(),
        plain_seconds: Vec::new(),
        runs: Vec::new(),
        swap_runs: Vec::new(),
        files: Vec::new(),
    };
    for (at, servers) in asked.servers.iter().copied().enumerate() {
        let number = output::counted(servers.into(), "server");
        steps.begin(&format!("a rack of {number} and one client"));
        let rack = build(&site, &cancel, &asked, servers)?;
        steps.begin(&format!("{number}: {}", output::counted(asked.rounds.into(), "round")));
        let copy = asked.clone();
        // The number of servers makes no difference to swap.
        let swap = swap.as_ref().filter(|_| at == 0).map(Held::share);
        let work = move |rack: &Rack| rack.enter(CLIENT, || measure(rack, workout, &copy, swap))?;
        let measured = interrupt::measure(&rack, &cancel, work)?;
        interrupt::take_down(rack)?;
        findings.add(&asked, servers, measured);
    }
    steps.end();
    if let Some(swap) = swap {
        swap.end()?;
    }
    // Measuring takes long: the results are printed even if no file can be written.
    let written = report::write(&mut findings, &folder);
    report::print(&findings, global.json)?;
    written.map(|()| Exit::Ok)
}

/// A rack with its daemons.
fn build(site: &Site, cancel: &Cancel, asked: &Options, servers: u16) -> anyhow::Result<Arc<Rack>> {
    let spec = RackSpec {
        name: format!("work{}", process::id()).parse::<RackName>()?,
        servers,
        clients: 1,
        mtu: LinkMtus::default(),
        switch: asked.switch.unwrap_or(site.data_plane()),
        // An extent more than the program uses, on each server.
        memory: ByteSize(asked.bytes().0.saturating_add(64 << 20)),
        redirects: Redirects::default(),
        direct_reads: true,
    };
    let program = std::env::current_exe().context("cannot find this program's own path")?;
    let mut rack = Rack::build(site, spec, cancel.clone())?;
    rack.start_daemons(&program, READY_DEADLINE)?;
    let core = server_core(core_count()?);
    for number in 1..=servers {
        machine::pin_daemons(&rack, Node::Server(number), core)?;
    }
    Ok(Arc::new(rack))
}

/// What was measured in one rack.
struct Measured {
    mechanisms: String,
    plain_seconds: Vec<f64>,
    /// For each share.
    shares: Vec<MeasuredShare>,
    swap_runs: Vec<SwapRun>,
}

#[derive(Clone, Default)]
struct MeasuredShare {
    seconds: Vec<f64>,
    last: Statistics,
}

fn core_count() -> anyhow::Result<usize> {
    let cores = thread::available_parallelism().context("cannot count the cores")?;
    Ok(cores.get())
}

/// The servers' core: one without copies, if there is a second one.
const fn server_core(core_count: usize) -> usize {
    if core_count > SERVER_CORE { SERVER_CORE } else { CLIENT_CORE }
}

/// The cores of the copies: the servers have one of their own, and on a machine of two the copies share the other. On a
/// machine of one all share it.
fn copies_cores(core_count: usize, copies: u16) -> Vec<usize> {
    let is_free = |core: &usize| core_count == 1 || *core != server_core(core_count);
    (0..core_count).filter(is_free).take(copies.into()).collect()
}

/// How long the client polls. A copy that polls would take the core from others that have work: other copies, or on a
/// machine of one core the server.
const fn spin(core_count: usize, copies: u16) -> Duration {
    if core_count > copies as usize { SPIN } else { Duration::ZERO }
}

fn measure(
    rack: &Rack,
    workout: Workout,
    asked: &Options,
    swap: Option<Arc<Swap>>,
) -> anyhow::Result<Measured> {
    let core_count = core_count()?;
    let cores = copies_cores(core_count, asked.copies);
    pin(CLIENT_CORE).context("cannot pin the client")?;
    let client = join(rack, spin(core_count, asked.copies))?;
    let bytes = asked.bytes();
    let words = usize::try_from(bytes.0 / 4).context("the size is too large")?;
    let mode = match asked.handlers {
        0 => FaultMode::InThread,
        count => FaultMode::Threads { count: count.into() },
    };
    let copies = usize::from(asked.copies);
    let together = Together { workout, copies, cores };
    let mut swapped = swap.map(|swap| MeasuredSwap::new(swap, together.clone(), words, asked));
    let mut measured = Measured {
        mechanisms: String::new(),
        plain_seconds: Vec::new(),
        shares: vec![MeasuredShare::default(); asked.local.len()],
        swap_runs: Vec::new(),
    };
    for round in 0..asked.rounds {
        let mut plain = vec![0_u32; words];
        let expected = together.run(&mut plain, round.into(), || ()).context("plain memory")?;
        drop(plain);
        measured.plain_seconds.push(expected.time.as_secs_f64());
        for (share, results) in asked.local.iter().zip(&mut measured.shares) {
            let local_bytes = share.of(bytes);
            let options = RegionOptions::new(bytes.0, local_bytes).mode(mode).lanes(copies.max(2));
            let mut region = RemoteRegion::new(&client, &options)?;
            measured.mechanisms = region.mechanisms().to_string();
            let observer = region.observer();
            let mut edges = Vec::new();
            let edge = || edges.extend(observer.statistics());
            let finished = together.run(region.as_mut_words(), round.into(), edge)?;
            if finished.digests != expected.digests {
                return Err(anyhow!(
                    "the result differs from that in plain memory: a defect of the pager"
                ));
            }
            results.seconds.push(finished.time.as_secs_f64());
            if let [begin, end] = edges[..] {
                results.last = between(begin, end);
            }
            if region.statistics().local_pages_max > local_bytes.div_ceil(4096) {
                return Err(anyhow!("more pages were local than allowed: a defect of the pager"));
            }
        }
        if let Some(swapped) = &mut swapped {
            swapped.round(round.into(), &expected)?;
        }
    }
    if let Some(swapped) = swapped {
        measured.swap_runs = swapped.finish(&measured.plain_seconds);
    }
    Ok(measured)
}

/// What was counted in the timed part: not while the memory was filled and checked.
const fn between(begin: Statistics, end: Statistics) -> Statistics {
    let mut part = end;
    part.remote_faults -= begin.remote_faults;
    part.write_faults -= begin.write_faults;
    part.prefetched_pages -= begin.prefetched_pages;
    part.requested_pages -= begin.requested_pages;
    part.confirmed_pages -= begin.confirmed_pages;
    part.read_bytes -= begin.read_bytes;
    part.written_bytes -= begin.written_bytes;
    part.read_wait_ns -= begin.read_wait_ns;
    part.room_wait_ns -= begin.room_wait_ns;
    part
}

impl Findings {
    /// Adds what was measured in a rack.
    fn add(&mut self, asked: &Options, servers: u16, measured: Measured) {
        let Measured { mechanisms, plain_seconds, shares, swap_runs } = measured;
        self.swap_runs.extend(swap_runs);
        for (share, MeasuredShare { seconds, last }) in asked.local.iter().zip(shares) {
            let ratios = seconds.iter().zip(&plain_seconds).map(|(ours, plain)| ours / plain);
            let time = seconds.last().copied().unwrap_or(f64::NAN) * f64::from(asked.copies);
            self.runs.push(Run {
                servers,
                local_percent: share.0,
                ratio: median(&ratios.collect::<Vec<_>>()),
                published: published::find(self.workout, asked.copies, servers, share.0),
                remote_faults: last.remote_faults,
                write_faults: last.write_faults,
                prefetched_pages: last.prefetched_pages,
                prefetch_accuracy: last.prefetch_accuracy(),
                read_bytes: last.read_bytes,
                written_bytes: last.written_bytes,
                read_wait: as_seconds(last.read_wait_ns) / time,
                room_wait: as_seconds(last.room_wait_ns) / time,
                plain_seconds: plain_seconds.clone(),
                seconds,
            });
        }
        self.mechanisms = mechanisms;
        self.plain_seconds.extend(plain_seconds);
    }
}

#[allow(clippy::cast_precision_loss, reason = "a share needs few digits")]
fn as_seconds(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_and_servers_share_a_core_only_if_there_is_no_other() {
        assert_eq!((server_core(1), server_core(2), server_core(8)), (0, 1, 1));
        assert_eq!(copies_cores(1, 1), [0]);
        assert_eq!(copies_cores(1, 2), [0]);
        assert_eq!(copies_cores(2, 2), [0]);
        assert_eq!(copies_cores(4, 2), [0, 2]);
        assert_eq!(copies_cores(4, 8), [0, 2, 3]);
        for (core_count, copies) in [(2, 1), (4, 3), (4, 1)] {
            assert_eq!(spin(core_count, copies), SPIN, "{core_count} cores, {copies} copies");
        }
        for (core_count, copies) in [(1, 1), (2, 2), (4, 4), (1, 8)] {
            assert_eq!(spin(core_count, copies), Duration::ZERO, "{core_count}, {copies}");
        }
    }

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
