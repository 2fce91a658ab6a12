//! The daemons of a rack: their arguments, their order, and when they count as started.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::str::FromStr;
use std::time::{Duration, Instant};

use crate::access::rack_environment;
use crate::arena::{self, Loss};
use crate::error::failed;
use crate::layout::{CONTROLLER_INTERFACE, ENDPOINT_INTERFACE, Layout, OPENFLOW, P4RUNTIME};
use crate::process::{self, ProcessRecord, Stopped, stop_all};
use crate::readiness::{self, KeptMemory, Patience, Readiness, ReadySocket};
use crate::spec::{DataPlane, Node, RackName, RackSpec};
use crate::state::{
    DaemonRecord, LOG_FORMAT_VARIABLE, LOG_VARIABLE, RackState, SOCKET_PATH_MAX, StateError,
};
use crate::{DaemonFailure, Rack, RackError};

/// How long a daemon may take until it reports that it is ready or makes progress.
pub const READY_DEADLINE: Duration = Duration::from_secs(15);

/// The minimum rate at which a machine provides memory to the servers of a rack: servers that report
/// progress may take as long as this needs.
const SLOWEST_BYTES_PER_SECOND: u64 = 64 << 20;

/// How much of a failed daemon's log is shown.
const LOG_TAIL_BYTES: u64 = 4096;

/// P4Runtime's number for the rack's one switch.
pub const DEVICE_ID: u64 = 1;

/// The subcommand of the switch's agent.
pub const SWITCH: &str = "switch";
/// The subcommand of the controller.
pub const CONTROLLER: &str = "controller";
const ARENA_FILE: &str = "--arena-file";
const NO_ARENA_FILE: &str = "none";

/// Makes a memory server drop what its memory holds.
pub const FRESH: &str = "--fresh";

/// The environment variable with the command that starts a daemon again, with empty memory, for what the daemon says to
/// the rack's user.
pub const RESTART_VARIABLE: &str = "BLUEBRIDGE_RESTART";

/// The subcommand of a memory server.
pub const MEMORY_SERVER: &str = "memserver";
/// The daemon that keeps the interfaces of all nodes set up ([`crate::hosts`]).
pub const HOSTS: &str = "hosts";

/// A daemon of a rack, by its name on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The controller.
    Controller,
    /// The daemon that watches the interfaces of all nodes.
    Hosts,
    /// A memory server, from 1.
    Server(u16),
    /// The switch's agent; without eBPF the switch itself.
    Switch,
}

impl Part {
    /// The daemon's name in the rack's record.
    pub fn daemon(self) -> String {
        match self {
            Self::Controller => CONTROLLER.to_owned(),
            Self::Hosts => HOSTS.to_owned(),
            Self::Server(_) => format!("{MEMORY_SERVER}-{self}"),
            Self::Switch => SWITCH.to_owned(),
        }
    }

    /// The command that starts it again, for a rack of any name.
    pub fn restart(self, rack: &RackName) -> String {
        format!("bluebridge rack restart {self} --rack {rack}")
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Controller => f.pad(CONTROLLER),
            Self::Hosts => f.pad(HOSTS),
            Self::Server(number) => Node::Server(*number).fmt(f),
            Self::Switch => f.pad(SWITCH),
        }
    }
}

impl FromStr for Part {
    type Err = String;

    /// The daemon's own name and the node's name are both valid.
    fn from_str(text: &str) -> Result<Self, String> {
        let node = text.strip_prefix(MEMORY_SERVER).and_then(|rest| rest.strip_prefix('-'));
        match (text, node.unwrap_or(text).parse()) {
            (CONTROLLER, _) => Ok(Self::Controller),
            (HOSTS, _) => Ok(Self::Hosts),
            (SWITCH, _) => Ok(Self::Switch),
            (_, Ok(Node::Server(number))) => Ok(Self::Server(number)),
            _ => Err(format!("{text:?} is not a daemon: switch, controller, hosts, or s1, s2, ..")),
        }
    }
}

/// A daemon that is starting.
struct Starting {
    index: usize,
    child: Child,
    ready: ReadySocket,
    /// The former length of its log, in bytes: the output of earlier runs is not about this one.
    log_begin: u64,
}

/// All daemons of a rack, in the order of starting; daemons of the same stage start together.
pub fn stages(state: &RackState, layout: &Layout, directory: &Path) -> Vec<Vec<DaemonRecord>> {
    let record = |name: String, node, arguments| {
        let log = directory.join("logs").join(format!("{name}.log"));
        let arena_ids = Vec::new();
        DaemonRecord {
            name,
            node,
            arguments,
            log,
            process: None,
            ready: false,
            kept_memory: None,
            arena_ids,
        }
    };
    let servers = state.spec.endpoints().filter(|node| matches!(node, Node::Server(_)));
    let hosts = words(&["rack", "watch", "--rack", state.spec.name.as_str()]);
    vec![
        vec![record(SWITCH.to_owned(), Node::Switch, switch_arguments(state, layout, directory))],
        vec![record(
            CONTROLLER.to_owned(),
            Node::Switch,
            controller_arguments(state, layout, directory),
        )],
        servers
            .filter_map(|node| {
                let port = layout.port_of(node)?;
                let arena = arena::file(directory, node).display().to_string();
                let direct_reads = if state.spec.direct_reads { "auto" } else { "off" };
                let arguments = words(&[
                    MEMORY_SERVER,
                    "--name",
                    &node.to_string(),
                    "--interface",
                    ENDPOINT_INTERFACE,
                    "--switch-port",
                    &port.number.to_string(),
                    "--controller",
                    &layout.controller().to_string(),
                    "--memory",
                    &state.spec.memory.to_string(),
                    "--direct-reads",
                    direct_reads,
                    ARENA_FILE,
                    &arena,
                    "--kept-memory",
                    "auto",
                ]);
                Some(record(format!("{MEMORY_SERVER}-{node}"), node, arguments))
            })
            .chain([record(HOSTS.to_owned(), Node::Switch, hosts)])
            .collect(),
    ]
}

fn is_memory_server(daemon: &DaemonRecord) -> bool {
    daemon.arguments.first().is_some_and(|word| word == MEMORY_SERVER)
}

impl DaemonRecord {
    /// Whether the next process of a memory server may go on with its memory.
    pub fn may_keep_memory(&self, state: &RackState) -> bool {
        let is_there = arena_of(self).is_some() && self.loss(state, "").is_none();
        is_there && self.kept_memory.as_ref().is_none_or(|kept| kept.is_kept)
    }

    /// Why the next process of a memory server cannot go on with the memory in its file; `None` if it seems that it can,
    /// or has no file. `restart` is the command that begins with empty memory.
    pub(crate) fn loss(&self, state: &RackState, restart: &str) -> Option<Loss> {
        let file = Path::new(arena_of(self)?);
        match arena::owner_of_contents(state, self) {
            // To begin empty would drop the other server's memory.
            Some(owner) => Some(Loss {
                words: format!(
                    "its file {} is that of {}; {}",
                    file.display(),
                    owner.node,
                    arena::remedy_of_other(state, self, owner)
                ),
                is_recoverable: true,
            }),
            None => arena::loss(file, arena::last_id(self), restart),
        }
    }

    /// What a memory server reported of its memory when it was ready. If it could not use its file then, and could now,
    /// that is said: its memory ends with it nevertheless. `restart` is the command that begins with empty memory.
    pub(crate) fn reported_memory(&self, restart: &str) -> Option<KeptMemory> {
        let kept = self.kept_memory.clone()?;
        let reason = kept.reason.as_deref().filter(|_| !kept.is_kept);
        let mended = reason.zip(arena_of(self)).and_then(|(reason, file)| {
            let (cause, _) = reason.split_once("; ").unwrap_or((reason, ""));
            arena::is_mended(Path::new(file), cause).then_some(cause)
        });
        let words = mended.map(|cause| {
            format!(
                "when it started, {cause}, which is no longer so; `{restart}` gives it new, empty memory that outlives it"
            )
        });
        Some(words.map_or(kept, KeptMemory::lost))
    }
}

/// The file in which a memory server keeps its memory, as recorded.
pub(crate) fn arena_of(daemon: &DaemonRecord) -> Option<&str> {
    let mut arguments = daemon.arguments.iter().map(String::as_str);
    arguments.find(|word| *word == ARENA_FILE)?;
    arguments.next().filter(|file| *file != NO_ARENA_FILE)
}

fn ready_socket(directory: &Path, daemon: &str) -> PathBuf {
    directory.join(format!("{daemon}.ready"))
}

/// Checks, before anything is built, that the daemons of a rack in this directory can report that they are ready.
pub(crate) fn check_sockets(spec: &RackSpec, directory: &Path) -> Result<(), StateError> {
    let last = Part::Server(spec.servers.max(1)).daemon();
    let longest = [CONTROLLER, &last].map(|daemon| ready_socket(directory, daemon));
    match longest.into_iter().find(|path| path.as_os_str().len() > SOCKET_PATH_MAX) {
        Some(path) => Err(StateError::TooLong { path }),
        None => Ok(()),
    }
}

/// The switch's address, as the controller's option takes it.
fn switch_address(switch: DataPlane) -> String {
    match switch {
        DataPlane::Bmv2 | DataPlane::Ebpf | DataPlane::Soft => P4RUNTIME.to_string(),
        DataPlane::Ovs => format!("openflow://{OPENFLOW}"),
    }
}

fn controller_arguments(state: &RackState, layout: &Layout, directory: &Path) -> Vec<String> {
    let own_port = layout.port_of(Node::Switch).map_or(0, |port| port.number);
    let mut arguments = words(&[
        CONTROLLER,
        "--listen",
        &layout.controller().to_string(),
        "--switch",
        &switch_address(state.spec.switch),
        "--device-id",
        &DEVICE_ID.to_string(),
        "--store",
        &directory.join("controller.redb").display().to_string(),
        "--redirects",
        state.spec.redirects.as_str(),
        "--interface",
        CONTROLLER_INTERFACE,
        "--switch-port",
        &own_port.to_string(),
    ]);
    if state.spec.switch == DataPlane::Bmv2 {
        // It lists no ports, and before anyone has joined, every port must be flooded.
        let ports: Vec<_> = layout.ports().iter().map(|port| port.number.to_string()).collect();
        arguments.extend(words(&["--target", "bmv2", "--ports", &ports.join(",")]));
    }
    arguments
}

fn switch_arguments(state: &RackState, layout: &Layout, directory: &Path) -> Vec<String> {
    let switch = state.spec.switch;
    let mut arguments = words(&[SWITCH, "--data-plane", switch.as_str(), "--listen"]);
    match switch {
        DataPlane::Bmv2 | DataPlane::Ebpf | DataPlane::Soft => {
            arguments.extend(words(&[
                &P4RUNTIME.to_string(),
                "--device-id",
                &DEVICE_ID.to_string(),
            ]));
        }
        DataPlane::Ovs => {
            let own = directory.join("ovs").display().to_string();
            arguments.extend(words(&[&OPENFLOW.to_string(), "--ovs-directory", &own]));
        }
    }
    for port in layout.ports() {
        arguments.extend(words(&["--port", &format!("{}={}", port.number, port.interface)]));
    }
    if let Some(directory) = &state.bpf_directory {
        arguments.extend(words(&["--bpf-directory", &directory.display().to_string()]));
    }
    arguments
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

impl Rack {
    /// Starts the switch, the controller and the memory servers, and waits until each is ready.
    ///
    /// `program` is the `bluebridge` binary. Each daemon gets at most `deadline` from its start, or from
    /// its last progress report; reports are accepted for as long as the memory of all servers can take.
    /// After a failure the rack is partly built, and its drop takes everything down.
    pub fn start_daemons(&mut self, program: &Path, deadline: Duration) -> Result<(), RackError> {
        let logs = self.directory.path().join("logs");
        fs::create_dir(&logs).map_err(failed("make a directory for logs"))?;
        for stage in stages(&self.state, &self.layout, self.directory.path()) {
            let mut starting = Vec::with_capacity(stage.len());
            for daemon in stage {
                self.cancel.check()?;
                let daemon_is_memory_server = is_memory_server(&daemon);
                self.state.daemons.push(daemon);
                // An earlier rack of this name may have left a file.
                let more: &[&str] = if daemon_is_memory_server { &[FRESH] } else { &[] };
                starting.push(self.start(program, self.state.daemons.len() - 1, more)?);
            }
            let patience = self.patience(deadline);
            for daemon in starting {
                self.wait(daemon, patience)?;
            }
        }
        Ok(())
    }

    /// The file in which a memory server keeps its memory, if it can.
    ///
    /// # Errors
    /// [`RackError::NoDaemon`].
    pub fn arena_file(&self, name: &str) -> Result<Option<&Path>, RackError> {
        let daemon = self.state.daemons.get(self.find_daemon(name)?);
        Ok(daemon.and_then(arena_of).map(Path::new))
    }

    /// Whether the memory of a server outlives its process, as it reported; `None` if it did not.
    ///
    /// # Errors
    /// [`RackError::NoDaemon`].
    pub fn kept_memory(&self, name: &str) -> Result<Option<KeptMemory>, RackError> {
        let daemon = self.state.daemons.get(self.find_daemon(name)?);
        let restart = name.parse().map_or_else(|_| String::new(), |part: Part| self.restart(part));
        Ok(daemon.and_then(|daemon| daemon.reported_memory(&restart)))
    }

    fn restart(&self, part: Part) -> String {
        part.restart(&self.state.spec.name)
    }

    /// Whether the next process of a memory server may go on with its memory.
    ///
    /// # Errors
    /// [`RackError::NoDaemon`].
    pub fn may_keep_memory(&self, name: &str) -> Result<bool, RackError> {
        let daemon = self.state.daemons.get(self.find_daemon(name)?);
        Ok(daemon.is_some_and(|daemon| daemon.may_keep_memory(&self.state)))
    }

    /// The other server whose memory is in the file of a memory server, and what to do about it; `None` if it is not known
    /// to be another one's.
    ///
    /// # Errors
    /// [`RackError::NoDaemon`].
    pub fn owner_of_contents(&self, name: &str) -> Result<Option<(Node, String)>, RackError> {
        let daemon = self.state.daemons.get(self.find_daemon(name)?);
        Ok(daemon.and_then(|daemon| {
            let owner = arena::owner_of_contents(&self.state, daemon)?;
            Some((owner.node, arena::remedy_of_other(&self.state, daemon, owner)))
        }))
    }

    /// Stops one daemon: SIGTERM, and SIGKILL after `grace`.
    pub fn stop_daemon(&mut self, name: &str, grace: Duration) -> Result<Stopped, RackError> {
        self.end_daemon(name, |process| {
            let ends = stop_all(std::slice::from_ref(process), grace)?;
            Ok(ends.first().copied().unwrap_or(Stopped::AlreadyGone))
        })
    }

    /// Kills one daemon with SIGKILL.
    pub fn kill_daemon(&mut self, name: &str) -> Result<Stopped, RackError> {
        self.end_daemon(name, process::kill)
    }

    fn end_daemon(
        &mut self,
        name: &str,
        end: impl FnOnce(&ProcessRecord) -> io::Result<Stopped>,
    ) -> Result<Stopped, RackError> {
        let at = self.find_daemon(name)?;
        let Some(daemon) = self.state.daemons.get_mut(at) else { return Ok(Stopped::AlreadyGone) };
        daemon.ready = false;
        let ended = daemon.process.as_ref().map_or(Ok(Stopped::AlreadyGone), end);
        let ended = ended.map_err(failed(format!("stop {name}")))?;
        self.save()?;
        Ok(ended)
    }

    /// The pid of a daemon that was started.
    pub fn pid(&self, name: &str) -> Option<u32> {
        let daemon = self.state.daemons.iter().find(|daemon| daemon.name == name)?;
        daemon.process.as_ref().map(|process| process.pid)
    }

    /// The pid of a daemon that runs.
    pub fn running_pid(&self, name: &str) -> Option<u32> {
        let daemon = self.state.daemons.iter().find(|daemon| daemon.name == name)?;
        daemon.process.as_ref().filter(|process| process.is_running()).map(|process| process.pid)
    }

    fn find_daemon(&self, name: &str) -> Result<usize, RackError> {
        let at = self.state.daemons.iter().position(|daemon| daemon.name == name);
        at.ok_or_else(|| RackError::NoDaemon(name.to_owned()))
    }

    /// Sets the log filter (in the syntax of `tracing`) and the log format (as in [`LOG_FORMAT_VARIABLE`]) of
    /// daemons that are started from now on. `None` changes nothing.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn set_logging(
        &mut self,
        filter: Option<String>,
        format: Option<String>,
    ) -> Result<(), RackError> {
        self.state.log_filter = filter.or_else(|| self.state.log_filter.take());
        self.state.log_format = format.or_else(|| self.state.log_format.take());
        self.save()
    }

    /// Starts a daemon that was stopped or has ended, as it was started first; this once with `more`
    /// arguments. A memory server goes on with the contents of its memory, if the rack keeps them and `more` does
    /// not have [`FRESH`].
    pub fn restart_daemon(
        &mut self,
        program: &Path,
        name: &str,
        more: &[&str],
        deadline: Duration,
    ) -> Result<(), RackError> {
        let starting = self.start(program, self.find_daemon(name)?, more)?;
        self.wait(starting, self.patience(deadline))
    }

    fn patience(&self, deadline: Duration) -> Patience {
        let servers = u64::from(self.state.spec.servers);
        let bytes = self.state.spec.memory.0.saturating_mul(servers);
        let deadline = Instant::now() + deadline;
        let more = Duration::from_secs(bytes / SLOWEST_BYTES_PER_SECOND);
        Patience { deadline, limit: deadline.checked_add(more).unwrap_or(deadline) }
    }

    /// Starts the daemon of a record, which is written first, so that the daemon can be found and stopped.
    fn start(
        &mut self,
        program: &Path,
        index: usize,
        more: &[&str],
    ) -> Result<Starting, RackError> {
        let Some(record) = self.state.daemons.get_mut(index) else {
            return Err(RackError::NoDaemon(format!("number {index}")));
        };
        record.process = None;
        record.ready = false;
        // What ends with the process stays lost until the next one reports what it has.
        record.kept_memory.take_if(|kept| kept.is_kept);
        let daemon = record.clone();
        let name = daemon.name.clone();
        self.save()?;
        let socket = ready_socket(self.directory.path(), &name);
        let ready = ReadySocket::bind(&socket)
            .map_err(failed(format!("make the socket on which {name} reports")))?;
        let log = File::options().create(true).append(true).open(&daemon.log);
        let log = log.map_err(failed(format!("make the log of {name}")))?;
        let log_begin = log.metadata().map_err(failed(format!("read the log of {name}")))?.len();
        let log_too = log.try_clone().map_err(failed(format!("make the log of {name}")))?;
        let mut command = Command::new(program);
        command.args(&daemon.arguments).args(more).envs(rack_environment(
            &self.state_root,
            &self.state,
            daemon.node,
        ));
        command.env(readiness::VARIABLE, ready.path()).current_dir(self.directory.path());
        if let Ok(part) = name.parse::<Part>() {
            command.env(RESTART_VARIABLE, self.restart(part));
        }
        for (variable, value) in
            [(LOG_VARIABLE, &self.state.log_filter), (LOG_FORMAT_VARIABLE, &self.state.log_format)]
        {
            command.envs(value.as_ref().map(|value| (variable, value)));
        }
        command.stdin(Stdio::null()).stdout(log).stderr(log_too).process_group(0);
        let child = self
            .enter(daemon.node, || command.spawn())?
            .map_err(failed(format!("start {name}")))?;
        let process =
            ProcessRecord::of(child.id()).map_err(failed(format!("read the process of {name}")))?;
        if let Some(record) = self.state.daemons.get_mut(index) {
            record.process = Some(process);
        }
        self.save()?;
        Ok(Starting { index, child, ready, log_begin })
    }

    fn wait(&mut self, mut daemon: Starting, patience: Patience) -> Result<(), RackError> {
        let start = Instant::now();
        let cancel = self.cancel.clone();
        let Some(record) = self.state.daemons.get_mut(daemon.index) else { return Ok(()) };
        let mut exited = None;
        let readiness = daemon
            .ready
            .wait(patience, || {
                exited = daemon.child.try_wait().ok().flatten();
                exited.is_none() && !cancel.is_cancelled()
            })
            .map_err(failed(format!("wait for {}", record.name)))?;
        let reason = match (readiness, exited) {
            (Readiness::Ready, _) => {
                record.ready = true;
                record.kept_memory = daemon.ready.kept().cloned();
                arena::note_id(record);
                return self.save();
            }
            (Readiness::Stopped, Some(status)) => match daemon.ready.failure() {
                Some(words) => {
                    let (name, words) = (record.name.clone(), words.to_owned());
                    return Err(RackError::NotStarted { name, words, status });
                }
                None => DaemonFailure::Exited(status),
            },
            (Readiness::Stopped, None) => return Err(RackError::Cancelled),
            (Readiness::Late, _) => DaemonFailure::Late {
                waited: start.elapsed(),
                doing: daemon.ready.doing().map(str::to_owned),
            },
        };
        let log_tail = tail(&record.log, daemon.log_begin)
            .unwrap_or_else(|error| format!("(unreadable: {error})"));
        Err(RackError::Daemon { name: record.name.clone(), reason, log_tail })
    }
}

/// The end of a log, in whole lines, of what was added after its first `begin` bytes.
fn tail(log: &Path, begin: u64) -> io::Result<String> {
    let mut file = File::open(log)?;
    let length = file.metadata()?.len();
    let from = length.saturating_sub(LOG_TAIL_BYTES).max(begin);
    file.seek(SeekFrom::Start(from))?;
    let mut bytes = Vec::new();
    file.take(LOG_TAIL_BYTES).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let whole = if from == begin { None } else { text.split_once('\n') };
    Ok(whole.map_or(&*text, |(_, rest)| rest).to_owned())
}

#[cfg(test)]
mod tests {
    use bluebridge_testkit::Scratch;

    use super::*;

    #[test]
    fn the_end_of_a_log_is_of_the_last_run_and_has_whole_lines() {
        let scratch = Scratch::new("tail");
        let log = scratch.path().join("log");
        fs::write(&log, "an earlier run\nthis run\n").expect("written");
        let begin = "an earlier run\n".len() as u64;
        assert_eq!(tail(&log, begin).expect("read"), "this run\n");
        let line = |number: usize| format!("line {number:04}\n");
        let lines: String = (0..1000).map(line).collect();
        fs::write(&log, format!("an earlier run\n{lines}")).expect("written");
        let end = tail(&log, begin).expect("read");
        let first = 1000 - end.lines().count();
        assert_eq!(end, (first..1000).map(line).collect::<String>());
        assert!(end.len() as u64 > LOG_TAIL_BYTES - 20, "{}", end.len());
    }
}
