//! The isolation of test processes, and the removal of what a killed run left.
//!
//! nextest starts each test through `xtask isolated`. If the tier `root` runs, each test gets its own
//! mount and process namespace: names in `/run`, memory in `/dev/shm` and pins in `/sys/fs/bpf`
//! cannot conflict with those of another test, and when the test ends or is killed, all its processes end too.

use std::{
    ffi::{CStr, OsStr, OsString},
    fs, io,
    os::unix::{
        fs::PermissionsExt,
        process::{CommandExt, ExitStatusExt},
    },
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    thread,
    time::Duration,
};

use rustix::{
    mount::{MountFlags, UnmountFlags, mount, unmount},
    process::{Pid, Signal, WaitOptions, getpid, kill_process, waitpid},
};

use crate::command::Failure;

/// Marks every process of a run with the directory of its temporary files.
pub(super) const RUN_VARIABLE: &str = "BLUEBRIDGE_TEST_RUN";
/// The directory of the programs that tests may call.
pub(super) const PATH_VARIABLE: &str = "BLUEBRIDGE_TEST_PATH";

/// Set if each test must have its own namespaces, which needs root.
pub(super) const NAMESPACES_VARIABLE: &str = "BLUEBRIDGE_TEST_NAMESPACES";

/// If memory is short, the kernel ends tests before other programs (proc_pid_oom_score_adj(5)).
const OOM_SCORE_ADJUSTMENT: &str = "500";
/// How often to look again for processes that appear while others are killed.
const SWEEPS: usize = 50;
const SWEEP_PAUSE: Duration = Duration::from_millis(20);

/// `xtask isolated PROGRAM ARGUMENT..`: runs a test, isolated as far as this user is permitted.
pub(crate) fn isolated(arguments: &[String]) -> Result<ExitCode, Failure> {
    let [program, rest @ ..] = arguments else {
        return Err(Failure::usage("isolated: PROGRAM is missing"));
    };
    let is_listing = rest.iter().any(|argument| argument == "--list");
    if !is_listing {
        make_temporary_directory()?;
    }
    if is_listing || std::env::var_os(NAMESPACES_VARIABLE).is_none() {
        return Err(replace(command(program, rest)));
    }
    let own = std::env::current_exe().map_err(|error| failed("find itself", &error))?;
    let mut unshare = Command::new("unshare");
    unshare
        .args(["--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"])
        .args(["--mount-proc", "--"])
        .arg(own)
        .arg("isolated-init")
        .args(arguments);
    Err(replace(unshare))
}

/// The first process of a test's namespaces: prepares them, runs the test, and collects orphans.
pub(crate) fn init(arguments: &[String]) -> Result<ExitCode, Failure> {
    let [program, rest @ ..] = arguments else {
        return Err(Failure::usage("isolated-init: PROGRAM is missing"));
    };
    // A process namespace ends with its first process; in any other process the mounts would remain.
    if getpid() != Pid::INIT {
        return Err(Failure::usage("isolated-init: only `xtask isolated` may start this command"));
    }
    let own = [
        ("tmpfs", "/run", c"mode=0755"),
        // Memory servers keep their memory here, tests of ordinary users too.
        ("tmpfs", "/dev/shm", c"mode=1777"),
        ("bpf", "/sys/fs/bpf", c"mode=0755"),
    ];
    for (kind, at, options) in own {
        if Path::new(at).is_dir() {
            unmount_below(Path::new(at))?;
            mount_own(kind, at, options)?;
        }
    }
    let child = command(program, rest).spawn().map_err(|error| failed("start the test", &error))?;
    let test = Pid::from_child(&child);
    loop {
        let ended = waitpid(None, WaitOptions::empty());
        let (pid, status) = match ended {
            Ok(Some(ended)) => ended,
            Ok(None) | Err(rustix::io::Errno::INTR) => continue,
            Err(errno) => return Err(failed("wait for the test", &errno.into())),
        };
        if pid == test {
            let status = std::process::ExitStatus::from_raw(status.as_raw());
            let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default());
            return Ok(ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX)));
        }
    }
}

fn command(program: &str, arguments: &[String]) -> Command {
    // This fails only if /proc is not mounted; then the kernel's own choice remains.
    let _ = fs::write("/proc/self/oom_score_adj", OOM_SCORE_ADJUSTMENT);
    let mut command = Command::new(program);
    command.args(arguments);
    if let Some(path) = std::env::var_os(PATH_VARIABLE) {
        command.env("PATH", path);
    }
    command
}

/// Gives this test its own temporary directory: in a process namespace, names that programs derive
/// from their process number are the same in every test.
fn make_temporary_directory() -> Result<(), Failure> {
    let Some(run) = std::env::var_os(RUN_VARIABLE) else { return Ok(()) };
    let directory = Path::new(&run).join(getpid().as_raw_nonzero().to_string());
    let made = fs::create_dir_all(&directory)
        .and_then(|()| fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)));
    made.map_err(|error| failed("make a directory of temporary files", &error))?;
    // SAFETY: this process has no other thread that could read the environment meanwhile.
    unsafe { std::env::set_var("TMPDIR", directory) };
    Ok(())
}

/// Detaches everything mounted at or below a directory, so that it is not in the test's list of mounts.
fn unmount_below(directory: &Path) -> Result<(), Failure> {
    let mounts = fs::read_to_string("/proc/self/mounts");
    let mounts = mounts.map_err(|error| failed("read the list of mounts", &error))?;
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(1)).map(Path::new);
    for point in points.filter(|point| point.starts_with(directory)) {
        // It may already be gone with the mount that contained it.
        match unmount(point, UnmountFlags::DETACH) {
            Ok(()) | Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) => {}
            Err(errno) => {
                return Err(failed(&format!("unmount {}", point.display()), &errno.into()));
            }
        }
    }
    Ok(())
}

fn mount_own(kind: &str, at: &str, options: &CStr) -> Result<(), Failure> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    mount("bluebridge", at, kind, flags, Some(options))
        .map_err(|errno| failed(&format!("mount a {kind} of its own at {at}"), &errno.into()))
}

/// Replaces this process by the command; returns only if that fails.
fn replace(mut command: Command) -> Failure {
    let error = command.exec();
    failed(&format!("start {}", command.get_program().display()), &error)
}

fn failed(action: &str, error: &io::Error) -> Failure {
    Failure::new(format!("isolated: cannot {action}: {error}"))
}

/// The temporary files of the test runs of a checkout.
pub(super) fn run_directory(root: &Path) -> PathBuf {
    // Short, because the paths of Unix sockets below it hold at most 107 bytes (unix(7)).
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in root.as_os_str().as_encoded_bytes() {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    }
    std::env::temp_dir().join(format!("bb-tests-{:08x}", hash >> 32))
}

/// `xtask sweep DIRECTORY`: kills processes that an earlier test run left, and removes its files.
pub(crate) fn sweep(arguments: &[String]) -> Result<ExitCode, Failure> {
    let [directory] = arguments else {
        return Err(Failure::usage("sweep: exactly one directory is required"));
    };
    let killed = kill_marked(OsStr::new(directory));
    if killed > 0 {
        println!("removed {killed} processes that an earlier test run left");
    }
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Failure::new(format!("cannot remove {directory}: {error}")))
        }
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// Kills all processes with a run's mark; returns their number.
fn kill_marked(run: &OsStr) -> usize {
    let mut mark = OsString::from(RUN_VARIABLE);
    mark.push("=");
    mark.push(run);
    let mut killed = std::collections::BTreeSet::new();
    for _ in 0..SWEEPS {
        let found: Vec<_> = marked(mark.as_encoded_bytes()).collect();
        if found.is_empty() {
            break;
        }
        for pid in found {
            // A process that has already ended is no failure.
            let _ = kill_process(pid, Signal::KILL);
            killed.insert(pid.as_raw_nonzero());
        }
        thread::sleep(SWEEP_PAUSE);
    }
    killed.len()
}

fn marked(mark: &[u8]) -> impl Iterator<Item = Pid> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes.filter_map(move |entry| {
        let pid = Pid::from_raw(entry.file_name().to_str()?.parse().ok()?)?;
        let environment = fs::read(entry.path().join("environ")).ok()?;
        let is_marked = environment.split(|byte| *byte == 0).any(|variable| variable == mark);
        (is_marked && pid != getpid()).then_some(pid)
    })
}

#[cfg(test)]
mod tests {
    use std::{io::Read as _, process::Stdio};

    use super::*;

    #[test]
    fn what_carries_the_mark_is_killed_and_nothing_else() {
        let run = std::env::temp_dir().join(format!("bb-sweep-{}", std::process::id()));
        let wait = |mark: &Path| {
            let mut command = Command::new("sh");
            command.args(["-c", "echo; read end"]).env(RUN_VARIABLE, mark);
            command.stdin(Stdio::piped()).stdout(Stdio::piped());
            let mut child = command.spawn().expect("sh starts");
            // A process that was just started may not show its environment yet: execve(2) sets it late.
            let mut ready = [0];
            let output = child.stdout.as_mut().expect("it is piped");
            output.read_exact(&mut ready).expect("it says that it runs");
            child
        };
        let (mut ours, mut other) = (wait(&run), wait(Path::new("/another")));
        assert_eq!(kill_marked(run.as_os_str()), 1);
        assert_eq!(ours.wait().expect("it ended").signal(), Some(Signal::KILL.as_raw()));
        assert!(other.try_wait().expect("it can be checked").is_none(), "others are left alone");
        other.kill().expect("it runs");
        other.wait().expect("it ended");
    }

    #[test]
    fn every_checkout_has_its_own_directory() {
        assert_ne!(run_directory(Path::new("/one")), run_directory(Path::new("/two")));
    }
}
