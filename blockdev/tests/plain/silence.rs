//! Servers that do not respond.

use std::time::Instant;

use super::*;

#[test]
fn a_silent_server_fails_its_slabs_and_no_others() {
    let mut world = World::new(2, 16 << 20);
    let pointer = world.create(8 * MIB, Placement::Striped);
    let options = OpenOptions { deadline: Duration::from_millis(400), ..world.open_options() };
    let (disk, keeper) = Disk::attach(world.owner(), pointer, options).expect("nobody has it");
    let mut client = world.client();
    for slab in 0..4 {
        write(&disk, &mut client, slab * MIB, &[byte(slab + 1)]).expect("there is room");
    }
    // Slabs alternate between the servers; the other one has the map.
    let (lost, stopped) = if pointer.node == NodeId(1) { (1, NodeId(2)) } else { (0, NodeId(1)) };
    world.rack.stop(stopped);
    let began = Instant::now();
    assert_eq!(read(&disk, &mut client, lost * MIB, 1), Err(Failure::Unanswered));
    assert!(began.elapsed() >= Duration::from_millis(400), "it was tried until the deadline");
    // From now on its slabs cost no time, or that of a probe.
    for _ in 0..50 {
        assert_eq!(read(&disk, &mut client, lost * MIB, 1), Err(Failure::Silent));
        assert_eq!(write(&disk, &mut client, lost * MIB, &[9]), Err(Failure::Silent));
        let other = 1 - lost;
        assert_eq!(read(&disk, &mut client, other * MIB, 1), Ok(vec![byte(other + 1)]));
    }
    // One round has both kinds.
    let mut output = [0; 2];
    let mut tasks = [
        Task::new(Operation::Read, lost * MIB, 1, 0..1),
        Task::new(Operation::Read, (1 - lost) * MIB, 1, 1..2),
    ];
    disk.execute(&mut client, &mut tasks, &[], &mut output);
    assert_eq!(tasks[0].result, Some(Err(Failure::Silent)));
    assert_eq!((tasks[1].result, output[1]), (Some(Ok(())), byte(2 - lost)));
    // Slabs of the silent server are given up, one of a page of the table: it cannot be freed now. More would be lost.
    let (gone, there) = (lost, 1 - lost);
    let mib = length(usize::try_from(MIB).expect("small"));
    single(&disk, &mut client, Operation::Trim, gone * MIB, mib).expect("a hint");
    let allocated = disk.allocated_slabs();
    single(&disk, &mut client, Operation::Trim, (gone + 2) * MIB, mib).expect("a hint");
    let zeroes = Operation::Zero { allocates: false };
    single(&disk, &mut client, zeroes, there * MIB, mib).expect("zeroes");
    assert_eq!(read(&disk, &mut client, there * MIB, 1), Ok(vec![0]));
    assert_eq!(disk.allocated_slabs(), allocated, "the first one is still to be freed");
    // New slabs go to the server that responds.
    for slab in 4..8 {
        write(&disk, &mut client, slab * MIB, &[1]).expect("one server has room");
    }
    assert!(disk.end().is_none());
    drop(keeper);

    client.set_deadline(Duration::from_millis(300));
    let error = Disk::delete(&mut client, pointer, false).expect_err("a server is gone");
    let left = match error {
        DiskError::SlabsLeft { count, .. } => count,
        error => panic!("{error}"),
    };
    let deleted = Disk::delete(&mut client, pointer, true).expect("the map's server is there");
    assert_eq!(deleted.left.len() as u64, left);
    assert_eq!(left, 2, "slabs of the server that is gone, one of them given up");
    assert!(deleted.left.iter().all(|slab| slab.node == stopped));
    assert_eq!(client.stat(pointer.node).expect("it responds").used_pages, 0);
}

/// A batch has requests for a server that has just died: those for another one are done, and that one is not suspected.
#[test]
fn requests_beside_those_for_a_dead_server_are_done() {
    let mut world = World::new(2, 16 << 20);
    let pointer = world.create(8 * MIB, Placement::Striped);
    // The time of a call is that of the request, and not that of the lease.
    let (deadline, lease) = (Duration::from_millis(800), Duration::from_secs(8));
    let options = OpenOptions { deadline, lease, ..world.open_options() };
    let (disk, _keeper) = Disk::attach(world.owner(), pointer, options).expect("nobody has it");
    let mut client = world.client();
    for slab in 0..4 {
        write(&disk, &mut client, slab * MIB, &[byte(slab + 1)]).expect("there is room");
    }
    let (lost, stopped) = if pointer.node == NodeId(1) { (1, NodeId(2)) } else { (0, NodeId(1)) };
    let there = 1 - lost;
    world.rack.stop(stopped);
    let zeroes = Operation::Zero { allocates: false };
    let mut output = [0; 2];
    let mut tasks = [
        Task::new(zeroes, lost * MIB, 4096, 0..0),
        Task::new(Operation::Write, (lost + 2) * MIB, 1, 0..1),
        // A new slab, whose first choice is dead.
        Task::new(Operation::Write, (lost + 4) * MIB, 1, 0..1),
        Task::new(zeroes, (lost + 2) * MIB, 4096, 0..0),
        Task::new(Operation::Write, (there + 2) * MIB + 5, 1, 0..1),
        Task::new(Operation::Read, lost * MIB, 1, 0..1),
        Task::new(Operation::Read, there * MIB, 1, 1..2),
        Task::new(zeroes, (there + 2) * MIB, 1, 0..0),
    ];
    disk.execute(&mut client, &mut tasks, &[9], &mut output);
    let results = tasks.map(|task| task.result.expect("it has ended"));
    let unanswered = Err(Failure::Unanswered);
    let expected = [unanswered, unanswered, Ok(()), unanswered, Ok(()), unanswered, Ok(()), Ok(())];
    assert_eq!(results, expected);
    assert_eq!(output[1], byte(there + 1));
    assert_eq!(read(&disk, &mut client, (there + 2) * MIB, 6), Ok(vec![0, 0, 0, 0, 0, 9]));
    assert_eq!(read(&disk, &mut client, (lost + 4) * MIB, 1), Ok(vec![9]));
    assert_eq!(read(&disk, &mut client, lost * MIB, 1), Err(Failure::Silent));
}

/// A batch that takes longer than the deadline, on servers that respond, is done; also what waits for the others.
#[test]
fn requests_that_make_progress_do_not_fail() {
    let world = World::new(2, 128 << 20);
    let pointer = world.create(64 * MIB, Placement::Striped);
    let deadline = Duration::from_secs(1);
    let options = OpenOptions { deadline, ..world.open_options() };
    let (disk, _keeper) = Disk::attach(world.owner(), pointer, options).expect("nobody has it");
    let mut client = world.client();
    let zeroes = Operation::Zero { allocates: true };
    let bytes = length(64 << 20);
    let mut count = 16;
    loop {
        let began = Instant::now();
        let mut tasks: Vec<_> = (0..count).map(|_| Task::new(zeroes, 0, bytes, 0..0)).collect();
        disk.execute(&mut client, &mut tasks, &[], &mut []);
        let failed = tasks.iter().find(|task| task.result != Some(Ok(())));
        assert!(failed.is_none(), "{failed:?}");
        if began.elapsed() > deadline * 3 / 2 {
            break;
        }
        count *= 2;
    }
}

/// What has ended has its result while requests for a dead server are repeated, which keep no others from their turn.
#[test]
fn zeroes_for_a_dead_server_keep_nobody_waiting() {
    let mut world = World::new(2, 16 << 20);
    let pointer = world.create(8 * MIB, Placement::Striped);
    let lease = Duration::from_secs(8);
    let (disk, _keeper) =
        Disk::attach(world.owner(), pointer, OpenOptions { lease, ..world.open_options() })
            .expect("nobody has it");
    let mut client = world.client();
    for slab in 0..8 {
        write(&disk, &mut client, slab * MIB, &[byte(slab + 1)]).expect("there is room");
    }
    let (lost, stopped) = if pointer.node == NodeId(1) { (1, NodeId(2)) } else { (0, NodeId(1)) };
    let there = 1 - lost;
    world.rack.stop(stopped);
    let zeroes = Operation::Zero { allocates: true };
    let mut tasks: Vec<_> =
        (0..40).map(|number| Task::new(zeroes, (lost + number % 4 * 2) * MIB, 1, 0..0)).collect();
    tasks.push(Task::new(zeroes, there * MIB, 1, 0..0));
    tasks.push(Task::new(Operation::Read, (there + 2) * MIB, 1, 0..1));
    let (never, mut output) = (std::sync::OnceLock::new(), [0]);
    disk.execute_some(&mut client, &mut tasks, &[], &mut output, &never);
    assert_eq!((tasks[41].result, output[0]), (Some(Ok(())), byte(there + 3)));
    assert!(tasks[..40].iter().all(|task| task.result.is_none()), "the server gets more time");
    // One comes later.
    tasks.push(Task::new(zeroes, (there + 4) * MIB, 1, 0..0));
    while tasks[..40].iter().any(|task| task.result.is_none()) {
        disk.execute_some(&mut client, &mut tasks, &[], &mut output, &never);
    }
    for task in &tasks[..40] {
        let failure = task.result.expect("it has ended").expect_err("its server is dead");
        assert!(matches!(failure, Failure::Unanswered | Failure::Silent), "{failure:?}");
    }
    assert_eq!([tasks[40].result, tasks[42].result], [Some(Ok(())); 2]);
}
