//! The licences and sources of all dependencies, checked by cargo-deny against `deny.toml`.

use crate::{command::Failure, setup::DENY};

/// Checks what can be known without a network; `advisories` also fetches the list of known faults.
pub(crate) fn check(advisories: bool) -> Result<(), Failure> {
    DENY.install()?;
    let checks = ["check", "bans", "licenses", "sources"];
    let run = DENY.run().args(["--log-level", "warn"]).args(checks);
    if advisories { run.arg("advisories").go() } else { run.go() }
}
