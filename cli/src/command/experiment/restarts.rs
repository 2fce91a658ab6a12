//! A memory server that is killed again and again under load, and goes on with its memory.

use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use bluebridge::{Client, NodeId, Placement, Region};
use bluebridge_bench::summary::{Samples, Summary};
use bluebridge_bench::survival::{Survivor, Tally};
use bluebridge_rack::daemon::{MEMORY_SERVER, READY_DEADLINE};
use bluebridge_rack::spec::{ByteSize, DataPlane, LinkMtus, Node, RackName, RackSpec, Redirects};
use bluebridge_rack::{Cancel, Rack, Site};
use bluebridge_transport::udp::UdpTransport;
use clap::Args;
use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;

use super::super::bench::machine::Machine;
use super::super::member::Deadline;
use super::super::steps::Steps;
use super::super::{Global, interrupt};
use super::in_rack::Joined;
use crate::exit::Exit;
use crate::output;

const SERVER: Node = Node::Server(1);

/// How long an operation may take: longer than any restart.
const DEADLINE: Duration = Duration::from_secs(30);

/// How long the clients work between two kills at least.
const LEAST_PAUSE: Duration = Duration::from_millis(20);

/// The options of the experiment.
#[derive(Debug, Args)]
pub(in crate::command) struct Restarts {
    /// How often the memory server is killed
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    kills: u32,
    /// Clients that work meanwhile
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    clients: u16,
    /// The memory of the server
    #[arg(long, default_value = "256M")]
    memory: ByteSize,
    /// How long the clients work between two kills, at most
    #[arg(long, value_name = "TIME", default_value = "120ms", value_parser = parse_pause)]
    pause: Deadline,
    /// The switch's data plane; the default is ebpf with root if this build has it, otherwise soft
    #[arg(long)]
    switch: Option<DataPlane>,
}

fn parse_pause(text: &str) -> Result<Deadline, String> {
    let pause: Deadline = text.parse()?;
    match pause.0 < LEAST_PAUSE {
        true => Err(format!("the shortest pause is {} ms", LEAST_PAUSE.as_millis())),
        false => Ok(pause),
    }
}

/// What the experiment found.
#[derive(Debug, Serialize)]
struct Findings {
    machine: Machine,
    switch: DataPlane,
    memory_bytes: u64,
    kills: u32,
    /// From the kill until a WRITE that was sent after it was acknowledged; the supervisor starts the next process at
    /// once.
    until_writes_work: Summary,
    /// What all clients saw together.
    clients: Tally,
}

impl Findings {
    fn is_good(&self) -> bool {
        self.clients.failures == 0 && self.clients.wrong_reads == 0
    }
}

pub(super) fn run(asked: &Restarts, global: Global) -> anyhow::Result<Exit> {
    let site = Site::prepare()?;
    let cancel = interrupt::watch().context("cannot watch for signals")?;
    let steps = Steps::new(2, global);
    steps.begin("a rack of one server and one client");
    let switch = asked.switch.unwrap_or(site.data_plane());
    let spec = RackSpec {
        name: format!("restarts{}", process::id()).parse::<RackName>()?,
        servers: 1,
        clients: 1,
        mtu: LinkMtus::default(),
        switch,
        memory: asked.memory,
        redirects: Redirects::default(),
        direct_reads: true,
    };
    let program = std::env::current_exe().context("cannot find this program's own path")?;
    let mut rack = Rack::build(&site, spec, cancel.clone())?;
    rack.start_daemons(&program, READY_DEADLINE)?;
    steps.begin(&format!("the server is killed {} times", asked.kills));
    let (clients, until_writes_work) = kill_often(&mut rack, &program, asked, &cancel)?;
    rack.take_down()?;
    steps.end();
    let findings = Findings {
        machine: Machine::look(),
        switch,
        memory_bytes: asked.memory.0,
        kills: asked.kills,
        until_writes_work,
        clients,
    };
    print(&findings, global.json)?;
    Ok(if findings.is_good() { Exit::Ok } else { Exit::Failure })
}

/// A client that writes whenever the server was killed.
struct Probe {
    client: Client<UdpTransport>,
    page: Region,
    tally: Tally,
}

impl Probe {
    fn new(mut client: Client<UdpTransport>, server: NodeId) -> anyhow::Result<Self> {
        let page = client.create_at(8, Placement::Node(server))?;
        Ok(Self { client, page, tally: Tally::default() })
    }

    /// Reports for each kill how long it took until a WRITE was acknowledged that was sent after it.
    fn run(
        mut self,
        kills: &Receiver<Instant>,
        reports: &SyncSender<Result<Duration, bluebridge::Error>>,
    ) -> Tally {
        for (number, killed) in (0_u64..).zip(kills) {
            // The other core may need a moment to notice the signal.
            thread::sleep(Duration::from_millis(1));
            if reports.send(self.write(number, killed)).is_err() {
                break;
            }
        }
        self.tally
    }

    fn write(&mut self, number: u64, killed: Instant) -> Result<Duration, bluebridge::Error> {
        // Sent in the first moments of the process, it may not be known which came first.
        while let Err(error) = self.client.write(self.page.base(), &number.to_le_bytes()) {
            if killed.elapsed() > DEADLINE || !error.is_outcome_unknown() {
                return Err(error);
            }
            self.tally.unknown += 1;
        }
        Ok(killed.elapsed())
    }
}

fn kill_often(
    rack: &mut Rack,
    program: &std::path::Path,
    asked: &Restarts,
    cancel: &Cancel,
) -> anyhow::Result<(Tally, Summary)> {
    let Joined { owner: mut probe, workers, servers } = Joined::to(rack, asked.clients)?;
    let server = *servers.first().context("the rack has no memory server")?;
    probe.set_deadline(DEADLINE);
    let probe = Probe::new(probe, server)?;
    let survivors: Vec<_> = (0..)
        .zip(workers)
        .map(|(seed, client)| Survivor::new(client, server, seed, DEADLINE))
        .collect::<Result<_, _>>()?;
    let stop = AtomicBool::new(false);
    let mut samples = Samples::default();
    let (killed, kills) = sync_channel(1);
    let (report, reports) = sync_channel(1);
    thread::scope(|scope| {
        let stop = &stop;
        let running: Vec<_> =
            survivors.into_iter().map(|one| scope.spawn(move || one.run(stop))).collect();
        let probing = scope.spawn(move || probe.run(&kills, &report));
        let mut kill_all = || -> anyhow::Result<()> {
            for number in 0..asked.kills {
                cancel.check()?;
                let spread = asked.pause.0.saturating_sub(LEAST_PAUSE);
                // Spread over the interval, so that the kills hit everything that the server does.
                thread::sleep(LEAST_PAUSE + spread * (number * 37 % 100) / 100);
                let name = format!("{MEMORY_SERVER}-{SERVER}");
                let pid = rack.running_pid(&name).context("the server does not run")?;
                let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
                kill_process(pid.context("not a process")?, Signal::KILL)?;
                killed.send(Instant::now()).context("the probing client ended")?;
                // Waits for its end, as a supervisor does.
                rack.kill_daemon(&name)?;
                rack.restart_daemon(program, &name, &[], READY_DEADLINE)?;
                samples.add(reports.recv().context("the probing client ended")??);
            }
            Ok(())
        };
        let outcome = kill_all();
        drop(killed);
        stop.store(true, Ordering::Release);
        let mut tally = probing.join().map_err(|_| anyhow!("the probing client panicked"))?;
        for one in running {
            tally.add(one.join().map_err(|_| anyhow!("a client's thread panicked"))?);
        }
        outcome.map(|()| (tally, samples.summary()))
    })
}

fn print(findings: &Findings, json: bool) -> anyhow::Result<()> {
    if json {
        return output::json(findings);
    }
    let Findings { machine, switch, memory_bytes, kills, until_writes_work, clients } = findings;
    let millis = |micros: f64| micros / 1e3;
    output::prose(&format!(
        "{machine}; switch: {}; a memory server of {} MiB, killed {kills} times\n",
        switch.as_str(),
        memory_bytes >> 20,
    ))?;
    output::table(
        &["until writes work", "p50 ms", "p95 ms", "p99 ms"],
        vec![vec![
            String::new(),
            format!("{:.1}", millis(until_writes_work.p50_us)),
            format!("{:.1}", millis(until_writes_work.p95_us)),
            format!("{:.1}", millis(until_writes_work.p99_us)),
        ]],
    )?;
    output::prose(&format!(
        "{} operations were acknowledged; of {} it is not known whether they were done, and {} updates lost their \
         lease; {} failed otherwise; {} reads had wrong bytes",
        clients.operations,
        clients.unknown,
        clients.lost_leases,
        clients.failures,
        clients.wrong_reads
    ))?;
    if let Some(failure) = &clients.first_failure {
        output::prose(&format!("the first failure: {failure}"))?;
    }
    Ok(())
}
