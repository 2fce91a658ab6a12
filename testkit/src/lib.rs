//! Test code shared by several folders: network namespaces, scratch directories, frames, the built program.
//!
//! Every function panics if it cannot do its work, because its callers are tests: a test that cannot run fails and
//! says why. No function checks which tiers are selected: a test's path names its tiers, and filters outside the test
//! skip tiers (docs/testing.md).
//!
//! [`namespace`]: a test in a namespace of its own; `needs`: what a test needs; `files`: scratch directories and
//! built programs; `frame`: frames that are not made by the code under test; `wait`: waiting for an event.

mod files;
mod frame;
pub mod namespace;
mod needs;
mod wait;

pub use files::{Scratch, example, program};
pub use frame::UdpFrame;
pub use needs::{require_ebpf, require_root};
pub use wait::{until, within};

use std::process::{self, Command};

/// A name for an object of this process in a list of the whole machine, such as the named namespaces.
pub fn own(name: &str) -> String {
    format!("{name}-{}", process::id())
}

/// Runs `ip` with `arguments`, split at spaces, in this thread's namespace.
///
/// # Panics
/// If `ip` is not installed, or fails; its error text is shown.
#[track_caller]
pub fn ip(arguments: &str) {
    let output = Command::new("ip")
        .args(arguments.split_whitespace())
        .output()
        .unwrap_or_else(|error| panic!("cannot run ip: {error}; install iproute2"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "ip {arguments}: {}: {said}", output.status);
}
