//! A process that memory is swapped to must not wait for memory itself.

use rustix::io::Errno;
use rustix::mm::{MlockAllFlags, mlockall};
use rustix::process::{Resource, getrlimit};

/// The process's memory cannot be locked.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error(
    "cannot lock this process's memory ({error}; RLIMIT_MEMLOCK is {}); raise the limit (`ulimit -l unlimited`, for \
     systemd LimitMEMLOCK=infinity), or use --lock no if nothing is swapped to the disk",
    limit(*.limit_bytes)
)]
pub struct LockError {
    /// The system's error.
    pub error: Errno,
    /// The limit of locked memory; `None`: none.
    pub limit_bytes: Option<u64>,
}

fn limit(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "unlimited".to_owned(), |bytes| format!("{bytes} bytes"))
}

/// Locks all memory of the process, now and later.
///
/// # Errors
/// [`LockError`].
pub fn lock_memory() -> Result<(), LockError> {
    mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE)
        .map_err(|error| LockError { error, limit_bytes: getrlimit(Resource::Memlock).current })
}

/// Tells the kernel that memory which this thread needs must not be got by writing to a disk: it may be this one. Needs
/// CAP_SYS_RESOURCE.
///
/// # Errors
/// What the system says.
pub fn mark_as_io_thread() -> Result<(), Errno> {
    rustix::process::configure_io_flusher_behavior(true)
}
