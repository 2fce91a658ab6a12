//! A barrier between endpoints, made of one word of memory and FETCH_ADD.

use core::time::Duration;
use std::{thread, time::Instant};

use bluebridge_transport::Transport;
use bluebridge_wire::Pointer;

use crate::{client::Client, lock::LockError};

/// Bytes that a [`Barrier`] takes.
pub const BARRIER_BYTES: u64 = 8;

const PAUSE: Duration = Duration::from_micros(50);
const PAUSE_MAX: Duration = Duration::from_millis(5);

/// A point at which a fixed number of parties wait for each other; it can be used repeatedly.
///
/// It is 8 zeroed bytes at an address that is a multiple of 8, which count arrivals. A party that
/// dies keeps the others waiting until their timeout; one whose arrival had an unknown outcome
/// ([`crate::Error::OutcomeUnknown`]) must not arrive again, because it may be counted already. After
/// either, agree on a new barrier.
///
/// ```
/// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/rack.rs"));
/// use core::time::Duration;
/// use std::thread;
///
/// use bluebridge::{Barrier, Client, EndpointConfig, NodeId, Space};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let rack = rack::LocalRack::start(&[NodeId(1)], 1 << 20);
/// # let config = |node| {
/// #     let mut config = EndpointConfig::new(Space(1), NodeId(node), 1);
/// #     config.placement = bluebridge::Placement::Anywhere;
/// #     config
/// # };
/// # let mut first = Client::open(config(1000), rack.attach(NodeId(1000)));
/// # let mut second = Client::open(config(1001), rack.attach(NodeId(1001)));
/// let region = first.create(4096)?;
/// let barrier = Barrier::at(region.base(), 2)?;
/// thread::scope(|scope| {
///     scope.spawn(move || barrier.wait(&mut second, Duration::from_secs(5)));
///     barrier.wait(&mut first, Duration::from_secs(5))
/// })?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Barrier {
    pointer: Pointer,
    party_count: u32,
}

impl Barrier {
    /// The barrier of `parties` parties (at least 1) at an address; all must use the same values.
    ///
    /// # Errors
    /// [`LockError::Unaligned`].
    pub const fn at(pointer: Pointer, party_count: u32) -> Result<Self, LockError> {
        if !pointer.location.offset().is_multiple_of(BARRIER_BYTES) {
            return Err(LockError::Unaligned(pointer));
        }
        let party_count = if party_count == 0 { 1 } else { party_count };
        Ok(Self { pointer, party_count })
    }

    /// Arrives, and waits until all parties have arrived; returns the number of the round, from 0.
    ///
    /// # Errors
    /// [`LockError::TimedOut`]: this party counts as arrived. [`LockError::Memory`].
    pub fn wait<T: Transport>(
        &self,
        client: &mut Client<T>,
        timeout: Duration,
    ) -> Result<u64, LockError> {
        let until = Instant::now() + timeout;
        let party_count = u64::from(self.party_count);
        let mut count = client.fetch_add(self.pointer, 1)? + 1;
        let meeting = (count - 1) / party_count;
        let mut pause = PAUSE;
        while count < (meeting + 1) * party_count {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(LockError::TimedOut);
            }
            thread::sleep(pause.min(left));
            pause = (pause * 2).min(PAUSE_MAX);
            let mut word = [0; 8];
            client.read(self.pointer, &mut word)?;
            count = u64::from_le_bytes(word);
        }
        Ok(meeting)
    }
}
