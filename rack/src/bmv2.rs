//! BMv2's `simple_switch_grpc` as a process of this one.
//!
//! It is in no package registry, so an operator builds it and names it in an environment variable (docs/switches.md).
//! It starts without a program; the controller pushes the compiled one over P4Runtime.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use bluebridge_p4::pipeline::CPU_PORT;
use rustix::process::{Signal, set_parent_process_death_signal};

/// The environment variable that names the program.
pub const VARIABLE: &str = "BLUEBRIDGE_BMV2";

/// Time limit of its start.
const DEADLINE: Duration = Duration::from_secs(10);

/// Time limit of an attempt to connect.
const ATTEMPT: Duration = Duration::from_millis(200);

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
pub struct Bmv2(Child);

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
    /// numbers and interfaces. What it prints to its standard error is printed to this process's.
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
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let end_with_parent = || Ok(set_parent_process_death_signal(Some(Signal::KILL))?);
        // SAFETY: between fork and exec only one system call is made, which is async-signal-safe.
        unsafe { command.pre_exec(end_with_parent) };
        let program = program.to_owned();
        let mut this = match command.spawn() {
            Ok(child) => Self(child),
            Err(source) => return Err(Bmv2Error::Start { program, source }),
        };
        let began = Instant::now();
        while TcpStream::connect_timeout(&listen, ATTEMPT).is_err() {
            if let Ok(Some(status)) = this.try_wait() {
                return Err(Bmv2Error::Ended { program, status });
            }
            if began.elapsed() > DEADLINE {
                return Err(Bmv2Error::Timeout { program, listen });
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(this)
    }

    /// Its exit status, if it ended.
    ///
    /// # Errors
    /// The system's.
    pub fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        self.0.try_wait()
    }
}

impl Drop for Bmv2 {
    fn drop(&mut self) {
        // It has no state that outlives it.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
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
}
