//! Memory that moves to another server under load, beside a copy by the application and no move at all.

mod report;

use std::path::PathBuf;
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use bluebridge::{NodeId, Placement, Region};
use bluebridge_bench::moving::{self, Bucket, Detours, Interval, Load};
use bluebridge_bench::summary::{Summary, median};
use bluebridge_northbound::proto;
use bluebridge_rack::control::{self, operations};
use bluebridge_rack::daemon::READY_DEADLINE;
use bluebridge_rack::spec::{ByteSize, DataPlane, LinkMtus, RackName, RackSpec, Redirects};
use bluebridge_rack::{Rack, Site};
use bluebridge_wire::address::{LINE_BYTES, PAGE_BYTES};
use clap::Args;
use serde::Serialize;

use super::super::steps::Steps;
use super::super::{Global, interrupt};
use super::Folder;
use super::in_rack::{Joined, Operator, PATIENCE, another};
use crate::exit::Exit;

/// How long a move may make no progress.
const STANDSTILL: Duration = Duration::from_secs(60);

/// How often the progress is asked for: often enough for a plot and for the end of a move, without a noticeable load.
const PACE: Duration = Duration::from_millis(50);

/// The time between two points of a plot.
const STEP: Duration = Duration::from_millis(200);

/// Memory of each server beside what moves: the second server's copies, and lines at both ends.
const SPARE_BYTES: u64 = 32 << 20;

/// Moves without load: an odd number, so that all of it is at home again.
const ALONE_ROUNDS: usize = 5;

/// READs of the client that joins after the move.
const LATE_READS: usize = 10_000;

/// The options of the experiment.
#[derive(Debug, Args)]
pub(in crate::command) struct Migration {
    /// How much memory moves
    #[arg(long, default_value = "1G", value_parser = parse_size)]
    size: ByteSize,
    /// Clients that work on it
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    clients: u16,
    /// Seconds of work before and after the move
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=600))]
    seconds: u16,
    /// The directory of the CSV file and plots
    #[arg(long, default_value = "migration")]
    output: PathBuf,
    /// The switch's data plane; the default is ebpf with root if this build has it, otherwise soft
    #[arg(long)]
    switch: Option<DataPlane>,
}

pub(in crate::command) fn parse_size(text: &str) -> Result<ByteSize, String> {
    let size: ByteSize = text.parse().map_err(|error| format!("{error}"))?;
    match size.0 {
        bytes if bytes % LINE_BYTES as u64 != 0 => Err("use whole lines of 32 KiB".to_owned()),
        bytes if bytes < 4 << 20 => Err("the least is 4M".to_owned()),
        _ => Ok(size),
    }
}

/// A move of all memory.
#[derive(Clone, Copy, Debug, Serialize)]
struct Moved {
    /// From the request until every page was at its new server.
    seconds: f64,
    bytes_per_second: f64,
}

impl Moved {
    fn of(size: ByteSize, time: Duration) -> Self {
        Self { seconds: time.as_secs_f64(), bytes_per_second: rate(size, time) }
    }
}

/// Bytes per second.
fn rate(size: ByteSize, time: Duration) -> f64 {
    size.0 as f64 / time.as_secs_f64()
}

/// A move without load, and reading just before it: other machines on the same hardware disturb both alike.
#[derive(Clone, Copy, Debug, Serialize)]
struct Alone {
    /// Whether the memory moves back to the server that its pointers name.
    is_to_home: bool,
    moved: Moved,
    /// Reading all of it, 1 MiB at a time.
    bulk_read_bytes_per_second: f64,
    ratio: f64,
}

/// How far the move was.
#[derive(Clone, Copy, Debug)]
struct Progress {
    /// Seconds since the load began.
    at: f64,
    moved_bytes: u64,
}

/// What the experiment found.
#[derive(Debug, Serialize)]
struct Findings {
    switch: DataPlane,
    size_bytes: u64,
    client_count: u16,
    before: Interval,
    during: Interval,
    after: Interval,
    /// Operations per second during the move, divided by those before it.
    throughput_ratio: f64,
    /// The p99 during the move, divided by that before it.
    p99_ratio: f64,
    moved_under_load: Moved,
    /// Moves back and forth without load, each after all of it was read.
    alone: Vec<Alone>,
    /// How long lines were out of reach, while one client read a page of each without pause and nothing else happened.
    out_of_reach: Summary,
    /// The rate of a move without load, divided by that of reading just before: the middle one of these moves.
    alone_to_bulk_read_ratio: f64,
    /// A client that reads all of it and writes it to the other server, during which nobody may change it.
    stop_and_copy_seconds: f64,
    /// Entries that the switch needed for the memory that had moved.
    directory_entry_count: usize,
    /// The clients before, during and after the move.
    detours: [Detours; 3],
    /// 10,000 READs of a client that joined after the move.
    detours_of_late_client: Detours,
    failures: u64,
    wrong_reads: u64,
    first_failure: Option<String>,
    #[serde(skip)]
    series: Vec<Bucket>,
    #[serde(skip)]
    progress: Vec<Progress>,
    /// When the move began and ended, in seconds since the load began.
    #[serde(skip)]
    moving: (f64, f64),
}

impl Findings {
    fn is_good(&self) -> bool {
        self.failures == 0 && self.wrong_reads == 0
    }
}

pub(super) fn run(asked: Migration, global: Global) -> anyhow::Result<Exit> {
    let folder = Folder::make(&asked.output)?;
    let site = Site::prepare()?;
    let cancel = interrupt::watch().context("cannot watch for signals")?;
    let program = std::env::current_exe().context("cannot find this program's own path")?;
    let steps = Arc::new(Steps::new(8, global));
    steps.begin("a rack of two servers and one client host");
    let spec = RackSpec {
        name: format!("migration{}", process::id()).parse::<RackName>()?,
        servers: 2,
        clients: 1,
        mtu: LinkMtus::default(),
        switch: asked.switch.unwrap_or(site.data_plane()),
        memory: ByteSize(asked.size.0 + SPARE_BYTES),
        redirects: Redirects::default(),
        direct_reads: true,
    };
    let mut rack = Rack::build(&site, spec, cancel.clone())?;
    rack.start_daemons(&program, READY_DEADLINE)?;
    let rack = Arc::new(rack);
    let used = Arc::clone(&steps);
    let findings = interrupt::measure(&rack, &cancel, move |rack| measure(rack, &asked, &used))?;
    interrupt::take_down(rack)?;
    steps.end();
    report::print(&findings, &folder, global.json)?;
    Ok(if findings.is_good() { Exit::Ok } else { Exit::Failure })
}

fn measure(rack: &Rack, asked: &Migration, steps: &Steps) -> anyhow::Result<Findings> {
    let Joined { mut owner, workers, servers } = Joined::to(rack, asked.clients)?;
    let [home, other] = servers[..] else { bail!("the rack has not two servers") };
    let region = owner.create_at(asked.size.0, Placement::Node(home))?;
    let load = Load::begin(&mut owner, vec![region], false)?;
    let time = Duration::from_secs(asked.seconds.into());
    let controller = Operator::of(rack);
    let (times, mut seen) = load
        .beside(workers, || under_load(&load, &controller, steps, (region, home, other), time))?;
    let times = times?;
    steps.begin("all bytes are compared, and a new client reads");
    load.check(&mut owner, &mut seen)?;
    let [mut owner, mut late] = another(rack, owner)?;
    let late_reads = moving::read_some(&mut late, region, LATE_READS)?;
    let directory_entry_count = controller.moved_entries()?;
    steps.begin(&format!("the memory moves back and forth without load, {ALONE_ROUNDS} times"));
    let mut alone = Vec::with_capacity(ALONE_ROUNDS);
    for round in 0..ALONE_ROUNDS {
        let is_to_home = round % 2 == 0;
        let to = if is_to_home { home } else { other };
        let read = moving::read_all(&mut owner, region)?;
        let time = controller.move_all(region, home, to, &mut |_| {})?;
        alone.push(Alone {
            is_to_home,
            moved: Moved::of(asked.size, time),
            bulk_read_bytes_per_second: rate(asked.size, read),
            ratio: read.as_secs_f64() / time.as_secs_f64(),
        });
        load.check(&mut owner, &mut seen)?;
    }
    steps.begin("the memory moves twice, and a client reads lines that move");
    let stop = AtomicBool::new(false);
    let out_of_reach = thread::scope(|scope| {
        let probing = scope.spawn(|| moving::probe(&mut late, region, &stop));
        let outcome = controller.move_all(region, home, other, &mut |_| {});
        stop.store(true, Ordering::Relaxed);
        let samples = probing.join().map_err(|_| anyhow!("the probe panicked"))?;
        outcome?;
        Ok::<_, anyhow::Error>(samples?.summary())
    })?;
    controller.move_all(region, home, home, &mut |_| {})?;
    steps.begin("the memory is copied by a client");
    let copy = owner.create_at(asked.size.0, Placement::Node(other))?;
    let stop_and_copy = moving::copy_all(&mut owner, region, copy)?;
    owner.delete(copy)?;
    owner.delete(region)?;
    let [before, during, after] =
        times.phases.each_ref().map(|(from, to)| seen.interval(*from, *to));
    let [(first, _), (from, to), (_, last)] = times.phases;
    Ok(Findings {
        switch: rack.state().spec.switch,
        size_bytes: asked.size.0,
        client_count: asked.clients,
        before,
        during,
        after,
        throughput_ratio: during.operations_per_second / before.operations_per_second,
        p99_ratio: during.latency.p99_us / before.latency.p99_us,
        moved_under_load: Moved::of(asked.size, times.moved),
        alone_to_bulk_read_ratio: median(&alone.iter().map(|it| it.ratio).collect::<Vec<_>>()),
        alone,
        out_of_reach,
        stop_and_copy_seconds: stop_and_copy.as_secs_f64(),
        directory_entry_count,
        detours: [0, 1, 2].map(|phase| seen.detours(phase)),
        detours_of_late_client: late_reads.detours,
        failures: seen.failures,
        wrong_reads: seen.wrong_reads + late_reads.wrong_reads,
        first_failure: seen.first_failure.clone(),
        series: seen.series(first, last, STEP),
        progress: times.progress,
        moving: (from.as_secs_f64(), to.as_secs_f64()),
    })
}

/// When the phases began and ended, since the load began.
struct Times {
    phases: [(Duration, Duration); 3],
    moved: Duration,
    progress: Vec<Progress>,
}

/// Works before, during and after the move.
fn under_load(
    load: &Load,
    controller: &Operator<'_>,
    steps: &Steps,
    (region, home, to): (Region, NodeId, NodeId),
    time: Duration,
) -> anyhow::Result<Times> {
    steps.begin(&format!("work before the move, {} s", time.as_secs()));
    let from = load.elapsed();
    thread::sleep(time);
    let before = (from, load.elapsed());
    steps.begin("work during the move");
    load.next_phase();
    let mut progress = Vec::new();
    let mut note = |moved_bytes| {
        progress.push(Progress { at: load.elapsed().as_secs_f64(), moved_bytes });
    };
    let from = load.elapsed();
    let moved = controller.move_all(region, home, to, &mut note)?;
    let during = (from, from + moved);
    steps.begin(&format!("work after the move, {} s", time.as_secs()));
    load.next_phase();
    let from = load.elapsed();
    thread::sleep(time);
    let after = (from, load.elapsed());
    Ok(Times { phases: [before, during, after], moved, progress })
}

impl Operator<'_> {
    /// Moves a region, and waits until all servers know it; `note` gets the bytes that have moved. Returns the time until
    /// all pages were there.
    fn move_all(
        &self,
        region: Region,
        home: NodeId,
        to: NodeId,
        note: &mut dyn FnMut(u64),
    ) -> anyhow::Result<Duration> {
        let begun = Instant::now();
        let base = region.base();
        let request = proto::MigrateRequest {
            server: home.0.into(),
            space: base.space.0.into(),
            generation: None,
            first_page: base.location.page(),
            page_count: region.length_bytes() / PAGE_BYTES as u64,
            to: to.0.into(),
        };
        let recorded = self.ask(|contact| operations::migrate(contact, request, PATIENCE))?;
        let ids = recorded.migrations;
        let (mut kept, mut last_change, mut moved) = (0, Instant::now(), None);
        loop {
            let mut ours = self.ask(|contact| operations::migrations(contact, PATIENCE))?;
            ours.retain(|one| ids.contains(&one.id));
            let now_kept: u64 = ours.iter().map(|one| one.kept_pages).sum();
            note(now_kept * PAGE_BYTES as u64);
            let is_all = |one: &proto::Migration| one.kept_pages == one.page_count;
            if ours.iter().all(is_all) {
                moved.get_or_insert_with(|| begun.elapsed());
            }
            let is_closed = |one: &&proto::Migration| one.stage() == proto::MigrationStage::Closed;
            let mut closed = ours.iter().filter(is_closed);
            if let Some(of) = closed.clone().find(|of| of.kept_pages < of.page_count) {
                bail!("migration {} ended before all pages had moved: {}", of.id, of.why);
            }
            // The next one of these pages begins only then.
            if let Some(moved) = moved.filter(|_| closed.by_ref().count() == ours.len()) {
                return Ok(moved);
            }
            if now_kept != kept {
                (kept, last_change) = (now_kept, Instant::now());
            }
            if last_change.elapsed() > STANDSTILL {
                bail!("no page has moved for {} s", STANDSTILL.as_secs());
            }
            thread::sleep(PACE);
        }
    }

    /// How many entries lead memory to another server than its home.
    fn moved_entries(&self) -> anyhow::Result<usize> {
        let state = self.ask(|contact| control::controller_state(contact, true))?;
        let of_moved = |entry: &&proto::TableEntry| entry.table == "directory" && entry.desired;
        let all = state.entries.iter().filter(of_moved).count();
        // Each endpoint has one, in all states of the rack.
        Ok(all.saturating_sub(state.nodes.len()))
    }
}
