//! The examples of the client library and of the pager, run in a rack as the README says.

use std::process::{Command, Stdio};

use bluebridge_testkit::{Scratch, example, own, program, require_root};

/// A rack of the command line, taken down when dropped.
struct Rack {
    scratch: Scratch,
    name: String,
}

impl Rack {
    fn call(&self, arguments: &[&str]) -> (bool, String) {
        let mut command = Command::new(program());
        command.args(arguments).env("BLUEBRIDGE_STATE", self.scratch.path().join("state"));
        let output = command.stdin(Stdio::null()).output().expect("it starts");
        let said = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8_lossy(&said).into_owned())
    }
}

impl Drop for Rack {
    fn drop(&mut self) {
        let (is_down, said) = self.call(&["rack", "down", "--name", &self.name]);
        assert!(is_down || std::thread::panicking(), "{said}");
    }
}

#[test]
fn the_examples_run_in_a_rack() {
    require_root();
    let rack = Rack { scratch: Scratch::new("examples"), name: own("examples") };
    let name = rack.name.clone();
    let up = ["rack", "up", "--name", &name, "--servers", "2", "--clients", "1", "--memory", "16M"];
    let (is_up, said) = rack.call(&up);
    assert!(is_up, "{said}");
    for (built, words) in [
        ("hello", "holds \"hello, far away\""),
        ("counter", "added 1000 times 1 at fdbb:"),
        ("update", "holds 850 and 150"),
        ("larger", "2097152 numbers are sorted: true"),
    ] {
        let path = example(built);
        let path = path.to_str().expect("text");
        let (is_done, said) = rack.call(&["rack", "exec", "--name", &name, "c1", "--", path]);
        assert!(is_done && said.contains(words), "{built}: {said}");
    }
    let (_, left) = rack.call(&["list", "--rack", &name, "--json"]);
    assert_eq!(left.split_whitespace().collect::<String>(), "[]", "they free what they allocate");
}

/// A program that copies them needs `bluebridge` as its only dependency.
#[test]
fn the_examples_need_one_dependency() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../client-lib/");
    for file in [
        "examples/hello.rs",
        "examples/counter.rs",
        "examples/update.rs",
        "README.md",
        "../README.md",
    ] {
        let text = std::fs::read_to_string(format!("{folder}{file}")).expect("it is there");
        let uses = text.lines().map(|line| line.trim_start_matches("# ").trim());
        for line in uses.filter(|line| line.starts_with("use ")) {
            let names = ["use bluebridge::", "use std::", "use core::"];
            assert!(names.iter().any(|name| line.starts_with(name)), "{file}: {line}");
        }
        assert!(!text.contains("bluebridge_"), "{file} names another crate");
    }
}
