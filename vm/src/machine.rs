//! The description of a machine.

use std::{ffi::OsString, fmt, path::PathBuf, str::FromStr, time::Duration};

use crate::{
    cache::Installed,
    run::{MachineError, Output, run_together},
};

/// How long a machine may take if nothing else is said; booting takes 7 to 20 s of it.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// Enough for the programs of this workspace; qemu takes about 150 MB more.
const MEMORY_MIB: u32 = 256;

/// A kernel for machines.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kernel {
    /// Linux 6.1, of Debian 12.
    V6_1,
    /// Linux 6.12, of Debian 13 and the backports for Debian 12.
    V6_12,
}

/// A kernel that is not offered.
#[derive(Debug, thiserror::Error)]
#[error("there is no kernel `{0}` for machines; there are 6.1 and 6.12")]
pub struct UnknownKernel(String);

impl Kernel {
    /// All kernels, the oldest first.
    pub const ALL: [Self; 2] = [Self::V6_1, Self::V6_12];

    /// Metapackages that depend on this kernel, on some Debian.
    pub(crate) const fn packages(self) -> [&'static str; 2] {
        match self {
            Self::V6_1 => ["linux-image-amd64", "linux-image-6.1-amd64"],
            Self::V6_12 => ["linux-image-6.12-amd64", "linux-image-amd64"],
        }
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V6_1 => "6.1",
            Self::V6_12 => "6.12",
        })
    }
}

impl FromStr for Kernel {
    type Err = UnknownKernel;

    fn from_str(text: &str) -> Result<Self, UnknownKernel> {
        let found = Self::ALL.into_iter().find(|kernel| kernel.to_string() == text);
        found.ok_or_else(|| UnknownKernel(text.to_owned()))
    }
}

/// A network interface of a machine and what it is connected to. Its MTU is 9000.
#[derive(Clone, Debug)]
pub enum Link {
    /// A pair of Unix datagram sockets; a datagram is an Ethernet frame. Needs no root.
    Socket {
        /// The machine's socket, which it creates.
        own: PathBuf,
        /// The socket of the other end, another machine's or a switch port's.
        peer: PathBuf,
    },
    /// An existing tap interface in the network namespace of the calling thread. Needs root.
    Tap {
        /// Its name.
        interface: String,
    },
}

/// A directory of the host at a place in the machine.
#[derive(Clone, Debug)]
pub(crate) struct Share {
    pub(crate) host: PathBuf,
    pub(crate) guest: String,
    pub(crate) writable: bool,
}

/// A machine that executes one command.
#[derive(Clone, Debug)]
pub struct Machine {
    pub(crate) installed: Installed,
    pub(crate) command: Vec<OsString>,
    pub(crate) environment: Vec<(String, OsString)>,
    pub(crate) directory: PathBuf,
    pub(crate) memory_mib: u32,
    pub(crate) disks: Vec<PathBuf>,
    pub(crate) links: Vec<Link>,
    pub(crate) shares: Vec<Share>,
    pub(crate) modules: Vec<String>,
    pub(crate) has_verbs: bool,
    pub(crate) deadline: Duration,
}

impl Machine {
    /// A machine without links and disks that executes a command as root.
    ///
    /// The command sees the host's files, with the rights of the calling user, and may change them: the changes are
    /// in the machine's memory. The variables `VM` and `VMS` are the number of the machine, from 1, and that of the
    /// machines of the run. `vm-barrier NAME` waits until every machine of the run is there.
    pub fn new(
        installed: &Installed,
        command: impl IntoIterator<Item = impl Into<OsString>>,
    ) -> Self {
        Self {
            installed: installed.clone(),
            command: command.into_iter().map(Into::into).collect(),
            environment: Vec::new(),
            directory: PathBuf::from("/"),
            memory_mib: MEMORY_MIB,
            disks: Vec::new(),
            links: Vec::new(),
            shares: Vec::new(),
            modules: Vec::new(),
            has_verbs: false,
            deadline: DEADLINE,
        }
    }

    /// A machine that executes a shell script.
    pub fn script(installed: &Installed, script: &str) -> Self {
        Self::new(installed, ["/bin/sh", "-c", script])
    }

    /// Sets a variable for the command; a name that is not one of a shell variable is an error at the start.
    #[must_use]
    pub fn environment(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.environment.push((name.to_owned(), value.into()));
        self
    }

    /// Executes the command in this directory instead of `/`.
    #[must_use]
    pub fn directory(mut self, directory: impl Into<PathBuf>) -> Self {
        self.directory = directory.into();
        self
    }

    /// Sets the memory, in MiB; less than 160 does not boot.
    #[must_use]
    pub const fn memory_mib(mut self, mib: u32) -> Self {
        self.memory_mib = mib;
        self
    }

    /// Adds a disk whose contents are a file of the host, which it may change: `/dev/vda`, `/dev/vdb` and so on.
    #[must_use]
    pub fn disk(mut self, file: impl Into<PathBuf>) -> Self {
        self.disks.push(file.into());
        self
    }

    /// Adds a network interface: `eth0`, `eth1` and so on.
    #[must_use]
    pub fn link(mut self, link: Link) -> Self {
        self.links.push(link);
        self
    }

    /// Adds a directory of the host that the machine may change, at a place without spaces in its root.
    #[must_use]
    pub fn share(mut self, host: impl Into<PathBuf>, guest: &str) -> Self {
        self.shares.push(Share { host: host.into(), guest: guest.to_owned(), writable: true });
        self
    }

    /// Loads a module of the kernel before the command.
    #[must_use]
    pub fn module(mut self, name: &str) -> Self {
        self.modules.push(name.to_owned());
        self
    }

    /// Gives it the library for RDMA and loads the driver for RDMA over ordinary interfaces. The command makes a device
    /// by `rdma link add rxe0 type rxe netdev eth0`.
    #[must_use]
    pub fn rdma(mut self) -> Self {
        self.has_verbs = true;
        self.module("rdma_rxe").module("ib_uverbs")
    }

    /// Ends the machine after this time, counted from its start.
    #[must_use]
    pub const fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Starts the machine and waits until it ends.
    ///
    /// # Errors
    /// If the command did not end by itself. A command that failed is no error here.
    pub fn run(&self) -> Result<Output, MachineError> {
        let mut outputs = run_together(std::slice::from_ref(self));
        outputs.pop().unwrap_or(Err(MachineError::Empty))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_named_by_their_version() {
        for kernel in Kernel::ALL {
            assert_eq!(kernel.to_string().parse::<Kernel>().expect("its own name"), kernel);
        }
        let error = "6".parse::<Kernel>().expect_err("no kernel");
        assert!(error.to_string().contains("6.1 and 6.12"), "{error}");
    }
}
