//! A lock between endpoints, made of two words of memory and their atomics.

use core::{fmt, time::Duration};
use std::{thread, time::Instant};

use bluebridge_transport::{Transport, udp::UdpTransport};
use bluebridge_wire::Pointer;

use crate::{client::Client, error::Error};

/// Bytes that a [`Lock`] takes: the next ticket, and the ticket that is served.
pub const LOCK_BYTES: u64 = 16;

/// The first and the longest pause between two looks at a word that others change.
const PAUSE: Duration = Duration::from_micros(50);
const PAUSE_MAX: Duration = Duration::from_millis(5);

/// A lock between endpoints that is taken in the order of asking.
///
/// It is 16 zeroed bytes of memory at an address that is a multiple of 16: everyone draws a
/// ticket by FETCH_ADD and waits until it is served.
///
/// A holder, or one who waits, may die. So whoever waits and sees the same ticket served for
/// longer than `patience` passes over it. That is a guess, not knowledge: a holder that lives and
/// holds the lock longer than the patience of others loses it, and learns so only when it
/// unlocks ([`LockError::Lost`]). What two holders at once would spoil must be changed by
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
/// [`LockGuard::unlock`] does that too, and says how it ended.
#[must_use = "dropping the guard unlocks the lock"]
pub struct LockGuard<'a, T: Transport = UdpTransport> {
    lock: Lock,
    client: &'a mut Client<T>,
    /// `None` once it was given back.
    ticket: Option<u64>,
}

/// A [`Lock`] or [`crate::Barrier`] did not do what was asked.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockError {
    /// The pointer is not one that a lock or barrier can be at.
    #[error("{0} is not aligned to the bytes of the lock or barrier; use another place")]
    Unaligned(Pointer),
    /// Others lost their patience and passed over this holder: for a time it held the lock beside
    /// another.
    #[error(
        "the lock was held for longer than the others' patience, and they passed it on; \
         what was done under it may have met another's changes"
    )]
    Lost,
    /// The memory could not be used.
    #[error(transparent)]
    Memory(#[from] Error),
    /// Others did not get ready in time.
    #[error(
        "the lock or barrier was not reached in time; allow more time, or check which client is missing"
    )]
    TimedOut,
}

impl Lock {
    /// The lock at an address, which all that use it agree on; `patience` is for how long one
    /// ticket may be served before others pass over it, far longer than anybody means to hold it.
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

    /// Waits for the lock, for `timeout`. Calls of the client that are under way at that moment end
    /// first, and two more give the ticket back; each ends by the client's deadline.
    ///
    /// # Errors
    /// [`LockError::TimedOut`]; [`LockError::Memory`]. A ticket that was drawn and is not served yet is
    /// passed over by the patience of others, if it could not be given back.
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
                // The others passed over this ticket, so it needs another.
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

    /// Gives the lock to the next ticket.
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

    /// Returns a ticket: the newest one is drawn again by the next who comes, and one whose turn
    /// came meanwhile is passed on.
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

    /// Gives the lock to the next ticket.
    ///
    /// # Errors
    /// [`LockError::Lost`]; [`LockError::Memory`]: if nothing came through, others wait until they lose
    /// their patience.
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
        // If nothing came through, the patience of others passes over the ticket.
        let _ = self.give_up();
    }
}

/// Whether a ticket comes after another; tickets come round.
const fn ahead(ticket: u64, of: u64) -> bool {
    let distance = ticket.wrapping_sub(of);
    distance != 0 && distance < u64::MAX / 2
}
