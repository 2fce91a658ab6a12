//! BMv2's `simple_switch_grpc` as a process of this one.
//!
//! It is in no package registry, so an operator builds it and names it in an environment variable (docs/switches.md).
//! It starts without a program; the controller pushes the compiled one over P4Runtime.

use std::collections::BTreeSet;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bluebridge_p4::pipeline::CPU_PORT;
use rustix::process::{Signal, set_parent_process_death_signal};

/// The environment variable that names the program.
pub const VARIABLE: &str = "BLUEBRIDGE_BMV2";

/// Time limit of its start.
const DEADLINE: Duration = Duration::from_secs(10);

/// Time limit of an attempt to connect.
const ATTEMPT: Duration = Duration::from_millis(200);

/// Time limit of copying the rest of its output after its end.
const COPY_DEADLINE: Duration = Duration::from_millis(500);

/// What it prints five times a second for each port whose network namespace is not the one that `/sys` shows.
const NOISE: &[u8] = b"open: No such file or directory";

/// The longest line of its output that is copied at once.
const LINE_BYTES_MAX: u64 = 4096;

/// The state of a listening socket in `/proc/PID/net/tcp`.
const LISTENING: &str = "0A";

/// Why BMv2 does not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Bmv2Error {
    /// The variable is not set.
    #[error("set {VARIABLE} to BMv2's simple_switch_grpc; docs/switches.md says how to build it")]
    Unset,
    /// The program cannot be started.
    #[error("cannot start {}, which {VARIABLE} names: {source}", .program.display())]
    Start {
        /// The program.
        program: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The program ended at once; what it said is in its output.
    #[error("{} ended at its start ({status}); its reason is above", .program.display())]
    Ended {
        /// The program.
        program: PathBuf,
        /// Its exit status.
        status: ExitStatus,
    },
    /// Another process serves the address; a controller would program that one.
    #[error(
        "another process already listens on {listen}; end it, or choose another address for {}",
        .program.display()
    )]
    InUse {
        /// The program.
        program: PathBuf,
        /// Where it should listen.
        listen: SocketAddr,
    },
    /// It does not listen.
    #[error("{} does not listen on {listen} after {DEADLINE:?}", .program.display())]
    Timeout {
        /// The program.
        program: PathBuf,
        /// Where it should listen.
        listen: SocketAddr,
    },
}

/// A running BMv2. It ends when this is dropped, or with the thread that started it.
#[derive(Debug)]
pub struct Bmv2 {
    child: Child,
    /// Copies its standard error; it ends with the process.
    copying: Option<JoinHandle<()>>,
}

impl Bmv2 {
    /// The program that the environment names.
    ///
    /// # Errors
    /// [`Bmv2Error::Unset`].
    pub fn program() -> Result<PathBuf, Bmv2Error> {
        let named = std::env::var_os(VARIABLE).filter(|value| !value.is_empty());
        named.map(PathBuf::from).ok_or(Bmv2Error::Unset)
    }

    /// Starts it in this thread's network namespace, and waits until it serves P4Runtime on `listen`. `ports` are
    /// numbers and interfaces. What it prints to its standard error is printed to this process's, without the
    /// lines that say nothing.
    ///
    /// # Errors
    /// [`Bmv2Error`]; then it does not run.
    pub fn start<'a>(
        program: &Path,
        listen: SocketAddr,
        device_id: u64,
        ports: impl IntoIterator<Item = (u16, &'a str)>,
    ) -> Result<Self, Bmv2Error> {
        let mut command = Command::new(program);
        command.args(["--no-p4", "-L", "off", "--device-id", &device_id.to_string()]);
        for (number, interface) in ports {
            command.args(["-i", &format!("{number}@{interface}")]);
        }
        command.args(["--", "--cpu-port", &CPU_PORT.0.to_string()]);
        command.args(["--grpc-server-addr", &listen.to_string()]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let end_with_parent = || Ok(set_parent_process_death_signal(Some(Signal::KILL))?);
        // SAFETY: between fork and exec only one system call is made, which is async-signal-safe.
        unsafe { command.pre_exec(end_with_parent) };
        let program = program.to_owned();
        let mut this = match command.spawn() {
            Ok(child) => Self { child, copying: None },
            Err(source) => return Err(Bmv2Error::Start { program, source }),
        };
        this.copying = this.child.stderr.take().map(|output| std::thread::spawn(|| copy(output)));
        let began = Instant::now();
        loop {
            if let Ok(Some(status)) = this.try_wait() {
                this.finish_copying();
                return Err(Bmv2Error::Ended { program, status });
            }
            // Also another process may respond: of two programs of gRPC, both can have one address.
            let responds = TcpStream::connect_timeout(&listen, ATTEMPT).is_ok();
            match this.owns_listeners(listen) {
                Some(true) if responds => return Ok(this),
                Some(false) => return Err(Bmv2Error::InUse { program, listen }),
                _ => {}
            }
            if began.elapsed() > DEADLINE {
                return Err(Bmv2Error::Timeout { program, listen });
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Whether every socket that gets connections to an address in its network namespace is its own; `None` if none
    /// does, or if this cannot be read.
    fn owns_listeners(&self, listen: SocketAddr) -> Option<bool> {
        let process = PathBuf::from(format!("/proc/{}", self.child.id()));
        let listening: BTreeSet<String> = ["net/tcp", "net/tcp6"]
            .iter()
            .filter_map(|table| std::fs::read_to_string(process.join(table)).ok())
            .flat_map(|table| listeners(&table, listen))
            .collect();
        if listening.is_empty() {
            return None;
        }
        let open = std::fs::read_dir(process.join("fd")).ok()?.flatten();
        let open: BTreeSet<PathBuf> =
            open.filter_map(|file| std::fs::read_link(file.path()).ok()).collect();
        let owns = |inode: &String| open.contains(Path::new(&format!("socket:[{inode}]")));
        Some(listening.iter().all(owns))
    }

    /// Waits until the end of its output is copied, but not for a program that it started and left behind.
    fn finish_copying(&mut self) {
        let Some(copying) = self.copying.take() else { return };
        let began = Instant::now();
        while !copying.is_finished() && began.elapsed() < COPY_DEADLINE {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Its exit status, if it ended.
    ///
    /// # Errors
    /// The system's.
    pub fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        self.child.try_wait()
    }
}

impl Drop for Bmv2 {
    fn drop(&mut self) {
        // It has no state that outlives it.
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.finish_copying();
    }
}

/// The inodes of the sockets that get connections to an address, in a table of `/proc/PID/net`.
fn listeners(table: &str, listen: SocketAddr) -> Vec<String> {
    // gRPC uses sockets of IPv6 for addresses of IPv4, too.
    let mapped = match listen.ip() {
        IpAddr::V4(address) => IpAddr::V6(address.to_ipv6_mapped()),
        address @ IpAddr::V6(_) => address,
    };
    let addresses = [written(listen.ip()), written(mapped)];
    let port = format!("{:04X}", listen.port());
    let is_there = |local: &&str| {
        local.split_once(':').is_some_and(|(address, local_port)| {
            let is_any = address.bytes().all(|digit| digit == b'0');
            local_port == port && (is_any || addresses.iter().any(|it| it == address))
        })
    };
    let rows = table.lines().skip(1).map(|row| row.split_whitespace().collect::<Vec<_>>());
    let listening =
        rows.filter(|row| row.get(1).is_some_and(is_there) && row.get(3) == Some(&LISTENING));
    listening.filter_map(|row| row.get(9).map(|inode| (*inode).to_owned())).collect()
}

/// An address as the tables of `/proc/PID/net` have it: words of 32 bits in the machine's byte order.
fn written(address: IpAddr) -> String {
    let octets = match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    };
    let words = octets.chunks_exact(4).filter_map(|word| word.first_chunk().copied());
    words.map(|word| format!("{:08X}", u32::from_ne_bytes(word))).collect()
}

/// Copies the output of BMv2 to this process's standard error, until it ends.
fn copy(output: ChildStderr) {
    let mut output = BufReader::new(output);
    let mut line = Vec::new();
    loop {
        line.clear();
        match output.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) if is_noise(&line) => {}
            // Nobody reads this process's output any more; BMv2 must not block because of that.
            Ok(_) => drop(io::stderr().write_all(&line)),
        }
    }
}

fn is_noise(line: &[u8]) -> bool {
    let line = line.trim_ascii();
    line.is_empty() || line == NOISE
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTEN: &str = "127.0.0.1:1";

    fn start(program: &str) -> Bmv2Error {
        let listen = LISTEN.parse().expect("an address");
        Bmv2::start(Path::new(program), listen, 1, []).expect_err("it is not BMv2")
    }

    #[test]
    fn a_program_that_is_missing_or_ends_is_named() {
        let missing = start("/nonexistent/simple_switch_grpc").to_string();
        assert!(missing.contains("/nonexistent/simple_switch_grpc, which BLUEBRIDGE_BMV2 names"));
        assert!(matches!(start("/bin/false"), Bmv2Error::Ended { .. }));
    }

    #[test]
    fn only_listening_sockets_of_the_address_count() {
        let local = written([127, 0, 0, 1].into());
        let mapped = written("::ffff:127.0.0.1".parse().expect("an address"));
        let (any, other) = ("00000000", written([127, 0, 0, 2].into()));
        assert_eq!((local.len(), mapped.len()), (8, 32));
        let rows = [
            (local.as_str(), "2557", "0A"),
            (&mapped, "2557", "0A"),
            (any, "2557", "0A"),
            (&local, "2557", "01"),
            (&local, "2558", "0A"),
            (&other, "2557", "0A"),
        ];
        let mut table = String::from("  sl  local_address rem_address   st ..\n");
        for (inode, (address, port, state)) in rows.iter().enumerate() {
            let counts = "00000000:00000000 00:00000000 00000000     0        0";
            table += &format!("   0: {address}:{port} 00000000:0000 {state} {counts} {inode} 1\n");
        }
        table += "   3: short\n";
        let listen = "127.0.0.1:9559".parse().expect("an address");
        assert_eq!(listeners(&table, listen), ["0", "1", "2"]);
        assert_eq!(listeners("", listen), Vec::<String>::new());
    }

    /// A program that does not listen, at an address where this process does.
    #[test]
    fn another_listener_is_not_taken_for_it() {
        let other = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let listen = other.local_addr().expect("bound");
        let scratch = bluebridge_testkit::Scratch::new("bmv2-other");
        let program = scratch.path().join("sleeps");
        std::fs::write(&program, "#!/bin/sh\nexec sleep 60\n").expect("written");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&program, mode).expect("executable");
        let refused = Bmv2::start(&program, listen, 1, []).expect_err("another process listens");
        assert!(matches!(refused, Bmv2Error::InUse { .. }), "{refused}");
        assert!(refused.to_string().contains(&listen.to_string()), "{refused}");
    }

    #[test]
    fn lines_that_say_nothing_are_left_out() {
        assert!(is_noise(b"open: No such file or directory\n") && is_noise(b"\n"));
        assert!(!is_noise(b"Failed to open interface s1\n"));
    }
}
