//! What was written is read, however little is local.

use std::collections::HashMap;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::*;

#[test]
fn what_was_written_is_read_in_any_order() {
    let rack = servers(2);
    for mode in MODES {
        for evictor in [true, false] {
            let options = RegionOptions::new(8 << 20, 256 << 10).mode(mode).evictor(evictor);
            let mut region = region(&rack, &options).expect("a region");
            let memory = region.as_mut_slice();
            let mut random = SmallRng::seed_from_u64(7);
            let mut expected = vec![0_u8; memory.len()];
            for _ in 0..20_000 {
                let at = random.random_range(0..memory.len());
                let value = random.random();
                memory[at] = value;
                expected[at] = value;
                let at = random.random_range(0..memory.len());
                assert_eq!(memory[at], expected[at], "byte {at} with {mode:?}");
            }
            assert!(memory == expected, "the whole region, in order, with {mode:?}");
            let statistics = region.statistics();
            assert!(statistics.local_pages_max <= 64, "{statistics:?}");
            assert!(statistics.evicted_written_pages > 1000, "{statistics:?}");
            assert!(statistics.remote_faults > 1000, "{statistics:?}");
        }
    }
}

#[test]
fn threads_that_share_pages_lose_no_write_and_keep_to_the_limit() {
    const THREADS: usize = 4;
    const ROUNDS: usize = 40;
    const WORDS: usize = 4 << 20 >> 3;
    let rack = servers(1);
    for mode in MODES {
        let options = RegionOptions::new(4 << 20, 128 << 10).mode(mode);
        let region = region(&rack, &options).expect("a region");
        let start = region.as_ptr().cast::<AtomicU64>().as_ptr();
        // SAFETY: the range is the region's, aligned, and accessed as atomics only.
        let words = unsafe { std::slice::from_raw_parts(start, WORDS) };
        // Between two rounds no thread faults, so the system's count of pages is one moment's.
        let pause = Barrier::new(THREADS + 1);
        std::thread::scope(|scope| {
            let pause = &pause;
            let work = move |thread: usize| {
                let mut random = SmallRng::seed_from_u64(thread as u64);
                // Each word belongs to one thread, each page to all.
                let mut counts = HashMap::<usize, u64>::new();
                for _ in 0..ROUNDS {
                    for _ in 0..125 {
                        let at = random.random_range(0..WORDS / THREADS) * THREADS + thread;
                        let count = counts.entry(at).or_default();
                        let before = words[at].fetch_add(1, Ordering::Relaxed);
                        assert_eq!(before, *count, "word {at} with {mode:?}");
                        *count += 1;
                    }
                    pause.wait();
                    pause.wait();
                }
                counts
            };
            let workers: Vec<_> =
                (0..THREADS).map(|thread| scope.spawn(move || work(thread))).collect();
            let mut most = 0;
            for _ in 0..ROUNDS {
                pause.wait();
                most = most.max(resident_pages(&region));
                pause.wait();
            }
            for worker in workers {
                for (at, count) in worker.join().expect("it does not panic") {
                    assert_eq!(words[at].load(Ordering::Relaxed), count, "word {at}");
                }
            }
            assert!(most <= 32, "{most} pages were local at once, and 32 may be");
            assert!(most > 8, "{most} pages were local at once: nothing was counted");
        });
        let statistics = region.statistics();
        assert!(statistics.local_pages_max <= 32, "{statistics:?}");
    }
}

#[test]
fn a_fault_needs_little_stack() {
    const STACK_BYTES: usize = 128 << 10;
    let rack = servers(1);
    // The faulting thread also evicts.
    let options = RegionOptions::new(2 << 20, 256 << 10).evictor(false);
    let mut region = region(&rack, &options).expect("a region");
    std::thread::scope(|scope| {
        let small = std::thread::Builder::new().stack_size(STACK_BYTES);
        let work = || {
            for value in 1..4 {
                region.as_mut_slice().fill(value);
                assert!(region.as_slice().iter().all(|byte| *byte == value));
            }
        };
        small.spawn_scoped(scope, work).expect("a thread").join().expect("it does not panic");
    });
}

#[test]
fn zeros_are_neither_sent_nor_read() {
    let rack = servers(1);
    for mode in MODES {
        let mut region =
            region(&rack, &RegionOptions::new(4 << 20, 256 << 10).mode(mode)).expect("a region");
        assert!(region.as_slice().iter().all(|byte| *byte == 0));
        for page in 0..1024 {
            region.as_mut_slice()[page * PAGE] = 1;
            region.as_mut_slice()[page * PAGE] = 0;
        }
        assert!(region.as_slice().iter().all(|byte| *byte == 0));
        let statistics = region.statistics();
        assert_eq!((statistics.read_bytes, statistics.written_bytes), (0, 0), "{statistics:?}");
        assert!(statistics.evicted_zero_pages > 1500, "{statistics:?}");
        assert_eq!(statistics.allocated_bytes, 0, "{statistics:?}");
    }
}

#[test]
fn pages_that_are_only_read_are_written_once() {
    let rack = servers(1);
    for mode in MODES {
        let mut region =
            region(&rack, &RegionOptions::new(2 << 20, 256 << 10).mode(mode)).expect("a region");
        region.as_mut_slice().fill(3);
        for _ in 0..4 {
            assert!(region.as_slice().iter().all(|byte| *byte == 3));
        }
        let statistics = region.statistics();
        assert!(statistics.evicted_clean_pages > 1000, "{statistics:?}");
        assert!(statistics.written_bytes <= 2 << 20, "{statistics:?}");
    }
}

#[test]
fn flushed_pages_are_clean_and_discarded_pages_are_zero() {
    let rack = servers(1);
    for mode in MODES {
        let mut region =
            region(&rack, &RegionOptions::new(2 << 20, 1 << 20).mode(mode)).expect("a region");
        region.as_mut_slice()[..1 << 19].fill(9);
        region.flush().expect("the server responds");
        let flushed = region.statistics();
        assert_eq!(flushed.written_bytes, 1 << 19, "{flushed:?}");
        region.flush().expect("nothing is left to do");
        assert_eq!(region.statistics().written_bytes, flushed.written_bytes);
        region.as_mut_slice()[5] = 8;
        region.flush().expect("the server responds");
        assert_eq!(region.statistics().written_bytes, flushed.written_bytes + PAGE as u64);

        region.discard(100..3 * PAGE + 100).expect("it is in the region");
        let memory = region.as_slice();
        assert_eq!(memory[5], 8, "the first page is not whole");
        assert!(memory[PAGE..3 * PAGE].iter().all(|byte| *byte == 0));
        assert_eq!(memory[3 * PAGE], 9, "the last page is not whole");
        let result = region.discard(0..(2 << 20) + 1);
        assert!(matches!(result, Err(Error::OutOfRange { .. })), "{result:?}");
    }
}

#[test]
fn evicted_pages_are_remote_and_come_back() {
    let rack = servers(1);
    for mode in MODES {
        let options = RegionOptions::new(1 << 20, 1 << 20).mode(mode).prefetch_pages(0);
        let mut region = region(&rack, &options).expect("a region");
        region.as_mut_slice()[..1 << 19].fill(9);
        let pinned = region.pin(0..PAGE).expect("there is room");
        region.evict(100..1 << 20).expect("the server responds");
        region.evict(0..PAGE).expect("the server responds");
        drop(pinned);
        let evicted = region.statistics();
        // The first page of the range is not whole, and was pinned at the second time.
        assert_eq!(evicted.local_pages, 1, "{evicted:?}");
        assert!(region.as_slice()[..1 << 19].iter().all(|byte| *byte == 9));
        assert!(region.as_slice()[1 << 19..].iter().all(|byte| *byte == 0));
        let seen = region.statistics();
        assert_eq!(seen.remote_faults - evicted.remote_faults, (1 << 19) / PAGE as u64 - 1);
        let result = region.evict(0..(1 << 20) + 1);
        assert!(matches!(result, Err(Error::OutOfRange { .. })), "{result:?}");
    }
}

#[test]
fn a_sequential_reader_is_served_ahead() {
    let rack = servers(1);
    for mode in MODES {
        let mut region =
            region(&rack, &RegionOptions::new(8 << 20, 1 << 20).mode(mode)).expect("a region");
        region.as_mut_slice().fill(1);
        let before = region.statistics();
        let sum: u64 = region.as_slice().iter().map(|byte| u64::from(*byte)).sum();
        assert_eq!(sum, 8 << 20);
        let after = region.statistics();
        let faults = after.remote_faults - before.remote_faults;
        assert!(faults < 2048 / 4, "{faults} faults for 2048 pages: {after:?}");
    }
}

/// What a stream would read ahead past the end of the region, or has already, needs no room.
#[test]
fn a_region_that_may_be_local_as_a_whole_evicts_nothing() {
    let rack = servers(1);
    for mode in MODES {
        let mut region =
            region(&rack, &RegionOptions::new(8 << 20, 8 << 20).mode(mode)).expect("a region");
        for round in 1..=3 {
            region.as_mut_slice().fill(round);
        }
        let seen = region.statistics();
        assert_eq!((seen.remote_faults, seen.evicted_written_pages, seen.read_bytes), (0, 0, 0));
        assert_eq!(resident_pages(&region), 2048);
    }
}

#[test]
fn an_observer_sees_the_faults_of_a_view() {
    let rack = servers(1);
    let mut region = region(&rack, &RegionOptions::new(1 << 20, 1 << 20)).expect("a region");
    let observer = region.observer();
    let memory = region.as_mut_slice();
    memory[0] = 1;
    let seen = observer.statistics().expect("the region is there");
    assert_eq!((seen.zero_faults, memory[0]), (1, 1));
    drop(region);
    assert_eq!(observer.statistics(), None);
}
