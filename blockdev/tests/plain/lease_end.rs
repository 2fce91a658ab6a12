//! Nothing is sent after the lease.

use std::sync::Mutex;
use std::time::Instant;

use super::carrier::Before;
use super::*;

/// The lease is not renewed, and another process gets it when it ends, in the middle of requests that take longer.
#[test]
fn nothing_is_sent_after_the_lease() {
    let world = World::new(1, 128 << 20);
    let pointer = world.create(64 * MIB, Placement::Linear);
    let options = OpenOptions { lease: Duration::from_secs(2), ..world.open_options() };
    let attached = Disk::attach(world.client(), pointer, options);
    let (disk, _keeper) = attached.expect("nobody has it");
    let node = NodeId(NEXT_CLIENT.fetch_add(1, Ordering::Relaxed));
    let last = Mutex::<Option<Instant>>::default();
    let note = || *last.lock().expect("no panic") = Some(Instant::now());
    let carrier = Before(world.rack.attach(node), note);
    let mut client = Client::open(world.config(node), carrier);
    let granted = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let mut other = world.owner();
            other.set_deadline(Duration::from_secs(20));
            let mut page = [0; 4096];
            let _held = other.update(pointer, &mut page).expect("the lease ends");
            let granted = Instant::now();
            // The first one sees that it has no lease.
            while read(&disk, &mut world.client(), 0, 1).is_ok() {}
            granted
        });
        let bytes = length(64 << 20);
        let zeroes = Operation::Zero { allocates: true };
        // Many times longer than a lease.
        let mut tasks: Vec<_> = (0..1000).map(|_| Task::new(zeroes, 0, bytes, 0..0)).collect();
        disk.execute(&mut client, &mut tasks, &[], &mut []);
        let failed = tasks.iter().filter(|task| task.result == Some(Err(Failure::Unanswered)));
        assert!(failed.count() > 0, "they ended before the lease");
        waiting.join().expect("no panic")
    });
    let last = last.lock().expect("no panic").expect("it has sent");
    assert!(last < granted, "{:?} later", last.saturating_duration_since(granted));
}
