//! A responder without pages, which answers for a node that is gone, and one that allocates nothing.

use bluebridge_wire::{ArenaGeneration, NoMemory};

use super::*;
use crate::store::NoPages;

const HOLDER: NodeId = NodeId(4);

fn generation(number: u16) -> ArenaGeneration {
    ArenaGeneration::new(number).unwrap()
}

/// A deputy and one client's session.
struct Deputy {
    responder: Responder,
    store: NoPages,
    now: Timestamp,
    session: u64,
    sequence: u64,
}

impl Deputy {
    fn new(last: u16) -> Self {
        let now = Timestamp::from_nanos(5_000_000_000);
        let mut store = NoPages::up_to(generation(last));
        let mut responder = Responder::new(&config()).unwrap();
        responder.begin(now, &mut store);
        responder.set_idle_before(Duration::from_secs(7));
        Self { responder, store, now, session: 0, sequence: 0 }
    }

    /// The status of the reply, its node, and its header.
    fn send(&mut self, request: &TestRequest) -> (Status, Header) {
        let (bytes, to) = (request.bytes(), request.to.to_ipv6());
        let datagram = Datagram::parse(request.from, to, &bytes).unwrap();
        self.responder.handle_datagram(self.now, PORT, &datagram, &mut self.store).unwrap();
        let reply = self.responder.poll_transmit(&self.store).expect("it answers");
        let mut bytes = reply.head.to_vec();
        bytes.extend_from_slice(reply.data);
        let datagram = Datagram::parse(reply.source, reply.destination, &bytes).unwrap();
        assert_eq!(datagram.from.node, SERVER, "in the name of the node");
        (Status::from_code(datagram.from.tag).unwrap(), datagram.header)
    }

    fn in_session(&mut self, request: TestRequest) -> (Status, Header) {
        self.sequence += 1;
        let sequence = self.sequence;
        let session = self.session;
        self.send(&request.with(|header| (header.session, header.sequence) = (session, sequence)))
    }

    fn read(&mut self, first: u16, page: u64) -> (Status, u16) {
        let location = Location::new(generation(first), page << 12).unwrap();
        let at = Pointer { location, ..pointer(0, 3) };
        let request = TestRequest::new(Command::Read, at.to_ipv6());
        let (status, header) = self.in_session(request.with(|header| header.length = 8));
        (status, header.node)
    }
}

#[test]
fn a_deputy_says_where_pages_are_and_has_none() {
    let mut deputy = Deputy::new(9);
    // Of the first contents nothing is known that is not elsewhere; of the second it must be reported.
    deputy.responder.learn_earlier(generation(3), &[(0..16, Some(HOLDER))]);
    deputy.responder.learn_earlier(generation(6), &[(0..8, None), (8..16, Some(HOLDER))]);
    let lost = TestRequest::new(Command::FetchAdd, pointer(0, 3).to_ipv6()).carrying(&[0; 8]);
    let lost = lost.with(|header| (header.session, header.sequence, header.length) = (77, 1, 8));
    assert_eq!(deputy.send(&lost).0, Status::NoSession, "before it says where the page is");
    let (status, header) = deputy.send(&open(CLIENT, 1, 5, 4096));
    assert_eq!((status, header.detail), (Status::Ok, 10), "its contents begin after all others");
    assert_eq!(header.page_version, 7_000_000, "no other process executed anything in this time");
    deputy.session = header.session;
    assert_eq!(deputy.read(3, 0), (Status::Moved, HOLDER.0));
    assert_eq!(deputy.read(5, 8), (Status::Moved, HOLDER.0), "a later generation of these");
    assert_eq!(deputy.read(3, 16), (Status::StaleGeneration, 0));
    assert_eq!(deputy.read(1, 0), (Status::StaleGeneration, 0), "of contents before");
    assert_eq!(deputy.read(6, 0), (Status::Busy, 0), "it is not known yet");
    assert_eq!(deputy.read(9, 8), (Status::Moved, HOLDER.0));
    assert_eq!(deputy.read(10, 0), (Status::NoAuthority, 0), "it knows nothing of those");
    deputy.responder.learn_earlier(generation(6), &[(0..8, Some(NodeId(5)))]);
    assert_eq!(deputy.read(6, 0), (Status::Moved, 5));
    assert_eq!(deputy.read(6, 8), (Status::StaleGeneration, 0), "no server has it any more");
    let create = TestRequest::server(Command::Create).with(|header| header.length = 1);
    assert_eq!(deputy.in_session(create).0, Status::OutOfMemory);
    let taken = Pointer { location: Location::new(generation(3), 0).unwrap(), ..pointer(0, 3) };
    for command in [Command::Write, Command::CompareSwap, Command::Update, Command::Delete] {
        let data = if command == Command::CompareSwap { 16 } else { 8 };
        let request = TestRequest::new(command, taken.to_ipv6());
        let request = match command {
            Command::Update => request.with(|header| header.length = 8),
            Command::Delete => request,
            _ => request.carrying(&vec![0; data]).with(|header| header.length = 8),
        };
        let (status, _) = deputy.in_session(request);
        assert_eq!(status, Status::Moved, "{command:?}");
    }
}

#[test]
fn a_sealed_server_allocates_nothing_and_finishes_what_was_begun() {
    let mut world = World::new();
    let anywhere = TestRequest::anywhere(Command::Create, 0x700, 2);
    let before = world.one(&anywhere);
    assert_eq!(before.status, Status::Ok);
    let own = world.create(1);
    world.responder.set_sealed(true);
    let create = TestRequest::server(Command::Create).with(|header| header.length = 1);
    let create = world.next(create);
    let other = TestRequest::anywhere(Command::Create, 0x701, 2);
    let data = TestRequest::server(Command::AllocWrite).with(|header| header.length = 64);
    let data = TestRequest { data: vec![7; 64], ..world.next(data) };
    for (request, times) in [(create, 2), (other, 1), (data, 2)] {
        for _ in 0..times {
            let refused = world.one(&request);
            let reason = NoMemory::from_code(refused.header.detail);
            assert_eq!((refused.status, reason), (Status::OutOfMemory, NoMemory::Drained));
        }
    }
    assert_eq!(world.one(&anywhere).header.target, before.header.target, "a repetition");
    assert_eq!(world.write(own, &[7; 64]), Status::Ok);
    let stat = world.next(TestRequest::server(Command::Stat));
    let usage = bluebridge_wire::Usage::parse(&world.one(&stat).data).expect("it is whole");
    assert_eq!(usage.free_pages, 0, "nobody should choose it");
    world.responder.set_sealed(false);
    world.create(1);
}
