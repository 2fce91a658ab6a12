//! Mixed operations of many clients at once; every byte and every effect is checked.
//!
//! Each worker keeps a copy of its own regions and compares what it reads. Pages and counters that all
//! workers share show torn pages, and effects that happened twice or never.

mod worker;

use std::collections::BTreeMap;
use std::thread;

use bluebridge::{MemoryNode, NodeId, Placement, Pointer, Region};
use bluebridge_rack::layout::ENDPOINT_INTERFACE;
use bluebridge_rack::spec::{DataPlane, Node};
use bluebridge_switch::offload::disable_transmit_offloads;
use bluebridge_wire::address::PAGE_BYTES;

use super::endpoint::{Endpoint, UdpClient, await_used};
use super::switch::trouble;
use super::{RackOptions, TestRack};
use worker::{Held, Worker};

/// Pages that all workers write and read.
const SHARED_PAGES: u64 = 8;

/// Workers of each client endpoint.
const WORKERS_PER_ENDPOINT: u32 = 2;

/// The operations of the workers.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Kind {
    /// ALLOC_WRITE.
    AllocWrite,
    /// CREATE on a server that the switch chooses.
    AnywhereCreate,
    /// CAS on a counter that all workers share.
    CompareSwap,
    /// CREATE on a chosen node.
    Create,
    /// DELETE of a whole region.
    Delete,
    /// FETCH_ADD on a counter that all workers share, or on a word of an own region.
    FetchAdd,
    /// READ of part of an own region.
    Read,
    /// READ of a whole page that all workers write.
    SharedRead,
    /// WRITE of a whole page that all workers write.
    SharedWrite,
    /// WRITE of part of an own region.
    Write,
    /// WRITE of zeros to part of an own region.
    Zero,
}

/// All operations of the workers.
pub const KINDS: [Kind; 11] = [
    Kind::AllocWrite,
    Kind::AnywhereCreate,
    Kind::CompareSwap,
    Kind::Create,
    Kind::Delete,
    Kind::FetchAdd,
    Kind::Read,
    Kind::SharedRead,
    Kind::SharedWrite,
    Kind::Write,
    Kind::Zero,
];

/// The acknowledged operations.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Operations by kind.
    pub counts: BTreeMap<Kind, u64>,
    /// Bytes read and compared.
    pub compared_bytes: u64,
    /// The sum of all additions to the shared counter.
    pub added: u64,
    /// How often the other shared counter was incremented.
    pub raised: u64,
    /// Frames that the endpoints' ports lost, duplicated and reordered.
    pub impaired: [u64; 3],
}

impl Tally {
    /// All operations.
    pub fn operations(&self) -> u64 {
        self.counts.values().sum()
    }

    fn note(&mut self, kind: Kind) {
        *self.counts.entry(kind).or_default() += 1;
    }

    fn join(mut self, other: &Self) -> Self {
        for (kind, count) in &other.counts {
            *self.counts.entry(*kind).or_default() += count;
        }
        self.compared_bytes += other.compared_bytes;
        self.added += other.added;
        self.raised += other.raised;
        self
    }
}

/// The objects that all workers use.
#[derive(Clone, Debug)]
struct Shared {
    /// Pages, each on any of the nodes.
    pages: Vec<Pointer>,
    /// A counter of FETCH_ADD.
    sum: Pointer,
    /// A counter of CAS.
    raised: Pointer,
    nodes: Vec<MemoryNode>,
}

/// Runs `operations` in all with impairments on every port of a new rack, and checks everything.
///
/// # Panics
/// On any error, wrong or torn byte, lost or double effect, leaked page or fragment; the message
/// has the seed.
pub fn run(name: &str, switch: DataPlane, mtu: &'static str, operations: u32, seed: u64) -> Tally {
    let rack = TestRack::up(name, &RackOptions::new(switch, mtu));
    let endpoints = [Endpoint::join(&rack, 1), Endpoint::join(&rack, 2)];
    let [first, _] = &endpoints;
    let nodes = first.memory_nodes();
    assert_eq!(nodes.len(), 2, "both servers joined");
    if switch == DataPlane::Ebpf {
        cut_trains(&rack);
    }
    let mut observer = first.client(&rack, seed << 8);
    rack.impair_all(&trouble(switch, seed));
    let (shared, shared_regions) = share(&mut observer, &nodes);
    let numbers = (0_u32..).take(endpoints.len() * WORKERS_PER_ENDPOINT as usize);
    let workers: Vec<_> = numbers
        .zip(endpoints.iter().cycle())
        .map(|(number, endpoint)| {
            let client = endpoint.client(&rack, (seed << 8) + 1 + u64::from(number));
            Worker::new(number + 1, seed, client, shared.clone())
        })
        .collect();
    let each = operations / (2 * WORKERS_PER_ENDPOINT);
    let (mut tally, mut clients, held) = work(workers, each);
    let shared_count: u64 = shared_regions.iter().map(pages).sum();
    let held_count: u64 = held.iter().flatten().map(|held| pages(&held.region)).sum();
    await_used(&mut observer, &nodes, shared_count + held_count);
    check_counters(&mut observer, &shared, &tally);
    for (client, held) in clients.iter_mut().zip(held) {
        for held in held {
            client.delete(held.region).unwrap_or_else(|error| panic!("{error}"));
        }
    }
    for region in shared_regions {
        observer.delete(region).unwrap_or_else(|error| panic!("{error}"));
    }
    await_used(&mut observer, &nodes, 0);
    tally.impaired = impaired(&rack, switch);
    assert_eq!(rack.fragment_count(), 0, "nothing is fragmented");
    for kind in KINDS {
        assert!(tally.counts.contains_key(&kind), "{kind:?} never happened");
    }
    tally
}

/// In the kernel a whole train is one frame, and lost or duplicated as one. Half of the endpoints
/// send single datagrams, so that both cases occur.
fn cut_trains(rack: &TestRack) {
    for node in [Node::Server(1), Node::Client(1)] {
        let cut = rack.enter(node, || disable_transmit_offloads(ENDPOINT_INTERFACE));
        cut.unwrap_or_else(|error| panic!("{error}"));
    }
}

fn share(client: &mut UdpClient, nodes: &[MemoryNode]) -> (Shared, Vec<Region>) {
    let ids: Vec<NodeId> = nodes.iter().map(|node| node.node).collect();
    let mut create = |number: u64, bytes: u64| {
        let index = usize::try_from(number).unwrap_or(0) % ids.len();
        let node = ids.get(index).copied().expect("a node");
        client.create_at(bytes, Placement::Node(node)).unwrap_or_else(|error| panic!("{error}"))
    };
    let mut regions: Vec<Region> =
        (0..SHARED_PAGES).map(|number| create(number, PAGE_BYTES as u64)).collect();
    let pages = regions.iter().map(|region| region.base()).collect();
    let (sum, raised) = (create(0, 8), create(1, 8));
    regions.extend([sum, raised]);
    let shared = Shared { pages, sum: sum.base(), raised: raised.base(), nodes: nodes.to_vec() };
    (shared, regions)
}

/// Runs all workers; returns their counts, clients and regions.
fn work(workers: Vec<Worker>, each: u32) -> (Tally, Vec<UdpClient>, Vec<Vec<Held>>) {
    thread::scope(|scope| {
        let running: Vec<_> =
            workers.into_iter().map(|worker| scope.spawn(move || worker.run(each))).collect();
        let mut total = Tally::default();
        let (mut clients, mut all_held) = (Vec::new(), Vec::new());
        for worker in running {
            let ended = worker.join().expect("a worker does not panic");
            let (tally, client, held) = ended.unwrap_or_else(|error| panic!("{error}"));
            total = total.join(&tally);
            clients.push(client);
            all_held.push(held);
        }
        (total, clients, all_held)
    })
}

fn check_counters(client: &mut UdpClient, shared: &Shared, tally: &Tally) {
    let mut read = |pointer| {
        let mut word = [0; 8];
        client.read(pointer, &mut word).unwrap_or_else(|error| panic!("{error}"));
        u64::from_le_bytes(word)
    };
    assert_eq!(read(shared.sum), tally.added, "every acknowledged addition counts once");
    assert_eq!(read(shared.raised), tally.raised, "every acknowledged swap counts once");
}

/// The impairments of the ports; each port must have applied each kind that its data plane
/// supports.
fn impaired(rack: &TestRack, switch: DataPlane) -> [u64; 3] {
    // The controller's port has too few frames for each kind of impairment to occur.
    let controller = u32::from(rack.port(Node::Switch));
    let mut total = [0; 3];
    for port in rack.switch_ports().ports.iter().filter(|port| port.number != controller) {
        let done = port.impaired.unwrap_or_default();
        let reordered = done.reordered > 0 || switch == DataPlane::Ebpf;
        assert!(
            done.lost > 0 && done.duplicated > 0 && reordered,
            "port {}: {done:?}",
            port.number
        );
        for (sum, count) in total.iter_mut().zip([done.lost, done.duplicated, done.reordered]) {
            *sum += count;
        }
    }
    total
}

fn pages(region: &Region) -> u64 {
    region.length_bytes().div_ceil(PAGE_BYTES as u64)
}
