//! `bluebridge demo`: builds a rack, uses it, injects failures and takes it down, with explanations.

mod acts;
mod in_process;
mod in_rack;
mod latency;
mod screen;

use std::time::Instant;

use bluebridge_rack::Site;
use bluebridge_rack::namespace;
use bluebridge_rack::spec::DataPlane;
use bluebridge_switch::ebpf::EbpfSwitch;
use clap::{Args, ValueEnum};
use serde::Serialize;

use self::latency::Latency;
use self::screen::Screen;
use super::{Global, interrupt};
use crate::exit::{Exit, NotPermittedError};
use crate::output;

/// Show BlueBridge in less than a minute, and clean up afterwards.
#[derive(Debug, Args)]
pub(super) struct Demo {
    /// The mode: with root, without root, or in one process; the default is the first that this system allows
    #[arg(long, value_enum)]
    mode: Option<Mode>,
    /// The switch's data plane; the default is ebpf with root if this build has it, otherwise soft
    #[arg(long, conflicts_with = "mode")]
    switch: Option<DataPlane>,
}

/// The environment of the demo's rack.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
enum Mode {
    /// Network namespaces of the machine, and the switch in the kernel
    Root,
    /// Network namespaces in a user namespace, and the switch in a process
    Rootless,
    /// Threads of one process, without any network
    Process,
}

impl Mode {
    /// A rack in namespaces, with root if possible.
    fn in_namespaces() -> Self {
        if namespace::is_privileged() { Self::Root } else { Self::Rootless }
    }
}

/// The results of the demo, for programs. A failed check ends the demo with an error.
#[derive(Debug, Serialize)]
struct Summary {
    mode: Mode,
    switch: &'static str,
    seconds: f64,
    /// The pointer that was explained.
    pointer: String,
    /// Entries in the switch's tables.
    entry_count: usize,
    /// Sizes that one client wrote and the other read.
    transferred_bytes: Vec<usize>,
    /// The effect of an UPDATE on the switch.
    hand_over: Option<in_rack::HandOver>,
    /// The refusal of a stale pointer.
    stale_pointer: String,
    latency: Vec<Latency>,
    /// Packets that the directory's entries counted during the demo.
    directory_packets: Option<u64>,
    controller_restart: Option<ControllerRestart>,
    /// The error of a call to a stopped server.
    stopped_server: String,
    kept_memory: Option<KeptMemory>,
    /// Leftovers, by name.
    left_over: Vec<String>,
}

/// The results of reading while the controller was dead and restarted.
#[derive(Debug, Serialize)]
struct ControllerRestart {
    reads: u64,
    failed_reads: u64,
    longest_read_us: f64,
    same_nodes: bool,
}

/// A server that was killed and started again.
#[derive(Debug, Serialize)]
struct KeptMemory {
    /// Whether this machine has room to keep a server's memory beyond its process.
    is_kept: bool,
    /// From the kill until another client had read what was written before.
    until_read_ms: f64,
}

pub(super) fn run(demo: Demo, global: Global) -> anyhow::Result<Exit> {
    let began = Instant::now();
    let mut screen = Screen::new(global.json);
    screen.title("BlueBridge: shared memory whose pointers are IPv6 addresses")?;
    // A process without root cannot have the other data planes; the rack says why.
    let asked = demo.mode.or(demo.switch.map(|_| Mode::in_namespaces()));
    let (mode, mut why) = choose(asked)?;
    if let Some(switch) = demo.switch {
        why = format!("The switch is {}, as requested.", switch.as_str());
    }
    screen.say(&why)?;
    let mut summary = match mode {
        Mode::Root => in_rack::show(&Site::prepare()?, demo.switch, &mut screen)?,
        Mode::Rootless => in_rack::show(&Site::prepare_rootless()?, demo.switch, &mut screen)?,
        Mode::Process => in_process::show(&mut screen, &interrupt::watch()?)?,
    };
    summary.mode = mode;
    summary.seconds = began.elapsed().as_secs_f64();
    screen.say(&format!("\nDone in {:.1} s.", summary.seconds))?;
    if global.json {
        output::json(&summary)?;
    }
    Ok(if summary.left_over.is_empty() { Exit::Ok } else { Exit::Failure })
}

/// The mode, and the reason for it.
fn choose(asked: Option<Mode>) -> anyhow::Result<(Mode, String)> {
    let kernel = if EbpfSwitch::is_built() {
        "the switch runs in the kernel (eBPF)"
    } else {
        "the switch runs in a process: this build has no eBPF, because clang was missing"
    };
    let with_root = format!("With root: namespaces of this machine; {kernel}.");
    let without = "Without root: everything in a user namespace; the switch runs in a process.";
    match asked {
        Some(Mode::Root) if !namespace::is_privileged() => {
            let words = "--mode root needs root; --mode rootless and --mode process do not";
            Err(NotPermittedError(words).into())
        }
        Some(Mode::Root) => Ok((Mode::Root, with_root)),
        Some(Mode::Rootless) => Ok((Mode::Rootless, without.to_owned())),
        Some(Mode::Process) => Ok((Mode::Process, "In one process, as requested.".to_owned())),
        None if namespace::is_privileged() => Ok((Mode::Root, with_root)),
        None => match namespace::probe() {
            Ok(()) => Ok((Mode::Rootless, without.to_owned())),
            Err(error) => Ok((Mode::Process, format!("In one process: {error}."))),
        },
    }
}
