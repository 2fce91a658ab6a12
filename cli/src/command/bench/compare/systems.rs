//! The other systems: Debian's programs, as they are, in the memory server's namespace and on its core.

use std::io::Read;
use std::net::{SocketAddrV6, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use bluebridge_bench::contest::Contestant;
use bluebridge_bench::ours::Operation;
use bluebridge_bench::peers::{Exchange, Stream, Waiting, memcached, nbd, redis};
use bluebridge_bench::pin;
use bluebridge_rack::Rack;
use serde::Serialize;

use super::super::{CLIENT, SERVER, SERVER_CORE};

/// How long a system may take until it accepts connections.
const READY: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(20);

/// One of them.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum System {
    Memcached,
    Nbdkit,
    Redis,
}

impl System {
    const ALL: [Self; 3] = [Self::Memcached, Self::Redis, Self::Nbdkit];

    pub(super) const fn words(self) -> &'static str {
        match self {
            Self::Memcached => "memcached",
            Self::Nbdkit => "nbdkit",
            Self::Redis => "redis",
        }
    }

    const fn program(self) -> &'static str {
        match self {
            Self::Redis => "redis-server",
            other => other.words(),
        }
    }

    const fn port(self) -> u16 {
        match self {
            Self::Memcached => 11211,
            Self::Nbdkit => 10809,
            Self::Redis => 6379,
        }
    }

    /// The arguments with which it keeps everything in memory, and stays in the foreground.
    fn arguments(self) -> Vec<String> {
        let port = self.port().to_string();
        let words: Vec<&str> = match self {
            Self::Memcached => vec!["-u", "root", "-p", &port, "-U", &port, "-t", "1", "-m", "64"],
            Self::Nbdkit => vec!["--foreground", "--port", &port, "memory", "64M"],
            Self::Redis => vec![
                "--bind",
                "::",
                "--protected-mode",
                "no",
                "--port",
                &port,
                "--save",
                "",
                "--appendonly",
                "no",
                "--daemonize",
                "no",
            ],
        };
        words.into_iter().map(str::to_owned).collect()
    }

    /// The request and response of an operation.
    pub(super) fn exchange(self, operation: Operation, bytes: usize) -> Exchange {
        let reads = operation == Operation::Read;
        match (self, reads) {
            (Self::Memcached, true) => memcached::get(bytes),
            (Self::Memcached, false) => memcached::set(bytes),
            (Self::Nbdkit, true) => nbd::read(bytes),
            (Self::Nbdkit, false) => nbd::write(bytes),
            (Self::Redis, true) => redis::get(bytes),
            (Self::Redis, false) => redis::set(bytes),
        }
    }
}

/// A system that takes part.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Shown {
    pub(super) system: System,
    /// What the program says of its version.
    pub(super) version: String,
}

/// A system that does not.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Missing {
    pub(super) system: System,
    /// What to do.
    pub(super) reason: String,
}

struct Running {
    shown: Shown,
    child: Child,
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// All that take part; they end with this.
pub(super) struct Systems {
    running: Vec<Running>,
    address: SocketAddrV6,
}

impl Systems {
    /// Starts those whose programs are installed.
    pub(super) fn start(rack: &Rack) -> anyhow::Result<(Self, Vec<Missing>)> {
        let port = rack.layout().port_of(SERVER).context("the rack has no memory server")?;
        let address = SocketAddrV6::new(port.control_address, 0, 0, 0);
        let mut this = Self { running: Vec::new(), address };
        let mut missing = Vec::new();
        for system in System::ALL {
            let Some(program) = find(system.program()) else {
                let package = system.program();
                let reason =
                    format!("{package} was not found in PATH; install Debian's package {package}");
                missing.push(Missing { system, reason });
                continue;
            };
            let version = version(&program)?;
            let child = rack.enter(SERVER, || -> anyhow::Result<Child> {
                // The program's threads inherit the core.
                pin(SERVER_CORE).context("cannot choose a core")?;
                let mut command = Command::new(&program);
                command.args(system.arguments()).stdin(Stdio::null());
                command.stdout(Stdio::null()).stderr(Stdio::piped());
                command.spawn().with_context(|| format!("cannot start {}", program.display()))
            })??;
            this.running.push(Running { shown: Shown { system, version }, child });
        }
        rack.enter(CLIENT, || this.await_ready())??;
        Ok((this, missing))
    }

    fn await_ready(&mut self) -> anyhow::Result<()> {
        let until = Instant::now() + READY;
        let address = self.address;
        for Running { shown: Shown { system, .. }, child } in &mut self.running {
            let name = system.program();
            let to = SocketAddrV6::new(*address.ip(), system.port(), 0, 0);
            while let Err(error) = TcpStream::connect_timeout(&to.into(), LOOK) {
                if let Some(status) = child.try_wait()? {
                    let mut words = String::new();
                    if let Some(stderr) = &mut child.stderr {
                        let _ = stderr.read_to_string(&mut words);
                    }
                    let last = words.lines().next_back().unwrap_or_default().to_owned();
                    return Err(anyhow!("{name} ended with {status}: {last}"));
                }
                if Instant::now() > until {
                    return Err(anyhow!("{name} accepts no connection: {error}"));
                }
                thread::sleep(LOOK);
            }
        }
        Ok(())
    }

    pub(super) fn shown(&self) -> Vec<Shown> {
        self.running.iter().map(|of| of.shown.clone()).collect()
    }

    pub(super) fn all(&self) -> impl Iterator<Item = System> {
        self.running.iter().map(|of| of.shown.system)
    }

    /// The process of a system.
    pub(super) fn pid(&self, system: System) -> Option<u32> {
        let found = self.running.iter().find(|of| of.shown.system == system);
        found.map(|of| of.child.id())
    }

    pub(super) fn address(&self, system: System) -> SocketAddrV6 {
        SocketAddrV6::new(*self.address.ip(), system.port(), 0, 0)
    }

    /// A client over TCP, in its namespace.
    pub(super) fn client(
        &self,
        system: System,
        waiting: Waiting,
        exchange: Exchange,
    ) -> anyhow::Result<Stream> {
        let name = format!("{}, {}", system.words(), waiting.words());
        let connected = || {
            let mut socket = Stream::connect(self.address(system))?;
            if system == System::Nbdkit {
                nbd::begin(&mut socket)?;
            }
            Stream::new(name, socket, waiting, exchange)
        };
        connected().with_context(|| format!("cannot use {}", system.words()))
    }

    /// Gives every system what is read, in the client's namespace.
    pub(super) fn store_values(&self, bytes: usize) -> anyhow::Result<()> {
        for system in self.all() {
            let exchange = system.exchange(Operation::Write, bytes);
            let mut client = self.client(system, Waiting::Sleeping, exchange)?;
            client.operate().map_err(|error| anyhow!("{}: {error}", system.words()))?;
        }
        Ok(())
    }
}

/// A program in PATH.
fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|place| place.join(program)).find(|path| path.is_file())
}

/// The first line that a program says of its version.
fn version(program: &PathBuf) -> anyhow::Result<String> {
    let output = Command::new(program).arg("--version").stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("cannot run {}", program.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.lines().next().unwrap_or_default().trim().to_owned())
}
