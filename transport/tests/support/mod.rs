//! Which tiers run, and a network namespace for a test.
#![allow(dead_code, reason = "each test program uses a part")]

use std::env;
use std::process::Command;

/// Comma-separated tiers to run; without it all run.
const TIERS: &str = "BLUEBRIDGE_TEST_TIERS";
/// Set in the child that runs a test inside a namespace.
const INSIDE: &str = "BLUEBRIDGE_TEST_IN_NAMESPACE";

/// Whether the tier runs; if it was left out by name, that is said.
pub(crate) fn runs(tier: &str) -> bool {
    let Ok(tiers) = env::var(TIERS) else { return true };
    let runs = tiers.split(',').any(|name| name.trim() == tier);
    if !runs {
        eprintln!("tier {tier} left out: {TIERS}={tiers}");
    }
    runs
}

/// Runs `body` inside a fresh network namespace in which all of `fdbb::/16` is local, in a child process that runs
/// the same test; the namespace ends with the child.
pub(crate) fn in_namespace(test: &str, body: impl FnOnce()) {
    if env::var_os(INSIDE).is_some() {
        ip("link set lo mtu 9000 up");
        ip("-6 route add local fdbb::/16 dev lo");
        body();
        return;
    }
    if !runs("netns") {
        return;
    }
    let mut command = Command::new("unshare");
    if !rustix::process::geteuid().is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    let output = command
        .arg("--net")
        .arg(env::current_exe().expect("the test's own path"))
        .args(["--exact", test, "--nocapture"])
        .env(INSIDE, "1")
        .output()
        .expect("unshare is needed for tier netns: install util-linux");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{test} failed inside a network namespace. If none may be made here, leave the tier out by name \
         ({TIERS}=unit).\n{text}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Runs `ip` with `arguments`.
pub(crate) fn ip(arguments: &str) {
    let status = Command::new("ip")
        .args(arguments.split_whitespace())
        .status()
        .expect("ip is needed for tier netns: install iproute2");
    assert!(status.success(), "ip {arguments}: {status}");
}
