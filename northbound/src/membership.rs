//! A joined endpoint.

use std::fmt;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bluebridge_wire::{ArenaGeneration, NodeId};
use tokio::sync::Notify;

use crate::attend::{Orders, PendingQueries, PendingQuery};
use crate::error::MembershipError;
use crate::heartbeat::{self, LeaveRequest};
use crate::migration::{EarlierRow, Order, Report};
use crate::proto;
use crate::registration::{Assignment, MemoryNodeStatus, Registration};

/// The interval at which a join checks with its caller whether to continue.
const GO_ON: Duration = Duration::from_millis(100);

/// The state of the connection to the controller.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Connection {
    /// The last heartbeat got a response.
    Connected,
    /// It did not; it is retried. Data traffic continues.
    Lost,
    /// The controller removed this incarnation or another took over. The endpoint must join again.
    Expelled,
}

/// The endpoint's view of the rack.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Counts the changes of this snapshot.
    pub version: u64,
    /// The state of the connection.
    pub connection: Connection,
    /// The memory nodes of the space, in the order of their ids.
    pub memory_nodes: Arc<[MemoryNodeStatus]>,
    /// The epoch under which a memory node serves its own range.
    pub range_epoch: u32,
    /// The most data bytes in a datagram, as of now; for sessions opened from now on.
    pub piece_bytes: usize,
    /// Whether the switch has this endpoint's entries.
    pub installed: bool,
    /// Whether any endpoint in the space requested notices, so that a memory node should send them.
    pub notices_wanted: bool,
    /// The last generation that is reserved for a memory node's arena.
    pub last_generation: ArenaGeneration,
}

/// Timeouts and TLS of a membership.
#[derive(Clone, Debug)]
pub struct Options {
    /// How long [`Membership::join`] retries: while no controller responds, and while one reports that a
    /// live endpoint has the name, the port or the address.
    pub join_deadline: Duration,
    /// Whether to retry without limit while no controller responds, or the controller has not reached its
    /// switch yet. [`Self::join_deadline`] then starts with the first response. For memory
    /// servers, which are often started before the controller.
    pub wait_for_controller: bool,
    /// How long [`Membership::leave`] and dropping a membership retry.
    pub leave_deadline: Duration,
    /// Whether a memory server executes orders of migrations ([`Membership::next_order`]).
    pub migrates: bool,
    /// The TLS settings for both directions of authentication.
    #[cfg(feature = "tls")]
    pub tls: Option<tonic::transport::ClientTlsConfig>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            join_deadline: Duration::from_secs(10),
            wait_for_controller: false,
            leave_deadline: Duration::from_millis(500),
            migrates: false,
            #[cfg(feature = "tls")]
            tls: None,
        }
    }
}

/// What a memory server reports with a heartbeat.
#[derive(Clone, Debug, Default)]
pub struct ServerReport {
    /// Its free pages.
    pub free_pages: u64,
    /// The READs that the kernel answers.
    pub direct_reads: Option<proto::DirectReads>,
}

/// Is asked by the heartbeat thread, before each heartbeat.
type Reporter = Box<dyn Fn() -> ServerReport + Send + Sync>;

/// The state shared by the heartbeat thread and the membership.
pub(crate) struct Shared {
    snapshot: Mutex<Snapshot>,
    changed: Condvar,
    /// [`Membership::wait_newer`] is to return.
    is_called: AtomicBool,
    expulsion: Arc<OnceLock<Arc<str>>>,
    free_pages: AtomicU64,
    pub(crate) wanted_generation: AtomicU16,
    reporter: OnceLock<Reporter>,
    pub(crate) heartbeat_count: AtomicU64,
    pub(crate) heartbeat_now: Notify,
    /// A heartbeat found the controller again.
    pub(crate) found_again: Notify,
    pub(crate) queries: PendingQueries,
    pub(crate) orders: Orders,
    /// As the join told.
    pub(crate) earlier: Vec<EarlierRow>,
}

impl Shared {
    pub(crate) fn new(snapshot: Snapshot, free_pages: u64) -> Self {
        Self {
            snapshot: Mutex::new(snapshot),
            changed: Condvar::new(),
            is_called: AtomicBool::new(false),
            expulsion: Arc::default(),
            free_pages: AtomicU64::new(free_pages),
            wanted_generation: AtomicU16::new(0),
            reporter: OnceLock::new(),
            heartbeat_count: AtomicU64::new(0),
            heartbeat_now: Notify::new(),
            found_again: Notify::new(),
            queries: PendingQueries::default(),
            orders: Orders::default(),
            earlier: Vec::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Snapshot> {
        // Each field is replaced without a panic in between.
        self.snapshot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn connection(&self) -> Connection {
        self.lock().connection
    }

    /// Whether a memory server has neither queries nor orders to handle.
    fn has_no_requests(&self) -> bool {
        self.queries.is_empty() && self.orders.is_empty()
    }

    /// What the next heartbeat reports.
    pub(crate) fn server_report(&self) -> ServerReport {
        match self.reporter.get() {
            Some(reporter) => reporter(),
            None => ServerReport {
                free_pages: self.free_pages.load(Ordering::Relaxed),
                direct_reads: None,
            },
        }
    }

    /// Lets the waiter return.
    fn call(&self) {
        self.is_called.store(true, Ordering::Relaxed);
        self.wake();
    }

    /// Wakes the waiters for changes.
    pub(crate) fn wake(&self) {
        // A waiter checks for queries and calls with the lock, so it sleeps or sees this one.
        drop(self.lock());
        self.changed.notify_all();
    }

    /// The controller no longer counts this endpoint as a member.
    pub(crate) fn expel(&self, reason: String) {
        let _ = self.expulsion.set(Arc::from(reason));
        self.change(|snapshot| {
            let changed = snapshot.connection != Connection::Expelled;
            snapshot.connection = Connection::Expelled;
            changed
        });
    }

    /// Changes the snapshot; `change` returns whether it did.
    pub(crate) fn change(&self, change: impl FnOnce(&mut Snapshot) -> bool) {
        let mut snapshot = self.lock();
        if change(&mut snapshot) {
            snapshot.version += 1;
            self.changed.notify_all();
        }
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("snapshot", &self.snapshot).finish_non_exhaustive()
    }
}

/// Looks up members, on any thread.
#[derive(Clone, Debug)]
pub struct Roster(Weak<Shared>);

impl Roster {
    /// Whether a node is a memory server of the space, according to the controller's last response.
    #[must_use]
    pub fn is_memory_node(&self, node: NodeId) -> bool {
        let Some(shared) = self.0.upgrade() else { return false };
        let nodes = Arc::clone(&shared.lock().memory_nodes);
        nodes.iter().any(|it| it.node == node)
    }
}

/// Lets other threads wake who waits for changes of a membership, and the heartbeat thread; without effect once the
/// membership has ended.
#[derive(Clone, Debug)]
pub struct Caller(Weak<Shared>);

impl Caller {
    /// Makes [`Membership::wait_newer`] return: the call that waits now, or the next one.
    pub fn call(&self) {
        if let Some(shared) = self.0.upgrade() {
            shared.call();
        }
    }

    /// Lets the next heartbeat be sent early, because the report has changed.
    pub fn hurry(&self) {
        if let Some(shared) = self.0.upgrade() {
            shared.heartbeat_now.notify_one();
        }
    }
}

/// A joined endpoint: sends heartbeats in the background, leaves when dropped.
///
/// The heartbeats have their own thread, so that the application cannot delay them.
#[derive(Debug)]
pub struct Membership {
    assignment: Assignment,
    shared: Arc<Shared>,
    leave_sender: Option<tokio::sync::oneshot::Sender<LeaveRequest>>,
    thread: Option<JoinHandle<()>>,
    leave_deadline: Duration,
}

impl Membership {
    /// Joins; retries until the default deadline while the controller is unreachable or an ended endpoint of the
    /// same name still counts as live.
    ///
    /// # Errors
    /// [`MembershipError`]; nothing keeps running.
    pub fn join(uri: &str, registration: Registration) -> Result<Self, MembershipError> {
        Self::join_with(uri, registration, Options::default())
    }

    /// Joins with other deadlines, or with TLS.
    ///
    /// # Errors
    /// [`MembershipError`]; nothing keeps running.
    pub fn join_with(
        uri: &str,
        registration: Registration,
        options: Options,
    ) -> Result<Self, MembershipError> {
        Self::join_while(uri, registration, options, |_| ControlFlow::Continue(()))
    }

    /// Joins while `go_on` returns true; it is called ten times per second with the elapsed time.
    /// Needed with [`Options::wait_for_controller`] by callers that can be stopped, or that must report
    /// progress.
    ///
    /// # Errors
    /// [`MembershipError`], [`MembershipError::GivenUp`] if `go_on` returned false; nothing keeps running.
    pub fn join_while(
        uri: &str,
        registration: Registration,
        options: Options,
        mut go_on: impl FnMut(Duration) -> ControlFlow<()>,
    ) -> Result<Self, MembershipError> {
        let leave_deadline = options.leave_deadline;
        let (joined, joining) = mpsc::sync_channel(1);
        let (leave_sender, leave_receiver) = tokio::sync::oneshot::channel();
        // One second more than the task itself waits, so that its own error is reported.
        let patience = options.join_deadline + Duration::from_secs(1);
        let patience = (!options.wait_for_controller).then_some(patience);
        let uri = uri.to_owned();
        let began = Instant::now();
        let thread = std::thread::Builder::new()
            .name("bb-membership".to_owned())
            .spawn(move || heartbeat::run(&uri, &registration, &options, &joined, leave_receiver))
            .map_err(|error| MembershipError::Runtime(Arc::new(error)))?;
        let (assignment, shared) = loop {
            // An early return drops `leave_sender`, which ends the thread.
            match joining.recv_timeout(GO_ON) {
                Ok(joined) => break joined?,
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    let reason = "the heartbeat thread has ended".to_owned();
                    return Err(MembershipError::Ended(reason));
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    let waited = began.elapsed();
                    if go_on(waited).is_break() {
                        return Err(MembershipError::GivenUp);
                    }
                    if patience.is_some_and(|patience| waited >= patience) {
                        let reason = format!("no result within {waited:?}");
                        return Err(MembershipError::Ended(reason));
                    }
                }
            }
        };
        let leave_sender = Some(leave_sender);
        Ok(Self { assignment, shared, leave_sender, thread: Some(thread), leave_deadline })
    }

    /// The endpoint's assignment.
    #[must_use]
    pub const fn assignment(&self) -> &Assignment {
        &self.assignment
    }

    /// Of a memory node: what other servers had, or may have had, of contents that it lost, at the time of the join.
    #[must_use]
    pub fn earlier(&self) -> &[EarlierRow] {
        &self.shared.earlier
    }

    /// The endpoint's view of the rack.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.shared.lock().clone()
    }

    /// Why the endpoint was expelled, once it was; it stays set until the endpoint joins again. Reading
    /// it needs no lock, so the data path can use it.
    #[must_use]
    pub fn expulsion(&self) -> Arc<OnceLock<Arc<str>>> {
        Arc::clone(&self.shared.expulsion)
    }

    /// Waits until the snapshot is newer than `version`, there is a query or an order, or a [`Caller`] calls, at most for
    /// `timeout`; returns the present one. For one thread at a time: only one learns of a call.
    #[must_use]
    pub fn wait_newer(&self, version: u64, timeout: Duration) -> Snapshot {
        let deadline = Instant::now() + timeout;
        let mut snapshot = self.shared.lock();
        while !self.shared.is_called.swap(false, Ordering::Relaxed)
            && snapshot.version <= version
            && self.shared.has_no_requests()
        {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            snapshot = self
                .shared
                .changed
                .wait_timeout(snapshot, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        snapshot.clone()
    }

    /// The next query of an operator to this memory server; clients get none.
    #[must_use]
    pub fn next_query(&self) -> Option<PendingQuery> {
        self.shared.queries.take()
    }

    /// The next order of a migration to this memory server ([`Options::migrates`]). Orders come again through every new
    /// connection until the controller has their report, so it may be one that was executed before.
    #[must_use]
    pub fn next_order(&self) -> Option<Order> {
        self.shared.orders.take()
    }

    /// Sends a report of a migration; returns whether there was a connection with room for it. It may be lost with the
    /// connection: then the order comes again.
    pub fn report(&self, report: Report) -> bool {
        self.shared.orders.report(report)
    }

    /// Sets a memory node's number of free pages for the next heartbeat. If the pages are used up,
    /// available again, or changed to half or double at once, that heartbeat is
    /// sent early.
    pub fn report_free_pages(&self, pages: u64) {
        let before = self.shared.free_pages.swap(pages, Ordering::Relaxed);
        let leap = before.abs_diff(pages) > before.min(pages);
        if leap {
            self.shared.heartbeat_now.notify_one();
        }
    }

    /// Lets each heartbeat report what `reporter` returns, instead of what [`Self::report_free_pages`] set. It is called
    /// by the heartbeat thread, and must not wait; only the first one counts.
    pub fn report_with(&self, reporter: impl Fn() -> ServerReport + Send + Sync + 'static) {
        let _ = self.shared.reporter.set(Box::new(reporter));
    }

    /// Lets other threads wake who waits for changes.
    #[must_use]
    pub fn caller(&self) -> Caller {
        Caller(Arc::downgrade(&self.shared))
    }

    /// What is known of the members; it may outlive the membership, and then knows none.
    #[must_use]
    pub fn roster(&self) -> Roster {
        Roster(Arc::downgrade(&self.shared))
    }

    /// Requests arena generations for a memory node's arena, up to `wanted`. The next heartbeat carries
    /// the request; it is sent at once if `wanted` increased.
    pub fn report_wanted_generation(&self, wanted: ArenaGeneration) {
        let before = self.shared.wanted_generation.swap(wanted.number(), Ordering::Relaxed);
        if wanted.number() > before {
            self.shared.heartbeat_now.notify_one();
        }
    }

    /// The number of heartbeats with a response.
    #[must_use]
    pub fn heartbeat_count(&self) -> u64 {
        self.shared.heartbeat_count.load(Ordering::Relaxed)
    }

    /// Leaves, and waits for the controller's response up to the leave deadline.
    ///
    /// # Errors
    /// [`MembershipError`] if the controller did not confirm it; it will then detect it by itself.
    pub fn leave(mut self) -> Result<(), MembershipError> {
        self.end()
    }

    /// Ends the heartbeats without leaving: for an endpoint that will return, and for tests in which
    /// an endpoint dies.
    pub fn abandon(mut self) {
        self.leave_sender = None;
        self.join_thread();
    }

    fn end(&mut self) -> Result<(), MembershipError> {
        let Some(leave_sender) = self.leave_sender.take() else { return Ok(()) };
        let (result, receiver) = mpsc::sync_channel(1);
        let is_sent = leave_sender.send(LeaveRequest { result }).is_ok();
        let patience = self.leave_deadline + Duration::from_secs(1);
        let reply = if is_sent { receiver.recv_timeout(patience).ok() } else { None };
        self.join_thread();
        reply.unwrap_or_else(|| {
            Err(MembershipError::Ended("the heartbeat thread has ended".to_owned()))
        })
    }

    /// The thread ends once the channel for the request to leave is closed, or the request got its response.
    fn join_thread(&mut self) {
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the heartbeat thread panicked");
        }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::debug!(%error, "leaving was not confirmed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_roster_knows_memory_nodes_as_long_as_the_membership_lasts() {
        let generation = ArenaGeneration::default();
        let node = MemoryNodeStatus {
            node: NodeId(3),
            name: "s3".to_owned(),
            live: false,
            generation,
            shard_count: 1,
            capacity_pages: 8,
            free_pages: 8,
        };
        let snapshot = Snapshot {
            version: 1,
            connection: Connection::Connected,
            memory_nodes: vec![node.clone()].into(),
            range_epoch: 1,
            piece_bytes: 4096,
            installed: true,
            notices_wanted: false,
            last_generation: generation,
        };
        let shared = Arc::new(Shared::new(snapshot, 0));
        let roster = Roster(Arc::downgrade(&shared));
        let known = || [3, 4].map(|node| roster.is_memory_node(NodeId(node)));
        assert_eq!(known(), [true, false], "also a silent one");
        shared.change(|snapshot| {
            let joined = MemoryNodeStatus { node: NodeId(4), ..node.clone() };
            snapshot.memory_nodes = vec![joined].into();
            true
        });
        assert_eq!(known(), [false, true]);
        drop(shared);
        assert_eq!(known(), [false; 2]);
    }
}
