//! Redirects of leased pages to the owners of their leases.
//!
//! The loop over the switch ([`crate::reconcile`]) owns this state, not the core. A redirect is a hint: a
//! missing one costs a refusal at the home, a stale one a retry. Redirects are therefore not stored, and no join
//! or plan waits for them. A switch redirects only to its own endpoints: a packet that it redirected to another
//! switch would be sent back from there, where its address leads to the home. Inputs are copies of replies and the time ([`Redirects::handle_packet_in`],
//! [`Redirects::handle_timeout`]); outputs are single updates of the switch ([`Redirects::next_updates`]),
//! without the comparison of all tables, which is too slow for them.
//!
//! * `packet_in`: the copies.
//! * `rule`: which of them are accepted.
//! * `table`: the switch's table: updates, and the results of a reading.

mod packet_in;
mod rule;
mod table;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bluebridge_p4::pipeline::{Action, Forward, Key};
use bluebridge_wire::address::{LINE_PAGES, PAGE_SHIFT};
use bluebridge_wire::{NodeId, ReplyCopy, Space};

use crate::core::{Attached, Endpoints};
pub use packet_in::PacketIn;
use rule::{LeaseEvent, client, serving};
pub use rule::{RedirectPolicy, Refusal};

/// The most tracked pages, with or without a redirect.
pub const KNOWN_MAX: usize = 65_536;

/// The most redirects of a switch, and therefore the greatest budget.
pub const REDIRECTS_MAX: usize = bluebridge_p4::declaration::REDIRECTS_MAX as usize;

/// The default budget.
pub const REDIRECT_BUDGET: usize = 4096;

/// The most difference between two reported ends of the same lease: copies have a delay.
const SLACK: Duration = Duration::from_millis(20);

/// A page of a node.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
struct Page {
    scope: u32,
    node: u16,
    /// The upper 52 bits of the location.
    number: u64,
}

impl Page {
    const fn of(reply: &ReplyCopy) -> Self {
        let target = &reply.target;
        let (scope, node) = (target.space.scope(), target.node.0);
        Self { scope, node, number: target.location >> PAGE_SHIFT }
    }

    const fn from_key(key: &Key) -> Option<Self> {
        match *key {
            Key::Redirect { dst_scope, dst_node, page } => {
                Some(Self { scope: dst_scope, node: dst_node, number: page })
            }
            _ => None,
        }
    }

    const fn key(self) -> Key {
        Key::Redirect { dst_scope: self.scope, dst_node: self.node, page: self.number }
    }

    #[expect(clippy::cast_possible_truncation, reason = "the lower half of a scope is the space")]
    const fn space(self) -> Space {
        Space(self.scope as u16)
    }

    /// The pages after this one in its line.
    fn rest_of_line(self) -> impl Iterator<Item = Self> {
        let end = (self.number | (LINE_PAGES as u64 - 1)) + 1;
        (self.number + 1..end).map(move |number| Self { number, ..self })
    }
}

/// The newest known lease of a page.
#[derive(Clone, Copy, Debug)]
struct Lease {
    owner: NodeId,
    /// The incarnation of the owner when it was granted.
    owner_incarnation: u32,
    home_incarnation: u32,
    epoch: u64,
    until: Instant,
    /// Whether requests must go to the owner. Otherwise the lease is tracked only to refuse copies
    /// of older ones.
    redirected: bool,
    /// Whether it was released, or its owner left.
    over: bool,
}

/// A redirect in the switch, as far as known.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct InstalledRedirect {
    /// `None` for an unknown action.
    forward: Option<Forward>,
    /// `None` for one without an end.
    end: Option<EndWindow>,
}

/// When an entry ends. The switch counts its time from a moment that is not known exactly: between
/// the call that wrote or read the entry and its response.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct EndWindow {
    earliest: Instant,
    latest: Instant,
}

impl EndWindow {
    /// Whether both can be the same end, within `slack`. An end before `now` equals any other end before `now`.
    fn overlaps(self, other: Self, now: Instant, slack: Duration) -> bool {
        let (first, second) = (self.cut(now), other.cut(now));
        first.earliest <= second.latest + slack && second.earliest <= first.latest + slack
    }

    fn cut(self, now: Instant) -> Self {
        Self { earliest: self.earliest.max(now), latest: self.latest.max(now) }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    lease: Option<Lease>,
    installed: Option<InstalledRedirect>,
    /// Whether it is queued for [`Redirects::next_updates`].
    queued: bool,
}

impl State {
    /// Whether it counts towards the budget.
    fn is_placed(&self) -> bool {
        self.installed.is_some() || self.lease.is_some_and(|lease| lease.redirected)
    }
}

/// Counts since the start.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct LeaseCounts {
    /// Copies accepted.
    pub accepted: u64,
    /// Copies refused, in the order of [`Refusal::ALL`].
    pub refused: [u64; Refusal::ALL.len()],
    /// Redirects installed or renewed.
    pub installed: u64,
    /// Redirects removed.
    pub removed: u64,
    /// Redirects that the switch refused.
    pub switch_refused: u64,
}

impl LeaseCounts {
    /// Copies refused for a reason.
    #[must_use]
    pub const fn refused_for(&self, reason: Refusal) -> u64 {
        self.refused[reason as usize]
    }
}

/// Known leases and redirects.
#[derive(Debug)]
pub struct Redirects {
    policy: RedirectPolicy,
    budget: usize,
    endpoints: Arc<Endpoints>,
    pages: HashMap<Page, State>,
    deadlines: BTreeSet<(Instant, Page)>,
    queue: VecDeque<Page>,
    placed: usize,
    leases: usize,
    counts: LeaseCounts,
}

impl Redirects {
    /// An empty state for at most `budget` redirects (and [`REDIRECTS_MAX`]).
    #[must_use]
    pub fn new(policy: RedirectPolicy, budget: usize) -> Self {
        Self {
            policy,
            budget: budget.min(REDIRECTS_MAX),
            endpoints: Arc::default(),
            pages: HashMap::new(),
            deadlines: BTreeSet::new(),
            queue: VecDeque::new(),
            placed: 0,
            leases: 0,
            counts: LeaseCounts::default(),
        }
    }

    /// Tracked leases.
    #[must_use]
    pub const fn lease_count(&self) -> usize {
        self.leases
    }

    /// The most redirects.
    #[must_use]
    pub const fn budget(&self) -> usize {
        self.budget
    }

    /// The counts.
    #[must_use]
    pub const fn counts(&self) -> &LeaseCounts {
        &self.counts
    }

    /// Processes a copy of a reply, if the rules accept it.
    ///
    /// # Errors
    /// The rule that it breaks; the refusal is counted.
    pub fn handle_packet_in(&mut self, now: Instant, copy: &PacketIn) -> Result<(), Refusal> {
        let outcome = self.apply(now, copy);
        match outcome {
            Ok(()) => self.counts.accepted += 1,
            Err(refusal) => self.counts.refused[refusal as usize] += 1,
        }
        outcome
    }

    fn apply(&mut self, now: Instant, copy: &PacketIn) -> Result<(), Refusal> {
        if self.policy == RedirectPolicy::Off {
            return Err(Refusal::Off);
        }
        let reply = copy.reply().ok_or(Refusal::Malformed)?;
        let event = LeaseEvent::of(&reply)?;
        let home = serving(&self.endpoints, copy.ingress_port, &reply)?;
        let page = Page::of(&reply);
        let known = self.pages.get(&page).and_then(|state| state.lease);
        if known.is_some_and(|known| reply.lease_epoch < known.epoch) {
            return Err(Refusal::StaleEpoch);
        }
        match event {
            LeaseEvent::Released => {
                self.release(page, reply.lease_epoch);
                Ok(())
            }
            LeaseEvent::Granted | LeaseEvent::Renewed => {
                self.grant(now, page, &home, &reply, event)
            }
        }
    }

    /// A lease was released: for certain that of this page, and probably those of the line's other
    /// pages, because the copy does not contain the length of the range.
    fn release(&mut self, page: Page, epoch: u64) {
        self.change(page, |state| {
            if let Some(lease) = &mut state.lease {
                lease.epoch = epoch;
                lease.redirected = false;
                lease.over = true;
            }
        });
        for other in page.rest_of_line() {
            self.change(other, |state| {
                if let Some(lease) = state.lease.as_mut().filter(|lease| lease.epoch == epoch) {
                    lease.redirected = false;
                }
            });
        }
    }

    /// A lease is held until the end that the reply reports.
    fn grant(
        &mut self,
        now: Instant,
        page: Page,
        home: &Attached,
        reply: &ReplyCopy,
        event: LeaseEvent,
    ) -> Result<(), Refusal> {
        let known = self.pages.get(&page).and_then(|state| state.lease);
        let owner = NodeId(reply.node);
        let attached = client(&self.endpoints, page.space(), owner).ok_or(Refusal::UnknownOwner)?;
        let (owner_incarnation, is_local) = (attached.incarnation, attached.is_local);
        if reply.lease_remaining_ms == 0 {
            return Err(Refusal::Ended);
        }
        let same = known.filter(|known| known.epoch == reply.lease_epoch);
        if reply.lease_epoch == 0 || same.is_some_and(|known| known.over || known.owner != owner) {
            return Err(Refusal::StaleEpoch);
        }
        if known.is_none() && self.leases >= KNOWN_MAX {
            return Err(Refusal::KnownFull);
        }
        let reported = now + Duration::from_millis(reply.lease_remaining_ms.into());
        // An end that differs only by the delay of copies stays, so that nothing is written.
        let until = same.map(|known| known.until).filter(|until| until.abs_diff(reported) <= SLACK);
        let until = until.unwrap_or(reported);
        let is_placed = self.pages.get(&page).is_some_and(State::is_placed);
        let redirected = is_local && (is_placed || self.placed < self.budget);
        let lease = Lease {
            owner,
            owner_incarnation,
            home_incarnation: home.incarnation,
            epoch: reply.lease_epoch,
            until,
            redirected,
            over: false,
        };
        self.change(page, |state| state.lease = Some(lease));
        if event == LeaseEvent::Renewed {
            self.renew_rest(page, reply.lease_epoch, until);
        }
        if redirected || !is_local { Ok(()) } else { Err(Refusal::BudgetFull) }
    }

    /// The lease of a range has a new end; the length of the range is assumed.
    fn renew_rest(&mut self, page: Page, epoch: u64, until: Instant) {
        for other in page.rest_of_line() {
            self.change(other, |state| {
                let same = |lease: &&mut Lease| lease.epoch == epoch && !lease.over;
                if let Some(lease) = state.lease.as_mut().filter(same) {
                    lease.until = until;
                }
            });
        }
    }

    /// Sets the attached endpoints; leases of nodes that left, or joined again, are over.
    pub fn set_endpoints(&mut self, endpoints: &Arc<Endpoints>) {
        if Arc::ptr_eq(&self.endpoints, endpoints) || self.endpoints == *endpoints {
            return;
        }
        self.endpoints = Arc::clone(endpoints);
        let incarnation = |node| endpoints.get(&node).map(|endpoint| endpoint.incarnation);
        let gone = |page: &Page, lease: &Lease| {
            let home = incarnation(NodeId(page.node)) != Some(lease.home_incarnation);
            let owner = client(endpoints, page.space(), lease.owner);
            let owner = owner.map(|owner| owner.incarnation) != Some(lease.owner_incarnation);
            (home || owner).then_some((*page, home))
        };
        let leases = self.pages.iter().filter_map(|(page, state)| Some((page, state.lease?)));
        let gone: Vec<_> = leases.filter_map(|(page, lease)| gone(page, &lease)).collect();
        for (page, home_is_gone) in gone {
            self.change(page, |state| {
                if home_is_gone {
                    state.lease = None;
                } else if let Some(lease) = &mut state.lease {
                    // Still tracked: a late copy would name the node, which may be another endpoint now.
                    lease.redirected = false;
                    lease.over = true;
                }
            });
        }
        // The route to a remaining endpoint may have changed.
        let pages: Vec<_> = self.pages.keys().copied().collect();
        for page in pages {
            self.change(page, |_| {});
        }
    }

    /// When [`Self::handle_timeout`] has something to do.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.deadlines.first().map(|(due, _)| *due)
    }

    /// Removes expired leases; their redirects are deleted, even if the switch ends them itself.
    pub fn handle_timeout(&mut self, now: Instant) {
        while let Some((_, page)) = self.deadlines.first().copied().filter(|(due, _)| *due <= now) {
            self.change(page, |state| state.lease = None);
        }
    }

    /// Changes the state of a page, and updates everything that depends on it.
    fn change(&mut self, page: Page, change: impl FnOnce(&mut State)) {
        let mut state = self.pages.get(&page).copied().unwrap_or_default();
        let before = state;
        change(&mut state);
        let deadline = |state: &State| state.lease.map(|lease| (lease.until, page));
        if deadline(&before) != deadline(&state) {
            deadline(&before).map(|due| self.deadlines.remove(&due));
            deadline(&state).map(|due| self.deadlines.insert(due));
        }
        self.placed =
            self.placed + usize::from(state.is_placed()) - usize::from(before.is_placed());
        self.leases =
            self.leases + usize::from(state.lease.is_some()) - usize::from(before.lease.is_some());
        if !state.queued && self.differs(&state) {
            state.queued = true;
            self.queue.push_back(page);
        }
        if state.lease.is_none() && state.installed.is_none() && !state.queued {
            self.pages.remove(&page);
        } else {
            self.pages.insert(page, state);
        }
    }

    /// The desired redirect of a page.
    fn wanted(&self, state: &State) -> Option<(Forward, Instant)> {
        let lease = state.lease.filter(|lease| lease.redirected)?;
        let owner = self.endpoints.get(&lease.owner).filter(|owner| owner.is_local)?;
        Some((owner.forward, lease.until))
    }

    /// Whether the switch differs from the desired state.
    fn differs(&self, state: &State) -> bool {
        match (self.wanted(state), state.installed) {
            (None, installed) => installed.is_some(),
            (Some(_), None) => true,
            (Some((forward, until)), Some(installed)) => {
                installed.forward != Some(forward)
                    || installed.end.is_none_or(|end| end.earliest.abs_diff(until) > SLACK)
            }
        }
    }
}

/// The time between two moments, in either order.
trait AbsDiff {
    fn abs_diff(self, other: Self) -> Duration;
}

impl AbsDiff for Instant {
    fn abs_diff(self, other: Self) -> Duration {
        self.saturating_duration_since(other).max(other.saturating_duration_since(self))
    }
}

impl InstalledRedirect {
    /// A redirect as written or read by a call that began and got its response at these moments.
    fn new(action: Option<&Action>, began: Instant, responded: Instant) -> Self {
        match action {
            Some(Action::RedirectUntil { forward, lease_ms }) => {
                let left = Duration::from_millis(u64::from(*lease_ms));
                let end = EndWindow { earliest: began + left, latest: responded + left };
                Self { forward: Some(*forward), end: Some(end) }
            }
            Some(Action::Forward(forward)) => Self { forward: Some(*forward), end: None },
            _ => Self { forward: None, end: None },
        }
    }
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
