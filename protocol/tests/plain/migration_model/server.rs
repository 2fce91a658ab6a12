//! A server's answers to clients.

use super::{
    FIRST_TAG, LONGEST_LEASE, Mutant, Op, Scenario,
    lines::{Epoch, Lease, Link, Owner},
    messages::{Answer, Pointer, Request},
    world::{Doing, Forward, HOME, Session, World},
};

impl Scenario {
    pub(super) fn op_of(&self, world: &World, client: u8) -> Option<Op> {
        let next = world.client(client).next;
        self.clients[usize::from(client)].ops.get(usize::from(next)).copied()
    }

    /// What an operation is about.
    pub(super) fn pointer(&self, world: &World, client: u8, op: Op) -> Option<Pointer> {
        match op {
            Op::Read(line, page)
            | Op::Add(line, page)
            | Op::Update(line, page)
            | Op::Commit(line, page)
            | Op::RenewForEver(line, page) => {
                Some(Pointer { line, page, generation: 1, tag: FIRST_TAG })
            }
            Op::WriteLine(line) => {
                let written = world.client(client).written;
                let page = self.page_numbers().find(|page| written & (1 << page) == 0)?;
                Some(Pointer { line, page, generation: 1, tag: FIRST_TAG })
            }
            Op::Delete => Some(Pointer { line: 0, page: 0, generation: 1, tag: FIRST_TAG }),
            Op::ReadOwn => world.client(client).own,
            Op::Create | Op::AllocWrite => None,
        }
    }

    /// A server gets a request; `None` if it must wait.
    pub(super) fn serve(&self, world: &mut World, server: u8, request: Request) -> Option<Answer> {
        let client = request.client;
        let at = usize::from(client);
        // It has nothing of the home, and does not look at the session.
        let has_line = |line| world.slot(server, line).copy.is_some();
        if request.to_pointer && server != HOME && !self.line_numbers().any(has_line) {
            return Some(Answer::WrongNode);
        }
        let is_with_us = request.server == server
            && request.incarnation == world.server(server).incarnation
            && world.server(server).sessions[at].is_some();
        if !is_with_us {
            return Some(self.astray(world, server, request));
        }
        let op = self.clients[at].ops[usize::from(request.op)];
        if self.has(Mutant::MovedUnnumbered)
            && let Some(moved @ Answer::Moved(_)) = self.judge(world, server, client, op)
        {
            return Some(moved);
        }
        let session = world.server_mut(server).sessions[at].as_mut()?;
        if request.number < session.low {
            return None;
        }
        if request.number > session.low {
            *session = Session { low: request.number, ..Session::default() };
        }
        if let Some(answer) = session.answer {
            return Some(answer);
        }
        if world.server(server).freeing.is_some_and(|of| of.key == client * 8 + request.op) {
            return None;
        }
        if world.is_gone
            && server == HOME
            && self.has(Mutant::DeputyExecutes)
            && let Op::Add(line, page) = op
        {
            world.truth_mut(1, line, page).value = client * 8 + request.op + 1;
            return Some(Answer::Done);
        }
        let answer = match op {
            Op::WriteLine(line) => self.write_piece(world, server, request, line)?,
            _ => match self.judge(world, server, client, op) {
                Some(answer) => answer,
                None => self.execute(world, server, request, op)?,
            },
        };
        let is_recorded = !matches!(op, Op::Read(..) | Op::ReadOwn) && answer != Answer::Nothing;
        if is_recorded && let Some(session) = &mut world.server_mut(server).sessions[at] {
            session.answer = Some(answer);
        }
        Some(answer)
    }

    /// The answer of a server with which the client has no session.
    fn astray(&self, world: &World, server: u8, request: Request) -> Answer {
        let client = request.client;
        if server == request.server && !self.has(Mutant::NextProcessBelieved) {
            return Answer::NoSession;
        }
        let op = self.op_of(world, client);
        let pointer = op.and_then(|op| self.pointer(world, client, op));
        match pointer.and_then(|pointer| self.refusal(world, server, pointer)) {
            Some(answer @ (Answer::Moved(_) | Answer::NoAuthority)) => answer,
            _ => Answer::NoSession,
        }
    }

    /// The answer of a server that does not serve the line.
    pub(super) fn refusal(&self, world: &World, server: u8, pointer: Pointer) -> Option<Answer> {
        let slot = world.slot(server, pointer.line);
        let forward = world.forwards[usize::from(pointer.line)];
        let is_home = server == HOME;
        if is_home
            && self.has(Mutant::MarkWithoutGeneration)
            && let Forward::At(holder) = forward
        {
            return Some(Answer::Moved(holder));
        }
        let copy = slot.copy.filter(|copy| copy.generation == pointer.generation);
        match (copy, slot.mark) {
            (Some(_), None) => return None,
            (Some(_), Some(mark)) => return Some(Answer::Moved(mark.taker)),
            (None, _) => {}
        }
        let is_staged = slot.staged.is_some();
        Some(match forward {
            _ if is_staged && (is_home || self.has(Mutant::StagedIsBusy)) => Answer::Busy,
            _ if is_staged => Answer::NoAuthority,
            _ if !is_home => Answer::WrongNode,
            Forward::At(holder) => Answer::Moved(holder),
            Forward::Pending if !self.has(Mutant::HomeAnswersEarly) => Answer::Busy,
            Forward::Pending | Forward::Own | Forward::Gone => Answer::StaleGeneration,
        })
    }

    /// Why a server does not execute a request; `None` if it does.
    pub(super) fn judge(&self, world: &World, server: u8, client: u8, op: Op) -> Option<Answer> {
        let pointer = self.pointer(world, client, op)?;
        self.judge_page(world, server, (client, op), pointer)
    }

    /// The same for one page.
    fn judge_page(
        &self,
        world: &World,
        server: u8,
        (client, op): (u8, Op),
        pointer: Pointer,
    ) -> Option<Answer> {
        let is_homes = server == HOME && pointer.generation == world.generation && !world.is_gone;
        match self.refusal(world, server, pointer) {
            // The home frees what it has not lost, also if others serve some of it.
            Some(Answer::Moved(_) | Answer::Busy) if op == Op::Delete && is_homes => {
                return self.judge_delete(world, server);
            }
            Some(refusal) => return Some(refusal),
            None => {}
        }
        let copy = world.served(server, pointer.line, pointer.generation)?;
        let page = copy.pages[usize::from(pointer.page)];
        let lease = world.slot(server, pointer.line).leases[usize::from(pointer.page)];
        let lease = lease.filter(|lease| {
            matches!(lease.owner, Owner::Client(_)) || !self.has(Mutant::TakenIsServed)
        });
        let own = world.client(client).lease.map(|(epoch, _)| (Owner::Client(client), epoch));
        let is_own = lease.is_some_and(|lease| Some((lease.owner, lease.epoch)) == own);
        match op {
            _ if page.link == Link::Free || page.tag != pointer.tag => Some(Answer::NotAllocated),
            // Otherwise leases that follow each other could keep it from being freed.
            Op::Update(..) if world.server(server).freeing.is_some() => Some(Answer::Busy),
            Op::Commit(..) | Op::RenewForEver(..) => (!is_own).then_some(Answer::LeaseLost),
            Op::Update(..) if self.must_queue(world, server, pointer.line) => Some(Answer::Busy),
            Op::Delete => self.judge_delete(world, server),
            _ => lease.is_some().then_some(Answer::Busy),
        }
    }

    /// A piece of a WRITE. Each page is written or refused when its piece arrives.
    fn write_piece(
        &self,
        world: &mut World,
        server: u8,
        request: Request,
        line: u8,
    ) -> Option<Answer> {
        let (at, page) = (usize::from(request.client), usize::from(request.piece));
        let pointer = Pointer { line, page: request.piece, generation: 1, tag: FIRST_TAG };
        let known = world.server(server).sessions[at]?.pages[page];
        if known.is_none() {
            let of = (request.client, Op::WriteLine(line));
            let refusal = self.judge_page(world, server, of, pointer);
            if refusal.is_none() {
                self.note_service(world, request, line);
                self.change(world, server, request, pointer);
            }
            let session = world.server_mut(server).sessions[at].as_mut()?;
            session.pages[page] = Some(refusal.unwrap_or(Answer::Done));
        }
        let pages = world.server(server).sessions[at]?.pages;
        let asked: Vec<_> =
            (0..).zip(pages).filter(|(page, _)| request.asked & (1 << page) != 0).collect();
        if asked.iter().any(|(_, answer)| answer.is_none()) {
            return Some(Answer::Nothing);
        }
        let answers = asked.iter().filter_map(|(_, answer)| *answer);
        let first = answers.clone().next()?;
        let moved = answers.clone().find_map(|answer| match answer {
            Answer::Moved(holder) => Some(holder),
            _ => None,
        });
        if answers.clone().all(|answer| answer == first) {
            return Some(first);
        }
        if let (Some(holder), true) = (moved, self.has(Mutant::MovedAsWhole)) {
            return Some(Answer::Moved(holder));
        }
        let is_written = |(_, answer): &&(u8, Option<Answer>)| *answer == Some(Answer::Done);
        let written = asked.iter().filter(is_written).fold(0, |all, (page, _)| all | 1 << page);
        Some(Answer::Partial { written, holder: moved })
    }

    /// Executes a request.
    fn execute(&self, world: &mut World, server: u8, request: Request, op: Op) -> Option<Answer> {
        let client = request.client;
        match op {
            Op::Create => return Some(self.create(world, server, request)),
            Op::AllocWrite => return Some(self.alloc_write(world, server, request)),
            Op::Delete => return self.delete(world, server, request),
            _ => {}
        }
        let pointer = self.pointer(world, client, op)?;
        let Pointer { line, page, generation, .. } = pointer;
        self.note_service(world, request, line);
        let copy = world.served(server, line, generation)?;
        let served = copy.pages[usize::from(page)].served();
        world.witness.is_stale |= world.truth_mut(generation, line, page).value != served;
        match op {
            Op::Add(..) => self.change(world, server, request, pointer),
            Op::Update(..) => {
                let until = world.now + LONGEST_LEASE;
                let epoch = self.next_epoch(world, server, line);
                let lease = Lease { owner: Owner::Client(client), epoch, until };
                self.grant(world, server, (line, page), lease);
                return Some(Answer::Granted { epoch, value: served });
            }
            Op::Commit(..) => {
                let (epoch, base) = world.client(client).lease?;
                let truth = world.truth_mut(generation, line, page);
                let (is_last, is_based) = (truth.epoch == epoch, truth.value == base);
                world.witness.is_grant_old |= !is_last;
                world.witness.is_stale |= !is_based;
                self.change(world, server, request, pointer);
                world.slot_mut(server, line).leases[usize::from(page)] = None;
            }
            _ => {}
        }
        Some(Answer::Done)
    }

    /// Whether a TAKE waits for so long that it goes first.
    pub(super) fn must_queue(&self, world: &World, server: u8, line: u8) -> bool {
        let waits = world.slot(server, line).waits;
        waits.is_some_and(|since| world.now >= since + LONGEST_LEASE)
    }

    /// The next lease epoch of a server.
    pub(super) fn next_epoch(&self, world: &mut World, server: u8, line: u8) -> u8 {
        let floor = world.slot(server, line).copy.map_or(0, |copy| copy.floor);
        let epochs = &mut world.server_mut(server).epochs;
        if self.has(Mutant::FloorPerLine) {
            *epochs = (*epochs).max(floor);
        }
        *epochs += 1;
        *epochs
    }

    /// A server gets a line that had lease epochs up to this one.
    pub(super) fn raise_epochs(&self, world: &mut World, server: u8, floor: Epoch) {
        if self.has(Mutant::OwnEpochs) {
            return;
        }
        let server = world.server_mut(server);
        server.floor = server.floor.max(floor);
        if !self.has(Mutant::FloorPerLine) {
            server.epochs = server.epochs.max(floor);
        }
    }

    /// Leases a page.
    pub(super) fn grant(&self, world: &mut World, server: u8, at: (u8, u8), lease: Lease) {
        let (line, page) = at;
        world.slot_mut(server, line).leases[usize::from(page)] = Some(lease);
        let Some(copy) = world.slot(server, line).copy else { return };
        let truth = world.truth_mut(copy.generation, line, page);
        let is_old = lease.epoch <= truth.epoch;
        truth.epoch = lease.epoch;
        world.witness.is_epoch_old |= is_old;
    }

    /// A server changes a page.
    pub(super) fn change(&self, world: &mut World, server: u8, request: Request, pointer: Pointer) {
        let Pointer { line, page, generation, .. } = pointer;
        // A train changes each page once.
        let key = request.client * 8 + request.op + 4 * u8::from(request.asked > 0) * page;
        world.witness.is_twice |= world.applied & (1 << key) != 0;
        world.witness.is_late |= world.dead & (1 << key) != 0;
        world.applied |= 1 << key;
        let Some(copy) = &mut world.slot_mut(server, line).copy else { return };
        let this = &mut copy.pages[usize::from(page)];
        (this.value, this.is_written) = (key + 1, true);
        this.version += 1;
        let this = *this;
        world.truth_mut(generation, line, page).value = key + 1;
        world.note_version(generation, line, page, this);
    }

    /// A client's request is executed.
    pub(super) fn note_service(&self, world: &mut World, request: Request, line: u8) {
        let spec = &self.clients[usize::from(request.client)];
        let newest = &mut world.newest[usize::from(line)][usize::from(spec.node)];
        let is_old = spec.incarnation < *newest;
        *newest = (*newest).max(spec.incarnation);
        world.witness.is_unfenced |= is_old;
        // What its client gave up before was executed before this, or never is.
        let before = (1 << (request.client * 8 + request.op)) - (1 << (request.client * 8));
        world.dead |= world.given_up & before & !world.applied;
    }

    /// Whether a client that asks a server would be refused as before.
    pub(super) fn is_refused(&self, world: &World, server: u8, client: u8) -> bool {
        let Some(op) = self.op_of(world, client) else { return true };
        let mut at = server;
        // A longer way leads in a circle.
        for _ in 0..6 {
            match self.judge(world, at, client, op) {
                Some(Answer::Moved(next)) => at = next,
                Some(Answer::NoAuthority | Answer::WrongNode) => at = HOME,
                Some(Answer::Busy) => return true,
                _ => return false,
            }
        }
        true
    }

    /// Whether a client is done.
    pub(super) fn is_over(&self, world: &World, client: u8) -> bool {
        let this = world.client(client);
        let ops = self.clients[usize::from(client)].ops.len();
        this.doing == Doing::Over || usize::from(this.next) == ops
    }
}
