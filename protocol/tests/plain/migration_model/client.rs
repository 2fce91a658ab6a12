//! The clients.

use super::{
    LONGEST_LEASE, Mutant, Op, Scenario,
    messages::{Answer, Message, Request},
    world::{Doing, HOME, Session, World},
};

impl Op {
    /// Whether a second execution would have an effect.
    pub(super) const fn is_change(self) -> bool {
        matches!(self, Self::Add(..) | Self::WriteLine(_) | Self::Commit(..) | Self::Delete)
    }

    /// Whether the first try goes to the pointer; others go to the endpoint address.
    const fn is_sent_to_pointer(self) -> bool {
        !matches!(self, Self::Create | Self::AllocWrite | Self::Delete)
    }
}

impl Scenario {
    /// A client sends its next request, in a session with the server that it believes to serve the page.
    pub(super) fn send(&self, world: &mut World, client: u8) -> Option<()> {
        let op = self.op_of(world, client)?;
        let this = *world.client(client);
        if this.doing != Doing::Nothing || matches!(op, Op::RenewForEver(..)) {
            return None;
        }
        if op == Op::ReadOwn && this.own.is_none() {
            self.end_op(world, client);
            return Some(());
        }
        let line = self.pointer(world, client, op).map(|pointer| usize::from(pointer.line));
        // The home frees what it has not lost.
        let is_for_home = op == Op::Delete && !this.is_orphan;
        let server = line.filter(|_| !is_for_home).map_or(HOME, |line| this.hints[line]);
        self.send_to(world, client, server, op.is_sent_to_pointer())
    }

    fn send_to(&self, world: &mut World, client: u8, server: u8, to_pointer: bool) -> Option<()> {
        let incarnation = self.open(world, client, server);
        let Some(incarnation) = incarnation else {
            world.client_mut(client).doing = Doing::Over;
            return Some(());
        };
        let number = world.client(client).number;
        // Low water passes what was answered. What was given up is passed when the next number arrives.
        if let Some(session) = &mut world.server_mut(server).sessions[usize::from(client)]
            && session.low == number
        {
            *session = Session { low: number, ..Session::default() };
        }
        world.client_mut(client).doing = Doing::Waits { server };
        for request in self.datagrams(world, client, server) {
            let request = Request { incarnation, to_pointer, is_again: false, ..request };
            world.send(Message::Request(request));
        }
        Some(())
    }

    /// The server's incarnation with which a client has a session, which it opens if it has none.
    fn open(&self, world: &mut World, client: u8, server: u8) -> Option<u8> {
        let at = usize::from(client);
        let known = world.client(client).sessions[usize::from(server)];
        if known != 0 {
            return Some(known);
        }
        let spec = &self.clients[at];
        let node = usize::from(spec.node);
        let this = world.server_mut(server);
        if spec.incarnation < this.fences[node] {
            return None;
        }
        self.raise_fence(world, server, spec.node, spec.incarnation);
        let low = world.client(client).number;
        let this = world.server_mut(server);
        this.sessions[at] = Some(Session { low, ..Session::default() });
        let incarnation = this.incarnation;
        world.client_mut(client).sessions[usize::from(server)] = incarnation;
        Some(incarnation)
    }

    /// A server learns of an incarnation, which ends the sessions of the older ones.
    pub(super) fn raise_fence(&self, world: &mut World, server: u8, node: u8, incarnation: u8) {
        let this = world.server_mut(server);
        let fence = &mut this.fences[usize::from(node)];
        *fence = (*fence).max(incarnation);
        for (session, spec) in this.sessions.iter_mut().zip(&self.clients) {
            if spec.node == node && spec.incarnation < incarnation {
                *session = None;
            }
        }
    }

    /// A client sends its request again, to the endpoint address of the server of its session.
    pub(super) fn resend(&self, world: &mut World, client: u8) -> Option<()> {
        let Doing::Waits { server } = world.client(client).doing else { return None };
        let is_on_its_way = world.network.iter().any(|message| match message {
            Message::Request(request) => self.is_awaited(world, request),
            _ => false,
        });
        let requests = self.datagrams(world, client, server);
        if is_on_its_way {
            let is_missing =
                |request: &Request| !world.network.contains(&Message::Request(*request));
            if !requests.iter().any(is_missing) {
                return None;
            }
            world.faults.repeats = world.faults.repeats.checked_sub(1)?;
        }
        requests.into_iter().for_each(|request| world.send(Message::Request(request)));
        Some(())
    }

    /// The datagrams of the request that a client waits for, as they are sent again.
    fn datagrams(&self, world: &World, client: u8, server: u8) -> Vec<Request> {
        let this = world.client(client);
        let request = Request {
            client,
            op: this.next,
            number: this.number,
            server,
            incarnation: this.sessions[usize::from(server)],
            to_pointer: self.has(Mutant::AgainToPointer),
            is_again: true,
            asked: 0,
            piece: 0,
        };
        if !matches!(self.op_of(world, client), Some(Op::WriteLine(_))) {
            return vec![request];
        }
        let is_missing = |page: &u8| this.written & (1 << page) == 0;
        let pages: Vec<u8> = self.page_numbers().filter(is_missing).collect();
        let asked = pages.iter().fold(0, |all, page| all | 1 << page);
        pages.into_iter().map(|piece| Request { asked, piece, ..request }).collect()
    }

    /// A client that was refused asks again, when that helps.
    pub(super) fn resume(&self, world: &mut World, client: u8) -> Option<()> {
        let Doing::Pauses { server } = world.client(client).doing else { return None };
        if self.is_refused(world, server, client) {
            return None;
        }
        self.send_to(world, client, server, false)
    }

    /// A client no longer waits for the answer to a change.
    pub(super) fn give_up(&self, world: &mut World, client: u8) -> Option<()> {
        let op = self.op_of(world, client)?;
        let Doing::Waits { .. } = world.client(client).doing else { return None };
        if !op.is_change() {
            return None;
        }
        world.faults.gives_up = world.faults.gives_up.checked_sub(1)?;
        world.given_up |= 1 << (client * 8 + world.client(client).next);
        world.client_mut(client).number += 1;
        self.end_op(world, client);
        Some(())
    }

    /// A client learns that the lease has ended that it renewed.
    pub(super) fn stop_renewing(&self, world: &mut World, client: u8) -> Option<()> {
        let op = self.op_of(world, client)?;
        self.judge(world, HOME, client, op).filter(|_| matches!(op, Op::RenewForEver(..)))?;
        self.end_op(world, client);
        Some(())
    }

    /// A client renews its lease.
    pub(super) fn renew(&self, world: &mut World, client: u8) -> Option<()> {
        let op = self.op_of(world, client)?;
        let Op::RenewForEver(line, page) = op else { return None };
        if self.judge(world, HOME, client, op).is_some() {
            return None;
        }
        let must_end = self.must_queue(world, HOME, line) && !self.has(Mutant::RenewedForEver);
        let until = world.now + LONGEST_LEASE;
        let lease = world.slot_mut(HOME, line).leases[usize::from(page)].as_mut()?;
        if must_end || lease.until == until {
            return None;
        }
        lease.until = until;
        Some(())
    }

    /// Whether a client still needs a lease.
    pub(super) fn uses_lease(&self, world: &World, client: u8, epoch: u8) -> bool {
        let this = world.client(client);
        let is_its = this.lease.is_some_and(|(of, _)| of == epoch);
        match self.op_of(world, client) {
            // The answer may be on its way.
            Some(Op::Update(..)) => matches!(this.doing, Doing::Waits { .. }),
            Some(Op::Commit(..) | Op::RenewForEver(..)) => is_its && this.doing != Doing::Over,
            _ => false,
        }
    }

    fn end_op(&self, world: &mut World, client: u8) {
        let this = world.client_mut(client);
        this.next += 1;
        this.doing = Doing::Nothing;
        (this.is_orphan, this.written) = (false, 0);
    }

    /// Whether a client waits for the answer to this request.
    pub(super) fn is_awaited(&self, world: &World, request: &Request) -> bool {
        let this = world.client(request.client);
        let waits = matches!(this.doing, Doing::Waits { server, .. } if server == request.server);
        waits && (this.next, this.number) == (request.op, request.number)
    }

    /// A client gets the answer of a server.
    pub(super) fn hear(&self, world: &mut World, from: u8, request: Request, answer: Answer) {
        if !self.is_awaited(world, &request) {
            return;
        }
        let client = request.client;
        let op = self.clients[usize::from(client)].ops[usize::from(request.op)];
        let pointer = self.pointer(world, client, op);
        let Doing::Waits { server } = world.client(client).doing else { return };
        let is_believed = match answer {
            Answer::Moved(_) => self.has(Mutant::MovedBelieved),
            Answer::NoSession => self.has(Mutant::NoSessionBelieved),
            _ => false,
        };
        let is_of_pointer = answer == Answer::WrongNode
            && request.to_pointer
            && !self.has(Mutant::WrongNodeBelieved);
        if is_of_pointer || from != server && !is_believed {
            // It means only that the switch led the request astray.
            world.witness.is_sent_astray |= request.is_again;
            for again in self.datagrams(world, client, server) {
                world.send(Message::Request(again));
            }
            return;
        }
        let this = world.client_mut(client);
        match answer {
            Answer::Nothing => {}
            Answer::Done => self.end_op(world, client),
            Answer::Granted { epoch, value } => {
                this.lease = Some((epoch, value));
                self.end_op(world, client);
            }
            Answer::Created(pointer) => {
                this.own = Some(pointer);
                self.end_op(world, client);
            }
            Answer::LeaseLost | Answer::OutOfMemory => self.end_op(world, client),
            Answer::NotAllocated => {
                world.witness.is_unallocated |= self.is_allocated(world, pointer);
                self.end_op(world, client);
            }
            Answer::Partial { written, holder } => {
                this.written |= written;
                this.doing = Doing::Pauses { server };
                if let (Some(holder), Some(pointer)) = (holder, pointer) {
                    this.hints[usize::from(pointer.line)] = holder;
                    this.doing = Doing::Nothing;
                }
            }
            Answer::Busy => this.doing = Doing::Pauses { server },
            Answer::Moved(holder) => {
                if let Some(pointer) = pointer {
                    this.hints[usize::from(pointer.line)] = holder;
                }
                this.doing = Doing::Nothing;
                this.is_orphan |= op == Op::Delete && server == HOME;
            }
            Answer::NoAuthority | Answer::WrongNode => {
                if let Some(pointer) = pointer {
                    this.hints[usize::from(pointer.line)] = HOME;
                }
                this.doing = Doing::Pauses { server: HOME };
            }
            Answer::NoSession => self.lose_session(world, client, request, op),
            Answer::StaleGeneration => self.hear_stale(world, client),
        }
    }

    /// The session ended. What was sent in it may have been executed.
    fn lose_session(&self, world: &mut World, client: u8, request: Request, op: Op) {
        let server = request.server;
        let incarnation = request.incarnation;
        let pointer = self.pointer(world, client, op);
        let this = world.client_mut(client);
        this.sessions[usize::from(server)] = 0;
        this.doing = Doing::Nothing;
        let spec = &self.clients[usize::from(client)];
        if spec.incarnation < world.server(server).fences[usize::from(spec.node)] {
            // Its successor is there.
            world.client_mut(client).doing = Doing::Over;
            return;
        }
        let is_older = pointer.is_some_and(|pointer| pointer.generation < world.generation);
        if server == HOME && is_older && self.has(Mutant::GenerationBelieved) {
            self.hear_stale(world, client);
        } else if op.is_change() {
            let this = world.client_mut(client);
            this.doing = Doing::Asks { server, incarnation };
        }
    }

    /// A client asks the home what became of the line of a change whose session was lost.
    pub(super) fn ask(&self, world: &mut World, client: u8) -> Option<()> {
        let Doing::Asks { server, incarnation } = world.client(client).doing else { return None };
        let op = self.op_of(world, client)?;
        match self.judge(world, HOME, client, op) {
            Some(Answer::Busy) => return None,
            Some(Answer::StaleGeneration) => self.hear_stale(world, client),
            _ => {
                // *Outcome unknown*.
                world.witness.is_unknown |= world.server(server).incarnation == incarnation;
                self.end_op(world, client);
            }
        }
        Some(())
    }

    /// A client is told that the line is lost.
    pub(super) fn hear_stale(&self, world: &mut World, client: u8) {
        let pointer = self.op_of(world, client).and_then(|op| self.pointer(world, client, op));
        if let Some(pointer) = pointer
            && pointer.generation == 1
        {
            let line = usize::from(pointer.line);
            world.gone[line] = true;
        }
        self.end_op(world, client);
    }
}
