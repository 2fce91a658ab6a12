//! A client: a requester, and the memory of the operations that it has under way.

use bluebridge_protocol::{
    Instant,
    requester::{Buffers, Completion, Config, Requester},
};
use bluebridge_wire::Datagram;

use super::{network, plan::Plan, task::Slot};

/// The memory of operations, by token.
#[derive(Default)]
pub(super) struct Slots {
    slots: Vec<Option<Slot>>,
    /// Tokens of an earlier life are not taken for ours.
    pub(super) base: u64,
}

impl Slots {
    /// Keeps a slot and gives its token.
    pub(super) fn insert(&mut self, slot: Slot) -> u64 {
        let index = self.slots.iter().position(Option::is_none).unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.slots[index] = Some(slot);
        self.base + index as u64
    }

    pub(super) fn remove(&mut self, token: u64) -> Option<Slot> {
        let index = self.index(token)?;
        self.slots[index].take()
    }

    pub(super) fn count(&self) -> usize {
        self.slots.iter().flatten().count()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Slot> {
        self.slots.iter().flatten()
    }

    /// Ends a life: everything under way.
    pub(super) fn take_all(&mut self) -> Vec<Slot> {
        self.base += 1 << 32;
        self.slots.drain(..).flatten().collect()
    }

    fn index(&self, token: u64) -> Option<usize> {
        let index = usize::try_from(token.checked_sub(self.base)?).ok()?;
        (index < self.slots.len()).then_some(index)
    }
}

impl Buffers for Slots {
    fn outgoing(&self, token: u64) -> &[u8] {
        let slot = self.index(token).and_then(|index| self.slots[index].as_ref());
        slot.map_or(&[], |slot| &slot.outgoing)
    }

    fn incoming(&mut self, token: u64) -> &mut [u8] {
        let index = self.index(token);
        let slot = index.and_then(|index| self.slots[index].as_mut());
        slot.map_or(&mut [], |slot| &mut slot.incoming)
    }
}

/// A client process.
pub(super) struct Client {
    pub(super) requester: Requester,
    pub(super) slots: Slots,
    pub(super) incarnation: u32,
    /// Datagrams that were none.
    pub(super) malformed: u64,
}

impl Client {
    pub(super) fn new(plan: &Plan, index: usize, incarnation: u32) -> Self {
        let requester = Requester::new(config(plan, index, incarnation));
        Self { requester, slots: Slots::default(), incarnation, malformed: 0 }
    }

    /// Starts a new life; gives what the old one had under way.
    pub(super) fn restart(&mut self, plan: &Plan, index: usize) -> Vec<Slot> {
        self.incarnation += 1;
        self.requester = Requester::new(config(plan, index, self.incarnation));
        self.slots.take_all()
    }

    pub(super) fn hear(
        &mut self,
        now: Instant,
        source: std::net::Ipv6Addr,
        destination: std::net::Ipv6Addr,
        payload: &[u8],
    ) {
        match Datagram::parse(source, destination, payload) {
            Ok(datagram) => self.requester.handle_datagram(now, &datagram, &mut self.slots),
            Err(_) => self.malformed += 1,
        }
    }

    /// The next frame to be sent.
    pub(super) fn poll_frame(&mut self, now: Instant) -> Option<Vec<u8>> {
        let transmit = self.requester.poll_transmit(now, &self.slots)?;
        let ports = (network::PORT, network::PORT);
        let parts = [transmit.head(), transmit.data];
        Some(network::frame(transmit.source, transmit.destination, ports, parts))
    }

    /// The next operation that ended, with its slot.
    pub(super) fn poll_end(&mut self) -> Option<(Slot, Completion)> {
        loop {
            let completion = self.requester.poll_completion()?;
            if let Some(slot) = self.slots.remove(completion.token) {
                return Some((slot, completion));
            }
        }
    }
}

fn config(plan: &Plan, index: usize, incarnation: u32) -> Config {
    let seed = plan.seed ^ (index as u64 + 1) << 40 ^ u64::from(incarnation) << 20;
    let mut config = Config::new(super::SPACE, super::client_node(index), incarnation, seed);
    config.piece_bytes = plan.client_piece_bytes[index];
    config.server_count = plan.requester_servers;
    config.operation_count = 64;
    config.timing.session_idle = plan.session_idle;
    if plan.tight_limits {
        config.credit_pages = 8;
        config.moved_count = 1;
    }
    config
}
