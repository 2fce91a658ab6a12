//! Lists or frees the allocations of a shard for an operator.
//!
//! A shard visits a few of its pages at a time, between requests, so that an arena of any size delays
//! no client. The query bounds the result, which names the page to continue from.

use core::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use bluebridge_protocol::{
    Timestamp,
    responder::Responder,
    store::{Creator, Grant, StoreUsage},
};
use bluebridge_wire::{ArenaGeneration, NodeId, Space, Status, address::LINE_PAGES};

use crate::serve::Store;

/// Pages that are visited in one step, an allocation counting as one: some 20 us.
const STEP_PAGES: u32 = 8192;

/// Allocations, and pages of them, that are freed in one step.
const STEP_FREED: u32 = 16;
const STEP_FREED_PAGES: u32 = 2048;

/// The most allocations in one result.
pub const FOUND_MAX: u32 = 1024;

/// An allocation in an arena.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Allocation {
    /// The tenant.
    pub space: Space,
    /// Its location at home, and its colour.
    pub grant: Grant,
    /// Its home, if that is another server, which has lost it.
    pub home: Option<NodeId>,
    /// Its first page here.
    pub first_page: u64,
    /// Its length.
    pub pages: u32,
    /// The endpoint that created it.
    pub creator: Creator,
}

/// A range of incarnations of one endpoint.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Creators {
    /// Its node.
    pub node: NodeId,
    /// The first and the last incarnation.
    pub incarnations: RangeInclusive<u32>,
}

impl Creators {
    fn contain(&self, creator: Creator) -> bool {
        creator.node == self.node && self.incarnations.contains(&creator.incarnation)
    }
}

/// Contents that servers have lost, by their first generations.
pub type Lost = [(NodeId, ArenaGeneration)];

/// The allocations of a shard that an operator wants to list or free.
#[derive(Clone, Debug)]
pub struct Query {
    /// Allocations of this tenant.
    pub space: Space,
    /// Allocations of these creators; of any creator if there are none. Shared, because shards do not allocate.
    pub creators: Arc<[Creators]>,
    /// From this page on, by the numbers of [`bluebridge_wire::Location::page`].
    pub from_page: u64,
    /// The most allocations to return, and never more than [`FOUND_MAX`]; 0 returns the usage
    /// alone.
    pub limit: u32,
    /// Whether to free them; those that are leased or wait for a CONFIRM stay.
    pub frees: bool,
    /// Contents that other servers have lost, by their first generations: also allocations of these of which the first
    /// page is here.
    pub lost: Arc<Lost>,
}

impl Query {
    /// A query for the usage of a space alone.
    #[must_use]
    pub fn usage(space: Space) -> Self {
        let (creators, lost) = (Arc::default(), Arc::default());
        Self { space, creators, from_page: 0, limit: 0, frees: false, lost }
    }
}

/// An allocation that was found or freed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Found {
    /// The allocation.
    pub allocation: Allocation,
    /// Whether pages of it are leased.
    pub is_leased: bool,
    /// Whether it waits for its CONFIRM.
    pub is_provisional: bool,
    /// `None` if it was not to be freed; else whether it was freed, or why not.
    pub freed: Option<Result<(), Status>>,
}

/// The result of a query in one shard.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    /// In the order of their addresses.
    pub found: Vec<Found>,
    /// The page to continue from; `None` at the end.
    pub next_page: Option<u64>,
    /// The usage of the space in this shard.
    pub usage: StoreUsage,
}

/// A query of another thread to a shard, and its progress.
#[derive(Clone, Debug)]
pub struct Survey {
    query: Query,
    next_page: u64,
    findings: Findings,
    reply: SyncSender<Findings>,
}

impl Survey {
    /// A survey for `query`. The findings are sent to `reply`, which must have room for them.
    #[must_use]
    pub fn new(query: Query, reply: SyncSender<Findings>) -> Self {
        let limit = query.limit.min(FOUND_MAX);
        // Allocated here, because the shard's thread must not allocate.
        let found = Vec::with_capacity(limit as usize);
        let next_page = query.from_page;
        let query = Query { limit, ..query };
        Self { query, next_page, findings: Findings { found, ..Findings::default() }, reply }
    }

    /// Does one step. Returns whether the survey is complete; then the findings are sent.
    ///
    /// Replies that wait to be sent may refer to pages, so they must be sent before pages are
    /// freed.
    pub(crate) fn step<S: Store>(
        &mut self,
        now: Timestamp,
        responder: &mut Responder,
        store: &mut S,
    ) -> bool {
        let turn = match (self.query.limit, self.query.frees) {
            (0, _) => Turn::Done(None),
            (_, true) => self.free(now, responder, store),
            (_, false) => self.list(now, responder, store),
        };
        let Turn::Done(next_page) = turn else { return false };
        self.findings.next_page = next_page;
        self.findings.usage = store.usage(self.query.space);
        // The receiver may have timed out.
        let _ = self.reply.try_send(core::mem::take(&mut self.findings));
        true
    }

    /// Lists some more allocations.
    fn list<S: Store>(&mut self, now: Timestamp, responder: &Responder, store: &S) -> Turn {
        let Self { query, findings, .. } = self;
        // Whether an allocation is leased is checked page by page.
        let mut budget = STEP_PAGES;
        let next = store.survey(self.next_page, STEP_PAGES, &query.lost, &mut |allocation| {
            if !is_wanted(query, &allocation) {
                return true;
            }
            if findings.found.len() >= query.limit as usize || budget == 0 {
                return false;
            }
            budget = budget.saturating_sub(allocation.pages);
            findings.found.push(found(allocation, now, responder));
            true
        });
        self.turn(next)
    }

    /// Frees some more allocations.
    fn free<S: Store>(&mut self, now: Timestamp, responder: &mut Responder, store: &mut S) -> Turn {
        let mut freed_pages = 0_u32;
        for _ in 0..STEP_FREED {
            if self.findings.found.len() >= self.query.limit as usize {
                return Turn::Done(Some(self.next_page));
            }
            let mut candidate = None;
            let query = &self.query;
            let budget = STEP_PAGES / STEP_FREED;
            let next = store.survey(self.next_page, budget, &query.lost, &mut |allocation| {
                candidate = is_wanted(query, &allocation).then_some(allocation);
                candidate.is_none()
            });
            let Some(allocation) = candidate else { return self.turn(next) };
            let noted = found(allocation, now, responder);
            let (space, grant) = (allocation.space, allocation.grant);
            let purged = match allocation.home {
                None => responder.purge(now, space, grant, store),
                Some(home) => {
                    let at = (home, allocation.first_page);
                    Ok(responder.purge_orphan(now, at, (space, grant), store))
                }
            };
            // Waiting replies must be sent first.
            let Ok(purged) = purged else { break };
            self.findings.found.push(Found { freed: Some(purged.map(|_| ())), ..noted });
            let pages = allocation.pages;
            self.next_page = match allocation.home {
                None => allocation.first_page + u64::from(pages),
                // The rest of it may be anywhere.
                Some(_) => allocation.first_page + 1,
            };
            freed_pages = freed_pages.saturating_add(pages);
            if freed_pages >= STEP_FREED_PAGES {
                break;
            }
        }
        Turn::Over
    }

    fn turn(&mut self, next: Option<u64>) -> Turn {
        match next {
            None => Turn::Done(None),
            Some(next) if self.findings.found.len() >= self.query.limit as usize => {
                Turn::Done(Some(next))
            }
            Some(next) => {
                self.next_page = next;
                Turn::Over
            }
        }
    }
}

/// How a step ended.
enum Turn {
    /// More pages must be visited.
    Over,
    /// It was the last step; the page from which another query may continue.
    Done(Option<u64>),
}

fn is_wanted(query: &Query, allocation: &Allocation) -> bool {
    let creators = &query.creators;
    allocation.space == query.space
        && (creators.is_empty() || creators.iter().any(|it| it.contain(allocation.creator)))
}

fn found(allocation: Allocation, now: Timestamp, responder: &Responder) -> Found {
    let first = allocation.first_page;
    let end = first + u64::from(allocation.pages);
    let end_of_line = first - first % LINE_PAGES as u64 + LINE_PAGES as u64;
    let pages = first..if allocation.home.is_some() { end.min(end_of_line) } else { end };
    Found {
        allocation,
        is_leased: responder.are_leased(now, pages),
        is_provisional: responder.is_provisional(first),
        freed: None,
    }
}
