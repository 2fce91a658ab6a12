//! Shutdown by signals, for programs that serve in the foreground.

use std::thread;

use anyhow::{Context, anyhow};
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

/// Runs work that has no end of its own, until it fails, or until Ctrl-C or SIGTERM; its thread then ends with the
/// process. Both signals are caught even if the process was started with one of them ignored, as shells start programs
/// in the background.
pub(super) fn until_signal(
    work: impl FnOnce() -> anyhow::Result<()> + Send + 'static,
) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.context("cannot watch for signals")?.block_on(async {
        let signals = signals()?;
        let (done, ended) = tokio::sync::oneshot::channel();
        let spawned = thread::Builder::new().name("watch".to_owned()).spawn(move || {
            let _ = done.send(work());
        });
        spawned.context("cannot start a thread to watch")?;
        tokio::select! {
            () = signals => Ok(()),
            result = ended => result.unwrap_or_else(|_| Err(anyhow!("watching panicked"))),
        }
    })
}
