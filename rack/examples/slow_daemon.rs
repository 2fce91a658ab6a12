//! A daemon of a rack with slow memory servers: s1 reports progress for three seconds and is then ready; the
//! others report progress once and never again.

use std::thread;
use std::time::Duration;

use bluebridge_rack::readiness::{notify_progress, notify_ready};

fn main() -> std::io::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let is = |word: &str| arguments.iter().any(|it| it == word);
    let step = Duration::from_millis(100);
    match (is("memserver"), is("s1")) {
        (true, true) => {
            for _ in 0..30 {
                notify_progress("taking memory", 10 * step)?;
                thread::sleep(step);
            }
            notify_ready()?;
        }
        (true, false) => drop(notify_progress("looking for memory", 10 * step)?),
        (false, _) => drop(notify_ready()?),
    }
    loop {
        thread::park();
    }
}
