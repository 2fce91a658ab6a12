//! The arena as a BPF map that outlives its process.

use std::{
    ffi::OsStr,
    fs, io,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use aya::{
    Pod,
    maps::{Array, HashMap, MapData, MapError},
    pin::PinError,
};
use bluebridge_bpf::fs as bpf_fs;
use bluebridge_wire::address::PAGE_BYTES;
use rustix::{
    fd::{AsFd as _, OwnedFd},
    io::Errno,
};

use super::{DirectMemory, program::ArenaValue};
use crate::memory;

/// `BPF_F_MMAPABLE` of linux/bpf.h.
const MMAPABLE: u32 = 1 << 10;

/// `BPF_F_NO_PREALLOC` of linux/bpf.h.
const NO_PREALLOC: u32 = 1;

/// How often, and how long between, the kernel is asked for memory that it is giving back in the background.
const MEMORY_TRIES: u32 = 50;
const MEMORY_PAUSE: Duration = Duration::from_millis(100);

/// How often a map is pinned that another process prevents by removing the empty directory.
const PIN_TRIES: u32 = 10;

/// Where in the first page of a map the path of the arena's file is, behind its length in two bytes of the machine's
/// order. Only lists of arenas need it.
const FILE_AT: usize = 1024;

/// The longest such path.
const FILE_MAX: usize = 2048;

const _: () = assert!(bpf_fs::ARENA_ID_AT + 16 <= FILE_AT && FILE_AT + 2 + FILE_MAX <= PAGE_BYTES);

/// Records in a map's first page which file its arena has.
pub(crate) fn note_file(first: &mut [u8], path: &Path) {
    let Ok(path) = fs::canonicalize(path) else { return };
    let bytes = path.as_os_str().as_bytes();
    let Some((length, room)) = first.get_mut(FILE_AT..).and_then(|to| to.split_first_chunk_mut())
    else {
        return;
    };
    // If this process is killed in between, none is recorded.
    *length = [0; 2];
    let room = room.get_mut(..FILE_MAX).and_then(|room| room.get_mut(..bytes.len()));
    if let (Some(to), Ok(count)) = (room, u16::try_from(bytes.len())) {
        to.copy_from_slice(bytes);
        *length = count.to_ne_bytes();
    }
}

/// The file that [`note_file`] recorded.
fn noted_file(first: &[u8]) -> Option<PathBuf> {
    let (length, room) = first.get(FILE_AT..)?.split_first_chunk()?;
    let bytes = room.get(..FILE_MAX)?.get(..u16::from_ne_bytes(*length).into())?;
    (!bytes.is_empty()).then(|| OsStr::from_bytes(bytes).into())
}

/// An arena's map, as it is listed.
pub(crate) struct PinnedMap {
    pub(crate) id: [u8; 16],
    pub(crate) bytes: u64,
    /// The kernel's number of the map.
    number: u32,
    /// The file that the arena had when a server last used it.
    pub(crate) file: Option<PathBuf>,
}

impl PinnedMap {
    /// Another process that has the map open, as far as this user may see that.
    pub(crate) fn user(&self) -> Option<u32> {
        let line = format!("map_id:\t{}", self.number);
        let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        pids.filter(|pid| *pid != std::process::id()).find(|pid| {
            let open = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
            open.filter(|entry| {
                fs::read_link(entry.path())
                    .is_ok_and(|link| link == Path::new("anon_inode:bpf-map"))
            })
            .any(|entry| {
                let name = entry.file_name();
                let about = fs::read_to_string(format!("/proc/{pid}/fdinfo/{}", name.display()));
                about.is_ok_and(|about| about.lines().any(|found| found == line))
            })
        })
    }
}

/// What is pinned there; `None` if it is no arena's map, or gone.
///
/// # Errors
/// The system's error.
pub(crate) fn pinned(pin: &Path) -> io::Result<Option<PinnedMap>> {
    let Some(id) = bpf_fs::arena_of_pin(pin) else { return Ok(None) };
    let map = match MapData::from_pin(pin).map_err(cause) {
        Ok(map) => map,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let info = map.info().map_err(cause)?;
    if info.value_size() as usize != PAGE_BYTES {
        return Ok(None);
    }
    let first = memory::map_kept(own(&map)?, PAGE_BYTES, None)?;
    let bytes = u64::from(info.max_entries()) * PAGE_BYTES as u64;
    Ok(Some(PinnedMap { id, bytes, number: info.id(), file: noted_file(&first) }))
}

/// Where the map of an arena is, as far as this user may see that.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Pinned {
    /// It is pinned.
    Here,
    /// It is not there any more.
    Gone,
    /// It may be in a BPF file system that this process does not see.
    NotVisible,
}

pub(crate) fn find(id: &[u8; 16]) -> Pinned {
    let found = bpf_fs::arena_pin(id).symlink_metadata();
    if !found.is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
        Pinned::Here
    } else if bpf_fs::may_hide_pins() {
        Pinned::NotVisible
    } else {
        Pinned::Gone
    }
}

/// What helps against an error of [`create`].
pub(crate) fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            "start it as root with CAP_BPF and CAP_NET_ADMIN, and with CAP_SYS_ADMIN or a BPF file system at /sys/fs/bpf"
        }
        io::ErrorKind::ReadOnlyFilesystem => {
            "make the BPF file system writable (mount -o remount,rw /sys/fs/bpf)"
        }
        _ if is_shortage(error) => "use less --memory",
        _ => "see that a BPF file system can be at /sys/fs/bpf",
    }
}

/// Makes the map of the arena with an id, pinned and zeroed.
///
/// The kernel allocates all of it at once, which cannot be interrupted: 0.1 s per GiB, or 2 s if the machine is virtual
/// and its host has not provided the memory before.
///
/// # Errors
/// The system's error, `OutOfMemory` if it does not have as much.
pub(crate) fn create(id: &[u8; 16], bytes: usize) -> io::Result<OwnedFd> {
    let values = u32::try_from(bytes / PAGE_BYTES).map_err(|_| io::ErrorKind::OutOfMemory)?;
    let mut tries = 0;
    loop {
        tries += 1;
        match try_create(&bpf_fs::arena_pin(id), values) {
            // Perhaps that of the arena that was given up just now.
            Err(error) if is_shortage(&error) && tries < MEMORY_TRIES => {
                thread::sleep(MEMORY_PAUSE);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound && tries < PIN_TRIES => {}
            created => return created,
        }
    }
}

fn try_create(at: &Path, values: u32) -> io::Result<OwnedFd> {
    make_directory_of(at)?;
    let map = Array::<MapData, ArenaValue>::create(values, MMAPABLE).map_err(cause)?;
    map.pin(at).map_err(pin_cause)?;
    own(&MapData::from_pin(at).map_err(cause)?)
}

/// Makes a table of `K` and `V` with room for so many, which ends with this process. It takes 16 bytes of memory for each
/// at once, and the rest for those that it has.
///
/// # Errors
/// The system's error.
pub(super) fn create_table<K: Pod, V: Pod>(id: &[u8; 16], room: u32) -> io::Result<OwnedFd> {
    let [_, at] = bpf_fs::lent_arena_pins(id);
    make_directory_of(&at)?;
    remove_left(&at)?;
    let table = HashMap::<MapData, K, V>::create(room, NO_PREALLOC).map_err(cause)?;
    // A table gives its descriptor to nobody, except by a name.
    table.pin(&at).map_err(pin_cause)?;
    let map = MapData::from_pin(&at).map_err(cause).and_then(|map| own(&map));
    fs::remove_file(&at)?;
    map
}

/// Removes a name that a process left which was killed; no other process uses the same arena.
fn remove_left(at: &Path) -> io::Result<()> {
    match fs::remove_file(at) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn make_directory_of(pin: &Path) -> io::Result<()> {
    bpf_fs::make(pin.parent().unwrap_or(Path::new("/"))).map_err(|error| {
        match error.source.kind() {
            io::ErrorKind::NotFound => error.source,
            // With what was tried.
            kind => io::Error::new(kind, error),
        }
    })
}

/// A descriptor of its own.
fn own(map: &MapData) -> io::Result<OwnedFd> {
    map.fd().as_fd().try_clone_to_owned()
}

fn pin_cause(error: PinError) -> io::Error {
    match error {
        PinError::SyscallError(error) => error.io_error,
        other => io::Error::new(io::ErrorKind::InvalidInput, other.to_string()),
    }
}

/// Pins a map.
pub(crate) fn pin(map: &OwnedFd, at: &Path) -> io::Result<()> {
    let mut tries = 0;
    loop {
        tries += 1;
        let pinned = make_directory_of(at).and_then(|()| {
            MapData::from_fd(map.try_clone()?).map_err(cause)?.pin(at).map_err(pin_cause)
        });
        match pinned {
            Err(error) if error.kind() == io::ErrorKind::NotFound && tries < PIN_TRIES => {}
            pinned => return pinned,
        }
    }
}

/// What is pinned for an arena.
#[derive(Debug)]
pub(crate) enum Found {
    /// Its map.
    Map(OwnedFd),
    /// A map of another size.
    OtherSize,
    /// Nothing.
    None,
}

/// The map of the arena with an id that an earlier process made.
///
/// # Errors
/// The system's error, for example without root.
pub(crate) fn open(id: &[u8; 16], bytes: usize) -> io::Result<Found> {
    let map = match MapData::from_pin(bpf_fs::arena_pin(id)).map_err(cause) {
        Ok(map) => map,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::None),
        Err(error) => return Err(error),
    };
    let values = map.info().map_err(cause)?.max_entries();
    if usize::try_from(values).ok() != Some(bytes / PAGE_BYTES) {
        return Ok(Found::OtherSize);
    }
    own(&map).map(Found::Map)
}

/// The arena whose map was last used with a file, as far as this user may see maps.
pub(crate) fn named_after(file: &Path) -> Option<[u8; 16]> {
    let file = fs::canonicalize(file).ok()?;
    let maps = bpf_fs::arena_pins().unwrap_or_default().into_iter();
    let mut maps = maps.filter_map(|pin| pinned(&pin).ok().flatten());
    maps.find(|map| map.file.as_ref() == Some(&file)).map(|map| map.id)
}

/// Whether the map of the arena with an id has another size.
pub(crate) fn has_other_size(id: &[u8; 16], bytes: usize) -> bool {
    matches!(open(id, bytes), Ok(Found::OtherSize))
}

/// Gives up the map of the arena with an id, if there is one.
///
/// # Errors
/// The system's error.
pub(crate) fn remove(id: &[u8; 16]) -> io::Result<()> {
    bpf_fs::remove_arena_pin(id).map_err(|error| error.source)
}

/// Names for the maps of an arena while a program is loaded that uses them; removed when this is dropped.
pub(super) struct Lent {
    arena: PathBuf,
    hints: PathBuf,
}

impl Lent {
    /// # Errors
    /// The system's error.
    pub(super) fn new(memory: &DirectMemory) -> io::Result<Self> {
        let [arena, hints] = bpf_fs::lent_arena_pins(&memory.id);
        let lent = Self { arena, hints };
        for (map, at) in [(&memory.map, &lent.arena), (memory.hints.map(), &lent.hints)] {
            remove_left(at)?;
            pin(map, at)?;
        }
        Ok(lent)
    }

    /// The name of the arena.
    pub(super) fn arena(&self) -> &Path {
        &self.arena
    }

    /// The name of the hints.
    pub(super) fn hints(&self) -> &Path {
        &self.hints
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.arena);
        let _ = fs::remove_file(&self.hints);
    }
}

/// The system's error.
pub(super) fn cause(error: MapError) -> io::Error {
    match error {
        MapError::CreateError { io_error, .. } => io_error,
        MapError::SyscallError(error) => error.io_error,
        MapError::IoError(error) => error,
        other => io::Error::new(io::ErrorKind::InvalidInput, other.to_string()),
    }
}

/// Whether the kernel has no memory.
pub(crate) fn is_shortage(error: &io::Error) -> bool {
    let number = error.raw_os_error().map(Errno::from_raw_os_error);
    error.kind() == io::ErrorKind::OutOfMemory
        || matches!(number, Some(Errno::NOMEM | Errno::TOOBIG))
}
