//! Progress of a long command on standard error: a bar at a terminal, otherwise a line for each step.

use std::io::{self, IsTerminal};
use std::sync::atomic::{AtomicUsize, Ordering};

use indicatif::{ProgressBar, ProgressStyle};

use super::Global;
use crate::output;

/// The steps of a command.
#[derive(Debug)]
pub(super) struct Steps {
    bar: Option<ProgressBar>,
    count: usize,
    begun: AtomicUsize,
    silent: bool,
}

impl Steps {
    /// With JSON output, only errors are printed on standard error.
    pub(super) fn new(count: usize, global: Global) -> Self {
        let silent = global.json;
        // No updates between the steps: they would affect the measurement.
        let bar = (!silent && io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::new(count as u64);
            match ProgressStyle::with_template("{wide_bar} {pos}/{len} {elapsed} {msg}") {
                Ok(style) => bar.with_style(style),
                Err(_) => bar,
            }
        });
        Self { bar, count, begun: AtomicUsize::new(0), silent }
    }

    /// Names the next step; the one before is done.
    pub(super) fn begin(&self, step: &str) {
        let before = self.begun.fetch_add(1, Ordering::Relaxed);
        match &self.bar {
            Some(bar) => {
                bar.set_position(before as u64);
                bar.set_message(step.to_owned());
                bar.tick();
            }
            None if self.silent => {}
            None => output::complain(&format!("{step} ({} of {})", before + 1, self.count)),
        }
    }

    /// All steps are done.
    pub(super) fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
