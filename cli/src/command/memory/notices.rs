//! `bluebridge notices`: prints the notices of a space.

use std::time::{Duration, Instant};

use anyhow::Context;
use bluebridge::NoticeKind;
use clap::Args;
use serde_json::json;

use crate::command::member::{Deadline, Member};
use crate::command::{Global, interrupt};
use crate::exit::Exit;
use crate::output;

/// How often an interruption is checked.
const LOOK: Duration = Duration::from_millis(100);

/// Print notices of memory that is allocated, freed or zeroed in the space, as the servers multicast them; notices
/// can be lost. Ends with exit code 4 if none arrived in time.
#[derive(Debug, Args)]
pub(in crate::command) struct Notices {
    /// End after this many notices; the default is to run until interrupted
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    count: Option<u32>,
    /// End after this time
    #[arg(long, value_name = "TIME")]
    within: Option<Deadline>,
    #[command(flatten)]
    member: Member,
}

pub(in crate::command) fn run(options: Notices, global: Global) -> anyhow::Result<Exit> {
    let cancel = interrupt::watch().context("cannot watch for signals")?;
    let mut session = options.member.join_for_notices()?;
    let notices = session.client.notices().context("the client has no service thread")?;
    let until = options.within.map(|within| Instant::now() + within.0);
    let mut left = options.count;
    let mut seen_count: u64 = 0;
    while left != Some(0) && !cancel.is_cancelled() {
        if until.is_some_and(|until| Instant::now() >= until) {
            session.leave();
            let words = match left {
                Some(left) => format!("{left} of the notices did not arrive in time"),
                None if seen_count == 0 => "no notice arrived in time".to_owned(),
                None => return Ok(Exit::Ok),
            };
            output::failure(&words, Exit::Unreachable, global.json);
            return Ok(Exit::Unreachable);
        }
        let Some(notice) = notices.next_within(LOOK) else { continue };
        let what = match notice.kind {
            NoticeKind::Create => "allocated",
            NoticeKind::Invalidate => "freed",
        };
        if global.json {
            let pointer = notice.pointer.to_string();
            output::json(&json!({ "notice": what, "pointer": pointer, "pages": notice.pages }))?;
        } else {
            let pages = output::counted(notice.pages.into(), "page");
            output::text(&format!("{what} {} ({pages})", notice.pointer))?;
        }
        seen_count += 1;
        left = left.map(|left| left - 1);
    }
    session.leave();
    Ok(Exit::Ok)
}
