//! A region that nobody uses costs nothing. The only test of its process, because it counts the process's time.

include!("../../client-lib/tests/support/rack.rs");

use std::fs;
use std::time::{Duration, Instant};

use bluebridge::{Client, EndpointConfig, MemoryNode, NodeId};
use bluebridge_pager::{Error, FaultMode, RegionOptions, RemoteMemory, RemoteRegion};

/// How long the threads of this process ran. Not in clock ticks, of which a thread gets a whole one if it runs for a
/// moment when the clock ticks.
fn used() -> Duration {
    let threads = fs::read_dir("/proc/self/task").expect("this process has threads");
    let ran = threads.map(|thread| {
        let file = thread.expect("a thread").path().join("schedstat");
        // A thread that ends meanwhile is none of those that wait for faults.
        let text = fs::read_to_string(file).unwrap_or_default();
        text.split(' ').next().and_then(|nanos| nanos.parse().ok()).unwrap_or(0)
    });
    Duration::from_nanos(ran.sum())
}

/// The share of a core that this process uses for a second.
fn share() -> f64 {
    let (begun, before) = (Instant::now(), used());
    std::thread::sleep(Duration::from_secs(1));
    used().saturating_sub(before).as_secs_f64() / begun.elapsed().as_secs_f64()
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
        println!("{share} of a core with {mode:?}");
        assert!(share < 0.02, "{share} of a core with {mode:?}");
    }
}
