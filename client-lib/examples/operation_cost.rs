//! What requester and client cost per operation, without a network: the carrier is a loop that
//! responds in place. The checksums of both directions are measured separately.

use std::hint::black_box;
use std::net::Ipv6Addr;
use std::time::{Duration, Instant};

use bluebridge::{Client, EndpointConfig, NodeId, Pointer, ReadRequest, Space};
use bluebridge_transport::{
    Capabilities, Counters, Incoming, Outgoing, ReceiveError, Timestamp, TransmitError, Transport,
    Wait, monotonic_now,
};
use bluebridge_wire::address::{Fields, PAGE_BYTES};
use bluebridge_wire::header::{HEADER_BYTES, Header};
use bluebridge_wire::{
    ArenaGeneration, Command, Datagram, HeaderView, Location, ReplySource, Status, Tag, UDP_PORT,
    WireCommand, seal,
};

const NODE: NodeId = NodeId(1);
const SPACE: Space = Space(1);
const ROUNDS: u32 = 200_000;
const DEPTH: usize = 32;

/// Responds to each request at once, and measures its own time.
struct Loop {
    capabilities: Capabilities,
    replies: Vec<(Ipv6Addr, Ipv6Addr, Vec<u8>)>,
    reply_count: usize,
    own_time: Duration,
}

impl Loop {
    fn new() -> Self {
        Self {
            capabilities: Capabilities {
                name: "loop",
                largest_payload_bytes: 8952,
                batch_count: DEPTH,
                train_segment_count: 1,
                train_bytes: 8952,
                receive_buffer_bytes: 8 << 20,
            },
            replies: (0..64)
                .map(|_| (Ipv6Addr::UNSPECIFIED, Ipv6Addr::UNSPECIFIED, Vec::with_capacity(8952)))
                .collect(),
            reply_count: 0,
            own_time: Duration::ZERO,
        }
    }

    fn respond(&mut self, request: &Outgoing<'_>) {
        let mut head = [0; 256];
        head[..request.header.len()].copy_from_slice(request.header);
        let asked = HeaderView::new(&head[..request.header.len()]).expect("a header").header();
        let to = Fields::unpack(request.destination).expect("a fabric address");
        let command = WireCommand::from_bits(to.command).command().expect("known");
        let mut header = Header { incarnation: 9, credit: 512, ..asked };
        let data_bytes = match command {
            Command::Open => {
                header.session = 77;
                header.detail = 0;
                0
            }
            Command::Read => PAGE_BYTES,
            Command::FetchAdd => 8,
            _ => 0,
        };
        let from = ReplySource {
            space: SPACE,
            node: NODE,
            command,
            contended: false,
            status: Status::Ok,
            location_bits: to.location,
        };
        let (source, destination) = (from.to_ipv6(), request.source);
        let Some(reply) = self.replies.get_mut(self.reply_count) else { return };
        self.reply_count += 1;
        reply.2.resize(HEADER_BYTES + data_bytes, 0x5a);
        let (fixed, data) = reply.2.split_at_mut(HEADER_BYTES);
        header.emit(fixed, 0);
        seal(source, destination, fixed, data);
        (reply.0, reply.1) = (source, destination);
    }
}

impl Transport for Loop {
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
        monotonic_now()
    }
    fn transmit(&mut self, batch: &[Outgoing<'_>]) -> Result<usize, TransmitError> {
        let start = Instant::now();
        for request in batch {
            self.respond(request);
        }
        self.own_time += start.elapsed();
        Ok(batch.len())
    }
    fn receive(&mut self, _wait: Wait) -> Result<usize, ReceiveError> {
        Ok(std::mem::take(&mut self.reply_count))
    }
    fn incoming(&self, index: usize) -> Incoming<'_> {
        let (source, destination, payload) = &self.replies[index];
        Incoming { source: *source, source_port: UDP_PORT, destination: *destination, payload }
    }
}

impl Loop {
    /// Lends the loop to the client, so that its measured time can be read.
    fn measure(name: &str, per_call: usize, mut call: impl FnMut(&mut Client<&mut Self>)) {
        let mut best = f64::INFINITY;
        let mut carrier = Self::new();
        for _ in 0..5 {
            carrier.own_time = Duration::ZERO;
            let elapsed = {
                let config = EndpointConfig::new(SPACE, NodeId(1000), 1);
                let mut client = Client::open(config, &mut carrier);
                call(&mut client);
                let start = Instant::now();
                for _ in 0..ROUNDS {
                    call(&mut client);
                }
                start.elapsed()
            };
            let own = elapsed.saturating_sub(carrier.own_time).as_nanos();
            best = best.min(own as f64 / f64::from(ROUNDS) / per_call as f64);
        }
        println!("{name:<34} {best:>7.0} ns");
    }
}

fn pointer(offset: u64) -> Pointer {
    let location = Location::new(ArenaGeneration::default(), offset).expect("48 bits");
    Pointer { space: SPACE, node: NODE, tag: Tag(1), location }
}

fn checksums() {
    let pointer = pointer(0).to_ipv6();
    let mut payload = vec![7; HEADER_BYTES + PAGE_BYTES];
    let reply = ReplySource {
        space: SPACE,
        node: NODE,
        command: Command::Read,
        contended: false,
        status: Status::Ok,
        location_bits: 0,
    };
    let source = reply.to_ipv6();
    let destination = bluebridge_wire::EndpointAddress::new(SPACE, NodeId(1000), 0).to_ipv6();
    let (fixed, data) = payload.split_at_mut(HEADER_BYTES);
    Header { target: pointer, ..Header::default() }.emit(fixed, 0);
    seal(source, destination, fixed, data);
    let start = Instant::now();
    for _ in 0..ROUNDS {
        black_box(Datagram::parse(source, destination, black_box(&payload)).expect("sealed"));
    }
    let nanos = start.elapsed().as_nanos() as f64 / f64::from(ROUNDS);
    println!("{:<34} {nanos:>7.0} ns", "checksum and parse of 4180 bytes");
    let mut page = vec![1_u8; PAGE_BYTES];
    let start = Instant::now();
    for _ in 0..ROUNDS {
        black_box(&mut page).copy_from_slice(black_box(&payload[HEADER_BYTES..]));
    }
    let nanos = start.elapsed().as_nanos() as f64 / f64::from(ROUNDS);
    println!("{:<34} {nanos:>7.0} ns", "copy of 4096 bytes");
    let start = Instant::now();
    for _ in 0..ROUNDS {
        black_box(monotonic_now());
    }
    let nanos = start.elapsed().as_nanos() as f64 / f64::from(ROUNDS);
    println!("{:<34} {nanos:>7.0} ns", "one reading of the clock");
}

fn main() {
    checksums();
    let mut page = vec![0; PAGE_BYTES];
    Loop::measure("READ of 4096 bytes", 1, |client| {
        client.read(pointer(0), &mut page).expect("answered");
    });
    let data = vec![3; PAGE_BYTES];
    Loop::measure("WRITE of 4096 bytes", 1, |client| {
        client.write(pointer(0), &data).expect("answered");
    });
    Loop::measure("FETCH_ADD", 1, |client| {
        client.fetch_add(pointer(0), 1).expect("answered");
    });
    let mut pages = vec![0; DEPTH * PAGE_BYTES];
    Loop::measure("READ of 4096 bytes, 32 at once", DEPTH, |client| {
        let chunks = pages.chunks_mut(PAGE_BYTES).enumerate();
        let mut requests: Vec<_> = chunks
            .map(|(at, page)| ReadRequest::new(pointer((at * PAGE_BYTES) as u64), page))
            .collect();
        client.read_many(&mut requests).expect("answered");
        assert!(requests.iter().all(|request| request.result.is_ok()));
    });
}
