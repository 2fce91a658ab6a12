//! The BPF file system: what is pinned there outlives its process.

use std::{
    error, fmt, fs,
    io::{self, Read as _},
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _},
    path::{Path, PathBuf},
};

use rustix::{
    fs::statfs,
    io::Errno,
    mount::{MountFlags, UnmountFlags, mount, unmount},
    process::geteuid,
};

/// Where it is mounted.
const ROOT: &str = "/sys/fs/bpf";

/// The directory of the switches' pins.
pub const HOME: &str = "/sys/fs/bpf/bluebridge";

/// The directory of the arenas' pins.
const ARENAS: &str = "/sys/fs/bpf/bluebridge-arenas";

/// The source name of our mount in the list of mounts.
const SOURCE: &str = "bluebridge";

/// `BPF_FS_MAGIC` of linux/magic.h.
const BPF_FS_MAGIC: u64 = 0xcafe_4a11;

/// What failed.
#[derive(Debug)]
pub struct FsError {
    /// What was tried, after "cannot".
    pub doing: String,
    /// The system's error.
    pub source: io::Error,
}

impl fmt::Display for FsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { doing, source } = self;
        write!(f, "cannot {doing}: {source}")
    }
}

impl error::Error for FsError {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        Some(&self.source)
    }
}

fn failed(doing: &str, source: io::Error) -> FsError {
    FsError { doing: doing.to_owned(), source }
}

/// Mounts the file system if it is not, and creates a directory in it that only this user can change.
///
/// # Errors
/// [`FsError`], for example without root, or if another user has made the directory.
pub fn make(directory: &Path) -> Result<(), FsError> {
    if !is_mounted()? {
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        mount(SOURCE, ROOT, "bpf", flags, Some(c"mode=0700"))
            .map_err(|e| failed("mount the BPF file system at /sys/fs/bpf", e.into()))?;
    }
    let made = |e| failed(&format!("make {}", directory.display()), e);
    fs::DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(made)?;
    let found = fs::metadata(directory).map_err(made)?;
    if found.uid() != geteuid().as_raw() || found.mode() & 0o022 != 0 {
        let words = "another user made it or can change it; remove it first";
        return Err(made(io::Error::new(io::ErrorKind::PermissionDenied, words)));
    }
    Ok(())
}

/// Removes the project's directories if they are empty, and the file system if this project mounted it and nothing is
/// pinned.
///
/// # Errors
/// [`FsError`].
pub fn tidy() -> Result<(), FsError> {
    if !is_mounted()? {
        return Ok(());
    }
    // These calls fail, correctly, if something uses the directories.
    let _ = fs::remove_dir(ARENAS);
    let _ = fs::remove_dir(HOME);
    if is_empty() && is_ours() {
        match unmount(ROOT, UnmountFlags::empty()) {
            // Another process has begun to use it, or was faster.
            Ok(()) | Err(Errno::BUSY | Errno::INVAL) => {}
            Err(error) => return Err(failed("unmount /sys/fs/bpf", error.into())),
        }
    }
    Ok(())
}

/// Whether a directory is on such a file system.
#[must_use]
pub fn holds(directory: &Path) -> bool {
    statfs(directory)
        .is_ok_and(|found| u64::try_from(found.f_type).is_ok_and(|magic| magic == BPF_FS_MAGIC))
}

/// Whether the file system is mounted.
///
/// # Errors
/// [`FsError`] if the system has no place for it.
pub fn is_mounted() -> Result<bool, FsError> {
    match statfs(ROOT) {
        Ok(found) => Ok(u64::try_from(found.f_type).is_ok_and(|magic| magic == BPF_FS_MAGIC)),
        Err(error) => Err(failed("look at /sys/fs/bpf", error.into())),
    }
}

/// The first bytes of every arena's file.
pub const ARENA_MAGIC: [u8; 8] = *b"BBARENA\0";

/// Where in an arena's file its id is, 16 bytes.
pub const ARENA_ID_AT: usize = 56;

/// Where in an arena's file the file's own inode number is, 8 bytes in the machine's order. A copy has another one.
pub const ARENA_INODE_AT: usize = ARENA_ID_AT + 16;

/// The id of the arena of a file; `None` if the file is none of an arena, or a copy of one.
///
/// # Errors
/// The system's error if it cannot be read.
pub fn arena_id(file: &Path) -> io::Result<Option<[u8; 16]>> {
    let mut start = [0; ARENA_INODE_AT + 8];
    let mut file = fs::File::open(file)?;
    match file.read_exact(&mut start) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    }
    let is_own = start.ends_with(&file.metadata()?.ino().to_ne_bytes());
    let id = start[ARENA_ID_AT..].first_chunk().filter(|_| start.starts_with(&ARENA_MAGIC));
    Ok(id.filter(|_| is_own).copied())
}

fn name_of(id: &[u8; 16]) -> String {
    format!("{:032x}", u128::from_be_bytes(*id))
}

/// Where the memory of the arena with an id is pinned, if it is in a map.
#[must_use]
pub fn arena_pin(id: &[u8; 16]) -> PathBuf {
    Path::new(ARENAS).join(name_of(id))
}

/// A second pin of the same memory, while a program is loaded that uses it.
#[must_use]
pub fn lent_arena_pin(id: &[u8; 16]) -> PathBuf {
    // This file system has no names with a dot.
    Path::new(ARENAS).join(name_of(id) + "-loading")
}

/// Removes the pins of an arena, if there are any; its memory is freed when no process uses it.
///
/// # Errors
/// [`FsError`] if one is there and cannot be removed.
pub fn remove_arena_pin(id: &[u8; 16]) -> Result<(), FsError> {
    // A server that was killed while it loaded its program has left the second one.
    for pin in [lent_arena_pin(id), arena_pin(id)] {
        match fs::remove_file(&pin) {
            // The file system may be in use again already.
            Ok(()) => drop(tidy()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            // Without root one cannot even see whether it is there, and cannot have made it.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
            Err(error) => return Err(failed(&format!("remove {}", pin.display()), error)),
        }
    }
    Ok(())
}

/// Whether nothing is pinned; the kernel itself creates two iterators in every mount.
fn is_empty() -> bool {
    let is_kernels = |entry: io::Result<fs::DirEntry>| {
        entry.is_ok_and(|e| ["maps.debug", "progs.debug"].iter().any(|name| e.file_name() == *name))
    };
    fs::read_dir(ROOT).is_ok_and(|mut entries| entries.all(is_kernels))
}

fn is_ours() -> bool {
    let line = format!("{SOURCE} {ROOT} bpf ");
    fs::read_to_string("/proc/self/mounts")
        .is_ok_and(|mounts| mounts.lines().any(|mount| mount.starts_with(&line)))
}
