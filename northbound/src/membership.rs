//! A joined endpoint.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bluebridge_wire::ArenaGeneration;
use tokio::sync::Notify;

use crate::beat::{self, Goodbye};
use crate::error::MembershipError;
use crate::registration::{Assignment, MemoryNode, Registration};

/// How often whoever joins is asked whether to go on.
const GO_ON: Duration = Duration::from_millis(100);

/// Whether the controller and this endpoint hear of each other.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Connection {
    /// The last heartbeat was answered.
    Connected,
    /// It was not; it is tried again. Data traffic goes on.
    Lost,
    /// The controller gave this incarnation up or another took over. It has to join again.
    Expelled,
}

/// What the endpoint knows of the rack.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Counts the changes of this snapshot.
    pub version: u64,
    /// Whether the controller is heard.
    pub connection: Connection,
    /// The memory nodes of the space, in the order of their ids.
    pub memory_nodes: Arc<[MemoryNode]>,
    /// The epoch under which a memory node serves its own range.
    pub range_epoch: u32,
    /// The most data bytes in a datagram, as it is now; for sessions opened from now on.
    pub piece_bytes: usize,
    /// Whether the switch has this endpoint's entries.
    pub installed: bool,
    /// Whether anybody in the space wants notices, so that a memory node should send them.
    pub notices_wanted: bool,
    /// The last generation that is reserved for a memory node's arena.
    pub last_generation: ArenaGeneration,
}

/// How patient and how secret a membership is.
#[derive(Clone, Debug)]
pub struct Options {
    /// How long [`Membership::join`] tries: while no controller answers, and while one says that a
    /// live endpoint has the name, the port or the address.
    pub join_deadline: Duration,
    /// Whether joining goes on for as long as no controller answers, or the controller has not
    /// reached its switch yet. [`Self::join_deadline`] then begins when one answers. For memory
    /// servers, which are often started before the controller.
    pub wait_for_controller: bool,
    /// How long [`Membership::leave`] and dropping a membership try.
    pub leave_deadline: Duration,
    /// How the controller is to prove itself, and this endpoint to it.
    #[cfg(feature = "tls")]
    pub tls: Option<tonic::transport::ClientTlsConfig>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            join_deadline: Duration::from_secs(10),
            wait_for_controller: false,
            leave_deadline: Duration::from_millis(500),
            #[cfg(feature = "tls")]
            tls: None,
        }
    }
}

/// What the heartbeats' thread and the membership share.
#[derive(Debug)]
pub(crate) struct Shared {
    snapshot: Mutex<Snapshot>,
    changed: Condvar,
    expulsion: Arc<OnceLock<Arc<str>>>,
    pub(crate) free_pages: AtomicU64,
    pub(crate) wanted_generation: AtomicU16,
    pub(crate) beat_count: AtomicU64,
    pub(crate) beat_now: Notify,
}

impl Shared {
    pub(crate) fn new(snapshot: Snapshot, free_pages: u64) -> Self {
        Self {
            snapshot: Mutex::new(snapshot),
            changed: Condvar::new(),
            expulsion: Arc::default(),
            free_pages: AtomicU64::new(free_pages),
            wanted_generation: AtomicU16::new(0),
            beat_count: AtomicU64::new(0),
            beat_now: Notify::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Snapshot> {
        // A snapshot is replaced field by field without panicking in between.
        self.snapshot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The controller does not count this endpoint as a member any more.
    pub(crate) fn expel(&self, reason: String) {
        let _ = self.expulsion.set(Arc::from(reason));
        self.change(|snapshot| {
            let changed = snapshot.connection != Connection::Expelled;
            snapshot.connection = Connection::Expelled;
            changed
        });
    }

    /// Changes the snapshot; `change` says whether it did.
    pub(crate) fn change(&self, change: impl FnOnce(&mut Snapshot) -> bool) {
        let mut snapshot = self.lock();
        if change(&mut snapshot) {
            snapshot.version += 1;
            self.changed.notify_all();
        }
    }
}

/// A joined endpoint: beats in the background, leaves when dropped.
///
/// The heartbeats have a thread of their own, so that nothing the application does delays them.
#[derive(Debug)]
pub struct Membership {
    assignment: Assignment,
    shared: Arc<Shared>,
    goodbye: Option<tokio::sync::oneshot::Sender<Goodbye>>,
    thread: Option<JoinHandle<()>>,
    leave_deadline: Duration,
}

impl Membership {
    /// Joins, trying until the default deadline while the controller is away or a dead namesake
    /// still counts as alive.
    ///
    /// # Errors
    /// [`MembershipError`]; nothing keeps running.
    pub fn join(uri: &str, registration: Registration) -> Result<Self, MembershipError> {
        Self::join_with(uri, registration, Options::default())
    }

    /// Joins with other deadlines, or over TLS.
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

    /// Joins for as long as `go_on` allows it, which is asked ten times a second with the time that
    /// joining has taken so far. Needed with [`Options::wait_for_controller`] by whoever can be told
    /// to stop, or has to report that it goes on.
    ///
    /// # Errors
    /// [`MembershipError`], [`MembershipError::GivenUp`] if `go_on` said so; nothing keeps running.
    pub fn join_while(
        uri: &str,
        registration: Registration,
        options: Options,
        mut go_on: impl FnMut(Duration) -> ControlFlow<()>,
    ) -> Result<Self, MembershipError> {
        let leave_deadline = options.leave_deadline;
        let (joined, joining) = mpsc::sync_channel(1);
        let (goodbye, farewell) = tokio::sync::oneshot::channel();
        // A second more than the task itself waits, so that its own error is the one reported.
        let patience = options.join_deadline + Duration::from_secs(1);
        let patience = (!options.wait_for_controller).then_some(patience);
        let uri = uri.to_owned();
        let began = Instant::now();
        let thread = std::thread::Builder::new()
            .name("bb-membership".to_owned())
            .spawn(move || beat::run(&uri, &registration, &options, &joined, farewell))
            .map_err(|error| MembershipError::Runtime(error.to_string()))?;
        let (assignment, shared) = loop {
            // Whoever returns early drops `goodbye`, which ends the thread.
            match joining.recv_timeout(GO_ON) {
                Ok(joined) => break joined?,
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    let reason = "the thread of the heartbeats has ended".to_owned();
                    return Err(MembershipError::Runtime(reason));
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    let waited = began.elapsed();
                    if go_on(waited).is_break() {
                        return Err(MembershipError::GivenUp);
                    }
                    if patience.is_some_and(|patience| waited >= patience) {
                        let reason = format!("no result within {waited:?}");
                        return Err(MembershipError::Runtime(reason));
                    }
                }
            }
        };
        let goodbye = Some(goodbye);
        Ok(Self { assignment, shared, goodbye, thread: Some(thread), leave_deadline })
    }

    /// What this endpoint is.
    #[must_use]
    pub const fn assignment(&self) -> &Assignment {
        &self.assignment
    }

    /// What it knows of the rack.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.shared.lock().clone()
    }

    /// Why the endpoint was expelled, once it was; it stays so until the endpoint joins again. To look
    /// costs no lock, so the data path can.
    #[must_use]
    pub fn expulsion(&self) -> Arc<OnceLock<Arc<str>>> {
        Arc::clone(&self.shared.expulsion)
    }

    /// Waits until the snapshot is newer than `version`, at most for `timeout`; returns what there
    /// is then.
    #[must_use]
    pub fn wait_newer(&self, version: u64, timeout: Duration) -> Snapshot {
        let deadline = Instant::now() + timeout;
        let mut snapshot = self.shared.lock();
        while snapshot.version <= version {
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

    /// Says how many pages a memory node has left; the next heartbeat carries it. When the pages
    /// run out, there are some again, or they became half or double at once, that heartbeat is
    /// sent before its time.
    pub fn report_free_pages(&self, pages: u64) {
        let before = self.shared.free_pages.swap(pages, Ordering::Relaxed);
        let leap = before.abs_diff(pages) > before.min(pages);
        if leap {
            self.shared.beat_now.notify_one();
        }
    }

    /// Says up to which generation a memory node's arena wants generations reserved; the next heartbeat
    /// carries it, before its time if they are more than before.
    pub fn report_wanted_generation(&self, wanted: ArenaGeneration) {
        let before = self.shared.wanted_generation.swap(wanted.number(), Ordering::Relaxed);
        if wanted.number() > before {
            self.shared.beat_now.notify_one();
        }
    }

    /// Heartbeats that were answered.
    #[must_use]
    pub fn beat_count(&self) -> u64 {
        self.shared.beat_count.load(Ordering::Relaxed)
    }

    /// Leaves, and waits for the controller's answer up to the leave deadline.
    ///
    /// # Errors
    /// [`MembershipError`] if the controller did not confirm it; it will then find out by itself.
    pub fn leave(mut self) -> Result<(), MembershipError> {
        self.end()
    }

    /// Ends the heartbeats without leaving: for an endpoint that will be back, and for tests that
    /// let one die.
    pub fn abandon(mut self) {
        self.goodbye = None;
        self.join_thread();
    }

    fn end(&mut self) -> Result<(), MembershipError> {
        let Some(goodbye) = self.goodbye.take() else { return Ok(()) };
        let (told, answer) = mpsc::sync_channel(1);
        let asked = goodbye.send(Goodbye { told }).is_ok();
        let patience = self.leave_deadline + Duration::from_secs(1);
        let answer = if asked { answer.recv_timeout(patience).ok() } else { None };
        self.join_thread();
        answer.unwrap_or_else(|| {
            Err(MembershipError::Runtime("the thread of the heartbeats has ended".to_owned()))
        })
    }

    /// The thread ends by itself once the goodbye channel is closed or answered.
    fn join_thread(&mut self) {
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of the heartbeats panicked");
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
