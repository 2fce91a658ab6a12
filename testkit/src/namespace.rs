//! Network namespaces for tests; they end with the process or the thread that a test runs in.

use std::{
    env, fs,
    process::Command,
    thread::{self, JoinHandle},
};

use rustix::thread::{UnshareFlags, unshare_unsafe};

use crate::{ip, require_root};

/// Set in the child that runs a test inside a namespace.
const INSIDE: &str = "BLUEBRIDGE_TEST_IN_NAMESPACE";

/// Runs `body` in a fresh network namespace, in a child process that runs the same test again.
///
/// Root needs no user namespace for this; other users get one. Call it in the test's own thread, whose name
/// is that of the test.
///
/// # Panics
/// If `body` panics, or if no namespace can be created.
#[track_caller]
pub fn in_child(body: impl FnOnce()) {
    let flags: &[&str] = match rustix::process::geteuid().is_root() {
        true => &["--net"],
        false => &["--user", "--map-root-user", "--net"],
    };
    again_inside(flags, body);
}

/// Like [`in_child`], but always in a user namespace too: `body` has no privileges outside it, even if root runs the test.
///
/// # Panics
/// Like [`in_child`].
#[track_caller]
pub fn in_user_child(body: impl FnOnce()) {
    again_inside(&["--user", "--map-root-user", "--net"], body);
}

/// Like [`in_child`], with all of `fdbb::/16` local to the loopback interface, which has the given MTU.
///
/// # Panics
/// Like [`in_child`].
#[track_caller]
pub fn in_local_fabric(mtu: u32, body: impl FnOnce()) {
    in_child(|| {
        ip(&format!("link set lo mtu {mtu} up"));
        ip("-6 route add local fdbb::/16 dev lo");
        body();
    });
}

#[track_caller]
fn again_inside(flags: &[&str], body: impl FnOnce()) {
    if env::var_os(INSIDE).is_some() {
        return body();
    }
    let thread = thread::current();
    // The harness runs each test in a thread with that test's name, even if it runs one at a time.
    let test = thread.name().filter(|name| *name != "main");
    let test = test.expect("to be called by the test's own thread");
    let output = Command::new("unshare")
        .args(flags)
        .arg(env::current_exe().expect("a test knows its file"))
        .args(["--exact", test, "--nocapture"])
        .env(INSIDE, "1")
        .output()
        .unwrap_or_else(|error| panic!("cannot run unshare: {error}; install util-linux"));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{test} failed inside a network namespace ({}). If namespaces are forbidden here, skip the tier: \
         `cargo xtask test --without netns`\n{text}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Runs `body` in a separate thread, in a new network namespace that ends with the thread; needs root.
///
/// # Panics
/// If `body` panics, or without root.
#[track_caller]
pub fn in_thread<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> T {
    require_root();
    let thread: JoinHandle<T> = thread::spawn(move || {
        enter();
        body()
    });
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Moves this thread into a new network namespace without automatic traffic: interfaces have no IPv6 until
/// it is switched on.
///
/// # Panics
/// If the namespace cannot be created.
pub fn enter() {
    // SAFETY: only the network namespace is unshared, and of this thread alone; no memory, file table or other state
    // that other threads rely on changes.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET) }
        .unwrap_or_else(|error| panic!("cannot make a network namespace: {error}"));
    for scope in ["all", "default"] {
        let path = format!("/proc/sys/net/ipv6/conf/{scope}/disable_ipv6");
        fs::write(&path, "1").unwrap_or_else(|error| panic!("cannot write {path}: {error}"));
    }
}
