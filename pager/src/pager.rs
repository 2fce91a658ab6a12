//! How a fault is resolved.
//!
//! A [`Pager`] is what all threads of a region share. [`Pager::fault`] runs on the faulting thread (in its signal
//! handler) or on a handler thread. It takes a frame, claims the page in the page table, reads it through a lane, and
//! installs it.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, TryLockError};
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use bluebridge::{Error as RemoteError, Pointer, ReadRequest, Status};
use crossbeam_queue::ArrayQueue;

use crate::background::{Background, Taken};
use crate::counters::{Counters, Statistics};
use crate::error::{EvictionFailure, PageError};
use crate::evict::{Evictor, Urgency};
use crate::frames::Frames;
use crate::kernel::PAGE_BYTES;
use crate::kernel::memory;
use crate::kernel::paged::{PagedMemory, Protection};
use crate::kernel::signal::Mask;
use crate::lane::{LANE_PAGES, Lane, Lanes};
use crate::likelihood::WriteLikelihood;
use crate::options::OnFailure;
use crate::page_table::{Claim, PageTable, State, Word};
use crate::prefetch::{Advice, Window};
use crate::remote::Extents;
use crate::report;

/// What the faulting instruction does.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// What became of a fault.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Resolution {
    /// The page is local, and threads that waited for it in the kernel were woken.
    Installed,
    /// The page is local; threads that wait for it in the kernel must be woken.
    Present,
    /// Another thread is changing the page, and wakes who waits in the kernel when it is done.
    Deferred,
    /// There is no room while a thread forks; all threads that wait in the kernel try again afterwards.
    Postponed,
}

/// Who waits until another thread is done with a page.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Patience<'a> {
    /// This thread. In the signal handler, the signals that were blocked before.
    Wait(Option<&'a Mask>),
    /// The faulting thread, in the kernel; this thread goes on.
    Defer,
}

impl Patience<'_> {
    /// Pauses before another try; a signal can end the program meanwhile. No lock may be held.
    fn pause(self, time: Duration) {
        match self {
            Self::Wait(Some(mask)) => mask.sleep(time),
            Self::Wait(None) | Self::Defer => std::thread::sleep(time),
        }
    }
}

/// A page that became local, or was seen to be used; for the evictor.
#[derive(Clone, Copy, Debug)]
pub(crate) enum News {
    Demanded(u64),
    Prefetched(u64),
    Touched(u64),
    Discarded(u64),
}

/// How long a thread waits for room or for another thread before it looks again.
const WAIT_SLICE: Duration = Duration::from_millis(20);
/// Time between two messages of a thread that waits for a server.
const MESSAGE_PERIOD: Duration = Duration::from_secs(10);
/// Pause before a failed read is repeated.
const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// What all threads of a region share.
pub(crate) struct Pager {
    pub(crate) memory: PagedMemory,
    pub(crate) table: PageTable,
    pub(crate) frames: Frames,
    pub(crate) extents: Extents,
    pub(crate) lanes: Lanes,
    pub(crate) background: Background,
    /// Batches of pages that the evictor has begun to write or to move.
    pub(crate) batches: AtomicU64,
    pub(crate) evictor: Mutex<Evictor>,
    pub(crate) news: ArrayQueue<News>,
    pub(crate) counters: Counters,
    pub(crate) likelihood: WriteLikelihood,
    pub(crate) on_failure: OnFailure,
    pub(crate) deadline: Duration,
    /// Below this number of free frames, the eviction thread works.
    pub(crate) low_frames: u32,
    /// 1 while the eviction thread sleeps; it waits on this word.
    pub(crate) evictor_sleeps: AtomicU32,
    pub(crate) eviction_failure: Mutex<Option<EvictionFailure>>,
    pub(crate) pinned_pages: AtomicU64,
    pub(crate) stop: AtomicBool,
    /// The thread that is forking, which holds the evictor; 0: none.
    pub(crate) forking_thread: AtomicU32,
    /// Frames that only a thread that is forking may take.
    pub(crate) reserved_frames: u32,
}

/// A page to be installed, and where it is stored if its contents come from there.
struct Wanted {
    claim: Claim,
    pointer: Option<Pointer>,
    source: Source,
    result: Result<(), RemoteError>,
}

/// The buffer from which a page is installed, and the first byte there.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Source {
    /// The lane's own.
    Lane(usize),
    /// That of the background thread.
    Background(usize),
}

impl Source {
    /// Of the page behind this one, if both can be installed together.
    fn next(self) -> Self {
        match self {
            Self::Lane(start) => Self::Lane(start.saturating_add(PAGE_BYTES)),
            Self::Background(start) => Self::Background(start.saturating_add(PAGE_BYTES)),
        }
    }
}

/// Why a page could not be installed; its claim has ended.
enum LoadError {
    Remote(RemoteError),
    /// With the system's error number.
    Kernel(i32),
}

/// Why a page was not installed.
#[derive(Clone, Copy)]
enum NotInstalled {
    NotRead,
    /// By the kernel, with this error number.
    Refused(i32),
}

impl Pager {
    /// Makes a page local for an access. If that fails, [`Self::give_up`] must follow.
    pub(crate) fn fault(
        &self,
        page: u64,
        access: Access,
        thread: u64,
        patience: Patience<'_>,
    ) -> Result<Resolution, PageError> {
        let begun = Instant::now();
        let mut last_message = begun;
        let mut has_waited = false;
        loop {
            let seen = self.table.load(page);
            match seen.state() {
                State::Busy => {
                    if !has_waited {
                        self.counters.busy_faults.one();
                        has_waited = true;
                    }
                    if matches!(patience, Patience::Defer) {
                        if self.table.announce_waiter(page, seen).is_some() {
                            return Ok(Resolution::Deferred);
                        }
                    } else {
                        self.table.wait(page, seen, WAIT_SLICE);
                    }
                }
                State::Dirty => {
                    self.counters.late_faults.one();
                    return Ok(Resolution::Present);
                }
                State::Clean | State::Writing if access == Access::Read => {
                    self.counters.late_faults.one();
                    return Ok(Resolution::Present);
                }
                State::Clean | State::Writing => {
                    if let Some(claim) = self.table.claim(page, seen) {
                        return self.make_writable(claim);
                    }
                }
                State::Lost => return Err(PageError::Unusable { page }),
                State::Zero | State::Remote => {
                    if !self.take_frame(page, thread, begun, patience)? {
                        return Ok(Resolution::Postponed);
                    }
                    let Some(claim) = self.table.claim(page, seen) else {
                        self.frames.release(1);
                        continue;
                    };
                    match self.load(claim, access, thread, begun) {
                        Ok(()) => return Ok(Resolution::Installed),
                        Err(error) => {
                            self.after_failure(page, error, begun, &mut last_message)?;
                            patience.pause(RETRY_PAUSE);
                        }
                    }
                }
            }
        }
    }

    /// Lets writes to a local page pass.
    fn make_writable(&self, claim: Claim) -> Result<Resolution, PageError> {
        let page = claim.page;
        let was = claim.was;
        if let Err(error) = self.memory.unprotect(page) {
            self.restore(claim);
            return Err(PageError::of_kernel(page, error.raw_os_error().unwrap_or(libc::EIO)));
        }
        self.finish(claim, was.with(State::Dirty));
        if was.state() == State::Writing {
            self.counters.rescued_pages.one();
        } else {
            self.counters.write_faults.one();
            self.likelihood.written();
        }
        self.tell(News::Touched(page));
        Ok(Resolution::Installed)
    }

    /// Takes a frame for a page; evicts others if there is none. False: only after a fork that is going on.
    fn take_frame(
        &self,
        page: u64,
        thread: u64,
        begun: Instant,
        patience: Patience<'_>,
    ) -> Result<bool, PageError> {
        let take = || {
            // What a thread touches while it forks must become local without the evictor, which it holds itself.
            let is_forking = thread == u64::from(self.forking_thread.load(Ordering::Relaxed));
            self.frames.take_above(if is_forking { 0 } else { self.reserved_frames })
        };
        if take() {
            self.note_frames();
            return Ok(true);
        }
        let since = Instant::now();
        let mut last_message = since;
        let result = loop {
            let mut is_busy = false;
            let freed = match self.evictor.try_lock() {
                Ok(mut evictor) => evictor.evict(self, Urgency::Waited),
                Err(TryLockError::Poisoned(evictor)) => {
                    evictor.into_inner().evict(self, Urgency::Waited)
                }
                Err(TryLockError::WouldBlock) => {
                    is_busy = true;
                    0
                }
            };
            if take() {
                break Ok(true);
            }
            let is_forking = self.forking_thread.load(Ordering::Acquire) != 0;
            if is_forking && matches!(patience, Patience::Defer) {
                // This thread is needed for the faults of the one that forks.
                return Ok(false);
            }
            if freed == 0 {
                self.frames.wait_above(self.reserved_frames, WAIT_SLICE);
            }
            let is_late = begun.elapsed() > self.deadline;
            if is_late && self.on_failure == OnFailure::Signal {
                break Err(PageError::NoRoom { page, cause: self.room_failure(is_busy) });
            }
            if is_late && last_message.elapsed() > MESSAGE_PERIOD {
                last_message = Instant::now();
                report::waiting(page, &self.room_failure(is_busy));
            }
            if is_late {
                patience.pause(RETRY_PAUSE);
            }
        };
        self.counters.inline_evictions.one();
        self.counters.room_wait_ns.time(since.elapsed());
        self.note_frames();
        result
    }

    /// Why there is no room; `is_busy` says whether another thread is still evicting.
    fn room_failure(&self, is_busy: bool) -> EvictionFailure {
        match self.eviction_failure() {
            EvictionFailure::NoneEvictable if is_busy => EvictionFailure::NoResponse,
            failure => failure,
        }
    }

    /// Why no page left, as far as it is known.
    pub(crate) fn eviction_failure(&self) -> EvictionFailure {
        let failure = self.eviction_failure.lock().unwrap_or_else(|broken| broken.into_inner());
        failure.clone().unwrap_or(EvictionFailure::NoneEvictable)
    }

    /// Keeps why no page left; `None` if one did.
    pub(crate) fn set_eviction_failure(&self, next: Option<EvictionFailure>) {
        *self.eviction_failure.lock().unwrap_or_else(|broken| broken.into_inner()) = next;
    }

    /// Wakes the eviction thread if there is little room, and keeps the maximum.
    fn note_frames(&self) {
        let free = self.frames.free();
        let local = u64::from(self.frames.total().saturating_sub(free));
        if local > self.counters.local_pages_max.load(Ordering::Relaxed) {
            self.counters.local_pages_max.fetch_max(local, Ordering::Relaxed);
        }
        if free < self.low_frames && self.evictor_sleeps.load(Ordering::Relaxed) == 1 {
            self.wake_evictor();
        }
    }

    pub(crate) fn wake_evictor(&self) {
        if self.evictor_sleeps.swap(0, Ordering::AcqRel) == 1 {
            memory::wake_all(&self.evictor_sleeps);
        }
    }

    /// Reads and installs a claimed page, and those that will probably be needed next. A frame is taken for the page.
    fn load(
        &self,
        claim: Claim,
        access: Access,
        thread: u64,
        begun: Instant,
    ) -> Result<(), LoadError> {
        let page = claim.page;
        let mut guard = self.lanes.take(thread);
        let lane = &mut *guard;
        lane.remote.fault_begun(begun);
        match claim.was.state() {
            State::Zero => self.counters.zero_faults.one(),
            _ => self.counters.remote_faults.one(),
        }
        let mut wanted = ArrayVec::<Wanted, LANE_PAGES>::new();
        wanted.push(self.wanted(claim));
        let next = self.claim_window(lane, thread, page, &mut wanted);
        wanted.sort_unstable_by_key(|wanted| wanted.claim.page);
        let taken = self.take_background(&mut wanted, page);
        let failure = self.read(lane, &mut wanted);
        self.order_background(next);
        let mut news = ArrayVec::new();
        let buffers = (&*lane.buffer, taken.as_ref().map_or(&[][..], Taken::bytes));
        let result = self.install(buffers, wanted, page, access, failure, &mut news);
        drop(taken);
        // Telling may have to wait for the evictor, which may wait for a claimed page: for one of this thread, or one of
        // a thread that waits for the lane. So neither is held.
        drop(guard);
        news.into_iter().for_each(|news| self.tell(news));
        result
    }

    /// A claimed page, and where its contents are: nowhere if its extent is lost.
    fn wanted(&self, claim: Claim) -> Wanted {
        let pointer = self.extents.pointer(claim.page, claim.was.layer());
        // In this order: an extent is allocated again only after its busy pages were marked as forgotten.
        let is_forgotten = self.table.load(claim.page).is_forgotten();
        let pointer = pointer.filter(|_| !is_forgotten);
        Wanted { claim, pointer, source: Source::Lane(0), result: Ok(()) }
    }

    /// Takes what the background thread has of the pages, if the page that faulted is among them.
    fn take_background(&self, wanted: &mut [Wanted], page: u64) -> Option<Taken<'_>> {
        let is_stored = |wanted: &Wanted| wanted.claim.page == page && is_remote(&wanted.claim);
        if !self.background.is_used() || !wanted.iter().any(is_stored) {
            return None;
        }
        let since = Instant::now();
        let taken = self.background.take(page, self.batches.load(Ordering::SeqCst));
        self.counters.read_wait_ns.time(since.elapsed());
        let taken = taken?;
        let mut count = 0;
        for Wanted { claim, source, .. } in wanted {
            let found = taken.find(claim.page, claim.was).filter(|_| is_remote(claim));
            // In this order: what was read may be from the extent's next allocation, which is made only after the mark.
            let is_forgotten = self.table.load(claim.page).is_forgotten();
            if let Some(start) = found.filter(|_| !is_forgotten) {
                *source = Source::Background(start);
                count += 1;
            }
        }
        self.counters.background_used_pages.add(count);
        Some(taken)
    }

    /// Has the pages read that will probably be needed after those of this fault.
    fn order_background(&self, next: Window) {
        let is_stored = next.count > 0
            && next.first < self.table.page_count()
            && self.table.load(next.first).state() == State::Remote;
        if is_stored && self.background.is_used() {
            self.background.order(next);
        }
    }

    /// Claims the pages that will probably be needed after `page`, and takes a frame for each. Returns those that will
    /// probably be needed later.
    fn claim_window(
        &self,
        lane: &mut Lane,
        thread: u64,
        page: u64,
        wanted: &mut ArrayVec<Wanted, LANE_PAGES>,
    ) -> Window {
        let Advice { window, next } = lane.prefetcher.fault(thread, page);
        if window.count == 0 {
            return next;
        }
        let missing = || {
            let pages = window.pages();
            pages
                .take_while(|page| *page < self.table.page_count())
                .map(|page| (page, self.table.load(page)))
                .filter(|(_, seen)| matches!(seen.state(), State::Zero | State::Remote))
        };
        // Only pages that are not local need room: a region of which all may be local need not evict.
        let free = self.frames.free();
        if free < window.count
            && missing().count() > free as usize
            && let Ok(mut evictor) = self.evictor.try_lock()
        {
            evictor.evict(self, Urgency::Waited);
        }
        for (page, seen) in missing() {
            if wanted.is_full() {
                break;
            }
            if !self.frames.take_above(self.reserved_frames) {
                break;
            }
            match self.table.claim(page, seen) {
                Some(claim) => wanted.push(self.wanted(claim)),
                None => self.frames.release(1),
            }
        }
        self.note_frames();
        next
    }

    /// Reads the stored pages into the lane's buffer, in the order of `wanted`, which is sorted; zeroes the others
    /// there. Those that the background thread has are left out. Returns why nothing could be read.
    fn read(&self, lane: &mut Lane, wanted: &mut [Wanted]) -> Option<RemoteError> {
        let since = Instant::now();
        let mut requests = ArrayVec::<ReadRequest<'_>, LANE_PAGES>::new();
        let mut rest = &mut *lane.buffer;
        let mut bytes = 0;
        let mut place = Source::Lane(0);
        for run in wanted.chunk_by_mut(follows) {
            if run.first().is_some_and(is_in_background) {
                continue;
            }
            let Some((buffer, after)) = rest.split_at_mut_checked(run.len() * PAGE_BYTES) else {
                break;
            };
            rest = after;
            for page in &mut *run {
                page.source = place;
                place = place.next();
            }
            match run.first() {
                Some(Wanted { claim, pointer: Some(pointer), .. }) if is_remote(claim) => {
                    bytes += buffer.len() as u64;
                    requests.push(ReadRequest::new(*pointer, buffer));
                }
                _ => buffer.fill(0),
            }
        }
        let mut failure = None;
        if !requests.is_empty() {
            failure = lane.remote.read_many(&mut requests).err();
            self.counters.read_bytes.add(bytes);
            self.counters.read_wait_ns.time(since.elapsed());
        }
        let mut results = requests.into_iter().map(|request| request.result);
        for run in wanted.chunk_by_mut(follows) {
            let result = match run.first() {
                Some(first) if !is_remote(&first.claim) || is_in_background(first) => Ok(()),
                // Its extent was forgotten because its contents are lost.
                Some(Wanted { pointer: None, .. }) => Err(lost_extent()),
                _ => results.next().unwrap_or(Ok(())),
            };
            for page in run {
                page.result.clone_from(&result);
            }
        }
        failure
    }

    /// Installs the pages that were read, and gives the others back. The evictor must get the news.
    fn install(
        &self,
        (lane, background): (&[u8], &[u8]),
        wanted: ArrayVec<Wanted, LANE_PAGES>,
        demanded: u64,
        access: Access,
        failure: Option<RemoteError>,
        news: &mut ArrayVec<News, LANE_PAGES>,
    ) -> Result<(), LoadError> {
        let usual = self.likelihood.protection();
        let protection = |wanted: &Wanted| {
            let is_written = wanted.claim.page == demanded && access == Access::Write;
            if is_written || !is_remote(&wanted.claim) { Protection::Writable } else { usual }
        };
        let is_same = |page: &Wanted, next: &Wanted| {
            page.claim.page.checked_add(1) == Some(next.claim.page)
                && page.source.next() == next.source
                && protection(page) == protection(next)
                && is_remote(&page.claim) == is_remote(&next.claim)
                && page.result.is_ok() == next.result.is_ok()
        };
        let mut installed = ArrayVec::<Result<Protection, NotInstalled>, LANE_PAGES>::new();
        for run in wanted.chunk_by(is_same) {
            let Some(first) = run.first() else { continue };
            let (buffer, start) = match first.source {
                Source::Lane(start) => (lane, start),
                Source::Background(start) => (background, start),
            };
            let end = start.saturating_add(run.len() * PAGE_BYTES);
            let contents = buffer.get(start..end).unwrap_or_default();
            let protection = protection(first);
            // Zeros are not read.
            let is_unread =
                is_remote(&first.claim) && !is_in_background(first) && failure.is_some();
            let (done, rest) = if is_unread || first.result.is_err() {
                (0, Err(NotInstalled::NotRead))
            } else {
                match self.memory.install(first.claim.page, contents, protection) {
                    Ok(()) => (run.len(), Ok(protection)),
                    Err((done, error)) => (
                        done,
                        Err(NotInstalled::Refused(error.raw_os_error().unwrap_or(libc::EIO))),
                    ),
                }
            };
            let results = (0..run.len()).map(|at| if at < done { Ok(protection) } else { rest });
            results.for_each(|result| installed.push(result));
        }
        let mut outcome = Ok(());
        for (wanted, installed) in wanted.into_iter().zip(installed) {
            let Wanted { claim, result, .. } = wanted;
            let (page, was) = (claim.page, claim.was);
            let is_demanded = page == demanded;
            match installed {
                Ok(protection) => {
                    match protection {
                        Protection::Writable => self.finish(claim, was.with(State::Dirty)),
                        Protection::Protected => {
                            self.likelihood.protected();
                            // It was read in time, but no server has it any more.
                            if let Err(claim) = self.finish_stored(claim, was.with(State::Clean)) {
                                self.keep_dirty(claim);
                            }
                        }
                    }
                    if is_demanded {
                        news.push(News::Demanded(page));
                    } else {
                        self.counters.prefetched_pages.one();
                        news.push(News::Prefetched(page));
                    }
                }
                Err(error) => {
                    self.restore(claim);
                    self.frames.release(1);
                    if is_demanded {
                        let failure = failure.clone().unwrap_or(RemoteError::Length);
                        outcome = Err(match error {
                            NotInstalled::Refused(errno) => LoadError::Kernel(errno),
                            NotInstalled::NotRead => {
                                LoadError::Remote(result.err().unwrap_or(failure))
                            }
                        });
                    }
                }
            }
        }
        outcome
    }

    /// Ends the claim of a page that stays as it was, unless its extent was lost meanwhile.
    pub(crate) fn restore(&self, claim: Claim) {
        let was = claim.was;
        if !was.is_stored() {
            self.finish(claim, was);
        } else if let Err(claim) = self.finish_stored(claim, was) {
            if was.is_local() { self.keep_dirty(claim) } else { self.lose(claim) }
        }
    }

    /// Ends the claim of a local page that is not stored: it stays local, and is dirty.
    pub(crate) fn keep_dirty(&self, claim: Claim) {
        // If the kernel refuses, the next write to the page faults and tries again.
        let is_writable = self.memory.unprotect(claim.page).is_ok();
        let state = if is_writable { State::Dirty } else { State::Writing };
        let was = claim.was;
        self.finish(claim, was.with(state).stored(false));
    }

    /// Decides what follows a failed read: an error, or another try.
    fn after_failure(
        &self,
        page: u64,
        error: LoadError,
        begun: Instant,
        last_message: &mut Instant,
    ) -> Result<(), PageError> {
        let cause = match error {
            LoadError::Kernel(errno) => return Err(PageError::of_kernel(page, errno)),
            LoadError::Remote(cause) => cause,
        };
        if is_lost(&cause) {
            return Err(PageError::Lost { page, cause });
        }
        if begun.elapsed() > self.deadline {
            if self.on_failure == OnFailure::Signal {
                return Err(PageError::Unreadable { page, cause });
            }
            if last_message.elapsed() > MESSAGE_PERIOD {
                *last_message = Instant::now();
                report::waiting(page, &cause);
            }
        }
        Ok(())
    }

    /// Makes a page unusable for ever if a fault on it failed for a reason that stays. Threads that wait for it go on,
    /// and fail; so who reports the error does it before.
    pub(crate) fn give_up(&self, page: u64, error: &PageError) {
        if !matches!(error, PageError::Lost { .. } | PageError::Unreadable { .. }) {
            return;
        }
        let seen = self.table.load(page);
        if matches!(seen.state(), State::Zero | State::Remote)
            && let Some(claim) = self.table.claim(page, seen)
        {
            self.lose(claim);
        }
    }

    /// Ends the claim of a missing page: from now on each access to it fails.
    pub(crate) fn lose(&self, claim: Claim) {
        self.counters.lost_pages.one();
        // Without the kernel's help, the state alone makes the pager refuse the page.
        let _ = self.memory.poison(claim.page);
        let was = claim.was;
        self.finish(claim, was.with(State::Lost).stored(false));
    }

    /// Ends a claim, and wakes threads that wait in the kernel.
    pub(crate) fn finish(&self, claim: Claim, next: Word) {
        let page = claim.page;
        if self.table.finish(claim, next) {
            // Nobody can be woken who does not wait.
            let _ = self.memory.wake(page);
        }
    }

    /// As [`Self::finish`], unless the page's extent was lost during the claim: then the claim goes on.
    fn finish_stored(&self, claim: Claim, next: Word) -> Result<(), Claim> {
        let page = claim.page;
        if self.table.finish_stored(claim, next)? {
            // Nobody can be woken who does not wait.
            let _ = self.memory.wake(page);
        }
        Ok(())
    }

    /// Passes news to the evictor, which may get them later. The thread must not hold a claim or a lane.
    pub(crate) fn tell(&self, news: News) {
        let Err(mut news) = self.news.push(news) else { return };
        // A page that the evictor does not know could never leave; the rest can be lost.
        while !matches!(news, News::Touched(_)) {
            let mut evictor = self.evictor.lock().unwrap_or_else(|broken| broken.into_inner());
            evictor.listen(self);
            match self.news.push(news) {
                Ok(()) => return,
                Err(refused) => news = refused,
            }
        }
    }

    /// The counters now, without those that need a lock.
    pub(crate) fn counts(&self) -> Statistics {
        let mut statistics = self.counters.snapshot();
        statistics.local_pages = u64::from(self.frames.total().saturating_sub(self.frames.free()));
        statistics.local_pages_max = statistics.local_pages_max.max(statistics.local_pages);
        statistics
    }

    /// The counters now.
    pub(crate) fn statistics(&self) -> Statistics {
        let mut statistics = self.counts();
        self.lanes.each(|lane| {
            let counters = lane.prefetcher.counters();
            statistics.requested_pages += counters.pages_requested;
            statistics.confirmed_pages += counters.pages_confirmed;
        });
        statistics.allocated_bytes = self.extents.allocated_bytes();
        statistics
    }
}

/// Whether the contents of a claimed page come from a server.
fn is_remote(claim: &Claim) -> bool {
    claim.was.state() == State::Remote
}

/// Whether the background thread has read it.
fn is_in_background(wanted: &Wanted) -> bool {
    matches!(wanted.source, Source::Background(_))
}

/// Whether one page can be read together with the one before it.
fn follows(page: &Wanted, next: &Wanted) -> bool {
    let is_stored_behind = match (page.pointer, next.pointer) {
        (Some(pointer), Some(next)) => {
            pointer.checked_add(PAGE_BYTES as u64).is_ok_and(|behind| behind == next)
        }
        (pointer, next) => pointer.is_none() && next.is_none(),
    };
    page.claim.page.checked_add(1) == Some(next.claim.page)
        && is_remote(&page.claim) == is_remote(&next.claim)
        && is_in_background(page) == is_in_background(next)
        && (is_stored_behind || !is_remote(&page.claim))
}

/// Whether the memory that a request names does not exist any more, so that repeating it is useless.
pub(crate) fn is_lost(error: &RemoteError) -> bool {
    match error {
        RemoteError::PastEnd { .. } => true,
        RemoteError::Refused { status, .. } => matches!(
            status,
            Status::StaleGeneration | Status::StaleTag | Status::NotAllocated | Status::OutOfRange
        ),
        _ => false,
    }
}

fn lost_extent() -> RemoteError {
    RemoteError::Refused {
        status: Status::StaleGeneration,
        node: bluebridge::NodeId::ANY,
        pointer: None,
    }
}
