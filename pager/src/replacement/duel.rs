//! Which of three policies most pages follow: set dueling.
//!
//! DIP (Qureshi et al., ISCA 2007) runs each policy on a sample of a cache's sets, counts the
//! misses of each sample, and lets all other sets follow the better policy. Here a sample is one of
//! 32 to 128 pages, which has the same share of the local pages and replaces only among them. This
//! makes the samples independent of each other. To judge a policy, only faults are needed, and they are
//! all that the pager sees.

use super::{Arrival, pages::hash};

/// Bounds of the pages of a constituency, in which one page leads for each policy and the others
/// follow. A page that leads for a policy that loses faults more often than the others, also where
/// these are all local and nothing else is prefetched. So samples should be small.
const CONSTITUENCY_PAGES: (usize, usize) = (32, 128);

/// Local pages that a sample has if it can: with few, chance decides the duel.
const SAMPLE_PAGES: usize = 32;

/// How the pages of a group are replaced.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Policy {
    /// Pages that come back soon after they left stay longer (S3-FIFO).
    Return,
    /// Most pages that arrive leave soon, so that the others stay for long (DIP's bimodal
    /// insertion). Only for accesses that are cyclic over more pages than the capacity.
    Stay,
    /// The page that arrived first leaves.
    Age,
}

impl Policy {
    const ALL: [Self; 3] = [Self::Return, Self::Stay, Self::Age];
}

/// What a page does in the duel. The pages of one role are a group.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Role {
    Follow,
    Lead(Policy),
}

impl Role {
    pub(super) const ALL: [Self; 4] = [
        Self::Follow,
        Self::Lead(Policy::Return),
        Self::Lead(Policy::Stay),
        Self::Lead(Policy::Age),
    ];

    /// The number of the role's group.
    pub(super) const fn group(self) -> u8 {
        match self {
            Self::Follow => 0,
            Self::Lead(Policy::Return) => 1,
            Self::Lead(Policy::Stay) => 2,
            Self::Lead(Policy::Age) => 3,
        }
    }
}

/// What the samples cost, and who wins.
#[derive(Debug)]
pub(super) struct Duel {
    costs: Costs,
    /// The sum of the costs at which the duel is judged and older costs lose half of their weight.
    window: u32,
    winner: Policy,
    /// Pages of a constituency, a power of two.
    constituency_pages: usize,
}

/// The costs of the three samples, see [`Duel::FAULT_COST`].
#[derive(Clone, Copy, Debug, Default)]
struct Costs {
    of_return: u32,
    of_stay: u32,
    of_age: u32,
}

impl Costs {
    const fn of(&self, policy: Policy) -> u32 {
        match policy {
            Policy::Return => self.of_return,
            Policy::Stay => self.of_stay,
            Policy::Age => self.of_age,
        }
    }

    const fn add(&mut self, policy: Policy, cost: u32) {
        let total = match policy {
            Policy::Return => &mut self.of_return,
            Policy::Stay => &mut self.of_stay,
            Policy::Age => &mut self.of_age,
        };
        *total = total.saturating_add(cost);
    }

    const fn sum(&self) -> u32 {
        self.of_return.saturating_add(self.of_stay).saturating_add(self.of_age)
    }

    const fn halve(&mut self) {
        self.of_return /= 2;
        self.of_stay /= 2;
        self.of_age /= 2;
    }
}

impl Duel {
    /// The cost of a fault. It is 8 times that of a page that is loaded beside another one (17 us
    /// and 2.2 us), but which of two missing pages faults is mostly chance. The full weight would
    /// add this chance to the costs, and would delay the verdict where most pages are prefetched.
    const FAULT_COST: u32 = 2;

    /// The cost of a page that is loaded beside another one.
    const PREFETCH_COST: u32 = 1;

    /// Faults of the samples after which the duel is judged: at least so many that their noise
    /// (the square root) is below the margin, at most so many that a new phase is noticed soon.
    const WINDOW_FAULTS: (usize, usize) = (192, 12288);

    /// The winner changes only if it saves more than this part of the costs of all three.
    const MARGIN_PART: u32 = 24;

    pub(super) fn new(capacity_pages: usize) -> Self {
        let (least, most) = Self::WINDOW_FAULTS;
        let (least_pages, most_pages) = CONSTITUENCY_PAGES;
        let wanted_pages = (capacity_pages / SAMPLE_PAGES).clamp(least_pages, most_pages);
        let constituency_pages = wanted_pages.next_power_of_two();
        let sampled_pages = capacity_pages / constituency_pages * Policy::ALL.len();
        let faults = u32::try_from(sampled_pages.clamp(least, most)).unwrap_or(u32::MAX);
        let window = faults.saturating_mul(Self::FAULT_COST);
        // FIFO until another policy was seen to be better.
        Self { costs: Costs::default(), window, winner: Policy::Age, constituency_pages }
    }

    /// The role of a page. Every aligned block has one leader of each policy, at places that depend
    /// on the block. Thus each policy leads for the same part of every range, and no stride meets
    /// one policy more often than the others.
    pub(super) const fn role(&self, page: u64) -> Role {
        let block_pages = self.constituency_pages as u64;
        let place = page % block_pages;
        let bits = hash(page / block_pages);
        let first = bits % block_pages;
        // Odd, so that the three places differ.
        let step = ((bits >> 32) | 1) % block_pages;
        if place == first {
            Role::Lead(Policy::Return)
        } else if place == (first + step) % block_pages {
            Role::Lead(Policy::Stay)
        } else if place == (first + 2 * step) % block_pages {
            Role::Lead(Policy::Age)
        } else {
            Role::Follow
        }
    }

    /// The share of a role's group of all pages, and so of the local ones, in parts of
    /// [`Self::shares`].
    pub(super) const fn share(&self, role: Role) -> usize {
        match role {
            Role::Follow => self.constituency_pages - Policy::ALL.len(),
            Role::Lead(_) => 1,
        }
    }

    /// The sum of all shares.
    pub(super) const fn shares(&self) -> usize {
        self.constituency_pages
    }

    /// The policy of a role.
    pub(super) const fn policy(&self, role: Role) -> Policy {
        match role {
            Role::Lead(policy) => policy,
            Role::Follow => self.winner,
        }
    }

    /// Counts a page that arrived. Returns the new winner if it changes.
    pub(super) fn count(&mut self, role: Role, arrival: Arrival) -> Option<Policy> {
        let Role::Lead(policy) = role else { return None };
        let cost = match arrival {
            Arrival::Demand => Self::FAULT_COST,
            Arrival::Prefetch => Self::PREFETCH_COST,
        };
        self.costs.add(policy, cost);
        let costs = self.costs;
        if costs.sum() < self.window {
            return None;
        }
        self.costs.halve();
        let best = Policy::ALL.into_iter().min_by_key(|&policy| costs.of(policy))?;
        let saved = costs.of(self.winner).saturating_sub(costs.of(best));
        if saved <= costs.sum() / Self::MARGIN_PART {
            return None;
        }
        self.winner = best;
        Some(best)
    }
}
