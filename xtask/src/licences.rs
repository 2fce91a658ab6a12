//! The licences of all dependencies, checked against the list in `deny.toml`.
//!
//! `cargo deny check` reads the same file and checks more; this needs nothing installed.

use std::collections::BTreeSet;

use crate::command::{Failure, Run, root};

pub(crate) fn check() -> Result<(), Failure> {
    let allowed = allowed()?;
    let tree = Run::cargo([
        "tree",
        "--workspace",
        "--all-features",
        "--edges",
        "all",
        "--prefix",
        "none",
        "--format",
        "{l}|{p}",
    ])
    .output()?;
    let packages: BTreeSet<&str> = tree.lines().filter(|line| line.contains('|')).collect();
    let refused: Vec<_> = packages
        .iter()
        .filter_map(|line| line.split_once('|'))
        .filter(|(licence, _)| !permits(licence, &allowed))
        .map(|(licence, package)| format!("  {package}: {licence}\n"))
        .collect();
    if packages.is_empty() {
        return Err(Failure::new("`cargo tree` named no package"));
    }
    if refused.is_empty() {
        println!("licences: {} packages, all permitted", packages.len());
        return Ok(());
    }
    Err(Failure::new(format!("deny.toml does not permit:\n{}", refused.concat())))
}

/// The strings of the `allow` list of `deny.toml`.
fn allowed() -> Result<BTreeSet<String>, Failure> {
    let path = root().join("deny.toml");
    let text = std::fs::read_to_string(&path)
        .map_err(|error| Failure::new(format!("{}: {error}", path.display())))?;
    let list = text
        .split_once("allow = [")
        .and_then(|(_, rest)| rest.split_once(']'))
        .ok_or_else(|| Failure::new("deny.toml has no `allow = [...]`"))?
        .0;
    Ok(list.split('"').skip(1).step_by(2).map(str::to_owned).collect())
}

/// Whether an SPDX expression can be met: OR needs one side, AND needs both; old crates write a
/// slash for OR.
fn permits(expression: &str, allowed: &BTreeSet<String>) -> bool {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let mut words = spaced.split_whitespace().peekable();
    any_of(&mut words, allowed) && words.next().is_none()
}

type Words<'a> = std::iter::Peekable<std::str::SplitWhitespace<'a>>;

fn any_of(words: &mut Words<'_>, allowed: &BTreeSet<String>) -> bool {
    let mut met = all_of(words, allowed);
    while words.next_if_eq(&"OR").is_some() {
        met |= all_of(words, allowed);
    }
    met
}

fn all_of(words: &mut Words<'_>, allowed: &BTreeSet<String>) -> bool {
    let mut met = one(words, allowed);
    while words.next_if_eq(&"AND").is_some() {
        met &= one(words, allowed);
    }
    met
}

fn one(words: &mut Words<'_>, allowed: &BTreeSet<String>) -> bool {
    match words.next() {
        Some("(") => {
            let met = any_of(words, allowed);
            words.next_if_eq(&")").is_some() && met
        }
        Some(name) => {
            let mut name = name.to_owned();
            if words.next_if_eq(&"WITH").is_some() {
                name = format!("{name} WITH {}", words.next().unwrap_or_default());
            }
            allowed.contains(&name)
        }
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_read_as_spdx_means_them() {
        let allowed =
            ["MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception"].map(str::to_owned).into();
        for met in [
            "MIT",
            "MIT OR GPL-3.0",
            "GPL-3.0 OR MIT",
            "(MIT OR GPL-3.0) AND Apache-2.0",
            "MIT/GPL-3.0",
            "Apache-2.0 WITH LLVM-exception",
        ] {
            assert!(permits(met, &allowed), "{met}");
        }
        for unmet in
            ["", "GPL-3.0", "MIT AND GPL-3.0", "(MIT OR GPL-3.0) AND GPL-3.0", "MIT )", "(MIT"]
        {
            assert!(!permits(unmet, &allowed), "{unmet}");
        }
    }
}
