//! Changing pages that no other client may change meanwhile: UPDATE, then COMMIT or ABORT.
//!
//! `commit`: the end of an update; `many`: several ranges as one; `stale`: reading without waiting for an
//! owner; `options`: for how long and how.

mod commit;
mod many;
mod options;
mod stale;

use core::ops::{Deref, DerefMut};
use core::time::Duration;

use arrayvec::ArrayVec;
use bluebridge_protocol::{
    Timestamp,
    requester::{Lease, Operation, Output},
};
use bluebridge_transport::{Transport, udp::UdpTransport};
use bluebridge_wire::Pointer;

pub use many::{UpdateMany, UpdateRequest};
pub use options::UpdateOptions;

use crate::{
    client::Client,
    error::Error,
    service::{Entry, SlotId},
    work::{lines, single::Single},
};

/// How long a dropped guard waits for the responses to its ABORTs; the service thread continues.
const DROP_DEADLINE: Duration = Duration::from_millis(50);

/// The part of an update that lies in one line, and its lease.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    /// Which range of several it belongs to.
    range: usize,
    /// Where it begins in its range's buffer.
    start: usize,
    pub(crate) pointer: Pointer,
    pub(crate) length: u32,
    pub(crate) lease: Lease,
    slot: Option<SlotId>,
    /// The lease is over; the home reported it.
    pub(crate) is_over: bool,
}

impl Held {
    fn bytes(&self) -> core::ops::Range<usize> {
        self.start..self.start + usize::try_from(self.length).unwrap_or(0)
    }

    /// Whether less than half of the lease is left.
    fn is_late(&self, now: Timestamp) -> bool {
        let half = Duration::from_millis(self.lease.granted_ms.into()) / 2;
        self.lease.expires_at.saturating_since(now) < half
    }
}

/// Memory that only this endpoint may change until the guard ends: it dereferences to the bytes,
/// as they were when the lease was granted.
///
/// [`Update::commit`] writes them back; [`Update::abort`], or dropping the guard, leaves the memory
/// as it was. While it lives the lease is renewed by the endpoint's service thread, if it has one,
/// up to [`UpdateOptions::renew_limit`]; without one the lease ends by itself, a second after it was
/// granted unless [`UpdateOptions::lease`] says otherwise. Then others may change the memory again,
/// and `commit` fails with [`Error::LeaseLost`] and changes nothing.
///
/// All other requests for the pages, also those of this endpoint outside of the guard, wait
/// or fail with [`Error::Busy`].
#[must_use = "dropping an update aborts it"]
pub struct Update<'a, T: Transport = UdpTransport> {
    client: &'a mut Client<T>,
    buffer: &'a mut [u8],
    pointer: Pointer,
    held: Vec<Held>,
}

impl<T: Transport> Client<T> {
    /// Takes the exclusive right to change `buffer.len()` bytes and reads them into `buffer`, waiting
    /// while others have it, until the deadline.
    ///
    /// All pages that the range touches are leased, or none. The pages of a line of 32 KiB are leased
    /// atomically; a longer range is leased line by line in the order of the addresses, so that no
    /// deadlock can occur. Nesting updates by [`Update::client`] has no such order: use
    /// [`Client::update_many`] for ranges that belong together.
    ///
    /// # Errors
    /// [`Error`]; nothing is leased then, and the buffer's contents are unspecified.
    pub fn update<'a>(
        &'a mut self,
        pointer: Pointer,
        buffer: &'a mut [u8],
    ) -> Result<Update<'a, T>, Error> {
        self.update_with(pointer, buffer, UpdateOptions::default())
    }

    /// [`Client::update`] that does not wait for a lease of another holder.
    ///
    /// # Errors
    /// [`Error::Busy`] if there is one; otherwise as [`Client::update`].
    pub fn try_update<'a>(
        &'a mut self,
        pointer: Pointer,
        buffer: &'a mut [u8],
    ) -> Result<Update<'a, T>, Error> {
        self.update_with(pointer, buffer, UpdateOptions { wait: false, ..UpdateOptions::default() })
    }

    /// [`Client::update`] with options.
    ///
    /// # Errors
    /// As [`Client::update`].
    pub fn update_with<'a>(
        &'a mut self,
        pointer: Pointer,
        buffer: &'a mut [u8],
        options: UpdateOptions,
    ) -> Result<Update<'a, T>, Error> {
        let length = buffer.len() as u64;
        let mut held = self.begin_update(lines::count(pointer, length)?)?;
        let until = self.driver.now() + self.deadline;
        for line in 0..lines::count(pointer, length)? {
            let part = part(0, pointer, length, line);
            let leased = part.and_then(|part| {
                let incoming = buffer.get_mut(part.bytes()).unwrap_or_default();
                self.lease_part(part, incoming, options, until)
            });
            match leased {
                Ok(part) => held.push(part),
                Err(error) => return Err(self.fail_update(held, error)),
            }
        }
        let held = self.complete_update(held)?;
        Ok(Update { client: self, buffer, pointer, held })
    }

    /// Makes sure that an update over so many lines can be held.
    fn begin_update(&mut self, line_count: u32) -> Result<Vec<Held>, Error> {
        self.meet_service();
        if let Some(tenant) = &mut self.tenant
            && line_count > 1
            && tenant.room() < line_count as usize
        {
            return Err(Error::TooManyLeases);
        }
        // Reuses the list of an earlier update, so that nothing is allocated.
        Ok(self.spare_lists.pop().unwrap_or_default())
    }

    /// Leases one line's part.
    fn lease_part(
        &mut self,
        part: Held,
        incoming: &mut [u8],
        options: UpdateOptions,
        until: Timestamp,
    ) -> Result<Held, Error> {
        let now = self.driver.now();
        let operation = Operation::Update {
            pointer: part.pointer,
            length: part.length,
            lease_ms: options.lease_ms(),
            wait: options.wait,
        };
        let deadline = until.saturating_since(now);
        let update = Single::new(operation, Some(part.pointer), &[], incoming);
        match self.run_single(update, deadline)? {
            Output::Leased(lease) => {
                let mut part = Held { lease, ..part };
                if let Some(tenant) = &mut self.tenant {
                    let entry = Entry {
                        pointer: part.pointer,
                        length: part.length,
                        epoch: lease.epoch,
                        expires_at: lease.expires_at,
                        granted_ms: lease.granted_ms,
                        renew_until: now + options.renew_limit,
                        policy: options.owner_policy,
                        is_ending: false,
                        is_abandoned: false,
                    };
                    part.slot = tenant.hold(&entry, incoming);
                    if part.slot.is_none() {
                        let mut held = self.spare_lists.pop().unwrap_or_default();
                        held.push(part);
                        return Err(self.fail_update(held, Error::TooManyLeases));
                    }
                }
                Ok(part)
            }
            _ => Err(Error::Violation { node: part.pointer.node }),
        }
    }

    /// The end of an acquisition: the first leases must not be about to expire.
    fn complete_update(&mut self, mut held: Vec<Held>) -> Result<Vec<Held>, Error> {
        if held.len() > 1
            && let Err(error) = self.renew_late(&mut held)
        {
            return Err(self.fail_update(held, error));
        }
        Ok(held)
    }

    /// Releases what was leased, because of an error.
    fn fail_update(&mut self, held: Vec<Held>, error: Error) -> Error {
        self.drop_update(held);
        error
    }

    /// Sends the ABORTs of a guard that ends without a COMMIT, without waiting for long.
    fn drop_update(&mut self, mut held: Vec<Held>) {
        let deadline = self.deadline.min(DROP_DEADLINE);
        // Whether the lease ends now or when it expires changes no result.
        let _ = self.abort_held(&mut held, deadline);
        self.recycle(held);
    }

    /// Keeps the list for the next update.
    fn recycle(&mut self, mut held: Vec<Held>) {
        held.clear();
        if held.capacity() > 0 && self.spare_lists.len() < SPARE_LISTS {
            self.spare_lists.push(held);
        }
    }
}

/// The most lists of held parts that are kept for reuse; nested updates need one each.
pub(crate) const SPARE_LISTS: usize = 8;

/// Lists for later updates.
pub(crate) type SpareLists = ArrayVec<Vec<Held>, SPARE_LISTS>;

/// One line's part of a range, before it is leased.
fn part(range: usize, pointer: Pointer, length: u64, line: u32) -> Result<Held, Error> {
    let start = lines::bytes(pointer, length, line).start;
    let (pointer, length) = lines::piece(pointer, length, line)?;
    let lease = Lease { epoch: 0, expires_at: Timestamp::default(), granted_ms: 0 };
    Ok(Held { range, start, pointer, length, lease, slot: None, is_over: false })
}

impl<T: Transport> Update<'_, T> {
    /// Writes the bytes back and releases the lease.
    ///
    /// Each line of 32 KiB is written as a whole or not at all. Of a range over several lines the
    /// leases are renewed first if little time is left, then the lines are written in the order of
    /// their addresses.
    ///
    /// # Errors
    /// [`Error::LeaseLost`]: nothing was written; [`Error::PartlyCommitted`] says up to where a range over
    /// several lines was; [`Error`]. The lease on what was not written is released.
    pub fn commit(mut self) -> Result<(), Error> {
        let held = core::mem::take(&mut self.held);
        let buffer = &*self.buffer;
        self.client.commit_update(held, |part| buffer.get(part.bytes()).unwrap_or_default())
    }

    /// Leaves the memory as it was and releases the lease.
    ///
    /// # Errors
    /// [`Error`]: the home did not confirm the release; the lease ends when it expires, at the latest.
    pub fn abort(mut self) -> Result<(), Error> {
        let held = core::mem::take(&mut self.held);
        self.client.abort_update(held)
    }

    /// The client, for other calls while the guard lives.
    pub const fn client(&mut self) -> &mut Client<T> {
        self.client
    }

    /// The first byte.
    #[must_use]
    pub const fn pointer(&self) -> Pointer {
        self.pointer
    }

    /// The lease's fencing token at the home: each grant of a server's core has a higher one. For
    /// a range over several lines, that of the first line.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.held.first().map_or(0, |part| part.lease.epoch)
    }

    /// How long the lease is certainly valid without renewal: that of the line that expires first.
    #[must_use]
    pub fn time_left(&self) -> Duration {
        self.client.time_left(&self.held)
    }
}

impl<T: Transport> Deref for Update<'_, T> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.buffer
    }
}

impl<T: Transport> DerefMut for Update<'_, T> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.buffer
    }
}

impl<T: Transport> Drop for Update<'_, T> {
    fn drop(&mut self) {
        let held = core::mem::take(&mut self.held);
        if !held.is_empty() {
            self.client.drop_update(held);
        }
    }
}
