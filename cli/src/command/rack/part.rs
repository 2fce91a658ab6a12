//! `bluebridge rack restart|kill`: one daemon of a rack.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use bluebridge_memserver::kept::{Listed, Place};
use bluebridge_memserver::{ArenaFile, ArenaFileError};
use bluebridge_rack::daemon::{FRESH, Part, READY_DEADLINE};
use bluebridge_rack::process::Stopped;
use bluebridge_rack::readiness::KeptMemory;
use bluebridge_rack::state::StateRoot;
use bluebridge_rack::{Cancel, GRACE, Rack};
use clap::Args;
use serde_json::json;

use super::{Named, log_filter, log_format};
use crate::command::member::Deadline;
use crate::command::{Global, interrupt};
use crate::exit::{Exit, UsageError};
use crate::output;

#[derive(Debug, Args)]
pub(in crate::command) struct Restart {
    #[command(flatten)]
    kill: Kill,
    /// Time that the daemon may take to start, such as 15s
    #[arg(long, value_name = "TIME", default_value_t = Deadline(READY_DEADLINE))]
    deadline: Deadline,
    /// Let the controller take the switch from another one, this once; see `bluebridge controller --help`
    #[arg(long)]
    force: bool,
    /// A memory server goes on with the contents of its memory, which otherwise are dropped
    #[arg(long)]
    keep: bool,
}

#[derive(Debug, Args)]
pub(in crate::command) struct Kill {
    #[command(flatten)]
    named: Named,
    /// The daemon: switch, controller, hosts, or a memory server: s1, s2, ..
    part: Part,
}

pub(super) fn restart(options: &Restart, global: Global) -> anyhow::Result<Exit> {
    let Kill { named, part } = &options.kill;
    let program = std::env::current_exe().context("cannot find this program's own path")?;
    // Before any thread starts: without root the process moves to the rack's user namespace.
    if options.force && *part != Part::Controller {
        return Err(UsageError(format!("--force applies to the controller, not to {part}")).into());
    }
    let is_server = matches!(part, Part::Server(_));
    if options.keep && !is_server {
        return Err(UsageError(format!("--keep applies to a memory server, not to {part}")).into());
    }
    let root = StateRoot::locate();
    let chosen = named.choose(&root)?;
    let mut rack = Rack::open(&root, &chosen, Cancel::default())?;
    let name = part.daemon();
    let reported = rack.kept_memory(&name)?.filter(|kept| !kept.is_kept).cloned();
    // A server that runs is not stopped before the next one is known to find its memory.
    let deadline = Instant::now() + ENDING;
    let found = loop {
        let found = match (&reported, rack.arena_file(&name)?) {
            (None, Some(file)) => find_memory(file, rack.running_pid(&name)),
            _ => Ok(()),
        };
        // A server that was killed a moment ago has left its file, and its process is not gone yet.
        let is_ending = found.as_ref().is_err_and(|not_found| not_found.may_be_ending);
        if !is_ending || Instant::now() >= deadline {
            break found;
        }
        thread::sleep(ENDING_INTERVAL);
    };
    let has_file = rack.arena_file(&name)?.is_some();
    let is_kept = is_server && has_file && reported.is_none() && found.is_ok();
    if options.keep {
        let lost = match (reported, found) {
            (Some(kept), _) => Some(kept.to_string()),
            (None, Ok(())) if !has_file => Some("ends with the process".to_owned()),
            (None, Ok(())) => None,
            (None, Err(NotFound { reason, is_lost: true, .. })) => {
                rack.note_lost_memory(&name, KeptMemory::lost(&reason))?;
                Some(format!("is lost: {reason}"))
            }
            (None, Err(NotFound { reason, is_lost: false, .. })) => {
                let runs = match rack.running_pid(&name) {
                    Some(_) => "it was not stopped; ",
                    None => "",
                };
                let restart = part.restart(&chosen);
                let words = format!(
                    "{part} could not go on with its memory: {reason}; {runs}`{restart}`, without --keep, drops the \
                     memory"
                );
                return Err(UsageError(words).into());
            }
        };
        if let Some(lost) = lost {
            let words = format!("the memory of {part} {lost}; restart it without --keep");
            return Err(UsageError(words).into());
        }
    }
    rack.set_cancel(interrupt::watch().context("cannot watch for signals")?);
    rack.set_logging(log_filter(global), log_format(global))?;
    let was = rack.stop_daemon(&name, GRACE)?;
    let more: &[&str] = match (is_server && !options.keep, options.force) {
        (true, _) => &[FRESH],
        (false, true) => &["--force"],
        (false, false) => &[],
    };
    rack.restart_daemon(&program, &name, more, options.deadline.0)?;
    let pid = rack.pid(&name);
    if global.json {
        let memory = is_server.then_some(if options.keep { "kept" } else { "empty" });
        output::json(
            &json!({ "rack": chosen, "daemon": name, "was": was, "pid": pid, "memory": memory }),
        )?;
    } else {
        let pid = pid.map_or_else(String::new, |pid| format!(" (pid {pid})"));
        let was = match was {
            Stopped::AlreadyGone => "it was not running",
            Stopped::Failed => "it ended with an error first, which its log may show",
            Stopped::Killed => "it did not end at SIGTERM and was killed first",
            Stopped::KilledByOther => "another process had killed it (SIGKILL)",
            Stopped::Terminated => "it ended normally first",
        };
        let dropped = match is_kept && !options.keep {
            true => "; its memory begins empty, --keep would have kept it",
            false => "",
        };
        output::text(&format!("{name} runs again{pid}; {was}{dropped}"))?;
    }
    Ok(Exit::Ok)
}

/// Why the next process of a server cannot go on with its memory.
struct NotFound {
    reason: String,
    /// Nothing can bring it back.
    is_lost: bool,
    /// Nobody uses the file, although the server seems to run.
    may_be_ending: bool,
}

/// How long a process may take to end that was killed, and how often it is looked at.
const ENDING: Duration = Duration::from_secs(2);
const ENDING_INTERVAL: Duration = Duration::from_millis(20);

/// Whether the next process of a server finds its memory with this file, as far as that can be seen while a process
/// uses it: the server with this pid, if it runs.
fn find_memory(file: &Path, server: Option<u32>) -> Result<(), NotFound> {
    let shown = file.display();
    let mut may_be_ending = false;
    let (reason, is_lost) = match Listed::of(file) {
        Err(ArenaFileError::Missing { .. }) => (format!("{shown} is gone"), false),
        Err(error) => (error.to_string(), false),
        Ok(listed) if !listed.is_arena => (format!("{shown} is no arena's file any more"), false),
        Ok(listed) => match listed.place {
            Place::Gone => (format!("the BPF map of {shown} is gone"), true),
            Place::NotVisible => {
                (ArenaFileError::NotVisible { path: file.into() }.to_string(), false)
            }
            Place::OfOriginal => (format!("{shown} was replaced by a copy"), false),
            Place::InFile | Place::InMap | Place::InMapAlone => match ArenaFile::check(file) {
                Err(error) => (error.to_string(), false),
                Ok(None) => (format!("{shown} holds nothing"), false),
                Ok(Some(_)) if server.is_some() && listed.process != server => {
                    may_be_ending = listed.process.is_none();
                    (format!("{shown} is not the file that the server uses"), false)
                }
                Ok(Some(_)) => return Ok(()),
            },
        },
    };
    Err(NotFound { reason, is_lost, may_be_ending })
}

pub(super) fn kill(options: &Kill, global: Global) -> anyhow::Result<Exit> {
    let Kill { named, part } = options;
    let root = StateRoot::locate();
    let chosen = named.choose(&root)?;
    let mut rack = Rack::open(&root, &chosen, Cancel::default())?;
    let name = part.daemon();
    let may_keep = rack.may_keep_memory(&name)?;
    let was = rack.kill_daemon(&name)?;
    if global.json {
        output::json(&json!({ "rack": chosen, "daemon": name, "was": was }))?;
    } else {
        output::text(&match was {
            Stopped::AlreadyGone => format!("{name} was not running"),
            _ => {
                let keep = if may_keep { " --keep" } else { "" };
                let restart = part.restart(&chosen);
                format!("{name} was killed; `{restart}{keep}` starts it again")
            }
        })?;
    }
    Ok(Exit::Ok)
}

#[cfg(test)]
mod tests {
    use bluebridge_rack::spec::RackName;
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        restart: Restart,
    }

    #[test]
    fn the_command_that_is_named_starts_the_same_part_of_the_same_rack() {
        let rack: RackName = "other".parse().expect("a name");
        let part: Part = "s2".parse().expect("a part");
        let words = part.restart(&rack);
        let arguments = words.strip_prefix("bluebridge rack ").expect("a command of ours");
        let line = Line::try_parse_from(arguments.split(' ')).expect("well formed");
        assert_eq!(line.restart.kill.named.rack, Some(rack));
        assert_eq!(line.restart.kill.part.daemon(), part.daemon());
    }
}
