//! Runs programs and reports failures.

use std::{
    ffi::{OsStr, OsString},
    path::PathBuf,
    process::{Command, ExitCode},
    thread,
    time::{Duration, Instant},
};

/// The interval at which a program with a deadline is checked.
const POLL: Duration = Duration::from_millis(50);

/// Why an xtask command failed.
#[derive(Debug)]
pub(crate) struct Failure {
    message: String,
    code: u8,
}

impl Failure {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), code: 1 }
    }

    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self { message: message.into(), code: 2 }
    }

    pub(crate) fn report(self) -> ExitCode {
        eprintln!("xtask: {self}");
        ExitCode::from(self.code)
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

/// A program to run, in the repository's root.
pub(crate) struct Run {
    command: Command,
}

impl Run {
    pub(crate) fn new(program: impl AsRef<OsStr>) -> Self {
        let mut command = Command::new(program);
        command.current_dir(root());
        Self { command }
    }

    /// The cargo that runs this program.
    pub(crate) fn cargo<const N: usize>(arguments: [&str; N]) -> Self {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"));
        Self::new(cargo).args(arguments)
    }

    pub(crate) fn arg(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.command.arg(argument);
        self
    }

    pub(crate) fn args(mut self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        self.command.args(arguments);
        self
    }

    pub(crate) fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// Runs it with this program's input and output.
    pub(crate) fn go(mut self) -> Result<(), Failure> {
        let status = self.command.status().map_err(|error| self.not_started(&error))?;
        if status.success() {
            Ok(())
        } else {
            Err(Failure::new(format!("{} ended with {status}", self.line())))
        }
    }

    /// Like [`Self::go`], but kills it after `limit`.
    pub(crate) fn go_within(mut self, limit: Duration) -> Result<(), Failure> {
        let start = Instant::now();
        let mut child = self.command.spawn().map_err(|error| self.not_started(&error))?;
        let ended =
            |error| Failure::new(format!("{} could not be waited for: {error}", self.line()));
        loop {
            match child.try_wait().map_err(ended)? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => {
                    return Err(Failure::new(format!("{} ended with {status}", self.line())));
                }
                None if start.elapsed() > limit => {
                    child.kill().and_then(|()| child.wait()).map_err(ended)?;
                    return Err(Failure::new(format!(
                        "{} was killed: it had not ended after {} s",
                        self.line(),
                        limit.as_secs()
                    )));
                }
                None => thread::sleep(POLL),
            }
        }
    }

    /// Runs it and returns its output.
    pub(crate) fn output(mut self) -> Result<String, Failure> {
        let output = self.command.output().map_err(|error| self.not_started(&error))?;
        if !output.status.success() {
            let errors = String::from_utf8_lossy(&output.stderr);
            return Err(Failure::new(format!(
                "{} ended with {}:\n{errors}",
                self.line(),
                output.status
            )));
        }
        String::from_utf8(output.stdout)
            .map_err(|_| Failure::new(format!("{} printed text that is not UTF-8", self.line())))
    }

    /// Whether it runs and succeeds; prints nothing.
    pub(crate) fn succeeds(self) -> bool {
        self.output().is_ok()
    }

    fn line(&self) -> String {
        let words = std::iter::once(self.command.get_program()).chain(self.command.get_args());
        let words: Vec<_> = words.map(OsStr::to_string_lossy).collect();
        format!("`{}`", words.join(" "))
    }

    fn not_started(&self, error: &std::io::Error) -> Failure {
        Failure::new(format!("{} could not be started: {error}", self.line()))
    }
}

/// The repository's root.
pub(crate) fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// Cargo's target directory.
pub(crate) fn target_directory() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

/// The built product.
pub(crate) fn product(profile: &str) -> PathBuf {
    target_directory().join(profile).join("bluebridge")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_end_is_killed_and_named() {
        let late = Run::new("sleep").arg("60").go_within(Duration::from_millis(100));
        let message = late.expect_err("it would take a minute").to_string();
        assert!(message.contains("`sleep 60` was killed"), "{message}");
        assert!(Run::new("sleep").arg("0").go_within(Duration::from_secs(30)).is_ok());
    }
}
