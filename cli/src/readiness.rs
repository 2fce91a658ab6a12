//! How a daemon says that it is ready: the datagram of sd_notify(3), understood by systemd as well.

use std::env;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Where a daemon finds the socket to report to.
pub const VARIABLE: &str = "NOTIFY_SOCKET";

/// How often the waiting side looks whether the daemon is still there.
const LOOK: Duration = Duration::from_millis(50);

/// Tells whoever started this process that it serves now; says whether anyone asked to know.
///
/// # Errors
/// The socket named by `NOTIFY_SOCKET` does not take the message.
pub fn notify_ready() -> io::Result<bool> {
    let Some(name) = env::var_os(VARIABLE) else { return Ok(false) };
    let address = match name.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(&name)?,
    };
    UnixDatagram::unbound()?.send_to_addr(b"READY=1", &address)?;
    Ok(true)
}

/// The waiting side: a socket whose name goes to one daemon.
#[derive(Debug)]
pub struct ReadySocket {
    socket: UnixDatagram,
    path: PathBuf,
}

/// How waiting ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// The daemon reported.
    Ready,
    /// The deadline passed.
    Late,
    /// The caller's check said that there is nothing to wait for any more.
    Stopped,
}

impl ReadySocket {
    /// Binds a socket at `path`, in a directory that only the daemon and we can enter.
    pub fn bind(path: &Path) -> io::Result<Self> {
        let socket = UnixDatagram::bind(path)?;
        socket.set_read_timeout(Some(LOOK))?;
        Ok(Self { socket, path: path.to_owned() })
    }

    /// The name for the daemon's `NOTIFY_SOCKET`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Waits for the report, and while `worth_waiting` says so.
    pub fn wait(
        &self,
        deadline: Instant,
        mut worth_waiting: impl FnMut() -> bool,
    ) -> io::Result<Readiness> {
        let mut message = [0; 256];
        loop {
            match self.socket.recv(&mut message) {
                Ok(length) if says_ready(message.get(..length).unwrap_or_default()) => {
                    return Ok(Readiness::Ready);
                }
                Ok(_) => {}
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                    ) => {}
                Err(error) => return Err(error),
            }
            if !worth_waiting() {
                return Ok(Readiness::Stopped);
            }
            if Instant::now() >= deadline {
                return Ok(Readiness::Late);
            }
        }
    }
}

impl Drop for ReadySocket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

fn says_ready(message: &[u8]) -> bool {
    message.split(|byte| *byte == b'\n').any(|line| line == b"READY=1")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn socket(name: &str) -> ReadySocket {
        let path = env::temp_dir().join(format!("bb-ready-{name}-{}", std::process::id()));
        ReadySocket::bind(&path).expect("binds")
    }

    #[test]
    fn a_report_among_other_lines_counts() {
        let socket = socket("lines");
        let daemon = UnixDatagram::unbound().expect("socket");
        daemon.send_to(b"STATUS=half way", socket.path()).expect("sent");
        daemon.send_to(b"STATUS=done\nREADY=1\n", socket.path()).expect("sent");
        let deadline = Instant::now() + Duration::from_secs(5);
        assert_eq!(socket.wait(deadline, || true).expect("waits"), Readiness::Ready);
        assert!(!says_ready(b"READY=10"));
    }

    #[test]
    fn waiting_ends_at_the_deadline_and_when_the_daemon_is_gone() {
        let socket = socket("ends");
        assert_eq!(socket.wait(Instant::now(), || true).expect("waits"), Readiness::Late);
        let far = Instant::now() + Duration::from_secs(60);
        assert_eq!(socket.wait(far, || false).expect("waits"), Readiness::Stopped);
    }
}
