//! A mixed load on memory that moves meanwhile, which checks every byte and keeps the time of every operation.
//!
//! All workers share its regions. Each page says which page it is and how often it was changed, so whoever reads it
//! knows whether its bytes belong together, are of this page, and are as new as what was acknowledged before.

mod zipf;

use std::{
    ops::Range,
    sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use bluebridge::Event;
use bluebridge::{Client, Error, Pointer, Region};
use bluebridge_transport::Transport;
use bluebridge_wire::address::{LINE_BYTES, PAGE_BYTES};
use rand::{Rng, SeedableRng, rngs::SmallRng};
use serde::Serialize;

use crate::summary::{Samples, Summary};
use zipf::Zipf;

/// Pages at the end of each region, each with a word that is incremented.
const COUNTERS: usize = 16;

/// Bytes of one transfer when the whole region is read or written.
const BULK_BYTES: usize = 1 << 20;

/// What the workers share.
#[derive(Debug)]
pub struct Load {
    regions: Vec<Region>,
    /// Pages of each region, without its counters.
    region_pages: usize,
    has_updates: bool,
    /// How often lines are used, if not alike.
    zipf: Option<Zipf>,
    /// How often each page was changed; stored after the acknowledgement.
    acknowledged: Vec<AtomicU32>,
    phase: AtomicUsize,
    stop: AtomicBool,
    begun: Instant,
}

/// A thread of the load panicked, which is a defect of this program.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("a client's thread panicked")]
pub struct WorkerPanicked;

/// One operation: both times in units of 10 us and 10 ns, so that many fit into memory.
#[derive(Clone, Copy, Debug)]
struct Operation {
    begun: u32,
    took: u32,
}

const BEGUN_UNIT: Duration = Duration::from_micros(10);
const TOOK_NANOS: u32 = 10;

/// Requests that did not go straight to the server that has the page.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
pub struct Detours {
    /// Operations that ended, for comparison.
    pub operations: u64,
    /// First tries that another node than the session's server refused.
    pub astray: u64,
    /// Operations that were told that their page has moved.
    pub moved: u64,
    /// Operations that were sent again after BUSY.
    pub busy: u64,
    /// Requests that were sent again because no response came in time.
    pub retransmitted: u64,
}

impl Detours {
    fn of<T: Transport>(client: &Client<T>) -> Self {
        let count = |event| client.counters().of(event);
        Self {
            operations: count(Event::Success) + count(Event::Failure),
            astray: count(Event::AstrayReturn),
            moved: count(Event::MovedFollow),
            busy: count(Event::BusyRetry),
            retransmitted: count(Event::Retransmit),
        }
    }

    fn since(self, before: Self) -> Self {
        Self {
            operations: self.operations - before.operations,
            astray: self.astray - before.astray,
            moved: self.moved - before.moved,
            busy: self.busy - before.busy,
            retransmitted: self.retransmitted - before.retransmitted,
        }
    }

    /// Adds those of another client, or of another time.
    pub const fn add(&mut self, other: Self) {
        self.operations += other.operations;
        self.astray += other.astray;
        self.moved += other.moved;
        self.busy += other.busy;
        self.retransmitted += other.retransmitted;
    }
}

/// What one or more workers saw.
#[derive(Debug, Default)]
pub struct Seen {
    operations: Vec<Operation>,
    /// Per phase.
    detours: Vec<Detours>,
    increments: u64,
    /// When operations began that failed, in the unit of [`Operation`].
    failed: Vec<u32>,
    /// Operations that failed.
    pub failures: u64,
    /// Reads with bytes that the page could not have then.
    pub wrong_reads: u64,
    /// The first failure or wrong read.
    pub first_failure: Option<String>,
}

/// The load in an interval.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Interval {
    /// Its length.
    pub seconds: f64,
    /// Operations that began in it, per second.
    pub operations_per_second: f64,
    /// How long they took.
    pub latency: Summary,
}

/// The load in a short time, for a plot.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Bucket {
    /// When it began, in seconds since the load began.
    #[serde(rename = "at_s")]
    pub at: f64,
    /// Operations that began in it, per second.
    pub operations_per_second: f64,
    /// Half of them took longer, in microseconds.
    pub p50_us: f64,
    /// One of 100 took longer, in microseconds.
    pub p99_us: f64,
}

impl Seen {
    /// Adds what another worker saw.
    pub fn add(&mut self, other: Self) {
        self.operations.extend(other.operations);
        self.detours.resize(self.detours.len().max(other.detours.len()), Detours::default());
        for (sum, detours) in self.detours.iter_mut().zip(other.detours) {
            sum.add(detours);
        }
        self.increments += other.increments;
        self.failed.extend(other.failed);
        self.failures += other.failures;
        self.wrong_reads += other.wrong_reads;
        self.first_failure = self.first_failure.take().or(other.first_failure);
    }

    /// Detours in a phase, by its number.
    #[must_use]
    pub fn detours(&self, phase: usize) -> Detours {
        self.detours.get(phase).copied().unwrap_or_default()
    }

    /// The operations that began from `from` to `to`, both since the load began.
    #[must_use]
    pub fn interval(&self, from: Duration, to: Duration) -> Interval {
        let (first, end) = (begun_units(from), begun_units(to));
        let mut samples = Samples::default();
        let inside = |one: &&Operation| (first..end).contains(&one.begun);
        for one in self.operations.iter().filter(inside) {
            samples.add(one.took());
        }
        let seconds = to.saturating_sub(from).as_secs_f64();
        let latency = samples.summary();
        #[allow(clippy::cast_precision_loss, reason = "far below 2^53 operations")]
        let operations_per_second = latency.sample_count as f64 / seconds.max(f64::MIN_POSITIVE);
        Interval { seconds, operations_per_second, latency }
    }

    /// How long the slowest operation took that began from `from` to `to`; zero if none did.
    #[must_use]
    pub fn longest(&self, from: Duration, to: Duration) -> Duration {
        let (first, end) = (begun_units(from), begun_units(to));
        let inside = self.operations.iter().filter(|one| (first..end).contains(&one.begun));
        inside.map(|one| one.took()).max().unwrap_or_default()
    }

    /// How many operations failed that began from `from` to `to`.
    #[must_use]
    pub fn failures_in(&self, from: Duration, to: Duration) -> usize {
        let (first, end) = (begun_units(from), begun_units(to));
        self.failed.iter().filter(|begun| (first..end).contains(begun)).count()
    }

    /// The load from `from` to `to`, in steps.
    #[must_use]
    pub fn series(&mut self, from: Duration, to: Duration, step: Duration) -> Vec<Bucket> {
        self.operations.sort_unstable_by_key(|one| one.begun);
        let mut rest = self.operations.as_slice();
        let mut buckets = Vec::new();
        let mut at = from;
        while at + step <= to {
            let before = rest.partition_point(|one| one.begun < begun_units(at));
            let inside = rest.partition_point(|one| one.begun < begun_units(at + step));
            let mut samples = Samples::default();
            rest[before..inside].iter().for_each(|one| samples.add(one.took()));
            rest = &rest[inside..];
            let summary = samples.summary();
            #[allow(clippy::cast_precision_loss, reason = "far below 2^53 operations")]
            let operations_per_second = summary.sample_count as f64 / step.as_secs_f64();
            buckets.push(Bucket {
                at: at.as_secs_f64(),
                operations_per_second,
                p50_us: summary.p50_us,
                p99_us: summary.p99_us,
            });
            at += step;
        }
        buckets
    }

    fn wrong(&mut self, what: impl FnOnce() -> String) {
        self.wrong_reads += 1;
        self.first_failure.get_or_insert_with(what);
    }
}

impl Operation {
    fn took(self) -> Duration {
        Duration::from_nanos(u64::from(self.took) * u64::from(TOOK_NANOS))
    }
}

fn begun_units(time: Duration) -> u32 {
    u32::try_from(time.as_nanos() / BEGUN_UNIT.as_nanos()).unwrap_or(u32::MAX)
}

/// The bytes of a page after a number of changes.
fn fill(bytes: &mut [u8], page: usize, change: u32) {
    let word = word(page, change).to_le_bytes();
    bytes.chunks_exact_mut(word.len()).for_each(|chunk| chunk.copy_from_slice(&word));
}

fn word(page: usize, change: u32) -> u64 {
    (page as u64) << 32 | u64::from(change)
}

/// How often a page was changed, by its bytes; `None` if they are of no change of this page.
fn change_of(bytes: &[u8], page: usize) -> Option<u32> {
    let first = u64::from_le_bytes(*bytes.first_chunk()?);
    let change = u32::try_from(first & u64::from(u32::MAX)).ok()?;
    let expected = word(page, change).to_le_bytes();
    bytes.chunks_exact(expected.len()).all(|chunk| chunk == expected).then_some(change)
}

impl Load {
    /// Fills the pages of regions of the same size; all but the last of each, which have counters. With `has_updates`, every
    /// second WRITE of the work is an UPDATE.
    ///
    /// # Errors
    /// If the memory cannot be written.
    ///
    /// # Panics
    /// If there is no region, they differ in size, or are smaller than two bulk transfers.
    pub fn begin<T: Transport>(
        client: &mut Client<T>,
        regions: Vec<Region>,
        has_updates: bool,
    ) -> Result<Self, Error> {
        let length = regions.first().map_or(0, |region| region.length_bytes());
        assert!(length >= 2 * BULK_BYTES as u64, "there is something to move");
        assert!(regions.iter().all(|region| region.length_bytes() == length), "they are alike");
        let region_pages = page_count(length) - COUNTERS;
        let page_total = regions.len() * region_pages;
        let load = Self {
            regions,
            region_pages,
            has_updates,
            zipf: None,
            acknowledged: (0..page_total).map(|_| AtomicU32::new(1)).collect(),
            phase: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            begun: Instant::now(),
        };
        let mut bytes = vec![0; BULK_BYTES];
        for part in load.bulk_parts() {
            let bytes = &mut bytes[..part.len() * PAGE_BYTES];
            for (page, bytes) in part.clone().zip(bytes.chunks_exact_mut(PAGE_BYTES)) {
                fill(bytes, page, 1);
            }
            client.write(load.at(part.start)?, bytes)?;
        }
        Ok(Self { begun: Instant::now(), ..load })
    }

    /// Uses the line of rank n `n.powf(-exponent)` times as often as the hottest one, and reads in the place of FETCH_ADDs.
    #[must_use]
    pub fn with_zipf(self, exponent: f64) -> Self {
        Self { zipf: Some(Zipf::new(self.acknowledged.len(), exponent)), ..self }
    }

    /// The first of so many pages that are used next, at most a line; there may be fewer at the end of a region.
    fn pick(&self, random: &mut SmallRng, count: usize) -> usize {
        let last = self.acknowledged.len() - count;
        match &self.zipf {
            None => random.random_range(0..=last),
            Some(zipf) => {
                let line = zipf.line(random);
                line.start + random.random_range(0..=line.len().saturating_sub(count))
            }
        }
    }

    /// Where a page is; those of the next region follow those of the one before.
    fn at(&self, page: usize) -> Result<Pointer, Error> {
        let region = self.regions[page / self.region_pages];
        Ok(region.at((page % self.region_pages * PAGE_BYTES) as u64)?)
    }

    /// Where a counter is.
    fn counter_at(&self, counter: usize) -> Result<Pointer, Error> {
        let page = self.region_pages + counter % COUNTERS;
        Ok(self.regions[counter / COUNTERS].at((page * PAGE_BYTES) as u64)?)
    }

    /// The ranges of pages that are transferred at once when all of them are.
    fn bulk_parts(&self) -> impl Iterator<Item = Range<usize>> {
        let step = BULK_BYTES / PAGE_BYTES;
        let region_pages = self.region_pages;
        (0..self.regions.len()).map(move |region| region * region_pages).flat_map(move |start| {
            let end = start + region_pages;
            (start..end).step_by(step).map(move |first| first..end.min(first + step))
        })
    }

    /// The time since the load began.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Begins the next phase, for [`Seen::detours`].
    pub fn next_phase(&self) {
        self.phase.fetch_add(1, Ordering::Relaxed);
    }

    fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Runs a worker with each client beside `task`, and ends them when it returns; returns its result, and what they saw.
    ///
    /// # Errors
    /// [`WorkerPanicked`].
    pub fn beside<T: Transport + Send, R>(
        &self,
        clients: Vec<Client<T>>,
        task: impl FnOnce() -> R,
    ) -> Result<(R, Seen), WorkerPanicked> {
        let count = clients.len();
        thread::scope(|scope| {
            let running: Vec<_> = (0..)
                .zip(clients)
                .map(|(number, client)| scope.spawn(move || self.work(client, number, count)))
                .collect();
            let result = task();
            self.stop();
            let mut seen = Seen::default();
            for one in running {
                seen.add(one.join().map_err(|_| WorkerPanicked)?);
            }
            Ok((result, seen))
        })
    }

    /// Works until [`Load::stop`]: READs of one page (50 %) and of eight (10 %), WRITEs or UPDATEs of a page (30 %) and
    /// FETCH_ADDs (10 %), all at places that are random and alike unless [`Load::with_zipf`] was called. Of `count` workers, number `number` writes every page of which it is the
    /// remainder.
    fn work<T: Transport>(&self, mut client: Client<T>, number: usize, count: usize) -> Seen {
        let mut seen = Seen::default();
        // Growing would stop the worker for milliseconds; pages that are not used cost nothing.
        seen.operations.reserve(8 << 20);
        let mut random = SmallRng::seed_from_u64(number as u64);
        let mut bytes = vec![0; LINE_BYTES];
        let mut before = Detours::of(&client);
        while !self.stop.load(Ordering::Relaxed) {
            let phase = self.phase.load(Ordering::Relaxed);
            if seen.detours.len() <= phase {
                seen.detours.resize(phase + 1, Detours::default());
                before = Detours::of(&client);
            }
            let begun = self.elapsed();
            let outcome = match random.random_range(0..100) {
                0..50 => self.read(&mut client, &mut seen, &mut random, &mut bytes[..PAGE_BYTES]),
                50..60 => self.read(&mut client, &mut seen, &mut random, &mut bytes),
                60..90 => {
                    let choices = self.acknowledged.len() / count;
                    let choice = (self.pick(&mut random, 1) / count).min(choices - 1);
                    let page = choice * count + number;
                    let bytes = &mut bytes[..PAGE_BYTES];
                    match self.has_updates && random.random() {
                        true => self.update(&mut client, &mut seen, page, bytes),
                        false => self.write(&mut client, page, bytes),
                    }
                }
                _ if self.zipf.is_some() => {
                    self.read(&mut client, &mut seen, &mut random, &mut bytes[..PAGE_BYTES])
                }
                _ => self.increment(&mut client, &mut seen, &mut random),
            };
            let took = self.elapsed().saturating_sub(begun).as_nanos() / u128::from(TOOK_NANOS);
            let took = u32::try_from(took).unwrap_or(u32::MAX);
            seen.operations.push(Operation { begun: begun_units(begun), took });
            seen.detours[phase] = Detours::of(&client).since(before);
            if let Err(error) = outcome {
                seen.failures += 1;
                seen.failed.push(begun_units(begun));
                seen.first_failure.get_or_insert_with(|| error.to_string());
            }
        }
        seen
    }

    fn read<T: Transport>(
        &self,
        client: &mut Client<T>,
        seen: &mut Seen,
        random: &mut SmallRng,
        bytes: &mut [u8],
    ) -> Result<(), Error> {
        let count = bytes.len() / PAGE_BYTES;
        let first = self.pick(random, count);
        // Pages of two regions are not one after the other.
        let end = (first / self.region_pages + 1) * self.region_pages;
        let first = first.min(end - count);
        self.read_at(client, seen, first, bytes)
    }

    /// Reads pages; each must be as new as what was acknowledged before, and not newer than what was sent after.
    fn read_at<T: Transport>(
        &self,
        client: &mut Client<T>,
        seen: &mut Seen,
        first: usize,
        bytes: &mut [u8],
    ) -> Result<(), Error> {
        let pages = first..first + bytes.len() / PAGE_BYTES;
        let mut least = [0; BULK_BYTES / PAGE_BYTES];
        let changes = |page: usize| self.acknowledged[page].load(Ordering::Acquire);
        for (least, page) in least.iter_mut().zip(pages.clone()) {
            *least = changes(page);
        }
        client.read(self.at(first)?, bytes)?;
        for ((page, least), bytes) in pages.zip(least).zip(bytes.chunks_exact(PAGE_BYTES)) {
            let found = change_of(bytes, page);
            // One write of the page may be under way, and not acknowledged yet.
            if !found.is_some_and(|found| (least..=changes(page) + 1).contains(&found)) {
                seen.wrong(|| format!("page {page} has change {found:?}, at least {least} is due"));
            }
        }
        Ok(())
    }

    fn write<T: Transport>(
        &self,
        client: &mut Client<T>,
        page: usize,
        bytes: &mut [u8],
    ) -> Result<(), Error> {
        let change = self.acknowledged[page].load(Ordering::Relaxed) + 1;
        fill(bytes, page, change);
        client.write(self.at(page)?, bytes)?;
        self.acknowledged[page].store(change, Ordering::Release);
        Ok(())
    }

    /// Changes a page under a lease; nobody else changes it, so its bytes must be those of the last change.
    fn update<T: Transport>(
        &self,
        client: &mut Client<T>,
        seen: &mut Seen,
        page: usize,
        bytes: &mut [u8],
    ) -> Result<(), Error> {
        let last = self.acknowledged[page].load(Ordering::Relaxed);
        // A change that failed may have been made.
        let most = last + u32::from(seen.failures > 0);
        let mut update = client.update(self.at(page)?, bytes)?;
        let found = change_of(&update, page);
        fill(&mut update, page, last + 1);
        update.commit()?;
        self.acknowledged[page].store(last + 1, Ordering::Release);
        if !found.is_some_and(|found| (last..=most).contains(&found)) {
            seen.wrong(|| format!("page {page} was leased with change {found:?} and not {last}"));
        }
        Ok(())
    }

    fn increment<T: Transport>(
        &self,
        client: &mut Client<T>,
        seen: &mut Seen,
        random: &mut SmallRng,
    ) -> Result<(), Error> {
        let counter = random.random_range(0..self.regions.len() * COUNTERS);
        client.fetch_add(self.counter_at(counter)?, 1)?;
        seen.increments += 1;
        Ok(())
    }

    /// Reads everything after the workers have ended, and compares it with what they did.
    ///
    /// # Errors
    /// If the memory cannot be read.
    pub fn check<T: Transport>(
        &self,
        client: &mut Client<T>,
        seen: &mut Seen,
    ) -> Result<(), Error> {
        let mut bytes = vec![0; BULK_BYTES];
        for part in self.bulk_parts() {
            self.read_at(client, seen, part.start, &mut bytes[..part.len() * PAGE_BYTES])?;
        }
        let mut sum = 0;
        for counter in 0..self.regions.len() * COUNTERS {
            let mut word = [0; 8];
            client.read(self.counter_at(counter)?, &mut word)?;
            sum += u64::from_le_bytes(word);
        }
        let increments = seen.increments;
        // An increment that failed may have been applied; then there is a failure anyhow.
        if sum != increments && seen.failures == 0 {
            seen.wrong(|| format!("the counters have {sum} of {increments} increments"));
        }
        Ok(())
    }
}

fn page_count(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX) / PAGE_BYTES
}

/// Reads a whole region in transfers of 1 MiB; returns the time.
///
/// # Errors
/// If the memory cannot be read.
pub fn read_all<T: Transport>(client: &mut Client<T>, region: Region) -> Result<Duration, Error> {
    let mut bytes = vec![0; BULK_BYTES];
    let begun = Instant::now();
    for at in (0..region.length_bytes()).step_by(BULK_BYTES) {
        let count = usize::try_from(region.length_bytes() - at)
            .map_or(BULK_BYTES, |rest| rest.min(BULK_BYTES));
        client.read(region.at(at)?, &mut bytes[..count])?;
    }
    Ok(begun.elapsed())
}

/// Copies a region into another one of the same size, as an application would that cannot move its memory; returns
/// the time.
///
/// # Errors
/// If the memory cannot be read or written.
pub fn copy_all<T: Transport>(
    client: &mut Client<T>,
    from: Region,
    to: Region,
) -> Result<Duration, Error> {
    let mut bytes = vec![0; BULK_BYTES];
    let begun = Instant::now();
    for at in (0..from.length_bytes()).step_by(BULK_BYTES) {
        let count = usize::try_from(from.length_bytes() - at)
            .map_or(BULK_BYTES, |rest| rest.min(BULK_BYTES));
        client.read(from.at(at)?, &mut bytes[..count])?;
        client.write(to.at(at)?, &bytes[..count])?;
    }
    Ok(begun.elapsed())
}

/// What a client saw that reads single pages.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct SomeReads {
    /// How long a READ took.
    pub latency: Summary,
    /// The requests that did not go straight to the page.
    pub detours: Detours,
    /// READs whose bytes were not those of the page.
    pub wrong_reads: u64,
}

/// Reads single pages of a region at random, as a client does that has only just joined. The pages must have been filled by
/// a [`Load`].
///
/// # Errors
/// If the memory cannot be read.
pub fn read_some<T: Transport>(
    client: &mut Client<T>,
    region: Region,
    count: usize,
) -> Result<SomeReads, Error> {
    let mut random = SmallRng::seed_from_u64(7);
    let mut bytes = vec![0; PAGE_BYTES];
    let (before, mut samples, mut wrong_reads) = (Detours::of(client), Samples::default(), 0);
    // The pages of the load's other regions come first.
    let mut earlier_pages = None;
    let pages = page_count(region.length_bytes()).saturating_sub(COUNTERS).max(1);
    for _ in 0..count {
        let page = random.random_range(0..pages);
        let begun = Instant::now();
        client.read(region.at((page * PAGE_BYTES) as u64)?, &mut bytes)?;
        samples.add(begun.elapsed());
        let named = bytes.first_chunk().map_or(0, |word| u64::from_le_bytes(*word) >> 32);
        let named = usize::try_from(named).unwrap_or(usize::MAX);
        let earlier = named.checked_sub(page);
        let is_its = change_of(&bytes, named).is_some_and(|change| change > 0)
            && earlier.is_some_and(|it| it.is_multiple_of(pages))
            && *earlier_pages.get_or_insert(earlier) == earlier;
        wrong_reads += u64::from(!is_its);
    }
    let detours = Detours::of(client).since(before);
    Ok(SomeReads { latency: samples.summary(), detours, wrong_reads })
}

/// Lines that a probe is ahead of the move at first: more than are on their way at once.
const LEAD: usize = 32;

/// How long a probe reads one page at most.
const PROBE: Duration = Duration::from_secs(2);

/// Reads a page of a line without pause until the line has moved, then one further on, until `stop` is set or the
/// region ends. Returns the longest time between two READs that succeeded, of each line: so long it was out of reach,
/// and a READ took.
///
/// # Errors
/// If a page cannot be read.
pub fn probe<T: Transport>(
    client: &mut Client<T>,
    region: Region,
    stop: &AtomicBool,
) -> Result<Samples, Error> {
    let mut samples = Samples::default();
    let mut bytes = vec![0; PAGE_BYTES];
    let (mut line, mut lead) = (0, LEAD);
    loop {
        line += lead;
        let Ok(pointer) = region.at((line * LINE_BYTES) as u64) else { return Ok(samples) };
        let moved = Detours::of(client).moved;
        let (first, mut last, mut longest) = (Instant::now(), None, Duration::ZERO);
        while Detours::of(client).moved == moved && first.elapsed() < PROBE {
            if stop.load(Ordering::Relaxed) {
                return Ok(samples);
            }
            client.read(pointer, &mut bytes)?;
            let now = Instant::now();
            longest = longest.max(last.map_or(Duration::ZERO, |last| now - last));
            last = Some(now);
        }
        match longest {
            // It had moved before.
            Duration::ZERO => lead *= 2,
            longest => samples.add(longest),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_tells_its_number_and_its_changes() {
        let mut bytes = [0; PAGE_BYTES];
        fill(&mut bytes, 7, 3);
        assert_eq!(change_of(&bytes, 7), Some(3));
        assert_eq!(change_of(&bytes, 8), None, "another page");
        bytes[PAGE_BYTES - 8] ^= 1;
        assert_eq!(change_of(&bytes, 7), None, "a part is of another change");
    }

    #[test]
    fn the_load_is_summed_up_by_the_time_at_which_operations_began() {
        let one = |millis: u32, micros: u32| Operation { begun: millis * 100, took: micros * 100 };
        let mut seen =
            Seen { operations: vec![one(30, 9), one(10, 5), one(20, 7)], ..Seen::default() };
        let millis = Duration::from_millis;
        let interval = seen.interval(millis(10), millis(30));
        assert_eq!(interval.latency.sample_count, 2);
        assert!((interval.operations_per_second - 100.0).abs() < 1e-6, "{interval:?}");
        let series = seen.series(millis(0), millis(40), millis(20));
        let counts: Vec<f64> = series.iter().map(|bucket| bucket.operations_per_second).collect();
        assert_eq!(counts, [50.0, 100.0]);
        assert!((series[1].p99_us - 9.0).abs() < 0.1, "{series:?}");
    }
}
