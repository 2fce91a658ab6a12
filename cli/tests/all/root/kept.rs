//! Memory that outlives memory servers.

use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use bluebridge_testkit::{Scratch, own, require_root, until};
use serde_json::Value;

use super::test_rack::{Killed, TestRack};

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
    let unanswered = ["read", &pointer, "--length", "4", "--deadline", "500ms"];
    let (code, said) = rack.failure(&[&unanswered[..], &on_rack].concat());
    assert!(code == Some(4) && said.contains("`bluebridge rack status` shows"), "{code:?}: {said}");
    rack.text(&["rack", "restart", "s1", "--keep"]);
    assert_eq!(read(), "kept");
    // Also when it ends in order, as for an upgrade, and what is written then is kept too.
    rack.text(&[&["write", &pointer, "anew"], &on_rack[..]].concat());
    let kept = rack.json(&["rack", "restart", "s1", "--keep"]);
    assert_eq!(kept["memory"], "kept", "{kept}");
    assert_eq!(read(), "anew");
    let (code, said) = rack.failure(&["rack", "restart", "controller", "--keep"]);
    assert!(code == Some(2) && said.contains("memory server"), "{code:?}: {said}");
    let (code, said) = rack.failure(&["rack", "restart", "s9", "--keep"]);
    assert!(code == Some(2) && said.contains("has no daemon memserver-s9"), "{code:?}: {said}");
    let emptied = rack.json(&["rack", "restart", "s1"]);
    assert_eq!(emptied["memory"], "empty", "{emptied}");
    let other = rack.json(&["rack", "restart", "hosts"]);
    assert_eq!(other["memory"], Value::Null, "{other}");
    let gone = [&["read", &pointer, "--length", "4"], &on_rack[..]].concat();
    let (code, said) = rack.failure(&gone);
    assert!(code == Some(3), "{code:?}: {said}");
    let down = rack.json(&["rack", "down", "--name", &rack.name]);
    assert_eq!(down["stopped"]["arena_count"], 2, "{down}");
    assert_eq!(files(&rack), Vec::<Value>::new());
}

/// What an experiment finds in a rack of its own.
fn experiment(name: &'static str, words: &[&str]) -> Value {
    require_root();
    let scratch = Scratch::new(name);
    let mut command = Command::new(env!("CARGO_BIN_EXE_bluebridge"));
    command.arg("experiment").args(words).arg("--json");
    command.env("BLUEBRIDGE_STATE", scratch.path().join("state"));
    let output = command.output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr);
    let found = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{found}");
    serde_json::from_str(&found).expect("JSON")
}

#[test]
fn no_operation_fails_while_every_server_is_drained_and_restarted_in_turn() {
    // Twice, so that servers are drained that serve what others lost.
    let words = ["rolling", "--size", "4M", "--seconds", "1", "--rounds", "2"];
    let found = experiment("cmd-rolling", &words);
    assert_eq!((&found["failures"], &found["wrong_reads"]), (&0.into(), &0.into()), "{found}");
    let turns = found["turns"].as_array().expect("a list");
    let servers: Vec<_> = turns.iter().filter_map(|turn| turn["server"].as_str()).collect();
    assert_eq!(servers, ["s1", "s2", "s3", "s1", "s2", "s3"]);
    for turn in turns {
        let count = turn["load"]["latency"]["sample_count"].as_u64();
        assert!(count.is_some_and(|count| count > 100), "{turn}");
        assert!(turn["detours"]["moved"].as_u64().is_some_and(|count| count > 0), "{turn}");
    }
}

#[test]
fn nothing_acknowledged_is_lost_when_a_server_is_killed_again_and_again() {
    let words = ["restarts", "--kills", "12", "--memory", "16M"];
    let found = experiment("cmd-restarts", &words);
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
    let rename = |from: &str, to: &str| std::fs::rename(from, to).expect("they are in /dev/shm");
    rename(&path(second), &path(first));
    // Nothing that is proposed, or done, drops the only memory of the other one.
    let of_other = format!("{} is the file of s2; ", path(first));
    let back = "put the server's own file back in its place";
    for words in [&["rack", "restart", "s1"][..], &["rack", "restart", "s1", "--keep"]] {
        let (code, said) = rack.failure(words);
        assert!(code == Some(2) && said.contains(&of_other) && said.contains(back), "{said}");
    }
    let status = rack.call(&["rack", "status"]);
    let shown = String::from_utf8_lossy(&status.stdout).into_owned();
    assert!(shown.contains("is that of s2; put the server's own file back"), "{shown}");
    rename(&path(first), &path(second));
    rack.text(&["rack", "restart", "s2", "--keep"]);
    rack.text(&["rack", "restart", "s1"]);
    // Both run, and each has the other's file in its place.
    let aside = format!("/dev/shm/aside-{}", rack.name);
    let swap = || {
        rename(&path(first), &aside);
        rename(&path(second), &path(first));
        rename(&aside, &path(second));
    };
    swap();
    let status = rack.call(&["rack", "status"]);
    assert_eq!(status.status.code(), Some(1));
    let shown = String::from_utf8_lossy(&status.stdout).into_owned();
    for (server, owner) in [("s1", "s2"), ("s2", "s1")] {
        let words = format!(
            "the next process of memserver-{server} cannot go on with its memory: its file "
        );
        let of_owner = format!("is that of {owner}; put the server's own file back");
        assert!(shown.contains(&words) && shown.contains(&of_owner), "{shown}");
    }
    let killed = rack.text(&["rack", "kill", "s1"]);
    assert!(killed.contains(&of_other) && killed.contains(back), "{killed}");
    assert!(killed.contains("so exchange the two files"), "{killed}");
    assert!(!killed.contains("end that process"), "{killed}");
    swap();
    rack.text(&["rack", "restart", "s1", "--keep"]);
    rack.text(&["rack", "kill", "s1"]);
    rack.text(&["rack", "kill", "s2"]);
    rack.text(&["arena", "drop", &path(first)]);
    rename(&path(second), &path(first));
    // A record of an earlier version does not say whose file it is; the controller knows it.
    let record = rack.state().join(&rack.name).join("state.json");
    let text = std::fs::read(&record).expect("it is ours");
    let mut state: Value = serde_json::from_slice(&text).expect("JSON");
    for daemon in state["daemons"].as_array_mut().expect("a list") {
        daemon["arena_ids"] = Value::Array(Vec::new());
    }
    std::fs::write(&record, state.to_string()).expect("it is ours");
    let (code, said) = rack.failure(&["rack", "restart", "s1", "--keep"]);
    assert!(code == Some(3) && said.trim_end().lines().count() == 1, "{code:?}: {said}");
    let log = rack.text(&["rack", "logs", "s1", "--rack", &rack.name]);
    // The cause, and then what the user of a rack can do, who gave no option of a server.
    let restart = format!("`bluebridge rack restart s1 --rack {}`", rack.name);
    let refused = log.lines().find(|line| line.contains("the server's memory are those of s2"));
    let refused = refused.unwrap_or_else(|| panic!("{log}"));
    let (cause, remedy) = refused.split_once("; ").expect("a cause and a remedy");
    assert!(cause.contains("not of s1") && cause.contains(&path(first)), "{refused}");
    assert!(said.contains(cause.split_once("contents").expect("of what").1), "{said}");
    assert!(remedy.starts_with(back) && remedy.contains("if no server needs"), "{refused}");
    assert!(remedy.contains(&restart) && remedy.contains("begins empty"), "{refused}");
    assert!(!refused.contains("--fresh") && !refused.contains("--arena-file"), "{refused}");
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
    let words = format!(
        "did not start: {path} holds an arena that cannot be taken over: the record of its last change"
    );
    assert!(code == Some(2) && said.contains(&words), "{code:?}: {said}");
    assert_eq!(said.trim_end().lines().count(), 1, "{said}");
    let restart = format!("`bluebridge rack restart s1 --rack {}`", rack.name);
    assert!(said.contains(&restart) && !said.contains("--fresh"), "{said}");
    assert_eq!(incarnation(), before);
    let restarted = rack.text(&["rack", "restart", "s1"]);
    assert!(!restarted.contains("would have kept"), "{restarted}");
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

/// Files that are removed by hand leave their maps behind, and maps their files.
#[test]
fn maps_without_files_and_files_without_maps_are_shown_and_dropped() {
    let rack = TestRack::up("cmd-kept-alone", &["--memory", "16M", "--servers", "2"]);
    let found = files(&rack);
    assert!(found.iter().all(|row| row["memory"] == "in_map"), "{found:?}");
    let text = |row: &Value, name: &str| row[name].as_str().expect("text").to_owned();
    let [(first, first_id), (second, second_id)] =
        [0, 1].map(|at| (text(&found[at], "file"), text(&found[at], "id")));
    let row_of = |id: &str| {
        let listed = rack.json(&["arena", "list"]);
        listed.as_array().expect("a list").iter().find(|row| row["id"] == id).cloned()
    };
    let (code, said) = rack.failure(&["arena", "drop", &first_id]);
    assert!(code == Some(2) && said.contains("drop that file instead"), "{said}");
    assert!(said.contains(&first), "{said}");
    // The server of a file that was moved away uses the map nevertheless.
    let aside = format!("/dev/shm/aside-{first_id}");
    std::fs::rename(&first, &aside).expect("it is ours");
    let (code, said) = rack.failure(&["arena", "drop", &first_id]);
    std::fs::rename(&aside, &first).expect("it is ours");
    assert!(code == Some(1) && said.contains("in use by process"), "{code:?}: {said}");
    rack.text(&["rack", "kill", "s1"]);
    rack.text(&["rack", "kill", "s2"]);
    // A header that is damaged is named, and so is the map.
    let image = std::fs::read(&second).expect("it is ours");
    let other_id = format!("the map {second_id} was last used with this file");
    for (at, words) in [
        (0, "its first bytes are damaged"),
        (12, "its state is unknown"),
        (24, "has another size than it says"),
        (56, other_id.as_str()),
    ] {
        let mut damaged = image.clone();
        damaged[at] ^= 4;
        // The inode is the same.
        std::fs::write(&second, &damaged).expect("it is ours");
        let row = files(&rack)
            .into_iter()
            .find(|row| row["file"] == second.as_str())
            .expect("it is there");
        assert!(text(&row, "damage").contains(words) && row["node"].is_null(), "{row}");
        assert_eq!(row["id"] == second_id.as_str(), at != 56, "{row}");
        let shown = rack.text(&["arena", "list"]);
        assert!(shown.contains(&format!("damaged: {}", text(&row, "damage"))), "{shown}");
        let (code, said) = rack.failure(&["rack", "restart", "s2", "--keep"]);
        assert!(code == Some(2) && said.contains(words), "{at}: {code:?}: {said}");
        if at == 12 {
            let status = rack.call(&["rack", "status"]);
            let shown = String::from_utf8_lossy(&status.stdout);
            let cause = format!("its memory: the header of its file {second} is damaged; ");
            assert!(shown.contains(&cause), "{shown}");
        }
    }
    let status = rack.call(&["rack", "status"]);
    let shown = String::from_utf8_lossy(&status.stdout).into_owned();
    let of_map = format!(
        "the id in its file {second} is damaged: its memory is in the BPF map {second_id}; "
    );
    assert!(shown.contains(&of_map), "{shown}");
    std::fs::write(&second, &image).expect("it is ours");
    assert_eq!(row_of(&second_id).expect("the file is there")["damage"], Value::Null);
    // So is the map of a server that was killed before it was ready, and whose file is gone.
    let third = format!("/dev/shm/bluebridge-arena-{}", rack.name);
    let exec = ["rack", "exec", "s2", "--rack", &rack.name, "--", env!("CARGO_BIN_EXE_bluebridge")];
    let serve =
        ["memserver", "--name", "s2", "--interface", "eth0", "--switch-port", "2", "--memory"];
    let more = ["1M", "--controller", "[::1]:1", "--direct-reads", "on", "--arena-file", &third];
    let mut starting = rack.command(&[&exec[..], &serve, &more].concat());
    let starting =
        Killed(starting.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it runs"));
    let mut third_id = String::new();
    until("its map is there", || {
        let listed = rack.call(&["arena", "list", &third, "--json"]);
        let rows: Value = serde_json::from_slice(&listed.stdout).unwrap_or_default();
        let is_there = rows[0]["memory"] == "in_map";
        is_there.then(|| third_id = text(&rows[0], "id"));
        is_there
    });
    drop(starting);
    std::fs::remove_file(&third).expect("it is ours");
    let alone = row_of(&third_id).expect("the map is there");
    assert_eq!((&alone["memory"], &alone["pid"]), (&"in_map_alone".into(), &Value::Null));
    rack.text(&["arena", "drop", &third_id]);
    assert_eq!(row_of(&third_id), None);
    std::fs::remove_file(&first).expect("it is ours");
    let alone = row_of(&first_id).expect("the map is there");
    assert_eq!((&alone["memory"], &alone["pid"]), (&"in_map_alone".into(), &Value::Null));
    assert!(alone["bytes"].as_u64().is_some_and(|bytes| bytes >= 16 << 20), "{alone}");
    let shown = rack.text(&["arena", "list"]);
    assert!(shown.contains("a map whose file is gone or was moved"), "{shown}");
    let dropped = rack.text(&["arena", "drop", &first_id]);
    assert!(dropped.contains(&first_id) && dropped.contains("are free"), "{dropped}");
    assert_eq!(row_of(&first_id), None);
    let pin = format!("/sys/fs/bpf/bluebridge-arenas/{second_id}");
    std::fs::remove_file(pin).expect("it is there");
    let gone = row_of(&second_id).expect("the file is there");
    assert_eq!((&gone["memory"], &gone["file"]), (&"gone".into(), &second.clone().into()));
    let (code, said) = rack.failure(&["rack", "restart", "s2", "--keep"]);
    assert!(code == Some(2) && said.contains("is gone"), "{code:?}: {said}");
    let restart = format!("; `bluebridge rack restart s2 --rack {}` drops the contents", rack.name);
    assert!(said.contains(&restart) && !said.contains("--fresh"), "{said}");
    rack.text(&["arena", "drop", &second]);
}

/// Also of a rack with problems.
fn status_of(rack: &TestRack) -> Value {
    let status = rack.call(&["rack", "status", "--json"]);
    let report: Value = serde_json::from_slice(&status.stdout).expect("JSON");
    assert_eq!(status.status.success(), report["healthy"] == true, "{report}");
    report
}

#[test]
fn a_server_whose_memory_cannot_be_kept_is_not_stopped_for_it() {
    let rack = TestRack::up("cmd-kept-lost", &["--memory", "16M", "--servers", "1"]);
    let server = |status: &Value| {
        let daemons = status["daemons"].as_array().expect("a list").clone();
        daemons.into_iter().find(|it| it["name"] == "memserver-s1").expect("it was started")
    };
    let row = files(&rack).pop().expect("it has a file");
    // In a file if the kernel cannot answer READs here.
    assert_eq!(row["memory"], "in_map", "{row}");
    let pin = format!("/sys/fs/bpf/bluebridge-arenas/{}", row["id"].as_str().expect("text"));
    let aside = format!("/sys/fs/bpf/bluebridge-arenas/aside-{}", rack.name);
    std::fs::rename(&pin, &aside).expect("it is there");
    let (code, said) = rack.failure(&["rack", "restart", "s1", "--keep"]);
    assert!(code == Some(2) && said.contains("is gone"), "{code:?}: {said}");
    // What was found then does not count when it is back.
    std::fs::rename(&aside, &pin).expect("it is there");
    let restarted = rack.json(&["rack", "restart", "s1", "--keep"]);
    assert_eq!(restarted["memory"], "kept", "{restarted}");
    assert_eq!(restarted["kept_memory"]["is_kept"], true, "{restarted}");
    let before = server(&status_of(&rack));
    std::fs::remove_file(pin).expect("it is there");
    let (code, said) = rack.failure(&["rack", "restart", "s1", "--keep"]);
    assert!(code == Some(2) && said.contains("is gone"), "{code:?}: {said}");
    let after = server(&status_of(&rack));
    assert_eq!((&after["pid"], &after["running"]), (&before["pid"], &true.into()), "{after}");
    // It is known from now on.
    assert_eq!(after["kept_memory"]["is_kept"], false, "{after}");
    rack.text(&["rack", "kill", "s1"]);
    let (_, said) = rack.failure(&["rack", "status"]);
    let status = rack.call(&["rack", "status"]);
    let shown = String::from_utf8_lossy(&status.stdout).into_owned() + &said;
    assert!(shown.contains("rack restart s1") && !shown.contains("--keep"), "{shown}");
    let restarted = rack.text(&["rack", "restart", "s1"]);
    assert!(!restarted.contains("would have kept"), "{restarted}");
    assert_eq!(server(&status_of(&rack))["kept_memory"]["is_kept"], true);
}

/// They have their memory as long as they are pinned, whatever has become of the files that name them.
#[test]
fn maps_whose_files_were_removed_or_replaced_by_hand_go_with_their_rack() {
    let rack = TestRack::up("cmd-kept-pins", &["--memory", "16M", "--servers", "2"]);
    let found = files(&rack);
    assert!(found.iter().all(|row| row["memory"] == "in_map" && row["layout"] == 4), "{found:?}");
    let text = |row: &Value, name: &str| row[name].as_str().expect("text").to_owned();
    let mut ids: Vec<_> = found.iter().map(|row| text(row, "id")).collect();
    let [first, second] = [0, 1].map(|at| text(&found[at], "file"));
    std::fs::remove_file(&first).expect("it is ours");
    // The next process has another map, and that of the earlier one is left.
    rack.text(&["rack", "restart", "s1"]);
    let next = text(&files(&rack)[0], "id");
    assert!(!ids.contains(&next));
    ids.push(next);
    std::fs::remove_file(&first).expect("it is ours");
    std::fs::write(&second, b"something else").expect("it is ours");
    let pins: Vec<_> = ids.iter().map(|id| format!("/sys/fs/bpf/bluebridge-arenas/{id}")).collect();
    assert!(pins.iter().all(|pin| Path::new(pin).exists()), "{pins:?}");
    rack.json(&["rack", "down", "--name", &rack.name]);
    let left: Vec<_> = pins.iter().filter(|pin| Path::new(pin).exists()).collect();
    assert!(left.is_empty(), "{left:?}");
}

/// Runs a shell script in mount and process namespaces of its own, where /dev/shm has a size, and the maps of other tests
/// are not seen; what it starts ends with it. `$BB` is the program.
fn in_small_memory(name: &'static str, size: &str, script: &str) -> Output {
    require_root();
    let scratch = Scratch::new(name);
    let script = format!(
        "mount -t tmpfs -o size={size} tmpfs /dev/shm\n\
         while umount /sys/fs/bpf 2> /dev/null; do :; done\n\
         {script}"
    );
    let mut command = Command::new("unshare");
    command.args([
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "sh",
        "-ec",
        &script,
    ]);
    command.env("BB", env!("CARGO_BIN_EXE_bluebridge")).env("RACK", own(name));
    command.env("BLUEBRIDGE_STATE", scratch.path().join("state")).stdin(Stdio::null());
    command.current_dir(scratch.path()).output().expect("it runs")
}

/// Builds a rack, runs a script, and takes the rack down; returns what it printed: JSON values.
fn of_rack_in_small_memory(name: &'static str, up: &str, script: &str) -> Vec<Value> {
    let script = format!(
        "trap '\"$BB\" rack down --name $RACK >&2' EXIT\n\
         \"$BB\" rack up --name $RACK --servers 2 --clients 1 --memory 16M --json {up}\n{script}"
    );
    let output = in_small_memory(name, "4m", &script);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let values = serde_json::Deserializer::from_slice(&output.stdout).into_iter();
    values.collect::<Result<_, _>>().expect("JSON")
}

fn kept_of_servers(status: &Value) -> Vec<Value> {
    let daemons = status["daemons"].as_array().expect("a list").iter();
    let servers = daemons
        .filter(|daemon| daemon["name"].as_str().is_some_and(|it| it.starts_with("memserver-")));
    servers.map(|server| server["kept_memory"].clone()).collect()
}

/// Containers have 64 MiB there, or less.
#[test]
fn a_small_dev_shm_does_not_keep_memory_from_being_kept_in_maps() {
    let printed = of_rack_in_small_memory(
        "kept-small",
        "",
        "P=$(\"$BB\" alloc-write kept --on s1)\n\
         \"$BB\" rack kill s1 >&2\n\
         \"$BB\" rack restart s1 --keep >&2\n\
         test \"$(\"$BB\" read $P --length 4)\" = kept\n\
         \"$BB\" arena list --json\n\
         \"$BB\" rack status --json\n",
    );
    let [up, list, status] = printed.as_slice() else { panic!("{printed:?}") };
    for status in [up, status] {
        let kept = serde_json::json!({ "is_kept": true, "reason": null, "is_recoverable": false });
        assert_eq!(kept_of_servers(status), [kept.clone(), kept]);
    }
    let in_map = |row: &Value| row["memory"] == "in_map" && row["bytes"].as_u64() > Some(16 << 20);
    assert!(
        list.as_array().is_some_and(|rows| rows.len() == 2 && rows.iter().all(in_map)),
        "{list}"
    );
}

#[test]
fn memory_that_cannot_be_kept_is_reported_with_the_reason() {
    let printed = of_rack_in_small_memory(
        "kept-no-room",
        "--no-direct-reads",
        "\"$BB\" rack status > text\n\
         grep -q 'The memory of s1, s2 ends with the process: /dev/shm has no room for a file of' text\n\
         \"$BB\" rack restart s1 --keep 2> text && exit 1\n\
         grep -q 'the memory of s1 ends with the process: /dev/shm has no room .*; free some of it' text\n\
         if grep -q 'without --keep' text; then exit 1; fi\n\
         \"$BB\" rack kill s1 > text\n\
         grep -q 'rack restart s1 --rack [^ ]*` starts it again' text\n\
         \"$BB\" rack status > text && exit 1\n\
         grep -q 'memserver-s1 does not run, and its memory ended with it; ' text\n\
         \"$BB\" rack restart s1 > text\n\
         grep -q 'The memory of s1 ends with the process: /dev/shm has no room' text\n\
         if grep -q 'keep' text; then exit 1; fi\n\
         \"$BB\" rack logs s1 > text\n\
         grep -q 'the memory ends with the process: /dev/shm has no room' text\n\
         \"$BB\" rack status --json\n",
    );
    let [up, status] = printed.as_slice() else { panic!("{printed:?}") };
    for status in [up, status] {
        for kept in kept_of_servers(status) {
            assert_eq!(kept["is_kept"], false, "{kept}");
            let reason = kept["reason"].as_str().expect("a reason");
            assert!(
                reason.starts_with("/dev/shm has no room") && reason.contains("--memory"),
                "{reason}"
            );
        }
    }
}

/// A server's messages before it joins; it cannot join here.
#[test]
fn a_server_says_why_its_memory_cannot_be_kept() {
    let start = "ip link set lo up\n\
                 serve() { \"$BB\" memserver --name s1 --interface lo --switch-port 1 --controller [::1]:1 \
                 --memory ${MEMORY:-16M} \"$@\" 2>&1 || true; }\n";
    let mount = "mount -t bpf bpf /sys/fs/bpf\n";
    let file = "--arena-file /dev/shm/arena";
    for (setup, serve, words) in [
        // A file that its user asked for is an error.
        ("", format!("{file} --direct-reads off"), "/dev/shm has no room for a file of 1"),
        (
            "",
            format!("{file} --direct-reads off --kept-memory auto"),
            "the memory ends with the process: /dev/shm has no room",
        ),
        (
            "seq 1 2000000 > /dev/shm/full || true\n",
            format!("{file} --direct-reads on"),
            "/dev/shm has no room for a file of 4096 bytes; free some of it, or name a file elsewhere",
        ),
        (
            "mount -o remount,nr_inodes=1 /dev/shm\n",
            file.to_owned(),
            "/dev/shm has no room for another file: its inodes are used up; remove files there",
        ),
        (
            "mount -o remount,ro /dev/shm\n",
            file.to_owned(),
            "/dev/shm is on a read-only file system; make it writable (`mount -o remount,rw /dev/shm`)",
        ),
        (
            "mount -t ramfs ramfs /dev/shm\n",
            file.to_owned(),
            "/dev/shm is not on a file system in memory (tmpfs or hugetlbfs); every change would be written to a disk: name a file \
             on a tmpfs with --arena-file",
        ),
        (
            "mkdir /dev/shm/arena\n",
            format!("{file} --fresh"),
            "/dev/shm/arena is a directory, and no arena's file; name another file with --arena-file",
        ),
        (
            "",
            "--arena-file /dev/shm/none/arena".to_owned(),
            "there is no directory /dev/shm/none; name a file in another one",
        ),
        (
            "mount -t bpf bpf /sys/fs/bpf\nmount -o remount,ro /sys/fs/bpf\n",
            format!("{file} --direct-reads on"),
            "make the BPF file system writable",
        ),
        ("MEMORY=0\n", String::new(), "there are 1 to 256 shards; change --memory or --shards"),
        ("MEMORY=0\n", file.to_owned(), "there are 1 to 256 shards; change --memory or --shards"),
        (mount, format!("{file} -v"), "the memory outlives the process"),
    ] {
        let script = format!("{start}{setup}serve {serve}");
        let script = format!("exec unshare --net sh -ec '{}'", script.replace('\'', ""));
        let output = in_small_memory("kept-says", "4m", &script);
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(said.contains(words), "{serve}: {said}{}", String::from_utf8_lossy(&output.stderr));
    }
    // A BPF file system of a mount namespace that ends with the server.
    for (direct, words) in [
        ("auto", "ends with its mount namespace, and the memory with it"),
        (
            "on",
            "outlives the process for a limited time: the BPF file system ends with this mount namespace",
        ),
    ] {
        let script = format!("{start}serve {file} --direct-reads {direct}");
        let script = format!("unshare --net --mount sh -ec '{script}'; true");
        let output = in_small_memory("kept-namespace", "4m", &script);
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(
            said.contains(words),
            "{direct}: {said}{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
}

/// Every user can give a file or a link that name. The rack comes up nevertheless.
#[test]
fn a_foreign_file_of_a_servers_name_is_named_and_the_rack_comes_up() {
    let printed = of_rack_in_small_memory(
        "kept-foreign",
        "",
        "F=$(\"$BB\" arena list --json | sed -n 's/.*\"file\": \"\\(.*-s1\\)\".*/\\1/p')\n\
         again() { \"$BB\" rack up --name $RACK --servers 2 --clients 1 --memory 16M --json; }\n\
         squatted() {\n\
           \"$BB\" rack status > text\n\
           grep -qF \"The memory of s1 ends with the process: $F $1; remove it\" text\n\
           grep -qF \"$F\\`), then \\`bluebridge rack restart s1 --rack $RACK\\`\" text\n\
           if grep -qe '--fresh\\|--arena-file' text; then exit 1; fi\n\
         }\n\
         \"$BB\" rack down --name $RACK >&2\n\
         test ! -e $F; ln -s /dev/null $F\n\
         again\n\
         squatted 'is a symbolic link, and no arena'\\''s file'\n\
         \"$BB\" rack down --name $RACK >&2\n\
         test -L $F; rm $F; (umask 077; echo other > $F)\n\
         again\n\
         squatted 'is no arena'\\''s file'\n\
         grep -q other $F\n\
         \"$BB\" rack restart s1 --keep 2> text && exit 1\n\
         grep -q 'is no arena.s file; remove it .*, then `bluebridge rack restart s1 --rack '$RACK'`$' text\n\
         \"$BB\" rack restart s1 > text\n\
         grep -q 'The memory of s1 ends with the process: .* is no arena.s file' text\n\
         \"$BB\" rack restart s1 --json\n\
         rm $F\n\
         \"$BB\" rack restart s1 --json\n\
         \"$BB\" rack status --json\n",
    );
    let [_, link, other, squatted, restarted, status] = printed.as_slice() else {
        panic!("{printed:?}")
    };
    assert_eq!(squatted["kept_memory"]["is_kept"], false, "{squatted}");
    assert_eq!(restarted["kept_memory"]["is_kept"], true, "{restarted}");
    for (status, is_kept) in [(link, false), (other, false), (status, true)] {
        let kept = kept_of_servers(status);
        assert_eq!((&kept[0]["is_kept"], &kept[1]["is_kept"]), (&is_kept.into(), &true.into()));
    }
    assert_eq!(restarted["memory"], "empty", "{restarted}");
}

/// What is printed names the place and what to do there.
#[test]
fn a_dev_shm_that_is_read_only_or_missing_is_named_with_what_to_do() {
    let printed = of_rack_in_small_memory(
        "kept-read-only",
        "",
        "F=$(\"$BB\" arena list --json | sed -n 's/.*\"file\": \"\\(.*-s1\\)\".*/\\1/p')\n\
         \"$BB\" rack kill s1 >&2\n\
         \"$BB\" rack kill s2 >&2\n\
         mount -o remount,ro /dev/shm\n\
         \"$BB\" arena list --json\n\
         \"$BB\" arena drop $F 2> text && exit 1\n\
         grep -q '/dev/shm is on a read-only file system; make it writable (.mount -o remount,rw /dev/shm.)' text\n\
         \"$BB\" rack down --name $RACK 2> text && exit 1\n\
         grep -q \"cannot remove $F: Read-only file system.*remount,rw /dev/shm.), then .bluebridge rack down\" text\n\
         mount -o remount,rw /dev/shm\n",
    );
    let [_, listed] = printed.as_slice() else { panic!("{printed:?}") };
    let rows = listed.as_array().expect("a list");
    assert!(rows.len() == 2 && rows.iter().all(|row| row["node"].is_number()), "{listed}");

    // A /dev without it, in the script's own mount namespace.
    let script = "mkdir dev; for it in null zero urandom random; do touch dev/$it; mount --bind /dev/$it dev/$it; done\n\
                  mount --rbind dev /dev; test ! -e /dev/shm\n\
                  trap '\"$BB\" rack down --name $RACK' EXIT\n\
                  \"$BB\" arena list 2> text && exit 1\n\
                  grep -q 'there is no directory /dev/shm; mount a tmpfs there (.mkdir /dev/shm ' text\n\
                  \"$BB\" rack up --name $RACK --servers 2 --clients 1 --memory 16M --no-direct-reads > text\n\
                  grep -q 'The memory of s1, s2 ends with the process: there is no directory /dev/shm; mount a' text\n\
                  mkdir /dev/shm; mount -t tmpfs tmpfs /dev/shm\n\
                  \"$BB\" rack status --name $RACK > text\n\
                  grep -q 'the process: when it started, there is no directory /dev/shm, which is no longer so; ' text\n";
    let output = in_small_memory("kept-missing", "4m", script);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}{said}", String::from_utf8_lossy(&output.stdout));
}

/// A mount namespace matters only to memory that is kept.
#[test]
fn memory_that_is_not_kept_has_no_direct_reads_for_that_reason() {
    let script = "trap '\"$BB\" rack down --name $RACK >&2' EXIT\n\
                  \"$BB\" rack up --name $RACK --servers 1 --clients 1 --memory 16M > text\n\
                  for i in $(seq 100); do\n\
                    \"$BB\" rack status --json > status\n\
                    if grep -q '\"refusal\": \"' status; then break; fi\n\
                    sleep 0.2\n\
                  done\n\
                  cat status\n";
    let script = format!("unshare --mount sh -ec '{}'; exit $?", script.replace('\'', "'\\''"));
    let output = in_small_memory("kept-reason", "4m", &script);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let status: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let refusal = &status["controller"]["nodes"][0]["direct_reads"]["refusal"];
    assert_eq!(refusal, "the memory is not kept: it ends with the process", "{status}");
    let kept = kept_of_servers(&status).pop().expect("a server");
    let reason = kept["reason"].as_str().expect("a reason");
    assert!(reason.starts_with("/dev/shm has no room for a file of 1"), "{reason}");
}

/// Something else among the pins hides no arena, and a BPF file system that is read-only matters only if something is
/// pinned there.
#[test]
fn what_others_did_to_the_bpf_file_system_hides_and_keeps_nothing() {
    let printed = of_rack_in_small_memory(
        "kept-pins",
        "",
        "P=/sys/fs/bpf/bluebridge-arenas/0123456789abcdef0123456789abcdef\n\
         mkdir $P\n\
         \"$BB\" arena list --json\n\
         \"$BB\" arena list > text\n\
         grep -q \" $P .*not an arena\" text\n\
         \"$BB\" arena drop 0123456789abcdef0123456789abcdef 2> text && exit 1\n\
         grep -q \"$P.*rm -r $P\" text\n\
         rmdir $P\n\
         \"$BB\" arena drop 0123456789abcdef0123456789abcdef 2> text && exit 1\n\
         grep -q 'with the id 0123456789abcdef0123456789abcdef .*; .bluebridge arena list. shows' text\n",
    );
    let [_, listed] = printed.as_slice() else { panic!("{printed:?}") };
    let rows = listed.as_array().expect("a list").iter();
    let arenas: Vec<_> =
        rows.map(|row| row["is_arena"].as_bool().expect("it can be read")).collect();
    assert_eq!(arenas, [true, true, false], "{listed}");

    let script = "mount -t bpf bpf /sys/fs/bpf\n\
                  \"$BB\" rack up --name $RACK --servers 1 --clients 1 --memory 16M --no-direct-reads --switch soft\n\
                  \"$BB\" arena list | grep -q 'MiB'\n\
                  mount -o remount,ro /sys/fs/bpf\n\
                  \"$BB\" rack down --name $RACK || { mount -o remount,rw /sys/fs/bpf; \"$BB\" rack down; exit 1; }\n\
                  \"$BB\" arena list | grep -q 'no memory server left'\n";
    let output = in_small_memory("kept-pins-ro", "64m", script);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}{said}", String::from_utf8_lossy(&output.stdout));
}

/// What can be seen from outside: the header, and that it is the file that the server uses.
#[test]
fn a_server_whose_file_the_next_one_would_refuse_is_not_stopped() {
    let options = ["--memory", "16M", "--servers", "1", "--no-direct-reads"];
    let rack = TestRack::up("cmd-kept-healthy", &options);
    let server = || {
        let status = status_of(&rack);
        let daemons = status["daemons"].as_array().expect("a list").clone();
        daemons.into_iter().find(|it| it["name"] == "memserver-s1").expect("it was started")
    };
    let before = server();
    let listed = files(&rack);
    let path = Path::new(listed[0]["file"].as_str().expect("a path"));
    let write = |at, bytes: &[u8]| {
        let mut file = std::fs::File::options().write(true).open(path).expect("it is ours");
        file.seek(SeekFrom::Start(at)).expect("it is longer");
        file.write_all(bytes).expect("there is room");
    };
    let refused = |words: &str| {
        let (code, said) = rack.failure(&["rack", "restart", "s1", "--keep"]);
        assert!(code == Some(2) && said.contains(words), "{code:?}: {said}");
        assert!(said.contains("it was not stopped"), "{said}");
        assert!(said.contains(&format!("`bluebridge rack restart s1 --rack {}`", rack.name)));
        assert!(!said.contains("--fresh") && !said.contains("--arena-file"), "{said}");
        let after = server();
        assert_eq!((&after["pid"], &after["running"]), (&before["pid"], &true.into()), "{after}");
    };
    let image = std::fs::read(path).expect("it is ours");
    // The version, and the number of shards.
    for (at, words) in [(8, "of another version"), (24, "its number or size of shards cannot be")] {
        write(at, &[0xa5; 2]);
        refused(words);
        let whole = usize::try_from(at).expect("small");
        write(at, &image[whole..whole + 2]);
    }
    // Status says what has become of the file, and so does the command that kills a server.
    let aside = path.with_file_name(format!("aside-{}", rack.name));
    let kept = |is_kept: bool, words: &str| {
        let kept = server()["kept_memory"].clone();
        assert_eq!(kept["is_kept"], is_kept, "{kept}");
        assert!(is_kept || kept["reason"].as_str().expect("why").contains(words), "{kept}");
        let status = rack.call(&["rack", "status"]);
        assert_eq!(status.status.success(), is_kept);
        let shown = String::from_utf8_lossy(&status.stdout).into_owned();
        let words = "the next process of memserver-s1 cannot go on with its memory: ";
        assert_eq!(shown.contains(words), !is_kept, "{shown}");
        assert!(!shown.contains("The memory of s1"), "it is said once: {shown}");
        assert_eq!(kept["is_recoverable"], !is_kept, "{kept}");
        assert!(!shown.contains("ends with the process"), "{shown}");
    };
    let set_length = |bytes: usize| {
        let file = std::fs::File::options().write(true).open(path).expect("it is ours");
        file.set_len(u64::try_from(bytes).expect("small")).expect("there is room");
    };
    set_length(image.len() + 4096);
    let report = status_of(&rack);
    let problem = report["problems"][0].as_str().expect("a sentence");
    assert!(problem.contains("it has another length than it says"), "{report}");
    set_length(image.len());
    kept(true, "");
    std::fs::rename(path, &aside).expect("it is ours");
    kept(false, "is gone; put it back in its place, or `bluebridge rack restart s1");
    refused("there is no file ");
    refused("; put the server's file back in its place (then `bluebridge rack restart s1 --rack ");
    refused(" --keep`), or begin with empty memory (`bluebridge rack restart s1");
    std::os::unix::fs::symlink(&aside, path).expect("it is gone");
    kept(false, "something else is in the place of its file");
    refused(
        "is a symbolic link, and no arena's file; it was not stopped; put the server's file back",
    );
    std::fs::remove_file(path).expect("it is ours");
    // The same contents, but not the file that the server has open.
    std::fs::write(path, &image).expect("there is room");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(path, mode).expect("it is ours");
    kept(false, "a copy");
    refused("is not the file that the server uses");
    std::fs::rename(&aside, path).expect("it is ours");
    kept(true, "");
    // What keeps the memory is the only remedy then.
    let keep = format!("then `bluebridge rack restart s1 --rack {} --keep`", rack.name);
    let recoverable = |words: &str, remedy: &str| {
        let (code, said) = rack.failure(&["rack", "restart", "s1", "--keep"]);
        assert!(code == Some(2) && said.contains(words), "{code:?}: {said}");
        assert!(said.contains(remedy) && said.trim_end().ends_with(&keep), "{said}");
        assert_eq!(said.matches("rack restart").count(), 1, "{said}");
    };
    let set_mode = |mode| {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
        std::fs::set_permissions(path, mode).expect("it is ours");
    };
    set_mode(0o644);
    kept(false, "may be opened by other users; `chmod 600 ");
    recoverable("may be opened by other users", &format!("`chmod 600 {}`", path.display()));
    set_mode(0o600);
    std::os::unix::fs::chown(path, Some(1), None).expect("this is root");
    kept(false, "belongs to another user (uid 1); if it is the server's, `chown 0 ");
    recoverable("belongs to another user (uid 1)", &format!("`chown 0 {}`", path.display()));
    std::os::unix::fs::chown(path, Some(0), None).expect("this is root");
    kept(true, "");
    std::fs::rename(path, &aside).expect("it is ours");
    let killed = rack.text(&["rack", "kill", "s1"]);
    assert!(
        killed.contains("cannot go on with its memory as it is: there is no file "),
        "{killed}"
    );
    assert!(killed.contains("put the server's file back in its place (then `"), "{killed}");
    assert!(killed.contains(&keep["then ".len()..]), "{killed}");
    // Of a server that does not run, status says what has become of its memory.
    let left = |is_kept: bool, words: &str| {
        let status = status_of(&rack);
        assert_eq!(status["healthy"], false, "a daemon does not run");
        let problems = status["problems"].as_array().expect("a list");
        let mut problems = problems.iter().filter_map(Value::as_str);
        assert!(
            problems.any(|it| it.contains("-s1 does not run") && it.contains(words)),
            "{words}: {status}"
        );
        let daemons = status["daemons"].as_array().expect("a list");
        let server =
            daemons.iter().find(|it| it["name"] == "memserver-s1").expect("it was started");
        assert_eq!(server["kept_memory"]["is_kept"], is_kept, "{server}");
    };
    left(false, "and it cannot go on with its memory: its file ");
    std::fs::rename(&aside, path).expect("it is ours");
    left(true, "and its memory is kept; `bluebridge rack restart s1 ");
    // Another process has the only endpoint of a namespace.
    rack.json(&["rack", "restart", "s1", "--keep"]);
    let program = env!("CARGO_BIN_EXE_bluebridge");
    let exec = ["rack", "exec", "s1", "--rack", &rack.name, "--", program];
    let more =
        ["memserver", "--name", "s7", "--interface", "eth0", "--switch-port", "7", "--memory"];
    let (_, said) = rack.failure(&[&exec[..], &more, &["1M", "--controller", "[::1]:1"]].concat());
    let pid = server()["pid"].as_u64().expect("it runs");
    let holder = format!(
        "the process {pid} (bluebridge) is the endpoint already; end it first (`kill {pid}`)"
    );
    assert!(said.contains(&holder), "{said}");
    // Who follows the advice keeps the memory.
    set_mode(0o640);
    let killed = rack.text(&["rack", "kill", "s1"]);
    let repair =
        format!("may be opened by other users; `chmod 600 {}` ends that; {keep}", path.display());
    assert!(killed.trim_end().ends_with(&repair), "{killed}");
    set_mode(0o600);
    let restarted = rack.json(&["rack", "restart", "s1", "--keep"]);
    assert_eq!(restarted["memory"], "kept", "{restarted}");
    set_mode(0o640);
    let restarted = rack.text(&["rack", "restart", "s1"]);
    let dropped = "may be opened by other users; --keep would have kept it without that";
    assert!(restarted.contains(dropped), "{restarted}");
    // A cause that is no more is told as one of the start.
    set_mode(0o600);
    rack.text(&["rack", "kill", "s1"]);
    std::os::unix::fs::chown(path, Some(1), None).expect("this is root");
    let restarted = rack.json(&["rack", "restart", "s1"]);
    assert_eq!(restarted["kept_memory"]["is_kept"], false, "{restarted}");
    let shown = rack.text(&["rack", "status"]);
    let ends = "The memory of s1 ends with the process: ";
    assert!(shown.contains(ends) && !shown.contains("when it started"), "{shown}");
    std::os::unix::fs::chown(path, Some(0), None).expect("this is root");
    let shown = rack.text(&["rack", "status"]);
    let was = format!(
        "{ends}when it started, {} belongs to another user (uid 1), which is no longer so; `bluebridge rack restart s1",
        path.display()
    );
    assert!(shown.contains(&was), "{shown}");
    let (_, said) = rack.failure(&["rack", "restart", "s1", "--keep"]);
    assert!(said.contains(was.strip_prefix("The ").expect("so")), "{said}");
    let restarted = rack.json(&["rack", "restart", "s1"]);
    assert_eq!(restarted["kept_memory"]["is_kept"], true, "{restarted}");
}

/// `ip netns exec` mounts another /sys, and so hides the BPF file system.
#[test]
fn memory_in_a_hidden_map_is_neither_dropped_nor_called_gone() {
    let rack = TestRack::up("cmd-kept-hidden", &["--memory", "16M", "--servers", "1"]);
    rack.text(&["rack", "kill", "s1"]);
    let row = files(&rack).pop().expect("it has a file");
    assert_eq!(row["memory"], "in_map", "{row}");
    let file = row["file"].as_str().expect("text");
    let script = "mount -t sysfs sysfs /sys\nip link set lo up\n\
                  \"$BB\" arena list \"$FILE\"\n\
                  \"$BB\" arena drop \"$FILE\" && exit 9\n\
                  serve() { \"$BB\" memserver --name s1 --interface lo --switch-port 1 --controller [::1]:1 \
                  --memory 16M --arena-file \"$FILE\" \"$@\"; }\n\
                  serve && exit 9\nserve --fresh && exit 9\nexit 0\n";
    let mut command = Command::new("unshare");
    command.args(["--net", "--mount", "sh", "-c", script]).stdin(Stdio::null());
    command.env("BB", env!("CARGO_BIN_EXE_bluebridge")).env("FILE", file);
    let output = command.output().expect("it runs");
    let printed = String::from_utf8_lossy(&output.stdout);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}{said}");
    assert!(printed.contains("a map that is not visible here"), "{printed}");
    assert_eq!(said.matches("nsenter --net").count(), 3, "{said}");
    assert!(!said.contains("is gone") && !said.contains("arena drop"), "{said}");
    rack.text(&["rack", "restart", "s1", "--keep"]);
}
