//! How a process ended.

use std::fs;
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use rustix::ioctl::{Updater, ioctl, opcode};
use rustix::process::{WaitId, WaitIdOptions, waitid};

/// The end of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// With this exit code.
    Exit(i32),
    /// By this signal.
    Signal(i32),
    /// The kernel does not tell.
    Unknown,
}

impl End {
    /// From a status as wait(2) has it.
    const fn of_status(status: i32) -> Self {
        match status & 0x7f {
            0 => Self::Exit((status >> 8) & 0xff),
            signal => Self::Signal(signal),
        }
    }
}

/// How long the parent of a process may take to wait for it. Init does so at once.
const REAPED: Duration = Duration::from_millis(500);

/// How often to look meanwhile.
const LOOK: Duration = Duration::from_millis(5);

/// How a process ended that has. A child of this process is waited for, so that it does not stay as a zombie.
pub(super) fn of(process: &OwnedFd) -> End {
    if let Ok(Some(status)) = waitid(WaitId::PidFd(process.as_fd()), WaitIdOptions::EXITED) {
        let signal = status.terminating_signal().map(End::Signal);
        return status.exit_status().map(End::Exit).or(signal).unwrap_or(End::Unknown);
    }
    // If another process is its parent, the kernel tells by /proc until that one has waited for it, and by the descriptor
    // from then on.
    let deadline = Instant::now() + REAPED;
    loop {
        if let Some(end) = of_zombie(process).or_else(|| of_reaped(process)) {
            return end;
        }
        // Before Linux 6.15 the descriptor does not tell.
        if pid_of(process).is_none() || Instant::now() >= deadline {
            return of_reaped(process).unwrap_or(End::Unknown);
        }
        thread::sleep(LOOK);
    }
}

/// The pid of the process of a descriptor; `None` if its parent has waited for it.
fn pid_of(process: &OwnedFd) -> Option<u32> {
    let about = fs::read_to_string(format!("/proc/self/fdinfo/{}", process.as_raw_fd())).ok()?;
    let pid = about.lines().find_map(|line| line.strip_prefix("Pid:"))?;
    // 0 in another pid namespace, and -1 later.
    pid.trim().parse().ok().filter(|pid| *pid != 0)
}

/// From `/proc/PID/stat` (field 52), which shows it to whoever may trace the process.
fn of_zombie(process: &OwnedFd) -> Option<End> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid_of(process)?)).ok()?;
    // The pid may have been reused meanwhile.
    pid_of(process)?;
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut fields = fields.split_whitespace();
    let is_zombie = fields.next()? == "Z";
    let status = fields.nth(48)?.parse().ok()?;
    is_zombie.then(|| End::of_status(status))
}

/// The beginning of `struct pidfd_info` of linux/pidfd.h.
#[derive(Debug, Default)]
#[repr(C)]
struct PidfdInfo {
    mask: u64,
    cgroup: u64,
    ids: [u32; 11],
    status: i32,
}

/// `PIDFD_INFO_SIZE_VER0`, which is a part of the number of the request.
const _: () = assert!(size_of::<PidfdInfo>() == 64 && offset_of!(PidfdInfo, status) == 60);

/// `PIDFD_INFO_EXIT`.
const EXIT: u64 = 1 << 3;

/// From the descriptor, since Linux 6.15; `None` if the kernel does not know it, or not yet.
fn of_reaped(process: &OwnedFd) -> Option<End> {
    let mut info = PidfdInfo { mask: EXIT, ..PidfdInfo::default() };
    // SAFETY: the request PIDFD_GET_INFO reads and writes at most as many bytes as its number says, and every bit
    // pattern is valid for them.
    let request = unsafe {
        Updater::<{ opcode::read_write::<PidfdInfo>(0xff, 11) }, PidfdInfo>::new(&mut info)
    };
    // SAFETY: a descriptor that is no pidfd, and a kernel that does not know the request, refuse it.
    unsafe { ioctl(process, request) }.ok()?;
    (info.mask & EXIT != 0).then(|| End::of_status(info.status))
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    use super::super::{ProcessRecord, Stopped, stop_all};
    use super::*;

    #[test]
    fn a_status_is_an_exit_code_or_a_signal() {
        assert_eq!(End::of_status(0), End::Exit(0));
        assert_eq!(End::of_status(3 << 8), End::Exit(3));
        assert_eq!(End::of_status(9), End::Signal(9));
        assert_eq!(End::of_status(11 | 0x80), End::Signal(11), "with a core dump");
    }

    /// Stops a process of which this one is not the parent: its parent is a shell that waits for it.
    fn end_of_grandchild(script: &str) -> Stopped {
        let script = format!("{script} & echo $!; wait");
        let mut shell = Command::new("sh");
        shell.args(["-c", &script]).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut shell = shell.spawn().expect("sh starts");
        let mut lines = BufReader::new(shell.stdout.take().expect("piped")).lines();
        let mut next = || lines.next().expect("a line").expect("text");
        let mut words = [next(), next()];
        // The process and its parent write one line each.
        words.sort_by_key(|word| word == "ready");
        let record = ProcessRecord::of(words[0].parse().expect("a pid")).expect("it runs");
        let ends = stop_all(&[record], Duration::from_secs(10)).expect("may signal its own");
        let _ = shell.wait();
        ends[0]
    }

    /// Linux 6.15 tells; an older kernel may not, and then it counts as ended in order.
    #[test]
    fn the_end_of_a_process_of_another_parent_is_known() {
        let ends_by = |words: &str| {
            end_of_grandchild(&format!(
                "sh -c \"trap '{words}' TERM; echo ready; while :; do sleep 0.02; done\""
            ))
        };
        assert_eq!(ends_by("exit 0"), Stopped::Terminated);
        let tells = [ends_by("exit 3"), ends_by("kill -KILL \\$\\$")];
        let release = rustix::system::uname().release().to_string_lossy().into_owned();
        let mut numbers = release.split(['.', '-']).filter_map(|word| word.parse::<u32>().ok());
        let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        if version >= (6, 15) {
            assert_eq!(tells, [Stopped::Failed, Stopped::KilledByOther]);
        }
    }

    #[test]
    fn a_child_that_fails_or_is_killed_by_another_did_not_end_in_order() {
        for (words, end) in [
            ("exit 0", Stopped::Terminated),
            ("exit 3", Stopped::Failed),
            ("kill -KILL $$", Stopped::KilledByOther),
            ("kill -SEGV $$", Stopped::Failed),
        ] {
            let script = format!("trap '{words}' TERM; echo; while :; do sleep 0.02; done");
            let mut child = Command::new("sh");
            child.args(["-c", &script]).stdin(Stdio::null()).stdout(Stdio::piped());
            let mut child = child.spawn().expect("sh starts");
            let mut ready = String::new();
            let mut output = BufReader::new(child.stdout.take().expect("piped"));
            output.read_line(&mut ready).expect("ready");
            let record = ProcessRecord::of(child.id()).expect("it runs");
            let ends = stop_all(&[record], Duration::from_secs(10)).expect("may signal its own");
            assert_eq!(ends, [end], "{words}");
            let _ = child.wait();
        }
    }
}
