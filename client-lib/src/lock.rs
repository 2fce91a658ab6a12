//! A lock between endpoints, made of two words of memory and their atomics.

use core::{fmt, time::Duration};
use std::{thread, time::Instant};

use bluebridge_transport::{Transport, udp::UdpTransport};
use bluebridge_wire::Pointer;

use crate::{client::Client, error::Error};

/// Bytes that a [`Lock`] takes: the next ticket, and the ticket that is served.
pub const LOCK_BYTES: u64 = 16;

/// The first and the longest pause between two reads of a word that others change.
const PAUSE: Duration = Duration::from_micros(50);
const PAUSE_MAX: Duration = Duration::from_millis(5);

/// A fair lock between endpoints: they get it in the order of their requests.
///
/// It is 16 zeroed bytes of memory at an address that is a multiple of 16: each client draws a
/// ticket by FETCH_ADD and waits until it is served.
///
/// A holder or a waiter may die. So a waiter that sees the same ticket served for longer than
/// `patience` skips it. The waiter cannot know that the holder is dead: a live holder that holds the
/// lock longer than the patience of others loses it, and learns this only when it unlocks
/// ([`LockError::Lost`]). Data that two simultaneous holders could corrupt must be changed by
/// [`Client::update`], whose late COMMIT is refused, and not under this lock.
///
/// ```
/// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/rack.rs"));
/// use core::time::Duration;
///
/// use bluebridge::{Client, EndpointConfig, Lock, NodeId, Space};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let rack = rack::LocalRack::start(&[NodeId(1)], 1 << 20);
/// # let config = |node| {
/// #     let mut config = EndpointConfig::new(Space(1), NodeId(node), 1);
/// #     config.placement = bluebridge::Placement::Anywhere;
/// #     config
/// # };
/// # let mut client = Client::open(config(1000), rack.attach(NodeId(1000)));
/// let region = client.create(4096)?;
/// // Everyone who knows the pointer can take the lock.
/// let lock = Lock::at(region.base(), Duration::from_secs(2))?;
/// let mut held = lock.lock(&mut client, Duration::from_secs(5))?;
/// held.client().write(region.at(64)?, b"one at a time")?;
/// held.unlock()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Lock {
    pointer: Pointer,
    serving: Pointer,
    patience: Duration,
}

/// A [`Lock`] that is held; it is unlocked when the guard is dropped.
///
/// [`LockGuard::unlock`] does that too, and returns the result.
#[must_use = "dropping the guard unlocks the lock"]
pub struct LockGuard<'a, T: Transport = UdpTransport> {
    lock: Lock,
    client: &'a mut Client<T>,
    /// `None` once it was unlocked.
    ticket: Option<u64>,
}

/// An operation on a [`Lock`] or [`crate::Barrier`] failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockError {
    /// A lock or barrier cannot be at this pointer.
    #[error("{0} is not aligned to the bytes of the lock or barrier; use another place")]
    Unaligned(Pointer),
    /// Other clients waited longer than their patience and skipped this holder: for a time, there may have
    /// been two holders.
    #[error(
        "the lock was held for longer than the others' patience, and they passed it on; \
         what was done under it may have met another's changes"
    )]
    Lost,
    /// The memory could not be used.
    #[error(transparent)]
    Memory(#[from] Error),
    /// Other clients did not unlock or arrive in time.
    #[error(
        "the lock or barrier was not reached in time; allow more time, or check which client is missing"
    )]
    TimedOut,
}

impl Lock {
    /// The lock at an address, which all that use it agree on; `patience` is for how long one
    /// ticket may be served before others skip it; choose it much longer than any client holds the lock.
    ///
    /// # Errors
    /// [`LockError::Unaligned`].
    pub fn at(pointer: Pointer, patience: Duration) -> Result<Self, LockError> {
        let serving = pointer.checked_add(LOCK_BYTES / 2).ok();
        match serving.filter(|_| pointer.location.offset().is_multiple_of(LOCK_BYTES)) {
            Some(serving) => Ok(Self { pointer, serving, patience }),
            None => Err(LockError::Unaligned(pointer)),
        }
    }

    /// Waits for the lock, for `timeout`. A call that is in progress at that moment ends
    /// first, and two more calls return the ticket; each ends by the client's deadline.
    ///
    /// # Errors
    /// [`LockError::TimedOut`]; [`LockError::Memory`]. A ticket that was drawn and is not served yet is
    /// skipped by others after their patience, if it could not be returned.
    pub fn lock<'a, T: Transport>(
        &self,
        client: &'a mut Client<T>,
        timeout: Duration,
    ) -> Result<LockGuard<'a, T>, LockError> {
        let until = Instant::now() + timeout;
        let mut ticket = client.fetch_add(self.pointer, 1)?;
        let mut pause = PAUSE;
        let mut seen = (self.served(client)?, Instant::now());
        loop {
            let (served, since) = seen;
            if served == ticket {
                return Ok(LockGuard { lock: *self, client, ticket: Some(ticket) });
            }
            let is_behind = ahead(served, ticket);
            if Instant::now() >= until {
                // A ticket that other clients skipped delays no client.
                if !is_behind {
                    self.give_back(client, ticket)?;
                }
                return Err(LockError::TimedOut);
            }
            if is_behind {
                // Other clients skipped this ticket, so a new one is needed.
                ticket = client.fetch_add(self.pointer, 1)?;
            } else if since.elapsed() > self.patience {
                client.compare_swap(self.serving, served, served.wrapping_add(1))?;
            } else {
                let left = until.saturating_duration_since(Instant::now());
                thread::sleep(pause.min(left));
                pause = (pause * 2).min(PAUSE_MAX);
            }
            let served_now = self.served(client)?;
            if served_now != served {
                seen = (served_now, Instant::now());
                pause = PAUSE;
            }
        }
    }

    /// Passes the lock to the next ticket.
    fn pass_on<T: Transport>(&self, client: &mut Client<T>, ticket: u64) -> Result<(), LockError> {
        let next = ticket.wrapping_add(1);
        if client.compare_swap(self.serving, ticket, next)? == ticket {
            Ok(())
        } else {
            Err(LockError::Lost)
        }
    }

    fn served<T: Transport>(&self, client: &mut Client<T>) -> Result<u64, LockError> {
        let mut word = [0; 8];
        client.read(self.serving, &mut word)?;
        Ok(u64::from_le_bytes(word))
    }

    /// Returns a ticket: if it is the newest one, the next client draws it again; if its turn came
    /// meanwhile, the lock is passed on.
    fn give_back<T: Transport>(
        &self,
        client: &mut Client<T>,
        ticket: u64,
    ) -> Result<(), LockError> {
        let next = ticket.wrapping_add(1);
        if client.compare_swap(self.pointer, next, ticket)? != next {
            client.compare_swap(self.serving, ticket, next)?;
        }
        Ok(())
    }
}

impl<T: Transport> LockGuard<'_, T> {
    /// The client, for other calls while the lock is held.
    pub const fn client(&mut self) -> &mut Client<T> {
        self.client
    }

    /// Passes the lock to the next ticket.
    ///
    /// # Errors
    /// [`LockError::Lost`]; [`LockError::Memory`]: if the request did not arrive, others wait until their
    /// patience ends.
    pub fn unlock(mut self) -> Result<(), LockError> {
        self.give_up()
    }

    fn give_up(&mut self) -> Result<(), LockError> {
        match self.ticket.take() {
            Some(ticket) => self.lock.pass_on(self.client, ticket),
            None => Ok(()),
        }
    }
}

impl<T: Transport> fmt::Debug for LockGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockGuard").field("lock", &self.lock).finish_non_exhaustive()
    }
}

impl<T: Transport> Drop for LockGuard<'_, T> {
    fn drop(&mut self) {
        // If the request did not arrive, others skip the ticket after their patience.
        let _ = self.give_up();
    }
}

/// Whether a ticket comes after another; ticket numbers wrap around.
const fn ahead(ticket: u64, of: u64) -> bool {
    let distance = ticket.wrapping_sub(of);
    distance != 0 && distance < u64::MAX / 2
}
