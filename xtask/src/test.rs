//! Every test, in the order in which a failure is cheapest to learn of.

use std::time::Instant;

use crate::{
    command::{Failure, Run},
    licences,
    setup::{self, Privilege},
};

/// Tests that need more than a plain process, and what that is.
const TIERS: [(&str, &str); 4] = [
    ("netns", "namespaces of one's own, as root or as an ordinary user"),
    ("root", "root: BPF programs, named namespaces"),
    ("clients", "P4Runtime clients from PyPI"),
    ("tools", "tshark"),
];

struct Options {
    tiers: Vec<&'static str>,
    fast: bool,
}

pub(crate) fn run(arguments: &[String]) -> Result<(), Failure> {
    let options = Options::parse(arguments)?;
    let start = Instant::now();
    if options.fast {
        setup::build_tools();
    } else {
        setup::all()?;
    }
    let privilege = Privilege::find();
    if options.tiers.contains(&"root") && privilege.is_none() {
        return Err(Failure::new(
            "the tier `root` needs root, or sudo without a password; to run the others: \
             cargo xtask test --without root",
        ));
    }
    step("format", Run::cargo(["fmt", "--all", "--check"]))?;
    step(
        "lints",
        Run::cargo(["clippy", "--workspace", "--all-targets", "--all-features", "--quiet"])
            .args(["--", "-D", "warnings"]),
    )?;
    println!("== licences");
    licences::check()?;
    // The rack tests run the product, so it is built first; with the same features, so that
    // nothing is built twice.
    step("product", Run::cargo(["build", "--workspace", "--all-features", "--bins"]))?;
    step(
        "tests",
        options.configure(
            Run::cargo(["test", "--workspace", "--all-features", "--no-fail-fast"]),
            &privilege,
        )?,
    )?;
    println!("== done in {} s", start.elapsed().as_secs());
    Ok(())
}

impl Options {
    fn parse(arguments: &[String]) -> Result<Self, Failure> {
        let mut options = Self { tiers: TIERS.map(|(name, _)| name).to_vec(), fast: false };
        let mut arguments = arguments.iter();
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--fast" => {
                    options.fast = true;
                    for (name, needs) in TIERS {
                        println!("left out: tier {name} (it needs {needs})");
                    }
                    options.tiers.clear();
                }
                "--without" => {
                    let name = arguments.next().map_or("", String::as_str);
                    let Some((name, needs)) = TIERS.iter().find(|(tier, _)| *tier == name) else {
                        return Err(Failure::usage(format!("no tier is called `{name}`")));
                    };
                    println!("left out: tier {name} (it needs {needs})");
                    options.tiers.retain(|tier| tier != name);
                }
                other => return Err(Failure::usage(format!("unknown option `{other}`"))),
            }
        }
        Ok(options)
    }

    /// Names the tiers to the tests, and runs them as root where a tier asks for it.
    fn configure(&self, run: Run, privilege: &Option<Privilege>) -> Result<Run, Failure> {
        let tiers = ["unit"].iter().chain(&self.tiers).copied().collect::<Vec<_>>().join(",");
        let mut run = run.env("BLUEBRIDGE_TEST_TIERS", tiers);
        if self.fast {
            run = run.env("BLUEBRIDGE_SIM_SEEDS", "50");
        }
        if self.tiers.contains(&"root") && matches!(privilege, Some(Privilege::Sudo)) {
            run = run.env(&runner_variable()?, "sudo -n -E");
        }
        Ok(run)
    }
}

/// The variable by which cargo learns how to run what it built for this machine.
fn runner_variable() -> Result<String, Failure> {
    let version = Run::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    runner_of(&version.arg("-vV").output()?)
        .ok_or_else(|| Failure::new("`rustc -vV` names no host".to_owned()))
}

fn runner_of(version: &str) -> Option<String> {
    let host = version.lines().find_map(|line| line.strip_prefix("host: "))?.trim();
    Some(format!("CARGO_TARGET_{}_RUNNER", host.to_uppercase().replace(['-', '.'], "_")))
}

fn step(name: &str, run: Run) -> Result<(), Failure> {
    println!("== {name}");
    let start = Instant::now();
    run.go()?;
    println!("== {name}: {} s", start.elapsed().as_secs());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_runner_is_that_of_the_host() {
        let version = "rustc 1.95.0\nhost: aarch64-unknown-linux-gnu\nrelease: 1.95.0\n";
        let expected = "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER";
        assert_eq!(runner_of(version).as_deref(), Some(expected));
        assert_eq!(runner_of("rustc 1.95.0"), None);
    }

    #[test]
    fn fast_leaves_every_tier_out() {
        let Ok(options) = Options::parse(&["--fast".to_owned()]) else { panic!("it is known") };
        assert!(options.fast && options.tiers.is_empty());
    }
}
