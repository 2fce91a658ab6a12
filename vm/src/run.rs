//! The processes of machines, and how they end.
//!
//! Every machine ends: with its command, with a panic, at its deadline, when another machine of its run fails, or
//! with the process that runs it.

use std::{
    fs::{self, File},
    io,
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal};
use tempfile::TempDir;

use crate::{
    machine::Machine,
    program::POLL,
    qemu::{ENDED, NOT_PREPARED, Place},
};

/// The most that a machine may print, and its command write to each of its outputs.
const OUTPUT_BYTES_MAX: u64 = 64 << 20;
/// The lines of the console that an error shows.
const CONSOLE_LINES: usize = 25;
/// What the kernel writes to the console when it panics.
const PANIC: &str = "Kernel panic - not syncing";

/// What a command in a machine printed, and how it ended.
#[derive(Clone, Debug)]
pub struct Output {
    /// Its exit code; 128 and more after a signal.
    pub code: i32,
    /// Its output.
    pub stdout: Vec<u8>,
    /// Its errors.
    pub stderr: Vec<u8>,
    /// What the kernel printed.
    pub console: String,
    /// The time from the start to the end of the machine.
    pub took: Duration,
}

impl Output {
    /// The output as text, if the command succeeded.
    ///
    /// # Errors
    /// If the command failed.
    pub fn success(self) -> Result<String, MachineError> {
        if self.code == 0 {
            return Ok(String::from_utf8_lossy(&self.stdout).into_owned());
        }
        Err(MachineError::CommandFailed {
            code: self.code,
            stdout: last_lines(&self.stdout),
            stderr: last_lines(&self.stderr),
        })
    }
}

/// How a machine ended instead of with its command.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// The command failed; only [`Output::success`] returns this.
    #[error(
        "the command ended with {code}; the end of its output:\n{stdout}\nand of its errors:\n{stderr}"
    )]
    CommandFailed {
        /// Its exit code.
        code: i32,
        /// The end of its output.
        stdout: String,
        /// The end of its errors.
        stderr: String,
    },
    /// The machine did not get as far as its command.
    #[error("the machine could not start: {reason}")]
    CouldNotStart {
        /// What failed.
        reason: String,
    },
    /// No machine was given.
    #[error("there is no machine to run")]
    Empty,
    /// A file of the run could not be written or read.
    #[error("cannot {action}: {source}")]
    Files {
        /// The failed action.
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// Another machine of the run failed, so this one was ended.
    #[error("ended because machine {failed} of the run failed")]
    OtherFailed {
        /// The number of the machine that failed.
        failed: usize,
    },
    /// The kernel panicked.
    #[error("the kernel panicked:\n{console}")]
    Panicked {
        /// The lines of the console from the first that names the trouble.
        console: String,
    },
    /// It printed too much.
    #[error("the machine printed more than {OUTPUT_BYTES_MAX} bytes and was ended")]
    PrintedTooMuch,
    /// It ended before its command did, without a panic.
    #[error(
        "the machine ended before its command ({status}); {errors}the end of the console:\n{console}"
    )]
    Stopped {
        /// How qemu ended.
        status: ExitStatus,
        /// What qemu printed.
        errors: String,
        /// The last lines of the console.
        console: String,
    },
    /// It did not end in time.
    #[error("the machine had not ended after {} s; the end of the console:\n{console}", .deadline.as_secs())]
    TimedOut {
        /// Its deadline.
        deadline: Duration,
        /// The last lines of the console.
        console: String,
    },
}

/// Runs machines side by side and waits until all have ended. If one fails, or its command does, the others are
/// ended, because they may wait for it.
///
/// They get the numbers 1, 2 and so on.
#[must_use]
pub fn run_together(machines: &[Machine]) -> Vec<Result<Output, MachineError>> {
    let failed = |source| MachineError::Files { action: "make files for the run", source };
    let directory = match tempfile::Builder::new().prefix("bb-vm-").tempdir() {
        Ok(directory) => directory,
        Err(error) => return vec![Err(failed(error))],
    };
    let run = Run { directory, count: machines.len(), first_failed: AtomicUsize::new(0) };
    thread::scope(|scope| {
        let run = &run;
        let threads = machines.iter().zip(1..).map(|(machine, number)| {
            thread::Builder::new()
                .name(format!("vm{number}"))
                .spawn_scoped(scope, move || run.machine(number, machine))
        });
        let threads: Vec<_> = threads.collect();
        let outcome = |thread: io::Result<thread::ScopedJoinHandle<'_, _>>| match thread {
            Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            Err(source) => Err(MachineError::Files { action: "start a thread", source }),
        };
        threads.into_iter().map(outcome).collect()
    })
}

struct Run {
    directory: TempDir,
    count: usize,
    /// The number of the machine that failed first; 0 before.
    first_failed: AtomicUsize,
}

impl Run {
    fn machine(&self, number: usize, machine: &Machine) -> Result<Output, MachineError> {
        let result = self.attempt(number, machine);
        if !result.as_ref().is_ok_and(|output| output.code == 0) {
            let _ =
                self.first_failed.compare_exchange(0, number, Ordering::Relaxed, Ordering::Relaxed);
        }
        result
    }

    fn attempt(&self, number: usize, machine: &Machine) -> Result<Output, MachineError> {
        let start = Instant::now();
        let place = Place::make(self.directory.path(), number, self.count, machine)
            .map_err(|source| MachineError::Files { action: "make files for a machine", source })?;
        let mut process = Process::start(&place, machine)?;
        let status = loop {
            if let Some(status) = process.ended()? {
                break status;
            }
            let failed = self.first_failed.load(Ordering::Relaxed);
            if failed != 0 {
                return Err(MachineError::OtherFailed { failed });
            }
            if start.elapsed() > machine.deadline {
                let console = console_end(&place);
                return Err(MachineError::TimedOut { deadline: machine.deadline, console });
            }
            if printed(&place) > OUTPUT_BYTES_MAX {
                return Err(MachineError::PrintedTooMuch);
            }
            thread::sleep(POLL);
        };
        end(&place, status, start.elapsed())
    }
}

/// The result of a machine whose qemu ended by itself.
fn end(place: &Place, status: ExitStatus, took: Duration) -> Result<Output, MachineError> {
    let console = console(place);
    let code = fs::read_to_string(place.own("code")).ok();
    let code = code.and_then(|code| code.trim().parse().ok());
    if let (Some(ENDED), Some(code)) = (status.code(), code) {
        let read = |name| {
            fs::read(place.own(name)).map_err(|source| MachineError::Files {
                action: "read the command's output",
                source,
            })
        };
        return Ok(Output {
            code,
            stdout: read("stdout")?,
            stderr: read("stderr")?,
            console,
            took,
        });
    }
    if let Some(console) = panic_lines(&console) {
        return Err(MachineError::Panicked { console });
    }
    let console = last_lines(console.as_bytes());
    if status.code() == Some(NOT_PREPARED) {
        return Err(MachineError::CouldNotStart { reason: console });
    }
    let errors = fs::read(place.file("errors")).unwrap_or_default();
    let errors = String::from_utf8_lossy(&errors).trim().to_owned();
    if console.is_empty() {
        let reason = format!("qemu ended with {status}: {errors}");
        return Err(MachineError::CouldNotStart { reason });
    }
    Err(MachineError::Stopped { status, errors, console })
}

/// qemu's process, which ends at the latest when this is dropped.
struct Process(Child);

impl Process {
    fn start(place: &Place, machine: &Machine) -> Result<Self, MachineError> {
        let mut qemu = place.qemu(machine);
        let errors = File::create(place.file("errors"))
            .map_err(|source| MachineError::Files { action: "make files for a machine", source })?;
        qemu.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors);
        bind_to_this_thread(&mut qemu);
        let child = qemu.spawn().map_err(|error| MachineError::CouldNotStart {
            reason: format!("{}: {error}", Path::new(qemu.get_program()).display()),
        })?;
        Ok(Self(child))
    }

    fn ended(&mut self) -> Result<Option<ExitStatus>, MachineError> {
        self.0.try_wait().map_err(|source| MachineError::Files { action: "wait for qemu", source })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only for a process that has already been waited for.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Makes the kernel kill a process when the thread that starts it ends, be it by SIGKILL. That thread waits for it.
fn bind_to_this_thread(command: &mut Command) {
    let runner: Pid = getpid();
    let prepare = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The runner may have ended before the line above.
        if getppid() != Some(runner) {
            return Err(io::ErrorKind::NotConnected.into());
        }
        Ok(())
    };
    // SAFETY: the closure makes system calls only; it neither allocates nor takes a lock.
    unsafe { command.pre_exec(prepare) };
}

/// The bytes that a machine printed, in the longest of its outputs.
fn printed(place: &Place) -> u64 {
    let files = [place.file("console"), place.own("stdout"), place.own("stderr")];
    files
        .iter()
        .filter_map(|file| fs::metadata(file).ok())
        .map(|file| file.len())
        .max()
        .unwrap_or(0)
}

fn console(place: &Place) -> String {
    let bytes = fs::read(place.file("console")).unwrap_or_default();
    let is_text = |c: &char| !c.is_control() || matches!(c, '\n' | '\t');
    String::from_utf8_lossy(&bytes).chars().filter(is_text).collect()
}

fn console_end(place: &Place) -> String {
    last_lines(console(place).as_bytes())
}

/// The lines of a panic: its cause comes first and is followed by more lines than anyone reads.
fn panic_lines(console: &str) -> Option<String> {
    let panic = console.lines().find(|line| line.contains(PANIC))?;
    let is_first = |line: &&str| ["BUG: ", "Oops: ", PANIC].iter().any(|mark| line.contains(mark));
    let lines = console.lines().skip_while(|line| !is_first(line)).take(CONSOLE_LINES);
    let mut lines: Vec<_> = lines.collect();
    if !lines.contains(&panic) {
        lines.push(panic);
    }
    Some(lines.join("\n"))
}

fn last_lines(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let lines: Vec<_> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(CONSOLE_LINES)..].join("\n")
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn only_the_end_of_a_long_text_is_shown() {
        let text: String = (0..100).map(|line| format!("line {line}\n\n")).collect();
        let end = last_lines(text.as_bytes());
        assert!(end.starts_with("line 75\n") && end.ends_with("line 99"), "{end}");
        assert_eq!(last_lines(b""), "");
    }

    #[test]
    fn a_panic_is_shown_from_its_cause() {
        assert_eq!(panic_lines("[1] all is well\n"), None);
        let trace = "[3] trace\n".repeat(100);
        let console =
            format!("[1] before\n[2] BUG: page fault\n{trace}[4] {PANIC}: Fatal exception\n");
        let lines = panic_lines(&console).expect("it panicked");
        assert!(lines.starts_with("[2] BUG: page fault\n"), "{lines}");
        assert!(lines.ends_with("not syncing: Fatal exception"), "{lines}");
        assert!(lines.lines().count() <= CONSOLE_LINES + 1);
    }

    #[test]
    fn a_failed_command_is_no_success() {
        let output = |code| Output {
            code,
            stdout: b"out".to_vec(),
            stderr: b"why".to_vec(),
            console: String::new(),
            took: Duration::ZERO,
        };
        assert_eq!(output(0).success().expect("it succeeded"), "out");
        let error = output(3).success().expect_err("it failed").to_string();
        assert!(error.contains("with 3") && error.contains("why"), "{error}");
    }

    #[test]
    fn no_machines_have_no_results() {
        assert!(run_together(&[]).is_empty());
        assert!(!ExitStatus::from_raw(ENDED << 8).success());
    }
}
