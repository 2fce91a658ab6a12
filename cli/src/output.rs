//! Results on standard output: a table or sentences for people, JSON for programs.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use anyhow::Context;
use comfy_table::{ColumnConstraint, ContentArrangement, Table, Width, presets};
use serde::Serialize;
use serde_json::json;

use crate::exit::Exit;

/// Prints an error on standard error; if that fails, only the exit code remains.
pub(crate) fn complain(words: &str) {
    let _ = writeln!(io::stderr().lock(), "bluebridge: {words}");
}

/// Prints how a command failed on standard error: for programs `{"error":{"kind":..,"code":..,"message":..}}` in one
/// line, otherwise text for people.
pub(crate) fn failure(words: &str, exit: Exit, json: bool) {
    if json {
        let error = json!({ "kind": exit, "code": exit as u8, "message": words });
        let _ = writeln!(io::stderr().lock(), "{}", json!({ "error": error }));
    } else {
        complain(words);
    }
}

/// A number with its noun, as in "1 byte" and "2 bytes".
pub(crate) fn counted(count: u64, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// A number with its noun, and the verb for it.
pub(crate) fn counted_are(count: u64, noun: &str) -> (String, &'static str) {
    (counted(count, noun), if count == 1 { "is" } else { "are" })
}

/// Prints one JSON document.
pub(crate) fn json(value: &impl Serialize) -> anyhow::Result<()> {
    text(&serde_json::to_string_pretty(value)?)
}

/// Prints lines; a reader that closed the output is no error.
pub(crate) fn text(text: &str) -> anyhow::Result<()> {
    match writeln!(io::stdout().lock(), "{text}") {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(not_written(error)),
        _ => Ok(()),
    }
}

/// Prints text that must not be lost, such as the only copy of a pointer: here a reader that closed the output is
/// an error.
pub(crate) fn delivered(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(not_written)
}

/// The error of a result that could not be printed.
pub(crate) fn not_written(error: io::Error) -> anyhow::Error {
    let words = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "cannot write the result to standard output; free space there, or write it elsewhere"
        }
        _ => "cannot write the result to standard output; write it elsewhere",
    };
    anyhow::Error::new(error).context(words)
}

/// A table without borders; the first line has the column names. At a terminal, columns that do not fit are
/// printed in more tables, and long texts continue in their cells; elsewhere each row is one line, for
/// programs that read lines.
pub(crate) fn table(columns: &[&str], rows: Vec<Vec<String>>) -> anyhow::Result<()> {
    let width = console::Term::stdout().size_checked().map(|(_, columns)| columns);
    text(&laid_out(columns, &rows, width.filter(|width| *width > 0)))
}

/// Writes a file of rows of numbers and words without quotes.
pub(crate) fn csv(path: &Path, columns: &[&str], rows: &[Vec<String>]) -> anyhow::Result<()> {
    let rows = rows.iter().map(|row| row.join(","));
    let lines: Vec<String> = std::iter::once(columns.join(",")).chain(rows).collect();
    let text = lines.join("\n") + "\n";
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// The spaces around a column.
const PADDING: usize = 2;

/// The largest width of a cell before its text is wrapped, if a table does not fit.
const WIDE_CELL: usize = 24;

fn laid_out(columns: &[&str], rows: &[Vec<String>], width: Option<u16>) -> String {
    let Some(width) = width else { return arranged(columns, rows, None) };
    let cells = |at: usize| {
        let below = rows.iter().filter_map(move |row| row.get(at)).map(String::as_str);
        columns.get(at).copied().into_iter().chain(below)
    };
    let longest = |at: usize| cells(at).map(|cell| cell.chars().count()).max().unwrap_or(0);
    let needed: usize = (0..columns.len()).map(|at| longest(at) + PADDING).sum();
    if needed <= usize::from(width) {
        return arranged(columns, rows, None);
    }
    // Numbers and names are never split: the longest word of a column is its smallest width.
    let words = |at| cells(at).flat_map(str::split_whitespace);
    let longest_word = |at| words(at).map(|word| word.chars().count()).max().unwrap_or(0);
    let least: Vec<usize> =
        (0..columns.len()).map(|at| longest_word(at).max(longest(at).min(WIDE_CELL))).collect();
    let parts = parts(&least, usize::from(width));
    let pick = |part: &[usize], from: &[String]| -> Vec<String> {
        part.iter().filter_map(|at| from.get(*at)).cloned().collect()
    };
    let tables = parts.iter().map(|part| {
        let names: Vec<&str> = part.iter().filter_map(|at| columns.get(*at)).copied().collect();
        let rows: Vec<_> = rows.iter().map(|row| pick(part, row)).collect();
        let least: Vec<usize> = part.iter().map(|at| longest_word(*at)).collect();
        arranged(&names, &rows, Some((width, &least)))
    });
    tables.collect::<Vec<_>>().join("\n")
}

/// Distributes the columns over tables: as many as fit, and the first one in each, because it identifies the row.
fn parts(least: &[usize], width: usize) -> Vec<Vec<usize>> {
    let Some(first) = least.first() else { return Vec::new() };
    let (mut parts, mut part, mut used) = (Vec::new(), vec![0], first + PADDING);
    for (at, least) in least.iter().enumerate().skip(1) {
        if used + least + PADDING > width && part.len() > 1 {
            parts.push(std::mem::replace(&mut part, vec![0]));
            used = first + PADDING;
        }
        part.push(at);
        used += least + PADDING;
    }
    parts.push(part);
    parts
}

/// One table; not wider than `width`, if there is one and the words allow it.
fn arranged(columns: &[&str], rows: &[Vec<String>], fit: Option<(u16, &[usize])>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(columns).add_rows(rows.iter().cloned());
    if let Some((width, least)) = fit {
        table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
        for (column, least) in table.column_iter_mut().zip(least) {
            let least = u16::try_from(least + PADDING).unwrap_or(u16::MAX);
            column.set_constraint(ColumnConstraint::LowerBoundary(Width::Fixed(least)));
        }
    }
    table.trim_fmt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::rack::MEMBER_COLUMNS;

    fn members() -> Vec<Vec<String>> {
        let rows = [
            "s1 1 fdbb:1:1::/48 memory live 1 p1 1 8759 16381 16384 16",
            "c1 65534 fdbb:1:fffe::/48 client gone 1 p4 3 0",
        ];
        let cells = |row: &str| row.split(' ').map(str::to_owned).collect();
        rows.into_iter().map(cells).collect()
    }

    fn words(text: &str) -> Vec<&str> {
        let mut words: Vec<_> = text.split_whitespace().collect();
        words.sort_unstable();
        words
    }

    #[test]
    fn a_table_that_fits_its_terminal_has_a_line_for_each_row() {
        let wide = laid_out(&MEMBER_COLUMNS, &members(), None);
        assert_eq!(wide.lines().count(), 3, "{wide}");
        assert_eq!(laid_out(&MEMBER_COLUMNS, &members(), Some(200)), wide);
    }

    /// A number that is split over two lines would be read as two numbers.
    #[test]
    fn a_table_that_is_wider_than_its_terminal_breaks_between_columns_and_words() {
        let wide = laid_out(&MEMBER_COLUMNS, &members(), None);
        for width in [60, 72, 80, 100] {
            let fitting = laid_out(&MEMBER_COLUMNS, &members(), Some(width));
            assert!(fitting.lines().all(|line| line.len() <= usize::from(width)), "{fitting}");
            let mut expected = words(&wide);
            // Each further table repeats the first column.
            let tables = fitting.lines().filter(|line| line.starts_with(" member")).count();
            for _ in 1..tables {
                expected.extend(["member", "s1", "c1"]);
            }
            expected.sort_unstable();
            assert_eq!(words(&fitting), expected, "{fitting}");
            assert_eq!(fitting.lines().count(), 3 * tables, "{fitting}");
        }
    }

    #[test]
    fn long_cells_continue_at_their_words() {
        let columns = ["table", "match", "action", "packets"];
        let action = "one of s1 (weight 16), s2 (weight 16), s3 (weight 16), s4 (weight 16)";
        let row = ["anycast", "fdbb:1::/48 (CREATE anywhere)", action, "1234567"];
        let rows = [row.map(str::to_owned).to_vec()];
        let fitting = laid_out(&columns, &rows, Some(80));
        assert!(fitting.lines().all(|line| line.len() <= 80), "{fitting}");
        let wide = laid_out(&columns, &rows, None);
        assert_eq!(words(&fitting), words(&wide), "{fitting}");
        assert_eq!(fitting.lines().filter(|line| line.starts_with(" table")).count(), 1);
        // A word that is longer than the line cannot be wrapped.
        let narrow = laid_out(&columns, &rows, Some(10));
        assert!(narrow.contains("1234567"), "{narrow}");
    }
}
