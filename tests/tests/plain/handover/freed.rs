//! The allocation is freed while its lines move, or when they are at both servers, or when its home has lost its memory.

use super::*;
use bluebridge_protocol::store::Grant;
use bluebridge_wire::{ArenaGeneration, Status};

/// How long the DELETE may take. It has an end long before.
const DELETE_PATIENCE: Duration = Duration::from_secs(20);

/// The client that frees the allocation, besides the others, and what it heard.
#[derive(Default)]
pub(super) struct Freed {
    client: Option<usize>,
    result: Option<Result<Output, Failure>>,
}

impl Freed {
    pub(super) fn is_of(&self, client: usize) -> bool {
        self.client == Some(client)
    }

    pub(super) fn hear(&mut self, completion: &Completion) {
        self.result = Some(completion.result);
    }
}

impl World {
    /// Adds the client that frees.
    fn add_deleter(&mut self) {
        let number = self.clients.len();
        let node = NodeId(CLIENT + number as u16);
        self.clients.push(Client {
            incarnation: 1,
            requester: Requester::new(requester::Config::new(SPACE, node, 1, self.seed + 77)),
            memory: Memory::default(),
            // So that it gets no other one.
            job: Some((0, 0)),
            reads: None,
        });
        self.freed.client = Some(number);
    }

    fn ask(&mut self, operation: Operation) {
        let client = self.freed.client.expect("it was added");
        self.freed.result = None;
        let deadline = self.now + DELETE_PATIENCE;
        let Client { requester, memory, .. } = &mut self.clients[client];
        memory.0.insert(1, vec![0; PAGE_BYTES]);
        requester.start_until(self.now, operation, 1, deadline).expect("there is room");
    }

    fn delete(&mut self) {
        self.ask(Operation::Delete { pointer: self.first, pages: USED as u32 });
    }

    /// Goes on until it has heard.
    fn hear(&mut self) -> Result<Output, Failure> {
        for _ in 0..STEPS {
            if let Some(result) = self.freed.result.take() {
                return result;
            }
            self.step();
        }
        panic!("seed {}: no response", self.seed);
    }

    /// Goes on until no server frees anything.
    fn settle(&mut self) {
        for _ in 0..STEPS {
            if self.hosts.iter().all(|host| !host.responder.has_freeings()) {
                return;
            }
            self.step();
        }
        panic!("seed {}: it is never free", self.seed);
    }

    /// Frees the allocation, again if its server restarted: that one may go on, or have heard nothing.
    fn free(&mut self) -> Result<Output, Failure> {
        loop {
            match self.hear() {
                Err(Failure::OutcomeUnknown { .. } | Failure::Unreachable { .. }) => {
                    self.count("unknown delete");
                    self.settle();
                    self.delete();
                }
                result => return result,
            }
        }
    }

    /// How a READ of a page is refused.
    fn look(&mut self, page: usize) -> Status {
        for _ in 0..20 {
            let pointer = self.pointer(page);
            self.ask(Operation::Read { pointer, length: 8 });
            match self.hear() {
                Err(Failure::Unreachable { .. } | Failure::TimedOut { .. }) => {}
                Err(Failure::Refused { status, .. }) => return status,
                other => panic!("seed {}: page {page} is there: {other:?}", self.seed),
            }
        }
        panic!("seed {}: page {page} is not found", self.seed);
    }
}

/// One run: the DELETE is sent at a random step of a migration that is withdrawn at another one. Returns whether some lines
/// moved, and some did not.
fn free_once(seed: u64, restarts: f64) -> (bool, BTreeMap<&'static str, u32>) {
    let mut world = World::new(seed);
    world.add_deleter();
    world.allow();
    let withdrawn_at = world.rng.random_range(0..1500);
    let deleted_at = world.rng.random_range(0..2000);
    let mut is_sent = false;
    world.run(restarts, |world, step| {
        if step == withdrawn_at {
            world.withdraw();
        }
        if step == deleted_at {
            world.delete();
            is_sent = true;
        }
    });
    if !is_sent {
        world.delete();
    }
    match world.free() {
        Ok(Output::Freed(pages)) => assert_eq!(pages, USED as u32),
        Err(Failure::Refused { status: Status::NotAllocated, .. }) => world.count("was free"),
        other => panic!("seed {seed}: {other:?}"),
    }
    world.settle();
    let lines = world.close();
    let is_in_parts = !lines.is_empty() && lines.len() < LINES;
    world.are_clients_done = true;
    for page in [0, 1, LINE_PAGES, USED / 2, USED - 1] {
        assert_eq!(world.look(page), Status::NotAllocated, "seed {seed}, page {page}");
    }
    let usage = world.hosts[HOME].arena.usage(SPACE);
    assert_eq!(usage.used_pages, 0, "seed {seed}: nothing counts");
    let used = world.hosts[OTHER].arena.arena_usage().used_pages;
    assert_eq!(used, 0, "seed {seed}: its memory is free");
    // Its addresses are used again when the lines are back.
    for range in world.hosts[OTHER].responder.adopted().to_vec() {
        let first = range.first_page as usize / LINE_PAGES;
        let end = first + range.page_count as usize / LINE_PAGES;
        world.send_back(&(first..end).collect());
        world.allow();
        world.run(restarts, |_, _| {});
        assert_eq!(world.close().len(), end - first);
    }
    let arena = &mut world.hosts[HOME].arena;
    let grant = arena.create(SPACE, PAGES as u32).expect("all of its memory is free");
    assert_ne!((grant.tag, grant.location), (world.first.tag, world.first.location));
    (is_in_parts, world.events)
}

#[test]
fn an_allocation_is_freed_wherever_its_lines_are() {
    let mut in_parts = 0;
    for seed in 0..SEEDS {
        println!("seed {seed}");
        in_parts += u32::from(free_once(seed, 0.0).0);
    }
    assert!(in_parts > 50, "many were in parts: {in_parts}");
}

#[test]
fn an_allocation_is_freed_although_servers_restart() {
    let mut events = Vec::new();
    for seed in 0..RESTART_SEEDS {
        println!("seed {seed}");
        events.push(free_once(1000 + seed, 0.01).1);
    }
    let sums = sums(&events);
    println!("{sums:?}");
    assert!(sums["giver restarts"] > 20 && sums["unknown delete"] > 0, "{sums:?}");
}

/// The home lost its memory, and with it the second half. Who has the first page frees what is left.
#[test]
fn who_has_the_first_page_frees_it_if_the_home_has_lost_it() {
    for seed in 0..SEEDS / 4 {
        println!("seed {seed}");
        let mut world = World::new(seed);
        world.add_deleter();
        world.record.pages = 0..(PAGES / 2) as u64;
        world.allow();
        world.run(0.0, |_, _| {});
        assert_eq!(world.close().len(), LINES / 2);
        world.are_clients_done = true;
        world.lose_home();
        let incarnation = INCARNATION + 1;
        if seed % 2 == 0 {
            world.hosts[OTHER].arena = Arena::on_heap(&ArenaConfig::default(), 8);
            let file = &world.files[OTHER];
            world.hosts[OTHER] = Host::new(OTHER, incarnation, file, world.now, seed);
        }
        world.delete();
        assert_eq!(world.free(), Ok(Output::Freed(USED as u32)), "seed {seed}");
        assert_eq!(world.hosts[OTHER].arena.arena_usage().used_pages, 0, "seed {seed}");
        for (page, expected) in [
            (0, Status::NotAllocated),
            (PAGES / 2 - 1, Status::NotAllocated),
            (PAGES / 2, Status::StaleGeneration),
        ] {
            assert_eq!(world.look(page), expected, "seed {seed}, page {page}");
        }
        // Nobody can allocate these pages any more: the home learns that nobody has them, and their server forgets them.
        let Host { responder, arena, .. } = &world.hosts[OTHER];
        let free = responder.free_lines(arena);
        assert_eq!((free.len(), free[0].pages.clone()), (1, 0..PAGES as u64 / 2));
        world.hosts[HOME].responder.learn_earlier(free[0].generation, &[]);
        let Host { responder, arena, .. } = &mut world.hosts[OTHER];
        responder.discard(&free[0], arena);
        assert_eq!((arena.arena_usage().adopted_lines, responder.adopted().len()), (0, 0));
        for page in [0, PAGES / 2 - 1] {
            assert_eq!(world.look(page), Status::StaleGeneration, "seed {seed}, page {page}");
        }
    }
}

impl World {
    /// Gives the clients nothing more to do, and waits until they have done what they had.
    fn end_jobs(&mut self) {
        self.are_clients_done = true;
        for _ in 0..STEPS {
            if self.clients[..usize::from(CLIENTS)].iter().all(|client| client.job.is_none()) {
                return;
            }
            self.step();
        }
        panic!("seed {}: a client is never done", self.seed);
    }

    /// The home's next process has no memory; it knows where its earlier contents are.
    fn lose_home(&mut self) {
        let (last, incarnation) = (&self.hosts[HOME], self.hosts[HOME].incarnation + 1);
        let next = ArenaGeneration::new(last.arena.generation().number() + 1).expect("small");
        let config = ArenaConfig { generation: next, last_generation: next, ..Default::default() };
        let arena = Arena::on_heap(&config, PAGES as u32);
        self.hosts[HOME] = Host::with(HOME, incarnation, arena, self.now, self.seed);
        let adopted = self.hosts[OTHER].responder.adopted().to_vec();
        let mut earlier: Vec<_> = adopted.iter().map(|of| of.generation).collect();
        earlier.dedup();
        for generation in earlier {
            let of_it = adopted.iter().filter(|of| of.generation == generation);
            let row = |of: &responder::Adopted| {
                (of.first_page..of.first_page + of.page_count, Some(NODES[OTHER]))
            };
            let rows: Vec<_> = of_it.map(row).collect();
            self.hosts[HOME].responder.learn_earlier(generation, &rows);
        }
    }

    /// Moves the first lines to the other server.
    fn move_first(&mut self, lines: usize) {
        let id = self.record.migration.id + 1;
        self.record.migration.id = id;
        self.record.is_withdrawn = false;
        self.record.pages = 0..(lines * LINE_PAGES) as u64;
        self.allow();
        self.run(0.0, |_, _| {});
        assert_eq!(self.close().len(), lines);
    }
}

/// Earlier contents of the home have other allocations at the same places.
#[test]
fn nothing_of_earlier_contents_is_freed() {
    for seed in 0..SEEDS / 10 {
        let mut world = World::new(seed);
        world.add_deleter();
        world.move_first(LINES / 2);
        world.end_jobs();
        let earlier = world.first;
        world.lose_home();
        let arena = &mut world.hosts[HOME].arena;
        let grant = arena.create(SPACE, USED as u32).expect("it is empty");
        arena.complete(grant.location);
        world.first = Pointer { tag: grant.tag, location: grant.location, ..earlier };
        assert_eq!(grant.location.page(), earlier.location.page());
        world.move_first(1);
        world.lose_home();
        world.delete();
        assert_eq!(world.free(), Ok(Output::Freed(USED as u32)), "seed {seed}");
        assert_eq!(world.look(0), Status::NotAllocated);
        assert_eq!(world.look(LINE_PAGES), Status::StaleGeneration, "it was lost");
        world.first = earlier;
        for page in 0..PAGES / 2 {
            let pointer = world.pointer(page);
            let read = Operation::Read { pointer, length: PAGE_BYTES as u32 };
            let result = loop {
                world.ask(read);
                match world.hear() {
                    Err(Failure::Unreachable { .. } | Failure::TimedOut { .. }) => {}
                    result => break result,
                }
            };
            assert_eq!(result, Ok(Output::Done), "seed {seed}, page {page}");
            let client = world.freed.client.expect("it was added");
            let bytes = &world.clients[client].memory.0[&1];
            assert_eq!(read_stamp(bytes).map(|(of, _)| of), Some(page), "seed {seed}");
        }
    }
}

/// A server was told that the home has lost an allocation, and the home is back with it.
#[test]
fn a_home_that_is_back_frees_what_another_one_began_to_free() {
    for seed in 0..SEEDS / 10 {
        let mut world = World::new(seed);
        world.add_deleter();
        world.move_first(LINES / 2);
        world.end_jobs();
        // Leases that their owners forgot are over.
        world.now = world.now + Duration::from_millis(100);
        let adopted = world.hosts[OTHER].responder.adopted();
        let first = adopted.iter().find(|of| of.first_page == 0).expect("it moved");
        let (at, grant) = ((NODES[HOME], first.local_page), world.first);
        let grant = Grant { location: grant.location, tag: grant.tag };
        let (now, Host { responder, arena, .. }) = (world.now, &mut world.hosts[OTHER]);
        let begun = responder.purge_orphan(now, at, (SPACE, grant), arena);
        assert_eq!(begun, Ok(USED as u32));
        if seed % 2 == 0 {
            // The next process goes on with it.
            let incarnation = INCARNATION + 1;
            world.hosts[OTHER].arena = Arena::on_heap(&ArenaConfig::default(), 8);
            let file = &world.files[OTHER];
            world.hosts[OTHER] = Host::new(OTHER, incarnation, file, world.now, seed);
        }
        world.settle();
        for page in [0, PAGES / 2 - 1, PAGES / 2, USED - 1] {
            assert_eq!(world.look(page), Status::NotAllocated, "seed {seed}, page {page}");
        }
        assert_eq!(world.hosts[HOME].arena.usage(SPACE).used_pages, 0, "seed {seed}");
        assert_eq!(world.hosts[OTHER].arena.arena_usage().used_pages, 0, "seed {seed}");
        // Its lines are free to go home.
        world.send_back(&(0..LINES / 2).collect());
        for row in rows(&world.hosts[OTHER], &world.record.pages) {
            assert_eq!((row.end - row.start) as usize, PAGES / 2, "seed {seed}");
        }
        world.allow();
        world.run(0.0, |_, _| {});
        assert_eq!(world.close().len(), LINES / 2);
    }
}
