//! The carrier between threads of one process: a [`Hub`] of bounded queues.
//!
//! The hub forwards by the longest prefix that contains the destination, like a fabric with one switch. It drops a
//! datagram only if a queue is full or no endpoint has the destination, and counts both at the sender.

mod queue;
#[cfg(test)]
mod tests;

use core::time::Duration;
use std::io;
use std::net::Ipv6Addr;
use std::sync::{Arc, PoisonError, RwLock};

use ipnet::Ipv6Net;

use crate::clock::Clock;
use crate::polling::Polling;
use crate::udp::LARGEST_PAYLOAD_BYTES;
use crate::{
    Capabilities, Counters, Incoming, ManualClock, Outgoing, Polled, ReceiveError, Timestamp,
    TransmitError, Transport, Wait, Wakeable, Waker, monotonic_now,
};
use queue::Datagram;
pub(crate) use queue::Queue;

/// Most endpoints of one hub.
pub const ENDPOINT_LIMIT: usize = 65_536;
/// Datagrams taken from a queue at a time.
const BATCH_COUNT: usize = 64;

/// Looks at the queue between two clock readings; they take about a microsecond.
const POLLS_PER_CLOCK_READING: usize = 32;

/// Why a prefix could not be attached to a hub.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// The hub is full: use another.
    #[error("the hub already has its {ENDPOINT_LIMIT} endpoints")]
    Full,
    /// Another endpoint has the prefix: the caller assigned one prefix to two endpoints.
    #[error("prefix {0} is already attached")]
    Taken(Ipv6Net),
    /// The caller named an endpoint that the hub does not have.
    #[error("the hub has no endpoint {}", .0.0)]
    Unknown(EndpointId),
}

/// An endpoint of a hub, numbered in the order of attachment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndpointId(usize);

/// Endpoints of one process, connected by bounded queues; clones are the same hub.
#[derive(Clone, Debug)]
pub struct Hub {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    clock: Clock,
    queue_limit: usize,
    largest_payload_bytes: usize,
    table: RwLock<Table>,
}

#[derive(Debug, Default)]
struct Table {
    endpoints: Vec<Endpoint>,
    /// Longest prefix first.
    routes: Vec<(Ipv6Net, Vec<EndpointId>)>,
}

#[derive(Debug)]
struct Endpoint {
    port: u16,
    queue: Arc<Queue>,
}

impl Hub {
    /// A hub in real time whose endpoints each hold at most `queue_limit` waiting datagrams.
    pub fn new(queue_limit: usize) -> Self {
        Self::with(Clock::Monotonic, queue_limit, LARGEST_PAYLOAD_BYTES)
    }

    /// A hub in the time of `clock`: its endpoints never sleep; they return 0 if nothing is there.
    pub fn in_virtual_time(clock: ManualClock, queue_limit: usize) -> Self {
        Self::with(Clock::Manual(clock), queue_limit, LARGEST_PAYLOAD_BYTES)
    }

    /// The same empty hub with links that accept payloads of at most `bytes`.
    #[must_use]
    pub fn with_largest_payload(self, bytes: usize) -> Self {
        let shared = &self.shared;
        Self::with(shared.clock.clone(), shared.queue_limit, bytes.min(LARGEST_PAYLOAD_BYTES))
    }

    fn with(clock: Clock, queue_limit: usize, largest_payload_bytes: usize) -> Self {
        let table = RwLock::default();
        Self { shared: Arc::new(Shared { clock, queue_limit, largest_payload_bytes, table }) }
    }

    /// Adds an endpoint that receives on `port` the datagrams for `prefixes`.
    ///
    /// # Errors
    ///
    /// [`AttachError`] if another endpoint has one of the prefixes, or the hub is full; nothing is added then.
    pub fn attach(&self, port: u16, prefixes: &[Ipv6Net]) -> Result<MemoryTransport, AttachError> {
        let mut table = self.shared.table.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(prefix) = prefixes.iter().find(|prefix| table.position(prefix).is_some()) {
            return Err(AttachError::Taken(*prefix));
        }
        if table.endpoints.len() >= ENDPOINT_LIMIT {
            return Err(AttachError::Full);
        }
        let id = EndpointId(table.endpoints.len());
        let queue = Arc::new(Queue::new(self.shared.queue_limit));
        table.endpoints.push(Endpoint { port, queue: Arc::clone(&queue) });
        for prefix in prefixes {
            table.set(*prefix, vec![id]);
        }
        drop(table);
        Ok(MemoryTransport {
            shared: Arc::clone(&self.shared),
            id,
            port,
            queue,
            capabilities: Capabilities {
                name: "memory",
                largest_payload_bytes: self.shared.largest_payload_bytes,
                batch_count: BATCH_COUNT,
                train_segment_count: 1,
                train_bytes: self.shared.largest_payload_bytes,
                receive_buffer_bytes: self.shared.queue_limit * self.shared.largest_payload_bytes,
            },
            counters: Counters::default(),
            arrivals: Vec::with_capacity(BATCH_COUNT),
            polling: Polling::new(),
        })
    }

    /// From now on, sends datagrams for `prefix` to each of `endpoints` except the sender; an empty list removes the prefix.
    ///
    /// # Errors
    ///
    /// [`AttachError::Unknown`] if the hub has no such endpoint; nothing changes then.
    pub fn route(&self, prefix: Ipv6Net, endpoints: &[EndpointId]) -> Result<(), AttachError> {
        let mut table = self.shared.table.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(id) = endpoints.iter().find(|id| id.0 >= table.endpoints.len()) {
            return Err(AttachError::Unknown(*id));
        }
        table.set(prefix, endpoints.to_vec());
        Ok(())
    }
}

impl Table {
    fn position(&self, prefix: &Ipv6Net) -> Option<usize> {
        self.routes.iter().position(|(known, _)| *known == prefix.trunc())
    }

    fn set(&mut self, prefix: Ipv6Net, endpoints: Vec<EndpointId>) {
        let prefix = prefix.trunc();
        self.routes.retain(|(known, _)| *known != prefix);
        if !endpoints.is_empty() {
            self.routes.push((prefix, endpoints));
            self.routes.sort_by_key(|(prefix, _)| core::cmp::Reverse(prefix.prefix_len()));
        }
    }

    fn lookup(&self, destination: &Ipv6Addr) -> &[EndpointId] {
        let route = self.routes.iter().find(|(prefix, _)| prefix.contains(destination));
        route.map_or(&[], |(_, endpoints)| endpoints)
    }
}

/// An endpoint of a [`Hub`].
pub struct MemoryTransport {
    shared: Arc<Shared>,
    id: EndpointId,
    port: u16,
    queue: Arc<Queue>,
    capabilities: Capabilities,
    counters: Counters,
    arrivals: Vec<Datagram>,
    polling: Polling,
}

impl MemoryTransport {
    /// Its id in the hub, for [`Hub::route`].
    pub fn id(&self) -> EndpointId {
        self.id
    }
}

impl Transport for MemoryTransport {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn counters(&self) -> Counters {
        Counters { overflow_drop_count: self.queue.overflow_count(), ..self.counters }
    }

    fn local_port(&self) -> u16 {
        self.port
    }

    fn now(&self) -> Timestamp {
        self.shared.clock.now()
    }

    fn polled(&self) -> Polled {
        self.polling.outcome()
    }

    fn transmit(&mut self, batch: &[Outgoing<'_>]) -> Result<usize, TransmitError> {
        let limit_bytes = self.capabilities.largest_payload_bytes;
        let fits = |datagram: &&Outgoing<'_>| datagram.payload_bytes() <= limit_bytes;
        let count = batch.iter().take_while(fits).count();
        if let (0, Some(first)) = (count, batch.first()) {
            let payload_bytes = first.payload_bytes();
            let limit_bytes = Some(limit_bytes);
            return Err(TransmitError::TooLarge { payload_bytes, limit_bytes });
        }
        let table = self.shared.table.read().unwrap_or_else(PoisonError::into_inner);
        for datagram in batch.iter().take(count) {
            let mut taker_count = 0;
            let ids = table.lookup(&datagram.destination);
            for id in ids {
                let endpoint = &table.endpoints[id.0];
                // A multicast copy does not return to its sender; a unicast may.
                let is_for_it = ids.len() == 1 || *id != self.id;
                if endpoint.port == datagram.destination_port && is_for_it {
                    taker_count += 1;
                    endpoint.queue.push(datagram, self.port);
                }
            }
            self.counters.foreign_drop_count += u64::from(taker_count == 0);
            self.counters.sent_count += 1;
            self.counters.sent_bytes += datagram.payload_bytes() as u64;
        }
        Ok(count)
    }

    fn receive(&mut self, wait: Wait) -> Result<usize, ReceiveError> {
        self.queue.exchange(&mut self.arrivals, BATCH_COUNT);
        self.polling.at_once(!self.arrivals.is_empty());
        if self.arrivals.is_empty()
            && wait.deadline > Timestamp::ZERO
            && matches!(self.shared.clock, Clock::Monotonic)
        {
            self.wait(wait);
            self.queue.exchange(&mut self.arrivals, BATCH_COUNT);
        }
        self.counters.received_count += self.arrivals.len() as u64;
        let bytes: usize = self.arrivals.iter().map(|datagram| datagram.payload.len()).sum();
        self.counters.received_bytes += bytes as u64;
        Ok(self.arrivals.len())
    }

    fn incoming(&self, index: usize) -> Incoming<'_> {
        let datagram = &self.arrivals[index];
        Incoming {
            source: datagram.source,
            source_port: datagram.source_port,
            destination: datagram.destination,
            payload: &datagram.payload,
        }
    }
}

impl Wakeable for MemoryTransport {
    fn waker(&mut self) -> io::Result<Waker> {
        Ok(Waker::of_queue(Arc::clone(&self.queue)))
    }
}

impl MemoryTransport {
    /// Spins, then parks, until a datagram waits or the deadline has passed.
    fn wait(&mut self, wait: Wait) {
        self.polling.begin(wait, self.now());
        while self.polling.goes_on() {
            for _ in 0..POLLS_PER_CLOCK_READING {
                if self.queue.has_datagrams() {
                    self.polling.found();
                    return;
                }
                core::hint::spin_loop();
            }
            if self.polling.polled_until(monotonic_now()) {
                std::thread::yield_now();
                self.polling.yielded_until(monotonic_now());
            }
        }
        let mut now = self.polling.now();
        while wait.sleeps && now < wait.deadline {
            let left: Duration = wait.deadline.saturating_since(now);
            if self.queue.park(left) {
                return;
            }
            now = self.now();
        }
    }
}
