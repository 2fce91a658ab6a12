//! The requesters with which one shard has parts of allocations freed that are at other servers.

use bluebridge_protocol::{
    Timestamp,
    freer::Freer,
    requester::{self, Requester},
    responder::Responder,
    store::PageStore,
};
use bluebridge_transport::{TransmitError, Transport};
use bluebridge_wire::{Datagram, Space};

use crate::{
    deputies::Deputies,
    migration::{Identity, selector_of, send_all},
};

/// Spaces whose allocations are freed at once. Those of others wait.
const SPACES_MAX: u32 = 64;

struct OfSpace {
    freer: Freer,
    requester: Requester,
    selector: u32,
}

impl OfSpace {
    /// Whether another space may have its place; `is_freed` says of which spaces allocations are freed.
    fn has_ended(&self, is_freed: impl Fn(Space) -> bool) -> bool {
        self.freer.is_idle() && !is_freed(self.freer.space())
    }
}

/// The allocations that one shard frees, of which parts are at other servers.
pub(crate) struct Freeings {
    identity: Identity,
    spaces: Vec<OfSpace>,
}

impl Freeings {
    pub(crate) const fn new(identity: Identity) -> Self {
        Self { identity, spaces: Vec::new() }
    }

    /// Whether there is nothing to do.
    pub(crate) fn is_idle(&self, responder: &Responder) -> bool {
        !responder.has_freeings() && self.spaces.iter().all(|of| of.freer.is_idle())
    }

    /// Handles a reply; returns false if it is not about these.
    pub(crate) fn receive(&mut self, now: Timestamp, datagram: &Datagram<'_>) -> bool {
        let selector = selector_of(&datagram.to);
        let found = self.spaces.iter_mut().find(|of| of.selector == selector);
        let Some(OfSpace { freer, requester, .. }) = found else { return false };
        requester.handle_datagram(now, datagram, freer);
        true
    }

    /// Goes on with what is due, and sends requests. The responder's replies were sent; it may have others afterwards.
    ///
    /// # Errors
    /// [`TransmitError::Socket`]: the carrier failed for good.
    pub(crate) fn drive<T: Transport, S: PageStore + ?Sized>(
        &mut self,
        now: Timestamp,
        (transport, responder): (&mut T, &mut Responder),
        deputies: &Deputies,
        store: &mut S,
    ) -> Result<(), TransmitError> {
        let spaces: Vec<Space> = responder.freeings().map(|of| of.space).collect();
        for space in &spaces {
            self.attend(*space, &spaces);
        }
        for OfSpace { freer, requester, .. } in &mut self.spaces {
            requester.handle_timeout(now);
            while let Some(completion) = requester.poll_completion() {
                freer.heard(now, &completion);
            }
            let known = |home, location| deputies.place_of(home, location);
            freer.poll(now, (&mut *requester, &mut *responder), &known, store);
            send_all(now, transport, requester, freer)?;
        }
        Ok(())
    }

    /// Makes a requester for a space, if there is none and there is room: for those of `all`, allocations are freed.
    fn attend(&mut self, space: Space, all: &[Space]) {
        if self.spaces.iter().any(|of| of.freer.space() == space) {
            return;
        }
        let is_used = |number: &u32| self.spaces.iter().any(|of| of.selector & 0xff == *number);
        let Some(number) = (0..SPACES_MAX).find(|number| !is_used(number)) else {
            let idle = self.spaces.iter().position(|of| of.has_ended(|space| all.contains(&space)));
            if let Some(idle) = idle {
                let OfSpace { selector, .. } = self.spaces.swap_remove(idle);
                self.insert(space, selector);
            }
            return;
        };
        self.insert(space, self.identity.selector_of_freer(number));
    }

    fn insert(&mut self, space: Space, selector: u32) {
        let Identity { node, piece_bytes, seed, incarnation, .. } = self.identity;
        let seed = seed ^ u64::from(selector) << 32 ^ u64::from(space.0);
        let config = requester::Config {
            selector,
            piece_bytes,
            ..requester::Config::new(space, node, incarnation, seed)
        };
        let requester = Requester::new(config);
        self.spaces.push(OfSpace { freer: Freer::new(space), requester, selector });
    }

    /// When [`Self::drive`] is to be called again, if nothing arrives before.
    pub(crate) fn poll_timeout(&self, responder: &Responder) -> Option<Timestamp> {
        // A space that found no place gets that of another one as soon as the other has ended.
        let waits = |space| self.spaces.iter().all(|of| of.freer.space() != space);
        let is_freed = |space| responder.freeings().any(|of| of.space == space);
        if responder.freeings().any(|of| waits(of.space))
            && self.spaces.iter().any(|of| of.has_ended(is_freed))
        {
            return Some(Timestamp::ZERO);
        }
        let due = self.spaces.iter().filter(|of| !of.freer.is_idle());
        due.flat_map(|of| [of.requester.poll_timeout(), of.freer.poll_timeout()]).flatten().min()
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use bluebridge_protocol::responder::Config;
    use bluebridge_transport::memory::{Hub, MemoryTransport};
    use bluebridge_wire::{NodeId, UDP_PORT};

    use super::*;
    use crate::{Arena, ArenaConfig, ShardMemory};

    const SERVER: NodeId = NodeId(9);
    const OTHER: NodeId = NodeId(30);
    const LINE: u64 = 8;

    /// A shard that has given away one allocation of each of so many spaces, and frees them.
    struct World {
        transport: MemoryTransport,
        responder: Responder,
        store: Arena,
        freeings: Freeings,
    }

    impl World {
        fn new(spaces: Range<u16>) -> Self {
            let transport = Hub::new(16).attach(UDP_PORT, &[]).expect("it is the first");
            let now = transport.now();
            let spaces: Vec<_> = spaces.map(Space).collect();
            let config = Config { spaces: spaces.clone(), ..Config::new(spaces[0], SERVER, 1, 5) };
            let mut responder = Responder::new(&config).expect("a valid configuration");
            let memory = ShardMemory::from(crate::Memory::heap(spaces.len() * 8 * 4096));
            let mut store = Arena::open(&ArenaConfig::default(), memory).expect("it is empty");
            responder.begin(now, &mut store);
            for space in spaces {
                let grant = store.create(space, 8).expect("there is room");
                store.complete(grant.location);
                let first = grant.location.page();
                responder.add_moved(first..first + LINE, OTHER).expect("there is room");
                let purged = responder.purge(now, space, grant, &mut store).expect("no replies");
                assert!(purged.is_ok(), "{purged:?}");
            }
            let (piece_bytes, credit_pages) = (4096, 64);
            let identity = Identity {
                node: SERVER,
                incarnation: 1,
                shard: 0,
                piece_bytes,
                credit_pages,
                seed: 1,
            };
            Self { transport, responder, store, freeings: Freeings::new(identity) }
        }

        fn drive(&mut self) {
            let now = self.transport.now();
            let machines = (&mut self.transport, &mut self.responder);
            let driven = self.freeings.drive(now, machines, &Deputies::default(), &mut self.store);
            driven.expect("the carrier works");
        }

        fn is_due(&self) -> bool {
            let due = self.freeings.poll_timeout(&self.responder);
            due.is_some_and(|due| due <= self.transport.now())
        }

        /// Spaces whose allocations wait for a requester.
        fn waiting(&self) -> Vec<Space> {
            let spaces = self.responder.freeings().map(|of| of.space);
            let has =
                |space: &Space| self.freeings.spaces.iter().any(|of| of.freer.space() == *space);
            spaces.filter(|space| !has(space)).collect()
        }
    }

    #[test]
    fn a_space_that_waits_for_a_requester_is_due_as_soon_as_another_has_ended() {
        let last = u16::try_from(SPACES_MAX).expect("few spaces") + 1;
        let mut world = World::new(1..last + 1);
        world.drive();
        assert_eq!(world.waiting(), [Space(last)]);
        assert!(!world.is_due(), "requests are under way, and there is no place");
        let World { responder, store, freeings, transport } = &mut world;
        let first = responder.freeings().find(|of| of.space == Space(1)).expect("it is freed");
        responder.hand_over(transport.now(), first.id, store);
        freeings.spaces[0].freer = Freer::new(Space(1));
        assert!(world.is_due(), "though nothing of another server is expected");
        world.drive();
        assert_eq!(world.waiting(), []);
    }
}
