//! Sending: OPENs first, then the operations' datagrams in train order.

use core::net::Ipv6Addr;

use bluebridge_wire::{
    Command, EndpointAddress, Flags, Header, NodeId, Space, WireCommand, address::Fields,
    header::HEADER_BYTES, seal,
};

use super::op::Op;
use super::{
    Buffers, Event, Failure, NONE, Operation, OperationId, Place, Queue, Requester, Stage, State,
};
use crate::{Timestamp, pieces::Piece};

/// The largest [`SealedRequest::head`] in bytes: the header and the operands of an atomic.
pub const HEAD_BYTES_MAX: usize = HEADER_BYTES + 16;

/// Pages that must be outstanding with a server for READs of several pages to ask for trains.
pub(super) const TRAIN_PAGES: u32 = 64;

/// The largest attempt number; later attempts repeat it.
pub(super) const ATTEMPT_MAX: u8 = 15;

/// The purpose of a datagram.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Origin {
    /// The end of a session that was abandoned; no reply is expected.
    Leave,
    /// An operation.
    Operation(OperationId),
    /// A session that is to be opened.
    Session {
        /// The server's slot in the requester.
        peer: u16,
    },
}

/// A sealed datagram to be sent to [`bluebridge_wire::UDP_PORT`]: the head, then the data.
#[derive(Clone, Copy, Debug)]
pub struct SealedRequest<'a> {
    /// The source address.
    pub source: Ipv6Addr,
    /// The destination address; the datagrams of a train are consecutive and have the same one.
    pub destination: Ipv6Addr,
    /// Its purpose.
    pub origin: Origin,
    /// The caller's bytes, behind the head.
    pub data: &'a [u8],
    head: [u8; HEAD_BYTES_MAX],
    head_bytes: u8,
}

impl SealedRequest<'_> {
    /// The first bytes of the UDP payload: the header, and the operands of an atomic.
    #[must_use]
    pub fn head(&self) -> &[u8] {
        self.head.get(..usize::from(self.head_bytes)).unwrap_or_default()
    }
}

/// The fields in which the datagrams of one request differ.
pub(super) struct Part<'a> {
    pub(super) target: Fields,
    /// The destination address without the command.
    pub(super) to: Fields,
    pub(super) command: Command,
    pub(super) home: bool,
    pub(super) header: Header,
    pub(super) operands: [u64; 2],
    pub(super) operand_count: usize,
    pub(super) data: &'a [u8],
}

impl Requester {
    /// The next datagram to be sent; `None` when there is none for now.
    pub fn poll_transmit<'b>(
        &mut self,
        now: Timestamp,
        buffers: &'b impl Buffers,
    ) -> Option<SealedRequest<'b>> {
        while let Some(peer) = self.opening.pop_front() {
            if let Some(transmit) = self.transmit_open(now, peer) {
                return Some(transmit);
            }
        }
        if !self.leaving.is_empty() {
            return self.transmit_leave();
        }
        loop {
            let index = self.ready.head;
            if index == NONE {
                return None;
            }
            let bit = self.ops[index].request.to_send.trailing_zeros();
            if let Some(part) = self.part(index, bit, buffers) {
                self.sent(now, index, bit);
                let origin = Origin::Operation(self.ops.id(index));
                self.counters.count(Event::Transmit);
                return Some(self.emit(origin, part));
            }
            self.fail(index, Failure::Buffer);
        }
    }

    /// The carrier refused a datagram permanently (no route, not permitted, too large): its
    /// operation or session ends at once. `unsent_count` datagrams of this origin were polled and
    /// not sent.
    pub fn transmit_refused(&mut self, now: Timestamp, origin: Origin, unsent_count: u32) {
        self.counters.count(Event::TransmitRefused);
        match origin {
            Origin::Leave => {}
            Origin::Operation(id) => {
                let Some(index) = self.ops.find(id) else { return };
                let op = &mut self.ops[index];
                op.request.sent_count = op.request.sent_count.saturating_sub(unsent_count);
                let node =
                    self.peers.at(op.route.peer).map_or(NodeId::ANY, |peer| peer.server.node);
                self.fail(index, Failure::NotSent { node });
            }
            Origin::Session { peer } => {
                let Some(entry) = self.peers.at(peer) else { return };
                if entry.state == State::Opening {
                    let node = entry.server.node;
                    self.refuse_open(peer, Failure::NotSent { node });
                }
            }
        }
        self.admit_backpressured(now);
    }

    fn transmit_open<'b>(&mut self, now: Timestamp, peer: u16) -> Option<SealedRequest<'b>> {
        let timing = self.config.timing;
        let entry = &mut self.peers[peer];
        entry.open_due = false;
        if entry.state != State::Opening {
            return None;
        }
        let timer = now + entry.round_trip.timer(&timing, entry.open_attempt, true);
        entry.timer = timer;
        entry.open_sent = Some(now);
        let header = Header {
            flags: Flags::default().with_attempt(entry.open_attempt),
            sequence: entry.nonce,
            length: u32::from(self.config.piece_bytes),
            credit: self.config.credit_pages,
            ..Header::default()
        };
        let node = entry.server.node;
        let target = endpoint(self.config.space, node, entry.server.shard, 0);
        let part = Part {
            target,
            to: target,
            command: Command::Open,
            home: entry.open_attempt > 0,
            header,
            operands: [0; 2],
            operand_count: 0,
            data: &[],
        };
        self.arm(timer);
        self.counters.count(Event::Transmit);
        Some(self.emit(Origin::Session { peer }, part))
    }

    /// Records that a datagram is sent; after the last one of a request its timer starts.
    fn sent(&mut self, now: Timestamp, index: u16, bit: u32) {
        let op = &mut self.ops[index];
        op.request.to_send &= !(1_u32.checked_shl(bit).unwrap_or(0));
        if op.request.sent_count == 0 {
            op.request.first_sent = now;
            op.grant.sent_after = now;
        }
        op.request.sent_count = op.request.sent_count.saturating_add(1);
        op.request.last_sent = now;
        if op.request.to_send == 0 {
            op.link.place = Place::Flight;
            self.ops.unlink(&mut self.ready, index);
            self.restart_timer(now, index);
        }
    }

    pub(super) fn restart_timer(&mut self, now: Timestamp, index: u16) {
        let op = &mut self.ops[index];
        let request = &op.request;
        let (trip, is_oldest) = match self.peers.at(op.route.peer) {
            // A request that waits for a lease is known to the server, and is repeated for other reasons.
            Some(peer) => {
                (&peer.round_trip, request.sequence == peer.low_water && request.queue == Queue::No)
            }
            None => (&self.anywhere_trip, false),
        };
        let timer = now + trip.timer(&self.config.timing, request.expired, is_oldest);
        op.timer = timer;
        self.arm(timer);
    }

    /// The datagram for one bit of `to_send`; `None` if the caller's buffer is too short.
    fn part<'b>(&self, index: u16, bit: u32, buffers: &'b impl Buffers) -> Option<Part<'b>> {
        let op = &self.ops[index];
        let target = self.target(op);
        // Pieces that only fill a gap request no reply of their own; the last one does.
        let fills = op.request.attempt > 0 && op.request.to_send.count_ones() > 1;
        let attempt = if fills { 0 } else { op.request.attempt };
        let mut part = Part {
            target,
            to: self.destination(op, target),
            command: op.command(),
            home: op.request.attempt > 0
                || self.is_at_endpoint(op)
                || op.route.home
                || op.run_page_count() > 1
                || op.command().is_always_home(),
            header: Header {
                flags: Flags::default().with_attempt(attempt),
                sequence: op.request.sequence,
                length: self.wire_length(op),
                ..Header::default()
            },
            operands: [0; 2],
            operand_count: 0,
            data: &[],
        };
        if let Some(peer) = self.peers.at(op.route.peer) {
            let distance = op.request.sequence.saturating_sub(peer.low_water);
            part.header.session = peer.session;
            part.header.answered_distance = u16::try_from(distance).unwrap_or(u16::MAX);
        }
        if matches!(op.stage, Stage::Confirm(_)) {
            return Some(part);
        }
        match op.operation {
            Operation::AllocWrite { .. } | Operation::Commit { .. } | Operation::Write { .. } => {
                let Piece { range, .. } = op.run.cut.piece(bit)?;
                let start = usize::from(op.run.start);
                part.header.offset = u16::try_from(range.start).ok()?;
                part.data =
                    buffers.outgoing(op.token).get(start + range.start..start + range.end)?;
                if matches!(op.stage, Stage::Anywhere { .. }) {
                    // The piece size of this train; the configured one may be newer.
                    part.header.detail = op.run.cut.piece_bytes();
                }
                if let Operation::Commit { epoch, .. } = op.operation {
                    part.header.lease_epoch = epoch;
                }
            }
            Operation::CompareSwap { expected, new, .. } => {
                part.operands = [expected, new];
                part.operand_count = 2;
            }
            Operation::FetchAdd { addend, .. } => {
                part.operands = [addend, 0];
                part.operand_count = 1;
            }
            Operation::Ping { length, .. } => {
                part.data = buffers.outgoing(op.token).get(..length as usize)?;
            }
            Operation::Read { .. }
            | Operation::ReadStale { .. }
            | Operation::ReadTaken { .. }
            | Operation::Update { .. } => {
                part.header.flags = part.header.flags.with(op.read_flags());
                if op.request.attempt > 0 || self.asks_for_train(op) {
                    part.header.flags = part.header.flags.with(Flags::SELECTIVE);
                    part.header.detail = op.wanted_pieces();
                } else if let Operation::ReadStale { .. } = op.operation {
                    // An owner that a redirect leads to has no record of the session.
                    part.header.detail = op.run.cut.piece_bytes();
                }
                if let Operation::Update { lease_ms, .. } = op.operation {
                    part.header.lease_remaining_ms = lease_ms;
                }
                if let Operation::ReadTaken { epoch, .. } = op.operation {
                    part.header.lease_epoch = epoch;
                }
            }
            Operation::Take { migration, lease_ms, wait, .. } => {
                let flags = part.header.flags;
                part.header.flags = if wait { flags.with(Flags::QUEUED) } else { flags };
                part.header.lease_remaining_ms = lease_ms;
                part.header.page_version = migration.id;
                part.header.range_epoch = migration.range_epoch;
            }
            Operation::Keep { migration, epoch, known, .. } => {
                part.header.lease_epoch = epoch;
                part.header.detail = known;
                part.header.page_version = migration.id;
                part.header.range_epoch = migration.range_epoch;
            }
            Operation::Renew { epoch, lease_ms, .. } => {
                part.header.lease_epoch = epoch;
                part.header.lease_remaining_ms = lease_ms;
            }
            Operation::Abort { epoch, .. } => part.header.lease_epoch = epoch,
            Operation::Zero { .. } => part.header.flags = part.header.flags.with(Flags::ZERO),
            Operation::Delete { .. } if op.route.is_orphan => {
                part.header.flags = part.header.flags.with(Flags::ORPHAN);
            }
            Operation::FreePart { .. } => part.header.flags = part.header.flags.with(Flags::PART),
            Operation::Close { .. }
            | Operation::Create { .. }
            | Operation::Delete { .. }
            | Operation::Stat { .. } => {}
        }
        Some(part)
    }

    /// Whether the first try of a READ says which pieces it wants, although these are all: a server's kernel answers no such
    /// READ, so the server's process sends its pages as a train. That carries twice as many bytes a second as a packet for
    /// each page, and is worth a wake-up if much is outstanding.
    fn asks_for_train(&self, op: &Op) -> bool {
        let outstanding = self.peers.at(op.route.peer).map_or(0, |peer| peer.outstanding_pages);
        matches!(op.operation, Operation::Read { .. })
            && op.run_page_count() > 1
            && outstanding >= TRAIN_PAGES
    }

    /// The target of a request.
    fn target(&self, op: &Op) -> Fields {
        let space = self.config.space;
        if let Stage::Anywhere { entropy } = op.stage {
            let [.., shard] = entropy.to_be_bytes();
            let low = u32::try_from(entropy >> 32).unwrap_or(0);
            return endpoint(space, NodeId::ANY, shard, low);
        }
        let Some(pointer) = op.pointer() else {
            let server = self.peers.at(op.route.peer).map(|peer| peer.server);
            let (node, shard) = server.map_or((NodeId::ANY, 0), |to| (to.node, to.shard));
            return endpoint(space, node, shard, 0);
        };
        // The run begins inside of the line, so this stays inside of the arena.
        let location = pointer.location.bits() + u64::from(op.run.start);
        Fields { space, node: pointer.node, command: 0, tag: pointer.tag.0, location }
    }

    /// The destination of a request with this target, without the command.
    fn destination(&self, op: &Op, target: Fields) -> Fields {
        let Some(peer) = self.peers.at(op.route.peer) else { return target };
        let node = peer.server.node;
        if self.is_at_endpoint(op) {
            return endpoint(target.space, node, target.shard(), 0);
        }
        if peer.at_endpoint {
            return target;
        }
        Fields { node, ..target }
    }

    /// Whether the current request for memory goes to the endpoint address of the session's server,
    /// and not to the pointer: no entry of a switch for memory can lead it to another node. A first try goes to the
    /// pointer, so that the switches count it, unless that led elsewhere lately.
    pub(super) fn is_at_endpoint(&self, op: &Op) -> bool {
        let (Some(peer), Some(_)) = (self.peers.at(op.route.peer), op.pointer()) else {
            return false;
        };
        // A giver serves TAKE and KEEP nowhere else, and a redirect to the lease's owner would lead back here.
        op.operation.giver().is_some()
            || peer.at_endpoint && (op.request.attempt > 0 || op.route.avoids_pointer)
    }

    /// Whether a first try went to the pointer of memory that the session's server has of another node.
    pub(super) fn was_at_pointer_of_other(&self, op: &Op) -> bool {
        let (Some(peer), Some(pointer)) = (self.peers.at(op.route.peer), op.pointer()) else {
            return false;
        };
        let is_of_other = pointer.node != peer.server.node && op.operation.giver().is_none();
        is_of_other && peer.at_endpoint && !op.route.avoids_pointer
    }

    /// Notes that such a pointer did not lead to the session's server.
    pub(super) fn avoid_pointer(&mut self, index: u16, until: Timestamp) {
        let op = &self.ops[index];
        if let (Some(peer), Some(pointer), true) =
            (self.peers.at(op.route.peer), op.pointer(), self.was_at_pointer_of_other(op))
        {
            self.moved.avoid_pointer(pointer, peer.server.node, until);
        }
    }

    fn wire_length(&self, op: &Op) -> u32 {
        if let Stage::Confirm(_) = op.stage {
            return match op.operation {
                Operation::Create { pages, .. } => pages,
                _ => u32::try_from(op.run.cut.page_count()).unwrap_or(0),
            };
        }
        match op.operation {
            Operation::AllocWrite { length, .. } | Operation::Ping { length, .. } => length,
            Operation::Create { pages, .. }
            | Operation::Delete { pages, .. }
            | Operation::FreePart { pages, .. } => pages,
            Operation::CompareSwap { .. } | Operation::FetchAdd { .. } => 8,
            Operation::Close { .. } | Operation::Stat { .. } => 0,
            // All other operations have a range.
            _ => u32::try_from(op.run.cut.length()).unwrap_or(0),
        }
    }

    pub(super) fn emit<'b>(&self, origin: Origin, part: Part<'b>) -> SealedRequest<'b> {
        let source = self.config.address().to_ipv6();
        let command = WireCommand::request(part.command, part.home).bits();
        let destination = Fields { command, ..part.to }.to_ipv6();
        let header = Header {
            target: part.target.to_ipv6(),
            incarnation: self.config.incarnation,
            ..part.header
        };
        let mut head = [0; HEAD_BYTES_MAX];
        header.emit(&mut head, 0);
        for (bytes, word) in
            head[HEADER_BYTES..].as_chunks_mut::<8>().0.iter_mut().zip(part.operands)
        {
            *bytes = word.to_be_bytes();
        }
        let operand_bytes = part.operand_count * 8;
        let (fixed, behind) = head.split_at_mut(HEADER_BYTES);
        let rest = behind.get(..operand_bytes).unwrap_or_default();
        seal(source, destination, fixed, if operand_bytes > 0 { rest } else { part.data });
        let head_bytes = u8::try_from(HEADER_BYTES + operand_bytes).unwrap_or(0);
        SealedRequest { source, destination, origin, data: part.data, head, head_bytes }
    }
}

impl Op {
    /// The flags of a request whose reply consists of pieces.
    fn read_flags(&self) -> Flags {
        let mut flags = Flags::default();
        if self.operation.may_queue() {
            flags = flags.with(Flags::QUEUED);
        }
        if matches!(self.operation, Operation::ReadStale { .. }) {
            flags = flags.with(Flags::MAY_BE_STALE);
        }
        flags
    }

    /// The pieces of a READ that are to be sent again: the missing ones, and all of a page that
    /// lost pieces to a newer version, so that they are of one version.
    fn wanted_pieces(&self) -> u32 {
        let pages =
            (0..self.run.cut.page_count()).filter(|page| self.arrived.settled & (1 << page) == 0);
        pages.fold(0, |wanted, page| {
            let pieces = self.run.cut.page_pieces(page);
            let missing = if self.arrived.restarted & (1 << page) == 0 {
                !self.arrived.done
            } else {
                u32::MAX
            };
            wanted | (pieces & missing)
        })
    }
}

pub(super) fn endpoint(space: Space, node: NodeId, shard: u8, entropy: u32) -> Fields {
    let address = EndpointAddress::of_shard(space, node, shard, entropy);
    Fields { space, node, command: 0, tag: 0, location: address.location_bits() }
}
