//! `bluebridge drain` and `bluebridge undrain`: move everything that a memory server serves to others.

use std::thread;
use std::time::Duration;

use bluebridge_northbound::proto;
use bluebridge_rack::control::operations::{drain, drains};
use clap::Args;
use serde_json::{Value, json};

use super::{Servers, patiently};
use crate::command::Global;
use crate::exit::Exit;
use crate::output;

/// How often the progress is looked up.
const PACE: Duration = Duration::from_millis(500);

/// Move everything that a memory server serves to others while it is used; only for operators of the controller.
///
/// Waits until it serves nothing, and shows what happens; `bluebridge migrations` shows each range. New allocations are
/// not led to the server until `bluebridge undrain`.
#[derive(Debug, Args)]
pub(in crate::command) struct Drain {
    /// The memory server, by name or id
    server: String,
    /// Do not wait
    #[arg(long)]
    no_wait: bool,
    #[command(flatten)]
    servers: Servers,
}

/// Lead new allocations to a drained memory server again; only for operators of the controller.
///
/// What has moved stays at its new servers, and migrations that are open go on.
#[derive(Debug, Args)]
pub(in crate::command) struct Undrain {
    /// The memory server, by name or id
    server: String,
    #[command(flatten)]
    servers: Servers,
}

pub(in crate::command) fn run(options: Drain, global: Global) -> anyhow::Result<Exit> {
    let Drain { server, no_wait, servers } = options;
    let chosen = servers.choose(Some(&server))?;
    let (controller, deadline) = (chosen.controller, servers.deadline.0);
    let Some(server) = chosen.servers.into_iter().next() else { return Ok(Exit::Ok) };
    let request =
        proto::DrainRequest { server: server.id.into(), space: servers.space.into(), undo: false };
    drain(&controller, request, deadline)?;
    let mut shown = None;
    loop {
        let found = patiently(global.json, || drains(&controller, deadline))?;
        let Some(now) = found.into_iter().find(|it| it.server == u32::from(server.id)) else {
            anyhow::bail!("{} is not drained any more: an operator ended it", server.name);
        };
        if shown.as_ref() != Some(&now) {
            if global.json {
                output::json(&document(&now))?;
            } else {
                output::text(&words(&now))?;
            }
        }
        // Nothing is left; others may have to answer for a server first for which this one did.
        if now.is_drained && now.problem.is_empty() || no_wait {
            return Ok(Exit::Ok);
        }
        shown = Some(now);
        thread::sleep(PACE);
    }
}

pub(in crate::command) fn undo(options: Undrain, global: Global) -> anyhow::Result<Exit> {
    let Undrain { server, servers } = options;
    let chosen = servers.choose(Some(&server))?;
    let Some(server) = chosen.servers.into_iter().next() else { return Ok(Exit::Ok) };
    let request =
        proto::DrainRequest { server: server.id.into(), space: servers.space.into(), undo: true };
    let response = drain(&chosen.controller, request, servers.deadline.0)?;
    let name = &server.name;
    if global.json {
        let was_drained = response.is_new;
        output::json(&json!({ "server": name, "id": server.id, "was_drained": was_drained }))?;
    } else if response.is_new {
        output::text(&format!(
            "{name} gets new allocations again; what has moved stays, and open migrations go on"
        ))?;
    } else {
        output::text(&format!("{name} was not drained"))?;
    }
    Ok(Exit::Ok)
}

fn words(drain: &proto::Drain) -> String {
    let name = &drain.name;
    let deputy = &drain.deputy;
    if drain.is_drained {
        if !drain.unanswered.is_empty() {
            let why = &drain.unanswered;
            return format!(
                "{name} is drained and gone, and nobody says where its pages are: {why}"
            );
        }
        return match (deputy.is_empty(), drain.may_leave) {
            (false, _) => format!("{name} is drained and gone: {deputy} says where its pages are"),
            (true, true) => format!(
                "{name} is drained: it serves and allocates nothing, and may be stopped, or taken away for good; \
                 another server then says where its pages are"
            ),
            (true, false) if !drain.problem.is_empty() => format!(
                "{name} is drained: it serves nothing, and must go on running for a moment: {}",
                drain.problem
            ),
            (true, false) => format!(
                "{name} is drained: it serves nothing, and must go on running to say where its pages are, \
                 because no other server can"
            ),
        };
    }
    let problem = match drain.problem.as_str() {
        "" => String::new(),
        problem => format!("; {problem}"),
    };
    let (open, are) = output::counted_are(drain.open_migrations.into(), "migration");
    let hint =
        if drain.open_migrations == 0 { "" } else { " (`bluebridge migrations` shows them)" };
    format!("{name} is draining: {open} {are} open{hint}{problem}")
}

fn document(drain: &proto::Drain) -> Value {
    json!({
        "server": drain.name,
        "id": drain.server,
        "space": drain.space,
        "state": if drain.is_drained { "drained" } else { "draining" },
        "open_migrations": drain.open_migrations,
        "may_leave": drain.may_leave,
        "deputy": (!drain.deputy.is_empty()).then_some(&drain.deputy),
        "unanswered": (!drain.unanswered.is_empty()).then_some(&drain.unanswered),
        "problem": (!drain.problem.is_empty()).then_some(&drain.problem),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drain_is_shown_with_what_hinders_it() {
        let mut drain = proto::Drain {
            server: 1,
            name: "s1".to_owned(),
            space: 1,
            is_drained: false,
            open_migrations: 2,
            problem: "no room".to_owned(),
            may_leave: false,
            deputy: String::new(),
            unanswered: String::new(),
        };
        assert_eq!(
            words(&drain),
            "s1 is draining: 2 migrations are open (`bluebridge migrations` shows them); no room"
        );
        assert_eq!(document(&drain)["problem"], "no room");
        drain.problem.clear();
        assert_eq!(
            words(&drain),
            "s1 is draining: 2 migrations are open (`bluebridge migrations` shows them)"
        );
        drain.open_migrations = 1;
        assert_eq!(
            words(&drain),
            "s1 is draining: 1 migration is open (`bluebridge migrations` shows them)"
        );
        (drain.is_drained, drain.open_migrations) = (true, 0);
        assert!(words(&drain).ends_with("because no other server can"));
        drain.problem = "s3 must confirm first that it answers for s2".to_owned();
        assert!(
            words(&drain).ends_with("for a moment: s3 must confirm first that it answers for s2")
        );
        drain.problem.clear();
        drain.may_leave = true;
        assert!(words(&drain).contains("may be stopped, or taken away for good"));
        let shown = document(&drain);
        assert_eq!((&shown["state"], &shown["problem"]), (&json!("drained"), &Value::Null));
        assert_eq!((&shown["may_leave"], &shown["deputy"]), (&json!(true), &Value::Null));
        drain.deputy = "s2".to_owned();
        assert_eq!(words(&drain), "s1 is drained and gone: s2 says where its pages are");
        assert_eq!(document(&drain)["deputy"], "s2");
        assert_eq!(document(&drain)["unanswered"], Value::Null);
        drain.deputy.clear();
        drain.unanswered = "its deputy s2 left; start it".to_owned();
        assert_eq!(
            words(&drain),
            "s1 is drained and gone, and nobody says where its pages are: its deputy s2 left; start it"
        );
        assert_eq!(document(&drain)["unanswered"], "its deputy s2 left; start it");
    }
}
