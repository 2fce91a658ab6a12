//! What the other commands need beside Rust: installed where we may, named where we may not.

use crate::command::{Failure, Run};

/// A program, and the Debian package that has it.
struct Tool {
    program: &'static str,
    probe: &'static [&'static str],
    package: &'static str,
    purpose: &'static str,
}

const CLANG: Tool = Tool {
    program: "clang",
    probe: &["--version"],
    package: "clang",
    purpose: "compiles the eBPF data plane; without it the soft switch is used",
};

const PYTHON_VENV: Tool = Tool {
    program: "python3",
    probe: &["-c", "import ensurepip, venv"],
    package: "python3-venv",
    purpose: "runs the P4Runtime clients that check the switch agent",
};

const TSHARK: Tool = Tool {
    program: "tshark",
    probe: &["--version"],
    package: "tshark",
    purpose: "reads our packet captures in the tests",
};

const IP: Tool = Tool {
    program: "ip",
    probe: &["-V"],
    package: "iproute2",
    purpose: "shows in the tests what the kernel has",
};

/// Everything that the tests use. Whether all of it is there.
pub(crate) fn all() -> Result<(), Failure> {
    let missing = install(&[CLANG, PYTHON_VENV, TSHARK, IP]);
    if missing.is_empty() {
        return Ok(());
    }
    Err(Failure::new(format!(
        "install these packages first (as root: apt-get install -y {}):\n{}",
        missing.iter().map(|tool| tool.package).collect::<Vec<_>>().join(" "),
        missing.iter().map(|t| format!("  {}: {}\n", t.package, t.purpose)).collect::<String>()
    )))
}

/// What the product's build can use: its lack is said, and never an error.
pub(crate) fn build_tools() {
    for tool in install(&[CLANG]) {
        eprintln!("xtask: no {}: it {}", tool.program, tool.purpose);
    }
}

/// Installs what is missing if that is allowed; gives what is still missing.
fn install(tools: &'static [Tool]) -> Vec<&'static Tool> {
    let missing: Vec<_> = tools.iter().filter(|tool| !tool.is_there()).collect();
    let Some(privilege) = missing.first().and_then(|_| Privilege::find()) else { return missing };
    let packages: Vec<_> = missing.iter().map(|tool| tool.package).collect();
    println!("xtask: installing {}", packages.join(" "));
    let installed = privilege
        .run("apt-get")
        .args(["install", "-y", "--no-install-recommends"])
        .args(&packages)
        .env("DEBIAN_FRONTEND", "noninteractive");
    // A fresh machine has no package lists yet.
    let lists = privilege.run("apt-get").args(["update", "-qq"]).output();
    if let Err(failure) = lists.and_then(|_| installed.output()) {
        eprintln!("xtask: {failure}");
    }
    tools.iter().filter(|tool| !tool.is_there()).collect()
}

impl Tool {
    fn is_there(&self) -> bool {
        Run::new(self.program).args(self.probe).succeeds()
    }
}

/// How we may act as root.
pub(crate) enum Privilege {
    /// We are root.
    Root,
    /// `sudo` lets us, without a password.
    Sudo,
}

impl Privilege {
    pub(crate) fn find() -> Option<Self> {
        if Run::new("id").arg("-u").output().is_ok_and(|uid| uid.trim() == "0") {
            Some(Self::Root)
        } else if Run::new("sudo").args(["-n", "true"]).succeeds() {
            Some(Self::Sudo)
        } else {
            None
        }
    }

    pub(crate) fn run(&self, program: &str) -> Run {
        match self {
            Self::Root => Run::new(program),
            Self::Sudo => Run::new("sudo").args(["-n", "-E", program]),
        }
    }
}
