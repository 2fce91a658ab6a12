//! Messages between two ends of a queue pair, with credits.
//!
//! A message has a head of eight bytes: the credits, and what is reserved. A message of the head alone only brings
//! credits, and the program does not see it.

use std::ops::Deref;
use std::time::{Duration, Instant};

use crate::credits::{Credits, TooManyCredits};
use crate::error::{Failure, PostError, VerbError};
use crate::memory::{Buffer, BufferPool};
use crate::queue_pair::{Completed, QueuePair, Read, Work};

/// Bytes before a message's contents.
const HEAD_BYTES: usize = 8;

/// Messages and READs over a queue pair that this has for itself.
#[derive(Debug)]
pub struct Messages {
    queue_pair: QueuePair,
    pool: BufferPool,
    credits: Credits,
}

/// A message, or READs of this end that ended.
#[derive(Debug)]
pub enum Arrival {
    /// A message of the peer, which [`Messages::release`] takes back.
    Message(Message),
    /// A chain of READs ended.
    Read {
        /// The number that the caller gave it.
        token: u64,
        /// Its buffer, or why it failed.
        result: Result<Buffer, Failure>,
    },
}

/// A message of the peer.
#[derive(Debug)]
pub struct Message {
    buffer: Buffer,
    length: usize,
}

impl Deref for Message {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.buffer.get(HEAD_BYTES..self.length).unwrap_or_default()
    }
}

/// Why no more messages can be exchanged: make another queue pair.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// The peer breaks the rule of credits.
    #[error(transparent)]
    Credits(#[from] TooManyCredits),
    /// A message failed, or a buffer for one.
    #[error("a message failed: {0}")]
    Failed(#[from] Failure),
    /// The peer sent a message without a head.
    #[error("the peer sent a message of {0} bytes, which has no head")]
    NoHead(usize),
    /// A request could not be posted.
    #[error(transparent)]
    Post(#[from] PostError),
    /// The device does not answer any more.
    #[error(transparent)]
    Verb(#[from] VerbError),
}

/// Whether a message was posted.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[must_use]
pub enum Sent {
    /// It was.
    Posted,
    /// Not now: the peer has no buffer for it, or this end has none. Take arrivals, and try again.
    NotNow,
}

impl Messages {
    /// The bytes of the longest message in a pool's buffers.
    #[must_use]
    pub fn bytes_max(pool: &BufferPool) -> usize {
        pool.buffer_bytes() - HEAD_BYTES
    }

    /// Posts `count` buffers, at least [`Credits::MIN`], for messages of the peer, which must do the same before either end
    /// connects.
    ///
    /// # Errors
    /// If the pool or the queue pair has too little room.
    pub fn new(
        mut queue_pair: QueuePair,
        pool: &BufferPool,
        count: u16,
    ) -> Result<Self, PostError> {
        let count = count.max(Credits::MIN);
        for _ in 0..count {
            let Some(buffer) = pool.take() else { return Err(PostError::Full) };
            queue_pair.receive(0, buffer).map_err(|(error, _)| error)?;
        }
        Ok(Self { queue_pair, pool: pool.clone(), credits: Credits::new(count) })
    }

    /// The queue pair, to connect it, or to wait for it among other things.
    pub const fn queue_pair(&mut self) -> &mut QueuePair {
        &mut self.queue_pair
    }

    /// Sends a message.
    ///
    /// # Errors
    /// If it is too long, or the queue pair has failed.
    pub fn send(&mut self, message: &[u8]) -> Result<Sent, PostError> {
        if !self.queue_pair.is_connected() {
            return Err(PostError::NotConnected);
        }
        if message.len() > Self::bytes_max(&self.pool) {
            let bytes = self.pool.buffer_bytes();
            return Err(PostError::Outside { offset: HEAD_BYTES, length: message.len(), bytes });
        }
        if !self.queue_pair.has_room() {
            return Ok(Sent::NotNow);
        }
        let Some(buffer) = self.pool.take() else { return Ok(Sent::NotNow) };
        let Some(credits) = self.credits.begin_message() else { return Ok(Sent::NotNow) };
        self.post(buffer, credits, message)?;
        Ok(Sent::Posted)
    }

    fn post(&mut self, mut buffer: Buffer, credits: u16, message: &[u8]) -> Result<(), PostError> {
        let (head, contents) = buffer.split_at_mut(HEAD_BYTES);
        head.fill(0);
        head[..2].copy_from_slice(&credits.to_be_bytes());
        contents[..message.len()].copy_from_slice(message);
        let length = HEAD_BYTES + message.len();
        self.queue_pair.send(0, buffer, length).map_err(|(error, _)| error)
    }

    /// Posts a chain of READs into a buffer of the pool.
    ///
    /// # Errors
    /// With the buffer if it was not posted, as [`QueuePair::read`].
    pub fn read(
        &mut self,
        token: u64,
        buffer: Buffer,
        reads: &[Read],
    ) -> Result<(), (PostError, Buffer)> {
        self.queue_pair.read(token, buffer, reads)
    }

    /// The next arrival: polls for the time of `spin`, and then sleeps. `None` at the deadline.
    ///
    /// # Errors
    /// If no more messages can be exchanged.
    pub fn wait(
        &mut self,
        spin: Duration,
        deadline: Instant,
    ) -> Result<Option<Arrival>, MessageError> {
        while let Some(completed) = self.queue_pair.wait_completed(spin, deadline)? {
            if let Some(arrival) = self.arrival(completed)? {
                return Ok(Some(arrival));
            }
        }
        Ok(None)
    }

    fn arrival(&mut self, completed: Completed) -> Result<Option<Arrival>, MessageError> {
        let Completed { token, work, result } = completed;
        if work == Work::Read {
            let result = result.map(|done| done.buffer);
            return Ok(Some(Arrival::Read { token, result }));
        }
        let done = result?;
        if work == Work::Send {
            // Its buffer returns to the pool: an update may have waited for one.
            drop(done);
            self.update()?;
            return Ok(None);
        }
        let credits = done.buffer.first_chunk().filter(|_| done.received >= HEAD_BYTES);
        let Some(credits) = credits.map(|bytes| u16::from_be_bytes(*bytes)) else {
            return Err(MessageError::NoHead(done.received));
        };
        self.credits.received(credits)?;
        let message = Message { buffer: done.buffer, length: done.received };
        if message.is_empty() {
            self.release(message)?;
            return Ok(None);
        }
        Ok(Some(Arrival::Message(message)))
    }

    /// Posts the buffer of a message again.
    ///
    /// # Errors
    /// If the queue pair has failed.
    pub fn release(&mut self, message: Message) -> Result<(), MessageError> {
        self.queue_pair.receive(0, message.buffer).map_err(|(error, _)| error)?;
        self.credits.posted();
        self.update()
    }

    /// Sends the credits alone if it is time, and if there is room; otherwise a message brings them, or what ends next.
    fn update(&mut self) -> Result<(), MessageError> {
        if !self.queue_pair.has_room() {
            return Ok(());
        }
        let Some(buffer) = self.pool.take() else { return Ok(()) };
        if let Some(credits) = self.credits.begin_update() {
            self.post(buffer, credits, &[])?;
        }
        Ok(())
    }
}
