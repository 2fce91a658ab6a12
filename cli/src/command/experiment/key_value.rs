//! A key-value store, redis-server as it is, whose memory is partly local: by `bluebridge run`, or by swap.

mod measure;
mod redis;
mod report;
mod resp;

use std::path::PathBuf;
use std::process;
use std::sync::Arc;

use anyhow::Context;
use bluebridge_bench::swap::Kind;
use bluebridge_rack::daemon::READY_DEADLINE;
use bluebridge_rack::spec::{ByteSize, DataPlane, LinkMtus, RackName, RackSpec, Redirects};
use bluebridge_rack::{Rack, Site};
use clap::Args;
use serde::Serialize;

use self::redis::{Programs, Rate};
use super::super::bench::machine::Machine;
use super::super::steps::Steps;
use super::super::{Global, interrupt};
use super::Folder;
use super::comparison::{Comparison, Held};
use super::workout::Share;
use crate::exit::{Exit, UsageError};
use crate::output;

/// The options of the experiment.
#[derive(Clone, Debug, Args)]
pub(in crate::command) struct KeyValue {
    /// Keys that the store holds
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1..=100_000_000))]
    keys: u32,
    /// Bytes of each value
    #[arg(long, value_name = "BYTES", default_value_t = 1000,
          value_parser = clap::value_parser!(u32).range(16..=1_000_000))]
    value_size: u32,
    /// Operations of each kind (GET, SET), on random keys
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000_000))]
    operations: u32,
    /// Connections of the benchmark
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1000))]
    connections: u16,
    /// Shares of the store's memory that may be local; with 100%, everything is local
    #[arg(long, value_delimiter = ',', default_value = "100%,50%")]
    local: Vec<Share>,
    /// Rounds: in each, the store is started once in each way
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=100))]
    rounds: u16,
    /// Memory servers
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=8))]
    servers: u16,
    /// The directory with redis-server and redis-benchmark; the default is to look for them in PATH
    #[arg(long, value_name = "DIRECTORY")]
    redis: Option<PathBuf>,
    /// The directory of the CSV file and of the store's messages
    #[arg(long, default_value = "key-value")]
    output: PathBuf,
    /// The switch's data plane; the default is ebpf with root if this build has it, otherwise soft
    #[arg(long)]
    switch: Option<DataPlane>,
    #[command(flatten)]
    comparison: Comparison,
}

impl KeyValue {
    /// More than redis needs for its data: it also has an entry and a header for each key.
    const fn data_bytes_max(&self) -> u64 {
        let each = self.value_size as u64 / 4 * 5 + 200;
        (self.keys as u64).saturating_mul(each).saturating_add(32 << 20)
    }
}

/// How the store has its memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Way {
    /// All of it local, without BlueBridge.
    Plain,
    /// By `bluebridge run`.
    Run,
    /// In a cgroup, with swap to a file.
    SwapFile,
    /// In a cgroup, with swap to zram.
    Zram,
}

impl Way {
    const fn of(kind: Kind) -> Self {
        match kind {
            Kind::SwapFile => Self::SwapFile,
            Kind::Zram => Self::Zram,
        }
    }

    const fn kind(self) -> Option<Kind> {
        match self {
            Self::SwapFile => Some(Kind::SwapFile),
            Self::Zram => Some(Kind::Zram),
            Self::Plain | Self::Run => None,
        }
    }

    const fn words(self) -> &'static str {
        match self {
            Self::Plain => "without bluebridge run",
            Self::Run => "bluebridge run",
            Self::SwapFile => "swap to a file",
            Self::Zram => "swap to zram",
        }
    }
}

/// One way, in all rounds.
#[derive(Clone, Debug, Serialize)]
struct Row {
    way: Way,
    local_percent: u8,
    /// The store's data that may be local: `--local` of `bluebridge run`, or a part of the cgroup's limit.
    local_bytes: Option<u64>,
    /// The cgroup's limit.
    limit_bytes: Option<u64>,
    /// Of each round.
    get: Vec<Rate>,
    set: Vec<Rate>,
    /// Median over the rounds: operations per second, divided by those without `bluebridge run`.
    get_ratio: f64,
    set_ratio: f64,
    /// From the start to the end of the store in the last round, as what follows: faults that needed a page.
    faults: Option<u64>,
    read_bytes: u64,
    written_bytes: u64,
    /// How often the kernel found nothing to press out, so that the limit was exceeded for a moment; of all rounds.
    relief_count: u64,
    /// The size of zram's contents after compression, as a share, when the keys were loaded.
    compressed_share: Option<f64>,
    /// Values that were read back and compared, in all rounds.
    checked_count: u64,
}

/// All results.
#[derive(Clone, Debug, Serialize)]
struct Findings {
    machine: Machine,
    redis: String,
    keys: u32,
    value_bytes: u32,
    operations: u32,
    connections: u16,
    servers: u16,
    /// The store's memory for data without `bluebridge run`.
    data_bytes: u64,
    /// What its process needs besides; known only if swap is measured.
    own_bytes: Option<u64>,
    rows: Vec<Row>,
    files: Vec<String>,
}

/// The ways to be measured; the first is what others are compared with.
fn ways(shares: &[Share], kinds: &[Kind]) -> Vec<(Way, u8)> {
    let mut ways = vec![(Way::Plain, 100)];
    ways.extend(shares.iter().map(|share| (Way::Run, share.0)));
    for kind in kinds {
        // With 100 % nothing is pressed out.
        let shares = shares.iter().filter(|share| share.0 < 100);
        ways.extend(shares.map(|share| (Way::of(*kind), share.0)));
    }
    ways
}

pub(super) fn run(asked: KeyValue, global: Global) -> anyhow::Result<Exit> {
    let programs = Programs::find(asked.redis.as_deref())?;
    let bytes = asked.data_bytes_max();
    if bytes > 1 << 40 {
        return Err(UsageError("--keys with --value-size are more than 1T".to_owned()).into());
    }
    let held = asked.comparison.prepare(bytes)?;
    let folder = Folder::make(&asked.output)?;
    let site = Site::prepare()?;
    let cancel = interrupt::watch().context("cannot watch for signals")?;
    let steps = Steps::new(2, global);
    let number = output::counted(asked.servers.into(), "server");
    steps.begin(&format!("a rack of {number} and one client"));
    let spec = RackSpec {
        name: format!("keys{}", process::id()).parse::<RackName>()?,
        servers: asked.servers,
        clients: 1,
        mtu: LinkMtus::default(),
        switch: asked.switch.unwrap_or(site.data_plane()),
        // Each can hold all of it, also what is written while older pages are not freed yet.
        memory: ByteSize(bytes.saturating_mul(2).next_multiple_of(64 << 20)),
        redirects: Redirects::default(),
        direct_reads: true,
    };
    let program = std::env::current_exe().context("cannot find this program's own path")?;
    let mut rack = Rack::build(&site, spec, cancel.clone())?;
    rack.start_daemons(&program, READY_DEADLINE)?;
    let rack = Arc::new(rack);
    let kinds = held.as_ref().map_or(&[][..], |held| &held.kinds);
    let ways = ways(&asked.local, kinds);
    steps.begin(&format!(
        "{} of {}",
        output::counted(asked.rounds.into(), "round"),
        output::counted(ways.len() as u64, "way")
    ));
    let swap = held.as_ref().map(Held::share);
    let (copy, log) = (asked.clone(), folder.file("redis.log"));
    let work = move |rack: &Rack| {
        let setting = measure::Setting { asked: copy, programs, program, swap, log };
        setting.measure(rack, &ways)
    };
    let mut findings = interrupt::measure(&rack, &cancel, work)?;
    interrupt::take_down(rack)?;
    if let Some(held) = held {
        held.end()?;
    }
    steps.end();
    // Measuring takes long: the results are printed even if no file can be written.
    let written = report::write(&mut findings, &folder);
    report::print(&findings, global.json)?;
    written.map(|()| Exit::Ok)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swap_is_measured_only_where_something_is_pressed_out() {
        let shares = [Share(100), Share(50)];
        let ways = ways(&shares, &[Kind::SwapFile, Kind::Zram]);
        let all = [
            (Way::Plain, 100),
            (Way::Run, 100),
            (Way::Run, 50),
            (Way::SwapFile, 50),
            (Way::Zram, 50),
        ];
        assert_eq!(ways, all);
        for kind in [Kind::SwapFile, Kind::Zram] {
            assert_eq!(Way::of(kind).kind(), Some(kind));
        }
    }
}
