//! Two P4Runtime clients that others wrote, finsy and p4runtime-shell, against the agent.
//!
//! They are installed with pip, in pinned versions, into a virtual environment below the target
//! directory; without them the tests fail.

mod rig;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use bluebridge_switch::dataplane::DataPlane;
use rig::{Cabled, Running};

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
fn run(client: &str, script: &str, plane: Box<dyn DataPlane>) {
    let python = python(client);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let running = runtime.block_on(Running::start(plane));
    let pipeline = Path::new(env!("CARGO_MANIFEST_DIR")).join("../p4");
    let mut child = Command::new(python)
        .arg(scripts().join(script))
        .arg(running.address.to_string())
        .arg(pipeline.join("bluebridge.p4info.txtpb"))
        .arg(pipeline.join("bluebridge.pipeline.txt"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .spawn()
        .unwrap();
    let started = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break Some(status);
        }
        if started.elapsed() > SCRIPT_DEADLINE {
            child.kill().unwrap();
            child.wait().unwrap();
            break None;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    runtime.block_on(running.stop());
    let status = status.expect("the script ends in time");
    assert!(status.success(), "{script}: {status}");
}

#[test]
fn finsy_drives_the_soft_pipeline() {
    run("finsy", "finsy_client.py", Box::new(Cabled::new()));
}

#[test]
fn p4runtime_shell_drives_the_soft_pipeline() {
    run("shell", "shell_client.py", Box::new(Cabled::new()));
}
