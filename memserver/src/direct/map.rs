//! The arena as a BPF map that outlives its process.

use std::{fs, io, path::Path, thread, time::Duration};

use aya::{
    maps::{Array, MapData, MapError},
    pin::PinError,
};
use bluebridge_bpf::fs as bpf_fs;
use bluebridge_wire::address::PAGE_BYTES;
use rustix::{
    fd::{AsFd as _, OwnedFd},
    io::Errno,
};

use super::{DirectMemory, program::ArenaValue};

/// `BPF_F_MMAPABLE` of linux/bpf.h.
const MMAPABLE: u32 = 1 << 10;

/// How often, and how long between, the kernel is asked for memory that it is giving back in the background.
const MEMORY_TRIES: u32 = 50;
const MEMORY_PAUSE: Duration = Duration::from_millis(100);

/// How often a map is pinned that another process prevents by removing the empty directory.
const PIN_TRIES: u32 = 10;

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

fn make_directory_of(pin: &Path) -> io::Result<()> {
    bpf_fs::make(pin.parent().unwrap_or(Path::new("/"))).map_err(|error| error.source)
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

/// The map of the arena with an id that an earlier process made; `None` if it is gone.
///
/// # Errors
/// The system's error, for example without root.
pub(crate) fn open(id: &[u8; 16], bytes: usize) -> io::Result<Option<OwnedFd>> {
    let map = match MapData::from_pin(bpf_fs::arena_pin(id)).map_err(cause) {
        Ok(map) => map,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let values = map.info().map_err(cause)?.max_entries();
    if usize::try_from(values).ok() != Some(bytes / PAGE_BYTES) {
        return Ok(None);
    }
    own(&map).map(Some)
}

/// Gives up the map of the arena with an id, if there is one.
///
/// # Errors
/// The system's error.
pub(crate) fn remove(id: &[u8; 16]) -> io::Result<()> {
    bpf_fs::remove_arena_pin(id).map_err(|error| error.source)
}

/// A name for a map while a program is loaded that uses it; removed when this is dropped.
pub(super) struct Lent(pub(super) std::path::PathBuf);

impl Lent {
    /// # Errors
    /// The system's error.
    pub(super) fn new(memory: &DirectMemory) -> io::Result<Self> {
        // No other process loads a program for the same arena; one that was killed may have left it.
        let at = bpf_fs::lent_arena_pin(&memory.id);
        match fs::remove_file(&at) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        pin(&memory.map, &at)?;
        Ok(Self(at))
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
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
