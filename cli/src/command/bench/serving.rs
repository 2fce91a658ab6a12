//! The thread at the server's end, which serves the contestants in turn.

use std::sync::atomic::AtomicBool;
use std::thread;

use anyhow::{Context, anyhow};
use bluebridge_bench::pin;
use bluebridge_bench::turns::Turns;
use bluebridge_rack::Rack;

use super::{CLIENT, SERVER_CORE};

/// Measures in the client's namespace, while a thread on the server's core serves: it gets the turn, and a flag that says
/// when the turn is over.
pub(super) fn beside<T: Send>(
    rack: &Rack,
    turns: &Turns,
    mut serve: impl FnMut(usize, &AtomicBool) -> std::io::Result<()> + Send,
    measure: impl FnOnce() -> anyhow::Result<T> + Send,
) -> anyhow::Result<T> {
    thread::scope(|scope| {
        let serving = scope.spawn(move || -> std::io::Result<()> {
            pin(SERVER_CORE)?;
            let mut outcome = Ok(());
            turns.serve(|turn, stop| {
                let served = serve(turn, stop);
                outcome = std::mem::replace(&mut outcome, Ok(())).and(served);
            });
            outcome
        });
        let measured = rack.enter(CLIENT, measure);
        turns.end();
        let served = serving.join().map_err(|_| anyhow!("the serving thread panicked"))?;
        let measured = measured??;
        served.context("the server of the comparison failed")?;
        Ok(measured)
    })
}
