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
    assert!(meter.is_contended(at(1)), "it looks");
    (meter.others, meter.is_looking) = (Others::default(), false);
    assert!(noted(&mut meter, 50, MS, 2 * MS));
    assert!(meter.is_contended(at(2)), "it is not time to read");
    assert!(meter.is_contended(at(1000)), "it looks again");
    assert_eq!((meter.lately, meter.is_contended), (Times::default(), false));
    assert!(meter.last.ran < 10_000 * MS, "it is the thread's own time again");
}

/// Beside a thread at full rate others seem to have no work, so it looks for them with little work of its own.
#[test]
fn it_looks_first_and_again_after_a_while_at_full_rate() {
    let mut meter = Contention::default();
    let at = |ms| Timestamp::ZERO + Duration::from_millis(ms);
    let mut looks = Vec::new();
    for ms in (700..5000).step_by(10) {
        // How busy the machine of this test is does not matter.
        meter.is_contended = false;
        if meter.is_contended(at(ms)) && meter.is_looking {
            looks.push(ms);
        }
    }
    assert!(meter.file.is_some(), "this kernel has no {PATH}: build it with CONFIG_SCHED_INFO");
    // Until it has looked, or the processors have been idle for a while.
    let look = |time: u64| move |from: u64| (from..from + time).step_by(10);
    let looks_of =
        |time| -> Vec<u64> { [700, 2000, 4000].into_iter().flat_map(look(time)).collect() };
    assert!(looks_of(20).iter().all(|ms| looks.contains(ms)), "{looks:?}");
    assert!(looks.iter().all(|ms| looks_of(50).contains(ms)), "{looks:?}");
    // As long as others want the processor, it does not begin anew.
    let mut busy = Contention::of_a_busy_processor(at(0));
    for ms in (0..5000).step_by(10) {
        assert!(busy.is_contended(at(ms)) && !busy.is_looking, "{ms}");
    }
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
                meter.is_contended(Timestamp::ZERO + began.elapsed());
                is_contended = meter.is_contended;
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
