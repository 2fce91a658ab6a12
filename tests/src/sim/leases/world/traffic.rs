//! Datagrams in flight, the controller's copies of them, and planted bugs.

use core::time::Duration;

use bluebridge_wire::{
    Command, Datagram, Header, ReplyCopy, ReplySource, Status, header::HEADER_BYTES, seal,
};
use rand::Rng;

use super::{Event, World};
use crate::sim::{
    SPACE, bugs, client_node,
    leases::Bug,
    network::{self, Direction, Flight},
    server_node,
};

impl World {
    /// The controller's copy of a reply; some are lost, all are delayed.
    pub(super) fn copy(&mut self, frame: &[u8]) {
        let (clients, always) = (self.clients.len(), self.always);
        if let Some(received) = network::receive(frame, network::PORT)
            && let Ok(copy) =
                ReplyCopy::parse(received.source, received.destination, received.payload)
            && (copy.command, copy.status) == (Command::Update, Status::Ok)
        {
            self.leased.insert(copy.target.location >> 12, (copy.lease_epoch, copy.node));
        }
        let node = server_node(0).0;
        if let Some(redirect) = self.controller.see(frame, node, clients, always)
            && self.rng.random_bool(0.8)
        {
            let late = Duration::from_micros(self.rng.random_range(10..3000));
            self.push(self.now + late, Event::Redirect(redirect));
        }
    }

    pub(super) fn send_up(&mut self, endpoint: usize, frame: Vec<u8>) {
        let flights = self.network.travel(self.now, endpoint, Direction::Up, frame, &mut self.rng);
        for Flight { at, frame } in flights.into_iter().flatten() {
            self.push(at, Event::AtSwitch { endpoint, frame });
        }
    }

    pub(super) fn send_down(&mut self, frames: Vec<(usize, Vec<u8>)>) {
        for (endpoint, frame) in frames {
            let flights =
                self.network.travel(self.now, endpoint, Direction::Down, frame, &mut self.rng);
            for Flight { at, frame } in flights.into_iter().flatten() {
                self.push(at, Event::AtEnd { endpoint, frame });
            }
        }
        if let Some(due) = self.network.poll_timeout()
            && self.switch_timer.is_none_or(|timer| due < timer)
        {
            self.switch_timer = Some(due);
            self.push(due.max(self.now), Event::SwitchTimer);
        }
    }

    pub(super) fn receive(&mut self, endpoint: usize, frame: &[u8]) {
        let Some(received) = network::receive(frame, network::PORT) else { return };
        let now = self.local(endpoint);
        let rewritten = self.mistake(endpoint, &received);
        let payload = rewritten.as_deref().unwrap_or(received.payload);
        if endpoint < self.clients.len() {
            self.clients[endpoint].receive(now, &received, payload);
        } else if !self.server.is_away {
            let mut frames = Vec::new();
            self.server.receive(now, &received, payload, &mut frames);
            for frame in frames {
                self.send_up(endpoint, frame);
            }
        }
    }

    fn mistake(&mut self, endpoint: usize, received: &network::Received<'_>) -> Option<Vec<u8>> {
        let bug = self.plan.bug?;
        let datagram =
            Datagram::parse(received.source, received.destination, received.payload).ok()?;
        let (command, header) = (datagram.command().command()?, datagram.header);
        let is_request = !datagram.is_reply();
        match bug {
            Bug::AnyEpoch if is_request && command == Command::Commit => {
                let (epoch, node) = *self.leased.get(&(datagram.to.location >> 12))?;
                let header = Header { lease_epoch: epoch, ..header };
                let is_owner = node == datagram.from.node.0;
                is_owner.then(|| bugs::rewritten(&datagram, received.destination, &header))
            }
            Bug::ForgetWindow if endpoint >= self.clients.len() => {
                bugs::forget_window(&mut self.seen, &datagram)
            }
            Bug::OwnerExecutes
                if is_request && command == Command::FetchAdd && endpoint < self.clients.len() =>
            {
                let source = ReplySource {
                    space: SPACE,
                    node: server_node(0),
                    command,
                    contended: false,
                    status: Status::Ok,
                    location_bits: datagram.to.location,
                };
                let to = datagram.from.node;
                let response = Header { incarnation: self.server.incarnation, ..header };
                let mut head = vec![0; HEADER_BYTES];
                response.emit(&mut head, 0);
                let source = source.to_ipv6();
                seal(source, received.source, &mut head, &[9; 8]);
                let ports = (network::PORT, network::PORT);
                let frame = network::frame(source, received.source, ports, [&head, &[9; 8]]);
                let requester = (0..self.clients.len()).find(|index| client_node(*index) == to)?;
                self.push(self.now, Event::AtEnd { endpoint: requester, frame });
                None
            }
            _ => None,
        }
    }
}
