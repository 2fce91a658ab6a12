//! What an operation costs client and server, in instructions: a regression is seen on any machine, however busy.
//!
//! The bounds are for the profile `dev` of x86-64, whose hot crates are optimized and have debug assertions. They leave
//! room for another compiler or C library, and not for another loop, allocation or copy. Data is short, because how
//! many instructions a long copy or checksum takes depends on the processor.

use std::{cell::Cell, hint::black_box, net::Ipv6Addr};

use bluebridge::{Client, EndpointConfig, Pointer};
use bluebridge_memserver::{Arena, ArenaConfig};
use bluebridge_protocol::{
    Timestamp,
    responder::{Config, Responder},
    store::PageStore as _,
};
use bluebridge_testkit::instructions;
use bluebridge_transport::{
    Capabilities, Counters, Incoming, Outgoing, ReceiveError, TransmitError, Transport, Wait,
};
use bluebridge_wire::{
    ArenaGeneration, Command, Datagram, EndpointAddress, Header, HeaderView, Location, NodeId,
    ReplySource, Space, Status, Tag, UDP_PORT, WireCommand, address::Fields, header::HEADER_BYTES,
    seal,
};

const SPACE: Space = Space(7);
const SERVER: NodeId = NodeId(9);
const CLIENT: NodeId = NodeId(20);

/// Operations that are counted, after as many that are not.
const OPERATIONS: u64 = 4;
const DATA: [u8; 64] = [3; 64];

/// Compares a count with its bound, and prints it.
fn assert_within(what: &str, count: u64, bound: u64) {
    println!("{what}: {count} instructions, at most {bound}");
    assert!(count <= bound, "{what} takes {count} instructions, and {bound} were allowed");
    // A bound that is far away sees nothing.
    assert!(
        count * 3 / 2 >= bound,
        "{what} takes only {count} instructions: lower its bound of {bound}"
    );
}

/// A request as it arrives.
struct Request {
    from: Ipv6Addr,
    to: Ipv6Addr,
    bytes: Vec<u8>,
}

impl Request {
    fn new(command: Command, target: Ipv6Addr, header: Header, data: &[u8]) -> Self {
        let from = EndpointAddress::new(SPACE, CLIENT, 1).to_ipv6();
        let bits = WireCommand::request(command, false).bits();
        let fields = Fields::unpack(target).expect("a fabric address");
        let to = Fields { command: bits, ..fields }.to_ipv6();
        let mut bytes = vec![0; HEADER_BYTES];
        Header { target, incarnation: 1, ..header }.emit(&mut bytes, 0);
        seal(from, to, &mut bytes, data);
        bytes.extend_from_slice(data);
        Self { from, to, bytes }
    }
}

struct Server {
    responder: Responder,
    arena: Arena,
}

impl Server {
    /// Handles a request completely; returns the header of its reply.
    fn handle(&mut self, request: &Request) -> Header {
        let datagram = Datagram::parse(request.from, request.to, &request.bytes);
        let datagram = datagram.expect("well formed");
        let taken =
            self.responder.handle_datagram(Timestamp::default(), 1, &datagram, &mut self.arena);
        taken.expect("the queue has room");
        let mut header = Header::default();
        for reply in self.responder.transmits(&self.arena) {
            let fields = Fields::unpack(reply.source).expect("a fabric address");
            assert_eq!(Status::from_code(fields.tag), Some(Status::Ok));
            header = HeaderView::new(reply.head).expect("a header").header();
            black_box(reply.data);
        }
        self.responder.release(usize::MAX);
        header
    }
}

#[test]
#[cfg(all(target_arch = "x86_64", debug_assertions))]
fn a_server_handles_requests_within_their_budgets() {
    let config = Config::new(SPACE, SERVER, 1, 1);
    let responder = Responder::new(&config).expect("a good configuration");
    let mut server = Server { responder, arena: Arena::on_heap(&ArenaConfig::default(), 1024) };
    let own = EndpointAddress::of_shard(SPACE, SERVER, 0, 0).to_ipv6();
    let open = Header { length: 4096, credit: 64, sequence: 1, ..Header::default() };
    let session = server.handle(&Request::new(Command::Open, own, open, &[])).session;
    let grant = server.arena.create(SPACE, 1).expect("room");
    let (location, tag) = (grant.location, grant.tag);
    let page = Pointer { space: SPACE, node: SERVER, tag, location }.to_ipv6();
    let mut sequence = 0;
    for (command, target, length, data, bound) in [
        (Command::Ping, own, 0, &[][..], 3300),
        (Command::Read, page, 64, &[][..], 5400),
        (Command::Write, page, 64, &DATA[..], 5500),
        (Command::FetchAdd, page, 8, &DATA[..8], 4850),
        (Command::Create, own, 1, &[][..], 5300),
    ] {
        let mut requests = (0..2 * OPERATIONS).map(|_| {
            sequence += 1;
            let header = Header { session, sequence, length, ..Header::default() };
            Request::new(command, target, header, data)
        });
        let requests: Vec<_> = requests.by_ref().collect();
        let (warm, counted) = requests.split_at(requests.len() / 2);
        for request in warm {
            server.handle(request);
        }
        let count = instructions::count(|| {
            for request in counted {
                server.handle(request);
            }
        });
        assert_within(&format!("the server's part of {command}"), count / OPERATIONS, bound);
        // The child's work is lost here, and the session goes on.
        for request in counted {
            server.handle(request);
        }
    }
}

/// Replies in place to each request.
struct Echo {
    capabilities: Capabilities,
    reply: Option<(Ipv6Addr, Ipv6Addr)>,
    bytes: Vec<u8>,
}

impl Echo {
    fn respond(&mut self, request: &Outgoing<'_>) {
        let asked = HeaderView::new(request.header).expect("a header").header();
        let to = Fields::unpack(request.destination).expect("a fabric address");
        let command = WireCommand::from_bits(to.command).command().expect("known");
        let mut header = Header { incarnation: 9, credit: 512, ..asked };
        let data_bytes = match command {
            Command::Open => {
                (header.session, header.detail) = (77, 0);
                0
            }
            Command::Read => DATA.len(),
            Command::FetchAdd => 8,
            _ => 0,
        };
        let from = ReplySource {
            space: SPACE,
            node: SERVER,
            command,
            contended: false,
            status: Status::Ok,
            location_bits: to.location,
        };
        let (source, destination) = (from.to_ipv6(), request.source);
        self.bytes.resize(HEADER_BYTES + data_bytes, 0x5a);
        let (fixed, data) = self.bytes.split_at_mut(HEADER_BYTES);
        header.emit(fixed, 0);
        seal(source, destination, fixed, data);
        self.reply = Some((source, destination));
    }
}

impl Transport for Echo {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }
    fn counters(&self) -> Counters {
        Counters::default()
    }
    fn local_port(&self) -> u16 {
        1
    }
    fn now(&self) -> Timestamp {
        Timestamp::default()
    }
    fn transmit(&mut self, batch: &[Outgoing<'_>]) -> Result<usize, TransmitError> {
        batch.iter().for_each(|request| self.respond(request));
        Ok(batch.len())
    }
    fn receive(&mut self, _wait: Wait) -> Result<usize, ReceiveError> {
        Ok(usize::from(self.reply.is_some()))
    }
    fn incoming(&self, _index: usize) -> Incoming<'_> {
        let (source, destination) = self.reply.expect("a reply was announced");
        Incoming { source, source_port: UDP_PORT, destination, payload: &self.bytes }
    }
}

#[test]
#[cfg(all(target_arch = "x86_64", debug_assertions))]
fn a_client_executes_operations_within_their_budgets() {
    let capabilities = Capabilities {
        name: "echo",
        largest_payload_bytes: 8952,
        batch_count: 32,
        train_segment_count: 1,
        train_bytes: 8952,
        receive_buffer_bytes: 8 << 20,
    };
    let echo = Echo { capabilities, reply: None, bytes: Vec::with_capacity(8952) };
    let mut client = Client::open(EndpointConfig::new(SPACE, CLIENT, 1), echo);
    let location = Location::new(ArenaGeneration::default(), 0).expect("48 bits");
    let page = Pointer { space: SPACE, node: SERVER, tag: Tag(1), location };
    type Operation<'a> = (&'a str, u64, &'a dyn Fn(&mut Client<Echo>));
    let total = Cell::new(0_u64);
    let operations: [Operation<'_>; 3] = [
        ("READ", 15_000, &|client| {
            let mut bytes = [0; DATA.len()];
            client.read(page, &mut bytes).expect("answered");
            total.set(total.get() + u64::from(bytes[0]));
        }),
        ("WRITE", 14_500, &|client| {
            client.write(page, &DATA).expect("answered");
        }),
        ("FETCH_ADD", 13_200, &|client| {
            client.fetch_add(page, 1).expect("answered");
        }),
    ];
    for (name, bound, operation) in operations {
        (0..OPERATIONS).for_each(|_| operation(&mut client));
        let count = instructions::count(|| (0..OPERATIONS).for_each(|_| operation(&mut client)));
        let what = format!("the client's part of {name}, and the reply");
        assert_within(&what, count / OPERATIONS, bound);
    }
    assert!(total.get() > 0, "the replies have data");
}
