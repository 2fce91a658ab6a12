//! Every memory server of a rack in turn: drained, restarted with empty memory, and used again, under load.

use std::path::Path;
use std::process;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use bluebridge::{NodeId, Placement};
use bluebridge_bench::moving::{Detours, Interval, Load};
use bluebridge_northbound::proto;
use bluebridge_rack::control::{self, operations};
use bluebridge_rack::daemon::{FRESH, MEMORY_SERVER, READY_DEADLINE};
use bluebridge_rack::spec::{ByteSize, DataPlane, LinkMtus, Node, RackName, RackSpec, Redirects};
use bluebridge_rack::{Cancel, GRACE, Rack, Site};
use clap::Args;
use serde::Serialize;

use super::super::bench::machine::Machine;
use super::super::steps::Steps;
use super::super::{Global, interrupt};
use super::in_rack::{Joined, Operator, PATIENCE, another};
use super::migration::parse_size;
use crate::exit::Exit;
use crate::output;

/// How often draining is looked up.
const PACE: Duration = Duration::from_millis(100);

/// How long draining may make no progress.
const STANDSTILL: Duration = Duration::from_secs(60);

/// Memory of each server beside what moves: lines at both ends of a region.
const SPARE_BYTES: u64 = 16 << 20;

/// The options of the experiment.
#[derive(Debug, Args)]
pub(in crate::command) struct Rolling {
    /// Memory servers; what is drained for the second time is not taken back by its home, so three are needed
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(3..=16))]
    servers: u16,
    /// How much memory of each server is used
    #[arg(long, default_value = "64M", value_parser = parse_size)]
    size: ByteSize,
    /// Clients that work on it
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    clients: u16,
    /// How often each server is restarted
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1000))]
    rounds: u16,
    /// Seconds of work before the first drain, and after each restart
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=600))]
    seconds: u16,
    /// The switch's data plane; the default is ebpf with root if this build has it, otherwise soft
    #[arg(long)]
    switch: Option<DataPlane>,
}

/// One server that was drained and restarted.
#[derive(Debug, Serialize)]
struct Turn {
    server: String,
    /// From the request until it served nothing.
    drain_seconds: f64,
    /// From the end of its process, which is part of it, until the next one was a member.
    restart_seconds: f64,
    /// The answer to `undrain`.
    undrain_seconds: f64,
    /// The operations from the first request until the work after the restart ended.
    load: Interval,
    longest_us: f64,
    failures: usize,
    detours: Detours,
}

/// What the experiment found.
#[derive(Debug, Serialize)]
struct Findings {
    machine: Machine,
    switch: DataPlane,
    server_count: u16,
    /// Of each server.
    size_bytes: u64,
    client_count: u16,
    before: Interval,
    turns: Vec<Turn>,
    failures: u64,
    wrong_reads: u64,
    first_failure: Option<String>,
}

impl Findings {
    fn is_good(&self) -> bool {
        self.failures == 0 && self.wrong_reads == 0
    }
}

pub(super) fn run(asked: &Rolling, global: Global) -> anyhow::Result<Exit> {
    let site = Site::prepare()?;
    let cancel = interrupt::watch().context("cannot watch for signals")?;
    let program = std::env::current_exe().context("cannot find this program's own path")?;
    let steps = Steps::new(3 + usize::from(asked.servers * asked.rounds), global);
    steps.begin(&format!("a rack of {} servers and one client host", asked.servers));
    let switch = asked.switch.unwrap_or(site.data_plane());
    let spec = RackSpec {
        name: format!("rolling{}", process::id()).parse::<RackName>()?,
        servers: asked.servers,
        clients: 1,
        mtu: LinkMtus::default(),
        switch,
        // Also where only one server is left that can take what another one lost.
        memory: ByteSize(2 * asked.size.0 + SPARE_BYTES),
        redirects: Redirects::default(),
        direct_reads: true,
    };
    let mut rack = Rack::build(&site, spec, cancel.clone())?;
    rack.start_daemons(&program, READY_DEADLINE)?;
    let findings = measure(&mut rack, asked, &Means { program: &program, cancel, steps: &steps })?;
    rack.take_down()?;
    steps.end();
    print(&findings, global.json)?;
    Ok(if findings.is_good() { Exit::Ok } else { Exit::Failure })
}

/// What the experiment works with, beside the rack.
struct Means<'a> {
    program: &'a Path,
    cancel: Cancel,
    steps: &'a Steps,
}

/// A server and its times, since the load began.
struct Timed {
    server: Node,
    begun: Duration,
    drained: Duration,
    restarted: Duration,
    undrained: Duration,
    ended: Duration,
}

fn measure(rack: &mut Rack, asked: &Rolling, means: &Means<'_>) -> anyhow::Result<Findings> {
    let Joined { mut owner, workers, servers } = Joined::to(rack, asked.clients)?;
    let regions: Result<Vec<_>, _> = servers
        .iter()
        .map(|server| owner.create_at(asked.size.0, Placement::Node(*server)))
        .collect();
    let load = Load::begin(&mut owner, regions?, true)?;
    let (rolled, mut seen) = load.beside(workers, || roll(rack, asked, means, &load))?;
    let (before, times) = rolled.with_context(|| match &seen.first_failure {
        Some(failure) => format!("an operation failed before: {failure}"),
        None => "no operation failed until then".to_owned(),
    })?;
    means.steps.begin("all bytes are compared, also by a new client");
    let [mut owner, mut late] = another(rack, owner)?;
    load.check(&mut owner, &mut seen)?;
    load.check(&mut late, &mut seen)?;
    let turns = times.iter().enumerate().map(|(number, it)| {
        let between = |from: Duration, to: Duration| to.saturating_sub(from).as_secs_f64();
        Turn {
            server: it.server.to_string(),
            drain_seconds: between(it.begun, it.drained),
            restart_seconds: between(it.drained, it.restarted),
            undrain_seconds: between(it.restarted, it.undrained),
            load: seen.interval(it.begun, it.ended),
            longest_us: seen.longest(it.begun, it.ended).as_secs_f64() * 1e6,
            failures: seen.failures_in(it.begun, it.ended),
            detours: seen.detours(1 + number),
        }
    });
    Ok(Findings {
        machine: Machine::look(),
        switch: rack.state().spec.switch,
        server_count: asked.servers,
        size_bytes: asked.size.0,
        client_count: asked.clients,
        before: seen.interval(before.0, before.1),
        turns: turns.collect(),
        failures: seen.failures,
        wrong_reads: seen.wrong_reads,
        first_failure: seen.first_failure.clone(),
    })
}

/// Drains and restarts the servers one after the other; returns the time before that, and those of each server.
fn roll(
    rack: &mut Rack,
    asked: &Rolling,
    means: &Means<'_>,
    load: &Load,
) -> anyhow::Result<((Duration, Duration), Vec<Timed>)> {
    let time = Duration::from_secs(asked.seconds.into());
    means.steps.begin(&format!("work before the first drain, {} s", time.as_secs()));
    let from = load.elapsed();
    pause(time, &means.cancel)?;
    let before = (from, load.elapsed());
    let mut times = Vec::new();
    for _ in 0..asked.rounds {
        for number in 1..=asked.servers {
            let server = Node::Server(number);
            means.steps.begin(&format!("{server} is drained and restarted"));
            load.next_phase();
            let begun = load.elapsed();
            let id = drain(rack, server, &means.cancel)?;
            let drained = load.elapsed();
            let name = format!("{MEMORY_SERVER}-{server}");
            rack.stop_daemon(&name, GRACE)?;
            rack.restart_daemon(means.program, &name, &[FRESH], READY_DEADLINE)?;
            let restarted = load.elapsed();
            ask_drain(&Operator::of(rack), id, true)?;
            let undrained = load.elapsed();
            pause(time, &means.cancel)?;
            let ended = load.elapsed();
            times.push(Timed { server, begun, drained, restarted, undrained, ended });
        }
    }
    Ok((before, times))
}

fn pause(time: Duration, cancel: &Cancel) -> anyhow::Result<()> {
    let begun = Instant::now();
    while let Some(left) = time.checked_sub(begun.elapsed()) {
        cancel.check()?;
        thread::sleep(left.min(PACE));
    }
    Ok(())
}

fn ask_drain(operator: &Operator<'_>, server: NodeId, undo: bool) -> anyhow::Result<()> {
    let request = proto::DrainRequest { server: server.0.into(), space: 1, undo };
    operator.ask(|contact| operations::drain(contact, request, PATIENCE)).map(drop)
}

/// Drains a server, and waits until it serves nothing; returns its id.
fn drain(rack: &Rack, server: Node, cancel: &Cancel) -> anyhow::Result<NodeId> {
    let operator = Operator::of(rack);
    let state = operator.ask(|contact| control::controller_state(contact, false))?;
    let name = server.to_string();
    let id = state.nodes.iter().find(|node| node.name == name).map(|node| node.node);
    let id = id.with_context(|| format!("{name} is no member of the rack"))?;
    let id = NodeId(u16::try_from(id).context("the controller's ids have 16 bits")?);
    ask_drain(&operator, id, false)?;
    let (mut last, mut last_change) = (None, Instant::now());
    loop {
        cancel.check()?;
        let drains = operator.ask(|contact| operations::drains(contact, PATIENCE))?;
        let found = drains.into_iter().find(|it| it.server == u32::from(id.0));
        let now = found.with_context(|| format!("the draining of {name} has ended by itself"))?;
        if now.is_drained {
            return Ok(id);
        }
        let all = operator.ask(|contact| operations::migrations(contact, PATIENCE))?;
        let kept: u64 = all.iter().map(|one| one.kept_pages).sum();
        let shown = Some((now.open_migrations, kept, all.last().map(|one| one.id)));
        if last != shown {
            (last, last_change) = (shown, Instant::now());
        }
        if last_change.elapsed() > STANDSTILL {
            let problem = &now.problem;
            bail!("nothing of {name} has moved for {} s: {problem}", STANDSTILL.as_secs());
        }
        thread::sleep(PACE);
    }
}

const COLUMNS: [&str; 9] = [
    "server",
    "drain s",
    "restart s",
    "undrain ms",
    "operations/s",
    "p50 us",
    "p99 us",
    "longest ms",
    "failures",
];

fn print(findings: &Findings, json: bool) -> anyhow::Result<()> {
    if json {
        return output::json(findings);
    }
    output::prose(&format!(
        "{}; switch: {}; {} servers with {} MiB each are drained and restarted while {} clients use them\n",
        findings.machine,
        findings.switch.as_str(),
        findings.server_count,
        findings.size_bytes >> 20,
        findings.client_count,
    ))?;
    let of_load = |load: &Interval| {
        [
            format!("{:.0}", load.operations_per_second),
            format!("{:.1}", load.latency.p50_us),
            format!("{:.1}", load.latency.p99_us),
        ]
    };
    let mut before = vec!["before".to_owned(), String::new(), String::new(), String::new()];
    before.extend(of_load(&findings.before));
    before.extend([String::new(), String::new()]);
    let rows = findings.turns.iter().map(|turn| {
        let mut row = vec![
            turn.server.clone(),
            format!("{:.2}", turn.drain_seconds),
            format!("{:.2}", turn.restart_seconds),
            format!("{:.1}", turn.undrain_seconds * 1e3),
        ];
        row.extend(of_load(&turn.load));
        row.extend([format!("{:.1}", turn.longest_us / 1e3), turn.failures.to_string()]);
        row
    });
    output::table(&COLUMNS, std::iter::once(before).chain(rows).collect())?;
    let mut detours = Detours::default();
    findings.turns.iter().for_each(|turn| detours.add(turn.detours));
    output::prose(&format!(
        "\nof {} operations meanwhile, {} were told of a move, {} were refused by another node first, {} were sent again \
         after BUSY, and {} requests were sent again\n\
         {} operations failed; {} reads had wrong bytes",
        detours.operations,
        detours.moved,
        detours.astray,
        detours.busy,
        detours.retransmitted,
        findings.failures,
        findings.wrong_reads,
    ))?;
    if let Some(failure) = &findings.first_failure {
        output::prose(&format!("the first failure: {failure}"))?;
    }
    Ok(())
}
