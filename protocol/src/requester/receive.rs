//! Which replies are trusted, and how each status is handled.

use bluebridge_wire::{
    Command, Datagram, NoMemory, NodeId, Pointer, Status, Usage, line::LINE_RECORD_BYTES,
    tlv::TlvType,
};

use super::{
    Buffers, Event, Failure, NONE, Operation, Output, Place, Queue, Requester, Stage, State,
    lease::is_queued, op::Op, transmit::ATTEMPT_MAX,
};
use crate::Timestamp;

impl Requester {
    /// Handles a received datagram.
    ///
    /// It is accepted only if space, session, number, command, the replying node and its
    /// incarnation agree with the request; anything else is counted and ignored.
    pub fn handle_datagram(
        &mut self,
        now: Timestamp,
        datagram: &Datagram<'_>,
        buffers: &mut impl Buffers,
    ) {
        self.receive(now, datagram, buffers);
        self.admit_backpressured(now);
    }

    fn receive(&mut self, now: Timestamp, reply: &Datagram<'_>, buffers: &mut impl Buffers) {
        let config = &self.config;
        let to_us = reply.is_reply()
            && reply.to.space == config.space
            && reply.to.node == config.node
            && reply.to.location == config.address().location_bits()
            && reply.from.space == config.space;
        let Some(command) = reply.command().command().filter(|_| to_us) else {
            self.counters.count(Event::ReplyUntrusted);
            return;
        };
        let session = reply.header.session;
        if command == Command::Open {
            self.handle_open_reply(now, reply);
            return;
        }
        if session == 0 {
            self.handle_anywhere_reply(now, reply);
            return;
        }
        let found = self.peers.in_session(session, reply.from.node);
        let numbered = found.map(|peer| (peer, self.peers[peer].numbered(reply.header.sequence)));
        let Some((peer, index)) = numbered.filter(|(_, index)| *index != NONE) else {
            self.counters.count(Event::ReplyStale);
            return;
        };
        let entry = &self.peers[peer];
        let Some(status) =
            Status::from_code(reply.from.tag).filter(|_| self.ops[index].command() == command)
        else {
            self.counters.count(Event::ReplyUntrusted);
            return;
        };
        if reply.from.node != entry.server.node {
            self.handle_redirected(now, index, status, reply, buffers);
            return;
        }
        // Said by a server that has nothing of the pointer's node any more, before it looks at the session: an earlier
        // copy may have been executed. What it says at its endpoint address is final.
        if status == Status::WrongNode
            && reply.header.flags.attempt() == 0
            && self.was_at_pointer_of_other(&self.ops[index])
        {
            self.return_astray(now, index);
            return;
        }
        // A restarted server reports the lost session under its new incarnation. A process that was replaced before the
        // session was opened knows nothing of it, but the one that has it may have executed the request.
        let said_by = reply.header.incarnation;
        let is_of_next = status == Status::NoSession && said_by > entry.incarnation;
        if said_by != entry.incarnation && !is_of_next {
            self.counters.count(Event::ReplyUntrusted);
            return;
        }
        self.note_reply(now, peer, index, status, reply);
        self.handle_status(now, index, status, reply, buffers);
    }

    /// Bookkeeping for every trusted reply in a session.
    fn note_reply(
        &mut self,
        now: Timestamp,
        peer: u16,
        index: u16,
        status: Status,
        reply: &Datagram<'_>,
    ) {
        self.counters.count_status(status);
        let (entry, op) = (&mut self.peers[peer], &self.ops[index]);
        entry.last_seen = Some(now);
        if status == Status::NoSession {
            return;
        }
        entry.failed_sessions = 0;
        if reply.header.credit != entry.credit {
            entry.credit = reply.header.credit;
            self.freed = true;
        }
        // The first reply to the latest attempt is a valid round-trip sample, and so is one to the first attempt: on a
        // network that is slower than the timer, there is no other. One is enough for a READ's train, whose later
        // pieces waited for the earlier ones.
        let attempt = reply.header.flags.attempt();
        let first_sign = !op.is_read() || (op.arrived.done == 0 && op.arrived.settled == 0);
        // The reply to a request that waited for a lease says nothing about the network.
        let first_sign = first_sign && op.request.queue == Queue::No;
        if !first_sign || attempt >= ATTEMPT_MAX {
            return;
        }
        if attempt == op.request.attempt && op.request.to_send == 0 {
            entry.round_trip.sample(now.saturating_since(op.request.last_sent));
        } else if attempt == 0 && !op.is_train() {
            // Of a train, later datagrams may carry attempt 0, too.
            entry.round_trip.sample(now.saturating_since(op.request.first_sent));
        }
    }

    fn handle_status(
        &mut self,
        now: Timestamp,
        index: u16,
        status: Status,
        reply: &Datagram<'_>,
        buffers: &mut impl Buffers,
    ) {
        let op = &self.ops[index];
        let (peer, node) = (op.route.peer, reply.from.node);
        let refusal = refusal(status, reply);
        match status {
            Status::Ok => self.handle_ok(now, index, reply, buffers),
            Status::Incomplete if op.is_train() => self.repair_train(index, reply),
            Status::Partial
                if matches!(op.operation, Operation::Write { .. } | Operation::Zero { .. }) =>
            {
                self.handle_partial(now, index, reply);
            }
            Status::NoSession => match op.operation {
                _ if self.peers[peer].state != State::Open => {
                    self.counters.count(Event::ReplyStale);
                }
                Operation::Close { .. } => self.closed(now, peer, index),
                _ => {
                    self.note_unexecuted_create(index);
                    self.lose_session(now, peer);
                }
            },
            Status::Overloaded => {
                if reply.header.flags.attempt() == op.request.attempt {
                    self.counters.count(Event::OverloadedRetry);
                    self.back_off(now, index);
                }
            }
            Status::Incomplete | Status::Partial | Status::Expired | Status::BeyondWindow => {
                self.counters.count(Event::ReplyViolation);
                self.fail(index, Failure::Violation { node });
            }
            _ if matches!(op.stage, Stage::Confirm(_)) => self.refuse_confirm(index, status, node),
            Status::LeaseLost if op.command().is_always_home() => self.lose_lease(index, reply),
            Status::Busy if op.operation.may_queue() && is_queued(reply) => {
                self.note_queued(now, index, reply);
            }
            Status::Busy
                if op.operation.giver().is_some()
                    || matches!(op.operation, Operation::Update { wait: false, .. }) =>
            {
                self.note_refusal(index, 0, status, reply);
                let holder = self.ops[index].route.holder;
                self.finish(index, Err(holder.failure()));
            }
            // Where the line is now is the taker's business, and not this operation's.
            _ if is_about_page(status) && op.operation.giver().is_some() => {
                self.refuse(index, status, refusal);
            }
            _ if is_about_page(status) && op.is_read_by_page() => {
                self.handle_page_refusal(now, index, status, reply);
            }
            _ if is_about_page(status) && op.pointer().is_some() => {
                self.settle_run(now, index, status, reply);
            }
            // An earlier copy may have been executed before the server began to refuse.
            _ if is_before_record(status) && op.request.sent_count > op.train_length() => {
                self.fail(index, refusal);
            }
            _ => self.refuse(index, status, refusal),
        }
    }

    /// The server refused the whole request and did nothing of it. The effects of earlier requests
    /// of the operation remain.
    fn refuse(&mut self, index: u16, status: Status, refusal: Failure) {
        let op = &mut self.ops[index];
        if !op.may_be_applied {
            self.finish(index, Err(refusal));
        } else if matches!(op.operation, Operation::Write { .. } | Operation::Zero { .. }) {
            // Each page that was changed has its status; the others get the refusal.
            let pending = core::mem::take(&mut op.pages.pending);
            for (page, entry) in op.pages.statuses.iter_mut().enumerate() {
                if pending & (1 << page) != 0 {
                    *entry = status;
                }
            }
            self.conclude(index);
        } else {
            self.fail(index, refusal);
        }
    }

    /// A server without the session replied. If that was the only copy of a CREATE, no pages were
    /// allocated.
    fn note_unexecuted_create(&mut self, index: u16) {
        let op = &mut self.ops[index];
        if op.is_directed_create() && op.request.sent_count <= op.train_length() {
            op.request.sent_count = 0;
        }
    }

    fn handle_ok(
        &mut self,
        now: Timestamp,
        index: u16,
        reply: &Datagram<'_>,
        buffers: &mut impl Buffers,
    ) {
        let op = &self.ops[index];
        let node = reply.from.node;
        if let Stage::Confirm(pointer) = op.stage {
            self.counters.count(Event::Confirm);
            self.finish(index, Ok(Output::Pointer(pointer)));
            return;
        }
        let output = match op.operation {
            Operation::Read { .. }
            | Operation::ReadStale { .. }
            | Operation::ReadTaken { .. }
            | Operation::Update { .. } => {
                self.handle_piece(now, index, reply, buffers);
                return;
            }
            Operation::Take { .. } => {
                let own_node = self.config.node;
                let op = &mut self.ops[index];
                let is_whole = reply.data.len() == LINE_RECORD_BYTES;
                let is_copied = is_whole && copy_record(buffers.incoming(op.token), reply.data);
                let is_free = is_copied && reply.header.lease_epoch == 0;
                let is_granted = is_copied && op.note_grant(own_node, reply);
                is_free.then_some(Output::Free).or_else(|| {
                    is_granted.then(|| {
                        self.counters.count(Event::Grant);
                        Output::Leased(self.ops[index].grant.lease)
                    })
                })
            }
            Operation::Keep { epoch, .. } => {
                let is_its = reply.header.lease_epoch == epoch
                    && reply.data.len() <= LINE_RECORD_BYTES
                    && copy_record(buffers.incoming(op.token), reply.data);
                is_its.then(|| Output::Kept {
                    bytes: u16::try_from(reply.data.len()).unwrap_or(0),
                    known: reply.header.detail,
                    is_all: u64::from(reply.header.detail) == reply.header.page_version,
                })
            }
            Operation::Abort { .. } | Operation::Commit { .. } => Some(Output::Done),
            Operation::Renew { epoch, .. } => {
                // Whichever attempt was executed, the first one was sent before.
                let lease = super::lease::granted(op.request.first_sent, &reply.header);
                self.counters.count(Event::Renewal);
                (lease.epoch == epoch).then_some(Output::Leased(lease))
            }
            Operation::Write { .. } | Operation::Zero { .. } => {
                self.settle_run(now, index, Status::Ok, reply);
                return;
            }
            Operation::Close { .. } => {
                let peer = op.route.peer;
                self.closed(now, peer, index);
                return;
            }
            Operation::AllocWrite { .. } | Operation::Create { .. } => {
                let pointer = Pointer::from_ipv6(reply.header.target).ok();
                let good = |pointer: &Pointer| {
                    pointer.node == node
                        && pointer.space == self.config.space
                        && pointer.location.is_page_aligned()
                };
                pointer.filter(good).map(Output::Pointer)
            }
            Operation::CompareSwap { .. } | Operation::FetchAdd { .. } => {
                let word = <[u8; 8]>::try_from(reply.data).ok();
                word.map(|word| Output::Previous(u64::from_be_bytes(word)))
            }
            Operation::Delete { .. } | Operation::FreePart { .. } => {
                Some(Output::Freed(reply.header.length))
            }
            Operation::Ping { length, .. } => {
                let sent = buffers.outgoing(op.token).get(..length as usize);
                (sent == Some(reply.data)).then_some(Output::Done)
            }
            Operation::Stat { .. } => Usage::parse(reply.data).map(Output::Usage),
        };
        let Some(output) = output else {
            self.counters.count(Event::ReplyViolation);
            // The operation is done, but its reply has no valid result: its effect is not known.
            self.fail(index, Failure::Violation { node });
            return;
        };
        self.finish(index, Ok(output));
    }

    /// The pages of a WRITE or a zeroing DELETE ended differently.
    fn handle_partial(&mut self, now: Timestamp, index: u16, reply: &Datagram<'_>) {
        let count = self.ops[index].run_page_count();
        let statuses = reply.tlvs().flatten().find(|tlv| tlv.kind == TlvType::PageStatus as u8);
        let statuses = statuses.map(|tlv| tlv.value).filter(|value| {
            value.len() == count && value.iter().all(|code| Status::from_code(*code).is_some())
        });
        let Some(statuses) = statuses else {
            self.counters.count(Event::ReplyViolation);
            self.fail(index, Failure::Violation { node: reply.from.node });
            return;
        };
        self.ops[index].pages.one_by_one = true;
        for (page, code) in statuses.iter().enumerate() {
            let Some(status) = Status::from_code(*code) else { continue };
            self.note_refusal(index, page, status, reply);
            self.settle_page(index, page, status);
        }
        self.end_run(now, index);
    }

    /// The server has not received all pieces of a train: sends the missing ones.
    pub(super) fn repair_train(&mut self, index: u16, reply: &Datagram<'_>) {
        let op = &mut self.ops[index];
        let attempt = reply.header.flags.attempt();
        if !op.request.probing
            || attempt != op.request.attempt
            || matches!(op.link.place, Place::Held | Place::Pause)
        {
            self.counters.count(Event::ReplyStale);
            return;
        }
        op.arrived.done = reply.header.detail & op.run.cut.all();
        op.request.to_send = op.run.cut.all() & !op.arrived.done;
        if op.request.to_send == 0 {
            // No piece is missing, yet there is no final reply: its probe requests it.
            op.request.to_send = 1;
        }
        op.request.attempt = (op.request.attempt + 1).min(ATTEMPT_MAX);
        // The last attempt number is shared by all later rounds; the timer begins the next round.
        op.request.probing = op.request.attempt < ATTEMPT_MAX;
        op.request.expired = 0;
        self.counters.count(Event::TrainRepair);
        self.make_ready(index);
    }

    fn refuse_confirm(&mut self, index: u16, status: Status, node: NodeId) {
        let is_lost = matches!(
            status,
            Status::NotAllocated | Status::OutOfRange | Status::StaleGeneration | Status::StaleTag
        );
        if is_lost {
            self.detach(index);
            self.ops[index].link.place = Place::Flight;
            self.confirm_late(index);
        } else {
            self.finish(index, Err(Failure::Refused { status, node }));
        }
    }
}

/// What a refusal of the whole request means to its caller.
pub(super) fn refusal(status: Status, reply: &Datagram<'_>) -> Failure {
    let node = reply.from.node;
    match (status, NoMemory::from_code(reply.header.detail)) {
        (Status::OutOfMemory, NoMemory::Drained) => Failure::Drained { node },
        _ => Failure::Refused { status, node },
    }
}

/// Copies a record into the caller's buffer; false if that is too short.
fn copy_record(to: &mut [u8], record: &[u8]) -> bool {
    let place = to.get_mut(..record.len());
    place.map(|place| place.copy_from_slice(record)).is_some()
}

impl Op {
    /// Datagrams of the request when each is sent once.
    const fn train_length(&self) -> u32 {
        if self.is_train() { self.run.cut.piece_count() } else { 1 }
    }

    /// Whether each page has a status of its own; an UPDATE is granted or refused as a whole.
    const fn is_read_by_page(&self) -> bool {
        matches!(self.operation, Operation::Read { .. } | Operation::ReadStale { .. })
    }
}

/// Statuses that a server sends before it looks up a recorded reply (protocol, section 7).
const fn is_before_record(status: Status) -> bool {
    matches!(
        status,
        Status::StaleIncarnation
            | Status::UnknownCommand
            | Status::UnsupportedFeature
            | Status::UnsupportedVersion
            | Status::Unauthenticated
            | Status::Malformed
            | Status::ShuttingDown
            | Status::Internal
    )
}

/// Statuses of section 7, step 7: about one page, not about the whole request.
const fn is_about_page(status: Status) -> bool {
    matches!(
        status,
        Status::Busy
            | Status::Forbidden
            | Status::LeaseLost
            | Status::Moved
            | Status::NoAuthority
            | Status::NotAllocated
            | Status::NotOwner
            | Status::OutOfRange
            | Status::StaleGeneration
            | Status::StaleRangeEpoch
            | Status::StaleTag
            | Status::WrongNode
            | Status::WrongSpace
    )
}
