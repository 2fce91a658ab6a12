//! The binary: racks that outlive the command that made them, as root and as an ordinary user.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use bluebridge_rack::process;
use bluebridge_testkit::{Scratch, own, require_root, until};
use serde_json::Value;

/// An ordinary user's id without an account, different for each test and process: it identifies the processes of
/// the user.
fn user(test: u32) -> u32 {
    60_000 + (std::process::id() * 4 + test) % 4_000
}

struct Caller<'a> {
    binary: PathBuf,
    state: PathBuf,
    user: Option<u32>,
    _scratch: &'a Scratch,
}

impl<'a> Caller<'a> {
    fn root(scratch: &'a Scratch) -> Self {
        require_root();
        let binary = env!("CARGO_BIN_EXE_bluebridge").into();
        Self { binary, state: scratch.path().join("state"), user: None, _scratch: scratch }
    }

    /// The binary is copied to a directory where every user may execute it.
    fn user(scratch: &'a Scratch, user: u32) -> Self {
        require_root();
        let binary = scratch.path().join("bluebridge");
        fs::copy(env!("CARGO_BIN_EXE_bluebridge"), &binary).expect("copied");
        for path in [scratch.path(), &binary] {
            fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("opened");
        }
        let home = scratch.path().join("home");
        fs::create_dir(&home).expect("made");
        chown(&home, Some(user), Some(user)).expect("given");
        Self { binary, state: home.join("state"), user: Some(user), _scratch: scratch }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.binary);
        command.args(arguments).env("BLUEBRIDGE_STATE", &self.state).current_dir("/");
        if let Some(user) = self.user {
            command.uid(user).gid(user);
        }
        command
    }

    fn call(&self, arguments: &[&str]) -> Output {
        self.command(arguments).stdin(Stdio::null()).output().expect("runs")
    }

    fn json(&self, arguments: &[&str]) -> Value {
        let output = self.call(arguments);
        assert!(
            output.status.success(),
            "{arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    fn running(&self) -> usize {
        let user = self.user.expect("an ordinary user");
        let owned = |pid: u32| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            status.contains(&format!("\nUid:\t{user}\t"))
        };
        process::find(owned).len()
    }

    fn records(&self) -> usize {
        fs::read_dir(&self.state).map_or(0, Iterator::count)
    }
}

fn traces(name: &str) -> String {
    let mounts = fs::read_to_string("/proc/self/mounts").expect("readable");
    let named = Path::new("/run/netns").read_dir().into_iter().flatten().flatten();
    let names = named.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let lines = mounts.lines().map(str::to_owned).chain(names);
    lines.filter(|line| line.contains(name)).collect::<Vec<_>>().join("\n")
}

#[test]
fn a_rack_outlives_its_command_until_it_is_taken_down() {
    let scratch = Scratch::new("rack-command");
    let caller = Caller::root(&scratch);
    let rack = own("rack-command");
    let name = ["--name", &rack];
    let with = |words: &[&'static str]| [words, &name[..]].concat();
    let up = with(&["rack", "up", "--json", "--network-only", "--servers", "1", "--clients", "1"]);
    let status = caller.json(&up);
    assert_eq!(status["healthy"], true);
    assert_eq!(status["links"][0]["node"], "s1");
    assert!(traces(&rack).contains("/bpf bpf "), "the eBPF switch has a place for its maps");
    assert_eq!(caller.json(&with(&["rack", "status", "--json"]))["phase"], "up");
    assert_eq!(caller.json(&["rack", "list", "--json"])[0]["name"], rack);
    let twice = caller.call(&up);
    assert_eq!(twice.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&twice.stderr).contains("already"));

    let script = "ls /sys/class/net >/dev/null; echo $BLUEBRIDGE_INTERFACE; exit 7";
    let exec = [&["rack", "exec"][..], &name, &["c1", "--", "sh", "-c", script]].concat();
    let output = caller.call(&exec);
    assert_eq!(output.status.code(), Some(7));
    assert_eq!(output.stdout, b"eth0\n");
    for (command, code) in [
        (&["c9", "--", "true"][..], 2),
        (&["c1", "--", "/no/such"], 127),
        (&["c1", "--", "/"], 126),
    ] {
        let exec = [&["rack", "exec"][..], &name, command].concat();
        assert_eq!(caller.call(&exec).status.code(), Some(code), "{command:?}");
    }
    assert_eq!(caller.call(&with(&["rack", "kill", "switch"])).status.code(), Some(2));

    let down = caller.json(&with(&["rack", "down", "--json"]));
    assert_eq!(down["stopped"]["namespace_count"], 3);
    assert_eq!(traces(&rack), "");
    assert_eq!(caller.records(), 0);
    assert!(!caller.state.exists(), "the directory of racks goes with the last of them");
    let again = caller.json(&with(&["rack", "down", "--json"]));
    assert_eq!(again["was_there"], false);
    assert_eq!(caller.call(&with(&["rack", "status"])).status.code(), Some(2));
}

#[test]
fn the_directory_of_racks_may_be_relative_and_stays_if_it_is_the_users() {
    let scratch = Scratch::new("rack-relative");
    let caller = Caller::root(&scratch);
    let rack = own("rack-relative");
    fs::create_dir(&caller.state).expect("made");
    let call = |state: &str, arguments: &[&str]| {
        let mut command = caller.command(&[arguments, &["--rack", &rack]].concat());
        command.env("BLUEBRIDGE_STATE", state).current_dir(scratch.path());
        command.stdin(Stdio::null()).output().expect("runs")
    };
    let up = ["rack", "up", "--memory", "16M", "--servers", "1", "--clients", "1"];
    for state in ["state", "./state/../made/here"] {
        let output = call(state, &up);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(call(state, &["rack", "status"]).status.success());
        let output = call(state, &["rack", "down"]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    assert!(caller.state.exists(), "the rack did not make it");
    assert!(!scratch.path().join("made/here").exists(), "the rack made it");
    assert_eq!(traces(&rack), "");
}

#[test]
fn a_path_that_is_too_long_for_sockets_is_reported_before_anything_is_built() {
    let scratch = Scratch::new("rack-long");
    let caller = Caller { state: scratch.path().join("x".repeat(90)), ..Caller::root(&scratch) };
    let rack = own("rack-long");
    let output = caller.call(&["rack", "up", "--servers", "1", "--clients", "1", "--rack", &rack]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("set BLUEBRIDGE_STATE to a shorter path"), "{said}");
    assert!(!caller.state.exists());
    assert_eq!(traces(&rack), "");
}

#[test]
fn a_command_is_for_the_rack_that_is_named_or_the_only_one() {
    let scratch = Scratch::new("rack-choice");
    let caller = Caller::root(&scratch);
    let [one, two] = ["one", "two"].map(|name| own(&format!("choice-{name}")));
    let up = ["rack", "up", "--network-only", "--servers", "1", "--clients", "0", "--rack"];
    let status = |variable: Option<&str>| {
        let mut command = caller.command(&["rack", "status", "--json"]);
        if let Some(name) = variable {
            command.env("BLUEBRIDGE_RACK", name);
        }
        command.output().expect("runs")
    };
    let name = |output: &Output| {
        let status: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        status["name"].as_str().expect("text").to_owned()
    };
    let nothing = status(None);
    assert_eq!(nothing.status.code(), Some(2));
    assert!(caller.call(&[&up[..], &[&one]].concat()).status.success());
    assert_eq!(name(&status(None)), one);
    assert!(caller.call(&[&up[..], &[&two]].concat()).status.success());
    let several = status(None);
    assert_eq!(several.status.code(), Some(2));
    let said = String::from_utf8_lossy(&several.stderr).into_owned();
    assert!(said.contains("select one with --rack or BLUEBRIDGE_RACK"), "{said}");
    assert_eq!(name(&status(Some(&one))), one);
    assert_eq!(status(Some("No name")).status.code(), Some(2));
    // The option has priority over the variable.
    let mut down = caller.command(&["rack", "down", "--json", "--rack", &two]);
    let down = down.env("BLUEBRIDGE_RACK", &one).output().expect("runs");
    assert_eq!(name(&down), two);
    assert_eq!(caller.json(&["rack", "down", "--json"])["name"], one);
    assert_eq!(caller.records(), 0);
}

#[test]
fn a_rack_without_its_record_is_taken_down_by_its_name() {
    let scratch = Scratch::new("rack-unrecorded");
    let caller = Caller::root(&scratch);
    let rack = own("rack-unrecorded");
    let up = ["rack", "up", "--memory", "16M", "--servers", "1", "--clients", "1", "--rack", &rack];
    let record = caller.state.join(&rack).join("state.json");
    for lose in [|record: &Path| fs::remove_file(record), |record: &Path| fs::write(record, "{")] {
        let status = caller.json(&[&up[..], &["--json"]].concat());
        let daemons = status["daemons"].as_array().expect("rows").clone();
        lose(&record).expect("lost");
        let failed = caller.call(&["rack", "status", "--rack", &rack]);
        assert!(!failed.status.success());
        let down = caller.call(&["rack", "down"]);
        let said = String::from_utf8(down.stdout).expect("text");
        assert!(down.status.success(), "{}", String::from_utf8_lossy(&down.stderr));
        assert!(
            said.contains(&format!("{} daemons stopped, 3 namespaces", daemons.len())),
            "{said}"
        );
        assert!(said.contains("there was no readable record of it"), "{said}");
        assert_eq!(traces(&rack), "");
        assert_eq!(caller.records(), 0);
        let pid = |it: &Value| u32::try_from(it["pid"].as_u64().expect("a pid")).expect("a pid");
        let records = daemons.iter().filter_map(|it| process::ProcessRecord::of(pid(it)).ok());
        assert_eq!(records.filter(process::ProcessRecord::is_running).count(), 0);
    }
    let again = caller.call(&["rack", "down", "--rack", &rack]);
    assert_eq!(String::from_utf8_lossy(&again.stdout), format!("there is no rack {rack}\n"));
}

#[test]
fn a_users_rack_without_its_record_is_taken_down_too() {
    let scratch = Scratch::new("rack-user-lost");
    let caller = Caller::user(&scratch, user(3));
    let up = ["rack", "up", "--memory", "16M", "--servers", "1", "--clients", "1"];
    let started = caller.call(&up);
    assert!(started.status.success(), "{}", String::from_utf8_lossy(&started.stderr));
    assert!(caller.running() > 1);
    fs::remove_file(caller.state.join("rack/state.json")).expect("lost");
    let down = caller.call(&["rack", "down"]);
    assert!(down.status.success(), "{}", String::from_utf8_lossy(&down.stderr));
    let said = String::from_utf8_lossy(&down.stdout).into_owned();
    assert!(said.contains("there was no readable record of it"), "{said}");
    assert_eq!((caller.running(), caller.records()), (0, 0));
}

/// Waits for a different moment of a rack's building each time: first for two at the beginning of its command,
/// then for some after the rack was started, whenever a busy machine gets there.
fn await_step(caller: &Caller<'_>, step: u64) {
    let after = match step.checked_sub(2) {
        None => step,
        Some(step) => {
            until("a rack is begun", || caller.records() > 0);
            step
        }
    };
    thread::sleep(Duration::from_millis(5 + 25 * after));
}

#[test]
fn whenever_its_builder_is_killed_a_rack_can_be_taken_down() {
    let scratch = Scratch::new("rack-killed");
    let caller = Caller::root(&scratch);
    let rack = own("rack-killed");
    let name = ["--name", &rack];
    let mut unfinished = 0;
    for step in 0..12 {
        let up = ["rack", "up", "--network-only", "--servers", "20", "--switch", "ebpf"];
        let mut builder = caller.command(&[&up[..], &name].concat());
        let mut builder = builder.stdout(Stdio::null()).spawn().expect("runs");
        await_step(&caller, step);
        builder.kill().expect("killed");
        let finished = builder.wait().expect("waited").success();
        let begun = caller.records() > 0;
        unfinished += usize::from(begun && !finished);
        let down = caller.call(&[&["rack", "down"][..], &name].concat());
        assert!(down.status.success(), "{}", String::from_utf8_lossy(&down.stderr));
        assert_eq!(traces(&rack), "", "step {step}");
        assert_eq!(caller.records(), 0, "step {step}");
    }
    assert!(unfinished >= 3, "only {unfinished} kills hit a rack in the making");
}

#[test]
fn a_users_rack_whose_builder_is_killed_can_be_taken_down() {
    let scratch = Scratch::new("rack-user-killed");
    let caller = Caller::user(&scratch, user(2));
    let mut unfinished = 0;
    for step in 0..12 {
        let mut builder = caller.command(&["rack", "up", "--network-only", "--servers", "20"]);
        let mut builder = builder.stdout(Stdio::null()).spawn().expect("runs");
        await_step(&caller, step);
        builder.kill().expect("killed");
        let finished = builder.wait().expect("waited").success();
        unfinished += usize::from(caller.records() > 0 && !finished);
        let down = caller.call(&["rack", "down"]);
        assert!(down.status.success(), "{}", String::from_utf8_lossy(&down.stderr));
        // A test of user namespaces ends shortly after its killed parent.
        until("nothing of the user runs", || caller.running() == 0);
        assert_eq!(caller.records(), 0, "step {step}");
    }
    assert!(unfinished >= 3, "only {unfinished} kills hit a rack in the making");
}

#[test]
fn a_rack_interrupted_takes_itself_down() {
    let scratch = Scratch::new("rack-interrupt");
    let caller = Caller::root(&scratch);
    let rack = own("rack-interrupt");
    let up = ["rack", "up", "--network-only", "--servers", "60", "--name", &rack];
    let mut builder = caller.command(&up);
    let builder = builder.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("runs");
    until("the rack is begun", || traces(&rack).lines().count() > 10);
    let pid = rustix::process::Pid::from_child(&builder);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("signalled");
    let output = builder.wait_with_output().expect("waited");
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(traces(&rack), "");
    assert_eq!(caller.records(), 0);
}

#[test]
fn an_ordinary_user_has_racks_too() {
    let scratch = Scratch::new("rack-user");
    let caller = Caller::user(&scratch, user(0));
    let name = ["--name", "rack-user"];
    let with = |words: &[&'static str]| [words, &name[..]].concat();
    let up = with(&["rack", "up", "--json", "--network-only", "--mtu", "9000,s1=1500"]);
    let status = caller.json(&up);
    assert_eq!((&status["healthy"], &status["rootless"]), (&true.into(), &true.into()));
    let status = caller.json(&with(&["rack", "status", "--json"]));
    assert_eq!((&status["healthy"], &status["links"][0]["mtu"]), (&true.into(), &1500.into()));
    let script = "cat /proc/net/if_inet6; pwd; id -u";
    let exec = [&["rack", "exec"][..], &name, &["s1", "--", "sh", "-c", script]].concat();
    let seen = String::from_utf8(caller.call(&exec).stdout).expect("text");
    assert!(seen.contains("eth0") && seen.ends_with("\n/\n0\n"), "{seen}");
    assert_eq!(caller.running(), 1, "the holder");

    // A shell in the rack is stopped with it.
    let exec = [&["rack", "exec"][..], &name, &["c1", "--", "sleep", "60"]].concat();
    let mut sleeper = caller.command(&exec).spawn().expect("runs");
    let line = format!("/proc/{}/cmdline", sleeper.id());
    until("the command runs in the rack", || fs::read(&line).expect("it runs") == b"sleep\x0060\0");
    let down = caller.json(&with(&["rack", "down", "--json"]));
    assert_eq!(down["stopped"]["others"][0]["pid"], sleeper.id());
    assert!(!sleeper.wait().expect("waited").success());
    assert_eq!((caller.running(), caller.records()), (0, 0));

    let ebpf = caller.call(&with(&["rack", "up", "--network-only", "--switch", "ebpf"]));
    assert_eq!(ebpf.status.code(), Some(5), "{}", String::from_utf8_lossy(&ebpf.stderr));
    assert_eq!(caller.records(), 0);

    // The holder is killed: no namespace is left to enter, and the record is removed nevertheless.
    caller.json(&up);
    let mut holders = process::find(|pid| process::has_environment(pid, "BLUEBRIDGE_RACK_ID", "-"));
    assert!(holders.is_empty());
    holders = process::find(|pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.starts_with(caller.binary.as_os_str().as_encoded_bytes()) && line.ends_with(b"hold\0")
    });
    assert_eq!(holders.len(), 1);
    process::stop_all(&holders, Duration::ZERO).expect("killed");
    assert_eq!(caller.call(&exec).status.code(), Some(1));
    caller.json(&with(&["rack", "down", "--json"]));
    assert_eq!((caller.running(), caller.records()), (0, 0));
}

#[test]
fn where_user_namespaces_are_forbidden_the_error_says_so() {
    let scratch = Scratch::new("rack-forbidden");
    let caller = Caller::user(&scratch, user(1));
    // A limit for one command: none of its descendants may create user namespaces.
    let script = "echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --bounding-set=-all \
                  --inh-caps=-all --ambient-caps=-all --no-new-privs \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "sh", "-c", script, "sh"]).arg(&caller.binary);
    command.args(["rack", "up", "--network-only", "--name", "rack-forbidden"]);
    command.env("BLUEBRIDGE_STATE", &caller.state).uid(user(1)).gid(user(1)).current_dir("/");
    let output = command.output().expect("runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(5), "{said}");
    assert!(said.contains("user.max_user_namespaces"), "{said}");
    assert_eq!(caller.records(), 0);
}
