//! Every misuse of the client library against real servers: the exact error, whose fault it is,
//! what its text advises, and that nothing changed.

use std::time::{Duration, Instant};

use bluebridge::{
    ArenaGeneration, Client, EndpointConfig, Error, Fault, MemoryNode, NodeId, Placement, Pointer,
    Region, Space, Status,
};
use bluebridge_memserver::{Claim, Server, ServerConfig, run};
use bluebridge_transport::{
    Outgoing, Transport, Wait,
    memory::{EndpointId, Hub, MemoryTransport},
};
use bluebridge_wire::{
    Datagram, EndpointAddress, Header, UDP_PORT, address::Fields, header::HEADER_BYTES, seal,
};

mod leases;

const SPACE: Space = Space(1);
const OTHER_SPACE: Space = Space(2);
const NODE: NodeId = NodeId(1);
const SMALL: NodeId = NodeId(2);
const PAGE: usize = 4096;
const CAPACITY_PAGES: u64 = 512;
const QUOTA_PAGES: u64 = 16;

struct HubRack {
    hub: Hub,
    endpoints: Vec<EndpointId>,
    servers: Vec<Server>,
}

fn prefix(space: Space, node: NodeId) -> ipnet::Ipv6Net {
    let first = Fields { space, node, command: 0, tag: 0, location: 0 };
    ipnet::Ipv6Net::new(first.to_ipv6(), 48).expect("a prefix")
}

fn server_config(node: NodeId) -> ServerConfig {
    let memory_bytes = CAPACITY_PAGES * PAGE as u64;
    ServerConfig {
        spaces: vec![SPACE, OTHER_SPACE],
        claim: Claim::OnDemand,
        // The tests of one space fill a whole server.
        default_quota_pages: Some(u64::MAX),
        ..ServerConfig::new(SPACE, node, 1, memory_bytes, 0x5eed)
    }
}

impl HubRack {
    /// One server with room, and one on which the space has a small quota.
    fn start() -> Self {
        let hub = Hub::new(4096);
        let mut rack = Self { hub, endpoints: Vec::new(), servers: Vec::new() };
        rack.serve(&server_config(NODE));
        rack.serve(&ServerConfig { quotas: vec![(SPACE, QUOTA_PAGES)], ..server_config(SMALL) });
        rack
    }

    fn serve(&mut self, config: &ServerConfig) {
        let prefixes = [prefix(SPACE, config.node), prefix(OTHER_SPACE, config.node)];
        let transport = self.hub.attach(UDP_PORT, &prefixes).expect("a new node");
        self.endpoints.push(transport.id());
        self.servers.push(run(config, vec![transport]).expect("it starts"));
    }

    fn attach(&self, space: Space, node: u16) -> MemoryTransport {
        self.hub.attach(5000 + node, &[prefix(space, NodeId(node))]).expect("a new node")
    }

    fn client(&self, space: Space, node: u16) -> Client<MemoryTransport> {
        let mut config = EndpointConfig::new(space, NodeId(node), 1);
        config.memory_nodes =
            [NODE, SMALL].map(|node| MemoryNode { node, shard_count: 1 }).to_vec();
        config.placement = Placement::Node(NODE);
        Client::open(config, self.attach(space, node))
    }
}

/// A client, a page of its own that must keep its bytes, and what is used now.
struct Bench {
    rack: HubRack,
    client: Client<MemoryTransport>,
    region: Region,
    bytes: Vec<u8>,
    used_pages: u64,
}

impl Bench {
    fn new() -> Self {
        let rack = HubRack::start();
        let mut client = rack.client(SPACE, 1000);
        let bytes: Vec<u8> = (0..2 * PAGE).map(|at| at.to_le_bytes()[0] ^ 0x5a).collect();
        let region = client.alloc_write(&bytes).expect("there is room");
        let used_pages = client.stat(NODE).expect("it answers").used_pages;
        Self { rack, client, region, bytes, used_pages }
    }

    fn base(&self) -> Pointer {
        self.region.base()
    }

    /// Nothing changed: not the bytes, not what is allocated.
    fn assert_nothing_changed(&mut self) {
        let mut back = vec![0; self.bytes.len()];
        self.client.read(self.region.base(), &mut back).expect("it is ours");
        assert!(back == self.bytes, "bytes changed");
        let usage = self.client.stat(NODE).expect("it answers");
        assert_eq!(usage.used_pages, self.used_pages, "the number of pages changed");
        assert_eq!(usage.provisional_pages, 0);
    }
}

#[track_caller]
fn assert_refused<T: core::fmt::Debug>(
    result: Result<T, Error>,
    expected: Status,
    fault: Fault,
    advice: &str,
) {
    let error = result.expect_err("it is refused");
    assert!(
        matches!(error, Error::Refused { status, .. } if status == expected),
        "{error:?} instead of {expected:?}"
    );
    assert_advice(&error, fault, advice);
    assert_eq!(error.code(), 256 + u16::from(expected.code()));
}

#[track_caller]
fn assert_advice(error: &Error, fault: Fault, advice: &str) {
    assert_eq!(error.fault(), fault, "{error}");
    assert!(error.to_string().contains(advice), "no {advice:?} in {error}");
    assert!(!error.is_outcome_unknown(), "{error}");
}

#[test]
fn freed_memory_is_refused_however_it_is_used() {
    let mut bench = Bench::new();
    let gone = bench.client.create(PAGE as u64).expect("there is room");
    bench.client.delete(gone).expect("it is ours");
    let forget = "forget the pointer";
    let client = &mut bench.client;
    let freed = Status::NotAllocated;
    assert_refused(client.delete(gone), freed, Fault::You, forget);
    assert_refused(client.delete_pointer(gone.base()), freed, Fault::You, forget);
    assert_refused(client.read(gone.base(), &mut [0; 8]), freed, Fault::You, forget);
    assert_refused(client.write(gone.base(), &[1; 8]), freed, Fault::You, forget);
    assert_refused(client.zero(gone.base(), 8), freed, Fault::You, forget);
    assert_refused(client.fetch_add(gone.base(), 1), freed, Fault::You, forget);
    assert_refused(client.compare_swap(gone.base(), 0, 1), freed, Fault::You, forget);
    bench.assert_nothing_changed();
}

#[test]
fn a_pointer_to_memory_that_was_allocated_again_is_stale() {
    let mut bench = Bench::new();
    let gone = bench.client.create(PAGE as u64).expect("there is room");
    bench.client.delete(gone).expect("it is ours");
    // Freed pages are quarantined, so the test must allocate all memory to get this one again.
    let left = (CAPACITY_PAGES - bench.used_pages) * PAGE as u64;
    let all = bench.client.create(left).expect("there is room");
    let client = &mut bench.client;
    let stale = Status::StaleTag;
    for (result, what) in [
        (client.delete(gone), "delete"),
        (client.read(gone.base(), &mut [0; 8]), "read"),
        (client.write(gone.base(), &[1; 8]), "write"),
        (client.zero(gone.base(), 8), "zero"),
        (client.fetch_add(gone.base(), 1).map(drop), "fetch_add"),
    ] {
        println!("{what}");
        assert_refused(result, stale, Fault::You, "forget the pointer");
    }
    let mut back = vec![1; usize::try_from(left).expect("small")];
    client.read(all.base(), &mut back).expect("it is ours");
    assert!(back.iter().all(|byte| *byte == 0), "the new owner's pages are as given");
    client.delete(all).expect("it is ours");
    bench.assert_nothing_changed();
}

#[test]
fn a_pointer_from_before_an_empty_restart_is_refused_to_a_new_client() {
    let Bench { mut rack, client, region, .. } = Bench::new();
    let old = region.base();
    client.close().expect("the carrier works");
    rack.servers.remove(0).stop().expect("it ends well");
    // The hub keeps the old endpoint's prefix, so the new life is on a hub of its own.
    rack.hub = Hub::new(4096);
    let generation = ArenaGeneration::new(1).expect("a small number");
    rack.serve(&ServerConfig { generation, incarnation: 2, ..server_config(NODE) });
    let mut fresh = rack.client(SPACE, 1001);
    let own = fresh.create(2 * PAGE as u64).expect("there is room");
    assert_eq!(own.base().location.offset(), old.location.offset(), "the same place");
    let lost = Status::StaleGeneration;
    let forget = "forget the pointer";
    assert_refused(fresh.read(old, &mut [0; 8]), lost, Fault::Server, forget);
    assert_refused(fresh.write(old, &[1; 8]), lost, Fault::Server, forget);
    assert_refused(fresh.fetch_add(old, 1), lost, Fault::Server, forget);
    assert_refused(fresh.delete_pointer(old), lost, Fault::Server, forget);
    let mut back = [1; 2 * PAGE];
    fresh.read(own.base(), &mut back).expect("it is ours");
    assert!(
        back.iter().all(|byte| *byte == 0),
        "the allocation that has its place now is unchanged"
    );
}

#[test]
fn what_lies_outside_is_refused() {
    let mut bench = Bench::new();
    let far = bench.base().checked_add(1 << 30).expect("inside of 48 bits");
    let correct = "correct the pointer or the length";
    let client = &mut bench.client;
    let out = Status::OutOfRange;
    assert_refused(client.read(far, &mut [0; 8]), out, Fault::You, correct);
    assert_refused(client.write(far, &[1; 8]), out, Fault::You, correct);
    assert_refused(client.zero(far, 8), out, Fault::You, correct);
    assert_refused(client.delete_pointer(far), out, Fault::You, correct);
    // One byte beyond the allocation: the page behind it was never allocated.
    let end = bench.region.at(2 * PAGE as u64 - 1).expect("the last byte");
    let client = &mut bench.client;
    let beyond = client.read(end, &mut [0; 2]).expect_err("it goes past the end");
    assert!(matches!(beyond, Error::PastEnd { .. }), "{beyond}");
    assert_advice(&beyond, Fault::You, "correct the length");
    bench.assert_nothing_changed();
}

#[test]
fn what_is_not_aligned_is_refused() {
    let mut bench = Bench::new();
    let odd = bench.base().checked_add(4).expect("inside");
    let correct = "correct the pointer or the length";
    let client = &mut bench.client;
    let unaligned = Status::Unaligned;
    assert_refused(client.compare_swap(odd, 0, 1), unaligned, Fault::You, correct);
    assert_refused(client.fetch_add(odd, 1), unaligned, Fault::You, correct);
    assert_refused(client.delete_pointer(odd), unaligned, Fault::You, correct);
    let inner = bench.base().checked_add(PAGE as u64).expect("inside");
    let client = &mut bench.client;
    assert_refused(client.delete_pointer(inner), unaligned, Fault::You, correct);
    let part = Region::new(bench.base(), PAGE as u64).expect("inside");
    let shorter = bench.client.delete(part);
    assert_refused(shorter, Status::BadLength, Fault::You, correct);
    bench.assert_nothing_changed();
}

#[test]
fn lengths_of_zero_and_beyond_all_bounds_are_refused() {
    let mut bench = Bench::new();
    let base = bench.base();
    let client = &mut bench.client;
    let empty = Region::new(base, 0).expect("an empty region");
    let results = [
        client.read(base, &mut []),
        client.write(base, &[]),
        client.zero(base, 0),
        client.create(0).map(drop),
        client.alloc_write(&[]).map(drop),
        client.delete(empty),
        client.create(u64::MAX).map(drop),
        client.zero(base, u64::MAX),
    ];
    for (at, result) in results.into_iter().enumerate() {
        let error = result.expect_err("no such length");
        assert!(matches!(error, Error::Length), "{at}: {error:?}");
        assert_advice(&error, Fault::You, "length is zero, or larger");
    }
    bench.assert_nothing_changed();
}

#[test]
fn memory_and_quota_end_with_their_own_errors() {
    let mut bench = Bench::new();
    let client = &mut bench.client;
    let much = CAPACITY_PAGES * PAGE as u64;
    let free = "allocate less at once or on another node, or free memory";
    assert_refused(client.create(much), Status::OutOfMemory, Fault::Server, free);
    let data = vec![1; usize::try_from(much).expect("small")];
    assert_refused(client.alloc_write(&data), Status::OutOfMemory, Fault::Server, free);
    let quota = "ask for a larger quota";
    let beyond = (QUOTA_PAGES + 1) * PAGE as u64;
    let small = Placement::Node(SMALL);
    let create = client.create_at(beyond, small);
    assert_refused(create, Status::QuotaExceeded, Fault::You, quota);
    let full = client.create_at(QUOTA_PAGES * PAGE as u64, small).expect("just as much");
    let more = client.alloc_write_at(&[1], small);
    assert_refused(more, Status::QuotaExceeded, Fault::You, quota);
    client.delete(full).expect("it is ours");
    assert_eq!(client.stat(SMALL).expect("it answers").used_pages, 0);
    bench.assert_nothing_changed();
}

#[test]
fn absent_nodes_are_reported_within_the_deadline() {
    let mut bench = Bench::new();
    let deadline = Duration::from_millis(300);
    bench.client.set_deadline(deadline);
    let unallocated = Pointer { node: NodeId(77), ..bench.base() };
    let started = Instant::now();
    let client = &mut bench.client;
    let results = [
        client.read(unallocated, &mut [0; 8]),
        client.write(unallocated, &[1; 8]),
        client.delete_pointer(unallocated).map(drop),
        client.ping(NodeId(77)).map(drop),
        client.create_at(1, Placement::Node(NodeId(77))).map(drop),
        // No memory node: requests to node 0 are not forwarded.
        client.create_at(1, Placement::Anywhere).map(drop),
    ];
    assert!(started.elapsed() < 6 * deadline + Duration::from_secs(5));
    for (at, result) in results.into_iter().enumerate() {
        let error = result.expect_err("there is no node");
        let node = if at == 5 { NodeId::ANY } else { NodeId(77) };
        assert!(matches!(error, Error::Unreachable { node: asked } if asked == node), "{error:?}");
        assert_advice(
            &error,
            Fault::Network,
            "check that it is running and that the switch has its entries",
        );
    }
    let mut config = EndpointConfig::new(SPACE, NodeId(1002), 1);
    config.placement = Placement::TwoChoices;
    let mut lost = Client::open(config, bench.rack.attach(SPACE, 1002));
    let error = lost.create(1).expect_err("none is known");
    assert!(matches!(error, Error::NoMemoryNode), "{error:?}");
    assert_advice(&error, Fault::Controller, "check that a memory server has joined the space");
    bench.client.set_deadline(Duration::from_secs(5));
    bench.assert_nothing_changed();
}

#[test]
fn pointers_of_other_nodes_and_spaces_are_refused() {
    let mut bench = Bench::new();
    let base = bench.base();
    for node in [NodeId::ANY, NodeId::ALL] {
        let error = bench.client.write(Pointer { node, ..base }, &[1]).expect_err("no one node");
        assert!(matches!(error, Error::WrongNode { node: named } if named == node), "{error:?}");
        assert_advice(&error, Fault::You, "cannot be a memory node");
    }
    let foreign = Pointer { space: OTHER_SPACE, ..base };
    let error = bench.client.write(foreign, &[1]).expect_err("another space's");
    assert!(matches!(error, Error::WrongSpace), "{error:?}");
    assert_advice(&error, Fault::You, "belongs to another space");
    // A client of the other space guesses the pointer; the server knows whose page it is.
    let mut other = bench.rack.client(OTHER_SPACE, 1003);
    for result in [
        other.read(foreign, &mut [0; 8]),
        other.write(foreign, &[1; 8]),
        other.zero(foreign, 8),
        other.delete_pointer(foreign).map(drop),
        other.fetch_add(foreign, 1).map(drop),
    ] {
        let error = result.expect_err("it is another's");
        let is_wrong_space =
            matches!(error, Error::Refused { status: Status::WrongSpace, node: NODE, .. });
        assert!(is_wrong_space, "{error:?}");
        assert_advice(&error, Fault::You, "the pointer belongs to another space");
    }
    bench.assert_nothing_changed();
}

#[test]
fn unknown_commands_are_refused() {
    let mut bench = Bench::new();
    let mut carrier = bench.rack.attach(SPACE, 1005);
    for command in (19..24).chain(26..64).chain([0x40 | 63]) {
        let target = raw(NODE, 0);
        let reply = ask_raw(&mut carrier, 1005, Fields { command, ..target });
        assert_eq!(reply, Some(Status::UnknownCommand), "command {command}");
    }
    bench.assert_nothing_changed();
}

fn raw(node: NodeId, command: u8) -> Fields {
    let location = EndpointAddress::of_shard(SPACE, node, 0, 0).location_bits();
    Fields { space: SPACE, node, command, tag: 0, location }
}

/// Sends a bare datagram and waits for the status of its response.
fn ask_raw(carrier: &mut MemoryTransport, from: u16, to: Fields) -> Option<Status> {
    let source = EndpointAddress::new(SPACE, NodeId(from), 7).to_ipv6();
    let target = Fields { command: 0, ..to };
    let header =
        Header { target: target.to_ipv6(), incarnation: 1, sequence: 1, ..Header::default() };
    let mut head = [0; HEADER_BYTES];
    header.emit(&mut head, 0);
    let destination = to.to_ipv6();
    seal(source, destination, &mut head, &[]);
    let outgoing =
        Outgoing { source, destination, destination_port: UDP_PORT, header: &head, data: &[] };
    assert_eq!(carrier.transmit(&[outgoing]).expect("the carrier works"), 1);
    let deadline = carrier.now() + Duration::from_secs(5);
    while carrier.now() < deadline {
        if carrier.receive(Wait::until(deadline)).expect("the carrier works") > 0 {
            let incoming = carrier.incoming(0);
            let parsed = Datagram::parse(incoming.source, incoming.destination, incoming.payload);
            return Status::from_code(parsed.expect("a reply is well formed").from.tag);
        }
    }
    None
}

/// Each of its requests is tried until its deadline.
mod long {
    use super::*;

    #[test]
    fn a_request_on_a_wrong_route_is_refused() {
        let mut bench = Bench::new();
        // The directory routes a third node's addresses to the second server.
        let stray = Pointer { node: NodeId(9), ..bench.base() };
        let second = bench.rack.endpoints[1];
        bench.rack.hub.route(prefix(SPACE, stray.node), &[second]).expect("it is attached");
        let client = &mut bench.client;
        let astray = "delivered the request to a node that the pointer does not name";
        let wrong = Status::WrongNode;
        assert_refused(client.read(stray, &mut [0; 8]), wrong, Fault::Network, astray);
        assert_refused(client.read(stray, &mut [0; 2 * PAGE]), wrong, Fault::Network, astray);
        assert_refused(client.write(stray, &[1; 8]), wrong, Fault::Network, astray);
        assert_refused(client.delete_pointer(stray), wrong, Fault::Network, astray);
        bench.assert_nothing_changed();
    }
}
