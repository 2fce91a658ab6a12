//! The responder against constructed requests.

#![allow(clippy::cast_possible_truncation, reason = "the numbers of these tests are small")]

mod adopted;
mod anywhere;
mod checks;
mod commands;
mod counters;
mod deputy;
mod direct;
mod free_lines;
mod freeing;
mod giver;
mod lease_model;
mod leases;
mod model;
mod operator;
mod sessions;
pub(crate) mod store;
mod trains;
mod waiting;
mod window;

use core::{cell::Cell, time::Duration};
use std::net::Ipv6Addr;

use bluebridge_wire::{
    Command, Datagram, EndpointAddress, Flags, Header, Location, NodeId, Pointer, Space, Status,
    Tag, WireCommand,
    address::{Fields, PAGE_BYTES},
    header::HEADER_BYTES,
    seal,
    tlv::TlvType,
};

use super::*;
use crate::pieces::Cut;
use store::{PlainStore, SharedParts};

pub(super) const SPACE: Space = Space(3);
pub(super) const SERVER: NodeId = NodeId(9);
pub(super) const CLIENT: NodeId = NodeId(20);
pub(super) const PORT: u16 = 4242;

/// A received reply.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Reply {
    pub(super) status: Status,
    pub(super) from: Fields,
    pub(super) to: Ipv6Addr,
    pub(super) port: u16,
    pub(super) header: Header,
    pub(super) target: Fields,
    pub(super) data: Vec<u8>,
    pub(super) pages: Vec<Status>,
}

/// A request to be sent; every field can be changed.
#[derive(Clone, Debug)]
pub(super) struct TestRequest {
    pub(super) from: Ipv6Addr,
    pub(super) to: Fields,
    pub(super) header: Header,
    pub(super) data: Vec<u8>,
}

impl TestRequest {
    pub(super) fn new(command: Command, target: Ipv6Addr) -> Self {
        let target_fields = Fields::unpack(target).unwrap();
        let to = Fields { command: WireCommand::request(command, false).bits(), ..target_fields };
        let header = Header { target, incarnation: 1, ..Header::default() };
        Self { from: endpoint(CLIENT), to, header, data: Vec::new() }
    }

    /// To the server's own address.
    pub(super) fn server(command: Command) -> Self {
        Self::new(command, EndpointAddress::of_shard(SPACE, SERVER, 0, 0).to_ipv6())
    }

    pub(super) fn anywhere(command: Command, nonce: u64, length: u32) -> Self {
        let to = EndpointAddress::of_shard(SPACE, NodeId::ANY, 0, 77).to_ipv6();
        let mut request = Self::new(command, to);
        (request.header.sequence, request.header.length) = (nonce, length);
        request
    }

    pub(super) fn with(mut self, change: impl FnOnce(&mut Header)) -> Self {
        change(&mut self.header);
        self
    }

    pub(super) fn carrying(mut self, data: &[u8]) -> Self {
        self.data = data.to_vec();
        self
    }

    pub(super) fn attempt(self, attempt: u8) -> Self {
        self.with(|header| header.flags = header.flags.with_attempt(attempt))
    }

    /// To the server's endpoint address, if it is a request for memory.
    pub(super) fn at_endpoint(mut self) -> Self {
        let Ok(pointer) = Pointer::from_ipv6(self.header.target) else { return self };
        let endpoint = EndpointAddress::for_memory(SERVER, pointer);
        let to = Fields::unpack(endpoint.to_ipv6()).unwrap();
        self.to = Fields { command: self.to.command, ..to };
        self
    }

    /// Whether it is for memory, and its destination is the pointer, possibly with another node.
    fn is_at_pointer(&self) -> bool {
        let node = self.to.node;
        let at_pointer = Pointer::from_ipv6(self.header.target)
            .is_ok_and(|pointer| Pointer { node, ..pointer }.to_ipv6() == self.without_command());
        at_pointer && node != NodeId::ANY
    }

    fn without_command(&self) -> Ipv6Addr {
        Fields { command: 0, ..self.to }.to_ipv6()
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES];
        self.header.emit(&mut bytes, 0);
        seal(self.from, self.to.to_ipv6(), &mut bytes, &self.data);
        bytes.extend_from_slice(&self.data);
        bytes
    }
}

pub(super) fn endpoint(node: NodeId) -> Ipv6Addr {
    EndpointAddress::new(SPACE, node, 5).to_ipv6()
}

pub(super) fn stamp(bytes: usize, seed: u8) -> Vec<u8> {
    (0..bytes).map(|place| (place % 251) as u8 ^ seed).collect()
}

thread_local! {
    /// Whether new worlds have direct readers.
    static WITH_READERS: Cell<bool> = const { Cell::new(false) };
    /// Whether requests for memory are sent to the server's endpoint address.
    static AT_ENDPOINT: Cell<bool> = const { Cell::new(false) };
}

/// A responder, its store, and one client's session.
pub(super) struct World {
    pub(super) responder: Responder,
    pub(super) store: PlainStore,
    pub(super) now: Timestamp,
    pub(super) session: u64,
    pub(super) piece_bytes: u16,
    pub(super) sequence: u64,
    pub(super) low_water: u64,
}

pub(super) fn config() -> Config {
    Config::new(SPACE, SERVER, 5, 0x5eed)
}

impl World {
    pub(super) fn new() -> Self {
        Self::with(&config(), 64, 4096)
    }

    pub(super) fn with(config: &Config, pages: u32, piece_bytes: u16) -> Self {
        let mut world = Self::unopened(config, pages);
        world.reopen(piece_bytes);
        world
    }

    pub(super) fn unopened(config: &Config, pages: u32) -> Self {
        let now = Timestamp::from_nanos(1_000_000_000);
        let mut responder = Responder::new(config).unwrap();
        let mut store = PlainStore::new(pages);
        if WITH_READERS.get() {
            store.readers = Some(SharedParts::new(usize::from(config.limits.session_count)));
            responder.begin(now, &mut store);
        }
        Self { responder, store, now, session: 0, piece_bytes: 0, sequence: 0, low_water: 1 }
    }

    pub(super) fn reopen(&mut self, piece_bytes: u16) {
        let nonce = self.now.as_nanos() + 17;
        let reply = self.one(&open(CLIENT, 1, nonce, piece_bytes));
        assert_eq!(reply.status, Status::Ok);
        self.session = reply.header.session;
        self.piece_bytes = u16::try_from(reply.header.length).unwrap();
        (self.sequence, self.low_water) = (0, 1);
    }

    pub(super) fn pass(&mut self, time: Duration) {
        self.now = self.now + time;
        self.responder.handle_timeout(self.now, &mut self.store).unwrap();
        self.check_marks();
    }

    /// Offers a request once.
    pub(super) fn offer(&mut self, request: &TestRequest) -> Result<(), DrainFirst> {
        let request = &self.routed(request);
        let (bytes, to) = (request.bytes(), request.to.to_ipv6());
        let offered = match Datagram::parse(request.from, to, &bytes) {
            Ok(datagram) => {
                self.responder.handle_datagram(self.now, PORT, &datagram, &mut self.store)
            }
            Err(error) => {
                self.responder.count_malformed(error);
                Ok(())
            }
        };
        self.check_marks();
        offered
    }

    /// The request as it is sent: a request that the server serves at the pointer may go to its
    /// endpoint address.
    pub(super) fn routed(&self, request: &TestRequest) -> TestRequest {
        let node = request.to.node;
        let is_served = node == SERVER || self.responder.ranges.adopts_from(node);
        if AT_ENDPOINT.get() && is_served && request.is_at_pointer() {
            request.clone().at_endpoint()
        } else {
            request.clone()
        }
    }

    /// Direct readers answer no READ of a leased page, from before its grant can be sent.
    fn check_marks(&self) {
        let (Some(readers), Some(_)) = (&self.store.readers, self.responder.begun_at) else {
            return;
        };
        for page in 0..self.store.usage(SPACE).capacity_pages {
            let is_leased = self.responder.are_leased(self.now, page..page + 1);
            assert!(!is_leased || readers.leased.contains(&page), "page {page}");
        }
        let marks = readers.leased.len();
        assert_eq!(marks, self.responder.leased_pages(), "no page is marked for no lease");
    }

    pub(super) fn drain(&mut self) -> Vec<Reply> {
        let mut replies = Vec::new();
        while let Some(transmit) = self.responder.poll_transmit(&self.store) {
            let mut bytes = transmit.head.to_vec();
            bytes.extend_from_slice(transmit.data);
            let datagram = Datagram::parse(transmit.source, transmit.destination, &bytes)
                .expect("a reply is well formed and sealed");
            assert!(datagram.is_reply());
            let pages = datagram
                .tlvs()
                .map(Result::unwrap)
                .filter(|tlv| tlv.kind == TlvType::PageStatus as u8)
                .flat_map(|tlv| tlv.value.iter().map(|&code| Status::from_code(code).unwrap()))
                .collect();
            replies.push(Reply {
                status: Status::from_code(datagram.from.tag).unwrap(),
                from: datagram.from,
                to: transmit.destination,
                port: transmit.destination_port,
                header: datagram.header,
                target: datagram.target,
                data: datagram.data.to_vec(),
                pages,
            });
        }
        replies
    }

    /// Sends a request and returns its replies.
    pub(super) fn send(&mut self, request: &TestRequest) -> Vec<Reply> {
        self.offer(request).expect("nothing waits");
        self.drain()
    }

    /// Sends a request that has one reply.
    pub(super) fn one(&mut self, request: &TestRequest) -> Reply {
        let mut replies = self.send(request);
        assert_eq!(replies.len(), 1, "{request:?}: {replies:?}");
        replies.remove(0)
    }

    pub(super) fn status(&mut self, request: &TestRequest) -> Status {
        self.one(request).status
    }

    /// Puts a request into the session, with a new number; all earlier numbers have their replies.
    pub(super) fn next(&mut self, request: TestRequest) -> TestRequest {
        self.sequence += 1;
        self.low_water = self.sequence;
        self.numbered(request, self.sequence)
    }

    /// Puts a request into the session with a number; low water stays.
    pub(super) fn numbered(&self, request: TestRequest, sequence: u64) -> TestRequest {
        let distance = sequence.saturating_sub(self.low_water);
        request.with(|header| {
            (header.session, header.sequence) = (self.session, sequence);
            header.answered_distance = u16::try_from(distance).unwrap_or(u16::MAX);
        })
    }

    pub(super) fn event(&self, event: Event) -> u64 {
        self.responder.counters().event(event)
    }

    pub(super) fn create(&mut self, pages: u32) -> Pointer {
        let request = TestRequest::server(Command::Create).with(|header| header.length = pages);
        let request = self.next(request);
        let reply = self.one(&request);
        assert_eq!(reply.status, Status::Ok);
        Pointer::from_ipv6(reply.header.target).unwrap()
    }

    /// Sixteen pages, of which the last eight also have names of another node: the pointer, what was
    /// adopted, and the pointer to the first of the eight under its other name.
    pub(super) fn create_adopted(&mut self) -> (Pointer, Adopted, Pointer) {
        let own = self.create(16);
        let adopted = Adopted {
            node: NodeId(4),
            generation: store::GENERATION,
            first_page: 512,
            page_count: 8,
            local_page: 8,
        };
        self.responder.add_adopted(adopted).unwrap();
        (own, adopted, Pointer { node: NodeId(4), ..pointer(512 * 4096, own.tag.0) })
    }

    /// The datagrams of a WRITE, in a new number.
    pub(super) fn write_train(&mut self, at: Pointer, data: &[u8]) -> Vec<TestRequest> {
        self.sequence += 1;
        self.low_water = self.sequence;
        self.train(Command::Write, at, data, self.sequence)
    }

    pub(super) fn train(
        &self,
        command: Command,
        at: Pointer,
        data: &[u8],
        n: u64,
    ) -> Vec<TestRequest> {
        let request = TestRequest::new(command, at.to_ipv6());
        pieces(request, at.location.in_page(), data, usize::from(self.piece_bytes))
            .into_iter()
            .map(|request| self.numbered(request, n))
            .collect()
    }

    pub(super) fn write(&mut self, at: Pointer, data: &[u8]) -> Status {
        let train = self.write_train(at, data);
        let mut replies: Vec<_> = train.iter().flat_map(|request| self.send(request)).collect();
        assert_eq!(replies.len(), 1, "{replies:?}");
        replies.remove(0).status
    }

    pub(super) fn read_request(&mut self, at: Pointer, length: usize) -> TestRequest {
        let request = TestRequest::new(Command::Read, at.to_ipv6());
        self.next(request.with(|header| header.length = u32::try_from(length).unwrap()))
    }

    /// Reads bytes, which must all be readable.
    pub(super) fn read(&mut self, at: Pointer, length: usize) -> Vec<u8> {
        let request = self.read_request(at, length);
        let mut bytes = vec![0; length];
        let replies = self.send(&request);
        let in_page = at.location.in_page();
        let cut = Cut::new(in_page, length, usize::from(self.piece_bytes)).unwrap();
        assert_eq!(replies.len(), cut.piece_count() as usize);
        for (number, reply) in (0..).zip(replies) {
            assert_eq!(reply.status, Status::Ok);
            let range = cut.piece(number).unwrap().range;
            assert_eq!(usize::from(reply.header.offset), range.start);
            bytes[range].copy_from_slice(&reply.data);
        }
        bytes
    }

    pub(super) fn delete(&mut self, at: Pointer, pages: u32) -> Status {
        let request =
            TestRequest::new(Command::Delete, at.to_ipv6()).with(|header| header.length = pages);
        let request = self.next(request);
        self.status(&request)
    }
}

pub(super) fn open(node: NodeId, incarnation: u32, nonce: u64, piece_bytes: u16) -> TestRequest {
    let mut request = TestRequest::server(Command::Open).with(|header| {
        (header.sequence, header.incarnation) = (nonce, incarnation);
        (header.length, header.credit) = (u32::from(piece_bytes), 600);
    });
    request.from = endpoint(node);
    request
}

/// One datagram per piece of `data`.
pub(super) fn pieces(
    request: TestRequest,
    in_page: usize,
    data: &[u8],
    piece_bytes: usize,
) -> Vec<TestRequest> {
    let cut = Cut::new(in_page, data.len(), piece_bytes).unwrap();
    (0..cut.piece_count())
        .map(|number| {
            let range = cut.piece(number).unwrap().range;
            let piece = request.clone().carrying(&data[range.clone()]);
            piece.with(|header| {
                header.length = u32::try_from(data.len()).unwrap();
                header.offset = u16::try_from(range.start).unwrap();
            })
        })
        .collect()
}

pub(super) fn moved_by(pointer: Pointer, bytes: u64) -> Pointer {
    pointer.checked_add(bytes).unwrap()
}

pub(super) fn page_of(pointer: Pointer, page: usize) -> Pointer {
    moved_by(pointer, (page * PAGE_BYTES) as u64)
}

pub(super) fn pointer(offset: u64, tag: u8) -> Pointer {
    let location = Location::new(store::GENERATION, offset).unwrap();
    Pointer { space: SPACE, node: SERVER, tag: Tag(tag), location }
}

pub(super) fn zeroing(header: &mut Header) {
    header.flags = header.flags.with(Flags::ZERO);
}
