//! How long a thread polls before it sleeps, learned from how long it had to wait.
//!
//! To sleep costs the wake-up, and to poll costs the time. So polling for some time is worth it if the waits that end
//! in this time save more wake-ups than the time that the others waste. Of times that save about as much the longest is
//! best: a thread that sleeps in one wait of a hundred makes the slowest requests of all who wait for it.
//!
//! Now and then a wait polls for the longest time, because only such waits tell how long a shorter one would have had to
//! be: the length of a wait that slept has the wake-up in it.
//!
//! The time in which other threads had the core is not time of polling (`polling.rs`). If they keep the core, the thread
//! stops polling, and tries again more and more seldom.

use core::time::Duration;

use crate::Polled;

/// The longest time of polling that is learned.
const LONGEST: Duration = Duration::from_micros(50);

/// What a wake-up costs if the processor sleeps: some 45 us on a virtual machine.
const WAKE_UP_NS: i64 = 50_000;

/// Times of polling from which is chosen, in nanoseconds.
const TIMES_NS: [i64; 5] = [3_000, 6_000, 12_000, 25_000, 50_000];

/// A wait that ends sooner was none.
const NO_WAIT: Duration = Duration::from_nanos(500);

/// While shorter times are best, one wait of so many polls for the longest time. Waits often alternate, so it is an odd
/// number.
const PROBE: u32 = 7;

/// The same if such waits find nothing: at most 16 times as many.
const RARE_PROBE: u32 = 127;

/// The same if other threads keep the core, and each such wait costs milliseconds.
const RAREST_PROBE: u32 = 1023;

/// All waits, as the sum of shares.
const ALL: i64 = 1 << 16;

/// Weight of the latest wait: 1 of so many.
const MEMORY: i64 = 16;

/// A longer time is chosen if it saves less than the best one by at most 1 part of so many.
const TOLERANCE: i64 = 16;

/// How long one thread polls before it sleeps.
#[derive(Debug)]
pub struct Spin(Kind);

#[derive(Debug)]
enum Kind {
    For(Duration),
    Learned(Learned),
}

impl Spin {
    /// Always the same time.
    #[must_use]
    pub const fn fixed(time: Duration) -> Self {
        Self(Kind::For(time))
    }

    /// Learned from the waits of this thread, up to 50 us.
    #[must_use]
    pub const fn learned() -> Self {
        Self(Kind::Learned(Learned::new()))
    }

    /// How long to poll in the next wait.
    pub const fn next(&mut self) -> Duration {
        match &mut self.0 {
            Kind::For(time) => *time,
            Kind::Learned(learned) => learned.next(),
        }
    }

    /// Learns from how a wait ended that should poll for a time.
    pub fn note(&mut self, time: Duration, polled: Polled) {
        if let Kind::Learned(learned) = &mut self.0 {
            learned.note(time, polled);
        }
    }
}

#[derive(Debug)]
struct Learned {
    /// Waits, as shares of all: those that end within a time, and not within the one before.
    shares: [i64; TIMES_NS.len()],
    /// Waits since the last one that polled for the longest time.
    waits: u32,
    /// Waits from one that polls for the longest time to the next.
    interval: u32,
    best: Duration,
}

impl Learned {
    /// Polls for the longest time until something is known.
    const fn new() -> Self {
        let share = ALL / TIMES_NS.len() as i64;
        Self { shares: [share; TIMES_NS.len()], waits: 0, interval: PROBE, best: LONGEST }
    }

    const fn next(&mut self) -> Duration {
        self.waits += 1;
        if self.waits < self.interval {
            return self.best;
        }
        self.waits = 0;
        LONGEST
    }

    fn note(&mut self, time: Duration, polled: Polled) {
        match polled {
            Polled::Displaced => {
                // Even short waits would end when the other threads give the core back.
                self.shares = [0; TIMES_NS.len()];
                self.interval = (self.interval * 2 + 1).min(RAREST_PROBE);
            }
            _ if time.is_zero() => return,
            Polled::Found(waited) if waited < NO_WAIT => return,
            Polled::Found(waited) => {
                let waited = i64::try_from(waited.as_nanos()).unwrap_or(i64::MAX);
                let within = TIMES_NS.iter().position(|time| waited <= *time);
                self.add(time, within);
                self.interval = PROBE;
            }
            Polled::Nothing => {
                self.add(time, None);
                if self.best.is_zero() && self.interval < RARE_PROBE {
                    self.interval = self.interval * 2 + 1;
                }
            }
        }
        self.choose();
    }

    /// Adds the latest wait to the shares of all times for which it polled: of longer ones it tells nothing.
    fn add(&mut self, time: Duration, within: Option<usize>) {
        let known = TIMES_NS.iter().filter(|of| u128::from(of.unsigned_abs()) <= time.as_nanos());
        let known = known.count();
        for (at, share) in self.shares.iter_mut().enumerate().take(known) {
            let latest = if within == Some(at) { ALL } else { 0 };
            *share += (latest - *share) / MEMORY;
        }
    }

    /// Chooses the longest of the times that save about as much as the best.
    fn choose(&mut self) {
        let (mut ended, mut saved, mut before) = (0, 0, 0);
        let mut savings = [(0, 0); TIMES_NS.len()];
        for ((slot, share), time) in savings.iter_mut().zip(self.shares).zip(TIMES_NS) {
            ended += share;
            saved += share * (WAKE_UP_NS - i64::midpoint(before, time));
            before = time;
            *slot = (saved - (ALL - ended) * time, time);
        }
        let most = savings.iter().map(|(saved, _)| *saved).max().unwrap_or(0);
        let enough = most - most / TOLERANCE;
        let chosen = savings.iter().rev().find(|(saved, _)| most > 0 && *saved >= enough);
        self.best = Duration::from_nanos(chosen.map_or(0, |(_, time)| time.unsigned_abs()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a wait of a length looks like to a thread that polls for a time.
    fn seen(waited_us: u64, time: Duration) -> Polled {
        let waited = Duration::from_micros(waited_us);
        if waited <= time { Polled::Found(waited) } else { Polled::Nothing }
    }

    /// Waits as long as these, again and again. Returns the time that is polled then.
    fn after(learned: &mut Learned, waits_us: &[u64]) -> u64 {
        for waited in waits_us.iter().cycle().take(4000) {
            let time = learned.next();
            learned.note(time, seen(*waited, time));
        }
        u64::try_from(learned.best.as_micros()).unwrap()
    }

    /// The time that so many waits of a length poll in all.
    fn polled_in(learned: &mut Learned, waits: u32, waited: Duration) -> Duration {
        (0..waits)
            .map(|_| {
                let time = learned.next();
                learned.note(time, Polled::Nothing);
                time.min(waited)
            })
            .sum()
    }

    #[test]
    fn it_polls_as_long_as_the_waits_that_are_worth_it() {
        for (waits_us, polled_us) in [
            (&[2][..], 50),
            (&[40], 50),
            (&[60], 0),
            (&[5000], 0),
            // Every fifth wait is short: 12 us are wasted four times to save 40 once.
            (&[8, 100, 100, 100, 100], 0),
            // Every second: to poll longer would waste more.
            (&[8, 100], 12),
            (&[2, 100], 3),
            (&[8, 40, 8, 8], 50),
        ] {
            assert_eq!(after(&mut Learned::new(), waits_us), polled_us, "{waits_us:?}");
        }
    }

    #[test]
    fn a_long_wait_now_and_then_does_not_make_it_sleep_in_others() {
        // One wait of 100 takes 30 us, and one 200.
        let mut waits_us = vec![5; 200];
        (waits_us[20], waits_us[120], waits_us[170]) = (30, 30, 200);
        let mut learned = Learned::new();
        after(&mut learned, &waits_us);
        for waited in waits_us.iter().cycle().take(1000) {
            let time = learned.next();
            assert!(*waited > 50 || seen(*waited, time) != Polled::Nothing, "{time:?}");
            learned.note(time, seen(*waited, time));
        }
    }

    #[test]
    fn long_waits_cost_little_and_short_ones_are_noticed() {
        let mut learned = Learned::new();
        assert_eq!(learned.next(), LONGEST, "nothing is known");
        // 1,000 operations per second, one second: less than a thousandth of a core.
        let millisecond = Duration::from_millis(1);
        polled_in(&mut learned, 20, millisecond);
        let polled = polled_in(&mut learned, 1000, millisecond);
        assert!(polled <= 10 * LONGEST, "{polled:?}");
        let waits = (1..).find(|_| {
            let time = learned.next();
            learned.note(time, seen(8, time));
            learned.best > Duration::ZERO
        });
        assert!(waits.is_some_and(|waits| waits < 200), "{waits:?}");
    }

    #[test]
    fn it_sleeps_beside_threads_that_keep_the_core_and_tries_ever_more_seldom() {
        let mut learned = Learned::new();
        after(&mut learned, &[8]);
        let mut displaced_at = Vec::new();
        for wait in 0..10_000 {
            let time = learned.next();
            if time > Duration::ZERO {
                learned.note(time, Polled::Displaced);
                displaced_at.push(wait);
            }
        }
        assert_eq!(displaced_at[0], 0, "it had learned to poll");
        let gaps: Vec<u32> = displaced_at.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(gaps.is_sorted() && gaps.last() == Some(&RAREST_PROBE), "{gaps:?}");
        // When they are gone, it polls again.
        assert_eq!(after(&mut learned, &[8]), 50);
    }

    #[test]
    fn one_that_is_displaced_once_soon_polls_again() {
        let mut learned = Learned::new();
        after(&mut learned, &[8]);
        let time = learned.next();
        learned.note(time, Polled::Displaced);
        assert_eq!(learned.best, Duration::ZERO);
        let waits = (1..).find(|_| {
            let time = learned.next();
            learned.note(time, seen(8, time));
            learned.best > Duration::ZERO
        });
        assert!(waits.is_some_and(|waits| waits < 60), "{waits:?}");
    }

    #[test]
    fn datagrams_that_were_there_are_no_waits() {
        let mut learned = Learned::new();
        after(&mut learned, &[1000]);
        for _ in 0..100 {
            learned.note(LONGEST, Polled::Found(Duration::from_nanos(200)));
        }
        assert_eq!(learned.best, Duration::ZERO);
    }
}
