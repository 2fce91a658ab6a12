//! The serving loop of one shard: receive a batch, handle it, send a batch; then spin, then sleep.

#[cfg(test)]
mod tests;

use core::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};
use std::{
    collections::VecDeque,
    net::Ipv6Addr,
    sync::{Arc, mpsc::Receiver},
};

use bluebridge_protocol::{
    Timestamp,
    responder::{Authority, Config, DrainFirst, Responder},
    store::PageStore,
};
use bluebridge_transport::{
    Capabilities, Incoming, Outgoing, ReceiveError, Spin, TransmitError, Transport, Wait,
};
use bluebridge_wire::{ArenaGeneration, Datagram, NodeId, Space, WireCommand, address::Fields};

use crate::{
    Arena, ArenaUsage,
    backlog::{Backlog, Place, Preview, Sender},
    deputies::{Deputies, Deputy},
    freeings::Freeings,
    migration::{Identity, MigrationCall, Migrations},
    statistics::ShardStatistics,
    survey::{Allocation, Lost, Survey},
};

/// The most replies that are sent in one call.
const SEND_BATCH: usize = 64;

/// For up to this many replies a shorter batch is prepared.
const SHORT_BATCH: usize = 8;

/// Batches up to this size are served in the order of arrival: so few datagrams delay no client for
/// long.
const ORDERLY_BATCH: usize = 16;

/// A batch of at least this many datagrams suggests that more wait in the carrier.
const FULL_BATCH: usize = 32;

/// How long a shard polls while lines move and nobody else wants its processor: longer than the other server is busy with
/// the lines that are on their way.
const MOVING_SPIN: Duration = Duration::from_micros(300);

/// The most batches that are received in one round.
const DRAIN_LIMIT: usize = 16;

/// How long sending is retried while the carrier is busy; then the waiting replies are dropped, and
/// their requesters retransmit.
const SEND_RETRY_TIME: Duration = Duration::from_millis(2);

/// Quarantined pages that are zeroed in one idle iteration: at most about 16 us, measured.
const TIDY_PAGES: u32 = 16;

/// Requests of operators that may wait in a shard.
const SURVEYS_MAX: usize = 4;

/// How often the statistics are published while there is work.
const PUBLISH_INTERVAL: Duration = Duration::from_millis(1);

/// The operator is warned when more than one page in this many is retired.
const RETIRED_DIVISOR: u64 = 4;

/// A store for the serving loop.
pub trait Store: PageStore {
    /// Its current usage.
    fn arena_usage(&self) -> ArenaUsage;

    /// Prepares up to `budget` pages for later use, and returns how many.
    fn tidy(&mut self, budget: u32) -> u32;

    /// Adds arena generations up to `last`.
    fn reserve(&mut self, last: ArenaGeneration);

    /// Sets whether more generations are expected soon.
    fn set_reserving(&mut self, is_reserving: bool);

    /// Calls `each` for the allocations from a page on, by their first pages, until it returns
    /// false or `budget` pages were visited; an allocation counts as one. Returns the page to
    /// continue from, `None` at the end. A store without a list of allocations shows none.
    ///
    /// `lost` are contents that other servers have lost, by their first generations: allocations of these of which the
    /// first page is here follow.
    fn survey(
        &self,
        from: u64,
        budget: u32,
        lost: &Lost,
        each: &mut dyn FnMut(Allocation) -> bool,
    ) -> Option<u64> {
        let _ = (from, budget, lost, each);
        None
    }
}

impl Store for Arena {
    fn arena_usage(&self) -> ArenaUsage {
        Self::arena_usage(self)
    }

    fn tidy(&mut self, budget: u32) -> u32 {
        Self::tidy(self, budget)
    }

    fn reserve(&mut self, last: ArenaGeneration) {
        Self::reserve(self, last);
    }

    fn set_reserving(&mut self, is_reserving: bool) {
        Self::set_reserving(self, is_reserving);
    }

    fn survey(
        &self,
        from: u64,
        budget: u32,
        lost: &Lost,
        each: &mut dyn FnMut(Allocation) -> bool,
    ) -> Option<u64> {
        Self::survey(self, from, budget, lost, each)
    }
}

/// How a loop waits.
#[derive(Clone, Copy, Debug)]
pub struct Idle {
    /// Time to poll without sleeping after the last request; `None`: learned, see [`Spin`]. It costs a core while there
    /// is work, and saves the wake-up, some 45 us on a virtual machine.
    pub spin: Option<Duration>,
    /// The longest sleep. Orders and stops wake the loop, and everything else that becomes due has a time, so nothing
    /// depends on this bound: should a wake-up ever be missing, it limits the delay.
    pub sleep: Duration,
    /// How long a stopping server still responds with SHUTTING_DOWN.
    pub grace: Duration,
}

impl Default for Idle {
    fn default() -> Self {
        Self { spin: None, sleep: Duration::from_secs(1), grace: Duration::from_millis(100) }
    }
}

/// An order of another thread to a shard.
#[derive(Clone, Debug)]
pub enum Order {
    /// Serve under this authority, or under none.
    Authority(Option<Authority>),
    /// Take or give lines.
    Migrate(MigrationCall),
    /// Respond MOVED for these pages.
    Move(core::ops::Range<u64>, NodeId),
    /// Send notices of creations and deletions in this space, or stop sending them.
    Notices(Space, bool),
    /// Use arena generations up to this one, which the controller reserved.
    Reserve(ArenaGeneration),
    /// Whether more arena generations are expected soon.
    Reserving(bool),
    /// Serve these pages again.
    Return(core::ops::Range<u64>),
    /// List or free allocations for an operator.
    Survey(Survey),
}

/// The loop ended for another reason than an order to stop.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The carrier failed while receiving.
    #[error("the memory server's carrier failed: {0}")]
    Receive(#[from] ReceiveError),
    /// The carrier failed while sending.
    #[error("the memory server's carrier failed: {0}")]
    Transmit(#[source] TransmitError),
    /// A shard's thread panicked, which is a defect of this program.
    #[error("the thread of shard {0} panicked")]
    Panic(u16),
}

/// How a server controls and observes the loop of a shard.
#[derive(Debug)]
pub struct ShardControl {
    /// Set to end the loop; who sets it wakes the carrier afterwards.
    pub stop: Arc<AtomicBool>,
    /// Orders of the control plane; received after every wait. Who gives one wakes the carrier afterwards.
    pub orders: Receiver<Order>,
    /// Where the loop publishes its statistics.
    pub statistics: Arc<ShardStatistics>,
}

/// One shard with all state of its loop.
pub struct Shard<T, S> {
    /// The carrier that brings this shard's requests.
    pub transport: T,
    /// The protocol.
    pub responder: Responder,
    /// The pages.
    pub store: S,
    /// How to wait.
    pub idle: Idle,
    spin: Spin,
    /// Received requests that wait for service.
    backlog: Backlog,
    /// Requests of operators; each iteration of the loop does a step of the first.
    surveys: VecDeque<Survey>,
    /// The lines that it takes from other servers.
    migrations: Migrations,
    /// The allocations that it frees, of which parts are at other servers.
    freeings: Freeings,
    /// The nodes that are gone, for which it answers.
    deputies: Deputies,
}

impl<T: Transport, S: Store> Shard<T, S> {
    /// A shard that received nothing yet. `config` is that of the responder.
    pub fn new(
        transport: T,
        responder: Responder,
        store: S,
        (config, idle): (&Config, Idle),
    ) -> Self {
        let surveys = VecDeque::with_capacity(SURVEYS_MAX);
        let Config { node, incarnation, shard, piece_bytes, seed, .. } = *config;
        let credit_pages = taker_credit(transport.capabilities());
        let identity = Identity { node, incarnation, shard, piece_bytes, credit_pages, seed };
        let (migrations, freeings) = (Migrations::new(identity), Freeings::new(identity));
        let spin = idle.spin.map_or_else(Spin::learned, Spin::fixed);
        let (backlog, deputies) = (Backlog::new(), Deputies::default());
        Self {
            transport,
            responder,
            store,
            idle,
            spin,
            backlog,
            surveys,
            migrations,
            freeings,
            deputies,
        }
    }

    /// Serves until `stop` is set, then responds SHUTTING_DOWN for the grace time.
    ///
    /// # Errors
    /// [`ServeError`] if the carrier fails for good.
    pub fn serve(&mut self, control: &ShardControl) -> Result<(), ServeError> {
        let served = self.run(control);
        let ArenaUsage { retired_pages, capacity_pages, .. } = self.store.arena_usage();
        if retired_pages > 0 {
            tracing::info!(retired_pages, capacity_pages, "pages whose colours were used up");
        }
        self.publish(&control.statistics);
        served
    }

    fn run(&mut self, control: &ShardControl) -> Result<(), ServeError> {
        let mut ends_at = None;
        let mut published_at = Timestamp::ZERO;
        let mut is_warned = false;
        let mut now = self.transport.now();
        loop {
            if ends_at.is_none() && control.stop.load(Ordering::Acquire) {
                self.responder.begin_shutdown();
                self.responder.publish(&self.store);
                ends_at = Some(now + self.idle.grace);
            }
            if ends_at.is_some_and(|ends_at| now >= ends_at) {
                return Ok(());
            }
            for order in control.orders.try_iter() {
                self.execute(order, &control.statistics);
            }
            self.migrate(&control.statistics)?;
            self.free(&control.statistics)?;
            let is_surveying = self.survey(&control.statistics);
            let count = if self.backlog.is_empty() && !is_surveying {
                self.wait(ends_at, control)?
            } else {
                self.transport.receive(Wait::NONE)?
            };
            self.handle(count, &control.statistics)?;
            now = self.transport.now();
            if now.saturating_since(published_at) >= PUBLISH_INTERVAL {
                self.publish(&control.statistics);
                published_at = now;
                is_warned = is_warned || self.warn_of_retirement();
            }
        }
    }

    /// Goes on with the lines that it takes.
    fn migrate(&mut self, statistics: &ShardStatistics) -> Result<(), ServeError> {
        if self.migrations.is_idle() {
            return Ok(());
        }
        let now = self.transport.now();
        let Self { transport, responder, store, migrations, .. } = self;
        let driven = migrations.drive(now, (transport, responder), store);
        statistics.add_takings_over(driven.map_err(ServeError::Transmit)?);
        Ok(())
    }

    /// Goes on with the allocations that it frees.
    fn free(&mut self, statistics: &ShardStatistics) -> Result<(), ServeError> {
        if self.freeings.is_idle(&self.responder) {
            return Ok(());
        }
        let now = self.transport.now();
        let Self { transport, responder, store, freeings, deputies, .. } = self;
        let driven = freeings.drive(now, (transport, responder), deputies, store);
        driven.map_err(ServeError::Transmit)?;
        self.flush(statistics)
    }

    /// Does a step of the first request of an operator; returns false if there is none.
    fn survey(&mut self, statistics: &ShardStatistics) -> bool {
        let Some(mut survey) = self.surveys.pop_front() else { return false };
        // The operator may read the statistics right after the response.
        self.publish(statistics);
        let now = self.transport.now();
        if !survey.step(now, &mut self.responder, &mut self.store) {
            self.surveys.push_front(survey);
        }
        true
    }

    /// Polls for the spinning time; then tidies, or publishes the statistics and sleeps.
    fn wait(
        &mut self,
        ends_at: Option<Timestamp>,
        control: &ShardControl,
    ) -> Result<usize, ServeError> {
        let count = self.poll(ends_at)?;
        if count > 0 || self.store.tidy(TIDY_PAGES) > 0 {
            return Ok(count);
        }
        // What follows from an order, or from the lines that it takes, may have been a reply.
        self.flush(&control.statistics)?;
        self.publish(&control.statistics);
        let deadline = self.deadline(self.transport.now(), ends_at);
        Ok(self.transport.receive(Wait::until(deadline))?)
    }

    /// Polls for the spinning time; for longer while lines move, unless the operator chose the time.
    fn poll(&mut self, ends_at: Option<Timestamp>) -> Result<usize, ServeError> {
        let Self { transport, responder, migrations, idle, .. } = self;
        if idle.spin.is_none() && migrations.is_hurried(responder, || transport.now()) {
            let deadline = self.deadline(self.transport.now(), ends_at);
            let wait = Wait { spin: MOVING_SPIN, deadline, sleeps: false };
            return Ok(self.transport.receive(wait)?);
        }
        let spin = self.spin.next();
        let count = self.transport.receive(Wait::polling(spin))?;
        self.spin.note(spin, self.transport.polled());
        Ok(count)
    }

    /// The moment until which nothing is to be done if nothing arrives.
    fn deadline(&self, now: Timestamp, ends_at: Option<Timestamp>) -> Timestamp {
        let due = [self.responder.poll_timeout(), self.migrations.poll_timeout(), ends_at];
        let freeings = self.freeings.poll_timeout(&self.responder);
        let due = due.into_iter().chain([self.deputies.poll_timeout(), freeings]);
        due.flatten().fold(now + self.idle.sleep, Ord::min)
    }

    /// Handles what was received and sends the replies.
    fn handle(&mut self, count: usize, statistics: &ShardStatistics) -> Result<(), ServeError> {
        if self.backlog.is_empty() && count <= ORDERLY_BATCH {
            // Read after the batch was received: the carrier's last reading may be older than a
            // pause of the host, and a lease must not end earlier than its owner assumes.
            let now = self.transport.now();
            for number in 0..count {
                self.serve_one(now, Place::Carrier(number), statistics)?;
            }
        } else {
            self.drain(count, statistics)?;
            let now = self.transport.now();
            self.backlog.begin_round();
            while let Some(place) = self.backlog.next() {
                self.serve_one(now, place, statistics)?;
            }
            self.hold(statistics);
        }
        self.flush(statistics)?;
        let now = self.transport.now();
        // The reply queue is empty, so the responder cannot request a flush first. Requests that
        // waited for an expired lease may be executed now, and their replies may be more than fit
        // at once.
        while self.responder.poll_timeout().is_some_and(|due| due <= now) {
            let timed = self.responder.handle_timeout(now, &mut self.store);
            debug_assert!(timed.is_ok(), "the queue was flushed");
            if self.responder.reply_count() == 0 {
                break;
            }
            self.flush(statistics)?;
        }
        self.tend_deputies(now);
        Ok(())
    }

    /// Puts what was received into the backlog, and what else the carrier has: behind a flood,
    /// requests in the carrier's queue would be served late, or lost when it is full.
    fn drain(&mut self, count: usize, statistics: &ShardStatistics) -> Result<(), ServeError> {
        self.enqueue(count, statistics);
        let mut latest = count;
        for _ in 1..DRAIN_LIMIT {
            if latest < FULL_BATCH {
                break;
            }
            self.hold(statistics);
            latest = self.transport.receive(Wait::NONE)?;
            self.enqueue(latest, statistics);
        }
        Ok(())
    }

    /// Puts the datagrams of the last batch into the backlog; drops those without room. Replies with lines that it takes
    /// are handled at once: it asked for them, and they would be copied once more.
    fn enqueue(&mut self, count: usize, statistics: &ShardStatistics) {
        let mut dropped = 0;
        let now = self.transport.now();
        for number in 0..count {
            if self.is_awaited(&self.transport.incoming(number)) {
                let taken = self.take(now, Place::Carrier(number));
                debug_assert!(matches!(taken, Taken::Here), "it is no request");
                continue;
            }
            let Preview { space, node, session, cost } =
                Preview::new(&self.transport.incoming(number));
            let has_session = self.responder.has_session(session, space, node)
                || self.deputies.has_session(session, space, node);
            let sender = Sender { space, node, has_session };
            dropped += usize::from(!self.backlog.add(sender, cost, number));
        }
        statistics.add_overload_drops(dropped);
    }

    /// Copies the waiting datagrams out of the carrier's buffers.
    fn hold(&mut self, statistics: &ShardStatistics) {
        let transport = &self.transport;
        let lost = self.backlog.hold(|number| transport.incoming(number));
        statistics.add_overload_drops(lost);
    }

    /// Handles a datagram. If the reply queue is full it is flushed first, because queued replies
    /// may refer to pages that the request changes.
    fn serve_one(
        &mut self,
        now: Timestamp,
        place: Place,
        statistics: &ShardStatistics,
    ) -> Result<(), ServeError> {
        loop {
            match self.take(now, place) {
                Taken::Here => return Ok(()),
                Taken::ByDeputy => return self.flush_deputies(statistics),
                Taken::NotYet => self.flush(statistics)?,
            }
        }
    }

    /// Whether a datagram is from a server of which this shard takes lines, for their taker. The switch drops packets with
    /// another endpoint's address.
    fn is_awaited(&self, incoming: &Incoming<'_>) -> bool {
        if self.migrations.is_idle() {
            return false;
        }
        let addresses = Fields::unpack(incoming.source).zip(Fields::unpack(incoming.destination));
        addresses.is_some_and(|(from, to)| {
            WireCommand::from_bits(from.command).is_reply() && self.migrations.awaits(&from, &to)
        })
    }

    fn awaits_replies(&self) -> bool {
        !self.migrations.is_idle() || !self.freeings.is_idle(&self.responder)
    }

    /// Passes a datagram to who answers it.
    fn take(&mut self, now: Timestamp, place: Place) -> Taken {
        let Incoming { source, source_port, destination, payload } = match place {
            Place::Carrier(number) => self.transport.incoming(number),
            Place::Held(slot) => self.backlog.held(slot),
        };
        match Datagram::parse(source, destination, payload) {
            Ok(datagram) if datagram.is_reply() && self.awaits_replies() => {
                if !self.freeings.receive(now, &datagram) {
                    self.migrations.receive(now, &datagram, &mut self.store);
                }
                Taken::Here
            }
            Ok(datagram) => {
                if let Some(deputy) = self.deputies.for_request(&datagram) {
                    let Deputy { responder, store, .. } = deputy;
                    let handled = responder.handle_datagram(now, source_port, &datagram, store);
                    debug_assert!(handled.is_ok(), "its replies are sent after each request");
                    return Taken::ByDeputy;
                }
                match self.responder.handle_datagram(now, source_port, &datagram, &mut self.store) {
                    Ok(()) => Taken::Here,
                    Err(DrainFirst) => Taken::NotYet,
                }
            }
            Err(error) => {
                self.responder.count_malformed(error);
                Taken::Here
            }
        }
    }

    /// Sends all waiting replies; those that a busy carrier does not accept in time are dropped.
    fn flush(&mut self, statistics: &ShardStatistics) -> Result<(), ServeError> {
        send_all(&mut self.transport, &mut self.responder, &self.store, statistics)
    }

    /// Sends the replies of deputies.
    fn flush_deputies(&mut self, statistics: &ShardStatistics) -> Result<(), ServeError> {
        for Deputy { responder, store, .. } in self.deputies.iter_mut() {
            send_all(&mut self.transport, responder, store, statistics)?;
        }
        Ok(())
    }

    /// Ends idle sessions with deputies.
    fn tend_deputies(&mut self, now: Timestamp) {
        for Deputy { responder, store, .. } in self.deputies.iter_mut() {
            if responder.poll_timeout().is_some_and(|due| due <= now) {
                let timed = responder.handle_timeout(now, store);
                debug_assert!(timed.is_ok(), "none of its replies refers to pages");
            }
        }
    }

    fn execute(&mut self, order: Order, statistics: &ShardStatistics) {
        let is_done = match order {
            Order::Authority(authority) => {
                self.responder.set_authority(authority);
                true
            }
            Order::Migrate(MigrationCall { order, reply }) => {
                let now = self.transport.now();
                let Self { migrations, responder, store, deputies, .. } = self;
                let result = migrations.execute(now, order, (responder, deputies), store);
                let is_done = result.is_ok();
                // Who asked may not wait any more.
                let _ = reply.try_send(result);
                is_done
            }
            Order::Move(pages, node) => self.responder.add_moved(pages, node).is_ok(),
            Order::Notices(space, is_on) => {
                self.responder.set_notices(space, is_on);
                true
            }
            Order::Reserve(last) => {
                self.store.reserve(last);
                true
            }
            Order::Reserving(is_reserving) => {
                self.store.set_reserving(is_reserving);
                true
            }
            Order::Return(pages) => self.responder.remove_moved(&pages),
            // The requester sees that its channel is closed.
            Order::Survey(_) if self.surveys.len() >= SURVEYS_MAX => false,
            Order::Survey(survey) => {
                self.surveys.push_back(survey);
                true
            }
        };
        // An order that counts as executed can be relied on, also by other servers.
        self.responder.publish(&self.store);
        statistics.add_order(is_done);
    }

    /// Warns when many pages can never be allocated again; returns whether it did.
    fn warn_of_retirement(&self) -> bool {
        let ArenaUsage { retired_pages, capacity_pages, last_generation, .. } =
            self.store.arena_usage();
        let is_due = last_generation == ArenaGeneration::MAX
            && retired_pages > capacity_pages / RETIRED_DIVISOR;
        if is_due {
            tracing::warn!(
                retired_pages,
                capacity_pages,
                "the colours of many pages are used up for good; restart the server, and it joins \
                 as a new node"
            );
        }
        is_due
    }

    fn publish(&self, statistics: &ShardStatistics) {
        statistics.publish(&self.responder, self.store.arena_usage(), self.transport.counters());
    }
}

/// The credit of a taker's session, in pages: a part of what the carrier can hold, because the requests of clients come
/// the same way, and other lines, too. 32 lines hide the way to the giver.
fn taker_credit(carrier: &Capabilities) -> u16 {
    u16::try_from((carrier.received_pages() / 4).clamp(16, 256)).unwrap_or(16)
}

/// What became of a datagram.
enum Taken {
    /// The server itself handled it.
    Here,
    /// A deputy handled it.
    ByDeputy,
    /// Replies must be sent first.
    NotYet,
}

/// Sends all waiting replies of a responder; those that a busy carrier does not accept in time are dropped.
fn send_all<T: Transport, S: PageStore + ?Sized>(
    transport: &mut T,
    responder: &mut Responder,
    store: &S,
    statistics: &ShardStatistics,
) -> Result<(), ServeError> {
    let mut retry_until = None;
    while responder.reply_count() > 0 {
        let sent = match responder.reply_count() {
            1 => send::<1, _, _>(transport, responder, store),
            2..=SHORT_BATCH => send::<SHORT_BATCH, _, _>(transport, responder, store),
            _ => send::<SEND_BATCH, _, _>(transport, responder, store),
        };
        match sent {
            Ok(0) => {
                let now = transport.now();
                let until = *retry_until.get_or_insert(now + SEND_RETRY_TIME);
                if now >= until {
                    let dropped = responder.reply_count();
                    responder.release(dropped);
                    statistics.add_unsent(dropped);
                }
                std::thread::yield_now();
            }
            Ok(count) => {
                responder.release(count);
                retry_until = None;
            }
            Err(error @ TransmitError::Socket(_)) => return Err(ServeError::Transmit(error)),
            // The requester is unreachable, or announced a wrong piece size: drop the reply.
            Err(
                TransmitError::Refused { .. }
                | TransmitError::TooLarge { .. }
                | TransmitError::Unreachable { .. },
            ) => {
                responder.release(1);
                statistics.add_unsent(1);
            }
        }
    }
    Ok(())
}

/// Sends up to `N` waiting replies.
fn send<const N: usize, T: Transport, S: PageStore + ?Sized>(
    transport: &mut T,
    responder: &Responder,
    store: &S,
) -> Result<usize, TransmitError> {
    const NOTHING: Outgoing<'static> = Outgoing {
        source: Ipv6Addr::UNSPECIFIED,
        destination: Ipv6Addr::UNSPECIFIED,
        destination_port: 0,
        header: &[],
        data: &[],
    };
    let mut batch = [NOTHING; N];
    let mut count = 0;
    for (out, reply) in batch.iter_mut().zip(responder.transmits(store)) {
        *out = Outgoing {
            source: reply.source,
            destination: reply.destination,
            destination_port: reply.destination_port,
            header: reply.head,
            data: reply.data,
        };
        count += 1;
    }
    transport.transmit(&batch[..count])
}
