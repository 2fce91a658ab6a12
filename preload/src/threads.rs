//! `pthread_create`: a thread that this library starts is the library's own from its first instruction on.

use std::ffi::{c_int, c_void};
use std::mem;

use crate::{Next, own};

type Routine = extern "C" fn(*mut c_void) -> *mut c_void;
type Create = unsafe extern "C" fn(
    *mut libc::pthread_t,
    *const libc::pthread_attr_t,
    Routine,
    *mut c_void,
) -> c_int;

/// What a thread of the library does after it is known as such.
struct Start {
    routine: Routine,
    argument: *mut c_void,
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    routine: Routine,
    argument: *mut c_void,
) -> c_int {
    static NEXT: Next = Next::new(c"pthread_create");
    let next = NEXT.get();
    if next.is_null() {
        return libc::EAGAIN;
    }
    // SAFETY: the C library's function has this signature.
    let next = unsafe { mem::transmute::<*mut c_void, Create>(next) };
    if !own::is_inside() {
        // SAFETY: the caller's promises are the same.
        return unsafe { next(thread, attributes, routine, argument) };
    }
    let start = Box::into_raw(Box::new(Start { routine, argument }));
    // SAFETY: as above; `begin` takes what `start` points to.
    let result = unsafe { next(thread, attributes, begin, start.cast()) };
    if result != 0 {
        // SAFETY: no thread has it.
        drop(unsafe { Box::from_raw(start) });
    }
    result
}

extern "C" fn begin(start: *mut c_void) -> *mut c_void {
    own::enter_for_good();
    // SAFETY: `pthread_create` made it for this thread alone.
    let Start { routine, argument } = *unsafe { Box::from_raw(start.cast::<Start>()) };
    routine(argument)
}
