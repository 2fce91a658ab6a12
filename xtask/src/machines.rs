//! `cargo xtask vm`: a command in virtual machines.

use std::{io::Write as _, time::Duration};

use bluebridge_vm::{Cache, DEADLINE, Installed, Kernel, Machine, MachineError, run_together};

use crate::command::{Failure, target_directory};

const USAGE: &str = "usage: cargo xtask vm [--kernel 6.1|6.12] [--memory 256M] [--machines N] \
                     [--deadline SECONDS] -- COMMAND ..";

/// More machines would not make progress side by side.
const MACHINES_MAX: usize = 3;

/// Fetches what machines with this kernel need, unless it is there.
pub(crate) fn install(kernel: Kernel) -> Result<Installed, Failure> {
    Cache::new(target_directory().join("vm"))
        .install(kernel, |step| println!("xtask: {step}"))
        .map_err(|error| Failure::new(error.to_string()))
}

/// Executes a command in one or several machines and prints what it printed.
pub(crate) fn run(arguments: &[String]) -> Result<(), Failure> {
    let options = Options::parse(arguments)?;
    let installed = install(options.kernel)?;
    let here = std::env::current_dir()
        .map_err(|error| Failure::new(format!("the current directory is unknown: {error}")))?;
    let mut machine = Machine::new(&installed, &options.command)
        .directory(here)
        .memory_mib(options.memory_mib)
        .deadline(options.deadline);
    if let Some(path) = std::env::var_os("CARGO_TARGET_DIR") {
        machine = machine.environment("CARGO_TARGET_DIR", path);
    }
    let mut outcome = Ok(());
    for (result, number) in run_together(&vec![machine; options.machines]).into_iter().zip(1..) {
        let ended = show(number, result);
        outcome = outcome.and(ended);
    }
    outcome
}

fn show(number: usize, result: Result<bluebridge_vm::Output, MachineError>) -> Result<(), Failure> {
    let output = result.map_err(|error| Failure::new(format!("machine {number}: {error}")))?;
    // A reader that has ended wants no more of it.
    let _ = std::io::stdout().write_all(&output.stdout);
    let _ = std::io::stderr().write_all(&output.stderr);
    let seconds = output.took.as_secs_f64();
    eprintln!("xtask: machine {number}: exit code {} after {seconds:.1} s", output.code);
    if output.code == 0 {
        return Ok(());
    }
    Err(Failure::new(format!("the command failed in machine {number}")))
}

#[derive(Debug, PartialEq, Eq)]
struct Options {
    kernel: Kernel,
    memory_mib: u32,
    machines: usize,
    deadline: Duration,
    command: Vec<String>,
}

impl Options {
    fn parse(arguments: &[String]) -> Result<Self, Failure> {
        let usage = |text: String| Failure::usage(format!("{text}\n{USAGE}"));
        let mut options = Self {
            kernel: Kernel::V6_1,
            memory_mib: 256,
            machines: 1,
            deadline: DEADLINE,
            command: Vec::new(),
        };
        let mut arguments = arguments.iter();
        while let Some(argument) = arguments.next() {
            if argument == "--" {
                options.command = arguments.cloned().collect();
                break;
            }
            let value = arguments.next();
            let value = value.ok_or_else(|| usage(format!("`{argument}` needs a value")))?;
            let invalid = || usage(format!("`{argument}` cannot be `{value}`"));
            match argument.as_str() {
                "--kernel" => {
                    options.kernel = value.parse().map_err(|error| usage(format!("{error}")))?;
                }
                "--memory" => options.memory_mib = mib(value).ok_or_else(invalid)?,
                "--machines" => {
                    let count = value.parse().ok();
                    let count = count.filter(|count| (1..=MACHINES_MAX).contains(count));
                    options.machines = count.ok_or_else(invalid)?;
                }
                "--deadline" => {
                    options.deadline =
                        value.parse().map(Duration::from_secs).map_err(|_| invalid())?;
                }
                _ => return Err(usage(format!("unknown option `{argument}`"))),
            }
        }
        if options.command.is_empty() {
            return Err(usage("no command is given".to_owned()));
        }
        Ok(options)
    }
}

/// A number of mebibytes: `256M` or `1G`.
fn mib(text: &str) -> Option<u32> {
    let (number, factor) = match text.strip_suffix('G') {
        Some(number) => (number, 1024),
        None => (text.strip_suffix('M')?, 1),
    };
    number.parse::<u32>().ok()?.checked_mul(factor).filter(|mib| *mib > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options, Failure> {
        Options::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn the_command_follows_two_dashes() {
        let options = parse("--kernel 6.12 --memory 1G --machines 2 --deadline 9 -- ip -6 route");
        let options = options.unwrap_or_else(|failure| panic!("{failure}"));
        let expected = Options {
            kernel: Kernel::V6_12,
            memory_mib: 1024,
            machines: 2,
            deadline: Duration::from_secs(9),
            command: ["ip", "-6", "route"].map(str::to_owned).to_vec(),
        };
        assert_eq!(options, expected);
    }

    #[test]
    fn what_is_not_known_is_refused() {
        for line in [
            "",
            "--",
            "ls",
            "--kernel 5 -- ls",
            "--memory 1 -- ls",
            "--memory 9999999G -- ls",
            "--machines 4 -- ls",
            "--machines",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
