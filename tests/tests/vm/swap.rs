//! Experiments beside the machine's own swap, in machines: swap is a setting of the whole machine, so a test must not turn
//! it on where other programs run. Debian's Linux 6.12 has memory cgroups of version 2 only, 6.1 has also version 1.

use std::{
    fs::{self, File},
    process::Command,
    time::Duration,
};

use bluebridge_testkit::{Scratch, program};
use bluebridge_vm::{Kernel, Machine, Output};
use serde_json::Value;

use crate::installed;

/// Racks are built, and programs run, on emulated processors of a machine that may be busy.
const DEADLINE: Duration = Duration::from_secs(230);
/// For the program of 130 MB, of which the parts in use are cached, and what the experiment wants to have free.
const MEMORY_MIB: u32 = 1024;
/// Room for the swap file, and what the experiment wants to leave free.
const DISK_BYTES: u64 = 512 << 20;
const FUNCTIONS: &str = include_str!("swap.sh");

const ENABLED: &str = r#"
echo +memory >"$TOP/cgroup.subtree_control"
"#;

/// Nothing changes if swap cannot be compared: it says why. For version 2, in which nothing is enabled.
const REFUSED: &str = r#"
fails_with 1 begin_and_wait zram
says 'no memory cgroup can be made'
says 'echo +memory > /sys/fs/cgroup/cgroup.subtree_control'
echo +memory >"$TOP/cgroup.subtree_control"
busybox dd if=/dev/zero of=/swap/own bs=1M count=8 2>/dev/null
busybox mkswap /swap/own >/dev/null
busybox swapon /swap/own
fails_with 1 begin_and_wait swap-file,zram
says 'this machine has swap already, which would be measured instead: /swap/own; turn it off for this time'
grep -q '^/swap/own' /proc/swaps || fail "its own swap is off"
busybox swapoff /swap/own
rm /swap/own
await nothing_is_left
step "refused"
"#;

/// Both kinds of swap are compared, and the results are printed.
const COMPARED: &str = r#"
(experiment swap-file,zram testswap --size 4M) || fail "it did not succeed"
nothing_is_left || fail "something is left"
step "compared"
"#;

const INTERRUPTED: &str = r#"
begin swap-file
await_pages
kill -INT "$EXPERIMENT"
fails_with 1 wait "$EXPERIMENT"
nothing_is_left || fail "something is left"
step "interrupted"
"#;

/// The experiment does the guardian's work if it finds out that the guardian is gone.
const WITHOUT_GUARDIAN: &str = r#"
begin zram
await_pages
kill -KILL "$GUARDIAN"
fails_with 1 wait "$EXPERIMENT"
says 'the guardian of swap has ended'
nothing_is_left || fail "something is left"
step "the guardian was killed"
"#;

/// The last one in a machine: the daemons of its rack are left, and keep the processor from others.
const KILLED: &str = r#"
begin swap-file
await_pages
kill -KILL "$EXPERIMENT"
fails_with 137 wait "$EXPERIMENT"
await nothing_is_left
step "killed"
"#;

/// Executes parts of a script, one after the other, in a machine with a disk for swap files.
fn execute(kernel: Kernel, cgroup: u8, parts: &[&str]) -> String {
    let scratch = Scratch::new("vm-swap");
    let (disk, script) = (scratch.file("disk"), scratch.file("script"));
    let file = File::create(&disk).and_then(|file| file.set_len(DISK_BYTES));
    file.expect("a file with holes");
    let made =
        Command::new("mke2fs").args(["-q", "-F", "-t", "ext4", "-m", "0"]).arg(&disk).status();
    assert!(made.expect("mke2fs runs; install e2fsprogs").success(), "no file system");
    fs::write(&script, format!("{FUNCTIONS}{}", parts.concat())).expect("written");
    let script = script.to_str().expect("an ASCII path");
    let machine = Machine::new(&installed(kernel), ["/bin/sh", script])
        .environment("BLUEBRIDGE", program())
        .environment("CGROUP", cgroup.to_string())
        .memory_mib(MEMORY_MIB)
        .disk(&disk)
        .deadline(DEADLINE);
    // zram of Linux 6.1 takes lz4 only if its module is there.
    let modules = ["ext4", "lz4", "zram", "veth"];
    let machine = modules.into_iter().fold(machine, Machine::module);
    let output = machine.run().unwrap_or_else(|error| panic!("{error}"));
    println!("Linux {kernel}: {:.1} s", output.took.as_secs_f64());
    println!("{}", String::from_utf8_lossy(&output.stderr));
    Output::success(output).unwrap_or_else(|error| panic!("{error}"))
}

/// What a comparison of both kinds must print.
#[track_caller]
fn check_findings(json: &str) {
    let findings: Value =
        serde_json::from_str(json).unwrap_or_else(|error| panic!("{error}: {json}"));
    let runs = findings["swap_runs"].as_array().unwrap_or_else(|| panic!("no rows: {json}"));
    let kinds: Vec<_> = runs.iter().map(|run| run["kind"].as_str().unwrap_or("none")).collect();
    assert_eq!(kinds, ["swap-file", "zram"], "{json}");
    for run in runs {
        let number = |name: &str| run[name].as_u64().unwrap_or_else(|| panic!("{name}: {run}"));
        assert_eq!(number("local_percent"), 25);
        assert_eq!(number("limit_bytes"), number("own_bytes") + (1 << 20));
        assert!(number("written_bytes") > 0, "nothing was pressed out: {run}");
        assert_eq!(run["compressed_share"].is_number(), run["kind"] == "zram", "{run}");
        assert!(run["ratio"].as_f64().is_some_and(|ratio| ratio > 0.0), "{run}");
    }
}

#[test]
fn both_kinds_are_compared_with_cgroups_of_version_2_and_nothing_is_left() {
    check_findings(&execute(Kernel::V6_12, 2, &[REFUSED, COMPARED]));
}

#[test]
#[ignore = "another minute; version 2 is tested always: cargo test -p bluebridge-tests --test vm -- --ignored"]
fn both_kinds_are_compared_with_cgroups_of_version_1_and_nothing_is_left() {
    check_findings(&execute(Kernel::V6_1, 1, &[COMPARED, KILLED]));
}

#[test]
fn swap_is_off_however_the_experiment_ends() {
    execute(Kernel::V6_12, 2, &[ENABLED, INTERRUPTED, WITHOUT_GUARDIAN, KILLED]);
}
