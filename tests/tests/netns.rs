//! A rack of an ordinary user: the same memory, without root and over a switch that loses and duplicates frames.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use bluebridge_rack::namespace::is_privileged;
use bluebridge_rack::process;
use bluebridge_testkit::{Scratch, program};
use bluebridge_tests::rack::stamp;

/// An ordinary user's id that no account has; taken when the test itself runs as root.
const USER: u32 = 64_007;

/// Bytes of the long transfer.
const LONG: usize = 3_000_001;

/// One user with a copy of the program where that user may execute it.
struct User {
    binary: PathBuf,
    state: PathBuf,
    is_other: bool,
    _scratch: Scratch,
}

impl User {
    fn new() -> Self {
        let scratch = Scratch::new("rack-user");
        let binary = scratch.path().join("bluebridge");
        fs::copy(program(), &binary).expect("copied");
        for path in [scratch.path(), &binary] {
            fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("opened");
        }
        let home = scratch.path().join("home");
        fs::create_dir(&home).expect("made");
        let is_other = is_privileged();
        if is_other {
            chown(&home, Some(USER), Some(USER)).expect("given");
        }
        Self { binary, state: home.join("state"), is_other, _scratch: scratch }
    }

    fn call(&self, arguments: &[&str], input: &[u8]) -> Output {
        let mut command = Command::new(&self.binary);
        command.args(arguments).env("BLUEBRIDGE_STATE", &self.state).current_dir("/");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        if self.is_other {
            command.uid(USER).gid(USER);
        }
        let mut child = command.spawn().expect("starts");
        let mut stdin = child.stdin.take().expect("piped");
        // A command that needs no input ends without having read it.
        let _ = stdin.write_all(input);
        drop(stdin);
        child.wait_with_output().expect("ends")
    }

    fn done(&self, arguments: &[&str], input: &[u8]) -> Vec<u8> {
        let output = self.call(arguments, input);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {said}");
        output.stdout
    }

    fn text(&self, arguments: &[&str]) -> String {
        String::from_utf8(self.done(arguments, b"")).expect("text").trim_end().to_owned()
    }

    /// Processes of this test's own copy of the program.
    fn running(&self) -> usize {
        let is_ours =
            |pid| fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|path| path == self.binary);
        process::find(is_ours).len()
    }
}

impl Drop for User {
    fn drop(&mut self) {
        self.call(&["rack", "down", "--name", "rack-user"], b"");
    }
}

#[test]
fn an_ordinary_user_has_a_rack_and_its_memory() {
    let user = User::new();
    let up = ["rack", "up", "--name", "rack-user", "--servers", "2", "--clients", "2"];
    let up = [&up[..], &["--mtu", "9000,c2=1500", "--memory", "16M"]].concat();
    user.done(&up, b"");
    let ports = user.text(&["switch", "ports", "--rack", "rack-user"]);
    assert!(ports.contains("data plane: soft"), "{ports}");
    for node in ["s1", "s2", "c1", "c2"] {
        let trouble = ["--loss", "0.05", "--duplicate", "0.05", "--reorder", "0.05"];
        user.done(&[&["switch", "impair", "--node", node][..], &trouble].concat(), b"");
    }
    let pointer = user.text(&["create", "3M", "--anywhere"]);
    let mut data = vec![0; LONG];
    stamp::fill(&mut data, 7);
    user.done(&["write", &pointer, "--offset", "77"], &data);
    let length = LONG.to_string();
    let read = ["read", &pointer, "--offset", "77", "--length", &length];
    assert!(user.done(&read, b"") == data, "read by the client that wrote");
    let other = [&read[..], &["--as", "c2"]].concat();
    assert!(user.done(&other, b"") == data, "read by the other client");
    user.done(&["delete", &pointer], b"");
    let gone = user.call(&read, b"");
    let said = String::from_utf8_lossy(&gone.stderr);
    assert!(!gone.status.success() && said.contains("freed"), "{said}");
    let until = Instant::now() + Duration::from_secs(10);
    let used = || {
        let rows: serde_json::Value =
            serde_json::from_str(&user.text(&["stat", "--json"])).expect("JSON");
        let rows = rows.as_array().expect("rows").iter();
        rows.map(|row| row["used_pages"].as_u64().expect("a number")).sum::<u64>()
    };
    while used() != 0 {
        assert!(Instant::now() < until, "pages are left: {}", user.text(&["stat"]));
    }
    let ports: serde_json::Value =
        serde_json::from_str(&user.text(&["switch", "ports", "--json"])).expect("JSON");
    let ports = ports["ports"].as_array().expect("rows").iter();
    let lost = ports.map(|port| port["impaired"]["lost"].as_u64().expect("a number")).sum::<u64>();
    assert!(lost > 10, "{lost} frames were lost");
    user.done(&["rack", "down", "--name", "rack-user"], b"");
    assert_eq!(user.running(), 0, "processes are left");
    let records = fs::read_dir(&user.state).map_or(0, Iterator::count);
    assert_eq!(records, 0, "records are left");
}
