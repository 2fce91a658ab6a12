//! What the library knows of the process.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};

use bluebridge::Region;
use bluebridge_pager::{Error, RemoteRegion, Statistics};
use bluebridge_run::{Ledger, Record, Settings, Slot, SlotCell, Summary};

use crate::ranges::Ranges;
use crate::{descriptors, own};

/// The process's remote memory. It is never freed: the program uses it to its end.
pub(crate) struct Run {
    pub(crate) settings: Settings,
    pub(crate) ledger: Ledger,
    /// A child process has another one than its parent.
    region: AtomicPtr<RemoteRegion>,
    slot: SlotCell,
    ranges: Mutex<Ranges>,
    /// What this process has allocated.
    records: Mutex<Vec<(Region, Record)>>,
    /// No page is given up while a thread forks.
    pub(crate) forks: RwLock<()>,
}

static RUN: AtomicPtr<Run> = AtomicPtr::new(std::ptr::null_mut());
static READY: AtomicBool = AtomicBool::new(false);
static FIRST: AtomicUsize = AtomicUsize::new(0);
static END: AtomicUsize = AtomicUsize::new(0);

/// Whether the program's memory is remote now.
pub(crate) fn is_ready() -> bool {
    READY.load(Ordering::Acquire)
}

/// Whether an address is the region's.
pub(crate) fn holds(address: *const c_void) -> bool {
    let address = address.addr();
    address >= FIRST.load(Ordering::Relaxed) && address < END.load(Ordering::Relaxed)
}

/// Whether a range is not empty, begins at a page, and is in the region.
pub(crate) fn contains(address: *const c_void, bytes: usize) -> bool {
    let room = END.load(Ordering::Relaxed).saturating_sub(address.addr());
    holds(address) && address.addr().is_multiple_of(4096) && (1..=room).contains(&bytes)
}

/// Whether a range has an address of the region.
pub(crate) fn touches(address: *const c_void, bytes: usize) -> bool {
    let start = address.addr();
    start < END.load(Ordering::Relaxed)
        && start.saturating_add(bytes) > FIRST.load(Ordering::Relaxed)
}

/// The process's remote memory, once it has it.
pub(crate) fn run() -> Option<&'static Run> {
    // SAFETY: it is set once, to a value that is never freed.
    unsafe { RUN.load(Ordering::Acquire).as_ref() }
}

/// A lock of which nobody cares whether its holder panicked.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Run {
    /// What the library knows from now on. The first `heap_bytes` of the region are the heap's, the rest is for mappings.
    pub(crate) fn install(
        settings: Settings,
        ledger: Ledger,
        slot: Slot,
        region: RemoteRegion,
        heap_bytes: usize,
    ) -> &'static Self {
        let (first, bytes) = (region.as_ptr().addr().get(), region.len());
        FIRST.store(first, Ordering::Relaxed);
        END.store(first + bytes, Ordering::Relaxed);
        let run = Box::leak(Box::new(Self {
            settings,
            ledger,
            region: AtomicPtr::new(Box::into_raw(Box::new(region))),
            slot: SlotCell::new(slot),
            ranges: Mutex::new(Ranges::new(first + heap_bytes, bytes - heap_bytes)),
            records: Mutex::default(),
            forks: RwLock::new(()),
        }));
        RUN.store(run, Ordering::Release);
        run
    }

    /// The program's memory is remote from now on.
    pub(crate) fn begin(&self) {
        READY.store(true, Ordering::Release);
    }

    pub(crate) fn region(&self) -> &'static RemoteRegion {
        // SAFETY: it always points to a value that is never freed.
        unsafe { &*self.region.load(Ordering::Acquire) }
    }

    /// In a child process, before its pager begins to work: what is allocated from now on is the child's.
    pub(crate) fn become_child(&self, slot: Slot) {
        self.slot.set(slot);
        // They are the parent's.
        lock(&self.records).clear();
        self.ledger.arrive(slot);
    }

    /// In a child process: from now on the region is this one.
    pub(crate) fn replace_region(&self, region: RemoteRegion) {
        self.region.store(Box::into_raw(Box::new(region)), Ordering::Release);
    }

    pub(crate) fn slot(&self) -> Slot {
        self.slot.get()
    }

    pub(crate) fn ranges(&self) -> MutexGuard<'_, Ranges> {
        lock(&self.ranges)
    }

    /// Notes an allocation; false if the ledger is full.
    pub(crate) fn note(&self, region: Region) -> bool {
        let Some(record) = self.ledger.record(self.slot(), region) else { return false };
        lock(&self.records).push((region, record));
        true
    }

    /// Forgets an allocation that was freed.
    pub(crate) fn forget(&self, region: Region) {
        let mut records = lock(&self.records);
        if let Some(at) = records.iter().position(|(noted, _)| *noted == region) {
            self.ledger.erase(records.swap_remove(at).1);
        }
    }

    /// What is allocated now is a child's too, from now on.
    pub(crate) fn share(&self) {
        for (_, record) in lock(&self.records).iter() {
            self.ledger.share(*record);
        }
    }

    /// From now on the program may make memory unreadable.
    pub(crate) fn expect_protection(&self) -> Result<(), Error> {
        static IS_EXPECTED: AtomicBool = AtomicBool::new(false);
        if !IS_EXPECTED.load(Ordering::Acquire) {
            descriptors::own(|| self.region().expect_protection())?;
            IS_EXPECTED.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Makes a part of the region zero.
    pub(crate) fn discard(&self, address: *const c_void, bytes: usize) {
        let start = address.addr().saturating_sub(FIRST.load(Ordering::Relaxed));
        own::inside(|| {
            let _forks = self.forks.read().unwrap_or_else(PoisonError::into_inner);
            let region = self.region();
            let end = start.saturating_add(bytes).min(region.len());
            // SAFETY: the program gave the range up.
            let _ = unsafe { region.discard_shared(start..end) };
        });
    }

    /// Notes for the supervisor what the pager did so far.
    pub(crate) fn publish(&self, statistics: &Statistics) {
        self.ledger.publish(self.slot(), &summary(statistics));
    }
}

fn summary(statistics: &Statistics) -> Summary {
    Summary {
        remote_faults: statistics.remote_faults,
        zero_faults: statistics.zero_faults,
        write_faults: statistics.write_faults,
        late_faults: statistics.late_faults,
        prefetched_pages: statistics.prefetched_pages,
        requested_pages: statistics.requested_pages,
        confirmed_pages: statistics.confirmed_pages,
        background_pages: statistics.background_pages,
        background_used_pages: statistics.background_used_pages,
        read_bytes: statistics.read_bytes,
        written_bytes: statistics.written_bytes,
        read_wait_ns: statistics.read_wait_ns,
        room_wait_ns: statistics.room_wait_ns,
        local_bytes_max: statistics.local_pages_max.saturating_mul(4096),
        lost_pages: statistics.lost_pages,
    }
}
