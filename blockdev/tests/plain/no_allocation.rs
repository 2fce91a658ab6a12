//! Serving allocates nothing once slabs and sessions are there: memory that is swapped to the disk may be what an
//! allocation would wait for.
#![allow(unsafe_code, reason = "an allocator that counts")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::AtomicU64;

use bluebridge_transport::{
    Capabilities, Counters, Incoming, Outgoing, Polled, ReceiveError, Timestamp, TransmitError,
    Wait,
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
fn requests_allocate_nothing() {
    let world = World::new(2, 32 << 20);
    let pointer = world.create(8 * MIB, Placement::Striped);
    let (disk, _keeper) = world.attach(pointer);
    let node = NodeId(NEXT_CLIENT.fetch_add(1, Ordering::Relaxed));
    let mut client = Client::open(world.config(node), Uncounted(world.rack.attach(node)));
    let input = vec![5; 1 << 20];
    let mut output = vec![0; 2 << 20];
    let mut tasks = Vec::with_capacity(64);
    let mut pass = || {
        for round in 0..20_u64 {
            tasks.clear();
            for number in 0..20_u64 {
                let offset = (round * 20 + number) * 20_123 % (7 * MIB);
                let at = usize::try_from(number).expect("small") * 30_000;
                tasks.push(Task::new(Operation::Write, offset, 30_000, at..at + 30_000));
                tasks.push(Task::new(Operation::Read, offset, 30_000, at..at + 30_000));
            }
            tasks.push(Task::new(Operation::Zero { allocates: false }, round * 8192, 8192, 0..0));
            tasks.push(Task::new(Operation::Trim, round * 8192 + MIB, 8192, 0..0));
            tasks.push(Task::new(Operation::Flush, 0, 0, 0..0));
            disk.execute(&mut client, &mut tasks, &input, &mut output);
            assert!(tasks.iter().all(|task| task.result == Some(Ok(()))));
        }
    };
    pass();
    let slabs = disk.allocated_slabs();
    COUNTS.set(true);
    pass();
    COUNTS.set(false);
    assert_eq!(disk.allocated_slabs(), slabs, "all slabs were there");
    assert_eq!(ALLOCATIONS.load(Ordering::Relaxed), 0, "allocations of the serving thread");
}
