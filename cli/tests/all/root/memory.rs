//! The commands that use a rack's memory and inspect its switch, with a running rack.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use bluebridge_testkit::{Scratch, own, require_root, until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// A rack built by the binary, taken down when dropped.
pub(super) struct TestRack {
    scratch: Scratch,
    pub(super) name: String,
}

impl TestRack {
    pub(super) fn up(name: &'static str, extra: &[&str]) -> Self {
        require_root();
        let rack = Self { scratch: Scratch::new(name), name: own(name) };
        let mut up = vec!["rack", "up", "--name", &rack.name];
        for (option, value) in [("--servers", "2"), ("--clients", "2")] {
            if !extra.contains(&option) {
                up.extend([option, value]);
            }
        }
        let output = rack.call(&[&up, extra].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        rack
    }

    pub(super) fn state(&self) -> PathBuf {
        self.scratch.path().join("state")
    }

    pub(super) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_bluebridge"));
        command.args(arguments).env("BLUEBRIDGE_STATE", self.state()).stdin(Stdio::null());
        command
    }

    fn call(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().expect("runs")
    }

    pub(super) fn text(&self, arguments: &[&str]) -> String {
        let output = self.call(arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {said}");
        String::from_utf8(output.stdout).expect("text").trim_end().to_owned()
    }

    pub(super) fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.text(&[arguments, &["--json"]].concat())).expect("JSON")
    }

    /// The exit code and the error text of a command that must fail.
    fn failure(&self, arguments: &[&str]) -> (Option<i32>, String) {
        let output = self.call(arguments);
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    }

    fn feed(&self, arguments: &[&str], data: &[u8]) -> Output {
        let mut command = self.command(arguments);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("starts");
        child.stdin.take().expect("piped").write_all(data).expect("fed");
        child.wait_with_output().expect("ends")
    }
}

impl Drop for TestRack {
    fn drop(&mut self) {
        let down = self.call(&["rack", "down", "--name", &self.name]);
        if !std::thread::panicking() {
            assert!(down.status.success(), "{}", String::from_utf8_lossy(&down.stderr));
        }
    }
}

#[test]
fn a_daemon_is_killed_and_started_again_by_itself() {
    let rack = TestRack::up("cmd-part", &["--memory", "16M"]);
    let named = |words: &[&'static str]| [&["rack"], words, &["--name", &rack.name]].concat();
    let daemons = || -> Vec<(String, Value, bool)> {
        let output = rack.call(&named(&["status", "--json"]));
        let status: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let daemons = status["daemons"].as_array().expect("a list");
        let up = |it: &Value| it["running"] == true && it["ready"] == true;
        daemons
            .iter()
            .map(|it| (it["name"].as_str().expect("text").to_owned(), it["pid"].clone(), up(it)))
            .collect()
    };
    let before = daemons();
    let names = ["switch", "controller", "memserver-s1", "memserver-s2", "hosts"];
    assert_eq!(before.iter().map(|it| it.0.as_str()).collect::<Vec<_>>(), names);
    for (at, part) in [(1, "controller"), (0, "switch"), (2, "s1"), (4, "hosts")] {
        let killed = rack.json(&named(&["kill", part]));
        assert_eq!((&killed["daemon"], &killed["was"]), (&names[at].into(), &"killed".into()));
        assert_eq!(rack.json(&named(&["kill", part]))["was"], "already_gone");
        let now = daemons();
        let down: Vec<_> = now.iter().filter(|it| !it.2).map(|it| it.0.as_str()).collect();
        assert_eq!(down, [names[at]]);
        let again = rack.json(&named(&["restart", part]));
        assert_eq!(again["was"], "already_gone");
        let now = daemons();
        assert!(now.iter().all(|it| it.2), "{part}: {now:?}");
        assert_eq!((&now[at].1, &now[at].0), (&again["pid"], &before[at].0));
        assert_ne!(now[at].1, before[at].1, "another process");
    }
    // Without a kill before, it ends normally, and its successor continues.
    assert_eq!(rack.json(&named(&["restart", "s2"]))["was"], "terminated");
    let pointer = rack.text(&["create", "4K", "--rack", &rack.name, "--on", "s2"]);
    rack.text(&["write", &pointer, "back", "--rack", &rack.name]);
    let (code, said) = rack.failure(&named(&["restart", "s3"]));
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("no daemon memserver-s3"), "{said}");
    assert_eq!(rack.failure(&named(&["kill", "s3"])).0, Some(2));
}

/// Its starter no longer waits for its report, and removed the socket.
#[test]
fn a_server_that_is_ready_too_late_serves_and_counts_as_ready() {
    let rack = TestRack::up("cmd-late", &["--memory", "16M", "--servers", "1", "--clients", "1"]);
    rack.text(&["rack", "kill", "controller"]);
    let (code, said) = rack.failure(&["rack", "restart", "s1", "--deadline", "1s"]);
    assert!(code == Some(4) && said.contains("was not ready"), "{code:?}: {said}");
    assert!(problems(&rack).iter().any(|it| it.starts_with("memserver-s1 is not ready")));
    rack.text(&["rack", "restart", "controller"]);
    until("the server counts as ready", || problems(&rack).is_empty());
    rack.text(&["ping", "s1"]);
    let said = rack.text(&["rack", "logs", "s1"]);
    assert!(said.contains("the starter no longer waits"), "{said}");
}

/// The problems of an unhealthy rack.
fn problems(rack: &TestRack) -> Vec<String> {
    let output = rack.call(&["rack", "status", "--json"]);
    let status: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let problems = status["problems"].as_array().expect("a list");
    let is_healthy = problems.is_empty();
    assert_eq!(status["healthy"], is_healthy, "{status}");
    assert_eq!(output.status.code(), Some(i32::from(!is_healthy)), "{status}");
    problems.iter().map(|it| it.as_str().expect("text").to_owned()).collect()
}

fn signal(pid: &Value, signal: Signal) {
    let pid = pid.as_i64().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
    kill_process(pid.expect("a pid"), signal).expect("signalled");
}

/// The problem is visible from the signal on, even before heartbeats are missing.
#[test]
fn the_status_names_problems() {
    let rack = TestRack::up("cmd-wrong", &["--memory", "16M", "--servers", "1", "--clients", "1"]);
    let status = rack.json(&["rack", "status"]);
    let daemons = status["daemons"].as_array().expect("rows");
    let pid = |name: &str| {
        let daemon = daemons.iter().find(|it| it["name"] == name).expect("there");
        daemon["pid"].clone()
    };
    let healthy = || problems(&rack).is_empty();
    for name in ["memserver-s1", "switch", "controller", "hosts"] {
        signal(&pid(name), Signal::STOP);
        let words = format!("{name} is stopped by a signal; `kill -CONT {}`", pid(name));
        until("the stopped daemon is named", || {
            problems(&rack).iter().any(|it| it.starts_with(&words))
        });
        let text = rack.call(&["rack", "status"]);
        let text = String::from_utf8(text.stdout).expect("text");
        assert!(text.contains("not healthy") && text.contains(&words), "{text}");
        signal(&pid(name), Signal::CONT);
        until("the rack is well again", healthy);
    }

    // An interface in another network for a while: the process runs, but its heartbeats do not arrive.
    let ip = |words: &[&str]| {
        let exec = [&["rack", "exec", "s1", "--", "ip"], words].concat();
        rack.text(&exec);
    };
    ip(&["-6", "route", "add", "blackhole", &format!("{}/128", controller_address(&status))]);
    until("the silent server is named", || {
        problems(&rack).iter().any(|it| it.starts_with("s1 sends no heartbeats"))
    });
    ip(&["-6", "route", "del", "blackhole", &format!("{}/128", controller_address(&status))]);
    until("the rack is well again", healthy);

    rack.text(&["rack", "kill", "s1"]);
    let found = problems(&rack);
    let words = format!("`bluebridge rack restart s1 --rack {}` starts it", rack.name);
    assert!(found.iter().any(|it| it.contains(&words)), "{found:?}");
}

fn controller_address(status: &Value) -> String {
    let links = status["links"].as_array().expect("rows");
    let link = links.iter().find(|it| it["node"] == "switch").expect("there");
    link["control_address"].as_str().expect("text").to_owned()
}

#[test]
fn an_interface_that_goes_down_and_up_is_set_up_again() {
    let rack = TestRack::up("cmd-flap", &["--memory", "16M"]);
    let pointer = rack.text(&["create", "4K", "--on", "s1"]);
    let flap = |node: &str| {
        let exec = ["rack", "exec", node, "--", "sh", "-c"];
        rack.text(&[&exec[..], &["ip link set eth0 down && ip link set eth0 up"]].concat());
    };
    for node in ["s1", "c1"] {
        flap(node);
        until("the interface is set up again", || problems(&rack).is_empty());
        rack.text(&["write", &pointer, node, "--deadline", "20s"]);
        assert_eq!(rack.text(&["read", &pointer, "--length", "2"]), node);
    }
    // Without the daemon hosts, the status says what is lost, and a command says at once what to do.
    rack.text(&["rack", "kill", "hosts"]);
    flap("c1");
    flap("s1");
    let server_logs = |words: &str| rack.text(&["rack", "logs", "s1"]).matches(words).count() == 1;
    until("the server logs that", || server_logs("requests cannot reach this server"));
    let found = problems(&rack);
    let lost = "eth0 of c1 lost its route to the fabric";
    assert!(found.iter().any(|it| it.starts_with(lost)), "{found:?}");
    rack.text(&["rack", "restart", "hosts"]);
    assert_eq!(problems(&rack), Vec::<String>::new(), "a watch begins with a look");
    until("the server logs that too", || server_logs("requests can reach this server again"));
    assert!(server_logs("requests cannot reach this server"), "once");
    rack.text(&[
        "rack",
        "exec",
        "c1",
        "--",
        "ip",
        "-6",
        "route",
        "del",
        "fdbb::/16",
        "dev",
        "eth0",
    ]);
    until("the route is there again", || problems(&rack).is_empty());
}

/// Shells start programs in the background with SIGINT ignored.
#[test]
fn a_watch_ends_well_at_both_signals() {
    let rack = TestRack::up("cmd-watch", &["--memory", "16M", "--servers", "1", "--clients", "1"]);
    rack.text(&["rack", "kill", "hosts"]);
    let scratch = Scratch::new("cmd-watch-ready");
    for (number, ends) in [Signal::INT, Signal::TERM].into_iter().enumerate() {
        for watch in [
            &[
                "rack",
                "exec",
                "c1",
                "--",
                "BLUEBRIDGE",
                "host",
                "up",
                "--interface",
                "eth0",
                "--watch",
            ][..],
            &["rack", "exec", "switch", "--", "BLUEBRIDGE", "rack", "watch", "--rack", &rack.name],
        ] {
            let socket = scratch.path().join(format!("{number}-{}", watch[2]));
            let ready = std::os::unix::net::UnixDatagram::bind(&socket).expect("bound");
            let words = watch
                .iter()
                .map(|word| word.replace("BLUEBRIDGE", env!("CARGO_BIN_EXE_bluebridge")));
            let mut command = Command::new("sh");
            command
                .args(["-c", "trap '' INT; exec \"$@\"", "sh"])
                .arg(env!("CARGO_BIN_EXE_bluebridge"));
            command.args(words).env("BLUEBRIDGE_STATE", rack.state()).env("NOTIFY_SOCKET", &socket);
            command.stdin(Stdio::null()).stdout(Stdio::null());
            let mut watching = command.spawn().expect("starts");
            let mut message = [0; 64];
            let length = ready.recv(&mut message).expect("a report");
            assert_eq!(&message[..length], b"READY=1");
            kill_process(Pid::from_child(&watching), ends).expect("signalled");
            until("the watch ends", || watching.try_wait().expect("a child").is_some());
            let status = watching.wait().expect("ended");
            assert_eq!(status.code(), Some(0), "{watch:?} {ends:?}: {status}");
        }
    }
    rack.text(&["rack", "restart", "hosts"]);
}

#[test]
fn an_endpoint_that_pointers_do_not_reach_says_so_at_once() {
    let rack = TestRack::up("cmd-cut", &["--memory", "16M", "--servers", "1", "--clients", "1"]);
    rack.text(&["rack", "kill", "hosts"]);
    rack.text(&["rack", "kill", "s1"]);
    for node in ["s1", "c1"] {
        let bluebridge = env!("CARGO_BIN_EXE_bluebridge");
        rack.text(&["rack", "exec", node, "--", bluebridge, "host", "down", "--interface", "eth0"]);
    }
    let words = "run `bluebridge host up --interface eth0` as root";
    let (code, said) = rack.failure(&["ping", "s1"]);
    assert!(code == Some(1) && said.contains(words), "{code:?}: {said}");
    let (code, said) = rack.failure(&["rack", "restart", "s1"]);
    assert!(code == Some(1) && said.contains(words), "{code:?}: {said}");
    let status = rack.call(&["rack", "status", "--json"]);
    let status: Value = serde_json::from_slice(&status.stdout).expect("JSON");
    let nodes = status["controller"]["nodes"].as_array().expect("rows");
    let server = nodes.iter().find(|it| it["name"] == "s1").expect("it was a member");
    assert_eq!(server["incarnation"], 1, "it did not join again");
    rack.text(&["rack", "restart", "hosts"]);
    rack.text(&["rack", "restart", "s1"]);
    rack.text(&["ping", "s1"]);
}

#[test]
fn daemons_log_what_the_rack_was_asked_for_and_logs_are_shown() {
    let rack = TestRack::up("cmd-logs", &["--memory", "16M", "-vv"]);
    let shown = |more: &[&str]| rack.text(&[&["rack", "logs"], more].concat());
    let has_debug = |part: &str| shown(&[part]).contains("DEBUG");
    assert!(has_debug("controller"), "{}", shown(&["controller"]));
    assert!(shown(&[]).lines().all(|line| line.contains(": ")), "{}", shown(&[]));
    assert!(shown(&[]).lines().any(|line| line.starts_with("controller: ")), "{}", shown(&[]));
    let log = || {
        let status = rack.json(&["rack", "status"]);
        let daemons = status["daemons"].as_array().expect("rows").clone();
        let daemon = daemons.into_iter().find(|it| it["name"] == "controller").expect("there");
        PathBuf::from(daemon["log"].as_str().expect("text"))
    };
    // The level stays, and the lines that a restart adds are followed.
    std::fs::write(log(), "").expect("emptied");
    let mut follow = rack.command(&["rack", "logs", "-f", "controller"]);
    let mut follow = follow.stdout(Stdio::piped()).spawn().expect("starts");
    rack.text(&["rack", "restart", "controller"]);
    let mut lines = BufReader::new(follow.stdout.take().expect("piped")).lines();
    let line = lines.find(|line| line.as_ref().expect("text").contains("DEBUG"));
    follow.kill().expect("killed");
    follow.wait().expect("waited");
    assert!(line.is_some(), "the log ended");
    assert!(has_debug("controller"));
    // The followers end with their readers, even if nothing is logged.
    let mut follow = rack.command(&["rack", "logs", "-f", "hosts"]);
    let mut follow = follow.stdout(Stdio::piped()).spawn().expect("starts");
    drop(follow.stdout.take());
    until("it ends", || follow.try_wait().expect("a child").is_some());
    // So does the format, once it was set.
    rack.text(&["rack", "restart", "s1", "--log-format", "json"]);
    rack.text(&["rack", "restart", "switch"]);
    for part in ["s1", "switch"] {
        let log = shown(&[part]);
        let last = log.lines().last().expect("a line");
        let event: Value = serde_json::from_str(last).unwrap_or_else(|error| {
            panic!("{part} logs no JSON: {error}: {last}");
        });
        assert!(event["level"].is_string(), "{event}");
    }
    let (code, said) = rack.failure(&["rack", "logs", "s7"]);
    assert!(code == Some(2) && said.contains("no daemon memserver-s7"), "{code:?}: {said}");
}

/// An operator's view at the default log level: which daemons started, and which controller has the switch.
#[test]
fn a_restarted_switch_is_seen_in_the_logs_at_the_default_level() {
    let rack =
        TestRack::up("cmd-log-info", &["--memory", "16M", "--servers", "1", "--clients", "1"]);
    let log = |part: &str| rack.text(&["rack", "logs", part]);
    let count = |part: &str, words: &str| log(part).matches(words).count();
    let starts = "the switch's agent starts";
    assert_eq!(count("switch", starts), 1, "{}", log("switch"));
    let said = log("switch");
    assert!(said.contains("1=p1 2=p2 3=p3") && said.contains("ebpf"), "{said}");
    until("a controller has the switch", || count("switch", "a controller has the switch") == 1);
    rack.text(&["rack", "kill", "switch"]);
    until("the controller misses it", || count("controller", "no connection to the switch") > 0);
    rack.text(&["rack", "restart", "switch"]);
    assert_eq!(count("switch", starts), 2, "{}", log("switch"));
    let is_back = || count("controller", "its tables are in sync") == 2;
    until("the controller has it again", is_back);
    let kept = log("switch").lines().rfind(|line| line.contains(starts)).map(str::to_owned);
    assert!(kept.is_some_and(|line| !line.contains("entries=0")), "{}", log("switch"));
    assert!(log("hosts").contains("watching the interfaces"), "{}", log("hosts"));
}

/// The way back in a rack, with the same decision that is made by hand elsewhere.
#[test]
fn a_fenced_controller_of_a_rack_is_let_back_by_order() {
    let rack = TestRack::up("cmd-fenced", &["--memory", "16M", "--servers", "1", "--clients", "1"]);
    let bluebridge = env!("CARGO_BIN_EXE_bluebridge");
    let store = rack.scratch.path().join("other.redb");
    let store = store.to_str().expect("text");
    let other = |more: &[&str]| {
        let exec = ["rack", "exec", "switch", "--", bluebridge, "controller", "--store", store];
        let mut command = rack.command(&[&exec[..], &["--listen", "[::1]:7799"], more].concat());
        command.stderr(Stdio::piped()).spawn().expect("starts")
    };
    // Started by accident, it changes nothing and reports what it found.
    let accident = other(&[]).wait_with_output().expect("ends");
    let said = String::from_utf8_lossy(&accident.stderr).into_owned();
    assert_eq!(accident.status.code(), Some(3), "{said}");
    assert!(said.contains("entries of 1 endpoints") && !said.contains("trying again"), "{said}");
    assert_eq!(problems(&rack), Vec::<String>::new());
    let mut intruder = other(&["--force"]);
    let has_ended = |found: &[String]| {
        let ended =
            |it: &String| it.starts_with("controller does not run") && it.contains("--force");
        found.iter().any(ended)
    };
    until("the right controller is fenced", || has_ended(&problems(&rack)));
    let pid = Pid::from_child(&intruder);
    kill_process(pid, Signal::TERM).expect("signalled");
    intruder.wait().expect("ends");
    let (code, said) = rack.failure(&["rack", "restart", "controller"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("start this one once with --force"), "{said}");
    // Nothing of the first run, which started normally.
    assert!(!said.contains("the controller starts"), "{said}");
    let (code, said) = rack.failure(&["rack", "restart", "s1", "--force"]);
    assert_eq!(code, Some(2), "{said}");
    rack.text(&["rack", "restart", "controller", "--force"]);
    until("the rack is well again", || problems(&rack).is_empty());
    rack.text(&["ping", "s1"]);
    rack.text(&["rack", "restart", "controller"]);
    assert_eq!(problems(&rack), Vec::<String>::new(), "it has the switch for good");
}

#[test]
fn memory_anywhere_needs_a_server() {
    let rack = TestRack::up("cmd-none", &["--servers", "0", "--clients", "1"]);
    for placed in [&["create", "4K", "--anywhere"][..], &["create", "4K"]] {
        let (code, said) = rack.failure(placed);
        assert_eq!(code, Some(4), "{said}");
        assert!(said.contains("no memory node is known"), "{said}");
    }
    for command in ["ping", "stat"] {
        let (code, said) = rack.failure(&[command, "s1"]);
        assert!(code == Some(2) && said.contains("no memory node s1 here, and no other"), "{said}");
    }
}

#[test]
fn memory_is_created_written_read_zeroed_and_deleted() {
    let rack = TestRack::up("cmd-memory", &["--memory", "32M"]);
    let made = rack.json(&["create", "10K", "--on", "s2", "--count", "2"]);
    assert_eq!((&made[0]["bytes"], &made[0]["node"]), (&12_288.into(), &"s2".into()));
    let pointer = made[1]["pointer"].as_str().expect("text");
    rack.text(&["write", pointer, "far away", "--offset", "4092"]);
    // The other client reads with only the pointer; the text crosses a page boundary.
    let read = ["read", pointer, "--offset", "4092", "--length", "8", "--as", "c2"];
    assert_eq!(rack.text(&read), "far away");
    let dump = rack.text(&[&read[..], &["--hex"]].concat());
    assert!(dump.ends_with("66 61 72 20 61 77 61 79                          far away"), "{dump}");
    assert_eq!(rack.json(&read)["hex"], "6661722061776179");
    rack.text(&["zero", pointer, "--offset", "4092", "--length", "3"]);
    assert_eq!(rack.json(&read)["hex"], "0000002061776179");
    let page = rack.call(&["read", pointer, "--offset", "96"]);
    assert_eq!(page.stdout.len(), 4000, "to the end of the page");

    let long: Vec<u8> = (0..5_000_001_u32).map(|at| (at % 253).to_le_bytes()[0]).collect();
    let stored = rack.feed(&["alloc-write", "--on", "s1"], &long);
    let stored = String::from_utf8(stored.stdout).expect("text").trim_end().to_owned();
    let length = long.len().to_string();
    assert_eq!(rack.call(&["read", &stored, "--length", &length]).stdout, long);
    let other: Vec<u8> = long.iter().rev().copied().collect();
    assert!(rack.feed(&["write", &stored], &other).status.success());
    assert_eq!(rack.call(&["read", &stored, "--length", &length]).stdout, other);

    let full = rack.json(&["stat", "s1"]);
    assert_eq!((&full[0]["capacity_pages"], &full[0]["used_pages"]), (&8192.into(), &1221.into()));
    let first = made[0]["pointer"].as_str().expect("text");
    let freed = rack.json(&["delete", first, pointer, &stored]);
    assert_eq!((&freed[0]["pages"], &freed[2]["pages"]), (&3.into(), &1221.into()));
    let all = rack.json(&["stat", "--all"]);
    let used: Vec<_> = all.as_array().expect("rows").iter().map(|row| &row["used_pages"]).collect();
    assert_eq!(used, [0, 0]);
    for place in [&[][..], &["--anywhere"]] {
        let made = rack.json(&[&["create", "1", "--count", "3"], place].concat());
        let pointers = made.as_array().expect("rows").iter().map(|row| row["pointer"].as_str());
        let pointers: Vec<_> = pointers.map(|pointer| pointer.expect("text")).collect();
        rack.text(&[&["delete"][..], &pointers].concat());
    }
    let times = rack.json(&["ping", "s2", "--count", "3"]);
    assert_eq!(times["round_trips_us"].as_array().map(Vec::len), Some(3));
    let text = rack.text(&["ping", "s2", "--count", "3"]);
    let last = text.lines().last().expect("a summary");
    assert!(last.starts_with("3 sent, 3 received; min/median/max "), "{text}");
    // Ids follow the order of joining, which is not that of the names.
    let id = times["node_id"].to_string();
    let answer = format!("s2 (node {id}) responded in ");
    assert!(rack.text(&["ping", &id]).starts_with(&answer));
}

/// Before the first heartbeat as well, which comes within a second.
#[test]
fn the_controller_knows_the_exact_size_of_a_server() {
    let rack = TestRack::up("cmd-size", &["--memory", "3M", "--servers", "1", "--clients", "1"]);
    let stat = rack.json(&["stat", "s1"]);
    let members = rack.json(&["controller", "members"]);
    let s1 = members.as_array().expect("rows").iter().find(|it| it["name"] == "s1").expect("there");
    assert_eq!((&stat[0]["capacity_pages"], &s1["capacity_pages"]), (&512.into(), &512.into()));
    assert_eq!(s1["free_pages"], 512);
}

#[test]
fn a_read_prints_all_or_nothing() {
    let rack = TestRack::up("cmd-whole", &["--memory", "16M", "--servers", "1", "--clients", "1"]);
    let pointer = rack.text(&["create", "2M"]);
    for length in ["2M", "0"] {
        let output = rack.call(&["read", &pointer, "--length", length]);
        let expected = if length == "0" { (Some(2), 0) } else { (Some(0), 2 << 20) };
        assert_eq!((output.status.code(), output.stdout.len()), expected, "{length}");
    }
    // The second is larger than the amount that is read before printing.
    for length in ["3M", "70M"] {
        for more in [&[][..], &["--hex"], &["--json"]] {
            let read = ["read", &pointer, "--length", length];
            let output = rack.call(&[&read[..], more].concat());
            let said = String::from_utf8_lossy(&output.stderr);
            if (length, more) == ("70M", &["--json"]) {
                assert_eq!(output.status.code(), Some(2), "{said}");
            } else {
                assert_eq!(output.status.code(), Some(3), "{length} {more:?}: {said}");
            }
            assert!(output.stdout.is_empty(), "{length} {more:?}");
            assert!(more == ["--json"] || said.contains("nothing is printed"), "{said}");
        }
    }
    // The allocation ends with a step of the transfer.
    for read in
        [&["read", &pointer, "--length", "2097153"][..], &["read", &pointer, "--length", "70M"]]
    {
        let said = String::from_utf8_lossy(&rack.call(read).stderr).into_owned();
        assert!(said.contains("past the end of the allocation"), "{said}");
    }
    let long = rack.scratch.path().join("long");
    std::fs::write(&long, vec![1; (2 << 20) + 1]).expect("written");
    let write = ["write", &pointer, "--file", long.to_str().expect("text")];
    let said = String::from_utf8_lossy(&rack.call(&write).stderr).into_owned();
    assert!(said.contains("past the end of the allocation"), "{said}");
}

#[test]
fn an_interrupted_update_ends_its_lease_at_once() {
    let rack = TestRack::up("cmd-hold", &["--memory", "16M", "--servers", "1"]);
    let pointer = rack.text(&["create", "1"]);
    let hold = ["update", &pointer, "--set", "changed", "--lease", "10s", "--hold", "100s"];
    let mut holding = rack.command(&hold);
    holding.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut holding = holding.spawn().expect("starts");
    let mut line = String::new();
    let stdout = holding.stdout.as_mut().expect("piped");
    BufReader::new(stdout).read_line(&mut line).expect("a line when the page is leased");
    // The line is printed just before the command watches for signals.
    let caught = format!("/proc/{}/status", holding.id());
    until("the command catches the signal", || {
        let status = std::fs::read_to_string(&caught).expect("it runs");
        let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
        let mask = u64::from_str_radix(mask.expect("a line").trim(), 16).expect("a mask");
        mask & (1 << (Signal::INT.as_raw() - 1)) != 0
    });
    kill_process(Pid::from_child(&holding), Signal::INT).expect("signalled");
    let output = holding.wait_with_output().expect("ends");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), &*said), (Some(1), "bluebridge: interrupted\n"));
    let abort = ["update", &pointer, "--set", "y", "--abort"];
    let said = rack.text(&abort);
    assert!(
        said.ends_with(&format!("1 byte at {pointer} is unchanged; the lease has ended")),
        "{said}"
    );
    let said = rack.failure(&["write", "fdbb:1:1:1:1::", "x"]).1;
    assert!(said.contains("nothing is written: node 1 refused"), "{said}");
    // The lease would have lasted for seconds.
    rack.text(&["update", &pointer, "--set", "x", "--no-wait", "--as", "c2"]);
    assert_eq!(rack.call(&["read", &pointer, "--length", "3"]).stdout, b"x\0\0");
}

#[test]
fn an_interrupted_alloc_write_leaves_nothing_allocated() {
    let rack = TestRack::up("cmd-break", &["--memory", "64M", "--servers", "1", "--clients", "2"]);
    let file = rack.scratch.path().join("data");
    std::fs::write(&file, vec![7; 48 << 20]).expect("written");
    // Slow, so that it is interrupted in the middle.
    rack.text(&["switch", "impair", "--node", "s1", "--loss", "0.1"]);
    let mut command = rack.command(&["alloc-write", "--deadline", "60s", "--file"]);
    command.arg(&file).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut writing = command.spawn().expect("starts");
    let mut line = String::new();
    let stdout = writing.stdout.as_mut().expect("piped");
    BufReader::new(stdout).read_line(&mut line).expect("the pointer comes first");
    kill_process(Pid::from_child(&writing), Signal::INT).expect("signalled");
    let output = writing.wait_with_output().expect("ends");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    let words = format!("the memory at {} is freed again: interrupted", line.trim_end());
    assert!(said.contains(&words), "{said}");
    rack.text(&["switch", "impair", "--node", "s1"]);
    assert_eq!(rack.json(&["stat", "s1"])[0]["used_pages"], 0);
}

/// Nobody could free memory whose pointer was not printed.
#[test]
fn memory_whose_pointer_cannot_be_printed_is_freed_again() {
    let rack = TestRack::up("cmd-lost", &["--memory", "16M", "--servers", "1", "--clients", "1"]);
    let full = || std::fs::File::options().write(true).open("/dev/full").expect("on every Linux");
    let closed = || std::io::pipe().expect("made").1;
    for command in [&["create", "4K", "--count", "3"][..], &["alloc-write", "hello"]] {
        for more in [&[][..], &["--json"]] {
            let full = rack.command(&[command, more].concat()).stdout(full()).output();
            let closed = rack.command(&[command, more].concat()).stdout(closed()).output();
            for output in [full, closed] {
                let output = output.expect("runs");
                let said = String::from_utf8_lossy(&output.stderr);
                assert_eq!(output.status.code(), Some(1), "{command:?} {more:?}: {said}");
                assert!(said.contains("is freed again: cannot write the result"), "{said}");
            }
            assert_eq!(rack.json(&["stat", "s1"])[0]["used_pages"], 0, "{command:?} {more:?}");
        }
    }
}

#[test]
fn an_interrupted_create_has_printed_all_pointers() {
    let rack = TestRack::up("cmd-many", &["--memory", "64M", "--servers", "1", "--clients", "1"]);
    // Slow, so that it is interrupted in the middle.
    rack.text(&["switch", "impair", "--node", "s1", "--loss", "0.1"]);
    let create = ["create", "1", "--count", "16384", "--json", "--deadline", "60s"];
    let mut command = rack.command(&create);
    let mut creating =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("starts");
    let mut output = BufReader::new(creating.stdout.take().expect("piped"));
    let mut text = String::new();
    output.read_line(&mut text).expect("a line before the end");
    kill_process(Pid::from_child(&creating), Signal::INT).expect("signalled");
    output.read_to_string(&mut text).expect("text");
    let ended = creating.wait_with_output().expect("ends");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.code() == Some(1) && said.contains("\"interrupted\""), "{said}");
    let made: Value = serde_json::from_str(&text).expect("a whole document");
    rack.text(&["switch", "impair", "--node", "s1"]);
    let used = rack.json(&["stat", "s1"])[0]["used_pages"].clone();
    assert_eq!(Some(&used), made.as_array().map(|made| made.len().into()).as_ref());
}

/// The rows of a node in a table.
fn of_node<'a>(rows: &'a Value, node: &str) -> Vec<&'a Value> {
    rows.as_array().expect("rows").iter().filter(|row| row["node"] == node).collect()
}

#[test]
fn operators_look_and_free_beside_a_program_that_is_the_endpoint() {
    let rack = TestRack::up("cmd-purge", &["--memory", "16M"]);
    let left = rack.text(&["create", "10K", "--on", "s1"]);
    let of_c2 = rack.text(&["create", "1", "--on", "s2", "--as", "c2"]);
    let mut program = rack.command(&["notices", "--count", "1000", "--within", "100s"]);
    let program = program.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("starts");
    let mut program = Killed(program);
    let live = || of_node_named(&rack.json(&["controller", "members"]), "c1") == "live";
    until("the program is c1", live);

    let listed = rack.json(&["list"]);
    let [row] = of_node(&listed, "s1")[..] else { panic!("{listed}") };
    assert_eq!((&row["pointer"], &row["bytes"]), (&left.as_str().into(), &12_288.into()));
    assert_eq!((&row["client"], &row["client_live"]), (&"c1".into(), &false.into()));
    let [row] = of_node(&listed, "s2")[..] else { panic!("{listed}") };
    assert_eq!((&row["pointer"], &row["client"]), (&of_c2.as_str().into(), &"c2".into()));
    let life = format!("{}:{}", row["client_id"], row["client_incarnation"]);
    assert_eq!(rack.json(&["list", "--client", &life]).as_array().map(Vec::len), Some(1));
    assert!(rack.text(&["list", "s1"]).contains(&left));
    assert_eq!(rack.json(&["stat", "s1"])[0]["used_pages"], 3);

    // The memory of c1 before the program became c1, but not that of c2.
    let purged = rack.json(&["purge", "--left-by", "c1"]);
    assert_eq!((&purged[0]["freed_pages"], &purged[1]["freed_count"]), (&3.into(), &0.into()));
    assert_eq!(rack.failure(&["read", &left, "--as", "c2"]).0, Some(3));
    rack.text(&["read", &of_c2, "--as", "c2"]);
    let counted = rack.json(&["stat", "s1", "--refusals"]);
    let refusals = counted[0]["refusals"].as_array().expect("rows");
    let refused = refusals.iter().find(|it| it["reason"] == "the page is not allocated");
    assert_eq!(refused.expect("the READ was refused")["count"], 1);
    assert!(rack.text(&["stat", "--refusals"]).contains("the page is not allocated"));
    assert_eq!(program.0.try_wait().expect("our child"), None, "the program is still c1");
    assert!(live());

    // Leased memory stays, and the command says so.
    let mut update =
        rack.command(&["update", &of_c2, "--set", "x", "--hold", "100s", "--as", "c2"]);
    let update = update.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("starts");
    let update = Killed(update);
    until("the page is leased", || rack.json(&["list", "s2"])[0]["leased"] == true);
    let kept = rack.call(&["purge", "--all", "--json"]);
    assert_eq!(kept.status.code(), Some(1), "{}", String::from_utf8_lossy(&kept.stderr));
    let kept: Value = serde_json::from_slice(&kept.stdout).expect("JSON");
    assert_eq!((&kept[1]["busy_count"], &kept[1]["freed_count"]), (&1.into(), &0.into()));
    drop(update);
    until("the lease ran out", || rack.call(&["purge", "--all"]).status.success());
    assert_eq!(rack.json(&["list"]).as_array().map(Vec::len), Some(0));

    let (code, said) = rack.failure(&["purge", "--left-by", "c9"]);
    assert!(code == Some(2) && said.contains("no client c9"), "{code:?}: {said}");
    let (code, said) = rack.failure(&["list", "s9"]);
    assert!(code == Some(2) && said.contains("no memory node s9 here, only s1, s2"), "{said}");
    assert_eq!(rack.failure(&["purge"]).0, Some(2), "it says what");
    assert_eq!(rack.failure(&["purge", "--all", "--left-by", "c1"]).0, Some(2), "one of them");
}

/// The state of a member.
fn of_node_named(members: &Value, name: &str) -> String {
    let member = members.as_array().expect("rows").iter().find(|it| it["name"] == name);
    member.map_or_else(String::new, |it| it["state"].as_str().expect("text").to_owned())
}

/// A child that is killed when dropped.
struct Killed(std::process::Child);

impl Drop for Killed {
    fn drop(&mut self) {
        self.0.kill().expect("our own child");
        self.0.wait().expect("our own child");
    }
}

#[test]
fn no_notice_in_time_has_its_exit_code() {
    let rack = TestRack::up("cmd-quiet", &["--memory", "16M", "--servers", "1", "--clients", "2"]);
    let (code, said) = rack.failure(&["notices", "--within", "200ms"]);
    assert!(code == Some(4) && said.contains("no notice arrived in time"), "{code:?}: {said}");
    let (code, said) = rack.failure(&["notices", "--within", "200ms", "--count", "2", "--json"]);
    assert_eq!(code, Some(4), "{said}");
    let error: Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!(error["error"]["kind"], "unreachable");
}

#[test]
fn each_kind_of_failure_has_its_exit_code_and_says_what_to_do() {
    let rack = TestRack::up("cmd-fails", &["--memory", "16M"]);
    let pointer = rack.text(&["create", "1", "--on", "s1"]);
    rack.text(&["delete", &pointer]);
    let fails = |arguments: &[&str], code, words: &str| {
        let (exit, said) = rack.failure(arguments);
        assert_eq!(exit, Some(code), "{arguments:?}: {said}");
        assert!(said.contains(words), "{arguments:?}: {said}");
    };
    fails(&["read", &pointer], 3, "the memory was freed");
    fails(&["write", &pointer, "x"], 3, "the memory was freed");
    fails(&["delete", &pointer], 3, "refused");
    fails(&["create", "17M", "--on", "s1"], 3, "out of memory");
    fails(&["zero", &pointer, "--length", "0"], 2, "length");
    fails(&["create", "1", "--on", "s9"], 2, "no memory node s9 here, only s");
    fails(&["read", "fd00::1"], 2, "fabric");
    fails(&["read", "fdbb:2:1::"], 2, "another space");
    fails(&["read", &pointer, "--as", "s1"], 2, "not a client");
    fails(&["read", &pointer, "--as", "c3"], 2, "no node c3");
    fails(&["read", &pointer, "--rack", "nowhere"], 2, "no rack nowhere");
    fails(
        &["read", &pointer, "--name", "x"],
        2,
        "also needs --interface, --switch-port, --controller",
    );
    fails(&["write", &pointer], 2, "no data");
    // The endpoint's own options, with no controller at the address.
    let lonely =
        ["--name", "x", "--interface", "lo", "--switch-port", "1", "--controller", "[::1]:1"];
    let lonely = [&["ping", "s1", "--deadline", "300ms"], &lonely[..]].concat();
    fails(&lonely, 4, "controller");
    // The deadline also applies to the join.
    let silent = ["ping", "s1", "--deadline", "2s", "--as", "c2"];
    rack.text(&["switch", "impair", "--node", "s1", "--loss", "1"]);
    fails(&silent, 4, "does not respond");
    rack.text(&["switch", "impair", "--node", "s1"]);
    for node in ["77", "0", "65534"] {
        let words = format!("there is no memory node {node} here, only s");
        fails(&["ping", node], 2, &words);
        fails(&["create", "1", "--on", node], 2, &words);
    }
    fails(&["list", "--client", "zz"], 2, "no client zz is known in space 1");
    fails(&["read", &pointer, "--length", "0"], 2, "use at least 1, or no --length");
    // What follows a server's own name is an endpoint in use, and the server must not be ended.
    let in_s1 = ["rack", "exec", "s1", "--", env!("CARGO_BIN_EXE_bluebridge")];
    let in_s1 = [&in_s1[..], &["create", "1", "--deadline", "200ms"]].concat();
    fails(&in_s1, 1, "such as a memory server: join through another interface, or on another host");
    assert!(!rack.failure(&in_s1).1.contains("end it"));
    // With -v a command names the rack that it selected itself.
    let (_, said) = rack.failure(&["ping", "77", "-v"]);
    assert!(said.contains("selected the rack") && said.contains(&rack.name), "{said}");
    let (_, said) = rack.failure(&["ping", "77", "-v", "--rack", &rack.name]);
    assert!(!said.contains("selected the rack"), "{said}");

    let status = rack.json(&["rack", "status", "--name", &rack.name]);
    let daemons = status["daemons"].as_array().expect("rows");
    let server = daemons.iter().find(|it| it["name"] == "memserver-s2").expect("there");
    let pid = server["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok());
    kill_process(pid.and_then(Pid::from_raw).expect("a pid"), Signal::KILL).expect("killed");
    fails(&["ping", "s2", "--deadline", "2s"], 4, "does not respond");
    fails(&["stat", "--deadline", "2s"], 4, "does not respond");
    assert_eq!(rack.call(&["rack", "status", "--name", &rack.name]).status.code(), Some(1));
}

#[test]
fn two_commands_take_turns_as_one_endpoint() {
    let rack = TestRack::up("cmd-turns", &["--memory", "16M"]);
    let spawn = || {
        let mut command = rack.command(&["ping", "s1", "--count", "200", "--deadline", "30s"]);
        command.stdout(Stdio::null()).spawn().expect("starts")
    };
    let mut children: Vec<_> = (0..6).map(|_| spawn()).collect();
    for child in &mut children {
        until("a command has had its turn", || child.try_wait().expect("a child").is_some());
        assert!(child.wait().expect("ends").success());
    }
    // A command that holds the endpoint for longer than the other waits.
    let mut holder = rack.command(&["notices", "--count", "1000", "--within", "100s"]);
    let holder = holder.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("starts");
    let holder = Killed(holder);
    let process = format!("another process {} (bluebridge) is this endpoint", holder.0.id());
    for named in [&[][..], &["--as", "c1"]] {
        until("the second command reports that the endpoint is in use", || {
            let ping = [&["ping", "s1", "--deadline", "100ms"], named].concat();
            let (exit, said) = rack.failure(&ping);
            exit == Some(1)
                && said.contains(&process)
                && said.contains("is this endpoint (--as chooses another)")
        });
    }
    let other = rack.call(&["ping", "s1", "--as", "c2"]);
    drop(holder);
    assert!(other.status.success(), "another endpoint is free");
}

/// Both commands are the same endpoint, which is one process at a time.
#[test]
fn what_a_command_reads_is_piped_to_one_that_writes_it() {
    let rack = TestRack::up("cmd-piped", &["--memory", "16M", "--servers", "1", "--clients", "1"]);
    let [from, to] = ["from", "to"].map(|_| rack.text(&["create", "3M"]));
    let data: Vec<u8> = (0..3 << 20).map(|at: u32| (at % 251).to_le_bytes()[0]).collect();
    assert!(rack.feed(&["write", &from], &data).status.success());
    for length in ["3", "3M"] {
        let (input, output) = std::io::pipe().expect("made");
        let mut write = rack.command(&["write", &to]);
        let write = write.stdin(input).stderr(Stdio::piped()).spawn().expect("starts");
        // The command is dropped, and this end of the pipe with it.
        let read = {
            let mut read = rack.command(&["read", &from, "--length", length]);
            read.stdout(output).stderr(Stdio::piped()).output().expect("runs")
        };
        let write = write.wait_with_output().expect("ends");
        for output in [&read, &write] {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
        let written = rack.call(&["read", &to, "--length", length]).stdout;
        assert_eq!(written, data[..if length == "3" { 3 } else { data.len() }]);
    }
}

#[test]
fn the_switch_shows_its_tables_and_ports_and_is_impaired() {
    let rack = TestRack::up("cmd-switch", &["--memory", "16M"]);
    let status = rack.json(&["rack", "status", "--name", &rack.name]);
    let controller = &status["controller"];
    assert_eq!((&status["healthy"], &controller["in_sync"]), (&true.into(), &true.into()));
    let nodes = controller["nodes"].as_array().expect("rows");
    let second = nodes.iter().find(|node| node["name"] == "s2").expect("joined");
    assert_eq!(controller["desired_entry_count"], controller["installed_entry_count"]);

    let directory = |node: &str| {
        let tables = rack.json(&["rack", "tables", "--name", &rack.name]);
        let rows = tables.as_array().expect("rows").iter();
        let mut rows = rows.filter(|row| row["table"] == "directory");
        let row = rows.find(|row| row["action"]["node"] == *node).expect("an entry");
        let prefix = row["match"]["destination"].as_str().expect("text").to_owned();
        (prefix, row["packets"].as_u64().expect("a count"))
    };
    let before = directory("s2");
    assert_eq!(second["prefix"], before.0);
    assert_eq!(before.0, format!("fdbb:1:{}::/48", second["id"]));
    rack.text(&["ping", "s2", "--count", "50"]);
    assert!(directory("s2").1 >= before.1 + 100, "{before:?} {:?}", directory("s2"));

    rack.text(&[
        "switch",
        "impair",
        "--node",
        "s1",
        "--loss",
        "0.3",
        "--duplicate",
        "0.2",
        "--seed",
        "9",
    ]);
    rack.text(&["ping", "s1", "--count", "100"]);
    let ports = rack.json(&["switch", "ports"]);
    let port = &ports["ports"][0];
    assert_eq!((&port["node"], &ports["data_plane"]), (&"s1".into(), &"ebpf".into()));
    assert!(port["impaired"]["lost"].as_u64() > Some(10), "{port}");
    assert!(port["impaired"]["duplicated"].as_u64() > Some(5), "{port}");
    rack.text(&["switch", "impair", "--port", "1"]);
    let lost = || rack.json(&["switch", "ports"])["ports"][0]["impaired"]["lost"].as_u64();
    let healed = lost();
    rack.text(&["ping", "s1", "--count", "100"]);
    assert_eq!(lost(), healed);
    let (exit, said) = rack.failure(&["switch", "impair", "--node", "s1", "--loss", "1.5"]);
    assert_eq!(exit, Some(2), "{said}");
    let (exit, said) = rack.failure(&["switch", "impair", "--port", "99", "--loss", "0.5"]);
    assert_eq!(exit, Some(3), "{said}");
    let (exit, said) = rack.failure(&["switch", "impair", "--port", "1", "--delay", "50"]);
    assert!(exit == Some(2) && said.contains("`bluebridge rack up --switch soft`"), "{said}");
    let (exit, said) = rack.failure(&["switch", "tables", "--agent", "[::1]:1"]);
    assert_eq!(exit, Some(4), "{said}");
}

/// A root, and a certificate and key that it issued, as files.
fn certificate(scratch: &Scratch) -> [PathBuf; 3] {
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
    let key = || KeyPair::generate().expect("a key");
    let mut params = CertificateParams::new(Vec::new()).expect("a root");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let root = CertifiedIssuer::self_signed(params, key()).expect("signed");
    let own = key();
    let params = CertificateParams::new(["controller.test".to_owned()]).expect("a name");
    let certificate = params.signed_by(&own, &root).expect("signed").pem();
    let texts = [("root", root.pem()), ("certificate", certificate), ("key", own.serialize_pem())];
    texts.map(|(name, text)| {
        let path = scratch.path().join(format!("{name}.pem"));
        std::fs::write(&path, text).expect("written");
        path
    })
}

/// Starts another controller in the rack on another port, for the same switch.
fn secure_controller(rack: &TestRack, certificate: &Path, key: &Path) -> std::process::Child {
    let mut command = rack.command(&["rack", "exec", "--name", &rack.name, "switch", "--"]);
    command.arg(env!("CARGO_BIN_EXE_bluebridge")).args(["controller", "--listen", "[::]:7701"]);
    // Its store is new, and the switch has entries of the rack's servers.
    command.arg("--force").arg("--store").arg(rack.scratch.path().join("secure.redb"));
    command.arg("--tls-certificate").arg(certificate).arg("--tls-key").arg(key);
    command.stderr(Stdio::null()).spawn().expect("starts")
}

#[test]
fn commands_join_a_controller_that_speaks_tls() {
    let rack = TestRack::up("cmd-tls", &["--memory", "16M"]);
    let [root, certificate, key] = certificate(&rack.scratch);
    let status = rack.json(&["rack", "status", "--name", &rack.name]);
    let daemons = status["daemons"].as_array().expect("rows");
    let plain = daemons.iter().find(|it| it["name"] == "controller").expect("there");
    let pid = plain["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok());
    kill_process(pid.and_then(Pid::from_raw).expect("a pid"), Signal::KILL).expect("killed");
    let mut controller = secure_controller(&rack, &certificate, &key);

    let links = status["links"].as_array().expect("rows");
    let switch = links.iter().find(|it| it["node"] == "switch").expect("there");
    let address = format!("[{}]:7701", switch["control_address"].as_str().expect("text"));
    let joins = |node: &str, port: &str, trust: &[&str]| {
        let exec = ["rack", "exec", "--name", &rack.name, node, "--"];
        let create = [env!("CARGO_BIN_EXE_bluebridge"), "create", "1", "--deadline", "20s"];
        let to = ["--controller", &address, "--switch-port", port];
        rack.call(&[&exec[..], &create, &to, trust].concat())
    };
    let root = root.to_string_lossy().into_owned();
    let trusted = joins("c1", "3", &["--tls-root", &root, "--tls-name", "controller.test"]);
    let plain = joins("c2", "4", &[]);
    let other_name = joins("c2", "4", &["--tls-root", &root]);
    // The commands of operators say the same.
    let asks = |trust: &[&str]| {
        let exec = ["rack", "exec", "--name", &rack.name, "c2", "--"];
        let status = [env!("CARGO_BIN_EXE_bluebridge"), "controller", "status"];
        rack.failure(&[&exec[..], &status, &["--controller", &address], trust].concat())
    };
    let stranger = Scratch::new("cmd-tls-stranger");
    let [stranger, ..] = self::certificate(&stranger);
    let trust_nobody = ["--tls-root", &stranger.to_string_lossy(), "--tls-name", "controller.test"];
    let (asked_plainly, asked_a_stranger) = (asks(&[]), asks(&trust_nobody));
    let is_asked = asks(&["--tls-root", &root, "--tls-name", "controller.test"]);
    controller.kill().expect("killed");
    controller.wait().expect("ends");
    let said = String::from_utf8_lossy(&trusted.stderr);
    let is_member = said.contains("no memory node is known");
    assert!(
        is_member && trusted.status.code() == Some(4),
        "no server joined this controller: {said}"
    );
    assert_eq!(plain.status.code(), Some(3), "{}", String::from_utf8_lossy(&plain.stderr));
    let hints = ["if it has a certificate, join with TLS", "it may require TLS"];
    let (code, said) = asked_plainly;
    assert!(code == Some(3) && hints.iter().any(|hint| said.contains(hint)), "{code:?}: {said}");
    let (code, said) = asked_a_stranger;
    assert!(code == Some(3) && said.contains("its certificate is not trusted"), "{code:?}: {said}");
    assert!(matches!(is_asked.0, Some(0 | 1)), "it is asked: {is_asked:?}");
    assert_eq!(
        other_name.status.code(),
        Some(3),
        "{}",
        String::from_utf8_lossy(&other_name.stderr)
    );
}
