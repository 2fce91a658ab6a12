//! What is checked: who does what, what may go wrong how often, and which rule is broken.

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
    /// Those that say that a lease is fought over.
    Contended,
    /// None.
    Off,
}

/// How an owner's endpoint answers redirected requests while it holds the page.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Policy {
    /// BUSY.
    Reject,
    /// BUSY; to a READ that may be stale the last committed contents.
    Serve,
    /// BUSY with QUEUED. That NOT_OWNER follows is left to the requester's timer.
    Wait,
}

/// A broken rule, which the checker must find.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Bug {
    /// The home takes a COMMIT by the page's owner whatever its epoch.
    AnyEpoch,
    /// The controller obeys copies of any age and removes nothing, and the switch ignores the home
    /// bit.
    BlindController,
    /// The requester sends what may have run again, in a new session.
    BlindRetry,
    /// An owner counts its lease from when the grant arrived.
    CountFromArrival,
    /// The home does not keep the answers that it gave.
    ForgetAnswers,
    /// The home starts its epochs anew when it restarts.
    ForgetEpochs,
    /// The home does not end a lease at its deadline.
    KeepLease,
    /// The home takes a COMMIT after the deadline if nobody has leased the page since.
    LateCommit,
    /// An owner executes a FETCH_ADD that was redirected to it, and is believed.
    OwnerExecutes,
    /// An owner answers a plain READ, and is believed.
    OwnerReads,
    /// The switch redirects COMMIT, home bit or not.
    RedirectCommit,
    /// An owner serves what was committed last after it sent its COMMIT.
    ServeReleased,
    /// The home answers READ while the page is leased, with what the owner has so far.
    ServeUncommitted,
}

impl Bug {
    /// Every bug.
    pub const ALL: [Self; 13] = [
        Self::AnyEpoch,
        Self::BlindController,
        Self::BlindRetry,
        Self::CountFromArrival,
        Self::ForgetAnswers,
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

/// What must happen in some run of a scenario that is there to show it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Event {
    /// Every task of a run did what it was to do.
    AllSucceeded,
    /// The home repeated an answer that it had recorded.
    AnswerRepeated,
    /// A redirect led a request astray.
    Bounced,
    /// The home repeated a grant.
    GrantRepeated,
    /// A COMMIT came after its lease had run out.
    LateCommit,
    /// An owner served what was committed last.
    ServedByOwner,
    /// A request that waited got the lease.
    WaiterGranted,
}

impl Event {
    const fn bit(self) -> u8 {
        1 << self as u8
    }
}

/// How threads' tasks ended, in all runs.
pub type Outcomes = BTreeSet<Vec<Vec<Outcome>>>;

/// Everything that is decided before the checker runs.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// What it is called.
    pub name: &'static str,
    /// The threads: each one's endpoint, and its tasks one after the other.
    pub threads: Vec<(u8, Vec<Task>)>,
    /// Ticks of the home's clock, at most.
    pub ticks: u8,
    /// Ticks that a lease lasts.
    pub lease: u8,
    /// How often a request is sent again.
    pub retries: u8,
    /// Messages delivered twice, at most.
    pub duplicates: u8,
    /// Messages lost for good, at most.
    pub losses: u8,
    /// Crashes of client endpoints, at most.
    pub client_crashes: u8,
    /// Restarts of the home, which keeps the page and forgets the rest.
    pub home_crashes: u8,
    /// Restarts of the controller or the switch, at most.
    pub network_crashes: u8,
    /// Endpoints whose clock may stand still for a while.
    pub freezes: u8,
    /// Redirects out of nowhere, to any endpoint, at most.
    pub false_hints: u8,
    /// Whether requests wait at the home.
    pub queue: bool,
    /// Which replies are copied.
    pub copies: Copies,
    /// How owners answer.
    pub policy: Policy,
    /// The rule that is broken.
    pub bug: Option<Bug>,
    /// How the tasks ended in all runs that ended, if wanted.
    pub outcomes: Option<Arc<Mutex<Outcomes>>>,
    /// What must happen in some run.
    pub expected: Vec<Event>,
    /// What happened: not a part of the state, which would make many of one.
    seen: Arc<AtomicU8>,
}

impl Scenario {
    /// A scenario in which messages are late and overtake each other, and nothing else goes wrong.
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

    /// The scenario with a change.
    #[must_use]
    pub fn with(&self, change: impl FnOnce(&mut Self)) -> Self {
        let mut scenario = Self { seen: Arc::default(), ..self.clone() };
        change(&mut scenario);
        scenario
    }

    /// The scenario with a broken rule.
    #[must_use]
    pub fn with_bug(&self, bug: Bug) -> Self {
        self.with(|scenario| scenario.bug = Some(bug))
    }

    /// What should have happened in some run, and did not.
    pub fn missing(&self) -> impl Iterator<Item = Event> {
        let seen = self.seen.load(Ordering::Relaxed);
        self.expected.iter().copied().filter(move |event| seen & event.bit() == 0)
    }

    pub(super) fn note(&self, event: Event) {
        // Most of the time it is there, and a look disturbs no other core.
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
