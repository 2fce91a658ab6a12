//! Eviction: pages that leave, in batches.
//!
//! [`Evictor::evict`] takes up to [`BATCH`] victims. Clean pages are discarded at once. Dirty pages are protected and
//! copied; the copies are written to the servers while the program may go on reading the pages, and writing to them,
//! which keeps them local. What was written is then discarded, all with one system call.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use bluebridge::{ReadRequest, WriteRequest};

use crate::error::EvictionFailure;
use crate::kernel::PAGE_BYTES;
use crate::kernel::{memory, schedule};
use crate::page_table::{Claim, State, Word};
use crate::pager::{News, Pager, is_lost};
use crate::remote::{EXTENT_PAGES, RemoteMemory};
use crate::replacement::{Arrival, Replacement};

/// Most pages that leave at once.
pub(crate) const BATCH: usize = 64;
/// Victims that are looked at for a batch; more are passed over only if they are pinned or busy.
const CANDIDATE_LIMIT: usize = 4 * BATCH;
/// Most extents that may be lost during a flush.
const LOSS_LIMIT: u32 = 16;
/// Pause after a failed write, so that a server that does not respond is not asked without end.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Pause between two extents that are moved, or until it is looked again whether children have ended.
const MERGE_PAUSE: Duration = Duration::from_millis(50);

type Page = [u8; PAGE_BYTES];

/// What chooses the pages that leave, and what it needs to write them.
pub(crate) struct Evictor {
    remote: Box<dyn RemoteMemory>,
    replacement: Replacement,
    /// Copies of pages that are being written.
    copies: Box<[Page]>,
    /// No write is tried before.
    retry_at: Option<Instant>,
    /// Whether a page could not be written, since this was last set to false.
    has_given_back: bool,
    /// The first page that may be dirty again because an extent was lost, since this was last taken.
    lost_from: Option<u64>,
}

/// Who waits for pages to leave.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Urgency {
    /// A thread of the program.
    Waited,
    /// Nobody yet.
    Ahead,
}

/// What happens to pages after they were written.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum After {
    /// They leave.
    Evict,
    /// They stay, and are clean.
    Keep,
}

/// What became of [`Evictor::merge`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Merge {
    /// There is no older extent.
    Done,
    /// An extent was moved.
    Moved,
    /// Other processes need the older extents.
    Shared,
    /// A page is busy, or the servers do not respond.
    Delayed,
}

/// A page that is being written, and its word meanwhile.
struct Written {
    page: u64,
    word: Word,
    is_failed: bool,
}

impl Evictor {
    pub(crate) fn new(remote: Box<dyn RemoteMemory>, local_pages: u32) -> Self {
        Self {
            remote,
            replacement: Replacement::new(usize::try_from(local_pages).unwrap_or(usize::MAX)),
            copies: vec![[0; PAGE_BYTES]; BATCH].into_boxed_slice(),
            retry_at: None,
            has_given_back: false,
            lost_from: None,
        }
    }

    /// A page is local, of which there was no news.
    pub(crate) fn insert(&mut self, page: u64) {
        self.replacement.insert(page, Arrival::Demand);
    }

    /// Takes the news of the faulting threads.
    pub(crate) fn listen(&mut self, pager: &Pager) {
        while let Some(news) = pager.news.pop() {
            match news {
                News::Demanded(page) => self.replacement.insert(page, Arrival::Demand),
                News::Prefetched(page) => self.replacement.insert(page, Arrival::Prefetch),
                News::Touched(page) => self.replacement.touch(page),
                // News of a page that became local again meanwhile may have overtaken this.
                News::Discarded(page) if pager.table.load(page).is_local() => {}
                News::Discarded(page) => self.replacement.remove(page),
            }
        }
    }

    /// Makes room for up to [`BATCH`] pages; returns for how many.
    pub(crate) fn evict(&mut self, pager: &Pager, urgency: Urgency) -> u32 {
        // The program can use the core while nobody waits.
        self.remote.set_polling(urgency == Urgency::Waited);
        self.listen(pager);
        let mut clean = ArrayVec::<Claim, BATCH>::new();
        let mut dirty = ArrayVec::<Claim, BATCH>::new();
        let mut kept = ArrayVec::<u64, CANDIDATE_LIMIT>::new();
        let may_write = self.retry_at.is_none_or(|at| at <= Instant::now());
        // A small region keeps most of its local pages.
        let quarter = usize::try_from(pager.frames.total() / 4).unwrap_or(BATCH);
        let batch = BATCH.min(quarter.max(1));
        while clean.len() + dirty.len() < batch && !kept.is_full() {
            let Some(page) = self.replacement.victim() else { break };
            let seen = pager.table.load(page);
            let target = match seen.state() {
                _ if seen.is_pinned() => None,
                State::Clean => Some(&mut clean),
                State::Dirty if may_write => Some(&mut dirty),
                // It was discarded, and the news of it is still to come.
                State::Zero | State::Remote | State::Lost => continue,
                State::Dirty | State::Busy | State::Writing => None,
            };
            match target.and_then(|target| Some((target, pager.table.claim(page, seen)?))) {
                Some((target, claim)) => target.push(claim),
                None => kept.push(page),
            }
        }
        kept.iter().for_each(|page| self.replacement.keep(*page));
        pager.counters.evicted_clean_pages.add(clean.len() as u64);
        let mut freed = discard(pager, clean);
        freed += self.write(pager, dirty, After::Evict);
        freed
    }

    /// Makes the clean pages of a range leave that are not pinned.
    pub(crate) fn evict_clean(&mut self, pager: &Pager, pages: Range<u64>) {
        self.listen(pager);
        let mut claims = ArrayVec::<Claim, BATCH>::new();
        for page in pages {
            let seen = pager.table.load(page);
            if seen.state() == State::Clean
                && !seen.is_pinned()
                && let Some(claim) = pager.table.claim(page, seen)
            {
                self.replacement.remove(page);
                claims.push(claim);
            }
            if claims.is_full() {
                pager.counters.evicted_clean_pages.add(claims.len() as u64);
                discard(pager, claims.take());
            }
        }
        pager.counters.evicted_clean_pages.add(claims.len() as u64);
        discard(pager, claims);
    }

    /// Writes all dirty pages of the region; they stay local. Returns whether all could be written.
    pub(crate) fn write_all(&mut self, pager: &Pager) -> bool {
        self.remote.set_polling(true);
        self.listen(pager);
        let mut page = 0;
        let mut losses = 0;
        while page < pager.table.page_count() {
            let mut dirty = ArrayVec::<Claim, BATCH>::new();
            while page < pager.table.page_count() && !dirty.is_full() {
                let seen = pager.table.load(page);
                match seen.state() {
                    State::Dirty => {
                        let Some(claim) = pager.table.claim(page, seen) else { continue };
                        dirty.push(claim);
                    }
                    State::Busy if dirty.is_empty() => {
                        pager.table.wait(page, seen, Duration::from_millis(20));
                        continue;
                    }
                    // Those that are claimed first end before it is looked at again.
                    State::Busy => break,
                    _ => {}
                }
                page += 1;
            }
            if !dirty.is_empty() {
                (self.has_given_back, self.lost_from) = (false, None);
                self.write(pager, dirty, After::Keep);
                match self.lost_from {
                    // What is lost is written elsewhere.
                    Some(first) if losses < LOSS_LIMIT => {
                        losses += 1;
                        page = first;
                    }
                    None if !self.has_given_back => {}
                    _ => return false,
                }
            }
        }
        true
    }

    /// Writes claimed dirty pages; returns how many left.
    fn write(&mut self, pager: &Pager, mut claims: ArrayVec<Claim, BATCH>, after: After) -> u32 {
        // Neighbours are written together.
        claims.sort_unstable_by_key(|claim| claim.page);
        let pages: ArrayVec<u64, BATCH> = claims.iter().map(|claim| claim.page).collect();
        if pages.is_empty() {
            return 0;
        }
        self.retry_at = None;
        pager.batches.fetch_add(1, Ordering::SeqCst);
        if let Err(error) = pager.memory.protect(&pages) {
            pager.set_eviction_failure(Some(EvictionFailure::Kernel(error.into())));
            for claim in claims {
                self.give_back(pager, claim);
            }
            return 0;
        }
        let mut zeros = ArrayVec::<Claim, BATCH>::new();
        let mut writing = ArrayVec::<Written, BATCH>::new();
        for claim in claims {
            let page = claim.page;
            let Some(copy) = self.copies.get_mut(writing.len()) else { continue };
            pager.memory.copy_out(page, copy);
            if is_zero(copy) {
                zeros.push(Claim { page, was: claim.was.stored(false) });
                continue;
            }
            if let Err(error) = pager.extents.allocate(page, &mut *self.remote) {
                pager.set_eviction_failure(Some(error.into()));
                self.retry_at = Some(Instant::now() + RETRY_PAUSE);
                pager.counters.failed_writes.one();
                self.give_back(pager, claim);
                continue;
            }
            let (word, has_waiters) = pager.table.begin_writing(claim);
            if has_waiters {
                let _ = pager.memory.wake(page);
            }
            writing.push(Written { page, word, is_failed: false });
        }
        pager.counters.evicted_zero_pages.add(zeros.len() as u64);
        let mut freed = match after {
            After::Evict => discard(pager, zeros),
            After::Keep => {
                // Nothing is stored of a clean page that is zero.
                for claim in zeros {
                    let was = claim.was;
                    pager.finish(claim, was.with(State::Clean));
                }
                0
            }
        };
        self.send(pager, &mut writing);
        freed += self.end_writing(pager, writing, after);
        freed
    }

    /// Writes the copies to the servers.
    fn send(&mut self, pager: &Pager, writing: &mut [Written]) {
        if writing.is_empty() {
            return;
        }
        let mut requests = ArrayVec::<WriteRequest<'_>, BATCH>::new();
        let mut rest = &*self.copies;
        let is_next = |page: &Written, next: &Written| {
            page.page.checked_add(1) == Some(next.page) && !next.page.is_multiple_of(EXTENT_PAGES)
        };
        let mut bytes = 0;
        let layer = pager.extents.current();
        for run in writing.chunk_by_mut(is_next) {
            let Some((copies, after)) = rest.split_at_checked(run.len()) else { break };
            rest = after;
            match run.first().and_then(|first| pager.extents.pointer(first.page, layer)) {
                Some(pointer) => {
                    requests.push(WriteRequest::new(pointer, copies.as_flattened()));
                    bytes += copies.as_flattened().len() as u64;
                }
                None => run.iter_mut().for_each(|written| written.is_failed = true),
            }
        }
        let result = self.remote.write_many(&mut requests);
        if let Err(error) = &result {
            pager.set_eviction_failure(Some(error.clone().into()));
        }
        let mut results = requests.into_iter().map(|request| request.result);
        let mut is_well = result.is_ok();
        let mut lost = ArrayVec::<u64, BATCH>::new();
        for run in writing.chunk_by_mut(is_next) {
            if run.first().is_some_and(|first| first.is_failed) {
                is_well = false;
                continue;
            }
            let Some(Err(error)) = results.next() else { continue };
            is_well = false;
            // A batch is about few extents; each is forgotten once.
            if is_lost(&error)
                && let Some(first) = run.first()
            {
                lost.push(first.page);
            }
            pager.set_eviction_failure(Some(error.into()));
            run.iter_mut().for_each(|written| written.is_failed = true);
        }
        if result.is_err() {
            writing.iter_mut().for_each(|written| written.is_failed = true);
        }
        let first = writing.first().map_or(0, |written| written.page);
        for page in &lost {
            lose_extent(pager, *page, layer);
            // What was written just before is lost too.
            let extent = page / EXTENT_PAGES;
            let pages = writing.iter_mut().filter(|written| written.page / EXTENT_PAGES == extent);
            pages.for_each(|written| written.is_failed = true);
            let from = self.lost_from.unwrap_or(first).min(extent * EXTENT_PAGES);
            self.lost_from = Some(from);
        }
        if !is_well {
            pager.counters.failed_writes.one();
            // What is lost is written elsewhere at once.
            if lost.is_empty() {
                self.retry_at = Some(Instant::now() + RETRY_PAUSE);
            }
            return;
        }
        pager.counters.written_bytes.add(bytes);
        // Unless an extent of the batch could not be allocated.
        if self.retry_at.is_none() {
            pager.set_eviction_failure(None);
        }
    }

    /// Ends the writing of pages; returns how many left.
    fn end_writing(
        &mut self,
        pager: &Pager,
        writing: ArrayVec<Written, BATCH>,
        after: After,
    ) -> u32 {
        let mut leaving = ArrayVec::<Claim, BATCH>::new();
        let layer = pager.extents.current();
        for Written { page, word, is_failed } in writing {
            let Some(claim) = claim_written(pager, page, word) else {
                // The program wrote to it meanwhile.
                if after == After::Evict {
                    self.replacement.keep(page);
                    self.replacement.touch(page);
                }
                continue;
            };
            let was = claim.was;
            match after {
                _ if is_failed => self.give_back(pager, claim),
                After::Keep => pager.finish(claim, was.with(State::Clean).stored_in(layer)),
                After::Evict if was.is_pinned() => {
                    pager.finish(claim, was.with(State::Clean).stored_in(layer));
                    self.replacement.keep(page);
                }
                After::Evict => leaving.push(Claim { page, was: was.stored_in(layer) }),
            }
        }
        pager.counters.evicted_written_pages.add(leaving.len() as u64);
        discard(pager, leaving)
    }

    /// Ends the claim of a page that could not be written: it stays local and dirty.
    fn give_back(&mut self, pager: &Pager, claim: Claim) {
        let page = claim.page;
        pager.keep_dirty(claim);
        self.has_given_back = true;
        self.replacement.keep(page);
    }

    /// Moves the pages of one extent from an older layer to the present one, if no other process needs the older one any
    /// more, and frees it.
    pub(crate) fn merge(&mut self, pager: &Pager, urgency: Urgency) -> Merge {
        self.remote.set_polling(urgency == Urgency::Waited);
        let Some((first, layer)) = pager.extents.older() else { return Merge::Done };
        if !self.remote.is_alone() {
            return Merge::Shared;
        }
        if self.retry_at.is_some_and(|at| at > Instant::now()) {
            return Merge::Delayed;
        }
        let end = (first + EXTENT_PAGES).min(pager.table.page_count());
        let mut page = first;
        while page < end {
            let mut claims = ArrayVec::<Claim, BATCH>::new();
            while page < end && !claims.is_full() {
                let seen = pager.table.load(page);
                if !seen.is_stored() || seen.layer() != layer {
                    page += 1;
                    continue;
                }
                if seen.state() == State::Busy {
                    // A fault on it is going on; the rest can wait.
                    self.move_stored(pager, claims, layer);
                    return Merge::Delayed;
                }
                let Some(claim) = pager.table.claim(page, seen) else { continue };
                match seen.state() {
                    State::Remote => claims.push(claim),
                    // What is local is written again when it leaves.
                    _ => pager.keep_dirty(claim),
                }
                page += 1;
            }
            if !self.move_stored(pager, claims, layer) {
                return Merge::Delayed;
            }
        }
        if let Err(error) = pager.extents.remove(first, layer, &mut *self.remote) {
            // `bluebridge purge` frees it.
            tracing::warn!(%error, "an extent that is not needed any more could not be freed");
        }
        Merge::Moved
    }

    /// Moves claimed pages, which follow each other in one extent, to the present layer; false if that failed.
    fn move_stored(&mut self, pager: &Pager, claims: ArrayVec<Claim, BATCH>, from: usize) -> bool {
        if claims.is_empty() {
            return true;
        }
        let to = pager.extents.current();
        pager.batches.fetch_add(1, Ordering::SeqCst);
        let result = self.copy_stored(pager, &claims, from, to);
        for claim in claims {
            let was = claim.was;
            match result {
                Ok(()) => pager.finish(claim, was.moved_to(to)),
                Err(_) => pager.restore(claim),
            }
        }
        if let Err(error) = &result {
            pager.set_eviction_failure(Some(error.clone().into()));
            self.retry_at = Some(Instant::now() + RETRY_PAUSE);
        }
        result.is_ok()
    }

    fn copy_stored(
        &mut self,
        pager: &Pager,
        claims: &[Claim],
        from: usize,
        to: usize,
    ) -> Result<(), bluebridge::Error> {
        let Self { remote, copies, .. } = self;
        let place = |claim: &Claim, layer| {
            pager.extents.pointer(claim.page, layer).ok_or(bluebridge::Error::Length)
        };
        let mut reads = ArrayVec::<ReadRequest<'_>, BATCH>::new();
        for (claim, copy) in claims.iter().zip(copies.iter_mut()) {
            reads.push(ReadRequest::new(place(claim, from)?, copy));
        }
        remote.read_many(&mut reads)?;
        reads.into_iter().try_for_each(|request| request.result)?;
        let mut writes = ArrayVec::<WriteRequest<'_>, BATCH>::new();
        for (claim, copy) in claims.iter().zip(copies.iter()) {
            pager.extents.allocate(claim.page, &mut **remote)?;
            writes.push(WriteRequest::new(place(claim, to)?, copy));
        }
        remote.write_many(&mut writes)?;
        writes.into_iter().try_for_each(|request| request.result)
    }

    /// Frees the remote memory of a region that is dropped.
    pub(crate) fn free(&mut self, pager: &Pager) -> Result<(), bluebridge::Error> {
        self.remote.set_polling(true);
        pager.extents.free(&mut *self.remote)
    }
}

/// Claims a page if its writing was not interrupted by a write of the program. Pins and waiters may have changed.
fn claim_written(pager: &Pager, page: u64, word: Word) -> Option<Claim> {
    loop {
        let seen = pager.table.load(page);
        if !seen.is_same_writing(word) {
            return None;
        }
        if let Some(claim) = pager.table.claim(page, seen) {
            return Some(claim);
        }
    }
}

/// Makes claimed pages missing; their contents are stored, or zero. Returns how many.
fn discard(pager: &Pager, mut claims: ArrayVec<Claim, BATCH>) -> u32 {
    claims.sort_unstable_by_key(|claim| claim.page);
    let pages: ArrayVec<u64, BATCH> = claims.iter().map(|claim| claim.page).collect();
    if pages.is_empty() {
        return 0;
    }
    let result = pager.memory.discard(&pages);
    debug_assert!(result.is_ok(), "pages of the region can be discarded: {result:?}");
    let count = u32::try_from(claims.len()).unwrap_or(0);
    for claim in claims {
        let was = claim.was;
        let state = if was.is_stored() { State::Remote } else { State::Zero };
        pager.finish(claim, was.with(state));
    }
    pager.frames.release(count);
    count
}

/// Forgets the extent of a page, because its server lost the contents: missing pages of it are lost, and local ones
/// must be written elsewhere. Busy pages are marked, so that the threads that hold them do the same.
fn lose_extent(pager: &Pager, page: u64, layer: usize) {
    let first = page / EXTENT_PAGES * EXTENT_PAGES;
    pager.extents.forget(page, layer);
    for page in first..(first + EXTENT_PAGES).min(pager.table.page_count()) {
        loop {
            let seen = pager.table.load(page);
            if seen.layer() != layer {
                break;
            }
            if seen.state() == State::Busy {
                if pager.table.forget(page, seen) {
                    break;
                }
                continue;
            }
            let is_affected = matches!(seen.state(), State::Remote | State::Clean);
            if !is_affected || !seen.is_stored() {
                break;
            }
            let Some(claim) = pager.table.claim(page, seen) else { continue };
            if seen.state() == State::Remote {
                pager.lose(claim);
            } else {
                pager.keep_dirty(claim);
            }
            break;
        }
    }
}

fn is_zero(page: &Page) -> bool {
    let (words, rest) = page.as_chunks::<8>();
    words.iter().all(|word| *word == [0; 8]) && rest.iter().all(|byte| *byte == 0)
}

/// The eviction thread: keeps room for the next faults, and sleeps while there is enough.
pub(crate) fn run(pager: &Pager) {
    schedule::prefer_short_slices();
    let high = pager.low_frames.saturating_mul(2).min(pager.frames.total() / 2);
    while !pager.stop.load(Ordering::Acquire) {
        let mut is_stuck = false;
        while pager.frames.free() < high && !is_stuck && !pager.stop.load(Ordering::Acquire) {
            let mut evictor = pager.evictor.lock().unwrap_or_else(|broken| broken.into_inner());
            is_stuck = evictor.evict(pager, Urgency::Ahead) == 0;
        }
        pager.evictor_sleeps.store(1, Ordering::SeqCst);
        if pager.stop.load(Ordering::SeqCst) {
            return;
        }
        if is_stuck {
            memory::wait(&pager.evictor_sleeps, 1, Duration::from_millis(20));
        } else if pager.frames.free() >= pager.low_frames {
            let mut evictor = pager.evictor.lock().unwrap_or_else(|broken| broken.into_inner());
            let merge = evictor.merge(pager, Urgency::Ahead);
            drop(evictor);
            let pause = if merge == Merge::Done { Duration::from_secs(3600) } else { MERGE_PAUSE };
            memory::wait(&pager.evictor_sleeps, 1, pause);
        }
        pager.evictor_sleeps.store(0, Ordering::SeqCst);
    }
}
