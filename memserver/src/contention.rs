//! Whether other threads want the processor of this one.
//!
//! The kernel counts how long a thread ran, and how long it was ready to run while others did (`/proc/PID/schedstat`,
//! Linux `Documentation/scheduler/sched-stats.rst`). A thread that waits for much of this time shares its processor with
//! others that have work, also if these poll and give way to it, so that each of its waits is short.
//!
//! A thread also waits on a machine with nothing else to do: the kernel lets a thread that is woken run where the one runs
//! that wakes it, so a giver and a taker that rest between bursts share a processor while others are idle. So it also counts
//! what others do at all.
//!
//! Others that poll and give way seem to have no work beside a thread that takes all it can get. So at first, and from time
//! to time, the processor counts as wanted until it is known what they do meanwhile.

mod others;

#[cfg(test)]
mod tests;

use core::time::Duration;
use std::{fs::File, os::unix::fs::FileExt};

use bluebridge_protocol::Timestamp;

use self::others::Others;

/// The times of the thread that opens it.
const PATH: &str = "/proc/thread-self/schedstat";

/// How often the times are read.
const INTERVAL: Duration = Duration::from_millis(10);

/// How often it looks again while it works at full rate: when so much of the machine's time has passed, so that all threads
/// of all servers on the machine look at the same time. Otherwise one would see clients give way to another one.
const LOOKS: Duration = Duration::from_secs(2);

/// What was before a longer gap says nothing about now: the meter begins anew. A taker rests for less.
const GAP: Duration = Duration::from_millis(200);

/// At each reading, the times of before count this much less: a quarter is left after 100 ms.
const DECAY: u64 = 8;

/// A thread that was ready for less time says nothing yet.
const ENOUGH: Duration = Duration::from_millis(1);

/// The share of the time in which it is ready that it waits while others have work: measured 40 to 70 % beside clients that
/// use all processors, and up to 24 % if only a giver and a taker move lines.
const SHARE: (u64, u64) = (1, 3);

/// The times of one thread, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct Times {
    ran: u64,
    waited: u64,
}

/// A meter of the thread that first reads it.
#[derive(Debug, Default)]
pub(crate) struct Contention {
    /// `None` before the first reading, or if the kernel does not count.
    file: Option<File>,
    is_begun: bool,
    read_at: Timestamp,
    last: Times,
    lately: Times,
    others: Others,
    is_contended: bool,
    /// It is not known yet what others do while this thread does little.
    is_looking: bool,
    began_at: Timestamp,
}

impl Contention {
    /// One that has just found out that others want the processor.
    #[cfg(test)]
    pub(crate) fn of_a_busy_processor(now: Timestamp) -> Self {
        Self { is_begun: true, read_at: now, is_contended: true, ..Self::default() }
    }

    /// One that knows that nobody does.
    #[cfg(test)]
    pub(crate) fn of_an_idle_processor(now: Timestamp) -> Self {
        Self { is_begun: true, read_at: now, began_at: now, ..Self::default() }
    }

    /// Whether others want the thread's processor, or may do so. Where the kernel does not count it, nobody seems to.
    pub(crate) fn is_contended(&mut self, now: Timestamp) -> bool {
        let since = now.saturating_since(self.read_at);
        if !self.is_begun {
            self.is_begun = true;
            self.begin(now);
        } else if since >= GAP {
            self.begin(now);
        } else if since >= INTERVAL {
            let is_at_full_rate = !self.is_contended && !self.is_looking;
            if is_at_full_rate && period(now) != period(self.began_at) {
                self.begin(now);
            } else {
                self.read_at = now;
                let has_looked = self.others.look(now);
                self.is_looking = self.is_looking && !has_looked && !self.others.are_idle(now);
                if let Some(times) = self.read() {
                    self.note(times);
                }
            }
        }
        self.is_contended || self.is_looking
    }

    fn begin(&mut self, now: Timestamp) {
        (self.read_at, self.began_at) = (now, now);
        // It may have had too many files open.
        self.file = self.file.take().or_else(|| File::open(PATH).ok());
        let times = self.read();
        self.is_looking = times.is_some();
        self.last = times.unwrap_or_default();
        (self.lately, self.is_contended) = (Times::default(), false);
        self.others.begin(now);
    }

    fn read(&self) -> Option<Times> {
        // Three numbers of up to 20 digits.
        let mut text = [0; 64];
        let length = self.file.as_ref()?.read_at(&mut text, 0).ok()?;
        parse(text.get(..length)?)
    }

    fn note(&mut self, times: Times) {
        let since = |now: u64, before: u64| now.saturating_sub(before);
        let ran = since(times.ran, self.last.ran);
        let waited = since(times.waited, self.last.waited);
        self.last = times;
        let left = |time: u64| time - time / DECAY;
        self.lately.ran = left(self.lately.ran).saturating_add(ran);
        self.lately.waited = left(self.lately.waited).saturating_add(waited);
        let ready = self.lately.ran.saturating_add(self.lately.waited);
        if u128::from(ready) >= ENOUGH.as_nanos() {
            let (part, whole) = SHARE;
            let waits = self.lately.waited.saturating_mul(whole) > ready.saturating_mul(part);
            self.is_contended = waits && self.others.have_work();
        }
    }
}

/// The number of a moment's period.
const fn period(at: Timestamp) -> u128 {
    at.as_nanos() as u128 / LOOKS.as_nanos()
}

/// The time that a thread ran and waited, of the text of its file.
fn parse(text: &[u8]) -> Option<Times> {
    let mut numbers = text
        .split(u8::is_ascii_whitespace)
        .map(|number| str::from_utf8(number).ok().and_then(|number| number.parse::<u64>().ok()));
    Some(Times { ran: numbers.next()??, waited: numbers.next()?? })
}
