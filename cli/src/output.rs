//! Results on standard output: a table or sentences for people, JSON for programs.

use std::io::{self, Write};

use comfy_table::{ContentArrangement, Table, presets};
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

/// A table without frames, its columns named in the first line. At a terminal, rows that are wider than it
/// continue in their cells; elsewhere each is one line, for programs that read lines.
pub(crate) fn table(columns: &[&str], rows: Vec<Vec<String>>) -> anyhow::Result<()> {
    let width = console::Term::stdout().size_checked().map(|(_, columns)| columns);
    text(&laid_out(columns, rows, width.filter(|width| *width > 0)))
}

fn laid_out(columns: &[&str], rows: Vec<Vec<String>>, width: Option<u16>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(columns).add_rows(rows);
    if let Some(width) = width {
        table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
    }
    table.trim_fmt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_fits_its_terminal_and_loses_nothing() {
        let columns = ["member", "id", "prefix", "role", "state", "space", "port", "incarnation"];
        let columns = [&columns[..], &["generation", "free pages", "of", "weight"]].concat();
        let row = [
            "s1",
            "1",
            "fdbb:1:1::/48",
            "memory",
            "live",
            "1",
            "p1",
            "1",
            "0",
            "16381",
            "16384",
            "16",
        ];
        let rows = || vec![row.map(str::to_owned).to_vec()];
        let wide = laid_out(&columns, rows(), None);
        assert_eq!(wide.lines().count(), 2, "{wide}");
        let fitting = laid_out(&columns, rows(), Some(80));
        assert!(fitting.lines().all(|line| line.len() <= 80), "{fitting}");
        assert!(fitting.lines().count() > 2, "{fitting}");
        let letters = |text: &str| {
            let mut letters: Vec<char> = text.chars().filter(|it| !it.is_whitespace()).collect();
            letters.sort_unstable();
            letters
        };
        assert_eq!(letters(&fitting), letters(&wide));
        let roomy = laid_out(&columns, rows(), Some(200));
        assert_eq!(roomy, wide);
    }
}
