//! Sessions that are given up: their servers are told by a CLOSE that nobody waits for.

use bluebridge_wire::{Command, Header};

use super::{
    Event, NONE, Origin, Requester, SealedRequest, Server, State,
    peer::Peer,
    transmit::{Part, endpoint},
};

/// A session whose requester is gone.
#[derive(Clone, Copy, Debug)]
pub(super) struct Leave {
    server: Server,
    session: u64,
    sequence: u64,
}

impl Leave {
    /// Of a session that is open, and in which nothing is outstanding.
    pub(super) fn of(peer: &Peer) -> Option<Self> {
        let is_open = peer.state == State::Open && peer.is_quiet();
        is_open.then_some(Self {
            server: peer.server,
            session: peer.session,
            sequence: peer.next_sequence,
        })
    }
}

impl Requester {
    /// Gives all operations and all sessions up, as [`Self::cancel_all`] does with operations
    /// alone. What [`Self::poll_transmit`] gives then are CLOSEs, one for each session; they are
    /// not repeated, and a server that misses its own waits until the session idles out.
    pub fn leave(&mut self) {
        self.cancel_all();
        for peer in 0..u16::try_from(self.peers.count()).unwrap_or(NONE) {
            let leave = Leave::of(&self.peers[peer]);
            let entry = &mut self.peers[peer];
            (entry.state, entry.session, entry.nonce) = (State::Closed, 0, 0);
            entry.holding = false;
            self.note_leave(leave);
        }
    }

    /// Takes note of a session to be closed; one too many is left to idle out.
    pub(super) fn note_leave(&mut self, leave: Option<Leave>) {
        if let Some(leave) = leave
            && self.leaving.len() < self.leaving.capacity()
        {
            self.leaving.push_back(leave);
        }
    }

    pub(super) fn transmit_leave<'b>(&mut self) -> Option<SealedRequest<'b>> {
        let Leave { server, session, sequence } = self.leaving.pop_front()?;
        self.counters.count(Event::SessionLeave);
        self.counters.count(Event::Transmit);
        let part = Part {
            target: endpoint(self.config.space, server.node, server.shard, 0),
            node: server.node,
            command: Command::Close,
            home: false,
            header: Header { session, sequence, ..Header::default() },
            operands: [0; 2],
            operand_count: 0,
            data: &[],
        };
        Some(self.emit(Origin::Leave, part))
    }
}
