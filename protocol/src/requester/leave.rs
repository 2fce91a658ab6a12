//! Sessions that are abandoned: a CLOSE without confirmation notifies their servers.

use bluebridge_wire::{Command, Header};

use super::{
    Event, NONE, Origin, Requester, SealedRequest, Server, State,
    peer::Peer,
    transmit::{Part, endpoint},
};

/// A session that its requester abandoned.
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
    /// Gives all operations and all sessions up; [`Self::cancel_all`] does so with operations
    /// alone. [`Self::poll_transmit`] then returns CLOSEs, one for each session; they are not
    /// repeated, and a server that does not receive its own waits until the session idles out.
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

    /// Records a session to be closed; one that exceeds the queue is left to idle out.
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
        let target = endpoint(self.config.space, server.node, server.shard, 0);
        let part = Part {
            target,
            to: target,
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
