//! A thread that polls for datagrams gives way to others that want its core.
//!
//! The thread for which it waits is often one of them: a server whose core is taken by clients that poll for its responses
//! can only answer when they have stopped. So it yields now and then, and the time in which others had the core is not
//! time of polling: nobody wasted it. If one of them keeps the core, the wait goes on asleep: the scheduler treats a thread
//! that wakes up better than one that yielded.

use core::time::Duration;

use crate::{Polled, Timestamp, Wait};

/// Yielding takes less time than this, unless another thread ran.
const ALONE: Duration = Duration::from_micros(1);

/// Others may have the core for so long during one wait. Servers and clients that poll or sleep are done sooner; one that
/// computes has it until the scheduler's next tick, for milliseconds.
const LONGEST_AWAY: Duration = Duration::from_millis(1);

/// The most rounds of polls between two yields. While nobody wants the core, yields only cost time.
const MOST_ROUNDS: u32 = 8;

/// Polling in the waits of one carrier.
#[derive(Debug)]
pub(crate) struct Polling {
    /// Rounds of polls between two yields.
    interval: u32,
    /// Rounds since the last yield.
    rounds: u32,
    /// The rest is about the latest wait. How long to poll.
    budget: Duration,
    polled: Duration,
    /// The time in which others had the core.
    away: Duration,
    now: Timestamp,
    deadline: Timestamp,
    outcome: Polled,
}

impl Polling {
    pub(crate) const fn new() -> Self {
        Self {
            interval: MOST_ROUNDS,
            rounds: 0,
            budget: Duration::ZERO,
            polled: Duration::ZERO,
            away: Duration::ZERO,
            now: Timestamp::ZERO,
            deadline: Timestamp::ZERO,
            outcome: Polled::Nothing,
        }
    }

    /// A call that took what was there; `false`: there was nothing, and it did not wait.
    pub(crate) const fn at_once(&mut self, has_found: bool) {
        self.outcome = if has_found { Polled::Found(Duration::ZERO) } else { Polled::Nothing };
    }

    /// A wait begins.
    pub(crate) const fn begin(&mut self, wait: Wait, now: Timestamp) {
        (self.budget, self.deadline, self.now) = (wait.spin, wait.deadline, now);
        (self.polled, self.away) = (Duration::ZERO, Duration::ZERO);
        self.outcome = Polled::Nothing;
    }

    /// Whether to do another round of polls.
    pub(crate) fn goes_on(&self) -> bool {
        self.polled < self.budget && self.away < LONGEST_AWAY && self.now < self.deadline
    }

    /// A round of polls found nothing. Returns whether to yield now.
    pub(crate) fn polled_until(&mut self, now: Timestamp) -> bool {
        self.polled += now.saturating_since(self.now);
        self.now = now;
        self.rounds += 1;
        self.rounds >= self.interval && self.goes_on()
    }

    /// It has yielded.
    pub(crate) fn yielded_until(&mut self, now: Timestamp) {
        let time = now.saturating_since(self.now);
        (self.now, self.rounds) = (now, 0);
        if time < ALONE {
            self.polled += time;
            self.interval = (self.interval + 1).min(MOST_ROUNDS);
            return;
        }
        self.interval = 1;
        self.away += time;
        if self.away >= LONGEST_AWAY {
            self.outcome = Polled::Displaced;
        }
    }

    /// A poll found something.
    pub(crate) const fn found(&mut self) {
        self.outcome = Polled::Found(self.polled);
    }

    /// The last clock reading of the wait.
    pub(crate) const fn now(&self) -> Timestamp {
        self.now
    }

    pub(crate) const fn outcome(&self) -> Polled {
        self.outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);
    const ROUND: Duration = US;
    const YIELD: Duration = Duration::from_nanos(300);

    /// Polls for 50 us in rounds of 1 us, and finds what arrives after a time of polling. Others take the core for a time
    /// at each yield. Returns how often it yielded.
    fn wait(polling: &mut Polling, others: Duration, arrives: Option<Duration>) -> u32 {
        let mut now = Timestamp::ZERO + Duration::from_secs(1);
        polling.begin(Wait::polling(50 * US), now);
        let mut yields = 0;
        while polling.goes_on() {
            if arrives.is_some_and(|arrives| polling.polled >= arrives) {
                polling.found();
                break;
            }
            now = now + ROUND;
            if polling.polled_until(now) {
                yields += 1;
                now = now + YIELD + others;
                polling.yielded_until(now);
            }
        }
        assert_eq!(polling.now(), now);
        yields
    }

    #[test]
    fn it_yields_seldom_while_nobody_wants_the_core_and_each_time_while_somebody_does() {
        let mut polling = Polling::new();
        assert_eq!(wait(&mut polling, Duration::ZERO, None), 6, "50 us, each 8 rounds and a yield");
        assert_eq!(polling.outcome(), Polled::Nothing);
        wait(&mut polling, 5 * US, None);
        assert_eq!(wait(&mut polling, 5 * US, None), 49, "after each round but the last");
        assert_eq!(polling.outcome(), Polled::Nothing);
        let yields: Vec<u32> = (0..4).map(|_| wait(&mut polling, Duration::ZERO, None)).collect();
        assert!(yields.is_sorted_by(|a, b| a >= b) && yields[0] < 15, "{yields:?}");
        assert_eq!(yields[3], 6);
    }

    #[test]
    fn the_time_of_others_is_not_polled() {
        let mut polling = Polling::new();
        for others in [Duration::ZERO, 5 * US, 60 * US] {
            wait(&mut polling, others, Some(12 * US));
            let Polled::Found(polled) = polling.outcome() else { panic!("{polling:?}") };
            assert!((12 * US..14 * US).contains(&polled), "{others:?}: {polled:?}");
        }
    }

    #[test]
    fn a_thread_that_keeps_the_core_ends_the_polling() {
        let mut polling = Polling::new();
        assert_eq!(wait(&mut polling, 4000 * US, Some(20 * US)), 1);
        assert_eq!(polling.outcome(), Polled::Displaced);
        // Many that together keep it.
        let yields = wait(&mut polling, 100 * US, Some(20 * US));
        assert_eq!((yields, polling.outcome()), (10, Polled::Displaced));
        // The next wait begins anew.
        wait(&mut polling, Duration::ZERO, Some(20 * US));
        assert!(matches!(polling.outcome(), Polled::Found(_)));
    }

    #[test]
    fn waits_without_polling_find_what_is_there_or_nothing() {
        let mut polling = Polling::new();
        polling.at_once(true);
        assert_eq!(polling.outcome(), Polled::Found(Duration::ZERO));
        polling.at_once(false);
        assert_eq!(polling.outcome(), Polled::Nothing);
        let now = Timestamp::ZERO + 9 * US;
        polling.begin(Wait::until(now + US), now);
        assert!(!polling.goes_on());
        // The deadline comes first.
        polling.begin(Wait::spinning(50 * US, now + US), now);
        assert!(polling.goes_on());
        assert!(!polling.polled_until(now + US));
        assert!(!polling.goes_on());
    }
}
