//! Which pages will be needed next.
//!
//! Each thread's faults are followed separately. A *stream* is a sequence of faults at a constant
//! stride; a thread can have several at once, in any order (two converging pointers, the runs of a
//! merge). A stream is found
//!
//! * if a neighbour of the page faulted recently (stride 1 or -1), or
//! * if two recent faults and this one are equally spaced (any stride), or
//! * if most of the last faults had one stride (majority vote of Boyer and Moore, as in Leap, Al
//!   Maruf and Chowdhury, USENIX ATC 2020): the stream probably goes on at another place, as in the
//!   next column of a matrix.
//!
//! Whether a prefetched page was used is invisible. But if the program used a whole window, its next
//! fault is at the first page after the window. Such a fault *confirms* the window, and the next
//! one is twice as long. A fault inside the window shows that its pages were not local when they
//! were needed, and the next one is half as long.
//!
//! A new stream does not get more pages than such streams deserved before: if they end without
//! having been confirmed, the first window shrinks to nothing. Without a window a stream can
//! still be confirmed, by a fault at its next page. So random accesses cost nothing after a few
//! faults, and streams are found again after them.

mod streams;
#[cfg(test)]
mod tests;

use streams::{Step, Streams};

/// Threads that are followed at once. If there are more, the one whose last fault is the oldest is
/// forgotten.
const THREADS_MAX: usize = 16;

/// Pages to load beside a page that faulted.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Window {
    /// The first page to load.
    pub(crate) first: u64,
    /// The distance from each page to the next; not 0 if there are pages.
    pub(crate) stride: i64,
    /// The number of pages; with 0 there is nothing to load.
    pub(crate) count: u32,
}

impl Window {
    /// Its pages, the nearest first.
    pub(crate) fn pages(self) -> impl Iterator<Item = u64> {
        let step = move |page: &u64| page.checked_add_signed(self.stride);
        let count = usize::try_from(self.count).unwrap_or(usize::MAX);
        std::iter::successors(Some(self.first), step).take(count)
    }

    pub(crate) fn contains(self, page: u64) -> bool {
        let distance = page.wrapping_sub(self.first).cast_signed();
        let place = distance.checked_div(self.stride).and_then(|place| u32::try_from(place).ok());
        distance.checked_rem(self.stride) == Some(0)
            && place.is_some_and(|place| place < self.count)
    }

    /// The window after `page`, cut where page numbers end.
    fn after(page: u64, stride: i64, count: u32) -> Self {
        let room = if stride > 0 { u64::MAX - page } else { page };
        let room = room.checked_div(stride.unsigned_abs()).unwrap_or(0);
        let count = u32::try_from(room).unwrap_or(u32::MAX).min(count);
        match page.checked_add_signed(stride) {
            Some(first) if count > 0 => Self { first, stride, count },
            _ => Self::default(),
        }
    }
}

/// What to do about a fault.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Advice {
    /// Pages to load beside the page that faulted.
    pub(crate) window: Window,
    /// Pages that the stream's next fault will ask for, if it confirms the window: the page that will fault, and its
    /// window. Empty unless the stream was confirmed before.
    pub(crate) next: Window,
}

/// What a [`Prefetcher`] did.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct PrefetchCounters {
    /// Pages in windows, whether or not they were local already.
    pub(crate) pages_requested: u64,
    /// Pages in windows, or in parts of windows, that were confirmed. Confirmed by requested pages
    /// is a lower bound of the accuracy if the program uses every page of its streams: the last
    /// window of a stream is never confirmed, however much of it is used. Pages that the program
    /// skips in a confirmed window count as used, since hits are invisible.
    pub(crate) pages_confirmed: u64,
    /// Windows that were longer than the one before.
    pub(crate) windows_grown: u64,
    /// Windows that were shorter than the one before, and streams that ended without a
    /// confirmation.
    pub(crate) windows_shrunk: u64,
}

#[derive(Debug)]
struct Thread {
    id: u64,
    /// The number of the last fault.
    faulted: u64,
    streams: Streams,
}

/// The streams of the threads whose faults one lane handles. About 20 KiB, reserved at the start.
#[derive(Debug)]
pub(crate) struct Prefetcher {
    limit_pages: u32,
    threads: Vec<Thread>,
    /// The number of faults.
    faults: u64,
    counters: PrefetchCounters,
}

impl Prefetcher {
    /// No window has more than `limit_pages` pages; with 0 there are no windows.
    pub(crate) fn new(limit_pages: u32) -> Self {
        Self {
            limit_pages,
            threads: Vec::with_capacity(THREADS_MAX),
            faults: 0,
            counters: PrefetchCounters::default(),
        }
    }

    /// Notes a fault of a thread. Some of the pages it names may be local already, or outside of the region.
    pub(crate) fn fault(&mut self, thread: u64, page: u64) -> Advice {
        self.faults = self.faults.saturating_add(1);
        let faults = self.faults;
        let limit_pages = self.limit_pages;
        let Some(thread) = self.thread(thread) else { return Advice::default() };
        thread.faulted = faults;
        let step = thread.streams.fault(page, limit_pages);
        let Step { stride, count, confirmed, change, shrunk, next } = step;
        let window = Window::after(page, stride, count);
        let counters = &mut self.counters;
        counters.pages_requested += u64::from(window.count);
        counters.pages_confirmed += u64::from(confirmed);
        counters.windows_grown += u64::from(change.is_gt());
        counters.windows_shrunk += u64::from(change.is_lt()) + u64::from(shrunk);
        let last = page.checked_add_signed(stride.saturating_mul(i64::from(count)));
        let next = match last {
            Some(last) if next > 0 && window.count == count => Window::after(last, stride, next),
            _ => Window::default(),
        };
        Advice { window, next }
    }

    /// What was done so far.
    pub(crate) const fn counters(&self) -> PrefetchCounters {
        self.counters
    }

    fn thread(&mut self, id: u64) -> Option<&mut Thread> {
        let place = match self.threads.iter().position(|thread| thread.id == id) {
            Some(place) => place,
            None => {
                let new = Thread { id, faulted: self.faults, streams: Streams::new() };
                if self.threads.len() < THREADS_MAX {
                    self.threads.push(new);
                    self.threads.len() - 1
                } else {
                    let threads = self.threads.iter().enumerate();
                    let (place, _) = threads.min_by_key(|(_, thread)| thread.faulted)?;
                    *self.threads.get_mut(place)? = new;
                    place
                }
            }
        };
        self.threads.get_mut(place)
    }
}
