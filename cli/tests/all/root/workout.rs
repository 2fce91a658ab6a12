//! Programs with little local memory, in racks of their own.

use std::process::{Command, Output, Stdio};

use bluebridge_testkit::{Scratch, require_root};
use serde_json::Value;

/// Runs an experiment with one round; its files belong in the test's directory.
fn experiment(scratch: &Scratch, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bluebridge"));
    command.arg("experiment").args(arguments).args(["--rounds", "1"]).stdin(Stdio::null());
    command.env("BLUEBRIDGE_STATE", scratch.path().join("state"));
    command.current_dir(scratch.path()).output().expect("runs")
}

fn findings(scratch: &Scratch, arguments: &[&str]) -> Value {
    let output = experiment(scratch, &[arguments, &["--json"]].concat());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {said}");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn file(scratch: &Scratch, name: &str) -> String {
    std::fs::read_to_string(scratch.path().join("workout").join(name)).expect("it was written")
}

#[test]
fn copies_run_in_racks_of_several_sizes() {
    require_root();
    let scratch = Scratch::new("cmd-workout");
    let options = ["--size", "1M", "--copies", "2", "--servers", "1,2", "--local", "100%,50%"];
    let findings = findings(&scratch, &[&["quicksort"][..], &options].concat());
    assert_eq!((&findings["copies"], &findings["servers"]), (&2.into(), &2.into()));
    assert_eq!(findings["size_bytes"], 1 << 20);
    let runs = findings["runs"].as_array().expect("a list");
    let settings: Vec<_> =
        runs.iter().map(|run| (run["servers"].as_u64(), run["local_percent"].as_u64())).collect();
    let all = [(1, 100), (1, 50), (2, 100), (2, 50)];
    assert_eq!(settings, all.map(|(servers, local)| (Some(servers), Some(local))));
    for run in runs {
        let published: Vec<_> =
            run["published"].as_array().expect("a list").iter().map(|it| &it["ratio"]).collect();
        match run["local_percent"].as_u64() {
            Some(50) => assert_eq!(published, [1.7], "{run}"),
            _ => assert!(published.is_empty(), "{run}"),
        }
        assert_eq!(run["remote_faults"] == 0, run["local_percent"] == 100, "{run}");
    }
    let csv = file(&scratch, "quicksort.csv");
    assert_eq!(csv.lines().count(), 1 + 2 * 3, "{csv}");
    assert!(csv.lines().any(|line| line.starts_with("2,2,50 %,")), "{csv}");
    let plot = file(&scratch, "quicksort.svg");
    for word in ["1 server", "2 servers", "HPBD"] {
        assert!(plot.contains(word), "{word} is missing");
    }
}

/// The command itself compares the bodies with those of the run in plain memory.
#[test]
fn bodies_move_in_remote_memory_as_in_plain_memory() {
    require_root();
    let scratch = Scratch::new("cmd-bodies");
    let options = ["barnes-hut", "--size", "1M", "--local", "25%", "--handlers", "1"];
    let findings = findings(&scratch, &options);
    assert_eq!((&findings["workout"], &findings["copies"]), (&"barnes-hut".into(), &1.into()));
    let run = &findings["runs"][0];
    assert!(run["remote_faults"].as_u64() > Some(0), "{run}");
    assert!(run["written_bytes"].as_u64() > Some(0), "{run}");
    assert!(file(&scratch, "barnes-hut.csv").contains("\n1,1,25 %,"));
}

#[test]
fn a_table_has_the_published_ratio_beside_ours() {
    require_root();
    let scratch = Scratch::new("cmd-published");
    let output = experiment(&scratch, &["testswap", "--size", "1M", "--local", "50%,25%"]);
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout);
    let line = |share: &str| text.lines().find(|line| line.contains(share)).expect("a line");
    assert!(line(" 50 % ").contains(" 1.45 (HPBD) "), "{text}");
    assert!(!line(" 25 % ").contains("HPBD"), "{text}");
}

#[test]
fn impossible_numbers_are_errors_of_the_command_line() {
    let scratch = Scratch::new("cmd-workout-wrong");
    for wrong in [
        &["--servers", "0"][..],
        &["--servers", "1,9"],
        &["--servers", ""],
        &["--copies", "0"],
        &["--copies", "9"],
        &["--size", "32K", "--copies", "2", "--local", "50%"],
        &["--compare", "disk"],
        &["--compare", "zram,"],
    ] {
        let output = experiment(&scratch, &[&["barnes-hut"][..], wrong].concat());
        assert_eq!(output.status.code(), Some(2), "{wrong:?}: {output:?}");
    }
}

/// Refused before anything is built or turned on.
#[test]
fn what_cannot_hold_a_swap_file_is_named() {
    require_root();
    let scratch = Scratch::new("cmd-swap-directory");
    let file = ["--compare", "swap-file", "--swap-directory"];
    for command in [&["testswap", "--size", "1M"][..], &["paging-latency"]] {
        let output = experiment(&scratch, &[command, &file, &["/dev/shm"]].concat());
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(
            said.contains("/dev/shm is on tmpfs") && said.contains("--swap-directory"),
            "{said}"
        );
        let output = experiment(&scratch, &[command, &file, &["/nonexistent"]].concat());
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("/nonexistent"), "{said}");
    }
    assert!(!scratch.path().join("workout").exists(), "nothing was begun");
}
