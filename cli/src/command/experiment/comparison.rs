//! The machine's own swap beside the pager: options, the guardian, and the hidden commands of its processes.

use std::io;
use std::ops::Deref;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{self, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use anyhow::Context;
use bluebridge_bench::swap::area::Area;
use bluebridge_bench::swap::cgroup::Cgroup;
use bluebridge_bench::swap::guardian::{self, Guard};
use bluebridge_bench::swap::{Kind, SwapError, machine, worker};
use clap::Args;
use rustix::process::setsid;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::exit::Exit;
use crate::output;

/// What an experiment is compared with.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Comparison with the machine's own swap")]
pub(super) struct Comparison {
    /// Also measure swap: `swap-file`, `zram`, or both; needs root, and a machine without swap. Meanwhile swap is on for
    /// the whole machine, but only the experiment's own processes are pressed into it
    #[arg(long, value_delimiter = ',', value_name = "KIND")]
    compare: Vec<Kind>,
    /// The directory of the swap file, on a file system that can hold one; the default is that of temporary files
    #[arg(long, value_name = "DIRECTORY")]
    swap_directory: Option<PathBuf>,
}

/// Room in an area beyond twice the memory. The kernel treats swap that is half full otherwise than before: it gives up
/// the copies of pages that were read.
const AREA_SPARE: u64 = 64 << 20;

impl Comparison {
    /// Checks that swap can be measured, and starts the guardian; nothing if it is not asked for.
    ///
    /// `memory_bytes` is the memory that is pressed out.
    pub(super) fn prepare(&self, memory_bytes: u64) -> anyhow::Result<Option<Held>> {
        let mut kinds = self.compare.clone();
        kinds.sort_by_key(|kind| kind.priority());
        kinds.dedup();
        if kinds.is_empty() {
            return Ok(None);
        }
        let directory = self.swap_directory.clone().unwrap_or_else(std::env::temp_dir);
        let area_bytes = memory_bytes.saturating_mul(2).saturating_add(AREA_SPARE);
        machine::check(&kinds, &directory, memory_bytes, area_bytes)?;
        // In /proc/swaps it has no symbolic links.
        let directory = directory.canonicalize();
        let directory = directory.context("cannot find the directory of the swap file")?;
        let program = std::env::current_exe().context("cannot find this program's own path")?;
        // A machine without memory cgroups is found out before anything is measured.
        Cgroup::named("bluebridge")?;
        let guard = Guard::start(hidden(&program, "swap-guardian"))?;
        let group_count = AtomicU32::new(0);
        let swap = Swap { guard, kinds, directory, area_bytes, program, group_count };
        Ok(Some(Held(Arc::new(swap))))
    }
}

fn hidden(program: &PathBuf, name: &str) -> Command {
    let mut command = Command::new(program);
    command.args(["experiment", name]);
    command
}

/// Swap for the time of an experiment.
#[derive(Debug)]
pub(super) struct Swap {
    guard: Guard,
    /// In the order of their priorities, the lowest first.
    pub(super) kinds: Vec<Kind>,
    directory: PathBuf,
    area_bytes: u64,
    program: PathBuf,
    group_count: AtomicU32,
}

impl Swap {
    /// Turns it on.
    pub(super) fn on(&self, kind: Kind) -> Result<Area, SwapError> {
        match kind {
            Kind::SwapFile => self.guard.add_file(&self.directory, self.area_bytes),
            Kind::Zram => self.guard.add_zram(self.area_bytes),
        }
    }

    pub(super) fn off(&self, area: &Area) -> Result<(), SwapError> {
        self.guard.remove_area(area)
    }

    /// A new cgroup.
    pub(super) fn group(&self) -> Result<Cgroup, SwapError> {
        let number = self.group_count.fetch_add(1, Ordering::Relaxed);
        self.guard.add_cgroup(&format!("bluebridge-{}-{number}", process::id()))
    }

    pub(super) fn remove_group(&self, group: &Cgroup) -> Result<(), SwapError> {
        self.guard.remove_cgroup(group)
    }

    /// The command of a worker.
    pub(super) fn worker(&self) -> Command {
        hidden(&self.program, "swap-worker")
    }
}

/// Turns everything off when dropped, whatever other threads are doing with it.
#[derive(Debug)]
pub(super) struct Held(Arc<Swap>);

impl Held {
    /// For the thread that measures.
    pub(super) fn share(&self) -> Arc<Swap> {
        Arc::clone(&self.0)
    }

    /// Turns everything off.
    pub(super) fn end(self) -> Result<(), SwapError> {
        self.guard.end()
    }
}

impl Deref for Held {
    type Target = Swap;

    fn deref(&self) -> &Swap {
        &self.0
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Err(error) = self.guard.end() {
            output::complain(&error.to_string());
        }
    }
}

/// The socket that a hidden command got as its standard input.
fn socket() -> anyhow::Result<UnixStream> {
    let input = io::stdin().as_fd().try_clone_to_owned().context("cannot use the socket")?;
    Ok(UnixStream::from(input))
}

/// The process that cleans up.
pub(super) fn guard() -> anyhow::Result<Exit> {
    // Ctrl-C at a terminal is for the experiment; its end is this process's sign.
    setsid().context("cannot leave the terminal's session")?;
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::<AtomicBool>::default())
            .context("cannot ignore signals")?;
    }
    // If memory becomes short, the system should end others first. It is only a hint.
    let _ = std::fs::write("/proc/self/oom_score_adj", "-900");
    let left = guardian::serve(&socket()?);
    for problem in &left {
        output::complain(problem);
    }
    Ok(if left.is_empty() { Exit::Ok } else { Exit::Failure })
}

/// The process in a cgroup.
pub(super) fn work() -> anyhow::Result<Exit> {
    worker::serve(socket()?)?;
    Ok(Exit::Ok)
}
