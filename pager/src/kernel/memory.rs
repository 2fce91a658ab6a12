//! Mappings, and pages that are given back.
#![allow(unsafe_code, reason = "mmap and madvise")]

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags};
use rustix::process::{PidfdFlags, getpid, pidfd_open};

use super::PAGE_BYTES;

/// An anonymous private mapping of zeros, whose memory is taken page by page when it is touched.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<c_void>,
    bytes: usize,
}

// SAFETY: the mapping is plain memory; the owner controls who reads and writes it.
unsafe impl Send for Mapping {}
// SAFETY: as above; shared references give no access to its contents.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Reserves addresses; `bytes` is a multiple of the page size and not 0.
    pub(crate) fn reserve(bytes: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: the kernel chooses unused addresses.
        let start =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, protection, flags) }?;
        let start = NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, bytes })
    }

    /// The mapping that a child process has because its parent had `other`.
    ///
    /// # Safety
    /// Neither `other` nor anything that was borrowed from it is used or dropped in this process any more.
    pub(crate) unsafe fn inherited(other: &Self) -> Self {
        Self { start: other.start, bytes: other.bytes }
    }

    pub(crate) fn start(&self) -> NonNull<c_void> {
        self.start
    }

    pub(crate) fn address(&self) -> u64 {
        self.start.addr().get() as u64
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Gives the kernel advice about the whole mapping.
    pub(crate) fn advise(&self, advice: Advice) -> io::Result<()> {
        // SAFETY: the range is the mapping's own. The advice used here (no huge pages, not inherited) does not
        // change its contents.
        Ok(unsafe { rustix::mm::madvise(self.start.as_ptr(), self.bytes, advice) }?)
    }

    /// The first part of it as words that are shared between threads.
    pub(crate) fn words(&self) -> &[AtomicU32] {
        let count = self.bytes / size_of::<AtomicU32>();
        // SAFETY: the mapping is aligned to pages, lives as long as the borrow, and zeros are valid words. It is
        // accessed as atomics only: nobody uses `words` together with another view.
        unsafe { std::slice::from_raw_parts(self.start.cast::<AtomicU32>().as_ptr(), count) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping's own, and its owner is gone.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr(), self.bytes) };
    }
}

/// Gives pages back to the system, many with one system call if the kernel can.
///
/// `MADV_DONTNEED` of a single page interrupts the other cores on which the process runs. Linux 6.16 and newer
/// do that once for all ranges of one `process_madvise`.
#[derive(Debug)]
pub(crate) struct Discarder {
    /// This process; `None` if the kernel takes one range at a time.
    own_process: Option<OwnedFd>,
}

/// Ranges of one `process_madvise`.
const RANGE_COUNT: usize = 64;

impl Discarder {
    /// Finds out what the kernel can.
    pub(crate) fn new() -> Self {
        let own_process = pidfd_open(getpid(), PidfdFlags::empty()).ok();
        let scratch = Mapping::reserve(2 * PAGE_BYTES).ok();
        let works = own_process.as_ref().zip(scratch.as_ref()).is_some_and(|(process, scratch)| {
            let range = libc::iovec { iov_base: scratch.start.as_ptr(), iov_len: PAGE_BYTES };
            discard_ranges(process, &[range]).is_ok_and(|bytes| bytes == PAGE_BYTES)
        });
        Self { own_process: own_process.filter(|_| works) }
    }

    pub(crate) fn is_batched(&self) -> bool {
        self.own_process.is_some()
    }

    /// Gives back the pages with these numbers in a mapping; runs of neighbours in ascending order are one range.
    ///
    /// # Safety
    /// Nobody may rely on the contents of these pages, and they lie in the mapping.
    pub(crate) unsafe fn discard(&self, mapping: &Mapping, pages: &[u64]) -> io::Result<()> {
        let mut ranges = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; RANGE_COUNT];
        let mut count = 0;
        let mut runs = runs(pages).peekable();
        while let Some((first, length)) = runs.next() {
            let offset = usize::try_from(first).unwrap_or(usize::MAX).saturating_mul(PAGE_BYTES);
            let bytes = length * PAGE_BYTES;
            if offset.saturating_add(bytes) > mapping.bytes {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            let start = mapping.start.as_ptr().wrapping_byte_add(offset);
            if let Some(range) = ranges.get_mut(count) {
                *range = libc::iovec { iov_base: start, iov_len: bytes };
                count += 1;
            }
            if count == RANGE_COUNT || runs.peek().is_none() {
                self.discard_all(ranges.get(..count).unwrap_or_default())?;
                count = 0;
            }
        }
        Ok(())
    }

    fn discard_all(&self, ranges: &[libc::iovec]) -> io::Result<()> {
        let mut done = 0;
        if let Some(process) = &self.own_process {
            let mut bytes = discard_ranges(process, ranges).unwrap_or(0);
            // Ranges that it did not finish are discarded again, which does nothing more.
            while let Some(range) = ranges.get(done).filter(|range| range.iov_len <= bytes) {
                bytes -= range.iov_len;
                done += 1;
            }
        }
        for range in ranges.iter().skip(done) {
            // SAFETY: `discard` checked the range, and its caller gave the contents up.
            unsafe { rustix::mm::madvise(range.iov_base, range.iov_len, Advice::LinuxDontNeed) }?;
        }
        Ok(())
    }
}

/// How many bytes of the ranges the kernel discarded.
fn discard_ranges(process: &OwnedFd, ranges: &[libc::iovec]) -> io::Result<usize> {
    // SAFETY: the callers give up the contents of these ranges of this process.
    let bytes = unsafe {
        libc::syscall(
            libc::SYS_process_madvise,
            process.as_raw_fd(),
            ranges.as_ptr(),
            ranges.len(),
            libc::MADV_DONTNEED,
            0,
        )
    };
    usize::try_from(bytes).map_err(|_| io::Error::last_os_error())
}

/// Runs of neighbours in a list of pages: the first of each, and how many.
pub(crate) fn runs(pages: &[u64]) -> impl Iterator<Item = (u64, usize)> {
    pages
        .chunk_by(|page, next| page.checked_add(1) == Some(*next))
        .filter_map(|run| run.first().map(|first| (*first, run.len())))
}

/// Waits until a word is not `expected` any more, at most for `limit`; may return early.
pub(crate) fn wait(word: &AtomicU32, expected: u32, limit: std::time::Duration) {
    let limit = rustix::time::Timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    };
    // Every reason to return early (another value, a signal, the time) is one to look again.
    let _ = rustix::thread::futex::wait(
        word,
        rustix::thread::futex::Flags::PRIVATE,
        expected,
        Some(&limit),
    );
}

/// Wakes all threads that wait for a word.
pub(crate) fn wake_all(word: &AtomicU32) {
    let all = u32::try_from(i32::MAX).unwrap_or(1);
    let _ = rustix::thread::futex::wake(word, rustix::thread::futex::Flags::PRIVATE, all);
}

/// Sets a word and wakes all threads that wait for it.
pub(crate) fn set_and_wake(word: &AtomicU32, value: u32) {
    word.store(value, Ordering::SeqCst);
    wake_all(word);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_neighbours_in_ascending_order() {
        let runs = |pages: &[u64]| runs(pages).collect::<Vec<_>>();
        assert_eq!(runs(&[]), []);
        assert_eq!(runs(&[5]), [(5, 1)]);
        assert_eq!(
            runs(&[5, 6, 7, 9, 8, u64::MAX, 0]),
            [(5, 3), (9, 1), (8, 1), (u64::MAX, 1), (0, 1)]
        );
    }

    #[test]
    fn discarded_pages_are_zero_again_and_others_stay() {
        for discarder in [Discarder::new(), Discarder { own_process: None }] {
            let mapping = Mapping::reserve(200 * PAGE_BYTES).expect("there is memory");
            let words = mapping.words();
            words.iter().for_each(|word| word.store(7, Ordering::Relaxed));
            let pages: Vec<u64> = (0..200).filter(|page| page % 3 != 1).collect();
            // SAFETY: the test expects zeros.
            unsafe { discarder.discard(&mapping, &pages) }.expect("they are in the mapping");
            for (at, word) in words.iter().enumerate() {
                let page = at * 4 / PAGE_BYTES;
                let expected = if page % 3 == 1 { 7 } else { 0 };
                assert_eq!(word.load(Ordering::Relaxed), expected, "page {page}");
            }
            // SAFETY: the call must refuse.
            let result = unsafe { discarder.discard(&mapping, &[199, 200]) };
            assert_eq!(result.expect_err("out of range").kind(), io::ErrorKind::InvalidInput);
        }
    }
}
