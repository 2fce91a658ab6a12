//! The memory of an arena: parts of a mapping, or plain process memory.

#![allow(unsafe_code, reason = "mapping memory is this module's work, and no other's")]

mod windows;

use core::{
    ops::{Deref, DerefMut, Range},
    ptr::NonNull,
    sync::atomic::{AtomicU32, AtomicU64, Ordering, compiler_fence, fence},
};
use std::sync::Arc;

use rustix::{
    fd::{AsFd, OwnedFd},
    fs::{MemfdFlags, ftruncate, memfd_create},
    io::Errno,
    mm::{self, Advice, MapFlags, ProtFlags},
};
use zerocopy::{FromBytes, IntoBytes};

use windows::Reserved;
pub(crate) use windows::{Mapper, Windows};

/// Bytes of a huge page on every machine that this runs on.
pub(crate) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// The kind of a mapping's pages.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum PageKind {
    /// Huge pages out of the system's pool (hugetlbfs).
    Huge,
    /// Ordinary pages, for which the system was advised to use transparent huge pages.
    Transparent,
    /// Ordinary pages.
    Plain,
}

/// A mapping that is unmapped when its last part is dropped.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
    /// Keeps the memory accessible for sharing it later; `None` if it is private.
    _file: Option<OwnedFd>,
    /// A file that is locked as long as the mapping exists.
    _locked: Option<OwnedFd>,
}

// SAFETY: the mapping is only an address range; `Part` decides who may access which part of it, and
// every byte is in at most one `Part`.
unsafe impl Send for Mapping {}
// SAFETY: as above; `Mapping` itself gives no access to the bytes.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is exactly what `map` mapped, and the last part is dropped.
        let unmapped = unsafe { mm::munmap(self.start.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

/// An exclusive part of a mapping.
#[derive(Debug)]
pub(crate) struct Part {
    mapping: Arc<Mapping>,
    range: Range<usize>,
}

impl Part {
    fn start(&self) -> *mut u8 {
        // SAFETY: the range is inside the mapping, by `split`.
        unsafe { self.mapping.start.as_ptr().add(self.range.start) }
    }
}

impl Deref for Part {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the part is mapped, readable, initialized by the system, and only this value of
        // this program can access it. A program in the kernel may read it, too; of page records it
        // writes the checksum, a word that this program loads by `load` only.
        unsafe { core::slice::from_raw_parts(self.start(), self.range.len()) }
    }
}

impl DerefMut for Part {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`; the part is also writable, and `self` is borrowed exclusively.
        unsafe { core::slice::from_raw_parts_mut(self.start(), self.range.len()) }
    }
}

/// The bytes of one arena's pages, initially zero.
#[derive(Debug)]
pub struct Memory(Bytes);

#[derive(Debug)]
enum Bytes {
    Heap(Vec<u8>),
    Mapped(Part),
    /// An exclusive range of the windows.
    InWindows(Arc<Reserved>, Range<usize>),
}

impl Memory {
    /// Plain process memory, for simulations and tests: no privilege, no `mmap`.
    #[must_use]
    pub fn heap(bytes: usize) -> Self {
        Self(Bytes::Heap(vec![0; bytes]))
    }

    pub(crate) const fn mapped(part: Part) -> Self {
        Self(Bytes::Mapped(part))
    }

    /// How many bytes there are.
    pub(crate) fn len(&self) -> usize {
        match &self.0 {
            Bytes::Heap(bytes) => bytes.len(),
            Bytes::Mapped(part) => part.range.len(),
            Bytes::InWindows(_, range) => range.len(),
        }
    }

    /// The bytes of a range.
    ///
    /// # Panics
    /// If the range goes beyond the end, or the system does not map it (see [`Windows`]).
    pub(crate) fn get(&self, wanted: Range<usize>) -> &[u8] {
        match &self.0 {
            Bytes::Heap(bytes) => &bytes[wanted],
            Bytes::Mapped(part) => &part[wanted],
            Bytes::InWindows(windows, own) => {
                let start = windows.mapped(&inside(own, &wanted));
                // SAFETY: the range is mapped as long as the windows exist, readable, initialized by
                // the system, and only this value of this program can access it, as for `Part`.
                unsafe { core::slice::from_raw_parts(start.as_ptr(), wanted.len()) }
            }
        }
    }

    /// The bytes of a range, to be changed by [`crate::kept::stores`].
    ///
    /// # Panics
    /// As [`Self::get`].
    pub(crate) fn get_mut(&mut self, wanted: Range<usize>) -> &mut [u8] {
        match &mut self.0 {
            Bytes::Heap(bytes) => &mut bytes[wanted],
            Bytes::Mapped(part) => &mut part[wanted],
            Bytes::InWindows(windows, own) => {
                let start = windows.mapped(&inside(own, &wanted));
                // SAFETY: as for `get`; the range is also writable, and `self` is borrowed exclusively.
                unsafe { core::slice::from_raw_parts_mut(start.as_ptr(), wanted.len()) }
            }
        }
    }
}

/// A range, counted from where `own` begins, inside of which it must be.
fn inside(own: &Range<usize>, wanted: &Range<usize>) -> Range<usize> {
    assert!(wanted.start <= wanted.end && wanted.end <= own.len(), "beyond the memory's end");
    own.start + wanted.start..own.start + wanted.end
}

/// Values of a type of which every bit pattern is valid, in a part of a mapping or on the heap.
///
/// It can only be read as a slice: a store that is kept goes through [`crate::kept::stores`].
#[derive(Debug)]
pub(crate) struct Table<T>(Values<T>);

#[derive(Debug)]
enum Values<T> {
    Heap(Vec<T>),
    Mapped { _part: Part, start: NonNull<T>, count: usize },
}

// SAFETY: `start` points into the part, which only this value can access, and `T` can be sent.
unsafe impl<T: Send> Send for Values<T> {}
// SAFETY: a shared `Values` only gives shared access to its `T`s.
unsafe impl<T: Sync> Sync for Values<T> {}

impl<T: FromBytes + IntoBytes + Copy> Table<T> {
    pub(crate) fn heap(count: usize) -> Self {
        // Zeroed by the system, which provides memory only for what is used.
        let values = T::new_vec_zeroed(count);
        Self(Values::Heap(values.unwrap_or_else(|_| vec![T::new_zeroed(); count])))
    }

    /// The first `count` values in a part.
    ///
    /// # Panics
    /// If the part is not aligned, or too short: its layout is wrong.
    pub(crate) fn mapped(part: Part, count: usize) -> Self {
        let start = NonNull::new(part.start().cast::<T>()).expect("a mapping is not at 0");
        assert!(start.is_aligned(), "the part is not aligned");
        assert!(count.checked_mul(size_of::<T>()).is_some_and(|bytes| bytes <= part.len()));
        Self(Values::Mapped { _part: part, start, count })
    }

    /// The values, to be changed by [`crate::kept::stores`].
    pub(crate) fn as_mut(&mut self) -> &mut [T] {
        match &mut self.0 {
            Values::Heap(values) => values,
            Values::Mapped { start, count, .. } => {
                // SAFETY: as for `deref`; the part is writable, and `self` is borrowed exclusively.
                unsafe { core::slice::from_raw_parts_mut(start.as_ptr(), *count) }
            }
        }
    }
}

impl<T> Deref for Table<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.0 {
            Values::Heap(values) => values,
            Values::Mapped { start, count, .. } => {
                // SAFETY: the values are in the part, aligned, by `mapped`; every bit pattern is
                // valid, and only this value can access the part.
                unsafe { core::slice::from_raw_parts(start.as_ptr(), *count) }
            }
        }
    }
}

/// Stores a word so that no store that precedes it in the program is done after it, and none that
/// follows it before it, as a process sees them that maps the memory after this one was killed.
pub(crate) fn store_in_order(word: &mut u32, value: u32) {
    compiler_fence(Ordering::SeqCst);
    // SAFETY: the word is aligned, borrowed exclusively, and not used otherwise while the atomic exists.
    let word = unsafe { AtomicU32::from_ptr(word) };
    word.store(value, Ordering::Release);
    compiler_fence(Ordering::SeqCst);
}

/// Stores a word before all stores that follow it in the program, as another core sees them.
pub(crate) fn store_before(word: &mut u64, value: u64) {
    // SAFETY: the word is aligned, borrowed exclusively, and not used otherwise while the atomic exists.
    let word = unsafe { AtomicU64::from_ptr(word) };
    word.store(value, Ordering::Relaxed);
    fence(Ordering::Release);
}

/// Stores a word after all stores that precede it in the program, as another core sees them.
pub(crate) fn store_after(word: &mut u64, value: u64) {
    // SAFETY: as in `store_before`.
    let word = unsafe { AtomicU64::from_ptr(word) };
    word.store(value, Ordering::Release);
    compiler_fence(Ordering::SeqCst);
}

/// Maps the first `bytes` bytes of a file or of a BPF map, and keeps another file open with it.
pub(crate) fn map_kept(
    file: OwnedFd,
    bytes: usize,
    locked: Option<OwnedFd>,
) -> Result<Part, Errno> {
    let start = map_shared(&file, bytes)?;
    let mapping = Mapping { start, bytes, _file: Some(file), _locked: locked };
    Ok(Part { mapping: Arc::new(mapping), range: 0..bytes })
}

/// Cuts a part into those that `ranges` name; they are in order and do not overlap.
///
/// # Panics
/// If they are not, or go beyond the part: the layout is wrong.
pub(crate) fn carve(whole: Part, ranges: &[Range<usize>]) -> Vec<Part> {
    let Part { mapping, range } = whole;
    let mut from = 0;
    let mut cut = |wanted: &Range<usize>| {
        assert!(from <= wanted.start && wanted.start <= wanted.end && wanted.end <= range.len());
        from = wanted.end;
        let range = range.start + wanted.start..range.start + wanted.end;
        Part { mapping: Arc::clone(&mapping), range }
    };
    ranges.iter().map(&mut cut).collect()
}

/// Memory in windows, as [`carve`].
///
/// # Panics
/// As [`carve`].
pub(crate) fn carve_windows(windows: Windows, ranges: &[Range<usize>]) -> Vec<Memory> {
    let windows = windows.into_reserved();
    let mut from = 0;
    let mut cut = |wanted: &Range<usize>| {
        assert!(
            from <= wanted.start && wanted.start <= wanted.end && wanted.end <= windows.bytes()
        );
        from = wanted.end;
        Memory(Bytes::InWindows(Arc::clone(&windows), wanted.clone()))
    };
    ranges.iter().map(&mut cut).collect()
}

/// Maps `bytes` of memory of a kind.
pub(crate) fn map(bytes: usize, kind: PageKind, is_shared: bool) -> Result<Part, Errno> {
    let (start, file) = if is_shared {
        let (start, file) = map_file(bytes, kind)?;
        (start, Some(file))
    } else {
        (map_private(bytes)?, None)
    };
    let mapping = Mapping { start, bytes, _file: file, _locked: None };
    if kind == PageKind::Transparent {
        // SAFETY: the advice has no effect that a program can observe.
        unsafe { mm::madvise(start.as_ptr().cast(), bytes, Advice::LinuxHugepage) }?;
    }
    Ok(Part { mapping: Arc::new(mapping), range: 0..bytes })
}

fn map_file(bytes: usize, kind: PageKind) -> Result<(NonNull<u8>, OwnedFd), Errno> {
    let huge = if kind == PageKind::Huge { MemfdFlags::HUGETLB } else { MemfdFlags::empty() };
    let file = memfd_create(c"bluebridge-arena", MemfdFlags::CLOEXEC | huge)?;
    ftruncate(&file, bytes as u64)?;
    Ok((map_shared(&file, bytes)?, file))
}

fn map_shared(file: &OwnedFd, bytes: usize) -> Result<NonNull<u8>, Errno> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the system's choice affects no other mapping.
    let start = unsafe {
        mm::mmap(core::ptr::null_mut(), bytes, access, MapFlags::SHARED, file.as_fd(), 0)
    }?;
    NonNull::new(start.cast()).ok_or(Errno::NOMEM)
}

fn map_private(bytes: usize) -> Result<NonNull<u8>, Errno> {
    let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: a new mapping at an address of the system's choice affects no other mapping.
    let start = unsafe { mm::mmap_anonymous(core::ptr::null_mut(), bytes, access, flags) }?;
    NonNull::new(start.cast()).ok_or(Errno::NOMEM)
}

/// A word that a program in the kernel may store at the same time, as a whole.
pub(crate) fn load(word: &u64) -> u64 {
    // SAFETY: the word is readable and aligned. A volatile load of a word is one load, and is done as often as it is written
    // here.
    unsafe { core::ptr::read_volatile(word) }
}

/// Makes the system provide the pages of a range of a part now.
pub(crate) fn populate(part: &mut Part, range: Range<usize>) -> Result<(), Errno> {
    let bytes = &mut part[range];
    let (start, length) = (bytes.as_mut_ptr(), bytes.len());
    // SAFETY: the range is exclusively ours, and populating changes no byte of it.
    unsafe { mm::madvise(start.cast(), length, Advice::LinuxPopulateWrite) }
}

/// Locks the pages of a part in memory.
pub(crate) fn lock(part: &mut Part) -> Result<(), Errno> {
    let (start, bytes) = (part.as_mut_ptr(), part.len());
    // SAFETY: the part is mapped and exclusively ours.
    unsafe { mm::mlock(start.cast(), bytes) }
}

/// Cuts a part into `count` equal ones; a remainder at the end is not used.
pub(crate) fn split(whole: Part, count: usize) -> Vec<Part> {
    let Part { mapping, range } = whole;
    let bytes = range.len() / count.max(1);
    let part_of = |number: usize| {
        let start = range.start + number * bytes;
        Part { mapping: Arc::clone(&mapping), range: start..start + bytes }
    };
    (0..count).map(part_of).collect()
}
