//! The demo as root, as an ordinary user and in one process: it succeeds, ends properly when it is
//! interrupted or a process dies, and cleans up.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use bluebridge_rack::namespace::is_privileged;
use bluebridge_rack::process;
use bluebridge_testkit::{Scratch, require_root, until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// The system's user `nobody`.
const NOBODY: u32 = 65_534;

/// Time limit of the demo, also on a busy machine.
const LIMIT: Duration = Duration::from_secs(90);

/// One caller with a copy of the binary, which identifies its processes.
struct Caller {
    binary: PathBuf,
    state: PathBuf,
    user: Option<u32>,
}

impl Caller {
    fn root(scratch: &Scratch) -> Self {
        require_root();
        Self::new(scratch, None)
    }

    /// An ordinary user: the present one, or another one if that is root.
    fn user(scratch: &Scratch) -> Self {
        Self::new(scratch, is_privileged().then_some(NOBODY))
    }

    fn new(scratch: &Scratch, user: Option<u32>) -> Self {
        let binary = scratch.path().join("bluebridge");
        fs::copy(env!("CARGO_BIN_EXE_bluebridge"), &binary).expect("copied");
        for path in [scratch.path(), &binary] {
            fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("opened");
        }
        let home = scratch.path().join("home");
        fs::create_dir(&home).expect("made");
        chown(&home, user, user).expect("given");
        Self { binary, state: home.join("state"), user }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.binary);
        self.settle(command.arg("demo").args(arguments));
        command
    }

    fn settle(&self, command: &mut Command) {
        command.env("BLUEBRIDGE_STATE", &self.state).current_dir("/").stdin(Stdio::null());
        if let Some(user) = self.user {
            command.uid(user).gid(user);
        }
    }

    fn json(&self, arguments: &[&str]) -> Value {
        let start = Instant::now();
        let child = self.command(arguments).stdout(Stdio::piped()).spawn().expect("starts");
        let (pid, output) = (child.id(), child.wait_with_output().expect("ends"));
        assert!(output.status.success(), "{:?}", output.status);
        assert!(start.elapsed() < LIMIT, "{:?}", start.elapsed());
        self.assert_nothing_left(pid);
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    fn processes(&self) -> Vec<u32> {
        let path = self.binary.as_os_str().as_encoded_bytes();
        let ours = |pid: u32| {
            fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.starts_with(path))
        };
        process::find(ours).iter().map(|record| record.pid).collect()
    }

    fn assert_nothing_left(&self, pid: u32) {
        // A signal may end a demo that waits for the child that tests namespaces; the child ends by itself.
        until("no process is left", || self.processes().is_empty());
        assert!(!self.state.exists(), "{:?}", fs::read_dir(&self.state).map(Iterator::count));
        let mounts = fs::read_to_string("/proc/self/mounts").expect("readable");
        let rack = format!("demo-{pid}");
        assert!(!mounts.contains(&rack), "{mounts}");
        for directory in ["/run/netns", "/sys/fs/bpf", "/run/bluebridge", "/tmp"] {
            let entries = Path::new(directory).read_dir().into_iter().flatten().flatten();
            let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
            let ours: Vec<_> = names.filter(|name| name.contains(&rack)).collect();
            assert_eq!(ours, Vec::<String>::new(), "in {directory}");
        }
    }
}

fn assert_shown(summary: &Value) {
    assert!(summary["pointer"].as_str().is_some_and(|text| text.starts_with("fdbb:1:")));
    assert!(summary["entry_count"].as_u64() >= Some(15), "{summary}");
    assert_eq!(summary["transferred_bytes"].as_array().map(Vec::len), Some(7));
    let latency = summary["latency"].as_array().expect("rows");
    let operations: Vec<_> = latency.iter().map(|row| row["operation"].as_str()).collect();
    assert_eq!(operations, ["CREATE", "READ", "WRITE", "DELETE"].map(Some));
    assert!(latency.iter().all(|row| row["p50_us"].as_f64() > Some(0.0)));
    assert_eq!(latency[1]["paper_us"], 33.7);
    assert!(summary["stale_pointer"].as_str().is_some_and(|text| text.contains("refused")));
    assert!(
        summary["stopped_server"].as_str().is_some_and(|text| text.contains("does not respond"))
    );
    assert_eq!(summary["left_over"].as_array().map(Vec::len), Some(0));
}

fn assert_shown_by_a_rack(summary: &Value) {
    assert_shown(summary);
    assert!(summary["directory_packets"].as_u64() > Some(1000), "{summary}");
    let restart = &summary["controller_restart"];
    assert_eq!((&restart["failed_reads"], &restart["same_nodes"]), (&0.into(), &true.into()));
    assert!(restart["reads"].as_u64() > Some(50), "{summary}");
    assert_eq!(summary["kept_memory"]["is_kept"], true, "{summary}");
}

fn interrupted(mut demo: Child, after: Duration) -> (u32, Output) {
    thread::sleep(after);
    let pid = demo.id();
    if demo.try_wait().expect("asked").is_none() {
        kill_process(Pid::from_child(&demo), Signal::INT).expect("signalled");
    }
    (pid, demo.wait_with_output().expect("ends"))
}

fn interrupt_at_all_times(caller: &Caller) {
    let mut interrupted_count = 0;
    for step in 0..8 {
        let demo = caller.command(&[]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let after = Duration::from_millis(50 + 350 * step);
        let (pid, output) = interrupted(demo.expect("starts"), after);
        let said = String::from_utf8_lossy(&output.stderr);
        match output.status.code() {
            Some(0) => {}
            Some(1) => {
                assert_eq!(said, "bluebridge: interrupted\n", "after {after:?}");
                interrupted_count += 1;
            }
            // Before the signal is caught, the system ends a process that has not started anything.
            None => assert!(output.stdout.len() < 1000, "after {after:?}: {:?}", output.status),
            code => panic!("{code:?} after {after:?}: {said}"),
        }
        caller.assert_nothing_left(pid);
    }
    assert!(interrupted_count >= 3, "only {interrupted_count} interrupts hit a running demo");
}

#[test]
fn in_one_process_the_protocol_is_the_same() {
    let summary = Command::new(env!("CARGO_BIN_EXE_bluebridge"))
        .args(["demo", "--mode", "process", "--json"])
        .output()
        .expect("runs");
    assert!(summary.status.success(), "{}", String::from_utf8_lossy(&summary.stderr));
    let summary = serde_json::from_slice(&summary.stdout).expect("JSON");
    assert_shown(&summary);
    assert_eq!(summary["controller_restart"], Value::Null);
}

mod root {
    use super::*;

    #[test]
    fn with_root_the_switch_is_in_the_kernel() {
        let scratch = Scratch::new("demo-root");
        let caller = Caller::root(&scratch);
        let summary = caller.json(&["--json"]);
        assert_eq!((&summary["mode"], &summary["switch"]), (&"root".into(), &"ebpf".into()));
        assert_shown_by_a_rack(&summary);
    }

    #[test]
    fn open_vswitch_shows_the_same() {
        let scratch = Scratch::new("demo-ovs");
        let caller = Caller::root(&scratch);
        let summary = caller.json(&["--json", "--switch", "ovs"]);
        assert_eq!((&summary["mode"], &summary["switch"]), (&"root".into(), &"ovs".into()));
        assert_shown_by_a_rack(&summary);
    }

    #[test]
    #[ignore = "BMv2 must be built first, see docs/switches.md"]
    fn bmv2_shows_the_same() {
        let scratch = Scratch::new("demo-bmv2");
        let caller = Caller::root(&scratch);
        let summary = caller.json(&["--json", "--switch", "bmv2"]);
        assert_eq!((&summary["mode"], &summary["switch"]), (&"root".into(), &"bmv2".into()));
        assert_shown_by_a_rack(&summary);
    }

    #[test]
    fn bmv2_must_be_named_and_must_run() {
        let scratch = Scratch::new("demo-no-bmv2");
        let caller = Caller::root(&scratch);
        for (program, text) in [
            ("", "set BLUEBRIDGE_BMV2 to BMv2's simple_switch_grpc"),
            ("/nonexistent", "cannot start /nonexistent, which BLUEBRIDGE_BMV2 names"),
            ("/bin/false", "/bin/false ended at its start"),
        ] {
            let mut command = caller.command(&["--switch", "bmv2"]);
            let output = command.env("BLUEBRIDGE_BMV2", program).output().expect("runs");
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success() && said.contains(text), "{said}");
        }
    }

    #[test]
    fn the_demo_explains_each_step() {
        let scratch = Scratch::new("demo-words");
        let caller = Caller::root(&scratch);
        let output = caller.command(&[]).output().expect("runs");
        let text = String::from_utf8(output.stdout).expect("text");
        assert_eq!((output.status.code(), output.stderr), (Some(0), Vec::new()), "{text}");
        // A sentence may continue in the next line.
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        for line in [
            "With root: namespaces of this machine; the switch runs in the kernel (eBPF).",
            "which is the destination address of every packet that uses it:",
            "fdbb:1:1::/48",
            "hello from c1, kept on s3",
            "UPDATE 34.2 us",
            "the counter is 1000, nothing lost or doubled",
            "without an error",
            "does not respond; check that it is running and that the switch has its entries",
            "Left behind: nothing.",
        ] {
            assert!(words.contains(line), "{line:?} is missing in:\n{text}");
        }
        let longest = text.lines().map(|line| line.chars().count()).max();
        assert!(longest <= Some(80), "{longest:?}:\n{text}");
    }

    #[test]
    fn interrupted_with_root_it_takes_its_rack_down() {
        let scratch = Scratch::new("demo-stop");
        interrupt_at_all_times(&Caller::root(&scratch));
    }

    #[test]
    fn when_a_server_dies_unasked_it_fails_and_takes_its_rack_down() {
        let scratch = Scratch::new("demo-dies");
        let caller = Caller::root(&scratch);
        let demo = caller.command(&[]).stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
        let demo = demo.expect("starts");
        let pid = demo.id();
        until("there is a server, and it is killed", || {
            let named = |pid: &u32| {
                let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                let words: Vec<_> = line.split(|byte| *byte == 0).collect();
                words.contains(&&b"memserver"[..]) && words.contains(&&b"s2"[..])
            };
            let server = caller.processes().into_iter().find(named);
            let server = server.and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
            server.is_some_and(|pid| kill_process(pid, Signal::KILL).is_ok())
        });
        let output = demo.wait_with_output().expect("ends");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(matches!(output.status.code(), Some(1 | 4)), "{:?}: {said}", output.status);
        assert!(said.starts_with("bluebridge: "), "{said}");
        caller.assert_nothing_left(pid);
    }
}

mod netns {
    use super::*;

    #[test]
    fn an_ordinary_user_sees_it_too() {
        let scratch = Scratch::new("demo-user");
        let caller = Caller::user(&scratch);
        let summary = caller.json(&["--json"]);
        assert_eq!((&summary["mode"], &summary["switch"]), (&"rootless".into(), &"soft".into()));
        assert_shown_by_a_rack(&summary);
        let refused = caller.command(&["--mode", "root"]).output().expect("runs");
        assert_eq!(refused.status.code(), Some(5));
    }

    #[test]
    fn where_user_namespaces_are_forbidden_it_stays_in_one_process() {
        let scratch = Scratch::new("demo-process");
        let caller = Caller::user(&scratch);
        // A limit for one command: none of its descendants may create user namespaces.
        let script = "echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --bounding-set=-all \
                      --inh-caps=-all --ambient-caps=-all --no-new-privs \"$@\"";
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "sh", "-c", script, "sh"]).arg(&caller.binary);
        caller.settle(command.arg("demo"));
        let output = command.output().expect("runs");
        let text = String::from_utf8_lossy(&output.stdout);
        assert_eq!(
            output.status.code(),
            Some(0),
            "{text}{}",
            String::from_utf8_lossy(&output.stderr)
        );
        assert!(
            text.contains("In one process:") && text.contains("user.max_user_namespaces"),
            "{text}"
        );
        assert!(text.contains("Missing: the network"), "{text}");
        assert_eq!(caller.processes(), Vec::<u32>::new());
        assert!(!caller.state.exists());
    }

    #[test]
    fn interrupted_without_root_it_takes_its_rack_down() {
        let scratch = Scratch::new("demo-user-stop");
        interrupt_at_all_times(&Caller::user(&scratch));
    }
}
