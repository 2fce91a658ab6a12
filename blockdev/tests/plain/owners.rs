//! One process serves a disk.

use std::sync::atomic::{AtomicBool, AtomicU64};

use bluebridge_blockdev::device::{LEASE_MIN, MapError};

use super::*;

const SLAB: u32 = 1 << 20;

#[test]
fn a_disk_in_use_cannot_be_attached_or_deleted() {
    let world = World::new(1, 16 << 20);
    let pointer = world.create(4 * MIB, Placement::Linear);
    let (disk, keeper) = world.attach(pointer);
    let mut client = world.client();
    write(&disk, &mut client, 0, b"mine").expect("there is room");

    let mut other = world.owner();
    other.set_deadline(Duration::from_millis(300));
    let error = Disk::delete(&mut other, pointer, false).expect_err("it is served");
    assert!(matches!(error, DiskError::InUse { .. }), "{error}");
    let error =
        Disk::attach(other, pointer, world.open_options()).map(drop).expect_err("it is served");
    assert!(matches!(error, DiskError::InUse { .. }), "{error}");
    write(&disk, &mut client, 4, b" still").expect("nothing has changed");

    drop(keeper);
    assert!(has_ended(&mut client, pointer), "the next owner need not wait");
    assert_eq!(read(&disk, &mut client, 0, 4), Err(Failure::Unanswered), "it was given up");
    let (again, keeper) = world.attach(pointer);
    assert_eq!(read(&again, &mut client, 0, 10), Ok(b"mine still".to_vec()));
    drop(keeper);
    assert!(has_ended(&mut client, pointer));
}

/// Whether the map says that its owner has ended and has nothing in flight.
fn has_ended(client: &mut LocalClient, pointer: Pointer) -> bool {
    let mut page = [0; 4096];
    client.read(pointer, &mut page).expect("nobody leases it");
    page[42] == 1
}

/// A server that is restarted with its memory forgets leases; here a newer incarnation of the owner's node ends them.
#[test]
fn the_next_owner_waits_for_a_lease_that_its_server_forgot() {
    let world = World::new(1, 16 << 20);
    let pointer = world.create(4 * MIB, Placement::Linear);
    let options = |lease| OpenOptions {
        lease: Duration::from_millis(lease),
        deadline: Duration::from_secs(1),
        ..world.open_options()
    };
    let node = NodeId(NEXT_CLIENT.fetch_add(1, Ordering::Relaxed));
    let first = Client::open(world.config(node), world.rack.attach(node));
    // Nothing renews its lease.
    let (disk, _keeper) = Disk::attach(first, pointer, options(1500)).expect("nobody has it");
    write(&disk, &mut world.client(), 0, b"zeroth").expect("there is room");
    let (mut carriers, _service) = world.rack.attach_endpoint(node, 1);
    let config = EndpointConfig { incarnation: 2, ..world.config(node) };
    let mut newer = Client::open(config, carriers.pop().expect("one"));
    newer.stat(NodeId(1)).expect("it responds");

    let (is_second, count) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut client = world.client();
            loop {
                let was_second = is_second.load(Ordering::SeqCst);
                match write(&disk, &mut client, 0, b"first") {
                    Ok(()) => {
                        assert!(!was_second, "two owners at a time");
                        count.fetch_add(1, Ordering::SeqCst);
                    }
                    Err(_) if was_second => break,
                    Err(_) => {}
                }
            }
        });
        let before = count.load(Ordering::SeqCst);
        let refused = scope.spawn(|| {
            // It has taken the table; now it waits for the first one.
            let mut client = world.client();
            bluebridge_testkit::until("the second owner has the table", || {
                let mut page = [0; 4096];
                let table = pointer.checked_add(4096).expect("inside");
                client.read(table, &mut page).is_ok() && page[23] == 2
            });
            let options = OpenOptions { deadline: Duration::from_millis(200), ..options(500) };
            Disk::attach(world.owner(), pointer, options).map(drop).expect_err("it is taken")
        });
        let attached = Disk::attach(world.owner(), pointer, options(500));
        is_second.store(true, Ordering::SeqCst);
        let (second, _keeper) = attached.expect("its server has forgotten the lease");
        let refused = refused.join().expect("no panic");
        assert!(matches!(refused, DiskError::InUse { .. }), "{refused}");
        assert!(count.load(Ordering::SeqCst) > before, "the first one went on meanwhile");
        let mut client = world.client();
        write(&second, &mut client, 0, b"other").expect("it is the owner");
        assert_eq!(read(&second, &mut client, 0, 6), Ok(b"otherh".to_vec()));
    });
}

/// The first owner has no service that renews its lease, as if it were cut off.
#[test]
fn an_owner_whose_lease_ended_goes_on_unless_another_attached_the_disk() {
    let world = World::new(1, 16 << 20);
    let pointer = world.create(4 * MIB, Placement::Linear);
    let options = || OpenOptions { lease: Duration::from_millis(500), ..world.open_options() };
    let attached = Disk::attach(world.client(), pointer, options());
    let (disk, _keeper) = attached.expect("nobody has it");
    let mut client = world.client();
    // Several leases.
    let until = std::time::Instant::now() + Duration::from_secs(1);
    while std::time::Instant::now() < until {
        write(&disk, &mut client, 0, b"first").expect("it waits for its lease");
    }
    assert!(disk.end().is_none());

    let mut attempts = 0;
    let (second, _second_keeper) = loop {
        attempts += 1;
        assert!(attempts < 100, "it never gets the lease");
        match Disk::attach(world.owner(), pointer, options()) {
            Ok(attached) => break attached,
            Err(DiskError::InUse { .. } | DiskError::NotKept | DiskError::TakenOver) => {}
            Err(error) => panic!("{error}"),
        }
    };
    // As soon as the first sees it, and at the latest when it changes the map.
    let failure = loop {
        match write(&disk, &mut client, 2 * MIB, b"first") {
            Ok(()) => {}
            Err(Failure::Unanswered) => {}
            Err(failure) => break failure,
        }
    };
    assert_eq!(failure, Failure::Stopped);
    assert!(matches!(disk.end(), Some(DiskError::TakenOver)), "{:?}", disk.end());
    write(&second, &mut client, 3 * MIB, b"second").expect("it is the owner");
    assert_eq!(read(&second, &mut client, 0, 5), Ok(b"first".to_vec()));
}

#[test]
fn what_is_no_disk_is_not_attached() {
    let world = World::new(1, 16 << 20);
    let mut client = world.client();
    let region = client.create(8192).expect("there is room");
    let of = |pointer| Disk::attach(world.owner(), pointer, world.open_options()).map(|_| ());
    let error = of(region.base()).expect_err("zeroes");
    assert!(matches!(error, DiskError::Map(MapError::NoDisk)), "{error}");
    let pointer = world.create(MIB, Placement::Linear);
    client.write(pointer.checked_add(4096 + 100).expect("inside"), &[9]).expect("it is there");
    let error = of(pointer).expect_err("the table is damaged");
    assert!(matches!(error, DiskError::Map(MapError::Damaged { page: 1 })), "{error}");
    client.delete_pointer(pointer).expect("it is there");
    let error = of(pointer).expect_err("it is gone");
    assert!(matches!(error, DiskError::Memory(_)), "{error}");
    for (size_bytes, slab_bytes) in
        [(0, MIB), (4095, MIB), (MIB, 3 * MIB), (MIB, 1024), (1 << 50, MIB)]
    {
        let options = DiskOptions { slab_bytes, ..options(size_bytes, Placement::Linear) };
        let error = Disk::create(&mut client, &options).expect_err("impossible");
        assert!(matches!(error, DiskError::Options(_)), "{error}");
    }
    let pointer = world.create(MIB, Placement::Linear);
    let options = OpenOptions { lease: LEASE_MIN / 2, ..world.open_options() };
    let error = Disk::attach(world.owner(), pointer, options).map(drop).expect_err("too short");
    assert!(matches!(error, DiskError::Options(_)), "{error}");
}

/// Threads write, trim and read their own parts of the same slabs: nothing that was acknowledged is lost.
#[test]
fn slabs_are_freed_beside_writers_without_a_loss() {
    const THREADS: u64 = 3;
    let world = World::new(2, 32 << 20);
    let pointer = world.create(4 * MIB, Placement::TwoChoices);
    let (disk, _keeper) = world.attach(pointer);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (disk, mut client) = (&disk, world.client());
            scope.spawn(move || {
                for round in 0..120_u64 {
                    let slab = round % 2 * MIB;
                    // The thread's part of the slab: every third run of 4 pages.
                    let runs = (0..256 / 4).filter(|run| run % THREADS == thread);
                    let stamp = [byte(thread + 1), byte(round + 1)];
                    let at = |run: u64| slab + run * 4 * 4096;
                    for run in runs.clone().step_by(5) {
                        write(disk, &mut client, at(run) + 10, &stamp).expect("there is room");
                    }
                    for run in runs.clone().step_by(5) {
                        let found = read(disk, &mut client, at(run) + 10, 2);
                        assert_eq!(found, Ok(stamp.to_vec()), "thread {thread}, round {round}");
                    }
                    for run in runs {
                        single(disk, &mut client, Operation::Trim, at(run), 4 * 4096)
                            .expect("a hint");
                    }
                }
            });
        }
    });
    assert!(disk.end().is_none());
}

/// Threads discard the parts of the same slabs at once, and slabs of the same page of the table: all of them are freed.
#[test]
fn slabs_that_are_discarded_at_once_are_freed() {
    const THREADS: u32 = 4;
    let world = World::new(2, 32 << 20);
    let pointer = world.create(8 * MIB, Placement::Striped);
    let map = world.used_pages().iter().sum::<u64>();
    let (disk, _keeper) = world.attach(pointer);
    let part = SLAB / THREADS;
    for round in 0..12_u32 {
        let mut client = world.client();
        for slab in 0..8 {
            write(&disk, &mut client, slab * MIB, &[1]).expect("there is room");
        }
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (disk, mut client) = (&disk, world.client());
                scope.spawn(move || {
                    let zeroes = Operation::Zero { allocates: false };
                    for slab in 0..8_u32 {
                        // Whole slabs of their own, or parts of the same ones.
                        let (operation, offset, bytes) = match round % 3 {
                            0 if slab % THREADS != thread => continue,
                            0 => (Operation::Trim, 0, SLAB),
                            1 => (Operation::Trim, thread * part, part),
                            _ => (zeroes, thread * part, part),
                        };
                        let offset = u64::from(slab) * MIB + u64::from(offset);
                        single(disk, &mut client, operation, offset, bytes).expect("it is done");
                    }
                });
            }
        });
        bluebridge_testkit::until("all slabs are free", || {
            world.used_pages().iter().sum::<u64>() == map
        });
        assert_eq!(disk.allocated_slabs(), 0);
    }
}
