//! Why a region cannot be made or used.

use std::io;

use crate::kernel::userfault::UserfaultError;

/// Why a region cannot be made or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The kernel's pages are not 4096 bytes.
    #[error(
        "the kernel's pages have {0} bytes; BlueBridge needs 4096, so use another kernel configuration"
    )]
    PageSize(usize),
    /// An option makes no sense.
    #[error("{option} is {value}; {requirement}")]
    Option {
        /// The option's name.
        option: &'static str,
        /// Its value.
        value: u64,
        /// What it must be.
        requirement: &'static str,
    },
    /// No usable userfaultfd.
    #[error(transparent)]
    Userfault(#[from] UserfaultError),
    /// The system refused something else.
    #[error("cannot {what}: {error}")]
    System {
        /// What was tried.
        what: &'static str,
        /// The system's error.
        #[source]
        error: io::Error,
    },
    /// More regions whose faulting threads resolve their own faults than the process may have.
    #[error("the process has {0} regions already; drop one, or use handler threads")]
    TooManyRegions(usize),
    /// The range is not in the region.
    #[error("the range {start}..{end} is outside of the region's {bytes} bytes")]
    OutOfRange {
        /// Its first byte.
        start: u64,
        /// The byte after its last.
        end: u64,
        /// The region's size.
        bytes: u64,
    },
    /// More pages would be pinned than may be.
    #[error(
        "cannot pin {pages} pages; at most {limit} of the region's local pages can be pinned at once"
    )]
    TooManyPins {
        /// How many were requested.
        pages: u64,
        /// The limit.
        limit: u64,
    },
    /// A page's contents are lost, or could not be read or written in time.
    #[error(transparent)]
    Page(#[from] PageError),
    /// Not all changed pages could be written back; they stay local.
    #[error("not all changed pages could be written back: {0}")]
    Flush(#[source] EvictionFailure),
}

/// Why a page cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PageError {
    /// Its contents are gone for ever.
    #[error("the contents of page {page} are lost: {cause}")]
    Lost {
        /// The page's number in the region.
        page: u64,
        /// Why.
        #[source]
        cause: bluebridge::Error,
    },
    /// Its contents were not read in time.
    #[error("page {page} could not be read in time: {cause}")]
    Unreadable {
        /// The page's number in the region.
        page: u64,
        /// The last failure.
        #[source]
        cause: bluebridge::Error,
    },
    /// No page could leave in time, so there was no room.
    #[error(
        "there is no room for page {page}, because no other page could be written back in time: {cause}"
    )]
    NoRoom {
        /// The page's number in the region.
        page: u64,
        /// The last failure.
        #[source]
        cause: EvictionFailure,
    },
    /// An earlier fault on the page failed.
    #[error("page {page} is unusable since an earlier failure")]
    Unusable {
        /// The page's number in the region.
        page: u64,
    },
    /// The kernel refused to change the page.
    #[error(
        "the kernel refuses to change page {page}: {errno}; does the program unmap or remap the region?"
    )]
    Kernel {
        /// The page's number in the region.
        page: u64,
        /// The system's error.
        #[source]
        errno: io::Error,
    },
}

impl PageError {
    pub(crate) fn of_kernel(page: u64, errno: i32) -> Self {
        Self::Kernel { page, errno: io::Error::from_raw_os_error(errno) }
    }
}

/// Why no page can leave.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EvictionFailure {
    /// All local pages are pinned or in use.
    #[error("all local pages are pinned or in use; raise the limit of local memory")]
    NoneEvictable,
    /// Pages are being written, and their server has not responded.
    #[error(
        "pages are being written, but their server has not responded yet; is it stopped, or cut off?"
    )]
    NoResponse,
    /// A page could not be written to a server.
    #[error(transparent)]
    Remote(#[from] bluebridge::Error),
    /// The kernel refused to protect pages.
    #[error("the kernel refuses to protect pages: {0}")]
    Kernel(#[source] std::sync::Arc<io::Error>),
}
