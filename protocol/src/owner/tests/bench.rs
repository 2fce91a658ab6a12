//! An owner, its clock, and the datagrams for it.

use core::{net::Ipv6Addr, time::Duration};

use bluebridge_wire::{
    ArenaGeneration, Command, Datagram, EndpointAddress, Flags, Header, Location, NodeId, Pointer,
    Space, Status, Tag, WireCommand, address::Fields, header::HEADER_BYTES, seal,
};

use super::super::{Committed, Counters, Event, Notice, Owner, OwnerConfig, Policy};
use crate::Timestamp;

pub(super) const SPACE: Space = Space(7);
pub(super) const OWNER: NodeId = NodeId(1000);
pub(super) const CLIENT: NodeId = NodeId(1001);
pub(super) const HOME: NodeId = NodeId(3);
/// A memory server to which pages have moved.
pub(super) const TAKER: NodeId = NodeId(4);
pub(super) const PORT: u16 = 4242;
pub(super) const EPOCH: u64 = 77;
pub(super) const SESSION: u64 = 0x5e55;

/// A request or notice; every field can be changed.
#[derive(Clone, Debug)]
pub(super) struct TestRequest {
    pub(super) from: Fields,
    pub(super) to: Fields,
    pub(super) header: Header,
    pub(super) port: u16,
}

impl TestRequest {
    /// The request with number 1 about 100 bytes of memory.
    pub(super) fn new(command: Command, offset: u64) -> Self {
        let pointer = pointer(offset);
        let byte = WireCommand::request(command, false).bits();
        let to = Fields { command: byte, ..fields(pointer.to_ipv6()) };
        Self {
            from: fields(EndpointAddress::new(SPACE, CLIENT, 5).to_ipv6()),
            to,
            header: Header {
                target: pointer.to_ipv6(),
                session: SESSION,
                sequence: 1,
                incarnation: 9,
                length: 100,
                ..Header::default()
            },
            port: PORT,
        }
    }

    pub(super) fn read_waiting(number: u64) -> Self {
        Self::new(Command::Read, 0).with(|header| {
            (header.sequence, header.flags) = (number, Flags::QUEUED);
        })
    }

    pub(super) fn with(mut self, change: impl FnOnce(&mut Header)) -> Self {
        change(&mut self.header);
        self
    }

    pub(super) fn changed(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// A parsed reply.
#[derive(Clone, Debug)]
pub(super) struct TestReply {
    pub(super) status: Status,
    pub(super) from: Fields,
    pub(super) destination: Ipv6Addr,
    pub(super) port: u16,
    pub(super) header: Header,
    pub(super) data: Vec<u8>,
}

pub(super) struct Bench {
    pub(super) now: Timestamp,
    pub(super) owner: Owner,
}

impl Bench {
    pub(super) fn with(change: impl FnOnce(&mut OwnerConfig)) -> Self {
        let mut config = OwnerConfig::new(SPACE, OWNER, 5);
        (config.lease_count, config.contents_count) = (4, 2);
        (config.wait_count, config.reply_count) = (3, 5);
        change(&mut config);
        Self { now: Timestamp::from_nanos(1_000_000_000), owner: Owner::new(config) }
    }

    /// An owner of one page, for a second, with a policy.
    pub(super) fn holding(policy: Policy) -> Self {
        let mut bench = Self::with(|config| config.policy = policy);
        bench.hold(0, EPOCH);
        bench
    }

    pub(super) fn hold(&mut self, offset: u64, epoch: u64) {
        let end = self.now + Duration::from_secs(1);
        let held = self.owner.hold(self.now, pointer(offset), epoch, end, None, None);
        held.expect("there is room");
    }

    pub(super) fn hold_contents(&mut self, offset: u64, epoch: u64, start: usize, bytes: &[u8]) {
        let end = self.now + Duration::from_secs(1);
        let committed = Some(Committed { start, bytes });
        let held = self.owner.hold(self.now, pointer(offset), epoch, end, None, committed);
        held.expect("there is room");
    }

    pub(super) fn give(&mut self, request: &TestRequest) -> Option<Notice> {
        let (source, destination) = (request.from.to_ipv6(), request.to.to_ipv6());
        let mut payload = vec![0; HEADER_BYTES];
        request.header.emit(&mut payload, 0);
        seal(source, destination, &mut payload, &[]);
        let datagram = Datagram::parse(source, destination, &payload).expect("well formed");
        self.owner.handle_datagram(self.now, request.port, &datagram, |node| node == TAKER)
    }

    pub(super) fn sent(&mut self) -> Vec<TestReply> {
        let mut all = Vec::new();
        while let Some(transmit) = self.owner.poll_transmit() {
            let payload = [transmit.head, transmit.data].concat();
            let (source, destination) = (transmit.source, transmit.destination);
            let reply = Datagram::parse(source, destination, &payload).expect("well formed");
            assert!(reply.is_reply());
            assert_eq!((reply.from.space, reply.from.node), (SPACE, OWNER));
            assert_eq!(reply.header.incarnation, 5);
            all.push(TestReply {
                status: Status::from_code(reply.from.tag).expect("known"),
                from: reply.from,
                destination,
                port: transmit.destination_port,
                header: reply.header,
                data: reply.data.to_vec(),
            });
        }
        all
    }

    /// The only reply to a request, which repeats the request's fields.
    pub(super) fn reply(&mut self, request: &TestRequest) -> TestReply {
        self.give(request);
        let mut sent = self.sent();
        assert_eq!(sent.len(), 1, "{sent:?}");
        let reply = sent.remove(0);
        check_reply(&reply, request);
        reply
    }

    pub(super) fn pass(&mut self, time: Duration) {
        self.now = self.now + time;
        self.owner.handle_timeout(self.now);
    }

    pub(super) fn count(&self, event: Event) -> u64 {
        self.owner.counters().of(event)
    }

    /// No reply is left to be sent; returns the counters.
    pub(super) fn end(mut self) -> Counters {
        assert_eq!(self.sent().len(), 0);
        self.owner.counters().clone()
    }
}

/// Checks that a reply repeats the fields of its request.
pub(super) fn check_reply(reply: &TestReply, request: &TestRequest) {
    assert_eq!((reply.destination, reply.port), (request.from.to_ipv6(), request.port));
    assert_eq!(reply.from.location, request.to.location);
    let (received, expected) = (&reply.header, &request.header);
    assert_eq!((received.session, received.sequence), (expected.session, expected.sequence));
    assert_eq!((received.length, received.target), (expected.length, expected.target));
    assert_eq!(received.flags.attempt(), expected.flags.attempt());
}

pub(super) fn fields(address: Ipv6Addr) -> Fields {
    Fields::unpack(address).expect("a fabric address")
}

pub(super) fn pointer(offset: u64) -> Pointer {
    let generation = ArenaGeneration::new(2).expect("15 bits");
    let location = Location::new(generation, 0x10_0000 + offset).expect("48 bits");
    Pointer { space: SPACE, node: HOME, tag: Tag(77), location }
}

pub(super) fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}
