//! Results on standard output: a table or sentences for people, JSON for programs.

use std::io::{self, Write};

use comfy_table::{Table, presets};
use serde::Serialize;
use serde_json::json;

use crate::exit::Exit;

/// Tells on standard error what went wrong; where that cannot be written, the exit code must do.
pub(crate) fn complain(words: &str) {
    let _ = writeln!(io::stderr().lock(), "bluebridge: {words}");
}

/// Tells on standard error how a command failed: `{"error":{"kind":..,"code":..,"message":..}}` in a
/// line for programs, else words for people.
pub(crate) fn failure(words: &str, exit: Exit, json: bool) {
    if json {
        let error = json!({ "kind": exit, "code": exit as u8, "message": words });
        let _ = writeln!(io::stderr().lock(), "{}", json!({ "error": error }));
    } else {
        complain(words);
    }
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
