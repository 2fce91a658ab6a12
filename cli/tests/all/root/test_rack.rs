//! A rack that the binary builds for a test.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use bluebridge_testkit::{Scratch, own, require_root};
use serde_json::Value;

/// A rack built by the binary, taken down when dropped.
pub(super) struct TestRack {
    pub(super) scratch: Scratch,
    pub(super) name: String,
}

impl TestRack {
    pub(super) fn up(name: &'static str, extra: &[&str]) -> Self {
        require_root();
        let rack = Self { scratch: Scratch::new(name), name: own(name) };
        let mut up = vec!["rack", "up", "--name", &rack.name];
        for (option, value) in [("--servers", "2"), ("--clients", "2")] {
            if !extra.contains(&option) {
                up.extend([option, value]);
            }
        }
        let output = rack.call(&[&up, extra].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        rack
    }

    pub(super) fn state(&self) -> PathBuf {
        self.scratch.path().join("state")
    }

    pub(super) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_bluebridge"));
        command.args(arguments).env("BLUEBRIDGE_STATE", self.state()).stdin(Stdio::null());
        command
    }

    pub(super) fn call(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().expect("runs")
    }

    pub(super) fn text(&self, arguments: &[&str]) -> String {
        let output = self.call(arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {said}");
        String::from_utf8(output.stdout).expect("text").trim_end().to_owned()
    }

    pub(super) fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.text(&[arguments, &["--json"]].concat())).expect("JSON")
    }

    /// The exit code and the error text of a command that must fail.
    pub(super) fn failure(&self, arguments: &[&str]) -> (Option<i32>, String) {
        let output = self.call(arguments);
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    }

    pub(super) fn feed(&self, arguments: &[&str], data: &[u8]) -> Output {
        let mut command = self.command(arguments);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("starts");
        child.stdin.take().expect("piped").write_all(data).expect("fed");
        child.wait_with_output().expect("ends")
    }
}

impl Drop for TestRack {
    fn drop(&mut self) {
        let down = self.call(&["rack", "down", "--name", &self.name]);
        if !std::thread::panicking() {
            assert!(down.status.success(), "{}", String::from_utf8_lossy(&down.stderr));
        }
    }
}

/// A child that is killed when dropped.
pub(super) struct Killed(pub(super) std::process::Child);

impl Drop for Killed {
    fn drop(&mut self) {
        self.0.kill().expect("our own child");
        self.0.wait().expect("our own child");
    }
}
