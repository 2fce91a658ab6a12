//! The sessions in docs/operations.md, run as written; their output is compared with the chapter.
//!
//! Numbers, addresses and the widths of columns may differ.

use std::io::Write;
use std::process::{Command, Stdio};

use bluebridge_testkit::{Scratch, own, require_root};

const BOOK: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/operations.md");

/// The sections whose sessions belong together: the first one builds the rack that the others use.
const SECTIONS: [&str; 3] =
    ["A rack on one machine", "Memory from the command line", "Inspecting the switch"];

/// Marks omitted lines in the documentation.
const LEFT_OUT: &str = "..";

/// A command and its output.
struct Step {
    command: String,
    printed: Vec<String>,
}

/// The steps of the sessions: blocks of code whose first line is a command after a prompt.
fn steps() -> Vec<Step> {
    let book = std::fs::read_to_string(BOOK).expect("the chapter is there");
    let mut steps: Vec<Step> = Vec::new();
    for section in book.split("\n## ").filter(|it| SECTIONS.iter().any(|name| it.starts_with(name)))
    {
        let mut in_session = false;
        for line in section.lines() {
            match line.strip_prefix("    ") {
                Some(code) if code.starts_with("$ ") => {
                    in_session = true;
                    steps.push(Step { command: code[2..].to_owned(), printed: Vec::new() });
                }
                Some(code) if in_session => {
                    let step = steps.last_mut().expect("a session begins with a command");
                    step.printed.push(code.to_owned());
                }
                _ => in_session = false,
            }
        }
    }
    steps
}

/// A line without the parts that differ between runs.
fn shape(line: &str) -> String {
    const ADDRESS: [&str; 3] = ["fdbb:", "fd00:bb:", "02:bb:"];
    let word = |word: &str| {
        let mut shape = String::new();
        let mut rest = word;
        while let Some(letter) = rest.chars().next() {
            let allowed: fn(char) -> bool = if ADDRESS.iter().any(|it| rest.starts_with(it)) {
                shape.push('@');
                |it| it.is_ascii_hexdigit() || it == ':'
            } else if letter.is_ascii_digit() {
                shape.push('#');
                |it| it.is_ascii_digit() || it == '.'
            } else {
                shape.push(letter);
                rest = &rest[letter.len_utf8()..];
                continue;
            };
            rest = rest.trim_start_matches(allowed);
        }
        // The unit of a size depends on the number.
        shape.replace("KiB", "MiB")
    };
    line.split_whitespace().map(word).collect::<Vec<_>>().join(" ")
}

/// Whether lines match those of the documentation, which may omit line ends and any number of lines.
fn is_like(printed: &[String], book: &[String]) -> bool {
    match (printed.split_first(), book.split_first()) {
        (None, None) => true,
        (_, Some((line, rest))) if line.trim() == LEFT_OUT => {
            (0..=printed.len()).any(|at| is_like(&printed[at..], rest))
        }
        (Some((printed, others)), Some((line, rest))) => {
            let (printed, line) = (shape(printed), shape(line));
            let whole = line.strip_suffix(LEFT_OUT);
            let fits = whole.map_or(printed == line, |begin| printed.starts_with(begin.trim_end()));
            fits && is_like(others, rest)
        }
        _ => false,
    }
}

/// A text that the shell prints before each command; no command prints it.
const MARK: &str = "~~ the next command ~~";

/// Shell functions that wait for events, each at most for 30 s.
///
/// * `copy FILE` copies the lines of a background command to the output, and to a file so that they can be seen.
/// * `printed FILE` waits until such a command has printed something: then a reader types the next command.
/// * `settled` waits until the switch has the entries that the controller wants. A command that ended has left,
///   but the controller removes its entries after it confirmed this.
const WAITS: &str = r#"
copy() { while IFS= read -r line; do printf '%s\n' "$line"; printf '%s\n' "$line" >>"$1"; done; }
printed() { tries=0; until [ -s "$1" ] || [ $tries = 300 ]; do sleep 0.1; tries=$((tries + 1)); done; }
settled() {
  tries=0
  while [ $tries != 300 ]; do
    case "$(bluebridge controller tables 2>&1 || echo foreign)" in
      *foreign* | *'not in sync'*) sleep 0.1; tries=$((tries + 1)) ;;
      *) return ;;
    esac
  done
}
"#;

/// Commands whose output shows the switch's entries.
const SHOW_ENTRIES: [&str; 2] = ["bluebridge rack status", "bluebridge rack tables"];

#[test]
fn sessions_go_as_the_book_shows() {
    require_root();
    let (scratch, name) = (Scratch::new("cmd-book"), own("cmd-book"));
    let state = scratch.path().join("state");
    let steps = steps();
    assert!(steps.len() >= 20, "only {} commands", steps.len());
    let mut script = format!("{WAITS}trap 'bluebridge rack down >&2' EXIT\n");
    for (number, Step { command, .. }) in steps.iter().enumerate() {
        // `$?` keeps the value of the command before.
        script.push_str("r=$?\n");
        if SHOW_ENTRIES.contains(&command.as_str()) {
            script.push_str("settled\n");
        }
        script.push_str(&format!("echo '{MARK}'; (exit $r)\n"));
        script.push_str(&match command.strip_suffix('&') {
            Some(command) => {
                let file = format!("printed-{number}");
                format!("{command} 2>&1 | copy {file} &\nprinted {file}\n")
            }
            None => format!("{command}\n"),
        });
    }
    let binary = std::path::Path::new(env!("CARGO_BIN_EXE_bluebridge"));
    let path = std::env::var("PATH").expect("there are programs");
    let path = format!("{}:{path}", binary.parent().expect("a directory").display());
    let mut shell = Command::new("sh");
    // Both outputs in the order of writing, as at a terminal.
    shell.args(["-c", "exec sh -s 2>&1"]).current_dir(scratch.path()).env("PATH", path);
    shell.env("BLUEBRIDGE_STATE", &state).env("BLUEBRIDGE_RACK", &name);
    let mut shell =
        shell.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a shell starts");
    shell.stdin.take().expect("piped").write_all(script.as_bytes()).expect("fed");
    let output = shell.wait_with_output().expect("ends");
    let text = String::from_utf8_lossy(&output.stdout);
    // Like a rack without a name, in the default directory.
    let text = text.replace(state.to_str().expect("text"), "/run/bluebridge");
    let text = text.replace(&name, "rack");
    // The first part is before the first command.
    let printed: Vec<Vec<String>> = text
        .split(&format!("{MARK}\n"))
        .skip(1)
        .map(|part| part.lines().map(str::to_owned).collect())
        .collect();
    assert_eq!(printed.len(), steps.len(), "{text}");
    for (at, (step, printed)) in steps.iter().zip(&printed).enumerate() {
        // The rack is taken down after the last command.
        let printed = match at + 1 == steps.len() {
            true => printed.split_last().map_or(&printed[..], |(_, rest)| rest),
            false => printed,
        };
        let Step { command, printed: book } = step;
        assert!(
            is_like(printed, book),
            "{command}\nprinted: {printed:#?}\nthe book has: {book:#?}"
        );
    }
}

#[test]
fn lines_are_compared_without_what_differs_from_run_to_run() {
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
    let alike = |printed: &str, book: &str| is_like(&lines(printed), &lines(book));
    assert!(alike("s1 (node 2) responded in 8.1 us", "s1 (node 1)  responded in 19.0 us"));
    assert!(alike("fdbb:1:3:1:2239:: 12 KiB", "fdbb:1:1:: 63.9 MiB"));
    assert!(alike("a\nb\nc\nd", "a\n ..\nd") && alike("a\nd", "a\n..\nd"));
    assert!(alike("dropped: 3 lost, 4 foul", "dropped: 7 lost ..") && !alike("drop", "dropped .."));
    assert!(!alike("a\nb", "a") && !alike("a", "a\nb") && !alike("x\nd", "a\n..\nd"));
    assert!(!alike("state free pages", "state pages"));
    assert!(!alike("02:bb:33:c9:00:01 to s1", "fdbb:1:1:: to c1"));
}
