//! The checks before a command is looked at, in the order of `docs/protocol.md`, section 7:
//! destination, features and command, space, session and number.

use bluebridge_wire::{
    Command, Datagram, Features, Flags, Header, Location, NodeId, SESSION_WINDOW, Status,
    address::Fields,
};

use super::{
    Event, Refusal, Responder,
    config::{PIECE_BYTES_MAX, PIECE_BYTES_MIN},
    cut::Pieces,
    record::{Progress, Record},
    replies::Way,
    sessions::{Asker, Place},
    trains::TrainOwner,
};
use crate::{Timestamp, store::PageStore};

/// A datagram with what the checks found out about it.
#[derive(Clone, Copy)]
pub(super) struct Request<'a> {
    pub(super) now: Timestamp,
    pub(super) port: u16,
    pub(super) datagram: &'a Datagram<'a>,
    /// Pages of replies that the requester takes at once.
    pub(super) takes_pages: u16,
}

impl Request<'_> {
    pub(super) const fn header(&self) -> &Header {
        &self.datagram.header
    }

    pub(super) const fn asker(&self) -> Asker {
        Asker {
            space: self.datagram.from.space,
            node: self.datagram.from.node,
            incarnation: self.datagram.header.incarnation,
        }
    }

    pub(super) const fn attempt(&self) -> u8 {
        self.datagram.header.flags.attempt()
    }
}

/// A request in a session, with what its commands pass on until it is answered.
#[derive(Clone, Copy)]
pub(super) struct Execution<'a> {
    pub(super) request: &'a Request<'a>,
    pub(super) command: Command,
    /// The session's slot.
    pub(super) slot: u16,
    /// What is recorded under the request's number so far.
    pub(super) before: &'a Record,
}

impl Execution<'_> {
    /// As if nothing of the request had arrived before.
    pub(super) const fn afresh(&self) -> Self {
        Self { before: &Record::FRESH, ..*self }
    }

    /// Whether nothing of the request arrived before.
    pub(super) fn is_fresh(&self) -> bool {
        self.before.progress == Progress::Fresh
    }

    /// The owner of the train that the request's pieces make.
    pub(super) const fn train_owner(&self) -> TrainOwner {
        let holder = self.request.asker().holder();
        TrainOwner { holder, session: self.slot, sequence: self.request.header().sequence }
    }
}

/// How the first checks end.
enum Verdict {
    Drop(Event),
    Pass(Command),
    Refuse(Refusal),
}

impl From<Status> for Verdict {
    fn from(status: Status) -> Self {
        Self::Refuse(status.into())
    }
}

impl Responder {
    pub(super) fn admit<S: PageStore + ?Sized>(
        &mut self,
        now: Timestamp,
        port: u16,
        datagram: &Datagram<'_>,
        store: &mut S,
    ) {
        let request = Request { now, port, datagram, takes_pages: 1 };
        match self.judge(datagram) {
            Verdict::Drop(event) => self.counters.count(event),
            Verdict::Refuse(refusal) => self.refuse(&request, refusal),
            Verdict::Pass(Command::Open) => self.open(&request, store),
            Verdict::Pass(command) if datagram.to.node == NodeId::ANY => {
                self.create_anywhere(&request, command, store);
            }
            Verdict::Pass(command) => self.in_session(&request, command, store),
        }
    }

    /// Steps 2 to 4.
    fn judge(&self, datagram: &Datagram<'_>) -> Verdict {
        let Datagram { from, to, target, header, .. } = datagram;
        let code = datagram.command();
        if datagram.is_reply() {
            return Verdict::Drop(Event::DropReply);
        }
        if !from.node.is_unicast() {
            return Verdict::Drop(Event::DropSource);
        }
        let is_notice = code.command().is_some_and(Command::is_notice);
        if is_notice {
            return Verdict::Drop(Event::DropNotice);
        }
        if to.node == NodeId::ALL {
            return Verdict::Drop(Event::DropMulticast);
        }
        let is_anycast = to.node == NodeId::ANY && code.command().is_some_and(Command::is_anycast);
        let is_foreign = !self.is_own_node(to.node) && !is_anycast;
        if is_foreign && !self.ranges.adopts_from(to.node) {
            return Status::WrongNode.into();
        }
        if u16::from(to.shard()) % self.shard_count != u16::from(self.shard) {
            return Verdict::Drop(Event::DropWrongShard);
        }
        let is_via = self.is_own_node(to.node);
        let same_node = target.node == to.node || is_via;
        if !same_node || !same_beside_node(to, target) {
            return Status::Malformed.into();
        }
        let missing = header.required.missing_from(Features::SUPPORTED);
        if missing.0 != 0 {
            let (status, detail) = (Status::UnsupportedFeature, u32::from(missing.0));
            return Verdict::Refuse(Refusal { detail, ..status.into() });
        }
        let Some(command) = code.command() else {
            return Status::UnknownCommand.into();
        };
        if header.key_id != 0 || !datagram.trailer.is_empty() {
            return Status::Unauthenticated.into();
        }
        if from.space != target.space || !self.incarnations.serves(target.space) {
            return Status::WrongSpace.into();
        }
        Verdict::Pass(command)
    }

    /// OPEN (section 2).
    fn open<S: PageStore + ?Sized>(&mut self, request: &Request<'_>, store: &mut S) {
        let header = request.header();
        let asker = request.asker();
        let form = if self.is_stale(request) {
            Err(Status::StaleIncarnation)
        } else if self.is_shutting_down {
            Err(Status::ShuttingDown)
        } else if header.session != 0 || !request.datagram.data.is_empty() {
            Err(Status::Malformed)
        } else if header.length < u32::from(PIECE_BYTES_MIN) {
            Err(Status::BadLength)
        } else {
            Ok(())
        };
        if let Err(status) = form {
            return self.refuse(request, status.into());
        }
        self.raise_incarnation(request, store);
        if let Some(slot) = self.sessions.opened_by(&asker, header.sequence) {
            self.counters.count(Event::OpenRepeated);
            self.sessions.hear(request.now, slot);
            return self.answer_open(request, slot, store);
        }
        match self.sessions.place(request.now, &asker) {
            Ok(Place::Vacant) => {}
            Ok(Place::Instead(slot)) => self.end_session(slot, Event::SessionEvicted, store),
            Err(_) => return self.refuse(request, Status::Overloaded.into()),
        }
        let Ok(slot) = self.sessions.open_at(request.now, asker, header.sequence) else {
            return self.refuse(request, Status::Overloaded.into());
        };
        let proposed = u16::try_from(header.length).unwrap_or(u16::MAX);
        let piece_bytes = proposed.min(self.piece_bytes);
        let session = self.sessions.at(slot);
        session.piece_bytes = piece_bytes;
        session.takes_pages = header.credit.max(1);
        self.counters.count(Event::SessionOpened);
        self.share_credit();
        self.wake_by(request.now + self.timers.session_idle);
        self.answer_open(request, slot, store);
    }

    fn answer_open<S: PageStore + ?Sized>(&mut self, request: &Request<'_>, slot: u16, store: &S) {
        let session = self.sessions.at(slot);
        let (id, piece_bytes) = (session.id(), session.piece_bytes);
        let request = Request { takes_pages: session.takes_pages, ..*request };
        let detail = u32::from(store.generation().number());
        let header = self.reply_header(&request);
        let header = Header { session: id, length: u32::from(piece_bytes), detail, ..header };
        self.push(&request, Status::Ok, &header, &[], &[]);
    }

    /// Whether the asker's incarnation is over. One that claimed to be later, and then was silent
    /// for so long that its sessions ended and all its datagrams are gone, does not count any
    /// more: else whoever had the node's id once could spoil it for all that get it later.
    pub(super) fn is_stale(&mut self, request: &Request<'_>) -> bool {
        let asker = request.asker();
        if asker.incarnation >= self.incarnations.highest(&asker) {
            return false;
        }
        let has_rested = self.incarnations.silence(&asker, request.now)
            >= self.timers.incarnation_rest
            && !self.sessions.has_node_of(&asker)
            && !self.provisional.has_node_of(&asker);
        if has_rested {
            self.incarnations.forget(&asker);
            self.counters.count(Event::IncarnationForgotten);
        }
        !has_rested
    }

    /// Notes the asker's incarnation; a higher one ends the sessions of older ones.
    pub(super) fn raise_incarnation<S: PageStore + ?Sized>(
        &mut self,
        request: &Request<'_>,
        store: &mut S,
    ) {
        let asker = &request.asker();
        let is_raised = self.incarnations.raise(asker);
        self.incarnations.note(asker, request.now);
        if !is_raised {
            return;
        }
        self.counters.count(Event::IncarnationRaised);
        self.end_superseded_leases(request);
        while let Some(slot) = self.sessions.superseded_by(asker) {
            self.end_session(slot, Event::SessionSuperseded, store);
        }
    }

    /// Step 5: session, incarnation, number (sections 2 and 3).
    fn in_session<S: PageStore + ?Sized>(
        &mut self,
        request: &Request<'_>,
        command: Command,
        store: &mut S,
    ) {
        let header = request.header();
        let asker = request.asker();
        if header.incarnation < self.incarnations.highest(&asker) {
            return self.refuse(request, Status::StaleIncarnation.into());
        }
        let found = self.sessions.slot(header.session);
        let Some(slot) = found.filter(|&slot| self.sessions.at(slot).asker == asker) else {
            return self.refuse(request, Status::NoSession.into());
        };
        let session = self.sessions.hear(request.now, slot);
        let request = &Request { takes_pages: session.takes_pages, ..*request };
        let is_raised = header.low_water() > session.low_water;
        if is_raised {
            self.counters.count(Event::LowWaterRaised);
            self.forget_below(slot, header.low_water(), store);
        }
        let session = self.sessions.at(slot);
        let Some(ahead) = header.sequence.checked_sub(session.low_water) else {
            return self.refuse(request, Status::Expired.into());
        };
        if ahead >= SESSION_WINDOW {
            return self.refuse(request, Status::BeyondWindow.into());
        }
        let record = session.record(header.sequence);
        if record.progress != Progress::Fresh && record.command != command {
            return self.refuse(request, Status::Malformed.into());
        }
        let contradicts = record.progress == Progress::Waits
            && self.queue.at(record.waiter).is_some_and(|waiter| !waiter.is_repeated_by(request));
        if contradicts {
            return self.refuse(request, Status::Malformed.into());
        }
        let execution = Execution { request, command, slot, before: &record };
        if record.progress == Progress::Answered {
            self.counters.count(Event::AnswerRepeated);
            if matches!(command, Command::Update | Command::Renew) && record.status.is_ok() {
                self.counters.count(Event::LeaseRepeated);
            }
            return self.answer(&execution, &record, store);
        }
        if self.is_shutting_down && record.progress == Progress::Fresh && command != Command::Close
        {
            return self.refuse(request, Status::ShuttingDown.into());
        }
        if command != Command::Confirm {
            self.keep_if_asked_for(request);
        }
        self.execute(&execution, store);
    }

    /// The header of a reply to a request, before the status is known.
    pub(super) fn reply_header(&self, request: &Request<'_>) -> Header {
        let asked = request.header();
        Header {
            flags: Flags::default().with_attempt(request.attempt()),
            target: asked.target,
            session: asked.session,
            incarnation: self.incarnation,
            sequence: asked.sequence,
            credit: self.credit_pages.min(request.takes_pages),
            length: asked.length,
            range_epoch: self.authority.map_or(0, |authority| authority.range_epoch),
            ..Header::default()
        }
    }

    /// Where a reply goes: from the own node, with command and status in the source.
    pub(super) fn way(&self, request: &Request<'_>, status: Status) -> Way {
        let to = request.datagram.to;
        let space = if self.incarnations.serves(to.space) { to.space } else { self.home_space };
        let command = bluebridge_wire::WireCommand::REPLY | request.datagram.command().code();
        let source = Fields { space, node: self.node, command, tag: status.code(), ..to };
        Way { source: source.to_ipv6(), destination: request.datagram.source, port: request.port }
    }

    pub(super) fn push(
        &mut self,
        request: &Request<'_>,
        status: Status,
        header: &Header,
        statuses: &[Status],
        data: &[u8],
    ) {
        let way = self.way(request, status);
        self.counters.count_answer(status);
        self.replies.push(way, header, statuses, data);
    }

    /// Answers a refusal that is not recorded.
    pub(super) fn refuse(&mut self, request: &Request<'_>, refusal: Refusal) {
        let Refusal { status, detail, node, epoch } = refusal;
        let header = Header { detail, node, lease_epoch: epoch, ..self.reply_header(request) };
        match several_pages(request, status) {
            Some(cut) => {
                for part in cut.parts() {
                    self.refuse_page(request, &header, part, status);
                }
            }
            None => self.push(request, status, &header, &[], &[]),
        }
    }
}

/// The pages of a READ over several that must be refused page by page.
fn several_pages(request: &Request<'_>, status: Status) -> Option<Pieces> {
    let is_about_pages = matches!(
        status,
        Status::Moved
            | Status::NoAuthority
            | Status::StaleRangeEpoch
            | Status::WrongNode
            | Status::WrongSpace
    );
    let datagram = request.datagram;
    if !is_about_pages || datagram.command().command() != Some(Command::Read) {
        return None;
    }
    let location = Location::from_bits(datagram.target.location)?;
    // Where the parts of pages begin does not depend on the piece size.
    let cut = Pieces::new(location, datagram.header.length, PIECE_BYTES_MAX)?;
    (cut.page_count() > 1).then_some(cut)
}

fn same_beside_node(to: &Fields, target: &Fields) -> bool {
    (to.space, to.tag, to.location) == (target.space, target.tag, target.location)
}
