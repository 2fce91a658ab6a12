//! How soon a thread gets a core.
#![allow(unsafe_code, reason = "a system call without a safe wrapper")]

/// The shortest slice that the kernel gives (sched_setattr(2)).
const SLICE_NS: u64 = 100_000;

/// Asks for short turns on a core that other threads need too. The kernel then usually interrupts them when this thread is
/// woken (Linux 6.12 and newer); it does not get more time. If the kernel refuses, it waits for its turn like others, up to
/// some milliseconds.
pub(crate) fn prefer_short_slices() {
    let size = size_of::<libc::sched_attr>();
    // SAFETY: all bytes zero are valid numbers.
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes at most `size` bytes, which the structure has.
    let result = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) };
    if result != 0 || attributes.sched_policy != libc::SCHED_OTHER.unsigned_abs() {
        return;
    }
    attributes.sched_runtime = SLICE_NS;
    // SAFETY: the kernel reads the structure, whose first field is its size. Without success nothing changes.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
}
