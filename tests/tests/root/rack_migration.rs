//! Memory moves between the servers of a rack while clients use it, and the servers are killed meanwhile.

use std::{
    net::SocketAddr,
    ops::Range,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use bluebridge::{Error, MemoryNode, NodeId, NoticeKind, Placement, Pointer, Region};
use bluebridge_northbound::proto;
use bluebridge_rack::{
    control::{Contact, ControlError, operations},
    spec::{DataPlane, Node},
};
use bluebridge_testkit::until;
use bluebridge_tests::rack::{
    RackOptions, TestRack,
    daemon::freeze,
    endpoint::{Endpoint, UdpClient},
};
use bluebridge_wire::{
    Status,
    address::{LINE_PAGES, PAGE_BYTES},
};
use rand::{Rng, SeedableRng, rngs::SmallRng};
use rustix::process::{Pid, Signal, kill_process};

use super::rack_updates::join_with;

const PATIENCE: Duration = Duration::from_secs(5);
const THREADS: usize = 2;
const PAGES: usize = 4096;

/// Operations that are waited for to see that traffic flows.
const FLOW: u64 = 200;

fn controller(rack: &TestRack) -> Contact {
    let address: SocketAddr = rack.rack().layout().controller().into();
    address.into()
}

/// Moves pages of a server's addresses; returns the ids of the migrations.
fn try_migrate(
    rack: &TestRack,
    home: NodeId,
    to: NodeId,
    pages: &Range<u64>,
) -> Result<Vec<u64>, ControlError> {
    let request = proto::MigrateRequest {
        server: home.0.into(),
        space: 1,
        generation: None,
        first_page: pages.start,
        page_count: pages.end - pages.start,
        to: to.0.into(),
    };
    let ask = || operations::migrate(&controller(rack), request, PATIENCE);
    rack.enter(Node::Switch, ask).map(|recorded| recorded.migrations)
}

/// Moves pages of the first server's addresses; returns the migration's id.
fn migrate(rack: &TestRack, home: NodeId, to: NodeId, pages: &Range<u64>) -> u64 {
    let recorded = try_migrate(rack, home, to, pages).unwrap_or_else(|error| panic!("{error}"));
    let [id] = recorded[..] else { panic!("one server has all of them: {recorded:?}") };
    id
}

fn migration(rack: &TestRack, id: u64) -> proto::Migration {
    let all = rack.enter(Node::Switch, || operations::migrations(&controller(rack), PATIENCE));
    let all = all.unwrap_or_else(|error| panic!("{error}"));
    all.into_iter().find(|of| of.id == id).expect("it was recorded")
}

/// Waits until a migration is closed, with all pages at the taker.
fn await_moved(rack: &TestRack, id: u64) {
    let time = until("the migration is closed", || {
        migration(rack, id).stage() == proto::MigrationStage::Closed
    });
    let closed = migration(rack, id);
    assert_eq!((closed.kept_pages, closed.why.as_str()), (closed.page_count, ""), "{closed:?}");
    println!("migration {id}: {} pages in {time:?}", closed.page_count);
}

/// Waits until lines of which no page is allocated have gone home by themselves.
fn await_home(rack: &TestRack, home: NodeId, pages: &Range<u64>) {
    until("free lines are at home", || {
        let all = rack.enter(Node::Switch, || operations::migrations(&controller(rack), PATIENCE));
        let all = all.unwrap_or_else(|error| panic!("{error}"));
        let of = |of: &&proto::Migration| {
            let first = of.first_page..of.first_page + of.page_count;
            first.contains(&pages.start) && (of.home, of.taker) == (home.0.into(), home.0.into())
        };
        all.iter().filter(of).any(|of| {
            assert_eq!(of.why, "", "{of:?}");
            of.reason.starts_with("none of these pages is allocated")
                && of.stage() == proto::MigrationStage::Closed
        })
    });
}

/// How many directory entries lead pages of a server elsewhere.
fn directory_entries(rack: &TestRack) -> usize {
    let tables = rack.tables().unwrap_or_default().into_iter();
    tables.filter(|line| line.table == "directory").count()
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

/// Changes pages of its own and reads them, until it is told to stop: every operation succeeds, except that the outcome
/// of a change is unknown if its server `may_end`. Then the page is changed again.
fn work(
    mut client: UdpClient,
    region: Region,
    first: usize,
    (stop, count): (&AtomicBool, &AtomicU64),
    may_end: bool,
) {
    let page_count = usize::try_from(region.length_bytes()).expect("it fits") / PAGE_BYTES;
    let at = |page: usize| region.at((page * PAGE_BYTES) as u64).expect("inside");
    let mut changes = vec![0; page_count];
    let mut bytes = vec![0; PAGE_BYTES];
    for page in (first..page_count).step_by(THREADS).cycle() {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        loop {
            changes[page] += 1;
            match client.write(at(page), &stamp(page, changes[page])) {
                Ok(()) => break,
                Err(Error::OutcomeUnknown { .. }) if may_end => {}
                Err(error) => panic!("a move does not fail it: {error}"),
            }
        }
        let read = (page + THREADS * 301) % page_count;
        if read % THREADS == first && changes[read] > 0 {
            client.read(at(read), &mut bytes).expect("a move does not fail it");
            assert_eq!(bytes, stamp(read, changes[read]), "page {read}");
        }
        count.fetch_add(1, Ordering::Relaxed);
    }
    for page in (first..page_count).step_by(THREADS).filter(|page| changes[*page] > 0) {
        client.read(at(page), &mut bytes).expect("it is served");
        assert_eq!(bytes, stamp(page, changes[page]), "page {page}");
    }
}

/// Runs `during` while threads use a region of the first server, and `afterwards` without them.
fn move_about(
    name: &str,
    options: &RackOptions,
    (page_count, may_end): (usize, bool),
    during: impl FnOnce(&mut TestRack, &dyn Fn(), &[NodeId], &Range<u64>),
) {
    let mut rack = TestRack::up(name, options);
    let endpoint = Endpoint::join(&rack, 1);
    let servers: Vec<_> = (1..=options.servers).map(|number| endpoint.server(number)).collect();
    let on_first = |seed| {
        let mut config = endpoint.config(seed);
        config.memory_nodes = vec![MemoryNode { node: servers[0], shard_count: 1 }];
        config
    };
    let mut owner = endpoint.open(&rack, on_first(1));
    let region = owner.create((page_count * PAGE_BYTES) as u64).expect("there is room");
    let first = region.base().location.page();
    let pages = first..first + page_count as u64;
    let (stop, count) = (AtomicBool::new(false), AtomicU64::new(0));
    let clients: Vec<_> =
        (2..2 + THREADS as u64).map(|seed| endpoint.client(&rack, seed)).collect();
    thread::scope(|scope| {
        let at_end = StopAtEnd(&stop);
        let threads: Vec<_> = clients
            .into_iter()
            .enumerate()
            .map(|(number, client)| {
                let shared = (&stop, &count);
                scope.spawn(move || work(client, region, number, shared, may_end))
            })
            .collect();
        let flow = || {
            let before = count.load(Ordering::Relaxed);
            until("clients work", || count.load(Ordering::Relaxed) >= before + FLOW);
        };
        flow();
        during(&mut rack, &flow, &servers, &pages);
        flow();
        drop(at_end);
        threads.into_iter().for_each(|thread| thread.join().expect("it saw no error"));
    });
    println!("{} changes", count.load(Ordering::Relaxed));
    owner.delete(region).expect("it is at home");
}

/// Pages of which a part moves before their home loses its memory.
const FEW: usize = 64;

#[test]
fn what_had_moved_is_found_when_its_home_lost_its_memory() {
    let mut rack = TestRack::up("move-lost", &RackOptions::new(DataPlane::Soft, "9000"));
    let endpoint = Endpoint::join(&rack, 1);
    let [home, other] = [1, 2].map(|number| endpoint.server(number));
    let mut config = endpoint.config(1);
    config.memory_nodes = vec![MemoryNode { node: home, shard_count: 1 }];
    let mut before = endpoint.open(&rack, config);
    let region = before.create((FEW * PAGE_BYTES) as u64).expect("there is room");
    let at = |page: usize| region.at((page * PAGE_BYTES) as u64).expect("inside");
    let write = |client: &mut UdpClient, page: usize, change: u64| {
        client.write(at(page), &stamp(page, change))
    };
    for page in 0..FEW {
        write(&mut before, page, 1).expect("it is at home");
    }
    let first = region.base().location.page();
    assert!(first.is_multiple_of(LINE_PAGES as u64), "it begins with a line");
    let entries = directory_entries(&rack);
    let moved = FEW / 2;
    await_moved(&rack, migrate(&rack, home, other, &(first..first + moved as u64)));
    // One is freed of which the middle is elsewhere.
    let scattered = before.create((FEW * PAGE_BYTES) as u64).expect("there is room");
    let start = scattered.base().location.page();
    let middle = start + LINE_PAGES as u64..start + FEW as u64 / 2;
    await_moved(&rack, migrate(&rack, home, other, &middle));
    before.delete(scattered).expect("it is freed wherever it is");
    assert_freed(&mut before, scattered, [0, LINE_PAGES, FEW - 1]);
    await_home(&rack, home, &middle);
    assert_freed(&mut before, scattered, [0, LINE_PAGES, FEW - 1]);
    rack.stop("memserver-s1");
    rack.start("memserver-s1");
    let mut bytes = vec![0; PAGE_BYTES];
    let mut after = endpoint.client(&rack, 2);
    for (change, client) in [(2, &mut before), (3, &mut after)] {
        for page in 0..moved {
            client.read(at(page), &mut bytes).expect("it had moved");
            assert_eq!(bytes, stamp(page, change - 1), "page {page}");
            write(client, page, change).expect("it had moved");
        }
        for page in moved..FEW {
            let stale = |result: Result<(), Error>| {
                let status = Status::StaleGeneration;
                let is_stale =
                    matches!(result, Err(Error::Refused { status: of, .. }) if of == status);
                assert!(is_stale, "page {page}: {result:?}");
            };
            stale(client.read(at(page), &mut bytes));
            stale(write(client, page, change));
        }
        // The home's new contents are of no interest to pointers to the earlier ones.
        let fresh = client.create(PAGE_BYTES as u64).expect("there is room");
        client.write(fresh.base(), &stamp(0, 9)).expect("it is there");
    }
    // And once more: the controller tells each process.
    rack.stop("memserver-s1");
    rack.start("memserver-s1");
    for page in 0..moved {
        before.read(at(page), &mut bytes).expect("it had moved");
        assert_eq!(bytes, stamp(page, 3), "page {page}");
    }
    // An operator finds it where its first page is, and who has that frees what is left.
    let first = region.base().to_ipv6().octets().to_vec();
    let is_it = |of: &proto::Allocation| of.pointer == first;
    assert!(allocations(&rack, other).iter().any(is_it));
    let request = proto::PurgeRequest {
        server: other.0.into(),
        space: SPACE,
        ..proto::PurgeRequest::default()
    };
    let purged =
        rack.enter(Node::Switch, || operations::purge(&controller(&rack), request, PATIENCE));
    assert!(purged.unwrap_or_else(|error| panic!("{error}")).freed_count > 0);
    until("it is freed", || !allocations(&rack, other).iter().any(is_it));
    // Nobody can allocate these pages any more, so nobody has their lines before long.
    let is_gone = |client: &mut UdpClient, page: usize| match client
        .read(at(page), &mut vec![0; PAGE_BYTES])
    {
        Err(Error::Refused { status: Status::StaleGeneration, .. }) => true,
        Err(Error::Refused { status: Status::NotAllocated, .. }) => false,
        other => panic!("page {page}: {other:?}"),
    };
    for (client, page) in [(&mut after, 0), (&mut before, moved - 1)] {
        until("its line is nowhere", || is_gone(client, page));
    }
    assert_eq!(directory_entries(&rack), entries, "nothing leads there");
}

/// READs of a server's memory that its kernel answered, by its last report.
fn answered(rack: &TestRack, server: NodeId) -> u64 {
    let nodes = rack.controller_status().nodes;
    let reports = nodes.into_iter().filter(|node| node.node == u32::from(server.0));
    reports.filter_map(|node| node.direct_reads).map(|reads| reads.answered_count).sum()
}

#[test]
fn the_kernel_answers_for_memory_that_moved() {
    let mut rack = TestRack::up("move-direct", &RackOptions::new(DataPlane::Ebpf, "9000"));
    let endpoint = Endpoint::join(&rack, 1);
    let [home, other] = [1, 2].map(|number| endpoint.server(number));
    let mut config = endpoint.config(1);
    config.memory_nodes = vec![MemoryNode { node: home, shard_count: 1 }];
    let mut client = endpoint.open(&rack, config);
    let region = client.create((FEW * PAGE_BYTES) as u64).expect("there is room");
    let at = |page: usize| region.at((page * PAGE_BYTES) as u64).expect("inside");
    for page in 0..FEW {
        client.write(at(page), &stamp(page, 1)).expect("it is at home");
    }
    let first = region.base().location.page();
    await_moved(&rack, migrate(&rack, home, other, &(first..first + FEW as u64)));
    let read_all = |client: &mut UdpClient, change: u64| {
        let mut bytes = vec![0; FEW * PAGE_BYTES];
        for page in 0..FEW {
            client.read(at(page), &mut bytes[..PAGE_BYTES]).expect("it is there");
            assert!(bytes[..PAGE_BYTES] == stamp(page, change), "page {page}");
        }
        // One line at a time: requests that travel as a train are the process's.
        for (line, bytes) in bytes.chunks_mut(LINE_PAGES * PAGE_BYTES).enumerate() {
            client.read(at(line * LINE_PAGES), bytes).expect("it is there");
        }
        for (page, bytes) in bytes.chunks(PAGE_BYTES).enumerate() {
            assert!(bytes == stamp(page, change), "page {page} of a line");
        }
    };
    for change in [1, 2] {
        // The first requests learn where the memory is now, and that a switch leads there.
        let before = answered(&rack, other);
        until("the kernel of the new server answers", || {
            read_all(&mut client, change);
            answered(&rack, other) > before
        });
        let pid = rack.process("memserver-s2").pid;
        freeze(pid);
        read_all(&mut client, change);
        let target = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a pid");
        kill_process(target, Signal::CONT).expect("may go on");
        if change == 1 {
            // The next process has the line in its place, and answers as well.
            (0..FEW).for_each(|page| client.write(at(page), &stamp(page, 2)).expect("it is there"));
            rack.kill("memserver-s2");
            rack.start_with_memory("memserver-s2");
        }
    }
    // At home again it is read there.
    await_moved(&rack, migrate(&rack, home, home, &(first..first + FEW as u64)));
    let before = answered(&rack, home);
    until("the kernel of the home answers", || {
        read_all(&mut client, 2);
        answered(&rack, home) > before
    });
}

/// The space of all of them.
const SPACE: u32 = 1;

/// The allocations that an operator sees at a server.
fn allocations(rack: &TestRack, server: NodeId) -> Vec<proto::Allocation> {
    let request = proto::AllocationsRequest {
        server: server.0.into(),
        space: SPACE,
        limit: 100,
        ..proto::AllocationsRequest::default()
    };
    let found =
        rack.enter(Node::Switch, || operations::allocations(&controller(rack), request, PATIENCE));
    found.unwrap_or_else(|error| panic!("{error}")).allocations
}

/// Pages are in no allocation.
fn assert_freed(client: &mut UdpClient, region: Region, pages: impl IntoIterator<Item = usize>) {
    for page in pages {
        let at = region.at((page * PAGE_BYTES) as u64).expect("inside");
        let result = client.read(at, &mut vec![0; PAGE_BYTES]);
        let is_freed = |error: &Error| matches!(error, Error::Refused { status, .. } if *status == Status::NotAllocated);
        assert!(result.as_ref().is_err_and(is_freed), "page {page}: {result:?}");
    }
}

#[test]
fn memory_moves_and_returns_while_clients_use_it() {
    let options = RackOptions::new(DataPlane::Ebpf, "9000");
    move_about("move", &options, (PAGES, false), |rack, flow, servers, pages| {
        let (home, other) = (servers[0], servers[1]);
        let entries = directory_entries(rack);
        await_moved(rack, migrate(rack, home, other, pages));
        // One aligned block of 16 MiB.
        until("the switch leads there", || directory_entries(rack) == entries + 1);
        flow();
        await_moved(rack, migrate(rack, home, home, pages));
        until("the switch leads home", || directory_entries(rack) == entries);
    });
}

#[test]
fn memory_moves_while_its_servers_and_the_controller_are_killed() {
    let options = RackOptions::new(DataPlane::Soft, "9000");
    move_about("move-kill", &options, (PAGES, true), |rack, flow, servers, pages| {
        let (home, other) = (servers[0], servers[1]);
        for (number, victim) in
            ["memserver-s2", "memserver-s1", "controller"].into_iter().enumerate()
        {
            let there = migrate(rack, home, other, pages);
            thread::sleep(Duration::from_millis(20 * number as u64));
            rack.kill(victim);
            rack.start_with_memory(victim);
            await_moved(rack, there);
            flow();
            await_moved(rack, migrate(rack, home, home, pages));
        }
    });
}

/// How often something is killed at random, without `BLUEBRIDGE_MIGRATION_KILLS`.
const KILLS: u32 = 12;

/// The number in an environment variable.
fn number_in<T: std::str::FromStr>(variable: &str, usual: T) -> T {
    match std::env::var(variable) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{variable} is no number")),
        Err(_) => usual,
    }
}

/// Memory on its way, after making sure that some is: pages move to another server, or away from all that a server has.
fn on_its_way(
    rack: &TestRack,
    random: &mut SmallRng,
    servers: &[NodeId],
    pages: &Range<u64>,
) -> proto::Migration {
    let mut found = None;
    until("memory is on its way", || {
        let all = rack.enter(Node::Switch, || operations::migrations(&controller(rack), PATIENCE));
        let Ok(all) = all else { return false };
        found = all.into_iter().find(|of| of.stage() < proto::MigrationStage::Settled);
        if found.is_none() {
            let to = servers[random.random_range(0..servers.len())];
            if random.random_bool(0.5) {
                // What they serve already, or have no connection for yet, is refused; then others are tried.
                let _ = try_migrate(rack, servers[0], to, pages);
            } else {
                let undo = |of: &NodeId| try_drain(rack, *of, true).is_ok();
                let _ = servers.iter().all(undo) && try_drain(rack, to, false).is_ok();
            }
        }
        found.is_some()
    });
    found.expect("it was found")
}

#[test]
fn nothing_is_lost_when_who_takes_part_is_killed_at_random_while_memory_moves() {
    let kills = number_in("BLUEBRIDGE_MIGRATION_KILLS", KILLS);
    let seed = number_in("BLUEBRIDGE_MIGRATION_SEED", std::process::id().into());
    println!("seed {seed}, {kills} kills");
    let mut random = SmallRng::seed_from_u64(seed);
    let options = RackOptions { servers: 3, ..RackOptions::new(DataPlane::Soft, "9000") };
    move_about("move-random", &options, (PAGES, true), |rack, flow, servers, pages| {
        for kill in 1..=kills {
            let moving = on_its_way(rack, &mut random, servers, pages);
            thread::sleep(Duration::from_millis(random.random_range(0..60)));
            let name = |node: u32| {
                let index = servers.iter().position(|id| u32::from(id.0) == node);
                format!("memserver-s{}", index.expect("a server of the rack") + 1)
            };
            let victim = match random.random_range(0..3) {
                0 => "controller".to_owned(),
                1 => name(moving.giver),
                _ => name(moving.taker),
            };
            rack.kill(&victim);
            rack.start_with_memory(&victim);
            println!(
                "kill {kill}: {victim}, during migration {} ({:?})",
                moving.id,
                moving.stage()
            );
            flow();
        }
        for server in servers {
            until("the server may be used again", || try_drain(rack, *server, true).is_ok());
        }
        until("no migration is open", || {
            let all =
                rack.enter(Node::Switch, || operations::migrations(&controller(rack), PATIENCE));
            let is_closed = |of: &proto::Migration| of.stage() == proto::MigrationStage::Closed;
            all.is_ok_and(|all| all.iter().all(is_closed))
        });
        flow();
        bring_home(rack, servers[0], pages);
    });
}

/// Drains a server, or ends that; returns whether that is new.
fn try_drain(rack: &TestRack, server: NodeId, undo: bool) -> Result<bool, ControlError> {
    let request = proto::DrainRequest { server: server.0.into(), space: 1, undo };
    let done = rack.enter(Node::Switch, || operations::drain(&controller(rack), request, PATIENCE));
    done.map(|done| done.is_new)
}

/// Drains a server that is not drained, or ends that.
fn drain(rack: &TestRack, server: NodeId, undo: bool) {
    assert!(try_drain(rack, server, undo).unwrap_or_else(|error| panic!("{error}")));
}

/// Waits until a server serves nothing.
fn await_drained(rack: &TestRack, server: NodeId) {
    let mut problem = String::new();
    let time = until("the server is drained", || {
        let drains = rack.enter(Node::Switch, || operations::drains(&controller(rack), PATIENCE));
        let drains = drains.unwrap_or_else(|error| panic!("{error}"));
        let of = drains.into_iter().find(|of| of.server == u32::from(server.0));
        let of = of.expect("it is drained");
        if of.problem != problem {
            println!("{}: {}", of.name, of.problem);
            problem = of.problem;
        }
        of.is_drained
    });
    println!("server {server} is drained after {time:?}");
}

/// Moves home, range by range, what is not there.
fn bring_home(rack: &TestRack, home: NodeId, pages: &Range<u64>) {
    match try_migrate(rack, home, home, pages) {
        Ok(ids) => ids.into_iter().for_each(|id| await_moved(rack, id)),
        // The last server that was drained gave it to the home.
        Err(error) => assert!(error.to_string().contains("serves these pages already"), "{error}"),
    }
}

#[test]
fn servers_are_drained_in_turn_while_clients_use_them() {
    let options = RackOptions { servers: 3, ..RackOptions::new(DataPlane::Soft, "9000") };
    move_about("drain", &options, (PAGES, false), |rack, flow, servers, pages| {
        for server in servers {
            drain(rack, *server, false);
            await_drained(rack, *server);
            flow();
            drain(rack, *server, true);
        }
        let moved =
            rack.enter(Node::Switch, || operations::migrations(&controller(rack), PATIENCE));
        let moved = moved.unwrap_or_else(|error| panic!("{error}"));
        assert!(moved.iter().any(|of| of.giver == of.home && of.reason.contains("is drained")));
        assert!(moved.iter().any(|of| of.giver != of.home), "what was taken over moved on");
        bring_home(rack, servers[0], pages);
    });
}

/// Waits until a server may be taken away, or, if it is gone, another one answers for it; returns that one's name.
fn await_drain(
    rack: &TestRack,
    server: NodeId,
    what: &str,
    is_so: impl Fn(&proto::Drain) -> bool,
) -> String {
    let mut deputy = String::new();
    let time = until(what, || {
        let drains = rack.enter(Node::Switch, || operations::drains(&controller(rack), PATIENCE));
        let found = drains.into_iter().flatten().find(|of| of.server == u32::from(server.0));
        deputy = found.as_ref().map_or_else(String::new, |of| of.deputy.clone());
        found.is_some_and(|of| is_so(&of))
    });
    println!("{what}: {time:?}, {deputy:?} answers");
    deputy
}

/// Far below the deadline of an operation: so no request waited for a server that is not there.
const AT_ONCE: Duration = Duration::from_secs(2);

/// For how long at least the controller keeps the connection of a process that hangs.
const CONNECTION_KEPT: Duration = Duration::from_secs(20);

#[test]
fn a_drained_server_is_taken_away_for_good_and_no_client_sees_it() {
    let options = RackOptions { servers: 3, ..RackOptions::new(DataPlane::Ebpf, "9000") };
    let mut rack = TestRack::up("deputy", &options);
    let endpoint = Endpoint::join(&rack, 1);
    let [home, second, third] = [1, 2, 3].map(|number| endpoint.server(number));
    let on_home = |seed| {
        let mut config = endpoint.config(seed);
        config.memory_nodes = vec![MemoryNode { node: home, shard_count: 1 }];
        config
    };
    let mut before = endpoint.open(&rack, on_home(1));
    // It has a session with the server, and uses no page.
    let mut idle = endpoint.open(&rack, on_home(2));
    let region = before.create((FEW * PAGE_BYTES) as u64).expect("there is room");
    let [moving, purged] =
        [(); 2].map(|()| before.create((FEW * PAGE_BYTES) as u64).expect("there is room"));
    let freed = before.create(PAGE_BYTES as u64).expect("there is room");
    let at = |page: usize| region.at((page * PAGE_BYTES) as u64).expect("inside");
    before.write(at(0), &stamp(0, 1)).expect("it is at home");
    for page in 0..FEW {
        before.write(at(page), &stamp(page, 1)).expect("it is at home");
    }
    let other = idle.create(PAGE_BYTES as u64).expect("there is room");
    idle.delete(other).expect("it is at home");
    before.delete(freed).expect("it is at home");
    drain(&rack, home, false);
    await_drain(&rack, home, "the server may leave", |of| of.may_leave);
    // Nothing is lost with it from now on.
    let refused = before.create(PAGE_BYTES as u64);
    let is_drained = |error: &Error| matches!(error, Error::Drained { node } if *node == home);
    assert!(refused.as_ref().is_err_and(is_drained), "{refused:?}");
    rack.kill("memserver-s1");

    let mut change = 1;
    let mut use_all = |client: &mut UdpClient, most: Duration| {
        let mut bytes = vec![0; PAGE_BYTES];
        change += 1;
        let mut longest = Duration::ZERO;
        for page in 0..FEW {
            let begin = Instant::now();
            client.write(at(page), &stamp(page, change)).expect("no client sees that it is gone");
            client.read(at(page), &mut bytes).expect("no client sees that it is gone");
            assert_eq!(bytes, stamp(page, change), "page {page}");
            longest = longest.max(begin.elapsed());
        }
        println!("the longest WRITE and READ took {longest:?}");
        assert!(longest < most, "{longest:?}");
    };
    // Nobody answers for the server at first, and the outcome of no change is unknown nevertheless.
    use_all(&mut idle, PATIENCE);
    let deputy = await_drain(&rack, home, "there is a deputy", |of| !of.deputy.is_empty());
    use_all(&mut endpoint.client(&rack, 3), AT_ONCE);
    use_all(&mut before, AT_ONCE);
    let stale = |client: &mut UdpClient| {
        let begin = Instant::now();
        let result = client.read(freed.base(), &mut vec![0; PAGE_BYTES]);
        let is_stale = |error: &Error| matches!(error, Error::Refused { status, .. } if *status == Status::StaleGeneration);
        assert!(result.as_ref().is_err_and(is_stale), "{result:?}");
        assert!(begin.elapsed() < AT_ONCE, "it is final");
    };
    stale(&mut before);
    stale(&mut endpoint.client(&rack, 4));
    idle.delete(moving).expect("no client sees that its server is gone");
    assert_freed(&mut idle, moving, [0, FEW - 1]);
    assert_freed(&mut endpoint.client(&rack, 10), moving, [1]);
    // An operator finds what is left of it at the others.
    let all = [second, third].map(|server| allocations(&rack, server));
    let bases: Vec<_> = all.iter().flatten().map(|of| of.pointer.clone()).collect();
    let of = |region: Region| region.base().to_ipv6().octets().to_vec();
    assert!(bases.contains(&of(region)) && bases.contains(&of(purged)), "{all:?}");
    assert_eq!(bases.len(), 2, "{all:?}");

    // The next process of the deputy does not answer for it, and neither does the next controller know it by itself.
    let victim = format!("memserver-{deputy}");
    rack.kill(&victim);
    rack.start_with_memory(&victim);
    rack.kill("controller");
    rack.start_with_memory("controller");
    use_all(&mut endpoint.client(&rack, 5), PATIENCE);
    await_drain(&rack, home, "there is a deputy again", |of| !of.deputy.is_empty());
    use_all(&mut endpoint.client(&rack, 6), AT_ONCE);

    // What it had moves on.
    let (from, to) = if deputy == "s2" { (third, second) } else { (second, third) };
    drain(&rack, from, false);
    await_drained(&rack, from);
    use_all(&mut endpoint.client(&rack, 7), AT_ONCE);
    use_all(&mut before, AT_ONCE);
    drain(&rack, from, true);

    // The deputy hangs, and the pages with it. Another server answers while the connection of the first one is still open.
    let hung = await_drain(&rack, home, "the deputy answers", |of| !of.deputy.is_empty());
    let pid = rack.process(&format!("memserver-{hung}")).pid;
    freeze(pid);
    let began = Instant::now();
    await_drain(&rack, home, "another deputy follows", |of| {
        !of.deputy.is_empty() && of.deputy != hung
    });
    assert!(began.elapsed() < CONNECTION_KEPT, "it is not the connection that showed it");
    stale(&mut endpoint.client(&rack, 10));
    stale(&mut before);
    let target = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a pid");
    kill_process(target, Signal::CONT).expect("may go on");
    use_all(&mut endpoint.client(&rack, 11), PATIENCE);
    use_all(&mut before, PATIENCE);

    rack.start_with_memory("memserver-s1");
    drain(&rack, home, true);
    use_all(&mut endpoint.client(&rack, 8), AT_ONCE);
    use_all(&mut before, AT_ONCE);
    let mut fresh = None;
    until("the server allocates again", || {
        fresh = before.create(PAGE_BYTES as u64).ok();
        fresh.is_some()
    });
    let fresh = fresh.expect("it was allocated");
    assert_eq!(fresh.base().node, home);
    before.write(fresh.base(), &stamp(0, 9)).expect("it is there");
    let mut bytes = vec![0; PAGE_BYTES];
    endpoint.client(&rack, 9).read(fresh.base(), &mut bytes).expect("it is there");
    assert_eq!(bytes, stamp(0, 9));
    // What was freed while it was away goes home, where it is freed, too.
    let first = moving.base().location.page();
    await_home(&rack, home, &(first..first + FEW as u64));
    println!("{to} has the pages");
}

/// Asks for a change of how memory moves by itself, or for the state.
fn rebalance(rack: &TestRack, action: proto::RebalanceAction) -> proto::RebalanceResponse {
    let request = proto::RebalanceRequest { action: action.into(), window_ms: 1000 };
    let ask = || operations::rebalance(&controller(rack), request, PATIENCE);
    rack.enter(Node::Switch, ask).unwrap_or_else(|error| panic!("{error}"))
}

/// Pages that a few hundred operations per second make hot enough to move.
const HOT: usize = 256;

#[test]
fn hot_pages_move_by_themselves_while_clients_use_them() {
    let options = RackOptions { memory: "16M", ..RackOptions::new(DataPlane::Ebpf, "9000") };
    move_about("rebalance", &options, (HOT, false), |rack, flow, servers, pages| {
        let entries = directory_entries(rack);
        assert!(!rebalance(rack, proto::RebalanceAction::On).was_on);
        let migrations = || {
            let all =
                rack.enter(Node::Switch, || operations::migrations(&controller(rack), PATIENCE));
            all.unwrap_or_else(|error| panic!("{error}"))
        };
        let is_closed = |of: &proto::Migration| of.stage() == proto::MigrationStage::Closed;
        let mut last = None;
        let time = until("hot pages have moved", || {
            let now = rebalance(rack, proto::RebalanceAction::Unspecified);
            let shown = (now.entries, now.is_learning, now.problems, now.moves.len());
            if last.as_ref() != Some(&shown) {
                println!("{shown:?}");
                last = Some(shown);
            }
            let all = migrations();
            !all.is_empty() && all.iter().all(is_closed)
        });
        let off = rebalance(rack, proto::RebalanceAction::Off);
        println!("{time:?}: {off:?}");
        assert!(off.was_on && !off.is_on && off.entries == 0, "{off:?}");
        // One may have begun just before.
        until("no migration is open", || migrations().iter().all(is_closed));
        let moved = migrations();
        for of in &moved {
            assert!(of.reason.starts_with("rebalancing: s1 has "), "{of:?}");
            assert!(of.kept_pages > 0 && of.taker == u32::from(servers[1].0), "{of:?}");
        }
        let kept: u64 = moved.iter().map(|of| of.kept_pages).sum();
        assert!(kept < HOT as u64, "the other server would be as hot: {moved:?}");
        flow();
        // What only counted is gone, and what moved has entries.
        until("only pages that moved have entries", || {
            let now = directory_entries(rack);
            (entries + 1..=entries + 2 * moved.len()).contains(&now)
        });
        // Clients that know the new server send to the pointers nevertheless, so the entries count them.
        let before = rack.page_packets();
        until("entries count what clients send to pages that moved", || {
            rack.page_packets() >= before + FLOW
        });
        bring_home(rack, servers[0], pages);
    });
}

/// They come from the server that has the memory, which is not the one that its pointers name.
#[test]
fn notices_of_memory_that_has_moved_arrive() {
    let options = RackOptions { clients: 2, ..RackOptions::new(DataPlane::Soft, "1500") };
    let rack = TestRack::up("moved-notices", &options);
    let mut listener = join_with(&rack, 1, |options| options.notices = true);
    let notices = listener.notices().expect("it has a service");
    let mut other = join_with(&rack, 2, |_| ());
    let region = other.create(LINE_PAGES as u64 * PAGE_BYTES as u64).expect("there is memory");
    let base = region.base();
    let home = base.node;
    let taker = NodeId(3 - home.0);
    let first = base.location.page();
    let pages = first..first + LINE_PAGES as u64;
    await_moved(&rack, migrate(&rack, home, taker, &pages));
    let is_told = |base: Pointer, pages: u64| {
        let next = || notices.next_within(Duration::from_millis(100));
        std::iter::from_fn(next).any(|of| {
            (of.kind, of.pointer, u64::from(of.pages)) == (NoticeKind::Invalidate, base, pages)
        })
    };
    // Each server learns with a heartbeat that the space has a subscriber.
    until("zeroes are told of", || {
        other.zero(base, 2 * PAGE_BYTES as u64).expect("it is there");
        is_told(base, 2)
    });
    until("the home tells of what is freed", || {
        let region = other.create_at(PAGE_BYTES as u64, Placement::Node(home)).expect("room");
        other.delete(region).expect("it is ours");
        is_told(region.base(), 1)
    });
    other.delete(region).expect("it is ours");
    until("the end of the allocation is told of", || is_told(base, LINE_PAGES as u64));
}
