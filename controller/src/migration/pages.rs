//! Pages with a value, as rows of neighbouring pages.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Maps pages to values. Rows do not overlap, and neighbouring rows have different values.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(transparent)]
pub struct PageMap<V> {
    rows: Vec<(Range<u64>, V)>,
}

impl<V> Default for PageMap<V> {
    fn default() -> Self {
        Self { rows: Vec::new() }
    }
}

impl<V: Clone + Eq> PageMap<V> {
    /// Whether it has no page.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The number of pages.
    #[must_use]
    pub fn page_count(&self) -> u64 {
        self.rows.iter().map(|(pages, _)| pages.end - pages.start).sum()
    }

    /// Every row, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&Range<u64>, &V)> {
        self.rows.iter().map(|(pages, value)| (pages, value))
    }

    /// The rows in a range, without what they have outside of it.
    pub fn within(&self, pages: &Range<u64>) -> impl Iterator<Item = (Range<u64>, &V)> {
        let Range { start, end } = *pages;
        let first = self.rows.partition_point(|(row, _)| row.end <= start);
        let from_first = self.rows.iter().skip(first);
        from_first
            .take_while(move |(row, _)| row.start < end)
            .map(move |(row, value)| (row.start.max(start)..row.end.min(end), value))
    }

    /// The pages in a range that have no value.
    #[must_use]
    pub fn gaps(&self, pages: &Range<u64>) -> Vec<Range<u64>> {
        let (mut gaps, mut next) = (Vec::new(), pages.start);
        for (row, _) in self.within(pages) {
            if next < row.start {
                gaps.push(next..row.start);
            }
            next = row.end;
        }
        if next < pages.end {
            gaps.push(next..pages.end);
        }
        gaps
    }

    /// Gives pages a value instead of the ones that they had.
    pub fn insert(&mut self, pages: Range<u64>, value: V) {
        if pages.is_empty() {
            return;
        }
        let within = self.cut(&pages);
        let first = within.start;
        self.rows.splice(within, [(pages, value)]);
        self.join(first + 1);
        self.join(first);
    }

    /// Takes the values of pages away.
    pub fn remove(&mut self, pages: &Range<u64>) {
        if !pages.is_empty() {
            let within = self.cut(pages);
            self.rows.drain(within);
        }
    }

    /// Cuts rows at the ends of a range, and returns which rows are in it.
    fn cut(&mut self, pages: &Range<u64>) -> Range<usize> {
        for at in [pages.start, pages.end] {
            let index = self.rows.partition_point(|(row, _)| row.end <= at);
            if let Some((row, value)) = self.rows.get_mut(index).filter(|(row, _)| row.start < at) {
                let rest = (at..row.end, value.clone());
                row.end = at;
                self.rows.insert(index + 1, rest);
            }
        }
        let first = self.rows.partition_point(|(row, _)| row.end <= pages.start);
        let last = self.rows.partition_point(|(row, _)| row.start < pages.end);
        first..last.max(first)
    }

    /// Joins the row with this index to the one before, if they are one row.
    fn join(&mut self, index: usize) {
        let Some((before, [(pages, value), ..])) = self.rows.split_at_mut_checked(index) else {
            return;
        };
        if let Some((row, same)) = before.last_mut()
            && row.end == pages.start
            && same == value
        {
            row.end = pages.end;
            self.rows.remove(index);
        }
    }
}

impl<V: Clone + Eq> FromIterator<(Range<u64>, V)> for PageMap<V> {
    fn from_iter<I: IntoIterator<Item = (Range<u64>, V)>>(rows: I) -> Self {
        let mut map = Self::default();
        rows.into_iter().for_each(|(pages, value)| map.insert(pages, value));
        map
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_an_array_of_values(
            steps in prop::collection::vec((0..40_u64, 0..20_u64, prop::option::of(0..3_u8)), 1..40),
            asked in (0..40_u64, 0..24_u64),
        ) {
            let mut map = PageMap::default();
            let mut model = [None; 64];
            for (start, length, value) in steps {
                let pages = start..start + length;
                for page in pages.clone() {
                    model[usize::try_from(page).unwrap()] = value;
                }
                match value {
                    Some(value) => map.insert(pages, value),
                    None => map.remove(&pages),
                }
            }
            let mut found = [None; 64];
            let mut last: Option<(u64, u8)> = None;
            for (pages, value) in map.iter() {
                prop_assert!(pages.start < pages.end);
                prop_assert!(last.is_none_or(|(end, before)| end < pages.start
                    || end == pages.start && before != *value));
                last = Some((pages.end, *value));
                for page in pages.clone() {
                    found[usize::try_from(page).unwrap()] = Some(*value);
                }
            }
            prop_assert_eq!(found, model);
            let asked = asked.0..asked.0 + asked.1;
            let mut parts: Vec<_> = map.within(&asked).map(|(pages, value)| (pages, Some(*value))).collect();
            parts.extend(map.gaps(&asked).into_iter().map(|pages| (pages, None)));
            parts.sort_by_key(|(pages, _)| pages.start);
            let pages: Vec<_> = parts.iter().flat_map(|(pages, value)| pages.clone().map(|page| (page, *value))).collect();
            let expected: Vec<_> = asked.map(|page| (page, model[usize::try_from(page).unwrap()])).collect();
            prop_assert_eq!(pages, expected);
        }
    }
}
