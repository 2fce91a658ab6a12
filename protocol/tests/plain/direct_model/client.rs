//! The clients, and the network between them and the server.

use super::{
    Op, Scenario,
    reader::Reading,
    world::{Began, Client, Request, Waits, World, index},
};

impl Client {
    /// Its request got an answer.
    pub(super) fn ends_op(&mut self) {
        self.next += 1;
        self.waits = Waits::Nothing;
        self.is_repeated = false;
    }

    /// It goes on without an answer to its request.
    pub(super) fn gives_up(&mut self) {
        self.given_up.push((self.next, self.number));
        self.ends_op();
    }
}

impl World {
    /// Whether the request's client waits for a reply to it.
    pub(super) fn is_awaited(&self, request: &Request) -> bool {
        let client = &self.clients[usize::from(request.client)];
        client.waits == Waits::Reply
            && (client.session, client.number) == (request.session, request.number)
    }

    /// Removes what could not have an effect any more, and orders the rest: the network has no order.
    pub(super) fn tidy(&mut self, scenario: &Scenario) {
        let mut network = core::mem::take(&mut self.network);
        network.retain(|request| {
            let is_read = matches!(Self::op(scenario, request.client, request.op), Op::Read(..));
            let is_known = self.server.as_ref().is_none_or(|server| {
                server.sessions.iter().any(|session| session.id == request.session)
            });
            self.is_awaited(request) || !is_read && is_known
        });
        network.sort_unstable();
        network.dedup();
        self.network = network;
    }
}

impl Scenario {
    fn op_of(&self, world: &World, client: u8) -> Option<Op> {
        let next = world.clients[usize::from(client)].next;
        self.clients[usize::from(client)].ops.get(usize::from(next)).copied()
    }

    /// A client sends its next request, or opens a session for it.
    pub(super) fn send(&self, world: &mut World, client: u8) -> Option<()> {
        let op = self.op_of(world, client)?;
        let this = &world.clients[usize::from(client)];
        if this.waits != Waits::Nothing {
            return None;
        }
        if this.session == 0 {
            self.open(world, client)?;
            world.clients[usize::from(client)].waits = Waits::Open;
            return Some(());
        }
        let mut began = this.began;
        if let Op::Read(page, _) = op {
            // A READ that is repeated in another session began before.
            let floor = if this.is_repeated { began.floor } else { world.record.floor[page] };
            let is_ended = world.record.ended & (1 << this.session) != 0;
            let given_up =
                if this.is_repeated { began.given_up } else { self.given_up(world, client) };
            began = Began { floor, is_ended, lease: world.record.lease, given_up };
        }
        if op == Op::Commit {
            world.record.lease = 0;
        }
        let this = &mut world.clients[usize::from(client)];
        this.began = began;
        this.waits = Waits::Reply;
        let (session, op) = (this.session, this.next);
        let last_number = &mut world.clients[usize::from(self.holder(client))].last_number;
        *last_number += 1;
        let number = *last_number;
        world.clients[usize::from(client)].number = number;
        let low = self.low(world, client);
        world.network.push(Request { client, op, session, number, low, is_passed: false });
        Some(())
    }

    /// All threads of a client.
    fn threads<'a>(
        &'a self,
        world: &'a World,
        client: u8,
    ) -> impl Iterator<Item = (u8, &'a Client)> {
        let holder = self.holder(client);
        (0..).zip(&world.clients).filter(move |(thread, _)| self.holder(*thread) == holder)
    }

    /// The low water of a client.
    fn low(&self, world: &World, client: u8) -> u8 {
        let waiting = self.threads(world, client).filter(|(_, of)| of.waits == Waits::Reply);
        let next = world.clients[usize::from(self.holder(client))].last_number + 1;
        waiting.map(|(_, of)| of.number).min().unwrap_or(next)
    }

    /// The requests that a client gave up, and that its low water has passed. Without the others: what is at or above the
    /// low water may be executed at any time, also by a server without a reader.
    fn given_up(&self, world: &World, client: u8) -> u32 {
        let low = self.low(world, client);
        let threads = self.threads(world, client);
        let keys = threads.flat_map(|(thread, of)| {
            let passed = of.given_up.iter().filter(move |(_, number)| *number < low);
            passed.map(move |(op, _)| World::bit(World::key(thread, *op)))
        });
        keys.fold(0, |all, key| all | key)
    }

    /// A client whose request was lost with a server sends it again.
    pub(super) fn resend(&self, world: &mut World, client: u8) -> Option<()> {
        let this = &world.clients[usize::from(client)];
        let (session, number, op) = (this.session, this.number, this.next);
        let low = self.low(world, client);
        let request = Request { client, op, session, number, low, is_passed: false };
        let is_idle = world.server.as_ref().is_some_and(|server| server.todo.is_empty());
        let is_it = |other: &Request| {
            (other.client, other.session, other.number) == (client, session, number)
        };
        let is_read = world.readers.iter().flatten().any(|reading| is_it(&reading.request()));
        let is_there = world.network.iter().any(is_it);
        match this.waits {
            Waits::Open if is_idle => {
                world.clients[usize::from(client)].waits = Waits::Nothing;
            }
            Waits::Reply if is_idle && !is_read && !is_there => world.network.push(request),
            _ => return None,
        }
        Some(())
    }

    /// A client no longer waits for the reply to a change.
    pub(super) fn give_up(&self, world: &mut World, client: u8) -> Option<()> {
        let op = self.op_of(world, client)?;
        let this = &mut world.clients[usize::from(client)];
        if this.waits != Waits::Reply || matches!(op, Op::Read(..)) {
            return None;
        }
        world.gives_up = world.gives_up.checked_sub(1)?;
        this.gives_up();
        Some(())
    }

    /// A request arrives; a copy of it may arrive later.
    pub(super) fn arrive(&self, world: &mut World, at: usize, is_copied: bool) -> Option<()> {
        let request = *world.network.get(at)?;
        if is_copied {
            world.copies = world.copies.checked_sub(1)?;
        } else {
            world.network.remove(at);
        }
        let is_read = matches!(World::op(self, request.client, request.op), Op::Read(..));
        if is_read && !request.is_passed && world.is_attached {
            let free = world.readers.iter().position(Option::is_none)?;
            world.readers[free] = Some(Reading::new(request, self));
            return Some(());
        }
        self.take(world, request)
    }

    /// Whether a client is done.
    pub(super) fn is_over(&self, clients: &[Client], client: u8) -> bool {
        let this = &clients[usize::from(client)];
        let ops = self.clients[usize::from(client)].ops.len();
        this.waits == Waits::Over || usize::from(this.next) == ops
    }

    /// Whether every client is done.
    pub(super) fn is_done(&self, world: &World) -> bool {
        (0..index(world.clients.len())).all(|client| self.is_over(&world.clients, client))
    }
}
