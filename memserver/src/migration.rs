//! The lines that one shard takes from other servers, and gives to them, as the controller orders.
//!
//! The giver's part is the responder's. The taker's is a [`Taker`] with a requester of its own, whose replies come through
//! the shard's carrier. The serving loop drives both between the requests of clients.

use std::{ops::Range, sync::mpsc::SyncSender};

use bluebridge_protocol::{
    Timestamp,
    requester::{self, Origin, Requester},
    responder::{AllowError, Allowance, Responder},
    store::PageStore,
    taker::{self, Progress, Taker},
};
use bluebridge_transport::{Outgoing, TransmitError, Transport};
use bluebridge_wire::{Datagram, NodeId, UDP_PORT, address::Fields};

/// The most migrations to which a shard is the taker at once.
const TAKINGS_MAX: usize = 64;

/// What the controller orders. All may be repeated.
#[derive(Clone, Debug)]
pub enum MigrationOrder {
    /// The giver lets its taker take the lines.
    Allow(Allowance),
    /// The giver knows a later incarnation of the taker, which has the memory of the one before.
    RaiseTaker {
        /// The migration's id.
        migration: u64,
        /// The incarnation.
        incarnation: u32,
    },
    /// The giver gives no further line.
    Withdraw(u64),
    /// The giver forgets the migration: the home knows where the lines are, and none is on its way.
    Close(u64),
    /// The taker takes the lines.
    Take(taker::Order),
    /// The taker takes no further line.
    Stop(u64),
    /// The giver's memory is lost: the taker asks for no line any more.
    GiveUp(u64),
    /// The taker forgets the migration, in which no line is on its way.
    Finish(u64),
    /// How far the taker is.
    Report(u64),
}

/// What a taker has of a migration. Of a giver only `rows`, in pages of its store: what it gave.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct MigrationState {
    /// How far the taker is.
    pub progress: Progress,
    /// The rows of pages that moved; by the home's numbers.
    pub rows: Vec<Range<u64>>,
}

/// An order was not followed; nothing changed.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MigrationError {
    /// The giver refused.
    #[error(transparent)]
    Allow(#[from] AllowError),
    /// The taker refused.
    #[error(transparent)]
    Take(#[from] taker::OrderError),
    /// This shard takes part in the largest number of migrations.
    #[error("the shard takes lines of {TAKINGS_MAX} migrations already; finish some first")]
    Full,
    /// The taker does not know the migration.
    #[error("the migration is not known here")]
    Unknown,
    /// Lines are on their way.
    #[error("lines of the migration are on their way")]
    OnTheirWay,
}

/// The result of an order.
pub type MigrationReply = Result<MigrationState, MigrationError>;

/// An order, and where its result goes.
#[derive(Clone, Debug)]
pub struct MigrationCall {
    /// The order.
    pub order: MigrationOrder,
    /// Where the result goes.
    pub reply: SyncSender<MigrationReply>,
}

/// The identity with which a shard takes lines.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Identity {
    pub(crate) node: NodeId,
    pub(crate) incarnation: u32,
    pub(crate) shard: u8,
    pub(crate) piece_bytes: u16,
    pub(crate) seed: u64,
}

struct Taking {
    taker: Taker,
    requester: Requester,
    selector: u32,
}

/// The migrations to which one shard is the taker.
pub(crate) struct Migrations {
    identity: Identity,
    takings: Vec<Taking>,
    /// Requesters so far.
    count: u32,
}

impl Migrations {
    pub(crate) const fn new(identity: Identity) -> Self {
        Self { identity, takings: Vec::new(), count: 0 }
    }

    /// Whether the shard takes no lines.
    pub(crate) const fn is_idle(&self) -> bool {
        self.takings.is_empty()
    }

    /// Follows an order. All replies of the shard were sent.
    pub(crate) fn execute<S: PageStore + ?Sized>(
        &mut self,
        now: Timestamp,
        order: MigrationOrder,
        responder: &mut Responder,
        store: &mut S,
    ) -> MigrationReply {
        match order {
            MigrationOrder::Allow(allowance) => {
                responder.allow(&allowance, store)?;
                Ok(given(responder, allowance.migration))
            }
            MigrationOrder::RaiseTaker { migration, incarnation } => {
                responder.raise_taker(migration, incarnation, store)?;
                Ok(given(responder, migration))
            }
            MigrationOrder::Withdraw(migration) => {
                responder.withdraw(now, migration, store)?;
                Ok(given(responder, migration))
            }
            MigrationOrder::Close(migration) => {
                let state = given(responder, migration);
                responder.close_migration(migration, store)?;
                Ok(state)
            }
            MigrationOrder::Take(order) => self.take(order, store),
            MigrationOrder::Stop(migration) => {
                let taking = self.find(migration)?;
                taking.taker.stop();
                Ok(taking.state())
            }
            MigrationOrder::GiveUp(migration) => {
                let taking = self.find(migration)?;
                taking.taker.give_up(store);
                Ok(taking.state())
            }
            MigrationOrder::Finish(migration) => self.finish(migration, store),
            MigrationOrder::Report(migration) => Ok(self.find(migration)?.state()),
        }
    }

    fn take<S: PageStore + ?Sized>(
        &mut self,
        order: taker::Order,
        store: &mut S,
    ) -> MigrationReply {
        if let Ok(taking) = self.find(order.migration.id) {
            return Ok(taking.state());
        }
        if self.takings.len() >= TAKINGS_MAX {
            return Err(MigrationError::Full);
        }
        let Identity { node, incarnation, shard, piece_bytes, seed } = self.identity;
        self.count = (self.count + 1) & SELECTOR_COUNT;
        // Replies must reach this shard.
        let selector = u32::from(shard) << SELECTOR_SHIFT | self.count;
        let seed = seed ^ u64::from(selector) << 32;
        let config = requester::Config {
            selector,
            piece_bytes,
            ..requester::Config::new(order.space, node, incarnation, seed)
        };
        let taker = Taker::new(order, node, self.count, store)?;
        let taking = Taking { taker, requester: Requester::new(config), selector };
        let state = taking.state();
        self.takings.push(taking);
        Ok(state)
    }

    fn finish<S: PageStore + ?Sized>(&mut self, migration: u64, store: &mut S) -> MigrationReply {
        let taking = self.find(migration)?;
        if !taking.taker.is_over() {
            return Err(MigrationError::OnTheirWay);
        }
        let state = taking.state();
        let index = self.takings.iter().position(|taking| taking.is_of(migration));
        if let Some(index) = index {
            self.takings.swap_remove(index).taker.finish(store);
        }
        Ok(state)
    }

    fn find(&mut self, migration: u64) -> Result<&mut Taking, MigrationError> {
        let found = self.takings.iter_mut().find(|taking| taking.is_of(migration));
        found.ok_or(MigrationError::Unknown)
    }

    /// Handles a reply.
    pub(crate) fn receive(&mut self, now: Timestamp, datagram: &Datagram<'_>) {
        let selector = selector_of(&datagram.to);
        if let Some(Taking { taker, requester, .. }) =
            self.takings.iter_mut().find(|taking| taking.selector == selector)
        {
            requester.handle_datagram(now, datagram, taker);
        }
    }

    /// Goes on with what is due, and sends requests.
    ///
    /// # Errors
    /// [`TransmitError::Socket`]: the carrier failed for good.
    pub(crate) fn drive<T: Transport, S: PageStore + ?Sized>(
        &mut self,
        now: Timestamp,
        (transport, responder): (&mut T, &mut Responder),
        store: &mut S,
    ) -> Result<(), TransmitError> {
        for Taking { taker, requester, .. } in &mut self.takings {
            requester.handle_timeout(now);
            while let Some(completion) = requester.poll_completion() {
                taker.heard(now, &completion, (&mut *requester, &mut *responder), store);
            }
            taker.poll(now, requester);
            while let Some((origin, result)) = send_next(now, transport, requester, taker) {
                match result {
                    // What the carrier does not take now is sent again when its timer expires.
                    Ok(_) => {}
                    Err(error @ TransmitError::Socket(_)) => return Err(error),
                    Err(_) => requester.transmit_refused(now, origin, 0),
                }
            }
        }
        Ok(())
    }

    /// When [`Self::drive`] is to be called again, if nothing arrives before.
    pub(crate) fn poll_timeout(&self) -> Option<Timestamp> {
        let due = self.takings.iter().flat_map(|Taking { taker, requester, .. }| {
            [requester.poll_timeout(), taker.poll_timeout()]
        });
        due.flatten().min()
    }
}

fn send_next<T: Transport>(
    now: Timestamp,
    transport: &mut T,
    requester: &mut Requester,
    taker: &Taker,
) -> Option<(Origin, Result<usize, TransmitError>)> {
    let request = requester.poll_transmit(now, taker)?;
    let out = Outgoing {
        source: request.source,
        destination: request.destination,
        destination_port: UDP_PORT,
        header: request.head(),
        data: request.data,
    };
    Some((request.origin, transport.transmit(&[out])))
}

impl Taking {
    const fn is_of(&self, migration: u64) -> bool {
        self.taker.order().migration.id == migration
    }

    fn state(&self) -> MigrationState {
        MigrationState { progress: self.taker.progress(), rows: self.taker.rows().collect() }
    }
}

fn given(responder: &Responder, migration: u64) -> MigrationState {
    let rows = responder.given(migration).map_or_else(Vec::new, Iterator::collect);
    MigrationState { progress: Progress::default(), rows }
}

/// The shard in a selector, and the number below it: byte 10 of an endpoint's address tells the shard.
const SELECTOR_SHIFT: u32 = 24;
const SELECTOR_COUNT: u32 = (1 << SELECTOR_SHIFT) - 1;

/// The selector of the requester with an address.
#[expect(clippy::cast_possible_truncation, reason = "a selector has 32 bits")]
const fn selector_of(address: &Fields) -> u32 {
    (address.location >> 16) as u32
}
