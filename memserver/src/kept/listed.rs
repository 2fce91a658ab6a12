//! The files of arenas that there are, and dropping one.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use bluebridge_bpf::fs as bpf_fs;
use rustix::{
    fs::{FlockOperation, flock, fstat},
    io::Errno,
};

use super::{
    ArenaFileError, Holder,
    access::{
        OTHER_LENGTH, Pages, Purpose, arena_header, check_visible, contents_of, has_other_length,
        is_copy, map_bytes, occupied, open_file, read_header, take_file,
    },
    error::directory_of,
    file::{DIRECTORY, OTHER_SIZE, PREFIX, other_map},
    layout::{Header, IN_MAP, Layout, STATE_NEW, VERSION},
};
use crate::direct::map::{self, Pinned, PinnedMap};

/// Whether a header says what this version understands.
fn is_known(header: &Header) -> bool {
    header.version == VERSION && header.damage().is_none()
}

/// What is wrong with a header of this version.
fn damage_of(
    path: &Path,
    header: &Header,
    pages: Pages,
    stat: &rustix::fs::Stat,
    place: Place,
) -> Option<String> {
    if let Some(damage) = header.damage() {
        return Some(damage.to_owned());
    }
    // The file and the map of an arena that is being made get their sizes later.
    let is_made = header.state != STATE_NEW;
    match place {
        Place::OfOriginal => None,
        Place::Gone => map::named_after(path).map(|other| other_map(&other)),
        _ if is_made && has_other_length(header, pages, stat) => Some(OTHER_LENGTH.to_owned()),
        Place::InMap if is_made => {
            let bytes = Layout::of(header).file_bytes();
            map::has_other_size(&header.id, bytes).then(|| OTHER_SIZE.to_owned())
        }
        _ => None,
    }
}

/// Where the memory of an arena is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Place {
    /// Nowhere: it was in a BPF map, and that is gone.
    Gone,
    /// In the file.
    InFile,
    /// In a BPF map.
    InMap,
    /// In a BPF map that no file describes, so no server can use it.
    InMapAlone,
    /// In a BPF map that this process does not see, or nowhere.
    NotVisible,
    /// In the BPF map of the file of which this is a copy.
    OfOriginal,
}

/// An arena's file, as it is listed, or a map without a file.
#[derive(Clone, Debug)]
pub struct Listed {
    /// The file, or where the map is pinned.
    pub path: PathBuf,
    /// The id of an arena in a map.
    pub id: Option<[u8; 16]>,
    /// Bytes of memory that it occupies.
    pub bytes: u64,
    /// Whether it is an arena's file, also one that is only being made.
    pub is_arena: bool,
    /// The version of its layout, if the file says it.
    pub version: Option<u32>,
    /// The node and generation of its contents; `None` if it holds nothing or cannot be read.
    pub holder: Option<Holder>,
    /// The process that uses it.
    pub process: Option<u32>,
    /// Where its memory is.
    pub place: Place,
    /// What is wrong with its header, as far as that can be seen without its contents.
    pub damage: Option<String>,
}

/// The arenas' files of this user in the default directory, and what is in a BPF map besides: arenas whose file is
/// elsewhere, and maps without a file.
///
/// # Errors
/// [`ArenaFileError`] if a part of them cannot be listed; what is found besides is there nevertheless.
pub fn list() -> (Vec<Listed>, Result<(), ArenaFileError>) {
    let mut found = Vec::new();
    let files = list_files(&mut found);
    let maps = list_maps(&mut found);
    (found, files.and(maps))
}

fn list_files(found: &mut Vec<Listed>) -> Result<(), ArenaFileError> {
    let directory = Path::new(DIRECTORY);
    let entries = fs::read_dir(directory).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => ArenaFileError::NoDirectory { directory: directory.to_owned() },
        _ => ArenaFileError::Io { doing: "list", path: directory.to_owned(), error },
    })?;
    for entry in entries.flatten() {
        if entry.file_name().to_string_lossy().starts_with(PREFIX)
            && let Ok(listed) = Listed::of(&entry.path())
        {
            found.push(listed);
        }
    }
    found.sort_unstable_by(|a, b| a.path.cmp(&b.path));
    Ok(())
}

/// Adds what is in a BPF map and not among the files.
fn list_maps(found: &mut Vec<Listed>) -> Result<(), ArenaFileError> {
    let in_map = found.iter().filter(|listed| listed.place == Place::InMap);
    let mut known: Vec<_> = in_map.filter_map(|listed| listed.id).collect();
    let pins = bpf_fs::arena_pins().map_err(|error| {
        let path = bpf_fs::arena_pin(&[0; 16]);
        ArenaFileError::Io { doing: "list", path: directory_of(&path).to_owned(), error }
    })?;
    for pin in pins {
        let map = match map::pinned(&pin) {
            Ok(Some(map)) if !known.contains(&map.id) => map,
            // It may be removed meanwhile.
            Ok(_) => continue,
            // Something else of such a name must not hide the others.
            Err(_) => {
                found.push(Listed::of_foreign_pin(pin));
                continue;
            }
        };
        known.push(map.id);
        found.push(Listed::of_map(pin, map));
    }
    Ok(())
}

/// The file of this name, or where the map of the arena with this id is pinned.
#[must_use]
pub fn place_named(name: &Path) -> PathBuf {
    let id = name.to_str().filter(|text| text.len() == 32 && !name.exists());
    let id = id.and_then(|text| u128::from_str_radix(text, 16).ok());
    id.map_or_else(|| name.to_owned(), |id| bpf_fs::arena_pin(&id.to_be_bytes()))
}

impl Listed {
    /// What a map is whose file has another name than those by default.
    fn of_map(pin: PathBuf, map: PinnedMap) -> Self {
        let file = map.file.as_ref().and_then(|file| Self::of(file).ok());
        let is_its = |listed: &Self| listed.place == Place::InMap && listed.id == Some(map.id);
        file.filter(is_its).unwrap_or_else(|| Self {
            path: pin,
            id: Some(map.id),
            bytes: map.bytes,
            is_arena: true,
            version: None,
            holder: None,
            process: map.user(),
            place: Place::InMapAlone,
            damage: None,
        })
    }

    /// A pin that cannot be read as a map.
    const fn of_foreign_pin(pin: PathBuf) -> Self {
        let (id, holder, process) = (None, None, None);
        let place = Place::InMapAlone;
        let damage = None;
        Self {
            path: pin,
            id,
            bytes: 0,
            is_arena: false,
            version: None,
            holder,
            process,
            place,
            damage,
        }
    }

    /// What a file is, or a pinned map.
    ///
    /// # Errors
    /// [`ArenaFileError`] if it cannot be read.
    pub fn of(path: &Path) -> Result<Self, ArenaFileError> {
        if bpf_fs::arena_of_pin(path).is_some() {
            return Self::of_pin(path);
        }
        let file = open_file(path, Purpose::Look)?;
        let failed = |error: Errno| ArenaFileError::Io {
            doing: "read",
            path: path.to_owned(),
            error: error.into(),
        };
        let header = read_header(&file).map_err(failed)?;
        let (stat, pages) = (fstat(&file).map_err(failed)?, Pages::of(&file).map_err(failed)?);
        let is_free = flock(&file, FlockOperation::NonBlockingLockShared).is_ok();
        let is_arena = header.is_some() || stat.st_size == 0;
        let process = header.map_or(0, |header| header.process);
        let holder = header.and_then(|header| contents_of(&header));
        let in_map = header.filter(|header| header.backing == IN_MAP);
        let place = match &in_map {
            None => Place::InFile,
            Some(header) if is_copy(header, &stat) => Place::OfOriginal,
            Some(header) => match map::find(&header.id) {
                // Where the memory of another version is, or what a damaged header meant, is not known.
                Pinned::Gone | Pinned::NotVisible if !is_known(header) => Place::InFile,
                Pinned::Gone => Place::Gone,
                Pinned::Here => Place::InMap,
                Pinned::NotVisible => Place::NotVisible,
            },
        };
        let known = header.filter(|header| header.version == VERSION);
        let damage = known.and_then(|header| damage_of(path, &header, pages, &stat, place));
        // What a damaged header says of its contents need not be so.
        let holder = holder.filter(|_| damage.is_none());
        Ok(Self {
            path: path.to_owned(),
            id: in_map.map(|header| header.id),
            bytes: occupied(pages, &stat)
                .saturating_add(header.as_ref().map_or(0, |header| map_bytes(header, &stat))),
            is_arena,
            version: header.map(|header| header.version),
            holder,
            process: (is_arena && !is_free).then_some(process),
            place,
            damage,
        })
    }

    fn of_pin(pin: &Path) -> Result<Self, ArenaFileError> {
        let failed = |error| ArenaFileError::Io { doing: "open", path: pin.to_owned(), error };
        match map::pinned(pin).map_err(failed)? {
            Some(map) => Ok(Self::of_map(pin.to_owned(), map)),
            None if pin.symlink_metadata().is_ok() => {
                Err(ArenaFileError::NoArena { path: pin.to_owned() })
            }
            None => {
                let id = bpf_fs::arena_of_pin(pin).map(u128::from_be_bytes).unwrap_or_default();
                let may_be_hidden = bpf_fs::may_hide_pins();
                Err(ArenaFileError::UnknownId { id: format!("{id:032x}"), may_be_hidden })
            }
        }
    }

    /// Removes the file, and with it the contents. A copy of a file whose arena is in a map has none. Of a map that no
    /// file describes, removes the pin.
    ///
    /// # Errors
    /// [`ArenaFileError`] if a process uses it, it is no arena's file, or the memory of another file; then it stays.
    pub fn drop_file(path: &Path) -> Result<(), ArenaFileError> {
        if let Some(id) = bpf_fs::arena_of_pin(path) {
            return Self::drop_map(path, &id);
        }
        let file = take_file(path, Purpose::Remove)?;
        let failed = |doing, error| ArenaFileError::Io { doing, path: path.to_owned(), error };
        let stat = fstat(&file).map_err(|error| failed("examine", error.into()))?;
        let header = arena_header(path, &file)?;
        if let Some(header) = header.filter(|header| !is_copy(header, &stat)) {
            check_visible(path, &header, &stat)?;
            map::remove(&header.id).map_err(|error| failed("remove the memory of", error))?;
        }
        rustix::fs::unlink(path).map_err(|error| failed("remove", error.into()))
    }

    fn drop_map(pin: &Path, id: &[u8; 16]) -> Result<(), ArenaFileError> {
        let alone = Self::of_pin(pin)?;
        let failed = |doing, error| ArenaFileError::Io { doing, path: pin.to_owned(), error };
        // A directory that cannot be listed has no file of it.
        let (listed, _) = list();
        let is_its = |listed: &&Self| listed.place == Place::InMap && listed.id == Some(*id);
        if let Some(of_file) = listed.iter().find(is_its) {
            return Err(ArenaFileError::OfFile {
                path: pin.to_owned(),
                file: of_file.path.clone(),
            });
        }
        // A server whose file was moved away: it would go on, and its memory end with it.
        if let Some(process) = alone.process {
            return Err(ArenaFileError::InUse { path: pin.to_owned(), process });
        }
        map::remove(id).map_err(|error| failed("remove", error))
    }
}
