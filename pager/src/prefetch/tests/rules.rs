//! Single rules, and any faults.

use proptest::prelude::*;
use rand::{Rng as _, SeedableRng as _, rngs::SmallRng};

use super::super::{Advice, PrefetchCounters, Prefetcher, THREADS_MAX, Window};

const NOTHING: Window = Window { first: 0, stride: 0, count: 0 };

fn window(first: u64, stride: i64, count: u32) -> Window {
    Window { first, stride, count }
}

#[test]
fn a_window_doubles_when_it_is_confirmed_and_halves_when_its_pages_are_not_there() {
    let mut prefetcher = Prefetcher::new(16);
    assert_eq!(prefetcher.fault(1, 100).window, NOTHING);
    assert_eq!(prefetcher.fault(1, 101).window, window(102, 1, 2));
    assert_eq!(prefetcher.fault(1, 104).window, window(105, 1, 4));
    assert_eq!(prefetcher.fault(1, 109).window, window(110, 1, 8));
    assert_eq!(prefetcher.fault(1, 109).window, NOTHING, "the same fault again");
    assert_eq!(prefetcher.fault(1, 118).window, window(119, 1, 16));
    assert_eq!(prefetcher.fault(1, 135).window, window(136, 1, 16), "the limit");
    assert_eq!(prefetcher.fault(1, 140).window, window(141, 1, 8));
    let counters = prefetcher.counters();
    let expected = PrefetchCounters {
        pages_requested: 2 + 4 + 8 + 16 + 16 + 8,
        pages_confirmed: 2 + 4 + 8 + 16 + 4,
        windows_grown: 3,
        windows_shrunk: 1,
    };
    assert_eq!(counters, expected);
}

/// What the next fault asks for is known in advance if it confirms the window.
#[test]
fn the_next_window_is_expected_where_the_stream_will_fault() {
    for stride in [1_i64, -1, 7, -100] {
        let page = |number: i64| 100_000_u64.saturating_add_signed(number * stride);
        let mut prefetcher = Prefetcher::new(8);
        // Neighbours are a stream at once, others with the third fault; then the first window has 2 pages.
        let begin = if stride.abs() == 1 { 2 } else { 3 };
        for number in 0..begin {
            assert_eq!(prefetcher.fault(1, page(number)).next, NOTHING, "nothing was confirmed");
        }
        let mut expected = NOTHING;
        let mut number = begin + 2;
        for _ in 0..6 {
            let Advice { window, next } = prefetcher.fault(1, page(number));
            if expected != NOTHING {
                assert_eq!(
                    expected,
                    Window { first: page(number), count: window.count + 1, ..window }
                );
            }
            number += i64::from(window.count) + 1;
            expected = next;
            assert_eq!(expected.first, page(number), "{window:?} {next:?}");
            assert!(next.count <= 9);
        }
        // Inside of the window: what follows is unknown.
        assert_eq!(prefetcher.fault(1, page(number - 2)).next, NOTHING);
    }
    let mut prefetcher = Prefetcher::new(0);
    assert!((0..100).all(|page| prefetcher.fault(1, page).next == NOTHING), "the limit is 0");
}

#[test]
fn a_window_contains_its_pages_and_no_others() {
    for (window, pages) in [
        (window(10, 3, 4), vec![10, 13, 16, 19]),
        (window(10, -3, 4), vec![10, 7, 4, 1]),
        (window(u64::MAX - 1, 1, 2), vec![u64::MAX - 1, u64::MAX]),
        (window(1, -1, 2), vec![1, 0]),
        (window(5, 1, 0), vec![]),
        (NOTHING, vec![]),
    ] {
        assert_eq!(window.pages().collect::<Vec<_>>(), pages);
        let near = (0..40).chain(u64::MAX - 40..=u64::MAX);
        for page in near {
            assert_eq!(window.contains(page), pages.contains(&page), "{window:?} {page}");
        }
    }
}

#[test]
fn strides_are_found_downwards_and_between_other_faults() {
    let mut prefetcher = Prefetcher::new(16);
    for page in [5000, 900_000, 4900, 77, 123_456] {
        assert_eq!(prefetcher.fault(1, page).window, NOTHING);
    }
    assert_eq!(prefetcher.fault(1, 4800).window, window(4700, -100, 2));
    assert_eq!(prefetcher.fault(1, 4500).window, window(4400, -100, 4));
}

#[test]
fn a_stride_of_most_faults_is_tried_at_another_place() {
    let mut prefetcher = Prefetcher::new(2);
    for fault in 0..10 {
        prefetcher.fault(1, 1000 + 30 * 3 * fault);
    }
    assert_eq!(prefetcher.fault(1, 700_000).window, window(700_090, 90, 2));
}

#[test]
fn threads_do_not_mix_and_the_oldest_is_forgotten() {
    let mut prefetcher = Prefetcher::new(16);
    let threads = THREADS_MAX as u64;
    for thread in 0..threads {
        assert_eq!(prefetcher.fault(thread, 100 + thread).window, NOTHING);
    }
    for thread in 0..threads {
        assert_eq!(prefetcher.fault(thread, 101 + thread).window, window(102 + thread, 1, 2));
    }
    assert_eq!(prefetcher.fault(threads, 500).window, NOTHING);
    assert_eq!(prefetcher.fault(1, 105).window, window(106, 1, 4), "still known");
    assert_eq!(prefetcher.fault(0, 104).window, NOTHING, "forgotten");
}

#[test]
fn a_limit_of_0_requests_nothing() {
    let mut prefetcher = Prefetcher::new(0);
    assert!((0..100).all(|page| prefetcher.fault(1, page).window == NOTHING));
    assert_eq!(prefetcher.counters().pages_requested, 0);
}

#[test]
fn random_faults_cost_nothing_soon_and_a_stream_is_found_after_them() {
    // Of so few pages that neighbours and equal distances are frequent.
    let mut random = SmallRng::seed_from_u64(5);
    let mut prefetcher = Prefetcher::new(32);
    let mut requested_by = |prefetcher: &mut Prefetcher| {
        let before = prefetcher.counters().pages_requested;
        for _ in 0..1000 {
            prefetcher.fault(1, random.random_range(0..8192));
        }
        prefetcher.counters().pages_requested - before
    };
    requested_by(&mut prefetcher);
    let requested = requested_by(&mut prefetcher);
    assert!(requested < 50, "{requested}");
    let (mut page, mut faults) = (500_000, 0);
    while page < 500_200 {
        page += u64::from(prefetcher.fault(1, page).window.count) + 1;
        faults += 1;
    }
    assert!(faults < 16, "{faults}");
}

proptest! {
    /// Windows stay within the page numbers and the limit, and the counters agree with them.
    #[test]
    fn windows_are_valid(
        limit in prop_oneof![0_u32..40, Just(u32::MAX)],
        faults in prop::collection::vec(
            (0_u64..20, prop_oneof![0_u64..50, any::<u64>(), u64::MAX - 50..=u64::MAX]),
            0..500,
        ),
    ) {
        let mut prefetcher = Prefetcher::new(limit);
        let mut requested = 0;
        for (thread, page) in faults {
            let Window { first, stride, count } = prefetcher.fault(thread, page).window;
            requested += u64::from(count);
            prop_assert!(count <= limit);
            if count > 0 {
                prop_assert_ne!(stride, 0);
                prop_assert_eq!(page.checked_add_signed(stride), Some(first));
                let last = i128::from(page) + i128::from(stride) * i128::from(count);
                prop_assert!(u64::try_from(last).is_ok());
            }
        }
        let counters = prefetcher.counters();
        prop_assert_eq!(counters.pages_requested, requested);
    }
}
