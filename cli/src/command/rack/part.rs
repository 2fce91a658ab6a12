//! `bluebridge rack restart|kill`: one daemon of a rack.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use bluebridge_memserver::ArenaFile;
use bluebridge_memserver::kept::{Listed, Reader};
use bluebridge_rack::daemon::{FRESH, Part, READY_DEADLINE};
use bluebridge_rack::process::Stopped;
use bluebridge_rack::state::StateRoot;
use bluebridge_rack::status::Loss;
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
    let reported = rack.kept_memory(&name)?.filter(|kept| !kept.is_kept);
    let restart = part.restart(&chosen);
    if let Some(NotFound { cause, remedy, .. }) = find_owner(&rack, *part, &restart)? {
        // Also without --keep, which would drop the other server's memory.
        let runs = match rack.running_pid(&name) {
            Some(_) => "it was not stopped; ",
            None => "",
        };
        let words = format!(
            "{part} cannot start with the memory of another server: {cause}; {runs}{remedy}"
        );
        return Err(UsageError(words).into());
    }
    // A server that runs is not stopped before the next one is known to find its memory.
    let deadline = Instant::now() + ENDING;
    let found = loop {
        let found = match (&reported, rack.arena_file(&name)?) {
            (None, Some(file)) => find_memory(file, rack.running_pid(&name), &restart),
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
    // Without a report, a server may not have had any contents yet.
    let is_recorded = is_server
        && has_file
        && reported.is_none()
        && (found.is_ok() || rack.kept_memory(&name)?.is_some());
    if options.keep {
        if let Err(NotFound { cause, remedy, .. }) = found {
            let runs = match rack.running_pid(&name) {
                Some(_) => "it was not stopped; ",
                None => "",
            };
            let words = format!("{part} could not go on with its memory: {cause}; {runs}{remedy}");
            return Err(UsageError(words).into());
        }
        let lost = match reported {
            Some(kept) => Some(kept.to_string()),
            None => (!has_file).then(|| "ends with the process".to_owned()),
        };
        if let Some(lost) = lost {
            // The reason says what to do about it already, if something can be done.
            let remedy = match lost.contains("; ") {
                true => String::new(),
                false => format!("; `{restart}` starts it with empty memory"),
            };
            return Err(UsageError(format!("the memory of {part} {lost}{remedy}")).into());
        }
    }
    rack.set_cancel(interrupt::watch().context("cannot watch for signals")?);
    rack.set_logging(log_filter(global), log_format(global))?;
    // One that never became ready may have found the contents damaged.
    let was_ready = rack.running_pid(&name).is_some() || rack.kept_memory(&name)?.is_some();
    let was = rack.stop_daemon(&name, GRACE)?;
    let more: &[&str] = match (is_server && !options.keep, options.force) {
        (true, _) => &[FRESH],
        (false, true) => &["--force"],
        (false, false) => &[],
    };
    rack.restart_daemon(&program, &name, more, options.deadline.0)?;
    let pid = rack.pid(&name);
    let kept = rack.kept_memory(&name)?;
    if global.json {
        let memory = is_server.then_some(if options.keep { "kept" } else { "empty" });
        output::json(&json!({
            "rack": chosen, "daemon": name, "was": was, "pid": pid, "memory": memory, "kept_memory": kept,
        }))?;
    } else {
        let pid = pid.map_or_else(String::new, |pid| format!(" (pid {pid})"));
        let was = match was {
            Stopped::AlreadyGone => "it was not running",
            Stopped::Failed => "it ended with an error first, which its log may show",
            Stopped::Killed => "it did not end at SIGTERM and was killed first",
            Stopped::KilledByOther => "another process had killed it (SIGKILL)",
            Stopped::Terminated => "it ended normally first",
        };
        let dropped = match &found {
            _ if options.keep || !is_recorded => String::new(),
            Ok(()) if !was_ready => "; its memory begins empty".to_owned(),
            Ok(()) => "; its memory begins empty, --keep would have kept it".to_owned(),
            Err(NotFound { cause, is_recoverable: true, .. }) => {
                format!(
                    "; its memory begins empty: {cause}; --keep would have kept it without that"
                )
            }
            Err(NotFound { cause, .. }) => {
                format!("; its memory begins empty, and could not have been kept: {cause}")
            }
        };
        output::text(&format!("{name} runs again{pid}; {was}{dropped}"))?;
        if let Some(kept) = kept.filter(|kept| kept.reason.is_some()) {
            output::prose(&format!("The memory of {part} {kept}."))?;
        }
    }
    Ok(Exit::Ok)
}

/// Why the next process of a server cannot go on with its memory, and what to do.
struct NotFound {
    cause: String,
    remedy: String,
    /// With the remedy, it can.
    is_recoverable: bool,
    /// Nobody uses the file, although the server seems to run.
    may_be_ending: bool,
}

/// How long a process may take to end that was killed, and how often it is looked at.
const ENDING: Duration = Duration::from_secs(2);
const ENDING_INTERVAL: Duration = Duration::from_millis(20);

/// The other server whose memory is in the file of a server, with a remedy that drops no memory.
fn find_owner(rack: &Rack, part: Part, restart: &str) -> anyhow::Result<Option<NotFound>> {
    let name = part.daemon();
    let (Some((owner, remedy)), Some(file)) =
        (rack.owner_of_contents(&name)?, rack.arena_file(&name)?)
    else {
        return Ok(None);
    };
    Ok(Some(NotFound {
        cause: format!("{} is the file of {owner}", file.display()),
        remedy: format!("{remedy}; then `{restart} --keep`"),
        is_recoverable: true,
        may_be_ending: false,
    }))
}

/// Whether the next process of a server finds its memory with this file, as far as that can be seen while a process
/// uses it: the server with this pid, if it runs. `restart` is the command that begins with empty memory. What an earlier
/// look found does not count: the file may have been put back, or repaired.
fn find_memory(file: &Path, server: Option<u32>, restart: &str) -> Result<(), NotFound> {
    let shown = file.display();
    let back = format!(
        "put the server's file back in its place (then `{restart} --keep`), or begin with empty memory (`{restart}`)"
    );
    let not_found = |cause: String, remedy| NotFound {
        cause,
        remedy,
        is_recoverable: true,
        may_be_ending: false,
    };
    match ArenaFile::check(file) {
        Err(error) => {
            let reader = Reader::Rack { restart: restart.to_owned(), keeps: true };
            let remedy = error.remedy(&reader);
            let remedy = remedy.unwrap_or_else(|| format!("`{restart}` begins with empty memory"));
            let is_recoverable = error.leaves_contents();
            Err(NotFound { is_recoverable, ..not_found(error.to_string(), remedy) })
        }
        Ok(None) => Err(not_found(format!("{shown} holds nothing"), back)),
        Ok(Some(_)) => {
            let process = Listed::of(file).ok().and_then(|listed| listed.process);
            if server.is_none() || process == server {
                return Ok(());
            }
            let cause = format!("{shown} is not the file that the server uses");
            Err(NotFound { may_be_ending: process.is_none(), ..not_found(cause, back) })
        }
    }
}

/// What `restart --keep` would say, for `rack status`.
pub(super) fn look_into_file(file: &Path, server: Option<u32>, restart: &str) -> Option<Loss> {
    let found = find_memory(file, server, restart).err().filter(|it| !it.may_be_ending)?;
    let words = format!("{}; {}", found.cause, found.remedy);
    Some(Loss { words, is_recoverable: found.is_recoverable })
}

pub(super) fn kill(options: &Kill, global: Global) -> anyhow::Result<Exit> {
    let Kill { named, part } = options;
    let root = StateRoot::locate();
    let chosen = named.choose(&root)?;
    let mut rack = Rack::open(&root, &chosen, Cancel::default())?;
    let name = part.daemon();
    let restart = part.restart(&chosen);
    let may_keep = rack.may_keep_memory(&name)?;
    let is_kept = rack.kept_memory(&name)?.is_some_and(|kept| kept.is_kept);
    // As long as it runs, a copy of its file can be told from the file.
    let found = match (find_owner(&rack, *part, &restart)?, rack.arena_file(&name)?) {
        (Some(of_other), _) => Err(of_other),
        (None, Some(file)) if is_kept => find_memory(file, rack.running_pid(&name), &restart),
        (None, _) => Ok(()),
    };
    let was = rack.kill_daemon(&name)?;
    if global.json {
        output::json(&json!({ "rack": chosen, "daemon": name, "was": was }))?;
    } else {
        output::text(&match (was, found) {
            (Stopped::AlreadyGone, _) => format!("{name} was not running"),
            (_, Ok(())) => {
                let keep = if may_keep { " --keep" } else { "" };
                format!("{name} was killed; `{restart}{keep}` starts it again")
            }
            (_, Err(NotFound { cause, remedy, .. })) => format!(
                "{name} was killed, and cannot go on with its memory as it is: {cause}; {remedy}"
            ),
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
