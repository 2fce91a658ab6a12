//! Shutdown by signals.
//!
//! Not with tokio's signals: if they are compiled in, every runtime of the process needs more open files, and
//! creating the first one panics if it cannot have them.

use std::io;
use std::os::unix::net::UnixStream;

use anyhow::Context;
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
