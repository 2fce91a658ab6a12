//! What a region's pager did.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// What a region's pager did since the region was created.
        #[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
        #[non_exhaustive]
        pub struct Statistics {
            $($(#[doc = $doc])+ pub $name: u64,)+
            /// Pages that were requested ahead; some were local already.
            pub requested_pages: u64,
            /// Of these, pages that are known to have been used.
            pub confirmed_pages: u64,
            /// Pages that are local now.
            pub local_pages: u64,
            /// The most pages that were local at once.
            pub local_pages_max: u64,
            /// Bytes of remote memory that are allocated now.
            pub allocated_bytes: u64,
        }

        /// The counters, as the threads count.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: Counter,)+
            pub(crate) local_pages_max: AtomicU64,
        }

        impl Counters {
            /// The counters now; what is not counted is 0.
            pub(crate) fn snapshot(&self) -> Statistics {
                Statistics {
                    $($name: self.$name.get(),)+
                    local_pages_max: self.local_pages_max.load(Ordering::Relaxed),
                    ..Statistics::default()
                }
            }
        }
    };
}

counters! {
    /// Faults on pages that were on a server.
    remote_faults,
    /// Faults on pages that had never been used, or held only zeros: nothing is read from a server.
    zero_faults,
    /// First writes to local pages that equalled the server's.
    write_faults,
    /// Faults on pages that another thread had made local meanwhile.
    late_faults,
    /// Faults that waited until another thread was done with the page.
    busy_faults,
    /// Writes to pages that were being written back; they stayed local.
    rescued_pages,
    /// Pages that became local beside the one that faulted.
    prefetched_pages,
    /// Pages that the background thread read into its buffers.
    background_pages,
    /// Of these, pages that a fault took.
    background_used_pages,
    /// Evicted pages that were equal to the server's.
    evicted_clean_pages,
    /// Evicted pages that were written back.
    evicted_written_pages,
    /// Evicted pages with only zeros; nothing was sent.
    evicted_zero_pages,
    /// Faults that found no room and evicted pages themselves.
    inline_evictions,
    /// Bytes read from servers.
    read_bytes,
    /// Bytes written to servers.
    written_bytes,
    /// Pages whose contents were lost, or could not be read in time.
    lost_pages,
    /// Writes to servers that failed; the pages stayed local.
    failed_writes,
    /// Nanoseconds that threads waited for remote reads.
    read_wait_ns,
    /// Nanoseconds that threads waited for room.
    room_wait_ns,
}

impl Statistics {
    /// All faults.
    #[must_use]
    pub const fn faults(&self) -> u64 {
        self.remote_faults + self.zero_faults + self.write_faults + self.late_faults
    }

    /// The share of pages requested ahead that are known to have been used, from 0 to 1; a lower bound, because the use of
    /// a local page is not seen. `None` if nothing was requested.
    #[must_use]
    pub fn prefetch_accuracy(&self) -> Option<f64> {
        #[allow(clippy::cast_precision_loss, reason = "a share needs few digits")]
        let share = self.confirmed_pages as f64 / self.requested_pages as f64;
        (self.requested_pages > 0).then_some(share)
    }
}

/// A number that many threads raise, and which orders nothing.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn one(&self) {
        self.add(1);
    }

    pub(crate) fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    pub(crate) fn time(&self, time: Duration) {
        self.add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
