//! Racks without root: a user namespace in which the caller is root over its own network and mounts
//! (user_namespaces(7)).

use std::ffi::CStr;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountPropagationFlags, mount_change};
use rustix::thread::{
    ThreadNameSpaceType, UnshareFlags, move_into_thread_name_spaces, unshare_unsafe,
};

/// What prevents ordinary users from creating user namespaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForbiddenBy {
    /// `kernel.apparmor_restrict_unprivileged_userns`, on by default since Ubuntu 24.04.
    AppArmor,
    /// `user.max_user_namespaces` (or the network or mount limit beside it) is used up or 0.
    Limit,
    /// Something else, such as a container's seccomp filter.
    Policy,
    /// `kernel.unprivileged_userns_clone = 0`.
    Sysctl,
}

impl ForbiddenBy {
    /// A remedy for an administrator.
    pub fn remedy(self) -> &'static str {
        match self {
            Self::AppArmor => {
                "AppArmor: run as root, or set kernel.apparmor_restrict_unprivileged_userns=0"
            }
            Self::Limit => "a limit: run as root, or raise user.max_user_namespaces",
            Self::Policy => "a policy of the system or of a container: run as root",
            Self::Sysctl => "a setting: run as root, or set kernel.unprivileged_userns_clone=1",
        }
    }

    fn guess(refusal: &io::Error) -> Self {
        let is = |path: &str, value: &str| {
            fs::read_to_string(path).is_ok_and(|text| text.trim() == value)
        };
        if Errno::from_io_error(refusal) == Some(Errno::NOSPC)
            || is("/proc/sys/user/max_user_namespaces", "0")
        {
            Self::Limit
        } else if is("/proc/sys/kernel/unprivileged_userns_clone", "0") {
            Self::Sysctl
        } else if is("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1") {
            Self::AppArmor
        } else {
            Self::Policy
        }
    }
}

/// Why a user namespace could not be created or joined.
#[derive(Debug, thiserror::Error)]
pub enum UserNamespaceError {
    /// The system does not allow ordinary users to create one.
    #[error("without root a rack needs a user namespace, which is forbidden here by {}", by.remedy())]
    Forbidden {
        /// What forbids it.
        by: ForbiddenBy,
        /// The kernel's error.
        source: io::Error,
    },
    /// The rack's user namespace cannot be joined.
    #[error("cannot join the rack's user namespace: {0}")]
    Join(#[source] io::Error),
    /// The test could not be started.
    #[error("cannot test user namespaces: {0}")]
    Probe(#[source] io::Error),
    /// The kernel moves only single-threaded processes.
    #[error("a process with several threads cannot change its user namespace: do it first in main")]
    Threads,
}

const NEW: UnshareFlags =
    UnshareFlags::NEWUSER.union(UnshareFlags::NEWNS).union(UnshareFlags::NEWNET);

/// Tests in a child whether a rack can be built without root; the caller does not change.
pub fn probe() -> Result<(), UserNamespaceError> {
    let maps = Maps::of_caller();
    let mut child = Command::new("/bin/true");
    child.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // SAFETY: between fork and exec `enter` only makes system calls on memory prepared before; it
    // neither allocates nor takes locks.
    unsafe { child.pre_exec(move || maps.enter()) };
    match child.spawn() {
        Ok(mut child) => {
            let _ = child.kill();
            child.wait().map_err(UserNamespaceError::Probe)?;
            Ok(())
        }
        Err(source) => Err(classify(source)),
    }
}

/// Moves the calling process into a new user, mount and network namespace in which it is root.
///
/// Only for a process with a single thread. Call [`probe`] first, so that a refusal has no effect.
pub fn enter_new() -> Result<(), UserNamespaceError> {
    if thread_count() != Some(1) {
        return Err(UserNamespaceError::Threads);
    }
    probe()?;
    Maps::of_caller().enter().map_err(classify)
}

/// Moves the calling process into the user and mount namespaces of another process.
///
/// Only for a process with a single thread. The working directory stays the same.
pub fn join(process: &OwnedFd) -> Result<(), UserNamespaceError> {
    if thread_count() != Some(1) {
        return Err(UserNamespaceError::Threads);
    }
    let directory = std::env::current_dir();
    let kinds = ThreadNameSpaceType::USER | ThreadNameSpaceType::MOUNT;
    move_into_thread_name_spaces(process.as_fd(), kinds)
        .map_err(|errno| UserNamespaceError::Join(errno.into()))?;
    if let Ok(directory) = directory {
        let _ = std::env::set_current_dir(directory);
    }
    Ok(())
}

fn thread_count() -> Option<usize> {
    Some(fs::read_dir("/proc/self/task").ok()?.count())
}

fn classify(source: io::Error) -> UserNamespaceError {
    match Errno::from_io_error(&source) {
        Some(Errno::PERM | Errno::ACCESS | Errno::NOSPC | Errno::USERS | Errno::INVAL) => {
            UserNamespaceError::Forbidden { by: ForbiddenBy::guess(&source), source }
        }
        _ => UserNamespaceError::Probe(source),
    }
}

/// The caller's own identity, mapped to root.
struct Maps {
    users: String,
    groups: String,
}

impl Maps {
    fn of_caller() -> Self {
        Self {
            users: format!("0 {} 1", rustix::process::geteuid().as_raw()),
            groups: format!("0 {} 1", rustix::process::getegid().as_raw()),
        }
    }

    /// Creates the namespaces and tests them with a mount; only system calls.
    fn enter(&self) -> io::Result<()> {
        // SAFETY: the file table stays shared; namespaces are no memory of this program.
        unsafe { unshare_unsafe(NEW) }?;
        write(c"/proc/self/setgroups", "deny")?;
        write(c"/proc/self/uid_map", &self.users)?;
        write(c"/proc/self/gid_map", &self.groups)?;
        mount_change(c"/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)?;
        Ok(())
    }
}

fn write(path: &CStr, text: &str) -> io::Result<()> {
    let file = rustix::fs::open(path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::write(&file, text.as_bytes())?;
    Ok(())
}
