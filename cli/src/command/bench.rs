//! `bluebridge bench`: BlueBridge's operations beside plain UDP, measured in a temporary rack.

mod bulk;
mod compare;
pub(super) mod machine;
mod measure;
mod readers;
mod report;
mod serving;
mod update;

use std::path::PathBuf;
use std::process;
use std::sync::Arc;
use std::thread;

use anyhow::{Context, anyhow};
use bluebridge_bench::contest::Length;
use bluebridge_bench::ours::Operation;
use bluebridge_rack::daemon::READY_DEADLINE;
use bluebridge_rack::spec::{ByteSize, DataPlane, LinkMtus, Node, RackName, RackSpec, Redirects};
use bluebridge_rack::{Cancel, Rack, Site};
use clap::{Args, ValueEnum};

use self::measure::{Endpoints, Plan};
use super::steps::Steps;
use super::{Global, interrupt};
use crate::exit::{Exit, UsageError};

/// The core of the client and of all requesting threads.
const CLIENT_CORE: usize = 0;

/// The core of the server and of all responding threads.
const SERVER_CORE: usize = 1;

const SERVER: Node = Node::Server(1);
const SERVER_DAEMON: &str = "memserver-s1";

/// It takes part in READs and in `bulk` only. It never polls in READs.
const SECOND: Node = Node::Server(2);
const SECOND_DAEMON: &str = "memserver-s2";
const CLIENT: Node = Node::Client(1);

/// The subject and the duration of a measurement.
#[derive(Debug, Args)]
#[command(
    after_help = "The switch runs on the sender's core. Both ends spin, so no other program \
    should run on the machine. A ratio is the median over the rounds of BlueBridge's percentile divided by the \
    echo's in the same round."
)]
pub(super) struct Bench {
    /// The operation; `all` measures READ and WRITE of 64 and 4096 bytes, FETCH_ADD, CREATE and DELETE
    #[arg(value_enum, default_value_t = Subject::All)]
    operation: Subject,
    /// Bytes of the operation, at most one page
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=4096))]
    size: u32,
    /// Largest IP packet of the links
    #[arg(long, default_value = "9000")]
    mtu: LinkMtus,
    /// The switch's data plane; the default is ebpf with root if this build has it, otherwise soft
    #[arg(long)]
    switch: Option<DataPlane>,
    /// Rounds: in each, every contestant has one turn
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u16).range(1..=1000))]
    rounds: u16,
    /// Timed operations of each turn
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u32).range(10..=1_000_000))]
    operations: u32,
    /// Skip the pipelined measurements
    #[arg(long, conflicts_with = "only")]
    latency_only: bool,
    /// Measure these parts (`compare` only); by default all
    #[arg(long, value_enum, value_name = "PART", value_delimiter = ',')]
    only: Vec<compare::Part>,
    /// MiB that are read and written (`bulk` only)
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=64))]
    megabytes: u32,
    /// Write plots to this directory (`compare` only)
    #[arg(long)]
    output: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Subject {
    All,
    /// READ and WRITE of 64 MiB, by one call, by a call for each line, and on two servers, beside a bare stream of UDP
    /// trains
    Bulk,
    /// READ and WRITE of 64 and 4096 bytes beside memcached, redis and nbdkit, with one, many, and many clients' operations
    /// outstanding
    Compare,
    Create,
    Delete,
    /// FETCH_ADD of 8 bytes
    FetchAdd,
    Read,
    /// UPDATE with its COMMIT, compared with READ
    Update,
    Write,
}

impl Bench {
    fn length(&self) -> Length {
        Length {
            round_count: self.rounds.into(),
            warm_up_count: 200,
            operation_count: self.operations as usize,
        }
    }

    /// What `compare` measures.
    fn parts(&self) -> Vec<compare::Part> {
        match (self.latency_only, self.only.is_empty()) {
            (true, _) => vec![compare::Part::Latency],
            (false, true) => compare::Part::value_variants().to_vec(),
            (false, false) => self.only.clone(),
        }
    }

    /// A rack of one server, or also one that never polls for READs, pinned to their core, and one client.
    fn build(&self, site: &Site, redirects: Redirects, cancel: &Cancel) -> anyhow::Result<Rack> {
        let reads = matches!(self.operation, Subject::All | Subject::Read);
        let has_two = reads || matches!(self.operation, Subject::Bulk);
        let spec = RackSpec {
            name: format!("bench{}", process::id()).parse::<RackName>()?,
            servers: if has_two { 2 } else { 1 },
            clients: 1,
            mtu: self.mtu.clone(),
            switch: self.switch.unwrap_or(site.data_plane()),
            memory: ByteSize(256 << 20),
            redirects,
            direct_reads: true,
        };
        let program = std::env::current_exe().context("cannot find this program's own path")?;
        let mut rack = Rack::build(site, spec, cancel.clone())?;
        rack.start_daemons(&program, READY_DEADLINE)?;
        if reads {
            rack.stop_daemon(SECOND_DAEMON, READY_DEADLINE)?;
            rack.restart_daemon(&program, SECOND_DAEMON, &["--spin", "0"], READY_DEADLINE)?;
        }
        if has_two {
            machine::pin_daemons(&rack, SECOND, SERVER_CORE)?;
        }
        // The memory servers never share the client's core.
        machine::pin_daemons(&rack, SERVER, SERVER_CORE)?;
        Ok(rack)
    }

    fn plans(&self) -> Vec<Plan> {
        let plan = |operation, bytes| Plan {
            operation,
            bytes,
            length: self.length(),
            pipelined: !self.latency_only,
        };
        let size = self.size as usize;
        match self.operation {
            Subject::All => vec![
                plan(Operation::Read, 64),
                plan(Operation::Read, 4096),
                plan(Operation::Write, 64),
                plan(Operation::Write, 4096),
                plan(Operation::FetchAdd, 8),
                plan(Operation::Create, 4096),
                plan(Operation::Delete, 4096),
            ],
            // They have their own contestants.
            Subject::Bulk | Subject::Compare | Subject::Update => Vec::new(),
            Subject::Create => vec![plan(Operation::Create, size)],
            Subject::Delete => vec![plan(Operation::Delete, size)],
            Subject::FetchAdd => vec![plan(Operation::FetchAdd, 8)],
            Subject::Read => vec![plan(Operation::Read, size)],
            Subject::Write => vec![plan(Operation::Write, size)],
        }
    }
}

pub(super) fn run(bench: Bench, global: Global) -> anyhow::Result<Exit> {
    let plans = bench.plans();
    let site = Site::prepare()?;
    let cores = thread::available_parallelism().context("cannot count the cores")?.get();
    if cores < 2 {
        return Err(anyhow!(
            "a spinning client and a spinning server need two cores, but this machine has one"
        ));
    }
    let cancel = interrupt::watch().context("cannot watch for signals")?;
    let switch = bench.switch.unwrap_or(site.data_plane());
    if matches!(bench.operation, Subject::Update) {
        let mut reports = Vec::new();
        let policies = [Redirects::Contended, Redirects::Always];
        let steps = Steps::new(policies.len(), global);
        for policy in policies {
            steps.begin(&format!("UPDATE under the policy {} of redirects", policy.as_str()));
            let rack = Arc::new(bench.build(&site, policy, &cancel)?);
            let (size, length) = (bench.size as usize, bench.length());
            let work = move |rack: &Rack| update::run(rack, policy, size, length);
            reports.push(interrupt::measure(&rack, &cancel, work)?);
            interrupt::take_down(rack)?;
        }
        steps.end();
        update::print(&reports, bench.size as usize, switch, global.json)?;
        return Ok(Exit::Ok);
    }
    if bench.output.is_some() && !matches!(bench.operation, Subject::Compare) {
        return Err(UsageError("--output is for `bench compare`".to_owned()).into());
    }
    if !bench.only.is_empty() && !matches!(bench.operation, Subject::Compare) {
        return Err(UsageError("--only is for `bench compare`".to_owned()).into());
    }
    let rack = bench.build(&site, Redirects::default(), &cancel)?;
    let port = rack.layout().port_of(CLIENT).context("the rack has no client")?.number;
    let controller = format!("http://{}", rack.layout().controller());
    let endpoints = rack.enter(CLIENT, || Endpoints::join(&controller, port))??;
    if matches!(bench.operation, Subject::Compare) {
        let asked = compare::Asked {
            length: bench.length(),
            parts: bench.parts(),
            output: bench.output,
            switch,
        };
        compare::run(rack, endpoints, &asked, &cancel, global)?;
        return Ok(Exit::Ok);
    }
    if matches!(bench.operation, Subject::Bulk) {
        let asked = bulk::Asked {
            bytes: (bench.megabytes as usize) << 20,
            round_count: bench.rounds.into(),
            switch,
        };
        bulk::run(rack, endpoints, asked, &cancel, global)?;
        return Ok(Exit::Ok);
    }
    let steps = Steps::new(plans.len(), global);
    let rack = Arc::new(rack);
    let endpoints = Arc::new(endpoints);
    let mut reports = Vec::with_capacity(plans.len());
    for plan in plans {
        steps.begin(&format!("{} of {} bytes", plan.operation.name().to_uppercase(), plan.bytes));
        let endpoints = Arc::clone(&endpoints);
        let work = move |rack: &Rack| measure::run(rack, &endpoints, plan);
        reports.push(interrupt::measure(&rack, &cancel, work)?);
    }
    steps.end();
    report::print(&reports, switch, global.json)?;
    Ok(Exit::Ok)
}
