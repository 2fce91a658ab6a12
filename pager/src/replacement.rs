//! Which page leaves when the limit of local pages is reached.
//!
//! The pager does not see which local pages are used, so nothing like LRU is possible. It sees only
//! that a page faults again after it left (a *return*), and the first write to a clean page (a
//! *touch*). Three policies use this knowledge differently:
//!
//! * **Return** is S3-FIFO (Yang et al., SOSP 2023): pages arrive in a short queue, the probation,
//!   and leave soon. A page that returns before as many others left as there are local pages goes
//!   to the main queue instead. A scan passes through the probation only.
//!   S3-FIFO counts the hits of a page and lets it pass the end of the main queue once for each.
//!   Here a page passes once for each of its returns in a row after the first, and for a touch.
//!   A touch soon after the arrival is ignored, since it belongs to the same use (as in 2Q, Johnson
//!   and Shasha, VLDB 1994).
//! * **Stay** is the bimodal insertion of DIP (Qureshi et al., ISCA 2007): returns do not count; one
//!   of 16 pages that arrive goes to the main queue at once. On a loop over more pages than the
//!   capacity, where the other two policies keep nothing until it is needed, the main queue stays.
//! * **Age** is FIFO. It is the best policy if the program works on one part after the other and
//!   each fits: the other two would give a new part only the probation at first.
//!
//! Small samples of the pages decide which policy all others follow ([`duel`]).
//!
//! Memory: about 60 bytes for each page of the capacity, whatever the size of the region.

mod duel;
mod ghosts;
mod pages;
#[cfg(test)]
mod tests;

use duel::{Duel, Policy, Role};
use ghosts::Ghosts;
use pages::{Pages, Queue, State, hash};

/// Why a page became local.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Arrival {
    /// The program needed it.
    Demand,
    /// It was loaded beside another page. The pages that are loaded beside one should be much fewer
    /// than those on probation (1 of 10): otherwise they leave before they are needed.
    Prefetch,
}

/// One of this many local pages is on probation (S3-FIFO).
const PROBATION_PART: usize = 10;

/// With [`Policy::Stay`], one of this many pages that arrive goes to the main queue. DIP has 32,
/// where a new phase costs more than 16 costs in a loop.
const STAY_PART: u64 = 16;

/// The highest number of returns that is remembered: the page passes the end of the main queue
/// twice.
const RETURNS_MAX: u8 = 3;

/// The local pages over the limit for which memory is reserved: those being loaded by fault
/// handlers that have not asked for a victim yet.
const RESERVE_PAGES: usize = 64;

/// Pages that one search for a victim may let pass. This bounds the time of one call.
const PASSES_MAX: usize = 32;

/// Pages that one search may move to the main queue when a group begins to follow
/// [`Policy::Stay`].
const MOVES_MAX: usize = 8;

/// The local pages of one role.
#[derive(Debug)]
struct Group {
    probation: Queue,
    main: Queue,
    /// Whether the main queue is still to be filled before pages stay in it.
    is_filling: bool,
}

impl Group {
    const EMPTY: Self = Self { probation: Queue::EMPTY, main: Queue::EMPTY, is_filling: true };

    const fn len(&self) -> usize {
        self.probation.len() + self.main.len()
    }

    const fn queue(&mut self, is_main: bool) -> &mut Queue {
        if is_main { &mut self.main } else { &mut self.probation }
    }

    /// Pages on probation beyond their part of the group; the next victim is one of them if there
    /// are any.
    const fn surplus(&self) -> usize {
        self.probation.len().saturating_sub(self.len() / PROBATION_PART)
    }

    /// Whether the next victim is a page of the main queue, except with [`Policy::Age`].
    const fn leaves_main(&self) -> bool {
        self.main.len() > 0 && self.surplus() == 0
    }

    fn move_to_main(&mut self, node: u32, chances: u8, pages: &mut Pages) {
        let Some(state) = pages.state_mut(node) else { return };
        let was_main = core::mem::replace(&mut state.is_main, true);
        state.chances = chances;
        pages.unlink(node, self.queue(was_main));
        pages.link(node, &mut self.main);
    }
}

/// The set of local pages, and the order in which they leave.
///
/// No call allocates as long as at most 64 pages more than the capacity are in the set. Each takes
/// a bounded number of steps.
#[derive(Debug)]
pub(crate) struct Replacement {
    pages: Pages,
    /// By [`Role::group`].
    groups: [Group; Role::ALL.len()],
    ghosts: Ghosts,
    duel: Duel,
    /// In pages.
    capacity: u32,
    /// The number of pages that arrived; wraps.
    arrivals: u32,
    random: u64,
    /// The group of the last victim, if it was put back.
    kept: Option<u8>,
}

impl Replacement {
    /// An empty set. `capacity_pages` is the limit of local pages, at most 2^32 - 1; the set does
    /// not enforce it. With fewer than about 1000 pages, the samples are so small that the choice
    /// between the policies is often wrong.
    pub(crate) fn new(capacity_pages: usize) -> Self {
        Self {
            pages: Pages::new(capacity_pages.saturating_add(RESERVE_PAGES)),
            groups: [Group::EMPTY; Role::ALL.len()],
            ghosts: Ghosts::new(capacity_pages),
            duel: Duel::new(capacity_pages),
            capacity: u32::try_from(capacity_pages).unwrap_or(u32::MAX),
            arrivals: 0,
            random: 0,
            kept: None,
        }
    }

    /// Adds a page that became local. A page that is in the set already does not change.
    pub(crate) fn insert(&mut self, page: u64, arrival: Arrival) {
        if self.pages.find(page).is_some() {
            return;
        }
        let role = self.duel.role(page);
        if self.duel.count(role, arrival) == Some(Policy::Stay)
            && let Some(group) = self.group(Role::Follow.group())
        {
            group.is_filling = true;
        }
        self.arrivals = self.arrivals.wrapping_add(1);
        let mut state = State { group: role.group(), ..State::default() };
        let ghost = self.ghosts.take(hash(page)).filter(|ghost| ghost.distance <= self.capacity);
        match (self.duel.policy(role), ghost) {
            // A prefetched page counts as one that returns: that it left recently and lies on the
            // way of a stream are two signs of use.
            (Policy::Return, Some(ghost)) => {
                state.is_main = true;
                state.returns = ghost.returns.saturating_add(1).min(RETURNS_MAX);
                state.chances = state.returns.saturating_sub(1);
            }
            (Policy::Stay, _) => {
                self.random = hash(self.random);
                state.is_main = self.random.is_multiple_of(STAY_PART);
            }
            (Policy::Return | Policy::Age, _) => {}
        }
        self.put(page, state);
    }

    /// Notes that a page was seen to be used: the first write since it was loaded or cleaned.
    pub(crate) fn touch(&mut self, page: u64) {
        let (arrivals, capacity) = (self.arrivals, self.capacity);
        let Some(state) = self.pages.find(page).and_then(|node| self.pages.state_mut(node)) else {
            return;
        };
        // Half of the time on probation.
        let is_another_use = arrivals.wrapping_sub(state.arrived) > capacity / 20;
        if is_another_use {
            state.chances = state.chances.max(1);
        }
    }

    /// Removes a page that the program discarded.
    pub(crate) fn remove(&mut self, page: u64) {
        if let Some(node) = self.pages.find(page) {
            self.take(node);
        }
    }

    /// Takes the page that leaves next out of the set; `None` if the set is empty.
    pub(crate) fn victim(&mut self) -> Option<u64> {
        let role = self.next_role()?;
        let node = self.next_node(role)?;
        let (page, state) = self.take(node)?;
        self.ghosts.insert(hash(page), state.returns);
        Some(page)
    }

    /// Puts a victim back that cannot leave now. It is the last of its group to be chosen again,
    /// and the next victim is of another group if possible: a caller that keeps some pages reaches
    /// every other page after at most a few times as many calls as there are pages.
    pub(crate) fn keep(&mut self, page: u64) {
        if self.pages.find(page).is_some() {
            return;
        }
        let group = self.duel.role(page).group();
        let returns = self.ghosts.take(hash(page)).map_or(0, |ghost| ghost.returns);
        self.put(page, State { group, is_main: true, returns, ..State::default() });
        self.kept = Some(group);
    }

    /// The number of pages in the set.
    #[cfg(test)]
    pub(crate) const fn len(&self) -> usize {
        self.pages.len()
    }

    fn group(&mut self, group: u8) -> Option<&mut Group> {
        self.groups.get_mut(usize::from(group))
    }

    /// The role whose group exceeds its share of the set the most. Comparing shares instead of
    /// numbers of pages keeps the balance also if the caller stays below the capacity.
    fn next_role(&mut self) -> Option<Role> {
        let kept = self.kept.take();
        let len = self.pages.len();
        let len_of = |role: Role| self.groups.get(usize::from(role.group())).map_or(0, Group::len);
        // The excess in parts of a page, plus `len` so that it is not negative.
        let (duel, shares) = (&self.duel, self.duel.shares());
        let excess = |&role: &Role| (len_of(role) + len) * shares - len * duel.share(role);
        let candidates = || Role::ALL.into_iter().filter(|&role| len_of(role) > 0);
        let others = candidates().filter(|role| Some(role.group()) != kept);
        others.max_by_key(excess).or_else(|| candidates().next())
    }

    /// The page of a group that leaves next.
    fn next_node(&mut self, role: Role) -> Option<u32> {
        let group = self.groups.get_mut(usize::from(role.group()))?;
        let pages = &mut self.pages;
        match self.duel.policy(role) {
            Policy::Age => {
                let age = |node: &u32| {
                    pages.state(*node).map(|state| self.arrivals.wrapping_sub(state.arrived))
                };
                [group.main.head(), group.probation.head()].into_iter().flatten().max_by_key(age)
            }
            Policy::Stay => {
                for _ in 0..MOVES_MAX {
                    // One more is normal when a page arrived and its victim is searched.
                    group.is_filling &= group.surplus() > 1;
                    if !group.is_filling {
                        break;
                    }
                    group.move_to_main(group.probation.head()?, 0, pages);
                }
                if !group.leaves_main() {
                    return group.probation.head();
                }
                pass_main(group, pages)
            }
            Policy::Return => {
                for _ in 0..PASSES_MAX {
                    if group.leaves_main() {
                        return pass_main(group, pages);
                    }
                    let node = group.probation.head()?;
                    if pages.state(node)?.chances == 0 {
                        return Some(node);
                    }
                    group.move_to_main(node, 0, pages);
                }
                group.queue(group.leaves_main()).head()
            }
        }
    }

    /// Adds a page that is not in the set.
    fn put(&mut self, page: u64, state: State) {
        let state = State { arrived: self.arrivals, ..state };
        if let Some(group) = self.groups.get_mut(usize::from(state.group)) {
            self.pages.insert(page, state, group.queue(state.is_main));
        }
    }

    fn take(&mut self, node: u32) -> Option<(u64, State)> {
        let &State { group, is_main, .. } = self.pages.state(node)?;
        let group = self.groups.get_mut(usize::from(group))?;
        self.pages.remove(node, group.queue(is_main))
    }
}

/// The first page of the main queue that has no chance left. Those before it go to the end.
fn pass_main(group: &mut Group, pages: &mut Pages) -> Option<u32> {
    for _ in 0..PASSES_MAX {
        let node = group.main.head()?;
        match pages.state(node)?.chances {
            0 => return Some(node),
            chances => group.move_to_main(node, chances - 1, pages),
        }
    }
    group.main.head()
}
