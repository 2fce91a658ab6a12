//! Whole memory servers: behind real carriers, and as members of a rack.

mod controller;
mod member;
mod peer;
mod serving;
mod sleeping;

use std::{
    thread,
    time::{Duration, Instant},
};

/// Waits until a condition holds that another thread fulfils.
fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < deadline, "{what} did not happen");
        thread::sleep(Duration::from_millis(1));
    }
}
