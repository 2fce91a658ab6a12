//! Disks over memory servers in this process. They need no privilege.

include!("../../../client-lib/tests/support/rack.rs");

mod carrier;
mod contents;
mod lease_end;
mod no_allocation;
mod owners;
mod silence;
mod talk;
mod unknown;

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use bluebridge::{Client, EndpointConfig, MemoryNode, NodeId, Pointer, Service};
use bluebridge_blockdev::device::{
    Disk, DiskError, DiskOptions, Failure, Keeper, OpenOptions, Operation, Placement, Task,
};
use bluebridge_transport::Transport;
use bluebridge_transport::memory::MemoryTransport;
use rack::{LocalRack, SPACE};

const MIB: u64 = 1 << 20;
/// The node of the next client; each has its own, for good.
static NEXT_CLIENT: AtomicU16 = AtomicU16::new(1000);

type LocalClient = Client<MemoryTransport>;

/// Memory servers.
struct World {
    rack: LocalRack,
    nodes: Vec<MemoryNode>,
}

impl World {
    fn new(servers: u16, bytes: u64) -> Self {
        let nodes: Vec<_> = (1..=servers).map(NodeId).collect();
        let rack = LocalRack::start(&nodes, bytes);
        let nodes = nodes.into_iter().map(|node| MemoryNode { node, shard_count: 1 }).collect();
        Self { rack, nodes }
    }

    fn config(&self, node: NodeId) -> EndpointConfig {
        let mut config = EndpointConfig::new(SPACE, node, 1);
        config.memory_nodes.clone_from(&self.nodes);
        config.deadline = Duration::from_secs(2);
        config
    }

    fn client(&self) -> LocalClient {
        let node = NodeId(NEXT_CLIENT.fetch_add(1, Ordering::Relaxed));
        Client::open(self.config(node), self.rack.attach(node))
    }

    /// A client whose leases are renewed.
    fn owner(&self) -> LocalClient {
        let node = NodeId(NEXT_CLIENT.fetch_add(1, Ordering::Relaxed));
        let (mut carriers, port) = self.rack.attach_endpoint(node, 1);
        let service = Service::start(&self.config(node), port).expect("a thread");
        let config = EndpointConfig { service: Some(service), ..self.config(node) };
        Client::open(config, carriers.pop().expect("one"))
    }

    fn open_options(&self) -> OpenOptions {
        OpenOptions {
            deadline: Duration::from_secs(2),
            lease: Duration::from_secs(1),
            nodes: self.nodes.iter().map(|node| node.node).collect(),
        }
    }

    fn create(&self, size_bytes: u64, placement: Placement) -> Pointer {
        Disk::create(&mut self.client(), &options(size_bytes, placement)).expect("there is room")
    }

    fn attach(&self, pointer: Pointer) -> (Arc<Disk>, Keeper<MemoryTransport>) {
        let attached = Disk::attach(self.owner(), pointer, self.open_options());
        attached.unwrap_or_else(|error| panic!("{error}"))
    }

    /// Pages in use on each server.
    fn used_pages(&self) -> Vec<u64> {
        let mut client = self.client();
        let used = |node: &MemoryNode| client.stat(node.node).expect("it responds").used_pages;
        self.nodes.iter().map(used).collect()
    }
}

fn options(size_bytes: u64, placement: Placement) -> DiskOptions {
    DiskOptions { size_bytes, slab_bytes: MIB, placement, name: "disk".to_owned(), id: 77 }
}

/// A byte that differs from those of neighbouring numbers.
fn byte(number: u64) -> u8 {
    number.to_le_bytes()[0]
}

fn length(bytes: usize) -> u32 {
    u32::try_from(bytes).expect("short")
}

/// Executes one request; returns the bytes of a READ.
fn single<T: Transport>(
    disk: &Disk,
    client: &mut Client<T>,
    operation: Operation,
    offset: u64,
    length: u32,
) -> Result<Vec<u8>, Failure> {
    let read = if operation == Operation::Read { length as usize } else { 0 };
    let mut output = vec![0xee; read];
    let mut tasks = [Task::new(operation, offset, length, 0..read)];
    disk.execute(client, &mut tasks, &[], &mut output);
    tasks[0].result.expect("it has ended").map(|()| output)
}

fn read<T: Transport>(
    disk: &Disk,
    client: &mut Client<T>,
    offset: u64,
    bytes: u32,
) -> Result<Vec<u8>, Failure> {
    single(disk, client, Operation::Read, offset, bytes)
}

fn write<T: Transport>(
    disk: &Disk,
    client: &mut Client<T>,
    offset: u64,
    bytes: &[u8],
) -> Result<(), Failure> {
    let mut tasks = [Task::new(Operation::Write, offset, length(bytes.len()), 0..bytes.len())];
    disk.execute(client, &mut tasks, bytes, &mut []);
    tasks[0].result.expect("it has ended")
}
