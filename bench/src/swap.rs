//! The machine's own swap, as a comparison: what a program gets from the kernel if its memory does not fit.
//!
//! The program runs in a memory cgroup whose limit presses its pages out, to a file or to compressed memory. Swap is a
//! setting of the whole machine, so it is on only meanwhile, and a [`guardian`] turns it off whatever happens to the
//! experiment.
//!
//! * [`machine`]: whether this machine can do it, and whether anything else would be measured.
//! * [`cgroup`]: the limit, of both versions of cgroups.
//! * [`area`]: swap files and zram devices.
//! * [`guardian`]: the process that holds all of it, and outlives the experiment.
//! * [`worker`]: what runs in the cgroup; [`pages`]: accesses to pages that are out.

pub mod area;
pub mod cgroup;
pub mod guardian;
pub mod machine;
pub mod pages;
pub mod worker;

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Where pages go.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// To a file.
    SwapFile,
    /// To compressed memory.
    Zram,
}

impl Kind {
    /// Its name, as in the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::SwapFile => "swap-file",
            Self::Zram => "zram",
        }
    }

    /// If several are on, the kernel uses the one of the highest priority.
    #[must_use]
    pub const fn priority(self) -> u16 {
        match self {
            Self::SwapFile => 1,
            Self::Zram => 2,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SwapFile => "swap to a file",
            Self::Zram => "swap to zram",
        })
    }
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = [Self::SwapFile, Self::Zram].into_iter().find(|kind| kind.name() == text);
        known.ok_or_else(|| format!("`{text}` is not swap-file or zram"))
    }
}

/// Why swap could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum SwapError {
    /// Only root can turn swap on.
    #[error("measuring swap needs root; run the command as root, or leave out --compare")]
    NotRoot,
    /// The kernel lacks swap.
    #[error("this kernel has no swap (CONFIG_SWAP); leave out --compare, or boot another kernel")]
    NoSwap,
    /// The kernel lacks zram.
    #[error(
        "this kernel has no zram, or its module is not loaded: there is no {control}; try `modprobe zram`, or leave out \
         `zram`"
    )]
    NoZram {
        /// What is missing.
        control: &'static str,
    },
    /// The machine has swap.
    #[error("this machine has swap already, which would be measured instead: {areas}; {remedy}")]
    InUse {
        /// Its areas.
        areas: String,
        /// What to do.
        remedy: String,
    },
    /// Swap would not go to where it should.
    #[error(
        "zswap is on, so swap would go to its compressed memory first; turn it off \
         (`echo N > {setting}`), or leave out --compare"
    )]
    Zswap {
        /// Its switch.
        setting: &'static str,
    },
    /// There is no memory controller.
    #[error(
        "no memory cgroup can be made: no `memory` hierarchy of cgroups version 1 is mounted, and none of version 2 \
         whose cgroup.subtree_control has `memory`; mount one, or enable it \
         (`echo +memory > /sys/fs/cgroup/cgroup.subtree_control`)"
    )]
    NoCgroup,
    /// The file system cannot hold swap files.
    #[error(
        "{} is on {file_system}, which cannot hold a swap file; name a directory on ext4 or XFS with --swap-directory",
        directory.display()
    )]
    FileSystem {
        /// The directory.
        directory: PathBuf,
        /// The name of its file system.
        file_system: &'static str,
    },
    /// There is too little room for the file.
    #[error(
        "a swap file of {needed} MiB does not fit into {}, which has {free} MiB free (and needs some of it); free some \
         space, name another directory with --swap-directory, or use a smaller --size",
        directory.display()
    )]
    Disk {
        /// The directory.
        directory: PathBuf,
        /// The file's size.
        needed: u64,
        /// What is free.
        free: u64,
    },
    /// There is too little memory.
    #[error(
        "the comparison needs {needed} MiB of memory, but only {available} MiB are available; end other programs, or use a \
         smaller --size"
    )]
    Memory {
        /// What it needs: other programs must not be pressed into swap.
        needed: u64,
        /// What there is.
        available: u64,
    },
    /// The guardian refused, or has ended.
    #[error("{0}")]
    Guardian(String),
    /// The worker failed.
    #[error("the process in the cgroup failed: {0}")]
    Worker(String),
    /// Something took too long.
    #[error("{what} took longer than {seconds} s; run the command again on a quieter machine")]
    Deadline {
        /// What took long.
        what: &'static str,
        /// The limit.
        seconds: u64,
    },
    /// The system's error.
    #[error("cannot {doing}: {source}")]
    System {
        /// What failed.
        doing: String,
        /// Why.
        source: io::Error,
    },
}

/// An error of the system, with what was tried.
fn failed(doing: impl Into<String>) -> impl FnOnce(io::Error) -> SwapError {
    let doing = doing.into();
    move |source| SwapError::System { doing, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_have_names() {
        for kind in [Kind::SwapFile, Kind::Zram] {
            assert_eq!(kind.name().parse(), Ok(kind));
        }
        for wrong in ["", "file", "swap-file,zram", "ZRAM"] {
            assert!(wrong.parse::<Kind>().is_err(), "{wrong}");
        }
    }
}
