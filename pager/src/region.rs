//! Remote memory as plain memory.
#![allow(unsafe_code, reason = "the views of the memory that programs get")]

use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, TryLockError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
#[cfg(feature = "join")]
use bluebridge::{Client, JoinError};
use crossbeam_queue::ArrayQueue;

use crate::background::{self, Background};
use crate::counters::{Counters, Statistics};
use crate::error::{Error, PageError};
use crate::evict::{self, BATCH, Evictor};
use crate::fault::in_thread::Registration;
use crate::fault::threads::Handlers;
use crate::frames::Frames;
use crate::kernel::paged::PagedMemory;
use crate::kernel::userfault::FaultScope;
use crate::kernel::{PAGE_BYTES, foreign_page_size, memory};
use crate::lane::Lanes;
use crate::likelihood::WriteLikelihood;
use crate::options::{FORK_FRAMES, FaultMode, RegionOptions};
use crate::page_table::{Claim, PageTable, State};
use crate::pager::{Access, News, Pager, Patience};
use crate::remote::{Extents, RemoteMemory};

/// Memory of which only a limited part is local; the rest is on memory servers.
///
/// It begins as zeros. A page that is not local is read when it is used, and pages leave when the limit is reached:
/// changed ones are written to a server first. The region's remote memory is its own and is freed when it is dropped.
///
/// With [`FaultMode::InThread`], a system call that gets a page that is not local fails with EFAULT: use
/// [`Self::pin`] first. A child process (`fork`) does not get the region; touching it there is a segmentation fault.
pub struct RemoteRegion {
    bytes: usize,
    /// Before the pager, so that nobody uses it when it ends.
    resolver: Option<Resolver>,
    eviction: Option<JoinHandle<()>>,
    background: Option<JoinHandle<()>>,
    pub(crate) pager: Arc<Pager>,
    pub(crate) options: RegionOptions,
    mode: FaultMode,
}

/// What a region is made of, apart from its lanes.
pub(crate) struct Parts {
    pub(crate) memory: PagedMemory,
    pub(crate) table: PageTable,
    pub(crate) frames: Frames,
    pub(crate) extents: Extents,
    pub(crate) evictor: Evictor,
}

/// A region's access to remote memory.
pub(crate) struct Remotes {
    pub(crate) lanes: Vec<Box<dyn RemoteMemory>>,
    /// `None` if nothing is read in the background.
    pub(crate) background: Option<Box<dyn RemoteMemory>>,
    pub(crate) evictor: Box<dyn RemoteMemory>,
}

/// Opens what a region needs.
pub(crate) fn open_remotes<E>(
    options: &RegionOptions,
    open: &mut impl FnMut() -> Result<Box<dyn RemoteMemory>, E>,
) -> Result<Remotes, E> {
    let lanes = (0..options.lanes).map(|_| open()).collect::<Result<_, E>>()?;
    let background = if options.reads_in_background() { Some(open()?) } else { None };
    Ok(Remotes { lanes, background, evictor: open()? })
}

#[allow(dead_code, reason = "they end when they are dropped")]
enum Resolver {
    InThread(Registration),
    Threads(Handlers),
}

/// How a region works on this machine, and why not better.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Mechanisms {
    /// Who resolves faults.
    pub mode: FaultMode,
    /// Whether system calls may use pages that are not local.
    pub scope: FaultScope,
    /// Whether many pages are given back with one system call (Linux 6.16 and newer).
    pub batched_discards: bool,
    /// Whether the kernel itself refuses access to lost pages (Linux 6.6 and newer).
    pub poison: bool,
}

impl fmt::Display for Mechanisms {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.mode {
            FaultMode::InThread => write!(formatter, "faults are resolved by the faulting thread")?,
            FaultMode::Threads { count } => {
                write!(formatter, "faults are resolved by {count} threads")?
            }
        }
        match self.scope {
            FaultScope::UserAndKernel => write!(formatter, "; system calls may use any page")?,
            FaultScope::UserOnly => write!(formatter, "; pages must be pinned for system calls")?,
        }
        if !self.batched_discards {
            write!(formatter, "; pages are given back one range at a time (before Linux 6.16)")?;
        }
        if !self.poison {
            write!(formatter, "; lost pages are not marked in the kernel (before Linux 6.6)")?;
        }
        Ok(())
    }
}

/// Sees what the pager of a region does, also while its memory is borrowed.
#[derive(Clone)]
pub struct Observer {
    pager: Weak<Pager>,
}

impl Observer {
    /// What the pager did so far; `None` if the region was dropped.
    #[must_use]
    pub fn statistics(&self) -> Option<Statistics> {
        self.pager.upgrade().map(|pager| pager.statistics())
    }
}

impl fmt::Debug for Observer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Observer").finish_non_exhaustive()
    }
}

impl RemoteRegion {
    /// A region in the rack of `client`, which stays usable: the region opens further clients of its endpoint.
    ///
    /// # Errors
    /// [`Error`] of [`Self::with_remotes`], or a system error if no socket could be opened.
    #[cfg(feature = "join")]
    pub fn new(client: &Client, options: &RegionOptions) -> Result<Self, Error> {
        let open = || -> Result<Box<dyn RemoteMemory>, Error> {
            let client = client.try_clone().map_err(|error: JoinError| Error::System {
                what: "open another client of the endpoint",
                error: std::io::Error::other(error),
            })?;
            Ok(Box::new(client))
        };
        Self::with_remotes(options, open)
    }

    /// A region over whatever gives access to remote memory; `open` is called for each lane, once for eviction, and
    /// once for reading in the background if that is not turned off.
    ///
    /// # Errors
    /// [`Error`] if an option makes no sense, or the system lacks or refuses something; what `open` returns.
    pub fn with_remotes<E: From<Error>>(
        options: &RegionOptions,
        mut open: impl FnMut() -> Result<Box<dyn RemoteMemory>, E>,
    ) -> Result<Self, E> {
        let (page_count, local_pages) = options.check()?;
        if let Some(bytes) = foreign_page_size() {
            return Err(Error::PageSize(bytes).into());
        }
        let Remotes { lanes, background, evictor } = open_remotes(options, &mut open)?;
        let system = |what| move |error| Error::System { what, error };
        let parts = Parts {
            memory: PagedMemory::map(page_count, options.delivery()).map_err(Error::from)?,
            table: PageTable::new(page_count).map_err(system("map the page table"))?,
            frames: Frames::new(local_pages),
            extents: Extents::new(page_count as u64),
            evictor: Evictor::new(evictor, local_pages),
        };
        Ok(Self::build(options, parts, lanes, background)?)
    }

    /// A region of these parts.
    pub(crate) fn build(
        options: &RegionOptions,
        parts: Parts,
        lanes: Vec<Box<dyn RemoteMemory>>,
        background: Option<Box<dyn RemoteMemory>>,
    ) -> Result<Self, Error> {
        let system = |what| move |error| Error::System { what, error };
        let Parts { memory, table, frames, extents, evictor } = parts;
        let (page_count, local_pages) = (table.page_count(), frames.total());
        // If all pages may be local, none ever leaves.
        let evicts = options.evictor && page_count > u64::from(local_pages);
        let prefetch_pages = options.prefetch_limit(local_pages);
        let news = usize::try_from(local_pages).unwrap_or(usize::MAX).saturating_add(4096);
        let pager = Arc::new(Pager {
            memory,
            table,
            frames,
            extents,
            lanes: Lanes::new(lanes, prefetch_pages),
            batches: AtomicU64::new(0),
            background: Background::new(if background.is_some() { prefetch_pages } else { 0 }),
            evictor: Mutex::new(evictor),
            news: ArrayQueue::new(news),
            counters: Counters::default(),
            likelihood: WriteLikelihood::default(),
            on_failure: options.on_failure,
            deadline: options.deadline,
            low_frames: if evicts { (local_pages / 8).clamp(1, 256) } else { 0 },
            evictor_sleeps: AtomicU32::new(0),
            eviction_failure: Mutex::default(),
            pinned_pages: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            forking_thread: AtomicU32::new(0),
            reserved_frames: if options.forks { FORK_FRAMES } else { 0 },
        });
        let mut region = Self {
            options: options.clone(),
            bytes: usize::try_from(options.bytes).unwrap_or(usize::MAX),
            resolver: None,
            eviction: None,
            background: None,
            pager: Arc::clone(&pager),
            mode: options.mode,
        };
        if evicts {
            let pager = Arc::clone(&pager);
            let thread = crate::spawn("bb-evict", move || evict::run(&pager));
            region.eviction = Some(thread.map_err(system("start the eviction thread"))?);
        }
        if let Some(remote) = background {
            let pager = Arc::clone(&pager);
            let thread = crate::spawn("bb-background", move || background::run(&pager, remote));
            region.background = Some(thread.map_err(system("start the background thread"))?);
        }
        region.resolver = Some(match options.mode {
            FaultMode::InThread => Resolver::InThread(Registration::new(pager)?),
            FaultMode::Threads { count } => Resolver::Threads(Handlers::start(&pager, count)?),
        });
        Ok(region)
    }

    /// The size in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.bytes
    }

    /// Always false: a region has at least one byte.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The first byte, for code that needs pointers; aligned to 4096 bytes.
    #[must_use]
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.pager.memory.start()
    }

    /// The memory.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the range is mapped as long as the region exists, and every byte is initialized: what is not local
        // is filled before the access goes on. Nobody has a mutable view of it while `self` is borrowed.
        unsafe { std::slice::from_raw_parts(self.as_ptr().as_ptr(), self.bytes) }
    }

    /// The memory.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr().as_ptr(), self.bytes) }
    }

    /// The memory as words of 32 bits, without the bytes behind the last whole word.
    #[must_use]
    pub fn as_mut_words(&mut self) -> &mut [u32] {
        let start = self.as_ptr().cast::<u32>().as_ptr();
        // SAFETY: as in `as_mut_slice`; the start is aligned to pages, and every value of the bytes is a valid word.
        unsafe { std::slice::from_raw_parts_mut(start, self.bytes / size_of::<u32>()) }
    }

    /// Keeps a range local and makes it readable for system calls, until the result is dropped.
    ///
    /// # Errors
    /// If the range is not in the region, too much would be pinned, or a page cannot be made local.
    pub fn pin(&self, range: Range<usize>) -> Result<Pinned<'_>, Error> {
        self.hold(range, Access::Read).map(|hold| Pinned { hold })
    }

    /// Keeps a range local and makes it writable for system calls, until the result is dropped.
    ///
    /// # Errors
    /// As [`Self::pin`].
    pub fn pin_mut(&mut self, range: Range<usize>) -> Result<PinnedMut<'_>, Error> {
        self.hold(range, Access::Write).map(|hold| PinnedMut { hold })
    }

    fn hold(&self, range: Range<usize>, access: Access) -> Result<Hold<'_>, Error> {
        self.check(&range)?;
        let page = PAGE_BYTES as u64;
        let pages = match range.is_empty() {
            true => 0..0,
            false => range.start as u64 / page..(range.end as u64).div_ceil(page),
        };
        // The program needs some pages to go on, and the evictor some to choose from.
        let limit = u64::from(self.pager.frames.total() / 2);
        let count = pages.end - pages.start;
        let add = |pinned: u64| pinned.checked_add(count).filter(|sum| *sum <= limit);
        let order = Ordering::AcqRel;
        if self.pager.pinned_pages.fetch_update(order, Ordering::Relaxed, add).is_err() {
            return Err(Error::TooManyPins { pages: count, limit });
        }
        let mut hold = Hold { region: self, range, pages: pages.start..pages.start, count };
        for page in pages {
            self.pin_page(page, access)?;
            hold.pages.end = page + 1;
        }
        Ok(hold)
    }

    fn pin_page(&self, page: u64, access: Access) -> Result<(), PageError> {
        loop {
            let seen = self.pager.table.load(page);
            let is_ready = match access {
                Access::Read => seen.is_local(),
                Access::Write => seen.state() == State::Dirty,
            };
            if is_ready {
                if self.pager.table.pin(page, seen) {
                    return Ok(());
                }
            } else if let Err(error) = self.pager.fault(page, access, 0, Patience::Wait(None)) {
                self.pager.give_up(page, &error);
                return Err(error);
            }
        }
    }

    /// Writes all changed pages to the servers; they stay local.
    ///
    /// # Errors
    /// If not all could be written; what was not stays local and is tried again when it leaves.
    pub fn flush(&self) -> Result<(), Error> {
        let mut evictor = self.pager.evictor.lock().unwrap_or_else(|broken| broken.into_inner());
        if evictor.write_all(&self.pager) {
            return Ok(());
        }
        Err(Error::Flush(self.pager.eviction_failure()))
    }

    /// Makes the whole pages in a range leave; changed pages of the region are written to the servers before. Pages that
    /// are pinned or changed meanwhile stay. For programs that know what they will not need soon, and for measurements.
    ///
    /// # Errors
    /// If the range is not in the region, or not all changed pages could be written.
    pub fn evict(&self, range: Range<usize>) -> Result<(), Error> {
        self.check(&range)?;
        self.flush()?;
        let page = PAGE_BYTES as u64;
        let pages = (range.start as u64).div_ceil(page)..range.end as u64 / page;
        let mut evictor = self.pager.evictor.lock().unwrap_or_else(|broken| broken.into_inner());
        evictor.evict_clean(&self.pager, pages);
        Ok(())
    }

    /// Makes the whole pages in a range zero, without reading or writing them.
    ///
    /// # Errors
    /// If the range is not in the region.
    pub fn discard(&mut self, range: Range<usize>) -> Result<(), Error> {
        self.check(&range)?;
        let page = PAGE_BYTES as u64;
        self.discard_pages((range.start as u64).div_ceil(page)..range.end as u64 / page);
        Ok(())
    }

    /// As [`Self::discard`], for memory that is shared by its address.
    ///
    /// # Safety
    /// No reference to the range may exist.
    ///
    /// # Errors
    /// If the range is not in the region.
    pub unsafe fn discard_shared(&self, range: Range<usize>) -> Result<(), Error> {
        self.check(&range)?;
        let page = PAGE_BYTES as u64;
        self.discard_pages((range.start as u64).div_ceil(page)..range.end as u64 / page);
        Ok(())
    }

    fn discard_pages(&self, pages: Range<u64>) {
        let pager = &*self.pager;
        // Pages that are given back together interrupt the other cores once.
        let mut claims = ArrayVec::<Claim, BATCH>::new();
        let mut page = pages.start;
        while page < pages.end {
            let seen = pager.table.load(page);
            match seen.state() {
                State::Zero => {}
                // The mark in the kernel goes too.
                State::Lost => {
                    let Some(claim) = pager.table.claim(page, seen) else { continue };
                    let is_done = pager.memory.discard(&[page]).is_ok();
                    let state = if is_done { State::Zero } else { State::Lost };
                    pager.finish(claim, seen.with(state).stored(false));
                }
                // Who holds that page may wait for one that is claimed here.
                State::Busy if !claims.is_empty() => {
                    discard_claimed(pager, claims.take());
                    continue;
                }
                State::Busy => {
                    pager.table.wait(page, seen, Duration::from_millis(20));
                    continue;
                }
                State::Remote | State::Clean | State::Dirty | State::Writing => {
                    let Some(claim) = pager.table.claim(page, seen) else { continue };
                    if seen.is_local() {
                        claims.push(claim);
                    } else {
                        pager.finish(claim, seen.with(State::Zero).stored(false));
                    }
                }
            }
            if claims.is_full() {
                discard_claimed(pager, claims.take());
            }
            page += 1;
        }
        discard_claimed(pager, claims);
    }

    /// Waits until the pages that are being written back are, at most for `limit`: before a process ends, so that no
    /// allocation of remote memory is under way. If it ends `at_once`, no further page leaves.
    pub fn await_eviction(&self, limit: Duration, at_once: bool) {
        let until = Instant::now() + limit;
        loop {
            match self.pager.evictor.try_lock() {
                Ok(evictor) if at_once => return std::mem::forget(evictor),
                Err(TryLockError::WouldBlock) if Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                _ => return,
            }
        }
    }

    /// From now on the program may make pages of the region unreadable (`mprotect`); leaving costs them a little more.
    ///
    /// # Errors
    /// If the system does not let the process read its memory as a file.
    pub fn expect_protection(&self) -> Result<(), Error> {
        let what = "open /proc/self/mem";
        self.pager.memory.expect_protection().map_err(|error| Error::System { what, error })
    }

    fn check(&self, range: &Range<usize>) -> Result<(), Error> {
        if range.start <= range.end && range.end <= self.bytes {
            return Ok(());
        }
        let (start, end) = (range.start as u64, range.end as u64);
        Err(Error::OutOfRange { start, end, bytes: self.bytes as u64 })
    }

    /// What the pager did so far.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        self.pager.statistics()
    }

    /// As [`Self::statistics`], but without `requested_pages`, `confirmed_pages` and `allocated_bytes`, which are 0. It takes
    /// no lock, so implementations of [`RemoteMemory`] can use it.
    #[must_use]
    pub fn counts(&self) -> Statistics {
        self.pager.counts()
    }

    /// The same numbers for code that holds a view of the memory meanwhile, such as a measurement.
    #[must_use]
    pub fn observer(&self) -> Observer {
        Observer { pager: Arc::downgrade(&self.pager) }
    }

    /// How the region works on this machine.
    #[must_use]
    pub fn mechanisms(&self) -> Mechanisms {
        let memory = &self.pager.memory;
        Mechanisms {
            mode: self.mode,
            scope: memory.scope(),
            batched_discards: memory.discards_in_batches(),
            poison: memory.userfault().has_poison(),
        }
    }
}

/// Makes claimed local pages zero.
fn discard_claimed(pager: &Pager, claims: ArrayVec<Claim, BATCH>) {
    let pages: ArrayVec<u64, BATCH> = claims.iter().map(|claim| claim.page).collect();
    if pages.is_empty() {
        return;
    }
    if pager.memory.discard(&pages).is_err() {
        claims.into_iter().for_each(|claim| pager.restore(claim));
        return;
    }
    for claim in claims {
        let was = claim.was;
        pager.finish(claim, was.with(State::Zero).stored(false));
    }
    pager.frames.release(u32::try_from(pages.len()).unwrap_or(0));
    pages.into_iter().for_each(|page| pager.tell(News::Discarded(page)));
}

impl fmt::Debug for RemoteRegion {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("RemoteRegion")
            .field("start", &self.as_ptr())
            .field("bytes", &self.bytes)
            .field("mode", &self.mode)
            .finish_non_exhaustive()
    }
}

impl Drop for RemoteRegion {
    fn drop(&mut self) {
        self.pager.stop.store(true, Ordering::SeqCst);
        memory::set_and_wake(&self.pager.evictor_sleeps, 0);
        self.pager.background.wake();
        for thread in [self.eviction.take(), self.background.take()].into_iter().flatten() {
            // A thread that panicked has ended too.
            let _ = thread.join();
        }
        drop(self.resolver.take());
        let mut evictor = self.pager.evictor.lock().unwrap_or_else(|broken| broken.into_inner());
        // What a server that does not respond holds can be freed by `bluebridge purge`.
        if let Err(error) = evictor.free(&self.pager) {
            tracing::warn!(%error, "the region's remote memory could not be freed");
        }
    }
}

/// Pages that are kept local.
struct Hold<'a> {
    region: &'a RemoteRegion,
    range: Range<usize>,
    /// The pages that have a pin.
    pages: Range<u64>,
    /// The pages that count as pinned.
    count: u64,
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        for page in self.pages.clone() {
            self.region.pager.table.unpin(page);
        }
        self.region.pager.pinned_pages.fetch_sub(self.count, Ordering::AcqRel);
    }
}

impl Hold<'_> {
    fn start(&self) -> *mut u8 {
        self.region.as_ptr().as_ptr().wrapping_add(self.range.start)
    }
}

/// A range that is local; system calls can read it.
pub struct Pinned<'a> {
    hold: Hold<'a>,
}

impl Deref for Pinned<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the range is in the region, which is borrowed as long as this; nobody has a mutable view of it.
        unsafe { std::slice::from_raw_parts(self.hold.start(), self.hold.range.len()) }
    }
}

/// A range that is local and writable; system calls can read it and write to it.
pub struct PinnedMut<'a> {
    hold: Hold<'a>,
}

impl Deref for PinnedMut<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the range is in the region, which is borrowed mutably as long as this.
        unsafe { std::slice::from_raw_parts(self.hold.start(), self.hold.range.len()) }
    }
}

impl DerefMut for PinnedMut<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and this is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.hold.start(), self.hold.range.len()) }
    }
}
