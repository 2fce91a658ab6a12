//! `bluebridge workload moving`: a mixed load on memory that others move meanwhile.

use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use bluebridge::{Client, NodeId, Placement, Pointer, Region};
use bluebridge_bench::moving::{self, Bucket, Detours, Interval, Load, SomeReads};
use bluebridge_rack::readiness;
use bluebridge_rack::spec::ByteSize;
use bluebridge_transport::udp::UdpTransport;
use clap::Args;
use serde::Serialize;

use crate::command::Global;
use crate::command::bench::machine::Machine;
use crate::command::experiment::migration::parse_size;
use crate::command::interrupt;
use crate::command::member::Member;
use crate::exit::Exit;
use crate::output;

/// The time between two rows of the series.
const STEP: Duration = Duration::from_millis(200);

/// The largest exponent: with larger ones the first line has nearly everything.
const EXPONENT_MAX: f64 = 4.0;

/// How often the time and the signals are looked up.
const LOOK: Duration = Duration::from_millis(20);

/// Create memory, work on it until the time is over or Ctrl-C, and check every byte; it may move meanwhile.
///
/// Reports readiness (sd_notify) when the memory is written and the work begins. Ends with 1 if an operation failed or a
/// byte was wrong. Memory that cannot be freed at the end, because a server is away, is named.
#[derive(Debug, Args)]
pub(in crate::command) struct Moving {
    /// The memory servers that have the memory first, by name or id; without this option all
    #[arg(long, value_name = "SERVER,..", value_delimiter = ',')]
    on: Vec<String>,
    /// How much memory of each server is used
    #[arg(long, default_value = "64M", value_parser = parse_size)]
    size: ByteSize,
    /// Clients that work on it; they share the endpoint
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    clients: u16,
    /// Seconds of work
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=3600))]
    seconds: u16,
    /// Use the line of 32 KiB of rank n only n^-EXPONENT times as often as the hottest one; which lines are hot is random,
    /// and the same in every run. READs take the place of FETCH_ADDs
    #[arg(long, value_name = "EXPONENT", value_parser = parse_exponent)]
    zipf: Option<f64>,
    /// Leave the memory to others instead of freeing it
    #[arg(long)]
    keep: bool,
    #[command(flatten)]
    member: Member,
}

fn parse_exponent(text: &str) -> Result<f64, String> {
    let exponent = text.parse::<f64>().ok().filter(|it| (0.0..=EXPONENT_MAX).contains(it));
    exponent
        .ok_or_else(|| format!("{text:?} is no exponent from 0 to {EXPONENT_MAX}, such as 0.99"))
}

/// Read single pages of the memory of `workload moving` at random, as a client that does not know yet where they are.
#[derive(Debug, Args)]
pub(in crate::command) struct Reads {
    /// The beginning of the memory of one server, as `workload moving` prints it
    pointer: Pointer,
    /// How much memory there is
    #[arg(long, default_value = "64M", value_parser = parse_size)]
    size: ByteSize,
    /// Reads
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    count: u32,
    #[command(flatten)]
    member: Member,
}

#[derive(Serialize)]
struct Document {
    machine: Machine,
    /// The beginning of the memory of each server.
    pointers: Vec<String>,
    /// Those that are still there.
    left: Vec<String>,
    /// Of each server.
    size_bytes: u64,
    client_count: u16,
    /// When the work began, in seconds since 1970.
    begun_unix_s: f64,
    #[serde(flatten)]
    load: Interval,
    longest_us: f64,
    detours: Detours,
    failures: u64,
    wrong_reads: u64,
    first_failure: Option<String>,
    /// Why the memory could not be compared at the end.
    check_failure: Option<String>,
    series: Vec<Bucket>,
}

pub(super) fn run(asked: &Moving, global: Global) -> anyhow::Result<Exit> {
    let mut session = asked.member.join_as_owner(None)?;
    let cancel = interrupt::watch().context("cannot watch for signals")?;
    let servers = match asked.on.as_slice() {
        [] => session.nodes.iter().map(|node| node.node).collect(),
        named => named.iter().map(|name| session.node(name)).collect::<Result<Vec<_>, _>>()?,
    };
    let client = &mut session.client;
    let workers = (0..asked.clients).map(|_| client.try_clone()).collect::<Result<Vec<_>, _>>()?;
    let regions = create(client, &servers, asked.size.0)?;
    let load = match Load::begin(client, regions.clone(), true) {
        Ok(load) => load,
        Err(error) => {
            free(client, &regions);
            return Err(error.into());
        }
    };
    let load = match asked.zipf {
        Some(exponent) => load.with_zipf(exponent),
        None => load,
    };
    let begun_unix_s = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let time = Duration::from_secs(asked.seconds.into());
    readiness::report_ready();
    let (ended, mut seen) = load.beside(workers, || {
        while load.elapsed() < time && !cancel.is_cancelled() {
            thread::sleep(LOOK);
        }
        load.elapsed()
    })?;
    // What was measured is printed whatever becomes of the memory.
    let check = load.check(client, &mut seen).err().map(|error| error.to_string());
    let left = if asked.keep { regions.clone() } else { free(client, &regions) };
    session.leave();
    let names = |regions: &[Region]| regions.iter().map(|it| it.base().to_string()).collect();
    let document = Document {
        machine: Machine::look(),
        pointers: names(&regions),
        left: names(&left),
        size_bytes: asked.size.0,
        client_count: asked.clients,
        begun_unix_s: begun_unix_s.as_secs_f64(),
        load: seen.interval(Duration::ZERO, ended),
        longest_us: seen.longest(Duration::ZERO, ended).as_secs_f64() * 1e6,
        detours: seen.detours(0),
        failures: seen.failures,
        wrong_reads: seen.wrong_reads,
        first_failure: seen.first_failure.clone(),
        check_failure: check,
        series: seen.series(Duration::ZERO, ended, STEP),
    };
    print(&document, global)?;
    let is_good = document.failures == 0 && document.wrong_reads == 0;
    Ok(if is_good && document.check_failure.is_none() { Exit::Ok } else { Exit::Failure })
}

/// Creates a region at each server, or none.
fn create(
    client: &mut Client<UdpTransport>,
    servers: &[NodeId],
    bytes: u64,
) -> anyhow::Result<Vec<Region>> {
    let mut regions = Vec::new();
    for server in servers {
        match client.create_at(bytes, Placement::Node(*server)) {
            Ok(region) => regions.push(region),
            Err(error) => {
                free(client, &regions);
                return Err(error.into());
            }
        }
    }
    Ok(regions)
}

/// Frees regions; returns those that cannot be freed, and says why.
fn free(client: &mut Client<UdpTransport>, regions: &[Region]) -> Vec<Region> {
    let mut left = Vec::new();
    for region in regions {
        if let Err(error) = client.delete(*region) {
            output::complain(&format!("{} is not freed: {error}", region.base()));
            left.push(*region);
        }
    }
    left
}

fn print(found: &Document, global: Global) -> anyhow::Result<()> {
    if global.json {
        return output::json(found);
    }
    output::prose(&format!("{}; memory at {}\n", found.machine, found.pointers.join(", ")))?;
    let rows = found.series.iter().map(|bucket| {
        vec![
            format!("{:.1}", bucket.at),
            format!("{:.0}", bucket.operations_per_second),
            format!("{:.1}", bucket.p50_us),
            format!("{:.1}", bucket.p99_us),
        ]
    });
    output::table(&["seconds", "operations/s", "p50 us", "p99 us"], rows.collect())?;
    output::prose(&format!(
        "\n{:.0} operations/s, p50 {:.1} us, p99 {:.1} us, the longest {:.1} ms; {} were told of a move\n\
         {} operations failed; {} reads had wrong bytes",
        found.load.operations_per_second,
        found.load.latency.p50_us,
        found.load.latency.p99_us,
        found.longest_us / 1e3,
        found.detours.moved,
        found.failures,
        found.wrong_reads,
    ))?;
    if let Some(failure) = &found.first_failure {
        output::prose(&format!("the first failure: {failure}"))?;
    }
    if let Some(failure) = &found.check_failure {
        output::prose(&format!("the memory could not be compared at the end: {failure}"))?;
    }
    match found.left.as_slice() {
        [] => Ok(()),
        left => output::prose(&format!("left: {}", left.join(", "))),
    }
}

pub(super) fn read(asked: &Reads, global: Global) -> anyhow::Result<Exit> {
    let mut session = asked.member.join_as_owner(None)?;
    let region = Region::new(asked.pointer, asked.size.0)?;
    let found = moving::read_some(&mut session.client, region, asked.count as usize)?;
    session.leave();
    if global.json {
        output::json(&found)?;
    } else {
        let SomeReads { latency, detours, wrong_reads } = &found;
        output::prose(&format!(
            "{} READs: p50 {:.1} us, p99 {:.1} us; {} were refused by another node, {} were told of a move; {wrong_reads} had \
             wrong bytes",
            latency.sample_count, latency.p50_us, latency.p99_us, detours.astray, detours.moved
        ))?;
    }
    Ok(if found.wrong_reads == 0 { Exit::Ok } else { Exit::Failure })
}
