//! How many lines are on their way at once.
//!
//! Moving memory is not urgent, and its clients' requests are. So the number follows the delay, as LEDBAT does (RFC 6817,
//! section 2.4.2): it grows while lines wait little longer than they must, and shrinks when they wait longer, because
//! then somebody else uses the servers, the processors or the network. Without other work the lines delay each other,
//! which bounds the number, too.
//!
//! On a processor that others want, too, lines need not wait long to take much from these: clients that poll give way to
//! the servers. So there the number is the smallest one.
//!
//! Few lines at once would wake two processes three times for each of them, which costs clients more than the lines
//! themselves. So no fewer than a burst are taken at once, and a smaller number is kept by rests between the bursts.
//!
//! After a rest all processes sleep and all caches are cold, so the lines of a burst take longer than others, also on
//! an idle machine. They are compared with each other only: compared with the lines of before, they would look as if
//! somebody else worked, and the rests would never end.

use core::time::Duration;

use crate::Timestamp;

/// The most lines on their way.
pub(super) const LINES_MAX: u32 = 48;

/// The lines of a burst.
const BURST: u32 = 4;

/// The smallest number on average, in parts: bursts take a fifth of the time then, as long as rests are no longer than the
/// longest.
const FEWEST: u64 = BURST as u64 * PARTS / 5;

/// So many at most share the smallest number.
const TAKERS_MAX: u32 = 16;

/// The time of a loss: that of a READ.
const LOSS: Duration = Duration::from_millis(200);

/// The longest rest, also of several who share the smallest number: a meter of what others do is read between rests.
const REST_MAX: Duration = Duration::from_millis(100);

/// How much longer than the fastest line a line may take: about as long as all lines take one after the other.
const TARGET: Duration = Duration::from_micros(1500);

/// Lines after which the fastest of them is forgotten with the next ones: the path may have become longer.
const HISTORY: u32 = 4096;

/// The same for lines between rests: beside others no processor sleeps, so their lines are faster than those after a rest on
/// an idle machine. It is forgotten within a second or two that others worked.
const RESTED_HISTORY: u32 = 256;

/// Parts of a line in which the number changes.
const PARTS: u64 = 256;

/// How much faster than it grows the number may shrink.
const HASTE: i64 = 4;

/// The number of lines on their way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// In [`PARTS`] of a line.
    parts: u64,
    /// What lines take that follow each other without rests.
    steady: Fastest,
    /// What lines take in bursts between rests.
    rested: Fastest,
    burst: Burst,
    /// Whether others want the processor.
    is_contended: bool,
    /// How many take lines on this processor, with this one; they share the smallest number.
    takers: u32,
    /// The number when others began to want the processor.
    before: u64,
    /// Before that, another loss says nothing new.
    lost_until: Timestamp,
}

/// The fastest line of the present history, and of the one before.
#[derive(Clone, Copy, Debug)]
struct Fastest {
    times: [Duration; 2],
    count: u32,
    history: u32,
}

impl Fastest {
    /// None yet; of so many lines.
    const fn of(history: u32) -> Self {
        Self { times: [Duration::MAX; 2], count: 0, history }
    }

    /// Takes a line into account. Returns the time of the fastest.
    fn with(&mut self, time: Duration) -> Duration {
        self.count += 1;
        if self.count == self.history {
            self.times = [Duration::MAX, self.times[0]];
            self.count = 0;
        }
        self.times[0] = self.times[0].min(time);
        self.times[0].min(self.times[1])
    }
}

/// What a number below that of a burst is doing.
#[derive(Clone, Copy, Debug)]
enum Burst {
    /// No burst has begun.
    None,
    /// A burst began then.
    Since(Timestamp),
    /// The rest after a burst, and its end.
    Rest(Timestamp),
}

impl Pace {
    pub(super) const fn new() -> Self {
        Self {
            parts: BURST as u64 * PARTS,
            steady: Fastest::of(HISTORY),
            rested: Fastest::of(RESTED_HISTORY),
            burst: Burst::None,
            is_contended: false,
            takers: 1,
            before: 0,
            lost_until: Timestamp::ZERO,
        }
    }

    /// Whether others than those who take lines want the processor, and how many take lines on it, with this one.
    pub(super) fn set_contended(&mut self, is_contended: bool, takers: u32) {
        self.takers = takers.clamp(1, TAKERS_MAX);
        match (self.is_contended, is_contended) {
            (false, true) => self.before = self.parts,
            // No more than a burst: if others begin again, they must not wait for many lines.
            (true, false) => self.parts = self.before.min(u64::from(BURST) * PARTS).max(self.parts),
            _ => {}
        }
        if is_contended {
            self.parts = self.fewest();
        }
        self.is_contended = is_contended;
    }

    /// The smallest number now, in parts.
    fn fewest(&self) -> u64 {
        FEWEST / u64::from(self.takers)
    }

    /// What a line was to bring has not come in time. Lines that are lost together count once.
    pub(super) fn lost(&mut self, now: Timestamp) {
        if now >= self.lost_until {
            self.lost_until = now + LOSS;
            self.parts = (self.parts / 2).max(self.fewest());
        }
    }

    /// How many lines may be on their way on average; 0 for less than one.
    fn lines(&self) -> u32 {
        u32::try_from(self.parts / PARTS).unwrap_or(LINES_MAX)
    }

    /// How many further lines may be taken now that so many are on their way, without those that wait for somebody else.
    pub(super) fn room(&mut self, now: Timestamp, on_their_way: u32) -> u32 {
        if self.lines() >= BURST {
            self.burst = Burst::None;
            return self.lines().saturating_sub(on_their_way);
        }
        self.burst = match self.burst {
            Burst::Rest(until) if until <= now => Burst::None,
            burst => burst,
        };
        // One that takes long does not delay the others.
        if on_their_way > 1 {
            return 0;
        }
        if let Burst::Since(burst_at) = self.burst {
            let took =
                u32::try_from(now.saturating_since(burst_at).as_micros()).unwrap_or(u32::MAX);
            let missing = u64::from(BURST) * PARTS - self.parts;
            let rest = Duration::from_micros(u64::from(took) * missing / self.parts);
            if !rest.is_zero() {
                self.burst = Burst::Rest(now + rest.min(REST_MAX));
            }
        }
        if let Burst::Rest(_) = self.burst {
            return 0;
        }
        self.burst = Burst::Since(now);
        BURST - on_their_way
    }

    /// The end of the rest; `None` if there is none now.
    pub(super) const fn rest_until(&self) -> Option<Timestamp> {
        match self.burst {
            Burst::Rest(until) => Some(until),
            Burst::None | Burst::Since(_) => None,
        }
    }

    /// A line is here, so long after it was asked for.
    pub(super) fn took(&mut self, time: Duration) {
        let is_rested = self.lines() < BURST;
        let least = if is_rested { self.rested.with(time) } else { self.steady.with(time) };
        let micros = |time: Duration| i64::try_from(time.as_micros()).unwrap_or(i64::MAX);
        let (target, waited) = (micros(TARGET), micros(time.saturating_sub(least)));
        let share = (target.saturating_sub(waited)).max(-HASTE * target);
        // Once per round of all lines the number changes by one line times the share of the target that is left.
        let parts = i64::try_from(PARTS * PARTS / self.parts.max(PARTS)).unwrap_or(1);
        let parts = self.parts.saturating_add_signed(parts * share / target);
        let fewest = self.fewest();
        let most = if self.is_contended { fewest } else { u64::from(LINES_MAX) * PARTS };
        self.parts = parts.clamp(fewest, most);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: Duration = Duration::from_micros(80);

    /// Lines that wait for each other, each for `each`, and for others, except one of eight.
    fn run(pace: &mut Pace, count: u32, each: Duration, others: Duration) -> u32 {
        for at in 0..count {
            let others = if at % 8 == 7 { Duration::ZERO } else { others };
            pace.took(LEAST + each * pace.lines().saturating_sub(1) + others);
        }
        pace.lines()
    }

    /// The lines of as many bursts, of which each takes a time, and how long all bursts and rests take.
    fn bursts(pace: &mut Pace, count: u32, each: Duration) -> (u32, Duration) {
        let (mut now, mut lines) = (pace.rest_until().unwrap_or(Timestamp::ZERO), 0);
        let began = now;
        for _ in 0..count {
            lines += pace.room(now, 0);
            assert_eq!((pace.room(now, 2), pace.rest_until()), (0, None), "a burst is under way");
            now = now + each;
            assert_eq!(pace.room(now, 0), 0);
            now = pace.rest_until().expect("it rests");
        }
        (lines, now - began)
    }

    /// How long so many bursts of a millisecond each take, with their rests, which last whole microseconds.
    fn a_fifth(count: u32) -> Duration {
        let rest = 1000 * (u64::from(BURST) * PARTS - FEWEST) / FEWEST;
        assert!((3990..=4050).contains(&rest), "{rest}");
        Duration::from_micros(1000 + rest) * count
    }

    #[test]
    fn it_grows_until_lines_delay_each_other_by_the_target() {
        let mut pace = Pace::new();
        let lines = run(&mut pace, 2000, Duration::from_micros(60), Duration::ZERO);
        // One line, and the 25 that delay it by the target.
        assert!((24..=28).contains(&lines), "{lines}");
        let lines = run(&mut pace, 2000, Duration::ZERO, Duration::ZERO);
        assert_eq!(lines, LINES_MAX, "nothing delays them");
    }

    #[test]
    fn it_shrinks_to_the_smallest_number_while_others_work_and_grows_again() {
        let mut pace = Pace::new();
        let each = Duration::from_micros(40);
        run(&mut pace, 1000, each, Duration::ZERO);
        run(&mut pace, 500, each, Duration::from_millis(6));
        assert_eq!(pace.parts, FEWEST);
        assert!(run(&mut pace, 1000, each, Duration::ZERO) >= 4);
    }

    #[test]
    fn lines_that_are_slower_after_a_rest_do_not_make_it_rest_for_ever() {
        let mut pace = Pace::new();
        let each = Duration::from_micros(40);
        run(&mut pace, 1000, each, Duration::ZERO);
        run(&mut pace, 500, each, Duration::from_millis(6));
        assert_eq!(pace.parts, FEWEST);
        // Nobody works any more, but everything is cold after a rest.
        let cold = Duration::from_micros(500);
        for _ in 0..2 * RESTED_HISTORY + 100 {
            let after_rest = if pace.lines() < BURST { cold } else { Duration::ZERO };
            pace.took(LEAST + each * (pace.lines().max(BURST) - 1) + after_rest);
        }
        assert!(pace.lines() >= BURST, "{}", pace.lines());
    }

    #[test]
    fn it_learns_that_the_path_has_become_longer() {
        let mut pace = Pace::new();
        run(&mut pace, 100, Duration::ZERO, Duration::ZERO);
        let longer = |pace: &mut Pace, count| {
            (0..count).for_each(|_| pace.took(LEAST + Duration::from_millis(3)));
            pace.lines()
        };
        assert!(longer(&mut pace, 1000) <= BURST);
        assert!(longer(&mut pace, 16 * HISTORY) > 10);
    }

    #[test]
    fn a_number_below_that_of_a_burst_is_kept_by_rests() {
        let mut pace = Pace::new();
        assert_eq!((pace.room(Timestamp::ZERO, 0), pace.room(Timestamp::ZERO, 3)), (4, 1));
        run(&mut pace, 10, Duration::ZERO, Duration::ZERO);
        run(&mut pace, 100, Duration::ZERO, Duration::from_millis(6));
        let ms = Duration::from_millis;
        assert_eq!(bursts(&mut pace, 10, ms(1)), (40, a_fifth(10)), "a fifth of the time");
        assert_eq!(bursts(&mut pace, 2, ms(100)), (8, ms(400)), "no longer rests");
        // One line that waits takes no part.
        let later = Timestamp::ZERO + Duration::from_secs(9);
        assert_eq!((pace.room(later, 2), pace.room(later, 1)), (0, 3));
        // Lines of before: nothing is to be done until they are here.
        let mut slower = Pace::new();
        run(&mut slower, 10, Duration::ZERO, Duration::ZERO);
        run(&mut slower, 100, Duration::ZERO, ms(6));
        assert_eq!((slower.room(later, 4), slower.rest_until()), (0, None));
        // Without rests again.
        run(&mut pace, 2000, Duration::ZERO, Duration::ZERO);
        assert_eq!((pace.room(later, 5), pace.rest_until()), (LINES_MAX - 5, None));
    }

    #[test]
    fn where_others_want_the_processor_it_takes_a_fifth_of_the_time() {
        let mut pace = Pace::new();
        let each = Duration::from_micros(40);
        let ms = Duration::from_millis;
        run(&mut pace, 1000, each, Duration::ZERO);
        pace.set_contended(true, 1);
        assert_eq!(pace.room(Timestamp::ZERO, 4), 0, "lines of before are on their way");
        assert_eq!(pace.room(Timestamp::ZERO, 0), BURST);
        run(&mut pace, 1000, Duration::ZERO, Duration::ZERO);
        assert_eq!(pace.parts, FEWEST, "however fast they are");
        assert_eq!(bursts(&mut pace, 10, ms(1)), (40, a_fifth(10)));
        pace.set_contended(false, 1);
        assert_eq!(pace.lines(), BURST, "nobody does any more");
        pace.set_contended(false, 1);
        assert!(run(&mut pace, 100, each, Duration::ZERO) > BURST);
    }

    /// Each of them rests for longer, so that all together take a fifth of the time.
    #[test]
    fn those_who_take_lines_on_one_processor_share_its_fifth() {
        let ms = Duration::from_millis;
        let times = [1, 2, 4].map(|takers| {
            let mut pace = Pace::new();
            pace.set_contended(true, takers);
            bursts(&mut pace, 10, ms(1)).1 / takers
        });
        // The burst itself has no share: 5, 10 and 20 ms.
        for time in times {
            assert!((ms(50)..ms(52)).contains(&time), "{times:?}");
        }
        let mut many = Pace::new();
        many.set_contended(true, u32::MAX);
        assert!(many.parts > 0 && bursts(&mut many, 1, ms(1)).0 == BURST);
        many.set_contended(false, 0);
        assert_eq!(many.lines(), BURST);
    }

    #[test]
    fn what_is_lost_halves_the_number() {
        let mut pace = Pace::new();
        run(&mut pace, 4000, Duration::ZERO, Duration::ZERO);
        let at = |ms| Timestamp::ZERO + Duration::from_millis(ms);
        (0..99).for_each(|ms| pace.lost(at(ms)));
        assert_eq!(pace.lines(), LINES_MAX / 2, "one loss");
        (0..99).for_each(|loss| pace.lost(at(200 * (1 + loss))));
        assert_eq!(pace.parts, FEWEST);
    }

    #[test]
    fn any_time_is_valid() {
        let mut pace = Pace::new();
        for time in [Duration::ZERO, Duration::MAX, Duration::ZERO, Duration::from_secs(9)] {
            pace.took(time);
            assert!((FEWEST..=u64::from(LINES_MAX) * PARTS).contains(&pace.parts));
        }
    }
}
