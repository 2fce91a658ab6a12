//! SIGBUS: installing a handler before those that are there, and what it is called with.
#![allow(unsafe_code, reason = "signal handlers")]

use std::ffi::{c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::Duration;

use crate::pager::Access;

/// A fault, as the handler sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    pub(crate) address: u64,
    /// What the instruction does, if the processor's report says so.
    pub(crate) access: Option<Access>,
    /// A number that only this thread has now.
    pub(crate) thread: u64,
    /// Which signals were blocked when it faulted.
    pub(crate) mask: Mask,
}

/// The signals that a thread blocks.
#[derive(Clone, Copy)]
pub(crate) struct Mask(libc::sigset_t);

impl std::fmt::Debug for Mask {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Mask").finish_non_exhaustive()
    }
}

impl Mask {
    /// Sleeps with these signals blocked and others delivered, so that a program that waits in the handler can be ended.
    ///
    /// The handlers of the program may fault too, so no lock may be held.
    pub(crate) fn sleep(&self, time: Duration) {
        let blocked = replace_mask(&self.0);
        std::thread::sleep(time);
        replace_mask(&blocked);
    }
}

/// Sets which signals this thread blocks; returns those that it blocked.
fn replace_mask(mask: &libc::sigset_t) -> libc::sigset_t {
    let mut previous = *mask;
    // SAFETY: both sets are valid. The call cannot fail with a valid operation.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, mask, &raw mut previous) };
    previous
}

/// Resolves a fault; true if the instruction is to be repeated.
pub(crate) type Handler = fn(Fault) -> bool;

/// What was installed before; set once, before the handler is.
static PREVIOUS: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());
/// The one handler of the process.
static HANDLER: AtomicPtr<()> = AtomicPtr::new(ptr::null_mut());

/// Calls `handler` at each SIGBUS of the process from now on; what it does not resolve goes to the handler that was
/// installed before. Only the first call has an effect.
///
/// The handler runs with all signals blocked, on the stack of the thread that faulted.
pub(crate) fn install(handler: Handler) -> io::Result<()> {
    static ONCE: Once = Once::new();
    let mut result = Ok(());
    ONCE.call_once(|| {
        HANDLER.store(handler as *mut (), Ordering::Release);
        result = install_once();
    });
    result
}

fn install_once() -> io::Result<()> {
    let mut previous = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: the call only reads the present action into a valid structure.
    if unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), previous.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call filled it; zeros are valid too.
    let previous = unsafe { previous.assume_init() };
    // It is never freed: the handler may run until the process ends.
    PREVIOUS.store(Box::into_raw(Box::new(previous)), Ordering::Release);
    // SAFETY: zeros are a valid `sigaction`.
    let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    action.sa_sigaction = on_signal as *const () as usize;
    // Not on an alternate stack: those are made for handlers that do little.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
    // SAFETY: the mask is a valid set.
    unsafe { libc::sigfillset(&raw mut action.sa_mask) };
    // SAFETY: the action is complete, and its function has the signature that SA_SIGINFO asks for.
    if unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

extern "C" fn on_signal(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the location of this thread's errno is valid as long as the thread is.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let saved = unsafe { *errno };
    // SAFETY: the kernel passes a valid description.
    let info_of_fault = unsafe { &*info };
    // SAFETY: SIGBUS of a fault has an address.
    let address = unsafe { info_of_fault.si_addr() }.expose_provenance() as u64;
    let code = info_of_fault.si_code;
    let handler = HANDLER.load(Ordering::Acquire);
    // A signal that another process sent has no address.
    let is_fault = code > 0 && !handler.is_null();
    let is_resolved = is_fault && {
        // SAFETY: only `install` sets it, to a function of this type.
        let handler = unsafe { std::mem::transmute::<*mut (), Handler>(handler) };
        let thread = errno.expose_provenance() as u64;
        // SAFETY: the kernel passes a valid context.
        let mask = Mask(unsafe { (*context.cast::<libc::ucontext_t>()).uc_sigmask });
        handler(Fault { address, access: access(context), thread, mask })
    };
    // SAFETY: as above.
    unsafe { *errno = saved };
    if !is_resolved {
        pass_on(signal, info, context);
    }
}

/// What the faulting instruction does, by the processor's error code.
#[cfg(target_arch = "x86_64")]
fn access(context: *mut c_void) -> Option<Access> {
    const WRITE: i64 = 1 << 1;
    let context = context.cast::<libc::ucontext_t>();
    let register = usize::try_from(libc::REG_ERR).ok()?;
    // SAFETY: the kernel passes a valid context.
    let registers = unsafe { &(*context).uc_mcontext.gregs };
    let error = registers.get(register)?;
    Some(if error & WRITE != 0 { Access::Write } else { Access::Read })
}

#[cfg(not(target_arch = "x86_64"))]
fn access(_context: *mut c_void) -> Option<Access> {
    None
}

/// Does what was installed before.
fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let previous = PREVIOUS.load(Ordering::Acquire);
    // SAFETY: it was leaked before the handler was installed.
    let Some(previous) = (unsafe { previous.as_ref() }) else { return };
    let function = previous.sa_sigaction;
    if function == libc::SIG_DFL || function == libc::SIG_IGN {
        // The default action ends the process when the instruction is repeated. A fault cannot be ignored.
        // SAFETY: zeros are the default action with an empty mask.
        let action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
        // SAFETY: the action is complete.
        unsafe { libc::sigaction(signal, &raw const action, ptr::null_mut()) };
        return;
    }
    if previous.sa_flags & libc::SA_SIGINFO != 0 {
        type Function = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);
        // SAFETY: with SA_SIGINFO, the installed function has this signature.
        let function = unsafe { std::mem::transmute::<usize, Function>(function) };
        function(signal, info, context);
    } else {
        // SAFETY: without SA_SIGINFO, the installed function has this signature.
        let function = unsafe { std::mem::transmute::<usize, extern "C" fn(c_int)>(function) };
        function(signal);
    }
}

/// All signals of this thread are blocked until this is dropped; a thread that it starts inherits that.
pub(crate) struct Blocked {
    previous: libc::sigset_t,
}

impl Blocked {
    pub(crate) fn new() -> Self {
        // SAFETY: zeros are a valid set.
        let mut all: libc::sigset_t = unsafe { MaybeUninit::zeroed().assume_init() };
        // SAFETY: the set is valid.
        unsafe { libc::sigfillset(&raw mut all) };
        Self { previous: replace_mask(&all) }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        replace_mask(&self.previous);
    }
}
