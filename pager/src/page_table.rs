//! The page table: one word per page of a region, which says where the page's contents are.
//!
//! ```text
//! bit 0    3 4 5 6    8      16      20           32
//!     | state|S|W|F|  -| pins | layer | generation |      S: stored, W: waiters, F: forgotten
//! ```
//!
//! A thread that changes a page first makes it [`State::Busy`], with one compare-and-swap. From then on the page is its
//! own, until it sets the next state. Others wait on the word (futex). The only state with work in progress that others
//! may take over is [`State::Writing`]: the evictor has a copy of the page and is sending it. A thread that wants to
//! write to the page makes it dirty again, and the evictor notices by the generation.
//!
//! Three things happen to a busy page without its thread: others announce that they wait, pins end, and the evictor
//! marks the page as forgotten because its extent is lost. The end of the claim respects all three.
//!
//! ```text
//!   Zero, Remote --fault--> Busy --> Clean, Dirty         Clean --evict--> Busy --> Remote (or Zero)
//!   Clean --write fault--> Busy --> Dirty                 Dirty --evict--> Busy --> Writing
//!   Writing --write fault--> Busy --> Dirty               Writing --written--> Busy --> Remote, Clean
//! ```

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::kernel::memory::{self, Mapping};

const STATE_MASK: u32 = 0b111;
const STORED: u32 = 1 << 3;
const WAITERS: u32 = 1 << 4;
const FORGOTTEN: u32 = 1 << 5;
const PIN: u32 = 1 << 8;
const PIN_MASK: u32 = 0xff << 8;
const LAYER_SHIFT: u32 = 16;
const LAYER_MASK: u32 = 0xf << LAYER_SHIFT;
const GENERATION_SHIFT: u32 = 20;
const GENERATION: u32 = 1 << GENERATION_SHIFT;
/// After so many changes, a page's generation is the same again.
pub(crate) const GENERATION_COUNT: u32 = 1 << (u32::BITS - GENERATION_SHIFT);

/// Layers of remote memory: pages of different ages are in different ones, see [`crate::remote::Extents`].
pub(crate) const LAYER_COUNT: usize = 16;

/// Where the contents of a page are.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum State {
    /// Missing here; all bytes are zero.
    Zero = 0,
    /// Missing here; the contents are on a memory server.
    Remote = 1,
    /// Local and protected; equal to what the server has, or zero if nothing is stored there.
    Clean = 2,
    /// Local and writable; only these contents count.
    Dirty = 3,
    /// A thread is changing the page.
    Busy = 4,
    /// Local and protected; the evictor has copied the contents and sends them to the server.
    Writing = 5,
    /// The contents are lost, or could not be read in time.
    Lost = 6,
}

/// The entry of a page.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Word(u32);

impl Word {
    pub(crate) fn state(self) -> State {
        match self.0 & STATE_MASK {
            0 => State::Zero,
            1 => State::Remote,
            2 => State::Clean,
            3 => State::Dirty,
            4 => State::Busy,
            5 => State::Writing,
            _ => State::Lost,
        }
    }

    /// Whether the server has contents of the page: the current ones if the page is not dirty.
    pub(crate) fn is_stored(self) -> bool {
        self.0 & STORED != 0
    }

    /// Whether the page must stay local.
    pub(crate) fn is_pinned(self) -> bool {
        self.0 & PIN_MASK != 0
    }

    /// Whether the page is local, and no thread is changing it.
    pub(crate) fn is_local(self) -> bool {
        matches!(self.state(), State::Clean | State::Dirty | State::Writing)
    }

    /// Whether the page's extent was lost since the page was claimed.
    pub(crate) fn is_forgotten(self) -> bool {
        self.0 & FORGOTTEN != 0
    }

    /// Whether the page is still being written, by the same evictor as when its word was `begun`.
    pub(crate) fn is_same_writing(self, begun: Self) -> bool {
        let generation = |word: Self| word.0 >> GENERATION_SHIFT;
        self.state() == State::Writing && generation(self) == generation(begun)
    }

    pub(crate) fn with(self, state: State) -> Self {
        Self(self.0 & !STATE_MASK | state as u32)
    }

    pub(crate) fn stored(self, is_stored: bool) -> Self {
        Self(if is_stored { self.0 | STORED } else { self.0 & !STORED })
    }

    /// The layer of remote memory where the page is stored, if it is.
    pub(crate) fn layer(self) -> usize {
        ((self.0 & LAYER_MASK) >> LAYER_SHIFT) as usize
    }

    /// Stored, in a layer.
    pub(crate) fn stored_in(self, layer: usize) -> Self {
        let layer = u32::try_from(layer).unwrap_or(0) << LAYER_SHIFT & LAYER_MASK;
        Self(self.0 & !LAYER_MASK | layer | STORED)
    }

    /// The word of a page that the evictor has moved to another layer; the generation tells it from one that was always there.
    pub(crate) fn moved_to(self, layer: usize) -> Self {
        Self(self.stored_in(layer).0.wrapping_add(GENERATION))
    }

    /// The word of a page that the evictor begins to send; the generation tells one time from another.
    fn writing(self) -> Self {
        Self(self.with(State::Writing).0.wrapping_add(GENERATION))
    }

    /// The word with which a claim ends that has become `busy` meanwhile.
    fn after(self, busy: Self) -> Self {
        Self(self.0 & !(WAITERS | FORGOTTEN | PIN_MASK) | busy.0 & PIN_MASK)
    }
}

/// One word per page.
#[derive(Debug)]
pub(crate) struct PageTable {
    words: Mapping,
    page_count: u64,
}

/// A page that is [`State::Busy`] by this thread, which must end that by [`PageTable::finish`].
#[derive(Debug)]
#[must_use = "other threads wait for the page"]
pub(crate) struct Claim {
    pub(crate) page: u64,
    /// The word before the claim.
    pub(crate) was: Word,
}

impl PageTable {
    /// A table of pages that are all zero. Its memory is taken when it is used.
    pub(crate) fn new(page_count: usize) -> std::io::Result<Self> {
        let page = crate::kernel::PAGE_BYTES;
        let bytes = page_count.saturating_mul(size_of::<AtomicU32>()).next_multiple_of(page);
        Ok(Self { words: Mapping::reserve(bytes.max(page))?, page_count: page_count as u64 })
    }

    /// The table that a child process has because its parent had `other`; it may be in the middle of changes.
    ///
    /// # Safety
    /// As for [`Mapping::inherited`].
    pub(crate) unsafe fn inherited(other: &Self) -> Self {
        // SAFETY: the caller's promise is the same.
        Self { words: unsafe { Mapping::inherited(&other.words) }, page_count: other.page_count }
    }

    /// Where the words are.
    pub(crate) fn mapping(&self) -> &Mapping {
        &self.words
    }

    /// Sets the word of a page in a child process, where the parent's threads do not exist; `is_local` says whether the
    /// child has the page. Returns whether it counts as local.
    pub(crate) fn settle(&self, page: u64, is_local: bool) -> bool {
        let word = self.word(page);
        let seen = Word(word.load(Ordering::Relaxed) & !(WAITERS | FORGOTTEN | PIN_MASK));
        let next = match seen.state() {
            State::Lost => seen,
            // What it equals is not known: another thread may have been changing it.
            _ if is_local => seen.with(State::Dirty),
            State::Zero => seen,
            // A fault was about to make it local.
            State::Remote | State::Busy if seen.is_stored() => seen.with(State::Remote),
            State::Busy => seen.with(State::Zero),
            // No page leaves while a thread forks.
            State::Remote | State::Clean | State::Dirty | State::Writing => seen.with(State::Lost),
        };
        if next.0 != word.load(Ordering::Relaxed) {
            word.store(next.0, Ordering::Relaxed);
        }
        next.is_local()
    }

    pub(crate) fn page_count(&self) -> u64 {
        self.page_count
    }

    pub(crate) fn load(&self, page: u64) -> Word {
        Word(self.word(page).load(Ordering::Acquire))
    }

    /// Makes a page busy if it still is as it was seen.
    pub(crate) fn claim(&self, page: u64, seen: Word) -> Option<Claim> {
        if seen.state() == State::Busy {
            return None;
        }
        let swapped = self.exchange(page, seen, seen.with(State::Busy));
        swapped.then_some(Claim { page, was: seen })
    }

    /// Ends a claim; returns whether a thread waits that must be woken in the kernel.
    ///
    /// Threads that wait on the word are woken.
    pub(crate) fn finish(&self, claim: Claim, next: Word) -> bool {
        self.finish_if(claim, next, |_| true).unwrap_or_default()
    }

    /// As [`Self::finish`], unless the page's extent was lost during the claim: then the claim goes on. For pages that
    /// count as stored afterwards.
    pub(crate) fn finish_stored(&self, claim: Claim, next: Word) -> Result<bool, Claim> {
        self.finish_if(claim, next, |busy| !busy.is_forgotten())
    }

    fn finish_if(
        &self,
        claim: Claim,
        next: Word,
        may_end: impl Fn(Word) -> bool,
    ) -> Result<bool, Claim> {
        let word = self.word(claim.page);
        let end = |busy| may_end(Word(busy)).then(|| next.after(Word(busy)).0);
        let Ok(before) = word.fetch_update(Ordering::AcqRel, Ordering::Acquire, end) else {
            return Err(claim);
        };
        debug_assert_eq!(Word(before).state(), State::Busy, "page {} was not claimed", claim.page);
        let has_waiters = before & WAITERS != 0;
        if has_waiters {
            memory::wake_all(word);
        }
        Ok(has_waiters)
    }

    /// Marks a busy page whose extent is lost; false if the page is not as it was seen.
    pub(crate) fn forget(&self, page: u64, seen: Word) -> bool {
        debug_assert_eq!(seen.state(), State::Busy, "page {page} is changed by its own thread");
        self.exchange(page, seen, Word(seen.0 | FORGOTTEN))
    }

    /// Ends the claim of a page whose contents were copied and will be sent; returns the word that it has while
    /// nobody takes it over, and whether a thread waits that must be woken in the kernel.
    pub(crate) fn begin_writing(&self, claim: Claim) -> (Word, bool) {
        let word = claim.was.writing();
        let has_waiters = self.finish(claim, word);
        (word, has_waiters)
    }

    /// Announces that somebody waits for the end of a claim; `None` if the word is not `seen` any more.
    pub(crate) fn announce_waiter(&self, page: u64, seen: Word) -> Option<Word> {
        let waited = Word(seen.0 | WAITERS);
        (seen == waited || self.exchange(page, seen, waited)).then_some(waited)
    }

    /// Waits until a claim ends, at most for `limit`; may return early.
    pub(crate) fn wait(&self, page: u64, seen: Word, limit: Duration) {
        if let Some(seen) = self.announce_waiter(page, seen) {
            memory::wait(self.word(page), seen.0, limit);
        }
    }

    /// Keeps a local page local, until [`Self::unpin`]; false if the page is not as it was seen, or has too many pins.
    pub(crate) fn pin(&self, page: u64, seen: Word) -> bool {
        seen.0 & PIN_MASK != PIN_MASK && self.exchange(page, seen, Word(seen.0 + PIN))
    }

    pub(crate) fn unpin(&self, page: u64) {
        let word = self.word(page);
        let before = word.fetch_sub(PIN, Ordering::AcqRel);
        debug_assert!(Word(before).is_pinned(), "page {page} has no pin");
    }

    fn exchange(&self, page: u64, seen: Word, next: Word) -> bool {
        let word = self.word(page);
        word.compare_exchange(seen.0, next.0, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    fn word(&self, page: u64) -> &AtomicU32 {
        let index = usize::try_from(page).unwrap_or(usize::MAX);
        self.words.words().get(index).expect("pages are numbered within the region")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> PageTable {
        PageTable::new(3).expect("there is memory")
    }

    #[test]
    fn a_page_belongs_to_one_thread_at_a_time() {
        let table = table();
        let seen = table.load(1);
        assert_eq!((seen.state(), seen.is_stored(), seen.is_pinned()), (State::Zero, false, false));
        let claim = table.claim(1, seen).expect("nobody has it");
        assert!(table.claim(1, seen).is_none(), "it is not as it was seen");
        assert!(table.claim(1, table.load(1)).is_none(), "it is busy");
        assert!(!table.finish(claim, seen.with(State::Clean).stored(true)));
        let clean = table.load(1);
        assert_eq!((clean.state(), clean.is_stored()), (State::Clean, true));
        assert_eq!(table.load(0).state(), State::Zero);
        assert_eq!(table.load(2).state(), State::Zero);
    }

    #[test]
    fn who_waits_is_woken_and_announced_once() {
        let table = table();
        let claim = table.claim(0, table.load(0)).expect("nobody has it");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let deadline = std::time::Instant::now() + Duration::from_secs(20);
                while table.load(0).state() == State::Busy {
                    assert!(std::time::Instant::now() < deadline, "the claim does not end");
                    table.wait(0, table.load(0), Duration::from_secs(20));
                }
            });
            while table.load(0) == Word(State::Busy as u32) {
                std::thread::yield_now();
            }
            let was = claim.was;
            assert!(table.finish(claim, was.with(State::Dirty)), "a thread waits");
        });
        let claim = table.claim(0, table.load(0)).expect("nobody has it");
        let was = claim.was;
        assert!(!table.finish(claim, was.with(State::Dirty)), "nobody waits any more");
    }

    #[test]
    fn the_second_time_of_writing_is_not_taken_for_the_first() {
        let table = table();
        let write = || {
            let claim = table.claim(0, table.load(0)).expect("nobody has it");
            table.begin_writing(claim).0
        };
        let first = write();
        let claim = table.claim(0, first).expect("the evictor does not hold it");
        table.finish(claim, first.with(State::Dirty));
        let second = write();
        assert_eq!(second.state(), State::Writing);
        assert_ne!(first, second);
        assert!(table.claim(0, first).is_none(), "the first time is over");
        assert!(table.claim(0, second).is_some());
    }

    #[test]
    fn a_pin_that_ends_during_a_claim_is_not_restored() {
        let table = table();
        let claim = table.claim(0, table.load(0)).expect("nobody has it");
        let was = claim.was;
        table.finish(claim, was.with(State::Dirty));
        assert!(table.pin(0, table.load(0)) && table.pin(0, table.load(0)));
        let claim = table.claim(0, table.load(0)).expect("nobody has it");
        table.unpin(0);
        let (writing, _) = table.begin_writing(claim);
        assert!(table.load(0).is_pinned() && table.load(0).is_same_writing(writing));
        let claim = table.claim(0, table.load(0)).expect("nobody has it");
        table.unpin(0);
        let was = claim.was;
        table.finish(claim, was.with(State::Clean));
        assert!(!table.load(0).is_pinned(), "both ended");
    }

    #[test]
    fn a_claim_does_not_end_as_stored_if_the_extent_is_lost_meanwhile() {
        let table = table();
        let claim = table.claim(0, table.load(0)).expect("nobody has it");
        let clean = claim.was.with(State::Clean).stored(true);
        assert!(!table.load(0).is_forgotten());
        assert!(table.forget(0, table.load(0)));
        assert!(table.load(0).is_forgotten());
        assert_eq!(table.announce_waiter(0, table.load(0)), Some(table.load(0)));
        let claim = table.finish_stored(claim, clean).expect_err("it is not stored any more");
        let dirty = claim.was.with(State::Dirty).stored(false);
        assert!(table.finish(claim, dirty), "a thread waits");
        assert_eq!(table.load(0), dirty);
        let claim = table.claim(0, dirty).expect("nobody has it");
        assert!(!table.finish_stored(claim, clean).expect("the mark is gone"));
    }

    #[test]
    fn a_child_takes_what_is_local_from_the_kernel_and_the_rest_from_the_table() {
        let zero = Word::default();
        let stored = zero.stored_in(5);
        let busy = |word: Word| Word(word.with(State::Busy).0 | WAITERS | FORGOTTEN | PIN);
        let cases = [
            // Absent in the child.
            (zero, false, zero),
            (stored.with(State::Remote), false, stored.with(State::Remote)),
            (busy(stored), false, stored.with(State::Remote)),
            (busy(zero), false, zero),
            (stored.with(State::Clean), false, stored.with(State::Lost)),
            (zero.with(State::Dirty), false, zero.with(State::Lost)),
            (stored.with(State::Writing), false, stored.with(State::Lost)),
            (zero.with(State::Lost), false, zero.with(State::Lost)),
            // There, whatever the table says.
            (zero, true, zero.with(State::Dirty)),
            (stored.with(State::Remote), true, stored.with(State::Dirty)),
            (busy(stored), true, stored.with(State::Dirty)),
            (stored.with(State::Clean), true, stored.with(State::Dirty)),
            (stored.with(State::Writing), true, stored.with(State::Dirty)),
            (zero.with(State::Lost), true, zero.with(State::Lost)),
        ];
        for (word, is_there, expected) in cases {
            let table = table();
            table.word(1).store(word.0, Ordering::Relaxed);
            let is_local = table.settle(1, is_there);
            assert_eq!(table.load(1), expected, "{word:?} {is_there}");
            assert_eq!(is_local, expected.state() == State::Dirty, "{word:?} {is_there}");
        }
    }

    #[test]
    fn pins_are_counted_and_survive_claims() {
        let table = table();
        let claim = table.claim(0, table.load(0)).expect("nobody has it");
        let was = claim.was;
        table.finish(claim, was.with(State::Clean));
        for _ in 0..255 {
            assert!(table.pin(0, table.load(0)));
        }
        assert!(!table.pin(0, table.load(0)), "the count is full");
        let claim = table.claim(0, table.load(0)).expect("nobody has it");
        let was = claim.was;
        table.finish(claim, was.with(State::Dirty));
        for left in (0..255).rev() {
            table.unpin(0);
            assert_eq!(table.load(0).is_pinned(), left > 0);
        }
    }
}
