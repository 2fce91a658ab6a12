//! A whole memory server: starts, observes, controls and stops shards on their threads.

use core::{
    ops::ControlFlow,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};
use std::{
    collections::BTreeMap,
    io,
    sync::{
        Arc,
        mpsc::{RecvTimeoutError, SyncSender, TrySendError, sync_channel},
    },
    thread::{Builder, JoinHandle},
};

use bluebridge_northbound::migration::EarlierRow;
use bluebridge_protocol::responder::{Authority, Config, ConfigError, Limits, Responder, Timers};
use bluebridge_transport::{Wakeable, Waker};
use bluebridge_wire::{ArenaGeneration, NodeId, Space, address::PAGE_BYTES};
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::{
    Arena, ArenaConfig, Claim, Damaged, PageKind, Reservation, ReserveError, Reserved,
    direct::{Counters, DirectMemory, DirectReads, NoDirectReads, ReadCounts},
    migration::{self, MigrationCall, MigrationError, MigrationOrder, MigrationState},
    serve::{Idle, Order, ServeError, Shard, ShardControl},
    statistics::{ShardStatistics, Snapshot},
    survey::{Findings, Query, Survey},
    watch::Bell,
};

/// Orders that may wait for a shard.
const ORDER_LIMIT: usize = 256;

/// The configuration of a server; the number of its shards is the number of its carriers.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// The node that the controller assigned.
    pub node: NodeId,
    /// The incarnation that the controller assigned.
    pub incarnation: u32,
    /// The first generation of the contents, which the controller assigned; they begin empty.
    pub generation: ArenaGeneration,
    /// What other servers have, or may have, of contents that this node lost.
    pub earlier: Vec<EarlierRow>,
    /// The last generation that the controller reserved; [`Server::reserve`] adds more.
    pub last_generation: ArenaGeneration,
    /// The right to serve; without one, requests on pages are refused.
    pub authority: Option<Authority>,
    /// The spaces that are served.
    pub spaces: Vec<Space>,
    /// The largest piece of the spaces, in bytes.
    pub piece_bytes: u16,
    /// Memory for all shards; each shard's part is rounded down to 2 MiB, or to a page if it is
    /// smaller. Beyond it only the memory that `limits` bound is allocated.
    pub memory_bytes: u64,
    /// When the system provides the memory.
    pub claim: Claim,
    /// Use huge pages where they are available.
    pub prefer_huge_pages: bool,
    /// Quotas per space in pages, for the whole server. Shards get equal shares; a remainder is
    /// distributed over the first shards, one page each.
    pub quotas: Vec<(Space, u64)>,
    /// The quota of spaces without an entry; `u64::MAX` for none. If it is `None`, each of `spaces`
    /// gets an equal share of the server's pages, so that no space can fill the server at the cost
    /// of the others. A server with one space gives it all pages.
    pub default_quota_pages: Option<u64>,
    /// The bounds of each shard.
    pub limits: Limits,
    /// The times of the protocol.
    pub timers: Timers,
    /// How the loops wait.
    pub idle: Idle,
    /// Cores to run the shards on, in their order; further shards are not pinned.
    pub cores: Vec<usize>,
    /// Makes session ids unpredictable.
    pub seed: u64,
    /// The interface on which the kernel answers READs, if the memory allows it.
    pub direct: Option<DirectInterface>,
}

/// The interface through which a server's requests come.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct DirectInterface {
    /// Its name, in the namespace of the thread that starts the server.
    pub name: String,
    /// The longest IP packet that it sends, in bytes.
    pub mtu: u32,
    /// Whether it is one end of a veth pair whose other end is in another namespace: answers then
    /// get there without a queue in between.
    pub has_far_peer: bool,
}

impl ServerConfig {
    /// A server of one space with the usual limits.
    #[must_use]
    pub fn new(space: Space, node: NodeId, incarnation: u32, memory_bytes: u64, seed: u64) -> Self {
        let usual = Config::new(space, node, incarnation, seed);
        Self {
            node,
            incarnation,
            generation: ArenaGeneration::default(),
            last_generation: ArenaGeneration::default(),
            earlier: Vec::new(),
            authority: usual.authority,
            spaces: usual.spaces,
            piece_bytes: usual.piece_bytes,
            memory_bytes,
            claim: Claim::default(),
            prefer_huge_pages: true,
            quotas: Vec::new(),
            default_quota_pages: None,
            limits: usual.limits,
            timers: usual.timers,
            idle: Idle::default(),
            cores: Vec::new(),
            seed,
            direct: None,
        }
    }

    /// The memory for a server with this many shards, to be reserved before it joins a rack.
    #[must_use]
    pub const fn reservation(&self, shard_count: u16) -> Reservation {
        Reservation {
            bytes: self.memory_bytes,
            shard_count,
            claim: self.claim,
            prefer_huge_pages: self.prefer_huge_pages,
        }
    }

    fn shard(&self, shard: u8, shard_count: u16) -> Config {
        Config {
            node: self.node,
            incarnation: self.incarnation,
            spaces: self.spaces.clone(),
            shard,
            shard_count,
            authority: self.authority,
            piece_bytes: self.piece_bytes,
            limits: self.limits,
            timers: self.timers,
            seed: self.seed.wrapping_add(u64::from(shard)),
        }
    }

    /// `shard_pages` are the pages of one shard.
    fn arena(&self, shard: u8, shard_count: u16, shard_pages: u64) -> ArenaConfig {
        let count = u64::from(shard_count);
        let spaces = (self.spaces.len() as u64).max(1);
        let equal = || shard_pages.saturating_mul(count) / spaces;
        let default_quota_pages = self.default_quota_pages.unwrap_or_else(equal);
        // The first shards get the remainder, so that the sum is the configured number.
        let share = |pages: u64| match pages {
            u64::MAX => pages,
            pages => pages / count + u64::from(u64::from(shard) < pages % count),
        };
        ArenaConfig {
            generation: self.generation,
            last_generation: self.last_generation,
            shard,
            quotas: self.quotas.iter().map(|&(space, pages)| (space, share(pages))).collect(),
            default_quota_pages: share(default_quota_pages),
            ..ArenaConfig::default()
        }
    }
}

/// The server could not be started; nothing runs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The configuration is wrong.
    #[error("the memory server's configuration is invalid: {0}")]
    Config(#[from] ConfigError),
    /// A carrier per shard, 1 to 256, is needed.
    #[error("{0} carriers were given; there must be one per shard, 1 to 256")]
    Carriers(usize),
    /// The memory is not available.
    #[error("the memory server cannot get its memory: {0}")]
    Memory(#[from] ReserveError),
    /// The memory of an earlier process is damaged.
    #[error("the kept memory cannot be taken over: {0}")]
    Damaged(#[from] Damaged),
    /// A thread could not be started.
    #[error("a thread of the memory server could not be started: {0}")]
    Thread(#[source] io::Error),
    /// The system has no descriptor with which a carrier's sleep could be ended; raise the limit of open files.
    #[error(
        "no descriptor to wake a thread of the memory server: {0}; raise the limit of open files (ulimit -n)"
    )]
    Waker(#[source] io::Error),
}

/// An order could not be given to a shard.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OrderError {
    /// The shard is busy with earlier orders; try later.
    #[error("shard {0} is busy with earlier orders; try later")]
    Busy(u16),
    /// The shard ended, or no shard has this number.
    #[error("there is no shard {0} (any more)")]
    Gone(u16),
}

/// A shard did not respond to a survey.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum SurveyError {
    /// The order was not accepted.
    #[error(transparent)]
    Order(#[from] OrderError),
    /// The shard has too much to do; try later. Allocations that were to be freed may be freed.
    #[error("shard {0} did not respond in time; try later")]
    TimedOut(u16),
}

/// A shard did not follow an order for a migration.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum MigrateError {
    /// The order was not accepted.
    #[error(transparent)]
    Order(#[from] OrderError),
    /// The shard refused; nothing changed.
    #[error(transparent)]
    Refused(#[from] MigrationError),
    /// The shard has too much to do. Repeat the order: it may have been followed.
    #[error("shard {0} did not respond in time; repeat the order")]
    TimedOut(u16),
}

struct RunningShard {
    thread: JoinHandle<Result<(), ServeError>>,
    orders: SyncSender<Order>,
    /// Ends its sleep. Whatever it is to see must be there before.
    waker: Waker,
    statistics: Arc<ShardStatistics>,
}

/// Notes that a shard's thread ends, also by a panic.
struct Ending(Arc<ShardStatistics>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// Reads what is reported of a server with each heartbeat, from any thread, also after the server's end.
#[derive(Clone, Debug)]
pub(crate) struct Reported {
    shards: Vec<Arc<ShardStatistics>>,
    direct: Result<Arc<Counters>, String>,
}

impl Reported {
    /// The free pages; from now on who observes the server is told when they are very different.
    pub(crate) fn free_pages(&self) -> u64 {
        self.shards.iter().map(|shard| shard.read_free_pages()).sum()
    }

    /// The READs that the kernel answers and passes on, or why it answers none.
    pub(crate) fn direct_reads(&self) -> Result<ReadCounts, &str> {
        self.direct.as_ref().map(|counters| counters.counts()).map_err(String::as_str)
    }
}

/// A running server. Dropping it stops it as [`Server::stop`] does.
pub struct Server {
    shards: Vec<RunningShard>,
    stop: Arc<AtomicBool>,
    page_kind: PageKind,
    direct: Result<DirectReads, NoDirectReads>,
    /// Maps memory of which the shards have not needed anything yet.
    mapper: Option<JoinHandle<()>>,
}

/// Starts a server with a shard per carrier.
///
/// # Errors
/// [`StartError`]; then nothing runs and no memory is held.
pub fn run<T>(config: &ServerConfig, transports: Vec<T>) -> Result<Server, StartError>
where
    T: Wakeable + Send + 'static,
{
    let reserved = config.reservation(shard_count(transports.len())?).reserve()?;
    run_with(config, reserved, transports)
}

/// Starts a server on memory that was reserved before, with a part for each carrier.
///
/// # Errors
/// [`StartError`]; then nothing runs and the memory is freed.
pub fn run_with<T>(
    config: &ServerConfig,
    reserved: Reserved,
    transports: Vec<T>,
) -> Result<Server, StartError>
where
    T: Wakeable + Send + 'static,
{
    let count = transports.len();
    let shard_count = shard_count(count)?;
    if reserved.parts.len() != count {
        return Err(StartError::Carriers(count));
    }
    for (kind, reason) in &reserved.refusals {
        tracing::debug!(?kind, reason, "a kind of memory is not available");
    }
    tracing::info!(
        node = config.node.0,
        shard_count,
        memory_bytes = config.memory_bytes,
        page_kind = ?reserved.page_kind,
        claim = ?config.claim,
        "the memory server has its memory"
    );
    let mut shards = Vec::with_capacity(count);
    for (shard, (transport, memory)) in
        (0..=u8::MAX).zip(transports.into_iter().zip(reserved.parts))
    {
        let shard_config = config.shard(shard, shard_count);
        let mut responder = Responder::new(&shard_config)?;
        let shard_pages = (memory.page_bytes() / PAGE_BYTES) as u64;
        let mut store = Arena::open(&config.arena(shard, shard_count, shard_pages), memory)?;
        responder.begin(transport.now(), &mut store);
        learn_earlier(config, (shard, shard_count), &mut responder);
        shards.push(Shard::new(transport, responder, store, (&shard_config, config.idle)));
    }
    let (stop, page_kind) = (Arc::default(), reserved.page_kind);
    let direct = Err(NoDirectReads::Off);
    let mut server = Server { shards: Vec::new(), stop, page_kind, direct, mapper: None };
    for (number, shard) in shards.into_iter().enumerate() {
        let core = config.cores.get(number).copied();
        server.start(number, shard, core)?;
    }
    // Clients of an earlier process wait: so the shards serve before the kernel does.
    if let Ok(memory) = &reserved.direct {
        server.map_in_background(memory).map_err(StartError::Thread)?;
    }
    server.direct = begin_direct_reads(config, reserved.direct);
    Ok(server)
}

/// A shard learns what others have of contents that the node lost.
fn learn_earlier(config: &ServerConfig, (shard, count): (u8, u16), responder: &mut Responder) {
    let mut by_generation: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for EarlierRow { generation, pages, at } in &config.earlier {
        if migration::shard_of(pages, count) == u16::from(shard) {
            by_generation.entry(*generation).or_default().push((pages.clone(), *at));
        }
    }
    for (generation, rows) in by_generation {
        responder.learn_earlier(generation, &rows);
    }
}

/// The kernel answers READs from now on, as far as the responders have opened their shards to it.
fn begin_direct_reads(
    config: &ServerConfig,
    memory: Result<DirectMemory, NoDirectReads>,
) -> Result<DirectReads, NoDirectReads> {
    let interface = config.direct.as_ref().ok_or(NoDirectReads::Off);
    let direct = memory.and_then(|memory| {
        DirectReads::begin(&memory, config.node, config.incarnation, interface?)
    });
    match &direct {
        Ok(_) => tracing::info!("the kernel answers READs"),
        Err(reason) => tracing::info!(%reason, "this process answers all READs"),
    }
    direct
}

fn shard_count(carriers: usize) -> Result<u16, StartError> {
    let shard_count = u16::try_from(carriers).ok().filter(|count| (1..=256).contains(count));
    shard_count.ok_or(StartError::Carriers(carriers))
}

impl Server {
    fn start<T>(
        &mut self,
        number: usize,
        mut shard: Shard<T, Arena>,
        core: Option<usize>,
    ) -> Result<(), StartError>
    where
        T: Wakeable + Send + 'static,
    {
        let (sender, orders) = sync_channel(ORDER_LIMIT);
        let statistics = Arc::<ShardStatistics>::default();
        let stop = Arc::clone(&self.stop);
        let control = ShardControl { stop, orders, statistics: Arc::clone(&statistics) };
        let waker = shard.transport.waker().map_err(StartError::Waker)?;
        let spawned = Builder::new().name(format!("shard-{number}")).spawn(move || {
            let _ending = Ending(Arc::clone(&control.statistics));
            if let Some(core) = core {
                pin(core);
            }
            shard.serve(&control)
        });
        let thread = spawned.map_err(StartError::Thread)?;
        self.shards.push(RunningShard { thread, orders: sender, waker, statistics });
        Ok(())
    }

    /// Maps all pages, so that later requests need not wait for that.
    fn map_in_background(&mut self, memory: &DirectMemory) -> io::Result<()> {
        let (mapper, stop) = (memory.mapper.clone(), Arc::clone(&self.stop));
        let mapper = Builder::new().name("map-memory".to_owned()).spawn(move || {
            mapper.map_all(|| match stop.load(Ordering::Relaxed) {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            });
        })?;
        self.mapper = Some(mapper);
        Ok(())
    }

    /// The kind of memory pages in use.
    #[must_use]
    pub const fn page_kind(&self) -> PageKind {
        self.page_kind
    }

    /// The READs that the kernel answers and passes on, or why it answers none.
    ///
    /// # Errors
    /// The reason.
    pub fn direct_reads(&self) -> Result<ReadCounts, &NoDirectReads> {
        self.direct.as_ref().map(DirectReads::counts)
    }

    /// Serving cores.
    #[must_use]
    pub fn shard_count(&self) -> u16 {
        u16::try_from(self.shards.len()).unwrap_or(u16::MAX)
    }

    /// The statistics of every shard, at most a millisecond old.
    #[must_use]
    pub fn statistics(&self) -> Vec<Snapshot> {
        self.shards.iter().map(|shard| shard.statistics.snapshot()).collect()
    }

    /// Migrations to this server that have come to their end: no line of them is left or on its way.
    #[must_use]
    pub fn takings_over(&self) -> u64 {
        self.shards.iter().map(|shard| shard.statistics.takings_over()).sum()
    }

    /// Whether a shard ended by itself, which only a failed carrier causes; [`Self::stop`] returns
    /// the reason.
    #[must_use]
    pub fn is_failed(&self) -> bool {
        self.shards.iter().any(|shard| shard.statistics.has_ended())
    }

    /// Tells `bell` of what a server's observer waits for, from now on; only the first bell counts. Free pages are told
    /// after they were read with [`Reported::free_pages`]. Read everything once afterwards.
    pub(crate) fn tell(&self, bell: &Bell) {
        self.shards.iter().for_each(|shard| shard.statistics.tell(Arc::clone(bell)));
    }

    /// What is reported of this server.
    pub(crate) fn reported(&self) -> Reported {
        let shards = self.shards.iter().map(|shard| Arc::clone(&shard.statistics)).collect();
        let direct = self.direct.as_ref().map(DirectReads::counters).map_err(ToString::to_string);
        Reported { shards, direct }
    }

    /// Gives an order to one shard, which executes it at once, or after what it is doing.
    ///
    /// # Errors
    /// [`OrderError`]; the order was not given.
    pub fn order(&self, shard: u16, order: Order) -> Result<(), OrderError> {
        let running = self.shards.get(usize::from(shard)).ok_or(OrderError::Gone(shard))?;
        running.orders.try_send(order).map_err(|error| match error {
            TrySendError::Disconnected(_) => OrderError::Gone(shard),
            TrySendError::Full(_) => OrderError::Busy(shard),
        })?;
        running.waker.wake();
        Ok(())
    }

    /// Makes one shard list or free allocations, and waits for the result.
    ///
    /// # Errors
    /// [`SurveyError`].
    pub fn survey(
        &self,
        shard: u16,
        query: Query,
        patience: Duration,
    ) -> Result<Findings, SurveyError> {
        let (reply, findings) = sync_channel(1);
        self.order(shard, Order::Survey(Survey::new(query, reply)))?;
        findings.recv_timeout(patience).map_err(|error| match error {
            RecvTimeoutError::Timeout => SurveyError::TimedOut(shard),
            // The shard ended, or has the maximum number of surveys.
            RecvTimeoutError::Disconnected => OrderError::Busy(shard).into(),
        })
    }

    /// Makes one shard take lines from another server, or give them, and waits for the result.
    ///
    /// # Errors
    /// [`MigrateError`].
    pub fn migrate(
        &self,
        shard: u16,
        order: MigrationOrder,
        patience: Duration,
    ) -> Result<MigrationState, MigrateError> {
        let (reply, result) = sync_channel(1);
        self.order(shard, Order::Migrate(MigrationCall { order, reply }))?;
        match result.recv_timeout(patience) {
            Ok(result) => Ok(result?),
            Err(RecvTimeoutError::Timeout) => Err(MigrateError::TimedOut(shard)),
            Err(RecvTimeoutError::Disconnected) => Err(OrderError::Gone(shard).into()),
        }
    }

    /// Grants or withdraws the right to serve, on every shard.
    ///
    /// # Errors
    /// [`OrderError`] of the first shard that could not be ordered; those before it were.
    pub fn set_authority(&self, authority: Option<Authority>) -> Result<(), OrderError> {
        (0..)
            .zip(&self.shards)
            .try_for_each(|(shard, _)| self.order(shard, Order::Authority(authority)))
    }

    /// Adds the arena generations up to `last`, which the controller reserved, on every shard.
    ///
    /// # Errors
    /// [`OrderError`] of the first shard that could not be ordered; those before it were.
    pub fn reserve(&self, last: ArenaGeneration) -> Result<(), OrderError> {
        (0..).zip(&self.shards).try_for_each(|(shard, _)| self.order(shard, Order::Reserve(last)))
    }

    /// Notifies every shard whether more arena generations are expected soon.
    ///
    /// # Errors
    /// [`OrderError`] of the first shard that could not be ordered; those before it were.
    pub fn set_reserving(&self, is_reserving: bool) -> Result<(), OrderError> {
        let order = || Order::Reserving(is_reserving);
        (0..).zip(&self.shards).try_for_each(|(shard, _)| self.order(shard, order()))
    }

    /// Stops: the shards respond SHUTTING_DOWN to new requests for the grace time, then they end.
    /// Returns their last statistics.
    ///
    /// # Errors
    /// [`ServeError`] of the first shard that had failed before.
    pub fn stop(mut self) -> Result<Vec<Snapshot>, ServeError> {
        self.end()
    }

    fn end(&mut self) -> Result<Vec<Snapshot>, ServeError> {
        self.stop.store(true, Ordering::Release);
        self.shards.iter().for_each(|shard| shard.waker.wake());
        self.direct = Err(NoDirectReads::Off);
        let mut first_error = Ok(());
        let mut snapshots = Vec::with_capacity(self.shards.len());
        for (number, shard) in (0..).zip(self.shards.drain(..)) {
            let ended = shard.thread.join().unwrap_or(Err(ServeError::Panic(number)));
            first_error = first_error.and(ended);
            snapshots.push(shard.statistics.snapshot());
        }
        if let Some(mapper) = self.mapper.take()
            && mapper.join().is_err()
        {
            tracing::error!("the thread that maps the memory failed");
        }
        first_error.map(|()| snapshots)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::error!(%error, "the memory server had failed");
        }
    }
}

/// Pins the calling thread to a core. A failure is only logged.
fn pin(core: usize) {
    let mut cores = CpuSet::new();
    if core >= CpuSet::MAX_CPU {
        tracing::warn!(core, "there is no such core to pin a shard to");
        return;
    }
    cores.set(core);
    if let Err(error) = sched_setaffinity(None, &cores) {
        tracing::warn!(core, %error, "a shard could not be pinned");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shares_of_a_quota_add_up_to_it() {
        let mut config = ServerConfig::new(Space(7), NodeId(9), 1, 1 << 30, 0);
        for (pages, count, shares) in
            [(10, 4, &[3, 3, 2, 2][..]), (1, 3, &[1, 0, 0]), (8, 2, &[4, 4]), (0, 2, &[0, 0])]
        {
            config.default_quota_pages = Some(pages);
            config.quotas = vec![(Space(8), pages)];
            let arenas: Vec<_> = (0..=u8::MAX)
                .take(shares.len())
                .map(|shard| config.arena(shard, count, 100))
                .collect();
            let default: Vec<_> = arenas.iter().map(|arena| arena.default_quota_pages).collect();
            let of_space: Vec<_> = arenas.iter().map(|arena| arena.quotas[0].1).collect();
            assert_eq!((default.as_slice(), of_space.as_slice()), (shares, shares));
        }
        config.default_quota_pages = Some(u64::MAX);
        let arena = config.arena(3, 4, 100);
        assert_eq!(arena.default_quota_pages, u64::MAX, "without a quota no shard has one");
    }

    #[test]
    fn without_a_quota_spaces_have_equal_shares() {
        let mut config = ServerConfig::new(Space(7), NodeId(9), 1, 1 << 30, 0);
        let quota = |config: &ServerConfig, shard| config.arena(shard, 2, 100).default_quota_pages;
        assert_eq!((quota(&config, 0), quota(&config, 1)), (100, 100), "all of it for one space");
        config.spaces = vec![Space(7), Space(8), Space(9)];
        assert_eq!((quota(&config, 0), quota(&config, 1)), (33, 33));
        config.spaces.clear();
        assert_eq!(quota(&config, 0), 100);
    }
}
