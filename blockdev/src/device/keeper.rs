//! One process serves a disk: the one that has the lease on the page of its properties.
//!
//! The keeper's thread holds the lease, which the endpoint's service renews. Each call asks for how long the lease is
//! certainly valid, and ends an eighth of a lease before: nothing is sent later, and an answer that comes after it does
//! not count. A lease that ended, for example because its server was restarted, is taken
//! again, and if nobody attached the disk meanwhile, which would have changed the owner's number, serving goes on.
//!
//! The pages of the table have the owner's number too. They are changed under leases of their own, so the map is safe even
//! from a process that was paused between looking at the clock and sending.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bluebridge::{Client, Error, Transport, UpdateOptions};

use super::call::Round;
use super::descriptor::{PAGE_BYTES, Properties, TablePage};
use super::open::table_pointer;
use super::{Disk, DiskError, Failure, is_of_missing_memory, lock};

/// At least so much of the lease is left at the end of the last call, for what is still in the network.
const MARGIN: Duration = Duration::from_millis(50);
/// That is a larger part of a longer lease.
const MARGINS: u32 = 8;
/// How often the log repeats that the lease cannot be taken.
const REPORT: Duration = Duration::from_secs(10);
/// How long a request waits before it looks at the lease again.
const LOOK: Duration = Duration::from_millis(2);
/// The pause after a failure to take the lease.
pub(super) const PAUSE: Duration = Duration::from_millis(50);
/// A call of the keeper: it must see in time that it is to end.
pub(super) const CALL: Duration = Duration::from_secs(1);
/// Leases are renewed for as long as the disk is served.
const RENEWED_FOR: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Whether and until when this process may use the disk.
#[derive(Debug)]
pub(super) struct Ownership {
    began: Instant,
    /// Nanoseconds after `began`; 0: not now.
    until: AtomicU64,
    /// What is left of the lease when no call is in flight any more.
    margin: Duration,
    /// Rounds of requests that may be in flight.
    rounds: AtomicUsize,
    /// The map's server responds, and does not change the map: it may wait for the end of the lease, to move the memory.
    is_in_the_way: AtomicBool,
    end: OnceLock<DiskError>,
}

/// Requests may be in flight while it lives; it counts them.
#[derive(Debug)]
pub(super) struct Permit<'a> {
    rounds: &'a AtomicUsize,
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.rounds.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Ownership {
    pub(super) fn new(lease: Duration) -> Self {
        Self {
            margin: (lease / MARGINS).max(MARGIN),
            began: Instant::now(),
            until: AtomicU64::new(0),
            rounds: AtomicUsize::new(0),
            is_in_the_way: AtomicBool::new(false),
            end: OnceLock::new(),
        }
    }

    pub(super) fn end(&self) -> Option<DiskError> {
        self.end.get().cloned()
    }

    /// Ends for good.
    pub(super) fn finish(&self, reason: DiskError) {
        let _ = self.end.set(reason);
        self.pause();
    }

    /// The lease may keep the map's memory from being moved.
    pub(super) fn note_delay(&self) {
        self.is_in_the_way.store(true, Ordering::Relaxed);
    }

    fn extend(&self, now: Instant, left: Duration) {
        if self.end.get().is_none() {
            let until = (now + left).saturating_duration_since(self.began);
            self.until.store(u64::try_from(until.as_nanos()).unwrap_or(u64::MAX), Ordering::SeqCst);
        }
    }

    fn pause(&self) {
        self.until.store(0, Ordering::SeqCst);
    }

    /// Whether no request is in flight, and, after a pause, none begins any more.
    fn is_quiet(&self) -> bool {
        self.rounds.load(Ordering::SeqCst) == 0
    }

    /// Permits a round of requests, and counts it. Waits for the lease if there is none.
    pub(super) fn enter(&self, until: Instant) -> Result<Permit<'_>, Failure> {
        loop {
            self.permit(until)?;
            self.rounds.fetch_add(1, Ordering::SeqCst);
            let permit = Permit { rounds: &self.rounds };
            // A pause before the count may have seen no round.
            if self.now(Instant::now()).is_some() {
                return Ok(permit);
            }
        }
    }

    /// The end of the present permission; `None` if there is none.
    fn now(&self, now: Instant) -> Option<Instant> {
        let end = self.began + Duration::from_nanos(self.until.load(Ordering::SeqCst));
        end.checked_sub(self.margin).filter(|end| *end > now)
    }

    /// Until when a call may be in flight; does not wait for a lease.
    pub(super) fn lease_end(&self, now: Instant) -> Result<Instant, Failure> {
        if self.end.get().is_some() {
            return Err(Failure::Stopped);
        }
        self.now(now).ok_or(Failure::Unanswered)
    }

    /// Waits for the lease if there is none.
    fn permit(&self, until: Instant) -> Result<(), Failure> {
        loop {
            let now = Instant::now();
            if self.end.get().is_some() {
                return Err(Failure::Stopped);
            }
            if now >= until {
                return Err(Failure::Unanswered);
            }
            if self.now(now).is_some() {
                return Ok(());
            }
            std::thread::sleep(LOOK);
        }
    }
}

/// The thread that keeps a disk for this process. It must live as long as the disk is served.
#[derive(Debug)]
pub struct Keeper<T: Transport> {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<Client<T>>>,
}

#[derive(Debug, Default)]
struct Stop {
    is_set: Mutex<bool>,
    wake: Condvar,
}

impl Stop {
    /// Waits for a time; returns whether it is to stop.
    fn within(&self, time: Duration) -> bool {
        let is_set = lock(&self.is_set);
        let waited = self.wake.wait_timeout_while(is_set, time, |is_set| !*is_set);
        *waited.unwrap_or_else(std::sync::PoisonError::into_inner).0
    }
}

impl<T: Transport> Keeper<T> {
    /// Starts the thread, and waits until it has the lease.
    pub(super) fn start(
        mut client: Client<T>,
        disk: Arc<Disk>,
        lease: Duration,
    ) -> Result<Self, DiskError>
    where
        T: Send + 'static,
    {
        let stop = Arc::<Stop>::default();
        let seen = Arc::clone(&stop);
        let until = Instant::now() + disk.deadline;
        let kept = Arc::clone(&disk);
        let run = move || {
            client.set_deadline(CALL.min(kept.deadline));
            keep(&mut client, &kept, &seen, lease);
            kept.ownership.pause();
            client
        };
        let thread = std::thread::Builder::new().name("disk-keeper".to_owned()).spawn(run);
        let thread = thread.map_err(|error| DiskError::Thread(error.kind()))?;
        let keeper = Self { stop, thread: Some(thread) };
        match disk.ownership.permit(until) {
            Ok(()) => Ok(keeper),
            Err(_) => Err(disk.end().unwrap_or(DiskError::NotKept)),
        }
    }

    /// Gives the disk up, so that another process can attach it at once; returns the client.
    #[must_use]
    pub fn stop(mut self) -> Option<Client<T>> {
        self.join()
    }

    fn join(&mut self) -> Option<Client<T>> {
        let thread = self.thread.take()?;
        *lock(&self.stop.is_set) = true;
        self.stop.wake.notify_all();
        thread.join().ok()
    }
}

impl<T: Transport> Drop for Keeper<T> {
    fn drop(&mut self) {
        drop(self.join());
    }
}

fn keep<T: Transport>(client: &mut Client<T>, disk: &Disk, stop: &Stop, lease: Duration) {
    let options =
        UpdateOptions { lease: Some(lease), renew_limit: RENEWED_FOR, ..UpdateOptions::default() };
    let interval = (lease / 16).max(Duration::from_millis(10));
    let (mut is_first, mut is_released) = (true, false);
    let mut next_report = Instant::now() + REPORT;
    loop {
        let mut page = [0; PAGE_BYTES];
        let mut is_of_another = false;
        match client.update_with(disk.pointer, &mut page, options) {
            Ok(mut update) => {
                let read = <[u8; PAGE_BYTES]>::try_from(&update[..]);
                let found = read.ok().map(|page| Properties::decode(&page));
                let mine = found.and_then(Result::ok).filter(|found| {
                    found.id == disk.properties.id && found.owner == disk.properties.owner
                });
                let Some(properties) = mine else {
                    disk.ownership.finish(DiskError::TakenOver);
                    return;
                };
                next_report = Instant::now();
                if !is_first && !is_released {
                    tracing::info!("the disk is this process's again");
                }
                is_first = false;
                is_released = false;
                loop {
                    let now = Instant::now();
                    let left = update.time_left();
                    if left.is_zero() {
                        break;
                    }
                    disk.ownership.extend(now, left);
                    // It blocks for less than the time that is left of a renewed lease.
                    let until = OnceLock::from(now + lease / 4);
                    let mut round = Round::new(&until, lease / 8);
                    round.renew(lease / 4);
                    disk.free_what_is_owed(update.client(), &mut round, now + interval);
                    update.client().set_deadline(CALL.min(disk.deadline));
                    if stop.within(interval) {
                        disk.ownership.pause();
                        if is_quiet_soon(disk) {
                            // If that fails, the next owner waits for the lease that this one had.
                            let ended = Properties { has_ended: true, ..properties };
                            update.copy_from_slice(&ended.encode());
                            if let Err(error) = update.commit() {
                                tracing::debug!(%error, "the disk's map does not say that it is free");
                            }
                        }
                        return;
                    }
                    if disk.ownership.is_in_the_way.swap(false, Ordering::Relaxed) {
                        is_released = true;
                        break;
                    }
                }
                disk.ownership.pause();
                drop(update);
                if is_released {
                    // Requests that are in flight end before that lease would have ended, for which a next owner waits.
                    tracing::debug!("the lease on the disk is given up for a moment");
                    if stop.within(PAUSE) {
                        return;
                    }
                    continue;
                }
                tracing::warn!("the lease on the disk has ended; requests wait for a new one");
                // A process that waits for the disk gets it.
                if stop.within(lease / 8) {
                    return;
                }
            }
            Err(error) if is_of_missing_memory(&error) => {
                disk.ownership.finish(DiskError::Memory(error));
                return;
            }
            Err(error @ (Error::Expelled { .. } | Error::WrongSpace | Error::Violation { .. })) => {
                disk.ownership.finish(DiskError::Memory(error));
                return;
            }
            Err(error) => {
                if Instant::now() >= next_report {
                    next_report = Instant::now() + REPORT;
                    tracing::warn!(%error, "the lease on the disk cannot be taken; requests wait for it");
                } else {
                    tracing::debug!(%error, "the lease on the disk is not there yet");
                }
                is_of_another = matches!(error, Error::Busy { .. });
            }
        }
        if is_of_another && is_taken_over(client, disk) {
            disk.ownership.finish(DiskError::TakenOver);
            return;
        }
        if stop.within(PAUSE) {
            return;
        }
    }
}

/// Waits for a short time until no request is in flight.
fn is_quiet_soon(disk: &Disk) -> bool {
    let until = Instant::now() + CALL;
    while !disk.ownership.is_quiet() {
        if Instant::now() >= until {
            return false;
        }
        std::thread::sleep(LOOK);
    }
    true
}

/// Whether the table has the number of another owner. Nobody leases it for longer than a change takes.
fn is_taken_over<T: Transport>(client: &mut Client<T>, disk: &Disk) -> bool {
    let mut page = [0; PAGE_BYTES];
    let read = table_pointer(disk.pointer, 0).and_then(|first| client.read(first, &mut page));
    let table = read.ok().and_then(|()| TablePage::decode(page, disk.properties.id, 0).ok());
    table.is_some_and(|table| table.owner() != disk.properties.owner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_end_before_the_lease() {
        let (lease, short) = (Duration::from_secs(2), Duration::from_millis(200));
        let ownership = Ownership::new(lease);
        let now = Instant::now();
        let later = now + Duration::from_secs(60);
        assert_eq!(ownership.lease_end(now), Err(Failure::Unanswered), "there is none");
        ownership.extend(now, lease);
        assert_eq!(ownership.lease_end(now), Ok(now + lease - lease / 8));
        assert_eq!(ownership.permit(later), Ok(()));
        let soon = now + Duration::from_secs(1);
        assert_eq!(ownership.permit(now), Err(Failure::Unanswered), "no time is left");
        let end = now + lease - lease / 8;
        assert_eq!(ownership.lease_end(end), Err(Failure::Unanswered), "it is over");
        let strict = Ownership::new(short);
        strict.extend(now, short);
        assert_eq!(strict.lease_end(now), Ok(now + short - MARGIN));
        assert!(ownership.is_quiet());
        let permit = ownership.enter(soon).expect("there is a lease");
        assert!(!ownership.is_quiet());
        drop(permit);
        assert!(ownership.is_quiet());
        ownership.extend(now, MARGIN / 2);
        let soon = Instant::now() + Duration::from_millis(10);
        assert_eq!(ownership.permit(soon), Err(Failure::Unanswered), "too little is left");
        ownership.finish(DiskError::TakenOver);
        ownership.extend(now, Duration::from_secs(60));
        assert_eq!(ownership.permit(later), Err(Failure::Stopped), "there is no way back");
        assert_eq!(ownership.lease_end(now), Err(Failure::Stopped));
    }
}
