//! The commands that use a rack's memory, with a running rack.

use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;

use bluebridge_testkit::until;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::test_rack::{Killed, TestRack};

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
