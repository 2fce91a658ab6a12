//! Pages that are read in the background: they arrive before they are needed, and are never older than what was written.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::{Duration, Instant};

use bluebridge::{Error as RemoteError, ReadRequest, Region, WriteRequest};

use super::*;

const PATIENCE: Duration = Duration::from_secs(20);

/// What a test does with the reads of the background thread, and sees of them.
#[derive(Default)]
struct Plan {
    /// They are answered, but do not return.
    holds: AtomicBool,
    /// One is being held.
    is_holding: AtomicBool,
    /// They fail.
    fails: AtomicBool,
    reads: AtomicUsize,
    /// The clients that were opened.
    clients: AtomicUsize,
}

/// Remote memory that follows a plan.
struct Planned {
    inner: Box<dyn RemoteMemory>,
    plan: Arc<Plan>,
    is_background: bool,
}

impl RemoteMemory for Planned {
    fn create(&mut self, length_bytes: u64) -> Result<Region, RemoteError> {
        self.inner.create(length_bytes)
    }

    fn delete(&mut self, region: Region) -> Result<(), RemoteError> {
        self.inner.delete(region)
    }

    fn read_many(&mut self, requests: &mut [ReadRequest<'_>]) -> Result<(), RemoteError> {
        if !self.is_background {
            return self.inner.read_many(requests);
        }
        self.plan.reads.fetch_add(1, Ordering::SeqCst);
        if self.plan.fails.load(Ordering::SeqCst) {
            return Err(RemoteError::Length);
        }
        self.inner.read_many(requests)?;
        let begun = Instant::now();
        while self.plan.holds.load(Ordering::SeqCst) {
            self.plan.is_holding.store(true, Ordering::SeqCst);
            assert!(begun.elapsed() < PATIENCE, "the test does not end the pause");
            std::thread::sleep(Duration::from_micros(100));
        }
        self.plan.is_holding.store(false, Ordering::SeqCst);
        Ok(())
    }

    fn write_many(&mut self, requests: &mut [WriteRequest<'_>]) -> Result<(), RemoteError> {
        self.inner.write_many(requests)
    }

    fn set_polling(&mut self, polls: bool) {
        // Only the background thread does so: there is no eviction thread.
        self.is_background |= !polls;
        self.inner.set_polling(polls);
    }
}

fn planned(
    rack: &(LocalRack, Vec<MemoryNode>),
    options: &RegionOptions,
) -> (RemoteRegion, Arc<Plan>) {
    let plan = Arc::new(Plan::default());
    let region = RemoteRegion::with_remotes(options, || {
        let node = NodeId(NEXT_CLIENT.fetch_add(1, Ordering::Relaxed));
        let mut config = EndpointConfig::new(SPACE, node, 1);
        config.memory_nodes.clone_from(&rack.1);
        let inner = Box::new(Client::open(config, rack.0.attach(node)));
        plan.clients.fetch_add(1, Ordering::SeqCst);
        let planned = Planned { inner, plan: Arc::clone(&plan), is_background: false };
        Ok::<_, Error>(Box::new(planned) as Box<dyn RemoteMemory>)
    });
    (region.expect("a region"), plan)
}

/// 1,024 pages, of which 512 may be local and up to 12 are read ahead.
fn options(mode: FaultMode) -> RegionOptions {
    RegionOptions::new(4 << 20, 2 << 20).mode(mode).evictor(false).lanes(2)
}

fn until(what: &str, holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Makes all pages leave.
fn evict(region: &RemoteRegion) {
    region.evict(0..region.len()).expect("the servers respond");
}

#[test]
fn a_stream_takes_what_was_read_meanwhile() {
    let rack = servers(1);
    for mode in MODES {
        let (mut region, plan) = planned(&rack, &options(mode));
        for round in 1.. {
            region.as_mut_slice().fill(round);
            evict(&region);
            for (number, page) in region.as_slice().chunks(PAGE).enumerate() {
                assert!(page.iter().all(|byte| *byte == round), "round {round}");
                if number % 16 == 0 {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            let seen = region.statistics();
            assert!(seen.background_used_pages <= seen.background_pages, "{seen:?}");
            // How much depends on how soon the thread gets a core. A fault that comes before it has begun reads itself.
            if seen.background_used_pages > 100 {
                break;
            }
            assert!(round < 250, "hardly anything is read in the background: {seen:?}");
        }
        assert!(plan.reads.load(Ordering::SeqCst) > 0);
        assert!(region.statistics().local_pages_max <= 512);
    }
}

#[test]
fn what_was_read_before_a_write_is_not_taken() {
    let rack = servers(1);
    for mode in MODES {
        for round in 0..10 {
            let (mut region, plan) = planned(&rack, &options(mode));
            region.as_mut_slice().fill(1);
            evict(&region);
            plan.holds.store(true, Ordering::SeqCst);
            let mut next = 0;
            let is_begun = || plan.reads.load(Ordering::SeqCst) > 0;
            while !is_begun() {
                assert_eq!(region.as_slice()[next * PAGE], 1);
                // Time for the thread to begin.
                std::thread::sleep(Duration::from_millis(1));
                next += 1;
                assert!(next < 512, "nothing is read in the background");
            }
            until("the read does not begin", || plan.is_holding.load(Ordering::SeqCst));
            // The window that is being read, and more. The first fault reads it itself after a while.
            let written = next..next + 40;
            for page in written.clone() {
                region.as_mut_slice()[page * PAGE] = 2;
            }
            evict(&region);
            plan.holds.store(false, Ordering::SeqCst);
            until("the read does not end", || !plan.is_holding.load(Ordering::SeqCst));
            for page in written {
                assert_eq!(region.as_slice()[page * PAGE], 2, "page {page}, round {round}");
            }
        }
    }
}

#[test]
fn a_background_read_that_fails_costs_nothing_but_time() {
    let rack = servers(1);
    for mode in MODES {
        let (mut region, plan) = planned(&rack, &options(mode));
        plan.fails.store(true, Ordering::SeqCst);
        region.as_mut_slice().fill(1);
        evict(&region);
        assert!(region.as_slice().iter().all(|byte| *byte == 1));
        until("nothing is tried", || plan.reads.load(Ordering::SeqCst) > 0);
        assert_eq!(region.statistics().background_pages, 0);
    }
}

#[test]
fn it_can_be_turned_off() {
    let rack = servers(1);
    let (mut region, plan) = planned(&rack, &options(FaultMode::InThread).background(false));
    region.as_mut_slice().fill(1);
    evict(&region);
    assert!(region.as_slice().iter().all(|byte| *byte == 1));
    let seen = region.statistics();
    assert_eq!((seen.background_pages, seen.background_used_pages), (0, 0));
    assert_eq!(plan.clients.load(Ordering::SeqCst), 3, "two lanes and eviction");
}
