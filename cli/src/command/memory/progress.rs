//! Progress of a long transfer, for a person at a terminal.

use std::io::{self, IsTerminal};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Shorter transfers end before a bar could be read.
const WORTH_BYTES: u64 = 8 << 20;

/// A bar on standard error; hidden unless that is a terminal and the transfer is long.
pub(super) fn bar(length_bytes: Option<u64>) -> ProgressBar {
    let worth = length_bytes.is_none_or(|bytes| bytes >= WORTH_BYTES);
    if !worth || !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = match length_bytes {
        Some(bytes) => ProgressBar::new(bytes),
        None => ProgressBar::no_length(),
    };
    bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(10));
    let template = "{wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
