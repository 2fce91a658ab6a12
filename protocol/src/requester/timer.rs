//! Deadlines, retransmission, and the ends of back-offs.

use bluebridge_wire::Status;

use super::{Event, Failure, Place, Queue, Requester, Stage, State, progress::SILENT_TIME};
use crate::Timestamp;

impl Requester {
    /// Ends operations whose deadlines passed by `now`, and retransmits requests that are due.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        if now < self.next_timeout || self.ops.live() == 0 {
            return;
        }
        self.next_timeout = Timestamp::MAX;
        for index in 0..self.ops.slots() {
            let Some(op) = self.ops.at(index) else { continue };
            let (deadline, timer, place) = (op.deadline, op.timer, op.link.place);
            let timed = matches!(place, Place::Flight | Place::Pause);
            if deadline <= now {
                self.expire(index);
                continue;
            }
            self.arm(deadline);
            if !timed {
                continue;
            }
            if timer > now {
                self.arm(timer);
            } else if place == Place::Pause {
                self.wake(now, index);
            } else {
                self.time_out(now, index);
            }
        }
        self.time_out_opens(now);
        self.admit_backpressured(now);
    }

    /// Ends all operations now, each as if its deadline had passed: for a requester whose endpoint
    /// knows that no reply will arrive.
    pub fn expire_all(&mut self) {
        for index in 0..self.ops.slots() {
            if self.ops.at(index).is_some() {
                self.expire(index);
            }
        }
    }

    fn time_out_opens(&mut self, now: Timestamp) {
        for peer in 0..u16::try_from(self.peers.count()).unwrap_or(u16::MAX) {
            let entry = &self.peers[peer];
            if entry.state != State::Opening || entry.open_due {
                continue;
            }
            let timer = entry.timer;
            if timer <= now {
                self.open_again(peer);
            } else {
                self.arm(timer);
            }
        }
    }

    /// No reply in time: retransmits.
    fn time_out(&mut self, now: Timestamp, index: u16) {
        let op = &self.ops[index];
        if op.request.attempt == 0 && op.request.queue == Queue::No {
            self.avoid_pointer(index, now + SILENT_TIME);
        }
        let op = &mut self.ops[index];
        let event = match op.request.queue {
            Queue::Home if op.request.expired == 0 => Event::QueueRepeat,
            Queue::Home | Queue::No => Event::Retransmit,
            Queue::Owner => Event::RedirectReturn,
        };
        op.request.expired = op.request.expired.saturating_add(1);
        self.counters.count(event);
        self.send_again(index);
    }

    /// Sends the request once more: of a READ the missing pieces, of a train its lowest missing
    /// piece.
    pub(super) fn send_again(&mut self, index: u16) {
        let entropy = self.random.next();
        let op = &mut self.ops[index];
        op.request.attempt = op.next_attempt();
        op.leave_owner();
        if let Stage::Anywhere { entropy: current } = &mut op.stage
            && op.request.expired > 1
        {
            // The chosen node does not reply: another one is chosen, which has no pieces.
            *current = entropy;
            op.arrived.done = 0;
        }
        op.request.to_send = if op.is_train() {
            op.request.probing = true;
            let missing = op.run.cut.all() & !op.arrived.done;
            if missing == 0 { 1 } else { missing & missing.wrapping_neg() }
        } else {
            1
        };
        self.make_ready(index);
    }

    /// A back-off ended.
    fn wake(&mut self, now: Timestamp, index: u16) {
        let op = &mut self.ops[index];
        if op.request.sequence == 0 {
            self.enqueue(now, index);
            return;
        }
        let anywhere = matches!(op.stage, Stage::Anywhere { .. });
        op.request.attempt = op.next_attempt();
        op.arrived.done = 0;
        op.request.probing = op.is_train();
        op.request.to_send = if op.is_train() { op.run.cut.all() } else { 1 };
        if anywhere {
            self.counters.count(Event::OverloadedRetry);
            let entropy = self.random.next();
            self.ops[index].stage = Stage::Anywhere { entropy };
        }
        self.make_ready(index);
    }

    /// Whether the reply to OPEN was OVERLOADED.
    fn is_opening_refused(&self, peer: u16) -> bool {
        let peer = self.peers.at(peer);
        peer.is_some_and(|peer| peer.state == State::Opening && peer.open_pauses > 0)
    }

    /// The deadline passed.
    fn expire(&mut self, index: u16) {
        self.counters.count(Event::Deadline);
        let op = &self.ops[index];
        let node = self.contacted_node(index);
        let responding = self.is_responding(index);
        let misrouted = self.peers.at(op.route.peer).and_then(|peer| peer.misrouted);
        let waits = op.request.sequence == 0 || op.request.queue != Queue::No;
        let failure = if waits && op.route.holder.owner != 0 {
            op.route.holder.failure()
        } else if op.request.sequence == 0
            && op.pages.statuses.get(op.pages.pending.trailing_zeros() as usize)
                == Some(&Status::NoAuthority)
        {
            let node = bluebridge_wire::NodeId(op.route.moved_node);
            Failure::Refused { status: Status::NoAuthority, node }
        } else if op.request.overloaded || self.is_opening_refused(op.route.peer) {
            Failure::Refused { status: Status::Overloaded, node }
        } else if let Some(node) = misrouted {
            Failure::Refused { status: Status::WrongNode, node }
        } else if responding {
            Failure::TimedOut { node }
        } else {
            Failure::Unreachable { node }
        };
        if let Some(pointer) = op.pointer()
            && pointer.node != node
            && !responding
        {
            self.counters.count(Event::MovedForget);
            self.moved.forget(pointer);
        }
        self.fail(index, failure);
    }
}
