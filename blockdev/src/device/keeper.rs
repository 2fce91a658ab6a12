//! One process serves a disk: the one that has the lease on the page of its properties.
//!
//! The keeper's thread holds the lease, which the endpoint's service renews. No request is begun when the lease is about
//! to end, and none is repeated after its end. A lease that ended, for example because its server was restarted, is taken
//! again, and if nobody attached the disk meanwhile, which would have changed the owner's number, serving goes on.
//!
//! The pages of the table have the owner's number too. They are changed under leases of their own, so the map is safe even
//! from a process that was paused between looking at the clock and sending.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bluebridge::{Client, Error, Transport, UpdateOptions};

use super::descriptor::{PAGE_BYTES, Properties, TablePage};
use super::open::table_pointer;
use super::{Disk, DiskError, Failure, is_of_missing_memory, lock};

/// What is left of the lease when no request is begun any more.
const MARGIN: Duration = Duration::from_millis(50);
/// How long a request waits before it looks at the lease again.
const LOOK: Duration = Duration::from_millis(2);
/// The pause after a failure to take the lease.
const PAUSE: Duration = Duration::from_millis(50);
/// A call of the keeper: it must see in time that it is to end.
const CALL: Duration = Duration::from_secs(1);
/// Leases are renewed for as long as the disk is served.
const RENEWED_FOR: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Whether and until when this process may use the disk.
#[derive(Debug)]
pub(super) struct Ownership {
    began: Instant,
    /// Nanoseconds after `began`; 0: not now.
    until: AtomicU64,
    end: OnceLock<DiskError>,
}

impl Ownership {
    pub(super) fn new() -> Self {
        Self { began: Instant::now(), until: AtomicU64::new(0), end: OnceLock::new() }
    }

    pub(super) fn end(&self) -> Option<DiskError> {
        self.end.get().cloned()
    }

    /// Ends for good.
    pub(super) fn finish(&self, reason: DiskError) {
        let _ = self.end.set(reason);
        self.until.store(0, Ordering::Release);
    }

    fn extend(&self, now: Instant, left: Duration) {
        if self.end.get().is_none() {
            let until = (now + left).saturating_duration_since(self.began);
            self.until
                .store(u64::try_from(until.as_nanos()).unwrap_or(u64::MAX), Ordering::Release);
        }
    }

    fn pause(&self) {
        self.until.store(0, Ordering::Release);
    }

    /// Until when a request may be in flight: `until`, or earlier. Waits for the lease if there is none.
    pub(super) fn permit(&self, until: Instant) -> Result<Instant, Failure> {
        loop {
            let now = Instant::now();
            let end = self.began + Duration::from_nanos(self.until.load(Ordering::Acquire));
            if let Some(end) = end.checked_sub(MARGIN)
                && end > now
            {
                return Ok(end.min(until));
            }
            if self.end.get().is_some() {
                return Err(Failure::Stopped);
            }
            if now >= until {
                return Err(Failure::Unanswered);
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
            Ok(_) => Ok(keeper),
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
    let mut is_first = true;
    loop {
        let mut page = [0; PAGE_BYTES];
        let mut is_of_another = false;
        match client.update_with(disk.pointer, &mut page, options) {
            Ok(update) => {
                let read = <[u8; PAGE_BYTES]>::try_from(&update[..]);
                let found = read.ok().map(|page| Properties::decode(&page));
                let owner = match found {
                    Some(Ok(properties)) if properties.id == disk.properties.id => properties.owner,
                    _ => 0,
                };
                if owner != disk.properties.owner {
                    disk.ownership.finish(DiskError::TakenOver);
                    return;
                }
                if !is_first {
                    tracing::info!("the disk is this process's again");
                }
                is_first = false;
                loop {
                    let now = Instant::now();
                    let left = update.time_left();
                    if left.is_zero() {
                        break;
                    }
                    disk.ownership.extend(now, left);
                    if stop.within(interval) {
                        disk.ownership.pause();
                        return;
                    }
                }
                disk.ownership.pause();
                drop(update);
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
                tracing::debug!(%error, "the lease on the disk is not there yet");
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
        let ownership = Ownership::new();
        let now = Instant::now();
        let later = now + Duration::from_secs(60);
        ownership.extend(now, Duration::from_secs(2));
        let until = ownership.permit(later).expect("there is a lease");
        assert!(until < now + Duration::from_secs(2), "it ends before the lease");
        let soon = now + Duration::from_millis(1);
        assert_eq!(ownership.permit(soon), Ok(soon));
        ownership.extend(now, MARGIN / 2);
        let soon = Instant::now() + Duration::from_millis(10);
        assert_eq!(ownership.permit(soon), Err(Failure::Unanswered), "too little is left");
        ownership.finish(DiskError::TakenOver);
        ownership.extend(now, Duration::from_secs(60));
        assert_eq!(ownership.permit(later), Err(Failure::Stopped), "there is no way back");
    }
}
