//! The replacement together with the prefetcher: the cost of faults and of pages beside them.

use std::collections::{HashSet, VecDeque};

use super::{
    super::{Arrival, Replacement},
    traces::quicksort,
};
use crate::prefetch::{Prefetcher, Window};

const CAPACITY: usize = 4096;

/// Which page leaves.
trait Policy {
    fn arrives(&mut self, page: u64, arrival: Arrival);
    fn leaves(&mut self) -> Option<u64>;
}

impl Policy for Replacement {
    fn arrives(&mut self, page: u64, arrival: Arrival) {
        self.insert(page, arrival);
    }

    fn leaves(&mut self) -> Option<u64> {
        self.victim()
    }
}

/// FIFO.
impl Policy for VecDeque<u64> {
    fn arrives(&mut self, page: u64, _: Arrival) {
        self.push_back(page);
    }

    fn leaves(&mut self) -> Option<u64> {
        self.pop_front()
    }
}

/// The time of all loads in us: 17 for a fault, 2.2 for a page beside it.
fn time(pages: impl Iterator<Item = u64>, policy: &mut dyn Policy) -> f64 {
    let mut prefetcher = Prefetcher::new(32);
    let mut local = HashSet::new();
    let mut time = 0.0;
    for page in pages {
        if local.contains(&page) {
            continue;
        }
        let Window { first, stride, count } = prefetcher.fault(1, page).window;
        let beside = (0..i64::from(count)).filter_map(|n| first.checked_add_signed(n * stride));
        let beside = beside.map(|page| (page, Arrival::Prefetch, 2.2));
        for (page, arrival, cost) in [(page, Arrival::Demand, 17.0)].into_iter().chain(beside) {
            if local.contains(&page) {
                continue;
            }
            if local.len() >= CAPACITY {
                assert!(local.remove(&policy.leaves().expect("full")));
            }
            policy.arrives(page, arrival);
            local.insert(page);
            time += cost;
        }
    }
    time
}

/// The time compared with FIFO.
fn ratio(pages: impl Iterator<Item = u64> + Clone) -> f64 {
    let ours = time(pages.clone(), &mut Replacement::new(CAPACITY));
    ours / time(pages, &mut VecDeque::new())
}

#[test]
fn time_with_prefetching_compared_with_fifo() {
    let capacity = CAPACITY as u64;
    let mut sort = Vec::new();
    quicksort(0, 4 * capacity, &mut sort);
    let sort = ratio(sort.iter().map(|access| access.page));
    let large_loop = ratio((0..60 * capacity).map(|n| n % (2 * capacity)));
    let small_loop = ratio((0..60 * capacity).map(|n| n % (capacity * 12 / 10)));
    println!("time with prefetching: quicksort {sort:.2}, loops {large_loop:.2}, {small_loop:.2}");
    assert!(sort < 1.1, "{sort}");
    assert!(large_loop < 0.8 && small_loop < 0.8, "{large_loop}, {small_loop}");
}
