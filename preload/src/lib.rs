//! The library that gives an unmodified program remote memory: `bluebridge run` preloads it.
//!
//! It replaces the program's heap and its large anonymous mappings by a
//! [`RemoteRegion`](bluebridge_pager::RemoteRegion).
//!
//! * `start`: what happens before the program's `main`, and at its end.
//! * `run`: what the library knows of the process.
//! * `heap`: `malloc` and its relatives.
//! * `mappings`: `mmap` and its relatives; `ranges` knows which addresses are in use.
//! * `forks`: `fork`.
//! * `threads`: `pthread_create`.
//! * `descriptors`: the program does not close the library's descriptors.
//! * `files`: files are not opened for direct access.
//! * `own`: the memory of this library itself, which must never be remote.
//! * `remote`: the memory servers; what is allocated is noted in the ledger.
#![allow(unsafe_code, reason = "it replaces functions of the C library")]
#![allow(unreachable_pub, reason = "the functions are found by name")]

mod descriptors;
mod files;
mod forks;
mod heap;
mod mappings;
mod own;
mod ranges;
mod remote;
mod run;
mod start;
mod threads;

#[global_allocator]
static ALLOCATOR: own::Own = own::Own;

/// A function of the C library that this one replaces; null if it does not exist.
fn next(name: &std::ffi::CStr) -> *mut std::ffi::c_void {
    // SAFETY: the name is a C string.
    own::inside(|| unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) })
}

/// A function of the C library that is called often, or where its lookup could wait for a lock of the linker.
struct Next {
    name: &'static std::ffi::CStr,
    found: std::sync::atomic::AtomicPtr<std::ffi::c_void>,
}

impl Next {
    const fn new(name: &'static std::ffi::CStr) -> Self {
        Self { name, found: std::sync::atomic::AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// The function; looked up once.
    fn get(&self) -> *mut std::ffi::c_void {
        use std::sync::atomic::Ordering;
        let found = self.found.load(Ordering::Relaxed);
        if !found.is_null() {
            return found;
        }
        let found = next(self.name);
        self.found.store(found, Ordering::Relaxed);
        found
    }
}

/// The result of a system call as C's functions return it: -1 is an error, for which `errno` is set.
fn result(of: std::ffi::c_long) -> std::ffi::c_int {
    std::ffi::c_int::try_from(of).unwrap_or(-1)
}

/// Sets this thread's `errno`.
fn set_errno(errno: std::ffi::c_int) {
    // SAFETY: it has no preconditions.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: the place is this thread's own.
    unsafe { *place = errno };
}

/// Prints a message for the user, without locks: it may be used at any time, also in a child process.
fn say(message: std::fmt::Arguments<'_>) {
    let text = own::inside(|| format!("bluebridge: {message}\n"));
    // SAFETY: the text is as long as it says.
    unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len()) };
    own::inside(|| drop(text));
}
