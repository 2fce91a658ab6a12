//! CREATE and ALLOC_WRITE to any memory node: sent in no session, then confirmed in one.

use bluebridge_wire::{Datagram, Pointer, Status};

use super::{Event, Failure, NONE, Place, Requester, Server, Stage, receive::refusal};
use crate::{Timestamp, pieces::Cut};

/// How often another node is tried when one has no room.
const OTHER_NODES_MAX: u8 = 3;

impl Requester {
    /// Sends the request to any memory node, with a new nonce.
    pub(super) fn start_anywhere(&mut self, index: u16) {
        let entropy = self.random.next();
        // The low bits of the nonce identify the operation.
        let nonce = (self.random.next() & !0xffff) | u64::from(index);
        let piece = usize::from(self.config.piece_bytes);
        let op = &mut self.ops[index];
        op.stage = Stage::Anywhere { entropy };
        op.route.peer = NONE;
        op.run.cut = op.run.cut.with_piece_bytes(piece).unwrap_or(Cut::ONE);
        op.request.cost = 0;
        op.begin_request(nonce);
        self.make_ready(index);
    }

    /// A reply to a request in no session.
    pub(super) fn handle_anywhere_reply(&mut self, now: Timestamp, reply: &Datagram<'_>) {
        let [.., high, low] = reply.header.sequence.to_be_bytes();
        let index = u16::from_be_bytes([high, low]);
        let Some(op) = self.ops.at(index) else {
            self.counters.count(Event::ReplyStale);
            return;
        };
        if !matches!(op.stage, Stage::Anywhere { .. })
            || op.request.sequence != reply.header.sequence
            || reply.command().command() != Some(op.command())
        {
            self.counters.count(Event::ReplyStale);
            return;
        }
        let Some(status) =
            Status::from_code(reply.from.tag).filter(|_| reply.from.node.is_unicast())
        else {
            self.counters.count(Event::ReplyUntrusted);
            return;
        };
        self.counters.count_status(status);
        let attempt = reply.header.flags.attempt();
        if op.request.attempt == attempt && attempt < super::transmit::ATTEMPT_MAX {
            self.anywhere_trip.sample(now.saturating_since(op.request.last_sent));
        }
        match status {
            Status::Ok => self.confirm(now, index, reply),
            Status::Incomplete => self.repair_train(index, reply),
            Status::Overloaded => self.back_off(now, index),
            Status::OutOfMemory | Status::NoAuthority | Status::ShuttingDown
                if op.route.hops < OTHER_NODES_MAX =>
            {
                self.ops[index].route.hops += 1;
                self.detach(index);
                self.ops[index].link.place = Place::Flight;
                self.start_anywhere(index);
            }
            _ => self.fail(index, refusal(status, reply)),
        }
    }

    /// Pages were allocated provisionally: confirms them.
    fn confirm(&mut self, now: Timestamp, index: u16, reply: &Datagram<'_>) {
        let pointer = Pointer::from_ipv6(reply.header.target).ok().filter(|pointer| {
            pointer.node == reply.from.node
                && pointer.space == self.config.space
                && pointer.location.is_page_aligned()
        });
        let Some(pointer) = pointer else {
            self.counters.count(Event::ReplyViolation);
            self.fail(index, Failure::Violation { node: reply.from.node });
            return;
        };
        self.detach(index);
        let Some(peer) = self.peer(Server::of(pointer)) else {
            self.fail(index, Failure::TooManyServers { node: pointer.node });
            return;
        };
        self.peers[peer].op_count += 1;
        let op = &mut self.ops[index];
        op.route.peer = peer;
        op.stage = Stage::Confirm(pointer);
        op.request.sequence = 0;
        op.request.sent_count = 0;
        op.request.overloaded = false;
        self.enqueue(now, index);
    }

    /// The pages were freed before CONFIRM arrived: starts again.
    pub(super) fn confirm_late(&mut self, index: u16) {
        self.counters.count(Event::ConfirmLate);
        self.retire_number(index);
        self.leave_peer(index);
        self.start_anywhere(index);
    }
}
