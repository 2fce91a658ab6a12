//! Two P4Runtime clients of other authors, finsy and p4runtime-shell, against the agent, and their
//! declarations of P4Runtime against ours.
//!
//! `cargo xtask setup` installs them, in pinned versions, into virtual environments below the target
//! directory; without them the tests fail.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use bluebridge_switch::dataplane::DataPlane;
use rustix::process::{Pid, Signal, kill_process};

use crate::support::{Cabled, Running};

/// Time limit of a client's script.
const SCRIPT_DEADLINE: Duration = Duration::from_secs(120);

fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/p4runtime")
}

fn check(what: &str, output: &Output) {
    assert!(
        output.status.success(),
        "{what} failed: {}\n{}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// The Python of a client's virtual environment, which must have the present versions.
fn python(client: &str) -> PathBuf {
    let requirements = scripts().join(format!("requirements-{client}.txt"));
    let wanted = std::fs::read_to_string(&requirements).unwrap();
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let environment = target.join("p4runtime-clients").join(client);
    let installed = std::fs::read_to_string(environment.join("installed.txt"));
    assert!(
        installed.is_ok_and(|installed| installed == wanted),
        "{} does not hold what {} names: run `cargo xtask setup`, or skip the tier: \
         `cargo xtask test --without clients`",
        environment.display(),
        requirements.display()
    );
    environment.join("bin/python")
}

/// Runs a script against an agent in front of a data plane.
fn run(python: &Path, script: &str, plane: Box<dyn DataPlane>) {
    // One thread, so that everything is in the network namespace of this one.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let running = Running::start(plane).await;
        let pipeline = Path::new(env!("CARGO_MANIFEST_DIR")).join("../p4");
        let child = Command::new(python)
            .arg(scripts().join(script))
            .arg(running.address.to_string())
            .arg(pipeline.join("bluebridge.p4info.txtpb"))
            .arg(pipeline.join("bluebridge.pipeline.txt"))
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let id = Pid::from_child(&child);
        let mut waiting = tokio::task::spawn_blocking(move || child.wait_with_output().unwrap());
        let ended = tokio::time::timeout(SCRIPT_DEADLINE, &mut waiting).await;
        let output = match ended {
            Ok(output) => output.unwrap(),
            Err(_) => {
                // The runtime cannot end before the script does.
                let _ = kill_process(id, Signal::KILL);
                check(script, &waiting.await.unwrap());
                panic!("{script} did not end in {SCRIPT_DEADLINE:?}");
            }
        };
        check(script, &output);
        assert!(String::from_utf8_lossy(&output.stdout).ends_with("done\n"), "{script} stopped");
        drop(running.stop().await);
    });
}

#[test]
fn finsy_drives_the_soft_pipeline() {
    run(&python("finsy"), "finsy_client.py", Box::new(Cabled::new()));
}

#[test]
fn p4runtime_shell_drives_the_soft_pipeline() {
    run(&python("shell"), "shell_client.py", Box::new(Cabled::new()));
}

#[test]
fn declarations_agree_with_those_of_finsy() {
    let descriptors = Path::new(env!("CARGO_TARGET_TMPDIR")).join("descriptors.bin");
    std::fs::write(&descriptors, bluebridge_p4::proto::FILE_DESCRIPTOR_SET).unwrap();
    let script = scripts().join("descriptors.py");
    let output = Command::new(python("finsy")).arg(script).arg(descriptors).output().unwrap();
    check("descriptors.py", &output);
}

mod root {
    use bluebridge_switch::soft::Switch;

    use super::*;
    use crate::support::{Removed, cabled, in_kernel, in_namespace};

    fn on_packet_sockets(client: &str, script: &'static str) {
        let python = python(client);
        in_namespace(move || {
            run(&python, script, cabled(Switch::start(Duration::from_micros(50)).unwrap()));
        });
    }

    fn in_the_kernel(client: &str, script: &'static str) {
        let python = python(client);
        let removed = Removed(format!("p4runtime-{client}-{}", std::process::id()));
        let name = removed.0.clone();
        in_namespace(move || run(&python, script, cabled(in_kernel(&name))));
    }

    #[test]
    fn finsy_drives_the_soft_switch() {
        on_packet_sockets("finsy", "finsy_client.py");
    }

    #[test]
    fn p4runtime_shell_drives_the_soft_switch() {
        on_packet_sockets("shell", "shell_client.py");
    }

    #[test]
    fn finsy_drives_the_ebpf_switch() {
        in_the_kernel("finsy", "finsy_client.py");
    }

    #[test]
    fn p4runtime_shell_drives_the_ebpf_switch() {
        in_the_kernel("shell", "shell_client.py");
    }
}
