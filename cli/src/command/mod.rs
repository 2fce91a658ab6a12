//! The subcommands, one file each, and their common code.
//!
//! * Racks and experiments: `rack`, `demo`, `bench`, `experiment`; `steps` prints what they do.
//! * Daemons: `memserver`, `controller`, `switch`; `member`, `endpoint` and `host` are an endpoint's side,
//!   `shutdown` and `interrupt` their ends, `trust` TLS, `logging` logs.
//! * `arena`: memory that outlives memory servers; `disk`: remote memory as a disk.
//! * A running rack: `memory` reads and writes its memory, `workload` measures that; `operator`, `switch_control` and `controller/query`
//!   query its servers, switch and controller.

mod arena;
mod bench;
mod controller;
mod demo;
mod disk;
mod endpoint;
mod experiment;
mod host;
mod interrupt;
mod logging;
mod member;
mod memory;
mod memserver;
pub(crate) mod operator;
mod page;
pub(crate) mod rack;
mod run;
mod shutdown;
mod steps;
mod switch;
mod switch_address;
pub(crate) mod switch_control;
mod trust;
mod workload;

use std::ffi::OsString;
use std::process::ExitCode;

use bluebridge_rack::state::LOG_FORMAT_VARIABLE;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgAction, CommandFactory, FromArgMatches, Parser, Subcommand};

use self::logging::{LogFormat, Program};
use crate::exit::Exit;
use crate::output;

/// Shared memory whose pointers are IPv6 addresses.
#[derive(Debug, Parser)]
#[command(name = "bluebridge", version, propagate_version = true)]
#[command(
    after_help = "Exit codes: 0 success, 1 failure, 2 invalid command line, 3 refused by the other side, \
                        4 no response in time, 5 permission missing. With --json a \
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
    /// Log more to standard error (-v, -vv, -vvv); BLUEBRIDGE_LOG selects by module
    #[arg(short, long, global = true, action = ArgAction::Count)]
    verbose: u8,
    /// The format of log lines on standard error; the default is text
    #[arg(long, global = true, value_enum, env = LOG_FORMAT_VARIABLE, value_name = "FORMAT")]
    log_format: Option<LogFormat>,
}

#[derive(Debug, Subcommand)]
enum Command {
    AllocWrite(memory::alloc_write::AllocWrite),
    /// List or free the memory that memory servers left
    #[command(subcommand)]
    Arena(arena::Arena),
    /// Measure BlueBridge's operations beside plain UDP in a temporary rack
    Bench(bench::Bench),
    /// Run the controller in the foreground, or query a running one
    Controller(controller::Controller),
    Create(memory::create::Create),
    Delete(memory::delete::Delete),
    Demo(demo::Demo),
    Disk(disk::DiskCommand),
    /// Run an experiment in a temporary rack, with tables, CSV and plots
    #[command(subcommand)]
    Experiment(experiment::Experiment),
    /// Connect this machine to the fabric through one interface
    #[command(subcommand)]
    Host(host::HostCommand),
    /// Run a memory server in the foreground
    Memserver(memserver::MemoryServer),
    Drain(operator::drain::Drain),
    Undrain(operator::drain::Undrain),
    List(operator::list::List),
    Migrate(operator::migrate::Migrate),
    Migrations(operator::migrations::Migrations),
    Notices(memory::notices::Notices),
    /// Measure the pager's page faults
    #[command(subcommand)]
    Page(page::Page),
    Ping(memory::ping::Ping),
    Purge(operator::purge::Purge),
    Rebalance(operator::rebalance::Rebalance),
    /// Build, inspect and take down a rack of network namespaces on this machine
    #[command(subcommand)]
    Rack(rack::RackCommand),
    Read(memory::read::Read),
    Run(run::Run),
    Stat(operator::stat::Stat),
    /// Run the embedded switch and its P4Runtime agent in the foreground, or query a running one
    Switch(switch::Switch),
    Update(memory::update::Update),
    /// Measure operations as an endpoint of a running rack, or serve as the directory that is compared with
    #[command(subcommand)]
    Workload(workload::Workload),
    Write(memory::write::Write),
    Zero(memory::zero::Zero),
}

impl Command {
    /// Whether it serves in the foreground until it is stopped.
    fn is_daemon(&self) -> bool {
        match self {
            Self::Controller(controller) => controller.is_daemon(),
            Self::Disk(disk) => disk.is_daemon(),
            Self::Host(host) => host.is_daemon(),
            Self::Memserver(_) => true,
            Self::Rack(rack) => rack.is_daemon(),
            Self::Switch(switch) => switch.is_daemon(),
            Self::Workload(workload) => workload.is_daemon(),
            _ => false,
        }
    }
}

/// Runs the command line of this process.
pub fn run() -> ExitCode {
    // No thread may start before the subcommand: without root it may have to change its user namespace.
    let matches = without_empty_variables(CommandLine::command()).try_get_matches();
    let line = match matches.and_then(|matches| CommandLine::from_arg_matches(&matches)) {
        Ok(line) => line,
        Err(error) => return misread(&error),
    };
    let json = line.global.json;
    let program = match line.command.is_daemon() {
        true => Program::Daemon,
        false if json => Program::ErrorAlone,
        false => Program::Command,
    };
    if let Err(error) = logging::begin(program, line.global.verbose, line.global.log_format) {
        output::failure(&error.to_string(), Exit::Usage, json);
        return Exit::Usage.into();
    }
    let done = match line.command {
        Command::AllocWrite(command) => memory::alloc_write::run(command, line.global),
        Command::Arena(command) => arena::run(&command, line.global),
        Command::Bench(command) => bench::run(command, line.global),
        Command::Controller(command) => controller::run(command, line.global),
        Command::Create(command) => memory::create::run(command, line.global),
        Command::Delete(command) => memory::delete::run(command, line.global),
        Command::Demo(command) => demo::run(command, line.global),
        Command::Disk(command) => disk::run(command, line.global),
        Command::Experiment(command) => experiment::run(command, line.global),
        Command::Host(command) => host::run(command, line.global),
        Command::List(command) => operator::list::run(command, line.global),
        Command::Memserver(command) => memserver::run(command),
        Command::Drain(command) => operator::drain::run(command, line.global),
        Command::Undrain(command) => operator::drain::undo(command, line.global),
        Command::Migrate(command) => operator::migrate::run(command, line.global),
        Command::Migrations(command) => operator::migrations::run(command, line.global),
        Command::Notices(command) => memory::notices::run(command, line.global),
        Command::Ping(command) => memory::ping::run(command, line.global),
        Command::Purge(command) => operator::purge::run(command, line.global),
        Command::Rebalance(command) => operator::rebalance::run(&command, line.global),
        Command::Rack(command) => rack::run(command, line.global),
        Command::Read(command) => memory::read::run(command, line.global),
        Command::Run(command) => run::run(command, line.global),
        Command::Stat(command) => operator::stat::run(command, line.global),
        Command::Switch(command) => switch::run(command, line.global),
        Command::Update(command) => memory::update::run(command, line.global),
        Command::Page(command) => page::run(command, line.global),
        Command::Workload(command) => workload::run(command, line.global),
        Command::Write(command) => memory::write::run(command, line.global),
        Command::Zero(command) => memory::zero::run(command, line.global),
    };
    match done {
        Ok(exit) => exit.into(),
        Err(error) => {
            let exit = Exit::of(&error);
            output::failure(&with_remedy(in_words(&error), &error), exit, json);
            exit.into()
        }
    }
}

/// An empty environment variable counts as unset, as in the libraries.
fn without_empty_variables(command: clap::Command) -> clap::Command {
    let is_empty = |argument: &clap::Arg| {
        let value = argument.get_env().and_then(std::env::var_os);
        value.is_some_and(|value| value.is_empty())
    };
    command
        .mut_args(|argument| if is_empty(&argument) { argument.env(None) } else { argument })
        .mut_subcommands(without_empty_variables)
}

/// The environment variable from which the value of an error was taken.
fn variable_of(error: &clap::Error, given: &[OsString]) -> Option<String> {
    let Some(ContextValue::String(argument)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    let option = argument.split([' ', '=']).next()?;
    let is_given = given.iter().filter_map(|word| word.to_str()).any(|word| {
        word.strip_prefix(option).is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
    });
    if is_given {
        return None;
    }
    let root = CommandLine::command();
    let mut commands = vec![&root];
    for word in given.iter().skip(1) {
        commands.extend(commands.last().and_then(|command| command.find_subcommand(word)));
    }
    let mut arguments = commands.into_iter().flat_map(clap::Command::get_arguments);
    let argument = arguments.find(|it| it.get_long() == option.strip_prefix("--"))?;
    argument.get_env().map(|variable| variable.to_string_lossy().into_owned())
}

/// Prints an error of the command line, or the requested text of --help or --version.
fn misread(error: &clap::Error) -> ExitCode {
    let given: Vec<_> = std::env::args_os().take_while(|it| it != "--").collect();
    let wants_json = given.iter().any(|it| it == "--json");
    let shows_help = error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
    if !error.use_stderr() || shows_help {
        // A closed standard output or error must not change the exit code.
        let _ = error.print();
        return if error.use_stderr() { Exit::Usage.into() } else { Exit::Ok.into() };
    }
    let text = match error.kind() {
        // The list would include those that are only for daemons.
        ErrorKind::MissingSubcommand => "a subcommand is missing".to_owned(),
        _ => error.render().to_string(),
    };
    let text = match variable_of(error, &given) {
        Some(variable) => format!("{variable}: {}", text.trim_start_matches("error: ")),
        None => text,
    };
    output::failure(&usage_in_a_line(&text, &subcommand_of(&given)), Exit::Usage, wants_json);
    Exit::Usage.into()
}

/// The names of the subcommands in a command line, the program's name first.
fn subcommand_of(given: &[OsString]) -> String {
    let mut command = &CommandLine::command();
    let mut names = vec![command.get_name()];
    for word in given.iter().skip(1) {
        if let Some(found) = command.find_subcommand(word) {
            command = found;
            names.push(command.get_name());
        }
    }
    names.join(" ")
}

/// Turns clap's several lines into one: the error and its tips, and the command for help instead of the usage.
fn usage_in_a_line(text: &str, subcommand: &str) -> String {
    let error = text.split("\n\nUsage: ").next().unwrap_or(text);
    let error = error.split("\n\nFor more information").next().unwrap_or(error);
    let error = error.strip_prefix("error: ").unwrap_or(error);
    // Tips are separate paragraphs, and lists have a line for each entry.
    let parts =
        error.split("\n\n").map(|part| part.split_whitespace().collect::<Vec<_>>().join(" "));
    let error = parts.collect::<Vec<_>>().join("; ");
    format!("{error}; see `{subcommand} --help`")
}

/// The error and its causes, without those that the error's own text already contains.
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

/// Adds what to do if the process has too many open files, which any part of a command can meet, or if a server does
/// not respond.
fn with_remedy(words: String, error: &anyhow::Error) -> String {
    let too_many = std::io::Error::from(rustix::io::Errno::MFILE).to_string();
    if words.contains(&too_many) && !words.contains("ulimit -n") {
        return format!("{words}; raise the limit of open files (`ulimit -n`)");
    }
    let is_silence = |error: &bluebridge::Error| {
        matches!(
            error,
            bluebridge::Error::Unreachable { .. }
                | bluebridge::Error::OutcomeUnknown { responding: false, .. }
        )
    };
    if error.chain().filter_map(|cause| cause.downcast_ref()).any(is_silence) {
        return format!(
            "{words}; `bluebridge rack status` shows whether it runs (on real hosts, `bluebridge controller status`)"
        );
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        CommandLine::command().debug_assert();
    }

    #[test]
    fn a_wrong_command_line_is_reported_in_a_line() {
        let reported = |words: &[&str]| {
            let refused = CommandLine::try_parse_from(words).expect_err("it is wrong");
            let words: Vec<_> = words.iter().map(Into::into).collect();
            usage_in_a_line(&refused.render().to_string(), &subcommand_of(&words))
        };
        assert_eq!(
            reported(&["bluebridge", "create"]),
            "the following required arguments were not provided: <SIZE>; see `bluebridge create --help`"
        );
        assert_eq!(
            reported(&["bluebridge", "rack", "up", "--memry", "1G"]),
            "unexpected argument '--memry' found; tip: a similar argument exists: '--memory'; see \
             `bluebridge rack up --help`"
        );
        assert_eq!(
            reported(&["bluebridge", "rack", "up", "--deadline", "x"]),
            "invalid value 'x' for '--deadline <TIME>': \"x\" is not a time from 1ms to 3600s, such as 500ms or \
             5s; see `bluebridge rack up --help`"
        );
    }

    #[test]
    fn what_serves_until_it_is_ended_logs_as_a_daemon() {
        let is_daemon = |line: &str| {
            let line = CommandLine::try_parse_from(line.split(' ')).expect("well formed");
            line.command.is_daemon()
        };
        for daemon in [
            "bluebridge controller --store x",
            "bluebridge disk --size 1G --socket x",
            "bluebridge host up --interface eth0 --watch",
            "bluebridge memserver --name a --interface b --switch-port 1 --controller [::1]:1",
            "bluebridge rack watch",
            "bluebridge switch",
            "bluebridge workload directory --listen [::1]:7800",
        ] {
            assert!(is_daemon(daemon), "{daemon}");
        }
        for command in ["bluebridge host up --interface eth0", "bluebridge rack status"] {
            assert!(!is_daemon(command), "{command}");
        }
    }

    /// The words of a shell command, without the parts that the shell handles; `None` if the line continues or
    /// omits words.
    fn words_of(line: &str) -> Option<Vec<String>> {
        let (mut words, mut word, mut quote) = (Vec::new(), String::new(), None);
        for letter in line.chars() {
            match (quote, letter) {
                (Some(mark), _) if mark == letter => quote = None,
                (None, '"' | '\'') => quote = Some(letter),
                (None, '&' | '|' | '>' | '<' | ';') => break,
                (None, ' ') => words.push(std::mem::take(&mut word)),
                _ => word.push(letter),
            }
        }
        words.push(word);
        words.retain(|word| !word.is_empty());
        // The value of a shell variable in the documentation.
        for word in words.iter_mut().filter(|word| *word == "$P") {
            *word = "fdbb:1:1:1::".to_owned();
        }
        let is_whole = !words.iter().any(|word| word == ".." || word.starts_with('['));
        is_whole.then_some(words)
    }

    /// Examples in the documentation must not use options that no longer exist.
    #[test]
    fn every_documented_command_can_be_parsed() {
        let mut count = 0;
        let book = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
        let mut files: Vec<_> = std::fs::read_dir(book)
            .expect("the book is there")
            .map(|entry| entry.expect("listed").path())
            .filter(|path| path.extension().is_some_and(|it| it == "md"))
            .collect();
        files.push(concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md").into());
        for file in files {
            let text = std::fs::read_to_string(&file).expect("readable");
            for line in text.lines() {
                // A prompt, `$` or `host#`, and possibly a pipe before it.
                let prompted =
                    line.trim_start().split_once(['$', '#']).map_or("", |(_, rest)| rest);
                let command = prompted.rsplit_once("| ").map_or(prompted, |(_, last)| last).trim();
                if !command.starts_with("bluebridge ") {
                    continue;
                }
                let Some(words) = words_of(command) else { continue };
                if let Err(error) = CommandLine::try_parse_from(words) {
                    assert!(!error.use_stderr(), "{}: {line}: {error}", file.display());
                }
                count += 1;
            }
        }
        assert!(count >= 20, "only {count} commands found");
    }

    /// The names of all commands without subcommands, except hidden ones.
    fn leaves(command: &clap::Command, name: &str, found: &mut Vec<String>) {
        let visible = command.get_subcommands().filter(|it| !it.is_hide_set());
        let mut is_leaf = true;
        for below in visible.filter(|it| it.get_name() != "help") {
            leaves(below, &format!("{name} {}", below.get_name()), found);
            is_leaf = false;
        }
        if is_leaf {
            found.push(name.to_owned());
        }
    }

    #[test]
    fn the_json_of_every_command_is_documented() {
        let book = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/json.md");
        let book = std::fs::read_to_string(book).expect("the chapter is there");
        let mut found = Vec::new();
        leaves(&CommandLine::command(), "bluebridge", &mut found);
        assert!(found.len() > 30, "{found:?}");
        // Daemons and commands without a result; those that print the same as another, or need what the project does not
        // install, are named in the text.
        let others = [
            "arena drop",
            "experiment barnes-hut",
            "experiment key-value",
            "experiment testswap",
            "memserver",
            "migrate",
            "migrations cancel",
            "page demo",
            "rack exec",
            "rack logs",
            "rack up",
            "rebalance off",
            "rebalance plan",
            "run",
            "switch tables",
            "workload directory",
        ]
        .map(|name| format!("bluebridge {name}"));
        found.retain(|name| !others.contains(name) && !book.contains(&format!("\n### `{name} ")));
        assert_eq!(found, Vec::<String>::new(), "not in docs/json.md");
    }

    #[test]
    fn an_error_is_printed_once() {
        let error = anyhow::anyhow!("no such file").context("cannot read x: no such file");
        assert_eq!(in_words(&error), "cannot read x: no such file");
        let error = anyhow::anyhow!("no such file").context("cannot read x");
        assert_eq!(in_words(&error), "cannot read x: no such file");
    }
}
