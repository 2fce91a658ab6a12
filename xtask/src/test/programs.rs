//! The programs that tests may call.
//!
//! Tests get a `PATH` with only these programs, so that a test that calls a program that set-up does not
//! install fails on every machine, not only on a new one.

use std::{
    fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use crate::{command::Failure, setup};

/// Programs of packages on every Debian (bash, coreutils, dash, debianutils, grep, mount, sed, util-linux).
const BASE: [&str; 25] = [
    "bash", "cat", "env", "grep", "id", "ln", "mkdir", "mount", "nsenter", "rm", "rmdir", "sed",
    "seq", "setpriv", "sh", "sleep", "sort", "printf", "stty", "tail", "touch", "true", "umount",
    "unshare", "which",
];

/// Creates a directory of links to the declared programs that are installed.
pub(super) fn link_into(directory: &Path) -> Result<(), Failure> {
    let failed =
        |error: io::Error| Failure::new(format!("cannot make {}: {error}", directory.display()));
    fs::create_dir_all(directory).map_err(failed)?;
    for name in BASE.into_iter().chain(setup::programs_of_tests()) {
        if let Some(program) = find(name) {
            symlink(program, directory.join(name)).map_err(failed)?;
        }
    }
    Ok(())
}

/// A program, also where an ordinary user's `PATH` may not lead: to `ip`, `mke2fs` and `mount`.
pub(crate) fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let system = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    let mut candidates = std::env::split_paths(&path).chain(system).map(|part| part.join(name));
    candidates.find(|candidate| candidate.is_file())
}
