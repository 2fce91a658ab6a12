//! The memory of an arena: a part of one mapping, or plain process memory.

#![allow(unsafe_code, reason = "mapping memory is this module's work, and no other's")]

use core::{
    ops::{Deref, DerefMut, Range},
    ptr::NonNull,
};
use std::sync::Arc;

use rustix::{
    fd::{AsFd, OwnedFd},
    fs::{MemfdFlags, ftruncate, memfd_create},
    io::Errno,
    mm::{self, Advice, MapFlags, ProtFlags},
};

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
        // SAFETY: the part is mapped, readable, initialized by the system, and only this value can
        // access it.
        unsafe { core::slice::from_raw_parts(self.start(), self.range.len()) }
    }
}

impl DerefMut for Part {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`; the part is also writable, and `self` is borrowed exclusively.
        unsafe { core::slice::from_raw_parts_mut(self.start(), self.range.len()) }
    }
}

/// The bytes of one arena, initially zero.
#[derive(Debug)]
pub struct Memory(Bytes);

#[derive(Debug)]
enum Bytes {
    Heap(Vec<u8>),
    Mapped(Part),
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
}

impl Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Bytes::Heap(bytes) => bytes,
            Bytes::Mapped(part) => part,
        }
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Bytes::Heap(bytes) => bytes,
            Bytes::Mapped(part) => part,
        }
    }
}

/// Maps `bytes` of memory of a kind.
pub(crate) fn map(bytes: usize, kind: PageKind, is_shared: bool) -> Result<Part, Errno> {
    let (start, file) = if is_shared {
        let (start, file) = map_file(bytes, kind)?;
        (start, Some(file))
    } else {
        (map_private(bytes)?, None)
    };
    let mapping = Mapping { start, bytes, _file: file };
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
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the system's choice affects no other mapping.
    let start = unsafe {
        mm::mmap(core::ptr::null_mut(), bytes, access, MapFlags::SHARED, file.as_fd(), 0)
    }?;
    Ok((NonNull::new(start.cast()).ok_or(Errno::NOMEM)?, file))
}

fn map_private(bytes: usize) -> Result<NonNull<u8>, Errno> {
    let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: a new mapping at an address of the system's choice affects no other mapping.
    let start = unsafe { mm::mmap_anonymous(core::ptr::null_mut(), bytes, access, flags) }?;
    NonNull::new(start.cast()).ok_or(Errno::NOMEM)
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
