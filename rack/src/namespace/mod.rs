//! Network namespaces: created, kept by a bind mount, entered, removed (namespaces(7), network_namespaces(7)).
//!
//! * `user`: racks of ordinary users, in a user namespace.

mod user;

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::fs::MetadataExt;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::thread;

use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind, mount_bind_recursive,
    mount_change,
};
use rustix::thread::{
    CapabilitySet, LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe,
};
use serde::{Deserialize, Serialize};

pub use user::{ForbiddenBy, UserNamespaceError, enter_new, join, probe};

/// The network namespace of the calling thread.
pub const CALLER: &str = "/proc/thread-self/ns/net";

/// Why a namespace could not be created, entered or removed.
#[derive(Debug, thiserror::Error)]
pub enum NamespaceError {
    /// The kernel refused.
    #[error("cannot {action} the network namespace {}: {source}", path.display())]
    Refused {
        /// The failed action.
        action: &'static str,
        /// The mount point of the namespace.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// A thread for the namespace could not be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[source] io::Error),
}

impl NamespaceError {
    /// Whether the name is in use already.
    pub fn is_taken(&self) -> bool {
        matches!(self, Self::Refused { source, .. } if source.kind() == io::ErrorKind::AlreadyExists)
    }

    /// Whether more privileges would help.
    pub fn is_permission(&self) -> bool {
        matches!(self, Self::Refused { source, .. } if source.kind() == io::ErrorKind::PermissionDenied)
    }
}

/// A namespace's identity as the kernel shows it, valid while the namespace lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NamespaceId {
    device: u64,
    inode: u64,
}

impl NamespaceId {
    /// The identity behind a path such as `/proc/self/ns/user`.
    pub fn of(path: impl AsRef<Path>) -> io::Result<Self> {
        let metadata = fs::metadata(path)?;
        Ok(Self { device: metadata.st_dev(), inode: metadata.st_ino() })
    }
}

/// A network namespace, open, so that it lives at least as long as this value.
#[derive(Debug)]
pub struct NetworkNamespace {
    path: PathBuf,
    file: File,
}

impl NetworkNamespace {
    /// Creates a namespace and mounts it at `path`, whose directory exists; `path` itself must not.
    pub fn create(path: &Path) -> Result<Self, NamespaceError> {
        let refused =
            |action, source| NamespaceError::Refused { action, path: path.to_owned(), source };
        OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(path)
            .map_err(|source| refused("name", source))?;
        let made = on_a_thread(|| {
            // SAFETY: only the network namespace is unshared, and of this thread alone: it shares its file
            // table as before.
            let unshared = unsafe { unshare_unsafe(UnshareFlags::NEWNET) };
            unshared.map_err(|errno| refused("make", errno.into()))?;
            mount_bind(CALLER, path).map_err(|errno| refused("mount", errno.into()))
        });
        match made.and_then(|made| made) {
            Ok(()) => Self::open(path),
            Err(error) => {
                let _ = fs::remove_file(path);
                Err(error)
            }
        }
    }

    /// Opens the namespace mounted at `path`, or that of a process (`/proc/PID/ns/net`).
    pub fn open(path: &Path) -> Result<Self, NamespaceError> {
        let file = File::open(path).map_err(|source| NamespaceError::Refused {
            action: "open",
            path: path.to_owned(),
            source,
        })?;
        Ok(Self { path: path.to_owned(), file })
    }

    /// Runs `work` on a thread inside the namespace and returns its result; a panic is passed on.
    ///
    /// Sockets and child processes that `work` creates stay in the namespace afterwards.
    pub fn enter<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, NamespaceError> {
        on_a_thread(|| self.move_caller_in().map(|()| work()))?
    }

    /// Moves the calling thread into the namespace permanently.
    pub fn move_caller_in(&self) -> Result<(), NamespaceError> {
        move_into_link_name_space(self.file.as_fd(), Some(LinkNameSpaceType::Network)).map_err(
            |errno| NamespaceError::Refused {
                action: "enter",
                path: self.path.clone(),
                source: errno.into(),
            },
        )
    }

    /// The mount point of the namespace.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl AsFd for NetworkNamespace {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Unmounts the namespace at `path` and removes its name; returns whether there was one.
///
/// The namespace itself ends when it has no process and no open file.
pub fn delete(path: &Path) -> Result<bool, NamespaceError> {
    let refused =
        |action, source| NamespaceError::Refused { action, path: path.to_owned(), source };
    if fs::symlink_metadata(path).is_err() {
        return Ok(false);
    }
    unmount(path).map_err(|source| refused("unmount", source))?;
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(refused("remove", error)),
        _ => Ok(true),
    }
}

/// Unmounts everything mounted at `path`; it is no error if nothing is mounted.
pub fn unmount(path: &Path) -> io::Result<()> {
    match rustix::mount::unmount(path, UnmountFlags::DETACH) {
        Ok(()) | Err(Errno::INVAL | Errno::NOENT) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// The mount points below `directory` in this process's view; the innermost and latest first.
pub fn mounts_below(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let table = fs::read("/proc/self/mountinfo")?;
    let lines = table.split(|byte| *byte == b'\n');
    let points = lines.filter_map(|line| line.split(|byte| *byte == b' ').nth(4)).map(unescape);
    let below = |path: &PathBuf| path.starts_with(directory) && path != directory;
    let mut points: Vec<_> = points.filter(below).collect();
    points.reverse();
    Ok(points)
}

/// Spaces and a few other bytes are written as `\` and three octal digits (proc_pid_mountinfo(5)).
fn unescape(text: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let [byte, after @ ..] = rest {
        let code = after.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        let code = code.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match (byte, code) {
            (b'\\', Some(code)) => {
                bytes.push(code);
                rest = after.get(3..).unwrap_or_default();
            }
            _ => {
                bytes.push(*byte);
                rest = after;
            }
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

/// Unmounts what is mounted at `path`, unless it is in use or belongs to another user.
pub fn unmount_unused(path: &Path) {
    if let Err(error) = rustix::mount::unmount(path, UnmountFlags::empty()) {
        tracing::debug!(path = %path.display(), %error, "left mounted");
    }
}

/// Mounts a new file system at the directory `path`: `bpf`, `tmpfs`.
pub fn mount_file_system(kind: &str, path: &Path) -> io::Result<()> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    Ok(mount("bluebridge", path, kind, flags, c"mode=0700")?)
}

/// Makes `directory` a mount point that shares later mounts with other mount namespaces, as `ip netns` does;
/// returns whether it was not one before.
///
/// Otherwise the first `ip netns add` would hide the mounts made here, and they could not be removed any more.
pub fn share_mounts(directory: &Path) -> io::Result<bool> {
    let share =
        || mount_change(directory, MountPropagationFlags::SHARED | MountPropagationFlags::REC);
    match share() {
        Ok(()) => return Ok(false),
        Err(Errno::INVAL) => {}
        Err(errno) => return Err(errno.into()),
    }
    mount_bind_recursive(directory, directory)?;
    share()?;
    Ok(true)
}

/// Whether the caller may create namespaces and links without a user namespace.
pub fn is_privileged() -> bool {
    let needed = CapabilitySet::SYS_ADMIN | CapabilitySet::NET_ADMIN;
    rustix::thread::capabilities(None).is_ok_and(|sets| sets.effective.contains(needed))
}

fn on_a_thread<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, NamespaceError> {
    thread::scope(|scope| {
        let thread = thread::Builder::new()
            .name("namespace".to_owned())
            .spawn_scoped(scope, work)
            .map_err(NamespaceError::Thread)?;
        match thread.join() {
            Ok(value) => Ok(value),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_are_read_as_they_are_escaped() {
        assert_eq!(unescape(br"/a\040b\134c\"), PathBuf::from(r"/a b\c\"));
        assert_eq!(unescape(b"/plain"), PathBuf::from("/plain"));
    }
}
