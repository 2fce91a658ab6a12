//! Messages between two ends of a queue pair, with credits.
//!
//! A message has a head of eight bytes: the credits, and what is reserved. A message of the head alone only brings
//! credits, and the program does not see it.

use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::credits::{Credits, TooManyCredits};
use crate::error::{Failure, PostError, VerbError};
use crate::memory::{Buffer, BufferPool};
use crate::queue_pair::{Completed, Done, QueuePair, Read, Work};

/// Bytes before a message's contents.
const HEAD_BYTES: usize = 8;
/// How soon the buffer of a message that another thread dropped is posted again.
const DROPPED_WITHIN: Duration = Duration::from_millis(20);
/// The numbers of requests: messages, and those that only bring credits.
const MESSAGE: u64 = 0;
const UPDATE: u64 = 1;

/// Messages and READs over a queue pair that this has for itself.
#[derive(Debug)]
pub struct Messages {
    queue_pair: QueuePair,
    pool: BufferPool,
    credits: Credits,
    /// For a message that only brings credits, which so never waits for the pool; `None` while it is posted.
    spare: Option<Buffer>,
    /// Whether a message did not go.
    is_held_up: bool,
    lent: Arc<Lent>,
}

/// The messages that the program has, and the buffers of those that it has had.
#[derive(Debug)]
struct Lent(Mutex<Loans>);

#[derive(Debug)]
struct Loans {
    count: usize,
    /// With room for all: nothing is allocated later.
    ended: Vec<Buffer>,
}

impl Lent {
    fn lock(&self) -> MutexGuard<'_, Loans> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A message, or READs of this end that ended.
#[derive(Debug)]
pub enum Arrival {
    /// A message that did not go ([`Sent::NotNow`]) may go now.
    MaySend,
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

/// A message of the peer. Dropped, it is as good as released, but only when its [`Messages`] are used next.
#[derive(Debug)]
pub struct Message {
    /// `None` only in `drop`.
    buffer: Option<Buffer>,
    length: usize,
    from: Weak<Lent>,
}

impl Deref for Message {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let buffer = self.buffer.as_deref().unwrap_or_default();
        buffer.get(HEAD_BYTES..self.length).unwrap_or_default()
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        // Otherwise the buffer returns to the pool.
        if let Some(lent) = self.from.upgrade() {
            let mut loans = lent.lock();
            loans.count -= 1;
            loans.ended.extend(self.buffer.take());
        }
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
    /// Not now: the peer has no buffer for it, or this end has none. Take arrivals, and try again at the latest after
    /// [`Arrival::MaySend`].
    NotNow,
}

impl Messages {
    /// The bytes of the longest message in a pool's buffers.
    #[must_use]
    pub fn bytes_max(pool: &BufferPool) -> usize {
        pool.buffer_bytes() - HEAD_BYTES
    }

    /// Posts `count` buffers, at least [`Credits::MIN`], for messages of the peer, which must do the same before either end
    /// connects. It takes one more, to tell the peer of them.
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
            queue_pair.receive(MESSAGE, buffer).map_err(|(error, _)| error)?;
        }
        let spare = pool.take();
        if spare.is_none() {
            return Err(PostError::Full);
        }
        let loans = Loans { count: 0, ended: Vec::with_capacity(count.into()) };
        Ok(Self {
            queue_pair,
            pool: pool.clone(),
            credits: Credits::new(count),
            spare,
            is_held_up: false,
            lent: Arc::new(Lent(Mutex::new(loans))),
        })
    }

    /// The queue pair, to connect it, or to wait for it among other things.
    pub const fn queue_pair(&mut self) -> &mut QueuePair {
        &mut self.queue_pair
    }

    /// Sends a message.
    ///
    /// # Errors
    /// If it has no bytes or too many, or the queue pair has failed.
    pub fn send(&mut self, message: &[u8]) -> Result<Sent, PostError> {
        if message.is_empty() {
            return Err(PostError::NoBytes);
        }
        if !self.queue_pair.is_connected() {
            return Err(PostError::NotConnected);
        }
        if message.len() > Self::bytes_max(&self.pool) {
            let bytes = self.pool.buffer_bytes();
            return Err(PostError::Outside { offset: HEAD_BYTES, length: message.len(), bytes });
        }
        self.take_back()?;
        self.is_held_up = !self.may_send();
        if self.is_held_up {
            return Ok(Sent::NotNow);
        }
        let Some(buffer) = self.pool.take() else {
            self.is_held_up = true;
            return Ok(Sent::NotNow);
        };
        let before = self.credits;
        let Some(credits) = self.credits.begin_message() else { return Ok(Sent::NotNow) };
        if let Err((error, _)) = self.post(MESSAGE, buffer, credits, message) {
            self.credits = before;
            return Err(error);
        }
        Ok(Sent::Posted)
    }

    fn may_send(&self) -> bool {
        self.queue_pair.has_room() && self.credits.allow_message() && self.pool.free() > 0
    }

    fn post(
        &mut self,
        token: u64,
        mut buffer: Buffer,
        credits: u16,
        message: &[u8],
    ) -> Result<(), (PostError, Buffer)> {
        let (head, contents) = buffer.split_at_mut(HEAD_BYTES);
        head.fill(0);
        head[..2].copy_from_slice(&credits.to_be_bytes());
        contents[..message.len()].copy_from_slice(message);
        self.queue_pair.send(token, buffer, HEAD_BYTES + message.len())
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

    /// The next arrival: polls for the time of `spin`, and then sleeps. `None` at the deadline, after which it looks once
    /// at most, whatever the peer sends.
    ///
    /// # Errors
    /// If no more messages can be exchanged.
    pub fn wait(
        &mut self,
        spin: Duration,
        deadline: Instant,
    ) -> Result<Option<Arrival>, MessageError> {
        let begun = Instant::now();
        loop {
            let is_lent = self.take_back()?;
            self.update()?;
            if self.is_held_up && self.may_send() {
                self.is_held_up = false;
                return Ok(Some(Arrival::MaySend));
            }
            let now = Instant::now();
            // A message that another thread drops does not wake this one.
            let until = if is_lent { deadline.min(now + DROPPED_WITHIN) } else { deadline };
            let spin = spin.saturating_sub(now - begun);
            if let Some(completed) = self.queue_pair.wait_completed(spin, until)?
                && let Some(arrival) = self.arrival(completed)?
            {
                return Ok(Some(arrival));
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
        }
    }

    fn arrival(&mut self, completed: Completed) -> Result<Option<Arrival>, MessageError> {
        let Completed { token, work, result } = completed;
        if work == Work::Read {
            // An update may have waited for its room.
            self.update()?;
            let result = result.map(|done| done.buffer);
            return Ok(Some(Arrival::Read { token, result }));
        }
        let Done { buffer, received } = result?;
        if work == Work::Send {
            if token == UPDATE {
                self.spare = Some(buffer);
            }
            return Ok(None);
        }
        let credits = buffer.first_chunk().filter(|_| received >= HEAD_BYTES);
        let Some(credits) = credits.map(|bytes| u16::from_be_bytes(*bytes)) else {
            return Err(MessageError::NoHead(received));
        };
        self.credits.received(credits)?;
        if received == HEAD_BYTES {
            self.post_again(buffer)?;
            return Ok(None);
        }
        self.lent.lock().count += 1;
        let from = Arc::downgrade(&self.lent);
        Ok(Some(Arrival::Message(Message { buffer: Some(buffer), length: received, from })))
    }

    /// Posts the buffer of a message again, and tells the peer if it is time.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn release(&mut self, message: Message) -> Result<(), MessageError> {
        drop(message);
        self.take_back()?;
        self.update()
    }

    /// Posts the buffers of messages again that the program has dropped; returns whether it has others.
    fn take_back(&mut self) -> Result<bool, PostError> {
        if !self.queue_pair.is_connected() {
            // What has failed meanwhile must be reported; nothing arrives any more.
            return Ok(false);
        }
        loop {
            let (ended, count) = {
                let mut loans = self.lent.lock();
                (loans.ended.pop(), loans.count)
            };
            match ended {
                Some(buffer) => self.post_again(buffer)?,
                None => return Ok(count > 0),
            }
        }
    }

    fn post_again(&mut self, buffer: Buffer) -> Result<(), PostError> {
        self.queue_pair.receive(MESSAGE, buffer).map_err(|(error, _)| error)?;
        self.credits.posted();
        Ok(())
    }

    /// Sends the credits alone if it is time. If there is no room, or the last ones are on their way, the next request
    /// that ends brings them, or the next message.
    fn update(&mut self) -> Result<(), MessageError> {
        if !self.queue_pair.has_room() {
            return Ok(());
        }
        let Some(buffer) = self.spare.take() else { return Ok(()) };
        let before = self.credits;
        let posted = match self.credits.begin_update() {
            Some(credits) => self.post(UPDATE, buffer, credits, &[]),
            None => {
                self.spare = Some(buffer);
                return Ok(());
            }
        };
        posted.map_err(|(error, buffer)| {
            (self.credits, self.spare) = (before, Some(buffer));
            error.into()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::RemotePlace;
    use crate::simulated::{Handle, PEER, arrive, soon};
    use crate::{Device, PathMtu};

    fn connected(device: &Device) -> (Messages, BufferPool) {
        let (queue_pair, pool) = Handle::queue_pair(device);
        let mut messages = Messages::new(queue_pair, &pool, 4).expect("made");
        let queue_pair = messages.queue_pair();
        queue_pair.connect(PEER, PathMtu::Bytes1024, soon()).expect("connected");
        (messages, pool)
    }

    fn next_message(handle: &Handle, messages: &mut Messages) -> Message {
        arrive(handle, 0, b"text");
        match messages.wait(Duration::ZERO, soon()).expect("waited") {
            Some(Arrival::Message(message)) if &*message == b"text" => message,
            other => panic!("{other:?}"),
        }
    }

    /// The credits that were sent, each with whether contents came with them.
    fn sent(handle: &Handle) -> Vec<(u16, bool)> {
        let sent = std::mem::take(&mut handle.state().sent);
        sent.into_iter().map(|(head, bytes)| (u16::from_be_bytes(head), bytes > 8)).collect()
    }

    fn idle(messages: &mut Messages) {
        let arrival = messages.wait(Duration::ZERO, Instant::now() + Duration::from_millis(1));
        assert!(matches!(arrival, Ok(None)), "{arrival:?}");
    }

    #[test]
    fn credits_that_found_no_room_are_sent_when_reads_end() {
        let (handle, device) = Handle::new();
        let (mut messages, pool) = connected(&device);
        let held: Vec<_> = (0..2).map(|_| next_message(&handle, &mut messages)).collect();
        for token in 0..4 {
            let read = Read { from: RemotePlace { address: 0, key: 0 }, into: 0, length: 8 };
            let posted = messages.read(token, pool.take().expect("one"), &[read]);
            posted.expect("posted");
        }
        held.into_iter().for_each(|message| messages.release(message).expect("released"));
        assert_eq!(sent(&handle), [], "all requests are READs");
        let end = messages.wait(Duration::ZERO, soon()).expect("waited");
        assert!(matches!(end, Some(Arrival::Read { token: 0, result: Ok(_) })), "{end:?}");
        assert_eq!(sent(&handle), [(2, false)]);
    }

    #[test]
    fn a_message_that_did_not_go_is_announced_when_it_may() {
        let (handle, device) = Handle::new();
        let (mut messages, pool) = connected(&device);
        while messages.send(b"text").expect("not failed") == Sent::Posted {}
        idle(&mut messages);
        // Credits alone, which the program does not see otherwise.
        arrive(&handle, 2, b"");
        let arrival = messages.wait(Duration::ZERO, soon()).expect("waited");
        assert!(matches!(arrival, Some(Arrival::MaySend)), "{arrival:?}");
        idle(&mut messages);
        assert_eq!(messages.send(b"text").expect("not failed"), Sent::Posted);
        idle(&mut messages);
        // For lack of a buffer.
        let all: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
        assert_eq!(messages.send(b"text").expect("not failed"), Sent::NotNow);
        idle(&mut messages);
        drop(all);
        let arrival = messages.wait(Duration::ZERO, soon()).expect("waited");
        assert!(matches!(arrival, Some(Arrival::MaySend)), "{arrival:?}");
    }

    #[test]
    fn credits_are_sent_without_a_buffer_of_the_pool_and_once() {
        let (handle, device) = Handle::new();
        let (mut messages, pool) = connected(&device);
        let held: Vec<_> = (0..2).map(|_| next_message(&handle, &mut messages)).collect();
        let all: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
        assert_eq!(messages.send(b"text").expect("not failed"), Sent::NotNow);
        held.into_iter().for_each(|message| messages.release(message).expect("released"));
        assert_eq!(sent(&handle), [(2, false)]);
        // The buffer for that comes back, and serves again.
        idle(&mut messages);
        let held: Vec<_> = (0..2).map(|_| next_message(&handle, &mut messages)).collect();
        held.into_iter().for_each(|message| messages.release(message).expect("released"));
        assert_eq!(sent(&handle), [(2, false)]);
        drop(all);
    }

    #[test]
    fn a_message_that_is_dropped_gives_its_credit() {
        let (handle, device) = Handle::new();
        let (mut messages, pool) = connected(&device);
        let free = pool.free();
        drop(next_message(&handle, &mut messages));
        assert_eq!(messages.send(b"text").expect("not failed"), Sent::Posted);
        assert_eq!(sent(&handle), [(1, true)]);
        drop((next_message(&handle, &mut messages), next_message(&handle, &mut messages)));
        idle(&mut messages);
        assert_eq!(sent(&handle), [(2, false)]);
        // By another thread, while this one waits; only this thread's wait can send the credits.
        let held = [next_message(&handle, &mut messages), next_message(&handle, &mut messages)];
        std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(5));
                drop(held);
            });
            let arrival = messages.wait(Duration::ZERO, Instant::now() + Duration::from_secs(1));
            assert!(matches!(arrival, Ok(None)), "{arrival:?}");
        });
        assert_eq!(sent(&handle), [(2, false)]);
        assert_eq!(pool.free(), free);
        // One that outlives its queue pair gives its buffer to the pool.
        let held = next_message(&handle, &mut messages);
        drop(messages);
        assert_eq!(pool.free(), 15);
        drop(held);
        assert_eq!(pool.free(), 16);
    }

    #[test]
    fn waiting_ends_at_its_deadline_whatever_the_peer_sends() {
        let (handle, device) = Handle::new();
        let (mut messages, _pool) = connected(&device);
        handle.state().is_flooded = true;
        let arrival = messages.wait(Duration::ZERO, Instant::now() + Duration::from_millis(20));
        assert!(matches!(arrival, Ok(None)), "{arrival:?}");
    }

    #[test]
    fn a_message_without_bytes_is_refused_and_a_refused_one_costs_no_credit() {
        let (handle, device) = Handle::new();
        let (mut messages, _pool) = connected(&device);
        assert!(matches!(messages.send(&[]), Err(PostError::NoBytes)));
        drop(next_message(&handle, &mut messages));
        handle.state().takes = 0;
        for _ in 0..9 {
            assert!(matches!(messages.send(b"text"), Err(PostError::Verb(_))));
        }
        handle.state().takes = usize::MAX;
        for credits in [1, 0, 0] {
            assert_eq!(messages.send(b"text").expect("not failed"), Sent::Posted);
            assert_eq!(sent(&handle), [(credits, true)]);
        }
        assert_eq!(messages.send(b"text").expect("not failed"), Sent::NotNow);
    }
}
