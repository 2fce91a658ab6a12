//! Files of a test.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use tempfile::TempDir;

/// A temporary directory of one test, removed at its end.
///
/// Mounts and processes that a test left in it are reported by the test's own assertions.
#[derive(Debug)]
pub struct Scratch(TempDir);

impl Scratch {
    /// A new directory, whose path contains `name`.
    ///
    /// # Panics
    /// If it cannot be created.
    #[track_caller]
    pub fn new(name: &str) -> Self {
        let made = tempfile::Builder::new().prefix(&format!("bb-{name}-")).tempdir();
        Self(made.unwrap_or_else(|error| panic!("cannot make a directory: {error}")))
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Where a file of it is, or would be.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }
}

/// The `bluebridge` program that was built beside this test.
///
/// # Panics
/// If it was not built.
#[track_caller]
pub fn program() -> PathBuf {
    built("bluebridge", "cargo build -p bluebridge-cli --bins")
}

/// The `xtask` program that was built beside this test.
///
/// # Panics
/// If it was not built.
#[track_caller]
pub fn xtask() -> PathBuf {
    built("xtask", "cargo build -p xtask")
}

/// An example of this workspace, built beside this test.
///
/// # Panics
/// If it was not built.
#[track_caller]
pub fn example(name: &str) -> PathBuf {
    built(&format!("examples/{name}"), "cargo build --workspace --examples")
}

/// The latest build of another test program of this workspace.
///
/// # Panics
/// If it was not built.
#[track_caller]
pub fn test_program(package: &str, name: &str) -> PathBuf {
    let own = env::current_exe().expect("a test knows its file");
    let deps = own.parent().expect("it is in a directory");
    let is_build = |path: &PathBuf| {
        let file = path.file_name().and_then(|file| file.to_str());
        let hash = file.and_then(|file| file.strip_prefix(name)?.strip_prefix('-'));
        hash.is_some_and(|hash| hash.len() == 16 && hash.bytes().all(|c| c.is_ascii_hexdigit()))
    };
    let files = fs::read_dir(deps).expect("readable").flatten().map(|entry| entry.path());
    let modified = |path: &PathBuf| fs::metadata(path).and_then(|file| file.modified()).ok();
    let latest = files.filter(is_build).max_by_key(modified);
    latest.unwrap_or_else(|| {
        panic!("{name} is missing: build it first, by `cargo test --all-features --no-run -p {package}`")
    })
}

#[track_caller]
fn built(name: &str, how: &str) -> PathBuf {
    let own = env::current_exe().expect("a test knows its file");
    // target/PROFILE/deps/TEST
    let profile = own.parent().and_then(Path::parent).expect("a test is in a target directory");
    let path = profile.join(name);
    assert!(
        path.is_file(),
        "{} is missing: build it first, by `{how}` in the same profile",
        path.display()
    );
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scratch_directory_goes_with_all_that_is_in_it() {
        let scratch = Scratch::new("goes");
        let path = scratch.path().to_owned();
        fs::create_dir(path.join("inner")).expect("it is writable");
        fs::write(path.join("inner/file"), "text").expect("it is writable");
        drop(scratch);
        assert!(!path.exists());
    }
}
