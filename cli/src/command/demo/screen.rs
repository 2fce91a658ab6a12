//! The demo's text output: for a person at a terminal or in a log; nothing if a program reads the result.

use crate::output;

/// The destination of the demo's text.
#[derive(Debug)]
pub(super) struct Screen {
    quiet: bool,
    step: u32,
}

impl Screen {
    pub(super) fn new(quiet: bool) -> Self {
        Self { quiet, step: 0 }
    }

    pub(super) fn title(&self, text: &str) -> anyhow::Result<()> {
        self.say(&format!("{text}\n{}", "=".repeat(text.len())))
    }

    /// Starts the next step.
    pub(super) fn step(&mut self, text: &str) -> anyhow::Result<()> {
        self.step += 1;
        self.say(&format!("\n{}. {text}", self.step))
    }

    pub(super) fn say(&self, text: &str) -> anyhow::Result<()> {
        if self.quiet { Ok(()) } else { output::text(text) }
    }

    pub(super) fn table(&self, columns: &[&str], rows: Vec<Vec<String>>) -> anyhow::Result<()> {
        if self.quiet { Ok(()) } else { output::table(columns, rows) }
    }
}
