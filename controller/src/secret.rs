//! Files with secrets, which only their owner may read.

use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

/// The mode of a file with secrets.
const OWNER_ONLY: u32 = 0o600;

/// The permission bits of a mode.
const PERMISSIONS: u32 = 0o777;

/// The permissions of group and others.
const OF_OTHERS: u32 = 0o077;

/// Opens a file for reading and writing; a new one is created for its owner alone.
///
/// The mode is set at creation: a file whose mode is restricted later would be open
/// for a moment.
pub(crate) fn open_or_create(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(OWNER_ONLY)
        .open(path)
}

/// Removes the permissions of group and others from a file; returns its former mode if it had any
/// of them.
pub(crate) fn close_to_others(file: &File) -> io::Result<Option<u32>> {
    let mode = file.metadata()?.mode() & PERMISSIONS;
    if mode & OF_OTHERS == 0 {
        return Ok(None);
    }
    file.set_permissions(Permissions::from_mode(OWNER_ONLY))?;
    Ok(Some(mode))
}

/// Whether every user may read a file. Group access may be intended, as is common for TLS keys.
#[cfg(feature = "tls")]
pub(crate) fn is_open_to_all(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.mode() & 0o007 != 0)
}

#[cfg(all(test, feature = "tls"))]
mod tests {
    use bluebridge_testkit::Scratch;

    use super::*;

    #[test]
    fn a_key_for_a_group_is_not_one_for_all() {
        let scratch = Scratch::new("secret");
        let path = scratch.file("key");
        let file = open_or_create(&path).unwrap();
        // From the start, not only once it is closed.
        assert_eq!(file.metadata().unwrap().mode() & PERMISSIONS, OWNER_ONLY);
        for (mode, open) in [(0o600, false), (0o640, false), (0o644, true), (0o601, true)] {
            file.set_permissions(Permissions::from_mode(mode)).unwrap();
            assert_eq!(is_open_to_all(&path), open, "{mode:o}");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(!is_open_to_all(&path), "reading it says that it is not there");
    }
}
