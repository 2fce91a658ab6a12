//! Runs every test; checks that fail early are first.

mod isolation;
mod options;
pub(crate) mod programs;
mod report;
mod tiers;
mod without_clang;

use std::{
    fs::{self, File, TryLockError},
    num::NonZero,
    os::unix::fs::{PermissionsExt, symlink},
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

pub(crate) use isolation::{init, isolated, sweep};
use options::Options;
use report::Report;

use crate::{
    command::{Failure, Run, root, target_directory},
    dependencies,
    setup::{self, NEXTEST, Privilege},
};

/// Time limit of the examples in the documentation, building included.
const DOCTEST_DEADLINE: Duration = Duration::from_secs(900);
/// Many tests wait more than they compute: `.config/nextest.toml` counts those as one thread, and the others as two.
const THREADS_PER_CORE: usize = 2;

pub(crate) fn run(arguments: &[String]) -> Result<(), Failure> {
    let options = Options::parse(arguments)?;
    let start = Instant::now();
    let _alone = Turn::take()?;
    setup::for_tests(|tier| options.runs(tier))?;
    let privilege = Privilege::find();
    if options.runs("root") && privilege.is_none() {
        return Err(Failure::new(
            "the tier `root` needs root, or sudo without a password; to run the others: \
             cargo xtask test --without root",
        ));
    }
    if !options.is_partial() {
        step("format", Run::cargo(["fmt", "--all", "--check"]))?;
        step(
            "lints",
            Run::cargo(["clippy", "--workspace", "--all-targets", "--all-features", "--quiet"])
                .args(["--", "-D", "warnings"]),
        )?;
        // Every other build has them, so nothing else would notice a use without its feature.
        let libraries =
            ["bluebridge", "bluebridge-controller", "bluebridge-pager", "bluebridge-preload"];
        step(
            "lints without optional features",
            Run::cargo(["clippy", "--lib", "--no-default-features", "--quiet"])
                .args(libraries.into_iter().flat_map(|library| ["--package", library]))
                .args(["--", "-D", "warnings"]),
        )?;
        timed("lints without clang", without_clang::lint)?;
        println!("== dependencies");
        dependencies::check(false)?;
    }
    if options.needs_product() {
        let build = ["build", "--all-features", "--package", "bluebridge-cli", "--bins"];
        let examples = ["--package", "bluebridge", "--package", "bluebridge-rdma", "--examples"];
        step("product", Run::cargo(build).args(examples))?;
    }
    if options.needs_test_programs() {
        let build = ["test", "--no-run", "--quiet", "--all-features"];
        let run =
            Run::cargo(build).args(["-p", "bluebridge-conformance", "-p", "bluebridge-switch"]);
        step("test programs for machines", run)?;
    }
    if options.needs_library() {
        // Where all packages are tested, with the features that they have then: otherwise all below it would be built twice.
        let of_all = ["build", "--workspace", "--all-features", "--lib", "--examples"];
        let run = match options.packages.is_empty() {
            true => Run::cargo(of_all),
            false => Run::cargo(["build", "--package", "bluebridge-preload"]),
        };
        step("library", run)?;
    }
    // Before the tests, whose report must be at the end.
    let documented = if options.is_partial() { Ok(()) } else { doctests() };
    let tested = tests(&options, privilege.as_ref());
    println!("== done in {} s", start.elapsed().as_secs());
    documented.and(tested)
}

/// Runs the tests with nextest: each in its own process, with a deadline, isolated.
fn tests(options: &Options, privilege: Option<&Privilege>) -> Result<(), Failure> {
    println!("== tests");
    let privilege = privilege.filter(|_| options.runs("root"));
    let scene = Scene::new(privilege)?;
    let profile = if options.retry { "retry" } else { "default" };
    let junit = target_directory().join("nextest").join(profile).join("junit.xml");
    // Otherwise the report of an earlier run could be mistaken for that of this one.
    let _ = fs::remove_file(&junit);
    let mut run = nextest("run", options)
        .args(["--profile", profile, "--no-fail-fast"])
        .args(["--test-threads", &threads().to_string()])
        .env("TMPDIR", &scene.directory)
        .env(isolation::RUN_VARIABLE, &scene.directory)
        .env(isolation::PATH_VARIABLE, &scene.programs)
        .env(&runner_variable()?, scene.runner(privilege));
    if privilege.is_some() {
        run = run.env(isolation::NAMESPACES_VARIABLE, "1");
    }
    if options.fast {
        run = run.env("BLUEBRIDGE_SIM_SEEDS", "50").env("PROPTEST_CASES", "32");
    }
    let filter = tiers::without(&options.left_out);
    run = match &options.expression {
        Some(expression) => run.args(["-E", &format!("({filter}) & ({expression})")]),
        None => run.args(["-E", &filter]),
    };
    let tested = run.args(&options.names).go();
    let swept = scene.sweep(privilege);
    let skipped = list_skipped(options);
    if junit.is_file() {
        Report::read(&junit)?.show();
    }
    tested.and(swept).and(skipped)
}

/// How many threads nextest distributes among the tests.
fn threads() -> usize {
    // One core if the system does not say how many there are: then the tests take longer, and nothing else changes.
    thread::available_parallelism().map_or(1, NonZero::get) * THREADS_PER_CORE
}

/// Lists the tests of the skipped tiers.
fn list_skipped(options: &Options) -> Result<(), Failure> {
    for tier in &options.left_out {
        let listed = nextest("list", options)
            .args(["--message-format", "oneline", "--cargo-quiet", "-E", &tier.filter()])
            .args(&options.names)
            .output()?;
        println!(
            "== skipped: {} tests of tier {} (needs {})",
            listed.lines().count(),
            tier.name,
            tier.needs
        );
        for test in listed.lines() {
            println!("  SKIP {test}");
        }
    }
    Ok(())
}

fn nextest(command: &str, options: &Options) -> Run {
    let mut run = NEXTEST.run().arg(command).arg("--all-features");
    if options.packages.is_empty() {
        run = run.arg("--workspace");
    }
    for package in &options.packages {
        run = run.args(["--package", package]);
    }
    run
}

fn doctests() -> Result<(), Failure> {
    println!("== examples in the documentation");
    let run = Run::cargo(["test", "--workspace", "--all-features", "--doc", "--quiet"]);
    run.go_within(DOCTEST_DEADLINE)
}

/// Only one test run at a time per checkout: the next one removes the files of the last one.
struct Turn {
    _lock: File,
}

impl Turn {
    fn take() -> Result<Self, Failure> {
        let path = target_directory().join("xtask-test.lock");
        let failed = |error| Failure::new(format!("{}: {error}", path.display()));
        fs::create_dir_all(target_directory()).map_err(failed)?;
        let file = File::create(&path).map_err(failed)?;
        match file.try_lock() {
            Ok(()) => Ok(Self { _lock: file }),
            Err(TryLockError::WouldBlock) => Err(Failure::new(
                "another `cargo xtask test` is running in this checkout; wait for it or stop it",
            )),
            Err(TryLockError::Error(error)) => Err(failed(error)),
        }
    }
}

/// The temporary directory of a run, with the programs that tests may call.
struct Scene {
    directory: PathBuf,
    programs: PathBuf,
    own: PathBuf,
}

impl Scene {
    /// Removes the files of an earlier run and creates a new directory.
    fn new(privilege: Option<&Privilege>) -> Result<Self, Failure> {
        let directory = isolation::run_directory(&root());
        let failed = |error| Failure::new(format!("{}: {error}", directory.display()));
        let scene = Self {
            programs: directory.join("programs"),
            own: directory.join("xtask"),
            directory: directory.clone(),
        };
        scene.sweep(privilege)?;
        fs::create_dir_all(&directory).map_err(failed)?;
        // Tests of ordinary users, started by root, have files in it.
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)).map_err(failed)?;
        programs::link_into(&scene.programs)?;
        // A link, because the path of a checkout may contain spaces, at which a runner's words are split.
        symlink(own_program()?, &scene.own).map_err(failed)?;
        Ok(scene)
    }

    fn sweep(&self, privilege: Option<&Privilege>) -> Result<(), Failure> {
        let own = own_program()?;
        let run = match privilege {
            Some(Privilege::Sudo) => Run::new("sudo").args(["-n", "-E"]).arg(own),
            _ => Run::new(own),
        };
        run.arg("sweep").arg(&self.directory).go()
    }

    fn runner(&self, privilege: Option<&Privilege>) -> String {
        let sudo = if matches!(privilege, Some(Privilege::Sudo)) { "sudo -n -E " } else { "" };
        format!("{sudo}{} isolated", self.own.display())
    }
}

fn own_program() -> Result<PathBuf, Failure> {
    std::env::current_exe()
        .map_err(|error| Failure::new(format!("cannot find this program's own path: {error}")))
}

/// The variable with which cargo selects how to run programs for this machine.
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
    timed(name, || run.go())
}

fn timed(name: &str, work: impl FnOnce() -> Result<(), Failure>) -> Result<(), Failure> {
    println!("== {name}");
    let start = Instant::now();
    work()?;
    println!("== {name}: {} s", start.elapsed().as_secs());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::runner_of;

    #[test]
    fn the_runner_is_that_of_the_host() {
        let version = "rustc 1.95.0\nhost: aarch64-unknown-linux-gnu\nrelease: 1.95.0\n";
        let expected = "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER";
        assert_eq!(runner_of(version).as_deref(), Some(expected));
        assert_eq!(runner_of("rustc 1.95.0"), None);
    }
}
