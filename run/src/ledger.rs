//! Shared memory that the supervisor and its programs use: who has which remote memory.
#![allow(unsafe_code, reason = "a mapping that is shared between processes")]

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use bluebridge::{Pointer, Region};
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};

use crate::process::{own_id, start_time};
use crate::settings::{Settings, SettingsError};

/// Most processes at once.
const PROCESS_COUNT: usize = 4096;
/// Most allocations of remote memory at once: 2 TiB in extents of 2 MiB.
const RECORD_COUNT: usize = 1 << 20;

const MAGIC: u64 = u64::from_be_bytes(*b"bbrun\0\0\x01");
const SETTINGS_BYTES: usize = 4068;
const NAME_BYTES: usize = 16;

/// A process that will be there after a `fork`.
const PROMISED: u32 = u32::MAX;

/// No memory, or not recorded yet.
const FREE: u32 = 0;
/// A process is writing the record.
const TAKEN: u32 = 1;
/// Memory of one process.
const EXCLUSIVE: u32 = 2;
/// Memory that children of the process use too.
const SHARED: u32 = 3;

#[repr(C)]
struct Shared {
    magic: AtomicU64,
    next_family: AtomicU32,
    next_order: AtomicU32,
    /// Where the search for a free record begins.
    next_record: AtomicU32,
    /// Above all records that were ever used; looking at the others would take memory.
    record_end: AtomicU32,
    settings_bytes: AtomicU32,
    settings: [AtomicU8; SETTINGS_BYTES],
    processes: [ProcessEntry; PROCESS_COUNT],
    records: [RecordEntry; RECORD_COUNT],
}

#[repr(C)]
struct ProcessEntry {
    /// 0: free.
    pid: AtomicU32,
    /// Processes that came from one program by `fork` share memory, and this number.
    family: AtomicU32,
    /// A process that executes another program registers again; the later entry is the one that counts. 0: not known yet.
    order: AtomicU32,
    unused: AtomicU32,
    /// 0: not known yet.
    start_time: AtomicU64,
    name: [AtomicU8; NAME_BYTES],
    summary: [AtomicU64; SUMMARY_WORDS],
}

#[repr(C)]
struct RecordEntry {
    state: AtomicU32,
    process: AtomicU32,
    family: AtomicU32,
    unused: AtomicU32,
    base: [AtomicU64; 2],
    length_bytes: AtomicU64,
}

/// Why a ledger cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// The system refused something.
    #[error("cannot {what} the shared memory of `bluebridge run`: {error}")]
    System {
        /// What was tried.
        what: &'static str,
        /// The system's error.
        #[source]
        error: io::Error,
    },
    /// The file is another one.
    #[error("{0} is not the shared memory of this version of `bluebridge run`")]
    Foreign(String),
    /// The settings do not fit, or are damaged.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The settings are too long.
    #[error(
        "the rack has too many memory nodes for `bluebridge run`: {0} bytes of settings, and at most {SETTINGS_BYTES} are possible"
    )]
    TooLong(usize),
}

macro_rules! summary {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// What a process's pager did.
        #[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
        pub struct Summary {
            $($(#[doc = $doc])+ pub $name: u64,)+
        }

        const SUMMARY_WORDS: usize = [$(stringify!($name)),+].len();

        impl Summary {
            const fn words(&self) -> [u64; SUMMARY_WORDS] {
                [$(self.$name),+]
            }

            const fn from_words([$($name),+]: [u64; SUMMARY_WORDS]) -> Self {
                Self { $($name),+ }
            }

            /// Adds what another process did; of local bytes, the larger number counts.
            pub fn add(&mut self, other: &Self) {
                let local_bytes_max = self.local_bytes_max.max(other.local_bytes_max);
                $(self.$name += other.$name;)+
                self.local_bytes_max = local_bytes_max;
            }
        }
    };
}

summary! {
    /// Faults that read a page from a server.
    remote_faults,
    /// Faults on pages that had never been used.
    zero_faults,
    /// First writes to local pages that equalled the server's.
    write_faults,
    /// Faults on pages that were local already.
    late_faults,
    /// Pages that were read before a fault asked for them.
    prefetched_pages,
    /// Pages that were asked for ahead.
    requested_pages,
    /// Of these, pages that are known to have been used.
    confirmed_pages,
    /// Pages that were read into buffers in the background.
    background_pages,
    /// Of these, pages that a fault took.
    background_used_pages,
    /// Bytes read from servers.
    read_bytes,
    /// Bytes written to servers.
    written_bytes,
    /// Nanoseconds that threads waited for reads.
    read_wait_ns,
    /// Nanoseconds that threads waited for room.
    room_wait_ns,
    /// The most bytes that were local at once.
    local_bytes_max,
    /// Pages whose contents were lost.
    lost_pages,
}

/// A process in the ledger.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Slot(u32);

/// The slot of a process, which changes when it becomes a child. It has no lock, which another thread could hold then.
#[derive(Debug)]
pub struct SlotCell(AtomicU32);

impl SlotCell {
    /// A cell with this slot.
    #[must_use]
    pub const fn new(slot: Slot) -> Self {
        Self(AtomicU32::new(slot.0))
    }

    /// The slot.
    pub fn get(&self) -> Slot {
        Slot(self.0.load(Ordering::Relaxed))
    }

    /// From now on it is this slot.
    pub fn set(&self, slot: Slot) {
        self.0.store(slot.0, Ordering::Relaxed);
    }
}

/// An allocation in the ledger.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Record(u32);

/// A process as the supervisor sees it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Process {
    pub(crate) slot: Slot,
    pub(crate) pid: u32,
    pub(crate) order: u32,
    pub(crate) family: u32,
    pub(crate) start_time: u64,
}

impl Process {
    /// Whether it is a child that was not started yet.
    pub(crate) const fn is_promised(&self) -> bool {
        self.pid == PROMISED
    }

    /// Whether a process with its id and start time exists.
    pub(crate) fn is_alive(&self) -> bool {
        start_time(self.pid).is_some_and(|time| self.start_time == 0 || self.start_time == time)
    }
}

/// Remote memory as the supervisor sees it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Allocation {
    pub(crate) record: Record,
    pub(crate) slot: Slot,
    pub(crate) family: u32,
    pub(crate) is_shared: bool,
    /// `None` if the record is damaged.
    pub(crate) region: Option<Region>,
}

/// The shared memory.
pub struct Ledger {
    shared: NonNull<Shared>,
    file: OwnedFd,
}

// SAFETY: the mapping consists of atomics and lives as long as this.
unsafe impl Send for Ledger {}
// SAFETY: as above.
unsafe impl Sync for Ledger {}

impl Ledger {
    /// A new ledger without processes.
    ///
    /// # Errors
    /// If the system refuses the memory, or the settings are too long.
    pub fn create(settings: &Settings) -> Result<Self, LedgerError> {
        let system = |what| {
            move |error: rustix::io::Errno| LedgerError::System { what, error: error.into() }
        };
        let file = rustix::fs::memfd_create("bluebridge-run", MemfdFlags::CLOEXEC)
            .map_err(system("create"))?;
        rustix::fs::ftruncate(&file, size_of::<Shared>() as u64).map_err(system("enlarge"))?;
        let ledger = Self::map(file)?;
        let text = settings.to_string();
        let shared = ledger.shared();
        if text.len() > SETTINGS_BYTES {
            return Err(LedgerError::TooLong(text.len()));
        }
        shared
            .settings
            .iter()
            .zip(text.bytes())
            .for_each(|(place, byte)| place.store(byte, Ordering::Relaxed));
        shared.settings_bytes.store(u32::try_from(text.len()).unwrap_or(0), Ordering::Relaxed);
        shared.magic.store(MAGIC, Ordering::Release);
        Ok(ledger)
    }

    /// Where other processes find it while this one exists.
    #[must_use]
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
    }

    /// The ledger at a path.
    ///
    /// # Errors
    /// If it cannot be opened, or is not a ledger of this version.
    pub fn open(path: &str) -> Result<Self, LedgerError> {
        let system = |error| LedgerError::System { what: "open", error };
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(system)?;
        if file.metadata().map_err(system)?.len() != size_of::<Shared>() as u64 {
            return Err(LedgerError::Foreign(path.to_owned()));
        }
        let ledger = Self::map(file.into())?;
        if ledger.shared().magic.load(Ordering::Acquire) != MAGIC {
            return Err(LedgerError::Foreign(path.to_owned()));
        }
        Ok(ledger)
    }

    fn map(file: OwnedFd) -> Result<Self, LedgerError> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses unused addresses, and the file has that many bytes.
        let start = unsafe {
            let size = size_of::<Shared>();
            rustix::mm::mmap(std::ptr::null_mut(), size, protection, MapFlags::SHARED, &file, 0)
        };
        let start =
            start.map_err(|error| LedgerError::System { what: "map", error: error.into() })?;
        let Some(shared) = NonNull::new(start.cast()) else {
            return Err(LedgerError::System {
                what: "map",
                error: io::ErrorKind::OutOfMemory.into(),
            });
        };
        Ok(Self { shared, file })
    }

    fn shared(&self) -> &Shared {
        // SAFETY: the mapping is as large as the type, aligned to pages, and lives as long as this. The type consists of
        // atomics, for which all bytes are valid.
        unsafe { self.shared.as_ref() }
    }

    fn process(&self, slot: Slot) -> &ProcessEntry {
        let entry = self.shared().processes.get(slot.0 as usize);
        entry.expect("slots are numbered by the ledger")
    }

    /// The descriptor; it must stay open.
    #[must_use]
    pub fn descriptor(&self) -> i32 {
        self.file.as_fd().as_raw_fd()
    }

    /// The settings.
    ///
    /// # Errors
    /// If they are damaged.
    pub fn settings(&self) -> Result<Settings, LedgerError> {
        let shared = self.shared();
        let length = shared.settings_bytes.load(Ordering::Relaxed) as usize;
        let bytes = shared.settings.iter().take(length).map(|byte| byte.load(Ordering::Relaxed));
        let bytes: Vec<u8> = bytes.collect();
        Ok(String::from_utf8_lossy(&bytes).parse::<Settings>()?)
    }

    /// Enters this process, which begins to run a program; `None` if there are too many.
    pub fn register(&self, name: &str) -> Option<Slot> {
        self.register_as(name, own_id())
    }

    pub(crate) fn register_as(&self, name: &str, pid: u32) -> Option<Slot> {
        let slot = self.take_slot(pid)?;
        let family = self.shared().next_family.fetch_add(1, Ordering::Relaxed);
        self.describe(slot, pid, family);
        let bytes = name.bytes().chain(std::iter::repeat(0));
        let entry = self.process(slot);
        entry.name.iter().zip(bytes).for_each(|(place, byte)| place.store(byte, Ordering::Relaxed));
        Some(slot)
    }

    /// Enters the child that this process is about to get by `fork`; `None` if there are too many processes.
    pub fn promise(&self, parent: Slot) -> Option<Slot> {
        let slot = self.take_slot(PROMISED)?;
        let (parent, child) = (self.process(parent), self.process(slot));
        child.family.store(parent.family.load(Ordering::Relaxed), Ordering::Relaxed);
        for (from, to) in parent.name.iter().zip(&child.name) {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        Some(slot)
    }

    /// There is no child: `fork` failed.
    pub fn withdraw(&self, slot: Slot) {
        if self.process(slot).pid.load(Ordering::Relaxed) == PROMISED {
            self.leave(slot);
        }
    }

    /// Whether this process is the one of a slot, not one that it made by the system call itself.
    pub fn is_own(&self, slot: Slot) -> bool {
        self.process(slot).pid.load(Ordering::Relaxed) == own_id()
    }

    /// This process is the promised child.
    pub fn arrive(&self, slot: Slot) {
        self.arrive_as(slot, own_id());
    }

    pub(crate) fn arrive_as(&self, slot: Slot, pid: u32) {
        let entry = self.process(slot);
        entry.pid.store(pid, Ordering::Release);
        self.describe(slot, pid, entry.family.load(Ordering::Relaxed));
    }

    fn take_slot(&self, pid: u32) -> Option<Slot> {
        let is_taken = |entry: &ProcessEntry| {
            entry.pid.compare_exchange(0, pid, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        let slot = Slot(u32::try_from(self.shared().processes.iter().position(is_taken)?).ok()?);
        self.publish(slot, &Summary::default());
        Some(slot)
    }

    fn describe(&self, slot: Slot, pid: u32, family: u32) {
        let entry = self.process(slot);
        entry.family.store(family, Ordering::Relaxed);
        let start = start_time(pid).unwrap_or(0);
        entry.start_time.store(start, Ordering::Relaxed);
        let order = self.shared().next_order.fetch_add(1, Ordering::Relaxed);
        entry.order.store(order.wrapping_add(1), Ordering::Release);
    }

    /// Notes what a process's pager did so far.
    pub fn publish(&self, slot: Slot, summary: &Summary) {
        let places = self.process(slot).summary.iter();
        places.zip(summary.words()).for_each(|(place, word)| place.store(word, Ordering::Relaxed));
    }

    /// Whether no other process of the family is left, or was promised; false if this process does not see the others any
    /// more, because it has another `/proc` or none.
    pub fn is_alone(&self, slot: Slot) -> bool {
        let started = self.process(slot).start_time.load(Ordering::Relaxed);
        if !self.is_own(slot) || start_time(own_id()) != Some(started) {
            return false;
        }
        let family = self.process(slot).family.load(Ordering::Relaxed);
        let relatives =
            self.processes().filter(|other| other.slot != slot && other.family == family);
        let mut relatives = relatives.filter(|other| other.is_promised() || other.is_alive());
        relatives.next().is_none()
    }

    /// The ids of all processes.
    pub fn process_ids(&self) -> Vec<u32> {
        let processes = self.processes().filter(|one| !one.is_promised() && one.is_alive());
        processes.map(|one| one.pid).collect()
    }

    /// Notes memory that a process has allocated; `None` if there is no room for it.
    pub fn record(&self, slot: Slot, region: Region) -> Option<Record> {
        let shared = self.shared();
        let start = shared.next_record.load(Ordering::Relaxed) as usize;
        let (before, after) = shared.records.split_at(start.min(RECORD_COUNT));
        let take = |entry: &RecordEntry| {
            entry.state.compare_exchange(FREE, TAKEN, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        let found = after.iter().position(take).map(|at| before.len() + at);
        let at = found.or_else(|| before.iter().position(take))?;
        let entry = shared.records.get(at)?;
        let at = u32::try_from(at).ok()?;
        shared.record_end.fetch_max(at + 1, Ordering::Relaxed);
        shared.next_record.store(at + 1, Ordering::Relaxed);
        entry.process.store(slot.0, Ordering::Relaxed);
        entry.family.store(self.process(slot).family.load(Ordering::Relaxed), Ordering::Relaxed);
        let bits = region.base().to_ipv6().to_bits();
        #[allow(clippy::cast_possible_truncation, reason = "the two halves")]
        let halves = [(bits >> 64) as u64, bits as u64];
        entry
            .base
            .iter()
            .zip(halves)
            .for_each(|(place, half)| place.store(half, Ordering::Relaxed));
        entry.length_bytes.store(region.length_bytes(), Ordering::Relaxed);
        entry.state.store(EXCLUSIVE, Ordering::Release);
        Some(Record(at))
    }

    /// From now on, children of the process use the memory too.
    pub fn share(&self, record: Record) {
        if let Some(entry) = self.shared().records.get(record.0 as usize) {
            entry.state.store(SHARED, Ordering::Release);
        }
    }

    /// Forgets memory that was freed, or that is lost.
    pub fn erase(&self, record: Record) {
        if let Some(entry) = self.shared().records.get(record.0 as usize) {
            entry.state.store(FREE, Ordering::Release);
            self.shared().next_record.fetch_min(record.0, Ordering::Relaxed);
        }
    }

    /// The processes, in the order of their slots.
    pub(crate) fn processes(&self) -> impl Iterator<Item = Process> {
        (0..).zip(&self.shared().processes).filter_map(|(slot, entry)| {
            let pid = entry.pid.load(Ordering::Acquire);
            let order = entry.order.load(Ordering::Acquire);
            (pid != 0).then(|| Process {
                slot: Slot(slot),
                pid,
                order,
                family: entry.family.load(Ordering::Relaxed),
                start_time: entry.start_time.load(Ordering::Relaxed),
            })
        })
    }

    pub(crate) fn name(&self, slot: Slot) -> String {
        let bytes = self.process(slot).name.iter().map(|byte| byte.load(Ordering::Relaxed));
        let bytes: Vec<u8> = bytes.take_while(|byte| *byte != 0).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    pub(crate) fn summary(&self, slot: Slot) -> Summary {
        let mut words = [0; SUMMARY_WORDS];
        let places = self.process(slot).summary.iter();
        places.zip(&mut words).for_each(|(place, word)| *word = place.load(Ordering::Relaxed));
        Summary::from_words(words)
    }

    /// Frees the slot of a process that has ended and left no memory.
    pub(crate) fn leave(&self, slot: Slot) {
        let entry = self.process(slot);
        entry.order.store(0, Ordering::Relaxed);
        entry.start_time.store(0, Ordering::Relaxed);
        entry.pid.store(0, Ordering::Release);
    }

    /// All memory.
    pub(crate) fn records(&self) -> impl Iterator<Item = Allocation> {
        let shared = self.shared();
        let end = shared.record_end.load(Ordering::Acquire) as usize;
        (0..).zip(shared.records.iter().take(end)).filter_map(|(at, entry)| {
            let state = entry.state.load(Ordering::Acquire);
            let [high, low] = &entry.base;
            let bits = u128::from(high.load(Ordering::Relaxed)) << 64
                | u128::from(low.load(Ordering::Relaxed));
            let base = Pointer::from_ipv6(bits.into()).ok();
            let length = entry.length_bytes.load(Ordering::Relaxed);
            (state == EXCLUSIVE || state == SHARED).then(|| Allocation {
                record: Record(at),
                slot: Slot(entry.process.load(Ordering::Relaxed)),
                family: entry.family.load(Ordering::Relaxed),
                is_shared: state == SHARED,
                region: base.and_then(|base| Region::new(base, length).ok()),
            })
        })
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and nobody borrows from it any more.
        let _ = unsafe { rustix::mm::munmap(self.shared.as_ptr().cast(), size_of::<Shared>()) };
    }
}
