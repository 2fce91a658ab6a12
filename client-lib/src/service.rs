//! The endpoint's service thread: it renews leases, sends the ABORTs that a dropped guard could
//! not, responds to requests that the switch redirects to this endpoint, and receives notices,
//! while the application's threads compute.
//!
//! Each application thread records its leases in a [`ledger`]. It wakes the service thread only if
//! that would check the ledger too late: the service thread publishes when it checks next.
//!
//! `run`: the thread; `tenant`: a client's side of it; `notices`: who is notified of what memory nodes
//! create and delete.

mod ledger;
mod notices;
mod run;
mod tenant;

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use core::{fmt, time::Duration};
use std::{
    io,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    thread::{Builder, JoinHandle},
};

use bluebridge_protocol::owner::{Counters, Event};
use bluebridge_transport::{Wakeable, Waker};
use bluebridge_wire::{NodeId, UDP_PORT};

pub use bluebridge_protocol::owner::{Notice, NoticeKind, Policy as OwnerPolicy};
pub(crate) use ledger::{Entry, SlotId};
pub use notices::{NOTICES_WAITING_MAX, Notices};
pub(crate) use tenant::Tenant;

use crate::config::EndpointConfig;
use ledger::Ledger;
use notices::Subscribers;

/// What an endpoint's service thread can do.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum ServiceState {
    /// There is none: leases are not renewed. Give one to [`EndpointConfig::service`], or join.
    Absent,
    /// It could not be started, or ended: leases are not renewed.
    Failed {
        /// Why.
        reason: Arc<str>,
    },
    /// It starts with the first update or subscription, as the client joined.
    NotStarted,
    /// Another process has the fabric's UDP port on the interface, so leases are renewed, but
    /// redirected requests get no response (their senders retry at the home) and notices do not arrive.
    RenewalsOnly,
    /// It does all its tasks.
    Serving,
}

/// What a service thread has done since its start.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct ServiceCounters {
    /// Leases renewed.
    pub renewed_count: u64,
    /// Leases found lost when they were to be renewed.
    pub lost_count: u64,
    /// RENEWs that failed otherwise.
    pub renew_failed_count: u64,
    /// ABORTs sent for guards whose own ABORT had no response.
    pub aborted_count: u64,
    /// Requests and notices that arrived.
    pub request_count: u64,
    /// Notices among them.
    pub notice_count: u64,
    /// Datagrams that were damaged, or none of the protocol's.
    pub malformed_count: u64,
    /// READs whose response was the last committed contents ([`OwnerPolicy::Serve`]). If the
    /// lease ends before a piece is sent, that piece has the status NOT_OWNER instead.
    pub served_count: u64,
    /// Requests that were made to wait for the end of a lease ([`OwnerPolicy::Wait`]); a repeated
    /// request is counted once.
    pub waited_count: u64,
    /// Requests among them that were notified of the end of the lease: by COMMIT, ABORT or its deadline.
    pub wait_ended_count: u64,
    /// Requests among them whose wait expired; they get no response, and their senders retry at the home.
    pub wait_over_count: u64,
    /// Requests that got BUSY and were sent to the home at once.
    pub rejected_count: u64,
    /// Requests that got NOT_OWNER because no lease is held on their page (any more).
    pub not_owner_count: u64,
    /// Responses that the carrier took. A READ that is served has one per piece, a request
    /// that waits has one at once and one when the lease ends.
    pub answered_count: u64,
    /// How often the thread checked its clients' leases.
    pub look_count: u64,
    /// How often a client woke it.
    pub wake_count: u64,
}

#[derive(Debug, Default)]
struct Counts {
    renewed: AtomicU64,
    lost: AtomicU64,
    renew_failed: AtomicU64,
    aborted: AtomicU64,
    requests: AtomicU64,
    notices: AtomicU64,
    malformed: AtomicU64,
    served: AtomicU64,
    waited: AtomicU64,
    wait_ended: AtomicU64,
    wait_over: AtomicU64,
    rejected: AtomicU64,
    not_owner: AtomicU64,
    answered: AtomicU64,
    looks: AtomicU64,
    wakes: AtomicU64,
}

impl Counts {
    /// Publishes the counters of the owner's state machine.
    fn show(&self, owner: &Counters) {
        for (counter, event) in [
            (&self.served, Event::Serve),
            (&self.waited, Event::Wait),
            (&self.wait_ended, Event::WaitEnd),
            (&self.wait_over, Event::WaitOver),
            (&self.rejected, Event::Reject),
            (&self.not_owner, Event::NotOwner),
        ] {
            counter.store(owner.of(event), Ordering::Relaxed);
        }
    }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// What the service thread and its clients share.
#[derive(Debug)]
struct Shared {
    waker: Waker,
    /// When the thread checks next without being woken, in nanoseconds of its clock; 0 once it was woken.
    next_look: AtomicU64,
    /// A request waits here for a lease to end.
    release_matters: AtomicBool,
    stop: AtomicBool,
    is_serving: bool,
    failure: OnceLock<Arc<str>>,
    ledgers: Mutex<Vec<Arc<Ledger>>>,
    /// Ledgers that were ever added.
    ledger_count: AtomicU64,
    subscribers: Subscribers,
    counts: Counts,
}

impl Shared {
    fn ledgers(&self) -> MutexGuard<'_, Vec<Arc<Ledger>>> {
        self.ledgers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands a client's ledger to the thread, unless that has ended.
    fn add(&self, ledger: &Arc<Ledger>) {
        let mut ledgers = self.ledgers();
        if self.failure.get().is_none() {
            ledgers.push(Arc::clone(ledger));
            self.ledger_count.fetch_add(1, Ordering::Release);
        }
    }

    /// The thread ends; ledgers are not read any more.
    fn fail(&self, reason: String) {
        let mut ledgers = self.ledgers();
        // Under the lock, so that none is added after the last was removed.
        let _ = self.failure.set(Arc::from(reason));
        *ledgers = Vec::new();
    }

    /// Wakes the thread, unless that was done already.
    fn wake(&self) {
        if self.next_look.swap(0, Ordering::AcqRel) != 0 {
            count(&self.counts.wakes);
            self.waker.wake();
        }
    }
}

/// An endpoint's service thread; clones share one thread, which ends with the last of them.
///
/// [`crate::Client::join`] starts one. A program that opens an endpoint's clients in another way
/// starts one itself and gives it to all of them, in [`EndpointConfig::service`].
#[derive(Clone)]
pub struct Service {
    handle: Arc<Handle>,
}

struct Handle {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// Reports a panic of the service thread as its failure, so that clients do not count on it.
struct FailOnPanic(Arc<Shared>);

impl Drop for FailOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail("its thread panicked, which is a defect of this library".to_owned());
        }
    }
}

/// Whether a node is a memory server of the space. Only notices about memory that has moved ask.
pub(crate) type IsServer = Box<dyn Fn(NodeId) -> bool + Send>;

impl Service {
    /// Starts the service of the endpoint that `config` names, over a carrier of its own: on the
    /// fabric's port ([`bluebridge_wire::UDP_PORT`]) it can serve, on another only renew.
    ///
    /// # Errors
    /// If the system gives no thread, or no descriptor with which to wake it.
    pub fn start<T>(config: &EndpointConfig, transport: T) -> io::Result<Self>
    where
        T: Wakeable + Send + 'static,
    {
        let servers: Vec<_> = config.memory_nodes.iter().map(|it| it.node).collect();
        Self::start_beside(config, transport, Box::new(move |node| servers.contains(&node)))
    }

    /// [`Self::start`] where memory servers come and go.
    pub(crate) fn start_beside<T>(
        config: &EndpointConfig,
        mut transport: T,
        is_server: IsServer,
    ) -> io::Result<Self>
    where
        T: Wakeable + Send + 'static,
    {
        let shared = Arc::new(Shared {
            waker: transport.waker()?,
            next_look: AtomicU64::new(0),
            release_matters: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            is_serving: transport.local_port() == UDP_PORT,
            failure: OnceLock::new(),
            ledgers: Mutex::default(),
            ledger_count: AtomicU64::new(0),
            subscribers: Subscribers::default(),
            counts: Counts::default(),
        });
        let mut serving = run::Serving::new(config, transport, Arc::clone(&shared), is_server);
        let panicking = FailOnPanic(Arc::clone(&shared));
        let thread = Builder::new().name("bluebridge-service".to_owned()).spawn(move || {
            let _panicking = panicking;
            serving.run();
        })?;
        Ok(Self { handle: Arc::new(Handle { shared, thread: Some(thread) }) })
    }

    /// What it can do.
    #[must_use]
    pub fn state(&self) -> ServiceState {
        let shared = &self.handle.shared;
        match shared.failure.get() {
            Some(reason) => ServiceState::Failed { reason: Arc::clone(reason) },
            None if shared.is_serving => ServiceState::Serving,
            None => ServiceState::RenewalsOnly,
        }
    }

    /// Its counters since its start.
    #[must_use]
    pub fn counters(&self) -> ServiceCounters {
        let counts = &self.handle.shared.counts;
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ServiceCounters {
            renewed_count: of(&counts.renewed),
            lost_count: of(&counts.lost),
            renew_failed_count: of(&counts.renew_failed),
            aborted_count: of(&counts.aborted),
            request_count: of(&counts.requests),
            notice_count: of(&counts.notices),
            malformed_count: of(&counts.malformed),
            served_count: of(&counts.served),
            waited_count: of(&counts.waited),
            wait_ended_count: of(&counts.wait_ended),
            wait_over_count: of(&counts.wait_over),
            rejected_count: of(&counts.rejected),
            not_owner_count: of(&counts.not_owner),
            answered_count: of(&counts.answered),
            look_count: of(&counts.looks),
            wake_count: of(&counts.wakes),
        }
    }

    /// A subscription to the notices that arrive from now on. If [`NOTICES_WAITING_MAX`] notices wait in it,
    /// further ones are dropped and counted.
    #[must_use]
    pub fn notices(&self) -> Notices {
        self.handle.shared.subscribers.subscribe()
    }

    /// A client's side of the service.
    pub(crate) fn admit(&self, lease_count: u16) -> Tenant {
        Tenant::new(self.clone(), lease_count)
    }
}

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Service").field("state", &self.state()).finish_non_exhaustive()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.waker.wake();
        if let Some(thread) = self.thread.take() {
            // It ends within `run::END_DEADLINE`; if it panicked, nothing is left to be done.
            let _ = thread.join();
        }
    }
}

/// How long the thread continues without users, for the remaining ABORTs.
const END_DEADLINE: Duration = Duration::from_millis(200);
