//! Leases of this endpoint, and waiting for leases of other endpoints (protocol, section 10).

use core::time::Duration;

use bluebridge_wire::{Datagram, Flags, Header, LeaseEnd, NodeId, Status};

use super::{
    Buffers, Event, Failure, Lease, NONE, Operation, Output, Place, Queue, Requester,
    op::{Holder, Op},
    progress::ASTRAY_TIME,
    transmit::ATTEMPT_MAX,
};
use crate::Timestamp;

/// How much an owner's clock may lag behind the home's, besides one part in [`RATE_PARTS`].
const MARGIN: Duration = Duration::from_millis(1);

/// The tolerated difference of the rates of two clocks: less than one part in this many.
const RATE_PARTS: u32 = 64;

impl Requester {
    /// The home lets a request wait until a lease ends, as long as it is repeated in time.
    pub(super) fn note_queued(&mut self, now: Timestamp, index: u16, reply: &Datagram<'_>) {
        let op = &self.ops[index];
        let page = op.run.cut.index_at(usize::from(reply.header.offset));
        let page = page.and_then(|at| op.run.cut.piece(at)).map_or(0, |piece| piece.page);
        // A later reply, or a retry, superseded this one.
        let superseded = op.grant.lease.epoch != 0 || op.arrived.settled & (1 << page) != 0;
        if superseded
            || reply.header.flags.attempt() != op.request.attempt
            || op.link.place != Place::Flight
        {
            self.counters.count(Event::ReplyStale);
            return;
        }
        self.counters.count(Event::Queue);
        self.free_credit(index);
        let timing = &self.config.timing;
        let kept = Duration::from_millis(u64::from(reply.header.detail));
        // Half of the time, so that a lost repetition can be repeated; and limited, because a lost
        // reply is detected no earlier.
        let period = (kept / 2).clamp(timing.retransmit_min, timing.retransmit_max);
        let op = &mut self.ops[index];
        op.route.holder = Holder::from_reply(reply);
        op.request.queue = Queue::Home;
        op.grant.sent_after = op.request.last_sent;
        op.request.expired = 0;
        op.timer = now + period;
        self.arm(now + period);
    }

    /// A reply from another node than the session's server: a redirect led to an owner, or another
    /// entry of a switch led astray. An owner may let the request wait, or serve the last committed
    /// contents; else the request goes to the server, with the same number, because a copy may have
    /// arrived there. Whatever another node refuses, only the session's server gives final replies.
    pub(super) fn handle_redirected(
        &mut self,
        now: Timestamp,
        index: u16,
        status: Status,
        reply: &Datagram<'_>,
        buffers: &mut impl Buffers,
    ) {
        let op = &self.ops[index];
        // Only a first try, so that it is sent again once, and not for each reply of other nodes.
        let is_first_try = op.link.place == Place::Flight
            && op.request.attempt == 0
            && op.pointer().is_some()
            && !self.is_at_endpoint(op);
        let may_be_redirected = is_first_try && !op.route.home && op.run_page_count() == 1;
        // Sent to the pointer again, it could go astray again and again.
        let may_be_astray = is_first_try && self.peers[op.route.peer].at_endpoint;
        let stale = reply.header.flags.contains(Flags::LAST_COMMITTED);
        match status {
            Status::Busy if may_be_redirected && op.operation.may_queue() && is_queued(reply) => {
                self.counters.count_status(status);
                self.wait_at_owner(now, index, reply);
            }
            Status::Busy | Status::NotOwner if may_be_redirected => {
                self.counters.count_status(status);
                self.counters.count(Event::RedirectReturn);
                self.send_again(index);
            }
            Status::Ok
                if may_be_redirected
                    && stale
                    && matches!(op.operation, Operation::ReadStale { .. }) =>
            {
                self.counters.count_status(status);
                self.handle_piece(now, index, reply, buffers);
            }
            // Other nodes execute nothing, so their OK is no sign that the request went astray.
            Status::Ok => self.counters.count(Event::ReplyUntrusted),
            _ if may_be_astray => self.return_astray(now, index),
            _ => self.counters.count(Event::ReplyUntrusted),
        }
    }

    /// A first try arrived where the session is not known: it is sent again once, to the server's endpoint address.
    pub(super) fn return_astray(&mut self, now: Timestamp, index: u16) {
        let op = &self.ops[index];
        if op.link.place != Place::Flight || op.request.attempt > 0 || self.is_at_endpoint(op) {
            self.counters.count(Event::ReplyStale);
            return;
        }
        self.avoid_pointer(index, now + ASTRAY_TIME);
        self.counters.count(Event::AstrayReturn);
        self.send_again(index);
    }

    fn wait_at_owner(&mut self, now: Timestamp, index: u16, reply: &Datagram<'_>) {
        let op = &self.ops[index];
        if op.request.queue != Queue::No {
            // It stated before how long it lets the request wait.
            self.counters.count(Event::ReplyStale);
            return;
        }
        self.counters.count(Event::OwnerWait);
        self.free_credit(index);
        let received = Duration::from_millis(u64::from(reply.header.detail));
        let op = &mut self.ops[index];
        // If the owner does not release the lease, time is left to contact the home.
        let time = received.min((op.deadline - now) / 2);
        op.route.holder = Holder::from_reply(reply);
        op.request.queue = Queue::Owner;
        op.timer = now + time;
        self.arm(now + time);
    }

    /// A request that waits for a lease must not hold credit: its reply may come much later.
    fn free_credit(&mut self, index: u16) {
        let op = &mut self.ops[index];
        let cost = u32::from(core::mem::take(&mut op.request.cost));
        let peer = &mut self.peers[op.route.peer];
        peer.outstanding_pages = peer.outstanding_pages.saturating_sub(cost);
        self.outstanding_pages = self.outstanding_pages.saturating_sub(cost);
        self.freed = true;
    }

    /// Gives up the oldest number of a session if it only waits for a lease and the window is used
    /// up; true if it did.
    pub(super) fn leave_queue(&mut self, now: Timestamp, peer: u16) -> bool {
        let entry = &self.peers[peer];
        let index = entry.numbered(entry.low_water);
        if entry.has_window() || index == NONE || self.ops[index].request.queue == Queue::No {
            return false;
        }
        self.counters.count(Event::QueueLeave);
        self.detach(index);
        self.retire_number(index);
        self.ops[index].route.home = true;
        self.set_run(index);
        self.sleep(now, index);
        true
    }

    /// A lease that was to be committed, aborted or extended is no longer held.
    pub(super) fn lose_lease(&mut self, index: u16, reply: &Datagram<'_>) {
        let header = &reply.header;
        let how = LeaseEnd::from_code(header.detail).unwrap_or(LeaseEnd::Unknown);
        let op = &self.ops[index];
        if how == LeaseEnd::Aborted
            && op.sent_before
            && matches!(op.operation, Operation::Abort { .. })
        {
            self.finish(index, Ok(Output::Done));
            return;
        }
        self.counters.count(Event::LeaseLost);
        let owner = NodeId(header.node);
        let owner = (how == LeaseEnd::LeasedAgain && owner.is_unicast())
            .then_some((owner, header.lease_epoch));
        self.finish(index, Err(Failure::LeaseLost { node: reply.from.node, how, owner }));
    }
}

impl Op {
    /// Records the lease in a piece of the reply to an UPDATE; false if it belongs to another
    /// endpoint, or differs from the lease in the other pieces.
    pub(super) fn note_grant(&mut self, node: NodeId, reply: &Datagram<'_>) -> bool {
        let header = &reply.header;
        let known = self.grant.lease.epoch;
        if header.lease_epoch == 0
            || header.node != node.0
            || (known != 0 && known != header.lease_epoch)
        {
            return false;
        }
        let sent = if header.flags.attempt() == self.request.attempt {
            self.request.last_sent
        } else {
            self.grant.sent_after
        };
        let received = granted(sent, header);
        self.request.queue = Queue::No;
        // Each piece contains a time at which the lease still runs; the latest applies.
        if known == 0 || received.expires_at > self.grant.lease.expires_at {
            self.grant.lease = received;
        }
        true
    }

    /// The number of the next attempt. An UPDATE may wait for long, and has to identify the attempt
    /// that a reply belongs to: its attempts count from 1 to the maximum, then from 1 again.
    pub(super) const fn next_attempt(&self) -> u8 {
        match self.operation {
            Operation::Take { .. } | Operation::Update { .. } => {
                self.request.attempt % ATTEMPT_MAX + 1
            }
            _ if self.request.attempt < ATTEMPT_MAX => self.request.attempt + 1,
            _ => ATTEMPT_MAX,
        }
    }

    /// Returns to the home from the owner that a redirect led to, and discards the owner's pieces.
    pub(super) fn leave_owner(&mut self) {
        if core::mem::take(&mut self.arrived.from_owner) {
            self.arrived.done = 0;
        }
        if self.request.queue == Queue::Owner {
            self.request.queue = Queue::No;
        }
    }
}

impl Holder {
    pub(super) const fn from_reply(reply: &Datagram<'_>) -> Self {
        let header = &reply.header;
        Self {
            epoch: header.lease_epoch,
            owner: header.node,
            remaining_ms: header.lease_remaining_ms,
        }
    }

    /// The failure if another endpoint's lease did not end in time.
    pub(super) const fn failure(self) -> Failure {
        Failure::Busy {
            owner: NodeId(self.owner),
            epoch: self.epoch,
            remaining_ms: self.remaining_ms,
        }
    }
}

/// Whether a BUSY says that the request waits, so that another reply may follow.
pub(super) const fn is_queued(reply: &Datagram<'_>) -> bool {
    reply.header.flags.contains(Flags::QUEUED)
}

/// The lease in a reply's header, if the request was sent at `sent` or later.
pub(super) fn granted(sent: Timestamp, header: &Header) -> Lease {
    let time = Duration::from_millis(u64::from(header.lease_remaining_ms));
    let safe = (time - time / RATE_PARTS).saturating_sub(MARGIN);
    Lease {
        epoch: header.lease_epoch,
        expires_at: sent + safe,
        granted_ms: header.lease_remaining_ms,
    }
}
