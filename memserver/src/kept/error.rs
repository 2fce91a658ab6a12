//! Why a file cannot be an arena's.

use std::{
    fmt, io,
    path::{Path, PathBuf},
};

use super::{access::Pages, layout::VERSION};

/// The file cannot be used; its contents did not change. The text is the cause; what helps depends on who reads it
/// ([`ArenaFileError::remedy`]).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArenaFileError {
    /// Its memory is a BPF map, which only the file that it was copied from may use.
    #[error(
        "{} is a copy of an arena's file, and the memory stays with that file", path.display()
    )]
    Copy {
        /// The file.
        path: PathBuf,
    },
    /// The contents are not those of an arena, or an earlier process changed them wrongly.
    #[error("{} holds an arena that cannot be taken over: {what}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// It is no file of this user alone.
    #[error("{} {what}", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What it is.
        what: Foreign,
    },
    /// The caller stopped the allocation.
    #[error("allocating the arena's file was stopped")]
    GivenUp,
    /// A process uses it.
    #[error("{} is in use by {}", path.display(), process_words(*process))]
    InUse {
        /// The file.
        path: PathBuf,
        /// The process, as far as the file says; otherwise 0.
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
    /// There is none, and none is to be made.
    #[error("there is no file {}", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// It is something else.
    #[error("{} is no arena's file", path.display())]
    NoArena {
        /// The file.
        path: PathBuf,
    },
    /// Its directory is missing.
    #[error("there is no directory {}", directory.display())]
    NoDirectory {
        /// The directory.
        directory: PathBuf,
    },
    /// The kernel does not make a BPF map for it.
    #[error("cannot make a BPF map of {bytes} bytes for {}: {error}", path.display())]
    NoMap {
        /// The file.
        path: PathBuf,
        /// Bytes of the map.
        bytes: u64,
        /// The system's error.
        #[source]
        error: io::Error,
    },
    /// There is no room for it.
    #[error("{}", lack.words(directory_of(path), *bytes))]
    NoRoom {
        /// The file.
        path: PathBuf,
        /// Bytes of the whole file.
        bytes: u64,
        /// What there is too little of.
        lack: Lack,
    },
    /// Its memory is in a map that this process does not see.
    #[error(
        "{} has its memory in a BPF map that is not visible here: /sys/fs/bpf is not the BPF file system of the \
         processes that started this one", path.display()
    )]
    NotVisible {
        /// The file.
        path: PathBuf,
    },
    /// It is the memory of a file.
    #[error("{} is the memory of {}", path.display(), file.display())]
    OfFile {
        /// Where the map is pinned.
        path: PathBuf,
        /// The file.
        file: PathBuf,
    },
    /// It is on a disk.
    #[error("{} is not on a file system in memory (tmpfs or hugetlbfs)", directory_of(path).display())]
    OnDisk {
        /// The file.
        path: PathBuf,
    },
    /// It holds an arena of another shape.
    #[error("{} holds an arena of {found}, but {wanted} were requested", path.display())]
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
        "{} holds an arena in layout {found} of another version of bluebridge, and this one uses layout {VERSION}",
        path.display()
    )]
    OtherVersion {
        /// The file.
        path: PathBuf,
        /// Its layout.
        found: u32,
    },
    /// Its file system is read-only.
    #[error("{} is on a read-only file system", directory_of(path).display())]
    ReadOnly {
        /// The file.
        path: PathBuf,
    },
    /// The server has too many spaces or its memory does not fit.
    #[error("{0}")]
    Size(String),
    /// No arena has this id.
    #[error(
        "no map of an arena with the id {id} {}", if *may_be_hidden {
            "is visible here: /sys/fs/bpf is not the BPF file system of the processes that started this one"
        } else {
            "is there"
        }
    )]
    UnknownId {
        /// The id.
        id: String,
        /// Whether it may be where this process does not see it.
        may_be_hidden: bool,
    },
}

/// What is no file of this user alone.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Foreign {
    /// A directory.
    Directory,
    /// A symbolic link, which is not followed: any user may make one in a directory for all users.
    Link,
    /// A pipe or a device, for example.
    NoRegularFile,
    /// A file of the user with this number.
    OfUser(u32),
    /// A file that other users may open.
    OpenToOthers,
}

impl Foreign {
    /// Whether it cannot be a file that a server of this user made.
    #[must_use]
    pub const fn is_of_others(self) -> bool {
        !matches!(self, Self::OpenToOthers)
    }
}

/// What follows the name.
impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory => f.write_str("is a directory, and no arena's file"),
            Self::Link => f.write_str("is a symbolic link, and no arena's file"),
            Self::NoRegularFile => f.write_str("is no regular file, and so no arena's"),
            Self::OfUser(user) => write!(f, "belongs to another user (uid {user})"),
            Self::OpenToOthers => f.write_str("may be opened by other users"),
        }
    }
}

/// What there is too little of for a file.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Lack {
    /// Files of its file system (inodes).
    Files,
    /// Huge pages of this many bytes, in the system's pool.
    HugePages(usize),
    /// Memory of the machine.
    Memory,
    /// This user's quota of its file system.
    Quota,
    /// Room of its file system.
    Room,
}

impl Lack {
    /// What is lacking for this error; `None` if nothing is.
    pub(super) fn of(error: &io::Error, pages: Pages) -> Option<Self> {
        match (error.kind(), pages) {
            (io::ErrorKind::OutOfMemory | io::ErrorKind::StorageFull, Pages::Huge(of)) => {
                Some(Self::HugePages(of))
            }
            (io::ErrorKind::OutOfMemory, Pages::Small) => Some(Self::Memory),
            (io::ErrorKind::QuotaExceeded, _) => Some(Self::Quota),
            (io::ErrorKind::StorageFull, Pages::Small) => Some(Self::Room),
            _ => None,
        }
    }

    fn words(self, directory: &Path, bytes: u64) -> String {
        let directory = directory.display();
        match self {
            Self::Files => {
                format!("{directory} has no room for another file: its inodes are used up")
            }
            Self::HugePages(of) => format!(
                "the system's pool has too few free huge pages of {} KiB for a file of {bytes} bytes in {directory}",
                of / 1024
            ),
            Self::Memory => {
                format!("the system has no memory for a file of {bytes} bytes in {directory}")
            }
            Self::Quota => {
                format!("this user's quota of {directory} has no room for a file of {bytes} bytes")
            }
            Self::Room => format!("{directory} has no room for a file of {bytes} bytes"),
        }
    }
}

impl ArenaFileError {
    /// Whether an arena may be possible in another place.
    #[must_use]
    pub const fn is_about_place(&self) -> bool {
        matches!(
            self,
            Self::Io { .. }
                | Self::NoDirectory { .. }
                | Self::NoRoom { .. }
                | Self::OnDisk { .. }
                | Self::ReadOnly { .. }
        )
    }

    /// Whether something else has the file's name.
    #[must_use]
    pub const fn is_about_name(&self) -> bool {
        matches!(self, Self::Foreign { .. } | Self::NoArena { .. })
    }
}

/// The directory of a file.
pub(super) fn directory_of(file: &Path) -> &Path {
    match file.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => file,
    }
}

fn process_words(process: u32) -> String {
    match process {
        0 => "another process".to_owned(),
        process => format!("process {process}"),
    }
}
