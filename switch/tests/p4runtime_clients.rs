//! Two P4Runtime clients that others wrote, finsy and p4runtime-shell, against the agent, and their
//! declarations of P4Runtime against ours.
//!
//! They are installed with pip, in pinned versions, into a virtual environment below the target
//! directory; without them the tests fail.

mod rig;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use bluebridge_switch::dataplane::DataPlane;
use bluebridge_switch::ebpf::EbpfSwitch;
use bluebridge_switch::soft::Switch;
use rig::{Cabled, Removed, Running, cabled, in_namespace, tier};

/// How long a client's script may take.
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

/// The Python of a virtual environment that has what a requirements file names.
fn python(client: &str) -> PathBuf {
    static INSTALLING: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _alone = INSTALLING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let requirements = scripts().join(format!("requirements-{client}.txt"));
    let environment = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("venv-{client}"));
    let python = environment.join("bin/python");
    let installed = environment.join("requirements.txt");
    let wanted = std::fs::read_to_string(&requirements).unwrap();
    if std::fs::read_to_string(&installed).is_ok_and(|installed| installed == wanted) {
        return python;
    }
    let mut make = Command::new("python3");
    let make = make.args(["-m", "venv", "--clear"]).arg(&environment);
    check("making a virtual environment (apt: python3-venv)", &make.output().unwrap());
    let mut install = Command::new(&python);
    let install = install.args(["-m", "pip", "install", "--quiet", "-r"]).arg(&requirements);
    check("installing the P4Runtime client", &install.output().unwrap());
    std::fs::write(installed, wanted).unwrap();
    python
}

/// Runs a script against an agent in front of a data plane.
fn run(python: &Path, script: &str, plane: Box<dyn DataPlane>) {
    // One thread, so that everything is in the network namespace of this one.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let running = Running::start(plane).await;
        let pipeline = Path::new(env!("CARGO_MANIFEST_DIR")).join("../p4");
        let child = tokio::process::Command::new(python)
            .arg(scripts().join(script))
            .arg(running.address.to_string())
            .arg(pipeline.join("bluebridge.p4info.txtpb"))
            .arg(pipeline.join("bluebridge.pipeline.txt"))
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .kill_on_drop(true)
            .output();
        let ended = tokio::time::timeout(SCRIPT_DEADLINE, child).await;
        let output = ended.expect("the script ends in time").unwrap();
        check(script, &output);
        assert!(String::from_utf8_lossy(&output.stdout).ends_with("done\n"), "{script} stopped");
        drop(running.stop().await);
    });
}

#[test]
fn finsy_drives_the_soft_pipeline() {
    if tier("clients") {
        run(&python("finsy"), "finsy_client.py", Box::new(Cabled::new()));
    }
}

#[test]
fn p4runtime_shell_drives_the_soft_pipeline() {
    if tier("clients") {
        run(&python("shell"), "shell_client.py", Box::new(Cabled::new()));
    }
}

fn on_packet_sockets(client: &str, script: &'static str) {
    if tier("clients") && tier("root") {
        let python = python(client);
        in_namespace(move || {
            run(&python, script, cabled(Switch::start(Duration::from_micros(50)).unwrap()));
        });
    }
}

fn in_the_kernel(client: &str, script: &'static str) {
    if tier("clients") && tier("root") {
        let python = python(client);
        let removed = Removed(format!("p4runtime-{client}-{}", std::process::id()));
        let name = removed.0.clone();
        in_namespace(move || run(&python, script, cabled(EbpfSwitch::open(&name).unwrap())));
    }
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

#[test]
fn declarations_agree_with_those_of_finsy() {
    if tier("clients") {
        let descriptors = Path::new(env!("CARGO_TARGET_TMPDIR")).join("descriptors.bin");
        std::fs::write(&descriptors, bluebridge_p4::proto::FILE_DESCRIPTOR_SET).unwrap();
        let script = scripts().join("descriptors.py");
        let output = Command::new(python("finsy")).arg(script).arg(descriptors).output().unwrap();
        check("descriptors.py", &output);
    }
}
