//! The faulting thread allocates nothing while it resolves its fault: the program may be inside of its allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use bluebridge_transport::{
    Capabilities, Counters, Incoming, Outgoing, Polled, ReceiveError, Timestamp, TransmitError,
    Transport, Wait,
};

use super::*;

thread_local! {
    /// Whether this thread counts its allocations.
    static COUNTS: Cell<bool> = const { Cell::new(false) };
}
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

struct Counting;

// SAFETY: all calls go to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if COUNTS.get() {
            ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: the caller's promises hold for the system's allocator too.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A carrier whose own allocations do not count: within a process, datagrams are copied to the receiver's queue.
/// Sockets do not do that.
struct Uncounted<T>(T);

impl<T> Uncounted<T> {
    fn call<R>(&mut self, run: impl FnOnce(&mut T) -> R) -> R {
        let counts = COUNTS.replace(false);
        let result = run(&mut self.0);
        COUNTS.set(counts);
        result
    }
}

impl<T: Transport> Transport for Uncounted<T> {
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
        self.call(|inner| inner.transmit(batch))
    }

    fn receive(&mut self, wait: Wait) -> Result<usize, ReceiveError> {
        self.call(|inner| inner.receive(wait))
    }

    fn incoming(&self, index: usize) -> Incoming<'_> {
        self.0.incoming(index)
    }
}

#[test]
fn resolving_a_fault_allocates_nothing() {
    let rack = servers(2);
    // Without the eviction thread, the faulting thread also evicts.
    let options = RegionOptions::new(2 << 20, 256 << 10).evictor(false);
    let mut region = RemoteRegion::with_remotes(&options, || {
        let node = NodeId(NEXT_CLIENT.fetch_add(1, Ordering::Relaxed));
        let mut config = EndpointConfig::new(SPACE, node, 1);
        config.memory_nodes.clone_from(&rack.1);
        let client = Client::open(config, Uncounted(rack.0.attach(node)));
        Ok::<_, Error>(Box::new(client) as Box<dyn RemoteMemory>)
    })
    .expect("a region");
    let pass = |region: &mut RemoteRegion, value: u8| {
        let memory = region.as_mut_slice();
        for page in (0..512).map(|number| number * 37 % 512) {
            memory[page * PAGE] = value;
            let other = page * 5 % 512;
            assert!(memory[other * PAGE] <= value);
        }
    };
    // Sessions are opened and extents allocated when they are first needed.
    for value in 1..4 {
        pass(&mut region, value);
    }
    let before = region.statistics();
    COUNTS.set(true);
    pass(&mut region, 4);
    COUNTS.set(false);
    let after = region.statistics();
    assert!(after.remote_faults - before.remote_faults > 400, "{after:?}");
    assert!(after.evicted_written_pages - before.evicted_written_pages > 400, "{after:?}");
    let allocations = ALLOCATIONS.load(Ordering::Relaxed);
    assert_eq!(allocations, 0, "allocations of the faulting thread");
}
