//! Racks as Mininet topologies (`mininet/`), with this build's binary.

use std::process::{Command, Stdio};

use bluebridge_testkit::require_root;

/// Mininet is a module of Debian's own Python; another Python may be first in `PATH`.
const PYTHON: &str = "/usr/bin/python3";

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../mininet");

/// Runs a module of `mininet/` with this build's binary and returns its output.
fn run(module: &str, arguments: &[&str]) -> String {
    require_root();
    let mut python = Command::new(PYTHON);
    // -B: no byte code in the checkout, which may belong to another user.
    python.args(["-B", "-m", module, "--program", env!("CARGO_BIN_EXE_bluebridge")]);
    python.args(arguments).current_dir(FOLDER).stdin(Stdio::null());
    let output = python.output().expect("Debian's Python runs");
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
    assert_eq!(text, format!("{switch}: 2 racks, 4 servers: ok\n"));
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
