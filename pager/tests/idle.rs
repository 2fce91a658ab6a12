//! A region that nobody uses costs nothing. The only test of its process, because it counts the process's time.
#![allow(unsafe_code, reason = "getrusage")]

include!("../../client-lib/tests/support/rack.rs");

use std::time::{Duration, Instant};

use bluebridge::{Client, EndpointConfig, MemoryNode, NodeId};
use bluebridge_pager::{Error, FaultMode, RegionOptions, RemoteMemory, RemoteRegion};

/// The processor time that this process used.
fn used() -> Duration {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the call fills the structure.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) };
    // SAFETY: zeros are valid too.
    let usage = unsafe { usage.assume_init() };
    let time = |time: libc::timeval| {
        Duration::from_micros(u64::try_from(time.tv_sec * 1_000_000 + time.tv_usec).unwrap_or(0))
    };
    time(usage.ru_utime) + time(usage.ru_stime)
}

/// The share of a core that this process uses for a second.
fn share() -> f64 {
    let (begun, before) = (Instant::now(), used());
    std::thread::sleep(Duration::from_secs(1));
    (used() - before).as_secs_f64() / begun.elapsed().as_secs_f64()
}

#[test]
fn a_region_that_nobody_uses_costs_nothing() {
    let node = NodeId(1);
    let rack = rack::LocalRack::start(&[node], 64 << 20);
    let mut next = 1000;
    for mode in [FaultMode::InThread, FaultMode::Threads { count: 2 }] {
        let options = RegionOptions::new(8 << 20, 1 << 20).mode(mode);
        let mut region = RemoteRegion::with_remotes(&options, || {
            next += 1;
            let mut config = EndpointConfig::new(rack::SPACE, NodeId(next), 1);
            config.memory_nodes = vec![MemoryNode { node, shard_count: 1 }];
            let client = Client::open(config, rack.attach(NodeId(next)));
            Ok::<_, Error>(Box::new(client) as Box<dyn RemoteMemory>)
        })
        .expect("a region");
        region.as_mut_slice().fill(1);
        // The server spins for a while after the last request.
        std::thread::sleep(Duration::from_millis(500));
        let share = share();
        assert!(share < 0.02, "{share} of a core with {mode:?}");
    }
}
