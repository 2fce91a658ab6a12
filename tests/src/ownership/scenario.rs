//! A scenario: the tasks of the threads, the possible faults, and the planted bug.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU8, Ordering},
    },
};

use super::state::Outcome;

/// What a thread does with the page.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Task {
    /// UPDATE, then ABORT.
    Abort,
    /// FETCH_ADD, for all requests that change the page without a lease.
    Add,
    /// READ.
    Read,
    /// UPDATE, RENEW, then COMMIT.
    Renew,
    /// READ with MAY_BE_STALE.
    StaleRead,
    /// UPDATE, then COMMIT.
    Update,
}

/// Which replies the switch copies to the controller.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Copies {
    /// Grants, renewals and releases as well.
    Always,
    /// Replies that show that a lease is contended.
    Contended,
    /// None.
    Off,
}

/// How an owner's endpoint responds to redirected requests while it holds the page.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Policy {
    /// BUSY.
    Reject,
    /// BUSY; for a READ with MAY_BE_STALE the last committed contents.
    Serve,
    /// BUSY with QUEUED. The model has no NOT_OWNER afterwards: the requester's timer replaces it.
    Wait,
}

/// A broken rule; the checker must find the violation.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Bug {
    /// The home accepts a COMMIT by the page's owner with any epoch.
    AnyEpoch,
    /// The controller uses copies of any age and removes no redirect, and the switch ignores the
    /// home bit.
    BlindController,
    /// The requester repeats a request that may have been executed, in a new session.
    BlindRetry,
    /// An owner counts its lease from when the grant arrived.
    CountFromArrival,
    /// The home does not record its responses.
    ForgetResponses,
    /// The home restarts its epochs from the beginning when it restarts.
    ForgetEpochs,
    /// The home does not end a lease at its deadline.
    KeepLease,
    /// The home accepts a COMMIT after the deadline if the page was not leased since.
    LateCommit,
    /// An owner executes a redirected FETCH_ADD, and the client accepts its response.
    OwnerExecutes,
    /// An owner responds to a plain READ, and the client accepts its response.
    OwnerReads,
    /// The switch redirects COMMIT, even with the home bit.
    RedirectCommit,
    /// An owner serves the last committed contents after it sent its COMMIT.
    ServeReleased,
    /// The home responds to READ while the page is leased, with the owner's uncommitted contents.
    ServeUncommitted,
}

impl Bug {
    /// Every bug.
    pub const ALL: [Self; 13] = [
        Self::AnyEpoch,
        Self::BlindController,
        Self::BlindRetry,
        Self::CountFromArrival,
        Self::ForgetResponses,
        Self::ForgetEpochs,
        Self::KeepLease,
        Self::LateCommit,
        Self::OwnerExecutes,
        Self::OwnerReads,
        Self::RedirectCommit,
        Self::ServeReleased,
        Self::ServeUncommitted,
    ];
}

/// Events that must occur in some run of the scenario that is meant to show them.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Event {
    /// Every task of a run succeeded.
    AllSucceeded,
    /// The home repeated a recorded response.
    ResponseRepeated,
    /// A redirect sent a request to the wrong node.
    Bounced,
    /// The home repeated a grant.
    GrantRepeated,
    /// A COMMIT arrived after its lease had expired.
    LateCommit,
    /// An owner served the last committed contents.
    ServedByOwner,
    /// A waiting request got the lease.
    WaiterGranted,
}

impl Event {
    const fn bit(self) -> u8 {
        1 << self as u8
    }
}

/// The outcomes of the threads' tasks, in all runs.
pub type Outcomes = BTreeSet<Vec<Vec<Outcome>>>;

/// The configuration of a run of the checker.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The name.
    pub name: &'static str,
    /// The threads: each one's endpoint, and its tasks one after the other.
    pub threads: Vec<(u8, Vec<Task>)>,
    /// The most ticks of the home's clock.
    pub ticks: u8,
    /// The duration of a lease in ticks.
    pub lease: u8,
    /// How often a request is sent again.
    pub retries: u8,
    /// The most messages that are delivered twice.
    pub duplicates: u8,
    /// The most messages that are lost.
    pub losses: u8,
    /// The most crashes of client endpoints.
    pub client_crashes: u8,
    /// The most restarts of the home, which keeps the page and loses all other state.
    pub home_crashes: u8,
    /// The most restarts of the controller or the switch.
    pub network_crashes: u8,
    /// The most endpoints whose clock stands still for a while.
    pub freezes: u8,
    /// The most wrong redirects, to any endpoint.
    pub false_hints: u8,
    /// Whether requests wait at the home.
    pub queue: bool,
    /// Which replies are copied.
    pub copies: Copies,
    /// How owners respond.
    pub policy: Policy,
    /// The planted bug.
    pub bug: Option<Bug>,
    /// Collects the outcomes of all completed runs, if requested.
    pub outcomes: Option<Arc<Mutex<Outcomes>>>,
    /// Events that must occur in some run.
    pub expected: Vec<Event>,
    /// Events that occurred; not a part of the state, because that would multiply the states.
    seen: Arc<AtomicU8>,
}

impl Scenario {
    /// A scenario in which messages are only delayed and reordered.
    #[must_use]
    pub fn new(name: &'static str, threads: &[(u8, &[Task])]) -> Self {
        Self {
            name,
            threads: threads.iter().map(|(end, tasks)| (*end, tasks.to_vec())).collect(),
            ticks: 3,
            lease: 2,
            retries: 1,
            duplicates: 0,
            losses: 0,
            client_crashes: 0,
            home_crashes: 0,
            network_crashes: 0,
            freezes: 0,
            false_hints: 0,
            queue: false,
            copies: Copies::Off,
            policy: Policy::Reject,
            bug: None,
            outcomes: None,
            expected: vec![Event::AllSucceeded],
            seen: Arc::default(),
        }
    }

    /// A copy of the scenario with a change.
    #[must_use]
    pub fn with(&self, change: impl FnOnce(&mut Self)) -> Self {
        let mut scenario = Self { seen: Arc::default(), ..self.clone() };
        change(&mut scenario);
        scenario
    }

    /// A copy of the scenario with a bug.
    #[must_use]
    pub fn with_bug(&self, bug: Bug) -> Self {
        self.with(|scenario| scenario.bug = Some(bug))
    }

    /// The expected events that did not occur.
    pub fn missing(&self) -> impl Iterator<Item = Event> {
        let seen = self.seen.load(Ordering::Relaxed);
        self.expected.iter().copied().filter(move |event| seen & event.bit() == 0)
    }

    pub(super) fn note(&self, event: Event) {
        // Mostly the bit is set already, and a load does not disturb other cores.
        if self.seen.load(Ordering::Relaxed) & event.bit() == 0 {
            self.seen.fetch_or(event.bit(), Ordering::Relaxed);
        }
    }

    pub(super) fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    pub(super) fn end_count(&self) -> u8 {
        self.threads.iter().map(|(end, _)| end + 1).max().unwrap_or(0)
    }

    pub(super) fn end_of(&self, thread: u8) -> u8 {
        self.threads[usize::from(thread)].0
    }
}
