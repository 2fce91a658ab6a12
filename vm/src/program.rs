//! Programs of the host that prepare the cache, each with a deadline.

use std::{
    fs::{self, File},
    io,
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

/// How often a program is checked for its end.
pub(crate) const POLL: Duration = Duration::from_millis(10);

/// How a program of the host failed.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// It could not be started.
    #[error("`{line}` could not be started: {source}")]
    NotStarted {
        /// The command line.
        line: String,
        /// The system's error.
        source: io::Error,
    },
    /// It failed.
    #[error("`{line}` ended with {status}:\n{errors}")]
    Failed {
        /// The command line.
        line: String,
        /// How it ended.
        status: ExitStatus,
        /// What it printed as errors.
        errors: String,
    },
    /// It did not end in time and was killed.
    #[error("`{line}` was killed: it had not ended after {} s", .limit.as_secs())]
    TimedOut {
        /// The command line.
        line: String,
        /// The time that it had.
        limit: Duration,
    },
}

/// Runs a program within `limit` and returns what it printed; its output goes through files in `scratch`.
pub(crate) fn output(
    mut command: Command,
    limit: Duration,
    scratch: &Path,
) -> Result<String, ProgramError> {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let line = words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
    let not_started = |source| ProgramError::NotStarted { line: line.clone(), source };
    // Files instead of pipes: a full pipe would stop a program that nobody reads from.
    let (printed, errors) = (scratch.join("output"), scratch.join("errors"));
    command.stdin(Stdio::null());
    command.stdout(File::create(&printed).map_err(not_started)?);
    command.stderr(File::create(&errors).map_err(not_started)?);
    let mut child = command.spawn().map_err(not_started)?;
    let ended = wait(&mut child, limit).map_err(not_started)?;
    let text = |path: &Path| {
        fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    };
    match ended {
        Some(status) if status.success() => Ok(text(&printed)),
        Some(status) => Err(ProgramError::Failed { line, status, errors: text(&errors) }),
        None => Err(ProgramError::TimedOut { line, limit }),
    }
}

/// Waits until a child ends; `None` if it was killed at its deadline.
fn wait(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if start.elapsed() > limit {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(POLL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn each_end_is_told_apart() {
        let scratch = tempfile::tempdir().expect("made");
        let long = Duration::from_secs(20);
        let said = output(shell("echo yes; echo no >&2"), long, scratch.path()).expect("it ends");
        assert_eq!(said, "yes\n");
        let failed = output(shell("echo why >&2; exit 3"), long, scratch.path()).unwrap_err();
        let text = failed.to_string();
        assert!(text.contains("exit status: 3") && text.contains("why"), "{text}");
        let late = output(shell("exec sleep 60"), Duration::from_millis(50), scratch.path());
        assert!(matches!(late, Err(ProgramError::TimedOut { .. })), "{late:?}");
        let none = output(Command::new("/no/such/program"), long, scratch.path());
        assert!(matches!(none, Err(ProgramError::NotStarted { .. })), "{none:?}");
    }
}
