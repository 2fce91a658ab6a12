//! Requests that were received but not served yet: the order of service, and what is dropped.
//!
//! The socket queue of the system is first in, first out: behind a flood all requests wait. Therefore a
//! loop that finds more than a few datagrams takes all of them out of the socket at once, sorts them
//! by sender, and serves the senders in turn (deficit round robin, Shreedhar and Varghese 1995), each
//! for the same estimated time. Requests of open sessions come before requests without one, for which
//! a share of each round is reserved. A sender may have as many requests here as there is room left
//! (dynamic thresholds, Choudhury and Hahne 1998): one alone fills half, and what it sends beyond that
//! is dropped after only its addresses and header were read.
//!
//! All memory is allocated at the start.

#[cfg(test)]
mod tests;

use std::{collections::HashMap, net::Ipv6Addr};

use bluebridge_transport::Incoming;
use bluebridge_wire::{
    Command, HeaderView, NodeId, Space, WireCommand,
    address::{Fields, PAGE_BYTES},
    header::HEADER_BYTES_MAX,
};

const NONE: u16 = u16::MAX;

/// Requests that may wait at once. One sender alone may have half of them, which is the window of a
/// session in pieces of a quarter of a page.
pub(crate) const LIMIT: u16 = 4096;

/// Room for one copied datagram: the longest header and a page.
const SLOT_BYTES: usize = HEADER_BYTES_MAX + PAGE_BYTES;

/// Estimated core time of a request without its data, in nanoseconds: with the system's part of
/// reception and reply, measured for a PING.
const REQUEST_NANOS: u32 = 3300;

/// Bytes that are copied and checked in a nanosecond.
const BYTES_PER_NANO: u32 = 8;

/// Pages whose state is written in a nanosecond, when they are allocated or freed.
const PAGES_PER_NANO: u32 = 1;

/// Estimated time that a sender is served for in one turn, in nanoseconds.
const TURN_NANOS: u32 = 2 * REQUEST_NANOS;

/// Estimated time of one round, in nanoseconds; then the socket is read again. A request that
/// arrives during a round waits for its end.
const ROUND_NANOS: u32 = 150_000;

/// The part of a round that is reserved for requests without a session, if there are any.
const SESSIONLESS_NANOS: u32 = ROUND_NANOS / 8;

/// A sender, as the order of service distinguishes them.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) struct Sender {
    pub(crate) space: Space,
    pub(crate) node: NodeId,
    /// Whether its requests belong to an open session.
    pub(crate) has_session: bool,
}

/// The fields of a datagram that are read before it is checked.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Preview {
    pub(crate) space: Space,
    pub(crate) node: NodeId,
    pub(crate) session: u64,
    /// The estimated time that it takes, in nanoseconds.
    pub(crate) cost: u32,
}

impl Preview {
    /// Reads the addresses and the header, which may be forged. A datagram that is no request of
    /// the fabric counts as from node 0, which no endpoint has.
    pub(crate) fn new(incoming: &Incoming<'_>) -> Self {
        let view = HeaderView::new(incoming.payload).ok();
        let header = view.map(|view| view.header()).unwrap_or_default();
        let from = Fields::unpack(incoming.source);
        let (space, node) = from.map_or((Space(0), NodeId::ANY), |from| (from.space, from.node));
        let command = Fields::unpack(incoming.destination)
            .and_then(|to| WireCommand::from_bits(to.command).command());
        let data = u32::try_from(incoming.payload.len()).unwrap_or(u32::MAX);
        let cost = cost(command, header.length, data);
        Self { space, node, session: header.session, cost }
    }
}

/// The estimated time of a request, in nanoseconds.
fn cost(command: Option<Command>, length: u32, data_bytes: u32) -> u32 {
    let effect = match command {
        Some(Command::Read | Command::Update) => length.min(1 << 15) / BYTES_PER_NANO,
        Some(Command::Create | Command::Delete) => length.min(1 << 18) / PAGES_PER_NANO,
        _ => 0,
    };
    REQUEST_NANOS + effect + data_bytes / BYTES_PER_NANO
}

/// Where a datagram is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Place {
    /// In the carrier's buffers, with this index in the last batch.
    Carrier(usize),
    /// Here, in this slot.
    Held(u16),
}

/// A waiting datagram.
#[derive(Clone, Copy)]
struct Entry {
    place: Place,
    cost: u32,
    behind: u16,
}

/// A datagram that was copied out of the carrier's buffers.
#[derive(Clone, Copy)]
struct Held {
    source: Ipv6Addr,
    destination: Ipv6Addr,
    source_port: u16,
    bytes: usize,
}

/// A sender with waiting requests.
#[derive(Clone, Copy)]
struct Flow {
    sender: Sender,
    first: u16,
    last: u16,
    count: u16,
    /// Time that is left for it in this turn.
    left_nanos: u32,
    /// The next in the ring of its class.
    next: u16,
}

/// The senders of one class, in the order of their turns.
#[derive(Clone, Copy)]
struct Ring {
    first: u16,
    last: u16,
}

/// The waiting requests, by sender.
pub(crate) struct Backlog {
    entries: Vec<Entry>,
    vacant: Vec<u16>,
    /// Entries that were added since the last [`Self::hold`].
    fresh: Vec<u16>,
    held: Vec<Held>,
    bytes: Vec<u8>,
    flows: Vec<Flow>,
    vacant_flows: Vec<u16>,
    by_sender: HashMap<Sender, u16>,
    /// The flow of the last datagram; mostly the next one has the same sender.
    latest: u16,
    sessionless: Ring,
    with_session: Ring,
    /// Estimated time that is left in this round.
    left_nanos: u32,
}

impl Backlog {
    pub(crate) fn new() -> Self {
        let count = usize::from(LIMIT);
        let entry = Entry { place: Place::Carrier(0), cost: 0, behind: NONE };
        let (source, destination) = (Ipv6Addr::UNSPECIFIED, Ipv6Addr::UNSPECIFIED);
        let held = Held { source, destination, source_port: 0, bytes: 0 };
        let sender = Sender { space: Space(0), node: NodeId::ANY, has_session: false };
        let flow = Flow { sender, first: NONE, last: NONE, count: 0, left_nanos: 0, next: NONE };
        let ring = Ring { first: NONE, last: NONE };
        Self {
            entries: vec![entry; count],
            vacant: (0..LIMIT).rev().collect(),
            fresh: Vec::with_capacity(count),
            held: vec![held; count],
            bytes: vec![0; count * SLOT_BYTES],
            flows: vec![flow; count],
            vacant_flows: (0..LIMIT).rev().collect(),
            // Twice the number of senders, so that it never grows.
            by_sender: HashMap::with_capacity(2 * count),
            latest: NONE,
            sessionless: ring,
            with_session: ring,
            left_nanos: 0,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.vacant.len() == self.entries.len()
    }

    /// Adds a datagram of the carrier's last batch behind the other ones of its sender. Returns
    /// false if there was no room; then it is dropped.
    pub(crate) fn add(&mut self, sender: Sender, cost: u32, number: usize) -> bool {
        let Some(flow) = self.flow(sender) else { return false };
        let count = usize::from(self.flows[usize::from(flow)].count);
        if count >= self.vacant.len() {
            return false;
        }
        let Some(entry) = self.vacant.pop() else { return false };
        self.entries[usize::from(entry)] =
            Entry { place: Place::Carrier(number), cost, behind: NONE };
        self.fresh.push(entry);
        let slot = &mut self.flows[usize::from(flow)];
        let last = core::mem::replace(&mut slot.last, entry);
        slot.count += 1;
        if slot.count == 1 {
            slot.first = entry;
            self.enter_ring(flow);
        } else {
            self.entries[usize::from(last)].behind = entry;
        }
        true
    }

    /// Begins a round, after the carrier was read.
    pub(crate) const fn begin_round(&mut self) {
        self.left_nanos = ROUND_NANOS;
    }

    /// The datagram to serve next in this round, if time is left for one. It stays valid until the
    /// next call of any method except [`Self::held`].
    pub(crate) fn next(&mut self) -> Option<Place> {
        let has_sessionless = self.sessionless.first != NONE;
        let kept = if has_sessionless { SESSIONLESS_NANOS } else { 0 };
        let has_session = self.with_session.first != NONE && self.left_nanos > kept;
        if self.left_nanos == 0 || !(has_session || has_sessionless) {
            return None;
        }
        loop {
            let ring = if has_session { self.with_session } else { self.sessionless };
            let flow = &mut self.flows[usize::from(ring.first)];
            let cost = self.entries[usize::from(flow.first)].cost;
            if flow.left_nanos >= cost {
                flow.left_nanos -= cost;
                self.left_nanos = self.left_nanos.saturating_sub(cost);
                return Some(self.take(ring.first));
            }
            flow.left_nanos += TURN_NANOS;
            let again = self.leave_ring(has_session);
            self.enter_ring(again);
        }
    }

    /// Copies the waiting datagrams out of the carrier's buffers, which are reused next. Returns
    /// how many were too long to be copied and are lost.
    pub(crate) fn hold<'a>(&mut self, incoming: impl Fn(usize) -> Incoming<'a>) -> usize {
        let mut lost = 0;
        while let Some(number) = self.fresh.pop() {
            // Entries that were served since then are skipped.
            if let Place::Carrier(index) = self.entries[usize::from(number)].place {
                self.entries[usize::from(number)].place = Place::Held(number);
                lost += usize::from(!self.copy(number, &incoming(index)));
            }
        }
        lost
    }

    /// A copied datagram.
    pub(crate) fn held(&self, slot: u16) -> Incoming<'_> {
        let Held { source, destination, source_port, bytes } = self.held[usize::from(slot)];
        let start = usize::from(slot) * SLOT_BYTES;
        Incoming { source, source_port, destination, payload: &self.bytes[start..start + bytes] }
    }

    /// Copies a datagram. One that is too long is replaced by an empty one, which the parser
    /// refuses.
    fn copy(&mut self, slot: u16, incoming: &Incoming<'_>) -> bool {
        let Incoming { source, source_port, destination, payload } = *incoming;
        let fits = payload.len() <= SLOT_BYTES;
        let payload = if fits { payload } else { &[] };
        let bytes = payload.len();
        self.held[usize::from(slot)] = Held { source, destination, source_port, bytes };
        let start = usize::from(slot) * SLOT_BYTES;
        self.bytes[start..start + bytes].copy_from_slice(payload);
        fits
    }

    /// The flow of a sender; a new one if it has none.
    fn flow(&mut self, sender: Sender) -> Option<u16> {
        let latest = self.flows.get(usize::from(self.latest));
        if latest.is_some_and(|flow| flow.count > 0 && flow.sender == sender) {
            return Some(self.latest);
        }
        let known = self.by_sender.get(&sender).copied();
        let flow = match known {
            Some(flow) => flow,
            // Each flow has at least one entry, so a vacant entry implies a vacant flow.
            None if self.vacant.is_empty() => return None,
            None => {
                let flow = self.vacant_flows.pop()?;
                self.by_sender.insert(sender, flow);
                let slot = &mut self.flows[usize::from(flow)];
                (slot.sender, slot.count, slot.left_nanos) = (sender, 0, 0);
                flow
            }
        };
        self.latest = flow;
        Some(flow)
    }

    /// Takes the first entry of a flow.
    fn take(&mut self, flow: u16) -> Place {
        let slot = &mut self.flows[usize::from(flow)];
        let number = slot.first;
        let Entry { behind, .. } = self.entries[usize::from(number)];
        let place =
            core::mem::replace(&mut self.entries[usize::from(number)].place, Place::Held(number));
        slot.first = behind;
        slot.count -= 1;
        let sender = slot.sender;
        self.vacant.push(number);
        if self.flows[usize::from(flow)].count == 0 {
            self.leave_ring(sender.has_session);
            self.by_sender.remove(&sender);
            self.vacant_flows.push(flow);
        }
        place
    }

    const fn ring(&mut self, has_session: bool) -> &mut Ring {
        if has_session { &mut self.with_session } else { &mut self.sessionless }
    }

    fn enter_ring(&mut self, flow: u16) {
        let slot = &mut self.flows[usize::from(flow)];
        slot.next = NONE;
        let has_session = slot.sender.has_session;
        let ring = self.ring(has_session);
        let last = core::mem::replace(&mut ring.last, flow);
        if ring.first == NONE {
            ring.first = flow;
        } else {
            self.flows[usize::from(last)].next = flow;
        }
    }

    /// Removes the flow at the head of its ring.
    fn leave_ring(&mut self, has_session: bool) -> u16 {
        let flow = self.ring(has_session).first;
        let next = self.flows[usize::from(flow)].next;
        self.ring(has_session).first = next;
        flow
    }
}
