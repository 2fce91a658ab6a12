//! The statistics of a shard: written by its thread alone, read by any thread.

use core::sync::atomic::{AtomicU64, Ordering};
use std::collections::BTreeMap;

use bluebridge_protocol::responder::{Event, Responder};
use bluebridge_transport::Counters;
use bluebridge_wire::{ArenaGeneration, Fault, Status};

use crate::{
    ArenaUsage,
    watch::{Bell, News, Watch},
};

/// States that are published beside events and statuses.
const GAUGE_COUNT: usize = 13;

/// The place of one of them.
const FREE_PAGES: usize = 1;

/// Counters of a carrier.
const COUNTER_COUNT: usize = 13;

/// The live statistics of one shard. Each number is correct; different numbers may be from two
/// moments of the same millisecond.
#[derive(Debug)]
pub struct ShardStatistics {
    events: [AtomicU64; Event::ALL.len()],
    replies: Vec<AtomicU64>,
    gauges: [AtomicU64; GAUGE_COUNT],
    transport: [AtomicU64; COUNTER_COUNT],
    unsent: AtomicU64,
    overload_drops: AtomicU64,
    orders_done: AtomicU64,
    orders_refused: AtomicU64,
    takings_over: AtomicU64,
    watch: Watch,
}

impl Default for ShardStatistics {
    fn default() -> Self {
        Self {
            events: [const { AtomicU64::new(0) }; Event::ALL.len()],
            replies: Status::ALL.iter().map(|_| AtomicU64::new(0)).collect(),
            gauges: [const { AtomicU64::new(0) }; GAUGE_COUNT],
            transport: [const { AtomicU64::new(0) }; COUNTER_COUNT],
            unsent: AtomicU64::new(0),
            overload_drops: AtomicU64::new(0),
            orders_done: AtomicU64::new(0),
            orders_refused: AtomicU64::new(0),
            takings_over: AtomicU64::new(0),
            watch: Watch::default(),
        }
    }
}

/// The statistics of a shard at one moment.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Snapshot {
    /// What happened in the protocol.
    pub events: Vec<(Event, u64)>,
    /// Replies by status.
    pub replies: Vec<(Status, u64)>,
    /// The usage of the arena.
    pub arena: ArenaUsage,
    /// Whether own lines are not here of which it is not known that another server has them.
    pub misses_lines: bool,
    /// Open sessions.
    pub session_count: u64,
    /// Pages of anywhere-CREATEs that wait for their CONFIRM.
    pub provisional_pages: u64,
    /// Leased pages; expired leases are counted until the shard finds them.
    pub leased_pages: u64,
    /// Requests that wait for leased pages.
    pub waiting_count: u64,
    /// The counters of the carrier.
    pub transport: Counters,
    /// Replies that the carrier did not accept.
    pub unsent_count: u64,
    /// Requests that were dropped because their sender had too many waiting.
    pub overload_drop_count: u64,
    /// Orders that were carried out, and orders that failed.
    pub orders: (u64, u64),
}

impl Snapshot {
    /// How often `event` happened.
    #[must_use]
    pub fn event(&self, event: Event) -> u64 {
        self.events.iter().find(|(other, _)| *other == event).map_or(0, |(_, count)| *count)
    }

    /// Replies with `status`.
    #[must_use]
    pub fn replies(&self, status: Status) -> u64 {
        self.replies.iter().find(|(other, _)| *other == status).map_or(0, |(_, count)| *count)
    }
}

/// The requests that shards refused or dropped, counted by reason since they started, without zero
/// counts.
///
/// A reply counts as a refusal if its status blames the requester or the server. Statuses of the
/// protocol's normal course, such as BUSY, do not count.
#[must_use]
pub fn refusals(shards: &[Snapshot]) -> BTreeMap<&'static str, u64> {
    let replies = shards.iter().flat_map(|shard| &shard.replies);
    let refused = replies
        .filter(|(status, _)| status.fault() != Fault::Protocol)
        .map(|(status, count)| (status.text(), *count));
    let events = shards.iter().flat_map(|shard| &shard.events);
    let dropped = events
        .filter(|(event, _)| event.name().starts_with("drop_") && *event != Event::DropNotice)
        .map(|(event, count)| (event.name(), *count));
    let others = shards.iter().flat_map(|shard| {
        [
            ("drop_overload", shard.overload_drop_count),
            ("drop_no_room", shard.transport.overflow_drop_count),
            ("drop_foreign", shard.transport.foreign_drop_count),
            ("drop_malformed", shard.transport.malformed_drop_count),
            ("reply_not_sent", shard.unsent_count),
        ]
    });
    let mut named = BTreeMap::new();
    for (name, count) in refused.chain(dropped).chain(others).filter(|(_, count)| *count > 0) {
        *named.entry(name).or_insert(0) += count;
    }
    named
}

impl ShardStatistics {
    /// The current numbers.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let load = |number: &AtomicU64| number.load(Ordering::Relaxed);
        let [
            capacity_pages,
            free_pages,
            quarantined_pages,
            retired_pages,
            used_pages,
            adopted_lines,
            session_count,
            provisional_pages,
            leased_pages,
            waiting_count,
            last_generation,
            wanted_generation,
            misses_lines,
        ] = self.gauges.each_ref().map(load);
        Snapshot {
            events: Event::ALL.iter().copied().zip(self.events.iter().map(load)).collect(),
            replies: Status::ALL.iter().copied().zip(self.replies.iter().map(load)).collect(),
            arena: ArenaUsage {
                capacity_pages,
                free_pages,
                quarantined_pages,
                retired_pages,
                used_pages,
                adopted_lines,
                last_generation: generation(last_generation),
                wanted_generation: generation(wanted_generation),
            },
            session_count,
            misses_lines: misses_lines > 0,
            provisional_pages,
            leased_pages,
            waiting_count,
            transport: counters_of(self.transport.each_ref().map(load)),
            unsent_count: load(&self.unsent),
            overload_drop_count: load(&self.overload_drops),
            orders: (load(&self.orders_done), load(&self.orders_refused)),
        }
    }

    pub(crate) fn publish(&self, responder: &Responder, arena: ArenaUsage, transport: Counters) {
        let counters = responder.counters();
        for (shown, (_, count)) in self.events.iter().zip(counters.events()) {
            shown.store(count, Ordering::Relaxed);
        }
        for (shown, (_, count)) in self.replies.iter().zip(counters.statuses()) {
            shown.store(count, Ordering::Relaxed);
        }
        let gauges: [u64; GAUGE_COUNT] = [
            arena.capacity_pages,
            arena.free_pages,
            arena.quarantined_pages,
            arena.retired_pages,
            arena.used_pages,
            arena.adopted_lines,
            responder.session_count() as u64,
            responder.provisional_pages(),
            responder.leased_pages() as u64,
            responder.waiting_count() as u64,
            arena.last_generation.number().into(),
            arena.wanted_generation.number().into(),
            responder.misses_lines().into(),
        ];
        for (shown, gauge) in self.gauges.iter().zip(gauges) {
            shown.store(gauge, Ordering::Relaxed);
        }
        for (shown, count) in self.transport.iter().zip(numbers_of(transport)) {
            shown.store(count, Ordering::Relaxed);
        }
        self.watch.look(arena.free_pages, arena.wanted_generation.number().into());
    }

    /// Tells `bell` of news from now on; see [`Watch::tell`].
    pub(crate) fn tell(&self, bell: Bell) {
        self.watch.tell(bell);
    }

    /// The free pages, for who is told of news.
    pub(crate) fn read_free_pages(&self) -> u64 {
        self.watch.read_free_pages(&self.gauges[FREE_PAGES])
    }

    /// The thread of the shard ends.
    pub(crate) fn end(&self) {
        self.watch.end();
    }

    /// Whether the thread of the shard has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.watch.has_ended()
    }

    pub(crate) fn add_unsent(&self, count: usize) {
        self.unsent.fetch_add(count as u64, Ordering::Relaxed);
    }

    pub(crate) fn add_overload_drops(&self, count: usize) {
        if count > 0 {
            self.overload_drops.fetch_add(count as u64, Ordering::Relaxed);
        }
    }

    /// So many migrations to the shard have come to their end: no line of them is left or on its way.
    pub(crate) fn add_takings_over(&self, count: u64) {
        if count > 0 {
            self.takings_over.fetch_add(count, Ordering::Relaxed);
            self.watch.ring(News::Taken);
        }
    }

    /// Migrations to the shard that have come to their end.
    pub(crate) fn takings_over(&self) -> u64 {
        self.takings_over.load(Ordering::Relaxed)
    }

    pub(crate) fn add_order(&self, is_done: bool) {
        let counter = if is_done { &self.orders_done } else { &self.orders_refused };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// The generation of a gauge's value.
fn generation(gauge: u64) -> ArenaGeneration {
    u16::try_from(gauge).ok().and_then(ArenaGeneration::new).unwrap_or(ArenaGeneration::MAX)
}

const fn numbers_of(counters: Counters) -> [u64; COUNTER_COUNT] {
    let Counters {
        sent_count,
        sent_bytes,
        sent_frame_count,
        sent_train_count,
        send_blocked_count,
        train_refused_count,
        received_count,
        received_bytes,
        received_train_count,
        overflow_drop_count,
        foreign_drop_count,
        malformed_drop_count,
        network_error_count,
    } = counters;
    [
        sent_count,
        sent_bytes,
        sent_frame_count,
        sent_train_count,
        send_blocked_count,
        train_refused_count,
        received_count,
        received_bytes,
        received_train_count,
        overflow_drop_count,
        foreign_drop_count,
        malformed_drop_count,
        network_error_count,
    ]
}

const fn counters_of(numbers: [u64; COUNTER_COUNT]) -> Counters {
    let [
        sent_count,
        sent_bytes,
        sent_frame_count,
        sent_train_count,
        send_blocked_count,
        train_refused_count,
        received_count,
        received_bytes,
        received_train_count,
        overflow_drop_count,
        foreign_drop_count,
        malformed_drop_count,
        network_error_count,
    ] = numbers;
    Counters {
        sent_count,
        sent_bytes,
        sent_frame_count,
        sent_train_count,
        send_blocked_count,
        train_refused_count,
        received_count,
        received_bytes,
        received_train_count,
        overflow_drop_count,
        foreign_drop_count,
        malformed_drop_count,
        network_error_count,
    }
}
