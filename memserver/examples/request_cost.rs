//! Measures the cost of a request for the serving core without a carrier: parse, checks, effect,
//! sealed reply.
//!
//! ```text
//! cargo run --release -p bluebridge-memserver --example request_cost
//! ```

#![allow(clippy::cast_precision_loss, reason = "durations are printed to three digits")]

use std::{
    hint::black_box,
    net::Ipv6Addr,
    time::{Duration, Instant as Moment},
};

use bluebridge_memserver::{Arena, ArenaConfig, Claim, Reservation};
use bluebridge_protocol::{
    Timestamp,
    responder::{Config, Responder},
    store::PageStore,
};
use bluebridge_wire::{
    Command, Datagram, EndpointAddress, Header, HeaderView, NodeId, Pointer, Space, Status,
    WireCommand, address::Fields, header::HEADER_BYTES, seal,
};

const SPACE: Space = Space(7);
const SERVER: NodeId = NodeId(9);
const BATCH: u32 = 64;
const BATCHES: usize = 10_000;

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

struct Bench {
    responder: Responder,
    arena: Arena,
    session: u64,
    sequence: u64,
    pages: Vec<Pointer>,
}

impl Bench {
    fn new(page_count: usize) -> Self {
        let config = Config::new(SPACE, SERVER, 1, 1);
        let mut responder = Responder::new(&config).expect("a good configuration");
        let reservation = Reservation {
            bytes: page_count as u64 * 4096 * 2,
            shard_count: 1,
            claim: Claim::Prefault,
            prefer_huge_pages: true,
        };
        let mut reserved = reservation.reserve().expect("memory");
        println!("memory: {:?}", reserved.page_kind);
        let mut arena =
            Arena::open(&ArenaConfig::default(), reserved.parts.remove(0)).expect("it is new");
        let server = EndpointAddress::of_shard(SPACE, SERVER, 0, 0).to_ipv6();
        let header = Header { length: 4096, credit: 64, sequence: 1, ..Header::default() };
        let open = prepare(Command::Open, server, header, &[]);
        let datagram = Datagram::parse(open.from, open.to, &open.bytes).expect("well formed");
        let now = Timestamp::default();
        responder.handle_datagram(now, 1, &datagram, &mut arena).expect("an empty queue");
        let reply = responder.poll_transmit(&arena).expect("a reply");
        let session = HeaderView::new(reply.head).expect("a header").header().session;
        let pages = (0..page_count)
            .map(|_| {
                let grant = arena.create(SPACE, 1).expect("room");
                let (location, tag) = (grant.location, grant.tag);
                Pointer { space: SPACE, node: SERVER, tag, location }
            })
            .collect();
        Self { responder, arena, session, sequence: 0, pages }
    }

    /// The time of a request with the given length and data: the median over batches, few of which
    /// a busy machine interrupts.
    fn measure(&mut self, command: Command, length: u32, data: &[u8]) -> Duration {
        median(|| self.batch(command, length, data)) / BATCH
    }

    fn batch(&mut self, command: Command, length: u32, data: &[u8]) -> Duration {
        let requests: Vec<_> = (0..BATCH)
            .map(|_| {
                self.sequence += 1;
                let place = usize::try_from(self.sequence).unwrap_or(0) * 7919 % self.pages.len();
                let (session, sequence) = (self.session, self.sequence);
                let header = Header { session, sequence, length, ..Header::default() };
                prepare(command, self.pages[place].to_ipv6(), header, data)
            })
            .collect();
        self.time(&requests)
    }

    fn time(&mut self, requests: &[Prepared]) -> Duration {
        let begun = Moment::now();
        for request in requests {
            let datagram = Datagram::parse(request.from, request.to, &request.bytes);
            let datagram = datagram.expect("well formed");
            let now = Timestamp::default();
            let taken = self.responder.handle_datagram(now, 1, &datagram, &mut self.arena);
            if taken.is_err() {
                self.drain();
                self.responder
                    .handle_datagram(now, 1, &datagram, &mut self.arena)
                    .expect("an empty queue");
            }
        }
        self.drain();
        begun.elapsed()
    }

    /// The time of an OPEN, each with another nonce, by a node with the maximum number of sessions.
    fn measure_open(&mut self) -> Duration {
        let server = EndpointAddress::of_shard(SPACE, SERVER, 0, 0).to_ipv6();
        let mut nonce = 1000;
        median(|| {
            let requests: Vec<_> = (0..BATCH)
                .map(|_| {
                    nonce += 1;
                    let header =
                        Header { sequence: nonce, length: 4096, credit: 64, ..Header::default() };
                    prepare(Command::Open, server, header, &[])
                })
                .collect();
            self.time(&requests)
        }) / BATCH
    }

    fn drain(&mut self) {
        for reply in self.responder.transmits(&self.arena) {
            black_box((reply.head.as_ptr(), reply.data.as_ptr()));
        }
        self.responder.release(usize::MAX);
    }
}

fn sealing(data_bytes: usize) -> Duration {
    let data = vec![7; data_bytes];
    let mut head = [1; HEADER_BYTES];
    let address = EndpointAddress::new(SPACE, SERVER, 0).to_ipv6();
    median(|| {
        let begun = Moment::now();
        for _ in 0..BATCH {
            seal(address, address, black_box(&mut head), black_box(&data));
        }
        begun.elapsed()
    }) / BATCH
}

fn median(mut measure: impl FnMut() -> Duration) -> Duration {
    let mut times: Vec<_> = (0..BATCHES).map(|_| measure()).collect();
    times.sort_unstable();
    times[BATCHES / 2]
}

fn main() {
    let nanos = |time: Duration| time.as_nanos() as f64;
    let (short, long) = (nanos(sealing(0)), nanos(sealing(4096)));
    println!("CRC of a header alone {short:.0} ns, with 4096 bytes {long:.0} ns");
    for pages in [64, 16384] {
        let mut bench = Bench::new(pages);
        for (name, command, length, data_bytes) in [
            ("PING", Command::Ping, 0, 0),
            ("READ 64", Command::Read, 64, 0),
            ("READ 4096", Command::Read, 4096, 0),
            ("WRITE 64", Command::Write, 64, 64),
            ("WRITE 4096", Command::Write, 4096, 4096),
        ] {
            let data = vec![3; data_bytes];
            let spent = nanos(bench.measure(command, length, &data));
            let crc = short + if length == 4096 { long } else { short };
            let rest = spent - crc;
            println!("{pages:6} pages, {name:10}: {spent:5.0} ns, beside the CRC {rest:5.0} ns");
        }
        let spent = nanos(bench.measure_open());
        println!("{pages:6} pages, OPEN      : {spent:5.0} ns");
        let refused: u64 = bench
            .responder
            .counters()
            .statuses()
            .filter(|(status, _)| *status != Status::Ok)
            .map(|(_, count)| count)
            .sum();
        assert_eq!(refused, 0, "every request was served");
    }
}
