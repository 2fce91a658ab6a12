//! Switches that are child processes: Open vSwitch and BMv2.

use std::io;
use std::process::ExitStatus;
use std::time::Duration;

use anyhow::{Context, bail};
use bluebridge_rack::readiness;

use crate::command::shutdown;
use crate::exit::Exit;

/// How often it is checked whether the switch still runs.
const LOOK: Duration = Duration::from_millis(100);

/// Runs a switch until a signal, or until it ends. `look` returns its exit status if it ended, and `name` says where
/// to look for the reason.
pub(super) fn serve<S>(
    start: impl FnOnce() -> anyhow::Result<S>,
    look: impl Fn(&mut S) -> io::Result<Option<ExitStatus>>,
    name: &str,
) -> anyhow::Result<Exit> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    runtime.block_on(async {
        let shutdown = shutdown::signals()?;
        let mut switch = start()?;
        readiness::notify_ready().context("cannot report that the switch is ready")?;
        tokio::pin!(shutdown);
        loop {
            tokio::select! {
                () = &mut shutdown => return Ok(Exit::Ok),
                () = tokio::time::sleep(LOOK) => {}
            }
            if let Some(status) = look(&mut switch).context("cannot wait for the switch")? {
                bail!("the switch ended ({status}): {name}");
            }
        }
    })
}
