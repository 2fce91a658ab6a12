//! Whether the workspace builds on a machine without clang, where the eBPF programs are left out.

use crate::command::{Failure, Run};

/// The packages whose build scripts compile eBPF programs (`bluebridge_bpf::build`).
const PACKAGES: [&str; 3] = ["bluebridge-memserver", "bluebridge-switch", "bluebridge-testkit-bpf"];

/// Checks these packages as they are without clang.
///
/// Another setting of the profile makes this a variant of its own for cargo: otherwise the next build would compile the
/// packages, and all that depend on them, again. Dependencies are shared.
pub(super) fn lint() -> Result<(), Failure> {
    let mut run = Run::cargo(["clippy", "--lib", "--quiet"]).env("CLANG", "/no/such/clang");
    run = run.arg("--message-format=json-render-diagnostics");
    for package in PACKAGES {
        run = run.args(["--package", package]);
        run = run.args(["--config", &format!("profile.dev.package.{package}.debug=0")]);
    }
    let messages = run.args(["--", "-D", "warnings"]).output()?;
    match PACKAGES.into_iter().find(|package| !is_without_program(&messages, package)) {
        Some(package) => Err(Failure::new(format!(
            "the build script of {package} found a clang although CLANG names none, so nothing was checked"
        ))),
        None => Ok(()),
    }
}

/// Whether a package's build script ran and compiled no eBPF program, according to the messages of cargo.
fn is_without_program(messages: &str, package: &str) -> bool {
    let named = format!("#{package}@");
    let mut scripts = messages.lines().filter(|line| {
        line.contains(r#""reason":"build-script-executed""#) && line.contains(&named)
    });
    scripts.next().is_some_and(|line| !line.contains("ebpf_object")) && scripts.next().is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_was_compiled_is_noticed() {
        let message = |package: &str, cfgs: &str| {
            format!(
                r#"{{"reason":"build-script-executed","package_id":"path+file:///x#{package}@0.1.0","cfgs":[{cfgs}]}}"#
            )
        };
        let [with, without] = [r#""ebpf_object""#, ""].map(|cfgs| message("one", cfgs));
        let other = message("other", r#""ebpf_object""#);
        assert!(is_without_program(&format!("{other}\n{without}"), "one"));
        assert!(!is_without_program(&with, "one"));
        assert!(!is_without_program(&other, "one"), "its script did not run");
    }
}
