//! `bluebridge update`: changes bytes under a lease.

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use bluebridge::{Pointer, ServiceState, UpdateOptions};
use bluebridge_rack::spec::ByteSize;
use bluebridge_rack::{Cancel, RackError};
use clap::Args;
use serde_json::json;

use super::at;
use super::input::{Source, read_all};
use crate::command::member::{Deadline, Member};
use crate::command::{Global, interrupt};
use crate::exit::Exit;
use crate::output;

/// Change the bytes at a pointer under a lease (UPDATE, then COMMIT): during the lease, no other client can
/// change or read them.
#[derive(Debug, Args)]
pub(in crate::command) struct Update {
    /// The pointer: an IPv6 address, as `create` prints it
    pointer: Pointer,
    /// The bytes to set; the default is standard input, read to its end first, unless --file is set
    #[arg(long, value_name = "TEXT")]
    set: Option<String>,
    /// Read the bytes from a file
    #[arg(long, value_name = "PATH", conflicts_with = "set")]
    file: Option<PathBuf>,
    /// Bytes to skip from the pointer
    #[arg(long, value_name = "SIZE", default_value = "0")]
    offset: ByteSize,
    /// The requested lease time; the default is the server's. The lease is renewed while it is held
    #[arg(long, value_name = "TIME")]
    lease: Option<Deadline>,
    /// Keep the lease for this time before the COMMIT, to see its effect on other clients
    #[arg(long, value_name = "TIME")]
    hold: Option<Deadline>,
    /// Fail at once if another client has a lease
    #[arg(long)]
    no_wait: bool,
    /// Lease the pages of the bytes to set, and release them without a COMMIT
    #[arg(long)]
    abort: bool,
    #[command(flatten)]
    member: Member,
}

/// How often an interruption is checked.
const LOOK: Duration = Duration::from_millis(50);

/// How long after the end of a lease it counts as lost.
const LATE: Duration = Duration::from_secs(1);

/// Waits for a time, or until the lease has ended; false if it was interrupted.
fn held(time: Duration, cancel: &Cancel, has_ended: impl Fn() -> bool) -> bool {
    let until = Instant::now() + time;
    let mut ended_at = None;
    while !cancel.is_cancelled() {
        let now = Instant::now();
        // On a busy machine it may be renewed late.
        ended_at = has_ended().then(|| ended_at.unwrap_or(now));
        let is_over = ended_at.is_some_and(|at| now.duration_since(at) >= LATE);
        let left = until.saturating_duration_since(now);
        if left.is_zero() || is_over {
            return true;
        }
        thread::sleep(left.min(LOOK));
    }
    false
}

pub(in crate::command) fn run(asked: Update, global: Global) -> anyhow::Result<Exit> {
    let start = at(asked.pointer, asked.offset.0)?;
    let data = read_all(Source::of(asked.set, asked.file))?;
    let mut session = asked.member.join_as_owner(None)?;
    let mut buffer = vec![0; data.len()];
    let hold = asked.hold.map(|hold| hold.0);
    let options = UpdateOptions {
        lease: asked.lease.map(|lease| lease.0),
        renew_limit: hold.unwrap_or_default() + Duration::from_secs(30),
        wait: !asked.no_wait,
        ..UpdateOptions::default()
    };
    let is_serving = session.client.service_state() == ServiceState::Serving;
    let mut update = session.client.update_with(start, &mut buffer, options)?;
    let epoch = update.epoch();
    let (bytes, are) = output::counted_are(data.len() as u64, "byte");
    if let Some(hold) = hold {
        // From now on an interruption ends the lease first.
        let cancel = interrupt::watch().context("cannot watch for signals")?;
        if !global.json {
            output::text(&format!("epoch {epoch}: {bytes} at {start} {are} leased"))?;
        }
        // If the lease has ended, the server says so at once.
        if !held(hold, &cancel, || update.time_left().is_zero()) {
            // The next client need not wait until the lease ends by itself.
            update.abort()?;
            session.leave();
            return Err(RackError::Cancelled.into());
        }
    }
    let changed_count = update.iter().zip(&data).filter(|(before, after)| before != after).count();
    update.copy_from_slice(&data);
    let word = if asked.abort {
        update.abort()?;
        "unchanged; the lease has ended"
    } else {
        update.commit()?;
        "committed"
    };
    session.leave();
    if global.json {
        output::json(&json!({
            "pointer": start.to_string(),
            "bytes": data.len(),
            "changed_bytes": changed_count,
            "epoch": epoch,
            "committed": !asked.abort,
            "responds_to_redirects": is_serving,
        }))?;
    } else {
        output::text(&format!("epoch {epoch}: {bytes} at {start} {are} {word}"))?;
    }
    Ok(Exit::Ok)
}
