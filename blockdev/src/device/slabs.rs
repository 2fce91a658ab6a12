//! Which slab is where, and which pages of it hold data that is still wanted.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bluebridge::Pointer;
use crossbeam_utils::atomic::AtomicCell;

use super::descriptor::{PAGE_BYTES, Properties};

/// Of the number of users of a slab: it is being freed.
const FREEING: u32 = 1 << 31;
/// How long a writer waits between two looks at a slab that is being freed.
const LOOK: Duration = Duration::from_micros(50);

/// All slabs of a disk. Everything is allocated with it.
#[derive(Debug)]
pub(super) struct Slabs {
    slabs: Box<[Slab]>,
    /// A bit for each page: what it holds is not wanted any more. The words of a slab are neighbours.
    unwanted: Box<[AtomicU64]>,
    words_per_slab: usize,
    size_bytes: u64,
    slab_bytes: u64,
}

#[derive(Debug, Default)]
struct Slab {
    pointer: AtomicCell<Option<Pointer>>,
    /// Whether the table still has the pointer is unknown.
    unsettled: AtomicBool,
    /// Requests that change it, and [`FREEING`].
    users: AtomicU32,
    unwanted_count: AtomicU32,
}

/// The part of a range that lies in one slab.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Piece {
    pub(super) slab: usize,
    /// Where it begins in the slab.
    pub(super) offset: u64,
    pub(super) length: u64,
}

impl Slabs {
    pub(super) fn new(
        properties: &Properties,
        pointers: impl Iterator<Item = Option<Pointer>>,
    ) -> Self {
        let slab = |pointer| Slab { pointer: AtomicCell::new(pointer), ..Slab::default() };
        let slabs: Box<[Slab]> = pointers.map(slab).collect();
        let pages = properties.slab_bytes / PAGE_BYTES as u64;
        let words_per_slab = usize::try_from(pages.div_ceil(64)).unwrap_or(usize::MAX);
        let words = words_per_slab.saturating_mul(slabs.len());
        Self {
            slabs,
            unwanted: (0..words).map(|_| AtomicU64::new(0)).collect(),
            words_per_slab,
            size_bytes: properties.size_bytes,
            slab_bytes: properties.slab_bytes,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.slabs.len()
    }

    pub(super) fn allocated(&self) -> u64 {
        self.slabs.iter().filter(|slab| slab.pointer.load().is_some()).count() as u64
    }

    pub(super) fn pointer(&self, slab: usize) -> Option<Pointer> {
        self.slabs.get(slab)?.pointer.load()
    }

    pub(super) fn set_pointer(&self, slab: usize, pointer: Option<Pointer>) {
        if let Some(slab) = self.slabs.get(slab) {
            slab.pointer.store(pointer);
        }
    }

    /// Whether the table may have no entry for a slab that is allocated.
    pub(super) fn is_unsettled(&self, slab: usize) -> bool {
        self.slabs.get(slab).is_some_and(|slab| slab.unsettled.load(Ordering::Acquire))
    }

    pub(super) fn set_unsettled(&self, slab: usize, unsettled: bool) {
        if let Some(slab) = self.slabs.get(slab) {
            slab.unsettled.store(unsettled, Ordering::Release);
        }
    }

    /// The bytes of a slab: the last one may be shorter.
    pub(super) fn length(&self, slab: usize) -> u64 {
        let start = self.slab_bytes.saturating_mul(slab as u64);
        self.size_bytes.saturating_sub(start).min(self.slab_bytes)
    }

    /// The slabs of a range.
    pub(super) fn pieces(&self, offset: u64, length: u64) -> impl Iterator<Item = Piece> + use<> {
        let slab_bytes = self.slab_bytes;
        let end = offset.saturating_add(length);
        let mut next = offset;
        std::iter::from_fn(move || {
            if next >= end {
                return None;
            }
            let within = next % slab_bytes;
            let length = (slab_bytes - within).min(end - next);
            let slab = usize::try_from(next / slab_bytes).unwrap_or(usize::MAX);
            next += length;
            Some(Piece { slab, offset: within, length })
        })
    }

    /// Keeps a slab from being freed until [`Self::leave`]; false if that took too long.
    pub(super) fn enter(&self, slab: usize, until: Instant) -> bool {
        let Some(slab) = self.slabs.get(slab) else { return false };
        loop {
            let users = slab.users.load(Ordering::Relaxed);
            if users & FREEING == 0 {
                // Behind what earlier users did: their marks are seen.
                let entered = slab.users.compare_exchange_weak(
                    users,
                    users + 1,
                    Ordering::AcqRel,
                    Ordering::Relaxed,
                );
                if entered.is_ok() {
                    return true;
                }
            } else if Instant::now() >= until {
                return false;
            } else {
                std::thread::sleep(LOOK);
            }
        }
    }

    /// Ends what [`Self::enter`] began; returns whether the slab can be freed now: nobody else is in it, it has memory, and
    /// nothing in it is wanted.
    pub(super) fn leave(&self, index: usize) -> bool {
        let Some(slab) = self.slabs.get(index) else { return false };
        slab.users.fetch_sub(1, Ordering::AcqRel) == 1 && self.is_unwanted(index)
    }

    /// Whether a slab has memory, and nothing in it is wanted.
    pub(super) fn is_unwanted(&self, index: usize) -> bool {
        let Some(slab) = self.slabs.get(index) else { return false };
        slab.pointer.load().is_some()
            && u64::from(slab.unwanted_count.load(Ordering::Acquire)) == self.page_count(index)
    }

    /// Begins to free a slab, unless a request changes it or something in it is wanted. Until [`Self::end_freeing`] no
    /// request can change it.
    pub(super) fn begin_freeing(&self, index: usize) -> bool {
        self.begin_freeing_of(index, 0)
    }

    /// [`Self::begin_freeing`] by the only one that has entered the slab, who stays in it.
    pub(super) fn begin_freeing_entered(&self, index: usize) -> bool {
        self.begin_freeing_of(index, 1)
    }

    fn begin_freeing_of(&self, index: usize, users: u32) -> bool {
        let Some(slab) = self.slabs.get(index) else { return false };
        let begun =
            slab.users.compare_exchange(users, FREEING, Ordering::AcqRel, Ordering::Relaxed);
        if begun.is_err() {
            return false;
        }
        let is_unwanted =
            u64::from(slab.unwanted_count.load(Ordering::Acquire)) == self.page_count(index);
        if !is_unwanted {
            slab.users.store(users, Ordering::Release);
        }
        is_unwanted
    }

    /// Ends freeing; a slab that was freed has no marks.
    pub(super) fn end_freeing(&self, index: usize, is_freed: bool) {
        self.end_freeing_of(index, is_freed, 0);
    }

    /// The end of [`Self::begin_freeing_entered`].
    pub(super) fn end_freeing_entered(&self, index: usize, is_freed: bool) {
        self.end_freeing_of(index, is_freed, 1);
    }

    fn end_freeing_of(&self, index: usize, is_freed: bool, users: u32) {
        if is_freed {
            self.mark(index, 0, self.length(index), false);
        }
        if let Some(slab) = self.slabs.get(index) {
            slab.users.store(users, Ordering::Release);
        }
    }

    /// Marks whole pages of a range as not wanted any more. The slab must have been entered. Returns whether nothing in
    /// the slab is wanted.
    pub(super) fn discard(&self, slab: usize, offset: u64, length: u64) -> bool {
        let end = offset + length;
        let first = offset.next_multiple_of(PAGE_BYTES as u64);
        // The disk's last page may be cut off.
        let last =
            if end == self.length(slab) { end.next_multiple_of(PAGE_BYTES as u64) } else { end };
        let last = last - last % PAGE_BYTES as u64;
        if first < last {
            self.mark(slab, first, last - first, true);
        }
        let count = self.slabs.get(slab).map_or(0, |it| it.unwanted_count.load(Ordering::Acquire));
        u64::from(count) == self.page_count(slab)
    }

    /// Marks all pages of a range as wanted. The slab must have been entered, and the data must have arrived: then a
    /// page that holds data is never marked as unwanted, in whatever order requests for it are executed.
    pub(super) fn want(&self, slab: usize, offset: u64, length: u64) {
        let marked = self.slabs.get(slab).map_or(0, |it| it.unwanted_count.load(Ordering::Acquire));
        if marked > 0 {
            self.mark(slab, offset, length, false);
        }
    }

    fn page_count(&self, slab: usize) -> u64 {
        self.length(slab).div_ceil(PAGE_BYTES as u64)
    }

    /// Sets or clears the marks of all pages that a range touches.
    fn mark(&self, slab: usize, offset: u64, length: u64, unwanted: bool) {
        let Some(it) = self.slabs.get(slab) else { return };
        let first = offset / PAGE_BYTES as u64;
        let end = (offset + length).div_ceil(PAGE_BYTES as u64);
        let mut page = first;
        while page < end {
            let (word, bit) = (page / 64, page % 64);
            let count = (64 - bit).min(end - page);
            let mask = if count == 64 { u64::MAX } else { ((1 << count) - 1) << bit };
            let at = usize::try_from(word).unwrap_or(usize::MAX);
            let word = self.unwanted.get((slab * self.words_per_slab).saturating_add(at));
            if let Some(word) = word {
                if unwanted {
                    let before = word.fetch_or(mask, Ordering::AcqRel);
                    it.unwanted_count.fetch_add((mask & !before).count_ones(), Ordering::AcqRel);
                } else {
                    let before = word.fetch_and(!mask, Ordering::AcqRel);
                    it.unwanted_count.fetch_sub((mask & before).count_ones(), Ordering::AcqRel);
                }
            }
            page += count;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::device::Placement;

    const MIB: u64 = 1 << 20;

    fn slabs(size_bytes: u64) -> Slabs {
        let properties = Properties {
            id: 1,
            owner: 1,
            size_bytes,
            slab_bytes: MIB,
            placement: Placement::Linear,
            is_deleted: false,
            has_ended: true,
            lease: Duration::ZERO,
            name: "".into(),
            node: 0,
        };
        let count = usize::try_from(properties.slab_count()).expect("few");
        Slabs::new(&properties, std::iter::repeat_n(None, count))
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(20)
    }

    #[test]
    fn a_slab_is_freed_when_nothing_in_it_is_wanted_and_nobody_writes() {
        let slabs = slabs(2 * MIB);
        assert!(slabs.enter(0, soon()));
        assert!(!slabs.discard(0, 0, MIB - 1), "a byte of the last page is wanted");
        assert!(slabs.discard(0, MIB - 4096, 4096));
        assert!(!slabs.begin_freeing(0), "somebody writes");
        slabs.leave(0);
        assert!(slabs.begin_freeing(0));
        assert!(!slabs.begin_freeing(0), "it is begun");
        assert!(!slabs.enter(0, soon()), "a writer waits");
        slabs.end_freeing(0, true);
        assert!(slabs.enter(0, soon()));
        slabs.leave(0);
        assert!(!slabs.begin_freeing(0), "nothing was discarded since");
    }

    #[test]
    fn the_only_user_of_a_slab_may_free_it() {
        let slabs = slabs(2 * MIB);
        assert!(slabs.enter(0, soon()) && slabs.enter(0, soon()));
        assert!(slabs.discard(0, 0, MIB));
        assert!(!slabs.begin_freeing_entered(0), "there is another user");
        slabs.leave(0);
        assert!(slabs.begin_freeing_entered(0));
        assert!(!slabs.enter(0, soon()), "others wait");
        slabs.end_freeing_entered(0, false);
        assert!(!slabs.begin_freeing(0), "the only user is still there");
        slabs.want(0, 5, 1);
        assert!(!slabs.begin_freeing_entered(0), "a page is wanted");
        slabs.leave(0);
        assert!(!slabs.begin_freeing(0));
        assert!(slabs.enter(0, soon()) && slabs.discard(0, 0, MIB));
        assert!(slabs.begin_freeing_entered(0));
        slabs.end_freeing_entered(0, true);
        assert!(!slabs.begin_freeing_entered(0), "the marks are gone");
        slabs.leave(0);
    }

    #[test]
    fn what_is_written_is_wanted_again() {
        let slabs = slabs(2 * MIB);
        assert!(slabs.enter(1, soon()));
        assert!(slabs.discard(1, 0, MIB));
        slabs.want(1, 70_000, 1);
        slabs.leave(1);
        assert!(!slabs.begin_freeing(1));
        assert!(slabs.enter(1, soon()));
        assert!(!slabs.discard(1, 70_000, 1), "a part of a page");
        assert!(slabs.discard(1, 65_536, 65_536));
        slabs.leave(1);
        assert!(slabs.begin_freeing(1));
        slabs.end_freeing(1, false);
        assert!(slabs.begin_freeing(1), "it was not freed, so it can be tried again");
    }

    #[test]
    fn the_last_slab_is_shorter() {
        let slabs = slabs(MIB + 5000);
        assert_eq!((slabs.len(), slabs.length(0), slabs.length(1)), (2, MIB, 5000));
        assert!(slabs.enter(1, soon()));
        assert!(slabs.discard(1, 0, 5000));
        slabs.leave(1);
        assert!(slabs.begin_freeing(1));
    }

    proptest! {
        #[test]
        fn pieces_are_the_range(offset in 0..6 * MIB, length in 0..4 * MIB) {
            let slabs = slabs(10 * MIB);
            let mut next = offset;
            for piece in slabs.pieces(offset, length) {
                prop_assert_eq!(piece.slab as u64 * MIB + piece.offset, next);
                prop_assert!(piece.length > 0 && piece.offset + piece.length <= MIB);
                next += piece.length;
            }
            prop_assert_eq!(next, offset + length);
        }

        /// The count of marks is that of a set of pages.
        #[test]
        fn marks_are_counted(steps in proptest::collection::vec((any::<bool>(), 0..MIB, 1..MIB), 1..40)) {
            let slabs = slabs(MIB);
            let mut unwanted = std::collections::BTreeSet::new();
            prop_assert!(slabs.enter(0, soon()));
            for (discards, offset, length) in steps {
                let length = length.min(MIB - offset);
                if discards {
                    let all = slabs.discard(0, offset, length);
                    unwanted.extend(offset.div_ceil(4096)..(offset + length) / 4096);
                    prop_assert_eq!(all, unwanted.len() == 256);
                } else {
                    slabs.want(0, offset, length);
                    for page in offset / 4096..(offset + length).div_ceil(4096) {
                        unwanted.remove(&page);
                    }
                }
                let count = slabs.slabs[0].unwanted_count.load(Ordering::Relaxed);
                prop_assert_eq!(count as usize, unwanted.len());
            }
        }
    }
}
