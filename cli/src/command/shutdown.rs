//! Shutdown by signals, for programs that serve in the foreground.

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};

/// Resolves at Ctrl-C or SIGTERM; the signals are caught from now on.
pub(super) fn signals() -> anyhow::Result<impl Future<Output = ()> + Send> {
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot catch Ctrl-C")?;
    let mut terminate = signal(SignalKind::terminate()).context("cannot catch SIGTERM")?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}
