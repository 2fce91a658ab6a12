//! Set-up, demo, test and bench as plain cargo commands, for a machine with only Rust installed.

mod command;
mod dependencies;
mod machines;
mod setup;
mod test;

use std::process::ExitCode;

use command::{Failure, Run};

const HELP: &str = "\
usage: cargo xtask <command> [options]

  setup               install the programs that the other commands need, or list them
  demo [options]      build the product and run `bluebridge demo`
  example NAME        build an example (hello, counter, update, larger)
                      and run it in a rack made for it
  test [options] [name ..]
                      run every test, or those whose names contain one of the words
      --without TIER  skip a tier and list its tests:
                      netns, root, clients, mininet, tools, vm, long
      --fast          skip all tiers, and try fewer random cases: under 2 minutes
      -p PACKAGE      only the tests of a package
      -E FILTER       only the tests that match a nextest filter
      --retry         run a failed test with real packets again; if it then passes, report it as flaky
  vm [options] -- COMMAND ..
                      run a command in a virtual machine that sees this machine's files
      --kernel K      6.1 (the default) or 6.12
      --memory M      such as 256M (the default)
      --machines N    run it in up to 3 machines
      --deadline S    end it after S seconds (60)
  bench [options]     build an optimized program and run `bluebridge bench`
  p4info              write p4/bluebridge.p4info.txtpb from its declaration
  vectors             write the golden vectors of the wire format
  dependencies        check licences and sources of all dependencies against deny.toml
      --advisories    and whether faults of them are known, whose list it fetches

Options after `demo` and `bench` are passed to `bluebridge`.
";

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let command = arguments.next();
    let rest: Vec<String> = arguments.collect();
    let outcome = match command.as_deref() {
        Some("setup") => setup::all(),
        Some("demo") => demo(&rest),
        Some("example") => example(&rest),
        Some("test") => test::run(&rest),
        Some("vm") => machines::run(&rest),
        Some("bench") => bench(&rest),
        Some("p4info") => {
            Run::cargo(["run", "--quiet", "--package", "bluebridge-p4", "--example", "p4info"]).go()
        }
        Some("vectors") => Run::cargo([
            "run",
            "--quiet",
            "--package",
            "bluebridge-wire",
            "--example",
            "write_vectors",
        ])
        .go(),
        Some("dependencies") => match rest.as_slice() {
            [] => dependencies::check(false),
            [option] if option == "--advisories" => dependencies::check(true),
            _ => Err(Failure::usage(format!("dependencies takes --advisories only\n\n{HELP}"))),
        },
        // The following commands are internal to `test`.
        Some("isolated") => return finish(test::isolated(&rest)),
        Some("isolated-init") => return finish(test::init(&rest)),
        Some("sweep") => return finish(test::sweep(&rest)),
        Some("help" | "--help" | "-h") => {
            print!("{HELP}");
            Ok(())
        }
        Some(other) => Err(Failure::usage(format!("unknown command `{other}`\n\n{HELP}"))),
        None => Err(Failure::usage(HELP.to_owned())),
    };
    finish(outcome.map(|()| ExitCode::SUCCESS))
}

fn finish(outcome: Result<ExitCode, Failure>) -> ExitCode {
    outcome.unwrap_or_else(Failure::report)
}

/// Builds the product and runs its demonstration.
fn demo(options: &[String]) -> Result<(), Failure> {
    setup::build_tools();
    Run::cargo(["build", "--release", "--package", "bluebridge-cli"]).go()?;
    Run::new(command::product("release")).arg("demo").args(options).go()
}

/// An example of the client library or of the pager, in a rack that is taken down afterwards.
fn example(options: &[String]) -> Result<(), Failure> {
    let [name] = options else {
        return Err(Failure::usage(
            "usage: cargo xtask example hello|counter|update|larger".to_owned(),
        ));
    };
    setup::build_tools();
    Run::cargo(["build", "--release", "--package", "bluebridge-cli", "--bins"]).go()?;
    let package = if name == "larger" { "bluebridge-pager" } else { "bluebridge" };
    Run::cargo(["build", "--release", "--package", package, "--example", name]).go()?;
    let rack = format!("example-{}", std::process::id());
    let product = || Run::new(command::product("release")).arg("rack");
    product().args(["up", "--name", &rack, "--servers", "2", "--clients", "1"]).go()?;
    let program = command::product("release").with_file_name("examples").join(name);
    let ran = product().args(["exec", "--name", &rack, "c1", "--"]).arg(program).go();
    let down = product().args(["down", "--name", &rack]).go();
    ran.and(down)
}

fn bench(options: &[String]) -> Result<(), Failure> {
    setup::build_tools();
    Run::cargo(["build", "--profile", "fast", "--package", "bluebridge-cli"]).go()?;
    let options = if options.is_empty() { &["all".to_owned()] } else { options };
    Run::new(command::product("fast")).arg("bench").args(options).go()
}
