//! The subcommands, one file each, and what they share.

mod bench;
mod controller;
mod demo;
mod endpoint;
mod experiment;
mod host;
mod interrupt;
mod logging;
mod member;
mod memory;
mod memserver;
mod rack;
mod shutdown;
mod switch;
mod switch_control;
mod trust;

use std::process::ExitCode;

use clap::{ArgAction, Parser, Subcommand};

use self::logging::{LogFormat, Program};
use crate::exit::Exit;
use crate::output;

/// Shared memory whose pointers are IPv6 addresses.
#[derive(Debug, Parser)]
#[command(name = "bluebridge", version, propagate_version = true)]
#[command(
    after_help = "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 refused by the other side, \
                        4 no answer in time, 5 not permitted to this user. With --json a \
                  failure is one line on standard error: \
                  {\"error\":{\"kind\":..,\"code\":..,\"message\":..}}."
)]
struct CommandLine {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

/// Options of every subcommand.
#[derive(Clone, Copy, Debug, clap::Args)]
struct Global {
    /// Print JSON for programs
    #[arg(long, global = true)]
    json: bool,
    /// Log more to standard error (-v, -vv, -vvv); BLUEBRIDGE_LOG chooses by module
    #[arg(short, long, global = true, action = ArgAction::Count)]
    verbose: u8,
    /// How log lines on standard error are written
    #[arg(
        long,
        global = true,
        value_enum,
        default_value_t,
        env = "BLUEBRIDGE_LOG_FORMAT",
        value_name = "FORMAT"
    )]
    log_format: LogFormat,
}

#[derive(Debug, Subcommand)]
enum Command {
    AllocWrite(memory::alloc_write::AllocWrite),
    /// Measure our operations against plain UDP, side by side, in a rack made for it
    Bench(bench::Bench),
    /// Run the controller in the foreground, or ask a running one
    Controller(controller::Controller),
    Create(memory::create::Create),
    Delete(memory::delete::Delete),
    Demo(demo::Demo),
    /// Answer a question by a rack made for it, with tables, CSV and plots
    #[command(subcommand)]
    Experiment(experiment::Experiment),
    /// Let this machine send to pointers and receive them through one interface
    #[command(subcommand)]
    Host(host::HostCommand),
    /// Run a memory server in the foreground
    Memserver(memserver::MemoryServer),
    Notices(memory::notices::Notices),
    Ping(memory::ping::Ping),
    /// Build, look at and take down a rack of network namespaces on this machine
    #[command(subcommand)]
    Rack(rack::RackCommand),
    Read(memory::read::Read),
    Stat(memory::stat::Stat),
    /// Run the embedded switch and its P4Runtime agent in the foreground, or ask a running one
    Switch(switch::Switch),
    Update(memory::update::Update),
    Write(memory::write::Write),
    Zero(memory::zero::Zero),
}

impl Command {
    /// Whether it serves in the foreground until it is told to end.
    fn is_daemon(&self) -> bool {
        match self {
            Self::Controller(controller) => controller.is_daemon(),
            Self::Memserver(_) => true,
            Self::Switch(switch) => switch.is_daemon(),
            _ => false,
        }
    }
}

/// Runs the command line of this process.
pub fn run() -> ExitCode {
    // No thread may start before the subcommand: without root it may have to change its user namespace.
    let line = match CommandLine::try_parse() {
        Ok(line) => line,
        Err(error) => return misread(&error),
    };
    let json = line.global.json;
    let program = match line.command.is_daemon() {
        true => Program::Daemon,
        false if json => Program::ErrorAlone,
        false => Program::Command,
    };
    logging::begin(program, line.global.verbose, line.global.log_format);
    let done = match line.command {
        Command::AllocWrite(command) => memory::alloc_write::run(command, line.global),
        Command::Bench(command) => bench::run(command, line.global),
        Command::Controller(command) => controller::run(command, line.global),
        Command::Create(command) => memory::create::run(command, line.global),
        Command::Delete(command) => memory::delete::run(command, line.global),
        Command::Demo(command) => demo::run(command, line.global),
        Command::Experiment(command) => experiment::run(command, line.global),
        Command::Host(command) => host::run(command, line.global),
        Command::Memserver(command) => memserver::run(command),
        Command::Notices(command) => memory::notices::run(command, line.global),
        Command::Ping(command) => memory::ping::run(command, line.global),
        Command::Rack(command) => rack::run(command, line.global),
        Command::Read(command) => memory::read::run(command, line.global),
        Command::Stat(command) => memory::stat::run(command, line.global),
        Command::Switch(command) => switch::run(command, line.global),
        Command::Update(command) => memory::update::run(command, line.global),
        Command::Write(command) => memory::write::run(command, line.global),
        Command::Zero(command) => memory::zero::run(command, line.global),
    };
    match done {
        Ok(exit) => exit.into(),
        Err(error) => {
            let exit = Exit::of(&error);
            output::failure(&in_words(&error), exit, json);
            exit.into()
        }
    }
}

/// Tells what is wrong with the command line, or what it asked to be told: --help, --version.
fn misread(error: &clap::Error) -> ExitCode {
    let wants_json = std::env::args_os().take_while(|it| it != "--").any(|it| it == "--json");
    if wants_json && error.use_stderr() {
        let text = error.render().to_string();
        let words = text.trim_end();
        output::failure(words.strip_prefix("error: ").unwrap_or(words), Exit::Usage, true);
        return Exit::Usage.into();
    }
    // A closed standard error must not change the exit code.
    let _ = error.print();
    if error.use_stderr() { Exit::Usage.into() } else { Exit::Ok.into() }
}

/// The error and its causes, without those that the error's own words tell already.
fn in_words(error: &anyhow::Error) -> String {
    let mut words = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if words.is_empty() {
            words = cause;
        } else if !words.contains(&cause) {
            words = format!("{words}: {cause}");
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        CommandLine::command().debug_assert();
    }

    #[test]
    fn an_error_is_told_once() {
        let error = anyhow::anyhow!("no such file").context("cannot read x: no such file");
        assert_eq!(in_words(&error), "cannot read x: no such file");
        let error = anyhow::anyhow!("no such file").context("cannot read x");
        assert_eq!(in_words(&error), "cannot read x: no such file");
    }
}
