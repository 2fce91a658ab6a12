//! Why a file cannot be an arena's, and what its reader can do about that.

use std::{
    fmt, io,
    path::{Path, PathBuf},
};

use bluebridge_bpf::fs::arena_of_pin;
use rustix::process::geteuid;

use super::{file::DIRECTORY, layout::VERSION};
use crate::direct::map;

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
    #[error("{} is not on a file system in memory (tmpfs)", directory_of(path).display())]
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
    /// Memory of the machine.
    Memory,
    /// This user's quota of its file system.
    Quota,
    /// Room of its file system.
    Room,
}

impl Lack {
    /// What is lacking for this error; `None` if nothing is.
    pub(super) fn of(error: &io::Error) -> Option<Self> {
        match error.kind() {
            io::ErrorKind::OutOfMemory => Some(Self::Memory),
            io::ErrorKind::QuotaExceeded => Some(Self::Quota),
            io::ErrorKind::StorageFull => Some(Self::Room),
            _ => None,
        }
    }

    fn words(self, directory: &Path, bytes: u64) -> String {
        let directory = directory.display();
        match self {
            Self::Files => {
                format!("{directory} has no room for another file: its inodes are used up")
            }
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

/// Who reads an error, and can do different things about it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Reader {
    /// The user of `bluebridge arena`.
    Arenas,
    /// The user of a rack, who started no memory server.
    Rack {
        /// The command that starts this server again, with empty memory.
        restart: String,
    },
    /// Who started the memory server.
    Server,
}

/// The end of what a rack's user does about the place of files, in the same words for all servers.
const AGAIN: &str = "then restart the server (`bluebridge rack restart`)";

/// A file that has only a header.
const SMALL_BYTES: u64 = 4096;

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

    /// What its reader can do; `None` if the cause says it.
    #[must_use]
    pub fn remedy(&self, reader: &Reader) -> Option<String> {
        match reader {
            Reader::Arenas => self.remedy_for_arenas(),
            Reader::Rack { restart } => self.remedy_in_rack(restart),
            Reader::Server => self.remedy_for_server(),
        }
    }

    /// The cause, and what its reader can do.
    #[must_use]
    pub fn advice(&self, reader: &Reader) -> String {
        match self.remedy(reader) {
            Some(remedy) => format!("{self}; {remedy}"),
            None => self.to_string(),
        }
    }

    fn remedy_for_server(&self) -> Option<String> {
        Some(match self {
            Self::Copy { .. } => {
                "name that one with --arena-file, or start with --fresh, which makes new memory for the copy".into()
            }
            Self::Damaged { .. } => "start with --fresh, which drops the contents".into(),
            Self::Foreign { path, what: Foreign::OpenToOthers } => {
                format!("`chmod 600 {}` ends that", path.display())
            }
            Self::Foreign { .. } | Self::NoArena { .. } => {
                "name another file with --arena-file".into()
            }
            Self::InUse { .. } => {
                "stop that memory server first, or name another file with --arena-file".into()
            }
            Self::NoDirectory { directory } => {
                let mount = mounting(directory).map(|words| format!("{words}, or "));
                let mount = mount.unwrap_or_default();
                format!("{mount}name a file in another one with --arena-file")
            }
            Self::NoMap { error, .. } => {
                format!("{}, or start with --direct-reads off", map::remedy(error))
            }
            Self::NoRoom { path, bytes, lack } => {
                let is_small = *bytes <= SMALL_BYTES;
                match lack {
                    Lack::Files => format!(
                        "remove files there (`df -i {}` counts them), or name a file elsewhere with --arena-file",
                        directory_of(path).display()
                    ),
                    Lack::Memory if is_small => "end other programs".into(),
                    Lack::Memory => "end other programs, or use less --memory".into(),
                    Lack::Quota | Lack::Room if is_small => {
                        "free some of it, or name a file elsewhere with --arena-file".into()
                    }
                    Lack::Quota | Lack::Room => "free some of it, use less --memory, or name a file elsewhere with \
                                                 --arena-file".into(),
                }
            }
            Self::NotVisible { .. } => {
                "start it where that is mounted, for example with `nsenter --net=FILE` instead of `ip netns exec`".into()
            }
            Self::OfFile { .. } => "drop that file instead".into(),
            Self::OnDisk { .. } => {
                "every change would be written to a disk: name a file on a tmpfs with --arena-file".into()
            }
            Self::OtherShape { .. } => {
                "start with the --memory, --shards and --space that it was made with, or with --fresh, which drops the \
                 contents".into()
            }
            Self::OtherVersion { .. } => {
                "start the server of that version, or start with --fresh, which drops the contents".into()
            }
            Self::ReadOnly { path } => {
                format!("{}, or name a file elsewhere with --arena-file", making_writable(path))
            }
            Self::GivenUp
            | Self::Io { .. }
            | Self::Missing { .. }
            | Self::Size(_)
            | Self::UnknownId { .. } => return None,
        })
    }

    fn remedy_in_rack(&self, restart: &str) -> Option<String> {
        let begin_empty = || format!("`{restart}` drops the contents, and the server begins empty");
        Some(match self {
            Self::Copy { .. } => {
                format!("put that file back in its place, or begin with empty memory (`{restart}`)")
            }
            Self::Damaged { .. } | Self::OtherShape { .. } => begin_empty(),
            Self::Foreign { path, what: Foreign::OpenToOthers } => {
                format!("`chmod 600 {}` ends that; then `{restart}`", path.display())
            }
            Self::Foreign { path, what: Foreign::Directory } => {
                format!("remove it (`rm -r {}`), then `{restart}`", path.display())
            }
            Self::Foreign { path, what: Foreign::OfUser(_) } => format!(
                "remove it, as that user or as root (`rm {}`), then `{restart}`",
                path.display()
            ),
            Self::Foreign { path, .. } | Self::NoArena { path } => {
                format!("remove it (`rm {}`), then `{restart}`", path.display())
            }
            Self::InUse { .. } => format!("end that process, then `{restart}`"),
            Self::NoDirectory { directory } => {
                let mount = mounting(directory).unwrap_or_else(|| "make it".to_owned());
                format!("{mount}, {AGAIN}")
            }
            Self::NoMap { error, .. } => match map::is_shortage(error) {
                true => "build the rack with less --memory".into(),
                false => map::remedy(error).into(),
            },
            Self::NoRoom { bytes, lack, .. } => {
                let is_small = *bytes <= SMALL_BYTES;
                match lack {
                    Lack::Files => format!("remove files there, {AGAIN}"),
                    Lack::Memory if is_small => format!("end other programs, {AGAIN}"),
                    Lack::Memory => "build the rack with less --memory".into(),
                    Lack::Quota | Lack::Room if is_small => {
                        format!("free some of it, {AGAIN}")
                    }
                    Lack::Quota | Lack::Room => {
                        format!("free some of it, {AGAIN}, or build the rack with less --memory")
                    }
                }
            }
            Self::NotVisible { .. } => {
                "run the command where that is mounted, and not under `ip netns exec`".into()
            }
            Self::OnDisk { path } => {
                let directory = directory_of(path).display();
                format!("mount a tmpfs there (`mount -t tmpfs tmpfs {directory}`), {AGAIN}")
            }
            Self::OtherVersion { .. } => {
                format!("start it with the program of that version, or begin empty (`{restart}`)")
            }
            Self::ReadOnly { path } => format!("{}, {AGAIN}", making_writable(path)),
            Self::GivenUp
            | Self::Io { .. }
            | Self::Missing { .. }
            | Self::OfFile { .. }
            | Self::Size(_)
            | Self::UnknownId { .. } => return None,
        })
    }

    fn remedy_for_arenas(&self) -> Option<String> {
        Some(match self {
            Self::Foreign { path, what: Foreign::OpenToOthers } => {
                format!("`chmod 600 {}` ends that", path.display())
            }
            Self::Foreign { what: Foreign::OfUser(_), .. } => {
                "run this command as that user".into()
            }
            Self::InUse { .. } => "stop that memory server first".into(),
            Self::NoDirectory { directory } => return mounting(directory),
            Self::NotVisible { .. } | Self::UnknownId { may_be_hidden: true, .. } => {
                "run the command where that is mounted, for example with `nsenter --net=FILE` instead of `ip netns exec`"
                    .into()
            }
            Self::OfFile { .. } => "drop that file instead".into(),
            Self::Foreign { .. }
            | Self::Missing { .. }
            | Self::NoArena { .. }
            | Self::OnDisk { .. }
            | Self::UnknownId { .. } => {
                "`bluebridge arena list` shows what memory servers left".into()
            }
            Self::ReadOnly { path } => making_writable(path),
            Self::Io { error, .. } if error.kind() == io::ErrorKind::ReadOnlyFilesystem => {
                map::remedy(error).into()
            }
            Self::Io { error, .. }
                if error.kind() == io::ErrorKind::PermissionDenied && !geteuid().is_root() =>
            {
                "run this command as the user who started the memory server, or as root".into()
            }
            Self::Io { path, doing: "open", .. } if arena_of_pin(path).is_some() => {
                format!("remove it if it is no arena's (`rm -r {}`)", path.display())
            }
            Self::Copy { .. }
            | Self::Damaged { .. }
            | Self::GivenUp
            | Self::Io { .. }
            | Self::NoMap { .. }
            | Self::NoRoom { .. }
            | Self::OtherShape { .. }
            | Self::OtherVersion { .. }
            | Self::Size(_) => return None,
        })
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

/// How the directory for such files is made, if it is that one.
fn mounting(directory: &Path) -> Option<String> {
    (directory == Path::new(DIRECTORY)).then(|| {
        format!(
            "mount a tmpfs there (`mkdir {DIRECTORY} && mount -t tmpfs -o mode=1777 tmpfs {DIRECTORY}`)"
        )
    })
}

fn making_writable(file: &Path) -> String {
    match directory_of(file) {
        directory if directory == Path::new(DIRECTORY) => {
            format!("make it writable (`mount -o remount,rw {DIRECTORY}`)")
        }
        _ => "make it writable".to_owned(),
    }
}
