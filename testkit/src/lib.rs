//! Test code shared by several folders: network namespaces, scratch directories, frames, the built program.
//!
//! Every function panics if it cannot do its work, because its callers are tests: a test that cannot run fails and
//! says why. No function checks which tiers are selected: a test's path names its tiers, and filters outside the test
//! skip tiers (docs/testing.md).
//!
//! [`namespace`]: a test in a namespace of its own; [`instructions`]: what some code costs; `needs`: what a test needs; `files`: scratch directories and
//! built programs; `frame`: frames that are not made by the code under test; `log`: captured log output; `wait`:
//! waiting for an event.

mod c_struct;
mod files;
mod frame;
pub mod instructions;
mod log;
pub mod namespace;
mod needs;
mod wait;

pub use c_struct::c_struct;
pub use files::{Scratch, example, program, test_program, xtask};
pub use frame::UdpFrame;
pub use log::Log;
pub use needs::{require_ebpf, require_root};
pub use wait::{until, within};

use std::{
    net::Ipv4Addr,
    process::{self, Command},
};

/// A name for an object of this process in a list of the whole machine, such as the named namespaces.
pub fn own(name: &str) -> String {
    format!("{name}-{}", process::id())
}

/// A loopback address that only this process uses. On 127.0.0.1 another process could take a port between the end
/// of a listener and its restart.
pub fn own_loopback() -> Ipv4Addr {
    let [_, high, middle, low] = process::id().to_be_bytes();
    Ipv4Addr::new(127, 0x80 | high, middle, low)
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
