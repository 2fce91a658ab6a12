//! How much others do with the processors that a thread may use.
//!
//! The kernel counts what each processor did (`/proc/stat`, Linux `Documentation/filesystems/proc.rst`, section 1.7), and
//! what this process did. Where lines move, their giver may be on the same machine, and does not count as another one: it
//! does at most as much as their taker. On a single processor it does, because nothing tells it from others there.

use core::time::Duration;
use std::{fs::File, os::unix::fs::FileExt};

use bluebridge_protocol::Timestamp;
use rustix::{
    param::clock_ticks_per_second,
    thread::{CpuSet, sched_getaffinity},
    time::{ClockId, clock_gettime},
};

const PATH: &str = "/proc/stat";

/// A line of a processor is not longer: its name, and ten numbers.
const LINE_BYTES: usize = 8 + 10 * 21;

/// How often the processors are looked at: the kernel counts ticks of 10 ms, and a look takes some 6 us with two
/// processors.
const INTERVAL: Duration = Duration::from_millis(50);

/// After so long it is seen whether the processors have next to nothing to do: the kernel counts idle time exactly, but
/// tells it in ticks.
const GLANCE: Duration = Duration::from_millis(20);

/// At each look, the times of before count this much less.
const DECAY: u64 = 2;

/// The share of the processors' time from which on others have work: measured up to 7 % if only a giver and a taker move
/// lines, 40 to 80 % beside clients that use all processors, and 25 % beside the same clients if lines move at full rate.
const SHARE: (u64, u64) = (1, 8);

const NANOS: u64 = 1_000_000_000;

/// What was done since some moment, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct Work {
    /// The time of all processors.
    all: u64,
    /// The part of it in which they were not idle.
    busy: u64,
    /// What this process did, and a giver of this thread; only what the thread did, if it may use one processor only.
    own: u64,
}

impl Work {
    /// Whether the processors were idle for at least three quarters of the time: a thread that does little, and its giver,
    /// leave about so much. In few ticks clients may seem to leave as much; then the next look finds them.
    const fn is_little_since(&self, last: &Self) -> bool {
        let all = self.all.saturating_sub(last.all);
        all > 0 && self.busy.saturating_sub(last.busy) <= all / 4
    }
}

/// A meter of the work of others. Where the kernel does not count it, they always have some.
#[derive(Debug, Default)]
pub(super) struct Others {
    processors: Option<Processors>,
    looked_at: Timestamp,
    last: Option<Work>,
    /// The time of all processors lately, and what others did in it.
    lately: (u64, u64),
}

impl Others {
    /// Begins anew: what others do is not known.
    pub(super) fn begin(&mut self, now: Timestamp) {
        // The operator may have changed which ones it may use.
        self.processors = Processors::open();
        (self.looked_at, self.lately) = (now, (0, 0));
        self.last = self.read();
    }

    /// Looks, if it is time. Returns whether it did.
    pub(super) fn look(&mut self, now: Timestamp) -> bool {
        let is_time = now.saturating_since(self.looked_at) >= INTERVAL;
        if is_time {
            self.looked_at = now;
            let work = self.read();
            self.note(work);
        }
        is_time
    }

    /// Whether the processors had next to nothing to do since the last look, if that was some time ago.
    pub(super) fn are_idle(&mut self, now: Timestamp) -> bool {
        if now.saturating_since(self.looked_at) < GLANCE {
            return false;
        }
        let last = self.last;
        self.read().zip(last).is_some_and(|(work, last)| work.is_little_since(&last))
    }

    /// Whether they have work; not as long as nothing is known.
    pub(super) const fn have_work(&self) -> bool {
        let (all, others) = self.lately;
        let (part, whole) = SHARE;
        self.last.is_none() || others.saturating_mul(whole) > all.saturating_mul(part)
    }

    fn read(&mut self) -> Option<Work> {
        let processors = self.processors.as_mut()?;
        let Ticks { all, busy } = processors.ticks()?;
        let nanos = |ticks: u64| ticks.saturating_mul(NANOS / clock_ticks_per_second().max(1));
        let thread = time_of(ClockId::ThreadCPUTime);
        // The other shards of the process do not count as others. A giver does as much as this thread.
        let is_one = processors.allowed.count() == 1;
        let rest = if is_one { 0 } else { time_of(ClockId::ProcessCPUTime) };
        let own = thread.saturating_add(rest);
        Some(Work { all: nanos(all), busy: nanos(busy), own })
    }

    fn note(&mut self, work: Option<Work>) {
        let last = core::mem::replace(&mut self.last, work);
        let Some((work, last)) = work.zip(last) else { return };
        let all = work.all.saturating_sub(last.all);
        let busy = work.busy.saturating_sub(last.busy);
        let own = work.own.saturating_sub(last.own);
        let others = busy.saturating_sub(own);
        let left = |time: u64| time - time / DECAY;
        self.lately =
            (left(self.lately.0).saturating_add(all), left(self.lately.1).saturating_add(others));
    }
}

/// What a clock of used time says, in nanoseconds.
fn time_of(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    let part = |number: i64| u64::try_from(number).unwrap_or(0);
    part(time.tv_sec).saturating_mul(NANOS).saturating_add(part(time.tv_nsec))
}

/// What processors did since the machine started, in ticks of the kernel.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct Ticks {
    all: u64,
    busy: u64,
}

/// The processors that the thread which opened it may use.
#[derive(Debug)]
struct Processors {
    file: File,
    allowed: CpuSet,
    text: Vec<u8>,
}

impl Processors {
    /// `None` if the kernel does not tell.
    fn open() -> Option<Self> {
        let allowed = sched_getaffinity(None).ok()?;
        let last = (0..CpuSet::MAX_CPU).rev().find(|number| allowed.is_set(*number))?;
        // The first line is of all processors.
        let text = vec![0; LINE_BYTES * (last + 2)];
        Some(Self { file: File::open(PATH).ok()?, allowed, text })
    }

    fn ticks(&mut self) -> Option<Ticks> {
        let mut length = 0;
        // The kernel gives it in parts.
        while let Some(rest) = self.text.get_mut(length..).filter(|rest| !rest.is_empty()) {
            match self.file.read_at(rest, length as u64).ok()? {
                0 => break,
                count => length += count,
            }
        }
        let allowed = |number| number < CpuSet::MAX_CPU && self.allowed.is_set(number);
        Some(parse(self.text.get(..length)?, allowed)).filter(|ticks| ticks.all > 0)
    }
}

/// The sums of the processors that are allowed.
fn parse(text: &[u8], allowed: impl Fn(usize) -> bool) -> Ticks {
    let mut sums = Ticks::default();
    for line in text.split(|byte| *byte == b'\n') {
        let mut words = line.split(u8::is_ascii_whitespace);
        let name = words.next().and_then(|name| name.strip_prefix(b"cpu"));
        let Some(processor) = name.and_then(number::<usize>) else { continue };
        if !allowed(processor) {
            continue;
        }
        // User, nice, system, idle, waiting for a disk, and others; the time of guests is in the first two.
        for (at, ticks) in words.take(8).map(number::<u64>).enumerate() {
            let ticks = ticks.unwrap_or(0);
            sums.all = sums.all.saturating_add(ticks);
            if !matches!(at, 3 | 4) {
                sums.busy = sums.busy.saturating_add(ticks);
            }
        }
    }
    sums
}

fn number<T: core::str::FromStr>(text: &[u8]) -> Option<T> {
    str::from_utf8(text).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[derive(Default)]
    struct Machine {
        others: Others,
        work: Work,
    }

    impl Machine {
        fn pass(&mut self, [all, busy, own]: [u64; 3]) -> bool {
            self.work.all += all * MS;
            self.work.busy += busy * MS;
            self.work.own += own * MS;
            self.others.note(Some(self.work));
            self.others.have_work()
        }
    }

    #[test]
    fn what_this_process_and_as_much_beside_it_do_is_not_of_others() {
        let mut machine = Machine::default();
        assert!(machine.others.have_work(), "the kernel does not tell");
        assert!(!machine.pass([100, 100, 0]), "only a difference says something");
        assert!(!machine.pass([100, 100, 90]), "a taker and its giver");
        assert!(!machine.pass([100, 20, 20]), "with rests");
        for _ in 0..8 {
            machine.pass([100, 100, 20]);
        }
        assert!(machine.pass([100, 80, 20]), "with rests, beside others");
        for _ in 0..8 {
            machine.pass([100, 12, 0]);
        }
        assert!(!machine.pass([100, 12, 0]), "others do little");
        assert!(machine.pass([100, 100, 60]), "others have what is left");
        machine.others.note(None);
        assert!(machine.others.have_work(), "the kernel does not tell any more");
    }

    #[test]
    fn processors_with_most_of_their_time_left_are_idle() {
        let work = |all, busy| Work { all, busy, own: 0 };
        let last = work(70, 60);
        assert!(work(110, 70).is_little_since(&last));
        assert!(!work(110, 80).is_little_since(&last));
        assert!(!last.is_little_since(&last), "no time has passed");
        assert!(!work(10, 10).is_little_since(&last), "its clock went back");
    }

    #[test]
    fn any_numbers_are_valid() {
        let mut others = Others::default();
        let works = [[u64::MAX; 3], [0; 3], [u64::MAX, 0, 0], [0, u64::MAX, 0], [0, 0, u64::MAX]];
        for [all, busy, own] in works.iter().chain(&works).copied() {
            others.note(Some(Work { all, busy, own }));
            others.have_work();
            others.are_idle(Timestamp::ZERO + INTERVAL);
        }
    }

    #[test]
    fn the_ticks_of_the_allowed_processors_are_added() {
        let text = b"cpu  9 9 9 9 9 9 9 9 9 9\n\
            cpu0 1 2 3 40 5 6 7 8 1 2\n\
            cpu1 1 1 1 1 1 1 1 1 0 0\n\
            cpu10 0 0 1000 0 0 0 0 0 0 0\n\
            cpux 5 5 5 5\ncpu2 1 a\nintr 12 4\ncpu3";
        let of = |allowed: &[usize]| parse(text, |number| allowed.contains(&number));
        assert_eq!(of(&[0]), Ticks { all: 72, busy: 27 });
        assert_eq!(of(&[0, 1]), Ticks { all: 80, busy: 33 });
        assert_eq!(of(&[2, 3]), Ticks { all: 1, busy: 1 });
        assert_eq!(of(&[]), Ticks::default());
    }

    /// A kernel that hides its processors makes `last` empty.
    #[test]
    fn what_the_kernel_tells_grows_and_is_not_more_than_there_was() {
        let mut others = Others::default();
        others.begin(Timestamp::ZERO);
        let Some(first) = others.last else {
            assert!(others.have_work(), "so that moves are as slow as without this meter");
            return;
        };
        let began = std::time::Instant::now();
        while others.read().is_some_and(|work| work.all == first.all) {
            assert!(began.elapsed() < Duration::from_secs(20), "its clock stands still: {first:?}");
        }
        let next = others.read().expect("it told before");
        assert!(next.own > first.own, "this thread worked: {first:?} {next:?}");
        assert!(next.busy >= first.busy, "{first:?} {next:?}");
    }
}
