//! Memory that outlives memory servers.

use std::io::{Seek, SeekFrom, Write};
use std::process::Command;

use bluebridge_testkit::{Scratch, require_root};
use serde_json::Value;

use super::test_rack::TestRack;

/// The files of a rack's servers, as `arena list` shows them.
fn files(rack: &TestRack) -> Vec<Value> {
    let listed = rack.json(&["arena", "list"]);
    let of_rack = |row: &&Value| {
        row["file"].as_str().is_some_and(|file| file.contains(&format!("-{}-", rack.name)))
    };
    listed.as_array().expect("a list").iter().filter(of_rack).cloned().collect()
}

#[test]
fn a_server_that_was_killed_comes_back_with_its_memory() {
    let rack = TestRack::up("cmd-kept", &["--memory", "16M"]);
    let on_rack = ["--rack", rack.name.as_str()];
    let pointer = rack.text(&[&["alloc-write", "kept", "--on", "s1"], &on_rack[..]].concat());
    let read = || rack.text(&[&["read", &pointer, "--length", "4"], &on_rack[..]].concat());
    assert_eq!(read(), "kept");
    let before = files(&rack);
    assert_eq!(before.len(), 2, "{before:?}");
    assert!(before.iter().all(|row| row["pid"].is_number() && row["node"].is_number()));
    let file = before[0]["file"].as_str().expect("a path").to_owned();
    let (code, said) = rack.failure(&["arena", "drop", &file]);
    assert!(code == Some(1) && said.contains("is in use by process"), "{code:?}: {said}");
    rack.text(&["rack", "kill", "s1"]);
    assert_eq!(files(&rack).iter().filter(|row| row["pid"].is_null()).count(), 1);
    rack.text(&["rack", "restart", "s1", "--keep"]);
    assert_eq!(read(), "kept");
    // Also when it ends in order, as for an upgrade, and what is written then is kept too.
    rack.text(&[&["write", &pointer, "anew"], &on_rack[..]].concat());
    rack.text(&["rack", "restart", "s1", "--keep"]);
    assert_eq!(read(), "anew");
    let (code, said) = rack.failure(&["rack", "restart", "controller", "--keep"]);
    assert!(code == Some(2) && said.contains("memory server"), "{code:?}: {said}");
    rack.text(&["rack", "restart", "s1"]);
    let gone = [&["read", &pointer, "--length", "4"], &on_rack[..]].concat();
    let (code, said) = rack.failure(&gone);
    assert!(code == Some(3), "{code:?}: {said}");
    let down = rack.json(&["rack", "down", "--name", &rack.name]);
    assert_eq!(down["stopped"]["arena_count"], 2, "{down}");
    assert_eq!(files(&rack), Vec::<Value>::new());
}

#[test]
fn nothing_acknowledged_is_lost_when_a_server_is_killed_again_and_again() {
    let words = ["experiment", "restarts", "--kills", "12", "--memory", "16M", "--json"];
    require_root();
    let scratch = Scratch::new("cmd-restarts");
    let mut command = Command::new(env!("CARGO_BIN_EXE_bluebridge"));
    command.args(words).env("BLUEBRIDGE_STATE", scratch.path().join("state"));
    let output = command.output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let clients = &found["clients"];
    assert_eq!((&clients["failures"], &clients["wrong_reads"]), (&0.into(), &0.into()), "{found}");
    assert!(clients["operations"].as_u64().is_some_and(|count| count > 100), "{found}");
    assert_eq!(found["until_writes_work"]["sample_count"], 12, "{found}");
}

#[test]
fn a_server_refuses_memory_that_is_not_its_own() {
    let rack = TestRack::up("cmd-kept-other", &["--memory", "16M", "--servers", "2"]);
    // The memory of another server.
    rack.text(&["rack", "kill", "s1"]);
    rack.text(&["rack", "kill", "s2"]);
    let files = files(&rack);
    let [first, second] = files.as_slice() else { panic!("{files:?}") };
    let path = |row: &Value| row["file"].as_str().expect("a path").to_owned();
    // A copy would be refused before the controller is asked.
    rack.text(&["arena", "drop", &path(first)]);
    std::fs::rename(path(second), path(first)).expect("they are in one directory");
    let (code, said) = rack.failure(&["rack", "restart", "s1", "--keep"]);
    assert_ne!(code, Some(0), "{said}");
    let log = rack.text(&["rack", "logs", "s1", "--rack", &rack.name]);
    assert!(log.contains("start with an empty arena"), "{log}");
    assert!(log.contains(&path(first)) && log.contains("start with --fresh"), "{log}");
    rack.text(&["rack", "restart", "s1"]);
}

/// An incarnation costs every client its sessions with the server.
#[test]
fn a_server_with_damaged_memory_does_not_join() {
    // In a file, which can be damaged from outside.
    let options = ["--memory", "16M", "--servers", "1", "--no-direct-reads"];
    let rack = TestRack::up("cmd-kept-damaged", &options);
    let incarnation = || {
        let status = rack.json(&["controller", "status"]);
        let nodes = status["controller"]["nodes"].as_array().expect("a list").clone();
        let server = nodes.into_iter().find(|node| node["name"] == "s1").expect("it joined");
        server["incarnation"].as_u64().expect("a number")
    };
    rack.text(&["rack", "restart", "s1", "--keep"]);
    rack.text(&["rack", "kill", "s1"]);
    let before = incarnation();
    let listed = files(&rack);
    let path = listed[0]["file"].as_str().expect("a path");
    let mut file = std::fs::File::options().write(true).open(path).expect("it is ours");
    // The record of the change under way is behind a page and the counters of direct readers.
    file.seek(SeekFrom::Start(4096 + 16_384)).expect("it is longer");
    file.write_all(&[0xff; 512]).expect("there is room");
    let (code, said) = rack.failure(&["rack", "restart", "s1", "--keep"]);
    assert!(code != Some(0) && said.contains("the record of its last change"), "{said}");
    assert_eq!(incarnation(), before);
    rack.text(&["rack", "restart", "s1"]);
    assert_eq!(incarnation(), before + 1);
}

#[test]
fn a_rack_whose_record_was_moved_takes_its_memory_down() {
    let rack = TestRack::up("cmd-kept-moved", &["--memory", "16M", "--servers", "1"]);
    let moved = rack.scratch.path().join("moved");
    std::fs::rename(rack.state(), &moved).expect("it is ours");
    assert_eq!(files(&rack).len(), 1);
    let mut down = rack.command(&["rack", "down", "--name", &rack.name, "--json"]);
    let output = down.env("BLUEBRIDGE_STATE", &moved).output().expect("runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let down: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(down["stopped"]["arena_count"], 1, "{down}");
    assert_eq!(files(&rack), Vec::<Value>::new());
}
