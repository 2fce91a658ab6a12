//! Changes whose outcome is unknown.

use std::sync::atomic::{AtomicBool, AtomicU64};

use bluebridge_transport::{
    Capabilities, Counters, Incoming, Outgoing, Polled, ReceiveError, Timestamp, TransmitError,
    Wait,
};
use bluebridge_wire::{Command, WireCommand, address::Fields};

use super::*;

/// What a carrier of [`Deaf`] does.
#[derive(Default)]
pub(super) struct Ear {
    /// Which requests get no response: the code of a command, or 0.
    command: AtomicU16,
    is_deaf: AtomicBool,
    /// If it is not 0: the lowest place of requests of the command. Only those far behind it get no response.
    first: AtomicU64,
}

impl Ear {
    /// From the next request of this command on, nothing is received.
    pub(super) fn deafen(&self, command: Command) {
        self.command.store(command.code().into(), Ordering::SeqCst);
    }

    /// Requests of this command get no response if they are 8 MiB or more behind the first place of others.
    fn deafen_behind(&self, command: Command) {
        self.first.store(u64::MAX, Ordering::SeqCst);
        self.command.store(command.code().into(), Ordering::SeqCst);
    }

    /// From now on nothing is received.
    pub(super) fn deafen_now(&self) {
        self.is_deaf.store(true, Ordering::SeqCst);
    }

    /// Ends that; returns whether there was such a request.
    pub(super) fn open(&self) -> bool {
        self.command.store(0, Ordering::SeqCst);
        self.is_deaf.swap(false, Ordering::SeqCst)
    }
}

/// A carrier that loses responses.
pub(super) struct Deaf(MemoryTransport, Arc<Ear>);

impl Transport for Deaf {
    fn capabilities(&self) -> &Capabilities {
        self.0.capabilities()
    }

    fn counters(&self) -> Counters {
        self.0.counters()
    }

    fn local_port(&self) -> u16 {
        self.0.local_port()
    }

    fn now(&self) -> Timestamp {
        self.0.now()
    }

    fn received_at(&self) -> Timestamp {
        self.0.received_at()
    }

    fn polled(&self) -> Polled {
        self.0.polled()
    }

    fn transmit(&mut self, batch: &[Outgoing<'_>]) -> Result<usize, TransmitError> {
        let command = self.1.command.load(Ordering::SeqCst);
        let is_it = |one: &Outgoing<'_>| {
            let code = WireCommand::from_bits(one.destination.octets()[6]).command();
            code.is_some_and(|code| u16::from(code.code()) == command)
        };
        if self.1.first.load(Ordering::SeqCst) != 0 {
            // Repeated requests go to the server's own address, which says nothing about their place.
            let fields = batch.iter().filter(|one| is_it(one)).map(|one| one.destination);
            let places = fields.filter_map(Fields::unpack).filter(|fields| fields.is_memory());
            for place in places.map(|fields| fields.location) {
                let first = self.1.first.fetch_min(place, Ordering::SeqCst).min(place);
                self.1.is_deaf.store(place >= first + 8 * MIB, Ordering::SeqCst);
            }
        } else if command != 0 && batch.iter().any(is_it) {
            self.1.is_deaf.store(true, Ordering::SeqCst);
        }
        self.0.transmit(batch)
    }

    fn receive(&mut self, wait: Wait) -> Result<usize, ReceiveError> {
        let count = self.0.receive(wait)?;
        Ok(if self.1.is_deaf.load(Ordering::SeqCst) { 0 } else { count })
    }

    fn incoming(&self, index: usize) -> Incoming<'_> {
        self.0.incoming(index)
    }
}

pub(super) fn client(world: &World) -> (Client<Deaf>, Arc<Ear>) {
    let node = NodeId(NEXT_CLIENT.fetch_add(1, Ordering::Relaxed));
    let ear = Arc::<Ear>::default();
    let carrier = Deaf(world.rack.attach(node), Arc::clone(&ear));
    (Client::open(world.config(node), carrier), ear)
}

/// The keeper has a client that loses nothing, and so seldom looks what is owed that these tests are over before.
fn options(world: &World) -> OpenOptions {
    let lease = Duration::from_secs(60);
    OpenOptions { deadline: Duration::from_millis(600), lease, ..world.open_options() }
}

const SLAB: u32 = 1 << 20;

/// The table may have no entry for the slab, and the next process frees what the table has not.
#[test]
fn what_is_written_after_a_slab_was_perhaps_freed_is_kept() {
    let world = World::new(1, 32 << 20);
    let pointer = world.create(4 * MIB, Placement::Linear);
    let (disk, keeper) =
        Disk::attach(world.owner(), pointer, options(&world)).expect("nobody has it");
    let (mut client, ear) = client(&world);
    for slab in 0..4 {
        write(&disk, &mut client, slab * MIB, b"before").expect("there is room");
    }
    let zeroes = Operation::Zero { allocates: false };
    for (slab, operation) in [(0, Operation::Trim), (1, zeroes), (2, Operation::Trim)] {
        ear.deafen(Command::Commit);
        // A TRIM is a hint.
        let done = single(&disk, &mut client, operation, slab * MIB, SLAB).map(drop);
        assert!(operation != Operation::Trim || done == Ok(()), "{done:?}");
        assert!(ear.open(), "the table was to be changed");
        assert_eq!(disk.allocated_slabs(), 4, "whether it has fewer is unknown");
        match operation {
            Operation::Trim if slab == 2 => {
                // Freed after all, in the way of another one.
                single(&disk, &mut client, Operation::Trim, 3 * MIB, SLAB).expect("a hint");
                assert_eq!(disk.allocated_slabs(), 2);
                write(&disk, &mut client, slab * MIB + 8192, b"after").expect("a new slab");
            }
            Operation::Trim => {
                write(&disk, &mut client, slab * MIB + 8192, b"after").expect("the slab is there");
            }
            _ => {
                single(&disk, &mut client, zeroes, slab * MIB, 4096).expect("zeroes");
                write(&disk, &mut client, slab * MIB + 8192, b"after").expect("the slab is there");
                assert_eq!(read(&disk, &mut client, slab * MIB, 6), Ok(vec![0; 6]));
            }
        }
    }
    drop(keeper);
    let (again, keeper) = world.attach(pointer);
    for slab in 0..3 {
        let found = read(&again, &mut client, slab * MIB + 8192, 5);
        assert_eq!(found, Ok(b"after".to_vec()), "slab {slab}");
    }
    drop(keeper);
    Disk::delete(&mut client, pointer, false).expect("nobody serves it");
    assert_eq!(world.used_pages(), [0]);
}

/// A slab whose allocation is unknown is neither lost nor allocated again.
#[test]
fn a_slab_that_was_perhaps_added_is_used_by_the_next_write() {
    let world = World::new(1, 32 << 20);
    let pointer = world.create(4 * MIB, Placement::Linear);
    let (disk, keeper) =
        Disk::attach(world.owner(), pointer, options(&world)).expect("nobody has it");
    let (mut client, ear) = client(&world);
    ear.deafen(Command::Commit);
    assert_eq!(write(&disk, &mut client, 0, b"lost"), Err(Failure::Unanswered));
    assert!(ear.open());
    let used = world.used_pages();
    write(&disk, &mut client, 0, b"kept").expect("the slab is there");
    assert_eq!(world.used_pages(), used);
    drop(keeper);
    let (again, keeper) = world.attach(pointer);
    assert_eq!(read(&again, &mut client, 0, 4), Ok(b"kept".to_vec()));
    drop(keeper);
    Disk::delete(&mut client, pointer, false).expect("nobody serves it");
    assert_eq!(world.used_pages(), [0]);
}

#[test]
fn zeroes_that_were_not_acknowledged_make_nothing_unwanted() {
    let world = World::new(1, 32 << 20);
    let pointer = world.create(2 * MIB, Placement::Linear);
    let (disk, _keeper) =
        Disk::attach(world.owner(), pointer, options(&world)).expect("nobody has it");
    let (mut client, ear) = client(&world);
    write(&disk, &mut client, 0, b"kept").expect("there is room");
    ear.deafen(Command::Update);
    let zeroes = Operation::Zero { allocates: false };
    assert!(single(&disk, &mut client, zeroes, 0, SLAB).is_err());
    assert!(ear.open(), "the slab was to be freed");
    // They may have been, so it holds anything. The lease whose response was lost ends by itself.
    bluebridge_testkit::until("the table can be changed", || {
        read(&disk, &mut client, 0, 4).is_ok() && write(&disk, &mut client, MIB, b"more") == Ok(())
    });
    single(&disk, &mut client, Operation::Trim, MIB / 2, SLAB / 2).expect("a hint");
    assert_eq!(disk.allocated_slabs(), 2, "its other half is wanted");
}

/// A page of the table has room for one slab that may be in it or not. If that is used again, it makes room.
#[test]
fn a_slab_whose_place_is_unknown_and_that_is_used_does_not_keep_others_from_being_freed() {
    let world = World::new(1, 32 << 20);
    let pointer = world.create(4 * MIB, Placement::Linear);
    let (disk, _keeper) =
        Disk::attach(world.owner(), pointer, options(&world)).expect("nobody has it");
    let (mut deaf, ear) = client(&world);
    let mut client = world.client();
    for slab in 0..2 {
        write(&disk, &mut client, slab * MIB, b"kept").expect("there is room");
    }
    ear.deafen(Command::Commit);
    single(&disk, &mut deaf, Operation::Trim, 0, SLAB).expect("a hint");
    assert!(ear.open(), "the table was to be changed");
    ear.deafen(Command::Update);
    let zeroes = Operation::Zero { allocates: false };
    single(&disk, &mut deaf, zeroes, 0, 4096).expect_err("the table cannot be changed");
    assert!(ear.open());
    assert_eq!(disk.allocated_slabs(), 2);
    // The lease whose response was lost ends by itself.
    bluebridge_testkit::until("the other slab is freed", || {
        single(&disk, &mut client, Operation::Trim, MIB, SLAB).expect("a hint");
        disk.allocated_slabs() == 1
    });
    write(&disk, &mut client, 0, b"new").expect("the slab is there");
    assert_eq!(read(&disk, &mut client, 0, 3), Ok(b"new".to_vec()));
}

/// What an owner has taken out of the table and has not freed, the next one frees while it serves.
#[test]
fn the_next_owner_frees_what_was_given_up() {
    let world = World::new(1, 32 << 20);
    let pointer = world.create(2 * MIB, Placement::Linear);
    let (disk, keeper) =
        Disk::attach(world.owner(), pointer, options(&world)).expect("nobody has it");
    let map = world.used_pages()[0];
    let (mut client, ear) = client(&world);
    write(&disk, &mut client, 0, b"gone").expect("there is room");
    // Not even sent: the page of the table names it.
    ear.deafen(Command::Commit);
    single(&disk, &mut client, Operation::Trim, 0, SLAB).expect("a hint");
    assert!(ear.open());
    assert_eq!(world.used_pages()[0], map + u64::from(SLAB) / 4096);
    drop(keeper);
    let (again, _keeper) = world.attach(pointer);
    bluebridge_testkit::until("it is free", || world.used_pages()[0] == map);
    assert_eq!(again.allocated_slabs(), 0);
}

/// A server that does not respond to this client, and then does, is no more suspected when it allocates a slab.
#[test]
fn a_suspected_server_that_allocates_a_slab_is_used() {
    let world = World::new(1, 32 << 20);
    let pointer = world.create(4 * MIB, Placement::TwoChoices);
    let (disk, _keeper) =
        Disk::attach(world.owner(), pointer, options(&world)).expect("nobody has it");
    let (mut client, ear) = client(&world);
    write(&disk, &mut client, 0, b"kept").expect("there is room");
    ear.deafen_now();
    assert_eq!(read(&disk, &mut client, 0, 4), Err(Failure::Unanswered));
    assert_eq!(read(&disk, &mut client, 0, 4), Err(Failure::Silent), "it is suspected");
    assert!(ear.open());
    write(&disk, &mut client, MIB, b"new").expect("the server responds");
    assert_eq!(read(&disk, &mut client, 0, 4), Ok(b"kept".to_vec()));
}

/// A part that is done gives the rest its time anew, once: it is not done again.
#[test]
fn a_slab_that_is_zeroed_to_a_half_again_and_again_is_given_up() {
    let world = World::new(1, 64 << 20);
    let slab_bytes = 16 * MIB;
    let disk_options = DiskOptions { slab_bytes, ..super::options(slab_bytes, Placement::Linear) };
    let pointer = Disk::create(&mut world.client(), &disk_options).expect("there is room");
    let (disk, _keeper) =
        Disk::attach(world.owner(), pointer, options(&world)).expect("nobody has it");
    let (mut client, ear) = client(&world);
    for part in [0, 7, 15] {
        write(&disk, &mut client, part * MIB, b"kept").expect("there is room");
    }
    ear.deafen_behind(Command::Delete);
    let zeroing = Arc::clone(&disk);
    let thread = std::thread::spawn(move || {
        let zeroes = Operation::Zero { allocates: true };
        single(&zeroing, &mut client, zeroes, 0, 16 << 20)
    });
    bluebridge_testkit::until("a half is done", || ear.is_deaf.load(Ordering::SeqCst));
    let mut client = world.client();
    write(&disk, &mut client, 0, b"again").expect("the server responds to this client");
    let zeroed = bluebridge_testkit::within("it fails", move || thread.join().expect("no panic"));
    assert_eq!(zeroed, Err(Failure::Unanswered));
    let responds = || read(&disk, &mut client, 0, 4).is_ok();
    bluebridge_testkit::until("the server is asked again", responds);
    assert_eq!(read(&disk, &mut client, 7 * MIB, 4), Ok(vec![0; 4]), "this half is done");
    assert_eq!(read(&disk, &mut client, 0, 5), Ok(b"again".to_vec()), "it was done once");
}

/// Requests and allocations have lists of their own of servers that do not respond.
#[test]
fn a_server_that_is_suspected_and_passed_over_is_asked_again() {
    let world = World::new(1, 32 << 20);
    let pointer = world.create(4 * MIB, Placement::Linear);
    let (disk, _keeper) =
        Disk::attach(world.owner(), pointer, options(&world)).expect("nobody has it");
    let (mut client, ear) = client(&world);
    write(&disk, &mut client, 0, b"kept").expect("there is room");
    ear.deafen_now();
    assert_eq!(write(&disk, &mut client, MIB, b"new"), Err(Failure::Unanswered));
    assert_eq!(read(&disk, &mut client, 0, 4), Err(Failure::Unanswered));
    assert_eq!(read(&disk, &mut client, 0, 4), Err(Failure::Silent), "it is suspected");
    assert!(ear.open());
    // Only of allocations. The next tries of the lists are at different times.
    std::thread::sleep(Duration::from_millis(400));
    let asked = || write(&disk, &mut client, MIB, b"new").is_ok();
    bluebridge_testkit::until("the server is asked for a slab", asked);
}

/// Nobody else has the pointers of slabs that are left when the map is freed, and whether it is may be unknown.
#[test]
fn a_disk_that_is_deleted_by_force_leaves_a_list_of_its_slabs() {
    let world = World::new(1, 32 << 20);
    let pointer = world.create(4 * MIB, Placement::Linear);
    let (disk, keeper) =
        Disk::attach(world.owner(), pointer, options(&world)).expect("nobody has it");
    let (mut client, ear) = client(&world);
    write(&disk, &mut client, 0, b"kept").expect("there is room");
    drop(keeper);
    ear.deafen(Command::Delete);
    client.set_deadline(Duration::from_millis(300));
    let deleted = Disk::delete(&mut client, pointer, true).expect("the list is not lost");
    assert!(ear.open());
    assert_eq!((deleted.slab_count, deleted.left.len()), (1, 1));
    let error = deleted.map.expect("there was no response");
    assert!(error.is_outcome_unknown(), "{error}");
}
