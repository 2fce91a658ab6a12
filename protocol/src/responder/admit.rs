//! The checks before a command is executed, in the order of `docs/protocol.md`, section 7:
//! destination, features and command, space, session and number.

use core::time::Duration;

use bluebridge_wire::{
    Command, Datagram, Features, Flags, Header, Location, NodeId, SESSION_WINDOW, Status,
    address::Fields,
};

use super::{
    Event, Refusal, Responder,
    config::{PIECE_BYTES_MAX, PIECE_BYTES_MIN},
    cut::Pieces,
    record::{Progress, Record},
    replies::ReplyPath,
    sessions::{Place, Raised, RequesterId},
    trains::TrainOwner,
};
use crate::{Timestamp, store::PageStore};

/// A datagram with the results of the checks.
#[derive(Clone, Copy)]
pub(super) struct Request<'a> {
    pub(super) now: Timestamp,
    pub(super) port: u16,
    pub(super) datagram: &'a Datagram<'a>,
    /// Pages of reply data that the requester can receive at once.
    pub(super) takes_pages: u16,
}

impl Request<'_> {
    pub(super) const fn header(&self) -> &Header {
        &self.datagram.header
    }

    pub(super) const fn requester(&self) -> RequesterId {
        RequesterId {
            space: self.datagram.from.space,
            node: self.datagram.from.node,
            incarnation: self.datagram.header.incarnation,
        }
    }

    pub(super) const fn attempt(&self) -> u8 {
        self.datagram.header.flags.attempt()
    }
}

/// A request in a session, with the state that its command needs until the reply.
#[derive(Clone, Copy)]
pub(super) struct Execution<'a> {
    pub(super) request: &'a Request<'a>,
    pub(super) command: Command,
    /// The session's slot.
    pub(super) slot: u16,
    /// The record of the request's number so far.
    pub(super) before: &'a Record,
}

impl Execution<'_> {
    /// The same without a record, as if nothing of the request had arrived before.
    pub(super) const fn without_record(&self) -> Self {
        Self { before: &Record::FRESH, ..*self }
    }

    /// Whether nothing of the request arrived before.
    pub(super) fn is_fresh(&self) -> bool {
        self.before.progress == Progress::Fresh
    }

    /// The owner of the train that the request's pieces make.
    pub(super) const fn train_owner(&self) -> TrainOwner {
        let holder = self.request.requester().holder();
        TrainOwner { holder, session: self.slot, sequence: self.request.header().sequence }
    }
}

/// The result of the first checks.
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
        match self.classify(datagram) {
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
    fn classify(&self, datagram: &Datagram<'_>) -> Verdict {
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
        let is_own = self.is_own_node(to.node);
        // An endpoint's address names one endpoint, wherever its ranges are served.
        let is_adopted = to.is_memory() && self.ranges.adopts_from(to.node);
        if !is_own && !is_anycast && !is_adopted {
            return Status::WrongNode.into();
        }
        if u16::from(to.shard()) % self.shard_count != u16::from(self.shard) {
            return Verdict::Drop(Event::DropWrongShard);
        }
        let is_at_pointer = (target.node == to.node || is_own) && same_except_node(to, target);
        let is_at_endpoint = is_own && to.is_endpoint_for(*target);
        // A switch could lead them astray at the pointer, and the line is not the pointer's owner's to give.
        let is_for_giver =
            code.command().is_some_and(|of| matches!(of, Command::Take | Command::Keep));
        if !(is_at_endpoint || is_at_pointer && !is_for_giver) {
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
        let requester = request.requester();
        let form = if self.is_stale(request, store) {
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
        self.raise_incarnation(request.now, &request.requester(), store);
        if let Some(slot) = self.sessions.opened_by(&requester, header.sequence) {
            self.counters.count(Event::OpenRepeated);
            self.sessions.touch(request.now, slot);
            return self.reply_to_open(request, slot, store);
        }
        match self.place_session(request, store) {
            Ok(Place::Vacant) => {}
            Ok(Place::Instead(slot)) => self.end_session(slot, Event::SessionEvicted, store),
            Err(_) => return self.refuse(request, Status::Overloaded.into()),
        }
        let Ok(slot) = self.sessions.open_at(request.now, requester, header.sequence) else {
            return self.refuse(request, Status::Overloaded.into());
        };
        let proposed = u16::try_from(header.length).unwrap_or(u16::MAX);
        let piece_bytes = proposed.min(self.piece_bytes);
        let session = self.sessions.at(slot);
        session.piece_bytes = piece_bytes;
        session.takes_pages = header.credit.max(1);
        self.counters.count(Event::SessionOpened);
        self.share_credit();
        self.share_session(slot, store);
        self.wake_by(request.now + self.timers.session_idle);
        self.reply_to_open(request, slot, store);
    }

    fn reply_to_open<S: PageStore + ?Sized>(
        &mut self,
        request: &Request<'_>,
        slot: u16,
        store: &S,
    ) {
        let session = self.sessions.at(slot);
        let (id, piece_bytes) = (session.id(), session.piece_bytes);
        let request = Request { takes_pages: session.takes_pages, ..*request };
        let detail = u32::from(store.generation().number());
        let header = self.reply_header(&request);
        let served = self.begun_at.map_or(Duration::ZERO, |begun| {
            request.now.saturating_since(begun).saturating_add(self.idle_before)
        });
        let header = Header {
            flags: header.flags.with(Flags::AT_ENDPOINT),
            session: id,
            length: u32::from(piece_bytes),
            detail,
            page_version: u64::try_from(served.as_micros()).unwrap_or(u64::MAX),
            ..header
        };
        self.push(&request, Status::Ok, &header, &[], &[]);
    }

    /// Whether the requester's incarnation is outdated. A higher incarnation is dropped when the
    /// node was not seen for so long that its sessions ended and all its datagrams are gone:
    /// otherwise a former holder of the node's id could lock out all later holders.
    pub(super) fn is_stale<S: PageStore + ?Sized>(
        &mut self,
        request: &Request<'_>,
        store: &mut S,
    ) -> bool {
        let requester = request.requester();
        if requester.incarnation >= self.incarnations.highest(&requester) {
            return false;
        }
        let quarantine_ended = self.incarnations.unseen_for(&requester, request.now)
            >= self.timers.incarnation_quarantine
            && !self.sessions.has_node_of(&requester)
            && !self.provisional.has_node_of(&requester);
        if quarantine_ended {
            self.incarnations.forget(&requester);
            // The next process would enforce it again, for as long as if the node had just been seen.
            store.keep_fence(requester.space, requester.node, 0);
            self.counters.count(Event::IncarnationForgotten);
        }
        !quarantine_ended
    }

    /// Records a requester's incarnation; a higher one ends the sessions of older ones.
    pub(super) fn raise_incarnation<S: PageStore + ?Sized>(
        &mut self,
        now: Timestamp,
        requester: &RequesterId,
        store: &mut S,
    ) {
        let raised = self.incarnations.raise(requester);
        self.incarnations.note(requester, now);
        if raised != Raised::No {
            let RequesterId { space, node, incarnation } = *requester;
            store.keep_fence(space, node, incarnation);
            self.givings.note_fence(requester);
        }
        if raised != Raised::Higher {
            return;
        }
        self.counters.count(Event::IncarnationRaised);
        self.end_superseded_leases(now, requester);
        while let Some(slot) = self.sessions.superseded_by(requester) {
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
        let requester = request.requester();
        if header.incarnation < self.incarnations.highest(&requester) {
            return self.refuse(request, Status::StaleIncarnation.into());
        }
        let found = self.sessions.slot(header.session);
        let Some(slot) = found.filter(|&slot| self.sessions.at(slot).requester == requester) else {
            return self.refuse(request, Status::NoSession.into());
        };
        self.enter(slot, store);
        self.in_its_session(request, command, slot, store);
        self.leave(slot, header.session, store);
    }

    /// The same in the requester's session, which direct readers leave alone meanwhile.
    fn in_its_session<S: PageStore + ?Sized>(
        &mut self,
        request: &Request<'_>,
        command: Command,
        slot: u16,
        store: &mut S,
    ) {
        let header = request.header();
        let session = self.sessions.touch(request.now, slot);
        let request = &Request { takes_pages: session.takes_pages, ..*request };
        self.raise_low_water(slot, header.low_water(), store);
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
        let contradicts = record.progress == Progress::Waiting
            && self.queue.at(record.waiter).is_some_and(|waiter| !waiter.is_repeated_by(request));
        if contradicts {
            return self.refuse(request, Status::Malformed.into());
        }
        let execution = Execution { request, command, slot, before: &record };
        if record.progress == Progress::Replied {
            self.counters.count(Event::ReplyRepeated);
            if matches!(command, Command::Update | Command::Renew) && record.status.is_ok() {
                self.counters.count(Event::LeaseRepeated);
            }
            return self.reply(&execution, &record, store);
        }
        if self.is_shutting_down && record.progress == Progress::Fresh && command != Command::Close
        {
            return self.refuse(request, Status::ShuttingDown.into());
        }
        if command != Command::Confirm {
            self.confirm_implicitly(request, store);
        }
        self.execute(&execution, store);
    }

    /// The header of a reply to a request, before the status is known.
    pub(super) fn reply_header(&self, request: &Request<'_>) -> Header {
        let received = request.header();
        Header {
            flags: Flags::default().with_attempt(request.attempt()),
            target: received.target,
            session: received.session,
            incarnation: self.incarnation,
            sequence: received.sequence,
            credit: self.credit_pages.min(request.takes_pages),
            length: received.length,
            range_epoch: self.authority.map_or(0, |authority| authority.range_epoch),
            ..Header::default()
        }
    }

    /// The addresses of a reply: the source is the own node, with command and status.
    pub(super) fn reply_path(&self, request: &Request<'_>, status: Status) -> ReplyPath {
        let to = request.datagram.to;
        let space = if self.incarnations.serves(to.space) { to.space } else { self.home_space };
        let command = bluebridge_wire::WireCommand::REPLY | request.datagram.command().code();
        let source = Fields { space, node: self.node, command, tag: status.code(), ..to };
        ReplyPath {
            source: source.to_ipv6(),
            destination: request.datagram.source,
            port: request.port,
        }
    }

    pub(super) fn push(
        &mut self,
        request: &Request<'_>,
        status: Status,
        header: &Header,
        statuses: &[Status],
        data: &[u8],
    ) {
        let reply_path = self.reply_path(request, status);
        self.counters.count_reply(status);
        self.replies.push(reply_path, header, statuses, data);
    }

    /// Sends a refusal that is not recorded.
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

/// The pages of a READ over several pages that must be refused page by page.
fn several_pages(request: &Request<'_>, status: Status) -> Option<Pieces> {
    let is_about_pages = matches!(
        status,
        Status::Busy
            | Status::Moved
            | Status::NoAuthority
            | Status::StaleGeneration
            | Status::StaleRangeEpoch
            | Status::WrongNode
            | Status::WrongSpace
    );
    let datagram = request.datagram;
    if !is_about_pages || datagram.command().command() != Some(Command::Read) {
        return None;
    }
    let location = Location::from_bits(datagram.target.location)?;
    // The boundaries of the page parts do not depend on the piece size.
    let cut = Pieces::new(location, datagram.header.length, PIECE_BYTES_MAX)?;
    (cut.page_count() > 1).then_some(cut)
}

fn same_except_node(to: &Fields, target: &Fields) -> bool {
    (to.space, to.tag, to.location) == (target.space, target.tag, target.location)
}
