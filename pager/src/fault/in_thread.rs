//! Faults that the faulting thread resolves, in the handler of SIGBUS.
//!
//! The handler finds the region by its address in a fixed table, because it may not take a lock that the thread holds.
//! An entry is removed when the region is dropped. By then no thread can fault in that region, but others may be
//! looking at the entry; the removal waits for them.
#![allow(unsafe_code, reason = "a pointer to the pager is shared with the signal handler")]

use std::ptr;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use crate::error::Error;
use crate::kernel::signal::{self, Fault};
use crate::page_table::State;
use crate::pager::{Access, Pager, Patience};
use crate::report;

/// Most regions of a process that use this mode.
const REGIONS_MAX: usize = 64;

static REGIONS: [Entry; REGIONS_MAX] = [const { Entry::new() }; REGIONS_MAX];
/// Held while an entry is added or removed.
static CHANGES: Mutex<()> = Mutex::new(());

struct Entry {
    pager: AtomicPtr<Pager>,
    /// Handlers that are looking at the pager.
    users: AtomicUsize,
}

impl Entry {
    const fn new() -> Self {
        Self { pager: AtomicPtr::new(ptr::null_mut()), users: AtomicUsize::new(0) }
    }

    /// Calls `resolve` with the entry's pager.
    fn with<R>(&self, resolve: impl FnOnce(&Pager) -> R) -> Option<R> {
        if self.pager.load(Ordering::SeqCst).is_null() {
            return None;
        }
        // The order matters: an entry is removed first, and then its users are waited for.
        self.users.fetch_add(1, Ordering::SeqCst);
        let pager = self.pager.load(Ordering::SeqCst);
        // SAFETY: a pager in the table is kept alive by its registration, which ends only after `users` was 0 with
        // the pager already removed; and `users` is raised since before the pager was read.
        let result = unsafe { pager.as_ref() }.map(resolve);
        self.users.fetch_sub(1, Ordering::SeqCst);
        result
    }
}

/// A pager whose faults the faulting threads resolve, until this is dropped.
pub(crate) struct Registration {
    entry: &'static Entry,
    _pager: Arc<Pager>,
}

impl Registration {
    pub(crate) fn new(pager: Arc<Pager>) -> Result<Self, Error> {
        signal::install(on_fault)
            .map_err(|error| Error::System { what: "install a handler of SIGBUS", error })?;
        let _changing = CHANGES.lock().unwrap_or_else(|broken| broken.into_inner());
        let is_free = |entry: &&Entry| entry.pager.load(Ordering::SeqCst).is_null();
        let entry = REGIONS.iter().find(is_free).ok_or(Error::TooManyRegions(REGIONS_MAX))?;
        entry.pager.store(Arc::as_ptr(&pager).cast_mut(), Ordering::SeqCst);
        Ok(Self { entry, _pager: pager })
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let _changing = CHANGES.lock().unwrap_or_else(|broken| broken.into_inner());
        self.entry.pager.store(ptr::null_mut(), Ordering::SeqCst);
        // A handler looks at a pager for the time of a fault, which has a deadline.
        while self.entry.users.load(Ordering::SeqCst) > 0 {
            std::thread::yield_now();
        }
    }
}

/// Resolves a fault of this thread; false if it is not one of a region, or cannot be resolved.
fn on_fault(fault: Fault) -> bool {
    for entry in &REGIONS {
        let result = entry.with(|pager| {
            let page = pager.memory.page_at(fault.address)?;
            let access = fault.access.unwrap_or_else(|| guess(pager, page));
            let patience = Patience::Wait(Some(&fault.mask));
            let result = pager.fault(page, access, fault.thread, patience);
            if let Err(error) = &result {
                report::failed(fault.address, error);
                pager.give_up(page, error);
            }
            Some(result.is_ok())
        });
        if let Some(is_resolved) = result.flatten() {
            return is_resolved;
        }
    }
    false
}

/// What an instruction did that faulted, if the processor does not say: only writes fault on local pages.
fn guess(pager: &Pager, page: u64) -> Access {
    match pager.table.load(page).state() {
        State::Clean | State::Writing => Access::Write,
        _ => Access::Read,
    }
}
