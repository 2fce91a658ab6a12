//! Ctrl-C and SIGTERM as a wish to stop, so that what was begun is taken down.

use std::io;
use std::thread;

use bluebridge_rack::Cancel;
use tokio::signal::unix::{SignalKind, signal};

/// Watches from a thread of its own; to be called after any change of the user namespace.
pub(super) fn watch() -> io::Result<Cancel> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let guard = runtime.enter();
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    drop(guard);
    let cancel = Cancel::default();
    let watched = cancel.clone();
    thread::Builder::new().name("interrupt".to_owned()).spawn(move || {
        runtime.block_on(async {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        });
        watched.cancel();
    })?;
    Ok(cancel)
}
