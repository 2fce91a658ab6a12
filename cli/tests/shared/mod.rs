//! What the tests of racks share.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A directory of one test, removed at its end.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("bb-{name}-{}", std::process::id()));
        std::fs::create_dir(&path).expect("a new directory");
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The name of a rack of this process: the machine has one list of namespaces for all.
#[allow(dead_code, reason = "not every test file has racks with names")]
pub(crate) fn own(name: &str) -> String {
    format!("{name}-{}", std::process::id())
}

/// Waits until something holds.
#[allow(dead_code, reason = "not every test file waits")]
#[track_caller]
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    const PATIENCE: Duration = Duration::from_secs(20);
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < PATIENCE, "{what}: not after {:?}", began.elapsed());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// These tests make namespaces: without root they cannot run, and say so by failing.
pub(crate) fn require_root() {
    assert!(
        bluebridge_cli::namespace::is_privileged(),
        "this test makes network namespaces: run it as root, or leave it out by name"
    );
}

/// Whether the tests of a tier are to run: `BLUEBRIDGE_TEST_TIERS` names them, all by default.
#[allow(dead_code, reason = "not every test file has tiers")]
pub(crate) fn is_wanted(tier: &str) -> bool {
    let wanted = std::env::var("BLUEBRIDGE_TEST_TIERS")
        .map_or(true, |tiers| tiers.split(',').any(|name| name == tier));
    if !wanted {
        eprintln!("left out: BLUEBRIDGE_TEST_TIERS does not name {tier}");
    }
    wanted
}
