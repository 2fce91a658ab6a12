//! `fork`: the child goes on with the contents of that moment, and has a pager of its own.
//!
//! The handlers of `pthread_atfork` do it: the one before the fork runs last, and the one in the child first. Until that
//! one has run, a page that is not local reads as zeros in the child, so what the C library touches before must be local:
//! the streams' locks. Programs that make a process by the system call itself get no remote memory in it.

use std::cell::{Cell, UnsafeCell};
use std::ffi::{c_int, c_void};
use std::mem;
use std::sync::{MutexGuard, Once, PoisonError, RwLockWriteGuard};
use std::time::Duration;

use bluebridge_pager::{FaultScope, Forking};
use bluebridge_run::Slot;

use crate::ranges::Ranges;
use crate::run::{Run, is_ready, run};
use crate::{Next, descriptors, next, own, remote, say, set_errno};

/// How long `fork` waits until older contents are not needed any more, if there are too many.
const PATIENCE: Duration = Duration::from_secs(5);
/// The exit status of a child that has no memory.
const FAILED: c_int = 71;

type Handler = Option<unsafe extern "C" fn()>;
type Register = unsafe extern "C" fn(Handler, Handler, Handler, *mut c_void) -> c_int;

/// What the forking thread holds.
struct Held {
    run: &'static Run,
    slot: Slot,
    forking: Forking<'static>,
    ranges: MutexGuard<'static, Ranges>,
    forks: RwLockWriteGuard<'static, ()>,
}

struct Place(UnsafeCell<Option<Held>>);

// SAFETY: only the thread that forks uses it, and it holds `Run::forks` meanwhile.
unsafe impl Sync for Place {}

static HELD: Place = Place(UnsafeCell::new(None));

thread_local! {
    /// Whether this thread has put something into `HELD`.
    static FORKS: Cell<bool> = const { Cell::new(false) };
    /// The slot of the last child that this thread was about to have.
    static PROMISED: Cell<Option<Slot>> = const { Cell::new(None) };
}

static REGISTERED: Once = Once::new();

/// Registers the handlers, before any of the program's.
pub(crate) fn register() {
    REGISTERED.call_once(|| {
        // SAFETY: the handlers are functions of this library, which stays.
        unsafe {
            register_next(Some(before), Some(in_parent), Some(in_child), std::ptr::null_mut())
        };
    });
}

/// # Safety
/// As for `pthread_atfork`.
unsafe fn register_next(
    before: Handler,
    parent: Handler,
    child: Handler,
    library: *mut c_void,
) -> c_int {
    let next = next(c"__register_atfork");
    if next.is_null() {
        return libc::ENOSYS;
    }
    // SAFETY: the C library's function has this signature.
    let next = unsafe { mem::transmute::<*mut c_void, Register>(next) };
    // The C library's list must be local when a child reads it.
    // SAFETY: the caller's promise is the same.
    own::inside(|| unsafe { next(before, parent, child, library) })
}

/// What `pthread_atfork` calls.
#[unsafe(no_mangle)]
unsafe extern "C" fn __register_atfork(
    before: Handler,
    parent: Handler,
    child: Handler,
    library: *mut c_void,
) -> c_int {
    register();
    // SAFETY: the caller's promise is the same.
    unsafe { register_next(before, parent, child, library) }
}

type Fork = extern "C" fn() -> libc::pid_t;

#[unsafe(no_mangle)]
extern "C" fn fork() -> libc::pid_t {
    static NEXT: Next = Next::new(c"fork");
    // SAFETY: the C library's function has this signature, and it exists.
    let next = unsafe { mem::transmute::<*mut c_void, Fork>(NEXT.get()) };
    fork_by(next)
}

/// As `fork`, but it calls no handlers by itself.
#[unsafe(no_mangle)]
extern "C" fn _Fork() -> libc::pid_t {
    extern "C" fn with_handlers() -> libc::pid_t {
        static NEXT: Next = Next::new(c"_Fork");
        // SAFETY: the C library's function has this signature; who calls this one knows that it exists.
        let next = unsafe { mem::transmute::<*mut c_void, Fork>(NEXT.get()) };
        // SAFETY: the handlers have no other preconditions than that they are called around a fork.
        unsafe { before() };
        let pid = next();
        if pid == 0 {
            // SAFETY: as above.
            unsafe { in_child() };
        } else {
            // SAFETY: as above.
            unsafe { in_parent() };
        }
        pid
    }
    fork_by(with_handlers)
}

/// Forks, if that is possible. No signal handler runs meanwhile: it could fork too, or use memory that the child does
/// not have yet.
fn fork_by(next: Fork) -> libc::pid_t {
    let Some(run) = run().filter(|_| is_ready() && !own::is_inside()) else { return next() };
    if !own::inside(|| run.region().can_fork_within(PATIENCE)) {
        say(format_args!(
            "the process cannot fork: 16 generations of children need older contents of its memory"
        ));
        set_errno(libc::EAGAIN);
        return -1;
    }
    // Of an earlier fork.
    PROMISED.set(None);
    let mut all = mem::MaybeUninit::uninit();
    let mut mask = mem::MaybeUninit::uninit();
    // SAFETY: the set is a valid place for the result.
    unsafe { libc::sigfillset(all.as_mut_ptr()) };
    // SAFETY: the set was filled, and the mask is a valid place for the result.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), mask.as_mut_ptr()) };
    let pid = next();
    let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
    if pid < 0
        && let Some(slot) = PROMISED.take()
    {
        run.ledger.withdraw(slot);
    }
    // SAFETY: the mask was set above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, mask.as_ptr(), std::ptr::null_mut()) };
    set_errno(errno);
    pid
}

unsafe extern "C" fn before() {
    if !is_ready() || own::is_inside() {
        return;
    }
    let Some(run) = run() else { return };
    own::inside(|| {
        let forks = run.forks.write().unwrap_or_else(PoisonError::into_inner);
        let Some(slot) = run.ledger.promise(run.slot()) else {
            say(format_args!("the child cannot have remote memory: there are too many processes"));
            return;
        };
        PROMISED.set(Some(slot));
        let ranges = run.ranges();
        match run.region().begin_fork() {
            Ok(forking) => {
                // A child may use what is stored now.
                run.share();
                // SAFETY: this thread holds `forks`.
                unsafe { *HELD.0.get() = Some(Held { run, slot, forking, ranges, forks }) };
                FORKS.set(true);
            }
            Err(error) => {
                run.ledger.withdraw(slot);
                say(format_args!("the child cannot have remote memory: {error}"));
            }
        }
    });
    if FORKS.get() {
        touch_streams();
        // Last: this thread cannot allocate the library's memory any more.
        own::freeze();
    }
}

unsafe extern "C" fn in_parent() {
    if !FORKS.replace(false) {
        return;
    }
    own::thaw();
    // SAFETY: this thread holds `forks`.
    let Some(held) = (unsafe { (*HELD.0.get()).take() }) else { return };
    own::inside(|| {
        held.forking.resume();
        drop(held.ranges);
        drop(held.forks);
    });
}

unsafe extern "C" fn in_child() {
    if !FORKS.replace(false) {
        return;
    }
    own::thaw();
    // SAFETY: this is the only thread.
    let Some(held) = (unsafe { (*HELD.0.get()).take() }) else { return };
    own::inside(|| {
        let Held { run, slot, forking, ranges, forks } = held;
        descriptors::close_inherited(run.ledger.descriptor());
        descriptors::keep(run.ledger.descriptor());
        run.become_child(slot);
        // SAFETY: this is the child, with one thread, and it uses the region that is returned from now on.
        let open = || unsafe { forking.inherit(|| remote::open(&run.settings)) };
        match descriptors::own(open) {
            Ok(region) if region.mechanisms().scope == FaultScope::UserAndKernel => {
                run.replace_region(region);
            }
            Ok(_) => refuse(format_args!(
                "it has given up the right to handle the kernel's faults (setuid?); vm.unprivileged_userfaultfd 1 allows it"
            )),
            Err(error) => refuse(format_args!("{error}")),
        }
        drop(ranges);
        drop(forks);
    });
}

/// Ends a child process that has no memory.
fn refuse(reason: std::fmt::Arguments<'_>) {
    say(format_args!("a child process cannot have remote memory: {reason}"));
    // SAFETY: the process ends. Not by `_exit`, which would look at the parent's pager.
    unsafe { libc::syscall(libc::SYS_exit_group, FAILED) };
}

/// Makes the streams of the C library local: it resets their locks in the child before any handler runs.
fn touch_streams() {
    /// `struct _IO_FILE` of glibc on 64-bit machines: its size, and the places of two members.
    const STREAM_BYTES: usize = 216;
    const CHAIN: usize = 104;
    const LOCK: usize = 136;
    let list = next(c"_IO_list_all").cast::<*mut u8>();
    let (lock, unlock) = (next(c"_IO_list_lock"), next(c"_IO_list_unlock"));
    if list.is_null() || lock.is_null() || unlock.is_null() {
        return;
    }
    type Call = extern "C" fn();
    // SAFETY: the C library's function has this signature.
    let lock = unsafe { mem::transmute::<*mut c_void, Call>(lock) };
    // SAFETY: as above.
    let unlock = unsafe { mem::transmute::<*mut c_void, Call>(unlock) };
    lock();
    // SAFETY: the list's head is a pointer.
    let mut stream = unsafe { list.read() };
    while !stream.is_null() {
        for at in [0, STREAM_BYTES - 1] {
            // SAFETY: a stream has that many bytes, and the list is locked.
            unsafe { stream.wrapping_add(at).read_volatile() };
        }
        // SAFETY: as above; the member is a pointer.
        let lock = unsafe { stream.wrapping_add(LOCK).cast::<*mut u8>().read() };
        if !lock.is_null() {
            for at in [0, 15] {
                // SAFETY: a stream's lock has 16 bytes.
                unsafe { lock.wrapping_add(at).read_volatile() };
            }
        }
        // SAFETY: as above; the member is a pointer.
        stream = unsafe { stream.wrapping_add(CHAIN).cast::<*mut u8>().read() };
    }
    unlock();
}
