//! The other end of a session, and the table of all of them.

use bluebridge_wire::{ArenaGeneration, NodeId, SESSION_WINDOW};

use super::{
    operation::Server,
    rtt::RoundTrip,
    slab::{List, NONE},
};
use crate::Timestamp;

#[allow(clippy::cast_possible_truncation, reason = "512")]
const RING: usize = SESSION_WINDOW as usize;

/// The state of a session.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum State {
    Closed,
    /// OPEN is sent, or waits for its timer.
    Opening,
    Open,
}

/// One server, and the session with it.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) server: Server,
    pub(super) state: State,
    /// The session that was issued last; 0 before the first.
    pub(super) session: u64,
    /// The server's incarnation and the first arena generation of its contents, from the reply to
    /// OPEN.
    pub(super) incarnation: u32,
    pub(super) generation: ArenaGeneration,
    /// The server's process with this incarnation served at this time of the own clock already,
    /// and no earlier one did any more; `None` if that is not known.
    pub(super) served_at: Option<(u32, Timestamp)>,
    /// How often OPEN was repeated because its reply may have been delayed.
    pub(super) open_doubts: u8,
    pub(super) piece_bytes: u16,
    /// The server also accepts requests for memory at its endpoint address.
    pub(super) at_endpoint: bool,
    /// Pages that may be outstanding, as the server's last reply said.
    pub(super) credit: u16,
    pub(super) outstanding_pages: u32,
    /// The lowest number whose outcome is not known, and the next number.
    pub(super) low_water: u64,
    pub(super) next_sequence: u64,
    pub(super) nonce: u64,
    /// When OPEN is due (again), and when it was sent.
    pub(super) timer: Timestamp,
    pub(super) open_sent: Option<Timestamp>,
    pub(super) open_attempt: u8,
    pub(super) open_pauses: u8,
    /// Sessions in a row that were lost before the first reply in them.
    pub(super) failed_sessions: u8,
    /// OPEN is to be sent now.
    pub(super) open_due: bool,
    /// CLOSE is outstanding.
    pub(super) closing: bool,
    /// In the queue of peers that wait for credit.
    pub(super) backpressured: bool,
    /// Operations of a lost session wait for a new one.
    pub(super) holding: bool,
    /// Another node that replied to OPEN with WRONG_NODE.
    pub(super) misrouted: Option<NodeId>,
    /// When the last reply came; `None` if never.
    pub(super) last_seen: Option<Timestamp>,
    /// Operations that belong to it.
    pub(super) op_count: u32,
    pub(super) round_trip: RoundTrip,
    pub(super) waiting: List,
    ring: Box<[u16; RING]>,
}

impl Peer {
    fn new(server: Server) -> Self {
        Self {
            server,
            state: State::Closed,
            session: 0,
            incarnation: 0,
            generation: ArenaGeneration::default(),
            served_at: None,
            open_doubts: 0,
            piece_bytes: 0,
            at_endpoint: false,
            credit: 0,
            outstanding_pages: 0,
            low_water: 1,
            next_sequence: 1,
            nonce: 0,
            timer: Timestamp::default(),
            open_sent: None,
            open_attempt: 0,
            open_pauses: 0,
            failed_sessions: 0,
            open_due: false,
            closing: false,
            backpressured: false,
            holding: false,
            misrouted: None,
            last_seen: None,
            op_count: 0,
            round_trip: RoundTrip::default(),
            waiting: List::EMPTY,
            ring: Box::new([NONE; RING]),
        }
    }

    /// Whether another number fits into the window.
    pub(super) const fn has_window(&self) -> bool {
        self.next_sequence < self.low_water + SESSION_WINDOW
    }

    /// Whether numbers are outstanding.
    pub(super) const fn is_quiet(&self) -> bool {
        self.low_water == self.next_sequence
    }

    /// Assigns the next number to an operation; the window must have room.
    pub(super) fn number(&mut self, op: u16) -> u64 {
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        self.ring[place(sequence)] = op;
        sequence
    }

    /// The operation that a number belongs to; [`NONE`] if its outcome is known, or no operation
    /// had it.
    pub(super) fn numbered(&self, sequence: u64) -> u16 {
        if sequence < self.low_water || sequence >= self.next_sequence {
            return NONE;
        }
        self.ring[place(sequence)]
    }

    /// Records that the outcome of a number is known.
    pub(super) fn retire(&mut self, sequence: u64) {
        self.ring[place(sequence)] = NONE;
        while self.low_water < self.next_sequence && self.ring[place(self.low_water)] == NONE {
            self.low_water += 1;
        }
    }

    /// Restarts the numbering for a new session; nothing may be outstanding.
    pub(super) const fn renumber(&mut self) {
        self.low_water = 1;
        self.next_sequence = 1;
    }
}

#[allow(clippy::cast_possible_truncation, reason = "below the ring's length")]
const fn place(sequence: u64) -> usize {
    (sequence % SESSION_WINDOW) as usize
}

/// All peers; found by server when an operation starts, by index afterwards.
#[derive(Debug)]
pub(super) struct Peers {
    peers: Vec<Peer>,
    limit: usize,
    /// Open addressing over the servers, with at least twice as many places as peers.
    index: Box<[u16]>,
    /// Open addressing over the sessions, with at least four times as many places as peers. An
    /// ended session stays until half of the table is used.
    sessions: Box<[u16]>,
    session_entries: usize,
}

impl Peers {
    pub(super) fn new(limit: u16) -> Self {
        let limit = usize::from(limit.clamp(1, NONE - 1));
        let index = vec![NONE; (limit * 2).next_power_of_two()].into_boxed_slice();
        let sessions = vec![NONE; (limit * 4).next_power_of_two()].into_boxed_slice();
        Self { peers: Vec::with_capacity(limit), limit, index, sessions, session_entries: 0 }
    }

    pub(super) const fn count(&self) -> usize {
        self.peers.len()
    }

    pub(super) fn at(&self, index: u16) -> Option<&Peer> {
        self.peers.get(usize::from(index))
    }

    pub(super) fn find(&self, server: Server) -> Option<u16> {
        let mut slot = self.slot(server);
        loop {
            let index = *self.index.get(slot)?;
            if self.at(index)?.server == server {
                return Some(index);
            }
            slot = (slot + 1) % self.index.len();
        }
    }

    /// The peer of a session; `node` decides if several servers issued the same number.
    pub(super) fn in_session(&self, session: u64, node: NodeId) -> Option<u16> {
        let mut other = None;
        let mut slot = spread(session, self.sessions.len());
        loop {
            let index = *self.sessions.get(slot)?;
            let Some(peer) = self.at(index) else { return other };
            if peer.session == session {
                if peer.server.node == node {
                    return Some(index);
                }
                other = Some(index);
            }
            slot = (slot + 1) % self.sessions.len();
        }
    }

    /// Enters a peer's session into the index.
    pub(super) fn enter_session(&mut self, peer: u16) {
        if self.session_entries * 2 >= self.sessions.len() {
            self.sessions.fill(NONE);
            self.session_entries = 0;
            for index in 0..u16::try_from(self.peers.len()).unwrap_or(NONE) {
                if index != peer && self[index].session != 0 {
                    self.place_session(index);
                }
            }
        }
        self.place_session(peer);
    }

    fn place_session(&mut self, peer: u16) {
        let mut slot = spread(self[peer].session, self.sessions.len());
        while self.sessions[slot] != NONE {
            slot = (slot + 1) % self.sessions.len();
        }
        self.sessions[slot] = peer;
        self.session_entries += 1;
    }

    /// The peer for a server; if there is none, a new one. When all places are taken, it replaces
    /// the peer that was last seen longest ago, which is returned.
    pub(super) fn find_or_insert(&mut self, server: Server) -> Option<(u16, Option<Peer>)> {
        if let Some(index) = self.find(server) {
            return Some((index, None));
        }
        if self.peers.len() < self.limit {
            let index = u16::try_from(self.peers.len()).ok()?;
            self.peers.push(Peer::new(server));
            self.enter(index);
            return Some((index, None));
        }
        let unused = self.peers.iter().enumerate();
        let unused = unused.filter(|(_, peer)| peer.op_count == 0 && !peer.open_due);
        let (oldest, _) = unused.min_by_key(|(_, peer)| peer.last_seen)?;
        let index = u16::try_from(oldest).ok()?;
        let evicted = core::mem::replace(&mut self[index], Peer::new(server));
        self.index.fill(NONE);
        for index in 0..u16::try_from(self.peers.len()).ok()? {
            self.enter(index);
        }
        Some((index, Some(evicted)))
    }

    fn enter(&mut self, index: u16) {
        let mut slot = self.slot(self[index].server);
        while self.index[slot] != NONE {
            slot = (slot + 1) % self.index.len();
        }
        self.index[slot] = index;
    }

    const fn slot(&self, server: Server) -> usize {
        spread(((server.node.0 as u64) << 8) | server.shard as u64, self.index.len())
    }
}

/// The first place to search for a key in a table whose length is a power of two.
#[allow(clippy::cast_possible_truncation, reason = "the product's upper bits are the slot")]
const fn spread(key: u64, length: usize) -> usize {
    (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize & (length - 1)
}

/// Indices come from operations and queues alone; indices from input go through [`Peers::at`].
impl core::ops::Index<u16> for Peers {
    type Output = Peer;

    fn index(&self, index: u16) -> &Peer {
        &self.peers[usize::from(index)]
    }
}

impl core::ops::IndexMut<u16> for Peers {
    fn index_mut(&mut self, index: u16) -> &mut Peer {
        &mut self.peers[usize::from(index)]
    }
}
