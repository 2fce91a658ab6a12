//! A wrapper that impairs what a carrier sends: loss, duplication, reordering, delay and corruption.
//!
//! All random values are drawn from a seed, the same number for each datagram, so the verdict on the n-th datagram
//! depends only on the seed and on n. Wrap both ends to impair both directions.

#[cfg(test)]
mod tests;
mod verdict;

use core::time::Duration;
use std::collections::VecDeque;
use std::net::Ipv6Addr;

use rand::SeedableRng;
use rand::rngs::SmallRng;

use crate::{
    Capabilities, Counters, Incoming, Outgoing, Polled, ReceiveError, Timestamp, TransmitError,
    Transport, Wait, Wakeable, Waker,
};
pub use verdict::Probability;
use verdict::Verdict;

/// Most datagrams held back at a time; more are dropped and counted.
pub const HELD_LIMIT: usize = 4096;

/// The impairments of datagrams; the default is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Impairment {
    /// A datagram disappears.
    pub loss: Probability,
    /// A datagram is sent twice.
    pub duplicate: Probability,
    /// One bit of a payload is flipped.
    pub corrupt: Probability,
    /// A datagram is held back until later ones have passed it.
    pub reorder: Probability,
    /// How many later datagrams pass it at most; 0 counts as 1.
    pub reorder_distance: u32,
    /// How long it is held back at most, if too few datagrams follow.
    pub reorder_hold: Duration,
    /// Delay of each datagram.
    pub delay: Duration,
    /// Additional delay at most, evenly distributed; more than the gap between datagrams reorders them.
    pub jitter: Duration,
}

/// Counts of impaired datagrams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImpairmentCounters {
    /// Datagrams sent unchanged.
    pub intact_count: u64,
    /// Datagrams lost.
    pub lost_count: u64,
    /// Datagrams sent twice.
    pub duplicated_count: u64,
    /// Datagrams with a flipped bit.
    pub corrupted_count: u64,
    /// Datagrams held back so that later ones pass them.
    pub reordered_count: u64,
    /// Datagrams delayed.
    pub delayed_count: u64,
    /// Datagrams dropped because [`HELD_LIMIT`] others were held back.
    pub overflow_drop_count: u64,
    /// Datagrams that were held back and then refused by the carrier.
    pub refused_drop_count: u64,
}

/// A carrier that applies an [`Impairment`] to the datagrams it sends.
pub struct Impaired<T> {
    inner: T,
    impairment: Impairment,
    random: SmallRng,
    /// Verdicts for datagrams that the busy carrier has not accepted yet.
    drawn: VecDeque<Verdict>,
    held: Vec<Held>,
    /// Datagrams that have passed, counted to release those held back for them.
    passed_count: u64,
    spare: Vec<Vec<u8>>,
    counters: ImpairmentCounters,
    /// Another thread may wake it.
    has_waker: bool,
}

struct Held {
    due: Timestamp,
    /// Value of `passed_count` at which it is sent, even if it is not due.
    passed_by: Option<u64>,
    source: Ipv6Addr,
    destination: Ipv6Addr,
    destination_port: u16,
    payload: Vec<u8>,
}

impl Held {
    fn is_free(&self, now: Timestamp, passed_count: u64) -> bool {
        self.due <= now || self.passed_by.is_some_and(|passed_by| passed_by <= passed_count)
    }
}

impl<T: Transport> Impaired<T> {
    /// Wraps `inner`; equal seeds give equal verdicts.
    pub fn new(inner: T, impairment: Impairment, seed: u64) -> Self {
        Self {
            inner,
            impairment,
            random: SmallRng::seed_from_u64(seed),
            drawn: VecDeque::new(),
            held: Vec::new(),
            passed_count: 0,
            spare: Vec::new(),
            counters: ImpairmentCounters::default(),
            has_waker: false,
        }
    }

    /// Changes the impairment from now on.
    pub fn set_impairment(&mut self, impairment: Impairment) {
        self.impairment = impairment;
        self.drawn.clear();
    }

    /// The counts so far.
    pub fn impairment_counters(&self) -> ImpairmentCounters {
        self.counters
    }

    /// When the next datagram that is held back is due; a simulation moves its clock there.
    pub fn next_due(&self) -> Option<Timestamp> {
        self.held.iter().map(|held| held.due).min()
    }

    /// The wrapped carrier.
    pub fn inner(&self) -> &T {
        &self.inner
    }

    fn verdict(&mut self, index: usize) -> Verdict {
        while self.drawn.len() <= index {
            self.drawn.push_back(Verdict::draw(&self.impairment, &mut self.random));
        }
        self.drawn[index]
    }

    /// How many datagrams at the front of `batch` pass unchanged before a datagram that is held back must be sent.
    fn intact_run(&mut self, batch: &[Outgoing<'_>]) -> usize {
        let release = self.held.iter().filter_map(|held| held.passed_by).min();
        let room = release.map_or(u64::MAX, |at| at.saturating_sub(self.passed_count).max(1));
        let limit = usize::try_from(room).unwrap_or(usize::MAX).min(batch.len());
        (0..limit).take_while(|index| self.verdict(*index) == Verdict::default()).count()
    }

    /// Applies a verdict other than unchanged passage.
    fn impair(&mut self, datagram: &Outgoing<'_>, verdict: Verdict) {
        if verdict.lost {
            self.counters.lost_count += 1;
            return;
        }
        let now = self.inner.now();
        let mut due = now + verdict.delay;
        let mut passed_by = None;
        self.counters.delayed_count += u64::from(verdict.delay > Duration::ZERO);
        if let Some(distance) = verdict.passed_by {
            self.counters.reordered_count += 1;
            due = due + self.impairment.reorder_hold;
            passed_by = Some(self.passed_count + u64::from(distance));
        }
        let flipped_bit = verdict.flipped_bit.filter(|_| datagram.payload_bytes() > 0);
        self.counters.corrupted_count += u64::from(flipped_bit.is_some());
        self.counters.duplicated_count += u64::from(verdict.duplicated);
        for _ in 0..=u8::from(verdict.duplicated) {
            self.hold(datagram, due, passed_by, flipped_bit);
        }
    }

    fn hold(
        &mut self,
        datagram: &Outgoing<'_>,
        due: Timestamp,
        passed_by: Option<u64>,
        flipped_bit: Option<u32>,
    ) {
        if self.held.len() >= HELD_LIMIT {
            self.counters.overflow_drop_count += 1;
            return;
        }
        let mut payload = self.spare.pop().unwrap_or_default();
        payload.clear();
        payload.extend_from_slice(datagram.header);
        payload.extend_from_slice(datagram.data);
        if let Some(bit) = flipped_bit {
            let position = bit as usize % (payload.len() * 8);
            payload[position / 8] ^= 1 << (position % 8);
        }
        let Outgoing { source, destination, destination_port, .. } = *datagram;
        self.held.push(Held { due, passed_by, source, destination, destination_port, payload });
    }

    /// Sends the datagrams that were held back long enough, earliest first, as far as the carrier accepts them.
    fn release(&mut self) {
        loop {
            let now = self.inner.now();
            let free = self.held.iter().enumerate();
            let free = free.filter(|(_, held)| held.is_free(now, self.passed_count));
            let Some((index, _)) = free.min_by_key(|(index, held)| (held.due, *index)) else {
                return;
            };
            let held = &self.held[index];
            let datagram = Outgoing {
                source: held.source,
                destination: held.destination,
                destination_port: held.destination_port,
                header: &held.payload,
                data: &[],
            };
            match self.inner.transmit(&[datagram]) {
                Ok(0) => return,
                Ok(_) => self.passed_count += 1,
                // For its sender it was sent; for the sender, this is a loss in transit.
                Err(_) => self.counters.refused_drop_count += 1,
            }
            self.spare.push(self.held.remove(index).payload);
        }
    }
}

impl<T: Wakeable> Wakeable for Impaired<T> {
    fn waker(&mut self) -> std::io::Result<Waker> {
        self.has_waker = true;
        self.inner.waker()
    }
}

impl<T: Transport> Transport for Impaired<T> {
    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn counters(&self) -> Counters {
        self.inner.counters()
    }

    fn local_port(&self) -> u16 {
        self.inner.local_port()
    }

    fn now(&self) -> Timestamp {
        self.inner.now()
    }

    fn transmit(&mut self, batch: &[Outgoing<'_>]) -> Result<usize, TransmitError> {
        let mut sent_count = 0;
        self.release();
        while sent_count < batch.len() {
            let rest = &batch[sent_count..];
            let run = self.intact_run(rest);
            if run == 0 {
                let verdict = self.verdict(0);
                self.drawn.pop_front();
                self.impair(&rest[0], verdict);
                sent_count += 1;
            } else {
                match self.inner.transmit(&rest[..run]) {
                    Ok(count) => {
                        self.drawn.drain(..count.min(self.drawn.len()));
                        self.counters.intact_count += count as u64;
                        self.passed_count += count as u64;
                        sent_count += count;
                        if count < run {
                            break;
                        }
                    }
                    Err(_) if sent_count > 0 => break,
                    Err(error) => {
                        self.drawn.pop_front();
                        return Err(error);
                    }
                }
            }
            self.release();
        }
        Ok(sent_count)
    }

    fn receive(&mut self, wait: Wait) -> Result<usize, ReceiveError> {
        let start = self.inner.now();
        loop {
            self.release();
            let now = self.inner.now();
            let until = self.next_due().map_or(wait.deadline, |due| due.min(wait.deadline));
            let spin = wait.spin.saturating_sub(now.saturating_since(start));
            let count = self.inner.receive(Wait { spin, deadline: until, ..wait })?;
            // The inner carrier was interrupted or woken, uses virtual time, or has waited until the end.
            if count > 0 || until == wait.deadline || self.inner.now() < until {
                return Ok(count);
            }
            // It may have been woken at the moment at which a held datagram is due, and does not tell.
            if self.has_waker {
                self.release();
                return Ok(0);
            }
        }
    }

    fn polled(&self) -> Polled {
        self.inner.polled()
    }

    fn incoming(&self, index: usize) -> Incoming<'_> {
        self.inner.incoming(index)
    }
}
