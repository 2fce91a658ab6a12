//! Results on standard output: a table or sentences for people, JSON for programs.

use std::io::{self, Write};

use comfy_table::{Table, presets};
use serde::Serialize;

/// Tells on standard error what went wrong; where that cannot be written, the exit code must do.
pub(crate) fn complain(words: &str) {
    let _ = writeln!(io::stderr().lock(), "bluebridge: {words}");
}

/// Prints one JSON document.
pub(crate) fn json(value: &impl Serialize) -> anyhow::Result<()> {
    text(&serde_json::to_string_pretty(value)?)
}

/// Prints lines; a reader that went away is no failure.
pub(crate) fn text(text: &str) -> anyhow::Result<()> {
    match writeln!(io::stdout().lock(), "{text}") {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// A table without frames, its columns named in the first line.
pub(crate) fn table(columns: &[&str], rows: Vec<Vec<String>>) -> anyhow::Result<()> {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(columns).add_rows(rows);
    text(&table.trim_fmt())
}
