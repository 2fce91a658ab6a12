//! Lanes: what a thread needs to resolve a fault. The faulting thread takes one for the time of the fault.

use std::sync::{Mutex, MutexGuard, TryLockError};

use crate::kernel::PAGE_BYTES;
use crate::options::PREFETCH_PAGES_MAX;
use crate::prefetch::Prefetcher;
use crate::remote::RemoteMemory;

/// Pages of a lane's buffer: the faulting one, and what is read ahead.
pub(crate) const LANE_PAGES: usize = PREFETCH_PAGES_MAX as usize + 1;

/// What a thread needs to resolve a fault.
pub(crate) struct Lane {
    pub(crate) remote: Box<dyn RemoteMemory>,
    pub(crate) prefetcher: Prefetcher,
    /// Pages arrive here.
    pub(crate) buffer: Box<[u8]>,
}

/// A fixed number of lanes.
///
/// A lock of the standard library is a futex on Linux: taking it neither allocates nor depends on the thread, so it is
/// usable in the signal handler. The program's instruction that faulted holds no lock of the pager.
pub(crate) struct Lanes(Box<[Mutex<Lane>]>);

impl Lanes {
    pub(crate) fn new(remotes: Vec<Box<dyn RemoteMemory>>, prefetch_pages: u32) -> Self {
        let lane = |remote| Lane {
            remote,
            prefetcher: Prefetcher::new(prefetch_pages),
            buffer: vec![0; LANE_PAGES * PAGE_BYTES].into_boxed_slice(),
        };
        Self(remotes.into_iter().map(|remote| Mutex::new(lane(remote))).collect())
    }

    /// A lane; the same for the same thread if it is free, because it knows the thread's accesses.
    pub(crate) fn take(&self, thread: u64) -> MutexGuard<'_, Lane> {
        let count = self.0.len();
        let own = usize::try_from(thread % count.max(1) as u64).unwrap_or(0);
        let (before, from) = self.0.split_at(own.min(count));
        for lane in from.iter().chain(before) {
            match lane.try_lock() {
                Ok(lane) => return lane,
                Err(TryLockError::Poisoned(lane)) => return lane.into_inner(),
                Err(TryLockError::WouldBlock) => {}
            }
        }
        let lane = self.0.get(own).expect("there is at least one lane");
        lane.lock().unwrap_or_else(|broken| broken.into_inner())
    }

    /// All prefetchers, to count.
    pub(crate) fn each(&self, mut visit: impl FnMut(&Lane)) {
        for lane in &self.0 {
            visit(&lane.lock().unwrap_or_else(|broken| broken.into_inner()));
        }
    }
}
