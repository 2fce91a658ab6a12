//! Sessions: the requesters, the numbers that arrived, and their recorded replies.

use core::time::Duration;

use arrayvec::ArrayVec;
use bluebridge_wire::{NodeId, SESSION_WINDOW, Space};

use super::{
    record::{Progress, Record},
    session_ids::SessionIds,
    session_index::SessionIndex,
    shares::Holder,
};
use crate::Timestamp;

const WINDOW: usize = 512;

const _: () = assert!(WINDOW as u64 == SESSION_WINDOW);

/// The endpoint that sent a request.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub(super) struct RequesterId {
    pub(super) space: Space,
    pub(super) node: NodeId,
    pub(super) incarnation: u32,
}

impl RequesterId {
    pub(super) fn is_node_of(&self, other: &Self) -> bool {
        self.holder() == other.holder()
    }

    pub(super) const fn holder(&self) -> Holder {
        (self.space, self.node)
    }
}

#[derive(Default)]
pub(super) struct Session {
    /// 0 while the slot is free; its low 16 bits are the slot.
    id: u64,
    pub(super) requester: RequesterId,
    pub(super) nonce: u64,
    pub(super) low_water: u64,
    pub(super) last_seen: Timestamp,
    pub(super) piece_bytes: u16,
    /// Pages of reply data that the requester can receive at once.
    pub(super) takes_pages: u16,
    /// Records at or above low water that are not fresh.
    record_count: u16,
    /// Allocated at the slot's first use and kept, so that its memory is bounded and reused.
    window: Vec<Record>,
}

impl Session {
    pub(super) const fn id(&self) -> u64 {
        self.id
    }

    const fn is_open(&self) -> bool {
        self.id != 0
    }

    pub(super) fn record(&self, sequence: u64) -> Record {
        self.window.get(slot_of(sequence)).copied().unwrap_or(Record::FRESH)
    }

    /// Keeps `record` until low water passes `sequence`, which lies in the window.
    pub(super) fn keep(&mut self, sequence: u64, record: Record) {
        if let Some(slot) = self.window.get_mut(slot_of(sequence)) {
            let was_fresh = slot.progress == Progress::Fresh;
            *slot = record;
            self.record_count += u16::from(was_fresh);
        }
    }

    /// Removes the record of `sequence`, as if the request never arrived.
    pub(super) fn forget(&mut self, sequence: u64) {
        if let Some(slot) = self.window.get_mut(slot_of(sequence)) {
            let was_fresh = slot.progress == Progress::Fresh;
            *slot = Record::FRESH;
            self.record_count = self.record_count.saturating_sub(u16::from(!was_fresh));
        }
    }

    /// Raises low water towards `to` and returns the first record on the way that is not fresh; to
    /// be called until there is none.
    pub(super) fn forget_below(&mut self, to: u64) -> Option<Record> {
        let window_end = self.low_water.saturating_add(SESSION_WINDOW);
        while self.low_water < to {
            // Without records in between, low water is set to `to` at once.
            if self.record_count == 0 || self.low_water >= window_end {
                (self.low_water, self.record_count) = (to, 0);
                return None;
            }
            let slot = self.window.get_mut(slot_of(self.low_water))?;
            let was = core::mem::replace(slot, Record::FRESH);
            self.low_water += 1;
            if was.progress != Progress::Fresh {
                self.record_count = self.record_count.saturating_sub(1);
                return Some(was);
            }
        }
        None
    }
}

#[allow(clippy::cast_possible_truncation, reason = "the remainder is below 512")]
const fn slot_of(sequence: u64) -> usize {
    (sequence % SESSION_WINDOW) as usize
}

/// A bounded table of sessions, found by the low bits of their ids.
pub(super) struct SessionTable {
    sessions: Vec<Session>,
    vacant: Vec<u16>,
    index: SessionIndex,
    node_limit: usize,
    /// After this time without a request, no recorded reply of the session is requested again.
    reply_retention: Duration,
    ids: SessionIds,
}

/// A node with this many sessions gets no more from the last quarter of the table, which is
/// reserved for other nodes.
const LIGHT_NODE_SESSIONS: usize = 8;

/// The most own sessions that are examined to find one to evict for the node's next session.
const OWN_SEARCH_LIMIT: usize = 64;

/// Why a session cannot be opened now.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Full;

/// Whose session is evicted.
enum Evicts {
    /// One of the same node.
    Own,
    /// One of a node that has more sessions than this.
    OfNodesWithMore(usize),
}

/// The slot for a new session.
pub(super) enum Place {
    /// A free slot.
    Vacant,
    /// The slot of a session that must be ended first.
    Instead(u16),
}

impl SessionTable {
    pub(super) fn new(limit: u16, node_limit: u16, idle: Duration, seed: u64) -> Self {
        let sessions = (0..limit).map(|_| Session::default()).collect();
        let node_limit = usize::from(node_limit);
        Self {
            sessions,
            vacant: (0..limit).rev().collect(),
            index: SessionIndex::new(limit),
            node_limit,
            // Requesters repeat in a new session only requests that they started within three
            // quarters of the idle time (section 2); another twentieth is for the difference of
            // clocks.
            reply_retention: idle / 20 * 16,
            ids: SessionIds::new(seed),
        }
    }

    pub(super) fn count(&self) -> usize {
        self.sessions.len() - self.vacant.len()
    }

    pub(super) fn slot(&self, id: u64) -> Option<u16> {
        let [.., high, low] = id.to_be_bytes();
        let slot = u16::from_be_bytes([high, low]);
        let session = self.sessions.get(usize::from(slot))?;
        (session.is_open() && session.id == id).then_some(slot)
    }

    pub(super) fn at(&mut self, slot: u16) -> &mut Session {
        &mut self.sessions[usize::from(slot)]
    }

    /// Records that an open session was seen, and returns it.
    pub(super) fn touch(&mut self, now: Timestamp, slot: u16) -> &mut Session {
        self.index.touch(slot);
        let session = self.at(slot);
        session.last_seen = now;
        session
    }

    /// Records that a direct reader saw an open session at `last_seen`; returns whether that was later than known.
    pub(super) fn see(&mut self, slot: u16, last_seen: Timestamp) -> bool {
        let session = self.at(slot);
        if last_seen <= session.last_seen {
            return false;
        }
        session.last_seen = last_seen;
        let Self { sessions, index, .. } = self;
        index.touch_before(slot, |other| sessions[usize::from(other)].last_seen > last_seen);
        true
    }

    /// Whether an id is an open session of a node.
    pub(super) fn is_open(&self, id: u64, holder: Holder) -> bool {
        let slot = self.slot(id).and_then(|slot| self.sessions.get(usize::from(slot)));
        slot.is_some_and(|session| session.requester.holder() == holder)
    }

    /// The session that the same OPEN opened before.
    pub(super) fn opened_by(&self, requester: &RequesterId, nonce: u64) -> Option<u16> {
        self.index.opened_by(requester, nonce)
    }

    /// A session of an older incarnation of the requester's node.
    pub(super) fn superseded_by(&self, requester: &RequesterId) -> Option<u16> {
        let is_older = |&slot: &u16| {
            self.sessions[usize::from(slot)].requester.incarnation < requester.incarnation
        };
        self.index.of_node(requester.holder()).find(is_older)
    }

    pub(super) fn has_node_of(&self, requester: &RequesterId) -> bool {
        self.index.count_of(requester.holder()) > 0
    }

    /// Whether a slot has a session.
    pub(super) fn is_occupied(&self, slot: u16) -> bool {
        self.sessions.get(usize::from(slot)).is_some_and(Session::is_open)
    }

    /// Whether a slot has a session that was not seen for `idle`.
    pub(super) fn is_idle_at(&self, slot: u16, now: Timestamp, idle: Duration) -> bool {
        let session = self.sessions.get(usize::from(slot));
        session.is_some_and(|session| session.is_open() && now - session.last_seen >= idle)
    }

    /// A session that was not seen for `idle`.
    pub(super) fn idle_at(&self, now: Timestamp, idle: Duration) -> Option<u16> {
        self.find(|session| now - session.last_seen >= idle)
    }

    pub(super) fn oldest_last_seen(&self) -> Option<Timestamp> {
        self.open().map(|(_, session)| session.last_seen).min()
    }

    /// The slot for a session of `requester`. A session with recorded replies is not evicted while
    /// its requester may still request them. Of the other sessions, the least recently seen one of
    /// the node with most sessions is evicted, but none of a node that has no more sessions than
    /// the requester's.
    pub(super) fn place(&self, now: Timestamp, requester: &RequesterId) -> Result<Place, Full> {
        let Some(whose) = self.evicts(requester) else { return Ok(Place::Vacant) };
        let may_go = |&slot: &u16| {
            let session = &self.sessions[usize::from(slot)];
            session.record_count == 0 || now - session.last_seen >= self.reply_retention
        };
        let found = match whose {
            Evicts::Own => self.own_candidates(requester).find(may_go),
            Evicts::OfNodesWithMore(count) => self.index.of_nodes_with_more(count).find(may_go),
        };
        found.map(Place::Instead).ok_or(Full)
    }

    /// The sessions of which [`Self::place`] evicts the first one that it may; none if there is a free slot.
    pub(super) fn candidates(&self, requester: &RequesterId) -> ArrayVec<u16, OWN_SEARCH_LIMIT> {
        let mut candidates = ArrayVec::new();
        match self.evicts(requester) {
            None => {}
            Some(Evicts::Own) => candidates.extend(self.own_candidates(requester)),
            Some(Evicts::OfNodesWithMore(count)) => {
                candidates.extend(self.index.of_nodes_with_more(count).take(OWN_SEARCH_LIMIT));
            }
        }
        candidates
    }

    fn own_candidates(&self, requester: &RequesterId) -> impl Iterator<Item = u16> {
        self.index.of_node(requester.holder()).take(OWN_SEARCH_LIMIT)
    }

    /// Whose session must end for a new one of `requester`; `None` if there is a free slot for it.
    fn evicts(&self, requester: &RequesterId) -> Option<Evicts> {
        let own_count = self.index.count_of(requester.holder());
        let is_modest = own_count < LIGHT_NODE_SESSIONS;
        let may_take = is_modest || self.vacant.len() > self.sessions.len() / 4;
        if own_count < self.node_limit && may_take && !self.vacant.is_empty() {
            return None;
        }
        let own_only = own_count >= self.node_limit || !(may_take || self.vacant.is_empty());
        Some(if own_only { Evicts::Own } else { Evicts::OfNodesWithMore(own_count) })
    }

    /// Opens a session in a vacant slot.
    pub(super) fn open_at(
        &mut self,
        now: Timestamp,
        requester: RequesterId,
        nonce: u64,
    ) -> Result<u16, Full> {
        let slot = self.vacant.pop().ok_or(Full)?;
        let id = self.ids.draw(slot);
        let session = self.at(slot);
        if session.window.is_empty() {
            session.window = vec![Record::FRESH; WINDOW];
        }
        // All records of the slot's last session were removed one by one, so that an OPEN need not
        // clear 20 KiB: no old record remains.
        debug_assert!(session.window.iter().all(|record| record.progress == Progress::Fresh));
        (session.id, session.requester, session.nonce) = (id, requester, nonce);
        (session.low_water, session.last_seen, session.record_count) = (1, now, 0);
        self.index.insert(slot, requester, nonce);
        Ok(slot)
    }

    /// Frees the slot of a session whose records were all removed.
    pub(super) fn close(&mut self, slot: u16) {
        let session = self.at(slot);
        debug_assert!(session.record_count == 0, "records are forgotten first");
        session.id = 0;
        let (requester, nonce) = (session.requester, session.nonce);
        self.index.remove(slot, requester, nonce);
        self.vacant.push(slot);
    }

    fn open(&self) -> impl Iterator<Item = (u16, &Session)> {
        (0..).zip(&self.sessions).filter(|(_, session)| session.is_open())
    }

    fn find(&self, matches: impl Fn(&Session) -> bool) -> Option<u16> {
        self.open().find(|(_, session)| matches(session)).map(|(slot, _)| slot)
    }
}

/// The highest incarnation of every node, which fences lower ones.
pub(super) struct Incarnations {
    /// Per served space, allocated at its first OPEN: a fence by node, 512 KiB.
    spaces: Vec<(Space, Vec<Fence>)>,
}

/// A node's highest incarnation.
#[derive(Clone, Copy, Debug, Default)]
struct Fence {
    /// 0 if the node was never seen, or its incarnation was dropped.
    incarnation: u32,
    /// When the node was last seen, as far as known, in units of [`FENCE_UNIT_NANOS`].
    last_seen: u32,
}

/// What an incarnation is to those that were seen before.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Raised {
    /// Not higher.
    No,
    /// The first one of its node.
    First,
    /// Higher than an earlier one of its node.
    Higher,
}

/// About a second; 2^32 of them are 146 years.
const FENCE_UNIT_NANOS: u64 = 1 << 30;

impl Incarnations {
    pub(super) fn new(spaces: &[Space]) -> Self {
        let mut spaces: Vec<_> = spaces.iter().map(|&space| (space, Vec::new())).collect();
        spaces.sort_unstable_by_key(|(space, _)| *space);
        Self { spaces }
    }

    pub(super) fn serves(&self, space: Space) -> bool {
        self.index(space).is_some()
    }

    /// The highest incarnations of the nodes of a space that were seen.
    pub(super) fn fences(&self, space: Space) -> impl Iterator<Item = bluebridge_wire::Fence> {
        let nodes = self.index(space).map_or(&[][..], |index| &self.spaces[index].1);
        let known = (0..=u16::MAX).zip(nodes).filter(|(_, fence)| fence.incarnation != 0);
        known.map(|(node, fence)| bluebridge_wire::Fence {
            node: NodeId(node),
            incarnation: fence.incarnation,
        })
    }

    /// The highest incarnation of the requester's node; 0 if it was never seen.
    pub(super) fn highest(&self, requester: &RequesterId) -> u32 {
        let node = usize::from(requester.node.0);
        self.index(requester.space)
            .and_then(|index| self.spaces[index].1.get(node))
            .map_or(0, |fence| fence.incarnation)
    }

    /// Records an incarnation.
    pub(super) fn raise(&mut self, requester: &RequesterId) -> Raised {
        let Some(index) = self.index(requester.space) else { return Raised::No };
        let nodes = &mut self.spaces[index].1;
        if nodes.is_empty() {
            nodes.resize(usize::from(u16::MAX) + 1, Fence::default());
        }
        let highest = &mut nodes[usize::from(requester.node.0)].incarnation;
        let is_higher = requester.incarnation > *highest;
        let was_known = *highest != 0;
        *highest = (*highest).max(requester.incarnation);
        match (is_higher, was_known) {
            (false, _) => Raised::No,
            (true, false) => Raised::First,
            (true, true) => Raised::Higher,
        }
    }

    /// Records when the requester's node was last seen.
    pub(super) fn note(&mut self, requester: &RequesterId, last_seen: Timestamp) {
        if let Some(fence) = self.fence(requester) {
            let last_seen = u32::try_from(last_seen.as_nanos() / FENCE_UNIT_NANOS);
            fence.last_seen = fence.last_seen.max(last_seen.unwrap_or(u32::MAX));
        }
    }

    /// The least time for which the requester's node was not seen; sessions of the node may have
    /// been seen later.
    pub(super) fn unseen_for(&mut self, requester: &RequesterId, now: Timestamp) -> Duration {
        let Some(fence) = self.fence(requester) else { return Duration::ZERO };
        let seen_before = (u64::from(fence.last_seen) + 1) * FENCE_UNIT_NANOS;
        Duration::from_nanos(now.as_nanos().saturating_sub(seen_before))
    }

    pub(super) fn forget(&mut self, requester: &RequesterId) {
        if let Some(fence) = self.fence(requester) {
            fence.incarnation = 0;
        }
    }

    fn fence(&mut self, requester: &RequesterId) -> Option<&mut Fence> {
        let index = self.index(requester.space)?;
        self.spaces[index].1.get_mut(usize::from(requester.node.0))
    }

    fn index(&self, space: Space) -> Option<usize> {
        self.spaces.binary_search_by_key(&space, |(space, _)| *space).ok()
    }
}
