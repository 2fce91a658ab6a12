//! Opens, locks and reads the files of arenas.

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use bluebridge_wire::{ArenaGeneration, NodeId, address::PAGE_BYTES};
use rustix::{
    fd::OwnedFd,
    fs::{
        FileType, FlockOperation, Mode, OFlags, flock, fstat, fstatfs, lstat, open, rename, statfs,
        unlink,
    },
    io::Errno,
    process::geteuid,
};
use zerocopy::{FromBytes, IntoBytes};

use super::{
    ArenaFileError, Foreign, Holder, Lack,
    error::directory_of,
    layout::{Header, IN_MAP, Layout, MAGIC, STATE_FULL},
};
use crate::{direct::map, memory};

/// The file system in memory (statfs(2)).
const TMPFS_MAGIC: i64 = 0x0102_1994;
/// The file system whose memory is the system's pool of huge pages (statfs(2)).
const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;

/// How often, and how long between, a lock is tried that another process has.
const LOCK_TRIES: u32 = 10;
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// Opens a file and takes it for this process, until its mapping ends. Another process may remove
/// the file in between; then there is a new one.
pub(super) fn take_file(path: &Path, purpose: Purpose) -> Result<OwnedFd, ArenaFileError> {
    for _ in 0..LOCK_TRIES {
        let file = open_file(path, purpose)?;
        lock(path, &file)?;
        let (own, there) = (fstat(&file), lstat(path));
        if let (Ok(own), Ok(there)) = (own, there)
            && (own.st_dev, own.st_ino) == (there.st_dev, there.st_ino)
        {
            return Ok(file);
        }
    }
    Err(ArenaFileError::InUse { path: path.to_owned(), process: 0 })
}

/// Bytes of memory of a file, or reserved for it: the first mapping of huge pages reserves all of them.
pub(super) fn occupied(pages: Pages, stat: &rustix::fs::Stat) -> u64 {
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    match pages {
        Pages::Small => u64::try_from(stat.st_blocks).unwrap_or(0) * 512,
        Pages::Huge(_) => size,
    }
}

/// What a file is opened for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Purpose {
    /// To say what it is, also if it cannot be changed.
    Look,
    /// To use it, and to make it if there is none.
    Make,
    /// To remove it.
    Remove,
}

/// Opens a file of this user alone, in memory.
pub(super) fn open_file(path: &Path, purpose: Purpose) -> Result<OwnedFd, ArenaFileError> {
    let foreign = |what| Err(ArenaFileError::Foreign { path: path.to_owned(), what });
    let missing = || ArenaFileError::Missing { path: path.to_owned() };
    let failed = |doing, error: Errno| match error {
        Errno::ROFS => ArenaFileError::ReadOnly { path: path.to_owned() },
        Errno::NOENT if purpose != Purpose::Make => missing(),
        error => ArenaFileError::Io { doing, path: path.to_owned(), error: error.into() },
    };
    // Before it is opened, which may not be allowed, and has an effect on some devices.
    match lstat(path) {
        Ok(stat) => {
            if let Some(what) = foreign_kind(&stat) {
                return foreign(what);
            }
        }
        Err(Errno::NOENT) if purpose == Purpose::Make => {}
        Err(error) => return Err(failed("examine", error)),
    }
    // Before a file is made.
    let system = statfs(directory_of(path)).map_err(|error| match error {
        Errno::NOENT => ArenaFileError::NoDirectory { directory: directory_of(path).to_owned() },
        error => failed("examine", error),
    })?;
    if !matches!(system.f_type, TMPFS_MAGIC | HUGETLBFS_MAGIC) {
        let path = path.to_owned();
        return Err(match purpose {
            Purpose::Make => ArenaFileError::OnDisk { path },
            Purpose::Look | Purpose::Remove => ArenaFileError::NoArena { path },
        });
    }
    let access = match purpose {
        Purpose::Look => OFlags::RDONLY,
        Purpose::Make => OFlags::RDWR | OFlags::CREATE,
        Purpose::Remove => OFlags::RDWR,
    };
    let flags = access | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = match open(path, flags, Mode::RUSR | Mode::WUSR) {
        Ok(file) => file,
        Err(Errno::LOOP) => return foreign(Foreign::Link),
        Err(error) => return Err(failed("open", error)),
    };
    let stat = fstat(&file).map_err(|error| failed("examine", error))?;
    if let Some(what) = foreign_kind(&stat) {
        return foreign(what);
    }
    if stat.st_mode & 0o077 != 0 {
        return foreign(Foreign::OpenToOthers);
    }
    Ok(file)
}

/// The pages of which a file consists: its length is a multiple of them, and its mapping, too.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Pages {
    /// Those of tmpfs.
    Small,
    /// Huge pages of the system's pool, of so many bytes.
    Huge(usize),
}

impl Pages {
    pub(super) fn of(file: &OwnedFd) -> Result<Self, Errno> {
        let system = fstatfs(file)?;
        Ok(match (system.f_type, usize::try_from(system.f_bsize)) {
            (HUGETLBFS_MAGIC, Ok(bytes)) if bytes.is_power_of_two() => Self::Huge(bytes),
            _ => Self::Small,
        })
    }

    /// Bytes of whole pages that hold so many bytes.
    pub(super) const fn holding(self, bytes: usize) -> usize {
        let unit = match self {
            Self::Small => PAGE_BYTES,
            Self::Huge(unit) => unit,
        };
        match bytes.checked_next_multiple_of(unit) {
            Some(rounded) => rounded,
            None => bytes,
        }
    }
}

/// Bytes that the pool of huge pages of this size has for new files and mappings; `None` if the system does not say it
/// (Documentation/admin-guide/mm/hugetlbpage.rst of Linux).
pub(super) fn pool_bytes(huge_page: usize) -> Option<u64> {
    let number = |name: &str| -> Option<u64> {
        let path = format!("/sys/kernel/mm/hugepages/hugepages-{}kB/{name}", huge_page / 1024);
        fs::read_to_string(path).ok()?.trim().parse().ok()
    };
    let unreserved = number("free_hugepages")?.saturating_sub(number("resv_hugepages")?);
    let may_grow = number("nr_overcommit_hugepages")?.saturating_sub(number("surplus_hugepages")?);
    unreserved.checked_add(may_grow)?.checked_mul(huge_page as u64)
}

/// What is no regular file of this user.
fn foreign_kind(stat: &rustix::fs::Stat) -> Option<Foreign> {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => Some(Foreign::Directory),
        FileType::Symlink => Some(Foreign::Link),
        FileType::RegularFile => {
            (stat.st_uid != geteuid().as_raw()).then_some(Foreign::OfUser(stat.st_uid))
        }
        _ => Some(Foreign::NoRegularFile),
    }
}

/// What a file system lacks that does not make a file for this error; `None` if it is another one.
pub(super) fn lack_of_new_file(path: &Path, error: &std::io::Error) -> Option<Lack> {
    let lack = Lack::of(error, Pages::Small)?;
    // An empty file takes no huge page, and not every hugetlbfs counts its files.
    let has_no_files = statfs(directory_of(path))
        .is_ok_and(|it| it.f_type == HUGETLBFS_MAGIC || it.f_files > 0 && it.f_ffree == 0);
    Some(if lack == Lack::Room && has_no_files { Lack::Files } else { lack })
}

/// Takes an open file for this process. `bluebridge arena list` has it for a moment.
pub(super) fn lock(path: &Path, file: &OwnedFd) -> Result<(), ArenaFileError> {
    let mut tries = 0;
    loop {
        tries += 1;
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(()),
            Err(Errno::WOULDBLOCK) if tries < LOCK_TRIES => thread::sleep(LOCK_PAUSE),
            Err(Errno::WOULDBLOCK) => {
                let header = read_header(file).ok().flatten();
                let process = header.map_or(0, |header| header.process);
                return Err(ArenaFileError::InUse { path: path.to_owned(), process });
            }
            Err(error) => {
                let (doing, path) = ("lock", path.to_owned());
                return Err(ArenaFileError::Io { doing, path, error: error.into() });
            }
        }
    }
}

/// The header of an arena's file; `None` if the file is empty.
pub(super) fn arena_header(path: &Path, file: &OwnedFd) -> Result<Option<Header>, ArenaFileError> {
    let failed = |error: Errno| ArenaFileError::Io {
        doing: "read",
        path: path.to_owned(),
        error: error.into(),
    };
    if fstat(file).map_err(failed)?.st_size == 0 {
        return Ok(None);
    }
    match read_header(file).map_err(failed)? {
        Some(header) => Ok(Some(header)),
        None => Err(ArenaFileError::NoArena { path: path.to_owned() }),
    }
}

/// Whether a file is the copy of one whose arena is in a map, which is not the copy's.
pub(super) fn is_copy(header: &Header, stat: &rustix::fs::Stat) -> bool {
    header.backing == IN_MAP && header.inode != stat.st_ino
}

/// What is wrong with a file for which [`has_other_length`] is true.
pub(super) const OTHER_LENGTH: &str = "it has another length than it says";

/// Whether a file does not have the length that follows from its header, which is not damaged otherwise.
pub(super) fn has_other_length(header: &Header, pages: Pages, stat: &rustix::fs::Stat) -> bool {
    let needed = match header.backing {
        IN_MAP => PAGE_BYTES,
        _ => Layout::of(header).file_bytes(),
    };
    usize::try_from(stat.st_size).ok() != Some(pages.holding(needed))
}

/// Refuses contents in a map that this process does not see, and that only another one can use or free.
pub(super) fn check_visible(
    path: &Path,
    header: &Header,
    stat: &rustix::fs::Stat,
) -> Result<(), ArenaFileError> {
    let is_hidden = header.backing == IN_MAP
        && contents_of(header).is_some()
        && !is_copy(header, stat)
        && map::find(&header.id) == map::Pinned::NotVisible;
    if is_hidden { Err(ArenaFileError::NotVisible { path: path.to_owned() }) } else { Ok(()) }
}

/// Bytes of the map of an arena, without its tables; 0 if it is in its file, or another file's, or not seen.
pub(super) fn map_bytes(header: &Header, stat: &rustix::fs::Stat) -> u64 {
    let bytes = header.shard_bytes.saturating_mul(header.shard_count.into());
    let has_map = header.backing == IN_MAP
        && !is_copy(header, stat)
        && map::find(&header.id) == map::Pinned::Here;
    if has_map { bytes } else { 0 }
}

/// Writes the header into a file whose first page is a huge one and exists: `write` does not work there.
pub(super) fn map_header(file: &OwnedFd, bytes: usize, header: &Header) -> Result<(), Errno> {
    let own = rustix::io::fcntl_dupfd_cloexec(file, 0)?;
    let mut first = memory::map_kept(own, bytes, None)?;
    first[..size_of::<Header>()].copy_from_slice(header.as_bytes());
    Ok(())
}

/// A file that is made beside another one, which it replaces when it is what it is to be. Otherwise it is removed; one
/// that a killed process left is removed by the next one.
#[derive(Debug)]
pub(super) struct Aside<'a> {
    file: Option<OwnedFd>,
    own: PathBuf,
    of: &'a Path,
}

impl<'a> Aside<'a> {
    /// Makes it, and takes it for this process. Whoever calls this has `of` locked, so there is no other.
    pub(super) fn make(of: &'a Path) -> Result<Self, (&'static str, Errno)> {
        let mut own = of.as_os_str().to_owned();
        own.push(".making");
        let own = PathBuf::from(own);
        match unlink(&own) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(("remove what is left beside", error)),
        }
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = open(&own, flags, Mode::RUSR | Mode::WUSR).map_err(|error| ("make", error))?;
        let aside = Self { file: Some(file), own, of };
        let locked = flock(aside.file(), FlockOperation::NonBlockingLockExclusive);
        locked.map_err(|error| ("lock", error))?;
        Ok(aside)
    }

    /// The file.
    pub(super) fn file(&self) -> &OwnedFd {
        self.file.as_ref().expect("it has one until it takes its place")
    }

    /// Replaces the other file.
    pub(super) fn take_place(mut self) -> Result<OwnedFd, Errno> {
        rename(&self.own, self.of)?;
        Ok(self.file.take().expect("as above"))
    }
}

impl Drop for Aside<'_> {
    fn drop(&mut self) {
        if self.file.is_some() {
            let _ = unlink(&self.own);
        }
    }
}

pub(super) fn write_header(file: &OwnedFd, header: &Header) -> Result<(), Errno> {
    let mut written = 0;
    while let Some(rest) = header.as_bytes().get(written..).filter(|rest| !rest.is_empty()) {
        written += rustix::io::pwrite(file, rest, written as u64)?;
    }
    Ok(())
}

/// The header, also one whose first bytes are damaged; `None` if the file is no arena's.
pub(super) fn read_header(file: &OwnedFd) -> Result<Option<Header>, Errno> {
    let mut bytes = [0; size_of::<Header>()];
    let mut read = 0;
    while let Some(rest) = bytes.get_mut(read..).filter(|rest| !rest.is_empty()) {
        match rustix::io::pread(file, rest, read as u64)? {
            0 => return Ok(None),
            count => read += count,
        }
    }
    let header = Header::read_from_bytes(bytes.as_bytes()).ok();
    let inode = fstat(file)?.st_ino;
    Ok(header.filter(|header| header.magic == MAGIC || header.is_of(inode)))
}

/// The node whose contents a file holds; `None` if it holds nothing.
pub(super) fn contents_of(header: &Header) -> Option<Holder> {
    let generation = ArenaGeneration::new(header.generation)?;
    let (node, token) = (NodeId(header.node), header.token);
    (header.state == STATE_FULL).then_some(Holder { node, generation, token })
}

/// The sizes of an arena, in words.
pub(super) fn shape(header: &Header) -> String {
    let Header { shard_bytes, shard_count, space_count, spaces, .. } = header;
    let spaces: Vec<_> =
        spaces.iter().take((*space_count).into()).map(|space| space.to_string()).collect();
    format!("{shard_count} x {shard_bytes} bytes for space {}", spaces.join(", "))
}
