//! Processes of other commands: identified by pid and start time, so that a reused pid is never signalled.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

use crate::namespace::NamespaceId;

mod end;

use end::End;

/// How long the kernel may take to end a process after SIGKILL.
const KILL_DEADLINE: Duration = Duration::from_secs(5);

/// One process, past or present.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessRecord {
    /// Its pid.
    pub pid: u32,
    /// When it started, in clock ticks since the machine's start (`/proc/PID/stat`, field 22).
    pub start_time: u64,
    /// The boot of the machine (`/proc/sys/kernel/random/boot_id`).
    pub boot_id: String,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stopped {
    /// It had already ended.
    AlreadyGone,
    /// It ended with an error, or by a fatal signal of its own, such as SIGSEGV.
    Failed,
    /// It outlived the deadline and was killed.
    Killed,
    /// Another process had killed it (SIGKILL), such as `kill -9` or the kernel without memory, and it was still ending.
    KilledByOther,
    /// It ended at SIGTERM.
    Terminated,
}

impl ProcessRecord {
    /// The record of a running process.
    pub fn of(pid: u32) -> io::Result<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        let Stat { start_time, .. } = parse_stat(&stat)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "unreadable /proc stat"))?;
        Ok(Self { pid, start_time, boot_id: boot_id()? })
    }

    /// The record of the calling process.
    pub fn of_caller() -> io::Result<Self> {
        Self::of(std::process::id())
    }

    /// Whether the process still runs; a zombie does not.
    pub fn is_running(&self) -> bool {
        self.stat().is_some_and(|stat| !stat.has_ended())
    }

    /// Whether the process is stopped, by SIGSTOP or a debugger.
    pub fn is_stopped(&self) -> bool {
        self.stat().is_some_and(|stat| stat.is_stopped())
    }

    /// The contents of `/proc` for this process, but not for a later one with the same pid.
    fn stat(&self) -> Option<Stat> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid)).ok()?;
        let stat = parse_stat(&stat).filter(|stat| stat.start_time == self.start_time)?;
        boot_id().is_ok_and(|boot_id| boot_id == self.boot_id).then_some(stat)
    }

    /// Opens the process; `None` if it is not running. The descriptor identifies it permanently.
    pub fn open(&self) -> io::Result<Option<OwnedFd>> {
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else {
            return Ok(None);
        };
        match pidfd_open(pid, PidfdFlags::empty()) {
            // Checked after opening: only now the start time belongs to the process of the descriptor.
            Ok(process) => Ok(self.is_running().then_some(process)),
            Err(rustix::io::Errno::SRCH) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// Ends processes together: SIGTERM to all, SIGKILL to those that remain after `grace`.
///
/// # Errors
/// A process that may not be signalled or that even SIGKILL did not end; the others are ended nevertheless.
pub fn stop_all(records: &[ProcessRecord], grace: Duration) -> io::Result<Vec<Stopped>> {
    let mut failure = None;
    let mut open = Vec::with_capacity(records.len());
    for record in records {
        let process = record.open().and_then(|process| match process {
            Some(process) => {
                let was_ending = record.stat().is_some_and(|stat| stat.is_ending);
                signal(&process, Signal::TERM)
                    .map(|running| running.then_some((process, was_ending)))
            }
            None => Ok(None),
        });
        open.push(process.unwrap_or_else(|error| {
            failure = Some(error);
            None
        }));
    }
    let deadline = Instant::now() + grace;
    let mut stopped = Vec::with_capacity(records.len());
    for process in &open {
        let ended = process.as_ref().map_or(Ok(Stopped::AlreadyGone), |(process, was_ending)| {
            end(process, *was_ending, deadline)
        });
        stopped.push(ended.unwrap_or_else(|error| {
            failure = Some(error);
            Stopped::AlreadyGone
        }));
    }
    failure.map_or(Ok(stopped), Err)
}

/// Kills a process and waits for its end.
///
/// # Errors
/// It may not be signalled, or even SIGKILL did not end it.
pub fn kill(record: &ProcessRecord) -> io::Result<Stopped> {
    let Some(process) = record.open()? else { return Ok(Stopped::AlreadyGone) };
    if !signal(&process, Signal::KILL)? {
        return Ok(Stopped::AlreadyGone);
    }
    await_killed(&process)
}

/// Every process, except the caller's, for which `wanted` is true.
pub fn find(wanted: impl Fn(u32) -> bool) -> Vec<ProcessRecord> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid| *pid != std::process::id())
        // The record comes first: if the pid is reused before the check, the start time
        // differs, and no other process is signalled.
        .filter_map(|pid| ProcessRecord::of(pid).ok())
        .filter(|record| wanted(record.pid) && record.is_running())
        .collect()
}

/// Whether the process was started with the environment variable set to `value`.
pub fn has_environment(pid: u32, variable: &str, value: &str) -> bool {
    environment(pid, variable).is_some_and(|it| it.as_encoded_bytes() == value.as_bytes())
}

/// An environment variable with which the process was started; `None` also if the caller may not read it.
pub fn environment(pid: u32, variable: &str) -> Option<OsString> {
    let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let value = environment
        .split(|byte| *byte == 0)
        .find_map(|it| it.strip_prefix(variable.as_bytes()).and_then(|it| it.strip_prefix(b"=")));
    value.map(|value| OsString::from_vec(value.to_vec()))
}

/// The process that has a UDP port (IPv6) in the caller's network namespace, with its name, if /proc shows it to the
/// caller. `None` also if several have it, on different interfaces: nothing tells which one is meant.
pub fn holder_of_udp_port(port: u16) -> Option<(u32, String)> {
    let sockets = fs::read_to_string("/proc/thread-self/net/udp6").ok()?;
    let links: Vec<_> = sockets
        .lines()
        .filter_map(|line| socket_of(line, port))
        .map(|inode| PathBuf::from(format!("socket:[{inode}]")))
        .collect();
    if links.is_empty() {
        return None;
    }
    let holders = find(|pid| {
        let open = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        open.filter_map(|entry| fs::read_link(entry.path()).ok()).any(|link| links.contains(&link))
    });
    let [holder] = holders.as_slice() else { return None };
    let name = fs::read_to_string(format!("/proc/{}/comm", holder.pid)).ok()?;
    Some((holder.pid, name.trim_end().to_owned()))
}

/// The inode of the socket in a line of `/proc/net/udp6`, if it has the port (proc_pid_net(5)).
fn socket_of(line: &str, port: u16) -> Option<u64> {
    let mut fields = line.split_whitespace();
    let (_, number) = fields.nth(1)?.rsplit_once(':')?;
    let inode = fields.nth(7)?.parse().ok()?;
    u16::from_str_radix(number, 16).is_ok_and(|it| it == port).then_some(inode)
}

/// Whether the process is in one of the namespaces of a kind (`net`, `user`).
pub fn lives_in(pid: u32, kind: &str, namespaces: &[NamespaceId]) -> bool {
    NamespaceId::of(format!("/proc/{pid}/ns/{kind}")).is_ok_and(|id| namespaces.contains(&id))
}

/// Waits for the end of a process that got SIGTERM; `was_ending` if it was ending before.
fn end(process: &OwnedFd, was_ending: bool, deadline: Instant) -> io::Result<Stopped> {
    match wait_until(process, deadline)? {
        Some(end) => Ok(stopped_by(end, was_ending)),
        None => {
            signal(process, Signal::KILL)?;
            await_killed(process)
        }
    }
}

/// What a process's end before SIGKILL says about it.
fn stopped_by(end: End, was_ending: bool) -> Stopped {
    const KILL: i32 = Signal::KILL.as_raw();
    // It ends a process that does not handle it, and a shell says so with its exit code.
    const TERM: i32 = Signal::TERM.as_raw();
    const OF_SHELL: i32 = 128 + TERM;
    match end {
        End::Unknown if was_ending => Stopped::AlreadyGone,
        End::Exit(0 | OF_SHELL) | End::Signal(TERM) | End::Unknown => Stopped::Terminated,
        End::Signal(KILL) => Stopped::KilledByOther,
        End::Exit(_) | End::Signal(_) => Stopped::Failed,
    }
}

fn await_killed(process: &OwnedFd) -> io::Result<Stopped> {
    match wait_until(process, Instant::now() + KILL_DEADLINE)? {
        Some(_) => Ok(Stopped::Killed),
        None => Err(io::Error::new(io::ErrorKind::TimedOut, "a process did not end after SIGKILL")),
    }
}

/// Signals; `false` if the process is gone.
fn signal(process: &OwnedFd, signal: Signal) -> io::Result<bool> {
    match pidfd_send_signal(process, signal) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::SRCH) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

/// How the process ended; `None` if it did not until the deadline.
fn wait_until(process: &OwnedFd, deadline: Instant) -> io::Result<Option<End>> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
        let mut polled = [PollFd::new(process, PollFlags::IN)];
        match poll(&mut polled, Some(&timeout)) {
            Ok(0) => return Ok(None),
            Ok(_) => return Ok(Some(end::of(process))),
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// The needed fields of `/proc/PID/stat` (proc_pid_stat(5)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stat {
    /// The state of the first thread.
    state: char,
    thread_count: u64,
    start_time: u64,
    /// Whether its first thread ends, or has to because of SIGKILL.
    is_ending: bool,
}

impl Stat {
    /// The first thread of a killed process may end before the others, which still hold all open
    /// files: the ports on which it listens, for example.
    const fn has_ended(&self) -> bool {
        matches!(self.state, 'Z' | 'X') && self.thread_count <= 1
    }

    /// SIGSTOP stops all threads; so does usually a debugger that stops the first one.
    const fn is_stopped(&self) -> bool {
        matches!(self.state, 'T' | 't')
    }
}

/// The name before the state may contain any character.
fn parse_stat(stat: &str) -> Option<Stat> {
    /// `PF_EXITING` of linux/sched.h.
    const EXITING: u64 = 4;
    /// The bit of SIGKILL among the pending signals.
    const KILL: u64 = 1 << (Signal::KILL.as_raw() - 1);
    let (_, fields) = stat.rsplit_once(") ")?;
    let fields: Vec<&str> = fields.split_whitespace().collect();
    // The first of them has number 3.
    let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
    let has = |field, bit| number(field).is_some_and(|bits| bits & bit != 0);
    Some(Stat {
        state: fields.first()?.chars().next()?,
        thread_count: number(20)?,
        start_time: number(22)?,
        is_ending: has(9, EXITING) || has(31, KILL),
    })
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::process::{Child, Command, Stdio};

    use bluebridge_testkit::{example, until};

    use super::*;

    fn sleeper(script: &str) -> Child {
        let mut child = Command::new("sh");
        child.args(["-c", script]).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = child.spawn().expect("sh starts");
        let mut ready = [0];
        io::Read::read_exact(child.stdout.as_mut().expect("piped"), &mut ready).expect("ready");
        child
    }

    #[test]
    fn the_stat_line_is_read_past_a_name_with_brackets() {
        let stat = "7 (a) R (b)) S 1 7 7 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 3 0 4242 1 1";
        let expected = Stat { state: 'S', thread_count: 3, start_time: 4242, is_ending: false };
        assert_eq!(parse_stat(stat), Some(expected));
        let ending = Some(Stat { is_ending: true, ..expected });
        assert_eq!(parse_stat(&stat.replace("4194560", "4194564")), ending);
        let signals = |pending: u32| format!("{stat} 0 0 0 0 0 0 {pending}");
        assert_eq!(parse_stat(&signals(0x4000)), Some(expected), "SIGTERM");
        assert_eq!(parse_stat(&signals(0x4100)), ending, "SIGKILL, too");
        assert_eq!(parse_stat("7 (a) S 1 2"), None);
        assert_eq!(parse_stat(""), None);
    }

    /// Before Linux 6.15 the kernel may not tell how a process ended.
    #[test]
    fn a_process_that_was_ending_before_sigterm_did_not_end_at_it() {
        assert_eq!(stopped_by(End::Unknown, true), Stopped::AlreadyGone);
        assert_eq!(stopped_by(End::Unknown, false), Stopped::Terminated);
        assert_eq!(stopped_by(End::Signal(9), true), Stopped::KilledByOther);
    }

    #[test]
    fn a_process_ends_with_its_last_thread() {
        let ended = |state, thread_count| {
            Stat { state, thread_count, start_time: 1, is_ending: true }.has_ended()
        };
        assert!(ended('Z', 1) && ended('X', 0));
        assert!(!ended('Z', 2) && !ended('S', 1));
    }

    #[test]
    fn a_process_whose_first_thread_has_ended_is_ended_with_all_that_it_holds() {
        for end in [kill, |record: &ProcessRecord| {
            let ends = stop_all(std::slice::from_ref(record), Duration::from_secs(20))?;
            Ok(ends[0])
        }] {
            let free = TcpListener::bind("[::1]:0").expect("bound");
            let address = free.local_addr().expect("an address").to_string();
            drop(free);
            let mut child = Command::new(example("leaderless_daemon"));
            let mut child = child.arg(&address).spawn().expect("starts");
            let record = ProcessRecord::of(child.id()).expect("runs");
            until("only the second thread is left", || {
                record.stat().is_some_and(|stat| stat.state == 'Z' && stat.thread_count == 1 + 1)
            });
            assert!(TcpListener::bind(&address).is_err(), "the second thread listens");
            assert!(record.is_running());
            assert_ne!(end(&record).expect("may signal its own"), Stopped::AlreadyGone);
            TcpListener::bind(&address).expect("nothing holds the address any more");
            let _ = child.wait();
        }
    }

    #[test]
    fn a_stopped_process_runs_and_is_seen_to_be_stopped() {
        let mut child = sleeper("echo; exec sleep 60");
        let record = ProcessRecord::of(child.id()).expect("runs");
        assert!(!record.is_stopped());
        let process = record.open().expect("may be opened").expect("runs");
        signal(&process, Signal::STOP).expect("signalled");
        until("it is stopped", || record.is_stopped());
        assert!(record.is_running());
        kill(&record).expect("may signal its own");
        assert!(!record.is_stopped());
        let _ = child.wait();
    }

    #[test]
    fn a_willing_process_is_terminated_and_a_stubborn_one_killed() {
        let mut willing = sleeper("echo; exec sleep 60");
        let mut stubborn = sleeper("trap '' TERM; echo; while :; do sleep 0.1; done");
        let records =
            [&willing, &stubborn].map(|child| ProcessRecord::of(child.id()).expect("runs"));
        let stopped = stop_all(&records, Duration::from_secs(2)).expect("may signal its own");
        assert_eq!(stopped, [Stopped::Terminated, Stopped::Killed]);
        assert!(records.iter().all(|record| !record.is_running()));
        let again = stop_all(&records, Duration::ZERO).expect("nothing to signal");
        assert_eq!(again, [Stopped::AlreadyGone, Stopped::AlreadyGone]);
        assert!(willing.wait().is_err() && stubborn.wait().is_err(), "waited for already");
    }

    #[test]
    fn killing_sends_no_sigterm() {
        let mut child = sleeper("trap 'exit 0' TERM; echo; while :; do sleep 0.1; done");
        let record = ProcessRecord::of(child.id()).expect("runs");
        assert_eq!(kill(&record).expect("may signal its own"), Stopped::Killed);
        assert_eq!(kill(&record).expect("nothing to signal"), Stopped::AlreadyGone);
        assert!(child.wait().is_err(), "waited for already");
    }

    #[test]
    fn a_reused_pid_is_another_process() {
        let mut record = ProcessRecord::of_caller().expect("runs");
        assert!(record.is_running());
        record.start_time += 1;
        assert!(!record.is_running());
        let stopped = stop_all(&[record], Duration::ZERO).expect("signals nothing");
        assert_eq!(stopped, [Stopped::AlreadyGone]);
    }

    #[test]
    fn the_holder_of_a_port_is_found_if_it_is_one_other_process() {
        let line = "  7: 00000000000000000000000000000000:12B9 00000000000000000000000000000000:0000 \
                    07 00000000:00000000 00:00000000 00000000     0        0 4711 2 0 0";
        assert_eq!((socket_of(line, 0x12b9), socket_of(line, 9)), (Some(4711), None));
        assert_eq!(socket_of("  sl  local_address  remote_address", 9), None);
        let socket = std::net::UdpSocket::bind("[::]:0").expect("bound");
        let port = socket.local_addr().expect("an address").port();
        assert_eq!(holder_of_udp_port(port), None, "the caller itself is no other process");
        let mut child = Command::new("sh");
        child.args(["-c", "echo; read end"]).stdin(Stdio::from(OwnedFd::from(socket)));
        let mut child = child.stdout(Stdio::piped()).spawn().expect("sh starts");
        let found = until_some(|| holder_of_udp_port(port));
        assert_eq!(found, (child.id(), "sh".to_owned()));
        kill(&ProcessRecord::of(child.id()).expect("runs")).expect("may signal its own");
        let _ = child.wait();
    }

    fn until_some<T>(mut find: impl FnMut() -> Option<T>) -> T {
        let mut found = None;
        until("it is found", || {
            found = find();
            found.is_some()
        });
        found.expect("it was found")
    }

    #[test]
    fn processes_are_found_by_their_environment() {
        let mut child = Command::new("sh");
        child.args(["-c", "echo; read end"]).env("BLUEBRIDGE_TEST_MARK", "here");
        let mut child =
            child.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("sh starts");
        // A process that was just started may not show its environment yet: execve(2) sets it late.
        let mut ready = [0];
        io::Read::read_exact(child.stdout.as_mut().expect("piped"), &mut ready).expect("ready");
        let found = find(|pid| has_environment(pid, "BLUEBRIDGE_TEST_MARK", "here"));
        assert_eq!(found.iter().map(|record| record.pid).collect::<Vec<_>>(), [child.id()]);
        stop_all(&found, Duration::from_secs(5)).expect("may signal its own");
        let _ = child.wait();
    }
}
