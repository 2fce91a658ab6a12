//! What this server gives to others (`docs/migration.md`): the migrations that are allowed, and the marks
//! of the lines that are the taker's.

use core::ops::Range;

use bluebridge_wire::{Fence, Space, address::LINE_PAGES, line::FENCES_MAX};

use super::{ranges::block_pages, sessions::RequesterId};
use crate::store::{Allowance, SHARD_PAGES_MAX};

const LINE: u64 = LINE_PAGES as u64;

/// Marks in a word.
const WORD_LINES: u64 = u64::BITS as u64;

/// Why the giver does not allow a migration.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AllowError {
    /// The range is empty, does not consist of whole lines, or is longer than a shard.
    #[error("a range consists of one or more whole lines of 8 pages, all of one shard")]
    Unaligned,
    /// Pages of the range are of another migration, or have moved away.
    #[error("the range overlaps one of another migration, or pages that have moved away")]
    Overlap,
    /// The table of migrations is full; close some first.
    #[error("the table of migrations is full; close some first")]
    Full,
    /// The migration was withdrawn or closed here: the order is late.
    #[error("the migration was withdrawn or closed here, so this order is too late")]
    Late,
    /// A migration with this id is allowed with other terms; the controller is at fault.
    #[error("a migration with this id is allowed with other terms")]
    Contradiction,
    /// The space is not served here.
    #[error("the space is not served here")]
    Space,
    /// The migration is not known here, or was closed.
    #[error("the migration is not known here")]
    Unknown,
    /// The migration must be withdrawn first.
    #[error("the migration must be withdrawn before it is closed")]
    Open,
    /// Replies may contain bytes of its lines; send them first.
    #[error("replies must be sent before the migration is closed")]
    Replies,
}

/// One migration at its giver.
#[derive(Debug)]
pub(super) struct Giving {
    pub(super) allowance: Allowance,
    /// Further lines may be taken.
    pub(super) is_open: bool,
    /// One bit per line of the range, set if it is the taker's.
    marks: Box<[u64]>,
}

impl Giving {
    /// Whether the pages of a line are the taker's; not those outside of the range.
    pub(super) fn is_marked(&self, line: u64) -> bool {
        let (word, bit) = self.place(line);
        self.marks.get(word).is_some_and(|marks| marks & bit != 0)
    }

    pub(super) fn mark(&mut self, line: u64) {
        let (word, bit) = self.place(line);
        if let Some(marks) = self.marks.get_mut(word) {
            *marks |= bit;
        }
    }

    /// Whether a request names this migration, and comes from its taker.
    pub(super) fn is_with(&self, requester: &RequesterId, range_epoch: u32) -> bool {
        let Allowance { space, taker, taker_incarnation, range_epoch: epoch, .. } = self.allowance;
        let named = (requester.space, requester.node, requester.incarnation, range_epoch);
        named == (space, taker, taker_incarnation, epoch)
    }

    /// The rows of neighbouring pages that are the taker's (`is_marked`), or that are not.
    pub(super) fn rows(&self, is_marked: bool) -> impl Iterator<Item = Range<u64>> {
        let Range { start, end } = self.allowance.pages;
        let mut next = start / LINE;
        let last = end / LINE;
        core::iter::from_fn(move || {
            let first = (next..last).find(|line| self.is_marked(*line) == is_marked)?;
            next = (first..last).find(|line| self.is_marked(*line) != is_marked).unwrap_or(last);
            Some(first * LINE..next * LINE)
        })
    }

    #[allow(clippy::cast_possible_truncation, reason = "a shard has fewer than 2^28 lines")]
    fn place(&self, line: u64) -> (usize, u64) {
        let number = line.wrapping_sub(self.allowance.pages.start / LINE);
        ((number / WORD_LINES) as usize, 1 << (number % WORD_LINES))
    }
}

/// All migrations that this server gives to, and what their takers must know.
pub(super) struct Givings {
    /// In the order of their pages.
    all: Vec<Giving>,
    limit: usize,
    /// The highest id of a migration that was ever allowed.
    last_migration: u64,
    /// Of the spaces in which there is a migration.
    journals: Vec<FenceJournal>,
    /// The number before the first fence. It is another one in each process, so that a taker that knows fences of an
    /// earlier process reads all.
    first_fence: u32,
}

impl Givings {
    pub(super) fn new(limit: u16) -> Self {
        let limit = usize::from(limit);
        Self {
            all: Vec::with_capacity(limit),
            limit,
            last_migration: 0,
            journals: Vec::with_capacity(limit),
            first_fence: 0,
        }
    }

    /// Goes on where an earlier process ended: its last migration, and the number of this process.
    pub(super) const fn resume(&mut self, last_migration: u64, process: u8) {
        self.last_migration = last_migration;
        self.first_fence = (process as u32) << 24;
    }

    /// Takes over a migration that an earlier process allowed.
    pub(super) fn restore(
        &mut self,
        allowance: &Allowance,
        is_open: bool,
        given_lines: &[u64],
        fences: impl Iterator<Item = Fence>,
    ) {
        self.insert(allowance, fences);
        if let Some(giving) = self.find_mut(allowance.migration) {
            giving.is_open = is_open;
            let lines = given_lines.iter().map(|page| page / LINE);
            let range = allowance.pages.start / LINE..allowance.pages.end / LINE;
            lines.filter(|line| range.contains(line)).for_each(|line| giving.mark(line));
        }
    }

    fn insert(&mut self, allowance: &Allowance, fences: impl Iterator<Item = Fence>) {
        let Range { start, end } = allowance.pages;
        let index = self.all.partition_point(|other| other.allowance.pages.end <= start);
        let words = ((end - start) / LINE).div_ceil(WORD_LINES);
        let marks = vec![0; usize::try_from(words).unwrap_or(0)].into_boxed_slice();
        self.all.insert(index, Giving { allowance: allowance.clone(), is_open: true, marks });
        self.last_migration = self.last_migration.max(allowance.migration);
        if !self.journals.iter().any(|journal| journal.space == allowance.space) {
            let journal = FenceJournal::new(allowance.space, self.first_fence, fences);
            self.journals.push(journal);
        }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Allows a migration; returns whether it was not allowed before. `fences` are those of its space. `keep` keeps
    /// it for the next process, and returns false if there is no room.
    ///
    /// # Errors
    /// [`AllowError`]; nothing changed.
    pub(super) fn allow(
        &mut self,
        allowance: &Allowance,
        fences: impl Iterator<Item = Fence>,
        keep: impl FnOnce() -> bool,
    ) -> Result<bool, AllowError> {
        if let Some(known) = self.find(allowance.migration) {
            return match (known.allowance == *allowance, known.is_open) {
                (false, _) => Err(AllowError::Contradiction),
                (true, false) => Err(AllowError::Late),
                (true, true) => Ok(false),
            };
        }
        if allowance.migration <= self.last_migration {
            return Err(AllowError::Late);
        }
        let Range { start, end } = allowance.pages;
        let is_whole = start.is_multiple_of(LINE) && end.is_multiple_of(LINE);
        if start >= end || !is_whole || end - start > SHARD_PAGES_MAX {
            return Err(AllowError::Unaligned);
        }
        if self.all.len() == self.limit {
            return Err(AllowError::Full);
        }
        let index = self.all.partition_point(|other| other.allowance.pages.end <= start);
        if self.all.get(index).is_some_and(|other| other.allowance.pages.start < end) {
            return Err(AllowError::Overlap);
        }
        if !keep() {
            return Err(AllowError::Full);
        }
        self.insert(allowance, fences);
        Ok(true)
    }

    pub(super) fn find(&self, migration: u64) -> Option<&Giving> {
        self.all.iter().find(|giving| giving.allowance.migration == migration)
    }

    pub(super) fn find_mut(&mut self, migration: u64) -> Option<&mut Giving> {
        self.all.iter_mut().find(|giving| giving.allowance.migration == migration)
    }

    /// Removes a migration with its marks.
    pub(super) fn remove(&mut self, migration: u64) {
        let Self { all, journals, .. } = self;
        all.retain(|giving| giving.allowance.migration != migration);
        journals.retain(|journal| all.iter().any(|of| of.allowance.space == journal.space));
    }

    /// The migration of a page of the store, if the page is its taker's.
    pub(super) fn marked(&self, page: u64) -> Option<&Giving> {
        let giving = self.of_page(page)?;
        giving.is_marked(page / LINE).then_some(giving)
    }

    /// Whether a page of the store is in the range of a migration.
    pub(super) fn allows(&self, page: u64) -> bool {
        self.of_page(page).is_some()
    }

    /// The first page of the range that is its taker's.
    pub(super) fn marked_in(&self, pages: Range<u64>) -> Option<u64> {
        let first = self.all.partition_point(|other| other.allowance.pages.end <= pages.start);
        let overlapping =
            self.all[first..].iter().take_while(|other| other.allowance.pages.start < pages.end);
        overlapping.flat_map(|giving| giving.rows(true)).find_map(|row| {
            let page = row.start.max(pages.start);
            (page < row.end.min(pages.end)).then_some(page)
        })
    }

    /// How large the block around a page that is its taker's is, in pages: a power of two, aligned by
    /// the home's page numbers, all of it the taker's. `home_page` is the page's number there, and `row` the pages
    /// around it that are one after the other here; `None` if all are.
    pub(super) fn block_pages(&self, page: u64, home_page: u64, row: Option<Range<u64>>) -> u32 {
        let Some(giving) = self.of_page(page) else { return 0 };
        let is_together = |block: &Range<u64>| {
            row.as_ref().is_none_or(|row| row.start <= block.start && block.end <= row.end)
        };
        block_pages(home_page, |block| {
            if !is_together(&block) {
                return false;
            }
            let start = page.checked_sub(home_page - block.start);
            start.is_some_and(|start| {
                let end = start + (block.end - block.start);
                (start / LINE..end / LINE).all(|line| giving.is_marked(line))
            })
        })
    }

    /// A node has a higher incarnation now.
    pub(super) fn note_fence(&mut self, of: &RequesterId) {
        let fence = Fence { node: of.node, incarnation: of.incarnation };
        if let Some(journal) = self.journals.iter_mut().find(|journal| journal.space == of.space) {
            journal.note(fence);
        }
    }

    /// The fences of a space since a number, as many as a reply holds; see [`FenceJournal::since`].
    pub(super) fn fences_since(&self, space: Space, known: u32) -> (&[Fence], u32, u32) {
        let journal = self.journals.iter().find(|journal| journal.space == space);
        journal.map_or((&[], known, known), |journal| journal.since(known))
    }

    fn of_page(&self, page: u64) -> Option<&Giving> {
        let index = self.all.partition_point(|other| other.allowance.pages.end <= page);
        self.all.get(index).filter(|giving| giving.allowance.pages.contains(&page))
    }
}

/// The incarnations that the giver has seen in a space, in the order in which it saw them. A taker reads it
/// to the end before it serves a line: otherwise an old incarnation that was refused here could go on there.
struct FenceJournal {
    space: Space,
    entries: Vec<Fence>,
    /// The number of the last entry; 0 is none. Fences of the same node that are outdated are removed,
    /// and the others keep or raise their numbers, so a reader never misses one.
    last: u32,
    /// Outdated fences are removed when there are more entries than this.
    room: usize,
}

/// Entries that may be outdated, besides as many as there are nodes.
const OUTDATED_MAX: usize = 64;

impl FenceJournal {
    fn new(space: Space, last: u32, fences: impl Iterator<Item = Fence>) -> Self {
        let mut journal = Self { space, entries: Vec::new(), last, room: usize::MAX };
        for fence in fences {
            journal.note(fence);
        }
        journal.room = 2 * journal.entries.len() + OUTDATED_MAX;
        journal
    }

    fn note(&mut self, fence: Fence) {
        if self.entries.len() >= self.room {
            self.remove_outdated();
        }
        self.entries.push(fence);
        self.last = self.last.checked_add(1).unwrap_or(1);
    }

    /// Keeps the last entry of each node.
    fn remove_outdated(&mut self) {
        let mut is_seen = vec![false; usize::from(u16::MAX) + 1];
        self.entries.reverse();
        self.entries
            .retain(|fence| !core::mem::replace(&mut is_seen[usize::from(fence.node.0)], true));
        self.entries.reverse();
        self.room = 2 * self.entries.len() + OUTDATED_MAX;
    }

    /// The entries after the one with number `known` (0: all), as many as a reply holds, the number of the
    /// last of these, and the number of the journal's last one.
    #[allow(clippy::cast_possible_truncation, reason = "an entry less has a number less")]
    fn since(&self, known: u32) -> (&[Fence], u32, u32) {
        let behind = if known == 0 { usize::MAX } else { self.last.wrapping_sub(known) as usize };
        let news = &self.entries[self.entries.len().saturating_sub(behind)..];
        let part = &news[..news.len().min(FENCES_MAX)];
        (part, self.last.wrapping_sub((news.len() - part.len()) as u32), self.last)
    }
}
