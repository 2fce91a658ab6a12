//! Files of a test.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
    process,
};

/// Directories of one name and process number that killed tests may have left.
const LEFT_MAX: u32 = 100;

/// A temporary directory of one test, removed at its end.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    /// A new directory, whose path contains `name`.
    ///
    /// # Panics
    /// If it cannot be created.
    #[track_caller]
    pub fn new(name: &str) -> Self {
        let parent = env::temp_dir();
        // A killed test leaves its directory, and another process may get the same number.
        for left in 0..LEFT_MAX {
            let path = parent.join(format!("bb-{name}-{}.{left}", process::id()));
            match fs::create_dir(&path) {
                Ok(()) => return Self(path),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => panic!("cannot make the directory {}: {error}", path.display()),
            }
        }
        panic!("{} is full of directories of killed tests: remove bb-{name}-*", parent.display());
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // If something is still mounted or running, the test's own assertions report it.
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
    fn a_scratch_directory_that_was_left_is_not_taken() {
        let left = Scratch::new("left");
        fs::write(left.path().join("file"), "of another test").expect("it is writable");
        let own = Scratch::new("left");
        assert_ne!(own.path(), left.path());
        assert_eq!(fs::read_dir(own.path()).expect("readable").count(), 0);
    }
}
