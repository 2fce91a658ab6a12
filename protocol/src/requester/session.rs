//! Sessions: opening them, losing them, and continuing in new ones (protocol, section 2).

use core::time::Duration;

use bluebridge_wire::{ArenaGeneration, Datagram, Flags, Header, Status};

use super::{
    Event, Failure, NONE, Operation, Output, Place, Requester, Server, Stage, State, op::Op,
    peer::Peer, random::Random,
};
use crate::{Timestamp, pieces::PIECE_BYTES_MIN};

/// The clocks of two hosts may differ by less than one part in this many (RFC 5905 assumes 500 parts
/// per million; virtual machines are worse).
const CLOCK_RATE_MARGIN: u32 = 64;

/// How often OPEN is repeated because its reply may have been delayed.
const DOUBTS_MAX: u8 = 4;

/// When the server's process served already, by the own clock, as a reply to OPEN shows that arrives
/// now: it stated how long the process has served when the reply was sent.
fn served_at(now: Timestamp, header: &Header) -> Option<Timestamp> {
    let served = Duration::from_micros(header.page_version);
    // The server's clock may run faster than the own one.
    (header.page_version > 0).then(|| before(now, served - served / CLOCK_RATE_MARGIN))
}

/// The time `length` before a moment; the first one of the clock if there was none.
fn before(moment: Timestamp, length: Duration) -> Timestamp {
    let length = u64::try_from(length.as_nanos()).unwrap_or(u64::MAX);
    Timestamp::from_nanos(moment.as_nanos().saturating_sub(length))
}

/// How an operation whose session is lost continues.
enum Resume {
    Again,
    /// The home, which lost its memory, is asked whether the line lives elsewhere.
    Ask,
    End(Result<Output, Failure>),
}

impl Requester {
    /// Starts to open a session, if that was not started before.
    pub(super) fn open(&mut self, now: Timestamp, peer: u16) {
        let pause = match self.peers[peer].failed_sessions {
            0 | 1 => None,
            losses => Some(self.config.timing.back_off_min * (1 << losses.min(6))),
        };
        let entry = &mut self.peers[peer];
        if entry.state == State::Opening && !entry.open_due {
            let timer = entry.timer;
            self.arm(timer);
            return;
        }
        if entry.state != State::Closed {
            return;
        }
        if entry.nonce == 0 {
            entry.nonce = nonce(&mut self.random, peer);
            entry.open_sent = None;
        }
        let entry = &mut self.peers[peer];
        entry.state = State::Opening;
        entry.open_attempt = 0;
        entry.open_doubts = 0;
        entry.open_pauses = 0;
        entry.misrouted = None;
        match pause {
            None => self.send_open(peer),
            Some(pause) => {
                entry.timer = now + pause;
                self.arm(now + pause);
            }
        }
    }

    pub(super) fn send_open(&mut self, peer: u16) {
        if !core::mem::replace(&mut self.peers[peer].open_due, true) {
            self.opening.push_back(peer);
        }
    }

    /// Discards the OPENs that were sent: a session keeps the piece size of its first OPEN, also
    /// when the OPEN is repeated.
    pub(super) fn discard_opens(&mut self) {
        for peer in 0..u16::try_from(self.peers.count()).unwrap_or(NONE) {
            let nonce = nonce(&mut self.random, peer);
            let entry = &mut self.peers[peer];
            if entry.nonce != 0 && entry.open_sent.is_some() {
                (entry.nonce, entry.open_sent, entry.open_attempt) = (nonce, None, 0);
            }
        }
    }

    /// The timer of an OPEN expired.
    pub(super) fn open_again(&mut self, peer: u16) {
        let entry = &mut self.peers[peer];
        if entry.op_count == 0 {
            entry.state = State::Closed;
            return;
        }
        if entry.open_due {
            return;
        }
        if entry.open_sent.is_some() {
            entry.open_attempt = entry.open_attempt.saturating_add(1);
            self.counters.count(Event::OpenRetransmit);
        }
        self.send_open(peer);
    }

    /// A reply to OPEN.
    pub(super) fn handle_open_reply(&mut self, now: Timestamp, reply: &Datagram<'_>) {
        let header = &reply.header;
        let [.., high, low] = header.sequence.to_be_bytes();
        let peer = u16::from_be_bytes([high, low]);
        if self.peers.at(peer).is_none() {
            self.counters.count(Event::ReplyStale);
            return;
        }
        let entry = &mut self.peers[peer];
        if entry.state != State::Opening || header.sequence != entry.nonce {
            self.counters.count(Event::ReplyStale);
            return;
        }
        let Some(status) = Status::from_code(reply.from.tag) else {
            self.counters.count(Event::ReplyUntrusted);
            return;
        };
        if reply.from.node != entry.server.node {
            // Another node replies instead of the server: the network delivered the OPEN to the
            // wrong node.
            if status == Status::WrongNode {
                entry.misrouted = Some(reply.from.node);
            }
            self.counters.count(Event::ReplyUntrusted);
            return;
        }
        entry.last_seen = Some(now);
        self.counters.count_status(status);
        match status {
            Status::Ok => self.opened(now, peer, reply),
            Status::Overloaded => {
                let pauses = entry.open_pauses;
                entry.open_pauses = pauses.saturating_add(1);
                let when = now + self.pause(pauses);
                self.peers[peer].timer = when;
                self.arm(when);
            }
            _ => self.refuse_open(peer, Failure::Refused { status, node: reply.from.node }),
        }
    }

    fn opened(&mut self, now: Timestamp, peer: u16, reply: &Datagram<'_>) {
        let header = &reply.header;
        let piece_bytes = u16::try_from(header.length).unwrap_or(u16::MAX);
        let generation = u16::try_from(header.detail).ok().and_then(ArenaGeneration::new);
        let piece_is_good =
            usize::from(piece_bytes) >= PIECE_BYTES_MIN && piece_bytes <= self.config.piece_bytes;
        let entry = &mut self.peers[peer];
        let (Some(generation), true, true) = (generation, piece_is_good, header.session != 0)
        else {
            self.counters.count(Event::ReplyViolation);
            return;
        };
        if header.flags.attempt() == entry.open_attempt
            && entry.open_attempt < super::transmit::ATTEMPT_MAX
            && let Some(sent) = entry.open_sent
        {
            entry.round_trip.sample(now.saturating_since(sent));
        }
        let lost_incarnation = entry.incarnation;
        let served_at = served_at(now, header);
        // Of several replies of the same process, each is true.
        let known = entry.served_at.filter(|(incarnation, _)| *incarnation == header.incarnation);
        let best = [known.map(|(_, served_at)| served_at), served_at].into_iter().flatten().min();
        entry.served_at = best.map(|served_at| (header.incarnation, served_at));
        if entry.holding && entry.open_doubts < DOUBTS_MAX && self.is_in_doubt(peer, header) {
            self.peers[peer].open_doubts += 1;
            self.counters.count(Event::OpenInDoubt);
            self.send_open(peer);
            return;
        }
        let entry = &mut self.peers[peer];
        entry.open_doubts = 0;
        entry.state = State::Open;
        entry.session = header.session;
        self.peers.enter_session(peer);
        let entry = &mut self.peers[peer];
        entry.incarnation = header.incarnation;
        entry.generation = generation;
        entry.piece_bytes = piece_bytes;
        entry.at_endpoint = header.flags.contains(Flags::AT_ENDPOINT);
        entry.credit = header.credit;
        entry.nonce = 0;
        entry.misrouted = None;
        self.counters.count(Event::SessionOpen);
        if core::mem::take(&mut self.peers[peer].holding) {
            self.resume(now, peer, lost_incarnation);
        }
        self.peers[peer].renumber();
        self.admit(now, peer);
    }

    /// Whether a reply to OPEN was delayed so much that another one may show that an operation was
    /// first sent to the server's present process.
    fn is_in_doubt(&self, peer: u16, header: &Header) -> bool {
        let entry = &self.peers[peer];
        let (Some((_, served_at)), Some(open_sent)) = (entry.served_at, entry.open_sent) else {
            return false;
        };
        let earliest = before(open_sent, Duration::from_micros(header.page_version));
        let may_be_later = |op: &Op| {
            let first_sent = op.request.first_sent;
            let is_candidate = op.request.sent_count > 0 && !op.sent_before;
            is_candidate && (earliest..served_at).contains(&first_sent)
        };
        let numbers = entry.low_water..entry.next_sequence;
        header.incarnation != entry.incarnation
            && numbers
                .map(|sequence| entry.numbered(sequence))
                .any(|index| index != NONE && may_be_later(&self.ops[index]))
    }

    /// The server no longer knows the session.
    pub(super) fn lose_session(&mut self, now: Timestamp, peer: u16) {
        self.counters.count(Event::SessionLost);
        let entry = &mut self.peers[peer];
        entry.failed_sessions = entry.failed_sessions.saturating_add(1);
        entry.state = State::Closed;
        entry.closing = false;
        entry.holding = true;
        for sequence in entry.low_water..entry.next_sequence {
            let index = self.peers[peer].numbered(sequence);
            if index != NONE {
                self.detach(index);
                self.ops[index].link.place = Place::Held;
                self.ops[index].request.to_send = 0;
            }
        }
        self.open(now, peer);
    }

    /// Decides, in a new session, how every operation of the lost session continues.
    fn resume(&mut self, now: Timestamp, peer: u16, lost_incarnation: u32) {
        let numbers = self.peers[peer].low_water..self.peers[peer].next_sequence;
        for sequence in numbers.rev() {
            let index = self.peers[peer].numbered(sequence);
            if index == NONE {
                continue;
            }
            match self.resumption(now, lost_incarnation, &self.ops[index], &self.peers[peer]) {
                Resume::Again => {
                    self.counters.count(Event::Resumed);
                    let op = &mut self.ops[index];
                    op.may_be_applied |= op.request.sent_count > 0 && op.is_directed_create();
                    op.sent_before |= op.request.sent_count > 0;
                    op.route.home = true;
                    // All pages of the run are requested again, also those that were complete.
                    op.pages.pending |= super::page_bits(op.run_page_count()) << op.run.first_page;
                    self.retire_number(index);
                    self.ops[index].link.place = Place::Waiting;
                    self.ops.push_front(&mut self.peers[peer].waiting, index);
                }
                Resume::Ask => {
                    self.counters.count(Event::ResumeUnsafe);
                    let op = &mut self.ops[index];
                    (op.is_question, op.may_be_applied, op.sent_before) = (true, true, true);
                    op.route.home = true;
                    op.pages.pending |= super::page_bits(op.run_page_count()) << op.run.first_page;
                    self.retire_number(index);
                    self.ops[index].link.place = Place::Waiting;
                    self.ops.push_front(&mut self.peers[peer].waiting, index);
                }
                Resume::End(result) => {
                    self.counters.count(Event::ResumeUnsafe);
                    self.finish(index, result);
                }
            }
        }
    }

    fn resumption(&self, now: Timestamp, lost_incarnation: u32, op: &Op, peer: &Peer) -> Resume {
        let idempotent = matches!(
            op.operation,
            Operation::Abort { .. }
                | Operation::Keep { .. }
                | Operation::Ping { .. }
                | Operation::Read { .. }
                | Operation::ReadStale { .. }
                | Operation::ReadTaken { .. }
                | Operation::Renew { .. }
                | Operation::Stat { .. }
                | Operation::Take { .. }
                | Operation::Update { .. }
        );
        let Server { node, .. } = peer.server;
        if matches!(op.operation, Operation::Close { .. }) {
            return Resume::End(Ok(Output::Done));
        }
        if op.request.sent_count == 0
            || idempotent
            || op.is_directed_create()
            || matches!(op.stage, Stage::Confirm(_))
        {
            return Resume::Again;
        }
        let idle = self.config.timing.session_idle;
        let recent = now.saturating_since(op.request.first_sent) < idle / 4 * 3;
        if peer.incarnation == lost_incarnation && recent {
            return Resume::Again;
        }
        // Only the process that had the session could have executed it, and that one had ended
        // before it was sent.
        let is_after = |(_, served_at)| op.request.first_sent >= served_at && !op.sent_before;
        if peer.incarnation != lost_incarnation && peer.served_at.is_some_and(is_after) {
            return Resume::Again;
        }
        let home = op.pointer().filter(|pointer| pointer.node == node);
        // Contents of earlier generations were lost, unless the line had moved; later ones are current.
        if home.is_some_and(|pointer| pointer.location.generation() < peer.generation) {
            return Resume::Ask;
        }
        Resume::End(Err(Failure::OutcomeUnknown { node, responding: true }))
    }

    /// No session can be opened: all operations that wait for one fail.
    pub(super) fn refuse_open(&mut self, peer: u16, failure: Failure) {
        let entry = &mut self.peers[peer];
        entry.state = State::Closed;
        entry.nonce = 0;
        entry.holding = false;
        for sequence in entry.low_water..entry.next_sequence {
            let index = self.peers[peer].numbered(sequence);
            if index != NONE {
                self.fail(index, failure);
            }
        }
        while !self.peers[peer].waiting.is_empty() {
            let index = self.peers[peer].waiting.head;
            self.fail(index, failure);
        }
    }

    /// CLOSE has its reply, or the session is known to be closed.
    pub(super) fn closed(&mut self, now: Timestamp, peer: u16, index: u16) {
        self.counters.count(Event::SessionClose);
        self.finish(index, Ok(Output::Done));
        let entry = &mut self.peers[peer];
        entry.state = State::Closed;
        entry.session = 0;
        self.admit(now, peer);
    }
}

/// A number for an OPEN: never 0, and its low bits identify the peer in the reply.
fn nonce(random: &mut Random, peer: u16) -> u64 {
    (random.next() & !0xffff) | (1 << 63) | u64::from(peer)
}

impl Op {
    /// Whether it is a directed CREATE or ALLOC_WRITE: without its reply its pages are unknown.
    pub(super) const fn is_directed_create(&self) -> bool {
        matches!(self.stage, Stage::Direct)
            && matches!(self.operation, Operation::AllocWrite { .. } | Operation::Create { .. })
    }
}
