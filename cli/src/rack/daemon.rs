//! The daemons of a rack: which, with what arguments, in what order, and when they count as started.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::access::rack_environment;
use super::layout::{ENDPOINT_INTERFACE, Layout, P4RUNTIME};
use super::spec::Node;
use super::state::{DaemonRecord, RackState};
use super::{DaemonFailure, Rack, RackError, failed};
use crate::process::{ProcessRecord, Stopped, stop_all};
use crate::readiness::{self, Readiness, ReadySocket};

/// How long a daemon may take until it reports ready.
pub const READY_DEADLINE: Duration = Duration::from_secs(15);

/// How much of a failed daemon's log is shown.
const LOG_TAIL_BYTES: u64 = 4096;

/// P4Runtime's number for the rack's one switch.
pub const DEVICE_ID: u64 = 1;

/// The subcommand of the switch's agent.
pub const SWITCH: &str = "switch";
/// The subcommand of the controller.
pub const CONTROLLER: &str = "controller";
/// The subcommand of a memory server.
pub const MEMORY_SERVER: &str = "memserver";

/// A daemon on its way up.
struct Starting {
    index: usize,
    child: Child,
    ready: ReadySocket,
}

/// Everything a rack runs, in the order of starting; daemons of the same stage start together.
pub fn stages(state: &RackState, layout: &Layout, directory: &Path) -> Vec<Vec<DaemonRecord>> {
    let record = |name: String, node, arguments| {
        let log = directory.join("logs").join(format!("{name}.log"));
        DaemonRecord { name, node, arguments, log, process: None, ready: false }
    };
    let store = directory.join("controller.redb").display().to_string();
    let servers = state.spec.endpoints().filter(|node| matches!(node, Node::Server(_)));
    vec![
        vec![record(SWITCH.to_owned(), Node::Switch, switch_arguments(state, layout))],
        vec![record(
            CONTROLLER.to_owned(),
            Node::Switch,
            words(&[
                CONTROLLER,
                "--listen",
                &layout.controller().to_string(),
                "--switch",
                &P4RUNTIME.to_string(),
                "--device-id",
                &DEVICE_ID.to_string(),
                "--store",
                &store,
            ]),
        )],
        servers
            .filter_map(|node| {
                let port = layout.port_of(node)?;
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
                ]);
                Some(record(format!("{MEMORY_SERVER}-{node}"), node, arguments))
            })
            .collect(),
    ]
}

fn switch_arguments(state: &RackState, layout: &Layout) -> Vec<String> {
    let mut arguments = words(&[
        SWITCH,
        "--data-plane",
        state.spec.switch.as_str(),
        "--listen",
        &P4RUNTIME.to_string(),
        "--device-id",
        &DEVICE_ID.to_string(),
    ]);
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
    /// `program` is the `bluebridge` binary; each daemon gets at most `deadline`. On failure the rack is as
    /// far as it came, and its drop takes everything down.
    pub fn start_daemons(&mut self, program: &Path, deadline: Duration) -> Result<(), RackError> {
        let logs = self.directory.path().join("logs");
        fs::create_dir(&logs).map_err(failed("make a directory for logs"))?;
        for stage in stages(&self.state, &self.layout, self.directory.path()) {
            let mut starting = Vec::with_capacity(stage.len());
            for daemon in stage {
                self.cancel.check()?;
                starting.push(self.start(program, daemon)?);
            }
            let until = Instant::now() + deadline;
            for daemon in starting {
                self.wait(daemon, until, deadline)?;
            }
        }
        Ok(())
    }

    /// Stops one daemon: asks it to end, and kills it when it has not after `grace`.
    pub fn stop_daemon(&mut self, name: &str, grace: Duration) -> Result<Stopped, RackError> {
        let daemon = self.state.daemons.iter_mut().find(|daemon| daemon.name == name);
        let daemon = daemon.ok_or_else(|| RackError::NoDaemon(name.to_owned()))?;
        daemon.ready = false;
        let records: Vec<_> = daemon.process.iter().cloned().collect();
        let ends = stop_all(&records, grace).map_err(failed(format!("stop {name}")))?;
        self.save()?;
        Ok(ends.first().copied().unwrap_or(Stopped::AlreadyGone))
    }

    /// Starts a daemon that was stopped or has ended, as it was started first.
    pub fn restart_daemon(
        &mut self,
        program: &Path,
        name: &str,
        deadline: Duration,
    ) -> Result<(), RackError> {
        let at = self.state.daemons.iter().position(|daemon| daemon.name == name);
        let at = at.ok_or_else(|| RackError::NoDaemon(name.to_owned()))?;
        let daemon = self.state.daemons.remove(at);
        let daemon = DaemonRecord { process: None, ready: false, ..daemon };
        let starting = self.start(program, daemon)?;
        self.wait(starting, Instant::now() + deadline, deadline)
    }

    fn start(&mut self, program: &Path, daemon: DaemonRecord) -> Result<Starting, RackError> {
        let name = daemon.name.clone();
        let index = self.state.daemons.len();
        self.state.daemons.push(daemon.clone());
        self.save()?;
        let socket = self.directory.path().join(format!("{name}.ready"));
        let ready = ReadySocket::bind(&socket)
            .map_err(failed(format!("make the socket on which {name} reports")))?;
        let log = File::options().create(true).append(true).open(&daemon.log);
        let log = log.map_err(failed(format!("make the log of {name}")))?;
        let log_too = log.try_clone().map_err(failed(format!("make the log of {name}")))?;
        let mut command = Command::new(program);
        command.args(&daemon.arguments).envs(rack_environment(
            &self.state_root,
            &self.state,
            daemon.node,
        ));
        command.env(readiness::VARIABLE, ready.path()).current_dir(self.directory.path());
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
        Ok(Starting { index, child, ready })
    }

    fn wait(
        &mut self,
        mut daemon: Starting,
        until: Instant,
        deadline: Duration,
    ) -> Result<(), RackError> {
        let cancel = self.cancel.clone();
        let Some(record) = self.state.daemons.get_mut(daemon.index) else { return Ok(()) };
        let mut exited = None;
        let readiness = daemon
            .ready
            .wait(until, || {
                exited = daemon.child.try_wait().ok().flatten();
                exited.is_none() && !cancel.is_cancelled()
            })
            .map_err(failed(format!("wait for {}", record.name)))?;
        let reason = match (readiness, exited) {
            (Readiness::Ready, _) => {
                record.ready = true;
                return self.save();
            }
            (Readiness::Stopped, Some(status)) => DaemonFailure::Exited(status),
            (Readiness::Stopped, None) => return Err(RackError::Cancelled),
            (Readiness::Late, _) => DaemonFailure::Late(deadline),
        };
        let log_tail = tail(&record.log).unwrap_or_else(|error| format!("(unreadable: {error})"));
        Err(RackError::Daemon { name: record.name.clone(), reason, log_tail })
    }
}

fn tail(log: &Path) -> io::Result<String> {
    let mut file = File::open(log)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(LOG_TAIL_BYTES)))?;
    let mut bytes = Vec::new();
    file.take(LOG_TAIL_BYTES).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
