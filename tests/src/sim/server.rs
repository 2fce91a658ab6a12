//! A server: a responder over a real arena.

use bluebridge_memserver::arena::{Arena, ArenaConfig};
use bluebridge_protocol::{
    Timestamp,
    responder::{Authority, Config, DrainFirst, Responder},
    store::PageStore,
};
use bluebridge_wire::{ArenaGeneration, Datagram};

use super::{
    bugs::{Bug, BuggyStore},
    network,
    plan::Plan,
};

/// Generations that are reserved for a server's contents.
pub(super) const GENERATION_COUNT: u16 = 512;

/// A server process.
pub(super) struct Server {
    pub(super) responder: Responder,
    pub(super) store: BuggyStore<Arena>,
    pub(super) incarnation: u32,
    pub(super) range_epoch: u32,
    /// Not running: arriving frames are lost.
    pub(super) is_away: bool,
}

impl Server {
    pub(super) fn new(plan: &Plan, index: usize) -> Self {
        let store = BuggyStore::new(arena(plan, index, ArenaGeneration::default()), plan.bug);
        let responder = responder(plan, index, 1, 1);
        Self { responder, store, incarnation: 1, range_epoch: 1, is_away: false }
    }

    /// Starts a new incarnation, with the old memory or with the next generations of it.
    pub(super) fn restart(&mut self, now: Timestamp, plan: &Plan, index: usize, contents: bool) {
        self.incarnation += 1;
        self.range_epoch += 1;
        self.responder = responder(plan, index, self.incarnation, self.range_epoch);
        if !contents {
            let generation = self.store.generation();
            let next = if plan.bug == Some(Bug::SameGeneration) {
                generation
            } else {
                generation.saturating_add(GENERATION_COUNT)
            };
            self.store = BuggyStore::new(arena(plan, index, next), plan.bug);
        }
        self.responder.begin(now, &mut self.store);
    }

    pub(super) fn set_authority(&mut self, granted: bool) {
        self.range_epoch += u32::from(granted);
        let range_epoch = self.range_epoch;
        self.responder
            .set_authority(granted.then_some(Authority { range_epoch, expires_at: None }));
    }

    /// Handles a datagram; replies that must be sent first, and its own, are added to `frames`.
    pub(super) fn receive(
        &mut self,
        now: Timestamp,
        received: &network::Received<'_>,
        payload: &[u8],
        frames: &mut Vec<Vec<u8>>,
    ) {
        match Datagram::parse(received.source, received.destination, payload) {
            Ok(datagram) => loop {
                let port = received.source_port;
                match self.responder.handle_datagram(now, port, &datagram, &mut self.store) {
                    Ok(()) => return,
                    Err(DrainFirst) => self.drain(frames),
                }
            },
            Err(error) => self.responder.count_malformed(error),
        }
    }

    pub(super) fn handle_timeout(&mut self, now: Timestamp, frames: &mut Vec<Vec<u8>>) {
        while self.responder.handle_timeout(now, &mut self.store) == Err(DrainFirst) {
            self.drain(frames);
        }
        // Waiting requests for leased pages may have been executed.
        self.drain(frames);
    }

    /// Moves the waiting replies to `frames`.
    pub(super) fn drain(&mut self, frames: &mut Vec<Vec<u8>>) {
        let mut count = 0;
        for transmit in self.responder.transmits(&self.store) {
            let ports = (network::PORT, transmit.destination_port);
            let parts = [transmit.head, transmit.data];
            frames.push(network::frame(transmit.source, transmit.destination, ports, parts));
            count += 1;
        }
        self.responder.release(count);
    }
}

fn arena(plan: &Plan, index: usize, generation: ArenaGeneration) -> Arena {
    let config = ArenaConfig {
        generation,
        last_generation: generation.saturating_add(GENERATION_COUNT - 1),
        // Some pages use several generations.
        last_tag: 3,
        default_quota_pages: plan.quota_pages.unwrap_or(u64::MAX),
        ..ArenaConfig::default()
    };
    Arena::on_heap(&config, u32::try_from(plan.arena_pages[index]).expect("small"))
}

fn responder(plan: &Plan, index: usize, incarnation: u32, range_epoch: u32) -> Responder {
    let seed = plan.seed ^ (index as u64 + 1) << 50;
    let mut config = Config::new(super::SPACE, super::server_node(index), incarnation, seed);
    config.authority = Some(Authority { range_epoch, expires_at: None });
    config.piece_bytes = plan.server_piece_bytes[index];
    config.timers.session_idle = plan.session_idle;
    config.timers.provisional = plan.provisional;
    config.limits.buffer_pages = 64;
    config.limits.reply_count = 64;
    if plan.tight_limits {
        config.limits.buffer_pages = 8;
        config.limits.node_buffer_pages = 8;
        // Sessions with recorded replies are not evicted, so there may only be fewer of them than
        // requesters (clients and the prober) if they end.
        let clients = u16::try_from(plan.clients()).expect("few clients");
        let short = plan.session_idle < core::time::Duration::from_secs(1);
        config.limits.session_count = if short { clients } else { clients + 1 };
        config.limits.node_session_count = 1;
        config.limits.provisional_count = 2;
        config.limits.provisional_pages = 16;
        config.limits.credit_pages = 16;
    }
    Responder::new(&config).expect("a right configuration")
}
