//! Measuring as an endpoint of a rack.

use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use bluebridge_testkit::{Scratch, require_root, until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::test_rack::{Killed, TestRack};

const BINARY: &str = env!("CARGO_BIN_EXE_bluebridge");

/// Where a command reports that its work begins.
struct Ready {
    path: PathBuf,
    socket: UnixDatagram,
}

impl Ready {
    fn new(scratch: &Scratch) -> Self {
        let path = scratch.path().join("ready");
        let socket = UnixDatagram::bind(&path).expect("a socket");
        socket.set_read_timeout(Some(Duration::from_secs(30))).expect("set");
        Self { path, socket }
    }

    fn wait(&self) {
        let mut message = [0; 64];
        let length = self.socket.recv(&mut message).expect("it reports");
        assert_eq!(&message[..length], b"READY=1");
    }
}

/// Whether no server holds memory of the clients.
fn is_all_free(rack: &TestRack) -> bool {
    let servers = rack.json(&["stat"]);
    let servers = servers.as_array().expect("a list");
    servers.iter().all(|server| server["capacity_pages"] == server["free_pages"])
}

/// The address of a client's host, in the rack's control network.
fn control_address(rack: &TestRack, client: &str) -> String {
    let shown = rack.text(&["rack", "exec", client, "--", "ip", "-6", "-o", "addr", "show"]);
    let mut words = shown.split_whitespace().skip_while(|word| !word.starts_with("fd00:bb:"));
    let address = words.next().and_then(|word| word.split('/').next());
    address.unwrap_or_else(|| panic!("{client} has no address: {shown}")).to_owned()
}

#[test]
fn every_operation_is_measured_with_and_without_a_directory() {
    let rack = TestRack::up("cmd-workload", &["--memory", "16M"]);
    let listen = format!("[{}]:7800", control_address(&rack, "c2"));
    let serve = ["rack", "exec", "c2", "--", BINARY, "workload", "directory", "--listen", &listen];
    let mut directory = Killed(rack.command(&serve).spawn().expect("starts"));
    let file = rack.scratch.path().join("crud.csv");
    let file = file.to_str().expect("text");
    let crud = ["workload", "crud", "--runs", "30", "--warm-up", "5", "--directory", &listen];
    let mut text = String::new();
    // The directory may need a moment until it listens; then no operation fails.
    until("the directory serves", || {
        let output = rack.call(&[&crud[..], &["--csv", file]].concat());
        text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(
            directory.0.try_wait().expect("our child").is_none(),
            "it serves until it is ended"
        );
        output.status.success()
    });
    for words in ["direct CREATE 30", "direct UPDATE 30", "directory DELETE 30"] {
        let is_shown =
            |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ").starts_with(words);
        assert!(text.lines().any(is_shown), "{words}: {text}");
    }
    let rows = std::fs::read_to_string(file).expect("written");
    assert_eq!(rows.lines().count(), 1 + 5 + 6, "{rows}");
    assert!(rows.lines().skip(1).all(|row| row.ends_with(",0")), "{rows}");
    assert!(is_all_free(&rack));
}

#[test]
fn operations_that_fail_are_counted() {
    let rack = TestRack::up("cmd-workload-fail", &["--memory", "16M"]);
    // Nobody listens there, so the registration of a page fails, and each second run with it; ten in a row end it.
    let crud = ["workload", "crud", "--runs", "20", "--warm-up", "0", "--directory", "[::1]:1"];
    let output = rack.call(&[&crud[..], &["--json"]].concat());
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        said.contains("10 operations failed, 10 runs left out; the first: the directory"),
        "{said}"
    );
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!((&report["failure_count"], &report["skipped_run_count"]), (&10.into(), &10.into()));
    let rows = report["rows"].as_array().expect("a list");
    let direct = rows.iter().filter(|row| row["way"] == "direct");
    assert_eq!(direct.filter(|row| row["sample_count"] == 10).count(), 5, "{rows:?}");
    assert!(is_all_free(&rack), "pages that the directory does not know are freed");
}

#[test]
fn page_faults_are_measured_in_both_modes_with_and_without_a_directory() {
    let rack = TestRack::up("cmd-workload-faults", &["--memory", "64M"]);
    let listen = format!("[{}]:7800", control_address(&rack, "c2"));
    let serve = ["rack", "exec", "c2", "--", BINARY, "workload", "directory", "--listen", &listen];
    let _directory = Killed(rack.command(&serve).spawn().expect("starts"));
    let output = rack.scratch.path().join("faults");
    let output = output.to_str().expect("text");
    let faults = ["workload", "faults", "--pages", "600", "--handlers", "0,1", "--output", output];
    let mut shown = Vec::new();
    until("the directory serves", || {
        let output = rack.call(&[&faults[..], &["--directory", &listen, "--json"]].concat());
        shown = output.stdout;
        output.status.success()
    });
    let report: Value = serde_json::from_slice(&shown).expect("JSON");
    let rows = report["rows"].as_array().expect("a list");
    let missing = report["missing"].as_array().expect("a list").len();
    // Not all file systems can be read without the page cache.
    assert_eq!(rows.len() + 2 * missing, 8, "{report}");
    for row in rows {
        assert_eq!(row["sample_count"], 600, "{row}");
        let asked = row["parts"]["directory_us"].as_f64().expect("a number");
        assert_eq!(asked > 0.0, row["way"] == "remote_with_directory", "{row}");
    }
    for file in ["latency.csv", "breakdown.csv", "latency.svg", "breakdown.svg"] {
        let path = format!("{output}/faults-{file}");
        assert!(std::fs::metadata(&path).is_ok_and(|file| file.len() > 0), "{path}");
    }
    assert!(is_all_free(&rack));
    let unheard = [&faults[..], &["--directory", "[::1]:1"]].concat();
    let (code, said) = rack.failure(&unheard);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("with directory [::1]:1): the directory cannot be used"), "{said}");
    assert!(is_all_free(&rack));
}

#[test]
fn the_demo_of_page_faults_builds_a_rack_of_its_own() {
    require_root();
    let scratch = Scratch::new("cmd-page-demo");
    let mut demo = Command::new(BINARY);
    demo.args(["page", "demo", "--pages", "100", "--handlers", "1", "--json"]);
    demo.env("BLUEBRIDGE_STATE", scratch.path().join("state")).current_dir(scratch.path());
    let output = demo.stdin(Stdio::null()).output().expect("runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let rows = report["rows"].as_array().expect("a list");
    let missing = report["missing"].as_array().expect("a list").len();
    // Not all file systems can be read without the page cache.
    assert_eq!(rows.len() + missing, 4, "{report}");
    for row in rows {
        assert_eq!(row["sample_count"], 100, "{row}");
        let asked = row["parts"]["directory_us"].as_f64().expect("a number");
        assert_eq!(asked > 0.0, row["way"] == "remote_with_directory", "{row}");
    }
    let plot = scratch.path().join("faults").join("faults-breakdown.svg");
    assert!(std::fs::metadata(&plot).is_ok_and(|file| file.len() > 0), "{}", plot.display());
    let mut racks = Command::new(BINARY);
    racks.args(["rack", "status"]).env("BLUEBRIDGE_STATE", scratch.path().join("state"));
    assert!(!racks.output().expect("runs").status.success(), "its rack is still up");
}

#[test]
fn many_pointers_need_one_neighbour() {
    let rack = TestRack::up("cmd-workload-pages", &["--memory", "16M"]);
    let report = rack.json(&["workload", "pages", "--count", "3000"]);
    assert_eq!(report["pointer_count"], 3000);
    assert_eq!(report["neighbours"]["fabric"], 1);
    assert!(is_all_free(&rack));
    let (code, said) = rack.failure(&["workload", "pages", "--count", "20000"]);
    assert_eq!(code, Some(3), "{said}");
    assert!(said.contains("memory"), "{said}");
    assert!(is_all_free(&rack), "what was created before is freed");
}

#[test]
fn memory_moves_under_a_load_that_checks_it() {
    let rack = TestRack::up("cmd-workload-moving", &["--memory", "32M"]);
    let scratch = Scratch::new("cmd-workload-moving");
    let ready = Ready::new(&scratch);
    let words = ["workload", "moving", "--on", "s1", "--size", "8M", "--seconds", "60", "--keep"];
    let mut load = rack.command(&[&words[..], &["--clients", "2", "--json"]].concat());
    load.env("NOTIFY_SOCKET", &ready.path).stdout(Stdio::piped());
    let load = load.spawn().expect("it starts");
    ready.wait();
    rack.text(&["drain", "s1"]);
    kill_process(Pid::from_child(&load), Signal::TERM).expect("signalled");
    let output = load.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{output:?}");
    let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!((&found["failures"], &found["wrong_reads"]), (&0.into(), &0.into()), "{found}");
    assert!(found["detours"]["moved"].as_u64() > Some(0), "{found}");
    let pointer = found["pointers"][0].as_str().expect("text");
    let late = ["workload", "reads", pointer, "--size", "8M", "--count", "100", "--as", "c2"];
    let late = rack.json(&late);
    assert_eq!((&late["latency"]["sample_count"], &late["wrong_reads"]), (&100.into(), &0.into()));
    // The command that created it is not asked to free it, and what was not written is no page of it.
    assert_eq!(found["left"], found["pointers"]);
    let other = rack.text(&["create", "4M", "--on", "s2"]);
    let words = ["workload", "reads", other.trim(), "--size", "4M", "--count", "10", "--json"];
    let other = rack.command(&words).output().expect("it runs");
    assert_eq!(other.status.code(), Some(1), "{other:?}");
    let other: Value = serde_json::from_slice(&other.stdout).expect("JSON");
    assert_eq!(other["wrong_reads"], 10, "{other}");
}

#[test]
fn what_a_load_saw_is_printed_if_its_memory_cannot_be_freed() {
    let rack = TestRack::up("cmd-workload-left", &["--memory", "24M"]);
    let scratch = Scratch::new("cmd-workload-left");
    let ready = Ready::new(&scratch);
    let words = ["workload", "moving", "--on", "s1", "--size", "8M", "--seconds", "60", "--json"];
    let mut load = rack.command(&words);
    load.env("NOTIFY_SOCKET", &ready.path).stdout(Stdio::piped()).stderr(Stdio::piped());
    let load = load.spawn().expect("it starts");
    ready.wait();
    rack.text(&["drain", "s1"]);
    // Who has all of it is gone.
    rack.text(&["rack", "kill", "s2", "--name", &rack.name]);
    kill_process(Pid::from_child(&load), Signal::TERM).expect("signalled");
    let output = load.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&output.stderr);
    let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert!(said.contains("is not freed"), "{said}{found}");
    assert_eq!(found["left"], found["pointers"]);
    rack.text(&["rack", "restart", "s2", "--name", &rack.name]);
    rack.text(&["undrain", "s1"]);
    // The second server has no room for it.
    rack.text(&["create", "20M", "--on", "s1"]);
    let free = |rack: &TestRack| rack.json(&["stat", "s2"])[0]["free_pages"].clone();
    let before = free(&rack);
    let words = ["workload", "moving", "--on", "s2,s1", "--size", "8M", "--seconds", "1"];
    let (code, said) = rack.failure(&words);
    assert_eq!((code, free(&rack)), (Some(3), before), "{said}");
}

#[test]
fn a_directory_reports_when_it_listens_and_ends_when_it_is_told_to() {
    let scratch = Scratch::new("cmd-workload-end");
    let ready = Ready::new(&scratch);
    let mut serve = Command::new(BINARY);
    serve.args(["workload", "directory", "--listen", "[::1]:0"]).env("NOTIFY_SOCKET", &ready.path);
    let mut serve = Killed(serve.stdin(Stdio::null()).spawn().expect("starts"));
    ready.wait();
    kill_process(Pid::from_child(&serve.0), Signal::TERM).expect("signalled");
    assert_eq!(serve.0.wait().expect("our child").code(), Some(0));
}
