//! How long a thread polls before it sleeps, learned from how long it had to wait.
//!
//! To sleep costs the wake-up, and to poll costs the time. So polling for some time is worth it if the waits that end
//! in this time save more wake-ups than the time that the others waste. Now and then a wait polls for the longest time,
//! because only such waits tell how long a shorter one would have had to be: the length of a wait that slept has the
//! wake-up in it.

use core::time::Duration;

/// The longest time of polling that is learned.
const LONGEST: Duration = Duration::from_micros(50);

/// What a wake-up costs if the processor sleeps: some 45 us on a virtual machine.
const WAKE_UP_NS: i64 = 50_000;

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
    pub fn learned() -> Self {
        Self(Kind::Learned(Learned::new()))
    }

    /// How long to poll in the next wait.
    pub const fn next(&mut self) -> Duration {
        match &mut self.0 {
            Kind::For(time) => *time,
            Kind::Learned(learned) => learned.next(),
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
}

impl Learned {
    /// Polls for the longest time until something is known.
    const fn new() -> Self {
        let share = ALL / TIMES_NS.len() as i64;
        Self { shares: [share; TIMES_NS.len()], waits: 0, best: LONGEST }
    }

    const fn next(&mut self) -> Duration {
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
        let (mut best, mut best_saved) = (0, 0);
        let (mut ended, mut saved, mut before) = (0, 0, 0);
        for (time, share) in TIMES_NS.into_iter().zip(self.shares) {
            ended += share;
            saved += share * (WAKE_UP_NS - (before + time) / 2);
            before = time;
            let in_all = saved - (ALL - ended) * time;
            // A longer time must be worth it: what is left of old waits never gets zero.
            if in_all > best_saved + best_saved / 64 {
                (best, best_saved) = (time, in_all);
            }
        }
        self.best = Duration::from_nanos(best.unsigned_abs());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            assert_eq!(after(&mut Learned::new(), waits_us), polled_us, "{waits_us:?}");
        }
    }

    #[test]
    fn it_learns_again_and_wastes_little_meanwhile() {
        let mut learned = Learned::new();
        assert_eq!(learned.next(), LONGEST, "nothing is known");
        assert_eq!(after(&mut learned, &[8]), 12);
        assert_eq!(after(&mut learned, &[1000]), 0);
        let polled: Duration = (0..700).map(|_| learned.next()).sum();
        assert_eq!(polled, 100 * LONGEST);
        assert_eq!(after(&mut learned, &[8]), 12);
    }

    #[test]
    fn datagrams_that_were_there_are_no_waits() {
        let mut learned = Learned::new();
        after(&mut learned, &[1000]);
        for _ in 0..100 {
            learned.note(LONGEST, Some(Duration::from_nanos(200)));
        }
        assert_eq!(learned.best, Duration::ZERO);
    }
}
