//! `malloc` and its relatives: over the region once it is there, for the program's threads.
//!
//! The dynamic linker gets local memory: what it knows of libraries is read when a thread starts, also by the library's own
//! threads, and those cannot wait for remote memory. Its calls are recognized by their return address.

use std::arch::naked_asm;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

use libmimalloc_sys as mi;

use crate::run::{holds, is_ready};
use crate::{Next, next, own, set_errno};

static LINKER_START: AtomicUsize = AtomicUsize::new(0);
static LINKER_END: AtomicUsize = AtomicUsize::new(0);

/// Finds the dynamic linker, before the heap is in the region.
pub(crate) fn find_linker() {
    // SAFETY: it has no preconditions.
    let base = unsafe { libc::getauxval(libc::AT_BASE) };
    let mut base = usize::try_from(base).unwrap_or(0);
    // SAFETY: the function keeps to the callback's contract, and the data outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(note_linker), (&raw mut base).cast()) };
}

unsafe extern "C" fn note_linker(
    info: *mut libc::dl_phdr_info,
    _: usize,
    base: *mut c_void,
) -> c_int {
    // SAFETY: `find_linker` passes this.
    let base = unsafe { *base.cast::<usize>() };
    // SAFETY: the C library passes a valid description.
    let info = unsafe { &*info };
    if usize::try_from(info.dlpi_addr).unwrap_or(0) != base {
        return 0;
    }
    // SAFETY: the description has that many headers.
    let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
    let ends = headers.iter().filter(|header| header.p_type == libc::PT_LOAD);
    let end = ends.map(|header| header.p_vaddr + header.p_memsz).max().unwrap_or(0);
    LINKER_START.store(base, Ordering::Relaxed);
    LINKER_END.store(base + usize::try_from(end).unwrap_or(0), Ordering::Relaxed);
    1
}

/// Whether an allocation is made in the region.
fn is_remote(caller: usize) -> bool {
    let is_linker = caller >= LINKER_START.load(Ordering::Relaxed)
        && caller < LINKER_END.load(Ordering::Relaxed);
    is_ready() && !own::is_inside() && !is_linker
}

/// Smaller allocations of the heap would be aligned to 8 bytes only; C's are aligned to 16.
const LEAST: usize = 16;

fn fail() -> *mut c_void {
    set_errno(libc::ENOMEM);
    ptr::null_mut()
}

/// Defines a function of C that calls another one with the same arguments and its return address.
macro_rules! with_caller {
    ($name:ident ($($argument:ident: $type:ty),+), $inner:ident, $x86:literal, $arm:literal) => {
        #[cfg(target_arch = "x86_64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        unsafe extern "C" fn $name($($argument: $type),+) -> *mut c_void {
            naked_asm!(concat!("mov ", $x86, ", [rsp]"), "jmp {inner}", inner = sym $inner)
        }

        #[cfg(target_arch = "aarch64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        unsafe extern "C" fn $name($($argument: $type),+) -> *mut c_void {
            naked_asm!(concat!("mov ", $arm, ", x30"), "b {inner}", inner = sym $inner)
        }
    };
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("this architecture needs its own way to pass the return address");

with_caller!(malloc(size: usize), malloc_for, "rsi", "x1");
with_caller!(calloc(count: usize, size: usize), calloc_for, "rdx", "x2");
with_caller!(realloc(data: *mut c_void, size: usize), realloc_for, "rdx", "x2");

extern "C" fn malloc_for(size: usize, caller: usize) -> *mut c_void {
    aligned(size, 16, caller)
}

fn aligned(size: usize, align: usize, caller: usize) -> *mut c_void {
    let data = if !is_remote(caller) {
        own::allocate(size, align).cast()
    } else if align <= 16 {
        // SAFETY: it has no preconditions.
        unsafe { mi::mi_malloc(size.max(LEAST)) }
    } else {
        // SAFETY: the callers check that the alignment is a power of two.
        unsafe { mi::mi_malloc_aligned(size, align) }
    };
    if data.is_null() { fail() } else { data }
}

extern "C" fn calloc_for(count: usize, size: usize, caller: usize) -> *mut c_void {
    let Some(bytes) = count.checked_mul(size) else { return fail() };
    if is_remote(caller) {
        // SAFETY: it has no preconditions.
        let data = unsafe { mi::mi_zalloc(bytes.max(LEAST)) };
        return if data.is_null() { fail() } else { data };
    }
    let data = own::allocate(bytes, 16);
    if data.is_null() {
        return fail();
    }
    // SAFETY: the allocation has that many bytes.
    unsafe { data.write_bytes(0, bytes) };
    data.cast()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn free(data: *mut c_void) {
    if data.is_null() {
        return;
    }
    if holds(data) {
        // SAFETY: the caller got it from the functions above.
        unsafe { mi::mi_free(data) };
    } else {
        // SAFETY: as above.
        unsafe { own::free(data.cast()) };
    }
}

/// # Safety
/// As for `realloc`.
unsafe extern "C" fn realloc_for(data: *mut c_void, size: usize, caller: usize) -> *mut c_void {
    if data.is_null() {
        return malloc_for(size, caller);
    }
    if size == 0 {
        // As glibc does.
        // SAFETY: the caller gives it up.
        unsafe { free(data) };
        return ptr::null_mut();
    }
    if holds(data) && is_remote(caller) {
        // SAFETY: the caller got it from the functions above.
        let data = unsafe { mi::mi_realloc(data, size.max(LEAST)) };
        return if data.is_null() { fail() } else { data };
    }
    let fresh = malloc_for(size, caller);
    if !fresh.is_null() {
        // SAFETY: the caller got it from the functions above.
        let old = unsafe { malloc_usable_size(data) };
        // SAFETY: both have at least that many bytes, and they are different allocations.
        unsafe { ptr::copy_nonoverlapping(data.cast::<u8>(), fresh.cast(), old.min(size)) };
        // SAFETY: the caller gives it up.
        unsafe { free(data) };
    }
    fresh
}

#[unsafe(no_mangle)]
unsafe extern "C" fn reallocarray(data: *mut c_void, count: usize, size: usize) -> *mut c_void {
    match count.checked_mul(size) {
        // SAFETY: the caller's promises are the same.
        Some(bytes) => unsafe { realloc_for(data, bytes, 0) },
        None => fail(),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn malloc_usable_size(data: *mut c_void) -> usize {
    if data.is_null() {
        return 0;
    }
    if holds(data) {
        // SAFETY: the caller got it from the functions above.
        unsafe { mi::mi_usable_size(data) }
    } else {
        // SAFETY: as above.
        unsafe { own::size_of_allocation(data.cast()) }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn posix_memalign(result: *mut *mut c_void, align: usize, size: usize) -> c_int {
    if !align.is_power_of_two() || !align.is_multiple_of(size_of::<usize>()) {
        return libc::EINVAL;
    }
    let data = aligned(size, align, 0);
    if data.is_null() {
        return libc::ENOMEM;
    }
    // SAFETY: the caller passes a valid place for the result.
    unsafe { *result = data };
    0
}

/// An alignment that is not a power of two is rounded up, as glibc does.
#[unsafe(no_mangle)]
extern "C" fn aligned_alloc(align: usize, size: usize) -> *mut c_void {
    match align.max(16).checked_next_power_of_two() {
        Some(align) => aligned(size, align, 0),
        None => fail(),
    }
}

#[unsafe(no_mangle)]
extern "C" fn memalign(align: usize, size: usize) -> *mut c_void {
    aligned_alloc(align, size)
}

#[unsafe(no_mangle)]
extern "C" fn valloc(size: usize) -> *mut c_void {
    aligned(size, 4096, 0)
}

#[unsafe(no_mangle)]
extern "C" fn pvalloc(size: usize) -> *mut c_void {
    match size.checked_next_multiple_of(4096) {
        Some(size) => aligned(size, 4096, 0),
        None => fail(),
    }
}

/// Its values are cleared in a child process before any handler runs there, so they must be local.
#[unsafe(no_mangle)]
unsafe extern "C" fn pthread_setspecific(key: libc::pthread_key_t, value: *const c_void) -> c_int {
    type Set = unsafe extern "C" fn(libc::pthread_key_t, *const c_void) -> c_int;
    static NEXT: Next = Next::new(c"pthread_setspecific");
    // SAFETY: the C library's function has this signature, and it exists.
    let next = unsafe { mem::transmute::<*mut c_void, Set>(NEXT.get()) };
    // SAFETY: the caller's promises are the same.
    own::inside(|| unsafe { next(key, value) })
}

// Each thread that starts reads the locale, also the library's own: so it is local.

#[unsafe(no_mangle)]
unsafe extern "C" fn setlocale(category: c_int, name: *const c_char) -> *mut c_char {
    type SetLocale = unsafe extern "C" fn(c_int, *const c_char) -> *mut c_char;
    let next = next(c"setlocale");
    // SAFETY: the C library's function has this signature, and it exists.
    let next = unsafe { mem::transmute::<*mut c_void, SetLocale>(next) };
    // SAFETY: the caller's promises are the same.
    own::inside(|| unsafe { next(category, name) })
}

type NewLocale = unsafe extern "C" fn(c_int, *const c_char, libc::locale_t) -> libc::locale_t;

/// # Safety
/// As for `newlocale`, of which `symbol` is a name.
unsafe fn new_locale(
    symbol: &CStr,
    categories: c_int,
    name: *const c_char,
    base: libc::locale_t,
) -> libc::locale_t {
    let next = next(symbol);
    // SAFETY: the C library's function has this signature, and it exists.
    let next = unsafe { mem::transmute::<*mut c_void, NewLocale>(next) };
    // SAFETY: the caller's promises are the same.
    own::inside(|| unsafe { next(categories, name, base) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn newlocale(
    categories: c_int,
    name: *const c_char,
    base: libc::locale_t,
) -> libc::locale_t {
    // SAFETY: the caller's promises are the same.
    unsafe { new_locale(c"newlocale", categories, name, base) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __newlocale(
    categories: c_int,
    name: *const c_char,
    base: libc::locale_t,
) -> libc::locale_t {
    // SAFETY: the caller's promises are the same.
    unsafe { new_locale(c"__newlocale", categories, name, base) }
}
