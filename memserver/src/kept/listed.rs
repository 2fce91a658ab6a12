//! The files of arenas that there are, and dropping one.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use rustix::{
    fs::{FlockOperation, flock, fstat},
    io::Errno,
};

use super::{
    ArenaFileError, Holder,
    access::{
        arena_header, contents_of, is_copy, map_bytes, occupied, open_file, read_header, take_file,
    },
    file::{DIRECTORY, PREFIX},
    layout::IN_MAP,
};
use crate::direct::map;

/// An arena's file, as it is listed.
#[derive(Clone, Debug)]
pub struct Listed {
    /// The file.
    pub path: PathBuf,
    /// Bytes of memory that it occupies.
    pub bytes: u64,
    /// Whether it is an arena's file, also one that is only being made.
    pub is_arena: bool,
    /// The node and generation of its contents; `None` if it holds nothing or cannot be read.
    pub holder: Option<Holder>,
    /// The process that uses it.
    pub process: Option<u32>,
    /// Whether its memory is in a BPF map.
    pub is_direct: bool,
}

/// The arenas' files of this user in the default directory.
///
/// # Errors
/// The system's error.
pub fn list() -> io::Result<Vec<Listed>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(DIRECTORY)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(PREFIX)
            && let Ok(listed) = Listed::of(&entry.path())
        {
            found.push(listed);
        }
    }
    found.sort_unstable_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

impl Listed {
    /// What a file is.
    ///
    /// # Errors
    /// [`ArenaFileError`] if it cannot be read.
    pub fn of(path: &Path) -> Result<Self, ArenaFileError> {
        let file = open_file(path, false)?;
        let failed = |error: Errno| ArenaFileError::Io {
            doing: "read",
            path: path.to_owned(),
            error: error.into(),
        };
        let header = read_header(&file).map_err(failed)?;
        let stat = fstat(&file).map_err(failed)?;
        let is_free = flock(&file, FlockOperation::NonBlockingLockShared).is_ok();
        let is_arena = header.is_some() || stat.st_size == 0;
        let process = header.map_or(0, |header| header.process);
        let holder = header.and_then(|header| contents_of(&header));
        Ok(Self {
            path: path.to_owned(),
            bytes: occupied(&stat)
                .saturating_add(header.as_ref().map_or(0, |header| map_bytes(header, &stat))),
            is_arena,
            holder,
            process: (is_arena && !is_free).then_some(process),
            is_direct: header.is_some_and(|header| header.backing == IN_MAP),
        })
    }

    /// Removes the file, and with it the contents. A copy of a file whose arena is in a map has none.
    ///
    /// # Errors
    /// [`ArenaFileError`] if a process uses it, or it is no arena's file; then it stays.
    pub fn drop_file(path: &Path) -> Result<(), ArenaFileError> {
        let file = take_file(path, false)?;
        let failed = |doing, error| ArenaFileError::Io { doing, path: path.to_owned(), error };
        let stat = fstat(&file).map_err(|error| failed("examine", error.into()))?;
        let header = arena_header(path, &file)?;
        if let Some(header) = header.filter(|header| !is_copy(header, &stat)) {
            map::remove(&header.id).map_err(|error| failed("remove the memory of", error))?;
        }
        rustix::fs::unlink(path).map_err(|error| failed("remove", error.into()))
    }
}
