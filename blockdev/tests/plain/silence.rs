//! Servers that do not respond.

use std::time::Instant;

use super::*;

#[test]
fn a_silent_server_fails_its_slabs_and_no_others() {
    let mut world = World::new(2, 16 << 20);
    let pointer = world.create(8 * MIB, Placement::Striped);
    let options = OpenOptions { deadline: Duration::from_millis(400), ..world.open_options() };
    let (disk, _keeper) = Disk::attach(world.owner(), pointer, options).expect("nobody has it");
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
    // New slabs go to the server that responds.
    for slab in 4..8 {
        write(&disk, &mut client, slab * MIB, &[1]).expect("one server has room");
    }
    assert!(disk.end().is_none());
}
