//! Ctrl-C and SIGTERM as a cancellation flag, so that everything that was started is taken down.

use std::io::{self, Read};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::Duration;

use anyhow::{Context, anyhow};
use bluebridge_rack::{Cancel, Rack};

use super::shutdown;

/// How often the flag is checked.
const LOOK: Duration = Duration::from_millis(50);

/// Measures in a rack until the measurement is done or interrupted: then the rack is taken down at once, and the
/// measuring thread ends with the process. It has no cancellation flag: checking one would be measured as well.
pub(super) fn measure<T: Send + 'static>(
    rack: &Arc<Rack>,
    cancel: &Cancel,
    work: impl FnOnce(&Rack) -> anyhow::Result<T> + Send + 'static,
) -> anyhow::Result<T> {
    let (done, result) = sync_channel(1);
    let used = Arc::clone(rack);
    let run = move || {
        let measured = work(&used);
        // The last holder of the rack takes it down: that must be the caller.
        drop(used);
        let _ = done.send(measured);
    };
    let spawned = thread::Builder::new().name("measure".to_owned()).spawn(run);
    spawned.context("cannot start a thread to measure")?;
    loop {
        match result.recv_timeout(LOOK) {
            Ok(measured) => return measured,
            Err(RecvTimeoutError::Disconnected) => return Err(anyhow!("measuring panicked")),
            Err(RecvTimeoutError::Timeout) => {}
        }
        if cancel.is_cancelled() {
            rack.take_down_under_others()?;
            return Err(bluebridge_rack::RackError::Cancelled.into());
        }
    }
}

/// Takes down a rack after a measurement.
pub(super) fn take_down(rack: Arc<Rack>) -> anyhow::Result<()> {
    match Arc::try_unwrap(rack) {
        Ok(rack) => rack.take_down().map(drop)?,
        Err(shared) => shared.take_down_under_others().map(drop)?,
    }
    Ok(())
}

/// Watches from a separate thread; call it after any change of the user namespace.
pub(super) fn watch() -> io::Result<Cancel> {
    let mut caught = shutdown::caught()?;
    let cancel = Cancel::default();
    let watched = cancel.clone();
    thread::Builder::new().name("interrupt".to_owned()).spawn(move || {
        // The sender is never closed, so this can fail only if the kernel does; then better stop than run on.
        drop(caught.read_exact(&mut [0]));
        watched.cancel();
    })?;
    Ok(cancel)
}
