//! The daemons of a rack: killed, silent, restarted, fenced; their status and logs.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use bluebridge_testkit::{Scratch, until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::test_rack::TestRack;

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
    until("the server tells that it is ready", || {
        rack.text(&["rack", "logs", "s1"]).contains("the starter no longer waits")
    });
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
    let words = format!("`bluebridge rack restart s1 --rack {} --keep` starts it", rack.name);
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
