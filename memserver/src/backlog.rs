//! Requests that were received and not served yet: whose turn it is, and what is dropped.
//!
//! The system's queue of a socket is first in, first out: behind a flood everybody waits. So a loop
//! that finds more than a few datagrams takes all there is out of the socket at once, sorts it here by
//! sender, and serves the senders in turn (deficit round robin, Shreedhar and Varghese 1995), each for
//! the same estimated time. Requests of open sessions come before strangers', for whom a share of each
//! round is kept. A sender may have as many requests here as there is room left (dynamic thresholds,
//! Choudhury and Hahne 1998): one alone fills half, and what it sends beyond that is dropped before
//! anything but its addresses was read.
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

/// Requests that may be here at once. One sender alone may have half of them, which is the window of
/// a session in pieces of a quarter of a page.
pub(crate) const LIMIT: u16 = 4096;

/// Room for one held datagram: the longest header and a page.
const SLOT_BYTES: usize = HEADER_BYTES_MAX + PAGE_BYTES;

/// What a request is reckoned to take of the core beside its data, with the system's part of its
/// reception and reply; in nanoseconds, measured for a PING.
const REQUEST_NANOS: u32 = 3300;

/// Bytes that are copied and checked in a nanosecond.
const BYTES_PER_NANO: u32 = 8;

/// Pages whose state is written in a nanosecond, when they are allocated or freed.
const PAGES_PER_NANO: u32 = 1;

/// Estimated time that a sender is served for in one turn, in nanoseconds.
const TURN_NANOS: u32 = 2 * REQUEST_NANOS;

/// Estimated time of one round, after which the socket is looked at again, in nanoseconds. Whoever
/// comes during a round waits for its end.
const ROUND_NANOS: u32 = 150_000;

/// The part of a round that is kept for strangers, if there are any.
const STRANGERS_NANOS: u32 = ROUND_NANOS / 8;

/// What decides when a request is served.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) struct Sender {
    pub(crate) space: Space,
    pub(crate) node: NodeId,
    /// Whether it asks in an open session.
    pub(crate) is_known: bool,
}

/// What is read of a datagram before it is checked.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Glance {
    pub(crate) space: Space,
    pub(crate) node: NodeId,
    pub(crate) session: u64,
    /// The estimated time that it takes, in nanoseconds.
    pub(crate) cost: u32,
}

impl Glance {
    /// Looks at the addresses and the header, which need not be true. What is no request of the
    /// fabric counts as of node 0, which no endpoint is.
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
    /// In the carrier's buffers, with this number of the last reception.
    Carrier(usize),
    /// Here, in this slot.
    Held(u16),
}

/// A datagram that waits.
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

/// A sender of which something waits.
#[derive(Clone, Copy)]
struct Flow {
    sender: Sender,
    first: u16,
    last: u16,
    count: u16,
    /// Time that it may still be served for in this turn.
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

/// The requests that wait, by sender.
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
    /// The flow of the last datagram, whose sender is mostly the next one's.
    latest: u16,
    strangers: Ring,
    known: Ring,
    /// Estimated time that is left of this round.
    left_nanos: u32,
}

impl Backlog {
    pub(crate) fn new() -> Self {
        let count = usize::from(LIMIT);
        let entry = Entry { place: Place::Carrier(0), cost: 0, behind: NONE };
        let (source, destination) = (Ipv6Addr::UNSPECIFIED, Ipv6Addr::UNSPECIFIED);
        let held = Held { source, destination, source_port: 0, bytes: 0 };
        let sender = Sender { space: Space(0), node: NodeId::ANY, is_known: false };
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
            // Twice of what is ever in it, so that it never grows.
            by_sender: HashMap::with_capacity(2 * count),
            latest: NONE,
            strangers: ring,
            known: ring,
            left_nanos: 0,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.vacant.len() == self.entries.len()
    }

    /// Adds a datagram of the carrier's last reception behind its sender's others; says whether there
    /// was room. One without room is lost.
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

    /// Begins a round: the carrier was looked at.
    pub(crate) const fn begin_round(&mut self) {
        self.left_nanos = ROUND_NANOS;
    }

    /// The datagram to be served next in this round, if there is time for one; it stays where it is
    /// until the next call of anything but [`Self::held`].
    pub(crate) fn next(&mut self) -> Option<Place> {
        let has_strangers = self.strangers.first != NONE;
        let kept = if has_strangers { STRANGERS_NANOS } else { 0 };
        let is_known = self.known.first != NONE && self.left_nanos > kept;
        if self.left_nanos == 0 || !(is_known || has_strangers) {
            return None;
        }
        loop {
            let ring = if is_known { self.known } else { self.strangers };
            let flow = &mut self.flows[usize::from(ring.first)];
            let cost = self.entries[usize::from(flow.first)].cost;
            if flow.left_nanos >= cost {
                flow.left_nanos -= cost;
                self.left_nanos = self.left_nanos.saturating_sub(cost);
                return Some(self.take(ring.first));
            }
            flow.left_nanos += TURN_NANOS;
            let again = self.leave_ring(is_known);
            self.enter_ring(again);
        }
    }

    /// Copies what waits in the carrier's buffers, because they are about to be used again; gives the
    /// number of datagrams that were too long for that and are lost.
    pub(crate) fn hold<'a>(&mut self, incoming: impl Fn(usize) -> Incoming<'a>) -> usize {
        let mut lost = 0;
        while let Some(number) = self.fresh.pop() {
            // What was served since is not there any more.
            if let Place::Carrier(index) = self.entries[usize::from(number)].place {
                self.entries[usize::from(number)].place = Place::Held(number);
                lost += usize::from(!self.copy(number, &incoming(index)));
            }
        }
        lost
    }

    /// A datagram that was copied.
    pub(crate) fn held(&self, slot: u16) -> Incoming<'_> {
        let Held { source, destination, source_port, bytes } = self.held[usize::from(slot)];
        let start = usize::from(slot) * SLOT_BYTES;
        Incoming { source, source_port, destination, payload: &self.bytes[start..start + bytes] }
    }

    /// Copies a datagram; one that is too long becomes an empty one, which is refused by the parser.
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

    /// The flow of a sender, made if there is none.
    fn flow(&mut self, sender: Sender) -> Option<u16> {
        let latest = self.flows.get(usize::from(self.latest));
        if latest.is_some_and(|flow| flow.count > 0 && flow.sender == sender) {
            return Some(self.latest);
        }
        let known = self.by_sender.get(&sender).copied();
        let flow = match known {
            Some(flow) => flow,
            // A flow has an entry at least, so there is one left if an entry is.
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

    /// Takes the first entry of the flow whose turn it is.
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
            self.leave_ring(sender.is_known);
            self.by_sender.remove(&sender);
            self.vacant_flows.push(flow);
        }
        place
    }

    const fn ring(&mut self, is_known: bool) -> &mut Ring {
        if is_known { &mut self.known } else { &mut self.strangers }
    }

    fn enter_ring(&mut self, flow: u16) {
        let slot = &mut self.flows[usize::from(flow)];
        slot.next = NONE;
        let is_known = slot.sender.is_known;
        let ring = self.ring(is_known);
        let last = core::mem::replace(&mut ring.last, flow);
        if ring.first == NONE {
            ring.first = flow;
        } else {
            self.flows[usize::from(last)].next = flow;
        }
    }

    /// Takes the flow whose turn it is out of its ring.
    fn leave_ring(&mut self, is_known: bool) -> u16 {
        let flow = self.ring(is_known).first;
        let next = self.flows[usize::from(flow)].next;
        self.ring(is_known).first = next;
        flow
    }
}
