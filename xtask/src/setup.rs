//! Programs that the other commands need in addition to Rust: installed if permitted, otherwise listed.

use std::{fs, path::Path};

use bluebridge_vm::Kernel;

use crate::{
    command::{Failure, Run, root, target_directory},
    machines,
    test::programs,
};

/// A program and its Debian package.
struct Tool {
    program: &'static str,
    /// Other programs of the package that are used.
    others: &'static [&'static str],
    probe: &'static [&'static str],
    package: &'static str,
    purpose: &'static str,
}

static CLANG: Tool = Tool {
    program: "clang",
    others: &[],
    probe: &["--version"],
    package: "clang",
    purpose: "compiles the eBPF data plane; without it the soft switch is used",
};

static PYTHON_VENV: Tool = Tool {
    program: "python3",
    others: &[],
    probe: &["-c", "import ensurepip, venv"],
    package: "python3-venv",
    purpose: "runs the P4Runtime clients that check the switch agent",
};

static TSHARK: Tool = Tool {
    program: "tshark",
    others: &[],
    probe: &["--version"],
    package: "tshark",
    purpose: "reads packet captures in the tests",
};

static IP: Tool = Tool {
    program: "ip",
    others: &[],
    probe: &["-V"],
    package: "iproute2",
    purpose: "shows the kernel's network state in the tests",
};

static OPEN_VSWITCH: Tool = Tool {
    program: "ovs-vswitchd",
    others: &["ovs-appctl", "ovs-ofctl", "ovs-vsctl", "ovsdb-server", "ovsdb-tool"],
    probe: &["--version"],
    package: "openvswitch-switch",
    purpose: "is an OpenFlow switch for the tests",
};

/// The package's Python module belongs to Debian's own Python. Its dependency net-tools has `ifconfig`.
static MININET: Tool = Tool {
    program: "mnexec",
    others: &["ifconfig"],
    probe: &["-v"],
    package: "mininet",
    purpose: "builds the racks of the tests that use Mininet",
};

static E2FSPROGS: Tool = Tool {
    program: "mke2fs",
    others: &[],
    probe: &["-V"],
    package: "e2fsprogs",
    purpose: "makes a file system for the swap files of virtual machines",
};

/// Its Python module, `nbd`, is of another package.
static LIBNBD: Tool = Tool {
    program: "nbdinfo",
    others: &["nbdcopy"],
    probe: &["--version"],
    package: "libnbd-bin",
    purpose: "is a client of disks for the tests",
};

static LIBNBD_PYTHON: Tool = Tool {
    program: "/usr/bin/python3",
    others: &[],
    probe: &["-c", "import nbd"],
    package: "python3-libnbd",
    purpose: "is a client of disks for the tests",
};

static PYTHON: Tool = Tool {
    program: "/usr/bin/python3",
    others: &[],
    probe: &["-c", "import fcntl, socket"],
    package: "python3",
    purpose: "attaches disks in virtual machines",
};

static QEMU_UTILS: Tool = Tool {
    program: "qemu-io",
    others: &["qemu-img"],
    probe: &["--version"],
    package: "qemu-utils",
    purpose: "is a client of disks for the tests",
};

/// The tools that tests may call by name. The test runner hides all other programs.
static OF_TESTS: [&Tool; 7] =
    [&TSHARK, &IP, &OPEN_VSWITCH, &MININET, &E2FSPROGS, &LIBNBD, &QEMU_UTILS];

/// A cargo command, and the version that is built where there is none.
pub(crate) struct CargoTool {
    program: &'static str,
    command: &'static str,
    version: &'static str,
    features: &'static [&'static str],
}

/// Runs the tests.
pub(crate) static NEXTEST: CargoTool = CargoTool {
    program: "cargo-nextest",
    command: "nextest",
    version: "0.9.143",
    features: &["--features", "default-no-update"],
};

/// Checks the dependencies.
pub(crate) static DENY: CargoTool =
    CargoTool { program: "cargo-deny", command: "deny", version: "0.20.2", features: &[] };

/// P4Runtime clients of other authors, each in its own virtual environment.
const CLIENTS: [&str; 2] = ["finsy", "shell"];

/// The names of the programs that tests may call, in addition to those of every Debian.
pub(crate) fn programs_of_tests() -> impl Iterator<Item = &'static str> {
    OF_TESTS.iter().flat_map(|tool| [tool.program].into_iter().chain(tool.others.iter().copied()))
}

/// Everything that the other commands use.
pub(crate) fn all() -> Result<(), Failure> {
    for_tests(|_| true)?;
    DENY.install()
}

/// The programs needed by the tests of the selected tiers.
pub(crate) fn for_tests(runs: impl Fn(&str) -> bool) -> Result<(), Failure> {
    let mut needed = Vec::new();
    if runs("root") {
        needed.extend([&CLANG, &OPEN_VSWITCH, &LIBNBD, &LIBNBD_PYTHON, &QEMU_UTILS]);
    } else if runs("vm") {
        needed.push(&CLANG);
    } else {
        build_tools();
    }
    if runs("root") || runs("netns") || runs("vm") {
        needed.push(&IP);
    }
    if runs("vm") {
        needed.extend([&E2FSPROGS, &PYTHON]);
    }
    // The tests are also in the tier `root`.
    if runs("mininet") && runs("root") {
        needed.push(&MININET);
    }
    if runs("tools") {
        needed.push(&TSHARK);
    }
    if runs("clients") {
        needed.push(&PYTHON_VENV);
    }
    require(&needed)?;
    NEXTEST.install()?;
    if runs("clients") {
        CLIENTS.iter().try_for_each(|client| install_client(client))?;
    }
    if runs("vm") {
        Kernel::ALL.into_iter().try_for_each(install_machines)?;
    }
    Ok(())
}

fn require(tools: &[&'static Tool]) -> Result<(), Failure> {
    let missing = install(tools);
    if missing.is_empty() {
        return Ok(());
    }
    Err(Failure::new(format!(
        "install these packages first (as root: apt-get install -y {}):\n{}",
        missing.iter().map(|tool| tool.package).collect::<Vec<_>>().join(" "),
        missing.iter().map(|t| format!("  {}: {}\n", t.package, t.purpose)).collect::<String>()
    )))
}

impl CargoTool {
    /// The command, wherever it is installed.
    pub(crate) fn run(&self) -> Run {
        let own = target_directory().join("tools/bin").join(self.program);
        let run = if own.is_file() { Run::new(own) } else { Run::new(self.program) };
        run.arg(self.command)
    }

    /// Builds it below the target directory if there is none, so that nothing of the user's changes.
    /// Unoptimized and without debug information, because it waits most of the time and builds in half the time.
    pub(crate) fn install(&self) -> Result<(), Failure> {
        if self.run().arg("--version").succeeds() {
            return Ok(());
        }
        println!("xtask: building {} {} (once; some minutes)", self.program, self.version);
        let build = target_directory().join("tools/build");
        Run::cargo(["install", "--quiet", "--locked", "--debug", "--no-default-features"])
            .args(self.features)
            .args(["--version", self.version, self.program])
            .arg("--root")
            .arg(target_directory().join("tools"))
            .arg("--target-dir")
            .arg(&build)
            .env("CARGO_PROFILE_DEV_DEBUG", "0")
            .go()?;
        fs::remove_dir_all(build)
            .map_err(|error| Failure::new(format!("cannot remove what building left: {error}")))
    }
}

/// Installs a P4Runtime client with pip, in pinned versions, unless it is already installed.
fn install_client(client: &str) -> Result<(), Failure> {
    let requirements = root().join(format!("switch/tests/p4runtime/requirements-{client}.txt"));
    let environment = target_directory().join("p4runtime-clients").join(client);
    let installed = environment.join("installed.txt");
    let read = |path: &Path| {
        fs::read(path).map_err(|error| Failure::new(format!("{}: {error}", path.display())))
    };
    let wanted = read(&requirements)?;
    if read(&installed).is_ok_and(|installed| installed == wanted) {
        return Ok(());
    }
    println!("xtask: installing the P4Runtime client {client}");
    Run::new("python3").args(["-m", "venv", "--clear"]).arg(&environment).output()?;
    Run::new(environment.join("bin/python"))
        .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r"])
        .arg(&requirements)
        .output()?;
    fs::write(&installed, wanted)
        .map_err(|error| Failure::new(format!("{}: {error}", installed.display())))
}

fn install_machines(kernel: Kernel) -> Result<(), Failure> {
    machines::install(kernel).map(drop).map_err(|failure| {
        Failure::new(format!("{failure}\nto run the other tests: cargo xtask test --without vm"))
    })
}

/// Optional programs for the product's build: a missing one is reported, but is no error.
pub(crate) fn build_tools() {
    for tool in install(&[&CLANG]) {
        eprintln!("xtask: no {}: it {}", tool.program, tool.purpose);
    }
}

/// A new machine often updates itself, and apt-get then fails at once unless it may wait.
const LOCK_TIMEOUT: [&str; 2] = ["-o", "DPkg::Lock::Timeout=120"];

/// Installs missing tools if permitted; returns those that are still missing.
fn install(tools: &[&'static Tool]) -> Vec<&'static Tool> {
    let missing: Vec<_> = tools.iter().copied().filter(|tool| !tool.is_there()).collect();
    let Some(privilege) = missing.first().and_then(|_| Privilege::find()) else { return missing };
    let packages: Vec<_> = missing.iter().map(|tool| tool.package).collect();
    println!("xtask: installing {}", packages.join(" "));
    let apt_get = || privilege.run("apt-get").args(LOCK_TIMEOUT);
    let installed = apt_get()
        .args(["install", "-y", "--no-install-recommends"])
        .args(&packages)
        .env("DEBIAN_FRONTEND", "noninteractive");
    // A new machine has no package lists yet.
    let lists = apt_get().args(["update", "-qq"]).output();
    if let Err(failure) = lists.and_then(|_| installed.output()) {
        eprintln!("xtask: {failure}");
    }
    tools.iter().copied().filter(|tool| !tool.is_there()).collect()
}

impl Tool {
    fn is_there(&self) -> bool {
        let program = programs::find(self.program);
        let program = program.unwrap_or_else(|| self.program.into());
        Run::new(program).args(self.probe).succeeds()
    }
}

/// How to act as root.
pub(crate) enum Privilege {
    /// This process is root.
    Root,
    /// `sudo` works without a password.
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
