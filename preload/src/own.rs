//! The memory of this library itself: never remote, because the threads that resolve faults use it.

use std::alloc::{GlobalAlloc, Layout};
use std::cell::{Cell, UnsafeCell};
use std::ptr;
use std::sync::{Mutex, MutexGuard};

use dlmalloc::{Allocator, Dlmalloc};

thread_local! {
    /// Above 0: what this thread allocates is this library's.
    static INSIDE: Cell<u32> = const { Cell::new(0) };
}

/// Whether what this thread allocates is this library's own.
pub(crate) fn is_inside() -> bool {
    // A thread whose variables are gone already is a program's, which ends.
    INSIDE.try_with(|inside| inside.get() > 0).unwrap_or(false)
}

/// From now on this thread is the library's own.
pub(crate) fn enter_for_good() {
    INSIDE.set(INSIDE.get() + 1);
}

/// Calls `work` as the library's own.
pub(crate) fn inside<R>(work: impl FnOnce() -> R) -> R {
    INSIDE.set(INSIDE.get() + 1);
    let result = work();
    INSIDE.set(INSIDE.get() - 1);
    result
}

/// Memory of the system, by system calls that nobody replaces.
struct Pages;

// SAFETY: the methods return and take memory of `mmap` as the trait demands.
unsafe impl Allocator for Pages {
    fn alloc(&self, size: usize) -> (*mut u8, usize, u32) {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the kernel chooses unused addresses.
        let start =
            unsafe { libc::syscall(libc::SYS_mmap, 0_usize, size, protection, flags, -1, 0_usize) };
        if start == -1 {
            return (ptr::null_mut(), 0, 0);
        }
        (ptr::with_exposed_provenance_mut(usize::try_from(start).unwrap_or(0)), size, 0)
    }

    fn remap(&self, _: *mut u8, _: usize, _: usize, _: bool) -> *mut u8 {
        ptr::null_mut()
    }

    fn free_part(&self, _: *mut u8, _: usize, _: usize) -> bool {
        false
    }

    fn free(&self, start: *mut u8, size: usize) -> bool {
        // SAFETY: the range is one that `alloc` returned, and nobody uses it.
        unsafe { libc::syscall(libc::SYS_munmap, start, size) == 0 }
    }

    fn can_release_part(&self, _: u32) -> bool {
        false
    }

    fn allocates_zeros(&self) -> bool {
        true
    }

    fn page_size(&self) -> usize {
        4096
    }
}

static HEAP: Mutex<Dlmalloc<Pages>> = Mutex::new(Dlmalloc::new_with_allocator(Pages));

fn with_heap<R>(work: impl FnOnce(&mut Dlmalloc<Pages>) -> R) -> R {
    work(&mut HEAP.lock().unwrap_or_else(|broken| broken.into_inner()))
}

/// The lock of the heap, while a thread forks.
struct Frozen(UnsafeCell<Option<MutexGuard<'static, Dlmalloc<Pages>>>>);

// SAFETY: only the thread that has the lock uses it.
unsafe impl Sync for Frozen {}

static FROZEN: Frozen = Frozen(UnsafeCell::new(None));

/// Holds the heap for a thread that forks, so that the child finds it whole. Until [`thaw`], nobody can allocate in it.
pub(crate) fn freeze() {
    let guard = HEAP.lock().unwrap_or_else(|broken| broken.into_inner());
    // SAFETY: this thread has the lock.
    unsafe { *FROZEN.0.get() = Some(guard) };
}

/// Ends [`freeze`], in the parent and in the child.
pub(crate) fn thaw() {
    // SAFETY: this thread has the lock.
    drop(unsafe { (*FROZEN.0.get()).take() });
}

/// In front of each allocation for C: its size, and where it really begins.
#[repr(C)]
struct Head {
    start: *mut u8,
    size: usize,
}

const HEAD: usize = size_of::<Head>();

/// Memory of `size` bytes, aligned as demanded, that [`free`] takes; null if there is none.
pub(crate) fn allocate(size: usize, align: usize) -> *mut u8 {
    let align = align.max(HEAD);
    let Some(whole) = size.checked_add(align) else { return ptr::null_mut() };
    // SAFETY: `align` is a power of two: C's functions check that.
    let start = with_heap(|heap| unsafe { heap.c_memalign(align, whole) });
    if start.is_null() {
        return start;
    }
    let data = start.wrapping_add(align);
    // SAFETY: the head lies between `start` and `data`, aligned.
    unsafe { data.wrapping_sub(HEAD).cast::<Head>().write(Head { start, size }) };
    data
}

/// The size of an allocation.
///
/// # Safety
/// It is one of [`allocate`].
pub(crate) unsafe fn size_of_allocation(data: *mut u8) -> usize {
    // SAFETY: the head is in front of it.
    unsafe { (*data.wrapping_sub(HEAD).cast::<Head>()).size }
}

/// Frees an allocation.
///
/// # Safety
/// It is one of [`allocate`], and is not used any more.
pub(crate) unsafe fn free(data: *mut u8) {
    // SAFETY: the head is in front of it.
    let start = unsafe { (*data.wrapping_sub(HEAD).cast::<Head>()).start };
    // SAFETY: it came from this heap.
    with_heap(|heap| unsafe { heap.c_free(start) });
}

/// The allocator of this library's Rust code.
pub(crate) struct Own;

/// Allocations of at least this many bytes have a mapping of their own: its pages are zeros and are taken when they are
/// used. Each process that starts makes some large buffers, most of which it never fills.
const DIRECT: usize = 128 << 10;

fn is_direct(layout: Layout) -> bool {
    layout.size() >= DIRECT && layout.align() <= 4096
}

// SAFETY: the methods return and take memory of the library's heap, or mappings of their own, as the layouts demand: an
// allocation is freed with the layout that it was made with.
unsafe impl GlobalAlloc for Own {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if is_direct(layout) {
            return Pages.alloc(layout.size()).0;
        }
        // SAFETY: the alignment of a layout is a power of two.
        with_heap(|heap| unsafe { heap.c_memalign(layout.align(), layout.size()) })
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are the same.
        let start = unsafe { self.alloc(layout) };
        if !start.is_null() && !is_direct(layout) {
            // SAFETY: the allocation has that many bytes.
            unsafe { start.write_bytes(0, layout.size()) };
        }
        start
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        if is_direct(layout) {
            Pages.free(start, layout.size());
            return;
        }
        // SAFETY: it came from this heap.
        with_heap(|heap| unsafe { heap.c_free(start) });
    }
}
