//! Why a file cannot be an arena's.

use std::{io, path::PathBuf};

use super::{file::DIRECTORY, layout::VERSION};
use crate::direct::map;

/// The file cannot be used; its contents did not change.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArenaFileError {
    /// Its memory is a BPF map, which only the file that it was copied from may use.
    #[error(
        "{} is a copy of an arena's file, and the memory stays with that file; name that one with \
         --arena-file, or start with --fresh, which makes new memory for the copy", path.display()
    )]
    Copy {
        /// The file.
        path: PathBuf,
    },
    /// The contents are not those of an arena, or an earlier process changed them wrongly.
    #[error(
        "{} holds an arena that cannot be taken over: {what}; drop it with `bluebridge arena drop \
         {}`, or start with --fresh; its contents are lost then", path.display(), path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// It is another user's, or other users can write to it.
    #[error(
        "{} is not a file of this user alone: {what}; name another file", path.display()
    )]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: &'static str,
    },
    /// The caller stopped the allocation.
    #[error("allocating the arena's file was stopped")]
    GivenUp,
    /// A process uses it.
    #[error(
        "{} is in use by process {process}; stop that memory server first, or name another file",
        path.display()
    )]
    InUse {
        /// The file.
        path: PathBuf,
        /// The process, as far as the file says.
        process: u32,
    },
    /// The system refused something.
    #[error("cannot {doing} {}: {error}", path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        error: io::Error,
    },
    /// It is something else.
    #[error("{} is no arena's file; name another one", path.display())]
    NoArena {
        /// The file.
        path: PathBuf,
    },
    /// The kernel does not make a BPF map for it.
    #[error(
        "cannot make a BPF map of {bytes} bytes for {}: {error}; {}, or start with --direct-reads off",
        path.display(), map::remedy(error)
    )]
    NoMap {
        /// The file.
        path: PathBuf,
        /// Bytes of the map.
        bytes: u64,
        /// The system's error.
        #[source]
        error: io::Error,
    },
    /// It has no room.
    #[error(
        "{} needs {bytes} bytes, and there is no room for them: {error}; free some of its file \
         system, or use less --memory, another file with --arena-file, or --arena-file none",
        path.display()
    )]
    NoRoom {
        /// The file.
        path: PathBuf,
        /// Bytes of the whole file.
        bytes: u64,
        /// The system's error.
        #[source]
        error: io::Error,
    },
    /// Its memory is in a map that this process does not see.
    #[error(
        "{} has its memory in a BPF map that is not visible here: /sys/fs/bpf is not the BPF file system of the \
         processes that started this one; start it where that is mounted, for example with \
         `nsenter --net=FILE` instead of `ip netns exec`", path.display()
    )]
    NotVisible {
        /// The file.
        path: PathBuf,
    },
    /// It is on a disk.
    #[error(
        "{} is not on a file system in memory (tmpfs), so every change would be written to a disk; \
         name a file in {DIRECTORY}", path.display()
    )]
    OnDisk {
        /// The file.
        path: PathBuf,
    },
    /// It holds an arena of another shape.
    #[error(
        "{} holds an arena of {found}, but {wanted} were requested; start with the --memory, --shards \
         and --space that it was made with, or with --fresh, which drops the contents", path.display()
    )]
    OtherShape {
        /// The file.
        path: PathBuf,
        /// What it holds.
        found: String,
        /// What was requested.
        wanted: String,
    },
    /// Another version of this program made it.
    #[error(
        "{} holds an arena in layout {found} of another version of bluebridge, and this one uses layout \
         {VERSION}; start the server of that version, or start with --fresh, which drops the contents",
        path.display()
    )]
    OtherVersion {
        /// The file.
        path: PathBuf,
        /// Its layout.
        found: u32,
    },
    /// It is the memory of a file.
    #[error("{} is the memory of {}; drop that file instead", path.display(), file.display())]
    OfFile {
        /// Where the map is pinned.
        path: PathBuf,
        /// The file.
        file: PathBuf,
    },
    /// The server has too many spaces or its memory does not fit.
    #[error("{0}")]
    Size(String),
}

impl ArenaFileError {
    /// Whether an arena may be possible in another place.
    #[must_use]
    pub const fn is_about_place(&self) -> bool {
        matches!(self, Self::Io { .. } | Self::NoRoom { .. } | Self::OnDisk { .. })
    }
}
