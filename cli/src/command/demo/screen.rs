//! What the demo says: to a person at a terminal or in a log, or nothing when a program listens.

use crate::output;

/// Where the demo's words go.
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

    /// Begins the next step.
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
