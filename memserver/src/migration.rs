//! The lines that one shard takes from other servers, and gives to them, as the controller orders.
//!
//! The giver's part is the responder's. The taker's is a [`Taker`] with a requester of its own, whose replies come through
//! the shard's carrier. The serving loop drives both between the requests of clients.

use core::time::Duration;
use std::{ops::Range, sync::mpsc::SyncSender};

use arrayvec::ArrayVec;
use bluebridge_protocol::{
    Timestamp,
    requester::{self, Buffers, Requester, SealedRequest},
    responder::{Adopted, AllowError, Allowance, Event, FreeLines, Responder},
    store::PageStore,
    taker::{self, Progress, Row, Taker},
};
use bluebridge_transport::{Outgoing, TransmitError, Transport};
use bluebridge_wire::{
    ArenaGeneration, Datagram, NodeId, Space, UDP_PORT,
    address::{Fields, PAGE_SHIFT, SHARD_SHIFT},
};

use crate::{
    contention::Contention,
    deputies::{Deputies, Deputyship},
};

/// Requests handed to the carrier at once.
const BATCH: usize = 32;

/// The most migrations to which a shard is the taker at once.
const TAKINGS_MAX: usize = 64;

/// How long after a line was taken from here, or a reply arrived with one, the next such datagram is expected soon. Longer
/// gaps are those of a giver that is gone, of a lease that is waited for, or of rests.
const SOON: Duration = Duration::from_millis(1);

/// What the controller orders. All may be repeated.
#[derive(Clone, Debug)]
pub enum MigrationOrder {
    /// The giver lets its taker take the lines.
    Allow(Terms),
    /// The giver gives no further line.
    Withdraw(u64),
    /// The giver forgets the migration: the home knows where the lines are, and none is on its way.
    Close(u64),
    /// The taker reserves memory for the lines.
    Reserve(taker::Order),
    /// The taker takes the lines for which it has memory.
    Begin(taker::Order),
    /// The taker takes no further line.
    Stop(taker::Order),
    /// A node lost its memory: as a taker from it, the shard asks for no line any more.
    Lose(NodeId),
    /// The taker forgets the migration, in which no line is on its way.
    Finish(u64),
    /// How far the taker is.
    Report(u64),
    /// The home learns where its pages are that others serve.
    Learn {
        /// Rows of pages, and who has them.
        rows: Vec<(Range<u64>, NodeId)>,
        /// Pages that are lost with the memory of a server.
        lost: Vec<Range<u64>>,
    },
    /// The home learns what others have of contents that it lost; all else of them is stale.
    LearnEarlier {
        /// The first generation of these contents.
        generation: ArenaGeneration,
        /// Rows of pages, and who has them.
        rows: Vec<(Range<u64>, NodeId)>,
    },
    /// The shard allocates nothing from now on, or allocates again.
    Seal(bool),
    /// The shard answers for a node that is gone.
    Deputize(Box<Deputyship>),
    /// The shard answers no more for a node, up to an incarnation.
    Dismiss {
        /// The node.
        home: NodeId,
        /// The incarnation.
        incarnation: u32,
    },
    /// The free lines of other servers that are here.
    Free,
    /// Free lines of contents that their home has lost are forgotten.
    Discard(FreeLines),
    /// What the shard has of a home's pages, and what it gave of them.
    Claim {
        /// The home.
        node: NodeId,
        /// The first generation of its contents.
        generation: ArenaGeneration,
    },
}

/// What a giver allows.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Terms {
    /// The migration's id.
    pub migration: u64,
    /// The range epoch that its requests name.
    pub range_epoch: u32,
    /// The space of the allocations.
    pub space: Space,
    /// The home of the pages.
    pub home: NodeId,
    /// The first generation of its contents.
    pub generation: ArenaGeneration,
    /// Its pages; whole lines of one shard.
    pub pages: Range<u64>,
    /// Who will serve them.
    pub taker: NodeId,
    /// The incarnation under which it takes them.
    pub taker_incarnation: u32,
}

/// What a shard has of a migration, or of a home.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct MigrationState {
    /// How far the taker is.
    pub progress: Progress,
    /// What the taker serves.
    pub rows: Vec<Row>,
    /// What the giver gave, by the names at home.
    pub given: Vec<Adopted>,
    /// Free lines of other servers.
    pub free: Vec<FreeLines>,
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
    /// Some of the pages are not here.
    #[error("some of the pages are not here; migrate parts of the range")]
    NotHere,
    /// The shard is the deputy of as many nodes as it can be, of a later incarnation, or is the node itself.
    #[error("the shard cannot answer for the node")]
    NotDeputy,
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
    /// Of this process.
    pub(crate) incarnation: u32,
    pub(crate) shard: u8,
    pub(crate) piece_bytes: u16,
    /// Of the session with each giver.
    pub(crate) credit_pages: u16,
    pub(crate) seed: u64,
}

struct Taking {
    taker: Taker,
    requester: Requester,
    selector: u32,
    /// Whether it has come to its end.
    is_over: bool,
}

/// The migrations to which one shard is the taker, and when others took lines of it.
pub(crate) struct Migrations {
    identity: Identity,
    takings: Vec<Taking>,
    contention: Contention,
    /// Requesters so far.
    count: u32,
    /// Lines that were taken from this shard.
    given: u64,
    /// When the last one was, or when a reply with a line to take arrived, if that was lately.
    moved_at: Option<Timestamp>,
}

impl Migrations {
    pub(crate) fn new(identity: Identity) -> Self {
        let contention = Contention::default();
        Self { identity, takings: Vec::new(), contention, count: 0, given: 0, moved_at: None }
    }

    /// Whether lines are on their way from here or to here, and nobody else wants the processor. Then the next request or
    /// reply comes soon, and if this thread slept, whoever sends it would have to wake it, often on the same processor.
    pub(crate) fn is_hurried(
        &mut self,
        responder: &Responder,
        now: impl FnOnce() -> Timestamp,
    ) -> bool {
        let given = responder.counters().event(Event::LineTaken);
        let is_news = core::mem::replace(&mut self.given, given) != given;
        if self.moved_at.is_none() && !is_news {
            return false;
        }
        let now = now();
        if is_news {
            self.moved_at = Some(now);
        }
        self.moved_at = self.moved_at.filter(|at| now.saturating_since(*at) < SOON);
        self.moved_at.is_some() && !self.contention.is_contended(now)
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
        (responder, deputies): (&mut Responder, &mut Deputies),
        store: &mut S,
    ) -> MigrationReply {
        match order {
            MigrationOrder::Seal(is_sealed) => {
                responder.set_sealed(is_sealed);
                Ok(MigrationState::default())
            }
            MigrationOrder::Deputize(of) => {
                let is_done = deputies.deputize(now, &of, &self.identity, responder.shard_count());
                is_done.then(MigrationState::default).ok_or(MigrationError::NotDeputy)
            }
            MigrationOrder::Dismiss { home, incarnation } => {
                deputies.dismiss(home, incarnation);
                Ok(MigrationState::default())
            }
            MigrationOrder::Allow(terms) => allow(terms, responder, store),
            MigrationOrder::Withdraw(migration) => {
                responder.withdraw(now, migration, store)?;
                Ok(given(migration, responder, store))
            }
            MigrationOrder::Close(migration) => {
                let state = given(migration, responder, store);
                responder.close_migration(migration, store)?;
                Ok(state)
            }
            MigrationOrder::Reserve(order) => {
                let taking = self
                    .taking(order, |order, node, number| Taker::new(order, node, number, store))?;
                Ok(taking.state())
            }
            MigrationOrder::Begin(order) => {
                let taking = self
                    .taking(order, |order, node, number| Taker::new(order, node, number, store))?;
                taking.taker.begin();
                Ok(taking.state())
            }
            MigrationOrder::Stop(order) => {
                let taking = self.taking(order, |order, node, number| {
                    Taker::resume(order, node, number, store)
                })?;
                taking.taker.stop();
                Ok(taking.state())
            }
            MigrationOrder::Lose(node) => {
                let of_node = |of: &&mut Taking| of.taker.order().migration.giver.node == node;
                for taking in self.takings.iter_mut().filter(of_node) {
                    taking.taker.give_up(responder, store);
                }
                Ok(MigrationState::default())
            }
            MigrationOrder::Finish(migration) => self.finish(migration, store),
            MigrationOrder::Report(migration) => Ok(self.find(migration)?.state()),
            MigrationOrder::Learn { rows, lost } => {
                responder.learn(now, &rows, &lost, store);
                Ok(MigrationState::default())
            }
            MigrationOrder::LearnEarlier { generation, rows } => {
                let rows: Vec<_> = rows.into_iter().map(|(pages, at)| (pages, Some(at))).collect();
                responder.learn_earlier(generation, &rows);
                Ok(MigrationState::default())
            }
            MigrationOrder::Free => {
                let free = responder.free_lines(store);
                Ok(MigrationState { free, ..MigrationState::default() })
            }
            MigrationOrder::Discard(lines) => {
                responder.discard(&lines, store);
                Ok(MigrationState::default())
            }
            MigrationOrder::Claim { node, generation } => {
                self.claim(node, generation, responder, store)
            }
        }
    }

    /// What is here of a home's contents. The generations of all its pages count as those of each.
    fn claim<S: PageStore + ?Sized>(
        &self,
        node: NodeId,
        generation: ArenaGeneration,
        responder: &Responder,
        store: &S,
    ) -> MigrationReply {
        let is_of = |of: &&Taking| {
            let order = of.taker.order();
            (order.home, order.generation) == (node, generation)
        };
        if self.takings.iter().filter(is_of).any(|of| of.taker.progress().in_doubt > 0) {
            return Err(MigrationError::OnTheirWay);
        }
        let is_its = |it: &Adopted| (it.node, it.generation) == (node, generation);
        let mut ids = Vec::new();
        store.lines().allowances(&mut |allowance, _| ids.push(allowance.migration));
        let given = ids.into_iter().filter_map(|id| responder.given_names(id, store)).flatten();
        let given: Vec<Adopted> = given.filter(is_its).collect();
        let mut rows = Vec::new();
        for range in responder.adopted().iter().filter(|it| is_its(it)) {
            // What was given is not served here any more.
            for pages in without(range, &given) {
                let local_page = range.local_page + (pages.start - range.first_page);
                let local = local_page..local_page + (pages.end - pages.start);
                let generations = taker::generations(generation, local, store);
                rows.push(Row { pages, generations });
            }
        }
        Ok(MigrationState { rows, given, ..MigrationState::default() })
    }

    /// The taking of an order; a new one that `make` makes, if the migration is not known.
    fn taking(
        &mut self,
        order: taker::Order,
        make: impl FnOnce(taker::Order, NodeId, u32) -> Result<Taker, taker::OrderError>,
    ) -> Result<&mut Taking, MigrationError> {
        let known = self.takings.iter().position(|taking| taking.is_of(order.migration.id));
        if let Some(index) = known {
            return Ok(&mut self.takings[index]);
        }
        if self.takings.len() >= TAKINGS_MAX {
            return Err(MigrationError::Full);
        }
        let Identity { node, shard, piece_bytes, credit_pages, seed, .. } = self.identity;
        self.count = (self.count + 1) & SELECTOR_COUNT;
        // Replies must reach this shard.
        let selector = u32::from(shard) << SELECTOR_SHIFT | self.count;
        let seed = seed ^ u64::from(selector) << 32;
        let config = requester::Config {
            selector,
            piece_bytes,
            credit_pages,
            ..requester::Config::new(order.space, node, order.incarnation, seed)
        };
        let taker = make(order, node, self.count)?;
        let requester = Requester::new(config);
        self.takings.push(Taking { taker, requester, selector, is_over: false });
        Ok(self.takings.last_mut().expect("it was pushed a moment ago"))
    }

    fn finish<S: PageStore + ?Sized>(&mut self, migration: u64, store: &mut S) -> MigrationReply {
        let taking = self.find(migration)?;
        if !taking.taker.may_finish() {
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

    /// Whether a datagram that says it is from a node, to an address of this endpoint, may be a reply that is awaited of
    /// it.
    pub(crate) fn awaits(&self, from: &Fields, to: &Fields) -> bool {
        let selector = selector_of(to);
        self.takings.iter().any(|Taking { taker, selector: own, .. }| {
            let order = taker.order();
            (*own, order.migration.giver.node, order.space) == (selector, from.node, from.space)
        })
    }

    /// Handles a reply.
    pub(crate) fn receive<S: PageStore + ?Sized>(
        &mut self,
        now: Timestamp,
        datagram: &Datagram<'_>,
        store: &mut S,
    ) {
        let selector = selector_of(&datagram.to);
        if let Some(Taking { taker, requester, .. }) =
            self.takings.iter_mut().find(|taking| taking.selector == selector)
        {
            requester.handle_datagram(now, datagram, &mut taker.in_store(store));
            self.moved_at = Some(now);
        }
    }

    /// Goes on with what is due, and sends requests. Returns how many migrations have come to their end.
    ///
    /// # Errors
    /// [`TransmitError::Socket`]: the carrier failed for good.
    pub(crate) fn drive<T: Transport, S: PageStore + ?Sized>(
        &mut self,
        now: Timestamp,
        (transport, responder): (&mut T, &mut Responder),
        store: &mut S,
    ) -> Result<u64, TransmitError> {
        let is_contended = self.contention.is_contended(now);
        let taking = self.takings.iter().filter(|taking| taking.taker.is_taking()).count();
        let taking = u32::try_from(taking).unwrap_or(u32::MAX);
        let mut over = 0;
        for Taking { taker, requester, is_over, .. } in &mut self.takings {
            taker.set_contended(is_contended, taking);
            requester.handle_timeout(now);
            while let Some(completion) = requester.poll_completion() {
                taker.heard(now, &completion, (&mut *requester, &mut *responder), store);
            }
            taker.poll(now, (&mut *requester, &mut *responder), store);
            send_all(now, transport, requester, &taker.in_store(store))?;
            over += u64::from(taker.is_over() && !*is_over);
            *is_over = taker.is_over();
        }
        Ok(over)
    }

    /// When [`Self::drive`] is to be called again, if nothing arrives before.
    pub(crate) fn poll_timeout(&self) -> Option<Timestamp> {
        let due = self.takings.iter().flat_map(|Taking { taker, requester, .. }| {
            [requester.poll_timeout(), taker.poll_timeout()]
        });
        due.flatten().min()
    }
}

/// Sends all requests that are due.
///
/// # Errors
/// [`TransmitError::Socket`]: the carrier failed for good.
pub(crate) fn send_all<T: Transport, B: Buffers>(
    now: Timestamp,
    transport: &mut T,
    requester: &mut Requester,
    buffers: &B,
) -> Result<(), TransmitError> {
    loop {
        let mut batch = ArrayVec::<SealedRequest<'_>, BATCH>::new();
        while !batch.is_full()
            && let Some(request) = requester.poll_transmit(now, buffers)
        {
            batch.push(request);
        }
        let outgoing: ArrayVec<Outgoing<'_>, BATCH> = batch.iter().map(outgoing).collect();
        let mut sent = 0;
        while let (Some(rest), Some(next)) = (outgoing.get(sent..), batch.get(sent)) {
            match transport.transmit(rest) {
                // What the carrier does not take now is sent again when its timer expires.
                Ok(0) => break,
                Ok(count) => sent += count,
                Err(error @ TransmitError::Socket(_)) => return Err(error),
                Err(_) => {
                    let same = batch.iter().skip(sent);
                    let same = same.take_while(|other| other.origin == next.origin).count();
                    let count = u32::try_from(same).unwrap_or(u32::MAX);
                    requester.transmit_refused(now, next.origin, count);
                    sent += same;
                }
            }
        }
        if !batch.is_full() {
            return Ok(());
        }
    }
}

fn outgoing<'a>(request: &'a SealedRequest<'_>) -> Outgoing<'a> {
    Outgoing {
        source: request.source,
        destination: request.destination,
        destination_port: UDP_PORT,
        header: request.head(),
        data: request.data,
    }
}

impl Taking {
    const fn is_of(&self, migration: u64) -> bool {
        self.taker.order().migration.id == migration
    }

    fn state(&self) -> MigrationState {
        let (progress, rows) = (self.taker.progress(), self.taker.rows().collect());
        MigrationState { progress, rows, ..MigrationState::default() }
    }
}

fn allow<S: PageStore + ?Sized>(
    terms: Terms,
    responder: &mut Responder,
    store: &mut S,
) -> MigrationReply {
    let Terms { migration, range_epoch, space, taker, taker_incarnation, .. } = terms;
    let Terms { home, generation, pages, .. } = terms;
    // What was given of it is elsewhere only when the migration is closed.
    let count = pages.end.saturating_sub(pages.start);
    let pages =
        responder.place_of(home, generation, &pages, store).ok_or(MigrationError::NotHere)?;
    let is_scattered = pages.end - pages.start != count;
    let allowance = Allowance { migration, range_epoch, pages, space, taker, taker_incarnation };
    responder.allow(&allowance, store).map_err(|error| match error {
        // The lines in between are of another migration, which will be closed.
        AllowError::Overlap if is_scattered => MigrationError::OnTheirWay,
        error => error.into(),
    })?;
    Ok(given(migration, responder, store))
}

fn given<S: PageStore + ?Sized>(
    migration: u64,
    responder: &Responder,
    store: &S,
) -> MigrationState {
    let given = responder.given_names(migration, store).unwrap_or_default();
    MigrationState { given, ..MigrationState::default() }
}

/// The pages at home of a range that are in none of others.
fn without(range: &Adopted, others: &[Adopted]) -> Vec<Range<u64>> {
    let mut left: Vec<Range<u64>> =
        core::iter::once(range.first_page..range.first_page + range.page_count).collect();
    for other in others {
        let end = other.first_page + other.page_count;
        left = left
            .into_iter()
            .flat_map(|pages| {
                let before = pages.start..pages.end.min(other.first_page);
                let after = pages.start.max(end)..pages.end;
                [before, after].into_iter().filter(|part| part.start < part.end)
            })
            .collect();
    }
    left
}

/// Pages that a shard's offsets span.
const SHARD_PAGES: u64 = 1 << (SHARD_SHIFT - PAGE_SHIFT);

/// The shard of a server with so many that serves the pages of a home's shard.
pub(crate) fn shard_of(pages: &Range<u64>, shard_count: u16) -> u16 {
    let shard = u16::try_from(pages.start / SHARD_PAGES).unwrap_or(u16::MAX);
    shard % shard_count.max(1)
}

/// The shard in a selector, and the number below it: byte 10 of an endpoint's address tells the shard.
const SELECTOR_SHIFT: u32 = 24;
const SELECTOR_COUNT: u32 = FREER_SELECTORS - 1;

/// The first number of requesters that have parts of allocations freed.
const FREER_SELECTORS: u32 = 1 << (SELECTOR_SHIFT - 1);

impl Identity {
    /// The selector of such a requester.
    pub(crate) const fn selector_of_freer(&self, number: u32) -> u32 {
        (self.shard as u32) << SELECTOR_SHIFT | FREER_SELECTORS | number
    }
}

/// The selector of the requester with an address.
#[expect(clippy::cast_possible_truncation, reason = "a selector has 32 bits")]
pub(crate) const fn selector_of(address: &Fields) -> u32 {
    (address.location >> 16) as u32
}

#[cfg(test)]
mod tests {
    use bluebridge_protocol::responder::Config;

    use super::*;

    #[test]
    fn a_shard_is_in_a_hurry_for_a_while_after_each_line_that_moved() {
        let (space, node) = (Space(1), NodeId(1));
        let responder = Responder::new(&Config::new(space, node, 1, 5)).expect("it is valid");
        let (piece_bytes, credit_pages) = (4096, 64);
        let identity =
            Identity { node, incarnation: 1, shard: 0, piece_bytes, credit_pages, seed: 1 };
        let mut migrations = Migrations::new(identity);
        let no_clock = || unreachable!("the clock is read for each wait of a server");
        assert!(!migrations.is_hurried(&responder, no_clock));
        let at = |us| Timestamp::ZERO + Duration::from_micros(us);
        // As if lines had been taken since the last look.
        migrations.given = 7;
        migrations.contention = Contention::of_an_idle_processor(at(5000));
        assert!(migrations.is_hurried(&responder, || at(5000)));
        assert!(migrations.is_hurried(&responder, || at(5999)));
        assert!(!migrations.is_hurried(&responder, || at(6000)));
        assert!(!migrations.is_hurried(&responder, no_clock));
        // As if a reply had arrived.
        migrations.moved_at = Some(at(7000));
        assert!(migrations.is_hurried(&responder, || at(7100)));
        migrations.contention = Contention::of_a_busy_processor(at(7200));
        assert!(!migrations.is_hurried(&responder, || at(7200)), "others want the processor");
    }

    #[test]
    fn what_was_given_is_not_served() {
        let range = |first_page, page_count| Adopted {
            node: NodeId(1),
            generation: ArenaGeneration::default(),
            first_page,
            page_count,
            local_page: 4096,
        };
        let left = |given: &[Adopted]| without(&range(64, 64), given);
        let all: Vec<Range<u64>> = core::iter::once(64..128).collect();
        assert_eq!(left(&[]), all);
        assert_eq!(left(&[range(64, 8), range(80, 16), range(120, 64)]), [72..80, 96..120]);
        assert_eq!(left(&[range(0, 64), range(128, 8)]), all, "neighbours");
        assert_eq!(left(&[range(0, 4096)]), Vec::<Range<u64>>::new());
    }
}
