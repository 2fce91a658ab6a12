//! The BPF file system: what is pinned there outlives its process.

use std::{
    error, fmt, fs,
    io::{self, Read as _},
    iter,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{Mode, OFlags, open, statfs},
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

/// How often a directory is made that others remove meanwhile.
const MAKE_TRIES: usize = 16;

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
    // Another process may remove the parent, which is empty before this, or unmount the file system at the same time.
    let is_gone = |made: &Result<(), FsError>| {
        made.as_ref().is_err_and(|error| error.source.kind() == io::ErrorKind::NotFound)
    };
    let mut tries = iter::repeat_with(|| try_make(directory)).take(MAKE_TRIES);
    tries.find(|made| !is_gone(made)).unwrap_or_else(|| try_make(directory))
}

fn try_make(directory: &Path) -> Result<(), FsError> {
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

/// Whether what is pinned ends before the machine does: the file system is mounted in a mount namespace of this process
/// and not in that of its first ancestor, as far as it may look at that one.
#[must_use]
pub fn ends_with_namespace() -> bool {
    let first = device_of_first_ancestor();
    first.is_some() && first != device("")
}

/// Whether pins may be where this process does not see them: the file system of its first visible ancestor is another
/// one, as under `ip netns exec`, or none is mounted here and no ancestor shows that this is right. What this project has
/// unmounted because nothing was pinned is hidden from no process.
#[must_use]
pub fn may_hide_pins() -> bool {
    match device_of_first_ancestor() {
        Some(first) => Some(first) != device(""),
        None => !is_mounted().unwrap_or(false),
    }
}

/// The device at the file system's place, below a root directory.
fn device(root: &str) -> Option<u64> {
    fs::metadata(format!("{root}{ROOT}")).map(|found| found.dev()).ok()
}

/// The same of the first ancestor that this process may look at.
fn device_of_first_ancestor() -> Option<u64> {
    let roots = ancestors().into_iter().map(|process| format!("/proc/{process}/root"));
    roots.rev().find_map(|root| device(&root))
}

/// The most ancestors that are followed.
const ANCESTORS_MAX: usize = 1000;

/// The ancestors of this process, the nearest first.
fn ancestors() -> Vec<u32> {
    let parent = |process: &u32| {
        let status = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        // The name may contain anything; the state follows it.
        let (_, rest) = status.rsplit_once(')')?;
        rest.split_whitespace().nth(1)?.parse().ok().filter(|parent| *parent != 0)
    };
    let all = iter::successors(Some(std::process::id()), parent);
    all.skip(1).take(ANCESTORS_MAX).collect()
}

/// Makes the directory of the arenas' pins, as [`make`].
///
/// # Errors
/// [`FsError`].
pub fn make_arenas() -> Result<(), FsError> {
    make(Path::new(ARENAS))
}

/// The first bytes of every arena's file.
pub const ARENA_MAGIC: [u8; 8] = *b"BBARENA\0";

/// The version of the layout of arenas' files, and of their memory: it changes with every change of it.
pub const ARENA_VERSION: u32 = 4;

/// Where in an arena's file its version is, 4 bytes in the machine's order.
pub const ARENA_VERSION_AT: usize = 8;

/// Where in an arena's file its state is, 4 bytes in the machine's order, and the last state that there is.
pub const ARENA_STATE_AT: usize = 12;
/// See [`ARENA_STATE_AT`].
pub const ARENA_STATE_MAX: u32 = 2;

/// Where in an arena's file it says where the memory is, 4 bytes in the machine's order.
pub const ARENA_BACKING_AT: usize = ARENA_ID_AT - 4;

/// The memory is in a BPF map.
pub const ARENA_IN_MAP: u32 = 1;

/// Where in an arena's file its id is, 16 bytes.
pub const ARENA_ID_AT: usize = 56;

/// Where in an arena's file the file's own inode number is, 8 bytes in the machine's order. A copy has another one.
pub const ARENA_INODE_AT: usize = ARENA_ID_AT + 16;

/// Opens a regular file of this user for reading; `None` if there is none of this name. Every user can put symbolic
/// links and FIFOs into the directory of the arenas.
///
/// # Errors
/// The system's error.
pub fn open_own(file: &Path) -> io::Result<Option<fs::File>> {
    let is_own = |found: &fs::Metadata| found.is_file() && found.uid() == geteuid().as_raw();
    // Before it is opened: that alone has an effect on some devices.
    match fs::symlink_metadata(file) {
        Ok(found) if is_own(&found) => {}
        Ok(_) => return Ok(None),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    }
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    match open(file, flags, Mode::empty()) {
        Ok(file) => {
            let file = fs::File::from(file);
            Ok(is_own(&file.metadata()?).then_some(file))
        }
        Err(Errno::LOOP | Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// What the beginning of an arena's file says.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ArenaHead {
    /// The version of its layout.
    pub version: u32,
    /// Whether the memory is in a BPF map. Only true of [`ARENA_VERSION`].
    pub is_in_map: bool,
    /// Its id.
    pub id: [u8; 16],
    /// Whether its first bytes or its state cannot be those of such a file, although the rest says that it is one.
    pub is_damaged: bool,
}

/// The id of the arena of a file; `None` if the file is none of an arena, a copy of one, or not a regular file of this
/// user.
///
/// # Errors
/// The system's error if it cannot be read.
pub fn arena_id(file: &Path) -> io::Result<Option<[u8; 16]>> {
    Ok(arena_head(file)?.map(|head| head.id))
}

/// What the beginning of a file says; `None` if [`arena_id`] is.
///
/// # Errors
/// The system's error if it cannot be read.
pub fn arena_head(file: &Path) -> io::Result<Option<ArenaHead>> {
    let mut start = [0; ARENA_INODE_AT + 8];
    let Some(mut file) = open_own(file)? else { return Ok(None) };
    match file.read_exact(&mut start) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    }
    let is_own = start.ends_with(&file.metadata()?.ino().to_ne_bytes());
    if !is_own {
        return Ok(None);
    }
    let number =
        |at: usize| start[at..].first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes));
    let version = number(ARENA_VERSION_AT);
    let has_magic = start.starts_with(&ARENA_MAGIC);
    // No other file has its own inode number and this version there.
    if !has_magic && version != ARENA_VERSION {
        return Ok(None);
    }
    let is_this = version == ARENA_VERSION;
    let is_in_map = is_this && number(ARENA_BACKING_AT) == ARENA_IN_MAP;
    let is_damaged = !has_magic || is_this && number(ARENA_STATE_AT) > ARENA_STATE_MAX;
    let id = start[ARENA_ID_AT..].first_chunk();
    Ok(id.map(|id| ArenaHead { version, is_in_map, id: *id, is_damaged }))
}

fn name_of(id: &[u8; 16]) -> String {
    format!("{:032x}", u128::from_be_bytes(*id))
}

/// The end of the name of a second pin. This file system has no names with a dot.
const LOADING: &str = "-loading";
const LOADING_HINTS: &str = "-loading-hints";

/// Where the memory of the arena with an id is pinned, if it is in a map.
#[must_use]
pub fn arena_pin(id: &[u8; 16]) -> PathBuf {
    Path::new(ARENAS).join(name_of(id))
}

/// A second pin of the same memory, while a program is loaded that uses it, and that of what else it shares with the
/// server.
#[must_use]
pub fn lent_arena_pins(id: &[u8; 16]) -> [PathBuf; 2] {
    [LOADING, LOADING_HINTS].map(|end| Path::new(ARENAS).join(name_of(id) + end))
}

/// All pins that an arena may have; that of its memory is the last one.
fn all_pins(id: &[u8; 16]) -> [PathBuf; 3] {
    let [memory, hints] = lent_arena_pins(id);
    [hints, memory, arena_pin(id)]
}

/// The arena whose memory is pinned there; `None` if it is no such place.
#[must_use]
pub fn arena_of_pin(pin: &Path) -> Option<[u8; 16]> {
    let name = pin.file_name()?.to_str()?;
    let name =
        [LOADING, LOADING_HINTS].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
    let id = u128::from_str_radix(name, 16).ok()?.to_be_bytes();
    all_pins(&id).iter().any(|known| known == pin).then_some(id)
}

/// All pins of arenas, if this user may see them.
///
/// # Errors
/// The system's error.
pub fn arena_pins() -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(ARENAS) {
        Ok(entries) => entries,
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied
            ) =>
        {
            return Ok(Vec::new());
        }
        Err(error) => return Err(error),
    };
    let mut pins = Vec::new();
    for entry in entries {
        pins.push(entry?.path());
    }
    pins.retain(|pin| arena_of_pin(pin).is_some());
    pins.sort_unstable();
    Ok(pins)
}

/// Removes the pins of an arena, if there are any; its memory is freed when no process uses it.
///
/// # Errors
/// [`FsError`] if one is there and cannot be removed.
pub fn remove_arena_pin(id: &[u8; 16]) -> Result<(), FsError> {
    // A server that was killed while it loaded its program has left the others.
    for pin in all_pins(id) {
        remove_pin(&pin)?;
    }
    Ok(())
}

fn remove_pin(pin: &Path) -> Result<(), FsError> {
    // A file system that is read-only says so before it says that there is no such name.
    let is_there = pin.symlink_metadata().is_ok();
    match fs::remove_file(pin) {
        // The file system may be in use again already.
        Ok(()) => drop(tidy()),
        Err(_) if !is_there => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        // Without root one cannot even see whether it is there, and cannot have made it.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
        Err(error) => return Err(failed(&format!("remove {}", pin.display()), error)),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_pins_of_arenas_are_known_as_such() {
        let id = *b"an arena's name!";
        for pin in all_pins(&id) {
            assert_eq!(arena_of_pin(&pin), Some(id));
        }
        let name = name_of(&id);
        for other in [
            format!("{HOME}/{name}"),
            format!("{ARENAS}/{name}0"),
            format!("{ARENAS}/{}", &name[1..]),
            format!("{ARENAS}/{}", name.to_uppercase()),
            format!("{ARENAS}/x/{name}"),
            format!("{ARENAS}/{name}-other"),
            ARENAS.to_owned(),
            "/".to_owned(),
        ] {
            assert_eq!(arena_of_pin(Path::new(&other)), None, "{other}");
        }
    }

    #[test]
    fn ancestors_begin_with_the_parent() {
        assert_eq!(ancestors().first(), Some(&std::os::unix::process::parent_id()));
    }
}
