//! Requirements of tests: a test without them fails and says what to do.

use rustix::thread::CapabilitySet;

/// Fails a test that creates namespaces and links of this machine, unless it runs as root.
///
/// # Panics
/// Without root's capabilities.
#[track_caller]
pub fn require_root() {
    let needed = CapabilitySet::SYS_ADMIN | CapabilitySet::NET_ADMIN;
    let is_root =
        rustix::thread::capabilities(None).is_ok_and(|sets| sets.effective.contains(needed));
    assert!(
        is_root,
        "this test needs root: run it as root, or skip the tier: `cargo xtask test --without root`"
    );
}

/// Fails a test that needs the eBPF data plane, unless this build has it.
///
/// # Panics
/// If `is_built` is false.
#[track_caller]
pub fn require_ebpf(is_built: bool) {
    assert!(is_built, "this build has no eBPF data plane: install clang and build again");
}
