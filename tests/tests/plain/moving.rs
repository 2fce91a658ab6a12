//! Lines move between running servers while threads use them through the client library.

use core::{
    ops::Range,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};
use std::{thread, time::Instant};

use bluebridge::{Client, EndpointConfig, MemoryNode, Region};
use bluebridge_memserver::{
    Server, ServerConfig,
    migration::{MigrationOrder, MigrationState, Terms},
    run,
};
use bluebridge_protocol::{
    requester::{self, Migration},
    taker::Order,
};
use bluebridge_transport::memory::{Hub, MemoryTransport};
use bluebridge_wire::{
    ArenaGeneration, NodeId, Space, UDP_PORT,
    address::{Fields, NODE_PREFIX_LEN, PAGE_BYTES},
};
use ipnet::Ipv6Net;

const SPACE: Space = Space(7);
const SERVERS: [NodeId; 2] = [NodeId(1), NodeId(2)];
const PATIENCE: Duration = Duration::from_secs(5);
/// The deadline of each migration of this test.
const DEADLINE: Duration = Duration::from_secs(60);
const THREADS: u16 = 3;
const PAGES: usize = 1024;

struct Rack {
    hub: Hub,
    servers: [Server; 2],
}

impl Rack {
    fn start() -> Self {
        let hub = Hub::new(4096);
        let servers = SERVERS.map(|node| {
            let carrier = hub.attach(UDP_PORT, &[prefix(node)]).expect("it is free");
            let bytes = (PAGES * PAGE_BYTES) as u64;
            let mut config = ServerConfig::new(SPACE, node, 1, bytes, 5 + u64::from(node.0));
            // Whatever a server must see wakes it.
            config.idle.sleep = Duration::from_secs(3600);
            run(&config, vec![carrier]).expect("it starts")
        });
        Self { hub, servers }
    }

    fn client(&self, node: u16) -> Client<MemoryTransport> {
        let carrier = self.hub.attach(40_000 + node, &[prefix(NodeId(node))]).expect("it is free");
        let mut config = EndpointConfig::new(SPACE, NodeId(node), 1);
        // Allocations are on the first server.
        config.memory_nodes = vec![MemoryNode { node: SERVERS[0], shard_count: 1 }];
        Client::open(config, carrier)
    }

    fn order(&self, server: usize, order: MigrationOrder) -> MigrationState {
        self.servers[server].migrate(0, order, PATIENCE).expect("it is followed")
    }

    /// Moves pages of the first server's addresses, as the controller does.
    fn migrate(&self, id: u64, (giver, taker): (usize, usize), pages: Range<u64>) {
        let range_epoch = u32::try_from(id).expect("small");
        let order = Order {
            migration: Migration {
                id,
                range_epoch,
                giver: requester::Server { node: SERVERS[giver], shard: 0 },
            },
            space: SPACE,
            home: SERVERS[0],
            generation: ArenaGeneration::default(),
            pages: pages.clone(),
            incarnation: 1,
        };
        let terms = Terms {
            migration: id,
            range_epoch,
            space: SPACE,
            home: SERVERS[0],
            generation: ArenaGeneration::default(),
            pages,
            taker: SERVERS[taker],
            taker_incarnation: 1,
        };
        self.order(taker, MigrationOrder::Reserve(order.clone()));
        self.order(giver, MigrationOrder::Allow(terms));
        let over = || self.servers[taker].takings_over();
        let before = over();
        self.order(taker, MigrationOrder::Begin(order));
        let started = Instant::now();
        loop {
            let is_over = over() > before;
            let MigrationState { progress, .. } = self.order(taker, MigrationOrder::Report(id));
            if progress.here == progress.all {
                assert_eq!(over(), before + 1, "who waits for the end is told");
                break;
            }
            assert!(!is_over, "{progress:?}");
            assert!(started.elapsed() < DEADLINE, "migration {id}: {progress:?}");
            thread::sleep(Duration::from_millis(1));
        }
        self.order(giver, MigrationOrder::Withdraw(id));
        self.order(taker, MigrationOrder::Finish(id));
        self.order(giver, MigrationOrder::Close(id));
        println!("migration {id} took {:?}", started.elapsed());
    }
}

fn prefix(node: NodeId) -> Ipv6Net {
    let first = Fields { space: SPACE, node, command: 0, tag: 0, location: 0 };
    Ipv6Net::new(first.to_ipv6(), NODE_PREFIX_LEN).expect("a prefix")
}

/// A page that tells its number and how often it was changed.
fn stamp(page: usize, change: u64) -> Vec<u8> {
    let words = [page as u64, change];
    (0..PAGE_BYTES / 16).flat_map(|_| words.iter().flat_map(|word| word.to_le_bytes())).collect()
}

/// Ends the threads also if the test fails, which would wait for them otherwise.
struct StopAtEnd<'a>(&'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Changes pages of its own and reads them, until it is told to stop; returns how often.
fn work(
    mut client: Client<MemoryTransport>,
    region: Region,
    first: usize,
    stop: &AtomicBool,
) -> u64 {
    let step = usize::from(THREADS);
    let at = |page: usize| region.at((page * PAGE_BYTES) as u64).expect("inside");
    let mut changes = vec![0; PAGES];
    let mut bytes = vec![0; PAGE_BYTES];
    let mut count = 0;
    for page in (first..PAGES).step_by(step).cycle() {
        changes[page] += 1;
        client.write(at(page), &stamp(page, changes[page])).expect("a move does not fail it");
        let read = (page + step * 7) % PAGES;
        if read % step == first && changes[read] > 0 {
            client.read(at(read), &mut bytes).expect("a move does not fail it");
            assert_eq!(bytes, stamp(read, changes[read]), "page {read}");
        }
        count += 1;
        if stop.load(Ordering::Relaxed) {
            break;
        }
    }
    for page in (first..PAGES).step_by(step) {
        client.read(at(page), &mut bytes).expect("it is served");
        let wanted =
            if changes[page] == 0 { vec![0; PAGE_BYTES] } else { stamp(page, changes[page]) };
        assert_eq!(bytes, wanted, "page {page}");
    }
    count
}

#[test]
fn no_operation_of_a_client_fails_while_its_memory_moves() {
    let rack = Rack::start();
    let mut owner = rack.client(99);
    let region = owner.create((PAGES * PAGE_BYTES) as u64).expect("there is room");
    let first = region.base().location.page();
    let pages = first..first + PAGES as u64;
    let stop = AtomicBool::new(false);
    let counts: Vec<u64> = thread::scope(|scope| {
        let stop = &stop;
        let at_end = StopAtEnd(stop);
        let threads: Vec<_> = (0..THREADS)
            .map(|number| {
                let client = rack.client(100 + number);
                scope.spawn(move || work(client, region, usize::from(number), stop))
            })
            .collect();
        rack.migrate(1, (0, 1), pages.clone());
        // Another client allocates what the home can give anew.
        let mut other = rack.client(98);
        let more = other.create((PAGES * PAGE_BYTES) as u64).expect("the memory is free again");
        other.write(more.base(), b"new").expect("it is served");
        other.delete(more).expect("it is its own");
        rack.migrate(2, (1, 0), pages);
        drop(at_end);
        threads.into_iter().map(|thread| thread.join().expect("it saw no error")).collect()
    });
    println!("{counts:?} changes");
    assert!(counts.iter().all(|count| *count > 0));
    owner.delete(region).expect("it is at home again");
    let mut again = rack.client(97);
    let all = again.create((PAGES * PAGE_BYTES) as u64).expect("all its memory is free");
    assert_eq!(all.base().node, SERVERS[0]);
}
