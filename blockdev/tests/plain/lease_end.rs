//! Nothing is sent after the lease.

use std::sync::Mutex;
use std::time::Instant;

use bluebridge_transport::{
    Capabilities, Counters, Incoming, Outgoing, Polled, ReceiveError, Timestamp, TransmitError,
    Wait,
};

use super::*;

/// A carrier that knows when it sent last.
struct Watched(MemoryTransport, Arc<Mutex<Option<Instant>>>);

impl Transport for Watched {
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
        *self.1.lock().expect("no panic") = Some(Instant::now());
        self.0.transmit(batch)
    }

    fn receive(&mut self, wait: Wait) -> Result<usize, ReceiveError> {
        self.0.receive(wait)
    }

    fn incoming(&self, index: usize) -> Incoming<'_> {
        self.0.incoming(index)
    }
}

/// The lease is not renewed, and another process gets it when it ends, in the middle of requests that take longer.
#[test]
fn nothing_is_sent_after_the_lease() {
    let world = World::new(1, 128 << 20);
    let pointer = world.create(64 * MIB, Placement::Linear);
    let options = OpenOptions { lease: Duration::from_secs(2), ..world.open_options() };
    let attached = Disk::attach(world.client(), pointer, options);
    let (disk, _keeper) = attached.expect("nobody has it");
    let node = NodeId(NEXT_CLIENT.fetch_add(1, Ordering::Relaxed));
    let last = Arc::<Mutex<Option<Instant>>>::default();
    let carrier = Watched(world.rack.attach(node), Arc::clone(&last));
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
