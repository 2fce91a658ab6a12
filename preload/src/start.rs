//! What happens before the program's `main`, and at its end.

use std::ffi::c_int;
use std::fs;
use std::time::Duration;

use bluebridge_pager::{FaultMode, FaultScope, OnFailure, RegionOptions, RemoteRegion};
use bluebridge_run::{Ledger, VARIABLE};
use libmimalloc_sys as mi;

use crate::run::{Run, run};
use crate::{descriptors, forks, heap, own, remote, say};

/// The exit status of a program that cannot have remote memory (`EX_OSERR` of sysexits.h).
const REFUSED: c_int = 71;

/// How long a process that ends waits for the pages that are being written back.
const LAST_EVICTION: Duration = Duration::from_secs(1);

#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

extern "C" fn start() {
    own::inside(|| {
        let Ok(path) = std::env::var(VARIABLE) else { return };
        let begun = descriptors::own(|| match Ledger::open(&path) {
            Ok(ledger) => begin(ledger),
            Err(error) => {
                // For example in a container of the program's own.
                say(format_args!("{}'s memory stays local: {error}", name()));
                Ok(())
            }
        });
        if let Err(error) = begun {
            say(format_args!("{} cannot have remote memory: {error}", name()));
            // SAFETY: nothing of the program has run yet.
            unsafe { libc::syscall(libc::SYS_exit_group, REFUSED) };
        }
    });
}

/// The program's name.
fn name() -> String {
    fs::read_to_string("/proc/self/comm")
        .map_or_else(|_| String::new(), |name| name.trim_end().to_owned())
}

fn begin(ledger: Ledger) -> Result<(), String> {
    let settings = ledger.settings().map_err(|error| error.to_string())?;
    let slot = ledger.register(&name()).ok_or("the program has too many processes")?;
    let mode = FaultMode::Threads { count: settings.handlers };
    let on_failure = if settings.waits { OnFailure::Wait } else { OnFailure::Signal };
    let options = RegionOptions::new(settings.reserved_bytes, settings.local_bytes)
        .mode(mode)
        .on_failure(on_failure)
        .deadline(Duration::from_millis(settings.deadline_ms))
        .forks(true);
    let open = || RemoteRegion::with_remotes(&options, || remote::open(&settings));
    let region = open().map_err(|error| error.to_string())?;
    if region.mechanisms().scope == FaultScope::UserOnly {
        return Err("system calls on memory that is not local would fail; run as root, allow access to /dev/userfaultfd, \
                    or set vm.unprivileged_userfaultfd to 1"
            .to_owned());
    }
    // The first half is the heap's, the second one that of mappings.
    let half = region.len() / 2;
    let start = region.as_ptr().as_ptr();
    let run = Run::install(settings, ledger, slot, region, half);
    // SAFETY: the option is a known one.
    unsafe { mi::mi_option_set(mi::mi_option_limit_os_alloc, 1) };
    let mut arena = 0;
    // SAFETY: the range is zeros, readable and writable, and only the heap uses it from now on.
    let is_managed = unsafe {
        mi::mi_manage_os_memory_ex(start.cast(), half, true, false, true, -1, false, &mut arena)
    };
    if !is_managed {
        return Err("the heap refuses its memory".to_owned());
    }
    heap::find_linker();
    forks::register();
    // SAFETY: the function is one of this library, which stays.
    unsafe { libc::atexit(end) };
    run.begin();
    Ok(())
}

extern "C" fn end() {
    if let Some(run) = run() {
        own::inside(|| {
            // A child that was made by the system call itself has no pager, but its parent's locks.
            if run.ledger.is_own(run.slot()) {
                run.region().await_eviction(LAST_EVICTION, false);
                run.publish(&run.region().statistics());
            }
        });
    }
}

#[unsafe(no_mangle)]
extern "C" fn _exit(status: c_int) -> ! {
    if let Some(run) = run() {
        // It may be called in a signal handler: no lock is waited for without end.
        own::inside(|| {
            if run.ledger.is_own(run.slot()) {
                run.publish(&run.region().counts());
                run.region().await_eviction(LAST_EVICTION, true);
            }
        });
    }
    loop {
        // SAFETY: the process ends.
        unsafe { libc::syscall(libc::SYS_exit_group, status) };
    }
}

#[unsafe(no_mangle)]
extern "C" fn _Exit(status: c_int) -> ! {
    _exit(status)
}
