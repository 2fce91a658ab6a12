//! Files of a test.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process,
};

/// A temporary directory of one test, removed at its end.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    /// A new directory, whose path contains `name`.
    ///
    /// # Panics
    /// If it cannot be made, or if this process has one of this name.
    #[track_caller]
    pub fn new(name: &str) -> Self {
        let path = env::temp_dir().join(format!("bb-{name}-{}", process::id()));
        if let Err(error) = fs::create_dir(&path) {
            panic!("cannot make the directory {}: {error}", path.display());
        }
        Self(path)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Whatever a test left mounted or running is what its own assertions tell of.
        let _ = fs::remove_dir_all(&self.0);
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

/// An example of the test's own package, built beside this test.
///
/// # Panics
/// If it was not built.
#[track_caller]
pub fn example(name: &str) -> PathBuf {
    built(&format!("examples/{name}"), "cargo build --workspace --examples")
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

    #[test]
    #[should_panic(expected = "cannot make the directory")]
    fn a_scratch_directory_is_nobody_elses() {
        let _first = Scratch::new("twice");
        let _second = Scratch::new("twice");
    }
}
