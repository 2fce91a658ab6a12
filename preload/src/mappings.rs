//! `mmap` and its relatives: large anonymous mappings are made in the region.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::run::{Run, contains, holds, is_ready, run, touches};
use crate::{own, result, say, set_errno};

const PAGE: usize = 4096;
const READ_WRITE: c_int = libc::PROT_READ | libc::PROT_WRITE;

fn fail(errno: c_int) -> *mut c_void {
    set_errno(errno);
    libc::MAP_FAILED
}

fn returned(result: libc::c_long) -> *mut c_void {
    // `syscall` has set errno, and -1 is MAP_FAILED.
    usize::try_from(result).map_or(libc::MAP_FAILED, ptr::with_exposed_provenance_mut)
}

/// Says something once.
fn say_once(said: &AtomicBool, message: std::fmt::Arguments<'_>) {
    if !said.swap(true, Ordering::Relaxed) {
        say(message);
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn mmap(
    address: *mut c_void,
    length: usize,
    protection: c_int,
    flags: c_int,
    descriptor: c_int,
    offset: libc::off_t,
) -> *mut c_void {
    let kinds = libc::MAP_ANONYMOUS | libc::MAP_PRIVATE | libc::MAP_SHARED;
    let special = libc::MAP_GROWSDOWN | libc::MAP_STACK | libc::MAP_HUGETLB;
    let is_plain = flags & kinds == libc::MAP_ANONYMOUS | libc::MAP_PRIVATE && flags & special == 0;
    let is_fixed = flags & libc::MAP_FIXED != 0;
    let is_exclusive = flags & libc::MAP_FIXED_NOREPLACE == libc::MAP_FIXED_NOREPLACE;
    if is_ready()
        && !own::is_inside()
        && let Some(run) = run()
    {
        if is_fixed && touches(address, length) {
            return replace(run, address, length, protection, is_plain);
        }
        let is_large = length as u64 >= run.settings.mapping_bytes;
        if is_plain && !is_fixed && !is_exclusive && is_large && protection == READ_WRITE {
            return make(run, length, flags & libc::MAP_NORESERVE != 0);
        }
    }
    // SAFETY: the caller's promises are the system call's.
    returned(unsafe {
        libc::syscall(libc::SYS_mmap, address, length, protection, flags, descriptor, offset)
    })
}

/// A new mapping in the region. If there is no room for addresses that are only reserved, they are local.
fn make(run: &Run, length: usize, is_reservation: bool) -> *mut c_void {
    static SAID: AtomicBool = AtomicBool::new(false);
    let bytes = length.checked_next_multiple_of(PAGE);
    match bytes.and_then(|bytes| own::inside(|| run.ranges().take(bytes))) {
        Some(start) => ptr::with_exposed_provenance_mut(start),
        None if is_reservation => {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            // SAFETY: the kernel chooses unused addresses.
            returned(unsafe {
                libc::syscall(libc::SYS_mmap, 0_usize, length, READ_WRITE, flags, -1, 0_usize)
            })
        }
        None => {
            let message = format_args!(
                "there are no addresses for a mapping of {length} bytes; raise --size"
            );
            say_once(&SAID, message);
            fail(libc::ENOMEM)
        }
    }
}

/// A mapping at an address in the region.
fn replace(
    run: &Run,
    address: *mut c_void,
    length: usize,
    protection: c_int,
    is_plain: bool,
) -> *mut c_void {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !is_plain || !contains(address, length) {
        let message = format_args!("a file or shared memory cannot be mapped over remote memory");
        say_once(&SAID, message);
        return fail(libc::EINVAL);
    }
    let bytes = length.next_multiple_of(PAGE);
    own::inside(|| run.ranges().claim(address.addr(), bytes));
    run.discard(address, bytes);
    // SAFETY: the caller replaces what was there.
    if unsafe { mprotect(address, length, protection) } == 0 { address } else { libc::MAP_FAILED }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn mmap64(
    address: *mut c_void,
    length: usize,
    protection: c_int,
    flags: c_int,
    descriptor: c_int,
    offset: libc::off_t,
) -> *mut c_void {
    // SAFETY: the caller's promises are the same.
    unsafe { mmap(address, length, protection, flags, descriptor, offset) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn munmap(address: *mut c_void, length: usize) -> c_int {
    let Some(run) = run().filter(|_| holds(address)) else {
        // SAFETY: the caller's promises are the system call's.
        return result(unsafe { libc::syscall(libc::SYS_munmap, address, length) });
    };
    if !contains(address, length) {
        set_errno(libc::EINVAL);
        return -1;
    }
    let bytes = length.next_multiple_of(PAGE);
    run.discard(address, bytes);
    // It may have been protected.
    // SAFETY: the range is the region's, and the caller gave it up.
    unsafe { libc::syscall(libc::SYS_mprotect, address, bytes, READ_WRITE) };
    own::inside(|| run.ranges().give(address.addr(), bytes));
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn mremap(
    address: *mut c_void,
    old_length: usize,
    new_length: usize,
    flags: c_int,
    target: *mut c_void,
) -> *mut c_void {
    let Some(run) = run().filter(|_| holds(address)) else {
        if flags & libc::MREMAP_FIXED != 0 && touches(target, new_length) {
            return fail(libc::EINVAL);
        }
        // SAFETY: the caller's promises are the system call's.
        return returned(unsafe {
            libc::syscall(libc::SYS_mremap, address, old_length, new_length, flags, target)
        });
    };
    let lengths =
        old_length.checked_next_multiple_of(PAGE).zip(new_length.checked_next_multiple_of(PAGE));
    let Some((old, new)) = lengths.filter(|(old, new)| *old > 0 && *new > 0) else {
        return fail(libc::EINVAL);
    };
    if flags & !libc::MREMAP_MAYMOVE != 0 || !contains(address, old) {
        return fail(libc::EINVAL);
    }
    if new <= old {
        if new < old {
            // SAFETY: the caller gives the rest up.
            unsafe { munmap(address.wrapping_byte_add(new), old - new) };
        }
        return address;
    }
    if own::inside(|| run.ranges().extend(address.addr() + old, new - old)) {
        return address;
    }
    if flags & libc::MREMAP_MAYMOVE == 0 {
        return fail(libc::ENOMEM);
    }
    let moved = make(run, new, false);
    if moved != libc::MAP_FAILED {
        // SAFETY: both ranges are the region's, and they are different.
        unsafe { ptr::copy_nonoverlapping(address.cast::<u8>(), moved.cast(), old) };
        // SAFETY: the caller gives it up.
        unsafe { munmap(address, old) };
    }
    moved
}

#[unsafe(no_mangle)]
unsafe extern "C" fn madvise(address: *mut c_void, length: usize, advice: c_int) -> c_int {
    let Some(run) = run().filter(|_| holds(address)) else {
        // SAFETY: the caller's promises are the system call's.
        return result(unsafe { libc::syscall(libc::SYS_madvise, address, length, advice) });
    };
    let bytes = length.checked_next_multiple_of(PAGE);
    let Some(bytes) = bytes.filter(|_| address.addr().is_multiple_of(PAGE)) else {
        set_errno(libc::EINVAL);
        return -1;
    };
    match advice {
        libc::MADV_DONTNEED | libc::MADV_FREE => {
            run.discard(address, bytes);
            0
        }
        // Hints: the pager decides what is local, and in which pages.
        libc::MADV_NORMAL
        | libc::MADV_RANDOM
        | libc::MADV_SEQUENTIAL
        | libc::MADV_WILLNEED
        | libc::MADV_HUGEPAGE
        | libc::MADV_NOHUGEPAGE
        | libc::MADV_MERGEABLE
        | libc::MADV_UNMERGEABLE
        | libc::MADV_DODUMP
        | libc::MADV_DONTDUMP
        | libc::MADV_COLD
        | libc::MADV_PAGEOUT
        | libc::MADV_DOFORK
        | libc::MADV_KEEPONFORK => 0,
        // Others would change what the program sees, for example in a child (MADV_WIPEONFORK).
        _ => {
            set_errno(libc::EINVAL);
            -1
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn mprotect(address: *mut c_void, length: usize, protection: c_int) -> c_int {
    if protection & libc::PROT_READ == 0
        && touches(address, length)
        && let Some(run) = run()
        && let Err(error) = own::inside(|| run.expect_protection())
    {
        say(format_args!("remote memory cannot be protected: {error}"));
        set_errno(libc::ENOMEM);
        return -1;
    }
    // SAFETY: the caller's promises are the system call's.
    result(unsafe { libc::syscall(libc::SYS_mprotect, address, length, protection) })
}

/// Remote memory cannot be locked: it leaves the machine.
#[unsafe(no_mangle)]
unsafe extern "C" fn mlock(address: *const c_void, length: usize) -> c_int {
    if touches(address, length) {
        set_errno(libc::EPERM);
        return -1;
    }
    // SAFETY: the caller's promises are the system call's.
    result(unsafe { libc::syscall(libc::SYS_mlock, address, length) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn mlock2(address: *const c_void, length: usize, flags: c_int) -> c_int {
    if touches(address, length) {
        set_errno(libc::EPERM);
        return -1;
    }
    // SAFETY: as above.
    result(unsafe { libc::syscall(libc::SYS_mlock2, address, length, flags) })
}

#[unsafe(no_mangle)]
extern "C" fn mlockall(flags: c_int) -> c_int {
    if is_ready() {
        set_errno(libc::EPERM);
        return -1;
    }
    // SAFETY: the system call has no memory arguments.
    result(unsafe { libc::syscall(libc::SYS_mlockall, flags) })
}
