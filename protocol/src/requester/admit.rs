//! Numbers, window and credit: which operations may be sent now.

use bluebridge_wire::Pointer;

use super::{Event, NONE, Operation, Output, Place, Requester, Stage, State};
use crate::{Timestamp, pieces::Cut};

impl Requester {
    /// Queues an operation without a number behind those that wait for its peer.
    pub(super) fn enqueue(&mut self, now: Timestamp, index: u16) {
        let op = &mut self.ops[index];
        op.link.place = Place::Waiting;
        let peer = op.route.peer;
        self.ops.push_back(&mut self.peers[peer].waiting, index);
        self.admit(now, peer);
    }

    /// Assigns numbers to a peer's waiting operations as far as session, window and credit allow.
    pub(super) fn admit(&mut self, now: Timestamp, peer: u16) {
        loop {
            let index = self.peers[peer].waiting.head;
            if index == NONE {
                return;
            }
            let closes = matches!(self.ops[index].operation, Operation::Close { .. });
            if closes && self.peers[peer].state == State::Closed {
                self.finish(index, Ok(Output::Done));
                continue;
            }
            if self.peers[peer].state != State::Open {
                self.open(now, peer);
                return;
            }
            if self.peers[peer].closing {
                return;
            }
            self.cut_for_session(index);
            if !self.has_room(peer, index) {
                if self.leave_queue(now, peer) {
                    continue;
                }
                self.counters.count(Event::Throttle);
                self.mark_backpressured(peer);
                return;
            }
            self.ops.unlink(&mut self.peers[peer].waiting, index);
            self.assign(now, peer, index);
        }
    }

    /// Retries the peers that wait for window or credit, if any was released since.
    pub(super) fn admit_backpressured(&mut self, now: Timestamp) {
        if !core::mem::take(&mut self.freed) {
            return;
        }
        for _ in 0..self.backpressured.len() {
            let Some(peer) = self.backpressured.pop_front() else { return };
            self.peers[peer].backpressured = false;
            self.admit(now, peer);
        }
    }

    pub(super) fn mark_backpressured(&mut self, peer: u16) {
        if !core::mem::replace(&mut self.peers[peer].backpressured, true) {
            self.backpressured.push_back(peer);
        }
    }

    fn has_room(&self, peer: u16, index: u16) -> bool {
        let cost = u32::from(self.ops[index].request.cost);
        let peer = &self.peers[peer];
        if let Operation::Close { .. } = self.ops[index].operation {
            return peer.is_quiet();
        }
        // An operation that costs more than all credit may run alone.
        let session =
            peer.outstanding_pages == 0 || peer.outstanding_pages + cost <= u32::from(peer.credit);
        let all = self.outstanding_pages == 0
            || self.outstanding_pages + cost <= u32::from(self.config.credit_pages);
        session && all && peer.has_window()
    }

    fn assign(&mut self, now: Timestamp, peer: u16, index: u16) {
        let sequence = self.peers[peer].number(index);
        let server = self.peers[peer].server.node;
        let elsewhere = self.ops[index].pointer().filter(|pointer| pointer.node != server);
        let avoids = elsewhere.is_some_and(|pointer| self.moved.avoids_pointer(now, pointer));
        // The pointer leads to who serves the page, and only the home frees the allocation.
        let frees = matches!(self.ops[index].operation, Operation::Delete { .. });
        let is_led_on =
            |pointer: Pointer| pointer.node == server && self.moved.find(pointer).is_some();
        self.ops[index].route.avoids_pointer =
            avoids || frees && self.ops[index].pointer().is_some_and(is_led_on);
        let op = &mut self.ops[index];
        op.begin_request(sequence);
        let cost = u32::from(op.request.cost);
        let closing = matches!(op.operation, Operation::Close { .. });
        self.peers[peer].outstanding_pages += cost;
        self.peers[peer].closing |= closing;
        self.outstanding_pages += cost;
        self.make_ready(index);
    }

    /// Appends an operation to the ready list, unless it is in it.
    pub(super) fn make_ready(&mut self, index: u16) {
        if self.ops[index].link.place != Place::Ready {
            self.ops[index].link.place = Place::Ready;
            self.ops.push_back(&mut self.ready, index);
        }
    }

    /// Removes an operation from the list that it is in.
    pub(super) fn detach(&mut self, index: u16) {
        match self.ops[index].link.place {
            Place::Ready => self.ops.unlink(&mut self.ready, index),
            Place::Waiting => {
                let peer = self.ops[index].route.peer;
                self.ops.unlink(&mut self.peers[peer].waiting, index);
            }
            Place::Flight | Place::Free | Place::Held | Place::Pause => {}
        }
    }

    /// Makes all pages without a final status the run; or only the first of them, one page at a
    /// time.
    pub(super) fn set_run(&mut self, index: u16) {
        let piece = usize::from(self.config.piece_bytes);
        let op = &mut self.ops[index];
        let Some((pointer, length)) = op.range() else { return };
        let Some(whole) = Cut::new(pointer.location.in_page(), length as usize, piece) else {
            return;
        };
        let first = op.pages.pending.trailing_zeros() as usize;
        let pages = if op.pages.one_by_one {
            1
        } else {
            (op.pages.pending >> first).trailing_ones() as usize
        };
        let last = first + pages.max(1) - 1;
        let (start, end) = (whole.page_range(first).start, whole.page_range(last).end);
        let in_page = if first == 0 { pointer.location.in_page() } else { 0 };
        if let Some(cut) = Cut::new(in_page, end.saturating_sub(start), piece) {
            op.run.cut = cut;
            op.run.start = u16::try_from(start).unwrap_or(0);
            op.run.first_page = u8::try_from(first).unwrap_or(0);
        }
    }

    /// Divides the run into the session's pieces, and computes its cost.
    fn cut_for_session(&mut self, index: u16) {
        let op = &mut self.ops[index];
        let piece_bytes = self.peers[op.route.peer].piece_bytes;
        op.run.cut = op.run.cut.with_piece_bytes(usize::from(piece_bytes)).unwrap_or(op.run.cut);
        op.request.cost = match op.stage {
            Stage::Confirm(_) => 1,
            _ if matches!(
                op.operation,
                Operation::Abort { .. }
                    | Operation::Keep { .. }
                    | Operation::Renew { .. }
                    | Operation::Take { .. }
            ) =>
            {
                1
            }
            Stage::Anywhere { .. } | Stage::Direct => {
                u8::try_from(op.run_page_count()).unwrap_or(1)
            }
        };
    }
}
