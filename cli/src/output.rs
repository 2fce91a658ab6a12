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

/// Prints sentences for people. At a terminal, a line that does not fit continues below its beginning; elsewhere it
/// stays one line.
pub(crate) fn prose(words: &str) -> anyhow::Result<()> {
    match terminal_width() {
        Some(width) => text(&wrapped(words, width.into())),
        None => text(words),
    }
}

/// The columns of the terminal to which standard output leads.
pub(crate) fn terminal_width() -> Option<u16> {
    let width = console::Term::stdout().size_checked().map(|(_, columns)| columns);
    width.filter(|width| *width > 0)
}

/// Text of which each line is at most `width` characters long, unless a word is longer. What follows a break is
/// indented like its line.
pub(crate) fn wrapped(text: &str, width: usize) -> String {
    let mut lines = Vec::new();
    for line in text.split('\n') {
        let indent = line.len() - line.trim_start_matches(' ').len();
        let mut rest = line.to_owned();
        while let Some(at) = break_of(&rest, indent, width) {
            let following = format!("{:indent$}{}", "", rest[at..].trim_start());
            rest.truncate(at);
            lines.push(std::mem::replace(&mut rest, following));
        }
        lines.push(rest);
    }
    lines.join("\n")
}

/// Where a line that is too long is broken: the last space that fits, otherwise the first one.
fn break_of(line: &str, indent: usize, width: usize) -> Option<usize> {
    if line.chars().count() <= width {
        return None;
    }
    let spaces = || line.match_indices(' ').map(|(at, _)| at).filter(|at| *at > indent);
    let fits = |at: &usize| line[..*at].chars().count() <= width;
    spaces().rfind(fits).or_else(|| spaces().next())
}

/// A table without borders; the first line has the column names. At a terminal, long texts continue in their cells,
/// and columns that do not fit are printed in more tables; elsewhere each row is one line, for programs that read
/// lines.
pub(crate) fn table(columns: &[&str], rows: Vec<Vec<String>>) -> anyhow::Result<()> {
    table_by(1, columns, rows)
}

/// A table of which the first `keys` columns together identify a row: each further table repeats them.
pub(crate) fn table_by(
    keys: usize,
    columns: &[&str],
    rows: Vec<Vec<String>>,
) -> anyhow::Result<()> {
    text(&laid_out(keys, columns, &rows, terminal_width()))
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

/// The longest cell that is never broken, such as "63.98 MiB".
const SHORT_CELL: usize = 12;

/// The largest width of a cell before its text is wrapped, if a table does not fit.
const WIDE_CELL: usize = 24;

/// The text of a table, for a terminal of a width.
pub(crate) fn laid_out(
    keys: usize,
    columns: &[&str],
    rows: &[Vec<String>],
    width: Option<u16>,
) -> String {
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
    // Numbers, their units and names are never split: the longest word of a column is its smallest width.
    let unsplit = |cell: &str| match cell.chars().count() {
        length @ ..=SHORT_CELL => length,
        _ => cell.split_whitespace().map(|word| word.chars().count()).max().unwrap_or(0),
    };
    let least: Vec<usize> =
        (0..columns.len()).map(|at| cells(at).map(unsplit).max().unwrap_or(0)).collect();
    // A row stays together if only spaces of its cells must be broken.
    let narrowest: usize = least.iter().map(|least| least + PADDING).sum();
    let parts = if narrowest <= usize::from(width) {
        vec![(0..columns.len()).collect()]
    } else {
        let wide: Vec<usize> = least
            .iter()
            .enumerate()
            .map(|(at, least)| (*least).max(longest(at).min(WIDE_CELL)))
            .collect();
        parts(keys, &wide, usize::from(width))
    };
    let pick = |part: &[usize], from: &[String]| -> Vec<String> {
        part.iter().filter_map(|at| from.get(*at)).cloned().collect()
    };
    let tables = parts.iter().map(|part| {
        let names: Vec<&str> = part.iter().filter_map(|at| columns.get(*at)).copied().collect();
        let rows: Vec<_> = rows.iter().map(|row| pick(part, row)).collect();
        let least: Vec<usize> = part.iter().filter_map(|at| least.get(*at)).copied().collect();
        arranged(&names, &rows, Some((width, &least)))
    });
    tables.collect::<Vec<_>>().join("\n")
}

/// Distributes the columns over tables: as many as fit, and the keys in each.
fn parts(keys: usize, least: &[usize], width: usize) -> Vec<Vec<usize>> {
    let keys: Vec<usize> = (0..keys.min(least.len())).collect();
    let of_keys: usize = least.iter().take(keys.len()).map(|least| least + PADDING).sum();
    let (mut parts, mut part, mut used) = (Vec::new(), keys.clone(), of_keys);
    for (at, least) in least.iter().enumerate().skip(keys.len()) {
        if used + least + PADDING > width && part.len() > keys.len() {
            parts.push(std::mem::replace(&mut part, keys.clone()));
            used = of_keys;
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
    use crate::command::operator::stat::COLUMNS as STAT_COLUMNS;
    use crate::command::rack::MEMBER_COLUMNS;
    use crate::command::switch_control::{PORT_COLUMNS, TABLE_COLUMNS, TABLE_KEYS};

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
        let wide = laid_out(1, &MEMBER_COLUMNS, &members(), None);
        assert_eq!(wide.lines().count(), 3, "{wide}");
        assert_eq!(laid_out(1, &MEMBER_COLUMNS, &members(), Some(200)), wide);
    }

    /// A number that is split over two lines would be read as two numbers.
    #[test]
    fn a_table_that_is_wider_than_its_terminal_breaks_between_columns_and_words() {
        let wide = laid_out(1, &MEMBER_COLUMNS, &members(), None);
        for width in [60, 72, 80, 100] {
            let fitting = laid_out(1, &MEMBER_COLUMNS, &members(), Some(width));
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
        let fitting = laid_out(1, &columns, &rows, Some(80));
        assert!(fitting.lines().all(|line| line.len() <= 80), "{fitting}");
        let wide = laid_out(1, &columns, &rows, None);
        assert_eq!(words(&fitting), words(&wide), "{fitting}");
        assert_eq!(fitting.lines().filter(|line| line.starts_with(" table")).count(), 1);
        // A word that is longer than the line cannot be wrapped.
        let narrow = laid_out(1, &columns, &rows, Some(10));
        assert!(narrow.contains("1234567"), "{narrow}");
    }

    /// The lines of a table at a terminal of 80 columns.
    fn at_80(keys: usize, columns: &[&str], rows: &[&str]) -> Vec<String> {
        let cells = |row: &&str| row.split('|').map(str::to_owned).collect();
        let rows: Vec<Vec<String>> = rows.iter().map(cells).collect();
        let text = laid_out(keys, columns, &rows, Some(80));
        let lines: Vec<_> = text.lines().map(str::to_owned).collect();
        assert!(lines.iter().all(|line| line.chars().count() <= 80), "{text}");
        lines
    }

    /// Entries of large racks, with large counters. Each line with a counter must say to which entry it belongs.
    #[test]
    fn the_widest_entries_of_a_switch_fit_80_columns() {
        let rows = [
            "ingress_guard|c126 from fdbb:ffff:fffe::/48|allow|18446744073709|18446744073709551",
            "directory|fdbb:ffff:fffe::/48|to s126 as 02:bb:ff:ff:00:7f|1234567890|1234567890123",
            "|fdbb:ffff:1::/48|to controller as 02:bb:ff:ff:00:7f|1234567890|12345678901234",
            "anycast|fdbb:ffff::/48 (CREATE anywhere)|one of s1 (weight 16), s2 (weight 16)|1234567|8",
            "redirect|fdbb:1:126:: page 0x3fff0000000ff|to c126 as 02:bb:7f:96:00:7f for 983 ms more|1|1",
        ];
        let lines = at_80(TABLE_KEYS, &TABLE_COLUMNS, &rows);
        let numbered = |number: &str| {
            let found: Vec<_> = lines.iter().filter(|line| line.contains(number)).collect();
            assert_eq!(found.len(), 1, "{lines:#?}");
            found[0].clone()
        };
        assert!(numbered("18446744073709551").contains("ingress_guard  c126 from"), "{lines:#?}");
        assert!(numbered("12345678901234 ".trim()).contains("fdbb:ffff:1::/48"), "{lines:#?}");
        // With usual counters, a row stays together.
        let usual =
            [rows[3], "directory|fdbb:1:1::/48|to s1 as 02:bb:7f:96:00:01|14373731|1206516"];
        let lines = at_80(TABLE_KEYS, &TABLE_COLUMNS, &usual);
        let headings = lines.iter().filter(|line| line.starts_with(" table")).count();
        assert_eq!(headings, 1, "{lines:#?}");
    }

    #[test]
    fn the_widest_rows_of_other_tables_fit_80_columns() {
        let long_name = "memory-server-17.rack-3.example";
        let member = format!(
            "{long_name}|65534|fdbb:ffff:fffe::/48|memory|silent|65535|p1023|4294967295|65535|4294967295|\
             4294967295|256"
        );
        let lines = at_80(1, &MEMBER_COLUMNS, &[&member]);
        assert!(
            lines
                .iter()
                .filter(|line| !line.starts_with(" member"))
                .all(|line| line.contains(long_name))
        );
        let server = format!(
            "{long_name}|65534|126|1023.99 GiB|1023.99 GiB|1023.99 GiB|1023.99 GiB|1023.99 MiB|1023.99 MiB|\
             65536|18446744073709551615"
        );
        let lines = at_80(1, &STAT_COLUMNS, &[&server]);
        assert!(lines.iter().any(|line| line.contains("1023.99 GiB")), "{lines:#?}");
        let port = "509|enp129s0f1np1|controller|9000|1234567890|1234567890123|1234567890|1234567890123|\
                    1234567890|1234567890|1234567890|1234567890|1234567890";
        at_80(1, &PORT_COLUMNS, &[port]);
        let entry = "ingress_guard|c126 from fdbb:ffff:fffe::/48|to controller as 02:bb:ff:ff:00:7f|not in sync|\
                     1234567890123";
        at_80(TABLE_KEYS, &["table", "match", "action", "state", "packets"], &[entry]);
        let link = "switch|ctl0|p127|down|9000|fd00:bb:ffff:ffff::1:127";
        at_80(1, &["node", "interface", "port", "link", "mtu", "control address"], &[link]);
        let daemon =
            "memserver-s126|4194304|stopped|/run/bluebridge/a-rack/logs/memserver-s126.log";
        at_80(1, &["daemon", "pid", "state", "log"], &[daemon]);
    }

    #[test]
    fn a_long_line_continues_with_the_same_indentation() {
        assert_eq!(wrapped("  short\n\n   x", 20), "  short\n\n   x");
        assert_eq!(wrapped("   one two three four", 12), "   one two\n   three\n   four");
        assert_eq!(wrapped("a:   b c", 6), "a:   b\nc");
        assert_eq!(
            wrapped("  fdbb:1:2:1:1ebb::3000 is freed", 8),
            "  fdbb:1:2:1:1ebb::3000\n  is\n  freed"
        );
        assert_eq!(wrapped("nothing-to-break", 4), "nothing-to-break");
    }
}
