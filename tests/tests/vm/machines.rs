//! A machine executes its command and ends, whatever happens.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use bluebridge_rack::process::{self, ProcessRecord};
use bluebridge_testkit::{Scratch, until, xtask};
use bluebridge_vm::{Kernel, Machine, MachineError, run_together};

use crate::installed;

#[test]
fn a_command_sees_the_hosts_files_and_its_result_comes_back() {
    let scratch = Scratch::new("vm-files");
    let (before, shared) = (scratch.file("before"), scratch.file("shared"));
    fs::write(&before, "from the host").expect("written");
    fs::create_dir(&shared).expect("made");
    for kernel in Kernel::ALL {
        let script = "uname -r; cat before; echo changed > before; cat before; \
                      echo \"$WORD\" > /shared/word; echo trouble >&2; exit 3";
        let machine = Machine::script(&installed(kernel), script)
            .environment("WORD", "it's a word")
            .directory(scratch.path())
            .share(&shared, "/shared");
        let output = machine.run().expect("the machine ends with its command");
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        let version = format!("{kernel}.");
        assert!(stdout.starts_with(&version), "{stdout}");
        assert!(stdout.ends_with("\nfrom the hostchanged\n"), "{stdout}");
        assert_eq!(output.stderr, b"trouble\n");
        assert_eq!(output.code, 3);
        println!("Linux {kernel}: {:.1} s", output.took.as_secs_f64());
        let error = output.success().expect_err("a command that fails is no success");
        assert!(matches!(error, MachineError::CommandFailed { code: 3, .. }), "{error}");
        assert_eq!(fs::read_to_string(&before).expect("there"), "from the host");
        assert_eq!(fs::read_to_string(shared.join("word")).expect("there"), "it's a word\n");
    }
}

#[test]
fn a_panic_costs_its_machine_and_ends_those_that_wait_for_it() {
    let installed = installed(Kernel::V6_1);
    let begun = Instant::now();
    let results = run_together(&[
        Machine::script(&installed, "echo c > /proc/sysrq-trigger; sleep 1000"),
        Machine::script(&installed, "vm-barrier never"),
    ]);
    let [Err(panicked), Err(other)] = &results[..] else { panic!("{results:?}") };
    let MachineError::Panicked { console } = panicked else { panic!("{panicked}") };
    assert!(console.contains("sysrq triggered crash"), "{console}");
    assert!(matches!(other, MachineError::OtherFailed { failed: 1 }), "{other}");
    assert!(begun.elapsed() < bluebridge_vm::DEADLINE, "nothing waited for its deadline");
}

#[test]
fn machines_of_one_run_wait_for_each_other() {
    let installed = installed(Kernel::V6_12);
    let script = "echo word > /run/vm/lab/from-$VM; vm-barrier written; \
                  cat /run/vm/lab/from-$((VMS + 1 - VM)); echo $VM of $VMS";
    let results = run_together(&[1, 2].map(|_| Machine::script(&installed, script)));
    for (result, number) in results.into_iter().zip(1..) {
        let text = result.and_then(bluebridge_vm::Output::success);
        assert_eq!(text.expect("it ends"), format!("word\n{number} of 2\n"));
    }
}

#[test]
fn what_hangs_ends_at_its_deadline() {
    let machine = Machine::script(&installed(Kernel::V6_1), "while :; do :; done");
    let deadline = Duration::from_secs(12);
    let begun = Instant::now();
    let error = machine.deadline(deadline).run().expect_err("it would never end");
    assert!(matches!(error, MachineError::TimedOut { .. }), "{error}");
    assert!(begun.elapsed() < deadline * 2, "{:?}", begun.elapsed());
    assert!(machines_of(std::process::id()).is_empty(), "the machine is left");
}

#[test]
fn a_machine_that_leaves_or_cannot_start_is_told_from_one_that_succeeds() {
    let installed = installed(Kernel::V6_1);
    let left = Machine::script(&installed, "/usr/bin/busybox poweroff -f").run();
    assert!(matches!(left, Err(MachineError::Stopped { .. })), "{left:?}");
    let none = Machine::script(&installed, "true").disk("/no/such/disk").run();
    let Err(MachineError::CouldNotStart { reason }) = none else { panic!("{none:?}") };
    assert!(reason.contains("/no/such/disk"), "{reason}");
    let name = Machine::script(&installed, "true").environment("a b", "").run();
    assert!(matches!(name, Err(MachineError::Files { .. })), "{name:?}");
}

#[test]
fn a_killed_runner_leaves_no_machine() {
    let program = xtask();
    let target = program.ancestors().nth(2).expect("target/PROFILE/xtask");
    let mut runner = Command::new(&program)
        .args(["vm", "--", "sleep", "1000"])
        .env("CARGO_TARGET_DIR", target)
        .stdout(Stdio::null())
        .spawn()
        .expect("it starts");
    let mut machines = Vec::new();
    until("the runner starts its machine", || {
        machines = machines_of(runner.id());
        !machines.is_empty()
    });
    runner.kill().expect("it runs");
    runner.wait().expect("it ended");
    until("the machine ends", || !machines.iter().any(ProcessRecord::is_running));
}

/// The processes of qemu that a process started.
fn machines_of(runner: u32) -> Vec<ProcessRecord> {
    let parent = format!("PPid:\t{runner}");
    process::find(|pid| {
        let place = Path::new("/proc").join(pid.to_string());
        let status = fs::read_to_string(place.join("status")).unwrap_or_default();
        let is_qemu = fs::read_link(place.join("exe"))
            .is_ok_and(|exe| exe.file_name().is_some_and(|name| name == "qemu-system-x86_64"));
        is_qemu && status.lines().any(|line| line == parent)
    })
}
