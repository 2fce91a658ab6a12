//! The streams of one thread.

use core::cmp::Ordering;

/// Streams at once. Twice the runs of a merge that should be followed, so that streams that have
/// ended or never began do not displace them.
const STREAMS_MAX: usize = 16;

/// Faults outside of streams in which a new stream is searched: two of each of 8 streams.
const RECENT_MAX: usize = 16;

/// Faults that vote for a stride (Leap's smallest window).
const VOTES_MAX: usize = 8;

/// Pages of the first window of a stream if nothing is known.
const START_PAGES: u32 = 2;

/// The longest first window.
const START_PAGES_MAX: u32 = 8;

/// A stream that was confirmed is kept for this many faults of the thread without one of its own.
const IDLE_FAULTS_MAX: u64 = 256;

/// How a stream was found.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Origin {
    /// By recent faults at its stride.
    Spacing,
    /// By the stride of most faults.
    Majority,
}

#[derive(Clone, Copy, Debug)]
struct Stream {
    /// The page of the last fault.
    page: u64,
    /// Not 0.
    stride: i64,
    /// Pages of the window after the last fault.
    count: u32,
    origin: Origin,
    /// Whether a window, or the next page without a window, was confirmed.
    is_confirmed: bool,
    /// The number of the thread's fault that was the stream's last.
    faulted: u64,
}

impl Stream {
    /// The length of the window after this one if this one is confirmed.
    fn grown(&self, limit: u32) -> u32 {
        self.count.saturating_mul(2).max(START_PAGES).min(limit)
    }

    /// How many strides a page is ahead of the stream's last fault: those up to `count` are in the
    /// window, the next one confirms it. A few more are accepted, because the pages after the
    /// window may have been local.
    fn ahead(&self, page: u64) -> Option<u32> {
        let distance = page.wrapping_sub(self.page).cast_signed();
        if distance.checked_rem(self.stride) != Some(0) {
            return None;
        }
        let ahead = u32::try_from(distance.checked_div(self.stride)?).ok()?;
        let furthest = self.count.saturating_add(1).saturating_add(self.count / 2);
        (1..=furthest).contains(&ahead).then_some(ahead)
    }
}

/// The first windows of new streams of one origin.
#[derive(Clone, Copy, Debug)]
struct Start {
    pages: u32,
}

impl Start {
    fn grow(&mut self) {
        self.pages = (self.pages * 2).clamp(1, START_PAGES_MAX);
    }

    const fn shrink(&mut self) {
        self.pages /= 2;
    }
}

/// The result of a fault.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    /// The stride of the window after the page, 0 if there is none.
    pub(super) stride: i64,
    /// The pages of the window.
    pub(super) count: u32,
    /// The pages of the stream's window before that were confirmed.
    pub(super) confirmed: u32,
    /// The length of the window compared with the stream's window before.
    pub(super) change: Ordering,
    /// The pages that the stream's next fault will ask for if it confirms the window, with the page itself; 0 if nothing
    /// says that there will be one.
    pub(super) next: u32,
    /// Whether another stream was given up that had a window but was never confirmed.
    pub(super) shrunk: bool,
}

impl Step {
    const NOTHING: Self =
        Self { stride: 0, count: 0, confirmed: 0, change: Ordering::Equal, next: 0, shrunk: false };
}

/// The streams of a thread, and the faults in which new ones are searched.
#[derive(Debug)]
pub(super) struct Streams {
    streams: [Option<Stream>; STREAMS_MAX],
    /// The last faults outside of streams, the newest first.
    recent: [Option<u64>; RECENT_MAX],
    /// The strides of the last faults, the newest first: of its stream if the fault is of one,
    /// else the distance from the fault before.
    votes: [i64; VOTES_MAX],
    last_page: Option<u64>,
    faults: u64,
    by_spacing: Start,
    by_majority: Start,
}

impl Streams {
    pub(super) const fn new() -> Self {
        Self {
            streams: [None; STREAMS_MAX],
            recent: [None; RECENT_MAX],
            votes: [0; VOTES_MAX],
            last_page: None,
            faults: 0,
            by_spacing: Start { pages: START_PAGES },
            by_majority: Start { pages: START_PAGES },
        }
    }

    /// Notes a fault. A window has at most `limit` pages.
    pub(super) fn fault(&mut self, page: u64, limit: u32) -> Step {
        let last_page = self.last_page.replace(page);
        if last_page == Some(page) {
            // Not loaded yet, or loaded and gone at once: no news.
            return Step::NOTHING;
        }
        self.faults = self.faults.saturating_add(1);
        if let Some(step) = self.continues(page, limit) {
            push(&mut self.votes, step.stride);
            return step;
        }
        let found = self.spacing(page).map(|stride| (stride, Origin::Spacing));
        let found = found.or_else(|| Some((majority(&self.votes)?, Origin::Majority)));
        let delta = last_page.map_or(0, |last| page.wrapping_sub(last).cast_signed());
        push(&mut self.votes, delta);
        push(&mut self.recent, Some(page));
        match found {
            Some((stride, origin)) => self.start(page, stride, origin, limit),
            None => Step::NOTHING,
        }
    }

    /// The step of the stream that the page belongs to: the one whose window ends closest to it.
    fn continues(&mut self, page: u64, limit: u32) -> Option<Step> {
        let faults = self.faults;
        let streams = self.streams.iter_mut().flatten();
        let matching = streams.filter_map(|stream| Some((stream.ahead(page)?, stream)));
        let (ahead, stream) = matching
            .min_by_key(|(ahead, stream)| ahead.abs_diff(stream.count.saturating_add(1)))?;
        let before = stream.count;
        let is_whole = ahead > before;
        stream.count = if is_whole { stream.grown(limit) } else { (before / 2).min(limit) };
        stream.page = page;
        stream.faulted = faults;
        let is_first = is_whole && !core::mem::replace(&mut stream.is_confirmed, true);
        let step = Step {
            stride: stream.stride,
            count: stream.count,
            confirmed: before.min(ahead - 1),
            change: stream.count.cmp(&before),
            next: if is_whole && limit > 0 { stream.grown(limit) + 1 } else { 0 },
            shrunk: false,
        };
        if is_first {
            let origin = stream.origin;
            self.first_windows(origin).grow();
        }
        Some(step)
    }

    /// The stride of a stream of which the page and recent faults are part.
    fn spacing(&self, page: u64) -> Option<i64> {
        let recent = || self.recent.iter().copied().flatten();
        let deltas = || recent().map(|other| page.wrapping_sub(other).cast_signed());
        if let Some(delta) = deltas().find(|delta| delta.unsigned_abs() == 1) {
            return Some(delta);
        }
        deltas().enumerate().find_map(|(place, delta)| {
            let before = page.wrapping_sub_signed(delta.checked_mul(2)?);
            let is_equal = delta != 0 && recent().skip(place + 1).any(|other| other == before);
            is_equal.then_some(delta)
        })
    }

    /// Begins a stream in place of the one that is least likely to continue.
    fn start(&mut self, page: u64, stride: i64, origin: Origin, limit: u32) -> Step {
        let faults = self.faults;
        let worth = |stream: &Option<Stream>| {
            stream.map(|stream| {
                let is_idle = faults.saturating_sub(stream.faulted) > IDLE_FAULTS_MAX;
                (stream.is_confirmed && !is_idle, stream.faulted)
            })
        };
        let count = self.first_windows(origin).pages.min(limit);
        let new = Stream { page, stride, count, origin, is_confirmed: false, faulted: faults };
        let Some(place) = self.streams.iter_mut().min_by_key(|stream| worth(stream)) else {
            return Step::NOTHING;
        };
        let old = place.replace(new);
        let wasted = old.filter(|old| !old.is_confirmed && old.count > 0);
        if let Some(old) = wasted {
            self.first_windows(old.origin).shrink();
        }
        let shrunk = wasted.is_some();
        Step { stride, count, confirmed: 0, change: Ordering::Equal, next: 0, shrunk }
    }

    const fn first_windows(&mut self, origin: Origin) -> &mut Start {
        match origin {
            Origin::Spacing => &mut self.by_spacing,
            Origin::Majority => &mut self.by_majority,
        }
    }
}

/// Adds an entry at the front; the last one is lost.
fn push<T>(entries: &mut [T], entry: T) {
    entries.rotate_right(1);
    if let Some(first) = entries.first_mut() {
        *first = entry;
    }
}

/// The stride that more than half of the votes are for (Boyer and Moore 1981): a candidate
/// survives one pass if it has a majority, and a second pass checks that it has.
fn majority(votes: &[i64]) -> Option<i64> {
    let mut candidate = 0;
    let mut lead = 0_usize;
    for &vote in votes {
        if lead == 0 {
            candidate = vote;
        }
        lead = if vote == candidate { lead + 1 } else { lead - 1 };
    }
    let count = votes.iter().filter(|&&vote| vote == candidate).count();
    (candidate != 0 && count > votes.len() / 2).then_some(candidate)
}
