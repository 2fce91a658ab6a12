//! Why a file cannot be an arena's.

use std::{io, path::PathBuf};

use super::file::DIRECTORY;

/// The file cannot be used; nothing in it changed, except that the change under way when its last
/// process ended may be complete now.
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
        "{} is not a file of this user alone: {what}; choose another file with --arena-file",
        path.display()
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
        "{} is in use by process {process}; stop that memory server first, or choose another file \
         with --arena-file", path.display()
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
    #[error("{} is no arena's file; choose another one with --arena-file", path.display())]
    NoArena {
        /// The file.
        path: PathBuf,
    },
    /// The kernel does not make a BPF map for it.
    #[error(
        "cannot make a BPF map of {bytes} bytes for {}: {error}; use a smaller arena, or start with \
         --direct-reads off", path.display()
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
        "{} needs {bytes} bytes, and its file system does not have them: {error}; use a smaller \
         arena, another file with --arena-file, or --arena-file none", path.display()
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
    /// It is on a disk.
    #[error(
        "{} is not on a file system in memory (tmpfs), so every change would be written to a disk; \
         choose a file in {DIRECTORY}", path.display()
    )]
    OnDisk {
        /// The file.
        path: PathBuf,
    },
    /// It holds an arena of another shape.
    #[error(
        "{} holds an arena with {found}, but {wanted} was requested; start with the same, or with \
         --fresh, which drops the contents", path.display()
    )]
    OtherShape {
        /// The file.
        path: PathBuf,
        /// What it holds.
        found: String,
        /// What was requested.
        wanted: String,
    },
    /// The server has too many spaces or its memory does not fit.
    #[error("{0}")]
    Size(String),
}
