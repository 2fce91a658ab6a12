//! Which pages are free: a bitmap, and over it a tree of the longest free extents.
//!
//! It allocates exactly the requested number of pages, without the rounding to powers of two of a
//! buddy allocator, and freed neighbours are merged at once. Both operations take O(log n), plus
//! one step per 64 pages of the extent. The lowest extent that fits is taken, so equal histories
//! have equal results. It stores nothing in the pages, and less than a bit and a half per page
//! beside them.

use core::ops::Range;

/// Pages per word of the bitmap.
const WORD_PAGES: u32 = u64::BITS;

/// The longest extents of a part of the bitmap, in pages.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct Longest {
    /// Free pages at the part's beginning.
    prefix: u32,
    /// Free pages at its end.
    suffix: u32,
    /// Free pages in a row anywhere in it.
    most: u32,
}

impl Longest {
    fn of_word(word: u64) -> Self {
        Self { prefix: word.trailing_ones(), suffix: word.leading_ones(), most: longest_run(word) }
    }

    fn of_halves(low: Self, high: Self, half_pages: u32) -> Self {
        let whole = |half: Self| half.most == half_pages;
        Self {
            prefix: if whole(low) { half_pages + high.prefix } else { low.prefix },
            suffix: if whole(high) { half_pages + low.suffix } else { high.suffix },
            most: low.most.max(high.most).max(low.suffix + high.prefix),
        }
    }
}

/// The free pages of an arena.
#[derive(Clone, Debug)]
pub(crate) struct ExtentTree {
    /// One bit per page, set if it is free.
    words: Vec<u64>,
    /// A complete binary tree: node 1 is the root, `2n` and `2n + 1` are the halves of `n`, and
    /// the last half of the nodes are the words.
    nodes: Vec<Longest>,
    leaf_count: usize,
    free_pages: u32,
}

impl ExtentTree {
    /// `pages` free pages; at most 2^31.
    pub(crate) fn new(pages: u32) -> Self {
        let word_count = index(pages.div_ceil(WORD_PAGES)).max(1);
        let leaf_count = word_count.next_power_of_two();
        let mut tree = Self {
            words: vec![0; word_count],
            nodes: vec![Longest::default(); 2 * leaf_count],
            leaf_count,
            free_pages: 0,
        };
        tree.release(0, pages);
        tree
    }

    /// Free pages.
    pub(crate) const fn free_pages(&self) -> u32 {
        self.free_pages
    }

    /// Takes the lowest extent of `pages` pages, 1 or more; `None` if there is none.
    pub(crate) fn take(&mut self, pages: u32) -> Option<u32> {
        let start = self.find(pages)?;
        self.mark(start, pages, false);
        self.free_pages -= pages;
        Some(start)
    }

    /// Frees pages that are taken.
    pub(crate) fn release(&mut self, start: u32, pages: u32) {
        if pages > 0 {
            self.mark(start, pages, true);
            self.free_pages += pages;
        }
    }

    /// Takes the free pages of a range, and returns how many they were.
    pub(crate) fn take_free(&mut self, range: Range<u32>) -> u32 {
        let mut taken = 0;
        let mut next = range.start;
        while let Some(start) = (next..range.end).find(|page| self.is_free(*page)) {
            next = (start..range.end).find(|page| !self.is_free(*page)).unwrap_or(range.end);
            self.mark(start, next - start, false);
            taken += next - start;
        }
        self.free_pages -= taken;
        taken
    }

    /// Whether all pages of a range are free.
    pub(crate) fn are_free(&self, mut range: Range<u32>) -> bool {
        range.all(|page| self.is_free(page))
    }

    /// Pages of the longest free extent.
    pub(crate) fn longest(&self) -> u32 {
        self.nodes[1].most
    }

    fn is_free(&self, page: u32) -> bool {
        self.words[index(page / WORD_PAGES)] & (1 << (page % WORD_PAGES)) != 0
    }

    fn find(&self, pages: u32) -> Option<u32> {
        if pages == 0 || self.nodes[1].most < pages {
            return None;
        }
        let (mut node, mut start) = (1, 0);
        let mut half_pages = self.leaf_pages() / 2;
        while node < self.leaf_count {
            let (low, high) = (self.nodes[2 * node], self.nodes[2 * node + 1]);
            if low.most >= pages {
                node *= 2;
            } else if low.suffix + high.prefix >= pages {
                return Some(start + half_pages - low.suffix);
            } else {
                node = 2 * node + 1;
                start += half_pages;
            }
            half_pages /= 2;
        }
        let word = self.words.get(node - self.leaf_count).copied()?;
        Some(start + runs_of(word, pages).trailing_zeros())
    }

    /// Pages that the tree spans, including those beyond the arena, which are never free.
    fn leaf_pages(&self) -> u32 {
        u32::try_from(self.leaf_count).unwrap_or(u32::MAX).saturating_mul(WORD_PAGES)
    }

    fn mark(&mut self, start: u32, pages: u32, is_free: bool) {
        let end = start + pages;
        let (first, last) = (start / WORD_PAGES, (end - 1) / WORD_PAGES);
        for number in first..=last {
            let from = start.max(number * WORD_PAGES) - number * WORD_PAGES;
            let to = end.min((number + 1) * WORD_PAGES) - number * WORD_PAGES;
            let mask = (u64::MAX >> (WORD_PAGES - (to - from))) << from;
            let word = &mut self.words[index(number)];
            debug_assert_eq!(*word & mask, if is_free { 0 } else { mask }, "pages change state");
            *word ^= mask;
            self.nodes[self.leaf_count + index(number)] = Longest::of_word(*word);
        }
        self.renew_above(self.leaf_count + index(first), self.leaf_count + index(last));
    }

    /// Recomputes the nodes above a row of neighbours.
    fn renew_above(&mut self, mut first: usize, mut last: usize) {
        let mut half_pages = WORD_PAGES;
        while first > 1 {
            (first, last) = (first / 2, last / 2);
            for node in first..=last {
                let (low, high) = (self.nodes[2 * node], self.nodes[2 * node + 1]);
                self.nodes[node] = Longest::of_halves(low, high, half_pages);
            }
            half_pages = half_pages.saturating_mul(2);
        }
    }
}

const fn index(number: u32) -> usize {
    number as usize
}

/// The positions at which `length` (1 to 64) ones in a row begin.
const fn runs_of(word: u64, length: u32) -> u64 {
    let (mut runs, mut have) = (word, 1);
    while have < length {
        let step = if have < length - have { have } else { length - have };
        runs &= runs >> step;
        have += step;
    }
    runs
}

/// The most ones in a row.
fn longest_run(word: u64) -> u32 {
    if word == 0 {
        return 0;
    }
    // Runs of 1, 2, 4, ... 32; then the length is composed from the largest down.
    let mut powers = [word; 6];
    for step in 1..6 {
        powers[step] = powers[step - 1] & (powers[step - 1] >> (1 << (step - 1)));
    }
    let (mut runs, mut length) = (u64::MAX, 0);
    for step in (0..6).rev() {
        let longer = runs & (powers[step].checked_shr(length).unwrap_or(0));
        if longer != 0 {
            (runs, length) = (longer, length + (1 << step));
        }
    }
    if length == 63 && word == u64::MAX { 64 } else { length }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn longest_run_agrees_with_counting() {
        let mut word = 0x9e37_79b9_7f4a_7c15_u64;
        for round in 0..10_000 {
            word = word.wrapping_mul(0xbf58_476d_1ce4_e5b9).rotate_left(round % 64);
            let thick = word | word.rotate_left(1) | word.rotate_left(7);
            for word in [word, thick, !thick, u64::MAX << (round % 64), u64::MAX >> (round % 64)] {
                let (mut counted, mut rest) = (0, word);
                while rest != 0 {
                    rest &= rest >> 1;
                    counted += 1;
                }
                assert_eq!(longest_run(word), counted, "{word:#x}");
            }
        }
        assert_eq!((longest_run(0), longest_run(u64::MAX)), (0, 64));
    }

    /// The first `pages` free places in a row of a plain list.
    fn first_fit(free: &[bool], pages: usize) -> Option<usize> {
        let mut run = 0;
        for (place, &is_free) in free.iter().enumerate() {
            run = if is_free { run + 1 } else { 0 };
            if run == pages {
                return Some(place + 1 - pages);
            }
        }
        None
    }

    fn against_a_list(capacity: u32, steps: &[(bool, u32)]) -> Result<u32, TestCaseError> {
        let mut tree = ExtentTree::new(capacity);
        let mut free = vec![true; capacity as usize];
        let mut taken: Vec<(u32, u32)> = Vec::new();
        let mut refused = 0;
        for &(takes, number) in steps {
            if takes || taken.is_empty() {
                let pages = 1 + number % 200;
                let expected = first_fit(&free, pages as usize);
                let got = tree.take(pages);
                prop_assert_eq!(got.map(index), expected);
                if let Some(start) = got {
                    free[index(start)..index(start + pages)].fill(false);
                    taken.push((start, pages));
                } else {
                    refused += 1;
                }
            } else {
                let (start, pages) = taken.swap_remove(index(number) % taken.len());
                tree.release(start, pages);
                free[index(start)..index(start + pages)].fill(true);
            }
            let count = free.iter().filter(|&&is_free| is_free).count();
            prop_assert_eq!(index(tree.free_pages()), count);
        }
        for (start, pages) in taken {
            tree.release(start, pages);
        }
        prop_assert_eq!(tree.take(capacity), Some(0));
        Ok(refused)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        /// 200 histories of 500 steps: 10^5 operations.
        #[test]
        fn agrees_with_a_list_of_pages(
            capacity in 1_u32..3000,
            steps in prop::collection::vec((prop::bool::weighted(0.6), 0_u32..100_000), 500),
        ) {
            against_a_list(capacity, &steps)?;
        }
    }

    #[test]
    fn a_full_tree_refuses_and_recovers() {
        let steps: Vec<_> = (0..2000).map(|step| (step % 3 != 2, step * 7919)).collect();
        let refused = against_a_list(1000, &steps).unwrap();
        assert!(refused > 100, "only {refused} refusals");
    }
}
