//! `bluebridge rack logs`: the logs of a rack's daemons.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::Context;
use bluebridge_rack::RackError;
use bluebridge_rack::daemon::Part;
use bluebridge_rack::logs;
use bluebridge_rack::state::StateRoot;
use clap::Args;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::Named;
use crate::exit::Exit;

/// How often growing logs are checked.
const LOOK: Duration = Duration::from_millis(100);

#[derive(Debug, Args)]
pub(in crate::command) struct Logs {
    #[command(flatten)]
    named: Named,
    /// Continue with new lines, until interrupted
    #[arg(short, long)]
    follow: bool,
    /// The daemon: switch, controller, hosts, or a memory server: s1, s2, ..; the default is all of them,
    /// with their names before their lines
    part: Option<Part>,
}

pub(super) fn run(options: &Logs) -> anyhow::Result<Exit> {
    let root = StateRoot::locate();
    let state = root.read(&options.named.choose(&root)?).map_err(RackError::from)?;
    let daemon = options.part.map(Part::daemon);
    let mut logs = logs::Logs::of(&state, daemon.as_deref())?;
    match copy(&mut logs, options.follow) {
        // The reader of this output has closed it.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(Exit::Ok),
        copied => copied.map(|()| Exit::Ok).context("cannot copy the logs"),
    }
}

fn copy(logs: &mut logs::Logs, follow: bool) -> io::Result<()> {
    let mut output = io::stdout().lock();
    loop {
        let any = logs.copy_new(&mut output)?;
        if !follow {
            return logs.copy_rest(&mut output);
        }
        if !any && has_no_reader(&output)? {
            return Ok(());
        }
    }
}

/// Waits for [`LOOK`], or until the output is closed: without new lines, no write would detect that.
fn has_no_reader(output: &impl AsFd) -> io::Result<bool> {
    let timeout = Timespec::try_from(LOOK).map_err(io::Error::other)?;
    let mut polled = [PollFd::new(output, PollFlags::empty())];
    match poll(&mut polled, Some(&timeout)) {
        Ok(count) => Ok(count > 0),
        Err(Errno::INTR) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}
