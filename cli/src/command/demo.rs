//! `bluebridge demo`: a rack built, used, hurt and taken down, with a few words on each step.

mod acts;
mod in_process;
mod in_rack;
mod latency;
mod screen;

use std::time::Instant;

use bluebridge_rack::Site;
use bluebridge_rack::namespace;
use bluebridge_switch::ebpf::EbpfSwitch;
use clap::{Args, ValueEnum};
use serde::Serialize;

use self::latency::Latency;
use self::screen::Screen;
use super::{Global, interrupt};
use crate::exit::{Exit, NotPermittedError};
use crate::output;

/// Show what BlueBridge is, in less than a minute, and leave nothing behind.
#[derive(Debug, Args)]
pub(super) struct Demo {
    /// How: with root, without, or in one process; the first that this system allows without it
    #[arg(long, value_enum)]
    mode: Option<Mode>,
}

/// What the rack is made of.
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

/// What the demo found, for programs. Whatever did not hold ended it with an error.
#[derive(Debug, Serialize)]
struct Summary {
    mode: Mode,
    switch: &'static str,
    seconds: f64,
    /// The pointer that was taken apart.
    pointer: String,
    /// Entries in the switch's tables.
    entry_count: usize,
    /// Sizes that were written by one client and read by the other.
    transferred_bytes: Vec<usize>,
    /// What an UPDATE did to the switch.
    hand_over: Option<in_rack::HandOver>,
    /// What a stale pointer is answered.
    stale_pointer: String,
    latency: Vec<Latency>,
    /// Packets that the directory's entries counted meanwhile.
    directory_packets: Option<u64>,
    controller_restart: Option<ControllerRestart>,
    /// What a client is told when a server is gone.
    stopped_server: String,
    /// What was left behind, by name.
    left_over: Vec<String>,
}

/// Reading while the controller was dead and came back.
#[derive(Debug, Serialize)]
struct ControllerRestart {
    reads: u64,
    failed_reads: u64,
    longest_read_us: f64,
    same_nodes: bool,
}

pub(super) fn run(demo: Demo, global: Global) -> anyhow::Result<Exit> {
    let began = Instant::now();
    let mut screen = Screen::new(global.json);
    screen.title("BlueBridge: shared memory whose pointers are IPv6 addresses")?;
    let (mode, why) = choose(demo.mode)?;
    screen.say(&why)?;
    let mut summary = match mode {
        Mode::Root => in_rack::show(&Site::prepare()?, &mut screen)?,
        Mode::Rootless => in_rack::show(&Site::prepare_rootless()?, &mut screen)?,
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

/// The mode, and why it is that one.
fn choose(asked: Option<Mode>) -> anyhow::Result<(Mode, String)> {
    let kernel = if EbpfSwitch::is_built() {
        "the switch runs in the kernel (eBPF)"
    } else {
        "the switch runs in a process: this build has no eBPF, because clang was not there"
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
        Some(Mode::Process) => Ok((Mode::Process, "In one process, as asked.".to_owned())),
        None if namespace::is_privileged() => Ok((Mode::Root, with_root)),
        None => match namespace::probe() {
            Ok(()) => Ok((Mode::Rootless, without.to_owned())),
            Err(error) => Ok((Mode::Process, format!("In one process: {error}."))),
        },
    }
}
