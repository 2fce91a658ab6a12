//! What a request costs the serving core without a carrier: parse, checks, effect, sealed reply:
//! `cargo bench -p bluebridge-memserver --bench request`. What of it is CRC tells the bench of `wire/`.

use std::{cell::Cell, fmt, hint::black_box, net::Ipv6Addr};

use bluebridge_memserver::{Arena, ArenaConfig, Claim, Reservation};
use bluebridge_protocol::{
    Instant,
    responder::{Config, Responder},
};
use bluebridge_wire::{
    Command, Datagram, EndpointAddress, Header, HeaderView, NodeId, Pointer, Space, Status,
    WireCommand, address::Fields, header::HEADER_BYTES, seal,
};
use divan::{Bencher, counter::ItemsCount};

const SPACE: Space = Space(7);
const SERVER: NodeId = NodeId(9);

/// Pages that the requests go to in turn: few stay in the caches, many do not.
const PAGE_COUNTS: [usize; 2] = [64, 16_384];

/// Commands with the bytes that they ask for, and that they carry.
const COMMANDS: [(Command, u32, usize); 5] = [
    (Command::Ping, 0, 0),
    (Command::Read, 64, 0),
    (Command::Read, 4096, 0),
    (Command::Write, 64, 64),
    (Command::Write, 4096, 4096),
];

fn main() {
    divan::main();
}

/// A request of one command.
#[derive(Clone, Copy)]
struct Case {
    pages: usize,
    command: Command,
    length: u32,
    data_bytes: usize,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {} of {} pages", self.command, self.length, self.pages)
    }
}

fn cases() -> impl Iterator<Item = Case> {
    PAGE_COUNTS.into_iter().flat_map(|pages| {
        COMMANDS.map(|(command, length, data_bytes)| Case { pages, command, length, data_bytes })
    })
}

/// A request that was prepared before the clock runs.
struct Prepared {
    from: Ipv6Addr,
    to: Ipv6Addr,
    bytes: Vec<u8>,
}

fn prepare(command: Command, target: Ipv6Addr, header: Header, data: &[u8]) -> Prepared {
    let from = EndpointAddress::new(SPACE, NodeId(20), 1).to_ipv6();
    let fields = Fields::unpack(target).expect("a fabric address");
    let bits = WireCommand::request(command, false).bits();
    let to = Fields { command: bits, ..fields }.to_ipv6();
    let mut bytes = vec![0; HEADER_BYTES];
    Header { target, incarnation: 1, ..header }.emit(&mut bytes, 0);
    seal(from, to, &mut bytes, data);
    bytes.extend_from_slice(data);
    Prepared { from, to, bytes }
}

/// A request for a session.
fn open(nonce: u64) -> Prepared {
    let server = EndpointAddress::of_shard(SPACE, SERVER, 0, 0).to_ipv6();
    let header = Header { length: 4096, credit: 64, sequence: nonce, ..Header::default() };
    prepare(Command::Open, server, header, &[])
}

struct Server {
    responder: Responder,
    arena: Arena,
}

impl Server {
    fn new(page_count: usize) -> Self {
        let config = Config::new(SPACE, SERVER, 1, 1);
        let responder = Responder::new(&config).expect("a good configuration");
        let reservation = Reservation {
            bytes: page_count as u64 * 4096 * 2,
            shard_count: 1,
            claim: Claim::Prefault,
            prefer_huge_pages: true,
        };
        let mut reserved = reservation.reserve().expect("memory");
        let arena = Arena::new(&ArenaConfig::default(), reserved.parts.remove(0));
        Self { responder, arena }
    }

    /// Serves a request up to its sealed reply.
    fn serve(&mut self, request: &Prepared) {
        let datagram = Datagram::parse(request.from, request.to, &request.bytes);
        let datagram = datagram.expect("well formed");
        let now = Instant::default();
        self.responder
            .handle_datagram(now, 1, &datagram, &mut self.arena)
            .expect("the queue is empty");
        for reply in self.responder.transmits(&self.arena) {
            black_box((reply.head.as_ptr(), reply.data.as_ptr()));
        }
        self.responder.release(usize::MAX);
    }

    /// Opens a session and answers its number.
    fn session(&mut self) -> u64 {
        let request = open(1);
        let datagram = Datagram::parse(request.from, request.to, &request.bytes);
        self.responder
            .handle_datagram(
                Instant::default(),
                1,
                &datagram.expect("well formed"),
                &mut self.arena,
            )
            .expect("the queue is empty");
        let reply = self.responder.poll_transmit(&self.arena).expect("a reply");
        let session = HeaderView::new(reply.head).expect("a header").header().session;
        self.responder.release(usize::MAX);
        session
    }

    fn page(&mut self) -> Pointer {
        use bluebridge_protocol::store::PageStore as _;
        let grant = self.arena.create(SPACE, 1).expect("room");
        Pointer { space: SPACE, node: SERVER, tag: grant.tag, location: grant.location }
    }

    fn assert_all_served(&self) {
        let statuses = self.responder.counters().statuses();
        let refused = statuses.filter(|(status, _)| *status != Status::Ok);
        assert_eq!(refused.map(|(_, count)| count).sum::<u64>(), 0, "every request was served");
    }
}

#[divan::bench(args = cases(), sample_count = 1000, sample_size = 64)]
fn request(bencher: Bencher<'_, '_>, case: &Case) {
    let mut server = Server::new(case.pages);
    let session = server.session();
    let pages: Vec<_> = (0..case.pages).map(|_| server.page().to_ipv6()).collect();
    let data = vec![3; case.data_bytes];
    let last = Cell::new(0_u64);
    bencher
        .counter(ItemsCount::new(1_u32))
        .with_inputs(|| {
            let sequence = last.get() + 1;
            last.set(sequence);
            let place = usize::try_from(sequence).unwrap_or(0) * 7919 % pages.len();
            let header = Header { session, sequence, length: case.length, ..Header::default() };
            prepare(case.command, pages[place], header, &data)
        })
        .bench_local_refs(|request| server.serve(request));
    server.assert_all_served();
}

/// An OPEN with another nonce each, by a node that has all the sessions it may have.
#[divan::bench(sample_count = 1000, sample_size = 64)]
fn open_by_a_node_with_all_its_sessions(bencher: Bencher<'_, '_>) {
    let mut server = Server::new(1);
    let last = Cell::new(0_u64);
    let next = || {
        last.set(last.get() + 1);
        open(last.get())
    };
    for _ in 0..10_000 {
        server.serve(&next());
    }
    bencher
        .counter(ItemsCount::new(1_u32))
        .with_inputs(next)
        .bench_local_refs(|request| server.serve(request));
    server.assert_all_served();
}
