//! How long a thread polls before it sleeps, learned from how long it had to wait.
//!
//! To sleep costs the wake-up, and to poll costs the time. So polling for some time is worth it if the waits that end
//! in this time save more wake-ups than the time that the others waste. Now and then a wait polls for the longest time,
//! because only such waits tell how long a shorter one would have had to be: the length of a wait that slept has the
//! wake-up in it.
//!
//! If more threads can run than there are processors, the time of polling is taken from another thread, and a wake-up
//! costs little because no processor sleeps.

use core::time::Duration;
use std::{
    fs::{self, File},
    os::unix::fs::FileExt as _,
};

use bluebridge_time::Timestamp;

/// The longest time of polling that is learned.
const LONGEST: Duration = Duration::from_micros(50);

/// What a wake-up costs if the processor sleeps: some 45 us on a virtual machine.
const WAKE_UP_NS: i64 = 50_000;

/// What it costs if another thread runs there.
const CONTENDED_NS: i64 = 5_000;

/// Times of polling from which is chosen, in nanoseconds.
const TIMES_NS: [i64; 5] = [3_000, 6_000, 12_000, 25_000, 50_000];

/// A wait that ends sooner was none.
const NO_WAIT: Duration = Duration::from_nanos(500);

/// One wait of so many polls for the longest time. Waits often alternate, so it is an odd number.
const PROBE: u32 = 7;

/// All waits, as the sum of shares.
const ALL: i64 = 1 << 16;

/// Weight of the latest wait: 1 of so many.
const MEMORY: i64 = 8;

/// How often is asked for the number of threads that can run.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(10);

/// Weight of the latest answer.
const SAMPLE_MEMORY: i64 = 4;

/// How long one thread polls before it sleeps.
#[derive(Debug)]
pub struct Spin(Kind);

#[derive(Debug)]
enum Kind {
    For(Duration),
    Learned(Box<Learned>),
}

impl Spin {
    /// Always the same time.
    #[must_use]
    pub const fn fixed(time: Duration) -> Self {
        Self(Kind::For(time))
    }

    /// Learned from the waits of this thread, up to 50 us.
    #[must_use]
    pub fn learned() -> Self {
        Self(Kind::Learned(Box::new(Learned::new(Processors::new()))))
    }

    /// How long to poll in the next wait.
    pub fn next(&mut self, now: Timestamp) -> Duration {
        match &mut self.0 {
            Kind::For(time) => *time,
            Kind::Learned(learned) => {
                learned.sample(now);
                learned.next()
            }
        }
    }

    /// Whether something can be learned from a wait that polls for a time.
    #[must_use]
    pub fn learns_from(&self, polled: Duration) -> bool {
        matches!(self.0, Kind::Learned(_)) && polled >= LONGEST
    }

    /// Learns how long a wait was that polled for a time; `None`: longer than that.
    pub fn note(&mut self, polled: Duration, waited: Option<Duration>) {
        if let Kind::Learned(learned) = &mut self.0 {
            learned.note(polled, waited);
        }
    }
}

#[derive(Debug)]
struct Learned {
    /// Waits, as shares of all: those that end within a time, and not within the one before.
    shares: [i64; TIMES_NS.len()],
    waits: u32,
    best: Duration,
    processors: Processors,
}

impl Learned {
    /// Polls for the longest time until something is known.
    const fn new(processors: Processors) -> Self {
        let share = ALL / TIMES_NS.len() as i64;
        Self { shares: [share; TIMES_NS.len()], waits: 0, best: LONGEST, processors }
    }

    fn next(&mut self) -> Duration {
        self.waits = self.waits.wrapping_add(1);
        if self.waits.is_multiple_of(PROBE) { LONGEST } else { self.best }
    }

    fn note(&mut self, polled: Duration, waited: Option<Duration>) {
        if polled < LONGEST || waited.is_some_and(|waited| waited < NO_WAIT) {
            return;
        }
        let waited = waited.map(|waited| i64::try_from(waited.as_nanos()).unwrap_or(i64::MAX));
        let within = waited.and_then(|waited| TIMES_NS.iter().position(|time| waited <= *time));
        for (at, share) in self.shares.iter_mut().enumerate() {
            let latest = if within == Some(at) { ALL } else { 0 };
            *share += (latest - *share) / MEMORY;
        }
        self.choose();
    }

    /// Chooses the time that saves most.
    fn choose(&mut self) {
        let contended = self.processors.contended;
        let wake_up = (WAKE_UP_NS * (ALL - contended) + CONTENDED_NS * contended) / ALL;
        let (mut best, mut best_saved) = (0, 0);
        let (mut ended, mut saved, mut before) = (0, 0, 0);
        for (time, share) in TIMES_NS.into_iter().zip(self.shares) {
            ended += share;
            saved += share * (wake_up - (before + time) / 2);
            before = time;
            let in_all = saved - (ALL - ended) * time;
            // A longer time must be worth it: what is left of old waits never gets zero.
            if in_all > best_saved + best_saved / 64 {
                (best, best_saved) = (time, in_all);
            }
        }
        self.best = Duration::from_nanos(best.unsigned_abs());
    }

    fn sample(&mut self, now: Timestamp) {
        if self.processors.sample(now) {
            self.choose();
        }
    }
}

/// Whether there are enough processors for the threads that can run.
#[derive(Debug)]
struct Processors {
    count: u64,
    /// The file whose fourth number says how many threads can run; `None` where there is none.
    file: Option<File>,
    sampled_at: Timestamp,
    /// How often there were too few, as a share of all answers.
    contended: i64,
}

impl Processors {
    fn new() -> Self {
        let online = fs::read_to_string("/sys/devices/system/cpu/online").ok();
        let count = online.as_deref().and_then(count_of);
        // Without the number of processors the number of threads says nothing.
        let file = count.and_then(|_| File::open("/proc/loadavg").ok());
        Self { count: count.unwrap_or(0), file, sampled_at: Timestamp::ZERO, contended: 0 }
    }

    /// Asks again if it is time; returns whether it did.
    fn sample(&mut self, now: Timestamp) -> bool {
        if now.saturating_since(self.sampled_at) < SAMPLE_INTERVAL {
            return false;
        }
        let Some(file) = &self.file else { return false };
        self.sampled_at = now;
        let mut text = [0; 64];
        let read = file.read_at(&mut text, 0).unwrap_or(0);
        let running = text.get(..read).and_then(running_of);
        let latest = if running.is_some_and(|running| running > self.count) { ALL } else { 0 };
        self.contended += (latest - self.contended) / SAMPLE_MEMORY;
        true
    }
}

/// The number of processors in a list as of `/sys/devices/system/cpu/online`: `0-3,6`.
fn count_of(list: &str) -> Option<u64> {
    let range = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
        last.checked_sub(first)?.checked_add(1)
    };
    list.trim().split(',').try_fold(0_u64, |sum, part| sum.checked_add(range(part)?))
}

/// The threads that can run, in the text of `/proc/loadavg`: `2.58 3.95 4.12 6/159 10905`.
fn running_of(text: &[u8]) -> Option<u64> {
    let text = core::str::from_utf8(text).ok()?;
    text.split(' ').nth(3)?.split_once('/')?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quiet() -> Learned {
        Learned::new(Processors { count: 2, file: None, sampled_at: Timestamp::ZERO, contended: 0 })
    }

    /// The time that is polled after many waits, of which each takes as long as the next one of these; and the share of
    /// the waits that polled for it.
    fn after(learned: &mut Learned, waits_us: &[u64]) -> u64 {
        for waited in waits_us.iter().cycle().take(1000) {
            let polled = learned.next();
            let waited = Duration::from_micros(*waited);
            learned.note(polled, (waited <= polled).then_some(waited));
        }
        u64::try_from(learned.best.as_micros()).unwrap()
    }

    #[test]
    fn it_polls_as_long_as_the_waits_that_are_worth_it() {
        for (waits_us, polled_us) in [
            (&[2][..], 3),
            (&[8], 12),
            (&[20], 25),
            (&[40], 50),
            (&[60], 0),
            (&[5000], 0),
            // Every fifth wait is short: 12 us are wasted four times to save 40 once.
            (&[8, 100, 100, 100, 100], 0),
            // Every second.
            (&[8, 100], 12),
            (&[8, 40, 8, 8], 50),
        ] {
            assert_eq!(after(&mut quiet(), waits_us), polled_us, "{waits_us:?}");
        }
    }

    #[test]
    fn it_learns_again_and_wastes_little_meanwhile() {
        let mut learned = quiet();
        assert_eq!(learned.next(), LONGEST, "nothing is known");
        assert_eq!(after(&mut learned, &[8]), 12);
        assert_eq!(after(&mut learned, &[1000]), 0);
        let polled: Duration = (0..700).map(|_| learned.next()).sum();
        assert_eq!(polled, 100 * LONGEST);
        assert_eq!(after(&mut learned, &[8]), 12);
    }

    #[test]
    fn it_polls_less_if_others_need_the_processor() {
        let mut learned = quiet();
        learned.processors.contended = ALL;
        assert_eq!(after(&mut learned, &[2]), 3);
        assert_eq!(after(&mut learned, &[8]), 0);
        learned.processors.contended = ALL / 2;
        assert_eq!(after(&mut learned, &[8]), 12);
        assert_eq!(after(&mut learned, &[40]), 0);
    }

    #[test]
    fn datagrams_that_were_there_are_no_waits() {
        let mut learned = quiet();
        after(&mut learned, &[1000]);
        for _ in 0..100 {
            learned.note(LONGEST, Some(Duration::from_nanos(200)));
        }
        assert_eq!(learned.best, Duration::ZERO);
    }

    #[test]
    fn threads_that_can_run_are_compared_with_the_processors() {
        for (list, count) in [("0-1\n", Some(2)), ("0", Some(1)), ("0-3,6,8-9", Some(7))] {
            assert_eq!(count_of(list), count);
        }
        for bad in ["", "x", "3-1", "0-18446744073709551615"] {
            assert_eq!(count_of(bad), None, "{bad}");
        }
        assert_eq!(running_of(b"2.58 3.95 4.12 6/159 10905\n"), Some(6));
        for bad in [&b""[..], b"2.58 3.95 4.12", b"1 2 3 4 5", b"1 2 3 x/5", &[0xff; 9]] {
            assert_eq!(running_of(bad), None);
        }
    }

    /// The system of the test has both files.
    #[test]
    fn the_system_is_asked_every_ten_milliseconds() {
        let mut processors = Processors::new();
        assert!(processors.count > 0);
        let at = |ms| Timestamp::ZERO + Duration::from_millis(ms);
        assert!(processors.sample(at(10)));
        assert!(!processors.sample(at(19)));
        // As many threads as there are processors, and this one.
        processors.count = 0;
        assert!(processors.sample(at(20)));
        assert!(processors.contended >= ALL / SAMPLE_MEMORY);
    }
}
