//! `bluebridge run`: an unmodified program with remote memory.
//!
//! This process is the endpoint. It waits for the program and everything that it started, and frees the remote memory
//! that they leave.

mod summary;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use bluebridge::{Client, DeleteRequest, Error, Region, Status};
use bluebridge_rack::spec::ByteSize;
use bluebridge_run::{Ledger, Reaper, Record, Settings, VARIABLE};
use clap::Args;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, set_child_subreaper, wait};
use signal_hook::consts::{SIGCHLD, SIGINT, SIGQUIT};
use signal_hook::{flag, low_level::pipe};

use super::Global;
use super::member::{Deadline, Member, Session};
use crate::exit::{ExecError, Exit, UsageError};
use crate::output;

/// The library's file name.
const LIBRARY: &str = "libbluebridge_preload.so";
/// How often it looks for processes that have ended without telling this one.
const LOOK: Duration = Duration::from_millis(250);
/// How long freeing what is left may take at the end, if a server does not respond.
const FREEING: Duration = Duration::from_secs(5);
/// How long one try may take; meanwhile no signal is passed on.
const FREEING_TRY: Duration = Duration::from_secs(1);
/// Allocations that are freed at once.
const BATCH: usize = 256;

/// Run an unmodified program whose heap and large mappings are remote memory.
///
/// The program's exit status is this command's. A summary follows on standard error. Each process of the program has its
/// own local memory; the command ends when all of them have ended.
#[derive(Debug, Args)]
pub(super) struct Run {
    /// How much of a process's remote memory is local
    #[arg(long, value_name = "SIZE", default_value = "256M")]
    local: ByteSize,
    /// The memory servers to use, by name or id; the default is all
    #[arg(long, value_name = "NODE", value_delimiter = ',')]
    remote: Vec<String>,
    /// How much remote memory a process can have
    #[arg(long, value_name = "SIZE", default_value = "64G")]
    size: ByteSize,
    /// Anonymous mappings of at least this size are remote
    #[arg(long, value_name = "SIZE", default_value = "1M")]
    mappings: ByteSize,
    /// Threads of a process that resolve page faults
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    handlers: u16,
    /// How long a page fault may take, such as 500ms or 10s
    #[arg(long, value_name = "TIME", default_value = "10s")]
    fault_deadline: Deadline,
    /// After that time, wait on, instead of ending the program by SIGBUS
    #[arg(long)]
    wait: bool,
    /// Print no summary
    #[arg(long)]
    quiet: bool,
    /// The library to preload; the default is the one beside this program
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,
    #[command(flatten)]
    member: Member,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// The library is not where it should be.
#[derive(Debug, thiserror::Error)]
#[error(
    "the library {LIBRARY} is missing: looked for {tried}; build it with `cargo build -p bluebridge-preload`, or name \
     it with --library"
)]
struct LibraryMissing {
    tried: String,
}

pub(super) fn run(asked: Run, global: Global) -> anyhow::Result<Exit> {
    let library = asked.library()?;
    let began = Instant::now();
    let mut session = asked.member.join_as_owner(None)?;
    let ledger = match asked.settings(&session).and_then(|settings| Ok(Ledger::create(&settings)?))
    {
        Ok(ledger) => ledger,
        Err(error) => {
            session.leave();
            return Err(error);
        }
    };
    let mut reaper = Reaper::default();
    let ended = supervise(&asked.program, &library, &ledger, &mut reaper, &mut session);
    let left = free_all(&ledger, &mut reaper, &mut session);
    session.leave();
    let status = ended?;
    if !asked.quiet {
        summary::print(&reaper, began.elapsed(), left, global.json)?;
    }
    if reaper.reports().next().is_none() {
        output::complain(
            "the program did not load the library, so its memory was local; is it linked statically, or set-user-ID?",
        );
    }
    // The program's own status, which may be any.
    std::process::exit(status)
}

impl Run {
    fn library(&self) -> anyhow::Result<PathBuf> {
        if let Some(path) = &self.library {
            let absolute = path.canonicalize();
            return absolute
                .map_err(|_| LibraryMissing { tried: path.display().to_string() }.into());
        }
        let own = std::env::current_exe().context("cannot find this program's own path")?;
        let folder = own.parent().map(PathBuf::from).unwrap_or_default();
        let places = [
            folder.join(LIBRARY),
            folder.join("deps").join(LIBRARY),
            folder.join("../lib/bluebridge").join(LIBRARY),
        ];
        match places.iter().find(|path| path.exists()) {
            Some(path) => Ok(path.clone()),
            None => {
                let tried: Vec<_> = places.iter().map(|path| path.display().to_string()).collect();
                Err(LibraryMissing { tried: tried.join(", ") }.into())
            }
        }
    }

    fn settings(&self, session: &Session) -> anyhow::Result<Settings> {
        if self.local.0 < 1 << 20 || self.local.0 > self.size.0 / 2 {
            let words =
                format!("--local must be at least 1M, and at most half of --size ({})", self.size);
            return Err(UsageError(words).into());
        }
        if !(1 << 28..=1 << 42).contains(&self.size.0) {
            return Err(UsageError("--size must be 256M to 4T".to_owned()).into());
        }
        let wanted: Vec<_> =
            self.remote.iter().map(|name| session.node(name)).collect::<Result<_, _>>()?;
        let (config, carrier) = session.client.further_client().context("the client has joined")?;
        let nodes = config.memory_nodes.iter();
        let nodes: Vec<_> = nodes
            .filter(|node| wanted.is_empty() || wanted.contains(&node.node))
            .map(|node| (node.node.0, node.shard_count))
            .collect();
        if nodes.is_empty() {
            let words =
                "the space has no memory server; start one, for example with `rack up --servers 1`";
            return Err(UsageError(words.to_owned()).into());
        }
        Ok(Settings {
            space: config.space.0,
            node: config.node.0,
            incarnation: config.incarnation,
            piece_bytes: config.piece_bytes.unwrap_or(0),
            nodes,
            interface: carrier.device.unwrap_or_default(),
            local_bytes: self.local.0,
            reserved_bytes: self.size.0,
            mapping_bytes: self.mappings.0.max(1),
            handlers: self.handlers.into(),
            deadline_ms: u64::try_from(self.fault_deadline.0.as_millis()).unwrap_or(u64::MAX),
            waits: self.wait,
        })
    }
}

/// The signals that this process gets for the program.
struct Signals {
    /// Becomes readable at each of them, and when a child ends.
    wake: UnixStream,
    passed: [(Signal, Arc<AtomicBool>); 4],
}

impl Signals {
    fn catch() -> io::Result<Self> {
        let (wake, sender) = UnixStream::pair()?;
        wake.set_read_timeout(Some(LOOK))?;
        let passed = [Signal::TERM, Signal::HUP, Signal::USR1, Signal::USR2]
            .map(|signal| (signal, Arc::<AtomicBool>::default()));
        let ignored = ignored_signals();
        for (signal, flag) in &passed {
            // `nohup` and shells start programs with some signals ignored, which must stay so for the program.
            if ignored >> (signal.as_raw() - 1) & 1 == 0 {
                flag::register(signal.as_raw(), Arc::clone(flag))?;
                pipe::register(signal.as_raw(), sender.try_clone()?)?;
            }
        }
        // A terminal sends these to the program too, which decides; this process must stay to free the memory.
        for signal in [SIGINT, SIGQUIT] {
            if ignored >> (signal - 1) & 1 == 0 {
                flag::register(signal, Arc::default())?;
            }
        }
        pipe::register(SIGCHLD, sender)?;
        Ok(Self { wake, passed })
    }

    /// Passes on what was sent to this process, and waits a little for something to happen. After the program's end, its
    /// processes in the background get the signals.
    fn pass_on(&mut self, program: Option<Pid>, ledger: &Ledger) {
        for (signal, flag) in &self.passed {
            if !flag.swap(false, Ordering::Relaxed) {
                continue;
            }
            let others = || {
                let ids = ledger.process_ids().into_iter();
                ids.filter_map(|id| Pid::from_raw(i32::try_from(id).ok()?)).collect()
            };
            let receivers: Vec<_> = program.map_or_else(others, |program| vec![program]);
            for receiver in receivers {
                // One that has ended does not need it.
                let _ = kill_process(receiver, *signal);
            }
        }
        let _ = self.wake.read(&mut [0; 64]);
    }
}

/// The signals that this process ignores, as a set: bit 0 is signal 1.
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    line.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or(0)
}

/// Runs the program until it and all that it started have ended; returns its exit status as a shell does.
fn supervise(
    program: &[OsString],
    library: &std::path::Path,
    ledger: &Ledger,
    reaper: &mut Reaper,
    session: &mut Session,
) -> anyhow::Result<i32> {
    let mut signals = Signals::catch().context("cannot catch signals")?;
    // Processes whose parent has ended become this one's children.
    set_child_subreaper(Some(rustix::process::getpid())).context("cannot adopt processes")?;
    session.client.set_deadline(FREEING_TRY);
    // Those of a shell that was replaced by this process are not the program's.
    let strangers = children().unwrap_or_default();
    let mut words = program.iter();
    let name = words.next().context("a program is required")?;
    let mut preload = library.as_os_str().to_owned();
    if let Some(others) = std::env::var_os("LD_PRELOAD") {
        preload.push(":");
        preload.push(others);
    }
    let child = Command::new(name)
        .args(words)
        .env("LD_PRELOAD", preload)
        .env(VARIABLE, ledger.path())
        .spawn()
        .map_err(|source| ExecError { program: name.to_string_lossy().into_owned(), source })?;
    let program = i32::try_from(child.id()).ok().and_then(Pid::from_raw).context("a process id")?;
    let mut status = 0;
    let mut running = Some(program);
    let mut looked = Instant::now();
    loop {
        match wait(WaitOptions::NOHANG) {
            Ok(Some((pid, ended))) => {
                if pid == program {
                    running = None;
                    status = ended
                        .exit_status()
                        .or_else(|| ended.terminating_signal().map(|signal| 128 + signal))
                        .unwrap_or(status);
                }
                continue;
            }
            Err(Errno::CHILD) => return Ok(status),
            Ok(None) if running.is_none() && only_left(&strangers) => return Ok(status),
            Ok(None) | Err(_) => signals.pass_on(running, ledger),
        }
        if looked.elapsed() >= LOOK {
            looked = Instant::now();
            // What cannot be freed now is tried again.
            let left = reaper.collect(ledger);
            let _ = free(ledger, left, &mut session.client);
        }
    }
}

/// This process's children; `None` if the system does not say (Linux without `CONFIG_PROC_CHILDREN`).
fn children() -> Option<BTreeSet<u32>> {
    let mut children = BTreeSet::new();
    for task in std::fs::read_dir("/proc/self/task").ok()? {
        let list = std::fs::read_to_string(task.ok()?.path().join("children"));
        match list {
            Ok(list) => {
                children.extend(list.split_whitespace().filter_map(|id| id.parse::<u32>().ok()))
            }
            // The thread has ended.
            Err(error) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => {}
            Err(_) => return None,
        }
    }
    Some(children)
}

/// Whether this process has no other children.
fn only_left(strangers: &BTreeSet<u32>) -> bool {
    !strangers.is_empty() && children().is_some_and(|left| left.is_subset(strangers))
}

/// Frees what processes left; returns how much could not be freed.
fn free<T: bluebridge::Transport>(
    ledger: &Ledger,
    left: Vec<(Record, Option<Region>)>,
    client: &mut Client<T>,
) -> usize {
    let mut failures = 0;
    for left in left.chunks(BATCH) {
        let regions = left.iter().filter_map(|(_, region)| *region);
        let mut requests: Vec<_> = regions.map(DeleteRequest::new).collect();
        let sent = client.delete_many(&mut requests);
        let mut results = requests.into_iter().map(|request| request.result);
        for (record, region) in left {
            let is_freed = match region.and_then(|_| results.next()) {
                None => true,
                Some(result) => sent.is_ok() && is_gone(&result),
            };
            if is_freed {
                ledger.erase(*record);
            } else {
                failures += 1;
            }
        }
        if failures > 0 {
            break;
        }
    }
    failures
}

/// Whether an allocation does not exist any more.
fn is_gone(result: &Result<(), Error>) -> bool {
    match result {
        Ok(()) => true,
        Err(Error::Refused { status, .. }) => {
            matches!(status, Status::StaleGeneration | Status::StaleTag | Status::NotAllocated)
        }
        Err(_) => false,
    }
}

/// Frees everything at the end, when no process is left; returns how many allocations are left.
fn free_all(ledger: &Ledger, reaper: &mut Reaper, session: &mut Session) -> usize {
    let until = Instant::now() + FREEING;
    loop {
        let failures = free(ledger, reaper.collect_all(ledger), &mut session.client);
        // Again: a slot is given back when its memory is gone.
        if failures == 0 && reaper.collect_all(ledger).is_empty() || Instant::now() > until {
            return failures;
        }
        if failures > 0 {
            std::thread::sleep(LOOK);
        }
    }
}
