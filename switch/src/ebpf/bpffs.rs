//! Pins maps and links, so that the data plane outlives the agent.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use bluebridge_bpf::fs::{self as bpf_fs, FsError, HOME};

use crate::dataplane::{PlaneError, Table};

/// The directory of a switch, created if missing; the BPF file system is mounted if necessary.
///
/// # Errors
/// If the name is invalid, or a directory or mount cannot be created.
pub(super) fn open(name: &str) -> Result<PathBuf, PlaneError> {
    let directory = directory(name)?;
    bpf_fs::make(&directory).map_err(refused)?;
    Ok(directory)
}

/// Creates a directory and its parents.
///
/// # Errors
/// If it cannot be created.
pub(super) fn make(directory: &Path) -> Result<(), PlaneError> {
    fs::create_dir_all(directory).map_err(|e| failed(&format!("make {}", directory.display()), e))
}

/// Removes the pins of a switch and the kernel objects that only they kept; it may be gone already.
///
/// # Errors
/// If the name is invalid, or something cannot be removed.
pub(super) fn remove(name: &str) -> Result<(), PlaneError> {
    let directory = directory(name)?;
    if !bpf_fs::is_mounted().map_err(refused)? {
        return Ok(());
    }
    match fs::remove_dir_all(&directory) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            return Err(failed(&format!("remove {}", directory.display()), e));
        }
        _ => {}
    }
    bpf_fs::tidy().map_err(refused)
}

/// Removes the pins of a switch in a directory of the caller's choice, and the directory if it is
/// then empty.
///
/// # Errors
/// If no switch is pinned there, or its pins cannot be removed.
pub(super) fn remove_in(directory: &Path) -> Result<(), PlaneError> {
    let doing = || format!("remove {}", directory.display());
    if !is_pinned_in(directory) {
        let source = io::Error::new(io::ErrorKind::NotFound, "no switch is pinned there");
        return Err(PlaneError::Io { doing: doing(), source });
    }
    let mut entries = Vec::new();
    for entry in fs::read_dir(directory).map_err(|e| failed(&doing(), e))? {
        entries.push(entry.map_err(|e| failed(&doing(), e))?);
    }
    let is_pin = |name: &str| maps().any(|map| map == name) || is_link(name);
    for entry in entries.iter().filter(|entry| entry.file_name().to_str().is_some_and(is_pin)) {
        fs::remove_file(entry.path()).map_err(|e| failed(&doing(), e))?;
    }
    // A mount, or a directory with other files, stays.
    let _ = fs::remove_dir(directory);
    Ok(())
}

/// Whether a switch is pinned in a directory.
pub(super) fn is_pinned_in(directory: &Path) -> bool {
    bpf_fs::holds(directory) && maps().any(|map| directory.join(map).exists())
}

/// The maps of `switch/bpf/tables.h` that are not tables; all of them are pinned.
const MAPS: [&str; 12] = [
    "notify_match",
    "notify_index",
    "groups",
    "counters",
    "drops",
    "ports",
    "port_of",
    "port_counters",
    "impairments",
    "config",
    "packet_ins",
    "notes",
];

/// The names of all maps.
fn maps() -> impl Iterator<Item = &'static str> {
    Table::ALL.into_iter().map(Table::name).chain(MAPS)
}

/// Whether a name is one of [`link_pin`]'s.
fn is_link(name: &str) -> bool {
    let rest = name.strip_prefix("port_").and_then(|rest| rest.split_once('_'));
    rest.is_some_and(|(port, program)| {
        port.parse::<u16>().is_ok() && ["tc", "xdp"].contains(&program)
    })
}

/// The pinned links of a switch's ports.
pub(super) fn link_pin(directory: &Path, port: u16, program: &str) -> PathBuf {
    directory.join(format!("port_{port}_{program}"))
}

/// Where the switch of a name is pinned.
///
/// # Errors
/// If the name is invalid.
pub(super) fn directory(name: &str) -> Result<PathBuf, PlaneError> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if name.is_empty() || name.len() > 64 || !name.chars().all(is_plain) {
        let rule = "a switch's name must be 1 to 64 letters, digits, - and _";
        return Err(failed(name, io::Error::new(io::ErrorKind::InvalidInput, rule)));
    }
    Ok(Path::new(HOME).join(name))
}

fn refused(error: FsError) -> PlaneError {
    failed(&error.doing, error.source)
}

fn failed(doing: &str, source: io::Error) -> PlaneError {
    if source.kind() == io::ErrorKind::PermissionDenied {
        return PlaneError::NeedsRoot("the eBPF data plane");
    }
    PlaneError::Io { doing: doing.to_owned(), source }
}
