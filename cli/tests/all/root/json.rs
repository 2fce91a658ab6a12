//! Compares the documentation's JSON examples with the present output: names and types of all fields.

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};

use bluebridge_testkit::{Scratch, require_root, until};
use serde_json::Value;

use super::disk::Serving;
use super::test_rack::TestRack;

const BOOK: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/json.md");

/// The documents of a text, one after the other.
fn documents(text: &str, of: &str) -> Vec<Value> {
    let documents: Result<_, _> = serde_json::Deserializer::from_str(text).into_iter().collect();
    documents.unwrap_or_else(|error| panic!("{of}: {error}: {text}"))
}

/// The section whose commands build a rack themselves.
const OWN_RACK: &str = "\n## Commands with a rack of their own\n";

/// The commands of a part of the chapter without `--json`, and their documented output.
type Examples = Vec<(Vec<String>, Vec<Value>)>;

/// The examples that need a rack, and those of [`OWN_RACK`].
fn examples() -> (Examples, Examples) {
    let book = std::fs::read_to_string(BOOK).expect("the chapter is there");
    let (in_a_rack, own_rack) = book.split_once(OWN_RACK).expect("it is the last section");
    (examples_in(in_a_rack), examples_in(own_rack))
}

fn examples_in(text: &str) -> Examples {
    let sections = text.split("\n### `bluebridge ").skip(1);
    let examples = sections.map(|section| {
        let (command, rest) = section.split_once(" --json`\n").expect("a command with --json");
        let (_, rest) = rest.split_once("```json\n").expect("an example");
        let (text, _) = rest.split_once("\n```").expect("the end of the example");
        (command.split(' ').map(str::to_owned).collect(), documents(text, command))
    });
    examples.collect()
}

/// Compares the names and types of a document with the example. A null matches anything, because an example shows
/// one of two forms. An element of a list must match one of the example's elements.
fn differs(real: &Value, example: &Value, at: &str) -> Option<String> {
    match (real, example) {
        (Value::Null, _) | (_, Value::Null) => None,
        (Value::Bool(_), Value::Bool(_)) | (Value::String(_), Value::String(_)) => None,
        (Value::Number(real), Value::Number(example)) if real.is_f64() == example.is_f64() => None,
        (Value::Array(real), Value::Array(examples)) => real.iter().find_map(|real| {
            let mut differences = examples.iter().map(|example| differs(real, example, at));
            let fits = differences.any(|difference| difference.is_none());
            (!fits).then(|| format!("{at}: {real} is like none of the examples"))
        }),
        (Value::Object(real), Value::Object(example)) => {
            if !real.keys().eq(example.keys()) || real.get("kind") != example.get("kind") {
                return Some(format!("{at}: {real:?} has other fields than {example:?}"));
            }
            real.iter()
                .find_map(|(name, real)| differs(real, example.get(name)?, &format!("{at}.{name}")))
        }
        _ => Some(format!("{at}: {real} is no such thing as {example}")),
    }
}

fn assert_documented(shown: &str, text: &str, example: &[Value]) -> Vec<Value> {
    let real = documents(text, shown);
    assert_eq!(real.len(), example.len(), "{shown}: {text}");
    for (real, example) in real.iter().zip(example) {
        assert_eq!(differs(real, example, shown), None, "docs/json.md");
    }
    real
}

/// What a new disk prints when it is served, or deleted afterwards.
fn served_or_deleted(rack: &TestRack, is_deleted: bool) -> String {
    let disk = Serving::start(rack, &["--size", "16M"]);
    let (document, pointer) = (disk.document.to_string(), disk.pointer().to_owned());
    disk.stop();
    let deleted = rack.text(&["disk", "delete", &pointer, "--json"]);
    if is_deleted { deleted } else { document }
}

#[test]
fn commands_print_the_documented_json() {
    let rack = TestRack::up("cmd-json", &["--memory", "16M"]);
    let mut pointer = String::new();
    let (examples, _) = examples();
    assert!(examples.len() >= 20, "only {} examples", examples.len());
    for (command, example) in examples {
        let arguments: Vec<&str> = command
            .iter()
            .map(|word| if word == "POINTER" { pointer.as_str() } else { word })
            .collect();
        let shown = command.join(" ");
        let json = [&arguments[..], &["--json"]].concat();
        let text = match arguments[0] {
            "controller" if arguments[1] == "watch" => watched(&rack, &json),
            "host" => {
                let exec = ["rack", "exec", "c2", "--", env!("CARGO_BIN_EXE_bluebridge")];
                rack.text(&[&exec[..], &json].concat())
            }
            "disk" => served_or_deleted(&rack, arguments[1] == "delete"),
            "notices" => noticed(&rack, &json),
            "workload" => written_in_scratch(&rack, &json),
            _ => rack.text(&json),
        };
        let real = assert_documented(&shown, &text, &example);
        match arguments[0] {
            "create" => pointer = real[0][0]["pointer"].as_str().expect("text").to_owned(),
            "workload" if arguments[1] == "moving" => {
                pointer = real[0]["pointers"][0].as_str().expect("text").to_owned();
            }
            "switch" if arguments[1] == "impair" => {
                rack.text(&["switch", "impair", "--node", "s1"]);
            }
            _ => {}
        }
    }
}

#[test]
fn commands_with_a_rack_of_their_own_print_the_documented_json() {
    require_root();
    let scratch = Scratch::new("cmd-json-own");
    let (_, examples) = examples();
    assert!(examples.len() >= 4, "only {} examples", examples.len());
    for (arguments, example) in examples {
        let shown = arguments.join(" ");
        let mut command = Command::new(env!("CARGO_BIN_EXE_bluebridge"));
        command.args(&arguments).arg("--json").stdin(Stdio::null());
        command.env("BLUEBRIDGE_STATE", scratch.path().join("state"));
        let output = command.current_dir(scratch.path()).output().expect("runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{shown}: {said}");
        assert_documented(&shown, &String::from_utf8_lossy(&output.stdout), &example);
    }
}

/// The output of a command whose files belong in the test's directory.
fn written_in_scratch(rack: &TestRack, arguments: &[&str]) -> String {
    let output = rack.command(arguments).current_dir(rack.scratch.path()).output().expect("runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {said}");
    String::from_utf8(output.stdout).expect("text")
}

/// The output of a watch that begins before a client joins.
fn watched(rack: &TestRack, arguments: &[&str]) -> String {
    let mut watch = rack.command(arguments).stdout(Stdio::piped()).spawn().expect("starts");
    let mut output = BufReader::new(watch.stdout.take().expect("piped"));
    let mut text = String::new();
    output.read_line(&mut text).expect("a line");
    rack.text(&["ping", "s1"]);
    output.read_to_string(&mut text).expect("text");
    assert!(watch.wait().expect("ends").success(), "{text}");
    text
}

/// The output of a client that gets notices; memory is allocated and freed until it has enough.
fn noticed(rack: &TestRack, arguments: &[&str]) -> String {
    let mut notices = rack.command(arguments).stdout(Stdio::piped()).spawn().expect("starts");
    until("the notices arrived", || {
        let pointer = rack.text(&["create", "1"]);
        rack.text(&["delete", &pointer]);
        notices.try_wait().expect("our child").is_some()
    });
    let output = notices.wait_with_output().expect("ended");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn a_field_of_another_name_or_type_is_seen() {
    use serde_json::json;
    let example = json!([{ "kind": "a", "count": 1 }, { "kind": "b", "ports": [{ "port": 1 }] }]);
    let differs = |real: Value| differs(&real, &example, "x").is_some();
    assert!(!differs(json!([{ "kind": "b", "ports": [] }, { "kind": "a", "count": 7 }])));
    assert!(!differs(json!([{ "kind": "a", "count": null }])));
    for other in [
        json!([{ "kind": "a", "number": 1 }]),
        json!([{ "kind": "a", "count": "1" }]),
        json!([{ "kind": "a", "count": 1.5 }]),
        json!([{ "kind": "a", "count": 1, "more": 1 }]),
        json!([{ "kind": "c", "count": 1 }]),
        json!([{ "kind": "b", "ports": [{ "port": "1" }] }]),
        json!({}),
    ] {
        assert!(differs(other.clone()), "{other}");
    }
}
