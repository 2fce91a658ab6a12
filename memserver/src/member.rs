//! A memory server as a member of a rack: it serves under the authority that the controller grants,
//! reports what memory is free, and leaves before it stops.
//!
//! Joining is [`Membership::join_with`]; [`ServerConfig::assigned`] turns the assignment into a
//! server's configuration, and [`Member::start`] starts it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bluebridge_northbound::{
    Assignment, Caller, Connection, Membership, ServerReport, Snapshot as RackSnapshot,
    migration::Contents,
};
use bluebridge_protocol::responder::Authority;
use bluebridge_transport::Wakeable;
use bluebridge_wire::{ArenaGeneration, Space};

mod free_lines;
mod operator;
mod transfers;

use crate::{
    Reserved, Server, ServerConfig, StartError,
    serve::{Order, ServeError},
    server::OrderError,
    statistics::{self, Snapshot},
    watch::{Bell, News},
};
use transfers::Transfers;

/// How often an order that a busy shard could not take is given again, and the work that an order began is looked at.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// The shortest interval between two log lines about refused and dropped requests.
const REFUSAL_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// How long arena generations may be requested in vain before the shards no longer expect any.
/// Longer than a few heartbeats, and shorter than clients wait for a response.
const RESERVE_TIMEOUT: Duration = Duration::from_secs(2);

/// Why a member no longer serves. It still runs: [`Member::stop`] ends it in order.
#[derive(Debug, thiserror::Error)]
pub enum MemberError {
    /// The controller expelled this incarnation, and said why: another process joined under the name, or another server
    /// answers for this one, which was drained and gone.
    #[error("this server is no member of the rack any more ({0}); restart it to join again")]
    Expelled(Arc<str>),
    /// A serving core ended by itself; only a failed carrier causes this.
    #[error("a serving core ended by itself; stopping the server returns its error")]
    ShardEnded,
}

impl ServerConfig {
    /// A server of one space as the controller assigned it, with the usual limits.
    ///
    /// `memory_bytes` and `seed` are those of [`ServerConfig::new`].
    #[must_use]
    pub fn assigned(assignment: &Assignment, memory_bytes: u64, seed: u64) -> Self {
        let Assignment { space, node, incarnation, .. } = *assignment;
        Self {
            generation: assignment.generation,
            last_generation: assignment.last_generation,
            authority: authority(assignment.range_epoch),
            // A size that does not fit is out of bounds; `Server` refuses it with a clear error.
            piece_bytes: u16::try_from(assignment.piece_bytes).unwrap_or(u16::MAX),
            ..Self::new(space, node, incarnation, memory_bytes, seed)
        }
    }
}

/// The authority of a range epoch; epoch 0 grants none.
fn authority(range_epoch: u32) -> Option<Authority> {
    (range_epoch != 0).then_some(Authority { range_epoch, expires_at: None })
}

/// A running server and its membership. Dropping it leaves the rack and stops the server.
pub struct Member {
    // Fields are dropped in this order: first the rack learns that the server left, then it stops.
    membership: Membership,
    server: Server,
    applied: Applied,
    /// Whether more generations are expected, as all shards should know.
    is_reserving: bool,
    /// The last reserved generation when more were first wanted, and the time.
    wanted_since: Option<(ArenaGeneration, Instant)>,
    /// The migrations in which it takes part.
    transfers: Transfers,
}

/// The orders that every shard has.
struct Applied {
    range_epoch: u32,
    notices: bool,
    last_generation: ArenaGeneration,
    is_reserving: bool,
}

impl Member {
    /// Starts to serve as `membership` was assigned; `config` comes from
    /// [`ServerConfig::assigned`].
    ///
    /// # Errors
    /// [`StartError`]; then nothing runs, the memory is freed and the server has left the rack.
    pub fn start<T>(
        membership: Membership,
        config: &ServerConfig,
        reserved: Reserved,
        carriers: Vec<T>,
    ) -> Result<Self, StartError>
    where
        T: Wakeable + Send + 'static,
    {
        let earlier = membership.earlier().to_vec();
        let server =
            crate::run_with(&ServerConfig { earlier, ..config.clone() }, reserved, carriers)?;
        observe(&membership, &server);
        let range_epoch = config.authority.map_or(0, |authority| authority.range_epoch);
        let last_generation = config.last_generation;
        let applied = Applied { range_epoch, notices: false, last_generation, is_reserving: true };
        let transfers =
            Transfers::new(Contents { node: config.node, generation: config.generation });
        Ok(Self { membership, server, applied, is_reserving: true, wanted_since: None, transfers })
    }

    /// The server.
    #[must_use]
    pub const fn server(&self) -> &Server {
        &self.server
    }

    /// Its membership.
    #[must_use]
    pub const fn membership(&self) -> &Membership {
        &self.membership
    }

    /// Lets other threads end the wait of [`Self::serve_until`], so that it calls `stop`.
    #[must_use]
    pub fn caller(&self) -> Caller {
        self.membership.caller()
    }

    /// Serves until `stop` returns true. It is called after every event, and at least as often as `look` says; a change of
    /// its result can be announced by a [`Caller`].
    ///
    /// # Errors
    /// [`MemberError`]; the server still responds to requests until [`Self::stop`].
    pub fn serve_until(
        &mut self,
        look: Duration,
        mut stop: impl FnMut() -> bool,
    ) -> Result<(), MemberError> {
        let mut rack = self.membership.snapshot();
        let mut refusals = RefusalLog::new(Instant::now());
        while !stop() {
            self.apply(&rack)?;
            self.request_generations(Instant::now())?;
            if refusals.is_due(Instant::now()) {
                refusals.log(statistics::refusals(&self.server.statistics()));
            }
            while let Some(query) = self.membership.next_query() {
                let node = self.membership.assignment().node;
                let reply = operator::reply(query.query(), node, &self.server);
                query.reply(reply);
            }
            let Self { membership, server, transfers, .. } = self;
            transfers.drive(server, || membership.next_order(), |report| membership.report(report));
            let wait = self.wait(&rack, Instant::now()).min(refusals.time_left(Instant::now()));
            rack = self.membership.wait_newer(rack.version, wait.min(look));
        }
        Ok(())
    }

    /// How long nothing is to be done, if nothing is announced before.
    fn wait(&self, rack: &RackSnapshot, now: Instant) -> Duration {
        let is_behind = rack.range_epoch != self.applied.range_epoch
            || rack.last_generation > self.applied.last_generation
            || rack.notices_wanted != self.applied.notices;
        if is_behind || self.is_reserving != self.applied.is_reserving || !self.transfers.is_idle()
        {
            return RETRY_INTERVAL;
        }
        let overdue = self.wanted_since.filter(|_| self.applied.is_reserving);
        let overdue = overdue.map(|(_, since)| since + RESERVE_TIMEOUT);
        let due = [overdue, self.transfers.due(&self.server)].into_iter().flatten().min();
        due.map_or(Duration::MAX, |due| due.saturating_duration_since(now))
    }

    /// Requests the arena generations that the shards want from the controller, and notifies the
    /// shards when it does not reserve them.
    fn request_generations(&mut self, now: Instant) -> Result<(), MemberError> {
        let shards = self.server.statistics();
        let wanted = shards.iter().map(|shard| shard.arena.wanted_generation).max();
        let wanted = wanted.unwrap_or_default();
        self.membership.report_wanted_generation(wanted);
        let last_generation = self.applied.last_generation;
        let is_reserving = !is_overdue(now, (last_generation, wanted), &mut self.wanted_since);
        self.is_reserving = is_reserving;
        if is_reserving == self.applied.is_reserving
            || !is_ordered(self.server.set_reserving(is_reserving))?
        {
            return Ok(());
        }
        self.applied.is_reserving = is_reserving;
        let last_generation = last_generation.number();
        if is_reserving {
            tracing::info!(last_generation, "arena generations are reserved again");
        } else {
            tracing::warn!(
                last_generation,
                "pages run out of colours, and the controller reserves no arena generations for \
                 them; see that it runs"
            );
        }
        Ok(())
    }

    /// Gives the shards the orders that follow from the controller's state and that they do not
    /// have yet.
    fn apply(&mut self, rack: &RackSnapshot) -> Result<(), MemberError> {
        if self.server.is_failed() {
            return Err(MemberError::ShardEnded);
        }
        if rack.connection == Connection::Expelled {
            let expulsion = self.membership.expulsion();
            let reason = expulsion.get().cloned();
            return Err(MemberError::Expelled(reason.unwrap_or_else(|| Arc::from("no reason"))));
        }
        if rack.range_epoch != self.applied.range_epoch
            && is_ordered(self.server.set_authority(authority(rack.range_epoch)))?
        {
            tracing::info!(range_epoch = rack.range_epoch, "authority of the range changed");
            self.applied.range_epoch = rack.range_epoch;
        }
        if rack.last_generation > self.applied.last_generation
            && is_ordered(self.server.reserve(rack.last_generation))?
        {
            let last_generation = rack.last_generation.number();
            if rack.last_generation == ArenaGeneration::MAX {
                tracing::warn!(
                    last_generation,
                    "the last arena generations of this node are reserved; before all pages have \
                     used them up, restart the server, and it joins as a new node"
                );
            } else {
                tracing::debug!(last_generation, "arena generations were reserved");
            }
            self.applied.last_generation = rack.last_generation;
        }
        if rack.notices_wanted != self.applied.notices
            && is_ordered(self.order_notices(rack.notices_wanted))?
        {
            self.applied.notices = rack.notices_wanted;
        }
        Ok(())
    }

    fn order_notices(&self, wanted: bool) -> Result<(), OrderError> {
        let space: Space = self.membership.assignment().space;
        let shards = (0_u16..).zip(self.server.statistics());
        // Every shard gets the order, even if an earlier one is busy.
        shards
            .map(|(shard, _)| self.server.order(shard, Order::Notices(space, wanted)))
            .fold(Ok(()), Result::and)
    }

    /// Leaves the rack, so that no new requests are sent here, then responds to those in flight and
    /// stops. Returns the last statistics of every shard.
    ///
    /// # Errors
    /// [`ServeError`] of the first shard that had ended by itself. If the controller does not
    /// confirm the leave, this is only logged: it detects the missing heartbeats.
    pub fn stop(self) -> Result<Vec<Snapshot>, ServeError> {
        let Self { membership, server, .. } = self;
        if let Err(error) = membership.leave() {
            tracing::warn!(%error, "the controller did not confirm that this server left");
        }
        server.stop()
    }
}

/// Lets heartbeats report what the shards have, and the shards wake the member for what it must know at once.
fn observe(membership: &Membership, server: &Server) {
    let reported = server.reported();
    membership.report_with(move || ServerReport {
        free_pages: reported.free_pages(),
        direct_reads: Some(operator::direct_reads(reported.direct_reads())),
    });
    let caller = membership.caller();
    let bell: Bell = Arc::new(move |news| match news {
        News::FreePages => caller.hurry(),
        News::Ended | News::Generations | News::Taken => caller.call(),
    });
    server.tell(&bell);
}

/// Whether more generations than the last one were wanted for longer than [`RESERVE_TIMEOUT`]
/// without success.
fn is_overdue(
    now: Instant,
    (last, wanted): (ArenaGeneration, ArenaGeneration),
    wanted_since: &mut Option<(ArenaGeneration, Instant)>,
) -> bool {
    if wanted <= last {
        *wanted_since = None;
        return false;
    }
    let since = match *wanted_since {
        Some((before, since)) if before == last => since,
        _ => now,
    };
    *wanted_since = Some((last, since));
    now.saturating_duration_since(since) >= RESERVE_TIMEOUT
}

/// Logs refused and dropped requests since the last log line.
struct RefusalLog {
    next_at: Instant,
    logged: BTreeMap<&'static str, u64>,
}

impl RefusalLog {
    fn new(now: Instant) -> Self {
        Self { next_at: now + REFUSAL_LOG_INTERVAL, logged: BTreeMap::new() }
    }

    fn is_due(&mut self, now: Instant) -> bool {
        let is_due = now >= self.next_at;
        if is_due {
            self.next_at = now + REFUSAL_LOG_INTERVAL;
        }
        is_due
    }

    fn time_left(&self, now: Instant) -> Duration {
        self.next_at.saturating_duration_since(now)
    }

    fn log(&mut self, refusals: BTreeMap<&'static str, u64>) {
        if let Some(summary) = self.summary(&refusals) {
            let seconds = REFUSAL_LOG_INTERVAL.as_secs();
            tracing::info!("refused or dropped in the last {seconds} s: {summary}");
        }
        self.logged = refusals;
    }

    /// `None` if nothing was refused or dropped since the last log line.
    fn summary(&self, refusals: &BTreeMap<&'static str, u64>) -> Option<String> {
        let before = |name| self.logged.get(name).copied().unwrap_or(0);
        let new = refusals.iter().map(|(name, count)| (name, count.saturating_sub(before(*name))));
        let words: Vec<_> = new
            .filter(|(_, count)| *count > 0)
            .map(|(name, count)| format!("{name}: {count}"))
            .collect();
        (!words.is_empty()).then(|| words.join(", "))
    }
}

/// Whether every shard took the order. A busy one gets it again in the next iteration.
fn is_ordered(outcome: Result<(), OrderError>) -> Result<bool, MemberError> {
    match outcome {
        Ok(()) => Ok(true),
        Err(OrderError::Busy(_)) => Ok(false),
        Err(OrderError::Gone(_)) => Err(MemberError::ShardEnded),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_shard_is_asked_again_and_one_that_ended_is_an_error() {
        assert!(matches!(is_ordered(Ok(())), Ok(true)));
        assert!(matches!(is_ordered(Err(OrderError::Busy(3))), Ok(false)));
        assert!(matches!(is_ordered(Err(OrderError::Gone(3))), Err(MemberError::ShardEnded)));
    }

    #[test]
    fn refusals_are_logged_once_each_and_at_most_once_a_minute() {
        let begin = Instant::now();
        let mut log = RefusalLog::new(begin);
        assert!(!log.is_due(begin + Duration::from_secs(59)));
        assert!(log.is_due(begin + Duration::from_secs(60)));
        assert!(!log.is_due(begin + Duration::from_secs(61)));
        let first = BTreeMap::from([("drop_crc", 3)]);
        assert_eq!(log.summary(&first).as_deref(), Some("drop_crc: 3"));
        log.log(first.clone());
        assert_eq!(log.summary(&first), None);
        let later = BTreeMap::from([("drop_crc", 5), ("the space's quota is used up", 1)]);
        let summary = log.summary(&later);
        assert_eq!(summary.as_deref(), Some("drop_crc: 2, the space's quota is used up: 1"));
    }

    #[test]
    fn generations_that_do_not_come_are_overdue() {
        let begin = Instant::now();
        let mut since = None;
        let generation = |number| ArenaGeneration::new(number).expect("small");
        let mut at = |millis, last, wanted| {
            let now = begin + Duration::from_millis(millis);
            is_overdue(now, (generation(last), generation(wanted)), &mut since)
        };
        assert!(!at(0, 1, 1) && !at(10_000, 1, 3) && !at(11_999, 1, 3));
        assert!(at(12_000, 1, 3) && at(20_000, 1, 3));
        assert!(!at(21_000, 3, 3) && !at(22_000, 3, 5) && at(24_000, 3, 5));
        // A server that always wants more and gets it is not overdue.
        assert!(!at(24_001, 5, 7) && !at(26_000, 7, 9) && !at(27_999, 9, 11) && at(29_999, 9, 11));
    }

    #[test]
    fn epoch_zero_grants_nothing() {
        assert_eq!(authority(0), None);
        assert_eq!(authority(7), Some(Authority { range_epoch: 7, expires_at: None }));
    }
}
