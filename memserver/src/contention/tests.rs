use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Instant,
};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::*;

const MS: u64 = 1_000_000;

fn noted(meter: &mut Contention, rounds: u32, ran: u64, waited: u64) -> bool {
    for _ in 0..rounds {
        let Times { ran: ran_before, waited: waited_before } = meter.last;
        meter.note(Times { ran: ran_before + ran, waited: waited_before + waited });
    }
    meter.is_contended
}

#[test]
fn a_thread_that_waits_for_a_third_of_its_time_is_beside_others() {
    let mut meter = Contention::default();
    assert!(!noted(&mut meter, 50, 8 * MS, 2 * MS), "a fifth");
    assert!(noted(&mut meter, 50, 5 * MS, 5 * MS), "a half");
    assert!(!noted(&mut meter, 30, 10 * MS, 0), "nobody");
    assert!(noted(&mut meter, 50, MS / 2, MS), "also if it mostly sleeps");
}

#[test]
fn a_thread_that_sleeps_says_nothing() {
    let mut meter = Contention::default();
    assert!(!noted(&mut meter, 1, 100, MS / 2), "too little");
    assert!(noted(&mut meter, 50, MS, 2 * MS));
    assert!(noted(&mut meter, 1000, 0, 0), "what is known stays");
}

#[test]
fn what_was_before_a_gap_does_not_count() {
    let mut meter = Contention::default();
    let at = |ms| Timestamp::ZERO + Duration::from_millis(ms);
    assert!(!meter.is_contended(at(1)));
    meter.others = Others::default();
    assert!(noted(&mut meter, 50, MS, 2 * MS));
    assert!(meter.is_contended(at(2)), "it is not time to look");
    assert!(!meter.is_contended(at(1000)));
    assert_eq!(meter.lately, Times::default());
    assert!(meter.last.ran < 10_000 * MS, "it is the thread's own time again");
}

#[test]
fn any_numbers_are_valid() {
    let mut meter = Contention::default();
    for times in [(u64::MAX, u64::MAX), (0, 0), (u64::MAX, 0), (0, u64::MAX)] {
        meter.note(Times { ran: times.0, waited: times.1 });
    }
}

#[test]
fn the_file_of_the_kernel_has_two_times_in_front() {
    let parsed = |text: &str| parse(text.as_bytes());
    assert_eq!(parsed("12 34 5\n"), Some(Times { ran: 12, waited: 34 }));
    for text in ["", "12", "12 ", "a 3", "12 -3 4", "99999999999999999999999 1"] {
        assert_eq!(parsed(text), None, "{text}");
    }
}

fn stay_on_one() {
    let allowed = sched_getaffinity(None).expect("the kernel tells");
    let first = (0..CpuSet::MAX_CPU).find(|number| allowed.is_set(*number));
    let mut one = CpuSet::new();
    one.set(first.expect("this thread runs on one"));
    sched_setaffinity(None, &one).expect("it is allowed");
}

/// Two threads on one processor wait for each other half of the time.
#[test]
fn a_thread_learns_that_another_one_has_its_processor() {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            stay_on_one();
            while !stop.load(Ordering::Relaxed) {
                core::hint::spin_loop();
            }
        });
        let measured = scope.spawn(|| {
            stay_on_one();
            let (mut meter, began) = (Contention::default(), Instant::now());
            let mut is_contended = false;
            while !is_contended && began.elapsed() < Duration::from_secs(20) {
                is_contended = meter.is_contended(Timestamp::ZERO + began.elapsed());
            }
            assert!(
                meter.file.is_some(),
                "this kernel has no {PATH}: build it with CONFIG_SCHED_INFO"
            );
            is_contended
        });
        let is_seen = measured.join();
        stop.store(true, Ordering::Relaxed);
        assert!(is_seen.expect("it does not panic"));
    });
}
