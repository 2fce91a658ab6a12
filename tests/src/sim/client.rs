//! A client: a requester, and the memory of its outstanding operations.

use bluebridge_protocol::{
    Timestamp,
    requester::{Buffers, Completion, Config, Requester, SealedRequest},
};
use bluebridge_wire::Datagram;

use super::{network, plan::Plan, task::Slot};

/// The memory of operations, by token.
#[derive(Default)]
pub(super) struct Slots {
    slots: Vec<Option<Slot>>,
}

impl Slots {
    /// Stores a slot and returns its token.
    pub(super) fn insert(&mut self, slot: Slot) -> u64 {
        let index = self.slots.iter().position(Option::is_none).unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.slots[index] = Some(slot);
        index as u64
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

    fn index(&self, token: u64) -> Option<usize> {
        let index = usize::try_from(token).ok()?;
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

/// A process that was considered dead: it completes its outstanding operations, and begins no
/// others.
struct Zombie {
    requester: Requester,
    slots: Slots,
}

/// A client process.
pub(super) struct Client {
    zombie: Option<Zombie>,
    /// Requesters of earlier incarnations, for their counters.
    ended: Vec<Requester>,
    pub(super) requester: Requester,
    pub(super) slots: Slots,
    pub(super) incarnation: u32,
    /// Malformed datagrams.
    pub(super) malformed: u64,
}

impl Client {
    pub(super) fn new(plan: &Plan, index: usize, incarnation: u32) -> Self {
        let requester = Requester::new(config(plan, index, incarnation));
        Self {
            zombie: None,
            ended: Vec::new(),
            requester,
            slots: Slots::default(),
            incarnation,
            malformed: 0,
        }
    }

    /// Starts a new incarnation; the old one stays in `slots` until the next call.
    pub(super) fn restart(&mut self, plan: &Plan, index: usize, zombie: bool) {
        self.incarnation += 1;
        let requester = Requester::new(config(plan, index, self.incarnation));
        let requester = core::mem::replace(&mut self.requester, requester);
        let slots = core::mem::take(&mut self.slots);
        self.ended.extend(self.zombie.take().map(|zombie| zombie.requester));
        if zombie {
            self.zombie = Some(Zombie { requester, slots });
        } else {
            self.ended.push(requester);
        }
    }

    pub(super) fn receive(
        &mut self,
        now: Timestamp,
        source: std::net::Ipv6Addr,
        destination: std::net::Ipv6Addr,
        payload: &[u8],
    ) {
        match Datagram::parse(source, destination, payload) {
            Ok(datagram) => {
                if let Some(Zombie { requester, slots }) = &mut self.zombie {
                    requester.handle_datagram(now, &datagram, slots);
                }
                self.requester.handle_datagram(now, &datagram, &mut self.slots);
            }
            Err(_) => self.malformed += 1,
        }
    }

    /// The requesters of all incarnations.
    pub(super) fn requesters(&self) -> impl Iterator<Item = &Requester> {
        let zombie = self.zombie.iter().map(|zombie| &zombie.requester);
        self.ended.iter().chain(zombie).chain([&self.requester])
    }

    pub(super) fn handle_timeout(&mut self, now: Timestamp) {
        if let Some(Zombie { requester, .. }) = &mut self.zombie {
            requester.handle_timeout(now);
            while requester.poll_completion().is_some() {}
            if requester.operation_count() == 0 {
                self.ended.extend(self.zombie.take().map(|zombie| zombie.requester));
            }
        }
        self.requester.handle_timeout(now);
    }

    pub(super) fn poll_timeout(&self) -> Option<Timestamp> {
        let zombie = self.zombie.as_ref().and_then(|zombie| zombie.requester.poll_timeout());
        [self.requester.poll_timeout(), zombie].into_iter().flatten().min()
    }

    /// The next frame to send; `refuse` says whether the carrier refuses a datagram.
    pub(super) fn poll_frame(
        &mut self,
        now: Timestamp,
        mut refuse: impl FnMut() -> bool,
    ) -> Option<Vec<u8>> {
        if let Some(Zombie { requester, slots }) = &mut self.zombie
            && let Some(transmit) = requester.poll_transmit(now, slots)
        {
            return Some(frame_of(&transmit));
        }
        loop {
            let transmit = self.requester.poll_transmit(now, &self.slots)?;
            if !refuse() {
                return Some(frame_of(&transmit));
            }
            let origin = transmit.origin;
            self.requester.transmit_refused(now, origin, 1);
        }
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

fn frame_of(transmit: &SealedRequest<'_>) -> Vec<u8> {
    let ports = (network::PORT, network::PORT);
    let parts = [transmit.head(), transmit.data];
    network::frame(transmit.source, transmit.destination, ports, parts)
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
