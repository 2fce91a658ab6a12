//! Servers that lose memory while pages are read or written: what is local stays, and nothing wrong is read.

use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bluebridge::{Error as RemoteError, ReadRequest, Region, WriteRequest};

use super::*;

/// What a test does with the remote memory of a region.
#[derive(Default)]
struct Plan {
    /// The allocations that exist.
    created: Mutex<Vec<Region>>,
    /// Another client, which frees them.
    other: Mutex<Option<Box<dyn RemoteMemory>>>,
    /// The next write loses the memory after its first request.
    loses_in_write: AtomicBool,
    /// The next read loses the memory after it was answered, and waits for two writes.
    loses_after_read: AtomicBool,
    /// Allocations that succeed until one fails.
    allocations: AtomicUsize,
    writes: AtomicUsize,
}

impl Plan {
    fn lose(&self) {
        let mut other = self.other.lock().expect("nobody panics");
        let other = other.as_mut().expect("the test set it");
        for region in self.created.lock().expect("nobody panics").drain(..) {
            other.delete(region).expect("it is allocated");
        }
    }
}

/// Remote memory that follows a plan.
struct Planned {
    inner: Box<dyn RemoteMemory>,
    plan: Arc<Plan>,
}

impl RemoteMemory for Planned {
    fn create(&mut self, length_bytes: u64) -> Result<Region, RemoteError> {
        if self.plan.allocations.fetch_sub(1, Ordering::Relaxed) == 0 {
            return Err(RemoteError::Length);
        }
        let region = self.inner.create(length_bytes)?;
        self.plan.created.lock().expect("nobody panics").push(region);
        Ok(region)
    }

    fn delete(&mut self, region: Region) -> Result<(), RemoteError> {
        self.inner.delete(region)
    }

    fn read_many(&mut self, requests: &mut [ReadRequest<'_>]) -> Result<(), RemoteError> {
        self.inner.read_many(requests)?;
        if self.plan.loses_after_read.load(Ordering::Relaxed) {
            self.plan.lose();
            let before = self.plan.writes.load(Ordering::Relaxed);
            self.plan.loses_after_read.store(false, Ordering::Relaxed);
            let begun = Instant::now();
            while self.plan.writes.load(Ordering::Relaxed) < before + 2 {
                assert!(begun.elapsed() < Duration::from_secs(20), "nobody writes");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(())
    }

    fn write_many(&mut self, requests: &mut [WriteRequest<'_>]) -> Result<(), RemoteError> {
        if self.plan.loses_in_write.swap(false, Ordering::Relaxed) {
            let (first, rest) = requests.split_at_mut(1);
            self.inner.write_many(first)?;
            self.plan.lose();
            self.inner.write_many(rest)?;
        } else {
            self.inner.write_many(requests)?;
        }
        self.plan.writes.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// A region of 2,048 pages of which 64 may be local.
fn planned(rack: &(LocalRack, Vec<MemoryNode>), mode: FaultMode) -> (RemoteRegion, Arc<Plan>) {
    let client = || {
        let node = NodeId(NEXT_CLIENT.fetch_add(1, Ordering::Relaxed));
        let mut config = EndpointConfig::new(SPACE, node, 1);
        config.memory_nodes.clone_from(&rack.1);
        Box::new(Client::open(config, rack.0.attach(node))) as Box<dyn RemoteMemory>
    };
    let plan = Arc::new(Plan::default());
    plan.allocations.store(100, Ordering::Relaxed);
    *plan.other.lock().expect("nobody panics") = Some(client());
    // Without an eviction thread, pages leave only when the test wants it.
    let options =
        RegionOptions::new(8 << 20, 256 << 10).mode(mode).prefetch_pages(0).evictor(false);
    let region = RemoteRegion::with_remotes(&options, || {
        let planned = Planned { inner: client(), plan: Arc::clone(&plan) };
        Ok::<_, Error>(Box::new(planned) as Box<dyn RemoteMemory>)
    });
    (region.expect("a region"), plan)
}

/// Uses other pages until the first ones have left.
fn evict(region: &RemoteRegion) {
    for page in region.as_slice().chunks(PAGE).skip(1024) {
        assert_eq!(page[0], 0);
    }
}

#[test]
fn what_was_written_just_before_the_loss_is_written_again() {
    let rack = servers(1);
    for mode in MODES {
        let (mut region, plan) = planned(&rack, mode);
        // Not neighbours, so they are two requests.
        region.as_mut_slice()[0] = 5;
        region.as_mut_slice()[2 * PAGE] = 6;
        plan.loses_in_write.store(true, Ordering::Relaxed);
        region.flush().expect("there is other memory");
        evict(&region);
        let memory = region.as_slice();
        assert_eq!((memory[0], memory[2 * PAGE]), (5, 6), "{mode:?}");
        assert!(region.statistics().remote_faults >= 2, "they had left");
    }
}

#[test]
fn what_was_read_just_before_the_loss_is_written_again() {
    let rack = servers(1);
    for mode in MODES {
        let (mut region, plan) = planned(&rack, mode);
        region.as_mut_slice()[9 * PAGE] = 5;
        evict(&region);
        region.as_mut_slice()[0] = 6;
        plan.loses_after_read.store(true, Ordering::Relaxed);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| region.as_slice()[9 * PAGE]);
            while plan.loses_after_read.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
            }
            // The first write of page 0 learns of the loss, the second has its own memory.
            evict(&region);
            assert_eq!(reader.join().expect("it does not panic"), 5, "{mode:?}");
        });
        evict(&region);
        let memory = region.as_slice();
        assert_eq!((memory[0], memory[9 * PAGE]), (6, 5), "{mode:?}");
        assert!(region.statistics().remote_faults >= 3, "they had left");
    }
}

#[test]
fn a_lost_page_that_is_discarded_can_be_used_again() {
    let rack = servers(1);
    for mode in MODES {
        let (mut region, plan) = planned(&rack, mode);
        region.as_mut_slice()[..2 * PAGE].fill(5);
        region.flush().expect("the server responds");
        region.evict(0..2 * PAGE).expect("both pages are stored");
        plan.lose();
        for page in [0, 1] {
            let pinned = region.pin(page * PAGE..page * PAGE + 1);
            assert!(matches!(pinned, Err(Error::Page(PageError::Lost { .. }))), "{mode:?}");
        }
        region.discard(0..PAGE).expect("it is in the region");
        assert_eq!(region.as_slice()[0], 0, "{mode:?}");
        region.as_mut_slice()[0] = 7;
        assert_eq!(region.pin(0..PAGE).expect("it is local")[..2], [7, 0], "{mode:?}");
        assert!(region.pin(PAGE..PAGE + 1).is_err(), "the other one stays lost, with {mode:?}");
    }
}

#[test]
fn a_flush_writes_again_what_was_lost() {
    let rack = servers(1);
    for mode in MODES {
        let (mut region, plan) = planned(&rack, mode);
        region.as_mut_slice()[0] = 5;
        region.as_mut_slice()[PAGE] = 5;
        region.flush().expect("the server responds");
        plan.lose();
        region.as_mut_slice()[PAGE] = 6;
        let before = region.statistics().written_bytes;
        region.flush().expect("there is other memory");
        let after = region.statistics().written_bytes;
        assert_eq!(after - before, 2 * PAGE as u64, "both pages, with {mode:?}");
    }
}

#[test]
fn a_flush_fails_if_some_pages_find_no_memory() {
    let rack = servers(1);
    for mode in MODES {
        let (mut region, plan) = planned(&rack, mode);
        // The last page of an extent and the first of the next.
        region.as_mut_slice()[511 * PAGE] = 5;
        region.as_mut_slice()[512 * PAGE] = 6;
        plan.allocations.store(1, Ordering::Relaxed);
        region.flush().expect_err("one extent is not allocated");
        plan.allocations.store(1, Ordering::Relaxed);
        region.flush().expect("it is now");
        assert_eq!(plan.created.lock().expect("nobody panics").len(), 2);
    }
}
