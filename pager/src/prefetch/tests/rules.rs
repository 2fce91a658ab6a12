//! Single rules, and any faults.

use proptest::prelude::*;
use rand::{Rng as _, SeedableRng as _, rngs::SmallRng};

use super::super::{PrefetchCounters, Prefetcher, THREADS_MAX, Window};

const NOTHING: Window = Window { first: 0, stride: 0, count: 0 };

fn window(first: u64, stride: i64, count: u32) -> Window {
    Window { first, stride, count }
}

#[test]
fn a_window_doubles_when_it_is_confirmed_and_halves_when_its_pages_are_not_there() {
    let mut prefetcher = Prefetcher::new(16);
    assert_eq!(prefetcher.fault(1, 100), NOTHING);
    assert_eq!(prefetcher.fault(1, 101), window(102, 1, 2));
    assert_eq!(prefetcher.fault(1, 104), window(105, 1, 4));
    assert_eq!(prefetcher.fault(1, 109), window(110, 1, 8));
    assert_eq!(prefetcher.fault(1, 109), NOTHING, "the same fault again");
    assert_eq!(prefetcher.fault(1, 118), window(119, 1, 16));
    assert_eq!(prefetcher.fault(1, 135), window(136, 1, 16), "the limit");
    assert_eq!(prefetcher.fault(1, 140), window(141, 1, 8));
    let counters = prefetcher.counters();
    let expected = PrefetchCounters {
        pages_requested: 2 + 4 + 8 + 16 + 16 + 8,
        pages_confirmed: 2 + 4 + 8 + 16 + 4,
        windows_grown: 3,
        windows_shrunk: 1,
    };
    assert_eq!(counters, expected);
}

#[test]
fn strides_are_found_downwards_and_between_other_faults() {
    let mut prefetcher = Prefetcher::new(16);
    for page in [5000, 900_000, 4900, 77, 123_456] {
        assert_eq!(prefetcher.fault(1, page), NOTHING);
    }
    assert_eq!(prefetcher.fault(1, 4800), window(4700, -100, 2));
    assert_eq!(prefetcher.fault(1, 4500), window(4400, -100, 4));
}

#[test]
fn a_stride_of_most_faults_is_tried_at_another_place() {
    let mut prefetcher = Prefetcher::new(2);
    for fault in 0..10 {
        prefetcher.fault(1, 1000 + 30 * 3 * fault);
    }
    assert_eq!(prefetcher.fault(1, 700_000), window(700_090, 90, 2));
}

#[test]
fn threads_do_not_mix_and_the_oldest_is_forgotten() {
    let mut prefetcher = Prefetcher::new(16);
    let threads = THREADS_MAX as u64;
    for thread in 0..threads {
        assert_eq!(prefetcher.fault(thread, 100 + thread), NOTHING);
    }
    for thread in 0..threads {
        assert_eq!(prefetcher.fault(thread, 101 + thread), window(102 + thread, 1, 2));
    }
    assert_eq!(prefetcher.fault(threads, 500), NOTHING);
    assert_eq!(prefetcher.fault(1, 105), window(106, 1, 4), "still known");
    assert_eq!(prefetcher.fault(0, 104), NOTHING, "forgotten");
}

#[test]
fn a_limit_of_0_requests_nothing() {
    let mut prefetcher = Prefetcher::new(0);
    assert!((0..100).all(|page| prefetcher.fault(1, page) == NOTHING));
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
        page += u64::from(prefetcher.fault(1, page).count) + 1;
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
            let Window { first, stride, count } = prefetcher.fault(thread, page);
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
