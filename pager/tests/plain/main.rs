//! Regions over memory servers in this process. They need no privilege.
#![allow(unsafe_code, reason = "threads share a region by its address")]

include!("../../../client-lib/tests/support/rack.rs");

mod background;
mod contents;
mod failures;
mod forks;
mod gate;
mod losses;
mod model;
mod no_allocation;
mod page_model;
mod system_calls;

use std::sync::atomic::{AtomicU16, Ordering};

use bluebridge::{Client, EndpointConfig, MemoryNode, NodeId};
use bluebridge_pager::{Error, FaultMode, PageError, RegionOptions, RemoteMemory, RemoteRegion};
use rack::{LocalRack, SPACE};

/// Bytes of a page.
const PAGE: usize = 4096;
/// The node of the next client; each has its own, for good.
static NEXT_CLIENT: AtomicU16 = AtomicU16::new(1000);

/// The ways to resolve faults.
const MODES: [FaultMode; 2] = [FaultMode::InThread, FaultMode::Threads { count: 2 }];

/// Memory servers `1..=count` with 64 MiB each.
fn servers(count: u16) -> (LocalRack, Vec<MemoryNode>) {
    let nodes: Vec<_> = (1..=count).map(NodeId).collect();
    let rack = LocalRack::start(&nodes, 64 << 20);
    let memory_nodes = nodes.iter().map(|node| MemoryNode { node: *node, shard_count: 1 });
    (rack, memory_nodes.collect())
}

/// A region in a rack, with clients that give up soon.
fn region(
    (rack, nodes): &(LocalRack, Vec<MemoryNode>),
    options: &RegionOptions,
) -> Result<RemoteRegion, Error> {
    RemoteRegion::with_remotes(options, || {
        let node = NodeId(NEXT_CLIENT.fetch_add(1, Ordering::Relaxed));
        let mut config = EndpointConfig::new(SPACE, node, 1);
        config.memory_nodes.clone_from(nodes);
        config.deadline = std::time::Duration::from_secs(2);
        let client: Box<dyn RemoteMemory> = Box::new(Client::open(config, rack.attach(node)));
        Ok(client)
    })
}

/// The pages of a region that are local, by the system's own count.
fn resident_pages(region: &RemoteRegion) -> usize {
    let mut states = vec![0_u8; region.len().div_ceil(PAGE)];
    let start = region.as_ptr().as_ptr().cast();
    // SAFETY: the range is mapped, and the vector has a byte for each page.
    let result = unsafe { libc::mincore(start, region.len(), states.as_mut_ptr()) };
    assert_eq!(result, 0, "mincore: {}", std::io::Error::last_os_error());
    states.iter().filter(|state| **state & 1 == 1).count()
}
