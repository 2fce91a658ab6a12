//! Racks as Mininet topologies (`mininet/`), and small versions of the experiments, with this build's binary.

use std::fs;
use std::process::{Command, Stdio};

use bluebridge_rack::process;
use bluebridge_testkit::{Scratch, own, require_root, until};
use rustix::process::{Pid, Signal, kill_process};

/// Mininet is a module of Debian's own Python; another Python may be first in `PATH`.
const PYTHON: &str = "/usr/bin/python3";

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../mininet");

/// A module of `mininet/` with this build's binary.
fn command(module: &str, arguments: &[&str]) -> Command {
    require_root();
    let mut python = Command::new(PYTHON);
    // -B: no byte code in the checkout, which may belong to another user.
    python.args(["-B", "-m", module, "--program", env!("CARGO_BIN_EXE_bluebridge")]);
    python.args(arguments).current_dir(FOLDER);
    python
}

/// Runs a module of `mininet/` with this build's binary and returns its output.
fn run(module: &str, arguments: &[&str]) -> String {
    let output = command(module, arguments).stdin(Stdio::null()).output();
    let output = output.expect("Debian's Python runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{module} {arguments:?}: {text}{said}");
    text
}

fn check(switch: &str) {
    let text = run("bluebridge_mininet.rack", &["--switch", switch, "--check"]);
    assert_eq!(text, format!("{switch}: 3 servers, 2 clients: ok\n"));
}

#[test]
fn a_rack_with_the_ebpf_switch_works() {
    check("ebpf");
}

#[test]
fn a_rack_with_the_soft_switch_works() {
    check("soft");
}

#[test]
fn a_rack_with_open_vswitch_works() {
    check("ovs");
}

fn check_spine(switch: &str) {
    let text = run("bluebridge_mininet.spine", &["--switch", switch, "--check"]);
    assert_eq!(text, format!("{switch}: 4 servers, 2 clients: ok\n"));
}

#[test]
fn two_racks_of_ebpf_switches_work_behind_a_spine() {
    check_spine("ebpf");
}

#[test]
fn two_racks_of_soft_switches_work_behind_a_spine() {
    check_spine("soft");
}

#[test]
fn two_racks_of_open_vswitch_work_behind_a_spine() {
    check_spine("ovs");
}

/// Ends a rack by a signal to Python, and returns the exit code when no process of the rack is left.
fn end_rack(scratch: &Scratch, signal: Signal) -> Option<i32> {
    const MARK: &str = "MININET_TEST";
    let mark = own("mininet-signal");
    let mut python = command("bluebridge_mininet.rack", &["--switch", "soft"]);
    python.env(MARK, &mark).env("TMPDIR", scratch.path());
    python.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut python = python.spawn().expect("Debian's Python runs");
    // Mininet's command line would end at the end of its input.
    let input = python.stdin.take();
    let is_marked = |pid: u32| process::has_environment(pid, MARK, &mark);
    let is_last_server = |pid: u32| {
        let program = fs::read_link(format!("/proc/{pid}/exe"));
        process::has_environment(pid, "BLUEBRIDGE_NAME", "s3")
            && program.is_ok_and(|path| path.ends_with("bluebridge"))
    };
    until("the last server runs", || {
        process::find(|pid| is_marked(pid) && is_last_server(pid)).len() == 1
    });
    kill_process(Pid::from_child(&python), signal).expect("signalled");
    let status = python.wait().expect("waited");
    drop(input);
    until("no process is left", || process::find(is_marked).is_empty());
    status.code()
}

#[test]
fn a_rack_whose_python_is_terminated_takes_everything_down() {
    let scratch = Scratch::new("mininet-term");
    assert_eq!(end_rack(&scratch, Signal::TERM), Some(128 + 15));
    let left = fs::read_dir(scratch.path()).expect("readable").count();
    assert_eq!(left, 0, "files of the rack");
}

#[test]
fn the_daemons_of_a_rack_end_even_if_its_python_is_killed() {
    assert_eq!(end_rack(&Scratch::new("mininet-kill"), Signal::KILL), None);
}

/// Runs an experiment, and returns the lines of its CSV file.
fn experiment(name: &str, arguments: &[&str]) -> Vec<String> {
    let scratch = Scratch::new(&format!("mininet-{name}"));
    let output = scratch.path().to_str().expect("text");
    let module = format!("experiments.{name}");
    run(&module, &[&["--no-plots", "--output", output], arguments].concat());
    let file = scratch.path().join(format!("{name}.csv"));
    let text = fs::read_to_string(file).expect("written");
    text.lines().map(str::to_owned).collect()
}

#[test]
fn table_1_compares_with_a_directory() {
    let sizes = ["--runs", "20", "--warm-up", "2", "--switch", "soft"];
    let rows = experiment("table1", &sizes);
    assert_eq!(rows.len(), 6, "{rows:?}");
    assert!(rows[1..].iter().all(|row| row.starts_with("soft,")), "{rows:?}");
}

#[test]
fn page_faults_are_compared_with_a_directory_and_a_file() {
    let scratch = Scratch::new("mininet-faults");
    let output = scratch.path().to_str().expect("text");
    let sizes = ["--output", output, "--pages", "40", "--switch", "soft", "--handlers", "0"];
    let text = run("experiments.faults", &sizes);
    let read = |file: &str| fs::read_to_string(scratch.path().join(file)).expect("written");
    let rows = read("faults-latency.csv");
    for way in ["remote", "with directory", "page cache"] {
        let row = format!("{way},0,40,");
        assert!(rows.lines().any(|line| line.starts_with(&row)), "{row}: {rows}{text}");
    }
    assert!(read("faults-breakdown.svg").contains("access directory"));
}

/// Fewer addresses are compared than the kernel's table holds: all namespaces share its limit.
#[test]
fn pointers_need_one_neighbour_and_addresses_on_the_link_one_each() {
    let sizes = ["--count", "500", "--compare", "100", "--switch", "soft"];
    let rows = experiment("neighbours", &sizes);
    assert!(rows.contains(&"pointers,500,1,0".to_owned()), "{rows:?}");
    assert_eq!(rows.last().map(String::as_str), Some("a neighbour each,100,100,0"));
}

/// Section 5.4 of the paper, where it did not work.
#[test]
fn memory_moves_while_a_client_uses_it() {
    let rows = experiment("migration", &["--size", "4", "--seconds", "1", "--switch", "soft"]);
    let names =
        ["before", "migrate s1", "after", "restart s1", "restart s2", "restart s3", "at last"];
    assert_eq!(rows.len(), 1 + names.len(), "{rows:?}");
    for (row, name) in rows[1..].iter().zip(names) {
        assert!(row.starts_with(&format!("soft,{name},")), "{rows:?}");
    }
}

#[test]
fn memory_moves_by_itself_away_from_the_server_that_has_all_of_the_load() {
    let sizes = ["--servers", "2", "--size", "4", "--window", "2", "--seconds", "1"];
    let rest = ["--patience", "15", "--switch", "soft"];
    let rows = experiment("rebalance", &[sizes.as_slice(), &rest].concat());
    let shares = rows[1..].iter().map(|row| {
        let mut values = row.split(',').skip(1);
        let phase = values.next().expect("a phase").to_owned();
        let share = values.nth(1).and_then(|share| share.parse::<f64>().ok());
        (phase, share)
    });
    let shares: Vec<(String, Option<f64>)> = shares.collect();
    let phases: Vec<&str> = shares.iter().map(|(phase, _)| phase.as_str()).collect();
    assert_eq!(phases, ["before", "while it moves", "after"], "{rows:?}");
    let (before, after) = (shares[0].1.expect("it is known"), shares[2].1.expect("it is known"));
    assert!(before > 90.0 && after < before, "{rows:?}");
}

#[test]
fn hosts_that_are_client_and_server_work_at_once() {
    let rows = experiment("hosts42", &["--hosts", "4", "--runs", "20", "--switch", "soft"]);
    assert_eq!(rows.len(), 6, "{rows:?}");
    assert!(rows[1..].iter().all(|row| row.contains(",80,0,")), "{rows:?}");
}
