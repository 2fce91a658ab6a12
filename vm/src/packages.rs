//! Debian packages that are fetched and unpacked without being installed.
//!
//! `apt-get download` needs no root and no lock. Packages of the machine's own package lists are fetched; if
//! that fails because the lists are missing or old, lists below the cache are made first, so that the
//! host's stay as they are.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use crate::{
    machine::Kernel,
    program::{self, ProgramError},
};

/// What a machine needs in addition to its kernel. `kmod` loads modules also in machines whose host has no modules;
/// `xz-utils` and `zstd` decompress kernels.
const TOOLS: [&str; 5] = ["qemu-system-x86", "busybox-static", "kmod", "xz-utils", "zstd"];

/// RDMA for programs: the library, and its drivers for the kernel's devices.
const VERBS: [&str; 2] = ["libibverbs1", "ibverbs-providers"];

/// How long a look at the package lists may take.
const QUERY_DEADLINE: Duration = Duration::from_secs(60);
/// How long it may take to fetch packages of 120 MB, or lists.
const FETCH_DEADLINE: Duration = Duration::from_secs(600);
/// How long it may take to unpack one package.
const UNPACK_DEADLINE: Duration = Duration::from_secs(120);

/// Why packages could not be fetched.
#[derive(Debug, thiserror::Error)]
pub enum PackageError {
    /// The packages are for x86-64 only.
    #[error("virtual machines are run on x86-64 only, this machine is {0}")]
    Architecture(&'static str),
    /// Not a Debian.
    #[error("{0} is missing: virtual machines need a Debian system (packages apt and dpkg)")]
    NoApt(&'static str),
    /// No source of packages has the kernel.
    #[error(
        "no source of packages of this system has Linux {kernel} (looked for {names}); \
         Debian 12 has 6.1, and 6.12 in bookworm-security and bookworm-backports: \
         add such a source to /etc/apt/sources.list.d, or use another kernel"
    )]
    NoKernel {
        /// The kernel.
        kernel: Kernel,
        /// The packages that would lead to it.
        names: String,
    },
    /// A program failed, which is usually the network.
    #[error(
        "{0}\nthe packages of virtual machines could not be fetched; is the network reachable?"
    )]
    Program(#[from] ProgramError),
    /// A file could not be written.
    #[error("cannot {action}: {source}")]
    Files {
        /// The failed action.
        action: String,
        /// The system's error.
        source: io::Error,
    },
}

pub(crate) fn files(action: impl Into<String>) -> impl FnOnce(io::Error) -> PackageError {
    let action = action.into();
    move |source| PackageError::Files { action, source }
}

/// Fetches packages into directories below a scratch directory.
pub(crate) struct Apt {
    scratch: PathBuf,
    /// Lists of its own, if the machine's are missing or old.
    own_lists: bool,
}

impl Apt {
    /// Prepares to fetch; `scratch` must exist and is the caller's to remove.
    pub(crate) fn new(scratch: &Path) -> Result<Self, PackageError> {
        if std::env::consts::ARCH != "x86_64" {
            return Err(PackageError::Architecture(std::env::consts::ARCH));
        }
        let apt = Self { scratch: scratch.to_owned(), own_lists: false };
        for program in ["apt-get", "dpkg-deb"] {
            let mut version = Command::new(program);
            version.arg("--version");
            match program::output(version, QUERY_DEADLINE, scratch) {
                Err(ProgramError::NotStarted { .. }) => return Err(PackageError::NoApt(program)),
                other => other?,
            };
        }
        Ok(apt)
    }

    /// Unpacks qemu with the libraries that this system lacks, and the other tools.
    pub(crate) fn tools(&mut self, into: &Path) -> Result<(), PackageError> {
        self.with_libraries(&TOOLS, into)
    }

    /// Unpacks the library for RDMA with those that it needs and this system lacks.
    pub(crate) fn verbs(&mut self, into: &Path) -> Result<(), PackageError> {
        self.with_libraries(&VERBS, into)
    }

    fn with_libraries(&mut self, wanted: &[&str], into: &Path) -> Result<(), PackageError> {
        self.with_lists(|apt| {
            let mut names: BTreeSet<_> = wanted.iter().map(|name| (*name).to_owned()).collect();
            names.extend(apt.missing(wanted)?);
            apt.unpack(&names, into)
        })
    }

    /// Unpacks a kernel with its modules.
    pub(crate) fn kernel(&mut self, kernel: Kernel, into: &Path) -> Result<(), PackageError> {
        self.with_lists(|apt| {
            let name = apt.kernel_package(kernel)?;
            apt.unpack(&BTreeSet::from([name]), into)
        })
    }

    /// Does something with the system's lists, and again with new ones if that fails.
    fn with_lists(
        &mut self,
        work: impl Fn(&Self) -> Result<(), PackageError>,
    ) -> Result<(), PackageError> {
        let first = work(self);
        if first.is_ok() || self.own_lists {
            return first;
        }
        self.own_lists = true;
        for directory in ["lists/partial", "archives/partial"] {
            fs::create_dir_all(self.scratch.join(directory))
                .map_err(files("make directories for package lists"))?;
        }
        let mut update = self.command("apt-get");
        update.args(["update", "-qq"]);
        program::output(update, FETCH_DEADLINE, &self.scratch)?;
        work(self)
    }

    /// The packages that an installation of these would add to this system.
    fn missing(&self, wanted: &[&str]) -> Result<Vec<String>, PackageError> {
        let mut simulate = self.command("apt-get");
        simulate.args(["install", "--simulate", "--no-install-recommends"]).args(wanted);
        let plan = program::output(simulate, QUERY_DEADLINE, &self.scratch)?;
        Ok(added(&plan))
    }

    fn kernel_package(&self, kernel: Kernel) -> Result<String, PackageError> {
        for name in kernel.packages() {
            let mut depends = self.command("apt-cache");
            depends.args(["depends", "--no-recommends", name]);
            // An unknown package is a failure of apt-cache: the next name may be known.
            if let Ok(text) = program::output(depends, QUERY_DEADLINE, &self.scratch)
                && let Some(found) = image_of(&text, kernel)
            {
                return Ok(found.to_owned());
            }
        }
        Err(PackageError::NoKernel { kernel, names: kernel.packages().join(", ") })
    }

    fn unpack(&self, names: &BTreeSet<String>, into: &Path) -> Result<(), PackageError> {
        let packages = self.scratch.join("packages");
        match fs::remove_dir_all(&packages) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(files("remove old packages")(error));
            }
            _ => {}
        }
        fs::create_dir(&packages).map_err(files("make a directory for packages"))?;
        let mut download = self.command("apt-get");
        download.args(["download", "-qq"]).args(names).current_dir(&packages);
        program::output(download, FETCH_DEADLINE, &self.scratch)?;
        let fetched = fs::read_dir(&packages).map_err(files("list the packages"))?;
        for package in fetched {
            let package = package.map_err(files("list the packages"))?.path();
            let mut unpack = Command::new("dpkg-deb");
            unpack.arg("--extract").arg(&package).arg(into);
            program::output(unpack, UNPACK_DEADLINE, &self.scratch)?;
        }
        fs::remove_dir_all(packages).map_err(files("remove the packages"))
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("LC_ALL", "C").env("DEBIAN_FRONTEND", "noninteractive");
        // Without a user of its own, which could not write below another user's directory.
        command.args(["-o", "APT::Sandbox::User=root", "-o", "Debug::NoLocking=1"]);
        if self.own_lists {
            for (setting, directory) in [("Dir::State::Lists", "lists"), ("Dir::Cache", ".")] {
                let value = self.scratch.join(directory);
                command.arg("-o").arg(format!("{setting}={}", value.display()));
            }
        }
        command
    }
}

/// The packages that a simulated installation adds: `Inst NAME (VERSION ..)`; `Inst NAME [OLD] (..)` is an upgrade.
fn added(plan: &str) -> Vec<String> {
    let lines = plan.lines().filter_map(|line| line.strip_prefix("Inst "));
    let is_new = |line: &&str| line.split(' ').nth(1).is_some_and(|next| next.starts_with('('));
    lines.filter(is_new).filter_map(|line| line.split(' ').next()).map(str::to_owned).collect()
}

/// The package of the kernel itself among the dependencies of a metapackage.
fn image_of(depends: &str, kernel: Kernel) -> Option<&str> {
    let prefix = format!("linux-image-{kernel}.");
    let named = depends.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
    named.map(str::trim).find(|name| name.starts_with(&prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_new_packages_of_a_plan_are_taken() {
        let plan = "NOTE: a simulation\nRemv qemu-utils [10.0]\nInst libfdt1 (1.6.1 Debian [amd64])\n\
                    Inst systemd [252] (253 Debian [amd64])\nInst qemu-system-x86 (7.2 Debian [amd64])\n\
                    Conf libfdt1 (1.6.1 Debian [amd64])\n";
        assert_eq!(added(plan), ["libfdt1", "qemu-system-x86"]);
        assert!(added("").is_empty());
    }

    #[test]
    fn a_kernel_is_found_through_its_metapackage() {
        let text = "linux-image-amd64\n  Depends: linux-image-6.1.0-56-amd64\n";
        assert_eq!(image_of(text, Kernel::V6_1), Some("linux-image-6.1.0-56-amd64"));
        assert_eq!(image_of(text, Kernel::V6_12), None);
        let text = "linux-image-6.12-amd64\n  Depends: linux-image-6.12.117+deb12-amd64\n";
        assert_eq!(image_of(text, Kernel::V6_1), None, "6.12 is not a 6.1");
        assert_eq!(image_of(text, Kernel::V6_12), Some("linux-image-6.12.117+deb12-amd64"));
    }

    #[test]
    fn a_kernel_that_no_source_has_is_named_with_what_to_do() {
        let error = PackageError::NoKernel { kernel: Kernel::V6_12, names: "x".to_owned() };
        let text = error.to_string();
        assert!(text.contains("Linux 6.12") && text.contains("sources.list.d"), "{text}");
    }
}
