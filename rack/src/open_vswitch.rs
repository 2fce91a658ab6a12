//! Open vSwitch with its userspace data plane, as processes of this one.
//!
//! It needs no kernel module and touches no other Open vSwitch of this machine: database, sockets and logs are in a
//! directory of its own. The programs are those of Debian's package `openvswitch-switch`. Its bridge drops
//! everything until a controller programs it, and listens for controllers.

use std::ffi::OsStr;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Signal, set_parent_process_death_signal};

/// The description of the database, from Debian's package `openvswitch-switch`.
const SCHEMA: &str = "/usr/share/openvswitch/vswitch.ovsschema";

/// Directories of the programs that an ordinary user's `PATH` may lack.
const SYSTEM_DIRECTORIES: [&str; 2] = ["/usr/sbin", "/sbin"];

/// The bridge.
pub const BRIDGE: &str = "bb";

/// Files in its directory: the database, its lock, and the socket to it.
const DATABASE: &str = "conf.db";
const DATABASE_LOCK: &str = ".conf.db.~lock~";
const DATABASE_SOCKET: &str = "db.sock";

/// The file that marks a directory as one of ours: another Open vSwitch's database must not be replaced.
const MARK: &str = "bluebridge.mark";

/// Time limit of the database's start and of each command.
const DEADLINE: Duration = Duration::from_secs(10);

/// How long an earlier run that was killed may take to end.
const END_DEADLINE: Duration = Duration::from_secs(2);

/// The Debian package of the programs.
pub const PACKAGE: &str = "openvswitch-switch";

/// Why Open vSwitch does not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OvsError {
    /// The programs are not installed.
    #[error("{program} is not installed; install the package {PACKAGE}")]
    Missing {
        /// A program.
        program: &'static str,
    },
    /// A system call failed.
    #[error("cannot {doing}: {source}")]
    Io {
        /// What failed.
        doing: String,
        /// The system's error.
        source: io::Error,
    },
    /// A program failed.
    #[error("{program} failed: {reason}")]
    Failed {
        /// The program.
        program: &'static str,
        /// The end of its output.
        reason: String,
    },
    /// The directory has the database of another Open vSwitch, which would be lost.
    #[error("{} has the database of another Open vSwitch; use another directory", .0.display())]
    Foreign(PathBuf),
    /// Another Open vSwitch runs in the directory.
    #[error("{} is the directory of a running Open vSwitch; end it, or use another directory", .0.display())]
    InUse(PathBuf),
    /// A program did not become ready in time.
    #[error("{program} did not start within {DEADLINE:?}; see its log in {}", .directory.display())]
    Timeout {
        /// The program.
        program: &'static str,
        /// Where its log is.
        directory: PathBuf,
    },
}

/// A running Open vSwitch. It ends when this is dropped, or with the thread that started it.
#[derive(Debug)]
pub struct OpenVswitch {
    directory: PathBuf,
    /// The switch and the database, in the order of their end.
    processes: Vec<Child>,
}

impl OpenVswitch {
    /// Whether the programs are installed.
    #[must_use]
    pub fn is_installed() -> bool {
        find("ovs-vswitchd").is_some() && Path::new(SCHEMA).is_file()
    }

    /// Starts it in this thread's network namespace with one bridge. `directory` is created if it is missing; the
    /// database of an earlier run is replaced, and other files are left alone. `ports` are numbers and interfaces.
    /// Controllers connect to `listen` by TCP.
    ///
    /// # Errors
    /// [`OvsError`]; then nothing runs.
    pub fn start<'a>(
        directory: &Path,
        listen: SocketAddr,
        ports: impl IntoIterator<Item = (u16, &'a str)>,
    ) -> Result<Self, OvsError> {
        // Its programs have other working directories.
        let directory = &std::path::absolute(directory).map_err(|source| OvsError::Io {
            doing: "find the working directory".to_owned(),
            source,
        })?;
        let mut this = Self { directory: directory.clone(), processes: Vec::new() };
        let database = directory.join(DATABASE);
        let socket = directory.join(DATABASE_SOCKET);
        prepare(directory)?;
        check_free(listen)?;
        this.run("ovsdb-tool", [OsStr::new("create"), database.as_os_str(), OsStr::new(SCHEMA)])?;
        this.spawn(
            "ovsdb-server",
            [database.display().to_string(), format!("--remote=punix:{}", socket.display())],
        )?;
        this.wait_for("ovsdb-server", &socket)?;
        this.control(["--no-wait", "init"])?;
        let control = format!("--unixctl={}", directory.join("control.sock").display());
        this.spawn("ovs-vswitchd", [format!("unix:{}", socket.display()), control])?;
        let mut arguments: Vec<String> = Vec::new();
        let mut command = |words: &str| {
            if !arguments.is_empty() {
                arguments.push("--".to_owned());
            }
            arguments.extend(words.split(' ').map(str::to_owned));
        };
        command(&format!("add-br {BRIDGE}"));
        command(&format!(
            "set bridge {BRIDGE} datapath_type=netdev fail_mode=secure protocols=OpenFlow13"
        ));
        command(&format!("set bridge {BRIDGE} other_config:disable-in-band=true"));
        for (number, interface) in ports {
            command(&format!("add-port {BRIDGE} {interface}"));
            command(&format!("set interface {interface} ofport_request={number}"));
        }
        let address = match listen {
            SocketAddr::V4(it) => format!("{}", it.ip()),
            SocketAddr::V6(it) => format!("[{}]", it.ip()),
        };
        command(&format!("set-controller {BRIDGE} ptcp:{}:{address}", listen.port()));
        this.control(arguments)?;
        Ok(this)
    }

    /// Changes its configuration (`ovs-vsctl`).
    ///
    /// # Errors
    /// [`OvsError`].
    pub fn control<A: AsRef<OsStr>>(
        &self,
        arguments: impl IntoIterator<Item = A>,
    ) -> Result<String, OvsError> {
        let database = format!("--db=unix:{}", self.directory.join(DATABASE_SOCKET).display());
        let timeout = format!("--timeout={}", DEADLINE.as_secs());
        let own = [database, timeout].map(std::ffi::OsString::from);
        let given = arguments.into_iter().map(|argument| argument.as_ref().to_owned());
        self.run("ovs-vsctl", own.into_iter().chain(given))
    }

    /// Its flows as `ovs-ofctl dump-flows` shows them.
    ///
    /// # Errors
    /// [`OvsError`].
    pub fn flows(&self) -> Result<String, OvsError> {
        self.query("dump-flows", None)
    }

    /// Its groups as `ovs-ofctl dump-groups` shows them, a line each, sorted: the switch has no order of its own.
    ///
    /// # Errors
    /// [`OvsError`].
    pub fn groups(&self) -> Result<String, OvsError> {
        let shown = self.query("dump-groups", None)?;
        // The first line is about the message.
        let mut groups: Vec<&str> = shown.lines().skip(1).collect();
        groups.sort_unstable();
        Ok(groups.join("\n"))
    }

    /// The number of frames that entered the pipeline since it was installed.
    ///
    /// # Errors
    /// [`OvsError`].
    pub fn frame_count(&self) -> Result<u64, OvsError> {
        let text = self.query("dump-aggregate", Some("table=0"))?;
        let count = text.split_whitespace().find_map(|word| word.strip_prefix("packet_count="));
        count.and_then(|digits| digits.parse().ok()).ok_or_else(|| OvsError::Failed {
            program: "ovs-ofctl",
            reason: format!("no packet_count in {text:?}"),
        })
    }

    /// Changes flows as an operator does, with a command of `ovs-ofctl` (`add-flow`, `del-flows`).
    ///
    /// # Errors
    /// [`OvsError`].
    pub fn change_flows(&self, command: &str, flow: &str) -> Result<(), OvsError> {
        self.query(command, Some(flow).filter(|flow| !flow.is_empty())).map(drop)
    }

    fn query(&self, command: &str, flow: Option<&str>) -> Result<String, OvsError> {
        let bridge = format!("unix:{}", self.directory.join(format!("{BRIDGE}.mgmt")).display());
        let arguments = ["-O", "OpenFlow13", command, &bridge];
        self.run("ovs-ofctl", arguments.into_iter().chain(flow))
    }

    /// Waits until every earlier change applies to all frames: its cache follows changes of flows some milliseconds
    /// later.
    ///
    /// # Errors
    /// [`OvsError`].
    pub fn settle(&self) -> Result<(), OvsError> {
        let socket = self.directory.join("control.sock").display().to_string();
        let timeout = format!("--timeout={}", DEADLINE.as_secs());
        self.run("ovs-appctl", ["-t", &socket, &timeout, "revalidator/wait"]).map(drop)
    }

    /// The exit status of the switch or of its database, if one of them ended.
    ///
    /// # Errors
    /// The system's.
    pub fn try_wait(&mut self) -> io::Result<Option<std::process::ExitStatus>> {
        for process in &mut self.processes {
            if let Some(status) = process.try_wait()? {
                return Ok(Some(status));
            }
        }
        Ok(None)
    }

    fn command(&self, program: &'static str) -> Result<Command, OvsError> {
        let path = find(program).ok_or(OvsError::Missing { program })?;
        let mut command = Command::new(path);
        for variable in ["OVS_RUNDIR", "OVS_LOGDIR", "OVS_DBDIR", "OVS_SYSCONFDIR"] {
            command.env(variable, &self.directory);
        }
        command.stdin(Stdio::null());
        Ok(command)
    }

    /// Runs a program to its end and returns its output.
    fn run<A: AsRef<OsStr>>(
        &self,
        program: &'static str,
        arguments: impl IntoIterator<Item = A>,
    ) -> Result<String, OvsError> {
        let output = self.command(program)?.args(arguments).output();
        let output =
            output.map_err(|source| OvsError::Io { doing: format!("run {program}"), source })?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let reason = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(OvsError::Failed { program, reason })
    }

    fn spawn(
        &mut self,
        program: &'static str,
        arguments: impl IntoIterator<Item = String>,
    ) -> Result<(), OvsError> {
        let doing = || format!("start {program}");
        let log = self.directory.join(format!("{program}.log"));
        let mut command = self.command(program)?;
        command.args(arguments).args(["-vconsole:off", "-vsyslog:off"]);
        command.arg(format!("--log-file={}", log.display()));
        command
            .arg(format!("--pidfile={}", self.directory.join(format!("{program}.pid")).display()));
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let end_with_parent = || Ok(set_parent_process_death_signal(Some(Signal::KILL))?);
        // SAFETY: between fork and exec only one system call is made, which is async-signal-safe.
        unsafe { command.pre_exec(end_with_parent) };
        let child = command.spawn().map_err(|source| OvsError::Io { doing: doing(), source })?;
        // The switch first: without its database it would try to write its state.
        self.processes.insert(0, child);
        Ok(())
    }

    fn wait_for(&mut self, program: &'static str, socket: &Path) -> Result<(), OvsError> {
        let began = Instant::now();
        while !socket.exists() {
            if began.elapsed() > DEADLINE || matches!(self.try_wait(), Ok(Some(_))) {
                return Err(OvsError::Timeout { program, directory: self.directory.clone() });
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

impl Drop for OpenVswitch {
    fn drop(&mut self) {
        for process in &mut self.processes {
            // It has no state that outlives it.
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// Removes the database of an earlier run, which is of no use: the controller writes everything again.
fn prepare(directory: &Path) -> Result<(), OvsError> {
    let failed =
        |source| OvsError::Io { doing: format!("prepare {}", directory.display()), source };
    std::fs::create_dir_all(directory).map_err(failed)?;
    let mark = directory.join(MARK);
    if directory.join(DATABASE).exists() && !mark.exists() {
        return Err(OvsError::Foreign(directory.to_owned()));
    }
    std::fs::write(mark, "").map_err(failed)?;
    // A process that was just killed may take a moment to end.
    let began = Instant::now();
    while UnixStream::connect(directory.join(DATABASE_SOCKET)).is_ok() {
        if began.elapsed() > END_DEADLINE {
            return Err(OvsError::InUse(directory.to_owned()));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    for file in [DATABASE, DATABASE_LOCK, DATABASE_SOCKET] {
        match std::fs::remove_file(directory.join(file)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
    }
    Ok(())
}

/// Checks that the switch can listen there: it would only log that it cannot.
fn check_free(listen: SocketAddr) -> Result<(), OvsError> {
    // As above, a process that was just killed may take a moment to end.
    let began = Instant::now();
    while let Err(source) = TcpListener::bind(listen) {
        if source.kind() != io::ErrorKind::AddrInUse || began.elapsed() > END_DEADLINE {
            return Err(OvsError::Io { doing: format!("listen on {listen}"), source });
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories = std::env::split_paths(&path).chain(SYSTEM_DIRECTORIES.map(PathBuf::from));
    directories.map(|directory| directory.join(program)).find(|program| program.is_file())
}
