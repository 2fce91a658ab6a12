//! Pages that are read in the background, before a fault asks for them.
//!
//! The use of a local page is not seen, so a stream's next window is read when the program faults at the first page after
//! the last one, and the program waits for it. To have it earlier, a faulting thread *orders* the window that its stream
//! will probably need next, and a thread of its own reads that into a buffer ([`Slot`]). The pages themselves stay as they
//! are: no claim, no frame. A fault that claims such a page takes the contents from the slot instead of a server.
//!
//! They are right if the page was stored unchanged, in the same place, since before they were read. That is so if its word
//! is the same as before the read: a page that is written or moved gets another generation. The generations of a page
//! return to an earlier one after [`GENERATION_COUNT`] batches of the evictor, as a batch has a page at most once; contents
//! are not taken if there were as many. And the page's extent must not have been lost during the claim: what was read may be
//! from its next allocation. `tests/plain/page_model` has this as a model.

use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use bluebridge::{Pointer, ReadRequest};
use crossbeam_queue::ArrayQueue;

use crate::kernel::PAGE_BYTES;
use crate::kernel::{memory, schedule};
use crate::lane::LANE_PAGES;
use crate::page_table::{GENERATION_COUNT, State, Word};
use crate::pager::Pager;
use crate::prefetch::Window;
use crate::remote::RemoteMemory;

/// Windows that are read or wait for their fault: one for each of 8 streams, such as those of a merge.
const SLOT_COUNT: usize = 8;
/// How long a fault waits for a read that has begun, before it reads by itself.
const WAIT_LIMIT: Duration = Duration::from_millis(5);
/// How long it polls before it sleeps, if there is another core for the reading thread.
const SPIN: Duration = Duration::from_micros(30);

/// What a slot is doing.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u32)]
enum Stage {
    /// It has nothing.
    Idle = 0,
    /// A faulting thread fills in an order, or takes contents.
    Held = 1,
    /// It waits for the background thread.
    Ordered = 2,
    /// The background thread is reading.
    Reading = 3,
    /// A fault may take the contents.
    Ready = 4,
}

/// A window, and its contents once they were read.
struct Slot {
    /// A [`Stage`]. The thread that changes it to `Held` or `Reading` is the only one that uses the slot until it changes
    /// it again. Others wait on this word.
    stage: AtomicU32,
    waiters: AtomicU32,
    /// The order's number; the oldest is replaced first.
    number: AtomicU64,
    /// The ordered window. Others may see a mixture of two orders, so it is only a hint for them.
    first: AtomicU64,
    stride: AtomicI64,
    count: AtomicU32,
    /// Locked only by who uses the slot.
    contents: Mutex<Contents>,
}

/// Pages that were read.
pub(crate) struct Contents {
    /// In ascending order.
    pages: ArrayVec<Stored, LANE_PAGES>,
    buffer: Box<[u8]>,
    /// Batches that the evictor had begun before the first word was looked at.
    batches: u64,
}

/// A page whose contents are in a buffer.
#[derive(Clone, Copy)]
struct Stored {
    page: u64,
    /// Before it was read.
    word: Word,
    pointer: Pointer,
    is_read: bool,
}

impl Slot {
    fn new(pages: u32) -> Self {
        let bytes = (pages as usize).saturating_add(1).saturating_mul(PAGE_BYTES);
        Self {
            stage: AtomicU32::new(Stage::Idle as u32),
            waiters: AtomicU32::new(0),
            number: AtomicU64::new(0),
            first: AtomicU64::new(0),
            stride: AtomicI64::new(0),
            count: AtomicU32::new(0),
            contents: Mutex::new(Contents {
                pages: ArrayVec::new(),
                buffer: vec![0; bytes].into_boxed_slice(),
                batches: 0,
            }),
        }
    }

    fn is(&self, stage: Stage) -> bool {
        self.stage.load(Ordering::Acquire) == stage as u32
    }

    fn change(&self, from: Stage, to: Stage) -> bool {
        let order = Ordering::AcqRel;
        self.stage.compare_exchange(from as u32, to as u32, order, Ordering::Relaxed).is_ok()
    }

    /// Ends the use of the slot; wakes who waits for it.
    fn set(&self, stage: Stage) {
        self.stage.store(stage as u32, Ordering::SeqCst);
        if self.waiters.load(Ordering::SeqCst) > 0 {
            memory::wake_all(&self.stage);
        }
    }

    fn window(&self) -> Window {
        Window {
            first: self.first.load(Ordering::Relaxed),
            stride: self.stride.load(Ordering::Relaxed),
            count: self.count.load(Ordering::Relaxed),
        }
    }

    /// Waits while the background thread reads, but not for long.
    fn await_reading(&self, spin: Duration) {
        let begun = Instant::now();
        while self.is(Stage::Reading) && begun.elapsed() < spin {
            std::hint::spin_loop();
        }
        while self.is(Stage::Reading) {
            let Some(rest) = WAIT_LIMIT.checked_sub(begun.elapsed()) else { return };
            self.waiters.fetch_add(1, Ordering::SeqCst);
            memory::wait(&self.stage, Stage::Reading as u32, rest);
            self.waiters.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// For who uses the slot, so that nobody else has the lock.
    fn lock(&self) -> Option<MutexGuard<'_, Contents>> {
        match self.contents.try_lock() {
            Ok(contents) => Some(contents),
            Err(TryLockError::Poisoned(contents)) => Some(contents.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// The slots of a region. A faulting thread may use this in its signal handler.
pub(crate) struct Background {
    slots: Box<[Slot]>,
    /// Orders, by the number of the slot; some may have been cancelled. One that finds no room is not executed.
    orders: ArrayQueue<usize>,
    order_count: AtomicU64,
    /// 1 while the background thread sleeps; it waits on this word.
    sleeps: AtomicU32,
    spin: Duration,
}

/// Contents that a fault takes; others can use the slot when this is dropped.
pub(crate) struct Taken<'a> {
    slot: &'a Slot,
    /// `None` only while this is dropped.
    contents: Option<MutexGuard<'a, Contents>>,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        // Before others can use the slot.
        drop(self.contents.take());
        self.slot.set(Stage::Idle);
    }
}

impl Taken<'_> {
    /// Where the contents of a page are in [`Self::bytes`], if they are those of `word`.
    pub(crate) fn find(&self, page: u64, word: Word) -> Option<usize> {
        let pages = &self.contents.as_ref()?.pages;
        let at = pages.binary_search_by_key(&page, |stored| stored.page).ok()?;
        let stored = pages.get(at)?;
        (stored.is_read && stored.word == word).then_some(at * PAGE_BYTES)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.contents.as_ref().map_or(&[], |contents| &contents.buffer)
    }
}

impl Background {
    /// For windows of at most `prefetch_pages` pages and the page that faults before them; with 0 there are no orders.
    pub(crate) fn new(prefetch_pages: u32) -> Self {
        let slot_count = if prefetch_pages == 0 { 0 } else { SLOT_COUNT };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            slots: (0..slot_count).map(|_| Slot::new(prefetch_pages)).collect(),
            orders: ArrayQueue::new(4 * SLOT_COUNT),
            order_count: AtomicU64::new(0),
            sleeps: AtomicU32::new(0),
            spin: if cores > 1 { SPIN } else { Duration::ZERO },
        }
    }

    pub(crate) fn is_used(&self) -> bool {
        !self.slots.is_empty()
    }

    /// Orders a window, unless that was done, or all slots are in use.
    pub(crate) fn order(&self, window: Window) {
        if window.count == 0 {
            return;
        }
        let is_there = |slot: &&Slot| !slot.is(Stage::Idle) && slot.window().contains(window.first);
        if self.slots.iter().any(|slot| is_there(&slot)) {
            return;
        }
        let oldest = |slot: &&Slot| slot.number.load(Ordering::Relaxed);
        let ready = || self.slots.iter().filter(|slot| slot.is(Stage::Ready)).min_by_key(oldest);
        let idle = self.slots.iter().find(|slot| slot.change(Stage::Idle, Stage::Held));
        let slot = idle.or_else(|| ready().filter(|slot| slot.change(Stage::Ready, Stage::Held)));
        let Some(slot) = slot else { return };
        slot.first.store(window.first, Ordering::Relaxed);
        slot.stride.store(window.stride, Ordering::Relaxed);
        slot.count.store(window.count, Ordering::Relaxed);
        slot.number.store(self.order_count.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
        slot.set(Stage::Ordered);
        let at = self.slots.iter().position(|other| std::ptr::eq(other, slot)).unwrap_or(0);
        if self.orders.push(at).is_err() {
            slot.change(Stage::Ordered, Stage::Idle);
        }
        self.wake();
    }

    /// What was read of the window that a claimed page is in. Waits a little if it is being read. `batches` is the number of
    /// batches that the evictor has begun by now.
    pub(crate) fn take(&self, page: u64, batches: u64) -> Option<Taken<'_>> {
        let find =
            |stage| self.slots.iter().find(|slot| slot.is(stage) && slot.window().contains(page));
        let slot = find(Stage::Ready).or_else(|| find(Stage::Reading));
        let slot = slot.or_else(|| find(Stage::Ordered))?;
        // The fault can read it just as fast.
        if slot.change(Stage::Ordered, Stage::Idle) {
            return None;
        }
        slot.await_reading(self.spin);
        if !slot.change(Stage::Ready, Stage::Held) {
            return None;
        }
        if !slot.window().contains(page) {
            // Meanwhile it was ordered for another stream, and read.
            slot.set(Stage::Ready);
            return None;
        }
        let taken = Taken { slot, contents: slot.lock() };
        let age = batches.wrapping_sub(taken.contents.as_ref()?.batches);
        (age < GENERATION_COUNT.into()).then_some(taken)
    }

    pub(crate) fn wake(&self) {
        // The order is in the queue before it is looked whether the thread sleeps.
        std::sync::atomic::fence(Ordering::SeqCst);
        if self.sleeps.load(Ordering::SeqCst) == 1 {
            memory::set_and_wake(&self.sleeps, 0);
        }
    }
}

/// The background thread: reads what is ordered, and sleeps while nothing is.
pub(crate) fn run(pager: &Pager, mut remote: Box<dyn RemoteMemory>) {
    let background = &pager.background;
    // A program that computes meanwhile may need the core.
    remote.set_polling(false);
    schedule::prefer_short_slices();
    while !pager.stop.load(Ordering::Acquire) {
        if let Some(slot) = background.orders.pop().and_then(|at| background.slots.get(at)) {
            if slot.change(Stage::Ordered, Stage::Reading) {
                let has_read = slot
                    .lock()
                    .is_some_and(|mut contents| contents.read(pager, slot.window(), &mut *remote));
                slot.set(if has_read { Stage::Ready } else { Stage::Idle });
            }
            continue;
        }
        background.sleeps.store(1, Ordering::SeqCst);
        if background.orders.is_empty() && !pager.stop.load(Ordering::SeqCst) {
            memory::wait(&background.sleeps, 1, Duration::from_secs(3600));
        }
        background.sleeps.store(0, Ordering::SeqCst);
    }
}

impl Contents {
    /// Reads the pages of a window that are stored; false if there are none, or they cannot be read.
    fn read(&mut self, pager: &Pager, window: Window, remote: &mut dyn RemoteMemory) -> bool {
        self.batches = pager.batches.load(Ordering::SeqCst);
        self.pages.clear();
        let page_count = pager.table.page_count();
        for page in window.pages().filter(|page| *page < page_count) {
            let word = pager.table.load(page);
            if word.state() != State::Remote || self.pages.is_full() {
                continue;
            }
            let Some(pointer) = pager.extents.pointer(page, word.layer()) else { continue };
            // Otherwise the place may be that of another extent of the layer, allocated after the page has left the layer.
            if pager.table.load(page) != word {
                continue;
            }
            self.pages.push(Stored { page, word, pointer, is_read: false });
        }
        self.pages.sort_unstable_by_key(|stored| stored.page);
        let mut requests = ArrayVec::<ReadRequest<'_>, LANE_PAGES>::new();
        let mut rest = &mut *self.buffer;
        for run in self.pages.chunk_by(follows) {
            let Some((buffer, after)) = rest.split_at_mut_checked(run.len() * PAGE_BYTES) else {
                break;
            };
            rest = after;
            if let Some(first) = run.first() {
                requests.push(ReadRequest::new(first.pointer, buffer));
            }
        }
        if requests.is_empty() || remote.read_many(&mut requests).is_err() {
            return false;
        }
        let mut results = requests.into_iter().map(|request| request.result);
        let mut count = 0;
        for run in self.pages.chunk_by_mut(follows) {
            if matches!(results.next(), Some(Ok(()))) {
                count += run.len() as u64;
                run.iter_mut().for_each(|stored| stored.is_read = true);
            }
        }
        pager.counters.read_bytes.add(count * PAGE_BYTES as u64);
        pager.counters.background_pages.add(count);
        count > 0
    }
}

/// Whether one page can be read together with the one before it.
fn follows(page: &Stored, next: &Stored) -> bool {
    page.page.checked_add(1) == Some(next.page)
        && page.pointer.checked_add(PAGE_BYTES as u64).is_ok_and(|behind| behind == next.pointer)
}
