//! How many lines are on their way at once.
//!
//! Moving memory is not urgent, and its clients' requests are. So the number follows the delay, as LEDBAT does (RFC 6817,
//! section 2.4.2): it grows while lines wait little longer than they must, and shrinks when they wait longer, because
//! then somebody else uses the servers, the processors or the network. Without other work the lines delay each other,
//! which bounds the number, too.

use core::time::Duration;

/// The most lines on their way, for each of which the taker has a buffer.
pub(super) const LINES_MAX: u32 = 16;

/// How much longer than the fastest line a line may take: about as long as ten lines take one after the other.
const TARGET: Duration = Duration::from_micros(400);

/// Lines after which the fastest of them is forgotten with the next ones: the path may have become longer.
const HISTORY: u32 = 4096;

/// Parts of a line in which the number changes.
const PARTS: u64 = 256;

/// How much faster than it grows the number may shrink.
const HASTE: i64 = 4;

/// The number of lines on their way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// In [`PARTS`] of a line.
    parts: u64,
    /// The fastest line of the present history, and of the one before.
    fastest: [Duration; 2],
    count: u32,
}

impl Pace {
    pub(super) const fn new() -> Self {
        Self { parts: 4 * PARTS, fastest: [Duration::MAX; 2], count: 0 }
    }

    /// How many lines may be on their way; at least one.
    pub(super) fn lines(&self) -> usize {
        usize::try_from(self.parts / PARTS).unwrap_or(1)
    }

    /// A line is here, so long after it was asked for.
    pub(super) fn took(&mut self, time: Duration) {
        self.count += 1;
        if self.count == HISTORY {
            self.fastest = [Duration::MAX, self.fastest[0]];
            self.count = 0;
        }
        self.fastest[0] = self.fastest[0].min(time);
        let least = self.fastest[0].min(self.fastest[1]);
        let micros = |time: Duration| i64::try_from(time.as_micros()).unwrap_or(i64::MAX);
        let (target, waited) = (micros(TARGET), micros(time.saturating_sub(least)));
        let share = (target.saturating_sub(waited)).max(-HASTE * target);
        // Once per round of all lines the number changes by one line times the share of the target that is left.
        let parts = i64::try_from(PARTS * PARTS / self.parts).unwrap_or(1);
        let parts = self.parts.saturating_add_signed(parts * share / target);
        self.parts = parts.clamp(PARTS, u64::from(LINES_MAX) * PARTS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: Duration = Duration::from_micros(80);

    /// Lines that wait for each other, each for `each`, and for others.
    fn run(pace: &mut Pace, count: u32, each: Duration, others: Duration) -> usize {
        for _ in 0..count {
            let lines = u32::try_from(pace.lines()).expect("few");
            pace.took(LEAST + each * (lines - 1) + others);
        }
        pace.lines()
    }

    #[test]
    fn it_grows_until_lines_delay_each_other_by_the_target() {
        let mut pace = Pace::new();
        let lines = run(&mut pace, 2000, Duration::from_micros(40), Duration::ZERO);
        // Four lines at first, and ten by which they delay each other.
        assert!((12..=15).contains(&lines), "{lines}");
        let lines = run(&mut pace, 2000, Duration::ZERO, Duration::ZERO);
        assert_eq!(lines, LINES_MAX as usize, "nothing delays them");
    }

    #[test]
    fn it_shrinks_to_one_line_while_others_work_and_grows_again() {
        let mut pace = Pace::new();
        let each = Duration::from_micros(40);
        run(&mut pace, 1000, each, Duration::ZERO);
        assert_eq!(run(&mut pace, 100, each, Duration::from_millis(2)), 1);
        assert!(run(&mut pace, 1000, each, Duration::ZERO) >= 9);
    }

    #[test]
    fn it_learns_that_the_path_has_become_longer() {
        let mut pace = Pace::new();
        run(&mut pace, 100, Duration::ZERO, Duration::ZERO);
        let longer = Duration::from_millis(1);
        assert_eq!(run(&mut pace, HISTORY, Duration::ZERO, longer), 1);
        assert!(run(&mut pace, 2 * HISTORY, Duration::ZERO, longer) > 10);
    }

    #[test]
    fn any_time_is_valid() {
        let mut pace = Pace::new();
        for time in [Duration::ZERO, Duration::MAX, Duration::ZERO, Duration::from_secs(9)] {
            pace.took(time);
            assert!((1..=LINES_MAX as usize).contains(&pace.lines()));
        }
    }
}
