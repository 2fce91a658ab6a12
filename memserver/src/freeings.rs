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
        for space in spaces {
            self.attend(space);
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

    /// Makes a requester for a space, if there is none and there is room.
    fn attend(&mut self, space: Space) {
        if self.spaces.iter().any(|of| of.freer.space() == space) {
            return;
        }
        let is_used = |number: &u32| self.spaces.iter().any(|of| of.selector & 0xff == *number);
        let Some(number) = (0..SPACES_MAX).find(|number| !is_used(number)) else {
            let idle = self.spaces.iter().position(|of| of.freer.is_idle());
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
    pub(crate) fn poll_timeout(&self) -> Option<Timestamp> {
        let due = self.spaces.iter().filter(|of| !of.freer.is_idle());
        due.flat_map(|of| [of.requester.poll_timeout(), of.freer.poll_timeout()]).flatten().min()
    }
}
