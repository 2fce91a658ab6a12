//! Checks the licences of all dependencies against the list in `deny.toml`.
//!
//! `cargo deny check` reads the same file and checks more; this check needs no installed program.

use std::collections::BTreeSet;
use std::fmt::Display;

use spdx::{Expression, Licensee, ParseMode};

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
        return Err(Failure::new("`cargo tree` listed no packages"));
    }
    if refused.is_empty() {
        println!("licences: {} packages, all permitted", packages.len());
        return Ok(());
    }
    Err(Failure::new(format!("deny.toml does not permit:\n{}", refused.concat())))
}

/// The `allow` list of `deny.toml`.
fn allowed() -> Result<Vec<Licensee>, Failure> {
    let path = root().join("deny.toml");
    let failed = |reason: &dyn Display| Failure::new(format!("{}: {reason}", path.display()));
    let text = std::fs::read_to_string(&path).map_err(|error| failed(&error))?;
    let list = text
        .split_once("allow = [")
        .and_then(|(_, rest)| rest.split_once(']'))
        .ok_or_else(|| failed(&"it has no list `allow = [...]`"))?
        .0;
    let licences = list.split('"').skip(1).step_by(2);
    licences.map(|one| Licensee::parse(one).map_err(|error| failed(&error))).collect()
}

/// Whether an SPDX expression is satisfied by the permitted licences; old crates use a slash for OR.
fn permits(expression: &str, allowed: &[Licensee]) -> bool {
    Expression::parse_mode(expression, ParseMode::LAX)
        .is_ok_and(|read| read.evaluate(|wanted| allowed.iter().any(|one| one.satisfies(wanted))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_read_as_spdx_means_them() {
        let allowed = ["MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception"]
            .map(|one| Licensee::parse(one).expect("known"));
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
