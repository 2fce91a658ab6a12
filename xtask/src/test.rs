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
    if !options.fast {
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
        options.configure(Run::cargo(["test", "--workspace", "--all-features"]), &privilege),
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
    fn configure(&self, run: Run, privilege: &Option<Privilege>) -> Run {
        let tiers = ["unit"].iter().chain(&self.tiers).copied().collect::<Vec<_>>().join(",");
        let mut run = run.env("BLUEBRIDGE_TEST_TIERS", tiers);
        if self.fast {
            run = run.env("BLUEBRIDGE_SIM_SEEDS", "50");
        }
        if self.tiers.contains(&"root") && matches!(privilege, Some(Privilege::Sudo)) {
            run = run.env("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER", "sudo -n -E");
        }
        run
    }
}

fn step(name: &str, run: Run) -> Result<(), Failure> {
    println!("== {name}");
    let start = Instant::now();
    run.go()?;
    println!("== {name}: {} s", start.elapsed().as_secs());
    Ok(())
}
