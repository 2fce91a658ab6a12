//! How many instructions some work takes, counted one by one.
//!
//! The count is the same on a busy machine and on a quiet one, and needs no counters of the processor, which virtual
//! machines seldom have: a child process does the work while its parent steps it (`PTRACE_SINGLESTEP`, ptrace(2)), at some
//! microseconds for each instruction. A repetition of a string instruction counts as one more.

#![allow(unsafe_code, reason = "fork and ptrace have no safe form")]

use std::{io, ptr};

/// More than any work that is counted takes: a child that never ends is noticed.
const INSTRUCTIONS_MAX: u64 = 2_000_000;

/// Counts the instructions of `work`, which is done by a child process: what it changes is lost.
///
/// # Panics
/// If this process may not trace its children, or the work panics or does not end.
pub fn count(work: impl FnOnce()) -> u64 {
    // What it takes to stop before and after nothing.
    let empty = steps(|| {});
    steps(work).saturating_sub(empty)
}

fn steps(work: impl FnOnce()) -> u64 {
    // SAFETY: the child has only this thread, calls nothing but `work` and system calls, and never returns from here.
    // The C library's own locks are free in the child (fork(2)), and `work` uses no lock of another thread.
    let child = unsafe { libc::fork() };
    match child {
        -1 => panic!("cannot fork: {}", io::Error::last_os_error()),
        0 => in_child(work),
        child => count_steps(child).unwrap_or_else(|problem| {
            // SAFETY: it is our child, and was not waited for: it would have ended well.
            unsafe { libc::kill(child, libc::SIGKILL) };
            // SAFETY: no status is wanted. It fails if the child has ended by itself.
            unsafe { libc::waitpid(child, ptr::null_mut(), 0) };
            panic!("cannot count instructions: {problem}")
        }),
    }
}

fn in_child(work: impl FnOnce()) -> ! {
    // SAFETY: it has no arguments in memory. If it is refused, the parent sees that the child is not traced.
    unsafe { libc::ptrace(libc::PTRACE_TRACEME, 0, ptr::null_mut::<u8>(), ptr::null_mut::<u8>()) };
    // SAFETY: the parent waits for exactly these two stops.
    unsafe { libc::raise(libc::SIGSTOP) };
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    // SAFETY: as above.
    unsafe { libc::raise(libc::SIGSTOP) };
    // SAFETY: nothing of the parent's is run down in the child.
    unsafe { libc::_exit(i32::from(outcome.is_err())) }
}

fn count_steps(child: libc::pid_t) -> Result<u64, String> {
    expect_stop(child, libc::SIGSTOP)?;
    for count in 0..INSTRUCTIONS_MAX {
        step(child, libc::PTRACE_SINGLESTEP)?;
        match stop_of(child)? {
            libc::SIGTRAP => {}
            libc::SIGSTOP => {
                step(child, libc::PTRACE_CONT)?;
                return match wait(child)? {
                    status if libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0 => {
                        Ok(count)
                    }
                    status => Err(format!("the work panicked (status {status:#x})")),
                };
            }
            signal => return Err(format!("the child got signal {signal}")),
        }
    }
    Err(format!("the work takes more than {INSTRUCTIONS_MAX} instructions"))
}

fn step(child: libc::pid_t, request: libc::c_uint) -> Result<(), String> {
    // SAFETY: the child is stopped; both arguments are numbers: no address, and no signal.
    match unsafe { libc::ptrace(request, child, ptr::null_mut::<u8>(), ptr::null_mut::<u8>()) } {
        -1 => Err(format!("ptrace: {}", io::Error::last_os_error())),
        _ => Ok(()),
    }
}

fn expect_stop(child: libc::pid_t, signal: libc::c_int) -> Result<(), String> {
    match stop_of(child)? {
        found if found == signal => Ok(()),
        found => Err(format!("the child stopped with signal {found}")),
    }
}

fn stop_of(child: libc::pid_t) -> Result<libc::c_int, String> {
    let status = wait(child)?;
    if libc::WIFSTOPPED(status) {
        return Ok(libc::WSTOPSIG(status));
    }
    Err(format!("the child is not stopped, so it may not be traced (status {status:#x})"))
}

fn wait(child: libc::pid_t) -> Result<libc::c_int, String> {
    let mut status = 0;
    // SAFETY: the status is ours. The child is traced: it is seen to stop without further options.
    match unsafe { libc::waitpid(child, &raw mut status, 0) } {
        -1 => Err(format!("waitpid: {}", io::Error::last_os_error())),
        _ => Ok(status),
    }
}

#[cfg(test)]
mod tests {
    use std::hint::black_box;

    use super::count;

    fn sum(to: u64) {
        let mut sum = 0_u64;
        for number in 0..to {
            sum = black_box(sum + number);
        }
    }

    #[test]
    fn the_same_work_has_the_same_count_and_more_work_a_larger_one() {
        let (first, again, twice) = (count(|| sum(500)), count(|| sum(500)), count(|| sum(1000)));
        assert_eq!(first, again);
        assert!(first > 1000 && twice > first + first * 9 / 10, "{first}, {twice}");
        assert!(twice < first * 2 + 100, "{first}, {twice}");
    }

    #[test]
    #[should_panic(expected = "the work panicked")]
    fn work_that_panics_is_no_count() {
        // Without the hook, whose backtrace takes millions of instructions.
        count(|| std::panic::resume_unwind(Box::new("planted")));
    }
}
