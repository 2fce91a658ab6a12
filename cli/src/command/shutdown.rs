//! Shutdown by signals.
//!
//! Not with tokio's signals: if they are compiled in, every runtime of the process needs more open files, and
//! creating the first one panics if it cannot have them.

use std::io;
use std::os::unix::net::UnixStream;
use std::thread;

use anyhow::{Context, anyhow};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::low_level::pipe;

/// A socket that receives a byte at Ctrl-C or SIGTERM; the signals are caught from now on.
pub(super) fn caught() -> io::Result<UnixStream> {
    let (receiver, sender) = UnixStream::pair()?;
    pipe::register(SIGINT, sender.try_clone()?)?;
    pipe::register(SIGTERM, sender)?;
    Ok(receiver)
}

/// Resolves at Ctrl-C or SIGTERM, for programs that serve in the foreground; the signals are caught from now on.
/// Call it inside a runtime.
pub(super) fn signals() -> anyhow::Result<impl Future<Output = ()> + Send> {
    let open = || {
        let receiver = caught()?;
        receiver.set_nonblocking(true)?;
        tokio::net::UnixStream::from_std(receiver)
    };
    let receiver = open().context("cannot catch Ctrl-C and SIGTERM")?;
    Ok(async move {
        // The sender is never closed, so this can fail only if the runtime ends.
        drop(receiver.readable().await);
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
