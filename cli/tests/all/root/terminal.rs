//! What commands print at a terminal of 80 columns.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::process::Command;

use bluebridge_testkit::Scratch;
use rustix::fs::{Mode, OFlags, open};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

use super::test_rack::TestRack;

const COLUMNS: u16 = 80;

/// The text that a command prints at a terminal.
fn at_terminal(mut command: Command) -> String {
    let main = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal");
    grantpt(&main).and_then(|()| unlockpt(&main)).expect("it is ours");
    let name = ptsname(&main, Vec::new()).expect("it has a name");
    let side: OwnedFd =
        open(name, OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).expect("its other side");
    let size = Winsize { ws_row: 24, ws_col: COLUMNS, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(&side, size).expect("set");
    let mut child = command.stdout(side).spawn().expect("starts");
    // The command holds a copy of the other side; reading ends when the last copy is closed.
    drop(command);
    let (mut bytes, mut chunk) = (Vec::new(), [0; 4096]);
    let mut main = File::from(main);
    while let Ok(length @ 1..) = main.read(&mut chunk) {
        bytes.extend_from_slice(&chunk[..length]);
    }
    let text = String::from_utf8(bytes).expect("text").replace('\r', "");
    assert!(child.wait().expect("ends").success(), "{text}");
    text
}

fn assert_fits(shown: &str, text: &str) {
    let too_long = text.lines().find(|line| line.chars().count() > COLUMNS.into());
    assert_eq!(too_long, None, "{shown}:\n{text}");
    assert!(text.lines().count() > 1, "{shown}: {text}");
}

#[test]
fn every_command_fits_a_terminal_of_80_columns() {
    let rack =
        TestRack::up("cmd-terminal", &["--servers", "3", "--clients", "9", "--memory", "16M"]);
    for client in 1..=9 {
        rack.text(&["create", "10K", "--as", &format!("c{client}")]);
    }
    rack.text(&["switch", "impair", "--node", "s1", "--duplicate", "0.5"]);
    rack.text(&["ping", "s1", "--count", "20"]);
    for arguments in [
        &["rack", "status"][..],
        &["rack", "tables"],
        &["rack", "list"],
        &["switch", "tables"],
        &["switch", "ports"],
        &["controller", "status"],
        &["controller", "members"],
        &["controller", "tables"],
        &["stat", "--refusals"],
        &["list"],
        &["ping", "s1", "--count", "2"],
        &["workload", "crud", "--runs", "20"],
        &["purge", "--all"],
    ] {
        let text = at_terminal(rack.command(arguments));
        // The paths of logs are words, which are not broken; these are longer than those of a usual rack.
        let text = text.replace(rack.state().to_str().expect("text"), "/run/bluebridge");
        assert_fits(&arguments.join(" "), &text);
    }
}

/// A row of a table is one line for programs, whatever its length.
#[test]
fn without_a_terminal_each_entry_is_one_line() {
    let rack = TestRack::up("cmd-lines", &["--servers", "3", "--memory", "16M"]);
    let entries = rack.json(&["rack", "tables"]);
    let is_entry = |row: &&serde_json::Value| row["table"] != "drops";
    let count = entries.as_array().expect("rows").iter().filter(is_entry).count();
    // The column names, and what was dropped.
    assert_eq!(rack.text(&["rack", "tables"]).lines().count(), count + 2);
}

#[test]
fn the_demo_fits_a_terminal_of_80_columns() {
    let scratch = Scratch::new("cmd-terminal-demo");
    let mut command = Command::new(env!("CARGO_BIN_EXE_bluebridge"));
    command.arg("demo").env("BLUEBRIDGE_STATE", scratch.path().join("state"));
    bluebridge_testkit::require_root();
    assert_fits("demo", &at_terminal(command));
}
