//! Stops and starts single daemons.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use bluebridge_rack::GRACE;
use bluebridge_rack::access::rack_environment;
use bluebridge_rack::daemon::{FRESH, MEMORY_SERVER, READY_DEADLINE};
use bluebridge_rack::process::{self, ProcessRecord, Stopped, stop_all};
use bluebridge_rack::readiness::{self, Patience, Readiness, ReadySocket};
use bluebridge_rack::spec::Node;
use bluebridge_rack::state::{DaemonRecord, StateRoot};
use rustix::process::{Pid, Signal, kill_process};

use super::TestRack;

/// How long a process may take to stop after a signal that it cannot catch.
const STOP_TIMEOUT: Duration = Duration::from_secs(20);

/// Stops a process and waits until all its threads are stopped: the signal stops them one by one,
/// and on a busy machine the last one runs for a while.
///
/// # Panics
/// If it cannot be stopped.
pub fn freeze(pid: u32) {
    let target = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a pid");
    kill_process(target, Signal::STOP).expect("may be stopped");
    let stands = |thread: &Path| {
        // The name before the state may contain any characters; it ends with the last bracket.
        let line = fs::read_to_string(thread.join("stat")).unwrap_or_default();
        line.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('T'))
    };
    let until = Instant::now() + STOP_TIMEOUT;
    loop {
        let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("it runs").flatten();
        let moving = threads.map(|it| it.path()).filter(|it| !stands(it)).count();
        if moving == 0 {
            return;
        }
        assert!(
            Instant::now() < until,
            "{moving} threads of process {pid} still run after SIGSTOP"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits for the end of a child.
///
/// # Panics
/// If it does not end before the deadline; it is killed then.
pub fn await_end(child: &mut Child, what: &str, patience: Duration) -> ExitStatus {
    let until = Instant::now() + patience;
    loop {
        if let Some(status) = child.try_wait().expect("it is a child") {
            return status;
        }
        if Instant::now() >= until {
            let _ = child.kill();
            panic!("{what} has not ended after {patience:?}");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

impl TestRack {
    /// A daemon's record, as the rack started it.
    ///
    /// # Panics
    /// If there is no daemon of that name.
    pub fn daemon(&self, name: &str) -> &DaemonRecord {
        let mut daemons = self.rack().state().daemons.iter();
        daemons.find(|daemon| daemon.name == name).expect("a daemon of the rack")
    }

    /// The current process of a daemon.
    ///
    /// # Panics
    /// If there is no daemon of that name.
    pub fn process(&self, name: &str) -> ProcessRecord {
        let restarted = self.processes.get(name).cloned();
        restarted.or_else(|| self.daemon(name).process.clone()).expect("a process")
    }

    /// Kills a daemon with SIGKILL and waits until all its threads have ended: until then its port
    /// may still be in use.
    ///
    /// # Panics
    /// If it does not run, or cannot be killed.
    pub fn kill(&self, name: &str) {
        let process = self.process(name);
        let end = process::kill(&process).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(end, Stopped::Killed, "{name} runs before it is killed");
    }

    /// Stops a daemon with SIGTERM.
    ///
    /// # Panics
    /// If it does not end in time.
    pub fn stop(&self, name: &str) {
        let stopped = stop_all(&[self.process(name)], GRACE).expect("may be stopped");
        assert_eq!(stopped, [Stopped::Terminated], "{name}");
    }

    /// Starts a stopped daemon as the rack did, and waits until it is ready. A memory server begins empty.
    ///
    /// # Panics
    /// If it does not become ready.
    pub fn start(&mut self, name: &str) {
        let record = self.as_at_first(name);
        self.start_as(name, &record);
    }

    /// Starts a stopped memory server, which goes on with its memory, and waits until it is ready.
    ///
    /// # Panics
    /// If it does not become ready.
    pub fn start_with_memory(&mut self, name: &str) {
        let record = self.daemon(name).clone();
        self.start_as(name, &record);
    }

    fn as_at_first(&self, name: &str) -> DaemonRecord {
        let mut record = self.daemon(name).clone();
        if name.starts_with(MEMORY_SERVER) {
            record.arguments.push(FRESH.to_owned());
        }
        record
    }

    /// Restarts the memory servers with more memory, which they allocate on demand: on a busy
    /// machine a rack's start times out if gigabytes must be populated first.
    ///
    /// # Panics
    /// If one does not become ready.
    pub fn serve_on_demand(&mut self, memory: &str) {
        for number in 1..=self.rack().spec().servers {
            let name = format!("memserver-{}", Node::Server(number));
            self.stop(&name);
            let mut record = self.daemon(&name).clone();
            let size = record.arguments.iter().position(|word| word == "--memory");
            let size = size.and_then(|at| record.arguments.get_mut(at + 1)).expect("a size");
            memory.clone_into(size);
            record.arguments.extend(["--claim", "on-demand", FRESH].map(str::to_owned));
            self.start_as(&name, &record);
        }
    }

    /// Starts a daemon with other arguments than the rack's.
    ///
    /// # Panics
    /// If it does not become ready.
    pub fn start_as(&mut self, name: &str, record: &DaemonRecord) {
        self.spawn_as(name, record).await_ready();
    }

    /// Starts a stopped daemon without waiting for it.
    ///
    /// # Panics
    /// If it does not start.
    pub fn spawn(&mut self, name: &str) -> Starting {
        let record = self.as_at_first(name);
        self.spawn_as(name, &record)
    }

    fn spawn_as(&mut self, name: &str, record: &DaemonRecord) -> Starting {
        let socket = self.scratch.path().join(format!("{name}.{}", self.processes.len()));
        let _ = fs::remove_file(&socket);
        let ready = ReadySocket::bind(&socket).expect("a socket");
        let log = self.scratch.path().join(format!("{name}.again.log"));
        let file = File::create(&log).expect("a log");
        let root = StateRoot::at(self.scratch.path().join("state"));
        let mut command = Command::new(&self.program);
        command.args(&record.arguments);
        command.envs(rack_environment(&root, self.rack().state(), record.node));
        command.env(readiness::VARIABLE, ready.path()).current_dir(self.scratch.path());
        command.stdin(Stdio::null()).stdout(file.try_clone().expect("a log")).stderr(file);
        let child = self.enter(record.node, || command.process_group(0).spawn());
        let child = child.expect("it starts");
        let process = ProcessRecord::of(child.id()).expect("it runs");
        self.processes.insert(name.to_owned(), process);
        Starting { name: name.to_owned(), child, ready, socket, log }
    }
}

/// A daemon that may not be ready yet.
pub struct Starting {
    name: String,
    child: Child,
    ready: ReadySocket,
    socket: PathBuf,
    log: PathBuf,
}

impl Starting {
    /// The log so far.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Waits until it is ready.
    ///
    /// # Panics
    /// If it does not become ready.
    pub fn await_ready(mut self) {
        let patience = Patience::until(Instant::now() + READY_DEADLINE);
        let running = || self.child.try_wait().is_ok_and(|ended| ended.is_none());
        let readiness = self.ready.wait(patience, running).expect("it can be waited for");
        assert_eq!(readiness, Readiness::Ready, "{} is not ready again: {}", self.name, self.log());
        let _ = fs::remove_file(&self.socket);
    }
}
