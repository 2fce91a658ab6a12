//! A large number of live pointers.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use bluebridge::{CreateRequest, MemoryNode, Placement, Pointer, ReadRequest, WriteRequest};
use bluebridge_rack::network::host::NeighbourCounts;
use bluebridge_rack::spec::Node;
use bluebridge_wire::address::PAGE_BYTES;

use super::TestRack;
use super::endpoint::{Endpoint, UdpClient};
use super::stamp;

/// Bytes of every page that are written and read.
const STAMP_BYTES: usize = 64;

/// Requests of one pipelined call.
const CALL_COUNT: usize = 1024;

/// How often the neighbour table is read.
const LOOK: Duration = Duration::from_millis(200);

/// The results.
#[derive(Clone, Debug)]
pub struct Report {
    /// Every pointer, as an address, in order.
    pub addresses: Vec<u128>,
    /// Times of creating, writing, and reading.
    pub times: [Duration; 3],
    /// How often the neighbour table was read.
    pub look_count: usize,
    /// The largest neighbour table.
    pub neighbours: NeighbourCounts,
}

/// Creates `count` pages, each with its own request, writes to each, reads each back and compares.
/// Several clients of one endpoint work in parallel, while the neighbour table of its namespace is
/// observed.
///
/// # Panics
/// On any error or wrong byte.
pub fn run(rack: &TestRack, endpoint: &Endpoint, clients: usize, count: usize) -> Report {
    let nodes = endpoint.memory_nodes();
    let seeds = (0_u64..).take(clients);
    let client = |seed| {
        let mut config = endpoint.config(seed);
        // A machine with other work may leave a server without a core for a while.
        config.deadline = Duration::from_secs(60);
        endpoint.open(rack, config)
    };
    let mut clients: Vec<_> = seeds.map(client).collect();
    let each = count.div_ceil(clients.len());
    let ended = AtomicBool::new(false);
    let mut times = [Duration::ZERO; 3];
    thread::scope(|scope| {
        let watching = scope.spawn(|| watch(rack, &ended));
        let mut lists: Vec<Vec<Pointer>> = vec![Vec::with_capacity(each); clients.len()];
        let steps: [&Step<'_>; 3] = [
            &|number, client, list| create(client, number, each, &nodes, list),
            &|_, client, list| write(client, list),
            &|_, client, list| read(client, list),
        ];
        for (time, step) in times.iter_mut().zip(steps) {
            let began = Instant::now();
            together(&mut clients, &mut lists, step, &ended);
            *time = began.elapsed();
        }
        ended.store(true, Ordering::Relaxed);
        let (look_count, neighbours) = watching.join().expect("the table can be read");
        let pointers = lists.iter().flatten();
        let mut addresses: Vec<u128> = pointers.map(|it| it.to_ipv6().to_bits()).collect();
        addresses.sort_unstable();
        Report { addresses, times, look_count, neighbours }
    })
}

type Step<'a> = dyn Fn(usize, &mut UdpClient, &mut Vec<Pointer>) + Sync + 'a;

/// Runs one step in all clients in parallel.
fn together(
    clients: &mut [UdpClient],
    lists: &mut [Vec<Pointer>],
    step: &Step<'_>,
    ended: &AtomicBool,
) {
    let done = thread::scope(|scope| {
        let running: Vec<_> = (clients.iter_mut().zip(lists).enumerate())
            .map(|(number, (client, list))| scope.spawn(move || step(number, client, list)))
            .collect();
        running.into_iter().map(|thread| thread.join()).collect::<Vec<_>>()
    });
    if done.iter().any(Result::is_err) {
        // Otherwise the observing thread would never end.
        ended.store(true, Ordering::Relaxed);
        panic!("a client failed");
    }
}

/// Half of the pages by CREATE and half by ALLOC_WRITE; anywhere, and on each node in turn.
fn create(
    client: &mut UdpClient,
    number: usize,
    count: usize,
    nodes: &[MemoryNode],
    list: &mut Vec<Pointer>,
) {
    let request = |step: usize| {
        let node = nodes.get((step / 4 + number) % nodes.len()).expect("a node").node;
        let placement = if step % 4 < 2 { Placement::Anywhere } else { Placement::Node(node) };
        if step.is_multiple_of(2) {
            CreateRequest::new(PAGE_BYTES as u64, placement)
        } else {
            CreateRequest::holding(b"something that is overwritten", placement)
        }
    };
    let steps: Vec<usize> = (0..count).collect();
    for call in steps.chunks(CALL_COUNT) {
        let mut requests: Vec<_> = call.iter().map(|step| request(*step)).collect();
        client.create_many(&mut requests).unwrap_or_else(|error| panic!("{error}"));
        for (request, step) in requests.into_iter().zip(call) {
            let made = request.result.unwrap_or_else(|error| panic!("page {step}: {error}"));
            list.push(made.base());
        }
    }
}

/// The contents of a page and their position follow from its address.
fn place(pointer: Pointer) -> (Pointer, [u8; STAMP_BYTES]) {
    let octets = pointer.to_ipv6().octets();
    let (words, _) = octets.as_chunks::<8>();
    let seed =
        words.iter().fold(0, |seed: u64, word| seed.rotate_left(17) ^ u64::from_be_bytes(*word));
    let mut stamp = [0; STAMP_BYTES];
    stamp::fill(&mut stamp, seed);
    let places = (PAGE_BYTES - STAMP_BYTES) as u64;
    let offset = pointer.location.page() % places;
    (pointer.checked_add(offset).expect("inside of the page"), stamp)
}

fn write(client: &mut UdpClient, list: &[Pointer]) {
    for call in list.chunks(CALL_COUNT) {
        let stamped: Vec<_> = call.iter().map(|pointer| place(*pointer)).collect();
        let mut requests: Vec<_> =
            stamped.iter().map(|(pointer, stamp)| WriteRequest::new(*pointer, stamp)).collect();
        client.write_many(&mut requests).unwrap_or_else(|error| panic!("{error}"));
        for request in requests {
            request.result.unwrap_or_else(|error| panic!("{}: {error}", request.pointer));
        }
    }
}

fn read(client: &mut UdpClient, list: &[Pointer]) {
    let mut buffers = vec![[0; STAMP_BYTES]; CALL_COUNT];
    for call in list.chunks(CALL_COUNT) {
        let places: Vec<_> = call.iter().map(|pointer| place(*pointer)).collect();
        let mut requests: Vec<_> = (places.iter().zip(&mut buffers))
            .map(|((pointer, _), buffer)| ReadRequest::new(*pointer, buffer))
            .collect();
        client.read_many(&mut requests).unwrap_or_else(|error| panic!("{error}"));
        for (request, (pointer, stamp)) in requests.iter().zip(&places) {
            assert!(request.result.is_ok(), "{pointer}: {:?}", request.result);
            assert!(*request.buffer == *stamp, "{pointer} holds another page's bytes");
        }
    }
}

/// Reads the neighbour table until the work ends; returns how often, and the largest table.
fn watch(rack: &TestRack, ended: &AtomicBool) -> (usize, NeighbourCounts) {
    let (mut count, mut largest) = (0, NeighbourCounts::default());
    while !ended.load(Ordering::Relaxed) {
        largest = largest.max(rack.neighbours(Node::Client(1)));
        count += 1;
        thread::sleep(LOOK);
    }
    (count, largest)
}
