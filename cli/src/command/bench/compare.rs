//! `bluebridge bench compare`: BlueBridge and other systems in one run, over the same links and the same two cores.

mod crowd;
mod latency;
mod many;
mod paced;
mod report;
mod systems;

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use bluebridge_bench::contest::{Length, Outcome, PROBE_TURN};
use bluebridge_bench::echo::{self, Sizes};
use bluebridge_bench::flood;
use bluebridge_bench::ours::Operation;
use bluebridge_bench::placement::Probe;
use bluebridge_bench::turns::Turns;
use bluebridge_rack::spec::DataPlane;
use bluebridge_rack::{Cancel, Rack};
use clap::ValueEnum;
use serde::Serialize;

use self::crowd::Crowd;
use self::many::Depth;
use self::systems::{Missing, Shown, Systems};
use super::measure::{Endpoints, FLOOD, Plan};
use super::{SERVER, serving};
use crate::command::steps::Steps;
use crate::command::{Global, interrupt};

/// Sizes of what is read and written.
const SIZES: [usize; 2] = [64, 4096];

/// The turn of contestants that have their own servers; the echoes have [`ECHO`].
const OWN: usize = 0;
const ECHO: usize = 500;

/// What is measured of each operation and size.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(super) enum Part {
    /// One operation outstanding
    Latency,
    /// 16 and 64 operations of one client outstanding
    Depth,
    /// 1,000 operations per second of one client
    Paced,
    /// 4 and 16 clients with one operation each
    Crowd,
}

/// What was measured of one operation and size.
#[derive(Debug, Serialize)]
struct Race {
    operation: Operation,
    bytes: usize,
    /// One operation outstanding; `None` if it was not asked for.
    latency: Option<Outcome>,
    /// Each contestant's p50 divided by that of BlueBridge whose client waits in the same way: the median over the rounds.
    ratios: Vec<f64>,
    /// Many operations of one client outstanding.
    many: Vec<Depth>,
    /// Few operations of one client.
    paced: Vec<paced::Row>,
    /// Many clients with one operation each.
    crowds: Vec<Crowd>,
}

/// All results.
#[derive(Debug, Serialize)]
struct Findings {
    systems: Vec<Shown>,
    missing: Vec<Missing>,
    races: Vec<Race>,
    /// The plots that were written.
    files: Vec<PathBuf>,
}

/// How much is measured.
#[derive(Clone, Debug)]
pub(super) struct Asked {
    pub(super) length: Length,
    pub(super) parts: Vec<Part>,
    pub(super) output: Option<PathBuf>,
    pub(super) switch: DataPlane,
}

/// What a measurement needs.
struct Setting<'a> {
    rack: &'a Rack,
    endpoints: &'a Endpoints,
    systems: &'a Systems,
    turns: &'a Turns,
}

/// Measures all of it in a rack with one client.
pub(super) fn run(
    rack: Rack,
    endpoints: Endpoints,
    asked: &Asked,
    cancel: &Cancel,
    global: Global,
) -> anyhow::Result<()> {
    if let Some(directory) = &asked.output {
        fs::create_dir_all(directory)
            .with_context(|| format!("cannot make {}", directory.display()))?;
    }
    let (rack, endpoints) = (Arc::new(rack), Arc::new(endpoints));
    // They end with this function, also if it is interrupted.
    let (systems, missing) = Systems::start(&rack)?;
    let systems = Arc::new(systems);
    let plans: Vec<Plan> = SIZES
        .iter()
        .flat_map(|bytes| [Operation::Read, Operation::Write].map(|operation| (operation, *bytes)))
        .map(|(operation, bytes)| Plan {
            operation,
            bytes,
            length: asked.length,
            pipelined: asked.parts != [Part::Latency],
        })
        .collect();
    let steps = Steps::new(plans.len(), global);
    let mut races = Vec::new();
    for plan in plans {
        steps.begin(&format!("{} of {} bytes", plan.operation.name(), plan.bytes));
        let (endpoints, systems) = (Arc::clone(&endpoints), Arc::clone(&systems));
        let parts = asked.parts.clone();
        let work = move |rack: &Rack| race(rack, &endpoints, &systems, plan, &parts);
        races.push(interrupt::measure(&rack, cancel, work)?);
    }
    steps.end();
    let mut findings = Findings { systems: systems.shown(), missing, races, files: Vec::new() };
    if let Some(directory) = &asked.output {
        findings.files = report::plot(directory, &findings.races)?;
    }
    report::print(&findings, asked.switch, global.json)?;
    drop((systems, endpoints));
    interrupt::take_down(rack)
}

/// One operation and size, with a serving thread for the echoes at the server's end.
fn race(
    rack: &Rack,
    endpoints: &Endpoints,
    systems: &Systems,
    plan: Plan,
    parts: &[Part],
) -> anyhow::Result<Race> {
    let (turns, probe) = (Turns::new(), Probe::default());
    let sizes = endpoints.sizes(plan);
    let socket = rack
        .enter(SERVER, || endpoints.echo_socket_of_server())?
        .context("cannot open the echo's socket")?;
    let serve =
        |turn: usize, stop: &AtomicBool| serve(turn, stop, (&turns, &probe), &socket, sizes);
    let setting = Setting { rack, endpoints, systems, turns: &turns };
    serving::beside(rack, &turns, serve, || setting.measure(plan, &probe, parts))
}

fn serve(
    turn: usize,
    stop: &AtomicBool,
    (turns, probe): (&Turns, &Probe),
    socket: &std::net::UdpSocket,
    sizes: Sizes,
) -> std::io::Result<()> {
    match turn {
        FLOOD => flood::serve(socket, sizes, stop),
        PROBE_TURN => {
            probe.answer(stop);
            Ok(())
        }
        turn if turn >= ECHO => echo::serve(socket, sizes, stop),
        // The servers of all others are processes.
        _ => {
            turns.sleep(stop);
            Ok(())
        }
    }
}

impl Setting<'_> {
    fn measure(&self, plan: Plan, probe: &Probe, parts: &[Part]) -> anyhow::Result<Race> {
        self.systems.store_values(plan.bytes)?;
        let (operation, bytes) = (plan.operation, plan.bytes);
        let mut race = Race {
            operation,
            bytes,
            latency: None,
            ratios: Vec::new(),
            many: Vec::new(),
            paced: Vec::new(),
            crowds: Vec::new(),
        };
        let has = |part| parts.contains(&part);
        if has(Part::Latency) {
            let (latency, ratios) = self.latency(plan, probe)?;
            (race.latency, race.ratios) = (Some(latency), ratios);
        }
        self.turns.give(OWN);
        if has(Part::Depth) {
            race.many = self.many(plan)?;
        }
        if has(Part::Paced) {
            race.paced = self.paced(plan)?;
        }
        if has(Part::Crowd) {
            race.crowds = self.crowds(plan)?;
        }
        Ok(race)
    }
}
