//! A BPF map that is mapped window by window, each when it is needed for the first time.
//!
//! The kernel maps all pages of a BPF map at once, in 70 ms per GiB (docs/direct-reads.md, "Costs"). A
//! server that takes its memory over must not keep its clients waiting for that.

use core::{
    ops::{ControlFlow, Range},
    ptr::NonNull,
    sync::atomic::{AtomicU8, Ordering},
};
use std::{sync::Arc, thread, time::Duration};

use rustix::{
    fd::OwnedFd,
    io::Errno,
    mm::{self, MapFlags, ProtFlags},
};

/// The least bytes of a window: the kernel maps it in half a millisecond.
const WINDOW_BYTES: usize = 8 << 20;

/// The most windows. A process has at most 65,530 mappings (`vm.max_map_count`).
const WINDOWS_MAX: usize = 4096;

/// How often, and how long between, the system is asked for a window that is needed.
const TRIES: u32 = 50;
const PAUSE: Duration = Duration::from_millis(20);

/// How long the background leaves the processor, and the process's list of mappings, to others after each
/// window.
const BACKGROUND_PAUSE: Duration = Duration::from_millis(1);

/// A window is not accessible.
const UNMAPPED: u8 = 0;
/// A thread maps it, and no other may.
const MAPPING: u8 = 1;
/// It is accessible.
const MAPPED: u8 = 2;

/// A range of a BPF map, of which nothing is in use yet. [`carve_windows`](super::carve_windows) hands it
/// out.
#[derive(Debug)]
pub(crate) struct Windows(Arc<Reserved>);

/// Maps windows, and gives access to none.
#[derive(Clone, Debug)]
pub(crate) struct Mapper(Arc<Reserved>);

/// Addresses for a range of a map, of which each window becomes accessible when it is needed first, and
/// stays so.
#[derive(Debug)]
pub(super) struct Reserved {
    start: NonNull<u8>,
    bytes: usize,
    /// A window has `1 << window_shift` bytes.
    window_shift: u32,
    map: OwnedFd,
    /// Where the range begins in the map, in bytes.
    offset: u64,
    /// [`UNMAPPED`], [`MAPPING`] or [`MAPPED`], by window.
    states: Box<[AtomicU8]>,
    /// A file that is locked as long as the memory is accessible.
    _locked: OwnedFd,
}

// SAFETY: it is an address range and a descriptor; `Memory` decides who may access which part of it, and
// every byte is in at most one `Memory`.
unsafe impl Send for Reserved {}
// SAFETY: as above; what methods with a shared reference change is atomic.
unsafe impl Sync for Reserved {}

impl Drop for Reserved {
    fn drop(&mut self) {
        // SAFETY: the range is exactly what `new` reserved, and nothing accesses it any more.
        let unmapped = unsafe { mm::munmap(self.start.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

impl Windows {
    /// Reserves addresses for `range` of a map, in bytes; it begins and ends at pages.
    ///
    /// # Errors
    /// The system's error.
    pub(crate) fn new(map: OwnedFd, range: &Range<usize>, locked: OwnedFd) -> Result<Self, Errno> {
        let bytes = range.len();
        let window_bytes = bytes.div_ceil(WINDOWS_MAX).next_power_of_two().max(WINDOW_BYTES);
        let window_shift = window_bytes.ilog2();
        let (none, flags) = (ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a new mapping at an address of the system's choice affects no other mapping.
        let start = unsafe { mm::mmap_anonymous(core::ptr::null_mut(), bytes, none, flags) }?;
        Ok(Self(Arc::new(Reserved {
            start: NonNull::new(start.cast()).ok_or(Errno::NOMEM)?,
            bytes,
            window_shift,
            map,
            offset: range.start as u64,
            states: (0..bytes.div_ceil(window_bytes)).map(|_| AtomicU8::new(UNMAPPED)).collect(),
            _locked: locked,
        })))
    }

    /// Maps windows before they are needed.
    pub(crate) fn mapper(&self) -> Mapper {
        Mapper(Arc::clone(&self.0))
    }

    /// All of it, for one who hands out each byte once.
    pub(super) fn into_reserved(self) -> Arc<Reserved> {
        self.0
    }
}

impl Reserved {
    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// The address of a range, all of which is accessible now.
    ///
    /// # Panics
    /// If the range goes beyond the end. If the system has no memory for the tables of a window's pages,
    /// and has none for a second either: nothing can be served then.
    #[inline]
    pub(super) fn mapped(&self, range: &Range<usize>) -> NonNull<u8> {
        assert!(range.start <= range.end && range.end <= self.bytes, "beyond the windows");
        // A range is a part of a page nearly always.
        let mut at = range.start >> self.window_shift;
        while at << self.window_shift < range.end {
            let number = at;
            at += 1;
            if self.states[number].load(Ordering::Acquire) != MAPPED {
                self.need(number);
            }
        }
        // SAFETY: the range is inside of the reserved addresses.
        unsafe { self.start.add(range.start) }
    }

    #[cold]
    fn need(&self, number: usize) {
        for _ in 1..TRIES {
            match self.map_window(number) {
                Ok(()) => return,
                Err(_) => thread::sleep(PAUSE),
            }
        }
        let mapped = self.map_window(number);
        assert!(mapped.is_ok(), "the system does not map the arena's memory: {mapped:?}");
    }

    /// Makes a window accessible, or waits until another thread has.
    fn map_window(&self, number: usize) -> Result<(), Errno> {
        let state = &self.states[number];
        while let Err(now) =
            state.compare_exchange(UNMAPPED, MAPPING, Ordering::Acquire, Ordering::Acquire)
        {
            if now == MAPPED {
                return Ok(());
            }
            thread::yield_now();
        }
        let mapped = self.map_at(number << self.window_shift);
        state.store(if mapped.is_ok() { MAPPED } else { UNMAPPED }, Ordering::Release);
        mapped
    }

    /// Maps the window that begins at `start`; only one thread does, and only once.
    fn map_at(&self, start: usize) -> Result<(), Errno> {
        let bytes = (1 << self.window_shift).min(self.bytes - start);
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: the window is inside of the reserved addresses.
        let at = unsafe { self.start.add(start) }.as_ptr().cast();
        let offset = self.offset + start as u64;
        // SAFETY: the addresses are those that `new` reserved, and are not accessible yet: so nothing
        // refers to them, and no other mapping is replaced.
        let Err(error) = (unsafe { mm::mmap(at, bytes, access, flags, &self.map, offset) }) else {
            return Ok(());
        };
        // The kernel may have given up the reservation before it failed.
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
        // SAFETY: it replaces no mapping.
        match unsafe { mm::mmap_anonymous(at, bytes, ProtFlags::empty(), flags) } {
            // It was free, and is reserved again; or the reservation is still there.
            Ok(_) => Err(error),
            Err(Errno::EXIST) if self.is_reserved(start, bytes) => Err(error),
            Err(again) => {
                // Another mapping may have taken the addresses, and would be overwritten.
                tracing::error!(%error, %again, "addresses of the arena's memory are lost");
                std::process::abort();
            }
        }
    }

    /// Whether addresses are still those of the reservation: mapped, and not accessible.
    fn is_reserved(&self, start: usize, bytes: usize) -> bool {
        let start = self.start.as_ptr() as usize + start;
        let is_it = |line: &str| {
            let Some((range, rest)) = line.split_once(' ') else { return false };
            let Some((from, to)) = range.split_once('-') else { return false };
            let number = |text| usize::from_str_radix(text, 16).unwrap_or(0);
            rest.starts_with("---p ") && number(from) <= start && number(to) >= start + bytes
        };
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        maps.lines().any(is_it)
    }
}

impl Mapper {
    /// Makes all windows accessible, one after the other, until `step` stops it, or the system does not map
    /// one; the rest is left to whoever needs it.
    pub(crate) fn map_all(&self, mut step: impl FnMut() -> ControlFlow<()>) {
        for (number, state) in self.0.states.iter().enumerate() {
            if step().is_break() {
                return;
            }
            if state.load(Ordering::Relaxed) != UNMAPPED {
                continue;
            }
            if let Err(error) = self.0.map_window(number) {
                tracing::warn!(%error, "the arena's memory is mapped only where it is needed");
                return;
            }
            thread::sleep(BACKGROUND_PAUSE);
        }
    }
}

#[cfg(test)]
impl Mapper {
    /// Whether no window is accessible, and no other mapping has its addresses.
    pub(crate) fn is_all_reserved(&self) -> bool {
        self.0.is_reserved(0, self.0.bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use bluebridge_wire::address::PAGE_BYTES;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::{super::carve_windows, *};

    /// Two windows and a page.
    const BYTES: usize = 2 * WINDOW_BYTES + PAGE_BYTES;

    fn file() -> OwnedFd {
        let file = memfd_create(c"windows", MemfdFlags::CLOEXEC).expect("a file");
        ftruncate(&file, (PAGE_BYTES + BYTES) as u64).expect("room");
        file
    }

    /// Windows over all of a file but its first page.
    fn windows(file: &OwnedFd) -> Windows {
        let again = || file.try_clone().expect("a descriptor");
        let windows = Windows::new(again(), &(PAGE_BYTES..PAGE_BYTES + BYTES), again());
        windows.expect("addresses")
    }

    fn mapped(mapper: &Mapper) -> Vec<bool> {
        mapper.0.states.iter().map(|state| state.load(Ordering::Relaxed) == MAPPED).collect()
    }

    #[test]
    fn a_window_is_mapped_when_it_is_needed_and_shows_its_part_of_the_file() {
        let file = file();
        let windows = windows(&file);
        let half = WINDOW_BYTES / 2;
        let mapper = windows.mapper();
        let memories = carve_windows(windows, &[0..half, half..BYTES]);
        let [mut low, mut high] = memories.try_into().expect("two");
        assert_eq!((low.len(), high.len()), (half, BYTES - half));
        assert_eq!(mapped(&mapper), [false; 3]);
        low.get_mut(8..16).copy_from_slice(b"the low ");
        assert_eq!(mapped(&mapper), [true, false, false]);
        let end = high.len();
        high.get_mut(end - 8..end).copy_from_slice(b"the high");
        assert_eq!(mapped(&mapper), [true, false, true]);
        // Across the border of two windows.
        let border = WINDOW_BYTES - half;
        high.get_mut(border - 2..border + 2).copy_from_slice(b"both");
        assert_eq!(mapped(&mapper), [true; 3]);
        let file = std::fs::File::from(file);
        let there = |at: usize, bytes: usize| {
            let mut there = vec![0; bytes];
            file.read_exact_at(&mut there, (PAGE_BYTES + at) as u64).expect("it is there");
            there
        };
        assert_eq!(there(8, 8), b"the low ");
        assert_eq!(there(BYTES - 8, 8), b"the high");
        assert_eq!(there(WINDOW_BYTES - 2, 4), b"both");
        file.write_all_at(b"from the file", (PAGE_BYTES + 4096) as u64).expect("room");
        assert_eq!(low.get(4096..4109), b"from the file");
    }

    #[test]
    fn threads_that_need_the_same_window_and_the_background_lose_no_store() {
        for round in 0..8 {
            let windows = windows(&file());
            let each = BYTES / 4;
            let ranges: Vec<_> = (0..4).map(|part| part * each..(part + 1) * each).collect();
            let mapper = windows.mapper();
            let mut memories = carve_windows(windows, &ranges);
            thread::scope(|scope| {
                scope.spawn(|| mapper.map_all(|| ControlFlow::Continue(())));
                for (number, memory) in (1..).zip(&mut memories) {
                    scope.spawn(move || {
                        for at in (0..each).step_by(PAGE_BYTES) {
                            memory.get_mut(at..at + 1)[0] = number;
                        }
                    });
                }
            });
            assert_eq!(mapped(&mapper), [true; 3]);
            for (number, memory) in (1..).zip(&memories) {
                let all =
                    (0..each).step_by(PAGE_BYTES).all(|at| memory.get(at..at + 1)[0] == number);
                assert!(all, "round {round}: a store to part {number} was lost");
            }
        }
    }

    #[test]
    fn mapping_in_the_background_can_be_stopped() {
        let mapper = windows(&file()).mapper();
        let mut steps = 0;
        mapper.map_all(|| {
            steps += 1;
            if steps == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        assert_eq!(mapped(&mapper), [true, false, false]);
    }

    #[test]
    #[should_panic(expected = "the system does not map the arena's memory")]
    fn memory_that_cannot_be_mapped_ends_the_shard() {
        let (nothing, _) = rustix::pipe::pipe().expect("a pipe");
        let windows = windows(&nothing);
        windows.into_reserved().mapped(&(0..1));
    }

    #[test]
    #[should_panic(expected = "beyond the memory's end")]
    fn nobody_gets_at_anothers_memory() {
        let windows = windows(&file());
        let memories = carve_windows(windows, &[0..PAGE_BYTES, PAGE_BYTES..BYTES]);
        memories[0].get(PAGE_BYTES - 1..PAGE_BYTES + 1);
    }

    #[test]
    fn a_large_range_has_few_windows() {
        let again = || file();
        let windows = Windows::new(again(), &(0..1 << 40), again()).expect("addresses");
        let reserved = windows.into_reserved();
        assert_eq!((reserved.window_shift, reserved.states.len()), (28, 4096));
    }
}
