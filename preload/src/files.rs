//! `open` and `fcntl`: files are not opened for direct access.
//!
//! A device writes to a page that is pinned, past its protection; if the page leaves meanwhile, what arrives is lost. With
//! the page cache in between, the kernel copies, which the pager sees.

use std::ffi::{c_char, c_int, c_void};
use std::mem;

use crate::run::is_ready;
use crate::{Next, own, result};

/// The flags of a file that may be read into remote memory.
fn buffered(flags: c_int) -> c_int {
    if is_ready() && !own::is_inside() { flags & !libc::O_DIRECT } else { flags }
}

/// Opens a file.
///
/// # Safety
/// The path is a C string.
unsafe fn open_at(
    directory: c_int,
    path: *const c_char,
    flags: c_int,
    mode: libc::mode_t,
) -> c_int {
    // SAFETY: the caller's promise is the same.
    result(unsafe { libc::syscall(libc::SYS_openat, directory, path, buffered(flags), mode) })
}

// The mode is optional in C. Where it is missing, its register holds anything, which the kernel ignores.

#[unsafe(no_mangle)]
unsafe extern "C" fn open(path: *const c_char, flags: c_int, mode: libc::mode_t) -> c_int {
    // SAFETY: the caller's promises are the same.
    unsafe { open_at(libc::AT_FDCWD, path, flags, mode) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn open64(path: *const c_char, flags: c_int, mode: libc::mode_t) -> c_int {
    // SAFETY: the caller's promises are the same.
    unsafe { open_at(libc::AT_FDCWD, path, flags, mode) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn openat(
    directory: c_int,
    path: *const c_char,
    flags: c_int,
    mode: libc::mode_t,
) -> c_int {
    // SAFETY: the caller's promises are the same.
    unsafe { open_at(directory, path, flags, mode) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn openat64(
    directory: c_int,
    path: *const c_char,
    flags: c_int,
    mode: libc::mode_t,
) -> c_int {
    // SAFETY: the caller's promises are the same.
    unsafe { open_at(directory, path, flags, mode) }
}

/// `open` of programs that are compiled with `_FORTIFY_SOURCE`, without a mode.
#[unsafe(no_mangle)]
unsafe extern "C" fn __open_2(path: *const c_char, flags: c_int) -> c_int {
    // SAFETY: the caller's promises are the same.
    unsafe { open_at(libc::AT_FDCWD, path, flags, 0) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __open64_2(path: *const c_char, flags: c_int) -> c_int {
    // SAFETY: the caller's promises are the same.
    unsafe { open_at(libc::AT_FDCWD, path, flags, 0) }
}

type Control = unsafe extern "C" fn(c_int, c_int, ...) -> c_int;

/// # Safety
/// As for `fcntl`.
unsafe fn control(descriptor: c_int, command: c_int, argument: usize, next: &Next) -> c_int {
    // SAFETY: the C library's function has this signature, and it exists.
    let next = unsafe { mem::transmute::<*mut c_void, Control>(next.get()) };
    if command == libc::F_SETFL {
        // The kernel looks at the lower half only.
        let flags = buffered(c_int::try_from(argument & 0x7fff_ffff).unwrap_or(0));
        // SAFETY: the caller's promises are the same.
        return unsafe { next(descriptor, command, flags) };
    }
    // SAFETY: as above.
    unsafe { next(descriptor, command, argument) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn fcntl(descriptor: c_int, command: c_int, argument: usize) -> c_int {
    static NEXT: Next = Next::new(c"fcntl");
    // SAFETY: the caller's promises are the same.
    unsafe { control(descriptor, command, argument, &NEXT) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn fcntl64(descriptor: c_int, command: c_int, argument: usize) -> c_int {
    static NEXT: Next = Next::new(c"fcntl64");
    // SAFETY: the caller's promises are the same.
    unsafe { control(descriptor, command, argument, &NEXT) }
}
