//! Statements of the book about the code are true.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// The crates by their folders, with the folders of the crates that each needs outside of its tests.
type Dependencies = BTreeMap<String, Vec<String>>;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn dependencies() -> Dependencies {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--no-deps", "--offline", "--manifest-path"])
        .arg(root().join("Cargo.toml"))
        .output()
        .expect("cargo built this test");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let packages = metadata["packages"].as_array().expect("a list");
    let folder = |package: &Value| {
        let manifest = Path::new(package["manifest_path"].as_str().expect("a path"));
        let folder = manifest.parent().and_then(Path::file_name).expect("it is in a folder");
        folder.to_str().expect("an ASCII name").to_owned()
    };
    let folders: BTreeMap<_, _> =
        packages.iter().map(|package| (package["name"].as_str(), folder(package))).collect();
    let needed = |package: &Value| {
        let all = package["dependencies"].as_array().expect("a list");
        let kept = all.iter().filter(|dependency| dependency["kind"].is_null());
        let mut names: Vec<_> =
            kept.filter_map(|dependency| folders.get(&dependency["name"].as_str())).collect();
        names.sort();
        names.into_iter().cloned().collect()
    };
    packages.iter().map(|package| (folder(package), needed(package))).collect()
}

/// A line for each crate, below the lines of those that it needs.
fn drawn(dependencies: &Dependencies) -> String {
    let mut lines: Vec<String> = Vec::new();
    let mut left: Vec<_> = dependencies.iter().collect();
    let mut placed: Vec<&String> = Vec::new();
    while !left.is_empty() {
        let is_next =
            |(_, needs): &(_, &Vec<String>)| needs.iter().all(|need| placed.contains(&need));
        let (next, later): (Vec<_>, Vec<_>) = left.into_iter().partition(is_next);
        assert!(!next.is_empty(), "a cycle of {later:?}");
        for (name, needs) in &next {
            lines.push(match needs[..] {
                [] => (*name).clone(),
                _ => format!("{name:<10} -> {}", needs.join(", ")),
            });
        }
        placed.extend(next.into_iter().map(|(name, _)| name));
        left = later;
    }
    lines.join("\n")
}

#[test]
fn the_dependency_graph_is_that_of_the_manifests() {
    let drawn = drawn(&dependencies());
    let book = fs::read_to_string(root().join("docs/architecture.md")).expect("readable");
    assert!(
        book.contains(&format!("```text\n{drawn}\n```\n")),
        "docs/architecture.md must show this graph:\n{drawn}"
    );
}

#[test]
fn every_folder_of_the_workspace_has_its_row_in_the_map() {
    let book = fs::read_to_string(root().join("docs/architecture.md")).expect("readable");
    for folder in dependencies().keys() {
        assert!(book.contains(&format!("| `{folder}/` |")), "docs/architecture.md lacks {folder}/");
    }
}

/// The files and folders that a text names in backquotes, such as `rack/src/lib.rs`.
fn named_paths<'a>(text: &'a str, folders: &'a Dependencies) -> impl Iterator<Item = &'a str> {
    let quoted = text.split('`').skip(1).step_by(2);
    quoted.filter(|word| {
        let is_path =
            word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"/._-".contains(&byte));
        let folder = word.split_once('/').map(|(folder, _)| folder);
        is_path && folder.is_some_and(|folder| folder == "docs" || folders.contains_key(folder))
    })
}

#[test]
fn every_file_that_the_book_names_exists() {
    let folders = dependencies();
    let chapters = fs::read_dir(root().join("docs")).expect("readable").flatten();
    let chapters = chapters.map(|chapter| chapter.path());
    let chapters = chapters.chain(["README.md", "CONTRIBUTING.md"].map(|file| root().join(file)));
    let mut count = 0;
    for chapter in chapters.filter(|path| path.extension().is_some_and(|name| name == "md")) {
        let text = fs::read_to_string(&chapter).expect("readable");
        for path in named_paths(&text, &folders) {
            count += 1;
            assert!(root().join(path).exists(), "{} names {path}", chapter.display());
        }
    }
    assert!(count > 50, "only {count} paths were found");
}
