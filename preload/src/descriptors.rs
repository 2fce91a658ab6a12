//! The library's descriptors: programs that close or replace descriptors by number do not hit them.
//!
//! They have high numbers, because shells and servers choose low ones by themselves.

use std::ffi::{c_int, c_uint};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{own, result, set_errno};

/// Numbers from here on are the library's, if the process may have them. Shells use numbers up to 255.
const BASE: c_int = 256;
/// The library has numbers below this.
const END: c_int = 512;

/// Bit `n` is set for descriptor `n`.
static OWN: [AtomicU64; END as usize / 64] = [const { AtomicU64::new(0) }; END as usize / 64];

fn bit(descriptor: c_int) -> Option<(&'static AtomicU64, u64)> {
    let number = usize::try_from(descriptor).ok()?;
    Some((OWN.get(number / 64)?, 1 << (number % 64)))
}

fn is_own(descriptor: c_int) -> bool {
    bit(descriptor).is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
        && !own::is_inside()
}

fn is_open(descriptor: c_int) -> bool {
    // SAFETY: the request has no memory arguments.
    unsafe { libc::fcntl(descriptor, libc::F_GETFD) >= 0 }
}

fn close_now(descriptor: c_int) {
    // SAFETY: the caller owns it.
    unsafe { libc::syscall(libc::SYS_close, descriptor) };
}

/// What `work` opens is the library's.
pub(crate) fn own<R>(work: impl FnOnce() -> R) -> R {
    let (base, fillers) = fill();
    // More than the library ever opens: as many sockets as lanes, and a few more.
    let numbers = base..base.saturating_add(128).min(END);
    let before: Vec<bool> = numbers.clone().map(is_open).collect();
    let result = work();
    for (descriptor, was_open) in numbers.zip(before) {
        if !was_open && is_open(descriptor) {
            keep(descriptor);
        }
    }
    for run in fillers.chunk_by(|one, next| one + 1 == *next) {
        if let (Some(first), Some(last)) = (run.first(), run.last())
            // Before Linux 5.9, there is no such system call.
            // SAFETY: it has no memory arguments, and the descriptors are this function's own.
            && unsafe { libc::syscall(libc::SYS_close_range, *first, *last, 0) } != 0
        {
            run.iter().copied().for_each(close_now);
        }
    }
    result
}

/// In a child process: closes the parent's descriptors of the library, except one.
pub(crate) fn close_inherited(except: c_int) {
    for descriptor in 0..END {
        if descriptor != except
            && let Some((word, bit)) = bit(descriptor)
            && word.fetch_and(!bit, Ordering::Relaxed) & bit != 0
        {
            close_now(descriptor);
        }
    }
}

/// One more descriptor is the library's.
pub(crate) fn keep(descriptor: c_int) {
    if let Some((word, bit)) = bit(descriptor) {
        word.fetch_or(bit, Ordering::Relaxed);
    }
}

/// Takes all numbers below [`BASE`], or fewer if the process may not have so many; returns the number up to which.
fn fill() -> (c_int, Vec<c_int>) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the limit is a valid place for the result.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    let limit = c_int::try_from(limit.rlim_cur).unwrap_or(c_int::MAX);
    let base = BASE.min(limit / 2);
    let mut fillers = Vec::new();
    // SAFETY: the path is a C string.
    let first = unsafe { libc::open(c"/dev/null".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) };
    let mut last = first;
    while (0..base).contains(&last) {
        fillers.push(last);
        // SAFETY: the request has no memory arguments.
        last = unsafe { libc::fcntl(first, libc::F_DUPFD_CLOEXEC, last) };
    }
    if last >= 0 {
        close_now(last);
    }
    (base, fillers)
}

#[unsafe(no_mangle)]
extern "C" fn close(descriptor: c_int) -> c_int {
    if is_own(descriptor) {
        set_errno(libc::EBADF);
        return -1;
    }
    // SAFETY: the system call has no memory arguments; closing what others use is the caller's own affair.
    result(unsafe { libc::syscall(libc::SYS_close, descriptor) })
}

#[unsafe(no_mangle)]
extern "C" fn dup2(from: c_int, to: c_int) -> c_int {
    if is_own(to) {
        set_errno(libc::EBADF);
        return -1;
    }
    if from == to {
        // The system call for it does not exist everywhere, and dup3 refuses this.
        return if is_open(from) { to } else { -1 };
    }
    // SAFETY: the system call has no memory arguments.
    result(unsafe { libc::syscall(libc::SYS_dup3, from, to, 0) })
}

#[unsafe(no_mangle)]
extern "C" fn dup3(from: c_int, to: c_int, flags: c_int) -> c_int {
    if is_own(to) {
        set_errno(libc::EBADF);
        return -1;
    }
    // SAFETY: as above.
    result(unsafe { libc::syscall(libc::SYS_dup3, from, to, flags) })
}

#[unsafe(no_mangle)]
extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    let mut start = first;
    for descriptor in 0..END {
        let Ok(number) = c_uint::try_from(descriptor) else { continue };
        if number < start || number > last || !is_own(descriptor) {
            continue;
        }
        if number > start {
            // SAFETY: the system call has no memory arguments.
            let closed = unsafe { libc::syscall(libc::SYS_close_range, start, number - 1, flags) };
            if closed < 0 {
                return -1;
            }
        }
        start = number + 1;
    }
    if start > last && start > first {
        return 0;
    }
    // SAFETY: as above.
    result(unsafe { libc::syscall(libc::SYS_close_range, start, last, flags) })
}

#[unsafe(no_mangle)]
extern "C" fn closefrom(first: c_int) {
    close_range(c_uint::try_from(first).unwrap_or(0), c_uint::MAX, 0);
}
