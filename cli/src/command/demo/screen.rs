//! The demo's text output: for a person at a terminal or in a log; nothing if a program reads the result.

use crate::command::switch_control::{TABLE_COLUMNS, TABLE_KEYS};
use crate::output;

/// The longest line if the terminal permits it, and elsewhere: a log is also read by people, and programs use
/// `--json`.
const WIDTH_MAX: u16 = 100;
const WIDTH_ELSEWHERE: u16 = 80;

fn width() -> u16 {
    output::terminal_width().map_or(WIDTH_ELSEWHERE, |width| width.min(WIDTH_MAX))
}

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
        if self.quiet { Ok(()) } else { output::text(&output::wrapped(text, width().into())) }
    }

    pub(super) fn table(&self, columns: &[&str], rows: Vec<Vec<String>>) -> anyhow::Result<()> {
        if self.quiet {
            return Ok(());
        }
        // A table of entries needs two columns to identify a row.
        let keys = if columns == TABLE_COLUMNS { TABLE_KEYS } else { 1 };
        output::text(&output::laid_out(keys, columns, &rows, Some(width())))
    }
}
