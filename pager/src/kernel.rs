//! What the pager needs of the kernel: all of its `unsafe` except the views of a region that programs get.
//!
//! * `userfault`: the userfaultfd descriptor and its requests.
//! * `memory`: mappings, and pages that are given back.
//! * `paged`: a mapping whose page faults the pager resolves, by page number.
//! * `pagemap`: which pages a process has.
//! * `schedule`: how soon a thread gets a core.
//! * `signal`: SIGBUS.

pub(crate) mod memory;
pub(crate) mod paged;
pub(crate) mod pagemap;
pub(crate) mod schedule;
pub(crate) mod signal;
pub(crate) mod userfault;

/// Bytes of a page: the kernel's and BlueBridge's. Other page sizes of the kernel are refused.
pub(crate) const PAGE_BYTES: usize = 4096;

/// The system's page size is another than 4096 bytes, or `None` if all is well.
pub(crate) fn foreign_page_size() -> Option<usize> {
    Some(rustix::param::page_size()).filter(|bytes| *bytes != PAGE_BYTES)
}

/// Opens a file about this process, also after it has changed its user: such a file belongs to root then, as long as the
/// process is not dumpable (proc(5)).
pub(crate) fn open_own(path: &str) -> std::io::Result<std::fs::File> {
    use rustix::process::{DumpableBehavior, dumpable_behavior, set_dumpable_behavior};
    match std::fs::File::open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            let before = dumpable_behavior()?;
            set_dumpable_behavior(DumpableBehavior::Dumpable)?;
            let file = std::fs::File::open(path);
            set_dumpable_behavior(before)?;
            file
        }
        result => result,
    }
}
