//! How a region is made.

use std::time::Duration;

use crate::error::Error;
use crate::kernel::PAGE_BYTES;
use crate::kernel::userfault::Delivery;

/// Who resolves the faults of a region.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub enum FaultMode {
    /// The faulting thread itself, in a signal handler (SIGBUS): the fastest. A system call on a page that is not
    /// local fails with EFAULT or a short count, so the pages must be pinned before ([`crate::RemoteRegion::pin`]).
    /// Works for ordinary users.
    #[default]
    InThread,
    /// Threads of the pager. System calls may use any page if the process may handle faults of the kernel: as root,
    /// with access to `/dev/userfaultfd`, or if `vm.unprivileged_userfaultfd` is 1. Else they fail as above.
    Threads {
        /// How many, 1 to 64.
        count: usize,
    },
}

/// What happens if a page cannot be read or written back in time.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub enum OnFailure {
    /// The thread that needs it gets SIGBUS, after a message.
    #[default]
    Signal,
    /// The thread waits until it succeeds; messages say for what. A page whose contents are lost for ever is still
    /// answered by SIGBUS.
    Wait,
}

/// How a region is made; see the methods.
#[derive(Clone, Debug)]
pub struct RegionOptions {
    pub(crate) bytes: u64,
    pub(crate) local_bytes: u64,
    pub(crate) mode: FaultMode,
    pub(crate) on_failure: OnFailure,
    pub(crate) deadline: Duration,
    pub(crate) lanes: usize,
    pub(crate) prefetch_pages: u32,
    pub(crate) background: bool,
    pub(crate) evictor: bool,
    pub(crate) forks: bool,
}

/// The fewest local pages of a region.
const LOCAL_PAGES_MIN: u64 = 16;
/// The most pages that one read prefetches.
pub(crate) const PREFETCH_PAGES_MAX: u32 = 64;
const LANES_MAX: usize = 64;
/// Local pages that a thread can touch between the time at which it begins to fork and the fork itself.
pub(crate) const FORK_FRAMES: u32 = 32;

impl RegionOptions {
    /// A region of `bytes` bytes, of which at most `local_bytes` are local at once; both are rounded up to pages.
    #[must_use]
    pub fn new(bytes: u64, local_bytes: u64) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            bytes,
            local_bytes,
            mode: FaultMode::default(),
            on_failure: OnFailure::default(),
            deadline: Duration::from_secs(10),
            lanes: cores.clamp(2, 8),
            prefetch_pages: 32,
            background: true,
            evictor: true,
            forks: false,
        }
    }

    /// Who resolves faults.
    #[must_use]
    pub const fn mode(mut self, mode: FaultMode) -> Self {
        self.mode = mode;
        self
    }

    /// What happens if a page cannot be read or written back in time.
    #[must_use]
    pub const fn on_failure(mut self, on_failure: OnFailure) -> Self {
        self.on_failure = on_failure;
        self
    }

    /// How long a fault may take before it failed.
    #[must_use]
    pub const fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// How many faults can be resolved at once, 1 to 64; each needs a client. More threads wait.
    #[must_use]
    pub const fn lanes(mut self, lanes: usize) -> Self {
        self.lanes = lanes;
        self
    }

    /// The most pages that are read ahead at once, 0 to 64; 0 reads nothing ahead.
    #[must_use]
    pub const fn prefetch_pages(mut self, pages: u32) -> Self {
        self.prefetch_pages = pages;
        self
    }

    /// Whether a thread reads the next pages of a stream while the program uses those before. It needs a client, and up
    /// to 8 buffers of as many pages as are read ahead at once, which do not count as local memory.
    #[must_use]
    pub const fn background(mut self, background: bool) -> Self {
        self.background = background;
        self
    }

    /// Whether a thread evicts pages before the room is used up. Without it, faulting threads do so.
    #[must_use]
    pub const fn evictor(mut self, evictor: bool) -> Self {
        self.evictor = evictor;
        self
    }

    /// Whether [`crate::RemoteRegion::begin_fork`] will be used, which needs a few local pages.
    #[must_use]
    pub const fn forks(mut self, forks: bool) -> Self {
        self.forks = forks;
        self
    }

    /// The most pages that are read ahead at once.
    pub(crate) fn prefetch_limit(&self, local_pages: u32) -> u32 {
        self.prefetch_pages.min(local_pages / 40)
    }

    /// Whether a thread reads in the background: not if no page ever leaves.
    pub(crate) fn reads_in_background(&self) -> bool {
        self.check().is_ok_and(|(pages, local_pages)| {
            let is_partly_remote = pages > usize::try_from(local_pages).unwrap_or(usize::MAX);
            self.background && is_partly_remote && self.prefetch_limit(local_pages) > 0
        })
    }

    /// How the kernel reports faults.
    pub(crate) const fn delivery(&self) -> Delivery {
        match self.mode {
            FaultMode::InThread => Delivery::Signal,
            FaultMode::Threads { .. } => Delivery::Events,
        }
    }

    /// The number of pages, and of local pages, if all is well.
    pub(crate) fn check(&self) -> Result<(usize, u32), Error> {
        let page = PAGE_BYTES as u64;
        let wrong = |option, value, requirement| Err(Error::Option { option, value, requirement });
        let pages = usize::try_from(self.bytes.div_ceil(page)).unwrap_or(usize::MAX);
        if pages == 0 || self.bytes > 1 << 46 {
            return wrong("the region's size", self.bytes, "it must be 1 byte to 64 TiB");
        }
        let local = self.local_bytes.div_ceil(page);
        let Some(local) = u32::try_from(local).ok().filter(|_| local >= LOCAL_PAGES_MIN) else {
            let requirement = "it must be 64 KiB to 16 TiB";
            return wrong("the limit of local memory", self.local_bytes, requirement);
        };
        if self.lanes == 0 || self.lanes > LANES_MAX {
            return wrong("the number of lanes", self.lanes as u64, "it must be 1 to 64");
        }
        if self.prefetch_pages > PREFETCH_PAGES_MAX {
            let requirement = "it must be at most 64 pages";
            return wrong(
                "the number of pages read ahead",
                self.prefetch_pages.into(),
                requirement,
            );
        }
        if self.forks && matches!(self.mode, FaultMode::InThread) {
            return wrong("forks", 1, "handler threads are needed for regions that forks inherit");
        }
        if self.forks && local < 4 * FORK_FRAMES {
            let requirement = "it must be at least 512 KiB for regions that forks inherit";
            return wrong("the limit of local memory", self.local_bytes, requirement);
        }
        match self.mode {
            FaultMode::Threads { count } if count == 0 || count > LANES_MAX => {
                wrong("the number of handler threads", count as u64, "it must be 1 to 64")
            }
            _ => Ok((pages, local)),
        }
    }
}
