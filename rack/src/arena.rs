//! The files in memory in which a rack's memory servers keep their memory, so that it outlives them.

use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access, statfs};

use crate::spec::{Node, RackSpec};
use crate::state::RackDirectory;

/// A file system in memory that every Linux has. The one in which racks are recorded is too small.
const DIRECTORY: &str = "/dev/shm";

/// `bluebridge arena list` shows the files whose names begin so.
const PREFIX: &str = "bluebridge-arena-rack";

const TMPFS_MAGIC: i64 = 0x0102_1994;

/// The beginning of the names of a rack's files. Racks of several users may have the same name, but not the
/// same directory.
fn prefix(directory: &Path) -> String {
    let mut hasher = DefaultHasher::new();
    directory.hash(&mut hasher);
    let name = directory.file_name().unwrap_or_default().to_string_lossy();
    format!("{PREFIX}-{:08x}-{name}-", hasher.finish() & 0xffff_ffff)
}

/// The file of a memory server; `None` if this machine has no room for the files of all servers of the rack.
pub(crate) fn file(directory: &Path, spec: &RackSpec, server: Node) -> Option<PathBuf> {
    access(DIRECTORY, Access::WRITE_OK).ok()?;
    let system = statfs(DIRECTORY).ok().filter(|system| system.f_type == TMPFS_MAGIC)?;
    let free = system.f_bavail.saturating_mul(u64::try_from(system.f_bsize).unwrap_or(0));
    // With tables of page states and of clients.
    let each = spec.memory.0.saturating_add(spec.memory.0 / 64).saturating_add(1 << 20);
    let has_room = system.f_blocks == 0 || each.saturating_mul(spec.servers.into()) < free;
    has_room.then(|| Path::new(DIRECTORY).join(prefix(directory) + &server.to_string()))
}

/// Removes the files of a rack whose servers do not run; returns their number.
///
/// # Errors
/// The system's error for the first that cannot be removed; the others are.
pub(crate) fn remove(directory: &RackDirectory) -> io::Result<usize> {
    let prefix = prefix(directory.path());
    let entries = match fs::read_dir(DIRECTORY) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(error),
    };
    let (mut removed, mut result) = (0, Ok(()));
    for entry in entries.flatten() {
        if entry.file_name().to_string_lossy().starts_with(&prefix) {
            match fs::remove_file(entry.path()) {
                Ok(()) => removed += 1,
                Err(error) => result = result.and(Err(error)),
            }
        }
    }
    result.map(|()| removed)
}
