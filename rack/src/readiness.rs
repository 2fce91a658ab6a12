//! How a daemon reports readiness and progress: the datagrams of sd_notify(3), which systemd
//! understands as well.

use std::env;
use std::fmt;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// The variable that names a daemon's socket for reports.
pub const VARIABLE: &str = "NOTIFY_SOCKET";

/// The field of a datagram with which a memory server reports [`KeptMemory`]. Systemd ignores it.
const KEPT_MEMORY: &str = "X_BLUEBRIDGE_KEPT_MEMORY";

/// The field with which a memory server that does not start reports why, with what to do.
const FAILURE: &str = "X_BLUEBRIDGE_FAILURE";

/// The most characters of a reason that is reported.
const REASON_MAX: usize = 1000;

/// The most bytes of a datagram: a reason, and the other fields.
const REPORT_BYTES: usize = 8192;

/// How often the waiting side checks whether the daemon still runs.
const LOOK: Duration = Duration::from_millis(50);

/// Reports to the starter of this process that it is ready; returns whether there is a receiver.
///
/// # Errors
/// The socket in `NOTIFY_SOCKET` does not accept the message.
pub fn notify_ready() -> io::Result<bool> {
    send_ready("READY=1")
}

fn send_ready(message: &str) -> io::Result<bool> {
    let Some((socket, address)) = reporting()? else { return Ok(false) };
    socket.send_to_addr(message.as_bytes(), &address)?;
    Ok(true)
}

/// Like [`notify_ready`], for a daemon: its starter may have stopped waiting, and removed the socket. That is
/// no reason to end, so it is only logged.
pub fn report_ready() {
    log_ready(notify_ready());
}

/// Like [`report_ready`], for a memory server.
pub fn report_server_ready(kept: &KeptMemory) {
    log_ready(send_ready(&server_report(kept)));
}

/// Reports to the starter of this process why it does not start, and what to do: one line, which the starter shows instead
/// of the log.
pub fn report_failure(words: &str) {
    let sent = send_ready(&format!("STATUS={0}\n{FAILURE}={0}", limited_line(words)));
    if let Err(error) = sent {
        tracing::debug!(%error, "the failure is only in the log");
    }
}

/// Each field is a line: the name of a file may contain others.
fn server_report(kept: &KeptMemory) -> String {
    format!("READY=1\nSTATUS={}\n{KEPT_MEMORY}={}", one_line(&kept.to_string()), kept.field())
}

fn limited_line(text: &str) -> String {
    one_line(text).chars().take(REASON_MAX).collect()
}

/// The text without control characters.
fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

fn log_ready(notified: io::Result<bool>) {
    match notified {
        Ok(has_receiver) => tracing::debug!(has_receiver, "ready"),
        Err(error) => {
            tracing::warn!(%error, "ready, but the starter no longer waits for this report");
        }
    }
}

/// Reports to the starter of this process what it does, and requests `more` time from now on.
///
/// A report that cannot be sent at once is dropped: the next one is newer.
///
/// # Errors
/// The socket in `NOTIFY_SOCKET` does not exist.
pub fn notify_progress(doing: &str, more: Duration) -> io::Result<bool> {
    let Some((socket, address)) = reporting()? else { return Ok(false) };
    socket.set_nonblocking(true)?;
    let message = format!("STATUS={doing}\nEXTEND_TIMEOUT_USEC={}", more.as_micros());
    match socket.send_to_addr(message.as_bytes(), &address) {
        Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
        _ => Ok(true),
    }
}

/// Whether a memory server's memory outlives its process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptMemory {
    /// Whether it does.
    pub is_kept: bool,
    /// Why not, or until when only; `None` if it is kept as long as the machine runs.
    pub reason: Option<String>,
    /// It is not kept as it is now, but with what `reason` says the next process goes on with it.
    #[serde(default)]
    pub is_recoverable: bool,
}

impl KeptMemory {
    /// It is kept as long as the machine runs.
    pub const KEPT: Self = Self { is_kept: true, reason: None, is_recoverable: false };

    /// It ends with the process.
    pub fn lost(reason: impl fmt::Display) -> Self {
        Self { is_kept: false, reason: Some(reason.to_string()), is_recoverable: false }
    }

    /// It is there, but the next process could not use it as it is now.
    pub fn unreachable(reason: impl fmt::Display) -> Self {
        Self { is_recoverable: true, ..Self::lost(reason) }
    }

    /// It outlives the process, but something else ends it.
    pub fn limited(reason: impl fmt::Display) -> Self {
        Self { is_kept: true, ..Self::lost(reason) }
    }

    /// In one line. A server reports only what is final.
    fn field(&self) -> String {
        let word = if self.is_kept { "kept" } else { "lost" };
        let reason = self.reason.as_deref().unwrap_or("");
        format!("{word}:{}", limited_line(reason))
    }

    /// `None` if another program reports.
    fn of_field(field: &str) -> Option<Self> {
        let (word, reason) = field.split_once(':')?;
        let reason = (!reason.is_empty()).then(|| reason.to_owned());
        let is_kept = match word {
            "kept" => true,
            "lost" => false,
            _ => return None,
        };
        Some(Self { is_kept, reason, is_recoverable: false })
    }
}

/// What follows "the memory".
impl fmt::Display for KeptMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match (self.is_kept, &self.reason) {
            (true, None) => "outlives the process",
            (true, Some(_)) => "outlives the process for a limited time",
            (false, _) if self.is_recoverable => "cannot be used by the next process",
            (false, _) => "ends with the process",
        })?;
        self.reason.as_ref().map_or(Ok(()), |reason| write!(f, ": {reason}"))
    }
}

fn reporting() -> io::Result<Option<(UnixDatagram, SocketAddr)>> {
    let Some(name) = env::var_os(VARIABLE) else { return Ok(None) };
    let address = match name.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(&name)?,
    };
    Ok(Some((UnixDatagram::unbound()?, address)))
}

/// The waiting side: a socket whose name is passed to one daemon.
#[derive(Debug)]
pub struct ReadySocket {
    socket: UnixDatagram,
    path: PathBuf,
    doing: Option<String>,
    kept: Option<KeptMemory>,
    failure: Option<String>,
}

/// How long to wait for a daemon.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// The deadline without requests for more time.
    pub deadline: Instant,
    /// The last possible deadline, however often it is extended.
    pub limit: Instant,
}

impl Patience {
    /// Waits until the deadline, whatever the daemon requests.
    pub fn until(deadline: Instant) -> Self {
        Self { deadline, limit: deadline }
    }
}

/// The result of waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// The daemon reported.
    Ready,
    /// The deadline passed.
    Late,
    /// The caller's check ended the wait.
    Stopped,
}

impl ReadySocket {
    /// Binds a socket at `path`, in a directory that only the daemon and this process can enter.
    pub fn bind(path: &Path) -> io::Result<Self> {
        let socket = UnixDatagram::bind(path)?;
        socket.set_read_timeout(Some(LOOK))?;
        Ok(Self { socket, path: path.to_owned(), doing: None, kept: None, failure: None })
    }

    /// The name for the daemon's `NOTIFY_SOCKET`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The last reported action of the daemon.
    pub fn doing(&self) -> Option<&str> {
        self.doing.as_deref()
    }

    /// What a memory server reported with its readiness.
    pub fn kept(&self) -> Option<&KeptMemory> {
        self.kept.as_ref()
    }

    /// Why a daemon that has ended did not start, in one line, if it reported that.
    pub fn failure(&mut self) -> Option<&str> {
        // It may have come after the last look.
        if self.failure.is_none() && self.socket.set_nonblocking(true).is_ok() {
            let mut message = [0; REPORT_BYTES];
            while let Ok(length) = self.socket.recv(&mut message) {
                let report = Report::of(message.get(..length).unwrap_or_default());
                self.failure = report.failure.or_else(|| self.failure.take());
            }
        }
        self.failure.as_deref()
    }

    /// Waits for the report while `worth_waiting` returns true.
    pub fn wait(
        &mut self,
        patience: Patience,
        mut worth_waiting: impl FnMut() -> bool,
    ) -> io::Result<Readiness> {
        let Patience { mut deadline, limit } = patience;
        let mut message = [0; REPORT_BYTES];
        loop {
            match self.socket.recv(&mut message) {
                Ok(length) => {
                    let report = Report::of(message.get(..length).unwrap_or_default());
                    if report.ready {
                        self.kept = report.kept;
                        return Ok(Readiness::Ready);
                    }
                    self.failure = report.failure.or_else(|| self.failure.take());
                    if report.doing.is_some() {
                        self.doing = report.doing;
                    }
                    let more = report.more.and_then(|more| Instant::now().checked_add(more));
                    deadline = more.map_or(deadline, |more| deadline.max(more.min(limit)));
                }
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

/// The contents of a daemon's datagram; other lines are ignored.
#[derive(Debug, Default)]
struct Report {
    ready: bool,
    doing: Option<String>,
    more: Option<Duration>,
    kept: Option<KeptMemory>,
    failure: Option<String>,
}

impl Report {
    fn of(message: &[u8]) -> Self {
        let mut report = Self::default();
        for line in String::from_utf8_lossy(message).lines() {
            match line.split_once('=') {
                Some(("READY", "1")) => report.ready = true,
                Some((FAILURE, words)) => report.failure = Some(words.to_owned()),
                Some((KEPT_MEMORY, field)) => report.kept = KeptMemory::of_field(field),
                Some(("STATUS", doing)) => report.doing = Some(doing.to_owned()),
                Some(("EXTEND_TIMEOUT_USEC", more)) => {
                    report.more = more.parse().ok().map(Duration::from_micros);
                }
                _ => {}
            }
        }
        report
    }
}

#[cfg(test)]
mod tests {
    use bluebridge_testkit::Scratch;

    use super::*;

    /// A socket, and the directory that it is in.
    fn socket() -> (ReadySocket, Scratch) {
        let scratch = Scratch::new("ready");
        (ReadySocket::bind(&scratch.file("socket")).expect("binds"), scratch)
    }

    #[test]
    fn the_name_of_a_file_adds_no_line_to_a_report() {
        let kept = KeptMemory::lost("/dev/shm/a\nMAINPID=1\r is full");
        let report = server_report(&kept);
        assert_eq!(report.lines().count(), 3, "{report:?}");
        assert!(report.lines().all(|line| !line.starts_with("MAINPID")), "{report:?}");
        assert!(!report.contains('\r'), "{report:?}");
    }

    #[test]
    fn a_report_among_other_lines_counts() {
        let (mut socket, _scratch) = socket();
        let daemon = UnixDatagram::unbound().expect("socket");
        daemon.send_to(b"STATUS=half way", socket.path()).expect("sent");
        daemon.send_to(b"STATUS=done\nREADY=1\n", socket.path()).expect("sent");
        let patience = Patience::until(Instant::now() + Duration::from_secs(5));
        assert_eq!(socket.wait(patience, || true).expect("waits"), Readiness::Ready);
        assert!(!Report::of(b"READY=10").ready);
    }

    #[test]
    fn a_reason_of_any_length_arrives_in_one_line() {
        let reasons = [
            ("a file system\nREADY=1\n", Some("a file system READY=1 ".to_owned())),
            (&"\u{20ac}".repeat(5000), Some("\u{20ac}".repeat(REASON_MAX))),
            ("", None),
        ];
        for (reason, arrives) in reasons {
            for (kept, is_kept) in
                [(KeptMemory::limited(reason), true), (KeptMemory::lost(reason), false)]
            {
                let (mut socket, _scratch) = socket();
                let daemon = UnixDatagram::unbound().expect("socket");
                let message = format!("READY=1\n{KEPT_MEMORY}={}\n", kept.field());
                daemon.send_to(message.as_bytes(), socket.path()).expect("sent");
                let patience = Patience::until(Instant::now() + Duration::from_secs(5));
                assert_eq!(socket.wait(patience, || true).expect("waits"), Readiness::Ready);
                assert_eq!(
                    socket.kept(),
                    Some(&KeptMemory { is_kept, reason: arrives.clone(), is_recoverable: false })
                );
            }
        }
        assert_eq!(KeptMemory::of_field("else"), None);
        assert_eq!(KeptMemory::of_field("else:where"), None);
    }

    #[test]
    fn a_failure_is_known_also_if_it_comes_after_the_last_look() {
        let (mut socket, _scratch) = socket();
        let daemon = UnixDatagram::unbound().expect("socket");
        let far = Patience::until(Instant::now() + Duration::from_secs(60));
        assert_eq!(socket.wait(far, || false).expect("waits"), Readiness::Stopped);
        assert_eq!(socket.failure(), None);
        let report = format!("STATUS=x\n{FAILURE}={}", limited_line("damaged;\nREADY=1"));
        daemon.send_to(report.as_bytes(), socket.path()).expect("sent");
        assert_eq!(socket.failure(), Some("damaged; READY=1"));
    }

    #[test]
    fn waiting_ends_at_the_deadline_and_when_the_daemon_is_gone() {
        let (mut socket, _scratch) = socket();
        let now = Patience::until(Instant::now());
        assert_eq!(socket.wait(now, || true).expect("waits"), Readiness::Late);
        let far = Patience::until(Instant::now() + Duration::from_secs(60));
        assert_eq!(socket.wait(far, || false).expect("waits"), Readiness::Stopped);
    }

    /// The number of checks until a daemon that requests a minute at every check is given up.
    fn checks_of_a_daemon_that_requests(socket: &mut ReadySocket, limit: Duration) -> usize {
        let daemon = UnixDatagram::unbound().expect("socket");
        let path = socket.path().to_owned();
        let now = Instant::now();
        let patience = Patience { deadline: now, limit: now + limit };
        let mut looks = 0;
        let request_time = || {
            looks += 1;
            let report = b"STATUS=taking memory\nEXTEND_TIMEOUT_USEC=60000000";
            daemon.send_to(report, &path).expect("sent");
            looks < 20
        };
        let readiness = socket.wait(patience, request_time).expect("waits");
        assert_eq!(readiness == Readiness::Stopped, looks == 20);
        looks
    }

    #[test]
    fn one_that_asks_for_time_gets_it_up_to_a_limit() {
        let (mut socket, _scratch) = socket();
        let daemon = UnixDatagram::unbound().expect("socket");
        let first = b"STATUS=about to take memory\nEXTEND_TIMEOUT_USEC=60000000";
        daemon.send_to(first, socket.path()).expect("sent");
        assert_eq!(checks_of_a_daemon_that_requests(&mut socket, Duration::from_secs(60)), 20);
        assert_eq!(socket.doing(), Some("taking memory"));
        assert_eq!(
            checks_of_a_daemon_that_requests(&mut socket, Duration::ZERO),
            1,
            "that was the limit"
        );
    }
}
