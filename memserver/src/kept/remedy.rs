//! What the reader of an error can do about it.

use std::{io, path::Path};

use bluebridge_bpf::fs::arena_of_pin;
use rustix::process::geteuid;

use super::{ArenaFileError, Foreign, Lack, error::directory_of, file::DIRECTORY};
use crate::direct::map;

/// Who reads an error, and can do different things about it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Reader {
    /// The user of `bluebridge arena`.
    Arenas,
    /// The user of a rack, who started no memory server.
    Rack {
        /// The command that starts this server again, with empty memory.
        restart: String,
        /// Whether the server was to go on with its memory, so that this comes first.
        keeps: bool,
    },
    /// Who started the memory server.
    Server,
}

/// The end of what a rack's user does about the place of files, in the same words for all servers.
const AGAIN: &str = "then restart the server (`bluebridge rack restart`)";

/// What a server does that locks its memory ([`ArenaFileError::Io`]).
pub(super) const LOCK: &str = "lock in memory";

/// A file that has only a header.
const SMALL_BYTES: u64 = 4096;

impl ArenaFileError {
    /// What its reader can do; `None` if the cause says it.
    #[must_use]
    pub fn remedy(&self, reader: &Reader) -> Option<String> {
        match reader {
            Reader::Arenas => self.remedy_for_arenas(),
            Reader::Rack { restart, keeps } => {
                let keeping = keeps.then(|| self.keeping_remedy_in_rack(restart)).flatten();
                keeping.or_else(|| self.remedy_in_rack(restart))
            }
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

    /// Whether the contents of the server may be there nevertheless, elsewhere or for another program.
    #[must_use]
    pub const fn leaves_contents(&self) -> bool {
        matches!(
            self,
            Self::Copy { .. }
                | Self::Foreign { .. }
                | Self::InUse { .. }
                | Self::Missing { .. }
                | Self::NoArena { .. }
                | Self::NotVisible { .. }
                | Self::OtherVersion { .. }
        )
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
                    Lack::HugePages(of) => format!(
                        "give it more ({}), use less --memory, or name a file on a tmpfs with --arena-file",
                        pool_setting(*of)
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
            Self::Size(_) => "change --memory or --shards".into(),
            Self::Io { doing: LOCK, .. } => {
                "raise the limit of locked memory (`ulimit -l`), or start without --claim lock".into()
            }
            Self::GivenUp
            | Self::Io { .. }
            | Self::Missing { .. }
            | Self::UnknownId { .. } => return None,
        })
    }

    /// How memory is used again that is elsewhere, or cannot be opened, and what drops it otherwise.
    fn keeping_remedy_in_rack(&self, restart: &str) -> Option<String> {
        let back = "put the server's file back in its place";
        Some(match self {
            Self::Copy { .. } | Self::Missing { .. } => {
                format!(
                    "{back} (then `{restart} --keep`), or begin with empty memory (`{restart}`)"
                )
            }
            Self::Foreign { path, what: Foreign::OpenToOthers } => {
                format!("`chmod 600 {}` ends that; then `{restart} --keep`", path.display())
            }
            Self::Foreign { path, what: Foreign::OfUser(_) } => format!(
                "if it is the server's, `chown {} {}` as root gives it back; then `{restart} --keep`",
                geteuid().as_raw(),
                path.display()
            ),
            Self::Foreign { path, .. } | Self::NoArena { path } => {
                let option = match self {
                    Self::Foreign { what: Foreign::Directory, .. } => " -r",
                    _ => "",
                };
                let shown = path.display();
                format!(
                    "{back} (then `{restart} --keep`), or remove what is there (`rm{option} {shown}`) and begin with empty memory (`{restart}`)"
                )
            }
            _ => return None,
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
            // Perhaps of another server, which is to go on.
            Self::InUse { .. } => "if that is another server, the file is that one's, and the server's own is to be put \
                                   back in its place; otherwise end that process, then give the command again".into(),
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
                    Lack::HugePages(of) => format!(
                        "give it more ({}), {AGAIN}, or build the rack with less --memory",
                        pool_setting(*of)
                    ),
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
            Self::Size(_) => "build the rack with another --memory".into(),
            Self::GivenUp
            | Self::Io { .. }
            | Self::Missing { .. }
            | Self::OfFile { .. }
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

/// How the directory for such files is made, if it is that one.
fn mounting(directory: &Path) -> Option<String> {
    (directory == Path::new(DIRECTORY)).then(|| {
        format!(
            "mount a tmpfs there (`mkdir {DIRECTORY} && mount -t tmpfs -o mode=1777 tmpfs {DIRECTORY}`)"
        )
    })
}

/// Where the number of huge pages of a size is set.
fn pool_setting(huge_page: usize) -> String {
    format!("/sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages", huge_page / 1024)
}

fn making_writable(file: &Path) -> String {
    match directory_of(file) {
        directory if directory == Path::new(DIRECTORY) => {
            format!("make it writable (`mount -o remount,rw {DIRECTORY}`)")
        }
        _ => "make it writable".to_owned(),
    }
}
